/*
 * store.c
 *	  Rows of the extension's small tables, written past the executor: no rights,
 *	  triggers or rules are involved, pg_stat_statements sees nothing, and logical
 *	  decoding does not either. Rows are inserted and deleted, never updated.
 */
#include "postgres.h"

#include "compat.h"
#include "outbox/outbox.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/index.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"

ItemPointerData
dq_store_insert(Relation rel, Datum *values, bool *nulls)
{
	HeapTuple	tuple = heap_form_tuple(RelationGetDescr(rel), values, nulls);
	ItemPointerData at;
	List	   *indexes;
	ListCell   *lc;

	heap_insert(rel, tuple, GetCurrentCommandId(true), HEAP_INSERT_NO_LOGICAL, NULL);

	indexes = RelationGetIndexList(rel);
	foreach(lc, indexes)
	{
		Relation	index = index_open(lfirst_oid(lc), RowExclusiveLock);
		IndexInfo  *info = BuildIndexInfo(index);
		Datum		ivalues[INDEX_MAX_KEYS];
		bool		inulls[INDEX_MAX_KEYS];
		int			i;

		for (i = 0; i < info->ii_NumIndexAttrs; i++)
		{
			AttrNumber	att = info->ii_IndexAttrNumbers[i];

			ivalues[i] = values[att - 1];
			inulls[i] = nulls[att - 1];
		}
		index_insert(index, ivalues, inulls, &tuple->t_self, rel,
					 info->ii_Unique ? UNIQUE_CHECK_YES : UNIQUE_CHECK_NO,
					 false, info);
		index_close(index, NoLock);
	}
	list_free(indexes);
	at = tuple->t_self;
	heap_freetuple(tuple);
	return at;
}

void
dq_store_delete(Relation rel, HeapTuple tuple)
{
	simple_heap_delete(rel, &tuple->t_self);
}

HeapTuple
dq_store_find(Relation rel, Snapshot snapshot, Oid serverid, const char *name)
{
	ScanKeyData key[1];
	SysScanDesc scan;
	HeapTuple	tuple,
				found = NULL;
	AttrNumber	server_att = get_attnum(RelationGetRelid(rel), "server");
	AttrNumber	name_att = get_attnum(RelationGetRelid(rel), "name");
	size_t		len = strlen(name);

	ScanKeyInit(&key[0], server_att, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(serverid));
	scan = systable_beginscan(rel, InvalidOid, false, snapshot, 1, key);
	while (found == NULL && HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		bool		isnull;
		bytea	   *value = DatumGetByteaPP(heap_getattr(tuple, name_att,
														 RelationGetDescr(rel), &isnull));

		if (VARSIZE_ANY_EXHDR(value) == len &&
			memcmp(VARDATA_ANY(value), name, len) == 0)
			found = heap_copytuple(tuple);
	}
	systable_endscan(scan);
	return found;
}
