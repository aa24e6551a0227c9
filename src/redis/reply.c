/*
 * reply.c
 *	  The parser of hiredis, made to build DqReply in PostgreSQL's memory.
 *
 *	  hiredis calls the functions below for each piece of a reply. The pieces go
 *	  into one memory context per reply, which is handed to the caller's context
 *	  when the reply is complete: an error anywhere frees it, no callback and no
 *	  malloc is involved. What hiredis itself allocates is one reader per connection,
 *	  freed with it. Called by command.c; the only file that sees hiredis.
 */
#define DQ_USE_HIREDIS
#include "postgres.h"

#include "compat.h"
#include "redis/redis_private.h"
#include "utils/memutils.h"

/* Redis itself allows 512 MB in a string (proto-max-bulk-len) */
#define MAX_STRING		((size_t) 512 * 1024 * 1024)
#define MAX_ELEMENTS	(16 * 1024 * 1024)
/* unparsed bytes beyond which no server means well */
#define MAX_UNPARSED	(MAX_STRING + 1024 * 1024)

/*
 * Where a piece of a reply goes: its place in the array it belongs to, or the
 * root, which brings the reply's context with it.
 */
static DqReply *
slot_for(const redisReadTask *task)
{
	DqRedis    *redis = (DqRedis *) task->privdata;
	DqReply    *reply;

	if (task->parent != NULL)
	{
		DqReply    *array = (DqReply *) task->parent->obj;

		return &array->elements[task->idx];
	}

	/* small ones come from a free list; long pages should not take 8 kB steps */
	Assert(redis->reply_context == NULL);
	redis->reply_context = AllocSetContextCreate(redis->context,
												 "dq_bridge reply",
												 ALLOCSET_SMALL_MINSIZE,
												 ALLOCSET_SMALL_INITSIZE,
												 1024 * 1024);
	reply = MemoryContextAllocZero(redis->reply_context, sizeof(DqReply));
	reply->owner = redis->reply_context;
	return reply;
}

/*
 * Memory without ereport: an error may not jump through hiredis, which reports a
 * NULL as its own error.
 */
static void *
reply_alloc(const redisReadTask *task, size_t size)
{
	DqRedis    *redis = (DqRedis *) task->privdata;

	return MemoryContextAllocExtended(redis->reply_context, size,
									  MCXT_ALLOC_HUGE | MCXT_ALLOC_NO_OOM);
}

static void *
create_string(const redisReadTask *task, char *str, size_t len)
{
	DqReply    *reply = slot_for(task);
	char	   *copy = NULL;

	if (len <= MAX_STRING)
		copy = reply_alloc(task, len + 1);
	if (copy == NULL)
		return NULL;
	memcpy(copy, str, len);
	copy[len] = '\0';
	reply->type = task->type == REDIS_REPLY_ERROR ? DQ_REPLY_ERROR : DQ_REPLY_STRING;
	reply->str = copy;
	reply->len = len;
	return reply;
}

static void *
create_array(const redisReadTask *task, DqElementCount n)
{
	DqReply    *reply = slot_for(task);

	if (n > MAX_ELEMENTS)
		return NULL;
	reply->type = DQ_REPLY_ARRAY;
	reply->nelements = (int) n;
	if (n > 0)
	{
		size_t		size = sizeof(DqReply) * (size_t) n;

		reply->elements = reply_alloc(task, size);
		if (reply->elements == NULL)
			return NULL;
		memset(reply->elements, 0, size);
	}
	return reply;
}

static void *
create_integer(const redisReadTask *task, long long value)
{
	DqReply    *reply = slot_for(task);

	reply->type = DQ_REPLY_INTEGER;
	reply->integer = value;
	return reply;
}

static void *
create_nil(const redisReadTask *task)
{
	DqReply    *reply = slot_for(task);

	reply->type = DQ_REPLY_NIL;
	return reply;
}

/* the context of the reply goes as a whole */
static void
free_object(void *object)
{
}

#ifdef DQ_HIREDIS_RESP3
/* Nobody asked for RESP3, but whatever listens there may send it. */
static void *
create_double(const redisReadTask *task, double value, char *str, size_t len)
{
	return create_string(task, str, len);
}

static void *
create_bool(const redisReadTask *task, int value)
{
	return create_integer(task, value);
}
#endif

static redisReplyObjectFunctions functions = {
	.createString = create_string,
	.createArray = create_array,
	.createInteger = create_integer,
#ifdef DQ_HIREDIS_RESP3
	.createDouble = create_double,
	.createBool = create_bool,
#endif
	.createNil = create_nil,
	.freeObject = free_object
};

void
dq_reader_create(DqRedis *redis)
{
	redis->reader = redisReaderCreateWithFunctions(&functions);
	if (redis->reader == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OUT_OF_MEMORY),
				 errmsg("out of memory")));
	redis->reader->privdata = redis;
}

void
dq_reader_free(DqRedis *redis)
{
	if (redis->reader != NULL)
		redisReaderFree(redis->reader);
	redis->reader = NULL;
	if (redis->reply_context != NULL)
		MemoryContextDelete(redis->reply_context);
	redis->reply_context = NULL;
}

static void
reader_failed(DqRedis *redis)
{
	char	   *what;

	if (redis->reader->err == REDIS_ERR_OOM)
		what = pstrdup("A reply is larger than can be read.");
	else
		what = pstrdup(redis->reader->errstr);
	dq_redis_fail(redis, DQ_FAIL_GARBAGE, what);
}

void
dq_reader_feed(DqRedis *redis, const char *data, size_t len)
{
	if (redis->reader->len - redis->reader->pos > MAX_UNPARSED)
		dq_redis_fail(redis, DQ_FAIL_GARBAGE, "A reply is larger than can be read.");
	if (redisReaderFeed(redis->reader, data, len) != REDIS_OK)
		reader_failed(redis);
}

DqReply *
dq_reader_reply(DqRedis *redis)
{
	void	   *object = NULL;

	if (redisReaderGetReply(redis->reader, &object) != REDIS_OK)
		reader_failed(redis);
	if (object == NULL)
		return NULL;

	MemoryContextSetParent(redis->reply_context, CurrentMemoryContext);
	redis->reply_context = NULL;
	return (DqReply *) object;
}

bool
dq_reader_has_data(const DqRedis *redis)
{
	return redis->reader->len > redis->reader->pos ||
		redis->reply_context != NULL;
}

void
dq_reply_free(DqReply *reply)
{
	if (reply != NULL && reply->owner != NULL)
		MemoryContextDelete((MemoryContext) reply->owner);
}
