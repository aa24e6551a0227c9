/*
 * remove.c
 *	  dq_remove: cancel one pending task. The answer is true of the moment it was
 *	  given: nothing committed before the call is still on its way when it is
 *	  formed (PO 11, H15). What was found is recorded as an exact member, so that
 *	  it means the same task whenever it is applied (PO 17).
 */
#include "postgres.h"

#include "api/api.h"
#include "compat.h"
#include "relay/relay.h"
#include "shared/points.h"

#include "access/xact.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "storage/condition_variable.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

PG_FUNCTION_INFO_V1(dq_remove);

typedef struct Asking
{
	DqQueue    *queue;
	Oid			relid;
	bytea	   *element;
	bool		key_only;		/* a trigger's: never by id or payload */
	DqKeys	   *keys;			/* of each shard */
	DqFound    *found;			/* of each shard */
	TimestampTz deadline;
} Asking;

/* ---- what is recorded ---- */

static void
record_member(DqQueue *queue, int32 shard, int64 due, bytea *member)
{
	DqRow		row;
	uint64		id;
	bytea	   *token = palloc(VARHDRSZ + 16);

	Assert(member != NULL);
	SET_VARSIZE(token, VARHDRSZ + 16);
	if (!pg_strong_random(VARDATA(token), 16))
		ereport(ERROR,
				(errcode(ERRCODE_INTERNAL_ERROR),
				 errmsg("could not generate a random token")));
	memset(&row, 0, sizeof(row));
	row.seq = dq_outbox_next(&id);
	row.id = id;
	row.shard = shard;
	row.op = DQ_OP_REMOVE;
	row.due = due;
	row.member = member;
	row.token = token;
	dq_outbox_insert(&row, queue->serverid);
	DQ_POINT("remove.recorded");
}

/*
 * No certain answer: one row, in the shard where the element would live as a key.
 * The relay looks up what it names when everything before it is applied.
 */
static void
record_element(DqQueue *queue, bytea *element, bool key_only)
{
	int			home = dq_shard_of_key(VARDATA_ANY(element), VARSIZE_ANY_EXHDR(element),
									   queue->nshards);
	DqRow		row;

	memset(&row, 0, sizeof(row));
	row.seq = dq_outbox_next(&row.id);
	row.shard = queue->shard_no[home];
	row.op = key_only ? DQ_OP_REMOVE_KEY : DQ_OP_REMOVE_ELEMENT;
	row.key = element;
	dq_outbox_insert(&row, queue->serverid);
	DQ_POINT("remove.recorded");
}

/* ---- asking Redis ---- */

/* Key before id before payload, then the earliest due. */
static bool
is_better(char how, int64 due, char than_how, int64 than_due)
{
	static const char rank[] = "kip";
	const char *a = strchr(rank, how),
			   *b = strchr(rank, than_how);

	return a != b ? a < b : due < than_due;
}

/* The queue's server with no more patience than remove_timeout leaves. */
static DqTarget
patient_target(Asking *asking)
{
	DqServer   *server = dq_server_get(asking->queue->serverid, asking->queue->owner, false);
	long		left = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), asking->deadline);
	DqTarget	target;

	dq_server_check_usable(server);
	target = server->target;
	target.command_timeout = Min(target.command_timeout, Max(left, 1));
	target.connect_timeout = Min(target.connect_timeout, Max(left, 1));
	return target;
}

static void
refuse_foreign_owner(Asking *asking, const DqFound *found)
{
	const DqSource *source = dq_source_get(true);

	if (found->owner_source[0] == '\0' ||
		(strcmp(found->owner_source, source->id) == 0 &&
		 strcmp(found->owner_place, dq_place()) == 0))
		return;
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("queue \"%s\" belongs to another database", asking->queue->relname),
			 errdetail("Its owner is source %s.", found->owner_source),
			 errhint("dq_adopt() makes this database the owner.")));
}

/*
 * One look at all shards; -1: nothing there, -2: not within remove_timeout. Where the index misses and tasks
 * exist that it does not know, they are searched in bounded steps.
 */
