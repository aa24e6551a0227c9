/*
 * stream.c
 *	  The pending tasks of one shard, page by page. Memory is bounded by the page;
 *	  every page is one complete exchange with Redis, so interleaved scans can share
 *	  the backend's connection, and every wait is cancellable because the redis room
 *	  waits. Called by scan.c, lookup.c and aggregate.c.
 *
 *	  The first page comes with the fence; then what the outbox holds beyond the
 *	  fence (unsent.c) is known, and is shown together with the pages, which are
 *	  without what has been shown, replaced or removed there. So what is pending
 *	  during the whole scan is shown exactly once. A scan that begins anew (the inner
 *	  side of a join) keeps what it knows of the outbox: it shows what was committed
 *	  when it began first. Members that nobody can read are passed over; transfer puts
 *	  them into quarantine.
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "fdw/fdw.h"

#define PAGE_TASKS		1000
#define PAGE_BYTES		(1024 * 1024)
#define GROWTH			4		/* of a page against the one before */

static const DqDueRange everything = {DQ_DUE_MIN, DQ_DUE_MAX};

struct DqStream
{
	DqReading  *reading;
	int			shard;
	DqKeys		keys;

	bool		knows_unsent;
	DqUnsent   *unsent;			/* NULL: nothing beyond the fence */
	Snapshot	snapshot;		/* of the outbox, registered; NULL: not looked yet */

	/* the current page */
	DqRange		range;
	int			next;			/* next task in it */
	int			page_tasks;		/* of the next one */
	MemoryContext page_context[2];	/* in turn: the cursor of one page is needed to
									 * read the next */
	int			page;
	bool		peeked;			/* range.tasks[next] is to be shown */

	/* the next page, on its way */
	DqRedis    *asked_of;		/* NULL: not asked */
	bool		asked_first;
	DqRangeArgs asked;
};

/* ---- what all have in common ---------------------------------------------------- */

/*
 * Numbers of the shards in the registry, without writing to it: reading a queue
 * works on a standby and in a read-only transaction.
 */
static void
find_shard_numbers(DqReading *reading)
{
	List	   *rows = dq_shards_list(reading->serverid);

	reading->shard_no = palloc0(reading->nshards * sizeof(int32));
	for (int i = 0; i < reading->nshards; i++)
	{
		char	   *name = dq_shard_name(reading->name, reading->nshards, i);
		ListCell   *lc;

		foreach(lc, rows)
		{
			DqShardRow *row = lfirst(lc);

			if (strcmp(row->name, name) == 0)
				reading->shard_no[i] = row->no;
		}
	}
}

/*
 * At the start of a scan, because its execution may be in parallel mode, where no
 * new snapshot can be taken to read the extension's tables.
 */
void
dq_reading_init(DqReading *reading, const DqQueue *queue)
{
	const DqSource *source;

	reading->context = CurrentMemoryContext;
	reading->serverid = queue->serverid;
	reading->owner = queue->owner;
	reading->relname = pstrdup(queue->relname);
	reading->name = pstrdup(queue->name);
	reading->nshards = queue->nshards;
	reading->ranges = &everything;
	reading->nranges = 1;
	reading->first_page = PAGE_TASKS;
	find_shard_numbers(reading);
	source = dq_source_get(false);
	reading->source = pstrdup(source ? source->id : "");
}

/* Taken anew for each exchange: the connection may have been replaced. */
DqRedis *
dq_reading_redis(DqReading *reading)
{
	DqServer   *server = dq_server_get(reading->serverid, reading->owner, false);
	DqTarget	target;

	dq_server_check_usable(server);
	target = server->target;
	target.lane = reading->lane;
	return dq_redis_get(&target);
}

DqStream *
dq_stream_make(DqReading *reading, int shard)
{
	MemoryContext old = MemoryContextSwitchTo(reading->context);
	DqStream   *stream = palloc0(sizeof(DqStream));

	stream->reading = reading;
	stream->shard = shard;
	dq_keys_make(&stream->keys, dq_shard_name(reading->name, reading->nshards, shard));
	MemoryContextSwitchTo(old);
	return stream;
}

