/*
 * resolve.c
 *	  Removals and reschedules that were recorded without an answer (Redis was
 *	  silent) name an element, not a task. When such a row stands next and everything
 *	  before it is applied, it is looked up over all shards of its queue, like
 *	  dq_remove does: one task, in bounded steps. What it names is committed first,
 *	  so that it means the same when it is replayed (PO 17); then it is relayed as
 *	  that task's member. Called by round.c between exchanges.
 */
#include "postgres.h"

#include "compat.h"
#include "relay/relay_private.h"
#include "shared/points.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#define STEP_MS		5			/* of looking, between which due tasks move */

typedef struct DqLookup
{
	MemoryContext context;		/* this and what hangs on it */
	int			nshards;
	DqKeys	   *keys;
	int32	   *shard_no;
	DqFound    *found;
	bool		looked;			/* in the index */
	int			best;			/* -1: none yet */
	int			scanning;		/* shard that is read for what the index does not know */
	char	   *score;			/* how far */
	bytea	   *member;
	bool		resolved;		/* it is known, and committed, what it names: */
	DqResolution resolution;
} DqLookup;

/*
 * All shards of the queue; of a dropped one, the shard alone. And has it been
 * resolved before?
 */
static DqLookup *
describe(DqLink *link, DqShard *shard)
{
	DqLookup   *lookup;
	DqQueue    *queue = NULL;
	MemoryContext context;
	MemoryContext old;
	int			i;

	dq_link_begin(link);
	context = AllocSetContextCreate(shard->batch->context, "dq_bridge look-up",
									ALLOCSET_SMALL_SIZES);
	if (OidIsValid(shard->relid))
		queue = dq_queue_get_noerror(shard->relid);
	if (queue)
		dq_shards_resolve(queue);
	old = MemoryContextSwitchTo(context);
	lookup = palloc0(sizeof(DqLookup));
	lookup->context = context;
	lookup->nshards = queue ? queue->nshards : 1;
	lookup->keys = palloc(lookup->nshards * sizeof(DqKeys));
	lookup->shard_no = palloc(lookup->nshards * sizeof(int32));
	lookup->found = palloc0(lookup->nshards * sizeof(DqFound));
	lookup->best = -1;
	for (i = 0; i < lookup->nshards; i++)
	{
		if (queue)
		{
			dq_keys_make(&lookup->keys[i], dq_shard_name(queue->name, queue->nshards, i));
			lookup->shard_no[i] = queue->shard_no[i];
		}
		else
		{
			lookup->keys[i] = shard->keys;
			lookup->shard_no[i] = shard->no;
		}
	}
	lookup->resolved = dq_resolution_get(shard->batch->element, &lookup->resolution);
	MemoryContextSwitchTo(old);
	dq_link_end(link);
	return lookup;
}

/*
 * Is all that stands before the element applied in the other shards as well? The
 * order is that of batches (last seq of the transaction, seq), which is one for
 * all shards as they go through the same targets (batch.c), so of two elements that
 * wait the smaller never waits for the other. Should a shard have begun a newer batch
 * all the same, because this one was out of reach then, the older batch goes first.
 */
static bool
others_are_past(DqLink *link, DqShard *shard, DqLookup *lookup)
{
	const DqBatch *mine = shard->batch;
	int			i;
	ListCell   *lc;

	for (i = 0; i < lookup->nshards; i++)
	{
		foreach(lc, link->shards)
		{
			DqShard    *other = lfirst(lc);
			const DqBatch *batch = other->batch;

			if (other == shard || other->no != lookup->shard_no[i])
				continue;
			if (other->seen &&
				dq_snapshot_sees(other->seen, mine->element->tli, mine->element->xid))
				continue;
			if (batch && batch->collected && other->pages_in_flight == 0 &&
				other->prepared == NULL &&
				dq_snapshot_sees(batch->cur, mine->element->tli, mine->element->xid) &&
				(batch->group >= batch->ngroups ||
				 batch->groups[batch->group].last_seq > mine->element_last ||
				 (batch->groups[batch->group].last_seq == mine->element_last &&
				  batch->element && batch->element->seq > mine->element->seq)))
				continue;
			if (batch && batch->element && other->pages_in_flight == 0 &&
				!dq_snapshot_sees(mine->cur, batch->element->tli, batch->element->xid))
				continue;
			return false;
		}
	}
	return true;
}

