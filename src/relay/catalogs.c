/*
 * catalogs.c
 *	  Which shards a server has: those of its queues in the catalogs, and those of
 *	  dropped ones until what was committed for them is in Redis. Reads without a
 *	  lock on any queue. Called by bridge.c when an invalidation has come.
 */
#include "postgres.h"

#include "compat.h"
#include "relay/relay_private.h"
#include "settings.h"

#include "access/xact.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_database.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

static bool dirty = true;
static int	node_id = -1;
static Oid	pauses_relid = InvalidOid;
static Oid	source_relid = InvalidOid;
static Oid	losses_relid = InvalidOid;

static void
syscache_callback(Datum arg, int cacheid, uint32 hashvalue)
{
	dirty = true;
}

static void
relcache_callback(Datum arg, Oid relid)
{
	if (relid == InvalidOid || relid == pauses_relid || relid == source_relid ||
		relid == losses_relid)
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
	CacheRegisterSyscacheCallback(DATABASEOID, syscache_callback, (Datum) 0);
	CacheRegisterRelcacheCallback(relcache_callback, (Datum) 0);
	done = true;
}

static void
begin(DqBridge *bridge)
{
	if (bridge->own_xact)
	{
		SetCurrentStatementStartTimestamp();
		StartTransactionCommand();
		PushActiveSnapshot(GetTransactionSnapshot());
	}
	MemoryContextSwitchTo(bridge->scratch);
}

static void
end(DqBridge *bridge)
{
	if (bridge->own_xact)
	{
		PopActiveSnapshot();
		CommitTransactionCommand();
	}
	MemoryContextSwitchTo(bridge->scratch);
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
		begin(bridge);
		AcceptInvalidationMessages();
		end(bridge);
		bridge->completions = completions;
		if (!bridge->looked)
			dirty = true;
		bridge->looked = true;
	}
	/* a new dq_bridge.node_id has to be registered before it is used much */
	if (node_id != dq_node_id)
		dirty = true;
	return dirty;
}

static DqShard *
find_shard(DqLink *link, int32 no)
{
	ListCell   *lc;

	foreach(lc, link->shards)
	{
		DqShard    *shard = lfirst(lc);

		if (shard->no == no)
			return shard;
	}
	return NULL;
}

DqShard *
dq_shard_by_channel(DqLink *link, const char *channel, size_t len)
{
	ListCell   *lc;

	foreach(lc, link->shards)
	{
		DqShard    *shard = lfirst(lc);
		const DqArg *key = &shard->keys.key[DQ_KEY_CHANNEL];

		if (key->len == len && memcmp(key->data, channel, len) == 0)
			return shard;
	}
	return NULL;
}

