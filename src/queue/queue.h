/*
 * queue.h
 *	  What a queue is: its definition from the catalogs, its key names in Redis,
 *	  how payloads and keys become bytes, and one C function per Lua script.
 *	  May call the redis room; knows nothing of the outbox or of workers.
 */
#ifndef DQ_QUEUE_H
#define DQ_QUEUE_H

#include "postgres.h"

#include "access/attnum.h"
#include "access/transam.h"
#include "datatype/timestamp.h"
#include "fmgr.h"
#include "nodes/pg_list.h"

#include "compat.h"
#include "redis/redis.h"

/* ---- options.c: names, contexts, units, validators of every option ------- */

typedef enum DqDestination
{
	DQ_DEST_LIST,
	DQ_DEST_NONE,
	DQ_DEST_SINK				/* a table of PostgreSQL */
} DqDestination;

/* What a foreign table shows of its queue */
typedef enum DqContents
{
	DQ_CONTENTS_PENDING,
	DQ_CONTENTS_READY,			/* the ready list */
	DQ_CONTENTS_QUARANTINE		/* what nobody could read */
} DqContents;

typedef enum DqOnOutage
{
	DQ_OUTAGE_DEFER,
	DQ_OUTAGE_ERROR
} DqOnOutage;

/* ---- definition.c: cached per backend ------------------------------------ */

typedef struct DqServer
{
	Oid			serverid;
	Oid			owner;			/* of the foreign server */
	char	   *name;
	DqTarget	target;			/* with the credentials of mapping_user */
	Oid			mapping_user;
	char	   *key_prefix;		/* "" if none */
	bool		password_required;
	int			scan_interval;	/* ms */
	int64		replay_window;	/* ms */
} DqServer;

typedef enum DqColumnRole
{
	DQ_COL_ID,
	DQ_COL_KEY,
	DQ_COL_PAYLOAD,
	DQ_COL_DUE_AT,
	DQ_COL_SHARD,
	DQ_COL_MEMBER,				/* of the quarantine only, and the next two */
	DQ_COL_REASON,
	DQ_COL_FOUND_AT,
	DQ_NUM_COLS
} DqColumnRole;

typedef struct DqQueue
{
	Oid			relid;			/* foreign table, hash key */
	bool		valid;			/* false: an invalidation came */
	DqContents	contents;
	Oid			serverid;
	Oid			owner;			/* of the foreign table: whose mapping is used */
	char	   *relname;
	char	   *name;			/* N without the shard suffix: key_prefix + option queue */
	int			nshards;
	bool		producer;		/* role producer */
	bool		index;
	bool		at_once;		/* transactional off */
	DqDestination destination;
	bool		list_copy;		/* sink with destination list: acknowledged tasks go to
								 * the ready list as well */
	char	   *sink;			/* as the option names it, NULL: none */
	char	   *notify;			/* channel, NULL: none */
	DqOnOutage	on_outage;
	int			remove_timeout; /* ms */
	bool		stop_on_loss;	/* on_data_loss */
	AttrNumber	column[DQ_NUM_COLS];	/* InvalidAttrNumber: not there */
	/* how the payload and key columns take values */
	Oid			payload_type;	/* InvalidOid: no such column */
	int32		payload_typmod;
	FmgrInfo	payload_in;
	Oid			payload_ioparam;
	bool		payload_is_text;	/* text, varchar without limit: no check */
	bool		payload_is_bytea;
	Oid			key_type;
	int32		key_typmod;
	FmgrInfo	key_in;
	Oid			key_ioparam;
	/* filled and owned by the outbox room: registry numbers of the shards */
	int32	   *shard_no;		/* nshards entries or NULL; in the queue's own context */
	uint32		shard_generation;
} DqQueue;

/*
 * Definition of a queue. 42809 with a hint when relid is no foreign table of
 * our wrapper, or shows something else than pending tasks. The pointer is valid until the next call that may process
 * invalidations of that relation; take it anew in each function call.
 */
extern DqQueue *dq_queue_get(Oid relid);
extern DqQueue *dq_queue_get_noerror(Oid relid);	/* NULL if it is no queue */
/* The same of any foreign table of ours, whatever its contents. */
extern DqQueue *dq_table_get(Oid relid);
extern DqQueue *dq_table_get_noerror(Oid relid);
/* Server with the credentials of that user (the queue owner); cached. Never
 * locks anything. errors: 42704. missing_ok: NULL */
