/*
 * sink.c
 *	  Tasks into a table, by INSERT through the executor of PostgreSQL as the owner of
 *	  the queue: triggers, defaults, checks, generated columns, partitions and row
 *	  security work as for anybody. Columns are matched by name; values go through the
 *	  input functions of their types. Called by batch.c.
 */
#include "postgres.h"

#include "compat.h"
#include "deliver/deliver_private.h"

#include "access/table.h"
#include "access/xact.h"
#include "catalog/namespace.h"
#include "catalog/pg_class.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_type.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/regproc.h"
#include "utils/resowner.h"
#include "utils/timestamp.h"
#include "utils/varlena.h"

typedef enum SinkRole
{
	SINK_ID,
	SINK_KEY,
	SINK_PAYLOAD,
	SINK_DUE_AT,
	SINK_QUEUE,
	SINK_SHARD,
	NUM_SINK_ROLES
} SinkRole;

static const char *const role_names[NUM_SINK_ROLES] = {
	"id", "key", "payload", "due_at", "queue", "shard"
};

typedef struct SinkColumn
{
	SinkRole	role;
	Oid			type;
	int32		typmod;
	FmgrInfo	in;
	Oid			ioparam;
	bool		raw;			/* bytea: the bytes as they are */
} SinkColumn;

struct DqSink
{
	Oid			relid;
	SPIPlanPtr	plan;
	int			ncolumns;
	SinkColumn	columns[NUM_SINK_ROLES];
	char	   *queue;			/* text of its regclass */
};

/* The table that the option names: unqualified, in the schema of the queue. */
static Oid
find_table(const DqQueue *queue, char **reason)
{
	List	   *names = stringToQualifiedNameList(queue->sink DQ_NAME_LIST_CONTEXT);
	RangeVar   *name = makeRangeVarFromNameList(names);
	Oid			schema = name->schemaname ? get_namespace_oid(name->schemaname, true) :
		get_rel_namespace(queue->relid);
	Oid			relid = OidIsValid(schema) ? get_relname_relid(name->relname, schema) : InvalidOid;

	if (!OidIsValid(relid))
		*reason = psprintf("sink \"%s\" does not exist", queue->sink);
	return relid;
}

/*
 * Locked to the end of the transaction without waiting: whoever alters the table keeps
 * this queue waiting, and no other.
 */
static bool
lock_table(const DqQueue *queue, Oid relid, char **reason)
{
	char		kind;

	if (!ConditionalLockRelationOid(relid, RowExclusiveLock))
	{
		*reason = psprintf("sink \"%s\" is locked by another session", queue->sink);
		return false;
	}
	AcceptInvalidationMessages();
	kind = get_rel_relkind(relid);
	if (kind == '\0')
		*reason = psprintf("sink \"%s\" does not exist", queue->sink);
	else if (kind != RELKIND_RELATION && kind != RELKIND_PARTITIONED_TABLE &&
			 kind != RELKIND_VIEW && kind != RELKIND_FOREIGN_TABLE)
		*reason = psprintf("sink \"%s\" is not a table", queue->sink);
	else
		return true;
	return false;
}

static bool
may_use(const DqQueue *queue, Oid relid, const DqSink *sink, char **reason)
{
	Oid			user = GetUserId();

	if (dq_namespace_usable(get_rel_namespace(relid), user) &&
		pg_class_aclcheck(relid, user, ACL_INSERT) == ACLCHECK_OK)
		return true;
	if (dq_namespace_usable(get_rel_namespace(relid), user))
	{
		bool		all = sink->ncolumns > 0;

		for (int i = 0; i < sink->ncolumns; i++)
			all &= pg_attribute_aclcheck(relid,
										 get_attnum(relid, role_names[sink->columns[i].role]),
										 user, ACL_INSERT) == ACLCHECK_OK;
		if (all)
			return true;
	}
	*reason = psprintf("owner \"%s\" may not insert into sink \"%s\"",
					   GetUserNameFromId(user, false), queue->sink);
	return false;
}

static void
find_columns(DqSink *sink)
{
	Relation	rel = table_open(sink->relid, NoLock);
	TupleDesc	desc = RelationGetDescr(rel);

	for (int role = 0; role < NUM_SINK_ROLES; role++)
	{
		for (int i = 0; i < desc->natts; i++)
		{
			Form_pg_attribute att = TupleDescAttr(desc, i);
			SinkColumn *column = &sink->columns[sink->ncolumns];
			Oid			function;

			/* what the table makes itself is not ours to give */
			if (att->attisdropped || att->attgenerated || att->attidentity == 'a' ||
				strcmp(NameStr(att->attname), role_names[role]) != 0)
				continue;
			column->role = role;
			column->raw = role == SINK_PAYLOAD && getBaseType(att->atttypid) == BYTEAOID;
			/* a domain over bytea checks what it is given when it is inserted */
			column->type = column->raw ? BYTEAOID : att->atttypid;
			column->typmod = att->atttypmod;
			getTypeInputInfo(column->type, &function, &column->ioparam);
			fmgr_info(function, &column->in);
			sink->ncolumns++;
			break;
		}
	}
	table_close(rel, NoLock);
}

