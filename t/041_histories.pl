# Random histories: offers, removals, reschedules and polls over 20 keys in four
# sessions with savepoints, rollbacks and two-phase commit, while workers, backends,
# PostgreSQL and Redis are killed and connections cut. A model (DqTest::History)
# says what may have become of each task: no task fires that was removed, each other
# one fires once, none early.
# A10 A11 B2 B3 B4 F2 F3 F6 F15 E2; G1 G2 G4 G5 G7 G8 G11; PO 1 to 12, 17
#
# DQ_SEED=n runs history n and those behind it again (DQ_HISTORIES=m: m of them);
# which session is quicker is not repeated. DQ_KINDS=offer,remove: only these.
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use DqTest::History;
use Test::More;
use Time::HiRes qw(time sleep);

$SIG{PIPE} = 'IGNORE';
my $histories = $ENV{DQ_HISTORIES} || rounds(20, 2000);
my $seed = defined $ENV{DQ_SEED} ? $ENV{DQ_SEED} : 1 + int(rand(1_000_000)) * 10;
my $batch_size = 10;

my $t = DqTest->new(
	redis => { config => { appendonly => 'yes', appendfsync => 'always' } },
	conf => "fsync = on\nsynchronous_commit = on\nmax_prepared_transactions = 40\ndeadlock_timeout = 50ms\n",
	extension => 0);
my $r = $t->redis;
my $proxy = DqTest::Proxy->new($r);

$t->extend('postgres', options => "host '127.0.0.1', port '" . $proxy->port . "', command_timeout '2s'");
$t->queue('q');
$t->queue('qs', "shards '3'");
$t->queue('qp');
$t->sql($DqTest::History::SCHEMA);

my %shards = (q => ['q'], qs => [ map { "qs#$_" } 0 .. 2 ], qp => ['qp']);
my %consumer = map { $_ => $r->archiver($_, "taken:$_") } @{ $shards{q} }, @{ $shards{qs} };

# what exists already
my %there = map { $_ => 1 } split /\n/, $t->sql("SELECT DISTINCT proname FROM pg_proc WHERE proname ~ '^dq_(reschedule_at|poll)\$'");
note('without ', join(', ', grep { !$there{$_} } qw(dq_reschedule_at dq_poll))) if keys %there < 2;
my @kinds = (('offer') x 5, ('remove') x 4, $there{dq_reschedule_at} ? ('move') x 3 : ());
@kinds = grep { my $k = $_; grep { $k eq $_ } split /,/, $ENV{DQ_KINDS} } @kinds if $ENV{DQ_KINDS};

# ---- faults ---------------------------------------------------------------------

sub bridge
{
	my ($rc, $pid) = $t->try("SELECT pid FROM dq_workers WHERE role = 'bridge' AND pid > 0 LIMIT 1");
	return $rc == 0 && $pid ? $pid : 0;
}

my %fault = (
	worker_killed => sub { my $pid = bridge(); kill 'KILL', $pid if $pid; },
	worker_ended => sub { my $pid = bridge(); kill 'TERM', $pid if $pid; },
	backend_killed => sub { my ($h) = @_; my $s = $h->pick(@{ $h->{sessions} }); kill 'KILL', $s->{pid}; },
	backend_ended => sub { my ($h) = @_; my $s = $h->pick(@{ $h->{sessions} }); kill 'TERM', $s->{pid}; },
	cancelled => sub { my ($h) = @_; kill 'INT', $_->{pid} for @{ $h->{sessions} }; },
	postgres => sub { $t->node->stop('immediate'); $t->node->start; },
	postgres_fast => sub { $t->node->stop('fast'); $t->node->start; },
	redis => sub { $r->kill9; $r->start; },
	outage => sub { my ($h) = @_; $r->kill9; $h->{later} = sub { $r->start }; },
	frozen => sub { my ($h) = @_; $r->freeze; $h->{later} = sub { $r->thaw }; },
	cuts => sub { my ($h) = @_; $proxy->mode('chance 0.15'); $h->{later} = sub { $proxy->mode('pass') }; },
	lost => sub { my ($h) = @_; $proxy->mode('before 4'); $h->{later} = sub { $proxy->mode('pass') }; },
	dropped => sub { $proxy->mode_now('refuse'); $proxy->mode_now('pass'); },
	calm => sub { my ($h) = @_; my $l = delete $h->{later}; $l->() if $l; },
);
my @common = qw(worker_ended backend_ended cancelled redis outage frozen cuts lost dropped);
my @rare = qw(worker_killed backend_killed postgres postgres_fast);

# ---- batches ----------------------------------------------------------------------

my @sessions = map { { no => $_ } } 1 .. 4;

sub archive_times
{
	my (%times);

	for my $c (values %consumer)
	{
		push @{ $times{ $_->[2] } }, $_->[0] for $c->items;
	}
	return %times;
}

