/* dq_bridge 0.1.0 */

-- complain if the script is sourced in psql, rather than via CREATE EXTENSION
\echo Use "CREATE EXTENSION dq_bridge" to load this file. \quit

-- ---------------------------------------------------------------------------
-- The wrapper
-- ---------------------------------------------------------------------------

CREATE FUNCTION @extschema@.dq_fdw_handler()
RETURNS pg_catalog.fdw_handler
AS 'MODULE_PATHNAME' LANGUAGE C STRICT;
COMMENT ON FUNCTION @extschema@.dq_fdw_handler() IS
'handler of foreign-data wrapper dq_bridge';

CREATE FUNCTION @extschema@.dq_fdw_validator(pg_catalog.text[], pg_catalog.oid)
RETURNS pg_catalog.void
AS 'MODULE_PATHNAME' LANGUAGE C STRICT;
COMMENT ON FUNCTION @extschema@.dq_fdw_validator(pg_catalog.text[], pg_catalog.oid) IS
'checks the options of dq_bridge servers, user mappings, foreign tables and columns';

CREATE FOREIGN DATA WRAPPER dq_bridge
  HANDLER @extschema@.dq_fdw_handler
  VALIDATOR @extschema@.dq_fdw_validator;
COMMENT ON FOREIGN DATA WRAPPER dq_bridge IS
'queues of delayed tasks in Redis; a queue is a foreign table';

-- ---------------------------------------------------------------------------
-- What the extension keeps. Rows are written by the library, past the executor;
-- none of it is for reading by applications.
-- ---------------------------------------------------------------------------

-- Who this database is towards Redis. Dumped, so that a restored copy shows
-- itself: the row's own place in the heap (born = its xmin) proves it original.
CREATE TABLE @extschema@.dq_source (
  no pg_catalog.int4 NOT NULL,
  source pg_catalog.text NOT NULL PRIMARY KEY,
  node pg_catalog.int4 NOT NULL,
  sysid pg_catalog.text NOT NULL,
  dboid pg_catalog.oid NOT NULL,
  outbox pg_catalog.oid NOT NULL,
  born pg_catalog.xid8 NOT NULL,
  adopted_from pg_catalog.int4 NOT NULL
) WITH (autovacuum_enabled = off);
COMMENT ON TABLE @extschema@.dq_source IS
'identities of this database towards Redis; the one in force is the row that was born here';

-- Starts of this server, as far as its workers saw them: a copied data directory
-- does not share what its original writes later.
CREATE TABLE @extschema@.dq_lives (
  life pg_catalog.text NOT NULL PRIMARY KEY,
  started pg_catalog.timestamptz NOT NULL,
  tli pg_catalog.int4 NOT NULL,
  lsn pg_catalog.int8 NOT NULL          -- earlier lives ended here
);
COMMENT ON TABLE @extschema@.dq_lives IS
'starts of this server, by which a copied data directory is told from its original';

-- Shards of queues, numbered; what the outbox rows refer to.
CREATE TABLE @extschema@.dq_shards (
  no pg_catalog.int4 NOT NULL PRIMARY KEY,
  server pg_catalog.oid NOT NULL,
  name pg_catalog.bytea NOT NULL,
  shard pg_catalog.int4 NOT NULL,
  shards pg_catalog.int4 NOT NULL,
  indexed pg_catalog.bool NOT NULL,
  relid pg_catalog.oid NOT NULL,        -- of the table that registered it
  UNIQUE (server, name)
);
COMMENT ON TABLE @extschema@.dq_shards IS
'every shard of every queue that this database has used, by number';

CREATE SEQUENCE @extschema@.dq_shards_no AS pg_catalog.int4;
COMMENT ON SEQUENCE @extschema@.dq_shards_no IS 'numbers of dq_shards';

CREATE SEQUENCE @extschema@.dq_outbox_seq CACHE 1;
COMMENT ON SEQUENCE @extschema@.dq_outbox_seq IS
'call order of operations, and the sequence part of task ids';