extern DqServer *dq_server_get(Oid serverid, Oid mapping_user, bool missing_ok);
/* Checks password_required for a server not owned by a superuser. 42501/28P01 */
extern void dq_server_check_usable(const DqServer *server);

/* ---- catalog.c: the extension, and what there is --------------------------- */

/* Oids of all foreign tables of our wrapper on a server (InvalidOid: all), in
 * the current snapshot of the catalogs. Takes no lock on them. */
extern List *dq_queue_list(Oid serverid);
/* Oids of all servers of our wrapper in this database. */
extern List *dq_server_list(void);
/*
 * Versions of the SQL objects that this library works with: its own and the one
 * before. With another one dq_extension_relation raises 55000.
 */
#define DQ_SQL_VERSION "0.1.0"
#define DQ_SQL_VERSION_PREVIOUS "0.1.0"
extern bool dq_sql_version_fits(const char *version);
/* The wrapper's FDW oid, InvalidOid if the extension is not here. */
extern Oid	dq_wrapper_oid(void);
/* Extension schema's oid (InvalidOid: not installed), found by the extension,
 * not by name; cached and invalidated. */
extern Oid	dq_extension_schema(void);
/* Oid of a table, sequence or index of the extension by its name; cached. */
extern Oid	dq_extension_relation(const char *name);

/* ---- keys.c: names in Redis ---------------------------------------------- */

enum DqKeyNo					/* order of KEYS in every script */
{
	DQ_KEY_PENDING,				/* redisson_delay_queue_timeout:{N} */
	DQ_KEY_READY,				/* N */
	DQ_KEY_CHANNEL,				/* redisson_delay_queue_channel:{N} */
	DQ_KEY_LIST,				/* redisson_delay_queue:{N} */
	DQ_KEY_INDEX,				/* dq:{N}:index */
	DQ_KEY_FENCE,
	DQ_KEY_HOLD,
	DQ_KEY_CLAIM,
	DQ_KEY_BAD,
	DQ_KEY_OWNER,
	DQ_KEY_TWINS,				/* dq:{N}:twins, keyless tasks with equal payloads */
	DQ_KEY_HELD,				/* dq:{N}:held, tasks under a hold, ordered like pending ones */
	DQ_KEY_GONE,				/* dq:{N}:gone, ids of other sources that were removed and are not here */
	DQ_KEY_TAKEN,				/* dq:{N}:taken, elements of the ready list under a hold */
	DQ_NUM_KEYS
};

typedef struct DqKeys
{
	DqArg		key[DQ_NUM_KEYS];
} DqKeys;

/* Name of one shard: N, or N#i when nshards > 1. palloc'd. */
extern char *dq_shard_name(const char *name, int nshards, int shard);
/* All keys of a shard name; memory in the current context. */
extern void dq_keys_make(DqKeys *keys, const char *shardname);
/* Refuse names whose keys would fall into different hash slots (42602). */
extern bool dq_name_is_one_slot(const char *name);
/* The same for all names that could share a key with this one. palloc'd. */
extern char *dq_name_kin(const char *name);
/* Shard of a keyed task: CRC-32C of the key bytes mod nshards. */
extern int	dq_shard_of_key(const char *key, size_t len, int nshards);

/* ---- payload.c: values to bytes and back ---------------------------------- */

#define DQ_MAX_KEY 255
/* Redis' own limit (proto-max-bulk-len), minus what the packing adds */
#define DQ_MAX_PAYLOAD (512 * 1024 * 1024 - 64)

/* text -> UTF-8, bytea raw, json/jsonb text, row -> JSON, else output function */
extern bytea *dq_payload_bytes(Datum value, Oid type);
/* The same of a value of a column of the foreign table: a row by its output function */
extern bytea *dq_column_bytes(Datum value, Oid type);
/* Is it acceptable to the queue's payload column? raises 22P02 and kin */
extern void dq_payload_check(const DqQueue *queue, const bytea *payload);
/* Output text of a key in UTF-8; 22001 beyond 255 bytes; checks key column */
extern bytea *dq_key_bytes(const DqQueue *queue, Datum value, Oid type);
/* UTF-8 bytes -> text datum in the server encoding; 22021 if it is none */
extern text *dq_bytes_text(const char *data, size_t len);
/* The same; NULL if it is none */
extern text *dq_bytes_text_noerror(const char *data, size_t len);

