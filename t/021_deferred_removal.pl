# A removal that was recorded without an answer takes one task, the one it named,
# before any later transfer. G4 G7; PO 17
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(sleep time);

my $t = DqTest->new;
my $r = $t->redis;

$t->queue('q');
$t->queue('q4', "shards '4'");
$t->queue('qi', "index 'off'");

sub count { my ($q) = @_; $t->sync; return $t->sql("SELECT count(*) FROM $q"); }

# one of eight equal ones, over four shards
$t->sql("SELECT count(dq_offer('q4', 'w', '1 hour')) FROM generate_series(1, 8)");
is(count('q4'), 8, 'eight equal tasks over four shards');
$r->freeze;
is($t->sql("SELECT dq_remove('q4', 'w') IS NULL"), 't', 'Redis silent: NULL');
$r->thaw;
ok(poll_until(sub { count('q4') == 7 }), 'one is taken');
$t->sync;
is(count('q4'), 7, '... and only one');

# what is offered after the removal was recorded is not meant
$r->freeze;
is($t->sql("SELECT dq_remove('q4', 'v') IS NULL"), 't', 'nothing of that name is pending: NULL all the same');
$t->sql("SELECT count(dq_offer('q4', 'v', '1 hour')) FROM generate_series(1, 8)");
$r->thaw;
is(count('q4'), 15, 'later offers of the same payload stay');

# by key, by id, and where there is no index
my $id = $t->sql("SELECT dq_offer('q', 'by id', '1 hour')");
$t->sql("SELECT dq_offer('q', 'by key', '1 hour', 'k'), dq_offer('qi', 'plain', '1 hour'), dq_offer('qi', 'stays', '1 hour')");
$t->sync;
$r->freeze;
is($t->sql("SELECT dq_remove('q', '$id') IS NULL, dq_remove('q', 'k') IS NULL, dq_remove('qi', 'plain') IS NULL"), 't|t|t', 'three more');
$r->thaw;
is(count('q'), 0, 'by id and by key: gone');
is(count('qi'), 1, 'without an index: one gone');

# overdue when Redis answers again: the removal comes first
$t->sql("SELECT dq_offer('q', 'overdue', '1500 ms', 'o')");
$t->sync;
$r->freeze;
is($t->sql("SELECT dq_remove('q', 'o') IS NULL"), 't', 'recorded before it is due');
my $past = now_ms() + 1600;
poll_until(sub { now_ms() > $past });
$r->thaw;
$t->sync;
is($r->cmd('LLEN', 'q'), 0, 'applied before any later transfer');
is(count('q'), 0, 'not pending either');

# an element that looks like an id no member can have
is($t->sql("SELECT dq_remove('q', '5-x' || repeat('00', 300))"), 'f', 'an impossible id names nothing');
$t->sql("SELECT dq_offer('q', 'on time', '0')");
ok(poll_until(sub { $r->cmd('LLEN', 'q') == 1 }), '... and stops nobody');


# two removals of equal payloads take two tasks, wherever they lie
$t->queue('two', "shards '4'");
$t->sql("SELECT count(dq_offer('two', 'w', '1 hour')) FROM generate_series(1, 8)");
is(count('two'), 8, 'eight equal tasks over four shards again');
$r->freeze;
is($t->sql("SELECT count(*) FROM generate_series(1, 5) WHERE dq_remove('two', 'w') IS NULL"), 5, 'five removals without an answer');
$r->thaw;
ok(poll_until(sub { count('two') == 3 }), 'F32 five are taken');

# recorded reschedules: by payload, and by id in whatever shard that lies; keys stay
my @ids = split /\n/, $t->sql("SELECT dq_offer('two', 'keyed ' || i, '1 hour', 'k' || i) FROM generate_series(1, 8) i");
$t->sync;
$r->freeze;
is($t->sql("SELECT dq_reschedule('two', 'w', '3 hours') IS NULL"), 't', 'a reschedule without an answer');
is($t->sql("SELECT count(*) FROM unnest(ARRAY[" . join(',', map { "'$_'" } @ids) . "]) id WHERE dq_reschedule('two', id, '3 hours') IS NULL"), 8, '... eight by id');
is($t->sql("SELECT dq_remove('two', 'k8') IS NULL"), 't', '... and a removal of one of those');
$r->thaw;
my $books = "SELECT payload, key, due_at > now() + interval '2 hours', count(*) FROM two GROUP BY 1, 2, 3 ORDER BY 1, 2, 3";
my $moved = join("\n", (map { "keyed $_|k$_|t|1" } 1 .. 7), 'w||f|2', 'w||t|1');
ok(poll_until(sub { $t->sync; $t->sql($books) eq $moved }), 'each is moved once, with its key')
  or diag($t->sql($books));
my $shard_of = $t->sql("SELECT string_agg(key || shard, ',' ORDER BY key) FROM two WHERE key IS NOT NULL");
is($t->sql("SELECT dq_remove('two', 'k1')"), 't', '... and is found by it');
$moved =~ s/keyed 1\|.*\n//;

