/*
 * plan.c
 *	  Planning to read a queue: how many rows, which ways, and the plan node. Called
 *	  by the planner through handler.c. Nothing in here talks to Redis: planning and
 *	  plain EXPLAIN work without it.
 *
 *	  Redis keeps tasks in the order of due_at, so that order costs nothing, forwards
 *	  or backwards. A LIMIT is not pushed: the first page is as small as it may be
 *	  enough, and the executor stops asking. So none of the reasons for which a limit
 *	  must not be pushed can do harm.
 */
#include "postgres.h"

#include <math.h>

#include "access/sysattr.h"
#include "catalog/heap.h"
#include "catalog/pg_type.h"
#include "foreign/fdwapi.h"
#include "nodes/makefuncs.h"
#include "optimizer/cost.h"
#include "optimizer/optimizer.h"
#include "optimizer/pathnode.h"
#include "optimizer/planmain.h"
#include "optimizer/restrictinfo.h"
#include "utils/lsyscache.h"
#include "utils/selfuncs.h"
#include "utils/typcache.h"

#define DQ_USE_PLANNER
#include "compat.h"
#include "fdw/pushdown.h"

#define TASK_COST		0.02	/* to fetch one */
#define PAGE_COST		10.0	/* a round trip within a scan */
#define PAGE_TASKS		1000.0
#define DEFAULT_TASKS	1000.0	/* while nothing is known: a page */
#define MOST_FIRST_PAGE	1000.0

/* Slots of ForeignPath.fdw_private */
typedef enum PathPrivate
{
	PATH_ORDER,					/* Integer: DqOrder */
	PATH_FIRST_PAGE				/* Integer */
} PathPrivate;

/* ---- size ----------------------------------------------------------------------- */

/* What a cursor has shown last is no place in a queue that could be gone back to. */
static void
refuse_current_of(Oid relid)
{
	ereport(ERROR,
			(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
			 errmsg("WHERE CURRENT OF is not supported for queue \"%s\"", get_rel_name(relid)),
			 errhint("Let the cursor read column id, and use that in the condition.")));
}

/* Which of the table's own conditions go to Redis, and do they name tasks? */
static void
sort_conditions(PlannerInfo *root, RelOptInfo *rel, Oid relid, DqPlanQueue *queue)
{
	ListCell   *lc;

	queue->all_pushed = true;
	foreach(lc, rel->baserestrictinfo)
	{
		RestrictInfo *rinfo = lfirst_node(RestrictInfo, lc);
		DqQual		qual;

		if (IsA(rinfo->clause, CurrentOfExpr))
			refuse_current_of(relid);
		if (rinfo->pseudoconstant ||
			!dq_qual_recognise(root, queue, rel->relid, rinfo->clause, &qual))
		{
			queue->all_pushed = false;
			continue;
		}
		queue->pushed = lappend(queue->pushed, rinfo);
		if (qual.kind == DQ_QUAL_ID || qual.kind == DQ_QUAL_KEY)
		{
			double		values = dq_qual_values(root, &qual);

			queue->sought = queue->lookup ? Min(queue->sought, values) : values;
			queue->lookup = true;
		}
	}
}

void
dq_get_rel_size(PlannerInfo *root, RelOptInfo *rel, Oid relid)
{
	DqPlanQueue *queue = dq_plan_queue(relid);

	rel->fdw_private = queue;
	/* what the workers have seen is younger than what ANALYZE has */
	if (queue->tasks >= 0)
		rel->tuples = queue->tasks;
	else if (rel->tuples < 0)
		rel->tuples = DEFAULT_TASKS;
	queue->tasks = rel->tuples;
	sort_conditions(root, rel, relid, queue);
	set_baserel_size_estimates(root, rel);
	/* ids and keys are unique, whatever the statistics say */
	if (queue->lookup && rel->rows > queue->sought)
		rel->rows = clamp_row_est(queue->sought);
}

/* ---- paths ------------------------------------------------------------------------ */

