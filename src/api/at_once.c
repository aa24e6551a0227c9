/*
 * at_once.c
 *	  Queues with option transactional 'off': operations run their script in the
 *	  session, before the function returns, and a rollback does not undo them. Each
 *	  call has a number, and Redis remembers the answer to the last call of every
 *	  process, so a call whose answer was lost can be sent again. Called by the SQL
 *	  functions that offer, remove and reschedule.
 */
#include "postgres.h"

#include "api/api.h"
#include "compat.h"
#include "shared/points.h"

#include "miscadmin.h"
#include "storage/latch.h"
#include "storage/proc.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#define PAUSE_MS	20			/* before a call is sent again */

/*
 * Part of the ids of tasks that no outbox row stands for, in the place of the
 * timeline's highest bit: healing (sweep.lua) takes them for a stranger's, so it
 * neither brings them back nor drops them.
 */
#define ID_AT_ONCE	(UINT64CONST(1) << 47)

void
dq_tell_at_once(const DqQueue *queue)
{
	static bool told = false;

	if (told)
		return;
	told = true;
	ereport(NOTICE,
			(errmsg("queue \"%s\" is not transactional", queue->relname),
			 errdetail("Its operations take effect at once, and a rollback does not undo them.")));
}

/* The connection failed, or the server is coming back: sending again may help. */
static bool
may_pass(int sqlstate)
{
	return ERRCODE_TO_CATEGORY(sqlstate) == ERRCODE_CONNECTION_EXCEPTION ||
		sqlstate == ERRCODE_CANNOT_CONNECT_NOW;
}

static void
pause_a_little(void)
{
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, PAUSE_MS,
					 PG_WAIT_EXTENSION);
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
}

static void
check_status(const DqQueue *queue, const DqCall *call, const DqFence *fence)
{
	if (fence->status == DQ_OWNER)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("queue \"%s\" belongs to another database", queue->relname),
				 errhint("dq_adopt() makes this database the owner.")));
	if (fence->status == DQ_NODE)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("node number %d is in use by another source in queue \"%s\"",
						call->node, queue->relname),
				 errhint("Set dq_bridge.node_id to another number.")));
	if (fence->status == DQ_POSITION)
		ereport(ERROR,
				(errcode(ERRCODE_INTERNAL_ERROR),
				 errmsg("Redis knows a later call of this process than the one it makes")));
}

/*
 * Run the page's operations, once, however often it has to be sent: a call that may
 * have been executed is sent until an answer comes, at least twice, and for the
 * server's command_timeout.
 */
static void
run_call(DqQueue *queue, int shard, DqPage *page, const DqSession *session,
		 DqApplyResult *result)
{
	const DqSource *source = dq_source_get(true);
	DqServer   *server = dq_server_get(queue->serverid, queue->owner, false);
	MemoryContext caller = CurrentMemoryContext;
	TimestampTz deadline = TimestampTzPlusMilliseconds(GetCurrentTimestamp(),
													   server->target.command_timeout);
	DqKeys		keys;
	DqCall		call;
	volatile bool sent = false,
				answered = false;
	volatile int attempts = 0;

	dq_server_check_usable(server);
	dq_keys_make(&keys, dq_shard_name(queue->name, queue->nshards, shard));
	memset(&call, 0, sizeof(call));
	call.session = session ? session->session : "";
	call.floor = session ? session->floor : 0;
	call.source = source->id;
	call.place = dq_place();
	call.producer = queue->producer;
	call.node = source->node;
	call.process = DqMyProcNumber;
	call.life = dq_incarnation();
	call.number = pg_atomic_add_fetch_u64(&dq_shared()->calls, 1);
	call.index = queue->index;
	while (!answered)
	{
		attempts++;
		PG_TRY();
		{
			DqRedis    *redis = dq_redis_get(&server->target);

			sent = true;
			DQ_POINT("call.send");
			dq_op_call(redis, queue->relname, &keys, page, &call, result);
			DQ_POINT("call.received");
			answered = true;
		}
		PG_CATCH();
		{
			ErrorData  *error;

			/* only the exchange with Redis can have failed so */
			if (!may_pass(geterrcode()))
				PG_RE_THROW();
			MemoryContextSwitchTo(caller);
			error = CopyErrorData();
			FlushErrorState();
			if (!sent || (attempts > 1 && GetCurrentTimestamp() >= deadline))
				ereport(ERROR,
						(errcode(ERRCODE_CONNECTION_FAILURE),
						 errmsg("Redis of queue \"%s\" does not answer", queue->relname),
						 errdetail("%s%s", error->message,
								   sent ? "; whether the operation took effect is not known" : ""),
						 errhint("With option transactional \"on\" the operation is recorded instead.")));
			FreeErrorData(error);
		}
		PG_END_TRY();
		if (!answered)
			pause_a_little();
	}
	check_status(queue, &call, &result->fence);
}

