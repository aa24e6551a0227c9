/*
 * deliver.c
 *	  The queues of one owner, one batch of each in turn, so that none waits longer than
 *	  a batch of each other takes. An error of one does not get to the others. Called by
 *	  the executor process.
 */
#include "postgres.h"

#include "compat.h"
#include "deliver/deliver_private.h"

#include "access/transam.h"
#include "access/xact.h"
#include "miscadmin.h"
#include "storage/lock.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#define IDLE_MS		1000
#define LINGER_MS	30			/* see batch.c */

static bool dirty = true;

static void
syscache_callback(Datum arg, int cacheid, uint32 hashvalue)
{
	dirty = true;
}

DqDeliver *
dq_deliver_create(void)
{
	MemoryContext context = AllocSetContextCreate(TopMemoryContext, "dq_bridge executor",
												  ALLOCSET_DEFAULT_SIZES);
	DqDeliver  *deliver = MemoryContextAllocZero(context, sizeof(DqDeliver));

	deliver->context = context;
	deliver->batch = AllocSetContextCreate(context, "dq_bridge batch",
										   ALLOCSET_DEFAULT_SIZES);
	deliver->owner = GetUserId();
	CacheRegisterSyscacheCallback(FOREIGNTABLEREL, syscache_callback, (Datum) 0);
	CacheRegisterSyscacheCallback(FOREIGNSERVEROID, syscache_callback, (Datum) 0);
	CacheRegisterSyscacheCallback(RELOID, syscache_callback, (Datum) 0);
	return deliver;
}

/* ---- connections ---- */

typedef struct DqDeliverConnection
{
	Oid			serverid;
	Oid			umid;
	char	   *signature;		/* all that leads to it */
	DqRedis    *redis;			/* NULL: not open */
} DqDeliverConnection;

#define OR_EMPTY(text) ((text) ? (text) : "")

DqRedis *
dq_deliver_redis(DqDeliver *deliver, const DqTarget *target)
{
	DqDeliverConnection *connection = NULL;
	char	   *signature = psprintf("%s\n%d\n%s\n%d\n%s\n%s\n%d\n%d", OR_EMPTY(target->host),
									 target->port, OR_EMPTY(target->socket), target->database,
									 OR_EMPTY(target->username), OR_EMPTY(target->password),
									 target->connect_timeout, target->command_timeout);
	ListCell   *lc;

	foreach(lc, deliver->connections)
	{
		DqDeliverConnection *other = lfirst(lc);

		if (other->serverid == target->serverid && other->umid == target->umid)
			connection = other;
	}
	if (connection == NULL)
	{
		MemoryContext old = MemoryContextSwitchTo(deliver->context);

		connection = palloc0(sizeof(DqDeliverConnection));
		connection->serverid = target->serverid;
		connection->umid = target->umid;
		connection->signature = pstrdup("");
		deliver->connections = lappend(deliver->connections, connection);
		MemoryContextSwitchTo(old);
	}
	/* replies that are still due mean that an error interrupted their asker */
	if (connection->redis &&
		(dq_redis_is_dead(connection->redis) || dq_redis_in_flight(connection->redis) > 0 ||
		 strcmp(connection->signature, signature) != 0))
	{
		DqRedis    *redis = connection->redis;

		connection->redis = NULL;
		dq_redis_close(redis);
	}
	if (connection->redis == NULL)
	{
		connection->redis = dq_redis_open(target);
		pfree(connection->signature);
		connection->signature = MemoryContextStrdup(deliver->context, signature);
	}
	return connection->redis;
}

/* ---- the queues ---- */

uint64
dq_deliver_batches(const DqDeliver *deliver)
{
	return deliver->batches;
}

bool
dq_deliver_is_idle(const DqDeliver *deliver)
{
	return deliver->outlets == NIL;
}

static DqOutlet *
find_outlet(DqDeliver *deliver, int32 shard_no)
{
	ListCell   *lc;

	foreach(lc, deliver->outlets)
	{
		DqOutlet   *outlet = lfirst(lc);

		if (outlet->shard_no == shard_no)
			return outlet;
	}
	return NULL;
}

