/*
 * triggers.c
 *	  dq_offer_trigger and dq_remove_trigger: tasks that follow the rows of a
 *	  business table, without any PL.
 */
#include "postgres.h"

#include "api/api.h"
#include "compat.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/namespace.h"
#include "catalog/pg_class.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "executor/spi.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/regproc.h"
#include "utils/rel.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"
#include "utils/varlena.h"

PG_FUNCTION_INFO_V1(dq_offer_trigger);
PG_FUNCTION_INFO_V1(dq_remove_trigger);

static void
protocol_error(const char *name, const char *rule)
{
	ereport(ERROR,
			(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
			 errmsg("function \"%s\" must be fired %s", name, rule)));
}

/*
 * The queue by its name. An unqualified one means the schema of the trigger's
 * table: never pg_temp, never the caller's search_path, so that nobody can lead
 * tasks elsewhere.
 */
static Oid
trigger_queue(Relation rel, const char *name)
{
	List	   *names = stringToQualifiedNameList(name
#if PG_VERSION_NUM >= 160000
												  ,NULL
#endif
												  );
	Oid			schema = RelationGetNamespace(rel);
	Oid			relid;
	char	   *relname;

	if (list_length(names) > 2)
		ereport(ERROR,
				(errcode(ERRCODE_SYNTAX_ERROR),
				 errmsg("improper queue name \"%s\"", name)));
	if (list_length(names) == 2)
		schema = get_namespace_oid(strVal(linitial(names)), false);
	relname = strVal(llast(names));
	relid = get_relname_relid(relname, schema);
	if (!OidIsValid(relid))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("queue \"%s.%s\" does not exist", get_namespace_name(schema), relname),
				 errhint("An unqualified queue name in a trigger means the schema of the trigger's table.")));
	return relid;
}

/* Column number, 0 for the empty name; 42703 if there is none. */
static int
trigger_column(Relation rel, const char *name)
{
	int			attnum;

	if (name[0] == '\0')
		return 0;
	attnum = SPI_fnumber(RelationGetDescr(rel), name);
	if (attnum <= 0)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_COLUMN),
				 errmsg("column \"%s\" of table \"%s\" does not exist",
						name, RelationGetRelationName(rel))));
	return attnum;
}

static bytea *
row_key(DqQueue *queue, Relation rel, HeapTuple tuple, int column)
{
	bool		isnull;
	Datum		value;

	if (column == 0)
		return NULL;
	value = heap_getattr(tuple, column, RelationGetDescr(rel), &isnull);
	if (isnull)
		return NULL;
	return dq_key_bytes(queue, value,
						TupleDescAttr(RelationGetDescr(rel), column - 1)->atttypid);
}

static bool
same_key(const bytea *a, const bytea *b)
{
	if (a == NULL || b == NULL)
		return a == b;
	return VARSIZE_ANY(a) == VARSIZE_ANY(b) && memcmp(a, b, VARSIZE_ANY(a)) == 0;
}

/* ---- the due instant ---- */

typedef struct DueRule
{
	int			column;			/* 0: the interval */
	Oid			type;
	Interval   *interval;
} DueRule;

static DueRule
due_rule(Relation rel, const char *argument)
{
	DueRule		rule = {0};
	int			attnum = SPI_fnumber(RelationGetDescr(rel), argument);

	if (attnum > 0)
	{
		rule.column = attnum;
		rule.type = getBaseType(TupleDescAttr(RelationGetDescr(rel), attnum - 1)->atttypid);
		if (rule.type != INTERVALOID && rule.type != TIMESTAMPTZOID)
			ereport(ERROR,
					(errcode(ERRCODE_DATATYPE_MISMATCH),
					 errmsg("column \"%s\" of table \"%s\" is neither an interval nor a timestamptz",
							argument, RelationGetRelationName(rel)),
					 errhint("The second argument is a delay, or a column with a delay or a due instant.")));
		return rule;
	}
	rule.interval = DatumGetIntervalP(DirectFunctionCall3(interval_in,
														  CStringGetDatum(argument),
														  ObjectIdGetDatum(InvalidOid),
														  Int32GetDatum(-1)));
	return rule;
}

/* Was there a task for the row? Not: when; that may be an instant none can have. */
static bool
row_has_due(const DueRule *rule, Relation rel, HeapTuple tuple)
{
	bool		isnull = false;

	if (rule->column != 0)
		(void) heap_getattr(tuple, rule->column, RelationGetDescr(rel), &isnull);
	return !isnull;
}

/*
 * False: NULL, no task. An instant in the past is due at once, however far back.
 */
static bool
row_due(const DueRule *rule, Relation rel, HeapTuple tuple, int64 *due)
{
	TimestampTz at;
	TimestampTz now = GetCurrentTimestamp();

	if (rule->column == 0)
		at = dq_delay_from_now(rule->interval);
	else
	{
		bool		isnull;
		Datum		value = heap_getattr(tuple, rule->column, RelationGetDescr(rel), &isnull);

		if (isnull)
			return false;
		if (rule->type == INTERVALOID)
			at = dq_delay_from_now(DatumGetIntervalP(value));
		else
			at = DatumGetTimestampTz(value);
	}
	if (at < now && !TIMESTAMP_IS_NOBEGIN(at))
		at = Max(at, (TimestampTz) -(POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE) * USECS_PER_DAY);
	*due = dq_due_from_timestamp(at);
	return true;
}

