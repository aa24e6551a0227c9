/*
 * workers.c
 *	  dq_worker_start, dq_worker_stop, the rows of dq_workers, and dq_created,
 *	  which CREATE EXTENSION calls.
 */
#include "postgres.h"

#include <signal.h>

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/pg_authid.h"
#include "commands/dbcommands.h"
#include "commands/extension.h"
#include "fmgr.h"
#include "funcapi.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "storage/latch.h"
#include "tcop/utility.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "api/api.h"
#include "api/views.h"
#include "compat.h"
#include "queue/queue.h"
#include "settings.h"
#include "shared/shared.h"

#define STOP_TERM_MS	1000	/* then SIGTERM */
#define STOP_MAX_MS		5000	/* then give up */

PG_FUNCTION_INFO_V1(dq_worker_start);
PG_FUNCTION_INFO_V1(dq_worker_stop);
PG_FUNCTION_INFO_V1(dq_workers_rows);
PG_FUNCTION_INFO_V1(dq_created);

static void
check_may_control(const char *function)
{
	if (!superuser() && !has_privs_of_role(GetUserId(), ROLE_PG_SIGNAL_BACKEND))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied for function %s", function),
				 errdetail("Only superusers and members of pg_signal_backend may start and stop workers.")));
}

static void
set_stopped(bool stopped)
{
	DqShared   *s = dq_shared();
	DqDatabase *db;

	LWLockAcquire(&s->lock, LW_EXCLUSIVE);
	db = dq_database_entry(MyDatabaseId, stopped);
	if (db != NULL)
		db->stopped = stopped;
	if (!stopped)
	{
		/* what was ended on purpose, however often, has not failed */
		if (db != NULL)
		{
			db->failures = 0;
			db->not_before = 0;
		}
		for (int i = 0; i < DQ_MAX_WORKERS; i++)
		{
			DqWorkerSlot *slot = &s->workers[i];

			if (slot->in_use && slot->role != DQ_ROLE_LAUNCHER &&
				slot->dboid == MyDatabaseId)
			{
				slot->failures = 0;
				slot->not_before = 0;
			}
		}
	}
	LWLockRelease(&s->lock);
	if (stopped && db == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("cannot stop the workers of this database: the table of %d databases is full",
						DQ_MAX_DATABASES),
				 errhint("Set dq_bridge.enabled = off to stop the workers of all databases.")));
}

/*
 * dq_worker_start() returns void
 *
 * Ends a dq_worker_stop. Without preloading it starts a launcher for this
 * database. 42501, 25006 (standby), 53400 (no free worker slot).
 */
Datum
dq_worker_start(PG_FUNCTION_ARGS)
{
	check_may_control("dq_worker_start");
	PreventCommandDuringRecovery("dq_worker_start()");

	set_stopped(false);
	if (!dq_enabled)
		ereport(WARNING,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("dq_bridge.enabled is off: workers will start when it is turned on")));

	if (!dq_is_preloaded() && !dq_launcher_alive(MyDatabaseId))
	{
		BackgroundWorkerHandle *handle = dq_register_launcher(MyDatabaseId);
		pid_t		pid;

		if (handle == NULL)
			ereport(ERROR,
					(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
					 errmsg("could not start a worker of dq_bridge: no free slot in max_worker_processes (%d)",
							max_worker_processes),
					 errhint("Raise max_worker_processes: dq_bridge needs 1 + the number of servers.")));
		if (WaitForBackgroundWorkerStartup(handle, &pid) != BGWH_STARTED)
			ereport(ERROR,
					(errcode(ERRCODE_INSUFFICIENT_RESOURCES),
					 errmsg("could not start a worker of dq_bridge"),
					 errhint("More details may be available in the server log.")));
	}

	/* now, and again if this transaction has created something */
	dq_poke(MyDatabaseId);
	dq_wake_launcher();
	dq_poke_at_commit();
	PG_RETURN_VOID();
}

