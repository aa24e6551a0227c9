-- Several queues in one query: below an Append they are read at once (async), in order they
-- are merged, by partition bounds some are left out; and what must not be asynchronous. Tasks
-- lie in the year 2100, so no worker moves them. H7 H8
SET client_min_messages = error;
SET datestyle = ISO;
SET timezone = 'UTC';
CREATE EXTENSION IF NOT EXISTS dq_bridge;
CREATE SCHEMA scan_append;
SET search_path = scan_append, public;
SELECT current_setting('dq_test.socket') AS redis_socket \gset
CREATE SERVER scan_append FOREIGN DATA WRAPPER dq_bridge OPTIONS (socket :'redis_socket', key_prefix 'scan_append:');
\pset format unaligned
\pset tuples_only on
CREATE TABLE p (id text, key text, payload text, due_at timestamptz, shard int) PARTITION BY RANGE (due_at);
CREATE FOREIGN TABLE p1 PARTITION OF p FOR VALUES FROM ('2100-01-01') TO ('2100-02-01') SERVER scan_append;
CREATE FOREIGN TABLE p2 PARTITION OF p FOR VALUES FROM ('2100-02-01') TO ('2100-03-01') SERVER scan_append OPTIONS (shards '3');
CREATE TABLE p3 PARTITION OF p FOR VALUES FROM ('2100-03-01') TO ('2100-04-01');
SELECT count(dq_offer_at('p1', 'a' || i, '2100-01-01 00:00Z'::timestamptz + i * interval '1 s', 'k' || i)) FROM generate_series(1, 500) i;
SELECT count(dq_offer_at('p2', 'b' || i, '2100-02-01 00:00Z'::timestamptz + i * interval '1 s', 'k' || i)) FROM generate_series(1, 500) i;
INSERT INTO p3 SELECT i, 'k' || i, 'c' || i, '2100-03-01 00:00Z'::timestamptz + i * interval '1 s', 0 FROM generate_series(1, 500) i;
SELECT dq_sync();
ANALYZE p3;
CREATE FUNCTION plan_of(sql text) RETURNS SETOF text LANGUAGE plpgsql AS $$
DECLARE line text;
BEGIN
  FOR line IN EXECUTE 'EXPLAIN (COSTS OFF) ' || sql LOOP
    RETURN NEXT replace(line, 'scan_append.', '');
  END LOOP;
END $$;

-- at once
SELECT plan_of('SELECT payload FROM p');
SELECT count(*), count(DISTINCT payload), min(payload), max(payload) FROM p;
SELECT plan_of('SELECT id FROM p1 UNION ALL SELECT id FROM p2');
SELECT count(DISTINCT id) FROM (SELECT id FROM p1 UNION ALL SELECT id FROM p2) x;
SELECT plan_of('SELECT payload FROM p WHERE due_at > ''2100-01-01 00:08'' AND due_at < ''2100-02-01 00:00:10''');
SELECT count(*) FROM p WHERE due_at > '2100-01-01 00:08' AND due_at < '2100-02-01 00:00:10';
SELECT plan_of('SELECT payload FROM p WHERE payload LIKE ''%7''');
SELECT count(*) FROM p WHERE payload LIKE '%7';
-- a partition that cannot have such tasks is not asked
SELECT plan_of('SELECT payload FROM p WHERE due_at < ''2100-01-01 00:00:10''');
-- off
SET enable_async_append = off;
SELECT plan_of('SELECT payload FROM p');
RESET enable_async_append;

-- in order: one partition after the other, merged where they overlap
SELECT plan_of('SELECT payload FROM p ORDER BY due_at LIMIT 3');
SELECT payload FROM p ORDER BY due_at OFFSET 498 LIMIT 4;
SELECT payload FROM p ORDER BY due_at DESC OFFSET 498 LIMIT 4;
SELECT plan_of('SELECT payload FROM (SELECT payload, due_at FROM p1 UNION ALL SELECT payload, due_at FROM p2) x ORDER BY due_at LIMIT 3');
SELECT payload FROM (SELECT payload, due_at FROM p1 UNION ALL SELECT payload, due_at FROM p2) x ORDER BY due_at OFFSET 499 LIMIT 2;

-- not asynchronous: looked up, begun anew for each outer row, an aggregate that Redis answers
SELECT plan_of('SELECT payload FROM p WHERE key IN (''k5'', ''k7'')');
SELECT payload FROM p WHERE key IN ('k5', 'k7') ORDER BY 1;
SELECT plan_of('SELECT count(*) FROM p1 UNION ALL SELECT count(*) FROM p2');
SELECT count(*) FROM p1 UNION ALL SELECT count(*) FROM p2;

\pset tuples_only off
\! "$REDIS_CLI" -s "$DQ_REDIS_SOCKET" EVAL "for _, k in ipairs(redis.call('KEYS', '*scan_append:*')) do redis.call('DEL', k) end" 0 >/dev/null
DROP SERVER scan_append CASCADE;
DROP SCHEMA scan_append CASCADE;
