/*
 * lives.c
 *	  The lives of this data directory: from one start of the server to the next. A
 *	  copied data directory shares its original's past and nothing else, so what
 *	  the original writes into a fence after the copy was made belongs to a life that
 *	  had ended here, or to one that is not known here (G12, PO 5). Within a timeline
 *	  this is what timelines are among each other. Called by the relay,
 *	  and by CREATE EXTENSION.
 *
 *	  Positions alone do not tell: a copy that has written enough is ahead of what
 *	  its original wrote. Nor do ids that change with the marks: a fence written
 *	  between the copying and the next mark carries one that the copy knows.
 */
#include "postgres.h"

#include "compat.h"
#include "outbox/outbox.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "access/xlogrecovery.h"
#include "postmaster/postmaster.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

enum
{
	Anum_lives_life = 1,
	Anum_lives_started,
	Anum_lives_tli,
	Anum_lives_lsn,
	Natts_lives = Anum_lives_lsn
};

typedef struct Life
{
	char		id[DQ_LIFE_LEN + 1];
	TimestampTz started;
	XLogRecPtr	begin;			/* end of what earlier lives can have written */
} Life;

static Life *lives = NULL;		/* of this database, in no order */
static int	nlives = 0;
static const Life *present = NULL;	/* NULL: has no row (yet) */

static void
read_lives(Relation rel)
{
	Snapshot	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	SysScanDesc scan = systable_beginscan(rel, InvalidOid, false, snapshot, 0, NULL);
	HeapTuple	tuple;
	int			max = 16;
	int			i;

	if (lives)
		pfree(lives);
	present = NULL;
	nlives = 0;
	lives = MemoryContextAlloc(TopMemoryContext, max * sizeof(Life));
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Datum		values[Natts_lives];
		bool		nulls[Natts_lives];
		Life	   *life;

		/* a life that may yet be rolled back is none */
		if (TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetRawXmin(tuple->t_data)))
			continue;
		if (nlives == max)
		{
			max *= 2;
			lives = repalloc(lives, max * sizeof(Life));
		}
		life = &lives[nlives++];
		heap_deform_tuple(tuple, RelationGetDescr(rel), values, nulls);
		strlcpy(life->id, TextDatumGetCString(values[Anum_lives_life - 1]),
				sizeof(life->id));
		life->started = DatumGetTimestampTz(values[Anum_lives_started - 1]);
		life->begin = (XLogRecPtr) DatumGetInt64(values[Anum_lives_lsn - 1]);
	}
	systable_endscan(scan);
	UnregisterSnapshot(snapshot);
	for (i = 0; i < nlives; i++)
		if (lives[i].started == PgStartTime)
			present = &lives[i];
}

/*
 * Where this life began: the end of the recovery with which it started, if there
 * was one. Without one the server had been shut down, and the life before cannot
 * have written anything since.
 */
static XLogRecPtr
life_begin(void)
{
	XLogRecPtr	end = GetXLogReplayRecPtr(NULL);

	return XLogRecPtrIsInvalid(end) ? GetXLogInsertRecPtr() : end;
}

static void
insert_life(Relation rel)
{
	Datum		values[Natts_lives];
	bool		nulls[Natts_lives] = {0};
	uint64		random;

	if (!pg_strong_random(&random, sizeof(random)))
		ereport(ERROR,
				(errcode(ERRCODE_INTERNAL_ERROR),
				 errmsg("could not generate a random number")));
	values[Anum_lives_life - 1] =
		CStringGetTextDatum(psprintf("%016llx", (unsigned long long) random));
	values[Anum_lives_started - 1] = TimestampTzGetDatum(PgStartTime);
	values[Anum_lives_tli - 1] = Int32GetDatum((int32) dq_timeline());
	values[Anum_lives_lsn - 1] = Int64GetDatum((int64) life_begin());
	dq_store_insert(rel, values, nulls);
	CommandCounterIncrement();
}

/*
 * Within a transaction. make: this one will commit, so the present life gets its
 * row if it has none. true: it got it, look again after the commit. Pages carry
 * its name only after that, and only when it is flushed, as all they build on.
 */
bool
dq_lives_look(bool make)
{
	Relation	rel;
	bool		made = false;

	if (present && present->started == PgStartTime)
		return false;
	rel = table_open(dq_extension_relation("dq_lives"), AccessShareLock);
	read_lives(rel);
	if (present == NULL && make)
	{
		/* the bridges of several servers come at once */
		LockRelationOid(RelationGetRelid(rel), ShareUpdateExclusiveLock);
		read_lives(rel);
		if (present == NULL)
		{
			insert_life(rel);
			made = true;
		}
	}
	table_close(rel, NoLock);
	return made;
}

bool
dq_life_is_known(void)
{
	return present != NULL;
}

/* Name of the present life; "-": it has none. */
const char *
dq_life(void)
{
	return present ? present->id : "-";
}

/*
 * Can what was written in that life, up to lsn, be in our own past? 0: no; 1: yes;
 * -1: it does not say (written by hand, without a worker).
 */
int
dq_life_holds(const char *id, XLogRecPtr lsn)
{
	const Life *life = NULL;
	int			i;

	if (strcmp(id, "-") == 0)
		return -1;
	for (i = 0; i < nlives; i++)
		if (strcmp(lives[i].id, id) == 0)
			life = &lives[i];
	if (life == NULL)
		return 0;
	/* it ended where the next one began */
	for (i = 0; i < nlives; i++)
		if (lives[i].started > life->started && lives[i].begin < lsn)
			return 0;
	return 1;
}
