/*
 * cut.c
 *	  Pages of a batch, in its order. Called by batch.c.
 */
#include "postgres.h"

#include "compat.h"
#include "relay/relay_private.h"

#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#define PAGE_OPS	200
#define PAGE_BYTES	(256 * 1024)

/* A row that no version of ours has written like this stops its shard alone (G9). */
static bool
is_bad(DqBatch *batch, const DqRow *row)
{
	const char *what = NULL;

	if (strchr("osrcefxdgq", row->op) == NULL || row->op == '\0')
		what = "has unknown operation";
	else if ((dq_row_offers(row) && row->payload == NULL) ||
			 (strchr("efx", row->op) && row->key == NULL) ||
			 (strchr("dgq", row->op) && row->member == NULL))
		what = "lacks a value of operation";
	if (batch->bad)
		pfree(batch->bad);
	batch->bad = NULL;
	if (what)
	{
		MemoryContext old = MemoryContextSwitchTo(batch->context);

		batch->bad = psprintf("outbox row " INT64_FORMAT " %s \"%c\"", row->seq, what, row->op);
		MemoryContextSwitchTo(old);
	}
	return what != NULL;
}

/* false: it has to be resolved first, or is bad */
static bool
add_row(DqBatch *batch, DqCut *cut, const DqRow *row)
{
	if (is_bad(batch, row))
		return false;
	switch (row->op)
	{
		case DQ_OP_OFFER:
			dq_page_offer(cut->page, row->due, row->id, row->payload, row->key);
			cut->offers++;
			break;
		case DQ_OP_RESCHEDULE:
			dq_page_reschedule(cut->page, row->due, row->id, row->payload, row->key, row->token);
			cut->moves++;
			break;
		case DQ_OP_CONSUME:
			if (row->token)
				dq_page_consume(cut->page, row->token, row->due);
			break;
		case DQ_OP_REMOVE:
			if (row->member == NULL)
				ereport(LOG,
						(errcode(ERRCODE_DATA_CORRUPTED),
						 errmsg("dq_bridge: outbox row " INT64_FORMAT " names no task, passed over",
								row->seq)));
			else
				dq_page_remove(cut->page, row->member, row->due, row->token);
			break;
		case DQ_OP_REMOVE_ELEMENT:
		case DQ_OP_RESCHEDULE_ELEMENT:
			if (batch->resolved_seq != row->seq)
			{
				/* what stands before it must be applied when it is looked up */
				if (cut->page->nops == 0)
				{
					MemoryContext old = MemoryContextSwitchTo(batch->context);

					batch->element = palloc(sizeof(DqRow));
					*batch->element = *row;
					batch->element->key = (bytea *) pg_detoast_datum_copy((struct varlena *) row->key);
					MemoryContextSwitchTo(old);
				}
				return false;
			}
			if (batch->resolved)
				dq_page_named(cut->page, row, batch->resolved, batch->resolved_due);
			break;
		case DQ_OP_REMOVE_NAMED:
			dq_page_remove(cut->page, row->member, row->due, NULL);
			break;
		case DQ_OP_MOVE_NAMED:
			dq_page_move(cut->page, row->member, row->due, row->id);
			break;
		case DQ_OP_DISCARD:
			dq_page_discard(cut->page, row->member);
			break;
		case DQ_OP_REMOVE_KEY:
			dq_page_remove_key(cut->page, row->key);
			break;
	}
	return true;
}

static inline bool
page_is_full(const DqPage *page)
{
	return page->nops >= PAGE_OPS || page->bytes >= PAGE_BYTES;
}

static void
note_row(const DqShard *shard, DqCut *cut, const DqRow *row)
{
	cut->replayed += dq_heal_is_replay(shard, row);
	cut->last_xid = row->xid;
	cut->last_at = row->at;
}

/*
 * The next page of the batch. Rows up to (after_last, after_seq) were applied
 * before the batch was found half done.
 */
DqCut *
dq_batch_cut(DqShard *shard, DqOutboxScan *scan, MemoryContext scratch)
{
	DqBatch    *batch = shard->batch;
	DqPage	   *page = dq_page_create(shard->context);
	DqCut	   *cut = MemoryContextAllocZero(page->context, sizeof(DqCut));
	MemoryContext old = MemoryContextSwitchTo(scratch);
	int			rows = 0;
	int64		last = batch->after_last,
				seq = batch->after_seq;
	DqRow		row;
	bool		stop = false;

	cut->page = page;
	cut->first = !batch->started;
	while (batch->group < batch->ngroups && !page_is_full(page) && !stop)
	{
		DqGroup    *group = &batch->groups[batch->group];
		int64		from = batch->cut_seq;

		MemoryContextReset(scratch);
		if (group->last_seq < batch->after_last)
		{
			batch->group++;
			continue;
		}
		if (group->last_seq == batch->after_last)
			from = Max(from, batch->after_seq);
		if (group->nrows == 1)
		{
			if (group->last_seq > from)
			{
				if (!dq_outbox_fetch(scan, group->table, &group->tid, &row))
					ereport(ERROR,
							(errcode(ERRCODE_DATA_CORRUPTED),
							 errmsg("a committed row of outbox table %u has vanished",
									group->table)));
				if (!add_row(batch, cut, &row))
				{
					batch->element_last = group->last_seq;
					stop = true;
					break;
				}
				rows++;
				note_row(shard, cut, &row);
				last = group->last_seq;
				seq = row.seq;
			}
			batch->group++;
			batch->cut_seq = 0;
			continue;
		}
		/* from 0: all of it; seq begins at 1 */
		if (from > 0)
			dq_outbox_scan_seek(scan, shard->no, group->xid, group->xid, from);
		else
		{
			FullTransactionId next = group->xid;

			FullTransactionIdAdvance(&next);
			dq_outbox_scan_seek(scan, shard->no, group->xid, next, 0);
		}
		for (;;)
		{
			if (page_is_full(page))
				break;
			if (!dq_outbox_scan_next(scan, &row, true))
			{
				batch->group++;
				batch->cut_seq = 0;
				break;
			}
			if (!add_row(batch, cut, &row))
			{
				batch->element_last = group->last_seq;
				stop = true;
				break;
			}
			rows++;
			note_row(shard, cut, &row);
			last = group->last_seq;
			seq = row.seq;
			batch->cut_seq = row.seq;
			if (page->nops % 100 == 0)
				MemoryContextReset(scratch);
		}
	}
	MemoryContextSwitchTo(old);
	batch->rows -= rows;
	if (stop && rows == 0)
	{
		MemoryContextDelete(page->context);
		return NULL;
	}
	cut->done = batch->group >= batch->ngroups;
	snprintf(cut->position, sizeof(cut->position), "%s|" INT64_FORMAT ":" INT64_FORMAT "|%d",
			 batch->nonce, last, seq, cut->done ? 1 : 0);
	return cut;
}
