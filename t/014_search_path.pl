# Attacks through search_path, pg_temp and user operators: the extension's
# functions, triggers and workers do what they say. DESIGN 3; K3
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;

my $t = DqTest->new(extension => 0);
my $r = $t->redis;

# an extension in a schema of its own, an attacker with a schema in front
$t->sql("CREATE SCHEMA dq; CREATE EXTENSION dq_bridge SCHEMA dq");
$t->sql("CREATE SERVER redis FOREIGN DATA WRAPPER dq_bridge OPTIONS (socket '" . $r->socket . "')");
$t->sql(<<'SQL');
CREATE SCHEMA app;
CREATE SCHEMA evil;
CREATE ROLE bob LOGIN;
CREATE TABLE evil.seen (what text);
GRANT INSERT ON evil.seen TO PUBLIC;
GRANT USAGE ON SCHEMA dq, app, evil TO PUBLIC;
CREATE FUNCTION evil.eq(text, text) RETURNS bool LANGUAGE sql AS $$INSERT INTO evil.seen VALUES ('operator'); SELECT true$$;
CREATE OPERATOR evil.= (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.eq);
CREATE FUNCTION evil.eqi(int, int) RETURNS bool LANGUAGE sql AS $$INSERT INTO evil.seen VALUES ('operator'); SELECT true$$;
CREATE OPERATOR evil.= (LEFTARG = int, RIGHTARG = int, FUNCTION = evil.eqi);
CREATE FUNCTION evil.add(timestamptz, interval) RETURNS timestamptz LANGUAGE sql AS $$INSERT INTO evil.seen VALUES ('plus'); SELECT $1$$;
CREATE OPERATOR evil.+ (LEFTARG = timestamptz, RIGHTARG = interval, FUNCTION = evil.add);
CREATE FUNCTION evil.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$INSERT INTO evil.seen VALUES ('clock'); SELECT '1999-01-01'::timestamptz$$;
CREATE FUNCTION evil.to_json(anyelement) RETURNS json LANGUAGE sql AS $$INSERT INTO evil.seen VALUES ('json'); SELECT '{}'::json$$;
CREATE FUNCTION evil.nextval(regclass) RETURNS bigint LANGUAGE sql AS $$INSERT INTO evil.seen VALUES ('nextval'); SELECT 1::bigint$$;
CREATE TABLE evil.dq_outbox_0 (a int);
CREATE TABLE evil.dq_source (a int);
CREATE TABLE evil.dq_shards (a int);
CREATE TABLE evil.pg_class (a int);
SET search_path = dq, app;
CREATE FOREIGN TABLE app.q (id text, key text, payload text, due_at timestamptz, shard int) SERVER redis;
CREATE TABLE app.orders (id int, wait interval);
CREATE TRIGGER o AFTER INSERT OR UPDATE ON app.orders FOR EACH ROW EXECUTE FUNCTION dq.dq_offer_trigger('q', 'wait', 'id');
CREATE TRIGGER d AFTER DELETE ON app.orders FOR EACH ROW EXECUTE FUNCTION dq.dq_remove_trigger('q', 'id');
GRANT ALL ON app.orders TO bob;
GRANT INSERT, SELECT, DELETE ON app.q TO bob;
SQL

my @paths = ("evil, pg_catalog, dq, app", "''", "pg_temp, evil, pg_catalog", "evil", "pg_catalog, evil");
for my $path (@paths)
{
	for my $user (undef, 'bob')
	{
		my %u = $user ? (user => $user) : ();
		my $who = $user || 'superuser';
		my $temp = "CREATE TEMP TABLE q (payload text); CREATE TEMP TABLE dq_outbox_0 (a int); CREATE TEMP TABLE dq_shards (a int); CREATE TEMP TABLE dq_source (a int);";
		my $before = $t->sql("SELECT count(*) FROM app.q");
		is($t->sql("SET search_path = $path; $temp SELECT pg_catalog.count(x) FROM dq.dq_offer('app.q', '$path $who', '1 hour', 'k') x", %u), 1, "dq_offer under search_path $path as $who");
		is($t->sql("SET search_path = $path; $temp SELECT dq.dq_remove('app.q', 'k')", %u), 't', "dq_remove under $path as $who");
		$t->sql("SET search_path = $path; $temp INSERT INTO app.orders VALUES (1, '1 hour')", %u);
		is($t->sql("SELECT dq.dq_sync()") && $t->sql("SELECT count(*) FROM app.q"), $before + 1, "the trigger offers to the queue beside its table, under $path as $who");
		$t->sql("SET search_path = $path; $temp UPDATE app.orders SET wait = '2 hours'", %u);
		$t->sql("SET search_path = $path; $temp DELETE FROM app.orders", %u);
		is($t->sql("SELECT dq.dq_sync()") && $t->sql("SELECT count(*) FROM app.q"), $before, "... and removes there");
	}
}
is($t->sql("SELECT string_agg(DISTINCT what, ',') FROM evil.seen"), '', 'no operator or function of the attacker was called');

