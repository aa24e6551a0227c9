/*
 * ddl.h
 *	  What the event triggers (ddl.c, drop.c) share.
 */
#ifndef DQ_DDL_H
#define DQ_DDL_H

#include "postgres.h"

#include "commands/event_trigger.h"
#include "nodes/pg_list.h"

#include "queue/queue.h"

/* An object the command has touched or dropped */
typedef struct DdlObject
{
	Oid			classid;
	Oid			objid;
} DdlObject;

/* DdlObject, from a query of (classid, objid); the query must qualify all names */
extern List *dq_ddl_objects(const char *query);
/* 39P03 unless called by an event trigger */
extern EventTriggerData *dq_ddl_trigger(FunctionCallInfo fcinfo);

/* ddl_columns.c: 42611, HV00D */
extern void dq_ddl_check_columns(const DqQueue *queue);
extern void dq_ddl_check_contents(const DqQueue *queue);

#endif							/* DQ_DDL_H */
