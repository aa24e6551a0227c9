/*
 * exchange.c
 *	  What a round sends over the one connection, pipelined over shards, and what
 *	  the replies mean. Called by round.c.
 */
#include "postgres.h"

#include "compat.h"
#include "relay/relay_private.h"
#include "settings.h"
#include "shared/points.h"

#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#define TRANSFER_PAGE 256

static int64
lease_ms(const DqLink *link)
{
	return Max(10000, 5 * (int64) link->scan_interval);
}

/* ---- errors of one shard ---- */

/* What many shards say of one server, or one again and again, is said once a minute. */
bool
dq_link_is_news(DqLink *link, const char *message)
{
	TimestampTz now = GetCurrentTimestamp();

	if (strcmp(link->logged, message) == 0 &&
		!TimestampDifferenceExceeds(link->logged_at, now, 60000))
		return false;
	strlcpy(link->logged, message, sizeof(link->logged));
	link->logged_at = now;
	return true;
}

void
dq_shard_note_error(DqLink *link, DqShard *shard, const char *message, bool transient)
{
	int			wait;
	bool		news = strcmp(shard->stats.last_error, message) != 0 || shard->failures == 0;

	shard->failures++;
	wait = Min(100 << Min(shard->failures - 1, 10), Max(link->scan_interval, 1000));
	shard->blocked_until = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), wait);
	shard->parked = !transient;
	strlcpy(shard->stats.last_error, message, DQ_ERROR_LEN);
	shard->stats.last_error_at = GetCurrentTimestamp();
	shard->publish = true;
	if (news && dq_link_is_news(link, message))
		ereport(LOG,
				(errmsg("dq_bridge: shard \"%s\" of server \"%s\" waits: %s",
						shard->name, link->server_name, message)));
}

/*
 * A page that makes the server close the connection (a payload beyond its
 * proto-max-bulk-len) must not take the other shards along again and again.
 */
void
dq_shard_park_page(DqLink *link, DqShard *shard, const char *message)
{
	dq_shard_note_error(link, shard, message, false);
	shard->blocked_until = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), 10000);
}

static void
note_reply_error(DqLink *link, DqShard *shard, DqReply *error)
{
	char	   *message;

	if (dq_reply_is_noscript(error))
		return;					/* sent again with its text */
	/* a replica now, or going away: another connection may find the master */
	if (dq_reply_sqlstate(error) == ERRCODE_READ_ONLY_SQL_TRANSACTION)
		dq_reply_report(ERROR, link->redis, error, NULL, shard->name);
	message = pnstrdup(error->str, Min(error->len, DQ_ERROR_LEN - 1));
	if (strncmp(message, "ERR Protocol error", 18) == 0)
	{
		dq_shard_park_page(link, shard, message);
		return;
	}
	dq_shard_note_error(link, shard, message, dq_reply_is_transient(error));
}

static void
note_success(DqShard *shard)
{
	if (shard->failures > 0 || shard->parked)
	{
		shard->failures = 0;
		shard->parked = false;
		shard->blocked_until = 0;
		shard->publish = true;
	}
}

/*
 * PO 6, PO 7: every reply tells session and version; a Redis that went back, or a
 * session that is not ours any more, makes us come anew. true: go on.
 */
bool
dq_shard_note_fence(DqLink *link, DqShard *shard, const DqFence *fence)
{
	if (shard->state != DQ_SHARD_OPEN && shard->state != DQ_SHARD_FROZEN)
		return false;			/* forgotten meanwhile: looked at anew */
	shard->next_due = fence->next_due;
	shard->heard_due = Min(shard->heard_due, fence->next_due);
	shard->stats.next_due = fence->next_due;
	switch (fence->status)
	{
		case DQ_OK:
		case DQ_WAITS:
			break;
		case DQ_POSITION:
			shard->broken = true;
			return false;
		case DQ_FROZEN:
			if (shard->state == DQ_SHARD_OPEN)
				dq_shard_forget(shard, DQ_SHARD_UNKNOWN);
			return false;
		default:
			dq_shard_forget(shard, DQ_SHARD_UNKNOWN);
			return false;
	}
	if (strcmp(fence->session, shard->session) != 0 || fence->version < shard->floor)
	{
		dq_shard_forget(shard, DQ_SHARD_UNKNOWN);
		return false;
	}
	/* a producer has found that its operations are missing */
	if (shard->state == DQ_SHARD_OPEN && !shard->producer && !fence->open)
	{
		dq_shard_forget(shard, DQ_SHARD_UNKNOWN);
		return false;
	}
	shard->floor = fence->version;
	link->progress++;
	note_success(shard);
	return true;
}

