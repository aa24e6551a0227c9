/*
 * emptying.c
 *	  Is anything in an outbox table still needed (PO 16)? A table is looked through
 *	  in slices beside everybody else, between which due tasks move; what was added
 *	  since is looked up in its index under the exclusive lock, which so is short.
 *	  Called by rotate.c; one table at a time, what is known of it is kept here.
 */
#include "postgres.h"

#include "compat.h"
#include "outbox/outbox.h"
#include "outbox/outbox_private.h"

#include "access/genam.h"
#include "access/relscan.h"
#include "access/stratnum.h"
#include "access/table.h"
#include "access/tableam.h"
#include "executor/tuptable.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "utils/fmgroids.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"
#include "utils/xid8.h"

#define SLICE_MS	20
#define MANY_XIDS	10000		/* that are looked up in other tables */
#define MANY_ROWS	20000		/* beyond a number, after which none before it come */

/* columns of an outbox table that are read here */
#define ANUM_XID	1
#define ANUM_SEQ	2
#define ANUM_DUE	3
#define ANUM_AT		5
#define ANUM_SHARD	6
#define ANUM_TLI	7
#define ANUM_SOURCE	8
#define ANUM_PLACE	9
#define ANUM_OP		11
#define ANUM_KEY	12

static struct
{
	Oid			relid;			/* InvalidOid: nothing is looked at */
	MemoryContext context;		/* of what follows */
	DqSnapshot *begun;			/* as the look began */
	BlockNumber next;			/* not yet looked at */
	List	   *shards;			/* of ShardRows */
}			looking;

/* Of one shard, while a table is looked through. */
typedef struct ShardRows
{
	DqEmptied	sum;
	DqSnapshot *applied;		/* by its mark */
	/* transactions that took tasks away here and may have rows in other tables */
	FullTransactionId elsewhere;	/* first one that has some there */
	FullTransactionId *xids;
	int			nxids;
	int			maxxids;
} ShardRows;

static void
forget(void)
{
	if (looking.context)
		MemoryContextDelete(looking.context);
	memset(&looking, 0, sizeof(looking));
}

static void
begin(Oid relid, Snapshot snapshot)
{
	MemoryContext old;

	forget();
	looking.context = AllocSetContextCreate(TopMemoryContext, "dq_bridge emptying",
											ALLOCSET_DEFAULT_SIZES);
	old = MemoryContextSwitchTo(looking.context);
	looking.begun = dq_snapshot_take(snapshot);
	MemoryContextSwitchTo(old);
	looking.relid = relid;
}

/*
 * Shards whose server and table are gone: what was committed for them can go
 * nowhere. (A table alone is enough: after pg_upgrade servers have new OIDs.)
 */
static List *
lost_shards(void)
{
	List	   *lost = NIL;
	ListCell   *lc;

	foreach(lc, dq_shards_list(InvalidOid))
	{
		DqShardRow *row = lfirst(lc);

		if (!SearchSysCacheExists1(FOREIGNSERVEROID, ObjectIdGetDatum(row->serverid)) &&
			!SearchSysCacheExists1(RELOID, ObjectIdGetDatum(row->relid)))
			lost = lappend_int(lost, row->no);
	}
	return lost;
}

/* The first transaction with rows of the shard in other tables than the one looked at. */
static FullTransactionId
first_elsewhere(int32 shard, Snapshot snapshot)
{
	FullTransactionId first = FullTransactionIdFromU64(PG_UINT64_MAX);
	int			i;

	for (i = 0; i < DQ_NUM_OUTBOX; i++)
	{
		FullTransactionId xid;

		if (dq_outbox_relation(i) != looking.relid &&
			dq_outbox_first(i, shard, snapshot, &xid) &&
			FullTransactionIdPrecedes(xid, first))
			first = xid;
	}
	return first;
}

