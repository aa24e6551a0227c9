/*
 * outbox.h
 *	  Committed operations on their way to Redis: the tables, the snapshots that
 *	  say which of them are done, who this database is, and what the current
 *	  transaction has done. May call the queue and shared rooms.
 */
#ifndef DQ_OUTBOX_H
#define DQ_OUTBOX_H

#include "postgres.h"

#include "access/transam.h"
#include "access/htup.h"
#include "access/xlogdefs.h"
#include "storage/itemptr.h"
#include "utils/relcache.h"
#include "utils/snapshot.h"

#include "queue/queue.h"

/* ---- source.c: who this database is ---------------------------------------- */

typedef struct DqSource
{
	int32		no;				/* dq_source.no, stamped on rows */
	char		id[33];			/* 32 hex digits */
	int			node;			/* 15 bits */
	int32		adopted_from;	/* no of the source whose rows of this place are
								 * ours as well (dq_adopt of a copy), 0 none */
} DqSource;

/* Own identity; makes one in this transaction if there is none (must_make) */
extern const DqSource *dq_source_get(bool must_make);
extern const char *dq_place(void);		/* text that a copied data directory does not share */
extern int32 dq_place_hash(void);
extern const char *dq_host_name(void);
/* dq_adopt of a physical copy: a new identity */
extern const DqSource *dq_source_renew(void);

/* ---- snapshot.c -------------------------------------------------------------- */

typedef struct DqSnapshot
{
	uint32		tli;
	FullTransactionId xmin;
	FullTransactionId xmax;
	int			nxip;
	FullTransactionId *xip;		/* sorted, top-level only */
	bool		damaged;		/* read from what is none: sees nothing, says nothing */
} DqSnapshot;

/* The timeline this server writes, or replays as a standby. */
extern uint32 dq_timeline(void);
extern DqSnapshot *dq_snapshot_take(Snapshot snapshot); /* palloc'd */
/* What is committed now; in parallel mode, where PostgreSQL allows no new
 * snapshot, the statement's. Register it. Reads of our tables by it make no two
 * SERIALIZABLE transactions depend on each other. */
extern Snapshot dq_fresh_snapshot(void);
/* The same of one that was there: register it. */
extern Snapshot dq_snapshot_unmarked(Snapshot snapshot);
/* "" -> nothing visible; unreadable -> the same, and damaged */
extern DqSnapshot *dq_snapshot_in(const char *text);
extern char *dq_snapshot_out(const DqSnapshot *snap);
extern bool dq_snapshot_sees(const DqSnapshot *snap, uint32 tli, FullTransactionId xid);
extern bool dq_snapshot_equal(const DqSnapshot *a, const DqSnapshot *b);
extern bool dq_snapshot_covers(const DqSnapshot *a, const DqSnapshot *b);
/* End of the last inserted WAL record; take it AFTER the snapshot (PO 1). */
extern XLogRecPtr dq_flush_point(void);
/* Flush up to it, wait for the synchronous standby. false: the wait was cut short. */
extern bool dq_flush_to(XLogRecPtr point);

/* ---- lives.c: this data directory and its copies ---------------------------------- */

#define DQ_LIFE_LEN 16			/* hex digits */

extern bool dq_lives_look(bool make);
extern bool dq_life_is_known(void);
extern const char *dq_life(void);	/* "-": has no name yet */
extern int	dq_life_holds(const char *id, XLogRecPtr lsn);

/* ---- shards.c: registry of shards --------------------------------------------- */

typedef struct DqShardRow
{
	int32		no;
	Oid			serverid;
	char	   *name;			/* shard name N or N#i, in UTF-8 */
	int			shard;			/* i */
	int			nshards;
	bool		index;			/* as last seen */
	Oid			relid;			/* of the table that registered it, perhaps gone */
} DqShardRow;

/*
 * Who defines or registers a queue of a name that could share a key in Redis with
 * this one waits, to the end of the transaction, for others who do. Afterwards the
 * catalogs show what they have done. Nobody who uses a queue comes here.
 */
extern void dq_name_lock(const char *name);
/* Fill queue->shard_no, registering in this transaction what is missing. */
extern void dq_shards_resolve(DqQueue *queue);
/* DqShardRow of one server (InvalidOid: all), fresh snapshot, current context. */
extern List *dq_shards_list(Oid serverid);

/* ---- store.c: rows of the extension's small tables ------------------------------ */

/* Insert past the executor, invisible to logical decoding; indexes included.
 * Returns where it lies. */
extern ItemPointerData dq_store_insert(Relation rel, Datum *values, bool *nulls);
extern void dq_store_delete(Relation rel, HeapTuple tuple);
/* Does (server, name) stand in the table? Both columns come first there. */
extern HeapTuple dq_store_find(Relation rel, Snapshot snapshot, Oid serverid,
							   const char *name);

