/*
 * heal.c
 *	  What has to be made good in a shard that was entered, before it is thawed
 *	  (G3). Where its fence stands not past the mark, the operations up to exactly
 *	  the mark's A are applied, own tasks due by its W are swept away, and only then
 *	  what lies beyond is applied (PO 7, PO 15a). Position alone decides, so that a
 *	  restart without a loss does the same and finds nothing. Called by batch.c,
 *	  exchange.c and enter.c.
 */
#include "postgres.h"

#include "relay/relay_private.h"
#include "shared/points.h"

#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#define SWEEP_PAGE	256
#define BUSY_MS		100			/* dq_resume is open in some transaction */

/* Numbers that a server which failed has given out and we do not know of. */
#define SLACK		(1 << 20)

/* ---- which snapshot was acknowledged before ---- */

/*
 * Remember how far Redis had come by what it answered: what lies between the
 * fence found later and this is applied again.
 */
void
dq_heal_remember(DqShard *shard)
{
	MemoryContext old;

	if ((shard->state != DQ_SHARD_OPEN && shard->state != DQ_SHARD_FROZEN) ||
		shard->prev == NULL)
		return;
	if (shard->acknowledged &&
		dq_snapshot_covers(dq_snapshot_in(shard->acknowledged), shard->prev))
		return;
	old = MemoryContextSwitchTo(shard->context);
	if (shard->acknowledged)
		pfree(shard->acknowledged);
	shard->acknowledged = dq_snapshot_out(shard->prev);
	MemoryContextSwitchTo(old);
}

void
dq_heal_begin(DqShard *shard)
{
	shard->heal = DQ_HEAL_LOOK;
	shard->replayed = 0;
	shard->swept = 0;
}

/* What was believed of another source's fence, or of nothing. */
void
dq_heal_reset(DqShard *shard)
{
	shard->heal = DQ_HEAL_NONE;
	shard->lost = false;
	shard->loss_noted = false;
	shard->replay_to = NULL;
	if (shard->acknowledged)
		pfree(shard->acknowledged);
	shard->acknowledged = NULL;
}

/* The shard is open: all is made good. */
void
dq_heal_end(DqShard *shard)
{
	if (shard->loss_noted)
		ereport(LOG,
				(errmsg("dq_bridge: shard \"%s\" is whole again: " INT64_FORMAT
						" operations were applied again, " INT64_FORMAT
						" tasks known to be delivered were dropped",
						shard->name, shard->replayed, shard->swept)));
	dq_heal_reset(shard);
}

/* ---- what is to be done ---- */

static bool
fence_is_past(const DqShard *shard, const DqSnapshot *a)
{
	/* inside a batch that ends by A: finished first (PO 3) */
	return !dq_snapshot_covers(a, shard->batch ? shard->batch->cur : shard->prev);
}

static void
note_loss(DqLink *link, DqShard *shard)
{
	if (shard->loss_noted)
		return;
	shard->loss_noted = true;
	ereport(LOG,
			(errmsg("dq_bridge: Redis behind shard \"%s\" of server \"%s\" has lost acknowledged writes, applying them again",
					shard->name, link->server_name)));
}

/*
 * How far Redis is known to have come, by this process or by one before it, if the
 * fence found (shard->prev) is behind that; else NULL.
 */
static DqSnapshot *
missing_to(const DqShard *shard)
{
	DqSnapshot *to = dq_snapshot_in(shard->marking.stored.applied);

	if (shard->acknowledged)
	{
		DqSnapshot *mine = dq_snapshot_in(shard->acknowledged);

		if (dq_snapshot_covers(mine, to))
			to = mine;
	}
	return dq_snapshot_covers(shard->prev, to) ? NULL : to;
}

/* Does Redis lack something of ours that it had? */
bool
dq_heal_is_behind(const DqShard *shard)
{
	return shard->lost || missing_to(shard) != NULL;
}

bool
dq_shard_is_halted(const DqShard *shard)
{
	return shard->paused || (shard->loss && shard->stop_on_loss);
}

void
dq_shard_set_loss(DqShard *shard, const DqLoss *loss)
{
	if (shard->loss)
		pfree(shard->loss);
	shard->loss = loss ? MemoryContextStrdup(shard->context, dq_loss_text(loss)) : NULL;
	if (loss)
		shard->stats.last_error_at = loss->since;
	shard->publish = true;
}

static void
warn_of_loss(DqLink *link, DqShard *shard)
{
	ereport(WARNING,
			(errcode(ERRCODE_DATA_CORRUPTED),
			 errmsg("dq_bridge: Redis behind shard \"%s\" of server \"%s\" has lost data from before the replay window: %s",
					shard->name, link->server_name, shard->loss),
			 shard->stop_on_loss ?
			 errdetail("Its due tasks wait until dq_resume() accepts the loss.") : 0,
			 errhint("Offer again what is missing, then run dq_resume().")));
}

