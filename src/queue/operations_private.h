/*
 * operations_private.h
 *	  How scripts are called and their replies read: what operations.c and take.c
 *	  share.
 */
#ifndef DQ_OPERATIONS_PRIVATE_H
#define DQ_OPERATIONS_PRIVATE_H

#include "queue/queue.h"

#include <math.h>

#define FENCE_ELEMENTS 6		/* the common part of every reply */

static inline char *
reply_text(const DqReply *reply, int i)
{
	const DqReply *e = &reply->elements[i];

	if (e->type == DQ_REPLY_INTEGER)
		return psprintf(INT64_FORMAT, e->integer);
	if (e->type != DQ_REPLY_STRING)
		return pstrdup("");
	return pnstrdup(e->str, e->len);
}

static inline bytea *
reply_bytes(const DqReply *reply, int i)
{
	const DqReply *e = &reply->elements[i];
	bytea	   *result = palloc(VARHDRSZ + e->len);

	SET_VARSIZE(result, VARHDRSZ + e->len);
	memcpy(VARDATA(result), e->str, e->len);
	return result;
}

static inline int64
reply_int(const DqReply *reply, int i)
{
	const DqReply *e = &reply->elements[i];

	if (e->type == DQ_REPLY_INTEGER)
		return e->integer;
	if (e->type == DQ_REPLY_STRING && e->len > 0)
		return strtoll(pnstrdup(e->str, e->len), NULL, 10);
	return 0;
}

/* A score as whole ms, rounded up; INT64_MAX for "" and for +inf. */
static inline int64
reply_score(const DqReply *reply, int i)
{
	char	   *text = reply_text(reply, i);
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

static inline void
check_shape(const DqReply *reply, int atleast, DqScriptId script)
{
	if (reply->type != DQ_REPLY_ARRAY || reply->nelements < atleast)
		ereport(ERROR,
				(errcode(ERRCODE_PROTOCOL_VIOLATION),
				 errmsg("unexpected reply of script \"%s\"",
						dq_script_name(script)),
				 errhint("A script in dq_bridge.script_dir may be of another version.")));
}

static inline void
read_fence(const DqReply *reply, DqFence *fence)
{
	const DqReply *s = &reply->elements[1];

	memset(fence, 0, sizeof(*fence));
	fence->status = (DqStatus) reply_int(reply, 0);
	strlcpy(fence->session, reply_text(reply, 1),
			Min(sizeof(fence->session), s->len + 1));
	fence->open = reply_int(reply, 2) == 1;
	fence->version = reply_int(reply, 3);
	fence->position = reply_text(reply, 4);
	fence->next_due = reply_score(reply, 5);
}

static inline void
send_script(DqRedis *redis, DqScriptId script, const DqKeys *keys, int nargs,
			const DqArg *args)
{
	dq_redis_append_script(redis, script, DQ_NUM_KEYS, keys->key, nargs, args);
}

/* The next reply of a pipeline; an error reply goes to the caller. */
static inline DqReply *
next_reply(DqRedis *redis, DqScriptId script, int atleast, DqReply **error)
{
	DqReply    *reply = dq_redis_next(redis);

	*error = NULL;
	if (reply->type == DQ_REPLY_ERROR)
	{
		*error = reply;
		return NULL;
	}
	check_shape(reply, atleast, script);
	return reply;
}

/* One exchange of a backend: errors are raised with queue and script. */
static inline DqReply *
call_script(DqRedis *redis, const char *queue, DqScriptId script,
			const DqKeys *keys, int nargs, const DqArg *args, int atleast)
{
	DqReply    *error;
	DqReply    *reply;
	int			tries;

	for (tries = 0;; tries++)
	{
		send_script(redis, script, keys, nargs, args);
		reply = next_reply(redis, script, atleast, &error);
		if (reply)
			return reply;
		/* SCRIPT FLUSH or a restart came between; the next append sends the text */
		if (!dq_reply_is_noscript(error) || tries > 2)
			dq_reply_report(ERROR, redis, error, dq_script_name(script), queue);
		dq_reply_free(error);
	}
}

#define ARG_INT(buf, value) \
	(snprintf((buf), sizeof(buf), INT64_FORMAT, (int64) (value)), DQ_ARG(buf))

/* 'source|incarnation|xid|subxid|kind|dead|due or number|...' */
static inline bool
read_hold(const char *head, const char *token, DqHold *hold)
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

#endif							/* DQ_OPERATIONS_PRIVATE_H */
