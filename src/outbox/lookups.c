/*
 * lookups.c
 *	  Questions to the outbox that a removal asks: can what is still on its way to
 *	  Redis change the answer? Has a transaction that held a task committed?
 */
#include "postgres.h"

#include "outbox/outbox.h"

#include "miscadmin.h"
#include "utils/memutils.h"

#define MANY_ROWS	1000		/* rather wait for the relay than read on */

static bool
is_same(const bytea *value, const bytea *other)
{
	return value && other && VARSIZE_ANY_EXHDR(value) == VARSIZE_ANY_EXHDR(other) &&
		memcmp(VARDATA_ANY(value), VARDATA_ANY(other), VARSIZE_ANY_EXHDR(value)) == 0;
}

static bool
row_concerns(const DqRow *row, const bytea *element, bool has_id, int64 due, uint64 id,
			 const bytea *member)
{
	switch (row->op)
	{
		case DQ_OP_OFFER:
		case DQ_OP_RESCHEDULE:
			if (has_id && row->id == id && row->due == due)
				return true;
			return is_same(row->key ? row->key : row->payload, element);
		case DQ_OP_REMOVE:
			return is_same(row->member, member);
		case DQ_OP_CONSUME:
		case DQ_OP_DISCARD:
			return false;
		default:
			return true;		/* recorded without an answer: may mean anything */
	}
}

/*
 * Does a row of the shard that the snapshot sees and the fence (prev, old) does not
 * cover bear on the task that an element names? member: the one that was found.
 * (PO 11, H15)
 */
bool
dq_outbox_concerns(int32 shard, const DqSnapshot *prev, const DqSnapshot *old,
				   Snapshot snapshot, const bytea *element, const bytea *member)
{
	MemoryContext each = AllocSetContextCreate(CurrentMemoryContext, "dq_bridge row",
											   ALLOCSET_DEFAULT_SIZES);
	MemoryContext caller = CurrentMemoryContext;
	DqCandidates c;
	DqRow		row;
	int64		due = 0;
	uint64		id = 0;
	bytea	   *foreign = NULL;
	bool		has_id;
	bool		concerns = false;
	int			n = 0;

	if (prev->damaged || (old && old->damaged))
		return true;			/* it covers nothing for certain */
	has_id = dq_id_in(VARDATA_ANY(element), VARSIZE_ANY_EXHDR(element), &due, &id, &foreign) &&
		foreign == NULL;
	dq_candidates_begin(&c, shard, prev, old, NULL, snapshot, false);
	while (!concerns)
	{
		bool		more;

		MemoryContextReset(each);
		MemoryContextSwitchTo(each);
		more = dq_candidates_next(&c, &row, true);
		MemoryContextSwitchTo(caller);
		if (!more)
			break;
		concerns = ++n > MANY_ROWS || row_concerns(&row, element, has_id, due, id, member);
	}
	dq_candidates_end(&c);
	MemoryContextDelete(each);
	return concerns;
}

/* Is there a row of this transaction with this token? */
bool
dq_outbox_has_row(int32 shard, FullTransactionId xid, const char *token, Snapshot snapshot)
{
	MemoryContext each = AllocSetContextCreate(CurrentMemoryContext, "dq_bridge row",
											   ALLOCSET_DEFAULT_SIZES);
	MemoryContext caller = CurrentMemoryContext;
	FullTransactionId next = xid;
	DqOutboxScan *scan;
	DqRow		row;
	bool		found = false;

	FullTransactionIdAdvance(&next);
	scan = dq_outbox_scan_begin(shard, xid, next, snapshot);
	while (!found)
	{
		bool		more;

		CHECK_FOR_INTERRUPTS();
		MemoryContextReset(each);
		MemoryContextSwitchTo(each);
		more = dq_outbox_scan_next(scan, &row, true);
		MemoryContextSwitchTo(caller);
		if (!more)
			break;
		found = row.token && VARSIZE_ANY_EXHDR(row.token) == DQ_TOKEN_LEN &&
			memcmp(VARDATA_ANY(row.token), token, DQ_TOKEN_LEN) == 0;
	}
	dq_outbox_scan_end(scan);
	MemoryContextDelete(each);
	return found;
}
