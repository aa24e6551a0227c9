# A backlog gathered while Redis was down is handed over in pages: the worker's
# memory stays flat, other sessions are served, nothing is lost. F12 F9; G7
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time);

my $n = rounds(40_000, 1_000_000);
my $t = DqTest->new(redis => { config => { maxmemory => 0 } }, conf => "max_wal_size = 4GB\n");
my $r = $t->redis;

# Memory of the process's own, in kB: not what it maps of shared buffers
sub own_memory
{
	my ($pid) = @_;
	open my $fh, '<', "/proc/$pid/status" or return 0;
	my ($kb) = join('', <$fh>) =~ /RssAnon:\s+(\d+)/;
	close $fh;
	return $kb || 0;
}

$t->queue('q');
$t->queue('small');
$t->sql("SELECT dq_offer('q', 'warm', '1 hour'), dq_offer('small', 'warm', '1 hour')");
$t->sync;
my $before = own_memory($t->bridge_pid);
$r->kill9;
ok($t->wait_state('q', 'redis_down'), 'Redis is down and known to be');

# 1 kB each, half of them with keys; no error, no waiting
my $start = time();
$t->sql("SELECT count(dq_offer('q', repeat('x', 1000) || i, '1 hour', CASE WHEN i % 2 = 0 THEN i END)) FROM generate_series(1, $n) i");
note(sprintf('%d offers while Redis is down: %.1f us each', $n, 1e6 * (time() - $start) / $n));
$t->sql("SELECT count(dq_remove('q', i::text)) FROM generate_series(2, 200, 2) i");
is($t->stat('q', 'state'), 'redis_down', 'down, not parked');

$r->start;
my ($peak, $slowest) = (0, 0);
my $done = poll_until(sub {
	my $kb = own_memory($t->bridge_pid);
	$peak = $kb if $kb > $peak;
	my $s = time();
	$t->sql("SELECT dq_offer('small', 'beside', '1 hour')");
	my $took = time() - $s;
	$slowest = $took if $took > $slowest;
	$r->cmd('ZCARD', 'redisson_delay_queue_timeout:{q}') >= $n - 100 && $t->sql("SELECT dq_sync(NULL, '10 ms')") eq 't';
}, rounds(120, 600));
ok($done, 'the backlog is handed over') or diag($r->cmd('ZCARD', 'redisson_delay_queue_timeout:{q}'));
note("the worker's own memory: $before kB before, $peak kB at most");
cmp_ok($peak, '<=', 64 * 1024, 'F12 in at most 64 MB');
note(sprintf('slowest statement beside it: %.0f ms', 1000 * $slowest));
is($t->sql("SELECT count(*), count(DISTINCT payload) FROM q"), ($n - 100 + 1) . '|' . ($n - 100 + 1), 'each once, without those that were removed');
$t->finish;
