# DqTest::Queries: random queries on queues q and s and an ordinary table t, which mean
# the same when q and s are ordinary tables. What is left open by SQL (rows of a LIMIT
# without complete order, which twin is first) is not asked for.
package DqTest::Queries;

use strict;
use warnings;

# new(seed => n, spread => seconds over which due instants lie, instants => some of them,
# in ms behind the first, keys => highest number in a key)
sub new
{
	my ($class, %o) = @_;
	my $self = bless {%o}, $class;

	srand($o{seed});
	return $self;
}

sub one { return $_[ int(rand(@_)) ]; }
sub chance { return rand() < $_[0]; }

# ---- values -------------------------------------------------------------------------

# an instant as text: of a task, or just before or behind one
sub instant
{
	my ($self, $near) = @_;
	my $us = defined $near ? $near * 1e6 : 1000 * one(@{ $self->{instants} });

	$us += one(0, 0, 0, 1000, -1000, 1, -1, 999, 1001, 500_000);
	return sprintf("timestamptz '2100-01-01 00:00Z' + interval '%.0f us'", $us);
}

sub due_value
{
	my ($self) = @_;
	my $day = int(rand($self->{spread} / 86400 + 1)) + 1;

	return one(
		(map { $self->instant } 1 .. 14),
		sprintf("date '2100-01-%02d'", $day > 28 ? 28 : $day),
		sprintf("timestamp '2100-01-%02d %02d:30'", $day > 28 ? 28 : $day, int(rand(24))),
		"timestamptz 'infinity'", "timestamptz '-infinity'", 'NULL::timestamptz',
		"now() + interval '1 hour'", 'now()', "clock_timestamp()",
		'(SELECT max(at) FROM t)', '(SELECT at FROM t WHERE n = ' . int(rand(100)) . ')',
		'(SELECT at FROM t WHERE n = -5)',
		"current_date + interval '27000 days'",
		"timestamptz '294276-12-31'", "date '5874897-12-31'", "timestamptz '4713-01-01 BC'");
}

sub key_text
{
	my ($self) = @_;

	return one((map { "'k" . int(rand($self->{keys} * 1.1)) . "'" } 1 .. 5), "''", 'NULL', "'nothing'");
}

sub key_value
{
	my ($self) = @_;

	return one((map { $self->key_text } 1 .. 7), '(SELECT key FROM t WHERE n = ' . int(rand(100)) . ')', "lower('K" . int(rand($self->{keys})) . "')");
}

sub id_value { return one('(SELECT id FROM t WHERE n = ' . int(rand(120)) . ')', "'4102444800000-5'", "'x'", 'NULL::text'); }
sub payload_value { return one(map { "'p" . int(rand(60)) . "'" } 1 .. 3); }
sub shard_value { return one(0, 1, 2, 3, -1, 'NULL::int', '(SELECT n % 3 FROM t WHERE n = 4)'); }

sub list
{
	my ($code, $n) = @_;

	return join(', ', map { $code->() } 1 .. 1 + int(rand($n || 6)));
}

# ---- conditions -----------------------------------------------------------------------