-- The outbox: three tables in turn, append-only, emptied as a whole.
CREATE TABLE @extschema@.dq_outbox_0 (
  xid pg_catalog.xid8 NOT NULL,
  seq pg_catalog.int8 NOT NULL,
  due pg_catalog.int8 NOT NULL,
  id pg_catalog.int8 NOT NULL,
  at pg_catalog.timestamptz NOT NULL,
  shard pg_catalog.int4 NOT NULL,
  tli pg_catalog.int4 NOT NULL,
  source pg_catalog.int4 NOT NULL,
  place pg_catalog.int4 NOT NULL,
  server pg_catalog.oid NOT NULL,
  op "char" NOT NULL,
  key pg_catalog.bytea,
  payload pg_catalog.bytea,
  member pg_catalog.bytea,
  token pg_catalog.bytea
) WITH (autovacuum_enabled = off, toast.autovacuum_enabled = off);
CREATE INDEX dq_outbox_0_idx ON @extschema@.dq_outbox_0 (shard, xid, seq);
CREATE TABLE @extschema@.dq_outbox_1 (LIKE @extschema@.dq_outbox_0)
  WITH (autovacuum_enabled = off, toast.autovacuum_enabled = off);
CREATE INDEX dq_outbox_1_idx ON @extschema@.dq_outbox_1 (shard, xid, seq);
CREATE TABLE @extschema@.dq_outbox_2 (LIKE @extschema@.dq_outbox_0)
  WITH (autovacuum_enabled = off, toast.autovacuum_enabled = off);
CREATE INDEX dq_outbox_2_idx ON @extschema@.dq_outbox_2 (shard, xid, seq);
COMMENT ON TABLE @extschema@.dq_outbox_0 IS 'committed operations on their way to Redis (one of three in turn)';
COMMENT ON TABLE @extschema@.dq_outbox_1 IS 'committed operations on their way to Redis (one of three in turn)';
COMMENT ON TABLE @extschema@.dq_outbox_2 IS 'committed operations on their way to Redis (one of three in turn)';

-- Which outbox table takes new rows; only the newest row counts.
CREATE TABLE @extschema@.dq_rotation (
  round pg_catalog.int8 NOT NULL PRIMARY KEY,
  since pg_catalog.timestamptz NOT NULL,
  tbl pg_catalog.int4 NOT NULL,
  emptied pg_catalog.int4 NOT NULL      -- table emptied in this round; -2-n: n was left for tbl
);
COMMENT ON TABLE @extschema@.dq_rotation IS
'which outbox table takes new rows, and which were emptied';

-- What emptied tables held, per shard: missing if Redis falls back behind it.
CREATE TABLE @extschema@.dq_emptied (
  shard pg_catalog.int4 NOT NULL,
  round pg_catalog.int8 NOT NULL,       -- dq_rotation.round
  source pg_catalog.int4 NOT NULL,      -- dq_source.no
  complete pg_catalog.text NOT NULL,    -- snapshot that sees all of it
  tasks pg_catalog.int8 NOT NULL,       -- offers
  due pg_catalog.int8 NOT NULL,         -- the largest of theirs
  any_due pg_catalog.int8 NOT NULL,     -- of removed and replaced tasks as well
  last_seq pg_catalog.int8 NOT NULL,    -- nothing in it took what was offered after this
  newest pg_catalog.timestamptz NOT NULL,
  PRIMARY KEY (shard, round)
);
COMMENT ON TABLE @extschema@.dq_emptied IS
'per shard: what the emptied outbox tables held';

