/*
 * resolutions.c
 *	  What an operation that named an element (Redis was silent) was found to mean,
 *	  decided once and for all: it is never looked up again, however often its row
 *	  is replayed (PO 17). Written and read by the relay.
 *
 *	  A resolution of an element of shard n is an outbox row of shard -n with the
 *	  element's xid and seq, so it is found by one look-up, read by nobody else, and
 *	  needed as long as the element's own row. member, due: the task; id: the number
 *	  of the shard where it lay.
 */
#include "postgres.h"

#include "outbox/outbox.h"
#include "outbox/outbox_private.h"

#include "utils/snapmgr.h"

void
dq_resolution_store(const DqRow *element, const DqResolution *resolution, Oid serverid)
{
	DqRow		row;

	memset(&row, 0, sizeof(row));
	row.xid = element->xid;
	row.tli = element->tli;
	row.seq = element->seq;
	row.shard = -element->shard;
	row.op = DQ_OP_RESOLUTION;
	row.due = resolution->due;
	row.member = resolution->member;
	row.id = (uint64) resolution->shard;
	dq_outbox_insert_row(&row, serverid);
}

bool
dq_resolution_get(const DqRow *element, DqResolution *resolution)
{
	FullTransactionId next = element->xid;
	Snapshot	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	DqOutboxScan *scan;
	DqRow		row;
	bool		found = false;

	FullTransactionIdAdvance(&next);
	scan = dq_outbox_scan_begin(-element->shard, element->xid, next, snapshot);
	if (element->seq > 1)
		dq_outbox_scan_seek(scan, -element->shard, element->xid, element->xid,
							element->seq - 1);
	while (!found && dq_outbox_scan_next(scan, &row, true) && row.seq <= element->seq)
		found = row.seq == element->seq && row.tli == element->tli && dq_row_is_ours(&row);
	dq_outbox_scan_end(scan);
	UnregisterSnapshot(snapshot);
	if (found)
	{
		resolution->member = row.member;
		resolution->due = row.due;
		resolution->shard = (int32) row.id;
	}
	return found;
}
