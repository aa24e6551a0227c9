# Redis stopped or frozen: business goes on, everything stays interruptible, and
# what was committed arrives afterwards, in order, without any restart.
# A1 A3 A4 C5 E2 E3 E8 F6 F9 F11 F15 G5 G7 G10
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
$t->queue('q2');
$t->sql("SELECT dq_offer('q', 'before')");
ok(poll_until(sub { $r->cmd('LLEN', 'q') == 1 }), 'it works to begin with');
$r->cmd('DEL', 'q');

# ---- F6 F9 G7: Redis stopped ---------------------------------------------------
$r->stop;
my $start = time();
$t->sql("SELECT dq_offer('q', 'out' || i) FROM generate_series(1, 10) i");
cmp_ok(time() - $start, '<', 2, 'dq_offer does not wait for a stopped Redis');
$t->sql("SELECT dq_offer('q', 'C5 late', '1 second')");
my $rounds = rounds(200, 1000);
$t->sql(<<SQL);
DO \$\$
BEGIN
  FOR i IN 1 .. $rounds LOOP
    PERFORM dq_offer('q2', 'X' || i, '5 seconds', 'x' || i);
    COMMIT;
    PERFORM dq_remove('q2', 'x' || i);
    COMMIT;
    PERFORM dq_offer('q2', 'Y' || i, '5 seconds');
    COMMIT;
  END LOOP;
END \$\$;
SQL
ok($t->wait_state('q', 'redis_down'), 'dq_stats says redis_down');
$start = time();
is($t->sql("SELECT dq_remove('q', 'nobody knows') IS NULL"), 't', 'G7 dq_remove during an outage: NULL, recorded');
cmp_ok(time() - $start, '<', 3, 'G7 within remove_timeout');
is($t->sql("SELECT dq_sync('q', '300 ms')"), 'f', 'dq_sync: false with Redis down, no error');
{
	my ($rc, $out, $err) = $t->try("SELECT count(*) FROM q");
	ok($rc != 0 && $err =~ /ERROR:\s+0800[16]:/, 'E2 reading the foreign table: class 08') or diag($err);
}
my $pid = $t->bridge_pid;
sleep(3);	# more reconnection attempts than any limit would allow
$r->start;
ok(poll_until(sub { $r->cmd('LLEN', 'q') >= 11 && $r->cmd('LLEN', 'q2') >= $rounds }), 'all arrives when Redis is back');
sleep(0.5);
is(join(' ', $r->ready('q')), join(' ', (map { "out$_" } 1 .. 10), 'C5 late'), 'F9 in order, and nothing parked; C5 the late one at once');
is_books('F6 all X removed, all Y there once', [ map { "Y$_" } 1 .. $rounds ], [ $r->ready('q2') ]);
is(join(' ', $r->ready('q2')), join(' ', map { "Y$_" } 1 .. $rounds), 'F6 nothing re-ordered');
is($t->bridge_pid, $pid, 'the worker was not restarted');
cmp_ok($t->sql("SELECT max(reconnects) FROM dq_workers WHERE role = 'bridge'"), '>=', 1, 'dq_workers counts the reconnect');
ok($t->wait_state('q', 'running'), 'dq_stats says running again');

# ---- E3: a session with a cached unix socket connection ---------------------------
{
	my $s = $t->session;
	is($s->run("SELECT count(*) FROM q"), '0', 'E3 a session reads');
	my $backend = $s->run("SELECT pg_backend_pid()");
	$r->stop;
	my $e = $s->run("SELECT count(*) FROM q");
	like($e, qr/ERROR:\s+0800[16]/, 'E3 the server went away: an error');
	is($s->run("SELECT pg_backend_pid()"), $backend, 'E3 the session lives');
	$r->start;
	is($s->run("SELECT count(*) FROM q"), '0', 'E2 the next statement works again');
	$s->quit;
}

# ---- Redis frozen -------------------------------------------------------------------
$t->sql("SELECT dq_offer('q2', 'pending', '1 hour')");
$t->sync;
$r->freeze;
$start = time();
$t->sql("SELECT dq_offer('q2', 'while frozen')");
cmp_ok(time() - $start, '<', 2, 'dq_offer does not wait for a frozen Redis');
for my $what ([ 'SELECT', "SELECT * FROM q2" ], [ 'count', "SELECT count(*) FROM q2" ],
	[ 'EXPLAIN ANALYZE', "EXPLAIN ANALYZE SELECT * FROM q2" ], [ 'dq_transfer', "SELECT dq_transfer('q2')" ],
	[ 'dq_sync', "SELECT dq_sync('q2', '60 s')" ])
{
	$start = time();
	my ($rc, $out, $err) = $t->try("SET statement_timeout = '1s'; $what->[1]");
	my $took = time() - $start;
	ok($took < 3, "E8 $what->[0] on a frozen Redis obeys statement_timeout") or diag("$took s");
	like($err, qr/57014|55006/, "E8 $what->[0]: cancelled") or diag($out);
}
{
	my $s = $t->session;
	my $backend = $s->run("SELECT pg_backend_pid()");
	$s->send("SELECT * FROM q2");
	poll_until(sub { $t->sql("SELECT count(*) FROM pg_stat_activity WHERE pid = $backend AND state = 'active'") });
	$start = time();
	$t->sql("SELECT pg_cancel_backend($backend)");
	like($s->receive(10), qr/57014/, 'E8 pg_cancel_backend');
	cmp_ok(time() - $start, '<', 2, 'E8 within 2 s');
	$s->send("SELECT * FROM q2");
	poll_until(sub { $t->sql("SELECT count(*) FROM pg_stat_activity WHERE pid = $backend AND state = 'active'") });
	$start = time();
	$t->sql("SELECT pg_terminate_backend($backend)");
	ok(poll_until(sub { !$t->sql("SELECT count(*) FROM pg_stat_activity WHERE pid = $backend") }, 10), 'E8 pg_terminate_backend');
	cmp_ok(time() - $start, '<', 2, 'E8 within 2 s');
	$s->quit;
}
# F11: the worker holds no transaction while it waits
{
	my $worst = 0;
	my $end = time() + 7;
	while (time() < $end)
	{
		my $age = $t->sql("SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0) FROM pg_stat_activity WHERE backend_type LIKE 'dq_bridge%'");
		$worst = $age if $age > $worst;
		sleep(0.1);
	}
	cmp_ok($worst, '<', 6, 'F11 no worker transaction older than the command timeout');
}
# other databases can go
$t->sql("CREATE DATABASE other");
$start = time();
$t->sql("DROP DATABASE other");
cmp_ok(time() - $start, '<', 2, 'G10 DROP DATABASE of another database within 2 s');

