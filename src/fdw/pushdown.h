/*
 * pushdown.h
 *	  Conditions that Redis can answer, from the planner to the executor:
 *	  pushdown.c recognises them, plan.c and upper.c make plans of them, bounds.c works
 *	  out their values.
 */
#ifndef DQ_FDW_PUSHDOWN_H
#define DQ_FDW_PUSHDOWN_H

#include "fdw/fdw.h"

#include "executor/execdesc.h"
#include "foreign/fdwapi.h"
#include "nodes/pathnodes.h"

typedef enum DqQualKind
{
	DQ_QUAL_DUE_LT,
	DQ_QUAL_DUE_LE,
	DQ_QUAL_DUE_EQ,
	DQ_QUAL_DUE_GE,
	DQ_QUAL_DUE_GT,
	DQ_QUAL_ID,					/* = */
	DQ_QUAL_KEY,				/* = */
	DQ_QUAL_SHARD,				/* = */
	DQ_QUAL_TRUE				/* a column that is never null is not null */
} DqQualKind;

/* column operator value, or column = ANY (value) */
typedef struct DqQual
{
	DqQualKind	kind;
	bool		array;			/* value is an array: ANY */
	Oid			type;			/* of the value, or of its elements */
	Expr	   *value;			/* knows nothing of the queue's row; NULL for TRUE */
} DqQual;

/* Slots of ForeignScan.fdw_private; fdw_exprs has the values of the pushed ones */
typedef enum DqScanPrivate
{
	DQ_SCAN_RELID,				/* oid list: the foreign table */
	DQ_SCAN_ATTRS,				/* integer list: attribute numbers that are read,
								 * 0 stands for the whole row */
	DQ_SCAN_QUALS,				/* one list of integers for each value: kind, array,
								 * type, place in the plan's filter (-1: not there) */
	DQ_SCAN_ORDER,				/* Integer: DqOrder */
	DQ_SCAN_FIRST_PAGE,			/* Integer: tasks, 0: not known */
	DQ_SCAN_AGGREGATES,			/* integer list: DqAggregate of each result column;
								 * NIL: rows are wanted */
	DQ_SCAN_TEXT,				/* String: the pushed conditions, of aggregates */
	DQ_SCAN_CONTENTS			/* Integer: DqContents */
} DqScanPrivate;

typedef enum DqAggregate
{
	DQ_AGG_COUNT,
	DQ_AGG_MIN,
	DQ_AGG_MAX
} DqAggregate;

/* ---- pushdown.c ------------------------------------------------------------- */

/* What the planner must know of a queue */
typedef struct DqPlanQueue
{
	Oid			relid;
	DqContents	contents;
	AttrNumber	column[DQ_NUM_COLS];	/* those that conditions may name */
	bool		key_is_text;	/* equal keys are equal bytes */
	int			nshards;
	double		tasks;			/* pending, an estimate */

	List	   *pushed;			/* RestrictInfos among the table's own */
	bool		all_pushed;		/* no other ones */
	bool		lookup;			/* by id or key */
	double		sought;			/* ... at most so many */
} DqPlanQueue;

extern DqPlanQueue *dq_plan_queue(Oid relid);
/* Can Redis answer the condition? */
extern bool dq_qual_recognise(PlannerInfo *root, const DqPlanQueue *queue, Index relid,
							  Expr *clause, DqQual *qual);
/* Is it the column of that role? */
extern bool dq_is_column(const DqPlanQueue *queue, Index relid, Node *expr,
						 DqColumnRole role);
/* How many values does it compare with, about? */
extern double dq_qual_values(PlannerInfo *root, const DqQual *qual);
/* What goes into DQ_SCAN_QUALS and fdw_exprs for the conditions in a list. */
extern void dq_quals_plan(PlannerInfo *root, const DqPlanQueue *queue, Index relid,
						  List *clauses, bool in_filter, List **quals, List **values);

/* ---- plan.c ------------------------------------------------------------------- */

extern void dq_get_rel_size(PlannerInfo *root, RelOptInfo *rel, Oid relid);
extern void dq_get_paths(PlannerInfo *root, RelOptInfo *rel, Oid relid);
extern bool dq_is_async_capable(ForeignPath *path);
extern ForeignScan *dq_get_plan(PlannerInfo *root, RelOptInfo *rel, Oid relid,
								ForeignPath *path, List *tlist, List *scan_clauses,
								Plan *outer_plan);
#define DQ_STARTUP_COST		25.0	/* a round trip is dear against reading a tuple */

/* ---- upper.c ------------------------------------------------------------------- */

extern void dq_get_upper_paths(PlannerInfo *root, UpperRelationKind stage,
							   RelOptInfo *input, RelOptInfo *output, void *extra);
extern ForeignScan *dq_get_upper_plan(PlannerInfo *root, RelOptInfo *rel,
									  ForeignPath *path, List *tlist);

/* ---- bounds.c -------------------------------------------------------------------- */

/* What to ask Redis for */
typedef struct DqBounds
{
	bool		nothing;		/* no row can fit */
	DqDueRange *ranges;			/* the earliest first, not overlapping */
	int			nranges;
	bool		lookup;			/* ask for these instead: */
	DqSought   *sought;			/* sorted, no two alike */
	int			nsought;
	List	   *odd;			/* ... and ids (DqDueRange *) that are no places in
								 * Redis's order: read their ranges */
	bool	   *shards;			/* nshards flags, NULL: all */
} DqBounds;

/* values: ExprStates of fdw_exprs. Result in the current memory context. */
extern void dq_bounds_eval(List *quals, List *values, ExprContext *econtext, int nshards,
						   DqBounds *bounds);
extern bool dq_due_in_ranges(const DqDueRange *ranges, int nranges, int64 due);

/* ---- lookup.c ---------------------------------------------------------------------- */

/* Tasks by id and key, shard after shard */
typedef struct DqFinder DqFinder;

extern DqFinder *dq_finder_make(DqReading *reading, DqStream *stream,
								const DqBounds *bounds);
extern bool dq_finder_next(DqFinder *finder, DqItem *item);

/* ---- contents.c: tables that show no pending tasks -------------------------------- */

extern void dq_shelf_begin(ForeignScanState *node, const DqQueue *queue);
extern TupleTableSlot *dq_shelf_iterate(ForeignScanState *node);
extern void dq_shelf_rescan(ForeignScanState *node);
extern void dq_shelf_end(ForeignScanState *node);

/* ---- aggregate.c --------------------------------------------------------------------- */

typedef struct DqTotals
{
	int64		tasks;
	int64		first;			/* due of the earliest and the latest, if any */
	int64		last;
} DqTotals;

/* Add what a shard has within the bounds. */
extern void dq_totals_add(DqReading *reading, DqStream *stream, const DqBounds *bounds,
						  DqTotals *totals);

/* ---- analyze.c, import.c --------------------------------------------------------------- */

extern bool dq_analyze(Relation rel, AcquireSampleRowsFunc *func, BlockNumber *pages);
extern List *dq_import(ImportForeignSchemaStmt *statement, Oid serverid);

/* ---- explain.c ------------------------------------------------------------------------ */

extern void dq_explain_scan(ForeignScanState *node, struct ExplainState *es);

#endif							/* DQ_FDW_PUSHDOWN_H */
