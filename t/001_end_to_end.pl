# The main job: a committed offer arrives exactly once, not before it is due,
# in order; one that is rolled back never was. Seen by redis-cli byte for byte.
# F2 F3 F4 A1 A2 B1 C5 G1 G5 G8; PO 2, 3
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

my $t = DqTest->new;
my $r = $t->redis;

$t->queue('q');
$t->queue('bytes');
$t->queue('order_q');
$t->queue('foreign_q');

# ---- offer, commit, fire ----------------------------------------------------
my $consumer = $r->consumer('q');
my $before = now_ms();
my $id = $t->sql("SELECT dq_offer('q', 'one', '1.5 seconds')");
my ($due, $n) = $id =~ /^(\d+)-(\d+)$/;
ok(defined $n, 'dq_offer returns <due ms>-<n>') or diag($id);
ok($due >= $before + 1500 && $due <= now_ms() + 1500, 'C5 delay counts from the call, fractions honoured');
ok(poll_until(sub { scalar $consumer->items == 1 }), 'a committed offer arrives');
my ($at, $list, $payload) = @{ ($consumer->items)[0] };
is($payload, 'one', 'with its payload');
cmp_ok($at, '>=', $due, 'never early');
cmp_ok($at, '<=', $due + 2000, 'and within the tolerance');

# ---- F2 F3 F4: what is rolled back never was ---------------------------------
my $monitor = $r->cmd('INFO', 'commandstats');
my ($evals) = $monitor =~ /cmdstat_evalsha:calls=(\d+)/;
$t->sql("BEGIN; SELECT dq_offer('q', 'F2 rolled back'); SELECT dq_remove('q', 'none'); ROLLBACK");
my $s = $t->session;
$s->run("BEGIN");
$s->run("SELECT dq_offer('q', 'F2 terminated')");
my $pid = $s->run("SELECT pg_backend_pid()");
$t->sql("SELECT pg_terminate_backend($pid)");
$s->quit;

$t->sql(<<'SQL');
BEGIN;
SELECT dq_offer('q', 'F3-1');
SAVEPOINT s;
SELECT dq_offer('q', 'F3-2');
SAVEPOINT t;
SELECT dq_offer('q', 'F3-3');
RELEASE t;
ROLLBACK TO s;
SELECT dq_offer('q', 'F3-4');
DO $$
BEGIN
  BEGIN
    PERFORM dq_offer('q', 'F3-5');
    RAISE division_by_zero;
  EXCEPTION WHEN division_by_zero THEN NULL;
  END;
END $$;
COMMIT;
SQL
my $start = time();
$t->sql(<<'SQL');
DO $$
BEGIN
  FOR i IN 1 .. 10000 LOOP
    BEGIN
      IF i % 1000 = 0 THEN
        PERFORM dq_offer('q', 'F3-sub' || i);
      END IF;
      IF i % 2000 = 0 THEN
        RAISE division_by_zero;
      END IF;
    EXCEPTION WHEN division_by_zero THEN NULL;
    END;
  END LOOP;
END $$;
SQL
cmp_ok(time() - $start, '<', 30, 'F3 10,000 subtransactions do not slow down');

$t->sql(<<'SQL');
CREATE TABLE parent (id int PRIMARY KEY);
CREATE TABLE child (id int REFERENCES parent DEFERRABLE INITIALLY DEFERRED);
SQL
$t->fails("BEGIN; INSERT INTO child VALUES (1); SELECT dq_offer('q', 'F4 deferred'); COMMIT",
	'23503', 'F4 a deferred check fails at COMMIT');
$s = $t->session;
$s->run("BEGIN");
$s->run("SELECT dq_offer('q', 'F4 aborted block')");
$s->run("SELECT 1/0");
$s->run("COMMIT");
$s->quit;

# SERIALIZABLE conflict at COMMIT
$t->sql("CREATE TABLE dots (id int, color text); INSERT INTO dots VALUES (1, 'black'), (2, 'white')");
my ($a, $b) = ($t->session, $t->session);
for ($a, $b) { $_->run("BEGIN ISOLATION LEVEL SERIALIZABLE"); }
$a->run("SELECT dq_offer('q', 'F4 serializable a')");
$b->run("SELECT dq_offer('q', 'F4 serializable b')");
$a->run("UPDATE dots SET color = 'black' WHERE color = 'white'");
$b->run("UPDATE dots SET color = 'white' WHERE color = 'black'");
my $ca = $a->run("COMMIT");
my $cb = $b->run("COMMIT");
ok($ca !~ /40001/ && $cb =~ /40001/, 'F4 SERIALIZABLE conflict at COMMIT') or diag("$ca / $cb");
$_->quit for ($a, $b);

