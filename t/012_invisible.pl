# What the extension keeps is seen by nobody else: publications, logical
# decoding, pg_stat_statements, autovacuum; the outbox rotates and never grows.
# F10 F11 F13 F15; PO 12 16
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

my $t = DqTest->new(conf => "autovacuum_naptime = 1s\nautovacuum_vacuum_insert_threshold = 100\n");
my $r = $t->redis;

$t->queue('q');

# ---- publications and decoding -------------------------------------------------------------
$t->sql("CREATE TABLE business (id int PRIMARY KEY)");
$t->sql("CREATE PUBLICATION everything FOR ALL TABLES");
$t->sql("SELECT pg_create_logical_replication_slot('slot', 'test_decoding')");
$t->sql("BEGIN; INSERT INTO business VALUES (1); SELECT dq_offer('q', 'decoded?', '1 hour', 1); SELECT dq_offer('q', repeat(md5(i::text), 2000), '1 hour') FROM generate_series(1, 5) i; COMMIT");
$t->sql("SELECT dq_remove('q', 1)");
$t->sync;
my $decoded = $t->sql("SELECT data FROM pg_logical_slot_get_changes('slot', NULL, NULL)");
like($decoded, qr/business/, 'business rows are decoded');
unlike($decoded, qr/outbox|decoded\?|pg_toast/, 'outbox rows are not, toasted payloads neither');
my $pubs = $t->sql("SELECT string_agg(tablename, ',') FROM pg_publication_tables WHERE pubname = 'everything' AND tablename LIKE 'dq_outbox%'");
note("in the publication by name: $pubs") if $pubs;

# ---- rotation ----------------------------------------------------------------------------------
# a short replay window lets the tables turn quickly
$t->sql("ALTER SERVER redis OPTIONS (ADD replay_window '1s')");
my $sizes = "SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c WHERE relname LIKE 'dq_outbox_%' AND relkind = 'r'";
my $max = 0;
my $rounds = rounds(6, 30);
for my $i (1 .. $rounds)
{
	$t->sql("SELECT count(dq_offer('q', 'rotate' || i, '0')) FROM generate_series(1, 5000) i");
	$t->sync;
	$r->cmd('DEL', 'q');
	sleep(1.2);
	my $size = $t->sql($sizes);
	$max = $size if $size > $max;
}
my $end_size;
ok(poll_until(sub {
		# a trickle keeps the rounds going
		$t->sql("SELECT dq_offer('q', 'trickle')");
		$end_size = $t->sql($sizes);
		return $end_size < 3_000_000;
	}, 90, 0.5), 'the outbox is emptied when all is in Redis and the replay window is over')
  or diag("size $end_size; " . $t->sql("SELECT string_agg(r::text, ' / ') FROM dq_rotation r"));
unlike($t->sql("SELECT data FROM pg_logical_slot_get_changes('slot', NULL, NULL)"), qr/TRUNCATE|outbox/, 'rotation leaves no logical TRUNCATE');
$r->cmd('DEL', 'q');

# an open transaction that offered pins its table, nothing else
my $s = $t->session;
$s->run("BEGIN");
$s->run("SELECT dq_offer('q', 'pinned', '1 hour')");
my $start = time();
$t->sql("SELECT count(dq_offer('q', 'p' || i)) FROM generate_series(1, 5000) i");
sleep(3);
my $innocent = time();
$t->sql("SELECT dq_offer('q', 'innocent')");
cmp_ok(time() - $innocent, '<', 1, 'an open inserter never makes another dq_offer wait');
$s->run("COMMIT");
$s->quit;
$t->sync;
is($t->sql("SELECT count(*) FROM q WHERE payload = 'pinned'"), 1, 'and its own offer arrives when it commits');

# a REPEATABLE READ transaction that started before a rotation
$s = $t->session;
$s->run("BEGIN ISOLATION LEVEL REPEATABLE READ");
$s->run("SELECT count(*) FROM business");
for (1 .. 4)
{
	$t->sql("SELECT count(dq_offer('q', 'rr' || i)) FROM generate_series(1, 1000) i");
	$t->sync;
	sleep(1.2);
}
$s->run("SELECT dq_offer('q', 'old snapshot', '1 hour')");
$s->run("COMMIT");
$s->quit;
$t->sync;
is($t->sql("SELECT count(*) FROM q WHERE payload = 'old snapshot'"), 1, 'an offer under an old snapshot is not lost in a rotated table');

