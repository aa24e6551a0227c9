/*
 * rotate.c
 *	  Which outbox table takes new rows, and the emptying of old tables as a whole
 *	  (PO 16). Emptying gives the table new storage under a conditional exclusive
 *	  lock: nobody waits for it, no logical TRUNCATE is written. Called by the
 *	  bridge.
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
	Natts_rotation = Anum_rotation_emptied
};

/* columns of an outbox table that the check reads */
#define ANUM_XID	1
#define ANUM_DUE	3
#define ANUM_AT		5
#define ANUM_SHARD	6
#define ANUM_TLI	7
#define ANUM_SOURCE	8
#define ANUM_PLACE	9
#define ANUM_OP		11
#define ANUM_KEY	12

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

bool
dq_outbox_emptied_since(TimestampTz since, Snapshot snapshot)
{
	Relation	rel = table_open(dq_extension_relation("dq_rotation"), AccessShareLock);
	SysScanDesc scan = systable_beginscan(rel, InvalidOid, false, snapshot, 0, NULL);
	HeapTuple	tuple;
	bool		any = false;

	while (!any && HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		bool		isnull;
		TimestampTz at = DatumGetTimestampTz(heap_getattr(tuple, Anum_rotation_since,
														  RelationGetDescr(rel), &isnull));
		int			table = DatumGetInt32(heap_getattr(tuple, Anum_rotation_emptied,
													   RelationGetDescr(rel), &isnull));

		any = table >= 0 && at >= since;
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return any;
}

void
dq_outbox_keep(bool is_short)
{
	int			i;

	if (is_short)
	{
		LockRelationOid(dq_extension_relation("dq_rotation"), ShareUpdateExclusiveLock);
		return;
	}
	for (i = 0; i < DQ_NUM_OUTBOX; i++)
		LockRelationOid(dq_outbox_relation(i), AccessShareLock);
}

/* ---- rotation ---- */

static void
write_round(Relation rel, int64 round, int table, int emptied)
{
	Datum		values[Natts_rotation];
	bool		nulls[Natts_rotation] = {0};

	values[Anum_rotation_round - 1] = Int64GetDatum(round);
	values[Anum_rotation_since - 1] = TimestampTzGetDatum(GetCurrentTimestamp());
	values[Anum_rotation_tbl - 1] = Int32GetDatum(table);
	values[Anum_rotation_emptied - 1] = Int32GetDatum(emptied);
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

/* Of one shard, while a table is looked through. */
typedef struct ShardRows
{
	DqEmptied	sum;
	DqSnapshot *applied;		/* by its mark */
} ShardRows;

static ShardRows *
rows_of_shard(List **shards, int32 shard, Snapshot snapshot)
{
	ShardRows  *rows;
	DqMark		mark;
	ListCell   *lc;

	foreach(lc, *shards)
	{
		rows = lfirst(lc);
		if (rows->sum.shard == shard)
			return rows;
	}
	rows = palloc0(sizeof(ShardRows));
	rows->sum.shard = shard;
	rows->sum.complete = dq_mark_get(shard, snapshot, &mark) ? mark.applied : "";
	rows->applied = dq_snapshot_in(rows->sum.complete);
	*shards = lcons(rows, *shards);
	return rows;
}

/* What would be missing with it. */
static void
add_row(DqEmptied *sum, const DqRow *row, bool keyed)
{
	sum->newest = Max(sum->newest, row->at);
	if (dq_row_offers(row) || row->op == DQ_OP_RESCHEDULE_ELEMENT)
	{
		sum->tasks++;
		sum->due = Max(sum->due, row->due);
	}
	if (row->op == DQ_OP_CONSUME)
		return;
	/* which task went for a key or an element, and when that was due, it does not say */
	if (keyed || row->op == DQ_OP_REMOVE_ELEMENT || row->op == DQ_OP_RESCHEDULE_ELEMENT ||
		row->op == DQ_OP_REMOVE_KEY || row->op == DQ_OP_MOVE_NAMED)
		sum->any_due = PG_INT64_MAX;
	else
		sum->any_due = Max(sum->any_due, row->due);
}

/*
 * Under the exclusive lock: is every row in Redis by the stored marks? Rows of
 * another source (a copy has its original's) are nobody's here. shards: of those
 * that have rows.
 */
static bool
nothing_is_needed(Relation rel, Snapshot snapshot, List **shards)
{
	TableScanDesc scan = table_beginscan(rel, snapshot, 0, NULL);
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	List	   *lost = lost_shards();
	bool		free = true;

	*shards = NIL;
	while (free && table_scan_getnextslot(scan, ForwardScanDirection, slot))
	{
		bool		isnull,
					keyless;
		DqRow		row;
		ShardRows  *rows;

		CHECK_FOR_INTERRUPTS();
		row.xid = DatumGetFullTransactionId(slot_getattr(slot, ANUM_XID, &isnull));
		row.due = DatumGetInt64(slot_getattr(slot, ANUM_DUE, &isnull));
		row.at = DatumGetTimestampTz(slot_getattr(slot, ANUM_AT, &isnull));
		/* a resolution, of shard -n, is needed as long as its element */
		row.shard = abs(DatumGetInt32(slot_getattr(slot, ANUM_SHARD, &isnull)));
		row.tli = (uint32) DatumGetInt32(slot_getattr(slot, ANUM_TLI, &isnull));
		row.source = DatumGetInt32(slot_getattr(slot, ANUM_SOURCE, &isnull));
		row.place = DatumGetInt32(slot_getattr(slot, ANUM_PLACE, &isnull));
		row.op = DatumGetChar(slot_getattr(slot, ANUM_OP, &isnull));
		(void) slot_getattr(slot, ANUM_KEY, &keyless);
		if (!dq_row_is_ours(&row) || list_member_int(lost, row.shard))
			continue;
		rows = rows_of_shard(shards, row.shard, snapshot);
		free = dq_snapshot_sees(rows->applied, row.tli, row.xid);
		add_row(&rows->sum, &row, !keyless);
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
	List	   *shards;
	bool		free;
	ReindexParams params = {0};

	if (!ConditionalLockRelationOid(relid, AccessExclusiveLock))
		return false;
	rel = table_open(relid, NoLock);
	/* fresh, and under the lock: nobody can add a row that it does not see */
	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	free = nothing_is_needed(rel, snapshot, &shards);
	if (free)
	{
		Oid			toast = rel->rd_rel->reltoastrelid;
		ListCell   *lc;

		DqSetNewRelfilenumber(rel);
		if (OidIsValid(toast))
		{
			Relation	toastrel = table_open(toast, AccessExclusiveLock);

			DqSetNewRelfilenumber(toastrel);
			table_close(toastrel, NoLock);
		}
		write_round(rotation, round, current, table);
		foreach(lc, shards)
		{
			ShardRows  *rows = lfirst(lc);

			rows->sum.round = round;
			dq_emptied_note(&rows->sum);
		}
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
			write_round(rel, rotation.round + 1, i, -2 - rotation.current);
			did = true;
		}
	}
	PopActiveSnapshot();
	table_close(rel, NoLock);
	CommitTransactionCommand();
	return did ? soon : next;
}
