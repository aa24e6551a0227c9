/*
 * bridge.c
 *	  The process that serves one server of one database: it calls the relay
 *	  room's dq_bridge_round whenever something may have happened, and knows when
 *	  to leave. Started by the launcher; without a server it only looks which
 *	  servers the database has.
 *
 *	  It must never be in the way: it holds no transaction and no lock on a table
 *	  between rounds, and it leaves within a second when somebody wants to drop,
 *	  copy or rename the database, also while it waits for Redis.
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/condition_variable.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lock.h"
#include "storage/lwlock.h"
#include "tcop/tcopprot.h"
#include "utils/guc.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "redis/redis.h"
#include "relay/relay.h"
#include "settings.h"
#include "shared/shared.h"
#include "worker/worker.h"

#define MAX_SLEEP_MS	1000	/* COMMIT PREPARED by a session without the library
								 * and waiters for the database send no signal */
#define CHECK_MS		50		/* between two looks for reasons to leave */
#define YIELD_MS		200		/* while somebody drops the extension, or relays
								 * by hand */
#define AWAY_MS			3000	/* from leaving a database that somebody wants */
#define THRIVE_MS		10000	/* alive so long: no backoff for the next one */

static Oid	my_server;
static char my_server_name[NAMEDATALEN];
static DqBridge *bridge = NULL;
static Oid	extension;			/* its lock is held during a round ... */
static bool in_round = false;	/* ... which is now */
static TimestampTz round_at;	/* when it began */
static TimestampTz checked_at = 0;
static TimestampTz started_at;
static uint64 progress;			/* the relay's, at the last failure */
static uint32 wait_event;

/* A wanted exit: no trace in the log above log_level, no error. */
static void
leave(const char *why, const char *state, int respawn_ms)
{
	ereport(dq_log_level,
			(errmsg("dq_bridge worker of server \"%s\" leaves: %s", my_server_name, why)));
	dq_worker_leaving(state, respawn_ms);
	proc_exit(0);
}

/*
 * Reasons to leave that can come up at any moment. Called at each wake, and by
 * the redis room while it waits (dq_redis_wait_hook).
 */
static void
check_reasons(void)
{
	TimestampTz now;

	/* pg_cancel_backend ends a round; between two there is nothing to cancel */
	if (!in_round)
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
	if (in_round && dq_extension_is_waited_for(extension))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_IN_USE),
				 errmsg("round given up because the extension is being dropped")));
	/* a silent Redis must not delay dq_bridge.enabled = off */
	if (in_round && ConfigReloadPending &&
		TimestampDifferenceExceeds(round_at, now, MAX_SLEEP_MS))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_IN_USE),
				 errmsg("round given up because the configuration has changed")));
}

static void
set_setting(const char *name, const char *value)
{
	SetConfigOption(name, value, PGC_SUSET, PGC_S_OVERRIDE);
}

/* What ALTER DATABASE SET and ALTER ROLE SET must not change under us. */
static void
fix_settings(void)
{
	set_setting("statement_timeout", "0");
	set_setting("lock_timeout", "0");
	set_setting("idle_in_transaction_session_timeout", "0");
	set_setting("idle_session_timeout", "0");
#ifdef DQ_TRANSACTION_TIMEOUT
	set_setting("transaction_timeout", "0");
#endif
	set_setting("default_transaction_read_only", "off");
	set_setting("default_transaction_isolation", "read committed");
	set_setting("default_transaction_deferrable", "off");
	set_setting("row_security", "on");
	set_setting("search_path", "pg_catalog, pg_temp");
	set_setting("session_replication_role", "origin");
}

/* PO 1: commits that the relay builds on are flushed, here and at the standby. */
static void
fix_synchronous_commit(void)
{
	if (synchronous_commit < SYNCHRONOUS_COMMIT_REMOTE_FLUSH)
		set_setting("synchronous_commit", "on");
}

