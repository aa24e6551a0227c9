/*
 * done.c
 *	  The done log, table dq_done: which tasks have had their effect. After Redis has
 *	  lost data it gives back tasks that were delivered; those are found here and not
 *	  delivered again (PO 15). It is written in the transaction that has the effects.
 *
 *	  A row has the tasks of one batch whose due instants lie in one bucket of about
 *	  four seconds: few rows when tasks are delivered on time, and a look for a task
 *	  reads the rows of its bucket alone.
 */
#include "postgres.h"

#include "compat.h"
#include "deliver/deliver_private.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/table.h"
#include "access/xact.h"
#include "common/hashfn.h"
#include "lib/stringinfo.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/hsearch.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/xid8.h"

enum
{
	Anum_done_shard = 1,
	Anum_done_bucket,
	Anum_done_xid,
	Anum_done_at,
	Anum_done_tli,
	Anum_done_tasks,
	Natts_done = Anum_done_tasks
};

#define BUCKET_BITS		12		/* of due in ms */
#define PURGE_ROWS		5000	/* looked at in one transaction */

/* A task as it stands in a row: due, length of the id, id; long ones by two hashes. */
typedef struct DoneKey
{
	int64		due;
	uint8		len;
	char		id[23];
} DoneKey;

StaticAssertDecl(sizeof(DoneKey) == 32, "DoneKey is written as it is");

static void
make_key(DoneKey *key, const DqTask *task)
{
	memset(key, 0, sizeof(*key));
	key->due = task->due;
	key->len = task->idlen;
	if (task->idlen <= sizeof(key->id))
		memcpy(key->id, task->idbytes, task->idlen);
	else
	{
		uint64		h[2];

		h[0] = hash_bytes_extended((const unsigned char *) task->idbytes, task->idlen, 0);
		h[1] = hash_bytes_extended((const unsigned char *) task->idbytes, task->idlen, 1);
		memcpy(key->id, h, sizeof(h));
	}
}

static int64
bucket_of(int64 due)
{
	return due >> BUCKET_BITS;
}

/* ---- writing ---- */

static void
append_key(StringInfo tasks, const DqTask *task)
{
	DoneKey		key;

	make_key(&key, task);
	appendBinaryStringInfo(tasks, (char *) &key, offsetof(DoneKey, id) +
						   Min(task->idlen, sizeof(key.id)));
}

static void
store_row(Relation rel, int32 shard, int64 bucket, StringInfo tasks)
{
	Datum		values[Natts_done];
	bool		nulls[Natts_done] = {0};
	bytea	   *bytes = palloc(VARHDRSZ + tasks->len);

	SET_VARSIZE(bytes, VARHDRSZ + tasks->len);
	memcpy(VARDATA(bytes), tasks->data, tasks->len);
	values[Anum_done_shard - 1] = Int32GetDatum(shard);
	values[Anum_done_bucket - 1] = Int64GetDatum(bucket);
	values[Anum_done_xid - 1] = FullTransactionIdGetDatum(GetTopFullTransactionId());
	values[Anum_done_at - 1] = TimestampTzGetDatum(GetCurrentTimestamp());
	values[Anum_done_tli - 1] = Int32GetDatum((int32) dq_timeline());
	values[Anum_done_tasks - 1] = PointerGetDatum(bytes);
	(void) dq_store_insert(rel, values, nulls);
	pfree(bytes);
}

static int
due_cmp(const void *a, const void *b)
{
	const DqTask *x = *(DqTask *const *) a,
			   *y = *(DqTask *const *) b;

	return (x->due > y->due) - (x->due < y->due);
}

void
dq_done_store(int32 shard, DqTask *const *tasks, int n)
{
	Relation	rel = table_open(dq_extension_relation("dq_done"), RowExclusiveLock);
	DqTask	  **sorted = palloc(Max(n, 1) * sizeof(DqTask *));
	StringInfoData row;

	memcpy(sorted, tasks, n * sizeof(DqTask *));
	qsort(sorted, n, sizeof(DqTask *), due_cmp);
	initStringInfo(&row);
	for (int i = 0; i < n; i++)
	{
		append_key(&row, sorted[i]);
		if (i + 1 == n || bucket_of(sorted[i + 1]->due) != bucket_of(sorted[i]->due))
		{
			store_row(rel, shard, bucket_of(sorted[i]->due), &row);
			resetStringInfo(&row);
		}
	}
	table_close(rel, RowExclusiveLock);
}

/* ---- looking ---- */

