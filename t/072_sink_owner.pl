# A sink and its owner: delivered with his rights by a session of his, who cannot become
# anybody else; a queue is parked while its sink is missing, locked or forbidden, or its
# owner may not log in, goes on after the repair, and delays no other. Nothing that a
# batch leaves in the session is there for the next. dq_dead_letters, dq_retry,
# dq_discard. DESIGN 3 6 8; G9 G10 G12 G13 K2 K3 K5
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

my $t = DqTest->new;
my $r = $t->redis;

sub count { my ($sql, %o) = @_; return $t->sql("SELECT count(*) FROM $sql", %o); }
sub arrives { my ($sql, $n) = @_; return poll_until(sub { count($sql) >= $n }); }
sub error_of { my ($q) = @_; return $t->stat($q, 'last_error'); }

$t->sql(<<'SQL');
CREATE ROLE ann LOGIN; CREATE ROLE bob LOGIN; CREATE ROLE nologin_role;
GRANT USAGE ON FOREIGN SERVER redis TO ann, bob, nologin_role;
CREATE SCHEMA ann AUTHORIZATION ann; CREATE SCHEMA bob AUTHORIZATION bob;
CREATE TABLE ann.inbox (payload text); ALTER TABLE ann.inbox OWNER TO ann;
CREATE TABLE bob.inbox (payload text); ALTER TABLE bob.inbox OWNER TO bob;
CREATE TABLE ann.second (payload text); ALTER TABLE ann.second OWNER TO ann;
SQL
$t->queue('ann.q', "sink 'inbox'", user => 'ann');
$t->queue('ann.q2', "sink 'ann.second'", user => 'ann');
$t->queue('bob.q', "queue 'bobs', sink 'inbox'", user => 'bob');
sub works
{
	my ($name, @queues) = @_;

	for my $q (@queues)
	{
		my ($queue, $table) = @$q;
		$t->sql("SELECT dq_offer('$queue', '$name')");
		ok(arrives("$table WHERE payload = '$name'", 1), "$name: $queue delivers");
	}
}
my @ann = ([ 'ann.q', 'ann.inbox' ]);
my @others = ([ 'ann.q2', 'ann.second' ], [ 'bob.q', 'bob.inbox' ]);
works('at first', @ann, @others);
is($t->sql("SELECT string_agg(DISTINCT usename, ',' ORDER BY usename) FROM pg_stat_activity WHERE backend_type = 'dq_bridge executor'"),
	'ann,bob', 'K3: a session of each owner');

# ---- parked, and back: G13 K2 ------------------------------------------------------------
sub parks
{
	my ($name, $break, $like, $repair) = @_;

	$t->sql($break);
	$t->sql("SELECT dq_offer('ann.q', 'during $name')");
	ok($t->wait_state('ann.q', 'parked'), "$name: parked") or diag($t->stat('ann.q', 'state'));
	like(error_of('ann.q'), $like, "$name: last_error says why");
	works("beside $name", $name =~ /log in|connect/ ? $others[1] : @others);
	$t->sql($repair);
	ok(arrives("ann.inbox WHERE payload = 'during $name'", 1), "$name: goes on after the repair");
	ok($t->wait_state('ann.q', 'running'), "$name: running again") or diag(error_of('ann.q'));
	is(count("ann.inbox WHERE payload = 'during $name'"), 1, "$name: once");
}
parks('sink renamed', 'ALTER TABLE ann.inbox RENAME TO away', qr/sink "inbox" does not exist/, 'ALTER TABLE ann.away RENAME TO inbox');
parks('rights revoked', 'ALTER TABLE ann.inbox OWNER TO bob; REVOKE ALL ON SCHEMA ann FROM PUBLIC', qr/may not insert/, 'ALTER TABLE ann.inbox OWNER TO ann');
parks('sink dropped', 'DROP TABLE ann.inbox', qr/does not exist/, 'CREATE TABLE ann.inbox (payload text); ALTER TABLE ann.inbox OWNER TO ann');
SKIP: {
	skip 'PostgreSQL 17 logs in without LOGIN', 7 if $t->node->pg_version->{num}[0] >= 17;
	parks('owner may not log in', 'ALTER ROLE ann NOLOGIN', qr/owner "ann" is not permitted to log in/, 'ALTER ROLE ann LOGIN');
	$t->sql('GRANT CREATE ON SCHEMA public TO nologin_role');
	$t->fails("SET ROLE nologin_role; CREATE FOREIGN TABLE x (payload text) SERVER redis OPTIONS (sink 's')", '55000', 'an owner without LOGIN is refused where the sink is given', like => qr/ALTER ROLE nologin_role LOGIN/);
}
{
	my $s = $t->session;
	$s->run('BEGIN; LOCK TABLE ann.inbox IN ACCESS EXCLUSIVE MODE');
	$t->sql("SELECT dq_offer('ann.q', 'while locked')");
	ok($t->wait_state('ann.q', 'parked'), 'sink locked: parked');
	like(error_of('ann.q'), qr/is locked by another session/, 'sink locked: last_error says so');
	works('beside a lock', @others);
	$s->run('COMMIT');
	ok(arrives("ann.inbox WHERE payload = 'while locked'", 1), 'sink locked: goes on');
	$s->quit;
}

