/*
 * operations.c
 *	  How a script is called and its reply read, and the two calls that carry the
 *	  load: apply and transfer. One C function per Lua script: arguments out, reply
 *	  in; the scripts' own headers (lua/) say what each does. Called by the relay,
 *	  the FDW and the SQL functions. The other calls: removal.c, session.c, poll.c,
 *	  take.c, reading.c and shelf.c.
 */
#include "postgres.h"

#include <math.h>

#include "queue/operations_private.h"

char *
dq_part_text(const DqReply *reply, int i)
{
	const DqReply *e = &reply->elements[i];

	if (e->type == DQ_REPLY_INTEGER)
		return psprintf(INT64_FORMAT, e->integer);
	if (e->type != DQ_REPLY_STRING)
		return pstrdup("");
	return pnstrdup(e->str, e->len);
}

bytea *
dq_part_bytes(const DqReply *reply, int i)
{
	const DqReply *e = &reply->elements[i];
	bytea	   *result = palloc(VARHDRSZ + e->len);

	SET_VARSIZE(result, VARHDRSZ + e->len);
	memcpy(VARDATA(result), e->str, e->len);
	return result;
}

int64
dq_part_int(const DqReply *reply, int i)
{
	const DqReply *e = &reply->elements[i];

	if (e->type == DQ_REPLY_INTEGER)
		return e->integer;
	if (e->type == DQ_REPLY_STRING && e->len > 0)
		return strtoll(pnstrdup(e->str, e->len), NULL, 10);
	return 0;
}

int64
dq_part_score(const DqReply *reply, int i)
{
	char	   *text = dq_part_text(reply, i);
	double		value;

	if (text[0] == '\0')
		return PG_INT64_MAX;
	value = ceil(strtod(text, NULL));
	if (isnan(value) || value >= 9.2e18)
		return PG_INT64_MAX;
	if (value <= -9.2e18)
		return PG_INT64_MIN;
	return (int64) value;
}

void
dq_reply_check(const DqReply *reply, int atleast, DqScriptId script)
{
	if (reply->type != DQ_REPLY_ARRAY || reply->nelements < atleast)
		ereport(ERROR,
				(errcode(ERRCODE_PROTOCOL_VIOLATION),
				 errmsg("unexpected reply of script \"%s\"",
						dq_script_name(script)),
				 errhint("A script in dq_bridge.script_dir may be of another version.")));
}

void
dq_fence_read(const DqReply *reply, DqFence *fence)
{
	const DqReply *s = &reply->elements[1];

	memset(fence, 0, sizeof(*fence));
	fence->status = (DqStatus) dq_part_int(reply, 0);
	strlcpy(fence->session, dq_part_text(reply, 1),
			Min(sizeof(fence->session), s->len + 1));
	fence->open = dq_part_int(reply, 2) == 1;
	fence->version = dq_part_int(reply, 3);
	fence->position = dq_part_text(reply, 4);
	fence->next_due = dq_part_score(reply, 5);
}

void
dq_script_send(DqRedis *redis, DqScriptId script, const DqKeys *keys, int nargs,
			const DqArg *args)
{
	dq_redis_append_script(redis, script, DQ_NUM_KEYS, keys->key, nargs, args);
}

DqReply *
dq_script_next(DqRedis *redis, DqScriptId script, int atleast, DqReply **error)
{
	DqReply    *reply = dq_redis_next(redis);

	*error = NULL;
	if (reply->type == DQ_REPLY_ERROR)
	{
		*error = reply;
		return NULL;
	}
	dq_reply_check(reply, atleast, script);
	return reply;
}

DqReply *
dq_script_call(DqRedis *redis, const char *queue, DqScriptId script,
			const DqKeys *keys, int nargs, const DqArg *args, int atleast)
{
	DqReply    *error;
	DqReply    *reply;
	int			tries;

	for (tries = 0;; tries++)
	{
		dq_script_send(redis, script, keys, nargs, args);
		reply = dq_script_next(redis, script, atleast, &error);
		if (reply)
			return reply;
		/* SCRIPT FLUSH or a restart came between; the next append sends the text */
		if (!dq_reply_is_noscript(error) || tries > 2)
			dq_reply_report(ERROR, redis, error, dq_script_name(script), queue);
		dq_reply_free(error);
	}
}

