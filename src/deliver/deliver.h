/*
 * deliver.h
 *	  The room where due tasks come to PostgreSQL: batches are claimed from Redis and
 *	  their effects committed, with the number of the batch, exactly once (PO 13 to 15).
 *	  Called by the executor process; may call outbox, queue, redis and shared.
 */
#ifndef DQ_DELIVER_H
#define DQ_DELIVER_H

#include "postgres.h"

#include "datatype/timestamp.h"

/* ---- deliver.c: the queues of one owner ------------------------------------------ */

typedef struct DqDeliver DqDeliver;

/* For the role this process is logged in as. */
extern DqDeliver *dq_deliver_create(void);
/* One batch of each queue that has one; returns how long to sleep, in ms. Opens and
 * commits its own transactions; errors of one queue do not get out. */
extern long dq_deliver_round(DqDeliver *deliver);
/* Batches whose effects were begun: the session is not clean after one. */
extern uint64 dq_deliver_batches(const DqDeliver *deliver);
/* The role has no queue with a sink. */
extern bool dq_deliver_is_idle(const DqDeliver *deliver);

#endif							/* DQ_DELIVER_H */
