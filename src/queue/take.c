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
#define ARGS_PER_TASK	4
#define TAKE_ELEMENTS	(FENCE_ELEMENTS + 6)
#define ELEMENTS_PER_TASK	5

static void
send_tasks(DqRedis *redis, const DqKeys *keys, const DqTakeArgs *args, DqTake **tasks, int n)
{
	DqArg	   *a = palloc((TAKE_ARGS + n * ARGS_PER_TASK) * sizeof(DqArg));
	char		floor[24],
				incarnation[24],
				xid[24],
				subxid[24];
	char	  (*scores)[32] = palloc(n * sizeof(*scores));
	char	  **ids = palloc(n * sizeof(*ids));
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

		snprintf(scores[i], sizeof(scores[i]), "%.17g", task->score);
		a[at++] = DQ_ARG(scores[i]);
		ids[i] = palloc(1 + task->idlen);
		ids[i][0] = task->old ? 'o' : 'n';
		memcpy(ids[i] + 1, task->id, task->idlen);
		a[at++] = DQ_ARG_LEN(ids[i], 1 + task->idlen);
		a[at++] = DQ_ARG_LEN(task->token, DQ_TOKEN_LEN);
		a[at++] = DQ_ARG_LEN(task->from, task->take_over ? DQ_TOKEN_LEN : 0);
	}
	send_script(redis, DQ_SCRIPT_TAKE, keys, at, a);
	pfree(a);
	for (int i = 0; i < n; i++)
		pfree(ids[i]);
	pfree(ids);
	pfree(scores);
}

static void
read_tasks(DqReply *reply, DqTake **tasks, int n, DqTakeResult *result)
{
	int			at = FENCE_ELEMENTS;
	int			looked_at;

	read_fence(reply, &result->fence);
	result->prev = reply_text(reply, at++);
	result->cur = reply_text(reply, at++);
	result->old = reply_text(reply, at++);
	result->owner_source = reply_text(reply, at++);
	result->owner_place = reply_text(reply, at++);
	looked_at = (int) reply_int(reply, at++);
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
		task->member = reply_bytes(reply, at);
		task->member_score = strtod(e[1].str, NULL);
		task->member_due = reply_score(reply, at + 1);
		if (e[2].len > 0 && e[2].str[0] == '+')
		{
			task->key = palloc(VARHDRSZ + e[2].len - 1);
			SET_VARSIZE(task->key, VARHDRSZ + e[2].len - 1);
			memcpy(VARDATA(task->key), e[2].str + 1, e[2].len - 1);
		}
		if (e[4].len == DQ_TOKEN_LEN)
			task->held = read_hold(reply_text(reply, at + 3), e[4].str, &task->holder);
	}
	dq_reply_free(reply);
}

void
dq_op_take(DqRedis *redis, const char *queue, const DqKeys *keys, const DqTakeArgs *args,
		   DqTake **tasks, int n, DqTakeResult *result)
{
	for (int i = 0; i < n; i++)
		tasks[i]->answered = false;
	for (int from = 0; from < n; from += TASKS_PER_SCRIPT * SCRIPTS_IN_FLIGHT)
	{
		int			to = Min(n, from + TASKS_PER_SCRIPT * SCRIPTS_IN_FLIGHT);
		bool		again = false;
		int			i;

		for (i = from; i < to; i += TASKS_PER_SCRIPT)
			send_tasks(redis, keys, args, tasks + i, Min(to - i, TASKS_PER_SCRIPT));
		for (i = from; i < to; i += TASKS_PER_SCRIPT)
		{
			DqReply    *error;
			DqReply    *reply = next_reply(redis, DQ_SCRIPT_TAKE, TAKE_ELEMENTS, &error);

			if (reply)
				read_tasks(reply, tasks + i, Min(to - i, TASKS_PER_SCRIPT), result);
			else if (dq_reply_is_noscript(error))
				again = true;
			else
			{
				/* what is in flight behind it must be read before anything else is sent */
				while ((i += TASKS_PER_SCRIPT) < to)
					(void) dq_redis_next(redis);
				dq_reply_report(ERROR, redis, error, dq_script_name(DQ_SCRIPT_TAKE), queue);
			}
		}
		/* SCRIPT FLUSH or a restart came between: once more, from the text */
		if (again)
			from -= TASKS_PER_SCRIPT * SCRIPTS_IN_FLIGHT;
	}
}
