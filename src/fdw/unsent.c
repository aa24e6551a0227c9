/*
 * unsent.c
 *	  What has been committed, or done by the current transaction, and is not
 *	  known to be in Redis yet: a foreign scan shows it together with what Redis
 *	  has, each task once.
 *
 *	  The scan first asks Redis for a page together with the fence, and then reads
 *	  the outbox. An operation the fence covers was in Redis when the page was
 *	  read; any other may reach it at any moment while the scan goes on. So tasks
 *	  offered in the latter are shown from here, and skipped by their ids if they
 *	  turn up in Redis.
 *
 *	  Two passes over the outbox: the first learns the net effect (ids, keys,
 *	  removals; no payloads), the second gives out the tasks. Per offer the first
 *	  keeps 24 bytes.
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "fdw/unsent_private.h"

/* ---- small helpers -------------------------------------------------------------- */

Bytes
dq_unsent_copy(const bytea *value)
{
	Bytes		result;
	char	   *data;

	result.len = VARSIZE_ANY_EXHDR(value);
	data = palloc(Max(result.len, 1));
	memcpy(data, VARDATA_ANY(value), result.len);
	result.data = data;
	return result;
}

/* Room for one more element; the arrays may pass the limit of palloc. */
static void *
grow(DqUnsent *unsent, void *array, Size n, Size *max, Size size)
{
	if (n < *max)
		return array;
	if (array == NULL)
	{
		*max = 64;
		return MemoryContextAlloc(unsent->context, *max * size);
	}
	*max *= 2;
	return repalloc_huge(array, *max * size);
}

static int
offer_cmp(const void *a, const void *b)
{
	uint64		x = ((const Offer *) a)->id;
	uint64		y = ((const Offer *) b)->id;

	return x < y ? -1 : x > y;
}

static int
xact_cmp(const void *a, const void *b)
{
	uint64		x = ((const Xact *) a)->xid;
	uint64		y = ((const Xact *) b)->xid;

	return x < y ? -1 : x > y;
}

static int
op_cmp(const void *a, const void *b)
{
	const Op   *x = a;
	const Op   *y = b;

	if (x->last != y->last)
		return x->last < y->last ? -1 : 1;
	return x->seq < y->seq ? -1 : x->seq > y->seq;
}

Offer *
dq_unsent_offer(DqUnsent *unsent, uint64 id)
{
	Offer		key = {.id = id};

	if (unsent->noffers == 0)
		return NULL;
	return bsearch(&key, unsent->offers, unsent->noffers, sizeof(Offer), offer_cmp);
}

Xact *
dq_unsent_xact(DqUnsent *unsent, uint64 xid)
{
	Xact		key = {.xid = xid};

	return bsearch(&key, unsent->xacts, unsent->nxacts, sizeof(Xact), xact_cmp);
}

/* ---- first pass -------------------------------------------------------------------- */

static void
note_row(DqUnsent *unsent, const DqRow *row, const DqSnapshot *cur)
{
	uint64		xid = U64FromFullTransactionId(row->xid);
	MemoryContext old;

	/* rows of one transaction come mostly together */
	if (unsent->nxacts == 0 || unsent->xacts[unsent->nxacts - 1].xid != xid)
	{
		Xact	   *xact;

		unsent->xacts = grow(unsent, unsent->xacts, unsent->nxacts,
							 &unsent->maxxacts, sizeof(Xact));
		xact = &unsent->xacts[unsent->nxacts++];
		xact->xid = xid;
		xact->in_cur = cur != NULL && dq_snapshot_sees(cur, row->tli, row->xid);
		xact->last = row->seq;
	}
	else if (unsent->xacts[unsent->nxacts - 1].last < row->seq)
		unsent->xacts[unsent->nxacts - 1].last = row->seq;

	if (dq_row_offers(row))
	{
		Offer	   *offer;

		unsent->offers = grow(unsent, unsent->offers, unsent->noffers,
							  &unsent->maxoffers, sizeof(Offer));
		offer = &unsent->offers[unsent->noffers++];
		offer->id = row->id;
		offer->xid = xid;
		offer->seq = row->seq;
		offer->due = row->due;
		offer->tid = row->tid;
		offer->table = row->table;
	}
	if (row->op == DQ_OP_DISCARD)
	{
		dq_unsent_note_discard(unsent, row->member);
		return;
	}
	/* a deferred reschedule leaves the task pending, a poll takes none */
	if (row->op == DQ_OP_RESCHEDULE_ELEMENT || row->op == DQ_OP_MOVE_NAMED ||
		row->op == DQ_OP_CONSUME)
		return;
	if (!dq_row_offers(row) || row->key)
	{
		Op		   *op;

		unsent->ops = grow(unsent, unsent->ops, unsent->nops, &unsent->maxops,
						   sizeof(Op));
		op = &unsent->ops[unsent->nops++];
		op->xid = xid;
		op->seq = row->seq;
		op->op = dq_row_offers(row) ? DQ_OP_OFFER : row->member ? DQ_OP_REMOVE : row->op;
		op->due = row->due;
		op->id = row->id;
		old = MemoryContextSwitchTo(unsent->context);
		op->bytes = dq_unsent_copy(row->member ? row->member : row->key);
		MemoryContextSwitchTo(old);
	}
}

