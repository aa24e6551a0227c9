/*
 * taker_private.h
 *	  What members.c (taking many tasks) and turns.c (what happens when the turn of one
 *	  comes) share.
 */
#ifndef DQ_TAKER_PRIVATE_H
#define DQ_TAKER_PRIVATE_H

#include "api/api.h"

typedef struct TakerShard
{
	DqConcerns *concerns;
	DqStatus	status;			/* of the last answer */
	DqTakeResult last;			/* where the fence was then, in last_context */
	MemoryContext last_context;
	DqSnapshot *prev;
	DqSnapshot *old;			/* NULL: none */
} TakerShard;

struct DqTaker
{
	MemoryContext context;
	MemoryContext page;			/* of what is known of tasks */
	Oid			relid;
	int			nshards;
	TakerShard *shards;
	Snapshot	began;			/* what is shown from the outbox was committed before */
	TimestampTz deadline;		/* of a wait for the relay */
	bool		moved;			/* the relay has moved since */
};

/* ---- members.c ------------------------------------------------------------------ */

/* The definition, as it is now. */
extern DqQueue *dq_taker_queue(DqTaker *taker);
/* Before waits; then wait until the relay has moved. An error when it does not. */
extern void dq_taker_patience(DqTaker *taker);
extern void dq_taker_wait(DqTaker *taker);
/* Around looks at what is shown from the outbox. */
extern void dq_taker_began(DqTaker *taker);
extern void dq_taker_forget(DqTaker *taker);
/* One look. one: what bears on it is not looked for; record: the removals, at once. */
extern void dq_taker_ask(DqTaker *taker, DqMember **members, int n, bool one, bool record);

#endif							/* DQ_TAKER_PRIVATE_H */
