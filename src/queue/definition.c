/*
 * definition.c
 *	  What the catalogs say about queues and their servers, kept per backend until
 *	  an invalidation. dq_offer asks for every row, so a hit must cost no more than
 *	  a hash lookup; workers ask without holding a lock on the queue, so nothing in
 *	  here opens the foreign table or locks it: the system caches are enough.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/reloptions.h"
#include "access/xact.h"
#include "catalog/pg_attribute.h"
#include "catalog/pg_class.h"
#include "catalog/pg_foreign_server.h"
#include "catalog/pg_foreign_table.h"
#include "catalog/pg_type.h"
#include "catalog/pg_user_mapping.h"
#include "foreign/foreign.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/catcache.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/syscache.h"

#include "queue/options.h"
#include "queue/queue.h"

static const char *const column_names[DQ_NUM_COLS] = {
	[DQ_COL_ID] = "id",
	[DQ_COL_KEY] = "key",
	[DQ_COL_PAYLOAD] = "payload",
	[DQ_COL_DUE_AT] = "due_at",
	[DQ_COL_SHARD] = "shard",
	[DQ_COL_MEMBER] = "member",
	[DQ_COL_REASON] = "reason",
	[DQ_COL_FOUND_AT] = "found_at",
};

/* ---- the caches --------------------------------------------------------------- */

typedef struct QueueEntry
{
	Oid			relid;			/* hash key */
	DqQueue    *queue;			/* in a memory context of its own */
} QueueEntry;

typedef struct ServerKey
{
	Oid			serverid;
	Oid			user;
} ServerKey;

typedef struct ServerEntry
{
	ServerKey	key;
	bool		valid;
	DqServer   *server;			/* in a memory context of its own */
} ServerEntry;

static HTAB *queues = NULL;
static HTAB *servers = NULL;
static DqQueue *last_queue = NULL;	/* what the previous call returned */

/* moved by every invalidation, so that one during a build is not missed */
static uint64 invalidations = 0;

static void
forget_queues(Oid relid)
{
	invalidations++;
	if (queues == NULL)
		return;
	if (OidIsValid(relid))
	{
		QueueEntry *entry = hash_search(queues, &relid, HASH_FIND, NULL);

		if (entry && entry->queue)
			entry->queue->valid = false;
	}
	else
	{
		HASH_SEQ_STATUS status;
		QueueEntry *entry;

		hash_seq_init(&status, queues);
		while ((entry = hash_seq_search(&status)) != NULL)
		{
			if (entry->queue)
				entry->queue->valid = false;
		}
	}
}

static void
relation_inval(Datum arg, Oid relid)
{
	forget_queues(relid);
}

static void
server_inval(Datum arg, int cacheid, uint32 hashvalue)
{
	HASH_SEQ_STATUS status;
	ServerEntry *entry;

	/* a queue's name begins with its server's key_prefix */
	forget_queues(InvalidOid);
	hash_seq_init(&status, servers);
	while ((entry = hash_seq_search(&status)) != NULL)
		entry->valid = false;
}

