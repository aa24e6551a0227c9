# dq_remove: by key, id and payload; own transaction; outage; replaced keys.
# B2 B3 B4 B5 G4 G7; PO 8 9 17
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

my $t = DqTest->new;
my $r = $t->redis;

$t->queue('q');

sub left { $t->sync; return join ',', sort $t->pending('q'); }

# ---- the three ways, and their precedence -----------------------------------------------
my $id = $t->sql("SELECT dq_offer('q', 'by id', '1 hour')");
$t->sql("SELECT dq_offer('q', 'by key', '1 hour', 42), dq_offer('q', 'by payload', '1 hour')");
is($t->sql("SELECT dq_remove('q', 42)"), 't', 'by key: 42');
is($t->sql("SELECT dq_remove('q', '42')"), 'f', "... and '42' is the same key, now gone");
is($t->sql("SELECT dq_remove('q', '$id')"), 't', 'by id');
is($t->sql("SELECT dq_remove('q', 'by payload')"), 't', 'by payload');
is($t->sql("SELECT dq_remove('q', 'by payload')"), 'f', 'B2 something absent: false, no error');
is(left(), '', 'all gone');

$t->sql("SELECT dq_offer('q', 'keyed payload', '1 hour', 'k1')");
is($t->sql("SELECT dq_remove('q', 'keyed payload')"), 'f', 'a keyed task is never found by its payload');
$t->sql("SELECT dq_offer('q', 'k1', '1 hour')");
is($t->sql("SELECT dq_remove('q', 'k1')"), 't', 'the key comes before the payload');
is(left(), 'k1', '... so the keyless task with that payload stays');
is($t->sql("SELECT dq_remove('q', 'k1')"), 't', 'and is next');

# ---- B2: equal payloads, the earliest first ----------------------------------------------
$t->sql("SELECT dq_offer('q', 'A', '10 s'), dq_offer('q', 'A', '5 s'), dq_offer('q', 'B', '10 s')");
$t->sync;
my $early = $t->sql("SELECT min(due_at) FROM q WHERE payload = 'A'");
is($t->sql("SELECT dq_remove('q', 'A')"), 't', 'B2 one of two equal payloads');
$t->sync;
is($t->sql("SELECT count(*) FROM q WHERE payload = 'A' AND due_at > '$early'"), 1, 'B2 the earliest due is the one that went');
is(left(), 'A,B', 'B2 the others stay');
$t->sql("SELECT dq_remove('q', 'A'), dq_remove('q', 'B')");
# many twins
$t->sql("SELECT count(dq_offer('q', 'twin', '1 hour'::interval + i * '1 s'::interval)) FROM generate_series(1, 500) i");
$t->sync;
is($t->sql("SELECT count(*) FROM generate_series(1, 499) WHERE dq_remove('q', 'twin')"), 499, '499 of 500 twins');
is($t->sql("SELECT dq_remove('q', 'twin')"), 't', 'the last one');
is($t->sql("SELECT dq_remove('q', 'twin')"), 'f', 'and no more');
is(left(), '', 'none left');

# ---- transactional -------------------------------------------------------------------------
$t->sql("SELECT dq_offer('q', 'rollback', '1 hour', 'rb')");
$t->sync;
is($t->sql("BEGIN; SELECT dq_remove('q', 'rb'); ROLLBACK"), 't', 'true, and rolled back');
is(left(), 'rollback', '... the task stays');
is($t->sql("BEGIN; SAVEPOINT a; SELECT dq_remove('q', 'rb'); ROLLBACK TO a; COMMIT"), 't', 'true in a savepoint that is rolled back');
is(left(), 'rollback', '... the task stays');
is($t->sql("SELECT dq_remove('q', 'rb')"), 't', 'it can be removed afterwards');
is(left(), '', 'gone');

# own transaction
is($t->sql("BEGIN; SELECT dq_offer('q', 'own', '1 hour', 'own') IS NULL; SELECT dq_remove('q', 'own'); SELECT dq_remove('q', 'own'); COMMIT"),
	"f\nt\nf", 'own offer: found, removed, not found again');
is(left(), '', 'nothing remains');
is($t->sql("BEGIN; SELECT dq_remove('q', dq_offer('q', 'own id', '1 hour')); COMMIT"), 't', 'own offer by id');
is($t->sql("BEGIN; SELECT dq_offer('q', 'own payload', '1 hour') IS NULL; SELECT dq_remove('q', 'own payload'); COMMIT"), "f\nt", 'own offer by payload');
is($t->sql("BEGIN; SAVEPOINT a; SELECT dq_offer('q', 'gone', '1 hour', 'gone') IS NULL; ROLLBACK TO a; SELECT dq_remove('q', 'gone'); COMMIT"),
	"f\nf", 'an own offer of a rolled back savepoint is not there');
is(left(), '', 'nothing remains');