/* ---- tables.c: writing and reading the outbox ----------------------------------- */

#define DQ_OP_OFFER 'o'
#define DQ_OP_REMOVE 'r'		/* exact member, token */
#define DQ_OP_RESCHEDULE 's'	/* as an offer: where the removed task goes instead */
#define DQ_OP_CONSUME 'c'		/* what was taken from the ready list: token, and in
								 * the place of due how many elements */
#define DQ_OP_REMOVE_ELEMENT 'e'	/* could not look: resolved when applied */
#define DQ_OP_RESCHEDULE_ELEMENT 'f'	/* likewise, then offered anew at due */
#define DQ_OP_REMOVE_KEY 'x'	/* likewise, but only as a key */
/* what an element of another shard named here: written by the relay */
#define DQ_OP_REMOVE_NAMED 'd'	/* exact member */
#define DQ_OP_MOVE_NAMED 'g'	/* member, to due and id */
#define DQ_OP_DISCARD 'q'		/* member of the quarantine */
#define DQ_OP_RESOLUTION 'm'	/* never relayed, see resolutions.c */

#define DQ_NUM_OUTBOX 3

typedef struct DqRow
{
	int64		seq;
	FullTransactionId xid;		/* top-level */
	uint32		tli;
	int32		source;
	int32		place;
	int32		shard;			/* dq_shards.no */
	char		op;
	int64		due;			/* ms */
	uint64		id;
	int			table;			/* where it lies, for dq_outbox_fetch */
	ItemPointerData tid;
	TimestampTz at;				/* start of the statement that wrote it */
	bytea	   *key;			/* offer: key or NULL; deferred remove: element */
	bytea	   *payload;
	bytea	   *member;			/* exact remove */
	bytea	   *token;
	bool		has_token;		/* also without values */
} DqRow;

/*
 * Draw seq and the id it gives: node (15 bits), timeline (8), sequence (40), so
 * that ids stay unique and in order when a promoted standby draws numbers again
 * that its primary had drawn (H20). Lock the queue (RowExclusive) before (PO 12).
 */
#define DQ_ID_SEQ_BITS 40
extern int64 dq_outbox_next(uint64 *id);
/* Insert; xid, tli, at, source, place are filled here. Wakes the bridge at commit. */
extern void dq_outbox_insert(DqRow *row, Oid serverid);

/* Rows of a shard with from <= xid < to, ordered by (xid, seq), visible to the
 * snapshot. values: with key, payload, member, token, palloc'd. */
typedef struct DqOutboxScan DqOutboxScan;
extern DqOutboxScan *dq_outbox_scan_begin(int32 shard, FullTransactionId from,
										  FullTransactionId to, Snapshot snapshot);
extern bool dq_outbox_scan_next(DqOutboxScan *scan, DqRow *row, bool values);
/* Start over with another range; after_seq counts when the range is one xid. */
extern void dq_outbox_scan_seek(DqOutboxScan *scan, int32 shard,
								FullTransactionId from, FullTransactionId to,
								int64 after_seq);
/* One row again, by its place; false: not visible. */
extern bool dq_outbox_fetch(DqOutboxScan *scan, int table, ItemPointer tid, DqRow *row);
extern void dq_outbox_scan_end(DqOutboxScan *scan);

/*
 * Rows of ours that the fence (prev, old) does not cover, in no useful order:
 * looks up only the transactions that prev calls running and those beyond it.
 * upto: only transactions it sees (NULL: all that the MVCC snapshot shows). The
 * rows of a transaction that runs now, however many, are not even passed over;
 * nor are own ones, unless asked for.
 */
typedef struct DqCandidates
{
	DqOutboxScan *scan;
	int32		shard;
	const DqSnapshot *prev;
	const DqSnapshot *old;
	const DqSnapshot *upto;
	int			xip;			/* next of prev->xip to look up */
	FullTransactionId *running; /* sorted: not looked at */
	int			nrunning;
	int			gap;			/* next of them that ends a range */
	FullTransactionId to;		/* end of all ranges */
} DqCandidates;
extern void dq_candidates_begin(DqCandidates *c, int32 shard, const DqSnapshot *prev,
								const DqSnapshot *old, const DqSnapshot *upto,
								Snapshot snapshot, bool own);
extern bool dq_candidates_next(DqCandidates *c, DqRow *row, bool values);
extern void dq_candidates_end(DqCandidates *c);

/*
 * Is a committed or own row possibly not in Redis yet? The part of the outbox
 * after the fence: not seen by prev, not by old.
 */
extern bool dq_row_is_done(const DqRow *row, const DqSnapshot *prev,
						   const DqSnapshot *old);
