/*
 * batch.c
 *	  One shard, step by step: a batch is claimed from Redis, its effects are committed
 *	  together with its number, and with the next claim Redis lets it go.
 *
 *	  The bridge of the server says when a claim may be sent (dq_lend_get): then what
 *	  was committed before is in Redis, and nothing is frozen, paused or lost. A claim
 *	  without an answer, and a process that dies, cost nothing: the same number gives the
 *	  same batch again. Called by deliver.c.
 */
#include "postgres.h"

#include "compat.h"
#include "deliver/deliver_private.h"
#include "shared/points.h"

#include "access/xact.h"
#include "commands/async.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#define BATCH_TASKS		400
#define LINGER_MS		30		/* then Redis is told without a next claim */
#define RETRY_MS		100		/* doubled up to ... */
#define RETRY_MAX_MS	1000
#define PURGE_MS		60000

/* What is worked on. */
typedef struct Batch
{
	DqDeliver  *deliver;
	DqOutlet   *outlet;
	DqQueue		queue;			/* a copy: invalidations come while we work */
	DqTarget	target;
	int64		replay_window;
	char		source[40];
	DqClaimed	claimed;
	char		session[20];
	int64		floor;
} Batch;

/* ---- what others see ---- */

static void
set_state(DqOutlet *outlet, const char *parked)
{
	if (strcmp(outlet->parked, parked) == 0)
		return;
	strlcpy(outlet->parked, parked, sizeof(outlet->parked));
	dq_delivery_parked(MyDatabaseId, outlet->shard_no, parked);
}

/* Due tasks wait, in Redis, until what is wrong is repaired: tried again each second. */
void
dq_outlet_park(DqOutlet *outlet, const char *reason)
{
	if (outlet->parked[0] == '\0')
		ereport(LOG,
				(errmsg("dq_bridge: queue \"%s\" is parked: %s", outlet->name, reason)));
	set_state(outlet, reason);
	outlet->failures = Min(outlet->failures + 1, 10);
	outlet->blocked_until =
		TimestampTzPlusMilliseconds(GetCurrentTimestamp(),
									Min(RETRY_MAX_MS, RETRY_MS << (outlet->failures - 1)));
}

static void
note_batch(DqOutlet *outlet, int64 delivered, int64 dead, int64 lag_ms)
{
	DqShardStats *stats = dq_stats_lock(MyDatabaseId, outlet->shard_no);

	stats->delivery.delivered += delivered;
	stats->delivery.failed += dead;
	stats->delivery.dead += dead;
	stats->delivery.in_flight = 0;
	if (delivered > 0)
		stats->delivery.lag_us = Max(lag_ms, 0) * 1000;
	dq_stats_release(stats);
}

/* ---- transactions ---- */

static void
begin(DqDeliver *deliver)
{
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	MemoryContextSwitchTo(deliver->batch);
}

/* PO 13: on disk, and at the synchronous standby, before the next claim leaves; what the
 * sink's triggers have made of synchronous_commit does not count. */
static void
commit(DqDeliver *deliver)
{
	XLogRecPtr	point;

	if (ActiveSnapshotSet())
		PopActiveSnapshot();
	CommitTransactionCommand();
	MemoryContextSwitchTo(deliver->batch);
	point = dq_flush_point();
	if (!dq_flush_to(point))
		ereport(ERROR,
				(errcode(ERRCODE_QUERY_CANCELED),
				 errmsg("waiting for the synchronous standby was cut short")));
}

static void
draw_nonce(char *nonce)
{
	char		bytes[DQ_NONCE_LEN / 2];

	if (!pg_strong_random(bytes, sizeof(bytes)))
		ereport(ERROR,
				(errcode(ERRCODE_INTERNAL_ERROR),
				 errmsg("could not generate a random number")));
	nonce[hex_encode(bytes, sizeof(bytes), nonce)] = '\0';
}

static void
keep_claim(DqOutlet *outlet, const DqClaim *claim)
{
	char	   *skip = MemoryContextStrdup(outlet->context, claim->skip);

	if (outlet->claim.skip)
		pfree(outlet->claim.skip);
	outlet->claim = *claim;
	outlet->claim.skip = skip;
}

