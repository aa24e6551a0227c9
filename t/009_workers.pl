# The life of the workers and the conditions of the server they talk to.
# G2 G3 G5 G6 G7 G9 G10 G12 D1 D2 D3 D4 D6 D9 E5 E6 E7 E14 A12 F13
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
my $n = 0;
# one task arrives: the whole way works
sub works
{
	my ($name, %o) = @_;
	my $q = $o{queue} || 'q';

	$n++;
	$t->sql("SELECT dq_offer('$q', 'w$n')", %o) unless $o{offered};
	my $expected = $o{offered} || "w$n";
	my $got;
	# skip: to a server that this database has not known, or not lately, tasks of
	# the replay window are sent again
	do { $got = ($o{redis} || $r)->cmd('BLPOP', $q, $o{within} || 30); }
	while ($got && $o{skip} && $got->[1] ne $expected);
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is($got && $got->[1], $expected, $name)
	  or diag($t->sql("SELECT queue, state, last_error FROM dq_stats", %o) . "\n" . $t->sql("SELECT pid, role, database, server, state, last_error FROM dq_workers", %o));
}

works('to begin with');
is($t->sql("SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'dq_bridge%'"),
	$t->sql("SELECT count(*) FROM dq_workers WHERE pid > 0"), 'bgw_type of every process begins with dq_bridge');
is($t->sql("SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'dq_bridge%' AND (xact_start IS NOT NULL OR backend_xmin IS NOT NULL)"),
	0, 'F11 none of them holds a transaction when idle');

# ---- G5: comes back ---------------------------------------------------------------------
for my $i (1 .. 3)
{
	my $pid = $t->bridge_pid;
	$t->sql("SELECT pg_terminate_backend($pid)");
	works("G5 after pg_terminate_backend of the bridge ($i)", within => 20);
}
my $launcher = $t->sql("SELECT pid FROM dq_workers WHERE role = 'launcher'");
$t->sql("SELECT pg_terminate_backend($launcher)");
works('G5 while the launcher is away');
ok(poll_until(sub { ($t->sql("SELECT pid FROM dq_workers WHERE role = 'launcher'") || 0) > 0 && $t->sql("SELECT pid FROM dq_workers WHERE role = 'launcher'") != $launcher }),
	'G5 the launcher comes back');
my $s = $t->session;
my $victim = $s->run("SELECT pg_backend_pid()");
kill 'SEGV', $victim;
$s->quit;
poll_until(sub { my ($rc) = $t->try("SELECT 1"); $rc == 0 });
works('G5 after a crash of another backend', within => 40);
is($t->sql("SELECT count(*) FROM dq_workers WHERE role = 'bridge' AND pid > 0"), 1, 'G5 one bridge, not two');
$t->node->restart;
works('G5 after a restart');

# ---- the switches --------------------------------------------------------------------------
$t->sql("SELECT dq_worker_stop()");
ok(poll_until(sub { !$t->sql("SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'dq_bridge%' AND datname = 'postgres'") }), 'dq_worker_stop: the database is free');
# ... and as often as one likes: what was ended on purpose has not failed, so the last
# start is not made to wait, and none stays until it is killed
my $slowest = 0;
for (1 .. 10)
{
	$t->sql('SELECT dq_worker_start()');
	my $running = poll_until(sub { $t->sql("SELECT count(*) FROM dq_workers WHERE role = 'bridge' AND database = 'postgres' AND pid > 0") }, 5);
	ok($running, "dq_worker_start, time $_") or last;
	my $start = time();
	$t->sql('SELECT dq_worker_stop()');
	$slowest = time() - $start if time() - $start > $slowest;
}
cmp_ok($slowest, '<', 0.9, 'dq_worker_stop: those asked leave by themselves');
for my $ms (map { $_ * 4 } 0 .. 12)
{
	$t->sql("SELECT dq_worker_start(); SELECT pg_sleep($ms / 1000.0); SELECT dq_worker_stop()");
}
$t->sql('SELECT dq_worker_start()');
ok(poll_until(sub { $t->sql("SELECT count(*) FROM dq_workers WHERE role = 'bridge' AND database = 'postgres' AND pid > 0") }, 5),
	'dq_worker_start after many that were ended at once');
