/*
 * pushdown.c
 *	  Which conditions can Redis answer? Ranges of due_at, equality of id, key and
 *	  shard, with anything that does not depend on the queue's row and does not change
 *	  during the scan: constants, parameters, stable functions, columns of other tables.
 *	  Called by plan.c and upper.c; nothing in here talks to Redis.
 *
 *	  What is pushed stays in the local filter as well, so a condition that Redis
 *	  answers too generously does no harm; one answered too narrowly would. So an
 *	  operator is known by its place in the default btree family, never by its name,
 *	  and text is compared in Redis only where equal means equal bytes.
 */
#include "postgres.h"

#include "access/stratnum.h"
#include "catalog/pg_operator.h"
#include "catalog/pg_type.h"
#include "nodes/makefuncs.h"
#include "nodes/nodeFuncs.h"
#include "miscadmin.h"
#include "optimizer/clauses.h"
#include "optimizer/optimizer.h"
#include "utils/lsyscache.h"
#include "utils/selfuncs.h"
#include "utils/typcache.h"

#include "compat.h"
#include "fdw/pushdown.h"
#include "shared/shared.h"

/* An empty queue is not empty for long */
#define LEAST_TASKS		100

/* Number of a shard in the registry, 0: not registered. */
static int32
shard_number(List *rows, const char *name)
{
	ListCell   *lc;

	foreach(lc, rows)
	{
		DqShardRow *row = lfirst(lc);

		if (strcmp(row->name, name) == 0)
			return row->no;
	}
	return 0;
}

/* How many rows the table has: what the workers saw last, else nothing (-1). */
static double
pending_now(const DqQueue *queue)
{
	List	   *rows = queue->shard_no ? NIL : dq_shards_list(queue->serverid);
	double		tasks = 0;

	for (int i = 0; i < queue->nshards; i++)
	{
		int32		no = queue->shard_no ? queue->shard_no[i] :
			shard_number(rows, dq_shard_name(queue->name, queue->nshards, i));
		DqShardStats stats;

		if (no == 0 || !dq_stats_get(MyDatabaseId, no, &stats) || stats.seen_at == 0)
			return -1;
		if (queue->contents == DQ_CONTENTS_READY)
			tasks += stats.ready;
		else if (queue->contents == DQ_CONTENTS_QUARANTINE)
			tasks += stats.quarantined;
		else
			tasks += stats.pending + stats.held;
	}
	return Max(tasks, LEAST_TASKS);
}

DqPlanQueue *
dq_plan_queue(Oid relid)
{
	DqQueue    *queue = dq_table_get(relid);
	DqPlanQueue *result = palloc0(sizeof(DqPlanQueue));

	result->relid = relid;
	result->contents = queue->contents;
	result->nshards = queue->nshards;
	result->tasks = pending_now(queue);
	if (queue->contents != DQ_CONTENTS_PENDING)
	{
		result->column[DQ_COL_SHARD] = queue->column[DQ_COL_SHARD];
		return result;
	}
	memcpy(result->column, queue->column, sizeof(result->column));
	if (queue->column[DQ_COL_KEY] != InvalidAttrNumber)
	{
		int32		typmod = queue->key_typmod;
		Oid			type = getBaseTypeAndTypmod(queue->key_type, &typmod);

		/* varchar(n) cuts blanks, other types have several texts for one value */
		result->key_is_text = type == TEXTOID || (type == VARCHAROID && typmod < 0);
	}
	return result;
}

bool
dq_is_column(const DqPlanQueue *queue, Index relid, Node *expr, DqColumnRole role)
{
	Var		   *var;

	while (expr && IsA(expr, RelabelType))
		expr = (Node *) ((RelabelType *) expr)->arg;
	if (expr == NULL || !IsA(expr, Var))
		return false;
	var = (Var *) expr;
	return var->varno == (int) relid && var->varlevelsup == 0 &&
		var->varattno > 0 && var->varattno == queue->column[role];
}

/* It may be worked out before a row of the queue is there. */
static bool
is_value(PlannerInfo *root, Index relid, Node *expr)
{
	return !bms_is_member(relid, pull_varnos(root, expr)) &&
		!contain_volatile_functions(expr) && !contain_subplans(expr);
}

static bool
recognise_due(Oid op, Oid *type, DqQualKind *kind)
{
	TypeCacheEntry *cache = lookup_type_cache(TIMESTAMPTZOID, TYPECACHE_BTREE_OPFAMILY);
	Oid			left;
	int			strategy;

	if (get_op_opfamily_strategy(op, cache->btree_opf) == 0)
		return false;
	get_op_opfamily_properties(op, cache->btree_opf, false, &strategy, &left, type);
	if (left != TIMESTAMPTZOID ||
		(*type != TIMESTAMPTZOID && *type != TIMESTAMPOID && *type != DATEOID))
		return false;
	switch (strategy)
	{
		case BTLessStrategyNumber:
			*kind = DQ_QUAL_DUE_LT;
			return true;
		case BTLessEqualStrategyNumber:
			*kind = DQ_QUAL_DUE_LE;
			return true;
		case BTEqualStrategyNumber:
			*kind = DQ_QUAL_DUE_EQ;
			return true;
		case BTGreaterEqualStrategyNumber:
			*kind = DQ_QUAL_DUE_GE;
			return true;
		case BTGreaterStrategyNumber:
			*kind = DQ_QUAL_DUE_GT;
			return true;
	}
	return false;
}

