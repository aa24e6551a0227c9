/*
 * executor.c
 *	  The process that delivers the due tasks of one owner's queues into PostgreSQL. Its
 *	  session is logged in as that owner: what a sink's triggers do, they do with his
 *	  rights and nobody else's, and there is no other role to return to. Started by the
 *	  launcher; the work itself is the deliver room's.
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/namespace.h"
#include "catalog/pg_authid.h"
#include "commands/async.h"
#include "commands/prepare.h"
#include "commands/sequence.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lock.h"
#include "tcop/tcopprot.h"
#include "utils/guc.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/plancache.h"
#include "utils/portal.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "deliver/deliver.h"
#include "redis/redis.h"
#include "settings.h"
#include "shared/shared.h"
#include "worker/worker.h"

#define MAX_SLEEP_MS	500
#define CHECK_MS		50
#define AWAY_MS			3000
#define THRIVE_MS		10000
#define EXECUTOR_LOCK_CLASS 0xd4b2

static Oid	my_owner;
static TimestampTz checked_at = 0;

static void
leave(const char *why, const char *state, int respawn_ms)
{
	ereport(dq_log_level, (errmsg("dq_bridge executor leaves: %s", why)));
	dq_worker_leaving(state, respawn_ms);
	proc_exit(0);
}

/* Called at each wake, and by the redis room while it waits. */
static void
check_reasons(void)
{
	TimestampTz now;

	/* between two batches there is nothing to cancel */
	if (!IsTransactionState())
		QueryCancelPending = false;
	CHECK_FOR_INTERRUPTS();
	/* each time: who asks wakes us once */
	if (dq_database_stopped(MyDatabaseId))
		leave("dq_worker_stop", "stopped", 0);
	now = GetCurrentTimestamp();
	if (!TimestampDifferenceExceeds(checked_at, now, CHECK_MS) && now >= checked_at)
		return;
	checked_at = now;
	if (dq_database_is_waited_for(MyDatabaseId))
	{
		dq_worker_thrives();
		leave("another session wants the database for itself", "waiting", AWAY_MS);
	}
}

static void
set_setting(const char *name, const char *value)
{
	SetConfigOption(name, value, PGC_SUSET, PGC_S_OVERRIDE);
}

/*
 * What ALTER ROLE SET must not change under us. search_path and the like stay the
 * owner's: his triggers run as in any session of his.
 */
static void
fix_settings(void)
{
	set_setting("statement_timeout", "0");
	set_setting("lock_timeout", "1000");
	set_setting("idle_in_transaction_session_timeout", "0");
	set_setting("idle_session_timeout", "0");
#ifdef DQ_TRANSACTION_TIMEOUT
	set_setting("transaction_timeout", "0");
#endif
	set_setting("default_transaction_read_only", "off");
	set_setting("default_transaction_isolation", "read committed");
	set_setting("default_transaction_deferrable", "off");
	set_setting("session_replication_role", "origin");
	if (synchronous_commit < SYNCHRONOUS_COMMIT_REMOTE_FLUSH)
		set_setting("synchronous_commit", "on");
}

/*
 * What one batch has left in the session must not be there for the next: as DISCARD ALL
 * does, outside a transaction block.
 */
static void
forget_session(void)
{
	StartTransactionCommand();
	PortalHashTableDeleteAll();
	SetPGVariable("session_authorization", NIL, false);
	ResetAllOptions();
	DropAllPreparedStatements();
	Async_UnlistenAll();
	LockReleaseAll(USER_LOCKMETHOD, true);
	ResetTempTableNamespace();
	ResetSequenceCaches();
	fix_settings();
	CommitTransactionCommand();
}

/* One executor for an owner: two would only be in each other's way. */
static bool
lock_owner(void)
{
	MemoryContext context = CurrentMemoryContext;
	LOCKTAG		tag;
	bool		got;

	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, my_owner, 0, EXECUTOR_LOCK_CLASS);
	StartTransactionCommand();
	got = LockAcquire(&tag, ExclusiveLock, true, true) != LOCKACQUIRE_NOT_AVAIL;
	CommitTransactionCommand();
	MemoryContextSwitchTo(context);
	return got;
}

