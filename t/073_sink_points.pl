# At every step of a batch that goes into a sink the executor is made to wait, and there
# it, PostgreSQL or Redis is killed, Redis loses its data, or the connection is cut. After
# each visit each task has its row, once. The other points: t/040.
# A10 A12 F13; G2 G3 G6; PO 13 14 15
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use DqTest::Points;
use Test::More;
use Time::HiRes qw(time sleep);

my $points = DqTest::Points->new("$FindBin::RealBin/..");
my $t = DqTest->new(
	install => $points->install,
	redis => { config => { appendonly => 'yes', appendfsync => 'always' } },
	conf => "fsync = on\n" . $points->conf,
	extension => 0);
my $r = $t->redis;
my $proxy = DqTest::Proxy->new($r);

$t->extend('postgres', options => "host '127.0.0.1', port '" . $proxy->port . "', command_timeout '3s'");
$t->sql("CREATE TABLE arrived (payload text)");
$t->queue('q', "sink 'arrived'");

my %act = (
	kill => sub { kill 'KILL', $_[0]; },
	term => sub { kill 'TERM', $_[0]; },
	postgres => sub { $t->node->stop('immediate'); $t->node->start; },
	redis => sub { $r->kill9; $r->start; },
	flush => sub { $r->cmd('FLUSHALL'); },
	drop => sub { $proxy->mode_now('refuse'); $proxy->mode_now('pass'); },
);
my @names = grep { /^deliver\./ } $points->names;
my @acts = sort keys %act;
my @all;
my @missed;

sub up { return poll_until(sub { my ($rc) = $t->try('SELECT 1'); $rc == 0 }); }

sub visit
{
	my ($point, $act) = @_;
	my $visit = "$point: $act";
	my $first = @all;

	push @all, map { "$visit $_" } 1 .. 20;
	$points->arm($point);
	$t->sql("SELECT count(dq_offer('q', '$visit ' || i, '0')) FROM generate_series(1, 20) i");
	my $pid = $points->reached($point);
	push @missed, $visit unless $pid;
	$act{$act}->($pid) if $pid;
	$points->release($point);
	up();
	poll_until(sub { my ($rc, $n) = $t->try("SELECT count(*) FROM arrived"); $rc == 0 && $n >= @all }, 60);
	is($t->sql("SELECT count(*), count(DISTINCT payload) FROM arrived WHERE payload LIKE '$visit %'"), '20|20', "A10: $visit");
}

cmp_ok(scalar @names, '>=', 5, 'the steps of a batch have points');
my $turn = 0;
for my $point (@names)
{
	# in short runs three each, not the same ones everywhere
	for (1 .. (long_run() ? @acts : 3)) { visit($point, $acts[ $turn++ % @acts ]); }
	$turn++;
}
is(join(', ', @missed), '', 'every point was come to');
is_books('all together', \@all, [ split /\n/, $t->sql("SELECT payload FROM arrived") ]);

my $log = $t->log_text;
ok($log !~ /PANIC:|TRAP:|signal 11|signal 6\b/, 'nothing but our own kill -9 ended a process');
$t->finish(crashes => 1);
