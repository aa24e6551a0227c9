/*
 * adopt.c
 *	  dq_adopt: make this database the owner of its queues (G12).
 */
#include "postgres.h"

#include "api/api.h"
#include "compat.h"
#include "relay/relay.h"

#include "access/xact.h"
#include "commands/dbcommands.h"
#include "fmgr.h"
#include "foreign/foreign.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/tuplestore.h"

PG_FUNCTION_INFO_V1(dq_adopt);

typedef struct Candidate
{
	Oid			relid;
	DqKeys		keys;
	const DqTarget *target;
	DqFence		fence;
} Candidate;

static DqRedis *
look(const Candidate *c, const char *source, const char *queue, DqFence *fence,
	 DqFenceRecord *record)
{
	DqRedis    *redis;
	DqReply    *error = NULL;
	DqStatusArgs args = {.source = source};
	int			tries;

	for (tries = 0; tries < 3; tries++)
	{
		redis = dq_redis_get(c->target);
		dq_op_status_send(redis, &c->keys, &args);
		dq_op_status_result(redis, fence, record, &error);
		if (!error)
			return redis;
		if (!dq_reply_is_noscript(error))
			break;
	}
	dq_reply_report(ERROR, redis, error, "status", queue);
	return NULL;				/* keep compilers quiet */
}

static void
enter(const Candidate *c, const char *queue, bool force)
{
	const DqSource *source = dq_source_get(true);
	DqEnterArgs args;
	char		session[20];
	uint64		random;
	int			tries;

	if (!pg_strong_random(&random, sizeof(random)))
		ereport(ERROR,
				(errcode(ERRCODE_INTERNAL_ERROR),
				 errmsg("could not generate a random session")));
	snprintf(session, sizeof(session), "%016llx", (unsigned long long) random);
	memset(&args, 0, sizeof(args));
	args.source = source->id;
	args.session = session;
	args.place = dq_place();
	args.host = dq_host_name();
	args.database = get_database_name(MyDatabaseId);
	args.lease = 10000;
	args.node = source->node;
	args.adopt = true;
	args.force = force;
	for (tries = 0; tries < 5; tries++)
	{
		DqFence		fence;
		DqFenceRecord record;
		char	   *blame;
		DqReply    *error;
		DqRedis    *redis = look(c, source->id, queue, &fence, &record);

		args.expect_version = fence.version;
		dq_op_enter_send(redis, &c->keys, &args);
		dq_op_enter_result(redis, &fence, &blame, &error);
		if (error)
		{
			if (dq_reply_is_noscript(error))
				continue;
			dq_reply_report(ERROR, redis, error, "enter", queue);
		}
		switch (fence.status)
		{
			case DQ_OK:
				return;
			case DQ_OWNER:
				ereport(ERROR,
						(errcode(ERRCODE_OBJECT_IN_USE),
						 errmsg("queue \"%s\" has a live owner", queue),
						 errdetail("Its owner is source %s.", blame),
						 errhint("Stop the other database and wait for its lease to end, or pass force => true.")));
				break;
			case DQ_NODE:
				ereport(ERROR,
						(errcode(ERRCODE_OBJECT_IN_USE),
						 errmsg("node number %d is in use in queue \"%s\"", source->node, queue),
						 errdetail("It belongs to source %s.", blame),
						 errhint("Set dq_bridge.node_id to another number.")));
				break;
			default:
				break;			/* the version moved: once more */
		}
	}
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_IN_USE),
			 errmsg("queue \"%s\" is being entered by somebody else", queue),
			 errhint("Try again.")));
}

/*
 * The shards of one queue that are not ours yet, behind those found before. *copy: the
 * owner has our identity and another place.
 */
static List *
look_at_queue(List *candidates, const DqQueue *queue, const char *own, bool force,
			  bool *copy)
{
	DqServer   *server = dq_server_get(queue->serverid, queue->owner, false);
	int			i;

	dq_server_check_usable(server);
	for (i = 0; i < queue->nshards; i++)
	{
		Candidate  *c = palloc0(sizeof(Candidate));
		DqFenceRecord record;
		bool		alive;

		c->relid = queue->relid;
		c->target = &server->target;
		dq_keys_make(&c->keys, dq_shard_name(queue->name, queue->nshards, i));
		(void) look(c, own, queue->relname, &c->fence, &record);
		if (strcmp(record.owner_source, own) == 0 &&
			strcmp(record.owner_place, dq_place()) == 0 &&
			dq_fence_is_ours(&record))
			continue;			/* ours already */
		alive = record.owner_source[0] != '\0' &&
			record.lease_until > record.redis_now_us / 1000;
		if (alive && !force)
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_IN_USE),
					 errmsg("queue \"%s\" has a live owner", queue->relname),
					 errdetail("Its owner is source %s on host %s, database %s.",
							   record.owner_source, record.owner_host,
							   record.owner_database),
					 errhint("Stop the other database and wait for its lease to end, or pass force => true.")));
		/* the same identity elsewhere: we are its physical copy */
		if (strcmp(record.owner_source, own) == 0)
			*copy = true;
		candidates = lappend(candidates, c);
	}
	return candidates;
}

