/*
 * identity.c
 *	  Where a row's task is, so that UPDATE and DELETE find it again, also in a table
 *	  without column id: in the four system columns ctid, xmin, xmax and cmin, which a
 *	  queue has no other use for. 144 bits hold the due instant (48), the id (64), the
 *	  shard and two flags. A task of another form (a longer id, a due instant that is
 *	  no whole millisecond) is kept aside, and the columns hold its number. The scan
 *	  stores, ahead.c reads.
 */
#include "postgres.h"

#include "compat.h"

#include "access/htup_details.h"
#include "access/sysattr.h"
#include "catalog/pg_type.h"
#include "executor/executor.h"
#include "nodes/makefuncs.h"
#include "optimizer/appendinfo.h"
#include "storage/itemptr.h"
#include "utils/memutils.h"

#include "fdw/modify.h"

/* in cmin */
#define IS_UNSENT	0x1
#define IS_ASIDE	0x2
#define SHARD_SHIFT	8

#define MAX_DUE		((double) ((INT64CONST(1) << 48) - 1))

static const struct
{
	AttrNumber	attno;
	Oid			type;
	const char *name;			/* of the junk column */
}			columns[DQ_IDENTITY_COLUMNS] = {
	{SelfItemPointerAttributeNumber, TIDOID, "dq_ctid"},
	{MinTransactionIdAttributeNumber, XIDOID, "dq_xmin"},
	{MaxTransactionIdAttributeNumber, XIDOID, "dq_xmax"},
	{MinCommandIdAttributeNumber, CIDOID, "dq_cmin"},
};

/* Tasks of another form that a scan has shown. */
typedef struct Aside
{
	double		score;
	bool		old;
	unsigned char idlen;
	char		id[FLEXIBLE_ARRAY_MEMBER];
} Aside;

struct DqIdentities
{
	MemoryContext context;
	MemoryContextCallback gone;
	uint32		number;			/* of this table, in xmax */
	Aside	  **tasks;			/* NULL: its turn has come */
	uint32		ntasks;
	uint32		maxtasks;
};

static List *tables = NIL;		/* of DqIdentities */
static uint32 last_table = 0;

void
dq_add_update_targets(PlannerInfo *root, Index rtindex, RangeTblEntry *rte, Relation rel)
{
	for (int i = 0; i < DQ_IDENTITY_COLUMNS; i++)
		add_row_identity_var(root, makeVar(rtindex, columns[i].attno, columns[i].type, -1,
										   InvalidOid, 0),
							 rtindex, columns[i].name);
}

void
dq_identity_find(List *targetlist, AttrNumber *attnos)
{
	for (int i = 0; i < DQ_IDENTITY_COLUMNS; i++)
		attnos[i] = ExecFindJunkAttributeInTlist(targetlist, columns[i].name);
}

/* ---- those kept aside ------------------------------------------------------------- */

static void
forget_table(void *arg)
{
	tables = list_delete_ptr(tables, arg);
}

DqIdentities *
dq_identities_create(MemoryContext context)
{
	DqIdentities *identities = MemoryContextAllocZero(context, sizeof(DqIdentities));
	MemoryContext old = MemoryContextSwitchTo(TopMemoryContext);

	identities->context = context;
	identities->number = ++last_table;
	tables = lappend(tables, identities);
	MemoryContextSwitchTo(old);
	identities->gone.func = forget_table;
	identities->gone.arg = identities;
	MemoryContextRegisterResetCallback(context, &identities->gone);
	return identities;
}

static uint32
put_aside(DqIdentities *identities, const DqTask *task)
{
	Aside	   *aside = MemoryContextAlloc(identities->context,
										   offsetof(Aside, id) + task->idlen);

	aside->score = task->score;
	aside->old = task->old;
	aside->idlen = task->idlen;
	memcpy(aside->id, task->idbytes, task->idlen);
	if (identities->ntasks == identities->maxtasks)
	{
		identities->maxtasks = Max(2 * identities->maxtasks, 64);
		identities->tasks = identities->tasks
			? repalloc_huge(identities->tasks, identities->maxtasks * sizeof(Aside *))
			: MemoryContextAlloc(identities->context, identities->maxtasks * sizeof(Aside *));
	}
	identities->tasks[identities->ntasks] = aside;
	return identities->ntasks++;
}

/* ---- rows ---------------------------------------------------------------------------- */

