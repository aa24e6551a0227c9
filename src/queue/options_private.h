/*
 * options_private.h
 *	  The table of options, shared by options.c and options_check.c.
 */
#ifndef DQ_OPTIONS_PRIVATE_H
#define DQ_OPTIONS_PRIVATE_H

#include "queue/options.h"

#define DQ_OPTION_LATER "*"

typedef enum DqOptionKind
{
	KIND_TEXT,
	KIND_SECRET,				/* text that no message may show */
	KIND_INTEGER,
	KIND_DURATION,				/* milliseconds */
	KIND_SWITCH,				/* on, off */
	KIND_CHOICE					/* one of choices */
} DqOptionKind;

typedef struct DqOption
{
	const char *name;
	DqOptionContext context;
	DqOptionKind	kind;
	const char *def;			/* default, NULL: none */
	int64		min;			/* integers and durations (ms) */
	int64		max;
	const char *choices;		/* 'a|b|c' */
	const char *later;			/* choices not in force yet; "*": any value but
								 * the default */
} DqOption;

extern const DqOption dq_options_known[];
extern const int dq_options_number;

extern const DqOption *dq_option_find(const char *name, DqOptionContext context);
/* Position of a value in 'a|b|c', -1 if it is not there. */
extern int	dq_option_choice(const char *choices, const char *value);
/* Value as a number; false: not a value of this option. */
extern bool dq_option_parse(const DqOption *option, const char *value, int64 *result);
/* Which values an option takes (options_check.c) */
extern char *dq_option_hint(const DqOption *option);

#endif							/* DQ_OPTIONS_PRIVATE_H */