static ShardRows *
rows_of_shard(int32 shard, Snapshot snapshot)
{
	MemoryContext old;
	ShardRows  *rows;
	DqMark		mark;
	ListCell   *lc;

	foreach(lc, looking.shards)
	{
		rows = lfirst(lc);
		if (rows->sum.shard == shard)
			return rows;
	}
	old = MemoryContextSwitchTo(looking.context);
	rows = palloc0(sizeof(ShardRows));
	rows->sum.shard = shard;
	rows->sum.complete = dq_mark_get(shard, snapshot, &mark) ? mark.applied : "";
	rows->applied = dq_snapshot_in(rows->sum.complete);
	rows->elsewhere = first_elsewhere(shard, snapshot);
	looking.shards = lcons(rows, looking.shards);
	MemoryContextSwitchTo(old);
	return rows;
}

static void
note_xid(ShardRows *rows, FullTransactionId xid)
{
	if (FullTransactionIdPrecedes(xid, rows->elsewhere) || rows->nxids > MANY_XIDS ||
		(rows->nxids > 0 && FullTransactionIdEquals(rows->xids[rows->nxids - 1], xid)))
		return;
	if (rows->nxids == rows->maxxids)
	{
		int			more = Max(2 * rows->maxxids, 64);

		rows->xids = rows->xids ? repalloc(rows->xids, more * sizeof(FullTransactionId))
			: MemoryContextAlloc(looking.context, more * sizeof(FullTransactionId));
		rows->maxxids = more;
	}
	rows->xids[rows->nxids++] = xid;
}

/* What would be missing with it. */
static void
add_row(ShardRows *rows, const DqRow *row, bool keyed)
{
	DqEmptied  *sum = &rows->sum;

	sum->newest = Max(sum->newest, row->at);
	if (dq_row_offers(row) || row->op == DQ_OP_RESCHEDULE_ELEMENT ||
		row->op == DQ_OP_MOVE_NAMED)
	{
		sum->tasks += row->op != DQ_OP_MOVE_NAMED;	/* its element counts */
		sum->due = Max(sum->due, row->due);
	}
	if (row->op == DQ_OP_CONSUME || row->op == DQ_OP_DISCARD)
		return;
	if (keyed || !dq_row_offers(row))
	{
		sum->last_seq = Max(sum->last_seq, row->seq);
		note_xid(rows, row->xid);
	}
	/* which tasks went by it otherwise, and when they were due, a row does not say */
	if (keyed || !(dq_row_offers(row) || row->op == DQ_OP_REMOVE ||
				   row->op == DQ_OP_REMOVE_NAMED || row->op == DQ_OP_RESOLUTION))
		sum->any_due = PG_INT64_MAX;
	else
		sum->any_due = Max(sum->any_due, row->due);
}

static void
row_from_slot(TupleTableSlot *slot, DqRow *row, bool *keyed)
{
	bool		isnull;

	row->xid = DatumGetFullTransactionId(slot_getattr(slot, ANUM_XID, &isnull));
	row->seq = DatumGetInt64(slot_getattr(slot, ANUM_SEQ, &isnull));
	row->due = DatumGetInt64(slot_getattr(slot, ANUM_DUE, &isnull));
	row->at = DatumGetTimestampTz(slot_getattr(slot, ANUM_AT, &isnull));
	/* a resolution, of shard -n, is needed as long as its element */
	row->shard = abs(DatumGetInt32(slot_getattr(slot, ANUM_SHARD, &isnull)));
	row->tli = (uint32) DatumGetInt32(slot_getattr(slot, ANUM_TLI, &isnull));
	row->source = DatumGetInt32(slot_getattr(slot, ANUM_SOURCE, &isnull));
	row->place = DatumGetInt32(slot_getattr(slot, ANUM_PLACE, &isnull));
	row->op = DatumGetChar(slot_getattr(slot, ANUM_OP, &isnull));
	(void) slot_getattr(slot, ANUM_KEY, &isnull);
	*keyed = !isnull;
}

/*
 * Is every row in Redis by the stored marks? Rows of another source (a copy has its
 * original's) are nobody's here. One slice; a page is looked at whole.
 */
