/*
 * poll.c
 *	  Scripts that take elements of the ready list under a hold, or refuse them. One
 *	  C function per Lua script, as in operations.c.
 */
#include "postgres.h"

#include "queue/operations_private.h"

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
