/*
 * take.c
 *	  Taking one pending task out of circulation for this transaction, what
 *	  dq_remove and dq_reschedule begin with: the own transaction's tasks first, then
 *	  Redis under a hold (PO 8 to 11). Whoever finds the task held by another
 *	  transaction waits for its end, as for a row lock.
 */
#include "postgres.h"

#include "api/api.h"
#include "compat.h"
#include "shared/points.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

typedef struct Asking
{
	DqQueue    *queue;
	bytea	   *element;
	bool		key_only;		/* a trigger's: never by id or payload */
	int			home;			/* shard where the element would live as a key */
	DqKeys	   *keys;			/* of each shard */
	DqSession  *sessions;		/* of each shard */
	DqFound    *found;			/* of each shard */
	DqHoldArgs	args;
	char		token[DQ_TOKEN_LEN];
	char	   *skip;			/* 8 bytes of each id that does not count */
	char	   *free;			/* tokens that may be taken over */
	int			nfree;
	TimestampTz deadline;
	Snapshot	snapshot;		/* what it sees was committed before */
} Asking;

/* What one look has shown. */
typedef enum Look
{
	LOOK_NONE,					/* nothing there */
	LOOK_TAKEN,					/* it is held for us */
	LOOK_HELD,					/* another transaction holds it */
	LOOK_AGAIN,					/* it went away between two steps */
	LOOK_WAIT,					/* the shard is not ready for us */
	LOOK_LATE					/* not within remove_timeout */
} Look;

/* The queue's server with no more patience than remove_timeout leaves. */
static DqTarget
patient_target(Asking *asking)
{
	DqServer   *server = dq_server_get(asking->queue->serverid, asking->queue->owner, false);
	long		left = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), asking->deadline);
	DqTarget	target;

	dq_server_check_usable(server);
	target = server->target;
	target.command_timeout = Min(target.command_timeout, Max(left, 1));
	target.connect_timeout = Min(target.connect_timeout, Max(left, 1));
	return target;
}

/* Key before id before payload, then the earliest due. */
bool
dq_found_is_better(char how, int64 due, char than_how, int64 than_due)
{
	static const char rank[] = "kip";
	const char *a = strchr(rank, how),
			   *b = strchr(rank, than_how);

	return a != b ? a < b : due < than_due;
}

/* ---- one look ---- */

/* Without one the answer will say whose the queue is, or that it is not open. */
static void
get_sessions(Asking *asking)
{
	int			i;

	for (i = 0; i < asking->queue->nshards; i++)
	{
		DqSession  *s = &asking->sessions[i];

		if (!dq_session_get(MyDatabaseId, asking->queue->shard_no[i], s->session, &s->floor,
							&s->epoch))
			s->session[0] = '\0';
	}
}

/* The answers of shards from..to: are they answers at all? */
static bool
accept(Asking *asking, int from, int to)
{
	bool		ready = true;
	int			i;

	for (i = from; i < to; i++)
	{
		DqFound    *f = &asking->found[i];

		dq_require_ours(asking->queue, asking->queue->shard_no[i], f->owner_source,
						f->owner_place, f->writer);
		if (f->fence.status != DQ_OK)
			ready = false;
		else
			/* PO 7: the floor is everybody's */
			dq_session_note(MyDatabaseId, asking->queue->shard_no[i], f->fence.session,
							f->fence.version);
	}
	return ready;
}

static bool
is_own_removed(Asking *asking, int shard, const DqFound *found)
{
	return found->found && dq_own_has_removed(asking->queue->shard_no[shard], found->member);
}

/* Give back what the home shard has given: the task lies elsewhere. */
static void
release(Asking *asking, DqRedis *redis, int shard)
{
	DqFence		fence;
	int			left;

	(void) dq_op_restore(redis, asking->queue->relname, &asking->keys[shard],
						 asking->sessions[shard].session, asking->sessions[shard].floor,
						 asking->args.source, asking->token, 1, &fence, &left);
}

