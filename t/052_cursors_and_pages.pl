# A queue is live, and still no task is seen twice or missing because others come and go:
# cursors forwards and backwards, two in turn, held ones, pages while tasks are offered and
# removed and while the relay brings what the scan has shown from the outbox. H1 H5 H6 H7 I2
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

my $t = DqTest->new;
my $r = $t->redis;

sub enable
{
	my ($on) = @_;

	$t->sql('ALTER SYSTEM SET dq_bridge.enabled = ' . ($on ? 'on' : 'off'));
	$t->sql('SELECT pg_reload_conf()');
	poll_until(sub { ($t->sql("SELECT count(*) FROM dq_workers WHERE role = 'bridge' AND pid > 0") > 0) == ($on ? 1 : 0) })
	  or diag('the bridge did not ' . ($on ? 'come' : 'go'));
}

$t->queue('q');
$t->queue('s', "shards '3'");
for my $q (qw(q s))
{
	$t->sql("SELECT count(dq_offer_at('$q', i::text, timestamptz '2100-01-01 00:00Z' + i / 2 * interval '1 s', 'k' || i)) FROM generate_series(1, 5000) i");
}
ok($t->sync, '5,000 tasks in each of two queues');

# ---- cursors ---------------------------------------------------------------------------------

my $s = $t->session;
my $other = $t->session;

sub rows { return join ',', split /\n/, $s->run(@_); }