/* One shard. true: something was lost that cannot be applied again */
static bool
look_at(DqLink *link, DqShard *shard)
{
	DqMarking  *m = &shard->marking;
	bool		found = shard->position[0] != '\0';
	DqSnapshot *a = NULL;
	DqLoss		loss;
	bool		lost = false;
	MemoryContext old;

	switch (dq_loss_check(shard->no, shard->prev, found, &m->stored, link->own_xact, &loss))
	{
		case DQ_LOSS_NONE:
			break;
		case DQ_LOSS_BUSY:
			shard->blocked_until = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), BUSY_MS);
			return false;
		case DQ_LOSS_FOUND:
			if (!link->own_xact)
			{
				/* a rollback of this transaction would forget it */
				dq_shard_note_error(link, shard,
									"Redis has lost data from before the replay window: a worker has to note that",
									false);
				return false;
			}
			dq_shard_set_loss(shard, &loss);
			lost = true;
			break;
	}

	old = MemoryContextSwitchTo(shard->snapshots);
	shard->replay_to = missing_to(shard);
	if (shard->lost || shard->replay_to)
		note_loss(link, shard);
	/*
	 * What is applied again is needed until then, so no outbox table may be emptied
	 * because it had been applied once.
	 */
	if (shard->replay_to && link->own_xact)
		dq_mark_back(link, shard);
	if (m->stored.settled[0] != '\0')
		a = dq_snapshot_in(m->stored.settled);
	shard->heal_to = a;
	shard->heal = a && !fence_is_past(shard, a) ? DQ_HEAL_RELAY : DQ_HEAL_NONE;
	MemoryContextSwitchTo(old);
	shard->publish = true;
	return lost;
}

/*
 * Fences were found and shards are frozen: what do they need? Committed before the
 * flush point of the next pages is read (W7).
 */
void
dq_heal_look(DqLink *link)
{
	TimestampTz now = GetCurrentTimestamp();
	List	   *shards = NIL;
	List	   *losses = NIL;
	uint64		id = 0;
	bool		behind = false;
	ListCell   *lc;

	foreach(lc, link->shards)
	{
		DqShard    *shard = lfirst(lc);

		if (shard->state == DQ_SHARD_FROZEN && shard->heal == DQ_HEAL_LOOK &&
			shard->blocked_until <= now)
		{
			shards = lappend(shards, shard);
			behind |= dq_heal_is_behind(shard);
		}
	}
	if (shards == NIL)
		return;

	dq_link_begin(link);
	/*
	 * Nobody empties a table between the look at what was emptied and the commit
	 * that puts the mark back. By hand nothing is put back: the lock stays until
	 * the caller's transaction ends.
	 */
	if (behind)
		dq_outbox_keep(link->own_xact);
	foreach(lc, shards)
	{
		DqShard    *shard = lfirst(lc);

		if (look_at(link, shard))
			losses = lappend(losses, shard);
		/* a number larger than any before it */
		if (shard->heal == DQ_HEAL_RELAY && id == 0)
			(void) dq_outbox_next(&id);
		shard->largest_id = id + SLACK;
	}
	dq_link_end(link);
	foreach(lc, losses)
		warn_of_loss(link, lfirst(lc));
}

/* The snapshot that the next batch must end at, NULL: the present. */
const DqSnapshot *
dq_heal_target(const DqShard *shard)
{
	return shard->heal == DQ_HEAL_RELAY ? shard->heal_to : NULL;
}

/* All up to the mark is applied. */
void
dq_heal_reached(DqShard *shard)
{
	shard->heal = DQ_HEAL_SWEEP;
	memset(&shard->sweep, 0, sizeof(shard->sweep));
}

/* Is a page of the sweep to be sent? Nothing else may be in flight. */
bool
dq_heal_wants_sweep(const DqShard *shard)
{
	return shard->heal == DQ_HEAL_SWEEP && shard->state == DQ_SHARD_FROZEN &&
		shard->pages_in_flight == 0 && !shard->other_in_flight;
}

void
dq_heal_send(DqLink *link, DqShard *shard)
{
	DqSweepArgs args;

	args.session = shard->session;
	args.floor = shard->floor;
	args.source = link->source;
	args.position = shard->position;
	args.due = shard->marking.stored.due;
	args.largest_id = shard->largest_id;
	args.limit = SWEEP_PAGE;
	DQ_POINT("sweep.send");
	dq_op_sweep_send(link->redis, &shard->keys, &args, &shard->sweep);
}

/* note_fence has accepted it */
void
dq_heal_received(DqShard *shard, const DqSweepResult *result)
{
	MemoryContext old = MemoryContextSwitchTo(shard->snapshots);

	if (shard->sweep.score)
		pfree(shard->sweep.score);
	if (shard->sweep.member)
		pfree(shard->sweep.member);
	strlcpy(shard->sweep.stage, result->next.stage, sizeof(shard->sweep.stage));
	shard->sweep.score = pstrdup(result->next.score);
	shard->sweep.member = (bytea *) pg_detoast_datum_copy((struct varlena *) result->next.member);
	MemoryContextSwitchTo(old);
	shard->swept += result->dropped;
	shard->stats.pending = Max(0, shard->stats.pending - result->dropped);
	shard->publish = true;
	if (shard->sweep.stage[0] == '\0')
	{
		shard->heal = DQ_HEAL_NONE;
		shard->looked = false;	/* on to the present */
	}
}

/* Has this row been applied before? */
bool
dq_heal_is_replay(const DqShard *shard, const DqRow *row)
{
	return shard->replay_to && dq_snapshot_sees(shard->replay_to, row->tli, row->xid);
}
