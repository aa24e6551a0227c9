/*
 * members.c
 *	  Taking tasks that are known exactly out of circulation, many in one round trip:
 *	  what UPDATE and DELETE begin with. Each is either an own task that is not
 *	  committed yet, or one in Redis under a hold (PO 8 to 11), or gone. What needs
 *	  waiting (another transaction holds it, something that bears on it is on its way)
 *	  is left open, until its turn comes (turns.c). Called by the foreign-data wrapper.
 */
#include "postgres.h"

#include "api/taker_private.h"
#include "compat.h"
#include "shared/points.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

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
DqQueue *
dq_taker_queue(DqTaker *taker)
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

void
dq_taker_patience(DqTaker *taker)
{
	taker->deadline = 0;
	taker->moved = false;
}

void
dq_taker_wait(DqTaker *taker)
{
	DqQueue    *queue = dq_taker_queue(taker);
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
	DqQueue    *queue = dq_taker_queue(taker);
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

static void
judge(DqTaker *taker, DqMember *member)
{
	DqTake	   *take = &member->take;

	member->again = false;
	if (!take->answered)
		return;
	if (take->member == NULL)
	{
		if (!member->unsent || is_covered(taker, member->shard))
			set_gone(member);
		return;
	}
	if (!take->held)
	{
		member->state = DQ_MEMBER_HELD;
		return;
	}
	dq_hold_void(take->token);
	if (!is_mine(&take->holder))
		return;
	/* held before by this transaction: is that undone, or is it removed? */
	if (!dq_hold_is_left(take->holder.token))
	{
		member->state = DQ_MEMBER_GONE;
		return;
	}
	memcpy(take->from, take->holder.token, DQ_TOKEN_LEN);
	take->take_over = true;
	member->again = true;
}

/* Of one look: what happens to an answer, while Redis works on the next. */
typedef struct Asking
{
	DqTaker    *taker;
	int			shard;
	bool		one;			/* it is looked at precisely, later */
	bool		record;			/* the removals, at once */
} Asking;

static DqMember *
member_of(DqTake *take)
{
	return (DqMember *) ((char *) take - offsetof(DqMember, take));
}

/* The rows that end held tasks; those of a hold that Redis may have lost stay open. */
static void
record_held(DqTaker *taker, int shard, DqTake **tasks, int n)
{
	DqQueue    *queue = dq_taker_queue(taker);
	int32		shard_no = queue->shard_no[shard];
	bool		writing = false;

	for (int i = 0; i < n; i++)
	{
		DqMember   *member = member_of(tasks[i]);

		if (member->state != DQ_MEMBER_HELD || dq_own_has_removed(shard_no, member->take.member))
			continue;
		if (!writing && !dq_hold_writing(shard_no, &member->session))
			return;
		writing = true;
		dq_record_member(queue, shard_no, dq_member_due(member), member->take.member,
						 member->take.token);
		dq_hold_keep(member->take.token);
		member->recorded = true;
	}
	if (writing)
		dq_hold_written();
}

static void
answered(void *arg, DqTake **tasks, int n, const DqTakeResult *result)
{
	Asking	   *asking = arg;
	DqTaker    *taker = asking->taker;
	DqQueue    *queue = dq_taker_queue(taker);
	TakerShard *s = &taker->shards[asking->shard];
	Snapshot	snapshot;

	DQ_POINT("take.received");
	dq_require_ours(queue, queue->shard_no[asking->shard], result->owner_source,
					result->owner_place, result->writer);
	if (result->fence.status == DQ_OK)
		/* PO 7: the floor is everybody's */
		dq_session_note(MyDatabaseId, queue->shard_no[asking->shard], result->fence.session,
						result->fence.version);
	note_result(taker, asking->shard, result);
	for (int i = 0; i < n; i++)
		judge(taker, member_of(tasks[i]));
	if (asking->one || result->fence.status != DQ_OK)
		return;

	/* held ones on which something may bear that is on its way are left open */
	snapshot = RegisterSnapshot(GetLatestSnapshot());
	dq_concerns_read(s->concerns, s->prev, s->old, snapshot);
	UnregisterSnapshot(snapshot);
	for (int i = 0; i < n; i++)
	{
		DqMember   *member = member_of(tasks[i]);

		if (member->state == DQ_MEMBER_HELD &&
			dq_concerns_has(s->concerns, member->take.member, member->take.key))
			member->state = DQ_MEMBER_OPEN;
	}
	if (asking->record)
		record_held(taker, asking->shard, tasks, n);
}

static void
ask_shard(DqTaker *taker, DqRedis *redis, DqQueue *queue, Asking *asking,
		  DqMember **members, int n)
{
	int32		shard_no = queue->shard_no[asking->shard];
	DqTakeArgs	args;
	DqSession	session;
	DqKeys		keys;
	DqTake	  **takes = palloc(n * sizeof(DqTake *));
	MemoryContext old;

	memset(&session, 0, sizeof(session));
	if (!dq_session_get(MyDatabaseId, shard_no, session.session, &session.floor,
						&session.epoch))
		session.session[0] = '\0';	/* the answer says whose it is, or not open */
	args.session = &session;
	args.source = dq_source_get(true)->id;
	args.incarnation = dq_incarnation();
	args.xid = U64FromFullTransactionId(GetTopFullTransactionId());
	args.subxid = GetCurrentTransactionNestLevel() > 1
		? U64FromFullTransactionId(GetCurrentFullTransactionId()) : 0;
	dq_keys_make(&keys, dq_shard_name(queue->name, queue->nshards, asking->shard));
	for (int i = 0; i < n; i++)
	{
		takes[i] = &members[i]->take;
		members[i]->session = session;
		/* from the first byte on it may be executed, whatever we hear of it */
		dq_hold_sent(members[i]->take.token);
	}
	old = MemoryContextSwitchTo(taker->page);
	DQ_POINT("take.send");
	dq_op_take(redis, queue->relname, &keys, &args, takes, n, answered, asking);
	MemoryContextSwitchTo(old);
	pfree(takes);
}

/* All in one pipeline for each shard. Members get into another order. */
void
dq_taker_ask(DqTaker *taker, DqMember **members, int n, bool one, bool record)
{
	DqQueue    *queue = dq_taker_queue(taker);
	DqServer   *server = dq_server_get(queue->serverid, queue->owner, false);
	DqRedis    *redis;
	Asking		asking = {.taker = taker,.one = one,.record = record};
	int			from = 0;

	dq_server_check_usable(server);
	redis = dq_redis_get(&server->target);
	qsort(members, n, sizeof(DqMember *), member_cmp);
	for (int i = 1; i <= n; i++)
	{
		if (i < n && members[i]->shard == members[from]->shard)
			continue;
		asking.shard = members[from]->shard;
		/* a shard that is none any more has been drained */
		if (asking.shard < queue->nshards)
			ask_shard(taker, redis, queue, &asking, members + from, i - from);
		else
			for (int j = from; j < i; j++)
				members[j]->state = DQ_MEMBER_GONE;
		from = i;
	}
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

void
dq_taker_began(DqTaker *taker)
{
	taker->began = RegisterSnapshot(GetLatestSnapshot());
}

void
dq_taker_forget(DqTaker *taker)
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

/*
 * One look at each, more where that is needed without waiting for other transactions.
 * record: the turn of all of them will come, so removals may be recorded now.
 */
void
dq_taker_take(DqTaker *taker, DqMember *members, int n, bool record)
{
	DqQueue    *queue = dq_taker_queue(taker);
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
		member->recorded = member->done = member->again = false;
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
		dq_taker_began(taker);
	dq_taker_patience(taker);
	while (ntodo > 0)
	{
		int			left = 0;
		bool		wait = false;

		dq_taker_ask(taker, todo, ntodo, false, record && !queue->at_once);
		for (int i = 0; i < ntodo; i++)
		{
			DqMember   *member = todo[i];

			if (member->state != DQ_MEMBER_OPEN ||
				(member->take.answered && member->take.member && !member->again))
				continue;		/* open for a reason that has to be waited for */
			/* not there yet, or the shard is not open, or it was too much at once */
			wait |= member->take.answered ? !member->again :
				taker->shards[member->shard].status != DQ_OK;
			todo[left++] = member;
		}
		ntodo = left;
		if (wait)
			dq_taker_wait(taker);
	}
	dq_taker_forget(taker);
	pfree(todo);
	pfree(tokens);
}

