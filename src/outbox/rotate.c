/*
 * rotate.c
 *	  Which outbox table takes new rows, and the emptying of old tables as a whole
 *	  (PO 16; emptying.c says when). Emptying gives the table new storage under a conditional exclusive
 *	  lock: nobody waits for it, no logical TRUNCATE is written. Called by the
 *	  bridge.
 */
#include "postgres.h"

#include "compat.h"
#include "outbox/outbox.h"
#include "outbox/outbox_private.h"

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
#include "utils/timestamp.h"

enum
{
	Anum_rotation_round = 1,
	Anum_rotation_since,
	Anum_rotation_tbl,
	Anum_rotation_emptied,
	Natts_rotation = Anum_rotation_emptied
};

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

static void
give_new_storage(Relation rel)
{
	Oid			toast = rel->rd_rel->reltoastrelid;

	DqSetNewRelfilenumber(rel);
	if (OidIsValid(toast))
	{
		Relation	toastrel = table_open(toast, AccessExclusiveLock);

		DqSetNewRelfilenumber(toastrel);
		table_close(toastrel, NoLock);
	}
}

/*
 * New storage for the table, its toast table and indexes, if nothing in it is
 * needed. That is looked up first, beside everybody else. The exclusive lock is only
 * tried: whoever waits behind a waiting one would wait with us. again: the look has
 * not ended.
 */
static bool
try_empty(Relation rotation, int table, int64 round, int current, bool *again)
{
	Oid			relid = dq_outbox_relation(table);
	Relation	rel;
	DqNeed		need;
	ReindexParams params = {0};

	*again = false;
	if (!ConditionalLockRelationOid(relid, AccessShareLock))
		return false;
	rel = table_open(relid, NoLock);
	need = dq_emptying_look(rel);
	if (need == DQ_NEED_NOTHING &&
		(!ConditionalLockRelationOid(relid, AccessExclusiveLock) ||
		 !dq_emptying_confirm(rel)))
		need = DQ_NEED_ROWS;
	*again = need == DQ_NEED_UNKNOWN;
	if (need == DQ_NEED_NOTHING)
	{
		dq_emptying_done(round);
		give_new_storage(rel);
		write_round(rotation, round, current, table);
	}
	table_close(rel, NoLock);
	if (need != DQ_NEED_NOTHING)
		return false;
	dq_reindex_relation(relid, REINDEX_REL_PROCESS_TOAST, &params);
	elog(DEBUG1, "dq_bridge: outbox table %d emptied", table);
	return true;
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
	bool		did = false,
				again = false;
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
			did = try_empty(rel, i, rotation.round + 1, rotation.current, &again);
		if (again)
			break;
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
	return again ? now : did ? soon : next;
}
