# The first transaction that uses the extension is rolled back, and had come to Redis
# by hand, without a worker: the database is still the one that owns its queues. G12 G1 G2
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;

my $t = DqTest->new(conf => "dq_bridge.enabled = off\n");
my $r = $t->redis;

sub owner { my ($n) = @_; return $r->cmd('HGET', "dq:{$n}:owner", 'source'); }

sub nobody_works
{
	return $t->sql("SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'dq_bridge%' AND datname IS NOT NULL") == 0;
}

# ---- rolled back as a whole, and to a savepoint ----------------------------------------------
$t->queue('q');
$t->queue('other');
ok(nobody_works(), 'no worker');
$t->sql("BEGIN; SELECT dq_offer('q', 'never'); SELECT dq_transfer('q'); ROLLBACK");
my $first = owner('q');
like($first, qr/^[0-9a-f]{32}$/, 'the shard was entered by a transaction that is rolled back');
$t->sql("BEGIN; SAVEPOINT s; SELECT dq_offer('other', 'never'); SELECT dq_transfer('other'); ROLLBACK TO s; COMMIT");
is(owner('other'), $first, 'made again in a savepoint, rolled back to: the same source');
is($t->sql("SELECT count(*) FROM dq_source"), 0, 'and it is not kept anywhere yet');

is($t->sql("BEGIN; SELECT dq_remove('q', 'nothing'); COMMIT"), 'f', 'then a certain answer, by hand');
$t->sql("SELECT dq_offer('q', 'due', '0', 'k')");
is($t->sql("SELECT dq_sync('q')"), 't', 'by hand: relayed');
is($t->sql("SELECT dq_transfer('q')"), 1, 'by hand: moved');
is(owner('q'), $first, 'the owner is the same');
is($t->sql("SELECT source FROM dq_source"), $first, 'and it is this database');

# ---- a worker that comes then -------------------------------------------------------------------
$t->sql("ALTER SYSTEM SET dq_bridge.enabled = on");
$t->node->reload;
ok($t->wait_state('q', 'running'), 'a worker goes on') or diag($t->sql("SELECT state, last_error FROM dq_stats"));
ok($t->wait_state('other', 'running'), 'in all queues') or diag($t->sql("SELECT state, last_error FROM dq_stats"));
$t->sql("SELECT dq_offer('q', 'with a worker')");
ok(poll_until(sub { $r->cmd('LLEN', 'q') == 2 }), 'delivered');
is_books('each once', [ 'due', 'with a worker' ], [ $r->ready('q') ]);

# ---- copies have an identity of their own, and it is as lasting --------------------------------
$t->sql("ALTER SYSTEM SET dq_bridge.enabled = off");
$t->node->reload;
ok(poll_until(\&nobody_works), 'no worker again');
$t->sql("CREATE DATABASE copy TEMPLATE postgres");
$t->sql("CREATE SERVER own FOREIGN DATA WRAPPER dq_bridge OPTIONS (socket '" . $r->socket . "', key_prefix 'copy:')", db => 'copy');
$t->queue('cq', "queue 'q'", server => 'own', db => 'copy');
$t->sql("BEGIN; SELECT dq_offer('cq', 'never'); SELECT dq_transfer('cq'); ROLLBACK", db => 'copy');
my $copy = owner('copy:q');
like($copy, qr/^[0-9a-f]{32}$/, 'a copy by CREATE DATABASE, its first use rolled back');
isnt($copy, $first, 'it is another source');
is($t->sql("SELECT dq_remove('cq', 'nothing')", db => 'copy'), 'f', 'it owns what it entered');
is($t->sql("SELECT source FROM dq_source ORDER BY born DESC LIMIT 1", db => 'copy'), $copy, 'under the same name');

# an extension that is made anew is a stranger: its outbox is another one
$t->sql("DROP EXTENSION dq_bridge CASCADE", db => 'copy');
$t->extend('copy', options => "socket '" . $r->socket . "', key_prefix 'copy:'");
$t->queue('q', undef, db => 'copy');
$t->fails("SELECT dq_remove('q', 'nothing')", '55000', 'made anew it is another source', db => 'copy', like => qr/dq_adopt/);
$t->finish;
