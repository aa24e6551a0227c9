/*
 * reading.c
 *	  Operations that read tasks: one C function per Lua script, as in
 *	  operations.c. Called by the FDW, and for the search among unindexed tasks by
 *	  the relay and dq_remove.
 */
#include "postgres.h"

#include <math.h>

#include "utils/builtins.h"

#include "queue/operations_private.h"

/* ---- tasks in a reply ------------------------------------------------------ */

int64
dq_score_ms(double score)
{
	score = ceil(score);
	if (score >= 9.2e18)
		return PG_INT64_MAX;
	if (score <= -9.2e18)
		return -PG_INT64_MAX;
	return (int64) score;
}

/* The packed length before a payload; Redis packs in its machine's order. */
static uint64
packed_length(const char *at)
{
	uint64		len;

	memcpy(&len, at, sizeof(len));
	return len;
}

#define LENGTH_SIZE sizeof(uint64)

static void
new_format(DqTask *task)
{
	task->readable = true;
	task->idlen = (unsigned char) task->member[0];
	task->idbytes = task->member + 1;
	task->payload_len = packed_length(task->member + 1 + task->idlen);
}

static void
old_format(DqTask *task)
{
	task->readable = true;
	task->old = true;
	task->idlen = 8;
	task->idbytes = task->member;
	task->payload_len = packed_length(task->member + 8);
}

/* The same as function parse in lua/lib.lua. */
void
dq_task_parse(DqTask *task)
{
	size_t		len = task->member_len;
	size_t		head;

	if (len >= 1)
	{
		head = 1 + (unsigned char) task->member[0] + LENGTH_SIZE;
		if (len >= head &&
			packed_length(task->member + head - LENGTH_SIZE) == len - head)
		{
			new_format(task);
			task->payload = task->member + head;
			return;
		}
	}
	head = 8 + LENGTH_SIZE;
	if (len >= head && packed_length(task->member + 8) == len - head)
	{
		old_format(task);
		task->payload = task->member + head;
	}
}

/* In our packing eight bytes are a number; anything else is shown as it is. */
char *
dq_task_id(const DqTask *task)
{
	char	   *hex;

	if (task->idlen == 8 && !task->old)
	{
		uint64		id = 0;

		for (int i = 0; i < 8; i++)
			id = (id << 8) | (unsigned char) task->idbytes[i];
		return dq_id_out(task->due, id);
	}
	hex = palloc(2 * task->idlen + 1);
	hex[hex_encode(task->idbytes, task->idlen, hex)] = '\0';
	return psprintf(INT64_FORMAT "-x%s", task->due, hex);
}

/* Score, member and, if there is one, key, as range.lua describes them. */
static void
read_task(const DqReply *e, bool keyed, DqTask *task)
{
	char	   *kind;

	memset(task, 0, sizeof(*task));
	task->score = strtod(e[0].str, &kind);
	task->due = dq_score_ms(task->score);
	task->member = e[1].str;
	task->member_len = e[1].len;
	task->cut = *kind != '\0';
	if (*kind == 'n' && e[1].len >= 1 &&
		e[1].len == 1 + (unsigned char) e[1].str[0] + LENGTH_SIZE)
		new_format(task);
	else if (*kind == 'o' && e[1].len == 8 + LENGTH_SIZE)
		old_format(task);
	else if (*kind == '\0')
		dq_task_parse(task);

	if (keyed && task->readable && !task->old && task->idlen == 8 &&
		e[2].type == DQ_REPLY_STRING)
	{
		task->key = e[2].str;
		task->key_len = e[2].len;
	}
}

/* Tasks of so many parts each, the third of which may be missing. */
static void
check_tasks(const DqReply *reply, int from, int width, DqScriptId script)
{
	for (int i = from; i < reply->nelements; i++)
	{
		if (reply->elements[i].type != DQ_REPLY_STRING &&
			!(width == 3 && (i - from) % 3 == 2 && reply->elements[i].type == DQ_REPLY_NIL))
			ereport(ERROR,
					(errcode(ERRCODE_PROTOCOL_VIOLATION),
					 errmsg("unexpected reply of script \"%s\"", dq_script_name(script)),
					 errhint("A script in dq_bridge.script_dir may be of another version.")));
	}
}

/* What the server has sent for it, about. */
static int64
reply_bytes(const DqReply *reply)
{
	int64		bytes = 0;

	for (int i = 0; i < reply->nelements; i++)
		bytes += reply->elements[i].len + 6;
	return bytes;
}

void
dq_read_fence_read(const DqReply *reply, DqReadFence *fence)
{
	dq_fence_read(reply, &fence->fence);
	fence->prev = dq_part_text(reply, FENCE_ELEMENTS);
	fence->cur = dq_part_text(reply, FENCE_ELEMENTS + 1);
	fence->old = dq_part_text(reply, FENCE_ELEMENTS + 2);
}

