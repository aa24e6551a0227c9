# At every step of offer, commit, hold, wait, restore, relay, coming to a shard and
# transfer a process is made to wait, and there the process, PostgreSQL or Redis is
# killed, or the connection is cut, before or after Redis has executed. After each
# visit the books: offered = pending + delivered + removed, each once.
# A10 F2 F6 F15 G1 G2 G4 G5 G7 G11 E2; PO 1 2 3 4 5 7 8 9 10 11 12 17
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

# the worker's backoff must not be what this test waits for
$t->extend('postgres', options => "host '127.0.0.1', port '" . $proxy->port . "', command_timeout '3s'");
$t->queue('q');
$t->queue('q4', "shards '4'");
$t->sql(<<'SQL');
CREATE TABLE offered (no serial, queue text, payload text, key text);
CREATE TABLE removed (payload text, said boolean);
CREATE FUNCTION offer(queue text, payload text, delay interval, key text DEFAULT NULL) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO offered (queue, payload, key) VALUES (queue, payload, key);
  PERFORM dq_offer(queue::regclass, payload, delay, key);
END $$;
CREATE FUNCTION remove(queue text, payload text, element text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
  said boolean := dq_remove(queue::regclass, element);
BEGIN
  INSERT INTO removed VALUES (payload, said);
  RETURN said;
END $$;
CREATE FUNCTION take(queue text, max int, wait interval DEFAULT '0') RETURNS void LANGUAGE sql AS $$
  INSERT INTO removed SELECT p, true FROM dq_poll(queue::regclass, max, wait) p;
$$;
CREATE FUNCTION move(queue text, element text, delay interval) RETURNS boolean LANGUAGE sql AS $$
  SELECT dq_reschedule(queue::regclass, element, delay) IS NOT NULL;
$$;
SQL

my $session;
my $backend;

sub connect_anew
{
	$session->quit if $session;
	# psql ends with its connection, and the server may still be coming up
	$backend = poll_until(sub {
		$session = $t->session;
		my $pid = $session->run('SELECT pg_backend_pid()', 30);
		return $pid if defined $pid && $pid =~ /^\d+$/;
		$session->quit;
		return 0;
	}) or die "no connection\n";
}

# ---- the books ---------------------------------------------------------------

sub have
{
	my ($like) = @_;	# beginning of the payloads
	my @all;

	for my $name ('q', map { "q4#$_" } 0 .. 3)
	{
		push @all, $r->ready($name), $t->pending($name);
	}
	return [ grep { index($_, $like) == 0 } @all ];
}

# What must be there: what was offered, without what was replaced or removed
sub expected
{
	my ($like) = @_;

	return [ split /\n/, $t->sql(<<SQL) ];
SELECT payload FROM offered o
 WHERE starts_with(payload, '$like')
   AND NOT EXISTS (SELECT FROM offered n WHERE n.key = o.key AND n.queue = o.queue AND n.no > o.no)
   AND NOT EXISTS (SELECT FROM removed r WHERE r.payload = o.payload AND said IS NOT FALSE)
 ORDER BY no
SQL
}

sub alive
{
	return poll_until(sub { my ($rc) = $t->try('SELECT 1'); $rc == 0 });
}

# At most one of each even before all is settled, and in the end what is expected
sub settled
{
	my ($like, $name) = @_;
	my ($expected, @diff);

	alive();
	$t->sync or diag("$name: not relayed");
	$expected = expected($like);
	poll_until(sub { @diff = multiset_diff(have($like), $expected); @diff == 0 }, 20);
	ok(@diff == 0, $name) or diag("missing (-) or too many (+): @diff\n"
		  . $t->sql("SELECT payload, said FROM removed WHERE starts_with(payload, '$like')") . "\n"
		  . $t->sql('SELECT queue, shard, state, last_error FROM dq_stats'));
	return @diff == 0;
}

# ---- what is done at a point ---------------------------------------------------

my %act = (
	kill => sub { my ($pid) = @_; kill 'KILL', $pid; },
	term => sub { my ($pid) = @_; kill 'TERM', $pid; },
	cancel => sub { my ($pid) = @_; kill 'INT', $pid; },
	postgres => sub { $t->node->stop('immediate'); $t->node->start; },
	redis => sub { $r->kill9; $r->start; },
	outage => sub {
		my ($pid, $point) = @_;
		$r->kill9;
		$points->release($point);
		# long enough that it is noticed, or that the waiting time is over
		$session->receive(0.3);
		$r->start;
	},
	drop => sub { $proxy->mode_now('refuse'); $proxy->mode_now('pass'); },
	after => sub { my ($pid, $point) = @_; cut('cut 1 once', $point); },
	before => sub { my ($pid, $point) = @_; cut('before 1 once', $point); },
);

# The next script is executed and never answered, or never executed
sub cut
{
	my ($mode, $point) = @_;
	my $cuts = $proxy->cuts;

	$proxy->mode_now($mode);
	$points->release($point);
	poll_until(sub { $proxy->cuts > $cuts }, 5) or diag("$point: nothing to cut");
	$proxy->mode_now('pass');
}

# ---- who comes to a point, and how ---------------------------------------------

# What is offered: soon due, later, and for each of the following transactions
sub first
{
	my ($n) = @_;

	return "BEGIN; SELECT offer('q', '$n-a', '0'), offer('q', '$n-b', '1 hour'), "
	  . "offer('q', '$n-c1', '1 hour', '$n-c'), offer('q', '$n-d', '1 hour', '$n-d'), "
	  . "offer('q', '$n-e', '1 hour', '$n-e'), offer('q', '$n-f', '1 hour'), "
	  . "offer('q', '$n-g', '1 hour', '$n-g'); COMMIT";
}

# replaced, removed, moved, and a savepoint that takes it back
sub second
{
	my ($n) = @_;

	return "BEGIN; SELECT offer('q', '$n-c2', '1 hour', '$n-c'); SELECT remove('q', '$n-d', '$n-d'); "
	  . "SELECT move('q', '$n-e', '2 hours'); SAVEPOINT s; SELECT remove('q', '$n-f', '$n-f'); "
	  . "ROLLBACK TO s; COMMIT";
}

sub third { my ($n) = @_; return "BEGIN; SELECT remove('q', '$n-b', '$n-b'); ROLLBACK"; }

sub fourth
{
	my ($n) = @_;

	return "BEGIN; SELECT offer('q', '$n-p', '0'); SELECT remove('q', '$n-g', '$n-g'); PREPARE TRANSACTION '$n'";
}

my @all = (\&first, \&second, \&third, \&fourth);
my $other;

my %come = (
	# armed before anything is offered
	offer => sub {
		my ($n, $point) = @_;
		$points->arm($point);
		$session->send($_->($n)) for @all;
	},
	remove => sub {
		my ($n, $point) = @_;
		$session->run(first($n));
		$t->sync;
		$points->arm($point);
		$session->send($_->($n)) for @all[ 1 .. 3 ];
	},
	# what a rollback has left behind is put back
	restore => sub {
		my ($n, $point) = @_;
		$session->run(first($n));
		$t->sync;
		$points->arm($point);
		$session->send($_->($n)) for @all[ 2, 1, 3 ];
	},
	# somebody else holds the task
	wait => sub {
		my ($n, $point) = @_;
		$session->run(first($n));
		$t->sync;
		$other = $t->session;
		$other->run("BEGIN; SELECT remove('q', '$n-d', '$n-d')");
		$points->arm($point);
		$session->send($_->($n)) for @all[ 1 .. 3 ];
		return if $point ne 'hold.waited';
		poll_until(sub { $t->sql("SELECT wait_event_type FROM pg_stat_activity WHERE pid = $backend") eq 'Lock' });
		finish_other($n);
	},
	# a worker comes to the shard and finds something. After a restart: one that is
	# ended again and again is not started at once
	enter => sub {
		my ($n, $point) = @_;
		$session->run($all[0]->($n));
		$t->node->stop('fast');
		$points->arm($point);
		$t->node->start;
		connect_anew();
		$session->send($_->($n)) for @all[ 1 .. 3 ];
	},
	# recorded without an answer, and looked up when Redis is there again
	resolve => sub {
		my ($n, $point) = @_;
		$session->run("SELECT offer('q4', '$n-x' || i, '1 hour') FROM generate_series(1, 4) i");
		$t->sync;
		$r->freeze;
		$session->run("SELECT remove('q4', '$n-x3', '$n-x3')");
		$points->arm($point);
		$r->thaw;
	},
	# due tasks are taken from the ready list, given back, and taken
	poll => sub {
		my ($n, $point) = @_;
		$session->run("SELECT offer('q', '$n-h' || i, '0') FROM generate_series(1, 4) i");
		poll_until(sub { (grep { index($_, "$n-h") == 0 } $r->ready('q')) == 4 });
		$points->arm($point);
		$session->send("BEGIN; SAVEPOINT s; SELECT take('q', 2); ROLLBACK TO s; SELECT take('q', 2); COMMIT");
		$session->send("BEGIN; SELECT take('q', 1); ROLLBACK");
		$session->send($_->($n)) for @all;
	},
	# one waits for a task
	arrival => sub {
		my ($n, $point) = @_;
		$session->run("SELECT take('q4', 1000)");
		$points->arm($point);
		$session->send("SELECT take('q4', 1, '5 s')");
		$t->sql("SELECT offer('q4', '$n-w', '100 ms')");
	},
	# a backend relays by itself
	hand => sub {
		my ($n, $point) = @_;
		$t->sql('SELECT dq_worker_stop()');
		poll_until(sub { $t->sql("SELECT count(*) FROM dq_workers WHERE role = 'bridge' AND pid > 0") == 0 });
		$session->run(first($n));
		$points->arm($point);
		$session->send("SELECT dq_sync('q', '5 s'), dq_transfer('q')");
		$session->send($_->($n)) for @all[ 1 .. 3 ];
	},
);

# Who held it ends: one way or the other
sub finish_other
{
	my ($n) = @_;

	return unless $other;
	$other->run($n =~ /[02468]$/ ? 'COMMIT' : 'ROLLBACK', 30);
	$other->quit;
	$other = undef;
}

my @send = qw(after before);
my @worker = qw(kill term cancel postgres redis outage drop);
my @backend = qw(kill term cancel postgres redis outage drop);

# point, how to come there, what may happen there
my @plan = (
	[ 'offer.begin', 'offer', @backend ],
	[ 'offer.numbered', 'offer', @backend ],
	[ 'offer.recorded', 'offer', @backend ],
	[ 'commit.begin', 'offer', @backend ],
	[ 'commit.done', 'offer', @backend ],
	[ 'hold.send', 'remove', @backend, @send ],
	[ 'hold.received', 'remove', @backend ],
	[ 'take.answered', 'remove', @backend ],
	[ 'remove.recorded', 'remove', @backend ],
	[ 'reschedule.taken', 'remove', @backend ],
	[ 'commit.begin', 'remove', @backend ],
	[ 'commit.done', 'remove', @backend ],
	[ 'hold.wait', 'wait', @backend ],
	[ 'hold.waited', 'wait', @backend ],
	[ 'poll.looked', 'poll', @backend ],
	[ 'poll.send', 'poll', @backend, @send ],
	[ 'poll.received', 'poll', @backend ],
	[ 'poll.recorded', 'poll', @backend ],
	[ 'poll.wait', 'arrival', @backend ],
	[ 'restore.send', 'poll', @worker, @send ],
	[ 'restore.send', 'restore', @worker, @send ],
	[ 'restore.received', 'restore', @worker ],
	[ 'relay.snapshot', 'offer', @worker ],
	[ 'relay.flush', 'offer', @worker ],
	[ 'relay.flushed', 'offer', @worker ],
	[ 'relay.page.send', 'offer', @worker, @send ],
	[ 'relay.page.sent', 'offer', @worker ],
	[ 'relay.page.received', 'offer', @worker ],
	[ 'relay.batch.done', 'offer', @worker ],
	[ 'transfer.send', 'offer', @worker, @send ],
	[ 'transfer.sent', 'offer', @worker ],
	[ 'transfer.received', 'offer', @worker ],
	[ 'enter.looked', 'enter', @worker, @send ],
	[ 'enter.send', 'enter', @worker, @send ],
	[ 'enter.sent', 'enter', @worker ],
	[ 'enter.received', 'enter', @worker ],
	[ 'thaw.blockers', 'enter', @worker, @send ],
	[ 'thaw.send', 'enter', @worker, @send ],
	[ 'thaw.sent', 'enter', @worker ],
	[ 'thaw.received', 'enter', @worker ],
	[ 'mark.store', 'enter', @worker ],
	[ 'resolve.looked', 'resolve', @worker ],
	[ 'resolve.record', 'resolve', @worker ],
	[ 'resolve.recorded', 'resolve', @worker ],
	[ 'relay.page.send', 'hand', @backend, @send ],
	[ 'relay.page.sent', 'hand', @backend ],
	[ 'relay.page.received', 'hand', @backend ],
	[ 'thaw.sent', 'hand', @backend ],
	[ 'hand.transfer.send', 'hand', @backend, @send ],
	[ 'hand.transfer.received', 'hand', @backend ],
);

my %planned = map { $_->[0] => 1 } @plan;
is(join(' ', grep { !$planned{$_} } $points->names), '', 'every point of the sources is visited');

# ---- the visits ------------------------------------------------------------------

my $visits = 0;
my $missed = 0;

sub visit
{
	my ($point, $come, $act) = @_;
	my $n = 'v' . ++$visits;
	my $name = "$point ($come): $act";
	my $start = time();

	$come{$come}->($n, $point);
	my $pid = $points->reached($point);
	if ($pid)
	{
		$act{$act}->($pid, $point);
	}
	else
	{
		$missed++;
		diag("$name: nobody came");
	}
	$points->release($point);
	alive();
	finish_other($n);
	# what the session was about to do ends, well or not
	while (@{ $session->{waiting} || [] } && !$session->{dead}) { $session->receive(30); }
	connect_anew();
	if ($t->sql("SELECT count(*) FROM pg_prepared_xacts WHERE gid = '$n'"))
	{
		$t->sql(($n =~ /[02468]$/ ? 'COMMIT' : 'ROLLBACK') . " PREPARED '$n'");
	}
	$session->run('SELECT dq_worker_start()') if $come eq 'hand';
	settled("$n-", $name);
	note(sprintf '%.2f s %s', time() - $start, $name);
}

connect_anew();
$t->sync;
my @only = split /,/, $ENV{DQ_ONLY} || '';
my $turn = 0;
for my $p (@plan)
{
	my ($point, $come, @acts) = @$p;

	next if @only && !grep { index($point, $_) == 0 } @only;
	# in short runs one or two each, not the same ones everywhere
	my $take = long_run() || @only ? @acts : @acts > 7 ? 2 : 1;
	for (1 .. $take)
	{
		visit($point, $come, $acts[ $turn++ % @acts ]);
	}
	$turn++ if @acts == 9;
}
is($missed, 0, 'every point was come to');

# everything together, once more
settled('v', 'all visits together') unless @only;
my $log = $t->log_text;
ok($log !~ /PANIC:|TRAP:|signal 11|signal 6\b/, 'nothing but our own kill -9 ended a process');
$session->quit;
$t->finish(crashes => 1);