/* Exactly this member, in a shard that was only looked at. */
static Look
hold_member(Asking *asking, DqRedis *redis, int shard, bytea *member, int64 due)
{
	DqHoldArgs	args = asking->args;
	char		how = asking->found[shard].how;
	bytea	   *key = asking->found[shard].key;
	DqFound    *f = &asking->found[shard];

	args.member = member;
	args.due = due;
	dq_op_hold(redis, asking->queue->relname, asking->keys, shard, shard + 1, shard,
			   asking->sessions, &args, asking->found);
	if (!accept(asking, shard, shard + 1))
		return LOOK_WAIT;
	f->how = how;
	if (f->key == NULL)
		f->key = key;
	if (!f->found)
		return LOOK_AGAIN;
	return f->taken ? LOOK_TAKEN : f->held ? LOOK_HELD : LOOK_AGAIN;
}

/*
 * Among tasks that the index does not know: in bounded steps, so long as there is
 * patience.
 */
static Look
look_through(Asking *asking, DqRedis *redis, int *where)
{
	DqQueue    *queue = asking->queue;
	int			best = -1;
	int			i;

	for (i = 0; i < queue->nshards; i++)
	{
		DqFound    *f = &asking->found[i];
		char	   *score = NULL;
		bytea	   *member = NULL;

		if (!f->scan_more)
			continue;
		DQ_COUNT(queue->shard_no[i], remove_scans, 1);
		for (;;)
		{
			bool		ended = dq_op_find_scan(redis, queue->relname, &asking->keys[i],
												asking->args.source, asking->element, 0,
												&score, &member, f);

			if (is_own_removed(asking, i, f))
			{
				f->found = false;	/* go on behind it */
				continue;
			}
			if (ended)
				break;
			/* the relay goes on with it, in its own time */
			if (GetCurrentTimestamp() >= asking->deadline)
				return LOOK_LATE;
			CHECK_FOR_INTERRUPTS();
		}
		if (f->found)
		{
			f->how = 'p';
			if (best < 0 || f->due < asking->found[best].due)
				best = i;
		}
	}
	if (best < 0)
		return LOOK_NONE;
	*where = best;
	return hold_member(asking, redis, best, asking->found[best].member,
					   asking->found[best].due);
}

/* One look at all shards, in one round trip if the task lies where it should. */
static Look
look(Asking *asking, int *where)
{
	DqQueue    *queue = asking->queue;
	DqTarget	target = patient_target(asking);
	DqRedis    *redis = dq_redis_get(&target);
	int			best = -1;
	bool		again = false;
	int			i;

	get_sessions(asking);
	dq_op_hold(redis, queue->relname, asking->keys, 0, queue->nshards, asking->home,
			   asking->sessions, &asking->args, asking->found);
	if (!accept(asking, 0, queue->nshards))
		return LOOK_WAIT;
	for (i = 0; i < queue->nshards; i++)
	{
		DqFound    *f = &asking->found[i];

		/* it has swept away many stale entries, and may find it now */
		if (f->again)
			again = true;
		if (f->found && (best < 0 || dq_found_is_better(f->how, f->due,
														 asking->found[best].how,
														 asking->found[best].due)))
			best = i;
	}
	if (again)
		return LOOK_AGAIN;
	/* removed before by this transaction: what else is there? */
	if (best >= 0 && is_own_removed(asking, best, &asking->found[best]))
	{
		const bytea *member = asking->found[best].member;

		if (VARSIZE_ANY_EXHDR(member) < 9 || VARDATA_ANY(member)[0] != 8)
			return LOOK_LATE;	/* no id that could be passed over */
		asking->skip = repalloc(asking->skip, asking->args.skip_len + 8);
		memcpy(asking->skip + asking->args.skip_len, VARDATA_ANY(member) + 1, 8);
		asking->args.skip = asking->skip;
		asking->args.skip_len += 8;
		return LOOK_AGAIN;
	}
	if (best < 0)
	{
		if (asking->key_only)
			return LOOK_NONE;
		return look_through(asking, redis, where);
	}
	*where = best;
	if (best == asking->home)
		return asking->found[best].taken ? LOOK_TAKEN : LOOK_HELD;
	if (asking->found[asking->home].taken)
		release(asking, redis, asking->home);
	if (asking->found[best].held)
		return LOOK_HELD;
	return hold_member(asking, redis, best, asking->found[best].member,
					   asking->found[best].due);
}

