/*
 * payload.c
 *	  SQL values to the bytes that go to Redis and back: payloads, keys, due
 *	  instants, ids. Called by every offer, so the output function of a type is
 *	  looked up once per backend and not once per row.
 */
#include "postgres.h"

#include "catalog/namespace.h"
#include "catalog/pg_type.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "queue/queue.h"

/* ---- how values of a type become text -------------------------------------- */

typedef enum OutputKind
{
	OUTPUT_TEXT,				/* a varlena that is its own text */
	OUTPUT_BYTEA,
	OUTPUT_ROW,					/* composite: JSON when it is a payload */
	OUTPUT_CSTRING,				/* unknown literals */
	OUTPUT_FUNCTION
} OutputKind;

typedef struct TypeOutput
{
	Oid			type;			/* hash key */
	OutputKind	kind;
	FmgrInfo	function;		/* output function, of every kind */
} TypeOutput;

static HTAB *type_outputs = NULL;
static MemoryContext type_outputs_context = NULL;
static TypeOutput *last_output = NULL;
static bool type_outputs_stale = false;

/* A type was altered or dropped, or a function replaced: look all up again. */
static void
type_outputs_inval(Datum arg, int cacheid, uint32 hashvalue)
{
	type_outputs_stale = true;
	last_output = NULL;
}

