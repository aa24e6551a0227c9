# Two databases feed one queue, one of them owns it. After a loss in Redis each makes
# good its own operations before anything is transferred; what the owner removed of the
# other's tasks stays removed; an owner does not wait for ever for a producer that is
# gone, and one that comes late is heard. G3 G4 G12; PO 7 15a, PROTOCOL 3.3
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

my $t = DqTest->new(extension => 0, redis => { config => { appendonly => 'no' } });
my $r = $t->redis;
my $fence = 'dq:{q}:fence';

$t->sql("CREATE DATABASE own");
$t->sql("CREATE DATABASE prod");
my %own = (db => 'own');
my %prod = (db => 'prod');
$t->extend('own');
$t->extend('prod');
$t->queue('q', undef, %own);
$t->sql("SELECT dq_offer('q', 'own ' || i, '1 hour', 'o' || i) FROM generate_series(1, 20) i", %own);
ok($t->sync(%own), 'the owner');
$t->queue('q', "role 'producer'", %prod);
$t->sql("SELECT dq_offer('q', 'prod ' || i, '1 hour', 'p' || i) FROM generate_series(1, 20) i", %prod);
ok($t->sync(%prod), 'and the producer');
ok($t->wait_state('q', 'running', %prod), 'a producer runs');

sub is_open { return ($r->cmd('HGET', $fence, 'open') || 'x') eq ($r->cmd('HGET', $fence, 'session') || 'y'); }
my $source = poll_until(sub {
	my %f = @{ $r->cmd('HGETALL', $fence) };
	my $owner = $r->cmd('HGET', 'dq:{q}:owner', 'source');
	my ($p) = grep { $_ ne $owner } map { /^ver:(.*)/ ? $1 : () } keys %f;
	return $p && $f{"healed:$p"} && $f{"healed:$p"} eq $f{session} ? $p : 0;
});
ok($source, 'it has reported for the session');
ok(poll_until(sub { ($r->cmd('HGET', $fence, "lease:$source") || 0) > now_ms() }), 'and has a lease');

# consumed, known on both sides
sub consume
{
	my ($n) = @_;

	ok(poll_until(sub { $r->cmd('LLEN', 'q') == $n }), "$n are delivered");
	$r->cmd('DEL', 'q');
	my $since = now_ms();
	for my $db ('own', 'prod')
	{
		ok(poll_until(sub { $t->sql("SELECT count(*) FROM dq_marks WHERE settled <> '' AND due >= $since", db => $db) > 0 }), "known in $db")
		  or diag($t->sql("SELECT string_agg(m::text, ' / ') FROM dq_marks m", db => $db));
	}
}

sub both
{
	my ($name, $n) = @_;

	$t->sql("SELECT count(dq_offer('q', '$name own ' || i)) FROM generate_series(1, $n) i", %own);
	$t->sql("SELECT count(dq_offer('q', '$name prod ' || i)) FROM generate_series(1, $n) i", %prod);
}

both('a', 50);
consume(100);
my @expected = ((map { "own $_" } 1 .. 20), map { "prod $_" } 1 .. 20);

sub books
{
	my ($name, $seconds) = @_;

	ok(poll_until(sub { is_open() && !multiset_diff([ $t->pending('q') ], \@expected) }, $seconds), "$name: it heals")
	  or diag(join ' ', multiset_diff([ $t->pending('q') ], \@expected));
	sleep(2.2);
	is_books("$name: pending", \@expected, [ $t->pending('q') ]);
	is(join(',', $r->ready('q')), '', "$name: nothing comes again");
}

for my $i (1 .. 4)
{
	$r->cmd('FLUSHALL');
	books("FLUSHALL $i");
}
is(poll_until(sub { $t->sql("SELECT replayed FROM dq_stats", %prod) >= 280 }), 1, 'the producer counts what it applied again');

# ---- a save from before -------------------------------------------------------------------
$t->sql("SELECT count(dq_offer('q', 'b own ' || i, '3 s')) FROM generate_series(1, 30) i", %own);
$t->sql("SELECT count(dq_offer('q', 'b prod ' || i, '3 s')) FROM generate_series(1, 30) i", %prod);
$t->sync(%own);
$t->sync(%prod);
my $save = $r->save_state;
consume(60);
# the owner removes of the producer's, before and after the save
is($t->sql("SELECT dq_remove('q', 'p1')", %own), 't', 'the owner removes a task of the producer');
$t->sql("SELECT dq_offer('q', 'prod late', '1 hour', 'late')", %prod);
$t->sync(%prod);
is($t->sql("SELECT dq_remove('q', 'late')", %own), 't', 'also one that the save does not know');
$t->sync(%own);
@expected = grep { $_ ne 'prod 1' } @expected;
$r->restore_state($save);
books('a save put back');
$r->restore_state($save);
books('and again');
for my $i (1 .. 3)
{
	$r->cmd('FLUSHALL');
	books("FLUSHALL after removals of the producer's tasks $i");
}
is($t->sql("SELECT count(*) FROM q WHERE key IN ('p1', 'late')", %own), 0, 'what was removed stays removed');

# ---- the producer is away ----------------------------------------------------------------------
both('c', 10);
consume(20);
$t->sql("SELECT dq_worker_stop()", %prod);
ok(poll_until(sub { $t->sql("SELECT count(*) FROM dq_workers WHERE role = 'bridge' AND pid > 0 AND database = 'prod'", %own) == 0 }), 'the producer is stopped');
my @all = @expected;
@expected = grep { /^own/ } @all;
$r->cmd('FLUSHALL');
my $start = time();
sleep(3);
ok(!is_open(), 'the owner waits for it');
ok(poll_until(sub { is_open() }, 30), 'not for ever');
cmp_ok(time() - $start, '<', 20, 'but as long as a lease');
like($t->log_text, qr/WARNING: .*a producer has not come/, 'and says so');
books('without the producer');
@expected = @all;
$t->sql("SELECT dq_worker_start()", %prod);
books('the producer comes late: it closes the shard until it is whole');

# ---- both workers are killed in between ----------------------------------------------------------
for my $db ('own', 'prod', 'own')
{
	$r->restore_state($save);
	my $pid = $t->bridge_pid(db => $db);
	kill 'KILL', $pid if $pid;
	ok(poll_until(sub { my ($rc) = $t->try('SELECT 1'); $rc == 0 }), 'up again');
	books("the worker of $db killed", 90);
}
# a restart of the owner alone is quick
my $pid = $t->bridge_pid(%own);
$start = time();
kill 'TERM', $pid;
ok(poll_until(sub { my $p = $t->bridge_pid(%own); $p && $p != $pid }), 'the owner is restarted');
$t->sql("SELECT dq_offer('q', 'quick')", %prod);
ok($r->cmd('BLPOP', 'q', 10), 'and open again');
cmp_ok(time() - $start, '<', 6, 'soon');
$t->finish(crashes => 1);
