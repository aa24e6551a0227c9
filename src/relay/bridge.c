/*
 * bridge.c
 *	  One server as this process bridges it: the round, and what is published of
 *	  it in shared memory.
 */
#include "postgres.h"

#include "compat.h"
#include "relay/relay_private.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#define ROUND_MS	100			/* a round returns after about this */
#define SLICE_MS	20			/* reading rows, between which due tasks move */
#define MARK_MS		5000
#define ROTATE_MS	10000
#define BIG_PAGE	(512 * 1024)	/* more than a full page: one large task */

DqBridge *
dq_bridge_create(Oid serverid)
{
	MemoryContext context = AllocSetContextCreate(TopMemoryContext, "dq_bridge",
												  ALLOCSET_DEFAULT_SIZES);
	DqBridge   *bridge = MemoryContextAllocZero(context, sizeof(DqBridge));

	bridge->context = context;
	bridge->round = AllocSetContextCreate(context, "dq_bridge round",
										  ALLOCSET_DEFAULT_SIZES);
	bridge->serverid = serverid;
	bridge->own_xact = !IsTransactionState();
	bridge->scan_interval = 1000;
	return bridge;
}

void
dq_bridge_free(DqBridge *bridge)
{
	dq_link_close(bridge);
	MemoryContextDelete(bridge->context);
}

void
dq_bridge_begin(DqBridge *bridge)
{
	if (bridge->own_xact)
	{
		SetCurrentStatementStartTimestamp();
		StartTransactionCommand();
		PushActiveSnapshot(GetTransactionSnapshot());
	}
	MemoryContextSwitchTo(bridge->round);
}

void
dq_bridge_end(DqBridge *bridge)
{
	if (bridge->own_xact)
	{
		PopActiveSnapshot();
		CommitTransactionCommand();
	}
	MemoryContextSwitchTo(bridge->round);
}

/*
 * The connection is lost or not to be trusted: nothing in flight counts. The
 * fences are looked at again; sessions stay (no freeze if nothing was lost).
 */
void
dq_bridge_reset(DqBridge *bridge)
{
	int			i;
	ListCell   *lc;

	dq_link_close(bridge);
	for (i = 0; i < bridge->nrequests; i++)
	{
		DqRequest  *request = &bridge->requests[i];

		if (request->cut == NULL || request->taken)
			continue;
		if (request->cut->page->bytes > BIG_PAGE && ++request->shard->big_failures >= 3)
			dq_shard_park_page(bridge, request->shard,
							   psprintf("connection lost 3 times over a page of %zu bytes (see proto-max-bulk-len)",
										request->cut->page->bytes));
		MemoryContextDelete(request->cut->page->context);
	}
	bridge->nrequests = 0;
	bridge->subscribe_at = 0;
	foreach(lc, bridge->shards)
	{
		DqShard    *shard = lfirst(lc);

		shard->pages_in_flight = 0;
		shard->transfer_in_flight = false;
		shard->other_in_flight = false;
		if (shard->state == DQ_SHARD_OPEN || shard->state == DQ_SHARD_FROZEN)
			dq_shard_forget(shard, DQ_SHARD_RESYNC);
	}
}

/* ---- what others see ---- */

static const char *
state_name(const DqShard *shard)
{
	if (shard->parked)
		return "parked";
	if (shard->state == DQ_SHARD_NOT_OWNER)
		return "not_owner";
	if (shard->failures > 0)
		return "redis_down";
	if (shard->paused)
		return "paused";
	return "running";
}

void
dq_bridge_publish(DqBridge *bridge, DqShard *shard)
{
	DqShardStats *shared;
	DqShardKey	key;
	int64		scans;

	strlcpy(shard->stats.state, state_name(shard), sizeof(shard->stats.state));
	strlcpy(shard->stats.session, shard->session, sizeof(shard->stats.session));
	shard->stats.floor = shard->floor;
	shared = dq_stats_lock(MyDatabaseId, shard->no);
	key = shared->key;
	scans = shared->remove_scans;
	*shared = shard->stats;
	shared->key = key;
	shared->remove_scans = scans;
	dq_stats_release(shared);
	shard->publish = false;
}

static void
publish_all(DqBridge *bridge)
{
	ListCell   *lc;
	bool		any = false;

	foreach(lc, bridge->shards)
	{
		DqShard    *shard = lfirst(lc);

		if (shard->publish)
		{
			dq_bridge_publish(bridge, shard);
			any = true;
		}
	}
	if (any)
		ConditionVariableBroadcast(&dq_shared()->progress);
}

