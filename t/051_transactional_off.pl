# Queues with transactional 'off': scripts run in the session, at once; a rollback undoes
# nothing; each call happens once, however many of its answers are lost. J1 G12
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use PostgreSQL::Test::Utils ();
use Test::More;

my $t = DqTest->new(extension => 0);
my $r = $t->redis;
my $proxy = DqTest::Proxy->new($r);

$t->extend('postgres', options => "host '127.0.0.1', port '" . $proxy->port . "', command_timeout '2s'");
$t->queue('q', "transactional 'off', remove_timeout '60s'");
$t->queue('s', "transactional 'off', shards '3'");

sub pending { return join ',', sort $t->pending('q'); }

# ---- at once ---------------------------------------------------------------------------------
is($t->sql("SELECT transactional FROM dq_queues WHERE queue = 'q'::regclass"), 'off', 'the option is in force');
my $s = $t->session;
$s->run("SET client_min_messages = warning");
$s->run("BEGIN");
my $id = $s->run("SELECT dq_offer('q', 'a', '1 hour')");
like($id, qr/^\d+-\d+$/, 'an id');
is(pending(), 'a', 'in Redis before the commit');
$s->run("ROLLBACK");
is(pending(), 'a', 'a rollback does not undo it');
is($t->sql("SELECT count(*) FROM dq_outbox_0"), 0, 'nothing is recorded');
$t->sql("SELECT dq_offer('q', 'b', '1 hour'); SELECT dq_offer('q', 'c', '1 hour')");
is(() = $t->notices =~ /is not transactional/g, 1, 'one NOTICE in a session');
is(pending(), 'a,b,c', 'and the others');

$s->run("BEGIN");
is($s->run("SELECT dq_remove('q', '$id')"), 't', 'removed by id');
is(pending(), 'b,c', '... at once');
is($s->run("SELECT dq_remove('q', 'b')"), 't', 'by payload');
is($s->run("SELECT dq_remove('q', 'b')"), 'f', 'false: nothing is there');
$s->run("ROLLBACK");
is(pending(), 'c', 'a rollback does not bring them back');
is($r->cmd('HLEN', 'dq:{q}:hold'), 0, 'no hold is left');

my $moved = $t->sql("SELECT dq_reschedule('q', 'c', '2 hours')");
is($t->sql("SELECT id FROM q"), $moved, 'rescheduled, under the new id');
is($t->sql("SELECT dq_reschedule('q', 'nothing', '2 hours') IS NULL"), 't', 'NULL: nothing to move');
$t->sql("SELECT dq_remove('q', 'c')");

$t->sql("SELECT dq_offer('q', 'old', '1 hour', 'k'), dq_offer('q', 'new', '1 hour', 'k')");
is(pending(), 'new', 'a key offered again replaces');
$id = $t->sql("SELECT dq_reschedule('q', 'k', '3 hours')");
is($t->sql("SELECT id, key FROM q"), "$id|k", 'rescheduled by key, which stays');
is($t->sql("SELECT dq_remove('q', 'k')"), 't', 'by key');
is(pending(), '', 'gone');

$t->sql("SELECT dq_offer_at('q', 'past', '2001-01-01')");
is($r->cmd('BLPOP', 'q', 10)->[1], 'past', 'an instant in the past is due at once');

$t->sql("SELECT dq_offer('s', 'p' || i, '1 hour', i) FROM generate_series(1, 60) i");
is($t->sql("SELECT count(*), count(DISTINCT shard) FROM s"), '60|3', 'several shards');
is($t->sql("SELECT count(*) FROM generate_series(1, 60) i WHERE dq_remove('s', i)"), 60, '... and out of them');

# ---- a hold of another table of the same queue -------------------------------------------------
$t->queue('held', "queue 'q'");
$t->sql("SELECT dq_offer('q', 'h', '1 hour')");
$s->run("BEGIN");
is($s->run("SELECT dq_remove('held', 'h')"), 't', 'held by an open transaction');
my $w = $t->session;
$w->run("SET client_min_messages = warning");
$w->send("SELECT dq_remove('q', 'h')");
ok(poll_until(sub { $t->sql("SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'") == 1 }),
	'the other one waits for it');
$s->run("ROLLBACK");
is($w->receive, 't', '... and has it after the rollback');
is(pending(), '', 'gone');
$t->sql("DROP FOREIGN TABLE held");

# ---- each once, whatever becomes of answers ----------------------------------------------------
my $n = rounds(150, 1500);
$proxy->mode_now('chance 0.3');
$t->sql("SELECT dq_offer_at('q', 'x' || i, now()) FROM generate_series(1, $n) i", timeout => 300);
$proxy->mode_now('pass');
ok(poll_until(sub { $r->cmd('LLEN', 'q') >= $n }), 'all are delivered');
is_books('offers whose answers are lost: each once', [ map { "x$_" } 1 .. $n ], $r->cmd('LRANGE', 'q', 0, -1));
$r->cmd('DEL', 'q');

$n = rounds(60, 600);
$t->sql("SELECT count(dq_offer('q', 'y' || i, '1 hour')) FROM generate_series(1, $n) i");
$proxy->mode_now('chance 0.2');
is($t->sql("SELECT count(*) FROM generate_series(1, $n / 2) i WHERE dq_remove('q', 'y' || i)", timeout => 300),
	$n / 2, 'removals whose answers are lost: all true');
is($t->sql("SELECT count(*) FROM generate_series($n / 2 + 1, $n) i WHERE dq_reschedule('q', 'y' || i, '2 hours') IS NOT NULL",
		timeout => 300), $n / 2, 'reschedules whose answers are lost');