/* Processes of this database, optionally sending them a signal. */
static int
count_workers(int signal)
{
	DqShared   *s = dq_shared();
	int			n = 0;

	/*
	 * A process gives up its slot under this lock before it ends, so the pid is
	 * its own while we hold it.
	 */
	LWLockAcquire(&s->lock, LW_SHARED);
	for (int i = 0; i < DQ_MAX_WORKERS; i++)
	{
		DqWorkerSlot *slot = &s->workers[i];

		if (slot->in_use && slot->pid != 0 && slot->dboid == MyDatabaseId)
		{
			n++;
			if (signal != 0)
				kill(slot->pid, signal);
		}
	}
	LWLockRelease(&s->lock);
	return n;
}

/*
 * dq_worker_stop() returns void
 *
 * Returns when the workers of this database are gone, or after 5 seconds with a
 * warning. Holds until dq_worker_start() or a restart of the server.
 */
Datum
dq_worker_stop(PG_FUNCTION_ARGS)
{
	TimestampTz start = GetCurrentTimestamp();
	bool		termed = false;

	check_may_control("dq_worker_stop");
	PreventCommandDuringRecovery("dq_worker_stop()");

	set_stopped(true);
	dq_wake_workers(MyDatabaseId);
	dq_wake_launcher();

	while (count_workers(0) > 0)
	{
		TimestampTz now = GetCurrentTimestamp();

		if (!termed && TimestampDifferenceExceeds(start, now, STOP_TERM_MS))
		{
			(void) count_workers(SIGTERM);
			termed = true;
		}
		if (TimestampDifferenceExceeds(start, now, STOP_MAX_MS))
		{
			ereport(WARNING,
					(errcode(ERRCODE_OBJECT_IN_USE),
					 errmsg("workers of dq_bridge are still running"),
					 errhint("They leave as soon as they can; see view dq_workers.")));
			break;
		}
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 20, PG_WAIT_EXTENSION);
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
	}
	PG_RETURN_VOID();
}

/*
 * A text written by a worker of another database may be in another encoding:
 * what is not valid here is shown as question marks.
 */
static Datum
foreign_text(const char *text)
{
	char	   *copy = pstrdup(text);

	if (!pg_verifymbstr(copy, strlen(copy), true))
	{
		for (char *p = copy; *p; p++)
		{
			if (IS_HIGHBIT_SET(*p))
				*p = '?';
		}
	}
	return CStringGetTextDatum(copy);
}

Datum
dq_warnings_array(const char *newline_separated)
{
	ArrayBuildState *state = initArrayResult(TEXTOID, CurrentMemoryContext, false);
	char	   *copy = pstrdup(newline_separated);
	char	   *save = NULL;

	for (char *line = strtok_r(copy, "\n", &save); line; line = strtok_r(NULL, "\n", &save))
		state = accumArrayResult(state, foreign_text(line), false, TEXTOID,
								 CurrentMemoryContext);
	return makeArrayResult(state, CurrentMemoryContext);
}

/* Any right on any queue of the server? */
static bool
may_see_server(Oid serverid)
{
	ListCell   *lc;

	foreach(lc, dq_queue_list(serverid))
	{
		if (dq_has_any_right(lfirst_oid(lc)))
			return true;
	}
	return false;
}

/* A bridge of one's queues, one's own executor */
static bool
may_see(const DqWorkerSlot *slot)
{
	if (slot->dboid != MyDatabaseId)
		return false;
	if (slot->role == DQ_ROLE_EXECUTOR)
		return has_privs_of_role(GetUserId(), slot->serverid);
	return slot->role == DQ_ROLE_BRIDGE && may_see_server(slot->serverid);
}

/*
 * Rows of dq_workers: the processes, and those that are wanted and have none at the
 * moment (pid NULL). pg_monitor sees all, others the bridges of queues on which they
 * have a right, and their own executor.
 */
