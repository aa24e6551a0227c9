/*
 * removal.c
 *	  Scripts that look for one task, hold it, and say what became of holds. One C
 *	  function per Lua script, as in operations.c.
 */
#include "postgres.h"

#include "queue/operations_private.h"

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