static bool
may_log_in(void)
{
	MemoryContext context = CurrentMemoryContext;
	HeapTuple	tuple;
	bool		may = false;

	StartTransactionCommand();
	tuple = SearchSysCache1(AUTHOID, ObjectIdGetDatum(my_owner));
	if (HeapTupleIsValid(tuple))
	{
		may = true;
#ifdef DQ_EXECUTOR_NEEDS_LOGIN
		may = ((Form_pg_authid) GETSTRUCT(tuple))->rolcanlogin;
#endif
		ReleaseSysCache(tuple);
	}
	CommitTransactionCommand();
	MemoryContextSwitchTo(context);
	return may;
}

static bool look_due = true;

static void
role_changed(Datum arg, int cacheid, uint32 hashvalue)
{
	look_due = true;
}

static void
look_around(void)
{
	DqLookResult result;

	look_due = false;
	dq_look(&result);
	if (result.look != DQ_LOOK_HERE)
	{
		dq_worker_forget();
		leave("the extension is not there, or of another version", "down", 0);
	}
	if (!may_log_in())
	{
		dq_worker_forget();
		leave("the owner may not log in any more", "down", 0);
	}
}

static void
serve(MemoryContext loop_context, uint32 wait_event)
{
	DqDeliver  *deliver = dq_deliver_create();
	TimestampTz started_at = GetCurrentTimestamp();
	uint64		served = dq_deliver_batches(deliver);

	dq_worker_state("running");
	ereport(dq_log_level, (errmsg("dq_bridge executor started")));
	for (;;)
	{
		long		sleep_ms;

		MemoryContextSwitchTo(loop_context);
		MemoryContextReset(loop_context);
		ResetLatch(MyLatch);
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
			fix_settings();
		}
		if (!dq_enabled)
			leave("dq_bridge.enabled is off", "disabled", 0);
		check_reasons();
		if (look_due || dq_look_is_due())
			look_around();

		pgstat_report_activity(STATE_RUNNING, "dq_bridge: deliver");
		sleep_ms = dq_deliver_round(deliver);
		MemoryContextSwitchTo(loop_context);
		if (dq_deliver_batches(deliver) != served)
		{
			served = dq_deliver_batches(deliver);
			forget_session();
			MemoryContextSwitchTo(loop_context);
		}
		(void) pgstat_report_stat(false);
		if (dq_deliver_is_idle(deliver))
		{
			dq_worker_forget();
			leave("its owner has no queue with a sink", "down", 0);
		}
		if (TimestampDifferenceExceeds(started_at, GetCurrentTimestamp(), THRIVE_MS))
			dq_worker_thrives();
		pgstat_report_activity(STATE_IDLE, NULL);
		if (sleep_ms > 0)
			(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
							 Min(sleep_ms, MAX_SLEEP_MS), wait_event);
	}
}

void
dq_executor_main(Datum main_arg)
{
	Oid			dboid = DatumGetObjectId(main_arg);
	MemoryContext loop_context;
	uint32		wait_event;

	memcpy(&my_owner, MyBgworkerEntry->bgw_extra, sizeof(my_owner));
	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnectionByOid(dboid, my_owner, DQ_EXECUTOR_LOGIN);
	fix_settings();

	loop_context = AllocSetContextCreate(TopMemoryContext, "dq_bridge executor round",
										 ALLOCSET_DEFAULT_SIZES);
	MemoryContextSwitchTo(loop_context);
	(void) dq_shared();
	wait_event = DqWaitEventNew("DqBridgeExecutor");
	CacheRegisterSyscacheCallback(AUTHOID, role_changed, (Datum) 0);

	if (dq_worker_claim(DQ_ROLE_EXECUTOR, MyDatabaseId, my_owner) == NULL)
		proc_exit(0);			/* such an executor lives */
	pgstat_report_activity(STATE_IDLE, NULL);
	dq_redis_wait_hook = check_reasons;
	while (!lock_owner())
	{
		dq_worker_state("waiting");
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, 200,
						 wait_event);
		ResetLatch(MyLatch);
		check_reasons();
	}
	serve(loop_context, wait_event);
}
