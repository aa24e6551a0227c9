/*
 * deliver_private.h
 *	  What the files of the deliver room share.
 *
 *	  deliver.c	 the queues of an owner, one after the other
 *	  batch.c	 one shard: ask for a batch, commit it, let it go
 *	  claims.c	 the stored number and nonce of each shard (PO 13)
 *	  done.c	 the done log (PO 15)
 *	  sink.c	 tasks into a table
 *	  dead.c	 tasks that cannot be delivered
 */
#ifndef DQ_DELIVER_PRIVATE_H
#define DQ_DELIVER_PRIVATE_H

#include "deliver/deliver.h"

#include "executor/spi.h"
#include "outbox/outbox.h"
#include "queue/queue.h"
#include "shared/shared.h"

/* The row of dq_claims of a shard: the last batch that PostgreSQL has committed. */
typedef struct DqClaim
{
	int64		number;
	char		nonce[2 * DQ_NONCE_LEN];	/* "" none */
	int64		suspect;		/* ms: tasks due by then may have been done before */
	char	   *skip;			/* places in it whose tasks have no copy in the list */
} DqClaim;

/* A shard of a queue with a sink, as this process knows it. */
typedef struct DqOutlet
{
	Oid			relid;
	int32		shard_no;		/* dq_shards.no */
	int			shard;			/* within its queue */
	char	   *name;			/* of the shard in Redis, in context */
	DqKeys		keys;
	MemoryContext context;		/* of this struct's texts */
	bool		seen;
	bool		loaded;			/* claim is what the table holds */
	DqClaim		claim;
	bool		asking;			/* a permission is taken, and no answer has come */
	bool		committed;		/* Redis has not been told of batch `number` */
	TimestampTz committed_at;
	TimestampTz blocked_until;
	int			failures;		/* in a row */
	char		parked[DQ_ERROR_LEN];	/* "" not */
	TimestampTz purged_at;		/* last look at old rows of the done log */
	int64		purge_from;		/* where the next one begins */
} DqOutlet;

struct DqDeliver
{
	MemoryContext context;
	MemoryContext batch;		/* reset for each batch */
	Oid			owner;
	List	   *outlets;		/* of DqOutlet */
	List	   *connections;	/* of DqDeliverConnection, see deliver.c */
	uint64		batches;
	int			from;			/* which of them is served first */
	uint64		completions;	/* as of the last look at the catalogs */
	bool		looked;
};

/* deliver.c: a connection of this process's own, outside of transactions */
extern DqRedis *dq_deliver_redis(DqDeliver *deliver, const DqTarget *target);

/* batch.c */
/* True: there may be more at once. */
extern bool dq_outlet_step(DqDeliver *deliver, DqOutlet *outlet);
extern void dq_outlet_park(DqOutlet *outlet, const char *reason);

/* claims.c: in the current transaction */
extern bool dq_claim_get(int32 shard, DqClaim *claim);
/* Compare-and-set (PO 13): false: the row is not what `was` says. was NULL: none */
extern bool dq_claim_set(int32 shard, const DqClaim *was, const DqClaim *claim);

/* done.c: in the current transaction */
extern void dq_done_store(int32 shard, DqTask *const *tasks, int n);
/* done[i]: task i is in the log. Looks at tasks due by suspect only. */
extern void dq_done_look(int32 shard, const DqTask *tasks, int n, int64 suspect, bool *done);
/* Forget what cannot come again; returns whether there was anything (PO 15). */
extern int64 dq_done_purge(int32 shard, int64 from, int64 window_ms);

/* sink.c: in the current transaction, connected to SPI */
typedef struct DqSink DqSink;
/* NULL: it cannot be written to, *reason says why */
extern DqSink *dq_sink_open(const DqQueue *queue, char **reason);
/* One subtransaction; false: an error, copied to *error; nothing is inserted. */
extern bool dq_sink_insert(DqSink *sink, const DqQueue *queue, int shard,
						   DqTask *const *tasks, int n, ErrorData **error);
/* Is it the fault of what is inserted? Else all has to wait. */
extern bool dq_sink_is_to_blame(const ErrorData *error);

/* dead.c: in the current transaction */
extern void dq_dead_store(const DqQueue *queue, const DqTask *task, int attempts,
						  const ErrorData *error);

#endif							/* DQ_DELIVER_PRIVATE_H */
