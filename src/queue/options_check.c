/*
 * options_check.c
 *	  The validator's checks: name, context, value, who may set it. Called by
 *	  dq_fdw_validator (fdw room).
 *
 *	  Options that a later version will act upon are known already, so that a
 *	  typing mistake and a feature that is not there yet are told apart: such an
 *	  option is accepted with its default value and refused with any other
 *	  (0A000), because nobody should believe in a setting that does nothing.
 */
#include "postgres.h"

#include "catalog/pg_attribute.h"
#include "catalog/pg_foreign_server.h"
#include "catalog/pg_foreign_table.h"
#include "catalog/pg_user_mapping.h"
#include "commands/defrem.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/regproc.h"
#include "utils/varlena.h"

#include "compat.h"
#include "queue/options_private.h"

static const char *const context_names[] = {
	"server", "user mapping", "foreign table", "column"
};

char *
dq_option_hint(const DqOption *option)
{
	switch (option->kind)
	{
		case KIND_INTEGER:
			if (option->max >= PG_INT32_MAX)
				return psprintf("Give an integer, at least %lld.",
								(long long) option->min);
			return psprintf("Give an integer between %lld and %lld.",
							(long long) option->min, (long long) option->max);
		case KIND_DURATION:
			return psprintf("Give a number and a unit (us, ms, s, min, h, d) as in \"%s\"; without unit it counts milliseconds. At least %lld ms, at most %lld ms.",
							option->def, (long long) option->min,
							(long long) option->max);
		case KIND_SWITCH:
			return pstrdup("Give on or off.");
		case KIND_CHOICE:
			{
				StringInfoData list;

				initStringInfo(&list);
				for (const char *p = option->choices; *p; p++)
				{
					if (*p == '|')
						appendStringInfoString(&list, ", ");
					else
						appendStringInfoChar(&list, *p);
				}
				return psprintf("Valid values are: %s.", list.data);
			}
		default:
			return NULL;
	}
}

/*
 * Of an unknown name: where it belongs if it is known elsewhere, else the
 * closest name, else all names that would be valid here.
 */
static char *
name_hint(const char *name, DqOptionContext context)
{
	StringInfoData list;
	const char *closest = NULL;
	int			best = 5;
	int			len = strlen(name);

	if (context == DQ_ON_SERVER && strcmp(name, "user") == 0)
		return pstrdup("Credentials belong to a user mapping: CREATE USER MAPPING ... OPTIONS (username '...', password '...').");

	for (int i = 0; i < dq_options_number; i++)
	{
		const DqOption *option = &dq_options_known[i];

		if (strcmp(option->name, name) != 0)
			continue;
		if (option->context == DQ_ON_MAPPING)
			return psprintf("Credentials belong to a user mapping: CREATE USER MAPPING ... OPTIONS (%s '...').",
							name);
		return psprintf("Option \"%s\" belongs to a %s.", name,
						context_names[option->context]);
	}

	for (int i = 0; i < dq_options_number && len < NAMEDATALEN; i++)
	{
		const DqOption *option = &dq_options_known[i];
		int			distance;

		if (option->context != context)
			continue;
		distance = varstr_levenshtein_less_equal(name, len, option->name,
												 strlen(option->name),
												 1, 1, 1, best, true);
		if (distance < best && distance <= len / 2)
		{
			best = distance;
			closest = option->name;
		}
	}
	if (closest)
		return psprintf("Perhaps you meant the option \"%s\".", closest);

	initStringInfo(&list);
	for (int i = 0; i < dq_options_number; i++)
	{
		if (dq_options_known[i].context != context)
			continue;
		appendStringInfo(&list, "%s%s", list.len ? ", " : "",
						 dq_options_known[i].name);
	}
	return psprintf("Valid options of a %s are: %s.", context_names[context],
					list.data);
}

