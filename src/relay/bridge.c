/*
 * bridge.c
 *	  One server as this process bridges it: a link for each user mapping that its
 *	  queues' owners have, so that everything uses the table owner's credentials.
 *	  A link that fails does not stop the others.
 */
#include "postgres.h"

#include "compat.h"
#include "relay/relay_private.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

DqBridge *
dq_bridge_create(Oid serverid)
{
	MemoryContext context = AllocSetContextCreate(TopMemoryContext, "dq_bridge",
												  ALLOCSET_DEFAULT_SIZES);
	DqBridge   *bridge = MemoryContextAllocZero(context, sizeof(DqBridge));

	bridge->context = context;
	bridge->scratch = AllocSetContextCreate(context, "dq_bridge catalogs",
											ALLOCSET_DEFAULT_SIZES);
	bridge->serverid = serverid;
	bridge->own_xact = !IsTransactionState();
	bridge->scan_interval = 1000;
	return bridge;
}

void
dq_bridge_free(DqBridge *bridge)
{
	ListCell   *lc;

	foreach(lc, bridge->links)
		dq_link_close(lfirst(lc));
	MemoryContextDelete(bridge->context);
}

DqLink *
dq_bridge_link(DqBridge *bridge, Oid umid)
{
	MemoryContext context;
	MemoryContext old;
	DqLink	   *link;
	ListCell   *lc;

	foreach(lc, bridge->links)
	{
		link = lfirst(lc);
		if (link->umid == umid)
			return link;
	}
	context = AllocSetContextCreate(bridge->context, "dq_bridge link", ALLOCSET_DEFAULT_SIZES);
	link = MemoryContextAllocZero(context, sizeof(DqLink));
	link->context = context;
	link->round = AllocSetContextCreate(context, "dq_bridge round", ALLOCSET_DEFAULT_SIZES);
	link->serverid = bridge->serverid;
	link->umid = umid;
	link->own_xact = bridge->own_xact;
	link->no_transfer = bridge->no_transfer;
	link->scan_interval = 1000;
	old = MemoryContextSwitchTo(bridge->context);
	bridge->links = lappend(bridge->links, link);
	MemoryContextSwitchTo(old);
	return link;
}

void
dq_bridge_reset(DqBridge *bridge)
{
	ListCell   *lc;

	foreach(lc, bridge->links)
		dq_link_reset(lfirst(lc));
}

void
dq_bridge_mark_down(DqBridge *bridge, const char *message)
{
	ListCell   *lc;

	foreach(lc, bridge->links)
		dq_link_mark_down(lfirst(lc), message);
}

static bool
others_work(DqBridge *bridge, DqLink *link)
{
	ListCell   *lc;

	foreach(lc, bridge->links)
	{
		DqLink	   *other = lfirst(lc);

		if (other != link && other->failures == 0)
			return true;
	}
	return false;
}

/*
 * With one link its errors are the caller's. With several, one that fails is
 * left alone for a while and the others go on.
 */
static long
link_round(DqBridge *bridge, DqLink *link)
{
	MemoryContext caller = CurrentMemoryContext;
	volatile long wait = 0;

	if (!others_work(bridge, link))
		return dq_link_round(link);
	if (link->blocked_until > GetCurrentTimestamp())
		return TimestampDifferenceMilliseconds(GetCurrentTimestamp(), link->blocked_until);
	PG_TRY();
	{
		wait = dq_link_round(link);
		link->failures = 0;
	}
	PG_CATCH();
	{
		ErrorData  *error;

		MemoryContextSwitchTo(link->round);
		error = CopyErrorData();
		/* a cancel or the end of the process is not the link's */
		if (ERRCODE_TO_CATEGORY(error->sqlerrcode) == ERRCODE_OPERATOR_INTERVENTION &&
			error->sqlerrcode != ERRCODE_CANNOT_CONNECT_NOW)
			PG_RE_THROW();
		if (!bridge->own_xact)
			PG_RE_THROW();
		FlushErrorState();
		bridge->aborted |= IsTransactionState();
		AbortOutOfAnyTransaction();
		MemoryContextSwitchTo(link->round);
		if (link->progress != link->progress_at_failure)
			link->failures = 0;
		link->progress_at_failure = link->progress;
		if (link->failures == 0 && dq_link_is_news(link, error->message))
			ereport(LOG,
					(errcode(error->sqlerrcode),
					 errmsg("dq_bridge: server \"%s\": %s",
							link->server_name ? link->server_name : "", error->message)));
		link->failures = Min(link->failures + 1, 10);
		wait = Min(100L << (link->failures - 1), Max(bridge->scan_interval, 1000));
		link->blocked_until = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), wait);
		dq_link_reset(link);
		dq_link_mark_down(link, error->message);
		dq_worker_error(error->message);
	}
	PG_END_TRY();
	MemoryContextSwitchTo(caller);
	return wait;
}

