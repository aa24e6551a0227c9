/*
 * enter.c
 *	  Coming to a shard: look at its fence, decide whether this server may go on
 *	  from it (PO 5a), open a session (PO 7). Also the way back after a refusal.
 *	  Called by round.c before anything else is sent.
 */
#include "postgres.h"

#include "compat.h"
#include "relay/relay_private.h"
#include "shared/points.h"

#include "access/timeline.h"
#include "access/xlog.h"
#include "commands/dbcommands.h"
#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

void
dq_new_token(char *token)
{
	uint64		random;

	if (!pg_strong_random(&random, sizeof(random)))
		ereport(ERROR,
				(errcode(ERRCODE_INTERNAL_ERROR),
				 errmsg("could not generate a random token")));
	snprintf(token, 17, "%016llx", (unsigned long long) random);
}

/* Forget what is believed of the shard; its rows are read again. */
void
dq_shard_forget(DqShard *shard, DqShardState state)
{
	dq_heal_remember(shard);
	dq_batch_free(shard);
	dq_mark_forget(shard);
	shard->state = state;
	shard->broken = false;
	shard->want_thaw = false;
	shard->looked = false;
	shard->seen_here = false;
	shard->catching_up = true;
	shard->transfer_more = false;
	shard->publish = true;
}

/*
 * ---- the writer's stamp: timeline, where it began, position, life; then, of each
 * page, transaction and instant of its last row ----
 */

static XLogRecPtr
timeline_start(List *history, uint32 tli)
{
	ListCell   *lc;

	foreach(lc, history)
	{
		TimeLineHistoryEntry *entry = lfirst(lc);

		if (entry->tli == tli)
			return entry->begin;
	}
	return InvalidXLogRecPtr;
}

char *
dq_writer_stamp(uint32 tli, XLogRecPtr lsn)
{
	static uint32 known_tli = 0;
	static XLogRecPtr start;

	if (known_tli != tli)
	{
		List	   *history = readTimeLineHistory(tli);

		start = timeline_start(history, tli);
		list_free_deep(history);
		known_tli = tli;
	}
	return psprintf("%u " UINT64_FORMAT " " UINT64_FORMAT " %s", tli, start, lsn, dq_life());
}

typedef struct Stamp
{
	uint32		tli;
	uint64		start;
	uint64		lsn;
	char		life[DQ_LIFE_LEN + 1];
	uint64		xid;			/* 0: no row */
	int64		at;
} Stamp;

static bool
parse_stamp(const char *text, Stamp *stamp)
{
	memset(stamp, 0, sizeof(*stamp));
	strcpy(stamp->life, "-");
	return sscanf(text, "%u " UINT64_FORMAT " " UINT64_FORMAT " %16s " UINT64_FORMAT " " INT64_FORMAT,
				  &stamp->tli, &stamp->start, &stamp->lsn, stamp->life,
				  &stamp->xid, &stamp->at) >= 3;
}

/*
 * PO 5a: a fence is built on only if who wrote it last is in this server's
 * history: its timeline (number and start) is one of ours, and on the current one
 * it is not ahead of us and its life is one of ours that had not ended by then.
 * Otherwise a page of a server that went another way, or of the original of this
 * copy, could be taken for our own past, and rows be passed over. An earlier
 * timeline may have gone on after we left it: rows carry theirs.
 */
bool
dq_fence_is_ours(const DqFenceRecord *record)
{
	uint32		mine = dq_timeline();
	Stamp		stamp;
	List	   *history;
	ListCell   *lc;
	bool		ours = false;

	if (record->writer[0] == '\0')
		return true;			/* nobody has written yet */
	if (!parse_stamp(record->writer, &stamp) || stamp.tli > mine)
		return false;
	history = readTimeLineHistory(mine);
	foreach(lc, history)
	{
		TimeLineHistoryEntry *entry = lfirst(lc);

		if (entry->tli == stamp.tli && entry->begin == stamp.start)
			ours = true;
	}
	list_free_deep(history);
	if (!ours || stamp.tli < mine)
		return ours;
	if (stamp.lsn > GetXLogInsertRecPtr())
		return false;
	switch (dq_life_holds(stamp.life, stamp.lsn))
	{
		case 0:
			return false;
		case 1:
			return true;
		default:
			return strcmp(record->owner_place, dq_place()) == 0 ||
				record->owner_source[0] == '\0';
	}
}

/*
 * The last row that the fence calls applied must be one of ours, unless its table
 * has been emptied since. This finds what lives do not: a server that was put back
 * to an earlier state while it ran. Within a transaction.
 */
