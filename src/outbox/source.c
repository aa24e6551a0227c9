/*
 * source.c
 *	  Who this database is towards Redis (G12). The identity is a row of dq_source
 *	  that was born here: its stored xid is its own xmin, its database and outbox
 *	  table are these. A row that came with a dump, or with a template, does not
 *	  match, so a copy gets an identity of its own; a physical copy, a failover and
 *	  pg_upgrade keep it, and are told apart by the place and the fence (relay).
 */
#include "postgres.h"

#include "compat.h"
#include "outbox/outbox.h"
#include "settings.h"

#include <sys/stat.h>
#include <unistd.h>

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "common/cryptohash.h"
#include "common/hashfn.h"
#include "common/sha2.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/xid8.h"

enum
{
	Anum_source_no = 1,
	Anum_source_source,
	Anum_source_node,
	Anum_source_sysid,
	Anum_source_dboid,
	Anum_source_outbox,
	Anum_source_born,
	Anum_source_adopted_from,
	Natts_source = Anum_source_adopted_from
};

static DqSource current;
static int	current_node;		/* as stored, dq_bridge.node_id overrides it */
static bool current_valid = false;
static Oid	current_relid = InvalidOid;

static void
source_inval(Datum arg, Oid relid)
{
	if (relid == InvalidOid || relid == current_relid)
		current_valid = false;
}

const char *
dq_host_name(void)
{
	static char host[64];

	if (host[0] == '\0')
	{
		if (gethostname(host, sizeof(host) - 1) != 0)
			strlcpy(host, "unknown", sizeof(host));
	}
	return host;
}

/*
 * Host, data directory and its inode: a copied data directory differs in one of
 * them at least, a restart in the same place in none.
 */
const char *
dq_place(void)
{
	static char *place = NULL;

	if (place == NULL)
	{
		struct stat st;
		char	   *text;

		if (stat(DataDir, &st) != 0)
			st.st_ino = 0;
		text = psprintf("%s:%s:" UINT64_FORMAT, dq_host_name(), DataDir,
						(uint64) st.st_ino);
		place = MemoryContextStrdup(TopMemoryContext, text);
		pfree(text);
	}
	return place;
}

int32
dq_place_hash(void)
{
	static bool known = false;
	static int32 hash;

	if (!known)
	{
		const char *place = dq_place();

		hash = (int32) hash_bytes((const unsigned char *) place, strlen(place));
		known = true;
	}
	return hash;
}

/* The newest row that was born here, by a fresh snapshot. */
static bool
read_source(Relation rel, DqSource *source)
{
	Oid			outbox = dq_extension_relation("dq_outbox_0");
	SysScanDesc scan;
	HeapTuple	tuple;
	uint64		newest = 0;
	bool		found = false;
	Snapshot	snapshot = RegisterSnapshot(dq_fresh_snapshot());

	scan = systable_beginscan(rel, InvalidOid, false, snapshot, 0, NULL);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Datum		values[Natts_source];
		bool		nulls[Natts_source];
		uint64		born;

		heap_deform_tuple(tuple, RelationGetDescr(rel), values, nulls);
		born = U64FromFullTransactionId(DatumGetFullTransactionId(values[Anum_source_born - 1]));
		if ((TransactionId) born != HeapTupleHeaderGetRawXmin(tuple->t_data) ||
			DatumGetObjectId(values[Anum_source_dboid - 1]) != MyDatabaseId ||
			DatumGetObjectId(values[Anum_source_outbox - 1]) != outbox ||
			(found && born < newest))
			continue;
		found = true;
		newest = born;
		source->no = DatumGetInt32(values[Anum_source_no - 1]);
		strlcpy(source->id, TextDatumGetCString(values[Anum_source_source - 1]),
				sizeof(source->id));
		source->node = DatumGetInt32(values[Anum_source_node - 1]);
		source->adopted_from = DatumGetInt32(values[Anum_source_adopted_from - 1]);
	}
	systable_endscan(scan);
	UnregisterSnapshot(snapshot);
	return found;
}

/* Rows of any origin. */
static int
count_rows(Relation rel)
{
	Snapshot	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	SysScanDesc scan = systable_beginscan(rel, InvalidOid, false, snapshot, 0, NULL);
	int			n = 0;

	while (HeapTupleIsValid(systable_getnext(scan)))
		n++;
	systable_endscan(scan);
	UnregisterSnapshot(snapshot);
	return n;
}

/*
 * What a first identity is made of: the same when it is made again because its
 * transaction was rolled back. By hand (without a worker) that transaction may have
 * entered shards already, and they must not belong to a stranger then. Cluster,
 * database and outbox table are nobody else's; a row that stands there already, of a
 * dump, cannot be the same.
 */
