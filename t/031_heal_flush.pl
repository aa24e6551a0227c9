# FLUSHALL: what is missing is applied again before any transfer; what is known to be
# delivered or removed does not come again; unread list content is not lost. Also a
# second time while the first healing still runs. G3 A11 D5; PO 7 15a 17
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

my $t = DqTest->new;
my $r = $t->redis;

# A mark is stored that was taken from now on: what has been read until now is known.
sub known
{
	my ($queue, $now) = @_;

	$now = now_ms() unless defined $now;
	return poll_until(sub { $t->sql("SELECT count(*) FROM dq_marks m JOIN dq_shards s ON s.no = m.shard "
		  . "WHERE s.name = '$queue' AND settled <> '' AND due >= $now") > 0 });
}

sub pending { my ($q) = @_; return $r->cmd('ZCARD', DqTest::Redis::pending_key($q)); }
sub replayed { return $t->sql("SELECT sum(replayed) FROM dq_stats"); }

$t->queue('q');

# ---- consumed tasks stay consumed, pending and unread ones come back --------------------------
$t->sql("SELECT count(dq_offer('q', 'consumed' || i)) FROM generate_series(1, 500) i");
$t->sql("SELECT count(dq_offer('q', 'later' || i, '1 hour', 'k' || i)) FROM generate_series(1, 100) i");
ok($t->sync, 'all in Redis');
ok(poll_until(sub { $r->cmd('LLEN', 'q') == 500 }), '500 are due');
my @first = $r->ready('q');
$r->cmd('DEL', 'q');
is($t->sql("SELECT count(*) FROM generate_series(1, 10) i WHERE dq_remove('q', 'k' || i)"), 10, 'ten are removed');
ok($t->sync, 'the removals are in Redis');
# work moves the mark; it is stored when the list has been empty
$t->sql("SELECT dq_offer('q', 'moves the mark')");
ok(poll_until(sub { $r->cmd('LLEN', 'q') == 1 }), 'one more is due');
$r->cmd('DEL', 'q');
ok(known('q'), 'a mark is stored');
$t->sql("SELECT count(dq_offer('q', 'unread' || i)) FROM generate_series(1, 50) i");
ok($t->sync, 'relayed');
ok(poll_until(sub { $r->cmd('LLEN', 'q') == 50 }), '50 lie unread in the list');
my $before = replayed();
$r->cmd('FLUSHALL');
ok(poll_until(sub { $r->cmd('ZCARD', DqTest::Redis::pending_key('q')) == 90 && $r->cmd('LLEN', 'q') == 50 }),
	'pending ones and unread ones come back')
  or diag($r->cmd('ZCARD', DqTest::Redis::pending_key('q')) . ' pending, ' . $r->cmd('LLEN', 'q') . ' in the list');
sleep(1.5);
is_books('exactly those', [ map { "unread$_" } 1 .. 50 ], [ $r->ready('q') ]);
is_books('and of the pending ones those that were not removed', [ map { "later$_" } 11 .. 100 ], [ $t->pending('q') ]);
cmp_ok(replayed() - $before, '>=', 661, 'dq_stats.replayed counts what was applied again');
my $said = () = $t->log_text =~ /Redis behind shard "q" of server "redis" has lost acknowledged writes/g;
is($said, 1, 'said once in the log');
is($t->sql("SELECT dq_remove('q', 'k11')"), 't', 'the index is whole: removing by key');
is($t->sql("SELECT dq_remove('q', 'k1')"), 'f', 'and what was removed is not there');
is($t->stat('q', 'state'), 'running', 'state running');

# ---- a list that is never empty ------------------------------------------------------------------
sub fill
{
	my ($q, $name, $n) = @_;
	my $had = $r->cmd('LLEN', $q);

	$t->sql("SELECT count(dq_offer('$q', '$name' || i)) FROM generate_series(1, $n) i");
	return poll_until(sub { $r->cmd('LLEN', $q) == $had + $n });
}

# a mark that covers all that was offered before the call
sub settled
{
	my ($q) = @_;

	return $t->sql("SELECT settled FROM dq_marks m JOIN dq_shards s ON s.no = m.shard WHERE s.name = '$q'");
}

$t->queue('fifo');
ok(fill('fifo', 'a', 100), 'a hundred');
sleep(2.2);
is(settled('fifo'), '', 'nothing is settled while they lie there');
$r->cmd('LPOP', 'fifo', 60);
ok(fill('fifo', 'b', 100), 'and another hundred');
$r->cmd('LPOP', 'fifo', 60);
ok(poll_until(sub { settled('fifo') ne '' }), 'the first hundred are settled once others stand in front');
$r->cmd('FLUSHALL');
ok(poll_until(sub { $r->cmd('LLEN', 'fifo') >= 80 }), 'what was not read comes back');
sleep(1);
my %back = map { $_ => 1 } $r->ready('fifo');
is(scalar(grep { $back{"b$_"} } 21 .. 100), 80, 'all of it');
is(scalar(grep { /^a/ } keys %back), 0, 'and of what was settled nothing');