/* Definition and number, in a transaction of its own. false: nothing to do here. */
static bool
prepare(Batch *b)
{
	DqOutlet   *outlet = b->outlet;
	DqQueue    *queue;
	DqServer   *server;
	bool		good = false;
	DqClaim		claim = {.skip = ""};

	begin(b->deliver);
	queue = dq_queue_get_noerror(outlet->relid);
	if (queue && queue->destination == DQ_DEST_SINK && queue->owner == b->deliver->owner)
	{
		b->queue = *queue;
		b->queue.name = pstrdup(queue->name);
		b->queue.relname = pstrdup(queue->relname);
		b->queue.sink = pstrdup(queue->sink);
		b->queue.notify = queue->notify ? pstrdup(queue->notify) : NULL;
		server = dq_server_get(queue->serverid, queue->owner, false);
		dq_server_check_usable(server);
		b->replay_window = server->replay_window;
		b->target = server->target;
		b->target.server = pstrdup(server->target.server);
		b->target.host = pstrdup(server->target.host);
#define KEEP(field) \
		b->target.field = server->target.field ? pstrdup(server->target.field) : NULL
		KEEP(socket);
		KEEP(username);
		KEEP(password);
#undef KEEP
		strlcpy(b->source, dq_source_get(true)->id, sizeof(b->source));
		if (!outlet->loaded)
		{
			(void) dq_claim_get(outlet->shard_no, &claim);
			keep_claim(outlet, &claim);
			outlet->loaded = true;
			/* what a process before this one has committed may not have been let go */
			outlet->committed = claim.number > 0;
			outlet->committed_at = 0;
		}
		good = true;
	}
	if (ActiveSnapshotSet())
		PopActiveSnapshot();
	CommitTransactionCommand();
	MemoryContextSwitchTo(b->deliver->batch);
	return good;
}

/* While parked: may we go on? */
static bool
sink_is_usable(Batch *b)
{
	char	   *reason;
	bool		usable;

	begin(b->deliver);
	SPI_connect();
	usable = dq_sink_open(&b->queue, &reason) != NULL;
	if (!usable)
	{
		MemoryContextSwitchTo(b->deliver->batch);
		reason = pstrdup(reason);
	}
	SPI_finish();
	if (ActiveSnapshotSet())
		PopActiveSnapshot();
	CommitTransactionCommand();
	MemoryContextSwitchTo(b->deliver->batch);
	if (!usable)
		dq_outlet_park(b->outlet, reason);
	return usable;
}

/* ---- the effects ---- */

/* Together, and if one of them is refused, each by itself. Returns how many are dead. */
static int
insert_tasks(Batch *b, DqSink *sink, DqTask **tasks, int n, StringInfo skip)
{
	ErrorData  *error;
	int			dead = 0;

	if (n == 0 || dq_sink_insert(sink, &b->queue, b->outlet->shard, tasks, n, &error))
		return 0;
	if (!dq_sink_is_to_blame(error))
		ThrowErrorData(error);
	for (int i = 0; i < n; i++)
	{
		if (n > 1 &&
			dq_sink_insert(sink, &b->queue, b->outlet->shard, &tasks[i], 1, &error))
			continue;
		if (!dq_sink_is_to_blame(error))
			ThrowErrorData(error);
		dq_dead_store(&b->queue, tasks[i], 1, error);
		appendStringInfo(skip, "%s%d", skip->len > 0 ? "," : "",
						 (int) (tasks[i] - b->claimed.tasks) + 1);
		dead++;
	}
	return dead;
}

/*
 * PO 13: number, nonce, rows, dead letters and done log in one transaction. false: it
 * is parked, or another process has been faster; nothing has happened.
 */
