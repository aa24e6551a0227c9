/*
 * members.c
 *	  Taking tasks that are known exactly out of circulation, many in one round trip:
 *	  what UPDATE and DELETE begin with. Each is either an own task that is not
 *	  committed yet, or one in Redis under a hold (PO 8 to 11), or gone. What needs
 *	  waiting (another transaction holds it, something that bears on it is on its way)
 *	  is left open, until its turn comes. Called by the foreign-data wrapper.
 */
#include "postgres.h"

#include <math.h>

#include "api/api.h"
#include "compat.h"
#include "shared/points.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

typedef struct TakerShard
{
	DqConcerns *concerns;
	DqStatus	status;			/* of the last answer */
	DqTakeResult last;			/* where the fence was then, in last_context */
	MemoryContext last_context;
	DqSnapshot *prev;
	DqSnapshot *old;			/* NULL: none */
} TakerShard;

struct DqTaker
{
	MemoryContext context;
	MemoryContext page;			/* of what is known of tasks */
	Oid			relid;
	int			nshards;
	TakerShard *shards;
	Snapshot	began;			/* what is shown from the outbox was committed before */
	TimestampTz deadline;		/* of a wait for the relay */
	bool		moved;			/* the relay has moved since */
};

DqTaker *
dq_taker_create(MemoryContext context, Oid relid)
{
	DqTaker    *taker = MemoryContextAllocZero(context, sizeof(DqTaker));

	taker->context = context;
	taker->relid = relid;
	return taker;
}

void
dq_taker_page(DqTaker *taker, MemoryContext page)
{
	taker->page = page;
}

/* The definition, as it is now. */
static DqQueue *
current_queue(DqTaker *taker)
{
	DqQueue    *queue = dq_queue_get(taker->relid);

	dq_shards_resolve(queue);
	if (queue->nshards > taker->nshards)
	{
		MemoryContext old = MemoryContextSwitchTo(taker->context);
		int			i = taker->nshards;

		taker->shards = taker->shards
			? repalloc(taker->shards, queue->nshards * sizeof(TakerShard))
			: palloc(queue->nshards * sizeof(TakerShard));
		for (; i < queue->nshards; i++)
		{
			memset(&taker->shards[i], 0, sizeof(TakerShard));
			taker->shards[i].concerns = dq_concerns_create(taker->context, queue->shard_no[i]);
			taker->shards[i].last_context = AllocSetContextCreate(taker->context,
																  "dq_bridge fence",
																  ALLOCSET_SMALL_SIZES);
		}
		taker->nshards = queue->nshards;
		MemoryContextSwitchTo(old);
	}
	return queue;
}

/* ---- patience -------------------------------------------------------------------- */

/*
 * A row is changed or it is not: there is no third answer, as dq_remove has one. So
 * the wait lasts as long as the relay moves on, and an error ends it.
 */
static int
patience(const DqQueue *queue)
{
	DqServer   *server = dq_server_get(queue->serverid, queue->owner, false);

	return Max(queue->remove_timeout, server->target.command_timeout);
}

static void
start_waiting(DqTaker *taker)
{
	taker->deadline = 0;
	taker->moved = false;
}

static void
wait_for_relay(DqTaker *taker)
{
	DqQueue    *queue = current_queue(taker);
	TimestampTz now = GetCurrentTimestamp();

	CHECK_FOR_INTERRUPTS();
	if (taker->deadline == 0 || taker->moved)
		taker->deadline = TimestampTzPlusMilliseconds(now, patience(queue));
	taker->moved = false;
	if (now >= taker->deadline)
		ereport(ERROR,
				(errcode(ERRCODE_CONNECTION_FAILURE),
				 errmsg("no certain answer from Redis for queue \"%s\" within %d ms",
						queue->relname, patience(queue)),
				 errhint("Is a worker running? dq_stats says what a shard waits for.")));
	dq_wait_for_relay(queue->serverid, taker->deadline);
}

/* ---- one look --------------------------------------------------------------------- */

static int
member_cmp(const void *a, const void *b)
{
	const DqMember *x = *(DqMember *const *) a;
	const DqMember *y = *(DqMember *const *) b;
	int			cmp;

	if (x->shard != y->shard)
		return x->shard < y->shard ? -1 : 1;
	if (x->take.score != y->take.score)
		return x->take.score < y->take.score ? -1 : 1;
	if (x->take.idlen != y->take.idlen)
		return x->take.idlen < y->take.idlen ? -1 : 1;
	cmp = memcmp(x->take.id, y->take.id, x->take.idlen);
	return cmp != 0 ? cmp : x < y ? -1 : x > y;
}

