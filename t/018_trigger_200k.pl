# 200,000 offers from one INSERT ... SELECT with the trigger, random delays: each
# payload comes out exactly once, none before its due instant, those that fell
# due after the hand-over in order of due time, FIFO among equal ones; rolled
# back ones never. G1 G2 G5 G8 F3
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

my $n = 200_000;
my $t = DqTest->new;
my $r = $t->redis;

$t->queue('order_timeout');
$t->sql(<<'SQL');
CREATE TABLE orders (id bigint PRIMARY KEY, due timestamptz);
CREATE TRIGGER timeout AFTER INSERT ON orders FOR EACH ROW
  EXECUTE FUNCTION dq_offer_trigger('order_timeout', 'due', 'id', 'id');
SQL

# takes from the list all the time and notes when
my $pid = fork();
my $file = $r->dir . '/taken';
if ($pid == 0)
{
	my $stop = 0;
	$SIG{TERM} = sub { $stop = 1 };
	$r->disconnect;
	open my $fh, '>', $file or die;
	while (1)
	{
		my $got = $r->cmd('LPOP', 'order_timeout', 1000);
		if ($got) { my $ms = now_ms(); print $fh map { "$ms $_\n" } @$got; next; }
		last if $stop;
		sleep(0.002);
	}
	close $fh;
	require POSIX;
	POSIX::_exit(0);
}

# rolled back before, within and after
$t->sql("BEGIN; INSERT INTO orders SELECT -i, clock_timestamp() + random() * '5 s'::interval FROM generate_series(1, 10000) i; ROLLBACK");
my $start = time();
$t->sql(<<SQL);
BEGIN;
SAVEPOINT s;
INSERT INTO orders SELECT -i, clock_timestamp() + random() * '5 s'::interval FROM generate_series(1, 5000) i;
ROLLBACK TO s;
INSERT INTO orders SELECT i, clock_timestamp() + random() * '20 s'::interval FROM generate_series(1, $n) i;
SAVEPOINT t;
INSERT INTO orders SELECT -i, clock_timestamp() FROM generate_series(5001, 6000) i;
ROLLBACK TO t;
COMMIT;
SQL
note(sprintf('the INSERT took %.1f s', time() - $start));
ok(poll_until(sub { $t->sql("SELECT dq_sync('order_timeout', '30 s')") eq 't' }, 120), 'handed over');
my $handed = now_ms();
note(sprintf('handed over after %.1f s', time() - $start));
my $last = $t->sql("SELECT ceil(extract(epoch FROM max(due)) * 1000) FROM orders");
sleep(0.1) while now_ms() < $last + 100;
ok(poll_until(sub { $r->cmd('ZCARD', 'redisson_delay_queue_timeout:{order_timeout}') == 0 && $r->cmd('LLEN', 'order_timeout') == 0 }), 'all taken')
  or diag($t->sql("SELECT * FROM dq_stats"));
kill 'TERM', $pid;
waitpid($pid, 0);

my %due = map { my ($id, $ms) = split /\|/; ($id => $ms) }
  split /\n/, $t->sql("SELECT id, ceil(extract(epoch FROM due) * 1000) FROM orders ORDER BY id");
my (@taken, $early, $disorder, $latest);
($early, $disorder, $latest) = (0, 0, 0);
my ($pdue, $pid2) = (0, 0);
open my $fh, '<', $file or die;
while (<$fh>)
{
	chomp;
	my ($ms, $id) = split / /;
	push @taken, $id;
	next unless defined $due{$id};
	$early++ if $ms < $due{$id};
	next if $due{$id} <= $handed;
	my $late = $ms - $due{$id};
	$latest = $late if $late > $latest;
	$disorder++ if $due{$id} < $pdue || ($due{$id} == $pdue && $id < $pid2);
	($pdue, $pid2) = ($due{$id}, $id);
}
is(scalar keys %due, $n, "$n orders are committed");
is_books('each payload exactly once, rolled back ones never', [ keys %due ], \@taken);
is($early, 0, 'none before its due instant');
is($disorder, 0, 'those due after the hand-over in order of due time, FIFO among equal ones');
cmp_ok($latest, '<=', 2000, "within scan_interval + 1 s (latest $latest ms)");

$t->finish;