# ---- nobody becomes superuser ---------------------------------------------------------------
$t->sql(<<'SQL', user => 'ann');
CREATE TABLE ann.tried (what text, said text);
CREATE FUNCTION ann.attack() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE boss text := (SELECT rolname FROM pg_roles WHERE oid = 10); what text;
BEGIN
  FOREACH what IN ARRAY ARRAY['SET ROLE ' || quote_ident(boss), 'SET SESSION AUTHORIZATION ' || quote_ident(boss),
    'RESET ROLE', 'RESET SESSION AUTHORIZATION', 'ALTER ROLE ann SUPERUSER', 'DELETE FROM dq_done', 'UPDATE dq_claims SET number = 0']
  LOOP
    BEGIN
      EXECUTE what;
      INSERT INTO ann.tried VALUES (what, (SELECT rolsuper::text FROM pg_roles WHERE rolname = current_user));
    EXCEPTION WHEN OTHERS THEN
      INSERT INTO ann.tried VALUES (what, SQLSTATE);
    END;
  END LOOP;
  RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER attack AFTER INSERT ON ann.inbox DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION ann.attack();
SQL
works('an attack', @ann);
is($t->sql("SELECT string_agg(what || ': ' || said, E'\n' ORDER BY what COLLATE \"C\") FROM ann.tried"),
	join("\n", 'ALTER ROLE ann SUPERUSER: 42501', 'DELETE FROM dq_done: 42501', 'RESET ROLE: false', 'RESET SESSION AUTHORIZATION: false',
		'SET ROLE ' . $t->sql("SELECT quote_ident(rolname) FROM pg_roles WHERE oid = 10") . ': 42501',
		'SET SESSION AUTHORIZATION ' . $t->sql("SELECT quote_ident(rolname) FROM pg_roles WHERE oid = 10") . ': 42501',
		'UPDATE dq_claims SET number = 0: 42501'), 'a trigger of the sink stays what its owner is');
$t->sql("DROP TRIGGER attack ON ann.inbox");

# ---- nothing leaks from batch to batch: G12 ---------------------------------------------------
$t->sql(<<'SQL', user => 'ann');
CREATE TABLE ann.found (what text);
CREATE FUNCTION ann.litter() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO ann.found SELECT 'setting' WHERE current_setting('work_mem') = '777kB';
  INSERT INTO ann.found SELECT 'custom' WHERE current_setting('my.thing', true) <> '';
  INSERT INTO ann.found SELECT 'lock' FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711;
  INSERT INTO ann.found SELECT 'temp' WHERE to_regclass('pg_temp.litter') IS NOT NULL;
  INSERT INTO ann.found SELECT 'timeout' WHERE current_setting('synchronous_commit') <> 'on';
  PERFORM set_config('work_mem', '777kB', false), set_config('my.thing', 'x', false), set_config('synchronous_commit', 'off', false);
  PERFORM pg_advisory_lock(4711);
  EXECUTE 'CREATE TEMP TABLE litter (i int)';
  RETURN NEW;
END $$;
CREATE TRIGGER litter BEFORE INSERT ON ann.inbox FOR EACH STATEMENT EXECUTE FUNCTION ann.litter();
SQL
works("batch $_", @ann) for 1 .. 3;
is($t->sql("SELECT coalesce(string_agg(what, ','), '') FROM ann.found"), '', 'G12: settings, locks, and temporary tables are gone with the batch');
$t->sql("DROP TRIGGER litter ON ann.inbox");

