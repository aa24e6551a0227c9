# Copies of the data directory: a clone beside its original, started again when the
# original is gone and the clone has written more than it; a moved directory, also
# after a crash; a directory put back to an earlier state; point-in-time recovery;
# removals while a promoted standby waits for the old lease; FLUSHALL while a copy
# watches. G12 G7 H12 R3 K5; PO 5
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use PostgreSQL::Test::RecursiveCopy;
use Test::More;
use Time::HiRes qw(time sleep);

my $t = DqTest->new(conf => "archive_mode = off\n");
my $r = $t->redis;
my $node = $t->node;

sub pending { return sort $t->pending('q'); }

# Another server in a copy of a data directory
sub server_in
{
	my ($name, $dir) = @_;
	my $copy = PostgreSQL::Test::Cluster->new($name);

	PostgreSQL::Test::RecursiveCopy::copypath($dir, $copy->data_dir);
	$copy->append_conf('postgresql.conf',
		"port = " . $copy->port . "\nunix_socket_directories = '" . $copy->host . "'\n");
	chmod 0700, $copy->data_dir;
	return bless { name => $name, redis => $r, node => $copy }, 'DqTest';
}

sub lease_over
{
	return poll_until(sub {
		my $lease = $r->cmd('HGET', 'dq:{q}:owner', 'lease') || 0;
		return $lease < now_ms() });
}

$t->queue('q');
$t->sql("SELECT dq_offer('q', 'first' || i, '1 hour') FROM generate_series(1, 5) i");
$t->sync;

# ---- F26: a clone beside its original --------------------------------------------------
$node->backup('clone');
my $c = do {
	my $copy = PostgreSQL::Test::Cluster->new('clone');
	$copy->init_from_backup($node, 'clone');
	bless { name => 'clone', redis => $r, node => $copy }, 'DqTest';
};
$c->node->start;
ok($c->wait_state('q', 'not_owner'), 'a clone beside its original: not_owner');
$c->sql("SELECT dq_offer('q', 'of the clone', '1 hour')");
$c->fails("SELECT dq_remove('q', 'first1')", '55000', 'and may not remove', like => qr/dq_adopt/);
$t->sql("SELECT dq_offer('q', 'after' || i, '1 hour') FROM generate_series(1, 5) i");
$t->sync;
$node->stop('fast');
# it writes more WAL than the original had, and takes more transaction ids
$c->sql("CREATE TABLE filler AS SELECT g, repeat('x', 1000) FROM generate_series(1, 20000) g");
$c->sql("SELECT dq_offer('q', 'of the clone, later $_', '1 hour')") for 1 .. 20;
ok(lease_over(), 'the original\'s lease is over');
sleep(2);
is($c->stat('q', 'state'), 'not_owner', 'the clone stays none when the original is gone');
$c->node->restart;
ok($c->wait_state('q', 'not_owner'), 'F26 and after a restart');
sleep(2.5);
is($c->stat('q', 'state'), 'not_owner', 'F26 for good');
like($c->stat('q', 'last_error'), qr/copy/, 'and says why');
is_books('F26 it has written nothing', [ map { ("first$_", "after$_") } 1 .. 5 ], [ pending() ]);
$c->node->stop('fast');
$node->start;
ok($t->wait_state('q', 'running'), 'the original goes on where it was')
  or diag($t->sql("SELECT state, last_error FROM dq_stats"));
$node->stop('fast');
ok(lease_over(), 'gone again');
# a clone whose workers did not run when it started: no life tells where it began
my $quiet = do {
	my $copy = PostgreSQL::Test::Cluster->new('quiet');
	$copy->init_from_backup($node, 'clone');
	$copy->append_conf('postgresql.conf', "dq_bridge.enabled = off\n");
	bless { name => 'quiet', redis => $r, node => $copy }, 'DqTest';
};
$quiet->node->start;
$quiet->sql("CREATE TABLE filler AS SELECT g, repeat('x', 1000) FROM generate_series(1, 20000) g");
$quiet->sql("SELECT dq_offer('q', 'of the quiet clone $_', '1 hour')") for 1 .. 20;
$quiet->node->append_conf('postgresql.conf', "dq_bridge.enabled = on\n");
$quiet->node->restart;
ok($quiet->wait_state('q', 'not_owner'), 'a clone that was quiet at first: not_owner');
sleep(2.5);
is($quiet->stat('q', 'state'), 'not_owner', 'for good');
is_books('it has written nothing', [ map { ("first$_", "after$_") } 1 .. 5 ], [ pending() ]);
$quiet->node->stop('fast');
$c->node->start;
ok(poll_until(sub { my ($rc, $out) = $c->try("SELECT * FROM dq_adopt()"); $rc == 0 && $out =~ /\bq\b/ }), 'the clone adopts');
ok($c->wait_state('q', 'running'), 'and runs') or diag($c->sql("SELECT state, last_error FROM dq_stats"));
ok($c->sync, 'what it had recorded is handed over');
is_books('F26 none of the clone\'s tasks is lost',
	[ (map { ("first$_", "after$_") } 1 .. 5), 'of the clone', map { "of the clone, later $_" } 1 .. 20 ], [ pending() ]);
