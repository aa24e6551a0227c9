/*
 * compat.h
 *	  All differences between the supported PostgreSQL versions (15 to 18, with
 *	  guards for 19) and hiredis versions (0.14 and later) live here and nowhere
 *	  else.
 */
#ifndef DQ_COMPAT_H
#define DQ_COMPAT_H

#include "postgres.h"

#if PG_VERSION_NUM < 150000
#error dq_bridge needs PostgreSQL 15 or later
#endif

#include "access/htup_details.h"
#include "access/transam.h"
#include "access/xlog.h"
#include "fmgr.h"
#include "utils/rel.h"

/* varlena macros left postgres.h in 16 */
#if PG_VERSION_NUM >= 160000
#include "varatt.h"
#endif

/* relfilenumbers got their own name in 16 */
#if PG_VERSION_NUM >= 160000
#define DqSetNewRelfilenumber(rel) \
	RelationSetNewRelfilenumber((rel), (rel)->rd_rel->relpersistence)
#else
#define DqSetNewRelfilenumber(rel) \
	RelationSetNewRelfilenode((rel), (rel)->rd_rel->relpersistence)
#endif

/* the counter that moves with every transaction that had an xid */
#if PG_VERSION_NUM >= 170000
#define DqVariableCache TransamVariables
#else
#define DqVariableCache ShmemVariableCache
#endif

/* a process is known by its number in the proc array */
#if PG_VERSION_NUM >= 170000
#define DqMyProcNumber MyProcNumber
#define DqProcByNumber(n) GetPGPProcByNumber(n)
#define GetPGPProcByNumber(n) (&ProcGlobal->allProcs[(n)])
#else
#define DqMyProcNumber (MyProc->pgprocno)
#define DqProcByNumber(n) (&ProcGlobal->allProcs[(n)])
#endif

/* 18 counts index scans for EXPLAIN through one more argument */
#if PG_VERSION_NUM >= 180000
#define dq_index_beginscan(heap, index, snapshot, nkeys) \
	index_beginscan((heap), (index), (snapshot), NULL, (nkeys), 0)
#else
#define dq_index_beginscan(heap, index, snapshot, nkeys) \
	index_beginscan((heap), (index), (snapshot), (nkeys), 0)
#endif

/* 17 gave reindex_relation the statement it serves */
#if PG_VERSION_NUM >= 170000
#define dq_reindex_relation(relid, flags, params) \
	reindex_relation(NULL, (relid), (flags), (params))
#else
#define dq_reindex_relation(relid, flags, params) \
	reindex_relation((relid), (flags), (params))
#endif

/* foreign paths got the pushed clauses in 17, the count of disabled nodes in 18 */
#if PG_VERSION_NUM >= 180000
#define dq_create_foreignscan_path(root, rel, rows, startup, total, keys, outer, private) \
	create_foreignscan_path((root), (rel), NULL, (rows), 0, (startup), (total), \
							(keys), (outer), NULL, NIL, (private))
#define dq_create_foreign_upper_path(root, rel, target, rows, startup, total, private) \
	create_foreign_upper_path((root), (rel), (target), (rows), 0, (startup), (total), \
							  NIL, NULL, NIL, (private))
#elif PG_VERSION_NUM >= 170000
#define dq_create_foreignscan_path(root, rel, rows, startup, total, keys, outer, private) \
	create_foreignscan_path((root), (rel), NULL, (rows), (startup), (total), \
							(keys), (outer), NULL, NIL, (private))
#define dq_create_foreign_upper_path(root, rel, target, rows, startup, total, private) \
	create_foreign_upper_path((root), (rel), (target), (rows), (startup), (total), \
							  NIL, NULL, NIL, (private))
#else
#define dq_create_foreignscan_path(root, rel, rows, startup, total, keys, outer, private) \
	create_foreignscan_path((root), (rel), NULL, (rows), (startup), (total), \
							(keys), (outer), NULL, (private))
