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

#include "access/xact.h"
#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

typedef struct Lookup
{
	int			nshards;
	DqKeys	   *keys;
	int32	   *shard_no;
	DqFound    *found;
} Lookup;

/* All shards of the queue; of a dropped one, the shard alone. */
static void
describe(DqLink *link, DqShard *shard, Lookup *lookup)
{
	DqQueue    *queue = NULL;
	int			i;

	dq_link_begin(link);
	if (OidIsValid(shard->relid))
		queue = dq_queue_get_noerror(shard->relid);
	if (queue)
		dq_shards_resolve(queue);
	lookup->nshards = queue ? queue->nshards : 1;
	lookup->keys = palloc(lookup->nshards * sizeof(DqKeys));
	lookup->shard_no = palloc(lookup->nshards * sizeof(int32));
	lookup->found = palloc0(lookup->nshards * sizeof(DqFound));
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
	dq_link_end(link);
}

/* Key before id before payload, then the earliest due; -1 none. */
static int
look(DqLink *link, DqShard *shard, Lookup *lookup, const bytea *element)
{
	static const char rank[] = "kip";
	int			best = -1;
	bool		again;
	int			i;

	do
	{
		CHECK_FOR_INTERRUPTS();
		dq_op_find(link->redis, shard->name, lookup->nshards, lookup->keys, link->source,
				   element, NIL, lookup->found);
		again = false;
		for (i = 0; i < lookup->nshards; i++)
			again |= lookup->found[i].again;
	} while (again);

	for (i = 0; i < lookup->nshards; i++)
	{
		DqFound    *f = &lookup->found[i];

		if (f->found && (best < 0 ||
						 strchr(rank, f->how) < strchr(rank, lookup->found[best].how) ||
						 (f->how == lookup->found[best].how &&
						  f->due < lookup->found[best].due)))
			best = i;
	}
	if (best >= 0)
		return best;
	for (i = 0; i < lookup->nshards; i++)
	{
		DqFound    *f = &lookup->found[i];
		char	   *score = NULL;
		bytea	   *member = NULL;

		if (!f->scan_more)
			continue;
		while (!dq_op_find_scan(link->redis, shard->name, &lookup->keys[i], link->source,
								element, &score, &member, f))
			CHECK_FOR_INTERRUPTS();
		if (f->found && (best < 0 || f->due < lookup->found[best].due))
			best = i;
	}
	return best;
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
hand_over(DqLink *link, DqShard *shard, const DqRow *element, Lookup *lookup, int best)
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
	dq_link_end(link);
	return done;
}

static void
resolve(DqLink *link, DqShard *shard)
{
	DqBatch    *batch = shard->batch;
	DqRow	   *element = batch->element;
	Lookup		lookup;
	int			best;

	describe(link, shard, &lookup);
	best = look(link, shard, &lookup, element->key);
	batch->resolved = NULL;
	if ((lookup.nshards == 1 || !hand_over(link, shard, element, &lookup, best)) && best >= 0)
	{
		MemoryContext old = MemoryContextSwitchTo(batch->context);

		batch->resolved = (bytea *) pg_detoast_datum_copy((struct varlena *) lookup.found[best].member);
		MemoryContextSwitchTo(old);
	}
	batch->resolved_seq = element->seq;
	batch->element = NULL;
}

void
dq_resolve_elements(DqLink *link)
{
	ListCell   *lc;

	if (link->nrequests > 0)
		return;
	foreach(lc, link->shards)
	{
		DqShard    *shard = lfirst(lc);

		if (shard->batch == NULL || shard->batch->element == NULL ||
			shard->pages_in_flight > 0 || shard->prepared ||
			(shard->state != DQ_SHARD_OPEN && shard->state != DQ_SHARD_FROZEN))
			continue;
		/* by hand the row for another shard could not be committed: a worker's job */
		if (!link->own_xact && shard->batch->element && IsTransactionState())
		{
			Lookup		lookup;

			describe(link, shard, &lookup);
			if (lookup.nshards > 1)
				continue;
		}
		resolve(link, shard);
	}
}
