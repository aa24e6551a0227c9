/*
 * ddl.c
 *	  The event trigger of CREATE and ALTER. At creation of a queue it writes its
 *	  Redis name into its options, so that a later rename moves nothing, and checks
 *	  what CREATE FOREIGN TABLE itself cannot: columns, name, other tables on the
 *	  same queue. At every change it tells the workers.
 *
 *	  It runs in every session of the database that executes such a command, with
 *	  that user's rights and search_path: nothing in here looks up a name.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/indexing.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_class.h"
#include "catalog/pg_foreign_server.h"
#include "catalog/pg_foreign_table.h"
#include "catalog/pg_user_mapping.h"
#include "commands/event_trigger.h"
#include "commands/defrem.h"
#include "executor/spi.h"
#include "foreign/foreign.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "nodes/parsenodes.h"
#include "utils/builtins.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/syscache.h"

#include "api/ddl.h"
#include "compat.h"
#include "outbox/outbox.h"
#include "queue/options.h"
#include "queue/queue.h"
#include "shared/shared.h"

PG_FUNCTION_INFO_V1(dq_on_ddl);

/* Objects as one of the event trigger functions of the server lists them. */
List *
dq_ddl_objects(const char *query)
{
	MemoryContext caller = CurrentMemoryContext;
	List	   *result = NIL;

	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	if (SPI_execute(query, true, 0) != SPI_OK_SELECT)
		elog(ERROR, "could not list the objects of a command");
	for (uint64 i = 0; i < SPI_processed; i++)
	{
		HeapTuple	tuple = SPI_tuptable->vals[i];
		TupleDesc	desc = SPI_tuptable->tupdesc;
		bool		no_class;
		bool		no_object;
		Datum		classid = SPI_getbinval(tuple, desc, 1, &no_class);
		Datum		objid = SPI_getbinval(tuple, desc, 2, &no_object);
		DdlObject  *object;
		MemoryContext old;

		if (no_class || no_object)
			continue;			/* GRANT and the like name no object */
		old = MemoryContextSwitchTo(caller);
		object = palloc(sizeof(DdlObject));
		object->classid = DatumGetObjectId(classid);
		object->objid = DatumGetObjectId(objid);
		result = lappend(result, object);
		MemoryContextSwitchTo(old);
	}
	SPI_finish();
	return result;
}

EventTriggerData *
dq_ddl_trigger(FunctionCallInfo fcinfo)
{
	if (!CALLED_AS_EVENT_TRIGGER(fcinfo))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_EVENT_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("function is called by the event triggers of dq_bridge only"),
				 errhint("CREATE EXTENSION dq_bridge makes them.")));
	return (EventTriggerData *) fcinfo->context;
}

/* ---- creation and change of queues --------------------------------------------- */

/* Is one of these options named by an ALTER ... OPTIONS of the statement? */
static const char *
option_touched(Node *statement, const char *const *names)
{
	List	   *lists = NIL;
	ListCell   *lc;

	if (IsA(statement, AlterTableStmt))
	{
		foreach(lc, ((AlterTableStmt *) statement)->cmds)
		{
			AlterTableCmd *cmd = lfirst_node(AlterTableCmd, lc);

			if (cmd->subtype == AT_GenericOptions)
				lists = lappend(lists, cmd->def);
		}
	}
	else if (IsA(statement, AlterForeignServerStmt))
		lists = list_make1(((AlterForeignServerStmt *) statement)->options);

	foreach(lc, lists)
	{
		ListCell   *option;

		foreach(option, (List *) lfirst(lc))
		{
			DefElem    *def = lfirst_node(DefElem, option);

			for (const char *const *name = names; *name; name++)
			{
				if (strcmp(def->defname, *name) == 0)
					return *name;
			}
		}
	}
	return NULL;
}

/*
 * Write option queue = the table's name. Straight into the catalog: the command
 * still holds its lock, and an ALTER of ours would fire everybody's event
 * triggers again.
 */
