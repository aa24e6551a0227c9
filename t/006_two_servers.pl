# Two databases, two servers of which one hangs; one backlog beside many small
# queues; a queue that cannot be served: the others are on time.
# A9 F8 D4 G9 G10 C6
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

my $t = DqTest->new;
my $r = $t->redis;
my $r2 = DqTest::Redis->new(name => 'second');

$t->sql("CREATE SERVER second FOREIGN DATA WRAPPER dq_bridge OPTIONS (socket '" . $r2->socket . "')");
$t->queue('q');
$t->queue('p', undef, server => 'second');
$t->sql("CREATE DATABASE db2");
$t->extend('db2');
$t->sql("CREATE SERVER second FOREIGN DATA WRAPPER dq_bridge OPTIONS (socket '" . $r2->socket . "')", db => 'db2');
$t->queue('q_db2', undef, db => 'db2');
$t->queue('p_db2', undef, db => 'db2', server => 'second');

$t->sql("SELECT dq_offer('q', 'warm'), dq_offer('p', 'warm')");
$t->sql("SELECT dq_offer('q_db2', 'warm'), dq_offer('p_db2', 'warm')", db => 'db2');
for ([ $r, 'q' ], [ $r, 'q_db2' ], [ $r2, 'p' ], [ $r2, 'p_db2' ])
{
	my ($x, $list) = @$_;
	ok($x->cmd('BLPOP', $list, 20), "$list is served");
}
is($t->sql("SELECT count(DISTINCT (database, server)) FROM dq_workers WHERE role = 'bridge' AND pid > 0"), 4,
	'a bridge per database and server');

# ---- one server hangs ---------------------------------------------------------------
$r2->freeze;
my $consumer = $r->consumer('q', 'q_db2');
$t->sql("SELECT dq_offer('p', 'p-' || i) FROM generate_series(1, 50) i");
$t->sql("SELECT dq_offer('p_db2', 'p-' || i) FROM generate_series(1, 50) i", db => 'db2');
my (%due, $worst);
for my $i (1 .. 30)
{
	for (['q', 'postgres'], ['q_db2', 'db2'])
	{
		my $id = $t->sql("SELECT dq_offer('$_->[0]', '$_->[0]-$i', '200 ms')", db => $_->[1]);
		($due{"$_->[0]-$i"}) = $id =~ /^(\d+)/;
	}
}
ok(poll_until(sub { $consumer->items == 60 }), 'the other server\'s tasks arrive');
my @late = sort { $a <=> $b } map { $_->[0] - $due{ $_->[2] } } $consumer->items;
cmp_ok($late[0], '>=', 0, 'none early');
cmp_ok($late[-1], '<', 1000, "G9 and on time while the second server hangs (worst $late[-1] ms)");
$consumer->stop;
is($t->stat('q', 'state'), 'running', 'state of the good queue');
$r2->thaw;
ok(poll_until(sub { $r2->cmd('LLEN', 'p') == 50 && $r2->cmd('LLEN', 'p_db2') == 50 }), 'the hanging server catches up');

# ---- A9: a backlog and 49 small queues -------------------------------------------------
my $n = rounds(40000, 200000);
$t->sql("DO \$\$ BEGIN FOR i IN 1 .. 50 LOOP EXECUTE format('CREATE FOREIGN TABLE a9_%s (payload text, due_at timestamptz) SERVER redis', i); END LOOP; END \$\$");
$t->sql("SELECT dq_offer('a9_1', 'warm')");
$t->sync;
my $start = now_ms();
$t->sql("SELECT count(dq_offer('a9_1', 'backlog' || i)) FROM generate_series(1, $n) i");
$t->sql("DO \$\$ BEGIN FOR i IN 2 .. 50 LOOP PERFORM dq_offer(format('a9_%s', i)::regclass, 'small', '2 seconds'); END LOOP; END \$\$");
my $due = now_ms() + 2000;
my $ok = poll_until(sub { !grep { $r->cmd('LLEN', "a9_$_") == 0 } 2 .. 50 });
my $late = now_ms() - $due;
ok($ok, 'A9 49 small queues beside a backlog arrive');
cmp_ok($late, '<', 2000, "A9 within the tolerance ($late ms)");
ok(poll_until(sub { $r->cmd('LLEN', 'a9_1') >= $n }), 'A9 and the backlog is delivered');

