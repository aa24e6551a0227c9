# dq_remove within one transaction: what the transaction itself has done counts.
# H16; G1 G4; PO 8 11
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;

my $t = DqTest->new;
$t->queue('q');

sub left { $t->sync; return join ',', sort $t->pending('q'); }

# the own replacement is what the key names, however late it is due
$t->sql("SELECT dq_offer('q', 'old', '10 s', 'k')");
$t->sync;
is($t->sql("BEGIN; SELECT dq_offer('q', 'new', '60 s', 'k') IS NULL; SELECT dq_remove('q', 'k'); COMMIT"), "f\nt",
	'replace by a later one and remove');
is(left(), '', 'neither is pending');

# a key that was removed does not hide a payload
$t->sql("SELECT dq_offer('q', 'foo', '1 hour', 'x'), dq_offer('q', 'x', '1 hour')");
$t->sync;
is($t->sql("BEGIN; SELECT dq_remove('q', 'x'), dq_remove('q', 'x'), dq_remove('q', 'x'); COMMIT"), 't|t|f',
	'first the key, then the payload, then nothing');
is(left(), '', 'both are gone');

# many equal payloads, more than any bound of a script
$t->sql("SELECT count(dq_offer('q', 'tw', '1 hour')) FROM generate_series(1, 1200)");
$t->sync;
is($t->sql("SELECT count(*) FROM generate_series(1, 1100) WHERE dq_remove('q', 'tw')"), 1100, '1,100 equal payloads in one statement');
$t->sync;
is(scalar($t->pending('q')), 100, '... and exactly those are gone');
is($t->sql("SELECT count(*) FROM generate_series(1, 200) WHERE dq_remove('q', 'tw')"), 100, 'the rest, then false');

# rolled back: nothing has happened
$t->sql("SELECT dq_offer('q', 'stays', '1 hour', 's')");
$t->sync;
$t->sql("BEGIN; SELECT dq_remove('q', 's'); ROLLBACK");
$t->sql("BEGIN; SAVEPOINT a; SELECT dq_remove('q', 's'); ROLLBACK TO a; COMMIT");
is(left(), 'stays', 'a removal that was rolled back');
is($t->sql("BEGIN; SAVEPOINT a; SELECT dq_remove('q', 's'); ROLLBACK TO a; SELECT dq_remove('q', 's'); COMMIT"), "t\nt",
	'removed again after the savepoint was rolled back');
is(left(), '', 'gone');

# a column whose type a parent table changed is an error, not a crash
$t->sql("CREATE TABLE par (id text, key text, payload text, due_at timestamptz, shard int4);"
	  . " CREATE FOREIGN TABLE chi () INHERITS (par) SERVER redis; SELECT dq_offer('chi', 'p', '1 hour');"
	  . " ALTER TABLE par ALTER COLUMN shard TYPE text");
$t->fails("SELECT * FROM chi", '42804', 'H11 a type changed through the parent', qr/must be of type integer/);

# two names with the same keys in Redis are one queue
$t->fails("CREATE FOREIGN TABLE spy (payload text) SERVER redis OPTIONS (queue '{q}', role 'producer')", '42710',
	'x and {x} have the same pending set', qr/same queue in Redis/);
$t->queue('w', "shards '2'");
$t->fails("CREATE FOREIGN TABLE spy (payload text) SERVER redis OPTIONS (queue '{w#0}')", '42710', 'a shard by its own name too');

# SERIALIZABLE: what the library reads of its own tables is no data of the
# application's, so no two transactions depend on each other through it (F30)
{
	my @s = map { $t->session } 1, 2;

	$t->sql("SELECT dq_offer('q', 'other', '1 hour', 'o1'), dq_offer('q', 'other', '1 hour', 'o2')");
	$t->sync;
	$_->run("BEGIN ISOLATION LEVEL SERIALIZABLE; SELECT 1") for @s;
	for my $i (0, 1)
	{
		is($s[$i]->run("SELECT dq_remove('q', 'nosuch'), dq_offer('q', 'mine', '1 hour', 'm$i') IS NOT NULL"), 'f|t', "session $i: looks and offers");
		is($s[$i]->run("SELECT dq_remove('q', 'm$i')"), 't', '... removes its own');
		is($s[$i]->run("SELECT dq_remove('q', 'o' || $i + 1)"), 't', '... removes another');
		$s[$i]->run("SELECT dq_offer('q', 'stays', '1 hour')");
		is($s[$i]->run("SELECT count(*) FROM q WHERE payload = 'stays'"), 1, '... reads the queue: its own offer');
		is($s[$i]->run("SELECT count(dq_offer('q', payload, '1 hour')) FROM q WHERE payload = 'stays'"), 1, '... and not what the command itself offers');
		$s[$i]->run("SELECT count(*) FROM dq_stats; SELECT dq_sync('q', '10 ms')");
	}
	is($s[0]->run("SELECT count(*) FROM pg_locks WHERE mode = 'SIReadLock' AND relation >= 16384"), 0, 'nothing of what was read is marked');
	is($s[0]->run('COMMIT'), '', 'the first one commits');
	is($s[1]->run('COMMIT'), '', 'and so does the second one');
	is($t->sql("SELECT count(*) FROM q WHERE payload = 'stays'"), 4, 'with what both have offered');
	$_->quit for @s;
}

done_testing();
