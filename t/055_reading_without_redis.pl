# Planning and plain EXPLAIN work without Redis, whatever is asked; reading says 08006 or
# 08001, at once or after the timeouts, can be cancelled, and goes on when Redis is back.
# H2 E2 E8; what EXPLAIN ANALYZE tells of round trips, rows and bytes is what Redis saw
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time);

my $t = DqTest->new;
my $r = $t->redis;

$t->queue('q');
$t->queue('s', "shards '3'");
$t->sql("CREATE FOREIGN TABLE ready (payload text) SERVER redis OPTIONS (queue 'q', contents 'ready')");
$t->sql("CREATE FOREIGN TABLE bad (member bytea, reason text) SERVER redis OPTIONS (queue 'q', contents 'quarantine')");
for my $q (qw(q s))
{
	$t->sql("SELECT count(dq_offer_at('$q', repeat('x', 100) || i, timestamptz '2100-01-01 00:00Z' + i * interval '1 s', 'k' || i)) FROM generate_series(1, 3000) i");
}
$t->sync;

# ---- EXPLAIN asks nobody ------------------------------------------------------------------------

my @queries = (
	'SELECT * FROM q', 'SELECT count(*), min(due_at), max(due_at) FROM s',
	"SELECT * FROM q WHERE due_at BETWEEN now() AND now() + interval '1 day' ORDER BY due_at DESC LIMIT 5 OFFSET 2",
	"SELECT * FROM q WHERE key IN ('a', 'b')", "SELECT * FROM s WHERE id = '1-1' AND shard = 1",
	'SELECT * FROM q JOIN s USING (key)', 'SELECT * FROM q UNION ALL SELECT * FROM s',
	'SELECT payload FROM ready', 'SELECT * FROM bad',
	'DELETE FROM q WHERE due_at < now()', "UPDATE q SET due_at = now() WHERE key = 'a'",
	"INSERT INTO q (payload) VALUES ('x')", 'WITH x AS MATERIALIZED (SELECT * FROM q) SELECT count(*) FROM x');
my $s = $t->session;
my $pid = $s->run('SELECT pg_backend_pid()');
for my $format (qw(text json))
{
	like($s->run("EXPLAIN (VERBOSE, FORMAT $format) $_"), qr/redisson|Redis|Foreign|Insert/, "EXPLAIN, $format: " . substr($_, 0, 40)) for @queries;
}
unlike($r->cmd('CLIENT', 'LIST'), qr/\bname=dq_bridge:$pid\b/, 'H2 EXPLAIN opens no connection');
$s->run('SELECT count(*) FROM q');
like($r->cmd('CLIENT', 'LIST'), qr/\bname=dq_bridge:$pid\b/, '... a query does');
$s->quit;
$r->stop;
$s = $t->session;
for my $query (@queries)
{
	my $start = time();
	my $answer = $s->run("EXPLAIN (VERBOSE) $query");

	ok($answer =~ /Foreign|Insert/ && $answer !~ /ERROR/ && time() - $start < 2, 'H2 without Redis: ' . substr($query, 0, 40)) or diag($answer);
}
unlike($s->run('PREPARE p(text) AS SELECT * FROM q WHERE key = $1; EXPLAIN EXECUTE p(\'a\')'), qr/ERROR/, 'H2 a prepared one as well');
for my $query (grep { /^(SELECT|WITH)/ && !/UNION/ } @queries)
{
	like($s->run($query), qr/ERROR:  08(001|006)/, 'E2 reading says so: ' . substr($query, 0, 40));
}
like($s->run('SELECT * FROM q UNION ALL SELECT * FROM s'), qr/ERROR:  08(001|006)/, 'E2 below an Append');
is($s->run('SELECT 1'), 1, 'the session is fine');
$r->start;
is($s->run('SELECT count(*) FROM q'), 3000, 'E2 and goes on when Redis is back');
is($s->run("EXECUTE p('k7')") =~ /k7/ ? 'yes' : 'no', 'yes', 'the prepared one as well');

# ---- Redis dies, or hangs, in the middle of a scan -------------------------------------------------

