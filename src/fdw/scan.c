/*
 * scan.c
 *	  Reading a queue: pending tasks of all its shards, page by page. Memory is
 *	  bounded by the page; every page is one complete exchange with Redis, so
 *	  interleaved scans can share the backend's connection, and every wait is
 *	  cancellable because the redis room waits.
 *
 *	  Per shard: the first page with the fence; then what the outbox holds beyond
 *	  the fence (unsent.c), which is shown first; then the pages, without what has
 *	  been shown, replaced or removed there. What is pending during the whole scan
 *	  is shown exactly once. Members that nobody can read are passed over; transfer
 *	  puts them into quarantine.
 */
#include "postgres.h"

#include "access/parallel.h"
#include "access/xact.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "optimizer/optimizer.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "fdw/fdw.h"

#define FIRST_PAGE_TASKS	100		/* enough for a LIMIT */
#define PAGE_TASKS			400
#define PAGE_BYTES			(1024 * 1024)

typedef struct QueueScan
{
	MemoryContext context;		/* as long as the scan */
	Oid			serverid;
	Oid			owner;
	char	   *relname;
	char	   *name;			/* Redis name */
	int			nshards;
	int32	   *shard_no;		/* 0: not registered, so the outbox has nothing */
	bool		has_source;		/* this database has an identity: else the outbox is
								 * empty */
	DqColumns  *columns;
	bool		filter_first;	/* see passes() */
	DqIdentities *identities;	/* rows say where their tasks are; NULL: no need */

	Snapshot	snapshot;		/* of the outbox, registered; NULL: no scan yet */

	/* the shard that is being read */
	int			shard;
	bool		started;		/* first page is there */
	MemoryContext shard_context;
	DqKeys		keys;
	char	   *source;			/* own id, "" if there is none yet */
	DqUnsent   *unsent;			/* NULL: nothing beyond the fence can exist */
	bool		show_unsent;	/* not all of it shown yet */

	/* its current page */
	DqRange		range;
	int			next;			/* next task in it */
	MemoryContext page_context[2];	/* in turn: the cursor of one page is needed to
									 * read the next */
	int			page;

	DqScanCounts counts;
} QueueScan;

/* ---- begin ------------------------------------------------------------------------ */

/*
 * Numbers of the shards in the registry, without writing to it: reading a queue
 * works on a standby and in a read-only transaction.
 */
static void
find_shard_numbers(QueueScan *state)
{
	List	   *rows = dq_shards_list(state->serverid);

	state->shard_no = palloc0(state->nshards * sizeof(int32));
	for (int i = 0; i < state->nshards; i++)
	{
		char	   *name = dq_shard_name(state->name, state->nshards, i);
		ListCell   *lc;

		foreach(lc, rows)
		{
			DqShardRow *row = lfirst(lc);

			if (strcmp(row->name, name) == 0)
				state->shard_no[i] = row->no;
		}
	}
}

void
dq_scan_begin(ForeignScanState *node, int eflags)
{
	ForeignScan *plan = (ForeignScan *) node->ss.ps.plan;
	Relation	rel = node->ss.ss_currentRelation;
	MemoryContext context = node->ss.ps.state->es_query_cxt;
	MemoryContext old;
	QueueScan  *state;
	DqQueue    *queue;

	/* plain EXPLAIN neither connects nor needs anything */
	if (eflags & EXEC_FLAG_EXPLAIN_ONLY)
		return;

	old = MemoryContextSwitchTo(AllocSetContextCreate(context, "dq_bridge scan",
													  ALLOCSET_DEFAULT_SIZES));
	state = palloc0(sizeof(QueueScan));
	state->context = CurrentMemoryContext;
	state->shard_context = AllocSetContextCreate(state->context, "dq_bridge scan shard",
												 ALLOCSET_DEFAULT_SIZES);
	for (int i = 0; i < 2; i++)
		state->page_context[i] = AllocSetContextCreate(state->context,
													   "dq_bridge scan page",
													   ALLOCSET_DEFAULT_SIZES);

	queue = dq_queue_get(RelationGetRelid(rel));
	state->serverid = queue->serverid;
	state->owner = queue->owner;
	state->relname = pstrdup(queue->relname);
	state->name = pstrdup(queue->name);
	state->nshards = queue->nshards;
	state->columns = dq_columns_describe(queue, RelationGetDescr(rel),
										 list_nth(plan->fdw_private, DQ_SCAN_ATTRS));

	if (plan->fsSystemCol)
		state->identities = dq_identities_create(state->context);

	/* a volatile filter must not be asked twice */
	if (plan->scan.plan.qual != NIL &&
		!contain_volatile_functions((Node *) plan->scan.plan.qual))
	{
		Bitmapset  *attrs = NULL;

		pull_varattnos((Node *) plan->scan.plan.qual, plan->scan.scanrelid, &attrs);
		state->filter_first = dq_columns_defer(state->columns, attrs);
	}

	/* now, because the execution may be in parallel mode, where no new snapshot
	 * can be taken to read the extension's tables */
	find_shard_numbers(state);
	state->has_source = dq_source_get(false) != NULL;
	MemoryContextSwitchTo(old);
	node->fdw_state = state;
}

/* ---- pages -------------------------------------------------------------------------- */

/*
 * The outbox is looked at as it is now, whatever the isolation level: a queue is
 * live. Rows the running command inserts must stay invisible, or SELECT
 * dq_offer(...) FROM queue would never end. A parallel query cannot take a new
 * snapshot; the statement's own is then as good as it gets.
 */
