/*
 * shelf.c
 *	  Reading what is no pending task: elements of the ready list, and what nobody could
 *	  read. One C function per Lua script, as in operations.c. Called by the FDW.
 */
#include "postgres.h"

#include "queue/operations_private.h"

#define READY_ELEMENTS (FENCE_ELEMENTS + 2)
#define BAD_ELEMENTS (FENCE_ELEMENTS + 7)
/* so many elements tell where a page ended, or fewer when they are long */
#define LAST_ELEMENTS	8
#define LAST_BYTES		4096

/* first: element of the reply where entries begin, behind how many there are and a place */
static DqReply *
call_shelf(DqRedis *redis, const char *queue, DqScriptId script, const DqKeys *keys,
		   int nargs, const DqArg *args, int first, DqShelf *shelf)
{
	DqReply    *reply = dq_script_call(redis, queue, script, keys, nargs, args, first);

	memset(shelf, 0, sizeof(*shelf));
	shelf->total = dq_part_int(reply, first - 2);
	for (int i = 0; i < reply->nelements; i++)
	{
		shelf->bytes += reply->elements[i].len + 6;
		if (i >= first && reply->elements[i].type != DQ_REPLY_STRING)
			ereport(ERROR,
					(errcode(ERRCODE_PROTOCOL_VIOLATION),
					 errmsg("unexpected reply of script \"%s\"", dq_script_name(script)),
					 errhint("A script in dq_bridge.script_dir may be of another version.")));
	}
	shelf->entries = palloc0(Max(reply->nelements - first, 1) * sizeof(DqShelved));
	return reply;
}

void
dq_op_ready(DqRedis *redis, const char *queue, const DqKeys *keys, const char *source,
			const DqShelfPlace *from, int limit, size_t max_bytes, DqShelf *shelf)
{
	int			nargs = 4 + from->nlast;
	DqArg	   *a = palloc(nargs * sizeof(DqArg));
	DqReply    *reply;
	int64		at;
	size_t		bytes = 0;

	a[0] = DQ_ARG(source);
	a[1] = DQ_ARG(psprintf(INT64_FORMAT, from->at));
	a[2] = DQ_ARG(psprintf("%d", limit));
	a[3] = DQ_ARG(psprintf("%zu", max_bytes));
	for (int i = 0; i < from->nlast; i++)
		a[4 + i] = from->last[i];
	reply = call_shelf(redis, queue, DQ_SCRIPT_READY, keys, nargs, a, READY_ELEMENTS,
					   shelf);
	at = dq_part_int(reply, FENCE_ELEMENTS + 1);
	for (int i = READY_ELEMENTS; i < reply->nelements; i++)
	{
		DqShelved  *entry = &shelf->entries[shelf->nentries];

		entry->data = reply->elements[i].str;
		entry->len = reply->elements[i].len;
		entry->place = at + shelf->nentries++;
	}
	shelf->end = at + shelf->nentries >= shelf->total || shelf->nentries == 0;
	shelf->next.at = at + shelf->nentries;
	shelf->next.last = palloc(LAST_ELEMENTS * sizeof(DqArg));
	while (shelf->next.nlast < Min(LAST_ELEMENTS, shelf->nentries) && bytes < LAST_BYTES)
		bytes += shelf->entries[shelf->nentries - ++shelf->next.nlast].len;
	for (int i = 0; i < shelf->next.nlast; i++)
	{
		DqShelved  *entry = &shelf->entries[shelf->nentries - shelf->next.nlast + i];

		shelf->next.last[i] = DQ_ARG_LEN(entry->data, entry->len);
	}
}

/* 'reason|score|found', and perhaps '|number' */
static void
read_reason(const DqReply *value, DqShelved *entry)
{
	char	   *text = pnstrdup(value->str, value->len);
	char	   *part[4] = {text, "", "", ""};

	for (int i = 1; i < lengthof(part); i++)
	{
		char	   *bar = strchr(part[i - 1], '|');

		if (bar == NULL)
			break;
		*bar = '\0';
		part[i] = bar + 1;
	}
	entry->reason = part[3][0] ? psprintf("%s (%s times)", part[0], part[3]) : part[0];
	entry->has_due = part[1][0] != '\0';
	if (entry->has_due)
		entry->due = dq_score_ms(strtod(part[1], NULL));
	entry->found = strtoll(part[2], NULL, 10);
}

void
dq_op_bad(DqRedis *redis, const char *queue, const DqKeys *keys, const char *source,
		  const DqShelfPlace *from, int limit, DqShelf *shelf)
{
	DqArg		a[3];
	DqReply    *reply;

	a[0] = DQ_ARG(source);
	a[1] = DQ_ARG(from->cursor ? from->cursor : "0");
	a[2] = DQ_ARG(psprintf("%d", limit));
	reply = call_shelf(redis, queue, DQ_SCRIPT_BAD, keys, lengthof(a), a, BAD_ELEMENTS,
					   shelf);
	dq_read_fence_read(reply, &shelf->fence);
	shelf->owner_source = dq_part_text(reply, FENCE_ELEMENTS + 3);
	shelf->owner_place = dq_part_text(reply, FENCE_ELEMENTS + 4);
	shelf->next.cursor = dq_part_text(reply, FENCE_ELEMENTS + 6);
	shelf->end = strcmp(shelf->next.cursor, "0") == 0;
	for (int i = BAD_ELEMENTS; i + 1 < reply->nelements; i += 2)
	{
		DqShelved  *entry = &shelf->entries[shelf->nentries++];

		entry->data = reply->elements[i].str;
		entry->len = reply->elements[i].len;
		read_reason(&reply->elements[i + 1], entry);
	}
}
