/*
 * offer.c
 *	  dq_offer and dq_offer_at: a row in the outbox, nothing else; Redis is not
 *	  asked, unless the queue is not transactional.
 */
#include "postgres.h"

#include "api/api.h"
#include "compat.h"
#include "shared/points.h"

#include "access/xact.h"
#include "common/int.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

PG_FUNCTION_INFO_V1(dq_offer);
PG_FUNCTION_INFO_V1(dq_offer_at);

TimestampTz
dq_delay_from_now(Interval *delay)
{
	TimestampTz now = GetCurrentTimestamp();

	if (delay->month == 0 && delay->day == 0)
	{
		TimestampTz due;

		if (pg_add_s64_overflow(now, delay->time, &due) || !IS_VALID_TIMESTAMP(due))
			ereport(ERROR,
					(errcode(ERRCODE_DATETIME_VALUE_OUT_OF_RANGE),
					 errmsg("delay out of range")));
		return due;
	}
	/* days and months by the session's time zone */
	return DatumGetTimestampTz(DirectFunctionCall2(timestamptz_pl_interval,
												   TimestampTzGetDatum(now),
												   PointerGetDatum(delay)));
}

int64
dq_due_of_delay(Interval *delay)
{
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz at = dq_delay_from_now(delay);

	if (at < now)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("delay must not be negative"),
				 errhint("An instant in the past, as dq_offer_at() and dq_reschedule_at() take it, is due at once.")));
	return dq_due_from_timestamp(at);
}

static void
check_offer(const DqQueue *queue, const bytea *payload, const bytea *key)
{
	if (VARSIZE_ANY_EXHDR(payload) > DQ_MAX_PAYLOAD)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("payload of %zu bytes is too large", (size_t) VARSIZE_ANY_EXHDR(payload)),
				 errdetail("Redis takes values of up to %d bytes.", DQ_MAX_PAYLOAD)));
	if (key && !queue->index)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("queue \"%s\" keeps no index, so its tasks can have no key",
						queue->relname),
				 errhint("Set option index of the foreign table to \"on\".")));
}

/*
 * Key and payload have been made bytes; due is in whole ms. The id is drawn from
 * the sequence under the queue's lock.
 */
char *
dq_offer_record(DqQueue *queue, bytea *payload, int64 due, bytea *key)
{
	return dq_offer_record_as(queue, DQ_OP_OFFER, -1, payload, due, key, NULL);
}

char *
dq_offer_record_as(DqQueue *queue, char op, int32 shard_no, bytea *payload, int64 due,
				   bytea *key, const char *token)
{
	DqRow		row;

	if (queue->at_once)
	{
		check_offer(queue, payload, key);
		return dq_offer_at_once(queue, payload, due, key);
	}
	(void) dq_offer_prepare(queue, op, shard_no, payload, due, key, token, &row);
	dq_outbox_insert(&row, queue->serverid);
	DQ_POINT("offer.recorded");
	return dq_id_out(due, row.id);
}

/* All checks, and the row that dq_outbox_insert is to write. */
int
dq_offer_prepare(DqQueue *queue, char op, int32 shard_no, bytea *payload, int64 due,
				 bytea *key, const char *token, DqRow *row)
{
	int			shard = 0;

	check_offer(queue, payload, key);
	if (queue->on_outage == DQ_OUTAGE_ERROR && dq_is_known_down(queue))
		dq_raise_outage(queue);
	DQ_POINT("offer.begin");
	dq_shards_resolve(queue);
	memset(row, 0, sizeof(*row));
	row->seq = dq_outbox_next(&row->id);
	DQ_POINT("offer.numbered");
	if (queue->nshards > 1)
		shard = key ? dq_shard_of_key(VARDATA_ANY(key), VARSIZE_ANY_EXHDR(key), queue->nshards)
			: (int) (row->seq % queue->nshards);
	/* a task that moves and has no key stays where it is, if that is still a shard */
	for (int i = 0; i < queue->nshards && !key && shard_no >= 0; i++)
		if (queue->shard_no[i] == shard_no)
			shard = i;
	row->shard = !key && shard_no >= 0 ? shard_no : queue->shard_no[shard];
	row->op = op;
	row->due = due;
	row->key = key;
	row->payload = payload;
	if (token)
	{
		row->token = palloc(VARHDRSZ + DQ_TOKEN_LEN);
		SET_VARSIZE(row->token, VARHDRSZ + DQ_TOKEN_LEN);
		memcpy(VARDATA(row->token), token, DQ_TOKEN_LEN);
	}
	return shard;
}

static void
check_arguments(FunctionCallInfo fcinfo, const char *third)
{
	static const char *const names[] = {"queue", "payload"};
	int			i;

	for (i = 0; i < 3; i++)
		if (PG_ARGISNULL(i))
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("%s must not be NULL", i < 2 ? names[i] : third)));
}

static Datum
offer(FunctionCallInfo fcinfo, const char *name, bool delayed)
{
	DqQueue    *queue;
	bytea	   *payload;
	bytea	   *key = NULL;
	int64		due;

	check_arguments(fcinfo, delayed ? "delay" : "due_at");
	PreventCommandIfReadOnly(name);
	PreventCommandIfParallelMode(name);
	PreventCommandDuringRecovery(name);

	queue = dq_queue_open(PG_GETARG_OID(0));
	dq_require(queue, ACL_INSERT);
	payload = dq_payload_bytes(PG_GETARG_DATUM(1), get_fn_expr_argtype(fcinfo->flinfo, 1));
	dq_payload_check(queue, payload);
	if (!PG_ARGISNULL(3))
		key = dq_key_bytes(queue, PG_GETARG_DATUM(3), get_fn_expr_argtype(fcinfo->flinfo, 3));

	if (delayed)
		due = dq_due_of_delay(PG_GETARG_INTERVAL_P(2));
	else
		due = dq_due_from_timestamp(PG_GETARG_TIMESTAMPTZ(2));

	PG_RETURN_TEXT_P(cstring_to_text(dq_offer_record(queue, payload, due, key)));
}

Datum
dq_offer(PG_FUNCTION_ARGS)
{
	return offer(fcinfo, "dq_offer()", true);
}

Datum
dq_offer_at(PG_FUNCTION_ARGS)
{
	return offer(fcinfo, "dq_offer_at()", false);
}