sub due_condition
{
	my ($self, $r) = @_;
	my $at = int(rand($self->{spread}));
	my $op = one(qw(= < <= > >= <>));

	return one(
		(map { "$r.due_at " . one(qw(< <= > >=)) . ' ' . $self->due_value } 1 .. 3),
		"$r.due_at $op " . $self->due_value,
		$self->due_value . " $op $r.due_at",
		(map { "$r.due_at BETWEEN " . $self->instant($at) . ' AND ' . $self->instant($at + one(1, 10, 100, 1000)) } 1 .. 4),
		"$r.due_at BETWEEN SYMMETRIC " . $self->instant($at) . ' AND ' . $self->instant($at - 50),
		"$r.due_at IN (" . list(sub { $self->instant }) . ')',
		"$r.due_at = ANY (ARRAY[" . list(sub { $self->instant }, 20) . ', NULL]::timestamptz[])',
		"$r.due_at = ANY (ARRAY(SELECT at FROM t WHERE n < " . int(rand(30)) . '))',
		"$r.due_at < ANY (ARRAY[" . list(sub { $self->instant }, 3) . '])',
		"$r.due_at > ALL (ARRAY[" . list(sub { $self->instant }, 3) . '])',
		"$r.due_at IS NOT NULL", "$r.due_at IS NULL",
		"$r.due_at IS DISTINCT FROM " . $self->instant,
		"($r.due_at, $r.payload) " . one(qw(< >= =)) . ' (' . $self->instant . ', ' . $self->payload_value . ')',
		"$r.due_at::date = '2100-01-0" . (1 + int(rand(9))) . "'",
		"extract(second FROM $r.due_at) < 3",
		"$r.due_at + interval '1 hour' > " . $self->instant,
		"NOT ($r.due_at < " . $self->instant . ')');
}

sub condition
{
	my ($self, $r, $depth) = @_;

	return '(' . $self->condition($r, 1) . one(' OR ', ' AND ') . $self->condition($r, 1) . ')'
	  if !$depth && chance(0.15);
	return 'NOT ' . '(' . $self->condition($r, 1) . ')' if !$depth && chance(0.05);
	return $self->due_condition($r) if chance(0.5);
	return one(
		"$r.key = " . $self->key_value, $self->key_value . " = $r.key",
		"$r.key IN (" . list(sub { $self->key_value }) . ')',
		"$r.key = ANY (ARRAY(SELECT key FROM t WHERE n % 7 = " . int(rand(7)) . '))',
		"$r.key > " . $self->key_value, "$r.key IS NULL", "$r.key LIKE 'k1%'",
		"$r.id = " . $self->id_value, "$r.id IN (" . list(sub { $self->id_value }) . ')',
		"$r.id = ANY (ARRAY(SELECT id FROM t WHERE n % 5 = 0))", "$r.id <> " . $self->id_value,
		"$r.shard = " . $self->shard_value, "$r.shard IN (" . list(sub { $self->shard_value }, 3) . ')',
		"$r.shard > " . $self->shard_value,
		"$r.payload = " . $self->payload_value, "$r.payload IN (" . list(sub { $self->payload_value }) . ')',
		"length($r.payload) = 2", "$r.payload IS NOT NULL",
		"EXISTS (SELECT FROM t WHERE t.key = $r.key)",
		"$r.id NOT IN (SELECT id FROM t)",
		"$r.due_at = (SELECT max(at) FROM t WHERE t.key >= $r.key)");
}

sub where
{
	my ($self, $r, $least) = @_;
	my $n = $least || 0;

	$n++ while $n < 3 && chance(0.5);
	return $n == 0 ? '' : ' WHERE ' . join(' AND ', map { $self->condition($r) } 1 .. $n);
}

# One that leaves few rows, for joins and subqueries that are asked again and again.
sub narrow
{
	my ($self, $r) = @_;
	my $at = int(rand($self->{spread}));

	return one(
		"$r.due_at BETWEEN " . $self->instant($at) . ' AND ' . $self->instant($at + one(10, 100, 600)),
		"$r.key IN (" . list(sub { $self->key_value }) . ')',
		"$r.id = ANY (ARRAY(SELECT id FROM t WHERE n < 20))",
		"$r.due_at IN (" . list(sub { $self->instant }) . ')');
}

# ---- queries --------------------------------------------------------------------------

my @columns = qw(id key payload due_at shard);

sub columns
{
	my ($self, $r) = @_;
	my @some = grep { chance(0.5) } @columns;

	return one("$r.*", $r, join(', ', map { "$r.$_" } (@some ? @some : 'id')), '1', "$r.due_at");
}