static DqOutlet *
make_outlet(DqDeliver *deliver, int32 shard_no, int shard, const char *name)
{
	MemoryContext context = AllocSetContextCreate(deliver->context, "dq_bridge outlet",
												  ALLOCSET_SMALL_SIZES);
	MemoryContext old = MemoryContextSwitchTo(context);
	DqOutlet   *outlet = palloc0(sizeof(DqOutlet));

	outlet->context = context;
	outlet->shard_no = shard_no;
	outlet->shard = shard;
	outlet->name = pstrdup(name);
	dq_keys_make(&outlet->keys, outlet->name);
	/* what the process before had said it takes back itself */
	strlcpy(outlet->parked, "?", sizeof(outlet->parked));
	MemoryContextSwitchTo(deliver->context);
	deliver->outlets = lappend(deliver->outlets, outlet);
	MemoryContextSwitchTo(old);
	return outlet;
}

/* The queues of this owner that have a sink; no lock on any of them. */
static void
look(DqDeliver *deliver)
{
	List	   *relids;
	ListCell   *lc;

	dirty = false;				/* a message from here on sets it again */
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	MemoryContextReset(deliver->batch);
	MemoryContextSwitchTo(deliver->batch);
	foreach(lc, deliver->outlets)
		((DqOutlet *) lfirst(lc))->seen = false;
	relids = dq_queue_list(InvalidOid);
	foreach(lc, relids)
	{
		DqQueue    *queue = dq_queue_get_noerror(lfirst_oid(lc));

		if (queue == NULL || queue->owner != deliver->owner || queue->producer ||
			queue->destination != DQ_DEST_SINK)
			continue;
		dq_shards_resolve(queue);
		for (int i = 0; i < queue->nshards; i++)
		{
			DqOutlet   *outlet = find_outlet(deliver, queue->shard_no[i]);

			if (outlet == NULL)
				outlet = make_outlet(deliver, queue->shard_no[i], i,
									 dq_shard_name(queue->name, queue->nshards, i));
			outlet->relid = queue->relid;
			outlet->seen = true;
		}
	}
	PopActiveSnapshot();
	CommitTransactionCommand();
	MemoryContextSwitchTo(deliver->batch);
	foreach(lc, deliver->outlets)
	{
		DqOutlet   *outlet = lfirst(lc);

		if (outlet->seen)
			continue;
		deliver->outlets = foreach_delete_current(deliver->outlets, lc);
		MemoryContextDelete(outlet->context);
	}
}

/* Messages are taken only when some transaction has ended: idle, nothing is opened. */
static bool
catalogs_changed(DqDeliver *deliver)
{
	uint64		completions;

	LWLockAcquire(ProcArrayLock, LW_SHARED);
	completions = DqVariableCache->xactCompletionCount;
	LWLockRelease(ProcArrayLock);
	if (!deliver->looked || completions != deliver->completions)
	{
		AcceptInvalidationMessages();
		deliver->completions = completions;
		if (!deliver->looked)
			dirty = true;
		deliver->looked = true;
	}
	return dirty;
}

/*
 * An error in a step: the transaction is rolled back, so Redis lends the same batch
 * again. A cancel ends the batch, the end of the process goes on.
 */
static void
step(DqDeliver *deliver, DqOutlet *outlet)
{
	PG_TRY();
	{
		(void) dq_outlet_step(deliver, outlet);
	}
	PG_CATCH();
	{
		ErrorData  *error;

		HOLD_INTERRUPTS();
		MemoryContextSwitchTo(deliver->batch);
		error = CopyErrorData();
		FlushErrorState();
		AbortOutOfAnyTransaction();
		MemoryContextSwitchTo(deliver->batch);
		RESUME_INTERRUPTS();
		outlet->loaded = false;
		/* so that the bridge may give another permission */
		if (outlet->asking)
			dq_lend_answered(MyDatabaseId, outlet->shard_no, "", -1, 0, 0);
		outlet->asking = false;
		dq_outlet_park(outlet, error->message);
		dq_worker_error(error->message);
	}
	PG_END_TRY();
	MemoryContextSwitchTo(deliver->batch);
}

long
dq_deliver_round(DqDeliver *deliver)
{
	TimestampTz now;
	long		wait = IDLE_MS;
	int			n;

	if (catalogs_changed(deliver))
		look(deliver);
	n = list_length(deliver->outlets);
	for (int i = 0; i < n; i++)
		step(deliver, list_nth(deliver->outlets, (deliver->from + i) % n));
	if (n > 0)
		deliver->from = (deliver->from + 1) % n;

	now = GetCurrentTimestamp();
	for (int i = 0; i < n; i++)
	{
		const DqOutlet *outlet = list_nth(deliver->outlets, i);

		if (outlet->blocked_until > now)
			wait = Min(wait, TimestampDifferenceMilliseconds(now, outlet->blocked_until));
		else if (outlet->committed)
			wait = Min(wait, LINGER_MS + 1);
	}
	return wait;
}
