# The models of the protocol (doc/model): every scenario must come out as it says. The right
# ones hold in every reachable state, the wrong ones are caught, which shows that the searcher
# can see what it looks for.
use strict;
use warnings;
use FindBin;
use Test::More;
use Time::HiRes qw(time);

my $search = "$FindBin::RealBin/../doc/model/search.py";
my $version = `python3 -c 'import sys; print("%d.%02d" % sys.version_info[:2])' 2>/dev/null`;

plan skip_all => 'no python3' unless $version =~ /^\d/;
plan skip_all => "python3 is $version, 3.06 is needed" if $version < 3.06;

my $start = time;
my ($held, $caught) = (0, 0);
open my $out, '-|', 'python3', '-B', $search or die "python3: $!";
while (my $line = <$out>)
{
	chomp $line;
	my ($ok, $model, $name, $verdict, $states, $text) =
	  $line =~ /^(ok|FAIL) +(\S+) +(\S+) +(\S+) +(\d+) states +[\d.]+ s  (.*)$/;
	if (!defined $ok)
	{
		fail("a line of the searcher: $line");
		next;
	}
	is($ok, 'ok', "$model, $name: $verdict ($states states): $text");
	$held++ if $verdict eq 'holds';
	$caught++ if $verdict ne 'holds' && $verdict ne 'limit';
}
close $out;
is($?, 0, 'the searcher ends well');
cmp_ok($held, '>', 30, "$held scenarios hold");
cmp_ok($caught, '>', 50, "$caught broken ones are caught");
note(sprintf '%.0f s', time - $start);

# and one that is said to come out otherwise is seen
my $wrong = `python3 -B -c "
import sys
sys.path.insert(0, '$FindBin::RealBin/../doc/model')
import search, order
one = order.SCENARIOS[1]._replace(verdict='holds')
got, result = search.run(one)
print(search.line('order', one, got, result))"`;
like($wrong, qr/^FAIL .*expected: holds/, 'a scenario with another verdict fails');

done_testing();
