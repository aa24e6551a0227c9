/*
 * relay_private.h
 *	  What the files of the relay room share: a shard as this process knows it.
 *
 *	  bridge.c	 a server: its links, one for each user mapping
 *	  catalogs.c which shards there are
 *	  round.c	 a link: the round, what is published
 *	  connections.c the connections of a link
 *	  enter.c	 coming to a shard: may we, with which session (PO 5, PO 7)
 *	  batch.c	 which rows are new, and when they may leave (PO 1 to 3)
 *	  collect.c	 their transactions, in order (G8)
 *	  cut.c		 their pages
 *	  resolve.c	 removals that named no exact task
 *	  marking.c	 what is known to be delivered (PO 15a)
 *	  heal.c	 making good what Redis has lost (PO 7, G3)
 *	  producers.c whom the owner waits for before it thaws
 *	  exchange.c what is sent and what the replies mean (PO 4, PO 6)
 *	  holds.c	 what open and ended transactions hold
 *	  hand.c	 the same without a worker
 */
#ifndef DQ_RELAY_PRIVATE_H
#define DQ_RELAY_PRIVATE_H

#include "relay/relay.h"

typedef enum DqShardState
{
	DQ_SHARD_UNKNOWN,			/* look at its fence, then enter */
	DQ_SHARD_RESYNC,			/* same session: look where the fence is */
	DQ_SHARD_FROZEN,			/* entered: relay first, then thaw (PO 7) */
	DQ_SHARD_OPEN,
	DQ_SHARD_NOT_OWNER			/* looked at again each scan_interval */
} DqShardState;

/* What a frozen shard needs before it is thawed (heal.c) */
typedef enum DqHeal
{
	DQ_HEAL_NONE,
	DQ_HEAL_LOOK,				/* not known yet */
	DQ_HEAL_RELAY,				/* exactly to the mark's A */
	DQ_HEAL_SWEEP				/* drop what the mark calls delivered */
} DqHeal;

/* A transaction with rows for the shard. */
typedef struct DqGroup
{
	int64		last_seq;
	FullTransactionId xid;
	uint32		nrows;
	uint32		table;			/* of its only row */
	ItemPointerData tid;
} DqGroup;

/*
 * The rows between two snapshots, in order (last seq of the transaction, seq).
 * First its transactions are collected, then pages are cut.
 */
typedef struct DqBatch
{
	MemoryContext context;
	DqSnapshot *cur;			/* its target */
	char		nonce[20];
	bool		started;		/* its first page has been sent, or it was found half done */
	bool		collected;
	bool		sorted;
	/* collecting: the candidates' cursor */
	int			xip;
	FullTransactionId at_xid;
	int64		at_seq;
	bool		in_range;
	DqGroup    *groups;
	int			ngroups;
	int			maxgroups;
	/* cutting */
	int			group;			/* next group */
	int64		after_last;		/* rows up to (after_last, after_seq) are applied */
	int64		after_seq;
	int64		cut_seq;		/* within the group: seq after which to read */
	bool		last_cut;		/* its last page has been cut */
	bool		thaws;			/* cur was taken after entering (PO 7) */
	bool		heals;			/* cur is the mark's A */
	int64		rows;			/* collected, minus those cut */
	/* removals among them: due tasks wait for these */
	int64		removes;
	int64		deferred;		/* those recorded without an answer */
	/* a deferred one that stands next: what it names now (resolve.c) */
	DqRow	   *element;		/* NULL: none waits */
	int64		element_last;	/* last seq of its transaction */
	struct DqLookup *lookup;	/* how far it has been looked up */
	int64		resolved_seq;
	bytea	   *resolved;		/* exact member here, NULL: nothing, or elsewhere */
	int64		resolved_due;
	char	   *bad;			/* what is wrong with the row that stands next */
} DqBatch;

typedef struct DqCut
{
	DqPage	   *page;
	char		position[64];
	bool		first;
	bool		done;
	int			offers;
	int			replayed;		/* rows that had been applied before */
	int			moves;			/* offers of rescheduled tasks */
	FullTransactionId last_xid; /* of its last row */
	TimestampTz last_at;
} DqCut;

