# A sink through faults: kill -9 of the executor, of PostgreSQL and of Redis at random
# moments, lost replies, Redis data loss. Each task has its row exactly once.
# A10 A12 G14; G2 G3 G6; PO 13 14 15
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

my $rounds = rounds(3, 20);
my $per = rounds(2000, 5000);
my $t = DqTest->new(
	redis => { config => { appendonly => 'yes', appendfsync => 'always' } },
	conf => "fsync = on\nsynchronous_commit = on\n");
my $r = $t->redis;
my $proxy = DqTest::Proxy->new($r);
my $no = 0;

$t->sql("CREATE SERVER far FOREIGN DATA WRAPPER dq_bridge OPTIONS (host '127.0.0.1', port '" . $proxy->port . "', command_timeout '2s')");
$t->sql("CREATE TABLE arrived (payload text, key text)");
$t->queue('q', "sink 'arrived'");

sub up { return poll_until(sub { my ($rc) = $t->try('SELECT 1'); $rc == 0 }); }

sub executor_pid
{
	my ($rc, $pid) = $t->try("SELECT pid FROM dq_workers WHERE role = 'executor' AND pid > 0 LIMIT 1");

	return $rc == 0 ? $pid : '';
}

# so many tasks, half of them with a key, due over a second
sub offer
{
	my ($queue, $n) = @_;
	my $first = $no + 1;

	$no += $n;
	$t->sql("SELECT count(dq_offer('$queue', 't' || i, random() * '1 s'::interval, CASE WHEN i % 2 = 0 THEN 'k' || i END)) FROM generate_series($first, $no) i");
	return map { "t$_" } $first .. $no;
}

sub settle
{
	my ($name, $table, @offered) = @_;

	up();
	poll_until(sub { my ($rc, $out) = $t->try("SELECT count(*) FROM $table"); $rc == 0 && $out >= @offered });
	sleep(0.5);
	is_books($name, \@offered, [ split /\n/, $t->sql("SELECT payload FROM $table") ]);
	is($t->sql("SELECT count(*) FROM $table WHERE (key IS NULL) = (right(payload, 1)::int % 2 = 0)"), 0, "$name: each with its key")
	  if $table eq 'arrived';
}

my @all;
for my $case ([ 'executor', sub { my $pid = executor_pid(); kill 'KILL', $pid if $pid; } ],
	[ 'PostgreSQL', sub { $t->node->stop('immediate'); $t->node->start; } ],
	[ 'Redis', sub { $r->kill9; $r->start; } ])
{
	my ($name, $kill) = @$case;

	for my $round (1 .. $rounds)
	{
		push @all, offer('q', $per);
		sleep(rand(1.2));
		$kill->();
		up();
	}
	settle("A10: kill -9 of $name", 'arrived', @all);
}

# ---- lost replies -----------------------------------------------------------------------
$t->sql("CREATE TABLE far_arrived (payload text)");
$t->queue('f', "sink 'far_arrived'", server => 'far');
my @far;
for my $mode ('cut 2', 'before 3', 'chance 0.5')
{
	push @far, offer('f', 500);
	sleep(0.3);
	$proxy->mode($mode);
	sleep(3);
	$proxy->mode('pass');
}
cmp_ok($proxy->cuts, '>', 3, 'replies were lost');
settle('lost replies', 'far_arrived', @far);

# ---- Redis loses data ---------------------------------------------------------------------
# everything, while tasks arrive: what was delivered does not come again
for my $round (1 .. $rounds)
{
	push @all, offer('q', $per);
	sleep(0.3 + rand(0.8));
	$r->cmd('FLUSHALL');
}
settle('A12: FLUSHALL in the middle', 'arrived', @all);

# an old state comes back, with tasks that were delivered and batches that were committed
for my $round (1 .. rounds(2, 10))
{
	push @all, offer('q', $per);
	sleep(0.2 + rand(0.5));
	my $old = $r->save_state;
	sleep(0.2 + rand(0.5));
	push @all, offer('q', 200);
	sleep(rand(0.5));
	$r->restore_state($old);
}
settle('an old state of Redis comes back', 'arrived', @all);
cmp_ok($t->sql("SELECT count(*) FROM dq_claims WHERE suspect > 0"), '>=', 1, 'tasks were looked up in the done log');

# ---- the done log goes when it is not needed -------------------------------------------------
$t->sql("ALTER SERVER redis OPTIONS (ADD replay_window '1s')");
is($t->sql("SELECT count(*) > 0 FROM dq_done"), 't', 'there is a done log');
# it is looked through once a minute: an executor that starts looks at once
ok(poll_until(sub {
	my $pid = executor_pid();
	kill 'TERM', $pid if $pid;
	push @all, offer('q', 1);
	sleep(1.5);
	return $t->sql("SELECT count(*) FROM dq_done d JOIN dq_shards s ON s.no = d.shard WHERE s.name = 'q' AND at < now() - interval '20 s'") == 0;
}, 90), 'old rows of it go');
settle('nothing came twice', 'arrived', @all);

my $log = $t->log_text;
ok($log !~ /PANIC:|TRAP:|signal 11|signal 6\b/, 'nothing but our own kill -9 ended a process');
$t->finish(crashes => 1);
