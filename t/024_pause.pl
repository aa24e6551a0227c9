# A pause holds from its commit on, however the worker was just occupied: a task
# that falls due afterwards waits until dq_resume, and a change of the queue's
# definition is seen though no other transaction follows it. DESIGN 3; E7
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

my $t = DqTest->new;
my $r = $t->redis;

$t->queue('q');
$t->sql("SELECT dq_offer('q', 'warm')");
ok($r->cmd('BLPOP', 'q', 10), 'it works to begin with');

my $s = $t->session;
my ($moved, $stuck) = (0, 0);
for my $i (1 .. rounds(30, 300))
{
	# idle for a while, so that the pause is what wakes the worker
	sleep(rand(1));
	$s->run("SELECT dq_pause('q')");
	sleep(0.05);
	# no transaction after the pause: the task comes from a foreign producer
	$r->redisson_offer('q', now_ms() - 10, "p$i", silent => $i % 2);
	sleep(0.1);
	$moved++ if $r->cmd('LLEN', 'q');
	$s->run("SELECT dq_resume('q')");
	$stuck++ unless $r->cmd('BLPOP', 'q', 5);
}
is($moved, 0, 'nothing moves while a queue is paused');
is($stuck, 0, 'dq_resume lets it go, at once');

# the same for options: destination none and back
($moved, $stuck) = (0, 0);
for my $i (1 .. rounds(20, 100))
{
	sleep(rand(1));
	$s->run("ALTER FOREIGN TABLE q OPTIONS (ADD destination 'none')");
	sleep(0.05);
	$r->redisson_offer('q', now_ms() - 10, "d$i", silent => $i % 2);
	sleep(0.1);
	$moved++ if $r->cmd('LLEN', 'q');
	$s->run("ALTER FOREIGN TABLE q OPTIONS (DROP destination)");
	$stuck++ unless $r->cmd('BLPOP', 'q', 5);
}
is($moved, 0, 'destination none acts from its commit on');
is($stuck, 0, 'and so does list again');
$s->quit;

$t->finish;
