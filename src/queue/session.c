/*
 * session.c
 *	  Scripts of the worker's session with a shard: status, enter, thaw, sweep. One C
 *	  function per Lua script, as in operations.c.
 */
#include "postgres.h"

#include "queue/operations_private.h"

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
	DqReply    *reply = dq_script_next(redis, DQ_SCRIPT_STATUS, FENCE_ELEMENTS + 23, error);
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
	record->lent = dq_part_int(reply, i++);
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
