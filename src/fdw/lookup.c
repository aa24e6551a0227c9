/*
 * lookup.c
 *	  Tasks by id and key, in pages of some hundred: O(log N) for each, and one round
 *	  trip for a page. Called by scan.c when conditions name ids or keys; what is
 *	  found goes through the local filter like any other row.
 *
 *	  As in a scan by ranges, what the outbox holds beyond the fence is shown from
 *	  there and hidden in Redis. An id whose place cannot be computed (scores that are
 *	  no whole numbers of ms, of other producers) is looked for in its millisecond.
 */
#include "postgres.h"

#include <math.h>

#include "miscadmin.h"
#include "utils/memutils.h"

#include "fdw/pushdown.h"

#define PAGE_SOUGHT		100

struct DqFinder
{
	DqReading  *reading;
	DqStream   *stream;
	const DqBounds *bounds;
	MemoryContext page_context;

	int			nsought;		/* of this shard */
	const DqSought **sought;
	int			looked;			/* so many have been looked for */

	/* the current page: sought[from] to sought[looked - 1] */
	int			from;
	DqUnsent   *unsent;
	int			next_unsent;
	DqHits		hits;
	int			next;

	/* milliseconds to read */
	DqDueRange *ranges;
	int			nranges;
	int			maxranges;
	bool		reading_ranges;
};

static void
add_range(DqFinder *finder, int64 after, int64 upto)
{
	/* several ids may ask for the same */
	for (int i = 0; i < finder->nranges; i++)
	{
		if (finder->ranges[i].after == after)
			return;
	}
	if (finder->nranges == finder->maxranges)
	{
		finder->maxranges *= 2;
		finder->ranges = repalloc(finder->ranges, finder->maxranges * sizeof(DqDueRange));
	}
	finder->ranges[finder->nranges].after = after;
	finder->ranges[finder->nranges].upto = upto;
	finder->nranges++;
}

DqFinder *
dq_finder_make(DqReading *reading, DqStream *stream, const DqBounds *bounds)
{
	DqFinder   *finder = palloc0(sizeof(DqFinder));
	int			shard = dq_stream_shard(stream);
	ListCell   *lc;

	finder->reading = reading;
	finder->stream = stream;
	finder->bounds = bounds;
	finder->page_context = AllocSetContextCreate(CurrentMemoryContext,
												 "dq_bridge lookup page",
												 ALLOCSET_DEFAULT_SIZES);
	finder->sought = palloc(Max(bounds->nsought, 1) * sizeof(DqSought *));
	finder->maxranges = 8;
	finder->ranges = palloc(finder->maxranges * sizeof(DqDueRange));
	for (int i = 0; i < bounds->nsought; i++)
	{
		const DqSought *sought = &bounds->sought[i];

		if (sought->by_key &&
			dq_shard_of_key(sought->data, sought->len, reading->nshards) != shard)
			continue;
		finder->sought[finder->nsought++] = sought;
	}
	foreach(lc, bounds->odd)
	{
		DqDueRange *range = lfirst(lc);

		add_range(finder, range->after, range->upto);
	}
	return finder;
}

static void
read_page(DqFinder *finder)
{
	DqReading  *reading = finder->reading;
	int			n = Min(finder->nsought - finder->looked, PAGE_SOUGHT);
	DqSought   *page;
	MemoryContext old;
	bool		want_fence = !dq_stream_knows_unsent(finder->stream);
	bool		cut = !reading->payloads;
	ListCell   *lc;

	MemoryContextReset(finder->page_context);
	old = MemoryContextSwitchTo(finder->page_context);
	page = palloc(n * sizeof(DqSought));
	for (int i = 0; i < n; i++)
		page[i] = *finder->sought[finder->looked + i];
	for (;;)
	{
		if (finder->unsent && dq_unsent_wants_members(finder->unsent))
			cut = false;
		dq_op_lookup(dq_reading_redis(reading), reading->relname,
					 dq_stream_keys(finder->stream), reading->source, want_fence, cut,
					 page, n, &finder->hits);
		reading->counts.round_trips++;
		reading->counts.from_redis += finder->hits.ntasks;
		reading->counts.bytes += finder->hits.bytes;
		finder->unsent = dq_stream_unsent(finder->stream, &finder->hits.fence);
		want_fence = false;
		/* as in stream.c: once more, if the outbox wants what was left out */
		if (!(cut && finder->unsent && dq_unsent_wants_members(finder->unsent)))
			break;
	}
	MemoryContextSwitchTo(old);

	finder->from = finder->next_unsent = finder->looked;
	finder->looked += finder->hits.done;
	finder->next = 0;
	foreach(lc, finder->hits.inexact)
	{
		int64		due = page[lfirst_int(lc)].due;

		add_range(finder, due - 1, due);
	}
}

/* A task whose id says where it is has been looked for already. */
static bool
has_exact_place(const DqTask *task)
{
	return task->score == floor(task->score) && fabs(task->score) <= 9007199254740992.0;
}

static int
due_range_cmp(const void *a, const void *b)
{
	int64		x = ((const DqDueRange *) a)->after;
	int64		y = ((const DqDueRange *) b)->after;

	return x < y ? -1 : x > y;
}

static bool
next_of_ranges(DqFinder *finder, DqItem *item)
{
	DqReading  *reading = finder->reading;

	if (!finder->reading_ranges)
	{
		qsort(finder->ranges, finder->nranges, sizeof(DqDueRange), due_range_cmp);
		reading->ranges = finder->ranges;
		reading->nranges = finder->nranges;
		dq_streams_open(&finder->stream, 1);
		finder->reading_ranges = true;
	}
	while (dq_stream_next(finder->stream, item))
	{
		if (item->task && !has_exact_place(item->task))
			return true;
	}
	return false;
}

bool
dq_finder_next(DqFinder *finder, DqItem *item)
{
	for (;;)
	{
		CHECK_FOR_INTERRUPTS();
		while (finder->unsent && finder->next_unsent < finder->looked)
		{
			if (dq_unsent_sought(finder->unsent, finder->sought[finder->next_unsent++],
								 &item->row))
			{
				item->task = NULL;
				finder->reading->counts.from_outbox++;
				return true;
			}
		}
		while (finder->next < finder->hits.ntasks)
		{
			const DqTask *task = &finder->hits.tasks[finder->next++];

			if (!task->readable || (finder->unsent && dq_unsent_hides(finder->unsent, task)))
				continue;
			item->task = task;
			return true;
		}
		if (finder->looked < finder->nsought)
			read_page(finder);
		else
			return finder->nranges > 0 && next_of_ranges(finder, item);
	}
}