/* Look around again; leaves when nothing is to be served here any more. */
static void
look_around(bool first)
{
	DqLookResult result;

	dq_look(&result);
	extension = result.extension;
	switch (result.look)
	{
		case DQ_LOOK_GONE:
			dq_worker_forget();
			leave("the extension is not there", "down", 0);
			break;
		case DQ_LOOK_CLOSED:
			dq_worker_forget();
			leave("the database is a template or takes no connections", "down", 0);
			break;
		case DQ_LOOK_VERSION:
			{
				DqWorkerSlot *slot = dq_worker_mine();
				char	   *message = psprintf("library %s does not work with extension version %s",
											   DQ_SQL_VERSION, result.version);

				/* the next process would say it again: once is enough */
				if (strcmp(slot->last_error, message) != 0)
				{
					dq_worker_error(message);
					ereport(WARNING,
							(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
							 errmsg("dq_bridge: %s", message),
							 errhint("Run ALTER EXTENSION dq_bridge UPDATE; or restart the server if the library was replaced.")));
				}
				leave("version", "version", first ? -1 : MAX_SLEEP_MS);
				break;
			}
		case DQ_LOOK_HERE:
			/* a server that goes while we run is for dq_bridge_is_gone */
			if (first && !list_member_oid(result.servers, my_server))
			{
				dq_worker_forget();
				leave("the server is gone", "down", 0);
			}
			break;
	}
}

/*
 * The abort of a transaction releases session locks, but a process that ends
 * outside of one leaves them behind, for ever.
 */
static void
release_extension_at_exit(int code, Datum arg)
{
	if (in_round && !IsTransactionState())
		dq_extension_exit(extension);
	in_round = false;
}

static bool
lock_server(void)
{
	MemoryContext context = CurrentMemoryContext;
	bool		got;

	StartTransactionCommand();
	got = dq_bridge_lock(my_server);
	CommitTransactionCommand();
	MemoryContextSwitchTo(context);
	return got;
}

/*
 * After an error in a round: clean up as a backend does between commands, say
 * what happened if it is news. Returns how long to wait before the next round.
 */
static long
recover(MemoryContext context)
{
	ErrorData  *edata;
	int			sqlstate;
	long		retry_ms;

	HOLD_INTERRUPTS();
	MemoryContextSwitchTo(context);
	edata = CopyErrorData();
	FlushErrorState();

	/* most of a round runs outside transactions, which the abort does not see */
	LWLockReleaseAll();
	ConditionVariableCancelSleep();
	pgstat_report_wait_end();
	AbortCurrentTransaction();
	LockReleaseAll(DEFAULT_LOCKMETHOD, true);
	in_round = false;
	MemoryContextSwitchTo(context);
	RESUME_INTERRUPTS();

	dq_bridge_reset(bridge);
	/* whatever went wrong may be because the extension or the server is gone */
	look_around(false);

	sqlstate = edata->sqlerrcode;
	if (sqlstate == ERRCODE_OBJECT_IN_USE || sqlstate == ERRCODE_QUERY_CANCELED)
		return YIELD_MS;

	/* a server that answers now and then is tried again soon */
	if (dq_bridge_progress(bridge) != progress)
		dq_failure_soften();
	progress = dq_bridge_progress(bridge);
	retry_ms = dq_failure_note(edata, my_server_name);
	dq_bridge_mark_down(bridge, edata->message);
	FreeErrorData(edata);
	return retry_ms;
}

/* Returns how long to sleep; in_round is false again. */
static long
do_round(void)
{
	MemoryContext context = CurrentMemoryContext;
	volatile long sleep_ms = 0;
	volatile bool failed = false;

	if (!dq_extension_enter(extension))
		return YIELD_MS;
	in_round = true;
	round_at = GetCurrentTimestamp();
	pgstat_report_activity(STATE_RUNNING, "dq_bridge: relay and transfer");

	PG_TRY();
	{
		sleep_ms = dq_bridge_round(bridge);
	}
	PG_CATCH();
	{
		failed = true;
		sleep_ms = recover(context);
	}
	PG_END_TRY();

	MemoryContextSwitchTo(context);
	if (failed)
	{
		/* an abort may have given up session locks as well */
		while (!lock_server())
		{
			dq_worker_state("waiting");
			(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
							 YIELD_MS, wait_event);
			ResetLatch(MyLatch);
			check_reasons();
		}
	}
	else
	{
		in_round = false;
		/* the abort of a transaction has released it */
		if (!dq_bridge_aborted(bridge))
			dq_extension_exit(extension);
		dq_failure_over(my_server_name);
	}

	/* autovacuum learns of our inserts; rate-limited by itself */
	(void) pgstat_report_stat(false);
	return sleep_ms;
}

