# Every form in which a table is written, done to a queue and to an ordinary table: the
# same rows come back and the same are left. And the forms that a queue refuses.
# G1; H4 H6 H10 H11 H12; I1 I2 I3 I4 I5; B1 B5; C3 C7 C8; J1
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;

my $t = DqTest->new;
my $r = $t->redis;

# here: ordinary tables, there: queues of the same names
$t->sql(<<'SQL');
CREATE SCHEMA here;
CREATE SCHEMA there;
CREATE TABLE here.q (key text, payload text, due_at timestamptz DEFAULT now());
CREATE FOREIGN TABLE there.q (key text, payload text, due_at timestamptz) SERVER redis OPTIONS (shards '3');
CREATE TABLE here.g (payload jsonb NOT NULL, due_at timestamptz NOT NULL DEFAULT '2500-01-01', key text GENERATED ALWAYS AS (payload ->> 'id') STORED);
CREATE FOREIGN TABLE there.g (payload jsonb NOT NULL, due_at timestamptz NOT NULL DEFAULT '2500-01-01', key text GENERATED ALWAYS AS (payload ->> 'id') STORED) SERVER redis;
CREATE TABLE near (n int PRIMARY KEY, key text, at timestamptz);
INSERT INTO near SELECT i, 'k' || i, timestamptz '2600-01-01' + i * interval '1 hour' FROM generate_series(1, 30) i;
CREATE TABLE log (no serial, what text);
SQL
for my $s ('here', 'there')
{
	my ($what, $rest) = $s eq 'here' ? ('TABLE', '') : ('FOREIGN TABLE', 'SERVER redis');

	$t->sql(<<SQL);
SET search_path = $s, public;
CREATE TABLE parted (key text, payload text, due_at timestamptz) PARTITION BY RANGE (due_at);
CREATE $what part_a PARTITION OF parted FOR VALUES FROM ('2400-01-01') TO ('2500-01-01') $rest;
CREATE $what part_b PARTITION OF parted FOR VALUES FROM ('2500-01-01') TO ('2600-01-01') $rest;
CREATE TABLE part_c PARTITION OF parted FOR VALUES FROM ('2600-01-01') TO ('2700-01-01');
CREATE TABLE base (key text, payload text, due_at timestamptz);
CREATE $what child () INHERITS (base) $rest;
CREATE VIEW v AS SELECT payload, due_at, key FROM q WHERE payload < 'p5' WITH CHECK OPTION;
CREATE TABLE ruled (n int);
CREATE RULE r AS ON INSERT TO ruled DO INSTEAD INSERT INTO q VALUES ('rk' || NEW.n, 'by a rule', '2400-01-01');
CREATE RULE d AS ON DELETE TO ruled DO ALSO DELETE FROM q WHERE key = 'rk' || OLD.n;
CREATE FUNCTION touch(k text) RETURNS bigint LANGUAGE sql SET search_path = $s, public AS
  \$\$ WITH u AS (UPDATE q SET due_at = due_at + interval '1 min' WHERE key = k RETURNING 1) SELECT count(*) FROM u \$\$;
SQL
}

my %session = map { $_ => $t->session } 'here', 'there';
$session{$_}->run("SET search_path = $_, public; SET client_min_messages = warning; SET timezone = 'UTC'; SET datestyle = 'ISO'; SET enable_partition_pruning = on; TRUNCATE log") for sort keys %session;

my %key = (q => 'key', g => 'key', parted => 'key', base => 'key');
my $at = 'rows';

# What is left, tasks with equal rows counted
sub left
{
	my ($s, $q) = @_;
	$t->sync;
	return $t->sql("SET search_path = $s, public; SELECT coalesce(string_agg(x, ' ' ORDER BY x), '') FROM (SELECT concat_ws(',', key, payload, to_char(due_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US'), count(*)) FROM $q GROUP BY key, payload, due_at) y(x)");
}

