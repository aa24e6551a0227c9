/*
 * poll.c
 *	  dq_poll and dq_poll_bytea: take due tasks from the ready list for this
 *	  transaction. What is taken lies in Redis under a hold (PO 8); an outbox row with
 *	  the hold's token consumes it when the transaction has committed, else the
 *	  bridge puts it back in front (PO 10). Called from SQL.
 */
#include "postgres.h"

#include "api/api.h"
#include "compat.h"
#include "relay/relay.h"
#include "shared/points.h"

#include "access/xact.h"
#include "fmgr.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

PG_FUNCTION_INFO_V1(dq_poll);
PG_FUNCTION_INFO_V1(dq_poll_bytea);

#define PAGE_ELEMENTS	100		/* of one script call and one hold */
#define PAGE_BYTES		(128 * 1024)
#define FROZEN_MS		100		/* between looks at a shard that stays not ready */
#define LONGEST_WAIT_MS	(10 * 60 * 1000)	/* the statement's snapshot is held for as long */

typedef struct Poll
{
	Oid			relid;
	bool		as_text;
	int64		max;
	int64		taken;			/* elements given out */
	TimestampTz deadline;		/* so long for the first element */
	TimestampTz patience;		/* so long for a shard to be ready, at least */
	ReturnSetInfo *rsinfo;
	MemoryContext page;			/* of one script call */
	/* of the queue, as it was found last; in `tries` */
	MemoryContext tries;
	DqQueue    *queue;			/* see dq_queue_get */
	Oid			serverid;
	DqTarget	target;
	int			nshards;
	int32	   *shard_no;
	DqKeys	   *keys;
	DqSession  *sessions;
	int64	   *left;			/* elements, as far as known */
	DqPollArgs	args;
	bool		frozen;			/* a shard does not answer us for the moment */
	bool		holds;			/* holds stand in one */
} Poll;

/* Where the next call begins, so that all shards have their turn. */
static uint32 turn = 0;

/* ---- the queue ---- */

static void
refuse_if_down(Poll *poll)
{
	if (dq_is_known_down(poll->queue))
		ereport(ERROR,
				(errcode(ERRCODE_CONNECTION_FAILURE),
				 errmsg("Redis of queue \"%s\" does not answer", poll->queue->relname),
				 errhint("Poll again later; view dq_stats shows when it is back.")));
}

/* Its definition may have changed since the last look, also while we waited. */
static void
read_queue(Poll *poll)
{
	DqQueue    *queue;
	DqServer   *server;
	int			i;

	AcceptInvalidationMessages();
	queue = dq_queue_get(poll->relid);
	dq_require(queue, ACL_DELETE | ACL_SELECT);
	dq_require_not_producer(queue, "poll");
	if (queue->destination != DQ_DEST_LIST && !queue->list_copy)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("queue \"%s\" has no ready list to poll", queue->relname)));
	poll->args.source = dq_source_get(true)->id;
	poll->args.incarnation = dq_incarnation();
	server = dq_server_get(queue->serverid, queue->owner, false);
	dq_server_check_usable(server);
	poll->target = server->target;

	queue = dq_queue_get(poll->relid);
	dq_shards_resolve(queue);
	poll->queue = queue;
	poll->serverid = queue->serverid;
	MemoryContextReset(poll->tries);
	MemoryContextSwitchTo(poll->tries);
	poll->nshards = queue->nshards;
	poll->shard_no = palloc(poll->nshards * sizeof(int32));
	poll->keys = palloc(poll->nshards * sizeof(DqKeys));
	poll->sessions = palloc0(poll->nshards * sizeof(DqSession));
	poll->left = palloc0(poll->nshards * sizeof(int64));
	for (i = 0; i < poll->nshards; i++)
	{
		poll->shard_no[i] = queue->shard_no[i];
		dq_keys_make(&poll->keys[i], dq_shard_name(queue->name, queue->nshards, i));
		/* none yet: the script says so, or whose the shard is */
		if (!dq_session_get(MyDatabaseId, poll->shard_no[i], poll->sessions[i].session,
							&poll->sessions[i].floor, &poll->sessions[i].epoch))
			poll->sessions[i].session[0] = '\0';
	}
	poll->frozen = poll->holds = false;
}

/* true: the shard has answered us */
static bool
accept(Poll *poll, int shard, const DqPolled *polled)
{
	dq_require_ours(poll->queue, poll->shard_no[shard], polled->owner_source,
					polled->owner_place, polled->writer);
	if (polled->holds > 0)
		poll->holds = true;
	if (polled->fence.status != DQ_OK)
	{
		poll->frozen = true;
		poll->left[shard] = 0;
		return false;
	}
	/* PO 7: the floor is everybody's */
	dq_session_note(MyDatabaseId, poll->shard_no[shard], polled->fence.session,
					polled->fence.version);
	poll->left[shard] = polled->left;
	return true;
}