-- Losses that could not be made good, until dq_resume accepts them.
CREATE TABLE @extschema@.dq_losses (
  shard pg_catalog.int4 NOT NULL PRIMARY KEY,
  source pg_catalog.int4 NOT NULL,      -- dq_source.no
  since pg_catalog.timestamptz NOT NULL,
  tasks pg_catalog.int8 NOT NULL,
  newest pg_catalog.timestamptz NOT NULL,
  due pg_catalog.int8 NOT NULL
);
COMMENT ON TABLE @extschema@.dq_losses IS
'per shard: tasks that Redis has lost and that the outbox does not hold any more';

-- What is known to have reached Redis and to have left it, per shard; at most one
-- write a second. The number is another each time, so that the key's index need
-- not look at dead versions, which pile up while somebody holds a snapshot.
CREATE TABLE @extschema@.dq_marks (
  shard pg_catalog.int4 NOT NULL,
  no pg_catalog.int8 NOT NULL,          -- counted up
  source pg_catalog.int4 NOT NULL,      -- dq_source.no
  applied pg_catalog.text NOT NULL,     -- snapshot whose operations are all in Redis
  settled pg_catalog.text NOT NULL,     -- snapshot A, '' none: of the tasks it sees ...
  due pg_catalog.int8 NOT NULL,         -- ... those due by then have been delivered
  producers pg_catalog.text NOT NULL,   -- other sources that fed the shard then
  PRIMARY KEY (shard, no)
);
COMMENT ON TABLE @extschema@.dq_marks IS
'per shard: which operations were all in Redis, and which of their tasks are delivered';

CREATE TABLE @extschema@.dq_pauses (
  server pg_catalog.oid NOT NULL,
  name pg_catalog.bytea NOT NULL,
  since pg_catalog.timestamptz NOT NULL,
  PRIMARY KEY (server, name)
);
COMMENT ON TABLE @extschema@.dq_pauses IS 'queues that dq_pause has paused';

-- Batches of due tasks that Redis lends to this database: per shard the last one whose
-- effects are committed. The number is another each time, as in dq_marks.
CREATE TABLE @extschema@.dq_claims (
  shard pg_catalog.int4 NOT NULL,
  number pg_catalog.int8 NOT NULL,
  nonce pg_catalog.text NOT NULL,
  suspect pg_catalog.int8 NOT NULL,     -- tasks due by then (ms) are looked up in dq_done
  skip pg_catalog.text NOT NULL,        -- places of its tasks that have no copy in the list
  PRIMARY KEY (shard, number)
);
COMMENT ON TABLE @extschema@.dq_claims IS
'per shard: the last batch of due tasks whose effects are committed here';

-- Which tasks have had their effect, so that Redis cannot bring them back.
CREATE TABLE @extschema@.dq_done (
  shard pg_catalog.int4 NOT NULL,
  bucket pg_catalog.int8 NOT NULL,      -- due in ms, divided by 4096
  xid pg_catalog.xid8 NOT NULL,
  at pg_catalog.timestamptz NOT NULL,
  tli pg_catalog.int4 NOT NULL,
  tasks pg_catalog.bytea NOT NULL,
  PRIMARY KEY (shard, bucket, xid)      -- a transaction has one batch of a shard
);
COMMENT ON TABLE @extschema@.dq_done IS
'tasks that were delivered into this database, kept for the replay window';

-- Tasks that could not be delivered. Its rows are data of the user's: dumped.
CREATE TABLE @extschema@.dq_dead_letters (
  queue pg_catalog.regclass NOT NULL,
  id pg_catalog.text NOT NULL,
  key pg_catalog.text,
  payload pg_catalog.bytea NOT NULL,
  due_at pg_catalog.timestamptz NOT NULL,
  died_at pg_catalog.timestamptz NOT NULL,
  attempts pg_catalog.int4 NOT NULL,
  sqlstate pg_catalog.text NOT NULL,
  error pg_catalog.text NOT NULL
);
CREATE INDEX dq_dead_letters_idx ON @extschema@.dq_dead_letters (queue, id);
COMMENT ON TABLE @extschema@.dq_dead_letters IS
'tasks that a sink could not take, with their bytes and the error; see dq_retry, dq_discard';
ALTER TABLE @extschema@.dq_dead_letters ENABLE ROW LEVEL SECURITY;
CREATE POLICY dq_dead_letters_owner ON @extschema@.dq_dead_letters FOR SELECT
  USING (pg_catalog.pg_has_role('pg_monitor'::pg_catalog.name, 'USAGE'::pg_catalog.text)
    OR EXISTS (SELECT FROM pg_catalog.pg_class c
               WHERE c.oid OPERATOR(pg_catalog.=) queue::pg_catalog.oid
                 AND pg_catalog.pg_has_role(c.relowner, 'USAGE'::pg_catalog.text)));
