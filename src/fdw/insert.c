/*
 * insert.c
 *	  INSERT and COPY into a queue: each row is an offer, as dq_offer_at makes it.
 *	  Redis is not asked. Called by the executor, and by modify.c for the new row of
 *	  an UPDATE.
 */
#include "postgres.h"

#include "compat.h"

#include "commands/trigger.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/timestamp.h"

#include "api/api.h"
#include "fdw/modify.h"

/* Rows that are written in one go; more makes them no cheaper. */
#define BATCH_ROWS	64

static bool
get_column(DqModify *modify, TupleTableSlot *slot, DqColumnRole role, Datum *value)
{
	bool		isnull;

	if (modify->column[role] == InvalidAttrNumber)
		return false;
	*value = slot_getattr(slot, modify->column[role], &isnull);
	return !isnull;
}

static void
read_row(DqModify *modify, DqQueue *queue, TupleTableSlot *slot, DqOffered *offered)
{
	Datum		value;

	memset(offered, 0, sizeof(*offered));
	if (!modify->gives_ids)
	{
		if (get_column(modify, slot, DQ_COL_ID, &value))
			dq_modify_refuse(modify, DQ_COL_ID);
		if (get_column(modify, slot, DQ_COL_SHARD, &value))
			dq_modify_refuse(modify, DQ_COL_SHARD);
	}
	if (!get_column(modify, slot, DQ_COL_PAYLOAD, &value))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("payload must not be NULL")));
	offered->payload = dq_column_bytes(value, modify->type[DQ_COL_PAYLOAD]);
	if (get_column(modify, slot, DQ_COL_KEY, &value))
		offered->key = dq_key_bytes(queue, value, modify->type[DQ_COL_KEY]);
	offered->due = dq_due_from_timestamp(get_column(modify, slot, DQ_COL_DUE_AT, &value) ?
										 DatumGetTimestampTz(value) : GetCurrentTimestamp());
}

/* false: no row is to be written, the task is in Redis (transactional off) */
static bool
prepare(DqModify *modify, EState *estate, ResultRelInfo *rinfo, TupleTableSlot *slot,
		DqRow *row)
{
	DqQueue    *queue = dq_modify_queue(modify);
	DqOffered	offered;
	bool		at_once = queue->at_once;

	read_row(modify, queue, slot, &offered);
	if (at_once)
	{
		char	   *id = dq_offer_record(queue, offered.payload, offered.due, offered.key);
		bytea	   *foreign;

		(void) dq_id_in(id, strlen(id), &offered.due, &offered.id, &foreign);
		offered.shard = offered.key && queue->nshards > 1 ?
			dq_shard_of_key(VARDATA_ANY(offered.key), VARSIZE_ANY_EXHDR(offered.key),
							queue->nshards) :
			(int) ((offered.id & ((UINT64CONST(1) << DQ_ID_SEQ_BITS) - 1)) % queue->nshards);
	}
	else
	{
		offered.shard = dq_offer_prepare(queue, DQ_OP_OFFER, -1, offered.payload, offered.due,
										 offered.key, NULL, row);
		offered.id = row->id;
	}
	if (dq_modify_is_seen(modify, rinfo))
		dq_modify_show(modify, estate, rinfo, slot, &offered);
	return !at_once;
}

TupleTableSlot *
dq_insert(EState *estate, ResultRelInfo *rinfo, TupleTableSlot *slot, TupleTableSlot *plan)
{
	DqModify   *modify = rinfo->ri_FdwState;
	MemoryContext old;
	DqRow		row;

	MemoryContextReset(modify->row);
	old = MemoryContextSwitchTo(modify->row);
	if (prepare(modify, estate, rinfo, slot, &row))
		dq_outbox_insert(&row, dq_modify_queue(modify)->serverid);
	MemoryContextSwitchTo(old);
	return slot;
}

/* Nobody sees the rows one by one here (dq_batch_size). */
TupleTableSlot **
dq_insert_batch(EState *estate, ResultRelInfo *rinfo, TupleTableSlot **slots,
				TupleTableSlot **plans, int *nslots)
{
	DqModify   *modify = rinfo->ri_FdwState;
	MemoryContext old;
	DqRow	   *rows;
	int			n = 0;

	MemoryContextReset(modify->row);
	old = MemoryContextSwitchTo(modify->row);
	rows = palloc(*nslots * sizeof(DqRow));
	for (int i = 0; i < *nslots; i++)
		if (prepare(modify, estate, rinfo, slots[i], &rows[n]))
			n++;
	for (int i = 0; i < n; i++)
		dq_outbox_insert(&rows[i], dq_modify_queue(modify)->serverid);
	MemoryContextSwitchTo(old);
	return slots;
}

int
dq_batch_size(ResultRelInfo *rinfo)
{
	if (rinfo->ri_projectReturning || rinfo->ri_WithCheckOptions ||
		(rinfo->ri_TrigDesc && (rinfo->ri_TrigDesc->trig_insert_before_row ||
								rinfo->ri_TrigDesc->trig_insert_after_row)))
		return 1;
	return BATCH_ROWS;
}
