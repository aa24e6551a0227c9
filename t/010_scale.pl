# Many due at once, many sessions, the order among them, and nobody waits.
# A6 A7 A8 A11; PO 2
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

my $t = DqTest->new;
my $r = $t->redis;

$r->cmd('CONFIG', 'SET', 'slowlog-log-slower-than', 5000);
$r->cmd('CONFIG', 'SET', 'slowlog-max-len', 1000);
$t->queue('q');
$t->queue('q2');

# ---- A6: 20,000 due at once --------------------------------------------------------------
$t->sql("SELECT dq_worker_stop()");
$t->sql("SELECT count(dq_offer('q', i::text)) FROM generate_series(1, 20000) i");
$t->sql("SELECT dq_worker_start()");
ok(poll_until(sub { $r->cmd('LLEN', 'q') >= 20000 }), 'A6 20,000 due at once are delivered');
is_books('A6 each once', [ 1 .. 20000 ], [ $r->ready('q') ]);
is(join(' ', ($r->ready('q'))[ 0, 1, 9999, 19999 ]), '1 2 10000 20000', 'A6 in order');
$r->cmd('DEL', 'q');
# by hand, with any max
$t->sql("SELECT dq_worker_stop()");
$t->sql("SELECT count(dq_offer('q', i::text)) FROM generate_series(1, 20000) i");
$t->sql("SELECT dq_sync('q', '60 s')");
is($t->sql("SELECT dq_transfer('q', 10)"), 10, 'dq_transfer moves max');
is($t->sql("SELECT dq_transfer('q')"), 100, 'dq_transfer moves 100 unless told');
is($t->sql("SELECT dq_transfer('q', 1000000)"), 19890, 'A6 dq_transfer with a large max moves all');
is($r->cmd('LLEN', 'q'), 20000, 'A6 all there');
$r->cmd('DEL', 'q');
# 20,000 removes in one statement
$t->sql("SELECT count(dq_offer('q', 'p' || i, '1 hour', i)) FROM generate_series(1, 20000) i");
$t->sql("SELECT dq_worker_start()");
$t->sync;
my $start = time();
is($t->sql("SELECT count(*) FROM generate_series(1, 20000) i WHERE dq_remove('q', i)"), 20000, 'A6 20,000 dq_remove in one statement');
note(sprintf('20,000 dq_remove: %.1f s', time() - $start));
$t->sync;
is($r->cmd('ZCARD', 'redisson_delay_queue_timeout:{q}'), 0, 'A6 all gone');

# ---- A7: 100,000 with one due instant -------------------------------------------------------
sub mass
{
	my ($n, $order) = @_;
	my $due = $t->sql("SELECT to_char(clock_timestamp() + '" . ($n > 50000 ? 12 : 4) . " s', 'YYYY-MM-DD HH24:MI:SS.MS OF')");
	my $due_ms = $t->sql("SELECT floor(extract(epoch FROM '$due'::timestamptz) * 1000)");

	$t->sql("SELECT count(dq_offer_at('q', i::text, '$due')) FROM generate_series(1, $n) i");
	$t->sql("SELECT dq_offer_at('q2', 'probe', '$due')");
	ok($t->sync, "A7 $n are pending");
	diag('the hand-over took longer than the delay') if now_ms() > $due_ms;
	my $probe = DqTest::Probe::start($r);
	sleep(0.05) while now_ms() < $due_ms;
	ok(poll_until(sub { $r->cmd('LLEN', 'q2') == 1 }, 30, 0.002), 'A7 the other queue');
	my $late = now_ms() - $due_ms;
	ok(poll_until(sub { $r->cmd('LLEN', 'q') >= $n }, 120, 0.005), "A7 $n delivered");
	my $took = now_ms() - $due_ms;
	my $p99 = $probe->stop;
	$r->cmd('DEL', 'q', 'q2');
	return ($took, $late, $p99);
}
my ($took10, $late10, $p10) = mass(10000);
my ($took100, $late100, $p100) = mass(100000);
cmp_ok($took100, '<', 30 * ($took10 > 100 ? $took10 : 100), "A7 100k takes about 10 times 10k ($took10 ms, $took100 ms)");
cmp_ok($late100, '<', 2000, "A7 the other queue is on time ($late100 ms)");
cmp_ok($p100, '<', 100, sprintf('A7 PING beside it: p99 %.1f ms', $p100));
my @slow = grep { $_->[3][0] =~ /^EVAL/i } @{ $r->cmd('SLOWLOG', 'GET', 1000) };
my @very = grep { $_->[2] > 20000 } @slow;
# a script that is slow by itself is slow hundreds of times; a busy machine now and then
cmp_ok(scalar(@very), '<', 100, 'A7 no script above 20 ms, but for the machine') or diag(map { "$_->[2] us: $_->[3][0] $_->[3][1]\n" } @very);
note(scalar(@slow) . ' scripts above 5 ms');

