/*
 * scripts.c
 *	  The registry of the scripts in lua/: their texts and digests, and sending them.
 *
 *	  A script is sent whole (EVAL) to a connection for the first time and by its
 *	  digest (EVALSHA) from then on. When the server forgot it (SCRIPT FLUSH, a
 *	  restart behind a proxy, eviction), its answer NOSCRIPT makes the next one go
 *	  whole again. Called by the queue room; settings.c calls the functions for
 *	  dq_bridge.script_dir.
 */
#include "postgres.h"

#include <sys/stat.h>

#include "common/cryptohash.h"
#include "utils/resowner.h"
#include "lib/stringinfo.h"
#include "redis/redis_private.h"
#include "redis/scripts_text.h"
#include "storage/fd.h"
#include "utils/memutils.h"

#define SHA1_LENGTH		20
#define MAX_FILE		(1024 * 1024)

typedef struct Script
{
	const char *name;
	const char *compiled;
	char	   *text;			/* lib and script; NULL: not loaded */
	size_t		len;
	char		digest[2 * SHA1_LENGTH + 1];
} Script;

/* in the order of DqScriptId */
static Script scripts[DQ_NUM_SCRIPTS] = {
	[DQ_SCRIPT_APPLY] = {"apply", dq_lua_apply},
	[DQ_SCRIPT_FIND] = {"find", dq_lua_find},
	[DQ_SCRIPT_TRANSFER] = {"transfer", dq_lua_transfer},
	[DQ_SCRIPT_RANGE] = {"range", dq_lua_range},
	[DQ_SCRIPT_STATUS] = {"status", dq_lua_status},
	[DQ_SCRIPT_ENTER] = {"enter", dq_lua_enter},
	[DQ_SCRIPT_THAW] = {"thaw", dq_lua_thaw},
	[DQ_SCRIPT_HOLD] = {"hold", dq_lua_hold},
	[DQ_SCRIPT_HOLDS] = {"holds", dq_lua_holds},
	[DQ_SCRIPT_RESTORE] = {"restore", dq_lua_restore},
	[DQ_SCRIPT_SWEEP] = {"sweep", dq_lua_sweep},
	[DQ_SCRIPT_POLL] = {"poll", dq_lua_poll},
	[DQ_SCRIPT_REJECT] = {"reject", dq_lua_reject},
	[DQ_SCRIPT_TAKE] = {"take", dq_lua_take},
	[DQ_SCRIPT_LOOKUP] = {"lookup", dq_lua_lookup},
	[DQ_SCRIPT_COUNT] = {"count", dq_lua_count},
	[DQ_SCRIPT_SAMPLE] = {"sample", dq_lua_sample},
	[DQ_SCRIPT_READY] = {"ready", dq_lua_ready},
	[DQ_SCRIPT_BAD] = {"bad", dq_lua_bad},
	[DQ_SCRIPT_CLAIM] = {"claim", dq_lua_claim}
};

static const char lib_name[] = "lib";

/* value of dq_bridge.script_dir; kept by the settings machinery */
static const char *script_dir = NULL;

/* moves when texts change: what connections know is outdated then */
static uint64 generation = 1;

const char *
dq_script_name(DqScriptId id)
{
	return scripts[id].name;
}

/* ---- texts ------------------------------------------------------------------ */

/*
 * Contents of a script's file in the directory, palloc'd; NULL if it is not there.
 * *problem is set, and NULL returned, when it cannot be used.
 */
static char *
read_file(const char *dir, const char *name, char **problem)
{
	char	   *path = psprintf("%s/%s.lua", dir, name);
	FILE	   *file;
	struct stat st;
	char	   *text = NULL;

	*problem = NULL;
	file = AllocateFile(path, PG_BINARY_R);
	if (file == NULL)
	{
		if (errno != ENOENT)
			*problem = psprintf("Could not open file \"%s\": %s.", path, strerror(errno));
		return NULL;
	}

	if (fstat(fileno(file), &st) != 0)
		*problem = psprintf("Could not stat file \"%s\": %s.", path, strerror(errno));
	else if (!S_ISREG(st.st_mode))
		*problem = psprintf("\"%s\" is not a regular file.", path);
	else if (st.st_size == 0)
		*problem = psprintf("File \"%s\" is empty.", path);
	else if (st.st_size > MAX_FILE)
		*problem = psprintf("File \"%s\" is larger than %d bytes.", path, MAX_FILE);
	else
	{
		size_t		size = (size_t) st.st_size;

		text = palloc(size + 1);
		if (fread(text, 1, size, file) != size)
			*problem = psprintf("Could not read file \"%s\".", path);
		else if (memchr(text, '\0', size) != NULL)
			*problem = psprintf("File \"%s\" contains a zero byte.", path);
		text[size] = '\0';
	}
	FreeFile(file);
	if (*problem == NULL)
		return text;
	if (text != NULL)
		pfree(text);
	return NULL;
}