COMMENT ON POLICY dq_dead_letters_owner ON @extschema@.dq_dead_letters IS
'the owner of the queue, and pg_monitor';
GRANT SELECT ON @extschema@.dq_dead_letters TO PUBLIC;

SELECT pg_catalog.pg_extension_config_dump('@extschema@.dq_source', '');
SELECT pg_catalog.pg_extension_config_dump('@extschema@.dq_dead_letters', '');

-- Rows of these tables are this database's own: a logical subscriber that has
-- the extension must not get them (inserts are not decoded at all).
ALTER TABLE @extschema@.dq_source REPLICA IDENTITY NOTHING;
ALTER TABLE @extschema@.dq_lives REPLICA IDENTITY NOTHING;
ALTER TABLE @extschema@.dq_shards REPLICA IDENTITY NOTHING;
ALTER TABLE @extschema@.dq_rotation REPLICA IDENTITY NOTHING;
ALTER TABLE @extschema@.dq_emptied REPLICA IDENTITY NOTHING;
ALTER TABLE @extschema@.dq_losses REPLICA IDENTITY NOTHING;
ALTER TABLE @extschema@.dq_marks REPLICA IDENTITY NOTHING;
ALTER TABLE @extschema@.dq_pauses REPLICA IDENTITY NOTHING;
ALTER TABLE @extschema@.dq_claims REPLICA IDENTITY NOTHING;
ALTER TABLE @extschema@.dq_done REPLICA IDENTITY NOTHING;
ALTER TABLE @extschema@.dq_dead_letters REPLICA IDENTITY NOTHING;

-- ---------------------------------------------------------------------------
-- Offering
-- ---------------------------------------------------------------------------

CREATE FUNCTION @extschema@.dq_offer(
  queue pg_catalog.regclass, payload pg_catalog.text,
  delay pg_catalog.interval DEFAULT '0'::pg_catalog.interval,
  key anycompatible DEFAULT NULL::pg_catalog.text)
RETURNS pg_catalog.text
AS 'MODULE_PATHNAME', 'dq_offer' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_offer(pg_catalog.regclass, pg_catalog.text, pg_catalog.interval, anycompatible) IS
'schedule a task, due after delay; returns its id';

CREATE FUNCTION @extschema@.dq_offer(
  queue pg_catalog.regclass, payload anyelement,
  delay pg_catalog.interval DEFAULT '0'::pg_catalog.interval,
  key anycompatible DEFAULT NULL::pg_catalog.text)
RETURNS pg_catalog.text
AS 'MODULE_PATHNAME', 'dq_offer' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_offer(pg_catalog.regclass, anyelement, pg_catalog.interval, anycompatible) IS
'schedule a task, due after delay; returns its id';

CREATE FUNCTION @extschema@.dq_offer_at(
  queue pg_catalog.regclass, payload pg_catalog.text,
  due_at pg_catalog.timestamptz,
  key anycompatible DEFAULT NULL::pg_catalog.text)
RETURNS pg_catalog.text
AS 'MODULE_PATHNAME', 'dq_offer_at' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_offer_at(pg_catalog.regclass, pg_catalog.text, pg_catalog.timestamptz, anycompatible) IS
'schedule a task, due at an instant (the past: at once); returns its id';