static DqShard *
make_shard(DqLink *link, int32 no, const char *name)
{
	MemoryContext context = AllocSetContextCreate(link->context, "dq_bridge shard",
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
	shard->heard_due = PG_INT64_MAX;
	shard->floor = -1;
	if (!dq_stats_get(MyDatabaseId, no, &shard->stats))
		memset(&shard->stats, 0, sizeof(shard->stats));
	shard->stats.next_due = PG_INT64_MAX;
	MemoryContextSwitchTo(link->context);
	link->shards = lappend(link->shards, shard);
	MemoryContextSwitchTo(old);
	return shard;
}

static void
drop_shard(DqLink *link, DqShard *shard)
{
	dq_batch_free(shard);
	link->shards = list_delete_ptr(link->shards, shard);
	MemoryContextDelete(shard->context);
}

/*
 * A session that is logged in as the owner delivers. Where he may not log in, his
 * queues wait, and say so.
 */
static void
want_executor(DqShard *shard)
{
	HeapTuple	tuple = SearchSysCache1(AUTHOID, ObjectIdGetDatum(shard->owner));
	Form_pg_authid role;
	char	   *reason = NULL;

	if (!HeapTupleIsValid(tuple))
		return;
	role = (Form_pg_authid) GETSTRUCT(tuple);
#ifdef DQ_EXECUTOR_NEEDS_LOGIN
	if (!role->rolcanlogin)
		reason = psprintf("owner \"%s\" is not permitted to log in", NameStr(role->rolname));
#endif
	if (reason == NULL && !role->rolsuper && !dq_may_connect(MyDatabaseId, shard->owner))
		reason = psprintf("owner \"%s\" may not connect to this database",
						  NameStr(role->rolname));
	if (reason)
	{
		dq_worker_unwant(DQ_ROLE_EXECUTOR, MyDatabaseId, shard->owner);
		dq_delivery_parked(MyDatabaseId, shard->no, reason);
	}
	else if (dq_worker_want(DQ_ROLE_EXECUTOR, MyDatabaseId, shard->owner,
							NameStr(role->rolname)))
		dq_wake_launcher();
	else
		dq_wake_executor(MyDatabaseId, shard->owner);
	ReleaseSysCache(tuple);
}

static void
define_shard(DqShard *shard, const DqQueue *queue, bool paused)
{
	if (shard->producer != queue->producer)
		dq_shard_forget(shard, DQ_SHARD_UNKNOWN);
	shard->relid = queue->relid;
	shard->producer = queue->producer;
	shard->index = queue->index;
	if (shard->destination == DQ_DEST_SINK && queue->destination != DQ_DEST_SINK)
		dq_delivery_parked(MyDatabaseId, shard->no, "");
	shard->destination = queue->destination;
	shard->owner = queue->owner;
	if (queue->destination == DQ_DEST_SINK && !queue->producer)
		want_executor(shard);
	shard->paused = paused;
	shard->stop_on_loss = queue->stop_on_loss;
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
set_target(DqLink *link, const DqTarget *target)
{
	MemoryContext old;

	if (link->target_context && same_target(&link->target, target))
		return;
	dq_link_reset(link);
	if (link->target_context)
		MemoryContextDelete(link->target_context);
	link->target_context = AllocSetContextCreate(link->context, "dq_bridge target",
												   ALLOCSET_SMALL_SIZES);
	old = MemoryContextSwitchTo(link->target_context);
	link->target = *target;
#define KEEP(field) \
	link->target.field = target->field ? pstrdup(target->field) : NULL
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

static void
set_source(DqLink *link, const DqSource *source)
{
	ListCell   *lc;
	bool		other = strcmp(link->source, source->id) != 0 || link->node != source->node;

	strlcpy(link->source, source->id, sizeof(link->source));
	link->node = source->node;
	foreach(lc, link->shards)
	{
		DqShard    *shard = lfirst(lc);

		shard->seen_in_catalog = false;
		if (other)
		{
			shard->lease_elsewhere = false;
			shard->lease_seen = 0;
			shard->marking.loaded = false;
			shard->floor = -1;
			dq_shard_forget(shard, DQ_SHARD_UNKNOWN);
			dq_heal_reset(shard);
		}
		/* dq_adopt may have changed whose it is */
		if (shard->state == DQ_SHARD_NOT_OWNER)
			shard->status_at = 0;
	}
}

static void
set_server(DqLink *link, DqServer *server, const DqSource *source)
{
	MemoryContext caller = CurrentMemoryContext;

	link->scan_interval = server->scan_interval;
	link->replay_window = server->replay_window;
	if (link->server_name)
		pfree(link->server_name);
	link->server_name = MemoryContextStrdup(link->context, server->name);
	if (link->source[0] == '\0')
		set_source(link, source);
	set_target(link, &server->target);
	if (link->refusal)
		pfree(link->refusal);
	link->refusal = NULL;
	/* a server that its owner's queues may not use is refused when it is used */
	PG_TRY();
	{
		dq_server_check_usable(server);
	}
	PG_CATCH();
	{
		ErrorData  *error;

		MemoryContextSwitchTo(caller);
		error = CopyErrorData();
		FlushErrorState();
		link->refusal = MemoryContextStrdup(link->context, error->message);
	}
	PG_END_TRY();
}

/* A shard lives in one link: that of its table owner's mapping. */
static DqShard *
place_shard(DqBridge *bridge, DqLink *link, int32 no, const char *name)
{
	DqShard    *shard = find_shard(link, no);
	ListCell   *lc;

	foreach(lc, bridge->links)
	{
		DqLink	   *other = lfirst(lc);
		DqShard    *there = other != link ? find_shard(other, no) : NULL;

		if (there)
			drop_shard(other, there);
	}
	return shard ? shard : make_shard(link, no, name);
}

void
dq_bridge_catalogs(DqBridge *bridge)
{
	const DqSource *source;
	DqServer   *server;
	ListCell   *lc,
			   *l;

	begin(bridge);
	dirty = false;				/* a message from here on sets it again */
	node_id = dq_node_id;
	pauses_relid = dq_extension_relation("dq_pauses");
	source_relid = dq_extension_relation("dq_source");
	losses_relid = dq_extension_relation("dq_losses");
	source = dq_source_get(true);
	if (dq_lives_look(bridge->own_xact))
	{
		/* named once it is committed */
		end(bridge);
		begin(bridge);
		(void) dq_lives_look(false);
	}
	foreach(l, bridge->links)
		set_source(lfirst(l), source);

	server = dq_server_get(bridge->serverid, GetUserId(), true);
	bridge->gone = server == NULL;
	if (bridge->gone)
	{
		end(bridge);
		return;
	}
	bridge->scan_interval = server->scan_interval;
	if (bridge->replay_window != server->replay_window)
		bridge->rotate_at = 0;	/* a shorter one acts at once */
	bridge->replay_window = server->replay_window;

	foreach(lc, dq_queue_list(bridge->serverid))
	{
		DqQueue    *queue = dq_queue_get_noerror(lfirst_oid(lc));
		DqLink	   *link;
		bool		paused;
		int			i;

		if (queue == NULL)
			continue;
		server = dq_server_get(bridge->serverid, queue->owner, true);
		if (server == NULL)
			continue;
		link = dq_bridge_link(bridge, server->target.umid);
		set_server(link, server, source);
		dq_shards_resolve(queue);
		paused = dq_queue_is_paused(queue);
		for (i = 0; i < queue->nshards; i++)
		{
			DqShard    *shard = place_shard(bridge, link, queue->shard_no[i],
											dq_shard_name(queue->name, queue->nshards, i));
			DqLoss		loss;

			define_shard(shard, queue, paused);
			dq_shard_set_loss(shard, dq_loss_get(shard->no, GetActiveSnapshot(), &loss) ?
							  &loss : NULL);
		}
	}

	/* shards without a table: what was committed for them is still sent */
	foreach(lc, dq_shards_list(bridge->serverid))
	{
		DqShardRow *row = lfirst(lc);
		DqShard    *shard = NULL;
		int64		rows;
		TimestampTz oldest;

		foreach(l, bridge->links)
			if ((shard = find_shard(lfirst(l), row->no)) != NULL)
				break;
		if (shard)
		{
			if (!shard->seen_in_catalog)
				shard->relid = InvalidOid;
			continue;
		}
		dq_outbox_backlog(row->no, &rows, &oldest);
		if (rows == 0)
			continue;
		if (bridge->links == NIL)
			set_server(dq_bridge_link(bridge, server->target.umid), server, source);
		shard = make_shard(linitial(bridge->links), row->no, row->name);
		shard->index = row->index;
	}
	end(bridge);

	foreach(l, bridge->links)
	{
		DqLink	   *link = lfirst(l);
		List	   *shards = list_copy(link->shards);

		foreach(lc, shards)
		{
			DqShard    *shard = lfirst(lc);

			if (!OidIsValid(shard->relid) && !shard->seen_in_catalog && is_drained(shard))
				drop_shard(link, shard);
		}
		link->subscribed = false;
	}
}
