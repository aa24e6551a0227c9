/*
 * cache.c
 *	  The connections of a backend, one for each (server, user mapping, lane).
 *
 *	  They are taken with dq_redis_get(), anew for each exchange: there a connection
 *	  that was closed by the server, changed by ALTER or left in the middle of an
 *	  exchange is replaced without the caller seeing it.
 */
#include "postgres.h"

#include <sys/socket.h>

#include "redis/redis_private.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/syscache.h"

typedef struct CacheKey
{
	Oid			serverid;
	Oid			umid;
	int			lane;
} CacheKey;

typedef struct CacheEntry
{
	CacheKey	key;			/* must be first */
	DqRedis    *redis;			/* never freed, see DqRedis */
} CacheEntry;

static HTAB *cache = NULL;
static bool cache_has_invalidated = false;

/*
 * ALTER or DROP of a server or mapping; hashvalue 0: of anything. Only marked: the
 * connection may be in use by the statement that is running.
 */
static void
invalidate(Datum arg, int cacheid, uint32 hashvalue)
{
	HASH_SEQ_STATUS scan;
	CacheEntry *entry;

	hash_seq_init(&scan, cache);
	while ((entry = hash_seq_search(&scan)) != NULL)
	{
		DqRedis    *redis = entry->redis;

		if (redis == NULL || redis->sock == PGINVALID_SOCKET)
			continue;
		if (hashvalue == 0 ||
			(cacheid == FOREIGNSERVEROID && redis->server_hash == hashvalue) ||
			(cacheid == USERMAPPINGOID && redis->mapping_hash == hashvalue))
		{
			redis->invalidated = true;
			cache_has_invalidated = true;
		}
	}
}

static void
create_cache(void)
{
	HASHCTL		ctl;

	memset(&ctl, 0, sizeof(ctl));
	ctl.keysize = sizeof(CacheKey);
	ctl.entrysize = sizeof(CacheEntry);
	ctl.hcxt = TopMemoryContext;
	cache = hash_create("dq_bridge connections", 8, &ctl,
						HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
	CacheRegisterSyscacheCallback(FOREIGNSERVEROID, invalidate, (Datum) 0);
	CacheRegisterSyscacheCallback(USERMAPPINGOID, invalidate, (Datum) 0);
}

/*
 * Close what ALTER and DROP have marked, also of servers that nobody will ask for
 * again. One in the middle of an exchange is left to its owner; its own
 * dq_redis_get() finds it.
 */
static void
close_invalidated(void)
{
	HASH_SEQ_STATUS scan;
	CacheEntry *entry;

	if (!cache_has_invalidated)
		return;
	cache_has_invalidated = false;

	hash_seq_init(&scan, cache);
	while ((entry = hash_seq_search(&scan)) != NULL)
	{
		DqRedis    *redis = entry->redis;

		if (redis == NULL || !redis->invalidated)
			continue;
		if (redis->in_flight == 0 || redis->busy)
			dq_redis_disconnect(redis);
		else
			cache_has_invalidated = true;
	}
}

bool
dq_redis_has_answer(DqRedis *redis)
{
	char		c;
	ssize_t		n;

	if (redis->sock == PGINVALID_SOCKET || dq_reader_has_data(redis))
		return true;
	do
		n = recv(redis->sock, &c, 1, MSG_PEEK | MSG_DONTWAIT);
	while (n < 0 && errno == EINTR);
	return n >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
}

/*
 * Is an idle connection still good? The server may have closed it meanwhile
 * (timeout, restart, CLIENT KILL), and nothing may wait to be read.
 */
static bool
is_reusable(DqRedis *redis)
{
	return redis->sock != PGINVALID_SOCKET && !redis->busy && redis->in_flight == 0 &&
		redis->send_errno == 0 && !redis->stale && !redis->invalidated &&
		!dq_redis_has_answer(redis);
}

DqRedis *
dq_redis_get(const DqTarget *target)
{
	CacheKey	key;
	CacheEntry *entry;
	bool		found;
	DqRedis    *redis;

	if (cache == NULL)
		create_cache();
	close_invalidated();

	memset(&key, 0, sizeof(key));
	key.serverid = target->serverid;
	key.umid = target->umid;
	key.lane = target->lane;
	entry = hash_search(cache, &key, HASH_ENTER, &found);
	if (!found)
		entry->redis = NULL;
	if (entry->redis == NULL)
		entry->redis = dq_redis_make();
	redis = entry->redis;

	if (redis->sock != PGINVALID_SOCKET && dq_target_same(&redis->target, target) &&
		is_reusable(redis))
	{
		redis->target.connect_timeout = target->connect_timeout;
		redis->target.command_timeout = target->command_timeout;
		return redis;
	}

	dq_redis_disconnect(redis);
	dq_redis_set_target(redis, target);
	redis->server_hash = GetSysCacheHashValue1(FOREIGNSERVEROID,
											   ObjectIdGetDatum(target->serverid));
	redis->mapping_hash = GetSysCacheHashValue1(USERMAPPINGOID,
												ObjectIdGetDatum(target->umid));
	dq_redis_connect(redis);
	return redis;
}

void
dq_redis_drop(DqRedis *redis)
{
	dq_redis_disconnect(redis);
}
