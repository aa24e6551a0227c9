/*
 * children.c
 *	  The processes that this launcher has asked for, and what it says when there
 *	  is no room for one. Called by the launcher only.
 */
#include "postgres.h"

#include "miscadmin.h"
#include "postmaster/bgworker.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "shared/shared.h"
#include "worker/worker.h"

#define COMPLAIN_MS		60000	/* between two warnings */

/* One that has not ended; lives in TopMemoryContext. */
typedef struct Child
{
	BackgroundWorkerHandle *handle;
	DqRole		role;
	Oid			dboid;
	Oid			serverid;		/* InvalidOid: to look; of an executor the owner */
} Child;

static List *children = NIL;	/* of Child */
static TimestampTz short_at = 0;	/* when there was no slot last */
static TimestampTz complained_at = 0;

/* True: one has ended, so a worker slot is free. */
bool
dq_children_reap(void)
{
	bool		any = false;
	ListCell   *lc;

	foreach(lc, children)
	{
		Child	   *child = lfirst(lc);
		pid_t		pid;

		if (GetBackgroundWorkerPid(child->handle, &pid) == BGWH_STOPPED)
		{
			pfree(child->handle);
			pfree(child);
			children = foreach_delete_current(children, lc);
			any = true;
		}
	}
	return any;
}

/* How many looks are on: they last for milliseconds. */
int
dq_children_looks(void)
{
	int			n = 0;
	ListCell   *lc;

	foreach(lc, children)
	{
		if (!OidIsValid(((Child *) lfirst(lc))->serverid))
			n++;
	}
	return n;
}

bool
dq_children_have(DqRole role, Oid dboid, Oid serverid)
{
	ListCell   *lc;

	foreach(lc, children)
	{
		Child	   *child = lfirst(lc);

		if (child->role == role && child->dboid == dboid && child->serverid == serverid)
			return true;
	}
	return false;
}

/* 0: never */
TimestampTz
dq_children_short_at(void)
{
	return short_at;
}

/* How many worker processes are needed if everything that is wanted runs. */
static void
complain_no_slot(const DqShared *s, TimestampTz now)
{
	int			bridges = 0;
	int			executors = 0;

	for (int i = 0; i < DQ_MAX_WORKERS; i++)
	{
		if (s->workers[i].in_use && s->workers[i].role == DQ_ROLE_BRIDGE)
			bridges++;
		if (s->workers[i].in_use && s->workers[i].role == DQ_ROLE_EXECUTOR)
			executors++;
	}
	bridges = Max(bridges, 1);
	/* not when a look is about to give its slot back */
	if (dq_children_looks() > 0)
		return;
	short_at = now;
	if (complained_at != 0 &&
		!TimestampDifferenceExceeds(complained_at, now, COMPLAIN_MS))
		return;
	complained_at = now;
	ereport(WARNING,
			(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
			 errmsg("dq_bridge cannot start a worker: no free slot in max_worker_processes (%d)",
					max_worker_processes),
			 errdetail("dq_bridge needs %d: 1 launcher + %d for bridges (one per database and server) + %d for executors (one per database and owner of queues with a sink). Logical replication (1 or more), parallel query and other extensions take slots of the same number.",
					   1 + bridges + executors, bridges, executors),
			 errhint("Raise max_worker_processes. Until then tasks wait in the outbox.")));
}

/* Our own table is too small: for hundreds of servers. */
void
dq_complain_no_room(TimestampTz now)
{
	if (complained_at != 0 &&
		!TimestampDifferenceExceeds(complained_at, now, COMPLAIN_MS))
		return;
	complained_at = now;
	ereport(WARNING,
			(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
			 errmsg("dq_bridge has room for %d worker processes, and more are needed",
					DQ_MAX_WORKERS),
			 errhint("Let queues share servers: each server of each database needs a process.")));
}

bool
dq_children_start(const DqShared *s, DqRole role, Oid dboid, Oid serverid,
				  const char *database, const char *server, TimestampTz now)
{
	MemoryContext old = MemoryContextSwitchTo(TopMemoryContext);
	BackgroundWorkerHandle *handle;

	handle = role == DQ_ROLE_EXECUTOR ?
		dq_register_executor(dboid, serverid, database, server) :
		dq_register_bridge(dboid, serverid, database, server);
	if (handle != NULL)
	{
		Child	   *child = palloc(sizeof(*child));

		child->handle = handle;
		child->role = role;
		child->dboid = dboid;
		child->serverid = serverid;
		children = lappend(children, child);
	}
	MemoryContextSwitchTo(old);
	if (handle == NULL)
		complain_no_slot(s, now);
	return handle != NULL;
}
