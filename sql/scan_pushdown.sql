-- What a query asks of Redis: EXPLAIN of everything that is pushed, and of what must
-- not be; each query gives the same as on a local copy of the queue. Tasks lie in the
-- year 2100, so no worker moves them.
SET client_min_messages = error;
SET datestyle = ISO;
SET intervalstyle = postgres;
SET timezone = 'UTC';
CREATE EXTENSION IF NOT EXISTS dq_bridge;
CREATE SCHEMA scan_pushdown;
SET search_path = scan_pushdown, public;
SELECT current_setting('dq_test.socket') AS redis_socket \gset
CREATE SERVER scan_pushdown FOREIGN DATA WRAPPER dq_bridge OPTIONS (socket :'redis_socket', key_prefix 'scan_pushdown:');
\pset format unaligned
\pset tuples_only on
SELECT dq_create_queue('q');
SELECT dq_create_queue('s', options => '{"shards": 3}');
-- equal instants, keyed and keyless ones, three shards
SELECT count(dq_offer_at('q', 'p' || i % 50, '2100-01-01 00:00Z'::timestamptz + i / 3 * interval '1 s',
  CASE WHEN i % 2 = 0 THEN 'k' || i END)) FROM generate_series(0, 2999) i;
SELECT count(dq_offer_at('s', 'p' || i % 50, '2100-01-01 00:00Z'::timestamptz + i / 3 * interval '1 s',
  CASE WHEN i % 2 = 0 THEN 'k' || i END)) FROM generate_series(0, 2999) i;
SELECT dq_sync();
CREATE SCHEMA scan_pushdown_copy;
CREATE TABLE scan_pushdown_copy.q AS SELECT * FROM q;
CREATE TABLE scan_pushdown_copy.s AS SELECT * FROM s;
CREATE TABLE t (n int, at timestamptz, key text, id text);
INSERT INTO t SELECT row_number() OVER (ORDER BY id), due_at, key, id FROM q WHERE key LIKE 'k%00' OR payload = 'p7';
INSERT INTO t VALUES (0, NULL, NULL, NULL);
ANALYZE t;

-- from 16 on an aggregate may ask for its input in order
DO $$ BEGIN
  IF current_setting('server_version_num')::int >= 160000 THEN
    PERFORM set_config('enable_presorted_aggregate', 'off', false);
  END IF;
END $$;

-- the plan, as all versions of PostgreSQL write it; then the result against the local copy
CREATE FUNCTION plan_of(sql text) RETURNS SETOF text LANGUAGE plpgsql AS $$
DECLARE line text;
BEGIN
  FOR line IN EXECUTE 'EXPLAIN (VERBOSE, COSTS OFF) ' || sql LOOP
    CONTINUE WHEN line ~ 'Output:|Redis Keys:';
    line := replace(line, 'scan_pushdown.', '');
    -- a clause of an equivalence is written in either order
    line := regexp_replace(line, '\(((?!q\.)\w+\.\w+|\$\d+) = (q\.\w+)\)', '(\2 = \1)', 'g');
    line := regexp_replace(line, '\(InitPlan \d+\)\.col1', '$0', 'g');
    RETURN NEXT regexp_replace(line, '(InitPlan \d+) \(returns .*\)', '\1');
  END LOOP;
