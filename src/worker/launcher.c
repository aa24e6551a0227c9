/*
 * launcher.c
 *	  The process that sees to it that every bridge that is wanted runs. Static
 *	  when the library is preloaded, for all databases; without preloading
 *	  dq_worker_start starts one for its database.
 *
 *	  It finds the databases once when it starts, later by pokes and by the rows
 *	  of pg_database. To look into one it starts a bridge without a server, which
 *	  writes down the servers it finds (dq_worker_want) and leaves. From then on
 *	  the slots in shared memory say what is wanted; events (pokes, a child's end) only shorten the sleep between two
 *	  reconciliations, so none that is lost leaves a bridge unstarted.
 */
#include "postgres.h"

#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "tcop/tcopprot.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "settings.h"
#include "shared/shared.h"
#include "worker/worker.h"

#define RECONCILE_MS	30000	/* longest sleep */
#define RELOOK_MS		60000	/* databases with the extension, but no server */
#define FULL_MS			300		/* before asking for a free entry again */
#define WAITED_FOR_MS	1000	/* before asking for a locked database again */
#define NO_SLOT_MS		5000	/* before trying for a worker slot again */
#define MAX_BACKOFF_S	60
#define MAX_LOOKS		4		/* at the same time */
#define ABSENT_MS		60000	/* a launcher of one database waits that long
								 * for the extension */

static Oid	only_database;		/* InvalidOid: all */
static MemoryContext launcher_context;
static MemoryContext round_context;
static List *seen = NIL;		/* Oids of databases that were poked once */
static TimestampTz wake_at;
static TimestampTz absent_since = 0;

static void
wake_by(TimestampTz when)
{
	if (when < wake_at)
		wake_at = when;
}

/* 1 s, 2 s, 4 s ... from the start of an attempt to the next */
static TimestampTz
backoff(TimestampTz now, int failures)
{
	int			seconds = failures > 6 ? MAX_BACKOFF_S : Min(MAX_BACKOFF_S, 1 << failures);

	return TimestampTzPlusMilliseconds(now, seconds * 1000);
}

/*
 * Databases that are gone (or closed to workers) have nothing wanted any more;
 * those that are new are poked: one that was made from a template may have the
 * extension although nobody created it there.
 */
static void
follow_databases(DqShared *s, List *databases)
{
	List	   *gone = NIL;
	ListCell   *lc;

	foreach(lc, seen)
	{
		Oid			dboid = lfirst_oid(lc);

		if (dq_databases_find(databases, dboid) == NULL)
		{
			gone = lappend_oid(gone, dboid);
			seen = foreach_delete_current(seen, lc);
		}
	}

	LWLockAcquire(&s->lock, LW_EXCLUSIVE);
	if (s->look_everywhere)
	{
		s->look_everywhere = false;
		list_free(seen);
		seen = NIL;
	}
	for (int i = 0; i < DQ_MAX_DATABASES; i++)
	{
		DqDatabase *db = &s->databases[i];

		if (!OidIsValid(db->dboid) ||
			(OidIsValid(only_database) && db->dboid != only_database))
			continue;
		if (dq_databases_find(databases, db->dboid) == NULL ||
			(!db->here && !db->stopped && db->pokes == db->looked))
			memset(db, 0, sizeof(*db));
	}
	for (int i = 0; i < DQ_MAX_WORKERS; i++)
	{
		DqWorkerSlot *slot = &s->workers[i];

		if (slot->in_use && slot->role != DQ_ROLE_LAUNCHER && slot->pid == 0 &&
			(!OidIsValid(only_database) || slot->dboid == only_database) &&
			dq_databases_find(databases, slot->dboid) == NULL)
		{
			memset(slot, 0, sizeof(*slot));
			slot->procno = -1;
		}
	}
	LWLockRelease(&s->lock);

	foreach(lc, gone)
		dq_stats_forget_database(lfirst_oid(lc));

	foreach(lc, databases)
	{
		DqDatabaseName *name = lfirst(lc);
		MemoryContext old;
		bool		room = true;

		if (list_member_oid(seen, name->oid))
			continue;
		LWLockAcquire(&s->lock, LW_EXCLUSIVE);
		{
			DqDatabase *db = dq_database_entry(name->oid, true);

			if (db != NULL)
				db->pokes++;
			else
				room = false;
		}
		LWLockRelease(&s->lock);
		if (!room)
		{
			/* entries are free again once some have been looked at */
			wake_by(TimestampTzPlusMilliseconds(GetCurrentTimestamp(), FULL_MS));
			break;
		}
		old = MemoryContextSwitchTo(launcher_context);
		seen = lappend_oid(seen, name->oid);
		MemoryContextSwitchTo(old);
	}
}

