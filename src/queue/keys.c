/*
 * keys.c
 *	  Names of a queue's keys in Redis, and which shard a keyed task goes to.
 *	  Called by everything that talks to Redis about a queue, and by the event
 *	  trigger that checks the name of a new queue.
 *
 *	  A script may touch only keys of one hash slot (Redis Cluster), so all keys
 *	  of a shard must hash alike. As Redisson does it: a name without '{' is put
 *	  into braces inside the longer names, and equals the hash tag then; a name
 *	  that has braces of its own is used as it is.
 */
#include "postgres.h"

#include "port/pg_crc32c.h"

#include "queue/queue.h"

/* before and after N, by DqKeyNo; no prefix: N itself */
static const struct
{
	const char *prefix;
	const char *suffix;
}			key_forms[DQ_NUM_KEYS] = {
	[DQ_KEY_PENDING] = {"redisson_delay_queue_timeout:", ""},
	[DQ_KEY_READY] = {NULL, NULL},
	[DQ_KEY_CHANNEL] = {"redisson_delay_queue_channel:", ""},
	[DQ_KEY_LIST] = {"redisson_delay_queue:", ""},
	[DQ_KEY_INDEX] = {"dq:", ":index"},
	[DQ_KEY_FENCE] = {"dq:", ":fence"},
	[DQ_KEY_HOLD] = {"dq:", ":hold"},
	[DQ_KEY_CLAIM] = {"dq:", ":claim"},
	[DQ_KEY_BAD] = {"dq:", ":bad"},
	[DQ_KEY_OWNER] = {"dq:", ":owner"},
	[DQ_KEY_TWINS] = {"dq:", ":twins"},
	[DQ_KEY_HELD] = {"dq:", ":held"},
	[DQ_KEY_GONE] = {"dq:", ":gone"},
	[DQ_KEY_TAKEN] = {"dq:", ":taken"},
};

char *
dq_shard_name(const char *name, int nshards, int shard)
{
	if (nshards <= 1)
		return pstrdup(name);
	return psprintf("%s#%d", name, shard);
}

void
dq_keys_make(DqKeys *keys, const char *shardname)
{
	bool		braces = strchr(shardname, '{') == NULL;

	for (int i = 0; i < DQ_NUM_KEYS; i++)
	{
		char	   *key;

		if (key_forms[i].prefix == NULL)
			key = pstrdup(shardname);
		else
			key = psprintf("%s%s%s%s%s", key_forms[i].prefix,
						   braces ? "{" : "", shardname, braces ? "}" : "",
						   key_forms[i].suffix);
		keys->key[i] = DQ_ARG(key);
	}
}

/* What Redis Cluster hashes of a key: what is between its first '{' and the next '}'. */
static void
hash_tag(const char **key, size_t *len)
{
	const char *open = memchr(*key, '{', *len);

	if (open)
	{
		const char *tag = open + 1;
		const char *close = memchr(tag, '}', *len - (tag - *key));

		if (close && close > tag)
		{
			*key = tag;
			*len = close - tag;
		}
	}
}

/* CRC-16/XMODEM, what Redis Cluster hashes with. */
static uint16
crc16(const char *data, size_t len)
{
	uint16		crc = 0;

	while (len-- > 0)
	{
		crc ^= (uint16) ((unsigned char) *data++ << 8);
		for (int bit = 0; bit < 8; bit++)
			crc = (crc & 0x8000) ? (uint16) ((crc << 1) ^ 0x1021) : (uint16) (crc << 1);
	}
	return crc;
}

static int
hash_slot(const char *key, size_t len)
{
	hash_tag(&key, &len);
	return crc16(key, len) & 16383;
}

/*
 * Queues that share a key share its hash tag, so they have this in common:
 * x, {x}, x#0 and the shards of each. Others may, too.
 */
char *
dq_name_kin(const char *name)
{
	DqKeys		keys;
	const char *tag;
	size_t		len;

	dq_keys_make(&keys, name);
	tag = keys.key[DQ_KEY_PENDING].data;
	len = keys.key[DQ_KEY_PENDING].len;
	hash_tag(&tag, &len);
	for (;;)
	{
		size_t		n = len;

		while (n > 0 && tag[n - 1] >= '0' && tag[n - 1] <= '9')
			n--;
		if (n == len || n < 2 || tag[n - 1] != '#')
			return pnstrdup(tag, len);
		len = n - 1;			/* a shard's suffix */
	}
}

bool
dq_name_is_one_slot(const char *name)
{
	DqKeys		keys;
	int			slot;

	dq_keys_make(&keys, name);
	slot = hash_slot(keys.key[0].data, keys.key[0].len);
	for (int i = 1; i < DQ_NUM_KEYS; i++)
	{
		if (hash_slot(keys.key[i].data, keys.key[i].len) != slot)
			return false;
	}
	return true;
}

int
dq_shard_of_key(const char *key, size_t len, int nshards)
{
	pg_crc32c	crc;

	if (nshards <= 1)
		return 0;
	INIT_CRC32C(crc);
	COMP_CRC32C(crc, key, len);
	FIN_CRC32C(crc);
	return (int) ((uint32) crc % (uint32) nshards);
}
