/*
 * redis_private.h
 *	  What the files of src/redis share among themselves.
 */
#ifndef DQ_REDIS_PRIVATE_H
#define DQ_REDIS_PRIVATE_H

#include "postgres.h"

#include <sys/socket.h>

#include "redis/redis.h"

struct redisReader;

/* What goes wrong with a connection; decides SQLSTATE and message. */
typedef enum DqFailure
{
	DQ_FAIL_LOST,				/* closed, reset */
	DQ_FAIL_TIMEOUT,			/* command_timeout, or connect_timeout while
								 * connecting */
	DQ_FAIL_GARBAGE				/* not the protocol of Redis */
} DqFailure;

/*
 * A connection. The struct of a cached one stays where it is for the life of the
 * backend and is connected anew in place, so a pointer that somebody kept never
 * dangles.
 */
struct DqRedis
{
	MemoryContext context;		/* home of everything in here */
	MemoryContext target_context;	/* the strings of target */
	DqTarget	target;			/* own copy */
	char	   *address;		/* for messages: 'host "h", port 1' or 'socket "p"' */

	/* the rest is valid while sock is open */
	pgsocket	sock;			/* PGINVALID_SOCKET: dead */
	struct redisReader *reader; /* malloc'd by hiredis */
	MemoryContext reply_context;	/* of the reply being parsed, or NULL */
	char	   *run_id;			/* NULL: not asked yet */

	int			in_flight;		/* replies still due */
	bool		connecting;		/* greeting not finished: errors are 08001 */
	bool		busy;			/* inside an exchange; found set by a later call:
								 * an error jumped out of it */
	bool		stale;			/* to be replaced when idle: READONLY seen */
	int			send_errno;		/* the server takes no more output; what it said
								 * before is read first */
	int64		progress_ms;	/* when a byte went or came last */
	int64		deadline_ms;	/* of the greeting, while connecting */

	/* output not yet taken by the socket */
	char	   *out;
	size_t		out_pos;
	size_t		out_len;
	size_t		out_size;

	/* scripts this server holds, a bit each; see scripts.c */
	uint32		scripts_known;
	uint64		scripts_generation;

	/* cached connections only */
	bool		invalidated;	/* by ALTER or DROP of server or mapping */
	uint32		server_hash;
	uint32		mapping_hash;
};

/* ---- address.c ---------------------------------------------------------- */

typedef struct DqAddress
{
	struct sockaddr_storage addr;
	socklen_t	len;
} DqAddress;

/* palloc'd; 08001 if the name means nothing */
extern int	dq_address_lookup(const DqTarget *target, DqAddress **addresses);
/* what we know about that name may be outdated: ask again soon */
extern void dq_address_distrust(const char *host, bool at_once);
extern char *dq_address_text(const DqAddress *address);

/* ---- socket.c ----------------------------------------------------------- */

extern int64 dq_clock_ms(void); /* monotonic */
/* Open redis->sock before the deadline, 08001 otherwise. */
extern void dq_socket_open(DqRedis *redis, int64 deadline);
extern void dq_socket_close(DqRedis *redis);
/* Wait for WL_SOCKET_* events; false: the deadline came first. */
extern bool dq_socket_wait(pgsocket sock, int events, int64 deadline);
/* After the last wait of an exchange: give swallowed wake-ups back. */
extern void dq_socket_wait_done(void);

/* ---- connection.c ------------------------------------------------------- */

/* A dead one, in TopMemoryContext; then its target, then connect. */
extern DqRedis *dq_redis_make(void);
extern void dq_redis_set_target(DqRedis *redis, const DqTarget *target);
/* Connect in place. On error the struct is dead, and nothing is left open. */
extern void dq_redis_connect(DqRedis *redis);
/* Would the same connection be made for both? Timeouts do not count. */
extern bool dq_target_same(const DqTarget *a, const DqTarget *b);
/* Close, keeping the struct. Never raises. */
extern void dq_redis_disconnect(DqRedis *redis);
/* Close and raise. what: for DQ_FAIL_LOST and _GARBAGE, a translated text */
extern void dq_redis_fail(DqRedis *redis, DqFailure failure, const char *what);

/* ---- command.c ---------------------------------------------------------- */

/* A command is begun with its number of arguments, then each is added. */
extern void dq_command_begin(DqRedis *redis, int nargs);
extern void dq_command_arg(DqRedis *redis, const char *data, size_t len);
extern void dq_command_end(DqRedis *redis);

/* ---- reply.c ------------------------------------------------------------ */

extern void dq_reader_create(DqRedis *redis);
extern void dq_reader_free(DqRedis *redis);
/* Bytes from the server; raises 08P01 */
extern void dq_reader_feed(DqRedis *redis, const char *data, size_t len);
/* A complete reply, moved into CurrentMemoryContext; NULL: more bytes needed;
 * raises 08P01 */
extern DqReply *dq_reader_reply(DqRedis *redis);
/* Bytes that no reply has used yet */
extern bool dq_reader_has_data(const DqRedis *redis);

/* ---- scripts.c ---------------------------------------------------------- */

/* An error reply came: look whether it says something about scripts. */
extern void dq_scripts_note_error(DqRedis *redis, const DqReply *reply);

/* ---- errors.c ----------------------------------------------------------- */

/* The server's text made safe for a message: one line, valid in the database
 * encoding, of bounded length. palloc'd */
extern char *dq_text_from_server(const char *str, size_t len);

#endif							/* DQ_REDIS_PRIVATE_H */
