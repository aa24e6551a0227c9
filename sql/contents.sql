-- Tables that show no pending tasks: the ready list, the quarantine. And columns of all
-- kinds of types, with what they cannot hold.
SET client_min_messages = error;
SET datestyle = ISO;
SET timezone = 'UTC';
CREATE EXTENSION IF NOT EXISTS dq_bridge;
CREATE SCHEMA contents;
SET search_path = contents, public;
SELECT current_setting('dq_test.socket') AS redis_socket \gset
CREATE SERVER contents FOREIGN DATA WRAPPER dq_bridge OPTIONS (socket :'redis_socket', key_prefix 'contents:');
CREATE FUNCTION try(sql text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE h text;
BEGIN
  EXECUTE sql;
  RETURN 'ok';
EXCEPTION WHEN OTHERS THEN
  GET STACKED DIAGNOSTICS h = PG_EXCEPTION_HINT;
  RETURN format('%s: %s | %s', SQLSTATE, SQLERRM, h);
END $$;
\pset format unaligned
\pset tuples_only on
CREATE FOREIGN TABLE q (id text, payload text, due_at timestamptz) SERVER contents OPTIONS (shards '2');

-- definitions: columns and options of each kind, and what they have in common with q
SELECT try($$CREATE FOREIGN TABLE x (id text) SERVER contents OPTIONS (queue 'q', shards '2', contents 'ready')$$);
SELECT try($$CREATE FOREIGN TABLE x (payload text) SERVER contents OPTIONS (queue 'q', shards '2', contents 'quarantine')$$);
SELECT try($$CREATE FOREIGN TABLE x (member text) SERVER contents OPTIONS (queue 'q', shards '2', contents 'quarantine')$$);
SELECT try($$CREATE FOREIGN TABLE x (payload text) SERVER contents OPTIONS (queue 'q', shards '2', contents 'redy')$$);
SELECT try($$CREATE FOREIGN TABLE x (payload text) SERVER contents OPTIONS (queue 'q', contents 'ready')$$);
SELECT try($$CREATE FOREIGN TABLE x (payload text) SERVER contents OPTIONS (queue 'q', shards '2', contents 'ready', destination 'none')$$);
SELECT try($$ALTER FOREIGN TABLE q OPTIONS (ADD contents 'ready')$$);
CREATE FOREIGN TABLE r (payload text, shard int) SERVER contents OPTIONS (queue 'q', shards '2', contents 'ready');
CREATE FOREIGN TABLE bad (shard int, member bytea, reason text, due_at timestamptz, found_at timestamptz) SERVER contents OPTIONS (queue 'q', shards '2', contents 'quarantine');
SELECT queue, contents FROM dq_queues WHERE queue::text IN ('q', 'r', 'bad') ORDER BY 1;
SELECT count(DISTINCT queue) FROM dq_stats WHERE queue::text IN ('q', 'r', 'bad');

-- the ready list: in its order, page by page
SELECT * FROM r;
SELECT count(*) FROM r;
\! for i in 1 2 3; do "$REDIS_CLI" -s "$DQ_REDIS_SOCKET" RPUSH contents:q#0 "a$i" >/dev/null; done
\! "$REDIS_CLI" -s "$DQ_REDIS_SOCKET" EVAL "for i = 1, 1234 do redis.call('RPUSH', KEYS[1], 'b' .. i) end" 1 contents:q#1 >/dev/null
SELECT * FROM r WHERE shard = 0;
SELECT count(*), count(DISTINCT payload), count(*) FILTER (WHERE payload LIKE 'b%') FROM r;
SELECT count(*) FROM r;
SELECT count(*) FROM r WHERE shard IN (1, 5);
SELECT payload FROM (SELECT payload, row_number() OVER () AS n FROM r WHERE shard = 1) x WHERE n IN (1, 500, 501, 1234);
EXPLAIN (VERBOSE, COSTS OFF) SELECT payload FROM r WHERE shard = 0 AND payload > 'a1';
EXPLAIN (VERBOSE, COSTS OFF) SELECT count(*) FROM r;
-- a page ends where the last one was, though elements are taken meanwhile
BEGIN;
DECLARE c CURSOR FOR SELECT payload FROM r WHERE shard = 1;
MOVE 500 IN c;
\! "$REDIS_CLI" -s "$DQ_REDIS_SOCKET" LTRIM contents:q#1 100 -1 >/dev/null
FETCH 1 FROM c;
MOVE 498 IN c;
\! "$REDIS_CLI" -s "$DQ_REDIS_SOCKET" LPUSH contents:q#1 x y z >/dev/null
FETCH 2 FROM c;
\! "$REDIS_CLI" -s "$DQ_REDIS_SOCKET" LTRIM contents:q#1 1100 -1 >/dev/null
MOVE ALL IN c;
COMMIT;
-- read only, and nothing of the functions
SELECT try($$INSERT INTO r (payload) VALUES ('x')$$);
SELECT try($$DELETE FROM r$$);
SELECT try($$SELECT dq_offer('r', 'x')$$);
SELECT try($$SELECT dq_remove('bad', 'x')$$);
SELECT try($$SELECT dq_pause('r')$$);
-- a payload that does not fit
CREATE FOREIGN TABLE r_int (payload int) SERVER contents OPTIONS (queue 'q', shards '2', contents 'ready');
SELECT count(*) FROM r_int;
SELECT try('SELECT payload FROM r_int');
ALTER FOREIGN TABLE r_int ALTER COLUMN payload OPTIONS (ADD on_error 'null');
SELECT count(payload) FROM r_int;
DROP FOREIGN TABLE r_int;

-- the quarantine
SELECT * FROM bad;
SELECT count(*) FROM bad;
\! "$REDIS_CLI" -s "$DQ_REDIS_SOCKET" EVAL "redis.call('HSET', KEYS[1], 'garbage', 'not a packed task|4102444800000|4102444801000', 'el\0ement', 'no valid text||4102444801500|3')" 1 'dq:{contents:q#1}:bad' >/dev/null
SELECT * FROM bad ORDER BY member;
SELECT reason FROM bad WHERE due_at > '2000-01-01' AND shard = 1;
\! "$REDIS_CLI" -s "$DQ_REDIS_SOCKET" EVAL "for i = 1, 2500 do redis.call('HSET', KEYS[1], 'm' .. i, 'x|' .. i .. '|1') end" 1 'dq:{contents:q#0}:bad' >/dev/null
SELECT count(*), count(DISTINCT member), sum(extract(epoch FROM due_at)) FROM bad WHERE shard = 0;
SELECT count(*) FROM bad;
EXPLAIN (VERBOSE, COSTS OFF) SELECT member FROM bad;
\! "$REDIS_CLI" -s "$DQ_REDIS_SOCKET" DEL 'dq:{contents:q#0}:bad' 'dq:{contents:q#1}:bad' contents:q#0 contents:q#1 >/dev/null
-- as it comes to be: what is due and cannot be read
SELECT dq_sync('q');
\! "$REDIS_CLI" -s "$DQ_REDIS_SOCKET" ZADD 'redisson_delay_queue_timeout:{contents:q#0}' 1000 junk >/dev/null
SELECT dq_transfer('q');
SELECT member, due_at, found_at > now() - interval '1 min' FROM bad;

-- DELETE discards, within the transaction
SELECT try('INSERT INTO bad (member) VALUES (''x'')'), try('UPDATE bad SET reason = ''x''');
BEGIN;
DELETE FROM bad WHERE member = 'junk' RETURNING member, reason, shard;
SELECT count(*) FROM bad;
ROLLBACK;
SELECT count(*) FROM bad;
\! "$REDIS_CLI" -s "$DQ_REDIS_SOCKET" EVAL "for i = 1, 700 do redis.call('HSET', KEYS[1], 'm' .. i, 'x|' .. i .. '|1') end" 1 'dq:{contents:q#1}:bad' >/dev/null
EXPLAIN (COSTS OFF) DELETE FROM bad WHERE due_at > '1970-01-01 00:00:00.5';
WITH d AS (DELETE FROM bad WHERE due_at > '1970-01-01 00:00:00.5' RETURNING *) SELECT shard, count(*) FROM d GROUP BY 1 ORDER BY 1;
SELECT count(*), max(due_at) FROM bad;
SELECT dq_sync('q');
SELECT count(*), max(due_at) FROM bad;
\! "$REDIS_CLI" -s "$DQ_REDIS_SOCKET" HLEN 'dq:{contents:q#0}:bad'; "$REDIS_CLI" -s "$DQ_REDIS_SOCKET" HLEN 'dq:{contents:q#1}:bad'
CREATE FOREIGN TABLE bad_only (reason text) SERVER contents OPTIONS (queue 'q', shards '2', contents 'quarantine');
SELECT try('DELETE FROM bad_only');
CREATE FOREIGN TABLE bad_other (member bytea) SERVER contents OPTIONS (queue 'other', contents 'quarantine');
DELETE FROM bad_other;
\! "$REDIS_CLI" -s "$DQ_REDIS_SOCKET" HSET 'dq:{contents:other}:bad' x 'r|1|1' >/dev/null
SELECT try('DELETE FROM bad_other');

-- payloads of all kinds of types, through their input functions
CREATE TYPE mood AS ENUM ('sad', 'ok');
CREATE DOMAIN small AS int CHECK (VALUE < 100);
CREATE TYPE pair AS (a int, b text);
CREATE FUNCTION volatile_check(int) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  RETURN $1 < 5;
EXCEPTION WHEN OTHERS THEN
  RETURN false;
END $$;
CREATE DOMAIN checked AS int CHECK (volatile_check(VALUE));
\! "$REDIS_CLI" -s "$DQ_REDIS_SOCKET" EVAL "local function add(n, p) redis.call('ZADD', KEYS[1], 4102444800000 + n, struct.pack('Bc0Lc0', 8, string.char(0,0,0,0,0,0,0,n), #p, p)) end add(1, '7') add(2, '700') add(3, 'sad') add(4, '(5,five)') add(5, '{\"a\": 1}') add(6, '\255\254') add(7, '{1,2}') add(8, '') add(9, 'a\0b')" 1 'redisson_delay_queue_timeout:{contents:types}' >/dev/null
CREATE FUNCTION show(type text) RETURNS SETOF text LANGUAGE plpgsql AS $$
BEGIN
  EXECUTE format('CREATE FOREIGN TABLE types (id text, payload %s, due_at timestamptz) SERVER contents', type);
  RETURN NEXT type || ': ' || try('SELECT payload FROM types ORDER BY due_at');
  RETURN NEXT (SELECT count(*) FROM types);
  ALTER FOREIGN TABLE types ALTER COLUMN payload OPTIONS (ADD on_error 'null');
  RETURN QUERY EXECUTE 'SELECT string_agg(coalesce(encode(payload::text::bytea, ''escape''), ''-''), '' '' ORDER BY due_at) FROM types';
  DROP FOREIGN TABLE types;
END $$;
SELECT show(t) FROM unnest(ARRAY['text', 'bytea', 'int', 'numeric(4,1)', 'mood', 'small', 'checked', 'pair',
  'json', 'jsonb', 'int[]', 'varchar(2)']) t;
-- also where a parallel plan runs around it
CREATE FOREIGN TABLE types (payload small OPTIONS (on_error 'null'), id text) SERVER contents;
CREATE FOREIGN TABLE types_bool (payload boolean OPTIONS (on_error 'null')) SERVER contents OPTIONS (queue 'types');
SET parallel_setup_cost = 0;
SET parallel_tuple_cost = 0;
SET min_parallel_table_scan_size = 0;
CREATE TABLE local AS SELECT i FROM generate_series(1, 1000) i;
ANALYZE local;
SELECT count(*), count(payload) FROM local, types_bool WHERE i <= 2;
RESET parallel_setup_cost;
RESET parallel_tuple_cost;
RESET min_parallel_table_scan_size;
SELECT payload FROM types WHERE payload IS NOT NULL;
SELECT try('ALTER FOREIGN TABLE types ALTER COLUMN id OPTIONS (ADD on_error ''null'')');
SELECT try('ALTER FOREIGN TABLE types ALTER COLUMN payload OPTIONS (SET on_error ''nil'')');

-- columns dropped, added, of another order, with defaults and not null
ALTER FOREIGN TABLE types DROP COLUMN payload;
SELECT count(*), min(id) FROM types;
ALTER FOREIGN TABLE types ADD COLUMN shard int NOT NULL DEFAULT 9;
ALTER FOREIGN TABLE types ADD COLUMN payload bytea;
SELECT * FROM types WHERE id LIKE '%-7';
SELECT try('ALTER FOREIGN TABLE types ADD COLUMN other text');
SELECT try('ALTER FOREIGN TABLE types ALTER COLUMN id TYPE varchar');
-- a key that is made from the payload
SELECT try($$CREATE FOREIGN TABLE g (id text GENERATED ALWAYS AS ('x') STORED) SERVER contents$$);
CREATE FOREIGN TABLE g (payload jsonb, key text GENERATED ALWAYS AS (payload ->> 'order') STORED, due_at timestamptz DEFAULT '2100-01-01') SERVER contents;
INSERT INTO g (payload) VALUES ('{"order": 5}'), ('{"order": 6}'), ('{"n": 1}');
SELECT key, payload, due_at FROM g ORDER BY key;
INSERT INTO g (payload) VALUES ('{"order": 5, "again": true}');
SELECT key, payload FROM g WHERE key = '5';
SELECT dq_sync('g');
SELECT key, payload FROM g ORDER BY key;

\pset tuples_only off
\d bad
\! "$REDIS_CLI" -s "$DQ_REDIS_SOCKET" EVAL "for _, k in ipairs(redis.call('KEYS', '*contents:*')) do redis.call('DEL', k) end" 0 >/dev/null
DROP SERVER contents CASCADE;
DROP SCHEMA contents CASCADE;