# complete: nothing is left to chance
sub order
{
	my ($self, $r) = @_;
	my $dir = one('', ' DESC', ' DESC NULLS LAST', ' NULLS FIRST');

	return " ORDER BY $r.due_at$dir, $r.id" . one('', ' DESC') if chance(0.6);
	return " ORDER BY $r.payload, $r.due_at$dir, $r.id" if chance(0.3);
	return " ORDER BY $r.id" . one('', ' DESC');
}

sub limit
{
	return ' LIMIT ' . one(1, 5, 10, 100, 150, 1000, 'ALL', '(SELECT n FROM t WHERE n = 7)')
	  . (chance(0.4) ? ' OFFSET ' . one(0, 1, 7, 99, 1100) : '');
}

sub aggregates
{
	my ($self, $r) = @_;
	my @all = ('count(*)', 'count(*)', "min($r.due_at)", "max($r.due_at)", "count($r.id)", "count($r.key)",
		"min($r.payload)", "count(DISTINCT $r.payload)", "count(*) FILTER (WHERE $r.shard = 0)",
		"max($r.key)", "count(1)", "sum($r.shard)", "max($r.due_at) - min($r.due_at)", "bool_and($r.due_at > now())");

	return join(', ', map { one(chance(0.6) ? @all[ 0 .. 4 ] : @all) } 1 .. 1 + int(rand(3)));
}

sub table { return one('q', 'q', 's'); }