# ---- A8: a due one behind many far ones ----------------------------------------------------------
$t->sql("SELECT count(dq_offer('q', 'far' || i, '1 day'::interval + random() * '29 days'::interval)) FROM generate_series(1, 20000) i");
my $id = $t->sql("SELECT dq_offer('q', 'near', '2 s')");
my ($due) = $id =~ /^(\d+)/;
ok($r->cmd('BLPOP', 'q', 20), 'A8 the near one arrives');
cmp_ok(now_ms() - $due, '<', 2000, 'A8 on time');

# ---- A11: 8 sessions near the empty queue ------------------------------------------------------------
my $each = rounds(1000, 5000);
my @pids;
for my $k (1 .. 8)
{
	my $pid = fork();
	if ($pid == 0)
	{
		open my $fh, '|-', 'psql -XAtq -d "' . $t->node->connstr('postgres') . '" -f - >/dev/null' or POSIX::_exit(1);
		print $fh "DO \$\$ BEGIN FOR i IN 1 .. $each LOOP PERFORM dq_offer('q2', '$k-' || i, random() * '5 ms'::interval); COMMIT; END LOOP; END \$\$;\n";
		close $fh;
		require POSIX;
		POSIX::_exit(0);
	}
	push @pids, $pid;
}
waitpid($_, 0) for @pids;
my @all = map { my $k = $_; map { "$k-$_" } 1 .. $each } 1 .. 8;
poll_until(sub { $r->cmd('LLEN', 'q2') >= @all });
sleep(0.3);
is_books('A11 8 sessions beside an almost empty queue: every one once', \@all, [ $r->ready('q2') ]);
is($r->cmd('ZCARD', 'redisson_delay_queue_timeout:{q2}'), 0, 'A11 nothing left');
$t->finish;

# PING every 10 ms on a connection of its own; stop() gives the 99th percentile
package DqTest::Probe;

sub start
{
	my ($r) = @_;
	my $file = "$r->{dir}/probe";
	my $pid = fork();
	if ($pid == 0)
	{
		my $stop = 0;
		my @ms;
		$SIG{TERM} = sub { $stop = 1 };
		$r->disconnect;
		while (!$stop)
		{
			my $s = Time::HiRes::time();
			eval { $r->cmd('PING') };
			push @ms, 1000 * (Time::HiRes::time() - $s);
			Time::HiRes::sleep(0.01);
		}
		@ms = sort { $a <=> $b } @ms;
		open my $fh, '>', $file;
		print $fh $ms[ int(0.99 * $#ms) ];
		close $fh;
		require POSIX;
		POSIX::_exit(0);
	}
	return bless { pid => $pid, file => $file }, 'DqTest::Probe';
}

sub stop
{
	my ($self) = @_;
	kill 'TERM', $self->{pid};
	waitpid($self->{pid}, 0);
	open my $fh, '<', $self->{file} or return 0;
	return scalar <$fh>;
}
