/*
 * command.c
 *	  Sending commands and taking replies: pipelines on one connection.
 *
 *	  Commands are formatted into an output buffer and sent as far as the socket
 *	  takes them; nothing waits before a reply is asked for. While a reply is waited
 *	  for, output that is left is sent at the same time: a server that has filled
 *	  our receive buffer may read no more before we do. Called by the queue and relay
 *	  rooms through redis.h.
 */
#include "postgres.h"

#include <sys/socket.h>

#include "miscadmin.h"
#include "redis/redis_private.h"
#include "storage/latch.h"
#include "utils/memutils.h"

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

#define FLUSH_SIZE		(64 * 1024) /* a system call is worth so much output */
#define KEEP_SIZE		(256 * 1024)	/* an empty buffer larger than this is
										 * given back */
#define RECEIVE_SIZE	(32 * 1024)

/*
 * An exchange may only go on where the last one ended: an error that jumped out of
 * one leaves replies behind that would be read by the wrong asker.
 */
static void
check_usable(DqRedis *redis)
{
	if (redis->busy)
		dq_redis_fail(redis, DQ_FAIL_LOST, "an earlier exchange was interrupted");
	if (redis->sock == PGINVALID_SOCKET)
		ereport(ERROR,
				(errcode(ERRCODE_CONNECTION_FAILURE),
				 errmsg("connection to Redis server \"%s\" at %s is closed",
						redis->target.server, redis->address)));
}

/* ---- output ---------------------------------------------------------------- */

static void
reserve(DqRedis *redis, size_t more)
{
	size_t		size;

	if (redis->out_len + more <= redis->out_size)
		return;

	/* first what is sent already */
	if (redis->out_pos > 0)
	{
		redis->out_len -= redis->out_pos;
		memmove(redis->out, redis->out + redis->out_pos, redis->out_len);
		redis->out_pos = 0;
	}
	size = Max(redis->out_size, 8192);
	while (size < redis->out_len + more)
		size *= 2;
	if (size == redis->out_size)
		return;
	if (redis->out == NULL)
		redis->out = MemoryContextAllocHuge(redis->context, size);
	else
		redis->out = repalloc_huge(redis->out, size);
	redis->out_size = size;
}

static void
put_header(DqRedis *redis, char kind, size_t n)
{
	char		text[32];
	int			len = snprintf(text, sizeof(text), "%c%zu\r\n", kind, n);

	reserve(redis, len);
	memcpy(redis->out + redis->out_len, text, len);
	redis->out_len += len;
}

void
dq_command_begin(DqRedis *redis, int nargs)
{
	check_usable(redis);
	if (redis->in_flight == 0)
		redis->progress_ms = dq_clock_ms();

	/* half a command in the buffer, should memory run out, must not be followed by
	 * another */
	redis->busy = true;
	put_header(redis, '*', nargs);
}

void
dq_command_arg(DqRedis *redis, const char *data, size_t len)
{
	put_header(redis, '$', len);
	reserve(redis, len + 2);
	if (len > 0)
		memcpy(redis->out + redis->out_len, data, len);
	redis->out_len += len;
	redis->out[redis->out_len++] = '\r';
	redis->out[redis->out_len++] = '\n';
}

void
dq_command_end(DqRedis *redis)
{
	redis->in_flight++;
	redis->busy = false;
	if (redis->out_len - redis->out_pos >= FLUSH_SIZE)
	{
		/* a loop that appends for long is to be interrupted as well */
		CHECK_FOR_INTERRUPTS();
		dq_redis_flush(redis);
	}
}

void
dq_redis_append(DqRedis *redis, int nargs, const DqArg *args)
{
	int			i;

	dq_command_begin(redis, nargs);
	for (i = 0; i < nargs; i++)
		dq_command_arg(redis, args[i].data, args[i].len);
	dq_command_end(redis);
}

/*
 * Send what the socket takes. A failure is only noted: what the server said before
 * it closed (why, perhaps) is still to be read.
 */
