# dq_poll: due tasks taken under a hold: commit consumes them, rollback, a savepoint or
# a dead session put them back in front. G1; PO 8 9 10
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

my $t = DqTest->new(conf => "max_prepared_transactions = 10\n");
my $r = $t->redis;

$t->queue('q');
$t->queue('q4', "shards '4'");
my $s = $t->session;
my $o = $t->session;

# the ready list, filled as any transferer would
sub fill { my ($q, @p) = @_; $r->cmd('RPUSH', $q, @p); }
sub ready { my ($q) = @_; return join(',', $r->ready($q)); }
sub empty { my ($q) = @_; $r->cmd('DEL', $q); }
sub held { my ($q) = @_; return $r->cmd('HLEN', "dq:{$q}:hold"); }
sub free_ok { my ($q, $what) = @_; ok(poll_until(sub { held($q) == 0 }), "no hold is left: $what"); is($r->cmd('HGET', "dq:{$q}:fence", 'polled') || 0, 0, '... and none is counted'); }
sub lines { my ($text) = @_; $text =~ tr/\n/,/; return $text; }

# ---- one session ---------------------------------------------------------------

is($s->run("SELECT dq_poll('q')"), '', 'nothing there');
$t->sql("SELECT dq_offer('q', 'p' || i) FROM generate_series(1, 6) i");
ok(poll_until(sub { $r->cmd('LLEN', 'q') == 6 }), 'six are due');
is($s->run("SELECT dq_poll('q')"), 'p1', 'one by default, the first');
is(lines($s->run("SELECT * FROM dq_poll('q', 3)")), 'p2,p3,p4', 'three, in order');
is(lines($s->run("SELECT * FROM dq_poll('q', 100)")), 'p5,p6', 'no more than there are');
is($s->run("SELECT count(*) FROM dq_poll('q', 0)"), '0', 'max 0');
free_ok('q', 'commit');
is($s->run("SELECT count(*) FROM dq_poll('q', 100)"), '0', 'consumed');
is($t->sql("SELECT dq_poll_bytea('q')"), '', 'nothing as bytea');

fill('q', 1 .. 9);
$s->run('BEGIN');
is(lines($s->run("SELECT dq_poll('q', 2)")), '1,2', 'in a transaction');
is(lines($s->run("SELECT dq_poll('q', 2)")), '3,4', 'then the next ones');
is($o->run("SELECT dq_poll('q')"), '5', 'another session has its own');
ok(poll_until(sub { $t->stat('q', 'held') eq '4' && $t->stat('q', 'ready') eq '4' }), 'dq_stats: four are held, four are ready')
  or diag($t->sql("SELECT held, ready FROM dq_stats WHERE queue = 'q'::regclass"));
$s->run('ROLLBACK');
ok(poll_until(sub { ready('q') eq '1,2,3,4,6,7,8,9' }), 'rollback: in front, in order') or diag(ready('q'));
free_ok('q', 'rollback');
ok(poll_until(sub { $t->stat('q', 'held') eq '0' && $t->stat('q', 'ready') eq '8' }), 'dq_stats knows');

# FINDINGS: what the function has taken is taken, whatever the query does with it
is($s->run("SELECT * FROM dq_poll('q', 4) LIMIT 1"), '1', 'LIMIT 1 of four');
ok(poll_until(sub { ready('q') eq '6,7,8,9' }), '... takes four, as documented');

# savepoints: put back at once where the same transaction polls again
$s->run('BEGIN; SAVEPOINT a');
is(lines($s->run("SELECT dq_poll('q', 2)")), '6,7', 'in a savepoint');
is(lines($s->run("SELECT dq_poll('q', 1)")), '8', '... and once more');
$s->run('ROLLBACK TO a');
is(lines($s->run("SELECT dq_poll('q', 3)")), '6,7,8', 'after ROLLBACK TO they are there again');
$s->run('ROLLBACK TO a');
ok(poll_until(sub { ready('q') eq '6,7,8,9' }), 'put back while the transaction goes on');
$s->run('SAVEPOINT b');
is(lines($s->run("SELECT dq_poll('q', 2)")), '6,7', 'in another savepoint');
$s->run('RELEASE b; COMMIT');
$t->sync;
free_ok('q', 'savepoints');
is(ready('q'), '8,9', 'what the released savepoint took is consumed');
is($s->run("DO \$\$ BEGIN PERFORM dq_poll('q', 1); RAISE division_by_zero; EXCEPTION WHEN division_by_zero THEN END \$\$; SELECT dq_poll('q', 1)"),
	'8', 'a block that failed has taken nothing');
