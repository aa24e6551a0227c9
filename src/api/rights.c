/*
 * rights.c
 *	  Rights on a queue are those on its foreign table (DESIGN 3), the current
 *	  user's. Called by the SQL functions.
 */
#include "postgres.h"

#include "api/api.h"
#include "compat.h"

#include "catalog/pg_class.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/acl.h"
#include "utils/builtins.h"


DqQueue *
dq_queue_open(Oid relid)
{
	/* PO 12: held to the end of the transaction, before a seq is drawn */
	LockRelationOid(relid, RowExclusiveLock);
	return dq_queue_get(relid);
}

void
dq_require(const DqQueue *queue, AclMode rights)
{
	if (pg_class_aclmask(queue->relid, GetUserId(), rights, ACLMASK_ALL) != rights)
		aclcheck_error(ACLCHECK_NO_PRIV, OBJECT_FOREIGN_TABLE, queue->relname);
}

bool
dq_has_any_right(Oid relid)
{
	AclMode		rights = ACL_SELECT | ACL_INSERT | ACL_UPDATE | ACL_DELETE | ACL_TRUNCATE;

	return pg_class_aclmask(relid, GetUserId(), rights, ACLMASK_ANY) != 0 ||
		pg_attribute_aclcheck_all(relid, GetUserId(), ACL_SELECT | ACL_INSERT | ACL_UPDATE,
								  ACLMASK_ANY) == ACLCHECK_OK;
}

/* The bridge has lost the server and says so: do not even try (G7). */
bool
dq_is_known_down(DqQueue *queue)
{
	DqShardStats stats;
	int			i;

	if (!dq_bridge_alive(MyDatabaseId, queue->serverid))
		return false;
	dq_shards_resolve(queue);
	for (i = 0; i < queue->nshards; i++)
		if (dq_stats_get(MyDatabaseId, queue->shard_no[i], &stats) &&
			strcmp(stats.state, "redis_down") == 0)
			return true;
	return false;
}

void
dq_raise_outage(const DqQueue *queue)
{
	ereport(ERROR,
			(errcode(ERRCODE_CONNECTION_FAILURE),
			 errmsg("Redis of queue \"%s\" does not answer", queue->relname),
			 queue->at_once ?
			 errhint("With option transactional \"on\" the operation is recorded instead.") :
			 errhint("With option on_outage \"defer\" the operation is recorded instead.")));
}

void
dq_require_owner(const DqQueue *queue)
{
	if (!dq_owns_relation(queue->relid, GetUserId()))
		aclcheck_error(ACLCHECK_NOT_OWNER, OBJECT_FOREIGN_TABLE, queue->relname);
}

void
dq_require_not_producer(const DqQueue *queue, const char *what)
{
	if (queue->producer)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("cannot %s in queue \"%s\": this database is only its producer",
						what, queue->relname),
				 errhint("Option role of the foreign table is \"producer\"; the owner's database may do it.")));
}

/*
 * Were we promoted, and is the old primary's lease not over yet? Then there is no
 * certain answer for a moment, but the queue is ours. If that lease is being
 * renewed, the other one lives, and this is a copy.
 */
static bool
is_taking_over(int32 shard_no, const char *source, const char *writer)
{
	DqShardStats stats;

	return strcmp(source, dq_source_get(true)->id) == 0 &&
		writer[0] != '\0' && strtoul(writer, NULL, 10) < dq_timeline() &&
		!(dq_stats_get(MyDatabaseId, shard_no, &stats) && stats.owner_lives);
}

/*
 * 55000 if another database owns the shard. writer: what the fence, or a snapshot in
 * it, begins with, the timeline it was written on. It tells a promoted standby that
 * waits for the lease from a copy; that passes, and whoever calls waits as for any
 * shard that is not open.
 */
void
dq_require_ours(const DqQueue *queue, int32 shard_no, const char *source, const char *place,
				const char *writer)
{
	if (source[0] == '\0' ||
		(strcmp(source, dq_source_get(true)->id) == 0 && strcmp(place, dq_place()) == 0) ||
		is_taking_over(shard_no, source, writer))
		return;
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("queue \"%s\" belongs to another database", queue->relname),
			 errdetail("Its owner is source %s.", source),
			 errhint("dq_adopt() makes this database the owner.")));
}