static bytea *
row_payload(Relation rel, HeapTuple tuple, int column)
{
	bool		isnull;
	Datum		value;

	if (column == 0)
		return dq_payload_bytes(heap_copy_tuple_as_datum(tuple, RelationGetDescr(rel)),
								RelationGetDescr(rel)->tdtypeid);
	value = heap_getattr(tuple, column, RelationGetDescr(rel), &isnull);
	if (isnull)
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("payload column \"%s\" must not be NULL",
						NameStr(TupleDescAttr(RelationGetDescr(rel), column - 1)->attname))));
	return dq_payload_bytes(value, TupleDescAttr(RelationGetDescr(rel), column - 1)->atttypid);
}

Datum
dq_offer_trigger(PG_FUNCTION_ARGS)
{
	TriggerData *trigdata = (TriggerData *) fcinfo->context;
	Relation	rel;
	HeapTuple	tuple;
	HeapTuple	before = NULL;
	char	  **args;
	int			nargs;
	DqQueue    *queue;
	Oid			relid;
	DueRule		rule;
	int			key_column;
	bytea	   *key;
	int64		due = 0;
	bool		wanted;

	if (!CALLED_AS_TRIGGER(fcinfo))
		protocol_error("dq_offer_trigger", "as a trigger");
	if (!TRIGGER_FIRED_AFTER(trigdata->tg_event) || !TRIGGER_FIRED_FOR_ROW(trigdata->tg_event))
		protocol_error("dq_offer_trigger", "AFTER ROW");
	if (TRIGGER_FIRED_BY_INSERT(trigdata->tg_event))
		tuple = trigdata->tg_trigtuple;
	else if (TRIGGER_FIRED_BY_UPDATE(trigdata->tg_event))
	{
		tuple = trigdata->tg_newtuple;
		before = trigdata->tg_trigtuple;
	}
	else
	{
		protocol_error("dq_offer_trigger", "for INSERT or UPDATE");
		return (Datum) 0;		/* keep compilers quiet */
	}

	rel = trigdata->tg_relation;
	args = trigdata->tg_trigger->tgargs;
	nargs = trigdata->tg_trigger->tgnargs;
	if (nargs != 3 && nargs != 4)
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("dq_offer_trigger takes 3 or 4 arguments"),
				 errhint("dq_offer_trigger('queue', 'delay or column', 'key column' [, 'payload column'])")));

	relid = trigger_queue(rel, args[0]);
	rule = due_rule(rel, args[1]);
	key_column = trigger_column(rel, args[2]);
	queue = dq_queue_open(relid);
	key = row_key(queue, rel, tuple, key_column);
	wanted = row_due(&rule, rel, tuple, &due);

	if (before && key_column != 0)
	{
		bytea	   *old_key = row_key(queue, rel, before, key_column);

		/* a due that became NULL, or a key that changed, takes the old task back */
		if (old_key && (!wanted || !same_key(old_key, key)) &&
			row_has_due(&rule, rel, before))
		{
			dq_require(queue, ACL_DELETE | ACL_SELECT);
			(void) dq_remove_key(queue, old_key);
			queue = dq_queue_get(relid);
		}
	}
	if (wanted)
	{
		bytea	   *payload;

		dq_require(queue, ACL_INSERT);
		payload = row_payload(rel, tuple, nargs == 4 ? trigger_column(rel, args[3]) : 0);
		dq_payload_check(queue, payload);
		(void) dq_offer_record(queue, payload, due, key);
	}
	return PointerGetDatum(NULL);
}

Datum
dq_remove_trigger(PG_FUNCTION_ARGS)
{
	TriggerData *trigdata = (TriggerData *) fcinfo->context;
	Relation	rel;
	char	  **args;
	DqQueue    *queue;
	bytea	   *key;

	if (!CALLED_AS_TRIGGER(fcinfo))
		protocol_error("dq_remove_trigger", "as a trigger");
	if (!TRIGGER_FIRED_AFTER(trigdata->tg_event) || !TRIGGER_FIRED_FOR_ROW(trigdata->tg_event))
		protocol_error("dq_remove_trigger", "AFTER ROW");
	if (!TRIGGER_FIRED_BY_UPDATE(trigdata->tg_event) &&
		!TRIGGER_FIRED_BY_DELETE(trigdata->tg_event))
		protocol_error("dq_remove_trigger", "for UPDATE or DELETE");

	rel = trigdata->tg_relation;
	args = trigdata->tg_trigger->tgargs;
	if (trigdata->tg_trigger->tgnargs != 2 || args[1][0] == '\0')
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("dq_remove_trigger takes 2 arguments"),
				 errhint("dq_remove_trigger('queue', 'key column')")));

	queue = dq_queue_open(trigger_queue(rel, args[0]));
	dq_require(queue, ACL_DELETE | ACL_SELECT);
	/* the old row, for UPDATE as well */
	key = row_key(queue, rel, trigdata->tg_trigtuple, trigger_column(rel, args[1]));
	if (key)
		(void) dq_remove_key(queue, key);
	return PointerGetDatum(NULL);
}
