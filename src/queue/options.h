/*
 * options.h
 *	  Every option of servers, user mappings, queues and columns: where it may
 *	  stand, what values it takes, its default. The validator checks against it
 *	  at DDL, definition.c and the views read values through it.
 */
#ifndef DQ_OPTIONS_H
#define DQ_OPTIONS_H

#include "postgres.h"

#include "nodes/pg_list.h"

typedef enum DqOptionContext
{
	DQ_ON_SERVER,
	DQ_ON_MAPPING,
	DQ_ON_TABLE,
	DQ_ON_COLUMN
} DqOptionContext;

/*
 * Check the options of one object (a list of DefElem, as the validator gets
 * it). HV00D unknown option, 22023 bad value, 0A000 a value that this version
 * does not act upon, 42501 what only a superuser may set.
 */
extern void dq_options_check(List *options, Oid catalog);

/* Text of an option: as given, else its default; NULL if it has none. */
extern const char *dq_option_text(List *options, DqOptionContext context,
								  const char *name);
/* The same as a number: integers, milliseconds of durations, 0/1 of switches. */
extern int64 dq_option_number(List *options, DqOptionContext context,
							  const char *name);
/* Was it given? */
extern bool dq_option_given(List *options, const char *name);

#endif							/* DQ_OPTIONS_H */
