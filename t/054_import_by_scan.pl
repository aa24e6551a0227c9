# IMPORT FOREIGN SCHEMA finds queues with SCAN, never KEYS, among many other keys; and what it
# makes is what is there: LIMIT TO, EXCEPT, prefix, ready lists. I6
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time);

my $t = DqTest->new;
my $r = $t->redis;
my $member = DqTest::Redis::pack_member('12345678', 'p');

# 40 queues in between 50,000 keys that are none of ours
$r->cmd('EVAL', "for i = 1, 50000 do redis.call('SET', 'other:' .. i, 'x') end", 0);
$r->cmd('ZADD', DqTest::Redis::pending_key(sprintf('shop:%s:%02d', $_ % 2 ? 'orders' : 'mails', $_)), 4102444800000, $member) for 1 .. 38;
$r->cmd('ZADD', DqTest::Redis::pending_key($_), 4102444800000, $member) for 'plain', 'select';
$r->cmd('RPUSH', 'plain', 'lies ready');

sub tables { my ($schema) = @_; return $t->sql("SELECT string_agg(relname, ' ' ORDER BY relname) FROM pg_class WHERE relnamespace = '$schema'::regnamespace"); }
sub count { my ($schema) = @_; return $t->sql("SELECT count(*) FROM pg_class WHERE relnamespace = '$schema'::regnamespace"); }

$t->sql("CREATE SCHEMA $_") for qw(a b c d e f);
$r->cmd('CONFIG', 'RESETSTAT');
$t->sql('IMPORT FOREIGN SCHEMA "*" FROM SERVER redis INTO a');
my $stats = $r->cmd('INFO', 'commandstats');
like($stats, qr/cmdstat_scan:/, 'SCAN is used');
unlike($stats, qr/cmdstat_keys:/, 'I6 KEYS never');
is(count('a'), 40, 'all queues');
is($t->sql('SELECT payload FROM a."shop:orders:07"'), 'p', 'they can be read');
is($t->sql('SELECT payload FROM a."select"'), 'p', 'a name that is a word of SQL');

$t->sql('IMPORT FOREIGN SCHEMA "shop:orders:" FROM SERVER redis INTO b');
is(count('b'), 19, 'a prefix as the schema');
$t->sql(q{IMPORT FOREIGN SCHEMA "*" FROM SERVER redis INTO c OPTIONS (prefix 'shop:mails:')});
is(count('c'), 19, 'option prefix');
$t->sql('IMPORT FOREIGN SCHEMA "*" LIMIT TO (plain, "shop:orders:01", "shop:mails:02", nonesuch) FROM SERVER redis INTO d');
is(tables('d'), 'plain shop:mails:02 shop:orders:01', 'LIMIT TO');
$t->sql('IMPORT FOREIGN SCHEMA "shop:" EXCEPT ("shop:orders:01", nonesuch) FROM SERVER redis INTO e');
is(count('e'), 37, 'EXCEPT');
$t->sql(q{IMPORT FOREIGN SCHEMA "plain" FROM SERVER redis INTO f OPTIONS (ready 'on')});
is(tables('f'), 'plain plain_ready', 'ready lists on request');
is($t->sql('SELECT payload FROM f.plain_ready'), 'lies ready', '... and they can be read');
# an imported queue is a queue
$t->sql("SELECT dq_offer('f.plain', 'offered', '1 hour')");
is($t->sql('SELECT count(*) FROM f.plain'), 2, 'an imported queue takes offers');
$t->fails('IMPORT FOREIGN SCHEMA "*" FROM SERVER redis INTO nowhere', '3F000', 'a schema that is not there');
$t->finish;