/* ---- is it the truth? ---- */

/*
 * Is nothing that could change the answer still on its way? (PO 11, H15)
 */
static bool
is_settled(Asking *asking, const bytea *member)
{
	int			i;

	for (i = 0; i < asking->queue->nshards; i++)
	{
		DqFound    *f = &asking->found[i];

		if (f->prev == NULL ||
			dq_outbox_concerns(asking->queue->shard_no[i], dq_snapshot_in(f->prev),
							   f->old[0] ? dq_snapshot_in(f->old) : NULL,
							   asking->snapshot, asking->element, member))
			return false;
	}
	return true;
}

static void
wait_for_relay(Asking *asking)
{
	dq_wait_for_relay(asking->queue->serverid, asking->deadline);
}

static void
retake_snapshot(Asking *asking)
{
	if (asking->snapshot)
		UnregisterSnapshot(asking->snapshot);
	asking->snapshot = NULL;
	asking->snapshot = RegisterSnapshot(dq_fresh_snapshot());
}

/*
 * Afterwards either its row with the token can be seen, then the relay is about to
 * end the hold; or it never will, then the hold may be taken over by naming its
 * token. The commit log is not asked.
 */
static void
wait_for_holder(Asking *asking, int where)
{
	DqHold	   *holder = &asking->found[where].holder;
	FullTransactionId xid = FullTransactionIdFromU64(holder->xid);

	if (!dq_wait_for_holder(holder, asking->args.source, &asking->deadline))
	{
		wait_for_relay(asking);
		return;
	}
	retake_snapshot(asking);
	if (dq_outbox_has_row(asking->queue->shard_no[where], xid, holder->token,
						  asking->snapshot))
		wait_for_relay(asking);
	else
	{
		asking->free = asking->free
			? repalloc(asking->free, (asking->nfree + 1) * DQ_TOKEN_LEN)
			: palloc(DQ_TOKEN_LEN);
		memcpy(asking->free + asking->nfree * DQ_TOKEN_LEN, holder->token, DQ_TOKEN_LEN);
		asking->nfree++;
	}
}

/* ---- asking ---- */

static DqAnswer
ask_loop(Asking *asking, int *where)
{
	for (;;)
	{
		Look		seen;

		CHECK_FOR_INTERRUPTS();
		asking->args.free = asking->free;
		asking->args.nfree = asking->nfree;
		/* from the first byte on it may be executed, whatever we hear of it */
		dq_hold_void(asking->token);
		dq_hold_sent(asking->token);
		DQ_POINT("hold.send");
		seen = look(asking, where);
		DQ_POINT("hold.received");
		switch (seen)
		{
			case LOOK_TAKEN:
				if (is_settled(asking, asking->found[*where].member))
					return DQ_ANSWER_TRUE;
				wait_for_relay(asking);
				break;
			case LOOK_NONE:
				if (is_settled(asking, NULL))
				{
					dq_hold_void(asking->token);
					return DQ_ANSWER_FALSE;
				}
				wait_for_relay(asking);
				break;
			case LOOK_HELD:
				wait_for_holder(asking, *where);
				break;
			case LOOK_AGAIN:
				break;
			case LOOK_WAIT:
				wait_for_relay(asking);
				break;
			case LOOK_LATE:
				return DQ_ANSWER_UNKNOWN;
		}
		if (GetCurrentTimestamp() >= asking->deadline)
			return DQ_ANSWER_UNKNOWN;
	}
}