static void
fix_name(Oid relid)
{
	Relation	rel = table_open(ForeignTableRelationId, RowExclusiveLock);
	HeapTuple	tuple = SearchSysCacheCopy1(FOREIGNTABLEREL, ObjectIdGetDatum(relid));
	Datum		values[Natts_pg_foreign_table] = {0};
	bool		nulls[Natts_pg_foreign_table] = {0};
	bool		replace[Natts_pg_foreign_table] = {0};
	Datum		options;
	bool		isnull;
	ForeignDataWrapper *wrapper = GetForeignDataWrapper(dq_wrapper_oid());
	DefElem    *def;

	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for foreign table %u", relid);
	options = SysCacheGetAttr(FOREIGNTABLEREL, tuple,
							  Anum_pg_foreign_table_ftoptions, &isnull);
	if (isnull)
		options = PointerGetDatum(NULL);

	def = makeDefElem("queue", (Node *) makeString(get_rel_name(relid)), -1);
	def->defaction = DEFELEM_ADD;
	options = transformGenericOptions(ForeignTableRelationId, options,
									  list_make1(def), wrapper->fdwvalidator);
	values[Anum_pg_foreign_table_ftoptions - 1] = options;
	replace[Anum_pg_foreign_table_ftoptions - 1] = true;
	tuple = heap_modify_tuple(tuple, RelationGetDescr(rel), values, nulls, replace);
	CatalogTupleUpdate(rel, &tuple->t_self, tuple);
	CacheInvalidateRelcacheByRelid(relid);
	heap_freetuple(tuple);
	table_close(rel, RowExclusiveLock);
	CommandCounterIncrement();
}

/* All keys of every shard in one hash slot each? */
static void
check_name(const DqQueue *queue)
{
	for (int i = 0; i < queue->nshards; i++)
	{
		if (!dq_name_is_one_slot(dq_shard_name(queue->name, queue->nshards, i)))
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_NAME),
					 errmsg("keys of queue \"%s\" would fall into different hash slots of Redis",
							pg_any_to_server(queue->name, strlen(queue->name), PG_UTF8)),
					 errhint("Use a name without braces, or with one non-empty part in braces, such as \"{orders}timeout\".")));
	}
}

static bool
same_text(const char *a, const char *b)
{
	return a == b || (a && b && strcmp(a, b) == 0);
}

/* Do two servers lead to the same Redis database? As far as options tell. */
static bool
same_redis(const DqQueue *a, const DqQueue *b)
{
	const DqTarget *x;
	const DqTarget *y;

	if (a->serverid == b->serverid)
		return true;
	x = &dq_server_get(a->serverid, a->owner, false)->target;
	y = &dq_server_get(b->serverid, b->owner, false)->target;
	if (x->database != y->database)
		return false;
	if (x->socket || y->socket)
		return same_text(x->socket, y->socket);
	return same_text(x->host, y->host) && x->port == y->port;
}

static int
key_cmp(const void *a, const void *b)
{
	const DqArg *x = a,
			   *y = b;
	int			cmp = memcmp(x->data, y->data, Min(x->len, y->len));

	return cmp != 0 ? cmp : (x->len > y->len) - (x->len < y->len);
}

/* Every key of every shard, sorted. */
static DqArg *
all_keys(const DqQueue *queue)
{
	DqArg	   *keys = palloc(queue->nshards * DQ_NUM_KEYS * sizeof(DqArg));

	for (int i = 0; i < queue->nshards; i++)
	{
		DqKeys		shard;

		dq_keys_make(&shard, dq_shard_name(queue->name, queue->nshards, i));
		memcpy(keys + i * DQ_NUM_KEYS, shard.key, sizeof(shard.key));
	}
	qsort(keys, queue->nshards * DQ_NUM_KEYS, sizeof(DqArg), key_cmp);
	return keys;
}

/*
 * Do two queues share a key in Redis? Names may differ and still do so: x and {x}
 * have the same pending set, x over two shards has the ready list x#0, and so on.
 */
static bool
keys_meet(const DqQueue *a, const DqQueue *b)
{
	DqArg	   *mine,
			   *theirs;
	int			nmine = a->nshards * DQ_NUM_KEYS;
	int			ntheirs = b->nshards * DQ_NUM_KEYS;

	if (strcmp(a->name, b->name) == 0)
		return true;			/* of whatever number of shards */
	mine = all_keys(a);
	theirs = all_keys(b);
	for (int i = 0, j = 0; i < nmine && j < ntheirs;)
	{
		int			cmp = key_cmp(&mine[i], &theirs[j]);

		if (cmp == 0)
			return true;
		if (cmp < 0)
			i++;
		else
			j++;
	}
	return false;
}

static bool
has_destination(const DqQueue *queue)
{
	static const char *const names[] = {
		"destination", "stream_maxlen", "sink", "handler", "notify"
	};
	List	   *options = GetForeignTable(queue->relid)->options;

	for (int i = 0; i < lengthof(names); i++)
	{
		if (dq_option_given(options, names[i]))
			return true;
	}
	return false;
}

/*
 * Several tables may show one queue, but there is one truth about whose it is,
 * where it is, how it is laid out and where its due tasks go.
 *
 * A dump creates every table as the superuser that restores it and then gives it
 * to its owner, so a superuser is only warned of another owner at creation.
 */
