/*
 * drop.c
 *	  The event trigger of DROP: a dropped queue leaves Redis untouched, and the
 *	  user is told how much is pending there. Runs in every session that drops
 *	  something; as in ddl.c nothing looks up a name.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/reloptions.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/indexing.h"
#include "catalog/pg_class.h"
#include "catalog/pg_foreign_server.h"
#include "catalog/pg_foreign_table.h"
#include "foreign/foreign.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "api/ddl.h"
#include "outbox/outbox.h"
#include "queue/options.h"
#include "queue/queue.h"
#include "shared/shared.h"

PG_FUNCTION_INFO_V1(dq_on_drop);

/*
 * The last version of a catalog row that this transaction has deleted. When
 * sql_drop fires, no snapshot shows it any more; but it cannot have been vacuumed
 * away, and its version chain ends with itself.
 */
static HeapTuple
deleted_row(Relation rel, Oid index, AttrNumber attno, Oid oid)
{
	SysScanDesc scan;
	ScanKeyData key;
	HeapTuple	tuple;
	HeapTuple	result = NULL;

	ScanKeyInit(&key, attno, BTEqualStrategyNumber, F_OIDEQ, ObjectIdGetDatum(oid));
	scan = systable_beginscan(rel, index, true, SnapshotAny, 1, &key);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		HeapTupleHeader header = tuple->t_data;

		if ((header->t_infomask & HEAP_XMAX_INVALID) == 0 &&
			!HEAP_XMAX_IS_LOCKED_ONLY(header->t_infomask) &&
			TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetUpdateXid(header)) &&
			ItemPointerEquals(&header->t_ctid, &tuple->t_self))
		{
			result = heap_copytuple(tuple);
			break;
		}
	}
	systable_endscan(scan);
	return result;
}

static List *
options_of(HeapTuple tuple, AttrNumber attno, TupleDesc desc)
{
	bool		isnull;
	Datum		value = heap_getattr(tuple, attno, desc, &isnull);

	return isnull ? NIL : untransformRelOptions(value);
}

/* key_prefix of a server of ours, there or just dropped; false: none of ours. */
static bool
server_prefix(Oid serverid, const char **prefix)
{
	ForeignServer *server = GetForeignServerExtended(serverid, FSV_MISSING_OK);
	Oid			fdwid = InvalidOid;
	List	   *options = NIL;

	if (server)
	{
		fdwid = server->fdwid;
		options = server->options;
	}
	else
	{
		Relation	rel = table_open(ForeignServerRelationId, AccessShareLock);
		HeapTuple	tuple = deleted_row(rel, ForeignServerOidIndexId,
										Anum_pg_foreign_server_oid, serverid);

		if (tuple)
		{
			fdwid = ((Form_pg_foreign_server) GETSTRUCT(tuple))->srvfdw;
			options = options_of(tuple, Anum_pg_foreign_server_srvoptions,
								 RelationGetDescr(rel));
		}
		table_close(rel, AccessShareLock);
	}
	*prefix = dq_option_text(options, DQ_ON_SERVER, "key_prefix");
	return OidIsValid(fdwid) && fdwid == dq_wrapper_oid();
}

/* How many tasks the workers last saw pending; -1: not known. */
static int64
pending_of(Oid serverid, const char *name, int nshards)
{
	List	   *rows = dq_shards_list(serverid);
	int64		pending = 0;
	int			seen = 0;
	ListCell   *lc;

	foreach(lc, rows)
	{
		DqShardRow *row = lfirst(lc);
		DqShardStats stats;

		if (row->nshards != nshards ||
			strcmp(row->name, dq_shard_name(name, nshards, row->shard)) != 0)
			continue;
		if (dq_stats_get(MyDatabaseId, row->no, &stats) && stats.seen_at != 0)
		{
			pending += stats.pending;
			seen++;
		}
	}
	return seen == nshards ? pending : -1;
}

static void
on_dropped_table(Oid relid)
{
	Relation	rel = table_open(ForeignTableRelationId, AccessShareLock);
	HeapTuple	tuple = deleted_row(rel, ForeignTableRelidIndexId,
									Anum_pg_foreign_table_ftrelid, relid);
	List	   *options = NIL;
	Oid			serverid = InvalidOid;
	const char *prefix;
	const char *name;
	char	   *full;
	int64		pending;

	if (tuple)
	{
		serverid = ((Form_pg_foreign_table) GETSTRUCT(tuple))->ftserver;
		options = options_of(tuple, Anum_pg_foreign_table_ftoptions,
							 RelationGetDescr(rel));
	}
	table_close(rel, AccessShareLock);
	if (!OidIsValid(serverid) || !server_prefix(serverid, &prefix))
		return;
	name = dq_option_text(options, DQ_ON_TABLE, "queue");
	/* tables that show something else leave nothing behind */
	if (name == NULL ||
		strcmp(dq_option_text(options, DQ_ON_TABLE, "contents"), "pending") != 0)
		return;

	full = psprintf("%s%s", prefix, name);
	pending = pending_of(serverid, pg_server_to_any(full, strlen(full), PG_UTF8),
						 dq_option_number(options, DQ_ON_TABLE, "shards"));
	if (pending >= 0)
		ereport(NOTICE,
				(errmsg_plural("queue \"%s\": %lld task stays pending in Redis",
							   "queue \"%s\": %lld tasks stay pending in Redis",
							   pending, full, (long long) pending)));
	else
		ereport(NOTICE,
				(errmsg("queue \"%s\": pending tasks stay in Redis", full),
				 errdetail("How many is not known, because no worker has looked yet.")));
	dq_xact_touched(serverid);
}

Datum
dq_on_drop(PG_FUNCTION_ARGS)
{
	List	   *objects;
	ListCell   *lc;

	(void) dq_ddl_trigger(fcinfo);
	if (IsBinaryUpgrade || !OidIsValid(dq_wrapper_oid()))
		PG_RETURN_NULL();

	objects = dq_ddl_objects("SELECT classid, objid"
							 " FROM pg_catalog.pg_event_trigger_dropped_objects()"
							 " WHERE object_type OPERATOR(pg_catalog.=) 'foreign table'::pg_catalog.text");
	foreach(lc, objects)
	{
		DdlObject  *object = lfirst(lc);

		if (object->classid == RelationRelationId)
			on_dropped_table(object->objid);
	}
	PG_RETURN_NULL();
}
