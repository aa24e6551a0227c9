/*
 * modify.c
 *	  Writing to a queue through its foreign table: what is refused when the
 *	  statement is planned, and what the files that do the work have in common. Rows
 *	  go to the outbox, so all of it follows the transaction. Called by handler.c's
 *	  table of callbacks.
 */
#include "postgres.h"

#include "compat.h"

#include "access/sysattr.h"
#include "access/table.h"
#include "catalog/pg_class.h"
#include "commands/trigger.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "optimizer/appendinfo.h"
#include "optimizer/inherit.h"
#include "optimizer/optimizer.h"
#include "optimizer/pathnode.h"
#include "parser/parsetree.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"

#include "api/api.h"
#include "fdw/modify.h"

/* ---- planning ------------------------------------------------------------------- */

int
dq_is_updatable(Relation rel)
{
	return (1 << CMD_INSERT) | (1 << CMD_UPDATE) | (1 << CMD_DELETE);
}

static const char *
role_name(DqColumnRole role)
{
	return role == DQ_COL_ID ? "id" : "shard";
}

/* Ids and shards are given by the queue. */
static void
refuse_column(const char *relname, DqColumnRole role, bool update)
{
	ereport(ERROR,
			(errcode(ERRCODE_GENERATED_ALWAYS),
			 update ? errmsg("column \"%s\" of queue \"%s\" cannot be updated",
							 role_name(role), relname)
			 : errmsg("cannot insert a value into column \"%s\" of queue \"%s\"",
					  role_name(role), relname),
			 errdetail("Each task gets its %s when it is offered.", role_name(role)),
			 update ? 0 : errhint("Leave the column out, or give NULL.")));
}

void
dq_modify_refuse(const DqModify *modify, DqColumnRole role)
{
	refuse_column(RelationGetRelationName(modify->rel), role,
				  modify->operation == CMD_UPDATE);
}

static void
check_insert(const DqQueue *queue, OnConflictAction on_conflict)
{
	if (on_conflict != ONCONFLICT_NONE)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("INSERT with ON CONFLICT is not supported for queue \"%s\"",
						queue->relname),
				 errdetail("A task offered under the key of a pending one replaces it.")));
	if (queue->column[DQ_COL_PAYLOAD] == InvalidAttrNumber)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_COLUMN),
				 errmsg("queue \"%s\" has no column \"payload\"", queue->relname),
				 errhint("Add the column to the foreign table, or use dq_offer().")));
}

List *
dq_plan_modify(PlannerInfo *root, ModifyTable *plan, Index relation, int subplan)
{
	RangeTblEntry *rte = planner_rt_fetch(relation, root);
	DqQueue    *queue = dq_queue_get(rte->relid);
	Bitmapset  *returning = NULL;
	List	   *attrs = NIL;
	List	   *read = NIL;
	int			bit = -1;

	if (plan->operation == CMD_INSERT)
		check_insert(queue, plan->onConflictAction);
	else if (plan->operation == CMD_UPDATE)
	{
		Bitmapset  *updated = get_rel_all_updated_cols(root, find_base_rel(root, relation));

		while ((bit = bms_next_member(updated, bit)) >= 0)
		{
			AttrNumber	attno = bit + FirstLowInvalidHeapAttributeNumber;

			if (attno == queue->column[DQ_COL_ID])
				refuse_column(queue->relname, DQ_COL_ID, true);
			if (attno == queue->column[DQ_COL_SHARD])
				refuse_column(queue->relname, DQ_COL_SHARD, true);
			attrs = lappend_int(attrs, attno);
		}
	}
	if (plan->returningLists)
		pull_varattnos(list_nth(plan->returningLists, subplan), relation, &returning);
	bit = -1;
	while ((bit = bms_next_member(returning, bit)) >= 0)
		read = lappend_int(read, bit + FirstLowInvalidHeapAttributeNumber);
	return list_make2(attrs, read);
}

/* ---- begin and end ---------------------------------------------------------------- */

static DqModify *
modify_create(Relation rel, CmdType operation, MemoryContext context)
{
	MemoryContext old = MemoryContextSwitchTo(context);
	DqModify   *modify = palloc0(sizeof(DqModify));
	DqQueue    *queue = dq_queue_get(RelationGetRelid(rel));
	TupleDesc	desc = RelationGetDescr(rel);

	modify->rel = rel;
	modify->relid = RelationGetRelid(rel);
	modify->operation = operation;
	modify->row = AllocSetContextCreate(context, "dq_bridge written row",
										ALLOCSET_DEFAULT_SIZES);
	for (int role = 0; role < DQ_NUM_COLS; role++)
	{
		modify->column[role] = queue->column[role];
		if (queue->column[role] != InvalidAttrNumber)
			modify->type[role] = TupleDescAttr(desc, queue->column[role] - 1)->atttypid;
	}
	modify->checks = desc->constr != NULL || rel->rd_rel->relispartition;
	MemoryContextSwitchTo(old);
	return modify;
}

