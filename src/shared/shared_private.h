/*
 * shared_private.h
 *	  What the files of the shared room share among themselves.
 */
#ifndef DQ_SHARED_PRIVATE_H
#define DQ_SHARED_PRIVATE_H

#include "lib/dshash.h"

#include "shared/shared.h"

/* shmem.c */
extern DqShared *dq_shared_if_attached(void);
extern dshash_table *dq_shared_shards(void);

#endif							/* DQ_SHARED_PRIVATE_H */