static void
note_result(DqTaker *taker, int shard, const DqTakeResult *result)
{
	TakerShard *s = &taker->shards[shard];
	MemoryContext old;

	s->status = result->fence.status;
	if (s->last.prev && strcmp(s->last.prev, result->prev) == 0 &&
		strcmp(s->last.old, result->old) == 0 &&
		strcmp(s->last.fence.position, result->fence.position) == 0)
		return;
	MemoryContextReset(s->last_context);
	old = MemoryContextSwitchTo(s->last_context);
	s->last = *result;
	s->last.fence.position = pstrdup(result->fence.position);
	s->last.prev = pstrdup(result->prev);
	s->last.old = pstrdup(result->old);
	s->prev = dq_snapshot_in(s->last.prev);
	s->old = s->last.old[0] ? dq_snapshot_in(s->last.old) : NULL;
	taker->moved = true;
	MemoryContextSwitchTo(old);
}

static void
ask_shard(DqTaker *taker, DqRedis *redis, DqQueue *queue, int shard, DqMember **members, int n)
{
	DqTakeArgs	args;
	DqTakeResult result;
	DqSession	session;
	DqKeys		keys;
	DqTake	  **takes = palloc(n * sizeof(DqTake *));
	MemoryContext old;

	memset(&session, 0, sizeof(session));
	if (!dq_session_get(MyDatabaseId, queue->shard_no[shard], session.session, &session.floor))
		session.session[0] = '\0';	/* the answer says whose it is, or not open */
	args.session = &session;
	args.source = dq_source_get(true)->id;
	args.incarnation = dq_incarnation();
	args.xid = U64FromFullTransactionId(GetTopFullTransactionId());
	args.subxid = GetCurrentTransactionNestLevel() > 1
		? U64FromFullTransactionId(GetCurrentFullTransactionId()) : 0;
	dq_keys_make(&keys, dq_shard_name(queue->name, queue->nshards, shard));
	for (int i = 0; i < n; i++)
	{
		takes[i] = &members[i]->take;
		/* from the first byte on it may be executed, whatever we hear of it */
		dq_hold_sent(members[i]->take.token);
	}

	old = MemoryContextSwitchTo(taker->page);
	DQ_POINT("take.send");
	dq_op_take(redis, queue->relname, &keys, &args, takes, n, &result);
	DQ_POINT("take.received");
	MemoryContextSwitchTo(old);
	dq_require_ours(queue, result.owner_source, result.owner_place);
	if (result.fence.status == DQ_OK)
		/* PO 7: the floor is everybody's */
		dq_session_note(MyDatabaseId, queue->shard_no[shard], result.fence.session,
						result.fence.version);
	note_result(taker, shard, &result);
	for (int i = 0; i < n; i++)
		members[i]->session = session;
	pfree(takes);
}

/* All in one pipeline for each shard. Members get into another order. */
static void
ask(DqTaker *taker, DqMember **members, int n)
{
	DqQueue    *queue = current_queue(taker);
	DqServer   *server = dq_server_get(queue->serverid, queue->owner, false);
	DqRedis    *redis;
	int			from = 0;

	dq_server_check_usable(server);
	redis = dq_redis_get(&server->target);
	qsort(members, n, sizeof(DqMember *), member_cmp);
	for (int i = 1; i <= n; i++)
	{
		if (i < n && members[i]->shard == members[from]->shard)
			continue;
		/* a shard that is none any more has been drained */
		if (members[from]->shard < queue->nshards)
			ask_shard(taker, redis, queue, members[from]->shard, members + from, i - from);
		else
			for (int j = from; j < i; j++)
				members[j]->take.answered = true;
		from = i;
	}
}

/* ---- what an answer means ------------------------------------------------------------ */

static bool
is_mine(const DqHold *holder)
{
	return strcmp(holder->source, dq_source_get(true)->id) == 0 &&
		holder->incarnation == dq_incarnation() &&
		holder->xid == U64FromFullTransactionId(GetTopFullTransactionId());
}