/* Sort the transactions, one entry each; our own operations come last. */
static void
gather_xacts(DqUnsent *unsent, uint64 own)
{
	Size		kept = 0;

	if (unsent->nxacts == 0)
		return;
	qsort(unsent->xacts, unsent->nxacts, sizeof(Xact), xact_cmp);
	for (Size i = 0; i < unsent->nxacts; i++)
	{
		Xact	   *xact = &unsent->xacts[i];

		if (xact->xid == own)
			xact->last = PG_INT64_MAX;
		if (kept > 0 && unsent->xacts[kept - 1].xid == xact->xid)
			unsent->xacts[kept - 1].last = Max(unsent->xacts[kept - 1].last, xact->last);
		else
			unsent->xacts[kept++] = *xact;
	}
	unsent->nxacts = kept;
}

/*
 * How far inside an unfinished batch the fence is: 'nonce|last:seq|done'. Rows
 * of the batch up to there are in Redis.
 */
static bool
fence_inside(const DqReadFence *fence, int64 *last, int64 *seq)
{
	const char *bar;
	long long	l,
				s;
	int			done;

	if (fence->cur == NULL || fence->cur[0] == '\0' || fence->fence.position == NULL)
		return false;
	bar = strchr(fence->fence.position, '|');
	if (bar == NULL || sscanf(bar + 1, "%lld:%lld|%d", &l, &s, &done) != 3 || done)
		return false;
	*last = l;
	*seq = s;
	return true;
}

static bool
is_applied(DqUnsent *unsent, uint64 xid, int64 seq, int64 fence_last, int64 fence_seq)
{
	Xact	   *xact = dq_unsent_xact(unsent, xid);

	return xact->in_cur && (xact->last < fence_last ||
							(xact->last == fence_last && seq <= fence_seq));
}

static void
drop_applied(DqUnsent *unsent, int64 fence_last, int64 fence_seq)
{
	Size		kept = 0;

	for (Size i = 0; i < unsent->noffers; i++)
	{
		if (!is_applied(unsent, unsent->offers[i].xid, unsent->offers[i].seq,
						fence_last, fence_seq))
			unsent->offers[kept++] = unsent->offers[i];
	}
	unsent->noffers = kept;

	kept = 0;
	for (Size i = 0; i < unsent->nops; i++)
	{
		if (!is_applied(unsent, unsent->ops[i].xid, unsent->ops[i].seq,
						fence_last, fence_seq))
			unsent->ops[kept++] = unsent->ops[i];
	}
	unsent->nops = kept;
}

