/*
 * scan.c
 *	  The executor's side of reading a queue: what the plan says becomes bounds, the
 *	  shards are read one after the other, or merged when the order counts, and tasks
 *	  become rows. Called by the executor through handler.c.
 */
#include "postgres.h"

#include "access/sysattr.h"
#include "executor/executor.h"
#include "lib/binaryheap.h"
#include "miscadmin.h"
#include "optimizer/optimizer.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/timestamp.h"

#include "fdw/pushdown.h"

#define FIRST_PAGE_TASKS	100		/* enough for a LIMIT that is not known */

typedef struct QueueScan
{
	DqReading	reading;		/* its context holds everything in here */
	MemoryContext bounds_context;	/* what one set of parameters gives */
	List	   *quals;
	List	   *values;			/* ExprStates */
	DqStream  **streams;		/* nshards */

	/* rows */
	DqColumns  *columns;
	bool		filter_first;	/* see passes() */
	DqIdentities *identities;	/* rows say where their tasks are; NULL: no need */

	/* instead of rows */
	List	   *aggregates;

	/* this time */
	bool		begun;
	bool		done;
	DqBounds	bounds;
	int			shard;			/* that is read, or will be next */
	bool		open;			/* it is */
	DqFinder   *finder;			/* NULL: by ranges */
	binaryheap *heap;			/* shards by what comes next there; NULL: one by one */
	bool		returned;		/* the top of the heap is what was returned last */
} QueueScan;

/* ---- begin ------------------------------------------------------------------------ */

static int
scan_order(const ForeignScan *plan)
{
	return intVal(list_nth(plan->fdw_private, DQ_SCAN_ORDER));
}

/* A table that shows something else than pending tasks? */
static bool
is_shelf(const ForeignScanState *node)
{
	const ForeignScan *plan = (const ForeignScan *) node->ss.ps.plan;

	return intVal(list_nth(plan->fdw_private, DQ_SCAN_CONTENTS)) != DQ_CONTENTS_PENDING;
}

static void
begin_rows(QueueScan *state, ForeignScanState *node, const DqQueue *queue)
{
	ForeignScan *plan = (ForeignScan *) node->ss.ps.plan;
	DqReading  *reading = &state->reading;
	int			first_page = intVal(list_nth(plan->fdw_private, DQ_SCAN_FIRST_PAGE));

	state->columns = dq_columns_describe(queue, RelationGetDescr(node->ss.ss_currentRelation),
										 list_nth(plan->fdw_private, DQ_SCAN_ATTRS));
	reading->keys = dq_columns_read(state->columns, DQ_COL_KEY);
	reading->payloads = dq_columns_read(state->columns, DQ_COL_PAYLOAD);
	reading->order = scan_order(plan);
	reading->first_page = first_page > 0 ? first_page : FIRST_PAGE_TASKS;

	if (plan->fsSystemCol)
		state->identities = dq_identities_create(reading->context);

	/* a volatile filter must not be asked twice */
	if (plan->scan.plan.qual != NIL &&
		!contain_volatile_functions((Node *) plan->scan.plan.qual))
	{
		Bitmapset  *attrs = NULL;

		pull_varattnos((Node *) plan->scan.plan.qual, plan->scan.scanrelid, &attrs);
		state->filter_first = dq_columns_defer(state->columns, attrs);
	}
}

void
dq_scan_begin(ForeignScanState *node, int eflags)
{
	ForeignScan *plan = (ForeignScan *) node->ss.ps.plan;
	MemoryContext old;
	QueueScan  *state;
	DqQueue    *queue;

	/* plain EXPLAIN neither connects nor needs anything */
	if (eflags & EXEC_FLAG_EXPLAIN_ONLY)
		return;

	queue = dq_table_get(linitial_oid(list_nth(plan->fdw_private, DQ_SCAN_RELID)));
	if (queue->contents != DQ_CONTENTS_PENDING)
	{
		dq_shelf_begin(node, queue);
		return;
	}

	old = MemoryContextSwitchTo(AllocSetContextCreate(node->ss.ps.state->es_query_cxt,
													  "dq_bridge scan",
													  ALLOCSET_DEFAULT_SIZES));
	state = palloc0(sizeof(QueueScan));
	dq_reading_init(&state->reading, queue);
	state->bounds_context = AllocSetContextCreate(CurrentMemoryContext,
												  "dq_bridge scan bounds",
												  ALLOCSET_DEFAULT_SIZES);
	state->aggregates = list_nth(plan->fdw_private, DQ_SCAN_AGGREGATES);
	if (state->aggregates == NIL)
		begin_rows(state, node, queue);
	state->quals = list_nth(plan->fdw_private, DQ_SCAN_QUALS);
	state->values = ExecInitExprList(plan->fdw_exprs, (PlanState *) node);
	state->streams = palloc(state->reading.nshards * sizeof(DqStream *));
	for (int i = 0; i < state->reading.nshards; i++)
		state->streams[i] = dq_stream_make(&state->reading, i);
	MemoryContextSwitchTo(old);
	node->fdw_state = state;
}

