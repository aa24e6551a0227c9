/*
 * rotate.c
 *	  Which outbox table takes new rows, the marks of what has reached Redis, and
 *	  the emptying of old tables as a whole (PO 16). Emptying gives the table new
 *	  storage under a conditional exclusive lock: nobody waits for it, no logical
 *	  TRUNCATE is written.
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
#include "catalog/index.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "storage/bufmgr.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"
#include "utils/xid8.h"

enum
{
	Anum_rotation_round = 1,
	Anum_rotation_since,
	Anum_rotation_tbl,
	Anum_rotation_emptied,
	Anum_rotation_complete,
	Anum_rotation_last_due,
	Natts_rotation = Anum_rotation_last_due
};

enum
{
	Anum_marks_shard = 1,
	Anum_marks_applied,
	Anum_marks_due,
	Anum_marks_mark,
	Natts_marks = Anum_marks_mark
};

/* columns of an outbox table that the check reads */
#define ANUM_XID	1
#define ANUM_DUE	3
#define ANUM_SHARD	6
#define ANUM_TLI	7
#define ANUM_SOURCE	8
#define ANUM_PLACE	9

typedef struct Rotation
{
	int64		round;			/* 0: never rotated */
	TimestampTz since;
	int			current;
	TimestampTz left[DQ_NUM_OUTBOX];	/* when a table stopped taking rows, 0: never did */
} Rotation;

static Rotation cached;
static bool cached_valid = false;
static Oid	cached_relid = InvalidOid;

static void
rotation_inval(Datum arg, Oid relid)
{
	if (relid == InvalidOid || relid == cached_relid)
		cached_valid = false;
}

Oid
dq_outbox_relation(int table)
{
	static const char *const names[DQ_NUM_OUTBOX] = {
		"dq_outbox_0", "dq_outbox_1", "dq_outbox_2"
	};

	return dq_extension_relation(names[table]);
}

static void
read_rotation(Relation rel, Rotation *rotation)
{
	Snapshot	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	SysScanDesc scan = systable_beginscan(rel, InvalidOid, false, snapshot, 0, NULL);
	HeapTuple	tuple;

	memset(rotation, 0, sizeof(*rotation));
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Datum		values[Natts_rotation];
		bool		nulls[Natts_rotation];
		int64		round;
		int			table;

		heap_deform_tuple(tuple, RelationGetDescr(rel), values, nulls);
		round = DatumGetInt64(values[Anum_rotation_round - 1]);
		table = DatumGetInt32(values[Anum_rotation_tbl - 1]);
		if (table < 0 || table >= DQ_NUM_OUTBOX)
			continue;
		if (round > rotation->round)
		{
			rotation->round = round;
			rotation->since = DatumGetTimestampTz(values[Anum_rotation_since - 1]);
			rotation->current = table;
		}
	}
	systable_endscan(scan);

	/* a table stopped taking rows when the next round began */
	scan = systable_beginscan(rel, InvalidOid, false, snapshot, 0, NULL);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		bool		isnull;
		int64		round = DatumGetInt64(heap_getattr(tuple, Anum_rotation_round,
													   RelationGetDescr(rel), &isnull));
		int			table = DatumGetInt32(heap_getattr(tuple, Anum_rotation_emptied,
													   RelationGetDescr(rel), &isnull));
		TimestampTz since = DatumGetTimestampTz(heap_getattr(tuple, Anum_rotation_since,
															 RelationGetDescr(rel), &isnull));

		/* 'emptied' of a switch round is -2 - (the table that was left) */
		if (table <= -2 && round <= rotation->round)
			rotation->left[-2 - table] = Max(rotation->left[-2 - table], since);
	}
	systable_endscan(scan);
	UnregisterSnapshot(snapshot);
}

int
dq_outbox_current(void)
{
	static bool callback = false;

	if (!callback)
	{
		CacheRegisterRelcacheCallback(rotation_inval, (Datum) 0);
		callback = true;
	}
	if (!cached_valid)
	{
		Rotation	fresh;
		Relation	rel;

		cached_relid = dq_extension_relation("dq_rotation");
		rel = table_open(cached_relid, AccessShareLock);
		cached_valid = true;
		read_rotation(rel, &fresh);
		table_close(rel, AccessShareLock);
		cached = fresh;
	}
	return cached.current;
}

/* ---- marks ---- */

