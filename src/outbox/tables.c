/*
 * tables.c
 *	  Writing and reading the outbox by table access methods (PgQ's idea: append,
 *	  read by snapshot, empty as a whole). Rows are never updated or deleted, so a
 *	  snapshot held open for hours costs nothing.
 */
#include "postgres.h"

#include "compat.h"
#include "outbox/outbox.h"
#include "outbox/outbox_private.h"
#include "shared/shared.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/relscan.h"
#include "access/stratnum.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/index.h"
#include "commands/sequence.h"
#include "executor/tuptable.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/xid8.h"

enum
{
	Anum_outbox_xid = 1,
	Anum_outbox_seq,
	Anum_outbox_due,
	Anum_outbox_id,
	Anum_outbox_at,
	Anum_outbox_shard,
	Anum_outbox_tli,
	Anum_outbox_source,
	Anum_outbox_place,
	Anum_outbox_server,
	Anum_outbox_op,
	Anum_outbox_key,
	Anum_outbox_payload,
	Anum_outbox_member,
	Anum_outbox_token,
	Natts_outbox = Anum_outbox_token
};

int64
dq_outbox_next(uint64 *id)
{
	const DqSource *source = dq_source_get(true);
	int64		seq = nextval_internal(dq_extension_relation("dq_outbox_seq"), false);

	if (seq >> DQ_ID_SEQ_BITS != 0)
		ereport(ERROR,
				(errcode(ERRCODE_SEQUENCE_GENERATOR_LIMIT_EXCEEDED),
				 errmsg("sequence \"dq_outbox_seq\" has left its range of 40 bits")));
	*id = ((uint64) source->node << 48) |
		((uint64) (dq_timeline() & 0xff) << DQ_ID_SEQ_BITS) | (uint64) seq;
	return seq;
}

static Oid
outbox_index(Relation rel)
{
	List	   *indexes = RelationGetIndexList(rel);
	Oid			index;

	if (list_length(indexes) != 1)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("outbox table \"%s\" must have exactly its one index",
						RelationGetRelationName(rel)),
				 errhint("Drop what was added to the tables of extension dq_bridge.")));
	index = linitial_oid(indexes);
	list_free(indexes);
	return index;
}

/* The index's description does not change; building it costs more than inserting. */
static IndexInfo *
outbox_index_info(Relation index)
{
	static struct
	{
		Oid			relid;
		IndexInfo  *info;
	}			cache[DQ_NUM_OUTBOX];
	static int	next = 0;
	MemoryContext old;
	int			i;

	for (i = 0; i < DQ_NUM_OUTBOX; i++)
		if (cache[i].relid == RelationGetRelid(index))
			return cache[i].info;
	old = MemoryContextSwitchTo(TopMemoryContext);
	i = next++ % DQ_NUM_OUTBOX;
	if (cache[i].info)
		pfree(cache[i].info);
	cache[i].relid = InvalidOid;
	cache[i].info = BuildIndexInfo(index);
	cache[i].relid = RelationGetRelid(index);
	MemoryContextSwitchTo(old);
	return cache[i].info;
}

