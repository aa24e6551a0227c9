/*
 * redis.h
 *	  The room that speaks Redis. Everything of hiredis is behind it; it knows
 *	  no queue. Nothing in here is called from a lower room.
 *
 *	  Every wait is a wait on MyLatch and the socket: CHECK_FOR_INTERRUPTS runs
 *	  after each wake, so cancel, statement_timeout, terminate and shutdown act
 *	  at once. A connection whose exchange was interrupted (error, cancel,
 *	  timeout) is closed and never used again, because replies would be read by
 *	  the wrong asker.
 */
#ifndef DQ_REDIS_H
#define DQ_REDIS_H

#include "postgres.h"

/* ---- where a server is -------------------------------------------------- */

/* Plain values; the queue room fills it from the catalogs. */
typedef struct DqTarget
{
	Oid			serverid;		/* foreign server, key of the cache */
	Oid			umid;			/* user mapping, InvalidOid: no credentials */
	int			lane;			/* 0; another cached connection for each number */
	const char *server;			/* server's name, for messages */
	const char *host;			/* used unless socket is set */
	int			port;
	const char *socket;			/* unix socket path or NULL */
	int			database;		/* SELECT n */
	const char *username;		/* NULL: AUTH with the password alone */
	const char *password;		/* NULL: no AUTH */
	int			connect_timeout;	/* ms, for connect + AUTH + SELECT in total
									 * (name resolution excepted) */
	int			command_timeout;	/* ms, from sending to the reply */
} DqTarget;

/* ---- connection.c ------------------------------------------------------- */

typedef struct DqRedis DqRedis;

/*
 * A connection of the caller's own (workers, subscriptions). Lives in
 * TopMemoryContext until dq_redis_close; raises 08001 (connect), 28P01, 42501,
 * 57P03 and so on. Uses AcquireExternalFD.
 */
extern DqRedis *dq_redis_open(const DqTarget *target);
extern void dq_redis_close(DqRedis *redis);		/* NULL is fine */

/*
 * The backend's cached connection for (serverid, umid, lane). A dead or invalidated
 * (ALTER/DROP SERVER, USER MAPPING) one is replaced. An idle connection that
 * the server dropped meanwhile is noticed here (a non-blocking peek) and
 * replaced without the caller seeing it. Take it anew for each exchange, and
 * never in the middle of one for the same target: replies that are still due
 * mean that an error interrupted their asker.
 */
extern DqRedis *dq_redis_get(const DqTarget *target);

/* Close a cached one now; it is connected anew when it is asked for. No error. */
extern void dq_redis_drop(DqRedis *redis);

extern bool dq_redis_is_dead(const DqRedis *redis);
extern int	dq_redis_socket(const DqRedis *redis);	/* for a WaitEventSet */
extern int	dq_redis_in_flight(const DqRedis *redis);	/* replies still due */
/* Output that the socket has not taken yet (wait for writeable as well). */
extern bool dq_redis_wants_write(const DqRedis *redis);
/* ms until command_timeout is over for the reply that is due; dq_redis_next raises it. */
extern long dq_redis_time_left(const DqRedis *redis);
/* Is there something to read, be it the end of the connection? Never waits. */
extern bool dq_redis_has_answer(DqRedis *redis);
extern const char *dq_redis_run_id(DqRedis *redis);	/* server's run_id from INFO, cached; "" if refused */

/*
 * Called at least once a second while anything in this room waits, and after
 * each wake (a worker looks here whether it should leave). May ereport.
 */
extern void (*dq_redis_wait_hook) (void);

/* ---- wait.c --------------------------------------------------------------- */

/*
 * Wait until one of n connections (0: none) has something to read, MyLatch is set, or
 * the time is over; then look with dq_redis_poll. May end early; interruptible.
 */
extern void dq_redis_wait_any(DqRedis *const *redis, int n, long timeout_ms);

/* ---- commands ----------------------------------------------------------- */

typedef struct DqArg
{
	const char *data;
	size_t		len;
} DqArg;

#define DQ_ARG(str) ((DqArg) {(str), strlen(str)})
#define DQ_ARG_LEN(ptr, n) ((DqArg) {(const char *) (ptr), (n)})

typedef enum DqReplyType
{
	DQ_REPLY_NIL,
	DQ_REPLY_STRING,			/* bulk or status */
	DQ_REPLY_INTEGER,
	DQ_REPLY_ARRAY,
	DQ_REPLY_ERROR
} DqReplyType;

