/*
 * shards.c
 *	  The registry of shards: outbox rows name a shard by its number, so what was
 *	  committed for a queue can be finished after its table is gone, and no row
 *	  changes its place when options change (H18).
 */
#include "postgres.h"

#include "compat.h"
#include "outbox/outbox.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "commands/sequence.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "access/xact.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

enum
{
	Anum_shards_no = 1,
	Anum_shards_server,
	Anum_shards_name,
	Anum_shards_shard,
	Anum_shards_shards,
	Anum_shards_indexed,
	Natts_shards = Anum_shards_indexed
};

static bytea *
bytes_of(const char *str)
{
	size_t		len = strlen(str);
	bytea	   *result = palloc(VARHDRSZ + len);

	SET_VARSIZE(result, VARHDRSZ + len);
	memcpy(VARDATA(result), str, len);
	return result;
}

static int32
find_shard(Relation rel, Oid serverid, const char *name)
{
	Snapshot	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	HeapTuple	tuple = dq_store_find(rel, snapshot, serverid, name);
	int32		no = 0;

	if (tuple)
	{
		bool		isnull;

		no = DatumGetInt32(heap_getattr(tuple, Anum_shards_no,
										RelationGetDescr(rel), &isnull));
	}
	UnregisterSnapshot(snapshot);
	return no;
}

/*
 * Normally all shards are registered when the table is created; a table that
 * came about without the event trigger registers them at first use, in the
 * caller's transaction.
 */
void
dq_shards_resolve(DqQueue *queue)
{
	Relation	rel;
	int32	   *numbers;
	int			i;
	bool		locked = false;

	if (queue->shard_no && queue->shard_generation == dq_xact_generation())
		return;

	numbers = MemoryContextAlloc(GetMemoryChunkContext(queue),
								 queue->nshards * sizeof(int32));
	rel = table_open(dq_extension_relation("dq_shards"), AccessShareLock);
	for (i = 0; i < queue->nshards; i++)
	{
		char	   *name = dq_shard_name(queue->name, queue->nshards, i);

		numbers[i] = find_shard(rel, queue->serverid, name);
		if (numbers[i] == 0 && !locked)
		{
			LockRelationOid(RelationGetRelid(rel), ShareUpdateExclusiveLock);
			locked = true;
			numbers[i] = find_shard(rel, queue->serverid, name);
		}
		if (numbers[i] == 0)
		{
			Datum		values[Natts_shards];
			bool		nulls[Natts_shards] = {0};

			PreventCommandIfReadOnly("dq_bridge: first use of a queue");
			numbers[i] = (int32) nextval_internal(dq_extension_relation("dq_shards_no"),
												  false);
			values[Anum_shards_no - 1] = Int32GetDatum(numbers[i]);
			values[Anum_shards_server - 1] = ObjectIdGetDatum(queue->serverid);
			values[Anum_shards_name - 1] = PointerGetDatum(bytes_of(name));
			values[Anum_shards_shard - 1] = Int32GetDatum(i);
			values[Anum_shards_shards - 1] = Int32GetDatum(queue->nshards);
			values[Anum_shards_indexed - 1] = BoolGetDatum(queue->index);
			dq_store_insert(rel, values, nulls);
			dq_xact_registered();
		}
		pfree(name);
	}
	if (locked)
		CommandCounterIncrement();
	table_close(rel, NoLock);

	if (queue->shard_no)
		pfree(queue->shard_no);
	queue->shard_no = numbers;
	queue->shard_generation = dq_xact_generation();
}

List *
dq_shards_list(Oid serverid)
{
	Relation	rel = table_open(dq_extension_relation("dq_shards"), AccessShareLock);
	Snapshot	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	SysScanDesc scan = systable_beginscan(rel, InvalidOid, false, snapshot, 0, NULL);
	HeapTuple	tuple;
	List	   *result = NIL;

	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Datum		values[Natts_shards];
		bool		nulls[Natts_shards];
		DqShardRow *row;
		bytea	   *name;

		heap_deform_tuple(tuple, RelationGetDescr(rel), values, nulls);
		if (OidIsValid(serverid) &&
			DatumGetObjectId(values[Anum_shards_server - 1]) != serverid)
			continue;
		row = palloc(sizeof(DqShardRow));
		name = DatumGetByteaPP(values[Anum_shards_name - 1]);
		row->no = DatumGetInt32(values[Anum_shards_no - 1]);
		row->serverid = DatumGetObjectId(values[Anum_shards_server - 1]);
		row->name = pnstrdup(VARDATA_ANY(name), VARSIZE_ANY_EXHDR(name));
		row->shard = DatumGetInt32(values[Anum_shards_shard - 1]);
		row->nshards = DatumGetInt32(values[Anum_shards_shards - 1]);
		row->index = DatumGetBool(values[Anum_shards_indexed - 1]);
		result = lappend(result, row);
	}
	systable_endscan(scan);
	UnregisterSnapshot(snapshot);
	table_close(rel, AccessShareLock);
	return result;
}
