/*
 * modify.h
 *	  What the files that write to a queue through its foreign table share. modify.c
 *	  plans and begins, insert.c offers, change.c deletes and updates, truncate.c
 *	  purges.
 */
#ifndef DQ_FDW_MODIFY_H
#define DQ_FDW_MODIFY_H

#include "fdw/fdw.h"

#include "api/api.h"
#include "nodes/execnodes.h"

#define DQ_IDENTITY_COLUMNS 4

/* Slots of the list that PlanForeignModify makes */
typedef enum DqModifyPrivate
{
	DQ_MODIFY_ATTRS,			/* integer list: columns that UPDATE sets */
	DQ_MODIFY_RETURNING			/* integer list: columns that RETURNING reads, 0 all */
} DqModifyPrivate;

/* One foreign table that a statement writes to. */
typedef struct DqModify
{
	Relation	rel;
	Oid			relid;
	CmdType		operation;
	MemoryContext row;			/* what one row needs; reset at the next one */
	int			users;			/* a row may be moved into a table that is updated */
	AttrNumber	column[DQ_NUM_COLS];
	Oid			type[DQ_NUM_COLS];
	bool		gives_ids;		/* ids and shards in the rows to insert are no mistake */
	bool		checks;			/* constraints, or the bounds of a partition */
	/* of UPDATE and DELETE */
	DqTaker    *taker;
	struct DqAhead *ahead;
	bool		ahead_of_turn;	/* removals may be recorded before it comes */
	bool		sets[DQ_NUM_COLS];	/* by UPDATE */
	DqColumns  *returning;		/* of DELETE, NULL: nothing */
} DqModify;

/* A task to offer, from a row of the table. */
typedef struct DqOffered
{
	int64		due;
	bytea	   *key;			/* NULL: keyless */
	bytea	   *payload;
	uint64		id;				/* of what was offered */
	int			shard;			/* from 0 */
} DqOffered;

/* modify.c */
extern DqQueue *dq_modify_queue(DqModify *modify);
/* Does anybody look at the row as it is stored? */
extern bool dq_modify_is_seen(const DqModify *modify, const ResultRelInfo *rinfo);
/* Put id, due instant and shard of what is stored into the row, and check it. */
extern void dq_modify_show(DqModify *modify, EState *estate, ResultRelInfo *rinfo,
						   TupleTableSlot *slot, const DqOffered *stored);
extern void dq_modify_refuse(const DqModify *modify, DqColumnRole role);

extern void dq_add_update_targets(PlannerInfo *root, Index rtindex, RangeTblEntry *rte,
								  Relation rel);
extern int	dq_is_updatable(Relation rel);
extern List *dq_plan_modify(PlannerInfo *root, ModifyTable *plan, Index relation,
							int subplan);
extern void dq_begin_modify(ModifyTableState *mtstate, ResultRelInfo *rinfo,
							List *private, int subplan, int eflags);
extern void dq_end_modify(EState *estate, ResultRelInfo *rinfo);

/* insert.c */
extern void dq_begin_insert(ModifyTableState *mtstate, ResultRelInfo *rinfo);
extern TupleTableSlot *dq_insert(EState *estate, ResultRelInfo *rinfo, TupleTableSlot *slot,
								 TupleTableSlot *plan);
extern TupleTableSlot **dq_insert_batch(EState *estate, ResultRelInfo *rinfo,
										TupleTableSlot **slots, TupleTableSlot **plans,
										int *nslots);
extern int	dq_batch_size(ResultRelInfo *rinfo);

/* change.c */
extern void dq_begin_change(ModifyTableState *mtstate, DqModify *modify, List *private);
extern TupleTableSlot *dq_delete(EState *estate, ResultRelInfo *rinfo, TupleTableSlot *slot,
								 TupleTableSlot *plan);
extern TupleTableSlot *dq_update(EState *estate, ResultRelInfo *rinfo, TupleTableSlot *slot,
								 TupleTableSlot *plan);

/* identity.c */
extern void dq_identity_find(List *targetlist, AttrNumber *attnos);
extern bool dq_identity_read(TupleTableSlot *slot, const AttrNumber *attnos,
							 DqMember *member);

/* ahead.c */
typedef struct DqAhead DqAhead;
extern DqAhead *dq_ahead_begin(ModifyTableState *mtstate, DqModify *modify);
extern DqMember *dq_ahead_member(DqAhead *ahead, DqModify *modify, TupleTableSlot *slot);
extern void dq_ahead_end(DqAhead *ahead, DqModify *modify);

/* truncate.c */
extern void dq_truncate(List *rels, DropBehavior behavior, bool restart_seqs);

#endif							/* DQ_FDW_MODIFY_H */
