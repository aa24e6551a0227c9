/*
 * discard.c
 *	  DELETE of what lies in quarantine (contents 'quarantine'). Like every change it
 *	  goes through the outbox, so it follows the transaction. Called by the executor
 *	  through handler.c, which tells these tables from others.
 */
#include "postgres.h"

#include "compat.h"

#include "access/htup_details.h"
#include "catalog/pg_type.h"
#include "executor/executor.h"
#include "nodes/makefuncs.h"
#include "optimizer/appendinfo.h"
#include "optimizer/optimizer.h"
#include "parser/parsetree.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"

#include "api/api.h"
#include "fdw/discard.h"
#include "fdw/fdw.h"

/* The row as it was read: the junk column that names it, and what RETURNING shows */
#define ROW_COLUMN "wholerow"

typedef struct Discard
{
	MemoryContext row;			/* what one row needs */
	AttrNumber	row_attno;		/* of the junk column */
	AttrNumber	member_attno;
	AttrNumber	shard_attno;	/* InvalidAttrNumber: of a queue with one shard */
	Oid			serverid;
	int			nshards;
	int32	   *shard_no;
	bool	   *checked;		/* that this database owns the shard */
} Discard;

bool
dq_shows_quarantine(Oid relid)
{
	return dq_table_get(relid)->contents == DQ_CONTENTS_QUARANTINE;
}

void
dq_discard_targets(PlannerInfo *root, Index rtindex, Relation rel)
{
	Var		   *var = makeWholeRowVar(planner_rt_fetch(rtindex, root), rtindex, 0, false);

	add_row_identity_var(root, var, rtindex, ROW_COLUMN);
}

void
dq_discard_plan(PlannerInfo *root, ModifyTable *plan, Oid relid)
{
	DqQueue    *queue = dq_table_get(relid);

	if (plan->operation != CMD_DELETE)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("what is quarantined in \"%s\" can only be deleted", queue->relname)));
	if (queue->column[DQ_COL_MEMBER] == InvalidAttrNumber ||
		(queue->nshards > 1 && queue->column[DQ_COL_SHARD] == InvalidAttrNumber))
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot delete from \"%s\": its rows do not say where they are",
						queue->relname),
				 errhint("Give the foreign table the columns \"member\" bytea and \"shard\" int.")));
}

void
dq_discard_begin(ModifyTableState *mtstate, ResultRelInfo *rinfo, int eflags)
{
	DqQueue    *queue = dq_table_get(RelationGetRelid(rinfo->ri_RelationDesc));
	Plan	   *subplan = outerPlanState(mtstate)->plan;
	DqReading	reading = {0};
	MemoryContext old;
	Discard    *discard;

	if (eflags & EXEC_FLAG_EXPLAIN_ONLY)
		return;
	old = MemoryContextSwitchTo(mtstate->ps.state->es_query_cxt);
	discard = palloc0(sizeof(Discard));
	discard->row = AllocSetContextCreate(CurrentMemoryContext, "dq_bridge discarded row",
										 ALLOCSET_DEFAULT_SIZES);
	discard->row_attno = ExecFindJunkAttributeInTlist(subplan->targetlist, ROW_COLUMN);
	if (!AttributeNumberIsValid(discard->row_attno))
		elog(ERROR, "could not find junk column \"%s\"", ROW_COLUMN);
	discard->member_attno = queue->column[DQ_COL_MEMBER];
	discard->shard_attno = queue->column[DQ_COL_SHARD];
	discard->serverid = queue->serverid;
	discard->nshards = queue->nshards;
	discard->checked = palloc0(queue->nshards * sizeof(bool));
	dq_reading_init(&reading, queue);
	discard->shard_no = reading.shard_no;
	MemoryContextSwitchTo(old);
	rinfo->ri_FdwState = discard;
}

/* Only the owner's worker writes to the shard, and knows it by its number. */
static void
check_shard(Discard *discard, Oid relid, int shard)
{
	DqQueue    *queue = dq_table_get(relid);
	DqReading	reading = {0};
	DqStream   *stream;
	DqShelfPlace start = {0};
	DqShelf		shelf;

	if (discard->checked[shard])
		return;
	if (discard->shard_no[shard] == 0)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("cannot delete from \"%s\": this database does not serve its queue",
						queue->relname),
				 errhint("Create the foreign table that shows the queue's pending tasks.")));
	dq_reading_init(&reading, queue);
	stream = dq_stream_make(&reading, shard);
	dq_op_bad(dq_reading_redis(&reading), queue->relname, dq_stream_keys(stream),
			  reading.source, &start, 0, &shelf);
	dq_require_ours(dq_table_get(relid), discard->shard_no[shard], shelf.owner_source,
					shelf.owner_place, shelf.fence.cur[0] ? shelf.fence.cur : shelf.fence.prev);
	discard->checked[shard] = true;
}

TupleTableSlot *
dq_discard_row(ResultRelInfo *rinfo, TupleTableSlot *slot, TupleTableSlot *plan)
{
	Discard    *discard = rinfo->ri_FdwState;
	TupleDesc	desc = RelationGetDescr(rinfo->ri_RelationDesc);
	HeapTupleData tuple = {0};
	Datum		datum;
	bool		isnull;
	int			shard = 0;
	DqRow		row = {0};
	MemoryContext old;

	MemoryContextReset(discard->row);
	old = MemoryContextSwitchTo(discard->row);
	datum = ExecGetJunkAttribute(plan, discard->row_attno, &isnull);
	if (isnull)
		elog(ERROR, "junk column \"%s\" is null", ROW_COLUMN);
	tuple.t_data = DatumGetHeapTupleHeader(datum);
	tuple.t_len = HeapTupleHeaderGetDatumLength(tuple.t_data);

	ExecClearTuple(slot);
	heap_deform_tuple(&tuple, desc, slot->tts_values, slot->tts_isnull);
	ExecStoreVirtualTuple(slot);
	if (discard->shard_attno != InvalidAttrNumber)
		shard = DatumGetInt32(slot->tts_values[discard->shard_attno - 1]);
	if (shard < 0 || shard >= discard->nshards)
		elog(ERROR, "there is no shard %d", shard);
	check_shard(discard, RelationGetRelid(rinfo->ri_RelationDesc), shard);

	row.seq = dq_outbox_next(&row.id);
	row.shard = discard->shard_no[shard];
	row.op = DQ_OP_DISCARD;
	row.member = DatumGetByteaPP(slot->tts_values[discard->member_attno - 1]);
	dq_outbox_insert(&row, discard->serverid);
	MemoryContextSwitchTo(old);
	return slot;
}
