/*
 * operations_private.h
 *	  How arguments go into a script's call and parts come out of its reply; shared
 *	  by the files that call scripts: operations.c, removal.c, session.c, poll.c, take.c,
 *	  reading.c, shelf.c.
 */
#ifndef DQ_OPERATIONS_PRIVATE_H
#define DQ_OPERATIONS_PRIVATE_H

#include "queue/queue.h"

#define FENCE_ELEMENTS 6		/* the common part of every reply */

/* Element i of a reply; palloc'd. */
extern char *dq_part_text(const DqReply *reply, int i);
extern bytea *dq_part_bytes(const DqReply *reply, int i);
extern int64 dq_part_int(const DqReply *reply, int i);
/* A score as whole ms, rounded up; INT64_MAX for "" and for +inf. */
extern int64 dq_part_score(const DqReply *reply, int i);

/* 08P01 unless it is an array of at least so many. */
extern void dq_reply_check(const DqReply *reply, int atleast, DqScriptId script);
extern void dq_fence_read(const DqReply *reply, DqFence *fence);
/* ... and the snapshots behind it (prev, cur, old) */
extern void dq_read_fence_read(const DqReply *reply, DqReadFence *fence);

extern void dq_script_send(DqRedis *redis, DqScriptId script, const DqKeys *keys,
						   int nargs, const DqArg *args);
/* The next reply of a pipeline; an error reply goes to the caller. */
extern DqReply *dq_script_next(DqRedis *redis, DqScriptId script, int atleast,
							   DqReply **error);
/* One exchange of a backend: errors are raised with queue and script. */
extern DqReply *dq_script_call(DqRedis *redis, const char *queue, DqScriptId script,
							   const DqKeys *keys, int nargs, const DqArg *args,
							   int atleast);

/* The record of a hold, 'source|incarnation|xid|...' */
extern bool dq_hold_read(const char *head, const char *token, DqHold *hold);

#define ARG_INT(buf, value) \
	(snprintf((buf), sizeof(buf), INT64_FORMAT, (int64) (value)), DQ_ARG(buf))

/* The eight bytes of an id, nothing for 0. */
extern DqArg dq_bound_arg(uint64 bound);

#endif							/* DQ_OPERATIONS_PRIVATE_H */
