/*
 * import.c
 *	  IMPORT FOREIGN SCHEMA: a foreign table for each queue that has something pending.
 *	  Called by the server through handler.c; it runs the statements made here with the
 *	  caller's rights, and the event trigger (api/ddl.c) checks them as any other.
 *
 *	  The "schema" is a prefix of the names of queues, or "*". A table has its queue's
 *	  name as far as it can; the true name stands in its options.
 */
#include "postgres.h"

#include "catalog/namespace.h"
#include "commands/defrem.h"
#include "common/hashfn.h"
#include "foreign/foreign.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"

#include "fdw/pushdown.h"

typedef struct Import
{
	ImportForeignSchemaStmt *statement;
	Oid			schema;			/* where the tables go */
	const char *server;
	const char *key_prefix;
	const char *prefix;			/* of names of queues, UTF-8 */
	bool		ready;			/* a table of each ready list, too */
	bool		quarantine;		/* ... and of each quarantine */
	List	   *commands;
	List	   *names;			/* of tables so far */
} Import;

static void
read_options(Import *import)
{
	ListCell   *lc;

	foreach(lc, import->statement->options)
	{
		DefElem    *def = lfirst_node(DefElem, lc);

		if (strcmp(def->defname, "prefix") == 0)
		{
			char	   *value = defGetString(def);

			import->prefix = pg_server_to_any(value, strlen(value), PG_UTF8);
		}
		else if (strcmp(def->defname, "ready") == 0)
			import->ready = defGetBoolean(def);
		else if (strcmp(def->defname, "quarantine") == 0)
			import->quarantine = defGetBoolean(def);
		else
			ereport(ERROR,
					(errcode(ERRCODE_FDW_INVALID_OPTION_NAME),
					 errmsg("invalid option \"%s\" of IMPORT FOREIGN SCHEMA", def->defname),
					 errhint("Valid options are: prefix, ready, quarantine.")));
	}
}

/*
 * The queue's name as a table's: cut where it is too long, and made unlike others that
 * begin the same by a number made of all of it, so it is the same at each import.
 */
static char *
table_name(const char *queue, const char *suffix)
{
	char	   *name = psprintf("%s%s", queue, suffix);
	char		end[NAMEDATALEN];
	int			len = strlen(name);

	if (len < NAMEDATALEN)
		return name;
	snprintf(end, sizeof(end), "_%08x%s",
			 hash_bytes((const unsigned char *) queue, strlen(queue)), suffix);
	len = pg_mbcliplen(queue, strlen(queue), NAMEDATALEN - 1 - strlen(end));
	return psprintf("%.*s%s", len, queue, end);
}

static bool
is_wanted(const Import *import, const char *name)
{
	ListCell   *lc;
	bool		listed = false;

	foreach(lc, import->statement->table_list)
		listed |= strcmp(lfirst_node(RangeVar, lc)->relname, name) == 0;
	switch (import->statement->list_type)
	{
		case FDW_IMPORT_SCHEMA_LIMIT_TO:
			return listed;
		case FDW_IMPORT_SCHEMA_EXCEPT:
			return !listed;
		default:
			return true;
	}
}

static void
add_table(Import *import, const char *queue, int nshards, const char *suffix,
		  const char *contents, const char *columns)
{
	char	   *name = table_name(queue, suffix);
	StringInfoData buf;
	ListCell   *lc;

	if (!is_wanted(import, name))
		return;
	foreach(lc, import->names)
	{
		if (strcmp(lfirst(lc), name) == 0)
			break;
	}
	if (lc != NULL || OidIsValid(get_relname_relid(name, import->schema)))
	{
		ereport(NOTICE,
				(errcode(ERRCODE_DUPLICATE_TABLE),
				 errmsg("queue \"%s\" is not imported: there is a relation \"%s\" already",
						queue, name)));
		return;
	}
	import->names = lappend(import->names, name);

	initStringInfo(&buf);
	appendStringInfo(&buf, "CREATE FOREIGN TABLE %s (%s) SERVER %s OPTIONS (queue %s",
					 quote_identifier(name), columns, quote_identifier(import->server),
					 quote_literal_cstr(queue));
	if (nshards > 1)
		appendStringInfo(&buf, ", shards '%d'", nshards);
	if (contents)
		appendStringInfo(&buf, ", contents '%s'", contents);
	appendStringInfoChar(&buf, ')');
	import->commands = lappend(import->commands, buf.data);
}

