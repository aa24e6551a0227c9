/*
 * catalogs.c
 *	  Which shards a server has: those of its queues in the catalogs, and those of
 *	  dropped ones until what was committed for them is in Redis. Reads without a
 *	  lock on any queue. Called by bridge.c when an invalidation has come.
 */
#include "postgres.h"

#include "compat.h"
#include "relay/relay_private.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

static bool dirty = true;
static Oid	pauses_relid = InvalidOid;
static Oid	source_relid = InvalidOid;

static void
syscache_callback(Datum arg, int cacheid, uint32 hashvalue)
{
	dirty = true;
}

static void
relcache_callback(Datum arg, Oid relid)
{
	if (relid == InvalidOid || relid == pauses_relid || relid == source_relid)
		dirty = true;
}

static void
register_callbacks(void)
{
	static bool done = false;

	if (done)
		return;
	CacheRegisterSyscacheCallback(FOREIGNTABLEREL, syscache_callback, (Datum) 0);
	CacheRegisterSyscacheCallback(FOREIGNSERVEROID, syscache_callback, (Datum) 0);
	CacheRegisterSyscacheCallback(USERMAPPINGOID, syscache_callback, (Datum) 0);
	CacheRegisterSyscacheCallback(AUTHOID, syscache_callback, (Datum) 0);
	CacheRegisterRelcacheCallback(relcache_callback, (Datum) 0);
	done = true;
}

/*
 * Messages are taken at the start of a transaction, and there can be none unless
 * some transaction has ended.
 */
bool
dq_catalogs_changed(DqBridge *bridge)
{
	uint64		completions;

	register_callbacks();
	completions = dq_completion_count();
	if (!bridge->looked || completions != bridge->completions)
	{
		dq_bridge_begin(bridge);
		AcceptInvalidationMessages();
		dq_bridge_end(bridge);
		bridge->completions = completions;
		if (!bridge->looked)
			dirty = true;
		bridge->looked = true;
	}
	return dirty;
}

static DqShard *
find_shard(DqBridge *bridge, int32 no)
{
	ListCell   *lc;

	foreach(lc, bridge->shards)
	{
		DqShard    *shard = lfirst(lc);

		if (shard->no == no)
			return shard;
	}
	return NULL;
}

DqShard *
dq_shard_by_channel(DqBridge *bridge, const char *channel, size_t len)
{
	ListCell   *lc;

	foreach(lc, bridge->shards)
	{
		DqShard    *shard = lfirst(lc);
		const DqArg *key = &shard->keys.key[DQ_KEY_CHANNEL];

		if (key->len == len && memcmp(key->data, channel, len) == 0)
			return shard;
	}
	return NULL;
}

static DqShard *
make_shard(DqBridge *bridge, int32 no, const char *name)
{
	MemoryContext context = AllocSetContextCreate(bridge->context, "dq_bridge shard",
												  ALLOCSET_SMALL_SIZES);
	MemoryContext old = MemoryContextSwitchTo(context);
	DqShard    *shard = palloc0(sizeof(DqShard));

	shard->context = context;
	shard->no = no;
	shard->name = pstrdup(name);
	dq_keys_make(&shard->keys, shard->name);
	shard->snapshots = AllocSetContextCreate(context, "dq_bridge snapshots",
											 ALLOCSET_SMALL_SIZES);
	shard->next_due = PG_INT64_MAX;
	shard->floor = -1;
	if (!dq_stats_get(MyDatabaseId, no, &shard->stats))
		memset(&shard->stats, 0, sizeof(shard->stats));
	shard->stats.next_due = PG_INT64_MAX;
	MemoryContextSwitchTo(bridge->context);
	bridge->shards = lappend(bridge->shards, shard);
	MemoryContextSwitchTo(old);
	return shard;
}

static void
define_shard(DqShard *shard, const DqQueue *queue, bool paused)
{
	if (shard->producer != queue->producer)
		dq_shard_forget(shard, DQ_SHARD_UNKNOWN);
	shard->relid = queue->relid;
	shard->producer = queue->producer;
	shard->index = queue->index;
	shard->destination = queue->destination;
	shard->paused = paused;
	shard->seen_in_catalog = true;
	shard->publish = true;
}

static bool
same_target(const DqTarget *a, const DqTarget *b)
{
#define SAME(field) \
	((a->field == NULL) == (b->field == NULL) && \
	 (a->field == NULL || strcmp(a->field, b->field) == 0))
	return a->umid == b->umid && a->port == b->port && a->database == b->database &&
		a->connect_timeout == b->connect_timeout &&
		a->command_timeout == b->command_timeout &&
		SAME(host) && SAME(socket) && SAME(username) && SAME(password);
#undef SAME
}