/* In the index of all shards: key before id before payload, then the earliest. */
static void
look_in_index(DqLink *link, DqShard *shard, DqLookup *lookup, const DqRow *element)
{
	static const char rank[] = "kip";
	bool		again;
	int			i;

	do
	{
		CHECK_FOR_INTERRUPTS();
		dq_op_find(link->redis, shard->name, lookup->nshards, lookup->keys, link->source,
				   dq_place(), element->key, element->id, lookup->found);
		again = false;
		for (i = 0; i < lookup->nshards; i++)
			again |= lookup->found[i].again;
	} while (again);

	for (i = 0; i < lookup->nshards; i++)
	{
		DqFound    *f = &lookup->found[i];
		DqFound    *best = lookup->best >= 0 ? &lookup->found[lookup->best] : NULL;

		if (f->found && (best == NULL ||
						 strchr(rank, f->how) < strchr(rank, best->how) ||
						 (f->how == best->how && f->due < best->due)))
			lookup->best = i;
	}
	/* with an answer nothing has to be read through */
	lookup->scanning = lookup->best >= 0 ? lookup->nshards : 0;
	lookup->looked = true;
}

/* Among tasks that the index does not know; false: not yet through. */
static bool
look_through(DqLink *link, DqShard *shard, DqLookup *lookup, const DqRow *element)
{
	TimestampTz deadline = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), STEP_MS);

	while (lookup->scanning < lookup->nshards)
	{
		int			i = lookup->scanning;
		DqFound    *f = &lookup->found[i];

		CHECK_FOR_INTERRUPTS();
		if (!f->scan_more ||
			dq_op_find_scan(link->redis, shard->name, &lookup->keys[i], link->source,
							element->key, element->id, &lookup->score, &lookup->member, f))
		{
			if (f->found && (lookup->best < 0 ||
							 f->due < lookup->found[lookup->best].due))
				lookup->best = i;
			lookup->scanning++;
			lookup->score = NULL;
			lookup->member = NULL;
			continue;
		}
		if (GetCurrentTimestamp() >= deadline)
			return false;
	}
	return true;
}

/* ---- the answer ---- */

void
dq_page_named(DqPage *page, const DqRow *element, const bytea *member, int64 due)
{
	if (element->op == DQ_OP_RESCHEDULE_ELEMENT)
		dq_page_move(page, member, element->due, element->id);
	else
		dq_page_remove(page, member, due, NULL);
}

/*
 * Commit what the element names. With several shards, whose fences are several, a
 * row for the one where it lies says the same: should that one alone be replayed,
 * its rows stand in the order in which they were resolved. A backend has only its
 * own transaction and keeps the answer in memory; it comes here with queues of one
 * shard.
 */
static void
commit_resolution(DqLink *link, DqShard *shard, DqLookup *lookup)
{
	const DqRow *element = shard->batch->element;
	DqResolution *r = &lookup->resolution;

	r->shard = shard->no;
	if (lookup->best >= 0)
	{
		r->member = lookup->found[lookup->best].member;
		r->due = lookup->found[lookup->best].due;
		r->shard = lookup->shard_no[lookup->best];
	}
	lookup->resolved = true;
	if (!link->own_xact)
		return;

	dq_link_begin(link);
	dq_resolution_store(element, r, link->serverid);
	if (r->member && lookup->nshards > 1)
	{
		DqRow		row;

		memset(&row, 0, sizeof(row));
		row.seq = dq_outbox_next(&row.id);
		row.shard = r->shard;
		row.op = DQ_OP_REMOVE_NAMED;
		row.due = r->due;
		row.member = r->member;
		if (element->op == DQ_OP_RESCHEDULE_ELEMENT)
		{
			row.op = DQ_OP_MOVE_NAMED;
			row.due = element->due;
			row.id = element->id;
		}
		dq_outbox_insert(&row, link->serverid);
	}
	DQ_POINT("resolve.record");
	dq_link_end(link);
	DQ_POINT("resolve.recorded");
}

static DqShard *
shard_of(DqLink *link, int32 no)
{
	ListCell   *lc;

	foreach(lc, link->shards)
		if (((DqShard *) lfirst(lc))->no == no)
			return lfirst(lc);
	return NULL;
}

/*
 * Do it in the other shard, now, by a page that leaves the fence where it is: the
 * next element must not find the same task. Doing it twice changes nothing, so the
 * row that comes there later does not either. false: try again.
 */
