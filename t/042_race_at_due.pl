# 5,000 tasks due at T, and four sessions that remove a quarter each, beginning
# between 150 ms before and 30 ms after T: for each task exactly one of (true, not
# delivered), (false, delivered once), (NULL, at most once).
# B3; G4 G5; PO 8 9 10
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

my $tasks = 5000;
my $t = DqTest->new;
my $r = $t->redis;

$t->queue('q');
$t->queue('q4', "shards '4'");
$t->sql("CREATE TABLE said (round int, n int, answer boolean)");
# each removal in a transaction of its own; a part of them is rolled back
$t->sql(<<'SQL');
CREATE PROCEDURE remove_part(round int, queue text, part int, many int, start timestamptz, undo boolean) LANGUAGE plpgsql AS $$
DECLARE
  answer boolean;
BEGIN
  PERFORM pg_sleep(greatest(extract(epoch FROM start - clock_timestamp()), 0));
  FOR n IN 1 .. many LOOP
    CONTINUE WHEN n % 4 <> part;
    answer := dq_remove(queue::regclass, format('r%s-%s', round, n));
    IF undo AND n % 3 = 0 THEN
      ROLLBACK;
    ELSE
      INSERT INTO said VALUES (round, n, answer);
      COMMIT;
    END IF;
  END LOOP;
END $$;
SQL

my $round = 0;

sub race
{
	my ($queue, $name, %o) = @_;
	my @lists = $queue eq 'q' ? ('q') : map { "q4#$_" } 0 .. 3;

	$round++;
	# room for the relay before the first begins
	my $due = now_ms() + 2000;
	$t->sql("SELECT count(dq_offer_at('$queue', 'r$round-' || n, to_timestamp($due / 1000.0)"
		  . ($o{keyed} ? ", 'r$round-' || n" : '') . ")) FROM generate_series(1, $tasks) n");
	$t->sync;
	my $early = ($due - now_ms() > 200);
	my @s = map { $t->session } 0 .. 3;
	my @start = (-150, -90, -30, 30);
	$s[$_]->send("CALL remove_part($round, '$queue', $_, $tasks, to_timestamp(($due + $start[$_]) / 1000.0), "
		  . ($o{undo} ? 'true' : 'false') . ')') for 0 .. 3;
	my @out = map { $_->receive(120) } @s;
	is(join('', map { defined $_ ? $_ : 'nothing' } @out), '', "$name: all four are through");
	$_->quit for @s;
	$t->sync;
	my %answer = map { my ($n, $a) = split /\|/; ("r$round-$n" => $a) }
	  split /\n/, $t->sql("SELECT n, coalesce(answer::text, 'null') FROM said WHERE round = $round");
	my $must = grep { my $a = $answer{"r$round-$_"}; !defined $a || $a eq 'false' } 1 .. $tasks;
	poll_until(sub {
		my $pending = 0;
		$pending += $r->cmd('ZCARD', DqTest::Redis::pending_key($_)) + $r->cmd('HLEN', "dq:{$_}:hold") for @lists;
		$pending == 0;
	});
	my %n;
	for my $list (@lists)
	{
		$n{$_}++ for $r->ready($list);
		$r->cmd('DEL', $list);
	}
	my (%count, @wrong);
	for my $i (1 .. $tasks)
	{
		my $p = "r$round-$i";
		my $a = defined $answer{$p} ? $answer{$p} : 'undone';
		my $n = delete $n{$p} || 0;
		$count{"$a $n"}++;
		push @wrong, "$p $a $n" if $a eq 'true' ? $n != 0 : $a eq 'null' ? $n > 1 : $n != 1;
	}
	ok(!@wrong && !%n, "$name: exactly one outcome each")
	  or diag(scalar(@wrong) . " wrong: @wrong[0 .. ($#wrong > 9 ? 9 : $#wrong)]; strangers: " . scalar(keys %n));
	note("$name: " . join ', ', map { "$_: $count{$_}" } sort keys %count);
	ok($early, "$name: offered in time");
	ok(($count{'true 0'} || 0) > 0 && ($count{'false 1'} || 0) > 0, "$name: some were quicker, some slower");
}

for (1 .. rounds(1, 5))
{
	race('q', 'by key', keyed => 1);
	race('q', 'by payload');
	race('q4', 'by key, four shards', keyed => 1);
	race('q', 'a third rolled back', keyed => 1, undo => 1);
}
race('q4', 'by payload, four shards', undo => 1) if long_run();

$t->finish;