/*
 * Make the values in the slot a row that carries the identity. In the current memory
 * context.
 */
static void
store(TupleTableSlot *slot, uint64 due, uint32 high, uint32 low, uint32 rest)
{
	HeapTuple	tuple = heap_form_tuple(slot->tts_tupleDescriptor, slot->tts_values,
										slot->tts_isnull);

	DqTupleIsNoDatum(tuple->t_data);
	BlockIdSet(&tuple->t_self.ip_blkid, (BlockNumber) (due >> 16));
	tuple->t_self.ip_posid = (OffsetNumber) (due & 0xffff);
	HeapTupleHeaderSetXmin(tuple->t_data, (TransactionId) high);
	HeapTupleHeaderSetXmax(tuple->t_data, (TransactionId) low);
	HeapTupleHeaderSetCmin(tuple->t_data, (CommandId) rest);
	ExecStoreHeapTuple(tuple, slot, false);
}

static uint64
id_number(const char *idbytes)
{
	uint64		id = 0;

	for (int i = 0; i < 8; i++)
		id = (id << 8) | (unsigned char) idbytes[i];
	return id;
}

void
dq_identity_store_task(DqIdentities *identities, TupleTableSlot *slot, int shard,
					   const DqTask *task)
{
	uint32		rest = (uint32) shard << SHARD_SHIFT;

	if (task->idlen == 8 && !task->old && task->score >= 0 &&
		task->score <= MAX_DUE && task->score == (double) (uint64) task->score)
	{
		uint64		id = id_number(task->idbytes);

		store(slot, (uint64) task->score, (uint32) (id >> 32), (uint32) id, rest);
	}
	else
		store(slot, 1, put_aside(identities, task), identities->number, rest | IS_ASIDE);
}

void
dq_identity_store_row(TupleTableSlot *slot, int shard, const DqRow *row)
{
	store(slot, (uint64) row->due, (uint32) (row->id >> 32), (uint32) row->id,
		  (uint32) shard << SHARD_SHIFT | IS_UNSENT);
}

/* ---- reading -------------------------------------------------------------------------- */

static Aside *
take_aside(uint32 table, uint32 index)
{
	ListCell   *lc;

	foreach(lc, tables)
	{
		DqIdentities *identities = lfirst(lc);

		if (identities->number == table && index < identities->ntasks)
		{
			Aside	   *aside = identities->tasks[index];

			/* a second row of the same task, by a join: its turn has come before */
			identities->tasks[index] = NULL;
			return aside;
		}
	}
	elog(ERROR, "the scan that has shown a task is gone");
	return NULL;
}

/*
 * false: not a row of a queue, or one whose turn has come before. What member points
 * to is allocated in the current memory context.
 */
bool
dq_identity_read(TupleTableSlot *slot, const AttrNumber *attnos, DqMember *member)
{
	Datum		value[DQ_IDENTITY_COLUMNS];
	ItemPointer tid;
	uint64		due;
	uint32		high,
				low,
				rest;
	char	   *id;

	for (int i = 0; i < DQ_IDENTITY_COLUMNS; i++)
	{
		bool		isnull;

		value[i] = ExecGetJunkAttribute(slot, attnos[i], &isnull);
		if (isnull)
			return false;
	}
	tid = (ItemPointer) DatumGetPointer(value[0]);
	due = ((uint64) BlockIdGetBlockNumber(&tid->ip_blkid) << 16) | tid->ip_posid;
	high = DatumGetTransactionId(value[1]);
	low = DatumGetTransactionId(value[2]);
	rest = DatumGetCommandId(value[3]);

	memset(member, 0, sizeof(*member));
	member->shard = rest >> SHARD_SHIFT;
	member->unsent = (rest & IS_UNSENT) != 0;
	if (rest & IS_ASIDE)
	{
		Aside	   *aside = take_aside(low, high);

		if (aside == NULL)
			return false;
		member->take.score = aside->score;
		member->take.old = aside->old;
		member->take.idlen = aside->idlen;
		id = palloc(Max(aside->idlen, 1));
		memcpy(id, aside->id, aside->idlen);
		pfree(aside);
	}
	else
	{
		uint64		number = (uint64) high << 32 | low;

		id = palloc(8);
		for (int i = 0; i < 8; i++)
			id[i] = (char) (number >> (8 * (7 - i)));
		member->take.score = (double) due;
		member->take.idlen = 8;
	}
	member->take.id = id;
	return true;
}
