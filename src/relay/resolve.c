/*
 * resolve.c
 *	  Removals that were recorded without an answer (Redis was silent) name an
 *	  element, not a task. When such a row stands next and everything before it is
 *	  applied, it is looked up over all shards of its queue, like dq_remove does,
 *	  and relayed as the exact member it names: one task, in bounded steps (PO 17).
 *	  Called by round.c between exchanges.
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
	int			nshards;
	DqKeys	   *keys;
	int32	   *shard_no;
	DqFound    *found;
	bool		looked;			/* in the index */
	int			best;			/* -1: none yet */
	int			scanning;		/* shard that is read for what the index does not know */
	char	   *score;			/* how far */
	bytea	   *member;
} DqLookup;

/* All shards of the queue; of a dropped one, the shard alone. */
static DqLookup *
describe(DqLink *link, DqShard *shard)
{
	DqLookup   *lookup;
	DqQueue    *queue = NULL;
	MemoryContext old;
	int			i;

	dq_link_begin(link);
	if (OidIsValid(shard->relid))
		queue = dq_queue_get_noerror(shard->relid);
	if (queue)
		dq_shards_resolve(queue);
	old = MemoryContextSwitchTo(shard->batch->context);
	lookup = palloc0(sizeof(DqLookup));
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
	MemoryContextSwitchTo(old);
	dq_link_end(link);
	return lookup;
}

/*
 * Is all that stands before the element applied in the other shards as well? The
 * order is that of batches (last seq of the transaction, seq), which is one for
 * all shards, so of two elements that wait the smaller never waits for the other.
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

static bytea *
token_of(const DqRow *row)
{
	bytea	   *token = palloc(VARHDRSZ + 16);

	/* its own seq tells which recorded removal a row has resolved */
	SET_VARSIZE(token, VARHDRSZ + 16);
	memcpy(VARDATA(token), "resolved", 8);
	memcpy(VARDATA(token) + 8, &row->seq, 8);
	return token;
}

/*
 * The task lies in another shard, whose fence is another: a row for that shard
 * is committed first, then the element's row means nothing any more. The token
 * keeps a crash in between from resolving it twice. True: it is resolved.
 */
static bool
hand_over(DqLink *link, DqShard *shard, const DqRow *element, DqLookup *lookup, int best)
{
	bytea	   *token;
	Snapshot	snapshot;
	bool		done = false;
	int			i;

	dq_link_begin(link);
	token = token_of(element);
	snapshot = RegisterSnapshot(GetLatestSnapshot());
	for (i = 0; i < lookup->nshards && !done; i++)
		done = dq_outbox_has_token(lookup->shard_no[i], element->xid, token, snapshot);
	UnregisterSnapshot(snapshot);
	if (!done && best >= 0 && lookup->shard_no[best] != shard->no)
	{
		DqRow		row;

		memset(&row, 0, sizeof(row));
		row.seq = dq_outbox_next(&row.id);
		row.shard = lookup->shard_no[best];
		row.op = DQ_OP_REMOVE;
		row.due = lookup->found[best].due;
		row.member = lookup->found[best].member;
		row.token = token;
		dq_outbox_insert(&row, link->serverid);
		done = true;
	}
	DQ_POINT("resolve.record");
	dq_link_end(link);
	DQ_POINT("resolve.recorded");
	return done;
}

/* One step; false: there is more to look at. */
static bool
resolve(DqLink *link, DqShard *shard)
{
	DqBatch    *batch = shard->batch;
	DqRow	   *element = batch->element;
	DqLookup   *lookup;
	MemoryContext old;
	bool		through;
	int			best;

	if (batch->lookup == NULL)
		batch->lookup = describe(link, shard);
	lookup = batch->lookup;
	/* by hand a row for another shard could not be committed: a worker's job */
	if (!link->own_xact && lookup->nshards > 1)
		return true;
	if (!lookup->looked && lookup->nshards > 1 && !others_are_past(link, shard, lookup))
		return true;			/* they go on meanwhile */

	old = MemoryContextSwitchTo(batch->context);
	if (!lookup->looked)
		look_in_index(link, shard, lookup, element);
	through = look_through(link, shard, lookup, element);
	MemoryContextSwitchTo(old);
	if (!through)
		return false;

	best = lookup->best;
	DQ_POINT("resolve.looked");
	batch->resolved = NULL;
	if ((lookup->nshards == 1 || !hand_over(link, shard, element, lookup, best)) && best >= 0)
	{
		batch->resolved = lookup->found[best].member;
		batch->resolved_due = lookup->found[best].due;
	}
	batch->resolved_seq = element->seq;
	batch->element = NULL;
	batch->lookup = NULL;
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
