# A queue is a table: random queries on queues give what they give on ordinary tables
# with the same rows, with operations of others on their way and own ones not
# committed; random INSERT, UPDATE and DELETE do the same to both. H1 H2 H4 H6 H7 H8 H9
# H10 I2 I3 C3 C7
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use DqTest::Queries;
use Test::More;
use Time::HiRes qw(time);

my $queries = rounds(100000, 5000);		# the short run ends by time
my $budget = rounds(30, 5000);			# seconds
my $tasks = $ENV{DQ_TASKS} || rounds(20_000, 100_000);
my $seed = $ENV{DQ_SEED} || int(time() * 1000) % 1_000_000_000;
my $spread = 432_000;
my $step = int($spread / $tasks) || 1;		# seconds; so most instants that are asked for are there
my $due = "timestamptz '2100-01-01 00:00Z' + floor(random() * $spread / $step) * $step * interval '1 s'"
  . " + (ARRAY[0, 1, 500, 999])[ceil(random() * 4)] * interval '1 ms'";

my $t = DqTest->new(conf => "random_page_cost = 1.1\nwork_mem = 16MB\n");
note("seed $seed (again with DQ_SEED=$seed DQ_TASKS=$tasks)");
diag("seed $seed") if long_run();

# ---- the same rows twice -----------------------------------------------------------------

$t->sql("CREATE SCHEMA there; CREATE SCHEMA here");
$t->queue('there.q');
$t->queue('there.s', "shards '3'");
$t->sql(<<"SQL");
SELECT setseed(0.5);
SELECT count(dq_offer_at('there.q', 'p' || floor(random() * 50), $due, CASE WHEN i % 2 = 0 THEN 'k' || i END))
  FROM generate_series(1, $tasks) i;
SELECT count(dq_offer_at('there.s', 'p' || floor(random() * 50), $due, CASE WHEN i % 2 = 0 THEN 'k' || i END))
  FROM generate_series(1, $tasks / 5) i;
SQL
ok($t->sync, "$tasks tasks are pending");
$t->sql(<<'SQL');
CREATE TABLE here.q AS SELECT * FROM there.q;
CREATE TABLE here.s AS SELECT * FROM there.s;
CREATE INDEX ON here.q (due_at);
CREATE INDEX ON here.q (key);
CREATE INDEX ON here.q (id);
CREATE INDEX ON here.s (due_at);
CREATE INDEX ON here.s (key);
CREATE INDEX ON here.s (id);
CREATE TABLE t (n int, at timestamptz, key text, id text);
INSERT INTO t SELECT row_number() OVER (ORDER BY md5(id)), due_at, key, id FROM (SELECT * FROM here.q ORDER BY md5(id) LIMIT 100) x;
INSERT INTO t VALUES (-1, NULL, NULL, NULL), (101, '2100-01-01', 'nowhere', 'nowhere');
ANALYZE;
ANALYZE there.q, there.s;

-- the rows of a query on one side, or the error
CREATE FUNCTION answer(side text, query text, ordered boolean) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
  result text[];
BEGIN
  PERFORM set_config('search_path', side || ', public', true);
  EXECUTE 'SELECT coalesce(array_agg(x::text' || CASE WHEN ordered THEN '' ELSE ' ORDER BY x::text' END
    || '), ''{}'') FROM (' || query || ') x' INTO result;
  RETURN result;
EXCEPTION WHEN division_by_zero THEN
  RETURN ARRAY[SQLSTATE];
END $$;
CREATE FUNCTION compare(query text, ordered boolean) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  there text[] := answer('there', query, ordered);
  here text[] := answer('here', query, ordered);
  i int;
BEGIN
  IF there = here THEN
    RETURN 'same';
  END IF;
  FOR i IN 1 .. greatest(cardinality(there), cardinality(here)) LOOP
    IF there[i] IS DISTINCT FROM here[i] THEN
      RETURN format('%s rows against %s, row %s is %s, not %s', cardinality(there), cardinality(here),
        i, coalesce(there[i], 'not there'), coalesce(here[i], 'not there'));
    END IF;
  END LOOP;
END $$;