void
dq_shard_share_floor(DqShard *shard)
{
	char		session[sizeof(shard->stats.session)];
	int64		floor;
	uint32		epoch;

	if (dq_session_get(MyDatabaseId, shard->no, session, &floor, &epoch) &&
		strcmp(session, shard->session) == 0)
		shard->floor = Max(shard->floor, floor);
}

/* ---- sending ---- */

static DqRequest *
add_request(DqLink *link, DqRequestKind kind, DqShard *shard)
{
	DqRequest  *request = &link->requests[link->nrequests++];

	request->kind = kind;
	request->shard = shard;
	request->cut = NULL;
	request->taken = false;
	request->sent_at = GetCurrentTimestamp();
	return request;
}

static void
send_page(DqLink *link, DqShard *shard)
{
	DqCut	   *cut = shard->prepared;
	DqApplyHeader header;
	MemoryContext old = MemoryContextSwitchTo(link->round);

	memset(&header, 0, sizeof(header));
	header.session = shard->session;
	header.floor = shard->floor;
	header.source = link->source;
	header.expect = shard->sent_position;
	header.position = cut->position;
	/* the last row as a witness, see dq_outbox_has_written */
	header.writer = psprintf("%s " UINT64_FORMAT " " INT64_FORMAT, link->writer,
							 U64FromFullTransactionId(cut->last_xid), cut->last_at);
	header.cur = cut->first ? dq_snapshot_out(shard->batch->cur) : NULL;
	header.done = cut->done;
	header.old = cut->done ? dq_batch_old(shard) : NULL;
	header.index = shard->index;
	DQ_POINT("relay.page.send");
	dq_op_apply_send(link->redis, &shard->keys, cut->page, &header);
	MemoryContextSwitchTo(old);
	add_request(link, DQ_REQ_APPLY, shard)->cut = cut;
	strlcpy(shard->sent_position, cut->position, sizeof(shard->sent_position));
	shard->batch->started = true;
	shard->prepared = NULL;
	shard->pages_in_flight++;
}

/*
 * A removal recorded in one shard may name a task in another of the same queue:
 * none of them transfers before it is resolved.
 */
static bool
queue_defers(const DqLink *link, const DqShard *shard)
{
	ListCell   *lc;

	foreach(lc, link->shards)
	{
		const DqShard *other = lfirst(lc);

		if (other->relid == shard->relid && other->batch && other->batch->deferred > 0)
			return true;
	}
	return false;
}

static bool
any_defers(const DqLink *link)
{
	ListCell   *lc;

	foreach(lc, link->shards)
	{
		const DqShard *shard = lfirst(lc);

		if (shard->batch && shard->batch->deferred > 0)
			return true;
	}
	return false;
}

/* Nothing that was committed, nor a pause or a loss, keeps due tasks where they are. */
static bool
may_move(const DqLink *link, const DqShard *shard)
{
	const DqBatch *batch = shard->batch;

	/*
	 * What was removed without an answer is applied before any later transfer;
	 * other removals too, unless they stand in a backlog.
	 */
	if (shard->catching_up ||
		(batch && (batch->deferred > 0 || (batch->removes > 0 && batch->rows < 5000))))
		return false;
	return !link->no_transfer && shard->state == DQ_SHARD_OPEN && !shard->producer && !dq_shard_is_halted(shard) &&
		OidIsValid(shard->relid);
}

static bool
is_due(const DqShard *shard, int64 now_ms)
{
	return shard->destination == DQ_DEST_LIST && !shard->transfer_in_flight &&
		(shard->transfer_more || shard->next_due <= now_ms);
}

/*
 * A queue with a sink: its executor claims what is due, when it may. A claim's answer
 * tells when the next task is due, unless something earlier was heard of since.
 */
