# A sink: due tasks arrive as rows of a table of PostgreSQL, with their columns by name,
# through triggers, defaults, generated columns, partitions and views, with NOTIFY and
# with a copy in the list. A bad row is dead alone, with its bytes. DESIGN 4 7 8;
# B6 F17 J2 J3; G6 G9; PO 13 14
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

my $t = DqTest->new;
my $r = $t->redis;

sub count { my ($sql) = @_; return $t->sql("SELECT count(*) FROM $sql"); }
sub arrives { my ($sql, $n) = @_; return poll_until(sub { count($sql) >= $n }); }

# ---- columns by name -----------------------------------------------------------------
$t->sql(<<'SQL');
CREATE SCHEMA shop;
CREATE TABLE shop.due_orders (
  no serial, payload jsonb, key int, due_at timestamptz, shard int, queue text, id text,
  order_no int GENERATED ALWAYS AS ((payload->>'order')::int) STORED,
  state text DEFAULT 'new', arrived timestamptz DEFAULT clock_timestamp());
CREATE TABLE shop.log (order_no int, who text);
CREATE FUNCTION shop.note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO shop.log VALUES (NEW.order_no, session_user); RETURN NEW; END $$;
CREATE TRIGGER note AFTER INSERT ON shop.due_orders FOR EACH ROW EXECUTE FUNCTION shop.note();
SQL
$t->queue('orders', "sink 'shop.due_orders'");
my $id = $t->sql(q{SELECT dq_offer('orders', '{"order": 7}', '200 ms', 7)});
$t->sql(q{SELECT dq_offer('orders', '{"order": 8}')});
ok(arrives('shop.due_orders', 2), 'two tasks become two rows');
is($t->sql("SELECT payload->>'order', key, queue, shard, state, order_no, id FROM shop.due_orders WHERE key IS NOT NULL"),
	"7|7|orders|0|new|7|$id", 'columns by name and type, defaults and generated ones');
is($t->sql("SELECT count(*) FROM shop.due_orders WHERE key IS NULL"), 1, 'a task without a key: NULL');
is($t->sql("SELECT bool_and(arrived >= due_at AND arrived < due_at + interval '3 s') FROM shop.due_orders"), 't', 'not early, and soon');
is($t->sql("SELECT count(*) FROM shop.log WHERE who = session_user"), 2, 'a trigger ran for each, as the owner');
ok(poll_until(sub { $t->stat('orders', 'delivered') eq '2' && $t->stat('orders', 'pending') eq '0' }), 'dq_stats counts them')
  or diag($t->stat('orders', 'delivered') . ' ' . $t->stat('orders', 'pending'));
is($r->cmd('LLEN', 'orders'), 0, 'nothing goes to a list');
ok(poll_until(sub { $r->cmd('HGET', 'dq:{orders}:claim', 'n') eq '0' }), 'what is committed is let go in Redis');

# ---- many -----------------------------------------------------------------------------
$t->sql("CREATE TABLE many (payload text)");
$t->queue('q', "sink 'many'");
$t->sql("SELECT count(dq_offer('q', 'p' || i, random() * '2 s'::interval)) FROM generate_series(1, 20000) i");
arrives('many', 20000);
is_books('20000 tasks, each once', [ map { "p$_" } 1 .. 20000 ], [ split /\n/, $t->sql("SELECT payload FROM many") ]);
is($r->cmd('ZCARD', DqTest::Redis::pending_key('q')), 0, 'nothing is left in Redis');
is($r->cmd('HGET', 'dq:{q}:fence', 'indexed'), 0, 'nor in the count of its index');

# removed while pending: never arrives; a foreign producer's task does
$t->sql("SELECT dq_offer('q', 'gone', '1 s', 'gone')");
ok($t->sync, 'relayed');
is($t->sql("SELECT dq_remove('q', 'gone')"), 't', 'removed');
$r->redisson_offer('q', now_ms() + 100, 'foreign');
ok(arrives("many WHERE payload = 'foreign'", 1), 'a foreign producer\'s task arrives');
sleep(1.3);
is(count("many WHERE payload = 'gone'"), 0, 'a removed one does not');

