# What lies before the replay window cannot be applied again: state data_loss with
# what is missing, on_data_loss stop and continue, dq_resume; what is known to be
# delivered is no loss; the rebuild statements of the manual. G3; PO 16 17
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

my $t = DqTest->new;
my $r = $t->redis;

$t->sql("ALTER SERVER redis OPTIONS (ADD replay_window '2s')");
$t->queue('stops');
$t->queue('goes', "on_data_loss 'continue'");
$t->queue('delivered');
$t->queue('keyed');
$t->queue('fresh');
$t->queue('other');

sub pending { my ($q) = @_; return $r->cmd('ZCARD', DqTest::Redis::pending_key($q)); }
sub state { my ($q) = @_; return $t->stat($q, 'state'); }
sub emptied { return $t->sql("SELECT count(*) FROM dq_emptied"); }

# Everything in the outbox so far leaves it.
sub age
{
	$t->sync;
	my $rows = sub { $t->sql("SELECT count(*) FROM (SELECT 1 FROM dq_outbox_0 UNION ALL SELECT 1 FROM dq_outbox_1 UNION ALL SELECT 1 FROM dq_outbox_2) x") };
	# a table stops taking rows when others come
	ok(poll_until(sub { $rows->() == 0 }), 'the outbox is emptied')
	  or diag($rows->() . ' rows: ' . $t->sql("SELECT string_agg(m::text, ' / ') FROM dq_marks m"));
}

$t->sql(<<'SQL');
CREATE TABLE orders (id int PRIMARY KEY, paid boolean DEFAULT false, due timestamptz);
INSERT INTO orders SELECT i, i % 10 = 0, now() + interval '1 hour' FROM generate_series(1, 100) i;
SELECT count(dq_offer_at('stops', 'order ' || id, due, id)) FROM orders WHERE NOT paid;
SELECT count(dq_offer('goes', 'g' || i, '1 hour')) FROM generate_series(1, 20) i;
SELECT count(dq_offer('delivered', 'd' || i)) FROM generate_series(1, 30) i;
SQL
ok(poll_until(sub { $r->cmd('LLEN', 'delivered') == 30 }), 'some are delivered');
$r->cmd('DEL', 'delivered');
age();
cmp_ok(emptied(), '>=', 2, 'what was emptied is remembered');

# ---- nothing is lost without a loss ------------------------------------------------
$t->node->restart;
ok($t->wait_state($_, 'running'), "$_: running after a restart") for qw(stops goes delivered);

# ---- FLUSHALL ------------------------------------------------------------------------
$t->sql("SELECT dq_offer('delivered', 'still in the window', '1 hour')");
$t->sync;
$r->cmd('FLUSHALL');
ok($t->wait_state('stops', 'data_loss'), 'state data_loss') or diag(state('stops'));
like($t->stat('stops', 'last_error'), qr/up to 90 tasks offered until .* are missing/, 'with what is missing');
ok($t->wait_state('goes', 'data_loss'), 'with on_data_loss continue as well');
like($t->stat('goes', 'last_error'), qr/up to 20 tasks/, 'with what is missing there');
ok(poll_until(sub { pending('delivered') == 1 }), 'what is in the window is applied again');
is(state('delivered'), 'running', 'what is known to be delivered is not missed');
is(state('fresh'), 'running', 'nor in a queue that never had anything');
my $said = () = $t->log_text =~ /WARNING: .*shard "stops" of server "redis" has lost data from before the replay window/g;
is($said, 1, 'said once');

# due tasks wait, everything else goes on
$t->sql("SELECT dq_offer('stops', 'due now'), dq_offer('goes', 'due now')");
ok($t->sync, 'offers go on');
is(($r->cmd('BLPOP', 'goes', 10) || [])->[1], 'due now', 'continue: due tasks go on');
is($t->sql("SELECT payload FROM stops"), 'due now', 'reads go on');
$t->sql("SELECT dq_offer('stops', 'to be removed', '1 hour', 'r')");
$t->sync;
is($t->sql("SELECT dq_remove('stops', 'r')"), 't', 'removals go on');
is($t->sql("SELECT dq_transfer('stops')"), 0, 'dq_transfer moves nothing');
$t->node->restart;
ok($t->wait_state('stops', 'data_loss'), 'a restart does not forget it');
sleep(1.5);
is($r->cmd('LLEN', 'stops'), 0, 'stop: due tasks wait');
$t->sql("BEGIN; SELECT dq_resume('stops'); ROLLBACK");
sleep(1);
is(state('stops'), 'data_loss', 'dq_resume that is rolled back is none');
is($r->cmd('LLEN', 'stops'), 0, 'and moves nothing');