static int
look(Asking *asking)
{
	DqQueue    *queue = asking->queue;
	DqTarget	target = patient_target(asking);
	DqRedis    *redis;
	const char *source = dq_source_get(true)->id;
	List	   *skip = dq_own_removed(queue, asking->element);
	int			best = -1;
	bool		scanned = false;
	int			i;

	redis = dq_redis_get(&target);
again:
	CHECK_FOR_INTERRUPTS();
	best = -1;
	dq_op_find(redis, queue->relname, queue->nshards, asking->keys, source,
			   dq_place(), asking->element, 0, skip, asking->found);
	for (i = 0; i < queue->nshards; i++)
	{
		DqFound    *f = &asking->found[i];

		refuse_foreign_owner(asking, f);
		/* it has swept away many stale entries, and may find it now */
		if (f->again)
			goto again;
		/* removed by this transaction under its key or id: what else is there? */
		if (f->found && dq_own_has_removed(queue->shard_no[i], f->member))
		{
			skip = lappend(skip, f->member);
			goto again;
		}
		if (f->found && asking->key_only && f->how != 'k')
			f->found = false;
		if (f->found && (best < 0 || is_better(f->how, f->due, asking->found[best].how,
											   asking->found[best].due)))
			best = i;
	}
	for (i = 0; (best < 0 || scanned) && i < queue->nshards; i++)
	{
		DqFound    *f = &asking->found[i];
		char	   *score = NULL;
		bytea	   *member = NULL;

		if (!f->scan_more || asking->key_only)
			continue;
		DQ_COUNT(queue->shard_no[i], remove_scans, 1);
		for (;;)
		{
			bool		ended = dq_op_find_scan(redis, queue->relname, &asking->keys[i], source,
												asking->element, 0, &score, &member, f);

			if (f->found && asking->key_only && f->how != 'k')
			f->found = false;
		if (f->found && dq_own_has_removed(queue->shard_no[i], f->member))
			{
				/* removed by this transaction: go on behind it */
				f->found = false;
				continue;
			}
			if (ended)
				break;
			/* the relay goes on with it, in its own time */
			if (GetCurrentTimestamp() >= asking->deadline)
				return -2;
			CHECK_FOR_INTERRUPTS();
		}
		if (f->found)
		{
			f->how = 'p';
			scanned = true;
			if (best < 0 || f->due < asking->found[best].due)
				best = i;
		}
	}
	return best;
}

static bool
is_covered(Asking *asking, Snapshot snapshot)
{
	int			i;

	for (i = 0; i < asking->queue->nshards; i++)
	{
		DqFound    *f = &asking->found[i];

		if (!dq_outbox_is_covered(asking->queue->shard_no[i], dq_snapshot_in(f->prev),
								  f->old[0] ? dq_snapshot_in(f->old) : NULL, snapshot))
			return false;
	}
	return true;
}

/*
 * Wait until the relay has moved on; relay by hand if nobody else does.
 */
static void
wait_for_relay(Asking *asking)
{
	Oid			serverid = asking->queue->serverid;
	long		left = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), asking->deadline);

	if (left <= 0)
		return;
	if (dq_wake_bridge(MyDatabaseId, serverid) || !dq_relay_by_hand(serverid, left))
	{
		ConditionVariablePrepareToSleep(&dq_shared()->progress);
		ConditionVariableTimedSleep(&dq_shared()->progress, Min(left, 10), PG_WAIT_EXTENSION);
		ConditionVariableCancelSleep();
	}
}

/* Errors that say something of Redis, not of the caller. */
static bool
is_outage(int sqlstate)
{
	switch (ERRCODE_TO_CATEGORY(sqlstate))
	{
		case MAKE_SQLSTATE('0', '8', '0', '0', '0'):
		case MAKE_SQLSTATE('2', '8', '0', '0', '0'):
			return true;
	}
	return sqlstate == ERRCODE_CANNOT_CONNECT_NOW || sqlstate == ERRCODE_OUT_OF_MEMORY ||
		sqlstate == ERRCODE_READ_ONLY_SQL_TRANSACTION;
}

/*
 * -2: no certain answer; -1: not pending; else the shard that has it. The
 * snapshot is taken first: what it sees is what was committed before the call.
 */
