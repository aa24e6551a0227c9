/*
 * servers.c
 *	  A server that a caller names, or the only one there is. Called by dq_create_queue
 *	  and dq_adopt.
 */
#include "postgres.h"

#include "api/api.h"
#include "compat.h"

#include "foreign/foreign.h"
#include "utils/builtins.h"

/* "a", "b" */
static char *
list_names(List *servers)
{
	StringInfoData names;
	ListCell   *lc;

	initStringInfo(&names);
	foreach(lc, servers)
		appendStringInfo(&names, "%s\"%s\"", names.len ? ", " : "",
						 GetForeignServer(lfirst_oid(lc))->servername);
	return names.data;
}

/* What to do if there is none of that name: name one that is there, or make it. */
static int
hint_servers(const char *name)
{
	List	   *servers = dq_server_list();

	if (servers == NIL)
		return errhint("Create one: CREATE SERVER %s FOREIGN DATA WRAPPER dq_bridge OPTIONS (host '127.0.0.1', port '6379');",
					   quote_identifier(name));
	return errhint("Servers of foreign-data wrapper dq_bridge: %s.", list_names(servers));
}

Oid
dq_server_named(const char *name)
{
	ForeignServer *server = GetForeignServerByName(name, true);

	if (server == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("server \"%s\" does not exist", name),
				 hint_servers(name)));
	if (server->fdwid != dq_wrapper_oid())
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 errmsg("server \"%s\" is not one of foreign-data wrapper dq_bridge", name),
				 hint_servers("redis")));
	return server->serverid;
}

char *
dq_server_only(void)
{
	List	   *servers = dq_server_list();

	if (servers == NIL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("there is no server of foreign-data wrapper dq_bridge"),
				 hint_servers("redis")));
	if (list_length(servers) > 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_OBJECT_DEFINITION),
				 errmsg("there are several servers of foreign-data wrapper dq_bridge: %s",
						list_names(servers)),
				 errhint("Name one of them in argument \"server\".")));
	return GetForeignServer(linitial_oid(servers))->servername;
}