/* ---- discover.c ------------------------------------------------------------- */

typedef struct DqDiscovered
{
	char	   *name;			/* N without the shard suffix, key_prefix included, UTF-8
								 * or other bytes */
	int			nshards;
} DqDiscovered;
/* Queues (DqDiscovered) with pending tasks whose names begin with prefix; known: what
 * is known of some already. */
extern List *dq_queues_discover(DqRedis *redis, const char *prefix, List *known);

/* ---- instants (payload.c) -------------------------------------------------- */

/* timestamptz -> ms since 1970, rounded UP; 22008 if infinite, before 1970,
 * beyond year 9999 */
extern int64 dq_due_from_timestamp(TimestampTz t);
extern TimestampTz dq_due_to_timestamp(int64 due_ms);
extern int64 dq_now_ms(void);	/* the database server's clock, rounded down */

/* ---- ids -------------------------------------------------------------------- */

/* '<due ms>-<n>' */
extern char *dq_id_out(int64 due, uint64 id);
/* false: not of that form. foreign ids '<due>-x<hex>' give raw bytes in *foreign */
extern bool dq_id_in(const char *str, size_t len, int64 *due, uint64 *id,
					 bytea **foreign);

/* ---- operations.c, removal.c, session.c, poll.c: one C function per Lua script - */

/* What every script's reply begins with. */
typedef enum DqStatus
{
	DQ_OK,
	DQ_SESSION,					/* another session: superseded */
	DQ_BEHIND,					/* Redis is older than the floor */
	DQ_POSITION,				/* the fence is somewhere else */
	DQ_FROZEN,					/* not thawed yet */
	DQ_OWNER,					/* somebody else owns the shard */
	DQ_NODE,					/* another source has this node number */
	DQ_WAITS					/* a producer has not reported yet */
} DqStatus;

typedef struct DqFence
{
	DqStatus	status;
	char		session[20];
	bool		open;			/* thawed for this session */
	int64		version;		/* of the asking source, -1: none */
	char	   *position;		/* 'nonce|lastseq:seq|done', "" if missing */
	int64		next_due;		/* ms, INT64_MAX: nothing pending */
} DqFence;

/* The whole record, from dq_op_status(full) */
typedef struct DqFenceRecord
{
	char	   *prev;			/* snapshots as text, "" none */
	char	   *cur;
	char	   *old;
	char	   *writer;			/* 'tli tlistart lsn place' */
	char	   *owner_source;	/* "" : nobody */
	char	   *owner_place;
	char	   *owner_host;
	char	   *owner_database;
	int64		lease_until;	/* ms, Redis clock */
	int64		redis_now_us;
	int64		pending,
				holds,			/* records of holds, dead ones too */
				ready,
				quarantined,
				overdue;
	char	   *ready_type;		/* none, list, ... */
	int64		held_due;		/* of the earliest held task, INT64_MAX: none */
	bool		polled;			/* elements of the ready list may be held */
	char	   *ready_first;	/* digest of its first element, if asked for */
	bool		healed;			/* as a producer we have reported for the session */
	char	   *producers;		/* that live, separated by spaces; told to the owner */
	int64		held;			/* tasks, and elements of the ready list */
	int64		lent;			/* tasks lent to PostgreSQL; count for held_due */
} DqFenceRecord;

#define DQ_MAX_APPLY_ARGS 11	/* arguments before the operations */

/* operations in a page, appended to a DqPage */
typedef struct DqPage
{
	DqArg	   *args;			/* DQ_MAX_APPLY_ARGS first, then operations */
	int			nargs;
	int			maxargs;
	int			nops;
	size_t		bytes;			/* of the operations */
	MemoryContext context;		/* owns args and their bytes */
} DqPage;

extern DqPage *dq_page_create(MemoryContext parent);
extern void dq_page_offer(DqPage *page, int64 due, uint64 id,
						  const bytea *payload, const bytea *key);
extern void dq_page_reschedule(DqPage *page, int64 due, uint64 id, const bytea *payload,
							   const bytea *key, const bytea *token);