static int
ask(Asking *asking)
{
	MemoryContext caller = CurrentMemoryContext;
	Snapshot	snapshot;
	volatile int result = -2;
	volatile bool down = false;

	if (dq_is_known_down(asking->queue))
		down = true;
	else
	{
		snapshot = RegisterSnapshot(GetLatestSnapshot());
		PG_TRY();
		{
			for (;;)
			{
				int			best = look(asking);

				if (best == -2)
					break;
				if (is_covered(asking, snapshot))
				{
					result = best;
					break;
				}
				if (GetCurrentTimestamp() >= asking->deadline)
					break;
				wait_for_relay(asking);
			}
		}
		PG_CATCH();
		{
			/* only the exchange with Redis can have failed so; nothing of PostgreSQL's is half done */
			if (!is_outage(geterrcode()))
				PG_RE_THROW();
			MemoryContextSwitchTo(caller);
			FlushErrorState();
			down = true;
		}
		PG_END_TRY();
		UnregisterSnapshot(snapshot);
	}
	if (down && !asking->key_only && asking->queue->on_outage == DQ_OUTAGE_ERROR)
		dq_raise_outage(asking->queue);
	return result;
}

static DqAnswer
remove_task(DqQueue *queue, bytea *element, bool key_only)
{
	Asking		asking;
	DqOwnTask	own;
	bool		own_found;
	int			best;
	int			i;

	dq_require_not_producer(queue, "remove tasks");
	dq_shards_resolve(queue);
	asking.queue = queue;
	asking.relid = queue->relid;
	asking.element = element;
	asking.key_only = key_only;
	asking.deadline = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), queue->remove_timeout);
	asking.keys = palloc(queue->nshards * sizeof(DqKeys));
	asking.found = palloc0(queue->nshards * sizeof(DqFound));
	for (i = 0; i < queue->nshards; i++)
		dq_keys_make(&asking.keys[i], dq_shard_name(queue->name, queue->nshards, i));

	/* what this transaction offered is known without asking anybody */
	own_found = dq_own_find(queue, element, &own) && (!key_only || own.how == 'k');
	DQ_POINT("remove.ask");
	best = ask(&asking);
	DQ_POINT("remove.asked");
	/* messages may have been processed meanwhile */
	queue = dq_queue_get(asking.relid);
	dq_shards_resolve(queue);

	/* an own offer under the key replaces the older task, which goes as well */
	if (own_found &&
		(best < 0 || own.how == 'k' ||
		 !is_better(asking.found[best].how, asking.found[best].due, own.how, own.due)))
	{
		if (best >= 0 && own.how == 'k' && asking.found[best].how == 'k')
			record_member(queue, queue->shard_no[best], asking.found[best].due,
						  asking.found[best].member);
		record_member(queue, own.shard, own.due, dq_member_make(own.id, own.payload));
		return DQ_ANSWER_TRUE;
	}
	if (best == -1)
		return DQ_ANSWER_FALSE;
	if (best == -2)
	{
		record_element(queue, element, key_only);
		return DQ_ANSWER_UNKNOWN;
	}
	record_member(queue, queue->shard_no[best], asking.found[best].due,
				  asking.found[best].member);
	return DQ_ANSWER_TRUE;
}

DqAnswer
dq_remove_element(DqQueue *queue, bytea *element)
{
	return remove_task(queue, element, false);
}

DqAnswer
dq_remove_key(DqQueue *queue, bytea *key)
{
	return remove_task(queue, key, true);
}

Datum
dq_remove(PG_FUNCTION_ARGS)
{
	DqQueue    *queue;
	bytea	   *element;

	if (PG_ARGISNULL(0) || PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("%s must not be NULL", PG_ARGISNULL(0) ? "queue" : "element")));
	PreventCommandIfReadOnly("dq_remove()");
	PreventCommandIfParallelMode("dq_remove()");
	PreventCommandDuringRecovery("dq_remove()");

	queue = dq_queue_open(PG_GETARG_OID(0));
	dq_require(queue, ACL_DELETE | ACL_SELECT);
	element = dq_payload_bytes(PG_GETARG_DATUM(1), get_fn_expr_argtype(fcinfo->flinfo, 1));
	switch (dq_remove_element(queue, element))
	{
		case DQ_ANSWER_TRUE:
			PG_RETURN_BOOL(true);
		case DQ_ANSWER_FALSE:
			PG_RETURN_BOOL(false);
		default:
			PG_RETURN_NULL();
	}
}
