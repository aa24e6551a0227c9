/*
 * fdw.h
 *	  The foreign-data wrapper: a queue read as a table. handler.c plans and
 *	  explains, scan.c runs, columns.c makes rows, unsent.c and effect.c know what
 *	  has been committed (or done by this transaction) and is not in Redis yet. May call the api, outbox and
 *	  queue rooms.
 */
#ifndef DQ_FDW_H
#define DQ_FDW_H

#include "postgres.h"

#include "foreign/fdwapi.h"
#include "utils/snapshot.h"

#include "outbox/outbox.h"
#include "queue/queue.h"

/* ---- handler.c -------------------------------------------------------------- */

/* Slots of ForeignScan.fdw_private */
typedef enum DqScanPrivate
{
	DQ_SCAN_ATTRS				/* integer list: attribute numbers that are read,
								 * 0 stands for the whole row */
} DqScanPrivate;

/* ---- columns.c ---------------------------------------------------------------- */

typedef struct DqColumns DqColumns;

/* attrs: as in DQ_SCAN_ATTRS; everything in the current memory context */
extern DqColumns *dq_columns_describe(const DqQueue *queue, TupleDesc desc, List *attrs);
extern bool dq_columns_read_key(const DqColumns *columns);
/* Convert payload and key late where the filter does not read them; true: some. */
extern bool dq_columns_defer(DqColumns *columns, Bitmapset *filter_attrs);
typedef enum DqStorePart
{
	DQ_STORE_ALL,
	DQ_STORE_EARLY,				/* what the filter may read */
	DQ_STORE_LATE				/* the rest of the same row */
} DqStorePart;
/*
 * Fill a virtual slot's values, in the current memory context. A payload or key
 * that its column cannot hold raises the type's error (22P02, 22021, ...) naming
 * the task; only columns the query reads are converted.
 */
extern void dq_columns_store_task(DqColumns *columns, TupleTableSlot *slot, int shard,
								  const DqTask *found, DqStorePart part);
extern void dq_columns_store_row(DqColumns *columns, TupleTableSlot *slot, int shard,
								 const DqRow *row, DqStorePart part);

/* ---- identity.c: rows of a scan that UPDATE or DELETE reads ----------------------- */

typedef struct DqIdentities DqIdentities;

/* As long as the context lives */
extern DqIdentities *dq_identities_create(MemoryContext context);
/* The filled slot, whose values become a row that says where its task is */
extern void dq_identity_store_task(DqIdentities *identities, TupleTableSlot *slot,
								   int shard, const DqTask *task);
extern void dq_identity_store_row(TupleTableSlot *slot, int shard, const DqRow *row);

/* ---- scan.c ------------------------------------------------------------------- */

/* What EXPLAIN ANALYZE tells of a finished scan */
typedef struct DqScanCounts
{
	int64		round_trips;
	int64		from_redis;		/* tasks read there */
	int64		from_outbox;	/* tasks shown from there */
} DqScanCounts;

extern void dq_scan_begin(ForeignScanState *node, int eflags);
extern TupleTableSlot *dq_scan_iterate(ForeignScanState *node);
extern void dq_scan_rescan(ForeignScanState *node);
extern void dq_scan_end(ForeignScanState *node);
extern bool dq_scan_counts(ForeignScanState *node, DqScanCounts *counts);

/* ---- unsent.c ------------------------------------------------------------------- */

typedef struct DqUnsent DqUnsent;

/*
 * Read the operations of a shard that its fence (as found by the first page,
 * with want_fence) does not cover. Lives in the current memory context; holds
 * the outbox tables open until dq_unsent_end, so that none is emptied meanwhile.
 */
extern DqUnsent *dq_unsent_begin(int32 shard, const DqRange *fence, Snapshot snapshot);
/* Next task offered there and not taken back; *row is valid until the next call. */
extern bool dq_unsent_next(DqUnsent *unsent, DqRow *row);
/* Must a task found in Redis not be shown: shown from here, replaced, removed? */
extern bool dq_unsent_hides(DqUnsent *unsent, const DqTask *task);
/* Does the answer depend on the task's key? */
extern bool dq_unsent_wants_keys(const DqUnsent *unsent);
extern void dq_unsent_end(DqUnsent *unsent);

#endif							/* DQ_FDW_H */