/* What is known of deliveries, and what of it is stored (marking.c) */
typedef struct DqMarking
{
	bool		loaded;			/* stored is what the table holds */
	DqMark		stored;
	ItemPointerData at;			/* where it lies, if this process stored it */
	ItemPointerData next_at;	/* until the commit */
	TimestampTz stored_at;
	bool		wanted;			/* something was applied or delivered since */
	int64		pushed;			/* to the ready list, as far as answers tell */
	/* not stored yet */
	char	   *applied;		/* NULL: none */
	char	   *settled;		/* candidate for the mark's A, NULL: none */
	int64		due;			/* its W */
	int64		pushed_then;	/* pushed, when it was taken */
	char		first[41];		/* digest of the ready list's first element then */
	bool		confirmed;		/* the list is past it */
	bool		last;			/* nothing lay in the list */
	int64		head;			/* the earliest due at the last look that counted */
} DqMarking;

typedef struct DqShard
{
	int32		no;
	MemoryContext context;		/* everything of this struct */
	char	   *name;			/* N or N#i */
	DqKeys		keys;
	bool		seen_in_catalog;
	/* definition */
	Oid			relid;			/* InvalidOid: its table is gone */
	bool		producer;
	bool		index;
	bool		paused;
	bool		stop_on_loss;
	char	   *loss;			/* what is missing for ever, NULL: nothing */
	DqDestination destination;
	Oid			owner;			/* of the table: whose executor delivers */

	/* protocol */
	DqShardState state;
	char		session[20];
	bool		entering;		/* session was sent and not answered */
	int64		floor;			/* highest version seen (PO 7) */
	char		position[64];	/* where the fence stands */
	MemoryContext snapshots;	/* owns prev, old, seen */
	DqSnapshot *prev;			/* the fence's */
	DqSnapshot *old;
	DqSnapshot *seen;			/* nothing undone up to here, known in memory only */
	uint64		seen_number;	/* counts them: an abort moves no bound of one */
	bool		seen_here;		/* seen is a snapshot that this process has taken */
	bool		want_thaw;		/* relayed to a snapshot taken after entering */
	uint64		completions;	/* xactCompletionCount when seen was taken */
	bool		looked;
	DqBatch    *batch;
	DqCut	   *prepared;		/* next page, not sent */
	char		sent_position[64];	/* after the pages in flight */
	int			pages_in_flight;
	bool		transfer_in_flight;
	bool		other_in_flight;	/* status, thaw or sweep */
	bool		catching_up;	/* not looked at the outbox since it was (re)found */
	bool		broken;			/* a page in flight was refused: drop what follows (PO 4) */
	char	   *blame;			/* whose it is, not_owner */
	bool		lease_elsewhere;	/* same source renews its lease in another place */
	int64		lease_seen;		/* as it was at the first look */
	TimestampTz owned_until;	/* by another's lease, as last seen */

	/* holds (holds.c) */
	bool		blockers_known; /* looked for since the session began */
	TimestampTz blockers_at;	/* of the last look */
	List	   *blockers;		/* FullTransactionIds: told true, and the hold is gone */
	bool		holds_due;		/* look at them */
	bool		holds_anew;		/* ... even if nothing more is applied */
	TimestampTz holds_at;		/* of the last look at them */
	uint64		holds_seen;		/* seen_number at the last look */
	char		holds_cursor[24];

	/* due tasks */
	int64		next_due;
	bool		transfer_more;
	bool		lent;			/* the executor has permission for a claim, or claims */
	uint64		lend_answered;	/* claims whose answers have been noted */
	int64		heard_due;		/* earliest due heard of since permission was given */
	TimestampTz status_at;		/* of the last look */
	TimestampTz blocked_until;	/* after an error of this shard alone */
	int			failures;
	int			big_failures;	/* connections lost over one large page */
	bool		parked;
	DqMarking	marking;

	/* healing */
	TimestampTz entered_at;
	TimestampTz thaw_at;		/* not before: a producer was waited for */
	char	   *producers;		/* that lived when the shard was last open */
	char	   *awaited;		/* the one that is waited for, said once */
	DqHeal		heal;
	bool		lost;			/* seen by its version: Redis went back */
	bool		loss_noted;		/* and said so */
	char	   *acknowledged;	/* snapshot Redis had come to, in context */
	DqSnapshot *replay_to;		/* the same, while it is behind; in snapshots */
	DqSnapshot *heal_to;		/* the mark's A; in snapshots */
	uint64		largest_id;		/* of ours */
	DqSweep		sweep;			/* how far; in snapshots */
	int64		replayed;		/* in this healing */
	int64		swept;

	DqShardStats stats;			/* what is published, private copy */
	bool		publish;
} DqShard;

