/*
 * losses.c
 *	  What cannot be applied again (PO 16, PO 17). Of each outbox table that was
 *	  emptied a row per shard keeps under which snapshot it was complete and when its
 *	  tasks were due. If Redis falls back behind that, and the mark does not call
 *	  these tasks delivered, they are lost: that stands in dq_losses until dq_resume
 *	  accepts it. Called by rotate.c, the relay, and the SQL functions.
 */
#include "postgres.h"

#include "compat.h"
#include "outbox/outbox.h"
#include "outbox/outbox_private.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

enum
{
	Anum_emptied_shard = 1,
	Anum_emptied_round,
	Anum_emptied_source,
	Anum_emptied_complete,
	Anum_emptied_tasks,
	Anum_emptied_due,
	Anum_emptied_any_due,
	Anum_emptied_last_seq,
	Anum_emptied_newest,
	Natts_emptied = Anum_emptied_newest
};

enum
{
	Anum_losses_shard = 1,
	Anum_losses_source,
	Anum_losses_since,
	Anum_losses_tasks,
	Anum_losses_newest,
	Anum_losses_due,
	Natts_losses = Anum_losses_due
};

#define MANY_EMPTIED	16		/* rows of a shard that are kept apart */

static SysScanDesc
begin_scan(Relation rel, const char *index, int32 shard, Snapshot snapshot)
{
	ScanKeyData key;

	/* of both tables the first column, and the first of their keys */
	ScanKeyInit(&key, 1, BTEqualStrategyNumber, F_INT4EQ, Int32GetDatum(shard));
	return systable_beginscan(rel, dq_extension_relation(index), true, snapshot, 1, &key);
}

/* ---- emptied tables ---- */

static void
emptied_from_tuple(Relation rel, HeapTuple tuple, DqEmptied *e, int32 *source)
{
	Datum		values[Natts_emptied];
	bool		nulls[Natts_emptied];

	heap_deform_tuple(tuple, RelationGetDescr(rel), values, nulls);
	e->shard = DatumGetInt32(values[Anum_emptied_shard - 1]);
	e->round = DatumGetInt64(values[Anum_emptied_round - 1]);
	*source = DatumGetInt32(values[Anum_emptied_source - 1]);
	e->complete = TextDatumGetCString(values[Anum_emptied_complete - 1]);
	e->tasks = DatumGetInt64(values[Anum_emptied_tasks - 1]);
	e->due = DatumGetInt64(values[Anum_emptied_due - 1]);
	e->any_due = DatumGetInt64(values[Anum_emptied_any_due - 1]);
	e->last_seq = DatumGetInt64(values[Anum_emptied_last_seq - 1]);
	e->newest = DatumGetTimestampTz(values[Anum_emptied_newest - 1]);
}

static void
insert_emptied(Relation rel, const DqEmptied *e)
{
	Datum		values[Natts_emptied];
	bool		nulls[Natts_emptied] = {0};

	values[Anum_emptied_shard - 1] = Int32GetDatum(e->shard);
	values[Anum_emptied_round - 1] = Int64GetDatum(e->round);
	values[Anum_emptied_source - 1] = Int32GetDatum(dq_source_get(true)->no);
	values[Anum_emptied_complete - 1] = CStringGetTextDatum(e->complete);
	values[Anum_emptied_tasks - 1] = Int64GetDatum(e->tasks);
	values[Anum_emptied_due - 1] = Int64GetDatum(e->due);
	values[Anum_emptied_any_due - 1] = Int64GetDatum(e->any_due);
	values[Anum_emptied_last_seq - 1] = Int64GetDatum(e->last_seq);
	values[Anum_emptied_newest - 1] = TimestampTzGetDatum(e->newest);
	dq_store_insert(rel, values, nulls);
}

/* Later in *into: what may be missing of both. */
static void
join_emptied(DqEmptied *into, const DqEmptied *later)
{
	into->round = later->round;
	into->complete = later->complete;
	into->tasks += later->tasks;
	into->due = Max(into->due, later->due);
	into->any_due = Max(into->any_due, later->any_due);
	into->last_seq = Max(into->last_seq, later->last_seq);
	into->newest = Max(into->newest, later->newest);
}

/* All that the mark calls delivered cannot be missing any more. */
static bool
is_settled(const DqEmptied *e, const DqMark *mark, int64 due)
{
	return mark->settled[0] != '\0' && due <= mark->due &&
		dq_snapshot_covers(dq_snapshot_in(mark->settled), dq_snapshot_in(e->complete));
}

