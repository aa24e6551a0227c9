/*
 * claims.c
 *	  Table dq_claims: per shard the number and nonce of the last batch whose effects
 *	  PostgreSQL has committed. It changes in the transaction that has the effects, by
 *	  compare-and-set, so that of two that carry out one batch, one rolls back (PO 13).
 */
#include "postgres.h"

#include "compat.h"
#include "deliver/deliver_private.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/table.h"
#include "access/xact.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/snapmgr.h"

enum
{
	Anum_claims_shard = 1,
	Anum_claims_number,
	Anum_claims_nonce,
	Anum_claims_suspect,
	Anum_claims_skip,
	Natts_claims = Anum_claims_skip
};

static void
read_row(Relation rel, HeapTuple tuple, DqClaim *claim)
{
	Datum		values[Natts_claims];
	bool		nulls[Natts_claims];

	heap_deform_tuple(tuple, RelationGetDescr(rel), values, nulls);
	claim->number = DatumGetInt64(values[Anum_claims_number - 1]);
	text_to_cstring_buffer(DatumGetTextPP(values[Anum_claims_nonce - 1]), claim->nonce,
						   sizeof(claim->nonce));
	claim->suspect = DatumGetInt64(values[Anum_claims_suspect - 1]);
	claim->skip = TextDatumGetCString(values[Anum_claims_skip - 1]);
}

/* The row of a shard by a fresh snapshot, and where it lies. */
static bool
find_row(Relation rel, int32 shard, DqClaim *claim, ItemPointer at)
{
	Snapshot	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;

	ScanKeyInit(&key, Anum_claims_shard, BTEqualStrategyNumber, F_INT4EQ,
				Int32GetDatum(shard));
	scan = systable_beginscan(rel, dq_extension_relation("dq_claims_pkey"), true, snapshot,
							  1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
	{
		read_row(rel, tuple, claim);
		*at = tuple->t_self;
	}
	systable_endscan(scan);
	UnregisterSnapshot(snapshot);
	return HeapTupleIsValid(tuple);
}

bool
dq_claim_get(int32 shard, DqClaim *claim)
{
	Relation	rel = table_open(dq_extension_relation("dq_claims"), AccessShareLock);
	ItemPointerData at;
	bool		found = find_row(rel, shard, claim, &at);

	table_close(rel, AccessShareLock);
	return found;
}

/*
 * Two at once: the second waits in simple_heap_delete, or at the primary key, for the
 * first to end, and then raises an error.
 */
bool
dq_claim_set(int32 shard, const DqClaim *was, const DqClaim *claim)
{
	Relation	rel = table_open(dq_extension_relation("dq_claims"), RowExclusiveLock);
	Datum		values[Natts_claims];
	bool		nulls[Natts_claims] = {0};
	DqClaim		found;
	ItemPointerData at;
	bool		there = find_row(rel, shard, &found, &at);

	if (there != (was != NULL) ||
		(there && (found.number != was->number || strcmp(found.nonce, was->nonce) != 0)))
	{
		table_close(rel, RowExclusiveLock);
		return false;
	}
	if (there)
	{
		simple_heap_delete(rel, &at);
		CommandCounterIncrement();
	}
	values[Anum_claims_shard - 1] = Int32GetDatum(shard);
	values[Anum_claims_number - 1] = Int64GetDatum(claim->number);
	values[Anum_claims_nonce - 1] = CStringGetTextDatum(claim->nonce);
	values[Anum_claims_suspect - 1] = Int64GetDatum(claim->suspect);
	values[Anum_claims_skip - 1] = CStringGetTextDatum(claim->skip);
	(void) dq_store_insert(rel, values, nulls);
	table_close(rel, RowExclusiveLock);
	return true;
}