DqUnsent *
dq_unsent_begin(int32 shard, const DqReadFence *fence, Snapshot snapshot)
{
	FullTransactionId own = GetTopFullTransactionIdIfAny();
	MemoryContext context;
	MemoryContext old;
	DqUnsent   *unsent;
	DqSnapshot *cur = NULL;
	DqRow		row;
	int64		fence_last = 0;
	int64		fence_seq = 0;
	bool		inside;

	context = AllocSetContextCreate(CurrentMemoryContext, "dq_bridge unsent operations",
									ALLOCSET_DEFAULT_SIZES);
	old = MemoryContextSwitchTo(context);
	unsent = palloc0(sizeof(DqUnsent));
	unsent->context = context;
	unsent->row_context = AllocSetContextCreate(context, "dq_bridge unsent row",
												ALLOCSET_DEFAULT_SIZES);
	unsent->prev = dq_snapshot_in(fence->prev);
	unsent->old = dq_snapshot_in(fence->old);
	inside = fence_inside(fence, &fence_last, &fence_seq);
	if (inside)
		cur = dq_snapshot_in(fence->cur);
	if (unsent->prev->damaged || unsent->old->damaged || (cur && cur->damaged))
		ereport(ERROR,
				(errcode(ERRCODE_DATA_CORRUPTED),
				 errmsg("the fence of a queue in Redis is damaged"),
				 errdetail("Its snapshots are \"%s\", \"%s\" and \"%s\".",
						   fence->prev, fence->cur, fence->old)));

	/* open to the end: no table gets emptied */
	dq_candidates_begin(&unsent->scan, shard, unsent->prev, unsent->old, NULL, snapshot,
						true);
	for (;;)
	{
		bool		more;

		CHECK_FOR_INTERRUPTS();
		MemoryContextReset(unsent->row_context);
		MemoryContextSwitchTo(unsent->row_context);
		more = dq_candidates_next(&unsent->scan, &row, true);
		if (more)
			note_row(unsent, &row, cur);
		if (!more)
			break;
	}
	MemoryContextSwitchTo(context);

	gather_xacts(unsent, U64FromFullTransactionId(own));
	if (inside)
		drop_applied(unsent, fence_last, fence_seq);
	if (unsent->noffers > 1)
		qsort(unsent->offers, unsent->noffers, sizeof(Offer), offer_cmp);

	for (Size i = 0; i < unsent->nops; i++)
		unsent->ops[i].last = dq_unsent_xact(unsent, unsent->ops[i].xid)->last;
	if (unsent->nops > 1)
		qsort(unsent->ops, unsent->nops, sizeof(Op), op_cmp);
	dq_unsent_effect(unsent);

	MemoryContextSwitchTo(old);
	return unsent;
}

/* ---- giving out ------------------------------------------------------------------------ */

bool
dq_unsent_is_empty(const DqUnsent *unsent)
{
	return unsent->noffers == 0 && unsent->nops == 0 && unsent->discarded == NULL;
}

bool
dq_unsent_adds_only(const DqUnsent *unsent)
{
	return unsent->nops == 0;
}

bool
dq_unsent_wants_keys(const DqUnsent *unsent)
{
	return unsent->keys != NULL;
}

bool
dq_unsent_wants_members(const DqUnsent *unsent)
{
	return unsent->members != NULL;
}

static int
due_cmp(const void *a, const void *b, void *arg)
{
	const Offer *offers = arg;
	Size		i = *(const Size *) a;
	Size		j = *(const Size *) b;

	if (offers[i].due != offers[j].due)
		return offers[i].due < offers[j].due ? -1 : 1;
	return i < j ? -1 : i > j;	/* they are sorted by id */
}

static void
sort_by_due(DqUnsent *unsent)
{
	if (unsent->by_due || unsent->noffers == 0)
		return;
	unsent->by_due = MemoryContextAllocHuge(unsent->context,
											unsent->noffers * sizeof(Size));
	for (Size i = 0; i < unsent->noffers; i++)
		unsent->by_due[i] = i;
	qsort_arg(unsent->by_due, unsent->noffers, sizeof(Size), due_cmp, unsent->offers);
}

/* How many are due at that instant or before? */
static Size
due_upto(const DqUnsent *unsent, int64 due)
{
	Size		low = 0;
	Size		high = unsent->noffers;

	while (low < high)
	{
		Size		mid = low + (high - low) / 2;

		if (unsent->offers[unsent->by_due[mid]].due <= due)
			low = mid + 1;
		else
			high = mid;
	}
	return low;
}

/* Where a range lies in by_due. */
static void
range_places(const DqUnsent *unsent, const DqDueRange *range, Size *from, Size *n)
{
	Size		to = due_upto(unsent, range->upto);

	*from = range->after == DQ_DUE_MIN ? 0 : due_upto(unsent, range->after);
	*n = to > *from ? to - *from : 0;
}

