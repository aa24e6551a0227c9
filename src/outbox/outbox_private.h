/*
 * outbox_private.h
 *	  What the files of the outbox room tell each other at the ends of
 *	  transactions.
 */
#ifndef DQ_OUTBOX_PRIVATE_H
#define DQ_OUTBOX_PRIVATE_H

/* xact.c: have the callbacks called */
extern void dq_xact_register(void);

/* own.c: own operations are to be read anew */
extern void dq_own_forget(void);

/* holds.c: true: the bridge may have something to put back */
extern bool dq_holds_end(bool committed);
extern bool dq_holds_subend(bool committed);

#endif							/* DQ_OUTBOX_PRIVATE_H */