$s->run('BEGIN; DECLARE c SCROLL CURSOR FOR SELECT payload FROM q ORDER BY due_at, id');
is(rows('FETCH 3 FROM c'), '1,2,3', 'H6 a scroll cursor, forwards');
is(rows('FETCH BACKWARD 2 FROM c'), '2,1', 'H6 backwards');
is(rows('FETCH ABSOLUTE 4321 FROM c'), '4321', 'H6 to a place many pages on');
is(rows('FETCH RELATIVE -4000 FROM c'), '321', 'H6 and back over page borders');
is(rows('FETCH LAST FROM c; FETCH PRIOR FROM c; FETCH FIRST FROM c'), '5000,4999,1', 'H6 last, prior, first');
$s->run('MOVE LAST IN c');
is(join(',', reverse split /,/, rows('FETCH BACKWARD ALL FROM c')), join(',', 1 .. 4999), 'H6 all of it backwards');
$s->run('COMMIT');
$s->run('BEGIN; DECLARE c NO SCROLL CURSOR FOR SELECT payload FROM q ORDER BY due_at');
$s->run('FETCH 2 FROM c');
like($s->run('FETCH BACKWARD 1 FROM c'), qr/55000.*only scan forward/, 'H6 a cursor that may not scroll says so');
$s->run('ROLLBACK');
$s->run('BEGIN; DECLARE c SCROLL CURSOR FOR SELECT payload FROM s ORDER BY due_at DESC');
my $down = rows('FETCH 2500 FROM c');
is(join(',', reverse split /,/, rows('FETCH BACKWARD ALL FROM c')), $down =~ s/,\d+$//r, 'H6 backwards over merged shards');
$s->run('COMMIT');

# a cursor that outlives its transaction needs nothing any more
$s->run('BEGIN; DECLARE held CURSOR WITH HOLD FOR SELECT payload FROM q ORDER BY due_at, id; FETCH 10 FROM held; COMMIT');
$r->freeze;
is(rows('FETCH 2 FROM held'), '11,12', 'H6 a held cursor, Redis stopped');
$r->thaw;
$s->run('CLOSE held');

# two in turn on one connection, of the same queue and of another, each with own parameters
$s->run('BEGIN; DECLARE a CURSOR FOR SELECT payload::int FROM q WHERE due_at >= timestamptz \'2100-01-01 00:00Z\'');
$s->run("DECLARE b CURSOR FOR SELECT payload::int FROM q WHERE due_at >= timestamptz '2100-01-01 00:10Z' ORDER BY due_at DESC");
$s->run('DECLARE c CURSOR FOR SELECT payload::int FROM s');
my %got = (a => [], b => [], c => []);
for my $n (1 .. 60)
{
	for my $c (qw(a b c))
	{
		push @{ $got{$c} }, split /\n/, $s->run('FETCH ' . (30 + 7 * $n % 100) . " FROM $c");
	}
}
push @{ $got{$_} }, split /\n/, $s->run("FETCH ALL FROM $_") for qw(a b c);
$s->run('COMMIT');
is_books("H5 $_->[0] read in turn with others, each task once", $_->[1], $got{ $_->[0] })
  for [ 'a', [ 1 .. 5000 ] ], [ 'b', [ 1200 .. 5000 ] ], [ 'c', [ 1 .. 5000 ] ];

# an error in one leaves the others alone
$s->run('BEGIN; DECLARE a CURSOR FOR SELECT payload::int FROM q; SAVEPOINT x');
@{ $got{a} } = split /\n/, $s->run('FETCH 700 FROM a');
like($s->run('SELECT 1 / (payload::int - 1500) FROM s'), qr/22012/, 'an error in the middle of another scan');
$s->run('ROLLBACK TO x');
push @{ $got{a} }, split /\n/, $s->run('FETCH ALL FROM a');
$s->run('COMMIT');
is_books('H5 the cursor goes on after the error, each task once', [ 1 .. 5000 ], $got{a});

# ---- others come and go while pages are read ---------------------------------------------

# Tasks that stay are 'stay...'; what comes and goes lies before, among and behind them.
for my $case ([ 'q', '' ], [ 'q', 'ORDER BY due_at' ], [ 'q', 'ORDER BY due_at DESC' ], [ 's', '' ], [ 's', 'ORDER BY due_at' ])
{
	my ($q, $order) = @$case;
	my (%seen, @stay);

	$s->run("BEGIN; DECLARE c CURSOR FOR SELECT payload FROM $q $order");
	for my $round (1 .. 12)
	{
		push @stay, split /\n/, $s->run('FETCH 350 FROM c');
		# away goes what moves, in front of the cursor and behind it; new ones come everywhere
		$other->run("SELECT count(dq_offer_at('$q', 'new', timestamptz '2100-01-01 00:00Z' + (i * 7919 % 2500) * interval '1 s')) FROM generate_series(1, 200) i");
		$other->run("DELETE FROM $q WHERE payload = 'new' AND due_at < timestamptz '2100-01-01 00:00Z' + " . (100 * $round) . " * interval '1 s'") if $round % 3 == 0;
		$other->run("SELECT count(dq_reschedule_at('$q', 'k' || i, '2100-01-03 00:00Z')) FROM generate_series(1, 5000, 250) i") if $round == 5;
		$t->sync if $round % 4 == 0;
	}
	push @stay, split /\n/, $s->run('FETCH ALL FROM c');
	$s->run('COMMIT');
	# those that moved in the meantime may be seen at both of their instants, or at none
	my %moved = map { ($_ => 1) } grep { $_ % 250 == 1 } 1 .. 5000;
	is_books("H1 a scan of $q" . ($order ? ", $order," : '') . ' sees each task that stays once',
		[ grep { !$moved{$_} } 1 .. 5000 ], [ grep { /^\d+$/ && !$moved{$_} } @stay ]);
	$other->run("DELETE FROM $q WHERE payload = 'new'");
	$other->run("UPDATE $q SET due_at = timestamptz '2100-01-01 00:00Z' + payload::int / 2 * interval '1 s' WHERE due_at >= '2100-01-03 00:00Z'");
	ok($t->sync, '... and all is as it was');
}

# ---- what the scan shows from the outbox reaches Redis while it goes on -----------------------

for my $case ([ 'q', '' ], [ 'q', 'ORDER BY due_at' ], [ 's', '' ], [ 's', 'ORDER BY due_at DESC' ])
{
	my ($q, $order) = @$case;

	enable(0);
	$other->run("SELECT count(dq_offer_at('$q', (5000 + i)::text, timestamptz '2100-01-01 00:00Z' + i / 2 * interval '1 s')) FROM generate_series(1, 2000) i");
	# replaced under its key, moved: still each once
	$other->run("SELECT count(dq_offer_at('$q', i::text, timestamptz '2100-01-01 00:20Z', 'k' || i)) FROM generate_series(1, 5000, 50) i");
	my @expected = 1 .. 7001;
	$s->run("BEGIN; SELECT dq_offer_at('$q', '7001', timestamptz '2100-01-01 00:30Z')");
	$s->run("SELECT count(dq_offer_at('$q', i::text, timestamptz '2100-01-01 00:05Z', 'k' || i)) FROM generate_series(2, 5000, 50) i");
	$s->run("DECLARE c CURSOR FOR SELECT payload FROM $q $order");
	my @seen = split /\n/, $s->run('FETCH 1500 FROM c');
	enable(1);
	ok($t->sync, 'the relay has passed in the middle of the scan');
	push @seen, split /\n/, $s->run('FETCH ALL FROM c');
	is($s->run("SELECT count(*), count(DISTINCT payload) FROM $q"), '7001|7001', "... own ones counted, $q");
	is_books("I2 $q" . ($order ? ", $order," : '') . ' what is on its way, replaced, own: each once', \@expected, \@seen);
	$s->run('ROLLBACK');
	is($s->run("SELECT count(*), count(DISTINCT payload), sum(payload::int) FROM $q"), '7000|7000|' . 7000 * 7001 / 2, '... and after a rollback');
	# removed and not yet relayed
	enable(0);
	$s->run('BEGIN');
	is($s->run("WITH gone AS (DELETE FROM $q WHERE payload::int > 5500 RETURNING 1) SELECT count(*) FROM gone"), '1500', 'own removals');
	$s->run("DECLARE c CURSOR FOR SELECT payload FROM $q $order");
	@seen = split /\n/, $s->run('FETCH 1000 FROM c');
	enable(1);
	push @seen, split /\n/, $s->run('FETCH ALL FROM c');
	is_books('I2 own removals are not shown', [ 1 .. 5500 ], \@seen);
	is($other->run("SELECT count(*) FROM $q"), '7000', 'I2 others still see them');
	is($s->run("COMMIT; SELECT count(*), max(payload::int) FROM $q"), '5500|5500', 'I2 after the commit, relayed or not');
	ok($t->sync, 'relayed');
	is($other->run("SELECT count(*), max(payload::int) FROM $q"), '5500|5500', 'I2 the same from Redis');
	$other->run("DELETE FROM $q WHERE payload::int > 5000");
	$other->run("UPDATE $q SET due_at = timestamptz '2100-01-01 00:00Z' + payload::int / 2 * interval '1 s'");
	$t->sync;
}

# ---- parameters that change -------------------------------------------------------------------

# a plan is made once; now() is that of each execution
$s->run('SET plan_cache_mode = force_generic_plan; DEALLOCATE ALL');
$s->run("PREPARE near AS SELECT count(*) FROM q WHERE due_at < now() + interval '1 hour'");
is($s->run('EXECUTE near'), '0', 'H6 nothing within the hour');
$s->run("SELECT dq_offer('q', 'near', '1 hour 1 second')");
is($s->run('EXECUTE near'), '0', 'H6 not yet');
ok(poll_until(sub { $s->run('EXECUTE near') eq '1' }, 20), 'H6 now() is asked at each execution of a generic plan');
$s->run("BEGIN");
is($s->run('EXECUTE near'), '1', 'in a transaction');
$s->run("SELECT dq_offer('q', 'near', '1 hour 1 second')");
sleep(1.5);
is($s->run('EXECUTE near'), '1', 'H6 now() stands still in a transaction, as everywhere');
$s->run("COMMIT");
is($s->run("SELECT count(*) FROM q WHERE payload = 'near'; DELETE FROM q WHERE payload = 'near'"), '2', 'both are there');

# the inner side of a join is asked anew for each outer row, with pages of its own
$s->run('SET enable_hashjoin = off; SET enable_mergejoin = off; SET enable_material = off; SET enable_memoize = off');
is($s->run("SELECT string_agg(n || ':' || c, ' ' ORDER BY n) FROM (VALUES (0), (600), (2400), (2500), (-1)) v(n), "
	  . "LATERAL (SELECT count(payload) AS c FROM q WHERE due_at >= timestamptz '2100-01-01 00:00Z' + n * interval '1 s') x"),
	'-1:5000 0:5000 600:3801 2400:201 2500:1', 'H5 rescans with other bounds');
is($s->run("SELECT count(*), count(DISTINCT q.id) FROM generate_series(1, 5000, 500) i JOIN q ON q.key = 'k' || i"), '10|10', 'H4 keys of the outer side');
is($s->run("SELECT count(*) FROM s JOIN q USING (key) WHERE s.due_at < timestamptz '2100-01-01 00:00:30Z'"), '59', 'H4 two queues');
is($s->run("SELECT count(*) FROM generate_series(1, 3) i, LATERAL (SELECT id FROM s WHERE i > 0 ORDER BY due_at OFFSET 10 * i LIMIT 1200) x"),
	'3600', 'H5 a limit ends each of the scans');

$s->quit;
$other->quit;
$t->finish;
