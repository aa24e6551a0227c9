/*
 * database.c
 *	  Databases as seen from outside: which ones workers may serve, and whether
 *	  somebody wants one for himself. Called by the launcher, which is connected
 *	  to none, and by the bridges.
 */
#include "postgres.h"

#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_database.h"
#include "miscadmin.h"
#include "storage/lock.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "worker/worker.h"

/*
 * Templates are left alone because a connection there makes CREATE DATABASE
 * fail; datconnlimit -2 marks what an interrupted DROP DATABASE left.
 */
static bool
takes_workers(Form_pg_database db)
{
	return db->datallowconn && !db->datistemplate && db->datconnlimit != -2;
}

List *
dq_databases_list(Oid only)
{
	MemoryContext context = CurrentMemoryContext;
	List	   *list = NIL;
	Relation	rel;
	TableScanDesc scan;
	HeapTuple	tuple;

	StartTransactionCommand();
	(void) GetTransactionSnapshot();
	rel = table_open(DatabaseRelationId, AccessShareLock);
	scan = table_beginscan_catalog(rel, 0, NULL);
	while ((tuple = heap_getnext(scan, ForwardScanDirection)) != NULL)
	{
		Form_pg_database form = (Form_pg_database) GETSTRUCT(tuple);
		DqDatabaseName *db;
		MemoryContext old;

		if (!takes_workers(form) || (OidIsValid(only) && form->oid != only))
			continue;
		old = MemoryContextSwitchTo(context);
		db = palloc(sizeof(*db));
		db->oid = form->oid;
		namestrcpy((Name) db->name, NameStr(form->datname));
		list = lappend(list, db);
		MemoryContextSwitchTo(old);
	}
	table_endscan(scan);
	table_close(rel, AccessShareLock);
	CommitTransactionCommand();
	MemoryContextSwitchTo(context);
	return list;
}

DqDatabaseName *
dq_databases_find(List *databases, Oid oid)
{
	ListCell   *lc;

	foreach(lc, databases)
	{
		DqDatabaseName *db = lfirst(lc);

		if (db->oid == oid)
			return db;
	}
	return NULL;
}

bool
dq_database_takes_workers(void)
{
	HeapTuple	tuple = SearchSysCache1(DATABASEOID, ObjectIdGetDatum(MyDatabaseId));
	bool		result;

	if (!HeapTupleIsValid(tuple))
		return false;
	result = takes_workers((Form_pg_database) GETSTRUCT(tuple));
	ReleaseSysCache(tuple);
	return result;
}

/*
 * DROP DATABASE, CREATE DATABASE ... TEMPLATE, RENAME and SET TABLESPACE lock
 * the database first and then wait 5 seconds for other connections to go. The
 * lock table is the whole cluster's, so the launcher can ask as well.
 */
bool
dq_database_is_waited_for(Oid dboid)
{
	LOCKTAG		tag;
	VirtualTransactionId *conflicts;
	int			n;

	SET_LOCKTAG_OBJECT(tag, InvalidOid, DatabaseRelationId, dboid, 0);
	conflicts = GetLockConflicts(&tag, RowExclusiveLock, &n);
	pfree(conflicts);
	return n > 0;
}