$t->sql('SELECT dq_worker_stop()');
$t->sql("SELECT dq_offer('q', 'by hand')");
is($t->sql("SELECT dq_sync('q')"), 't', 'dq_sync relays itself when no worker runs');
is($t->sql("SELECT dq_transfer('q')"), '1', 'dq_transfer moves by hand');
works('and it is there', offered => 'by hand');
$t->sql("SELECT dq_offer('q', 'rm', '1 hour', 'rm')");
is($t->sql("SELECT dq_remove('q', 'rm')"), 't', 'dq_remove relays itself when no worker runs');
is($t->sql("SELECT dq_sync('q')"), 't', 'its commit is relayed by hand too');
is($r->cmd('ZCARD', 'redisson_delay_queue_timeout:{q}'), 0, 'and the task is gone');
$t->sql("SELECT dq_worker_start()");
works('dq_worker_start');
$t->sql("ALTER SYSTEM SET dq_bridge.enabled = off");
$t->node->reload;
ok(poll_until(sub { !$t->sql("SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'dq_bridge%' AND datname = 'postgres'") }), 'dq_bridge.enabled off stops the workers');
$t->sql("ALTER SYSTEM RESET dq_bridge.enabled");
$t->node->reload;
works('enabled again, by a reload');

# pause and resume
$t->sql("SELECT dq_pause('q')");
$t->sql("SELECT dq_offer('q', 'paused')");
$t->sync;
ok($t->wait_state('q', 'paused'), 'dq_stats says paused');
sleep(0.5);
is($r->cmd('LLEN', 'q'), 0, 'dq_pause: due tasks wait');
is($t->sql("SELECT payload FROM q"), 'paused', 'reads go on');
$t->sql("BEGIN; SELECT dq_resume('q'); ROLLBACK");
sleep(0.5);
is($r->cmd('LLEN', 'q'), 0, 'a pause is transactional');
$t->node->restart;
sleep(1.5);
is($r->cmd('LLEN', 'q'), 0, 'a pause survives restarts');
$t->sql("SELECT dq_resume('q')");
works('dq_resume', offered => 'paused');

# ---- G12: settings of the database --------------------------------------------------------------
for my $set ("statement_timeout = '500ms'", "idle_in_transaction_session_timeout = '500ms'", "idle_session_timeout = '1s'",
	"lock_timeout = '100ms'", "default_transaction_read_only = on", "default_transaction_isolation = serializable",
	"row_security = off", "search_path = ''",
	$t->sql("SHOW server_version_num") >= 170000 ? "transaction_timeout = '1s'" : ())
{
	$t->sql("SET default_transaction_read_only = off; ALTER DATABASE postgres SET $set");
}
$t->sql("SET default_transaction_read_only = off; SELECT public.dq_worker_stop()");
$t->sql("SET default_transaction_read_only = off; SELECT public.dq_worker_start()");
sleep(1.5);
$t->sql("SET default_transaction_read_only = off; SELECT public.dq_offer('public.q', 'g12')");
works('G12 the worker goes on under hostile settings of the database', offered => 'g12');
$t->sql("SET default_transaction_read_only = off; ALTER DATABASE postgres RESET ALL");

# ---- D: conditions of Redis ------------------------------------------------------------------------
# D1 NOSCRIPT
{
	my $pid = fork();
	if ($pid == 0)
	{
		$r->disconnect;
		for (1 .. 60) { eval { $r->cmd('SCRIPT', 'FLUSH') }; select(undef, undef, undef, 0.05); }
		require POSIX;
		POSIX::_exit(0);
	}
	my @offered;
	for my $i (1 .. 20)
	{
		$t->sql("SELECT dq_offer('q', 'd1-$i-' || g, '10 ms') FROM generate_series(1, 50) g; SELECT count(*) FROM q; SELECT dq_remove('q', 'none')");
		push @offered, map { "d1-$i-$_" } 1 .. 50;
	}
	waitpid($pid, 0);
	poll_until(sub { $r->cmd('LLEN', 'q') >= @offered });
	is_books('D1 SCRIPT FLUSH all the time: no error, counts exact', \@offered, [ $r->ready('q') ]);
	$r->cmd('DEL', 'q');
}

