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
#include "access/xact.h"
#include "commands/sequence.h"
#include "common/hashfn.h"
#include "miscadmin.h"
#include "storage/lock.h"
#include "utils/builtins.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

enum
{
	Anum_shards_no = 1,
	Anum_shards_server,
	Anum_shards_name,
	Anum_shards_shard,
	Anum_shards_shards,
	Anum_shards_indexed,
	Anum_shards_relid,
	Natts_shards = Anum_shards_relid
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

#define NAME_LOCK_CLASS 0xd4b2	/* apart from pg_advisory_lock's 1 and 2 */

void
dq_name_lock(const char *name)
{
	char	   *kin = dq_name_kin(name);
	uint64		hash = hash_bytes_extended((unsigned char *) kin, strlen(kin), 0);
	LOCKTAG		tag;

	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, (uint32) (hash >> 32), (uint32) hash,
						 NAME_LOCK_CLASS);
	(void) LockAcquire(&tag, ExclusiveLock, false, false);
	/* what whoever we waited for has committed counts from here on */
	AcceptInvalidationMessages();
	InvalidateCatalogSnapshot();
}

static bool
server_exists(Oid serverid)
{
	return SearchSysCacheExists1(FOREIGNSERVEROID, ObjectIdGetDatum(serverid));
}

/*
 * The row of a shard: by server and name. pg_upgrade gives servers new OIDs but
 * keeps those of tables, so a row that the queue's own table has registered under
 * another server is the same shard; so is one whose server is no more.
 */
static HeapTuple
find_row(Relation rel, const DqQueue *queue, const char *name)
{
	Snapshot	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	SysScanDesc scan = systable_beginscan(rel, InvalidOid, false, snapshot, 0, NULL);
	size_t		len = strlen(name);
	HeapTuple	tuple,
				found = NULL;
	int			quality = 0;

	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Datum		values[Natts_shards];
		bool		nulls[Natts_shards];
		bytea	   *value;
		Oid			serverid;
		int			match = 0;

		heap_deform_tuple(tuple, RelationGetDescr(rel), values, nulls);
		value = DatumGetByteaPP(values[Anum_shards_name - 1]);
		if (VARSIZE_ANY_EXHDR(value) != len || memcmp(VARDATA_ANY(value), name, len) != 0)
			continue;
		serverid = DatumGetObjectId(values[Anum_shards_server - 1]);
		if (DatumGetObjectId(values[Anum_shards_relid - 1]) == queue->relid)
			match = serverid == queue->serverid ? 4 : 3;
		else if (serverid == queue->serverid)
			match = 2;
		else if (!server_exists(serverid))
			match = 1;
		if (match > quality)
		{
			quality = match;
			found = heap_copytuple(tuple);
		}
	}
	systable_endscan(scan);
	UnregisterSnapshot(snapshot);
	return found;
}

/* Under the lock: the row gets the server's present OID, and so does a pause. */
static void
rehome(Relation rel, HeapTuple tuple, const DqQueue *queue)
{
	Datum		values[Natts_shards];
	bool		nulls[Natts_shards];
	Oid			was;
	Relation	pauses;
	Snapshot	snapshot;
	HeapTuple	pause;

	heap_deform_tuple(tuple, RelationGetDescr(rel), values, nulls);
	was = DatumGetObjectId(values[Anum_shards_server - 1]);
	values[Anum_shards_server - 1] = ObjectIdGetDatum(queue->serverid);
	values[Anum_shards_relid - 1] = ObjectIdGetDatum(queue->relid);
	dq_store_delete(rel, tuple);
	CommandCounterIncrement();
	dq_store_insert(rel, values, nulls);

	pauses = table_open(dq_extension_relation("dq_pauses"), RowExclusiveLock);
	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	pause = dq_store_find(pauses, snapshot, was, queue->name);
	UnregisterSnapshot(snapshot);
	if (pause)
	{
		Datum		pvalues[3];
		bool		pnulls[3];

		heap_deform_tuple(pause, RelationGetDescr(pauses), pvalues, pnulls);
		pvalues[0] = ObjectIdGetDatum(queue->serverid);
		dq_store_delete(pauses, pause);
		CommandCounterIncrement();
		dq_store_insert(pauses, pvalues, pnulls);
	}
	table_close(pauses, RowExclusiveLock);
	CommandCounterIncrement();
}

static int32
row_number(Relation rel, HeapTuple tuple)
{
	bool		isnull;

	return DatumGetInt32(heap_getattr(tuple, Anum_shards_no, RelationGetDescr(rel),
									  &isnull));
}

static bool
is_at_home(Relation rel, HeapTuple tuple, const DqQueue *queue)
{
	bool		isnull;

	return DatumGetObjectId(heap_getattr(tuple, Anum_shards_server,
										 RelationGetDescr(rel), &isnull)) == queue->serverid;
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
		HeapTuple	tuple = find_row(rel, queue, name);

		/* to be written: one at a time for each name, and look again */
		if ((tuple == NULL || !is_at_home(rel, tuple, queue)) && !locked &&
			!RecoveryInProgress() && !XactReadOnly && !IsInParallelMode())
		{
			dq_name_lock(queue->name);
			locked = true;
			tuple = find_row(rel, queue, name);
		}
		if (tuple != NULL && !is_at_home(rel, tuple, queue) && locked)
		{
			rehome(rel, tuple, queue);
			dq_xact_registered();
		}
		if (tuple != NULL)
			numbers[i] = row_number(rel, tuple);
		else
		{
			Datum		values[Natts_shards];
			bool		nulls[Natts_shards] = {0};

			PreventCommandDuringRecovery("dq_bridge: first use of a queue");
			PreventCommandIfReadOnly("dq_bridge: first use of a queue");
			numbers[i] = (int32) nextval_internal(dq_extension_relation("dq_shards_no"),
												  false);
			values[Anum_shards_no - 1] = Int32GetDatum(numbers[i]);
			values[Anum_shards_server - 1] = ObjectIdGetDatum(queue->serverid);
			values[Anum_shards_name - 1] = PointerGetDatum(bytes_of(name));
			values[Anum_shards_shard - 1] = Int32GetDatum(i);
			values[Anum_shards_shards - 1] = Int32GetDatum(queue->nshards);
			values[Anum_shards_indexed - 1] = BoolGetDatum(queue->index);
			values[Anum_shards_relid - 1] = ObjectIdGetDatum(queue->relid);
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
		row->relid = DatumGetObjectId(values[Anum_shards_relid - 1]);
		result = lappend(result, row);
	}
	systable_endscan(scan);
	UnregisterSnapshot(snapshot);
	table_close(rel, AccessShareLock);
	return result;
}