# two-phase commit
$t->sql("BEGIN; SELECT dq_offer('q', '2PC committed'); PREPARE TRANSACTION 'p1'");
$t->sql("BEGIN; SELECT dq_offer('q', '2PC rolled back'); PREPARE TRANSACTION 'p2'");
$t->sql("SELECT dq_offer('q', 'end')");
$t->sql("COMMIT PREPARED 'p1'");
$t->sql("ROLLBACK PREPARED 'p2'");

my @expected = ('one', 'F3-1', 'F3-4', (map { 'F3-sub' . $_ } grep { $_ % 2000 } map { $_ * 1000 } 1 .. 10),
	'F4 serializable a', '2PC committed', 'end');
poll_until(sub { $consumer->payloads >= @expected });
$t->sync;
sleep(0.5);
is_books('F2 F3 F4: exactly what was committed arrives', \@expected, [ $consumer->payloads ]);
is($t->sql("SELECT count(*) FROM q"), '0', 'nothing stays behind');

# ---- B1: equal payloads are separate tasks ---------------------------------------
$t->sql("SELECT dq_offer('q', 'p', '1 second'), dq_offer('q', 'p', '2 seconds')");
$t->sql("SELECT count(dq_offer_at('q', 'same', 'now'::timestamptz + '1 second')) FROM generate_series(1, 1000)");
$t->sync;
push @expected, 'p', 'p', ('same') x 1000;
poll_until(sub { $consumer->payloads >= @expected });
is_books('B1 1,000 equal payloads are 1,000 tasks', \@expected, [ $consumer->payloads ]);
$consumer->stop;

# ---- order: equal due times are FIFO --------------------------------------------
$t->sql("SELECT count(dq_offer_at('order_q', i::text, '2020-01-01')) FROM generate_series(1, 2500) i");
poll_until(sub { $r->cmd('LLEN', 'order_q') == 2500 });
is(join(' ', $r->ready('order_q')), join(' ', 1 .. 2500), 'G8 equal due times are FIFO across pages');
$t->sql("SELECT dq_offer('order_q', 'x' || i, '1 second') FROM generate_series(1, 10) i");
$t->sql("SELECT dq_offer('order_q', 'y' || i, '1 second') FROM generate_series(1, 10) i");
poll_until(sub { $r->cmd('LLEN', 'order_q') == 2520 });
is(join(' ', ($r->ready('order_q'))[ 2500 .. 2519 ]), join(' ', (map { "x$_" } 1 .. 10), map { "y$_" } 1 .. 10),
	'G8 and in order of call over transactions');

# ---- DESIGN 5, byte for byte ------------------------------------------------------
$id = $t->sql("SELECT dq_offer_at('bytes', 'h' || U&'\\00e9' || 'llo', '2100-01-01 00:00:00.0001+00')");
my $keyed = $t->sql("SELECT dq_offer_at('bytes', 'with key', '2100-01-02+00', 42)");
$t->sync;
($due, $n) = $id =~ /^(\d+)-(\d+)$/;
is($due, '4102444800001', 'rounded up to the next millisecond');
my $member = DqTest::Redis::pack_member(pack('Q>', $n), "h\xc3\xa9llo");
is(unpack('H*', $r->cli('ZRANGE', 'redisson_delay_queue_timeout:{bytes}', 0, 0)), unpack('H*', $member),
	'the member is Bc0Lc0 of 8, id8 big-endian, length, payload');
is(($r->cli('ZRANGE', 'redisson_delay_queue_timeout:{bytes}', 0, 0, 'WITHSCORES') =~ /\n(\d+)\z/)[0], $due, 'the score is the due millisecond');
is($r->cli('ZCARD', 'redisson_delay_queue_timeout:{bytes}'), 2, 'two pending');
is($r->cli('TYPE', 'redisson_delay_queue_timeout:{bytes}'), 'zset', 'a ZSET');
is($r->cli('EXISTS', 'redisson_delay_queue:{bytes}'), 0, 'no companion list with list off');
is($r->cli('TYPE', 'dq:{bytes}:fence'), 'hash', 'the fence is a hash');
is($r->cli('EXISTS', 'dq:{bytes}:index'), 1, 'there is an index');
ok((grep { $_ !~ /^(redisson_delay_queue_timeout:\{\w+\}|dq:\{?\w+\}?:\w+|q|order_q|dq:\w+.*)$/ }
		split /\n/, $r->cli('--scan')) == 0, 'no key outside DESIGN 5') or diag($r->cli('--scan'));