# somebody takes from the other end: the count alone would tell a lie
$t->queue('lifo');
ok(fill('lifo', 'c', 100), 'a hundred');
sleep(1.2);
$r->cmd('RPOP', 'lifo', 50);
ok(fill('lifo', 'd', 50), 'fifty more');
sleep(1.2);
$r->cmd('RPOP', 'lifo', 50);
sleep(2.5);
is(settled('lifo'), '', 'the front has not moved: nothing is settled');
$r->cmd('FLUSHALL');
ok(poll_until(sub { $r->cmd('LLEN', 'lifo') >= 50 }), 'healed');
%back = map { $_ => 1 } $r->ready('lifo');
is(scalar(grep { $back{"c$_"} } 1 .. 50), 50, 'what lay unread at the front comes back');

# ---- foreign tasks are nobody's to sweep; shards; without index; recorded removals --------------------
$t->queue('sharded', "shards '3', index 'off'");
ok(fill_sharded('s', 90), 'delivered over three shards');
sub fill_sharded
{
	my ($name, $n) = @_;

	$t->sql("SELECT count(dq_offer('sharded', '$name' || i)) FROM generate_series(1, $n) i");
	return poll_until(sub { my $sum = 0; $sum += $r->cmd('LLEN', "sharded#$_") for 0 .. 2; $sum == $n });
}
$r->cmd('DEL', "sharded#$_") for 0 .. 2;
my $read = now_ms();
ok(known("sharded#$_", $read), "shard $_: known") for 0 .. 2;
$t->sql("SELECT dq_pause('sharded')");
sleep(0.3);
$t->sql("SELECT count(dq_offer('sharded', 'waiting' || i)) FROM generate_series(1, 9) i");
$t->sync;
# overdue tasks of somebody else, in a Redis that went back to before they were taken
my $save = $r->save_state;
$r->redisson_offer("sharded#0", now_ms() - 60000, 'of a stranger', silent => 1);
$r->redisson_offer("sharded#0", now_ms() - 60000, 'of a stranger with short ids', id => "\x00\x01\xff\xff\xff\xff\xff\xff", silent => 1);
my $with = $r->save_state;
$r->restore_state($save);
ok($t->sync, 'back');
$r->restore_state($with);
$t->sql("SELECT dq_offer('sharded', 'after', '1 hour')");
ok($t->sync, 'relayed');
$t->sql("SELECT dq_resume('sharded')");
my @all;
ok(poll_until(sub { @all = map { $r->ready("sharded#$_") } 0 .. 2; @all == 11 }), 'all that waited is delivered')
  or diag("@all");
is_books('foreign tasks among them, nothing twice', [ 'of a stranger', 'of a stranger with short ids', map { "waiting$_" } 1 .. 9 ], \@all);

# ---- by hand, without a worker --------------------------------------------------------------------------
$t->queue('hand');
ok(fill('hand', 'h', 40), 'delivered');
$r->cmd('DEL', 'hand');
ok(known('hand'), 'known');
$t->sql("SELECT count(dq_offer('hand', 'pending' || i, '1 hour')) FROM generate_series(1, 10) i");
$t->sync;
$t->sql("SELECT dq_worker_stop()");
ok(poll_until(sub { $t->sql("SELECT count(*) FROM dq_workers WHERE role = 'bridge' AND pid > 0") == 0 }), 'no worker');
$r->cmd('FLUSHALL');
is($t->sql("SELECT dq_sync('hand')"), 't', 'dq_sync relays by hand');
is(pending('hand'), 10, 'what is missing, without what was delivered');
is($t->sql("SELECT dq_transfer('hand')"), 0, 'nothing is due');
$t->sql("SELECT dq_worker_start()");

# ---- without anything to apply again -----------------------------------------------------------------------
$t->queue('empty');
$t->sql("SELECT dq_offer('empty', 'one')");
ok($r->cmd('BLPOP', 'empty', 10), 'delivered');
ok(known('empty'), 'known');
$r->cmd('FLUSHALL');
sleep(2);
my $log = () = $t->log_text =~ /shard "empty" of server "redis" has lost/g;
$t->node->restart;
ok($t->wait_state('empty', 'running'), 'after a restart');
sleep(1);
is((() = $t->log_text =~ /shard "empty" of server "redis" has lost/g), $log, 'the loss is not said again');
is($r->cmd('LLEN', 'empty'), 0, 'nothing comes again');
$t->finish;
