# kill -9 of the bridge, of PostgreSQL (immediate stop) and of Redis
# (appendfsync always) at random moments under load: the books agree.
# A10 G2 G5 G11 F15; PO 1 2 3 4
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

my $rounds = rounds(3, 20);
my $t = DqTest->new(
	redis => { config => { appendonly => 'yes', appendfsync => 'always' } },
	conf => "fsync = on\nsynchronous_commit = on\n");
my $r = $t->redis;

$t->queue('q');
$t->sql("CREATE TABLE offered (payload text)");

# A child that offers in small transactions until told to stop; what it offers is
# in table offered by the same transaction, so the table is the truth.
sub load
{
	my ($tag) = @_;
	my $pid = fork();

	die "fork: $!" unless defined $pid;
	return $pid if $pid;
	my $stop = 0;
	my $i = 0;
	my $connstr = $t->node->connstr('postgres');
	local $SIG{TERM} = sub { $stop = 1 };
	while (!$stop)
	{
		$i++;
		my $fate = rand() < 0.2 ? 'ROLLBACK' : 'COMMIT';
		my $sync = rand() < 0.3 ? 'off' : 'on';
		my $sql = "BEGIN; SET LOCAL synchronous_commit = $sync;"
		  . "WITH o AS (INSERT INTO offered SELECT '$tag-$i-' || g FROM generate_series(1, 20) g RETURNING payload)"
		  . " SELECT count(dq_offer('q', payload, random() * '2 seconds'::interval)) FROM o; $fate;";
		open my $fh, '|-', "psql -XAtq -v ON_ERROR_STOP=1 -d \"$connstr\" -f - >/dev/null 2>&1" or next;
		print $fh $sql;
		close $fh;
		select(undef, undef, undef, 0.05) if $? != 0;
	}
	require POSIX;
	POSIX::_exit(0);
}

sub settle
{
	my ($name) = @_;

	poll_until(sub { my ($rc) = $t->try("SELECT 1"); $rc == 0 });
	ok(poll_until(sub { my ($rc, $out) = $t->try("SELECT dq_sync('q', '10 s')"); $rc == 0 && $out eq 't' }), "$name: relayed");
	my @offered = split /\n/, $t->sql("SELECT payload FROM offered");
	poll_until(sub { $r->cmd('LLEN', 'q') >= @offered });
	sleep(0.3);
	is_books("$name: offered = delivered + pending, nothing twice", \@offered, [ $r->ready('q') ], [ $t->pending('q') ]);
}

sub during_load
{
	my ($name, $kill) = @_;

	for my $round (1 .. $rounds)
	{
		my @load = map { load("$name$round" . chr(96 + $_)) } 1 .. 2;
		for (1 .. 2)
		{
			sleep(0.3 + rand(0.7));
			$kill->();
		}
		sleep(0.3);
		kill 'TERM', @load;
		waitpid($_, 0) for @load;
	}
	settle($name);
}

during_load('bridge', sub {
	my ($rc, $pid) = $t->try("SELECT pid FROM dq_workers WHERE role = 'bridge' AND pid > 0 LIMIT 1");
	kill 'KILL', $pid if $rc == 0 && $pid;
});
during_load('postgres', sub {
	$t->node->stop('immediate');
	$t->node->start;
});
during_load('redis', sub {
	$r->kill9;
	$r->start;
});

# a transaction with synchronous_commit = off that is lost was never sent: the
# books above cover it, because table and offer were lost together
my $log = $t->log_text;
ok($log !~ /PANIC:|TRAP:|signal 11|signal 6\b/, 'nothing but our own kill -9 ended a process');
$t->finish(crashes => 1);
