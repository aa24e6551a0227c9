/*
 * wake.c
 *	  Telling other processes that there is something to do: the bridges at each
 *	  commit that touched a queue, the launcher when a database needs a look.
 *
 *	  Events only shorten a sleep: whoever is woken looks at the state itself,
 *	  and would do so some time later without them.
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "storage/latch.h"
#include "storage/proc.h"

#include "compat.h"
#include "shared/shared.h"
#include "shared/shared_private.h"

static bool poke_pending = false;

/*
 * A number that has become stale wakes a stranger, who finds nothing to do:
 * harmless.
 */
static void
set_latch_of(int procno)
{
	if (procno >= 0)
		SetLatch(&DqProcByNumber(procno)->procLatch);
}

static bool
serves(const DqWorkerSlot *slot, Oid dboid)
{
	return slot->in_use && slot->role == DQ_ROLE_LAUNCHER && slot->pid != 0 &&
		(!OidIsValid(slot->dboid) || slot->dboid == dboid);
}

/* Attach unless this is a commit callback, where an error would be fatal. */
static DqShared *
attach_if_safe(void)
{
	if (dq_shared_if_attached() == NULL && IsTransactionState())
		(void) dq_shared();
	return dq_shared_if_attached();
}

bool
dq_wake_bridge(Oid dboid, Oid serverid)
{
	DqShared   *s = attach_if_safe();
	bool		woken = false;
	bool		wanted = false;

	if (s == NULL)
		return false;

	LWLockAcquire(&s->lock, LW_SHARED);
	for (int i = 0; i < DQ_MAX_WORKERS; i++)
	{
		DqWorkerSlot *slot = &s->workers[i];

		if (!slot->in_use || slot->role != DQ_ROLE_BRIDGE || slot->dboid != dboid)
			continue;
		if (OidIsValid(serverid) && slot->serverid != serverid)
			continue;
		wanted = true;
		if (slot->pid != 0)
		{
			set_latch_of(slot->procno);
			woken = true;
		}
	}
	LWLockRelease(&s->lock);

	if (!wanted)
		dq_poke(dboid);
	return woken;
}

void
dq_wake_workers(Oid dboid)
{
	DqShared   *s = dq_shared();

	LWLockAcquire(&s->lock, LW_SHARED);
	for (int i = 0; i < DQ_MAX_WORKERS; i++)
	{
		DqWorkerSlot *slot = &s->workers[i];

		if (slot->in_use && slot->dboid == dboid && slot->pid != 0)
			set_latch_of(slot->procno);
	}
	LWLockRelease(&s->lock);
}

void
dq_wake_executor(Oid dboid, Oid owner)
{
	DqShared   *s = attach_if_safe();

	if (s == NULL)
		return;
	LWLockAcquire(&s->lock, LW_SHARED);
	for (int i = 0; i < DQ_MAX_WORKERS; i++)
	{
		DqWorkerSlot *slot = &s->workers[i];

		if (slot->in_use && slot->role == DQ_ROLE_EXECUTOR && slot->dboid == dboid &&
			slot->serverid == owner && slot->pid != 0)
			set_latch_of(slot->procno);
	}
	LWLockRelease(&s->lock);
}

void
dq_note_rollback(void)
{
	DqShared   *s = dq_shared_if_attached();

	if (s)
		pg_atomic_fetch_add_u64(&s->rollbacks, 1);
}

uint64
dq_rollbacks(void)
{
	return pg_atomic_read_u64(&dq_shared()->rollbacks);
}

bool
dq_bridge_alive(Oid dboid, Oid serverid)
{
	DqShared   *s = dq_shared();
	bool		alive = false;

	LWLockAcquire(&s->lock, LW_SHARED);
	for (int i = 0; i < DQ_MAX_WORKERS && !alive; i++)
	{
		DqWorkerSlot *slot = &s->workers[i];

		alive = slot->in_use && slot->role == DQ_ROLE_BRIDGE &&
			slot->dboid == dboid && slot->serverid == serverid && slot->pid != 0;
	}
	LWLockRelease(&s->lock);
	return alive;
}

bool
dq_launcher_alive(Oid dboid)
{
	DqShared   *s = dq_shared();
	bool		alive = false;

	LWLockAcquire(&s->lock, LW_SHARED);
	for (int i = 0; i < DQ_MAX_WORKERS && !alive; i++)
		alive = serves(&s->workers[i], dboid);
	LWLockRelease(&s->lock);
	return alive;
}

/* All launchers: there is one, or one for each database without preloading. */
void
dq_wake_launcher(void)
{
	DqShared   *s = attach_if_safe();

	if (s == NULL)
		return;
	LWLockAcquire(&s->lock, LW_SHARED);
	for (int i = 0; i < DQ_MAX_WORKERS; i++)
	{
		DqWorkerSlot *slot = &s->workers[i];

		if (slot->in_use && slot->role == DQ_ROLE_LAUNCHER && slot->pid != 0)
			set_latch_of(slot->procno);
	}
	LWLockRelease(&s->lock);
}

/*
 * Without a launcher there is nobody to tell: one that starts later looks at
 * every database (or at its own) first.
 */
void
dq_poke(Oid dboid)
{
	DqShared   *s = attach_if_safe();
	bool		served = false;

	if (s == NULL)
		return;
	LWLockAcquire(&s->lock, LW_EXCLUSIVE);
	for (int i = 0; i < DQ_MAX_WORKERS && !served; i++)
		served = serves(&s->workers[i], dboid);
	if (served)
	{
		DqDatabase *db = dq_database_entry(dboid, true);

		if (db == NULL)
			s->look_everywhere = true;
		else if (db->pokes++ != db->looked)
			served = false;		/* the launcher has not come to the last one */
	}
	LWLockRelease(&s->lock);
	if (served)
		dq_wake_launcher();
}

static void
poke_xact_callback(XactEvent event, void *arg)
{
	if (!poke_pending)
		return;
	switch (event)
	{
		case XACT_EVENT_COMMIT:
			poke_pending = false;
			dq_poke(MyDatabaseId);
			break;

			/*
			 * COMMIT PREPARED comes without any of this: the first commit that
			 * touches a queue finds no bridge and pokes.
			 */
		case XACT_EVENT_PREPARE:
		case XACT_EVENT_ABORT:
			poke_pending = false;
			break;
		default:
			break;
	}
}

void
dq_poke_at_commit(void)
{
	static bool registered = false;

	(void) dq_shared();			/* nothing may fail in the callback */
	if (!registered)
	{
		RegisterXactCallback(poke_xact_callback, NULL);
		registered = true;
	}
	poke_pending = true;
}