# D2 READONLY
my $master = DqTest::Redis->new(name => 'master');
$r->cmd('CONFIG', 'SET', 'replica-read-only', 'yes');
$t->sql("SELECT dq_offer('q', 'd2-0', '1 hour')");
$t->sync;
{
	# a copy of our data, so that the replica has it when it follows
	$r->cmd('REPLICAOF', '127.0.0.1', $master->port);
	$t->sql("SELECT dq_offer('q', 'd2-' || i) FROM generate_series(1, 20) i");
	sleep(3);
	is($t->sql("SELECT state = 'redis_down' OR last_error IS NOT NULL FROM dq_stats WHERE queue = 'q'::regclass"), 't', 'D2 dq_stats tells that Redis is read only');
	$r->cmd('REPLICAOF', 'NO', 'ONE');
	ok(poll_until(sub { $r->cmd('LLEN', 'q') >= 20 }), 'D2 a master again: all arrives without restart')
	  or diag($t->sql("SELECT state, last_error FROM dq_stats"));
	my @got = grep { !/d2-0/ } $r->ready('q');
	is(join(' ', @got), join(' ', map { "d2-$_" } 1 .. 20), 'D2 in order, each once');
	$r->cmd('DEL', 'q');
}
$master->stop;

# D4 BUSY
{
	$r->cmd('CONFIG', 'SET', 'lua-time-limit', 200);
	my $c = $r->connect_new;
	print { $c->{fh} } DqTest::Redis::encode('EVAL', 'while true do end', 0);
	$c->{fh}->flush;
	sleep(0.6);
	$t->sql("SELECT dq_offer('q', 'busy')");
	my $start = time();
	my ($rc, $out, $err) = $t->try("SET statement_timeout = '1s'; SELECT count(*) FROM q");
	like($err, qr/(57P03|57014|0800\d):/, 'D4 SELECT while another script runs: an error');
	cmp_ok(time() - $start, '<', 3, 'D4 and soon');
	$r->disconnect;
	# while it runs everything else is answered by BUSY
	poll_until(sub { eval { $r->cmd('SCRIPT', 'KILL'); 1 } || $@ =~ /NOTBUSY/ });
	poll_until(sub { eval { $r->cmd('DBSIZE'); 1 } });
	works('D4 recovers without restart', offered => 'busy');
}

# D6 eviction, no persistence: warnings
$r->cmd('CONFIG', 'SET', 'maxmemory-policy', 'allkeys-lru');
$r->cmd('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes');
ok(poll_until(sub { ($t->sql("SELECT array_to_string(warnings, ',') FROM dq_stats WHERE queue = 'q'::regclass") || '') =~ /evict|maxmemory/i }), 'D6 an evicting policy is flagged in dq_stats');
ok($t->log_text =~ /maxmemory|evict/i, 'D6 and in the log');
$r->cmd('CONFIG', 'SET', 'maxmemory-policy', 'noeviction');

# D9 EVAL forbidden
$r->cmd('ACL', 'SETUSER', 'default', '-eval', '-evalsha');
$r->cmd('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes');
$t->sql("SELECT dq_offer('q', 'd9')");
ok(poll_until(sub { ($t->stat('q', 'last_error') || '') =~ /NOPERM|permission/i }), 'D9 EVAL forbidden: a clear message in dq_stats');
{
	my ($rc, $out, $err) = $t->try("SELECT count(*) FROM q");
	like($err, qr/42501:/, 'D9 a read gives 42501');
}
$r->cmd('ACL', 'SETUSER', 'default', '+eval', '+evalsha');
works('D9 recovers without restart', offered => 'd9');

# A12: emptied under the worker
$t->sql("SELECT dq_offer('q', 'a12', '1 hour')");
$t->sync;
$r->cmd('FLUSHALL');
$r->cmd('SCRIPT', 'FLUSH');
$t->sql("SELECT dq_offer('q', 'after the flood')");
# tasks of the replay window may come again, so look for this one
ok(poll_until(sub { my $got = $r->cmd('BLPOP', 'q', 1); $got && $got->[1] eq 'after the flood' }),
	'A12 FLUSHALL under an idle worker: a new task arrives');
ok(poll_until(sub { $r->cmd('ZCARD', 'redisson_delay_queue_timeout:{q}') >= 1 }), 'A12 and what was pending is back');
$t->sql("SELECT dq_remove('q', 'a12')");
$t->sync;
$r->cmd('DEL', 'q');