void
dq_outbox_insert_row(DqRow *row, Oid serverid)
{
	Relation	rel,
				index;
	Datum		values[Natts_outbox];
	bool		nulls[Natts_outbox] = {0};
	Datum		ivalues[3];
	bool		inulls[3] = {0};
	HeapTuple	tuple;

	row->source = dq_source_get(true)->no;
	row->place = dq_place_hash();

	values[Anum_outbox_xid - 1] = FullTransactionIdGetDatum(row->xid);
	values[Anum_outbox_seq - 1] = Int64GetDatum(row->seq);
	values[Anum_outbox_due - 1] = Int64GetDatum(row->due);
	values[Anum_outbox_id - 1] = Int64GetDatum((int64) row->id);
	row->at = GetCurrentStatementStartTimestamp();
	values[Anum_outbox_at - 1] = TimestampTzGetDatum(row->at);
	values[Anum_outbox_shard - 1] = Int32GetDatum(row->shard);
	values[Anum_outbox_tli - 1] = Int32GetDatum((int32) row->tli);
	values[Anum_outbox_source - 1] = Int32GetDatum(row->source);
	values[Anum_outbox_place - 1] = Int32GetDatum(row->place);
	values[Anum_outbox_server - 1] = ObjectIdGetDatum(serverid);
	values[Anum_outbox_op - 1] = CharGetDatum(row->op);
#define PUT_BYTES(att, field) \
	(values[(att) - 1] = PointerGetDatum(row->field), nulls[(att) - 1] = row->field == NULL)
	PUT_BYTES(Anum_outbox_key, key);
	PUT_BYTES(Anum_outbox_payload, payload);
	PUT_BYTES(Anum_outbox_member, member);
	PUT_BYTES(Anum_outbox_token, token);

	/*
	 * Which table takes new rows is only advice here: the relay reads all of
	 * them, and one is emptied only when nothing in it is needed.
	 */
	rel = table_open(dq_outbox_relation(dq_outbox_current()), RowExclusiveLock);
	tuple = heap_form_tuple(RelationGetDescr(rel), values, nulls);
	heap_insert(rel, tuple, GetCurrentCommandId(true), HEAP_INSERT_NO_LOGICAL, NULL);
	index = index_open(outbox_index(rel), RowExclusiveLock);
	ivalues[0] = values[Anum_outbox_shard - 1];
	ivalues[1] = values[Anum_outbox_xid - 1];
	ivalues[2] = values[Anum_outbox_seq - 1];
	index_insert(index, ivalues, inulls, &tuple->t_self, rel, UNIQUE_CHECK_NO, false,
				 outbox_index_info(index));
	index_close(index, NoLock);
	table_close(rel, NoLock);
	heap_freetuple(tuple);
}

void
dq_outbox_insert(DqRow *row, Oid serverid)
{
	row->xid = GetTopFullTransactionId();
	row->tli = dq_timeline();
	dq_outbox_insert_row(row, serverid);
	dq_xact_touched(serverid);
	dq_own_added(row);
}

/* ---- reading ---- */

typedef struct TableScan
{
	Relation	rel;
	Relation	index;
	IndexScanDesc scan;
	TupleTableSlot *slot;
	TupleTableSlot *fetched;	/* of dq_outbox_fetch */
	Snapshot	snapshot;
	bool		has;			/* slot holds a row not yet returned */
	uint64		xid;
	int64		seq;
} TableScan;

struct DqOutboxScan
{
	TableScan	table[DQ_NUM_OUTBOX];
	DqSnapshot *limit;			/* of an unmarked snapshot: what it was taken from */
};

/*
 * What an unmarked snapshot shows is committed, or our own. Does the MVCC snapshot
 * that it was made of show it, too? Rows are never updated, so this is all it takes:
 * the transaction had ended, or an earlier command of ours has written the row.
 */
static bool
is_within(const DqSnapshot *limit, Snapshot snapshot, TupleTableSlot *slot)
{
	FullTransactionId xid;
	uint32		tli;
	bool		isnull;

	if (limit == NULL)
		return true;
	xid = DatumGetFullTransactionId(slot_getattr(slot, Anum_outbox_xid, &isnull));
	tli = (uint32) DatumGetInt32(slot_getattr(slot, Anum_outbox_tli, &isnull));
	if (dq_snapshot_sees(limit, tli, xid))
		return true;
	return FullTransactionIdEquals(xid, GetTopFullTransactionIdIfAny()) &&
		DatumGetCommandId(slot_getsysattr(slot, MinCommandIdAttributeNumber, &isnull)) <
		snapshot->curcid;
}

/*
 * btree keeps what it learns on the way (killed items) in the context that is
 * current then; callers read rows in contexts they reset, the scan lives on.
 */
static void
advance(DqOutboxScan *scan, TableScan *t)
{
	MemoryContext old = MemoryContextSwitchTo(GetMemoryChunkContext(t->slot));
	bool		isnull;

	do
	{
		CHECK_FOR_INTERRUPTS();
		t->has = index_getnext_slot(t->scan, ForwardScanDirection, t->slot);
	} while (t->has && !is_within(scan->limit, t->snapshot, t->slot));
	MemoryContextSwitchTo(old);
	if (t->has)
	{
		t->xid = U64FromFullTransactionId(DatumGetFullTransactionId(
											slot_getattr(t->slot, Anum_outbox_xid, &isnull)));
		t->seq = DatumGetInt64(slot_getattr(t->slot, Anum_outbox_seq, &isnull));
	}
}