static bool
has_bridge_slot(const DqShared *s, Oid dboid)
{
	for (int i = 0; i < DQ_MAX_WORKERS; i++)
	{
		if (s->workers[i].in_use && s->workers[i].role == DQ_ROLE_BRIDGE &&
			s->workers[i].dboid == dboid)
			return true;
	}
	return false;
}

/* Processes that look into databases that were poked. */
static void
start_looks(DqShared *s, const DqShared *copy, List *databases, TimestampTz now)
{
	int			looks = dq_children_looks();

	for (int i = 0; i < DQ_MAX_DATABASES; i++)
	{
		const DqDatabase *db = &copy->databases[i];
		DqDatabaseName *name;
		bool		started;
		DqDatabase *entry;

		if (!OidIsValid(db->dboid) || db->stopped)
			continue;
		name = dq_databases_find(databases, db->dboid);
		if (name == NULL)
			continue;
		if (db->pokes == db->looked)
		{
			TimestampTz again = TimestampTzPlusMilliseconds(db->looked_at, RELOOK_MS);

			/* a poke that was lost: CREATE SERVER by a prepared transaction */
			if (!db->here || has_bridge_slot(copy, db->dboid))
				continue;
			if (again > now)
			{
				wake_by(again);
				continue;
			}
			LWLockAcquire(&s->lock, LW_EXCLUSIVE);
			entry = dq_database_entry(db->dboid, false);
			if (entry != NULL)
				entry->pokes++;
			LWLockRelease(&s->lock);
		}
		if (db->not_before > now)
		{
			wake_by(db->not_before);
			continue;
		}
		if (dq_database_is_waited_for(db->dboid))
		{
			wake_by(TimestampTzPlusMilliseconds(now, WAITED_FOR_MS));
			continue;
		}

		/* their end wakes us */
		if (dq_children_have(DQ_ROLE_BRIDGE, db->dboid, InvalidOid))
			continue;
		if (looks >= MAX_LOOKS)
			break;
		/*
		 * A failure until the look says otherwise. Written down first: it may be over
		 * before we hear of its start.
		 */
		LWLockAcquire(&s->lock, LW_EXCLUSIVE);
		entry = dq_database_entry(db->dboid, false);
		if (entry != NULL)
		{
			entry->not_before = backoff(now, entry->failures);
			entry->failures++;
			wake_by(entry->not_before);
		}
		LWLockRelease(&s->lock);
		started = dq_children_start(copy, DQ_ROLE_BRIDGE, db->dboid, InvalidOid, name->name, "", now);
		if (started)
		{
			looks++;
			continue;
		}

		LWLockAcquire(&s->lock, LW_EXCLUSIVE);
		entry = dq_database_entry(db->dboid, false);
		if (entry != NULL)
		{
			entry->failures = db->failures;
			entry->not_before = TimestampTzPlusMilliseconds(now, NO_SLOT_MS);
			wake_by(entry->not_before);
		}
		LWLockRelease(&s->lock);
		break;
	}
}

static bool
same_slot(const DqWorkerSlot *real, const DqWorkerSlot *slot)
{
	return real->in_use && real->role == slot->role && real->dboid == slot->dboid &&
		real->serverid == slot->serverid && real->pid == 0;
}