static bool
witness_is_ours(int32 shard, const DqFence *fence, const DqFenceRecord *record)
{
	Stamp		stamp;
	int64		last,
				seq;

	if (!parse_stamp(record->writer, &stamp) || stamp.xid == 0 ||
		stamp.tli != dq_timeline() ||
		sscanf(fence->position, "%*[0-9a-f]|" INT64_FORMAT ":" INT64_FORMAT, &last, &seq) != 2)
		return true;
	return dq_outbox_has_written(shard, FullTransactionIdFromU64(stamp.xid), seq, stamp.at) != 0;
}

/* ---- not ours ---- */

static void
not_owner(DqLink *link, DqShard *shard, const char *why)
{
	bool		news = shard->state != DQ_SHARD_NOT_OWNER ||
		shard->blame == NULL || strcmp(shard->blame, why) != 0;

	dq_shard_forget(shard, DQ_SHARD_NOT_OWNER);
	if (!news)
		return;
	if (shard->blame)
		pfree(shard->blame);
	shard->blame = MemoryContextStrdup(shard->context, why);
	strlcpy(shard->stats.last_error, why, DQ_ERROR_LEN);
	shard->stats.last_error_at = GetCurrentTimestamp();
	ereport(LOG,
			(errmsg("dq_bridge: shard \"%s\" of server \"%s\" is not this database's: %s",
					shard->name, link->server_name, why),
			 errhint("dq_adopt() makes this database the owner.")));
}

bool
dq_shard_wants_look(const DqLink *link, const DqShard *shard, TimestampTz now)
{
	if (shard->blocked_until > now)
		return false;
	switch (shard->state)
	{
		case DQ_SHARD_UNKNOWN:
		case DQ_SHARD_RESYNC:
			return true;
		case DQ_SHARD_NOT_OWNER:
			return TimestampDifferenceExceeds(shard->status_at, now, link->scan_interval);
		default:
			return false;
	}
}

/*
 * A producer lives in the owner's session. It is frozen as well until its own
 * operations are made good; then it reports, which the owner's thaw waits for.
 */
static void
entered(DqShard *shard)
{
	shard->state = DQ_SHARD_FROZEN;
	shard->stats.owner_lives = false;
	shard->owned_until = 0;
	shard->entered_at = GetCurrentTimestamp();
	shard->thaw_at = 0;
	shard->blockers_known = false;
	list_free_deep(shard->blockers);
	shard->blockers = NIL;
	dq_heal_begin(shard);
	shard->marking.wanted = true;
	shard->failures = 0;
	shard->parked = false;
	shard->blocked_until = 0;
	shard->publish = true;
}

/*
 * Somebody wrote into the fence: nobody can tell from it what is applied, so the
 * shard stands still until it is mended. This shard alone (G9).
 */
static bool
is_readable(DqLink *link, DqShard *shard, const DqFence *fence, const DqFenceRecord *record)
{
	const char *what = NULL;
	const char *value = "";
	char		nonce[20];
	int64		last,
				seq;
	int			done = 1,
				end = 0;

	if (fence->version < -1)
		what = "a counter (ver: or indexed)";
	else if (fence->position[0] != '\0' &&
			 (sscanf(fence->position, "%16[0-9a-f]|" INT64_FORMAT ":" INT64_FORMAT "|%1d%n",
					 nonce, &last, &seq, &done, &end) != 4 ||
			  fence->position[end] != '\0' || done < 0 || done > 1))
	{
		what = "pos:";
		value = fence->position;
	}
	else if (dq_snapshot_in(record->prev)->damaged ||
			 (record->prev[0] == '\0' && fence->position[0] != '\0' && done) ||
			 (record->prev[0] != '\0' && fence->position[0] == '\0'))
	{
		what = "prev:";
		value = record->prev;
	}
	else if (dq_snapshot_in(record->old)->damaged)
	{
		what = "old:";
		value = record->old;
	}
	else if (!done && (record->cur[0] == '\0' || dq_snapshot_in(record->cur)->damaged))
	{
		what = "cur:";
		value = record->cur;
	}
	if (what == NULL)
		return true;
	dq_shard_note_error(link, shard,
						psprintf("its fence (dq:...:fence) is damaged: %s holds \"%s\"",
								 what, value), false);
	return false;
}

static char *
another_branch(const DqFenceRecord *record)
{
	return psprintf("its fence was written by another branch of this database's history, or by a copy of it (%s)",
					record->writer);
}

