/*
 * options.c
 *	  The table of all options and the reading of their values. Called by the
 *	  checks (options_check.c) at DDL and by definition.c when it reads what the
 *	  catalogs hold.
 */
#include "postgres.h"

#include <math.h>

#include "commands/defrem.h"
#include "utils/builtins.h"

#include "queue/options_private.h"

#define MS_MAX		((int64) PG_INT32_MAX)
#define MS_DAY		(INT64CONST(24) * 3600 * 1000)

#define TEXT_OPT(name, context, later) \
	{name, context, KIND_TEXT, NULL, 0, 0, NULL, later}
#define SWITCH_OPT(name, context, def, later) \
	{name, context, KIND_SWITCH, def, 0, 0, NULL, later}

const DqOption dq_options_known[] = {
	/* server: where Redis is */
	{"host", DQ_ON_SERVER, KIND_TEXT, "127.0.0.1"},
	{"port", DQ_ON_SERVER, KIND_INTEGER, "6379", 1, 65535},
	TEXT_OPT("socket", DQ_ON_SERVER, NULL),
	{"database", DQ_ON_SERVER, KIND_INTEGER, "0", 0, 1000000},
	{"mode", DQ_ON_SERVER, KIND_CHOICE, "standalone", 0, 0, "standalone|sentinel|cluster", DQ_OPTION_LATER},
	TEXT_OPT("nodes", DQ_ON_SERVER, DQ_OPTION_LATER),
	TEXT_OPT("master_name", DQ_ON_SERVER, DQ_OPTION_LATER),
	{"key_prefix", DQ_ON_SERVER, KIND_TEXT, ""},
	{"tls", DQ_ON_SERVER, KIND_CHOICE, "off", 0, 0, "off|require|verify-full", DQ_OPTION_LATER},
	TEXT_OPT("tls_ca_file", DQ_ON_SERVER, DQ_OPTION_LATER),
	TEXT_OPT("tls_cert_file", DQ_ON_SERVER, DQ_OPTION_LATER),
	TEXT_OPT("tls_key_file", DQ_ON_SERVER, DQ_OPTION_LATER),
	SWITCH_OPT("password_required", DQ_ON_SERVER, "true", NULL),
	/* server: time */
	{"connect_timeout", DQ_ON_SERVER, KIND_DURATION, "2s", 1, MS_MAX},
	{"command_timeout", DQ_ON_SERVER, KIND_DURATION, "5s", 1, MS_MAX},
	{"scan_interval", DQ_ON_SERVER, KIND_DURATION, "1s", 10, MS_DAY},
	{"replay_window", DQ_ON_SERVER, KIND_DURATION, "24h", 0, 36500 * MS_DAY},
	/* server: durability of Redis */
	{"wait_replicas", DQ_ON_SERVER, KIND_INTEGER, "0", 0, 1000, NULL, DQ_OPTION_LATER},
	SWITCH_OPT("wait_fsync", DQ_ON_SERVER, "off", DQ_OPTION_LATER),

	/* user mapping */
	{"username", DQ_ON_MAPPING, KIND_TEXT},
	{"password", DQ_ON_MAPPING, KIND_SECRET},
	{"sentinel_username", DQ_ON_MAPPING, KIND_TEXT, NULL, 0, 0, NULL, DQ_OPTION_LATER},
	{"sentinel_password", DQ_ON_MAPPING, KIND_SECRET, NULL, 0, 0, NULL, DQ_OPTION_LATER},

	/* queue: what it is */
	TEXT_OPT("queue", DQ_ON_TABLE, NULL),
	{"shards", DQ_ON_TABLE, KIND_INTEGER, "1", 1, 1024},
	{"role", DQ_ON_TABLE, KIND_CHOICE, "owner", 0, 0, "owner|producer"},
	SWITCH_OPT("list", DQ_ON_TABLE, "off", DQ_OPTION_LATER),
	SWITCH_OPT("index", DQ_ON_TABLE, "on", NULL),
	{"codec", DQ_ON_TABLE, KIND_CHOICE, "raw", 0, 0, "raw|kryo5|jackson", DQ_OPTION_LATER},
	SWITCH_OPT("transactional", DQ_ON_TABLE, "on", NULL),
	/* queue: where due tasks go */
	{"destination", DQ_ON_TABLE, KIND_CHOICE, "list", 0, 0, "list|stream|none", "stream"},
	{"stream_maxlen", DQ_ON_TABLE, KIND_INTEGER, "0", 0, PG_INT64_MAX, NULL, DQ_OPTION_LATER},
	TEXT_OPT("sink", DQ_ON_TABLE, NULL),
	TEXT_OPT("handler", DQ_ON_TABLE, DQ_OPTION_LATER),
	TEXT_OPT("notify", DQ_ON_TABLE, NULL),
	{"concurrency", DQ_ON_TABLE, KIND_INTEGER, "1", 1, 1000, NULL, DQ_OPTION_LATER},
	{"max_attempts", DQ_ON_TABLE, KIND_INTEGER, "20", 1, PG_INT32_MAX, NULL, DQ_OPTION_LATER},
	{"backoff", DQ_ON_TABLE, KIND_DURATION, "1s", 0, MS_MAX, NULL, DQ_OPTION_LATER},
	{"backoff_max", DQ_ON_TABLE, KIND_DURATION, "1h", 0, MS_MAX, NULL, DQ_OPTION_LATER},
	{"handler_timeout", DQ_ON_TABLE, KIND_DURATION, "5min", 1, MS_MAX, NULL, DQ_OPTION_LATER},
	{"rate", DQ_ON_TABLE, KIND_INTEGER, "0", 0, PG_INT32_MAX, NULL, DQ_OPTION_LATER},
	/* queue: when things go wrong */
	{"on_outage", DQ_ON_TABLE, KIND_CHOICE, "defer", 0, 0, "defer|error"},
	{"remove_timeout", DQ_ON_TABLE, KIND_DURATION, "500ms", 0, MS_MAX},
	{"on_data_loss", DQ_ON_TABLE, KIND_CHOICE, "stop", 0, 0, "stop|continue"},
	{"contents", DQ_ON_TABLE, KIND_CHOICE, "pending", 0, 0, "pending|ready|quarantine"},

	/* column payload */
	{"on_error", DQ_ON_COLUMN, KIND_CHOICE, "error", 0, 0, "error|null"},
};