# ---- F8: queues that cannot be served ------------------------------------------------------
$r->cmd('SET', 'redisson_delay_queue_timeout:{bad_type}', 'not a zset');
$t->queue('bad_type');
$t->queue('good');
$t->sql("SELECT dq_offer('bad_type', 'x' || i) FROM generate_series(1, 500) i");
$t->sql("SELECT dq_offer('good', 'y' || i) FROM generate_series(1, 100) i");
ok(poll_until(sub { $r->cmd('LLEN', 'good') == 100 }, 10), 'F8 a queue of a wrong type does not delay the others');
ok(poll_until(sub { ($t->stat('bad_type', 'last_error') || '') =~ /WRONGTYPE|wrong|type/i }), 'F8 its reason is visible')
  or diag($t->stat('bad_type', "state || ' ' || coalesce(last_error, '')"));
is($r->cmd('GET', 'redisson_delay_queue_timeout:{bad_type}'), 'not a zset', 'F8 and nothing of the stranger\'s key was touched');
$r->cmd('DEL', 'redisson_delay_queue_timeout:{bad_type}');
ok(poll_until(sub { $r->cmd('LLEN', 'bad_type') == 500 }), 'F8 it goes on by itself when the key is right');
# the ready list of a wrong type: tasks stay pending
$r->cmd('SET', 'bad_ready', 'not a list');
$t->queue('bad_ready');
$t->sql("SELECT dq_offer('bad_ready', 'x'), dq_offer('good', 'z')");
ok(poll_until(sub { $r->cmd('LLEN', 'good') == 101 }, 10), 'F8 a ready key of a wrong type delays no other queue');
is($r->cmd('ZCARD', 'redisson_delay_queue_timeout:{bad_ready}'), 1, 'F8 its task stays pending');
$r->cmd('DEL', 'bad_ready');
ok(poll_until(sub { $r->cmd('LLEN', 'bad_ready') == 1 }), 'F8 until the key is right');
# a server that was dropped with its queues, and one whose mapping has a wrong password
$t->sql("CREATE SERVER wrong FOREIGN DATA WRAPPER dq_bridge OPTIONS (socket '" . $r->socket . "')");
$t->sql("CREATE USER MAPPING FOR CURRENT_USER SERVER wrong OPTIONS (username 'nobody', password 'no')");
$t->queue('denied', undef, server => 'wrong');
$t->sql("SELECT dq_offer('denied', 'x')");
$t->sql("SELECT dq_offer('good', 'zz')");
ok(poll_until(sub { $r->cmd('LLEN', 'good') == 102 }, 10), 'F8 wrong credentials of one server delay no other');
ok(poll_until(sub { ($t->stat('denied', 'last_error') || '') =~ /WRONGPASS|authentication|password/i }), 'F8 the reason is visible');
$t->sql("DROP USER MAPPING FOR CURRENT_USER SERVER wrong");
ok(poll_until(sub { $r->cmd('LLEN', 'denied') == 1 }), 'F8 recovers without restart');

# ---- C6: idle costs --------------------------------------------------------------------------
# commands that the workers send, as MONITOR shows them; what scripts call is theirs
my $monitor = $r->connect_new;
print { $monitor->{fh} } DqTest::Redis::encode('MONITOR');
$monitor->{fh}->flush;
sleep(4);
$monitor->{fh}->blocking(0);
1 while sysread($monitor->{fh}, $monitor->{buf}, 1 << 20, length $monitor->{buf});
my $sent = grep { /^\+[\d.]+ \[\d+ (?!lua)/ } split /\r\n/, $monitor->{buf};
my $per_shard = $sent / 4 / $t->sql("SELECT count(*) FROM dq_stats");
cmp_ok($per_shard, '<=', 2, sprintf('C6 idle: %.2f commands/s per shard', $per_shard));

$t->finish;