#define dq_create_foreign_upper_path(root, rel, target, rows, startup, total, private) \
	create_foreign_upper_path((root), (rel), (target), (rows), (startup), (total), \
							  NIL, NULL, (private))
#endif

/* 17 looks at statistics to guess how long an array is */
#if PG_VERSION_NUM >= 170000
#define dq_estimate_array_length(root, array) estimate_array_length((root), (array))
#else
#define dq_estimate_array_length(root, array) ((double) estimate_array_length(array))
#endif

/*
 * 18 names a sort direction apart from btree, and keeps the members of an equivalence
 * class that are of child tables in lists of their own.
 */
#ifdef DQ_USE_PLANNER
#include "access/stratnum.h"
#include "nodes/pathnodes.h"
#include "optimizer/paths.h"
#if PG_VERSION_NUM >= 180000
#define dq_pathkey_descends(key) ((key)->pk_cmptype == COMPARE_GT)
#define dq_ascending_pathkey(root, ec, opfamily) \
	make_canonical_pathkey((root), (ec), (opfamily), COMPARE_LT, false)
#define DQ_EC_CHILD_MEMBERS(ec, relid) \
	((relid) < (ec)->ec_childmembers_size ? (ec)->ec_childmembers[(relid)] : NIL)
#else
#define dq_pathkey_descends(key) ((key)->pk_strategy == BTGreaterStrategyNumber)
#define dq_ascending_pathkey(root, ec, opfamily) \
	make_canonical_pathkey((root), (ec), (opfamily), BTLessStrategyNumber, false)
#define DQ_EC_CHILD_MEMBERS(ec, relid) NIL
#endif
#endif

/* EXPLAIN's parts moved out of its header in 18 */
#ifdef DQ_USE_EXPLAIN
#include "commands/explain.h"
#if PG_VERSION_NUM >= 180000
#include "commands/explain_format.h"
#include "commands/explain_state.h"
#endif
#endif

/* one function per catalog became one for all in 16 */
#if PG_VERSION_NUM >= 160000
#define dq_owns_relation(relid, role) \
	object_ownercheck(RelationRelationId, (relid), (role))
#else
#define dq_owns_relation(relid, role) pg_class_ownercheck((relid), (role))
#endif

/* newer minor releases mark tuples that are values, until their header is used */
#ifdef HEAP_IS_DATUM
#define DqTupleIsNoDatum(header) ((header)->t_infomask &= ~HEAP_IS_DATUM)
#else
#define DqTupleIsNoDatum(header) ((void) 0)
#endif

/* 16 taught input functions to refuse without raising; false: refused */
#if PG_VERSION_NUM >= 160000
#include "nodes/miscnodes.h"
static inline bool
dq_input_function_soft(FmgrInfo *function, char *str, Oid ioparam, int32 typmod, Datum *result)
{
	ErrorSaveContext refused = {T_ErrorSaveContext};

	return InputFunctionCallSafe(function, str, ioparam, typmod, (Node *) &refused, result);
}
#else
static inline bool
dq_input_function_soft(FmgrInfo *function, char *str, Oid ioparam, int32 typmod, Datum *result)
{
	*result = InputFunctionCall(function, str, ioparam, typmod);
	return true;
}
#endif

/* 16 lets the parser of names refuse without raising */
#if PG_VERSION_NUM >= 160000
#define DQ_NAME_LIST_CONTEXT , NULL
#else
#define DQ_NAME_LIST_CONTEXT
#endif

/* 17 lets a worker log in as a role without LOGIN */
#if PG_VERSION_NUM >= 170000
#define DQ_EXECUTOR_LOGIN BGWORKER_BYPASS_ROLELOGINCHECK
#else
#define DQ_EXECUTOR_LOGIN 0
#define DQ_EXECUTOR_NEEDS_LOGIN
#endif

