/*
 * holds.c
 *	  What transactions hold in Redis, seen from the relay: putting back what ended
 *	  ones have left behind (PO 10), and, before a shard is thawed, waiting for open
 *	  ones that were told true and whose hold is gone (PO 7). The commit log is
 *	  never asked. Called by round.c.
 */
#include "postgres.h"

#include "compat.h"
#include "relay/relay_private.h"
#include "shared/points.h"

#include "access/transam.h"
#include "access/xact.h"
#include "miscadmin.h"
#include "storage/procarray.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#define LOOK_MS			20			/* between looks at those we wait for */
#define MANY_TOKENS		100		/* of one script call */
#define MANY_PAGES		20		/* of holds, in one step */
#define MANY_TAKINGS	10		/* of the ready list, of one script call: each may have
								 * a page of elements */
#define MOST_TAKINGS	100		/* of them, in one step */

/* Elements of the ready list whose taker has ended. */
typedef struct Taking
{
	int64		number;
	char		token[DQ_TOKEN_LEN];
} Taking;

/* ---- before a thaw ---- */

static bool
is_running(FullTransactionId xid)
{
	return TransactionIdIsInProgress(XidFromFullTransactionId(xid));
}

static void
add_blocker(DqShard *shard, FullTransactionId xid)
{
	MemoryContext old;
	FullTransactionId *copy;
	ListCell   *lc;

	foreach(lc, shard->blockers)
		if (FullTransactionIdEquals(*(FullTransactionId *) lfirst(lc), xid))
			return;
	old = MemoryContextSwitchTo(shard->context);
	copy = palloc(sizeof(*copy));
	*copy = xid;
	shard->blockers = lappend(shard->blockers, copy);
	MemoryContextSwitchTo(old);
}

static void
note_missing(DqLink *link, DqShard *shard, const char *tokens,
			 const FullTransactionId *xids, int n)
{
	DqFence		fence;
	bool	   *stand = dq_op_holds_stand(link->redis, shard->name, &shard->keys, link->source,
										  tokens, n, &fence);
	int			i;

	for (i = 0; i < n; i++)
		if (!stand[i])
			add_blocker(shard, xids[i]);
}

/*
 * Which open transactions, prepared ones included, rely on a hold that is not there?
 * Their rows can be read before they end. A hold that stands protects itself. Read
 * again at each look: a savepoint may have been rolled back.
 */
static void
find_blockers(DqLink *link, DqShard *shard)
{
	Snapshot	snapshot;
	SnapshotData dirty;
	DqSnapshot *now;
	char	   *tokens = palloc(MANY_TOKENS * DQ_TOKEN_LEN);
	FullTransactionId *xids = palloc(MANY_TOKENS * sizeof(FullTransactionId));
	DqOutboxScan *scan = NULL;
	MemoryContext each,
				caller = CurrentMemoryContext;
	List	   *found = NIL;	/* tokens and xids, full arrays */
	int			n = 0;
	int			i;

	DQ_POINT("thaw.blockers");
	dq_link_begin(link);
	MemoryContextSwitchTo(caller);
	each = AllocSetContextCreate(caller, "dq_bridge row", ALLOCSET_DEFAULT_SIZES);
	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	now = dq_snapshot_take(snapshot);
	InitDirtySnapshot(dirty);
	/* those it names as running, and all beyond it */
	for (i = 0; i <= now->nxip; i++)
	{
		FullTransactionId from = i < now->nxip ? now->xip[i] : now->xmax;
		FullTransactionId to = from;
		DqRow		row;

		if (i < now->nxip)
			FullTransactionIdAdvance(&to);
		else
			to = FullTransactionIdFromU64(PG_UINT64_MAX);
		if (scan == NULL)
			scan = dq_outbox_scan_begin(shard->no, from, to, &dirty);
		else
			dq_outbox_scan_seek(scan, shard->no, from, to, 0);
		for (;;)
		{
			bool		more;

			MemoryContextReset(each);
			MemoryContextSwitchTo(each);
			more = dq_outbox_scan_next(scan, &row, true);
			MemoryContextSwitchTo(caller);
			if (!more)
				break;
			if (row.op != DQ_OP_REMOVE || row.token == NULL || !is_running(row.xid) ||
				VARSIZE_ANY_EXHDR(row.token) != DQ_TOKEN_LEN)
				continue;
			if (n == MANY_TOKENS)
			{
				found = lappend(lappend(found, tokens), xids);
				tokens = palloc(MANY_TOKENS * DQ_TOKEN_LEN);
				xids = palloc(MANY_TOKENS * sizeof(FullTransactionId));
				n = 0;
			}
			memcpy(tokens + n * DQ_TOKEN_LEN, VARDATA_ANY(row.token), DQ_TOKEN_LEN);
			xids[n++] = row.xid;
		}
	}
	if (scan)
		dq_outbox_scan_end(scan);
	UnregisterSnapshot(snapshot);
	MemoryContextDelete(each);
	dq_link_end(link);
	MemoryContextSwitchTo(caller);

	for (i = 0; i + 1 < list_length(found); i += 2)
		note_missing(link, shard, list_nth(found, i), list_nth(found, i + 1), MANY_TOKENS);
	if (n > 0)
		note_missing(link, shard, tokens, xids, n);
}