static HeapTuple
find_mark(Relation rel, Snapshot snapshot, int32 shard)
{
	SysScanDesc scan = systable_beginscan(rel, InvalidOid, false, snapshot, 0, NULL);
	HeapTuple	tuple,
				found = NULL;
	bool		isnull;

	while (found == NULL && HeapTupleIsValid(tuple = systable_getnext(scan)))
		if (DatumGetInt32(heap_getattr(tuple, Anum_marks_shard, RelationGetDescr(rel),
									   &isnull)) == shard)
			found = heap_copytuple(tuple);
	systable_endscan(scan);
	return found;
}

void
dq_mark_store(int32 shard, const DqSnapshot *applied, int64 due)
{
	Relation	rel = table_open(dq_extension_relation("dq_marks"), RowExclusiveLock);
	Snapshot	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	HeapTuple	tuple = find_mark(rel, snapshot, shard);
	Datum		values[Natts_marks];
	bool		nulls[Natts_marks] = {0};
	uint64		random;

	UnregisterSnapshot(snapshot);
	if (!pg_strong_random(&random, sizeof(random)))
		random = (uint64) GetCurrentTimestamp();
	if (tuple)
		dq_store_delete(rel, tuple);
	values[Anum_marks_shard - 1] = Int32GetDatum(shard);
	values[Anum_marks_applied - 1] = CStringGetTextDatum(dq_snapshot_out(applied));
	values[Anum_marks_due - 1] = Int64GetDatum(due);
	values[Anum_marks_mark - 1] =
		CStringGetTextDatum(psprintf("%016llx", (unsigned long long) random));
	dq_store_insert(rel, values, nulls);
	table_close(rel, RowExclusiveLock);
}

DqSnapshot *
dq_mark_get(int32 shard, Snapshot snapshot)
{
	Relation	rel = table_open(dq_extension_relation("dq_marks"), AccessShareLock);
	HeapTuple	tuple = find_mark(rel, snapshot, shard);
	DqSnapshot *mark = NULL;

	if (tuple)
	{
		bool		isnull;

		mark = dq_snapshot_in(TextDatumGetCString(heap_getattr(tuple, Anum_marks_applied,
															   RelationGetDescr(rel), &isnull)));
	}
	table_close(rel, AccessShareLock);
	return mark;
}

/* ---- rotation ---- */