static bool
carry_out(Batch *b)
{
	DqOutlet   *outlet = b->outlet;
	DqClaimed  *claimed = &b->claimed;
	bool	   *done = palloc(claimed->ntasks * sizeof(bool));
	DqTask	  **tasks = palloc(claimed->ntasks * sizeof(DqTask *));
	DqClaim		claim = outlet->claim;
	StringInfoData skip;
	DqSink	   *sink;
	char	   *reason;
	int			n = 0;
	int			dead;
	int64		oldest = PG_INT64_MAX;

	initStringInfo(&skip);
	begin(b->deliver);
	SPI_connect();
	MemoryContextSwitchTo(b->deliver->batch);
	sink = dq_sink_open(&b->queue, &reason);
	if (sink == NULL)
	{
		SPI_finish();
		AbortCurrentTransaction();
		MemoryContextSwitchTo(b->deliver->batch);
		dq_outlet_park(outlet, reason);
		return false;
	}
	dq_done_look(outlet->shard_no, claimed->tasks, claimed->ntasks, claim.suspect, done);
	for (int i = 0; i < claimed->ntasks; i++)
	{
		if (!done[i])
			tasks[n++] = &claimed->tasks[i];
		if (!done[i] && claimed->tasks[i].due < oldest)
			oldest = claimed->tasks[i].due;
	}
	b->deliver->batches++;
	DQ_POINT("deliver.effects");
	dead = insert_tasks(b, sink, tasks, n, &skip);
	if (b->queue.notify && n > dead)
		Async_Notify(b->queue.notify, "");
	dq_done_store(outlet->shard_no, tasks, n);
	claim.number = claimed->number;
	strlcpy(claim.nonce, claimed->nonce, sizeof(claim.nonce));
	claim.skip = skip.data;
	if (!dq_claim_set(outlet->shard_no,
					  outlet->claim.number > 0 || outlet->claim.suspect > 0 ?
					  &outlet->claim : NULL, &claim))
	{
		SPI_finish();
		AbortCurrentTransaction();
		MemoryContextSwitchTo(b->deliver->batch);
		outlet->loaded = false;
		return false;
	}
	SPI_finish();
	DQ_POINT("deliver.commit");
	outlet->loaded = false;		/* until it is known how the commit has ended */
	commit(b->deliver);
	DQ_POINT("deliver.committed");
	keep_claim(outlet, &claim);
	outlet->loaded = true;
	outlet->committed = true;
	outlet->committed_at = GetCurrentTimestamp();
	note_batch(outlet, n - dead, dead, oldest == PG_INT64_MAX ? 0 : dq_now_ms() - oldest);
	return true;
}

/* ---- claiming ---- */

/*
 * PO 15: Redis has not the number that is committed here, so it has lost data, and may
 * give back any task that is due by now. That is on disk before one of them has an
 * effect. Another process's number is none of that: then ours is out of date.
 */
static bool
suspect(Batch *b)
{
	DqOutlet   *outlet = b->outlet;
	DqClaim		claim = outlet->claim;
	bool		mine;

	claim.suspect = Max(claim.suspect, dq_now_ms());
	begin(b->deliver);
	mine = dq_claim_set(outlet->shard_no,
						outlet->claim.number > 0 || outlet->claim.suspect > 0 ?
						&outlet->claim : NULL, &claim);
	outlet->loaded = false;
	commit(b->deliver);
	if (!mine)
		return false;
	keep_claim(outlet, &claim);
	outlet->loaded = true;
	return true;
}

static void
send_claim(Batch *b, bool only_let_go, bool renumber)
{
	DqClaimArgs args = {0};
	char		nonce[2 * DQ_NONCE_LEN];

	draw_nonce(nonce);
	args.session = b->session;
	args.floor = b->floor;
	args.source = b->source;
	args.now = dq_now_ms();
	args.number = b->outlet->claim.number;
	args.nonce = b->outlet->claim.nonce;
	args.next_nonce = nonce;
	args.limit = BATCH_TASKS;
	args.list = b->queue.list_copy;
	args.skip = b->outlet->claim.skip;
	args.only_let_go = only_let_go;
	args.renumber = renumber;
	args.found_number = b->claimed.number;
	args.found_nonce = pstrdup(b->claimed.nonce);
	DQ_POINT("deliver.claim");
	dq_op_claim(dq_deliver_redis(b->deliver, &b->target), b->queue.relname, &b->outlet->keys, &args,
				&b->claimed);
	DQ_POINT("deliver.claimed");
	if (b->claimed.fence.status != DQ_OK)
	{
		dq_lend_answered(MyDatabaseId, b->outlet->shard_no, b->session, -1, 0, 0);
		return;
	}
	b->floor = Max(b->floor, b->claimed.fence.version);
	dq_lend_answered(MyDatabaseId, b->outlet->shard_no, b->session,
					 b->claimed.fence.version, b->claimed.fence.next_due,
					 b->claimed.ntasks);
	if (b->claimed.answer != DQ_CLAIM_OTHER)
		b->outlet->committed = false;
}