extern void dq_page_remove(DqPage *page, const bytea *member, int64 due, const bytea *token);
/* to another instant, under another id, if it is still there and nobody holds it */
extern void dq_page_move(DqPage *page, const bytea *member, int64 due, uint64 id);
/* the n elements taken from the ready list under this token are consumed */
extern void dq_page_consume(DqPage *page, const bytea *token, int64 n);
/* something quarantined */
extern void dq_page_discard(DqPage *page, const bytea *member);
/* the task with this key, whichever it is then */
extern void dq_page_remove_key(DqPage *page, const bytea *key);

/* Six bytes of due and eight of id, big-endian: where a task is, in the index. */
extern void dq_place_encode(unsigned char *place, int64 due, uint64 id);
/* due digits and id bytes of an element that has the form of an id, else "" */
extern void dq_element_id(const bytea *element, DqArg *due, DqArg *id);

typedef struct DqApplyHeader
{
	const char *session;
	int64		floor;
	const char *source;
	const char *expect;			/* predecessor position */
	const char *position;		/* position after this page */
	const char *writer;
	const char *cur;			/* first page: the batch's target, else NULL */
	bool		done;			/* last page: cur becomes prev */
	const char *old;			/* NULL: leave, "" drop */
	bool		index;
} DqApplyHeader;

extern void dq_op_apply_send(DqRedis *redis, const DqKeys *keys, DqPage *page,
							 const DqApplyHeader *header);
/* Take the next reply of the pipeline as an apply reply. Error replies are
 * returned: *error non-NULL, then nothing else is valid. */
typedef struct DqApplyResult
{
	DqFence		fence;
	int64		applied;
	int64		removed;
} DqApplyResult;
extern void dq_op_apply_result(DqRedis *redis, DqApplyResult *result, DqReply **error);

/* A call of a queue that is not transactional: the same script, no fence. */
typedef struct DqCall
{
	const char *session;		/* "": any */
	int64		floor;
	const char *source;
	const char *place;
	bool		producer;
	int			node;
	int			process;		/* number of the asking process */
	uint64		life;			/* of the server, and number of the call in it: one */
	uint64		number;			/* sent again is the same call */
	bool		index;
} DqCall;
extern void dq_op_call(DqRedis *redis, const char *queue, const DqKeys *keys,
					   DqPage *page, const DqCall *args, DqApplyResult *result);

#define DQ_TOKEN_LEN 16

/* Who holds something. */
typedef struct DqHold
{
	char		token[DQ_TOKEN_LEN];
	char		source[33];
	uint64		incarnation;	/* of the server: when it started */
	uint64		xid;			/* top-level */
	uint64		subxid;			/* 0: the top-level transaction itself */
	char		kind;			/* 'h' a task, 'l' elements of the ready list */
	bool		dead;			/* the task has been replaced or removed by others */
	int64		number;			/* of 'l': grows from one taking to the next */
} DqHold;

typedef struct DqFound
{
	DqFence		fence;
	bool		found;
	bytea	   *member;
	int64		due;
	char		how;			/* 'k' key, 'i' id, 'p' payload */
	bool		again;			/* gave up at its bound: ask once more */
	bool		scan_more;		/* there are tasks the index does not know:
								 * go on with dq_op_find_scan */
	char	   *prev;			/* fence's snapshots, for the coverage test */
	char	   *writer;			/* its stamp, which begins with the timeline */
	char	   *old;
	char	   *owner_source;
	char	   *owner_place;
	bytea	   *key;			/* of the found task, NULL: keyless */
	/* of dq_op_hold only */
	bool		taken;			/* it is held under the asker's token now */
	bool		held;			/* another transaction's hold stands */
	DqHold		holder;			/* its */
} DqFound;
/*
 * Ask all shards of a queue in one pipeline. bound: id of a recorded removal,
 * tasks of its node and timeline offered later do not count; 0: none.
 */
extern void dq_op_find(DqRedis *redis, const char *queue, int nshards,
					   const DqKeys *keys, const char *source,
					   const char *place, const bytea *element, uint64 bound,
					   DqFound *found);

