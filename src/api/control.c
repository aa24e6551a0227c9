/*
 * control.c
 *	  dq_sync, dq_transfer, dq_pause, dq_resume.
 */
#include "postgres.h"

#include "api/api.h"
#include "compat.h"
#include "relay/relay.h"
#include "shared/points.h"

#include "access/xact.h"
#include "fmgr.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "storage/condition_variable.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

PG_FUNCTION_INFO_V1(dq_sync);
PG_FUNCTION_INFO_V1(dq_transfer);
PG_FUNCTION_INFO_V1(dq_pause);
PG_FUNCTION_INFO_V1(dq_resume);

static DqKeys
shard_keys(const DqQueue *queue, int shard)
{
	DqKeys		keys;

	dq_keys_make(&keys, dq_shard_name(queue->name, queue->nshards, shard));
	return keys;
}

/* ---- dq_sync ---- */

static bool
queue_is_synced(DqQueue *queue, Snapshot snapshot)
{
	const DqSource *source = dq_source_get(false);
	DqServer   *server = dq_server_get(queue->serverid, queue->owner, false);
	DqRedis    *redis;
	bool		synced = true;
	int			i;

	if (source == NULL)
		return true;			/* nothing has ever been offered here */
	dq_shards_resolve(queue);
	dq_server_check_usable(server);
	redis = dq_redis_get(&server->target);
	for (i = 0; synced && i < queue->nshards; i++)
	{
		DqKeys		keys = shard_keys(queue, i);
		DqFence		fence;
		DqFenceRecord record;
		DqReply    *error;
		DqStatusArgs args = {.source = source->id};

		dq_op_status_send(redis, &keys, &args);
		dq_op_status_result(redis, &fence, &record, &error);
		if (error)
		{
			if (dq_reply_is_noscript(error))
				return false;
			dq_reply_report(ERROR, redis, error, "status", queue->relname);
		}
		synced = dq_outbox_is_covered(queue->shard_no[i], dq_snapshot_in(record.prev),
									  record.old[0] ? dq_snapshot_in(record.old) : NULL,
									  snapshot);
	}
	return synced;
}

/*
 * One look, and a push: 1 synced, 0 not yet, -1 Redis does not answer.
 */
static int
try_sync(DqQueue *queue, Snapshot snapshot, TimestampTz deadline, MemoryContext each)
{
	MemoryContext caller = MemoryContextSwitchTo(each);
	Oid			serverid = queue->serverid;
	volatile int result = 0;

	PG_TRY();
	{
		long		left;

		if (queue_is_synced(queue, snapshot))
			result = 1;
		else
		{
			left = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), deadline);
			if (left > 0 && !dq_wake_bridge(MyDatabaseId, serverid))
				(void) dq_relay_by_hand(serverid, left);
		}
	}
	PG_CATCH();
	{
		if (!dq_error_is_redis(geterrcode()))
			PG_RE_THROW();
		MemoryContextSwitchTo(each);
		FlushErrorState();
		result = -1;
	}
	PG_END_TRY();
	MemoryContextSwitchTo(caller);
	MemoryContextReset(each);
	return result;
}

/*
 * With Redis down: false at the timeout, no error.
 */
Datum
dq_sync(PG_FUNCTION_ARGS)
{
	Interval   *timeout;
	TimestampTz deadline;
	Snapshot	snapshot;
	List	   *relids;
	ListCell   *lc;
	MemoryContext each;
	bool		synced = true;

	if (PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("timeout must not be NULL")));
	timeout = PG_GETARG_INTERVAL_P(1);
	deadline = dq_delay_from_now(timeout);

	if (!PG_ARGISNULL(0))
	{
		DqQueue    *queue = dq_queue_get(PG_GETARG_OID(0));

		if (!dq_has_any_right(queue->relid))
			dq_require(queue, ACL_SELECT);
		relids = list_make1_oid(queue->relid);
	}
	else
	{
		List	   *all = dq_queue_list(InvalidOid);

		relids = NIL;
		foreach(lc, all)
		{
			DqQueue    *queue = dq_queue_get_noerror(lfirst_oid(lc));

			if (queue && dq_has_any_right(queue->relid))
				relids = lappend_oid(relids, queue->relid);
		}
	}

	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	each = AllocSetContextCreate(CurrentMemoryContext, "dq_sync", ALLOCSET_DEFAULT_SIZES);
	foreach(lc, relids)
	{
		for (;;)
		{
			DqQueue    *queue = dq_queue_get_noerror(lfirst_oid(lc));
			int			result;
			long		left;

			CHECK_FOR_INTERRUPTS();
			if (queue == NULL)
				break;			/* dropped meanwhile */
			result = try_sync(queue, snapshot, deadline, each);
			if (result == 1)
				break;
			left = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), deadline);
			if (left <= 0)
			{
				synced = false;
				break;
			}
			ConditionVariablePrepareToSleep(&dq_shared()->progress);
			ConditionVariableTimedSleep(&dq_shared()->progress,
										Min(left, result < 0 ? 100 : 5), PG_WAIT_EXTENSION);
			ConditionVariableCancelSleep();
		}
		if (!synced)
			break;
	}
	MemoryContextDelete(each);
	UnregisterSnapshot(snapshot);
	PG_RETURN_BOOL(synced);
}