is($t->sql("SELECT id || '|' || coalesce(key, '-') || '|' || payload || '|' || (extract(epoch FROM due_at) * 1000)::bigint || '|' || shard FROM bytes ORDER BY due_at"),
	"$id|-|h\xc3\xa9llo|4102444800001|0\n$keyed|42|with key|4102531200000|0", 'the foreign table shows the same');

# the channel says when a task became the earliest, and only then
{
	my $sub = $r->connect_new;
	print { $sub->{fh} } DqTest::Redis::encode('SUBSCRIBE', 'redisson_delay_queue_channel:{bytes}');
	DqTest::Redis::read_reply($sub);
	$t->sql("SELECT dq_offer_at('bytes', 'later', '2100-01-03+00')");
	$t->sql("SELECT dq_offer_at('bytes', 'earlier', '2099-12-31+00')");
	$t->sync;
	my $m = DqTest::Redis::read_reply($sub);
	is($m->[2], '4102358400000', 'PUBLISH of the decimal due ms when a task became the earliest');
}

# due: RPUSH of the payload bytes
$t->sql("SELECT dq_offer('order_q', '{\"a\": 1}'::jsonb)");
poll_until(sub { $r->cmd('LLEN', 'order_q') == 2521 });
is($r->cli('LINDEX', 'order_q', -1), '{"a": 1}', 'the ready list holds the payload bytes, RPUSHed');
is($r->cli('TYPE', 'order_q'), 'list', 'in a LIST');

# shards: keyed tasks by CRC-32C
$t->sql("CREATE FOREIGN TABLE sharded (id text, key text, payload text, due_at timestamptz, shard int) SERVER redis OPTIONS (shards '3')");
$t->sql("SELECT dq_offer('sharded', 'k', '1 hour', '123456789')");
$t->sync;
# CRC-32C of '123456789' is e3069283
is($r->cmd('ZCARD', 'redisson_delay_queue_timeout:{sharded#' . (0xe3069283 % 3) . '}'), 1, 'shard of a key is its CRC-32C mod shards');
$t->sql("SELECT dq_offer('sharded', 'r' || i, '1 hour') FROM generate_series(1, 30) i");
$t->sync;
is(join(' ', sort map { $r->cmd('ZCARD', "redisson_delay_queue_timeout:{sharded#$_}") } 0 .. 2), '10 10 11',
	'keyless ones go round robin');
is($t->sql("SELECT count(DISTINCT shard) FROM sharded"), 3, 'the foreign table shows all shards');

# ---- A2: foreign producers, Redisson's script text -----------------------------------
$consumer = $r->consumer('foreign_q');
$t->sql("SELECT dq_offer('foreign_q', 'A2 far', '60 seconds')");
$t->sync;
$due = now_ms() + 2000;
$r->redisson_offer('foreign_q', $due, 'A2 foreign');
ok(poll_until(sub { $consumer->items }), "A2 a task written with Redisson's script text is delivered");
cmp_ok(($consumer->items)[0][0], '>=', $due, 'A2 not early');
cmp_ok(($consumer->items)[0][0], '<=', $due + 500, 'A2 the channel told the worker: on time');
$due = now_ms() + 1000;
$r->redisson_offer('foreign_q', $due, 'A2 silent', silent => 1);
poll_until(sub { $consumer->items == 2 });
cmp_ok(($consumer->items)[1][0], '<=', $due + 2000, 'A2 a producer that does not publish: scan_interval + 1 s at most');
$t->sql("SELECT dq_offer('foreign_q', 'A2 short', '2 seconds')");
poll_until(sub { $consumer->items == 3 });
is(join(',', $consumer->payloads), 'A2 foreign,A2 silent,A2 short', 'A2 short behind long arrives in time');
is($t->sql("SELECT payload FROM foreign_q"), 'A2 far', 'A2 the long one stays pending');
# any id length, and the old packing
$r->redisson_offer('foreign_q', now_ms(), "id$_", idlen => $_) for (1, 8, 255);
$r->cmd('ZADD', 'redisson_delay_queue_timeout:{foreign_q}', now_ms(), DqTest::Redis::pack_old_member(0.4711, 'old packing'));
poll_until(sub { $consumer->items == 7 });
is(join(',', sort(($consumer->payloads)[ 3 .. 6 ])), 'id1,id255,id8,old packing', 'any id length and the old packing are read');
my $fid = do { $r->redisson_offer('foreign_q', now_ms() + 3600_000, 'x', id => "\x01\xff\x00"); $t->sql("SELECT id FROM foreign_q WHERE payload = 'x'") };
like($fid, qr/^\d+-x01ff00$/, 'id of a foreign member is <due>-x<hex>');
$consumer->stop;

$t->finish;
