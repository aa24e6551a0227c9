/*
 * shared.h
 *	  Shared memory: worker slots, latches, the published state and counters of
 *	  each shard. Plain data only; a process's own resources never go in here.
 *
 *	  A small fixed part (under 24 kB) is allocated with ShmemInitStruct (15, 16;
 *	  requested when preloaded, from the slack otherwise) or GetNamedDSMSegment
 *	  (17+). Shard entries live in a dshash in a DSA area that the first user
 *	  creates and pins, so everything works without preloading.
 */
#ifndef DQ_SHARED_H
#define DQ_SHARED_H

#include "postgres.h"

#include "datatype/timestamp.h"
#include "port/atomics.h"
#include "storage/condition_variable.h"
#include "storage/lwlock.h"

#define DQ_MAX_WORKERS	32
#define DQ_MAX_DATABASES 64
#define DQ_MAX_POLLERS	128
#define DQ_ERROR_LEN	160
#define DQ_WARNINGS_LEN 112
#define DQ_SOURCE_LEN	32		/* hex digits of a source id */

/* ---- shmem.c ------------------------------------------------------------ */

typedef enum DqRole
{
	DQ_ROLE_LAUNCHER,
	DQ_ROLE_BRIDGE,				/* one per database and server */
	DQ_ROLE_EXECUTOR			/* one per database and owner of queues with sinks */
} DqRole;

/*
 * A process of ours, or a bridge that is wanted and has no process at the
 * moment (pid 0): the launcher reconciles the processes with these entries.
 */
typedef struct DqWorkerSlot
{
	bool		in_use;
	int			pid;			/* 0: no process */
	int			procno;			/* whose latch to set, -1 unknown */
	DqRole		role;
	Oid			dboid;			/* InvalidOid: the launcher of all databases */
	Oid			serverid;		/* of a bridge; of an executor its role's oid */
	char		server[NAMEDATALEN];	/* for dq_workers, which shows the servers
										 * of other databases as well */
	char		state[16];		/* wanted, starting, waiting, running, redis_down,
								 * failing, not_owner, idle, stopped, disabled,
								 * no_slot, version, down */
	TimestampTz since;			/* of this state */
	TimestampTz not_before;		/* respawn backoff */
	int			failures;
	int64		reconnects;
	char		last_error[DQ_ERROR_LEN];
	TimestampTz last_error_at;
	char		warnings[DQ_WARNINGS_LEN];	/* '\n' separated */
} DqWorkerSlot;

/* What is known of and wanted for a database. */
typedef struct DqDatabase
{
	Oid			dboid;			/* InvalidOid: free */
	bool		stopped;		/* dq_worker_stop() */
	bool		here;			/* the extension was seen there */
	uint32		pokes;			/* a worker has to look there ... */
	uint32		looked;			/* ... until this has caught up */
	TimestampTz looked_at;
	TimestampTz not_before;		/* backoff of looks that failed */
	int			failures;
} DqDatabase;

/* A backend that waits for elements of a shard's ready list (pollers.c). */
typedef struct DqPoller
{
	int			procno;			/* whose latch to set */
	Oid			dboid;			/* InvalidOid: free */
	int32		shard;
	bool		woken;			/* there is something for it, it has not looked yet */
	bool		watches;		/* it asks Redis, for all who wait for this shard */
	uint64		since;			/* order of coming */
} DqPoller;

typedef struct DqShared
{
	LWLock		lock;			/* protects everything here but the CV */
	int			tranche;
	uint32		dsa_handle;		/* valid if dsa_made */
	bool		dsa_made;
	uint64		dshash_handle;
	bool		look_everywhere;	/* a poke found no room in databases[] */
	bool		overflow;		/* a wanted bridge found none in workers[] */
	ConditionVariable progress; /* broadcast when a bridge has moved a fence */
	uint64		incarnation;	/* when this was made: anew after each crash, when
								 * transaction ids may be given out again */
	uint64		first_xid;		/* next transaction id at that time */
	pg_atomic_uint64 rollbacks; /* of transactions that leave holds in Redis */
	pg_atomic_uint64 calls;		/* of queues that are not transactional: their numbers */
	DqWorkerSlot workers[DQ_MAX_WORKERS];
	DqDatabase	databases[DQ_MAX_DATABASES];
	uint64		last_poller;	/* number of the last that came */
	DqPoller	pollers[DQ_MAX_POLLERS];
} DqShared;

extern void dq_shared_init(void);	/* from _PG_init: request hooks when preloading */
extern DqShared *dq_shared(void);	/* attach on first use; never NULL */
extern bool dq_is_preloaded(void);	/* in shared_preload_libraries */

/* ---- slots.c: the slots of shmem.c, seen from the process that has one ------ */

/* A slot is claimed by the process itself; an exit callback that checks it is
 * still the owner gives it back. A second claim of the same process moves it to
 * the other key. NULL: full, or such a process lives. */
