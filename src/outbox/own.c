/*
 * own.c
 *	  What the current transaction has offered and not taken back: dq_remove of a
 *	  task that is not committed yet is answered from here. Built from the outbox
 *	  when it is first asked for, kept up to date by later operations, dropped at
 *	  the end of the transaction or when a savepoint is rolled back.
 */
#include "postgres.h"

#include "outbox/outbox.h"
#include "outbox/outbox_private.h"

#include "access/xact.h"
#include "common/hashfn.h"
#include "lib/stringinfo.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

/* Tasks under one hash of (kind, shard, bytes); compared whole when read. */
typedef struct OwnEntry
{
	uint64		hash;			/* must be first */
	List	   *tasks;			/* of DqOwnTask, in call order */
} OwnEntry;

static MemoryContext own_context = NULL;
static HTAB *own_hash = NULL;
static List *own_shards = NIL;	/* shards that are in the hash */

void
dq_own_forget(void)
{
	if (own_context)
		MemoryContextDelete(own_context);
	own_context = NULL;
	own_hash = NULL;
	own_shards = NIL;
}

static uint64
own_key(char kind, int32 shard, const char *data, size_t len)
{
	return hash_bytes_extended((const unsigned char *) data, len,
							   ((uint64) (uint32) shard << 8) | (unsigned char) kind);
}

static void
own_put(char kind, DqOwnTask *task, const char *data, size_t len)
{
	uint64		hash = own_key(kind, task->shard, data, len);
	bool		found;
	OwnEntry   *entry = hash_search(own_hash, &hash, HASH_ENTER, &found);

	if (!found)
		entry->tasks = NIL;
	entry->tasks = lappend(entry->tasks, task);
}

static bool
bytes_are(const bytea *value, const char *data, size_t len)
{
	return value && VARSIZE_ANY_EXHDR(value) == len &&
		memcmp(VARDATA_ANY(value), data, len) == 0;
}

/* The live task that (kind, bytes) names; for payloads the earliest due. */
static DqOwnTask *
own_get(char kind, int32 shard, const char *data, size_t len)
{
	uint64		hash = own_key(kind, shard, data, len);
	OwnEntry   *entry = hash_search(own_hash, &hash, HASH_FIND, NULL);
	DqOwnTask  *best = NULL;
	ListCell   *lc;

	if (!entry)
		return NULL;
	foreach(lc, entry->tasks)
	{
		DqOwnTask  *task = lfirst(lc);

		if (task->gone || task->shard != shard)
			continue;
		if (kind == 'k' && !bytes_are(task->key, data, len))
			continue;
		if (kind == 'p' && (task->key || !bytes_are(task->payload, data, len)))
			continue;
		if (kind == 'i' && memcmp(&task->id, data, sizeof(uint64)) != 0)
			continue;
		if (best == NULL || task->due < best->due ||
			(task->due == best->due && task->id < best->id))
			best = task;
	}
	return best;
}

static DqOwnTask *
own_element(int32 shard, const bytea *element)
{
	const char *data = VARDATA_ANY(element);
	size_t		len = VARSIZE_ANY_EXHDR(element);
	DqOwnTask  *task;
	int64		due;
	uint64		id;
	bytea	   *foreign = NULL;

	task = own_get('k', shard, data, len);
	if (!task && dq_id_in(data, len, &due, &id, &foreign) && !foreign)
	{
		task = own_get('i', shard, (char *) &id, sizeof(id));
		if (task && task->due != due)
			task = NULL;
	}
	if (!task)
		task = own_get('p', shard, data, len);
	return task;
}

static bytea *
bytes_copy(const bytea *value)
{
	bytea	   *copy;

	if (!value)
		return NULL;
	copy = palloc(VARSIZE_ANY(value));
	memcpy(copy, value, VARSIZE_ANY(value));
	return copy;
}

/*
 * Members this transaction has removed, by their payload: Redis still shows them
 * as pending. Kept as tasks that are gone, under kind 'r'.
 */
static void
own_put_removed(const DqRow *row)
{
	DqOwnTask  *task = palloc0(sizeof(DqOwnTask));
	const char *member = VARDATA_ANY(row->member);
	size_t		len = VARSIZE_ANY_EXHDR(row->member);
	size_t		skip = len > 0 ? 1 + (unsigned char) member[0] + 8 : 0;

	task->shard = row->shard;
	task->payload = bytes_copy(row->member);
	task->gone = true;
	if (skip > 0 && skip <= len)
		own_put('r', task, member + skip, len - skip);
	own_put('m', task, member, len);
}