static void
check_others(const DqQueue *queue, bool created)
{
	List	   *others = dq_queue_list(InvalidOid);
	ListCell   *lc;

	foreach(lc, others)
	{
		const DqQueue *other;
		const char *what = NULL;

		if (lfirst_oid(lc) == queue->relid)
			continue;
		other = dq_table_get_noerror(lfirst_oid(lc));
		if (other == NULL || !keys_meet(queue, other) || !same_redis(queue, other))
			continue;

		if (other->serverid != queue->serverid)
			what = "server";
		else if (strcmp(other->name, queue->name) != 0)
			what = "name";
		else if (other->owner != queue->owner && !(created && superuser()))
			what = "owner";
		else if (other->nshards != queue->nshards)
			what = "option \"shards\"";
		else if (other->contents != DQ_CONTENTS_PENDING ||
				 queue->contents != DQ_CONTENTS_PENDING)
			;					/* the rest is said by one of them only */
		else if (other->index != queue->index)
			what = "option \"index\"";
		else if (other->producer != queue->producer)
			what = "option \"role\"";
		if (what)
			ereport(ERROR,
					(errcode(ERRCODE_DUPLICATE_OBJECT),
					 errmsg("foreign tables \"%s\" and \"%s\" show the same queue in Redis",
							queue->relname, other->relname),
					 errdetail("They differ in their %s.", what),
					 errhint("Give them the same, or another name in Redis with option \"queue\".")));
		if (has_destination(queue) && has_destination(other))
			ereport(ERROR,
					(errcode(ERRCODE_DUPLICATE_OBJECT),
					 errmsg("foreign tables \"%s\" and \"%s\" both say where due tasks of one queue go",
							queue->relname, other->relname),
					 errhint("Leave the destination options to one of them.")));
		if (other->owner != queue->owner)
			ereport(WARNING,
					(errcode(ERRCODE_WARNING),
					 errmsg("foreign tables \"%s\" and \"%s\" show the same queue in Redis and have different owners",
							queue->relname, other->relname),
					 errhint("ALTER FOREIGN TABLE %s OWNER TO %s;",
							 quote_identifier(queue->relname),
							 quote_identifier(GetUserNameFromId(other->owner, false)))));
	}
}

static bool
table_is_ours(Oid relid)
{
	HeapTuple	tuple = SearchSysCache1(FOREIGNTABLEREL, ObjectIdGetDatum(relid));
	bool		ours;

	if (!HeapTupleIsValid(tuple))
		return false;
	ours = GetForeignServer(((Form_pg_foreign_table) GETSTRUCT(tuple))->ftserver)->fdwid ==
		dq_wrapper_oid();
	ReleaseSysCache(tuple);
	return ours;
}

/*
 * A session logged in as the owner delivers into his sink. That is said where a sink is
 * given; a queue that gets such an owner later is parked.
 */
static void
check_login(const DqQueue *queue, Node *statement)
{
#ifdef DQ_EXECUTOR_NEEDS_LOGIN
	static const char *const names[] = {"sink", NULL};
	HeapTuple	tuple;
	bool		may;

	if (queue->sink == NULL || queue->producer ||
		(IsA(statement, AlterTableStmt) && !option_touched(statement, names)))
		return;
	tuple = SearchSysCache1(AUTHOID, ObjectIdGetDatum(queue->owner));
	if (!HeapTupleIsValid(tuple))
		return;
	may = ((Form_pg_authid) GETSTRUCT(tuple))->rolcanlogin;
	ReleaseSysCache(tuple);
	if (!may)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("owner \"%s\" of queue \"%s\" is not permitted to log in",
						GetUserNameFromId(queue->owner, false), queue->relname),
				 errdetail("Due tasks are delivered by a session of the owner."),
				 errhint("ALTER ROLE %s LOGIN; a password is not needed. PostgreSQL 17 does not need it.",
						 quote_identifier(GetUserNameFromId(queue->owner, false)))));
#endif
}

/*
 * The sink may go when no batch is on its way: a queue without one has nobody who would
 * finish it, and its tasks would be nowhere.
 */
static void
check_no_batch(DqQueue *queue, Node *statement)
{
	static const char *const names[] = {"sink", NULL};

	if (queue->sink != NULL || !IsA(statement, AlterTableStmt) ||
		!option_touched(statement, names))
		return;
	dq_shards_resolve(queue);
	for (int i = 0; i < queue->nshards; i++)
	{
		DqShardStats stats;
		const DqDelivery *d = &stats.delivery;

		if (dq_queue_is_paused(queue) &&
			dq_stats_get(MyDatabaseId, queue->shard_no[i], &stats) && stats.seen_at != 0 &&
			!d->open && d->given == d->taken && d->answered == d->taken &&
			d->in_flight == 0 && stats.lent == 0)
			continue;
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("option \"sink\" of queue \"%s\" cannot be dropped while tasks may be on their way to it",
						queue->relname),
				 errhint("SELECT dq_pause('%s'); and try again a second later. If its table is gone, SET the option to another one first.",
						 queue->relname)));
	}
}

