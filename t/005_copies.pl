# A copy never acts on its original's queues: dump, schema-only dump, template,
# copied data directory; dq_adopt. G12 K2 K5
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use PostgreSQL::Test::RecursiveCopy;
use Test::More;
use Time::HiRes qw(time sleep);

my $t = DqTest->new(extension => 0);
my $r = $t->redis;
my $node = $t->node;

$t->sql("CREATE DATABASE app");
$t->extend('app');
my %app = (db => 'app');
$t->queue('q', undef, %app);
$t->queue('fresh', undef, %app);
$t->sql("SELECT dq_offer('q', 'original-' || i, '1 hour', i) FROM generate_series(1, 5) i", %app);
$t->sync(%app);
is($r->cmd('ZCARD', 'redisson_delay_queue_timeout:{q}'), 5, 'the original has five pending');

my $dir = PostgreSQL::Test::Utils::tempdir();
sub dump_restore
{
	my ($db, @args) = @_;

	PostgreSQL::Test::Utils::run_log([ 'pg_dump', @args, '-f', "$dir/$db.sql", '-d', $node->connstr('app') ]) or die 'pg_dump failed';
	$t->sql("CREATE DATABASE $db");
	return PostgreSQL::Test::Utils::run_log([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr($db), '-f', "$dir/$db.sql" ]);
}

sub is_a_copy
{
	my ($db) = @_;
	my %c = (db => $db);

	# dq_stats tells within a few seconds
	ok($t->wait_state('q', 'not_owner', %c), "$db: dq_stats says not_owner")
	  or diag($t->sql("SELECT queue, state, last_error FROM dq_stats", %c));
	ok(poll_until(sub { $t->sql("SELECT owner_source IS NOT NULL AND lease_until IS NOT NULL FROM dq_queues WHERE queue = 'q'::regclass", %c) eq 't' }),
		"$db: dq_queues says whose it is");
	my $id = $t->sql("SELECT dq_offer('q', '$db offers', '0 s')", %c);
	like($id, qr/^\d+-\d+$/, "$db: dq_offer goes on recording");
	$t->fails("SELECT dq_remove('q', 1)", '55000', "$db: dq_remove is refused", like => qr/dq_adopt/, %c);
	is($t->sql("SELECT count(*) FROM q WHERE payload LIKE 'original%'", %c), 5, "$db: reads work");
	$t->sql("SELECT dq_sync('q', '300 ms')", %c);
	sleep(1.5);
	is($r->cmd('LLEN', 'q'), 0, "$db: nothing was sent or moved");
	is($r->cmd('ZCARD', 'redisson_delay_queue_timeout:{q}'), 5, "$db: nothing was removed");
	# a bridge that made way for CREATE DATABASE ... TEMPLATE comes back after a while
	ok($t->wait_state('q', 'running', db => 'app'), "$db: the original runs on");
}

ok(dump_restore('dumped'), 'K5 a dump restores');
is($t->sql("SELECT count(*) FROM pg_foreign_table", db => 'dumped'), 2, 'K5 the definitions survive');
is_a_copy('dumped');
ok(dump_restore('schema_only', '--schema-only'), 'K5 a schema-only dump restores');
is_a_copy('schema_only');
ok(PostgreSQL::Test::Utils::run_log([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr('postgres'), '-c', 'CREATE DATABASE again' ]), 'a third one');
ok(PostgreSQL::Test::Utils::run_log([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr('again'), '-f', "$dir/dumped.sql" ]), 'K5 restored twice');

my $start = time();
$t->sql("CREATE DATABASE templated TEMPLATE app");
cmp_ok(time() - $start, '<', 3, 'G10 CREATE DATABASE ... TEMPLATE of a served database within 2 s');
$t->bridge_pid(db => 'templated', deadline => 10) or $t->sql("SELECT dq_worker_start()", db => 'templated');
is_a_copy('templated');

# the original still works after all that
$t->sql("SELECT dq_offer('q', 'still here')", %app);
is(($r->cmd('BLPOP', 'q', 10) || [])->[1], 'still here', 'the original delivers');

# a queue the copy makes for itself is its own
$t->queue('mine', undef, db => 'dumped');
$t->sql("SELECT dq_offer('mine', 'own queue of the copy')", db => 'dumped');
ok(poll_until(sub { $r->cmd('LLEN', 'mine') == 1 }), 'a copy serves queues that nobody else owns');

