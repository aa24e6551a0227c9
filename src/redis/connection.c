/*
 * connection.c
 *	  Making, greeting and closing a connection.
 *
 *	  A worker owns the connections that it opens with dq_redis_open(); those that a
 *	  backend shares among its statements are kept by cache.c. At the end of the
 *	  process the kernel closes what is open.
 */
#include "postgres.h"

#include "miscadmin.h"
#include "redis/redis_private.h"
#include "utils/memutils.h"

/* ---- making and closing ---------------------------------------------------- */

DqRedis *
dq_redis_make(void)
{
	MemoryContext context = AllocSetContextCreate(TopMemoryContext,
												  "dq_bridge connection",
												  ALLOCSET_SMALL_SIZES);
	DqRedis    *redis = MemoryContextAllocZero(context, sizeof(DqRedis));

	redis->context = context;
	redis->target_context = AllocSetContextCreate(context,
												  "dq_bridge connection target",
												  ALLOCSET_SMALL_SIZES);
	redis->sock = PGINVALID_SOCKET;
	return redis;
}

void
dq_redis_disconnect(DqRedis *redis)
{
	dq_socket_close(redis);
	dq_reader_free(redis);
	if (redis->out != NULL)
		pfree(redis->out);
	redis->out = NULL;
	redis->out_pos = redis->out_len = redis->out_size = 0;
	if (redis->run_id != NULL)
		pfree(redis->run_id);
	redis->run_id = NULL;
	redis->in_flight = 0;
	redis->connecting = false;
	redis->busy = false;
	redis->stale = false;
	redis->send_errno = 0;
	redis->scripts_known = 0;
}

/*
 * Close, and raise. Wake-ups that a wait swallowed are given back first, as after
 * any other wait.
 */
void
dq_redis_fail(DqRedis *redis, DqFailure failure, const char *what)
{
	const DqTarget *target = &redis->target;
	bool		connecting = redis->connecting;
	char	   *text = what != NULL ? pstrdup(what) : NULL;

	dq_redis_disconnect(redis);
	dq_socket_wait_done();

	if (failure == DQ_FAIL_GARBAGE)
		ereport(ERROR,
				(errcode(ERRCODE_PROTOCOL_VIOLATION),
				 errmsg("Redis server \"%s\" at %s does not speak the Redis protocol",
						target->server, redis->address),
				 errdetail("%s", text),
				 errhint("Check that a Redis server without TLS listens there.")));
	if (connecting && failure == DQ_FAIL_TIMEOUT)
		ereport(ERROR,
				(errcode(ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION),
				 errmsg("could not connect to Redis server \"%s\" at %s: connect_timeout of %d ms expired",
						target->server, redis->address, target->connect_timeout),
				 errhint("Check the options of the foreign server and that Redis answers there.")));
	if (connecting)
		ereport(ERROR,
				(errcode(ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION),
				 errmsg("could not connect to Redis server \"%s\" at %s: %s",
						target->server, redis->address, text),
				 errhint("Check the options of the foreign server and that Redis runs there.")));
	if (failure == DQ_FAIL_TIMEOUT)
		ereport(ERROR,
				(errcode(ERRCODE_CONNECTION_FAILURE),
				 errmsg("Redis server \"%s\" at %s did not answer: command_timeout of %d ms expired",
						target->server, redis->address, target->command_timeout)));
	ereport(ERROR,
			(errcode(ERRCODE_CONNECTION_FAILURE),
			 errmsg("connection to Redis server \"%s\" at %s was lost: %s",
					target->server, redis->address, text)));
}

/* ---- the target ------------------------------------------------------------ */

static bool
same_string(const char *a, const char *b)
{
	if (a == NULL || b == NULL)
		return a == b;
	return strcmp(a, b) == 0;
}

bool
dq_target_same(const DqTarget *a, const DqTarget *b)
{
	return a->port == b->port &&
		a->database == b->database &&
		same_string(a->host, b->host) &&
		same_string(a->socket, b->socket) &&
		same_string(a->username, b->username) &&
		same_string(a->password, b->password);
}

static char *
copy_string(const char *str)
{
	return str != NULL ? pstrdup(str) : NULL;
}