/* Had all that was committed when this began been applied when the shard answered? */
static bool
is_covered(DqTaker *taker, int shard)
{
	DqQueue    *queue = current_queue(taker);
	TakerShard *s = &taker->shards[shard];

	if (taker->began == NULL || s->prev == NULL)
		return false;
	return dq_outbox_is_covered(queue->shard_no[shard], s->prev, s->old, taker->began);
}

static void
set_gone(DqMember *member)
{
	dq_hold_void(member->take.token);
	member->state = DQ_MEMBER_GONE;
}

/* true: ask again at once */
static bool
judge(DqTaker *taker, DqMember *member)
{
	DqTake	   *take = &member->take;

	if (!take->answered)
		return false;
	if (take->member == NULL)
	{
		if (!member->unsent || is_covered(taker, member->shard))
			set_gone(member);
		return false;
	}
	if (!take->held)
	{
		member->state = DQ_MEMBER_HELD;
		return false;
	}
	dq_hold_void(take->token);
	if (!is_mine(&take->holder))
		return false;
	/* held before by this transaction: is that undone, or is it removed? */
	if (!dq_hold_is_left(take->holder.token))
	{
		member->state = DQ_MEMBER_GONE;
		return false;
	}
	memcpy(take->from, take->holder.token, DQ_TOKEN_LEN);
	take->take_over = true;
	return true;
}

/* ---- many ------------------------------------------------------------------------------ */

static bool
take_own(DqTaker *taker, DqQueue *queue, DqMember *member)
{
	DqOwnTask	own;
	MemoryContext old;
	char		state;
	uint64		id = 0;

	/* only what is shown from the outbox can be an own one */
	if (!member->unsent || member->shard >= queue->nshards)
		return false;
	for (int i = 0; i < 8; i++)
		id = (id << 8) | (unsigned char) member->take.id[i];
	state = dq_own_task(queue->shard_no[member->shard], (int64) member->take.score, id, &own);
	if (state == 0)
		return false;
	if (state == 'g')
	{
		member->state = DQ_MEMBER_GONE;
		return true;
	}
	old = MemoryContextSwitchTo(taker->page);
	member->take.member = dq_member_make(own.id, own.payload);
	member->take.key = own.key ? (bytea *) pg_detoast_datum_copy((struct varlena *) own.key) : NULL;
	MemoryContextSwitchTo(old);
	member->state = DQ_MEMBER_OWN;
	return true;
}

static void
remember_beginning(DqTaker *taker)
{
	taker->began = RegisterSnapshot(GetLatestSnapshot());
}

static void
forget_beginning(DqTaker *taker)
{
	if (taker->began)
		UnregisterSnapshot(taker->began);
	taker->began = NULL;
}

/* A join may show a task more than once: the first row counts. */
static int
drop_repeated(DqMember **members, int n)
{
	int			kept = 0;

	qsort(members, n, sizeof(DqMember *), member_cmp);
	for (int i = 0; i < n; i++)
	{
		const DqMember *last = kept > 0 ? members[kept - 1] : NULL;

		if (last && last->shard == members[i]->shard &&
			last->take.score == members[i]->take.score &&
			last->take.old == members[i]->take.old &&
			last->take.idlen == members[i]->take.idlen &&
			memcmp(last->take.id, members[i]->take.id, last->take.idlen) == 0)
			members[i]->state = DQ_MEMBER_GONE;
		else
			members[kept++] = members[i];
	}
	return kept;
}

/* Held ones on which something may bear that is on its way are left open. */
static void
check_concerns(DqTaker *taker, DqMember *members, int n)
{
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	bool	   *read = palloc0(Max(taker->nshards, 1) * sizeof(bool));

	for (int i = 0; i < n; i++)
	{
		DqMember   *member = &members[i];
		TakerShard *s;

		if (member->state != DQ_MEMBER_HELD)
			continue;
		s = &taker->shards[member->shard];
		if (!read[member->shard])
			dq_concerns_read(s->concerns, s->prev, s->old, snapshot);
		read[member->shard] = true;
		if (dq_concerns_has(s->concerns, member->take.member, member->take.key))
			member->state = DQ_MEMBER_OPEN;
	}
	pfree(read);
	UnregisterSnapshot(snapshot);
}

/*
 * One look at each, more where that is needed without waiting for other transactions.
 */
