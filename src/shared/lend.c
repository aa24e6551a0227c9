/*
 * lend.c
 *	  Permissions for claims. A claim lends due tasks to PostgreSQL, and like a transfer it
 *	  must come after all that was committed before it, and not while a shard is frozen or
 *	  paused. The bridge knows, the executor claims: it takes a permission that the bridge
 *	  has given a moment ago, one for each claim. Called by the relay and the deliver room.
 */
#include "postgres.h"

#include "utils/timestamp.h"

#include "shared/shared.h"

#define FRESH_MS	200			/* older ones are not used */
#define RENEW_MS	100
#define LOST_MS		1000		/* a claim without an end: its process has died */

DqLendState
dq_lend_get(Oid dboid, int32 shard, char *session, int64 *floor)
{
	DqShardStats *stats = dq_stats_lock(dboid, shard);
	const DqDelivery *d = &stats->delivery;
	DqLendState state = DQ_LEND_GRANTED;

	strlcpy(session, stats->session, sizeof(stats->session));
	*floor = stats->floor;
	if (!d->open || stats->session[0] == '\0')
		state = DQ_LEND_CLOSED;
	else if (d->given == d->taken)
		state = DQ_LEND_NONE;
	else if (TimestampDifferenceExceeds(d->given_at, GetCurrentTimestamp(), FRESH_MS))
		state = DQ_LEND_STALE;
	dq_stats_release(stats);
	return state;
}

bool
dq_lend_take(Oid dboid, int32 shard, bool unused)
{
	DqShardStats *stats = dq_stats_lock(dboid, shard);
	DqDelivery *d = &stats->delivery;
	bool		taken = d->open && d->given != d->taken;

	if (taken)
	{
		d->taken = d->given;
		d->taken_at = GetCurrentTimestamp();
		if (unused)
			d->answered = d->taken;
	}
	d->wanted = unused;
	dq_stats_release(stats);
	return taken;
}

void
dq_lend_want(Oid dboid, int32 shard)
{
	DqShardStats *stats = dq_stats_lock(dboid, shard);

	stats->delivery.wanted = true;
	dq_stats_release(stats);
}

void
dq_lend_answered(Oid dboid, int32 shard, const char *session, int64 version,
				 int64 next_due, int64 in_flight)
{
	DqShardStats *stats = dq_stats_lock(dboid, shard);
	DqDelivery *d = &stats->delivery;

	if (version >= 0)
	{
		/* PO 7: the floor is the highest version that anybody has seen */
		if (strcmp(stats->session, session) == 0)
			stats->floor = Max(stats->floor, version);
		d->next_due = next_due;
	}
	d->in_flight = in_flight;
	d->answered = d->taken;
	dq_stats_release(stats);
}

bool
dq_lend_give(Oid dboid, int32 shard, bool may, bool due, uint64 *answered,
			 int64 *next_due, bool *outstanding)
{
	DqShardStats *stats = dq_stats_lock(dboid, shard);
	DqDelivery *d = &stats->delivery;
	TimestampTz now = GetCurrentTimestamp();
	bool		wake = false;

	*answered = d->answered;
	*next_due = d->next_due;
	if (d->open && !may)
		d->given = d->taken;
	d->open = may;
	if (may && d->given != d->taken)
	{
		if (TimestampDifferenceExceeds(d->given_at, now, RENEW_MS))
		{
			d->given_at = now;
			wake = true;
		}
	}
	else if (may && (due || d->wanted) &&
			 (d->answered == d->taken || TimestampDifferenceExceeds(d->taken_at, now, LOST_MS)))
	{
		d->given = d->taken + 1;
		d->given_at = now;
		d->wanted = false;
		wake = true;
	}
	*outstanding = d->given != d->taken || d->answered != d->taken;
	dq_stats_release(stats);
	return wake;
}

/* A reason for which its tasks wait, "" none any more. */
void
dq_delivery_parked(Oid dboid, int32 shard, const char *reason)
{
	DqShardStats *stats = dq_stats_lock(dboid, shard);

	if (strcmp(stats->delivery.parked, reason) != 0)
	{
		strlcpy(stats->delivery.parked, reason, sizeof(stats->delivery.parked));
		stats->delivery.parked_at = GetCurrentTimestamp();
	}
	dq_stats_release(stats);
}
