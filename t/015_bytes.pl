# Payloads are bytes: zero bytes, invalid text, odd JSON, large ones, foreign
# members that cannot be read. J1 J2 J3 J4; G9
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Digest::MD5 qw(md5_hex);

my $t = DqTest->new;
my $r = $t->redis;

$t->queue('bq', undef, type => 'bytea');
$t->queue('q');
$t->queue('jq', undef, type => 'jsonb');

# ---- J1 ---------------------------------------------------------------------------------
my %payloads = (
	empty => '',
	'one zero byte' => "\0",
	'zero inside' => "a\0b",
	'all 256 bytes' => join('', map { chr } 0 .. 255),
	'CR LF' => "\r\n\$5\r\n",
	'1 MB' => join('', map { chr(int(rand(256))) } 1 .. 1048576));
for my $name (sort keys %payloads)
{
	my $hex = unpack('H*', $payloads{$name});
	open my $fh, '>', $t->node->basedir . '/p.sql' or die;
	print $fh "SELECT dq_offer('bq', '\\x$hex'::bytea, '1 hour');\n";
	close $fh;
	my $id = `psql -XAtq -d "@{[ $t->node->connstr('postgres') ]}" -f @{[ $t->node->basedir ]}/p.sql`;
	chomp $id;
	$t->sync;
	is($t->sql("SELECT md5(payload) FROM bq WHERE id = '$id'"), md5_hex($payloads{$name}), "J1 $name: the foreign table shows the same bytes");
	my @m = grep { DqTest::Redis::unpack_member($_)->{payload} eq $payloads{$name} } @{ $r->cmd('ZRANGE', 'redisson_delay_queue_timeout:{bq}', 0, -1) };
	is(scalar @m, 1, "J1 $name: the member holds the same bytes");
	is($t->sql("SELECT dq_remove('bq', '$id')"), 't', "J1 $name: removed by id");
	open $fh, '>', $t->node->basedir . '/p.sql' or die;
	print $fh "SELECT dq_offer('bq', '\\x$hex'::bytea, '1 hour') IS NULL; SELECT dq_remove('bq', '\\x$hex'::bytea); SELECT dq_offer('bq', '\\x$hex'::bytea) IS NULL;";
	close $fh;
	my $out = `psql -XAtq -d "@{[ $t->node->connstr('postgres') ]}" -f @{[ $t->node->basedir ]}/p.sql`;
	is($out, "f\nt\nf\n", "J1 $name: found by value");
	my $got = $r->cmd('BLPOP', 'bq', 20);
	ok($got && $got->[1] eq $payloads{$name}, "J1 $name: delivered byte for byte");
}

# ---- J2 ---------------------------------------------------------------------------------------
$r->redisson_offer('q', now_ms() + 3600_000, "\x86\xff", id => "\x01\x02\x03\x04");
$t->sql("SELECT dq_offer('q', 'good', '30 minutes')");
$t->sync;
is($t->sql("SELECT count(*) FROM q"), 2, 'J2 count(*) with an invalid payload');
{
	my ($rc, $out, $err) = $t->try("SELECT payload FROM q WHERE due_at < now() + '45 minutes'::interval");
	is($out, 'good', 'J2 other rows are reachable') or diag($err);
}
is($t->sql("SELECT id FROM q WHERE due_at > now() + '45 minutes'::interval") =~ /-x01020304$/, 1, 'J2 queries that do not read it work');
my $err = $t->fails("SELECT payload FROM q", '22021', 'J2 reading it: 22021', like => qr/x01020304/);
like($err, qr/HINT.*bytea/, 'J2 hint: declare bytea');
$t->sql("CREATE FOREIGN TABLE q_bytes (id text, payload bytea, due_at timestamptz) SERVER redis OPTIONS (queue 'q')");
is($t->sql("SELECT count(*) FROM q_bytes WHERE payload = '\\x86ff'"), 1, 'J2 a bytea column always works');
my $id = $t->sql("SELECT id FROM q WHERE due_at > now() + '45 minutes'::interval");
is($t->sql("SELECT dq_remove('q', '$id')"), 't', 'J2 and it can be removed');
for my $enc ('LATIN1', 'SQL_ASCII')
{
	my $db = "db_\L$enc";
	$t->sql("CREATE DATABASE $db ENCODING '$enc' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0");
	$t->extend($db);
	$t->queue("q_\L$enc", undef, db => $db);
	my $q = "q_\L$enc";
	$t->sql("SET client_encoding = '" . ($enc eq 'LATIN1' ? 'UTF8' : 'SQL_ASCII') . "'; SELECT dq_offer('$q', 'caf\xc3\xa9', '0')", db => $db);
	my $got = $r->cmd('BLPOP', $q, 20);
	is($got && $got->[1], "caf\xc3\xa9", "J2 $enc: text goes out as UTF-8 (SQL_ASCII: as it is)");
	$r->redisson_offer($q, now_ms() + 3600_000, "\xe2\x82\xac\xf0\x9f\x98\x80");
	my ($rc, $out, $e) = $t->try("SELECT payload FROM $q", db => $db);
	ok($enc eq 'LATIN1' ? $e =~ /22P05|22021/ : $rc == 0, "J2 $enc: what the encoding has no character for") or diag($e);
	is($t->sql("SELECT count(*) FROM $q", db => $db), 1, "J2 $enc: count works");
}

