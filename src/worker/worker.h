/*
 * worker.h
 *	  The background processes: the launcher, the bridges, the executors, and what they
 *	  share.
 */
#ifndef DQ_WORKER_H
#define DQ_WORKER_H

#include "postgres.h"

#include "datatype/timestamp.h"
#include "nodes/pg_list.h"

#include "compat.h"
#include "shared/shared.h"

/* ---- launcher.c, bridge.c, executor.c: entry points, started by register.c -------------- */

extern PGDLLEXPORT void dq_launcher_main(Datum main_arg);
extern PGDLLEXPORT void dq_bridge_main(Datum main_arg);
extern PGDLLEXPORT void dq_executor_main(Datum main_arg);

/* ---- children.c: processes that the launcher has asked for ---------------------- */

struct DqShared;

extern bool dq_children_reap(void); /* true: some have ended */
extern bool dq_children_have(DqRole role, Oid dboid, Oid serverid);	/* InvalidOid: a look */
extern int	dq_children_looks(void);	/* how many looks are on */
/* false: no worker slot; says so, at most once a minute */
extern bool dq_children_start(const struct DqShared *s, DqRole role, Oid dboid, Oid serverid,
							  const char *database, const char *server,
							  TimestampTz now);
extern TimestampTz dq_children_short_at(void);	/* no slot then; 0: never */
extern void dq_complain_no_room(TimestampTz now);

/* ---- failures.c: a bridge's failed rounds ------------------------------------------ */

/* Log if it is news, publish; returns how long to wait before the next, in ms. */
extern void dq_failure_soften(void);
extern long dq_failure_note(const ErrorData *edata, const char *server);
extern void dq_failure_over(const char *server);	/* a round without an error */

/* ---- database.c: a database from outside --------------------------------------- */

typedef struct DqDatabaseName
{
	Oid			oid;
	char		name[NAMEDATALEN];
} DqDatabaseName;

/* Databases that workers may serve (only: this one), in a transaction. */
extern List *dq_databases_list(Oid only);	/* of DqDatabaseName */
extern DqDatabaseName *dq_databases_find(List *databases, Oid oid);
/* Does the connected one still take workers? In a transaction. */
extern bool dq_database_takes_workers(void);
/* Somebody holds or waits for a lock on the database that copying, dropping or
 * renaming it takes: a connection would be in the way. */
extern bool dq_database_is_waited_for(Oid dboid);

/* ---- look.c: what is in the connected database ----------------------------------- */

typedef enum DqLook
{
	DQ_LOOK_GONE,				/* the extension is not here */
	DQ_LOOK_VERSION,			/* its version is not ours */
	DQ_LOOK_CLOSED,				/* a template, or it takes no connections */
	DQ_LOOK_HERE
} DqLook;

typedef struct DqLookResult
{
	DqLook		look;
	Oid			extension;
	char		version[64];
	List	   *servers;		/* of Oid, in the current context */
} DqLookResult;

/* Look, in a transaction of its own; makes slots for bridges that are missing. */
extern void dq_look(DqLookResult *result);
/* The catalogs may have changed in a way that calls for a new look. */
extern bool dq_look_is_due(void);
extern void dq_look_expect(void);	/* make it due */

/* A lock for the time of a round that keeps DROP EXTENSION out; false: somebody
 * is at it. Taken without waiting, outside any transaction. */
extern bool dq_extension_enter(Oid extension);
extern void dq_extension_exit(Oid extension);
extern bool dq_extension_is_waited_for(Oid extension);

#endif							/* DQ_WORKER_H */