const DqKeys *
dq_stream_keys(const DqStream *stream)
{
	return &stream->keys;
}

int
dq_stream_shard(const DqStream *stream)
{
	return stream->shard;
}

/* ---- pages ------------------------------------------------------------------------ */

static void
page_args(DqStream *stream, bool want_fence, DqRangeArgs *args)
{
	const DqReading *reading = stream->reading;
	const DqUnsent *unsent = stream->unsent;

	memset(args, 0, sizeof(*args));
	args->source = reading->source;
	args->want_fence = want_fence;
	args->want_keys = reading->keys || (unsent && dq_unsent_wants_keys(unsent));
	args->cut = !reading->payloads && !(unsent && dq_unsent_wants_members(unsent));
	args->reverse = reading->order == DQ_ORDER_DESC;
	args->limit = stream->page_tasks;
	args->max_bytes = PAGE_BYTES;
	args->ranges = reading->ranges;
	args->nranges = reading->nranges;
}

static MemoryContext
next_page_context(DqStream *stream)
{
	MemoryContext *context = &stream->page_context[1 - stream->page];

	if (*context == NULL)
		*context = AllocSetContextCreate(stream->reading->context, "dq_bridge scan page",
										 ALLOCSET_DEFAULT_SIZES);
	return *context;
}

/* The page that was read is the current one. */
static void
turn_page(DqStream *stream, const DqRangeArgs *args)
{
	DqScanCounts *counts = &stream->reading->counts;

	if (stream->page_context[stream->page])
		MemoryContextReset(stream->page_context[stream->page]);
	stream->page = 1 - stream->page;
	stream->next = 0;
	stream->peeked = false;
	stream->page_tasks = Min(args->limit * GROWTH, PAGE_TASKS);
	counts->from_redis += stream->range.ntasks;
	counts->bytes += stream->range.bytes;
}

static void
read_page(DqStream *stream, const DqCursor *from)
{
	DqRangeArgs args;
	MemoryContext old = MemoryContextSwitchTo(next_page_context(stream));
	DqRedis    *redis = dq_reading_redis(stream->reading);

	page_args(stream, false, &args);
	args.from = *from;
	dq_op_range(redis, stream->reading->relname, &stream->keys, &args, &stream->range);
	MemoryContextSwitchTo(old);
	stream->reading->counts.round_trips++;
	turn_page(stream, &args);
}

/* ---- what is not in Redis yet ------------------------------------------------------- */

bool
dq_stream_knows_unsent(const DqStream *stream)
{
	return stream->knows_unsent;
}

/*
 * Removals without an answer take the earliest task that fits: find out which, with
 * keys and payloads, over everything that is pending.
 */
static void
settle(DqStream *stream)
{
	DqReading  *reading = stream->reading;
	DqReading	own = *reading;
	DqStream   *all;
	DqItem		item;

	own.keys = true;
	own.payloads = true;
	own.order = DQ_ORDER_ASC;
	own.ranges = &everything;
	own.nranges = 1;
	own.context = AllocSetContextCreate(CurrentMemoryContext, "dq_bridge settle",
										ALLOCSET_DEFAULT_SIZES);
	all = dq_stream_make(&own, stream->shard);
	all->knows_unsent = true;
	all->unsent = stream->unsent;
	dq_streams_open(&all, 1);
	while (dq_unsent_unsettled(stream->unsent) && dq_stream_next(all, &item))
	{
		if (item.task)
			dq_unsent_settle_task(stream->unsent, item.task);
		else
			dq_unsent_settle_row(stream->unsent, &item.row);
	}
	dq_unsent_settled(stream->unsent);
	all->unsent = NULL;
	dq_stream_end(all);
	reading->counts = own.counts;
	MemoryContextDelete(own.context);
}

