/*
 * register.c
 *	  How PostgreSQL is asked to start our processes. Called from _PG_init (the
 *	  launcher of all databases), dq_worker_start (a launcher of one database,
 *	  when the library is not preloaded) and the launcher (bridges).
 */
#include "postgres.h"

#include "miscadmin.h"
#include "postmaster/bgworker.h"

#include "shared/shared.h"

static void
fill_worker(BackgroundWorker *worker, const char *type, const char *function)
{
	memset(worker, 0, sizeof(*worker));
	worker->bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	/* a standby has nothing to move; after its promotion it has */
	worker->bgw_start_time = BgWorkerStart_RecoveryFinished;
	strlcpy(worker->bgw_library_name, "dq_bridge", sizeof(worker->bgw_library_name));
	strlcpy(worker->bgw_function_name, function, sizeof(worker->bgw_function_name));
	strlcpy(worker->bgw_type, type, sizeof(worker->bgw_type));
	strlcpy(worker->bgw_name, type, sizeof(worker->bgw_name));
}

static void
fill_launcher(BackgroundWorker *worker, Oid dboid)
{
	fill_worker(worker, "dq_bridge launcher", "dq_launcher_main");
	worker->bgw_restart_time = 5;
	worker->bgw_main_arg = ObjectIdGetDatum(dboid);
}

void
dq_register_static_launcher(void)
{
	BackgroundWorker worker;

	fill_launcher(&worker, InvalidOid);
	RegisterBackgroundWorker(&worker);
}

BackgroundWorkerHandle *
dq_register_launcher(Oid dboid)
{
	BackgroundWorker worker;
	BackgroundWorkerHandle *handle;

	fill_launcher(&worker, dboid);
	worker.bgw_notify_pid = MyProcPid;
	return RegisterDynamicBackgroundWorker(&worker, &handle) ? handle : NULL;
}

BackgroundWorkerHandle *
dq_register_executor(Oid dboid, Oid owner, const char *database, const char *owner_name)
{
	BackgroundWorker worker;
	BackgroundWorkerHandle *handle;

	fill_worker(&worker, "dq_bridge executor", "dq_executor_main");
	snprintf(worker.bgw_name, sizeof(worker.bgw_name), "dq_bridge executor %s/%s",
			 database, owner_name);
	worker.bgw_restart_time = BGW_NEVER_RESTART;
	worker.bgw_main_arg = ObjectIdGetDatum(dboid);
	memcpy(worker.bgw_extra, &owner, sizeof(owner));
	worker.bgw_notify_pid = MyProcPid;
	return RegisterDynamicBackgroundWorker(&worker, &handle) ? handle : NULL;
}

/*
 * Never restarted by the postmaster: after a crash the launcher comes back with
 * empty shared memory and would start them a second time.
 */
BackgroundWorkerHandle *
dq_register_bridge(Oid dboid, Oid serverid, const char *database, const char *server)
{
	BackgroundWorker worker;
	BackgroundWorkerHandle *handle;

	fill_worker(&worker, "dq_bridge worker", "dq_bridge_main");
	snprintf(worker.bgw_name, sizeof(worker.bgw_name), "dq_bridge worker %s%s%s",
			 database, server[0] ? "/" : "", server);
	worker.bgw_restart_time = BGW_NEVER_RESTART;
	worker.bgw_main_arg = ObjectIdGetDatum(dboid);
	memcpy(worker.bgw_extra, &serverid, sizeof(serverid));
	worker.bgw_notify_pid = MyProcPid;
	return RegisterDynamicBackgroundWorker(&worker, &handle) ? handle : NULL;
}
