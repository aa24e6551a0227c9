/*
 * ahead.c
 *	  The rows that an UPDATE or DELETE is going to write, read some way ahead of the
 *	  executor, so that their tasks are taken a page at a time and not one round trip
 *	  each. The plan below the ModifyTable node is asked for rows in the executor's
 *	  stead, however it finds them (joins, sorts, Append); then the executor gets them
 *	  one by one. Called by change.c.
 *
 *	  Nothing a row's plan depends on changes by this: rows are those of the
 *	  statement's snapshot, as if a sort stood on top.
 */
#include "postgres.h"

#include "compat.h"

#include "executor/executor.h"
#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/rel.h"

#include "fdw/modify.h"

#define PAGE_ROWS	1600
#define PAGE_BYTES	(1024 * 1024)

struct DqAhead
{
	MemoryContext context;		/* the statement's */
	MemoryContext page;			/* what is known of the page's tasks */
	MemoryContextCallback gone;
	ModifyTableState *mtstate;
	PlanState  *subplan;
	ExecProcNodeMtd original;	/* how it gives a row */
	AttrNumber	identity[DQ_IDENTITY_COLUMNS];
	AttrNumber	whole_row;		/* of UPDATE, else invalid */
	List	   *writers;		/* of DqModify, one for each queue */

	TupleTableSlot **slots;		/* PAGE_ROWS, made when needed */
	DqMember   *members;		/* of each row */
	DqModify  **owners;			/* whose it is, NULL: no queue's, or its turn is over */
	int			n;
	int			next;
	bool		ended;
};

static List *active = NIL;		/* of DqAhead */

static void
forget_ahead(void *arg)
{
	active = list_delete_ptr(active, arg);
}

/* ---- a page ------------------------------------------------------------------------ */

static DqModify *
owner_of(DqAhead *ahead, TupleTableSlot *slot)
{
	AttrNumber	attno = ahead->mtstate->mt_resultOidAttno;
	bool		isnull;
	Oid			relid;
	ListCell   *lc;

	if (!AttributeNumberIsValid(attno))
		return linitial(ahead->writers);
	relid = DatumGetObjectId(ExecGetJunkAttribute(slot, attno, &isnull));
	if (!isnull)
		foreach(lc, ahead->writers)
			if (((DqModify *) lfirst(lc))->relid == relid)
				return lfirst(lc);
	return NULL;
}

/* The slot of row i, of the kind that the plan returns. */
static TupleTableSlot *
keep_row(DqAhead *ahead, int i, TupleTableSlot *row)
{
	TupleTableSlot *slot = ahead->slots[i];

	if (slot && (slot->tts_ops != row->tts_ops ||
				 slot->tts_tupleDescriptor != row->tts_tupleDescriptor))
	{
		ExecDropSingleTupleTableSlot(slot);
		slot = NULL;
	}
	if (slot == NULL)
	{
		MemoryContext old = MemoryContextSwitchTo(ahead->context);

		slot = MakeSingleTupleTableSlot(row->tts_tupleDescriptor, row->tts_ops);
		ahead->slots[i] = slot;
		MemoryContextSwitchTo(old);
	}
	ExecCopySlot(slot, row);
	/* no page of a table stays pinned */
	ExecMaterializeSlot(slot);
	return slot;
}

/* Put back what has been taken and was not asked for. */
static void
finish_page(DqAhead *ahead)
{
	ListCell   *lc;

	foreach(lc, ahead->writers)
	{
		DqModify   *modify = lfirst(lc);
		DqMember   *members = palloc(Max(ahead->n, 1) * sizeof(DqMember));
		int			n = 0;

		for (int i = 0; i < ahead->n; i++)
			if (ahead->owners[i] == modify && !ahead->members[i].recorded)
				members[n++] = ahead->members[i];
		if (n > 0)
			dq_taker_release(modify->taker, members, n);
		pfree(members);
	}
	for (int i = 0; i < ahead->n; i++)
		ExecClearTuple(ahead->slots[i]);
	ahead->n = ahead->next = 0;
	MemoryContextReset(ahead->page);
}

static void
take_page(DqAhead *ahead)
{
	ListCell   *lc;

	if (list_length(ahead->writers) == 1)
	{
		int			n = 0;

		/* rows of other tables lie between only if there are some */
		while (n < ahead->n && ahead->owners[n])
			n++;
		if (n == ahead->n)
		{
			DqModify   *modify = linitial(ahead->writers);

			dq_taker_page(modify->taker, ahead->page);
			dq_taker_take(modify->taker, ahead->members, n, modify->ahead_of_turn);
			return;
		}
	}
	foreach(lc, ahead->writers)
	{
		DqModify   *modify = lfirst(lc);
		DqMember   *members = palloc(Max(ahead->n, 1) * sizeof(DqMember));
		int			n = 0;

		for (int i = 0; i < ahead->n; i++)
			if (ahead->owners[i] == modify)
				members[n++] = ahead->members[i];
		dq_taker_page(modify->taker, ahead->page);
		if (n > 0)
			dq_taker_take(modify->taker, members, n, modify->ahead_of_turn);
		for (int i = ahead->n - 1; i >= 0; i--)
			if (ahead->owners[i] == modify)
				ahead->members[i] = members[--n];
		pfree(members);
	}
}