/*
 * The outbox is looked at as it is now, whatever the isolation level: a queue is
 * live. Not with SnapshotSelf: rows the running command inserts must stay
 * invisible, or SELECT dq_offer(...) FROM queue would never end.
 */
DqUnsent *
dq_stream_unsent(DqStream *stream, const DqReadFence *fence)
{
	DqReading  *reading = stream->reading;
	MemoryContext old;

	if (stream->knows_unsent)
		return stream->unsent;
	if (reading->source[0] != '\0' && reading->shard_no[stream->shard] != 0)
	{
		old = MemoryContextSwitchTo(reading->context);
		stream->snapshot = RegisterSnapshot(dq_fresh_snapshot());
		stream->unsent = dq_unsent_begin(reading->shard_no[stream->shard], fence,
										 stream->snapshot);
		MemoryContextSwitchTo(old);
		if (dq_unsent_is_empty(stream->unsent))
		{
			/* nobody needs the tables open for that */
			dq_unsent_end(stream->unsent);
			stream->unsent = NULL;
			UnregisterSnapshot(stream->snapshot);
			stream->snapshot = NULL;
		}
	}
	stream->knows_unsent = true;
	if (stream->unsent && dq_unsent_unsettled(stream->unsent))
		settle(stream);
	return stream->unsent;
}

/* ---- opening --------------------------------------------------------------------------- */

/* With the first page at hand: is it good for what the outbox wants to know? */
static void
begin(DqStream *stream, const DqRangeArgs *args)
{
	DqReading  *reading = stream->reading;
	bool		knew = stream->knows_unsent;
	DqUnsent   *unsent = dq_stream_unsent(stream, &stream->range.fence);

	if (unsent == NULL)
		return;
	dq_unsent_rewind(unsent, reading->order, reading->ranges, reading->nranges);
	if (!knew && ((dq_unsent_wants_keys(unsent) && !args->want_keys) ||
				  (dq_unsent_wants_members(unsent) && args->cut)))
	{
		DqCursor	start = {0};

		stream->page_tasks = args->limit;
		read_page(stream, &start);
	}
}

void
dq_streams_open(DqStream **streams, int n)
{
	DqReading  *reading = streams[0]->reading;
	DqKeys	   *keys = palloc(n * sizeof(DqKeys));
	DqRangeArgs *args = palloc(n * sizeof(DqRangeArgs));
	MemoryContext *contexts = palloc(n * sizeof(MemoryContext));
	DqRange    *ranges = palloc(n * sizeof(DqRange));

	for (int i = 0; i < n; i++)
	{
		DqStream   *stream = streams[i];

		stream->page_tasks = Max(Min(reading->first_page, PAGE_TASKS), 1);
		keys[i] = stream->keys;
		page_args(stream, !stream->knows_unsent, &args[i]);
		contexts[i] = next_page_context(stream);
	}
	dq_op_ranges(dq_reading_redis(reading), reading->relname, n, keys, args, contexts,
				 ranges);
	reading->counts.round_trips++;
	for (int i = 0; i < n; i++)
	{
		streams[i]->range = ranges[i];
		turn_page(streams[i], &args[i]);
	}
	for (int i = 0; i < n; i++)
		begin(streams[i], &args[i]);
	pfree(keys);
	pfree(args);
	pfree(contexts);
	pfree(ranges);
}

/* ---- asking ahead ------------------------------------------------------------------------ */

bool
dq_stream_used_up(const DqStream *stream)
{
	return !stream->peeked && stream->next >= stream->range.ntasks && !stream->range.end;
}

/* Rows of the page that is here may still be in use until the next one is taken. */
void
dq_stream_ask(DqStream *stream, bool first)
{
	DqReading  *reading = stream->reading;
	DqRedis    *redis = dq_reading_redis(reading);

	if (first)
		stream->page_tasks = Max(Min(reading->first_page, PAGE_TASKS), 1);
	page_args(stream, first && !stream->knows_unsent, &stream->asked);
	if (!first)
		stream->asked.from = stream->range.next;
	stream->asked_first = first;
	stream->asked_of = redis;
	reading->waiting = stream;
	dq_op_range_send(redis, &stream->keys, &stream->asked);
}

