/*
 * fdw.h
 *	  The foreign-data wrapper: a queue as a table. handler.c names the callbacks;
 *	  pushdown.h has what planning and running a scan share; in here is what reads
 *	  tasks: stream.c page by page, unsent.c and effect.c what has been committed (or
 *	  done by this transaction) and is not in Redis yet, columns.c makes rows. May call
 *	  the api, outbox and queue rooms, and look at what workers publish.
 */
#ifndef DQ_FDW_H
#define DQ_FDW_H

#include "postgres.h"

#include "foreign/fdwapi.h"
#include "nodes/execnodes.h"
#include "utils/snapshot.h"

#include "outbox/outbox.h"
#include "queue/queue.h"

/* ---- columns.c ---------------------------------------------------------------- */

typedef struct DqColumns DqColumns;

/* attrs: numbers of those that are read, 0 stands for the whole row; everything in
 * the current memory context */
extern DqColumns *dq_columns_describe(const DqQueue *queue, TupleDesc desc, List *attrs);
extern bool dq_columns_read(const DqColumns *columns, DqColumnRole role);
/* Convert payload and key late where the filter does not read them; true: some. */
extern bool dq_columns_defer(DqColumns *columns, Bitmapset *filter_attrs);
/* What does not fit is NULL, as if each column had on_error 'null' (ANALYZE). */
extern void dq_columns_forgive(DqColumns *columns);
typedef enum DqStorePart
{
	DQ_STORE_ALL,
	DQ_STORE_EARLY,				/* what the filter may read */
	DQ_STORE_LATE				/* the rest of the same row */
} DqStorePart;
/*
 * Fill a virtual slot's values, in the current memory context. A payload or key
 * that its column cannot hold raises the type's error (22P02, 22021, ...) naming
 * the task, or is NULL (column option on_error); only columns the query reads are
 * converted.
 */
extern void dq_columns_store_task(DqColumns *columns, TupleTableSlot *slot, int shard,
								  const DqTask *found, DqStorePart part);
extern void dq_columns_store_row(DqColumns *columns, TupleTableSlot *slot, int shard,
								 const DqRow *row, DqStorePart part);

extern void dq_columns_store_shelved(DqColumns *columns, TupleTableSlot *slot, int shard,
									 const DqShelved *found);

/* ---- identity.c: rows of a scan that UPDATE or DELETE reads ----------------------- */

typedef struct DqIdentities DqIdentities;

/* As long as the context lives */
extern DqIdentities *dq_identities_create(MemoryContext context);
/* The filled slot, whose values become a row that says where its task is */
extern void dq_identity_store_task(DqIdentities *identities, TupleTableSlot *slot,
								   int shard, const DqTask *task);
extern void dq_identity_store_row(TupleTableSlot *slot, int shard, const DqRow *row);
/* The instant that a due in ms is shown as; infinite beyond the calendar. */
extern TimestampTz dq_shown_instant(int64 ms);

/* ---- unsent.c, effect.c: what is not in Redis yet ----------------------------------- */

typedef enum DqOrder
{
	DQ_ORDER_NONE,
	DQ_ORDER_ASC,				/* the earliest due first */
	DQ_ORDER_DESC
} DqOrder;

typedef struct DqUnsent DqUnsent;

/*
 * Read the operations of a shard that its fence (as found by the first page) does
 * not cover. Lives in the current memory context; holds the outbox tables open
 * until dq_unsent_end, so that none is emptied meanwhile.
 */
extern DqUnsent *dq_unsent_begin(int32 shard, const DqReadFence *fence, Snapshot snapshot);
extern void dq_unsent_end(DqUnsent *unsent);
/* Nothing to show from there, nothing to hide. */
extern bool dq_unsent_is_empty(const DqUnsent *unsent);
/* It hides nothing that was in Redis when the fence was read. */
extern bool dq_unsent_adds_only(const DqUnsent *unsent);

/* Begin to give out the tasks offered there and not taken back; ranges (in the order
 * of reading) must stay where they are. */
extern void dq_unsent_rewind(DqUnsent *unsent, DqOrder order, const DqDueRange *ranges,
							 int nranges);
/* When is the next one due? false: that was all */
extern bool dq_unsent_peek(DqUnsent *unsent, int64 *due);
extern void dq_unsent_skip(DqUnsent *unsent);
/* The next one; *row is valid until another one is asked for. */
extern bool dq_unsent_next(DqUnsent *unsent, DqRow *row);
/* The one with that key or id. */
extern bool dq_unsent_sought(DqUnsent *unsent, const DqSought *sought, DqRow *row);
/* How many within ranges (the earliest first), and when the first and last is due */
extern void dq_unsent_count(DqUnsent *unsent, const DqDueRange *ranges, int nranges,
							int64 *count, int64 *first, int64 *last);