$proxy->mode_now('pass');
is_books('... each moved once', [ map { "y$_" } $n / 2 + 1 .. $n ], [ $t->pending('q') ]);
is($t->sql("SELECT count(*) FROM q WHERE due_at > now() + '90 min'"), $n / 2, '... to the new instant');
ok(poll_until(sub { $r->cmd('HLEN', 'dq:{q}:hold') == 0 }), 'no hold is left');
ok($r->cmd('HLEN', 'dq:{q}:fence') < 200, 'what is remembered is bounded by the number of processes');

# a later call of the same process: the earlier one that comes late is refused
my %fence = @{ $r->cmd('HGETALL', 'dq:{q}:fence') };
my ($memo) = grep { /^memo:$fence{"node:" . $t->sql("SELECT node FROM dq_source")}:/ } sort keys %fence;
like($fence{$memo}, qr/^\d+\|\d+\|\d+\|\d+$/, 'the last call of a process and its answer');
my ($life, $number) = split /\|/, $fence{$memo};
my ($owner, $process) = $memo =~ /^memo:(\w+):(\d+)$/;
my ($place, $node) = ($r->cmd('HGET', 'dq:{q}:owner', 'place'), $t->sql("SELECT node FROM dq_source"));
my $script = join "\n", map { PostgreSQL::Test::Utils::slurp_file("$FindBin::RealBin/../lua/$_.lua") } qw(lib apply);
# the names of all keys, in order, from where they are listed
my $forms = PostgreSQL::Test::Utils::slurp_file("$FindBin::RealBin/../src/queue/keys.c");
my @keys = map { /\{NULL/ ? 'q' : /\{"(.*?)", "(.*?)"\}/ ? "$1\{q}$2" : () } $forms =~ /\[DQ_KEY_\w+\] = (\{.*?\})/g;

sub call
{
	my ($n) = @_;
	my $answer = $r->cmd('EVAL', $script, scalar(@keys), @keys, '', 0, $owner, "!$process", "$life|$n", $place, 0,
		$node, '=', 1, 1, 'o', 4102444800000, pack('n Q>', 0, 0) . 'twid', 'late');
	return ref $answer ? join ',', @$answer[ 0, 6, 7 ] : $answer;
}
my $before = $r->cmd('ZCARD', 'redisson_delay_queue_timeout:{q}');
my $version = $r->cmd('HGET', 'dq:{q}:fence', "ver:$owner");
is(call($number - 1), '3,0,0', 'an earlier call that comes late is refused');
is(call($number), '0,' . join(',', (split /\|/, $fence{$memo})[ 2, 3 ]), 'the same one is answered the same');
is($r->cmd('ZCARD', 'redisson_delay_queue_timeout:{q}'), $before, '... and nothing is written');
is(call($number + 1), '0,1,0', 'the next one is executed');
is($r->cmd('ZCARD', 'redisson_delay_queue_timeout:{q}'), $before + 1, '... once');
is($r->cmd('HGET', 'dq:{q}:fence', "ver:$owner"), $version, 'calls keep no worker from entering');

# ---- Redis away ---------------------------------------------------------------------------------
$t->sql("CREATE TABLE doc (id int); CREATE TRIGGER r AFTER DELETE ON doc FOR EACH ROW"
	  . " EXECUTE FUNCTION dq_remove_trigger('q', 'id'); INSERT INTO doc VALUES (7);"
	  . " SELECT dq_offer('q', 'of the row', '1 hour', 7)");
$t->sql("ALTER FOREIGN TABLE q OPTIONS (SET remove_timeout '1s')");
$proxy->mode_now('refuse');
$t->fails("SELECT dq_offer('q', 'z', '1 hour')", '08006', 'an offer without Redis');
$t->fails("SELECT dq_remove('q', 'y1')", '08006', 'a removal without Redis');
$t->fails("SELECT dq_reschedule('q', 'y1', '1 hour')", '08006', 'a reschedule without Redis');
$t->sql("DELETE FROM doc");
pass('a trigger that removes never raises');
$proxy->mode_now('hole');
$t->fails("SELECT dq_offer('q', 'z', '1 hour')", '08006', 'an offer to a Redis that is silent', like => qr/answer/);
$proxy->mode_now('pass');
ok(poll_until(sub { !grep { $_ eq 'of the row' } $t->pending('q') }), '... its removal was recorded, and comes');

# ---- a copy writes nothing -----------------------------------------------------------------------
$t->sql("CREATE DATABASE other");
$t->extend('other', options => "host '127.0.0.1', port '" . $proxy->port . "'");
$t->queue('q', "transactional 'off'", db => 'other');
$t->fails("SELECT dq_offer('q', 'stranger', '1 hour')", '55000', 'G12 the queue belongs to another database',
	db => 'other', like => qr/dq_adopt/);
$t->fails("SELECT dq_remove('q', 'y60')", '55000', '... removals, too', db => 'other');
$t->sql("DROP FOREIGN TABLE q", db => 'other');
$t->queue('p', "queue 'q', transactional 'off', role 'producer'", db => 'other');
$t->sql("SELECT dq_offer('p', 'of a producer', '1 hour')", db => 'other');
ok((grep { $_ eq 'of a producer' } $t->pending('q')), 'a producer offers');
$t->fails("SELECT dq_remove('p', 'of a producer')", '55000', '... and does not remove', db => 'other');

$t->finish;
