# Queues below an Append are read at once: each over a connection of its own, so that a slow
# server does not keep the rows of a fast one away; the rows are the same as one by one, each
# once. A hanging server: cancel and command_timeout act as ever. H1 H5 H8 E8
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

my $t = DqTest->new;
my $r = $t->redis;
my $r2 = DqTest::Redis->new(name => 'second');

$t->sql("CREATE SERVER second FOREIGN DATA WRAPPER dq_bridge OPTIONS (socket '" . $r2->socket . "', command_timeout '3s', connect_timeout '4s')");
$t->sql('CREATE TABLE p (id text, key text, payload text, due_at timestamptz, shard int) PARTITION BY RANGE (due_at)');
# three on one server, one of them sharded, two on the other, one local
my @parts = (
	[ 'p1', 'redis', '' ], [ 'p2', 'second', '' ], [ 'p3', 'redis', "OPTIONS (shards '3')" ],
	[ 'p4', 'second', '' ], [ 'p5', 'redis', '' ]);
for my $i (0 .. $#parts)
{
	my ($name, $server, $options) = @{ $parts[$i] };
	my ($from, $to) = map { sprintf("'2100-01-%02d 00:00Z'", $_) } $i + 1, $i + 2;

	$t->sql("CREATE FOREIGN TABLE $name PARTITION OF p FOR VALUES FROM ($from) TO ($to) SERVER $server $options");
	$t->sql("SELECT count(dq_offer_at('$name', '$name-' || i, timestamptz $from + i * interval '1 s', '$name-' || i)) FROM generate_series(1, 3000) i");
}
$t->sql("CREATE TABLE p6 PARTITION OF p FOR VALUES FROM ('2100-01-06 00:00Z') TO ('2100-01-07 00:00Z')");
$t->sql("INSERT INTO p6 SELECT i, NULL, 'p6-' || i, timestamptz '2100-01-06 00:00Z' + i * interval '1 s', 0 FROM generate_series(1, 3000) i");
ok($t->sync, 'six partitions of 3,000');
my @all = map { my $p = $_; map { "p$p-$_" } 1 .. 3000 } 1 .. 6;

my $s = $t->session;

sub plan_of
{
	my ($sql) = @_;

	return $s->run("EXPLAIN (COSTS OFF) $sql");
}

# ---- which plans ----------------------------------------------------------------------------

is(scalar(() = plan_of('SELECT payload FROM p') =~ /Async Foreign Scan/g), 5, 'each of the queues is read asynchronously');
is(scalar(() = plan_of("SELECT payload FROM p1 UNION ALL SELECT payload FROM p2") =~ /Async Foreign Scan/g), 2, 'below UNION ALL as well');
unlike(plan_of("SELECT payload FROM p WHERE key IN ('p1-5', 'p3-7')"), qr/Async/, 'not what is looked up by key: it is one exchange');
unlike(plan_of('SELECT payload FROM p ORDER BY due_at'), qr/Async/, 'not in order: one after the other');
unlike(plan_of('SELECT count(*) FROM p1'), qr/Async/, 'not a single queue');
$s->run('SET enable_async_append = off');
unlike(plan_of('SELECT payload FROM p'), qr/Async/, 'not when it is off');
my $one_by_one = $s->run('SELECT payload FROM p');
$s->run('RESET enable_async_append');

# ---- the same rows ------------------------------------------------------------------------------

is_books('all of them, each once', \@all, [ split /\n/, $s->run('SELECT payload FROM p') ]);
is_books('... and one by one', \@all, [ split /\n/, $one_by_one ]);
is($s->run("SELECT count(*), count(DISTINCT id), count(DISTINCT key), min(due_at) = '2100-01-01 00:00:01Z', max(payload) FROM p"), '18000|18000|15000|t|p6-999', 'all columns');
is($s->run("SELECT count(*) FROM p WHERE due_at BETWEEN '2100-01-01 23:59Z' AND '2100-01-03 00:10Z'"), 3600, 'a range over some');
is($s->run("SELECT count(*) FROM p WHERE payload LIKE '%-7'"), 6, 'H8 a filter that Redis does not know');
is($s->run("SELECT count(*) FROM p WHERE due_at > NULL::timestamptz"), 0, 'nothing at all');
is($s->run("SELECT count(*) FROM (SELECT payload FROM p LIMIT 10) x"), 10, 'a limit ends it in the middle');
is($s->run("SELECT count(*) FROM (SELECT payload FROM p LIMIT 7000) x"), 7000, '... and once more on the same connections');
is($s->run("SELECT count(*) FROM p a JOIN p b USING (payload) WHERE a.due_at < '2100-01-03Z'"), 6000, 'more scans at once than connections');
is($s->run("SET enable_material = off; SET enable_hashjoin = off; SET enable_mergejoin = off; SELECT count(*) FROM generate_series(1, 3) i, LATERAL (SELECT payload FROM p WHERE i > 0 OFFSET 0) x"),
	54000, 'H5 begun anew');
is($s->run("SELECT count(*) FROM generate_series(1, 3) i, LATERAL (SELECT payload FROM p WHERE i > 0 LIMIT 1000) x"), 3000, 'H5 begun anew in the middle');
$s->run('RESET enable_material; RESET enable_hashjoin; RESET enable_mergejoin');

# cursors in turn, other statements over the same servers between
$s->run('BEGIN; DECLARE a CURSOR FOR SELECT payload FROM p; DECLARE b CURSOR FOR SELECT payload FROM p WHERE payload LIKE \'%1\'');
my (@a, @b);
for (1 .. 20)
{
	push @a, split /\n/, $s->run('FETCH 321 FROM a');
	is($s->run("SELECT count(*) FROM p1 WHERE key = 'p1-5'"), 1, 'a look-up between') if $_ % 10 == 0;
	push @b, split /\n/, $s->run('FETCH 33 FROM b');
}
$s->run('SAVEPOINT x');
like($s->run("SELECT 1 / (payload = 'p4-2999')::int FROM p"), qr/22012/, 'an error in a third');
$s->run('ROLLBACK TO x');
push @a, split /\n/, $s->run('FETCH ALL FROM a');
push @b, split /\n/, $s->run('FETCH ALL FROM b');
$s->run('COMMIT');
is_books('H5 a cursor among others', \@all, \@a);
is_books('H5 the other one', [ grep { /1$/ } @all ], \@b);

# what is in the outbox, and what this transaction did
$s->run("BEGIN; SELECT dq_offer_at('p2', 'own', '2100-01-02 12:00Z'); DELETE FROM p3 WHERE payload IN ('p3-1', 'p3-2'); UPDATE p1 SET payload = 'new' WHERE payload = 'p1-9'");
is_books('I2 own changes are seen', [ (grep { !/^(p3-[12]|p1-9)$/ } @all), 'own', 'new' ], [ split /\n/, $s->run('SELECT payload FROM p') ]);
$s->run('ROLLBACK');
is($s->run("BEGIN; WITH gone AS (DELETE FROM p WHERE payload LIKE '%-1' RETURNING payload) SELECT string_agg(payload, ' ' ORDER BY payload) FROM gone"),
	'p1-1 p2-1 p3-1 p4-1 p5-1 p6-1', 'DELETE over all');
$s->run('ROLLBACK');

# what EXPLAIN ANALYZE says is true: every row counted once
my $explained = $s->run('EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, SUMMARY OFF) SELECT payload FROM p');
is(scalar(() = $explained =~ /Async Foreign Scan on p\d[^(]*\(actual rows=3000(\.00)? loops=1\)/g), 5, 'EXPLAIN ANALYZE counts rows') or diag($explained);
is(scalar(() = $explained =~ /Tasks from Redis: 3000/g), 5, '... and what was fetched');

# ---- a slow server and a hanging one ----------------------------------------------------------------

$r2->freeze;
$s->run('BEGIN; DECLARE c CURSOR FOR SELECT payload FROM p');
my $start = time();
my @early = split /\n/, $s->run('FETCH 12000 FROM c');
is(scalar(grep { /^p[1356]-/ } @early), 12000, 'what other servers have comes although one hangs') or diag(scalar @early);
$r2->thaw;
is_books('... and the rest when it goes on', \@all, \@early, [ split /\n/, $s->run('FETCH ALL FROM c') ]);
$s->run('COMMIT');

$r2->freeze;
$start = time();
like($s->run("SET statement_timeout = '1s'; SELECT count(payload) FROM p"), qr/57014/, 'E8 statement_timeout');
cmp_ok(time() - $start, '<', 2.5, 'E8 ... at once');
$s->run('RESET statement_timeout');
$r2->thaw;
is($s->run('SELECT count(payload) FROM p'), 18000, 'and all is well afterwards');
$s->run('BEGIN; DECLARE c CURSOR FOR SELECT payload FROM p; FETCH 1000 FROM c');
$r2->freeze;
$start = time();
like($s->run('FETCH ALL FROM c'), qr/08006.*command_timeout of 3000 ms expired/s, 'E8 command_timeout acts');
cmp_ok(time() - $start, '<', 8, 'E8 ... by its value');
$s->run('ROLLBACK');
$r2->thaw;
is($s->run('SELECT count(payload) FROM p'), 18000, 'and all is well afterwards');

# connections that an administrator closed, scripts that are gone
$r->cmd('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes');
is($s->run('SELECT count(payload) FROM p'), 18000, 'E6 after CLIENT KILL');
$r->cmd('SCRIPT', 'FLUSH');
is($s->run('SELECT count(payload) FROM p'), 18000, 'after SCRIPT FLUSH');
cmp_ok(scalar(grep { /name=/ && !/cmd=(?:subscribe|client)/ } split /\n/, $r->cmd('CLIENT', 'LIST')), '<', 20, 'not a connection for each query');

$s->quit;
$r2->stop;
$t->finish;
