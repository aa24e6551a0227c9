/*
 * socket.c
 *	  Non-blocking sockets and the one place where this room waits.
 *
 *	  Nobody in here sleeps on anything but MyLatch together with the socket, and
 *	  never for longer than a second, so that a cancel, a timeout, a shutdown or a
 *	  dropped database is acted upon whatever the server does. Called by
 *	  connection.c and command.c.
 */
#include "postgres.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/un.h>
#include <unistd.h>

#include "compat.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "portability/instr_time.h"
#include "redis/redis_private.h"
#include "storage/fd.h"
#include "storage/latch.h"
#include "utils/wait_event.h"

#define LONGEST_WAIT_MS	1000
/* a unix socket whose backlog is full cannot be waited for */
#define BACKLOG_WAIT_MS	10

/* A dead peer of an idle connection is noticed after 15 + 3 * 5 seconds. */
#define KEEPALIVE_IDLE		15
#define KEEPALIVE_INTERVAL	5
#define KEEPALIVE_COUNT		3

void		(*dq_redis_wait_hook) (void) = NULL;

/* the latch was reset in here and its owner does not know yet */
static bool latch_owed = false;

int64
dq_clock_ms(void)
{
	instr_time	now;

	INSTR_TIME_SET_CURRENT(now);
	return (int64) INSTR_TIME_GET_MILLISEC(now);
}

/*
 * Wait for the socket (PGINVALID_SOCKET: for time to pass). A wait never ends
 * because of a signal or the latch; but both are acted upon.
 */
bool
dq_socket_wait(pgsocket sock, int events, int64 deadline)
{
	static uint32 wait_event = 0;

	if (wait_event == 0)
		wait_event = DqWaitEventNew("DqBridgeRedis");

	if (sock == PGINVALID_SOCKET)
		events = 0;

	for (;;)
	{
		int64		left = deadline - dq_clock_ms();
		int			rc;

		rc = WaitLatchOrSocket(MyLatch,
							   WL_LATCH_SET | WL_EXIT_ON_PM_DEATH | WL_TIMEOUT | events,
							   sock,
							   (long) Max(0, Min(left, LONGEST_WAIT_MS)),
							   wait_event);
		if (rc & WL_LATCH_SET)
		{
			ResetLatch(MyLatch);
			latch_owed = true;
		}
		CHECK_FOR_INTERRUPTS();
		if (dq_redis_wait_hook != NULL)
			dq_redis_wait_hook();

		if (rc & events)
			return true;
		/* a set latch may have hidden the socket: look once more */
		if (left <= 0 && (rc & WL_LATCH_SET) == 0)
			return false;
	}
}

/*
 * The latch may have been set for the loop that called us (a commit, a reload),
 * not for us: hand it back. Only here, after the last wait of an exchange, and not
 * in the wait itself, which would then never sleep again.
 */
void
dq_socket_wait_done(void)
{
	if (latch_owed)
	{
		latch_owed = false;
		SetLatch(MyLatch);
	}
}

void
dq_socket_close(DqRedis *redis)
{
	if (redis->sock == PGINVALID_SOCKET)
		return;
	close(redis->sock);
	redis->sock = PGINVALID_SOCKET;
	ReleaseExternalFD();
}

static void
set_socket_options(pgsocket sock, int family)
{
	int			on = 1;

	if (family == AF_UNIX)
		return;

	/*
	 * Failures do not matter: without them the connection is slower, or a dead
	 * peer is noticed later.
	 */
	(void) setsockopt(sock, IPPROTO_TCP, TCP_NODELAY, (char *) &on, sizeof(on));
	(void) setsockopt(sock, SOL_SOCKET, SO_KEEPALIVE, (char *) &on, sizeof(on));
#ifdef TCP_KEEPIDLE
	{
		int			idle = KEEPALIVE_IDLE;
		int			interval = KEEPALIVE_INTERVAL;
		int			count = KEEPALIVE_COUNT;

		(void) setsockopt(sock, IPPROTO_TCP, TCP_KEEPIDLE, (char *) &idle, sizeof(idle));
		(void) setsockopt(sock, IPPROTO_TCP, TCP_KEEPINTVL, (char *) &interval, sizeof(interval));
		(void) setsockopt(sock, IPPROTO_TCP, TCP_KEEPCNT, (char *) &count, sizeof(count));
	}
#endif
}

/*
 * Try one address until `deadline`. Returns 0 with redis->sock connected, else an
 * errno with it closed; ETIMEDOUT also for our own deadline.
 */
