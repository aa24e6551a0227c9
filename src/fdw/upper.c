/*
 * upper.c
 *	  Planning of aggregates that Redis can answer without giving out tasks: count(*)
 *	  (or of a column that is never null), min(due_at) and max(due_at), of a whole queue
 *	  or of ranges of due_at. Called by the planner through handler.c, run by
 *	  aggregate.c.
 *
 *	  Only where every condition is exactly one that Redis answers. Whether it may
 *	  answer alone is not known before the query runs: what is on its way to Redis
 *	  has to be counted in.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "nodes/makefuncs.h"
#include "nodes/nodeFuncs.h"
#include "optimizer/cost.h"
#include "optimizer/optimizer.h"
#include "optimizer/pathnode.h"
#include "optimizer/planmain.h"
#include "optimizer/restrictinfo.h"
#include "optimizer/tlist.h"
#include "parser/parsetree.h"
#include "rewrite/rewriteManip.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/ruleutils.h"

#include "compat.h"
#include "fdw/pushdown.h"

/* Slots of the upper path's fdw_private: those of the plan, but for aggregates, ... */
typedef enum UpperPrivate
{
	UPPER_RELID,				/* oid list */
	UPPER_QUALS,
	UPPER_AGGREGATES,			/* integer list */
	UPPER_TEXT,					/* String or NULL */
	UPPER_TLIST,				/* ... and fdw_scan_tlist */
	UPPER_VALUES,				/* ... and fdw_exprs */
	UPPER_CONTENTS
} UpperPrivate;

static bool
never_null(const DqPlanQueue *queue, Index relid, Node *arg)
{
	if (IsA(arg, Const))
		return !((Const *) arg)->constisnull;
	return dq_is_column(queue, relid, arg, DQ_COL_DUE_AT) ||
		dq_is_column(queue, relid, arg, DQ_COL_ID) ||
		dq_is_column(queue, relid, arg, DQ_COL_SHARD);
}

static bool
recognise(const DqPlanQueue *queue, Index relid, Aggref *agg, DqAggregate *kind)
{
	Node	   *arg = agg->args == NIL ? NULL :
		(Node *) linitial_node(TargetEntry, agg->args)->expr;

	if (agg->aggdistinct != NIL || agg->aggorder != NIL || agg->aggfilter != NULL ||
		agg->agglevelsup != 0 || agg->aggsplit != AGGSPLIT_SIMPLE || agg->aggvariadic)
		return false;
	switch (agg->aggfnoid)
	{
		case F_COUNT_:
			*kind = DQ_AGG_COUNT;
			return true;
		case F_COUNT_ANY:
			*kind = DQ_AGG_COUNT;
			return arg && never_null(queue, relid, arg);
		case F_MIN_TIMESTAMPTZ:
			*kind = DQ_AGG_MIN;
			return arg && IsA(arg, Var) &&
				dq_is_column(queue, relid, arg, DQ_COL_DUE_AT);
		case F_MAX_TIMESTAMPTZ:
			*kind = DQ_AGG_MAX;
			return arg && IsA(arg, Var) &&
				dq_is_column(queue, relid, arg, DQ_COL_DUE_AT);
	}
	return false;
}

/* Everything that the target list needs of the queue, as aggregates we know. */
static bool
collect(const DqPlanQueue *queue, Index relid, PathTarget *target, List **tlist,
		List **aggregates)
{
	ListCell   *lc;

	foreach(lc, target->exprs)
	{
		List	   *parts = pull_var_clause(lfirst(lc), PVC_INCLUDE_AGGREGATES |
											PVC_RECURSE_WINDOWFUNCS |
											PVC_INCLUDE_PLACEHOLDERS);
		ListCell   *part;

		foreach(part, parts)
		{
			DqAggregate kind;

			if (!IsA(lfirst(part), Aggref) ||
				!recognise(queue, relid, lfirst(part), &kind))
				return false;
			if (tlist_member(lfirst(part), *tlist))
				continue;
			*tlist = lappend(*tlist, makeTargetEntry(copyObject(lfirst(part)),
													 list_length(*tlist) + 1, NULL, false));
			*aggregates = lappend_int(*aggregates, kind);
		}
	}
	return *tlist != NIL;
}

