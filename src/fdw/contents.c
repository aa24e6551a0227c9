/*
 * contents.c
 *	  Reading tables that show no pending tasks: the ready list (contents 'ready') and
 *	  what nobody could read ('quarantine'). Page by page, as stream.c; no conditions but
 *	  those on the shard go to Redis. Called by scan.c.
 *
 *	  What lies ready belongs to its consumers: elements that they take while the list
 *	  is read may be shown or not.
 */
#include "postgres.h"

#include "common/hashfn.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "fdw/pushdown.h"

#define PAGE_ENTRIES	500
#define PAGE_BYTES		(1024 * 1024)

/* Something quarantined that has been shown: two hashes of it */
typedef struct Seen
{
	uint64		hash[2];
} Seen;

typedef struct ShelfScan
{
	DqReading	reading;		/* first, see dq_scan_counts */
	DqContents	contents;
	DqColumns  *columns;		/* NULL: only a count is wanted */
	int			naggregates;
	List	   *quals;
	List	   *values;
	MemoryContext bounds_context;
	DqBounds	bounds;
	bool		begun;
	bool		done;

	int			shard;			/* that is read */
	bool		open;
	DqKeys		keys;
	HTAB	   *seen;			/* quarantine: of this shard; NULL: one page so far */
	DqUnsent   *unsent;			/* ... and what has been discarded, or NULL */
	Snapshot	snapshot;		/* of the outbox, registered, or NULL */
	DqShelf		shelf;			/* the current page */
	int			next;
	MemoryContext page_context[2];	/* in turn: a page tells where the next begins */
	int			page;
} ShelfScan;

void
dq_shelf_begin(ForeignScanState *node, const DqQueue *queue)
{
	ForeignScan *plan = (ForeignScan *) node->ss.ps.plan;
	List	   *aggregates = list_nth(plan->fdw_private, DQ_SCAN_AGGREGATES);
	MemoryContext old;
	ShelfScan  *state;

	old = MemoryContextSwitchTo(AllocSetContextCreate(node->ss.ps.state->es_query_cxt,
													  "dq_bridge scan",
													  ALLOCSET_DEFAULT_SIZES));
	state = palloc0(sizeof(ShelfScan));
	state->contents = queue->contents;
	dq_reading_init(&state->reading, queue);
	state->naggregates = list_length(aggregates);
	if (aggregates == NIL)
		state->columns = dq_columns_describe(queue,
											 RelationGetDescr(node->ss.ss_currentRelation),
											 list_nth(plan->fdw_private, DQ_SCAN_ATTRS));
	state->quals = list_nth(plan->fdw_private, DQ_SCAN_QUALS);
	state->values = ExecInitExprList(plan->fdw_exprs, (PlanState *) node);
	state->bounds_context = AllocSetContextCreate(CurrentMemoryContext,
												  "dq_bridge scan bounds",
												  ALLOCSET_SMALL_SIZES);
	for (int i = 0; i < 2; i++)
		state->page_context[i] = AllocSetContextCreate(CurrentMemoryContext,
													   "dq_bridge scan page",
													   ALLOCSET_DEFAULT_SIZES);
	MemoryContextSwitchTo(old);
	node->fdw_state = state;
}

/* A page of the shard that is open; limit 0: only how much there is. */
static void
read_page(ShelfScan *state, int limit)
{
	DqReading  *reading = &state->reading;
	DqRedis    *redis = dq_reading_redis(reading);
	int			other = 1 - state->page;
	MemoryContext old = MemoryContextSwitchTo(state->page_context[other]);
	DqShelfPlace from = state->shelf.next;

	if (state->contents == DQ_CONTENTS_READY)
		dq_op_ready(redis, reading->relname, &state->keys, reading->source, &from, limit,
					PAGE_BYTES, &state->shelf);
	else
		dq_op_bad(redis, reading->relname, &state->keys, reading->source, &from, limit,
				  &state->shelf);
	MemoryContextSwitchTo(old);
	MemoryContextReset(state->page_context[state->page]);
	state->page = other;
	state->next = 0;
	reading->counts.round_trips++;
	reading->counts.from_redis += state->shelf.nentries;
	reading->counts.bytes += state->shelf.bytes;
}

/* What is to be discarded of a shard, and is not yet: as in stream.c. */
static void
look_at_outbox(ShelfScan *state)
{
	DqReading  *reading = &state->reading;
	int32		no = reading->shard_no[state->shard];
	MemoryContext old;

	if (state->contents != DQ_CONTENTS_QUARANTINE || reading->source[0] == '\0' || no == 0)
		return;
	old = MemoryContextSwitchTo(reading->context);
	state->snapshot = RegisterSnapshot(dq_fresh_snapshot());
	state->unsent = dq_unsent_begin(no, &state->shelf.fence, state->snapshot);
	MemoryContextSwitchTo(old);
}

