/*
 * columns.c
 *	  A task as a row of the foreign table: which columns are there, which the
 *	  query reads, and how bytes become their values. Called by scan.c.
 */
#include "postgres.h"

#include "access/parallel.h"
#include "access/sysattr.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "datatype/timestamp.h"
#include "foreign/foreign.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/resowner.h"
#include "utils/timestamp.h"

#include "fdw/fdw.h"
#include "queue/options.h"

#define EPOCH_DIFF_MS \
	((int64) (POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE) * SECS_PER_DAY * 1000)

typedef struct ScanColumn
{
	bool		read;			/* the query looks at it */
	bool		late;			/* made only for rows that pass the filter */
	DqColumnRole role;			/* DQ_NUM_COLS: none of ours */
	const char *name;
	Oid			type;
	int32		typmod;
	Oid			base;			/* of a domain, else the type */
	Oid			ioparam;
	FmgrInfo	input;
	bool		null_on_error;	/* what the column cannot hold is shown as NULL */
	bool		trusted;		/* the input function leaves nothing behind when it
								 * fails */
} ScanColumn;

struct DqColumns
{
	const char *relname;
	int			natts;
	ScanColumn *column;			/* by attribute number - 1 */
	bool		read[DQ_NUM_COLS];
};

/* What a row is made of, wherever it came from */
typedef struct Task
{
	char	   *id;				/* NULL: no pending task */
	int64		place;			/* ... but an element of the ready list */
	const char *key;			/* NULL: keyless */
	Size		key_len;
	const char *payload;
	Size		payload_len;
	bool		has_due;
	TimestampTz due_at;
	const char *reason;
	TimestampTz found_at;
} Task;

static void
check_type(const DqQueue *queue, Form_pg_attribute att, DqColumnRole role)
{
	static const Oid types[DQ_NUM_COLS] = {
		[DQ_COL_ID] = TEXTOID,
		[DQ_COL_DUE_AT] = TIMESTAMPTZOID,
		[DQ_COL_SHARD] = INT4OID,
		[DQ_COL_MEMBER] = BYTEAOID,
		[DQ_COL_REASON] = TEXTOID,
		[DQ_COL_FOUND_AT] = TIMESTAMPTZOID,
	};
	Oid			want = types[role];

	if (OidIsValid(want) && att->atttypid != want)
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("column \"%s\" of queue \"%s\" must be of type %s",
						NameStr(att->attname), queue->relname, format_type_be(want)),
				 errhint("Change the type back with ALTER TABLE.")));
}

DqColumns *
dq_columns_describe(const DqQueue *queue, TupleDesc desc, List *attrs)
{
	DqColumns  *columns = palloc0(sizeof(DqColumns));
	bool		whole_row = list_member_int(attrs, 0);

	columns->relname = pstrdup(queue->relname);
	columns->natts = desc->natts;
	columns->column = palloc0(Max(desc->natts, 1) * sizeof(ScanColumn));
	for (int i = 0; i < desc->natts; i++)
		columns->column[i].role = DQ_NUM_COLS;

	for (int role = 0; role < DQ_NUM_COLS; role++)
	{
		AttrNumber	attno = queue->column[role];
		Form_pg_attribute att;
		ScanColumn *column;
		Oid			function;

		if (attno == InvalidAttrNumber || attno > desc->natts)
			continue;
		att = TupleDescAttr(desc, attno - 1);
		/* a parent table may have changed the type behind our event trigger */
		check_type(queue, att, role);
		column = &columns->column[attno - 1];
		column->role = role;
		column->read = whole_row || list_member_int(attrs, attno);
		column->name = pstrdup(NameStr(att->attname));
		column->type = att->atttypid;
		column->typmod = att->atttypmod;
		column->base = getBaseType(att->atttypid);
		getTypeInputInfo(att->atttypid, &function, &column->ioparam);
		fmgr_info(function, &column->input);
		column->trusted = function < FirstNormalObjectId && function != F_DOMAIN_IN &&
			function != F_ARRAY_IN && function != F_RECORD_IN && function != F_RANGE_IN &&
			function != F_MULTIRANGE_IN;
		if (role == DQ_COL_PAYLOAD)
			column->null_on_error =
				strcmp(dq_option_text(GetForeignColumnOptions(queue->relid, attno),
									  DQ_ON_COLUMN, "on_error"), "null") == 0;
		columns->read[role] = column->read;
	}
	return columns;
}

bool
dq_columns_read(const DqColumns *columns, DqColumnRole role)
{
	return columns->read[role];
}

/* ---- values --------------------------------------------------------------------------- */

/* Whole ms are ours, or what any double that another producer has written rounds up
 * to. bounds.c knows the same limits. */