# ---- F10: a snapshot held open -------------------------------------------------------------------
$s = $t->session;
$s->run("BEGIN ISOLATION LEVEL REPEATABLE READ");
$s->run("SELECT count(*) FROM business");
$r->cmd('DEL', 'q');
my $n = rounds(10, 60);
my @took;
for my $i (1 .. $n)
{
	my $b = time();
	$t->sql("SELECT count(dq_offer('q', 'held' || i)) FROM generate_series(1, 5000) i");
	$t->sync;
	push @took, time() - $b;
}
$s->quit;
my ($first, $last) = (avg(@took[ 0 .. 2 ]), avg(@took[ -3 .. -1 ]));
cmp_ok($last, '<', 2 * $first + 0.3, sprintf('F10 a held snapshot does not slow the relay (%.2f s, %.2f s per 5,000)', $first, $last));

sub avg { my $x = 0; $x += $_ for @_; return $x / @_; }

# ---- autovacuum ---------------------------------------------------------------------------------------
sleep(2);
is($t->sql("SELECT coalesce(sum(autovacuum_count + autoanalyze_count), 0) FROM pg_stat_all_tables WHERE relname LIKE 'dq_outbox_%'"), 0,
	'autovacuum leaves the outbox alone');
ok($t->sql("SELECT sum(n_tup_ins) FROM pg_stat_all_tables WHERE relname LIKE 'dq_outbox_%'") > 0, 'F13 the counters of the outbox move');
# dq_dead_letters has none: foreign tasks may share an id, and each is kept
is($t->sql("SELECT count(*) FROM pg_class c JOIN pg_depend d ON d.objid = c.oid AND d.deptype = 'e' JOIN pg_extension e ON e.oid = d.refobjid WHERE extname = 'dq_bridge' AND relkind = 'r' AND relname NOT LIKE 'dq_outbox%' AND relname <> 'dq_dead_letters' AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND indisprimary)"),
	0, 'every bookkeeping table has a primary key');

# ---- pg_stat_statements --------------------------------------------------------------------------------
SKIP: {
	skip 'pg_stat_statements is not installed', 1
	  unless $t->sql("SELECT count(*) FROM pg_available_extensions WHERE name = 'pg_stat_statements'");
	$t->node->append_conf('postgresql.conf', "shared_preload_libraries = 'pg_stat_statements, dq_bridge'\npg_stat_statements.track = all\n");
	$t->node->restart;
	$t->sql("CREATE EXTENSION pg_stat_statements");
	$t->sql("SELECT pg_stat_statements_reset()");
	$t->sql("SELECT count(dq_offer('q', 'x')) FROM generate_series(1, 1000)");
	$t->sync;
	sleep(1.5);
	is($t->sql("SELECT coalesce(string_agg(query, E'\\n'), '') FROM pg_stat_statements WHERE query ~ 'dq_outbox|dq_shards|dq_source|dq_marks|dq_rotation' AND query !~ 'pg_stat_statements'"), '',
		'nothing of ours in pg_stat_statements');
}

# Idle: no WAL, no transaction. Autovacuum has its own, and the outbox turns a
# last time after the replay window; then it must be quiet.
$t->sql("ALTER SYSTEM SET autovacuum = off");
$t->node->reload;
$t->sync;
my ($quiet, $wal);
ok(poll_until(sub {
		my ($lsn, $xid) = split /\|/, $t->sql("SELECT pg_current_wal_insert_lsn(), pg_snapshot_xmax(pg_current_snapshot())");
		sleep(3);
		($wal, $quiet) = split /\|/, $t->sql("SELECT pg_current_wal_insert_lsn() - '$lsn', pg_snapshot_xmax(pg_current_snapshot())::text = '$xid'");
		return $quiet eq 't' && $wal < 2000;
	}, 40), "idle: no transaction ids, no WAL ($wal bytes in 3 s, all of the server)");

$t->finish;
