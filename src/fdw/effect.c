/*
 * effect.c
 *	  What the operations that are not in Redis yet amount to: which offers are
 *	  replaced or removed, and which tasks in Redis must not be shown because of
 *	  them. Called by unsent.c and, for each task found in Redis, by scan.c.
 */
#include "postgres.h"

#include "common/hashfn.h"

#include "fdw/unsent_private.h"

static uint32
bytes_hash(const void *key, Size keysize)
{
	const Bytes *bytes = key;

	return hash_bytes((const unsigned char *) bytes->data, bytes->len);
}

static int
bytes_match(const void *a, const void *b, Size keysize)
{
	const Bytes *x = a;
	const Bytes *y = b;

	return !(x->len == y->len && memcmp(x->data, y->data, x->len) == 0);
}

static bool
bytes_equal(const Bytes *a, const char *data, Size len)
{
	return a->len == len && memcmp(a->data, data, len) == 0;
}

static HTAB *
bytes_table(DqUnsent *unsent, const char *name, Size entrysize)
{
	HASHCTL		ctl = {0};

	ctl.keysize = sizeof(Bytes);
	ctl.entrysize = entrysize;
	ctl.hash = bytes_hash;
	ctl.match = bytes_match;
	ctl.hcxt = unsent->context;
	return hash_create(name, 64, &ctl,
					   HASH_ELEM | HASH_FUNCTION | HASH_COMPARE | HASH_CONTEXT);
}

static uint64
id_number(const char *idbytes)
{
	uint64		id = 0;

	for (int i = 0; i < 8; i++)
		id = (id << 8) | (unsigned char) idbytes[i];
	return id;
}

static void
kill_offer(DqUnsent *unsent, uint64 id)
{
	Offer	   *offer = dq_unsent_offer(unsent, id);

	if (offer)
		offer->xid |= DEAD;
}

static void
apply_offer(DqUnsent *unsent, const Op *op)
{
	KeyEntry   *entry;
	bool		found;

	if (unsent->keys == NULL)
		unsent->keys = bytes_table(unsent, "dq_bridge unsent keys", sizeof(KeyEntry));
	entry = hash_search(unsent->keys, &op->bytes, HASH_ENTER, &found);
	if (found && entry->live)
		kill_offer(unsent, entry->id);
	entry->live = true;
	entry->id = op->id;
}

static void
hide_member(DqUnsent *unsent, const Bytes *member)
{
	if (unsent->members == NULL)
		unsent->members = bytes_table(unsent, "dq_bridge unsent removals",
									  sizeof(MemberEntry));
	(void) hash_search(unsent->members, member, HASH_ENTER, NULL);
}

static void
apply_remove(DqUnsent *unsent, const Op *op)
{
	hide_member(unsent, &op->bytes);
	if (op->bytes.len >= 17 && op->bytes.data[0] == 8)
		kill_offer(unsent, id_number(op->bytes.data + 1));
}

static void
apply_element(DqUnsent *unsent, const Op *op)
{
	KeyEntry   *entry = NULL;
	Element    *element;
	bytea	   *foreign;
	uint64		id;

	if (unsent->keys)
		entry = hash_search(unsent->keys, &op->bytes, HASH_FIND, NULL);
	if (entry && entry->live)
	{
		Offer	   *offer = dq_unsent_offer(unsent, entry->id);

		entry->live = false;
		if (offer && !(offer->xid & DEAD))
		{
			offer->xid |= DEAD;
			return;
		}
	}

	element = palloc0(sizeof(Element));
	element->bytes = op->bytes;
	element->last = op->last;
	element->seq = op->seq;
	if (dq_id_in(op->bytes.data, op->bytes.len, &element->due, &id, &foreign))
	{
		element->is_id = true;
		if (foreign)
			element->id = dq_unsent_copy(foreign);
		else
		{
			Offer	   *offer = dq_unsent_offer(unsent, id);
			char	   *raw;

			if (offer && !(offer->xid & DEAD))
			{
				offer->xid |= DEAD;
				return;
			}
			raw = palloc(8);
			for (int i = 0; i < 8; i++)
				raw[i] = (char) (id >> (8 * (7 - i)));
			element->id.data = raw;
			element->id.len = 8;
		}
	}
	unsent->elements = lappend(unsent->elements, element);
}

