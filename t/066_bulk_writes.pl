# Many rows by one statement: pages, not a round trip a row, in the session and in the
# relay; scripts stay short, memory too, and the books are right. A6 A7 A11 G8 H13 I3
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use DqTest::Proxy;
use Test::More;
use Time::HiRes qw(time);

my $t = DqTest->new;
my $r = $t->redis;
my $n = rounds(20_000, 100_000);

$t->queue('q');
$t->queue('q4', "shards '4'");
$t->sql("CREATE TABLE near AS SELECT i AS n, 'k' || i AS key, timestamptz '2600-01-01' + i * interval '1 s' AS at FROM generate_series(1, $n) i; ANALYZE near");
$r->cmd('CONFIG', 'SET', 'slowlog-log-slower-than', 5000);
my $s = $t->session;
$s->run("SET max_parallel_workers_per_gather = 0");
my $pid = $s->run("SELECT pg_backend_pid()");

# Scripts that Redis has run, the workers' included
sub calls
{
	my %calls = $r->cmd('INFO', 'commandstats') =~ /^cmdstat_(evalsha|eval):calls=(\d+)/mg;
	return ($calls{evalsha} || 0) + ($calls{eval} || 0);
}

sub memory
{
	my $status = eval { PostgreSQL::Test::Utils::slurp_file("/proc/$pid/status") } || '';
	return $status =~ /^RssAnon:\s+(\d+)/m ? $1 : 0;
}

sub names { my ($q) = @_; return $q eq 'q' ? 'q' : map { "q4#$_" } 0 .. 3; }
sub none_held { my ($q) = @_; return !grep { $r->cmd('HLEN', "dq:{$_}:hold") } names($q); }

my @slow;

# One statement with a row for each task: how many scripts, how long, how much memory
sub bulk
{
	my ($name, $sql, $rows, $most) = @_;
	my ($q) = $name =~ /\b(q4?)\b/;
	my $sessions = join ',', map { $r->cmd('HGET', "dq:{$_}:fence", 'session') } names($q);

	$r->cmd('SLOWLOG', 'RESET');
	my ($calls, $memory, $start) = (calls(), memory(), time());
	is($s->run($sql, 600), $rows, "$name: $rows rows");
	my $seconds = time() - $start;
	$calls = calls() - $calls;
	cmp_ok($calls, '<=', $most, "$name: $calls scripts in the statement");
	my $grown = memory() - $memory;
	cmp_ok($grown, '<', 64 * 1024, "$name: $grown kB more memory") if memory();
	note(sprintf '%s: %.0f rows/s', $name, $rows / $seconds);
	is(join(',', map { $r->cmd('HGET', "dq:{$_}:fence", 'session') } names($q)), $sessions, "$name: PO 7 nobody takes Redis for one that went back");
	$start = time();
	$t->sync;
	note(sprintf '%s: relayed in %.1f s', $name, time() - $start);
	push @slow, map { "$name: $_->[2] us" } grep { $_->[2] > 50_000 && $_->[3][0] =~ /^eval/i } @{ $r->cmd('SLOWLOG', 'GET', 1000) };
}

# A worker that comes makes a new session, and what is held in the old one is asked for
# anew, one by one: not what is counted here.
$t->bridge_pid;
my ($sessions, $since) = ('', time());
poll_until(sub {
	my $now = join ',', map { $r->cmd('HGET', "dq:{$_}:fence", 'session') || 'none' } names('q'), names('q4');
	($sessions, $since) = ($now, time()) if $now ne $sessions;
	return $now !~ /none/ && time() - $since > 2;
});
$t->sync;
sub fill
{
	my ($q) = @_;

	bulk("INSERT into $q", "WITH i AS (INSERT INTO $q (payload, key, due_at) SELECT 'p' || n, key, at FROM near RETURNING 1) SELECT count(*) FROM i", $n, 4 * 200 + $n / 100);
	is($t->sql("SELECT count(*) FROM $q"), $n, '... are there');
}