static void
prepare(DqSink *sink)
{
	StringInfoData sql;
	Oid			types[NUM_SINK_ROLES];

	initStringInfo(&sql);
	appendStringInfo(&sql, "INSERT INTO %s",
					 quote_qualified_identifier(get_namespace_name(get_rel_namespace(sink->relid)),
												get_rel_name(sink->relid)));
	if (sink->ncolumns == 0)
		appendStringInfoString(&sql, " DEFAULT VALUES");
	for (int i = 0; i < sink->ncolumns; i++)
		appendStringInfo(&sql, "%s%s", i == 0 ? " (" : ", ", role_names[sink->columns[i].role]);
	for (int i = 0; i < sink->ncolumns; i++)
	{
		appendStringInfo(&sql, "%s$%d", i == 0 ? ") VALUES (" : ", ", i + 1);
		types[i] = sink->columns[i].type;
	}
	if (sink->ncolumns > 0)
		appendStringInfoChar(&sql, ')');
	sink->plan = SPI_prepare(sql.data, sink->ncolumns, types);
	if (sink->plan == NULL)
		elog(ERROR, "could not prepare the insertion into \"%s\"", get_rel_name(sink->relid));
}

DqSink *
dq_sink_open(const DqQueue *queue, char **reason)
{
	DqSink	   *sink = palloc0(sizeof(DqSink));

	*reason = NULL;
	sink->relid = find_table(queue, reason);
	if (!OidIsValid(sink->relid) || !lock_table(queue, sink->relid, reason))
		return NULL;
	find_columns(sink);
	if (!may_use(queue, sink->relid, sink, reason))
		return NULL;
	sink->queue = DatumGetCString(DirectFunctionCall1(regclassout,
													  ObjectIdGetDatum(queue->relid)));
	prepare(sink);
	return sink;
}

/* ---- inserting ---- */

static Datum
value_of(SinkColumn *column, const DqSink *sink, const DqTask *task, int shard, bool *isnull)
{
	char	   *text = NULL;

	*isnull = false;
	switch (column->role)
	{
		case SINK_ID:
			text = dq_task_id(task);
			break;
		case SINK_KEY:
			if (task->key)
				text = text_to_cstring(dq_bytes_text(task->key, task->key_len));
			break;
		case SINK_PAYLOAD:
			if (column->raw)
			{
				bytea	   *bytes = palloc(VARHDRSZ + task->payload_len);

				SET_VARSIZE(bytes, VARHDRSZ + task->payload_len);
				memcpy(VARDATA(bytes), task->payload, task->payload_len);
				return PointerGetDatum(bytes);
			}
			text = text_to_cstring(dq_bytes_text(task->payload, task->payload_len));
			break;
		case SINK_DUE_AT:
			if (column->type == TIMESTAMPTZOID && column->typmod < 0)
				return TimestampTzGetDatum(dq_due_to_timestamp(task->due));
			text = pstrdup(timestamptz_to_str(dq_due_to_timestamp(task->due)));
			break;
		case SINK_QUEUE:
			text = sink->queue;
			break;
		case SINK_SHARD:
			text = psprintf("%d", shard);
			break;
		default:
			break;
	}
	/* domains have a say about NULL as well */
	*isnull = text == NULL;
	return InputFunctionCall(&column->in, text, column->ioparam, column->typmod);
}

static void
insert_one(DqSink *sink, const DqTask *task, int shard)
{
	Datum		values[NUM_SINK_ROLES];
	char		nulls[NUM_SINK_ROLES];

	for (int i = 0; i < sink->ncolumns; i++)
	{
		bool		isnull;

		values[i] = value_of(&sink->columns[i], sink, task, shard, &isnull);
		nulls[i] = isnull ? 'n' : ' ';
	}
	if (SPI_execute_plan(sink->plan, values, nulls, false, 0) < 0)
		elog(ERROR, "could not insert into \"%s\"", get_rel_name(sink->relid));
}

/*
 * Deferred constraints and triggers are fired in here, so that what they raise belongs
 * to what they are about, and not to the commit of all.
 */
bool
dq_sink_insert(DqSink *sink, const DqQueue *queue, int shard, DqTask *const *tasks, int n,
			   ErrorData **error)
{
	MemoryContext caller = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	MemoryContext each = AllocSetContextCreate(caller, "dq_bridge sink row",
											   ALLOCSET_DEFAULT_SIZES);
	volatile bool done = false;

	*error = NULL;
	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(each);
	PG_TRY();
	{
		for (int i = 0; i < n; i++)
		{
			CHECK_FOR_INTERRUPTS();
			insert_one(sink, tasks[i], shard);
			MemoryContextReset(each);
		}
		(void) SPI_execute("SET CONSTRAINTS ALL IMMEDIATE", false, 0);
		ReleaseCurrentSubTransaction();
		done = true;
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(caller);
		*error = CopyErrorData();
		FlushErrorState();
		RollbackAndReleaseCurrentSubTransaction();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(caller);
	CurrentResourceOwner = owner;
	MemoryContextDelete(each);
	return done;
}

/*
 * What passes by itself, or is nobody's fault, must not cost a task its life: a
 * serialization failure, a lock that was not to be had, no space, a cancel, a
 * connection that a foreign table has lost.
 */
bool
dq_sink_is_to_blame(const ErrorData *error)
{
	switch (ERRCODE_TO_CATEGORY(error->sqlerrcode))
	{
		case ERRCODE_CONNECTION_EXCEPTION:
		case MAKE_SQLSTATE('4', '0', '0', '0', '0'):
		case MAKE_SQLSTATE('5', '3', '0', '0', '0'):
		case MAKE_SQLSTATE('5', '5', '0', '0', '0'):
		case MAKE_SQLSTATE('5', '7', '0', '0', '0'):
		case MAKE_SQLSTATE('5', '8', '0', '0', '0'):
			return false;
		default:
			return error->sqlerrcode != ERRCODE_READ_ONLY_SQL_TRANSACTION &&
				error->sqlerrcode != ERRCODE_DATA_CORRUPTED &&
				error->sqlerrcode != ERRCODE_INDEX_CORRUPTED;
	}
}