DqNeed
dq_emptying_look(Relation rel)
{
	Snapshot	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	TimestampTz deadline = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), SLICE_MS);
	BlockNumber nblocks = RelationGetNumberOfBlocks(rel);
	DqNeed		need = DQ_NEED_NOTHING;
	List	   *lost;
	TableScanDesc scan;
	TupleTableSlot *slot;
	ItemPointerData from,
				to;

	if (looking.relid != RelationGetRelid(rel))
		begin(RelationGetRelid(rel), snapshot);
	if (looking.next >= nblocks)
	{
		UnregisterSnapshot(snapshot);
		return DQ_NEED_NOTHING;
	}

	lost = lost_shards();
	slot = table_slot_create(rel, NULL);
	ItemPointerSet(&from, looking.next, FirstOffsetNumber);
	ItemPointerSet(&to, nblocks - 1, MaxOffsetNumber);
	scan = table_beginscan_tidrange(rel, snapshot, &from, &to);
	while (table_scan_getnextslot_tidrange(scan, ForwardScanDirection, slot))
	{
		DqRow		row;
		ShardRows  *rows;
		bool		keyed;

		CHECK_FOR_INTERRUPTS();
		if (ItemPointerGetBlockNumber(&slot->tts_tid) > looking.next)
		{
			looking.next = ItemPointerGetBlockNumber(&slot->tts_tid);
			if (GetCurrentTimestamp() >= deadline)
			{
				need = DQ_NEED_UNKNOWN;
				break;
			}
		}
		row_from_slot(slot, &row, &keyed);
		if (!dq_row_is_ours(&row) || list_member_int(lost, row.shard))
			continue;
		rows = rows_of_shard(row.shard, snapshot);
		if (!dq_snapshot_sees(rows->applied, row.tli, row.xid))
		{
			need = DQ_NEED_ROWS;
			break;
		}
		add_row(rows, &row, keyed);
	}
	ExecDropSingleTupleTableSlot(slot);
	table_endscan(scan);
	UnregisterSnapshot(snapshot);
	if (need == DQ_NEED_NOTHING)
		looking.next = nblocks;
	else if (need == DQ_NEED_ROWS)
		forget();
	return need;
}

/* Rows of ours of a shard with from <= xid < to? */
static bool
has_rows(Relation rel, Oid index, int32 shard, FullTransactionId from,
		 FullTransactionId to, Snapshot snapshot)
{
	ScanKeyData key[3];
	SysScanDesc scan;
	HeapTuple	tuple;
	bool		found = false;

	ScanKeyInit(&key[0], ANUM_SHARD, BTEqualStrategyNumber, F_INT4EQ, Int32GetDatum(shard));
	ScanKeyInit(&key[1], ANUM_XID, BTGreaterEqualStrategyNumber, F_XID8GE,
				FullTransactionIdGetDatum(from));
	ScanKeyInit(&key[2], ANUM_XID, BTLessStrategyNumber, F_XID8LT,
				FullTransactionIdGetDatum(to));
	scan = systable_beginscan(rel, index, true, snapshot, 3, key);
	while (!found && HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		TupleDesc	desc = RelationGetDescr(rel);
		DqRow		row;
		bool		isnull;

		row.source = DatumGetInt32(heap_getattr(tuple, ANUM_SOURCE, desc, &isnull));
		row.place = DatumGetInt32(heap_getattr(tuple, ANUM_PLACE, desc, &isnull));
		found = dq_row_is_ours(&row);
	}
	systable_endscan(scan);
	return found;
}

/* Has a loss been found since, so that what had been applied is needed again? */
static bool
marks_stand(Snapshot snapshot)
{
	ListCell   *lc;

	foreach(lc, looking.shards)
	{
		ShardRows  *rows = lfirst(lc);
		DqMark		mark;

		if (!dq_mark_get(rows->sum.shard, snapshot, &mark) ||
			!dq_snapshot_covers(dq_snapshot_in(mark.applied), rows->applied))
			return false;
	}
	return true;
}

/*
 * Under the exclusive lock nobody can add a row: has a transaction done so that had
 * not ended when the look began? (A resolution alone is no more needed than its
 * element, which stands in this table or in an older one.)
 */