# ---- E6 E7: connections and definitions ------------------------------------------------------------
$s = $t->session;
is($s->run("SELECT count(*) >= 0 FROM q"), 't', 'a session reads');
$r->cmd('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes');
is($s->run("SELECT count(*) >= 0 FROM q"), 't', 'E6 a connection dropped between two statements: one transparent reconnect');
my $r2 = DqTest::Redis->new(name => 'moved');
$t->sql("ALTER SERVER redis OPTIONS (SET socket '" . $r2->socket . "')");
$s->run("SELECT count(*) FROM q");
$r2->cmd('ZADD', 'redisson_delay_queue_timeout:{q}', '4e12', DqTest::Redis::pack_member('12345678', 'over here'));
is($s->run("SELECT payload FROM q WHERE payload = 'over here'"), 'over here', 'E7 ALTER SERVER acts at the next statement of an open session');
works('E7 and in the worker', redis => $r2, skip => 1);
$t->sql("ALTER SERVER redis OPTIONS (SET socket '" . $r->socket . "')");
works('and back', skip => 1);
$s->quit;

# E14: credentials
my $password = "p w'\"%s%@\\\xc3\xa9";
(my $quoted = $password) =~ s/'/''/g;
$r->cmd('ACL', 'SETUSER', 'odd-user%s', 'on', ">$password", '~*', '&*', '+@all');
$t->sql("CREATE USER MAPPING FOR CURRENT_USER SERVER redis OPTIONS (username 'odd-user%s', password '$quoted')");
is($t->sql("SELECT count(*) >= 0 FROM q"), 't', 'E14 a password of odd characters works');
works('E14 for the worker too');
$t->sql("ALTER USER MAPPING FOR CURRENT_USER SERVER redis OPTIONS (SET password 'wr%song')");
my $err = $t->fails("SELECT count(*) FROM q", '28P01', 'E14 a wrong password fails at connect');
ok($err !~ /wr%song/, 'K4 the password is not in the message');
$t->sql("DROP USER MAPPING FOR CURRENT_USER SERVER redis");
works('E7 DROP USER MAPPING acts');

# E5: addresses
for (['::1', 'IPv6'], ['localhost', 'a name'])
{
	my ($host, $what) = @$_;
  SKIP: {
		if ($host eq '::1')
		{
			skip 'no IPv6 here', 1 unless eval { $r->cmd('CONFIG', 'SET', 'bind', '127.0.0.1 ::1'); 1 };
		}
		$t->sql("DROP SERVER IF EXISTS addr CASCADE; CREATE SERVER addr FOREIGN DATA WRAPPER dq_bridge OPTIONS (host '$host', port '" . $r->port . "')");
		$t->queue('addr_q', undef, server => 'addr');
		$t->sql("SELECT dq_offer('addr_q', 'x')");
		ok($r->cmd('BLPOP', 'addr_q', 15), "E5 $what works");
	}
}
{
	my $port = DqTest::Redis::free_port();
	for (["host '127.0.0.1', port '$port'", 'a wrong port'], ["host 'no-such-host.invalid'", 'a name that does not resolve'])
	{
		my ($options, $what) = @$_;
		$t->sql("DROP SERVER IF EXISTS addr CASCADE; CREATE SERVER addr FOREIGN DATA WRAPPER dq_bridge OPTIONS ($options)");
		$t->queue('addr_q', undef, server => 'addr');
		my $start = time();
		my ($rc, $out, $e) = $t->try("SET statement_timeout = '4s'; SELECT count(*) FROM addr_q");
		like($e, qr/08001:/, "E5 $what: 08001");
		cmp_ok(time() - $start, '<', 6, 'E5 in time');
	}
	$t->sql("DROP SERVER addr CASCADE");
}

# ---- G2: DROP DATABASE and friends --------------------------------------------------------------
$t->sql("CREATE DATABASE app");
$t->extend('app');
$t->queue('appq', undef, db => 'app');
works('G2 another database is served', queue => 'appq', db => 'app');
my $start = time();
$t->sql("DROP DATABASE app");
cmp_ok(time() - $start, '<', 2.5, 'G2 plain DROP DATABASE of a served database');
$t->sql("CREATE DATABASE app");
$t->extend('app');
$t->queue('appq2', undef, db => 'app');
works('G2 a re-created database is served again', queue => 'appq2', db => 'app');
$start = time();
$t->sql("DROP DATABASE app WITH (FORCE)");
cmp_ok(time() - $start, '<', 2.5, 'G2 DROP DATABASE WITH (FORCE)');
$t->sql("CREATE DATABASE app");
$t->extend('app');
$t->queue('appq3', undef, db => 'app');
works('G2 once more', queue => 'appq3', db => 'app');
$start = time();
$t->sql("ALTER DATABASE app RENAME TO app2");
cmp_ok(time() - $start, '<', 2.5, 'G2 ALTER DATABASE RENAME');
works('G2 the renamed one is served', queue => 'appq3', db => 'app2');
$t->sql("DROP EXTENSION dq_bridge CASCADE", db => 'app2');
$t->sql("DROP DATABASE app2");
ok(1, 'G2 DROP EXTENSION, then DROP DATABASE');

