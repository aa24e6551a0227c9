/*
 * create.c
 *	  dq_create_queue: the foreign table of a queue without writing DDL. Called by
 *	  users; everything else happens in the CREATE FOREIGN TABLE it runs, with the
 *	  caller's rights.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/namespace.h"
#include "catalog/pg_foreign_server.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "foreign/foreign.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/lsyscache.h"
#include "utils/numeric.h"
#include "utils/varlena.h"

#include "compat.h"
#include "api/api.h"

PG_FUNCTION_INFO_V1(dq_create_queue);

/* {"shards": 4, "index": "off"} -> shards '4', "index" 'off' */
static void
append_options(StringInfo buf, Jsonb *options)
{
	JsonbIterator *it;
	JsonbIteratorToken token;
	JsonbValue	value;
	int			n = 0;

	if (!JB_ROOT_IS_OBJECT(options))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("options of a queue must be a JSON object"),
				 errhint("Write them as in '{\"shards\": 4}'.")));

	it = JsonbIteratorInit(&options->root);
	while ((token = JsonbIteratorNext(&it, &value, true)) != WJB_DONE)
	{
		char	   *name;
		char	   *text;

		if (token != WJB_KEY)
			continue;
		name = pnstrdup(value.val.string.val, value.val.string.len);
		(void) JsonbIteratorNext(&it, &value, true);
		switch (value.type)
		{
			case jbvString:
				text = pnstrdup(value.val.string.val, value.val.string.len);
				break;
			case jbvNumeric:
				text = DatumGetCString(DirectFunctionCall1(numeric_out,
														   NumericGetDatum(value.val.numeric)));
				break;
			case jbvBool:
				text = value.val.boolean ? "true" : "false";
				break;
			default:
				ereport(ERROR,
						(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
						 errmsg("value of option \"%s\" must be a string, a number or a boolean",
								name),
						 errhint("Leave the option out for its default.")));
		}
		appendStringInfo(buf, "%s%s %s", n++ > 0 ? ", " : " OPTIONS (",
						 quote_identifier(name), quote_literal_cstr(text));
	}
	if (n > 0)
		appendStringInfoChar(buf, ')');
}

/*
 * dq_create_queue(name text, server name, payload_type regtype, options jsonb)
 *	  returns the regclass of the new foreign table. 22004 name is NULL; 42704 no
 *	  such server, or none at all; 42P17 several, and none is named.
 */
Datum
dq_create_queue(PG_FUNCTION_ARGS)
{
	RangeVar   *rv;
	Oid			schema;
	Oid			payload_type = TEXTOID;
	char	   *server;
	StringInfoData buf;

	PreventCommandIfReadOnly("dq_create_queue()");
	PreventCommandDuringRecovery("dq_create_queue()");
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("name of a queue must not be NULL")));
	if (PG_ARGISNULL(1))
		server = dq_server_only();
	else
	{
		server = pstrdup(NameStr(*PG_GETARG_NAME(1)));
		(void) dq_server_named(server);
	}
	if (!PG_ARGISNULL(2))
		payload_type = PG_GETARG_OID(2);

	/*
	 * The name is read as regclass reads it. Its schema is settled here, once:
	 * the statement and the lookup afterwards must mean the same table.
	 */
	rv = makeRangeVarFromNameList(textToQualifiedNameList(PG_GETARG_TEXT_PP(0)));
	schema = RangeVarGetCreationNamespace(rv);

	initStringInfo(&buf);
	appendStringInfo(&buf, "CREATE FOREIGN TABLE %s (id pg_catalog.text, key pg_catalog.text, payload %s, due_at pg_catalog.timestamptz, shard pg_catalog.int4) SERVER %s",
					 quote_qualified_identifier(get_namespace_name(schema), rv->relname),
					 format_type_extended(payload_type, -1, FORMAT_TYPE_FORCE_QUALIFY),
					 quote_identifier(server));
	if (!PG_ARGISNULL(3))
		append_options(&buf, PG_GETARG_JSONB_P(3));

	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	if (SPI_execute(buf.data, false, 0) != SPI_OK_UTILITY)
		elog(ERROR, "could not create foreign table");
	SPI_finish();

	PG_RETURN_OID(get_relname_relid(rv->relname, schema));
}
