/*
 * snapshot.c
 *	  Snapshots as the fence holds them: which top-level transactions of which
 *	  timeline had ended. And the flush that must come before one leaves.
 */
#include "postgres.h"

#include "compat.h"
#include "outbox/outbox.h"

#include "access/xact.h"
#include "access/xlog.h"
#include "access/xlog_internal.h"
#include "access/xlogrecovery.h"
#include "miscadmin.h"
#include "replication/syncrep.h"
#include "replication/walsender.h"
#include "replication/walsender_private.h"
#include "utils/snapmgr.h"

/*
 * In a SERIALIZABLE transaction an MVCC snapshot would mark all that it reads of our
 * tables, index pages included, and every transaction that offers would seem to
 * depend on every other. What we read is no data of the application's. A snapshot of
 * another kind takes no part in that; the outbox scan puts back what it lacks.
 */
Snapshot
dq_snapshot_unmarked(Snapshot snapshot)
{
	static SnapshotData unmarked;

	if (!IsolationIsSerializable())
		return snapshot;
	unmarked = *snapshot;
	unmarked.snapshot_type = SNAPSHOT_SELF;
	unmarked.copied = false;
	unmarked.active_count = 0;
	unmarked.regd_count = 0;
	return &unmarked;
}

Snapshot
dq_fresh_snapshot(void)
{
	return dq_snapshot_unmarked(IsInParallelMode() ? GetActiveSnapshot() :
								GetLatestSnapshot());
}

uint32
dq_timeline(void)
{
	TimeLineID	tli;

	if (!RecoveryInProgress())
		return GetWALInsertionTimeLine();
	(void) GetXLogReplayRecPtr(&tli);
	return tli;
}

static FullTransactionId
widen(TransactionId xid, FullTransactionId next)
{
	uint32		epoch = EpochFromFullTransactionId(next);

	if (xid > XidFromFullTransactionId(next))
		epoch--;
	return FullTransactionIdFromEpochAndXid(epoch, xid);
}

static int
full_xid_cmp(const void *a, const void *b)
{
	uint64		x = U64FromFullTransactionId(*(const FullTransactionId *) a);
	uint64		y = U64FromFullTransactionId(*(const FullTransactionId *) b);

	return x < y ? -1 : x > y;
}

/*
 * The snapshot's top-level transactions. Subtransactions need no mention: rows
 * carry the top-level xid.
 */
DqSnapshot *
dq_snapshot_take(Snapshot snapshot)
{
	FullTransactionId next = ReadNextFullTransactionId();
	FullTransactionId own = GetTopFullTransactionIdIfAny();
	DqSnapshot *snap = palloc0(sizeof(DqSnapshot));
	int			i;

	snap->tli = dq_timeline();
	snap->xmin = widen(snapshot->xmin, next);
	snap->xmax = widen(snapshot->xmax, next);
	snap->xip = palloc((snapshot->xcnt + 1) * sizeof(FullTransactionId));
	for (i = 0; i < snapshot->xcnt; i++)
		snap->xip[i] = widen(snapshot->xip[i], next);
	snap->nxip = snapshot->xcnt;
	/* a snapshot does not name its own transaction, which has not ended either */
	if (FullTransactionIdIsValid(own) && FullTransactionIdPrecedes(own, snap->xmax))
	{
		snap->xip[snap->nxip++] = own;
		if (FullTransactionIdPrecedes(own, snap->xmin))
			snap->xmin = own;
	}
	qsort(snap->xip, snap->nxip, sizeof(FullTransactionId), full_xid_cmp);
	return snap;
}

/* 'tli:xmin:xmax:xip,xip...' */
char *
dq_snapshot_out(const DqSnapshot *snap)
{
	StringInfoData buf;
	int			i;

	if (snap == NULL || !FullTransactionIdIsValid(snap->xmax))
		return pstrdup("");
	initStringInfo(&buf);
	appendStringInfo(&buf, "%u:" UINT64_FORMAT ":" UINT64_FORMAT ":", snap->tli,
					 U64FromFullTransactionId(snap->xmin),
					 U64FromFullTransactionId(snap->xmax));
	for (i = 0; i < snap->nxip; i++)
		appendStringInfo(&buf, "%s" UINT64_FORMAT, i > 0 ? "," : "",
						 U64FromFullTransactionId(snap->xip[i]));
	return buf.data;
}

static bool
read_xid(const char **p, FullTransactionId *xid)
{
	char	   *end;

	if (**p < '0' || **p > '9')
		return false;
	errno = 0;
	*xid = FullTransactionIdFromU64(strtou64(*p, &end, 10));
	*p = end;
	return errno == 0;
}

