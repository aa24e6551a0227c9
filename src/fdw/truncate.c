/*
 * truncate.c
 *	  TRUNCATE of queues: every task that is pending is removed, whoever offered it, as
 *	  DELETE without a condition does, but past the executor: no rows, no row triggers,
 *	  no right but TRUNCATE. Called by PostgreSQL through handler.c.
 *
 *	  What goes to the outbox are removals of exact members, each taken out of
 *	  circulation before, and no word like "all that was there": so none of them fires
 *	  between the statement and its commit, a rollback (of a savepoint, too) brings each
 *	  back, and replayed after a loss of data they take the same tasks and nothing that
 *	  others have added since (PO 17).
 *
 *	  PostgreSQL holds the table's AccessExclusive lock to the end of the transaction:
 *	  offers through it are before the first number drawn here, or after the commit
 *	  (PO 12). Tables that show the same queue and other producers have no part in that.
 */
#include "postgres.h"

#include "compat.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/rel.h"

#include "api/api.h"
#include "fdw/modify.h"
#include "shared/points.h"

#define PAGE_TASKS	1600		/* taken at once, see ahead.c */
#define PAGE_BYTES	(1024 * 1024)
#define MOST_PASSES	100

typedef struct Truncation
{
	Oid			relid;
	bool		at_once;
	DqTaker    *taker;
	MemoryContext page;			/* what is known of the page's tasks */
	DqMember   *members;		/* PAGE_TASKS */
	int			n;
	Size		bytes;
	int64		found;			/* tasks in this pass */
} Truncation;

/* Where the task is, as identity.c has it. */
static void
add_member(Truncation *truncation, int shard, const DqItem *item)
{
	DqMember   *member = &truncation->members[truncation->n++];
	MemoryContext old = MemoryContextSwitchTo(truncation->page);
	char	   *id;

	memset(member, 0, sizeof(*member));
	member->shard = shard;
	if (item->task)
	{
		const DqTask *task = item->task;

		id = palloc(Max(task->idlen, 1));
		memcpy(id, task->idbytes, task->idlen);
		member->take.score = task->score;
		member->take.old = task->old;
		member->take.idlen = task->idlen;
		truncation->bytes += task->payload_len;
	}
	else
	{
		id = palloc(8);
		for (int i = 0; i < 8; i++)
			id[i] = (char) (item->row.id >> (8 * (7 - i)));
		member->unsent = true;
		member->take.score = (double) item->row.due;
		member->take.idlen = 8;
	}
	member->take.id = id;
	MemoryContextSwitchTo(old);
}

/*
 * A page in a few round trips. What another transaction has in its hands is waited for,
 * one by one, as DELETE does.
 */
static void
remove_page(Truncation *truncation)
{
	dq_taker_page(truncation->taker, truncation->page);
	dq_taker_take(truncation->taker, truncation->members, truncation->n, true);
	for (int i = 0; i < truncation->n; i++)
	{
		DqMember   *member = &truncation->members[i];

		CHECK_FOR_INTERRUPTS();
		if (truncation->at_once)
			(void) dq_taker_finish(truncation->taker, member, NULL, NULL);
		else
			(void) dq_taker_remove(truncation->taker, member);
	}
	DQ_POINT("truncate.page");
	dq_taker_release(truncation->taker, truncation->members, truncation->n);
	truncation->found += truncation->n;
	truncation->n = 0;
	truncation->bytes = 0;
	MemoryContextReset(truncation->page);
}

static void
remove_shard(Truncation *truncation, DqReading *reading, int shard)
{
	DqStream   *stream = dq_stream_make(reading, shard);
	DqItem		item;

	dq_streams_open(&stream, 1);
	while (dq_stream_next(stream, &item))
	{
		add_member(truncation, shard, &item);
		if (truncation->n == PAGE_TASKS || truncation->bytes >= PAGE_BYTES)
			remove_page(truncation);
	}
	if (truncation->n > 0)
		remove_page(truncation);
	dq_stream_end(stream);
}

/*
 * Until a look finds nothing: a task that has gone when we come to it may have been
 * moved by a reschedule that was on its way, and when Redis loses its data between two
 * pages the rest of the tasks comes back later; the next look has them from the outbox.
 */
static void
truncate_queue(Oid relid, MemoryContext context)
{
	Truncation	truncation = {.relid = relid};
	DqQueue    *queue = dq_queue_get(relid);

	dq_require_not_producer(queue, "remove tasks");
	truncation.at_once = queue->at_once;
	if (queue->at_once)
		dq_tell_at_once(queue);
	truncation.taker = dq_taker_create(context, relid);
	truncation.page = AllocSetContextCreate(context, "dq_bridge page of tasks",
											ALLOCSET_DEFAULT_SIZES);
	truncation.members = MemoryContextAlloc(context, PAGE_TASKS * sizeof(DqMember));
	for (int pass = 0; pass < MOST_PASSES; pass++)
	{
		MemoryContext each = AllocSetContextCreate(context, "dq_bridge truncation",
												   ALLOCSET_DEFAULT_SIZES);
		MemoryContext old = MemoryContextSwitchTo(each);
		DqReading	reading = {0};

		truncation.found = 0;
		/* what a trigger before it, or the pass before, has recorded is to be seen */
		CommandCounterIncrement();
		dq_reading_init(&reading, dq_queue_get(relid));
		for (int shard = 0; shard < reading.nshards; shard++)
			remove_shard(&truncation, &reading, shard);
		MemoryContextSwitchTo(old);
		MemoryContextDelete(each);
		if (truncation.found == 0)
			break;
	}
}

static void
check_contents(Relation rel)
{
	DqQueue    *queue = dq_table_get(RelationGetRelid(rel));

	if (queue->contents == DQ_CONTENTS_PENDING)
		return;
	ereport(ERROR,
			(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
			 errmsg("cannot truncate foreign table \"%s\"", queue->relname),
			 errdetail("It does not show what is pending."),
			 queue->contents == DQ_CONTENTS_QUARANTINE ?
			 errhint("DELETE discards what is in quarantine.") : 0));
}

/* All tables of one server that the statement names, or that hang on those. */
void
dq_truncate(List *rels, DropBehavior behavior, bool restart_seqs)
{
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext, "dq_bridge TRUNCATE",
												  ALLOCSET_DEFAULT_SIZES);
	MemoryContext old = MemoryContextSwitchTo(context);
	ListCell   *lc;

	foreach(lc, rels)
		check_contents(lfirst(lc));
	foreach(lc, rels)
		truncate_queue(RelationGetRelid((Relation) lfirst(lc)), context);
	MemoryContextSwitchTo(old);
	MemoryContextDelete(context);
}
