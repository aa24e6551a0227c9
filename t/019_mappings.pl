# Everything uses the table owner's user mapping; a wrong one stops only its own
# queues. E7 E14 G9
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;

my $t = DqTest->new;
my $r = $t->redis;

$t->queue('q');
$r->cmd('ACL', 'SETUSER', 'alice', 'on', '>p a', '~*', '&*', '+@all');
$r->cmd('ACL', 'SETUSER', 'bob', 'on', '>pb', '~*', '&*', '+@all');
$t->sql(<<'SQL');
CREATE ROLE alice LOGIN;
CREATE ROLE bob LOGIN;
GRANT USAGE ON FOREIGN SERVER redis TO alice, bob;
GRANT CREATE ON SCHEMA public TO alice, bob;
CREATE USER MAPPING FOR alice SERVER redis OPTIONS (username 'alice', password 'p a');
CREATE USER MAPPING FOR bob SERVER redis OPTIONS (username 'bob', password 'wrong');
SET SESSION AUTHORIZATION alice;
SELECT dq_create_queue('qa');
SET SESSION AUTHORIZATION bob;
SELECT dq_create_queue('qb');
RESET SESSION AUTHORIZATION;
SELECT dq_offer('q', 'q1', '0'), dq_offer('qa', 'a1', '0'), dq_offer('qb', 'b1', '0');
SQL

ok(poll_until(sub { $r->cmd('LLEN', 'q') == 1 }), "no mapping: no credentials, and it works");
ok(poll_until(sub { $r->cmd('LLEN', 'qa') == 1 }), "alice's queue by alice's mapping");
like($r->cmd('CLIENT', 'LIST'), qr/name=dq_bridge\S* .*user=alice/, 'E14 a connection of its own');
ok(poll_until(sub { ($t->sql("SELECT state FROM dq_stats WHERE queue = 'qb'::regclass") || '') eq 'redis_down' }),
	"a wrong password is seen at bob's queue");
unlike($t->sql("SELECT last_error FROM dq_stats WHERE queue = 'qb'::regclass"), qr/wrong/, 'K4 without the password');
is($t->sql("SELECT string_agg(state, ',') FROM dq_stats WHERE queue <> 'qb'::regclass"), 'running,running', '... and only there');
is($t->sql("SELECT dq_remove('qb', 'b1') IS NULL"), 't', 'G7 dq_remove with a wrong password: recorded');

# a reader with rights uses the owner's mapping, not his own
$t->sql("CREATE ROLE carol LOGIN; GRANT SELECT, INSERT, DELETE ON qa TO carol");
$t->sql("SELECT dq_offer('qa', 'later', '1 hour', 'k')");
$t->sync;
is($t->sql("SET SESSION AUTHORIZATION carol; SELECT payload FROM qa"), 'later', "carol reads by alice's mapping");
is($t->sql("SET SESSION AUTHORIZATION carol; SELECT dq_remove('qa', 'k')"), 't', '... and removes');

# repaired: everything recorded is sent, the removal included
$t->sql("SELECT dq_offer('qb', 'b2', '0'); ALTER USER MAPPING FOR bob SERVER redis OPTIONS (SET password 'pb')");
ok(poll_until(sub { $r->cmd('LLEN', 'qb') >= 1 }), 'E7 the next round uses the new password');
is(join(',', $r->ready('qb')), 'b2', 'b1 was removed, b2 arrived');
is($t->sql("SELECT state FROM dq_stats WHERE queue = 'qb'::regclass"), 'running', 'running again');

done_testing();
