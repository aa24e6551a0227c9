/*
 * collect.c
 *	  Which transactions of a batch have rows for a shard: read in slices, so that
 *	  due tasks move between them. Called by batch.c.
 */
#include "postgres.h"

#include "compat.h"
#include "relay/relay_private.h"

#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

static void
collect_row(DqShard *shard, const DqRow *row)
{
	DqBatch    *batch = shard->batch;
	DqGroup    *group = batch->ngroups > 0 ? &batch->groups[batch->ngroups - 1] : NULL;

	batch->rows++;
	/* a held task is out of reach of transfers already */
	if (!dq_row_offers(row) && !row->has_token)
		batch->removes++;
	if (dq_row_was_deferred(row))
		batch->deferred++;
	if (group && FullTransactionIdEquals(group->xid, row->xid))
	{
		group->last_seq = Max(group->last_seq, row->seq);
		group->nrows++;
		return;
	}
	if (batch->ngroups == batch->maxgroups)
	{
		batch->maxgroups *= 2;
		batch->groups = repalloc_huge(batch->groups,
									  (Size) batch->maxgroups * sizeof(DqGroup));
	}
	group = &batch->groups[batch->ngroups++];
	group->xid = row->xid;
	group->last_seq = row->seq;
	group->nrows = 1;
	group->table = row->table;
	group->tid = row->tid;
}

int
dq_group_cmp(const void *a, const void *b)
{
	const DqGroup *x = a,
			   *y = b;

	return x->last_seq < y->last_seq ? -1 : x->last_seq > y->last_seq;
}

/*
 * Read on with the candidates (see dq_candidates_begin; here with a cursor, so
 * that a million rows are collected in slices between which due tasks move).
 */
void
dq_batch_collect(DqShard *shard, DqOutboxScan *scan, TimestampTz deadline)
{
	DqBatch    *batch = shard->batch;
	const DqSnapshot *seen = shard->seen;
	DqRow		row;
	int			n = 0;

	if (!batch->in_range && batch->xip == 0 && batch->ngroups == 0 && batch->at_seq == 0)
	{
		batch->in_range = true;
		batch->at_xid = seen->xmax;
		if (seen->tli < batch->cur->tli)
		{
			batch->at_xid = FullTransactionIdFromU64(0);
			batch->xip = seen->nxip;
		}
	}
	for (;;)
	{
		if (batch->at_seq > 0)
		{
			/* the rest of the transaction we stopped in */
			dq_outbox_scan_seek(scan, shard->no, batch->at_xid, batch->at_xid, batch->at_seq);
			while (dq_outbox_scan_next(scan, &row, false))
			{
				collect_row(shard, &row);
				batch->at_seq = row.seq;
				if (++n % 1000 == 0 && GetCurrentTimestamp() >= deadline)
					return;
			}
			batch->at_seq = 0;
			FullTransactionIdAdvance(&batch->at_xid);
		}
		if (batch->in_range)
		{
			dq_outbox_scan_seek(scan, shard->no, batch->at_xid, batch->cur->xmax, 0);
			while (dq_outbox_scan_next(scan, &row, false))
			{
				if (!dq_row_is_ours(&row) ||
					dq_row_is_done(&row, shard->seen, shard->old) ||
					dq_row_is_done(&row, shard->prev, NULL) ||
					!dq_snapshot_sees(batch->cur, row.tli, row.xid))
				{
					batch->at_xid = row.xid;
					continue;
				}
				collect_row(shard, &row);
				if (++n % 1000 == 0 && GetCurrentTimestamp() >= deadline)
				{
					batch->at_xid = row.xid;
					batch->at_seq = row.seq;
					return;
				}
			}
			batch->in_range = false;
		}
		/* the next one that was running */
		for (;;)
		{
			FullTransactionId next;

			if (batch->xip >= seen->nxip)
			{
				batch->collected = true;
				return;
			}
			batch->at_xid = seen->xip[batch->xip++];
			if (!dq_snapshot_sees(batch->cur, batch->cur->tli, batch->at_xid))
				continue;
			next = batch->at_xid;
			FullTransactionIdAdvance(&next);
			dq_outbox_scan_seek(scan, shard->no, batch->at_xid, next, 0);
			while (dq_outbox_scan_next(scan, &row, false))
			{
				if (!dq_row_is_ours(&row) || dq_row_is_done(&row, shard->old, NULL))
					continue;
				collect_row(shard, &row);
				if (++n % 1000 == 0 && GetCurrentTimestamp() >= deadline)
				{
					batch->at_seq = row.seq;
					return;
				}
			}
		}
	}
}
