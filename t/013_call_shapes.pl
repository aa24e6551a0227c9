# The ways drivers call: parameters of unknown, varchar, bigint, jsonb, uuid,
# interval; named arguments; PREPARE; every overload. DESIGN 3; J3
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;

my $t = DqTest->new;

$t->queue('q');
$t->queue('jq', undef, type => 'jsonb');
$t->queue('bq', undef, type => 'bytea');
$t->sql("CREATE TYPE pair AS (a int, b text)");
$t->sql("CREATE DOMAIN short AS text CHECK (length(VALUE) < 100)");
$t->sql("CREATE TYPE mood AS ENUM ('sad', 'happy')");
$t->sql("CREATE TABLE tt (id int, name text); INSERT INTO tt VALUES (1, 'x')");

# the call gives an id, and payload and key are stored as text
sub shape
{
	my ($call, $payload, $key, $queue) = @_;

	$queue ||= 'q';
	my ($rc, $out, $err) = $t->try($call);
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	(my $name = $call) =~ s/\s+/ /g;
	if ($rc != 0) { fail($name); diag($err); return; }
	my ($id) = $out =~ /(\d+-\d+)/;
	$t->sync;
	is($t->sql("SELECT payload::text || '|' || coalesce(key, '-') FROM $queue WHERE id = '$id'"), "$payload|" . (defined $key ? $key : '-'), $name);
}

# literals
shape("SELECT dq_offer('q', 'lit', '1 hour')", 'lit');
shape("SELECT dq_offer('q', 'lit', '1 hour', 'k1')", 'lit', 'k1');
shape("SELECT dq_offer('q', 'lit', '1 hour', 42)", 'lit', '42');
shape("SELECT dq_offer('q', 'lit', '1 hour', 43::bigint)", 'lit', '43');
shape("SELECT dq_offer('q', 'lit', '1 hour', 'abc'::varchar(10))", 'lit', 'abc');
shape("SELECT dq_offer('q', 'lit', '1 hour', '6f9619ff-8b86-d011-b42d-00cf4fc964ff'::uuid)", 'lit', '6f9619ff-8b86-d011-b42d-00cf4fc964ff');
shape("SELECT dq_offer('q', 'lit', '1 hour', NULL)", 'lit');
shape("SELECT dq_offer('q', 'lit', '1 hour', 1.50)", 'lit', '1.50');
shape("SELECT dq_offer('q', 'lit', '1 hour', 'x'::name)", 'lit', 'x');
shape("SELECT dq_offer('q', 'lit', '1 hour', date '2027-01-02')", 'lit', '2027-01-02');
# payload types
shape("SELECT dq_offer('q', 'v'::varchar, '1 hour')", 'v');
shape("SELECT dq_offer('q', 'n'::name, '1 hour')", 'n');
shape("SELECT dq_offer('q', 'd'::short, '1 hour')", 'd');
shape("SELECT dq_offer('q', 5, '1 hour')", '5');
shape("SELECT dq_offer('q', 5::bigint, '1 hour')", '5');
shape("SELECT dq_offer('q', true, '1 hour')", 't');
shape("SELECT dq_offer('q', 1.25, '1 hour')", '1.25');
shape("SELECT dq_offer('q', 'happy'::mood, '1 hour')", 'happy');
shape("SELECT dq_offer('q', '6f9619ff-8b86-d011-b42d-00cf4fc964ff'::uuid, '1 hour')", '6f9619ff-8b86-d011-b42d-00cf4fc964ff');
shape("SELECT dq_offer('q', '{\"a\":1}'::json, '1 hour')", '{"a":1}');
shape("SELECT dq_offer('q', '{\"a\":1}'::jsonb, '1 hour')", '{"a": 1}');
shape("SELECT dq_offer('q', ARRAY[1,2], '1 hour')", '{1,2}');
shape("SELECT dq_offer('q', (1,'x')::pair, '1 hour')", '{"a":1,"b":"x"}');
shape("SELECT dq_offer('q', tt, '1 hour') FROM tt", '{"id":1,"name":"x"}');
shape("SELECT dq_offer('q', tt.*, '1 hour') FROM tt", '{"id":1,"name":"x"}');
shape("SELECT dq_offer('q', CASE WHEN true THEN 'case' END, '1 hour')", 'case');
shape("SELECT dq_offer('q', (SELECT name FROM tt), '1 hour')", 'x');
shape("SELECT dq_offer('q', v, '1 hour') FROM (VALUES ('val')) x(v)", 'val');
shape("SELECT dq_offer('q', '\\x6162'::bytea, '1 hour')", 'ab');
shape("SELECT dq_offer('bq', '\\x00ff'::bytea, '1 hour')", '\x00ff', undef, 'bq');
shape("SELECT dq_offer('jq', '{\"a\":1}', '1 hour')", '{"a": 1}', undef, 'jq');
shape("SELECT dq_offer('jq', '{\"a\":1}'::jsonb, '1 hour', 7)", '{"a": 1}', '7', 'jq');
# names, defaults, queue as text or regclass or variable
shape("SELECT dq_offer(queue => 'q', payload => 'named', delay => '1 hour', key => 'nk')", 'named', 'nk');
shape("SELECT dq_offer('q', 'named', key => 9, delay => '1 hour')", 'named', '9');
shape("SELECT dq_offer('q'::text, 'textq', '1 hour')", 'textq');
shape("SELECT dq_offer('q'::varchar, 'varcharq', '1 hour')", 'varcharq');
shape("SELECT dq_offer('q'::regclass, 'regq', '1 hour')", 'regq');
shape("SELECT dq_offer('public.q', 'qualified', '1 hour')", 'qualified');
shape("SELECT dq_offer('q', 'ivar', interval '1 hour' * 2)", 'ivar');
shape("SELECT dq_offer('q', 'mk', make_interval(hours => 1))", 'mk');
shape("SELECT dq_offer_at('q', 'at', '2100-01-01')", 'at');
shape("SELECT dq_offer_at('q', 'at', now() + '1 hour', 77)", 'at', '77');
shape("SELECT dq_offer_at('q', 4711, '2100-01-01', key => 'ak')", '4711', 'ak');
shape("SELECT dq_offer_at('q', 'at', date '2100-01-01')", 'at');
shape("SELECT dq_offer_at('q', 'at', timestamp '2100-01-01')", 'at');
like($t->sql("SELECT dq_offer('q', 'now')"), qr/^\d+-\d+$/, 'two arguments: due now');

