/*
 * handler.c
 *	  Entry points of foreign-data wrapper dq_bridge: handler and validator.
 */
#include "postgres.h"

#include "access/reloptions.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"

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

	/* writing: modify.h */
	routine->IsForeignRelUpdatable = dq_is_updatable;
	routine->PlanForeignModify = dq_plan_modify;
	routine->AddForeignUpdateTargets = dq_add_update_targets;
	routine->BeginForeignModify = dq_begin_modify;
	routine->ExecForeignDelete = dq_delete;
	routine->ExecForeignUpdate = dq_update;
	routine->ExecForeignInsert = dq_insert;
	routine->ExecForeignBatchInsert = dq_insert_batch;
	routine->GetForeignModifyBatchSize = dq_batch_size;
	routine->EndForeignModify = dq_end_modify;
	routine->BeginForeignInsert = dq_begin_insert;
	routine->EndForeignInsert = dq_end_modify;

	PG_RETURN_POINTER(routine);
}

Datum
dq_fdw_validator(PG_FUNCTION_ARGS)
{
	dq_options_check(untransformRelOptions(PG_GETARG_DATUM(0)), PG_GETARG_OID(1));
	PG_RETURN_VOID();
}