# The same in both, with the same answer and the same rows left in $q
sub same
{
	my ($name, $sql, $q) = @_;
	my (%got, %log);

	$q ||= 'q';
	for my $s ('here', 'there')
	{
		$session{$s}->run('TRUNCATE log RESTART IDENTITY');
		$got{$s} = $session{$s}->run($sql, 120);
		$log{$s} = $t->sql('SELECT string_agg(what, E\'\n\' ORDER BY no) FROM log');
	}
	is($got{there}, $got{here}, $name);
	is($log{there}, $log{here}, "$name: log") if $log{here} || $log{there};
	my ($here, $there) = (left('here', $q), left('there', $q));
	is($there, $here, "$name: what is left");
}

sub refill
{
	same('refill', "BEGIN; DELETE FROM q; INSERT INTO q SELECT 'k' || i, 'p' || i, timestamptz '2400-01-01' + i * interval '1 day' FROM generate_series(1, 9) i; "
		  . "INSERT INTO q SELECT NULL, 'twin', '2450-01-01' FROM generate_series(1, 4); COMMIT");
}

# ---- INSERT, UPDATE, DELETE with other tables -----------------------------------------------------

my $returning = "RETURNING key, payload, due_at) SELECT * FROM w ORDER BY 1, 2, 3";
refill();
same('I3 UPDATE ... FROM', "WITH w AS (UPDATE q SET due_at = n.at FROM near n WHERE n.key = q.key AND n.n < 4 $returning");
same('I3 UPDATE ... FROM, many for one', "UPDATE q SET due_at = '2499-01-01' FROM near n WHERE q.key = 'k5' AND n.n BETWEEN 2 AND 9; SELECT count(*) FROM q WHERE due_at = '2499-01-01'");
same('I3 UPDATE of payload and key', "WITH w AS (UPDATE q SET payload = upper(payload), key = 'n' || substr(q.key, 2) FROM near n WHERE n.key = q.key AND n.n = 6 $returning");
same('I3 UPDATE through a self-join', "WITH w AS (UPDATE q SET payload = q.payload || '<' || o.payload FROM q o WHERE o.due_at = q.due_at - interval '1 day' $returning");
same('I3 DELETE ... USING', "WITH w AS (DELETE FROM q USING near n WHERE n.key = q.key AND n.n = 8 $returning");
same('I3 DELETE through a self-join', "WITH w AS (DELETE FROM q USING q o WHERE o.payload = q.payload AND q.payload = 'twin' $returning");
refill();
same('I3 DELETE ... USING a subquery with LIMIT', "DELETE FROM q USING (SELECT key FROM near ORDER BY n LIMIT 3) n WHERE n.key = q.key; SELECT count(*) FROM q");
same('I3 UPDATE of what a join has no row for', "UPDATE q SET payload = 'none' FROM near n WHERE n.key = q.payload; SELECT count(*) FROM q");
same('I3 NOT EXISTS', "WITH w AS (DELETE FROM q WHERE NOT EXISTS (SELECT FROM near n WHERE n.key = q.key) $returning");
refill();
same('a row for the own key: UPDATE that keeps it', "WITH w AS (UPDATE q SET key = key, payload = payload || '!' WHERE key IN ('k1', 'k2') $returning");
same('UPDATE that takes the key away', "WITH w AS (UPDATE q SET key = NULL WHERE key = 'k3' $returning");
same('UPDATE that gives one', "WITH w AS (UPDATE q SET key = 'given' WHERE payload = 'p3' $returning");
same('UPDATE of all, with a subquery', "UPDATE q SET due_at = (SELECT max(at) FROM near) WHERE payload <> 'twin'; SELECT count(*), count(DISTINCT due_at) FROM q");
same('twice in one transaction', "BEGIN; UPDATE q SET payload = payload || 'a' WHERE key = 'k4'; UPDATE q SET payload = payload || 'b' WHERE key = 'k4'; DELETE FROM q WHERE payload = 'p5'; COMMIT");
same('in subtransactions', "BEGIN; SAVEPOINT a; UPDATE q SET payload = 'lost' WHERE key = 'k4'; ROLLBACK TO a; UPDATE q SET payload = 'kept' WHERE key = 'k4'; SAVEPOINT b; DELETE FROM q; ROLLBACK TO b; RELEASE a; COMMIT");