static void
add_queue(Import *import, const DqDiscovered *found)
{
	const char *rest = found->name + strlen(import->key_prefix);
	text	   *name = dq_bytes_text_noerror(rest, strlen(rest));
	char	   *queue;

	if (name == NULL)
	{
		char	   *hex = palloc(2 * strlen(rest) + 1);

		hex[hex_encode(rest, strlen(rest), hex)] = '\0';
		ereport(NOTICE,
				(errcode(ERRCODE_CHARACTER_NOT_IN_REPERTOIRE),
				 errmsg("a queue is not imported: its name is no text in this database's encoding"),
				 errdetail("Its name in bytes is \\x%s.", hex)));
		return;
	}
	queue = text_to_cstring(name);
	if (queue[0] == '\0')
	{
		ereport(NOTICE,
				(errcode(ERRCODE_INVALID_NAME),
				 errmsg("a queue is not imported: its name is nothing but the server's key_prefix")));
		return;
	}
	if (!dq_name_is_one_slot(dq_shard_name(found->name, found->nshards, 0)))
	{
		ereport(NOTICE,
				(errcode(ERRCODE_INVALID_NAME),
				 errmsg("queue \"%s\" is not imported: its keys would fall into different hash slots of Redis",
						queue)));
		return;
	}
	add_table(import, queue, found->nshards, "", NULL,
			  "id pg_catalog.text, key pg_catalog.text, payload pg_catalog.text, due_at pg_catalog.timestamptz, shard pg_catalog.int4");
	if (import->ready)
		add_table(import, queue, found->nshards, "_ready", "ready",
				  "payload pg_catalog.text, shard pg_catalog.int4");
	if (import->quarantine)
		add_table(import, queue, found->nshards, "_quarantine", "quarantine",
				  "member pg_catalog.bytea, reason pg_catalog.text, due_at pg_catalog.timestamptz, found_at pg_catalog.timestamptz, shard pg_catalog.int4");
}

/* What the tables on the server say of their queues. */
static List *
known_queues(Oid serverid)
{
	List	   *known = NIL;
	ListCell   *lc;

	foreach(lc, dq_queue_list(serverid))
	{
		DqQueue    *queue = dq_table_get_noerror(lfirst_oid(lc));
		DqDiscovered *entry;

		if (queue == NULL)
			continue;
		entry = palloc(sizeof(DqDiscovered));
		entry->name = pstrdup(queue->name);
		entry->nshards = queue->nshards;
		known = lappend(known, entry);
	}
	return known;
}

/* There is no table yet whose owner's mapping could be used: it is the caller's. */
List *
dq_import(ImportForeignSchemaStmt *statement, Oid serverid)
{
	List	   *known = known_queues(serverid);
	DqServer   *server = dq_server_get(serverid, GetUserId(), false);
	Import		import = {0};
	const char *schema = statement->remote_schema;
	List	   *found;
	ListCell   *lc;

	dq_server_check_usable(server);
	import.statement = statement;
	import.schema = get_namespace_oid(statement->local_schema, false);
	import.server = pstrdup(server->name);
	import.key_prefix = pg_server_to_any(server->key_prefix, strlen(server->key_prefix),
										 PG_UTF8);
	import.prefix = "";
	read_options(&import);
	/* both count, and one of them begins with the other if anything is to be found */
	if (strcmp(schema, "*") != 0)
	{
		schema = pg_server_to_any(schema, strlen(schema), PG_UTF8);
		if (strncmp(schema, import.prefix, strlen(import.prefix)) == 0)
			import.prefix = schema;
		else if (strncmp(import.prefix, schema, strlen(schema)) != 0)
			return NIL;
	}

	found = dq_queues_discover(dq_redis_get(&server->target),
							   psprintf("%s%s", import.key_prefix, import.prefix), known);
	foreach(lc, found)
		add_queue(&import, lfirst(lc));
	return import.commands;
}