/*
 * Ask n shards, from that one on. If the connection is lost over it nobody knows
 * whether the script was executed: once more under the same token, which gives the
 * same elements.
 */
static void
call_poll(Poll *poll, int shard, int n, DqPolled *polled)
{
	MemoryContext caller = CurrentMemoryContext;
	TimestampTz began = GetCurrentTimestamp();
	volatile int tries = 0;
	volatile bool done = false;

	while (!done)
	{
		PG_TRY();
		{
			dq_op_poll(dq_redis_get(&poll->target), poll->queue->relname,
					   &poll->keys[shard], n, &poll->sessions[shard], &poll->args, polled);
			done = true;
		}
		PG_CATCH();
		{
			/* a server that was silent for so long will not speak now */
			if (geterrcode() != ERRCODE_CONNECTION_FAILURE || tries++ > 0 ||
				TimestampDifferenceExceeds(began, GetCurrentTimestamp(),
										   poll->target.command_timeout))
				PG_RE_THROW();
			MemoryContextSwitchTo(caller);
			FlushErrorState();
		}
		PG_END_TRY();
	}
}

/*
 * Is there anything? Without a transaction id, so that waiting costs none. One round
 * trip.
 */
static bool
look(Poll *poll)
{
	DqPolled   *polled = palloc0(poll->nshards * sizeof(DqPolled));
	bool		any = false;
	int			i;

	poll->args.token = NULL;
	call_poll(poll, 0, poll->nshards, polled);
	for (i = 0; i < poll->nshards; i++)
		any |= accept(poll, i, &polled[i]) && polled[i].left > 0;
	return any;
}

/* ---- taking ---- */

/*
 * What cannot be given out goes to quarantine, else it would come back with each
 * rollback. false: the shard is not ready.
 */
static bool
reject(Poll *poll, int shard, int of, const int *which, int n)
{
	DqFence		fence;

	(void) dq_op_reject(dq_redis_get(&poll->target), poll->queue->relname,
						&poll->keys[shard], &poll->sessions[shard], poll->args.source,
						poll->args.token, of, "not valid as text", which, n, &fence);
	if (fence.status != DQ_OK)
	{
		poll->frozen = true;
		poll->left[shard] = 0;
		return false;
	}
	dq_session_note(MyDatabaseId, poll->shard_no[shard], fence.session, fence.version);
	ereport(LOG,
			(errmsg("dq_bridge: %d elements of the ready list of queue \"%s\" are no valid text and are in quarantine now",
					n, poll->queue->relname)));
	return true;
}

/* The row that consumes the n elements under the token. */
static void
record_taken(Poll *poll, int shard, const char *token, int n)
{
	bytea	   *value = palloc(VARHDRSZ + DQ_TOKEN_LEN);
	DqRow		row;

	SET_VARSIZE(value, VARHDRSZ + DQ_TOKEN_LEN);
	memcpy(VARDATA(value), token, DQ_TOKEN_LEN);
	memset(&row, 0, sizeof(row));
	row.seq = dq_outbox_next(&row.id);
	row.shard = poll->shard_no[shard];
	row.op = DQ_OP_CONSUME;
	row.due = n;
	row.token = value;
	dq_outbox_insert(&row, poll->serverid);
	/* messages may have been processed meanwhile */
	poll->queue = dq_queue_get(poll->relid);
}

