# At every step of offer, commit, hold, wait, restore, poll, relay, coming to a shard,
# healing and transfer a process is made to wait, and there the process, PostgreSQL or
# Redis is killed, Redis loses its data, or the connection is cut, before or after
# Redis has executed. After each visit the books: offered = pending + delivered +
# removed, each once.
# A10 A12 D11 E2 F2 F6 F15; G1 G2 G3 G4 G5 G7 G11; PO 1 to 12, 15a, 17
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
$t->queue('q0', "transactional 'off'");
$t->queue('qt');
$t->sql(<<'SQL');
CREATE TABLE offered (no serial, queue text, payload text, key text);
CREATE TABLE removed (payload text, said boolean);
CREATE TABLE polled (payload text);
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

# Taken from the list as a consumer does, before Redis loses its data
my @archived;

sub archive
{
	return unless $r->cmd('EXISTS', 'q');
	$r->cmd('RENAME', 'q', 'taken');
	push @archived, @{ $r->cmd('LRANGE', 'taken', 0, -1) };
	$r->cmd('DEL', 'taken');
}

sub have
{
	my ($like) = @_;	# beginning of the payloads
	my @all;

	for my $name ('q', 'qt', map { "q4#$_" } 0 .. 3)
	{
		push @all, $r->ready($name), $t->pending($name);
	}
	push @all, @archived, split /\n/, $t->sql('SELECT payload FROM polled');
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

# What consumers had taken when Redis lost its data. Nothing of a list's past is known
# behind its first unread element, and an older state brings the list's content back, so
# it may come again (G3): in the end, where all losses come together, it is let off.
my %taken;

sub remember_taken
{
	$taken{$_} = 1 for @archived, split /\n/, $t->sql('SELECT payload FROM polled');
}

# At most one of each even before all is settled, and in the end what is expected
sub settled
{
	my ($like, $name, $after_losses) = @_;
	my ($expected, @diff);

	alive();
	$t->sync or diag("$name: not relayed");
	$expected = expected($like);
	poll_until(sub {
		@diff = grep { !($after_losses && /^\+(.*)/ && $taken{$1}) } multiset_diff(have($like), $expected);
		@diff == 0
	}, 20);
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
	flush => sub { remember_taken(); $r->cmd('FLUSHALL'); },
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
	  . "offer('q', '$n-g', '1 hour', '$n-g'), offer('q', '$n-o', '1 hour', '$n-o'); COMMIT";
}

# replaced, removed, moved, and a savepoint that takes it back
sub second
{
	my ($n) = @_;

	return "BEGIN; SELECT offer('q', '$n-c2', '1 hour', '$n-c'); SELECT remove('q', '$n-d', '$n-d'); "
	  . ($ENV{DQ_NO_MOVES} ? '' : "SELECT move('q', '$n-e', '2 hours'); ") . "SAVEPOINT s; SELECT remove('q', '$n-f', '$n-f'); "
	  . "ROLLBACK TO s; COMMIT";
}

sub third { my ($n) = @_; return "BEGIN; SELECT remove('q', '$n-b', '$n-b'); ROLLBACK"; }

sub fourth
{
	my ($n) = @_;

	return "BEGIN; SELECT offer('q', '$n-p', '0'); SELECT remove('q', '$n-g', '$n-g'); PREPARE TRANSACTION '$n'";
}

# due tasks taken, and given back
sub fifth { return "BEGIN; INSERT INTO polled SELECT dq_poll('q', 2, '500 ms'); COMMIT"; }
sub sixth { return "BEGIN; SELECT dq_poll('q', 2, '500 ms'); ROLLBACK"; }

# What was taken in the last second may come again after Redis has lost it (G3): no
# polls in visits with a loss
my $loss = 0;
my $other;

sub rest
{
	my ($n, @first) = @_;
	my @rest = (\&second, \&third, \&fourth);

	push @rest, \&fifth, \&sixth unless $loss;
	for my $f (reverse @first)
	{
		@rest = ($f, grep { $_ != $f } @rest);
	}
	$session->send($_->($n)) for @rest;
}

my %come = (
	# armed before anything is offered
	offer => sub {
		my ($n, $point) = @_;
		$points->arm($point);
		rest($n, \&first);
	},
	remove => sub {
		my ($n, $point) = @_;
		$session->run(first($n));
		$t->sync;
		$points->arm($point);
		rest($n);
	},
	# several by one statement
	take => sub {
		my ($n, $point) = @_;
		$session->run(first($n));
		$t->sync;
		$points->arm($point);
		$session->send("BEGIN; WITH d AS (DELETE FROM q WHERE payload IN ('$n-b', '$n-d', '$n-f') RETURNING payload) "
			  . "INSERT INTO removed SELECT payload, true FROM d; COMMIT");
		rest($n);
	},
	# all of a queue
	truncate => sub {
		my ($n, $point) = @_;
		$session->run("SELECT offer('qt', '$n-x' || i, '1 hour', CASE i WHEN 2 THEN '$n-x' END) FROM generate_series(1, 3) i");
		$t->sync;
		$points->arm($point);
		$session->send("BEGIN; INSERT INTO removed SELECT payload, true FROM offered WHERE queue = 'qt'; TRUNCATE qt; "
			  . "SELECT offer('qt', '$n-y', '1 hour', '$n-x'); COMMIT");
	},
	# in no transaction
	call => sub {
		my ($n, $point) = @_;
		$points->arm($point);
		$session->send("SELECT dq_offer('q0', '$n-z', '1 hour', '$n-z')");
		rest($n, \&first);
	},
	# what a rollback has left behind is put back
	restore => sub {
		my ($n, $point) = @_;
		$session->run(first($n));
		$t->sync;
		$points->arm($point);
		rest($n, \&third);
	},
	# of what was polled as well
	unpoll => sub {
		my ($n, $point) = @_;
		$session->run(first($n));
		$t->sync;
		$points->arm($point);
		rest($n, \&sixth);
	},
	poll => sub {
		my ($n, $point) = @_;
		$session->run(first($n));
		$t->sync;
		$points->arm($point);
		rest($n, \&fifth);
	},
	# somebody else holds the task
	wait => sub {
		my ($n, $point) = @_;
		$session->run(first($n));
		$t->sync;
		$other = $t->session;
		$other->run("BEGIN; SELECT remove('q', '$n-d', '$n-d')");
		$points->arm($point);
		rest($n);
		return if $point ne 'hold.waited';
		poll_until(sub { $t->sql("SELECT wait_event_type FROM pg_stat_activity WHERE pid = $backend") eq 'Lock' });
		finish_other($n);
	},
	# a worker comes to the shard and finds something. After a restart: one that is
	# ended again and again is not started at once
	enter => sub {
		my ($n, $point) = @_;
		$session->run(first($n));
		$t->node->stop('fast');
		$points->arm($point);
		$t->node->start;
		connect_anew();
		rest($n);
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
	# the same, and some of the tasks lie in other shards than their removals
	elsewhere => sub {
		my ($n, $point) = @_;
		$session->run("SELECT offer('q4', '$n-x' || i, '1 hour') FROM generate_series(1, 8) i");
		$t->sync;
		$r->freeze;
		$session->run("SELECT remove('q4', '$n-x' || i, '$n-x' || i) FROM generate_series(1, 6) i");
		$points->arm($point);
		$r->thaw;
	},
	# Redis loses all, or goes back to an older state, while a transaction is open that
	# was told true
	flushed => sub { lose(@_, sub { $r->cmd('FLUSHALL') }); },
	older => sub {
		my $old;
		lose(@_, sub { $r->restore_state($old); }, sub { $old = $r->save_state; });
	},
	# one waits for a due task
	arrival => sub {
		my ($n, $point) = @_;
		$session->run("INSERT INTO polled SELECT dq_poll('q4', 1000)");
		$points->arm($point);
		$session->send("INSERT INTO polled SELECT dq_poll('q4', 1, '5 s')");
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
		rest($n);
	},
);

# What was delivered is known to be so, some lies unread, some was removed
sub lose
{
	my ($n, $point, $act, $before) = @_;
	my $due;

	$before->() if $before;
	$session->run(first($n));
	$due = now_ms();
	$t->sync;
	poll_until(sub { grep { $_ eq "$n-a" } $r->ready('q') }, 20);
	archive();
	poll_until(sub {
		$t->sql("SELECT coalesce(max(due), 0) FROM dq_marks m JOIN dq_shards s ON s.no = m.shard "
			  . "WHERE s.name = 'q' AND settled <> ''") >= $due
	}, 20) or diag("$n: no mark");
	# its commit is asynchronous; this one is not
	$session->run("SELECT offer('q', '$n-u', '0')");
	$t->sync;
	$other = $t->session;
	$other->run("BEGIN; SELECT remove('q', '$n-o', '$n-o')");
	$session->run(second($n));
	poll_until(sub { grep { $_ eq "$n-u" } $r->ready('q') }, 20);
	$points->arm($point);
	remember_taken();
	$act->();
	rest($n, \&third);
	# the shard is not thawed before it ends
	finish_other($n) if $point =~ /^thaw\.(?:send|sent|received)$/;
}

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
my @worker = qw(kill term cancel postgres redis outage drop flush);
my @backend = qw(kill term cancel postgres redis outage drop flush);

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
	[ 'take.send', 'take', @backend, @send ],
	[ 'take.received', 'take', @backend ],
	[ 'call.send', 'call', @backend, @send ],
	[ 'call.received', 'call', @backend ],
	[ 'hold.wait', 'wait', @backend ],
	[ 'hold.waited', 'wait', @backend ],
	[ 'restore.send', 'restore', @worker, @send ],
	[ 'restore.received', 'restore', @worker ],
	[ 'poll.wait', 'arrival', @backend ],
	[ 'poll.looked', 'arrival', @backend ],
	[ 'poll.send', 'poll', @backend, @send ],
	[ 'poll.received', 'poll', @backend ],
	[ 'poll.recorded', 'poll', @backend ],
	[ 'restore.send', 'unpoll', @worker, @send ],
	[ 'restore.received', 'unpoll', @worker ],
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
	[ 'enter.send', 'flushed', @worker, @send ],
	[ 'enter.sent', 'flushed', @worker ],
	[ 'relay.page.sent', 'flushed', @worker ],
	[ 'sweep.send', 'flushed', @worker, @send ],
	[ 'sweep.sent', 'flushed', @worker ],
	[ 'sweep.received', 'flushed', @worker ],
	[ 'thaw.blockers', 'flushed', @worker, @send ],
	[ 'thaw.send', 'flushed', @worker, @send ],
	[ 'thaw.received', 'flushed', @worker ],
	[ 'enter.received', 'older', @worker ],
	[ 'sweep.send', 'older', @worker, @send ],
	[ 'sweep.received', 'older', @worker ],
	[ 'thaw.blockers', 'older', @worker, @send ],
	[ 'thaw.sent', 'older', @worker ],
	[ 'resolve.looked', 'resolve', @worker ],
	[ 'resolve.record', 'resolve', @worker ],
	[ 'resolve.recorded', 'resolve', @worker ],
	[ 'resolve.send', 'elsewhere', @worker, @send ],
	[ 'resolve.sent', 'elsewhere', @worker ],
	[ 'relay.page.send', 'hand', @backend, @send ],
	[ 'relay.page.sent', 'hand', @backend ],
	[ 'relay.page.received', 'hand', @backend ],
	[ 'thaw.sent', 'hand', @backend ],
	[ 'hand.transfer.send', 'hand', @backend, @send ],
	[ 'hand.transfer.received', 'hand', @backend ],
	[ 'take.send', 'truncate', @backend, @send ],
	[ 'truncate.page', 'truncate', @backend ],
	[ 'relay.page.send', 'truncate', @worker, @send ],
);

my %planned = map { $_->[0] => 1 } @plan;
# those of a sink's executor: t/073
is(join(' ', grep { !$planned{$_} && !/^deliver\./ } $points->names), '', 'every point of the sources is visited');

# DQ_ONLY=hold,older: only points that begin so, or that are come to in that way
# ---- the visits ------------------------------------------------------------------

my $visits = 0;
my @missed;

sub visit
{
	my ($point, $come, $act) = @_;
	my $n = 'v' . ++$visits;
	my $name = "$point ($come): $act";
	my $start = time();

	$loss = $act eq 'flush' || $come =~ /^(?:flushed|older)$/;
	$come{$come}->($n, $point);
	my $pid = $points->reached($point);
	if ($pid)
	{
		$act{$act}->($pid, $point);
	}
	else
	{
		push @missed, $name;
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
	# what was taken in the last second before a loss may come again (G3)
	my $polls = $loss && $come =~ /poll$/;
	remember_taken() if $polls;
	settled("$n-", $name, $polls);
	if ($come eq 'call')
	{
		my $there = grep { $_ eq "$n-z" } $r->ready('q0'), $t->pending('q0');
		ok($there <= 1, "$name: done at most once");
	}
	note(sprintf '%.2f s %s', time() - $start, $name);
}

connect_anew();
$t->sync;
my @only = split /,/, $ENV{DQ_ONLY} || '';
my $turn = 0;
for my $p (@plan)
{
	my ($point, $come, @acts) = @$p;

	next if @only && !grep { index($point, $_) == 0 || $come eq $_ } @only;
	# in short runs one or two each, not the same ones everywhere
	my $take = long_run() || @only ? @acts : @acts > 7 ? 2 : 1;
	for (1 .. $take)
	{
		visit($point, $come, $acts[ $turn++ % @acts ]);
	}
	# the lists are of even length: move on by one
	$turn++;
}
# a poll that finds a task which the visit before left does not wait, so nobody comes
is(join(', ', grep { !/\(arrival\)/ } @missed), '', 'every point was come to');
cmp_ok(scalar @missed, '<=', 1, '... and of the waiting polls all but one');

# everything together, once more
settled('v', 'all visits together', 1) unless @only;
my $log = $t->log_text;
ok($log !~ /PANIC:|TRAP:|signal 11|signal 6\b/, 'nothing but our own kill -9 ended a process');
$session->quit;
$t->finish(crashes => 1);