# fast stop
$start = time();
$t->node->stop('fast');
cmp_ok(time() - $start, '<', 4, 'E8 pg_ctl stop -m fast with a frozen Redis returns within 3 s');
$r->thaw;
$t->node->start;
ok(poll_until(sub { grep { $_ eq 'while frozen' } $r->ready('q2') }), 'and after start all arrives');

# ---- F15: immediate stop with rows on their way -----------------------------------------
$r->cmd('DEL', 'q');
$r->stop;
$t->sql("SELECT dq_offer('q', 'F15-' || i) FROM generate_series(1, 100) i");
is($t->sql(<<'SQL'), '', 'F15 every table and sequence of the extension is permanent');
SELECT relname FROM pg_class c JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = c.oid
JOIN pg_extension e ON e.oid = d.refobjid AND d.refclassid = 'pg_extension'::regclass
WHERE extname = 'dq_bridge' AND relpersistence <> 'p'
SQL
$t->node->stop('immediate');
$t->node->start;
$r->start;
ok(poll_until(sub { $r->cmd('LLEN', 'q') >= 100 }), 'F15 the 100 are relayed after an immediate stop');
is(join(' ', $r->ready('q')), join(' ', map { "F15-$_" } 1 .. 100), 'F15 each once and in order');

# ---- A1 A3: connections killed while waiting ------------------------------------------------
$r->cmd('DEL', 'q');
$t->sql("SELECT dq_offer('q', 'A1-' || i, '3 seconds') FROM generate_series(1, 3) i");
$t->sync;
my $due = now_ms() + 3000;
for my $type (qw(normal pubsub)) { eval { $r->cmd('CLIENT', 'KILL', 'TYPE', $type, 'SKIPME', 'yes') }; }
ok(poll_until(sub { $r->cmd('LLEN', 'q') == 3 }), 'A1 all connections killed while waiting: they arrive');
cmp_ok(now_ms() - $due, '<', 2000, 'A1 within scan_interval + 1 s');
$t->sql("SELECT dq_offer('q', 'A1-paused', '2 seconds')");
$t->sync;
sleep(1.5);
$r->cmd('CLIENT', 'PAUSE', 3000, 'ALL');
my $back = time() + 3;
ok(poll_until(sub { $r->cmd('LLEN', 'q') == 4 }), 'A1 Redis paused over the due instant: it arrives');
cmp_ok(time() - $back, '<', 2.5, 'A1 soon after Redis answers again');
# pub/sub lost for good, a foreign producer tells nobody
$r->cmd('CLIENT', 'KILL', 'TYPE', 'pubsub');
my $silent = now_ms() + 500;
$r->redisson_offer('q', $silent, 'silent', silent => 1);
ok(poll_until(sub { $r->cmd('LLEN', 'q') == 5 }), 'a silent foreign task arrives');
cmp_ok(now_ms() - $silent, '<', 2200, 'nothing later than scan_interval + 1 s');

# A3: many single offers, each waited for
my $n = rounds(200, 2000);
my ($max, @late) = (0);
{
	my $s = $t->session;
	$r->cmd('DEL', 'q');
	for my $i (1 .. $n)
	{
		my $delay = int(rand(50));
		my $id = $s->run("SELECT dq_offer('q', 'a3-$i', '$delay ms')");
		$id =~ /^(\d+)-/;
		my $got = $r->cmd('BLPOP', 'q', 10);
		push @late, now_ms() - $1;
		last unless $got;
		sleep(rand(0.03));
	}
	$s->quit;
}
@late = sort { $a <=> $b } @late;
is(scalar @late, $n, "A3 $n single offers all arrive");
cmp_ok($late[-1], '<', 1000, "A3 the latest is below the scan interval ($late[-1] ms; median $late[$#late / 2] ms)");

# COMMIT PREPARED wakes as well
$t->sql("BEGIN; SELECT dq_offer('q', 'prepared'); PREPARE TRANSACTION 'a3'");
$t->sql("COMMIT PREPARED 'a3'");
$start = time();
ok($r->cmd('BLPOP', 'q', 10), 'A3 COMMIT PREPARED');
cmp_ok(time() - $start, '<', 1.5, 'A3 within a scan interval');

# A4: restart around the due instant
$t->sql("SELECT dq_offer('q', 'A4', '2 seconds')");
$t->sync;
sleep(1.5);
$t->node->restart;
my $got = $r->cmd('BLPOP', 'q', 15);
is($got && $got->[1], 'A4', 'A4 a restart around the due instant: fires once');

$t->finish;
