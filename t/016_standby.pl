# A standby is idle and reads; promoted, it goes on without restart; rows that a
# failover found already sent are not sent again, and none is lost. G7 G2 G11 I5; PO 2 5
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

my $t = DqTest->new;
my $r = $t->redis;
my $primary = $t->node;

$t->queue('q');
$t->sql("SELECT dq_offer('q', 'before the backup', '1 hour', 'bb')");
$t->sync;
$primary->backup('b');

sub standby
{
	my ($name, $from) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name);

	$node->init_from_backup($from, 'b', has_streaming => 1);
	$node->start;
	return bless { name => $name, redis => $r, node => $node }, 'DqTest';
}

sub caught_up
{
	my ($from, $to) = @_;
	my $lsn = $from->sql("SELECT pg_current_wal_flush_lsn()");

	return poll_until(sub { $to->sql("SELECT pg_last_wal_replay_lsn() >= '$lsn'") eq 't' });
}

my $s = standby('standby', $primary);
ok(caught_up($t, $s), 'the standby follows');

# ---- G7: on a standby -------------------------------------------------------------------------
is($s->sql("SELECT payload FROM q"), 'before the backup', 'G7 the foreign table can be read there');
for my $f ("dq_offer('q', 'x')", "dq_remove('q', 'bb')", "dq_transfer('q')", "dq_pause('q')")
{
	$s->fails("SELECT $f", '25006', "G7 $f there: the read-only error");
}
is($s->sql("SELECT dq_sync('q', '5s')"), 't', 'G7 dq_sync there: all that was replayed is in Redis');
is($s->sql("SELECT count(*) FROM dq_stats WHERE queue = 'q'::regclass"), 1, 'G7 dq_stats can be read there');
my $log_size = length $s->log_text;
$t->sql("SELECT dq_offer('q', 'while there is a standby')");
ok($r->cmd('BLPOP', 'q', 10), 'the primary goes on');
sleep(3);
my $noise = () = substr($s->log_text, $log_size) =~ /^.*(?:ERROR|WARNING|FATAL):/mg;
cmp_ok($noise, '<=', 2, 'G7 no error spam from its workers');

# ---- a clean failover ------------------------------------------------------------------------------
$t->sql("SELECT count(dq_offer('q', 'f' || i, '4 s')) FROM generate_series(1, 200) i");
# rows that are committed and replicated but not relayed: Redis away
$r->freeze;
$t->sql("SELECT count(dq_offer('q', 'g' || i, '4 s')) FROM generate_series(1, 200) i");
$t->sql("SELECT dq_offer('q', 'to be removed', '1 hour', 'tbr')");
# a prepared transaction that stays open over the promotion (PO 2)
$t->sql("BEGIN; SELECT dq_offer('q', 'prepared before, committed after', '1 s'); PREPARE TRANSACTION 'over'");
ok(caught_up($t, $s), 'all replicated');
$primary->stop('immediate');
$r->thaw;
# nobody holds the lease any more, and still a standby sends nothing (F27)
$r->cmd('HSET', 'dq:{q}:owner', 'lease', 0);
my $pending = $r->cmd('ZCARD', 'redisson_delay_queue_timeout:{q}');
is($s->sql("SELECT dq_sync('q', '1s')"), 'f', 'dq_sync on a standby: false at the timeout');
is($r->cmd('ZCARD', 'redisson_delay_queue_timeout:{q}'), $pending, '... and nothing was sent');
$s->node->promote;
ok(poll_until(sub { my ($rc, $out) = $s->try("SELECT pg_is_in_recovery()"); $rc == 0 && $out eq 'f' }), 'promoted');
ok($s->wait_state('q', 'running'), 'G7 after promotion it takes over without restart')
  or diag($s->sql("SELECT state, last_error FROM dq_stats"));