# ---- nothing to do -------------------------------------------------------------------------------------

same("I4 $_", "WITH w AS ($_ $returning") for "DELETE FROM q WHERE false", "UPDATE q SET payload = 'x' WHERE false", "DELETE FROM q WHERE due_at < NULL",
  "UPDATE q SET payload = 'x' WHERE due_at < NULL::timestamptz", "DELETE FROM q WHERE key = NULL", "UPDATE q SET payload = 'x' WHERE key = 'nobody'",
  "DELETE FROM q WHERE due_at > (SELECT at FROM near WHERE n = -1)";

# ---- prepared, in loops, in functions ---------------------------------------------------------------------

refill();
same('I2 prepared INSERT', "PREPARE i(text, int) AS INSERT INTO q VALUES (\$1, \$1 || 'x', timestamptz '2410-01-01' + \$2 * interval '1 s'); " . join('; ', map { "EXECUTE i('e$_', $_)" } 1 .. 15));
same('I2 prepared UPDATE', "PREPARE u(text, text) AS UPDATE q SET payload = \$2 WHERE key = \$1; " . join('; ', map { "EXECUTE u('e$_', 'u$_')" } 1 .. 15));
same('I2 prepared DELETE, some rolled back', "PREPARE d(text) AS DELETE FROM q WHERE key = \$1; BEGIN; " . join('; ', map { "SAVEPOINT s; EXECUTE d('e$_'); " . ($_ % 3 ? 'RELEASE s' : 'ROLLBACK TO s') } 1 .. 15) . '; COMMIT');
same('I2 generic plans', "SET plan_cache_mode = force_generic_plan; " . join('; ', map { "EXECUTE i('f$_', $_); EXECUTE u('f$_', 'g$_'); EXECUTE d('f" . ($_ - 1) . "')" } 1 .. 12) . "; RESET plan_cache_mode");
same('I2 PL/pgSQL loop', <<'SQL');
DO $$ DECLARE r record; BEGIN
  FOR i IN 1 .. 12 LOOP
    INSERT INTO q VALUES ('l' || i, 'loop', timestamptz '2420-01-01' + i * interval '1 h') RETURNING payload INTO r;
    BEGIN
      UPDATE q SET payload = r.payload || i WHERE key = 'l' || i;
      IF i % 4 = 0 THEN RAISE EXCEPTION 'no'; END IF;
    EXCEPTION WHEN raise_exception THEN NULL;
    END;
  END LOOP;
  FOR r IN SELECT key FROM q WHERE payload LIKE 'loop%' ORDER BY key LOOP
    DELETE FROM q WHERE key = r.key AND length(r.key) = 2;
  END LOOP;
END $$
SQL
same('I4 SQL function', "SELECT sum(touch('k' || i)) FROM generate_series(0, 12) i");
same('I4 writable CTE feeds another', "WITH d AS (DELETE FROM q WHERE payload = 'twin' RETURNING *), i AS (INSERT INTO q SELECT NULL, payload || row_number() OVER (), due_at FROM d RETURNING payload) SELECT count(*) FROM i");
same('I4 rules', "INSERT INTO ruled VALUES (1), (2); SELECT count(*) FROM q WHERE payload = 'by a rule'; DELETE FROM ruled");
same('I4 through a view', "WITH w AS (UPDATE v SET payload = payload || '+' WHERE payload >= 'p3' $returning");
same('I4 INSERT and DELETE through a view', "INSERT INTO v (payload, due_at) VALUES ('p4new', '2400-02-02'); WITH w AS (DELETE FROM v WHERE payload = 'p4new' $returning");
$t->fails("SET search_path = $_, public; INSERT INTO v (payload) VALUES ('z')", '44000', "I4 WITH CHECK OPTION, $_") for 'here', 'there';
$t->fails("SET search_path = $_, public; UPDATE v SET payload = 'z'", '44000', "... and UPDATE, $_") for 'here', 'there';
refill();

