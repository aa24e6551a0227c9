# Two transactions that define one queue at the same time come one after the other,
# so the second one sees whose it is. F31; K2
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;

my $t = DqTest->new;
my $r = $t->redis;

$t->sql(<<'SQL');
CREATE ROLE alice LOGIN;
CREATE ROLE bob LOGIN;
CREATE SCHEMA al AUTHORIZATION alice;
CREATE SCHEMA bo AUTHORIZATION bob;
GRANT USAGE ON FOREIGN SERVER redis TO alice, bob;
SQL
my $columns = '(id text, payload text, due_at timestamptz)';

sub waits
{
	my ($what) = @_;

	ok(poll_until(sub {
		$t->sql("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted") == 1;
	}, 20), "$what: the second one waits");
}

# [ what, bob's, alice's, the error of the second one ]
my @cases = (
	[ 'the same name', "bo.a $columns SERVER redis OPTIONS (queue 'a')", "al.a $columns SERVER redis OPTIONS (queue 'a')", 'owner' ],
	[ 'the name in braces', "bo.b $columns SERVER redis OPTIONS (queue '{b}')", "al.b $columns SERVER redis OPTIONS (queue 'b')", 'name' ],
	[ 'a shard of the other', "bo.c $columns SERVER redis OPTIONS (queue 'c#1')", "al.c $columns SERVER redis OPTIONS (queue 'c', shards '2')", 'name' ],
	[ 'the ready list of the other', "bo.d $columns SERVER redis OPTIONS (queue 'redisson_delay_queue_timeout:{d}')", "al.d $columns SERVER redis OPTIONS (queue 'd')", 'name' ]);
for (@cases)
{
	my ($what, $first, $second, $differ) = @$_;
	my $bob = $t->session(user => 'bob');
	my $alice = $t->session(user => 'alice');

	$bob->run("BEGIN; CREATE FOREIGN TABLE $first");
	$alice->send("CREATE FOREIGN TABLE $second");
	waits($what);
	# an offer to another queue, and its relay, go on meanwhile
	if ($what eq 'the same name')
	{
		$t->queue('other', '', timeout => 20);
		$t->sql("SET statement_timeout = '10s'; SELECT dq_offer('other', 'x')");
		ok($r->cmd('BLPOP', 'other', 10), 'other queues are created, and work, meanwhile');
	}
	$bob->run("COMMIT");
	my $answer = $alice->receive(30);
	like($answer, qr/42710.*differ in their $differ/s, "$what: ... and is refused");
	$_->quit for $alice, $bob;
}

# the first one gives up: the second one's it is
{
	my $bob = $t->session(user => 'bob');
	my $alice = $t->session(user => 'alice');

	$bob->run("BEGIN; CREATE FOREIGN TABLE bo.e $columns SERVER redis OPTIONS (queue 'e')");
	$alice->send("CREATE FOREIGN TABLE al.e $columns SERVER redis OPTIONS (queue 'e')");
	waits('rolled back');
	$bob->run("ROLLBACK");
	is($alice->receive(30), '', 'rolled back: ... and has the queue');
	is($t->sql("SELECT count(*) FROM pg_class WHERE relname = 'e'"), 1, 'one table');

	# two transactions that define two queues crosswise: one of them is cancelled
	$bob->run("BEGIN; CREATE FOREIGN TABLE bo.f $columns SERVER redis OPTIONS (queue 'f')");
	$alice->run("BEGIN; CREATE FOREIGN TABLE al.g $columns SERVER redis OPTIONS (queue 'g')");
	$alice->send("CREATE FOREIGN TABLE al.f $columns SERVER redis OPTIONS (queue 'f')");
	waits('crosswise');
	$bob->send("CREATE FOREIGN TABLE bo.g $columns SERVER redis OPTIONS (queue 'g')");
	my $answers = 0;
	my %text;
	for my $s ([ bob => $bob ], [ alice => $alice ])
	{
		$text{ $s->[0] } = $s->[1]->receive(10);
		$s->[1]->run("ROLLBACK") if defined $text{ $s->[0] } && $text{ $s->[0] } =~ /40P01/;
	}
	$text{bob} = $bob->receive(30) unless defined $text{bob};
	is(scalar(grep { defined && /40P01/ } values %text), 1, 'crosswise: found to be a deadlock');
	$_->quit for $alice, $bob;
}

# one queue changes its owner while another table of it is made
{
	$t->sql("CREATE FOREIGN TABLE bo.h $columns SERVER redis OPTIONS (queue 'h')", user => 'bob');
	my $boss = $t->session;
	my $bob = $t->session(user => 'bob');

	$boss->run("BEGIN; ALTER FOREIGN TABLE bo.h OWNER TO alice");
	$bob->send("CREATE FOREIGN TABLE bo.h2 $columns SERVER redis OPTIONS (queue 'h')");
	waits('ALTER OWNER');
	$boss->run("COMMIT");
	like($bob->receive(30), qr/42710.*differ in their owner/s, 'ALTER OWNER: the table beside it is refused');
	$_->quit for $boss, $bob;
}

$t->finish;
