/*
 * relay.h
 *	  What moves tasks: a shard's state machine (enter, relay, thaw, transfer),
 *	  for one server in this process. The bridge worker calls it in its loop; the
 *	  SQL functions call it when no worker runs. May call the outbox, queue and
 *	  shared rooms.
 */
#ifndef DQ_RELAY_H
#define DQ_RELAY_H

#include "postgres.h"

#include "outbox/outbox.h"
#include "shared/shared.h"

typedef struct DqBridge DqBridge;

/* Lives in its own context below TopMemoryContext. Opens nothing yet. */
extern DqBridge *dq_bridge_create(Oid serverid);
extern void dq_bridge_free(DqBridge *bridge);

/*
 * One round: read the catalogs again if they changed, relay what was committed,
 * transfer what is due, renew leases. Works for about 100 ms at most and
 * returns in how many ms it wants to be called again (0: at once). Call it
 * outside any transaction; it opens and closes its own and holds none while it
 * waits for Redis, unless own_xact is false (a backend inside its transaction).
 * Raises when the server cannot be reached: call dq_bridge_reset, wait, call
 * again.
 */
extern long dq_bridge_round(DqBridge *bridge);
/* The last round has aborted a transaction: ordinary session locks went with it. */
extern bool dq_bridge_aborted(const DqBridge *bridge);
extern void dq_bridge_reset(DqBridge *bridge);
/* The subscription's socket for the worker's WaitEventSet, or PGINVALID_SOCKET;
 * changes after a reset or reconnect. */
extern pgsocket dq_bridge_socket(DqBridge *bridge);
/* Moves with every page or transfer that succeeded. */
extern uint64 dq_bridge_progress(DqBridge *bridge);
/* Earliest due instant known (ms), INT64_MAX none */
extern int64 dq_bridge_next_due(DqBridge *bridge);
/* the server is gone from the catalogs and nothing is left to do */
extern bool dq_bridge_is_gone(DqBridge *bridge);
/* publish state redis_down in the shards' stats with that message */
extern void dq_bridge_mark_down(DqBridge *bridge, const char *message);

/*
 * Without a worker: be the bridge of a server for a moment, in this backend's
 * transaction. Takes the bridge's singleton lock (false: a worker or another
 * backend has it, or this is a standby).
 */
extern bool dq_relay_by_hand(Oid serverid, long timeout_ms);

/*
 * May this server go on from that fence (PO 5a)? Lives have been looked at before
 * (dq_lives_look).
 */
extern bool dq_fence_is_ours(const DqFenceRecord *record);

/* the singleton lock of (database, server): session-level */
extern bool dq_bridge_lock(Oid serverid);
extern void dq_bridge_unlock(Oid serverid);

#endif							/* DQ_RELAY_H */
