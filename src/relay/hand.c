/*
 * hand.c
 *	  The bridge without a worker: a backend relays for a moment,
 *	  within its own transaction. Called by the SQL functions.
 */
#include "postgres.h"

#include "compat.h"
#include "relay/relay_private.h"

#include "access/xlog.h"
#include "miscadmin.h"
#include "storage/latch.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

static bool
is_settled(DqBridge *bridge)
{
	ListCell   *l,
			   *lc;

	foreach(l, bridge->links)
		foreach(lc, ((DqLink *) lfirst(l))->shards)
	{
		DqShard    *shard = lfirst(lc);

		if (shard->blocked_until > GetCurrentTimestamp() ||
			shard->state == DQ_SHARD_NOT_OWNER)
			continue;
		if (shard->state != DQ_SHARD_OPEN || shard->batch)
			return false;
	}
	return true;
}

bool
dq_relay_by_hand(Oid serverid, long timeout_ms)
{
	MemoryContext caller = CurrentMemoryContext;
	TimestampTz deadline = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), timeout_ms);
	DqBridge   *bridge;
	int			nest;

	/* a standby sends nothing, its primary does */
	if (RecoveryInProgress() || !dq_bridge_lock(serverid))
		return false;
	nest = NewGUCNestLevel();
	/* PO 1: what is sent must be durable whatever this session is content with */
	(void) set_config_option("synchronous_commit", "on", PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SAVE, true, 0, false);
	bridge = dq_bridge_create(serverid);
	bridge->no_transfer = true;
	PG_TRY();
	{
		for (;;)
		{
			long		wait = dq_bridge_round(bridge);

			if (is_settled(bridge) || GetCurrentTimestamp() >= deadline)
				break;
			/* something waits for somebody else: an owner, a worker */
			if (wait > 0)
			{
				(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
								 Min(wait, 10), PG_WAIT_EXTENSION);
				ResetLatch(MyLatch);
				CHECK_FOR_INTERRUPTS();
			}
		}
	}
	PG_FINALLY();
	{
		/* a round leaves its own context current, which is about to go */
		MemoryContextSwitchTo(caller);
		dq_bridge_free(bridge);
		dq_bridge_unlock(serverid);
	}
	PG_END_TRY();
	AtEOXact_GUC(true, nest);
	MemoryContextSwitchTo(caller);
	return true;
}
