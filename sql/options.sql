-- Options: known names, contexts, units, ranges; what is not in force yet.
SET client_min_messages = error;
SET datestyle = ISO;
SET intervalstyle = postgres;
CREATE EXTENSION IF NOT EXISTS dq_bridge;
CREATE SCHEMA options;
SET search_path = options, public;

-- error code, message and hint of a statement, in one line
CREATE FUNCTION try(sql text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE h text;
BEGIN
  EXECUTE sql;
  RETURN 'ok';
EXCEPTION WHEN OTHERS THEN
  GET STACKED DIAGNOSTICS h = PG_EXCEPTION_HINT;
  RETURN format('%s: %s | %s', SQLSTATE, SQLERRM, h);
END $$;
-- the same for one option of a server, a user mapping and a queue
CREATE FUNCTION on_server(option text, value text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE r text;
BEGIN
  r := try(format('CREATE SERVER options_s FOREIGN DATA WRAPPER dq_bridge OPTIONS (%I %L)', option, value));
  DROP SERVER IF EXISTS options_s;
  RETURN r;
END $$;
SELECT current_setting('dq_test.socket') AS redis_socket \gset
CREATE SERVER options_fixed FOREIGN DATA WRAPPER dq_bridge OPTIONS (socket :'redis_socket', key_prefix 'options:');
CREATE FUNCTION on_mapping(option text, value text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE r text;
BEGIN
  r := try(format('CREATE USER MAPPING FOR PUBLIC SERVER options_fixed OPTIONS (%I %L)', option, value));
  DROP USER MAPPING IF EXISTS FOR PUBLIC SERVER options_fixed;
  RETURN r;
END $$;
CREATE FUNCTION on_queue(option text, value text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE r text;
BEGIN
  r := try(format('CREATE FOREIGN TABLE options_q (payload text) SERVER options_fixed OPTIONS (%I %L)', option, value));
  DROP FOREIGN TABLE IF EXISTS options_q;
  RETURN r;
END $$;
\pset format unaligned
\pset tuples_only on

-- unknown names: the closest, the right place, or all
SELECT on_server('hots', 'h');
SELECT on_server('keyprefix', 'h');
SELECT on_server('zzzzzzzz', 'h');
SELECT on_server('password', 'secret');
SELECT on_server('user', 'joe');
SELECT on_server('shards', '2');
SELECT on_mapping('user', 'joe');
SELECT on_mapping('host', 'h');
SELECT on_queue('shard', '2');
SELECT on_queue('port', '1');
SELECT try('CREATE FOREIGN DATA WRAPPER options_w VALIDATOR dq_fdw_validator OPTIONS (host ''h'')');
SELECT try('CREATE FOREIGN TABLE options_q (payload text OPTIONS (on_eror ''null'')) SERVER options_fixed');

-- values: integers, durations, switches, choices
SELECT v, on_server('port', v) FROM unnest('{6379,0,65536,-1,0x10,63a,"",1e3,99999999999999999999}'::text[]) v;
SELECT v, on_server('database', v) FROM unnest('{0,15,-1}'::text[]) v;
SELECT v, on_server('connect_timeout', v) FROM unnest('{2s,500ms,1500,"2 s",1min,1.5s,0,-1s,2 parsecs,s,1S,25d,NaN,24.8d}'::text[]) v;
SELECT v, on_server('replay_window', v) FROM unnest('{24h,400d,0,1000000d}'::text[]) v;
SELECT v, on_server('scan_interval', v) FROM unnest('{1s,9ms,10ms,2d}'::text[]) v;
SELECT v, on_server('password_required', v) FROM unnest('{true,false,off,maybe}'::text[]) v;
SELECT v, on_queue('index', v) FROM unnest('{on,off,true,0,nope}'::text[]) v;
SELECT v, on_queue('role', v) FROM unnest('{owner,producer,Owner,both}'::text[]) v;
SELECT v, on_queue('shards', v) FROM unnest('{1,16,0,1025}'::text[]) v;
SELECT v, on_queue('destination', v) FROM unnest('{list,none,stream,table}'::text[]) v;
SELECT v, on_queue('on_outage', v) FROM unnest('{defer,error,"error ",""}'::text[]) v;
SELECT v, on_queue('on_data_loss', v) FROM unnest('{stop,continue,wait}'::text[]) v;
SELECT v, on_queue('remove_timeout', v) FROM unnest('{500ms,0,-1}'::text[]) v;

-- empty values and the shape of text
SELECT on_server('host', ''), on_server('key_prefix', ''), on_queue('queue', '');
SELECT on_server('host', '/var/run/redis.sock');
SELECT on_server('socket', 'redis.sock');
SELECT on_server('socket', '/' || repeat('x', 107));
SELECT on_mapping('password', 'p@:/ "\''%');

-- the default of an option that does nothing yet is accepted, nothing else is
SELECT o, d, on_server(o, d), v, on_server(o, v) FROM (VALUES
  ('mode', 'standalone', 'cluster'), ('tls', 'off', 'verify-full'),
  ('wait_replicas', '0', '1'), ('wait_fsync', 'off', 'on')) t(o, d, v);
SELECT o, on_server(o, 'x') FROM unnest('{nodes,master_name,tls_ca_file,tls_cert_file,tls_key_file}'::text[]) o;
SELECT o, on_mapping(o, 'x') FROM unnest('{sentinel_username,sentinel_password}'::text[]) o;
SELECT o, d, on_queue(o, d), v, on_queue(o, v) FROM (VALUES
  ('list', 'off', 'on'), ('codec', 'raw', 'kryo5'),
  ('stream_maxlen', '0', '1000'), ('concurrency', '1', '2'), ('max_attempts', '20', '3'),
  ('backoff', '1000ms', '2s'), ('backoff_max', '60min', '1d'),
  ('handler_timeout', '300s', '1min'), ('rate', '0', '10'),
  ('contents', 'pending', 'ready')) t(o, d, v);
SELECT o, on_queue(o, 'x') FROM unnest('{sink,handler,notify}'::text[]) o;
SELECT on_queue('transactional', 'off'), on_queue('transactional', 'maybe');
SELECT v, try(format('CREATE FOREIGN TABLE options_%s (payload text OPTIONS (on_error %L)) SERVER options_fixed', v, v))
  FROM unnest(ARRAY['null', 'error', 'skip']) v;
DROP FOREIGN TABLE options_null, options_error;

-- ALTER is checked as well, and what is fixed at creation stays
CREATE FOREIGN TABLE options_q (payload text) SERVER options_fixed OPTIONS (shards '2');
SELECT try('ALTER FOREIGN TABLE options_q OPTIONS (SET shards ''3'')');
SELECT try('ALTER TABLE options_q OPTIONS (SET queue ''other'')');
SELECT try('ALTER FOREIGN TABLE options_q OPTIONS (DROP queue)');
SELECT try('ALTER SERVER options_fixed OPTIONS (SET key_prefix ''other:'')');
SELECT try('ALTER SERVER options_fixed OPTIONS (ADD command_timeout ''7s'')');
SELECT try('ALTER FOREIGN TABLE options_q OPTIONS (ADD remove_timeout ''2s'', ADD on_outage ''error'')');
SELECT shards, remove_timeout, on_outage, redis_name FROM dq_queues WHERE queue = 'options_q'::regclass;
SELECT try('ALTER FOREIGN TABLE options_q OPTIONS (SET remove_timeout ''2 days'')');
SELECT try('ALTER FOREIGN TABLE options_q OPTIONS (DROP remove_timeout)');
SELECT remove_timeout FROM dq_queues WHERE queue = 'options_q'::regclass;

-- what only a superuser may do
CREATE ROLE regress_options;
GRANT USAGE ON FOREIGN DATA WRAPPER dq_bridge TO regress_options;
GRANT CREATE, USAGE ON SCHEMA options TO regress_options;
SET ROLE regress_options;
SELECT on_server('socket', '/tmp/redis.sock');
SELECT on_server('password_required', 'false');
SELECT on_server('password_required', 'true'), on_server('host', 'h');
RESET ROLE;

\pset tuples_only off
DROP SERVER options_fixed CASCADE;
DROP SCHEMA options CASCADE;
REVOKE ALL ON FOREIGN DATA WRAPPER dq_bridge FROM regress_options;
DROP ROLE regress_options;
