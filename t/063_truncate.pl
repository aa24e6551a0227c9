# TRUNCATE of queues: all that is pending, whoever offered it, as part of the
# transaction; nothing of it fires before the commit, a rollback brings it back, and
# data that Redis loses does not bring it back. G1 G3 G4; I5 H12 A6; PO 12, PO 17, H10
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;

my $t = DqTest->new(conf => "max_prepared_transactions = 10\n");
my $r = $t->redis;

$t->queue('q');
$t->queue('q4', "shards '4'");
$t->queue('also', "queue 'q'");
my ($s, $o) = ($t->session, $t->session);

sub count { my ($q) = @_; return $t->sql("SELECT count(*) FROM $q"); }

sub fill
{
	my ($q, $n) = @_;
	$t->sql("INSERT INTO $q (payload, due_at, key) SELECT 'p' || i, now() + '1 hour', CASE WHEN i % 2 = 0 THEN 'k' || i END FROM generate_series(1, $n) i");
	$t->sync;
}

# Nothing is pending, held, indexed or ready
sub is_empty
{
	my ($q, $name, @shards) = @_;
	my @left;

	@shards = ($q) unless @shards;
	$t->sync;
	ok(poll_until(sub {
		@left = map { my $n = $_; map { $r->cmd(@$_) ? "$_->[0] $_->[1]" : () }
			([ 'ZCARD', "redisson_delay_queue_timeout:{$n}" ], [ 'ZCARD', "dq:{$n}:held" ], [ 'HLEN', "dq:{$n}:hold" ],
			[ 'HLEN', "dq:{$n}:index" ], [ 'ZCARD', "dq:{$n}:twins" ], [ 'LLEN', $n ]) } @shards;
		@left == 0 && count($q) == 0;
	}), $name) or diag("left: @left; " . $t->sql("SELECT string_agg(q::text, ' ') FROM $q q"));
}

# ---- everything, whoever offered it -------------------------------------------------------

fill('q', 20);
$t->sql("SELECT dq_offer('q', 'twin', '1 hour') FROM generate_series(1, 20)");
$r->redisson_offer('q', now_ms() + 3600000, "java$_") for 1 .. 3;
$r->cmd('ZADD', 'redisson_delay_queue_timeout:{q}', now_ms() + 3600000, DqTest::Redis::pack_member('longer than eight', 'foreign'));
$t->sql("TRUNCATE q");
is_empty('q', 'G1 own tasks, twins, with and without keys, and those of other producers');
$t->sql("TRUNCATE q");
is(count('q'), 0, 'an empty one');
$t->sql("INSERT INTO q (payload, due_at, key) VALUES ('after', now() + '1 hour', 'k2')");
$t->sync;
is(join(',', $t->pending('q')), 'after', 'B4 a key of a task that is gone is free');
$t->sql("TRUNCATE q");

$s->run("BEGIN; INSERT INTO q4 (payload, due_at, key) SELECT 'own' || i, now() + '1 hour', i FROM generate_series(1, 30) i");
$t->sql("SELECT dq_offer('q4', 'committed' || i, '1 hour') FROM generate_series(1, 30) i");
is($s->run("SELECT count(*) FROM q4"), 60, 'own and committed ones');
$s->run("TRUNCATE q4");
is($s->run("SELECT count(*) FROM q4"), 0, 'its transaction sees none');
is($s->run("SELECT dq_remove('q4', '7')"), 'f', '... and finds none');
$s->run("INSERT INTO q4 (payload, due_at, key) VALUES ('behind', now() + '1 hour', '7')");
is($s->run("SELECT payload FROM q4"), 'behind', '... but what it offers afterwards');
$s->run("COMMIT");
$t->sync;
is($t->sql("SELECT string_agg(payload, ',') FROM q4"), 'behind', 'G8 and that is what is left');
$t->sql("TRUNCATE q4");
is_empty('q4', 'all shards', map { "q4#$_" } 0 .. 3);

# ---- it is part of the transaction --------------------------------------------------------------

