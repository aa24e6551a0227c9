-- IMPORT FOREIGN SCHEMA: names of all kinds, sharded queues, LIMIT TO and EXCEPT, ready
-- lists; ANALYZE. I6
SET client_min_messages = warning;
SET datestyle = ISO;
SET timezone = 'UTC';
CREATE EXTENSION IF NOT EXISTS dq_bridge;
CREATE SCHEMA import;
SET search_path = import, public;
SELECT current_setting('dq_test.socket') AS redis_socket \gset
CREATE SERVER "fb x" FOREIGN DATA WRAPPER dq_bridge OPTIONS (socket :'redis_socket', key_prefix 'import:');
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
-- what others have put there, and sharded ones of ours, also with an empty shard
\! "$REDIS_CLI" -s "$DQ_REDIS_SOCKET" EVAL "local long = string.rep('long_name_', 9) local m = struct.pack('Bc0Lc0', 8, '12345678', 1, 'p') for _, n in ipairs({'{import:select}', '{import:Mixed}', '{import:quo\'te\"d}', '{import:a.b}', '{import:\240\159\152\128}', '{import:' .. long .. '1}', '{import:' .. long .. '2}', '{import:7up}', 'import:{tag}rest', 'import:a{}b', '{import:\255}', '{import:}', '{import:alone#5}', '{import:x#0}', '{import:x#1}', '{import:a*b[c]?}', '{other:y}'}) do redis.call('ZADD', 'redisson_delay_queue_timeout:' .. n, 4102444800000, m) end redis.call('SET', 'redisson_delay_queue_timeout:{import:string}', 'x')" 0 >/dev/null
CREATE SCHEMA before;
CREATE FOREIGN TABLE before.sharded (payload text) SERVER "fb x" OPTIONS (shards '3');
SELECT dq_offer_at('before.sharded', 'x', '2100-01-01', 'k') <> '';
SELECT dq_sync('before.sharded');
DROP SCHEMA before CASCADE;

CREATE SCHEMA i1;
SET client_min_messages = notice;
IMPORT FOREIGN SCHEMA "*" FROM SERVER "fb x" INTO i1;
SELECT quote_ident(relname), ftoptions FROM pg_foreign_table JOIN pg_class c ON c.oid = ftrelid
  WHERE relnamespace = 'i1'::regnamespace ORDER BY relname COLLATE "C";
SELECT length(relname::text::bytea) FROM pg_class WHERE relnamespace = 'i1'::regnamespace AND relname LIKE 'long%';
SELECT payload, key FROM i1.sharded;
SELECT payload FROM i1."quo'te""d";
SELECT count(*) FROM i1."a*b[c]?";
-- once more: what is there stays
IMPORT FOREIGN SCHEMA "sha" FROM SERVER "fb x" INTO i1;
SET client_min_messages = warning;

-- some of them
CREATE SCHEMA i2;
IMPORT FOREIGN SCHEMA "*" LIMIT TO ("select", "Mixed", "quo'te""d", "a.b", nothing) FROM SERVER "fb x" INTO i2;
SELECT array_agg(relname::text ORDER BY relname COLLATE "C") FROM pg_class WHERE relnamespace = 'i2'::regnamespace;
CREATE SCHEMA i3;
IMPORT FOREIGN SCHEMA "a" EXCEPT ("a.b") FROM SERVER "fb x" INTO i3;
SELECT array_agg(relname::text ORDER BY relname COLLATE "C") FROM pg_class WHERE relnamespace = 'i3'::regnamespace;
CREATE SCHEMA i4;
IMPORT FOREIGN SCHEMA "*" FROM SERVER "fb x" INTO i4 OPTIONS (prefix 'x', ready 'true', quarantine 'true');
SELECT relname, ftoptions FROM pg_foreign_table JOIN pg_class c ON c.oid = ftrelid
  WHERE relnamespace = 'i4'::regnamespace ORDER BY relname COLLATE "C";
SELECT count(*) FROM i4."x#0_ready", i4."x#1_quarantine";
IMPORT FOREIGN SCHEMA "y" FROM SERVER "fb x" INTO i4 OPTIONS (prefix 'x');
SELECT try('IMPORT FOREIGN SCHEMA "*" FROM SERVER "fb x" INTO i4 OPTIONS (prefx ''x'')');
SELECT try('IMPORT FOREIGN SCHEMA "*" FROM SERVER "fb x" INTO i4 OPTIONS (ready ''perhaps'')');

-- ANALYZE: how many, and what they look like; payloads that do not fit do no harm
SELECT dq_create_queue('s', payload_type => 'int', options => '{"shards": 2}');
SELECT count(dq_offer_at('s', i, '2100-01-01'::timestamptz + i * interval '1 s', i)) FROM generate_series(1, 2000) i;
SELECT dq_sync('s');
\! "$REDIS_CLI" -s "$DQ_REDIS_SOCKET" EVAL "redis.call('ZADD', KEYS[1], 4102444800000, struct.pack('Bc0Lc0', 8, '12345678', 1, 'p')) redis.call('ZADD', KEYS[1], 4102444800000, 'garbage')" 1 'redisson_delay_queue_timeout:{import:s#0}' >/dev/null
ANALYZE s;
SELECT reltuples FROM pg_class WHERE oid = 's'::regclass;
SELECT attname, n_distinct, null_frac > 0 AS nulls, histogram_bounds IS NOT NULL AS histogram FROM pg_stats WHERE schemaname = 'import' AND tablename = 's' ORDER BY 1;
-- by ranks, where the sample is small against the queue
SET default_statistics_target = 1;
ANALYZE s;
SELECT reltuples BETWEEN 2001 AND 2002 FROM pg_class WHERE oid = 's'::regclass;
SELECT abs(extract(epoch FROM (histogram_bounds::text::timestamptz[])[1] - '2100-01-01')) < 30,
  abs(extract(epoch FROM (histogram_bounds::text::timestamptz[])[2] - '2100-01-01 00:33:20')) < 30
  FROM pg_stats WHERE schemaname = 'import' AND tablename = 's' AND attname = 'due_at';
RESET default_statistics_target;
-- what the planner makes of it
ANALYZE s;
CREATE FUNCTION estimated(sql text) RETURNS int LANGUAGE plpgsql AS $$
DECLARE line text;
BEGIN
  FOR line IN EXECUTE 'EXPLAIN ' || sql LOOP
    RETURN substring(line FROM 'rows=(\d+)');
  END LOOP;
END $$;
SELECT estimated('SELECT * FROM s WHERE due_at < ''2100-01-01 00:10''') BETWEEN 500 AND 700,
  estimated('SELECT * FROM s WHERE key = ''5'''), estimated('SELECT * FROM s WHERE id IN (''5-5'', ''5-6'')');

\pset tuples_only off
\det i4.*
\! "$REDIS_CLI" -s "$DQ_REDIS_SOCKET" EVAL "for _, k in ipairs(redis.call('KEYS', '*import:*')) do redis.call('DEL', k) end redis.call('DEL', 'redisson_delay_queue_timeout:{other:y}')" 0 >/dev/null
SET client_min_messages = error;
DROP SERVER "fb x" CASCADE;
DROP SCHEMA import, i1, i2, i3, i4 CASCADE;