void
dq_begin_modify(ModifyTableState *mtstate, ResultRelInfo *rinfo, List *private,
				int subplan, int eflags)
{
	DqModify   *modify;

	/* plain EXPLAIN needs nothing */
	if (eflags & EXEC_FLAG_EXPLAIN_ONLY)
		return;
	modify = modify_create(rinfo->ri_RelationDesc, mtstate->operation,
						   mtstate->ps.state->es_query_cxt);
	modify->users = 1;
	if (mtstate->operation != CMD_INSERT)
		dq_begin_change(mtstate, modify, private);
	rinfo->ri_FdwState = modify;
}

/* COPY, and rows that a partitioned table passes on. */
void
dq_begin_insert(ModifyTableState *mtstate, ResultRelInfo *rinfo)
{
	ModifyTable *plan = castNode(ModifyTable, mtstate->ps.plan);
	DqModify   *modify = rinfo->ri_FdwState;

	check_insert(dq_queue_get(RelationGetRelid(rinfo->ri_RelationDesc)),
				 plan ? plan->onConflictAction : ONCONFLICT_NONE);
	if (modify == NULL)
	{
		modify = modify_create(rinfo->ri_RelationDesc, CMD_INSERT,
							   mtstate->ps.state->es_query_cxt);
		rinfo->ri_FdwState = modify;
	}
	/* a row that moves here from another partition brings its columns along */
	if (mtstate->operation != CMD_INSERT)
		modify->gives_ids = true;
	modify->users++;
}

void
dq_end_modify(EState *estate, ResultRelInfo *rinfo)
{
	DqModify   *modify = rinfo->ri_FdwState;

	if (modify == NULL || --modify->users > 0)
		return;
	rinfo->ri_FdwState = NULL;
	if (modify->ahead)
		dq_ahead_end(modify->ahead, modify);
	MemoryContextDelete(modify->row);
}

/* The definition may change between two rows: taken anew for each. */
DqQueue *
dq_modify_queue(DqModify *modify)
{
	return dq_queue_get(modify->relid);
}

/* ---- the stored row ----------------------------------------------------------------- */

bool
dq_modify_is_seen(const DqModify *modify, const ResultRelInfo *rinfo)
{
	const TriggerDesc *triggers = rinfo->ri_TrigDesc;

	return modify->checks || rinfo->ri_projectReturning || rinfo->ri_WithCheckOptions ||
		(triggers && (modify->operation == CMD_UPDATE ? triggers->trig_update_after_row :
					  triggers->trig_insert_after_row));
}

void
dq_modify_show(DqModify *modify, EState *estate, ResultRelInfo *rinfo,
			   TupleTableSlot *slot, const DqOffered *stored)
{
	TupleDesc	desc = slot->tts_tupleDescriptor;
	Datum	   *values;
	bool	   *nulls;
	HeapTuple	tuple;

	slot_getallattrs(slot);
	values = palloc(desc->natts * sizeof(Datum));
	nulls = palloc(desc->natts * sizeof(bool));
	memcpy(values, slot->tts_values, desc->natts * sizeof(Datum));
	memcpy(nulls, slot->tts_isnull, desc->natts * sizeof(bool));

#define PUT(role, datum) \
	if (modify->column[role] != InvalidAttrNumber) \
	{ \
		values[modify->column[role] - 1] = (datum); \
		nulls[modify->column[role] - 1] = false; \
	}
	PUT(DQ_COL_ID, CStringGetTextDatum(dq_id_out(stored->due, stored->id)));
	PUT(DQ_COL_DUE_AT, TimestampTzGetDatum(dq_due_to_timestamp(stored->due)));
	PUT(DQ_COL_SHARD, Int32GetDatum(stored->shard));
#undef PUT

	tuple = heap_form_tuple(desc, values, nulls);
	tuple->t_tableOid = slot->tts_tableOid;
	ExecForceStoreHeapTuple(tuple, slot, false);
	/* a slot that is no heap slot still points into the tuple, which lasts one row */
	ExecMaterializeSlot(slot);
	slot->tts_tableOid = modify->relid;

	if (modify->checks)
	{
		if (modify->rel->rd_att->constr)
			ExecConstraints(rinfo, slot, estate);
		if (modify->rel->rd_rel->relispartition)
			ExecPartitionCheck(rinfo, slot, estate, true);
	}
}