for my $q ('q', 'q4')
{
	# reading 1000, taking 200, applying 200 at once, an operation or two a task
	my $pages = $n / 50;

	fill($q);
	bulk("UPDATE $q", "WITH u AS (UPDATE $q SET due_at = due_at + interval '1 day' RETURNING 1) SELECT count(*) FROM u", $n, $pages);
	is($t->sql("SELECT count(*), count(DISTINCT key), min(due_at) = '2600-01-02 00:00:01' FROM $q"), "$n|$n|t", '... each once, moved');
	bulk("UPDATE $q FROM", "WITH u AS (UPDATE $q SET payload = near.n FROM near WHERE near.key = $q.key AND near.n % 2 = 0 RETURNING 1) SELECT count(*) FROM u", $n / 2, $pages);
	is($t->sql("SELECT count(*), count(*) FILTER (WHERE payload = substr(key, 2)) FROM $q"), "$n|" . $n / 2, '... each with its own');
	bulk("DELETE $q by payload", "WITH d AS (DELETE FROM $q WHERE payload LIKE 'p%' RETURNING 1) SELECT count(*) FROM d", $n / 2, $pages);
	is($t->sql("SELECT count(*), count(*) FILTER (WHERE payload LIKE 'p%') FROM $q"), $n / 2 . '|0', '... those and no others');
	$s->run("BEGIN");
	bulk("DELETE $q that is undone", "WITH d AS (DELETE FROM $q USING near WHERE near.key = $q.key RETURNING 1) SELECT count(*) FROM d", $n / 2, $pages);
	$s->run("ROLLBACK");
	ok(poll_until(sub { none_held($q) }, 60), '... nothing is held');
	is($t->sql("SELECT count(*), count(DISTINCT key) FROM $q"), $n / 2 . '|' . $n / 2, '... all are back');
	bulk("TRUNCATE $q", "TRUNCATE $q; SELECT " . $n / 2, $n / 2, $pages);
	is($t->sql("SELECT count(*) FROM $q"), 0, '... empty');
	my @left = map { my $name = $_; map { my ($c, $k) = @$_; $r->cmd($c, $k) ? $k : () }
		  ([ 'ZCARD', "dq:{$name}:held" ], [ 'HLEN', "dq:{$name}:hold" ], [ 'HLEN', "dq:{$name}:index" ], [ 'ZCARD', "dq:{$name}:twins" ]) } names($q);
	is("@left", '', '... nothing is left over');
}

# in the middle of many: a few of them in other hands, and one statement that is cancelled
fill('q');
my $o = $t->session;
$o->run("BEGIN; SELECT count(*) FILTER (WHERE dq_remove('q', 'k' || i)) FROM generate_series(100, 110) i");
$s->send("WITH d AS (DELETE FROM q RETURNING 1) SELECT count(*) FROM d");
is($s->receive(3), undef, 'G8 it waits for what others hold');
$o->run("COMMIT");
is($s->receive(120), $n - 11, '... and counts what was left');
$t->sync;
is($t->sql("SELECT count(*) FROM q"), 0, '... nothing is');
$t->sql("INSERT INTO q (payload, key, due_at) SELECT 'p' || n, key, at FROM near");
$t->sync;
$t->fails("SET statement_timeout = '100 ms'; UPDATE q SET payload = 'never'", '57014', 'H13 cancelled in the middle');
ok(poll_until(sub { none_held('q') }, 60), '... nothing is held');
is($t->sql("SELECT count(*), count(*) FILTER (WHERE payload = 'never') FROM q"), "$n|0", '... nothing is changed');

# two that delete the same: each task goes to one of them
$s->send("WITH d AS (DELETE FROM q RETURNING key) SELECT count(*) FROM d");
$o->send("WITH d AS (DELETE FROM q RETURNING key) SELECT count(*) FROM d");
my @got = ($s->receive(300), $o->receive(300));
ok($got[0] =~ /^\d+$/ && $got[1] =~ /^\d+$/ ? $got[0] + $got[1] == $n : "@got" =~ /40P01/, 'A11 two that delete all: each once, or a deadlock is found') or diag("@got");

$_->quit for $s, $o;
# One that is slow by itself is so in each statement; a busy machine makes one so now and then
cmp_ok(scalar(@slow), '<', 6, 'A7 no script takes long, but for the machine') or diag(join "\n", @slow);
$t->finish;