/*
 * Must a task found in Redis not be shown: shown from here, replaced, removed? Its
 * key counts if wants_keys, its whole member if wants_members.
 */
extern bool dq_unsent_hides(DqUnsent *unsent, const DqTask *task);
extern bool dq_unsent_wants_keys(const DqUnsent *unsent);
extern bool dq_unsent_wants_members(const DqUnsent *unsent);

/* Has something quarantined been discarded? */
extern bool dq_unsent_discards(const DqUnsent *unsent, const char *data, Size len);

/*
 * Removals that were recorded without an answer mean the earliest task that fits:
 * while there are some, all tasks of the shard are shown to them, with keys, the
 * earliest due first.
 */
extern bool dq_unsent_unsettled(const DqUnsent *unsent);
extern void dq_unsent_settle_task(DqUnsent *unsent, const DqTask *task);
extern void dq_unsent_settle_row(DqUnsent *unsent, const DqRow *row);
/* The rest means nothing that is pending. */
extern void dq_unsent_settled(DqUnsent *unsent);

/* ---- stream.c: the tasks of one shard after the other --------------------------------- */

/* What EXPLAIN ANALYZE tells of a finished scan */
typedef struct DqScanCounts
{
	int64		round_trips;
	int64		from_redis;		/* tasks read there */
	int64		bytes;			/* sent by it */
	int64		from_outbox;	/* tasks shown from there */
} DqScanCounts;

/* What the shards of a scan have in common */
typedef struct DqReading
{
	MemoryContext context;		/* as long as the scan */
	Oid			serverid;
	Oid			owner;
	char	   *relname;
	char	   *name;			/* Redis name */
	int			nshards;
	int32	   *shard_no;		/* 0: not registered, so the outbox has nothing */
	char	   *source;			/* own id; "": this database has no identity, so its
								 * outbox is empty */
	bool		keys;			/* somebody looks at keys */
	bool		payloads;
	DqOrder		order;
	const DqDueRange *ranges;	/* in the order of reading */
	int			nranges;
	int			first_page;		/* tasks */
	int			lane;			/* of an asynchronous scan: its own connection; 0: the
								 * backend's, shared with all others */
	struct DqStream *waiting;	/* asked for a page that is not here; NULL: none is */
	DqScanCounts counts;
} DqReading;

/* One shard of a scan */
typedef struct DqStream DqStream;

typedef struct DqItem
{
	const DqTask *task;			/* found in Redis, or NULL: ... */
	DqRow		row;			/* ... from the outbox */
} DqItem;

/* Fill what comes from the catalogs; everything in the current memory context. */
extern void dq_reading_init(DqReading *reading, const DqQueue *queue);
extern DqRedis *dq_reading_redis(DqReading *reading);

extern DqStream *dq_stream_make(DqReading *reading, int shard);
/* From the beginning, in the ranges and order of the reading, n of them at once. */
extern void dq_streams_open(DqStream **streams, int n);
/* The next task; false: no more. *item is valid until the stream is asked again. */
extern bool dq_stream_next(DqStream *stream, DqItem *item);
/* When is the next one due? */
extern bool dq_stream_peek(DqStream *stream, int64 *due);
/*
 * Of an asynchronous scan: ask for the first page, or the next one when what is here is
 * used up, without waiting; and take it (which waits, and is interruptible).
 */
extern bool dq_stream_used_up(const DqStream *stream);
extern void dq_stream_ask(DqStream *stream, bool first);
extern bool dq_stream_answered(const DqStream *stream);
extern DqRedis *dq_stream_asked_of(const DqStream *stream);
extern void dq_stream_take(DqStream *stream);
/* Before the reading's ranges go, and at the end of the scan. */
extern void dq_stream_close(DqStream *stream);
extern void dq_stream_end(DqStream *stream);
/* For those who read by scripts of their own: what is not in Redis as of a fence (of
 * the first reply); NULL: nothing. Later replies do not matter. */
extern DqUnsent *dq_stream_unsent(DqStream *stream, const DqReadFence *fence);
extern bool dq_stream_knows_unsent(const DqStream *stream);
extern const DqKeys *dq_stream_keys(const DqStream *stream);
extern int	dq_stream_shard(const DqStream *stream);

/* ---- scan.c ------------------------------------------------------------------- */

extern void dq_scan_begin(ForeignScanState *node, int eflags);
extern TupleTableSlot *dq_scan_iterate(ForeignScanState *node);
extern void dq_scan_rescan(ForeignScanState *node);
extern void dq_scan_end(ForeignScanState *node);
/* ---- async.c: several scans below an Append at once ------------------------------ */

extern void dq_async_request(AsyncRequest *areq);
extern void dq_async_configure_wait(AsyncRequest *areq);

extern bool dq_scan_counts(ForeignScanState *node, DqScanCounts *counts);

#endif							/* DQ_FDW_H */
