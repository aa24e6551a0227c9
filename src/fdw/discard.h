/*
 * discard.h
 *	  DELETE of what lies in quarantine, between handler.c and discard.c.
 */
#ifndef DQ_FDW_DISCARD_H
#define DQ_FDW_DISCARD_H

#include "postgres.h"

#include "nodes/execnodes.h"
#include "nodes/pathnodes.h"
#include "nodes/plannodes.h"

/* Is it such a table? */
extern bool dq_shows_quarantine(Oid relid);
extern void dq_discard_targets(PlannerInfo *root, Index rtindex, Relation rel);
extern void dq_discard_plan(PlannerInfo *root, ModifyTable *plan, Oid relid);
extern void dq_discard_begin(ModifyTableState *mtstate, ResultRelInfo *rinfo, int eflags);
/* The row of RETURNING; valid until the next one. */
extern TupleTableSlot *dq_discard_row(ResultRelInfo *rinfo, TupleTableSlot *slot,
									  TupleTableSlot *plan);

#endif							/* DQ_FDW_DISCARD_H */