CREATE FUNCTION @extschema@.dq_offer_at(
  queue pg_catalog.regclass, payload anyelement,
  due_at pg_catalog.timestamptz,
  key anycompatible DEFAULT NULL::pg_catalog.text)
RETURNS pg_catalog.text
AS 'MODULE_PATHNAME', 'dq_offer_at' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_offer_at(pg_catalog.regclass, anyelement, pg_catalog.timestamptz, anycompatible) IS
'schedule a task, due at an instant (the past: at once); returns its id';

-- ---------------------------------------------------------------------------
-- Cancelling and moving
-- ---------------------------------------------------------------------------

CREATE FUNCTION @extschema@.dq_remove(queue pg_catalog.regclass, element pg_catalog.text)
RETURNS pg_catalog.bool
AS 'MODULE_PATHNAME', 'dq_remove' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_remove(pg_catalog.regclass, pg_catalog.text) IS
'cancel a pending task by key, id or payload; true: it will not fire, false: not pending, NULL: no certain answer, recorded';

CREATE FUNCTION @extschema@.dq_remove(queue pg_catalog.regclass, element anyelement)
RETURNS pg_catalog.bool
AS 'MODULE_PATHNAME', 'dq_remove' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_remove(pg_catalog.regclass, anyelement) IS
'cancel a pending task by key, id or payload; true: it will not fire, false: not pending, NULL: no certain answer, recorded';

CREATE FUNCTION @extschema@.dq_reschedule(queue pg_catalog.regclass, element pg_catalog.text, delay pg_catalog.interval)
RETURNS pg_catalog.text
AS 'MODULE_PATHNAME', 'dq_reschedule' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_reschedule(pg_catalog.regclass, pg_catalog.text, pg_catalog.interval) IS
'move a pending task, found by key, id or payload, to another instant; returns its new id, NULL: not pending';

CREATE FUNCTION @extschema@.dq_reschedule(queue pg_catalog.regclass, element anyelement, delay pg_catalog.interval)
RETURNS pg_catalog.text
AS 'MODULE_PATHNAME', 'dq_reschedule' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_reschedule(pg_catalog.regclass, anyelement, pg_catalog.interval) IS
'move a pending task, found by key, id or payload, to another instant; returns its new id, NULL: not pending';

CREATE FUNCTION @extschema@.dq_reschedule_at(queue pg_catalog.regclass, element pg_catalog.text, due_at pg_catalog.timestamptz)
RETURNS pg_catalog.text
AS 'MODULE_PATHNAME', 'dq_reschedule_at' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_reschedule_at(pg_catalog.regclass, pg_catalog.text, pg_catalog.timestamptz) IS
'move a pending task, found by key, id or payload, to another instant; returns its new id, NULL: not pending';

CREATE FUNCTION @extschema@.dq_reschedule_at(queue pg_catalog.regclass, element anyelement, due_at pg_catalog.timestamptz)
RETURNS pg_catalog.text
AS 'MODULE_PATHNAME', 'dq_reschedule_at' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_reschedule_at(pg_catalog.regclass, anyelement, pg_catalog.timestamptz) IS
'move a pending task, found by key, id or payload, to another instant; returns its new id, NULL: not pending';

-- ---------------------------------------------------------------------------
-- Taking due tasks
-- ---------------------------------------------------------------------------

CREATE FUNCTION @extschema@.dq_poll(
  queue pg_catalog.regclass, max pg_catalog.int8 DEFAULT 1,
  wait pg_catalog.interval DEFAULT '0'::pg_catalog.interval)
RETURNS SETOF pg_catalog.text
AS 'MODULE_PATHNAME', 'dq_poll' LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 10;
COMMENT ON FUNCTION @extschema@.dq_poll(pg_catalog.regclass, pg_catalog.int8, pg_catalog.interval) IS
'take up to max due tasks from the ready list, waiting for the first; consumed by commit, put back in front by rollback';