TimestampTz
dq_shown_instant(int64 ms)
{
	if (ms >= END_TIMESTAMP / 1000 + EPOCH_DIFF_MS)
		return DT_NOEND;
	if (ms < MIN_TIMESTAMP / 1000 + EPOCH_DIFF_MS)
		return DT_NOBEGIN;
	return (ms - EPOCH_DIFF_MS) * 1000;
}

static void
task_of_redis(Task *task, const DqTask *found)
{
	int64		ms = found->due;

	task->id = dq_task_id(found);
	task->key = found->key;
	task->key_len = found->key_len;
	task->payload = found->payload;
	task->payload_len = found->payload_len;
	task->has_due = true;
	task->due_at = dq_shown_instant(ms);
}

static void
task_of_outbox(Task *task, const DqRow *row)
{
	task->id = dq_id_out(row->due, row->id);
	task->key = row->key ? VARDATA_ANY(row->key) : NULL;
	task->key_len = row->key ? VARSIZE_ANY_EXHDR(row->key) : 0;
	task->payload = VARDATA_ANY(row->payload);
	task->payload_len = VARSIZE_ANY_EXHDR(row->payload);
	task->has_due = true;
	task->due_at = dq_due_to_timestamp(row->due);
}

/*
 * A value of the column; false: the type's input function has refused the bytes
 * without raising an error (only where null_on_error, and not on every version).
 */
static bool
bytes_to_column(ScanColumn *column, const char *data, Size len, Datum *result)
{
	text	   *value;

	if (column->base == BYTEAOID && column->role == DQ_COL_PAYLOAD)
	{
		*result = PointerGetDatum(cstring_to_text_with_len(data, len));
		if (column->type != BYTEAOID)
			domain_check(*result, false, column->type, NULL, NULL);
		return true;
	}
	value = column->null_on_error ? dq_bytes_text_noerror(data, len) :
		dq_bytes_text(data, len);
	if (value == NULL)
		return false;
	if (column->type == TEXTOID)
	{
		*result = PointerGetDatum(value);
		return true;
	}
	if (column->null_on_error)
		return dq_input_function_soft(&column->input, text_to_cstring(value),
									  column->ioparam, column->typmod, result);
	*result = InputFunctionCall(&column->input, text_to_cstring(value), column->ioparam,
								column->typmod);
	return true;
}

/* Data are what is wrong, not the system. */
static bool
is_data_error(const ErrorData *error)
{
	int			class = ERRCODE_TO_CATEGORY(error->sqlerrcode);

	return class == ERRCODE_DATA_EXCEPTION ||
		class == ERRCODE_INTEGRITY_CONSTRAINT_VIOLATION;
}

/*
 * The type's own message does not tell which of a million tasks is meant, nor
 * what to do. Only data exceptions are reworded; anything else passes through.
 */
static Datum
convert_or_raise(DqColumns *columns, ScanColumn *column, const Task *task,
				 const char *data, Size len)
{
	MemoryContext context = CurrentMemoryContext;
	Datum		result = (Datum) 0;

	PG_TRY();
	{
		(void) bytes_to_column(column, data, len, &result);
	}
	PG_CATCH();
	{
		ErrorData  *error;

		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		if (!is_data_error(error))
			PG_RE_THROW();
		FlushErrorState();
		ereport(ERROR,
				(errcode(error->sqlerrcode),
				 task->id ?
				 errmsg("%s of task %s does not fit column \"%s\" of \"%s\": %s",
						column->role == DQ_COL_PAYLOAD ? "payload" : "key",
						task->id, column->name, columns->relname, error->message) :
				 errmsg("element %lld of the ready list does not fit column \"%s\" of \"%s\": %s",
						(long long) task->place, column->name, columns->relname,
						error->message),
				 error->detail ? errdetail("%s", error->detail) : 0,
				 column->role == DQ_COL_PAYLOAD ?
				 errhint("Declare the column bytea to see what it holds.") :
				 errhint("Declare the column text to see what it holds.")));
	}
	PG_END_TRY();
	return result;
}

/*
 * Where an error means NULL it is caught. What PostgreSQL's own functions of simple
 * types leave behind is memory; others may do anything, so they run in a
 * subtransaction. In parallel mode there is none, and their errors pass.
 */