static void
caches_init(void)
{
	HASHCTL		ctl = {0};

	if (servers != NULL)
		return;
	if (CacheMemoryContext == NULL)
		CreateCacheMemoryContext();

	ctl.hcxt = CacheMemoryContext;
	ctl.keysize = sizeof(Oid);
	ctl.entrysize = sizeof(QueueEntry);
	queues = hash_create("dq_bridge queues", 32, &ctl,
						 HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
	ctl.keysize = sizeof(ServerKey);
	ctl.entrysize = sizeof(ServerEntry);
	servers = hash_create("dq_bridge servers", 8, &ctl,
						  HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);

	CacheRegisterRelcacheCallback(relation_inval, (Datum) 0);
	CacheRegisterSyscacheCallback(FOREIGNSERVEROID, server_inval, (Datum) 0);
	CacheRegisterSyscacheCallback(USERMAPPINGOID, server_inval, (Datum) 0);
	CacheRegisterSyscacheCallback(FOREIGNDATAWRAPPEROID, server_inval, (Datum) 0);
}

/*
 * Free an outdated definition at the end of the transaction only: callers
 * further up may still hold it.
 */
static void
retire(void *definition)
{
	if (definition)
		MemoryContextSetParent(GetMemoryChunkContext(definition),
							   TopTransactionContext);
}

/* ---- servers ---------------------------------------------------------------------- */

static List *
options_of(int cacheid, HeapTuple tuple, AttrNumber attno)
{
	bool		isnull;
	Datum		value = SysCacheGetAttr(cacheid, tuple, attno, &isnull);

	return isnull ? NIL : untransformRelOptions(value);
}

static char *
copy_or_null(const char *str)
{
	return str ? pstrdup(str) : NULL;
}

/*
 * Build in a new memory context below the current one, so that an error leaves
 * nothing behind; the caller moves it under CacheMemoryContext. NULL: there is
 * no such server of our wrapper.
 */
static DqServer *
build_server(Oid serverid, Oid user)
{
	MemoryContext context;
	MemoryContext old;
	DqServer   *server;
	HeapTuple	tuple;
	Form_pg_foreign_server form;
	List	   *options;

	tuple = SearchSysCache1(FOREIGNSERVEROID, ObjectIdGetDatum(serverid));
	if (!HeapTupleIsValid(tuple))
		return NULL;
	form = (Form_pg_foreign_server) GETSTRUCT(tuple);
	if (!OidIsValid(form->srvfdw) || form->srvfdw != dq_wrapper_oid())
	{
		ReleaseSysCache(tuple);
		return NULL;
	}

	context = AllocSetContextCreate(CurrentMemoryContext, "dq_bridge server",
									ALLOCSET_SMALL_SIZES);
	old = MemoryContextSwitchTo(context);
	server = palloc0(sizeof(DqServer));
	server->serverid = serverid;
	server->owner = form->srvowner;
	server->name = pstrdup(NameStr(form->srvname));
	server->mapping_user = user;

	options = options_of(FOREIGNSERVEROID, tuple, Anum_pg_foreign_server_srvoptions);
	server->target.serverid = serverid;
	server->target.server = server->name;
	server->target.host = pstrdup(dq_option_text(options, DQ_ON_SERVER, "host"));
	server->target.port = dq_option_number(options, DQ_ON_SERVER, "port");
	server->target.socket = copy_or_null(dq_option_text(options, DQ_ON_SERVER, "socket"));
	server->target.database = dq_option_number(options, DQ_ON_SERVER, "database");
	server->target.connect_timeout =
		dq_option_number(options, DQ_ON_SERVER, "connect_timeout");
	server->target.command_timeout =
		dq_option_number(options, DQ_ON_SERVER, "command_timeout");
	server->key_prefix = pstrdup(dq_option_text(options, DQ_ON_SERVER, "key_prefix"));
	server->scan_interval = dq_option_number(options, DQ_ON_SERVER, "scan_interval");
	server->replay_window = dq_option_number(options, DQ_ON_SERVER, "replay_window");
	server->password_required =
		dq_option_number(options, DQ_ON_SERVER, "password_required") != 0;
	ReleaseSysCache(tuple);

	/* the user's mapping, else the one of PUBLIC, else no credentials */
	tuple = SearchSysCache2(USERMAPPINGUSERSERVER, ObjectIdGetDatum(user),
							ObjectIdGetDatum(serverid));
	if (!HeapTupleIsValid(tuple))
		tuple = SearchSysCache2(USERMAPPINGUSERSERVER,
								ObjectIdGetDatum(InvalidOid),
								ObjectIdGetDatum(serverid));
	if (HeapTupleIsValid(tuple))
	{
		server->target.umid = ((Form_pg_user_mapping) GETSTRUCT(tuple))->oid;
		options = options_of(USERMAPPINGUSERSERVER, tuple,
							 Anum_pg_user_mapping_umoptions);
		server->target.username =
			copy_or_null(dq_option_text(options, DQ_ON_MAPPING, "username"));
		server->target.password =
			copy_or_null(dq_option_text(options, DQ_ON_MAPPING, "password"));
		ReleaseSysCache(tuple);
	}
	MemoryContextSwitchTo(old);
	return server;
}

DqServer *
dq_server_get(Oid serverid, Oid mapping_user, bool missing_ok)
{
	ServerKey	key = {serverid, mapping_user};
	ServerEntry *entry;
	DqServer   *server;
	uint64		before;
	bool		found;

	caches_init();
	entry = hash_search(servers, &key, HASH_FIND, NULL);
	if (entry && entry->valid)
		return entry->server;

	before = invalidations;
	server = build_server(serverid, mapping_user);
	if (server == NULL)
	{
		entry = hash_search(servers, &key, HASH_FIND, NULL);
		if (entry)
		{
			retire(entry->server);
			(void) hash_search(servers, &key, HASH_REMOVE, NULL);
		}
		if (missing_ok)
			return NULL;
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("foreign server with OID %u of wrapper dq_bridge does not exist",
						serverid)));
	}

	entry = hash_search(servers, &key, HASH_ENTER, &found);
	if (found)
		retire(entry->server);
	entry->server = server;
	entry->valid = before == invalidations;
	MemoryContextSetParent(GetMemoryChunkContext(server), CacheMemoryContext);
	return server;
}