empty('q');

# many pages, and large ones
fill('q', map { "n$_" } 1 .. 450);
$s->run('BEGIN');
is($s->run("SELECT count(*), min(x), string_agg(x, ',') = string_agg(x, ',' ORDER BY substr(x, 2)::int) FROM dq_poll('q', 1000) x"),
	'450|n1|t', '450 in one call, in order');
$s->run('ROLLBACK');
ok(poll_until(sub { $r->cmd('LLEN', 'q') == 450 && held('q') == 0 }), 'rolled back');
is(ready('q'), join(',', map { "n$_" } 1 .. 450), 'in order over many holds');
empty('q');
my @large = map { chr(96 + $_) x 300_000 } 1 .. 5;
fill('q', @large);
is($s->run("SELECT string_agg(left(x, 1) || length(x), ',') FROM dq_poll('q', 9) x"), join(',', map { substr($_, 0, 1) . '300000' } @large), 'large payloads');
free_ok('q', 'large payloads');

# ---- what is refused -------------------------------------------------------------

$t->queue('qp', "role 'producer'");
$t->queue('qn', "destination 'none'");
$t->fails("SELECT dq_poll(NULL)", '22004', 'NULL queue');
$t->fails("SELECT dq_poll('q', NULL)", '22004', 'NULL max');
$t->fails("SELECT dq_poll('q', 1, NULL)", '22004', 'NULL wait');
$t->fails("SELECT dq_poll('q', -1)", '22023', 'negative max');
$t->fails("SELECT dq_poll('q', 1, '-1 s')", '22023', 'negative wait');
$t->fails("SELECT dq_poll('qp')", '55000', 'a producer does not poll');
$t->fails("SELECT dq_poll('qn')", '0A000', 'no ready list');
$t->fails("SELECT dq_poll('pg_class')", '42809', 'no queue');
$t->fails("BEGIN READ ONLY; SELECT dq_poll('q')", '25006', 'read only transaction');
$t->sql("CREATE ROLE reader; GRANT SELECT ON q TO reader; CREATE ROLE taker; GRANT SELECT, DELETE ON q TO taker");
fill('q', 'r');
$t->fails("SET ROLE reader; SELECT dq_poll('q')", '42501', 'SELECT alone does not do');
is($t->sql("SET ROLE taker; SELECT dq_poll('q')"), 'r', 'SELECT and DELETE do');
$r->cmd('SET', 'q', 'a string');
$t->fails("SELECT dq_poll('q')", '42809', 'something that is no list lies there');
empty('q');

# shapes of calls
fill('q', 1 .. 9);
is(lines($s->run("SELECT g, dq_poll('q', 2) FROM generate_series(1, 2) g")), '1|1,1|2,2|3,2|4', 'in the target list, once for each row');
is(lines($s->run("SELECT g, p FROM generate_series(1, 2) g, LATERAL dq_poll('q', g) p")), '1|5,2|6,2|7', 'LATERAL');
is(lines($s->run("BEGIN; DECLARE c CURSOR FOR SELECT * FROM dq_poll('q', 2); FETCH 1 FROM c; COMMIT")), '8', 'a cursor');
$t->sync;
is(ready('q'), '', '... takes all that it was asked for');

