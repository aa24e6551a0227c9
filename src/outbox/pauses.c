/*
 * pauses.c
 *	  Which queues are paused: rows, so that a pause is transactional and survives
 *	  restarts, and takes no lock on the queue's table.
 */
#include "postgres.h"

#include "compat.h"
#include "outbox/outbox.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "storage/lmgr.h"
#include "utils/inval.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

bool
dq_queue_is_paused(const DqQueue *queue)
{
	Relation	rel = table_open(dq_extension_relation("dq_pauses"), AccessShareLock);
	Snapshot	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	bool		paused = dq_store_find(rel, snapshot, queue->serverid,
									   queue->name) != NULL;

	UnregisterSnapshot(snapshot);
	table_close(rel, AccessShareLock);
	return paused;
}

/*
 * The relcache message that ends with the commit makes the bridge read the
 * pauses again.
 */
bool
dq_pause_set(const DqQueue *queue, bool paused)
{
	Relation	rel;
	Snapshot	snapshot;
	HeapTuple	tuple;

	/* two callers at once: one after the other */
	rel = table_open(dq_extension_relation("dq_pauses"), ShareRowExclusiveLock);
	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	tuple = dq_store_find(rel, snapshot, queue->serverid, queue->name);
	UnregisterSnapshot(snapshot);
	if ((tuple != NULL) == paused)
	{
		table_close(rel, NoLock);
		return false;
	}
	if (paused)
	{
		Datum		values[3];
		bool		nulls[3] = {0};
		size_t		len = strlen(queue->name);
		bytea	   *name = palloc(VARHDRSZ + len);

		SET_VARSIZE(name, VARHDRSZ + len);
		memcpy(VARDATA(name), queue->name, len);
		values[0] = ObjectIdGetDatum(queue->serverid);
		values[1] = PointerGetDatum(name);
		values[2] = TimestampTzGetDatum(GetCurrentTimestamp());
		dq_store_insert(rel, values, nulls);
	}
	else
		dq_store_delete(rel, tuple);
	CacheInvalidateRelcache(rel);
	CommandCounterIncrement();
	table_close(rel, NoLock);
	dq_xact_touched(queue->serverid);
	return true;
}