/* ---- which shard comes next -------------------------------------------------------- */

/* The heap gives what compares as the largest first. */
static int
stream_cmp(Datum a, Datum b, void *arg)
{
	QueueScan  *state = arg;
	int64		x = 0,
				y = 0;

	(void) dq_stream_peek(state->streams[DatumGetInt32(a)], &x);
	(void) dq_stream_peek(state->streams[DatumGetInt32(b)], &y);
	if (x == y)
		return 0;
	return (x < y) == (state->reading.order == DQ_ORDER_ASC) ? 1 : -1;
}

static bool
shard_counts(const QueueScan *state, int shard)
{
	return state->bounds.shards == NULL || state->bounds.shards[shard];
}

/* All shards at once, their first pages in one round trip. */
static void
open_merged(QueueScan *state)
{
	int			nshards = state->reading.nshards;
	DqStream  **open = palloc(nshards * sizeof(DqStream *));
	int			n = 0;
	int64		due;

	for (int i = 0; i < nshards; i++)
	{
		if (shard_counts(state, i))
			open[n++] = state->streams[i];
	}
	dq_streams_open(open, n);
	state->heap = binaryheap_allocate(n, stream_cmp, state);
	for (int i = 0; i < n; i++)
	{
		if (dq_stream_peek(open[i], &due))
			binaryheap_add_unordered(state->heap, Int32GetDatum(dq_stream_shard(open[i])));
	}
	binaryheap_build(state->heap);
}

static void
begin_scan(ForeignScanState *node, QueueScan *state)
{
	DqReading  *reading = &state->reading;
	MemoryContext old;

	state->begun = true;
	MemoryContextReset(state->bounds_context);
	old = MemoryContextSwitchTo(state->bounds_context);
	dq_bounds_eval(state->quals, state->values, node->ss.ps.ps_ExprContext,
				   reading->nshards, &state->bounds);
	state->shard = 0;
	state->open = false;
	state->finder = NULL;
	state->heap = NULL;
	state->returned = false;
	state->done = state->bounds.nothing && state->aggregates == NIL;
	if (!state->bounds.lookup)
	{
		DqDueRange *ranges = state->bounds.ranges;
		int			n = state->bounds.nranges;

		reading->ranges = ranges;
		reading->nranges = n;
		if (reading->order == DQ_ORDER_DESC)
		{
			for (int i = 0; i < n / 2; i++)
			{
				DqDueRange	swap = ranges[i];

				ranges[i] = ranges[n - 1 - i];
				ranges[n - 1 - i] = swap;
			}
		}
	}
	if (!state->done && state->aggregates == NIL && !state->bounds.lookup &&
		reading->order != DQ_ORDER_NONE && reading->nshards > 1)
		open_merged(state);
	MemoryContextSwitchTo(old);
}

/* The next task in order over all shards. */
static bool
next_merged(QueueScan *state, DqItem *item, int *shard)
{
	int64		due;

	if (state->returned)
	{
		/* only now: peeking may turn the page that the last row came from */
		state->returned = false;
		*shard = DatumGetInt32(binaryheap_first(state->heap));
		if (dq_stream_peek(state->streams[*shard], &due))
			binaryheap_replace_first(state->heap, binaryheap_first(state->heap));
		else
			(void) binaryheap_remove_first(state->heap);
	}
	if (binaryheap_empty(state->heap))
		return false;
	*shard = DatumGetInt32(binaryheap_first(state->heap));
	state->returned = true;
	return dq_stream_next(state->streams[*shard], item);
}

/* The next task of the scan; false: no more, or one shard is waiting for its page. */
static bool
next_item(QueueScan *state, DqItem *item, int *shard)
{
	MemoryContext old;
	bool		found;

	if (state->heap)
		return next_merged(state, item, shard);
	for (; state->shard < state->reading.nshards; state->shard++, state->open = false)
	{
		DqStream   *stream = state->streams[state->shard];

		if (!shard_counts(state, state->shard))
			continue;
		if (state->reading.lane != 0 && !state->bounds.lookup &&
			(!state->open || dq_stream_used_up(stream)))
		{
			dq_stream_ask(stream, !state->open);
			state->open = true;
			return false;
		}
		if (!state->open)
		{
			old = MemoryContextSwitchTo(state->bounds_context);
			if (state->bounds.lookup)
				state->finder = dq_finder_make(&state->reading, stream, &state->bounds);
			else
				dq_streams_open(&stream, 1);
			MemoryContextSwitchTo(old);
			state->open = true;
		}
		found = state->finder ? dq_finder_next(state->finder, item) :
			dq_stream_next(stream, item);
		if (found)
		{
			*shard = state->shard;
			return true;
		}
		dq_stream_close(stream);
	}
	return false;
}