DqRedis *
dq_stream_asked_of(const DqStream *stream)
{
	return stream->asked_of;
}

bool
dq_stream_answered(const DqStream *stream)
{
	/* what the socket has not taken yet has to be pushed */
	if (dq_redis_wants_write(stream->asked_of))
		dq_redis_flush(stream->asked_of);
	return dq_redis_has_answer(stream->asked_of);
}

void
dq_stream_take(DqStream *stream)
{
	DqReading  *reading = stream->reading;
	DqRedis    *redis = stream->asked_of;
	MemoryContext old = MemoryContextSwitchTo(next_page_context(stream));

	stream->asked_of = NULL;
	reading->waiting = NULL;
	dq_op_range_take(redis, reading->relname, &stream->keys, &stream->asked,
					 &stream->range);
	MemoryContextSwitchTo(reading->context);
	reading->counts.round_trips++;
	turn_page(stream, &stream->asked);
	if (stream->asked_first)
		begin(stream, &stream->asked);
	MemoryContextSwitchTo(old);
}

/* ---- giving out ---------------------------------------------------------------------------- */

/* The next task of Redis that is to be shown; NULL: no more. */
static const DqTask *
upcoming(DqStream *stream)
{
	if (stream->peeked)
		return &stream->range.tasks[stream->next];
	for (;;)
	{
		while (stream->next < stream->range.ntasks)
		{
			const DqTask *task = &stream->range.tasks[stream->next];

			CHECK_FOR_INTERRUPTS();
			if (task->readable &&
				!(stream->unsent && dq_unsent_hides(stream->unsent, task)))
			{
				stream->peeked = true;
				return task;
			}
			stream->next++;
		}
		if (stream->range.end)
			return NULL;
		read_page(stream, &stream->range.next);
	}
}

/* Is the next one of the outbox? Without order what is there comes first. */
static bool
outbox_is_next(DqStream *stream)
{
	const DqTask *task;
	int64		due;

	if (stream->unsent == NULL || !dq_unsent_peek(stream->unsent, &due))
		return false;
	if (stream->reading->order == DQ_ORDER_NONE)
		return true;
	task = upcoming(stream);
	if (task == NULL)
		return true;
	return stream->reading->order == DQ_ORDER_ASC ? due < task->due : due > task->due;
}

bool
dq_stream_peek(DqStream *stream, int64 *due)
{
	const DqTask *task;

	if (outbox_is_next(stream))
		return dq_unsent_peek(stream->unsent, due);
	task = upcoming(stream);
	if (task)
		*due = task->due;
	return task != NULL;
}

bool
dq_stream_next(DqStream *stream, DqItem *item)
{
	if (outbox_is_next(stream))
	{
		item->task = NULL;
		stream->reading->counts.from_outbox++;
		return dq_unsent_next(stream->unsent, &item->row);
	}
	item->task = upcoming(stream);
	if (item->task == NULL)
		return false;
	stream->peeked = false;
	stream->next++;
	return true;
}

void
dq_stream_close(DqStream *stream)
{
	if (stream->asked_of)
	{
		/* nobody wants the answer any more */
		dq_redis_drop(stream->asked_of);
		stream->asked_of = NULL;
		stream->reading->waiting = NULL;
	}
	for (int i = 0; i < 2; i++)
	{
		if (stream->page_context[i])
			MemoryContextReset(stream->page_context[i]);
	}
	memset(&stream->range, 0, sizeof(stream->range));
	stream->range.end = true;
	stream->next = 0;
	stream->peeked = false;
}

void
dq_stream_end(DqStream *stream)
{
	dq_stream_close(stream);
	if (stream->unsent)
		dq_unsent_end(stream->unsent);
	stream->unsent = NULL;
	if (stream->snapshot)
		UnregisterSnapshot(stream->snapshot);
	stream->snapshot = NULL;
	stream->knows_unsent = false;
}
