/*
 * stats.c
 *	  The published state of each shard. The bridges write it, dq_stats and
 *	  sessions that need a shard's session and floor read it; nobody waits for
 *	  Redis to do so.
 */
#include "postgres.h"

#include "shared/shared.h"
#include "shared/shared_private.h"

static void
make_key(DqShardKey *key, Oid dboid, int32 shard)
{
	memset(key, 0, sizeof(*key));	/* it is compared as bytes */
	key->dboid = dboid;
	key->shard = shard;
}

bool
dq_stats_get(Oid dboid, int32 shard, DqShardStats *out)
{
	dshash_table *shards = dq_shared_shards();
	DqShardKey	key;
	DqShardStats *entry;

	make_key(&key, dboid, shard);
	entry = dshash_find(shards, &key, false);
	if (entry == NULL)
		return false;
	memcpy(out, entry, sizeof(*out));
	dshash_release_lock(shards, entry);
	return true;
}

bool
dq_session_get(Oid dboid, int32 shard, char *session, int64 *floor, uint32 *epoch)
{
	DqShardStats stats;

	if (!dq_stats_get(dboid, shard, &stats) || stats.session[0] == '\0')
		return false;
	strlcpy(session, stats.session, sizeof(stats.session));
	*floor = stats.floor;
	*epoch = stats.epoch;
	return true;
}

bool
dq_session_writing(Oid dboid, int32 shard, const char *session, uint32 epoch)
{
	DqShardStats *entry = dq_stats_lock(dboid, shard);
	bool		same = strcmp(entry->session, session) == 0 && entry->epoch == epoch;

	if (same)
		entry->writing++;
	dq_stats_release(entry);
	return same;
}

void
dq_session_resumed(Oid dboid, int32 shard)
{
	DqShardStats *entry = dq_stats_lock(dboid, shard);

	entry->epoch++;
	dq_stats_release(entry);
}

void
dq_session_written(Oid dboid, int32 shard)
{
	DqShardStats *entry = dq_stats_lock(dboid, shard);

	entry->writing--;
	dq_stats_release(entry);
}

bool
dq_session_is_written(Oid dboid, int32 shard)
{
	DqShardStats stats;

	return dq_stats_get(dboid, shard, &stats) && stats.writing > 0;
}

void
dq_session_note(Oid dboid, int32 shard, const char *session, int64 version)
{
	DqShardStats *entry = dq_stats_lock(dboid, shard);

	if (strcmp(entry->session, session) == 0)
		entry->floor = Max(entry->floor, version);
	dq_stats_release(entry);
}

/*
 * May allocate, so it may fail: not for commit callbacks. Nothing that can
 * raise an error belongs between this and dq_stats_release.
 */
DqShardStats *
dq_stats_lock(Oid dboid, int32 shard)
{
	dshash_table *shards = dq_shared_shards();
	DqShardKey	key;
	DqShardStats *entry;
	bool		found;

	make_key(&key, dboid, shard);
	entry = dshash_find_or_insert(shards, &key, &found);
	if (!found)
	{
		memset(entry, 0, sizeof(*entry));
		entry->key = key;
		entry->next_due = PG_INT64_MAX;
	}
	return entry;
}

void
dq_stats_release(DqShardStats *entry)
{
	dshash_release_lock(dq_shared_shards(), entry);
}

void
dq_stats_add(Oid dboid, int32 shard, size_t offset, int64 n)
{
	DqShardStats *entry = dq_stats_lock(dboid, shard);

	*(int64 *) ((char *) entry + offset) += n;
	dq_stats_release(entry);
}

/* The database or the extension in it is gone: shard numbers start anew. */
void
dq_stats_forget_database(Oid dboid)
{
	dshash_table *shards = dq_shared_shards();
	dshash_seq_status seq;
	DqShardStats *entry;

	dshash_seq_init(&seq, shards, true);
	while ((entry = dshash_seq_next(&seq)) != NULL)
	{
		if (entry->key.dboid == dboid)
			dshash_delete_current(&seq);
	}
	dshash_seq_term(&seq);
}