/* The row's effect on what is known. Rows come in call order. */
static void
own_apply(const DqRow *row)
{
	MemoryContext old = MemoryContextSwitchTo(own_context);
	DqOwnTask  *task;

	switch (row->op)
	{
		case DQ_OP_OFFER:
		case DQ_OP_RESCHEDULE:
			if (row->key)
			{
				task = own_get('k', row->shard, VARDATA_ANY(row->key),
							   VARSIZE_ANY_EXHDR(row->key));
				if (task)
					task->gone = true;	/* replaced */
			}
			task = palloc0(sizeof(DqOwnTask));
			task->shard = row->shard;
			task->due = row->due;
			task->id = row->id;
			task->key = bytes_copy(row->key);
			task->payload = bytes_copy(row->payload);
			own_put('i', task, (char *) &task->id, sizeof(task->id));
			if (task->key)
				own_put('k', task, VARDATA_ANY(task->key), VARSIZE_ANY_EXHDR(task->key));
			else
				own_put('p', task, VARDATA_ANY(task->payload),
						VARSIZE_ANY_EXHDR(task->payload));
			break;
		case DQ_OP_REMOVE:
			own_put_removed(row);
			/* a member of ours has its id behind the length byte */
			if (VARSIZE_ANY_EXHDR(row->member) > 9 && VARDATA_ANY(row->member)[0] == 8)
			{
				const unsigned char *p = (unsigned char *) VARDATA_ANY(row->member) + 1;
				uint64		id = 0;
				int			i;

				for (i = 0; i < 8; i++)
					id = (id << 8) | p[i];
				task = own_get('i', row->shard, (char *) &id, sizeof(id));
				if (task)
					task->gone = true;
			}
			break;
		case DQ_OP_REMOVE_KEY:
			task = own_get('k', row->shard, VARDATA_ANY(row->key),
						   VARSIZE_ANY_EXHDR(row->key));
			if (task)
				task->gone = true;
			break;
		case DQ_OP_REMOVE_ELEMENT:
			task = own_element(row->shard, row->key);
			if (task)
				task->gone = true;
			break;
	}
	MemoryContextSwitchTo(old);
}

void
dq_own_added(const DqRow *row)
{
	if (own_context && list_member_int(own_shards, row->shard))
		own_apply(row);
}

/*
 * Read this transaction's rows of a shard. SnapshotSelf shows what the current
 * command has inserted too, and nothing of a rolled back savepoint; the range of
 * xids lets nobody else's rows in.
 */
