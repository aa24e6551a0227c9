-- Reading a queue: what is in Redis, what is on its way, what this transaction
-- did, each task once. Tasks lie an hour ahead, so no worker moves them; whether
-- it has relayed them already must make no difference to any answer here.
SET client_min_messages = error;
SET datestyle = ISO;
SET intervalstyle = postgres;
SET timezone = 'UTC';
CREATE EXTENSION IF NOT EXISTS dq_bridge;
CREATE SCHEMA scan_basic;
SET search_path = scan_basic, public;
SELECT current_setting('dq_test.socket') AS redis_socket \gset
CREATE SERVER scan_basic FOREIGN DATA WRAPPER dq_bridge OPTIONS (socket :'redis_socket', key_prefix 'scan_basic:');
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

-- an empty queue
SELECT dq_create_queue('q');
SELECT count(*) FROM q;

-- own offers at once, after commit still, in Redis as well
BEGIN;
SELECT dq_offer('q', 'one'::text, '1 hour') AS one \gset
SELECT key, payload, shard, id = :'one' FROM q;
COMMIT;
SELECT key, payload, shard, id = :'one', due_at > now() + '59 min' FROM q;
SELECT dq_sync('q');
SELECT key, payload, shard, id = :'one' FROM q;
SELECT to_timestamp(split_part(id, '-', 1)::bigint / 1000.0) = due_at FROM q;

-- rolled back: never there, savepoints included
BEGIN;
SELECT dq_offer('q', 'two'::text, '1 hour') <> '';
ROLLBACK;
BEGIN;
SAVEPOINT a;
SELECT dq_offer('q', 'three'::text, '1 hour') <> '';
ROLLBACK TO a;
SELECT dq_offer('q', 'four'::text, '1 hour') <> '';
SELECT payload FROM q ORDER BY 1;
COMMIT;
SELECT payload FROM q ORDER BY 1;

-- a key replaces, removals are seen, in the transaction and after it
BEGIN;
SELECT dq_offer('q', 'five'::text, '1 hour', 'k') <> '';
SELECT dq_offer('q', 'six'::text, '1 hour', 'k') <> '';
SELECT key, payload FROM q ORDER BY 2;
COMMIT;
SELECT dq_offer('q', 'seven'::text, '1 hour', 'k') <> '';
SELECT key, payload FROM q ORDER BY 2;
BEGIN;
SELECT dq_remove('q', 'k'), dq_remove('q', 'four'), dq_remove('q', :'one');
SELECT key, payload FROM q ORDER BY 2;
ROLLBACK;
SELECT key, payload FROM q ORDER BY 2;
SELECT dq_remove('q', 'k'), dq_remove('q', 'four'), dq_remove('q', :'one');
SELECT count(*) FROM q;
SELECT dq_sync('q');
SELECT count(*) FROM q;

-- the scan does not see what its own statement offers
SELECT dq_offer('q', 'x' || i::text, '1 hour') <> '' FROM generate_series(1, 3) i;
SELECT count(dq_offer('q', payload || '+', '1 hour')) FROM q;
SELECT payload FROM q ORDER BY 1;
SELECT dq_remove('q', payload) FROM q;
SELECT count(*) FROM q;

-- columns by name, any subset, any order, any type that takes the text
CREATE FOREIGN TABLE cols (due_at timestamptz, key int, payload jsonb) SERVER scan_basic OPTIONS (queue 'cols', shards '3');
SELECT dq_offer_at('cols', '{"n": 1}'::jsonb, '2100-01-01 00:00:00.0001', 42) <> '';
SELECT dq_offer_at('cols', '{"n": 2}', '2100-01-01 00:00:00.123', 43) <> '';
SELECT dq_offer_at('cols', '{"n": 3}', '2100-01-01') <> '';
SELECT payload, key, due_at FROM cols ORDER BY payload;
SELECT sum((payload->>'n')::int) FROM cols WHERE key > 42;
CREATE FOREIGN TABLE cols_shards (shard int, id text) SERVER scan_basic OPTIONS (queue 'cols', shards '3');
SELECT count(DISTINCT id), bool_and(shard BETWEEN 0 AND 2) FROM cols_shards;
CREATE FOREIGN TABLE cols_none () SERVER scan_basic OPTIONS (queue 'cols', shards '3');
SELECT count(*) FROM cols_none;