static void
read_page(DqAhead *ahead)
{
	Size		bytes = 0;
	MemoryContext old;

	while (ahead->n < PAGE_ROWS && bytes < PAGE_BYTES)
	{
		TupleTableSlot *row;
		int			i = ahead->n;
		DqModify   *modify;

		CHECK_FOR_INTERRUPTS();
		row = ahead->original(ahead->subplan);
		if (TupIsNull(row))
		{
			ahead->ended = true;
			break;
		}
		row = keep_row(ahead, i, row);
		if (AttributeNumberIsValid(ahead->whole_row))
		{
			bool		isnull;
			Datum		whole = ExecGetJunkAttribute(row, ahead->whole_row, &isnull);

			if (!isnull)
				bytes += VARSIZE_ANY(DatumGetPointer(whole));
		}
		modify = owner_of(ahead, row);
		old = MemoryContextSwitchTo(ahead->page);
		if (modify && !dq_identity_read(row, ahead->identity, &ahead->members[i]))
			modify = NULL;
		MemoryContextSwitchTo(old);
		ahead->owners[i] = modify;
		ahead->n++;
	}
	if (ahead->n > 0)
		take_page(ahead);
}

/* What the executor calls instead. */
static TupleTableSlot *
next_row(PlanState *subplan)
{
	DqAhead    *ahead = NULL;
	ListCell   *lc;

	foreach(lc, active)
		if (((DqAhead *) lfirst(lc))->subplan == subplan)
			ahead = lfirst(lc);
	if (ahead == NULL)
		elog(ERROR, "no rows are read ahead of this plan");
	if (ahead->next == ahead->n)
	{
		finish_page(ahead);
		if (!ahead->ended)
			read_page(ahead);
		if (ahead->n == 0)
			return NULL;
	}
	return ahead->slots[ahead->next++];
}

/* ---- for change.c ------------------------------------------------------------------- */

/* The one of this statement, which may write to several queues. */
DqAhead *
dq_ahead_begin(ModifyTableState *mtstate, DqModify *modify)
{
	PlanState  *subplan = outerPlanState(mtstate);
	DqAhead    *ahead = NULL;
	MemoryContext old;
	ListCell   *lc;

	foreach(lc, active)
		if (((DqAhead *) lfirst(lc))->subplan == subplan)
			ahead = lfirst(lc);
	if (ahead == NULL)
	{
		MemoryContext context = AllocSetContextCreate(mtstate->ps.state->es_query_cxt,
													  "dq_bridge rows read ahead",
													  ALLOCSET_DEFAULT_SIZES);

		ahead = MemoryContextAllocZero(context, sizeof(DqAhead));
		ahead->context = context;
		ahead->page = AllocSetContextCreate(context, "dq_bridge page of tasks",
											ALLOCSET_DEFAULT_SIZES);
		ahead->mtstate = mtstate;
		ahead->subplan = subplan;
		dq_identity_find(subplan->plan->targetlist, ahead->identity);
		ahead->whole_row = ExecFindJunkAttributeInTlist(subplan->plan->targetlist, "wholerow");
		old = MemoryContextSwitchTo(context);
		ahead->slots = palloc0(PAGE_ROWS * sizeof(TupleTableSlot *));
		ahead->members = palloc(PAGE_ROWS * sizeof(DqMember));
		ahead->owners = palloc(PAGE_ROWS * sizeof(DqModify *));
		MemoryContextSwitchTo(TopMemoryContext);
		active = lappend(active, ahead);
		MemoryContextSwitchTo(old);
		ahead->gone.func = forget_ahead;
		ahead->gone.arg = ahead;
		MemoryContextRegisterResetCallback(context, &ahead->gone);
		ahead->original = subplan->ExecProcNodeReal;
		ExecSetExecProcNode(subplan, next_row);
	}
	old = MemoryContextSwitchTo(ahead->context);
	ahead->writers = lappend(ahead->writers, modify);
	MemoryContextSwitchTo(old);
	return ahead;
}

/* The task of the row that the executor has; NULL: its turn has come before. */
DqMember *
dq_ahead_member(DqAhead *ahead, DqModify *modify, TupleTableSlot *slot)
{
	int			i = ahead->next - 1;

	if (i < 0 || ahead->slots[i] != slot)
		elog(ERROR, "the executor has another row than the one read ahead for it");
	if (ahead->owners[i] != modify)
		return NULL;
	return &ahead->members[i];
}

void
dq_ahead_end(DqAhead *ahead, DqModify *modify)
{
	finish_page(ahead);
	ahead->writers = list_delete_ptr(ahead->writers, modify);
	if (ahead->writers != NIL)
		return;
	for (int i = 0; i < PAGE_ROWS; i++)
		if (ahead->slots[i])
			ExecDropSingleTupleTableSlot(ahead->slots[i]);
	MemoryContextDelete(ahead->context);
}