typedef enum DqRequestKind
{
	DQ_REQ_APPLY,
	DQ_REQ_TRANSFER,
	DQ_REQ_STATUS,
	DQ_REQ_THAW,
	DQ_REQ_SWEEP
} DqRequestKind;

typedef struct DqRequest
{
	DqRequestKind kind;
	DqShard    *shard;
	DqCut	   *cut;			/* of an apply */
	bool		taken;			/* its reply was read, cut is freed */
	TimestampTz sent_at;
} DqRequest;

#define DQ_MAX_REQUESTS 256

typedef struct DqLink
{
	MemoryContext context;
	MemoryContext round;		/* reset each round */
	Oid			serverid;
	char	   *server_name;
	bool		own_xact;		/* a worker's: opens its own transactions */
	bool		no_transfer;	/* by hand: only relay */
	Oid			umid;			/* the user mapping, InvalidOid: no credentials */
	TimestampTz blocked_until;	/* after an error, when there are other links */
	int			failures;
	uint64		progress;		/* replies that were good */
	uint64		progress_at_failure;
	char		logged[DQ_ERROR_LEN];	/* last message of a waiting shard */
	TimestampTz logged_at;
	bool		look_wanted;	/* at the server's settings, once a connection */
	TimestampTz looked_at;
	char	   *refusal;		/* why these credentials may not be used */
	TimestampTz subscribe_at;	/* not before */
	DqTarget	target;			/* copied into context */
	MemoryContext target_context;
	int			scan_interval;
	DqRedis    *redis;
	DqRedis    *subscription;	/* workers only */
	bool		subscribed;
	List	   *shards;			/* of DqShard */
	int			send_from;		/* which of them is the next to send */
	char		source[40];
	int			node;
	uint32		tli;
	uint64		rollbacks;		/* dq_rollbacks() at the last look at holds */
	char	   *writer;			/* stamp of pages (PO 5) */
	DqRequest	requests[DQ_MAX_REQUESTS];
	int			nrequests;
	char	   *server_warnings;
	int			mark_interval;	/* ms between marks of a shard, 0: as usual */
	int64		replay_window;	/* ms */
} DqLink;

struct DqBridge
{
	MemoryContext context;
	MemoryContext scratch;		/* reset each round */
	Oid			serverid;
	bool		own_xact;
	bool		no_transfer;
	bool		gone;
	bool		aborted;		/* the last round has aborted a transaction */
	uint64		completions;	/* xactCompletionCount when the catalogs were looked at */
	bool		looked;
	int			scan_interval;
	int64		replay_window;
	TimestampTz rotate_at;		/* next look at the outbox tables */
	uint64		rotate_progress;	/* as it was then */
	List	   *links;			/* of DqLink */
};


/* bridge.c */
extern DqLink *dq_bridge_link(DqBridge *bridge, Oid umid);	/* found or made */

/* round.c */
extern long dq_link_round(DqLink *link);
extern void dq_link_reset(DqLink *link);
extern void dq_link_mark_down(DqLink *link, const char *message);
extern void dq_link_publish(DqLink *link, DqShard *shard);
extern void dq_link_begin(DqLink *link);	/* transaction, if own_xact */
extern void dq_link_end(DqLink *link);

/* catalogs.c */
extern void dq_bridge_catalogs(DqBridge *bridge);
extern bool dq_catalogs_changed(DqBridge *bridge);
extern DqShard *dq_shard_by_channel(DqLink *link, const char *channel, size_t len);

/* connections.c */
extern void dq_link_connect(DqLink *link);
extern void dq_link_close(DqLink *link);
extern void dq_link_look(DqLink *link);
extern void dq_link_messages(DqLink *link);

/* enter.c */
extern void dq_shards_enter(DqLink *link);
extern bool dq_shard_wants_look(const DqLink *link, const DqShard *shard, TimestampTz now);
extern void dq_shard_forget(DqShard *shard, DqShardState state);
extern void dq_shard_adopt_fence(DqShard *shard, const DqFence *fence,
								 const DqFenceRecord *record);