# the manual's way to rebuild: offering under its key replaces, so it does no harm twice
my $rebuild = "SELECT count(dq_offer_at('stops', 'order ' || id, due, id)) FROM orders WHERE NOT paid";
is($t->sql($rebuild), 90, 'offered again from the business table');
is($t->sql($rebuild), 90, 'twice');
$t->sync;
is(pending('stops'), 91, 'each once');
$t->sql("SELECT dq_resume('stops')");
ok(poll_until(sub { $r->cmd('LLEN', 'stops') == 1 }), 'dq_resume: due tasks go on');
ok($t->wait_state('stops', 'running'), 'state running');
is(state('goes'), 'data_loss', 'of that queue alone');
$t->sql("SELECT dq_resume('goes')");
ok($t->wait_state('goes', 'running'), 'state running');
is($t->sql("SELECT dq_remove('stops', 7)"), 't', 'the rebuilt ones are found by key');

# ---- the same loss is not found again -----------------------------------------------
$t->node->restart;
ok($t->wait_state('stops', 'running'), 'after a restart: running');
sleep(1);
is(state('stops'), 'running', 'and stays so');

# ---- a save of Redis from before the window --------------------------------------------
# X is replaced and removed by operations that are in no outbox table any more
$t->sql("SELECT dq_offer('keyed', 'X', '1 hour', 'k'), dq_offer('keyed', 'Z', '1 hour', 'z')");
$t->sync;
my %old = %{ $r->save_state };
$t->sql("SELECT dq_offer('keyed', 'Y', '0 s', 'k')");
ok($r->cmd('BLPOP', 'keyed', 10), 'X was replaced, and its successor delivered');
is($t->sql("SELECT dq_remove('keyed', 'z')"), 't', 'Z was removed');
age();
$r->restore_state(\%old);
ok($t->wait_state('keyed', 'data_loss'), 'an old save without operations that cannot be applied again')
  or diag(state('keyed') . ' ' . $t->sql("SELECT string_agg(e::text, ' / ') FROM dq_emptied e"));
$t->sql("SELECT dq_resume('keyed')");
ok($t->wait_state('keyed', 'running'), 'accepted');

# ---- a session that keeps dq_resume open holds up nobody (G9) ------------------------------
my $s = $t->session;
$s->run("BEGIN; SELECT dq_resume('goes')");
$t->sql("SELECT count(dq_offer('keyed', 'long' || i, '1 hour')) FROM generate_series(1, 5) i");
age();
$r->cmd('FLUSHALL');
$t->sql("SELECT dq_offer('other', 'meanwhile')");
is(($r->cmd('BLPOP', 'other', 15) || [])->[1], 'meanwhile', 'G9 other queues go on');
$s->run('COMMIT');
$s->quit;
ok($t->wait_state('keyed', 'data_loss'), 'and the loss is noted when it has ended');

# ---- keyed tasks for many windows, all of them delivered: no loss ------------------------
# transactions that run while another table takes over, several rows each
$t->queue('steady');
my @writers = map { $t->session } 1 .. 3;
my $until = time() + 8;
for (my $i = 1; time() < $until; $i++)
{
	my $w = $writers[ $i % 3 ];
	my $k = $i % 7;
	$w->run("BEGIN; SELECT dq_offer('steady', 'first $i', '300 ms', '$k'), dq_offer('steady', 'x $i', '300 ms')");
	sleep(0.05);
	$writers[ ($i + 1) % 3 ]->run("SELECT dq_offer('steady', 'between $i', '300 ms', 'b$k')");
	$w->run("SELECT dq_remove('steady', 'x $i'), dq_offer('steady', 'second $i', '300 ms', '$k'); COMMIT");
	$r->cmd('DEL', 'steady');
}
$_->quit for @writers;
$t->sync;
sleep(1);
$r->cmd('DEL', 'steady');
my $read = now_ms();
ok(poll_until(sub { $t->sql("SELECT count(*) FROM dq_marks m JOIN dq_shards s ON s.no = m.shard WHERE s.name = 'steady' AND due >= $read") > 0 }), 'all are known to be delivered');
cmp_ok($t->sql("SELECT count(*) FROM dq_emptied e JOIN dq_shards s ON s.no = e.shard WHERE s.name = 'steady' AND any_due > due"), '>', 0,
	'of what was emptied it is not known which tasks were replaced');