Datum
dq_workers_rows(PG_FUNCTION_ARGS)
{
	enum
	{
		PID, ROLE, DATABASE, SERVER, OWNER, STATE, SINCE, RECONNECTS,
		LAST_ERROR, LAST_ERROR_AT, WARNINGS, NCOLS
	};
	static const char *const roles[] = {"launcher", "bridge", "executor"};
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	bool		see_all = has_privs_of_role(GetUserId(), ROLE_PG_MONITOR);
	DqShared   *s = dq_shared();
	DqWorkerSlot *slots = palloc(sizeof(s->workers));

	InitMaterializedSRF(fcinfo, 0);

	/* a copy: what follows reads catalogs */
	LWLockAcquire(&s->lock, LW_SHARED);
	memcpy(slots, s->workers, sizeof(s->workers));
	LWLockRelease(&s->lock);

	for (int i = 0; i < DQ_MAX_WORKERS; i++)
	{
		DqWorkerSlot *slot = &slots[i];
		Datum		values[NCOLS] = {0};
		bool		nulls[NCOLS] = {0};
		NameData	server;
		NameData	database;
		char	   *dbname = NULL;

		if (!slot->in_use)
			continue;
		if (!see_all && !may_see(slot))
			continue;

		values[PID] = Int32GetDatum(slot->pid);
		nulls[PID] = slot->pid == 0;
		values[ROLE] = CStringGetTextDatum(roles[slot->role]);
		if (OidIsValid(slot->dboid))
			dbname = get_database_name(slot->dboid);
		if (dbname != NULL)
			namestrcpy(&database, dbname);
		values[DATABASE] = NameGetDatum(&database);
		nulls[DATABASE] = dbname == NULL;
		/* of an executor it is the owner's name */
		namestrcpy(&server, TextDatumGetCString(foreign_text(slot->server)));
		values[SERVER] = values[OWNER] = NameGetDatum(&server);
		nulls[SERVER] = slot->server[0] == '\0' || slot->role == DQ_ROLE_EXECUTOR;
		nulls[OWNER] = slot->role != DQ_ROLE_EXECUTOR;
		values[STATE] = CStringGetTextDatum(slot->state);
		values[SINCE] = TimestampTzGetDatum(slot->since);
		values[RECONNECTS] = Int64GetDatum(slot->reconnects);
		values[LAST_ERROR] = foreign_text(slot->last_error);
		nulls[LAST_ERROR] = slot->last_error[0] == '\0';
		values[LAST_ERROR_AT] = TimestampTzGetDatum(slot->last_error_at);
		nulls[LAST_ERROR_AT] = slot->last_error_at == 0;
		values[WARNINGS] = dq_warnings_array(slot->warnings);
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
	return (Datum) 0;
}

static bool hint_pending = false;

/*
 * The script of an extension runs with client_min_messages = warning, so the
 * notice waits for the commit; workers could not be started earlier anyway.
 */
static void
hint_at_commit(XactEvent event, void *arg)
{
	if (!hint_pending || event == XACT_EVENT_PARALLEL_PRE_COMMIT)
		return;
	hint_pending = false;
	if (event == XACT_EVENT_PRE_COMMIT && !dq_launcher_alive(MyDatabaseId))
		ereport(NOTICE,
				(errmsg("no workers of dq_bridge are running: offers are recorded, but not handed to Redis"),
				 errhint("SELECT dq_worker_start(); or add dq_bridge to shared_preload_libraries.")));
}

/*
 * The last statement of CREATE EXTENSION. The server's life gets its name. A running launcher serves the database
 * from the commit on; otherwise say how to start workers.
 */
Datum
dq_created(PG_FUNCTION_ARGS)
{
	static bool registered = false;

	if (!creating_extension)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("dq_created() is called by CREATE EXTENSION only"),
				 errhint("To start the workers, SELECT dq_worker_start();")));
	if (IsBinaryUpgrade)
		PG_RETURN_VOID();

	/* so that pages sent by hand before a worker comes are known again as well */
	(void) dq_lives_look(true);
	dq_poke_at_commit();
	if (!dq_is_preloaded())
	{
		if (!registered)
		{
			RegisterXactCallback(hint_at_commit, NULL);
			registered = true;
		}
		hint_pending = true;
	}
	PG_RETURN_VOID();
}