/*
 * A table was emptied; of its shard this is to be remembered. Rows about tasks that
 * have been delivered since go, and of very many the oldest are put together.
 */
void
dq_emptied_note(const DqEmptied *e)
{
	const DqSource *source = dq_source_get(true);
	Relation	rel = table_open(dq_extension_relation("dq_emptied"), RowExclusiveLock);
	Snapshot	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	SysScanDesc scan = begin_scan(rel, "dq_emptied_pkey", e->shard, snapshot);
	HeapTuple	tuple;
	DqMark		mark;
	bool		marked = dq_mark_get(e->shard, snapshot, &mark);
	DqEmptied	joined = {0};
	int			n = 0;

	/* in order of rounds, so from the oldest on */
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		DqEmptied	old;
		int32		whose;

		emptied_from_tuple(rel, tuple, &old, &whose);
		if (whose != source->no || (marked && is_settled(&old, &mark, old.any_due)))
			dq_store_delete(rel, tuple);
		else
			n++;
	}
	systable_endscan(scan);
	if (n >= MANY_EMPTIED)
	{
		CommandCounterIncrement();
		UnregisterSnapshot(snapshot);
		snapshot = RegisterSnapshot(dq_fresh_snapshot());
		scan = begin_scan(rel, "dq_emptied_pkey", e->shard, snapshot);
		while (n >= MANY_EMPTIED / 2 && HeapTupleIsValid(tuple = systable_getnext(scan)))
		{
			DqEmptied	old;
			int32		whose;

			emptied_from_tuple(rel, tuple, &old, &whose);
			if (joined.complete == NULL)
				joined = old;
			else
				join_emptied(&joined, &old);
			dq_store_delete(rel, tuple);
			n--;
		}
		systable_endscan(scan);
		CommandCounterIncrement();
		insert_emptied(rel, &joined);
	}
	UnregisterSnapshot(snapshot);
	insert_emptied(rel, e);
	CommandCounterIncrement();
	table_close(rel, RowExclusiveLock);
}

/* ---- losses ---- */

static bool
read_loss(Relation rel, int32 shard, Snapshot snapshot, DqLoss *loss, bool delete)
{
	SysScanDesc scan = begin_scan(rel, "dq_losses_pkey", shard, snapshot);
	HeapTuple	tuple = systable_getnext(scan);
	bool		found = HeapTupleIsValid(tuple);

	if (found)
	{
		Datum		values[Natts_losses];
		bool		nulls[Natts_losses];

		const DqSource *source = dq_source_get(false);

		heap_deform_tuple(tuple, RelationGetDescr(rel), values, nulls);
		/* a row that logical replication has copied is another database's */
		found = source != NULL &&
			DatumGetInt32(values[Anum_losses_source - 1]) == source->no;
		loss->since = DatumGetTimestampTz(values[Anum_losses_since - 1]);
		loss->tasks = DatumGetInt64(values[Anum_losses_tasks - 1]);
		loss->newest = DatumGetTimestampTz(values[Anum_losses_newest - 1]);
		loss->due = DatumGetInt64(values[Anum_losses_due - 1]);
		if (delete)
			dq_store_delete(rel, tuple);
	}
	systable_endscan(scan);
	return found;
}

bool
dq_loss_get(int32 shard, Snapshot snapshot, DqLoss *loss)
{
	Relation	rel = table_open(dq_extension_relation("dq_losses"), AccessShareLock);
	bool		found = read_loss(rel, shard, snapshot, loss, false);

	table_close(rel, AccessShareLock);
	return found;
}

char *
dq_loss_text(const DqLoss *loss)
{
	char	   *until = pstrdup(timestamptz_to_str(loss->newest));

	/* whole seconds do */
	until[Min(strlen(until), 19)] = '\0';
	if (loss->tasks == 0)
		return psprintf("removals recorded until %s are missing", until);
	return psprintf("up to " INT64_FORMAT " tasks offered until %s, the last due %.19s, are missing",
					loss->tasks, until,
					timestamptz_to_str(dq_due_to_timestamp(loss->due)));
}