static DqAnswer
ask(Asking *asking, int *where)
{
	MemoryContext caller = CurrentMemoryContext;
	volatile DqAnswer answer = DQ_ANSWER_UNKNOWN;
	volatile bool down = false;

	if (dq_is_known_down(asking->queue))
		down = true;
	else
	{
		asking->args.incarnation = dq_incarnation();
		asking->args.xid = U64FromFullTransactionId(GetTopFullTransactionId());
		asking->args.subxid = GetCurrentTransactionNestLevel() > 1
			? U64FromFullTransactionId(GetCurrentFullTransactionId()) : 0;
		dq_hold_draw(asking->token);
		retake_snapshot(asking);
		PG_TRY();
		{
			answer = ask_loop(asking, where);
		}
		PG_CATCH();
		{
			/*
			 * Only the exchange with Redis can have failed so; nothing of
			 * PostgreSQL's is half done.
			 */
			if (!dq_is_outage(geterrcode()))
				PG_RE_THROW();
			MemoryContextSwitchTo(caller);
			FlushErrorState();
			down = true;
		}
		PG_END_TRY();
		UnregisterSnapshot(asking->snapshot);
	}
	if (down && !asking->key_only && asking->queue->on_outage == DQ_OUTAGE_ERROR)
		dq_raise_outage(asking->queue);
	return answer;
}

/*
 * The element's task, taken from this transaction's own offers, from Redis, or
 * both: an own offer under a key has replaced the older task, which goes as well.
 */
DqAnswer
dq_take(Oid relid, bytea *element, bool key_only, TimestampTz *deadline, DqTaken *taken)
{
	DqQueue    *queue = dq_queue_get(relid);
	Asking		asking;
	DqOwnTask	own;
	bool		own_found;
	DqAnswer	answer;
	int			where = 0;
	int			i;

	memset(taken, 0, sizeof(*taken));
	memset(&asking, 0, sizeof(asking));
	dq_shards_resolve(queue);
	asking.queue = queue;
	asking.element = element;
	asking.key_only = key_only;
	asking.home = dq_shard_of_key(VARDATA_ANY(element), VARSIZE_ANY_EXHDR(element),
								  queue->nshards);
	asking.deadline = *deadline;
	asking.keys = palloc(queue->nshards * sizeof(DqKeys));
	asking.sessions = palloc0(queue->nshards * sizeof(DqSession));
	asking.found = palloc0(queue->nshards * sizeof(DqFound));
	for (i = 0; i < queue->nshards; i++)
		dq_keys_make(&asking.keys[i], dq_shard_name(queue->name, queue->nshards, i));
	asking.args.source = dq_source_get(true)->id;
	asking.args.place = dq_place();
	asking.args.element = element;
	asking.args.key_only = key_only;
	asking.args.token = asking.token;
	asking.skip = dq_own_removed_ids(queue, element, &asking.args.skip_len);
	asking.args.skip = asking.skip;
	asking.free = dq_holds_left(&asking.nfree);

	/* what this transaction offered is known without asking anybody */
	own_found = dq_own_find(queue, element, &own) && (!key_only || own.how == 'k');
	answer = ask(&asking, &where);
	*deadline = asking.deadline;
	/* messages may have been processed meanwhile */
	queue = dq_queue_get(relid);
	dq_shards_resolve(queue);

	if (answer == DQ_ANSWER_TRUE)
	{
		DqFound    *f = &asking.found[where];

		taken->in_redis = true;
		taken->shard = queue->shard_no[where];
		taken->due = f->due;
		taken->member = f->member;
		taken->key = f->how == 'k' ? element : f->key;
		memcpy(taken->token, asking.token, DQ_TOKEN_LEN);
		memcpy(&taken->session, &asking.sessions[where], sizeof(DqSession));
		if (own_found && own.how != 'k' &&
			!dq_found_is_better(own.how, own.due, f->how, f->due))
			own_found = false;
		else if (own_found && (own.how != 'k' || f->how != 'k'))
			taken->in_redis = false;	/* the own one; the hold is left over */
	}
	if (own_found)
	{
		taken->is_own = true;
		taken->own = own;
		/* what it has replaced may fire before it is relayed, unless it is held */
		return own.how == 'k' && answer == DQ_ANSWER_UNKNOWN ? answer : DQ_ANSWER_TRUE;
	}
	return answer;
}
