/*
 * marks.c
 *	  The stored marks: per shard, what is known to have reached Redis, and what of
 *	  it is known to be delivered. After Redis has lost data they are all that is
 *	  known of deliveries (PO 15a); which outbox tables may be emptied depends on
 *	  them too (PO 16). Written by the relay, with asynchronous commits: a lost mark
 *	  is an older mark, which only means more repeats.
 */
#include "postgres.h"

#include "compat.h"
#include "outbox/outbox.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "executor/tuptable.h"
#include "storage/bufmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

enum
{
	Anum_marks_shard = 1,
	Anum_marks_no,
	Anum_marks_source,
	Anum_marks_applied,
	Anum_marks_settled,
	Anum_marks_due,
	Anum_marks_producers,
	Natts_marks = Anum_marks_producers
};

#define MARK_MS			1000	/* DESIGN: at most about a second old */
#define USUAL_BLOCKS	64		/* of the table, dead versions included */

static SysScanDesc
begin_scan(Relation rel, int32 shard, Snapshot snapshot)
{
	ScanKeyData key;

	ScanKeyInit(&key, Anum_marks_shard, BTEqualStrategyNumber, F_INT4EQ,
				Int32GetDatum(shard));
	return systable_beginscan(rel, dq_extension_relation("dq_marks_pkey"), true,
							  snapshot, 1, &key);
}

bool
dq_mark_get(int32 shard, Snapshot snapshot, DqMark *mark)
{
	const DqSource *source = dq_source_get(false);
	Relation	rel = table_open(dq_extension_relation("dq_marks"), AccessShareLock);
	SysScanDesc scan = begin_scan(rel, shard, snapshot);
	HeapTuple	tuple;
	bool		found = false;

	while (!found && HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Datum		values[Natts_marks];
		bool		nulls[Natts_marks];

		heap_deform_tuple(tuple, RelationGetDescr(rel), values, nulls);
		/* another source's tells of another fence (dq_adopt of a copy) */
		if (source == NULL ||
			DatumGetInt32(values[Anum_marks_source - 1]) != source->no)
			continue;
		found = true;
		mark->no = DatumGetInt64(values[Anum_marks_no - 1]);
		mark->applied = TextDatumGetCString(values[Anum_marks_applied - 1]);
		mark->settled = TextDatumGetCString(values[Anum_marks_settled - 1]);
		mark->due = DatumGetInt64(values[Anum_marks_due - 1]);
		mark->producers = TextDatumGetCString(values[Anum_marks_producers - 1]);
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return found;
}

/*
 * The row before. The way through dead versions grows while somebody holds a
 * snapshot, so its place is remembered; VACUUM FULL may have moved it.
 */
static void
delete_old(Relation rel, int32 shard, ItemPointer at)
{
	Snapshot	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	bool		found = false;

	if (ItemPointerIsValid(at) &&
		ItemPointerGetBlockNumber(at) < RelationGetNumberOfBlocks(rel))
	{
		TupleTableSlot *slot = table_slot_create(rel, NULL);
		bool		isnull;

		found = table_tuple_fetch_row_version(rel, at, snapshot, slot) &&
			DatumGetInt32(slot_getattr(slot, Anum_marks_shard, &isnull)) == shard;
		ExecDropSingleTupleTableSlot(slot);
	}
	if (found)
		simple_heap_delete(rel, at);
	else
	{
		SysScanDesc scan = begin_scan(rel, shard, snapshot);
		HeapTuple	tuple;

		while (HeapTupleIsValid(tuple = systable_getnext(scan)))
			simple_heap_delete(rel, &tuple->t_self);
		systable_endscan(scan);
	}
	UnregisterSnapshot(snapshot);
}

void
dq_mark_store(int32 shard, const DqMark *mark, ItemPointer at)
{
	Relation	rel = table_open(dq_extension_relation("dq_marks"), RowExclusiveLock);
	Datum		values[Natts_marks];
	bool		nulls[Natts_marks] = {0};

	delete_old(rel, shard, at);
	values[Anum_marks_shard - 1] = Int32GetDatum(shard);
	values[Anum_marks_no - 1] = Int64GetDatum(mark->no);
	values[Anum_marks_source - 1] = Int32GetDatum(dq_source_get(true)->no);
	values[Anum_marks_applied - 1] = CStringGetTextDatum(mark->applied);
	values[Anum_marks_settled - 1] = CStringGetTextDatum(mark->settled);
	values[Anum_marks_due - 1] = Int64GetDatum(mark->due);
	values[Anum_marks_producers - 1] = CStringGetTextDatum(mark->producers);
	*at = dq_store_insert(rel, values, nulls);
	table_close(rel, RowExclusiveLock);
}

/*
 * Normally a second. Where dead versions cannot be removed because a snapshot is
 * held for hours, ever slower, so that the table stays small.
 */
int
dq_marks_interval(int nshards)
{
	Relation	rel = table_open(dq_extension_relation("dq_marks"), AccessShareLock);
	BlockNumber blocks = RelationGetNumberOfBlocks(rel);

	table_close(rel, AccessShareLock);
	return MARK_MS * (int) Min(Max(blocks / (USUAL_BLOCKS + nshards / 8), 1), 600);
}