static void
take_snapshot(QueueScan *state, EState *estate)
{
	if (state->snapshot)
		UnregisterSnapshot(state->snapshot);
	state->snapshot = NULL;
	state->snapshot = RegisterSnapshot(IsInParallelMode() ?
									   dq_snapshot_unmarked(estate->es_snapshot) :
									   dq_fresh_snapshot());
}

static void
read_page(QueueScan *state, bool first)
{
	/* taken anew for each page: the connection may have been replaced */
	DqServer   *server = dq_server_get(state->serverid, state->owner, false);
	MemoryContext old;
	int			other = 1 - state->page;
	char	   *score = first ? NULL : state->range.cursor_score;
	bytea	   *member = first ? NULL : state->range.cursor_member;
	bool		keys = first || dq_columns_read_key(state->columns) ||
		(state->unsent && dq_unsent_wants_keys(state->unsent));

	dq_server_check_usable(server);
	old = MemoryContextSwitchTo(state->page_context[other]);
	dq_op_range(dq_redis_get(&server->target), state->relname, &state->keys,
				state->source, score, member,
				first ? FIRST_PAGE_TASKS : PAGE_TASKS, PAGE_BYTES, keys, first,
				&state->range);
	MemoryContextSwitchTo(old);
	MemoryContextReset(state->page_context[state->page]);
	state->page = other;
	state->next = 0;
	state->counts.round_trips++;
	state->counts.from_redis += state->range.ntasks;
}

static void
start_shard(QueueScan *state, EState *estate)
{
	const DqSource *source = state->has_source ? dq_source_get(false) : NULL;
	MemoryContext old;

	MemoryContextReset(state->shard_context);
	old = MemoryContextSwitchTo(state->shard_context);
	dq_keys_make(&state->keys, dq_shard_name(state->name, state->nshards, state->shard));
	state->source = pstrdup(source ? source->id : "");
	state->unsent = NULL;
	state->show_unsent = false;

	/* the fence first: what it does not cover is looked for afterwards */
	read_page(state, true);
	if (source && state->shard_no[state->shard] != 0)
	{
		take_snapshot(state, estate);
		state->unsent = dq_unsent_begin(state->shard_no[state->shard], &state->range,
										state->snapshot);
		state->show_unsent = true;
	}
	MemoryContextSwitchTo(old);
	state->started = true;
}

static void
stop_shard(QueueScan *state)
{
	if (state->unsent)
		dq_unsent_end(state->unsent);
	state->unsent = NULL;
	if (state->snapshot)
		UnregisterSnapshot(state->snapshot);
	state->snapshot = NULL;
	state->started = false;
}

/* ---- iterate ---------------------------------------------------------------------------- */

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

/* Called in a memory context that is reset for each row. */
TupleTableSlot *
dq_scan_iterate(ForeignScanState *node)
{
	QueueScan  *state = node->fdw_state;
	TupleTableSlot *slot = node->ss.ss_ScanTupleSlot;

	ExecClearTuple(slot);
	while (state->shard < state->nshards)
	{
		if (!state->started)
			start_shard(state, node->ss.ps.state);

		if (state->show_unsent)
		{
			DqRow		row;

			if (dq_unsent_next(state->unsent, &row))
			{
				state->counts.from_outbox++;
				dq_columns_store_row(state->columns, slot, state->shard, &row,
									 state->filter_first ? DQ_STORE_EARLY : DQ_STORE_ALL);
				ExecStoreVirtualTuple(slot);
				if (state->filter_first)
				{
					if (!passes(node, slot))
						continue;
					dq_columns_store_row(state->columns, slot, state->shard, &row,
										 DQ_STORE_LATE);
				}
				if (state->identities)
					dq_identity_store_row(slot, state->shard, &row);
				return slot;
			}
			state->show_unsent = false;
		}

		while (state->next < state->range.ntasks)
		{
			DqTask	   *found = &state->range.tasks[state->next++];

			CHECK_FOR_INTERRUPTS();
			if (!found->readable ||
				(state->unsent && dq_unsent_hides(state->unsent, found)))
				continue;
			dq_columns_store_task(state->columns, slot, state->shard, found,
								  state->filter_first ? DQ_STORE_EARLY : DQ_STORE_ALL);
			ExecStoreVirtualTuple(slot);
			if (state->filter_first)
			{
				if (!passes(node, slot))
					continue;
				dq_columns_store_task(state->columns, slot, state->shard, found,
									  DQ_STORE_LATE);
			}
			if (state->identities)
				dq_identity_store_task(state->identities, slot, state->shard, found);
			return slot;
		}

		if (!state->range.end)
			read_page(state, false);
		else
		{
			stop_shard(state);
			state->shard++;
		}
	}
	return slot;
}

void
dq_scan_rescan(ForeignScanState *node)
{
	QueueScan  *state = node->fdw_state;

	if (state->started)
		stop_shard(state);
	state->shard = 0;
}

void
dq_scan_end(ForeignScanState *node)
{
	QueueScan  *state = node->fdw_state;

	if (state == NULL)
		return;
	if (state->started)
		stop_shard(state);
	MemoryContextDelete(state->context);
	node->fdw_state = NULL;
}

bool
dq_scan_counts(ForeignScanState *node, DqScanCounts *counts)
{
	QueueScan  *state = node->fdw_state;

	if (state == NULL)
		return false;
	*counts = state->counts;
	return true;
}