static void
derive_identity(Relation rel, unsigned char *bytes, size_t len)
{
	char	   *text = psprintf("dq_bridge " UINT64_FORMAT " %u %u %d",
								GetSystemIdentifier(), MyDatabaseId,
								dq_extension_relation("dq_outbox_0"), count_rows(rel));
	unsigned char digest[PG_SHA256_DIGEST_LENGTH];
	pg_cryptohash_ctx *ctx = pg_cryptohash_create(PG_SHA256);

	Assert(len <= sizeof(digest));
	if (ctx == NULL || pg_cryptohash_init(ctx) < 0 ||
		pg_cryptohash_update(ctx, (const uint8 *) text, strlen(text)) < 0 ||
		pg_cryptohash_final(ctx, digest, sizeof(digest)) < 0)
		elog(ERROR, "could not compute a source identity");
	pg_cryptohash_free(ctx);
	memcpy(bytes, digest, len);
	pfree(text);
}

/* adopted_from: 0 for a first identity, else the number of the one it replaces. */
static void
make_source(Relation rel, int32 adopted_from)
{
	Datum		values[Natts_source];
	bool		nulls[Natts_source] = {0};
	unsigned char bytes[22];
	char		id[33];
	char		sysid[32];
	int			i;
	uint32		number;
	uint16		node;

	if (adopted_from == 0)
		derive_identity(rel, bytes, sizeof(bytes));
	else if (!pg_strong_random(bytes, sizeof(bytes)))
		ereport(ERROR,
				(errcode(ERRCODE_INTERNAL_ERROR),
				 errmsg("could not generate a random source identity")));
	for (i = 0; i < 16; i++)
		snprintf(id + 2 * i, 3, "%02x", bytes[i]);
	memcpy(&number, bytes + 16, 4);
	memcpy(&node, bytes + 20, 2);
	snprintf(sysid, sizeof(sysid), UINT64_FORMAT, GetSystemIdentifier());

	values[Anum_source_no - 1] = Int32GetDatum((int32) (number & 0x7ffffffe) + 1);
	values[Anum_source_source - 1] = CStringGetTextDatum(id);
	values[Anum_source_node - 1] = Int32GetDatum(node & 0x7fff);
	values[Anum_source_sysid - 1] = CStringGetTextDatum(sysid);
	values[Anum_source_dboid - 1] = ObjectIdGetDatum(MyDatabaseId);
	values[Anum_source_outbox - 1] = ObjectIdGetDatum(dq_extension_relation("dq_outbox_0"));
	/* in a subtransaction xmin is its own xid, not the top-level one */
	values[Anum_source_born - 1] =
		FullTransactionIdGetDatum(GetCurrentFullTransactionId());
	values[Anum_source_adopted_from - 1] = Int32GetDatum(adopted_from);
	dq_store_insert(rel, values, nulls);
	CacheInvalidateRelcache(rel);
	CommandCounterIncrement();
}

/*
 * Own identity. Made at the first use (must_make), as that of a copy (dump,
 * template) is. NULL: none yet.
 */
const DqSource *
dq_source_get(bool must_make)
{
	static bool callback = false;
	Relation	rel;
	DqSource	fresh;
	bool		found;

	if (!callback)
	{
		CacheRegisterRelcacheCallback(source_inval, (Datum) 0);
		callback = true;
	}
	if (current_valid)
	{
		current.node = dq_node_id >= 0 ? dq_node_id : current_node;
		return &current;
	}

	memset(&fresh, 0, sizeof(fresh));
	current_relid = dq_extension_relation("dq_source");
	rel = table_open(current_relid, AccessShareLock);
	current_valid = true;		/* an invalidation from here on clears it */
	found = read_source(rel, &fresh);
	table_close(rel, AccessShareLock);
	if (!found && must_make)
	{
		/* one at a time; whoever waited finds the other's row */
		rel = table_open(current_relid, ShareUpdateExclusiveLock);
		found = read_source(rel, &fresh);
		if (!found)
		{
			make_source(rel, 0);
			found = read_source(rel, &fresh);
			/* a rollback takes it back: do not believe in it after this transaction */
			current_valid = false;
		}
		table_close(rel, NoLock);
	}
	if (!found)
	{
		current_valid = false;
		return NULL;
	}
	current_node = fresh.node;
	if (dq_node_id >= 0)
		fresh.node = dq_node_id;
	current = fresh;
	return &current;
}

/*
 * A new identity for a copied data directory that takes the queues over: rows
 * written in this place stay its own, those it was copied with are the original's.
 */
const DqSource *
dq_source_renew(void)
{
	const DqSource *old = dq_source_get(true);
	int32		old_no = old->no;
	Relation	rel = table_open(dq_extension_relation("dq_source"),
								 ShareUpdateExclusiveLock);

	make_source(rel, old_no);
	table_close(rel, NoLock);
	current_valid = false;
	return dq_source_get(true);
}