void
dq_server_check_usable(const DqServer *server)
{
	if (superuser_arg(server->owner))
		return;

	if (server->target.socket)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("server \"%s\" may not use option \"socket\"", server->name),
				 errdetail("Its owner is not a superuser."),
				 errhint("Use \"host\" and \"port\".")));

	if (server->password_required &&
		(server->target.password == NULL || server->target.password[0] == '\0'))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PASSWORD),
				 errmsg("server \"%s\" needs a password", server->name),
				 errdetail("Its owner is not a superuser, and the user mapping of the queue's owner has no password."),
				 errhint("ALTER USER MAPPING ... OPTIONS (ADD password '...'), or let a superuser set password_required to false.")));
}


/* ---- queues ------------------------------------------------------------------------- */

/* Position and input function of one column, if the table has it. */
static void
build_column(DqQueue *queue, DqColumnRole role, MemoryContext context)
{
	HeapTuple	tuple = SearchSysCacheAttName(queue->relid, column_names[role]);
	Form_pg_attribute att;
	Oid			function;

	if (!HeapTupleIsValid(tuple))
		return;
	att = (Form_pg_attribute) GETSTRUCT(tuple);
	queue->column[role] = att->attnum;

	if (role == DQ_COL_PAYLOAD)
	{
		queue->payload_type = att->atttypid;
		queue->payload_typmod = att->atttypmod;
		getTypeInputInfo(att->atttypid, &function, &queue->payload_ioparam);
		fmgr_info_cxt(function, &queue->payload_in, context);
		queue->payload_is_text = att->atttypid == TEXTOID ||
			(att->atttypid == VARCHAROID && att->atttypmod < 0);
		queue->payload_is_bytea = getBaseType(att->atttypid) == BYTEAOID;
	}
	else if (role == DQ_COL_KEY)
	{
		queue->key_type = att->atttypid;
		queue->key_typmod = att->atttypmod;
		getTypeInputInfo(att->atttypid, &function, &queue->key_ioparam);
		fmgr_info_cxt(function, &queue->key_in, context);
	}
	ReleaseSysCache(tuple);
}

/*
 * As build_server. NULL: the relation is gone or no foreign table of ours.
 */
