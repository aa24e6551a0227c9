/*
 * turns.c
 *	  The turn of one task that UPDATE or DELETE has taken (members.c): waiting for
 *	  what it needs, the row that ends it, and putting back those whose turn did not
 *	  come. Called by the foreign-data wrapper.
 */
#include "postgres.h"

#include <math.h>

#include "api/taker_private.h"
#include "compat.h"

#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"

/* ms, rounded up */
int64
dq_member_due(const DqMember *member)
{
	double		due = ceil(member->take.score);

	if (isnan(due) || due >= 9.2e18)
		return PG_INT64_MAX;
	return due <= -9.2e18 ? PG_INT64_MIN : (int64) due;
}

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
		dq_taker_wait(taker);	/* a former owner's: the bridge puts it back */
		return;
	}
	dq_taker_patience(taker);
	queue = dq_taker_queue(taker);
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
	DqQueue    *queue = dq_taker_queue(taker);
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
		dq_taker_began(taker);
	dq_taker_patience(taker);
	if (member->take.answered && member->take.held)
		wait_for_holder(taker, member);
	while (member->state == DQ_MEMBER_OPEN)
	{
		if (wait)
			dq_taker_wait(taker);
		dq_taker_ask(taker, &member, 1, true, false);
		wait = !member->again;
		if (member->state == DQ_MEMBER_HELD && !is_settled(taker, member))
			member->state = DQ_MEMBER_OPEN;
		else if (member->state == DQ_MEMBER_OPEN && member->take.answered && member->take.held &&
				 wait)
		{
			wait_for_holder(taker, member);
			wait = false;
		}
	}
	dq_taker_forget(taker);
}

bool
dq_taker_settle(DqTaker *taker, DqMember *member)
{
	if (member->state == DQ_MEMBER_OPEN)
		settle(taker, member);
	return member->state != DQ_MEMBER_GONE &&
		member->shard < dq_taker_queue(taker)->nshards;
}

/*
 * The row that ends the task, in this transaction. false: it was not pending any more.
 */
bool
dq_taker_remove(DqTaker *taker, DqMember *member)
{
	if (member->done)
		return false;
	member->done = true;
	while (!member->recorded)
	{
		DqQueue    *queue;
		int32		shard;

		if (!dq_taker_settle(taker, member))
			return false;
		queue = dq_taker_queue(taker);
		shard = queue->shard_no[member->shard];
		/* by a trigger's or function's removal, since it was taken */
		if (dq_own_has_removed(shard, member->take.member))
			return false;
		if (member->state == DQ_MEMBER_OWN)
			dq_record_member(queue, shard, dq_member_due(member), member->take.member, NULL);
		/* PO 7: of a hold that Redis may have lost nothing is written */
		else if (dq_hold_writing(shard, &member->session))
		{
			dq_record_member(queue, shard, dq_member_due(member), member->take.member,
							 member->take.token);
			dq_hold_written();
			dq_hold_keep(member->take.token);
		}
		else
		{
			member->state = DQ_MEMBER_OPEN;
			member->take.answered = false;
			continue;
		}
		member->recorded = true;
	}
	return true;
}

bool
dq_taker_finish(DqTaker *taker, DqMember *member, const DqOffering *instead, uint64 *id)
{
	if (member->done)
		return false;
	member->done = true;
	while (!member->recorded)
	{
		DqQueue    *queue;
		DqTaken		taken;

		if (!dq_taker_settle(taker, member))
			return false;
		queue = dq_taker_queue(taker);
		if (member->state == DQ_MEMBER_OWN)
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("the task was offered in this transaction, before queue \"%s\" stopped being transactional",
							queue->relname)));
		memset(&taken, 0, sizeof(taken));
		taken.in_redis = true;
		taken.shard = queue->shard_no[member->shard];
		taken.due = dq_member_due(member);
		taken.member = member->take.member;
		taken.key = member->take.key;
		taken.session = member->session;
		memcpy(taken.token, member->take.token, DQ_TOKEN_LEN);
		member->recorded = dq_finish_at_once(queue, &taken, instead, id);
		if (!member->recorded)
		{
			member->state = DQ_MEMBER_OPEN;
			member->take.answered = false;
		}
	}
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
	int			left;

	if (n == 0 || shard >= queue->nshards ||
		!dq_session_get(MyDatabaseId, queue->shard_no[shard], session.session, &session.floor,
						&session.epoch))
		return;
	dq_keys_make(&keys, dq_shard_name(queue->name, queue->nshards, shard));
	do
	{
		CHECK_FOR_INTERRUPTS();
		(void) dq_op_restore(dq_redis_get(&server->target), queue->relname, &keys,
							 session.session, session.floor, dq_source_get(true)->id,
							 tokens, n, &fence, &left);
		if (fence.status != DQ_OK)
			return;
	} while (left > 0);
	for (int i = 0; i < n; i++)
		dq_hold_void(tokens + i * DQ_TOKEN_LEN);
}

#define MANY_TOKENS 100			/* of one script call */

/* Now, if Redis answers; else the bridge does it when the transaction has ended. */
void
dq_taker_release(DqTaker *taker, DqMember *members, int n)
{
	MemoryContext caller = CurrentMemoryContext;
	DqQueue    *queue = dq_taker_queue(taker);
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
