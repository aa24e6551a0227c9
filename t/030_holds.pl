# A task that an open transaction removes or moves is out of circulation; commit
# makes it final, rollback, a savepoint or a dead session put it back. Others wait
# for it as for a row lock. G1 G4; PO 8 to 11; B1..B9; I5
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

my $t = DqTest->new(conf => "max_prepared_transactions = 10\ndeadlock_timeout = '200ms'\n");
my $r = $t->redis;

$t->queue('q');
$t->queue('q4', "shards '4'");
$t->queue('qi', "index 'off'");

sub offer { my ($q, $p, $delay, $k) = @_; return $t->sql("SELECT dq_offer('$q', '$p', '$delay'" . (defined $k ? ", '$k')" : ')')); }
sub payloads { my ($q) = @_; return $t->sql("SELECT coalesce(string_agg(payload, ',' ORDER BY due_at, payload), '-') FROM $q"); }
sub held { my ($q) = @_; return $r->cmd('HLEN', "dq:{$q}:hold"); }
sub free_ok { my ($q, $what) = @_; ok(poll_until(sub { held($q) == 0 && $r->cmd('ZCARD', "dq:{$q}:held") == 0 }), "no hold is left: $what"); }

# ---- one session ---------------------------------------------------------------

my $s = $t->session;
my $o = $t->session;

offer('q', 'x', '1 hour', 'k');
$t->sync;
$s->run('BEGIN');
is($s->run("SELECT dq_remove('q', 'k')"), 't', 'removed');
is(held('q'), 1, 'one hold');
is($r->cmd('ZCARD', 'redisson_delay_queue_timeout:{q}'), 0, 'no foreign transfer can take it');
is($s->run('SELECT count(*) FROM q'), '0', 'gone for its transaction');
is($o->run('SELECT count(*) FROM q'), '1', 'pending for all others');
is($s->run("SELECT dq_remove('q', 'k')"), 'f', 'a second removal in the transaction finds nothing');
$s->run('ROLLBACK');
free_ok('q', 'rollback');
is(payloads('q'), 'x', 'it is back');
is($r->cmd('HGET', 'dq:{q}:fence', 'indexed'), 1, 'and counted in the index');
is($t->sql("SELECT dq_remove('q', 'k')"), 't', 'and can be removed');
$t->sync;
free_ok('q', 'commit');
is(payloads('q'), '-', 'gone for good');
is($r->cmd('HLEN', 'dq:{q}:index'), 0, 'index and all');

# savepoints: put back while the transaction goes on, and taken again at once
offer('q', 'y', '1 hour', 'k');
$t->sync;
$s->run('BEGIN; SAVEPOINT a');
is($s->run("SELECT dq_remove('q', 'k')"), 't', 'in a savepoint');
$s->run('ROLLBACK TO a');
is($s->run("SELECT dq_remove('q', 'k')"), 't', 'after ROLLBACK TO it is there again');
$s->run('ROLLBACK TO a');
free_ok('q', 'a savepoint that was rolled back, before the transaction ends');
is($o->run("SELECT dq_remove('q', 'k')"), 't', 'another session takes it without waiting');
$s->run('COMMIT');
$t->sync;
is(payloads('q'), '-', 'gone');

# released savepoints belong to their parent
offer('q', 'z', '1 hour', 'k');
$t->sync;
$s->run('BEGIN; SAVEPOINT a; SAVEPOINT b');
is($s->run("SELECT dq_remove('q', 'k')"), 't', 'two deep');
$s->run('RELEASE b; RELEASE a; COMMIT');
$t->sync;
free_ok('q', 'released savepoints, committed');
is(payloads('q'), '-', 'gone');

# a rolled back removal fires on time, or at once when overdue (G4)
offer('q', 'late', '1 s', 'k');
$t->sync;
$s->run('BEGIN');
is($s->run("SELECT dq_remove('q', 'k')"), 't', 'before it is due');
my $past = now_ms() + 1300;
poll_until(sub { now_ms() > $past });
is($r->cmd('LLEN', 'q'), 0, 'held over its due instant: it does not fire');
$s->run('ROLLBACK');
is(($r->cmd('BLPOP', 'q', 10) || ['', 'nothing'])->[1], 'late', 'fires at once after the rollback');

# a session that dies
offer('q', 'd', '1 hour', 'k');
$t->sync;
my $pid = $s->run('SELECT pg_backend_pid()');
$s->run('BEGIN');
is($s->run("SELECT dq_remove('q', 'k')"), 't', 'removed');
$t->sql("SELECT pg_terminate_backend($pid)");
free_ok('q', 'terminated session');
is(payloads('q'), 'd', 'it is back');
$s = $t->session;

# ---- two sessions ----------------------------------------------------------------

