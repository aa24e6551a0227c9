# What somebody writes into the fence of one shard, or into its rows of the outbox,
# stops that shard alone, with a reason; mended, it goes on. Damaged index entries lead nowhere. F34; G9
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;

my $t = DqTest->new;
my $r = $t->redis;

$t->queue('q');
$t->queue('good');
$t->sql("SELECT dq_offer('q', 'x', '1 hour'), dq_offer('good', 'x', '1 hour')");
ok($t->sync, 'both queues work');

my $fence = 'dq:{q}:fence';
my ($source) = grep { s/^ver:// } @{ $r->cmd('HKEYS', $fence) };
my $n = 0;

sub damage
{
	my ($what, $field, $value, $text) = @_;
	my $was = $r->cmd('HGET', $fence, $field);

	$n++;
	defined $value ? $r->cmd('HSET', $fence, $field, $value) : $r->cmd('HDEL', $fence, $field);
	$t->sql("SELECT dq_worker_stop(); SELECT dq_worker_start()");
	$t->sql("SELECT dq_offer('good', 'g$n'), dq_offer('q', 'q$n')");
	my $got = $r->cmd('BLPOP', 'good', 15);
	is($got && $got->[1], "g$n", "$what: the other queue goes on");
	ok($t->wait_state('q', 'parked', deadline => 20), '... this one is parked')
	  or diag($t->sql("SELECT queue, state, last_error FROM dq_stats"));
	like($t->stat('q', 'last_error'), $text, '... and says why');
	is($t->stat('good', 'state'), 'running', '... the other is not said to be down');
	is($t->sql("SELECT dq_remove('q', 'nothing') IS NULL"), 't', '... dq_remove: no certain answer, no error');
	is($t->sql("SELECT dq_sync('q', '200 ms')"), 'f', '... dq_sync: false');
	$r->cmd('HSET', $fence, $field, $was);
	$got = $r->cmd('BLPOP', 'q', 15);
	is($got && $got->[1], "q$n", '... mended, it goes on');
	ok($t->wait_state('q', 'running', deadline => 20), '... as if nothing had been');
	is($r->cmd('ZCARD', 'redisson_delay_queue_timeout:{q}'), 1, '... nothing was done twice');
}

damage('prev', "prev:$source", 'garbage', qr/damaged: prev: holds "garbage"/);
damage('half a prev', "prev:$source", '1:5:9:7,abc', qr/damaged: prev:/);
damage('an unsorted prev', "prev:$source", '1:5:9:7,6', qr/damaged: prev:/);
damage('no prev', "prev:$source", undef, qr/damaged: prev:/);
damage('pos', "pos:$source", 'zzz|0', qr/damaged: pos: holds "zzz\|0"/);
damage('no pos', "pos:$source", undef, qr/damaged: prev:/);
damage('version', "ver:$source", 'abc', qr/damaged: a counter/);
damage('indexed', 'indexed', 'abc', qr/damaged: a counter/);
damage('indexed, too large', 'indexed', '9' x 30, qr/damaged: a counter/);

# the cursor of the index's sweep begins anew, a lease that is none is over
$r->cmd('HSET', $fence, 'sweep', 'abc');
$r->cmd('HSET', 'dq:{q}:owner', 'lease', 'abc');
$t->sql("SELECT dq_worker_stop(); SELECT dq_worker_start()");
$t->sql("SELECT dq_offer('q', 'after sweep')");
is(($r->cmd('BLPOP', 'q', 15) || [])->[1], 'after sweep', 'sweep and lease heal by themselves');

# index entries that are no places
my $index = 'dq:{q}:index';
$r->cmd('HSET', $index, 'kkey', 'short', 'pplain', '', 'pother', 'x' x 14);
is($t->sql("SELECT dq_remove('q', 'key'), dq_remove('q', 'plain')"), 'f|f', 'damaged index entries name nothing');
$r->cmd('HSET', $index, 'kkey', 'short', 'pplain', '');
$t->sql("SELECT dq_offer('q', 'keyed', '1 hour', 'key'), dq_offer('q', 'plain', '1 hour')");
ok($t->sync, '... offers of that key and payload go through');
is($t->sql("SELECT dq_remove('q', 'key'), dq_remove('q', 'plain')"), 't|t', '... and are found');

# of another type: the shard alone
$r->cmd('RENAME', $index, 'kept{q}');
$r->cmd('SET', $index, 'x');
$t->sql("SELECT dq_offer('good', 'g'), dq_offer('q', 'q')");
is(($r->cmd('BLPOP', 'good', 15) || [])->[1], 'g', 'index of a wrong type: the other queue goes on');
$r->cmd('RENAME', 'kept{q}', $index);
is(($r->cmd('BLPOP', 'q', 15) || [])->[1], 'q', '... and mended, this one too');

# a row of the outbox that means nothing, or lacks what it needs
for ([ 'op', "'?'", qr/unknown operation "\?"/, "'o'" ], [ 'payload', 'NULL', qr/lacks a value of operation "o"/, "'\\x71'" ])
{
	my ($column, $bad, $text, $good) = @$_;
	$t->sql("SELECT dq_worker_stop()");
	$t->sql("SELECT dq_offer('good', 'g'), dq_offer('q', 'before'), dq_offer('q', 'q')");
	my $seq = $t->sql("SELECT last_value FROM dq_outbox_seq");
	$t->sql("UPDATE dq_outbox_$_ SET $column = $bad WHERE seq = $seq") for 0 .. 2;
	$t->sql("SELECT dq_worker_start()");
	is(($r->cmd('BLPOP', 'good', 15) || [])->[1], 'g', "a bad $column in the outbox: the other queue goes on");
	ok($t->wait_state('q', 'parked', deadline => 20), '... this one is parked');
	like($t->stat('q', 'last_error'), $text, '... and says why');
	is($t->stat('good', 'state'), 'running', '... the other is not said to be down');
	$t->sql("UPDATE dq_outbox_$_ SET $column = $good WHERE seq = $seq") for 0 .. 2;
	is(join(',', map { ($r->cmd('BLPOP', 'q', 15) || [])->[1] } 1, 2), 'before,q', '... mended, it goes on');
}

$t->finish;
