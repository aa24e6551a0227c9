/*
 * bounds.c
 *	  The values of pushed conditions, and what they leave to be asked of Redis: ranges
 *	  of whole milliseconds, or single ids and keys. Called by scan.c when a scan
 *	  begins, and each time it begins anew with other parameters.
 *
 *	  A task is shown as due at its score rounded up to whole milliseconds. So
 *	  'due_at < t' and the like are exactly ranges of milliseconds, whatever fraction t
 *	  has; infinite instants stand for scores beyond the calendar.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "executor/executor.h"
#include "mb/pg_wchar.h"
#include "utils/array.h"
#include "utils/date.h"
#include "utils/lsyscache.h"
#include "utils/timestamp.h"

#include "fdw/pushdown.h"

#define EPOCH_DIFF_MS \
	((int64) (POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE) * SECS_PER_DAY * 1000)
/* The first and last ms that are shown as a finite instant, see columns.c */
#define FIRST_MS	(floor_div(MIN_TIMESTAMP - 1, 1000) + 1 + EPOCH_DIFF_MS)
#define LAST_MS		(floor_div(END_TIMESTAMP - 1, 1000) + EPOCH_DIFF_MS)
/* scores beyond are not all of them whole numbers of ms */
#define EXACT_MS	(INT64CONST(1) << 53)

static int64
floor_div(int64 a, int64 b)
{
	return a / b - (a % b < 0);
}

/* ---- instants -------------------------------------------------------------------- */

/* Any of the types that due_at is compared with, as an instant. */
static TimestampTz
as_timestamptz(Datum value, Oid type)
{
	TimestampTz result;
	int			overflow = 0;

	switch (type)
	{
		case DATEOID:
			result = date2timestamptz_opt_overflow(DatumGetDateADT(value), &overflow);
			break;
		case TIMESTAMPOID:
			result = timestamp2timestamptz_opt_overflow(DatumGetTimestamp(value), &overflow);
			break;
		default:
			return DatumGetTimestampTz(value);
	}
	/* beyond every finite instant, as the comparison itself sees it; no whole ms */
	if (overflow > 0)
		return END_TIMESTAMP - 1;
	if (overflow < 0)
		return MIN_TIMESTAMP - 1;
	return result;
}

/* The last ms that is shown as t or before. */
static int64
ms_upto(TimestampTz t)
{
	if (t == DT_NOEND)
		return DQ_DUE_MAX;
	if (t == DT_NOBEGIN)
		return FIRST_MS - 1;
	return floor_div(t, 1000) + EPOCH_DIFF_MS;
}

/* The last ms that is shown as before t; *nothing: there is none. */
static int64
ms_before(TimestampTz t, bool *nothing)
{
	*nothing = t == DT_NOBEGIN;
	if (t == DT_NOEND)
		return LAST_MS;
	if (t == DT_NOBEGIN)
		return DQ_DUE_MIN;
	return floor_div(t - 1, 1000) + EPOCH_DIFF_MS;
}

/* Instants that a comparison with one value leaves; false: none. */
static bool
due_range(DqQualKind kind, TimestampTz t, DqDueRange *range)
{
	bool		nothing_before;
	int64		before = ms_before(t, &nothing_before);

	range->after = DQ_DUE_MIN;
	range->upto = DQ_DUE_MAX;
	switch (kind)
	{
		case DQ_QUAL_DUE_LT:
			range->upto = before;
			return !nothing_before;
		case DQ_QUAL_DUE_LE:
			range->upto = ms_upto(t);
			return true;
		case DQ_QUAL_DUE_GE:
			if (!nothing_before)
				range->after = before;
			return true;
		case DQ_QUAL_DUE_GT:
			range->after = ms_upto(t);
			return t != DT_NOEND;
		case DQ_QUAL_DUE_EQ:
			if (!nothing_before)
				range->after = before;
			range->upto = ms_upto(t);
			return range->after < range->upto;
		default:
			elog(ERROR, "unexpected kind of condition: %d", (int) kind);
	}
	return false;				/* keep compiler quiet */
}

/* ---- lists of ranges ---------------------------------------------------------------- */

static int
due_range_cmp(const void *a, const void *b)
{
	const DqDueRange *x = a;
	const DqDueRange *y = b;

	if (x->after != y->after)
		return x->after < y->after ? -1 : 1;
	return x->upto < y->upto ? -1 : x->upto > y->upto;
}