/*
 * PO 7: a frozen shard may be thawed by a batch whose snapshot is taken after this
 * says true.
 */
bool
dq_shard_may_thaw(const DqShard *shard)
{
	return shard->producer || (shard->blockers_known && shard->blockers == NIL);
}

void
dq_blockers_look(DqLink *link)
{
	TimestampTz now = GetCurrentTimestamp();
	ListCell   *lc;

	foreach(lc, link->shards)
	{
		DqShard    *shard = lfirst(lc);
		bool		told = shard->blockers != NIL;

		if (shard->state != DQ_SHARD_FROZEN || shard->producer ||
			dq_shard_may_thaw(shard))
			continue;
		if (shard->blockers_known &&
			!TimestampDifferenceExceeds(shard->blockers_at, now, LOOK_MS))
			continue;
		shard->blockers_at = now;
		/*
		 * The new session first: a backend that has not begun to write by then
		 * writes nothing that relies on the old one.
		 */
		dq_link_publish(link, shard);
		if (dq_session_is_written(MyDatabaseId, shard->no))
			continue;
		list_free_deep(shard->blockers);
		shard->blockers = NIL;
		find_blockers(link, shard);
		shard->blockers_known = true;
		if (shard->blockers != NIL && !told)
		{
			snprintf(shard->stats.last_error, DQ_ERROR_LEN,
					 "due tasks wait for the end of transaction %u, whose removals Redis has lost",
					 XidFromFullTransactionId(*(FullTransactionId *) linitial(shard->blockers)));
			shard->stats.last_error_at = now;
			shard->publish = true;
			ereport(LOG,
					(errmsg("dq_bridge: shard \"%s\" of server \"%s\": %s",
							shard->name, link->server_name, shard->stats.last_error)));
		}
		if (shard->blockers == NIL)
			shard->looked = false;	/* the batch that thaws begins after this */
	}
}

/* ---- putting back ---- */

/*
 * Has the holder ended, and is everything it may have committed applied? Then a
 * hold that still stands under its token is to be put back. Not from an earlier
 * life of the server: ended by the snapshot that is applied (or its savepoint is
 * rolled back while it goes on). From an earlier life: ended unless prepared.
 */
static bool
has_ended(const DqLink *link, const DqShard *shard, const DqHold *hold)
{
	FullTransactionId xid = FullTransactionIdFromU64(hold->xid);
	int			i;

	if (strcmp(hold->source, link->source) != 0)
		return true;			/* of a former owner */
	if (hold->incarnation == dq_incarnation())
	{
		if (dq_snapshot_sees(shard->seen, shard->seen->tli, xid))
			return true;
		return hold->subxid != 0 && is_running(xid) &&
			TransactionIdDidAbort((TransactionId) hold->subxid);
	}
	if (hold->xid >= dq_shared()->first_xid)
		return true;			/* such numbers are given out anew */
	for (i = 0; i < shard->seen->nxip; i++)
		if (FullTransactionIdEquals(shard->seen->xip[i], xid))
			return false;
	return true;
}

/* Returns how many of them are left for another call: those taken first. */
static int
put_back(DqLink *link, DqShard *shard, const char *tokens, int n)
{
	DqFence		fence;
	int			left = 0;

	if (n == 0)
		return 0;
	dq_shard_share_floor(shard);
	DQ_POINT("restore.send");
	(void) dq_op_restore(link->redis, shard->name, &shard->keys, shard->session,
						 shard->floor, link->source, tokens, n, &fence, &left);
	DQ_POINT("restore.received");
	(void) dq_shard_note_fence(link, shard, &fence);
	return left;
}

static int
taking_cmp(const void *a, const void *b)
{
	const Taking *x = a,
			   *y = b;

	return x->number < y->number ? 1 : x->number == y->number ? 0 : -1;
}

/*
 * What was taken from the ready list goes back in front of it, what was taken last
 * first: so the order is what it was. Not all at once; the rest is read again.
 */
