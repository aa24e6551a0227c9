# A removal that was recorded without an answer takes one task, the one it named,
# before any later transfer. G4 G7; PO 17
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(sleep);

my $t = DqTest->new;
my $r = $t->redis;

$t->queue('q');
$t->queue('q4', "shards '4'");
$t->queue('qi', "index 'off'");

sub count { my ($q) = @_; $t->sync; return $t->sql("SELECT count(*) FROM $q"); }

# one of eight equal ones, over four shards
$t->sql("SELECT count(dq_offer('q4', 'w', '1 hour')) FROM generate_series(1, 8)");
is(count('q4'), 8, 'eight equal tasks over four shards');
$r->freeze;
is($t->sql("SELECT dq_remove('q4', 'w') IS NULL"), 't', 'Redis silent: NULL');
$r->thaw;
ok(poll_until(sub { count('q4') == 7 }), 'one is taken');
$t->sync;
is(count('q4'), 7, '... and only one');

# what is offered after the removal was recorded is not meant
$r->freeze;
is($t->sql("SELECT dq_remove('q4', 'v') IS NULL"), 't', 'nothing of that name is pending: NULL all the same');
$t->sql("SELECT count(dq_offer('q4', 'v', '1 hour')) FROM generate_series(1, 8)");
$r->thaw;
is(count('q4'), 15, 'later offers of the same payload stay');

# by key, by id, and where there is no index
my $id = $t->sql("SELECT dq_offer('q', 'by id', '1 hour')");
$t->sql("SELECT dq_offer('q', 'by key', '1 hour', 'k'), dq_offer('qi', 'plain', '1 hour'), dq_offer('qi', 'stays', '1 hour')");
$t->sync;
$r->freeze;
is($t->sql("SELECT dq_remove('q', '$id') IS NULL, dq_remove('q', 'k') IS NULL, dq_remove('qi', 'plain') IS NULL"), 't|t|t', 'three more');
$r->thaw;
is(count('q'), 0, 'by id and by key: gone');
is(count('qi'), 1, 'without an index: one gone');

# overdue when Redis answers again: the removal comes first
$t->sql("SELECT dq_offer('q', 'overdue', '1500 ms', 'o')");
$t->sync;
$r->freeze;
is($t->sql("SELECT dq_remove('q', 'o') IS NULL"), 't', 'recorded before it is due');
my $past = now_ms() + 1600;
poll_until(sub { now_ms() > $past });
$r->thaw;
$t->sync;
is($r->cmd('LLEN', 'q'), 0, 'applied before any later transfer');
is(count('q'), 0, 'not pending either');

# an element that looks like an id no member can have
is($t->sql("SELECT dq_remove('q', '5-x' || repeat('00', 300))"), 'f', 'an impossible id names nothing');
$t->sql("SELECT dq_offer('q', 'on time', '0')");
ok(poll_until(sub { $r->cmd('LLEN', 'q') == 1 }), '... and stops nobody');

done_testing();