static int
try_address(DqRedis *redis, const DqAddress *address, int64 deadline)
{
	int			error = 0;
	socklen_t	len = sizeof(error);

	/* one descriptor more than fd.c knows of: it must count it */
	if (!AcquireExternalFD())
		ereport(ERROR,
				(errcode(ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION),
				 errmsg("could not connect to Redis server \"%s\"",
						redis->target.server),
				 errdetail("There are too many open files on the local server."),
				 errhint("Raise the server's max_files_per_process and/or \"ulimit -n\" limits.")));

	redis->sock = socket(address->addr.ss_family, SOCK_STREAM, 0);
	if (redis->sock == PGINVALID_SOCKET)
	{
		error = errno;
		ReleaseExternalFD();
		return error;
	}

	if (!pg_set_noblock(redis->sock) ||
		fcntl(redis->sock, F_SETFD, FD_CLOEXEC) < 0)
	{
		error = errno;
		dq_socket_close(redis);
		return error;
	}
	set_socket_options(redis->sock, address->addr.ss_family);

	for (;;)
	{
		if (connect(redis->sock, (const struct sockaddr *) &address->addr,
					address->len) == 0)
			return 0;
		error = errno;
		if (error == EISCONN)
			return 0;
		/* an interrupted connect() goes on by itself */
		if (error == EINPROGRESS || error == EINTR || error == EALREADY)
			break;
		if (error == EAGAIN && address->addr.ss_family == AF_UNIX)
		{
			int64		now = dq_clock_ms();

			if (now < deadline)
			{
				(void) dq_socket_wait(PGINVALID_SOCKET, 0,
									  Min(deadline, now + BACKLOG_WAIT_MS));
				continue;
			}
			error = ETIMEDOUT;
		}
		dq_socket_close(redis);
		return error;
	}

	if (!dq_socket_wait(redis->sock, WL_SOCKET_CONNECTED, deadline))
		error = ETIMEDOUT;
	else if (getsockopt(redis->sock, SOL_SOCKET, SO_ERROR, (char *) &error, &len) < 0)
		error = errno;
	if (error != 0)
		dq_socket_close(redis);
	return error;
}

/* The addresses of a target: those of its name, or the path of its socket. */
static int
addresses_of(const DqTarget *target, DqAddress **addresses)
{
	struct sockaddr_un *un;

	if (target->socket == NULL)
		return dq_address_lookup(target, addresses);

	*addresses = palloc0(sizeof(DqAddress));
	un = (struct sockaddr_un *) &(*addresses)->addr;
	if (strlen(target->socket) >= sizeof(un->sun_path))
		ereport(ERROR,
				(errcode(ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION),
				 errmsg("could not connect to Redis server \"%s\": socket path \"%s\" is too long",
						target->server, target->socket),
				 errhint("The path of a socket has at most %d bytes.",
						 (int) sizeof(un->sun_path) - 1)));
	un->sun_family = AF_UNIX;
	strcpy(un->sun_path, target->socket);
	(*addresses)->len = offsetof(struct sockaddr_un, sun_path) +
		strlen(target->socket) + 1;
	return 1;
}

/*
 * Connect to the first address that answers. The timeout is for all of them
 * together; each gets an equal part of what is left, so that a black hole in
 * front does not hide a living one behind it. Only the resolution of the name does
 * not count, because nothing can interrupt it.
 */
void
dq_socket_open(DqRedis *redis, int64 deadline)
{
	const DqTarget *target = &redis->target;
	DqAddress  *addresses;
	int			naddresses;
	int64		before = dq_clock_ms();
	int			error = 0;
	bool		all_timed_out = true;
	StringInfoData detail;
	int			i;

	naddresses = addresses_of(target, &addresses);
	deadline += dq_clock_ms() - before;
	redis->deadline_ms = deadline;

	initStringInfo(&detail);
	for (i = 0; i < naddresses; i++)
	{
		int64		now = dq_clock_ms();
		int64		share = (deadline - now) / (naddresses - i);

		error = try_address(redis, &addresses[i], now + Max(share, 0));
		if (error == 0)
		{
			pfree(detail.data);
			pfree(addresses);
			return;
		}
		if (error != ETIMEDOUT)
			all_timed_out = false;
		appendStringInfo(&detail, "%s%s: %s", i > 0 ? "\n" : "",
						 dq_address_text(&addresses[i]), strerror(error));
	}

	if (target->socket == NULL)
		dq_address_distrust(target->host, false);
	dq_socket_wait_done();

	if (all_timed_out && dq_clock_ms() >= deadline)
		dq_redis_fail(redis, DQ_FAIL_TIMEOUT, NULL);
	if (naddresses == 1)
		dq_redis_fail(redis, DQ_FAIL_LOST, strerror(error));
	ereport(ERROR,
			(errcode(ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION),
			 errmsg("could not connect to Redis server \"%s\" at %s",
					target->server, redis->address),
			 errdetail("%s", detail.data),
			 errhint("Check that the server runs there and accepts connections.")));
}
