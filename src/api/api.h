/*
 * api.h
 *	  What the SQL-callable functions share.
 */
#ifndef DQ_API_H
#define DQ_API_H

#include "postgres.h"

#include "nodes/parsenodes.h"
#include "outbox/outbox.h"
#include "queue/queue.h"
#include "shared/shared.h"

/* rights.c */
/* Raise 42501 unless the current user has all these rights on the queue. */
extern void dq_require(const DqQueue *queue, AclMode rights);
/* Any table right at all? */
extern bool dq_has_any_right(Oid relid);
/* Raise 42501 unless the current user owns the queue's table. */
extern void dq_require_owner(const DqQueue *queue);
/* Lock the queue's table as an operation does and return the definition. */
extern DqQueue *dq_queue_open(Oid relid);
/* Is the server known to be down? 08006 for on_outage error */
extern bool dq_is_known_down(DqQueue *queue);
extern void dq_raise_outage(const DqQueue *queue);
/* 55000 for role producer */
extern void dq_require_not_producer(const DqQueue *queue, const char *what);

/* offer.c */
/* Record an offer; returns the id's text. Rights are the caller's business. */
extern char *dq_offer_record(DqQueue *queue, bytea *payload, int64 due, bytea *key);
/* Due instant of a delay counted from the clock now. */
extern TimestampTz dq_delay_from_now(Interval *delay);

/* remove.c */
typedef enum DqAnswer
{
	DQ_ANSWER_FALSE,
	DQ_ANSWER_TRUE,
	DQ_ANSWER_UNKNOWN
} DqAnswer;

/* dq_remove: by key, id or payload */
extern DqAnswer dq_remove_element(DqQueue *queue, bytea *element);
/* For triggers: the task with this key and no other; an outage never raises,
 * whatever on_outage says. */
extern DqAnswer dq_remove_key(DqQueue *queue, bytea *key);

#endif							/* DQ_API_H */