static void
seek_table(DqOutboxScan *scan, TableScan *t, int32 shard, FullTransactionId from, FullTransactionId to,
		   int64 after_seq)
{
	ScanKeyData key[3];
	MemoryContext old;

	ScanKeyInit(&key[0], 1, BTEqualStrategyNumber, F_INT4EQ, Int32GetDatum(shard));
	if (after_seq > 0)
	{
		ScanKeyInit(&key[1], 2, BTEqualStrategyNumber, F_XID8EQ,
					FullTransactionIdGetDatum(from));
		ScanKeyInit(&key[2], 3, BTGreaterStrategyNumber, F_INT8GT,
					Int64GetDatum(after_seq));
	}
	else
	{
		ScanKeyInit(&key[1], 2, BTGreaterEqualStrategyNumber, F_XID8GE,
					FullTransactionIdGetDatum(from));
		ScanKeyInit(&key[2], 2, BTLessStrategyNumber, F_XID8LT,
					FullTransactionIdGetDatum(to));
	}
	old = MemoryContextSwitchTo(GetMemoryChunkContext(t->slot));
	index_rescan(t->scan, key, 3, NULL, 0);
	MemoryContextSwitchTo(old);
	advance(scan, t);
}

DqOutboxScan *
dq_outbox_scan_begin(int32 shard, FullTransactionId from, FullTransactionId to,
					 Snapshot snapshot)
{
	DqOutboxScan *scan = palloc0(sizeof(DqOutboxScan));
	int			i;

	if (snapshot->snapshot_type == SNAPSHOT_SELF && TransactionIdIsValid(snapshot->xmax))
		scan->limit = dq_snapshot_take(snapshot);
	for (i = 0; i < DQ_NUM_OUTBOX; i++)
	{
		TableScan  *t = &scan->table[i];

		t->rel = table_open(dq_outbox_relation(i), AccessShareLock);
		t->index = index_open(outbox_index(t->rel), AccessShareLock);
		t->slot = table_slot_create(t->rel, NULL);
		t->fetched = table_slot_create(t->rel, NULL);
		t->scan = dq_index_beginscan(t->rel, t->index, snapshot, 3);
		t->snapshot = snapshot;
		seek_table(scan, t, shard, from, to, 0);
	}
	return scan;
}

void
dq_outbox_scan_seek(DqOutboxScan *scan, int32 shard, FullTransactionId from,
					FullTransactionId to, int64 after_seq)
{
	int			i;

	for (i = 0; i < DQ_NUM_OUTBOX; i++)
		seek_table(scan, &scan->table[i], shard, from, to, after_seq);
}

static bytea *
slot_bytes(TupleTableSlot *slot, AttrNumber att)
{
	bool		isnull;
	Datum		value = slot_getattr(slot, att, &isnull);

	return isnull ? NULL : DatumGetByteaPCopy(value);
}

static void
row_from_slot(TupleTableSlot *slot, DqRow *row, bool values)
{
	bool		isnull;

	slot_getallattrs(slot);
	row->xid = DatumGetFullTransactionId(slot_getattr(slot, Anum_outbox_xid, &isnull));
	row->seq = DatumGetInt64(slot_getattr(slot, Anum_outbox_seq, &isnull));
	row->tid = slot->tts_tid;
	row->due = DatumGetInt64(slot_getattr(slot, Anum_outbox_due, &isnull));
	row->id = (uint64) DatumGetInt64(slot_getattr(slot, Anum_outbox_id, &isnull));
	row->at = DatumGetTimestampTz(slot_getattr(slot, Anum_outbox_at, &isnull));
	row->shard = DatumGetInt32(slot_getattr(slot, Anum_outbox_shard, &isnull));
	row->tli = (uint32) DatumGetInt32(slot_getattr(slot, Anum_outbox_tli, &isnull));
	row->source = DatumGetInt32(slot_getattr(slot, Anum_outbox_source, &isnull));
	row->place = DatumGetInt32(slot_getattr(slot, Anum_outbox_place, &isnull));
	row->op = DatumGetChar(slot_getattr(slot, Anum_outbox_op, &isnull));
	row->key = row->payload = row->member = row->token = NULL;
	row->has_token = !slot_attisnull(slot, Anum_outbox_token);
	if (values)
	{
		row->key = slot_bytes(slot, Anum_outbox_key);
		row->payload = slot_bytes(slot, Anum_outbox_payload);
		row->member = slot_bytes(slot, Anum_outbox_member);
		row->token = slot_bytes(slot, Anum_outbox_token);
	}
}