static void
purge(Batch *b)
{
	DqOutlet   *outlet = b->outlet;

	if (!TimestampDifferenceExceeds(outlet->purged_at, GetCurrentTimestamp(), PURGE_MS))
		return;
	begin(b->deliver);
	outlet->purge_from = dq_done_purge(outlet->shard_no, outlet->purge_from, b->replay_window);
	if (ActiveSnapshotSet())
		PopActiveSnapshot();
	CommitTransactionCommand();
	MemoryContextSwitchTo(b->deliver->batch);
	if (outlet->purge_from < 0)
	{
		outlet->purge_from = 0;
		outlet->purged_at = GetCurrentTimestamp();
	}
}

bool
dq_outlet_step(DqDeliver *deliver, DqOutlet *outlet)
{
	Batch		b = {.deliver = deliver, .outlet = outlet};
	TimestampTz now = GetCurrentTimestamp();
	DqLendState lend;
	bool		let_go;

	if (outlet->blocked_until > now)
		return false;
	MemoryContextReset(deliver->batch);
	MemoryContextSwitchTo(deliver->batch);
	if (outlet->parked[0] != '\0')
	{
		if (!prepare(&b) || !sink_is_usable(&b))
			return false;
		set_state(outlet, "");
		outlet->failures = 0;
	}
	lend = dq_lend_get(MyDatabaseId, outlet->shard_no, b.session, &b.floor);
	if (lend == DQ_LEND_STALE)
	{
		/* a permission that was given long ago says nothing of now */
		(void) dq_lend_take(MyDatabaseId, outlet->shard_no, true);
		dq_wake_bridge(MyDatabaseId, InvalidOid);
		return false;
	}
	if (lend == DQ_LEND_GRANTED)
		outlet->asking = true;
	let_go = lend != DQ_LEND_GRANTED && b.session[0] != '\0' && outlet->committed &&
		TimestampDifferenceExceeds(outlet->committed_at, now, LINGER_MS);
	if (lend != DQ_LEND_GRANTED && !let_go)
		return false;
	if (!prepare(&b))
		return false;
	if (lend == DQ_LEND_GRANTED && !dq_lend_take(MyDatabaseId, outlet->shard_no, false))
		return false;

	send_claim(&b, let_go, false);
	if (b.claimed.fence.status == DQ_OK && b.claimed.answer == DQ_CLAIM_OTHER)
	{
		if (!suspect(&b))
			return true;
		ereport(LOG,
				(errmsg("dq_bridge: Redis of queue \"%s\" has another batch than was committed here: tasks due until now are looked up before they are delivered",
						outlet->name)));
		send_claim(&b, let_go, true);
	}
	outlet->asking = false;
	/* frozen: Redis is told later */
	if (b.claimed.fence.status != DQ_OK)
		outlet->committed_at = TimestampTzPlusMilliseconds(now, 500);
	if (b.claimed.fence.status != DQ_OK || b.claimed.answer != DQ_CLAIM_LENT)
	{
		dq_wake_bridge(MyDatabaseId, b.queue.serverid);
		purge(&b);
		return false;
	}
	if (!carry_out(&b))
		return false;
	outlet->failures = 0;
	/* the next claim, or at least that Redis is told */
	dq_lend_want(MyDatabaseId, outlet->shard_no);
	dq_wake_bridge(MyDatabaseId, b.queue.serverid);
	purge(&b);
	return false;
}