/* true: enter it */
static bool
judge(DqLink *link, DqShard *shard, const DqFence *fence, const DqFenceRecord *record)
{
	if (!dq_fence_is_ours(record))
	{
		not_owner(link, shard, another_branch(record));
		return false;
	}
	if (shard->state == DQ_SHARD_RESYNC)
	{
		/*
		 * Same session and nothing lost: go on from where the fence is. A backend may
		 * have the answer to a hold in its hands that a new server knows nothing of:
		 * either its version stands in the floor by now, or it sees that we have
		 * come back (dq_session_writing).
		 */
		dq_session_resumed(MyDatabaseId, shard->no);
		dq_shard_share_floor(shard);
		if (strcmp(fence->session, shard->session) == 0 &&
			fence->version >= shard->floor &&
			(shard->producer || strcmp(record->owner_source, link->source) == 0))
		{
			dq_shard_adopt_fence(shard, fence, record);
			if (shard->producer ? record->healed : fence->open)
			{
				shard->state = DQ_SHARD_OPEN;
				dq_heal_end(shard);
			}
			else
			{
				shard->state = DQ_SHARD_FROZEN;
				dq_heal_begin(shard);
			}
			shard->marking.wanted = true;
			shard->next_due = fence->next_due;
			shard->publish = true;
			return false;
		}
		dq_shard_forget(shard, DQ_SHARD_UNKNOWN);
	}
	shard->lost |= fence->version < shard->floor;
	/* it was entered, only the reply was lost */
	if (shard->entering && !shard->producer &&
		strcmp(fence->session, shard->session) == 0 && fence->version > shard->floor)
	{
		shard->entering = false;
		shard->floor = fence->version;
		dq_shard_adopt_fence(shard, fence, record);
		entered(shard);
		return false;
	}
	shard->entering = false;
	if (shard->producer)
		return true;
	/* it was another's and was lost with all else: he comes back for it first */
	if (record->owner_source[0] == '\0' && shard->owned_until > GetCurrentTimestamp())
	{
		not_owner(link, shard, "its owner has been lost in Redis, and may come back");
		return false;
	}
	if (strcmp(record->owner_source, link->source) != 0 ||
		strcmp(record->owner_place, dq_place()) != 0)
		shard->owned_until = TimestampTzPlusMilliseconds(GetCurrentTimestamp(),
														 record->lease_until - record->redis_now_us / 1000);
	if (record->owner_source[0] != '\0' && strcmp(record->owner_source, link->source) != 0)
	{
		not_owner(link, shard,
				  psprintf("owner is source %s on host %s, database %s",
						   record->owner_source, record->owner_host, record->owner_database));
		return false;
	}
	/*
	 * Our own identity, alive in another place: a failover has to wait for the
	 * lease to end, and so has a data directory that was moved. One that is being
	 * renewed on the same timeline is the original of a copied data directory: the
	 * copy stays idle until it is adopted.
	 */
	if (record->owner_source[0] != '\0' && strcmp(record->owner_place, dq_place()) != 0)
	{
		bool		alive = record->lease_until > record->redis_now_us / 1000;
		uint32		tli = 0;

		sscanf(record->writer, "%u", &tli);
		if (shard->lease_seen == 0)
			shard->lease_seen = record->lease_until;
		shard->stats.owner_lives = record->lease_until > shard->lease_seen;
		if (shard->stats.owner_lives && tli == dq_timeline())
			shard->lease_elsewhere = true;
		if (alive || shard->lease_elsewhere)
		{
			not_owner(link, shard,
					  psprintf("the same database runs on host %s as well", record->owner_host));
			return false;
		}
	}
	return true;
}

/*
 * What was known of deliveries. It has to be durable before anything is built on
 * it: a mark that a crash takes back would be an older one than what was relayed
 * goes with (W7). Returns up to where it is flushed.
 */
static XLogRecPtr
load_marks(List *shards)
{
	Snapshot	snapshot = RegisterSnapshot(dq_fresh_snapshot());
	XLogRecPtr	point;
	ListCell   *lc;

	foreach(lc, shards)
		dq_mark_load(lfirst(lc), snapshot);
	UnregisterSnapshot(snapshot);
	point = dq_flush_point();
	XLogFlush(point);
	return point;
}

/*
 * Look at all shards that are not entered, then enter those that are ours: two
 * round trips for any number of shards.
 */