char *
dq_offer_at_once(DqQueue *queue, bytea *payload, int64 due, bytea *key)
{
	DqPage	   *page;
	DqApplyResult result;
	uint64		id;
	int64		seq;
	int			shard = 0;

	dq_tell_at_once(queue);
	dq_shards_resolve(queue);
	seq = dq_outbox_next(&id);
	if (queue->nshards > 1)
		shard = key ? dq_shard_of_key(VARDATA_ANY(key), VARSIZE_ANY_EXHDR(key), queue->nshards)
			: (int) (seq % queue->nshards);
	id |= ID_AT_ONCE;
	page = dq_page_create(CurrentMemoryContext);
	dq_page_offer(page, due, id, payload, key);
	run_call(queue, shard, page, NULL, &result);
	MemoryContextDelete(page->context);
	DQ_COUNT(queue->shard_no[shard], offered, 1);
	if (!dq_bridge_alive(MyDatabaseId, queue->serverid))
		(void) dq_wake_bridge(MyDatabaseId, queue->serverid);
	return dq_id_out(due, id);
}

static int
shard_index(const DqQueue *queue, int32 no)
{
	int			i;

	for (i = 0; i < queue->nshards; i++)
		if (queue->shard_no[i] == no)
			return i;
	elog(ERROR, "shard %d of queue \"%s\" is gone", no, queue->relname);
	return 0;					/* keep compiler quiet */
}

/* false: what was taken is gone meanwhile, or Redis has lost it */
bool
dq_finish_at_once(DqQueue *queue, const DqTaken *taken, const DqOffering *instead, uint64 *id)
{
	int			shard = shard_index(queue, taken->shard);
	DqPage	   *page = dq_page_create(CurrentMemoryContext);
	bytea	   *token = palloc(VARHDRSZ + DQ_TOKEN_LEN);
	DqApplyResult result;

	SET_VARSIZE(token, VARHDRSZ + DQ_TOKEN_LEN);
	memcpy(VARDATA(token), taken->token, DQ_TOKEN_LEN);
	dq_page_remove(page, taken->member, taken->due, token);
	if (instead)
	{
		(void) dq_outbox_next(id);
		*id |= ID_AT_ONCE;
		dq_page_offer(page, instead->due, *id, instead->payload, instead->key);
	}
	run_call(queue, shard, page, &taken->session, &result);
	MemoryContextDelete(page->context);
	if (result.fence.status != DQ_OK || result.removed == 0)
		return false;
	dq_session_note(MyDatabaseId, taken->shard, result.fence.session, result.fence.version);
	dq_hold_void(taken->token);
	if (instead)
		DQ_COUNT(taken->shard, rescheduled, 1);
	else
		DQ_COUNT(taken->shard, removed, 1);
	return true;
}

/* The same, of a task that stays what it is but for its due instant, or of none. */
static bool
finish(DqQueue *queue, const DqTaken *taken, const int64 *due, uint64 *id)
{
	DqOffering	instead;

	if (due == NULL)
		return dq_finish_at_once(queue, taken, NULL, NULL);
	instead.due = *due;
	instead.payload = dq_member_payload(taken->member);
	instead.key = taken->key;
	return dq_finish_at_once(queue, taken, &instead, id);
}

/*
 * The task is held first, as any removal does: so others' holds are respected, and
 * an answer that is lost can be asked for again. What it holds when it is interrupted
 * goes back.
 */
DqAnswer
dq_take_at_once(Oid relid, bytea *element, bool key_only, const int64 *due, uint64 *id)
{
	DqQueue    *queue = dq_queue_get(relid);
	TimestampTz deadline = TimestampTzPlusMilliseconds(GetCurrentTimestamp(),
													   queue->remove_timeout);

	dq_tell_at_once(queue);
	for (;;)
	{
		DqTaken		taken;
		DqAnswer	answer = dq_take(relid, element, key_only, &deadline, &taken);

		queue = dq_queue_get(relid);
		dq_shards_resolve(queue);
		if (taken.is_own)
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("the task was offered in this transaction, before queue \"%s\" stopped being transactional",
							queue->relname)));
		if (answer == DQ_ANSWER_FALSE)
			return answer;
		if (answer == DQ_ANSWER_TRUE && finish(queue, &taken, due, id))
			return answer;
		if (answer == DQ_ANSWER_UNKNOWN && key_only)
			return answer;
		if (GetCurrentTimestamp() < deadline)
		{
			/* a known outage may be over any moment */
			if (answer == DQ_ANSWER_UNKNOWN)
				pause_a_little();
			continue;
		}
		ereport(ERROR,
				(errcode(ERRCODE_CONNECTION_FAILURE),
				 errmsg("no certain answer from Redis for queue \"%s\" within %d ms",
						queue->relname, queue->remove_timeout),
				 errdetail("The queue is not transactional, so nothing is recorded."),
				 errhint("Is a worker running, and Redis reachable? Option remove_timeout of the foreign table sets how long to wait.")));
	}
}