# ---- a pause ---------------------------------------------------------------------------
$t->sql("SELECT dq_pause('q')");
$t->sql("SELECT dq_offer('q', 'paused')");
ok($t->sync, 'relayed');
sleep(0.7);
is(count("many WHERE payload = 'paused'"), 0, 'a paused queue lends nothing');
$t->sql("SELECT dq_resume('q')");
ok(arrives("many WHERE payload = 'paused'", 1), 'after dq_resume it arrives');

# ---- bad rows: J2 J3 --------------------------------------------------------------------
$t->sql(<<'SQL');
CREATE TABLE strict (payload jsonb CHECK (payload <> '13'), key text UNIQUE DEFERRABLE INITIALLY DEFERRED);
SQL
$t->queue('bad', "sink 'strict'");
$t->sql("SELECT dq_pause('bad')");
$t->sql(q{SELECT dq_offer('bad', i::text) FROM generate_series(1, 20) i});
$t->sql(q{SELECT dq_offer('bad', 'no json', '0', 'k1'), dq_offer('bad', '{"a": "\u0000"}')});
$t->sql(q{SELECT dq_offer('bad', '100', '0', 'twice')});
$t->sql(q{INSERT INTO strict VALUES ('0', 'twice')});
ok($t->sync, 'relayed');
$r->redisson_offer('bad', now_ms(), "\xff\xfe\x00raw");
$t->sql("SELECT dq_resume('bad')");
ok(arrives('dq_dead_letters', 5), 'those that the table cannot take are dead');
ok(poll_until(sub { count('strict') == 20 }), 'J2 J3: the others flow') or diag(count('strict'));
is($t->sql("SELECT string_agg(sqlstate || ' ' || encode(payload, 'hex') || ' ' || coalesce(key, '-'), E'\n' ORDER BY sqlstate, payload) FROM dq_dead_letters WHERE queue = 'bad'::regclass"),
	join("\n", '22021 fffe00726177 -', '22P02 6e6f206a736f6e k1', '22P05 7b2261223a20225c7530303030227d -', '23505 313030 twice', '23514 3133 -'),
	'with bytes, key and SQLSTATE');
is($t->stat('bad', 'dead') . ' ' . $t->stat('bad', 'failed') . ' ' . $t->stat('bad', 'delivered'), '5 5 19', 'counted');

# ---- notify: F17 ------------------------------------------------------------------------
$t->sql("CREATE TABLE heard (payload bytea, due_at timestamptz)");
$t->queue('n', "sink 'heard', notify 'orders due'", type => 'bytea');
my $s = $t->session;
$s->run('LISTEN "orders due"');
$t->sql(q{SELECT dq_offer('n', decode('00ff10', 'hex'))});
ok(arrives('heard', 1), 'bytes arrive');
is($t->sql("SELECT encode(payload, 'hex') FROM heard"), '00ff10', 'as they were');
ok(poll_until(sub { $s->run('SELECT 1') =~ /Asynchronous notification "orders due"/ }), 'F17: a client that listens is woken');
$s->quit;

# ---- partitions, a view, an empty set of columns -------------------------------------------
$t->sql(<<'SQL');
CREATE TABLE parted (payload int, due_at timestamptz) PARTITION BY RANGE (payload);
CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10);
CREATE TABLE parted_2 PARTITION OF parted FOR VALUES FROM (10) TO (100);
CREATE VIEW seen AS SELECT payload, key FROM (SELECT NULL::text AS payload, NULL::text AS key) x;
CREATE TABLE behind (payload text);
CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO behind VALUES (NEW.payload); RETURN NEW; END $$;
CREATE TRIGGER see INSTEAD OF INSERT ON seen FOR EACH ROW EXECUTE FUNCTION see();
CREATE TABLE ticks (at timestamptz DEFAULT now());
SQL
$t->queue('p', "sink 'parted'");
$t->queue('v', "sink 'seen'");
$t->queue('e', "sink 'ticks'");
$t->sql("SELECT dq_offer('p', i::text) FROM unnest('{1,20,200}'::int[]) i");
$t->sql("SELECT dq_offer('v', 'x'), dq_offer('e', 'y')");
ok(arrives('parted_1', 1) && arrives('parted_2', 1), 'rows find their partitions');
ok(arrives("dq_dead_letters WHERE queue = 'p'::regclass AND sqlstate = '23514'", 1), 'one without a partition is dead');
ok(arrives('behind', 1), 'a view with a trigger');
ok(arrives('ticks', 1), 'a table with none of the columns');

