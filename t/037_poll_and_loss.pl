# What was polled and put back in front of the list is not delivered: a loss of data
# afterwards brings it again. G3; PO 15a
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(sleep);

my $t = DqTest->new;
my $r = $t->redis;
my $s = $t->session;

sub in_list { my (@want) = @_; my $want = join ',', @want; return poll_until(sub { join(',', $r->ready('q')) eq $want }, 20); }
sub offer { $t->sql("SELECT dq_offer('q', '$_')") for @_; }
# the mark as it is stored
sub mark { return $t->sql("SELECT count(*), max(m::text) FROM dq_marks m"); }

$t->queue('q');
for my $round (1 .. rounds(2, 10))
{
	my ($a, $b, $c) = map { "$_$round" } qw(a b c);

	offer($a, $b);
	ok(in_list($a, $b), 'two tasks lie in the list');
	# the worker looks each second what has left it
	sleep(2.2);
	is($r->cmd('LPOP', 'q'), $a, 'a consumer takes the first');
	$s->run('BEGIN');
	is($s->run("SELECT dq_poll('q')"), $b, 'a transaction polls the second');
	offer($c);
	ok(in_list($c), 'a third comes');
	is($r->cmd('LPOP', 'q'), $c, '... and is taken');
	$s->run('ROLLBACK');
	ok(in_list($b), 'the second is in front again, unread');
	sleep(2.5);
	$r->cmd('FLUSHALL');
	# a and c may come again, b must
	ok(poll_until(sub { grep { $_ eq $b } $r->ready('q') }), 'after FLUSHALL it comes again');
	$r->cmd('DEL', 'q');
	ok($t->wait_state('q', 'running'), 'running again');
}
$s->quit;
$t->finish;