static bool
apply_elsewhere(DqLink *link, DqShard *shard, const DqResolution *r)
{
	DqShard    *other = shard_of(link, r->shard);
	DqApplyHeader header;
	DqApplyResult result;
	DqPage	   *page;
	DqReply    *error;

	if (other == NULL)
		return true;			/* its row will do it, when the shard is back */
	if ((other->state != DQ_SHARD_OPEN && other->state != DQ_SHARD_FROZEN) ||
		other->broken || other->blocked_until > GetCurrentTimestamp())
		return false;
	dq_link_flush(link, dq_timeline(), dq_flush_point());
	dq_shard_share_floor(other);

	page = dq_page_create(link->round);
	dq_page_named(page, shard->batch->element, r->member, r->due);
	memset(&header, 0, sizeof(header));
	header.session = other->session;
	header.floor = other->floor;
	header.source = link->source;
	header.expect = other->position;
	header.position = other->position;
	header.writer = link->writer;
	header.index = other->index;
	DQ_POINT("resolve.send");
	dq_op_apply_send(link->redis, &other->keys, page, &header);
	DQ_POINT("resolve.sent");
	dq_op_apply_result(link->redis, &result, &error);
	if (error)
	{
		if (!dq_reply_is_noscript(error))
			dq_shard_note_error(link, other,
								pnstrdup(error->str, Min(error->len, DQ_ERROR_LEN - 1)),
								dq_reply_is_transient(error));
		return false;
	}
	if (!dq_shard_note_fence(link, other, &result.fence))
	{
		if (other->broken)
			dq_shard_forget(other, DQ_SHARD_RESYNC);
		return false;
	}
	if (shard->batch->element->op == DQ_OP_RESCHEDULE_ELEMENT)
		other->stats.rescheduled += result.removed;
	else
		other->stats.removed += result.removed;
	other->stats.pending += result.applied - result.removed;
	other->publish = true;
	return true;
}

/* One step; false: there is more to look at. */
static bool
resolve(DqLink *link, DqShard *shard)
{
	DqBatch    *batch = shard->batch;
	DqRow	   *element = batch->element;
	DqLookup   *lookup;
	DqResolution *r;

	if (batch->lookup == NULL)
		batch->lookup = describe(link, shard);
	lookup = batch->lookup;
	r = &lookup->resolution;
	/* a replayed one waits as well: what it names may be what another has moved */
	if (lookup->nshards > 1 && !lookup->looked && !others_are_past(link, shard, lookup))
		return true;			/* they go on meanwhile */
	if (!lookup->resolved)
	{
		MemoryContext old;
		bool		through;

		/* by hand a row for another shard could not be committed: a worker's job */
		if (!link->own_xact && lookup->nshards > 1)
			return true;
		old = MemoryContextSwitchTo(lookup->context);
		if (!lookup->looked)
			look_in_index(link, shard, lookup, element);
		through = look_through(link, shard, lookup, element);
		MemoryContextSwitchTo(old);
		if (!through)
			return false;
		DQ_POINT("resolve.looked");
		commit_resolution(link, shard, lookup);
	}

	if (r->member && r->shard != shard->no && !apply_elsewhere(link, shard, r))
		return true;

	if (batch->resolved)
		pfree(batch->resolved);
	batch->resolved = NULL;
	if (r->member && r->shard == shard->no)
	{
		batch->resolved = MemoryContextAlloc(batch->context, VARSIZE_ANY(r->member));
		memcpy(batch->resolved, r->member, VARSIZE_ANY(r->member));
		batch->resolved_due = r->due;
	}
	batch->resolved_seq = element->seq;
	MemoryContextDelete(lookup->context);
	batch->lookup = NULL;
	pfree(element->key);
	pfree(element);
	batch->element = NULL;
	return true;
}

/* What is wrong with one element or shard stops that shard alone (G9). */
static bool
try_resolve(DqLink *link, DqShard *shard)
{
	volatile bool done = true;

	PG_TRY();
	{
		done = resolve(link, shard);
	}
	PG_CATCH();
	{
		int			class = ERRCODE_TO_CATEGORY(geterrcode());
		ErrorData  *error;

		if (class == ERRCODE_CONNECTION_EXCEPTION || class == ERRCODE_OPERATOR_INTERVENTION ||
			class == ERRCODE_INVALID_AUTHORIZATION_SPECIFICATION ||
			IsTransactionState() || dq_redis_is_dead(link->redis))
			PG_RE_THROW();
		MemoryContextSwitchTo(link->round);
		error = CopyErrorData();
		FlushErrorState();
		dq_shard_note_error(link, shard, error->detail ? error->detail : error->message, false);
	}
	PG_END_TRY();
	return done;
}

bool
dq_resolve_elements(DqLink *link)
{
	TimestampTz now = GetCurrentTimestamp();
	bool		more = false;
	ListCell   *lc;

	if (link->nrequests > 0)
		return false;
	foreach(lc, link->shards)
	{
		DqShard    *shard = lfirst(lc);

		if (shard->batch == NULL || shard->batch->element == NULL ||
			shard->pages_in_flight > 0 || shard->prepared || shard->blocked_until > now ||
			(shard->state != DQ_SHARD_OPEN && shard->state != DQ_SHARD_FROZEN))
			continue;
		more |= !try_resolve(link, shard);
	}
	return more;
}
