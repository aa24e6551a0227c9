# One clock decides, the database server's: a Redis with another time delays
# nothing and makes nothing early, and the difference is seen. Redis's other time
# is told by a script of our own (dq_bridge.script_dir). C4
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use PostgreSQL::Test::Utils ();
use Test::More;
use Time::HiRes qw(time);

my $t = DqTest->new(start => 0);
my $r = $t->redis;
my $dir = $t->node->basedir . '/scripts';

# every script that asks Redis for the time gets another one
sub clock
{
	my ($shift) = @_;
	mkdir $dir;
	for my $name (qw(status lib))
	{
		my $text = PostgreSQL::Test::Utils::slurp_file("$FindBin::RealBin/../lua/$name.lua");
		$text =~ s/call\('TIME'\)/call('TIME')\n  t[1] = tostring(tonumber(t[1]) + $shift)/ or die "no TIME in $name.lua";
		open my $fh, '>', "$dir/$name.lua" or die;
		print $fh $text;
		close $fh;
	}
}

clock(300);
$t->node->append_conf('postgresql.conf', "dq_bridge.script_dir = '$dir'\n");
$t->node->start;
$t->extend('postgres');
$t->queue('q');

sub arrives
{
	my ($name) = @_;
	my $start = time();
	$t->sql("SELECT dq_offer('q', '$name', '2 seconds')");
	my $got = $r->cmd('BLPOP', 'q', 20);
	my $took = time() - $start;
	is($got && $got->[1], $name, "$name: arrives");
	cmp_ok($took, '>=', 1.99, "$name: never early (" . sprintf('%.3f s', $took) . ')');
	cmp_ok($took, '<', 4, "$name: on time");
}

sub skew { return $t->sql("SELECT coalesce(extract(epoch FROM clock_skew), 0) FROM dq_stats"); }

arrives('Redis five minutes ahead');
ok(poll_until(sub { abs(skew()) > 290 }), 'the skew is in dq_stats');
like($t->sql("SELECT array_to_string(warnings, ',') FROM dq_stats"), qr/clock skew/, 'and is a warning there');

# the other clock steps while a task is pending; restarts read the scripts anew
$t->sql("SELECT dq_offer('q', 'later', '1 hour', 'k')");
$t->sync;
for my $shift (-3300, 7200, 0)
{
	clock($shift);
	$t->node->restart;
	arrives("Redis at $shift s");
	is($t->sql("SELECT payload FROM q"), 'later', '... and the other task waits for its instant');
}
ok(poll_until(sub { abs(skew()) < 5 }), 'no skew any more');
unlike($t->sql("SELECT array_to_string(warnings, ',') FROM dq_stats"), qr/clock skew/, 'no warning');

done_testing();