/* Until the timeout, a latch (commits, signals) or the subscription. */
static void
sleep_until_event(long timeout_ms)
{
	pgsocket	sock = dq_bridge_socket(bridge);
	int			events = WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH;

	pgstat_report_activity(STATE_IDLE, NULL);

	/*
	 * The set of events is built anew each time: a socket that was closed and
	 * opened again may have the same number, which a kept set would not notice.
	 */
	if (sock != PGINVALID_SOCKET)
		events |= WL_SOCKET_READABLE;
	(void) WaitLatchOrSocket(MyLatch, events, sock, timeout_ms, wait_event);
}

static void
serve(MemoryContext loop_context)
{
	dq_worker_state("waiting");
	while (!lock_server())
	{
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 YIELD_MS, wait_event);
		ResetLatch(MyLatch);
		check_reasons();
	}

	dq_worker_state("starting");
	before_shmem_exit(release_extension_at_exit, (Datum) 0);
	dq_redis_wait_hook = check_reasons;
	bridge = dq_bridge_create(my_server);
	ereport(dq_log_level,
			(errmsg("dq_bridge worker of server \"%s\" started", my_server_name)));

	for (;;)
	{
		long		sleep_ms;

		MemoryContextSwitchTo(loop_context);
		MemoryContextReset(loop_context);

		/* reset before looking for work: what comes during it wakes us (A3) */
		ResetLatch(MyLatch);
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
			fix_synchronous_commit();
		}
		if (!dq_enabled)
			leave("dq_bridge.enabled is off", "disabled", 0);
		check_reasons();

		/*
		 * Outside a transaction, so that an idle bridge has none. An error in
		 * here would end the process, and the next one starts afresh.
		 */
		AcceptInvalidationMessages();
		if (dq_look_is_due())
			look_around(false);

		sleep_ms = do_round();

		if (dq_bridge_is_gone(bridge))
		{
			dq_worker_forget();
			leave("the server is gone", "down", 0);
		}
		if (TimestampDifferenceExceeds(started_at, GetCurrentTimestamp(), THRIVE_MS))
			dq_worker_thrives();
		if (sleep_ms > 0)
			sleep_until_event(Min(sleep_ms, MAX_SLEEP_MS));
	}
}

void
dq_bridge_main(Datum main_arg)
{
	Oid			dboid = DatumGetObjectId(main_arg);
	MemoryContext loop_context;
	DqWorkerSlot *slot;

	memcpy(&my_server, MyBgworkerEntry->bgw_extra, sizeof(my_server));

	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, die);
	fix_settings();
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnectionByOid(dboid, InvalidOid, 0);
	fix_synchronous_commit();

	started_at = GetCurrentTimestamp();
	loop_context = AllocSetContextCreate(TopMemoryContext, "dq_bridge worker round",
										 ALLOCSET_DEFAULT_SIZES);
	MemoryContextSwitchTo(loop_context);
	(void) dq_shared();
	wait_event = DqWaitEventNew("DqBridgeWorker");

	if (!OidIsValid(my_server))
	{
		DqLookResult result;

		if (!dq_database_stopped(MyDatabaseId))
			dq_look(&result);
		dq_wake_launcher();
		proc_exit(0);
	}

	slot = dq_worker_claim(DQ_ROLE_BRIDGE, MyDatabaseId, my_server);
	if (slot == NULL)
		proc_exit(0);			/* such a bridge lives */
	strlcpy(my_server_name, slot->server, sizeof(my_server_name));
	pgstat_report_activity(STATE_IDLE, NULL);

	if (dq_database_stopped(MyDatabaseId))
		leave("dq_worker_stop", "stopped", 0);
	look_around(true);
	serve(loop_context);
}
