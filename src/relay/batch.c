/*
 * batch.c
 *	  Which rows go to Redis, in which order, in which pages. A batch is what one
 *	  snapshot (cur) sees and the fence's (prev) does not; its order is the last
 *	  seq of each transaction, then seq (G8), and so the same whoever reads it.
 *	  Called by round.c.
 */
#include "postgres.h"

#include "compat.h"
#include "relay/relay_private.h"
#include "shared/points.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "storage/lwlock.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

void
dq_batch_free(DqShard *shard)
{
	if (shard->prepared)
	{
		MemoryContextDelete(shard->prepared->page->context);
		shard->prepared = NULL;
	}
	if (shard->batch)
		MemoryContextDelete(shard->batch->context);
	shard->batch = NULL;
}

static DqSnapshot *
snapshot_copy(const DqSnapshot *snap)
{
	DqSnapshot *copy = palloc(sizeof(DqSnapshot));

	*copy = *snap;
	copy->xip = palloc(Max(snap->nxip, 1) * sizeof(FullTransactionId));
	memcpy(copy->xip, snap->xip, snap->nxip * sizeof(FullTransactionId));
	return copy;
}

static void
snapshot_free(DqSnapshot *snap)
{
	if (snap == NULL)
		return;
	if (snap->xip)
		pfree(snap->xip);
	pfree(snap);
}

/* Everything up to here is applied, as far as this shard has rows. */
static void
set_seen(DqShard *shard, const DqSnapshot *snap)
{
	MemoryContext old = MemoryContextSwitchTo(shard->snapshots);
	DqSnapshot *before = shard->seen;

	shard->seen = snapshot_copy(snap);
	if (before != shard->prev)
		snapshot_free(before);
	MemoryContextSwitchTo(old);
	shard->seen_here = true;
	shard->seen_number++;
	shard->stats.relayed_xmin = U64FromFullTransactionId(snap->xmax);
	shard->publish = true;
}

static DqBatch *
batch_create(DqShard *shard, const DqSnapshot *cur)
{
	MemoryContext context = AllocSetContextCreate(shard->context, "dq_bridge batch",
												  ALLOCSET_DEFAULT_SIZES);
	MemoryContext old = MemoryContextSwitchTo(context);
	DqBatch    *batch = palloc0(sizeof(DqBatch));

	batch->context = context;
	batch->cur = snapshot_copy(cur);
	batch->maxgroups = 64;
	batch->groups = palloc(batch->maxgroups * sizeof(DqGroup));
	MemoryContextSwitchTo(old);
	return batch;
}

/* The fence was found inside a batch: go on with that batch's own bounds. */
static void
batch_resume(DqShard *shard, const char *cur)
{
	char		nonce[20];
	int64		last,
				seq;

	if (sscanf(shard->position, "%16[0-9a-f]|" INT64_FORMAT ":" INT64_FORMAT "|0",
			   nonce, &last, &seq) != 3)
		ereport(ERROR,
				(errcode(ERRCODE_DATA_CORRUPTED),
				 errmsg("fence of \"%s\" has an unreadable position \"%s\"",
						shard->name, shard->position)));
	shard->batch = batch_create(shard, dq_snapshot_in(cur));
	strlcpy(shard->batch->nonce, nonce, sizeof(shard->batch->nonce));
	shard->batch->started = true;
	shard->batch->after_last = last;
	shard->batch->after_seq = seq;
}

/* From status: the fence's snapshots and position become what we believe. */
void
dq_shard_adopt_fence(DqShard *shard, const DqFence *fence, const DqFenceRecord *record)
{
	MemoryContext old;
	size_t		len;

	dq_batch_free(shard);
	MemoryContextReset(shard->snapshots);
	old = MemoryContextSwitchTo(shard->snapshots);
	shard->heal_to = shard->replay_to = NULL;
	memset(&shard->sweep, 0, sizeof(shard->sweep));
	shard->prev = dq_snapshot_in(record->prev);
	shard->old = record->old[0] ? dq_snapshot_in(record->old) : NULL;
	shard->seen = shard->prev;
	shard->seen_here = false;
	shard->looked = false;
	MemoryContextSwitchTo(old);
	strlcpy(shard->position, fence->position, sizeof(shard->position));
	strlcpy(shard->sent_position, fence->position, sizeof(shard->sent_position));
	shard->floor = Max(shard->floor, fence->version);
	len = strlen(shard->position);
	if (len > 2 && strcmp(shard->position + len - 2, "|0") == 0)
		batch_resume(shard, record->cur);
}

/*
 * PO 3a: a batch of another timeline whose target calls a transaction ended that
 * is still in progress here (prepared, its COMMIT PREPARED was lost with the old
 * primary) stays open: its rows would be passed over.
 */