static void
read_bucket(Relation rel, Snapshot snapshot, int32 shard, int64 bucket, HTAB *known)
{
	ScanKeyData key[2];
	SysScanDesc scan;
	HeapTuple	tuple;

	ScanKeyInit(&key[0], Anum_done_shard, BTEqualStrategyNumber, F_INT4EQ,
				Int32GetDatum(shard));
	ScanKeyInit(&key[1], Anum_done_bucket, BTEqualStrategyNumber, F_INT8EQ,
				Int64GetDatum(bucket));
	scan = systable_beginscan(rel, dq_extension_relation("dq_done_pkey"), true, snapshot,
							  2, key);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		bool		isnull;
		bytea	   *bytes = DatumGetByteaPP(heap_getattr(tuple, Anum_done_tasks,
														 RelationGetDescr(rel), &isnull));
		const char *at = VARDATA_ANY(bytes);
		const char *end = at + VARSIZE_ANY_EXHDR(bytes);

		while (end - at >= (ptrdiff_t) offsetof(DoneKey, id))
		{
			DoneKey		entry;
			size_t		len;

			memset(&entry, 0, sizeof(entry));
			memcpy(&entry, at, offsetof(DoneKey, id));
			at += offsetof(DoneKey, id);
			len = Min(entry.len, sizeof(entry.id));
			if (end - at < (ptrdiff_t) len)
				break;
			memcpy(entry.id, at, len);
			at += len;
			(void) hash_search(known, &entry, HASH_ENTER, NULL);
		}
	}
	systable_endscan(scan);
}

void
dq_done_look(int32 shard, const DqTask *tasks, int n, int64 suspect, bool *done)
{
	Relation	rel = NULL;
	Snapshot	snapshot = NULL;
	HTAB	   *known = NULL;
	HTAB	   *read = NULL;

	for (int i = 0; i < n; i++)
	{
		int64		bucket = bucket_of(tasks[i].due);
		DoneKey		key;
		bool		found;

		done[i] = false;
		if (tasks[i].due > suspect)
			continue;
		if (rel == NULL)
		{
			HASHCTL		ctl = {0};

			rel = table_open(dq_extension_relation("dq_done"), AccessShareLock);
			snapshot = RegisterSnapshot(dq_fresh_snapshot());
			ctl.hcxt = CurrentMemoryContext;
			ctl.keysize = ctl.entrysize = sizeof(DoneKey);
			known = hash_create("dq_bridge done tasks", 1024, &ctl,
								HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
			ctl.keysize = ctl.entrysize = sizeof(int64);
			read = hash_create("dq_bridge done buckets", 64, &ctl,
							   HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
		}
		(void) hash_search(read, &bucket, HASH_ENTER, &found);
		if (!found)
			read_bucket(rel, snapshot, shard, bucket, known);
		make_key(&key, &tasks[i]);
		(void) hash_search(known, &key, HASH_FIND, &done[i]);
	}
	if (rel == NULL)
		return;
	hash_destroy(known);
	hash_destroy(read);
	UnregisterSnapshot(snapshot);
	table_close(rel, AccessShareLock);
}

/* ---- forgetting ---- */

/*
 * PO 15: a row may go when nothing can bring its tasks back that does not sweep them
 * itself: the window is over, and the stored mark covers them: its A sees the row's
 * transaction, so the offer as well, and they were due by its W. Returns where the next
 * look begins, -1: this one has come to the end.
 */
int64
dq_done_purge(int32 shard, int64 from, int64 window_ms)
{
	Relation	rel;
	Snapshot	snapshot;
	ScanKeyData key[2];
	SysScanDesc scan;
	HeapTuple	tuple;
	DqMark		mark;
	const DqSnapshot *settled;
	TimestampTz now = GetCurrentTimestamp();
	int64		next = -1;
	int			looked = 0;

	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	if (!dq_mark_get(shard, snapshot, &mark) || mark.settled[0] == '\0')
	{
		UnregisterSnapshot(snapshot);
		return -1;
	}
	settled = dq_snapshot_in(mark.settled);
	rel = table_open(dq_extension_relation("dq_done"), RowExclusiveLock);
	ScanKeyInit(&key[0], Anum_done_shard, BTEqualStrategyNumber, F_INT4EQ,
				Int32GetDatum(shard));
	ScanKeyInit(&key[1], Anum_done_bucket, BTGreaterEqualStrategyNumber, F_INT8GE,
				Int64GetDatum(from));
	scan = systable_beginscan(rel, dq_extension_relation("dq_done_pkey"), true, snapshot,
							  2, key);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Datum		values[Natts_done];
		bool		nulls[Natts_done];
		int64		bucket;
		TimestampTz at;

		heap_deform_tuple(tuple, RelationGetDescr(rel), values, nulls);
		bucket = DatumGetInt64(values[Anum_done_bucket - 1]);
		at = DatumGetTimestampTz(values[Anum_done_at - 1]);
		if (++looked > PURGE_ROWS && bucket > from)
		{
			next = bucket;
			break;
		}
		if (((bucket + 1) << BUCKET_BITS) - 1 <= mark.due && window_ms < PG_INT32_MAX * INT64CONST(100) &&
			at + window_ms * 1000 < now &&
			dq_snapshot_sees(settled, DatumGetInt32(values[Anum_done_tli - 1]),
							 DatumGetFullTransactionId(values[Anum_done_xid - 1])))
			simple_heap_delete(rel, &tuple->t_self);
	}
	systable_endscan(scan);
	UnregisterSnapshot(snapshot);
	table_close(rel, RowExclusiveLock);
	return next;
}
