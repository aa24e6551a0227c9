/*
 * operations.c
 *	  One C function per Lua script: arguments out, reply in. The scripts' own
 *	  headers (lua/) say what each does. Called by the relay, the FDW and the SQL
 *	  functions.
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

/* ---- find ---- */

static void
read_found(DqReply *reply, DqFound *found)
{
	int			i = FENCE_ELEMENTS;

	memset(found, 0, sizeof(*found));
	dq_fence_read(reply, &found->fence);
	found->found = reply->elements[i].len > 0;
	found->again = reply->elements[i + 2].len > 0 && reply->elements[i + 2].str[0] == 'a';
	if (found->found)
	{
		found->member = dq_part_bytes(reply, i);
		found->due = dq_part_score(reply, i + 1);
		found->how = reply->elements[i + 2].str[0];
	}
	i += 3;
	found->scan_more = dq_part_int(reply, i++) == 1;
	found->prev = dq_part_text(reply, i++);
	found->writer = dq_part_text(reply, i++);
	found->old = dq_part_text(reply, i++);
	found->owner_source = dq_part_text(reply, i++);
	found->owner_place = dq_part_text(reply, i++);
	if (reply->elements[i].len > 0 && reply->elements[i].str[0] == '+')
	{
		size_t		len = reply->elements[i].len - 1;

		found->key = palloc(VARHDRSZ + len);
		SET_VARSIZE(found->key, VARHDRSZ + len);
		memcpy(VARDATA(found->key), reply->elements[i].str + 1, len);
	}
}

DqArg
dq_bound_arg(uint64 bound)
{
	unsigned char *place;

	if (bound == 0)
		return DQ_ARG("");
	place = palloc(14);
	dq_place_encode(place, 0, bound);
	return DQ_ARG_LEN(place + 6, 8);
}

#define FOUND_ELEMENTS (FENCE_ELEMENTS + 10)

void
dq_op_find(DqRedis *redis, const char *queue, int nshards, const DqKeys *keys,
		   const char *source, const char *place, const bytea *element, uint64 bound,
		   DqFound *found)
{
	DqArg		args[6];
	DqReply   **errors = palloc0(nshards * sizeof(DqReply *));
	int			i;

	args[0] = DQ_ARG(source);
	args[1] = DQ_ARG_LEN(VARDATA_ANY(element), VARSIZE_ANY_EXHDR(element));
	dq_element_id(element, &args[2], &args[3]);
	args[4] = DQ_ARG(place);
	args[5] = dq_bound_arg(bound);
	for (i = 0; i < nshards; i++)
		dq_script_send(redis, DQ_SCRIPT_FIND, &keys[i], lengthof(args), args);
	for (i = 0; i < nshards; i++)
	{
		DqReply    *reply = dq_script_next(redis, DQ_SCRIPT_FIND, FOUND_ELEMENTS, &errors[i]);

		if (reply)
		{
			read_found(reply, &found[i]);
			dq_reply_free(reply);
		}
	}
	/* SCRIPT FLUSH or a restart came between: once more, one by one */
	for (i = 0; i < nshards; i++)
		if (errors[i])
		{
			DqReply    *reply;

			if (!dq_reply_is_noscript(errors[i]))
				dq_reply_report(ERROR, redis, errors[i], "find", queue);
			reply = dq_script_call(redis, queue, DQ_SCRIPT_FIND, &keys[i], lengthof(args), args,
								FOUND_ELEMENTS);
			read_found(reply, &found[i]);
			dq_reply_free(reply);
		}
}

/* ---- hold ---- */

#define HOLD_ARGS 14
#define HOLD_ELEMENTS (FOUND_ELEMENTS + 3)

/* 'source|incarnation|xid|subxid|kind|dead|due or number|...' */
bool
dq_hold_read(const char *head, const char *token, DqHold *hold)
{
	int			dead;

	memset(hold, 0, sizeof(*hold));
	memcpy(hold->token, token, DQ_TOKEN_LEN);
	if (sscanf(head, "%32[^|]|" UINT64_FORMAT "|" UINT64_FORMAT "|" UINT64_FORMAT "|%c|%d|" INT64_FORMAT,
			   hold->source, &hold->incarnation, &hold->xid, &hold->subxid,
			   &hold->kind, &dead, &hold->number) < 6)
		return false;
	hold->dead = dead != 0;
	return true;
}

static void
read_held(DqReply *reply, DqFound *found)
{
	int			i = FOUND_ELEMENTS;
	char	   *head;

	read_found(reply, found);
	found->taken = dq_part_int(reply, i) == 1;
	head = dq_part_text(reply, i + 1);
	if (reply->elements[i + 2].len == DQ_TOKEN_LEN)
	{
		found->held = true;
		(void) dq_hold_read(head, reply->elements[i + 2].str, &found->holder);
	}
	dq_reply_free(reply);
}