/* Keep what lies in both lists; each is sorted and without overlaps. */
static void
intersect(DqBounds *bounds, const DqDueRange *with, int nwith)
{
	DqDueRange *result = palloc((bounds->nranges + nwith) * sizeof(DqDueRange));
	int			n = 0;

	for (int i = 0, j = 0; i < bounds->nranges && j < nwith;)
	{
		const DqDueRange *a = &bounds->ranges[i];
		const DqDueRange *b = &with[j];
		int64		after = Max(a->after, b->after);
		int64		upto = Min(a->upto, b->upto);

		if (after < upto)
		{
			result[n].after = after;
			result[n].upto = upto;
			n++;
		}
		if (a->upto < b->upto)
			i++;
		else
			j++;
	}
	bounds->ranges = result;
	bounds->nranges = n;
	if (n == 0)
		bounds->nothing = true;
}

bool
dq_due_in_ranges(const DqDueRange *ranges, int nranges, int64 due)
{
	for (int i = 0; i < nranges; i++)
	{
		if (due > ranges[i].after && due <= ranges[i].upto)
			return true;
	}
	return false;
}

/* ---- values ---------------------------------------------------------------------------- */

/* One value, or those of an array that are not null. */
static int
values_of(Datum value, bool array, Oid type, Datum **values)
{
	ArrayType  *arr;
	int16		len;
	bool		byval;
	char		align;
	bool	   *nulls;
	int			n;
	int			kept = 0;

	if (!array)
	{
		*values = palloc(sizeof(Datum));
		(*values)[0] = value;
		return 1;
	}
	arr = DatumGetArrayTypeP(value);
	get_typlenbyvalalign(ARR_ELEMTYPE(arr), &len, &byval, &align);
	deconstruct_array(arr, ARR_ELEMTYPE(arr), len, byval, align, values, &nulls, &n);
	for (int i = 0; i < n; i++)
	{
		if (!nulls[i])
			(*values)[kept++] = (*values)[i];
	}
	return kept;
}

static void
bound_due(DqBounds *bounds, DqQualKind kind, Oid type, Datum *values, int n)
{
	DqDueRange *ranges = palloc(Max(n, 1) * sizeof(DqDueRange));
	int			nranges = 0;
	int			kept = 0;

	for (int i = 0; i < n; i++)
	{
		if (due_range(kind, as_timestamptz(values[i], type), &ranges[nranges]))
			nranges++;
	}
	/* of several values each is one instant: equal ones are together then */
	qsort(ranges, nranges, sizeof(DqDueRange), due_range_cmp);
	for (int i = 0; i < nranges; i++)
	{
		if (kept == 0 || due_range_cmp(&ranges[kept - 1], &ranges[i]) != 0)
			ranges[kept++] = ranges[i];
	}
	intersect(bounds, ranges, kept);
}

static void
bound_shard(DqBounds *bounds, int nshards, Datum *values, int n)
{
	bool	   *shards = palloc0(nshards * sizeof(bool));
	bool		any = false;

	for (int i = 0; i < n; i++)
	{
		int32		shard = DatumGetInt32(values[i]);

		if (shard >= 0 && shard < nshards && (bounds->shards == NULL || bounds->shards[shard]))
			any = shards[shard] = true;
	}
	bounds->shards = shards;
	if (!any)
		bounds->nothing = true;
}

static int
sought_cmp(const void *a, const void *b)
{
	const DqSought *x = a;
	const DqSought *y = b;
	int			cmp;

	if (x->by_key != y->by_key)
		return x->by_key ? -1 : 1;
	if (x->due != y->due)
		return x->due < y->due ? -1 : 1;
	cmp = memcmp(x->data, y->data, Min(x->len, y->len));
	return cmp != 0 ? cmp : (x->len > y->len) - (x->len < y->len);
}

static bool
seek_key(DqSought *sought, const char *key, int len)
{
	char	   *utf8 = pg_server_to_any(key, len, PG_UTF8);

	sought->by_key = true;
	sought->due = 0;
	sought->data = utf8;
	sought->len = utf8 == key ? len : strlen(utf8);
	return sought->len <= DQ_MAX_KEY;
}

