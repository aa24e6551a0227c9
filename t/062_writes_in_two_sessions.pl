# INSERT, UPDATE and DELETE of tasks as rows: part of the transaction, exact about
# which task, and in two sessions as with a table. G1 G4; B1; A11; F3; H16
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
$t->sql("CREATE FOREIGN TABLE bare (payload text) SERVER redis OPTIONS (queue 'q')");

my ($s, $o) = ($t->session, $t->session);

sub rows { my ($q, $what) = @_; $what ||= 'payload'; $t->sync; return $t->sql("SELECT coalesce(string_agg($what, ',' ORDER BY due_at, payload), '-') FROM $q"); }
sub clear { $t->sql("DELETE FROM $_") for qw(q q4); $t->sync; }

# ---- INSERT is dq_offer ---------------------------------------------------------------

like($t->sql("INSERT INTO q (payload, due_at, key) VALUES ('a', now() + '1 hour', 'k') RETURNING id"), qr/^\d+-\d+$/, 'RETURNING gives the id');
is($t->sql("INSERT INTO q (payload) SELECT 'now' RETURNING due_at <= clock_timestamp() + '2 ms'::interval"), 't', 'without due_at: now');
is(($r->cmd('BLPOP', 'q', 10) || ['', 'nothing'])->[1], 'now', '... and it is delivered');
$t->fails("INSERT INTO q (payload, due_at) VALUES (NULL, now())", '22004');
$t->fails("INSERT INTO q (id, payload) VALUES ('1-1', 'x')", '428C9');
$t->fails("INSERT INTO q (payload) VALUES ('x') ON CONFLICT DO NOTHING", '0A000');
$t->sql("COPY q4 (payload, due_at, key) FROM PROGRAM 'seq 100 | sed \"s/.*/p&\t2999-01-01\tk&/\"'");
is(rows('q4', "key") =~ tr/,//, 99, 'COPY of 100 rows');
is($t->sql("SELECT count(DISTINCT shard) FROM q4"), 4, '... over the shards');
$s->run("BEGIN; INSERT INTO q (payload, due_at) VALUES ('undone', now() + '1 hour'); SAVEPOINT s; INSERT INTO q (payload, due_at) VALUES ('undone', now() + '1 hour'); ROLLBACK");
is(rows('q'), 'a', 'rolled back: never was');
clear();

# ---- which task ---------------------------------------------------------------------------

$t->sql("INSERT INTO q (payload, due_at) SELECT 'twin', now() + i * interval '1 hour' FROM generate_series(1, 5) i");
my $third = $t->sql("SELECT id FROM q ORDER BY due_at OFFSET 2 LIMIT 1");
is($t->sql("DELETE FROM q WHERE id = '$third' RETURNING payload"), 'twin', 'one of five equal ones, by its id');
$t->sync;
is($t->sql("SELECT count(*), count(*) FILTER (WHERE id = '$third') FROM q"), '4|0', '... and no other');
is($t->sql("WITH d AS (DELETE FROM bare RETURNING payload) SELECT count(*) FROM d"), 4, 'a table without id deletes all of them, each once');
is(rows('q'), '-', 'empty');
$r->redisson_offer('q', now_ms() + 3600000, 'java');
{
	my $at = '2999-01-02 03:04:05.678+00';
	my @stored = split /\|/, $t->sql("INSERT INTO q (payload, due_at, key) VALUES ('whole', '$at', 'w') RETURNING id, key, payload, due_at");
	is($t->sql("DELETE FROM q WHERE key = 'w' RETURNING id, key, payload, due_at"), join('|', @stored), 'DELETE gives the task back whole, not sent yet');
	@stored = split /\|/, $t->sql("INSERT INTO q (payload, due_at, key) VALUES ('whole', '$at', 'w') RETURNING id, key, payload, due_at");
	$t->sync;
	is($t->sql("DELETE FROM q WHERE key = 'w' RETURNING id, key, payload, due_at"), join('|', @stored), '... and out of Redis');
}
is($t->sql("UPDATE q SET payload = 'moved' WHERE payload = 'java' RETURNING payload"), 'moved', 'a task of a foreign producer');
is(rows('q'), 'moved', 'replaced');
$t->fails("DELETE FROM q WHERE ctid IN (SELECT ctid FROM q LIMIT 1)", '0A000');
clear();

# ---- the transaction ------------------------------------------------------------------------

$t->sql("INSERT INTO q4 (payload, due_at, key) SELECT 'p' || i, now() + '1 hour', i FROM generate_series(1, 40) i");
$t->sync;
$s->run('BEGIN');
is($s->run("WITH u AS (UPDATE q4 SET due_at = due_at + '1 day' WHERE key::int <= 10 RETURNING 1) SELECT count(*) FROM u"), '10', 'ten moved');
is($s->run("WITH d AS (DELETE FROM q4 WHERE key::int > 30 RETURNING 1) SELECT count(*) FROM d"), '10', 'ten deleted');
is($s->run("SELECT count(*), count(*) FILTER (WHERE due_at > now() + '2 hours') FROM q4"), '30|10', 'its transaction sees it');
is($o->run("SELECT count(*), count(*) FILTER (WHERE due_at > now() + '2 hours') FROM q4"), '40|0', 'others do not');
$s->run('SAVEPOINT s');
is($s->run("WITH d AS (DELETE FROM q4 RETURNING 1) SELECT count(*) FROM d"), '30', 'all in a savepoint');
$s->run('ROLLBACK TO s');
is($s->run("SELECT count(*) FROM q4"), '30', '... undone');
$s->run('COMMIT');
$t->sync;
is($t->sql("SELECT count(*), count(*) FILTER (WHERE due_at > now() + '2 hours') FROM q4"), '30|10', 'committed');
ok(poll_until(sub { $t->sql("SELECT sum(held) FROM dq_stats") == 0 }), 'no hold is left');
$s->run('BEGIN');
$s->run("DELETE FROM q4 WHERE key::int <= 5; UPDATE q4 SET payload = 'new' WHERE key::int BETWEEN 6 AND 10");
$s->run("PREPARE TRANSACTION 'w'");
$t->node->restart;
$_ = $t->session for $s, $o;
is($t->sql("SELECT count(*) FROM q4"), 30, 'prepared: nothing yet');
$s->run("COMMIT PREPARED 'w'");
$t->sync;
ok(poll_until(sub { $t->sql("SELECT count(*), count(*) FILTER (WHERE payload = 'new') FROM q4") eq '25|5' }), 'COMMIT PREPARED')
  or diag($t->sql("SELECT count(*), count(*) FILTER (WHERE payload = 'new') FROM q4"));
clear();

# ---- two sessions at the same task: the second one waits and sees the truth -----------------------

my %change = (
	delete => "WITH x AS (DELETE FROM q WHERE key = 'k' RETURNING 1) SELECT count(*) FROM x",
	update => "WITH x AS (UPDATE q SET payload = 'by the other' WHERE key = 'k' RETURNING 1) SELECT count(*) FROM x",
	remove => "SELECT count(*) FILTER (WHERE dq_remove('q', 'k')) FROM (VALUES (1)) x");
for my $first (sort keys %change)
{
	for my $second (sort keys %change)
	{
		for my $end ('COMMIT', 'ROLLBACK')
		{
			my $what = "$first, $end; $second";

			$t->sql("INSERT INTO q (payload, due_at, key) VALUES ('it', now() + '1 hour', 'k')");
			$t->sync;
			$s->run('BEGIN');
			is($s->run($change{$first}), '1', "$what: the first has it");
			$o->send($change{$second});
			is($o->receive(0.2), undef, "$what: the second waits");
			$s->run($end);
			my $got = $o->receive(30);
			$t->sync;
			my $left = rows('q');
			if ($end eq 'ROLLBACK')
			{
				is($got, '1', "$what: rolled back, the second has it");
				is($left, $second eq 'update' ? 'by the other' : '-', "$what: and does it");
			}
			elsif ($first eq 'update')
			{
				# a row that was updated under us: gone, or the new one, as the look finds it
				like($got, qr/^[01]$/, "$what: the second has an answer");
				is($left, $got eq '0' ? 'by the other' : $second eq 'update' ? 'by the other' : '-', "$what: which is the truth");
			}
			else
			{
				is($got, '0', "$what: committed, the second finds nothing");
				is($left, '-', "$what: and brings nothing back");
			}
			clear();
		}
	}
}
ok(poll_until(sub { $t->sql("SELECT sum(held) FROM dq_stats") == 0 }), 'no hold is left');

# ---- many, and the books ----------------------------------------------------------------------------

my $n = rounds(5_000, 100_000);
$t->sql("INSERT INTO q4 (payload, due_at, key) SELECT 'm' || i, now() + '1 hour', i FROM generate_series(1, $n) i");
$t->sync;
is($t->sql("WITH d AS (DELETE FROM q4 WHERE key::int % 2 = 0 RETURNING key) SELECT count(DISTINCT key) FROM d"), $n / 2, 'half of them deleted in one statement');
is($t->sql("WITH u AS (UPDATE q4 SET due_at = clock_timestamp() RETURNING key) SELECT count(DISTINCT key) FROM u"), $n / 2, 'the rest made due');
my @got;
ok(poll_until(sub { push @got, @{ $r->cmd('LPOP', "q4#$_", 1000) || [] } for 0 .. 3; @got >= $n / 2 }, 60), 'they arrive');
is_books('each once, and none that was deleted', [ map { 'm' . (2 * $_ - 1) } 1 .. $n / 2 ], \@got);
is(rows('q4'), '-', 'nothing is left');

$_->quit for $s, $o;
$t->finish;
