/*
 * explain.c
 *	  What EXPLAIN shows of reading a queue. Called through handler.c. Without ANALYZE
 *	  nothing has been asked of Redis, and nothing is.
 *
 *	  Conditions that go to Redis are among the node's filter, so they are shown
 *	  twice: the filter says what holds, these lines say what is asked for.
 */
#include "postgres.h"

#define DQ_USE_EXPLAIN
#include "compat.h"

#include "mb/pg_wchar.h"
#include "nodes/makefuncs.h"
#include "utils/builtins.h"
#include "utils/ruleutils.h"

#include "fdw/pushdown.h"

/* Names of what is read. */
static void
explain_keys(const DqQueue *queue, ExplainState *es)
{
	int			which = queue->contents == DQ_CONTENTS_READY ? DQ_KEY_READY :
		queue->contents == DQ_CONTENTS_QUARANTINE ? DQ_KEY_BAD : DQ_KEY_PENDING;
	List	   *names = NIL;

	for (int i = 0; i < queue->nshards; i++)
	{
		DqKeys		keys;
		DqArg	   *key = &keys.key[which];

		dq_keys_make(&keys, dq_shard_name(queue->name, queue->nshards, i));
		names = lappend(names, pg_any_to_server(key->data, key->len, PG_UTF8));
	}
	ExplainPropertyList("Redis Keys", names, es);
}

/*
 * Conditions as they stand in the filter. Where some name ids or keys, ranges of due_at
 * are not asked for.
 */
static void
explain_conditions(ForeignScanState *node, List *quals, ExplainState *es)
{
	Plan	   *plan = node->ss.ps.plan;
	List	   *asked = NIL;
	bool		lookup = false;
	List	   *context;
	ListCell   *lc;

	foreach(lc, quals)
	{
		DqQualKind	kind = (DqQualKind) linitial_int(lfirst(lc));

		lookup |= kind == DQ_QUAL_ID || kind == DQ_QUAL_KEY;
	}
	foreach(lc, quals)
	{
		List	   *qual = lfirst(lc);
		DqQualKind	kind = (DqQualKind) linitial_int(qual);

		if (!lookup || kind == DQ_QUAL_ID || kind == DQ_QUAL_KEY || kind == DQ_QUAL_SHARD)
			asked = lappend(asked, list_nth(plan->qual, lfourth_int(qual)));
	}
	if (asked == NIL)
		return;
	context = set_deparse_context_plan(es->deparse_cxt, plan, NIL);
	ExplainPropertyText(lookup ? "Redis Lookup" : "Redis Range",
						deparse_expression((Node *) make_ands_explicit(asked), context,
										   es->verbose, false), es);
}

static void
explain_aggregates(List *aggregates, ExplainState *es)
{
	static const char *const names[] = {
		[DQ_AGG_COUNT] = "count", [DQ_AGG_MIN] = "first", [DQ_AGG_MAX] = "last"
	};
	List	   *shown = NIL;
	ListCell   *lc;

	foreach(lc, aggregates)
		shown = lappend(shown, unconstify(char *, names[lfirst_int(lc)]));
	ExplainPropertyList("Redis Aggregates", shown, es);
}

void
dq_explain_scan(ForeignScanState *node, ExplainState *es)
{
	ForeignScan *plan = (ForeignScan *) node->ss.ps.plan;
	List	   *private = plan->fdw_private;
	List	   *aggregates = list_nth(private, DQ_SCAN_AGGREGATES);
	DqOrder		order = (DqOrder) intVal(list_nth(private, DQ_SCAN_ORDER));
	int			first_page = intVal(list_nth(private, DQ_SCAN_FIRST_PAGE));
	DqScanCounts counts;

	if (es->verbose)
		explain_keys(dq_table_get(linitial_oid(list_nth(private, DQ_SCAN_RELID))), es);
	if (aggregates != NIL)
	{
		explain_aggregates(aggregates, es);
		if (list_nth(private, DQ_SCAN_TEXT))
			ExplainPropertyText("Redis Range", strVal(list_nth(private, DQ_SCAN_TEXT)), es);
	}
	else
		explain_conditions(node, list_nth(private, DQ_SCAN_QUALS), es);
	if (order != DQ_ORDER_NONE)
		ExplainPropertyText("Redis Order",
							order == DQ_ORDER_DESC ? "due_at DESC" : "due_at", es);
	if (es->verbose && first_page > 0)
		ExplainPropertyInteger("First Page", NULL, first_page, es);

	if (es->analyze && dq_scan_counts(node, &counts))
	{
		ExplainPropertyInteger("Round Trips", NULL, counts.round_trips, es);
		ExplainPropertyInteger("Tasks from Redis", NULL, counts.from_redis, es);
		ExplainPropertyInteger("Bytes from Redis", NULL, counts.bytes, es);
		ExplainPropertyInteger("Tasks from Outbox", NULL, counts.from_outbox, es);
	}
}