/* In whose name a script runs, and how far Redis was known to be (PO 7). */
typedef struct DqSession
{
	char		session[20];
	int64		floor;
	uint32		epoch;			/* how often its bridge has come back to it */
} DqSession;

/* Hold a task for an open transaction, or only look (PO 8 to 11). */
typedef struct DqHoldArgs
{
	const char *source;
	const char *place;
	const bytea *element;
	const bytea *member;		/* hold exactly this one, with due; NULL: the element's */
	int64		due;
	bool		key_only;
	const char *token;			/* DQ_TOKEN_LEN bytes */
	uint64		incarnation;
	uint64		xid;
	uint64		subxid;
	const char *skip;			/* ids that do not count, 8 bytes each */
	size_t		skip_len;
	const char *free;			/* tokens that may be taken over, one after the other */
	int			nfree;
} DqHoldArgs;
/*
 * One pipeline over the shards from..to (exclusive): hold in shard `home`, only
 * look in the others. sessions, floors: of each shard.
 */
extern void dq_op_hold(DqRedis *redis, const char *queue, const DqKeys *keys,
					   int from, int to, int home,
					   const DqSession *sessions, const DqHoldArgs *args,
					   DqFound *found);
/* ---- take.c ------------------------------------------------------------------- */

/* One of many exact tasks to hold. */
typedef struct DqTake
{
	/* asked for */
	double		score;
	bool		old;			/* in Redisson's old packing */
	unsigned char idlen;
	const char *id;				/* bytes */
	char		token[DQ_TOKEN_LEN];
	bool		take_over;		/* from the hold with the token below */
	char		from[DQ_TOKEN_LEN];
	/* answer */
	bool		answered;
	bytea	   *member;			/* NULL: it is not there */
	bytea	   *key;			/* NULL: keyless, or not known to the index */
	bool		held;			/* another hold stands, and this is whose */
	DqHold		holder;
} DqTake;

typedef struct DqTakeArgs
{
	const DqSession *session;
	const char *source;
	uint64		incarnation;
	uint64		xid;
	uint64		subxid;
} DqTakeArgs;

/* Of the shard, from the last script that ran. */
typedef struct DqTakeResult
{
	DqFence		fence;
	char	   *prev;
	char	   *writer;
	char	   *old;
	char	   *owner_source;
	char	   *owner_place;
} DqTakeResult;

/*
 * Hold tasks of one shard: a pipeline of scripts of some hundred tasks. Each answer is
 * given to `taken` while Redis works on the next. Tasks that are not answered (the
 * status is not DQ_OK, or the bytes were too many) may be asked for again. Cheapest in
 * order of score and id.
 */
typedef void (*DqTakenCallback) (void *arg, DqTake **tasks, int n,
								 const DqTakeResult *result);
extern void dq_op_take(DqRedis *redis, const char *queue, const DqKeys *keys,
					   const DqTakeArgs *args, DqTake **tasks, int n,
					   DqTakenCallback taken, void *arg);

/* One bounded step of the search by payload among tasks the index does not know;
 * true when it has ended (found or not). The cursor begins as NULL, NULL. */
extern bool dq_op_find_scan(DqRedis *redis, const char *queue, const DqKeys *keys,
							const char *source, const bytea *payload,
							   uint64 bound, char **cursor_score, bytea **cursor_member,
							DqFound *found);

typedef struct DqTransferResult
{
	DqFence		fence;
	int64		moved;
	int64		quarantined;
	int64		oldest_due;		/* of those moved, 0 if none */
	int64		held;
	bool		more;			/* the page was full */
} DqTransferResult;
extern void dq_op_transfer_send(DqRedis *redis, const DqKeys *keys,
								const char *session, int64 floor,
								const char *source, int64 now, int limit);
extern void dq_op_transfer_result(DqRedis *redis, DqTransferResult *result,
								  DqReply **error);

/* ---- reading.c: tasks as the scripts find them -------------------------------- */

/* A score as whole ms, rounded up, as a due instant is shown */
extern int64 dq_score_ms(double score);

typedef struct DqTask
{
	double		score;
	int64		due;			/* ms, rounded up */
	const char *member;			/* whole member; cut: its head, without payload */
	size_t		member_len;
	bool		cut;
	bool		readable;		/* false: not a member we understand */
	bool		old;			/* old format */
	const char *idbytes;
	size_t		idlen;
	const char *payload;		/* NULL if cut */
	size_t		payload_len;
	const char *key;			/* NULL: keyless, or not asked for */
	size_t		key_len;
} DqTask;