# ---- triggers ----------------------------------------------------------------------------------------------

for my $s ('here', 'there')
{
	$t->sql(<<SQL);
SET search_path = $s, public;
CREATE FUNCTION before_row() RETURNS trigger LANGUAGE plpgsql AS \$\$
BEGIN
  INSERT INTO log (what) VALUES (concat_ws(' ', tg_when, tg_op, CASE WHEN tg_op <> 'INSERT' THEN OLD.payload END, CASE WHEN tg_op <> 'DELETE' THEN NEW.payload END));
  IF tg_op = 'DELETE' THEN
    IF OLD.payload = 'p2' THEN RETURN NULL; END IF;
    RETURN OLD;
  END IF;
  IF NEW.payload LIKE 'skip%' THEN RETURN NULL; END IF;
  NEW.payload := NEW.payload || '.t';
  IF NEW.key = 'later' THEN NEW.due_at := '2490-01-01'; END IF;
  RETURN NEW;
END \$\$;
CREATE FUNCTION after_row() RETURNS trigger LANGUAGE plpgsql AS \$\$
BEGIN
  INSERT INTO log (what) VALUES (concat_ws(' ', tg_when, tg_op, CASE WHEN tg_op <> 'INSERT' THEN OLD.payload || OLD.key END, CASE WHEN tg_op <> 'DELETE' THEN NEW.payload || NEW.due_at END));
  RETURN NULL;
END \$\$;
CREATE FUNCTION statement() RETURNS trigger LANGUAGE plpgsql AS \$\$
BEGIN
  INSERT INTO log (what) VALUES (concat_ws(' ', tg_when, tg_op, tg_level));
  RETURN NULL;
END \$\$;
CREATE TRIGGER b BEFORE INSERT OR UPDATE OR DELETE ON q FOR EACH ROW EXECUTE FUNCTION before_row();
CREATE TRIGGER a AFTER INSERT OR UPDATE OR DELETE ON q FOR EACH ROW EXECUTE FUNCTION after_row();
CREATE TRIGGER s BEFORE INSERT OR UPDATE OR DELETE ON q FOR EACH STATEMENT EXECUTE FUNCTION statement();
SQL
}
same('I4 triggers change, keep back and see the row: INSERT', "WITH w AS (INSERT INTO q VALUES ('later', 'x', '2401-01-01'), ('y', 'skip', '2401-01-01'), ('z', 'z', '2401-01-01') $returning");
same('I4 ... UPDATE of payload', "UPDATE q SET payload = 'one' WHERE key = 'k1'; UPDATE q SET payload = 'skip it' WHERE key = 'k3'");
same('I4 ... UPDATE of due_at', "WITH w AS (UPDATE q SET due_at = due_at + interval '1 s' WHERE key IN ('k4', 'later') $returning");
same('I4 ... DELETE', "WITH w AS (DELETE FROM q WHERE key IN ('k2', 'k4') $returning");
same('I4 ... DELETE without RETURNING', "DELETE FROM q WHERE key IN ('k2', 'k5')");
same('I4 ... none', "UPDATE q SET payload = 'x' WHERE false; DELETE FROM q WHERE false");
$t->sql("SET search_path = $_, public; DROP TRIGGER a ON q; DROP TRIGGER b ON q; DROP TRIGGER s ON q") for 'here', 'there';
# a trigger on another table writes to the queue, and one on the queue to another
for my $s ('here', 'there')
{
	$t->sql(<<SQL);
SET search_path = $s, public;
CREATE TABLE doc (id int PRIMARY KEY, body text);
CREATE FUNCTION follow() RETURNS trigger LANGUAGE plpgsql SET search_path = $s, public AS \$\$
BEGIN
  IF tg_op <> 'INSERT' THEN DELETE FROM q WHERE key = 'd' || OLD.id; END IF;
  IF tg_op <> 'DELETE' THEN INSERT INTO q VALUES ('d' || NEW.id, NEW.body, '2480-01-01'); END IF;
  RETURN NULL;
END \$\$;
CREATE TRIGGER f AFTER INSERT OR UPDATE OR DELETE ON doc FOR EACH ROW EXECUTE FUNCTION follow();
SQL
}
same('I4 written by triggers of another table', "INSERT INTO doc SELECT i, 'b' || i FROM generate_series(1, 6) i; UPDATE doc SET body = body || '2' WHERE id < 4; DELETE FROM doc WHERE id IN (1, 5)");