# ---- J3 ------------------------------------------------------------------------------------------------
my @odd = ('{"a":"\u0000"}', '{"a":"\ud800"}', '{"a":', '[' x 1000 . ']' x 1000, 'not json at all');
$r->redisson_offer('jq', now_ms() + 2000, $_) for @odd;
$t->sql("SELECT dq_offer('jq', json_build_object('n', i), '2 s') FROM generate_series(1, 10) i");
$t->sync;
is($t->sql("SELECT count(*) FROM jq"), 15, 'J3 count with poison inside');
{
	my ($rc, $out, $e) = $t->try("SELECT payload FROM jq");
	like($e, qr/ERROR:\s+(22P02|22P05|22021)/, 'J3 reading it: a clean error');
}
ok(poll_until(sub { $r->cmd('LLEN', 'jq') == 15 }), 'J3 a list takes every payload: all 15 arrive');
is_books('J3 bytes intact', [ @odd, map { "{\"n\" : $_}" } 1 .. 10 ], [ $r->ready('jq') ]);

# ---- members that cannot be read: quarantine, whole --------------------------------------------------------
$r->cmd('ZADD', 'redisson_delay_queue_timeout:{q}', now_ms(), 'garbage');
$r->cmd('ZADD', 'redisson_delay_queue_timeout:{q}', now_ms(), '');
$r->cmd('ZADD', 'redisson_delay_queue_timeout:{q}', now_ms(), DqTest::Redis::pack_member('12345678', 'truncated') =~ s/...$//sr);
$t->sql("SELECT dq_offer('q', 'behind garbage')");
my $got = $r->cmd('BLPOP', 'q', 20);
is($got && $got->[1], 'behind garbage', 'G9 unreadable members do not stand in the way');
ok(poll_until(sub { ($t->stat('q', 'quarantined') || 0) == 3 }), 'they are counted in dq_stats');
ok($r->cmd('EXISTS', 'dq:{q}:bad'), 'and kept whole in the quarantine');
is($r->cmd('ZCARD', 'redisson_delay_queue_timeout:{q}'), 1, 'only the good pending one is left in the set');

# ---- J4 ------------------------------------------------------------------------------------------------------
$t->sql("SELECT dq_offer('q', repeat('x', 20 * 1024 * 1024))");
$got = $r->cmd('BLPOP', 'q', 60);
is($got && length $got->[1], 20 * 1024 * 1024, 'J4 20 MB');
$r->cmd('CONFIG', 'SET', 'proto-max-bulk-len', 1048576 * 2);
$t->sql("SELECT dq_offer('q', repeat('y', 3 * 1024 * 1024))");
$t->sql("SELECT dq_offer('jq', '1')");
$r->cmd('DEL', 'jq');
$t->sql("SELECT dq_offer('jq', '2')");
ok(poll_until(sub { grep { $_ eq '2' } $r->ready('jq') }), 'J4 a payload over proto-max-bulk-len stops no other queue');
ok(poll_until(sub { ($t->stat('q', 'last_error') || '') ne '' }), 'J4 and its queue says why');
$r->cmd('CONFIG', 'SET', 'proto-max-bulk-len', 512 * 1048576);
$got = $r->cmd('BLPOP', 'q', 60);
is($got && length $got->[1], 3 * 1024 * 1024, 'J4 with the limit raised it goes out');
# one statement with very many tasks
my $n = rounds(110000, 1100000);
$t->sql("SELECT count(dq_offer('q', 'm' || i, '1 hour')) FROM generate_series(1, $n) i");
ok(poll_until(sub { $r->cmd('ZCARD', 'redisson_delay_queue_timeout:{q}') == $n + 1 }, 300), "J4 $n tasks of one statement are split into pages");

$t->finish;