# somebody else's
{
	$t->queue('theirs');
	fill('theirs', 'x');
	is($t->sql("BEGIN; SELECT dq_poll('theirs'); ROLLBACK"), 'x', 'ours');
	ok(poll_until(sub { ready('theirs') eq 'x' }), 'put back');
	$r->cmd('HSET', 'dq:{theirs}:owner', 'source', 'f' x 32, 'lease', now_ms() + 600000);
	$t->fails("SELECT dq_poll('theirs')", '55000', 'another database has become the owner', like => qr/dq_adopt/);
	empty('theirs');
	$t->fails("SELECT dq_poll('theirs', 1, '10 s')", '55000', '... which is told when nothing is there, too');
}

# ---- who dies, two-phase commit, restart -------------------------------------------

fill('q', 1 .. 9);
$s->run('BEGIN');
is(lines($s->run("SELECT dq_poll('q', 2)")), '1,2', 'taken');
$t->sql('SELECT pg_terminate_backend(' . $s->run('SELECT pg_backend_pid()') . ')');
ok(poll_until(sub { ready('q') eq join(',', 1 .. 9) }), 'a dead session: back in front');
$s = $t->session;
is(lines($s->run("BEGIN; SELECT dq_poll('q', 2); PREPARE TRANSACTION 'one'")), '1,2', 'prepared');
is(lines($s->run("BEGIN; SELECT dq_poll('q', 2); PREPARE TRANSACTION 'two'")), '3,4', 'prepared');
$s->run('BEGIN');
is(lines($s->run("SELECT dq_poll('q', 2)")), '5,6', 'not prepared');
$t->node->stop('immediate');
$t->node->start;
$_->quit for $s, $o;
($s, $o) = ($t->session, $t->session);
ok(poll_until(sub { ready('q') eq join(',', 5 .. 9) }), 'a crash puts back what was not prepared');
is(held('q'), 2, 'what was prepared is held');
$t->sync;
is(held('q'), 2, 'nothing is consumed before COMMIT PREPARED');
$s->run("COMMIT PREPARED 'one'");
ok(poll_until(sub { held('q') == 1 }), 'COMMIT PREPARED consumes');
$s->run("ROLLBACK PREPARED 'two'");
ok(poll_until(sub { ready('q') eq join(',', 3 .. 9) }), 'ROLLBACK PREPARED puts back');
free_ok('q', 'two-phase commit');
empty('q');

# ---- several at once ----------------------------------------------------------------

