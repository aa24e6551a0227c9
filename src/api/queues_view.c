/*
 * queues_view.c
 *	  Rows of view dq_queues: what each queue is, option by option, and whose it
 *	  is in Redis as the workers last saw. Never talks to Redis.
 */
#include "postgres.h"

#include "catalog/pg_authid.h"
#include "catalog/pg_class.h"
#include "catalog/pg_type.h"
#include "foreign/foreign.h"
#include "funcapi.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "api/api.h"
#include "compat.h"
#include "outbox/outbox.h"
#include "queue/options.h"
#include "queue/queue.h"
#include "shared/shared.h"

PG_FUNCTION_INFO_V1(dq_queues_rows);

enum
{
	COL_QUEUE,
	COL_SERVER,
	COL_REDIS_NAME,
	COL_KEYS,
	COL_FIRST_OPTION,
	COL_OWNER_SOURCE = COL_FIRST_OPTION + 21,
	COL_OWNER_HOST,
	COL_LEASE_UNTIL,
	NUM_COLS
};

/* The view's columns for options, in its order, and how each is shown */
static const struct
{
	const char *name;
	enum
	{
		SHOW_TEXT,
		SHOW_SWITCH,
		SHOW_INT4,
		SHOW_INT8,
		SHOW_INTERVAL
	}			show;
}			option_columns[] = {
	{"shards", SHOW_INT4},
	{"role", SHOW_TEXT},
	{"list", SHOW_SWITCH},
	{"index", SHOW_SWITCH},
	{"codec", SHOW_TEXT},
	{"transactional", SHOW_SWITCH},
	{"destination", SHOW_TEXT},
	{"stream_maxlen", SHOW_INT8},
	{"sink", SHOW_TEXT},
	{"handler", SHOW_TEXT},
	{"notify", SHOW_TEXT},
	{"concurrency", SHOW_INT4},
	{"max_attempts", SHOW_INT4},
	{"backoff", SHOW_INTERVAL},
	{"backoff_max", SHOW_INTERVAL},
	{"handler_timeout", SHOW_INTERVAL},
	{"rate", SHOW_INT4},
	{"on_outage", SHOW_TEXT},
	{"remove_timeout", SHOW_INTERVAL},
	{"on_data_loss", SHOW_TEXT},
	{"contents", SHOW_TEXT},
};

StaticAssertDecl(lengthof(option_columns) == COL_OWNER_SOURCE - COL_FIRST_OPTION,
				 "columns of dq_queues");

static Datum
interval_of(int64 ms)
{
	Interval   *result = palloc0(sizeof(Interval));

	result->time = ms * 1000;
	return IntervalPGetDatum(result);
}

static Datum
keys_of(const DqQueue *queue)
{
	Datum	   *elements = palloc(queue->nshards * DQ_NUM_KEYS * sizeof(Datum));
	int			n = 0;

	for (int i = 0; i < queue->nshards; i++)
	{
		DqKeys		keys;

		dq_keys_make(&keys, dq_shard_name(queue->name, queue->nshards, i));
		for (int k = 0; k < DQ_NUM_KEYS; k++)
			elements[n++] = PointerGetDatum(dq_bytes_text(keys.key[k].data,
														  keys.key[k].len));
	}
	return PointerGetDatum(construct_array(elements, n, TEXTOID, -1, false, TYPALIGN_INT));
}

static void
fill_options(Oid relid, Datum *values, bool *nulls)
{
	List	   *options = GetForeignTable(relid)->options;

	for (int i = 0; i < lengthof(option_columns); i++)
	{
		const char *name = option_columns[i].name;
		Datum	   *value = &values[COL_FIRST_OPTION + i];

		if (dq_option_text(options, DQ_ON_TABLE, name) == NULL)
		{
			nulls[COL_FIRST_OPTION + i] = true;
			continue;
		}
		switch (option_columns[i].show)
		{
			case SHOW_TEXT:
				/* a sink alone: no other destination */
				if (strcmp(name, "destination") == 0 && !dq_option_given(options, name) &&
					dq_option_given(options, "sink"))
				{
					*value = CStringGetTextDatum("none");
					break;
				}
				*value = CStringGetTextDatum(dq_option_text(options, DQ_ON_TABLE, name));
				break;
			case SHOW_SWITCH:
				*value = CStringGetTextDatum(dq_option_number(options, DQ_ON_TABLE, name) ?
											 "on" : "off");
				break;
			case SHOW_INT4:
				*value = Int32GetDatum((int32) dq_option_number(options, DQ_ON_TABLE, name));
				break;
			case SHOW_INT8:
				*value = Int64GetDatum(dq_option_number(options, DQ_ON_TABLE, name));
				break;
			case SHOW_INTERVAL:
				*value = interval_of(dq_option_number(options, DQ_ON_TABLE, name));
				break;
		}
	}
}

/* All shards of a queue have one owner: the first tells. */
static void
fill_owner(const DqQueue *queue, List *shards, Datum *values, bool *nulls)
{
	char	   *name = dq_shard_name(queue->name, queue->nshards, 0);
	DqShardStats stats;
	ListCell   *lc;

	nulls[COL_OWNER_SOURCE] = nulls[COL_OWNER_HOST] = nulls[COL_LEASE_UNTIL] = true;
	foreach(lc, shards)
	{
		DqShardRow *row = lfirst(lc);

		if (row->serverid != queue->serverid || strcmp(row->name, name) != 0)
			continue;
		if (!dq_stats_get(MyDatabaseId, row->no, &stats) ||
			stats.owner_source[0] == '\0')
			return;
		values[COL_OWNER_SOURCE] = CStringGetTextDatum(stats.owner_source);
		nulls[COL_OWNER_SOURCE] = false;
		values[COL_OWNER_HOST] = CStringGetTextDatum(stats.owner_host);
		nulls[COL_OWNER_HOST] = false;
		if (stats.lease_until > 0)
		{
			values[COL_LEASE_UNTIL] =
				TimestampTzGetDatum(dq_due_to_timestamp(stats.lease_until));
			nulls[COL_LEASE_UNTIL] = false;
		}
		return;
	}
}

Datum
dq_queues_rows(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	List	   *queues;
	List	   *shards;
	ListCell   *lc;
	bool		see_all = has_privs_of_role(GetUserId(), ROLE_PG_MONITOR);

	InitMaterializedSRF(fcinfo, 0);
	queues = dq_queue_list(InvalidOid);
	shards = dq_shards_list(InvalidOid);

	foreach(lc, queues)
	{
		Oid			relid = lfirst_oid(lc);
		const DqQueue *queue;
		Datum		values[NUM_COLS] = {0};
		bool		nulls[NUM_COLS] = {0};

		/* dropped by somebody since the list was made */
		queue = dq_table_get_noerror(relid);
		if (queue == NULL || !(see_all || dq_has_any_right(relid)))
			continue;

		values[COL_QUEUE] = ObjectIdGetDatum(relid);
		values[COL_SERVER] =
			DirectFunctionCall1(namein, CStringGetDatum(dq_server_get(queue->serverid,
																	  queue->owner,
																	  false)->name));
		values[COL_REDIS_NAME] = PointerGetDatum(dq_bytes_text(queue->name,
															   strlen(queue->name)));
		values[COL_KEYS] = keys_of(queue);
		fill_options(relid, values, nulls);
		fill_owner(queue, shards, values, nulls);
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
	return (Datum) 0;
}
