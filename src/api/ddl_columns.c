/*
 * ddl_columns.c
 *	  What CREATE and ALTER FOREIGN TABLE may say of a queue's columns, and of tables
 *	  that show something else than its pending tasks. Called by ddl.c.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_attribute.h"
#include "catalog/pg_type.h"
#include "foreign/foreign.h"
#include "nodes/parsenodes.h"
#include "utils/builtins.h"
#include "utils/syscache.h"

#include "api/ddl.h"

typedef struct KnownColumn
{
	const char *name;
	Oid			type;			/* InvalidOid: any */
	bool		generated;		/* may be, from other columns */
} KnownColumn;

/* What each kind of table may have. */
static const struct
{
	KnownColumn column[6];
	const char *hint;
}			known_columns[] = {
	[DQ_CONTENTS_PENDING] = {
		{{"id", TEXTOID}, {"key", InvalidOid, true}, {"payload", InvalidOid, true},
		{"due_at", TIMESTAMPTZOID, true}, {"shard", INT4OID}},
		"Its columns are, each optional and in any order: id text, key (any type), payload (any type), due_at timestamptz, shard int."
	},
	[DQ_CONTENTS_READY] = {
		{{"payload", InvalidOid}, {"shard", INT4OID}},
		"With contents 'ready' its columns are: payload (any type), shard int."
	},
	[DQ_CONTENTS_QUARANTINE] = {
		{{"member", BYTEAOID}, {"reason", TEXTOID}, {"due_at", TIMESTAMPTZOID},
		{"found_at", TIMESTAMPTZOID}, {"shard", INT4OID}},
		"With contents 'quarantine' its columns are: member bytea, reason text, due_at timestamptz, found_at timestamptz, shard int."
	},
};

static void
check_column(const DqQueue *queue, Form_pg_attribute att)
{
	const char *name = NameStr(att->attname);
	const KnownColumn *known = NULL;

	for (int i = 0; i < lengthof(known_columns[queue->contents].column); i++)
	{
		const KnownColumn *column = &known_columns[queue->contents].column[i];

		if (column->name && strcmp(column->name, name) == 0)
			known = column;
	}
	if (known == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_COLUMN_DEFINITION),
				 errmsg("a queue has no column \"%s\"", name),
				 errhint("%s", known_columns[queue->contents].hint)));
	if (OidIsValid(known->type) && att->atttypid != known->type)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_COLUMN_DEFINITION),
				 errmsg("column \"%s\" of a queue cannot have type %s", name,
						format_type_be(att->atttypid)),
				 errhint("Declare it %s.", format_type_be(known->type))));
	/* a virtual one would not reach the queue */
	if (att->attgenerated && !(known->generated && att->attgenerated == ATTRIBUTE_GENERATED_STORED))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_COLUMN_DEFINITION),
				 errmsg("column \"%s\" of a queue cannot be generated", name),
				 known->generated ? errhint("It can be GENERATED ALWAYS AS (...) STORED.") :
				 errhint("Its values come from Redis.")));
	if (strcmp(name, "payload") != 0 && GetForeignColumnOptions(queue->relid, att->attnum) != NIL)
		ereport(ERROR,
				(errcode(ERRCODE_FDW_INVALID_OPTION_NAME),
				 errmsg("column \"%s\" of a queue takes no options", name),
				 errhint("Option \"on_error\" belongs to column payload.")));
}

void
dq_ddl_check_columns(const DqQueue *queue)
{
	for (AttrNumber attno = 1;; attno++)
	{
		HeapTuple	tuple = SearchSysCache2(ATTNUM, ObjectIdGetDatum(queue->relid),
											Int16GetDatum(attno));
		Form_pg_attribute att;

		if (!HeapTupleIsValid(tuple))
			break;				/* dropped columns keep their row */
		att = (Form_pg_attribute) GETSTRUCT(tuple);
		if (!att->attisdropped)
			check_column(queue, att);
		ReleaseSysCache(tuple);
	}
}

/* A table that shows something else says nothing about the queue itself. */
void
dq_ddl_check_contents(const DqQueue *queue)
{
	ListCell   *lc;

	if (queue->contents == DQ_CONTENTS_PENDING)
		return;
	foreach(lc, GetForeignTable(queue->relid)->options)
	{
		const char *name = ((DefElem *) lfirst(lc))->defname;

		if (strcmp(name, "queue") != 0 && strcmp(name, "shards") != 0 &&
			strcmp(name, "contents") != 0)
			ereport(ERROR,
					(errcode(ERRCODE_FDW_INVALID_OPTION_NAME),
					 errmsg("foreign table \"%s\" does not show pending tasks, so it takes no option \"%s\"",
							queue->relname, name),
					 errhint("Give the option to the foreign table that shows the queue's pending tasks.")));
	}
}
