/*
 * async.c
 *	  Several queues below an Append, read at once: each scan asks its server for a page
 *	  over a connection of its own and lets the others work until it is there. Called by
 *	  the executor's Append through handler.c.
 *
 *	  Append's own wait is not used. It knows no command_timeout, and in older minor
 *	  releases a cancel does not end it. So no scan registers an event: while other
 *	  subplans have rows, a scan looks whether its page is there; when all wait, the first
 *	  of them waits here for any of their pages, interruptible and with the timeout.
 */
#include "postgres.h"

#include "executor/execAsync.h"
#include "executor/executor.h"
#include "executor/instrument.h"

#include "fdw/fdw.h"

/* Redis runs one script at a time: more connections to one server gain nothing */
#define LANES_A_SERVER	4
#define MOST_LANES		32
/* dq_poll has the small numbers */
#define FIRST_LANE		1000

/* Lanes that scans of this backend have; server InvalidOid: free */
typedef struct Lane
{
	Oid			serverid;
	Oid			owner;
	int			number;
} Lane;

static Lane lanes[MOST_LANES];

/* At the end of the scan, however it ends. */
static void
give_back(void *lane)
{
	((Lane *) lane)->serverid = InvalidOid;
}

/* The lowest number that is free, as its connection may be open already. */
static void
take_lane(DqReading *reading)
{
	bool		taken[LANES_A_SERVER] = {false};
	Lane	   *lane = NULL;
	MemoryContextCallback *callback;
	int			number = 0;

	for (int i = 0; i < MOST_LANES; i++)
	{
		if (!OidIsValid(lanes[i].serverid))
			lane = &lanes[i];
		else if (lanes[i].serverid == reading->serverid && lanes[i].owner == reading->owner)
			taken[lanes[i].number] = true;
	}
	while (number < LANES_A_SERVER && taken[number])
		number++;
	if (lane == NULL || number == LANES_A_SERVER)
		return;					/* it waits for each page, then */

	callback = MemoryContextAlloc(reading->context, sizeof(MemoryContextCallback));
	callback->func = give_back;
	callback->arg = lane;
	MemoryContextRegisterResetCallback(reading->context, callback);
	lane->serverid = reading->serverid;
	lane->owner = reading->owner;
	lane->number = number;
	reading->lane = FIRST_LANE + number;
}

/* A row, the end, or the news that a page is on its way. */
static void
produce(AsyncRequest *areq)
{
	ForeignScanState *node = castNode(ForeignScanState, areq->requestee);
	DqReading  *reading = node->fdw_state;
	TupleTableSlot *slot = areq->requestee->ExecProcNodeReal(areq->requestee);

	if (reading->waiting)
		ExecAsyncRequestPending(areq);
	else
		ExecAsyncRequestDone(areq, slot);
}

void
dq_async_request(AsyncRequest *areq)
{
	ForeignScanState *node = castNode(ForeignScanState, areq->requestee);
	DqReading  *reading = node->fdw_state;

	if (reading->lane == 0)
		take_lane(reading);
	produce(areq);
}

/*
 * Nothing of this scan is there, and no other subplan has rows: wait until a page of any
 * scan is. true: another one is first, or has to say that its time is over; its turn
 * comes.
 */
static bool
another_is_first(AppendState *append, const AsyncRequest *own)
{
	for (;;)
	{
		DqRedis    *redis[MOST_LANES];
		int			n = 0;
		long		left = LONG_MAX;

		for (int i = -1; (i = bms_next_member(append->as_asyncplans, i)) >= 0;)
		{
			AsyncRequest *areq = append->as_asyncrequests[i];
			ForeignScanState *node = (ForeignScanState *) areq->requestee;
			DqReading  *reading;

			if (!areq->callback_pending)
				continue;
			/* of another wrapper: it has no part in this wait */
			if (node->fdwroutine->ForeignAsyncConfigureWait != dq_async_configure_wait)
				return false;
			reading = node->fdw_state;
			if (dq_stream_answered(reading->waiting) ||
				dq_redis_time_left(dq_stream_asked_of(reading->waiting)) <= 0)
				return areq != own;
			redis[n++] = dq_stream_asked_of(reading->waiting);
			left = Min(left, dq_redis_time_left(redis[n - 1]));
		}
		dq_redis_wait_any(redis, n, left);
	}
}

void
dq_async_configure_wait(AsyncRequest *areq)
{
	ForeignScanState *node = castNode(ForeignScanState, areq->requestee);
	DqReading  *reading = node->fdw_state;

	if (IsA(areq->requestor, AppendState) && !dq_stream_answered(reading->waiting))
	{
		AppendState *append = (AppendState *) areq->requestor;

		if (!append->as_syncdone || append->as_nasyncresults > 0 ||
			another_is_first(append, areq))
			return;
	}
	dq_stream_take(reading->waiting);
	areq->callback_pending = false;
	produce(areq);
	ExecAsyncResponse(areq);
	/* nobody else counts it, as there was no notification */
	if (areq->request_complete && areq->requestee->instrument)
		InstrUpdateTupleCount(areq->requestee->instrument,
							  TupIsNull(areq->result) ? 0.0 : 1.0);
}