/* Id, payload and format of a task whose member is set */
extern void dq_task_parse(DqTask *task);
/* Its id as SQL shows it; palloc'd */
extern char *dq_task_id(const DqTask *task);

/* The fence as it stood when tasks were read */
typedef struct DqReadFence
{
	DqFence		fence;
	char	   *prev;			/* snapshots as text, "" none or not asked for */
	char	   *cur;
	char	   *old;
} DqReadFence;

/* Instants in ms: due > after and due <= upto */
typedef struct DqDueRange
{
	int64		after;			/* DQ_DUE_MIN: no bound */
	int64		upto;			/* DQ_DUE_MAX: no bound */
} DqDueRange;

#define DQ_DUE_MIN PG_INT64_MIN
#define DQ_DUE_MAX PG_INT64_MAX

/* A place in the order of a scan; all zero: the beginning */
typedef struct DqCursor
{
	int			range;			/* of the list, counted from 0 */
	char	   *score;			/* NULL: the range's beginning */
	bytea	   *member;
} DqCursor;

typedef struct DqRangeArgs
{
	const char *source;
	bool		want_fence;
	bool		want_keys;
	bool		reverse;		/* the latest first */
	bool		cut;			/* no long payloads */
	int			limit;			/* tasks */
	size_t		max_bytes;
	const DqDueRange *ranges;	/* not overlapping, in the order of reading */
	int			nranges;		/* at least 1 */
	DqCursor	from;
} DqRangeArgs;

/* One page of pending tasks in (due, member) order. */
typedef struct DqRange
{
	DqReadFence fence;
	DqTask	   *tasks;
	int			ntasks;
	int64		bytes;			/* sent by Redis */
	bool		end;
	DqCursor	next;			/* of the next page */
} DqRange;

/* Everything in the current memory context, which must live as long as the page. */
extern void dq_op_range(DqRedis *redis, const char *queue, const DqKeys *keys,
						const DqRangeArgs *args, DqRange *range);
/* The same of n shards in one pipeline, each page in a context of its own. */
extern void dq_op_ranges(DqRedis *redis, const char *queue, int n, const DqKeys *keys,
						 const DqRangeArgs *args, MemoryContext *contexts,
						 DqRange *ranges);

/* The same in two steps; between them nothing else may go over the connection. */
extern void dq_op_range_send(DqRedis *redis, const DqKeys *keys, const DqRangeArgs *args);
extern void dq_op_range_take(DqRedis *redis, const char *queue, const DqKeys *keys,
							 const DqRangeArgs *args, DqRange *range);

/* A task to look for by its key, or by its id */
typedef struct DqSought
{
	bool		by_key;
	const char *data;			/* key; or the head of the member: length byte and
								 * id, of the old format the id alone */
	size_t		len;
	int64		due;			/* ms, by id */
} DqSought;

typedef struct DqHits
{
	DqReadFence fence;
	int			done;			/* so many have been looked for, from the first on */
	DqTask	   *tasks;			/* in no order */
	int			ntasks;
	List	   *inexact;		/* which of them (ids) may also be among scores that
								 * are no whole numbers: read that millisecond */
	int64		bytes;
} DqHits;
extern void dq_op_lookup(DqRedis *redis, const char *queue, const DqKeys *keys,
						 const char *source, bool want_fence, bool cut,
						 const DqSought *sought, int n, DqHits *hits);

typedef struct DqCount
{
	DqReadFence fence;
	int64		tasks;
	bool		doubtful;		/* there may be some among them that nobody can read */
	int64		first;			/* due of the first and the last, if there are any */
	int64		last;
	int64		bytes;
} DqCount;

/* More ranges are not counted in one script. */
#define DQ_COUNT_RANGES 1000
extern void dq_op_count(DqRedis *redis, const char *queue, const DqKeys *keys,
						const char *source, const DqDueRange *ranges, int nranges,
						DqCount *count);

