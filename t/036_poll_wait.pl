# dq_poll with wait: wakes by whatever fills the list, stands in nobody's way, can be
# ended at any time; lost replies; no worker. G9 G10; PO 8
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
my $s = $t->session;
my $o = $t->session;

sub fill { my ($q, @p) = @_; $r->cmd('RPUSH', $q, @p); }
sub waiting { my ($n) = @_; return poll_until(sub { $t->sql("SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE '%dq_poll%' AND pid <> pg_backend_pid()") == $n }); }
sub blocked { my ($n) = @_; return poll_until(sub { my ($b) = $r->cmd('INFO', 'clients') =~ /blocked_clients:(\d+)/; $b == $n }); }
sub spread { my ($name, @ms) = @_; @ms = sort { $a <=> $b } @ms; diag(sprintf('%s: p50 %.1f ms, p99 %.1f ms', $name, $ms[$#ms / 2], $ms[$#ms * 0.99])); return $ms[$#ms / 2]; }

# ---- what wakes ------------------------------------------------------------------

$s->run("SELECT dq_poll('q')");
my @ms;
for my $i (1 .. 50)
{
	$s->send("SELECT dq_poll('q', 5, '20 s')");
	blocked(1);
	my $began = time();
	fill('q', "f$i");
	is($s->receive(30), "f$i", 'a foreign push') if $i == 1;
	$s->receive(30) if $i > 1;
	push @ms, 1000 * (time() - $began);
}
cmp_ok(spread('foreign push until returned', @ms), '<', 1000, 'half of them within a second');
@ms = ();
for my $i (1 .. 50)
{
	$s->send("SELECT extract(epoch FROM clock_timestamp()) * 1000 - x::numeric FROM dq_poll('q', 5, '20 s') x");
	$o->run("SELECT dq_offer('q', (extract(epoch FROM clock_timestamp()) * 1000 + 30)::text, '30 ms')");
	push @ms, $s->receive(30);
}
cmp_ok(spread('due until returned', @ms), '<', 1000, 'half of them within a second');

$s->send("SELECT dq_poll('q', 5, '20 s')");
blocked(1);
fill('q', 'first');
is($s->receive(10), 'first', 'it waits for the first task, not for max');
my $began = time();
is($s->run("SELECT dq_poll('q', 1, '300 ms')"), '', 'nothing comes');
cmp_ok(time() - $began, '>=', 0.3, '... in all the time');
$t->sql("SELECT dq_pause('q')");
fill('q', 'paused');
is($s->run("SELECT dq_poll('q', 1, '1 s')"), 'paused', 'what is ready can be taken from a paused queue');
$t->sql("SELECT dq_resume('q')");

# a rollback wakes who waits
fill('q', 'back');
$o->run("BEGIN; SELECT dq_poll('q')");
$s->send("SELECT dq_poll('q', 1, '20 s')");
blocked(1);
$o->run('ROLLBACK');
is($s->receive(10), 'back', 'what another one gives back');

# ---- in nobody's way ----------------------------------------------------------------

$s->send("SELECT dq_poll('q', 1, '60 s')");
blocked(1);
my $xid = $t->sql('SELECT txid_current()');
$t->sql("SET lock_timeout = '5 s'; ALTER FOREIGN TABLE q OPTIONS (ADD remove_timeout '400ms')");
pass('a waiting poll holds no lock on its queue');
is($t->sql("SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%dq_poll%' AND backend_xid IS NOT NULL"), '0', 'and has no transaction id');
my $lsn = $t->sql('SELECT pg_current_wal_insert_lsn()');
$r->cmd('CONFIG', 'RESETSTAT');
sleep(2.5);
# the two of this test, and of the worker one a second for what was just consumed
cmp_ok($t->sql("SELECT txid_current() - $xid"), '<=', 5, 'waiting takes no transaction ids');
my ($calls) = $r->cmd('INFO', 'commandstats') =~ /cmdstat_evalsha:calls=(\d+)/;
cmp_ok($calls, '<', 12, 'and looks about once a second');
fill('q', 'x');
is($s->receive(10), 'x', 'it still wakes');

# Many wait: one of them asks Redis, each element wakes one of them, in order.
my @many = map { $t->session } 1 .. 12;
for my $i (0 .. $#many)
{
	$many[$i]->send("SELECT dq_poll('q', 1, '60 s')");
	waiting($i + 1);
}
ok(blocked(1), 'of twelve that wait one has a connection blocked');
sleep(0.3);
fill('q', 'n0');
is($many[0]->receive(10), 'n0', 'the first one has the first');
fill('q', 'n1');
is($many[1]->receive(10), 'n1', 'the second one the second');
ok(blocked(1), 'another one asks');
# whoever asks may die
my ($watcher) = map { $_->{pid} ? $_ : () } $many[2];
my $pid = $t->sql("SELECT pid FROM pg_stat_activity WHERE state = 'active' AND query LIKE '%dq_poll%' AND pid <> pg_backend_pid() ORDER BY query_start LIMIT 1");
$t->sql("SELECT pg_terminate_backend($pid)");
like($many[2]->receive(10), qr/57P01/, 'the one that asks is terminated');
ok(blocked(1), 'the next one asks');
fill('q', map { "m$_" } 3 .. 11);
is(join(',', sort map { $many[$_]->receive(10) } 3 .. 11), join(',', sort map { "m$_" } 3 .. 11), 'nine at once, each has its own');
$_->quit for @many;

# ---- the end of a wait -----------------------------------------------------------------

for my $how ('cancel', 'terminate', 'statement_timeout')
{
	for my $stopped (0, 1)
	{
		my $v = $t->session;
		my $victim = $v->run('SELECT pg_backend_pid()');

		$v->run("SELECT dq_poll('q'); SET statement_timeout = " . ($how eq 'statement_timeout' ? "'1 s'" : 0));
		$v->send("SELECT dq_poll('q', 1, '60 s')");
		blocked(1);
		$r->freeze if $stopped;
		# it has looked, or is about to
		sleep(1.2) if $stopped && $how ne 'statement_timeout';
		my $began = time();
		$t->sql("SELECT pg_cancel_backend($victim)") if $how eq 'cancel';
		$t->sql("SELECT pg_terminate_backend($victim)") if $how eq 'terminate';
		like($v->receive(20), qr/57014|57P01/, "$how" . ($stopped ? ' while Redis is stopped' : ''));
		cmp_ok(time() - $began, '<', 2, '... within two seconds');
		$r->thaw;
		$v->quit;
	}
}
ok(blocked(0), 'no connection stays blocked');
ok(poll_until(sub { $t->stat('q', 'state') eq 'running' }), 'running');

# the queue goes away
$t->queue('gone');
$s->send("SELECT dq_poll('gone', 1, '60 s')");
blocked(1);
$t->sql('DROP FOREIGN TABLE gone');
like($s->receive(20), qr/ERROR/, 'the queue is dropped: the wait ends');

# Redis goes away
$s->send("SELECT dq_poll('q', 1, '60 s')");
blocked(1);
$r->stop;
like($s->receive(20), qr/08006/, 'Redis goes: the wait ends');
$t->wait_state('q', 'redis_down');
$began = time();
$t->fails("SELECT dq_poll('q', 1, '10 s')", '08006', 'Redis is known to be away');
cmp_ok(time() - $began, '<', 2, '... at once');
$t->sql('SELECT dq_worker_stop()');
$t->fails("SELECT dq_poll('q', 1, '10 s')", '08006', 'nobody knows it, and it is not there');
$r->start;

# ---- no worker -----------------------------------------------------------------------------

fill('q', 1 .. 3);
is($s->run("SELECT dq_poll('q')"), '1', 'without worker');
$s->run('BEGIN');
is($s->run("SELECT dq_poll('q')"), '2', 'in a transaction');
$s->run('ROLLBACK');
is($s->run("SELECT dq_poll('q')"), '2', 'what was rolled back is there again');
$s->run("BEGIN; SELECT dq_poll('q'); ROLLBACK");
is($o->run("SELECT dq_poll('q')"), '3', '... for others as well');
$t->sql('SELECT dq_sync()');
is($r->cmd('HLEN', 'dq:{q}:hold'), 0, 'all is consumed');
$t->sql('SELECT dq_worker_start()');
$t->bridge_pid;

# ---- without BLMOVE --------------------------------------------------------------------------

# what doc/operations.md gives to a user, and no BLMOVE
$r->cmd('ACL', 'SETUSER', 'poor', 'on', '>p', '~qpoor', '~redisson_delay_queue*:{qpoor}', '~dq:{qpoor}:*',
	'&redisson_delay_queue_channel:{qpoor}', map { "+$_" } qw(select client|setname info config|get subscribe
	  eval evalsha type time exists hget hgetall hmget hset hdel hincrby hlen hexists hscan hstrlen
	  zadd zcard zcount zlexcount zrange zrangebyscore zrangebylex zrank zrem zremrangebyrank zremrangebyscore zscore
	  rpush lpush llen lindex lrange ltrim publish));
$t->sql("CREATE SERVER poor FOREIGN DATA WRAPPER dq_bridge OPTIONS (socket '" . $r->socket . "');"
	  . " CREATE USER MAPPING FOR PUBLIC SERVER poor OPTIONS (username 'poor', password 'p')");
$t->queue('qpoor', undef, server => 'poor');
$s->run("SELECT dq_poll('qpoor')");
@ms = ();
for my $i (1 .. 10)
{
	$s->send("SELECT dq_poll('qpoor', 1, '20 s')");
	waiting(1);
	my $began = time();
	fill('qpoor', $i);
	is($s->receive(20), $i, 'without the right to BLMOVE') if $i == 1;
	$s->receive(20) if $i > 1;
	push @ms, 1000 * (time() - $began);
}
cmp_ok(spread('without BLMOVE', @ms), '<', 1000, 'half of them within a second');
fill('qpoor', "\xff", 'ok');
is($s->run("BEGIN; SELECT dq_poll('qpoor', 2)"), 'ok', 'with no more rights than the manual says');
$s->run('ROLLBACK');
ok(poll_until(sub { join(',', $r->ready('qpoor')) eq 'ok' }), 'put back as well');
is($t->stat('qpoor', 'state'), 'running', 'the worker has what it needs');

# ---- lost replies -------------------------------------------------------------------------------

my $proxy = DqTest::Proxy->new($r);
$t->sql("CREATE SERVER proxied FOREIGN DATA WRAPPER dq_bridge OPTIONS (host '127.0.0.1', port '" . $proxy->port . "', command_timeout '2 s')");
$t->queue('ql', undef, server => 'proxied');
$t->sql("SELECT count(dq_offer('ql', i::text)) FROM generate_series(1, 300) i");
ok(poll_until(sub { $r->cmd('LLEN', 'ql') == 300 }), '300 are due');
$t->sql('CREATE TABLE got (p text)');
$s->run("INSERT INTO got SELECT dq_poll('ql')");
$proxy->mode('cut 5');
my ($errors, $rounds) = (0, 0);
while ($t->sql('SELECT count(*) FROM got') < 300 && $rounds++ < 600)
{
	my $answer = $s->run("INSERT INTO got SELECT dq_poll('ql', 3)");
	$errors++ if $answer =~ /ERROR/;
	diag($answer) if $answer =~ /ERROR/ && $answer !~ /08006/;
}
$proxy->mode('pass');
diag("$errors errors in $rounds calls, " . $proxy->cuts . ' replies were lost');
cmp_ok($proxy->cuts, '>', 10, 'many replies were lost');
is($t->sql('SELECT count(*), count(DISTINCT p) FROM got'), '300|300', 'each once');
ok(poll_until(sub { $r->cmd('HLEN', 'dq:{ql}:hold') == 0 }), 'no hold is left');
is($r->cmd('LLEN', 'ql'), 0, 'nothing is left');
# A reply that is lost alone is not even noticed: asked again under the same token, it
# gives the same. Nobody else speaks through the proxy now.
$t->sql('SELECT dq_worker_stop()');
fill('ql', 1 .. 40);
my $cuts = $proxy->cuts;
$proxy->mode('cut 3');
sleep(0.1);
is(join(',', map { $s->run("SELECT dq_poll('ql')") } 1 .. 40), join(',', 1 .. 40), 'forty calls, no error, each the next');
cmp_ok($proxy->cuts - $cuts, '>=', 20, 'while many replies were lost');
$proxy->mode('pass');
is($r->cmd('LLEN', 'ql'), 0, 'nothing is left');
$t->sql('SELECT dq_worker_start()');
ok(poll_until(sub { $r->cmd('HLEN', 'dq:{ql}:hold') == 0 }), 'all are consumed');

$_->quit for $s, $o;
$proxy->stop;
$t->finish;