my @kinds = (
	[ 10, sub { my ($g) = @_; my $r = table(); return "SELECT " . $g->columns($r) . " FROM $r" . $g->where($r, 1); } ],
	[ 8, sub { my ($g) = @_; my $r = table(); return "SELECT $r.* FROM $r" . $g->where($r) . $g->order($r) . $g->limit; }, 1 ],
	[ 4, sub { my ($g) = @_; my $r = table(); return "SELECT $r.due_at FROM $r" . $g->where($r) . " ORDER BY $r.due_at" . one('', ' DESC') . $g->limit; }, 1 ],
	[ 10, sub { my ($g) = @_; my $r = table(); return "SELECT " . $g->aggregates($r) . " FROM $r" . $g->where($r); } ],
	[ 3, sub { my ($g) = @_; my $r = table(); return "SELECT " . $g->aggregates($r) . ", now() > '2000-01-01' FROM $r WHERE " . $g->due_condition($r) . (chance(0.5) ? " HAVING count(*) > 3" : ''); } ],
	[ 4, sub { my ($g) = @_; my $r = table(); return "SELECT " . one("$r.payload", "$r.shard", "date_trunc('hour', $r.due_at)", "$r.due_at") . ", count(*), min($r.due_at) FROM $r WHERE " . $g->narrow($r) . ' GROUP BY 1' . one('', ' ORDER BY 1', ' HAVING count(*) > 1'); } ],
	[ 5, sub { my ($g) = @_; my $r = table(); return "SELECT t.n, $r.* FROM t " . one('', 'LEFT ', 'RIGHT ') . "JOIN $r ON " . one("$r.key = t.key", "$r.id = t.id", "$r.due_at = t.at", "$r.due_at BETWEEN t.at AND t.at + interval '5 s'", "t.key = $r.key AND $r.due_at > t.at") . " WHERE t.n < " . one(5, 20) . ' AND ' . $g->narrow($r); } ],
	[ 4, sub { my ($g) = @_; my $r = table(); return "SELECT t.n, $r.id FROM t JOIN $r ON " . one("$r.key = t.key", "$r.id = t.id", "$r.due_at = t.at") . " WHERE t.n < " . one(5, 30); } ],
	[ 3, sub { my ($g) = @_; return "SELECT q.id, s.id FROM q " . one('', 'LEFT ', 'FULL ') . "JOIN s ON " . one('q.due_at = s.due_at', 'q.key = s.key') . ' WHERE ' . $g->narrow('q') . (chance(0.5) ? ' AND ' . $g->narrow('s') : ''); } ],
	[ 3, sub { my ($g) = @_; my $r = table(); return "SELECT t.n, x.id FROM t, LATERAL (SELECT * FROM $r WHERE $r.due_at " . one('>', '<=', '=') . " t.at ORDER BY $r.due_at" . one(', id', ' DESC, id') . ' LIMIT ' . one(1, 3) . ') x WHERE t.n < ' . one(3, 10); } ],
	[ 2, sub { my ($g) = @_; my $r = table(); return "SELECT n, (SELECT count(*) FROM $r WHERE $r.due_at < t.at) FROM t WHERE n < 8"; } ],
	[ 2, sub { my ($g) = @_; my $r = table(); return "SELECT n FROM t WHERE " . one('', 'NOT ') . "EXISTS (SELECT FROM $r WHERE $r." . one('key = t.key', 'id = t.id', 'due_at = t.at') . (chance(0.5) ? ' AND ' . $g->condition($r) : '') . ') AND n < 20'; } ],
	[ 3, sub { my ($g) = @_; return "SELECT payload, due_at FROM q WHERE " . $g->narrow('q') . ' ' . one('UNION', 'UNION ALL', 'EXCEPT', 'INTERSECT', 'EXCEPT ALL') . ' SELECT payload, due_at FROM s WHERE ' . $g->narrow('s'); } ],
	[ 2, sub { my ($g) = @_; my $r = table(); return "SELECT id, row_number() OVER (ORDER BY due_at, id), rank() OVER (PARTITION BY payload ORDER BY due_at DESC), count(*) OVER (PARTITION BY shard) FROM $r WHERE " . $g->narrow($r); } ],
	[ 2, sub { my ($g) = @_; my $r = table(); return "WITH w AS " . one('', 'MATERIALIZED ', 'NOT MATERIALIZED ') . "(SELECT * FROM $r" . $g->where($r, 1) . ') SELECT count(*), min(a.due_at), max(b.key) FROM w a LEFT JOIN w b ON a.id = b.id WHERE a.due_at > ' . $g->instant; } ],
	[ 2, sub { my ($g) = @_; my $r = table(); return "SELECT count(*), min(x.id) FROM (SELECT * FROM $r" . $g->where($r) . $g->order($r) . $g->limit . ") x WHERE x.payload <> 'p5'"; } ],
	[ 1, sub { my ($g) = @_; my $r = table(); return "SELECT * FROM $r WHERE due_at = (SELECT " . one('min', 'max') . '(due_at) FROM ' . table() . ')'; } ],
	[ 1, sub { my ($g) = @_; my $r = table(); return "SELECT DISTINCT " . one('payload', 'shard', 'due_at', 'payload, shard') . " FROM $r WHERE " . $g->narrow($r); } ],
	[ 1, sub { my ($g) = @_; my $r = table(); return "SELECT DISTINCT ON (due_at) due_at, id FROM $r WHERE " . $g->narrow($r) . ' ORDER BY due_at, id'; } ],
	[ 1, sub { my ($g) = @_; return "WITH RECURSIVE w AS (SELECT min(due_at) AS d, 0 AS n FROM q WHERE " . $g->narrow('q') . ' UNION ALL SELECT (SELECT min(due_at) FROM q WHERE due_at > w.d), n + 1 FROM w WHERE d IS NOT NULL AND n < 5) SELECT * FROM w'; } ],
	[ 1, sub { my ($g) = @_; my $r = table(); return "SELECT 1 / (count(*) - " . one(0, 1) . ") FROM $r WHERE " . $g->narrow($r); } ],
	[ 1, sub { my ($g) = @_; my $r = table(); return "SELECT FROM $r WHERE " . $g->narrow($r); } ],
);
my $weights = 0;
$weights += $_->[0] for @kinds;

# Returns the query, and whether the order of its rows is complete.
sub query
{
	my ($self) = @_;
	my $at = rand($weights);

	for my $kind (@kinds)
	{
		return ($kind->[1]->($self), $kind->[2]) if ($at -= $kind->[0]) < 0;
	}
	return;
}