void
dq_redis_set_target(DqRedis *redis, const DqTarget *target)
{
	MemoryContext old;
	DqTarget	copy = *target;

	/* the caller's strings may be the ones that the reset would free */
	Assert(target != &redis->target);

	MemoryContextReset(redis->target_context);
	old = MemoryContextSwitchTo(redis->target_context);
	copy.server = copy_string(target->server);
	copy.host = copy_string(target->host);
	copy.socket = copy_string(target->socket);
	copy.username = copy_string(target->username);
	copy.password = copy_string(target->password);
	redis->target = copy;
	redis->address = target->socket != NULL ?
		psprintf("socket \"%s\"", target->socket) :
		psprintf("host \"%s\", port %d", target->host, target->port);
	MemoryContextSwitchTo(old);
}

/* ---- greeting -------------------------------------------------------------- */

static void
append_words(DqRedis *redis, int n, const char *const *words)
{
	int			i;

	dq_command_begin(redis, n);
	for (i = 0; i < n; i++)
		dq_command_arg(redis, words[i], strlen(words[i]));
	dq_command_end(redis);
}

static bool
reply_begins(const DqReply *reply, const char *prefix)
{
	size_t		len = strlen(prefix);

	return reply->len >= len && memcmp(reply->str, prefix, len) == 0;
}

/*
 * The answer to AUTH. The server's text is shown only where it is known not to
 * repeat what was sent: a server that does not know AUTH answers with the beginning
 * of its arguments.
 */
static void
check_auth(DqRedis *redis, const DqReply *reply)
{
	int			sqlstate;
	bool		harmless;

	if (reply->type != DQ_REPLY_ERROR)
		return;
	sqlstate = dq_reply_sqlstate(reply);
	harmless = reply_begins(reply, "WRONGPASS") || reply_begins(reply, "NOAUTH") ||
		reply_begins(reply, "ERR invalid password") ||
		reply_begins(reply, "ERR invalid username") ||
		reply_begins(reply, "ERR Client sent AUTH") ||
		reply_begins(reply, "ERR AUTH <password> called") ||
		reply_begins(reply, "ERR wrong number of arguments");

	if (sqlstate != ERRCODE_FDW_ERROR &&
		sqlstate != ERRCODE_INVALID_PASSWORD)
		dq_reply_report(ERROR, redis, reply, NULL, NULL);

	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PASSWORD),
			 errmsg("authentication with Redis server \"%s\" failed",
					redis->target.server),
			 harmless ?
			 errdetail("%s", dq_text_from_server(reply->str, reply->len)) : 0,
			 errhint("Check the options \"username\" and \"password\" of the user mapping."),
			 errcontext("Redis server \"%s\" at %s", redis->target.server,
						redis->address)));
}

/*
 * AUTH, SELECT and a name for CLIENT LIST in one round trip. The name is also what
 * makes sure that there is a round trip: a server that refuses us says so as the
 * answer to the first command.
 */
static void
greet(DqRedis *redis)
{
	const DqTarget *target = &redis->target;
	char		database[16];
	char		name[48];
	DqReply    *reply;

	if (target->password != NULL)
	{
		if (target->username != NULL)
			append_words(redis, 3, (const char *const[])
						 {"AUTH", target->username, target->password});
		else
			append_words(redis, 2, (const char *const[])
						 {"AUTH", target->password});
	}
	if (target->database != 0)
	{
		snprintf(database, sizeof(database), "%d", target->database);
		append_words(redis, 2, (const char *const[])
					 {"SELECT", database});
	}
	snprintf(name, sizeof(name), "dq_bridge:%d", MyProcPid);
	append_words(redis, 3, (const char *const[])
				 {"CLIENT", "SETNAME", name});

	if (target->password != NULL)
	{
		reply = dq_redis_next(redis);
		check_auth(redis, reply);
		dq_reply_free(reply);
	}
	if (target->database != 0)
	{
		reply = dq_redis_next(redis);
		if (reply->type == DQ_REPLY_ERROR &&
			dq_reply_sqlstate(reply) == ERRCODE_FDW_ERROR)
			ereport(ERROR,
					(errcode(ERRCODE_FDW_ERROR),
					 errmsg("Redis server \"%s\" has no database %d",
							target->server, target->database),
					 errdetail("%s", dq_text_from_server(reply->str, reply->len)),
					 errhint("Check the option \"database\" of the foreign server."),
					 errcontext("Redis server \"%s\" at %s", target->server,
								redis->address)));
		if (reply->type == DQ_REPLY_ERROR)
			dq_reply_report(ERROR, redis, reply, NULL, NULL);
		dq_reply_free(reply);
	}

	reply = dq_redis_next(redis);
	if (reply->type == DQ_REPLY_ERROR)
	{
		int			sqlstate = dq_reply_sqlstate(reply);

		/* that the name is refused does not matter */
		if (sqlstate == ERRCODE_INVALID_PASSWORD ||
			sqlstate == ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION)
			dq_reply_report(ERROR, redis, reply, NULL, NULL);
	}
	dq_reply_free(reply);
}