static void
put_takings_back(DqLink *link, DqShard *shard, Taking *takings, int n)
{
	char		tokens[MANY_TAKINGS * DQ_TOKEN_LEN];
	int			done = 0,
				i;

	if (n > 0)
		dq_mark_put_back(shard);
	qsort(takings, n, sizeof(Taking), taking_cmp);
	while (done < Min(n, MOST_TAKINGS) && shard->state == DQ_SHARD_OPEN)
	{
		int			m = Min(MANY_TAKINGS, Min(n, MOST_TAKINGS) - done);

		for (i = 0; i < m; i++)
			memcpy(tokens + i * DQ_TOKEN_LEN, takings[done + i].token, DQ_TOKEN_LEN);
		done += Max(m - put_back(link, shard, tokens, m), 1);
	}
	if (n > MOST_TAKINGS)
	{
		shard->holds_cursor[0] = '\0';
		shard->holds_anew = true;
	}
}

/*
 * true: all that has ended is put back, and all ends to come are told to us; false:
 * look again when more is applied. *back: the former alone.
 */
static bool
resolve(DqLink *link, DqShard *shard, bool *back)
{
	char	   *cursor = pstrdup(shard->holds_cursor[0] ? shard->holds_cursor : "0");
	bool		settled = true,
				ended = true;
	Taking	   *takings = NULL;
	int			ntakings = 0;
	int			pages;

	*back = false;
	for (pages = 0; pages < MANY_PAGES; pages++)
	{
		DqFence		fence;
		DqHold	   *holds;
		char	   *tokens;
		int			n,
					m = 0;
		int			i;

		holds = dq_op_holds_list(link->redis, shard->name, &shard->keys, link->source,
								 &cursor, &n, &fence);
		if (!dq_shard_note_fence(link, shard, &fence))
			return false;
		tokens = palloc(MANY_TOKENS * DQ_TOKEN_LEN);
		takings = takings ? repalloc(takings, (ntakings + n) * sizeof(Taking))
			: palloc(Max(n, 1) * sizeof(Taking));
		for (i = 0; i < n; i++)
		{
			if (!has_ended(link, shard, &holds[i]))
			{
				/* its row is on the way, or it goes on: an end is told to us */
				if (!is_running(FullTransactionIdFromU64(holds[i].xid)))
					settled = ended = false;
				settled &= holds[i].incarnation == dq_incarnation();
				continue;
			}
			if (holds[i].kind == 'l')
			{
				takings[ntakings].number = holds[i].number;
				memcpy(takings[ntakings++].token, holds[i].token, DQ_TOKEN_LEN);
				continue;
			}
			memcpy(tokens + m++ * DQ_TOKEN_LEN, holds[i].token, DQ_TOKEN_LEN);
			if (m == MANY_TOKENS)
			{
				(void) put_back(link, shard, tokens, m);
				m = 0;
			}
		}
		(void) put_back(link, shard, tokens, m);
		if (shard->state != DQ_SHARD_OPEN)
			return false;
		strlcpy(shard->holds_cursor, cursor, sizeof(shard->holds_cursor));
		if (strcmp(cursor, "0") == 0)
			break;
	}
	put_takings_back(link, shard, takings, ntakings);
	*back = ended && pages < MANY_PAGES && ntakings <= MOST_TAKINGS;
	return *back && settled;
}

/* Would a look show anything new? */
static bool
wants_resolving(const DqShard *shard, TimestampTz now)
{
	return shard->holds_due && shard->state == DQ_SHARD_OPEN && !shard->producer &&
		shard->seen_here && shard->blocked_until <= now &&
		(shard->holds_anew || (shard->holds_cursor[0] != '\0' && shard->holds_cursor[0] != '0') ||
		 shard->holds_seen != shard->seen_number);
}

bool
dq_holds_wanted(const DqLink *link)
{
	TimestampTz now = GetCurrentTimestamp();
	ListCell   *lc;

	if (dq_rollbacks() != link->rollbacks)
		return true;
	foreach(lc, link->shards)
		if (wants_resolving(lfirst(lc), now))
			return true;
	return false;
}

/* Put back what was left behind; true if a shard was looked at. */
bool
dq_holds_resolve(DqLink *link)
{
	uint64		rollbacks = dq_rollbacks();
	TimestampTz now = GetCurrentTimestamp();
	bool		any = false;
	ListCell   *lc;

	foreach(lc, link->shards)
	{
		DqShard    *shard = lfirst(lc);
		bool		back;

		if (rollbacks != link->rollbacks)
			shard->holds_due = shard->holds_anew = true;
		if (!wants_resolving(shard, now))
			continue;
		shard->holds_anew = false;
		shard->holds_at = now;
		shard->holds_seen = shard->seen_number;
		shard->holds_due = !resolve(link, shard, &back);
		if (back && shard->stats.rollbacks != rollbacks)
		{
			shard->stats.rollbacks = rollbacks;
			shard->publish = true;
		}
		any = true;
	}
	link->rollbacks = rollbacks;
	return any;
}
