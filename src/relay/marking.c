/*
 * marking.c
 *	  The mark of a shard (PO 15a): from one answer that shows a complete fence comes
 *	  a snapshot A and an instant W, such that of the own tasks that A sees each one
 *	  due by W has left the pending set and the holds. It is stored once these have
 *	  left the ready list as well: what lies there unread is not delivered, and must
 *	  come again after Redis has lost it. Called by exchange.c with each status, and
 *	  by round.c to store.
 */
#include "postgres.h"

#include "relay/relay_private.h"
#include "shared/points.h"

#include "access/xlog.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#define LOOK_MS		1000

static void
replace(DqShard *shard, char **text, const char *value)
{
	if (*text)
		pfree(*text);
	*text = value ? MemoryContextStrdup(shard->context, value) : NULL;
}

/* Within a transaction, once. */
void
dq_mark_load(DqShard *shard, Snapshot snapshot)
{
	DqMarking  *m = &shard->marking;
	DqMark		mark;

	if (m->loaded)
		return;
	if (!dq_mark_get(shard->no, snapshot, &mark))
	{
		mark.applied = mark.settled = mark.producers = "";
		mark.due = mark.no = 0;
	}
	replace(shard, &m->stored.applied, mark.applied);
	replace(shard, &m->stored.settled, mark.settled);
	m->stored.due = mark.due;
	m->stored.no = mark.no;
	if (shard->producers == NULL)
		replace(shard, &shard->producers, mark.producers);
	ItemPointerSetInvalid(&m->at);
	m->loaded = true;
}

/* What is not stored may not be true any more. */
void
dq_mark_forget(DqShard *shard)
{
	DqMarking  *m = &shard->marking;

	replace(shard, &m->applied, NULL);
	replace(shard, &m->settled, NULL);
	m->confirmed = false;
}

/*
 * Until something is known to be delivered that was not, a look is wanted each
 * second, however long scan_interval is.
 */
int
dq_look_interval(const DqLink *link, const DqShard *shard)
{
	return shard->marking.wanted && shard->state == DQ_SHARD_OPEN ?
		Min(link->scan_interval, LOOK_MS) : link->scan_interval;
}

static bool
is_complete(const char *position)
{
	size_t		len = strlen(position);

	return len > 2 && strcmp(position + len - 2, "|1") == 0;
}

/*
 * Has all that was pushed up to the candidate left the list? Tasks pushed by
 * others, or by answers that were lost, make this true later, not earlier. It
 * takes for granted that consumers take from the front, and does not believe it
 * while the first element is what it was.
 */
static bool
list_is_past(const DqMarking *m, const DqFenceRecord *record)
{
	return !record->polled && record->ready_first[0] != '\0' &&
		strcmp(record->ready_first, m->first) != 0 &&
		m->pushed_then <= m->pushed - record->ready;
}

/*
 * Elements are about to be put back in front of the ready list: what has been
 * counted out of it says nothing any more.
 */
void
dq_mark_put_back(DqShard *shard)
{
	replace(shard, &shard->marking.settled, NULL);
	shard->marking.confirmed = false;
}

/* A status of our own session and version has come. */
void
dq_mark_note(DqShard *shard, const DqFence *fence, const DqFenceRecord *record)
{
	DqMarking  *m = &shard->marking;
	bool		list = strcmp(record->ready_type, "list") == 0 ||
		strcmp(record->ready_type, "none") == 0;
	bool		empty = list && record->ready == 0 && !record->polled;
	int64		due = dq_now_ms();

	if (shard->state != DQ_SHARD_OPEN)
		return;
	/* others may have transferred: the owner of a producer's queue, a stranger */
	if (fence->next_due != m->head)
		m->wanted = true;
	if (!m->wanted)
		return;
	if (m->settled && !m->confirmed)
		m->confirmed = empty || (list && list_is_past(m, record));
	if (!is_complete(fence->position) || record->prev[0] == '\0' ||
		strcmp(fence->position, shard->position) != 0)
		return;

	if (fence->next_due != PG_INT64_MAX)
		due = Min(due, fence->next_due - 1);
	if (record->held_due != PG_INT64_MAX)
		due = Min(due, record->held_due - 1);
	m->head = fence->next_due;
	replace(shard, &m->applied, record->prev);
	/* what is polled may come back to the front */
	if (empty || (list && m->settled == NULL && !record->polled &&
				  record->ready_first[0] != '\0'))
	{
		replace(shard, &m->settled, record->prev);
		m->due = due;
		m->pushed_then = m->pushed;
		strlcpy(m->first, record->ready_first, sizeof(m->first));
		m->confirmed = empty;
		m->last = empty && record->lent == 0;
	}
}