void
dq_redis_connect(DqRedis *redis)
{
	MemoryContext old;
	MemoryContext scratch;

	Assert(redis->sock == PGINVALID_SOCKET);

	scratch = AllocSetContextCreate(redis->context, "dq_bridge connecting",
									ALLOCSET_SMALL_SIZES);
	old = MemoryContextSwitchTo(scratch);
	PG_TRY();
	{
		redis->connecting = true;
		redis->invalidated = false;
		dq_socket_open(redis, dq_clock_ms() + redis->target.connect_timeout);
		dq_reader_create(redis);
		greet(redis);
		if (dq_reader_has_data(redis))
			dq_redis_fail(redis, DQ_FAIL_GARBAGE, "A reply came that nobody asked for.");
		redis->connecting = false;
	}
	PG_CATCH();
	{
		dq_redis_disconnect(redis);
		MemoryContextSwitchTo(old);
		MemoryContextDelete(scratch);
		PG_RE_THROW();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(old);
	MemoryContextDelete(scratch);
}

/* ---- connections of the caller's own -------------------------------------- */

DqRedis *
dq_redis_open(const DqTarget *target)
{
	DqRedis    *redis = dq_redis_make();

	PG_TRY();
	{
		dq_redis_set_target(redis, target);
		dq_redis_connect(redis);
	}
	PG_CATCH();
	{
		dq_redis_close(redis);
		PG_RE_THROW();
	}
	PG_END_TRY();
	return redis;
}

void
dq_redis_close(DqRedis *redis)
{
	if (redis == NULL)
		return;
	dq_redis_disconnect(redis);
	MemoryContextDelete(redis->context);
}

/* ---- questions about a connection ------------------------------------------ */

bool
dq_redis_is_dead(const DqRedis *redis)
{
	return redis->sock == PGINVALID_SOCKET || redis->busy;
}

int
dq_redis_socket(const DqRedis *redis)
{
	return redis->sock;
}

int
dq_redis_in_flight(const DqRedis *redis)
{
	return redis->in_flight;
}

bool
dq_redis_wants_write(const DqRedis *redis)
{
	return redis->out_len > redis->out_pos && redis->send_errno == 0;
}

/*
 * Which server process answers: after a restart, or when a name leads to another
 * machine, it is a different one. "" when INFO is forbidden.
 */
const char *
dq_redis_run_id(DqRedis *redis)
{
	static const char label[] = "run_id:";
	DqReply    *reply;
	const char *found = NULL;
	size_t		len = 0;

	if (redis->run_id != NULL)
		return redis->run_id;

	append_words(redis, 2, (const char *const[])
				 {"INFO", "server"});
	reply = dq_redis_next(redis);
	/* the parser ends strings with a zero byte */
	if (reply->type == DQ_REPLY_STRING)
		found = strstr(reply->str, label);
	if (found != NULL)
	{
		found += strlen(label);
		len = strcspn(found, "\r\n");
	}
	redis->run_id = MemoryContextAlloc(redis->context, len + 1);
	memcpy(redis->run_id, found != NULL ? found : "", len);
	redis->run_id[len] = '\0';
	dq_reply_free(reply);
	return redis->run_id;
}