void
dq_taker_take(DqTaker *taker, DqMember *members, int n)
{
	DqQueue    *queue = current_queue(taker);
	DqMember  **todo = palloc(Max(n, 1) * sizeof(DqMember *));
	char	   *tokens = palloc(Max(n, 1) * DQ_TOKEN_LEN);
	int			ntodo = 0;
	bool		unsent = false;

	if (n > 0 && !pg_strong_random(tokens, (size_t) n * DQ_TOKEN_LEN))
		ereport(ERROR,
				(errcode(ERRCODE_INTERNAL_ERROR),
				 errmsg("could not generate a random token")));
	for (int i = 0; i < n; i++)
	{
		DqMember   *member = &members[i];

		member->state = DQ_MEMBER_OPEN;
		member->recorded = false;
		member->take.take_over = member->take.answered = member->take.held = false;
		member->take.member = member->take.key = NULL;
		memcpy(member->take.token, tokens + i * DQ_TOKEN_LEN, DQ_TOKEN_LEN);
		if (take_own(taker, queue, member))
			continue;
		unsent |= member->unsent;
		todo[ntodo++] = member;
	}
	ntodo = drop_repeated(todo, ntodo);
	if (unsent)
		remember_beginning(taker);
	start_waiting(taker);
	while (ntodo > 0)
	{
		int			left = 0;
		bool		wait = false;

		ask(taker, todo, ntodo);
		for (int i = 0; i < ntodo; i++)
		{
			DqMember   *member = todo[i];
			bool		again = judge(taker, member);

			if (member->state != DQ_MEMBER_OPEN || (member->take.held && !again))
				continue;
			/* not there yet, or the shard is not open, or it was too much at once */
			wait |= member->take.answered ? !again :
				taker->shards[member->shard].status != DQ_OK;
			todo[left++] = member;
		}
		ntodo = left;
		if (wait)
			wait_for_relay(taker);
	}
	forget_beginning(taker);
	check_concerns(taker, members, n);
	pfree(todo);
	pfree(tokens);
}

/* ms, rounded up */
int64
dq_member_due(const DqMember *member)
{
	double		due = ceil(member->take.score);

	if (isnan(due) || due >= 9.2e18)
		return PG_INT64_MAX;
	return due <= -9.2e18 ? PG_INT64_MIN : (int64) due;
}

/* ---- one, with all the waiting it needs ---------------------------------------------- */

/* As for a row lock. */
static void
wait_for_holder(DqTaker *taker, DqMember *member)
{
	DqTake	   *take = &member->take;
	FullTransactionId xid = FullTransactionIdFromU64(take->holder.xid);
	TimestampTz deadline = 0;	/* this wait does not count */
	Snapshot	snapshot;
	DqQueue    *queue;

	if (!dq_wait_for_holder(&take->holder, dq_source_get(true)->id, &deadline))
	{
		wait_for_relay(taker);	/* a former owner's: the bridge puts it back */
		return;
	}
	start_waiting(taker);
	queue = current_queue(taker);
	if (member->shard >= queue->nshards)
		return;
	snapshot = RegisterSnapshot(GetLatestSnapshot());
	if (dq_outbox_has_row(queue->shard_no[member->shard], xid, take->holder.token, snapshot))
		member->state = DQ_MEMBER_GONE; /* removed, exactly this one */
	else
	{
		memcpy(take->from, take->holder.token, DQ_TOKEN_LEN);
		take->take_over = true;
	}
	UnregisterSnapshot(snapshot);
}

/* Is nothing that bears on the held task on its way? (PO 11, H15) */
static bool
is_settled(DqTaker *taker, DqMember *member)
{
	DqQueue    *queue = current_queue(taker);
	TakerShard *s = &taker->shards[member->shard];
	const bytea *element = member->take.key;
	Snapshot	snapshot;
	bool		concerns;

	if (element == NULL)
	{
		text	   *none = cstring_to_text("");

		element = (bytea *) none;
	}
	snapshot = RegisterSnapshot(GetLatestSnapshot());
	concerns = dq_outbox_concerns(queue->shard_no[member->shard], s->prev, s->old, snapshot,
								  element, member->take.member);
	UnregisterSnapshot(snapshot);
	return !concerns;
}