static void
write_round(Relation rel, int64 round, int table, int emptied, const char *complete,
			int64 last_due)
{
	Datum		values[Natts_rotation];
	bool		nulls[Natts_rotation] = {0};

	values[Anum_rotation_round - 1] = Int64GetDatum(round);
	values[Anum_rotation_since - 1] = TimestampTzGetDatum(GetCurrentTimestamp());
	values[Anum_rotation_tbl - 1] = Int32GetDatum(table);
	values[Anum_rotation_emptied - 1] = Int32GetDatum(emptied);
	values[Anum_rotation_complete - 1] = CStringGetTextDatum(complete);
	values[Anum_rotation_last_due - 1] = Int64GetDatum(last_due);
	dq_store_insert(rel, values, nulls);
	CacheInvalidateRelcache(rel);
	CommandCounterIncrement();
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

/*
 * Under the exclusive lock: is every row in Redis by the stored marks? Rows of
 * another source (a copy has its original's) are nobody's here.
 */
static bool
nothing_is_needed(Relation rel, Snapshot snapshot, int64 *last_due)
{
	TableScanDesc scan = table_beginscan(rel, snapshot, 0, NULL);
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	List	   *lost = lost_shards();
	List	   *shards = NIL;
	List	   *marks = NIL;
	bool		free = true;

	*last_due = 0;
	while (free && table_scan_getnextslot(scan, ForwardScanDirection, slot))
	{
		bool		isnull;
		FullTransactionId xid = DatumGetFullTransactionId(slot_getattr(slot, ANUM_XID, &isnull));
		int64		due = DatumGetInt64(slot_getattr(slot, ANUM_DUE, &isnull));
		/* a resolution, of shard -n, is needed as long as its element */
		int32		shard = abs(DatumGetInt32(slot_getattr(slot, ANUM_SHARD, &isnull)));
		uint32		tli = (uint32) DatumGetInt32(slot_getattr(slot, ANUM_TLI, &isnull));
		DqRow		row;
		DqSnapshot *mark = NULL;
		ListCell   *s,
				   *m;

		CHECK_FOR_INTERRUPTS();
		row.source = DatumGetInt32(slot_getattr(slot, ANUM_SOURCE, &isnull));
		row.place = DatumGetInt32(slot_getattr(slot, ANUM_PLACE, &isnull));
		if (!dq_row_is_ours(&row) || list_member_int(lost, shard))
			continue;
		*last_due = Max(*last_due, due);
		forboth(s, shards, m, marks)
		{
			if (lfirst_int(s) == shard)
			{
				mark = lfirst(m);
				break;
			}
		}
		if (mark == NULL)
		{
			mark = dq_mark_get(shard, snapshot);
			if (mark == NULL)
				mark = dq_snapshot_in("");
			shards = lappend_int(shards, shard);
			marks = lappend(marks, mark);
		}
		free = dq_snapshot_sees(mark, tli, xid);
	}
	ExecDropSingleTupleTableSlot(slot);
	table_endscan(scan);
	return free;
}

static bool
table_is_empty(Oid relid)
{
	Relation	rel;
	bool		empty;

	if (!ConditionalLockRelationOid(relid, AccessShareLock))
		return false;
	rel = table_open(relid, NoLock);
	empty = RelationGetNumberOfBlocks(rel) == 0;
	table_close(rel, AccessShareLock);
	return empty;
}

/*
 * New storage for the table, its toast table and indexes. The lock is only tried:
 * whoever waits behind a waiting exclusive lock would wait with us.
 */
static bool
try_empty(Relation rotation, int table, int64 round, int current)
{
	Oid			relid = dq_outbox_relation(table);
	Relation	rel;
	Snapshot	snapshot;
	int64		last_due;
	bool		free;
	ReindexParams params = {0};

	if (!ConditionalLockRelationOid(relid, AccessExclusiveLock))
		return false;
	rel = table_open(relid, NoLock);
	/* fresh, and under the lock: nobody can add a row that it does not see */
	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	free = nothing_is_needed(rel, snapshot, &last_due);
	if (free)
	{
		char	   *complete = dq_snapshot_out(dq_snapshot_take(snapshot));
		Oid			toast = rel->rd_rel->reltoastrelid;

		DqSetNewRelfilenumber(rel);
		if (OidIsValid(toast))
		{
			Relation	toastrel = table_open(toast, AccessExclusiveLock);

			DqSetNewRelfilenumber(toastrel);
			table_close(toastrel, NoLock);
		}
		write_round(rotation, round, current, table, complete, last_due);
	}
	UnregisterSnapshot(snapshot);
	table_close(rel, NoLock);
	if (free)
	{
		dq_reindex_relation(relid, REINDEX_REL_PROCESS_TOAST, &params);
		elog(DEBUG1, "dq_bridge: outbox table %d emptied", table);
	}
	return free;
}

TimestampTz
dq_outbox_rotate(int64 window_ms)
{
	Rotation	rotation;
	Relation	rel;
	TimestampTz now = GetCurrentTimestamp();
	int64		period = Max(window_ms / 2, 1000);
	TimestampTz soon = TimestampTzPlusMilliseconds(now, Min(10000, Max(window_ms / 4, 250)));
	TimestampTz next = DT_NOEND;
	bool		did = false;
	int			i;

	StartTransactionCommand();
	if (!ConditionalLockRelationOid(dq_extension_relation("dq_rotation"),
									ShareUpdateExclusiveLock))
	{
		CommitTransactionCommand();
		return soon;
	}
	rel = table_open(dq_extension_relation("dq_rotation"), NoLock);
	PushActiveSnapshot(GetTransactionSnapshot());
	read_rotation(rel, &rotation);

	/* 1. empty one that has stopped taking rows a window ago */
	for (i = 0; i < DQ_NUM_OUTBOX; i++)
	{
		TimestampTz over;

		if (i == rotation.current || table_is_empty(dq_outbox_relation(i)))
			continue;
		over = TimestampTzPlusMilliseconds(rotation.left[i], window_ms);
		if (!did && rotation.left[i] != 0 && now >= over)
			did = try_empty(rel, i, rotation.round + 1, rotation.current);
		next = Min(next, Max(over, soon));
	}

	/* 2. hand the role to an empty one; with none free the current one goes on */
	if (!table_is_empty(dq_outbox_relation(rotation.current)))
	{
		TimestampTz over = TimestampTzPlusMilliseconds(rotation.since, period);

		next = Min(next, Max(over, soon));
		for (i = 0; i < DQ_NUM_OUTBOX && !did && now >= over; i++)
		{
			if (i == rotation.current || !table_is_empty(dq_outbox_relation(i)))
				continue;
			write_round(rel, rotation.round + 1, i, -2 - rotation.current, "", 0);
			did = true;
		}
	}
	PopActiveSnapshot();
	table_close(rel, NoLock);
	CommitTransactionCommand();
	return did ? soon : next;
}