void
dq_op_hold(DqRedis *redis, const char *queue, const DqKeys *keys, int from, int to,
		   int home, const DqSession *sessions, const DqHoldArgs *args, DqFound *found)
{
	int			nargs = HOLD_ARGS + args->nfree;
	DqArg	   *a = palloc(nargs * sizeof(DqArg));
	char	  (*floors)[24] = palloc(to * sizeof(*floors));
	char		due[24],
				incarnation[24],
				xid[24],
				subxid[24];
	int			i;

	a[2] = DQ_ARG(args->source);
	a[3] = DQ_ARG(args->place);
	if (args->member)
	{
		a[5] = DQ_ARG_LEN(VARDATA_ANY(args->member), VARSIZE_ANY_EXHDR(args->member));
		a[6] = ARG_INT(due, args->due);
		a[7] = DQ_ARG("");
	}
	else
	{
		a[5] = DQ_ARG_LEN(VARDATA_ANY(args->element), VARSIZE_ANY_EXHDR(args->element));
		dq_element_id(args->element, &a[6], &a[7]);
	}
	a[8] = DQ_ARG(args->key_only ? "1" : "0");
	a[9] = DQ_ARG_LEN(args->token, DQ_TOKEN_LEN);
	snprintf(incarnation, sizeof(incarnation), UINT64_FORMAT, args->incarnation);
	a[10] = DQ_ARG(incarnation);
	snprintf(xid, sizeof(xid), UINT64_FORMAT, args->xid);
	a[11] = DQ_ARG(xid);
	snprintf(subxid, sizeof(subxid), UINT64_FORMAT, args->subxid);
	a[12] = DQ_ARG(subxid);
	a[13] = DQ_ARG_LEN(args->skip ? args->skip : "", args->skip_len);
	for (i = 0; i < args->nfree; i++)
		a[HOLD_ARGS + i] = DQ_ARG_LEN(args->free + i * DQ_TOKEN_LEN, DQ_TOKEN_LEN);

#define SHARD_ARGS(i) \
	(a[0] = DQ_ARG(sessions[i].session), \
	 a[1] = ARG_INT(floors[i], sessions[i].floor), \
	 a[4] = DQ_ARG((i) != home ? "l" : args->member ? "x" : "h"))

	for (i = from; i < to; i++)
	{
		SHARD_ARGS(i);
		dq_script_send(redis, DQ_SCRIPT_HOLD, &keys[i], nargs, a);
	}
	for (i = from; i < to; i++)
	{
		DqReply    *error;
		DqReply    *reply = dq_script_next(redis, DQ_SCRIPT_HOLD, HOLD_ELEMENTS, &error);

		memset(&found[i], 0, sizeof(found[i]));
		found[i].fence.version = -2;	/* not answered */
		if (reply)
			read_held(reply, &found[i]);
		else if (!dq_reply_is_noscript(error))
		{
			/* what is in flight behind it must be read before anything else is sent */
			while (++i < to)
				(void) dq_redis_next(redis);
			dq_reply_report(ERROR, redis, error, "hold", queue);
		}
	}
	/* SCRIPT FLUSH or a restart came between: once more, one by one */
	for (i = from; i < to; i++)
		if (found[i].fence.version == -2)
		{
			SHARD_ARGS(i);
			read_held(dq_script_call(redis, queue, DQ_SCRIPT_HOLD, &keys[i], nargs, a,
								  HOLD_ELEMENTS), &found[i]);
		}
}

DqHold *
dq_op_holds_list(DqRedis *redis, const char *queue, const DqKeys *keys,
				 const char *source, char **cursor, int *n, DqFence *fence)
{
	DqArg		args[4];
	DqReply    *reply;
	DqHold	   *holds;
	int			i;

	args[0] = DQ_ARG(source);
	args[1] = DQ_ARG("l");
	args[2] = DQ_ARG(*cursor);
	args[3] = DQ_ARG("200");
	reply = dq_script_call(redis, queue, DQ_SCRIPT_HOLDS, keys, 4, args, FENCE_ELEMENTS + 1);
	dq_fence_read(reply, fence);
	*cursor = dq_part_text(reply, FENCE_ELEMENTS);
	holds = palloc(Max(reply->nelements, 1) * sizeof(DqHold));
	*n = 0;
	for (i = FENCE_ELEMENTS + 1; i + 1 < reply->nelements; i += 2)
	{
		if (reply->elements[i].len == DQ_TOKEN_LEN &&
			dq_hold_read(dq_part_text(reply, i + 1), reply->elements[i].str, &holds[*n]))
			(*n)++;
	}
	dq_reply_free(reply);
	return holds;
}