typedef struct DqSample
{
	int64		pending;		/* without held ones */
	int			done;			/* so many ranks have been looked at */
	DqTask	   *tasks;
	int			ntasks;
} DqSample;
/* Tasks by their ranks (from 0). */
extern void dq_op_sample(DqRedis *redis, const char *queue, const DqKeys *keys,
						 const char *source, const int64 *ranks, int n,
						 DqSample *sample);

/* ---- shelf.c: what is no pending task: the ready list, the quarantine ---------- */

/* Where to go on; all zero: at the beginning */
typedef struct DqShelfPlace
{
	int64		at;				/* ready: elements read so far */
	DqArg	   *last;			/* ... and the last of them */
	int			nlast;
	char	   *cursor;			/* quarantine */
} DqShelfPlace;

/* An element of the ready list, or something quarantined */
typedef struct DqShelved
{
	const char *data;
	size_t		len;
	int64		place;			/* in the ready list, from 0 */
	char	   *reason;
	bool		has_due;
	int64		due;			/* ms */
	int64		found;			/* ms */
} DqShelved;

typedef struct DqShelf
{
	DqReadFence fence;			/* of the quarantine only, and the next two */
	char	   *owner_source;
	char	   *owner_place;
	int64		total;			/* what there is, when the page was read */
	DqShelved  *entries;
	int			nentries;
	int64		bytes;			/* sent by Redis */
	bool		end;
	DqShelfPlace next;
} DqShelf;
/* A page; limit 0: only count. As dq_op_range about memory. */
extern void dq_op_ready(DqRedis *redis, const char *queue, const DqKeys *keys,
						const char *source, const DqShelfPlace *from, int limit,
						size_t max_bytes, DqShelf *shelf);
/* The same; an entry may come twice when others come and go meanwhile. */
extern void dq_op_bad(DqRedis *redis, const char *queue, const DqKeys *keys,
					  const char *source, const DqShelfPlace *from, int limit,
					  DqShelf *shelf);

/* ---- claim.c: batches lent to PostgreSQL (PO 13, PO 14) ------------------------- */

#define DQ_NONCE_LEN 16			/* hex digits */

typedef enum DqClaimAnswer
{
	DQ_CLAIM_NOTHING,			/* nothing is due */
	DQ_CLAIM_LENT,
	DQ_CLAIM_OTHER				/* number or nonce there are not what we have committed */
} DqClaimAnswer;

typedef struct DqClaimArgs
{
	const char *session;
	int64		floor;
	const char *source;
	int64		now;			/* ms: tasks due by then */
	int64		number;			/* of the last batch that PostgreSQL has committed */
	const char *nonce;			/* its, "" none */
	const char *next_nonce;		/* for the next one */
	int			limit;			/* tasks */
	bool		list;			/* committed ones go to the ready list too ... */
	const char *skip;			/* ... but for those at these places: '3,17' */
	bool		renumber;		/* what was found there is void: go on from number */
	int64		found_number;
	const char *found_nonce;
	bool		only_let_go;	/* lend nothing */
} DqClaimArgs;

typedef struct DqClaimed
{
	DqFence		fence;
	DqClaimAnswer answer;
	int64		number;			/* of the lent batch; of what was found there */
	char		nonce[2 * DQ_NONCE_LEN];
	int64		let_go;
	int64		quarantined;
	bool		more;			/* the page was full */
	int			ntasks;
	DqTask	   *tasks;
} DqClaimed;

extern void dq_op_claim(DqRedis *redis, const char *queue, const DqKeys *keys,
						const DqClaimArgs *args, DqClaimed *claimed);

/* Read the fence record; renews the lease if session is given and ours. */
typedef struct DqStatusArgs
{
	const char *source;
	const char *session;		/* NULL: only look; then nothing more is needed */
	int64		lease;			/* ms */
	bool		want_first;		/* digest of the ready list's first element */
	bool		producer;
	int64		replay_window;	/* ms */
} DqStatusArgs;
extern void dq_op_status_send(DqRedis *redis, const DqKeys *keys, const DqStatusArgs *args);
extern void dq_op_status_result(DqRedis *redis, DqFence *fence,
								DqFenceRecord *record, DqReply **error);

