/*
 * page.c
 *	  Pages of operations in the form lua/apply.lua takes them. Called by the
 *	  relay.
 */
#include "postgres.h"

#include "queue/queue.h"

#include "utils/memutils.h"

DqPage *
dq_page_create(MemoryContext parent)
{
	MemoryContext context = AllocSetContextCreate(parent, "dq_bridge page",
												  ALLOCSET_DEFAULT_SIZES);
	DqPage	   *page = MemoryContextAllocZero(context, sizeof(DqPage));

	page->context = context;
	page->maxargs = 256;
	page->args = MemoryContextAlloc(context, page->maxargs * sizeof(DqArg));
	page->nargs = DQ_MAX_APPLY_ARGS;
	return page;
}

static void
page_add(DqPage *page, const void *data, size_t len, bool copy)
{
	DqArg	   *arg;

	if (page->nargs == page->maxargs)
	{
		page->maxargs *= 2;
		page->args = repalloc(page->args, page->maxargs * sizeof(DqArg));
	}
	arg = &page->args[page->nargs++];
	if (copy)
	{
		char	   *own = MemoryContextAlloc(page->context, Max(len, 1));

		memcpy(own, data, len);
		data = own;
	}
	arg->data = data;
	arg->len = len;
	page->bytes += len + 16;
}

static void
page_add_int(DqPage *page, int64 value)
{
	char		buf[24];
	int			len = snprintf(buf, sizeof(buf), INT64_FORMAT, value);

	page_add(page, buf, len, true);
}

void
dq_place_encode(unsigned char *place, int64 due, uint64 id)
{
	int			i;

	for (i = 0; i < 6; i++)
		place[i] = (due >> (8 * (5 - i))) & 0xff;
	for (i = 0; i < 8; i++)
		place[6 + i] = (id >> (8 * (7 - i))) & 0xff;
}

void
dq_page_offer(DqPage *page, int64 due, uint64 id, const bytea *payload,
			  const bytea *key)
{
	unsigned char place[14];

	dq_place_encode(place, due, id);
	page_add(page, key ? "k" : "o", 1, false);
	page_add_int(page, due);
	page_add(page, place, sizeof(place), true);
	page_add(page, VARDATA_ANY(payload), VARSIZE_ANY_EXHDR(payload), true);
	if (key)
		page_add(page, VARDATA_ANY(key), VARSIZE_ANY_EXHDR(key), true);
	page->nops++;
}

/* Where a task goes that a removal before it has taken away, under that token. */
void
dq_page_reschedule(DqPage *page, int64 due, uint64 id, const bytea *payload,
				   const bytea *key, const bytea *token)
{
	unsigned char place[14];

	dq_place_encode(place, due, id);
	page_add(page, "s", 1, false);
	page_add_int(page, due);
	page_add(page, place, sizeof(place), true);
	page_add(page, VARDATA_ANY(payload), VARSIZE_ANY_EXHDR(payload), true);
	if (key)
		page_add(page, VARDATA_ANY(key), VARSIZE_ANY_EXHDR(key), true);
	else
		page_add(page, "", 0, false);
	if (token)
		page_add(page, VARDATA_ANY(token), VARSIZE_ANY_EXHDR(token), true);
	else
		page_add(page, "", 0, false);
	page->nops++;
}

/* The token says which hold the row ends, if it stands. */
void
dq_page_remove(DqPage *page, const bytea *member, int64 due, const bytea *token)
{
	page_add(page, "r", 1, false);
	page_add(page, VARDATA_ANY(member), VARSIZE_ANY_EXHDR(member), true);
	page_add_int(page, due);
	if (token)
		page_add(page, VARDATA_ANY(token), VARSIZE_ANY_EXHDR(token), true);
	else
		page_add(page, "", 0, false);
	page->nops++;
}

/* To another instant, if it is still there and nobody holds it; keeps payload and key. */
void
dq_page_move(DqPage *page, const bytea *member, int64 due, uint64 id)
{
	unsigned char place[14];

	dq_place_encode(place, due, id);
	page_add(page, "m", 1, false);
	page_add(page, VARDATA_ANY(member), VARSIZE_ANY_EXHDR(member), true);
	page_add_int(page, due);
	page_add(page, place, sizeof(place), true);
	page->nops++;
}

void
dq_page_consume(DqPage *page, const bytea *token, int64 n)
{
	page_add(page, "c", 1, false);
	page_add(page, VARDATA_ANY(token), VARSIZE_ANY_EXHDR(token), true);
	page_add_int(page, n);
	page->nops++;
}

/*
 * If the element has the form of a task id: its due instant in digits and the
 * bytes of its id; else both empty.
 */
void
dq_element_id(const bytea *element, DqArg *due, DqArg *id)
{
	int64		due_ms;
	uint64		number;
	bytea	   *foreign = NULL;

	*due = DQ_ARG("");
	*id = DQ_ARG("");
	if (!dq_id_in(VARDATA_ANY(element), VARSIZE_ANY_EXHDR(element), &due_ms,
				  &number, &foreign))
		return;
	/* no packed member has a longer one */
	if (foreign && VARSIZE_ANY_EXHDR(foreign) > 255)
		return;
	due->data = psprintf(INT64_FORMAT, due_ms);
	due->len = strlen(due->data);
	if (foreign)
		*id = DQ_ARG_LEN(VARDATA_ANY(foreign), VARSIZE_ANY_EXHDR(foreign));
	else
	{
		unsigned char *place = palloc(14);

		dq_place_encode(place, due_ms, number);
		*id = DQ_ARG_LEN(place + 6, 8);
	}
}

void
dq_page_remove_key(DqPage *page, const bytea *key)
{
	page_add(page, "x", 1, false);
	page_add(page, VARDATA_ANY(key), VARSIZE_ANY_EXHDR(key), true);
	page->nops++;
}

void
dq_page_discard(DqPage *page, const bytea *member)
{
	page_add(page, "q", 1, false);
	page_add(page, VARDATA_ANY(member), VARSIZE_ANY_EXHDR(member), true);
	page->nops++;
}
