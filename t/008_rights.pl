# Rights: those of the foreign table and nothing else, one test per function and
# right, granted and not. K2 K3 I5; F2
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
$t->sql(<<'SQL');
CREATE ROLE bob LOGIN;
CREATE ROLE owner LOGIN;
CREATE ROLE boss SUPERUSER LOGIN;
CREATE ROLE watcher LOGIN;
GRANT pg_monitor TO watcher;
REVOKE ALL ON ALL TABLES IN SCHEMA public FROM PUBLIC;
GRANT SELECT ON dq_stats, dq_workers, dq_queues TO PUBLIC;
CREATE TABLE t (id int, delay interval DEFAULT '1 hour');
GRANT INSERT, UPDATE, DELETE, SELECT ON t TO bob;
CREATE TRIGGER o AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION dq_offer_trigger('q', 'delay', 'id');
CREATE TRIGGER d AFTER DELETE ON t FOR EACH ROW EXECUTE FUNCTION dq_remove_trigger('q', 'id');
SQL
my %bob = (user => 'bob');

# [ what, statement, the rights it needs ]
my @cases = (
	[ 'dq_offer', "SELECT dq_offer('q', 'x', '1 hour')", 'INSERT' ],
	[ 'dq_offer(anyelement)', "SELECT dq_offer('q', 1, '1 hour')", 'INSERT' ],
	[ 'dq_offer_at', "SELECT dq_offer_at('q', 'x', '2100-01-01')", 'INSERT' ],
	[ 'dq_offer_at(anyelement)', "SELECT dq_offer_at('q', 1, '2100-01-01')", 'INSERT' ],
	[ 'dq_remove', "SELECT dq_remove('q', 'nothing')", 'DELETE, SELECT' ],
	[ 'dq_remove(anyelement)', "SELECT dq_remove('q', 4711)", 'DELETE, SELECT' ],
	[ 'SELECT', "SELECT count(*) FROM q", 'SELECT' ],
	[ 'dq_offer_trigger', "INSERT INTO t VALUES (1)", 'INSERT' ],
	[ 'dq_remove_trigger', "DELETE FROM t", 'DELETE, SELECT' ]);
for (@cases)
{
	my ($what, $sql, $rights) = @$_;

	$t->sql("REVOKE ALL ON q FROM bob");
	$t->sql("INSERT INTO t VALUES (99)") if $what =~ /remove_trigger/;
	$t->fails($sql, '42501', "$what without any right", %bob);
	for my $right (split /, /, $rights)
	{
		# every needed right but one
		my $others = join ', ', grep { $_ ne $right } 'INSERT', 'SELECT', 'UPDATE', 'DELETE';
		next if $right eq 'SELECT' && $what eq 'dq_remove_trigger';
		$t->sql("REVOKE ALL ON q FROM bob; GRANT $others ON q TO bob");
		$t->fails($sql, '42501', "$what without $right", %bob);
	}
	$t->sql("REVOKE ALL ON q FROM bob; GRANT $rights ON q TO bob");
	my ($rc, $out, $err) = $t->try($sql, %bob);
	is($rc, 0, "$what with $rights") or diag($err);
}
$t->sql("REVOKE ALL ON q FROM bob");

# dq_sync: any right suffices, none does not
$t->fails("SELECT dq_sync('q')", '42501', 'dq_sync without any right', %bob);
for my $right ('INSERT', 'SELECT', 'DELETE', 'UPDATE')
{
	$t->sql("GRANT $right ON q TO bob");
	is($t->sql("SELECT dq_sync('q') IS NOT NULL", %bob), 't', "dq_sync with $right");
	$t->sql("REVOKE ALL ON q FROM bob");
}

# what is the owner's
$t->sql("GRANT ALL ON q TO bob");
for my $f ("dq_transfer('q')", "dq_pause('q')", "dq_resume('q')")
{
	$t->fails("SELECT $f", '42501', "$f is the owner's", %bob);
}
$t->sql("GRANT USAGE ON FOREIGN SERVER redis TO owner; GRANT CREATE ON SCHEMA public TO owner");
$t->sql("CREATE FOREIGN TABLE owned (payload text, due_at timestamptz) SERVER redis", user => 'owner');
for my $f ("dq_transfer('owned')", "dq_pause('owned')", "dq_resume('owned')")
{
	my ($rc, $out, $err) = $t->try("SELECT $f", user => 'owner');
	is($rc, 0, "$f by the owner") or diag($err);
}
$t->sql("SELECT dq_offer('owned', 'of an ordinary user')", user => 'owner');
ok($r->cmd('BLPOP', 'owned', 10), 'a server owned by a superuser works without a password for a queue of an ordinary user');