/* What is missing at prev, see dq_loss_check; forget: and need not be remembered. */
static bool
sum_missing(int32 shard, const DqSnapshot *prev, bool found, const DqMark *mark,
			bool forget, Snapshot snapshot, DqLoss *loss)
{
	const DqSource *source = dq_source_get(true);
	Relation	rel = table_open(dq_extension_relation("dq_emptied"), RowExclusiveLock);
	SysScanDesc scan = begin_scan(rel, "dq_emptied_pkey", shard, snapshot);
	HeapTuple	tuple;
	bool		any = false;

	memset(loss, 0, sizeof(*loss));
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		DqEmptied	e;
		int32		whose;

		emptied_from_tuple(rel, tuple, &e, &whose);
		if (whose != source->no ||
			dq_snapshot_covers(prev, dq_snapshot_in(e.complete)) ||
			is_settled(&e, mark, e.any_due))
			continue;
		/*
		 * What an older Redis still has, or the outbox brings back from before (tables
		 * need not be emptied in order), may have been replaced or removed since; with
		 * neither only what was offered is missing.
		 */
		if (!found && is_settled(&e, mark, e.due) &&
			!dq_outbox_brings_back(shard, e.last_seq, mark, snapshot))
			continue;
		any = true;
		loss->tasks += e.tasks;
		loss->newest = Max(loss->newest, e.newest);
		loss->due = Max(loss->due, e.due);
		if (forget)
			dq_store_delete(rel, tuple);
	}
	systable_endscan(scan);
	table_close(rel, RowExclusiveLock);
	return any;
}

/*
 * The fence of a shard stands at prev; found: there is one. Is something missing
 * that no outbox table holds any more? Then, with note, it is written down in place
 * of what was remembered of those tables. The mark as the relay knows it.
 */
DqLossFound
dq_loss_check(int32 shard, const DqSnapshot *prev, bool found, const DqMark *mark,
			  bool note, DqLoss *loss)
{
	Snapshot	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	DqLossFound result = DQ_LOSS_NONE;
	Relation	rel;
	Datum		values[Natts_losses];
	bool		nulls[Natts_losses] = {0};
	DqLoss		before;

	if (sum_missing(shard, prev, found, mark, false, snapshot, loss))
		result = DQ_LOSS_FOUND;
	if (result == DQ_LOSS_FOUND && note &&
		!ConditionalLockRelationOid(dq_extension_relation("dq_losses"), RowExclusiveLock))
		result = DQ_LOSS_BUSY;
	UnregisterSnapshot(snapshot);
	if (result != DQ_LOSS_FOUND || !note)
		return result;

	/* under the lock what others have accepted is seen */
	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	(void) sum_missing(shard, prev, found, mark, true, snapshot, loss);
	rel = table_open(dq_extension_relation("dq_losses"), NoLock);
	loss->since = GetCurrentTimestamp();
	if (read_loss(rel, shard, snapshot, &before, true))
	{
		loss->tasks += before.tasks;
		loss->newest = Max(loss->newest, before.newest);
		loss->due = Max(loss->due, before.due);
		CommandCounterIncrement();
	}
	values[Anum_losses_shard - 1] = Int32GetDatum(shard);
	values[Anum_losses_source - 1] = Int32GetDatum(dq_source_get(true)->no);
	values[Anum_losses_since - 1] = TimestampTzGetDatum(loss->since);
	values[Anum_losses_tasks - 1] = Int64GetDatum(loss->tasks);
	values[Anum_losses_newest - 1] = TimestampTzGetDatum(loss->newest);
	values[Anum_losses_due - 1] = Int64GetDatum(loss->due);
	dq_store_insert(rel, values, nulls);
	CacheInvalidateRelcache(rel);
	table_close(rel, NoLock);
	UnregisterSnapshot(snapshot);
	return DQ_LOSS_FOUND;
}

/* Of any shard of the queue; dq_shards_resolve has been called. */
bool
dq_queue_has_loss(const DqQueue *queue)
{
	Relation	rel = table_open(dq_extension_relation("dq_losses"), AccessShareLock);
	Snapshot	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	bool		any = false;
	DqLoss		loss;
	int			i;

	for (i = 0; !any && i < queue->nshards; i++)
		any = read_loss(rel, queue->shard_no[i], snapshot, &loss, false);
	UnregisterSnapshot(snapshot);
	table_close(rel, AccessShareLock);
	return any;
}

/*
 * dq_resume: what is missing is known, go on. The relcache message that ends with
 * the commit makes the bridge look again.
 */
void
dq_losses_accept(const DqQueue *queue)
{
	Relation	rel = table_open(dq_extension_relation("dq_losses"), ShareRowExclusiveLock);
	Snapshot	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	bool		any = false;
	DqLoss		loss;
	int			i;

	for (i = 0; i < queue->nshards; i++)
		any |= read_loss(rel, queue->shard_no[i], snapshot, &loss, true);
	UnregisterSnapshot(snapshot);
	if (any)
	{
		CacheInvalidateRelcache(rel);
		CommandCounterIncrement();
		dq_xact_touched(queue->serverid);
	}
	table_close(rel, NoLock);
}
