/*
 * concerns.c
 *	  What is on its way to a shard and bears on tasks there, for a statement that
 *	  takes many of them: read once, then only what has been committed since. It may
 *	  name too much (rows that have been applied meanwhile, equal hashes), never too
 *	  little; who hears yes asks dq_outbox_concerns. Called by the SQL functions'
 *	  room (PO 11).
 */
#include "postgres.h"

#include "outbox/outbox.h"

#include "common/hashfn.h"
#include "miscadmin.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"

struct DqConcerns
{
	MemoryContext context;
	MemoryContext content;		/* hash and seen, dropped as a whole */
	MemoryContext each;
	int32		shard;
	HTAB	   *hashes;			/* of members that go, keys that are offered or go */
	DqSnapshot *seen;			/* everything it sees is in the hash, or was applied */
	bool		any;			/* something may mean any task */
};

DqConcerns *
dq_concerns_create(MemoryContext context, int32 shard)
{
	DqConcerns *c = MemoryContextAllocZero(context, sizeof(DqConcerns));

	c->context = context;
	c->content = AllocSetContextCreate(context, "dq_bridge operations on their way",
									   ALLOCSET_DEFAULT_SIZES);
	c->each = AllocSetContextCreate(context, "dq_bridge operation on its way",
									ALLOCSET_SMALL_SIZES);
	c->shard = shard;
	return c;
}

static uint64
hash_of(char kind, const bytea *value)
{
	return hash_bytes_extended((const unsigned char *) VARDATA_ANY(value),
							   VARSIZE_ANY_EXHDR(value), kind);
}

static void
add(DqConcerns *c, char kind, const bytea *value)
{
	uint64		hash = hash_of(kind, value);

	if (c->hashes == NULL)
	{
		HASHCTL		ctl = {0};

		ctl.keysize = ctl.entrysize = sizeof(uint64);
		ctl.hcxt = c->content;
		c->hashes = hash_create("dq_bridge operations on their way", 256, &ctl,
								HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
	}
	(void) hash_search(c->hashes, &hash, HASH_ENTER, NULL);
}

static bool
has(const DqConcerns *c, char kind, const bytea *value)
{
	uint64		hash;

	if (c->hashes == NULL || value == NULL)
		return false;
	hash = hash_of(kind, value);
	return hash_search(c->hashes, &hash, HASH_FIND, NULL) != NULL;
}

static void
add_row(DqConcerns *c, const DqRow *row)
{
	switch (row->op)
	{
		case DQ_OP_OFFER:
		case DQ_OP_RESCHEDULE:
		case DQ_OP_REMOVE_KEY:
			if (row->key)
				add(c, 'k', row->key);
			break;
		case DQ_OP_CONSUME:
		case DQ_OP_DISCARD:
			break;
		default:
			if (row->member)
				add(c, 'm', row->member);
			else
				c->any = true;	/* recorded without an answer */
	}
}

/* Up to what the snapshot sees; prev, old: of a fence as it was a moment ago. */
void
dq_concerns_read(DqConcerns *c, const DqSnapshot *prev, const DqSnapshot *old,
				 Snapshot snapshot)
{
	MemoryContext caller;
	DqCandidates candidates;
	DqRow		row;

	/* what may mean any task is hoped to be applied by now */
	if (c->any)
	{
		MemoryContextReset(c->content);
		c->hashes = NULL;
		c->seen = NULL;
		c->any = false;
	}
	caller = MemoryContextSwitchTo(c->each);
	if (prev->damaged || (old && old->damaged))
		c->any = true;			/* it covers nothing for certain */
	else
	{
		dq_candidates_begin(&candidates, c->shard, c->seen ? c->seen : prev, old, NULL,
							snapshot, false);
		for (;;)
		{
			bool		more;

			CHECK_FOR_INTERRUPTS();
			more = dq_candidates_next(&candidates, &row, true);
			if (!more)
				break;
			add_row(c, &row);
			if (row.payload)
				pfree(row.payload);
			if (row.key)
				pfree(row.key);
			if (row.member)
				pfree(row.member);
			if (row.token)
				pfree(row.token);
		}
		dq_candidates_end(&candidates);
	}
	MemoryContextSwitchTo(c->content);
	if (c->seen)
	{
		pfree(c->seen->xip);
		pfree(c->seen);
	}
	c->seen = dq_snapshot_take(snapshot);
	MemoryContextSwitchTo(caller);
	MemoryContextReset(c->each);
}

/* May something on its way bear on this task? */
bool
dq_concerns_has(const DqConcerns *c, const bytea *member, const bytea *key)
{
	return c->any || has(c, 'm', member) || has(c, 'k', key);
}