static DqArg *
token_args(const char *tokens, int n, int before)
{
	DqArg	   *args = palloc((before + n) * sizeof(DqArg));
	int			i;

	for (i = 0; i < n; i++)
		args[before + i] = DQ_ARG_LEN(tokens + i * DQ_TOKEN_LEN, DQ_TOKEN_LEN);
	return args;
}

bool *
dq_op_holds_stand(DqRedis *redis, const char *queue, const DqKeys *keys,
				  const char *source, const char *tokens, int n, DqFence *fence)
{
	DqArg	   *args = token_args(tokens, n, 2);
	bool	   *stand = palloc(Max(n, 1) * sizeof(bool));
	DqReply    *reply;
	int			i;

	args[0] = DQ_ARG(source);
	args[1] = DQ_ARG("h");
	reply = dq_script_call(redis, queue, DQ_SCRIPT_HOLDS, keys, 2 + n, args,
						FENCE_ELEMENTS + n);
	dq_fence_read(reply, fence);
	for (i = 0; i < n; i++)
		stand[i] = dq_part_int(reply, FENCE_ELEMENTS + i) == 1;
	dq_reply_free(reply);
	return stand;
}

int64
dq_op_restore(DqRedis *redis, const char *queue, const DqKeys *keys, const char *session,
			  int64 floor, const char *source, const char *tokens, int n, DqFence *fence,
			  int *left)
{
	DqArg	   *args = token_args(tokens, n, 3);
	char		least[24];
	DqReply    *reply;
	int64		back;

	args[0] = DQ_ARG(session);
	args[1] = ARG_INT(least, floor);
	args[2] = DQ_ARG(source);
	reply = dq_script_call(redis, queue, DQ_SCRIPT_RESTORE, keys, 3 + n, args,
						FENCE_ELEMENTS + 2);
	dq_fence_read(reply, fence);
	back = dq_part_int(reply, FENCE_ELEMENTS);
	*left = (int) dq_part_int(reply, FENCE_ELEMENTS + 1);
	dq_reply_free(reply);
	return back;
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

/* ---- status ---- */

void
dq_op_status_send(DqRedis *redis, const DqKeys *keys, const DqStatusArgs *args)
{
	DqArg		a[7];
	char		for_ms[24],
				at[24],
				window[24];

	a[0] = DQ_ARG(args->source);
	a[1] = DQ_ARG(args->session ? args->session : "");
	a[2] = ARG_INT(for_ms, args->lease);
	a[3] = ARG_INT(at, dq_now_ms());
	a[4] = DQ_ARG(args->want_first ? "1" : "0");
	a[5] = DQ_ARG(args->producer ? "1" : "0");
	a[6] = ARG_INT(window, args->replay_window);
	dq_script_send(redis, DQ_SCRIPT_STATUS, keys, lengthof(a), a);
}

void
dq_op_status_result(DqRedis *redis, DqFence *fence, DqFenceRecord *record,
					DqReply **error)
{
	DqReply    *reply = dq_script_next(redis, DQ_SCRIPT_STATUS, FENCE_ELEMENTS + 22, error);
	int			i = FENCE_ELEMENTS;

	if (!reply)
		return;
	dq_fence_read(reply, fence);
	memset(record, 0, sizeof(*record));
	record->prev = dq_part_text(reply, i++);
	record->cur = dq_part_text(reply, i++);
	record->old = dq_part_text(reply, i++);
	record->writer = dq_part_text(reply, i++);
	record->owner_source = dq_part_text(reply, i++);
	record->owner_place = dq_part_text(reply, i++);
	record->owner_host = dq_part_text(reply, i++);
	record->owner_database = dq_part_text(reply, i++);
	record->lease_until = dq_part_int(reply, i++);
	record->redis_now_us = dq_part_int(reply, i++);
	record->pending = dq_part_int(reply, i++);
	record->holds = dq_part_int(reply, i++);
	record->ready = dq_part_int(reply, i++);
	record->quarantined = dq_part_int(reply, i++);
	record->overdue = dq_part_int(reply, i++);
	record->ready_type = dq_part_text(reply, i++);
	record->held_due = dq_part_score(reply, i++);
	record->polled = dq_part_int(reply, i++) == 1;
	record->ready_first = dq_part_text(reply, i++);
	record->healed = dq_part_int(reply, i++) == 1;
	record->producers = dq_part_text(reply, i++);
	record->held = dq_part_int(reply, i++);
	dq_reply_free(reply);
}

/* ---- enter, thaw ---- */

void
dq_op_enter_send(DqRedis *redis, const DqKeys *keys, const DqEnterArgs *args)
{
	DqArg		a[13];
	char		lease[24],
				node[24],
				version[24];

	a[0] = DQ_ARG(args->source);
	a[1] = DQ_ARG(args->session);
	a[2] = DQ_ARG(args->place);
	a[3] = DQ_ARG(args->host);
	a[4] = DQ_ARG(args->database);
	a[5] = ARG_INT(lease, args->lease);
	a[6] = ARG_INT(node, args->node);
	a[7] = DQ_ARG(args->producer ? "1" : "0");
	a[8] = ARG_INT(version, args->expect_version);
	a[9] = DQ_ARG(args->adopt ? "1" : "0");
	a[10] = DQ_ARG(args->force ? "1" : "0");
	a[11] = DQ_ARG(args->freeze ? "1" : "0");
	a[12] = DQ_ARG(args->writer ? args->writer : "");
	dq_script_send(redis, DQ_SCRIPT_ENTER, keys, lengthof(a), a);
}

void
dq_op_enter_result(DqRedis *redis, DqFence *fence, char **blame, DqReply **error)
{
	DqReply    *reply = dq_script_next(redis, DQ_SCRIPT_ENTER, FENCE_ELEMENTS + 1, error);

	if (!reply)
		return;
	dq_fence_read(reply, fence);
	*blame = dq_part_text(reply, FENCE_ELEMENTS);
	dq_reply_free(reply);
}

void
dq_op_thaw_send(DqRedis *redis, const DqKeys *keys, const char *session,
				int64 floor, const char *source, bool producer, const char *producers)
{
	char	   *list = pstrdup(producers ? producers : "");
	char	   *word;
	DqArg	   *args = palloc((5 + strlen(list)) * sizeof(DqArg));
	int			nargs = 0;
	char		least[24];

	args[nargs++] = DQ_ARG(session);
	args[nargs++] = ARG_INT(least, floor);
	args[nargs++] = DQ_ARG(source);
	args[nargs++] = DQ_ARG(producer ? "1" : "0");
	while ((word = strsep(&list, " ")) != NULL)
		if (word[0] != '\0')
			args[nargs++] = DQ_ARG(word);
	dq_script_send(redis, DQ_SCRIPT_THAW, keys, nargs, args);
}

void
dq_op_thaw_result(DqRedis *redis, DqFence *fence, char **who, DqReply **error)
{
	DqReply    *reply = dq_script_next(redis, DQ_SCRIPT_THAW, FENCE_ELEMENTS + 1, error);

	if (!reply)
		return;
	dq_fence_read(reply, fence);
	*who = dq_part_text(reply, FENCE_ELEMENTS);
	dq_reply_free(reply);
}

/* ---- sweep ---- */

void
dq_op_sweep_send(DqRedis *redis, const DqKeys *keys, const DqSweepArgs *args,
				 const DqSweep *from)
{
	DqArg		a[10];
	char		least[24],
				due[24],
				most[24];

	a[0] = DQ_ARG(args->session);
	a[1] = ARG_INT(least, args->floor);
	a[2] = DQ_ARG(args->source);
	a[3] = DQ_ARG(args->position);
	a[4] = ARG_INT(due, args->due);
	a[5] = dq_bound_arg(args->largest_id);
	a[6] = DQ_ARG(from->stage);
	a[7] = DQ_ARG(from->score ? from->score : "");
	a[8] = from->member
		? DQ_ARG_LEN(VARDATA_ANY(from->member), VARSIZE_ANY_EXHDR(from->member))
		: DQ_ARG("");
	a[9] = ARG_INT(most, args->limit);
	dq_script_send(redis, DQ_SCRIPT_SWEEP, keys, lengthof(a), a);
}

void
dq_op_sweep_result(DqRedis *redis, DqSweepResult *result, DqReply **error)
{
	DqReply    *reply = dq_script_next(redis, DQ_SCRIPT_SWEEP, FENCE_ELEMENTS + 4, error);
	int			i = FENCE_ELEMENTS;

	if (!reply)
		return;
	dq_fence_read(reply, &result->fence);
	result->dropped = dq_part_int(reply, i++);
	strlcpy(result->next.stage, dq_part_text(reply, i++), sizeof(result->next.stage));
	result->next.score = dq_part_text(reply, i++);
	result->next.member = dq_part_bytes(reply, i++);
	dq_reply_free(reply);
}

/* ---- poll, reject ---- */

#define POLL_ARGS 9
#define POLL_ELEMENTS (FENCE_ELEMENTS + 5)

static void
poll_args(DqArg *a, char (*numbers)[24], const DqSession *session, const DqPollArgs *args)
{
	a[0] = DQ_ARG(session->session);
	a[1] = ARG_INT(numbers[0], session->floor);
	a[2] = DQ_ARG(args->source);
	a[3] = DQ_ARG_LEN(args->token ? args->token : "", args->token ? DQ_TOKEN_LEN : 0);
	snprintf(numbers[1], sizeof(numbers[1]), UINT64_FORMAT, args->incarnation);
	a[4] = DQ_ARG(numbers[1]);
	snprintf(numbers[2], sizeof(numbers[2]), UINT64_FORMAT, args->xid);
	a[5] = DQ_ARG(numbers[2]);
	snprintf(numbers[3], sizeof(numbers[3]), UINT64_FORMAT, args->subxid);
	a[6] = DQ_ARG(numbers[3]);
	a[7] = ARG_INT(numbers[4], args->max);
	a[8] = ARG_INT(numbers[5], args->max_bytes);
}

static void
read_polled(DqReply *reply, DqPolled *polled)
{
	dq_fence_read(reply, &polled->fence);
	polled->owner_source = dq_part_text(reply, FENCE_ELEMENTS);
	polled->owner_place = dq_part_text(reply, FENCE_ELEMENTS + 1);
	polled->left = dq_part_int(reply, FENCE_ELEMENTS + 2);
	polled->holds = dq_part_int(reply, FENCE_ELEMENTS + 3);
	polled->writer = dq_part_text(reply, FENCE_ELEMENTS + 4);
	polled->n = reply->nelements - POLL_ELEMENTS;
	polled->elements = reply->elements + POLL_ELEMENTS;
}

void
dq_op_poll(DqRedis *redis, const char *queue, const DqKeys *keys, int nshards,
		   const DqSession *sessions, const DqPollArgs *args, DqPolled *polled)
{
	DqArg		a[POLL_ARGS];
	char		numbers[6][24];
	DqReply   **errors = palloc0(nshards * sizeof(DqReply *));
	int			i;

	for (i = 0; i < nshards; i++)
	{
		poll_args(a, numbers, &sessions[i], args);
		dq_script_send(redis, DQ_SCRIPT_POLL, &keys[i], POLL_ARGS, a);
	}
	for (i = 0; i < nshards; i++)
	{
		DqReply    *reply = dq_script_next(redis, DQ_SCRIPT_POLL, POLL_ELEMENTS, &errors[i]);

		if (reply)
			read_polled(reply, &polled[i]);
		else if (!dq_reply_is_noscript(errors[i]))
		{
			DqReply    *error = errors[i];

			/* what is in flight behind it must be read before anything else is sent */
			while (++i < nshards)
				(void) dq_redis_next(redis);
			dq_reply_report(ERROR, redis, error, "poll", queue);
		}
	}
	/* SCRIPT FLUSH or a restart came between: once more, one by one */
	for (i = 0; i < nshards; i++)
		if (errors[i])
		{
			poll_args(a, numbers, &sessions[i], args);
			read_polled(dq_script_call(redis, queue, DQ_SCRIPT_POLL, &keys[i], POLL_ARGS, a,
									POLL_ELEMENTS), &polled[i]);
		}
}

int64
dq_op_reject(DqRedis *redis, const char *queue, const DqKeys *keys,
			 const DqSession *session, const char *source, const char *token, int of,
			 const char *reason, const int *which, int n, DqFence *fence)
{
	DqArg	   *a = palloc((7 + n) * sizeof(DqArg));
	char		floor[24],
				count[24],
				now[24];
	DqReply    *reply;
	int64		rejected;
	int			i;

	a[0] = DQ_ARG(session->session);
	a[1] = ARG_INT(floor, session->floor);
	a[2] = DQ_ARG(source);
	a[3] = DQ_ARG_LEN(token, DQ_TOKEN_LEN);
	a[4] = ARG_INT(count, of);
	a[5] = ARG_INT(now, dq_now_ms());
	a[6] = DQ_ARG(reason);
	for (i = 0; i < n; i++)
		a[7 + i] = DQ_ARG(psprintf("%d", which[i] + 1));
	reply = dq_script_call(redis, queue, DQ_SCRIPT_REJECT, keys, 7 + n, a, FENCE_ELEMENTS + 1);
	dq_fence_read(reply, fence);
	rejected = dq_part_int(reply, FENCE_ELEMENTS);
	dq_reply_free(reply);
	return rejected;
}
