/*
 * handler.c
 *	  Entry points of foreign-data wrapper dq_bridge: handler and validator.
 */
#include "postgres.h"

#include "access/reloptions.h"
#include "parser/parsetree.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"

#include "fdw/discard.h"
#include "fdw/modify.h"
#include "fdw/pushdown.h"
#include "queue/options.h"

PG_FUNCTION_INFO_V1(dq_fdw_handler);
PG_FUNCTION_INFO_V1(dq_fdw_validator);

/*
 * Rows of a queue cannot be locked by reading them: say so instead of letting
 * the caller believe in a lock.
 */
static RowMarkType
get_row_mark_type(RangeTblEntry *rte, LockClauseStrength strength)
{
	if (strength != LCS_NONE)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("tasks of queue \"%s\" cannot be locked with SELECT ... FOR UPDATE or FOR SHARE",
						get_rel_name(rte->relid)),
				 errhint("Remove or reschedule the task in the transaction instead.")));
	return ROW_MARK_COPY;
}

/* ---- writing: rows of the quarantine are deleted in a way of their own ------------- */

static int
is_updatable(Relation rel)
{
	switch (dq_table_get(RelationGetRelid(rel))->contents)
	{
		case DQ_CONTENTS_PENDING:
			return dq_is_updatable(rel);
		case DQ_CONTENTS_QUARANTINE:
			return 1 << CMD_DELETE;
		default:
			return 0;
	}
}

static void
add_update_targets(PlannerInfo *root, Index rtindex, RangeTblEntry *rte, Relation rel)
{
	if (dq_shows_quarantine(RelationGetRelid(rel)))
		dq_discard_targets(root, rtindex, rel);
	else
		dq_add_update_targets(root, rtindex, rte, rel);
}

static List *
plan_modify(PlannerInfo *root, ModifyTable *plan, Index relation, int subplan)
{
	Oid			relid = planner_rt_fetch(relation, root)->relid;

	if (!dq_shows_quarantine(relid))
		return dq_plan_modify(root, plan, relation, subplan);
	dq_discard_plan(root, plan, relid);
	return NIL;
}

static void
begin_modify(ModifyTableState *mtstate, ResultRelInfo *rinfo, List *private, int subplan,
			 int eflags)
{
	if (dq_shows_quarantine(RelationGetRelid(rinfo->ri_RelationDesc)))
		dq_discard_begin(mtstate, rinfo, eflags);
	else
		dq_begin_modify(mtstate, rinfo, private, subplan, eflags);
}

static TupleTableSlot *
exec_delete(EState *estate, ResultRelInfo *rinfo, TupleTableSlot *slot, TupleTableSlot *plan)
{
	if (dq_shows_quarantine(RelationGetRelid(rinfo->ri_RelationDesc)))
		return dq_discard_row(rinfo, slot, plan);
	return dq_delete(estate, rinfo, slot, plan);
}

static void
end_modify(EState *estate, ResultRelInfo *rinfo)
{
	/* what discard.c has goes with the query's memory */
	if (!dq_shows_quarantine(RelationGetRelid(rinfo->ri_RelationDesc)))
		dq_end_modify(estate, rinfo);
}

Datum
dq_fdw_handler(PG_FUNCTION_ARGS)
{
	FdwRoutine *routine = makeNode(FdwRoutine);

	routine->GetForeignRelSize = dq_get_rel_size;
	routine->GetForeignPaths = dq_get_paths;
	routine->GetForeignUpperPaths = dq_get_upper_paths;
	routine->GetForeignPlan = dq_get_plan;
	routine->GetForeignRowMarkType = get_row_mark_type;
	routine->AnalyzeForeignTable = dq_analyze;
	routine->ImportForeignSchema = dq_import;
	routine->ExplainForeignScan = dq_explain_scan;

	routine->BeginForeignScan = dq_scan_begin;
	routine->IterateForeignScan = dq_scan_iterate;
	routine->ReScanForeignScan = dq_scan_rescan;
	routine->EndForeignScan = dq_scan_end;

	/* no ForeignAsyncNotify: scans register no event, see async.c */
	routine->IsForeignPathAsyncCapable = dq_is_async_capable;
	routine->ForeignAsyncRequest = dq_async_request;
	routine->ForeignAsyncConfigureWait = dq_async_configure_wait;

	/* writing: modify.h */
	routine->IsForeignRelUpdatable = is_updatable;
	routine->PlanForeignModify = plan_modify;
	routine->AddForeignUpdateTargets = add_update_targets;
	routine->BeginForeignModify = begin_modify;
	routine->ExecForeignDelete = exec_delete;
	routine->ExecForeignUpdate = dq_update;
	routine->ExecForeignInsert = dq_insert;
	routine->ExecForeignBatchInsert = dq_insert_batch;
	routine->GetForeignModifyBatchSize = dq_batch_size;
	routine->EndForeignModify = end_modify;
	routine->BeginForeignInsert = dq_begin_insert;
	routine->EndForeignInsert = dq_end_modify;
	routine->ExecForeignTruncate = dq_truncate;

	PG_RETURN_POINTER(routine);
}

Datum
dq_fdw_validator(PG_FUNCTION_ARGS)
{
	dq_options_check(untransformRelOptions(PG_GETARG_DATUM(0)), PG_GETARG_OID(1));
	PG_RETURN_VOID();
}