extern DqWorkerSlot *dq_worker_claim(DqRole role, Oid dboid, Oid serverid);
extern void dq_worker_state(const char *state); /* of my slot */
extern void dq_worker_error(const char *message);
extern void dq_worker_warnings(const char *newline_separated);
extern void dq_worker_reconnected(void);
extern DqWorkerSlot *dq_worker_mine(void);	/* NULL: this is no worker */

/* Before leaving: which state the slot is left in and when the next process
 * may come; forget: no process is wanted under this key any more. */
extern void dq_worker_leaving(const char *state, int respawn_ms);
extern void dq_worker_forget(void);
/* It has worked: the next process needs no backoff. */
extern void dq_worker_thrives(void);

/* Make sure there is a slot for a bridge or an executor (name: the server's, the
 * owner's); true: it is new (wake the launcher). */
extern bool dq_worker_want(DqRole role, Oid dboid, Oid serverid, const char *name);
/* No process is to be started any more for this slot. */
extern void dq_worker_unwant(DqRole role, Oid dboid, Oid serverid);
/* A look at the database is over that began when it had been poked so often. */
extern uint32 dq_database_pokes(Oid dboid);
extern void dq_database_looked(Oid dboid, uint32 pokes, bool here);
extern bool dq_database_stopped(Oid dboid);

/* The process-independent entry of a database, NULL: none (make: or full).
 * Call with the lock of DqShared held (exclusively to make one). */
extern DqDatabase *dq_database_entry(Oid dboid, bool make);

/* ---- wake.c: telling processes that there is something to do --------------- */

/*
 * Set the latch of the bridge for (dboid, serverid); InvalidOid server: all of
 * the database. Returns whether there was one. If none is even wanted, the
 * launcher is asked to look at the database, so that a lost poke heals with the
 * next commit. Safe in a commit callback when dq_shared() was called before in
 * the same process: no error.
 */
extern bool dq_wake_bridge(Oid dboid, Oid serverid);
/* A transaction has ended that may leave holds behind; no error. Moves the count
 * that bridges compare, wakes nobody. */
extern void dq_note_rollback(void);
extern uint64 dq_rollbacks(void);
/* All processes of the database: something has changed for each. */
extern void dq_wake_workers(Oid dboid);
/* Set the latch of an owner's executor. */
extern void dq_wake_executor(Oid dboid, Oid owner);
extern bool dq_bridge_alive(Oid dboid, Oid serverid);	/* pid != 0 */
/* A launcher that serves this database (all databases, or this one). */
extern bool dq_launcher_alive(Oid dboid);
extern void dq_wake_launcher(void);

/* Have the launcher look at a database: now, or when this transaction commits
 * (CREATE EXTENSION, CREATE SERVER). */
extern void dq_poke(Oid dboid);
extern void dq_poke_at_commit(void);

/* ---- pollers.c: who waits for the ready list of a shard --------------------- */

/*
 * Those who wait for one shard form a queue, in order of their coming. One of them,
 * the watcher, asks Redis; what has arrived is told to as many as it is enough for.
 * A process leaves by itself when it exits; after an error its caller must see to it.
 */
extern int	dq_poller_enter(int32 shard);	/* a seat, -1: no room */
extern void dq_poller_leave(int seat);
/* Has it been told that something is there? Forgets it. */
extern bool dq_poller_is_woken(int seat);
/* Become the watcher of its shard, unless there is one. */
extern bool dq_poller_watches(int seat);
/* So many elements are there. Own seats do not count. */
extern void dq_pollers_wake(int32 shard, int64 elements);

/* ---- register.c: how PostgreSQL starts our processes ------------------------- */

struct BackgroundWorkerHandle;

extern void dq_register_static_launcher(void);	/* from _PG_init */
/* NULL: no free slot of max_worker_processes */
extern struct BackgroundWorkerHandle *dq_register_launcher(Oid dboid);
extern struct BackgroundWorkerHandle *dq_register_executor(Oid dboid, Oid owner,
														   const char *database,
														   const char *owner_name);
extern struct BackgroundWorkerHandle *dq_register_bridge(Oid dboid, Oid serverid,
														 const char *database,
														 const char *server);

/* ---- lend.c: permissions for claims, see DqDelivery ------------------------ */

typedef enum DqLendState
{
	DQ_LEND_CLOSED,				/* nothing may be sent */
	DQ_LEND_NONE,
	DQ_LEND_STALE,				/* one was given too long ago */
	DQ_LEND_GRANTED
} DqLendState;

/* The executor: is there one? Session and floor to use (PO 7). */
extern DqLendState dq_lend_get(Oid dboid, int32 shard, char *session, int64 *floor);
/* Use it up; false: it is gone. unused: only ask for another. */
extern bool dq_lend_take(Oid dboid, int32 shard, bool unused);
extern void dq_lend_want(Oid dboid, int32 shard);
/* How the claim has ended: the version seen and the next due instant; -1: unknown */
extern void dq_lend_answered(Oid dboid, int32 shard, const char *session, int64 version,
							 int64 next_due, int64 in_flight);
/* The bridge: give one if there is reason to; true: the executor should wake. *answered
 * and *next_due: what the last answer has said. */
