/*
 * stats_view.c
 *	  Rows of view dq_stats: what the workers have published of each shard, and
 *	  what lies in the outbox. Never waits for Redis and takes no lock on a queue.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_class.h"
#include "fmgr.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "api/api.h"
#include "api/views.h"
#include "outbox/outbox.h"
#include "queue/queue.h"
#include "shared/shared.h"

PG_FUNCTION_INFO_V1(dq_stats_rows);

/* in the order of the view's columns */
enum StatsColumn
{
	QUEUE, SHARD, PENDING, HELD, READY, QUARANTINED, OUTBOX_ROWS, OUTBOX_OLDEST,
	NEXT_DUE, OVERDUE, LAG, OFFERED, RELAYED, TRANSFERRED, DELIVERED, REMOVED,
	RESCHEDULED, FAILED, RETRIED, DEAD, IN_FLIGHT, REPLAYED, REMOVE_SCANS, STATE,
	LAST_ERROR, LAST_ERROR_AT, CLOCK_SKEW, WARNINGS, SEEN_AT, NUM_STATS_COLUMNS
};

/* One row being made. */
typedef struct StatsRow
{
	Datum		values[NUM_STATS_COLUMNS];
	bool		nulls[NUM_STATS_COLUMNS];
} StatsRow;

static void
set_value(StatsRow *row, enum StatsColumn column, Datum value)
{
	row->values[column] = value;
	row->nulls[column] = false;
}

static void
set_count(StatsRow *row, enum StatsColumn column, int64 value)
{
	set_value(row, column, Int64GetDatum(value));
}

static void
set_interval(StatsRow *row, enum StatsColumn column, int64 us)
{
	Interval   *interval = palloc0(sizeof(Interval));

	interval->time = us;
	set_value(row, column, IntervalPGetDatum(interval));
}

/*
 * A problem comes first, then the pause: a paused queue whose Redis is away
 * needs attention as any other.
 */
static const char *
state_of(bool alive, bool paused, const DqShardStats *stats)
{
	bool		published = stats != NULL && stats->state[0] != '\0';

	if (!alive)
		return "no_worker";
	if (published && strcmp(stats->state, "running") != 0 &&
		strcmp(stats->state, "paused") != 0)
		return stats->state;
	if (stats != NULL && stats->delivery.parked[0] != '\0')
		return "parked";
	return paused ? "paused" : "running";
}

static void
fill_published(StatsRow *row, const DqShardStats *stats)
{
	if (stats->seen_at != 0)
	{
		set_count(row, PENDING, stats->pending);
		set_count(row, HELD, stats->held);
		set_count(row, READY, stats->ready);
		set_count(row, QUARANTINED, stats->quarantined);
		set_count(row, OVERDUE, stats->overdue);
		set_interval(row, CLOCK_SKEW, stats->clock_skew_us);
		set_value(row, SEEN_AT, TimestampTzGetDatum(stats->seen_at));
		if (stats->next_due != PG_INT64_MAX)
			set_value(row, NEXT_DUE,
					  TimestampTzGetDatum(dq_due_to_timestamp(stats->next_due)));
	}
	if (stats->delivery.delivered > 0)
		set_interval(row, LAG, stats->delivery.lag_us);
	else if (stats->transferred > 0)
		set_interval(row, LAG, stats->lag_us);
	set_count(row, OFFERED, stats->offered);
	set_count(row, RELAYED, stats->relayed);
	set_count(row, TRANSFERRED, stats->transferred);
	set_count(row, REMOVED, stats->removed);
	set_count(row, REPLAYED, stats->replayed);
	set_count(row, REMOVE_SCANS, stats->remove_scans);
	set_count(row, DELIVERED, stats->delivered + stats->delivery.delivered);
	set_count(row, RESCHEDULED, stats->rescheduled);
	set_count(row, FAILED, stats->delivery.failed);
	set_count(row, RETRIED, stats->delivery.retried);
	set_count(row, DEAD, stats->delivery.dead);
	set_count(row, IN_FLIGHT, stats->delivery.in_flight);
	if (stats->delivery.parked[0] != '\0')
	{
		set_value(row, LAST_ERROR, CStringGetTextDatum(stats->delivery.parked));
		set_value(row, LAST_ERROR_AT, TimestampTzGetDatum(stats->delivery.parked_at));
		set_value(row, WARNINGS, dq_warnings_array(stats->warnings));
		return;
	}
	if (stats->last_error[0] != '\0')
		set_value(row, LAST_ERROR, CStringGetTextDatum(stats->last_error));
	if (stats->last_error_at != 0)
		set_value(row, LAST_ERROR_AT, TimestampTzGetDatum(stats->last_error_at));
	set_value(row, WARNINGS, dq_warnings_array(stats->warnings));
}

static void
fill_outbox(StatsRow *row, int32 shard_no)
{
	int64		rows;
	TimestampTz oldest = 0;

	dq_outbox_backlog(shard_no, &rows, &oldest);
	set_count(row, OUTBOX_ROWS, rows);
	if (rows > 0 && oldest != 0)
		set_interval(row, OUTBOX_OLDEST, Max(GetCurrentTimestamp() - oldest, 0));
}

/* The registry's number of a shard, 0 if nothing has used it yet. */
static int32
find_shard_no(List *shards, const DqQueue *queue, int shard)
{
	char	   *name = dq_shard_name(queue->name, queue->nshards, shard);
	ListCell   *lc;

	foreach(lc, shards)
	{
		DqShardRow *row = lfirst(lc);

		if (row->serverid == queue->serverid && strcmp(row->name, name) == 0)
			return row->no;
	}
	return 0;
}

Datum
dq_stats_rows(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	bool		see_all = has_privs_of_role(GetUserId(), ROLE_PG_MONITOR);
	ListCell   *lc;

	InitMaterializedSRF(fcinfo, 0);

	foreach(lc, dq_queue_list(InvalidOid))
	{
		Oid			relid = lfirst_oid(lc);
		DqQueue    *queue;
		DqQueue		def;
		List	   *shards;
		bool		alive;
		bool		paused;

		if (!see_all && !dq_has_any_right(relid))
			continue;
		queue = dq_queue_get_noerror(relid);
		if (queue == NULL)
			continue;			/* dropped meanwhile */

		/* what follows reads catalogs, and the pointer may not survive that */
		def = *queue;
		def.name = pstrdup(queue->name);
		alive = dq_bridge_alive(MyDatabaseId, def.serverid);
		paused = dq_queue_is_paused(&def);
		shards = dq_shards_list(def.serverid);

		for (int i = 0; i < def.nshards; i++)
		{
			StatsRow	row;
			DqShardStats stats;
			bool		published = false;
			int32		no = find_shard_no(shards, &def, i);

			memset(row.values, 0, sizeof(row.values));
			memset(row.nulls, true, sizeof(row.nulls));
			set_value(&row, QUEUE, ObjectIdGetDatum(relid));
			set_value(&row, SHARD, Int32GetDatum(i));
			if (no != 0)
			{
				published = dq_stats_get(MyDatabaseId, no, &stats);
				if (published)
					fill_published(&row, &stats);
				fill_outbox(&row, no);
			}
			set_value(&row, STATE,
					  CStringGetTextDatum(state_of(alive, paused,
												   published ? &stats : NULL)));
			tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc,
								 row.values, row.nulls);
		}
	}
	return (Datum) 0;
}