/* clauses: pushed conditions, those of a join included */
static void
estimate_cost(PlannerInfo *root, RelOptInfo *rel, List *clauses, bool lookup,
			  double sought, double rows, Cost *startup, Cost *total)
{
	DqPlanQueue *queue = rel->fdw_private;
	double		fetched = lookup ? Min(sought, rel->tuples) :
		rel->tuples * clauselist_selectivity(root, clauses, rel->relid, JOIN_INNER, NULL);

	fetched = Max(fetched, 1);
	*startup = DQ_STARTUP_COST + rel->baserestrictcost.startup + rel->reltarget->cost.startup;
	*total = *startup + floor(fetched / PAGE_TASKS) * PAGE_COST +
		(queue->nshards - 1) * DQ_STARTUP_COST / 5 +
		fetched * (TASK_COST + cpu_tuple_cost + rel->baserestrictcost.per_tuple) +
		rows * rel->reltarget->cost.per_tuple;
}

/*
 * How many tasks a query with LIMIT looks at, as far as it is known: when nothing else
 * can drop a row, and nothing needs all of them first. 0: not known.
 */
static int
first_page(PlannerInfo *root, RelOptInfo *rel, bool ordered)
{
	DqPlanQueue *queue = rel->fdw_private;
	/* without LIMIT, EXISTS and the like still look at one row */
	double		tasks = root->limit_tuples >= 1 ? root->limit_tuples : root->tuple_fraction;

	if (tasks < 1 || tasks > MOST_FIRST_PAGE || !queue->all_pushed || bms_membership(root->all_baserels) != BMS_SINGLETON ||
		(root->query_pathkeys != NIL && !ordered))
		return 0;
	return (int) tasks;
}

static void
add_one_path(PlannerInfo *root, RelOptInfo *rel, List *pathkeys, DqOrder order)
{
	DqPlanQueue *queue = rel->fdw_private;
	Cost		startup,
				total;

	estimate_cost(root, rel, queue->pushed, queue->lookup, queue->sought, rel->rows,
				  &startup, &total);
	/* shards are merged */
	if (order != DQ_ORDER_NONE && queue->nshards > 1)
		total += rel->rows * cpu_operator_cost * 2 * log(queue->nshards);
	add_path(rel, (Path *)
			 dq_create_foreignscan_path(root, rel, rel->rows, startup, total, pathkeys,
										rel->lateral_relids,
										list_make2(makeInteger(order),
												   makeInteger(first_page(root, rel, order != DQ_ORDER_NONE)))));
}

/* The equivalence class has due_at as a member. */
static bool
class_has_due(RelOptInfo *rel, EquivalenceClass *ec)
{
	DqPlanQueue *queue = rel->fdw_private;
	List	   *members = list_concat_copy(ec->ec_members,
										   DQ_EC_CHILD_MEMBERS(ec, rel->relid));
	ListCell   *lc;

	if (ec->ec_has_volatile)
		return false;
	foreach(lc, members)
	{
		EquivalenceMember *em = lfirst(lc);

		if (bms_equal(em->em_relids, rel->relids) &&
			dq_is_column(queue, rel->relid, (Node *) em->em_expr, DQ_COL_DUE_AT))
			return true;
	}
	return false;
}

/* due_at is never null, so where nulls would come does not matter. */
static DqOrder
order_of(RelOptInfo *rel, PathKey *key)
{
	TypeCacheEntry *cache = lookup_type_cache(TIMESTAMPTZOID, TYPECACHE_BTREE_OPFAMILY);

	if (key->pk_opfamily != cache->btree_opf || !class_has_due(rel, key->pk_eclass))
		return DQ_ORDER_NONE;
	return dq_pathkey_descends(key) ? DQ_ORDER_DESC : DQ_ORDER_ASC;
}

/*
 * Ordered as the query wants it at the end, if that begins with due_at: the planner
 * sorts the rest within equal instants. And, for merge joins, in ascending order.
 */
static void
add_ordered_paths(PlannerInfo *root, RelOptInfo *rel)
{
	TypeCacheEntry *cache = lookup_type_cache(TIMESTAMPTZOID, TYPECACHE_BTREE_OPFAMILY);
	PathKey    *wanted = NULL;
	DqOrder		order = DQ_ORDER_NONE;
	ListCell   *lc;

	if (root->query_pathkeys != NIL)
	{
		wanted = linitial_node(PathKey, root->query_pathkeys);
		order = order_of(rel, wanted);
		if (order != DQ_ORDER_NONE)
			add_one_path(root, rel, list_make1(wanted), order);
	}
	if (!rel->has_eclass_joins)
		return;
	foreach(lc, root->eq_classes)
	{
		EquivalenceClass *ec = lfirst(lc);
		PathKey    *key;

		if (!list_member_oid(ec->ec_opfamilies, cache->btree_opf) ||
			bms_membership(ec->ec_relids) != BMS_MULTIPLE || !class_has_due(rel, ec))
			continue;
		key = dq_ascending_pathkey(root, ec, cache->btree_opf);
		if (key != wanted)
			add_one_path(root, rel, list_make1(key), DQ_ORDER_ASC);
	}
}