# ---- G3: DROP EXTENSION under load -----------------------------------------------------------------
$t->sql("CREATE DATABASE g3");
my %g3 = (db => 'g3');
my $rounds = rounds(8, 50);
my $bad = 0;
for my $i (1 .. $rounds)
{
	$t->extend('g3');
	$t->queue("g3q", undef, %g3);
	$t->sql("SELECT dq_offer('g3q', 'r' || i) FROM generate_series(1, 200) i", %g3);
	if ($i % 3 == 1) { $t->sql("BEGIN; DROP EXTENSION dq_bridge CASCADE; ROLLBACK", %g3); }
	if ($i % 3 == 2)
	{
		my ($rc, $out, $err) = $t->try("BEGIN; DROP EXTENSION dq_bridge CASCADE; CREATE EXTENSION dq_bridge; COMMIT", %g3);
		$bad++ if $rc != 0;
	}
	my $start = time();
	my ($rc, $out, $err) = $t->try("DROP EXTENSION dq_bridge CASCADE", %g3);
	$bad++ if $rc != 0 || $err =~ /deadlock/ || time() - $start > 5;
	diag($err) if $rc != 0;
}
is($bad, 0, "G3 $rounds times DROP EXTENSION under load: no deadlock, no waiting");
$r->cmd('DEL', 'g3q', 'redisson_delay_queue_timeout:{g3q}');
$t->extend('g3');
$t->queue('g3last', undef, %g3);
works('G3 the re-created extension is served', queue => 'g3last', %g3);

# ---- G10: many databases, one from a template ---------------------------------------------------------
for my $i (1 .. 3)
{
	$t->sql("CREATE DATABASE many$i");
	$t->extend("many$i");
	$t->queue("manyq$i", undef, db => "many$i");
}
works("G10 database $_ is served", queue => "manyq$_", db => "many$_") for 1 .. 3;
# the original owns its queue by now: of two databases that show one queue the
# first to come is the owner
$t->sql("CREATE DATABASE many4 TEMPLATE many1");
$t->queue('manyq4', undef, db => 'many4');
{
	# a copy from a template is found by the launcher's next look or by hand
	$t->sql("SELECT dq_worker_start()", db => 'many4');
	works('G10 one made from a template is served', queue => 'manyq4', db => 'many4');
}

# ---- G9: no worker slots -------------------------------------------------------------------------------
$t->sql("ALTER SYSTEM SET max_worker_processes = 2");
$t->node->restart;
like($t->sql("SELECT dq_offer('q', 'g9')"), qr/^\d+-/, 'G9 dq_offer succeeds without worker slots');
sleep(3);
{
	my $log = $t->log_text;
	my ($tail) = $log =~ /.*(starting PostgreSQL.*)\z/s;
	my @w = $tail =~ /WARNING:[^\n]*(?:worker|max_worker_processes)[^\n]*/g;
	ok(@w >= 1 && @w <= 3, 'G9 one clear message, not one a second') or diag(scalar(@w) . " messages");
}
$t->sql("ALTER SYSTEM RESET max_worker_processes");
$t->node->restart;
works('G9 served when there are slots', offered => 'g9');

# ---- G6: fast stop with a missing synchronous standby ----------------------------------------------------
$t->sql("ALTER SYSTEM SET synchronous_standby_names = 'nobody'");
$t->node->reload;
$t->sql("SET synchronous_commit = local; SELECT dq_offer('q', 'g6')");
sleep(1);
$start = time();
$t->node->stop('fast');
cmp_ok(time() - $start, '<', 5, 'G6 fast stop with a missing synchronous standby');
$t->node->append_conf('postgresql.auto.conf', "synchronous_standby_names = ''");
$t->node->start;
works('G6 no task lost', offered => 'g6');

# no bad ends in the log
unlike($t->log_text, qr/ERROR:.*(cache lookup failed|could not open relation)/, 'G3 no errors about things just dropped');
$t->finish(crashes => 1);