END $$;
CREATE FUNCTION same(sql text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  there text[];
  here text[];
BEGIN
  sql := 'SELECT coalesce(array_agg(x::text ORDER BY x::text), ''{}'') FROM (' || sql || ') x';
  EXECUTE sql INTO there;
  SET LOCAL search_path = scan_pushdown_copy, scan_pushdown, public;
  EXECUTE sql INTO here;
  SET LOCAL search_path = scan_pushdown, public;
  RETURN CASE WHEN there = here THEN 'same, ' || cardinality(here) || ' rows'
    ELSE format('DIFFERENT: %s rows against %s', cardinality(there), cardinality(here)) END;
END $$;
CREATE FUNCTION look(sql text) RETURNS SETOF text LANGUAGE sql AS $$
  SELECT plan_of(sql) UNION ALL SELECT '  ' || same(sql)
$$;

-- everything: no condition; EXPLAIN names the key, without VERBOSE it does not
EXPLAIN (VERBOSE, COSTS OFF) SELECT payload FROM q;
EXPLAIN (COSTS OFF) SELECT payload FROM q WHERE due_at > '2100-01-01';
SELECT same('SELECT * FROM q');

-- ranges of due_at
SELECT look('SELECT * FROM q WHERE due_at = ''2100-01-01 00:00:05''');
SELECT look('SELECT * FROM q WHERE due_at < ''2100-01-01 00:00:05''');
SELECT look('SELECT * FROM q WHERE due_at <= ''2100-01-01 00:00:05''');
SELECT look('SELECT * FROM q WHERE due_at > ''2100-01-01 00:16:30''');
SELECT look('SELECT * FROM q WHERE due_at >= ''2100-01-01 00:16:30''');
SELECT look('SELECT * FROM q WHERE ''2100-01-01 00:16:30'' <= due_at');
SELECT look('SELECT * FROM q WHERE NOT due_at < ''2100-01-01 00:16:38''');
SELECT look('SELECT * FROM q WHERE due_at BETWEEN ''2100-01-01 00:00:05'' AND ''2100-01-01 00:00:07''');
SELECT look('SELECT * FROM q WHERE due_at IN (''2100-01-01 00:00:05'', ''2100-01-01 00:00:09'', ''2100-01-01 00:00:05'', NULL)');
SELECT look('SELECT * FROM q WHERE due_at = ANY (ARRAY[''2100-01-01 00:00:05'', ''2100-01-01 00:00:05.0001'']::timestamptz[]) AND due_at < ''2100-01-02''');
SELECT look('SELECT * FROM q WHERE due_at > now() AND due_at < now() + interval ''1000 years'' AND payload = ''p3''');
SELECT look('SELECT * FROM q WHERE due_at < ''2100-01-01 00:00:05''::timestamp');
SELECT look('SELECT * FROM q WHERE due_at > ''2100-01-01''::date');
SELECT look('SELECT * FROM q WHERE due_at <= (SELECT min(at) + interval ''3 s'' FROM t)');
SELECT look('SELECT * FROM q WHERE due_at IS NOT NULL AND due_at < ''2100-01-01 00:00:02''');
-- H9 bounds between milliseconds, H10 nulls, C7 infinity and beyond the calendar
SELECT same('SELECT * FROM q WHERE due_at > ''2100-01-01 00:00:04.999999''');
SELECT same('SELECT * FROM q WHERE due_at >= ''2100-01-01 00:00:05.000001''');
SELECT same('SELECT * FROM q WHERE due_at < ''2100-01-01 00:00:05.000001''');
SELECT same('SELECT * FROM q WHERE due_at <= ''2100-01-01 00:00:04.999999''');
SELECT same('SELECT * FROM q WHERE due_at = ''2100-01-01 00:00:05.000001''');
SELECT same('SELECT * FROM q WHERE due_at > NULL');
SELECT same('SELECT * FROM q WHERE due_at > (SELECT at FROM t WHERE n = 0)');
SELECT same('SELECT * FROM q WHERE due_at = ANY (NULL::timestamptz[])');
SELECT same('SELECT * FROM q WHERE due_at = ANY (''{}''::timestamptz[])');
SELECT same('SELECT * FROM q WHERE due_at < ''infinity''');
SELECT same('SELECT * FROM q WHERE due_at >= ''infinity''');
SELECT same('SELECT * FROM q WHERE due_at > ''-infinity''');
SELECT same('SELECT * FROM q WHERE due_at = ''-infinity''');
SELECT same('SELECT * FROM q WHERE due_at < ''294276-12-31''');
SELECT same('SELECT * FROM q WHERE due_at > ''4713-01-01 BC''');
SELECT same('SELECT * FROM q WHERE due_at < ''5874897-12-31''::date');
SELECT same('SELECT * FROM q WHERE due_at > ''infinity''::date');
SELECT same('SELECT * FROM q WHERE due_at > ''2100-01-01 00:10'' AND due_at < ''2100-01-01 00:05''');
SET timezone = 'Pacific/Kiritimati';
SELECT same('SELECT * FROM q WHERE due_at > ''2100-01-01''::date AND due_at < ''2100-01-01 14:01''::timestamp');
SET timezone = 'Pacific/Pago_Pago';
SELECT same('SELECT * FROM q WHERE due_at > ''2100-01-01''::date AND due_at < ''2099-12-31 13:01''::timestamp');
SET timezone = 'UTC';

-- ids and keys
SELECT look('SELECT * FROM q WHERE key = ''k200''');
SELECT look('SELECT * FROM q WHERE key IN (''k200'', ''k201'', ''k202'', ''k200'', NULL)');
SELECT look('SELECT * FROM q WHERE key = ANY (ARRAY(SELECT key FROM t))');
SELECT look('SELECT * FROM q WHERE id = (SELECT id FROM t WHERE n = 5)');
SELECT look('SELECT * FROM q WHERE id = ANY (ARRAY(SELECT id FROM t)) AND payload = ''p7''');
SELECT look('SELECT * FROM q WHERE key = ''k200'' AND due_at < ''2100-01-01 00:01''');
SELECT look('SELECT * FROM s WHERE key IN (''k200'', ''k202'', ''k204'')');
SELECT same('SELECT * FROM s WHERE id = ANY (ARRAY(SELECT id FROM s WHERE payload = ''p9''))');
SELECT same('SELECT * FROM q WHERE id IN (''x'', '''', ''5'', ''5-'', ''-5-5'', ''5-x'', ''5-x0'', ''5-x00'', ''99999999999999999999-1'')');
SELECT same('SELECT * FROM q WHERE key IN ('''', repeat(''x'', 1000))');
SELECT plan_of('SELECT * FROM s WHERE shard = 1 AND due_at < ''2100-01-01 00:00:09''');
-- keyless tasks take turns, so how many are where depends on what was offered before
SELECT left(same('SELECT * FROM s WHERE shard = 1 AND due_at < ''2100-01-01 00:00:09'''), 4);
SELECT left(same('SELECT * FROM s WHERE shard IN (0, 2, 7, -1)'), 4);
SELECT same('SELECT * FROM s WHERE shard = 7');

-- H4 H5 joins: the outer row's values are asked for
SELECT look('SELECT t.n, q.* FROM t JOIN q ON q.key = t.key');
SELECT look('SELECT t.n, q.* FROM t JOIN q ON q.id = t.id WHERE t.n < 5');
SET enable_hashjoin = off;
SET enable_mergejoin = off;
SET enable_material = off;
SELECT look('SELECT t.n, q.* FROM t JOIN q ON q.due_at = t.at WHERE t.n < 5');
SELECT look('SELECT t.n, q.* FROM t LEFT JOIN q ON q.due_at BETWEEN t.at AND t.at + interval ''1 s'' WHERE t.n < 5');
SELECT look('SELECT t.n, x.payload FROM t, LATERAL (SELECT * FROM q WHERE due_at > t.at ORDER BY due_at, id LIMIT 2) x WHERE t.n < 5');
SELECT same('SELECT n, (SELECT count(*) FROM q WHERE due_at < t.at) FROM t');
SELECT same('SELECT n FROM t WHERE EXISTS (SELECT FROM q WHERE q.key = t.key AND q.due_at < ''2100-01-01 00:05'')');
SELECT same('WITH RECURSIVE r AS (SELECT min(due_at) AS d FROM q UNION ALL SELECT (SELECT min(due_at) FROM q WHERE due_at > r.d + interval ''1 min'') FROM r WHERE d IS NOT NULL) SELECT d FROM r');
RESET enable_hashjoin;
RESET enable_material;
RESET enable_mergejoin;

-- H7 order: due_at alone comes from Redis, backwards as well, over all shards
SELECT look('SELECT * FROM q ORDER BY due_at DESC, id LIMIT 4');
SELECT plan_of('SELECT * FROM q ORDER BY due_at LIMIT 4 OFFSET 2');
SELECT plan_of('SELECT * FROM q ORDER BY due_at DESC NULLS LAST');
SELECT plan_of('SELECT * FROM q WHERE due_at > ''2100-01-01 00:10'' ORDER BY due_at NULLS FIRST');
SELECT plan_of('SELECT * FROM s ORDER BY due_at LIMIT 4');
SELECT bool_and(ok) FROM (SELECT due_at >= lag(due_at, 1, '-infinity') OVER () AS ok FROM (SELECT due_at FROM q ORDER BY due_at) x) y;
SELECT bool_and(ok) FROM (SELECT due_at <= lag(due_at, 1, 'infinity') OVER () AS ok FROM (SELECT due_at FROM s ORDER BY due_at DESC) x) y;
SELECT bool_and(ok) FROM (SELECT due_at >= lag(due_at, 1, '-infinity') OVER () AS ok
  FROM (SELECT due_at FROM s WHERE due_at IN ('2100-01-01 00:10', '2100-01-01 00:05', '2100-01-01 00:07') ORDER BY due_at) x) y;
SELECT array_agg(due_at::time) FROM (SELECT due_at FROM q WHERE due_at IN ('2100-01-01 00:10', '2100-01-01 00:05', '2100-01-01 00:07') ORDER BY due_at DESC) x;
SELECT same('SELECT due_at FROM s ORDER BY due_at DESC LIMIT 100 OFFSET 50');
SELECT same('SELECT due_at, row_number() OVER (ORDER BY due_at), rank() OVER (ORDER BY due_at DESC) FROM q');
SET enable_hashjoin = off;
SET enable_nestloop = off;
SELECT look('SELECT q.id, s.due_at FROM q JOIN s ON q.due_at = s.due_at WHERE q.payload = ''p7''');
RESET enable_hashjoin;
RESET enable_nestloop;
SELECT look('SELECT * FROM q ORDER BY payload, id LIMIT 3');
SELECT plan_of('SELECT * FROM q WHERE key = ''k200'' ORDER BY due_at');

-- aggregates that Redis answers
SELECT look('SELECT count(*) FROM q');
SELECT look('SELECT count(*) FROM s WHERE due_at >= ''2100-01-01 00:05'' AND due_at < ''2100-01-01 00:06''');
SELECT look('SELECT count(*) + 1, min(due_at), max(due_at) - min(due_at), count(id), now() > ''2000-01-01'' FROM q WHERE due_at > ''2100-01-01 00:05''');
SELECT look('SELECT min(due_at) FROM q');
SELECT look('SELECT max(due_at) FROM s WHERE shard = 2 AND due_at IN (''2100-01-01 00:05'', ''2100-01-01 00:06'')');
SELECT look('SELECT count(*), min(due_at) FROM q WHERE due_at < ''1990-01-01''');
SELECT same('SELECT count(*) FROM q WHERE due_at > NULL');
SELECT same('SELECT count(*) FROM s WHERE shard IN (1, 2)');
-- and those that it does not
SELECT look('SELECT count(*) FROM q WHERE payload = ''p3''');
SELECT look('SELECT count(*) FROM q WHERE key = ''k200''');
SELECT look('SELECT count(key) FROM q');
SELECT look('SELECT count(*) FILTER (WHERE due_at > ''2100-01-01 00:05'') FROM q');
SELECT look('SELECT count(DISTINCT due_at) FROM q');
SELECT look('SELECT count(*) FROM q HAVING count(*) > 5');
SELECT look('SELECT due_at, count(*) FROM q WHERE due_at < ''2100-01-01 00:00:03'' GROUP BY due_at');
SELECT look('SELECT count(*) FROM q WHERE random() < 2');
SELECT same('SELECT min(due_at), max(payload) FROM q');
SELECT same('SELECT count(*), count(*) OVER () FROM q');
SELECT same('SELECT count(*) FROM q, s WHERE q.due_at = s.due_at');

-- what must not be pushed: volatile, other operators, other collations, OR, other sides
SELECT look('SELECT * FROM q WHERE due_at < clock_timestamp() + interval ''1000 years'' AND payload = ''p3''');
SELECT look('SELECT * FROM q WHERE due_at < ''2100-01-01 00:00:02'' OR due_at > ''2100-01-01 00:16:38''');
SELECT look('SELECT * FROM q WHERE due_at <> ''2100-01-01 00:00:02'' AND payload = ''p3''');
SELECT look('SELECT * FROM q WHERE due_at IS DISTINCT FROM ''2100-01-01 00:00:02'' AND payload = ''p3''');
SELECT look('SELECT * FROM q WHERE due_at IS NULL');
SELECT look('SELECT * FROM q WHERE (due_at, payload) < (''2100-01-01 00:00:02'', ''p5'')');
SELECT look('SELECT * FROM q WHERE due_at::date = ''2100-01-02''');
SELECT look('SELECT * FROM q WHERE due_at + interval ''1 s'' < ''2100-01-01 00:00:02''');
SELECT look('SELECT * FROM q WHERE due_at < ALL (ARRAY[''2100-01-01 00:00:02'', ''2100-01-01 00:00:03'']::timestamptz[])');
SELECT look('SELECT * FROM q WHERE key LIKE ''k20%'' AND key < ''k205''');
SELECT look('SELECT * FROM q WHERE key IS NULL AND payload = ''p3''');
SELECT look('SELECT * FROM q WHERE payload = ''p3''');
SELECT look('SELECT * FROM q WHERE due_at = (SELECT max(at) FROM t WHERE t.key < q.key)');
CREATE COLLATION blind (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
SELECT look('SELECT * FROM q WHERE key COLLATE blind = ''K200''');
-- a key of a type that writes one value in several ways
CREATE FOREIGN TABLE q_int (key int, payload text) SERVER scan_pushdown OPTIONS (queue 'qi');
SELECT dq_offer_at('q_int', 'x', '2100-01-01', '042') <> '';
SELECT payload FROM q_int WHERE key = 42;
SELECT plan_of('SELECT payload FROM q_int WHERE key = 42');
CREATE FOREIGN TABLE q_varchar (key varchar, payload text) SERVER scan_pushdown OPTIONS (queue 'qi');
SELECT plan_of('SELECT payload FROM q_varchar WHERE key = ''042''');
SELECT payload FROM q_varchar WHERE key = '042';

-- H6 parameters, generic plans, a stable function at execution
PREPARE p(timestamptz, timestamptz) AS SELECT count(*), min(payload) FROM q WHERE due_at >= $1 AND due_at < $2;
SET plan_cache_mode = force_generic_plan;
SELECT plan_of('EXECUTE p(''2100-01-01 00:05'', ''2100-01-01 00:06'')');
EXECUTE p('2100-01-01 00:05', '2100-01-01 00:06');
EXECUTE p('2100-01-01 00:05', '2100-01-01 00:05');
EXECUTE p('2100-01-01 00:05', NULL);
EXECUTE p('2100-01-01 00:07', '2100-01-01 00:07:01');
ALTER FOREIGN TABLE q OPTIONS (ADD remove_timeout '1s');
EXECUTE p('2100-01-01 00:07', '2100-01-01 00:07:01');
PREPARE k(text[]) AS SELECT key, payload FROM q WHERE key = ANY ($1) ORDER BY key;
EXECUTE k('{k2,k4,k5}');
EXECUTE k('{k4}');
EXECUTE k(NULL);
RESET plan_cache_mode;
CREATE FUNCTION loops() RETURNS SETOF bigint LANGUAGE plpgsql AS $$
BEGIN
  FOR i IN 1..12 LOOP
    RETURN NEXT (SELECT count(*) FROM q WHERE due_at < '2100-01-01'::timestamptz + i * interval '1 s');
  END LOOP;
END $$;
SELECT array_agg(l) FROM loops() l;

-- H3 no columns at all, system columns, the whole row
SELECT count(*) FROM (SELECT FROM q) x;
SELECT count(*) FROM (SELECT FROM q) x;
SELECT EXISTS (SELECT FROM q JOIN s ON q.due_at = s.due_at);
SELECT tableoid::regclass, (q).payload, (q).shard, q IS NOT NULL FROM q WHERE key = 'k6';
SELECT count(q), count(q.*) FROM q;

-- what is fetched: as little as the query needs. Rows and round trips are shown.
CREATE FUNCTION fetched(sql text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  line text;
  result text;
BEGIN
  FOR line IN EXECUTE 'EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, SUMMARY OFF) ' || sql LOOP
    IF line ~ '(Round Trips|Tasks from Redis)' THEN
      result := concat_ws(', ', result, btrim(line));
    END IF;
  END LOOP;
  RETURN result;
END $$;
SELECT fetched('SELECT count(*) FROM q');
SELECT fetched('SELECT * FROM q ORDER BY due_at LIMIT 10');
SELECT fetched('SELECT * FROM q ORDER BY due_at DESC LIMIT 10 OFFSET 20');
SELECT fetched('SELECT * FROM s ORDER BY due_at LIMIT 10');
SELECT fetched('SELECT * FROM q LIMIT 1');
SELECT fetched('SELECT min(due_at) FROM q');
SELECT fetched('SELECT * FROM q WHERE due_at < ''2100-01-01 00:00:05''');
SELECT fetched('SELECT * FROM q WHERE due_at IN (''2100-01-01 00:00:05'', ''2100-01-01 00:10:05'')');
SELECT fetched('SELECT * FROM q WHERE key = ''k200''');
SELECT fetched('SELECT * FROM q WHERE due_at > NULL::timestamptz');
SELECT fetched('SELECT * FROM q WHERE due_at > ''2100-01-01 00:10'' AND due_at < ''2100-01-01 00:05''');
SELECT fetched('SELECT * FROM q WHERE EXISTS (SELECT FROM q)');
-- long payloads that nobody reads stay where they are
SELECT dq_create_queue('long');
SELECT count(dq_offer_at('long', repeat('x', 10000), '2100-01-01')) FROM generate_series(1, 20);
SELECT dq_sync();
CREATE FUNCTION bytes(sql text) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE line text;
BEGIN
  FOR line IN EXECUTE 'EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, SUMMARY OFF) ' || sql LOOP
    IF line ~ 'Bytes' THEN
      RETURN substring(line FROM '\d+');
    END IF;
  END LOOP;
END $$;
SELECT bytes('SELECT id, due_at FROM long') < 5000, bytes('SELECT payload FROM long') > 200000;
SELECT count(DISTINCT id), max(length(payload)) FROM long;

-- the outbox and the own transaction are part of every answer
CREATE FUNCTION count_all() RETURNS text LANGUAGE sql AS $$
  SELECT concat_ws(' ', (SELECT count(*) FROM q), (SELECT count(*) FROM q WHERE due_at > '2100-01-01 00:05'),
    (SELECT max(due_at)::time FROM q), (SELECT min(due_at) FROM q),
    (SELECT count(*) FROM (SELECT due_at >= lag(due_at) OVER () AS ok FROM (SELECT due_at FROM q ORDER BY due_at) x) y WHERE NOT ok),
    (SELECT string_agg(key, ',' ORDER BY key) FROM q WHERE key IN ('k2', 'k4', 'own')))
$$;
SELECT count_all();
BEGIN;
SELECT count(dq_offer_at('q', 'own', '2100-01-01 00:00Z'::timestamptz + i * interval '100 ms')) FROM generate_series(1, 30) i;
SELECT count_all();
SELECT dq_offer_at('q', 'own', '2100-01-01 02:00', 'own') <> '', dq_offer_at('q', 'own', '1990-01-01', 'k2') <> '';
SELECT dq_remove('q', 'k4');
SELECT count_all();
SELECT key, payload FROM q WHERE due_at > '2100-01-01 01:00' OR key = 'k2' ORDER BY 1;
SELECT payload FROM q ORDER BY due_at DESC LIMIT 1;
SELECT payload FROM q ORDER BY due_at LIMIT 1;
SELECT count(*) FROM q WHERE due_at < now();
SELECT n, payload FROM (VALUES (1, 'own'), (2, 'k2'), (3, 'k4')) v(n, k) LEFT JOIN q ON key = k ORDER BY n;
SELECT payload FROM q WHERE id = (SELECT id FROM q WHERE key = 'own');
ROLLBACK;
SELECT count_all();

\pset tuples_only off
\! "$REDIS_CLI" -s "$DQ_REDIS_SOCKET" EVAL "for _, k in ipairs(redis.call('KEYS', '*scan_pushdown:*')) do redis.call('DEL', k) end" 0 >/dev/null
DROP SERVER scan_pushdown CASCADE;
DROP SCHEMA scan_pushdown, scan_pushdown_copy CASCADE;