bool
dq_emptying_confirm(Relation rel)
{
	Snapshot	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	FullTransactionId end = FullTransactionIdFromU64(PG_UINT64_MAX);
	const DqSnapshot *begun = looking.begun;
	List	   *indexes = RelationGetIndexList(rel);
	Oid			index = linitial_oid(indexes);
	bool		added = !marks_stand(snapshot);
	ListCell   *lc;

	foreach(lc, dq_shards_list(InvalidOid))
	{
		int32		shard = ((DqShardRow *) lfirst(lc))->no;
		int			i;

		if (added)
			break;

		CHECK_FOR_INTERRUPTS();
		added = has_rows(rel, index, shard, begun->xmax, end, snapshot);
		for (i = 0; i < begun->nxip && !added; i++)
		{
			FullTransactionId next = begun->xip[i];

			FullTransactionIdAdvance(&next);
			added = has_rows(rel, index, shard, begun->xip[i], next, snapshot);
		}
	}
	UnregisterSnapshot(snapshot);
	if (added)
		forget();
	return !added;
}

/*
 * A batch is in order of the last number of each transaction: where those stand that
 * took tasks away here, and have gone on in another table.
 */
static void
find_last(ShardRows *rows)
{
	Snapshot	snapshot;
	DqOutboxScan *scan = NULL;
	int			i;

	if (rows->nxids == 0)
		return;
	if (rows->nxids > MANY_XIDS)
	{
		rows->sum.last_seq = PG_INT64_MAX;
		return;
	}
	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	for (i = 0; i < rows->nxids; i++)
	{
		FullTransactionId next = rows->xids[i];
		DqRow		row;

		FullTransactionIdAdvance(&next);
		if (scan == NULL)
			scan = dq_outbox_scan_begin(rows->sum.shard, rows->xids[i], next, snapshot);
		else
			dq_outbox_scan_seek(scan, rows->sum.shard, rows->xids[i], next, 0);
		while (dq_outbox_scan_next(scan, &row, false))
			rows->sum.last_seq = Max(rows->sum.last_seq, row.seq);
	}
	dq_outbox_scan_end(scan);
	UnregisterSnapshot(snapshot);
}

/* The table is about to be emptied, in this round. */
void
dq_emptying_done(int64 round)
{
	ListCell   *lc;

	foreach(lc, looking.shards)
	{
		ShardRows  *rows = lfirst(lc);

		find_last(rows);
		rows->sum.round = round;
		dq_emptied_note(&rows->sum);
	}
	forget();
}

/*
 * Would the outbox bring back a task of the shard that was offered before this number
 * and that the mark does not call delivered? What was removed or replaced by rows
 * that have gone since is among these. Tables are in order of numbers but for those
 * in flight, so far beyond the number the look ends.
 */
bool
dq_outbox_brings_back(int32 shard, int64 before, const DqMark *mark, Snapshot snapshot)
{
	DqSnapshot *settled = dq_snapshot_in(mark->settled);
	bool		found = false;
	int			i;

	for (i = 0; i < DQ_NUM_OUTBOX && !found; i++)
	{
		Relation	rel = table_open(dq_outbox_relation(i), AccessShareLock);
		TableScanDesc scan = table_beginscan(rel, snapshot, 0, NULL);
		TupleTableSlot *slot = table_slot_create(rel, NULL);
		int			beyond = 0;

		while (!found && beyond < MANY_ROWS &&
			   table_scan_getnextslot(scan, ForwardScanDirection, slot))
		{
			DqRow		row;
			bool		keyed;

			CHECK_FOR_INTERRUPTS();
			row_from_slot(slot, &row, &keyed);
			if (row.seq >= before)
			{
				beyond++;
				continue;
			}
			beyond = 0;
			found = row.shard == shard && dq_row_offers(&row) && dq_row_is_ours(&row) &&
				!(row.due <= mark->due && dq_snapshot_sees(settled, row.tli, row.xid));
		}
		ExecDropSingleTupleTableSlot(slot);
		table_endscan(scan);
		table_close(rel, AccessShareLock);
	}
	return found;
}
