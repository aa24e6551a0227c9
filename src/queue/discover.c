/*
 * discover.c
 *	  Which queues are there in a Redis? Looked for by SCAN, never KEYS: others go on
 *	  meanwhile. Called by IMPORT FOREIGN SCHEMA.
 */
#include "postgres.h"

#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"

#include "queue/queue.h"

#define PENDING_PREFIX	"redisson_delay_queue_timeout:"
#define SCAN_COUNT		"1000"	/* keys looked at in one call */
#define MAX_SHARDS		1024

/* Characters that mean something in a pattern stand for themselves. */
static void
append_literal(StringInfo buf, const char *str)
{
	for (; *str; str++)
	{
		if (strchr("*?[]\\^", *str))
			appendStringInfoChar(buf, '\\');
		appendStringInfoChar(buf, *str);
	}
}

/* Shard name whose pending set has that key; NULL: none. */
static char *
name_of_key(const char *key, size_t len)
{
	size_t		prefix = strlen(PENDING_PREFIX);
	char	   *name;
	DqKeys		keys;

	if (len <= prefix || memcmp(key, PENDING_PREFIX, prefix) != 0 ||
		memchr(key, '\0', len) != NULL)
		return NULL;
	name = pnstrdup(key + prefix, len - prefix);
	len = strlen(name);
	/* braces around a name that has none of its own are ours */
	if (name[0] == '{' && name[len - 1] == '}' && strchr(name + 1, '{') == NULL)
	{
		name[len - 1] = '\0';
		name++;
	}
	if (name[0] == '\0')
		return NULL;
	dq_keys_make(&keys, name);
	return keys.key[DQ_KEY_PENDING].len == prefix + len &&
		memcmp(keys.key[DQ_KEY_PENDING].data + prefix, key + prefix, len) == 0 ? name : NULL;
}

static int
name_cmp(const ListCell *a, const ListCell *b)
{
	return strcmp(lfirst(a), lfirst(b));
}

/* Is it the pending set of a shard, and no key of a stranger? (SCAN itself tells types
 * apart from Redis 6 on only) */
static bool
is_pending_set(DqRedis *redis, const char *name)
{
	DqKeys		keys;
	DqArg		args[2];
	DqReply    *reply;

	dq_keys_make(&keys, name);
	args[0] = DQ_ARG("TYPE");
	args[1] = keys.key[DQ_KEY_PENDING];
	reply = dq_redis_call(redis, lengthof(args), args);
	return reply->type == DQ_REPLY_STRING && strcmp(reply->str, "zset") == 0;
}

/* Names of shards whose pending sets are not empty, sorted, each once. */
static List *
find_names(DqRedis *redis, const char *prefix)
{
	MemoryContext caller = CurrentMemoryContext;
	MemoryContext page = AllocSetContextCreate(caller, "dq_bridge scan of keys",
											   ALLOCSET_DEFAULT_SIZES);
	StringInfoData pattern;
	List	   *names = NIL;
	char	   *cursor = pstrdup("0");

	initStringInfo(&pattern);
	appendStringInfoString(&pattern, PENDING_PREFIX "*");
	append_literal(&pattern, prefix);
	appendStringInfoChar(&pattern, '*');
	do
	{
		DqArg		args[6];
		DqReply    *reply;

		CHECK_FOR_INTERRUPTS();
		args[0] = DQ_ARG("SCAN");
		args[1] = DQ_ARG(cursor);
		args[2] = DQ_ARG("MATCH");
		args[3] = DQ_ARG_LEN(pattern.data, pattern.len);
		args[4] = DQ_ARG("COUNT");
		args[5] = DQ_ARG(SCAN_COUNT);
		MemoryContextReset(page);
		MemoryContextSwitchTo(page);
		reply = dq_redis_call(redis, lengthof(args), args);
		MemoryContextSwitchTo(caller);
		if (reply->type != DQ_REPLY_ARRAY || reply->nelements != 2 ||
			reply->elements[0].type != DQ_REPLY_STRING ||
			reply->elements[1].type != DQ_REPLY_ARRAY)
			ereport(ERROR,
					(errcode(ERRCODE_PROTOCOL_VIOLATION),
					 errmsg("unexpected reply of SCAN")));
		cursor = pnstrdup(reply->elements[0].str, reply->elements[0].len);
		for (int i = 0; i < reply->elements[1].nelements; i++)
		{
			const DqReply *key = &reply->elements[1].elements[i];
			char	   *name = key->type == DQ_REPLY_STRING ?
				name_of_key(key->str, key->len) : NULL;

			if (name && strncmp(name, prefix, strlen(prefix)) == 0)
				names = lappend(names, name);
		}
	} while (strcmp(cursor, "0") != 0);
	MemoryContextDelete(page);

	list_sort(names, name_cmp);
	for (int i = list_length(names) - 1; i > 0; i--)
	{
		if (strcmp(list_nth(names, i), list_nth(names, i - 1)) == 0)
			names = list_delete_nth_cell(names, i);
	}
	for (int i = list_length(names) - 1; i >= 0; i--)
	{
		if (!is_pending_set(redis, list_nth(names, i)))
			names = list_delete_nth_cell(names, i);
	}
	return names;
}

