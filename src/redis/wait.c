/*
 * wait.c
 *	  Waiting for several connections at once: whoever has blocking commands on
 *	  their way (dq_poll) sleeps here until the first of them is answered. Called by
 *	  the SQL functions through redis.h.
 */
#include "postgres.h"

#include "compat.h"
#include "miscadmin.h"
#include "redis/redis_private.h"
#include "storage/latch.h"
#include "utils/wait_event.h"

/* Fewer than a server has descriptors to spare */
#define MOST_EVENTS 64

void
dq_redis_wait_any(DqRedis *const *redis, int n, long timeout_ms)
{
	static uint32 wait_event = 0;
	WaitEventSet *set;
	WaitEvent	event;
	int			i;

	if (wait_event == 0)
		wait_event = DqWaitEventNew("DqBridgePoll");

	set = DqCreateWaitEventSet(MOST_EVENTS + 2);
	AddWaitEventToSet(set, WL_LATCH_SET, PGINVALID_SOCKET, MyLatch, NULL);
	AddWaitEventToSet(set, WL_EXIT_ON_PM_DEATH, PGINVALID_SOCKET, NULL, NULL);
	for (i = 0; i < Min(n, MOST_EVENTS); i++)
	{
		int			events = WL_SOCKET_READABLE;

		if (redis[i]->sock == PGINVALID_SOCKET)
			continue;
		if (dq_redis_wants_write(redis[i]))
			events |= WL_SOCKET_WRITEABLE;
		AddWaitEventToSet(set, events, redis[i]->sock, NULL, NULL);
	}
	(void) WaitEventSetWait(set, Max(timeout_ms, 0), &event, 1, wait_event);
	FreeWaitEventSet(set);
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
}