/* ---- dq_transfer ---- */

/*
 * Moves at most max tasks of all shards. In the session of the running bridge;
 * without one, this backend is the bridge for the moment it takes to enter.
 */
Datum
dq_transfer(PG_FUNCTION_ARGS)
{
	DqQueue    *queue;
	DqServer   *server;
	int64		max;
	int64		moved = 0;
	int			i;

	if (PG_ARGISNULL(0) || PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("%s must not be NULL", PG_ARGISNULL(0) ? "queue" : "max")));
	PreventCommandIfReadOnly("dq_transfer()");
	PreventCommandDuringRecovery("dq_transfer()");
	max = PG_GETARG_INT64(1);
	if (max < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max must not be negative")));
	queue = dq_queue_get(PG_GETARG_OID(0));
	dq_require_owner(queue);
	if (queue->destination != DQ_DEST_LIST)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("queue \"%s\" has no ready list to transfer to", queue->relname)));
	dq_require_not_producer(queue, "transfer tasks");
	if (dq_queue_is_paused(queue))
		PG_RETURN_INT64(0);

	if (!dq_bridge_alive(MyDatabaseId, queue->serverid))
		(void) dq_relay_by_hand(queue->serverid, 10000);
	queue = dq_queue_get(PG_GETARG_OID(0));
	dq_shards_resolve(queue);
	if (queue->stop_on_loss && dq_queue_has_loss(queue))
		PG_RETURN_INT64(0);
	server = dq_server_get(queue->serverid, queue->owner, false);
	dq_server_check_usable(server);
	for (i = 0; i < queue->nshards; i++)
	{
		DqKeys		keys = shard_keys(queue, i);
		bool		more = true;

		while (more && moved < max)
		{
			DqRedis    *redis = dq_redis_get(&server->target);
			DqShardStats stats;
			DqTransferResult result;
			DqReply    *error;

			CHECK_FOR_INTERRUPTS();
			if (!dq_stats_get(MyDatabaseId, queue->shard_no[i], &stats))
				break;
			DQ_POINT("hand.transfer.send");
			dq_op_transfer_send(redis, &keys, stats.session, stats.floor,
								dq_source_get(true)->id, dq_now_ms(),
								(int) Min(max - moved, 256));
			dq_op_transfer_result(redis, &result, &error);
			DQ_POINT("hand.transfer.received");
			if (error)
			{
				if (dq_reply_is_noscript(error))
					continue;
				dq_reply_report(ERROR, redis, error, "transfer", queue->relname);
			}
			if (result.fence.status == DQ_OWNER ||
				strcmp(stats.state, "not_owner") == 0)
				ereport(ERROR,
						(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
						 errmsg("queue \"%s\" belongs to another database", queue->relname),
						 errhint("dq_adopt() makes this database the owner.")));
			if (result.fence.status != DQ_OK)
				break;			/* frozen or superseded: the bridge sees to it first */
			moved += result.moved;
			more = result.more;
		}
	}
	PG_RETURN_INT64(moved);
}

/* ---- dq_pause, dq_resume ---- */

static void
set_pause(FunctionCallInfo fcinfo, const char *name, bool paused)
{
	DqQueue    *queue;

	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("queue must not be NULL")));
	PreventCommandIfReadOnly(name);
	PreventCommandIfParallelMode(name);
	PreventCommandDuringRecovery(name);
	queue = dq_queue_get(PG_GETARG_OID(0));
	dq_require_owner(queue);
	(void) dq_pause_set(queue, paused);
	if (!paused)
	{
		dq_shards_resolve(queue);
		dq_losses_accept(queue);
	}
}

Datum
dq_pause(PG_FUNCTION_ARGS)
{
	set_pause(fcinfo, "dq_pause()", true);
	PG_RETURN_VOID();
}

Datum
dq_resume(PG_FUNCTION_ARGS)
{
	set_pause(fcinfo, "dq_resume()", false);
	PG_RETURN_VOID();
}