/* 'x#3' -> 'x'; NULL: not of that form */
static char *
base_of(const char *name)
{
	const char *hash = strrchr(name, '#');

	if (hash == NULL || hash == name || hash[1] == '\0' ||
		strspn(hash + 1, "0123456789") != strlen(hash + 1) || strlen(hash + 1) > 4 ||
		(hash[1] == '0' && hash[2] != '\0'))
		return NULL;
	return pnstrdup(name, hash - name);
}

/*
 * How many shards has a queue of that name? An empty one has no pending set, but all
 * that were ever served have a fence. 0: it has no shards.
 */
static int
count_shards(DqRedis *redis, const char *base)
{
	int			n = 0;

	while (n < MAX_SHARDS)
	{
		DqKeys		keys;
		DqArg		args[2];
		DqReply    *reply;

		dq_keys_make(&keys, dq_shard_name(base, 2, n));
		args[0] = DQ_ARG("EXISTS");
		args[1] = keys.key[DQ_KEY_FENCE];
		reply = dq_redis_call(redis, lengthof(args), args);
		if (reply->type != DQ_REPLY_INTEGER || reply->integer != 1)
			break;
		n++;
	}
	return n > 1 ? n : 0;
}

/* Shards of a queue that the database has a table of; 0: it has none. */
static int
known_shards(List *known, const char *name)
{
	ListCell   *lc;

	foreach(lc, known)
	{
		DqDiscovered *queue = lfirst(lc);

		if (strcmp(queue->name, name) == 0)
			return queue->nshards;
	}
	return 0;
}

List *
dq_queues_discover(DqRedis *redis, const char *prefix, List *known)
{
	List	   *names = find_names(redis, prefix);
	List	   *result = NIL;
	const char *last_base = NULL;
	int			last_shards = 0;
	ListCell   *lc;

	foreach(lc, names)
	{
		char	   *name = lfirst(lc);
		/* whoever calls a queue of its own so knows better */
		char	   *base = known_shards(known, name) == 1 ? NULL : base_of(name);
		DqDiscovered *found;

		if (base && (last_base == NULL || strcmp(base, last_base) != 0))
		{
			last_shards = known_shards(known, base);
			if (last_shards == 0)
				last_shards = count_shards(redis, base);
			else if (last_shards == 1)
				last_shards = 0;
			last_base = base;
			if (last_shards > 0)
			{
				found = palloc(sizeof(DqDiscovered));
				found->name = base;
				found->nshards = last_shards;
				result = lappend(result, found);
			}
		}
		/* a part of what is listed already */
		if (base && last_shards > 0 && atoi(name + strlen(base) + 1) < last_shards)
			continue;
		found = palloc(sizeof(DqDiscovered));
		found->name = name;
		found->nshards = 1;
		result = lappend(result, found);
	}
	return result;
}
