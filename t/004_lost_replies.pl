# A proxy cuts the connection after Redis has executed and before the reply
# arrives: still exactly once. Black holes and slow replies.
# G2 F6 E2 E4 E6 E8; PO 3 4 5 6 7
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

my $t = DqTest->new(extension => 0);
my $r = $t->redis;
my $proxy = DqTest::Proxy->new($r);
$t->extend('postgres', options => "host '127.0.0.1', port '" . $proxy->port . "', command_timeout '2s', connect_timeout '1s'");
$t->queue('q');
$t->sql("CREATE TABLE offered (payload text)");

my $batch = 0;
sub offer_some
{
	my ($n) = @_;

	$batch++;
	for my $part (1 .. 4)
	{
		$t->sql("WITH o AS (INSERT INTO offered SELECT 'b$batch-$part-' || g FROM generate_series(1, $n / 4) g RETURNING payload)"
			  . " SELECT count(dq_offer('q', payload, random() * '500 ms'::interval)) FROM o");
		sleep(0.1);
	}
}

sub books
{
	my ($name) = @_;
	my @offered = split /\n/, $t->sql("SELECT payload FROM offered");

	ok(poll_until(sub { $r->cmd('LLEN', 'q') >= @offered }), "$name: all arrive")
	  or diag($r->cmd('LLEN', 'q') . ' of ' . @offered . "; cuts " . $proxy->cuts . "\n"
		  . $t->sql("SELECT state, last_error FROM dq_stats"));
	sleep(0.5);
	is_books("$name: each exactly once", \@offered, [ $r->ready('q') ], [ $t->pending('q') ]);
}

offer_some(400);
books('no fault');

my $n = rounds(2000, 20000);
$proxy->mode('chance 0.33');
my $cuts = $proxy->cuts;
offer_some($n);
books('a third of the script replies lost, at random');
cmp_ok($proxy->cuts - $cuts, '>=', 3, 'the proxy did cut (' . ($proxy->cuts - $cuts) . ')');

$proxy->mode('cut 3');
$cuts = $proxy->cuts;
offer_some($n);
books('every third script reply lost');
cmp_ok($proxy->cuts - $cuts, '>=', 3, 'the proxy did cut (' . ($proxy->cuts - $cuts) . ')');

$proxy->mode('cut 3 all');
$cuts = $proxy->cuts;
offer_some($n);
books('every third reply of any command lost');
cmp_ok($proxy->cuts - $cuts, '>=', 3, 'the proxy did cut (' . ($proxy->cuts - $cuts) . ')');

# dq_remove with its reply lost: never a wrong true or false
$proxy->mode('pass');
$t->sync;
$t->sql("SELECT count(dq_offer('q', 'rm' || i, '1 hour', i)) FROM generate_series(1, 60) i");
$t->sync;
$proxy->mode('cut 3');
my %said;
for my $i (1 .. 30)
{
	my ($rc, $out, $err) = $t->try("SELECT coalesce(dq_remove('q', $i)::text, 'null')");
	$said{$i} = $rc == 0 ? $out : "error $err";
}
$proxy->mode('pass');
ok($t->sync, 'relayed');
my %left = map { $_ => 1 } $t->pending('q');
my @wrong = grep { $said{$_} =~ /^(t|true|null)/ ? $left{"rm$_"} : !$left{"rm$_"} } sort { $a <=> $b } keys %said;
is("@wrong", '', 'dq_remove with lost replies: true and NULL mean gone, false and errors change nothing')
  or diag(join ' ', map { "$_=$said{$_}" } @wrong);

# slow replies: order and books hold
$proxy->mode('delay 0.2');
offer_some(400);
$t->sql("SELECT dq_remove('q', i) FROM generate_series(31, 60) i");
books_plain('slow replies');
$proxy->mode('pass');

sub books_plain
{
	my ($name) = @_;

	$t->sync;
	my @offered = split /\n/, $t->sql("SELECT payload FROM offered");
	ok(poll_until(sub { $r->cmd('LLEN', 'q') >= @offered }), "$name: all arrive");
	my @kept = grep { !/^rm/ } $t->pending('q');
	is_books("$name: each exactly once", \@offered, [ $r->ready('q') ], \@kept);
}

# a black hole: command_timeout ends it, and it recovers by itself
my $s = $t->session;
$s->run("SELECT count(*) >= 0 FROM q");
$proxy->mode('hole');
sleep(0.1);
$t->sql("WITH o AS (INSERT INTO offered VALUES ('in the hole') RETURNING payload) SELECT dq_offer('q', payload) FROM o");
my $err = $s->run("SELECT count(*) FROM q");
like($err, qr/0800[16]:.*command_timeout/s, 'E8 command_timeout is named, with class 08');
$s->quit;
{
	my ($rc, $out, $err) = $t->try("SELECT count(*) FROM q");
	like($err, qr/08001:.*connect_timeout/s, 'E5 connect_timeout is named, with 08001');
}
ok($t->wait_state('q', 'redis_down'), 'the worker notices');
$proxy->mode('pass');
books_plain('after the black hole');

# refused connections
$proxy->mode('refuse');
sleep(0.5);
$t->sql("WITH o AS (INSERT INTO offered VALUES ('refused') RETURNING payload) SELECT dq_offer('q', payload) FROM o");
sleep(1);
$proxy->mode('pass');
books_plain('after refused connections');

# E4: signals during a relay
{
	my $bridge = $t->bridge_pid;
	my $pid = fork();
	if ($pid == 0)
	{
		for (1 .. 400) { kill 'HUP', $bridge; kill 'USR1', $bridge; select(undef, undef, undef, 0.005); }
		require POSIX;
		POSIX::_exit(0);
	}
	offer_some(4000);
	waitpid($pid, 0);
	books_plain('E4 hundreds of signals');
	is($t->bridge_pid, $bridge, 'E4 the worker survived them');
}

$t->finish;
