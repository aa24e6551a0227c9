# A worker under valgrind through relay and transfer of 10,000 tasks: no error,
# no growth. With --long only; skipped where valgrind is missing. G14
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

plan skip_all => 'runs with --long' unless long_run();
plan skip_all => 'valgrind is not installed' if system('which valgrind >/dev/null 2>&1') != 0;

my $t = DqTest->new(start => 0, conf => "autovacuum = off\n");
my $r = $t->redis;
my $dir = $t->node->basedir;

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
	exec('valgrind', '--trace-children=yes', '--leak-check=no', '--freelist-vol=200000', '--freelist-big-blocks=100000', '--error-markers=VALGRINDERROR-BEGIN,VALGRINDERROR-END',
		'--gen-suppressions=all', "--suppressions=$dir/supp", "--log-file=$dir/vg.%p.log", '--quiet',
		$postgres, '-D', $t->node->data_dir);
}
# psql may leave before it has read its input
ok(poll_until(sub { my ($rc) = eval { $t->node->psql('postgres', 'SELECT 1') }; defined $rc && $rc == 0 }, 300), 'a server under valgrind');
$t->extend('postgres');
$t->queue('q');
$t->sql("SELECT dq_offer('q', 'warm')");
ok($r->cmd('BLPOP', 'q', 120), 'the worker works');
my $bridge = $t->bridge_pid(deadline => 120);

sub rss
{
	open my $s, '<', "/proc/$bridge/status" or return 0;
	my ($kb) = join('', <$s>) =~ /RssAnon:\s+(\d+)/;
	return $kb;
}

my @rss;
for my $i (1 .. 10)
{
	$t->sql("SELECT count(dq_offer('q', repeat('x', 100) || i, '1 s', CASE WHEN i % 3 = 0 THEN i END)) FROM generate_series(1, 1000) i");
	$t->sql("SELECT dq_remove('q', i) FROM generate_series(3, 60, 3) i", timeout => 600);
	poll_until(sub { $t->sql("SELECT dq_sync('q', '60 s')", timeout => 600) eq 't' }, 300);
	poll_until(sub { $r->cmd('LLEN', 'q') >= 900 }, 300);
	sleep(2);
	$r->cmd('DEL', 'q');
	push @rss, rss();
}
$t->sql("SELECT count(*) FROM q; SELECT * FROM dq_stats; SELECT * FROM dq_queues; SELECT * FROM dq_workers");
cmp_ok($rss[-1] - $rss[4], '<', 2000, "no growth after warm-up (@rss kB)");
kill 'INT', $pid;
waitpid($pid, 0);

my $errors = '';
for my $f (glob "$dir/vg.*.log")
{
	open my $l, '<', $f or next;
	local $/;
	my $text = <$l>;
	while ($text =~ /VALGRINDERROR-BEGIN(.*?)VALGRINDERROR-END/sg)
	{
		my $e = $1;
		$errors .= "$f: $e\n" if $e =~ /dq_|hiredis|redis/i;
	}
}
is($errors, '', 'no valgrind error that passes through our code or hiredis');
$t->finish;
