/*
 * connections.c
 *	  The connections of a link: one for commands, one that listens to the
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
close_subscription(DqLink *link)
{
	DqRedis    *redis = link->subscription;

	link->subscription = NULL;
	link->subscribed = false;
	dq_redis_close(redis);
}

void
dq_link_close(DqLink *link)
{
	DqRedis    *redis = link->redis;

	link->redis = NULL;
	dq_redis_close(redis);
	close_subscription(link);
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
void
dq_link_look(DqLink *link)
{
	StringInfoData warnings;
	DqArg		info[1] = {DQ_ARG("INFO")};
	DqArg		save[3] = {DQ_ARG("CONFIG"), DQ_ARG("GET"), DQ_ARG("save")};
	DqReply    *reply;
	bool		aof = true,
				loading = false;
	TimestampTz now = GetCurrentTimestamp();

	/* once a connection, but not with every one of many that do not last */
	if (!link->look_wanted || !TimestampDifferenceExceeds(link->looked_at, now, 2000))
		return;
	link->looked_at = now;
	link->look_wanted = false;
	initStringInfo(&warnings);
	dq_redis_append(link->redis, 1, info);
	dq_redis_append(link->redis, 3, save);
	reply = dq_redis_next(link->redis);
	if (reply->type == DQ_REPLY_STRING)
	{
		char	   *text = pnstrdup(reply->str, reply->len);
		const char *policy = info_value(text, "maxmemory_policy:");

		/* while it reads its file it says of itself that it keeps none */
		loading = strstr(text, "\nloading:1") != NULL;

		if (policy[0] != '\0' && strcmp(policy, "noeviction") != 0)
			appendStringInfo(&warnings, "maxmemory-policy %s may evict tasks", policy);
		aof = strcmp(info_value(text, "aof_enabled:"), "0") != 0;
	}
	reply = dq_redis_next(link->redis);
	if (loading)
	{
		link->look_wanted = true;	/* ask again later */
		return;
	}
	if (!aof && reply->type == DQ_REPLY_ARRAY && reply->nelements == 2 &&
		reply->elements[1].len == 0)
		appendStringInfo(&warnings, "%sno persistence: a restart of Redis loses all tasks",
						 warnings.len > 0 ? "\n" : "");

	if (warnings.len > 0 &&
		(link->server_warnings == NULL || strcmp(link->server_warnings, warnings.data) != 0))
		ereport(link->own_xact ? WARNING : DEBUG1,
				(errmsg("Redis of server \"%s\": %s", link->server_name, warnings.data)));
	if (link->server_warnings)
		pfree(link->server_warnings);
	link->server_warnings = MemoryContextStrdup(link->context, warnings.data);
	if (link->own_xact)
		dq_worker_warnings(warnings.data);
}

static void
subscribe(DqLink *link)
{
	MemoryContext old = MemoryContextSwitchTo(link->round);
	DqArg	   *args;
	int			n = 1;
	ListCell   *lc;

	args = palloc((list_length(link->shards) + 1) * sizeof(DqArg));
	args[0] = DQ_ARG("SUBSCRIBE");
	foreach(lc, link->shards)
	{
		DqShard    *shard = lfirst(lc);

		if (OidIsValid(shard->relid) && !shard->producer)
			args[n++] = shard->keys.key[DQ_KEY_CHANNEL];
		/* a message may have been missed: look at once */
		shard->status_at = 0;
	}
	if (n > 1)
	{
		if (link->subscription == NULL)
			link->subscription = dq_redis_open(&link->target);
		dq_redis_append(link->subscription, n, args);
		dq_redis_flush(link->subscription);
	}
	link->subscribed = true;
	MemoryContextSwitchTo(old);
}

void
dq_link_connect(DqLink *link)
{
	if (link->redis && dq_redis_is_dead(link->redis))
		dq_link_reset(link);
	if (link->redis == NULL)
	{
		if (link->refusal)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PASSWORD),
					 errmsg("%s", link->refusal)));
		link->redis = dq_redis_open(&link->target);
		link->look_wanted = true;
	}
	if (link->own_xact && !link->subscribed &&
		GetCurrentTimestamp() >= link->subscribe_at)
		subscribe(link);
}

/*
 * What the channels said since the last round. A subscription that broke is
 * opened again after a scan interval; polling goes on meanwhile.
 */
void
dq_link_messages(DqLink *link)
{
	MemoryContext old;
	volatile bool broken = false;

	if (link->subscription == NULL)
		return;
	old = MemoryContextSwitchTo(link->round);
	PG_TRY();
	{
		DqReply    *reply;

		while ((reply = dq_redis_poll(link->subscription)) != NULL)
		{
			if (reply->type == DQ_REPLY_ARRAY && reply->nelements == 3 &&
				reply->elements[0].len == 7 &&
				memcmp(reply->elements[0].str, "message", 7) == 0)
			{
				DqShard    *shard = dq_shard_by_channel(link, reply->elements[1].str,
														reply->elements[1].len);
				char		number[24];

				strlcpy(number, reply->elements[2].str,
						Min(sizeof(number), reply->elements[2].len + 1));
				if (shard)
				{
					int64		due = strtoll(number, NULL, 10);

					shard->next_due = Min(shard->next_due, due);
					shard->heard_due = Min(shard->heard_due, due);
				}
			}
			else if (reply->type == DQ_REPLY_ERROR)
				broken = true;	/* no right on the channel: polling alone */
			dq_reply_free(reply);
		}
	}
	PG_CATCH();
	{
		/* nothing was waited for, so this is the connection's end, not a cancel */
		MemoryContextSwitchTo(link->round);
		FlushErrorState();
		broken = true;
	}
	PG_END_TRY();
	MemoryContextSwitchTo(old);
	if (broken)
	{
		close_subscription(link);
		link->subscribe_at = TimestampTzPlusMilliseconds(GetCurrentTimestamp(),
														   link->scan_interval);
	}
}
