/*
 * look.c
 *	  What is in the connected database: the extension, its version, its servers.
 *	  The bridges look when they start and when the catalogs have changed.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/indexing.h"
#include "catalog/pg_extension.h"
#include "foreign/foreign.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "queue/queue.h"
#include "shared/shared.h"
#include "worker/worker.h"

/*
 * An update of the extension need not touch a catalog that has a cache, so a
 * look falls due by itself as well.
 */
#define LOOK_INTERVAL_MS 60000

static bool look_due = true;
static TimestampTz looked_at = 0;

static void
catalogs_changed(Datum arg, int cacheid, uint32 hashvalue)
{
	look_due = true;
}

bool
dq_look_is_due(void)
{
	return look_due ||
		TimestampDifferenceExceeds(looked_at, GetCurrentTimestamp(), LOOK_INTERVAL_MS);
}

void
dq_look_expect(void)
{
	look_due = true;
}

/*
 * A library that was written for other SQL objects must not touch them. The
 * name identifies the extension: it is unique in its database.
 */
static void
read_extension(DqLookResult *result)
{
	Relation	rel = table_open(ExtensionRelationId, AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;

	ScanKeyInit(&key, Anum_pg_extension_extname, BTEqualStrategyNumber, F_NAMEEQ,
				CStringGetDatum("dq_bridge"));
	scan = systable_beginscan(rel, ExtensionNameIndexId, true, NULL, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
	{
		bool		isnull;
		Datum		version = heap_getattr(tuple, Anum_pg_extension_extversion,
										   RelationGetDescr(rel), &isnull);

		result->extension = ((Form_pg_extension) GETSTRUCT(tuple))->oid;
		if (!isnull)
			strlcpy(result->version, TextDatumGetCString(version),
					sizeof(result->version));
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
}

void
dq_look(DqLookResult *result)
{
	static bool registered = false;
	MemoryContext context = CurrentMemoryContext;
	uint32		pokes = dq_database_pokes(MyDatabaseId);

	if (!registered)
	{
		CacheRegisterSyscacheCallback(FOREIGNDATAWRAPPEROID, catalogs_changed, (Datum) 0);
		CacheRegisterSyscacheCallback(FOREIGNSERVEROID, catalogs_changed, (Datum) 0);
		CacheRegisterSyscacheCallback(DATABASEOID, catalogs_changed, (Datum) 0);
		CacheRegisterSyscacheCallback(PROCOID, catalogs_changed, (Datum) 0);
		registered = true;
	}

	memset(result, 0, sizeof(*result));
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	look_due = false;
	looked_at = GetCurrentTimestamp();

	read_extension(result);
	if (!dq_database_takes_workers())
		result->look = DQ_LOOK_CLOSED;
	else if (!OidIsValid(result->extension) || !OidIsValid(dq_wrapper_oid()))
		result->look = DQ_LOOK_GONE;
	else
	{
		ListCell   *lc;
		bool		wake = false;

		/* of another version: its bridges are wanted, and say why they leave */
		if (!dq_sql_version_fits(result->version))
			result->look = DQ_LOOK_VERSION;
		else
			result->look = DQ_LOOK_HERE;
		foreach(lc, dq_server_list())
		{
			ForeignServer *server = GetForeignServerExtended(lfirst_oid(lc),
															 FSV_MISSING_OK);
			MemoryContext old;

			if (server == NULL)
				continue;
			wake |= dq_worker_want(DQ_ROLE_BRIDGE, MyDatabaseId, server->serverid, server->servername);
			old = MemoryContextSwitchTo(context);
			result->servers = lappend_oid(result->servers, server->serverid);
			MemoryContextSwitchTo(old);
		}
		if (wake)
			dq_wake_launcher();
	}

	PopActiveSnapshot();
	CommitTransactionCommand();
	MemoryContextSwitchTo(context);

	dq_database_looked(MyDatabaseId, pokes,
					   result->look == DQ_LOOK_HERE || result->look == DQ_LOOK_VERSION);
}

/*
 * DROP EXTENSION locks the extension before anything that belongs to it. With
 * this lock a round is either over before the drop begins, or does not start:
 * the two never wait for each other's tables, so they cannot deadlock. A session
 * lock, because a round has several transactions and waits for Redis outside of
 * them; dq_extension_is_waited_for cuts such a wait short.
 */
bool
dq_extension_enter(Oid extension)
{
	LOCKTAG		tag;

	SET_LOCKTAG_OBJECT(tag, MyDatabaseId, ExtensionRelationId, extension, 0);
	return LockAcquire(&tag, AccessShareLock, true, true) != LOCKACQUIRE_NOT_AVAIL;
}

void
dq_extension_exit(Oid extension)
{
	LOCKTAG		tag;

	SET_LOCKTAG_OBJECT(tag, MyDatabaseId, ExtensionRelationId, extension, 0);
	(void) LockRelease(&tag, AccessShareLock, true);
}

/* While it is held. */
bool
dq_extension_is_waited_for(Oid extension)
{
	LOCKTAG		tag;

	SET_LOCKTAG_OBJECT(tag, MyDatabaseId, ExtensionRelationId, extension, 0);
	return LockHasWaiters(&tag, AccessShareLock, true);
}