bool
dq_outbox_scan_next(DqOutboxScan *scan, DqRow *row, bool values)
{
	TableScan  *best = NULL;
	int			i;

	for (i = 0; i < DQ_NUM_OUTBOX; i++)
	{
		TableScan  *t = &scan->table[i];

		if (t->has && (best == NULL || t->xid < best->xid ||
					   (t->xid == best->xid && t->seq < best->seq)))
			best = t;
	}
	if (best == NULL)
		return false;

	row_from_slot(best->slot, row, values);
	row->table = best - scan->table;
	advance(scan, best);
	return true;
}

bool
dq_outbox_fetch(DqOutboxScan *scan, int table, ItemPointer tid, DqRow *row)
{
	TableScan  *t = &scan->table[table];
	TupleTableSlot *slot = t->fetched;

	if (!table_tuple_fetch_row_version(t->rel, tid, t->snapshot, slot) ||
		!is_within(scan->limit, t->snapshot, slot))
		return false;
	row_from_slot(slot, row, true);
	row->table = table;
	ExecClearTuple(slot);
	return true;
}

void
dq_outbox_scan_end(DqOutboxScan *scan)
{
	int			i;

	for (i = 0; i < DQ_NUM_OUTBOX; i++)
	{
		TableScan  *t = &scan->table[i];

		index_endscan(t->scan);
		ExecDropSingleTupleTableSlot(t->slot);
		ExecDropSingleTupleTableSlot(t->fetched);
		index_close(t->index, AccessShareLock);
		table_close(t->rel, AccessShareLock);
	}
	if (scan->limit)
	{
		pfree(scan->limit->xip);
		pfree(scan->limit);
	}
	pfree(scan);
}

/* ---- what is done ---- */

bool
dq_row_is_done(const DqRow *row, const DqSnapshot *prev, const DqSnapshot *old)
{
	/* PO 2: the older timeline's last snapshot counts as well while it is kept */
	return dq_snapshot_sees(prev, row->tli, row->xid) ||
		dq_snapshot_sees(old, row->tli, row->xid);
}

bool
dq_row_is_ours(const DqRow *row)
{
	const DqSource *source = dq_source_get(false);

	if (source == NULL)
		return false;
	return row->source == source->no ||
		(source->adopted_from != 0 && row->source == source->adopted_from &&
		 row->place == dq_place_hash());
}

static bool
is_running(const DqCandidates *c, FullTransactionId xid)
{
	int			i;

	for (i = 0; i < c->nrunning; i++)
		if (FullTransactionIdEquals(c->running[i], xid))
			return true;
	return false;
}

/* The next range between transactions that run; false: that was the last. */
static bool
next_range(DqCandidates *c)
{
	FullTransactionId from;

	if (c->gap >= c->nrunning)
		return false;
	from = c->running[c->gap++];
	FullTransactionIdAdvance(&from);
	dq_outbox_scan_seek(c->scan, c->shard, from,
						c->gap < c->nrunning ? c->running[c->gap] : c->to, 0);
	return true;
}

/*
 * The transactions beyond prev, then those that prev calls running, one by one: a
 * transaction that stays open for hours costs one look-up a round, not a scan of
 * what others wrote meanwhile. After a timeline change numbers may have been
 * given out again, so everything is looked at once.
 */
void
dq_candidates_begin(DqCandidates *c, int32 shard, const DqSnapshot *prev,
					const DqSnapshot *old, const DqSnapshot *upto, Snapshot snapshot,
					bool own)
{
	FullTransactionId from = prev->xmax;
	FullTransactionId mine = GetTopFullTransactionIdIfAny();
	DqSnapshot *now = dq_snapshot_take(snapshot);	/* names the own one as well */
	int			i;

	memset(c, 0, sizeof(*c));
	c->shard = shard;
	c->prev = prev;
	c->old = old;
	c->upto = upto;
	c->to = upto ? upto->xmax : FullTransactionIdFromU64(PG_UINT64_MAX);
	if (prev->tli < dq_timeline())
	{
		from = FullTransactionIdFromU64(0);
		c->xip = prev->nxip;	/* within the range */
	}
	c->running = palloc((now->nxip + 1) * sizeof(FullTransactionId));
	for (i = 0; i < now->nxip; i++)
		if (!own || !FullTransactionIdEquals(now->xip[i], mine))
			c->running[c->nrunning++] = now->xip[i];
	/* beyond its own xmax the snapshot names nobody, and sees nobody but us */
	if (!own && FullTransactionIdIsValid(mine) && !is_running(c, mine))
		c->running[c->nrunning++] = mine;
	while (c->gap < c->nrunning && FullTransactionIdPrecedes(c->running[c->gap], from))
		c->gap++;
	c->scan = dq_outbox_scan_begin(shard, from,
								   c->gap < c->nrunning ? c->running[c->gap] : c->to,
								   snapshot);
}

