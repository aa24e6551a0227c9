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
/* 55000 unless the owner that Redis names (source, place) is nobody or we */
extern void dq_require_ours(const DqQueue *queue, int32 shard_no, const char *source,
							const char *place, const char *writer);

/* offer.c */
/* Record an offer; returns the id's text. Rights are the caller's business. */
extern char *dq_offer_record(DqQueue *queue, bytea *payload, int64 due, bytea *key);
/* The same for op DQ_OP_RESCHEDULE; shard >= 0: dq_shards.no where a keyless one goes;
 * token: under which the task that it replaces was held, NULL: not. */
extern char *dq_offer_record_as(DqQueue *queue, char op, int32 shard, bytea *payload,
								int64 due, bytea *key, const char *token);
/* Its checks, and the row for dq_outbox_insert; returns which shard, from 0. */
extern int	dq_offer_prepare(DqQueue *queue, char op, int32 shard, bytea *payload, int64 due,
							 bytea *key, const char *token, DqRow *row);
/* The due instants that dq_offer and dq_offer_at accept. */
extern int64 dq_due_of_delay(Interval *delay);
/* Due instant of a delay counted from the clock now. */
extern TimestampTz dq_delay_from_now(Interval *delay);

/* remove.c */
typedef enum DqAnswer
{
	DQ_ANSWER_FALSE,
	DQ_ANSWER_TRUE,
	DQ_ANSWER_UNKNOWN
} DqAnswer;

/* take.c: what a removal or a reschedule has in its hands */
typedef struct DqTaken
{
	bool		is_own;			/* a task that this transaction has offered */
	DqOwnTask	own;
	bool		in_redis;		/* a task in Redis, held under token */
	int32		shard;			/* dq_shards.no */
	int64		due;
	bytea	   *member;
	bytea	   *key;			/* NULL: keyless, or not known to the index */
	char		token[DQ_TOKEN_LEN];
	DqSession	session;		/* in which it is held */
} DqTaken;
/*
 * Take the task that an element names out of circulation. key_only: by its key and
 * no other way, and an outage never raises. UNKNOWN: own tasks may have been taken
 * all the same. The deadline moves by the time that others' transactions took.
 */
extern DqAnswer dq_take(Oid relid, bytea *element, bool key_only, TimestampTz *deadline,
						DqTaken *taken);
/* The same, and the rows that end it are written (remove.c). */
extern DqAnswer dq_take_and_record(Oid relid, bytea *element, bool key_only, DqTaken *taken);
/* Key before id before payload, then the earliest due. */
extern bool dq_found_is_better(char how, int64 due, char than_how, int64 than_due);

/* wait.c */
/* Until the relay has moved, 10 ms or the deadline; without a worker, relay. */
extern void dq_wait_for_relay(Oid serverid, TimestampTz deadline);
/* Until the holder's transaction has ended; the deadline moves by that time. false: it
 * is nobody of this server's. */
extern bool dq_wait_for_holder(const DqHold *holder, const char *source,
							   TimestampTz *deadline);
/* An error of the exchange with Redis, of which an operation may know how to go on */
extern bool dq_is_outage(int sqlstate);

/* at_once.c: queues that are not transactional */
/* The script runs before this returns. */
extern char *dq_offer_at_once(DqQueue *queue, bytea *payload, int64 due, bytea *key);
/* Take what an element names and remove it; with due, move it there: *id is the new
 * id. UNKNOWN: key_only and no certain answer, nothing is done. */
extern DqAnswer dq_take_at_once(Oid relid, bytea *element, bool key_only,
								const int64 *due, uint64 *id);
typedef struct DqOffering
{
	int64		due;
	bytea	   *payload;
	bytea	   *key;			/* NULL: keyless */
} DqOffering;
/* Remove what is held, and offer another task in its shard (NULL: none; *id is its
 * new one's id). false: it is gone meanwhile, or Redis has lost it. */
extern bool dq_finish_at_once(DqQueue *queue, const DqTaken *taken,
							  const DqOffering *instead, uint64 *id);
/* Once a session: that the queue is not transactional */
extern void dq_tell_at_once(const DqQueue *queue);

/* members.c: UPDATE and DELETE take tasks by their places, many at once */
typedef enum DqMemberState
{
	DQ_MEMBER_OPEN,				/* not known yet, or it has to be waited for */
	DQ_MEMBER_HELD,				/* by us, in Redis */
	DQ_MEMBER_OWN,				/* offered by this transaction */
	DQ_MEMBER_GONE				/* not pending any more */
} DqMemberState;

typedef struct DqMember
{
	int			shard;			/* from 0 */
	bool		unsent;			/* it was shown from the outbox */
	DqTake		take;			/* score, old, id, idlen: which; and what it is */
	DqMemberState state;
	DqSession	session;		/* in which it is held */
	bool		again;			/* ask once more, without waiting */
	bool		recorded;		/* its removal is */
	bool		done;			/* its turn has come */
} DqMember;

extern int64 dq_member_due(const DqMember *member);

typedef struct DqTaker DqTaker;
/* For one statement. */
extern DqTaker *dq_taker_create(MemoryContext context, Oid relid);
/* What is read of members lives in this context. */
extern void dq_taker_page(DqTaker *taker, MemoryContext page);
extern void dq_taker_take(DqTaker *taker, DqMember *members, int n, bool record);
/* Wait until it is certain: is it ours? */
extern bool dq_taker_settle(DqTaker *taker, DqMember *member);
/* The row that ends it, once; false: it is not pending any more. */
extern bool dq_taker_remove(DqTaker *taker, DqMember *member);
/* The same of a queue that is not transactional, with another task instead. */
extern bool dq_taker_finish(DqTaker *taker, DqMember *member, const DqOffering *instead,
							uint64 *id);
/* Put back what was taken and not removed. */
extern void dq_taker_release(DqTaker *taker, DqMember *members, int n);

/* dq_remove: by key, id or payload */
/* The row that removes exactly this member; hold: its token, or NULL */
extern void dq_record_member(DqQueue *queue, int32 shard, int64 due, bytea *member,
							 const char *hold);
extern DqAnswer dq_remove_element(DqQueue *queue, bytea *element);
/* reschedule.c: payload bytes of a member in either of Redisson's packings */
extern bytea *dq_member_payload(const bytea *member);
/* the new id, NULL: not pending, or no certain answer and recorded */
extern char *dq_reschedule_element(DqQueue *queue, bytea *element, int64 due);
/* For triggers: the task with this key and no other; an outage never raises,
 * whatever on_outage says. */
extern DqAnswer dq_remove_key(DqQueue *queue, bytea *key);

/* arrivals.c: waiting for elements of the ready lists of a queue */
/*
 * Until something has arrived in one of these shards for us, or for a while; may be
 * early. Goes on where it ended until dq_arrivals_forget().
 */
extern void dq_arrivals_wait(const DqTarget *target, const DqKeys *keys,
							 const int32 *shards, int nshards, TimestampTz until);
/* So many elements are left to the others. */
extern void dq_arrivals_pass_on(int shard, int64 left);
extern void dq_arrivals_forget(void);

/* servers.c: of this wrapper; errors: 42704 no such server, 42809 of another wrapper */
extern Oid	dq_server_named(const char *name);
/* errors: 42704 there is none; 42P17 there are several */
extern char *dq_server_only(void);

#endif							/* DQ_API_H */