static void
compute_digest(Script *script)
{
	static const char hex[] = "0123456789abcdef";
	uint8		sum[SHA1_LENGTH];
	ResourceOwner caller = CurrentResourceOwner;
	ResourceOwner own = NULL;
	pg_cryptohash_ctx *ctx;
	int			i;

	/* a worker comes here outside any transaction, and hashing wants an owner */
	if (caller == NULL)
		CurrentResourceOwner = own = ResourceOwnerCreate(NULL, "dq_bridge digest");
	ctx = pg_cryptohash_create(PG_SHA1);
	if (ctx == NULL ||
		pg_cryptohash_init(ctx) < 0 ||
		pg_cryptohash_update(ctx, (const uint8 *) script->text, script->len) < 0 ||
		pg_cryptohash_final(ctx, sum, sizeof(sum)) < 0)
	{
		if (ctx != NULL)
			pg_cryptohash_free(ctx);
		ereport(ERROR,
				(errcode(ERRCODE_INTERNAL_ERROR),
				 errmsg("could not compute the SHA-1 digest of script \"%s\"",
						script->name)));
	}
	pg_cryptohash_free(ctx);
	if (own != NULL)
	{
		CurrentResourceOwner = NULL;
		ResourceOwnerRelease(own, RESOURCE_RELEASE_BEFORE_LOCKS, true, true);
		ResourceOwnerRelease(own, RESOURCE_RELEASE_LOCKS, true, true);
		ResourceOwnerRelease(own, RESOURCE_RELEASE_AFTER_LOCKS, true, true);
		ResourceOwnerDelete(own);
	}

	for (i = 0; i < SHA1_LENGTH; i++)
	{
		script->digest[2 * i] = hex[sum[i] >> 4];
		script->digest[2 * i + 1] = hex[sum[i] & 15];
	}
	script->digest[2 * SHA1_LENGTH] = '\0';
}

/* The part that a file in script_dir may replace. */
static char *
text_of(const char *name, const char *compiled)
{
	char	   *text = NULL;
	char	   *problem = NULL;

	if (script_dir != NULL && script_dir[0] != '\0')
		text = read_file(script_dir, name, &problem);
	if (problem != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_CONFIG_FILE_ERROR),
				 errmsg("could not load script \"%s\"", name),
				 errdetail("%s", problem),
				 errhint("Check the files in dq_bridge.script_dir.")));
	return text != NULL ? text : pstrdup(compiled);
}

static Script *
loaded(DqScriptId id)
{
	Script	   *script = &scripts[id];
	char	   *lib;
	char	   *own;
	char	   *text;

	if (script->text != NULL)
		return script;

	lib = text_of(lib_name, dq_lua_lib);
	own = text_of(script->name, script->compiled);
	script->len = strlen(lib) + 1 + strlen(own);
	text = MemoryContextAlloc(TopMemoryContext, script->len + 1);
	snprintf(text, script->len + 1, "%s\n%s", lib, own);
	pfree(lib);
	pfree(own);

	script->text = text;
	PG_TRY();
	{
		compute_digest(script);
	}
	PG_CATCH();
	{
		script->text = NULL;
		pfree(text);
		PG_RE_THROW();
	}
	PG_END_TRY();
	return script;
}

/* ---- dq_bridge.script_dir ----------------------------------------------------- */

/*
 * Check hook: the directory exists, is readable, and every Lua file in it can be read
 * and is one of ours. Whether it is good Lua, only Redis can say.
 */
