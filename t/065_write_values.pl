# What is written is what is read: payloads and keys of all kinds of column types, tasks
# that are equal, or gone meanwhile, or not as they should be.
# H11 I1 I3; B1 B4 B5; J1 J2 J4; G8
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(sleep);

my $t = DqTest->new;
my $r = $t->redis;
my $pending = 'redisson_delay_queue_timeout:{q}';

# ---- types -------------------------------------------------------------------------------------

$t->sql(<<'SQL');
CREATE DOMAIN positive AS int CHECK (value > 0);
CREATE DOMAIN word AS text CHECK (value ~ '^\w+$');
CREATE TYPE mood AS ENUM ('sad', 'so la la', 'glad');
CREATE TYPE pair AS (a int, b text);
CREATE TYPE nested AS (p pair, at timestamptz[]);
SQL
# type, values (what is written, what it becomes), what does not fit: SQLSTATE and value
my @types = (
	[ 'text', [ "'plain'", "''", "E'\\n\\t\"''\\\\'", "'\x{e4}\x{20ac}'", "repeat('x', 100000)" ] ],
	[ 'varchar(5)', [ "'abcde'", "''" ], "'abcdef'", '22001' ],
	[ 'char(5)', [ "'ab'" ] ],
	[ 'json', [ q('{"b":  1, "a": [1,2]}'), q('"x"'), "'null'" ], "'{'", '22P02' ],
	[ 'jsonb', [ q('{"b":  1, "a": [1,2]}'), q('"x"'), "'null'" ], "'{'", '22P02' ],
	[ 'bytea', [ "''", "'\\x00'", "'\\x86ff'", "decode(string_agg(lpad(to_hex(i), 2, '0'), ''), 'hex') FROM generate_series(0, 255) i", "decode(repeat('00', 1000000), 'hex')" ] ],
	[ 'int', [ '0', '-2147483648', '2147483647' ], "'2147483648'", '22003' ],
	[ 'bigint', [ '9223372036854775807' ] ],
	[ 'numeric(12,3)', [ '123456789.125', '-0.001', "'NaN'" ], "'1e10'", '22003' ],
	[ 'double precision', [ '0.1', "'-Infinity'", '1e300' ] ],
	[ 'boolean', [ 'true', 'false' ] ],
	[ 'uuid', [ "'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'" ], "'x'", '22P02' ],
	[ 'timestamptz', [ "'2024-03-31 02:30 Europe/Paris'", "'infinity'" ] ],
	[ 'interval', [ "'1 mon -2 days 03:04:05.6'" ] ],
	[ 'int[]', [ "'{1,NULL,3}'", "'{}'" ] ],
	[ 'int4range', [ "'[1,5]'" ] ],
	[ 'positive', [ '7' ], '-7', '23514' ],
	[ 'word', [ "'w'" ], "'two words'", '23514' ],
	[ 'mood', [ "'glad'", "'so la la'" ], "'mad'", '22P02' ],
	[ 'pair', [ "(1, 'x')", "(NULL, 'a,\"b')", "(NULL, NULL)::pair" ] ],
	[ 'nested', [ "((1, 'x'), ARRAY[timestamptz '2024-01-01', NULL])::nested" ] ]);