/*
 * A reply. Owned by the memory context that was current when it was taken
 * (a reset callback frees what hiredis allocated), or freed early with
 * dq_reply_free.
 */
typedef struct DqReply
{
	DqReplyType type;
	int64		integer;
	const char *str;			/* STRING and ERROR: not necessarily text */
	size_t		len;
	int			nelements;		/* ARRAY */
	struct DqReply *elements;	/* array of nelements structs */
	void	   *owner;			/* private */
} DqReply;

extern void dq_reply_free(DqReply *reply);

/*
 * Pipelining: append any number of commands (they are formatted and copied, and
 * sent as far as the socket takes them without waiting), then take as many
 * replies in order. Error replies are returned as DQ_REPLY_ERROR; a connection
 * that breaks or answers garbage (08006, 08P01) or is silent for longer than
 * command_timeout (08006, the message names the timeout and its value) is
 * raised and the connection is dead.
 */
extern void dq_redis_append(DqRedis *redis, int nargs, const DqArg *args);
extern void dq_redis_flush(DqRedis *redis);	/* never waits */
extern DqReply *dq_redis_next(DqRedis *redis);	/* waits */
extern DqReply *dq_redis_poll(DqRedis *redis);	/* never waits, NULL: none yet;
												 * still enforces nothing about
												 * time: subscriptions */
/* One command, one reply; error replies are raised. */
extern DqReply *dq_redis_call(DqRedis *redis, int nargs, const DqArg *args);

/* ---- scripts.c: the registry of the Lua scripts --------------------------- */

typedef enum DqScriptId
{
	DQ_SCRIPT_APPLY,
	DQ_SCRIPT_FIND,
	DQ_SCRIPT_TRANSFER,
	DQ_SCRIPT_RANGE,
	DQ_SCRIPT_STATUS,
	DQ_SCRIPT_ENTER,
	DQ_SCRIPT_THAW,
	DQ_SCRIPT_HOLD,
	DQ_SCRIPT_HOLDS,
	DQ_SCRIPT_RESTORE,
	DQ_SCRIPT_SWEEP,
	DQ_SCRIPT_POLL,
	DQ_SCRIPT_REJECT,
	DQ_SCRIPT_TAKE,
	DQ_SCRIPT_LOOKUP,
	DQ_SCRIPT_COUNT,
	DQ_SCRIPT_SAMPLE,
	DQ_SCRIPT_READY,
	DQ_SCRIPT_BAD,
	DQ_SCRIPT_CLAIM,
	DQ_NUM_SCRIPTS
} DqScriptId;

extern const char *dq_script_name(DqScriptId id);	/* "apply" */

/*
 * EVALSHA, or EVAL when this connection has not sent the script yet (so SCRIPT
 * LOAD is never needed). Pipelined callers that get a NOSCRIPT error
 * (dq_reply_is_noscript) must send again; the next append of that script uses
 * EVAL. dq_redis_call_script does so itself, and raises other errors with
 * server and script as context.
 */
extern void dq_redis_append_script(DqRedis *redis, DqScriptId id, int nkeys,
								   const DqArg *keys, int nargs, const DqArg *args);
extern DqReply *dq_redis_call_script(DqRedis *redis, DqScriptId id, int nkeys,
									 const DqArg *keys, int nargs, const DqArg *args);
extern bool dq_reply_is_noscript(const DqReply *reply);

/*
 * Reread lua scripts from dq_bridge.script_dir (NULL or "": the compiled ones).
 * A file that is missing there falls back to the compiled script. GUC hooks
 * call it; it forgets the digests.
 */
extern bool dq_scripts_check_dir(const char *dir, char **detail);
extern void dq_scripts_use_dir(const char *dir);

/* ---- errors.c ----------------------------------------------------------- */

/* SQLSTATE for an error reply (DESIGN 10), HV000 if unknown. */
extern int	dq_reply_sqlstate(const DqReply *reply);
/* true for errors that pass by themselves (LOADING, BUSY, READONLY, OOM, ...) */
extern bool dq_reply_is_transient(const DqReply *reply);
/*
 * Is this SQLSTATE one that a Redis server or the way to it is the cause of? For who
 * catches an error and goes on.
 */
extern bool dq_error_is_redis(int sqlstate);
/* Raise or log an error reply; script may be NULL; queue may be NULL. */
extern void dq_reply_report(int elevel, const DqRedis *redis, const DqReply *reply,
							const char *script, const char *queue);

#endif							/* DQ_REDIS_H */