void
dq_bridge_mark_down(DqBridge *bridge, const char *message)
{
	ListCell   *lc;

	foreach(lc, bridge->shards)
	{
		DqShard    *shard = lfirst(lc);

		strlcpy(shard->stats.last_error, message, DQ_ERROR_LEN);
		shard->stats.last_error_at = GetCurrentTimestamp();
		shard->failures = Max(shard->failures, 1);
		dq_bridge_publish(bridge, shard);
		shard->failures = 0;
	}
}

/* ---- housekeeping: marks and rotation, workers only ---- */

/*
 * Asynchronous commit is enough: a lost mark is an older mark, which only keeps
 * an outbox table longer.
 */
static void
store_marks(DqBridge *bridge)
{
	TimestampTz now = GetCurrentTimestamp();
	bool		begun = false;
	ListCell   *lc;

	foreach(lc, bridge->shards)
	{
		DqShard    *shard = lfirst(lc);

		if (!shard->mark_wanted || shard->state != DQ_SHARD_OPEN || shard->batch ||
			!TimestampDifferenceExceeds(shard->marked_at, now, MARK_MS))
			continue;
		if (!begun)
		{
			dq_bridge_begin(bridge);
			(void) set_config_option("synchronous_commit", "off", PGC_USERSET,
									 PGC_S_SESSION, GUC_ACTION_LOCAL, true, 0, false);
			begun = true;
		}
		dq_mark_store(shard->no, shard->prev, Min(shard->next_due - 1, dq_now_ms()));
		shard->mark_wanted = false;
		shard->marked_at = now;
	}
	if (begun)
		dq_bridge_end(bridge);
}

static void
housekeeping(DqBridge *bridge)
{
	TimestampTz now = GetCurrentTimestamp();

	store_marks(bridge);
	if (TimestampDifferenceExceeds(bridge->rotated_at, now,
								   Min(ROTATE_MS, Max(bridge->replay_window / 4, 250))))
	{
		SetCurrentStatementStartTimestamp();
		(void) dq_outbox_rotate(bridge->replay_window);
		MemoryContextSwitchTo(bridge->round);
		bridge->rotated_at = now;
	}
}

/* ---- the round ---- */

static long
time_to_wait(DqBridge *bridge)
{
	TimestampTz now = GetCurrentTimestamp();
	int64		now_ms = dq_now_ms();
	int64		wait = bridge->scan_interval;
	ListCell   *lc;

	foreach(lc, bridge->shards)
	{
		DqShard    *shard = lfirst(lc);

		if (shard->blocked_until > now)
		{
			wait = Min(wait, TimestampDifferenceMilliseconds(now, shard->blocked_until));
			continue;
		}
		if (shard->state == DQ_SHARD_OPEN && !shard->producer && !shard->paused &&
			OidIsValid(shard->relid) && shard->destination == DQ_DEST_LIST &&
			shard->next_due != PG_INT64_MAX)
			wait = Min(wait, Max(shard->next_due - now_ms, 0));
		if (shard->state == DQ_SHARD_UNKNOWN || shard->state == DQ_SHARD_RESYNC)
			wait = 0;
		wait = Min(wait, Max(bridge->scan_interval -
							 TimestampDifferenceMilliseconds(shard->status_at, now), 0));
	}
	return (long) wait;
}

long
dq_bridge_round(DqBridge *bridge)
{
	TimestampTz deadline = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), ROUND_MS);
	bool		more;

	do
	{
		TimestampTz slice = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), SLICE_MS);

		CHECK_FOR_INTERRUPTS();
		MemoryContextReset(bridge->round);
		MemoryContextSwitchTo(bridge->round);
		if (dq_catalogs_changed(bridge))
			dq_bridge_catalogs(bridge);
		if (bridge->gone || bridge->shards == NIL)
			return bridge->scan_interval;
		dq_bridge_connect(bridge);
		dq_link_messages(bridge);
		dq_shards_enter(bridge);
		more = dq_batches_prepare(bridge, slice);
		if (dq_exchange_send(bridge))
		{
			/* Redis works while the next pages are read */
			slice = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), SLICE_MS);
			(void) dq_batches_prepare(bridge, slice);
			dq_exchange_receive(bridge);
			more = true;
		}
		publish_all(bridge);
	} while (more && GetCurrentTimestamp() < deadline);

	if (bridge->own_xact)
		housekeeping(bridge);
	return more ? 0 : time_to_wait(bridge);
}

pgsocket
dq_bridge_socket(DqBridge *bridge)
{
	if (bridge->subscription == NULL || dq_redis_is_dead(bridge->subscription))
		return PGINVALID_SOCKET;
	return dq_redis_socket(bridge->subscription);
}

int64
dq_bridge_next_due(DqBridge *bridge)
{
	int64		next = PG_INT64_MAX;
	ListCell   *lc;

	foreach(lc, bridge->shards)
	{
		DqShard    *shard = lfirst(lc);

		next = Min(next, shard->next_due);
	}
	return next;
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