# PREPARE, as the extended protocol does; \$1.. unknown or typed
for my $case (
	[ '', "SELECT dq_offer(\$1, \$2, \$3, \$4)", "'q', 'pu', '1 hour', 'pk'", 'pu', 'pk' ],
	[ '', "SELECT dq_offer(\$1, \$2, \$3)", "'q', 'pu3', '1 hour'", 'pu3', undef ],
	[ '(text, varchar, interval, bigint)', "SELECT dq_offer(\$1, \$2, \$3, \$4)", "'q', 'pv', '1 hour', 99", 'pv', '99' ],
	[ '(regclass, jsonb, interval, uuid)', "SELECT dq_offer(\$1, \$2, \$3, \$4)", "'q', '{\"b\":2}', '1 hour', '6f9619ff-8b86-d011-b42d-00cf4fc964f0'", '{"b": 2}', '6f9619ff-8b86-d011-b42d-00cf4fc964f0' ],
	[ '(varchar, bytea, interval, int)', "SELECT dq_offer(\$1, \$2, \$3, \$4)", "'q', '\\x7a', '1 hour', 5", 'z', '5' ],
	[ '(text, text, timestamptz, text)', "SELECT dq_offer_at(\$1, \$2, \$3, \$4)", "'q', 'pat', '2100-01-01', 'patk'", 'pat', 'patk' ],
	[ '', "SELECT dq_offer_at(\$1, \$2, \$3)", "'q', 'pat3', '2100-01-01'", 'pat3', undef ])
{
	my ($types, $sql, $args, $payload, $key) = @$case;
	shape("PREPARE p$types AS $sql; EXECUTE p($args)", $payload, $key);
}
is($t->sql("PREPARE p AS SELECT dq_offer(\$1, \$2, \$3, \$4); SELECT parameter_types FROM pg_prepared_statements"),
	'{regclass,text,interval,text}', 'all unknown: regclass, text, interval, text');
# many executions, generic plan too
is($t->sql("SET plan_cache_mode = force_generic_plan; PREPARE p AS SELECT dq_offer(\$1, \$2, \$3) IS NOT NULL; "
	  . join(' ', map { "EXECUTE p('q', 'g$_', '1 hour');" } 1 .. 12)), join("\n", ('t') x 12), 'PREPARE executed 12 times, generic plan');
$t->sql("DO \$\$ DECLARE q text := 'q'; p text := 'plpgsql'; d interval := '1 hour'; k bigint := 5; BEGIN PERFORM dq_offer(q, p, d, k); EXECUTE 'SELECT dq_offer(\$1, \$2, \$3, \$4)' USING q, p, d, k; END \$\$");
ok(1, 'PL/pgSQL variables and EXECUTE USING');

