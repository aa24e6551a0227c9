/*
 * views.h
 *	  What the functions behind the views share.
 */
#ifndef DQ_VIEWS_H
#define DQ_VIEWS_H

#include "postgres.h"

/* workers.c: text[] of '\n' separated warnings */
extern Datum dq_warnings_array(const char *newline_separated);

#endif							/* DQ_VIEWS_H */
