# Redis goes back: to a save that is put back, and to a replica that missed writes and
# is promoted. What is known to be delivered or removed does not come again, nothing is
# lost. Then again and again while the first healing still runs, with the worker,
# PostgreSQL and Redis killed meanwhile. G3 G4 A11 D11; PO 6 7 15a 17
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

my $t = DqTest->new(redis => { config => { appendonly => 'no' } });
my $r = $t->redis;
my $pending = DqTest::Redis::pending_key('q');

sub delivered
{
	my ($n, $list) = @_;

	return poll_until(sub { $r->cmd('LLEN', $list || 'q') >= $n });
}

# What has been read until now is known: a mark is stored that says so.
sub known
{
	$t->sql("SELECT dq_offer('q', 'moves the mark')");
	delivered(1) or return 0;
	$r->cmd('DEL', 'q');
	my $since = now_ms();
	return poll_until(sub { $t->sql("SELECT count(*) FROM dq_marks WHERE due >= $since AND settled <> ''") > 0 });
}

$t->queue('q');

# ---- a save is put back --------------------------------------------------------------------
$t->sql(<<'SQL');
SELECT count(dq_offer('q', 'old' || i)) FROM generate_series(1, 300) i;
SELECT count(dq_offer('q', 'keyed' || i, '1 hour', i)) FROM generate_series(1, 100) i;
SELECT count(dq_offer('q', 'soon' || i, '4 s')) FROM generate_series(1, 50) i;
SELECT dq_offer('q', 'held, committed', '4 s', 'hc'), dq_offer('q', 'held, rolled back', '4 s', 'hr'),
       dq_offer('q', 'held, later', '1 hour', 'hl');
SQL
$t->sync;
ok(delivered(300), 'the old ones are due');
$r->cmd('DEL', 'q');
my ($c, $b, $l) = map { $t->session } 1 .. 3;
is($c->run("BEGIN; SELECT dq_remove('q', 'hc')"), 't', 'held');
is($b->run("BEGIN; SELECT dq_remove('q', 'hr')"), 't', 'held');
is($l->run("BEGIN; SELECT dq_remove('q', 'hl')"), 't', 'held');
my $save = $r->save_state;

# after the save
$c->run('COMMIT');
$b->run('ROLLBACK');
$t->sql(<<'SQL');
SELECT count(dq_offer('q', 'mid' || i)) FROM generate_series(1, 200) i;
SELECT count(*) FROM generate_series(1, 20) i WHERE dq_remove('q', i);
SELECT count(dq_reschedule('q', i, '2 hours')) FROM generate_series(21, 40) i;
SELECT count(dq_offer('q', 'again' || i, '1 hour', i)) FROM generate_series(41, 60) i;
SQL
$t->sync;
ok(delivered(251), 'those of the middle, the soon ones and the one that was rolled back are due');
$r->cmd('DEL', 'q');
ok(known(), 'all of it is known to be delivered');
$t->sql("SELECT count(dq_offer('q', 'unread' || i)) FROM generate_series(1, 30) i");
$t->sql("SELECT count(dq_offer('q', 'new' || i, '1 hour', 'n' || i)) FROM generate_series(1, 10) i");
$t->sync;
ok(delivered(30), 'some are not read');
is($l->run("SELECT count(*) FROM q WHERE key = 'hl'"), 0, 'one hold is still open');

my @expected = ((map { "keyed$_" } 21 .. 40, 61 .. 100), (map { "again$_" } 41 .. 60), map { "new$_" } 1 .. 10);
sub books
{
	my ($name, @more) = @_;

	ok(poll_until(sub { !multiset_diff([ $t->pending('q') ], [ @expected, @more ]) && $r->cmd('LLEN', 'q') == 30 }), "$name: it heals");
	sleep(1.2);
	is_books("$name: pending", [ @expected, @more ], [ $t->pending('q') ]);
	is_books("$name: the list", [ map { "unread$_" } 1 .. 30 ], [ $r->ready('q') ]);
}
$r->restore_state($save);
books('a save put back');
is($l->run("ROLLBACK; SELECT 1"), 1, 'the open one rolls back');
books('the task of a hold that stood in the save comes back with its rollback', 'held, later');
is($r->cmd('HLEN', 'dq:{q}:hold'), 0, 'no hold is left over');
cmp_ok($t->stat('q', 'replayed'), '>', 200, 'dq_stats.replayed');
is((() = $t->log_text =~ /Redis behind shard "q" of server "redis" has lost/g), 1, 'said once');
push @expected, 'held, later';
is($t->sql("SELECT count(*) FROM generate_series(21, 60) i WHERE dq_remove('q', i)"), 40, 'keys lead to what is there');
@expected = ((map { "keyed$_" } 61 .. 100), (map { "new$_" } 1 .. 10), 'held, later');
$t->sync;
books('after that');

# the same save once more: everything from then on again
$r->restore_state($save);
books('the same save again');