static void
own_load(int32 shard)
{
	FullTransactionId own = GetTopFullTransactionIdIfAny();
	FullTransactionId next = own;
	DqOutboxScan *scan;
	DqRow		row;
	MemoryContext each,
				old;

	if (own_context == NULL)
	{
		HASHCTL		ctl;

		own_context = AllocSetContextCreate(TopTransactionContext, "dq_bridge own tasks",
											ALLOCSET_DEFAULT_SIZES);
		ctl.keysize = sizeof(uint64);
		ctl.entrysize = sizeof(OwnEntry);
		ctl.hcxt = own_context;
		own_hash = hash_create("dq_bridge own tasks", 256, &ctl,
							   HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
		own_shards = NIL;
	}
	if (list_member_int(own_shards, shard))
		return;

	FullTransactionIdAdvance(&next);
	each = AllocSetContextCreate(CurrentMemoryContext, "dq_bridge own row",
								 ALLOCSET_DEFAULT_SIZES);
	scan = dq_outbox_scan_begin(shard, own, next, SnapshotSelf);
	for (;;)
	{
		bool		more;

		MemoryContextReset(each);
		old = MemoryContextSwitchTo(each);
		more = dq_outbox_scan_next(scan, &row, true);
		MemoryContextSwitchTo(old);
		if (!more)
			break;
		own_apply(&row);
	}
	dq_outbox_scan_end(scan);
	MemoryContextDelete(each);
	old = MemoryContextSwitchTo(own_context);
	own_shards = lappend_int(own_shards, shard);
	MemoryContextSwitchTo(old);
}

char *
dq_own_removed_ids(DqQueue *queue, const bytea *payload, size_t *len)
{
	StringInfoData ids;
	int			i;

	initStringInfo(&ids);
	*len = 0;
	if (!FullTransactionIdIsValid(GetTopFullTransactionIdIfAny()))
		return ids.data;
	dq_shards_resolve(queue);
	for (i = 0; i < queue->nshards; i++)
	{
		uint64		hash = own_key('r', queue->shard_no[i], VARDATA_ANY(payload),
								   VARSIZE_ANY_EXHDR(payload));
		OwnEntry   *entry;
		ListCell   *lc;

		own_load(queue->shard_no[i]);
		entry = hash_search(own_hash, &hash, HASH_FIND, NULL);
		if (entry)
			foreach(lc, entry->tasks)
			{
				const bytea *member = ((DqOwnTask *) lfirst(lc))->payload;

				if (VARSIZE_ANY_EXHDR(member) > 9 && VARDATA_ANY(member)[0] == 8)
					appendBinaryStringInfo(&ids, VARDATA_ANY(member) + 1, 8);
			}
	}
	*len = ids.len;
	return ids.data;
}

/* Has this transaction removed exactly this member? */
bool
dq_own_has_removed(int32 shard, const bytea *member)
{
	uint64		hash = own_key('m', shard, VARDATA_ANY(member), VARSIZE_ANY_EXHDR(member));
	OwnEntry   *entry;
	ListCell   *lc;

	if (own_hash == NULL)
		return false;
	entry = hash_search(own_hash, &hash, HASH_FIND, NULL);
	if (entry)
		foreach(lc, entry->tasks)
			if (bytes_are(((DqOwnTask *) lfirst(lc))->payload, VARDATA_ANY(member),
						  VARSIZE_ANY_EXHDR(member)))
				return true;
	return false;
}

/* 'k', 'i' or 'p': as what an element names the own task. */
static char
own_how(const DqOwnTask *task, const bytea *element)
{
	if (task->key && bytes_are(task->key, VARDATA_ANY(element), VARSIZE_ANY_EXHDR(element)))
		return 'k';
	if (task->key || !bytes_are(task->payload, VARDATA_ANY(element), VARSIZE_ANY_EXHDR(element)))
		return 'i';
	return 'p';
}

bool
dq_own_find(DqQueue *queue, const bytea *element, DqOwnTask *result)
{
	DqOwnTask  *best = NULL;
	int			i;

	if (!FullTransactionIdIsValid(GetTopFullTransactionIdIfAny()))
		return false;
	dq_shards_resolve(queue);
	for (i = 0; i < queue->nshards; i++)
	{
		DqOwnTask  *task;

		own_load(queue->shard_no[i]);
		task = own_element(queue->shard_no[i], element);
		if (task && (best == NULL ||
					 (task->key && !best->key) ||
					 ((task->key != NULL) == (best->key != NULL) && task->due < best->due)))
			best = task;
	}
	if (best)
	{
		*result = *best;
		result->how = own_how(best, element);
	}
	return best != NULL;
}

char
dq_own_task(int32 shard, int64 due, uint64 id, DqOwnTask *task)
{
	uint64		hash = own_key('i', shard, (char *) &id, sizeof(id));
	OwnEntry   *entry;
	ListCell   *lc;

	if (!FullTransactionIdIsValid(GetTopFullTransactionIdIfAny()))
		return 0;
	own_load(shard);
	entry = hash_search(own_hash, &hash, HASH_FIND, NULL);
	if (entry)
		foreach(lc, entry->tasks)
		{
			*task = *(DqOwnTask *) lfirst(lc);
			if (task->shard == shard && task->due == due && task->id == id)
				return task->gone ? 'g' : 'o';
		}
	return 0;
}

/* Redisson's packing, as a 64-bit little-endian server writes it. */
bytea *
dq_member_make(uint64 id, const bytea *payload)
{
	size_t		len = VARSIZE_ANY_EXHDR(payload);
	bytea	   *member = palloc(VARHDRSZ + 17 + len);
	unsigned char *p = (unsigned char *) VARDATA(member);
	int			i;

	SET_VARSIZE(member, VARHDRSZ + 17 + len);
	*p++ = 8;
	for (i = 0; i < 8; i++)
		*p++ = (id >> (8 * (7 - i))) & 0xff;
	for (i = 0; i < 8; i++)
		*p++ = ((uint64) len >> (8 * i)) & 0xff;
	memcpy(p, VARDATA_ANY(payload), len);
	return member;
}
