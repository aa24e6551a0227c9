/*
 * dead_letters.c
 *	  dq_retry and dq_discard: what becomes of tasks that could not be delivered.
 */
#include "postgres.h"

#include "api/api.h"
#include "compat.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

PG_FUNCTION_INFO_V1(dq_retry);
PG_FUNCTION_INFO_V1(dq_discard);

/* Offered anew, due at once. */
static void
offer_again(Oid relid, const Datum *values, const bool *nulls)
{
	DqQueue    *queue = dq_queue_get(relid);
	bytea	   *payload = DatumGetByteaPCopy(values[DQ_DEAD_PAYLOAD - 1]);
	bytea	   *key = NULL;

	if (!nulls[DQ_DEAD_KEY - 1])
		key = dq_key_bytes(queue, values[DQ_DEAD_KEY - 1], TEXTOID);
	(void) dq_offer_record(queue, payload, dq_now_ms(), key);
}

/*
 * Rows of the queue, with that id if one is given, go; how many. A row that another
 * transaction has taken meanwhile is waited for, and then not counted.
 */
static int64
take_rows(FunctionCallInfo fcinfo, const char *name, bool again)
{
	DqQueue    *queue;
	Relation	rel;
	Snapshot	snapshot;
	ScanKeyData key[2];
	SysScanDesc scan;
	HeapTuple	tuple;
	Oid			relid;
	MemoryContext each;
	int64		n = 0;

	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("queue must not be NULL")));
	PreventCommandIfReadOnly(name);
	PreventCommandIfParallelMode(name);
	PreventCommandDuringRecovery(name);
	relid = PG_GETARG_OID(0);
	queue = dq_queue_open(relid);
	dq_require_owner(queue);
	dq_shards_resolve(queue);

	each = AllocSetContextCreate(CurrentMemoryContext, "dead letter", ALLOCSET_DEFAULT_SIZES);
	/* two callers at once: one after the other */
	rel = table_open(dq_extension_relation("dq_dead_letters"), ShareRowExclusiveLock);
	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	ScanKeyInit(&key[0], DQ_DEAD_QUEUE, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(relid));
	if (!PG_ARGISNULL(1))
		ScanKeyInit(&key[1], DQ_DEAD_ID, BTEqualStrategyNumber, F_TEXTEQ,
					PG_GETARG_DATUM(1));
	scan = systable_beginscan(rel, dq_extension_relation("dq_dead_letters_idx"), true,
							  snapshot, PG_ARGISNULL(1) ? 1 : 2, key);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		MemoryContext old = MemoryContextSwitchTo(each);

		CHECK_FOR_INTERRUPTS();
		if (again)
		{
			Datum		values[DQ_DEAD_NATTS];
			bool		nulls[DQ_DEAD_NATTS];

			heap_deform_tuple(tuple, RelationGetDescr(rel), values, nulls);
			offer_again(relid, values, nulls);
		}
		simple_heap_delete(rel, &tuple->t_self);
		MemoryContextSwitchTo(old);
		MemoryContextReset(each);
		n++;
	}
	systable_endscan(scan);
	UnregisterSnapshot(snapshot);
	MemoryContextDelete(each);
	CommandCounterIncrement();
	table_close(rel, NoLock);
	return n;
}

Datum
dq_retry(PG_FUNCTION_ARGS)
{
	PG_RETURN_INT64(take_rows(fcinfo, "dq_retry()", true));
}

Datum
dq_discard(PG_FUNCTION_ARGS)
{
	PG_RETURN_INT64(take_rows(fcinfo, "dq_discard()", false));
}