static bool
may_close(const DqBatch *batch, const DqSnapshot *now)
{
	int			i;

	if (batch->cur->tli >= now->tli)
		return true;
	for (i = 0; i < now->nxip; i++)
		if (dq_snapshot_sees(batch->cur, batch->cur->tli, now->xip[i]))
		{
			ereport(LOG,
					(errcode(ERRCODE_OBJECT_IN_USE),
					 errmsg("dq_bridge waits for the end of a prepared transaction from before the promotion"),
					 errhint("See pg_prepared_xacts.")));
			return false;
		}
	return true;
}

static bool
sees_any(const DqSnapshot *snap, const DqSnapshot *running)
{
	int			i;

	for (i = 0; i < running->nxip; i++)
		if (dq_snapshot_sees(snap, snap->tli, running->xip[i]))
			return true;
	return false;
}

/*
 * PO 2 (R2): a transaction prepared before a promotion is ended for the fence's
 * prev and running for the first snapshot of the new timeline. While one is, the
 * older snapshot stays, and a row is done if either sees it. NULL: leave as it
 * is, "": drop.
 */
char *
dq_batch_old(DqShard *shard)
{
	const DqSnapshot *cur = shard->batch->cur;

	if (shard->prev->tli != 0 && shard->prev->tli < cur->tli &&
		sees_any(shard->prev, cur))
		return dq_snapshot_out(shard->prev);
	if (shard->old && !sees_any(shard->old, cur))
		return "";
	return NULL;
}

void
dq_batch_done(DqShard *shard)
{
	char	   *old_text = dq_batch_old(shard);
	MemoryContext old = MemoryContextSwitchTo(shard->snapshots);
	DqSnapshot *before = shard->prev;

	if (old_text)
	{
		snapshot_free(shard->old);
		shard->old = old_text[0] ? dq_snapshot_in(old_text) : NULL;
	}
	shard->prev = snapshot_copy(shard->batch->cur);
	MemoryContextSwitchTo(old);
	if (before != shard->seen)
		snapshot_free(before);
	shard->want_thaw |= shard->batch->thaws;
	set_seen(shard, shard->batch->cur);
	if (shard->batch->heals)
		dq_heal_reached(shard);
	shard->marking.wanted = true;
	dq_batch_free(shard);
}

/* ---- the step of a round ---- */

static bool
wants_rows(const DqShard *shard, TimestampTz now)
{
	return (shard->state == DQ_SHARD_OPEN || shard->state == DQ_SHARD_FROZEN) &&
		!shard->broken && shard->prepared == NULL && shard->blocked_until <= now &&
		shard->heal != DQ_HEAL_SWEEP && shard->heal != DQ_HEAL_LOOK;
}

/* Moves with every transaction that had an xid, COMMIT PREPARED included. */
uint64
dq_completion_count(void)
{
	uint64		count;

	LWLockAcquire(ProcArrayLock, LW_SHARED);
	count = DqVariableCache->xactCompletionCount;
	LWLockRelease(ProcArrayLock);
	return count;
}

/*
 * PO 1: before any script leaves that puts a snapshot into a fence, its ended
 * transactions are durable here, and on the synchronous standby (G11).
 */
void
dq_link_flush(DqLink *link, uint32 tli, XLogRecPtr point)
{
	MemoryContext old;

	DQ_POINT("relay.flush");
	if (!dq_flush_to(point))
	{
		CHECK_FOR_INTERRUPTS();
		ereport(ERROR,
				(errcode(ERRCODE_T_R_STATEMENT_COMPLETION_UNKNOWN),
				 errmsg("wait for the synchronous standby was cut short")));
	}
	DQ_POINT("relay.flushed");
	old = MemoryContextSwitchTo(link->context);
	if (link->writer)
		pfree(link->writer);
	link->writer = dq_writer_stamp(tli, point);
	MemoryContextSwitchTo(old);
}

/*
 * What is recorded without an answer is looked up over all shards of its queue, in one
 * order (resolve.c). Batches are in one order only if each shard goes through the same
 * targets: two that stood at such a row each, one in an old batch (found half done
 * after a restart) and one in a newer batch, would wait for each other for ever. So a
 * shard that begins goes first to the oldest target that another one of its queue is
 * on the way to, unless it is there. NULL: none is older than bound.
 */
static const DqSnapshot *
older_target(const DqLink *link, const DqShard *shard, const DqSnapshot *bound)
{
	const DqSnapshot *oldest = NULL;
	ListCell   *lc;

	if (!OidIsValid(shard->relid))
		return NULL;
	foreach(lc, link->shards)
	{
		const DqShard *other = lfirst(lc);

		if (other == shard || other->relid != shard->relid || other->batch == NULL ||
			dq_snapshot_covers(shard->seen, other->batch->cur) ||
			dq_snapshot_covers(other->batch->cur, oldest ? oldest : bound))
			continue;
		oldest = other->batch->cur;
	}
	return oldest;
}