# rollback: the waiter gets it
$s->run('BEGIN');
is($s->run("SELECT dq_remove('q', 'k')"), 't', 'first remover');
$o->send("SELECT dq_remove('q', 'k')");
is($o->receive(0.7), undef, 'the second one waits, beyond remove_timeout too');
ok($t->sql("SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'") > 0, 'visibly, for a transaction');
$s->run('ROLLBACK');
is($o->receive(20), 't', 'rolled back: the second one has it');
$t->sync;
is(payloads('q'), '-', 'gone');

# commit: the waiter sees the truth
offer('q', 'e', '1 hour', 'k');
$t->sync;
$s->run('BEGIN');
is($s->run("SELECT dq_remove('q', 'k')"), 't', 'first remover');
$o->send("SELECT dq_remove('q', 'k')");
is($o->receive(0.3), undef, 'the second one waits');
$s->run('COMMIT');
is($o->receive(20), 'f', 'committed: there is nothing to remove');

# commit of remove and offer under the same key: the waiter has the new one
offer('q', 'old', '1 hour', 'k');
$t->sync;
$s->run('BEGIN');
$s->run("SELECT dq_remove('q', 'k'), dq_offer('q', 'new', '1 hour', 'k')");
$o->send("SELECT dq_remove('q', 'k')");
is($o->receive(0.3), undef, 'waits');
$s->run('COMMIT');
is($o->receive(20), 't', 'the new task under the key is what it removes');
$t->sync;
is(payloads('q'), '-', 'nothing is left');

# a key offered again while the old task is held (H10)
offer('q', 'one', '1 hour', 'k');
$t->sync;
$s->run('BEGIN');
is($s->run("SELECT dq_remove('q', 'k')"), 't', 'held');
offer('q', 'two', '1 hour', 'k');
$t->sync;
is($o->run("SELECT string_agg(payload, ',') FROM q"), 'two', 'replaced while it is held');
$s->run('ROLLBACK');
free_ok('q', 'the hold of a replaced task');
is(payloads('q'), 'two', 'the old one does not come back beside it');
is($t->sql("SELECT dq_remove('q', 'k')"), 't', 'removed');
$t->sync;

# equal payloads: each transaction its own, the third waits
offer('q', 'twin', '1 hour') for 1 .. 2;
$t->sync;
$s->run('BEGIN');
is($s->run("SELECT dq_remove('q', 'twin'), dq_remove('q', 'twin'), dq_remove('q', 'twin')"), 't|t|f', 'two equal ones');
$o->send("SELECT dq_remove('q', 'twin')");
is($o->receive(0.3), undef, 'the other session waits for the earliest');
$s->run('ROLLBACK');
is($o->receive(20), 't', 'and gets it');
$t->sync;
free_ok('q', 'equal payloads');
is(payloads('q'), 'twin', 'one is left');
$t->sql("SELECT dq_remove('q', 'twin')");

# deadlocks are PostgreSQL's to find
offer('q', 'A', '1 hour', 'a');
offer('q', 'B', '1 hour', 'b');
$t->sync;
$s->run('BEGIN');
$o->run('BEGIN');
is($s->run("SELECT dq_remove('q', 'a')"), 't', 'one takes a');
is($o->run("SELECT dq_remove('q', 'b')"), 't', 'the other b');
$s->send("SELECT dq_remove('q', 'b')");
$o->send("SELECT dq_remove('q', 'a')");
my @answers = map { $_->receive(30) } $s, $o;
is(scalar(grep { defined && /40P01/ } @answers), 1, 'one of them is told of the deadlock')
  or diag(join ' / ', map { defined $_ ? $_ : 'nothing' } @answers);
is(scalar(grep { defined && $_ eq 't' } @answers), 1, 'the other gets both');
$_->run('ROLLBACK') for $s, $o;
free_ok('q', 'deadlock');
is(payloads('q'), 'A,B', 'both are back');

# lock_timeout counts, cancel works
$s->run('BEGIN');
$s->run("SELECT dq_remove('q', 'a')");
like($o->run("SET lock_timeout = '300ms'; SELECT dq_remove('q', 'a')"), qr/55P03/, 'lock_timeout');
$o->run('RESET lock_timeout');
like($o->run("SET statement_timeout = '300ms'; SELECT dq_remove('q', 'a')"), qr/57014/, 'statement_timeout');
$o->run('RESET statement_timeout');
$s->run('ROLLBACK');
free_ok('q', 'lock_timeout');
is($t->sql("SELECT dq_remove('q', 'a') AND dq_remove('q', 'b')"), 't', 'both removed');

# ---- shards, no index -------------------------------------------------------------