CREATE FUNCTION @extschema@.dq_poll_bytea(
  queue pg_catalog.regclass, max pg_catalog.int8 DEFAULT 1,
  wait pg_catalog.interval DEFAULT '0'::pg_catalog.interval)
RETURNS SETOF pg_catalog.bytea
AS 'MODULE_PATHNAME', 'dq_poll_bytea' LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 10;
COMMENT ON FUNCTION @extschema@.dq_poll_bytea(pg_catalog.regclass, pg_catalog.int8, pg_catalog.interval) IS
'the same as dq_poll, with payloads as they are';

CREATE FUNCTION @extschema@.dq_transfer(queue pg_catalog.regclass, max pg_catalog.int8 DEFAULT 100)
RETURNS pg_catalog.int8
AS 'MODULE_PATHNAME', 'dq_transfer' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_transfer(pg_catalog.regclass, pg_catalog.int8) IS
'move due tasks to the ready list by hand; returns how many';

CREATE FUNCTION @extschema@.dq_sync(
  queue pg_catalog.regclass DEFAULT NULL,
  timeout pg_catalog.interval DEFAULT '10s'::pg_catalog.interval)
RETURNS pg_catalog.bool
AS 'MODULE_PATHNAME', 'dq_sync' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_sync(pg_catalog.regclass, pg_catalog.interval) IS
'wait until all that was committed before the call is in Redis; false: not within timeout';

CREATE FUNCTION @extschema@.dq_pause(queue pg_catalog.regclass)
RETURNS pg_catalog.void
AS 'MODULE_PATHNAME', 'dq_pause' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_pause(pg_catalog.regclass) IS
'due tasks wait from the commit on; offers, removes and reads go on';

CREATE FUNCTION @extschema@.dq_resume(queue pg_catalog.regclass)
RETURNS pg_catalog.void
AS 'MODULE_PATHNAME', 'dq_resume' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_resume(pg_catalog.regclass) IS
'end a pause, and accept a loss of data: due tasks go on';

CREATE FUNCTION @extschema@.dq_retry(queue pg_catalog.regclass, id pg_catalog.text DEFAULT NULL)
RETURNS pg_catalog.int8
AS 'MODULE_PATHNAME', 'dq_retry' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_retry(pg_catalog.regclass, pg_catalog.text) IS
'offer dead letters of a queue (id: only that one) anew, due at once; returns how many';

CREATE FUNCTION @extschema@.dq_discard(queue pg_catalog.regclass, id pg_catalog.text DEFAULT NULL)
RETURNS pg_catalog.int8
AS 'MODULE_PATHNAME', 'dq_discard' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_discard(pg_catalog.regclass, pg_catalog.text) IS
'forget dead letters of a queue (id: only that one); returns how many';

-- ---------------------------------------------------------------------------
-- Queues
-- ---------------------------------------------------------------------------

CREATE FUNCTION @extschema@.dq_create_queue(
  name pg_catalog.text, server pg_catalog.name DEFAULT NULL,
  payload_type pg_catalog.regtype DEFAULT 'pg_catalog.text'::pg_catalog.regtype,
  options pg_catalog.jsonb DEFAULT '{}'::pg_catalog.jsonb)
RETURNS pg_catalog.regclass
AS 'MODULE_PATHNAME', 'dq_create_queue' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_create_queue(pg_catalog.text, pg_catalog.name, pg_catalog.regtype, pg_catalog.jsonb) IS
'create the foreign table of a queue with all columns';

CREATE FUNCTION @extschema@.dq_adopt(server pg_catalog.name DEFAULT NULL, force pg_catalog.bool DEFAULT false)
RETURNS SETOF pg_catalog.regclass
AS 'MODULE_PATHNAME', 'dq_adopt' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_adopt(pg_catalog.name, pg_catalog.bool) IS
'make this database the owner of its queues in Redis; returns those taken';