/* the same of rights */
#if PG_VERSION_NUM >= 160000
#define dq_namespace_usable(oid, role) \
	(object_aclcheck(NamespaceRelationId, (oid), (role), ACL_USAGE) == ACLCHECK_OK)
#else
#define dq_namespace_usable(oid, role) \
	(pg_namespace_aclcheck((oid), (role), ACL_USAGE) == ACLCHECK_OK)
#endif
#if PG_VERSION_NUM >= 160000
#define dq_may_connect(dboid, role) \
	(object_aclcheck(DatabaseRelationId, (dboid), (role), ACL_CONNECT) == ACLCHECK_OK)
#else
#define dq_may_connect(dboid, role) \
	(pg_database_aclcheck((dboid), (role), ACL_CONNECT) == ACLCHECK_OK)
#endif

#ifndef PGDLLEXPORT
#define PGDLLEXPORT
#endif

/* a name of our own in pg_stat_activity.wait_event */
#if PG_VERSION_NUM >= 170000
#define DqWaitEventNew(name) WaitEventExtensionNew(name)
#else
#define DqWaitEventNew(name) PG_WAIT_EXTENSION
#endif

/* a set of events belongs to a resource owner from 17 on, to a context before */
#if PG_VERSION_NUM >= 170000
#define DqCreateWaitEventSet(n) CreateWaitEventSet(CurrentResourceOwner, (n))
#else
#define DqCreateWaitEventSet(n) CreateWaitEventSet(CurrentMemoryContext, (n))
#endif

/*
 * Shared memory: 17 has named segments that need no preloading, and hash tables
 * that want to be told how to copy a key; 19 names a tranche when it is made.
 */
#if PG_VERSION_NUM >= 170000
#define DQ_DSM_REGISTRY
#define DQ_DSHASH_FUNCTIONS dshash_memcmp, dshash_memhash, dshash_memcpy
#else
#define DQ_DSHASH_FUNCTIONS dshash_memcmp, dshash_memhash
#endif
#if PG_VERSION_NUM >= 190000
#define DqNewTranche(name) LWLockNewTrancheId(name)
#define DqRegisterTranche(id, name) ((void) 0)
#define DQ_SEGMENT_INIT_ARGS void *ptr, void *arg
#define DqNamedSegment(name, size, init, found) \
	GetNamedDSMSegment((name), (size), (init), (found), NULL)
#else
#define DqNewTranche(name) LWLockNewTrancheId()
#define DqRegisterTranche(id, name) LWLockRegisterTranche((id), (name))
#define DQ_SEGMENT_INIT_ARGS void *ptr
#define DqNamedSegment(name, size, init, found) \
	GetNamedDSMSegment((name), (size), (init), (found))
#endif

/* intervals may be infinite from 17 on */
#if PG_VERSION_NUM >= 170000
#define DqIntervalIsInfinite(i) INTERVAL_NOT_FINITE(i)
#else
#define DqIntervalIsInfinite(i) false
#endif

/* transactions time out by themselves from 17 on */
#if PG_VERSION_NUM >= 170000
#define DQ_TRANSACTION_TIMEOUT
#endif

/* a module tells its name and version from 18 on */
#if PG_VERSION_NUM >= 180000
#define DQ_MODULE_MAGIC(n, v) PG_MODULE_MAGIC_EXT(.name = (n), .version = (v))
#else
#define DQ_MODULE_MAGIC(n, v) PG_MODULE_MAGIC
#endif

/*
 * hiredis: only the file that defines DQ_USE_HIREDIS sees it. 1.0 counts the
 * elements of an array in size_t and knows the types of RESP3.
 */
#ifdef DQ_USE_HIREDIS
#include <hiredis.h>
#if HIREDIS_MAJOR >= 1
typedef size_t DqElementCount;
#define DQ_HIREDIS_RESP3
#else
typedef int DqElementCount;
#endif
#endif

#endif							/* DQ_COMPAT_H */