my @expected = map { ("f$_", "g$_") } 1 .. 200;
ok(poll_until(sub { $r->cmd('LLEN', 'q') >= 400 }), 'what the promoted server has arrives');
sleep(1);
is_books('each exactly once over the failover', \@expected, [ $r->ready('q') ]);
$s->sql("COMMIT PREPARED 'over'");
push @expected, 'prepared before, committed after';
ok(poll_until(sub { $r->cmd('LLEN', 'q') >= 401 }), 'COMMIT PREPARED after the promotion');
is_books('PO 2 the prepared one once', \@expected, [ $r->ready('q') ]);
is($s->sql("SELECT dq_remove('q', 'tbr')"), 't', 'removing works on the promoted server');
is($s->sql("SELECT dq_remove('q', 'bb')"), 't', 'and of tasks the old primary sent');
$s->sync;
is($r->cmd('ZCARD', 'redisson_delay_queue_timeout:{q}'), 0, 'nothing pending');
$r->cmd('DEL', 'q');

# ---- the old primary comes back un-rewound: not the owner (PO 5) --------------------------------------
$primary->start;
ok($t->wait_state('q', 'not_owner'), 'PO 5 the old primary that comes back is not the owner')
  or diag($t->sql("SELECT state, last_error FROM dq_stats"));
$t->sql("SELECT dq_offer('q', 'from the old primary')");
$t->fails("SELECT dq_remove('q', 'x')", '55000', 'PO 5 and may not remove', like => qr/dq_adopt/);
$s->sql("SELECT dq_offer('q', 'from the new primary')");
my $got = $r->cmd('BLPOP', 'q', 10);
is($got && $got->[1], 'from the new primary', 'the new primary goes on');
sleep(1.5);
is($r->cmd('LLEN', 'q'), 0, 'PO 5 the old one sends nothing');
$primary->stop('fast');

# ---- a failover that loses commits (asynchronous standby) -------------------------------------------------
my $p2 = $s;
$p2->node->backup('b');
my $s2 = standby('standby2', $p2->node);
ok(caught_up($p2, $s2), 'a second standby follows');
$p2->sql("SELECT count(dq_offer('q', 'kept' || i, '5 s')) FROM generate_series(1, 100) i");
ok($p2->sync, 'sent');
ok(caught_up($p2, $s2), 'and replicated');
# stop the replication: what follows is sent to Redis, but lost to the standby
$s2->sql("ALTER SYSTEM SET primary_conninfo = ''");
$s2->node->reload;
ok(poll_until(sub { $p2->sql("SELECT count(*) FROM pg_stat_replication") == 0 }), 'replication is cut');
$p2->sql("SELECT count(dq_offer('q', 'lost' || i, '5 s')) FROM generate_series(1, 100) i");
ok($p2->sync, 'the lost ones were sent');
$p2->node->stop('immediate');
$s2->node->promote;
ok(poll_until(sub { my ($rc, $out) = $s2->try("SELECT pg_is_in_recovery()"); $rc == 0 && $out eq 'f' }), 'promoted without them');
# new transactions get the same transaction ids again
$s2->sql("SELECT dq_offer('q', 'new' || $_, '1 s')") for 1 .. 30;
ok($s2->wait_state('q', 'running'), 'the promoted server runs') or diag($s2->sql("SELECT state, last_error FROM dq_stats"));
@expected = ((map { "kept$_" } 1 .. 100), (map { "lost$_" } 1 .. 100), map { "new$_" } 1 .. 30);
ok(poll_until(sub { $r->cmd('LLEN', 'q') >= @expected }), 'all arrive');
sleep(1);
is_books('PO 2 nothing twice, nothing lost; the lost commits\' tasks were sent and fire', \@expected, [ $r->ready('q') ]);
is($s2->sql("SELECT count(*) FROM q"), 0, 'nothing pending');
# task ids do not repeat after the sequence went back
$s2->node->stop('fast');

$t->{node} = $s->node;
$t->finish(crashes => 1);