typedef struct DqEnterArgs
{
	const char *source;
	const char *session;		/* the new one */
	const char *place;
	const char *host;
	const char *database;
	int64		lease;			/* ms */
	int			node;			/* 0..32767 */
	bool		producer;
	int64		expect_version; /* as seen by status */
	bool		adopt;			/* take it from another owner whose lease is over */
	bool		force;			/* ... or not over */
	bool		freeze;			/* a producer's operations are missing there */
	const char *writer;			/* stamp: the fence is in our past; NULL: not said */
} DqEnterArgs;
extern void dq_op_enter_send(DqRedis *redis, const DqKeys *keys, const DqEnterArgs *args);
/* On DQ_OWNER and DQ_NODE *blame is the other source and its host */
extern void dq_op_enter_result(DqRedis *redis, DqFence *fence, char **blame, DqReply **error);
/* A page of the holds of a shard; cursor "0" at first and at the end. */
extern DqHold *dq_op_holds_list(DqRedis *redis, const char *queue, const DqKeys *keys,
								const char *source, char **cursor, int *n, DqFence *fence);
/* Which of these tokens stand? */
extern bool *dq_op_holds_stand(DqRedis *redis, const char *queue, const DqKeys *keys,
							   const char *source, const char *tokens, int n,
							   DqFence *fence);
/* Take elements from the front of the ready list for an open transaction (PO 8). */
typedef struct DqPollArgs
{
	const char *source;
	const char *token;			/* DQ_TOKEN_LEN bytes; NULL: only look */
	uint64		incarnation;
	uint64		xid;			/* not when only looking */
	uint64		subxid;
	int			max;			/* elements of one call */
	int			max_bytes;		/* ... after which no further one is added */
} DqPollArgs;
typedef struct DqPolled
{
	DqFence		fence;
	char	   *owner_source;
	char	   *owner_place;
	int64		left;			/* elements that are there, or are left there */
	int64		holds;			/* records of holds of the shard */
	char	   *writer;			/* stamp in the fence; "" when the shard has answered */
	int			n;				/* elements taken */
	const DqReply *elements;	/* in the memory context that was current */
} DqPolled;
/* One pipeline over nshards shards (1 when there is a token). */
extern void dq_op_poll(DqRedis *redis, const char *queue, const DqKeys *keys, int nshards,
					   const DqSession *sessions, const DqPollArgs *args,
					   DqPolled *polled);
/* Elements (counted from 0) of a hold that has `of` of them go to quarantine. */
extern int64 dq_op_reject(DqRedis *redis, const char *queue, const DqKeys *keys,
						  const DqSession *session, const char *source, const char *token,
						  int of, const char *reason, const int *which, int n,
						  DqFence *fence);

/*
 * Put back what ended transactions held; how many tasks and elements. *left: so many of
 * the tokens, those taken first, are left for another call.
 */
extern int64 dq_op_restore(DqRedis *redis, const char *queue, const DqKeys *keys,
						   const char *session, int64 floor, const char *source,
						   const char *tokens, int n, DqFence *fence, int *left);
/* producer: report; else open the shard. producers: of them, separated by spaces,
 * each must have reported, besides those whose leases are alive. */
extern void dq_op_thaw_send(DqRedis *redis, const DqKeys *keys, const char *session,
							int64 floor, const char *source, bool producer,
							const char *producers);
/* On DQ_WAITS *who is the producer that has not reported. */
extern void dq_op_thaw_result(DqRedis *redis, DqFence *fence, char **who, DqReply **error);

/* How far a sweep has come; all zero: not begun */
typedef struct DqSweep
{
	char		stage[4];		/* "" in a result: that was all */
	char	   *score;
	bytea	   *member;
} DqSweep;

/* One page of dropping own tasks that are known to be delivered (PO 15a). */
typedef struct DqSweepArgs
{
	const char *session;
	int64		floor;
	const char *source;
	const char *position;		/* where the fence must stand */
	int64		due;			/* ms */
	uint64		largest_id;		/* own ids are not larger */
	int			limit;
} DqSweepArgs;

typedef struct DqSweepResult
{
	DqFence		fence;
	int64		dropped;
	DqSweep		next;
} DqSweepResult;

extern void dq_op_sweep_send(DqRedis *redis, const DqKeys *keys, const DqSweepArgs *args,
							 const DqSweep *from);
extern void dq_op_sweep_result(DqRedis *redis, DqSweepResult *result, DqReply **error);

#endif							/* DQ_QUEUE_H */