/* At most max elements of one shard, as rows. */
static void
take_page(Poll *poll, int shard, int max)
{
	MemoryContext caller = MemoryContextSwitchTo(poll->page);
	char		token[DQ_TOKEN_LEN];
	DqPolled	polled;
	Datum	   *values;
	int		   *bad;
	int			nbad = 0;
	bool		null = false;
	int			i;

	MemoryContextReset(poll->page);

	/* PO 8: xid, token, register, send */
	poll->args.xid = U64FromFullTransactionId(GetTopFullTransactionId());
	poll->args.subxid = GetCurrentTransactionNestLevel() > 1
		? U64FromFullTransactionId(GetCurrentFullTransactionId()) : 0;
	dq_hold_draw(token);
	poll->args.token = token;
	poll->args.max = max;
	poll->args.max_bytes = PAGE_BYTES;
	dq_hold_sent(token);
	DQ_POINT("poll.send");
	call_poll(poll, shard, 1, &polled);
	DQ_POINT("poll.received");
	if (!accept(poll, shard, &polled) || polled.n == 0)
	{
		dq_hold_void(token);
		MemoryContextSwitchTo(caller);
		return;
	}

	values = palloc(polled.n * sizeof(Datum));
	bad = palloc(polled.n * sizeof(int));
	for (i = 0; i < polled.n; i++)
	{
		const DqReply *e = &polled.elements[i];
		text	   *value = NULL;

		if (!poll->as_text)
		{
			value = palloc(VARHDRSZ + e->len);
			SET_VARSIZE(value, VARHDRSZ + e->len);
			memcpy(VARDATA(value), e->str, e->len);
		}
		else
			value = dq_bytes_text_noerror(e->str, e->len);
		values[i] = PointerGetDatum(value);
		if (value == NULL)
			bad[nbad++] = i;
	}
	if (nbad > 0 && !reject(poll, shard, polled.n, bad, nbad))
	{
		/* what is held goes back when the transaction ends */
		MemoryContextSwitchTo(caller);
		return;
	}
	if (nbad == polled.n)
	{
		dq_hold_void(token);
		MemoryContextSwitchTo(caller);
		return;
	}

	/*
	 * PO 7: only in the session that gave it. If Redis has gone back meanwhile, the
	 * elements may be in the list again: nothing is given out, and what may still be
	 * held goes back when the transaction ends. A session that changes
	 * later does not matter: what is given out now may come again when Redis has lost
	 * data, as G3 says of everything that was taken; raising would not prevent it.
	 */
	if (!dq_hold_writing(poll->shard_no[shard], &poll->sessions[shard]))
	{
		poll->frozen = true;
		poll->left[shard] = 0;
		MemoryContextSwitchTo(caller);
		return;
	}
	record_taken(poll, shard, token, polled.n - nbad);
	DQ_POINT("poll.recorded");
	dq_hold_written();
	dq_hold_keep(token);
	for (i = 0; i < polled.n; i++)
		if (DatumGetPointer(values[i]) != NULL)
		{
			tuplestore_putvalues(poll->rsinfo->setResult, poll->rsinfo->setDesc,
								 &values[i], &null);
			poll->taken++;
		}
	MemoryContextSwitchTo(caller);
}

/* From each shard that has some an equal part, a page at a time. */
static void
take(Poll *poll)
{
	uint32		start = turn++;

	for (;;)
	{
		int			full = 0;
		int64		part;
		int			i;

		for (i = 0; i < poll->nshards; i++)
			if (poll->left[i] > 0)
				full++;
		if (full == 0 || poll->taken >= poll->max)
			return;
		part = (poll->max - poll->taken) / full;
		for (i = 0; i < poll->nshards && poll->taken < poll->max; i++)
		{
			int			shard = (start + i) % poll->nshards;

			if (poll->left[shard] <= 0)
				continue;
			CHECK_FOR_INTERRUPTS();
			take_page(poll, shard, (int) Max(1, Min(part, PAGE_ELEMENTS)));
		}
	}
}

/* One attempt: look, and take what there is. */
static void
attempt(Poll *poll)
{
	bool		has_xid = TransactionIdIsValid(GetTopTransactionIdIfAny());
	int			i;

	read_queue(poll);
	refuse_if_down(poll);
	if (has_xid && poll->nshards == 1)
		poll->left[0] = 1;		/* the first taking tells */
	else if (!look(poll))
		return;
	DQ_POINT("poll.looked");

	/*
	 * PO 12: the lock comes before the row's number. Only now: who waits stands in
	 * nobody's way.
	 */
	LockRelationOid(poll->relid, RowExclusiveLock);
	poll->queue = dq_queue_get(poll->relid);
	take(poll);
	if (poll->taken == 0)
		UnlockRelationOid(poll->relid, RowExclusiveLock);
	for (i = 0; i < poll->nshards; i++)
		dq_arrivals_pass_on(i, poll->left[i]);
}

/*
 * What was rolled back before this call is in front of the list again before it
 * begins: so the order is right for who polls after a rollback, the own one as well.
 * The bridge does it within milliseconds; one that cannot is waited for as long as for
 * a removal.
 */
static void
await_given_back(Poll *poll)
{
	uint64		rollbacks = dq_rollbacks();
	bool		by_hand = false;

	for (;;)
	{
		bool		done = true;
		int			i;

		for (i = 0; i < poll->nshards && done; i++)
		{
			DqShardStats stats;

			done = !dq_stats_get(MyDatabaseId, poll->shard_no[i], &stats) ||
				stats.session[0] == '\0' || stats.rollbacks >= rollbacks;
		}
		if (done || by_hand || GetCurrentTimestamp() >= poll->patience)
			return;
		CHECK_FOR_INTERRUPTS();
		by_hand = !dq_bridge_alive(MyDatabaseId, poll->serverid);
		dq_wait_for_relay(poll->serverid, poll->patience);
	}
}