void
dq_redis_flush(DqRedis *redis)
{
	while (redis->sock != PGINVALID_SOCKET && dq_redis_wants_write(redis))
	{
		ssize_t		n = send(redis->sock, redis->out + redis->out_pos,
							 redis->out_len - redis->out_pos, MSG_NOSIGNAL);

		if (n >= 0)
		{
			redis->out_pos += n;
			redis->progress_ms = dq_clock_ms();
		}
		else if (errno == EAGAIN || errno == EWOULDBLOCK)
			return;
		else if (errno != EINTR)
			redis->send_errno = errno;
	}

	if (redis->out_pos == redis->out_len)
	{
		redis->out_pos = redis->out_len = 0;
		if (redis->out_size > KEEP_SIZE)
		{
			pfree(redis->out);
			redis->out = NULL;
			redis->out_size = 0;
		}
	}
}

/* ---- replies --------------------------------------------------------------- */

/* Read what is there; false: nothing yet. Raises when the connection ended. */
static bool
receive(DqRedis *redis)
{
	char		buffer[RECEIVE_SIZE];
	ssize_t		n;

	do
		n = recv(redis->sock, buffer, sizeof(buffer), 0);
	while (n < 0 && errno == EINTR);

	if (n > 0)
	{
		redis->progress_ms = dq_clock_ms();
		dq_reader_feed(redis, buffer, n);
		return true;
	}
	if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
		return false;
	if (n < 0)
		dq_redis_fail(redis, DQ_FAIL_LOST, strerror(errno));
	dq_redis_fail(redis, DQ_FAIL_LOST,
				  redis->send_errno != 0 ? strerror(redis->send_errno) :
				  "the server closed the connection");
	return false;				/* not reached */
}

/* What a complete reply means for the connection. */
static DqReply *
take(DqRedis *redis, DqReply *reply)
{
	if (redis->in_flight > 0)
		redis->in_flight--;
	if (reply->type == DQ_REPLY_ERROR)
	{
		dq_scripts_note_error(redis, reply);

		/*
		 * A master that was demoted goes on answering: let the next one ask again
		 * who is behind the name.
		 */
		if (dq_reply_sqlstate(reply) == ERRCODE_READ_ONLY_SQL_TRANSACTION)
		{
			redis->stale = true;
			dq_address_distrust(redis->target.host, true);
		}
	}
	return reply;
}

long
dq_redis_time_left(const DqRedis *redis)
{
	return (long) (redis->progress_ms + redis->target.command_timeout - dq_clock_ms());
}

DqReply *
dq_redis_next(DqRedis *redis)
{
	DqReply    *reply;

	check_usable(redis);
	if (redis->in_flight == 0)
		elog(ERROR, "no reply of Redis server \"%s\" is due", redis->target.server);

	redis->busy = true;
	while ((reply = dq_reader_reply(redis)) == NULL)
	{
		int			events = WL_SOCKET_READABLE;
		int64		deadline;

		CHECK_FOR_INTERRUPTS();
		dq_redis_flush(redis);
		if (receive(redis))
			continue;

		if (redis->send_errno != 0)
		{
			/* nothing more to be read before the end */
			dq_redis_fail(redis, DQ_FAIL_LOST, strerror(redis->send_errno));
		}
		if (dq_redis_wants_write(redis))
			events |= WL_SOCKET_WRITEABLE;
		deadline = redis->connecting ? redis->deadline_ms :
			redis->progress_ms + redis->target.command_timeout;
		if (!dq_socket_wait(redis->sock, events, deadline))
			dq_redis_fail(redis, DQ_FAIL_TIMEOUT, NULL);
	}
	redis->busy = false;
	dq_socket_wait_done();
	return take(redis, reply);
}

DqReply *
dq_redis_poll(DqRedis *redis)
{
	DqReply    *reply;

	check_usable(redis);
	dq_redis_flush(redis);
	while ((reply = dq_reader_reply(redis)) == NULL)
	{
		CHECK_FOR_INTERRUPTS();
		if (receive(redis))
			continue;
		if (redis->send_errno != 0)
			dq_redis_fail(redis, DQ_FAIL_LOST, strerror(redis->send_errno));
		return NULL;
	}
	return take(redis, reply);
}

DqReply *
dq_redis_call(DqRedis *redis, int nargs, const DqArg *args)
{
	DqReply    *reply;

	if (redis->in_flight != 0)
		elog(ERROR, "replies of Redis server \"%s\" are due", redis->target.server);
	dq_redis_append(redis, nargs, args);
	reply = dq_redis_next(redis);
	if (reply->type == DQ_REPLY_ERROR)
		dq_reply_report(ERROR, redis, reply, NULL, NULL);
	return reply;
}
