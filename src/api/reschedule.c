/*
 * reschedule.c
 *	  dq_reschedule, dq_reschedule_at: move one pending task to another instant. It
 *	  is taken as dq_remove takes it, and the whole new task is offered in the same
 *	  transaction: removed and offered stand or fall together.
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

PG_FUNCTION_INFO_V1(dq_reschedule);
PG_FUNCTION_INFO_V1(dq_reschedule_at);

bytea *
dq_member_payload(const bytea *member)
{
	const unsigned char *m = (const unsigned char *) VARDATA_ANY(member);
	size_t		len = VARSIZE_ANY_EXHDR(member);
	size_t		skip = 16;		/* the old one: a double, a length */
	bytea	   *payload;

	if (len > 0 && len >= (size_t) m[0] + 9)
	{
		uint64		n = 0;
		int			i;

		for (i = 7; i >= 0; i--)
			n = (n << 8) | m[1 + m[0] + i];
		if (n == len - m[0] - 9)
			skip = (size_t) m[0] + 9;
	}
	payload = palloc(VARHDRSZ + len - skip);
	SET_VARSIZE(payload, VARHDRSZ + len - skip);
	memcpy(VARDATA(payload), m + skip, len - skip);
	return payload;
}

/*
 * No certain answer: recorded, done by the relay when it comes to it, to the task
 * that the element names then.
 */
static void
record_element(DqQueue *queue, bytea *element, int64 due)
{
	int			home = dq_shard_of_key(VARDATA_ANY(element), VARSIZE_ANY_EXHDR(element),
									   queue->nshards);
	DqRow		row;

	memset(&row, 0, sizeof(row));
	row.seq = dq_outbox_next(&row.id);
	row.shard = queue->shard_no[home];
	row.op = DQ_OP_RESCHEDULE_ELEMENT;
	row.due = due;
	row.key = element;
	dq_outbox_insert(&row, queue->serverid);
}

char *
dq_reschedule_element(DqQueue *queue, bytea *element, int64 due)
{
	Oid			relid = queue->relid;
	DqTaken		taken;
	DqAnswer	answer;
	bytea	   *payload,
			   *key;
	int32		shard;

	dq_require_not_producer(queue, "reschedule tasks");
	if (queue->at_once)
	{
		uint64		id;

		if (dq_take_at_once(relid, element, false, &due, &id) != DQ_ANSWER_TRUE)
			return NULL;
		return dq_id_out(due, id);
	}
	answer = dq_take_and_record(relid, element, false, &taken);
	queue = dq_queue_get(relid);
	dq_shards_resolve(queue);
	if (answer == DQ_ANSWER_FALSE)
		return NULL;
	if (taken.is_own)
	{
		payload = taken.own.payload;
		key = taken.own.key;
		shard = taken.own.shard;
	}
	else if (taken.in_redis)
	{
		payload = dq_member_payload(taken.member);
		key = taken.key;
		shard = taken.shard;
	}
	else
	{
		record_element(queue, element, due);
		return NULL;
	}
	DQ_POINT("reschedule.taken");
	return dq_offer_record_as(queue, DQ_OP_RESCHEDULE, shard, payload, due, key,
							  taken.in_redis && !taken.is_own ? taken.token : NULL);
}

static Datum
reschedule(FunctionCallInfo fcinfo, const char *name, bool delayed)
{
	static const char *const names[] = {"queue", "element"};
	DqQueue    *queue;
	bytea	   *element;
	int64		due;
	char	   *id;
	int			i;

	for (i = 0; i < 3; i++)
		if (PG_ARGISNULL(i))
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("%s must not be NULL",
							i < 2 ? names[i] : delayed ? "delay" : "due_at")));
	PreventCommandIfReadOnly(name);
	PreventCommandIfParallelMode(name);
	PreventCommandDuringRecovery(name);

	queue = dq_queue_open(PG_GETARG_OID(0));
	dq_require(queue, ACL_UPDATE | ACL_SELECT);
	element = dq_payload_bytes(PG_GETARG_DATUM(1), get_fn_expr_argtype(fcinfo->flinfo, 1));
	due = delayed ? dq_due_of_delay(PG_GETARG_INTERVAL_P(2))
		: dq_due_from_timestamp(PG_GETARG_TIMESTAMPTZ(2));
	id = dq_reschedule_element(queue, element, due);
	if (id == NULL)
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(cstring_to_text(id));
}

Datum
dq_reschedule(PG_FUNCTION_ARGS)
{
	return reschedule(fcinfo, "dq_reschedule()", true);
}

Datum
dq_reschedule_at(PG_FUNCTION_ARGS)
{
	return reschedule(fcinfo, "dq_reschedule_at()", false);
}