static void
lend(DqShard *shard, bool may, int64 now_ms)
{
	uint64		answered;
	int64		next_due;
	bool		wake;

	wake = dq_lend_give(MyDatabaseId, shard->no, may, shard->next_due <= now_ms, &answered,
						&next_due, &shard->lent);
	if (answered != shard->lend_answered)
	{
		shard->lend_answered = answered;
		shard->next_due = Min(next_due, shard->heard_due);
		shard->stats.next_due = shard->next_due;
		shard->marking.wanted = true;
	}
	if (wake)
	{
		shard->heard_due = PG_INT64_MAX;
		dq_wake_executor(MyDatabaseId, shard->owner);
	}
}

static void
send_status(DqLink *link, DqShard *shard)
{
	DqStatusArgs args;

	args.source = link->source;
	args.session = shard->session;
	args.lease = lease_ms(link);
	args.want_first = shard->marking.wanted;
	args.producer = shard->producer;
	args.replay_window = link->replay_window;
	dq_op_status_send(link->redis, &shard->keys, &args);
}

/*
 * One page, one transfer, one look per shard and call. When more shards want one than
 * fit, the next call begins where this one stopped: fair over shards.
 */
bool
dq_exchange_send(DqLink *link)
{
	int			nshards = list_length(link->shards);
	int			i;
	TimestampTz now = GetCurrentTimestamp();
	int64		now_ms = dq_now_ms();
	bool		sent = false;
	bool		defers = any_defers(link);

	for (i = 0; i < nshards; i++)
	{
		DqShard    *shard = list_nth(link->shards, (link->send_from + i) % nshards);
		bool		may;

		if (link->nrequests + 3 > DQ_MAX_REQUESTS)
			break;
		if ((shard->state != DQ_SHARD_OPEN && shard->state != DQ_SHARD_FROZEN) ||
			shard->blocked_until > now || shard->broken)
		{
			if (shard->destination == DQ_DEST_SINK)
				lend(shard, false, now_ms);
			continue;
		}
		dq_shard_share_floor(shard);

		if (shard->prepared)
		{
			send_page(link, shard);
			sent = true;
		}
		may = may_move(link, shard) && !(defers && queue_defers(link, shard));
		if (shard->destination == DQ_DEST_SINK)
			lend(shard, may, now_ms);
		if (may && is_due(shard, now_ms))
		{
			DQ_POINT("transfer.send");
			dq_op_transfer_send(link->redis, &shard->keys, shard->session,
								shard->floor, link->source, now_ms, TRANSFER_PAGE);
			add_request(link, DQ_REQ_TRANSFER, shard);
			shard->transfer_in_flight = true;
			sent = true;
		}
		if (dq_heal_wants_sweep(shard))
		{
			dq_heal_send(link, shard);
			add_request(link, DQ_REQ_SWEEP, shard);
			shard->other_in_flight = true;
			sent = true;
		}
		else if (shard->state == DQ_SHARD_FROZEN && shard->want_thaw &&
			shard->pages_in_flight == 0 && !shard->other_in_flight && shard->thaw_at <= now)
		{
			DQ_POINT("thaw.send");
			dq_op_thaw_send(link->redis, &shard->keys, shard->session, shard->floor,
							link->source, shard->producer,
							dq_producers_awaited(link, shard));
			add_request(link, DQ_REQ_THAW, shard);
			shard->other_in_flight = true;
			sent = true;
		}
		else if (!shard->other_in_flight &&
				 TimestampDifferenceExceeds(shard->status_at, now,
											dq_look_interval(link, shard)))
		{
			/* the safety sweep: numbers, next due instant, lease */
			send_status(link, shard);
			add_request(link, DQ_REQ_STATUS, shard);
			shard->other_in_flight = true;
			shard->status_at = now;
			sent = true;
		}
	}
	if (i < nshards)
		link->send_from = (link->send_from + i) % nshards;
	if (sent)
		dq_redis_flush(link->redis);
	return sent;
}

/* ---- receiving ---- */