/* A process is about to be started for it: a failure until that thrives. */
static void
charge_attempt(DqShared *s, const DqWorkerSlot *slot, DqWorkerSlot *real, TimestampTz now)
{
	LWLockAcquire(&s->lock, LW_EXCLUSIVE);
	if (same_slot(real, slot))
	{
		real->not_before = backoff(now, real->failures);
		real->failures++;
		wake_by(real->not_before);
	}
	LWLockRelease(&s->lock);
}

/* None could be started: no attempt of its own. */
static void
note_no_slot(DqShared *s, const DqWorkerSlot *slot, DqWorkerSlot *real, TimestampTz now)
{
	LWLockAcquire(&s->lock, LW_EXCLUSIVE);
	if (same_slot(real, slot))
	{
		real->failures = slot->failures;
		/* the end of a look wakes us */
		if (dq_children_looks() > 0)
			real->not_before = slot->not_before;
		else
		{
			real->not_before = TimestampTzPlusMilliseconds(now, NO_SLOT_MS);
			if (strcmp(real->state, "no_slot") != 0)
			{
				strlcpy(real->state, "no_slot", sizeof(real->state));
				real->since = now;
				snprintf(real->last_error, sizeof(real->last_error),
						 "no free slot in max_worker_processes (%d)",
						 max_worker_processes);
				real->last_error_at = now;
			}
		}
		wake_by(real->not_before);
	}
	LWLockRelease(&s->lock);
}

/* Bridges and executors that are wanted and have no process. True: a slot was missing. */
static bool
start_wanted(DqShared *s, const DqShared *copy, List *databases, TimestampTz now,
			  bool slot_freed)
{
	bool		out_of_slots = false;

	for (int i = 0; i < DQ_MAX_WORKERS; i++)
	{
		const DqWorkerSlot *slot = &copy->workers[i];
		DqWorkerSlot *real = &s->workers[i];
		DqDatabaseName *name;
		bool		started = false;
		bool		stopped = false;

		if (!slot->in_use || slot->role == DQ_ROLE_LAUNCHER || slot->pid != 0)
			continue;
		name = dq_databases_find(databases, slot->dboid);
		for (int k = 0; k < DQ_MAX_DATABASES; k++)
		{
			if (copy->databases[k].dboid == slot->dboid)
				stopped = copy->databases[k].stopped;
		}
		if (name == NULL || stopped || dq_children_have(slot->role, slot->dboid, slot->serverid))
			continue;
		if (slot->not_before > now &&
			!(slot_freed && strcmp(slot->state, "no_slot") == 0))
		{
			wake_by(slot->not_before);
			continue;
		}
		if (dq_database_is_waited_for(slot->dboid))
		{
			wake_by(TimestampTzPlusMilliseconds(now, WAITED_FOR_MS));
			continue;
		}
		if (!out_of_slots)
		{
			/* first, as it may end before we hear of its start */
			charge_attempt(s, slot, real, now);
			started = dq_children_start(copy, slot->role, slot->dboid, slot->serverid,
										name->name, slot->server, now);
			out_of_slots = !started;
		}
		if (!started)
			note_no_slot(s, slot, real, now);
	}
	return out_of_slots;
}

/*
 * A launcher of one database ends with its task. The slot is given up under the
 * lock under which dq_worker_start looks for a launcher, so that a start that
 * follows a stop at once does not rely on one that is about to leave.
 */
static void
leave_if_done(DqShared *s, List *databases, TimestampTz now)
{
	const char *why = NULL;
	DqDatabase *db;

	LWLockAcquire(&s->lock, LW_EXCLUSIVE);
	db = dq_database_entry(only_database, false);
	if (dq_databases_find(databases, only_database) == NULL)
		why = "the database is gone or takes no connections";
	else if (db != NULL && db->stopped)
		why = "dq_worker_stop";
	else if (db != NULL && (db->here || db->pokes != db->looked))
		absent_since = 0;
	else if (absent_since == 0)
		absent_since = now;
	else if (TimestampDifferenceExceeds(absent_since, now, ABSENT_MS))
		why = "the extension is not there";
	if (why != NULL)
	{
		DqWorkerSlot *mine = dq_worker_mine();

		mine->pid = 0;
		mine->in_use = false;
	}
	LWLockRelease(&s->lock);

	if (why != NULL)
	{
		ereport(dq_log_level, (errmsg("dq_bridge launcher of one database leaves: %s", why)));
		proc_exit(0);
	}
	if (absent_since != 0)
		wake_by(TimestampTzPlusMilliseconds(absent_since, ABSENT_MS + 1000));
}