$t->sql("SELECT dq_offer('steady', 'pending', '1 hour', 'p')");
$t->sync;
$r->cmd('DEL', @{ $r->cmd('KEYS', '*{steady}*') });
ok(poll_until(sub { pending('steady') == 1 }), 'it heals');
sleep(1.5);
is(state('steady'), 'running', 'and nothing is missing')
  or diag($t->stat('steady', 'last_error') . "\n" . $t->sql("SELECT string_agg(e::text, ' / ') FROM dq_emptied e JOIN dq_shards s ON s.no = e.shard WHERE s.name = 'steady'"));
is($r->cmd('LLEN', 'steady'), 0, 'nothing comes again');

# ---- emptied out of order: the offer is still there, its removal is not -----------------
age();
$t->queue('pinned');
$t->sql("SELECT dq_offer('pinned', 'removed', '1 hour', 'f')");
$t->sync;
my $rows = join ' UNION ALL ', map { "SELECT $_ AS tbl FROM dq_outbox_$_" } 0 .. 2;
my $first = $t->sql("SELECT DISTINCT tbl FROM ($rows) x");
my $lock = $t->session;
$lock->run("BEGIN; LOCK TABLE dq_outbox_$first IN ACCESS SHARE MODE");
ok(poll_until(sub { $t->sql("SELECT tbl FROM dq_rotation ORDER BY round DESC LIMIT 1") != $first }),
	'another table takes rows');
is($t->sql("SELECT dq_remove('pinned', 'f')"), 't', 'removed');
$t->sync;
ok(poll_until(sub { $t->sql("SELECT count(*), count(*) FILTER (WHERE tbl = $first) FROM ($rows) x") eq '1|1' }),
	'the removal has left the outbox, the offer has not');
$r->cmd('DEL', @{ $r->cmd('KEYS', '*{pinned}*') });
ok($t->wait_state('pinned', 'data_loss', deadline => 20), 'all of the queue is gone: what was removed is not just offered again')
  or diag($t->sql("SELECT string_agg(e::text, ' / ') FROM dq_emptied e"));
$lock->run("COMMIT");
$t->sql("SELECT dq_remove('pinned', 'f')");

# ---- another, empty Redis under the same server (F29) -----------------------------------
my $r2 = DqTest::Redis->new(name => 'other');
$t->sql("SELECT dq_resume(q) FROM unnest('{stops,goes,delivered,keyed,fresh,pinned}'::regclass[]) q");
ok($t->wait_state($_, 'running'), "$_ runs") for qw(stops goes delivered keyed fresh);
$t->sql("SELECT dq_offer('stops', 'pending', '1 hour')");
age();
$t->sql("SELECT count(dq_offer('fresh', 'f' || i)) FROM generate_series(1, 5) i");
ok(poll_until(sub { $r->cmd('LLEN', 'fresh') == 5 }), 'five are delivered');
$r->cmd('DEL', 'fresh');
sleep(2.5);
$t->sql("SELECT dq_offer('fresh', 'pending', '1 hour')");
$t->sync;
$t->sql("ALTER SERVER redis OPTIONS (SET socket '" . $r2->socket . "')");
ok(poll_until(sub { $r2->cmd('ZCARD', DqTest::Redis::pending_key('fresh')) == 1 }), 'what is pending comes');
sleep(1);
is($r2->cmd('LLEN', 'fresh'), 0, 'what was consumed does not');
ok($t->wait_state('stops', 'data_loss'), 'and what cannot come is said');
$r2->stop;
$t->finish;
