#!/bin/sh
# A plain client with the script texts that Redisson's RDelayedQueue publishes,
# sent by redis-cli: what a JVM writes is delivered by us, what we write is
# moved by a JVM. (Tests with real foreign clients come with a later version.)
# Run by ./dev interop, which sets PSQL, REDIS_CLI, REDIS_SOCKET and PG*.
set -eu

q() { "$PSQL" -X -q -At -v ON_ERROR_STOP=1 "$@"; }
cli() { "$REDIS_CLI" -s "$REDIS_SOCKET" --raw "$@"; }
rc=0
is() {	# what, expected, seen
	if [ "$2" = "$3" ]; then echo "ok   $1"; else
		echo "FAIL $1: expected '$2', got '$3'"; rc=1; fi
}

OFFER="local value = struct.pack('Bc0Lc0', string.len(ARGV[2]), ARGV[2], string.len(ARGV[3]), ARGV[3]);
redis.call('zadd', KEYS[2], ARGV[1], value);
redis.call('rpush', KEYS[3], value);
local v = redis.call('zrange', KEYS[2], 0, 0);
if v[1] == value then redis.call('publish', KEYS[4], ARGV[1]); end;"

TRANSFER="local expiredValues = redis.call('zrangebyscore', KEYS[2], 0, ARGV[1], 'limit', 0, ARGV[2]);
if #expiredValues > 0 then
for i, v in ipairs(expiredValues) do
local randomId, value = struct.unpack('Bc0Lc0', v);
redis.call('rpush', KEYS[1], value);
redis.call('lrem', KEYS[3], 1, v);
end;
redis.call('zrem', KEYS[2], unpack(expiredValues));
end;
local v = redis.call('zrange', KEYS[2], 0, 0, 'WITHSCORES');
if v[1] ~= nil then return v[2]; end
return nil;"

SIZE='redisson_delay_queue_timeout:{jvm}'
LIST='redisson_delay_queue:{jvm}'
CHANNEL='redisson_delay_queue_channel:{jvm}'
now_ms() { q -c "SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)"; }

q <<SQL
SET client_min_messages = warning;
CREATE EXTENSION dq_bridge;
CREATE SERVER redis FOREIGN DATA WRAPPER dq_bridge OPTIONS (socket '$REDIS_SOCKET');
SELECT FROM dq_create_queue('jvm');
SQL

cli EVAL "$OFFER" 4 jvm "$SIZE" "$LIST" "$CHANNEL" "$(($(now_ms) + 3000))" 12345678 'from a JVM' >/dev/null
is "the foreign table shows a task of RDelayedQueue.offer" 'from a JVM' \
	"$(q -c 'SELECT payload FROM jvm')"
is "our worker delivers it" 'from a JVM' "$(cli BLPOP jvm 10 | sed -n 2p)"

q -c "SELECT FROM dq_pause('jvm')"
q -c "SELECT FROM dq_offer('jvm', 'from PostgreSQL', '0', 'k')"
q -c "SELECT FROM dq_sync()"
cli EVAL "$TRANSFER" 3 jvm "$SIZE" "$LIST" "$(now_ms)" 100 >/dev/null
is "Redisson's transfer moves a task of ours" 'from PostgreSQL' "$(cli BLPOP jvm 5 | sed -n 2p)"
is "dq_remove afterwards: not pending" f "$(q -c "SELECT dq_remove('jvm', 'k')")"
q -c "SELECT FROM dq_resume('jvm')"

cli EVAL "$OFFER" 4 jvm "$SIZE" "$LIST" "$CHANNEL" "$(($(now_ms) + 3600000))" 87654321 'cancel me' >/dev/null
is "dq_remove cancels a JVM's task by its payload" t "$(q -c "SELECT dq_remove('jvm', 'cancel me')")"
q -c "SELECT FROM dq_sync()"
is "and it is gone" 0 "$(cli ZCARD "$SIZE")"
exit $rc