fill('q4', 40);
$s->run("BEGIN; TRUNCATE q4; ROLLBACK");
ok(poll_until(sub { $t->sql("SELECT coalesce(sum(held), 0) FROM dq_stats") == 0 }), 'rolled back: no hold is left');
is($t->sql("SELECT count(*), count(DISTINCT payload) FROM q4"), '40|40', 'G1 ... and each is there again');
$s->run("BEGIN; SAVEPOINT s; TRUNCATE q4");
is($s->run("SELECT count(*) FROM q4"), 0, 'in a savepoint');
$s->run("ROLLBACK TO s");
is($s->run("SELECT count(*) FROM q4"), 40, '... undone');
is($s->run("WITH d AS (DELETE FROM q4 WHERE payload IN ('p1', 'p2') RETURNING 1) SELECT count(*) FROM d"), 2, '... so that they can be removed again');
$s->run("COMMIT");
$t->sync;
is(count('q4'), 38, '... and only those are');
$s->run("BEGIN; TRUNCATE q4; PREPARE TRANSACTION 'gone'");
$t->node->restart;
$_ = $t->session for $s, $o;
$t->sql("COMMIT PREPARED 'gone'");
is_empty('q4', 'G1 two-phase commit, over a restart', map { "q4#$_" } 0 .. 3);
fill('q4', 10);
$s->run("BEGIN; TRUNCATE q4; PREPARE TRANSACTION 'back'");
$t->sql("ROLLBACK PREPARED 'back'");
is(count('q4'), 10, '... and ROLLBACK PREPARED');
$s->run("BEGIN; TRUNCATE q4");
$t->node->stop('immediate');
$t->node->start;
$_ = $t->session for $s, $o;
is(count('q4'), 10, 'F2 PostgreSQL dies before the commit');
ok(poll_until(sub { $t->sql("SELECT coalesce(sum(held), 0) FROM dq_stats") == 0 }), '... no hold is left');
$t->sql("TRUNCATE q4");

# due between statement and commit: held, so it does not fire
$t->sql("SELECT dq_offer('q', 'soon' || i, '1500 ms') FROM generate_series(1, 5) i");
$t->sync;
$s->run("BEGIN; TRUNCATE q");
$t->sql("SELECT pg_sleep(2.5)");
is($r->cmd('LLEN', 'q'), 0, 'G4 due before the commit: none fires');
$s->run("COMMIT");
is_empty('q', '... and none after it');
$t->sql("SELECT dq_offer('q', 'soon' || i, '1500 ms') FROM generate_series(1, 5) i");
$t->sync;
$s->run("BEGIN; TRUNCATE q; SELECT pg_sleep(2); ROLLBACK");
ok(poll_until(sub { $r->cmd('LLEN', 'q') == 5 }), 'G4 rolled back: all overdue ones fire at once');
$r->cmd('DEL', 'q');

# ---- with other transactions -----------------------------------------------------------------------

fill('q', 4);
$o->run("BEGIN; SELECT dq_remove('also', 'p1'); SELECT dq_reschedule('also', 'k2', '2 hours')");
$s->send("TRUNCATE q");
is($s->receive(0.3), undef, 'H10 tasks in other hands, through another table, are waited for');
$o->run("ROLLBACK");
is($s->receive(30), '', '... rolled back');
is_empty('q', '... all are gone');
fill('q', 4);
$o->run("BEGIN; SELECT dq_remove('also', 'p1')");
$s->send("TRUNCATE q");
is($s->receive(0.3), undef, 'H10 and again');
$o->run("COMMIT");
is($s->receive(30), '', '... committed');
is_empty('q', '... all are gone, each once');
$s->run("BEGIN; TRUNCATE q");
$o->send("SELECT dq_offer('q', 'later', '1 hour') IS NOT NULL");
is($o->receive(0.3), undef, 'PO 12 an offer waits for the lock');
$s->run("COMMIT");
is($o->receive(30), 't', '... and is behind it');
$t->sync;
is(join(',', $t->pending('q')), 'later', '... so it stays');
$t->sql("TRUNCATE q");

# a reschedule that was recorded without an answer moves its task meanwhile
fill('q4', 8);
$r->freeze;
$t->sql("ALTER FOREIGN TABLE q4 OPTIONS (ADD remove_timeout '100 ms')");
is($t->sql("SELECT count(dq_reschedule('q4', 'p' || i, '3 hours')) FROM generate_series(1, 7, 2) i"), 0, 'no certain answer');
$r->thaw;
$t->sql("TRUNCATE q4");
is_empty('q4', 'PO 17 what was on its way to another instant is gone as well', map { "q4#$_" } 0 .. 3);

# ---- Redis loses data ----------------------------------------------------------------------------------

fill('q', 50);
my $old = $r->save_state;
$t->sql("TRUNCATE q; SELECT dq_offer('q', 'new', '1 hour')");
$t->sync;
$r->cmd('FLUSHALL');
ok(poll_until(sub { join(',', $t->pending('q')) eq 'new' }), 'PO 17 FLUSHALL: applied again, truncated tasks do not come back')
  or diag(join ',', $t->pending('q'));