static uint64
count_relayed(DqBridge *bridge)
{
	uint64		sum = 0;
	ListCell   *l,
			   *s;

	foreach(l, bridge->links)
	{
		foreach(s, ((DqLink *) lfirst(l))->shards)
			sum += ((DqShard *) lfirst(s))->stats.relayed;
	}
	return sum;
}

/* Idle and with nothing left to empty, not even a transaction is opened. */
static void
rotate(DqBridge *bridge)
{
	if (bridge->rotate_at == DT_NOEND && count_relayed(bridge) != bridge->rotate_progress)
		bridge->rotate_at = 0;
	if (bridge->rotate_at == DT_NOEND || GetCurrentTimestamp() < bridge->rotate_at)
		return;
	bridge->rotate_progress = count_relayed(bridge);
	SetCurrentStatementStartTimestamp();
	bridge->rotate_at = dq_outbox_rotate(bridge->replay_window);
}

long
dq_bridge_round(DqBridge *bridge)
{
	long		wait;
	ListCell   *lc;

	bridge->aborted = false;
	MemoryContextReset(bridge->scratch);
	MemoryContextSwitchTo(bridge->scratch);
	if (dq_catalogs_changed(bridge))
		dq_bridge_catalogs(bridge);
	wait = bridge->scan_interval;
	if (bridge->gone)
		return wait;
	foreach(lc, bridge->links)
	{
		wait = Min(wait, link_round(bridge, lfirst(lc)));
		/* the round ends without its locks; the next one begins at once */
		if (bridge->aborted)
			return 0;
	}
	if (bridge->own_xact && bridge->links != NIL)
		rotate(bridge);
	return wait;
}

/* Of the first link; the others look at their scan interval. */
pgsocket
dq_bridge_socket(DqBridge *bridge)
{
	DqLink	   *link;

	if (bridge->links == NIL)
		return PGINVALID_SOCKET;
	link = linitial(bridge->links);
	if (link->subscription == NULL || dq_redis_is_dead(link->subscription))
		return PGINVALID_SOCKET;
	return dq_redis_socket(link->subscription);
}

uint64
dq_bridge_progress(DqBridge *bridge)
{
	uint64		sum = 0;
	ListCell   *lc;

	foreach(lc, bridge->links)
		sum += ((DqLink *) lfirst(lc))->progress;
	return sum;
}

int64
dq_bridge_next_due(DqBridge *bridge)
{
	int64		next = PG_INT64_MAX;
	ListCell   *l,
			   *s;

	foreach(l, bridge->links)
	{
		foreach(s, ((DqLink *) lfirst(l))->shards)
			next = Min(next, ((DqShard *) lfirst(s))->next_due);
	}
	return next;
}

bool
dq_bridge_aborted(const DqBridge *bridge)
{
	return bridge->aborted;
}

bool
dq_bridge_is_gone(DqBridge *bridge)
{
	return bridge->gone;
}

/* ---- one bridge per database and server ---- */

#define BRIDGE_LOCK_CLASS 0xd4b1	/* apart from pg_advisory_lock's 1 and 2 */

bool
dq_bridge_lock(Oid serverid)
{
	LOCKTAG		tag;

	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, serverid, 0, BRIDGE_LOCK_CLASS);
	return LockAcquire(&tag, ExclusiveLock, true, true) != LOCKACQUIRE_NOT_AVAIL;
}

void
dq_bridge_unlock(Oid serverid)
{
	LOCKTAG		tag;

	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, serverid, 0, BRIDGE_LOCK_CLASS);
	LockRelease(&tag, ExclusiveLock, true);
}
