/*
 * round.c
 *	  One link's round: relay, transfer, look; and what is published of its
 *	  shards in shared memory. Called by bridge.c.
 */
#include "postgres.h"

#include "compat.h"
#include "relay/relay_private.h"
#include "shared/points.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#define ROUND_MS	100			/* a round returns after about this */
#define SLICE_MS	20			/* reading rows, between which due tasks move */
#define BIG_PAGE	(512 * 1024)	/* more than a full page: one large task */

void
dq_link_begin(DqLink *link)
{
	if (link->own_xact)
	{
		SetCurrentStatementStartTimestamp();
		StartTransactionCommand();
		PushActiveSnapshot(GetTransactionSnapshot());
	}
	MemoryContextSwitchTo(link->round);
}

void
dq_link_end(DqLink *link)
{
	if (link->own_xact)
	{
		PopActiveSnapshot();
		CommitTransactionCommand();
	}
	MemoryContextSwitchTo(link->round);
}

/*
 * The connection is lost or not to be trusted: nothing in flight counts. The
 * fences are looked at again; sessions stay (no freeze if nothing was lost).
 */
void
dq_link_reset(DqLink *link)
{
	int			i;
	ListCell   *lc;

	dq_link_close(link);
	for (i = 0; i < link->nrequests; i++)
	{
		DqRequest  *request = &link->requests[i];

		if (request->cut == NULL || request->taken)
			continue;
		if (request->cut->page->bytes > BIG_PAGE && ++request->shard->big_failures >= 3)
			dq_shard_park_page(link, request->shard,
							   psprintf("connection lost 3 times over a page of %zu bytes (see proto-max-bulk-len)",
										request->cut->page->bytes));
		MemoryContextDelete(request->cut->page->context);
	}
	link->nrequests = 0;
	/* polling does until the connection has proved to last */
	link->subscribe_at = TimestampTzPlusMilliseconds(GetCurrentTimestamp(),
													 Min(link->scan_interval, 1000));
	foreach(lc, link->shards)
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
	if (shard->loss)
		return "data_loss";
	if (shard->paused)
		return "paused";
	return "running";
}

void
dq_link_publish(DqLink *link, DqShard *shard)
{
	DqShardStats *shared;
	DqShardKey	key;
	int64		scans;

	strlcpy(shard->stats.state, state_name(shard), sizeof(shard->stats.state));
	if (shard->loss && strcmp(shard->stats.state, "data_loss") == 0)
		strlcpy(shard->stats.last_error, shard->loss, DQ_ERROR_LEN);
	strlcpy(shard->stats.session, shard->session, sizeof(shard->stats.session));
	shared = dq_stats_lock(MyDatabaseId, shard->no);
	key = shared->key;
	if (strcmp(shared->session, shard->session) == 0)
		shard->floor = Max(shard->floor, shared->floor);
	shard->stats.floor = shard->floor;
	scans = shared->remove_scans;
	shard->stats.writing = shared->writing;
	shard->stats.epoch = shared->epoch;
	shard->stats.delivery = shared->delivery;
	*shared = shard->stats;
	shared->key = key;
	shared->remove_scans = scans;
	dq_stats_release(shared);
	shard->publish = false;
}

/* What dq_workers shows: not_owner if nothing here is ours. */
static void
show_ownership(DqLink *link)
{
	DqWorkerSlot *slot = dq_worker_mine();
	bool		owned = false,
				refused = false;
	ListCell   *lc;

	if (slot == NULL)
		return;
	foreach(lc, link->shards)
	{
		DqShard    *shard = lfirst(lc);

		owned |= shard->state == DQ_SHARD_OPEN || shard->state == DQ_SHARD_FROZEN;
		refused |= shard->state == DQ_SHARD_NOT_OWNER;
	}
	if (refused && !owned && strcmp(slot->state, "running") == 0)
		dq_worker_state("not_owner");
	else if (owned && strcmp(slot->state, "not_owner") == 0)
		dq_worker_state("running");
}

static void
publish_all(DqLink *link)
{
	ListCell   *lc;
	bool		any = false;

	foreach(lc, link->shards)
	{
		DqShard    *shard = lfirst(lc);

		if (shard->publish)
		{
			dq_link_publish(link, shard);
			any = true;
		}
	}
	if (any && link->own_xact)
		show_ownership(link);
	if (any)
		ConditionVariableBroadcast(&dq_shared()->progress);
}