static DqQueue *
build_queue(Oid relid)
{
	MemoryContext context;
	MemoryContext old;
	DqQueue    *queue;
	HeapTuple	class_tuple;
	HeapTuple	tuple;
	Form_pg_class form;
	const DqServer *server;
	List	   *options;
	const char *name;
	char	   *utf8;

	class_tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(relid));
	if (!HeapTupleIsValid(class_tuple))
		return NULL;
	form = (Form_pg_class) GETSTRUCT(class_tuple);
	if (form->relkind != RELKIND_FOREIGN_TABLE)
	{
		ReleaseSysCache(class_tuple);
		return NULL;
	}
	tuple = SearchSysCache1(FOREIGNTABLEREL, ObjectIdGetDatum(relid));
	if (!HeapTupleIsValid(tuple))
	{
		ReleaseSysCache(class_tuple);
		return NULL;
	}
	server = dq_server_get(((Form_pg_foreign_table) GETSTRUCT(tuple))->ftserver,
						   form->relowner, true);
	if (server == NULL)
	{
		ReleaseSysCache(tuple);
		ReleaseSysCache(class_tuple);
		return NULL;
	}

	context = AllocSetContextCreate(CurrentMemoryContext, "dq_bridge queue",
									ALLOCSET_SMALL_SIZES);
	old = MemoryContextSwitchTo(context);
	queue = palloc0(sizeof(DqQueue));
	queue->relid = relid;
	queue->serverid = server->serverid;
	queue->owner = form->relowner;
	queue->relname = pstrdup(NameStr(form->relname));

	options = options_of(FOREIGNTABLEREL, tuple, Anum_pg_foreign_table_ftoptions);
	/* the event trigger fixes it at creation; without, the table's name stands */
	name = dq_option_text(options, DQ_ON_TABLE, "queue");
	name = psprintf("%s%s", server->key_prefix, name ? name : queue->relname);
	utf8 = pg_server_to_any(name, strlen(name), PG_UTF8);
	queue->name = utf8;

	queue->nshards = dq_option_number(options, DQ_ON_TABLE, "shards");
	queue->producer = strcmp(dq_option_text(options, DQ_ON_TABLE, "role"), "producer") == 0;
	queue->index = dq_option_number(options, DQ_ON_TABLE, "index") != 0;
	queue->at_once = dq_option_number(options, DQ_ON_TABLE, "transactional") == 0;
	queue->destination =
		strcmp(dq_option_text(options, DQ_ON_TABLE, "destination"), "none") == 0 ?
		DQ_DEST_NONE : DQ_DEST_LIST;
	queue->sink = copy_or_null(dq_option_text(options, DQ_ON_TABLE, "sink"));
	queue->notify = copy_or_null(dq_option_text(options, DQ_ON_TABLE, "notify"));
	if (queue->sink)
	{
		/* list only if it says so */
		queue->list_copy = queue->destination == DQ_DEST_LIST &&
			dq_option_given(options, "destination");
		queue->destination = DQ_DEST_SINK;
	}
	queue->on_outage =
		strcmp(dq_option_text(options, DQ_ON_TABLE, "on_outage"), "error") == 0 ?
		DQ_OUTAGE_ERROR : DQ_OUTAGE_DEFER;
	queue->stop_on_loss =
		strcmp(dq_option_text(options, DQ_ON_TABLE, "on_data_loss"), "stop") == 0;
	queue->contents = (DqContents) dq_option_number(options, DQ_ON_TABLE, "contents");
	queue->remove_timeout = dq_option_number(options, DQ_ON_TABLE, "remove_timeout");

	for (int i = 0; i < DQ_NUM_COLS; i++)
		build_column(queue, i, context);
	MemoryContextSwitchTo(old);

	ReleaseSysCache(tuple);
	ReleaseSysCache(class_tuple);
	return queue;
}

DqQueue *
dq_table_get_noerror(Oid relid)
{
	QueueEntry *entry;
	DqQueue    *queue;
	uint64		before;
	bool		found;

	if (last_queue && last_queue->relid == relid && last_queue->valid)
		return last_queue;

	caches_init();
	entry = hash_search(queues, &relid, HASH_FIND, NULL);
	if (entry && entry->queue->valid)
	{
		last_queue = entry->queue;
		return entry->queue;
	}

	before = invalidations;
	queue = build_queue(relid);
	last_queue = NULL;
	if (queue == NULL)
	{
		entry = hash_search(queues, &relid, HASH_FIND, NULL);
		if (entry)
		{
			retire(entry->queue);
			(void) hash_search(queues, &relid, HASH_REMOVE, NULL);
		}
		return NULL;
	}

	entry = hash_search(queues, &relid, HASH_ENTER, &found);
	if (found)
		retire(entry->queue);
	entry->queue = queue;
	queue->valid = before == invalidations;
	MemoryContextSetParent(GetMemoryChunkContext(queue), CacheMemoryContext);
	last_queue = queue;
	return queue;
}

DqQueue *
dq_queue_get_noerror(Oid relid)
{
	DqQueue    *queue = dq_table_get_noerror(relid);

	return queue && queue->contents == DQ_CONTENTS_PENDING ? queue : NULL;
}

DqQueue *
dq_queue_get(Oid relid)
{
	DqQueue    *queue = dq_table_get(relid);

	if (queue->contents != DQ_CONTENTS_PENDING)
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 queue->contents == DQ_CONTENTS_READY ?
				 errmsg("\"%s\" shows only what is ready in its queue", queue->relname) :
				 errmsg("\"%s\" shows only what is quarantined in its queue",
						queue->relname),
				 errhint("Name the foreign table that shows the queue's pending tasks.")));
	return queue;
}

DqQueue *
dq_table_get(Oid relid)
{
	DqQueue    *queue = dq_table_get_noerror(relid);
	char	   *name;

	if (queue)
		return queue;

	name = get_rel_name(relid);
	if (name == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("relation with OID %u does not exist", relid)));
	ereport(ERROR,
			(errcode(ERRCODE_WRONG_OBJECT_TYPE),
			 errmsg("\"%s\" is not a queue", name),
			 errdetail("A queue is a foreign table of a server of wrapper dq_bridge."),
			 errhint("Create one with SELECT dq_create_queue('name') or CREATE FOREIGN TABLE ... SERVER ....")));
	return NULL;				/* keep compiler quiet */
}