bool
dq_candidates_next(DqCandidates *c, DqRow *row, bool values)
{
	for (;;)
	{
		while (dq_outbox_scan_next(c->scan, row, values))
		{
			if (dq_row_is_ours(row) && !dq_row_is_done(row, c->prev, c->old) &&
				(c->upto == NULL || dq_snapshot_sees(c->upto, row->tli, row->xid)))
				return true;
		}
		if (next_range(c))
			continue;
		/* next transaction that was running, and has ended */
		for (;;)
		{
			FullTransactionId xid,
						next;

			if (c->xip >= c->prev->nxip)
				return false;
			xid = c->prev->xip[c->xip++];
			if (is_running(c, xid) ||
				(c->upto && !dq_snapshot_sees(c->upto, c->upto->tli, xid)))
				continue;
			next = xid;
			FullTransactionIdAdvance(&next);
			dq_outbox_scan_seek(c->scan, c->shard, xid, next, 0);
			break;
		}
	}
}

void
dq_candidates_end(DqCandidates *c)
{
	dq_outbox_scan_end(c->scan);
}

bool
dq_outbox_is_covered(int32 shard, const DqSnapshot *prev, const DqSnapshot *old,
					 Snapshot snapshot)
{
	DqCandidates c;
	DqRow		row;
	bool		covered;

	if (prev->damaged || (old && old->damaged))
		return false;
	dq_candidates_begin(&c, shard, prev, old, NULL, snapshot, false);
	covered = !dq_candidates_next(&c, &row, false);
	dq_candidates_end(&c);
	return covered;
}

void
dq_outbox_backlog(int32 shard, int64 *rows, TimestampTz *oldest)
{
	DqShardStats stats;
	Snapshot	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	FullTransactionId from = FullTransactionIdFromU64(0);
	DqOutboxScan *scan;
	DqMark		mark;
	DqRow		row;

	*rows = 0;
	*oldest = 0;
	if (dq_mark_get(shard, snapshot, &mark))
		from = dq_snapshot_in(mark.applied)->xmax;
	if (dq_stats_get(MyDatabaseId, shard, &stats) &&
		stats.relayed_xmin > U64FromFullTransactionId(from))
		from = FullTransactionIdFromU64(stats.relayed_xmin);
	scan = dq_outbox_scan_begin(shard, from, FullTransactionIdFromU64(PG_UINT64_MAX),
								snapshot);
	while (*rows < 1000000 && dq_outbox_scan_next(scan, &row, false))
	{
		if (!dq_row_is_ours(&row))
			continue;
		if (*rows == 0 || row.at < *oldest)
			*oldest = row.at;
		(*rows)++;
		CHECK_FOR_INTERRUPTS();
	}
	dq_outbox_scan_end(scan);
	UnregisterSnapshot(snapshot);
}

int
dq_outbox_has_written(int32 shard, FullTransactionId xid, int64 seq, TimestampTz at)
{
	Snapshot	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	FullTransactionId next = xid;
	DqOutboxScan *scan;
	DqRow		row;
	int			result = 0;

	FullTransactionIdAdvance(&next);
	scan = dq_outbox_scan_begin(shard, next, next, snapshot);
	dq_outbox_scan_seek(scan, shard, xid, next, seq - 1);
	if (dq_outbox_scan_next(scan, &row, false) && row.seq == seq && row.at == at &&
		dq_row_is_ours(&row))
		result = 1;
	dq_outbox_scan_end(scan);
	if (result == 0 && dq_outbox_emptied_since(at, snapshot))
		result = -1;
	UnregisterSnapshot(snapshot);
	return result;
}

bool
dq_outbox_first(int table, int32 shard, Snapshot snapshot, FullTransactionId *xid)
{
	DqOutboxScan *scan = dq_outbox_scan_begin(shard, FullTransactionIdFromU64(0),
											  FullTransactionIdFromU64(PG_UINT64_MAX),
											  snapshot);
	bool		has = scan->table[table].has;

	if (has)
		*xid = FullTransactionIdFromU64(scan->table[table].xid);
	dq_outbox_scan_end(scan);
	return has;
}