# creating
$t->fails("SELECT dq_create_queue('nope')", '42501', 'dq_create_queue without USAGE on the server', %bob);
$t->fails("CREATE SERVER mine FOREIGN DATA WRAPPER dq_bridge", '42501', 'CREATE SERVER without USAGE on the wrapper', %bob);
$t->sql("GRANT USAGE ON FOREIGN DATA WRAPPER dq_bridge TO owner");
$t->fails("CREATE SERVER mine FOREIGN DATA WRAPPER dq_bridge OPTIONS (socket '/tmp/x')", '42501', 'socket is a superuser\'s option', user => 'owner');
$t->fails("CREATE SERVER mine FOREIGN DATA WRAPPER dq_bridge OPTIONS (password_required 'false')", '42501', 'password_required false is a superuser\'s', user => 'owner');
$t->sql("CREATE SERVER mine FOREIGN DATA WRAPPER dq_bridge OPTIONS (host '127.0.0.1', port '" . $r->port . "')", user => 'owner');
$t->sql("CREATE FOREIGN TABLE mine_q (payload text, due_at timestamptz) SERVER mine", user => 'owner');
{
	my ($rc, $out, $err) = $t->try("SELECT count(*) FROM mine_q", user => 'owner');
	like($err, qr/(42501|28P01|2F003):/, 'a server of an ordinary user needs a password');
}
$r->cmd('ACL', 'SETUSER', 'ordinary', 'on', '>secret', '~*', '&*', '+@all');
$t->sql("CREATE USER MAPPING FOR owner SERVER mine OPTIONS (username 'ordinary', password 'secret')", user => 'owner');
is($t->sql("SELECT count(*) FROM mine_q", user => 'owner'), 0, 'and works with one');
$t->sql("ALTER SERVER mine OPTIONS (ADD password_required 'false')", user => 'boss');
is($t->sql("SELECT count(*) FROM mine_q", user => 'owner'), 0, 'a superuser may lift it');

# others use the queue with the owner's mapping
$t->sql("GRANT SELECT ON mine_q TO bob", user => 'owner');
is($t->sql("SELECT count(*) FROM mine_q", %bob), 0, 'no user mapping of one\'s own is needed');

# workers
for my $f ('dq_worker_stop()', 'dq_worker_start()')
{
	$t->fails("SELECT $f", '42501', "$f: not everybody", %bob);
}
$t->sql("GRANT pg_signal_backend TO bob");
for my $f ('dq_worker_stop()', 'dq_worker_start()')
{
	is($t->sql("SELECT $f IS NOT NULL", %bob), 't', "$f: pg_signal_backend");
}
$t->sql("REVOKE pg_signal_backend FROM bob");
ok($t->bridge_pid, 'the worker is back');

# what the extension keeps is nobody's
for my $rel (split /\n/, $t->sql("SELECT c.oid::regclass FROM pg_class c JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'e' JOIN pg_extension e ON e.oid = d.refobjid AND d.refclassid = 'pg_extension'::regclass WHERE extname = 'dq_bridge' AND relkind IN ('r', 'S')"))
{
	$t->fails("SELECT * FROM $rel", '42501', "K2 $rel cannot be read by others", %bob);
}
# views
$t->sql("REVOKE ALL ON q FROM bob");
is($t->sql("SELECT count(*) FROM dq_stats WHERE queue = 'q'::regclass", %bob), 0, 'dq_stats hides queues one has no right on');
is($t->sql("SELECT count(*) FROM dq_queues WHERE queue = 'q'::regclass", %bob), 0, 'dq_queues too');
is($t->sql("SELECT count(*) FROM dq_stats WHERE queue = 'q'::regclass", user => 'watcher'), 1, 'pg_monitor sees every queue');
is($t->sql("SELECT count(*) FROM dq_queues WHERE queue = 'q'::regclass", user => 'watcher'), 1, 'in dq_queues too');
cmp_ok($t->sql("SELECT count(*) FROM dq_workers", user => 'watcher'), '>', 0, 'pg_monitor sees the workers');
$t->sql("GRANT INSERT ON q TO bob");
is($t->sql("SELECT count(*) FROM dq_stats WHERE queue = 'q'::regclass", %bob), 1, 'with a right one sees it');

# dq_adopt
$t->fails("SELECT * FROM dq_adopt('redis')", '42501', 'dq_adopt: owner or superuser', %bob);

# ---- I5: read only -----------------------------------------------------------------------------
my $evals = $r->cmd('ZCARD', 'redisson_delay_queue_timeout:{q}');
for my $f ("dq_offer('q', 'x')", "dq_offer_at('q', 'x', now())", "dq_remove('q', 'x')", "dq_transfer('q')", "dq_pause('q')", "dq_resume('q')", "dq_create_queue('ro', 'redis')")
{
	$t->fails("BEGIN READ ONLY; SELECT $f", '25006', "I5 $f in a read-only transaction");
	$t->fails("SET default_transaction_read_only = on; SELECT $f", '25006', "I5 $f with default_transaction_read_only");
}
is($t->sql("BEGIN READ ONLY; SELECT count(*) >= 0 FROM q; COMMIT"), 't', 'I5 reading is allowed');

# ---- SECURITY DEFINER and SET ROLE: the current user counts ------------------------------------
$t->sql("CREATE FUNCTION offer_for_all(text) RETURNS text LANGUAGE sql SECURITY DEFINER SET search_path = public AS \$\$SELECT dq_offer('q', \$1, '1 hour')\$\$");
$t->sql("REVOKE ALL ON q FROM bob");
is($t->sql("SELECT offer_for_all('x') IS NOT NULL", %bob), 't', 'a SECURITY DEFINER function lends its owner\'s right');
$t->fails("SET ROLE bob; SELECT dq_offer('q', 'x')", '42501', 'SET ROLE takes it away');

$t->finish;
