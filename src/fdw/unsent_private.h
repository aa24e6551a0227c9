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

/* One offer. */
typedef struct Offer
{
	uint64		id;
	uint64		xid;			/* | DEAD: replaced or removed */
	int64		seq;
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
	bool		used;
} Element;

struct DqUnsent
{
	MemoryContext context;
	MemoryContext row_context;
	DqSnapshot *prev;
	DqSnapshot *old;
	DqCandidates scan;			/* second pass */
	bool		scanning;		/* it has not ended */

	Offer	   *offers;			/* sorted by id once complete */
	Size		noffers;
	Size		maxoffers;
	Xact	   *xacts;			/* sorted by xid once complete */
	Size		nxacts;
	Size		maxxacts;
	Op		   *ops;
	Size		nops;
	Size		maxops;
	HTAB	   *keys;			/* of KeyEntry; NULL: none */
	HTAB	   *members;		/* of MemberEntry; NULL: none */
	List	   *elements;		/* of Element */
};

/* ---- unsent.c ---------------------------------------------------------------- */

extern Bytes dq_unsent_copy(const bytea *value);
/* by id; NULL: not offered there */
extern Offer *dq_unsent_offer(DqUnsent *unsent, uint64 id);
extern Xact *dq_unsent_xact(DqUnsent *unsent, uint64 xid);

/* ---- effect.c ----------------------------------------------------------------- */

/* Go through the sorted operations once: who is dead, which keys are held. */
extern void dq_unsent_effect(DqUnsent *unsent);
/* Is it what a deferred removal by payload, called later, will take? */
extern bool dq_unsent_taken(DqUnsent *unsent, const DqRow *row);

#endif							/* DQ_UNSENT_PRIVATE_H */