$r->restore_state($old);
ok(poll_until(sub { $t->sync; join(',', $t->pending('q')) eq 'new' }), '... nor does an older state bring them back')
  or diag(join ',', $t->pending('q'));
$t->sql("TRUNCATE q");
fill('q', 50);
$s->run("BEGIN; TRUNCATE q");
$r->cmd('FLUSHALL');
ok(poll_until(sub { $t->sync; $t->pending('q') == 50 }), 'G4 lost with its holds while the transaction is open: the tasks are there again');
$s->run("COMMIT");
is_empty('q', '... its commit takes them all the same');

# ---- transactional off, producers, copies -----------------------------------------------------------------

$t->queue('off', "transactional 'off', shards '2'");
$t->sql("SELECT dq_offer('off', 'p' || i, '1 hour') FROM generate_series(1, 20) i");
$s->run("SET client_min_messages = warning; BEGIN; TRUNCATE off");
is($r->cmd('ZCARD', 'redisson_delay_queue_timeout:{off#0}') + $r->cmd('ZCARD', 'redisson_delay_queue_timeout:{off#1}'), 0, 'transactional off: at once');
$s->run("ROLLBACK");
is(count('off'), 0, '... and a rollback does not undo it');

$t->sql("CREATE DATABASE other");
$t->extend('other');
$t->queue('p', "queue 'q', role 'producer'", db => 'other');
$t->sql("SELECT dq_offer('p', 'of a producer' || i, '1 hour') FROM generate_series(1, 10) i", db => 'other');
$t->sync(db => 'other');
$t->fails("TRUNCATE p", '55000', 'a producer does not purge', db => 'other', like => qr/only its producer/);
$t->sql("TRUNCATE q");
is_empty('q', '... its owner purges what producers have offered');
$t->queue('copy4', "queue 'q4', shards '4'", db => 'other');
fill('q4', 4);
$t->fails("TRUNCATE copy4", '55000', 'G12 a queue of another database is left alone', db => 'other', like => qr/dq_adopt/);
is(count('q4'), 4, '... whole');
$t->sql("TRUNCATE q4");

# ---- rights and what is refused ---------------------------------------------------------------------------------

$t->sql("CREATE ROLE purger LOGIN; CREATE ROLE reader LOGIN; GRANT TRUNCATE ON q TO purger; GRANT SELECT, INSERT, UPDATE, DELETE ON q TO reader");
fill('q', 3);
$t->fails("TRUNCATE q", '42501', 'no right', user => 'reader');
$t->fails("BEGIN READ ONLY; TRUNCATE q", '25006', 'I5 in a read-only transaction');
is(count('q'), 3, '... nothing is changed');
$t->sql("TRUNCATE q", user => 'purger');
is_empty('q', 'the right to TRUNCATE is enough');
$t->sql("CREATE FOREIGN TABLE ready (payload text) SERVER redis OPTIONS (queue 'q', contents 'ready');"
	. " CREATE FOREIGN TABLE bad (member bytea, reason text) SERVER redis OPTIONS (queue 'q', contents 'quarantine')");
$t->fails("TRUNCATE ready", '0A000', 'the ready list is read only', like => qr/does not show what is pending/);
$t->fails("TRUNCATE bad", '0A000', 'quarantine', like => qr/DELETE discards/);
fill('q', 3);
$t->fails("TRUNCATE q, ready", '0A000', 'one of two');
is(count('q'), 3, '... keeps the other');
$r->freeze;
$t->sql("ALTER SERVER redis OPTIONS (ADD command_timeout '500 ms')");
{
	my ($rc, $out, $err) = $t->try("TRUNCATE q");
	like($err, qr/ERROR:  0800[16]:/, 'without Redis');
}
$r->thaw;
is(count('q'), 3, '... nothing is changed');

# ---- triggers, partitions, several ----------------------------------------------------------------------------------

$t->sql(<<'SQL');
ALTER SERVER redis OPTIONS (SET command_timeout '30 s');
CREATE TABLE log (at serial, what text);
CREATE FUNCTION say() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO log (what) SELECT tg_when || ' ' || tg_op || ' ' || (SELECT count(*) FROM q);
  IF tg_when = 'BEFORE' AND tg_level = 'STATEMENT' THEN PERFORM dq_offer('q', 'by a trigger', '1 hour'); END IF;
  RETURN coalesce(NEW, OLD);