/* column op value: which column is it, and does Redis know the operator? */
static bool
recognise_op(const DqPlanQueue *queue, Index relid, Node *column, Oid op, Oid collation,
			 DqQual *qual)
{
	if (dq_is_column(queue, relid, column, DQ_COL_DUE_AT))
		return recognise_due(op, &qual->type, &qual->kind);

	if (dq_is_column(queue, relid, column, DQ_COL_SHARD))
	{
		qual->kind = DQ_QUAL_SHARD;
		qual->type = INT4OID;
		return op == Int4EqualOperator;
	}

	if (dq_is_column(queue, relid, column, DQ_COL_ID))
		qual->kind = DQ_QUAL_ID;
	else if (queue->key_is_text && dq_is_column(queue, relid, column, DQ_COL_KEY))
		qual->kind = DQ_QUAL_KEY;
	else
		return false;
	qual->type = TEXTOID;
	return op == TextEqualOperator && OidIsValid(collation) &&
		get_collation_isdeterministic(collation);
}

static bool
recognise_opexpr(PlannerInfo *root, const DqPlanQueue *queue, Index relid, OpExpr *expr,
				 DqQual *qual)
{
	Node	   *left;
	Node	   *right;
	Oid			op = expr->opno;

	if (list_length(expr->args) != 2)
		return false;
	left = linitial(expr->args);
	right = lsecond(expr->args);
	if (is_value(root, relid, left) && !is_value(root, relid, right))
	{
		Node	   *swap = left;

		left = right;
		right = swap;
		op = get_commutator(op);
	}
	if (!OidIsValid(op) || !is_value(root, relid, right) ||
		!recognise_op(queue, relid, left, op, expr->inputcollid, qual))
		return false;
	qual->value = (Expr *) right;
	return true;
}

static bool
recognise_any(PlannerInfo *root, const DqPlanQueue *queue, Index relid,
			  ScalarArrayOpExpr *expr, DqQual *qual)
{
	Node	   *array = lsecond(expr->args);

	if (!expr->useOr || !is_value(root, relid, array) ||
		!recognise_op(queue, relid, linitial(expr->args), expr->opno, expr->inputcollid,
					  qual))
		return false;
	/* < ANY and the like have nothing to look up */
	if (qual->kind != DQ_QUAL_DUE_EQ && qual->kind != DQ_QUAL_ID &&
		qual->kind != DQ_QUAL_KEY && qual->kind != DQ_QUAL_SHARD)
		return false;
	qual->array = true;
	qual->value = (Expr *) array;
	return true;
}

bool
dq_qual_recognise(PlannerInfo *root, const DqPlanQueue *queue, Index relid, Expr *clause,
				  DqQual *qual)
{
	memset(qual, 0, sizeof(*qual));
	if (IsA(clause, OpExpr))
		return recognise_opexpr(root, queue, relid, (OpExpr *) clause, qual);
	if (IsA(clause, ScalarArrayOpExpr))
		return recognise_any(root, queue, relid, (ScalarArrayOpExpr *) clause, qual);
	if (IsA(clause, NullTest))
	{
		NullTest   *test = (NullTest *) clause;

		qual->kind = DQ_QUAL_TRUE;
		return test->nulltesttype == IS_NOT_NULL && !test->argisrow &&
			(dq_is_column(queue, relid, (Node *) test->arg, DQ_COL_DUE_AT) ||
			 dq_is_column(queue, relid, (Node *) test->arg, DQ_COL_ID) ||
			 dq_is_column(queue, relid, (Node *) test->arg, DQ_COL_SHARD));
	}
	return false;
}

double
dq_qual_values(PlannerInfo *root, const DqQual *qual)
{
	return qual->array ? Max(dq_estimate_array_length(root, (Node *) qual->value), 1) : 1;
}

void
dq_quals_plan(PlannerInfo *root, const DqPlanQueue *queue, Index relid, List *clauses,
			  bool in_filter, List **quals, List **values)
{
	ListCell   *lc;

	*quals = NIL;
	*values = NIL;
	foreach(lc, clauses)
	{
		DqQual		qual;

		if (!dq_qual_recognise(root, queue, relid, lfirst(lc), &qual) ||
			qual.kind == DQ_QUAL_TRUE)
			continue;
		*quals = lappend(*quals, list_make4_int(qual.kind, qual.array, (int) qual.type,
												in_filter ? foreach_current_index(lc) : -1));
		*values = lappend(*values, qual.value);
	}
}
