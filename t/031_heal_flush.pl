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

# Stored marks say that everything offered so far which was due is delivered.
sub marked
{
	my ($shard) = @_;
	my $now = now_ms();

	return poll_until(sub {
		$t->sql("SELECT count(*) FROM dq_marks WHERE settled <> '' AND due >= $now") ==
		  $t->sql("SELECT count(*) FROM dq_stats") });
}

sub lines { return split /\n/, $_[0]; }
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
my $mark = poll_until(sub { $t->sql("SELECT settled FROM dq_marks WHERE settled <> '' AND due > 0") });
ok($mark, 'a mark is stored');
sleep(2.5);
$t->sql("SELECT count(dq_offer('q', 'unread' || i)) FROM generate_series(1, 50) i");
ok($t->sync, 'relayed');
ok(poll_until(sub { $r->cmd('LLEN', 'q') == 50 }), '50 lie unread in the list');
sleep(2);

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
$t->finish;