/* Does the row schedule a task? */
#define dq_row_offers(row) ((row)->op == DQ_OP_OFFER || (row)->op == DQ_OP_RESCHEDULE)
/* Was it recorded without an answer? Due tasks of the queue wait for it. */
#define dq_row_was_deferred(row) (strchr("efxdg", (row)->op) != NULL)
/* Rows of ours (this source, or adopted with this place)? */
extern bool dq_row_is_ours(const DqRow *row);

/*
 * Does the fence (prev, old) cover every row of the shard that the snapshot
 * sees? (PO 11, H15)
 */
extern bool dq_outbox_is_covered(int32 shard, const DqSnapshot *prev,
								 const DqSnapshot *old, Snapshot snapshot);

/* ---- lookups.c ------------------------------------------------------------------- */

/* Can what is on its way change what an element names (member: found so far)? */
extern bool dq_outbox_concerns(int32 shard, const DqSnapshot *prev, const DqSnapshot *old,
							   Snapshot snapshot, const bytea *element,
							   const bytea *member);
/* ---- concerns.c ------------------------------------------------------------------- */

/* The same for a statement that takes many tasks of a shard, by exact member. */
typedef struct DqConcerns DqConcerns;
extern DqConcerns *dq_concerns_create(MemoryContext context, int32 shard);
extern void dq_concerns_read(DqConcerns *c, const DqSnapshot *prev, const DqSnapshot *old,
							 Snapshot snapshot);
/* key: of the task, or NULL. false is certain, true is not. */
extern bool dq_concerns_has(const DqConcerns *c, const bytea *member, const bytea *key);

/* ---- lookups.c -------------------------------------------------------------------- */

/* Is there a row of this transaction with this token (DQ_TOKEN_LEN bytes)? */
extern bool dq_outbox_has_row(int32 shard, FullTransactionId xid, const char *token,
							  Snapshot snapshot);

/* Committed rows of a shard that are not known to be in Redis, and how old the
 * oldest is (0: unknown). Counts at most a million. */
extern void dq_outbox_backlog(int32 shard, int64 *rows, TimestampTz *oldest);

/* ---- resolutions.c: what recorded elements were found to name --------------------- */

typedef struct DqResolution
{
	bytea	   *member;			/* NULL: nothing */
	int64		due;
	int32		shard;			/* where it lay */
} DqResolution;

/* In the current transaction: once for each element. */
extern void dq_resolution_store(const DqRow *element, const DqResolution *resolution,
								Oid serverid);
/* false: not resolved yet */
extern bool dq_resolution_get(const DqRow *element, DqResolution *resolution);

/*
 * Is the row with this transaction, number and instant in our outbox, which a fence
 * names as the last one applied? 0: it is not ours; 1: yes; -1: it may have been
 * in a table that was emptied.
 */
extern int	dq_outbox_has_written(int32 shard, FullTransactionId xid, int64 seq,
								  TimestampTz at);

/* ---- rotate.c ---------------------------------------------------------------------- */

extern int	dq_outbox_current(void);	/* table that takes new rows */
extern Oid	dq_outbox_relation(int table);
/*
 * Rotate when it is time and empty a table whose rows are all seen by every
 * shard's mark and older than the window (PO 16). Opens and commits its own
 * transaction. Returns when to call again, DT_NOEND: when rows have been added.
 */
extern TimestampTz dq_outbox_rotate(int64 window_ms);

/* Was any table emptied since then? */
extern bool dq_outbox_emptied_since(TimestampTz since, Snapshot snapshot);
/* None of the tables is emptied before the end of this transaction. It is short:
 * emptying itself is held off; else the tables are locked against it. */
extern void dq_outbox_keep(bool is_short);

/* ---- marks.c: what is known of deliveries ------------------------------------------ */

/*
 * applied: a snapshot of a complete fence that Redis has acknowledged; all its
 * operations were in Redis (PO 16). settled (A) and due (W): of the own tasks that
 * A sees, each one due by W has left the pending set, holds and the ready list
 * (PO 15a). Snapshots as text; settled is "" when nothing is known yet.
 */
typedef struct DqMark
{
	int64		no;				/* another each time */
	char	   *applied;
	char	   *settled;
	int64		due;			/* ms */
	char	   *producers;		/* other sources that lived then, by spaces */
} DqMark;

/* The stored mark of a shard, of this source; false: none. palloc'd */
extern bool dq_mark_get(int32 shard, Snapshot snapshot, DqMark *mark);
/* at: where the one before lies, if this process stored it; set to the new one. */
extern void dq_mark_store(int32 shard, const DqMark *mark, ItemPointer at);
/* How often marks may be stored, in ms, for a table of that many shards. */
extern int	dq_marks_interval(int nshards);