# ---- dead letters ------------------------------------------------------------------------------
$t->sql("CREATE TABLE ann.numbers (payload int, key text); ALTER TABLE ann.numbers OWNER TO ann");
$t->queue('ann.n', "queue 'numbers', sink 'numbers'", user => 'ann');
$t->sql("SELECT dq_offer('ann.n', x, '0', x) FROM unnest('{1,x,2,y,z}'::text[]) x", user => 'ann');
ok(arrives('dq_dead_letters', 3), 'three of five are dead');
is($t->sql("SELECT string_agg(key || attempts || sqlstate, ',' ORDER BY key) FROM dq_dead_letters", user => 'ann'), 'x122P02,y122P02,z122P02', 'the owner reads them');
is(count('dq_dead_letters', user => 'bob'), 0, 'nobody else does');
$t->fails("DELETE FROM dq_dead_letters", '42501', 'nor writes', user => 'ann');
$t->fails("SELECT dq_retry('ann.n')", '42501', 'dq_retry is for the owner', user => 'bob');
$t->fails("SELECT dq_discard('ann.n')", '42501', 'and dq_discard', user => 'bob');
is($t->sql("SELECT dq_discard('ann.n', id) FROM dq_dead_letters WHERE key = 'z'", user => 'ann'), '1', 'one is discarded, by query');
is($t->sql("SELECT dq_retry('ann.n', 'none')", user => 'ann'), '0', 'one that is not there');
$t->sql("ALTER TABLE ann.numbers ALTER payload TYPE text");
$t->sql("BEGIN; SELECT dq_retry('ann.n'); ROLLBACK", user => 'ann');
is(count('dq_dead_letters'), 2, 'a rollback takes a retry back');
is($t->sql("SELECT dq_retry('ann.n', id) FROM dq_dead_letters WHERE key = 'x'", user => 'ann'), '1', 'one is tried again');
ok(arrives("ann.numbers WHERE payload = 'x' AND key = 'x'", 1), 'and arrives with its key');
is($t->sql("SELECT dq_retry('ann.n')", user => 'ann'), '1', 'the rest');
ok(arrives("ann.numbers", 4), 'arrives');
is($t->sql("SELECT string_agg(payload, ',' ORDER BY payload) FROM ann.numbers"), '1,2,x,y', 'each once');
is(count('dq_dead_letters'), 0, 'none is left');

# ---- the database can be dropped and copied: G10 K5 ------------------------------------------------
$t->sql('CREATE DATABASE other');
$t->extend('other');
$t->sql("CREATE TABLE s (payload text); CREATE FOREIGN TABLE o (payload text) SERVER redis OPTIONS (queue 'o', sink 's')", db => 'other');
$t->sql("SELECT dq_offer('o', 'x')", db => 'other');
ok(poll_until(sub { $t->sql('SELECT count(*) FROM s', db => 'other') == 1 }), 'another database delivers');
my $start = time();
$t->sql('CREATE DATABASE copy TEMPLATE other');
cmp_ok(time() - $start, '<', 10, 'G10: it can be copied');
$t->sql("SELECT dq_offer('o', 'of the copy')", db => 'copy');
ok(poll_until(sub { $t->sql('SELECT state FROM dq_stats', db => 'copy') eq 'not_owner' }), 'K5: the copy is not the owner');
$t->sql("SELECT dq_offer('o', 'y')", db => 'other');
ok(poll_until(sub { $t->sql('SELECT count(*) FROM s', db => 'other') == 2 }), 'the original delivers');
is($t->sql('SELECT count(*) FROM s', db => 'copy'), 1, 'and the copy nothing');
$start = time();
$t->sql('DROP DATABASE other');
cmp_ok(time() - $start, '<', 4, 'G10: it can be dropped');

# ---- without queues the executor leaves ---------------------------------------------------------------
$t->sql('DROP FOREIGN TABLE bob.q');
ok(poll_until(sub { count("pg_stat_activity WHERE backend_type = 'dq_bridge executor' AND usename = 'bob'") == 0 }), 'an owner without a sink has no executor');

$t->finish;