extern char *dq_writer_stamp(uint32 tli, XLogRecPtr lsn);
extern void dq_new_token(char *token);	/* 16 hex digits */

/* batch.c */
extern void dq_batch_free(DqShard *shard);
extern void dq_batch_done(DqShard *shard);	/* its last page is applied */
/* what to do with the older snapshot when the batch closes (PO 2) */
extern char *dq_batch_old(DqShard *shard);
/* Look for new rows and cut the next page of each shard that has some. true if
 * there is more to do at once. */
extern uint64 dq_completion_count(void);
/* PO 1: all up to this point is durable, and pages are stamped with it */
extern void dq_link_flush(DqLink *link, uint32 tli, XLogRecPtr point);
extern bool dq_batches_prepare(DqLink *link, TimestampTz deadline);

/* collect.c */
extern void dq_batch_collect(DqShard *shard, DqOutboxScan *scan, TimestampTz deadline);
extern int	dq_group_cmp(const void *a, const void *b);

/* cut.c */
extern DqCut *dq_batch_cut(DqShard *shard, DqOutboxScan *scan, MemoryContext scratch);

/* resolve.c */
/* True: there is more to do at once. */
extern bool dq_resolve_elements(DqLink *link);
/* What an element does to the task that it was found to name. */
extern void dq_page_named(DqPage *page, const DqRow *element, const bytea *member,
						  int64 due);

/* holds.c */
extern void dq_blockers_look(DqLink *link);
extern bool dq_shard_may_thaw(const DqShard *shard);
extern bool dq_holds_wanted(const DqLink *link);
extern bool dq_holds_resolve(DqLink *link);

/* producers.c */
extern void dq_producers_note(DqShard *shard, const DqFenceRecord *record);
extern const char *dq_producers_awaited(const DqLink *link, const DqShard *shard);
extern void dq_producers_thawed(const DqLink *link, const DqShard *shard);
extern void dq_producers_wait(DqLink *link, DqShard *shard, const char *who);

/* marking.c */
extern void dq_mark_load(DqShard *shard, Snapshot snapshot);
extern void dq_mark_forget(DqShard *shard);
extern void dq_mark_put_back(DqShard *shard);
extern void dq_mark_note(DqShard *shard, const DqFence *fence, const DqFenceRecord *record);
extern void dq_marks_store(DqLink *link);
extern void dq_mark_back(DqLink *link, DqShard *shard);
extern int	dq_look_interval(const DqLink *link, const DqShard *shard);

/* heal.c */
extern void dq_heal_remember(DqShard *shard);
extern void dq_heal_begin(DqShard *shard);
extern void dq_heal_look(DqLink *link);
extern void dq_heal_end(DqShard *shard);
extern void dq_heal_reset(DqShard *shard);
extern bool dq_heal_is_behind(const DqShard *shard);
extern const DqSnapshot *dq_heal_target(const DqShard *shard);
extern void dq_heal_reached(DqShard *shard);
extern bool dq_heal_wants_sweep(const DqShard *shard);
extern void dq_heal_send(DqLink *link, DqShard *shard);
extern void dq_heal_received(DqShard *shard, const DqSweepResult *result);
/* due tasks wait: a pause, or a loss that nobody has accepted */
extern bool dq_shard_is_halted(const DqShard *shard);
extern void dq_shard_set_loss(DqShard *shard, const DqLoss *loss);
extern bool dq_heal_is_replay(const DqShard *shard, const DqRow *row);

/* exchange.c */
/* What a reply's common part says; true: go on. */
extern bool dq_shard_note_fence(DqLink *link, DqShard *shard, const DqFence *fence);
/* Backends have seen replies as well: take over what they know (PO 7). */
extern void dq_shard_share_floor(DqShard *shard);
extern bool dq_exchange_send(DqLink *link);	/* true if anything was sent */
extern void dq_exchange_receive(DqLink *link, int n);	/* the first n replies */
extern bool dq_link_is_news(DqLink *link, const char *message);
extern void dq_shard_note_error(DqLink *link, DqShard *shard, const char *message,
								bool transient);
/* its page breaks the connection: out of the way for ten seconds */
extern void dq_shard_park_page(DqLink *link, DqShard *shard, const char *message);
extern void dq_shard_note_numbers(DqLink *link, DqShard *shard,
								  const DqFenceRecord *record);

#endif							/* DQ_RELAY_PRIVATE_H */