$c->node->stop('fast');
$node->start;
ok($t->wait_state('q', 'not_owner'), 'now the original is not the owner');
ok(lease_over(), 'the clone\'s lease is over');
ok(poll_until(sub { my ($rc, $out) = $t->try("SELECT * FROM dq_adopt()"); $rc == 0 && $out =~ /\bq\b/ }), 'the original takes it back');
ok($t->wait_state('q', 'running'), 'and runs') or diag($t->sql("SELECT state, last_error FROM dq_stats"));
$r->cmd('DEL', DqTest::Redis::pending_key('q'));

# ---- the same server elsewhere: recognised without dq_adopt -------------------------------
sub moves
{
	my ($how, $name) = @_;

	$t->sql("SELECT dq_offer('q', 'before $how', '1 hour')");
	$t->sync;
	# no time for a mark: what is in Redis is newer than anything stored
	$t->sql("SELECT dq_offer('q', 'just before $how', '1 hour')");
	$t->sync;
	$t->node->stop($how);
	my $m = server_in($name, $t->node->data_dir);
	$m->node->start;
	$m->sql("SELECT dq_offer('q', 'after $how', '1 hour')");
	ok($m->wait_state('q', 'running'), "moved after a stop $how: recognised as itself")
	  or diag($m->sql("SELECT state, last_error FROM dq_stats"));
	ok($m->sync, 'relays');
	is_books("moved, $how: nothing lost, nothing twice", [ "after $how", "before $how", "just before $how" ], [ pending() ]);
	$r->cmd('DEL', DqTest::Redis::pending_key('q'));
	return $m;
}

$t = moves('fast', 'moved');
$t = moves('immediate', 'crashed');
$node = $t->node;

# ---- put back to an earlier state in the same place ------------------------------------------
$node->stop('fast');
my $earlier = PostgreSQL::Test::Utils::tempdir() . '/earlier';
system('cp', '-a', $node->data_dir, $earlier) == 0 or die;
$node->start;
$t->sql("SELECT dq_offer('q', 'before it was put back', '1 hour')");
$t->sync;
$node->stop('fast');
system('find', $node->data_dir, '-mindepth', 1, '-delete') == 0 or die;
system('cp', '-a', "$earlier/.", $node->data_dir) == 0 or die;
$node->start;
$t->sql("CREATE TABLE filler AS SELECT g, repeat('x', 1000) FROM generate_series(1, 20000) g");
$t->sql("SELECT dq_offer('q', 'after it was put back $_', '1 hour')") for 1 .. 20;
ok($t->wait_state('q', 'not_owner'), 'put back in the same place: the fence knows more than it');
sleep(2.5);
is($t->stat('q', 'state'), 'not_owner', 'also when it has written more than that');
ok(lease_over(), 'the lease is over');
ok(poll_until(sub { my ($rc, $out) = $t->try("SELECT * FROM dq_adopt()"); $rc == 0 && $out =~ /\bq\b/ }), 'dq_adopt takes it on');
ok($t->sync, 'and what was recorded arrives');
my %have = map { $_ => 1 } pending();
is(scalar(grep { $have{"after it was put back $_"} } 1 .. 20), 20, 'all of it');
$r->cmd('DEL', DqTest::Redis::pending_key('q'));