# what was resolved stays resolved when Redis forgets everything (PO 17): 'first'
# was delivered before the removal, which took the other one
$t->sql("SELECT dq_offer('q', 'again')");
$r->cmd('BLPOP', 'q', 10) for 1 .. 2;
is($r->cmd('LLEN', 'q'), 0, 'one is delivered');
$t->sql("SELECT dq_offer('q', 'again', '1 hour')");
$t->sync;
$r->freeze;
is($t->sql("SELECT dq_remove('q', 'again') IS NULL"), 't', 'the one that is pending, without an answer');
$r->thaw;
is(count('q'), 0, '... is taken');
my $rows = $t->sql("SELECT sum(outbox_rows) FROM dq_stats");
is($rows, 0, 'nothing is on its way: resolutions do not count');
$r->cmd('FLUSHALL');
$t->sql("SELECT dq_offer('q', 'later', '1 hour')");
ok(poll_until(sub { $t->sync; $t->sql("SELECT string_agg(payload, ',') FROM q WHERE due_at > now()") eq 'later' }),
	'FLUSHALL: the same one is taken again')
  or diag($t->sql("SELECT payload, due_at FROM q"));
ok(poll_until(sub { $t->sync; $t->sql($books) eq $moved }), '... and each is moved once, as before')
  or diag($t->sql($books));
$shard_of =~ s/k1\d,//;
is($t->sql("SELECT string_agg(key || shard, ',' ORDER BY key) FROM two WHERE key IS NOT NULL"), $shard_of, '... in the shard of its key');

# a restart between the resolution and what follows from it changes nothing
for my $i (1 .. rounds(3, 30))
{
	$t->queue("r$i", "shards '3'");
	$t->sql("SELECT count(dq_offer('r$i', 'w' || j % 10, '1 hour')) FROM generate_series(1, 60) j");
	is(count("r$i"), 60, "round $i");
	$r->freeze;
	is($t->sql("SELECT count(*) FROM generate_series(1, 40) j WHERE dq_remove('r$i', 'w' || j % 10) IS NULL"), 40, '... forty removals');
	$t->sql("SELECT count(dq_offer('r$i', 'w' || j % 10, '1 hour')) FROM generate_series(1, 30) j");
	$r->thaw;
	my $pid = $t->bridge_pid;
	sleep(0.02 + rand(0.4));
	kill 'TERM', $pid;
	ok(poll_until(sub { $t->sync; $t->sql("SELECT count(*) FROM r$i") == 50 }), '... take forty')
	  or diag($t->sql("SELECT payload, count(*) FROM r$i GROUP BY 1 ORDER BY 1"));
	is($t->sql("SELECT min(n) || ' ' || max(n) FROM (SELECT count(*) n FROM r$i GROUP BY payload) x"), '5 5', '... four of each');
}

# a long backlog behind recorded removals is read once, not once for each
$t->queue('long', "shards '2'");
$t->sql("SELECT count(dq_offer('long', 'w', '1 hour')) FROM generate_series(1, 200)");
$t->sync;
$r->freeze;
is($t->sql("SELECT count(*) FROM generate_series(1, 100) WHERE dq_remove('long', 'w') IS NULL"), 100, 'a hundred removals without an answer');
my $n = rounds(60000, 300000);
$t->sql("SELECT count(dq_offer('long', repeat('x', 200), '1 hour')) FROM generate_series(1, $n)");
$r->thaw;
my $start = time();
ok(poll_until(sub { $t->sql("SELECT dq_sync('long', '1s')") eq 't' }), '... before a long backlog');
my $took = time() - $start;
cmp_ok($took, '<', 10 * ($ENV{DQ_SLOW} || 1) * $n / 60000, sprintf('... are done in time (%.1f s)', $took));
is($t->sql("SELECT count(*) FROM long"), 100 + $n, '... all of it');

# resolutions do not keep an outbox table from being emptied
$t->sql("ALTER SERVER redis OPTIONS (ADD replay_window '2s')");
my $emptied = $t->sql("SELECT count(*) FROM dq_rotation WHERE emptied >= 0");
ok(poll_until(sub { $t->sql("SELECT dq_offer('q', 'x')"); $t->sql("SELECT count(*) FROM dq_rotation WHERE emptied >= 0") > $emptied && $t->sql("SELECT count(*) FROM (SELECT op FROM dq_outbox_0 UNION ALL SELECT op FROM dq_outbox_1 UNION ALL SELECT op FROM dq_outbox_2) x WHERE op = 'm'") == 0; }, 40),
	'the table with the resolutions is emptied')
  or diag($t->sql("TABLE dq_rotation; SELECT shard, op, count(*) FROM dq_outbox_0 GROUP BY 1, 2 ORDER BY 1, 2; SELECT * FROM dq_marks; SELECT no, server, encode(name, 'escape'), relid FROM dq_shards; SELECT * FROM dq_stats"));

$t->finish;