/* ---- joins --------------------------------------------------------------------------- */

typedef struct JoinColumn
{
	DqPlanQueue *queue;
	DqColumnRole role;
} JoinColumn;

static bool
member_is_column(PlannerInfo *root, RelOptInfo *rel, EquivalenceClass *ec,
				 EquivalenceMember *em, void *arg)
{
	JoinColumn *column = arg;

	return dq_is_column(column->queue, rel->relid, (Node *) em->em_expr, column->role);
}

/* Outer rels that a path needs to have the values of these join conditions. */
static void
note_outer(PlannerInfo *root, RelOptInfo *rel, List *rinfos, List **outers)
{
	DqPlanQueue *queue = rel->fdw_private;
	ListCell   *lc;

	foreach(lc, rinfos)
	{
		RestrictInfo *rinfo = lfirst_node(RestrictInfo, lc);
		DqQual		qual;
		Relids		outer;
		ListCell   *known;

		if (!join_clause_is_movable_to(rinfo, rel) ||
			!dq_qual_recognise(root, queue, rel->relid, rinfo->clause, &qual))
			continue;
		outer = bms_union(rinfo->clause_relids, rel->lateral_relids);
		outer = bms_del_member(outer, rel->relid);
		if (bms_is_empty(outer))
			continue;
		foreach(known, *outers)
		{
			if (bms_equal(lfirst(known), outer))
				break;
		}
		if (known == NULL)
			*outers = lappend(*outers, outer);
	}
}

static void
add_join_path(PlannerInfo *root, RelOptInfo *rel, Relids outer)
{
	DqPlanQueue *queue = rel->fdw_private;
	ParamPathInfo *info = get_baserel_parampathinfo(root, rel, outer);
	List	   *pushed = list_copy(queue->pushed);
	bool		lookup = queue->lookup;
	double		sought = queue->sought;
	double		rows;
	Cost		startup,
				total;
	ListCell   *lc;

	foreach(lc, info->ppi_clauses)
	{
		RestrictInfo *rinfo = lfirst_node(RestrictInfo, lc);
		DqQual		qual;

		if (!dq_qual_recognise(root, queue, rel->relid, rinfo->clause, &qual))
			continue;
		pushed = lappend(pushed, rinfo);
		if (qual.kind == DQ_QUAL_ID || qual.kind == DQ_QUAL_KEY)
		{
			double		values = dq_qual_values(root, &qual);

			sought = lookup ? Min(sought, values) : values;
			lookup = true;
		}
	}
	rows = info->ppi_rows;
	if (lookup && rows > sought)
		rows = clamp_row_est(sought);
	estimate_cost(root, rel, pushed, lookup, sought, rows, &startup, &total);
	add_path(rel, (Path *)
			 dq_create_foreignscan_path(root, rel, rows, startup, total, NIL, outer,
										list_make2(makeInteger(DQ_ORDER_NONE),
												   makeInteger(0))));
}

static void
add_join_paths(PlannerInfo *root, RelOptInfo *rel)
{
	static const DqColumnRole roles[] = {
		DQ_COL_ID, DQ_COL_KEY, DQ_COL_DUE_AT, DQ_COL_SHARD
	};
	DqPlanQueue *queue = rel->fdw_private;
	List	   *outers = NIL;
	ListCell   *lc;

	note_outer(root, rel, rel->joininfo, &outers);
	for (int i = 0; i < lengthof(roles) && rel->has_eclass_joins; i++)
	{
		JoinColumn	column = {queue, roles[i]};

		if (queue->column[roles[i]] == InvalidAttrNumber)
			continue;
		note_outer(root, rel,
				   generate_implied_equalities_for_column(root, rel, member_is_column,
														  &column,
														  rel->lateral_referencers),
				   &outers);
	}
	foreach(lc, outers)
		add_join_path(root, rel, lfirst(lc));
}