/*
 * ruleutils looks for what sets an executor's parameter in the plan around it, and
 * there is none yet. Those of the client are shown as $n, and need no plan.
 */
static Node *
without_plan(Node *node, void *context)
{
	if (node && IsA(node, Param) && ((Param *) node)->paramkind == PARAM_EXEC)
	{
		Param	   *param = copyObject((Param *) node);

		param->paramkind = PARAM_EXTERN;
		return (Node *) param;
	}
	return expression_tree_mutator(node, without_plan, context);
}

/* The conditions as EXPLAIN shows them; when it runs they are in no part of the plan. */
static Node *
conditions_text(PlannerInfo *root, RelOptInfo *rel, List *clauses)
{
	RangeTblEntry *rte = planner_rt_fetch(rel->relid, root);
	Node	   *all;

	if (clauses == NIL)
		return NULL;
	all = without_plan((Node *) copyObject(make_ands_explicit(clauses)), NULL);
	ChangeVarNodes(all, rel->relid, 1, 0);
	return (Node *) makeString(deparse_expression(all,
												  deparse_context_for(get_rel_name(rte->relid),
																	  rte->relid),
												  false, false));
}

void
dq_get_upper_paths(PlannerInfo *root, UpperRelationKind stage, RelOptInfo *input,
				   RelOptInfo *output, void *extra)
{
	DqPlanQueue *queue = input->fdw_private;
	Query	   *parse = root->parse;
	PathTarget *target = root->upper_targets[UPPERREL_GROUP_AGG];
	List	   *clauses = NIL;
	List	   *tlist = NIL;
	List	   *aggregates = NIL;
	List	   *quals;
	List	   *values;
	List	   *private;
	ListCell   *lc;

	/* of the quarantine some may be discarded, and not be gone yet */
	if (stage != UPPERREL_GROUP_AGG || queue == NULL ||
		queue->contents == DQ_CONTENTS_QUARANTINE ||
		input->reloptkind != RELOPT_BASEREL || !parse->hasAggs ||
		parse->groupClause != NIL || parse->groupingSets != NIL ||
		parse->havingQual != NULL || root->hasHavingQual || parse->hasTargetSRFs ||
		!queue->all_pushed || queue->lookup || !bms_is_empty(input->lateral_relids) ||
		!collect(queue, input->relid, target, &tlist, &aggregates))
		return;

	foreach(lc, queue->pushed)
	{
		DqQual		qual;
		RestrictInfo *rinfo = lfirst_node(RestrictInfo, lc);

		if (dq_qual_recognise(root, queue, input->relid, rinfo->clause, &qual) &&
			qual.kind != DQ_QUAL_TRUE)
			clauses = lappend(clauses, rinfo->clause);
	}
	dq_quals_plan(root, queue, input->relid, clauses, false, &quals, &values);
	private = list_make5(list_make1_oid(queue->relid), quals, aggregates,
						 conditions_text(root, input, clauses), tlist);
	private = lappend(private, values);
	private = lappend(private, makeInteger(queue->contents));
	add_path(output, (Path *)
			 dq_create_foreign_upper_path(root, output, target, 1, DQ_STARTUP_COST,
										  DQ_STARTUP_COST * (1 + 0.2 * (queue->nshards - 1)) +
										  cpu_tuple_cost + target->cost.startup +
										  target->cost.per_tuple,
										  private));
}

ForeignScan *
dq_get_upper_plan(PlannerInfo *root, RelOptInfo *rel, ForeignPath *path, List *tlist)
{
	List	   *from = path->fdw_private;
	List	   *private = list_make5(list_nth(from, UPPER_RELID), NIL,
									 list_nth(from, UPPER_QUALS),
									 makeInteger(DQ_ORDER_NONE), makeInteger(0));

	private = lappend(private, list_nth(from, UPPER_AGGREGATES));
	private = lappend(private, list_nth(from, UPPER_TEXT));
	private = lappend(private, list_nth(from, UPPER_CONTENTS));
	return make_foreignscan(tlist, NIL, 0, list_nth(from, UPPER_VALUES), private,
							list_nth(from, UPPER_TLIST), NIL, NULL);
}