# ---- generated columns, defaults, COPY ---------------------------------------------------------------------

same('H11 key generated from the payload', q{INSERT INTO g (payload) VALUES ('{"id": 7, "a": 1}'), ('{"id": "x"}'), ('{}')}, 'g');
same('H11 ... follows an UPDATE of the payload', q{UPDATE g SET payload = payload || '{"id": 8}' WHERE key = '7'; SELECT key FROM g ORDER BY key}, 'g');
same('H11 ... and not of due_at', q{UPDATE g SET due_at = '2550-01-01' WHERE key = '8'; SELECT key, due_at FROM g WHERE key = '8'}, 'g');
same('H11 DEFAULT', q{INSERT INTO g (payload, due_at) VALUES ('{"id": 9}', DEFAULT); UPDATE g SET due_at = DEFAULT WHERE key = '8'}, 'g');
same('H11 COPY', "COPY g (payload) FROM PROGRAM 'for i in 1 2 3; do echo \"{\\\"id\\\": \\\"c\$i\\\"}\"; done'", 'g');
for my $s ('here', 'there')
{
	$t->fails("SET search_path = $s; INSERT INTO g (payload) VALUES (NULL)", $s eq 'here' ? '23502' : '22004', "I1 NULL payload, $s");
	$t->fails("SET search_path = $s; INSERT INTO g (payload, due_at) VALUES ('{}', NULL)", '23502', "I1 NOT NULL due_at, $s") if $s eq 'here';
	$t->fails("SET search_path = $s; INSERT INTO g (payload, key) VALUES ('{}', 'k')", '428C9', "H11 a generated column is not given, $s");
}
same('H12 COPY ... WHERE', "COPY q FROM PROGRAM 'seq 40 | sed \"s/.*/c&\tcopied&\t2470-01-0&/;s/01-0\\([0-9][0-9]\\)/01-\\1/\" | head -30' WHERE payload LIKE 'copied2%'");
same('H12 COPY of NULLs', "COPY q FROM PROGRAM 'printf \"\\\\\\\\N\\\\tno key\\\\t2470-02-01\\\\n\"'");
{
	my ($rc, $out, $err) = $t->try("COPY there.q FROM PROGRAM 'echo' WITH (FREEZE)");
	like($err, qr/ERROR:  (?:0A000|55000): cannot perform COPY FREEZE/, 'H12 COPY FREEZE is refused by PostgreSQL');
}
$t->fails("COPY there.q TO '/dev/null'", '42809', 'H12 COPY TO of a foreign table, too');
same('H12 COPY that fails half way leaves nothing', "COPY q FROM PROGRAM 'printf \"a\\\\tb\\\\t2470-01-01\\\\nc\\\\td\\\\tnever\\\\n\"'");

# ---- partitions and inheritance ----------------------------------------------------------------------------------