# A query with parameters: ($types, $sql, [arguments, ...])
sub prepared
{
	my ($self) = @_;
	my $r = table();
	my @forms = (
		[ 'timestamptz, timestamptz', "SELECT * FROM $r WHERE due_at >= \$1 AND due_at < \$2",
			sub { my $at = int(rand($self->{spread})); return one($self->instant($at) . ', ' . $self->instant($at + 100), $self->instant . ', ' . $self->instant, 'NULL, ' . $self->instant); } ],
		[ 'timestamptz, int', "SELECT * FROM $r WHERE due_at " . one('>', '<=') . " \$1 ORDER BY due_at, id LIMIT \$2",
			sub { return $self->instant . ', ' . one(1, 10, 300); } ],
		[ 'text[]', "SELECT * FROM $r WHERE key = ANY (\$1)", sub { return one('ARRAY[' . list(sub { $self->key_text }) . ']', "'{}'", 'NULL'); } ],
		[ 'text, timestamptz[]', "SELECT * FROM $r WHERE payload = \$1 AND due_at = ANY (\$2)", sub { return $self->payload_value . ', ARRAY[' . list(sub { $self->instant }, 10) . ']'; } ],
		[ 'int', "SELECT * FROM $r WHERE id = (SELECT id FROM t WHERE n = \$1)", sub { return one(int(rand(120)), 'NULL'); } ],
		[ 'timestamptz', "SELECT count(*), min(due_at), max(due_at) FROM $r WHERE due_at > \$1", sub { return one($self->instant, 'NULL'); } ],
		[ 'date, int', "SELECT count(*) FROM $r WHERE due_at > \$1 AND shard = \$2", sub { return "'2100-01-0" . (1 + int(rand(9))) . "', " . one(0, 1, 'NULL'); } ],
	);
	my $form = one(@forms);

	return ($form->[0], $form->[1], [ map { $form->[2]->() } 1 .. 8 ]);
}

# What the planner may not use this time
sub settings
{
	return map { "enable_$_" }
	  grep { chance(0.15) } qw(hashjoin mergejoin nestloop material sort incremental_sort hashagg memoize);
}

# ---- changes ----------------------------------------------------------------------------

# A statement that writes the same to both sides. Ids are not the same any more once
# tasks have moved, and due instants are whole milliseconds in a queue.
sub change
{
	my ($self) = @_;
	my $r = table();
	my $at = int(rand($self->{spread}));
	my $which = one(
		"$r.due_at BETWEEN " . $self->instant($at) . ' AND ' . $self->instant($at + one(10, 100, 600)),
		"$r.key IN (" . list(sub { $self->key_value }) . ')',
		"$r.due_at IN (" . list(sub { $self->instant }) . ')',
		"$r.due_at = ANY (ARRAY(SELECT at FROM t WHERE n < 20))");
	my $instant = "timestamptz '2100-01-01 00:00Z' + interval '" . int(rand($self->{spread})) . one('', '.5', '.123') . " s'";

	return one(
		"DELETE FROM $r WHERE $which",
		"DELETE FROM $r USING t WHERE $r.key = t.key AND t.n < 10",
		"DELETE FROM $r WHERE $which AND " . $self->due_condition($r),
		"UPDATE $r SET due_at = " . one("due_at + interval '1 s'", "due_at - interval '1500 ms'", $instant) . " WHERE $which",
		"UPDATE $r SET payload = payload || '+' WHERE $which",
		"UPDATE $r SET payload = 'p1', due_at = $instant WHERE $which",
		"UPDATE $r SET payload = t.n::text FROM t WHERE $r.key = t.key AND t.n < 20",
		"INSERT INTO $r (payload, due_at) SELECT 'n' || n, at FROM t WHERE at IS NOT NULL AND n < 20",
		"INSERT INTO $r (payload, due_at, key) VALUES ('v', $instant, 'new" . int(rand(1e9)) . "')");
}

1;