/* What can be said of a table by itself. Its name in Redis, NULL: no queue. */
static const char *
define_table(Oid relid, Node *statement)
{
	static const char *const fixed[] = {"queue", "shards", "contents", NULL};
	const char *touched;
	DqQueue    *queue;

	if (!table_is_ours(relid))
		return NULL;

	touched = option_touched(statement, fixed);
	if (touched)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("option \"%s\" of a queue cannot be changed", touched),
				 strcmp(touched, "contents") == 0 ?
				 errhint("Create another foreign table for the other contents.") :
				 errhint("Create another queue and offer to that one; this one can be dropped when it is empty.")));
	if (get_rel_persistence(relid) != RELPERSISTENCE_PERMANENT)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("a queue cannot be a temporary table"),
				 errhint("Create it in an ordinary schema.")));

	if (!dq_option_given(GetForeignTable(relid)->options, "queue"))
		fix_name(relid);

	queue = dq_table_get(relid);
	check_login(queue, statement);
	check_no_batch(queue, statement);
	dq_ddl_check_columns(queue);
	dq_ddl_check_contents(queue);
	check_name(queue);
	return pstrdup(queue->name);
}

static int
name_cmp(const ListCell *a, const ListCell *b)
{
	return strcmp(lfirst(a), lfirst(b));
}

/*
 * Two transactions that define one queue at the same time would not see each
 * other's table: one after the other, the locks in one order.
 */
static void
on_tables(List *relids, Node *statement)
{
	bool		created = !IsA(statement, AlterTableStmt) && !IsA(statement, RenameStmt);
	List	   *queues = NIL;
	List	   *kin = NIL;
	ListCell   *lc;

	foreach(lc, relids)
	{
		const char *name = define_table(lfirst_oid(lc), statement);

		if (name == NULL)
			continue;
		queues = lappend_oid(queues, lfirst_oid(lc));
		kin = lappend(kin, dq_name_kin(name));
	}
	list_sort(kin, name_cmp);
	foreach(lc, kin)
		dq_name_lock(lfirst(lc));

	foreach(lc, queues)
	{
		DqQueue    *queue = dq_table_get(lfirst_oid(lc));

		check_others(queue, created);
		if (queue->contents == DQ_CONTENTS_PENDING)
			dq_shards_resolve(queue);
		dq_xact_touched(queue->serverid);
	}
}

static void
on_server(Oid serverid, Node *statement)
{
	static const char *const fixed[] = {"key_prefix", NULL};
	ForeignServer *server = GetForeignServerExtended(serverid, FSV_MISSING_OK);

	if (server == NULL || server->fdwid != dq_wrapper_oid())
		return;
	if (option_touched(statement, fixed) && dq_queue_list(serverid) != NIL)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("option \"key_prefix\" cannot be changed while server \"%s\" has queues",
						server->servername),
				 errdetail("Every queue would get another name in Redis and leave its tasks behind."),
				 errhint("Create another server with that key_prefix.")));
	dq_xact_touched(serverid);
}

static void
on_user_mapping(Oid umid)
{
	HeapTuple	tuple = SearchSysCache1(USERMAPPINGOID, ObjectIdGetDatum(umid));
	Oid			serverid;
	ForeignServer *server;

	if (!HeapTupleIsValid(tuple))
		return;
	serverid = ((Form_pg_user_mapping) GETSTRUCT(tuple))->umserver;
	ReleaseSysCache(tuple);
	server = GetForeignServerExtended(serverid, FSV_MISSING_OK);
	if (server && server->fdwid == dq_wrapper_oid())
		dq_xact_touched(serverid);
}

Datum
dq_on_ddl(PG_FUNCTION_ARGS)
{
	EventTriggerData *data = dq_ddl_trigger(fcinfo);
	List	   *objects;
	List	   *tables = NIL;
	ListCell   *lc;

	if (IsBinaryUpgrade || !OidIsValid(dq_wrapper_oid()))
		PG_RETURN_NULL();

	objects = dq_ddl_objects("SELECT classid, objid"
							 " FROM pg_catalog.pg_event_trigger_ddl_commands()");
	foreach(lc, objects)
	{
		DdlObject  *object = lfirst(lc);

		if (object->classid == RelationRelationId)
			tables = list_append_unique_oid(tables, object->objid);
		else if (object->classid == ForeignServerRelationId)
			on_server(object->objid, data->parsetree);
		else if (object->classid == UserMappingRelationId)
			on_user_mapping(object->objid);
	}
	on_tables(tables, data->parsetree);
	PG_RETURN_NULL();
}