# Everything that can fire has fired, and nothing is held
sub drain
{
	my ($queue, $polled) = @_;
	my @left;
	my $done = poll_until(
		sub {
			my ($rc, $out) = $t->try("SELECT dq_sync('$queue', '2 s')");
			return 0 unless $rc == 0 && $out eq 't';
			if ($queue eq 'qp')
			{
				my ($rc, $out) = $t->try("SELECT dq_poll('qp', 1000)");
				return 0 if $rc != 0;
				push @$polled, split /\n/, $out;
			}
			@left = map {
				my $n = $_;
				("pending $n " . $r->cmd('ZCARD', DqTest::Redis::pending_key($n)),
				 "held $n " . $r->cmd('ZCARD', "dq:{$n}:held"), "hold $n " . $r->cmd('HLEN', "dq:{$n}:hold"),
				 "ready $n " . $r->cmd('LLEN', $n))
			} @{ $shards{$queue} };
			@left = grep { !/ 0$/ } @left;
			return !@left;
		}, 90, 0.05);

	diag("$queue is not empty: @left; " . $t->sql("SELECT shard, state, last_error FROM dq_stats WHERE queue = '$queue'::regclass")) unless $done;
	return $done;
}

my $ran = 0;
my $operations = 0;
my %outcome;
my $failed = 0;

while ($ran < $histories && !$failed)
{
	my $first = $seed;
	my $mode = (int($seed / $batch_size) % 3);
	my $queue = $mode == 0 ? 'q' : $mode == 1 ? 'qs' : $there{dq_poll} ? 'qp' : 'q';
	my @batch;
	my $n = $histories - $ran < $batch_size ? $histories - $ran : $batch_size;

	for (1 .. $n)
	{
		my $h = DqTest::History->new(
			t => $t, seed => $seed, queue => $queue, sessions => \@sessions, prepare => 1,
			kinds => $queue eq 'qp' ? [ @kinds, 'poll', 'poll', 'poll' ] : \@kinds, on_time => undef,
			fault => sub { my ($h, $name) = @_; $fault{$name}->($h); note("history $h->{seed}: $name"); },
			calm => sub { my ($h) = @_; $fault{calm}->($h); });
		my @faults;

		push @faults, $h->pick(@common) if $h->chance(45);
		push @faults, $h->pick(@rare) if $h->chance(15);
		# what a fault has begun ends before the next
		$h->{faults} = [ map { ($_, 'calm') } @faults ];
		push @batch, $h;
		$h->run(40 + $h->rnd(30));
		$seed++;
		$ran++;
	}

	my @polled;
	my $drained = drain($queue, \@polled);
	my %fired;
	if ($queue eq 'qp')
	{
		push @{ $fired{$_} }, undef for @polled;
		for my $h (@batch)
		{
			$h->load;
			for my $o (grep { $_->{kind} eq 'poll' && $_->{real} && $_->{said} ne 'null' } @{ $h->{log} })
			{
				push @{ $fired{$_} }, $o->{t1} < 9e15 ? $o->{t1} * 1000 : undef for split /,/, $o->{said};
			}
		}
	}
	else
	{
		my %times = archive_times();
		for my $n (@{ $shards{$queue} })
		{
			my @taken = @{ $r->cmd('LRANGE', "taken:$n", 0, -1) };
			for my $p (@taken) { push @{ $fired{$p} }, shift @{ $times{$p} || [] }; }
		}
	}
	my @bad = $drained ? () : ("$queue is not empty in the end");
	for my $h (@batch)
	{
		my @complaints = $h->judge(\%fired);
		for my $c (@complaints)
		{
			my %names = map { $_ => 1 } $c =~ /(h\d+[pk]\d+)/g;
			$names{ $_->{key} } = 1 for grep { $_->{key} && $names{ $_->{payload} || '' } } @{ $h->{log} };
			$names{ $_->{payload} } = 1 for grep { $_->{key} && $_->{payload} && $names{ $_->{key} } } @{ $h->{log} };
			my $any = join '|', map { quotemeta } keys %names;
			$c .= "\n" . $h->story(qr/^(?:$any)$/);
		}
		push @bad, @complaints;
		$operations += @{ $h->{log} };
		$outcome{"$_->{kind} " . (!$_->{real} ? 'undone' : $_->{kind} eq 'remove' ? $_->{said} : $_->{said} eq 'null' ? 'null' : 'done')}++
		  for @{ $h->{log} };
	}
	ok(!@bad, "histories $first to " . ($seed - 1) . " on $queue") or diag(join "\n", @bad);
	$failed++ if @bad && !$ENV{DQ_GO_ON};
	last if @bad && !$drained;
}
note("$ran histories, $operations operations: " . join ', ', map { "$_ $outcome{$_}" } sort keys %outcome);
$_->{psql}->quit for grep { $_->{psql} } @sessions;
my $log = $t->log_text;
ok($log !~ /PANIC:|TRAP:|signal 11|signal 6\b/, 'nothing but our own kill -9 ended a process');
diag('run it again with DQ_SEED=' . ($seed - $batch_size)) if $failed;
$t->finish(crashes => 1);
