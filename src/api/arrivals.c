/*
 * arrivals.c
 *	  Waiting until a ready list has elements. Anybody may have pushed them, so Redis
 *	  has to be asked: BLMOVE from the front of the list to its front changes nothing
 *	  and is answered as soon as there is an element. Of all backends of this database
 *	  that wait for a shard only one asks, on a connection of its own; it tells as
 *	  many others as there is something for, in the order of their coming
 *	  (src/shared/pollers.c). Called by poll.c.
 *
 *	  Redis before 6.2, or a user without the right, has no BLMOVE: then the one that
 *	  asks looks again every ten milliseconds. Nothing here is relied on: who has
 *	  waited looks itself, and does so every second whatever it hears.
 */
#include "postgres.h"

#include "api/api.h"
#include "compat.h"

#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#define MOST_WATCHES	16		/* connections of one backend */
#define LONGEST_MS		1000	/* look at least so often */
#define BLIND_MS		10		/* ... and so often without BLMOVE */
#define BEYOND_MS		50		/* ... and at shards beyond MOST_WATCHES */
#define BLOCK_MS		5000	/* one BLMOVE */
#define BLIND_FOR_MS	10000	/* after one was refused */

/* A shard that this backend waits for. */
typedef struct Seat
{
	int			poller;			/* in shared memory, -1: no room, ask for ourselves */
	bool		watches;
	DqRedis    *redis;			/* with a BLMOVE on its way, or NULL */
	TimestampTz overdue;		/* when the answer should have come */
} Seat;

static Seat *seats = NULL;
static int	nseats = 0;
static int32 *seat_shards = NULL;

/* no BLMOVE before; server it is about */
static TimestampTz blind_until = 0;
static Oid	blind_server = InvalidOid;

static void
drop_watch(Seat *seat)
{
	if (seat->redis)
		dq_redis_drop(seat->redis);
	seat->redis = NULL;
}

/* Safe at any time, after an error as well. */
void
dq_arrivals_forget(void)
{
	int			i;

	for (i = 0; i < nseats; i++)
	{
		drop_watch(&seats[i]);
		if (seats[i].poller >= 0)
			dq_poller_leave(seats[i].poller);
		seats[i].poller = -1;
	}
	nseats = 0;
	if (seats)
		pfree(seats);
	if (seat_shards)
		pfree(seat_shards);
	seats = NULL;
	seat_shards = NULL;
}

void
dq_arrivals_pass_on(int shard, int64 left)
{
	if (shard < nseats && left > 0)
		dq_pollers_wake(seat_shards[shard], left);
}

static void
take_seats(const int32 *shards, int nshards)
{
	int			i;

	seats = MemoryContextAllocZero(TopMemoryContext, nshards * sizeof(Seat));
	seat_shards = MemoryContextAlloc(TopMemoryContext, nshards * sizeof(int32));
	for (i = 0; i < nshards; i++)
	{
		seats[i].poller = -1;
		seat_shards[i] = shards[i];
	}
	for (nseats = 0; nseats < nshards; nseats++)
		seats[nseats].poller = dq_poller_enter(shards[nseats]);
}

/* ---- asking Redis ---- */

static void
send_watch(Seat *seat, int lane, const DqTarget *target, const DqKeys *keys, long ms)
{
	DqTarget	own = *target;
	char		seconds[32];
	DqArg		args[6];

	own.lane = lane;
	seat->redis = dq_redis_get(&own);
	snprintf(seconds, sizeof(seconds), "%ld.%03ld", ms / 1000, ms % 1000);
	args[0] = DQ_ARG("BLMOVE");
	args[1] = args[2] = keys->key[DQ_KEY_READY];
	args[3] = args[4] = DQ_ARG("LEFT");
	args[5] = DQ_ARG(seconds);
	dq_redis_append(seat->redis, lengthof(args), args);
	dq_redis_flush(seat->redis);
	seat->overdue = TimestampTzPlusMilliseconds(GetCurrentTimestamp(),
												 ms + target->command_timeout);
}

/* true: there is something, or there was */
static bool
read_watch(Seat *seat)
{
	DqReply    *reply = dq_redis_poll(seat->redis);
	bool		arrived;

	if (reply == NULL)
	{
		/* a peer that has gone without a word; the next look tells more */
		if (GetCurrentTimestamp() > seat->overdue)
			drop_watch(seat);
		return false;
	}
	seat->redis = NULL;			/* answered, and kept for the next time */
	arrived = reply->type == DQ_REPLY_STRING;
	if (reply->type == DQ_REPLY_ERROR)
		blind_until = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), BLIND_FOR_MS);
	dq_reply_free(reply);
	return arrived;
}

/* Trouble with a watch is none of the poll's: its own looks tell what Redis says. */
/* Send what is to be sent, or read what has come. true: something has arrived. */
static bool
attend(const DqTarget *target, const DqKeys *keys, long ms, bool sending)
{
	MemoryContext caller = CurrentMemoryContext;
	volatile bool arrived = false;

	PG_TRY();
	{
		int			watches = 0;
		int			i;

		for (i = 0; i < nseats; i++)
		{
			Seat	   *seat = &seats[i];

			if (!seat->watches || ++watches > MOST_WATCHES)
				continue;
			if (sending && seat->redis == NULL)
				send_watch(seat, i + 1, target, &keys[i], ms);
			else if (!sending && seat->redis != NULL && read_watch(seat))
				arrived = true;
		}
	}
	PG_CATCH();
	{
		int			i;

		if (!dq_error_is_redis(geterrcode()))
			PG_RE_THROW();
		MemoryContextSwitchTo(caller);
		FlushErrorState();
		for (i = 0; i < nseats; i++)
			drop_watch(&seats[i]);
		blind_until = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), LONGEST_MS);
	}
	PG_END_TRY();
	return arrived;
}

void
dq_arrivals_wait(const DqTarget *target, const DqKeys *keys, const int32 *shards,
				 int nshards, TimestampTz until)
{
	DqRedis    *watched[MOST_WATCHES];
	int			n = 0;
	bool		blind,
				woken = false;
	long		left,
				pause = LONGEST_MS;
	int			i;

	if (nseats != nshards)
	{
		dq_arrivals_forget();
		take_seats(shards, nshards);
	}
	if (blind_server != target->serverid)
		blind_until = 0;
	blind_server = target->serverid;

	/* the watch may have come to us */
	for (i = 0; i < nseats; i++)
		if (!seats[i].watches)
			seats[i].watches = seats[i].poller < 0 || dq_poller_watches(seats[i].poller);

	left = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), until);
	if (left <= 0)
		return;
	if (GetCurrentTimestamp() >= blind_until)
		(void) attend(target, keys, Min(left, BLOCK_MS), true);
	blind = GetCurrentTimestamp() < blind_until;
	for (i = 0; i < nseats; i++)
	{
		if (seats[i].redis != NULL && n < MOST_WATCHES)
			watched[n++] = seats[i].redis;
		else if (seats[i].watches)
			pause = blind ? BLIND_MS : BEYOND_MS;
		if (seats[i].poller >= 0 && dq_poller_is_woken(seats[i].poller))
			woken = true;
	}
	if (woken)
		return;
	dq_redis_wait_any(watched, n, Min(left, pause));
	(void) attend(target, keys, 0, false);
	for (i = 0; i < nseats; i++)
		if (seats[i].poller >= 0)
			(void) dq_poller_is_woken(seats[i].poller);
}