static void
settle(DqTaker *taker, DqMember *member)
{
	bool		wait = false;

	if (member->unsent)
		remember_beginning(taker);
	start_waiting(taker);
	if (member->take.answered && member->take.held)
		wait_for_holder(taker, member);
	while (member->state == DQ_MEMBER_OPEN)
	{
		if (wait)
			wait_for_relay(taker);
		ask(taker, &member, 1);
		wait = !judge(taker, member);
		if (member->state == DQ_MEMBER_HELD && !is_settled(taker, member))
			member->state = DQ_MEMBER_OPEN;
		else if (member->state == DQ_MEMBER_OPEN && member->take.answered && member->take.held &&
				 wait)
		{
			wait_for_holder(taker, member);
			wait = false;
		}
	}
	forget_beginning(taker);
}

/*
 * The row that ends the task, in this transaction. false: it was not pending any more.
 */
bool
dq_taker_remove(DqTaker *taker, DqMember *member)
{
	for (;;)
	{
		DqQueue    *queue;
		int32		shard;

		if (member->state == DQ_MEMBER_OPEN)
			settle(taker, member);
		if (member->state == DQ_MEMBER_GONE || member->recorded)
			return false;
		queue = current_queue(taker);
		if (member->shard >= queue->nshards)
			return false;
		shard = queue->shard_no[member->shard];
		/* by a trigger's or function's removal, since it was taken */
		if (dq_own_has_removed(shard, member->take.member))
			return false;
		if (member->state == DQ_MEMBER_OWN)
		{
			dq_record_member(queue, shard, dq_member_due(member), member->take.member, NULL);
			break;
		}
		/* PO 7: of a hold that Redis may have lost nothing is written */
		if (dq_hold_writing(shard, member->session.session))
		{
			dq_record_member(queue, shard, dq_member_due(member), member->take.member,
							 member->take.token);
			dq_hold_written();
			dq_hold_keep(member->take.token);
			break;
		}
		member->state = DQ_MEMBER_OPEN;
		member->take.answered = false;
	}
	member->recorded = true;
	return true;
}

/* ---- those whose turn did not come ------------------------------------------------------ */

static void
put_back(DqTaker *taker, DqQueue *queue, int shard, const char *tokens, int n)
{
	DqServer   *server = dq_server_get(queue->serverid, queue->owner, false);
	DqSession	session;
	DqKeys		keys;
	DqFence		fence;

	if (n == 0 || shard >= queue->nshards ||
		!dq_session_get(MyDatabaseId, queue->shard_no[shard], session.session, &session.floor))
		return;
	dq_keys_make(&keys, dq_shard_name(queue->name, queue->nshards, shard));
	(void) dq_op_restore(dq_redis_get(&server->target), queue->relname, &keys,
						 session.session, session.floor, dq_source_get(true)->id, tokens, n,
						 &fence);
	if (fence.status != DQ_OK)
		return;
	for (int i = 0; i < n; i++)
		dq_hold_void(tokens + i * DQ_TOKEN_LEN);
}

#define MANY_TOKENS 100			/* of one script call */

/* Now, if Redis answers; else the bridge does it when the transaction has ended. */
void
dq_taker_release(DqTaker *taker, DqMember *members, int n)
{
	MemoryContext caller = CurrentMemoryContext;
	DqQueue    *queue = current_queue(taker);
	char		tokens[MANY_TOKENS * DQ_TOKEN_LEN];
	bool		any = false;

	for (int i = 0; i < n && !any; i++)
		any = !members[i].recorded && members[i].take.answered &&
			dq_hold_is_left(members[i].take.token);
	if (!any)
		return;
	PG_TRY();
	{
		for (int shard = 0; shard < queue->nshards; shard++)
		{
			int			m = 0;

			for (int i = 0; i < n; i++)
			{
				if (members[i].shard != shard || members[i].recorded ||
					!dq_hold_is_left(members[i].take.token))
					continue;
				memcpy(tokens + m++ * DQ_TOKEN_LEN, members[i].take.token, DQ_TOKEN_LEN);
				if (m == MANY_TOKENS)
				{
					put_back(taker, queue, shard, tokens, m);
					m = 0;
				}
			}
			put_back(taker, queue, shard, tokens, m);
		}
	}
	PG_CATCH();
	{
		if (!dq_is_outage(geterrcode()))
			PG_RE_THROW();
		MemoryContextSwitchTo(caller);
		FlushErrorState();
	}
	PG_END_TRY();
}
