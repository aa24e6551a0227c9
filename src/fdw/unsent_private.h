/*
 * unsent_private.h
 *	  What unsent.c (reading the outbox) and effect.c (what it amounts to) share.
 */
#ifndef DQ_UNSENT_PRIVATE_H
#define DQ_UNSENT_PRIVATE_H

#include "fdw/fdw.h"
#include "utils/hsearch.h"

typedef struct Bytes
{
	const char *data;
	Size		len;
} Bytes;

#define DEAD UINT64CONST(0x8000000000000000)

/* One offer. Its key and payload stay in the outbox. */
typedef struct Offer
{
	uint64		id;
	uint64		xid;			/* | DEAD: replaced or removed */
	int64		seq;
	int64		due;
	ItemPointerData tid;		/* where it lies */
	uint16		table;
} Offer;

/* One transaction: rows are ordered by (last seq of their transaction, seq). */
typedef struct Xact
{
	uint64		xid;
	int64		last;			/* PG_INT64_MAX: our own, after all others */
	bool		in_cur;			/* part of the batch that is being applied */
} Xact;

/* An operation whose effect depends on the order. */
typedef struct Op
{
	uint64		xid;
	int64		last;
	int64		seq;
	char		op;
	int64		due;			/* offers */
	uint64		id;
	Bytes		bytes;			/* offer: key, removal: member or element */
} Op;

typedef struct KeyEntry
{
	Bytes		key;			/* hash key */
	bool		live;
	uint64		id;				/* of the offer that holds it */
} KeyEntry;

typedef struct MemberEntry
{
	Bytes		member;			/* hash key */
} MemberEntry;

/* A deferred removal that names nothing offered here: maybe a task in Redis. */
typedef struct Element
{
	Bytes		bytes;
	int64		last;
	int64		seq;
	bool		is_id;
	int64		due;
	Bytes		id;				/* raw bytes */
} Element;

struct DqUnsent
{
	MemoryContext context;
	MemoryContext row_context;
	DqSnapshot *prev;
	DqSnapshot *old;
	DqCandidates scan;			/* stays open: rows are fetched through it */

	Offer	   *offers;			/* sorted by id once complete, so in the order they
								 * were written in */
	Size		noffers;
	Size		maxoffers;
	Size	   *by_due;			/* their places, sorted by due instant; NULL: not asked
								 * for yet */

	/* giving out */
	DqOrder		order;
	const DqDueRange *ranges;	/* NULL: all, in the order they were written in */
	int			nranges;
	int			range;			/* of those */
	Size		next;			/* next place in by_due, or in offers, ... */
	Size		left;			/* ... and how many there are from it on */
	Xact	   *xacts;			/* sorted by xid once complete */
	Size		nxacts;
	Size		maxxacts;
	Op		   *ops;
	Size		nops;
	Size		maxops;
	HTAB	   *keys;			/* of KeyEntry; NULL: none */
	HTAB	   *members;		/* of MemberEntry; NULL: none */
	List	   *elements;		/* of Element */
	HTAB	   *discarded;		/* of MemberEntry: of the quarantine; NULL: none */
};

/* ---- unsent.c ---------------------------------------------------------------- */

extern Bytes dq_unsent_copy(const bytea *value);
/* by id; NULL: not offered there */
extern Offer *dq_unsent_offer(DqUnsent *unsent, uint64 id);
extern Xact *dq_unsent_xact(DqUnsent *unsent, uint64 xid);

/* ---- effect.c ----------------------------------------------------------------- */

/* Go through the sorted operations once: who is dead, which keys are held. */
extern void dq_unsent_effect(DqUnsent *unsent);
extern void dq_unsent_note_discard(DqUnsent *unsent, const bytea *member);
/* Which offer holds the key? */
extern bool dq_unsent_holder(DqUnsent *unsent, const char *key, Size len, uint64 *id);

#endif							/* DQ_UNSENT_PRIVATE_H */