static void
receive_apply(DqLink *link, DqRequest *request)
{
	DqShard    *shard = request->shard;
	DqCut	   *cut = request->cut;
	DqApplyResult result;
	DqReply    *error;

	DQ_POINT("relay.page.sent");
	dq_op_apply_result(link->redis, &result, &error);
	DQ_POINT("relay.page.received");
	request->taken = true;
	shard->pages_in_flight--;
	if (error)
	{
		/* PO 4: what is in flight behind it is refused by its predecessor */
		shard->broken = true;
		note_reply_error(link, shard, error);
	}
	else if (dq_shard_note_fence(link, shard, &result.fence) && !shard->broken &&
			 shard->batch != NULL && strcmp(result.fence.position, cut->position) == 0)
	{
		strlcpy(shard->position, cut->position, sizeof(shard->position));
		shard->big_failures = 0;
		shard->stats.offered += cut->offers;
		shard->stats.rescheduled += cut->moves;
		shard->stats.relayed += cut->page->nops;
		shard->stats.removed += Max(0, result.removed - cut->moves);
		shard->stats.replayed += cut->replayed;
		shard->replayed += cut->replayed;
		shard->stats.pending += result.applied - result.removed;
		shard->stats.seen_at = GetCurrentTimestamp();
		shard->publish = true;
		if (cut->done)
		{
			dq_batch_done(shard);
			DQ_POINT("relay.batch.done");
		}
	}
	MemoryContextDelete(cut->page->context);
}

static void
receive_transfer(DqLink *link, DqRequest *request)
{
	DqShard    *shard = request->shard;
	DqTransferResult result;
	DqReply    *error;

	DQ_POINT("transfer.sent");
	dq_op_transfer_result(link->redis, &result, &error);
	DQ_POINT("transfer.received");
	shard->transfer_in_flight = false;
	shard->transfer_more = false;
	if (error)
	{
		note_reply_error(link, shard, error);
		if (dq_reply_is_noscript(error))
			shard->transfer_more = true;
		return;
	}
	if (!dq_shard_note_fence(link, shard, &result.fence))
		return;
	shard->transfer_more = result.more;
	shard->marking.pushed += result.moved;
	shard->marking.wanted |= result.moved > 0;
	shard->stats.transferred += result.moved;
	shard->stats.delivered += result.moved;
	shard->stats.pending = Max(0, shard->stats.pending - result.moved - result.quarantined);
	shard->stats.ready += result.moved;
	shard->stats.quarantined += result.quarantined;
	shard->stats.held = result.held;
	if (result.quarantined > 0)
		ereport(LOG,
				(errmsg("dq_bridge: " INT64_FORMAT " unreadable tasks of shard \"%s\" are in quarantine",
						result.quarantined, shard->name)));
	if (result.moved > 0 && result.oldest_due > 0)
		shard->stats.lag_us = Max(0, (dq_now_ms() - result.oldest_due) * 1000);
	if (result.moved > 0 || result.quarantined > 0)
		shard->publish = true;
}

void
dq_shard_note_numbers(DqLink *link, DqShard *shard, const DqFenceRecord *record)
{
	DqShardStats *s = &shard->stats;
	TimestampTz now = GetCurrentTimestamp();
	int64		unix_us = now + (POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE) * USECS_PER_DAY;

	s->pending = record->pending;
	s->held = record->held;
	s->lent = record->lent;
	s->ready = record->ready;
	s->quarantined = record->quarantined;
	s->overdue = record->overdue;
	s->clock_skew_us = unix_us - record->redis_now_us;
	s->seen_at = now;
	strlcpy(s->owner_source, record->owner_source, sizeof(s->owner_source));
	strlcpy(s->owner_host, record->owner_host, sizeof(s->owner_host));
	s->lease_until = record->lease_until;
	s->warnings[0] = '\0';
	if (link->server_warnings)
		strlcpy(s->warnings, link->server_warnings, sizeof(s->warnings));
	if (s->clock_skew_us > USECS_PER_SEC || s->clock_skew_us < -USECS_PER_SEC)
	{
		size_t		len = strlen(s->warnings);

		snprintf(s->warnings + len, sizeof(s->warnings) - len,
				 "%sclock skew above 1 s", len > 0 ? "\n" : "");
	}
	shard->publish = true;
}