-- the same operations on both sides
CREATE FUNCTION operate(n int, spread int, step int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  r record;
  k text;
  new text;
  due timestamptz;
BEGIN
  FOR i IN 1 .. n LOOP
    due := timestamptz '2100-01-01 00:00Z' + floor(random() * spread / step) * step * interval '1 s';
    SELECT * INTO r FROM here.q WHERE due_at >= due ORDER BY due_at, id LIMIT 1;
    CONTINUE WHEN NOT FOUND;
    CASE floor(random() * 4)
      WHEN 0 THEN
        new := dq_offer_at('there.q', 'p7', due);
        INSERT INTO here.q VALUES (new, NULL, 'p7', due, 0);
      WHEN 1 THEN
        k := coalesce(r.key, 'k' || i);
        new := dq_offer_at('there.q', 'p8', due, k);
        DELETE FROM here.q WHERE key = k;
        INSERT INTO here.q VALUES (new, k, 'p8', due, 0);
      WHEN 2 THEN
        IF dq_remove('there.q', coalesce(r.key, r.id)) IS NOT TRUE THEN
          RAISE 'not removed: %', r;
        END IF;
        DELETE FROM here.q WHERE id = r.id;
      ELSE
        new := dq_reschedule_at('there.q', coalesce(r.key, r.id), due);
        UPDATE here.q SET id = new, due_at = due WHERE id = r.id;
    END CASE;
  END LOOP;
END $$;

-- a statement that writes: how many rows it has changed on each side
CREATE FUNCTION write(side text, statement text) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  n bigint;
BEGIN
  PERFORM set_config('search_path', side || ', public', true);
  EXECUTE statement;
  GET DIAGNOSTICS n = ROW_COUNT;
  RETURN n;
END $$;
SQL

# ---- queries --------------------------------------------------------------------------------

my $s = $t->session;
my $gen = DqTest::Queries->new(seed => $seed, spread => $spread, keys => $tasks,
	instants => [ split /\n/, $t->sql("SELECT floor(extract(epoch FROM due_at - '2100-01-01 00:00Z') * 1000) FROM here.q ORDER BY md5(id) LIMIT 500") ]);
my $run = 0;
my @wrong;

sub compare
{
	my ($where) = @_;
	my ($sql, $ordered) = $gen->query;
	my @off = $gen->settings;
	my $answer;

	$s->run(join(';', map { "SET $_ = off" } @off)) if @off;
	$answer = $s->run('SELECT compare($sql$' . $sql . '$sql$, ' . ($ordered ? 'true' : 'false') . ')', 300);
	$s->run(join(';', map { "RESET $_" } @off)) if @off;
	$run++;
	push @wrong, "$where: $sql" . (@off ? " (without @off)" : '') . "\n  -> $answer" if $answer ne 'same';
}

sub compare_prepared
{
	my ($types, $sql, $args) = $gen->prepared;
	my %sql = map { my $side = $_; ($side => $sql =~ s/FROM ([qs]) /FROM $side.$1 /r) } qw(there here);

	$s->run("SET plan_cache_mode = force_generic_plan") if rand() < 0.3;
	$s->run("PREPARE p_$_($types) AS $sql{$_}") for qw(there here);
	for my $a (@$args)
	{
		my ($there, $here) = map { join "\n", sort split /\n/, $s->run("EXECUTE p_$_($a)", 300) } qw(there here);
		$run++;
		push @wrong, "prepared: $sql with $a\n  -> $there\n  not $here" if $there ne $here;
	}
	$s->run('DEALLOCATE ALL; RESET plan_cache_mode');
}

my $start = time();
my ($phase, $enough) = (0, $budget / 2);
while ($run < $queries && time() - $start < $enough && @wrong < 10)
{
	$phase = ($phase + 1) % 4;
	if ($phase == 0)
	{
		compare_prepared();
	}
	elsif ($phase == 1)
	{
		compare('at rest') for 1 .. 10;
	}
	elsif ($phase == 2)
	{
		# own operations, then taken back
		$s->run("BEGIN");
		my $e = $s->run("SELECT operate(" . (1 + int(rand(30))) . ", $spread, $step)");
		push @wrong, "operate: $e" if $e ne '';
		compare('in a transaction') for 1 .. 8;
		$s->run("ROLLBACK");
		compare('after its end');
	}
	else
	{
		# committed, on their way while the queries run
		my $e = $s->run("SELECT operate(" . (1 + int(rand(20))) . ", $spread, $step)");
		push @wrong, "operate: $e" if $e ne '';
		compare('on their way') for 1 .. 8;
	}
}
is(scalar(@wrong), 0, 'queries give the same') or diag(join "\n", @wrong);
note(sprintf('%d queries in %.0f s', $run, time() - $start));
cmp_ok($run, '>=', long_run() ? 5000 : 50, 'enough queries were compared');

# ---- changes -------------------------------------------------------------------------------------

# ids and shards of new tasks are the queue's own business
my $contents = 'SELECT key, payload, due_at FROM ';
my $changed = 0;
@wrong = ();
$start = time();
while ($changed < rounds(1000, 500) && time() - $start < $budget / 2 && @wrong < 5)
{
	$s->run('BEGIN');
	for (1 .. 1 + int(rand(4)))
	{
		my $sql = $gen->change;
		my ($there, $here) = map { $s->run("SELECT write('$_', \$sql\$$sql\$sql\$)", 300) } qw(there here);

		$changed++;
		push @wrong, "$sql\n  -> $there rows, not $here" if $there ne $here;
		if (rand() < 0.3)
		{
			$s->run('SAVEPOINT a');
			my $other = $gen->change;
			$s->run("SELECT write('there', \$sql\$$other\$sql\$)", 300);
			$s->run('ROLLBACK TO a');
		}
		last if @wrong;
	}
	for my $q (qw(q s))
	{
		my $answer = $s->run("SELECT compare('$contents$q', false)", 300);
		push @wrong, "contents of $q\n  -> $answer" if $answer ne 'same';
	}
	$s->run(rand() < 0.5 ? 'COMMIT' : 'ROLLBACK');
	$s->run("TRUNCATE here.q, here.s; INSERT INTO here.q SELECT * FROM there.q; INSERT INTO here.s SELECT * FROM there.s");
}
is(scalar(@wrong), 0, 'changes do the same') or diag(join "\n", @wrong);
note(sprintf('%d statements in %.0f s', $changed, time() - $start));
ok($t->sync, 'all of it is in Redis');
for my $q (qw(q s))
{
	my $answer = $s->run("SELECT compare('$contents$q', false)", 300);
	is($answer, 'same', "$q in the end");
}

$s->close if $s->can('close');
$t->finish;
