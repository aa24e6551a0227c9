# A promoted standby waits until the lease of the old primary is over. What is called
# meanwhile meets a queue that is not open yet, not a stranger's: no 55000. G7 G12 E2
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

my $t = DqTest->new;
my $r = $t->redis;
my $primary = $t->node;

$t->queue('q');
$t->queue('qs', "shards '3'");
$t->sql("SELECT dq_offer('q', 'now'), dq_offer('qs', 'now')");
$t->sql("SELECT dq_offer('q', 'later', '1 hour', 'k'), dq_offer('q', 'to go', '1 hour', 'g'), dq_offer('q', 'to move', '1 hour', 'm'),"
	. " dq_offer('q', 'to change', '1 hour', 'c'), dq_offer('q', 'to delete', '1 hour', 'd')");
$t->sync;
ok(poll_until(sub { $r->cmd('LLEN', 'q') == 1 && $r->cmd('LLEN', 'qs#0') + $r->cmd('LLEN', 'qs#1') + $r->cmd('LLEN', 'qs#2') == 1 }), 'one is ready in each');
$r->cmd('ZADD', DqTest::Redis::pending_key('q'), 0, 'no member');
ok(poll_until(sub { $r->cmd('HLEN', 'dq:{q}:bad') == 1 }), 'one is in quarantine');
$t->sql("CREATE FOREIGN TABLE bad (member bytea, reason text) SERVER redis OPTIONS (queue 'q', contents 'quarantine')");

$primary->backup('b');
my $node = PostgreSQL::Test::Cluster->new('standby');
$node->init_from_backup($primary, 'b', has_streaming => 1);
$node->start;
my $s = bless { name => 'standby', redis => $r, node => $node }, 'DqTest';
my $lsn = $t->sql("SELECT pg_current_wal_flush_lsn()");
ok(poll_until(sub { $s->sql("SELECT pg_last_wal_replay_lsn() >= '$lsn'") eq 't' }), 'the standby follows');
$primary->stop('immediate');
# the lease, long enough for all that is asked below
my $owner = sub { my ($n) = @_; return "dq:{$n}:owner" };
my $lease = int(time() * 1000) + 60_000;
$r->cmd('HSET', $owner->($_), 'lease', $lease) for 'q', map { "qs#$_" } 0 .. 2;
$node->promote;
ok(poll_until(sub { my ($rc, $out) = $s->try("SELECT pg_is_in_recovery()"); $rc == 0 && $out eq 'f' }), 'promoted');

for my $when ('at once', 'after its worker has looked')
{
	ok($s->wait_state('q', 'not_owner'), 'the worker waits') if $when ne 'at once';
	for my $q ('q', 'qs')
	{
		my $began = time();
		is($s->sql("SELECT count(*) FROM dq_poll('$q')"), 0, "$when: dq_poll of $q gives nothing, and no error");
		cmp_ok(time() - $began, '<', 5, '... within remove_timeout, generously');
	}
	is($s->sql("SELECT dq_reschedule('q', 'm', '2 hours') IS NULL"), 't', "$when: dq_reschedule has no answer");
	is($s->sql("SELECT dq_remove('q', 'g') IS NULL"), 't', "$when: dq_remove has no answer");
}
is($s->sql("SELECT count(*) FROM q"), 4, 'reading works, without what was recorded as removed');

# a statement on rows has no third answer: it waits as for a shard that does not open
$s->fails("UPDATE q SET payload = 'x' WHERE key = 'c'", '08006', 'UPDATE waits, then says so');
is($s->sql("WITH d AS (DELETE FROM bad RETURNING reason) SELECT count(*) FROM d"), 1, 'what is in quarantine can be discarded');

# ---- calls that are waiting when the lease is over go on ------------------------------------------
my $poller = $s->session;
my $changer = $s->session;
$poller->send("SELECT string_agg(p, ',') FROM dq_poll('q', 1, '60 s') p");
$changer->send("DELETE FROM q WHERE key = 'd'");
sleep(0.5);
$r->cmd('HSET', $owner->($_), 'lease', 0) for 'q', map { "qs#$_" } 0 .. 2;
is($poller->receive(60), 'now', 'a dq_poll that waited gets what is ready');
unlike($changer->receive(60) || '', qr/ERROR/, 'a DELETE that waited is done');
$_->quit for $poller, $changer;
ok($s->wait_state('q', 'running'), 'it is the owner');
ok($s->sync, 'all is relayed');
is($s->sql("SELECT string_agg(key, ',' ORDER BY key) FROM q"), 'c,k,m', 'what was recorded without an answer is done');
is($s->sql("SELECT due_at > now() + '90 min' FROM q WHERE key = 'm'"), 't', 'the reschedule as well');
is($r->cmd('HLEN', 'dq:{q}:bad'), 0, 'and what was discarded is gone');

# ---- but a copy beside its living original is refused (G12) ----------------------------------------
$primary->start;
ok($t->wait_state('q', 'not_owner'), 'the old primary came back');
for my $call ("dq_poll('q')", "dq_remove('q', 'k')", "dq_reschedule('q', 'k', '1 s')")
{
	$t->fails("SELECT $call", '55000', "G12 $call there", like => qr/dq_adopt/);
}
$t->fails("DELETE FROM q", '55000', 'G12 DELETE there', like => qr/dq_adopt/);
$node->stop('fast');
$t->finish(crashes => 1);