for my $q ('q4', 'qi')
{
	offer($q, "p$_", '1 hour') for 1 .. 12;
	$t->sync;
	$s->run('BEGIN');
	is($s->run("SELECT count(*) FILTER (WHERE dq_remove('$q', 'p' || i)) FROM generate_series(1, 12) i"), '12', "$q: all removed");
	is($o->run("SELECT count(*) FROM $q"), '12', "$q: pending for others");
	$s->run('ROLLBACK');
	ok(poll_until(sub { $t->sql("SELECT sum(held) FROM dq_stats WHERE queue = '$q'::regclass") eq '0' }), "$q: no hold is left");
	is($t->sql("SELECT count(DISTINCT payload) FROM $q"), '12', "$q: all are back");
	is($t->sql("SELECT count(*) FILTER (WHERE dq_remove('$q', 'p' || i)) FROM generate_series(1, 12) i"), '12', "$q: removed for good");
	$t->sync;
	is($t->sql("SELECT count(*) FROM $q"), '0', "$q: empty");
}

# ---- reschedule --------------------------------------------------------------------

my $id = offer('q', 'move me', '1 hour', 'k');
$t->sync;
$s->run('BEGIN');
my $new = $s->run("SELECT dq_reschedule('q', 'k', '2 hours')");
isnt($new, $id, 'a new id');
like($new, qr/^\d+-\d+$/, '... of the usual form');
is($s->run("SELECT count(*), min(id) FROM q"), "1|$new", 'its transaction sees it moved');
is($o->run("SELECT min(id) FROM q"), $id, 'others see it where it was');
$s->run('ROLLBACK');
free_ok('q', 'reschedule rolled back');
is($t->sql('SELECT min(id) FROM q'), $id, 'where it was');
$new = $t->sql("SELECT dq_reschedule('q', 'k', '200 ms')");
is(($r->cmd('BLPOP', 'q', 10) || ['', 'nothing'])->[1], 'move me', 'fires at its new time');
is($t->sql('SELECT count(*) FROM q'), '0', 'once');
is($t->sql("SELECT dq_reschedule('q', 'k', '1 hour') IS NULL"), 't', 'NULL: not pending any more');
$t->fails("SELECT dq_reschedule('q', 'k', '-1 hour')", '22023');
$t->fails("SELECT dq_reschedule('q', NULL, '1 hour')", '22004');
$t->fails("SELECT dq_reschedule_at('q', 'k', 'infinity')", '22008');
offer('q', 'now', '1 hour', 'k');
$t->sync;
$t->sql("SELECT dq_reschedule_at('q', 'k', now() - interval '1 day')");
is(($r->cmd('BLPOP', 'q', 10) || ['', 'nothing'])->[1], 'now', 'an instant in the past is due at once');
# own task, moved before it is committed; keyless and by id
is($t->sql("BEGIN; SELECT dq_offer('q', 'own', '1 hour') IS NOT NULL; SELECT dq_reschedule('q', 'own', '300 ms') IS NOT NULL; COMMIT"), "t\nt", 'own task');
is(($r->cmd('BLPOP', 'q', 10) || ['', 'nothing'])->[1], 'own', 'fires at its new time');
is($t->sql('SELECT count(*) FROM q'), '0', 'once');
$r->redisson_offer('q', now_ms() + 3600000, 'from java');
is($t->sql("SELECT dq_reschedule('q', 'from java', '200 ms') IS NOT NULL"), 't', 'a task of a foreign producer');
is(($r->cmd('BLPOP', 'q', 10) || ['', 'nothing'])->[1], 'from java', 'fires at its new time');
ok(poll_until(sub { $t->stat('q', 'rescheduled') >= 4 }), 'counted in dq_stats');
# while Redis is silent: recorded
offer('q', 'moved blind', '1 hour', 'k');
$t->sync;
$r->freeze;
is($t->sql("SELECT dq_reschedule('q', 'k', '10 ms') IS NULL"), 't', 'Redis silent: NULL, recorded');
$r->thaw;
is(($r->cmd('BLPOP', 'q', 10) || ['', 'nothing'])->[1], 'moved blind', 'and done when it answers');
$t->sync;
is($t->sql('SELECT count(*) FROM q'), '0', 'once');

# a move that commits after its task was replaced does not replace the successor (D2)
offer('q', 'X', '1 hour', 'kx');
$t->sync;
$s->run('BEGIN');
like($s->run("SELECT dq_reschedule('q', 'kx', '2 hours')"), qr/^\d/, 'moved, not committed');
offer('q', 'Y', '1 hour', 'kx');
$t->sync;
$s->run('COMMIT');
$t->sync;
is(payloads('q'), 'Y', 'a newer offer of the key stays');
free_ok('q', 'replaced while it was moved');
# and a keyless one that a recorded removal has taken meanwhile does not come back
offer('q', 'keyless', '1 hour');
$t->sync;
$s->run('BEGIN');
like($s->run("SELECT dq_reschedule('q', 'keyless', '2 hours')"), qr/^\d/, 'moved, not committed');
$r->freeze;
is($t->sql("SELECT dq_remove('q', 'keyless') IS NULL"), 't', 'removed without an answer');
$r->thaw;
$t->sync;
$s->run('COMMIT');
$t->sync;
is(payloads('q'), 'Y', 'the removal that committed first counts');
free_ok('q', 'removed while it was moved');
is($t->sql("SELECT dq_remove('q', 'kx')"), 't', 'removed');
$t->sync;