/* One reconciliation; returns how long to sleep, in ms. */
static long
reconcile(void)
{
	DqShared   *s = dq_shared();
	DqShared   *copy = palloc(sizeof(DqShared));
	TimestampTz now;
	List	   *databases;
	bool		slot_freed;
	bool		out_of_slots;
	TimestampTz short_at;

	now = GetCurrentTimestamp();
	wake_at = TimestampTzPlusMilliseconds(now, RECONCILE_MS);

	if (s->overflow)
	{
		dq_complain_no_room(now);
		s->overflow = false;
	}
	slot_freed = dq_children_reap();
	databases = dq_databases_list(only_database);
	follow_databases(s, databases);
	if (OidIsValid(only_database))
		leave_if_done(s, databases, now);

	/* processes are started without our lock, from a copy */
	LWLockAcquire(&s->lock, LW_SHARED);
	memcpy(copy, s, sizeof(DqShared));
	LWLockRelease(&s->lock);

	out_of_slots = start_wanted(s, copy, databases, now, slot_freed);
	if (!out_of_slots)
		start_looks(s, copy, databases, now);
	else
		wake_by(TimestampTzPlusMilliseconds(now, NO_SLOT_MS));

	short_at = dq_children_short_at();
	if (short_at != 0 &&
		!TimestampDifferenceExceeds(short_at, now, NO_SLOT_MS + 1000))
	{
		dq_worker_state("no_slot");
		dq_worker_warnings("worker slots exhausted: raise max_worker_processes");
		wake_by(TimestampTzPlusMilliseconds(short_at, NO_SLOT_MS + 1100));
	}
	else
	{
		dq_worker_state("running");
		dq_worker_warnings("");
	}
	return TimestampDifferenceMilliseconds(GetCurrentTimestamp(), wake_at);
}

void
dq_launcher_main(Datum main_arg)
{
	uint32		wait_event;

	only_database = DatumGetObjectId(main_arg);

	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();
	/* connected to the shared catalogs only */
	BackgroundWorkerInitializeConnection(NULL, NULL, 0);

	launcher_context = AllocSetContextCreate(TopMemoryContext, "dq_bridge launcher",
											 ALLOCSET_DEFAULT_SIZES);
	round_context = AllocSetContextCreate(TopMemoryContext, "dq_bridge launcher round",
										  ALLOCSET_DEFAULT_SIZES);
	wait_event = DqWaitEventNew("DqBridgeLauncher");

	/* another one lives: possible for launchers of one database only */
	if (dq_worker_claim(DQ_ROLE_LAUNCHER, only_database, InvalidOid) == NULL)
		proc_exit(OidIsValid(only_database) ? 0 : 1);
	pgstat_report_activity(STATE_IDLE, NULL);
	ereport(dq_log_level, (errmsg("dq_bridge launcher started")));

	/*
	 * An error ends the process; the postmaster starts it again after
	 * bgw_restart_time. It never returns: exit code 0 would be for good.
	 */
	MemoryContextSwitchTo(round_context);
	for (;;)
	{
		long		sleep_ms = RECONCILE_MS;

		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
		}

		if (dq_enabled)
			sleep_ms = reconcile();
		else
		{
			(void) dq_children_reap();
			dq_worker_state("disabled");
		}
		MemoryContextSwitchTo(round_context);
		MemoryContextReset(round_context);

		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 Max(sleep_ms, 50), wait_event);
	}
}
