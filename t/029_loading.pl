# A Redis that still reads its file says LOADING, and of itself that it keeps none:
# one line in the log for all queues, and no false warning. F19 F24
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;

my $t = DqTest->new;
my $r = $t->redis;

$t->queue($_, "shards '4'") for 'a', 'b', 'c';
$t->sql("SELECT dq_offer(q, 'x', '1 hour') FROM unnest('{a,b,c}'::regclass[]) q");
ok($t->sync, 'three queues of four shards');
# two thousand keys, two milliseconds each
$r->cmd('EVAL', "for i = 1, 2000 do redis.call('SET', 'filler:' .. i, i) end", 0);
$r->cmd('BGREWRITEAOF');
ok(poll_until(sub { $r->cmd('INFO', 'persistence') =~ /aof_rewrite_in_progress:0/ }), 'its file is rewritten');
$r->{config}{'key-load-delay'} = 2000;
$r->{config}{'loading-process-events-interval-bytes'} = 1024;
$r->stop;
my $size = length $t->log_text;
$r->start;
ok($t->wait_state($_, 'running'), "$_ runs again") for 'a', 'b', 'c';
$t->sql("SELECT dq_offer('a', 'y', '1 hour')");
ok($t->sync, 'and works');

my $log = substr($t->log_text, $size);
my @waits = $log =~ /(waits: LOADING)/g;
cmp_ok(scalar @waits, '<=', 1, 'F19 one line about it');
unlike($log, qr/no persistence/, 'F24 no false warning');
is($t->sql("SELECT count(*) FROM dq_stats WHERE warnings <> '{}'"), 0, 'F24 nor one in dq_stats');
is($t->sql("SELECT count(*) FROM dq_workers WHERE warnings <> '{}'"), 0, 'F24 nor in dq_workers');
like($log, qr/LOADING/, 'it was met while it was loading');

$t->finish;