/* ---- rows ------------------------------------------------------------------------------ */

/* The node's own filter, asked before the rest of the row is made. */
static bool
passes(ForeignScanState *node, TupleTableSlot *slot)
{
	ExprContext *econtext = node->ss.ps.ps_ExprContext;

	econtext->ecxt_scantuple = slot;
	if (ExecQual(node->ss.ps.qual, econtext))
		return true;
	InstrCountFiltered1(node, 1);
	ExecClearTuple(slot);
	ResetExprContext(econtext);
	return false;
}

static void
store(QueueScan *state, TupleTableSlot *slot, int shard, const DqItem *item,
	  DqStorePart part)
{
	if (item->task)
		dq_columns_store_task(state->columns, slot, shard, item->task, part);
	else
		dq_columns_store_row(state->columns, slot, shard, &item->row, part);
}

/* For UPDATE and DELETE: which task is it? */
static void
identify(QueueScan *state, TupleTableSlot *slot, int shard, const DqItem *item)
{
	if (item->task)
		dq_identity_store_task(state->identities, slot, shard, item->task);
	else
		dq_identity_store_row(slot, shard, &item->row);
}

/* Count, first and last, in one row. */
static TupleTableSlot *
totals_row(QueueScan *state, TupleTableSlot *slot)
{
	DqTotals	totals = {0};
	ListCell   *lc;

	state->done = true;
	for (int i = 0; i < state->reading.nshards && !state->bounds.nothing; i++)
	{
		if (shard_counts(state, i))
			dq_totals_add(&state->reading, state->streams[i], &state->bounds, &totals);
	}
	foreach(lc, state->aggregates)
	{
		int			i = foreach_current_index(lc);

		slot->tts_isnull[i] = false;
		switch ((DqAggregate) lfirst_int(lc))
		{
			case DQ_AGG_COUNT:
				slot->tts_values[i] = Int64GetDatum(totals.tasks);
				break;
			case DQ_AGG_MIN:
				slot->tts_values[i] = TimestampTzGetDatum(dq_shown_instant(totals.first));
				slot->tts_isnull[i] = totals.tasks == 0;
				break;
			case DQ_AGG_MAX:
				slot->tts_values[i] = TimestampTzGetDatum(dq_shown_instant(totals.last));
				slot->tts_isnull[i] = totals.tasks == 0;
				break;
		}
	}
	return ExecStoreVirtualTuple(slot);
}

/* Called in a memory context that is reset for each row. */
TupleTableSlot *
dq_scan_iterate(ForeignScanState *node)
{
	QueueScan  *state = node->fdw_state;
	TupleTableSlot *slot = node->ss.ss_ScanTupleSlot;
	DqItem		item;
	int			shard;

	if (is_shelf(node))
		return dq_shelf_iterate(node);
	ExecClearTuple(slot);
	if (!state->begun)
		begin_scan(node, state);
	if (state->done)
		return slot;
	if (state->aggregates != NIL)
		return totals_row(state, slot);

	while (next_item(state, &item, &shard))
	{
		store(state, slot, shard, &item,
			  state->filter_first ? DQ_STORE_EARLY : DQ_STORE_ALL);
		ExecStoreVirtualTuple(slot);
		if (state->filter_first)
		{
			if (!passes(node, slot))
				continue;
			store(state, slot, shard, &item, DQ_STORE_LATE);
		}
		if (state->identities)
			identify(state, slot, shard, &item);
		return slot;
	}
	state->done = state->reading.waiting == NULL;
	return slot;
}

/* What is known of the outbox is kept, see stream.c. */
void
dq_scan_rescan(ForeignScanState *node)
{
	QueueScan  *state = node->fdw_state;

	if (is_shelf(node))
	{
		dq_shelf_rescan(node);
		return;
	}
	for (int i = 0; i < state->reading.nshards; i++)
		dq_stream_close(state->streams[i]);
	state->begun = false;
}

void
dq_scan_end(ForeignScanState *node)
{
	QueueScan  *state = node->fdw_state;

	if (state == NULL)
		return;
	if (is_shelf(node))
	{
		dq_shelf_end(node);
		return;
	}
	for (int i = 0; i < state->reading.nshards; i++)
		dq_stream_end(state->streams[i]);
	MemoryContextDelete(state->reading.context);
	node->fdw_state = NULL;
}

bool
dq_scan_counts(ForeignScanState *node, DqScanCounts *counts)
{
	/* both kinds of scan begin with it */
	DqReading  *reading = node->fdw_state;

	if (reading == NULL)
		return false;
	*counts = reading->counts;
	return true;
}
