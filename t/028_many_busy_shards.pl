# More busy shards on a server than one exchange holds: the last one is served as
# early as the first. F33; G9
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;

my $t = DqTest->new;
my $r = $t->redis;
my $each = 2000;
my @shards = map { my $q = $_; map { "$q#$_" } 0 .. 127 } 'big1', 'big2', 'big3';

$t->queue($_, "shards '128'") for 'big1', 'big2', 'big3';
$t->queue('last');
$t->sql("SELECT dq_pause(q) FROM unnest('{big1,big2,big3}'::regclass[]) q");
$t->sql("SELECT dq_offer('last', 'warm')");
ok($r->cmd('BLPOP', 'last', 30), 'all of them are entered');
# as another producer would
my $fill = <<'LUA';
for i = 1, tonumber(ARGV[1]) do
  local id, payload = string.format('%08d', i), 'x' .. i
  redis.call('ZADD', KEYS[1], 1000 + i, struct.pack('Bc0Lc0', #id, id, #payload, payload))
end
LUA
$r->cmd('EVAL', $fill, 1, "redisson_delay_queue_timeout:{$_}", $each) for @shards;

my $count = <<'LUA';
local sum = 0
for _, key in ipairs(KEYS) do sum = sum + redis.call('ZCARD', key) end
return sum
LUA
sub left { return $r->cmd('EVAL', $count, scalar @shards, map { "redisson_delay_queue_timeout:{$_}" } @shards); }
my $all = left();
is($all, @shards * $each, 'overdue tasks in 384 shards');

$t->sql("SELECT dq_resume(q) FROM unnest('{big1,big2,big3}'::regclass[]) q");
$t->sql("SELECT dq_offer('last', 'x')");
ok($r->cmd('BLPOP', 'last', 60), 'the task of the last queue, offered when they go, moves');
my $left = left();
note("$left of $all");
cmp_ok($left, '>', $all / 2, '... while most of the others still wait');
ok(poll_until(sub { left() == 0 }, 120), 'and all of those in the end');

$t->finish;
