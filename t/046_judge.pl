# The judge of the random histories (t/041) on histories that are known: a recorded
# move or removal means what was called before it, also if that is committed after it
# (seeds 3717361, 2648651, 4073711 of t/041 seemed to fire early); and what is wrong is
# found to be wrong. G4 G5 G7 G8; PO 17
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use DqTest::History;
use Test::More;
use Time::HiRes qw(time sleep);

my $t = DqTest->new;
my $r = $t->redis;
my $seed = 0;

$t->queue('q');
$t->sql($DqTest::History::SCHEMA);
my $consumer = $r->archiver('q', 'taken');
ok($t->wait_state('q', 'running'), 'runs');

# As DqTest::History does it: one statement, its answer in table ops
my ($h, @sessions);

sub begin
{
	$_->{psql}->quit for @sessions;
	@sessions = map { { no => $_, psql => $t->session } } 1 .. 2;
	$h = DqTest::History->new(t => $t, seed => ++$seed, queue => 'q', sessions => \@sessions);
}

sub does
{
	my ($s, $expression, %what) = @_;
	my $o = $h->operation($sessions[$s], $expression, %what);

	$h->hear($sessions[$s], 30) or die "no answer\n";
	return $o;
}

sub offers
{
	my ($s, $p, $delay) = @_;
	return does($s, "SELECT dq_offer('q', 'h${seed}p$p', '$delay ms', 'h${seed}k1')", kind => 'offer', payload => "h${seed}p$p", key => "h${seed}k1");
}

sub moves
{
	my ($s, $in) = @_;
	my $due = now_ms() + $in;
	return does($s, "SELECT dq_reschedule_at('q', 'h${seed}k1', to_timestamp($due / 1000.0))",
		kind => 'move', element => "h${seed}k1", by => 'key', due => $due);
}

sub removes
{
	my ($s) = @_;
	return does($s, "SELECT dq_remove('q', 'h${seed}k1')::text", kind => 'remove', element => "h${seed}k1", by => 'key');
}

sub opens
{
	my ($s) = @_;
	$sessions[$s]{tx} = $h->new_tx($sessions[$s]);
	$sessions[$s]{psql}->run('BEGIN', 10);
}

sub commits
{
	my ($s) = @_;
	$h->do_end($sessions[$s], 'COMMIT');
	$h->hear($sessions[$s], 30) or die "no answer\n";
}

# What has fired, once all is calm
sub fired
{
	my %fired;

	poll_until(sub { $t->sql("SELECT dq_sync('q')") eq 't' && $r->cmd('ZCARD', DqTest::Redis::pending_key('q')) == 0 && $r->cmd('LLEN', 'q') == 0 });
	push @{ $fired{ $_->[2] } }, $_->[0] for $consumer->items;
	return \%fired;
}

# ---- called before, committed after -----------------------------------------------------------
begin();
opens(0);
my $offer = offers(0, 1, 2500);
$r->freeze;
opens(1);
my $move = moves(1, 1200);
is($move->{said}, 'null', 'a move is recorded, of a task whose transaction is open');
commits(0);
# its last number is behind the offer's, so its turn comes behind it
my $other = does(1, "SELECT dq_offer('q', 'h${seed}p2', '2500 ms')", kind => 'offer', payload => "h${seed}p2");
commits(1);
$r->thaw;
my $fired = fired();
is(scalar @{ $fired->{"h${seed}p1"} || [] }, 1, 'the task fires once');
my $arrival = $fired->{"h${seed}p1"}[0];
ok($arrival >= $move->{due} && $arrival < $move->{due} + 1000, 'G8 at the instant the recorded move says: its turn came later')
  or diag("due $offer->{said}, moved to $move->{due}, arrived $arrival");
is_deeply([ $h->judge($fired) ], [], 'the judge has no complaint');
my $late = { %$fired, "h${seed}p1" => [ $move->{due} - 5 ] };
like(join("\n", $h->judge($late)), qr/fired 5 ms early/, 'of an arrival before any of the instants it has');

# ---- recorded before the offer was called: not meant --------------------------------------------
begin();
$r->freeze;
opens(1);
$move = moves(1, 700);
is($move->{said}, 'null', 'a move is recorded, of nothing');
$offer = offers(0, 1, 2000);
does(1, "SELECT dq_offer('q', 'h${seed}p2', '900 ms')", kind => 'offer', payload => "h${seed}p2");
commits(1);
$r->thaw;
$fired = fired();
($offer->{due}) = $offer->{said} =~ /^(\d+)/;
cmp_ok($fired->{"h${seed}p1"}[0], '>=', $offer->{due}, 'a task that is offered after the call is not moved by it');
is_deeply([ $h->judge($fired) ], [], 'the judge has no complaint');
$late = { %$fired, "h${seed}p1" => [ $offer->{due} - 100 ] };
like(join("\n", $h->judge($late)), qr/fired 100 ms early/, 'and would have one');

# ---- a recorded removal --------------------------------------------------------------------------
begin();
opens(0);
offers(0, 1, 1500);
$r->freeze;
opens(1);
is(removes(1)->{said}, 'null', 'a removal is recorded, of a task whose transaction is open');
commits(0);
does(1, "SELECT dq_offer('q', 'h${seed}p2', '0')", kind => 'offer', payload => "h${seed}p2");
commits(1);
$r->thaw;
$fired = fired();
is($fired->{"h${seed}p1"}, undef, 'G8 it does not fire');
is_deeply([ $h->judge($fired) ], [], 'the judge has no complaint');
like(join("\n", $h->judge({ %$fired, "h${seed}p2" => [] })), qr/never fired/, 'of one that nobody removed it has');

# ---- a true --------------------------------------------------------------------------------------
begin();
offers(0, 1, 700);
is(removes(1)->{said}, 'true', 'removed');
$fired = fired();
is_deeply([ $h->judge($fired) ], [], 'the judge has no complaint');
like(join("\n", $h->judge({ "h${seed}p1" => [ now_ms() ] })), qr/said true and committed/, 'if it fires it has');
like(join("\n", $h->judge({ "h${seed}p1" => [ now_ms(), now_ms() ] })), qr/fired 2 times/, 'and if it fires twice');

$_->{psql}->quit for @sessions;
$t->finish;