/* ---- losses.c: what cannot be applied again ---------------------------------------- */

/* What an emptied outbox table held of a shard. */
typedef struct DqEmptied
{
	int32		shard;
	int64		round;			/* dq_rotation.round in which it was emptied */
	char	   *complete;		/* snapshot that sees all of it */
	int64		tasks;			/* offers */
	int64		due;			/* the largest of theirs (ms) */
	int64		any_due;		/* of theirs and of tasks that were removed or
								 * replaced; INT64_MAX: not known */
	int64		last_seq;		/* what was offered after it, nothing in there took */
	TimestampTz newest;
} DqEmptied;

extern void dq_emptied_note(const DqEmptied *e);

typedef struct DqLoss
{
	TimestampTz since;			/* when it was found */
	int64		tasks;			/* at most so many; 0: removals only */
	TimestampTz newest;			/* they were offered until then */
	int64		due;			/* and due until then (ms) */
} DqLoss;

typedef enum DqLossFound
{
	DQ_LOSS_NONE,
	DQ_LOSS_FOUND,
	DQ_LOSS_BUSY				/* cannot be noted now, dq_resume is under way */
} DqLossFound;

extern DqLossFound dq_loss_check(int32 shard, const DqSnapshot *prev, bool found,
								 const DqMark *mark, bool note, DqLoss *loss);
extern bool dq_loss_get(int32 shard, Snapshot snapshot, DqLoss *loss);
extern char *dq_loss_text(const DqLoss *loss);
extern bool dq_queue_has_loss(const DqQueue *queue);
extern void dq_losses_accept(const DqQueue *queue);

/* ---- own.c: what this transaction has offered and not removed ---------------------- */

typedef struct DqOwnTask
{
	int32		shard;
	int64		due;
	uint64		id;
	bytea	   *key;
	bytea	   *payload;
	bool		gone;
	char		how;			/* as in DqFound */
} DqOwnTask;

/* The own pending task that an element names (DESIGN: key, id, payload). */
extern bool dq_own_find(DqQueue *queue, const bytea *element, DqOwnTask *task);
/* The task with this id: 'o' an own pending one, 'g' one that is gone again, else 0 */
extern char dq_own_task(int32 shard, int64 due, uint64 id, DqOwnTask *task);
/* ids (8 bytes each) of the removed tasks with this payload, one after the other */
extern char *dq_own_removed_ids(DqQueue *queue, const bytea *payload, size_t *len);
extern bool dq_own_has_removed(int32 shard, const bytea *member);
/* member bytes of a task of ours */
extern bytea *dq_member_make(uint64 id, const bytea *payload);
extern void dq_own_added(const DqRow *row);	/* from dq_outbox_insert */

/* ---- holds.c: holds of this transaction in Redis ------------------------------------ */

/* Start of this server's life; stamps holds (PO 8). */
extern uint64 dq_incarnation(void);
extern void dq_hold_draw(char *token);	/* DQ_TOKEN_LEN random bytes */
/* Before the script leaves; then, by its answer, void or keep (row written). */
extern void dq_hold_sent(const char *token);
extern void dq_hold_void(const char *token);
extern void dq_hold_keep(const char *token);
/* Around the row that relies on a hold of this session (PO 7). false: the hold may
 * be lost, write nothing and ask anew. */
extern bool dq_hold_writing(int32 shard, const DqSession *session);
extern void dq_hold_written(void);
/* Tokens of this transaction that stand for nothing: they may be taken over. palloc'd */
extern char *dq_holds_left(int *n);
extern bool dq_hold_is_left(const char *token);

/* ---- xact.c: transaction callbacks -------------------------------------------------- */

extern void dq_xact_touched(Oid serverid);	/* wake its bridge at commit */
extern void dq_xact_registered(void);		/* shards were registered */
extern uint32 dq_xact_generation(void);		/* moves when that was rolled back */

/* ---- dead letters: columns of dq_dead_letters ----------------------------------- */

enum
{
	DQ_DEAD_QUEUE = 1,
	DQ_DEAD_ID,
	DQ_DEAD_KEY,
	DQ_DEAD_PAYLOAD,
	DQ_DEAD_DUE_AT,
	DQ_DEAD_DIED_AT,
	DQ_DEAD_ATTEMPTS,
	DQ_DEAD_SQLSTATE,
	DQ_DEAD_ERROR,
	DQ_DEAD_NATTS = DQ_DEAD_ERROR
};

/* ---- pauses.c -------------------------------------------------------------------- */

extern bool dq_queue_is_paused(const DqQueue *queue);
extern bool dq_pause_set(const DqQueue *queue, bool paused);	/* false: was so already */

#endif							/* DQ_OUTBOX_H */