# ---- dq_adopt -----------------------------------------------------------------
$t->fails("SELECT * FROM dq_adopt()", '55006', 'dq_adopt is refused while the owner lives', db => 'dumped');
$t->sql("CREATE ROLE nobody_special LOGIN");
$t->fails("SELECT * FROM dq_adopt()", '42501', 'dq_adopt: owner of the queues or superuser', db => 'dumped', user => 'nobody_special');
$t->sql("DROP DATABASE app");
# a server that is not there does not stand in the way of the other (G9)
$t->sql("CREATE SERVER away FOREIGN DATA WRAPPER dq_bridge OPTIONS (socket '/nonexistent/s'); CREATE FOREIGN TABLE a (payload text) SERVER away", db => 'dumped');
$t->fails("SELECT * FROM dq_adopt('away')", '08001', 'dq_adopt of a server that is not there', db => 'dumped');
$t->fails("SELECT * FROM dq_adopt('awy')", '42704', 'dq_adopt of no server', db => 'dumped', like => qr/HINT:.*"away"/s);
my ($warned, $why);
ok(poll_until(sub { my ($rc, $out, $err) = $t->try("SELECT * FROM dq_adopt()", db => 'dumped'); ($warned, $why) = ($err =~ /WARNING:.*"away"/, $err); $rc == 0 && $out =~ /\bq\b/ }, 120),
	'with the original gone dq_adopt takes the queues');
ok($warned, '... and says which server it could not ask') or diag($why);
$t->sql('DROP SERVER away CASCADE', db => 'dumped');
ok($t->wait_state('q', 'running', db => 'dumped'), 'dq_stats of the adopter: running');
ok(poll_until(sub { $r->cmd('LLEN', 'q') == 1 }), 'what the copy had recorded arrives');
is(join(',', $r->ready('q')), 'dumped offers', 'once');
is($t->sql("SELECT dq_remove('q', 1)", db => 'dumped'), 't', 'it can remove');
is($r->cmd('ZCARD', 'redisson_delay_queue_timeout:{q}'), 4, 'and did');
is($t->stat('q', 'state', db => 'schema_only'), 'not_owner', 'the other copy is still none');

# ---- a copied data directory -----------------------------------------------------
$node->stop('fast');
my $copy = PostgreSQL::Test::Cluster->new('copy');
PostgreSQL::Test::RecursiveCopy::copypath($node->data_dir, $copy->data_dir);
$copy->append_conf('postgresql.conf', "port = " . $copy->port . "\nunix_socket_directories = '" . $copy->host . "'\n");
chmod 0700, $copy->data_dir;
$node->start;
ok($t->wait_state('q', 'running', db => 'dumped'), 'the original runs');
$copy->start;
my $c = bless { name => 'copy', redis => $r, node => $copy }, 'DqTest';
ok($c->wait_state('q', 'not_owner', db => 'dumped'), 'copied data directory: not_owner')
  or diag($c->sql("SELECT queue, state, last_error FROM dq_stats", db => 'dumped'));
$c->fails("SELECT dq_remove('q', 2)", '55000', 'copied data directory: dq_remove refused', like => qr/dq_adopt/, db => 'dumped');
$c->sql("SELECT dq_offer('q', 'from the copy')", db => 'dumped');
sleep(2);
is($r->cmd('LLEN', 'q'), 1, 'copied data directory: sends nothing');
$t->sql("SELECT dq_offer('q', 'from the original')", db => 'dumped');
ok(poll_until(sub { $r->cmd('LLEN', 'q') == 2 }), 'the original goes on');
$node->stop('fast');
ok(poll_until(sub { my ($rc, $out) = $c->try("SELECT * FROM dq_adopt()", db => 'dumped'); $rc == 0 && $out =~ /\bq\b/ }, 120),
	'with the original stopped the copied directory adopts');
ok(poll_until(sub { $r->cmd('LLEN', 'q') == 3 }), 'and works');
is(join(',', $r->ready('q')), 'dumped offers,from the original,from the copy', 'each once');
# the original comes back: it is a copy now
$node->start;
ok($t->wait_state('q', 'not_owner', db => 'dumped'), 'the original that comes back is not the owner any more');
$copy->stop('fast');
$t->finish;
