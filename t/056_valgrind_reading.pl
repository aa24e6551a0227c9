# The backends that run the SQL tests of reading, under valgrind: no error that passes through
# our code, and the same output. With --long only; skipped where valgrind is missing. H E
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;

plan skip_all => 'runs with --long' unless long_run();
plan skip_all => 'valgrind is not installed' if system('which valgrind >/dev/null 2>&1') != 0;

my $t = DqTest->new(start => 0, conf => "autovacuum = off\n");
my $r = $t->redis;
my $dir = $t->node->basedir;

$t->node->append_conf('postgresql.conf', "dq_test.socket = '" . $r->socket . "'\ntimezone = 'UTC'\n");
# Suppressions for what the server itself does (padding bytes that reach the disk)
open my $fh, '>', "$dir/supp" or die;
print $fh <<'SUPP';
{
   padding written to files
   Memcheck:Param
   pwrite64(buf)
   fun:pwrite*
   ...
}
{
   padding written to files, vectored
   Memcheck:Param
   pwritev(vector[...])
   fun:pwritev*
   ...
}
{
   padding written
   Memcheck:Param
   write(buf)
   fun:write*
   ...
}
{
   checksums over padding
   Memcheck:Value8
   fun:pg_comp_crc32c_sse42
   ...
}
{
   checksums over padding
   Memcheck:Cond
   fun:pg_comp_crc32c_sse42
   ...
}
SUPP
close $fh;

my $pid = fork();
die unless defined $pid;
if ($pid == 0)
{
	open STDOUT, '>>', $t->node->logfile;
	open STDERR, '>&', \*STDOUT;
	my $postgres = `which postgres`;
	chomp $postgres;
	exec('valgrind', '--trace-children=yes', '--leak-check=no', '--error-markers=VALGRINDERROR-BEGIN,VALGRINDERROR-END',
		'--gen-suppressions=all', "--suppressions=$dir/supp", "--log-file=$dir/vg.%p.log", '--quiet',
		$postgres, '-D', $t->node->data_dir);
}
ok(poll_until(sub { my ($rc) = eval { $t->node->psql('postgres', 'SELECT 1') }; defined $rc && $rc == 0 }, 300), 'a server under valgrind');

$ENV{DQ_REDIS_SOCKET} = $r->socket;
$ENV{REDIS_CLI} ||= 'redis-cli';
for my $test (qw(scan_basic scan_pushdown contents import))
{
	my $sql = "$FindBin::RealBin/../sql/$test.sql";

	open my $psql, '-|', 'psql', '-XaqA', '-P', 'format=aligned', '-d', $t->node->connstr('postgres'), '-f', $sql or die "psql: $!";
	my $got = do { local $/; <$psql> };
	close $psql;
	is($?, 0, "$test ran to its end");
	open my $fh, '<', "$FindBin::RealBin/../expected/$test.out" or die "$test: $!";
	my $expected = do { local $/; <$fh> };
	my @got = grep { /\S/ && !/^(?:\(\d+ rows?\)$|NOTICE:|DETAIL:)/ } split /\n/, $got;
	my @expected = grep { /\S/ && !/^(?:\(\d+ rows?\)$|NOTICE:|DETAIL:)/ } split /\n/, $expected;
	my @diff = multiset_diff(\@got, \@expected);
	is("@diff", '', "$test says what is expected");
}
# below an Append, over connections of its own
$t->sql("CREATE SERVER redis FOREIGN DATA WRAPPER dq_bridge OPTIONS (socket '" . $r->socket . "')");
$t->queue($_) for qw(a b);
for my $q (qw(a b))
{
	$t->sql("SELECT count(dq_offer_at('$q', i::text, '2100-01-01')) FROM generate_series(1, 3000) i");
}
is($t->sql('SELECT count(payload) FROM (SELECT payload FROM a UNION ALL SELECT payload FROM b) x', timeout => 600), 6000, 'two queues at once');
is($t->sql('SELECT count(payload) FROM (SELECT payload FROM a UNION ALL SELECT payload FROM b LIMIT 4000) x', timeout => 600), 4000, '... and not to the end');

kill 'INT', $pid;
waitpid($pid, 0);
my $errors = '';
my $seen = 0;
for my $f (glob "$dir/vg.*.log")
{
	open my $l, '<', $f or next;
	local $/;
	my $text = <$l>;
	$seen++;
	next unless defined $text;
	while ($text =~ /VALGRINDERROR-BEGIN(.*?)VALGRINDERROR-END/sg)
	{
		my $e = $1;
		$errors .= "$f: $e\n" if $e =~ /dq_|hiredis|redis/i;
	}
}
cmp_ok($seen, '>', 5, 'valgrind has watched every process');
is($errors, '', 'no valgrind error that passes through our code or hiredis');
$t->finish;