void
dq_link_mark_down(DqLink *link, const char *message)
{
	ListCell   *lc;

	foreach(lc, link->shards)
	{
		DqShard    *shard = lfirst(lc);

		strlcpy(shard->stats.last_error, message, DQ_ERROR_LEN);
		shard->stats.last_error_at = GetCurrentTimestamp();
		shard->failures = Max(shard->failures, 1);
		dq_link_publish(link, shard);
		shard->failures = 0;
	}
}

/* ---- the round ---- */

static long
time_to_wait(DqLink *link)
{
	TimestampTz now = GetCurrentTimestamp();
	int64		now_ms = dq_now_ms();
	int64		wait = link->scan_interval;
	ListCell   *lc;

	foreach(lc, link->shards)
	{
		DqShard    *shard = lfirst(lc);

		if (shard->blocked_until > now)
		{
			wait = Min(wait, TimestampDifferenceMilliseconds(now, shard->blocked_until));
			continue;
		}
		if (shard->state == DQ_SHARD_OPEN && !shard->producer && !dq_shard_is_halted(shard) &&
			OidIsValid(shard->relid) && shard->destination != DQ_DEST_NONE &&
			shard->next_due != PG_INT64_MAX && !shard->lent)
			wait = Min(wait, Max(shard->next_due - now_ms, 0));
		/* a permission that nobody takes is renewed */
		if (shard->lent)
			wait = Min(wait, 100);
		if (shard->state == DQ_SHARD_FROZEN && shard->thaw_at > now)
			wait = Min(wait, TimestampDifferenceMilliseconds(now, shard->thaw_at));
		if (shard->state == DQ_SHARD_UNKNOWN || shard->state == DQ_SHARD_RESYNC)
			wait = 0;
		wait = Min(wait, Max(dq_look_interval(link, shard) -
							 TimestampDifferenceMilliseconds(shard->status_at, now), 0));
	}
	return (long) wait;
}

/*
 * Is there an exchange to be had that cannot stand behind others on its connection?
 */
static bool
wants_quiet(const DqLink *link)
{
	TimestampTz now = GetCurrentTimestamp();
	ListCell   *lc;

	if (dq_holds_wanted(link))
		return true;
	foreach(lc, link->shards)
	{
		const DqShard *shard = lfirst(lc);

		if (dq_shard_wants_look(link, shard, now) ||
			(shard->batch && shard->batch->element) ||
			(shard->state == DQ_SHARD_FROZEN && !dq_shard_may_thaw(shard)))
			return true;
	}
	return false;
}

long
dq_link_round(DqLink *link)
{
	TimestampTz deadline = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), ROUND_MS);
	bool		more,
				resolving;
	int			before;

	do
	{
		TimestampTz slice = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), SLICE_MS);

		CHECK_FOR_INTERRUPTS();
		MemoryContextReset(link->round);
		MemoryContextSwitchTo(link->round);
		if (link->shards == NIL)
			return link->scan_interval;
		dq_link_connect(link);
		dq_link_messages(link);
		if (link->nrequests > 0 && wants_quiet(link))
			dq_exchange_receive(link, link->nrequests);
		if (link->nrequests == 0)
		{
			dq_shards_enter(link);
			dq_heal_look(link);
			dq_blockers_look(link);
		}
		resolving = dq_resolve_elements(link);
		more = dq_batches_prepare(link, slice);
		/*
		 * Redis is never without work while there is some: replies are taken one
		 * round behind, and meanwhile the next pages are read.
		 */
		before = link->nrequests;
		if (dq_exchange_send(link))
		{
			slice = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), SLICE_MS);
			(void) dq_batches_prepare(link, slice);
			more = true;
		}
		if (before > 0)
		{
			dq_exchange_receive(link, before);
			more = true;
		}
		if (link->nrequests == 0)
			more |= dq_holds_resolve(link);
		publish_all(link);
		more |= resolving;
	} while (more && GetCurrentTimestamp() < deadline);
	if (link->nrequests > 0)
	{
		dq_exchange_receive(link, link->nrequests);
		publish_all(link);
	}

	if (!more)
		dq_link_look(link);
	if (link->own_xact)
		dq_marks_store(link);
	return more ? 0 : time_to_wait(link);
}
