/*
 * pollers.c
 *	  Backends that wait for elements of a ready list (dq_poll with wait), in order of
 *	  their coming. Without this every one of them would ask Redis and be woken by
 *	  every element, and a hundred idle ones would cost more than the work. Called by
 *	  the SQL functions.
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/proc.h"

#include "compat.h"
#include "shared/shared.h"
#include "shared/shared_private.h"

static void
wake(DqPoller *poller)
{
	SetLatch(&DqProcByNumber(poller->procno)->procLatch);
}

/* The first in the queue who has not been told yet; NULL: none. Under the lock. */
static DqPoller *
first_waiting(DqShared *s, Oid dboid, int32 shard)
{
	DqPoller   *first = NULL;
	int			i;

	for (i = 0; i < DQ_MAX_POLLERS; i++)
	{
		DqPoller   *poller = &s->pollers[i];

		if (poller->dboid != dboid || poller->shard != shard || poller->woken ||
			poller->procno == DqMyProcNumber)
			continue;
		if (first == NULL || poller->since < first->since)
			first = poller;
	}
	return first;
}

/*
 * Whoever goes passes on what it leaves undone: the news that it has not looked at,
 * and the watch, for which the next one in the queue is woken.
 */
static void
leave(DqShared *s, DqPoller *poller)
{
	DqPoller	gone = *poller;
	DqPoller   *next;

	memset(poller, 0, sizeof(*poller));
	if (!gone.woken && !gone.watches)
		return;
	next = first_waiting(s, gone.dboid, gone.shard);
	if (next)
	{
		next->woken = gone.woken;
		wake(next);
	}
}

/* The process exits, perhaps out of its wait. */
static void
leave_all(int code, Datum arg)
{
	DqShared   *s = dq_shared_if_attached();
	int			i;

	if (s == NULL)
		return;
	LWLockAcquire(&s->lock, LW_EXCLUSIVE);
	for (i = 0; i < DQ_MAX_POLLERS; i++)
		if (OidIsValid(s->pollers[i].dboid) && s->pollers[i].procno == DqMyProcNumber)
			leave(s, &s->pollers[i]);
	LWLockRelease(&s->lock);
}

int
dq_poller_enter(int32 shard)
{
	static bool registered = false;
	DqShared   *s = dq_shared();
	int			seat = -1;
	int			i;

	if (!registered)
		before_shmem_exit(leave_all, (Datum) 0);
	registered = true;

	LWLockAcquire(&s->lock, LW_EXCLUSIVE);
	for (i = 0; i < DQ_MAX_POLLERS && seat < 0; i++)
	{
		DqPoller   *poller = &s->pollers[i];

		if (OidIsValid(poller->dboid))
			continue;
		poller->procno = DqMyProcNumber;
		poller->dboid = MyDatabaseId;
		poller->shard = shard;
		poller->woken = poller->watches = false;
		poller->since = ++s->last_poller;
		seat = i;
	}
	LWLockRelease(&s->lock);
	return seat;
}

void
dq_poller_leave(int seat)
{
	DqShared   *s = dq_shared();

	LWLockAcquire(&s->lock, LW_EXCLUSIVE);
	leave(s, &s->pollers[seat]);
	LWLockRelease(&s->lock);
}

bool
dq_poller_is_woken(int seat)
{
	DqShared   *s = dq_shared();
	bool		woken;

	LWLockAcquire(&s->lock, LW_EXCLUSIVE);
	woken = s->pollers[seat].woken;
	s->pollers[seat].woken = false;
	LWLockRelease(&s->lock);
	return woken;
}

bool
dq_poller_watches(int seat)
{
	DqShared   *s = dq_shared();
	DqPoller   *mine = &s->pollers[seat];
	bool		taken = false;
	int			i;

	LWLockAcquire(&s->lock, LW_EXCLUSIVE);
	for (i = 0; i < DQ_MAX_POLLERS && !taken; i++)
		taken = i != seat && s->pollers[i].watches &&
			s->pollers[i].dboid == mine->dboid && s->pollers[i].shard == mine->shard;
	mine->watches = !taken;
	LWLockRelease(&s->lock);
	return !taken;
}

void
dq_pollers_wake(int32 shard, int64 elements)
{
	DqShared   *s = dq_shared();

	LWLockAcquire(&s->lock, LW_EXCLUSIVE);
	for (; elements > 0; elements--)
	{
		DqPoller   *poller = first_waiting(s, MyDatabaseId, shard);

		if (poller == NULL)
			break;
		poller->woken = true;
		wake(poller);
	}
	LWLockRelease(&s->lock);
}
