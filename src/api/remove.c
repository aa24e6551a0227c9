/*
 * remove.c
 *	  dq_remove: cancel one pending task. take.c takes it out of circulation; the
 *	  row written here makes that final when the transaction commits. What was found
 *	  is recorded as an exact member, so that it means the same task whenever it is
 *	  applied (PO 17).
 */
#include "postgres.h"

#include "api/api.h"
#include "compat.h"
#include "shared/points.h"

#include "access/xact.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

PG_FUNCTION_INFO_V1(dq_remove);

/* ---- what is recorded ---- */

void
dq_record_member(DqQueue *queue, int32 shard, int64 due, bytea *member, const char *hold)
{
	DqRow		row;
	uint64		id;
	bytea	   *token = NULL;	/* of a task that was never in Redis */

	Assert(member != NULL);
	if (hold)
	{
		token = palloc(VARHDRSZ + DQ_TOKEN_LEN);
		SET_VARSIZE(token, VARHDRSZ + DQ_TOKEN_LEN);
		memcpy(VARDATA(token), hold, DQ_TOKEN_LEN);
	}
	memset(&row, 0, sizeof(row));
	row.seq = dq_outbox_next(&id);
	row.id = id;
	row.shard = shard;
	row.op = DQ_OP_REMOVE;
	row.due = due;
	row.member = member;
	row.token = token;
	dq_outbox_insert(&row, queue->serverid);
	DQ_POINT("remove.recorded");
}

/*
 * No certain answer: one row, in the shard where the element would live as a key.
 * The relay looks up what it names when everything before it is applied.
 */
static void
record_element(DqQueue *queue, bytea *element, bool key_only)
{
	int			home = dq_shard_of_key(VARDATA_ANY(element), VARSIZE_ANY_EXHDR(element),
									   queue->nshards);
	DqRow		row;

	memset(&row, 0, sizeof(row));
	row.seq = dq_outbox_next(&row.id);
	row.shard = queue->shard_no[home];
	row.op = key_only ? DQ_OP_REMOVE_KEY : DQ_OP_REMOVE_ELEMENT;
	row.key = element;
	dq_outbox_insert(&row, queue->serverid);
	DQ_POINT("remove.recorded");
}

/*
 * The rows of what was taken: with the token, so that only this row ends the hold
 * when it has committed (PO 9). false: Redis has lost the hold, nothing is written.
 */
static bool
record_taken(DqQueue *queue, DqTaken *taken)
{
	if (taken->in_redis)
	{
		/*
		 * PO 7: a bridge that finds Redis gone back publishes a new session, waits
		 * for rows that are being written, and then reads which open transactions
		 * rely on holds.
		 */
		if (!dq_hold_writing(taken->shard, &taken->session))
			return false;
		dq_record_member(queue, taken->shard, taken->due, taken->member, taken->token);
		dq_hold_written();
		dq_hold_keep(taken->token);
	}
	if (taken->is_own)
		dq_record_member(queue, taken->own.shard, taken->own.due,
					  dq_member_make(taken->own.id, taken->own.payload), NULL);
	return true;
}

DqAnswer
dq_take_and_record(Oid relid, bytea *element, bool key_only, DqTaken *taken)
{
	DqQueue    *queue = dq_queue_get(relid);
	TimestampTz deadline = TimestampTzPlusMilliseconds(GetCurrentTimestamp(),
													   queue->remove_timeout);

	for (;;)
	{
		DqAnswer	answer = dq_take(relid, element, key_only, &deadline, taken);

		DQ_POINT("take.answered");
		/* messages may have been processed meanwhile */
		queue = dq_queue_get(relid);
		dq_shards_resolve(queue);
		if (record_taken(queue, taken))
			return answer;
		if (GetCurrentTimestamp() >= deadline)
		{
			memset(taken, 0, sizeof(*taken));
			return DQ_ANSWER_UNKNOWN;
		}
	}
}

static DqAnswer
remove_task(DqQueue *queue, bytea *element, bool key_only)
{
	Oid			relid = queue->relid;
	DqTaken		taken;
	DqAnswer	answer;

	dq_require_not_producer(queue, "remove tasks");
	memset(&taken, 0, sizeof(taken));
	if (queue->at_once)
		answer = dq_take_at_once(relid, element, key_only, NULL, NULL);
	else
		answer = dq_take_and_record(relid, element, key_only, &taken);
	queue = dq_queue_get(relid);
	dq_shards_resolve(queue);
	if (answer == DQ_ANSWER_UNKNOWN && !taken.is_own)
		record_element(queue, element, key_only);
	return answer;
}

DqAnswer
dq_remove_element(DqQueue *queue, bytea *element)
{
	return remove_task(queue, element, false);
}

DqAnswer
dq_remove_key(DqQueue *queue, bytea *key)
{
	return remove_task(queue, key, true);
}

Datum
dq_remove(PG_FUNCTION_ARGS)
{
	DqQueue    *queue;
	bytea	   *element;

	if (PG_ARGISNULL(0) || PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("%s must not be NULL", PG_ARGISNULL(0) ? "queue" : "element")));
	PreventCommandIfReadOnly("dq_remove()");
	PreventCommandIfParallelMode("dq_remove()");
	PreventCommandDuringRecovery("dq_remove()");

	queue = dq_queue_open(PG_GETARG_OID(0));
	dq_require(queue, ACL_DELETE | ACL_SELECT);
	element = dq_payload_bytes(PG_GETARG_DATUM(1), get_fn_expr_argtype(fcinfo->flinfo, 1));
	switch (dq_remove_element(queue, element))
	{
		case DQ_ANSWER_TRUE:
			PG_RETURN_BOOL(true);
		case DQ_ANSWER_FALSE:
			PG_RETURN_BOOL(false);
		default:
			PG_RETURN_NULL();
	}
}