static void
check_later(const DqOption *option, const char *value, int64 number)
{
	bool		later;

	if (option->later == NULL)
		return;
	if (strcmp(option->later, DQ_OPTION_LATER) != 0)
		later = dq_option_choice(option->later, value) >= 0;
	else if (option->def == NULL)
		later = true;
	else
	{
		int64		def;

		if (!dq_option_parse(option, option->def, &def))
			elog(ERROR, "bad default of option \"%s\"", option->name);
		later = number != def;
	}
	if (!later)
		return;

	if (option->def)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("option \"%s\" = \"%s\" is not supported by this version of dq_bridge",
						option->name, value),
				 errhint("Leave the option out or set it to \"%s\".",
						 option->def)));
	ereport(ERROR,
			(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
			 errmsg("option \"%s\" is not supported by this version of dq_bridge",
					option->name),
			 errhint("Leave the option out.")));
}

/* Rules of single options beyond kind and range. */
static void
check_special(const DqOption *option, const char *value, int64 number)
{
	bool		empty = value[0] == '\0';

	if (empty && option->kind == KIND_TEXT && strcmp(option->name, "key_prefix") != 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("option \"%s\" must not be empty", option->name),
				 errhint("Leave the option out.")));

	/* 42602 of the name's parser says what is wrong with it */
	if (strcmp(option->name, "sink") == 0)
		(void) stringToQualifiedNameList(value DQ_NAME_LIST_CONTEXT);
	if (strcmp(option->name, "notify") == 0 && strlen(value) >= NAMEDATALEN)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("value of option \"%s\" is too long", option->name),
				 errhint("A channel has at most %d bytes.", NAMEDATALEN - 1)));

	if (option->context != DQ_ON_SERVER)
		return;

	if (strcmp(option->name, "host") == 0 && value[0] == '/')
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("invalid value for option \"%s\": \"%s\"",
						option->name, value),
				 errhint("The path of a unix socket goes into option \"socket\".")));

	if (strcmp(option->name, "socket") == 0)
	{
		if (!is_absolute_path(value))
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("invalid value for option \"%s\": \"%s\"",
							option->name, value),
					 errhint("Give the absolute path of a unix socket.")));
		/* sun_path of struct sockaddr_un, with its terminating zero */
		if (strlen(value) > 107)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("value of option \"%s\" is too long", option->name),
					 errhint("The path of a unix socket has at most 107 bytes.")));
		/* it reaches whatever the server process may open */
		if (!superuser())
			ereport(ERROR,
					(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
					 errmsg("only a superuser may set option \"%s\"", option->name),
					 errhint("Use \"host\" and \"port\".")));
	}

	if (strcmp(option->name, "password_required") == 0 && number == 0 &&
		!superuser())
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("only a superuser may set option \"%s\" to false",
						option->name),
				 errhint("Give the queue owner's user mapping a password instead.")));
}

void
dq_options_check(List *options, Oid catalog)
{
	DqOptionContext context;
	ListCell   *lc;

	if (catalog == ForeignServerRelationId)
		context = DQ_ON_SERVER;
	else if (catalog == UserMappingRelationId)
		context = DQ_ON_MAPPING;
	else if (catalog == ForeignTableRelationId)
		context = DQ_ON_TABLE;
	else if (catalog == AttributeRelationId)
		context = DQ_ON_COLUMN;
	else
	{
		if (options != NIL)
			ereport(ERROR,
					(errcode(ERRCODE_FDW_INVALID_OPTION_NAME),
					 errmsg("invalid option \"%s\"",
							((DefElem *) linitial(options))->defname),
					 errhint("The foreign-data wrapper itself has no options; they belong to servers, user mappings and foreign tables.")));
		return;
	}

	foreach(lc, options)
	{
		DefElem    *def = (DefElem *) lfirst(lc);
		const char *value = defGetString(def);
		const DqOption *option = dq_option_find(def->defname, context);
		int64		number;

		if (option == NULL)
			ereport(ERROR,
					(errcode(ERRCODE_FDW_INVALID_OPTION_NAME),
					 errmsg("invalid option \"%s\" for a %s", def->defname,
							context_names[context]),
					 errhint("%s", name_hint(def->defname, context))));

		if (!dq_option_parse(option, value, &number))
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("invalid value for option \"%s\": \"%s\"",
							option->name, value),
					 errhint("%s", dq_option_hint(option))));

		check_later(option, value, number);
		check_special(option, value, number);
	}
}