void
dq_get_paths(PlannerInfo *root, RelOptInfo *rel, Oid relid)
{
	DqPlanQueue *queue = rel->fdw_private;

	add_one_path(root, rel, NIL, DQ_ORDER_NONE);
	if (queue->contents != DQ_CONTENTS_PENDING)
		return;
	/* what is looked up comes in no order */
	if (!queue->lookup)
		add_ordered_paths(root, rel);
	add_join_paths(root, rel);
}

/*
 * May an Append read it beside others? A scan that is begun anew for each outer row
 * would wait more than it reads, and what is looked up is one exchange.
 */
bool
dq_is_async_capable(ForeignPath *path)
{
	RelOptInfo *rel = path->path.parent;
	DqPlanQueue *queue = rel->fdw_private;

	return !IS_UPPER_REL(rel) && queue->contents == DQ_CONTENTS_PENDING &&
		!queue->lookup && path->path.param_info == NULL &&
		intVal(list_nth(path->fdw_private, PATH_ORDER)) == DQ_ORDER_NONE;
}

/* ---- plan ---------------------------------------------------------------------------- */

/*
 * Which columns are read matters: a payload that does not fit its column must
 * not disturb a query that does not look at it.
 */
static List *
attributes_read(RelOptInfo *rel, List *clauses)
{
	Bitmapset  *attrs = NULL;
	List	   *result = NIL;
	int			bit = -1;

	pull_varattnos((Node *) rel->reltarget->exprs, rel->relid, &attrs);
	pull_varattnos((Node *) clauses, rel->relid, &attrs);
	while ((bit = bms_next_member(attrs, bit)) >= 0)
		result = lappend_int(result, bit + FirstLowInvalidHeapAttributeNumber);
	bms_free(attrs);
	return result;
}

/*
 * The system columns of a task mean nothing outside UPDATE and DELETE, where they
 * carry its identity (identity.c): all rows of another query have the same ones, and
 * DELETE ... WHERE ctid IN (SELECT ctid ... LIMIT 1) would empty the queue.
 */
static void
refuse_system_columns(PlannerInfo *root, RelOptInfo *rel, Oid relid, List *clauses)
{
	Bitmapset  *attrs = NULL;
	int			attno;

	pull_varattnos((Node *) clauses, rel->relid, &attrs);
	if (!bms_is_member(rel->relid, root->all_result_relids))
		pull_varattnos((Node *) rel->reltarget->exprs, rel->relid, &attrs);
	for (attno = FirstLowInvalidHeapAttributeNumber + 1; attno < 0; attno++)
		if (attno != TableOidAttributeNumber &&
			bms_is_member(attno - FirstLowInvalidHeapAttributeNumber, attrs))
			ereport(ERROR,
					(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
					 errmsg("column \"%s\" of queue \"%s\" cannot be read",
							NameStr(SystemAttributeDefinition(attno)->attname),
							get_rel_name(relid)),
					 errhint("Column id tells tasks apart.")));
}

ForeignScan *
dq_get_plan(PlannerInfo *root, RelOptInfo *rel, Oid relid, ForeignPath *path, List *tlist,
			List *scan_clauses, Plan *outer_plan)
{
	List	   *clauses;
	List	   *quals;
	List	   *values;
	List	   *private;

	if (IS_UPPER_REL(rel))
		return dq_get_upper_plan(root, rel, path, tlist);

	clauses = extract_actual_clauses(scan_clauses, false);
	refuse_system_columns(root, rel, relid, clauses);
	dq_quals_plan(root, rel->fdw_private, rel->relid, clauses, true, &quals, &values);
	private = list_make5(list_make1_oid(relid), attributes_read(rel, clauses), quals,
						 list_nth(path->fdw_private, PATH_ORDER),
						 list_nth(path->fdw_private, PATH_FIRST_PAGE));
	private = lappend(private, NIL);	/* no aggregates ... */
	private = lappend(private, NIL);	/* ... and no text of them */
	private = lappend(private, makeInteger(((DqPlanQueue *) rel->fdw_private)->contents));
	return make_foreignscan(tlist, clauses, rel->relid, values, private, NIL, NIL,
							outer_plan);
}
