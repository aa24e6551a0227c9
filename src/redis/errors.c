/*
 * errors.c
 *	  Error replies: what they mean to PostgreSQL (SQLSTATE, hint), and how they
 *	  are shown.
 *
 *	  An error from inside a script looks different in each generation of Redis: up
 *	  to 6 it is wrapped ("ERR Error running script (call to f_1a2b): @user_script:7:
 *	  WRONGTYPE ..."), since 7 it comes first and the place follows ("WRONGTYPE ...
 *	  script: 1a2b, on @user_script:7."). Both mean the same here.
 */
#include "postgres.h"

#include "lib/stringinfo.h"
#include "mb/pg_wchar.h"
#include "redis/redis_private.h"
#include "settings.h"

#define MAX_SHOWN	1000		/* bytes of the server's text */

typedef struct ErrorClass
{
	const char *code;			/* first word of the reply */
	const char *text;			/* begins what follows it, NULL: anything */
	int			sqlstate;
	bool		transient;		/* passes without anybody changing a setting */
} ErrorClass;

/* The first line that fits decides. */
static const ErrorClass classes[] =
{
	{"NOAUTH", NULL, ERRCODE_INVALID_PASSWORD, false},
	{"WRONGPASS", NULL, ERRCODE_INVALID_PASSWORD, false},
	{"ERR", "invalid password", ERRCODE_INVALID_PASSWORD, false},
	{"ERR", "Client sent AUTH, but no password", ERRCODE_INVALID_PASSWORD, false},
	{"ERR", "AUTH <password> called without", ERRCODE_INVALID_PASSWORD, false},
	{"NOPERM", NULL, ERRCODE_INSUFFICIENT_PRIVILEGE, false},
	{"ERR", "ACL failure in script", ERRCODE_INSUFFICIENT_PRIVILEGE, false},
	{"ERR", "The user executing the script can't", ERRCODE_INSUFFICIENT_PRIVILEGE, false},
	{"", "ACL failure in script", ERRCODE_INSUFFICIENT_PRIVILEGE, false},
	{"", "The user executing the script can't", ERRCODE_INSUFFICIENT_PRIVILEGE, false},
	{"OOM", NULL, ERRCODE_OUT_OF_MEMORY, true},
	{"READONLY", NULL, ERRCODE_READ_ONLY_SQL_TRANSACTION, true},
	{"LOADING", NULL, ERRCODE_CANNOT_CONNECT_NOW, true},
	{"BUSY", NULL, ERRCODE_CANNOT_CONNECT_NOW, true},
	{"CLUSTERDOWN", NULL, ERRCODE_CANNOT_CONNECT_NOW, true},
	{"TRYAGAIN", NULL, ERRCODE_CANNOT_CONNECT_NOW, true},
	{"MASTERDOWN", NULL, ERRCODE_CANNOT_CONNECT_NOW, true},
	{"NOREPLICAS", NULL, ERRCODE_CANNOT_CONNECT_NOW, true},
	{"MISCONF", NULL, ERRCODE_CANNOT_CONNECT_NOW, true},
	{"UNKILLABLE", NULL, ERRCODE_CANNOT_CONNECT_NOW, true},
	{"WRONGTYPE", NULL, ERRCODE_WRONG_OBJECT_TYPE, false},
	{"DENIED", NULL, ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION, false},
	{"ERR", "max number of clients", ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION, true},
	{"NOSCRIPT", NULL, ERRCODE_FDW_ERROR, true}
};

/* ---- taking the text apart ------------------------------------------------ */

static bool
begins(const char *str, const char *prefix)
{
	return strncmp(str, prefix, strlen(prefix)) == 0;
}

/* Behind "@user_script:7: " or "user_script: 7: ", else where it was. */
static const char *
skip_place(const char *str)
{
	const char *s = str;

	if (*s == '@')
		s++;
	if (!begins(s, "user_script:"))
		return str;
	s += strlen("user_script:");
	s += strspn(s, " 0123456789");
	if (*s != ':')
		return str;
	s++;
	return s + strspn(s, " ");
}

/*
 * The error proper, without the wrappings of scripts. The parser has ended the
 * text with a zero byte; one inside it only makes it shorter here.
 */
static const char *
unwrap(const char *str)
{
	const char *inner;
	const char *next;

	if (*str == '-')
		str++;
	if (begins(str, "ERR Error running script"))
	{
		inner = strstr(str, "): ");
		if (inner == NULL)
			return str;
		str = inner + 3;
	}
	else if (begins(str, "ERR ") && skip_place(str + 4) != str + 4)
		str += 4;

	while ((next = skip_place(str)) != str)
		str = next;
	if (*str == '-')
		str++;
	return str;
}

static const ErrorClass *
classify(const DqReply *reply)
{
	const char *str = unwrap(reply->str);
	size_t		code_len = strspn(str, "ABCDEFGHIJKLMNOPQRSTUVWXYZ");
	const char *text;
	int			i;

	/* a word of capitals, else the text has no code */
	if (str[code_len] != ' ' && str[code_len] != '\0')
		code_len = 0;
	text = str + code_len;
	text += strspn(text, " ");

	for (i = 0; i < lengthof(classes); i++)
	{
		const ErrorClass *class = &classes[i];

		if (strlen(class->code) == code_len &&
			strncmp(class->code, str, code_len) == 0 &&
			(class->text == NULL || begins(text, class->text)))
			return class;
	}
	return NULL;
}

int
dq_reply_sqlstate(const DqReply *reply)
{
	const ErrorClass *class = classify(reply);

	return class != NULL ? class->sqlstate : ERRCODE_FDW_ERROR;
}