const int	dq_options_number = lengthof(dq_options_known);

const DqOption *
dq_option_find(const char *name, DqOptionContext context)
{
	for (int i = 0; i < dq_options_number; i++)
	{
		if (dq_options_known[i].context == context &&
			strcmp(dq_options_known[i].name, name) == 0)
			return &dq_options_known[i];
	}
	return NULL;
}

/* ---- values --------------------------------------------------------------- */

/*
 * A duration as postgresql.conf writes it, in milliseconds. parse_int() of the
 * server stops at INT_MAX ms = 24.8 days, which is too short for replay_window;
 * the syntax is the same.
 */
static bool
parse_duration(const char *value, int64 *result)
{
	static const struct
	{
		const char *name;
		double		ms;
	}			units[] = {
		{"us", 0.001}, {"ms", 1}, {"s", 1000}, {"min", 60000},
		{"h", 3600000}, {"d", 86400000}
	};
	double		number;
	double		factor = 1;
	char	   *end;

	errno = 0;
	number = strtod(value, &end);
	if (end == value || errno == ERANGE || isnan(number) || isinf(number))
		return false;
	while (isspace((unsigned char) *end))
		end++;
	if (*end != '\0')
	{
		size_t		len = strlen(end);
		bool		known = false;

		while (len > 0 && isspace((unsigned char) end[len - 1]))
			len--;
		for (int i = 0; i < lengthof(units); i++)
		{
			if (strlen(units[i].name) == len &&
				strncmp(units[i].name, end, len) == 0)
			{
				factor = units[i].ms;
				known = true;
				break;
			}
		}
		if (!known)
			return false;
	}
	number = rint(number * factor);
	if (fabs(number) > 9e15)	/* exact in a double */
		return false;
	*result = (int64) number;
	return true;
}

/* Decimal digits only: strtoll alone would take blanks and 0x as well. */
static bool
parse_integer(const char *value, int64 *result)
{
	char	   *end;

	if (value[0] == '\0' || isspace((unsigned char) value[0]))
		return false;
	errno = 0;
	*result = strtoll(value, &end, 10);
	return errno == 0 && *end == '\0';
}

/* Position of a value in 'a|b|c', -1 if it is not there. */
int
dq_option_choice(const char *choices, const char *value)
{
	size_t		len = strlen(value);
	int			n = 0;

	for (const char *p = choices; *p; n++)
	{
		size_t		here = strcspn(p, "|");

		if (here == len && strncmp(p, value, len) == 0)
			return n;
		p += here;
		if (*p == '|')
			p++;
	}
	return -1;
}

/* Value as a number; false: not a value of this option. */
bool
dq_option_parse(const DqOption *option, const char *value, int64 *result)
{
	bool		flag;

	*result = 0;
	switch (option->kind)
	{
		case KIND_TEXT:
		case KIND_SECRET:
			return true;
		case KIND_INTEGER:
			return parse_integer(value, result) &&
				*result >= option->min && *result <= option->max;
		case KIND_DURATION:
			return parse_duration(value, result) &&
				*result >= option->min && *result <= option->max;
		case KIND_SWITCH:
			if (!parse_bool(value, &flag))
				return false;
			*result = flag;
			return true;
		case KIND_CHOICE:
			*result = dq_option_choice(option->choices, value);
			return *result >= 0;
	}
	return false;				/* keep compiler quiet */
}

/* ---- reading -------------------------------------------------------------- */

const char *
dq_option_text(List *options, DqOptionContext context, const char *name)
{
	const DqOption *option = dq_option_find(name, context);
	ListCell   *lc;

	Assert(option != NULL);
	foreach(lc, options)
	{
		DefElem    *def = (DefElem *) lfirst(lc);

		if (strcmp(def->defname, name) == 0)
			return defGetString(def);
	}
	return option->def;
}

int64
dq_option_number(List *options, DqOptionContext context, const char *name)
{
	const DqOption *option = dq_option_find(name, context);
	const char *value = dq_option_text(options, context, name);
	int64		number;

	Assert(option != NULL && value != NULL);
	/* stored by another version of the library, or past the validator */
	if (!dq_option_parse(option, value, &number))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("invalid value for option \"%s\": \"%s\"", name, value),
				 errhint("%s", dq_option_hint(option))));
	return number;
}

bool
dq_option_given(List *options, const char *name)
{
	ListCell   *lc;

	foreach(lc, options)
	{
		if (strcmp(((DefElem *) lfirst(lc))->defname, name) == 0)
			return true;
	}
	return false;
}
