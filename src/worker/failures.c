/*
 * failures.c
 *	  What a bridge does about rounds that failed: the wait before the next, the
 *	  state that dq_workers shows, and the log, where each kind of failure appears
 *	  once and not with every attempt. Called by bridge.c.
 */
#include "postgres.h"

#include "utils/timestamp.h"

#include "settings.h"
#include "shared/shared.h"
#include "worker/worker.h"

#define MIN_RETRY_MS	100
#define MAX_RETRY_MS	1000	/* G5 counts from Redis answering again */
#define REPEAT_LOG_MS	60000
#define MAX_LOGGED		8

static int	failures = 0;		/* in a row */
static bool was_up = true;		/* since the last failure was logged */
static bool logged_down = false;
static struct
{
	int			sqlstate;
	TimestampTz at;
}			logged[MAX_LOGGED];
static int	nlogged = 0;

/* Should this failure be logged? Remembers that it was. */
static bool
is_news(int sqlstate)
{
	TimestampTz now = GetCurrentTimestamp();
	int			i;

	for (i = 0; i < nlogged; i++)
	{
		if (logged[i].sqlstate == sqlstate)
			break;
	}
	/* a server that comes and goes is not news each time */
	if (i < nlogged &&
		(!was_up || !TimestampDifferenceExceeds(logged[i].at, now, REPEAT_LOG_MS)))
		return false;
	if (i == nlogged)
	{
		if (nlogged == MAX_LOGGED)
			i = 0;
		else
			nlogged++;
	}
	logged[i].sqlstate = sqlstate;
	logged[i].at = now;
	was_up = false;
	return true;
}

static bool
is_outage(int sqlstate)
{
	return ERRCODE_TO_CATEGORY(sqlstate) == ERRCODE_CONNECTION_EXCEPTION ||
		sqlstate == ERRCODE_CANNOT_CONNECT_NOW;
}

/* There was progress since the last one: begin with a short wait again. */
void
dq_failure_soften(void)
{
	failures = 0;
}

long
dq_failure_note(const ErrorData *edata, const char *server)
{
	int			sqlstate = edata->sqlerrcode;

	if (is_news(sqlstate))
	{
		logged_down = true;
		ereport(WARNING,
				(errcode(sqlstate),
				 errmsg("dq_bridge: %s", edata->message),
				 edata->detail ? errdetail_internal("%s", edata->detail) : 0,
				 edata->hint ? errhint("%s", edata->hint) : 0,
				 edata->context ? errcontext("%s", edata->context) : 0,
				 errcontext("worker of server \"%s\"", server)));
	}
	dq_worker_error(edata->message);
	dq_worker_state(is_outage(sqlstate) ? "redis_down" : "failing");

	if (failures < 30)
		failures++;
	return Min(MAX_RETRY_MS, MIN_RETRY_MS << Min(failures - 1, 10));
}

void
dq_failure_over(const char *server)
{
	const char *state = dq_worker_mine()->state;

	/* other states are the relay's to set */
	if (strcmp(state, "starting") == 0 || strcmp(state, "waiting") == 0 ||
		strcmp(state, "redis_down") == 0 || strcmp(state, "failing") == 0)
		dq_worker_state("running");
	if (failures > 0)
	{
		failures = 0;
		dq_worker_reconnected();
		if (logged_down)
			ereport(dq_log_level,
					(errmsg("dq_bridge server \"%s\" answers again", server)));
		logged_down = false;
	}
	was_up = true;
}