CREATE FUNCTION @extschema@.dq_offer_trigger()
RETURNS pg_catalog.trigger
AS 'MODULE_PATHNAME', 'dq_offer_trigger' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_offer_trigger() IS
'AFTER INSERT OR UPDATE row trigger (queue, delay or column, key column [, payload column]): schedules a task for the row';

CREATE FUNCTION @extschema@.dq_remove_trigger()
RETURNS pg_catalog.trigger
AS 'MODULE_PATHNAME', 'dq_remove_trigger' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_remove_trigger() IS
'AFTER UPDATE OR DELETE row trigger (queue, key column): cancels the old row''s task';

-- ---------------------------------------------------------------------------
-- Workers and views
-- ---------------------------------------------------------------------------

CREATE FUNCTION @extschema@.dq_worker_start()
RETURNS pg_catalog.void
AS 'MODULE_PATHNAME', 'dq_worker_start' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_worker_start() IS
'start this database''s workers (superuser or pg_signal_backend)';

CREATE FUNCTION @extschema@.dq_worker_stop()
RETURNS pg_catalog.void
AS 'MODULE_PATHNAME', 'dq_worker_stop' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_worker_stop() IS
'stop this database''s workers until dq_worker_start (superuser or pg_signal_backend)';

CREATE FUNCTION @extschema@.dq_stats_rows(
  OUT queue pg_catalog.regclass, OUT shard pg_catalog.int4,
  OUT pending pg_catalog.int8, OUT held pg_catalog.int8, OUT ready pg_catalog.int8,
  OUT quarantined pg_catalog.int8, OUT outbox_rows pg_catalog.int8,
  OUT outbox_oldest pg_catalog.interval, OUT next_due pg_catalog.timestamptz,
  OUT overdue pg_catalog.int8, OUT lag pg_catalog.interval,
  OUT offered pg_catalog.int8, OUT relayed pg_catalog.int8,
  OUT transferred pg_catalog.int8, OUT delivered pg_catalog.int8,
  OUT removed pg_catalog.int8, OUT rescheduled pg_catalog.int8,
  OUT failed pg_catalog.int8, OUT retried pg_catalog.int8, OUT dead pg_catalog.int8,
  OUT in_flight pg_catalog.int8, OUT replayed pg_catalog.int8,
  OUT remove_scans pg_catalog.int8, OUT state pg_catalog.text,
  OUT last_error pg_catalog.text, OUT last_error_at pg_catalog.timestamptz,
  OUT clock_skew pg_catalog.interval, OUT warnings pg_catalog.text[],
  OUT seen_at pg_catalog.timestamptz)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'dq_stats_rows' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_stats_rows() IS 'rows of view dq_stats';
CREATE VIEW @extschema@.dq_stats AS SELECT * FROM @extschema@.dq_stats_rows();
COMMENT ON VIEW @extschema@.dq_stats IS
'state and counters per queue and shard, as the workers published them; never waits for Redis';

CREATE FUNCTION @extschema@.dq_workers_rows(
  OUT pid pg_catalog.int4, OUT role pg_catalog.text, OUT database pg_catalog.name,
  OUT server pg_catalog.name, OUT owner pg_catalog.name, OUT state pg_catalog.text,
  OUT since pg_catalog.timestamptz, OUT reconnects pg_catalog.int8,
  OUT last_error pg_catalog.text, OUT last_error_at pg_catalog.timestamptz,
  OUT warnings pg_catalog.text[])
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'dq_workers_rows' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_workers_rows() IS 'rows of view dq_workers';
CREATE VIEW @extschema@.dq_workers AS SELECT * FROM @extschema@.dq_workers_rows();
COMMENT ON VIEW @extschema@.dq_workers IS 'the worker processes of dq_bridge';