-- more than a page, scanned by two cursors in turn, and rescanned
SELECT count(dq_offer('q', 'many'::text, interval '1 hour' + i * interval '1 ms')) FROM generate_series(1, 3000) i;
SELECT dq_sync('q');
SELECT count(*), count(DISTINCT id), count(payload) FROM q;
BEGIN;
DECLARE a CURSOR FOR SELECT id FROM q;
DECLARE b CURSOR FOR SELECT id FROM q;
MOVE 500 IN a;
MOVE 1500 IN b;
MOVE 1000 IN a;
FETCH 1 FROM a \gset
\set id1 :id
FETCH 1 FROM b \gset
SELECT :'id1' = :'id';
MOVE ALL IN a;
MOVE ALL IN b;
COMMIT;
SET enable_material = off;
SELECT count(*) FROM (VALUES (1), (2), (3)) v(i), LATERAL (SELECT id FROM q WHERE i > 0 LIMIT 1200) x;
RESET enable_material;
-- (18 prints rows with decimals, and bytes are not always the same)
CREATE FUNCTION explained(sql text) RETURNS SETOF text LANGUAGE plpgsql AS $$
DECLARE line text;
BEGIN
  FOR line IN EXECUTE 'EXPLAIN (ANALYZE, BUFFERS OFF, COSTS OFF, TIMING OFF, SUMMARY OFF) ' || sql LOOP
    CONTINUE WHEN line LIKE '%Bytes%';
    RETURN NEXT regexp_replace(line, 'rows=(\d+)\.00', 'rows=\1');
  END LOOP;
END $$;
SELECT explained('SELECT id FROM q LIMIT 10');

-- joins, also with a parallel plan around it, EvalPlanQual's whole row
SET parallel_setup_cost = 0;
SET parallel_tuple_cost = 0;
SET min_parallel_table_scan_size = 0;
CREATE TABLE local AS SELECT i FROM generate_series(1, 100) i;
ANALYZE local;
SELECT count(*) FROM local, cols WHERE key = i;
RESET parallel_setup_cost;
RESET parallel_tuple_cost;
RESET min_parallel_table_scan_size;
UPDATE local SET i = 0 FROM cols WHERE key = i RETURNING payload;

-- what other producers write: long ids, the old packing, odd scores, garbage
CREATE FOREIGN TABLE foreign_q (id text, payload text, due_at timestamptz) SERVER scan_basic;
CREATE FOREIGN TABLE foreign_raw (id text, payload bytea) SERVER scan_basic OPTIONS (queue 'foreign_q');
CREATE FOREIGN TABLE foreign_int (payload int, id text) SERVER scan_basic OPTIONS (queue 'foreign_q');
-- the default destination would deliver those that are due
SELECT dq_pause('foreign_q');
\! "$REDIS_CLI" -s "$DQ_REDIS_SOCKET" EVAL "local function add(score, member) redis.call('ZADD', KEYS[1], score, member) end local function new(id, p) return struct.pack('Bc0Lc0', #id, id, #p, p) end add('4102444800000.25', new('0123456789abcdef', 'long id')) add('4102444800001', new(string.char(0, 0, 0, 0, 0, 0, 0, 9), 'ours')) add('-1500', struct.pack('dLc0', 1, 3, 'old')) add('inf', new('12345678', 'never')) add('4102444800002', 'garbage') add('4102444800003', new('87654321', string.char(0, 255, 254)))" 1 "redisson_delay_queue_timeout:{scan_basic:foreign_q}" >/dev/null
SELECT id, due_at FROM foreign_q ORDER BY due_at;
SELECT count(*) FROM foreign_q;
SELECT id, payload FROM foreign_raw WHERE id LIKE '4102%';
SELECT try('SELECT payload FROM foreign_q');
SELECT try('SELECT payload FROM foreign_int WHERE id LIKE ''%x%''');

-- no Redis: the error says so, and no other queue is disturbed
CREATE SERVER scan_basic_gone FOREIGN DATA WRAPPER dq_bridge OPTIONS (socket '/nonexistent/redis.sock');
SELECT dq_create_queue('gone', 'scan_basic_gone');
SELECT left(try('SELECT * FROM gone'), 5);
SELECT count(*) FROM cols;

\pset tuples_only off
\! "$REDIS_CLI" -s "$DQ_REDIS_SOCKET" EVAL "for _, k in ipairs(redis.call('KEYS', '*scan_basic:*')) do redis.call('DEL', k) end" 0 >/dev/null
DROP SERVER scan_basic, scan_basic_gone CASCADE;
DROP SCHEMA scan_basic CASCADE;