# dq_remove
for my $case ([ "SELECT dq_remove('q', 5)", 't' ], [ "SELECT dq_remove('q', 99::bigint)", 't' ],
	[ "PREPARE p AS SELECT dq_remove(\$1, \$2); EXECUTE p('q', 'pk')", 't' ],
	[ "PREPARE p(text, bigint) AS SELECT dq_remove(\$1, \$2); EXECUTE p('q', 43)", 't' ],
	[ "PREPARE p(text, uuid) AS SELECT dq_remove(\$1, \$2); EXECUTE p('q', '6f9619ff-8b86-d011-b42d-00cf4fc964f0')", 't' ],
	[ "SELECT dq_remove('q', '6f9619ff-8b86-d011-b42d-00cf4fc964ff'::uuid)", 't' ],
	[ "SELECT dq_remove('q', 'abc'::varchar)", 't' ],
	[ "SELECT dq_remove('q', '{\"a\":1}'::json)", 't' ],
	[ "SELECT dq_remove('q', '\\x6162'::bytea)", 't' ],
	[ "SELECT dq_remove(queue => 'q', element => 'nk')", 't' ])
{
	is($t->sql($case->[0]), $case->[1], $case->[0]);
}

# what is refused, and how
$t->fails("SELECT dq_offer('tt', 'x')", '42809', 'no queue: 42809', like => qr/HINT/);
$t->fails("SELECT dq_offer('no_such_table', 'x')", '42P01', 'no table: as regclass says');
$t->fails("SELECT dq_offer(NULL, 'x')", '22004', 'NULL queue');
$t->fails("SELECT dq_offer('q', NULL)", '22004', 'NULL payload');
$t->fails("SELECT dq_offer('q', NULL::int)", '22004', 'NULL payload of another type');
$t->fails("SELECT dq_offer('q', 'x', NULL)", '22004', 'NULL delay');
$t->fails("SELECT dq_offer_at('q', 'x', NULL)", '22004', 'NULL instant');
$t->fails("SELECT dq_offer('q', 'x', '1 hour', repeat('k', 256))", '22001', 'a key over 255 bytes');
shape("SELECT dq_offer('q', 'longkey', '1 hour', repeat('k', 255))", 'longkey', 'k' x 255);
$t->fails("SELECT dq_offer('q', 'x', '1 hour', repeat(U&'\\00e9', 128))", '22001', 'bytes, not characters');
$t->fails("SELECT dq_offer('jq', '{not json', '1 hour')", '22P02', 'a payload the column does not take');
$t->fails("SELECT dq_offer('jq', '{\"a\":\"\\u0000\"}', '1 hour')", '22P05', 'J3 a jsonb column refuses \u0000 at the offer');
$t->fails("SELECT dq_offer('q', 'x', 30 || ' minutes')", '42883', 'delay as a text expression needs a cast');
shape("SELECT dq_offer('q', 'cast', (30 || ' minutes')::interval)", 'cast');
$t->fails("SELECT dq_offer('q', 'x', 'no interval')", '22007', 'no interval');

# dq_create_queue
is($t->sql("SELECT dq_create_queue('cq')"), 'cq', 'dq_create_queue');
is($t->sql("SELECT dq_create_queue('\"Odd Name\"', 'redis', 'jsonb', '{\"shards\": 2, \"remove_timeout\": \"1s\"}')"), '"Odd Name"', 'dq_create_queue with everything');
is($t->sql("SELECT string_agg(attname || ' ' || atttypid::regtype, ', ' ORDER BY attnum) FROM pg_attribute WHERE attrelid = '\"Odd Name\"'::regclass AND attnum > 0"),
	'id text, key text, payload jsonb, due_at timestamp with time zone, shard integer', 'all columns');
$t->fails("SELECT dq_create_queue('cq2', 'nowhere')", '42704', 'no such server', like => qr/nowhere/);
$t->sql("CREATE SERVER other FOREIGN DATA WRAPPER dq_bridge");
$t->fails("SELECT dq_create_queue('cq2')", '42P17', 'several servers: which?', like => qr/other.*redis|redis.*other/s);
$t->sql("CREATE DATABASE empty");
$t->sql("CREATE EXTENSION dq_bridge", db => 'empty');
$t->fails("SELECT dq_create_queue('cq2')", '42704', 'no server: the statement as a hint', db => 'empty', like => qr/HINT.*CREATE SERVER/s);
$t->fails("SELECT dq_create_queue('cq3', 'redis', 'text', '{\"shard\": \"2\"}')", 'HV00D', 'a misspelt option: a hint', like => qr/HINT.*shards/s);

$t->finish;