void
dq_shards_enter(DqLink *link)
{
	TimestampTz now = GetCurrentTimestamp();
	List	   *looking = NIL;
	List	   *judged = NIL;	/* shards, with fences and records */
	List	   *fences = NIL;
	List	   *records = NIL;
	List	   *entering = NIL;
	MemoryContext old = MemoryContextSwitchTo(link->round);
	const char *database = NULL;
	const char *writer = NULL;
	DqStatusArgs look = {.source = link->source};
	ListCell   *lc;

	foreach(lc, link->shards)
	{
		DqShard    *shard = lfirst(lc);

		if (!dq_shard_wants_look(link, shard, now))
			continue;
		dq_op_status_send(link->redis, &shard->keys, &look);
		shard->status_at = now;
		looking = lappend(looking, shard);
	}
	foreach(lc, looking)
	{
		DqShard    *shard = lfirst(lc);
		DqFence		fence;
		DqFenceRecord record;
		DqReply    *error;

		dq_op_status_result(link->redis, &fence, &record, &error);
		if (error)
		{
			if (!dq_reply_is_noscript(error))
				dq_shard_note_error(link, shard,
									pnstrdup(error->str, Min(error->len, DQ_ERROR_LEN - 1)),
									dq_reply_is_transient(error));
			continue;
		}
		dq_shard_note_numbers(link, shard, &record);
		link->progress++;
		shard->next_due = fence.next_due;
		shard->stats.next_due = fence.next_due;
		if (is_readable(link, shard, &fence, &record) &&
			judge(link, shard, &fence, &record))
		{
			judged = lappend(judged, shard);
			fences = lappend(fences, memcpy(palloc(sizeof(fence)), &fence, sizeof(fence)));
			records = lappend(records, memcpy(palloc(sizeof(record)), &record, sizeof(record)));
		}
	}

	if (judged != NIL)
	{
		XLogRecPtr	point;
		ListCell   *f,
				   *r;

		DQ_POINT("enter.looked");
		dq_link_begin(link);
		MemoryContextSwitchTo(link->round);
		database = get_database_name(MyDatabaseId);
		point = load_marks(judged);
		/*
		 * The last page may have been sent without a life's name, or by an earlier
		 * life. From here on the fence is in the past of this one, so that it is
		 * known again when the server is moved.
		 */
		if (dq_life_is_known())
			writer = dq_writer_stamp(dq_timeline(), point);
		forthree(lc, judged, f, fences, r, records)
		{
			DqShard    *shard = lfirst(lc);
			DqFence    *fence = lfirst(f);

			if (!witness_is_ours(shard->no, fence, lfirst(r)))
			{
				not_owner(link, shard, another_branch(lfirst(r)));
				continue;
			}
			shard->floor = fence->version;
			dq_shard_adopt_fence(shard, fence, lfirst(r));
			entering = lappend(entering, shard);
		}
		dq_link_end(link);
		MemoryContextSwitchTo(link->round);
	}
	foreach(lc, entering)
	{
		DqShard    *shard = lfirst(lc);
		DqEnterArgs args;

		memset(&args, 0, sizeof(args));
		dq_new_token(shard->session);
		shard->entering = true;
		args.source = link->source;
		args.session = shard->session;
		args.place = dq_place();
		args.host = dq_host_name();
		args.database = database ? database : "";
		args.lease = Max(10000, 5 * (int64) link->scan_interval);
		args.node = link->node;
		args.producer = shard->producer;
		args.expect_version = shard->floor;
		args.freeze = shard->producer && dq_heal_is_behind(shard);
		args.writer = writer;
		DQ_POINT("enter.send");
		dq_op_enter_send(link->redis, &shard->keys, &args);
	}
	foreach(lc, entering)
	{
		DqShard    *shard = lfirst(lc);
		DqFence		fence;
		char	   *blame;
		DqReply    *error;

		DQ_POINT("enter.sent");
		dq_op_enter_result(link->redis, &fence, &blame, &error);
		DQ_POINT("enter.received");
		shard->entering = false;
		if (error)
		{
			if (!dq_reply_is_noscript(error))
				dq_shard_note_error(link, shard,
									pnstrdup(error->str, Min(error->len, DQ_ERROR_LEN - 1)),
									dq_reply_is_transient(error));
			continue;
		}
		switch (fence.status)
		{
			case DQ_OK:
				strlcpy(shard->session, fence.session, sizeof(shard->session));
				shard->floor = fence.version;
				entered(shard);
				break;
			case DQ_OWNER:
				not_owner(link, shard, psprintf("owner is source %s", blame));
				break;
			case DQ_NODE:
				dq_shard_note_error(link, shard,
									psprintf("node number %d is in use by source %s; set dq_bridge.node_id to another",
											 link->node, blame), false);
				break;
			default:
				break;			/* somebody was faster: look again */
		}
		shard->publish = true;
	}
	MemoryContextSwitchTo(old);
}