# replace: the same key again
$t->sql("SELECT dq_offer('q', 'old', '1 hour', 'r')");
$t->sync;
$t->sql("SELECT dq_offer('q', 'new', '2 hours', 'r')");
is(left(), 'new', 'the same key replaces the pending task');
# H16: offer the key again and remove it in one transaction: both are gone
is($t->sql("BEGIN; SELECT dq_offer('q', 'newer', '1 hour', 'r') IS NULL; SELECT dq_remove('q', 'r'); COMMIT"), "f\nt", 'replace and remove in one transaction');
is(left(), '', '... and the older task does not come back');
# several times in one transaction
$t->sql("BEGIN; SELECT dq_offer('q', 'v' || i, '1 hour', 'v') FROM generate_series(1, 50) i; COMMIT");
is(left(), 'v50', 'the last of many offers of a key in one transaction');
$t->sql("SELECT dq_remove('q', 'v')");

# own many: not quadratic
my $start = time();
is($t->sql("BEGIN; SELECT count(dq_offer('q', 'm' || i, '1 hour', i)) FROM generate_series(1, 20000) i; SELECT count(*) FROM generate_series(1, 20000) i WHERE dq_remove('q', i); COMMIT"),
	"20000\n20000", '20,000 own offers removed again');
cmp_ok(time() - $start, '<', 60, 'in linear time');
is(left(), '', 'nothing remains');

# ---- B4 --------------------------------------------------------------------------------------
$t->sql("SELECT dq_offer('q', 'seven', '1 hour', 7)");
$t->sql("SELECT dq_remove('q', 7)");
$t->sql("SELECT dq_offer('q', 'seven again', '300 ms', 7)");
is(($r->cmd('BLPOP', 'q', 10) || [])->[1], 'seven again', 'B4 the key can be offered again after its removal');
$t->sql("BEGIN; SELECT dq_offer('q', 'eight', '1 hour', 8); ROLLBACK");
$t->sql("SELECT dq_offer('q', 'eight again', '300 ms', 8)");
is(($r->cmd('BLPOP', 'q', 10) || [])->[1], 'eight again', 'B4 and after a rolled back offer');
$t->sql("SELECT dq_offer('q', 'eight 3', '300 ms', 8)");
is(($r->cmd('BLPOP', 'q', 10) || [])->[1], 'eight 3', 'B4 and after it fired');

# ---- B3: after the transfer --------------------------------------------------------------------
$t->sql("SELECT dq_offer('q', 'fired', '0', 'fired')");
ok(poll_until(sub { $r->cmd('LLEN', 'q') == 1 }), 'B3 in the ready list');
is($t->sql("SELECT dq_remove('q', 'fired')"), 'f', 'B3 reported not removed');
is($r->cmd('LLEN', 'q'), 1, 'B3 the ready list is untouched');
$r->cmd('DEL', 'q');

# ---- B5: strangers delete members ------------------------------------------------------------------
$t->sql("SELECT dq_offer('q', 'zrem', '1 hour', 'z1'), dq_offer('q', 'zrem2', '1 hour')");
$t->sync;
$r->cmd('DEL', 'redisson_delay_queue_timeout:{q}');
is($t->sql("SELECT dq_remove('q', 'z1')"), 'f', 'B5 a member deleted by a stranger: a stale index entry is tolerated');
is($t->sql("SELECT dq_remove('q', 'zrem2')"), 'f', 'B5 by payload too');
$t->sql("SELECT dq_offer('q', 'z again', '1 hour', 'z1')");
is($t->sql("SELECT dq_remove('q', 'z1')"), 't', 'B5 and the key works again');

# foreign tasks are found by payload though nobody indexed them
$r->redisson_offer('q', now_ms() + 3600_000, 'foreign one');
is($t->sql("SELECT dq_remove('q', 'foreign one')"), 't', 'a foreign task by payload');
$r->redisson_offer('q', now_ms() + 3600_000, 'foreign two', id => "\x00\x01\x02");
my $fid = $t->sql("SELECT id FROM q WHERE payload = 'foreign two'");
is($t->sql("SELECT dq_remove('q', '$fid')"), 't', 'a foreign task by id') or diag($fid);
is(left(), '', 'both gone');

# ---- rows of an open transaction of somebody else ------------------------------------------------------
my $s = $t->session;
$s->run("BEGIN");
$s->run("SELECT dq_offer('q', 'not committed', '1 hour', 'nc')");
is($t->sql("SELECT dq_remove('q', 'nc')"), 'f', 'an offer that is not committed is not there');
$s->run("COMMIT");
is($t->sql("SELECT dq_remove('q', 'nc')"), 't', 'right after the commit it is: never a false false');
$s->quit;
my $misses = 0;
my $a = $t->session;
for my $i (1 .. 200)
{
	$a->run("SELECT dq_offer('q', 'race', '1 hour', 'race$i')");
	my $said = $a->run("SELECT coalesce(dq_remove('q', 'race$i')::text, 'null')");
	$misses++ if $said ne 'true';
}
$a->quit;
is($misses, 0, 'committed, then removed at once, 200 times: always true');
is(left(), '', 'none left');