same('H12 INSERT through the parent', "WITH w AS (INSERT INTO parted SELECT 'k' || i, 'p' || i, timestamptz '2400-06-01' + i * interval '20 years' FROM generate_series(0, 11) i $returning", 'parted');
same('H12 COPY through the parent', "COPY parted FROM PROGRAM 'for y in 2410 2510 2610; do printf \"c\$y\\\\tcopied\\\\t\$y-01-01\\\\n\"; done'", 'parted');
same('H12 UPDATE within partitions', "WITH w AS (UPDATE parted SET payload = payload || '!' WHERE due_at < '2590-01-01' $returning", 'parted');
same('H12 UPDATE of due_at within one', "UPDATE parted SET due_at = due_at + interval '1 min' WHERE key IN ('k1', 'k6', 'k11')", 'parted');
same('H12 a row moves from a table into a queue', "WITH w AS (UPDATE parted SET due_at = '2405-01-01' WHERE key = 'k11' $returning", 'parted');
same('H12 ... undone', "BEGIN; UPDATE parted SET due_at = '2407-01-01' WHERE key = 'k10'; ROLLBACK", 'parted');
same('H12 ... with RETURNING and by another table', "WITH w AS (UPDATE parted SET due_at = n.at - interval '90 years' FROM near n WHERE n.key = parted.key AND n.n = 10 $returning", 'parted');
# PostgreSQL moves no row out of a foreign table
my $before = left('there', 'parted');
$t->fails("SET search_path = there, public; UPDATE parted SET due_at = '$_' WHERE key = 'k1'", '23514', "H12 a row does not leave a queue for $_") for '2650-01-01', '2505-01-01';
$t->fails("SET search_path = there, public; BEGIN; UPDATE parted SET due_at = '2505-01-01' WHERE key IN ('k2', 'k11')", '23514', '... one of two');
is(left('there', 'parted'), $before, '... and stays where it is');
ok(poll_until(sub { $t->sql("SELECT sum(held) FROM dq_stats") == 0 }), '... no hold is left');
same('H12 DELETE through the parent', "WITH w AS (DELETE FROM parted WHERE payload LIKE 'copied%' $returning", 'parted');
same('H12 DELETE USING', "DELETE FROM parted USING near n WHERE n.key = parted.key AND n.n = 5", 'parted');
$t->fails("SET search_path = $_; INSERT INTO part_a VALUES ('o', 'outside', '2550-01-01')", '23514', "H12 out of the partition's bounds, $_") for 'here', 'there';
$t->fails("SET search_path = $_; INSERT INTO parted VALUES ('o', 'nowhere', '2850-01-01')", '23514', "H12 no partition, $_") for 'here', 'there';
$t->fails("SET search_path = $_; UPDATE part_a SET due_at = '2550-01-01'", '23514', "H12 UPDATE out of the bounds, $_") for 'here', 'there';
same('H12 ... nothing of it is left', "SELECT 1", 'parted');
same('H12 inheritance', "INSERT INTO base VALUES ('b', 'base', '2400-01-01'); INSERT INTO child VALUES ('c', 'child', '2400-01-01'), ('d', 'child2', '2400-01-01'); "
	  . "UPDATE base SET payload = payload || '!'; DELETE FROM base WHERE key = 'd'; UPDATE ONLY base SET payload = 'only'", 'base');
$session{there}->run("BEGIN; INSERT INTO child VALUES ('e', 'never', '2400-01-01'); DELETE FROM child WHERE key = 'c'; DROP FOREIGN TABLE child; ROLLBACK");
same('H12 DROP in a transaction that is rolled back', 'SELECT count(*) FROM child', 'base');

# ---- values --------------------------------------------------------------------------------------------------------

# rounded up to whole ms, so compared as such
$t->sql("INSERT INTO there.q VALUES ('ms', 'ms', '2444-04-04 04:04:04.123456Z'), ('dst', 'dst', timestamptz '2444-03-31 00:00 Europe/Paris' + interval '1 day')");
$t->sync;
is($t->sql("SELECT count(*) FROM there.q WHERE due_at = '2444-04-04 04:04:04.124Z'"), 1, 'C3 an instant is rounded up, and found by what is read');
is($t->sql("SELECT count(*) FROM there.q WHERE due_at = (SELECT due_at FROM there.q WHERE key = 'ms')"), 1, 'C3 ... by =');
is($t->sql("SELECT count(*) FROM there.q WHERE due_at < (SELECT due_at FROM there.q WHERE key = 'ms') AND key = 'ms'"), 0, 'C3 ... not by <');
is($t->sql("SET timezone = '$_'; SELECT extract(epoch FROM due_at) FROM there.q WHERE key = 'ms'"), '14966136244.124000', "C8 the same under $_") for 'UTC', 'Pacific/Kiritimati', 'America/New_York';
$t->fails("INSERT INTO there.q VALUES ('x', 'x', '$_')", '22008', "C7 due_at $_") for 'infinity', '-infinity', '1969-12-31 23:59:59Z', '10000-01-01Z', '294276-12-31';
$t->fails("UPDATE there.q SET due_at = 'infinity'", '22008', 'C7 UPDATE to infinity');
$t->fails("UPDATE there.q SET due_at = NULL", '22004', 'I1 UPDATE to NULL');
$t->fails("UPDATE there.q SET payload = NULL", '22004', 'I1 ... of payload');
$t->fails("INSERT INTO there.q VALUES (repeat('k', 256), 'x', '2400-01-01')", '22001', 'a key of 256 bytes');
same('... nothing of it is left', 'SELECT 1', 'g');