static bool
wants_storing(const DqLink *link, const DqShard *shard, TimestampTz now)
{
	const DqMarking *m = &shard->marking;

	return shard->state == DQ_SHARD_OPEN && m->loaded && m->applied != NULL &&
		(m->confirmed || strcmp(m->applied, m->stored.applied) != 0) &&
		TimestampDifferenceExceeds(m->stored_at, now, Max(link->mark_interval, LOOK_MS));
}

/*
 * Asynchronous commit is enough: a lost mark is an older mark. That keeps an
 * outbox table longer, and means more repeats after a loss; never a lost task.
 */
void
dq_marks_store(DqLink *link)
{
	TimestampTz now = GetCurrentTimestamp();
	List	   *storing = NIL;
	ListCell   *lc;

	foreach(lc, link->shards)
	{
		DqShard    *shard = lfirst(lc);

		if (wants_storing(link, shard, now))
			storing = lappend(storing, shard);
	}
	if (storing == NIL)
		return;

	dq_link_begin(link);
	(void) set_config_option("synchronous_commit", "off", PGC_USERSET,
							 PGC_S_SESSION, GUC_ACTION_LOCAL, true, 0, false);
	foreach(lc, storing)
	{
		DqShard    *shard = lfirst(lc);
		DqMarking  *m = &shard->marking;
		DqMark		mark = m->stored;

		mark.no = m->stored.no + 1;
		mark.applied = m->applied;
		mark.producers = shard->producers ? shard->producers : "";
		if (m->confirmed)
		{
			mark.settled = m->settled;
			mark.due = m->due;
		}
		m->next_at = m->at;
		dq_mark_store(shard->no, &mark, &m->next_at);
	}
	DQ_POINT("mark.store");
	link->mark_interval = dq_marks_interval(list_length(link->shards));
	dq_link_end(link);

	foreach(lc, storing)
	{
		DqShard    *shard = lfirst(lc);
		DqMarking  *m = &shard->marking;

		m->at = m->next_at;
		m->stored.no++;
		replace(shard, &m->stored.applied, m->applied);
		if (m->confirmed)
		{
			replace(shard, &m->stored.settled, m->settled);
			m->stored.due = m->due;
			replace(shard, &m->settled, NULL);
			m->confirmed = false;
			/* nothing was left of which more could become known */
			if (m->last)
				m->wanted = false;
		}
		m->stored_at = now;
	}
}

/*
 * The fence was found behind what had been acknowledged: that is not so any more.
 * Within a transaction. What is known of deliveries stays true.
 */
void
dq_mark_back(DqLink *link, DqShard *shard)
{
	DqMarking  *m = &shard->marking;
	DqMark		mark = m->stored;

	/* this process goes on counting what is applied again */
	replace(shard, &shard->acknowledged, dq_snapshot_out(shard->replay_to));
	mark.no++;
	mark.applied = dq_snapshot_out(shard->prev);
	mark.producers = shard->producers ? shard->producers : "";
	ItemPointerSetInvalid(&m->at);
	m->next_at = m->at;
	dq_mark_store(shard->no, &mark, &m->next_at);
	m->stored.no = mark.no;
	replace(shard, &m->stored.applied, mark.applied);
}