static void
receive_status(DqLink *link, DqRequest *request)
{
	DqShard    *shard = request->shard;
	DqFence		fence;
	DqFenceRecord record;
	DqReply    *error;

	dq_op_status_result(link->redis, &fence, &record, &error);
	shard->other_in_flight = false;
	if (error)
	{
		note_reply_error(link, shard, error);
		return;
	}
	dq_shard_note_numbers(link, shard, &record);
	if (!dq_shard_note_fence(link, shard, &fence))
		return;
	/*
	 * What a dead session has left; nobody told us. While a transaction has many it
	 * would be told from the rest at the cost of reading them all: seldom.
	 */
	if (record.holds > 0 &&
		TimestampDifferenceExceeds(shard->holds_at, GetCurrentTimestamp(),
								   Min(record.holds / 20, 10000)))
		shard->holds_due = shard->holds_anew = true;
	/* PO 5a holds for an idle reply as well: who wrote the fence last? */
	if (shard->pages_in_flight == 0 && !shard->broken &&
		strcmp(fence.position, shard->position) != 0)
		dq_shard_forget(shard, DQ_SHARD_RESYNC);
	else if (!shard->producer &&
			 strcmp(record.owner_source, link->source) != 0)
		dq_shard_forget(shard, DQ_SHARD_UNKNOWN);
	else
	{
		dq_mark_note(shard, &fence, &record);
		dq_producers_note(shard, &record);
	}
}

static void
receive_thaw(DqLink *link, DqRequest *request)
{
	DqShard    *shard = request->shard;
	DqFence		fence;
	DqReply    *error;
	char	   *who;

	DQ_POINT("thaw.sent");
	dq_op_thaw_result(link->redis, &fence, &who, &error);
	DQ_POINT("thaw.received");
	shard->other_in_flight = false;
	if (error)
		note_reply_error(link, shard, error);
	else if (!dq_shard_note_fence(link, shard, &fence))
		return;
	else if (fence.status == DQ_WAITS)
		dq_producers_wait(link, shard, who);
	else
	{
		shard->state = DQ_SHARD_OPEN;
		shard->holds_due = shard->holds_anew = true;
		dq_producers_thawed(link, shard);
		dq_heal_end(shard);
		shard->marking.wanted = true;	/* one may have been lost with a worker */
		shard->want_thaw = false;
		shard->publish = true;
	}
}

static void
receive_sweep(DqLink *link, DqRequest *request)
{
	DqShard    *shard = request->shard;
	DqSweepResult result;
	DqReply    *error;

	DQ_POINT("sweep.sent");
	dq_op_sweep_result(link->redis, &result, &error);
	DQ_POINT("sweep.received");
	shard->other_in_flight = false;
	if (error)
		note_reply_error(link, shard, error);
	else if (dq_shard_note_fence(link, shard, &result.fence) && shard->heal == DQ_HEAL_SWEEP)
		dq_heal_received(shard, &result);
}

/*
 * The first n of what is in flight. A shard whose page was refused looks where its
 * fence is.
 */
void
dq_exchange_receive(DqLink *link, int n)
{
	int			i;
	ListCell   *lc;

	for (i = 0; i < n; i++)
	{
		DqRequest  *request = &link->requests[i];
		MemoryContext old = MemoryContextSwitchTo(link->round);

		switch (request->kind)
		{
			case DQ_REQ_APPLY:
				receive_apply(link, request);
				break;
			case DQ_REQ_TRANSFER:
				receive_transfer(link, request);
				break;
			case DQ_REQ_STATUS:
				receive_status(link, request);
				break;
			case DQ_REQ_THAW:
				receive_thaw(link, request);
				break;
			case DQ_REQ_SWEEP:
				receive_sweep(link, request);
				break;
		}
		MemoryContextSwitchTo(old);
	}
	link->nrequests -= n;
	memmove(link->requests, link->requests + n, link->nrequests * sizeof(DqRequest));

	foreach(lc, link->shards)
	{
		DqShard    *shard = lfirst(lc);

		if (shard->broken &&
			(shard->state == DQ_SHARD_OPEN || shard->state == DQ_SHARD_FROZEN))
			dq_shard_forget(shard, DQ_SHARD_RESYNC);
	}
}