/*
 * The same where no server was named: one that is not there, or that this queue's owner
 * may not use, is warned of and does not stand in the way of the others (G9). The
 * first such error is kept in *failed.
 */
static List *
look_at_queue_if_there(List *candidates, const DqQueue *queue, const char *own,
					   bool force, bool *copy, List **unusable, ErrorData **failed)
{
	MemoryContext caller = CurrentMemoryContext;
	Oid			serverid = queue->serverid;
	char	   *relname = pstrdup(queue->relname);
	List	   *volatile found = NIL;

	if (list_member_oid(*unusable, serverid))
		return candidates;		/* each waits for connect_timeout once */
	PG_TRY();
	{
		found = look_at_queue(NIL, queue, own, force, copy);
	}
	PG_CATCH();
	{
		ErrorData  *error;

		if (!dq_error_is_redis(geterrcode()) &&
			geterrcode() != ERRCODE_INSUFFICIENT_PRIVILEGE)
			PG_RE_THROW();
		MemoryContextSwitchTo(caller);
		error = CopyErrorData();
		FlushErrorState();
		found = NIL;
		*unusable = lappend_oid(*unusable, serverid);
		if (*failed == NULL)
			*failed = error;
		ereport(WARNING,
				(errcode(error->sqlerrcode),
				 errmsg("queue \"%s\" and others of server \"%s\" are not adopted: %s", relname,
						GetForeignServer(serverid)->servername, error->message),
				 errhint("Call dq_adopt with this server's name when it is there.")));
	}
	PG_END_TRY();
	return list_concat(candidates, found);
}

Datum
dq_adopt(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	Oid			serverid = InvalidOid;
	bool		force;
	bool		renew = false;
	bool		mine = false;
	bool		looked = false;
	List	   *unusable = NIL;
	ErrorData  *failed = NULL;
	Oid			stranger = InvalidOid;
	const char *own;
	List	   *candidates = NIL;
	ListCell   *lc;

	PreventCommandIfReadOnly("dq_adopt()");
	PreventCommandIfParallelMode("dq_adopt()");
	PreventCommandDuringRecovery("dq_adopt()");
	if (!PG_ARGISNULL(0))
		serverid = dq_server_named(NameStr(*PG_GETARG_NAME(0)));
	force = !PG_ARGISNULL(1) && PG_GETARG_BOOL(1);
	InitMaterializedSRF(fcinfo, MAT_SRF_USE_EXPECTED_DESC);

	/* first look at all of them: nothing is taken if one must not be */
	own = pstrdup(dq_source_get(true)->id);
	(void) dq_lives_look(false);
	foreach(lc, dq_queue_list(serverid))
	{
		DqQueue    *queue = dq_queue_get_noerror(lfirst_oid(lc));
		Oid			queue_server;

		if (queue == NULL || queue->producer)
			continue;
		queue_server = queue->serverid;
		if (!dq_owns_relation(queue->relid, GetUserId()))
		{
			/* without a server: those of the caller, if there are any */
			if (OidIsValid(serverid))
				dq_require_owner(queue);
			stranger = queue->relid;
			continue;
		}
		mine = true;
		if (OidIsValid(serverid))
			candidates = look_at_queue(candidates, queue, own, force, &renew);
		else
			candidates = look_at_queue_if_there(candidates, queue, own, force, &renew,
												&unusable, &failed);
		looked |= !list_member_oid(unusable, queue_server);
	}

	/* not one server could be asked: that is no success */
	if (failed && !looked)
		ReThrowError(failed);
	if (!mine && OidIsValid(stranger))
		dq_require_owner(dq_queue_get(stranger));
	if (renew)
		(void) dq_source_renew();
	foreach(lc, candidates)
	{
		Candidate  *c = lfirst(lc);
		DqQueue    *queue = dq_queue_get(c->relid);
		Datum		value = ObjectIdGetDatum(c->relid);
		bool		null = false;
		ListCell   *next = lnext(candidates, lc);

		enter(c, queue->relname, force);
		dq_xact_touched(queue->serverid);
		if (next == NULL || ((Candidate *) lfirst(next))->relid != c->relid)
			tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, &value, &null);
	}
	return (Datum) 0;
}
