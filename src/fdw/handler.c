/*
 * handler.c
 *	  Entry points of foreign-data wrapper dq_bridge: handler, validator, planning
 *	  and EXPLAIN. Nothing in here talks to Redis: planning and plain EXPLAIN work
 *	  without it.
 */
#include "postgres.h"

#define DQ_USE_EXPLAIN
#include "compat.h"

#include "access/reloptions.h"
#include "access/sysattr.h"
#include "mb/pg_wchar.h"
#include "nodes/makefuncs.h"
#include "optimizer/cost.h"
#include "optimizer/optimizer.h"
#include "optimizer/pathnode.h"
#include "optimizer/planmain.h"
#include "optimizer/restrictinfo.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"

#include "fdw/fdw.h"
#include "fdw/modify.h"
#include "queue/options.h"

PG_FUNCTION_INFO_V1(dq_fdw_handler);
PG_FUNCTION_INFO_V1(dq_fdw_validator);

/* Planner's guess while nothing is known: a page */
#define DEFAULT_TASKS	1000
/* Round trips are dear against reading a tuple */
#define STARTUP_COST	25.0
#define TASK_COST		0.02

static void
get_rel_size(PlannerInfo *root, RelOptInfo *baserel, Oid foreigntableid)
{
	if (baserel->tuples < 0)
		baserel->tuples = DEFAULT_TASKS;
	set_baserel_size_estimates(root, baserel);
}

static void
get_paths(PlannerInfo *root, RelOptInfo *baserel, Oid foreigntableid)
{
	Cost		total = STARTUP_COST + baserel->baserestrictcost.startup +
		baserel->tuples * (TASK_COST + cpu_tuple_cost +
						   baserel->baserestrictcost.per_tuple);

	add_path(baserel, (Path *)
			 dq_create_foreignscan_path(root, baserel, baserel->rows,
										STARTUP_COST, total,
										baserel->lateral_relids));
}

/*
 * Which columns are read matters: a payload that does not fit its column must
 * not disturb a query that does not look at it.
 */
static List *
attributes_read(RelOptInfo *baserel, List *clauses)
{
	Bitmapset  *attrs = NULL;
	List	   *result = NIL;
	int			bit = -1;

	pull_varattnos((Node *) baserel->reltarget->exprs, baserel->relid, &attrs);
	pull_varattnos((Node *) clauses, baserel->relid, &attrs);
	while ((bit = bms_next_member(attrs, bit)) >= 0)
		result = lappend_int(result, bit + FirstLowInvalidHeapAttributeNumber);
	bms_free(attrs);
	return result;
}

static ForeignScan *
get_plan(PlannerInfo *root, RelOptInfo *baserel, Oid foreigntableid,
		 ForeignPath *best_path, List *tlist, List *scan_clauses,
		 Plan *outer_plan)
{
	List	   *clauses = extract_actual_clauses(scan_clauses, false);

	return make_foreignscan(tlist, clauses, baserel->relid, NIL,
							list_make1(attributes_read(baserel, clauses)),
							NIL, NIL, outer_plan);
}

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

static void
explain_scan(ForeignScanState *node, ExplainState *es)
{
	DqScanCounts counts;

	if (es->verbose)
	{
		DqQueue    *queue = dq_queue_get(RelationGetRelid(node->ss.ss_currentRelation));
		List	   *names = NIL;

		for (int i = 0; i < queue->nshards; i++)
		{
			DqKeys		keys;
			DqArg	   *key = &keys.key[DQ_KEY_PENDING];

			dq_keys_make(&keys, dq_shard_name(queue->name, queue->nshards, i));
			names = lappend(names, pg_any_to_server(key->data, key->len, PG_UTF8));
		}
		ExplainPropertyList("Redis Keys", names, es);
	}
	if (es->analyze && dq_scan_counts(node, &counts))
	{
		ExplainPropertyInteger("Round Trips", NULL, counts.round_trips, es);
		ExplainPropertyInteger("Tasks from Redis", NULL, counts.from_redis, es);
		ExplainPropertyInteger("Tasks from Outbox", NULL, counts.from_outbox, es);
	}
}

Datum
dq_fdw_handler(PG_FUNCTION_ARGS)
{
	FdwRoutine *routine = makeNode(FdwRoutine);

	routine->GetForeignRelSize = get_rel_size;
	routine->GetForeignPaths = get_paths;
	routine->GetForeignPlan = get_plan;
	routine->GetForeignRowMarkType = get_row_mark_type;
	routine->ExplainForeignScan = explain_scan;

	routine->BeginForeignScan = dq_scan_begin;
	routine->IterateForeignScan = dq_scan_iterate;
	routine->ReScanForeignScan = dq_scan_rescan;
	routine->EndForeignScan = dq_scan_end;

	/* writing: modify.h */
	routine->IsForeignRelUpdatable = dq_is_updatable;
	routine->PlanForeignModify = dq_plan_modify;
	routine->BeginForeignModify = dq_begin_modify;
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
