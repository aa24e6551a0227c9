/*
 * change.c
 *	  DELETE and UPDATE of tasks. A row is deleted by the removal of exactly its task;
 *	  it is updated by that and the offer of a new one, as dq_reschedule does. What is
 *	  not pending any more when its turn comes is left out, from the count and from
 *	  RETURNING. Called by the executor.
 */
#include "postgres.h"

#include "compat.h"

#include "commands/trigger.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "utils/datum.h"
#include "utils/memutils.h"
#include "utils/rel.h"

#include "api/api.h"
#include "fdw/modify.h"

/*
 * A trigger may keep a row from being deleted, and who asks for a few returned rows
 * stops there, unless the statement is part of another one.
 */
static bool
all_rows_are_reached(ModifyTableState *mtstate, const DqModify *modify)
{
	const ModifyTable *plan = (ModifyTable *) mtstate->ps.plan;
	const TriggerDesc *triggers = modify->rel->trigdesc;

	if (triggers && (modify->operation == CMD_DELETE ?
					 triggers->trig_delete_before_row || triggers->trig_delete_after_row :
					 triggers->trig_update_before_row || triggers->trig_update_after_row))
		return false;
	return plan->returningLists == NIL || !plan->canSetTag;
}

void
dq_begin_change(ModifyTableState *mtstate, DqModify *modify, List *private)
{
	MemoryContext context = mtstate->ps.state->es_query_cxt;
	MemoryContext old = MemoryContextSwitchTo(context);
	DqQueue    *queue = dq_modify_queue(modify);
	List	   *returning = list_nth(private, DQ_MODIFY_RETURNING);

	dq_require_not_producer(queue, modify->operation == CMD_DELETE ? "remove tasks" :
							"reschedule tasks");
	for (int role = 0; role < DQ_NUM_COLS; role++)
		modify->sets[role] = modify->column[role] != InvalidAttrNumber &&
			list_member_int(list_nth(private, DQ_MODIFY_ATTRS), modify->column[role]);
	if (modify->operation == CMD_DELETE && returning != NIL)
		modify->returning = dq_columns_describe(queue, RelationGetDescr(modify->rel), returning);
	if (queue->at_once)
		dq_tell_at_once(queue);
	modify->taker = dq_taker_create(context, modify->relid);
	modify->ahead_of_turn = all_rows_are_reached(mtstate, modify);
	MemoryContextSwitchTo(old);
	modify->ahead = dq_ahead_begin(mtstate, modify);
}

/* ---- DELETE ------------------------------------------------------------------------ */

/* The task as a scan shows it. */
static void
describe(const DqMember *member, DqTask *task)
{
	const DqTake *take = &member->take;
	const char *data = VARDATA_ANY(take->member);
	bytea	   *payload = dq_member_payload(take->member);

	memset(task, 0, sizeof(*task));
	task->score = take->score;
	task->due = dq_member_due(member);
	task->old = take->old;
	task->member = data;
	task->member_len = VARSIZE_ANY_EXHDR(take->member);
	task->readable = true;
	task->idlen = take->idlen;
	task->idbytes = take->old ? data : data + 1;
	task->payload = VARDATA_ANY(payload);
	task->payload_len = VARSIZE_ANY_EXHDR(payload);
	if (take->key)
	{
		task->key = VARDATA_ANY(take->key);
		task->key_len = VARSIZE_ANY_EXHDR(take->key);
	}
}

TupleTableSlot *
dq_delete(EState *estate, ResultRelInfo *rinfo, TupleTableSlot *slot, TupleTableSlot *plan)
{
	DqModify   *modify = rinfo->ri_FdwState;
	DqMember   *member = dq_ahead_member(modify->ahead, modify, plan);
	MemoryContext old;
	bool		removed;

	MemoryContextReset(modify->row);
	old = MemoryContextSwitchTo(modify->row);
	if (member == NULL)
		removed = false;
	else if (dq_modify_queue(modify)->at_once)
		removed = dq_taker_finish(modify->taker, member, NULL, NULL);
	else
		removed = dq_taker_remove(modify->taker, member);
	if (removed && rinfo->ri_projectReturning)
	{
		DqTask		task;

		ExecClearTuple(slot);
		if (modify->returning)
		{
			describe(member, &task);
			dq_columns_store_task(modify->returning, slot, member->shard, &task, DQ_STORE_ALL);
			ExecStoreVirtualTuple(slot);
		}
		else
			ExecStoreAllNullTuple(slot);
	}
	MemoryContextSwitchTo(old);
	return removed ? slot : NULL;
}

/* ---- UPDATE -------------------------------------------------------------------------- */

/*
 * Does the statement, or a trigger before it, give the column another value? What it
 * does not touch stays as it is, byte by byte, whatever the column makes of it.
 */
