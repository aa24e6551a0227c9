/*
 * aggregate.c
 *	  How many tasks a shard has within ranges of due instants, and which are the first
 *	  and the last: one script, and what the outbox holds beyond it. Called by scan.c
 *	  for plans of upper.c.
 */
#include "postgres.h"

#include "fdw/pushdown.h"

/* Reading so many to find out what they are is no burden. */
#define READ_IN_DOUBT	10000

static void
add(DqTotals *totals, int64 tasks, int64 first, int64 last)
{
	if (tasks == 0)
		return;
	if (totals->tasks == 0 || first < totals->first)
		totals->first = first;
	if (totals->tasks == 0 || last > totals->last)
		totals->last = last;
	totals->tasks += tasks;
}

/*
 * What is on its way replaces or removes tasks: which of them lie within the ranges
 * only reading them tells. And members that nobody can read are no tasks; among very
 * many that only other producers know they are counted all the same.
 */
static void
add_by_reading(DqReading *reading, DqStream *stream, const DqBounds *bounds,
			   DqTotals *totals)
{
	DqItem		item;

	reading->ranges = bounds->ranges;
	reading->nranges = bounds->nranges;
	dq_streams_open(&stream, 1);
	while (dq_stream_next(stream, &item))
	{
		int64		due = item.task ? item.task->due : item.row.due;

		add(totals, 1, due, due);
	}
	dq_stream_close(stream);
}

void
dq_totals_add(DqReading *reading, DqStream *stream, const DqBounds *bounds,
			  DqTotals *totals)
{
	DqUnsent   *unsent;
	DqCount		count;
	int64		tasks;
	int64		first,
				last;

	if (bounds->nranges > DQ_COUNT_RANGES)
	{
		add_by_reading(reading, stream, bounds, totals);
		return;
	}
	dq_op_count(dq_reading_redis(reading), reading->relname, dq_stream_keys(stream),
				reading->source, bounds->ranges, bounds->nranges, &count);
	reading->counts.round_trips++;
	reading->counts.bytes += count.bytes;

	/* of the moment when they were counted: nothing of it is among them */
	unsent = dq_stream_unsent(stream, &count.fence);
	if ((unsent && !dq_unsent_adds_only(unsent)) ||
		(count.doubtful && count.tasks <= READ_IN_DOUBT))
	{
		add_by_reading(reading, stream, bounds, totals);
		return;
	}
	add(totals, count.tasks, count.first, count.last);
	if (unsent)
	{
		dq_unsent_count(unsent, bounds->ranges, bounds->nranges, &tasks, &first, &last);
		reading->counts.from_outbox += tasks;
		add(totals, tasks, first, last);
	}
}