static void
set_target(DqBridge *bridge, const DqTarget *target)
{
	MemoryContext old;

	if (bridge->target_context && same_target(&bridge->target, target))
		return;
	dq_bridge_reset(bridge);
	if (bridge->target_context)
		MemoryContextDelete(bridge->target_context);
	bridge->target_context = AllocSetContextCreate(bridge->context, "dq_bridge target",
												   ALLOCSET_SMALL_SIZES);
	old = MemoryContextSwitchTo(bridge->target_context);
	bridge->target = *target;
#define KEEP(field) \
	bridge->target.field = target->field ? pstrdup(target->field) : NULL
	KEEP(server);
	KEEP(host);
	KEEP(socket);
	KEEP(username);
	KEEP(password);
#undef KEEP
	MemoryContextSwitchTo(old);
}

/* Nothing left to send for a dropped queue? */
static bool
is_drained(const DqShard *shard)
{
	return shard->state == DQ_SHARD_OPEN && shard->batch == NULL && shard->looked &&
		shard->pages_in_flight == 0 && !shard->transfer_in_flight &&
		!shard->other_in_flight;
}

void
dq_bridge_catalogs(DqBridge *bridge)
{
	const DqSource *source;
	DqServer   *server = NULL;
	Oid			mapping_owner = InvalidOid;
	bool		mapped = false;
	List	   *queues;
	ListCell   *lc;

	dq_bridge_begin(bridge);
	dirty = false;				/* a message from here on sets it again */
	pauses_relid = dq_extension_relation("dq_pauses");
	source_relid = dq_extension_relation("dq_source");

	source = dq_source_get(true);
	if (strcmp(bridge->source, source->id) != 0 || bridge->node != source->node)
	{
		strlcpy(bridge->source, source->id, sizeof(bridge->source));
		bridge->node = source->node;
		foreach(lc, bridge->shards)
		{
			DqShard    *shard = lfirst(lc);

			shard->lease_elsewhere = false;
			dq_shard_forget(shard, DQ_SHARD_UNKNOWN);
		}
	}

	foreach(lc, bridge->shards)
	{
		DqShard    *shard = lfirst(lc);

		shard->seen_in_catalog = false;
		/* dq_adopt may have changed whose it is */
		if (shard->state == DQ_SHARD_NOT_OWNER)
			shard->status_at = 0;
	}

	queues = dq_queue_list(bridge->serverid);
	foreach(lc, queues)
	{
		DqQueue    *queue = dq_queue_get_noerror(lfirst_oid(lc));
		bool		paused;
		int			i;

		if (queue == NULL)
			continue;
		/* one connection for all: of the first owner who has a mapping */
		if (!OidIsValid(mapping_owner) || !mapped)
		{
			DqServer   *owners = dq_server_get(bridge->serverid, queue->owner, true);

			mapping_owner = queue->owner;
			mapped = owners && OidIsValid(owners->target.umid);
		}
		dq_shards_resolve(queue);
		paused = dq_queue_is_paused(queue);
		for (i = 0; i < queue->nshards; i++)
		{
			DqShard    *shard = find_shard(bridge, queue->shard_no[i]);

			if (shard == NULL)
			{
				char	   *name = dq_shard_name(queue->name, queue->nshards, i);

				shard = make_shard(bridge, queue->shard_no[i], name);
			}
			define_shard(shard, queue, paused);
		}
	}

	/* shards without a table: what was committed for them is still sent */
	foreach(lc, dq_shards_list(bridge->serverid))
	{
		DqShardRow *row = lfirst(lc);
		DqShard    *shard = find_shard(bridge, row->no);

		if (shard == NULL)
		{
			shard = make_shard(bridge, row->no, row->name);
			shard->index = row->index;
		}
		if (!shard->seen_in_catalog)
			shard->relid = InvalidOid;
	}

	server = dq_server_get(bridge->serverid,
						   OidIsValid(mapping_owner) ? mapping_owner : GetUserId(), true);
	bridge->gone = server == NULL;
	if (server)
	{
		dq_server_check_usable(server);
		bridge->scan_interval = server->scan_interval;
		bridge->replay_window = server->replay_window;
		if (bridge->server_name)
			pfree(bridge->server_name);
		bridge->server_name = MemoryContextStrdup(bridge->context, server->name);
		set_target(bridge, &server->target);
	}
	dq_bridge_end(bridge);

	foreach(lc, bridge->shards)
	{
		DqShard    *shard = lfirst(lc);

		if (!OidIsValid(shard->relid) && !shard->seen_in_catalog && is_drained(shard))
		{
			dq_batch_free(shard);
			bridge->shards = foreach_delete_current(bridge->shards, lc);
			MemoryContextDelete(shard->context);
		}
	}
	bridge->subscribed = false;
}