/*
 * Bounds as the scripts take them. Beyond 2^53 a score is an even number, so the
 * next even one below says the same; there is none beyond 2^54 in the calendar.
 */
static DqArg
bound_arg(int64 ms, int64 none)
{
	if (ms == none)
		return DQ_ARG("");
	if (ms > INT64CONST(1) << 53)
		ms &= ~INT64CONST(1);
	return DQ_ARG(psprintf(INT64_FORMAT, ms));
}

static void
range_args(DqArg *args, const DqDueRange *ranges, int nranges)
{
	for (int i = 0; i < nranges; i++)
	{
		args[2 * i] = bound_arg(ranges[i].after, DQ_DUE_MIN);
		args[2 * i + 1] = bound_arg(ranges[i].upto, DQ_DUE_MAX);
	}
}

/* ---- range ------------------------------------------------------------------- */

#define RANGE_ARGS 9
#define RANGE_ELEMENTS (FENCE_ELEMENTS + 6)
/* a call gets so many of a long list of ranges */
#define RANGES_A_CALL 100

static DqArg *
make_range_args(const DqRangeArgs *args, const bytea *search, uint64 bound, int *nargs)
{
	int			first = args->from.range;
	int			nranges = Min(args->nranges - first, RANGES_A_CALL);
	DqArg	   *a = palloc((RANGE_ARGS + 2 * nranges) * sizeof(DqArg));

	a[0] = DQ_ARG(args->source);
	a[1] = DQ_ARG(psprintf("%s%s%s%s%s", args->want_fence ? "f" : "",
						   args->want_keys ? "k" : "", args->reverse ? "r" : "",
						   args->cut ? "s" : "", search ? "p" : ""));
	a[2] = DQ_ARG(psprintf("%d", args->limit));
	a[3] = DQ_ARG(psprintf("%zu", args->max_bytes));
	a[4] = DQ_ARG("1");
	a[5] = DQ_ARG(args->from.score ? args->from.score : "");
	a[6] = args->from.member ?
		DQ_ARG_LEN(VARDATA_ANY(args->from.member), VARSIZE_ANY_EXHDR(args->from.member)) :
		DQ_ARG("");
	a[7] = search ? DQ_ARG_LEN(VARDATA_ANY(search), VARSIZE_ANY_EXHDR(search)) :
		DQ_ARG("");
	a[8] = dq_bound_arg(bound);
	range_args(a + RANGE_ARGS, args->ranges + first, nranges);
	*nargs = RANGE_ARGS + 2 * nranges;
	return a;
}

/* Where the next page begins. */
static void
read_cursor(const DqReply *reply, const DqRangeArgs *args, int ntasks, int width,
			DqRange *range)
{
	int			first = args->from.range;
	int			given = Min(args->nranges - first, RANGES_A_CALL);
	int64		next = dq_part_int(reply, FENCE_ELEMENTS + 3);
	const DqReply *score = &reply->elements[FENCE_ELEMENTS + 4];

	memset(&range->next, 0, sizeof(range->next));
	if (next < 0 || next > given)
		next = 0;
	if (next == 0)
	{
		range->next.range = first + given;
		range->end = range->next.range >= args->nranges;
		return;
	}
	range->next.range = first + next - 1;
	if (score->len == 1 && score->str[0] == '=' && ntasks > 0)
	{
		int			last = RANGE_ELEMENTS + width * (ntasks - 1);

		range->next.score = dq_part_text(reply, last);
		range->next.member = dq_part_bytes(reply, last + 1);
	}
	else if (score->len > 0)
	{
		range->next.score = dq_part_text(reply, FENCE_ELEMENTS + 4);
		range->next.member = dq_part_bytes(reply, FENCE_ELEMENTS + 5);
	}
}

static void
read_range(const DqReply *reply, const DqRangeArgs *args, DqRange *range)
{
	int			width = args->want_keys ? 3 : 2;

	check_tasks(reply, RANGE_ELEMENTS, width, DQ_SCRIPT_RANGE);
	memset(range, 0, sizeof(*range));
	dq_read_fence_read(reply, &range->fence);
	range->bytes = reply_bytes(reply);
	range->ntasks = (reply->nelements - RANGE_ELEMENTS) / width;
	range->tasks = palloc(Max(range->ntasks, 1) * sizeof(DqTask));
	for (int i = 0; i < range->ntasks; i++)
		read_task(&reply->elements[RANGE_ELEMENTS + width * i], args->want_keys,
				  &range->tasks[i]);
	read_cursor(reply, args, range->ntasks, width, range);
}