my $n = 5000;
$t->sql("SELECT count(dq_offer('q', i::text)) FROM generate_series(1, $n) i");
$t->sql('CREATE TABLE got (p text, who int)');
my @pollers = map { $t->session } 1 .. 8;
for my $i (0 .. $#pollers)
{
	# a third of the transactions is rolled back
	$pollers[$i]->send(<<"SQL");
DO \$\$
DECLARE
  n int; misses int := 0; round int := 0;
BEGIN
  WHILE misses < 3 LOOP
    round := round + 1;
    BEGIN
      INSERT INTO got SELECT x, $i FROM dq_poll('q', 7, '1 s') x;
      GET DIAGNOSTICS n = ROW_COUNT;
      IF n = 0 THEN misses := misses + 1; ELSE misses := 0; END IF;
      IF round % 3 = 0 THEN RAISE division_by_zero; END IF;
    EXCEPTION WHEN division_by_zero THEN
    END;
    COMMIT;
  END LOOP;
END \$\$
SQL
}
my @answers = map { $_->receive(120) } @pollers;
is(join('', map { defined $_ ? $_ : 'nothing' } @answers), '', 'eight sessions poll until nothing comes');
is($t->sql('SELECT count(*), count(DISTINCT p) FROM got'), "$n|$n", "$n tasks, each once");
cmp_ok($t->sql('SELECT count(DISTINCT who) FROM got'), '==', 8, 'everybody had some');
$t->sync;
free_ok('q', 'eight sessions');
is($r->cmd('LLEN', 'q'), 0, 'nothing is left');
$_->quit for @pollers;

# BLPOP consumers beside
$t->sql('TRUNCATE got');
my @consumers = map { $r->consumer('q') } 1 .. 2;
$s->send("DO \$\$ DECLARE misses int := 0; n int; BEGIN WHILE misses < 3 LOOP INSERT INTO got SELECT x, 0 FROM dq_poll('q', 3, '1 s') x; GET DIAGNOSTICS n = ROW_COUNT; IF n = 0 THEN misses := misses + 1; END IF; COMMIT; END LOOP; END \$\$");
$t->sql("SELECT count(dq_offer('q', 'b' || i, make_interval(secs => i / 2000.0))) FROM generate_series(1, 1000) i");
is($s->receive(60), '', 'a session polls beside BLPOP consumers');
my @sql = split /\n/, $t->sql('SELECT p FROM got');
my @theirs;
for my $c (@consumers)
{
	push @theirs, $c->payloads;
	$c->stop;
}
is_books('each once, whoever had it', [ map { "b$_" } 1 .. 1000 ], \@sql, \@theirs);

# ---- shards ---------------------------------------------------------------------------

for my $i (0 .. 3) { fill("q4#$i", map { "s$i:$_" } 1 .. 20); }
$s->run('BEGIN');
is($s->run("SELECT count(*), count(DISTINCT left(x, 2)) FROM dq_poll('q4', 12) x"), '12|4', 'all shards have a part');
$s->run('ROLLBACK');
ok(poll_until(sub { (grep { $r->cmd('LLEN', "q4#$_") == 20 } 0 .. 3) == 4 }), 'all are back');
is($s->run("SELECT count(*) FROM dq_poll('q4', 1000)"), '80', 'all of them');
$r->cmd('RPUSH', "q4#$_", ("s$_") x 5) for 0 .. 3;
my %first = map { $s->run("SELECT dq_poll('q4')") => 1 } 1 .. 4;
is(scalar(keys %first), 4, 'one at a time: every shard has its turn');
$s->run("SELECT dq_poll('q4', 100)");

# ---- no valid text ----------------------------------------------------------------------

fill('q', 'good', "bad\xff", 'better', "bad\xff", "n\0l", 'best');
is(lines($s->run("BEGIN; SELECT dq_poll('q', 3); ROLLBACK")), 'good,better,best', 'what is no text is passed over');
is($r->cmd('HLEN', 'dq:{q}:bad'), 2, '... into quarantine, whatever becomes of the transaction');
like($r->cmd('HGET', 'dq:{q}:bad', "bad\xff"), qr/^not valid as text\|\|\d+\|2$/, 'with a reason, and how many there were');
ok(poll_until(sub { ready('q') eq 'good,better,best' }), 'the others are back');
ok(poll_until(sub { $t->stat('q', 'quarantined') eq '2' }), 'dq_stats knows');
$r->cmd('DEL', 'dq:{q}:bad');
$s->run("SELECT dq_poll('q', 9)");
fill('q', "\xff", "\xfe");
is($s->run("SELECT dq_poll('q', 9)"), '', 'nothing but that');
free_ok('q', 'quarantine');
fill('q', "\xff\0x");
is($s->run("SELECT dq_poll_bytea('q')"), '\xff0078', 'dq_poll_bytea gives the bytes');
$r->cmd('DEL', 'dq:{q}:bad');

# in another encoding
{
	$t->sql("CREATE DATABASE latin TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'");
	$t->extend('latin');
	$t->queue('ql', undef, db => 'latin');
	# a shard that has just been made is not open yet, and a poll would give nothing
	ok($t->wait_state('ql', 'running', db => 'latin'), 'a queue in a database of another encoding');
	fill('ql', "\xc3\xa9", "\xe2\x82\xac", 'ascii');
	is($t->sql("SELECT string_agg(encode(convert_to(x, 'UTF8'), 'hex'), ',') FROM dq_poll('ql', 9) x", db => 'latin'),
		'c3a9,6173636969', 'what the encoding of the database has no letter for goes to quarantine');
	is($r->cmd('HLEN', 'dq:{ql}:bad'), 1, 'one');
}

$_->quit for $s, $o;
$t->finish;