static bool
read_snapshot(const char *p, DqSnapshot *snap)
{
	FullTransactionId tli;
	const char *c;
	int			n = 1;

	if (!read_xid(&p, &tli) || *p++ != ':' ||
		!read_xid(&p, &snap->xmin) || *p++ != ':' ||
		!read_xid(&p, &snap->xmax) || *p++ != ':')
		return false;
	snap->tli = (uint32) U64FromFullTransactionId(tli);
	for (c = p; *c; c++)
		n += *c == ',';
	snap->xip = palloc(n * sizeof(FullTransactionId));
	while (*p)
	{
		FullTransactionId *xid = &snap->xip[snap->nxip];

		if (!read_xid(&p, xid) ||
			(snap->nxip > 0 && !FullTransactionIdPrecedes(xid[-1], *xid)))
			return false;
		snap->nxip++;
		if (*p == ',' && p[1] != '\0')
			p++;
		else if (*p != '\0')
			return false;
	}
	return FullTransactionIdPrecedesOrEquals(snap->xmin, snap->xmax);
}

DqSnapshot *
dq_snapshot_in(const char *text)
{
	DqSnapshot *snap = palloc0(sizeof(DqSnapshot));

	/* sees nothing as long as xmax is 0 */
	if (text != NULL && text[0] != '\0' && !read_snapshot(text, snap))
	{
		memset(snap, 0, sizeof(*snap));
		snap->damaged = true;
	}
	return snap;
}

bool
dq_snapshot_sees(const DqSnapshot *snap, uint32 tli, FullTransactionId xid)
{
	if (snap == NULL || tli > snap->tli)
		return false;
	if (!FullTransactionIdPrecedes(xid, snap->xmax))
		return false;
	if (FullTransactionIdPrecedes(xid, snap->xmin))
		return true;
	return bsearch(&xid, snap->xip, snap->nxip, sizeof(FullTransactionId),
				   full_xid_cmp) == NULL;
}

bool
dq_snapshot_equal(const DqSnapshot *a, const DqSnapshot *b)
{
	return a->tli == b->tli &&
		FullTransactionIdEquals(a->xmax, b->xmax) &&
		a->nxip == b->nxip &&
		memcmp(a->xip, b->xip, a->nxip * sizeof(FullTransactionId)) == 0;
}

/*
 * Has everything of this server's history that b sees ended for a as well? On one
 * timeline snapshots are in an order; one of a later timeline was taken later.
 */
bool
dq_snapshot_covers(const DqSnapshot *a, const DqSnapshot *b)
{
	uint64		beyond;
	int			i;

	if (!FullTransactionIdIsValid(b->xmax))
		return true;			/* it sees nothing */
	if (a->tli != b->tli || !FullTransactionIdIsValid(a->xmax))
		return FullTransactionIdIsValid(a->xmax) && a->tli > b->tli;
	if (FullTransactionIdPrecedes(a->xmax, b->xmax))
	{
		/* unless b calls all of those running */
		beyond = U64FromFullTransactionId(b->xmax) - U64FromFullTransactionId(a->xmax);
		if (beyond > b->nxip ||
			FullTransactionIdPrecedes(b->xip[b->nxip - beyond], a->xmax))
			return false;
	}
	for (i = 0; i < a->nxip; i++)
		if (dq_snapshot_sees(b, b->tli, a->xip[i]))
			return false;
	return true;
}

/*
 * PO 1: the end of the last inserted record, to be read after the snapshot.
 * Every transaction that left the proc array before the snapshot has its commit
 * or abort record below it, so flushing to it makes the snapshot's "ended" true
 * after any crash.
 *
 * GetXLogInsertRecPtr gives the place of the next record, which at the beginning
 * of a page lies behind the page's header; flushing to there would ask for bytes
 * that nobody has written. The end of the last record is then the page's start.
 */
XLogRecPtr
dq_flush_point(void)
{
	XLogRecPtr	ptr = GetXLogInsertRecPtr();

	if (XLogSegmentOffset(ptr, wal_segment_size) == SizeOfXLogLongPHD)
		ptr -= SizeOfXLogLongPHD;
	else if (ptr % XLOG_BLCKSZ == SizeOfXLogShortPHD)
		ptr -= SizeOfXLogShortPHD;
	return ptr;
}

static bool
standbys_named(void)
{
	return SyncRepStandbyNames != NULL && SyncRepStandbyNames[0] != '\0';
}

/*
 * Flush, and with synchronous replication wait for the standby. A wait that was
 * cut short (shutdown, cancel) is a failure: nothing may be sent (PO 1, G11).
 */
bool
dq_flush_to(XLogRecPtr point)
{
	XLogFlush(point);
	if (!SyncRepRequested() || !standbys_named())
		return true;
	HOLD_INTERRUPTS();
	SyncRepWaitForLSN(point, true);
	RESUME_INTERRUPTS();
	if (ProcDiePending)
		return false;
	return !standbys_named() ||
		WalSndCtl->lsn[SYNC_REP_WAIT_FLUSH] >= point;
}