END $$;
CREATE TRIGGER c BEFORE DELETE ON q FOR EACH ROW EXECUTE FUNCTION say();
SQL
my $triggers = "CREATE TRIGGER a BEFORE TRUNCATE ON q FOR EACH STATEMENT EXECUTE FUNCTION say();"
  . "CREATE TRIGGER b AFTER TRUNCATE ON q FOR EACH STATEMENT EXECUTE FUNCTION say()";
if ($t->sql('SHOW server_version_num') >= 160000)
{
	$t->sql("$triggers; TRUNCATE q");
	is($t->sql("SELECT string_agg(what, ',' ORDER BY at) FROM log"), 'BEFORE TRUNCATE 3,AFTER TRUNCATE 0', 'I4 TRUNCATE triggers, and no others');
	is_empty('q', '... what the one before offers is gone as well');
	$t->sql("DROP TRIGGER a ON q; DROP TRIGGER b ON q");
}
else
{
	$t->fails($triggers, '42809', 'I4 TRUNCATE triggers on foreign tables: from PostgreSQL 16 on');
	$t->sql("TRUNCATE q");
	is(count('log'), 0, 'I4 TRUNCATE fires no other trigger');
}
$t->sql("DROP TRIGGER c ON q");

$t->sql(<<'SQL');
CREATE TABLE parted (payload text, due_at timestamptz) PARTITION BY RANGE (due_at);
CREATE FOREIGN TABLE part_a PARTITION OF parted FOR VALUES FROM ('2900-01-01') TO ('2950-01-01') SERVER redis;
CREATE FOREIGN TABLE part_b PARTITION OF parted FOR VALUES FROM ('2950-01-01') TO ('3000-01-01') SERVER redis OPTIONS (shards '2');
CREATE TABLE part_c PARTITION OF parted DEFAULT;
SQL
my $fill = "INSERT INTO parted SELECT 'x' || i, timestamptz '2890-01-01' + i * interval '1 year' FROM generate_series(1, 120) i";
$t->sql($fill);
is($t->sql("SELECT count(*), (SELECT count(*) FROM part_a), (SELECT count(*) FROM part_b) FROM parted"), '120|50|50', 'H12 two queues and a table under one parent');
$s->run("BEGIN; TRUNCATE parted");
is($s->run("SELECT count(*) FROM parted"), 0, 'H12 TRUNCATE of the parent');
$s->run("ROLLBACK");
is(count('parted'), 120, '... rolled back');
fill('q', 3);
fill('q4', 3);
$t->sql("TRUNCATE parted, q, q4, log RESTART IDENTITY CASCADE");
is($t->sql("SELECT (SELECT count(*) FROM parted), (SELECT count(*) FROM log)"), '0|0', 'several at once');
is_empty($_, "... $_", $_ eq 'q4' ? map { "q4#$_" } 0 .. 3 : $_ eq 'part_b' ? map { "part_b#$_" } 0 .. 1 : $_) for 'q', 'q4', 'part_a', 'part_b';

# ---- many ----------------------------------------------------------------------------------------------------------------

my $n = rounds(20_000, 200_000);
$t->sql("INSERT INTO q4 (payload, due_at, key) SELECT 'm' || i, now() + '1 hour', CASE WHEN i % 2 = 0 THEN i END FROM generate_series(1, $n) i");
$t->sync;
$t->fails("SET statement_timeout = '60 ms'; TRUNCATE q4", '57014', 'H13 cancelled in the middle');
ok(poll_until(sub { $t->sql("SELECT coalesce(sum(held), 0) FROM dq_stats WHERE queue = 'q4'::regclass") == 0 }, 60), '... what it had taken goes back');
is(count('q4'), $n, '... all of it');
$r->cmd('CONFIG', 'RESETSTAT');
$s->run("SET synchronous_commit = on; TRUNCATE q4", 300);
my %calls = $r->cmd('INFO', 'commandstats') =~ /^cmdstat_(\w+):calls=(\d+)/mg;
my $scripts = ($calls{evalsha} || 0) + ($calls{eval} || 0);
# reading, taking and applying: pages of some hundred each, and the workers' looks
cmp_ok($scripts, '<', $n / 10, "A6 $n tasks by $scripts scripts");
is_empty('q4', '... all are gone', map { "q4#$_" } 0 .. 3);
my ($slowest) = sort { $b <=> $a } 0, map { $_->[2] } grep { $_->[3][0] =~ /^eval/i } @{ $r->cmd('SLOWLOG', 'GET', 128) };
cmp_ok($slowest, '<', 100_000, "A7 the slowest script took $slowest us");

$_->quit for $s, $o;
$t->finish;