extern bool dq_lend_give(Oid dboid, int32 shard, bool may, bool due, uint64 *answered,
						 int64 *next_due, bool *outstanding);
extern void dq_delivery_parked(Oid dboid, int32 shard, const char *reason);

/* ---- stats.c: published state of shards --------------------------------- */

typedef struct DqShardKey
{
	Oid			dboid;
	int32		shard;			/* dq_shards.no */
} DqShardKey;

/*
 * What executors say of a shard of a queue with a sink, and how bridge and executor
 * agree on claims: the bridge gives permission for one claim at a time, when all that
 * was committed before is in Redis; what was given and not taken may be taken back.
 */
typedef struct DqDelivery
{
	int64		delivered,		/* counters since the shared memory was made */
				failed,
				retried,
				dead;
	int64		in_flight;		/* tasks that are lent at the moment */
	int64		lag_us;			/* lateness of the newest batch */
	char		parked[DQ_ERROR_LEN];	/* why tasks wait, "" they do not */
	TimestampTz parked_at;
	/* permissions */
	bool		open;			/* the shard is thawed, not paused, not behind */
	bool		wanted;			/* the executor would like one, due tasks or not */
	uint64		given;
	uint64		taken;
	uint64		answered;		/* claims whose end is known */
	TimestampTz given_at;		/* or renewed */
	TimestampTz taken_at;
	int64		next_due;		/* ms, as the last claim's answer said */
} DqDelivery;

/*
 * Written by the bridge (and by backends that relay themselves), read by
 * dq_stats and by backends. All numbers are as of seen_at.
 */
typedef struct DqShardStats
{
	DqShardKey	key;
	/* what Redis said last */
	int64		pending,
				held,
				ready,
				quarantined;
	int64		lent;			/* tasks of a batch that PostgreSQL has */
	int64		next_due;		/* ms, INT64_MAX: none */
	int64		overdue;
	int64		clock_skew_us;	/* database clock minus Redis clock */
	TimestampTz seen_at;		/* 0: never */
	/* protocol: for PO 7 (session, floor) */
	char		session[20];	/* "" : none */
	int64		floor;
	uint32		epoch;			/* moves when the session is taken up again */
	int			writing;		/* backends that write a row relying on a hold */
	uint64		rollbacks;		/* dq_rollbacks() before all that had ended was put back */
	/* the relay's position: transactions before this xid are in Redis */
	uint64		relayed_xmin;
	/* counters since the shared memory was made */
	int64		offered,
				relayed,
				transferred,
				delivered,
				removed,
				rescheduled,
				replayed,
				remove_scans;
	int64		lag_us;			/* lateness of the newest transferred task */
	char		state[16];		/* running, paused, parked, redis_down,
								 * data_loss, not_owner, no_worker */
	char		last_error[DQ_ERROR_LEN];
	TimestampTz last_error_at;
	char		warnings[DQ_ERROR_LEN];
	char		owner_source[DQ_SOURCE_LEN + 1];
	char		owner_host[64];
	int64		lease_until;	/* ms since 1970, Redis clock; 0 unknown */
	bool		owner_lives;	/* another place renews the lease of this source */
	DqDelivery	delivery;		/* not the bridge's, but for its permissions */
} DqShardStats;

/*
 * PO 7: session and floor of a shard, shared by the bridge and by backends: the
 * floor is the highest version seen in any reply. false: no session yet.
 */
extern bool dq_session_get(Oid dboid, int32 shard, char *session, int64 *floor,
						   uint32 *epoch);
/*
 * PO 7: a backend is about to write a row that relies on a hold of this session.
 * false: the bridge has opened another one meanwhile, or has come back to this one
 * over a new connection: the hold may be lost, nothing may be written. Else dq_session_written() must follow, also after an error.
 */
extern bool dq_session_writing(Oid dboid, int32 shard, const char *session, uint32 epoch);
/* The bridge has lost its connection and comes back to the session it had. */
extern void dq_session_resumed(Oid dboid, int32 shard);
extern void dq_session_written(Oid dboid, int32 shard);
/* The bridge: is such a row being written? After it has published its session. */
extern bool dq_session_is_written(Oid dboid, int32 shard);
/* A reply of that session showed this version. */
extern void dq_session_note(Oid dboid, int32 shard, const char *session, int64 version);
/* Copy out; false: nothing published yet. */
extern bool dq_stats_get(Oid dboid, int32 shard, DqShardStats *out);
/* Lock exclusively for an update (creates); then dq_stats_release. Short. */
extern DqShardStats *dq_stats_lock(Oid dboid, int32 shard);
extern void dq_stats_release(DqShardStats *entry);
/* Add to one counter, by offset: DQ_COUNT(shard, removed, 1). */
extern void dq_stats_add(Oid dboid, int32 shard, size_t offset, int64 n);
#define DQ_COUNT(shard, field, n) \
	dq_stats_add(MyDatabaseId, (shard), offsetof(DqShardStats, field), (n))
extern void dq_stats_forget_database(Oid dboid);

#endif							/* DQ_SHARED_H */
