/*
 * shmem.c
 *	  The shared memory itself: the fixed part, and the area with the hash table
 *	  of shards behind it. Called from _PG_init and, on first use, by every
 *	  process that needs it; preloading is not required.
 */
#include "postgres.h"

#include "lib/dshash.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/shmem.h"
#include "utils/dsa.h"
#include "access/transam.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "shared/shared.h"
#include "shared/shared_private.h"

#ifdef DQ_DSM_REGISTRY
#include "storage/dsm_registry.h"
#endif

#define DQ_TRANCHE_NAME "dq_bridge"

/*
 * On 15 and 16 an unpreloaded library lives on the slack that PostgreSQL leaves
 * for such cases, which all extensions share.
 */
StaticAssertDecl(sizeof(DqShared) < 24576, "shared memory of dq_bridge is too large");

static bool preloaded = false;
static DqShared *shared = NULL;
static dsa_area *area = NULL;
static dshash_table *shards = NULL;

#ifndef DQ_DSM_REGISTRY
static shmem_request_hook_type prev_shmem_request_hook = NULL;

static void
request_shared_memory(void)
{
	if (prev_shmem_request_hook)
		prev_shmem_request_hook();
	RequestAddinShmemSpace(MAXALIGN(sizeof(DqShared)));
}
#endif

void
dq_shared_init(void)
{
	if (!process_shared_preload_libraries_in_progress)
		return;
	preloaded = true;
#ifndef DQ_DSM_REGISTRY
	prev_shmem_request_hook = shmem_request_hook;
	shmem_request_hook = request_shared_memory;
#endif
}

bool
dq_is_preloaded(void)
{
	return preloaded;
}

static void
fill_shared(DqShared *s)
{
	memset(s, 0, sizeof(DqShared));
	s->tranche = DqNewTranche(DQ_TRANCHE_NAME);
	LWLockInitialize(&s->lock, s->tranche);
	ConditionVariableInit(&s->progress);
	pg_atomic_init_u64(&s->rollbacks, 0);
	pg_atomic_init_u64(&s->calls, 0);
	s->incarnation = (uint64) GetCurrentTimestamp();
	s->first_xid = U64FromFullTransactionId(ReadNextFullTransactionId());
	for (int i = 0; i < DQ_MAX_WORKERS; i++)
		s->workers[i].procno = -1;
}

#ifdef DQ_DSM_REGISTRY
static void
segment_init(DQ_SEGMENT_INIT_ARGS)
{
	fill_shared(ptr);
}
#endif

/*
 * The fixed part. Not for the postmaster: children would inherit a pointer that
 * a crash restart makes stale.
 */
DqShared *
dq_shared(void)
{
	bool		found;

	if (shared != NULL)
		return shared;

#ifdef DQ_DSM_REGISTRY
	shared = DqNamedSegment("dq_bridge", sizeof(DqShared), segment_init, &found);
#else
	{
		DqShared   *s;

		LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
		s = ShmemInitStruct("dq_bridge", sizeof(DqShared), &found);
		if (!found)
			fill_shared(s);
		LWLockRelease(AddinShmemInitLock);
		shared = s;
	}
#endif
	DqRegisterTranche(shared->tranche, DQ_TRANCHE_NAME);
	return shared;
}

/* NULL when this process has not attached: for callers that must not fail. */
DqShared *
dq_shared_if_attached(void)
{
	return shared;
}

/*
 * The hash table of shards. The first process to come makes it; it is pinned,
 * so that it outlives everybody. What a process needs to know of it lives in
 * TopMemoryContext: contexts of transactions and rounds come and go.
 */
dshash_table *
dq_shared_shards(void)
{
	DqShared   *s = dq_shared();
	dshash_parameters params = {
		sizeof(DqShardKey), sizeof(DqShardStats),
		DQ_DSHASH_FUNCTIONS, 0
	};
	MemoryContext old;

	if (shards != NULL)
		return shards;

	params.tranche_id = s->tranche;
	old = MemoryContextSwitchTo(TopMemoryContext);

	/*
	 * An error in here (no memory, no segments) leaves the area local to this
	 * process, to be used at the next attempt; the lock is released by the
	 * abort of the transaction or the worker's error handler.
	 */
	LWLockAcquire(&s->lock, LW_EXCLUSIVE);
	if (!s->dsa_made)
	{
		if (area == NULL)
		{
			area = dsa_create(s->tranche);
			dsa_pin(area);
			dsa_pin_mapping(area);
		}
		shards = dshash_create(area, &params, NULL);
		s->dsa_handle = dsa_get_handle(area);
		s->dshash_handle = dshash_get_hash_table_handle(shards);
		s->dsa_made = true;
		LWLockRelease(&s->lock);
	}
	else
	{
		uint32		handle = s->dsa_handle;
		uint64		table = s->dshash_handle;

		LWLockRelease(&s->lock);

		/* an own area that somebody else overtook stays unused */
		if (area == NULL || dsa_get_handle(area) != handle)
		{
			area = dsa_attach(handle);
			dsa_pin_mapping(area);
		}
		shards = dshash_attach(area, &params, table, NULL);
	}

	MemoryContextSwitchTo(old);
	return shards;
}