CREATE FUNCTION @extschema@.dq_queues_rows(
  OUT queue pg_catalog.regclass, OUT server pg_catalog.name,
  OUT redis_name pg_catalog.text, OUT keys pg_catalog.text[],
  OUT shards pg_catalog.int4, OUT role pg_catalog.text, OUT list pg_catalog.text,
  OUT index pg_catalog.text, OUT codec pg_catalog.text,
  OUT transactional pg_catalog.text, OUT destination pg_catalog.text,
  OUT stream_maxlen pg_catalog.int8, OUT sink pg_catalog.text,
  OUT handler pg_catalog.text, OUT notify pg_catalog.text,
  OUT concurrency pg_catalog.int4, OUT max_attempts pg_catalog.int4,
  OUT backoff pg_catalog.interval, OUT backoff_max pg_catalog.interval,
  OUT handler_timeout pg_catalog.interval, OUT rate pg_catalog.int4,
  OUT on_outage pg_catalog.text, OUT remove_timeout pg_catalog.interval,
  OUT on_data_loss pg_catalog.text, OUT contents pg_catalog.text,
  OUT owner_source pg_catalog.text, OUT owner_host pg_catalog.text,
  OUT lease_until pg_catalog.timestamptz)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'dq_queues_rows' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.dq_queues_rows() IS 'rows of view dq_queues';
CREATE VIEW @extschema@.dq_queues AS SELECT * FROM @extschema@.dq_queues_rows();
COMMENT ON VIEW @extschema@.dq_queues IS
'definition of each queue: keys in Redis, options in force, who owns it';

GRANT SELECT ON @extschema@.dq_stats, @extschema@.dq_workers, @extschema@.dq_queues TO PUBLIC;

-- ---------------------------------------------------------------------------
-- Event triggers: fix option queue and check columns at creation; tell workers
-- ---------------------------------------------------------------------------

CREATE FUNCTION @extschema@.dq_on_ddl()
RETURNS pg_catalog.event_trigger
AS 'MODULE_PATHNAME', 'dq_on_ddl' LANGUAGE C;
COMMENT ON FUNCTION @extschema@.dq_on_ddl() IS
'fixes option queue and checks columns of new queues; tells the workers';
CREATE EVENT TRIGGER dq_bridge_ddl ON ddl_command_end
  WHEN TAG IN ('CREATE FOREIGN TABLE', 'ALTER FOREIGN TABLE', 'IMPORT FOREIGN SCHEMA',
               'ALTER TABLE',           -- takes foreign tables too
               'CREATE SERVER', 'ALTER SERVER', 'CREATE USER MAPPING', 'ALTER USER MAPPING')
  EXECUTE FUNCTION @extschema@.dq_on_ddl();
COMMENT ON EVENT TRIGGER dq_bridge_ddl IS 'dq_bridge: definition of queues';

CREATE FUNCTION @extschema@.dq_on_drop()
RETURNS pg_catalog.event_trigger
AS 'MODULE_PATHNAME', 'dq_on_drop' LANGUAGE C;
COMMENT ON FUNCTION @extschema@.dq_on_drop() IS
'tells how many tasks stay pending when a queue''s table is dropped';
CREATE EVENT TRIGGER dq_bridge_drop ON sql_drop
  WHEN TAG IN ('DROP FOREIGN TABLE', 'DROP SERVER', 'DROP FOREIGN DATA WRAPPER',
               'DROP TABLE', 'DROP SCHEMA', 'DROP OWNED')
  EXECUTE FUNCTION @extschema@.dq_on_drop();
COMMENT ON EVENT TRIGGER dq_bridge_drop IS 'dq_bridge: dropping of queues';

-- a running launcher serves this database from the commit on
CREATE FUNCTION @extschema@.dq_created()
RETURNS pg_catalog.void
AS 'MODULE_PATHNAME', 'dq_created' LANGUAGE C;
COMMENT ON FUNCTION @extschema@.dq_created() IS
'called at the end of CREATE EXTENSION: tells the launcher, or prints how to start workers';
SELECT @extschema@.dq_created();
