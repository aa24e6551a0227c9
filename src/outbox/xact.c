/*
 * xact.c
 *	  Transaction callbacks: wake the bridges of the servers that the committing
 *	  transaction has written for, once per commit, and forget what a rollback
 *	  took back. Registered once per backend.
 */
#include "postgres.h"

#include "outbox/outbox.h"
#include "outbox/outbox_private.h"
#include "shared/points.h"
#include "shared/shared.h"

#include "access/xact.h"
#include "miscadmin.h"

#define MAX_TOUCHED 8

static Oid	touched[MAX_TOUCHED];
static int	ntouched = 0;		/* MAX_TOUCHED + 1: more than fit, wake all */
static bool registered_shards = false;
static uint32 generation = 0;

static void
forget(void)
{
	ntouched = 0;
	registered_shards = false;
	dq_own_forget();
}

/* All bridges of the database: one of them has holds to put back. */
static void
wake_for_holds(void)
{
	dq_note_rollback();
	dq_wake_bridge(MyDatabaseId, InvalidOid);
}

static void
xact_callback(XactEvent event, void *arg)
{
	int			i;

	switch (event)
	{
		case XACT_EVENT_COMMIT:
			/*
			 * After the transaction has left the proc array, so the bridge's
			 * snapshot will see it. Nothing here may fail.
			 */
			if (ntouched > 0)
				DQ_POINT("commit.done");
			if (ntouched > MAX_TOUCHED)
				dq_wake_bridge(MyDatabaseId, InvalidOid);
			else
				for (i = 0; i < ntouched; i++)
					dq_wake_bridge(MyDatabaseId, touched[i]);
			if (dq_holds_end(true))
				wake_for_holds();
			forget();
			break;
		case XACT_EVENT_ABORT:
			if (registered_shards)
				generation++;
			if (dq_holds_end(false))
				wake_for_holds();
			forget();
			break;
		case XACT_EVENT_PREPARE:
			/* its end will not come to this backend */
			if (registered_shards)
				generation++;
			if (dq_holds_end(true))
				wake_for_holds();
			forget();
			break;
		case XACT_EVENT_PRE_COMMIT:
		case XACT_EVENT_PRE_PREPARE:
			if (ntouched > 0)
				DQ_POINT("commit.begin");
			break;
		default:
			break;
	}
}

static void
subxact_callback(SubXactEvent event, SubTransactionId mine,
				 SubTransactionId parent, void *arg)
{
	if (event == SUBXACT_EVENT_COMMIT_SUB)
		(void) dq_holds_subend(true);
	else if (event == SUBXACT_EVENT_ABORT_SUB)
	{
		if (dq_holds_subend(false))
			wake_for_holds();
		if (registered_shards)
			generation++;
		/* own offers may be among what was undone: look again when asked */
		dq_own_forget();
	}
}

void
dq_xact_register(void)
{
	static bool done = false;

	if (done)
		return;
	RegisterXactCallback(xact_callback, NULL);
	RegisterSubXactCallback(subxact_callback, NULL);
	done = true;
}

void
dq_xact_touched(Oid serverid)
{
	int			i;

	dq_xact_register();
	for (i = 0; i < Min(ntouched, MAX_TOUCHED); i++)
		if (touched[i] == serverid)
			return;
	if (ntouched > MAX_TOUCHED)
		return;
	(void) dq_shared();			/* attach now: not in the callback */
	if (ntouched < MAX_TOUCHED)
		touched[ntouched] = serverid;
	ntouched++;
}

void
dq_xact_registered(void)
{
	dq_xact_register();
	registered_shards = true;
}

uint32
dq_xact_generation(void)
{
	return generation;
}
