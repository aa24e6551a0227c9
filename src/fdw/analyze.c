/*
 * analyze.c
 *	  ANALYZE of a queue: a sample of its tasks. Called through handler.c.
 *
 *	  A queue that is not much larger than the sample is read whole. Of a larger one
 *	  tasks are asked for by their ranks, one from each of as many equal parts of the
 *	  order: so the sample is as even over due instants as it can be, and costs the same
 *	  whatever the queue's size. What is on its way to Redis is counted, but not in it.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "commands/vacuum.h"
#include "executor/tuptable.h"
#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/sampling.h"

#include "compat.h"
#include "fdw/pushdown.h"

#define RANKS_A_CALL	200

typedef struct Sampler
{
	DqReading	reading;
	DqColumns  *columns;
	TupleTableSlot *slot;
	MemoryContext row_context;
	DqStream  **streams;
	int64	   *tasks;			/* of each shard */
	double		total;

	HeapTuple  *rows;
	int			nrows;
	int			target;
} Sampler;

/* The row of a task, in the caller's context. */
static HeapTuple
make_row(Sampler *sampler, int shard, const DqItem *item)
{
	MemoryContext old = MemoryContextSwitchTo(sampler->row_context);
	HeapTuple	row;

	ExecClearTuple(sampler->slot);
	if (item->task)
		dq_columns_store_task(sampler->columns, sampler->slot, shard, item->task,
							  DQ_STORE_ALL);
	else
		dq_columns_store_row(sampler->columns, sampler->slot, shard, &item->row,
							 DQ_STORE_ALL);
	ExecStoreVirtualTuple(sampler->slot);
	MemoryContextSwitchTo(old);
	row = ExecCopySlotHeapTuple(sampler->slot);
	MemoryContextReset(sampler->row_context);
	return row;
}

/* All tasks; of more than the target each is as likely to stay. */
static void
read_all(Sampler *sampler)
{
	ReservoirStateData state;
	double		to_skip = -1;
	double		seen = 0;

	reservoir_init_selection_state(&state, sampler->target);
	for (int shard = 0; shard < sampler->reading.nshards; shard++)
	{
		DqStream   *stream = sampler->streams[shard];
		DqItem		item;

		dq_streams_open(&stream, 1);
		while (dq_stream_next(stream, &item))
		{
			CHECK_FOR_INTERRUPTS();
			seen++;
			if (sampler->nrows < sampler->target)
			{
				sampler->rows[sampler->nrows++] = make_row(sampler, shard, &item);
				continue;
			}
			if (to_skip < 0)
				to_skip = reservoir_get_next_S(&state, seen - 1, sampler->target);
			if (to_skip <= 0)
			{
				int			k = (int) (sampler->target * sampler_random_fract(&state.randstate));

				heap_freetuple(sampler->rows[k]);
				sampler->rows[k] = make_row(sampler, shard, &item);
			}
			to_skip--;
		}
		dq_stream_close(stream);
	}
	sampler->total = seen;
}

/* n tasks of a shard by rank. */
static void
read_ranks(Sampler *sampler, int shard, int n, ReservoirState state)
{
	DqReading  *reading = &sampler->reading;
	double		part = (double) sampler->tasks[shard] / n;
	MemoryContext page_context = AllocSetContextCreate(CurrentMemoryContext,
													   "dq_bridge sample page",
													   ALLOCSET_DEFAULT_SIZES);

	for (int from = 0; from < n;)
	{
		int64		ranks[RANKS_A_CALL];
		int			nranks = Min(n - from, RANKS_A_CALL);
		DqSample	sample;
		MemoryContext old;

		CHECK_FOR_INTERRUPTS();
		for (int i = 0; i < nranks; i++)
			ranks[i] = (int64) (part * (from + i + sampler_random_fract(&state->randstate)));
		MemoryContextReset(page_context);
		old = MemoryContextSwitchTo(page_context);
		dq_op_sample(dq_reading_redis(reading), reading->relname,
					 dq_stream_keys(sampler->streams[shard]), reading->source, ranks, nranks,
					 &sample);
		MemoryContextSwitchTo(old);
		for (int i = 0; i < sample.ntasks && sampler->nrows < sampler->target; i++)
		{
			DqItem		item;

			item.task = &sample.tasks[i];
			if (item.task->readable)
				sampler->rows[sampler->nrows++] = make_row(sampler, shard, &item);
		}
		from += Max(sample.done, 1);
	}
	MemoryContextDelete(page_context);
}

/* How many tasks each shard has. */
static void
count_tasks(Sampler *sampler)
{
	DqReading  *reading = &sampler->reading;

	for (int i = 0; i < reading->nshards; i++)
	{
		DqTotals	totals = {0};
		DqBounds	all = {0};

		all.ranges = unconstify(DqDueRange *, reading->ranges);
		all.nranges = 1;
		dq_totals_add(reading, sampler->streams[i], &all, &totals);
		sampler->tasks[i] = totals.tasks;
		sampler->total += totals.tasks;
	}
}

static int
acquire_rows(Relation rel, int elevel, HeapTuple *rows, int target, double *total,
			 double *dead)
{
	DqQueue    *queue = dq_table_get(RelationGetRelid(rel));
	Sampler    *sampler = palloc0(sizeof(Sampler));
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext, "dq_bridge sample",
												  ALLOCSET_DEFAULT_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(context);

	dq_reading_init(&sampler->reading, queue);
	sampler->reading.keys = true;
	sampler->reading.payloads = true;
	sampler->columns = dq_columns_describe(queue, RelationGetDescr(rel), list_make1_int(0));
	dq_columns_forgive(sampler->columns);
	sampler->slot = MakeSingleTupleTableSlot(RelationGetDescr(rel), &TTSOpsVirtual);
	sampler->row_context = AllocSetContextCreate(context, "dq_bridge sampled row",
												 ALLOCSET_DEFAULT_SIZES);
	sampler->streams = palloc(queue->nshards * sizeof(DqStream *));
	sampler->tasks = palloc0(queue->nshards * sizeof(int64));
	for (int i = 0; i < sampler->reading.nshards; i++)
		sampler->streams[i] = dq_stream_make(&sampler->reading, i);
	sampler->rows = rows;
	sampler->target = target;
	count_tasks(sampler);
	MemoryContextSwitchTo(caller);	/* where the rows are to be */

	if (sampler->total <= 2.0 * target)
		read_all(sampler);
	else
	{
		ReservoirStateData state;
		double		whole = sampler->total;

		reservoir_init_selection_state(&state, target);
		for (int i = 0; i < sampler->reading.nshards; i++)
		{
			int			n = (int) (target * (sampler->tasks[i] / whole));

			if (n > 0)
				read_ranks(sampler, i, n, &state);
		}
	}

	for (int i = 0; i < sampler->reading.nshards; i++)
		dq_stream_end(sampler->streams[i]);
	ExecDropSingleTupleTableSlot(sampler->slot);
	*total = sampler->total;
	*dead = 0;
	ereport(elevel,
			(errmsg("\"%s\": %.0f tasks pending, %d of them in the sample",
					sampler->reading.relname, sampler->total, sampler->nrows)));
	MemoryContextDelete(context);
	return sampler->nrows;
}

bool
dq_analyze(Relation rel, AcquireSampleRowsFunc *func, BlockNumber *pages)
{
	DqQueue    *queue = dq_table_get(RelationGetRelid(rel));

	/* what lies ready or in quarantine has nothing worth knowing */
	if (queue->contents != DQ_CONTENTS_PENDING)
		return false;
	*func = acquire_rows;
	*pages = 1;					/* nobody counts them */
	return true;
}