$s->run('BEGIN; DECLARE c CURSOR FOR SELECT payload FROM q; FETCH 10 FROM c');
$r->kill9;
like($s->run('FETCH ALL FROM c'), qr/ERROR:  08(001|006)/, 'E2 killed after the first page');
$s->run('ROLLBACK');
$r->start;
is($s->run('SELECT count(payload) FROM q'), 3000, 'E2 the next statement works');
for my $query ('SELECT count(payload) FROM q', 'SELECT count(*) FROM s', "SELECT * FROM q WHERE key = 'k1'", 'SELECT * FROM s ORDER BY due_at LIMIT 1',
	'EXPLAIN ANALYZE SELECT payload FROM q', 'ANALYZE q', 'IMPORT FOREIGN SCHEMA "*" FROM SERVER redis INTO other')
{
	$s->run('CREATE SCHEMA IF NOT EXISTS other');
	$s->run('SELECT count(*) FROM q');
	$r->freeze;
	$s->send("SET statement_timeout = '700ms'; $query");
	my $start = time();
	my $answer = $s->receive(20);
	like($answer, qr/ERROR:  57014/, 'E8 cancelled while Redis hangs: ' . substr($query, 0, 40));
	cmp_ok(time() - $start, '<', 2.5, 'E8 ... in time');
	$r->thaw;
	$s->run('RESET statement_timeout');
}
is($s->run('SELECT count(payload) FROM q'), 3000, 'E8 and the next one is fine');

# ---- what EXPLAIN ANALYZE says ---------------------------------------------------------------------

sub calls
{
	my $stats = $r->cmd('INFO', 'commandstats');
	my $n = 0;

	$n += $1 while $stats =~ /cmdstat_eval(?:sha)?:calls=(\d+)/g;
	return $n;
}

sub sent { my ($bytes) = $r->cmd('INFO', 'stats') =~ /total_net_output_bytes:(\d+)/; return $bytes; }

# no worker that sends scripts in between
$t->sql('ALTER SYSTEM SET dq_bridge.enabled = off; SELECT pg_reload_conf()');
poll_until(sub { $t->sql("SELECT count(*) FROM dq_workers WHERE pid > 0 AND role = 'bridge'") eq '0' });
$s->run('SELECT count(*) FROM q; SELECT count(payload) FROM q');
for my $case (
	[ 'SELECT payload FROM q', 3000 ], [ 'SELECT id FROM q', 3000 ], [ 'SELECT key FROM s ORDER BY due_at', 3000 ], [ 'SELECT count(*) FROM q', 0 ],
	[ "SELECT * FROM q WHERE due_at <= '2100-01-01 00:01Z'", 60 ], [ 'SELECT * FROM q ORDER BY due_at DESC LIMIT 7', 7 ],
	[ "SELECT * FROM s WHERE key IN ('k1', 'k2', 'k3')", 3 ], [ "SELECT * FROM q WHERE payload LIKE '%99'", 3000 ], [ 'SELECT payload FROM q WHERE due_at > NULL', undef ])
{
	my ($query, $rows) = @$case;
	my $calls = calls();
	my $sent = sent();
	my $overhead = sent() - $sent;
	$sent = sent();
	my $answer = $s->run("EXPLAIN (ANALYZE, VERBOSE, COSTS OFF, TIMING OFF, SUMMARY OFF) $query");
	my $bytes = sent() - $sent - $overhead;
	my $did = calls() - $calls;
	my ($trips) = $answer =~ /Round Trips: (\d+)/;
	my ($fetched) = $answer =~ /Tasks from Redis: (\d+)/;
	my ($told) = $answer =~ /Bytes from Redis: (\d+)/;

	if (!defined $rows)
	{
		is($did, 0, "nothing is asked when nothing can be found: $query");
		next;
	}
	is($fetched, $rows, "tasks fetched: $query") or diag($answer);
	# of three shards the pages go in one pipeline: a round trip, up to three scripts
	ok($trips <= $did && $trips >= $did / 3, "... round trips are those that Redis saw ($trips, $did scripts)");
	ok($told > 0 && abs($told - $bytes) < 300 + 0.25 * $bytes, "... bytes as well ($told told, $bytes sent)");
}
my ($with, $without) = map { $s->run("EXPLAIN (ANALYZE) SELECT $_ FROM q") =~ /Bytes from Redis: (\d+)/ ? $1 : 0 } qw(payload due_at);
cmp_ok($with, '>', $without + 3000 * 50, 'H3 payloads that nobody reads are not sent');

$s->quit;
$t->finish;