# ---- G7: outage -----------------------------------------------------------------------------------------
$t->sql("SELECT dq_offer('q', 'outage', '1 hour', 'o1'), dq_offer('q', 'outage by payload', '1 hour')");
$t->sync;
$r->freeze;
$start = time();
is($t->sql("SELECT dq_remove('q', 'o1') IS NULL"), 't', 'Redis silent: NULL');
cmp_ok(time() - $start, '<', 2.5, 'within remove_timeout');
$r->thaw;
$t->sql("SELECT dq_sync('q', '20 s')");
is(left(), 'outage by payload', '... recorded, and applied');
$r->stop;
$t->wait_state('q', 'redis_down');
$start = time();
is($t->sql("SELECT dq_remove('q', 'outage by payload') IS NULL"), 't', 'Redis known to be down: NULL');
cmp_ok(time() - $start, '<', 0.4, '... at once');
$t->sql("ALTER FOREIGN TABLE q OPTIONS (ADD on_outage 'error')");
$t->fails("SELECT dq_remove('q', 'x')", '08006', 'on_outage error: 08006');
$t->sql("ALTER FOREIGN TABLE q OPTIONS (DROP on_outage)");
$r->start;
ok($t->sync, 'relayed');

# remove_timeout is an option
$t->sql("SELECT dq_offer('q', 'rt', '1 hour', 'rt')");
$t->sync;
$t->sql("ALTER FOREIGN TABLE q OPTIONS (ADD remove_timeout '1500ms')");
$r->freeze;
$start = time();
$t->sql("SELECT dq_remove('q', 'rt')");
my $took = time() - $start;
$r->thaw;
ok($took > 1.2 && $took < 4, "remove_timeout 1500ms is obeyed") or diag($took);
$t->sql("ALTER FOREIGN TABLE q OPTIONS (DROP remove_timeout)");

# ---- bad input --------------------------------------------------------------------------------------------
$t->fails("SELECT dq_remove(NULL, 'x')", '22004', 'a NULL queue');
$t->fails("SELECT dq_remove('pg_class', 'x')", '42809', 'no queue', like => qr/HINT/);
{
	my ($rc, $out, $err) = $t->try("SELECT dq_remove('q', NULL::text)");
	ok($rc == 0 ? $out ne 't' : $err =~ /22004/, 'a NULL element never removes anything') or diag("$out $err");
}

# index off: keys refused, by id and payload it works
$t->queue('noindex', "index 'off'");
$t->fails("SELECT dq_offer('noindex', 'x', '1 hour', 'k')", '0A000', 'index off refuses keys');
$t->sql("SELECT dq_offer('noindex', 'scan me', '1 hour')");
$id = $t->sql("SELECT dq_offer('noindex', 'by id', '1 hour')");
is($t->sql("SELECT dq_remove('noindex', 'scan me')"), 't', 'index off: by payload, by a scan');
is($t->sql("SELECT dq_remove('noindex', '$id')"), 't', 'index off: by id');
$t->sync;
is($r->cmd('EXISTS', 'dq:{noindex}:index'), 0, 'index off: no index');

# role producer
$t->queue('prod', "role 'producer'");
$t->fails("SELECT dq_remove('prod', 'x')", '55000', 'role producer: dq_remove is refused');
like($t->sql("SELECT dq_offer('prod', 'from a producer', '1 hour')"), qr/^\d/, 'role producer: dq_offer works');
$t->fails("SELECT dq_transfer('prod')", '55000', 'role producer: dq_transfer is refused');

# destination none
$t->queue('none_q', "destination 'none'");
$t->sql("SELECT dq_offer('none_q', 'stays')");
$t->sync;
sleep(1.5);
is($r->cmd('ZCARD', 'redisson_delay_queue_timeout:{none_q}'), 1, 'destination none: a due task stays pending');
$t->fails("SELECT dq_transfer('none_q')", '0A000', 'destination none: dq_transfer is refused');

# shards: found whichever shard it is in
$t->queue('sh', "shards '4'");
$t->sql("SELECT count(dq_offer('sh', 's' || i, '1 hour')) FROM generate_series(1, 20) i");
$t->sql("SELECT count(dq_offer('sh', 'k' || i, '1 hour', i)) FROM generate_series(1, 20) i");
$t->sync;
is($t->sql("SELECT count(*) FROM generate_series(1, 20) i WHERE dq_remove('sh', 's' || i) AND dq_remove('sh', i)"), 20, 'shards: by payload all are asked, by key one');
$t->sync;
is($t->sql("SELECT count(*) FROM sh"), 0, 'shards: all gone');

$t->finish;
