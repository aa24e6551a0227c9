/*
 * link.c
 *	  The connections of a bridge: one for commands, one that listens to the
 *	  channels of its shards (a message says that a task became the earliest).
 *	  Messages only shorten a sleep; a lost one costs at most scan_interval.
 */
#include "postgres.h"

#include "compat.h"
#include "relay/relay_private.h"

#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

static void
close_subscription(DqBridge *bridge)
{
	DqRedis    *redis = bridge->subscription;

	bridge->subscription = NULL;
	bridge->subscribed = false;
	dq_redis_close(redis);
}

void
dq_link_close(DqBridge *bridge)
{
	DqRedis    *redis = bridge->redis;

	bridge->redis = NULL;
	dq_redis_close(redis);
	close_subscription(bridge);
}

static const char *
info_value(const char *info, const char *name)
{
	const char *at = strstr(info, name);
	const char *end;

	if (at == NULL)
		return "";
	at += strlen(name);
	end = at + strcspn(at, "\r\n");
	return pnstrdup(at, end - at);
}

/*
 * A server that may throw keys away, or forgets them at a restart, is not a
 * place for tasks: said once a connection, and in dq_stats (D6).
 */
static void
look_at_server(DqBridge *bridge)
{
	StringInfoData warnings;
	DqArg		info[1] = {DQ_ARG("INFO")};
	DqArg		save[3] = {DQ_ARG("CONFIG"), DQ_ARG("GET"), DQ_ARG("save")};
	DqReply    *reply;
	bool		aof = true;

	initStringInfo(&warnings);
	dq_redis_append(bridge->redis, 1, info);
	dq_redis_append(bridge->redis, 3, save);
	reply = dq_redis_next(bridge->redis);
	if (reply->type == DQ_REPLY_STRING)
	{
		char	   *text = pnstrdup(reply->str, reply->len);
		const char *policy = info_value(text, "maxmemory_policy:");

		if (policy[0] != '\0' && strcmp(policy, "noeviction") != 0)
			appendStringInfo(&warnings, "maxmemory-policy %s may evict tasks", policy);
		aof = strcmp(info_value(text, "aof_enabled:"), "0") != 0;
	}
	reply = dq_redis_next(bridge->redis);
	if (!aof && reply->type == DQ_REPLY_ARRAY && reply->nelements == 2 &&
		reply->elements[1].len == 0)
		appendStringInfo(&warnings, "%sno persistence: a restart of Redis loses all tasks",
						 warnings.len > 0 ? "\n" : "");

	if (warnings.len > 0 &&
		(bridge->server_warnings == NULL || strcmp(bridge->server_warnings, warnings.data) != 0))
		ereport(bridge->own_xact ? WARNING : DEBUG1,
				(errmsg("Redis of server \"%s\": %s", bridge->server_name, warnings.data)));
	if (bridge->server_warnings)
		pfree(bridge->server_warnings);
	bridge->server_warnings = MemoryContextStrdup(bridge->context, warnings.data);
}

static void
subscribe(DqBridge *bridge)
{
	MemoryContext old = MemoryContextSwitchTo(bridge->round);
	DqArg	   *args;
	int			n = 1;
	ListCell   *lc;

	args = palloc((list_length(bridge->shards) + 1) * sizeof(DqArg));
	args[0] = DQ_ARG("SUBSCRIBE");
	foreach(lc, bridge->shards)
	{
		DqShard    *shard = lfirst(lc);

		if (OidIsValid(shard->relid) && !shard->producer)
			args[n++] = shard->keys.key[DQ_KEY_CHANNEL];
		/* a message may have been missed: look at once */
		shard->status_at = 0;
	}
	if (n > 1)
	{
		if (bridge->subscription == NULL)
			bridge->subscription = dq_redis_open(&bridge->target);
		dq_redis_append(bridge->subscription, n, args);
		dq_redis_flush(bridge->subscription);
	}
	bridge->subscribed = true;
	MemoryContextSwitchTo(old);
}

void
dq_bridge_connect(DqBridge *bridge)
{
	if (bridge->redis && dq_redis_is_dead(bridge->redis))
		dq_bridge_reset(bridge);
	if (bridge->redis == NULL)
	{
		bridge->redis = dq_redis_open(&bridge->target);
		look_at_server(bridge);
	}
	if (bridge->own_xact && !bridge->subscribed &&
		GetCurrentTimestamp() >= bridge->subscribe_at)
		subscribe(bridge);
}

/*
 * What the channels said since the last round. A subscription that broke is
 * opened again after a scan interval; polling goes on meanwhile.
 */
void
dq_link_messages(DqBridge *bridge)
{
	MemoryContext old;
	volatile bool broken = false;

	if (bridge->subscription == NULL)
		return;
	old = MemoryContextSwitchTo(bridge->round);
	PG_TRY();
	{
		DqReply    *reply;

		while ((reply = dq_redis_poll(bridge->subscription)) != NULL)
		{
			if (reply->type == DQ_REPLY_ARRAY && reply->nelements == 3 &&
				reply->elements[0].len == 7 &&
				memcmp(reply->elements[0].str, "message", 7) == 0)
			{
				DqShard    *shard = dq_shard_by_channel(bridge, reply->elements[1].str,
														reply->elements[1].len);
				char		number[24];

				strlcpy(number, reply->elements[2].str,
						Min(sizeof(number), reply->elements[2].len + 1));
				if (shard)
					shard->next_due = Min(shard->next_due, strtoll(number, NULL, 10));
			}
			else if (reply->type == DQ_REPLY_ERROR)
				broken = true;	/* no right on the channel: polling alone */
			dq_reply_free(reply);
		}
	}
	PG_CATCH();
	{
		/* nothing was waited for, so this is the connection's end, not a cancel */
		MemoryContextSwitchTo(bridge->round);
		FlushErrorState();
		broken = true;
	}
	PG_END_TRY();
	MemoryContextSwitchTo(old);
	if (broken)
	{
		close_subscription(bridge);
		bridge->subscribe_at = TimestampTzPlusMilliseconds(GetCurrentTimestamp(),
														   bridge->scan_interval);
	}
}