static void
type_outputs_reset(void)
{
	HASHCTL		ctl = {0};

	if (type_outputs_context == NULL)
	{
		MemoryContext context;

		context = AllocSetContextCreate(CacheMemoryContext,
										"dq_bridge type output functions",
										ALLOCSET_SMALL_SIZES);
		CacheRegisterSyscacheCallback(TYPEOID, type_outputs_inval, (Datum) 0);
		CacheRegisterSyscacheCallback(PROCOID, type_outputs_inval, (Datum) 0);
		type_outputs_context = context;
	}
	last_output = NULL;
	type_outputs = NULL;
	MemoryContextReset(type_outputs_context);

	ctl.keysize = sizeof(Oid);
	ctl.entrysize = sizeof(TypeOutput);
	ctl.hcxt = type_outputs_context;
	type_outputs = hash_create("dq_bridge type output functions", 16, &ctl,
							   HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
	type_outputs_stale = false;
}

static TypeOutput *
type_output(Oid type)
{
	TypeOutput	fresh;
	TypeOutput *entry;
	Oid			base;
	Oid			function;
	bool		is_varlena;

	if (last_output && last_output->type == type)
		return last_output;

	if (type_outputs == NULL || type_outputs_stale)
	{
		if (CacheMemoryContext == NULL)
			elog(ERROR, "no cache memory context");
		type_outputs_reset();
	}

	entry = hash_search(type_outputs, &type, HASH_FIND, NULL);
	if (entry == NULL)
	{
		/* complete before it is entered: the lookups may raise */
		memset(&fresh, 0, sizeof(fresh));
		fresh.type = type;
		base = getBaseType(type);
		getTypeOutputInfo(type, &function, &is_varlena);
		fmgr_info_cxt(function, &fresh.function, type_outputs_context);
		if (base == TEXTOID || base == VARCHAROID || base == JSONOID)
			fresh.kind = OUTPUT_TEXT;
		else if (base == BYTEAOID)
			fresh.kind = OUTPUT_BYTEA;
		else if (base == UNKNOWNOID)
			fresh.kind = OUTPUT_CSTRING;
		else if (base == RECORDOID || get_typtype(base) == TYPTYPE_COMPOSITE)
			fresh.kind = OUTPUT_ROW;
		else
			fresh.kind = OUTPUT_FUNCTION;

		entry = hash_search(type_outputs, &type, HASH_ENTER, NULL);
		*entry = fresh;
	}
	last_output = entry;
	return entry;
}

/* ---- bytes ------------------------------------------------------------------- */

/* Text in the server encoding to a bytea of UTF-8. */
static bytea *
utf8_bytea(const char *data, size_t len)
{
	char	   *utf8 = pg_server_to_any(data, len, PG_UTF8);
	bytea	   *result;

	if (utf8 != data)
		len = strlen(utf8);
	result = (bytea *) palloc(VARHDRSZ + len);
	SET_VARSIZE(result, VARHDRSZ + len);
	memcpy(VARDATA(result), utf8, len);
	if (utf8 != data)
		pfree(utf8);
	return result;
}

bytea *
dq_payload_bytes(Datum value, Oid type)
{
	TypeOutput *output = type_output(type);

	switch (output->kind)
	{
		case OUTPUT_BYTEA:
			return DatumGetByteaPCopy(value);
		case OUTPUT_ROW:
			value = DirectFunctionCall1(row_to_json, value);
			/* FALLTHROUGH */
		case OUTPUT_TEXT:
			{
				text	   *txt = DatumGetTextPP(value);

				return utf8_bytea(VARDATA_ANY(txt), VARSIZE_ANY_EXHDR(txt));
			}
		case OUTPUT_CSTRING:
			return utf8_bytea(DatumGetCString(value),
							  strlen(DatumGetCString(value)));
		case OUTPUT_FUNCTION:
			{
				char	   *str = OutputFunctionCall(&output->function, value);

				return utf8_bytea(str, strlen(str));
			}
	}
	return NULL;				/* keep compiler quiet */
}

/* So that the type's input function reads it back, as a scan of the queue does. */
bytea *
dq_column_bytes(Datum value, Oid type)
{
	TypeOutput *output = type_output(type);
	char	   *str;

	if (output->kind != OUTPUT_ROW)
		return dq_payload_bytes(value, type);
	str = OutputFunctionCall(&output->function, value);
	return utf8_bytea(str, strlen(str));
}

text *
dq_bytes_text(const char *data, size_t len)
{
	char	   *converted = pg_any_to_server(data, len, PG_UTF8);
	text	   *result;

	if (converted == data)
		return cstring_to_text_with_len(data, len);
	result = cstring_to_text(converted);
	pfree(converted);
	return result;
}

text *
dq_bytes_text_noerror(const char *data, size_t len)
{
	int			encoding = GetDatabaseEncoding();
	unsigned char *converted;
	Oid			function;
	text	   *result;

	if (len > DQ_MAX_PAYLOAD || !pg_verify_mbstr(PG_UTF8, data, len, true))
		return NULL;
	if (encoding == PG_UTF8 || encoding == PG_SQL_ASCII)
		return cstring_to_text_with_len(data, len);
	function = FindDefaultConversionProc(PG_UTF8, encoding);
	if (!OidIsValid(function))
		return NULL;
	converted = MemoryContextAllocHuge(CurrentMemoryContext,
									   len * MAX_CONVERSION_GROWTH + 1);
	if (pg_do_encoding_conversion_buf(function, PG_UTF8, encoding,
									  unconstify(unsigned char *, (const unsigned char *) data),
									  (int) len, converted,
									  (int) (len * MAX_CONVERSION_GROWTH + 1),
									  true) < (int) len)
		result = NULL;
	else
		result = cstring_to_text((char *) converted);
	pfree(converted);
	return result;
}

void
dq_payload_check(const DqQueue *queue, const bytea *payload)
{
	const char *data = VARDATA_ANY(payload);
	size_t		len = VARSIZE_ANY_EXHDR(payload);

	if (!OidIsValid(queue->payload_type))
		return;

	if (queue->payload_is_bytea)
	{
		if (queue->payload_type != BYTEAOID)
			domain_check(PointerGetDatum(payload), false, queue->payload_type,
						 NULL, NULL);
		return;
	}

	if (queue->payload_is_text)
	{
		char	   *converted = pg_any_to_server(data, len, PG_UTF8);

		if (converted != data)
			pfree(converted);
		return;
	}

	/* FmgrInfo is not const to its callee: it caches in fn_extra */
	(void) InputFunctionCall(unconstify(FmgrInfo *, &queue->payload_in),
							 text_to_cstring(dq_bytes_text(data, len)),
							 queue->payload_ioparam, queue->payload_typmod);
}

bytea *
dq_key_bytes(const DqQueue *queue, Datum value, Oid type)
{
	TypeOutput *output = type_output(type);
	const char *data;
	size_t		len;
	bytea	   *result;

	if (output->kind == OUTPUT_TEXT)
	{
		text	   *txt = DatumGetTextPP(value);

		data = VARDATA_ANY(txt);
		len = VARSIZE_ANY_EXHDR(txt);
	}
	else
	{
		data = output->kind == OUTPUT_CSTRING ? DatumGetCString(value) :
			OutputFunctionCall(&output->function, value);
		len = strlen(data);
	}

	result = utf8_bytea(data, len);
	if (VARSIZE(result) - VARHDRSZ > DQ_MAX_KEY)
		ereport(ERROR,
				(errcode(ERRCODE_STRING_DATA_RIGHT_TRUNCATION),
				 errmsg("key of a task is too long: %d bytes",
						(int) (VARSIZE(result) - VARHDRSZ)),
				 errhint("A key has at most %d bytes in UTF-8.", DQ_MAX_KEY)));

	if (queue && OidIsValid(queue->key_type) && queue->key_type != TEXTOID)
		(void) InputFunctionCall(unconstify(FmgrInfo *, &queue->key_in),
								 pnstrdup(data, len),
								 queue->key_ioparam, queue->key_typmod);
	return result;
}

/* ---- instants ------------------------------------------------------------------ */

#define EPOCH_DIFF_US \
	((int64) (POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE) * USECS_PER_DAY)
#define LAST_DUE_MS INT64CONST(253402300799999)	/* 9999-12-31 23:59:59.999 UTC */

int64
dq_due_from_timestamp(TimestampTz t)
{
	int64		us;
	int64		ms;

	if (TIMESTAMP_NOT_FINITE(t))
		ereport(ERROR,
				(errcode(ERRCODE_DATETIME_VALUE_OUT_OF_RANGE),
				 errmsg("due instant must be finite")));
	/* both sides checked before the sum, which could overflow */
	if (t < -EPOCH_DIFF_US || t > LAST_DUE_MS * 1000)
		ms = -1;
	else
	{
		us = t + EPOCH_DIFF_US;
		ms = us / 1000 + (us % 1000 != 0);	/* up: never early */
	}
	if (ms < 0 || ms > LAST_DUE_MS)
		ereport(ERROR,
				(errcode(ERRCODE_DATETIME_VALUE_OUT_OF_RANGE),
				 errmsg("due instant out of range: %s", timestamptz_to_str(t)),
				 errhint("A task is due between the years 1970 and 9999.")));
	return ms;
}

TimestampTz
dq_due_to_timestamp(int64 due_ms)
{
	return due_ms * 1000 - EPOCH_DIFF_US;
}

int64
dq_now_ms(void)
{
	return (GetCurrentTimestamp() + EPOCH_DIFF_US) / 1000;
}

/* ---- ids ------------------------------------------------------------------------ */

char *
dq_id_out(int64 due, uint64 id)
{
	char		buf[48];
	int			len = pg_lltoa(due, buf);

	buf[len++] = '-';
	len += pg_ulltoa_n(id, buf + len);
	return pnstrdup(buf, len);
}

/*
 * A decimal number without superfluous zeros. Returns the number of characters
 * taken, 0: none or more than 64 bits.
 */
static size_t
digits_in(const char *str, size_t len, uint64 *result)
{
	uint64		value = 0;
	size_t		n = 0;

	while (n < len && str[n] >= '0' && str[n] <= '9')
	{
		int			digit = str[n] - '0';

		if (value > (PG_UINT64_MAX - digit) / 10)
			return 0;
		value = value * 10 + digit;
		n++;
	}
	if (n > 1 && str[0] == '0')
		return 0;
	*result = value;
	return n;
}

bool
dq_id_in(const char *str, size_t len, int64 *due, uint64 *id, bytea **foreign)
{
	uint64		number;
	size_t		n;
	bool		negative = false;

	*foreign = NULL;
	*id = 0;

	/* other producers may have scheduled before 1970 */
	if (len > 0 && str[0] == '-')
	{
		negative = true;
		str++;
		len--;
	}
	n = digits_in(str, len, &number);
	if (n == 0 || number > (uint64) PG_INT64_MAX || n >= len || str[n] != '-')
		return false;
	*due = negative ? -(int64) number : (int64) number;
	str += n + 1;
	len -= n + 1;

	if (len > 0 && str[0] == 'x')
	{
		size_t		nbytes = (len - 1) / 2;
		bytea	   *bytes;

		if (len % 2 == 0)
			return false;
		for (size_t i = 1; i < len; i++)
		{
			if (!((str[i] >= '0' && str[i] <= '9') ||
				  (str[i] >= 'a' && str[i] <= 'f')))
				return false;
		}
		bytes = (bytea *) palloc(VARHDRSZ + nbytes);
		SET_VARSIZE(bytes, VARHDRSZ + nbytes);
		hex_decode(str + 1, len - 1, VARDATA(bytes));
		*foreign = bytes;
		return true;
	}

	if (negative)
		return false;
	n = digits_in(str, len, id);
	return n > 0 && n == len;
}