void
dq_unsent_rewind(DqUnsent *unsent, DqOrder order, const DqDueRange *ranges, int nranges)
{
	bool		all = nranges == 1 && ranges[0].after == DQ_DUE_MIN &&
		ranges[0].upto == DQ_DUE_MAX;

	unsent->order = order;
	unsent->ranges = NULL;
	unsent->next = 0;
	unsent->left = unsent->noffers;
	if (all && order == DQ_ORDER_NONE)
		return;
	sort_by_due(unsent);
	unsent->ranges = ranges;
	unsent->nranges = nranges;
	unsent->range = 0;
	unsent->left = 0;
}

/* The next one that is alive, in the order asked for; NULL: no more. */
static Offer *
upcoming(DqUnsent *unsent)
{
	for (;;)
	{
		Size		place;
		Offer	   *offer;

		while (unsent->left == 0)
		{
			if (unsent->ranges == NULL || unsent->range >= unsent->nranges)
				return NULL;
			range_places(unsent, &unsent->ranges[unsent->range++], &unsent->next,
						 &unsent->left);
		}
		if (unsent->ranges == NULL)
			place = unsent->next;
		else if (unsent->order == DQ_ORDER_DESC)
			place = unsent->by_due[unsent->next + unsent->left - 1];
		else
			place = unsent->by_due[unsent->next];
		offer = &unsent->offers[place];
		if ((offer->xid & DEAD) == 0)
			return offer;
		dq_unsent_skip(unsent);
	}
}

void
dq_unsent_skip(DqUnsent *unsent)
{
	CHECK_FOR_INTERRUPTS();
	unsent->left--;
	if (unsent->ranges == NULL || unsent->order != DQ_ORDER_DESC)
		unsent->next++;
}

bool
dq_unsent_peek(DqUnsent *unsent, int64 *due)
{
	Offer	   *offer = upcoming(unsent);

	if (offer == NULL)
		return false;
	*due = offer->due;
	return true;
}

static void
fetch(DqUnsent *unsent, const Offer *offer, DqRow *row)
{
	MemoryContext outer;
	ItemPointerData tid = offer->tid;
	bool		found;

	MemoryContextReset(unsent->row_context);
	outer = MemoryContextSwitchTo(unsent->row_context);
	found = dq_outbox_fetch(unsent->scan.scan, offer->table, &tid, row);
	MemoryContextSwitchTo(outer);
	if (!found)
		elog(ERROR, "operation " INT64_FORMAT " has left the outbox", offer->seq);
}

bool
dq_unsent_next(DqUnsent *unsent, DqRow *row)
{
	Offer	   *offer = upcoming(unsent);

	if (offer == NULL)
		return false;
	fetch(unsent, offer, row);
	dq_unsent_skip(unsent);
	return true;
}

bool
dq_unsent_sought(DqUnsent *unsent, const DqSought *sought, DqRow *row)
{
	Offer	   *offer = NULL;

	if (sought->by_key)
	{
		uint64		id;

		if (dq_unsent_holder(unsent, sought->data, sought->len, &id))
			offer = dq_unsent_offer(unsent, id);
	}
	else if (sought->len == 9 && sought->data[0] == 8)
	{
		uint64		id = 0;

		for (int i = 1; i <= 8; i++)
			id = (id << 8) | (unsigned char) sought->data[i];
		offer = dq_unsent_offer(unsent, id);
		if (offer && offer->due != sought->due)
			offer = NULL;
	}
	if (offer == NULL || (offer->xid & DEAD) != 0)
		return false;
	fetch(unsent, offer, row);
	return true;
}

void
dq_unsent_count(DqUnsent *unsent, const DqDueRange *ranges, int nranges, int64 *count,
				int64 *first, int64 *last)
{
	int64		due;

	*count = 0;
	dq_unsent_rewind(unsent, DQ_ORDER_ASC, ranges, nranges);
	while (dq_unsent_peek(unsent, &due))
	{
		if ((*count)++ == 0)
			*first = due;
		*last = due;
		dq_unsent_skip(unsent);
	}
}

void
dq_unsent_end(DqUnsent *unsent)
{
	dq_candidates_end(&unsent->scan);
	MemoryContextDelete(unsent->context);
}