# ---- what is refused --------------------------------------------------------------------------------------------------

my @refused = (
	[ "INSERT INTO q VALUES ('k1', 'x', now()) ON CONFLICT DO NOTHING", '0A000', 'ON CONFLICT DO NOTHING' ],
	[ "INSERT INTO q VALUES ('k1', 'x', now()) ON CONFLICT (key) DO UPDATE SET payload = 'y'", '42P10', 'ON CONFLICT with a target' ],
	[ "MERGE INTO q USING near n ON n.key = q.key WHEN MATCHED THEN DELETE", '0A000|42809', 'MERGE' ],
	[ "MERGE INTO parted q USING near n ON n.key = q.key WHEN MATCHED THEN DELETE", '0A000|42809', 'MERGE into the parent' ],
	[ "SELECT * FROM q FOR UPDATE", '0A000', 'FOR UPDATE' ],
	[ "SELECT * FROM q FOR SHARE SKIP LOCKED", '0A000', 'FOR SHARE' ],
	[ "SELECT * FROM near n JOIN q USING (key) FOR NO KEY UPDATE", '0A000', 'FOR NO KEY UPDATE of a join' ],
	[ "SELECT * FROM parted FOR UPDATE", '0A000', 'FOR UPDATE of the parent' ],
	[ "SELECT ctid FROM q", '0A000', 'a system column' ]);
for (@refused)
{
	my ($sql, $state, $name) = @$_;

	for my $do ('EXPLAIN', '')
	{
		my ($rc, $out, $err) = $t->try("SET search_path = there, public; $do $sql");
		like($err, qr/ERROR:  (?:$state):/, "I3 $name is refused" . ($do ? ' in planning' : ''));
	}
}
$t->fails("SET search_path = there; INSERT INTO parted VALUES ('k1', 'x', '2450-01-01') ON CONFLICT DO NOTHING", '0A000', 'I3 ON CONFLICT of the parent is refused when a row comes to the queue');
for my $what ("DELETE FROM q", "UPDATE q SET payload = 'current'")
{
	my $sql = "SET search_path = there, public; BEGIN; DECLARE c CURSOR FOR SELECT * FROM q; FETCH 1 FROM c";

	$t->fails("$sql; EXPLAIN $what WHERE CURRENT OF c", '0A000', 'I3 WHERE CURRENT OF is refused in planning', like => qr/WHERE CURRENT OF is not supported for queue "q"/);
	$t->fails("$sql; $what WHERE CURRENT OF c", '0A000', '... and so is the statement');
}
$t->fails("SET search_path = there, public; BEGIN; DECLARE c CURSOR FOR SELECT * FROM parted; FETCH 1 FROM c; DELETE FROM parted WHERE CURRENT OF c", '0A000', '... of a parent');
$t->fails("BEGIN READ ONLY; $_", '25006', "I5 read only: $_") for "INSERT INTO there.q VALUES ('k', 'x', now())", "UPDATE there.q SET payload = 'x'", "DELETE FROM there.q";
$t->fails("SET default_transaction_read_only = on; DELETE FROM there.q WHERE false", '25006', 'I5 by default');
same('nothing of all that is left', 'SELECT 1', 'parted');

$_->quit for values %session;
ok($t->log_text !~ /PANIC:|TRAP:|signal 11|signal 6\b/, 'no process died');
$t->finish;
