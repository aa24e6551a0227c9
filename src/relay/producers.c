/*
 * producers.c
 *	  Several sources on one shard: the owner thaws it only when every producer that
 *	  lives has made good its own operations for the session (PROTOCOL 3.3). Which of
 *	  them live is told by leases in Redis, and after a loss, which may have taken the
 *	  leases along, by what was known before. Called by exchange.c.
 */
#include "postgres.h"

#include "relay/relay_private.h"

#include "utils/memutils.h"
#include "utils/timestamp.h"

#define AGAIN_MS	50

static int64
lease_ms(const DqLink *link)
{
	return Max(10000, 5 * (int64) link->scan_interval);
}

/* Told with each status while the shard is open. */
void
dq_producers_note(DqShard *shard, const DqFenceRecord *record)
{
	if (shard->producer || shard->state != DQ_SHARD_OPEN ||
		(shard->producers && strcmp(shard->producers, record->producers) == 0))
		return;
	if (shard->producers)
		pfree(shard->producers);
	shard->producers = MemoryContextStrdup(shard->context, record->producers);
	shard->marking.wanted = true;	/* it is stored with the mark */
}

/*
 * After a loss: those that lived before it have as long to report as their leases
 * would have lasted. Without one the leases in Redis say it all.
 */
const char *
dq_producers_awaited(const DqLink *link, const DqShard *shard)
{
	if (shard->producer || !shard->loss_noted || shard->producers == NULL ||
		TimestampDifferenceExceeds(shard->entered_at, GetCurrentTimestamp(),
								   (int) lease_ms(link)))
		return NULL;
	return shard->producers;
}

/* Thawed without some of them, after their time. */
void
dq_producers_thawed(const DqLink *link, const DqShard *shard)
{
	if (shard->loss_noted && shard->producers && shard->producers[0] != '\0' &&
		dq_producers_awaited(link, shard) == NULL)
		ereport(WARNING,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("dq_bridge: shard \"%s\" is open again, but a producer has not come: its tasks may be delivered again",
						shard->name),
				 errdetail("Producers before the loss: %s", shard->producers)));
}

void
dq_producers_wait(DqLink *link, DqShard *shard, const char *who)
{
	shard->thaw_at = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), AGAIN_MS);
	if (shard->awaited && strcmp(shard->awaited, who) == 0)
		return;
	if (shard->awaited)
		pfree(shard->awaited);
	shard->awaited = MemoryContextStrdup(shard->context, who);
	ereport(DEBUG1,
			(errmsg_internal("dq_bridge: shard \"%s\" waits for producer %s", shard->name, who)));
}