/* ---- apply ---- */

void
dq_op_apply_send(DqRedis *redis, const DqKeys *keys, DqPage *page,
				 const DqApplyHeader *header)
{
	char		least[24],
				count[24];
	DqArg	   *a = page->args;

	a[0] = DQ_ARG(header->session);
	a[1] = ARG_INT(least, header->floor);
	a[2] = DQ_ARG(header->source);
	a[3] = DQ_ARG(header->expect);
	a[4] = DQ_ARG(header->position);
	a[5] = DQ_ARG(header->writer);
	a[6] = DQ_ARG(header->cur ? header->cur : "");
	a[7] = DQ_ARG(header->done ? "1" : "0");
	a[8] = DQ_ARG(header->old ? header->old : "=");
	a[9] = DQ_ARG(header->index ? "1" : "0");
	a[10] = ARG_INT(count, page->nops);
	dq_script_send(redis, DQ_SCRIPT_APPLY, keys, page->nargs, a);
}

static void
read_applied(DqReply *reply, DqApplyResult *result)
{
	dq_fence_read(reply, &result->fence);
	result->applied = dq_part_int(reply, FENCE_ELEMENTS);
	result->removed = dq_part_int(reply, FENCE_ELEMENTS + 1);
	dq_reply_free(reply);
}

void
dq_op_apply_result(DqRedis *redis, DqApplyResult *result, DqReply **error)
{
	DqReply    *reply = dq_script_next(redis, DQ_SCRIPT_APPLY, FENCE_ELEMENTS + 2, error);

	if (reply)
		read_applied(reply, result);
}

void
dq_op_call(DqRedis *redis, const char *queue, const DqKeys *keys, DqPage *page,
		   const DqCall *call, DqApplyResult *result)
{
	char		least[24],
				process[24],
				number[48],
				node[24],
				count[24];
	DqArg	   *a = page->args;

	snprintf(process, sizeof(process), "!%d", call->process);
	snprintf(number, sizeof(number), UINT64_FORMAT "|" UINT64_FORMAT, call->life, call->number);
	a[0] = DQ_ARG(call->session);
	a[1] = ARG_INT(least, call->floor);
	a[2] = DQ_ARG(call->source);
	a[3] = DQ_ARG(process);
	a[4] = DQ_ARG(number);
	a[5] = DQ_ARG(call->place);
	a[6] = DQ_ARG(call->producer ? "1" : "0");
	a[7] = ARG_INT(node, call->node);
	a[8] = DQ_ARG("=");
	a[9] = DQ_ARG(call->index ? "1" : "0");
	a[10] = ARG_INT(count, page->nops);
	read_applied(dq_script_call(redis, queue, DQ_SCRIPT_APPLY, keys, page->nargs, a,
							 FENCE_ELEMENTS + 2), result);
}

/* ---- transfer ---- */

void
dq_op_transfer_send(DqRedis *redis, const DqKeys *keys, const char *session,
					int64 floor, const char *source, int64 now, int limit)
{
	DqArg		args[6];
	char		least[24],
				at[24],
				most[24];

	args[0] = DQ_ARG(session);
	args[1] = ARG_INT(least, floor);
	args[2] = DQ_ARG(source);
	args[3] = ARG_INT(at, now);
	args[4] = ARG_INT(most, limit);
	args[5] = DQ_ARG("524288");
	dq_script_send(redis, DQ_SCRIPT_TRANSFER, keys, 6, args);
}

void
dq_op_transfer_result(DqRedis *redis, DqTransferResult *result, DqReply **error)
{
	DqReply    *reply = dq_script_next(redis, DQ_SCRIPT_TRANSFER, FENCE_ELEMENTS + 5, error);

	if (!reply)
		return;
	dq_fence_read(reply, &result->fence);
	result->moved = dq_part_int(reply, FENCE_ELEMENTS);
	result->quarantined = dq_part_int(reply, FENCE_ELEMENTS + 1);
	result->oldest_due = dq_part_score(reply, FENCE_ELEMENTS + 2);
	if (result->oldest_due == PG_INT64_MAX)
		result->oldest_due = 0;
	result->held = dq_part_int(reply, FENCE_ELEMENTS + 3);
	result->more = dq_part_int(reply, FENCE_ELEMENTS + 4) == 1;
	dq_reply_free(reply);
}