void
dq_unsent_effect(DqUnsent *unsent)
{
	for (Size i = 0; i < unsent->nops; i++)
	{
		Op		   *op = &unsent->ops[i];

		if (op->op == DQ_OP_OFFER)
			apply_offer(unsent, op);
		else if (op->op == DQ_OP_REMOVE)
			apply_remove(unsent, op);
		else
			apply_element(unsent, op);
	}
}

bool
dq_unsent_holder(DqUnsent *unsent, const char *key, Size len, uint64 *id)
{
	Bytes		bytes = {key, len};
	KeyEntry   *entry;

	if (unsent->keys == NULL)
		return false;
	entry = hash_search(unsent->keys, &bytes, HASH_FIND, NULL);
	if (entry == NULL || !entry->live)
		return false;
	*id = entry->id;
	return true;
}

/* ---- deferred removals ------------------------------------------------------------- */

bool
dq_unsent_unsettled(const DqUnsent *unsent)
{
	return unsent->elements != NIL;
}

void
dq_unsent_settled(DqUnsent *unsent)
{
	unsent->elements = NIL;
}

static bool
is_meant(const Element *element, const DqTask *task)
{
	if (task->key && bytes_equal(&element->bytes, task->key, task->key_len))
		return true;
	if (element->is_id && (double) element->due == task->score &&
		bytes_equal(&element->id, task->idbytes, task->idlen))
		return true;
	return task->key == NULL &&
		bytes_equal(&element->bytes, task->payload, task->payload_len);
}

void
dq_unsent_settle_task(DqUnsent *unsent, const DqTask *task)
{
	ListCell   *lc;

	if (dq_unsent_hides(unsent, task))
		return;
	foreach(lc, unsent->elements)
	{
		if (is_meant(lfirst(lc), task))
		{
			MemoryContext old = MemoryContextSwitchTo(unsent->context);
			Bytes		member = {task->member, task->member_len};
			char	   *copy = palloc(Max(member.len, 1));

			memcpy(copy, member.data, member.len);
			member.data = copy;
			hide_member(unsent, &member);
			MemoryContextSwitchTo(old);
			unsent->elements = foreach_delete_current(unsent->elements, lc);
			return;
		}
	}
}

void
dq_unsent_settle_row(DqUnsent *unsent, const DqRow *row)
{
	Xact	   *xact;
	ListCell   *lc;

	if (row->key)
		return;					/* of keyed ones the first pass knows */
	xact = dq_unsent_xact(unsent, U64FromFullTransactionId(row->xid));
	foreach(lc, unsent->elements)
	{
		Element    *element = lfirst(lc);

		if ((element->last > xact->last ||
			 (element->last == xact->last && element->seq > row->seq)) &&
			bytes_equal(&element->bytes, VARDATA_ANY(row->payload),
						VARSIZE_ANY_EXHDR(row->payload)))
		{
			kill_offer(unsent, row->id);
			unsent->elements = foreach_delete_current(unsent->elements, lc);
			return;
		}
	}
}

bool
dq_unsent_hides(DqUnsent *unsent, const DqTask *task)
{
	Bytes		bytes;

	if (task->idlen == 8 && !task->old &&
		dq_unsent_offer(unsent, id_number(task->idbytes)))
		return true;

	if (unsent->members)
	{
		bytes.data = task->member;
		bytes.len = task->member_len;
		if (hash_search(unsent->members, &bytes, HASH_FIND, NULL))
			return true;
	}
	if (unsent->keys && task->key)
	{
		bytes.data = task->key;
		bytes.len = task->key_len;
		if (hash_search(unsent->keys, &bytes, HASH_FIND, NULL))
			return true;
	}
	return false;
}

/* ---- the quarantine ---------------------------------------------------------------- */

void
dq_unsent_note_discard(DqUnsent *unsent, const bytea *member)
{
	MemoryContext old = MemoryContextSwitchTo(unsent->context);
	Bytes		bytes = dq_unsent_copy(member);

	if (unsent->discarded == NULL)
		unsent->discarded = bytes_table(unsent, "dq_bridge unsent discards",
										sizeof(MemberEntry));
	(void) hash_search(unsent->discarded, &bytes, HASH_ENTER, NULL);
	MemoryContextSwitchTo(old);
}

bool
dq_unsent_discards(const DqUnsent *unsent, const char *data, Size len)
{
	Bytes		bytes = {data, len};

	return unsent->discarded &&
		hash_search(unsent->discarded, &bytes, HASH_FIND, NULL) != NULL;
}
