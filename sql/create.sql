-- Creating queues: columns, names, tables that meet in Redis, dq_create_queue,
-- whose credentials count, who sees what.
SET client_min_messages = error;
SET datestyle = ISO;
SET intervalstyle = postgres;
CREATE EXTENSION IF NOT EXISTS dq_bridge;
CREATE SCHEMA "create";
SET search_path = "create", public;
CREATE FUNCTION try(sql text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE h text; d text;
BEGIN
  EXECUTE sql;
  RETURN 'ok';
EXCEPTION WHEN OTHERS THEN
  GET STACKED DIAGNOSTICS h = PG_EXCEPTION_HINT, d = PG_EXCEPTION_DETAIL;
  RETURN format('%s: %s | %s | %s', SQLSTATE, SQLERRM, d, h);
END $$;
SELECT current_setting('dq_test.socket') AS redis_socket \gset
\pset format unaligned
\pset tuples_only on

-- dq_create_queue needs a server: none, one, several
SELECT try($$SELECT dq_create_queue('q')$$);
CREATE SERVER create_a FOREIGN DATA WRAPPER dq_bridge OPTIONS (socket :'redis_socket', key_prefix 'create:');
SELECT dq_create_queue('q');
\d q
CREATE SERVER create_b FOREIGN DATA WRAPPER dq_bridge OPTIONS (socket :'redis_socket', database '1', key_prefix 'create:');
SELECT try($$SELECT dq_create_queue('q2')$$);
SELECT try($$SELECT dq_create_queue('q2', 'nowhere')$$);
CREATE FOREIGN DATA WRAPPER create_w;
CREATE SERVER create_c FOREIGN DATA WRAPPER create_w;
SELECT try($$SELECT dq_create_queue('q2', 'create_c')$$);
DROP FOREIGN DATA WRAPPER create_w CASCADE;

-- names as regclass reads them, options from jsonb, any payload type
SELECT dq_create_queue('"create"."My Queue"', 'create_a', 'jsonb', '{"shards": 3, "index": false, "queue": "it''s mine"}');
\d "My Queue"
SELECT dq_create_queue('Folded', 'create_a', 'bytea', '{"remove_timeout": "2s"}');
SELECT try($$SELECT dq_create_queue('q', 'create_a')$$);
SELECT try($$SELECT dq_create_queue(NULL, 'create_a')$$);
SELECT try($$SELECT dq_create_queue('', 'create_a')$$);
SELECT try($$SELECT dq_create_queue('nowhere.q', 'create_a')$$);
SELECT try($$SELECT dq_create_queue('a.b.c.d', 'create_a')$$);
SELECT try($$SELECT dq_create_queue('pg_temp.q', 'create_a')$$);
SELECT try($$SELECT dq_create_queue('q3', 'create_a', 'text', '[1]')$$);
SELECT try($$SELECT dq_create_queue('q3', 'create_a', 'text', '{"shards": null}')$$);
SELECT try($$SELECT dq_create_queue('q3', 'create_a', 'text', '{"shards": {"a": 1}}')$$);
SELECT try($$SELECT dq_create_queue('q3', 'create_a', 'text', '{"shardz": 1}')$$);
SELECT try($$SELECT dq_create_queue('q3', 'create_a', 'text', '{"queue": "x'') ; DROP TABLE q; --"}')$$);
SELECT redis_name FROM dq_queues WHERE queue = 'q3'::regclass;
-- a temporary table of the same name comes first in every search_path
CREATE TEMP TABLE q4 (a int);
SELECT dq_create_queue('q4', 'create_a') = to_regclass('"create".q4');
SELECT 'q4'::regclass = to_regclass('"create".q4');
-- NULL means the default
SELECT dq_create_queue('q5', 'create_a', NULL, NULL);

-- columns: any subset, any order, nothing else
SELECT try($$CREATE FOREIGN TABLE c1 (shard int, due_at timestamptz, payload json, key bigint, id text) SERVER create_a$$);
SELECT try($$CREATE FOREIGN TABLE c2 () SERVER create_a$$);
SELECT try($$CREATE FOREIGN TABLE c3 (id text, what text) SERVER create_a$$);
SELECT try($$CREATE FOREIGN TABLE c3 (id uuid) SERVER create_a$$);
SELECT try($$CREATE FOREIGN TABLE c3 (due_at timestamp) SERVER create_a$$);
SELECT try($$CREATE FOREIGN TABLE c3 (shard bigint) SERVER create_a$$);
SELECT try($$CREATE FOREIGN TABLE c3 (shard int GENERATED ALWAYS AS (1) STORED) SERVER create_a$$);
SELECT try($$ALTER FOREIGN TABLE c1 ADD COLUMN what text$$);
SELECT try($$ALTER TABLE c1 RENAME COLUMN payload TO body$$);
SELECT try($$ALTER TABLE c1 ALTER COLUMN due_at TYPE text$$);
SELECT try($$ALTER FOREIGN TABLE c1 DROP COLUMN shard$$);
SELECT try($$ALTER FOREIGN TABLE c1 ADD COLUMN shard int$$);

-- a rename moves nothing
ALTER FOREIGN TABLE c1 RENAME TO renamed;
SELECT queue, redis_name FROM dq_queues WHERE queue = 'renamed'::regclass;
ALTER TABLE renamed RENAME TO c1;

-- names: all keys of a shard in one hash slot, braces as Redisson
CREATE FUNCTION try_name(n text) RETURNS text LANGUAGE plpgsql AS $f$
DECLARE r text;
BEGIN
  r := try(format($$CREATE FOREIGN TABLE n (payload text) SERVER create_a OPTIONS (queue %L)$$, n));
  IF r = 'ok' THEN
    SELECT keys[1] INTO r FROM dq_queues WHERE queue = to_regclass('n');
    DROP FOREIGN TABLE n;
  END IF;
  RETURN r;
END $f$;
SELECT n, try_name(n) FROM unnest(ARRAY['plain', '{a}b', 'a{b}c', 'a{b', 'a}b', '{}', '{}a{b}', '{{a}}', 'ä €', 'a b:c']) n;
CREATE FOREIGN TABLE n (payload text) SERVER create_a OPTIONS (queue 'n{x}', shards '2');
SELECT unnest(keys) FROM dq_queues WHERE queue = 'n'::regclass;
DROP FOREIGN TABLE n;

-- tables that show the same queue
CREATE FOREIGN TABLE s1 (payload text) SERVER create_a OPTIONS (queue 's', shards '2');
SELECT try($$CREATE FOREIGN TABLE s2 (id text) SERVER create_a OPTIONS (queue 's')$$);
SELECT try($$CREATE FOREIGN TABLE s2 (id text) SERVER create_a OPTIONS (queue 's', shards '2', index 'off')$$);
SELECT try($$CREATE FOREIGN TABLE s2 (id text) SERVER create_a OPTIONS (queue 's', shards '2', role 'producer')$$);
SELECT try($$CREATE FOREIGN TABLE s2 (id text) SERVER create_a OPTIONS (queue 's#1')$$);
SELECT try($$CREATE FOREIGN TABLE s2 (id text) SERVER create_a OPTIONS (queue 's', shards '2')$$);
SELECT try($$ALTER FOREIGN TABLE s2 OPTIONS (ADD index 'off')$$);
CREATE ROLE regress_create_owner;
CREATE ROLE regress_create_user;
SELECT try($$ALTER FOREIGN TABLE s2 OWNER TO regress_create_owner$$);
-- as a restored dump does it: the superuser's first, then the owner's
DROP FOREIGN TABLE s2;
ALTER FOREIGN TABLE s1 OWNER TO regress_create_owner;
SELECT try($$CREATE FOREIGN TABLE s2 (id text) SERVER create_a OPTIONS (queue 's', shards '2')$$);
SELECT try($$ALTER FOREIGN TABLE s2 OPTIONS (ADD on_outage 'error')$$);
SELECT try($$ALTER FOREIGN TABLE s2 OWNER TO regress_create_owner$$);
GRANT USAGE ON FOREIGN SERVER create_a TO regress_create_user;
GRANT USAGE, CREATE ON SCHEMA "create" TO regress_create_owner, regress_create_user;
SET ROLE regress_create_user;
SELECT try($$CREATE FOREIGN TABLE s3 (id text) SERVER create_a OPTIONS (queue 's', shards '2')$$);
RESET ROLE;
REVOKE USAGE ON FOREIGN SERVER create_a FROM regress_create_user;
SELECT try($$ALTER FOREIGN TABLE s2 OPTIONS (ADD destination 'list')$$);
SELECT try($$ALTER FOREIGN TABLE s1 OPTIONS (ADD destination 'list')$$);
CREATE SERVER create_d FOREIGN DATA WRAPPER dq_bridge OPTIONS (socket :'redis_socket', key_prefix 'create:');
SELECT try($$CREATE FOREIGN TABLE s3 (id text) SERVER create_d OPTIONS (queue 's', shards '2')$$);
SELECT try($$CREATE FOREIGN TABLE s3 (id text) SERVER create_b OPTIONS (queue 's', shards '2')$$);
DROP SERVER create_d;

-- LIKE, inheritance and partitions are named like any other
CREATE TABLE parted (id text, payload text, due_at timestamptz) PARTITION BY RANGE (due_at);
CREATE FOREIGN TABLE part1 PARTITION OF parted DEFAULT SERVER create_a;
CREATE TABLE parent (payload text);
CREATE FOREIGN TABLE child (id text) INHERITS (parent) SERVER create_a;
SELECT queue, redis_name FROM dq_queues WHERE queue::text IN ('part1', 'child') ORDER BY 1;

-- created and rolled back, created twice
BEGIN;
CREATE FOREIGN TABLE again (payload text) SERVER create_a;
ROLLBACK;
CREATE FOREIGN TABLE again (payload text) SERVER create_a;
DROP FOREIGN TABLE again;
CREATE FOREIGN TABLE again (payload text) SERVER create_a;

-- what is no queue
SELECT try($$SELECT dq_offer('parent', 'x', '1s')$$);
SELECT try($$SELECT dq_offer(0::regclass, 'x', '1s')$$);
SELECT try($$SELECT dq_on_ddl()$$);

-- no way to lock
SELECT try($$SELECT * FROM q FOR UPDATE$$);
SELECT try($$SELECT * FROM parted FOR SHARE$$);

-- EXPLAIN connects to nothing: there is no Redis behind this server
CREATE SERVER create_e FOREIGN DATA WRAPPER dq_bridge OPTIONS (port '1');
SELECT dq_create_queue('far', 'create_e', options => '{"shards": 2}');
EXPLAIN (VERBOSE, COSTS OFF) SELECT id FROM far WHERE key = 'k';

-- servers that no superuser owns need a password, and use no socket
ALTER SERVER create_e OWNER TO regress_create_owner;
SELECT try($$SELECT count(*) FROM far$$);
CREATE USER MAPPING FOR CURRENT_USER SERVER create_e OPTIONS (username 'u');
SELECT try($$SELECT count(*) FROM far$$);
ALTER SERVER create_e OPTIONS (ADD socket '/nonexistent/redis.sock');
SELECT try($$SELECT count(*) FROM far$$);
ALTER SERVER create_e OPTIONS (DROP socket, ADD password_required 'false');
SELECT left(try($$SELECT count(*) FROM far$$), 5);

-- dq_queues shows whoever has a right on the queue, and pg_monitor, everything
GRANT USAGE ON FOREIGN SERVER create_a TO regress_create_owner;
SET ROLE regress_create_owner;
SELECT dq_create_queue('owned', 'create_a');
RESET ROLE;
GRANT UPDATE ON owned TO regress_create_user;
GRANT SELECT ON q TO regress_create_user;
SET ROLE regress_create_user;
SELECT queue, options FROM (SELECT queue, on_outage AS options FROM dq_queues) v ORDER BY queue::text;
SELECT try($$SELECT dq_create_queue('mine', 'create_a')$$);
RESET ROLE;
GRANT pg_monitor TO regress_create_user;
SET ROLE regress_create_user;
SELECT count(*) > 10 FROM dq_queues;
RESET ROLE;

-- nothing in the event triggers looks up a name
CREATE SCHEMA evil;
CREATE FUNCTION evil.eq(text, text) RETURNS bool LANGUAGE plpgsql AS $$ BEGIN RAISE 'caught'; END $$;
CREATE OPERATOR evil.= (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.eq);
CREATE FUNCTION evil.pg_event_trigger_ddl_commands() RETURNS TABLE (classid oid, objid oid)
  LANGUAGE plpgsql AS $$ BEGIN RAISE 'caught'; END $$;
CREATE FUNCTION evil.pg_event_trigger_dropped_objects() RETURNS TABLE (classid oid, objid oid, object_type text)
  LANGUAGE plpgsql AS $$ BEGIN RAISE 'caught'; END $$;
SET search_path = evil, pg_catalog, "create", public;
SELECT dq_create_queue('"create".attacked', 'create_a', 'pg_catalog.text');
SELECT redis_name FROM public.dq_queues WHERE queue OPERATOR(pg_catalog.=) 'attacked'::pg_catalog.regclass;
ALTER FOREIGN TABLE attacked OPTIONS (ADD index 'off');
DROP FOREIGN TABLE attacked;
SET search_path = "create", public;

-- the extension can go and come back in one session, in another schema
BEGIN;
DROP EXTENSION dq_bridge CASCADE;
CREATE SCHEMA elsewhere;
CREATE EXTENSION dq_bridge SCHEMA elsewhere;
CREATE SERVER create_f FOREIGN DATA WRAPPER dq_bridge OPTIONS (socket :'redis_socket');
SELECT elsewhere.dq_create_queue('moved');
SELECT elsewhere.dq_offer('moved', 'x'::text, '1 hour') ~ '^[0-9]+-[0-9]+$';
ROLLBACK;
SELECT dq_offer('q', 'x'::text, '1 hour') ~ '^[0-9]+-[0-9]+$';

\pset tuples_only off
DROP SERVER create_a, create_b, create_e CASCADE;
DROP SCHEMA "create", evil CASCADE;
DROP ROLE regress_create_owner, regress_create_user;
