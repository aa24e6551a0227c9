# synchronous_commit = off, and the server is stopped at once when the task is seen
# in Redis: no task without its business row. A removal likewise: no task taken out
# whose removal was not kept.
# F15; G11; PO 1
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

# the WAL writer would flush by itself soon
my $t = DqTest->new(conf => <<'CONF');
fsync = on
synchronous_commit = off
wal_writer_delay = 10s
wal_writer_flush_after = 100MB
CONF
my $r = $t->redis;
my $rounds = rounds(8, 60);

$t->queue('q');
$t->sql("CREATE TABLE business (n int, primary key (n)); CREATE TABLE gone (n int)");
$t->sql("SET synchronous_commit = on; SELECT count(dq_offer('q', 'r' || i, '1 hour', 'r' || i)) FROM generate_series(1, $rounds) i");
$t->sync;

sub crash
{
	$t->node->stop('immediate');
	$t->node->start;
}

my $orphans = 0;
my $without = 0;
my $lost = 0;
my $undone = 0;
for my $round (1 .. $rounds)
{
	# offers, in one transaction with the row they belong to
	my $s = $t->session;
	$s->run('SELECT 1');
	my $before = $r->cmd('ZCARD', DqTest::Redis::pending_key('q'));
	$s->send("BEGIN; INSERT INTO business VALUES ($round); SELECT dq_offer('q', 'b$round', '1 hour'); COMMIT");
	poll_until(sub { $r->cmd('ZCARD', DqTest::Redis::pending_key('q')) > $before }, 10, 0.0005)
	  or $without++;
	crash();
	$s->quit;
	my %rows = map { $_ => 1 } split /\n/, $t->sql('SELECT n FROM business');
	for my $p (grep { /^b/ } $t->pending('q'), $r->ready('q'))
	{
		my ($n) = $p =~ /(\d+)/;
		$orphans++ unless $rows{$n};
	}
	$lost++ unless $rows{$round};

	# a removal that is seen to be applied (its hold has ended) was kept
	$s = $t->session;
	$s->run('SELECT 1');
	$s->send("BEGIN; INSERT INTO gone VALUES ($round); SELECT dq_remove('q', 'r$round'); COMMIT");
	poll_until(sub {
		!(grep { $_ eq "r$round" } $t->pending('q')) && $r->cmd('HLEN', 'dq:{q}:hold') == 0
	}, 10, 0.0005) or $without++;
	crash();
	$s->quit;
	$t->sync;
	my $kept = $t->sql("SELECT count(*) FROM gone WHERE n = $round");
	poll_until(sub { $r->cmd('HLEN', 'dq:{q}:hold') == 0 }, 20);
	my $there = grep { $_ eq "r$round" } $t->pending('q');
	$undone++ if !$kept == !$there;
}
is($orphans, 0, "no task without its business row, $rounds times");
is($undone, 0, 'a task is gone exactly if its removal was kept');
is($without, 0, 'each was seen in Redis before the stop');
is($lost, 0, 'what was seen there is not lost');
$t->finish(crashes => 1);