static void
poll_loop(Poll *poll)
{
	read_queue(poll);
	refuse_if_down(poll);
	await_given_back(poll);
	for (;;)
	{
		TimestampTz now;

		CHECK_FOR_INTERRUPTS();
		attempt(poll);
		if (poll->taken > 0)
			return;
		now = GetCurrentTimestamp();
		if (poll->frozen)
		{
			/*
			 * Being healed, or not entered yet. A transaction that has done something
			 * may be what that waits for.
			 */
			TimestampTz until = TransactionIdIsValid(GetTopTransactionIdIfAny()) ?
				poll->patience : Max(poll->patience, poll->deadline);

			if (now >= until)
				return;
			if (now < poll->patience)
				dq_wait_for_relay(poll->serverid, poll->patience);
			else
				dq_redis_wait_any(NULL, 0, FROZEN_MS);
			continue;
		}
		if (poll->holds && now < poll->patience &&
			!dq_bridge_alive(MyDatabaseId, poll->serverid))
		{
			/* nobody else puts back what ended transactions have left */
			(void) dq_relay_by_hand(poll->serverid,
									TimestampDifferenceMilliseconds(now, poll->patience));
			poll->patience = now;
			continue;
		}
		if (now >= poll->deadline)
			return;
		DQ_POINT("poll.wait");
		dq_arrivals_wait(&poll->target, poll->keys, poll->shard_no, poll->nshards,
						 poll->deadline);
	}
}

/* Without an error a poll has asked Redis: any failure of that is 08006. */
static void
run(Poll *poll)
{
	MemoryContext caller = CurrentMemoryContext;

	PG_TRY();
	{
		poll_loop(poll);
	}
	PG_CATCH();
	{
		dq_arrivals_forget();
		if (geterrcode() == ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION)
		{
			ErrorData  *error;

			MemoryContextSwitchTo(caller);
			error = CopyErrorData();
			FlushErrorState();
			error->sqlerrcode = ERRCODE_CONNECTION_FAILURE;
			ReThrowError(error);
		}
		PG_RE_THROW();
	}
	PG_END_TRY();
	dq_arrivals_forget();
	MemoryContextSwitchTo(caller);
}

/* ---- SQL ---- */

static TimestampTz
wait_until(Interval *wait)
{
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz longest = TimestampTzPlusMilliseconds(now, LONGEST_WAIT_MS);
	TimestampTz until;

	if (DqIntervalIsInfinite(wait))
		until = wait->month > 0 ? longest : DT_NOBEGIN;
	else
		until = dq_delay_from_now(wait);
	if (until < now)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("wait must not be negative")));
	return Min(until, longest);
}

static Datum
poll_function(FunctionCallInfo fcinfo, const char *name, bool as_text)
{
	static const char *const names[] = {"queue", "max", "wait"};
	MemoryContext caller = CurrentMemoryContext;
	Poll		poll;
	int			i;

	for (i = 0; i < lengthof(names); i++)
		if (PG_ARGISNULL(i))
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("%s must not be NULL", names[i])));
	PreventCommandIfReadOnly(name);
	PreventCommandIfParallelMode(name);
	PreventCommandDuringRecovery(name);

	memset(&poll, 0, sizeof(poll));
	poll.relid = PG_GETARG_OID(0);
	poll.as_text = as_text;
	poll.max = PG_GETARG_INT64(1);
	if (poll.max < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max must not be negative")));
	poll.deadline = wait_until(PG_GETARG_INTERVAL_P(2));
	poll.page = AllocSetContextCreate(CurrentMemoryContext, "dq_poll page",
									  ALLOCSET_DEFAULT_SIZES);
	poll.tries = AllocSetContextCreate(CurrentMemoryContext, "dq_poll",
									   ALLOCSET_DEFAULT_SIZES);
	InitMaterializedSRF(fcinfo, MAT_SRF_USE_EXPECTED_DESC);
	poll.rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;

	poll.queue = dq_queue_get(poll.relid);
	poll.patience = TimestampTzPlusMilliseconds(GetCurrentTimestamp(),
												poll.queue->remove_timeout);
	if (poll.max > 0)
		run(&poll);
	else
		read_queue(&poll);		/* its errors all the same */
	MemoryContextSwitchTo(caller);
	return (Datum) 0;
}

Datum
dq_poll(PG_FUNCTION_ARGS)
{
	return poll_function(fcinfo, "dq_poll()", true);
}

Datum
dq_poll_bytea(PG_FUNCTION_ARGS)
{
	return poll_function(fcinfo, "dq_poll_bytea()", false);
}