bool
dq_scripts_check_dir(const char *dir, char **detail)
{
	DIR		   *d;
	struct dirent *de;

	*detail = NULL;
	if (dir == NULL || dir[0] == '\0')
		return true;
	if (!is_absolute_path(dir))
	{
		*detail = pstrdup("The directory must be given as an absolute path.");
		return false;
	}

	d = AllocateDir(dir);
	if (d == NULL)
	{
		*detail = psprintf("Could not open directory \"%s\": %s.", dir, strerror(errno));
		return false;
	}
	while (*detail == NULL && (de = ReadDirExtended(d, dir, LOG)) != NULL)
	{
		size_t		len = strlen(de->d_name);
		char	   *name;
		char	   *text;
		bool		known;
		int			i;

		if (len <= 4 || strcmp(de->d_name + len - 4, ".lua") != 0)
			continue;
		name = pnstrdup(de->d_name, len - 4);
		known = strcmp(name, lib_name) == 0;
		for (i = 0; i < DQ_NUM_SCRIPTS && !known; i++)
			known = strcmp(name, scripts[i].name) == 0;
		if (!known)
		{
			StringInfoData names;

			initStringInfo(&names);
			appendStringInfoString(&names, lib_name);
			for (i = 0; i < DQ_NUM_SCRIPTS; i++)
				appendStringInfo(&names, ", %s", scripts[i].name);
			*detail = psprintf("\"%s\" is not a script of dq_bridge; those are: %s.",
							   de->d_name, names.data);
			break;
		}
		text = read_file(dir, name, detail);
		if (text != NULL)
			pfree(text);
		pfree(name);
	}
	FreeDir(d);
	return *detail == NULL;
}

/* Assign hook: must not fail, so the files are read when they are needed. */
void
dq_scripts_use_dir(const char *dir)
{
	int			i;

	script_dir = dir;
	generation++;
	for (i = 0; i < DQ_NUM_SCRIPTS; i++)
	{
		if (scripts[i].text != NULL)
			pfree(scripts[i].text);
		scripts[i].text = NULL;
	}
}

/* ---- sending ------------------------------------------------------------------ */

void
dq_redis_append_script(DqRedis *redis, DqScriptId id, int nkeys,
					   const DqArg *keys, int nargs, const DqArg *args)
{
	Script	   *script = loaded(id);
	uint32		bit = (uint32) 1 << id;
	char		number[16];
	int			i;

	StaticAssertStmt(DQ_NUM_SCRIPTS <= 32, "scripts_known has a bit for each script");

	if (redis->scripts_generation != generation)
	{
		redis->scripts_known = 0;
		redis->scripts_generation = generation;
	}

	dq_command_begin(redis, 3 + nkeys + nargs);
	if (redis->scripts_known & bit)
	{
		dq_command_arg(redis, "EVALSHA", 7);
		dq_command_arg(redis, script->digest, 2 * SHA1_LENGTH);
	}
	else
	{
		dq_command_arg(redis, "EVAL", 4);
		dq_command_arg(redis, script->text, script->len);

		/*
		 * Commands are executed in order, so those behind it can name the digest
		 * without waiting. Should this one be refused before it is compiled, they
		 * get NOSCRIPT, which every caller must expect anyway.
		 */
		redis->scripts_known |= bit;
	}
	i = snprintf(number, sizeof(number), "%d", nkeys);
	dq_command_arg(redis, number, i);
	for (i = 0; i < nkeys; i++)
		dq_command_arg(redis, keys[i].data, keys[i].len);
	for (i = 0; i < nargs; i++)
		dq_command_arg(redis, args[i].data, args[i].len);
	dq_command_end(redis);
}

bool
dq_reply_is_noscript(const DqReply *reply)
{
	static const char code[] = "NOSCRIPT";

	return reply->type == DQ_REPLY_ERROR &&
		reply->len >= sizeof(code) - 1 &&
		memcmp(reply->str, code, sizeof(code) - 1) == 0;
}

/* One script is forgotten: so are all. */
void
dq_scripts_note_error(DqRedis *redis, const DqReply *reply)
{
	if (dq_reply_is_noscript(reply))
		redis->scripts_known = 0;
}

DqReply *
dq_redis_call_script(DqRedis *redis, DqScriptId id, int nkeys,
					 const DqArg *keys, int nargs, const DqArg *args)
{
	DqReply    *reply;

	if (dq_redis_in_flight(redis) != 0)
		elog(ERROR, "replies of Redis server \"%s\" are due", redis->target.server);

	dq_redis_append_script(redis, id, nkeys, keys, nargs, args);
	reply = dq_redis_next(redis);
	if (dq_reply_is_noscript(reply))
	{
		/* nothing was executed: send it again, whole */
		dq_reply_free(reply);
		dq_redis_append_script(redis, id, nkeys, keys, nargs, args);
		reply = dq_redis_next(redis);
	}
	if (reply->type == DQ_REPLY_ERROR)
		dq_reply_report(ERROR, redis, reply, scripts[id].name, NULL);
	return reply;
}