for (@types)
{
	my ($type, $values, $bad, $state) = @$_;
	my $n = 0;

	$t->sql("CREATE FOREIGN TABLE q (key text, payload $type, due_at timestamptz, id text) SERVER redis OPTIONS (queue 'types'); CREATE TABLE l (key text, payload $type)");
	for my $value (@$values)
	{
		$n++;
		utf8::encode($value) if utf8::is_utf8($value);
		my $what = $value =~ /FROM/ ? "SELECT 'k$n', $value" : "SELECT 'k$n', ($value)::$type";
		$what =~ s/^SELECT 'k\d+', (decode.*?) FROM/SELECT 'k$n', $1 FROM/;
		$t->sql("INSERT INTO l $what");
	}
	$t->sql("INSERT INTO q SELECT key, payload, '2500-01-01' FROM l");
	my $diff = "SELECT count(*) FROM (SELECT key, payload::text AS p FROM q) q FULL JOIN (SELECT key, payload::text AS p FROM l) l ON l.key = q.key AND (l.p = q.p OR l.p IS NULL) WHERE l.key IS NULL OR q.key IS NULL";
	is($t->sql($diff), 0, "H11 $type: as written, not sent yet");
	$t->sync;
	is($t->sql($diff), 0, "H11 $type: out of Redis") or diag($t->sql("SELECT key, payload FROM q; SELECT key, payload FROM l"));
	# another value takes each one's place: they change round
	$t->sql("UPDATE q SET payload = l.payload FROM l WHERE l.key = 'k' || (substr(q.key, 2)::int % $n + 1)");
	is($t->sql("SELECT count(*) FROM q JOIN l ON l.key = 'k' || (substr(q.key, 2)::int % $n + 1) WHERE q.payload::text IS NOT DISTINCT FROM l.payload::text"), $n, "I3 $type: UPDATE of the payload");
	$t->sql("UPDATE q SET due_at = due_at + interval '1 day'");
	$t->sync;
	is($t->sql("WITH d AS (DELETE FROM q RETURNING key, payload) SELECT count(*) FROM d JOIN l ON l.key = 'k' || (substr(d.key, 2)::int % $n + 1) WHERE d.payload::text IS NOT DISTINCT FROM l.payload::text"), $n, "I3 $type: DELETE gives it back");
	if ($bad)
	{
		$t->fails("INSERT INTO q VALUES ('b', $bad, '2500-01-01')", $state, "H11 $type does not take $bad");
		$t->fails("COPY q (key, payload) FROM PROGRAM 'printf \"b\\\\t%s\\\\n\" " . ($bad =~ s/'//gr) . "'", $state, "... nor by COPY") if $bad =~ /^'?[\w ]+'?$/ && $state ne '23514';
	}
	$t->sql("DROP FOREIGN TABLE q; DROP TABLE l");
}

# ---- keys, columns in any order, dropped and left out ----------------------------------------------

$t->sql(<<'SQL');
CREATE FOREIGN TABLE k (due_at timestamptz, shard int, payload text, key int) SERVER redis;
ALTER FOREIGN TABLE k DROP COLUMN shard;
INSERT INTO k VALUES ('2500-01-01', 'p', 42), ('2500-01-01', 'q', NULL);
CREATE FOREIGN TABLE u (payload text, key uuid) SERVER redis;
SQL
is($t->sql("WITH u AS (UPDATE k SET payload = payload || coalesce(key, 0) RETURNING payload) SELECT string_agg(payload, ',' ORDER BY payload) FROM u"), 'p42,q0', 'H11 behind a dropped column');
is($t->sql("SELECT dq_remove('k', 42)"), 't', 'H11 a key is its output text');
$t->sql("INSERT INTO u VALUES ('now', 'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11')");
is(($r->cmd('BLPOP', 'u', 10) || [ '', '' ])->[1], 'now', 'I1 without due_at: now');
$t->fails("CREATE FOREIGN TABLE x (key text GENERATED ALWAYS AS IDENTITY, payload text) SERVER redis", '22023', 'H11 identity of a text is refused by PostgreSQL');

# ---- equal tasks, without an id to tell them apart ---------------------------------------------------

$t->queue('q');
$t->sql("CREATE FOREIGN TABLE bare (payload text, due_at timestamptz) SERVER redis OPTIONS (queue 'q')");
$t->sql("INSERT INTO bare SELECT 'twin', '2500-01-01' FROM generate_series(1, 1000)");
$t->sync;
is($r->cmd('ZCARD', $pending), 1000, 'B1 a thousand equal tasks');
is($t->sql("WITH d AS (DELETE FROM bare USING generate_series(1, 3) RETURNING 1) SELECT count(*) FROM d"), 1000, 'I3 a join with three rows for each: each once');
$t->sync;
is($r->cmd('ZCARD', $pending), 0, '... all of them');
$t->sql("INSERT INTO bare SELECT 'twin', '2500-01-01' FROM generate_series(1, 10)");
$t->sync;
my $other = $t->sql("SELECT id FROM q ORDER BY id LIMIT 1 OFFSET 4");
is($t->sql("UPDATE q SET payload = 'this one' WHERE id = '$other' RETURNING payload"), 'this one', 'I3 one of ten equal ones');
is($t->sql("SELECT count(*) FILTER (WHERE payload = 'twin'), count(*) FILTER (WHERE id = '$other') FROM q"), '9|0', '... and no other');
is($t->sql("WITH c AS (SELECT due_at FROM bare WHERE payload = 'twin' LIMIT 1), d AS (DELETE FROM bare USING c WHERE bare.due_at = c.due_at AND payload = 'twin' RETURNING 1) SELECT count(*) FROM d"), 9, 'I3 all that a condition fits, not one of them');
$t->sql("TRUNCATE q");
$t->sync;

# ---- gone between the look and the write -----------------------------------------------------------------

my $s = $t->session;
for my $how ('ZREM', 'transfer', 'replaced')
{
	for my $what ("UPDATE q SET payload = 'again'", "UPDATE q SET due_at = '2600-01-01'", "UPDATE q SET key = 'other'", 'DELETE FROM q')
	{
		my $due = $how eq 'transfer' ? "now() + '700 ms'" : "'2500-01-01'";
		$t->sql("INSERT INTO q (key, payload, due_at) VALUES ('a', 'first', $due), ('b', 'second', '2500-01-01')");
		$t->sync;
		# the condition is asked after the page has come, and before the tasks are taken
		$s->send("WITH x AS ($what WHERE pg_sleep(0.7) IS NOT NULL RETURNING 1) SELECT count(*) FROM x");
		sleep 0.3;
		if ($how eq 'ZREM')
		{
			my ($first) = grep { DqTest::Redis::unpack_member($_)->{payload} eq 'first' } @{ $r->cmd('ZRANGE', $pending, 0, -1) };
			is($r->cmd('ZREM', $pending, $first), 1, "B5 $what: taken away by a stranger");
		}
		elsif ($how eq 'replaced')
		{
			$t->sql("SELECT dq_offer_at('q', 'newer', '2500-01-01', 'a')");
		}
		is($s->receive(60), 1, "I3 $what: one that went away meanwhile ($how) is not counted");
		$t->sync;
		my @left = sort $t->pending('q');
		my $second = $what =~ /again/ ? 'again' : 'second';
		my @want = sort(($how eq 'replaced' ? 'newer' : ()), ($what =~ /DELETE/ ? () : $second));
		is("@left", "@want", '... and not made anew');
		is(join(',', $r->ready('q')), $how eq 'transfer' ? 'first' : '', '... it is where it was delivered');
		$r->cmd('DEL', 'q');
		$t->sql("TRUNCATE q");
		ok(poll_until(sub { $t->sync; $r->cmd('ZCARD', $pending) == 0 && $r->cmd('HLEN', 'dq:{q}:hold') == 0 && $r->cmd('HLEN', 'dq:{q}:index') == 0 }), '... nothing is left over');
	}
}

# ---- what does not fit its column ---------------------------------------------------------------------------

$r->redisson_offer('q', now_ms() + 3600000, "\x86\xff");
$t->sql("INSERT INTO q (payload, due_at) VALUES ('good', '2500-01-01')");
$t->sync;
$t->fails("DELETE FROM q RETURNING payload", '22021', 'J2 RETURNING what is no text');
ok(poll_until(sub { $r->cmd('HLEN', 'dq:{q}:hold') == 0 && $r->cmd('ZCARD', $pending) == 2 }), '... undone');
$t->fails("UPDATE q SET due_at = now() + '2 hours' WHERE due_at < '2400-01-01'", '22021', 'J2 UPDATE reads the whole row');
is($t->sql("WITH u AS (UPDATE q SET due_at = due_at + interval '1 s' WHERE due_at > '2400-01-01' RETURNING 1) SELECT count(*) FROM u"), 1, '... of those it changes');
$t->sync;
$t->sql("CREATE FOREIGN TABLE forgiving (payload text OPTIONS (on_error 'null'), due_at timestamptz) SERVER redis OPTIONS (queue 'q')");
is($t->sql("SELECT count(*), count(payload) FROM forgiving"), '2|1', "H11 on_error 'null'");
is($t->sql("UPDATE forgiving SET due_at = due_at + interval '1 min' WHERE payload IS NULL RETURNING payload IS NULL"), 't', '... and the row is written by it');
$t->sync;
ok((grep { $_ eq "\x86\xff" } $t->pending('q')), 'J1 ... its bytes stay');
is($t->sql("UPDATE forgiving SET payload = coalesce(payload, 'made good') RETURNING payload") =~ s/\n/,/r, 'made good,good', 'J2 UPDATE makes it good')
  or diag($t->sql("SELECT * FROM q"));
is($t->sql("SELECT count(payload) FROM q"), 2, '... for all');
is($t->sql("DELETE FROM q WHERE payload = 'made good' RETURNING payload"), 'made good', '... to find it');
$t->sql("TRUNCATE q");

# ---- large ------------------------------------------------------------------------------------------------------

$t->sql("INSERT INTO q (payload, due_at) SELECT repeat(chr(96 + i), 3000000), '2500-01-01' FROM generate_series(1, 8) i");
$t->sync;
is($t->sql("WITH u AS (UPDATE q SET due_at = due_at + interval '1 s' RETURNING payload) SELECT sum(length(payload)) FROM u"), 24_000_000, 'J4 UPDATE of large ones');
$t->sync;
is($t->sql("WITH d AS (DELETE FROM q RETURNING payload) SELECT sum(length(payload)), count(DISTINCT payload) FROM d"), '24000000|8', '... DELETE');
$t->sync;
is($r->cmd('ZCARD', $pending), 0, '... and they are gone');

$s->quit;
ok($t->log_text !~ /PANIC:|TRAP:|signal 11|signal 6\b/, 'no process died');
$t->finish;