# ---- with a copy in the list, and shards ------------------------------------------------------
$t->sql("CREATE TABLE both_ways (payload text CHECK (payload <> 'c7'), shard int)");
$t->queue('b', "sink 'both_ways', destination 'list', shards '2'");
$t->sql("SELECT dq_offer('b', 'c' || i) FROM generate_series(1, 500) i");
ok(arrives('both_ways', 499), 'into the table');
ok(poll_until(sub { $r->cmd('LLEN', 'b#0') + $r->cmd('LLEN', 'b#1') >= 499 }), 'and into the list');
sleep(0.2);
is_books('each once in both', [ map { "c$_" } grep { $_ != 7 } 1 .. 500 ], [ $r->ready('b#0'), $r->ready('b#1') ]);
is($t->sql("SELECT count(DISTINCT shard) FROM both_ways"), 2, 'of both shards');
is($t->sql("SELECT count(*) FROM dq_poll('b', 3)"), 3, 'dq_poll takes from that list');

# ---- from a sink to a list and back -----------------------------------------------------------------
$t->fails("ALTER FOREIGN TABLE q OPTIONS (DROP sink)", '55000', 'a sink does not go while tasks may be on their way', like => qr/dq_pause/);
$t->sql("SELECT dq_pause('q')");
$t->sql("SELECT count(dq_offer('q', 'x' || i)) FROM generate_series(1, 100) i");
ok(poll_until(sub { my ($rc) = $t->try("ALTER FOREIGN TABLE q OPTIONS (DROP sink)"); $rc == 0 }), 'paused, it does');
$t->sql("SELECT dq_resume('q')");
ok(poll_until(sub { $r->cmd('LLEN', 'q') == 100 }), 'then due tasks go to the list');
$t->sql("ALTER FOREIGN TABLE q OPTIONS (ADD sink 'many')");
$t->sql("SELECT count(dq_offer('q', 'y' || i)) FROM generate_series(1, 100) i");
ok(arrives("many WHERE payload LIKE 'y%'", 100), 'and into a sink again');
is(count("many WHERE payload LIKE 'x%'"), 0, 'each in one place');

# ---- what the options refuse -------------------------------------------------------------------
$t->fails("CREATE FOREIGN TABLE x (payload text) SERVER redis OPTIONS (sink 's', handler 'h')", '0A000', 'sink and handler together');
$t->fails("CREATE FOREIGN TABLE x (payload text) SERVER redis OPTIONS (sink 'a..b')", '42602', 'a name that is none');
$t->fails("CREATE FOREIGN TABLE b2 (payload text) SERVER redis OPTIONS (queue 'b', shards '2', sink 'many')", '42710', 'B6: a second destination of one queue');
$t->fails("SELECT dq_transfer('q')", '0A000', 'dq_transfer of a queue with a sink');
$t->fails("SELECT dq_poll('q')", '0A000', 'dq_poll without a list');
is($t->sql("SELECT destination, sink FROM dq_queues WHERE queue = 'q'::regclass"), 'none|many', 'dq_queues shows it');
is($t->sql("SELECT role, owner = session_user FROM dq_workers WHERE role = 'executor' AND pid > 0"), 'executor|t', 'dq_workers shows the executor');
is($t->sql("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'dq_bridge executor' AND usename = session_user"), 1, 'logged in as the owner');

$t->finish;
