/*
 * dead.c
 *	  Table dq_dead_letters: tasks that could not be delivered, whole. Written in the
 *	  transaction of their batch.
 */
#include "postgres.h"

#include "compat.h"
#include "deliver/deliver_private.h"

#include "access/table.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

void
dq_dead_store(const DqQueue *queue, const DqTask *task, int attempts, const ErrorData *error)
{
	Relation	rel = table_open(dq_extension_relation("dq_dead_letters"), RowExclusiveLock);
	Datum		values[DQ_DEAD_NATTS] = {0};
	bool		nulls[DQ_DEAD_NATTS] = {0};
	bytea	   *payload = palloc(VARHDRSZ + task->payload_len);
	text	   *key = task->key ? dq_bytes_text_noerror(task->key, task->key_len) : NULL;

	SET_VARSIZE(payload, VARHDRSZ + task->payload_len);
	memcpy(VARDATA(payload), task->payload, task->payload_len);
	values[DQ_DEAD_QUEUE - 1] = ObjectIdGetDatum(queue->relid);
	values[DQ_DEAD_ID - 1] = CStringGetTextDatum(dq_task_id(task));
	values[DQ_DEAD_KEY - 1] = PointerGetDatum(key);
	nulls[DQ_DEAD_KEY - 1] = key == NULL;
	values[DQ_DEAD_PAYLOAD - 1] = PointerGetDatum(payload);
	values[DQ_DEAD_DUE_AT - 1] = TimestampTzGetDatum(dq_due_to_timestamp(task->due));
	values[DQ_DEAD_DIED_AT - 1] = TimestampTzGetDatum(GetCurrentTimestamp());
	values[DQ_DEAD_ATTEMPTS - 1] = Int32GetDatum(attempts);
	values[DQ_DEAD_SQLSTATE - 1] =
		CStringGetTextDatum(unpack_sql_state(error->sqlerrcode));
	values[DQ_DEAD_ERROR - 1] =
		CStringGetTextDatum(error->detail ?
							psprintf("%s (%s)", error->message, error->detail) :
							error->message ? error->message : "");
	(void) dq_store_insert(rel, values, nulls);
	table_close(rel, RowExclusiveLock);
}