/* Nothing of the batch has been sent yet, and another shard is in an older one. */
static bool
must_begin_anew(const DqLink *link, const DqShard *shard)
{
	return shard->batch && !shard->batch->started && shard->pages_in_flight == 0 &&
		older_target(link, shard, shard->batch->cur) != NULL;
}

bool
dq_batches_prepare(DqLink *link, TimestampTz deadline)
{
	TimestampTz now = GetCurrentTimestamp();
	uint64		completions = dq_completion_count();
	bool		any = false,
				more = false;
	MemoryContext scratch;
	MemoryContext caller = CurrentMemoryContext;
	Snapshot	snapshot;
	DqSnapshot *cur;
	DqOutboxScan *scan = NULL;
	XLogRecPtr	point;
	bool		flush_needed = false;
	ListCell   *lc;

	foreach(lc, link->shards)
	{
		DqShard    *shard = lfirst(lc);

		if (wants_rows(shard, now) &&
			(shard->batch ? (!shard->batch->last_cut && !shard->batch->element) ||
			 must_begin_anew(link, shard) :
			 (!shard->looked || shard->completions != completions)))
			any = true;
	}
	/* nothing has committed since the last look: not even a snapshot is opened */
	if (!any)
		return false;

	dq_link_begin(link);
	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	scratch = AllocSetContextCreate(link->round, "dq_bridge rows", ALLOCSET_DEFAULT_SIZES);
	MemoryContextSwitchTo(link->round);
	cur = dq_snapshot_take(snapshot);
	link->tli = cur->tli;
	DQ_POINT("relay.snapshot");
	point = dq_flush_point();	/* after the snapshot: PO 1 */

	foreach(lc, link->shards)
	{
		DqShard    *shard = lfirst(lc);
		const DqSnapshot *target = dq_heal_target(shard);
		DqBatch    *batch;

		if (!wants_rows(shard, now))
			continue;
		if (must_begin_anew(link, shard))
		{
			dq_batch_free(shard);
			shard->looked = false;
		}
		if (shard->batch == NULL)
		{
			const DqSnapshot *older;

			if (shard->looked && shard->completions == completions)
				continue;
			older = older_target(link, shard, target ? target : cur);
			shard->batch = batch_create(shard, older ? older : target ? target : cur);
			dq_new_token(shard->batch->nonce);
			shard->batch->heals = target != NULL && older == NULL;
			shard->batch->thaws = shard->state == DQ_SHARD_FROZEN && !target && !older &&
				dq_shard_may_thaw(shard);
			/* behind an older one comes the one that was meant */
			shard->looked = older == NULL;
			shard->completions = completions;
			more |= older != NULL;
		}
		batch = shard->batch;
		if (scan == NULL)
			scan = dq_outbox_scan_begin(shard->no, cur->xmax, cur->xmax, snapshot);
		if (!batch->collected)
		{
			dq_batch_collect(shard, scan, deadline);
			shard->catching_up &= !batch->collected || batch->heals;
			if (!batch->collected)
			{
				more = true;
				continue;
			}
			qsort(batch->groups, batch->ngroups, sizeof(DqGroup), dq_group_cmp);
			if (batch->ngroups == 0 && !batch->started &&
				!(batch->thaws && shard->replay_to))
			{
				/*
				 * Progress over an empty round stays in memory (R7); but a fence
				 * that was lost with nothing left to replay is written again.
				 */
				shard->want_thaw |= batch->thaws;
				set_seen(shard, batch->cur);
				if (batch->heals)
					dq_heal_reached(shard);
				dq_batch_free(shard);
				continue;
			}
		}
		if (batch->last_cut)
			continue;
		if (batch->element)
			continue;			/* resolve.c has it */
		shard->prepared = dq_batch_cut(shard, scan, scratch);
		if (shard->prepared == NULL)
		{
			if (batch->bad)
				dq_shard_note_error(link, shard, batch->bad, false);
			more = true;
			continue;
		}
		if (shard->prepared->done)
		{
			if (may_close(batch, cur))
				batch->last_cut = true;
			else if (shard->prepared->page->nops == 0)
			{
				MemoryContextDelete(shard->prepared->page->context);
				shard->prepared = NULL;
				continue;
			}
			else
			{
				shard->prepared->done = false;
				shard->prepared->position[strlen(shard->prepared->position) - 1] = '0';
			}
		}
		if (!batch->last_cut)
			more = true;
		flush_needed = true;
	}
	if (scan)
		dq_outbox_scan_end(scan);
	MemoryContextSwitchTo(caller);
	MemoryContextDelete(scratch);

	if (flush_needed)
		dq_link_flush(link, cur->tli, point);
	UnregisterSnapshot(snapshot);
	dq_link_end(link);
	return more;
}
