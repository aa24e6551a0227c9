/*
 * catalog.c
 *	  Where the extension is, and which servers and queues there are. Found by the
 *	  extension itself and never by search_path; what does not change while the
 *	  extension stays is kept per backend.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/indexing.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_foreign_data_wrapper.h"
#include "catalog/pg_foreign_server.h"
#include "catalog/pg_foreign_table.h"
#include "foreign/foreign.h"
#include "utils/builtins.h"
#include "utils/catcache.h"
#include "utils/fmgroids.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/syscache.h"

#include "queue/queue.h"

#define EXTENSION_NAME "dq_bridge"
#define WRAPPER_NAME "dq_bridge"

typedef struct RelationEntry
{
	char		name[NAMEDATALEN];	/* hash key */
	Oid			relid;
} RelationEntry;

static HTAB *relations = NULL;	/* of the extension */

/* moved by every invalidation, so that one during a lookup is not missed */
static uint64 invalidations = 0;

static bool extension_known = false;
static char sql_version[32];
static Oid	extension_schema = InvalidOid;
static Oid	extension_wrapper = InvalidOid;

static void
forget(void)
{
	HASH_SEQ_STATUS status;
	RelationEntry *entry;

	invalidations++;
	extension_known = false;
	hash_seq_init(&status, relations);
	while ((entry = hash_seq_search(&status)) != NULL)
		entry->relid = InvalidOid;
}

/*
 * DROP EXTENSION drops the wrapper, CREATE EXTENSION makes one: its
 * invalidation tells that the extension came or went, maybe to another schema.
 */
static void
wrapper_inval(Datum arg, int cacheid, uint32 hashvalue)
{
	forget();
}

/* Only the message that everything may have changed counts. */
static void
relation_inval(Datum arg, Oid relid)
{
	if (!OidIsValid(relid))
		forget();
}

static void
cache_init(void)
{
	HASHCTL		ctl = {0};

	if (relations != NULL)
		return;
	if (CacheMemoryContext == NULL)
		CreateCacheMemoryContext();

	ctl.hcxt = CacheMemoryContext;
	ctl.keysize = NAMEDATALEN;
	ctl.entrysize = sizeof(RelationEntry);
	relations = hash_create("dq_bridge relations", 16, &ctl,
							HASH_ELEM | HASH_STRINGS | HASH_CONTEXT);
	CacheRegisterRelcacheCallback(relation_inval, (Datum) 0);
	CacheRegisterSyscacheCallback(FOREIGNDATAWRAPPEROID, wrapper_inval, (Datum) 0);
}

/* ---- the extension -------------------------------------------------------------- */

bool
dq_sql_version_fits(const char *version)
{
	return strcmp(version, DQ_SQL_VERSION) == 0 ||
		strcmp(version, DQ_SQL_VERSION_PREVIOUS) == 0;
}

static Oid
find_extension_schema(void)
{
	Relation	rel = table_open(ExtensionRelationId, AccessShareLock);
	SysScanDesc scan;
	ScanKeyData key;
	HeapTuple	tuple;
	Oid			result = InvalidOid;

	ScanKeyInit(&key, Anum_pg_extension_extname, BTEqualStrategyNumber, F_NAMEEQ,
				CStringGetDatum(EXTENSION_NAME));
	scan = systable_beginscan(rel, ExtensionNameIndexId, true, NULL, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
	{
		bool		isnull;
		Datum		version = heap_getattr(tuple, Anum_pg_extension_extversion,
										   RelationGetDescr(rel), &isnull);

		result = ((Form_pg_extension) GETSTRUCT(tuple))->extnamespace;
		strlcpy(sql_version, isnull ? "" : TextDatumGetCString(version), sizeof(sql_version));
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return result;
}

static void
extension_lookup(void)
{
	uint64		before;
	Oid			schema;
	Oid			wrapper = InvalidOid;

	cache_init();
	if (extension_known)
		return;

	before = invalidations;
	schema = find_extension_schema();
	if (OidIsValid(schema))
	{
		wrapper = get_foreign_data_wrapper_oid(WRAPPER_NAME, true);
		/* somebody else's wrapper of that name is none of ours */
		if (OidIsValid(wrapper) &&
			get_func_namespace(GetForeignDataWrapper(wrapper)->fdwhandler) != schema)
			wrapper = InvalidOid;
	}
	extension_schema = schema;
	extension_wrapper = wrapper;
	/* no wrapper yet: the extension's script is running */
	extension_known = before == invalidations && OidIsValid(wrapper);
}

Oid
dq_extension_schema(void)
{
	if (!extension_known)
		extension_lookup();
	return extension_schema;
}

Oid
dq_wrapper_oid(void)
{
	if (!extension_known)
		extension_lookup();
	return extension_wrapper;
}

Oid
dq_extension_relation(const char *name)
{
	RelationEntry *entry;
	Oid			schema;
	Oid			relid;
	uint64		before;
	bool		found;

	cache_init();
	entry = hash_search(relations, name, HASH_FIND, NULL);
	if (entry && OidIsValid(entry->relid))
		return entry->relid;

	before = invalidations;
	schema = dq_extension_schema();
	if (!OidIsValid(schema))
		return InvalidOid;
	if (!dq_sql_version_fits(sql_version))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("extension dq_bridge has version \"%s\", but its library is of version \"%s\"",
						sql_version, DQ_SQL_VERSION),
				 errhint("ALTER EXTENSION dq_bridge UPDATE;")));
	relid = get_relname_relid(name, schema);
	if (OidIsValid(relid) && before == invalidations)
	{
		entry = hash_search(relations, name, HASH_ENTER, &found);
		entry->relid = relid;
	}
	return relid;
}

/* ---- lists ------------------------------------------------------------------------ */

List *
dq_server_list(void)
{
	Oid			wrapper = dq_wrapper_oid();
	Relation	rel;
	SysScanDesc scan;
	HeapTuple	tuple;
	List	   *result = NIL;

	if (!OidIsValid(wrapper))
		return NIL;
	rel = table_open(ForeignServerRelationId, AccessShareLock);
	scan = systable_beginscan(rel, InvalidOid, false, NULL, 0, NULL);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Form_pg_foreign_server form = (Form_pg_foreign_server) GETSTRUCT(tuple);

		if (form->srvfdw == wrapper)
			result = lappend_oid(result, form->oid);
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	list_sort(result, list_oid_cmp);
	return result;
}

List *
dq_queue_list(Oid serverid)
{
	List	   *ours = dq_server_list();
	Relation	rel;
	SysScanDesc scan;
	HeapTuple	tuple;
	List	   *result = NIL;

	if (ours == NIL)
		return NIL;
	rel = table_open(ForeignTableRelationId, AccessShareLock);
	scan = systable_beginscan(rel, InvalidOid, false, NULL, 0, NULL);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Form_pg_foreign_table form = (Form_pg_foreign_table) GETSTRUCT(tuple);

		if (OidIsValid(serverid) ? form->ftserver == serverid :
			list_member_oid(ours, form->ftserver))
			result = lappend_oid(result, form->ftrelid);
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	list_sort(result, list_oid_cmp);
	return result;
}