# ---- a replica that missed writes is promoted ----------------------------------------------------
$r->cmd('DEL', 'q');
ok(known(), 'the mark');
my $replica = DqTest::Redis->new(name => 'replica', config => { appendonly => 'no' });
$replica->cmd('REPLICAOF', '127.0.0.1', $r->port);
ok(poll_until(sub { $replica->cmd('INFO', 'replication') =~ /master_link_status:up/ }), 'a replica follows');
ok(poll_until(sub { $replica->cmd('ZCARD', $pending) == @expected }), 'and has all');
# it hears nothing more
$replica->cmd('REPLICAOF', '127.0.0.1', DqTest::Redis::free_port());
$t->sql(<<'SQL');
SELECT count(dq_offer('q', 'missed' || i, '1 hour', 'm' || i)) FROM generate_series(1, 50) i;
SELECT count(dq_offer('q', 'missed and read' || i)) FROM generate_series(1, 50) i;
SELECT count(*) FROM generate_series(61, 70) i WHERE dq_remove('q', i);
SQL
$t->sync;
ok(delivered(50), 'delivered');
$r->cmd('DEL', 'q');
ok(known(), 'and known');
@expected = ((map { "keyed$_" } 71 .. 100), (map { "new$_" } 1 .. 10), 'held, later', map { "missed$_" } 1 .. 50);
my $primary = $r;
$primary->kill9;
$replica->cmd('REPLICAOF', 'NO', 'ONE');
$t->{redis} = $r = $replica;
$t->sql("ALTER SERVER redis OPTIONS (SET socket '" . $replica->socket . "')");
ok(poll_until(sub { !multiset_diff([ $t->pending('q') ], \@expected) }), 'the promoted replica gets what it missed')
  or diag(join ' ', multiset_diff([ $t->pending('q') ], \@expected));
sleep(1.2);
is_books('exactly', \@expected, [ $t->pending('q') ]);
is($r->cmd('LLEN', 'q'), 0, 'and nothing that was read');
# failover and back: the old primary has what the promoted one has not
$t->sql("SELECT count(dq_offer('q', 'on the replica' || i, '1 hour')) FROM generate_series(1, 20) i");
$t->sync;
push @expected, map { "on the replica$_" } 1 .. 20;
$primary->start;
$replica->kill9;
$t->{redis} = $r = $primary;
$t->sql("ALTER SERVER redis OPTIONS (SET socket '" . $primary->socket . "')");
ok(poll_until(sub { !multiset_diff([ $t->pending('q') ], \@expected) }), 'back to another branch: everything is there')
  or diag(join ' ', multiset_diff([ $t->pending('q') ], \@expected));
$r->cmd('DEL', 'q');
ok(known(), 'the mark');

# ---- again while the first healing still runs ---------------------------------------------------------
my $proxy = DqTest::Proxy->new($r);
my $n = rounds(6000, 30000);
$t->sql("SELECT count(dq_offer('q', 'read' || i)) FROM generate_series(1, $n) i");
ok($t->sync, 'many');
ok(delivered($n), 'are delivered');
$r->cmd('DEL', 'q');
ok(known(), 'and known');
$save = $r->save_state;
$t->sql("SELECT count(dq_offer('q', 'kept' || i, '1 hour', 'kept' || i)) FROM generate_series(1, $n) i");
$t->sync;
push @expected, map { "kept$_" } 1 .. $n;
$t->sql("ALTER SERVER redis OPTIONS (DROP socket, ADD host '127.0.0.1', ADD port '" . $proxy->port . "')");
ok($t->sync, 'over a proxy');

my %again = (
	flush => sub { $r->cmd('FLUSHALL') },
	save => sub { $r->restore_state($save) },
	worker => sub { kill 'KILL', $t->bridge_pid },
	postgres => sub { $t->node->stop('immediate'); $t->node->start },
	cut => sub { $proxy->mode_now('refuse'); $proxy->mode_now('pass') },
);
# how far the first one has come
my %when = (
	relay => sub { $r->cmd('ZCARD', $pending) > 500 },
	sweep => sub { ($r->cmd('HGET', 'dq:{q}:fence', 'open') || '') eq '' && $r->cmd('ZCARD', $pending) > $n / 2 },
);
for my $first (qw(flush save))
{
	for my $when (sort keys %when)
	{
		for my $second (sort keys %again)
		{
			my $name = "$first, then $second during the " . ($when eq 'relay' ? 'replay' : 'sweep or later');
			$proxy->mode_now('delay 0.004');
			$again{$first}->();
			poll_until($when{$when}, 10, 0.001);
			$again{$second}->();
			$proxy->mode_now('pass');
			ok(poll_until(sub { $r->cmd('ZCARD', $pending) == @expected
				&& ($r->cmd('HGET', 'dq:{q}:fence', 'open') || 'x') eq ($r->cmd('HGET', 'dq:{q}:fence', 'session') || 'y') }), "$name: whole")
			  or diag($r->cmd('ZCARD', $pending) . ' of ' . @expected . "\n" . $t->sql('SELECT state, last_error FROM dq_stats'));
			is_books("$name: pending", \@expected, [ $t->pending('q') ]);
			is($r->cmd('LLEN', 'q'), 0, "$name: nothing comes again");
		}
	}
}
is($t->stat('q', 'state'), 'running', 'running');
$t->finish(crashes => 1);