static bool
convert_or_null(ScanColumn *column, const char *data, Size len, Datum *result)
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	bool		subtransaction = !column->trusted && !IsInParallelMode();
	bool		ok = false;

	if (!column->trusted && !subtransaction)
		return bytes_to_column(column, data, len, result);
	if (subtransaction)
	{
		BeginInternalSubTransaction(NULL);
		MemoryContextSwitchTo(context);
	}
	PG_TRY();
	{
		ok = bytes_to_column(column, data, len, result);
		if (subtransaction)
			ReleaseCurrentSubTransaction();
	}
	PG_CATCH();
	{
		ErrorData  *error;

		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		if (!is_data_error(error))
			PG_RE_THROW();
		FlushErrorState();
		if (subtransaction)
			RollbackAndReleaseCurrentSubTransaction();
		ok = false;
	}
	PG_END_TRY();
	MemoryContextSwitchTo(context);
	CurrentResourceOwner = owner;
	return ok;
}

/* The value of a payload or key; false: NULL */
static bool
convert(DqColumns *columns, ScanColumn *column, const Task *task, const char *data,
		Size len, Datum *result)
{
	if (column->null_on_error)
		return convert_or_null(column, data, len, result);
	*result = convert_or_raise(columns, column, task, data, len);
	return true;
}

void
dq_columns_forgive(DqColumns *columns)
{
	for (int i = 0; i < columns->natts; i++)
		columns->column[i].null_on_error = columns->column[i].read;
}

/*
 * Payload and key go through input functions, which may refuse a stranger's
 * bytes: where the filter does not look at them, only rows that pass it are
 * converted. True: there is such a column.
 */
bool
dq_columns_defer(DqColumns *columns, Bitmapset *filter_attrs)
{
	bool		any = false;

	if (bms_is_member(0 - FirstLowInvalidHeapAttributeNumber, filter_attrs))
		return false;			/* the whole row */
	for (int i = 0; i < columns->natts; i++)
	{
		ScanColumn *column = &columns->column[i];

		column->late = column->read &&
			(column->role == DQ_COL_PAYLOAD || column->role == DQ_COL_KEY) &&
			!bms_is_member(i + 1 - FirstLowInvalidHeapAttributeNumber, filter_attrs);
		any |= column->late;
	}
	return any;
}

static void
store(DqColumns *columns, TupleTableSlot *slot, int shard, const Task *task,
	  DqStorePart part)
{
	for (int i = 0; i < columns->natts; i++)
	{
		ScanColumn *column = &columns->column[i];

		if (part == DQ_STORE_LATE && !column->late)
			continue;
		slot->tts_isnull[i] = true;
		if (!column->read || (part == DQ_STORE_EARLY && column->late))
			continue;
		switch (column->role)
		{
			case DQ_COL_ID:
				slot->tts_values[i] = CStringGetTextDatum(task->id);
				break;
			case DQ_COL_KEY:
				if (task->key == NULL ||
					!convert(columns, column, task, task->key, task->key_len,
							 &slot->tts_values[i]))
					continue;
				break;
			case DQ_COL_PAYLOAD:
				if (!convert(columns, column, task, task->payload, task->payload_len,
							 &slot->tts_values[i]))
					continue;
				break;
			case DQ_COL_DUE_AT:
				if (!task->has_due)
					continue;
				slot->tts_values[i] = TimestampTzGetDatum(task->due_at);
				break;
			case DQ_COL_SHARD:
				slot->tts_values[i] = Int32GetDatum(shard);
				break;
			case DQ_COL_MEMBER:
				slot->tts_values[i] = PointerGetDatum(cstring_to_text_with_len(task->payload,
																			   task->payload_len));
				break;
			case DQ_COL_REASON:
				slot->tts_values[i] = CStringGetTextDatum(task->reason);
				break;
			case DQ_COL_FOUND_AT:
				slot->tts_values[i] = TimestampTzGetDatum(task->found_at);
				break;
			default:
				continue;
		}
		slot->tts_isnull[i] = false;
	}
}

void
dq_columns_store_task(DqColumns *columns, TupleTableSlot *slot, int shard,
					  const DqTask *found, DqStorePart part)
{
	Task		task;

	task_of_redis(&task, found);
	store(columns, slot, shard, &task, part);
}

void
dq_columns_store_row(DqColumns *columns, TupleTableSlot *slot, int shard,
					 const DqRow *row, DqStorePart part)
{
	Task		task;

	task_of_outbox(&task, row);
	store(columns, slot, shard, &task, part);
}

void
dq_columns_store_shelved(DqColumns *columns, TupleTableSlot *slot, int shard,
						 const DqShelved *found)
{
	Task		task = {0};

	task.place = found->place;
	task.payload = found->data;
	task.payload_len = found->len;
	task.has_due = found->has_due;
	task.due_at = dq_shown_instant(found->due);
	task.reason = found->reason;
	task.found_at = dq_shown_instant(found->found);
	store(columns, slot, shard, &task, DQ_STORE_ALL);
}