void
dq_op_range(DqRedis *redis, const char *queue, const DqKeys *keys,
			const DqRangeArgs *args, DqRange *range)
{
	int			nargs;
	DqArg	   *a = make_range_args(args, NULL, 0, &nargs);

	read_range(dq_script_call(redis, queue, DQ_SCRIPT_RANGE, keys, nargs, a,
							  RANGE_ELEMENTS), args, range);
}

void
dq_op_range_send(DqRedis *redis, const DqKeys *keys, const DqRangeArgs *args)
{
	int			nargs;
	DqArg	   *a = make_range_args(args, NULL, 0, &nargs);

	dq_script_send(redis, DQ_SCRIPT_RANGE, keys, nargs, a);
	dq_redis_flush(redis);
}

void
dq_op_range_take(DqRedis *redis, const char *queue, const DqKeys *keys,
				 const DqRangeArgs *args, DqRange *range)
{
	DqReply    *error;
	DqReply    *reply = dq_script_next(redis, DQ_SCRIPT_RANGE, RANGE_ELEMENTS, &error);

	if (reply)
		read_range(reply, args, range);
	else if (dq_reply_is_noscript(error))
		dq_op_range(redis, queue, keys, args, range);
	else
		dq_reply_report(ERROR, redis, error, dq_script_name(DQ_SCRIPT_RANGE), queue);
}

void
dq_op_ranges(DqRedis *redis, const char *queue, int n, const DqKeys *keys,
			 const DqRangeArgs *args, MemoryContext *contexts, DqRange *ranges)
{
	DqReply   **errors = palloc0(n * sizeof(DqReply *));
	DqArg	  **a = palloc(n * sizeof(DqArg *));
	int		   *nargs = palloc(n * sizeof(int));
	MemoryContext old;

	for (int i = 0; i < n; i++)
	{
		a[i] = make_range_args(&args[i], NULL, 0, &nargs[i]);
		dq_script_send(redis, DQ_SCRIPT_RANGE, &keys[i], nargs[i], a[i]);
	}
	for (int i = 0; i < n; i++)
	{
		DqReply    *reply;

		old = MemoryContextSwitchTo(contexts[i]);
		reply = dq_script_next(redis, DQ_SCRIPT_RANGE, RANGE_ELEMENTS, &errors[i]);
		if (reply)
			read_range(reply, &args[i], &ranges[i]);
		MemoryContextSwitchTo(old);
		if (errors[i] && !dq_reply_is_noscript(errors[i]))
		{
			DqReply    *error = errors[i];

			/* what is in flight behind it must be read before anything else is sent */
			while (++i < n)
				(void) dq_redis_next(redis);
			dq_reply_report(ERROR, redis, error, "range", queue);
		}
	}
	/* SCRIPT FLUSH or a restart came between: once more, one by one */
	for (int i = 0; i < n; i++)
	{
		if (errors[i] == NULL)
			continue;
		old = MemoryContextSwitchTo(contexts[i]);
		read_range(dq_script_call(redis, queue, DQ_SCRIPT_RANGE, &keys[i], nargs[i], a[i],
								  RANGE_ELEMENTS), &args[i], &ranges[i]);
		MemoryContextSwitchTo(old);
	}
}

bool
dq_op_find_scan(DqRedis *redis, const char *queue, const DqKeys *keys,
				const char *source, const bytea *payload, uint64 bound,
				char **cursor_score, bytea **cursor_member, DqFound *found)
{
	static const DqDueRange everything = {DQ_DUE_MIN, DQ_DUE_MAX};
	DqRangeArgs args = {0};
	DqRange		range;
	DqArg	   *a;
	int			nargs;

	args.source = source;
	args.limit = 500;
	args.max_bytes = 1024 * 1024;
	args.ranges = &everything;
	args.nranges = 1;
	args.from.score = *cursor_score;
	args.from.member = *cursor_member;
	a = make_range_args(&args, payload, bound, &nargs);
	read_range(dq_script_call(redis, queue, DQ_SCRIPT_RANGE, keys, nargs, a,
							  RANGE_ELEMENTS), &args, &range);
	found->fence = range.fence.fence;
	*cursor_score = range.next.score;
	*cursor_member = range.next.member;
	if (range.ntasks > 0)
	{
		DqTask	   *task = &range.tasks[0];

		found->found = true;
		found->member = palloc(VARHDRSZ + task->member_len);
		SET_VARSIZE(found->member, VARHDRSZ + task->member_len);
		memcpy(VARDATA(found->member), task->member, task->member_len);
		found->due = task->due;
		found->how = 'p';
		return true;
	}
	return range.end;
}

/* ---- lookup -------------------------------------------------------------------- */