# ---- two-phase commit, restart ------------------------------------------------------

offer('q', "pp$_", '1 hour', "k$_") for 1 .. 4;
$t->sync;
$s->run("BEGIN; SELECT dq_remove('q', 'k1'); PREPARE TRANSACTION 'one'");
$s->run("BEGIN; SELECT dq_remove('q', 'k2'); PREPARE TRANSACTION 'two'");
$s->run("BEGIN; SELECT dq_reschedule('q', 'k3', '300 ms'); PREPARE TRANSACTION 'three'");
is(held('q'), 3, 'held over PREPARE');
$t->node->stop('immediate');
$t->node->start;
$s = $t->session;
$o = $t->session;
$t->bridge_pid;
offer('q', 'after', '1 ms');
is(($r->cmd('BLPOP', 'q', 20) || ['', 'nothing'])->[1], 'after', 'work goes on beside prepared transactions');
is(held('q'), 3, 'and over a crash');
$o->send("SELECT dq_remove('q', 'k1')");
is($o->receive(0.5), undef, 'others wait for a prepared transaction');
$s->run("COMMIT PREPARED 'one'");
is($o->receive(20), 'f', 'COMMIT PREPARED makes it final');
$s->run("ROLLBACK PREPARED 'two'");
ok(poll_until(sub { held('q') == 1 }), 'ROLLBACK PREPARED puts it back');
is(payloads('q'), 'pp2,pp3,pp4', 'the books');
$s->run("COMMIT PREPARED 'three'");
is(($r->cmd('BLPOP', 'q', 20) || ['', 'nothing'])->[1], 'pp3', 'rescheduled by COMMIT PREPARED');
$t->sync;
free_ok('q', 'two-phase commit');
is(payloads('q'), 'pp2,pp4', 'the books');

# a crash with holds of ordinary transactions: they go back
$s->run('BEGIN');
is($s->run("SELECT dq_remove('q', 'k2')"), 't', 'held');
is(held('q'), 1, 'one hold');
$t->node->stop('immediate');
$t->node->start;
free_ok('q', 'crash');
is(payloads('q'), 'pp2,pp4', 'both are there');

# ---- the worker restarts while holds stand -------------------------------------------

$s = $t->session;
$s->run('BEGIN');
is($s->run("SELECT dq_remove('q', 'k2')"), 't', 'held');
my $bridge = $t->bridge_pid;
$t->sql("SELECT pg_terminate_backend($bridge)");
ok(poll_until(sub { my $p = $t->bridge_pid; $p && $p != $bridge }), 'another worker');
offer('q', 'goes on', '1 ms');
is(($r->cmd('BLPOP', 'q', 20) || ['', 'nothing'])->[1], 'goes on', 'it does not wait for a transaction whose hold stands');
is(held('q'), 1, 'the hold stands');
$s->run('COMMIT');
$t->sync;
free_ok('q', 'new worker');
is(payloads('q'), 'pp4', 'removed');

# ---- Redis loses the hold (H3) ---------------------------------------------------------

offer('q', 'strict', '3 s', 'ks');
$t->sync;
$s->run('BEGIN');
is($s->run("SELECT dq_remove('q', 'ks')"), 't', 'true');
$r->cmd('FLUSHALL');
# replayed from the outbox, but not transferred: its remover was told true
ok(poll_until(sub { $r->cmd('ZCARD', 'redisson_delay_queue_timeout:{q}') > 0 }), 'applied again');
$past = now_ms() + 3300;
poll_until(sub { now_ms() > $past });
ok(!(grep { $_ eq 'strict' } $r->ready('q')), 'due tasks wait for the transaction that was told true');
$s->run('COMMIT');
$t->sync;
$o = $t->session;
ok(poll_until(sub { $t->stat('q', 'state') eq 'running' && !$r->cmd('ZSCORE', 'redisson_delay_queue_timeout:{q}', 'x') }), 'running again');
offer('q', 'end', '1 ms');
ok(poll_until(sub { grep { $_ eq 'end' } $r->ready('q') }), 'transfers go on');
ok(!(grep { $_ eq 'strict' } $r->ready('q')), 'what was removed has not fired');
free_ok('q', 'FLUSHALL');

$_->quit for $s, $o;
$t->finish;