bool
dq_error_is_redis(int sqlstate)
{
	int			category = ERRCODE_TO_CATEGORY(sqlstate);

	return category == MAKE_SQLSTATE('0', '8', '0', '0', '0') ||
		category == MAKE_SQLSTATE('2', '8', '0', '0', '0') ||
		category == MAKE_SQLSTATE('H', 'V', '0', '0', '0') ||
		sqlstate == ERRCODE_CANNOT_CONNECT_NOW || sqlstate == ERRCODE_OUT_OF_MEMORY ||
		sqlstate == ERRCODE_READ_ONLY_SQL_TRANSACTION;
}

bool
dq_reply_is_transient(const DqReply *reply)
{
	const ErrorClass *class = classify(reply);

	return class != NULL && class->transient;
}

char *
dq_text_from_server(const char *str, size_t len)
{
	char	   *text;
	char	   *s;
	bool		verbatim;

	len = Min(len, MAX_SHOWN);
	/* Redis speaks UTF-8 at best; anything else would break the message */
	verbatim = GetDatabaseEncoding() == PG_UTF8;
	if (verbatim)
	{
		len = pg_encoding_mbcliplen(PG_UTF8, str, len, len);
		verbatim = pg_verify_mbstr(PG_UTF8, str, len, true);
	}

	text = pnstrdup(str, len);
	for (s = text; *s != '\0'; s++)
	{
		unsigned char c = *s;

		if (c < ' ' || c == 127)
			*s = ' ';
		else if (c > 127 && !verbatim)
			*s = '?';
	}
	return text;
}

/* ---- showing it ------------------------------------------------------------- */

/*
 * What the user may not do, in the server's words: "run the 'zadd' command",
 * "access one of the keys used as arguments".
 */
static char *
missing_right(const char *text)
{
	static const char marker[] = "permissions to ";
	const char *right = strstr(text, marker);
	const char *end;

	if (right == NULL)
	{
		if (strstr(text, "can't access") != NULL)
			return pstrdup("access a key of the script");
		return pstrdup("run a command");
	}
	right += strlen(marker);
	end = strstr(right, " script: ");
	if (end == NULL)
		end = right + strlen(right);
	while (end > right && (end[-1] == '.' || end[-1] == ' '))
		end--;
	return pnstrdup(right, end - right);
}

void
dq_reply_report(int elevel, const DqRedis *redis, const DqReply *reply,
				const char *script, const char *queue)
{
	const char *server = redis->target.server;
	char	   *detail = dq_text_from_server(reply->str, reply->len);
	const char *error = unwrap(detail);
	int			sqlstate = dq_reply_sqlstate(reply);
	const char *hint = NULL;
	char	   *message;
	StringInfoData where;

	switch (sqlstate)
	{
		case ERRCODE_INVALID_PASSWORD:
			message = psprintf("authentication with Redis server \"%s\" failed", server);
			hint = redis->target.password == NULL ?
				"Give the option \"password\", and \"username\" if there is one, in the user mapping of the queue's owner." :
				"Check the options \"username\" and \"password\" of the user mapping.";
			break;
		case ERRCODE_INSUFFICIENT_PRIVILEGE:
			message = psprintf("Redis user of server \"%s\" has no permission to %s",
							   server, missing_right(error));
			hint = "ACL SETUSER grants commands (+name), keys (~pattern) and channels (&pattern).";
			break;
		case ERRCODE_OUT_OF_MEMORY:
			message = psprintf("Redis server \"%s\" is out of memory", server);
			hint = "Raise its maxmemory, or remove what is not needed there.";
			break;
		case ERRCODE_READ_ONLY_SQL_TRANSACTION:
			message = psprintf("Redis server \"%s\" is read-only", server);
			hint = "The foreign server must lead to the master, not to a replica.";
			break;
		case ERRCODE_CANNOT_CONNECT_NOW:
			message = psprintf("Redis server \"%s\" cannot serve now", server);
			break;
		case ERRCODE_WRONG_OBJECT_TYPE:
			message = psprintf("a key in Redis server \"%s\" holds another kind of value", server);
			hint = "Another application uses the name of this queue; see the options \"queue\" and \"key_prefix\".";
			break;
		case ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION:
			message = psprintf("could not connect to Redis server \"%s\": it refused the connection",
							   server);
			hint = "See protected-mode, requirepass and maxclients of the Redis server.";
			break;
		default:
			message = psprintf("Redis server \"%s\" reported an error", server);
			if (begins(error, "ERR unknown command") ||
				begins(error, "ERR Unknown Redis command"))
				hint = "The server must be Redis 5 or later, with its commands not renamed.";
			else if (begins(error, "MOVED") || begins(error, "ASK") ||
					 begins(error, "CROSSSLOT"))
				hint = "The server is part of a cluster, but the foreign server is not declared as one.";
			else if (script != NULL && dq_script_dir != NULL && dq_script_dir[0] != '\0')
				hint = "The script may come from dq_bridge.script_dir.";
			break;
	}

	initStringInfo(&where);
	appendStringInfo(&where, "Redis server \"%s\" at %s", server, redis->address);
	if (queue != NULL)
		appendStringInfo(&where, ", queue \"%s\"", queue);
	if (script != NULL)
		appendStringInfo(&where, ", script \"%s\"", script);

	ereport(elevel,
			(errcode(sqlstate),
			 errmsg_internal("%s", message),
			 errdetail_internal("%s", detail),
			 hint != NULL ? errhint("%s", hint) : 0,
			 errcontext("%s", where.data)));
}