static void
forget_outbox(ShelfScan *state)
{
	if (state->unsent)
		dq_unsent_end(state->unsent);
	state->unsent = NULL;
	if (state->snapshot)
		UnregisterSnapshot(state->snapshot);
	state->snapshot = NULL;
}

static void
open_shard(ShelfScan *state)
{
	DqReading  *reading = &state->reading;
	MemoryContext old = MemoryContextSwitchTo(state->bounds_context);

	dq_keys_make(&state->keys, dq_shard_name(reading->name, reading->nshards, state->shard));
	memset(&state->shelf, 0, sizeof(state->shelf));
	if (state->seen)
		hash_destroy(state->seen);
	state->seen = NULL;
	MemoryContextSwitchTo(old);
}

/*
 * A scan of a hash may show an entry twice when the hash grows or shrinks meanwhile.
 * Only pages beyond the first need to know what was before.
 */
static bool
is_seen(ShelfScan *state, const DqShelved *entry)
{
	Seen		seen;
	bool		found;

	if (state->contents != DQ_CONTENTS_QUARANTINE ||
		(state->seen == NULL && state->shelf.end))
		return false;
	if (state->seen == NULL)
	{
		HASHCTL		ctl = {0};

		ctl.keysize = ctl.entrysize = sizeof(Seen);
		ctl.hcxt = state->reading.context;
		state->seen = hash_create("dq_bridge quarantine", 1024, &ctl,
								  HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
	}
	for (int i = 0; i < 2; i++)
		seen.hash[i] = hash_bytes_extended((const unsigned char *) entry->data, entry->len, i);
	(void) hash_search(state->seen, &seen, HASH_ENTER, &found);
	return found;
}

static bool
shard_counts(const ShelfScan *state, int shard)
{
	return !state->bounds.nothing &&
		(state->bounds.shards == NULL || state->bounds.shards[shard]);
}

static void
begin_scan(ForeignScanState *node, ShelfScan *state)
{
	MemoryContext old;

	state->begun = true;
	state->done = false;
	state->shard = 0;
	state->open = false;
	MemoryContextReset(state->bounds_context);
	old = MemoryContextSwitchTo(state->bounds_context);
	dq_bounds_eval(state->quals, state->values, node->ss.ps.ps_ExprContext,
				   state->reading.nshards, &state->bounds);
	MemoryContextSwitchTo(old);
}

static TupleTableSlot *
count_row(ShelfScan *state, TupleTableSlot *slot)
{
	int64		total = 0;

	state->done = true;
	for (; state->shard < state->reading.nshards; state->shard++)
	{
		if (!shard_counts(state, state->shard))
			continue;
		open_shard(state);
		read_page(state, 0);
		total += state->shelf.total;
	}
	for (int i = 0; i < state->naggregates; i++)
	{
		slot->tts_values[i] = Int64GetDatum(total);
		slot->tts_isnull[i] = false;
	}
	return ExecStoreVirtualTuple(slot);
}

TupleTableSlot *
dq_shelf_iterate(ForeignScanState *node)
{
	ShelfScan  *state = node->fdw_state;
	TupleTableSlot *slot = node->ss.ss_ScanTupleSlot;

	ExecClearTuple(slot);
	if (!state->begun)
		begin_scan(node, state);
	if (state->done)
		return slot;
	if (state->columns == NULL)
		return count_row(state, slot);

	for (; state->shard < state->reading.nshards; state->shard++, state->open = false)
	{
		if (!shard_counts(state, state->shard))
			continue;
		if (!state->open)
		{
			open_shard(state);
			read_page(state, PAGE_ENTRIES);
			look_at_outbox(state);
			state->open = true;
		}
		for (;;)
		{
			CHECK_FOR_INTERRUPTS();
			while (state->next < state->shelf.nentries)
			{
				const DqShelved *entry = &state->shelf.entries[state->next++];

				if (is_seen(state, entry) ||
					(state->unsent && dq_unsent_discards(state->unsent, entry->data, entry->len)))
					continue;
				dq_columns_store_shelved(state->columns, slot, state->shard, entry);
				return ExecStoreVirtualTuple(slot);
			}
			if (state->shelf.end)
				break;
			read_page(state, PAGE_ENTRIES);
		}
		forget_outbox(state);
	}
	state->done = true;
	return slot;
}

void
dq_shelf_rescan(ForeignScanState *node)
{
	ShelfScan  *state = node->fdw_state;

	forget_outbox(state);
	state->begun = false;
}

void
dq_shelf_end(ForeignScanState *node)
{
	ShelfScan  *state = node->fdw_state;

	forget_outbox(state);
	MemoryContextDelete(state->reading.context);
	node->fdw_state = NULL;
}
