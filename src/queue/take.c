/*
 * take.c
 *	  lua/take.lua: many exact tasks held in few round trips. Called by the SQL
 *	  functions' room for UPDATE and DELETE.
 */
#include "postgres.h"

#include "queue/operations_private.h"

#define TASKS_PER_SCRIPT	200
#define MOST_BYTES			"1048576"
#define SCRIPTS_IN_FLIGHT	8

#define TAKE_ARGS		7
#define ARGS_PER_TASK	2
#define TAKE_ELEMENTS	(FENCE_ELEMENTS + 6)
#define ELEMENTS_PER_TASK	2
#define MAX_ID			255

static void
send_tasks(DqRedis *redis, const DqKeys *keys, const DqTakeArgs *args, DqTake **tasks, int n)
{
	DqArg	   *a = palloc((TAKE_ARGS + n * ARGS_PER_TASK) * sizeof(DqArg));
	char		floor[24],
				incarnation[24],
				xid[24],
				subxid[24];
	struct
	{
		char		score[32];
		char		place[2 * DQ_TOKEN_LEN + 1 + MAX_ID];
	}		   *text = palloc(n * sizeof(*text));
	int			at = TAKE_ARGS;

	snprintf(incarnation, sizeof(incarnation), UINT64_FORMAT, args->incarnation);
	snprintf(xid, sizeof(xid), UINT64_FORMAT, args->xid);
	snprintf(subxid, sizeof(subxid), UINT64_FORMAT, args->subxid);
	a[0] = DQ_ARG(args->session->session);
	a[1] = ARG_INT(floor, args->session->floor);
	a[2] = DQ_ARG(args->source);
	a[3] = DQ_ARG(incarnation);
	a[4] = DQ_ARG(xid);
	a[5] = DQ_ARG(subxid);
	a[6] = DQ_ARG(MOST_BYTES);
	for (int i = 0; i < n; i++)
	{
		const DqTake *task = tasks[i];

		char	   *p = text[i].place;

		snprintf(text[i].score, sizeof(text[i].score), "%.17g", task->score);
		a[at++] = DQ_ARG(text[i].score);
		memcpy(p, task->token, DQ_TOKEN_LEN);
		p += DQ_TOKEN_LEN;
		if (task->take_over)
			memcpy(p, task->from, DQ_TOKEN_LEN);
		else
			memset(p, ' ', DQ_TOKEN_LEN);
		p += DQ_TOKEN_LEN;
		if (!task->old)
			*p++ = (char) task->idlen;
		memcpy(p, task->id, task->idlen);
		p += task->idlen;
		a[at++] = DQ_ARG_LEN(text[i].place, p - text[i].place);
	}
	dq_script_send(redis, DQ_SCRIPT_TAKE, keys, at, a);
	pfree(a);
	pfree(text);
}

static void
read_tasks(DqReply *reply, DqTake **tasks, int n, DqTakeResult *result)
{
	int			at = FENCE_ELEMENTS;
	int			looked_at;

	dq_fence_read(reply, &result->fence);
	result->prev = dq_part_text(reply, at++);
	result->writer = dq_part_text(reply, at++);
	result->old = dq_part_text(reply, at++);
	result->owner_source = dq_part_text(reply, at++);
	result->owner_place = dq_part_text(reply, at++);
	looked_at = (int) dq_part_int(reply, at++);
	if (looked_at > n || reply->nelements < at + looked_at * ELEMENTS_PER_TASK)
		ereport(ERROR,
				(errcode(ERRCODE_PROTOCOL_VIOLATION),
				 errmsg("unexpected reply of script \"%s\"",
						dq_script_name(DQ_SCRIPT_TAKE))));
	for (int i = 0; i < looked_at; i++, at += ELEMENTS_PER_TASK)
	{
		const DqReply *e = &reply->elements[at];
		DqTake	   *task = tasks[i];

		task->answered = true;
		task->member = task->key = NULL;
		task->held = false;
		if (e[0].len == 0)
			continue;
		task->member = dq_part_bytes(reply, at);
		if (e[1].len == 0)
			continue;
		if (e[1].str[0] == 'k')
		{
			task->key = palloc(VARHDRSZ + e[1].len - 1);
			SET_VARSIZE(task->key, VARHDRSZ + e[1].len - 1);
			memcpy(VARDATA(task->key), e[1].str + 1, e[1].len - 1);
		}
		else if (e[1].len > DQ_TOKEN_LEN)
			task->held = dq_hold_read(pnstrdup(e[1].str + 1 + DQ_TOKEN_LEN,
											e[1].len - 1 - DQ_TOKEN_LEN),
								   e[1].str + 1, &task->holder);
	}
	dq_reply_free(reply);
}

void
dq_op_take(DqRedis *redis, const char *queue, const DqKeys *keys, const DqTakeArgs *args,
		   DqTake **tasks, int n, DqTakenCallback taken, void *arg)
{
	int			sent = 0;
	int			received = 0;

	for (int i = 0; i < n; i++)
		tasks[i]->answered = false;
	while (received < n)
	{
		DqTakeResult result;
		DqReply    *error;
		DqReply    *reply;
		int			some;

		while (sent < n && sent - received < TASKS_PER_SCRIPT * SCRIPTS_IN_FLIGHT)
		{
			some = Min(n - sent, TASKS_PER_SCRIPT);
			send_tasks(redis, keys, args, tasks + sent, some);
			sent += some;
		}
		some = Min(n - received, TASKS_PER_SCRIPT);
		reply = dq_script_next(redis, DQ_SCRIPT_TAKE, TAKE_ELEMENTS, &error);
		if (reply)
		{
			read_tasks(reply, tasks + received, some, &result);
			received += some;
			taken(arg, tasks + received - some, some, &result);
			continue;
		}
		/* what is in flight behind it must be read before anything else is sent */
		for (int i = received + some; i < sent; i += TASKS_PER_SCRIPT)
			(void) dq_redis_next(redis);
		if (!dq_reply_is_noscript(error))
			dq_reply_report(ERROR, redis, error, dq_script_name(DQ_SCRIPT_TAKE), queue);
		/* SCRIPT FLUSH or a restart came between: once more, from the text */
		sent = received;
	}
}
