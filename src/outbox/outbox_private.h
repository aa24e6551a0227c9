/*
 * outbox_private.h
 *	  What the files of the outbox room tell each other: rows, and the ends of
 *	  transactions.
 */
#ifndef DQ_OUTBOX_PRIVATE_H
#define DQ_OUTBOX_PRIVATE_H

#include "outbox/outbox.h"

/* tables.c: a row as it is, xid and tli included */
extern void dq_outbox_insert_row(DqRow *row, Oid serverid);
/* the first transaction with rows of a shard in one table; false: none */
extern bool dq_outbox_first(int table, int32 shard, Snapshot snapshot,
							FullTransactionId *xid);

/*
 * emptying.c: is anything in an outbox table still needed? First looks, as many as it
 * takes, with no more than an AccessShare lock; then, under an exclusive lock, the
 * question whether anything was added since; then what has gone is noted.
 */
typedef enum DqNeed
{
	DQ_NEED_UNKNOWN,			/* look again */
	DQ_NEED_ROWS,
	DQ_NEED_NOTHING
} DqNeed;
extern DqNeed dq_emptying_look(Relation rel);
extern bool dq_emptying_confirm(Relation rel);
extern void dq_emptying_done(int64 round);
/* Would rows that are left bring back what rows that have gone took away? */
extern bool dq_outbox_brings_back(int32 shard, int64 before, const DqMark *mark,
								  Snapshot snapshot);

/* xact.c: have the callbacks called */
extern void dq_xact_register(void);

/* own.c: own operations are to be read anew */
extern void dq_own_forget(void);

/* holds.c: true: the bridge may have something to put back */
extern bool dq_holds_end(bool committed);
extern bool dq_holds_subend(bool committed);

#endif							/* DQ_OUTBOX_PRIVATE_H */