/* The head of the member of a task with that id; see columns.c for how ids look. */
static bool
seek_id(DqBounds *bounds, DqSought *sought, const char *id, int len)
{
	bytea	   *foreign = NULL;
	uint64		number;
	char	   *head;

	if (!dq_id_in(id, len, &sought->due, &number, &foreign))
		return false;
	if (foreign && VARSIZE_ANY_EXHDR(foreign) > 255)
		return false;
	if (sought->due > EXACT_MS || sought->due < -EXACT_MS)
	{
		DqDueRange *range = palloc(sizeof(DqDueRange));

		range->after = sought->due < 0 ? DQ_DUE_MIN : EXACT_MS;
		range->upto = sought->due < 0 ? -EXACT_MS : DQ_DUE_MAX;
		bounds->odd = lappend(bounds->odd, range);
		return false;
	}

	sought->by_key = false;
	head = palloc(256);
	sought->data = head;
	if (foreign == NULL)
	{
		head[0] = 8;
		for (int i = 0; i < 8; i++)
			head[1 + i] = (char) (number >> (8 * (7 - i)));
		sought->len = 9;
	}
	else if (VARSIZE_ANY_EXHDR(foreign) == 8)
	{
		/* of the new format it would be shown as a number */
		memcpy(head, VARDATA_ANY(foreign), 8);
		sought->len = 8;
	}
	else
	{
		head[0] = (char) VARSIZE_ANY_EXHDR(foreign);
		memcpy(head + 1, VARDATA_ANY(foreign), VARSIZE_ANY_EXHDR(foreign));
		sought->len = 1 + VARSIZE_ANY_EXHDR(foreign);
	}
	return true;
}

/* Of several conditions on ids and keys the one with the fewest values counts. */
static void
bound_sought(DqBounds *bounds, DqQualKind kind, Datum *values, int n)
{
	DqSought   *sought = palloc(Max(n, 1) * sizeof(DqSought));
	DqBounds	own = {0};
	int			nsought = 0;
	int			kept = 0;

	for (int i = 0; i < n; i++)
	{
		text	   *value = DatumGetTextPP(values[i]);
		char	   *data = VARDATA_ANY(value);
		int			len = VARSIZE_ANY_EXHDR(value);

		if (kind == DQ_QUAL_KEY ? seek_key(&sought[nsought], data, len) :
			seek_id(&own, &sought[nsought], data, len))
			nsought++;
	}
	if (nsought > 1)
		qsort(sought, nsought, sizeof(DqSought), sought_cmp);
	for (int i = 0; i < nsought; i++)
	{
		if (kept == 0 || sought_cmp(&sought[kept - 1], &sought[i]) != 0)
			sought[kept++] = sought[i];
	}
	if (kept == 0 && own.odd == NIL)
		bounds->nothing = true;
	if (bounds->lookup && bounds->nsought + list_length(bounds->odd) <= kept + list_length(own.odd))
		return;
	bounds->lookup = true;
	bounds->sought = sought;
	bounds->nsought = kept;
	bounds->odd = own.odd;
}

void
dq_bounds_eval(List *quals, List *values, ExprContext *econtext, int nshards,
			   DqBounds *bounds)
{
	ListCell   *lq,
			   *lv;

	memset(bounds, 0, sizeof(*bounds));
	bounds->ranges = palloc(sizeof(DqDueRange));
	bounds->ranges[0].after = DQ_DUE_MIN;
	bounds->ranges[0].upto = DQ_DUE_MAX;
	bounds->nranges = 1;

	forboth(lq, quals, lv, values)
	{
		List	   *qual = lfirst(lq);
		DqQualKind	kind = (DqQualKind) linitial_int(qual);
		bool		array = lsecond_int(qual) != 0;
		Oid			type = (Oid) lthird_int(qual);
		bool		isnull;
		Datum		value = ExecEvalExpr((ExprState *) lfirst(lv), econtext, &isnull);
		Datum	   *datums;
		int			n;

		/* comparing with null is never true */
		if (isnull)
		{
			bounds->nothing = true;
			return;
		}
		n = values_of(value, array, type, &datums);
		switch (kind)
		{
			case DQ_QUAL_ID:
			case DQ_QUAL_KEY:
				bound_sought(bounds, kind, datums, n);
				break;
			case DQ_QUAL_SHARD:
				bound_shard(bounds, nshards, datums, n);
				break;
			default:
				bound_due(bounds, kind, type, datums, n);
				break;
		}
		if (bounds->nothing)
			return;
	}
}
