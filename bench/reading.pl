# reading.pl: a queue with N pending tasks read as a table: how long the usual queries
# take in one session (planning included, median of many), and what Redis was asked for
# them (INFO commandstats). Run by bench/run as the bench "reading".
use strict;
use warnings;

my $N = $ENV{N} || 1_000_000;
my $psql = "$ENV{PSQL} -X -q -At -v ON_ERROR_STOP=1";
my $cli = "$ENV{REDIS_CLI} -s $ENV{REDIS_SOCKET}";

sub sql
{
	my ($sql) = @_;
	my $file = "$ENV{WORK}/reading.sql";

	open my $fh, '>', $file or die "$file: $!";
	print $fh "SET client_min_messages = warning;\n$sql\n";
	close $fh;
	my $out = `$psql -f $file`;
	die "SQL failed: $sql\n" if $? != 0;
	chomp $out;
	return $out;
}

# Calls of commands since the last time, those that say something about reading
my %before;

sub commands
{
	my %now;
	my @said;

	for (split /\r?\n/, `$cli info commandstats`)
	{
		$now{$1} = $2 if /^cmdstat_(\w+):calls=(\d+)/;
	}
	for my $c (sort keys %now)
	{
		my $n = $now{$c} - ($before{$c} || 0);

		push @said, "$n $c" if $n > 0 && $c =~ /^(z|h|evalsha|eval$|keys|scan|l|dump)/;
	}
	%before = %now;
	return join ', ', @said;
}

sub row
{
	my ($what, $measured, $reach, $asked) = @_;

	printf "%-48s %14s %14s %8s %8s\n", $what, $measured, '', '', $reach;
	print "    $asked\n" if $asked;
}

sql("SELECT FROM dq_create_queue('b_read', 'redis')");
sql(<<"SQL");
SELECT setseed(0.5);
SELECT count(dq_offer_at('b_read', 'payload of 20 bytes ', timestamptz '2100-01-01 00:00Z' + floor(random() * $N) * interval '1 s',
  'key' || i)) FROM generate_series(1, $N) i;
SQL
sql("SELECT dq_sync('b_read', '10 min')") eq 't' or die "not in Redis\n";
sql('ANALYZE b_read');
# no worker in between: it asks for counts now and then
sql("ALTER SYSTEM SET dq_bridge.enabled = off; SELECT pg_reload_conf()");
sql('SELECT pg_sleep(3)');

# ms of a query, the median of n after some to warm up: each plan is made anew; and the
# rows it gave
my $measure = <<'SQL';
CREATE OR REPLACE FUNCTION pg_temp.ms(query text, n int, OUT ms numeric, OUT rows bigint) LANGUAGE plpgsql AS $$
DECLARE
  t timestamptz;
  took numeric[];
BEGIN
  FOR i IN 1 .. n + 1 LOOP
    t := clock_timestamp();
    EXECUTE query;
    IF i > 1 OR n = 1 THEN
      took := took || (extract(epoch FROM clock_timestamp() - t) * 1000)::numeric;
    END IF;
    GET DIAGNOSTICS rows = ROW_COUNT;
  END LOOP;
  SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY x) INTO ms FROM unnest(took) x;
END $$;
SQL

my $half = "'2100-01-01'::timestamptz + " . int($N / 2) . " * interval '1 s'";
my @queries = (
	[ 'count(*)', 'SELECT count(*) FROM b_read', 2 ],
	[ 'count(*) of a range', "SELECT count(*) FROM b_read WHERE due_at > $half", 2 ],
	[ 'min(due_at), max(due_at)', 'SELECT min(due_at), max(due_at) FROM b_read', 2 ],
	[ 'ORDER BY due_at LIMIT 10', 'SELECT * FROM b_read ORDER BY due_at LIMIT 10', 2 ],
	[ 'ORDER BY due_at DESC LIMIT 10', 'SELECT * FROM b_read ORDER BY due_at DESC LIMIT 10', 2 ],
	[ 'a range of 1,000', "SELECT * FROM b_read WHERE due_at >= $half AND due_at < $half + interval '1000 s'", 10 ],
	[ 'by key', "SELECT * FROM b_read WHERE key = 'key" . int($N / 3) . "'", 1 ],
	[ 'by id', 'SELECT * FROM b_read WHERE id = \'' . sql("SELECT id FROM b_read WHERE key = 'key7'") . "'", 1 ],
	[ '100 keys', "SELECT * FROM b_read WHERE key = ANY (ARRAY(SELECT 'key' || i * 50 FROM generate_series(1, 100) i))", 10 ]);
for my $q (@queries)
{
	my ($what, $query, $reach) = @$q;

	commands();
	my ($ms, $rows) = split /\|/, sql("$measure SELECT round(ms, 2), rows FROM pg_temp.ms(\$q\$$query\$q\$, 100)");
	my $asked = commands();
	row("$what ($rows rows)", "$ms ms", "$reach ms", "101 times: $asked");
}

# all of it, every column; and what the backend's own memory has grown by
for ([ 'full scan, all columns', "SELECT count(id), count(key), sum(length(payload)), max(due_at), sum(shard) FROM b_read" ],
	[ 'full scan, COPY TO', "COPY b_read_all TO '/dev/null'" ],
	[ 'full scan, ids only', 'SELECT count(id), max(id) FROM b_read' ])
{
	my ($what, $query) = @$_;

	$query =~ s/b_read_all/(SELECT * FROM b_read)/;
	commands();
	my @lines = split /\n/, sql(<<"SQL");
$measure
CREATE FUNCTION pg_temp.own_kb() RETURNS int LANGUAGE sql AS \$\$ SELECT substring(pg_read_file('/proc/self/status') FROM 'RssAnon:\\s+(\\d+)')::int \$\$;
SELECT count(*) FROM b_read;
SELECT pg_temp.own_kb();
SELECT ms FROM pg_temp.ms(\$q\$$query\$q\$, 1);
SELECT pg_temp.own_kb();
SQL
	my $asked = commands();
	my ($kb1, $ms, $kb2) = @lines[-3 .. -1];

	# the function runs a query once to warm up: ms is the slower of the two
	row($what, sprintf('%.0fk rows/s', $N / $ms), '300k/s', "twice: $asked");
	row('    growth of the backend', sprintf('%.1f MB', ($kb2 - $kb1) / 1024), '32 MB', '');
}

sql('ALTER SYSTEM RESET dq_bridge.enabled; SELECT pg_reload_conf()');
sql('DROP FOREIGN TABLE b_read');
system("$cli eval \"for _, k in ipairs(redis.call('KEYS', '*b_read*')) do redis.call('UNLINK', k) end\" 0 >/dev/null");