# ---- point-in-time recovery beside the original ------------------------------------------------
$node->backup('pitr');
my $p = do {
	my $copy = PostgreSQL::Test::Cluster->new('pitr');
	$copy->init_from_backup($node, 'pitr');
	$copy->append_conf('postgresql.conf', "restore_command = 'false'\nrecovery_target_timeline = 'latest'\n");
	$copy->set_recovery_mode;
	bless { name => 'pitr', redis => $r, node => $copy }, 'DqTest';
};
$p->node->start;
ok(poll_until(sub { my ($rc, $out) = $p->try("SELECT pg_is_in_recovery()"); $rc == 0 && $out eq 'f' }), 'recovered to a point');
ok($p->wait_state('q', 'not_owner'), 'point-in-time recovery beside the original: not_owner');
# as long as it does not know better it may be a promoted standby
ok(poll_until(sub { my ($rc, $out, $err) = $p->try("SELECT dq_remove('q', 'x')"); $rc != 0 && $err =~ /55000.*dq_adopt/s }),
	'when the original is seen to live, removing raises 55000');
$p->sql("SELECT dq_offer('q', 'of the recovered one', '1 hour')");
$t->sql("SELECT dq_offer('q', 'of the original', '1 hour')");
$t->sync;
sleep(1.5);
is(join(',', pending()), 'of the original', 'it writes nothing');
$p->node->stop('fast');

# ---- F28: removals while a promoted standby waits for the old lease ----------------------------
$node->backup('standby');
my $s = do {
	my $copy = PostgreSQL::Test::Cluster->new('standby');
	$copy->init_from_backup($node, 'standby', has_streaming => 1);
	bless { name => 'standby', redis => $r, node => $copy }, 'DqTest';
};
$s->node->start;
$t->sql(<<'SQL');
CREATE TABLE orders (id int PRIMARY KEY);
CREATE TRIGGER gone AFTER DELETE ON orders FOR EACH ROW EXECUTE FUNCTION dq_remove_trigger('q', 'id');
INSERT INTO orders VALUES (1), (2);
SELECT dq_offer('q', 'order ' || id, '1 hour', id) FROM orders;
SQL
$t->sync;
my $lsn = $t->sql("SELECT pg_current_wal_flush_lsn()");
ok(poll_until(sub { $s->sql("SELECT pg_last_wal_replay_lsn() >= '$lsn'") eq 't' }), 'the standby has it');
$node->stop('immediate');
$s->node->promote;
ok(poll_until(sub { my ($rc, $out) = $s->try("SELECT pg_is_in_recovery()"); $rc == 0 && $out eq 'f' }), 'promoted');
{
	my ($rc, $out, $err) = $s->try("DELETE FROM orders WHERE id = 1");
	is($rc, 0, 'F28 a DELETE with the remove trigger succeeds while the old lease is alive') or diag($err);
	($rc, $out, $err) = $s->try("SELECT dq_remove('q', 2) IS NOT TRUE");
	is("$rc $out", '0 t', 'F28 dq_remove has no certain answer, and no error') or diag($err);
}
ok($s->wait_state('q', 'running'), 'the promoted server takes over');
ok($s->sync, 'relays');
is(join(',', pending()), 'of the original', 'F28 both removals were applied');

# ---- FLUSHALL while a copy watches ---------------------------------------------------------------
$t = $s;
$t->sql("SELECT dq_offer('q', 'mine $_', '1 hour')") for 1 .. 3;
$t->sync;
my $dump = PostgreSQL::Test::Utils::tempdir() . '/dump.sql';
PostgreSQL::Test::Utils::run_log([ 'pg_dump', '-f', $dump, '-d', $t->node->connstr('postgres') ]) or die;
$t->sql("CREATE DATABASE restored");
PostgreSQL::Test::Utils::run_log([ 'psql', '-X', '-q', '-d', $t->node->connstr('restored'), '-f', $dump ]);
$t->bridge_pid(db => 'restored') or $t->sql("SELECT dq_worker_start()", db => 'restored');
ok($t->wait_state('q', 'not_owner', db => 'restored'), 'a restored dump watches');
for my $i (1 .. 5)
{
	$r->cmd('FLUSHALL');
	ok(poll_until(sub { my @p = pending(); @p == 4 }), "FLUSHALL $i: the owner heals it");
}
is($t->stat('q', 'state'), 'running', 'the owner is still the owner');
is($t->stat('q', 'state', db => 'restored'), 'not_owner', 'the copy never was');

$t->finish(crashes => 1);