#define LOOKUP_ARGS 2
#define LOOKUP_ELEMENTS (FENCE_ELEMENTS + 4)

void
dq_op_lookup(DqRedis *redis, const char *queue, const DqKeys *keys, const char *source,
			 bool want_fence, bool cut, const DqSought *sought, int n, DqHits *hits)
{
	DqArg	   *a = palloc((LOOKUP_ARGS + 2 * n) * sizeof(DqArg));
	DqReply    *reply;

	a[0] = DQ_ARG(source);
	a[1] = DQ_ARG(psprintf("%s%s", want_fence ? "f" : "", cut ? "s" : ""));
	for (int i = 0; i < n; i++)
	{
		a[LOOKUP_ARGS + 2 * i] = sought[i].by_key ? DQ_ARG("k") :
			DQ_ARG(psprintf(INT64_FORMAT, sought[i].due));
		a[LOOKUP_ARGS + 2 * i + 1] = DQ_ARG_LEN(sought[i].data, sought[i].len);
	}
	reply = dq_script_call(redis, queue, DQ_SCRIPT_LOOKUP, keys, LOOKUP_ARGS + 2 * n, a,
						   LOOKUP_ELEMENTS);
	memset(hits, 0, sizeof(*hits));
	dq_read_fence_read(reply, &hits->fence);
	hits->done = (int) dq_part_int(reply, FENCE_ELEMENTS + 3);
	if (hits->done < 1 || hits->done > n)
		hits->done = n;
	hits->bytes = reply_bytes(reply);
	hits->tasks = palloc(Max(reply->nelements / 3, 1) * sizeof(DqTask));
	for (int i = LOOKUP_ELEMENTS; i + 2 < reply->nelements; i += 3)
	{
		const DqReply *e = &reply->elements[i];

		if (e[0].type == DQ_REPLY_STRING && e[0].len == 0)
			hits->inexact = lappend_int(hits->inexact, (int) dq_part_int(reply, i + 1) - 1);
		else if (e[0].type == DQ_REPLY_STRING && e[1].type == DQ_REPLY_STRING)
			read_task(e, true, &hits->tasks[hits->ntasks++]);
	}
}

/* ---- count ----------------------------------------------------------------------- */

#define COUNT_ELEMENTS (FENCE_ELEMENTS + 7)

void
dq_op_count(DqRedis *redis, const char *queue, const DqKeys *keys, const char *source,
			const DqDueRange *ranges, int nranges, DqCount *count)
{
	DqArg	   *a = palloc((1 + 2 * nranges) * sizeof(DqArg));
	DqReply    *reply;

	Assert(nranges <= DQ_COUNT_RANGES);
	a[0] = DQ_ARG(source);
	range_args(a + 1, ranges, nranges);
	reply = dq_script_call(redis, queue, DQ_SCRIPT_COUNT, keys, 1 + 2 * nranges, a,
						   COUNT_ELEMENTS);
	dq_read_fence_read(reply, &count->fence);
	count->tasks = dq_part_int(reply, FENCE_ELEMENTS + 3);
	count->first = dq_part_score(reply, FENCE_ELEMENTS + 4);
	count->last = dq_part_score(reply, FENCE_ELEMENTS + 5);
	count->doubtful = dq_part_int(reply, FENCE_ELEMENTS + 6) == 1;
	count->bytes = reply_bytes(reply);
}

/* ---- sample ------------------------------------------------------------------------ */

#define SAMPLE_ELEMENTS (FENCE_ELEMENTS + 2)

void
dq_op_sample(DqRedis *redis, const char *queue, const DqKeys *keys, const char *source,
			 const int64 *ranks, int n, DqSample *sample)
{
	DqArg	   *a = palloc((1 + n) * sizeof(DqArg));
	DqReply    *reply;

	a[0] = DQ_ARG(source);
	for (int i = 0; i < n; i++)
		a[1 + i] = DQ_ARG(psprintf(INT64_FORMAT, ranks[i]));
	reply = dq_script_call(redis, queue, DQ_SCRIPT_SAMPLE, keys, 1 + n, a, SAMPLE_ELEMENTS);
	check_tasks(reply, SAMPLE_ELEMENTS, 3, DQ_SCRIPT_SAMPLE);
	memset(sample, 0, sizeof(*sample));
	sample->pending = dq_part_int(reply, FENCE_ELEMENTS);
	sample->done = (int) dq_part_int(reply, FENCE_ELEMENTS + 1);
	sample->tasks = palloc(Max(reply->nelements / 3, 1) * sizeof(DqTask));
	for (int i = SAMPLE_ELEMENTS; i + 2 < reply->nelements; i += 3)
		read_task(&reply->elements[i], true, &sample->tasks[sample->ntasks++]);
}