static bool
is_set(DqModify *modify, ResultRelInfo *rinfo, TupleTableSlot *slot, DqColumnRole role,
	   Datum *value, bool *isnull)
{
	AttrNumber	attno = modify->column[role];
	Form_pg_attribute att;
	Datum		before;
	bool		was_null;

	if (attno == InvalidAttrNumber)
		return false;
	if (!modify->sets[role] &&
		!(rinfo->ri_TrigDesc && rinfo->ri_TrigDesc->trig_update_before_row))
		return false;
	*value = slot_getattr(slot, attno, isnull);
	if (modify->sets[role])
		return true;
	before = slot_getattr(rinfo->ri_oldTupleSlot, attno, &was_null);
	att = TupleDescAttr(RelationGetDescr(modify->rel), attno - 1);
	return *isnull != was_null ||
		(!was_null && !datum_image_eq(before, *value, att->attbyval, att->attlen));
}

static void
new_task(DqModify *modify, DqQueue *queue, ResultRelInfo *rinfo, TupleTableSlot *slot,
		 const DqMember *member, DqOffered *offered)
{
	Datum		value;
	bool		isnull;

	memset(offered, 0, sizeof(*offered));
	offered->due = dq_member_due(member);
	offered->key = member->take.key;
	if (is_set(modify, rinfo, slot, DQ_COL_DUE_AT, &value, &isnull))
	{
		if (isnull)
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("due_at must not be NULL")));
		offered->due = dq_due_from_timestamp(DatumGetTimestampTz(value));
	}
	if (is_set(modify, rinfo, slot, DQ_COL_KEY, &value, &isnull))
		offered->key = isnull ? NULL : dq_key_bytes(queue, value, modify->type[DQ_COL_KEY]);
	if (!is_set(modify, rinfo, slot, DQ_COL_PAYLOAD, &value, &isnull))
		offered->payload = dq_member_payload(member->take.member);
	else if (isnull)
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("payload must not be NULL")));
	else
		offered->payload = dq_column_bytes(value, modify->type[DQ_COL_PAYLOAD]);
}

static bool
keys_equal(const bytea *a, const bytea *b)
{
	if (a == NULL || b == NULL)
		return a == b;
	return VARSIZE_ANY_EXHDR(a) == VARSIZE_ANY_EXHDR(b) &&
		memcmp(VARDATA_ANY(a), VARDATA_ANY(b), VARSIZE_ANY_EXHDR(a)) == 0;
}

/* The new task's row; the old one's is written. */
static void
record_new(DqModify *modify, DqQueue *queue, const DqMember *member, DqOffered *offered,
		   DqRow *row)
{
	/*
	 * Under another key it is a new task, which replaces the one it finds there; else
	 * it comes only where the old one was not replaced meanwhile.
	 */
	bool		same_key = keys_equal(offered->key, member->take.key);

	offered->shard = dq_offer_prepare(queue, same_key ? DQ_OP_RESCHEDULE : DQ_OP_OFFER,
									  queue->shard_no[member->shard], offered->payload,
									  offered->due, offered->key,
									  same_key && member->state == DQ_MEMBER_HELD ?
									  member->take.token : NULL, row);
	offered->id = row->id;
}

/* transactional off: in one call, or first the new one, if it goes to another shard */
static bool
update_at_once(DqModify *modify, DqQueue *queue, DqMember *member, DqOffered *offered)
{
	DqOffering	instead = {offered->due, offered->payload, offered->key};
	int			shard = member->shard;
	char	   *id;
	bytea	   *foreign;

	if (offered->key && queue->nshards > 1)
		shard = dq_shard_of_key(VARDATA_ANY(offered->key), VARSIZE_ANY_EXHDR(offered->key),
								queue->nshards);
	offered->shard = shard;
	if (shard == member->shard)
		return dq_taker_finish(modify->taker, member, &instead, &offered->id);
	id = dq_offer_at_once(queue, offered->payload, offered->due, offered->key);
	(void) dq_id_in(id, strlen(id), &offered->due, &offered->id, &foreign);
	return dq_taker_finish(modify->taker, member, NULL, NULL);
}

TupleTableSlot *
dq_update(EState *estate, ResultRelInfo *rinfo, TupleTableSlot *slot, TupleTableSlot *plan)
{
	DqModify   *modify = rinfo->ri_FdwState;
	DqMember   *member = dq_ahead_member(modify->ahead, modify, plan);
	MemoryContext old;
	bool		updated = false;

	MemoryContextReset(modify->row);
	old = MemoryContextSwitchTo(modify->row);
	if (member && !member->done && dq_taker_settle(modify->taker, member))
	{
		DqQueue    *queue = dq_modify_queue(modify);
		DqOffered	offered;
		DqRow		row;

		new_task(modify, queue, rinfo, slot, member, &offered);
		if (queue->at_once)
			updated = update_at_once(modify, queue, member, &offered);
		else if (dq_taker_remove(modify->taker, member))
		{
			updated = true;
			record_new(modify, dq_modify_queue(modify), member, &offered, &row);
		}
		if (updated && dq_modify_is_seen(modify, rinfo))
			dq_modify_show(modify, estate, rinfo, slot, &offered);
		if (updated && !queue->at_once)
			dq_outbox_insert(&row, queue->serverid);
	}
	MemoryContextSwitchTo(old);
	return updated ? slot : NULL;
}