# views and the other functions
for my $sql ("SELECT count(*) >= 1 FROM dq.dq_stats", "SELECT count(*) >= 1 FROM dq.dq_queues", "SELECT count(*) >= 1 FROM dq.dq_workers",
	"SELECT dq.dq_sync()", "SELECT dq.dq_transfer('app.q') >= 0", "SELECT dq.dq_pause('app.q') IS NOT NULL", "SELECT dq.dq_resume('app.q') IS NOT NULL")
{
	is($t->sql("SET search_path = evil; $sql"), 't', "$sql under the attacker's path");
}
is($t->sql("SET search_path = evil; SELECT dq.dq_create_queue('app.made', 'redis')"), 'app.made', 'dq_create_queue');
$t->sql("SET search_path = evil; CREATE FOREIGN TABLE app.plain (payload text) SERVER redis");
is($t->sql("SELECT string_agg(ftrelid::regclass || ' ' || array_to_string(ftoptions, ','), '; ' ORDER BY ftrelid) FROM pg_foreign_table"),
	'app.q queue=q; app.made queue=made; app.plain queue=plain', 'the event trigger fixed option queue under any path');
is($t->sql("SELECT string_agg(DISTINCT what, ',') FROM evil.seen"), '', 'still nothing of the attacker was called');

# the worker of a database with a hostile path
$t->sql("ALTER DATABASE postgres SET search_path = evil, pg_catalog");
$t->sql("SELECT dq.dq_worker_stop()");
$t->sql("SELECT dq.dq_worker_start()");
$t->sql("SELECT dq.dq_offer('app.q', 'hostile')");
ok($r->cmd('BLPOP', 'q', 20), 'the worker goes on under a hostile search_path of the database');
is($t->sql("SELECT pg_catalog.string_agg(DISTINCT what, ',') FROM evil.seen"), '', 'nothing of the attacker was called by the worker');

# a trigger with an unqualified name never sees pg_temp
$t->sql("ALTER DATABASE postgres RESET search_path");
$t->sql("CREATE TABLE app.lonely (id int); CREATE TRIGGER o AFTER INSERT ON app.lonely FOR EACH ROW EXECUTE FUNCTION dq.dq_offer_trigger('temp_q', '1 hour', '')");
{
	my ($rc, $out, $err) = $t->try("CREATE TEMP TABLE temp_q (payload text); INSERT INTO app.lonely VALUES (1)");
	like($err, qr/ERROR:\s+(42P01|42809|42704)/, 'a temporary table is no queue for the trigger');
}

# trigger misuse
$t->sql("CREATE TRIGGER bad BEFORE INSERT ON app.lonely FOR EACH ROW EXECUTE FUNCTION dq.dq_offer_trigger('q', '1 hour', '')");
$t->fails("INSERT INTO app.lonely VALUES (1)", '39P01', 'a BEFORE trigger: 39P01');
$t->sql("DROP TRIGGER bad ON app.lonely; DROP TRIGGER o ON app.lonely; CREATE TRIGGER bad AFTER DELETE ON app.lonely FOR EACH ROW EXECUTE FUNCTION dq.dq_offer_trigger('q', '1 hour', '')");
$t->sql("INSERT INTO app.lonely VALUES (1)");
$t->fails("DELETE FROM app.lonely", '39P01', 'dq_offer_trigger on DELETE: 39P01');
{
	my ($rc, $out, $err) = $t->try("SELECT dq.dq_offer_trigger()");
	ok($rc != 0, 'a trigger function called by hand is an error');
}

$t->finish;
