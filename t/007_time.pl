# Instants: past, far, infinite, precise, whatever the session's settings.
# C1 C2 C3 C5 C7 C8
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use Test::More;
use Time::HiRes qw(time sleep);

my $t = DqTest->new;
my $r = $t->redis;
my $zset = 'redisson_delay_queue_timeout:{q}';

$t->queue('q');

# ---- C1: the past -----------------------------------------------------------------
$t->fails("SELECT dq_offer('q', 'x', '-1 second')", '22023', 'C1 a negative delay is refused');
$t->fails("SELECT dq_offer('q', 'x', '-30 days')", '22023', 'C1 however long');
$t->fails("SELECT dq_offer('q', 'x', '1 month -40 days')", '22023', 'C1 judged by the instant, not by the sign');
is($t->sql("SELECT dq_offer('q', 'long month', '1 month -20 days') IS NOT NULL"), 't', 'C1 a mixed interval ahead is fine');
$t->sql("SELECT dq_offer('q', 'zero', '0')");
$t->sql("SELECT dq_offer_at('q', 'past', now() - '30 days'::interval)");
$t->sql("SELECT dq_offer_at('q', '1970', '1970-01-01 00:00:01+00')");
$t->fails("SELECT dq_offer_at('q', 'x', '1969-12-31 23:59:59+00')", '22008', 'C1 before 1970 is refused');
$t->fails("SELECT dq_offer_at('q', 'x', '1900-01-01')", '22008', 'C1 and 1900');
$r->cmd('ZADD', $zset, -5, DqTest::Redis::pack_member('12345678', 'negative score'));
ok(poll_until(sub { $r->cmd('LLEN', 'q') == 4 }), 'C1 past instants and a foreign negative score are due at once');
is(join(',', sort $r->ready('q')), '1970,negative score,past,zero', 'C1 each once');
$r->cmd('DEL', 'q');
my $cpu = cpu($t->bridge_pid);
sleep(3);
cmp_ok(cpu($t->bridge_pid) - $cpu, '<', 0.5, 'C1 C2 the worker sleeps with only far tasks pending');

sub cpu
{
	my ($pid) = @_;
	open my $fh, '<', "/proc/$pid/stat" or return 0;
	my @f = split / /, (<$fh> =~ /\) (.*)/)[0];
	return ($f[11] + $f[12]) / 100;
}

# ---- C2: far ----------------------------------------------------------------------------
for my $d ('24 days', '25 days', '50 days', '1 year', '100 years', '7900 years')
{
	my $id = $t->sql("SELECT dq_offer('q', '$d', '$d')");
	my ($due) = $id =~ /^(\d+)/;
	my $expected = $t->sql("SELECT floor(extract(epoch FROM clock_timestamp() + '$d'::interval) * 1000)");
	cmp_ok(abs($expected - $due), '<', 5000, "C2 $d");
}
$t->sync;
my %score = @{ $r->cmd('ZRANGE', $zset, 0, -1, 'WITHSCORES') };
for my $m (keys %score)
{
	my $p = DqTest::Redis::unpack_member($m)->{payload};
	next unless $p =~ /^(\d+) (days|year)/;
	my $id = $t->sql("SELECT id FROM q WHERE payload = '$p'");
	is($id =~ /^(\d+)-/ && $1, $score{$m}, "C2 $p: the score is the due millisecond");
}
is($r->cmd('LLEN', 'q'), 0, 'C2 none delivered');
for my $d ("'290000 years'", "'9000 years'", "interval '178000000 years'")
{
	my ($rc, $out, $err) = $t->try("SELECT dq_offer('q', 'x', $d)");
	like($err, qr/22008/, "C2 $d is refused at the call");
}
$t->fails("SELECT dq_offer_at('q', 'x', 'infinity')", '22008', 'C7 infinity');
$t->fails("SELECT dq_offer_at('q', 'x', '-infinity')", '22008', 'C7 -infinity');
$t->fails("SELECT dq_offer_at('q', 'x', '10000-01-01 00:00:00+00')", '22008', 'beyond year 9999');
$t->sql("SELECT dq_offer_at('q', 'last', '9999-12-31 23:59:59.999+00')");

# ---- C3: precision ----------------------------------------------------------------------------
$t->queue('c3');
is($t->sql("SELECT split_part(dq_offer_at('c3', 'x', '2100-01-01 00:00:00.123456+00'), '-', 1)"), '4102444800124', 'C3 rounded up');
is($t->sql("SELECT split_part(dq_offer_at('c3', 'y', '2100-01-01 00:00:00.123+00'), '-', 1)"), '4102444800123', 'C3 whole milliseconds stay');
is($t->sql("SELECT split_part(dq_offer_at('c3', 'z', '2100-01-01 00:00:00.123001+00'), '-', 1)"), '4102444800124', 'C3 never early');
$t->sql("SELECT dq_offer_at('c3', 'n' || i, timestamptz '2101-01-01 00:00:00+00' + i * interval '1 ms') FROM generate_series(0, 999) i");
$t->sync;
for my $set ('', "SET extra_float_digits = -15;", "SET DateStyle = 'SQL, DMY';", "SET bytea_output = 'escape';", "SET IntervalStyle = 'iso_8601';", "SET TimeZone = 'Asia/Kathmandu';")
{
	is($t->sql("$set SELECT count(*) FROM c3 WHERE due_at >= timestamptz '2101-01-01 00:00:00.250+00' AND due_at < timestamptz '2101-01-01 00:00:00.750+00'"),
		500, "C3 range counts exact ($set)");
}
is($t->sql(<<'SQL'), '1|0|0', 'C3 a value read back is found by =, excluded by < and >');
SELECT (SELECT count(*) FROM c3 WHERE due_at = v), (SELECT count(*) FROM c3 WHERE due_at < v AND due_at >= v - interval '0.5 ms'),
       (SELECT count(*) FROM c3 WHERE due_at > v AND due_at <= v + interval '0.5 ms')
FROM (SELECT due_at v FROM c3 WHERE payload = 'n500') x
SQL
is($t->sql("SELECT count(*) FROM c3 WHERE due_at < 'infinity'"), 1003, 'C7 < infinity');
is($t->sql("SELECT count(*) FROM c3 WHERE due_at > '-infinity'"), 1003, 'C7 > -infinity');
is($t->sql("SELECT count(*) FROM c3 WHERE due_at = 'infinity'"), 0, 'C7 = infinity');
is($t->sql("SELECT count(*) FROM c3 WHERE due_at < '294276-12-31' AND due_at > '4713-01-01 BC'"), 1003, 'C7 the ends of timestamptz');
# odd scores of strangers
$t->queue('odd');
$r->cmd('ZADD', 'redisson_delay_queue_timeout:{odd}', 'inf', DqTest::Redis::pack_member('aaaaaaaa', 'plus inf'));
$r->cmd('ZADD', 'redisson_delay_queue_timeout:{odd}', '1e300', DqTest::Redis::pack_member('bbbbbbbb', 'huge'));
$r->cmd('ZADD', 'redisson_delay_queue_timeout:{odd}', '1e15', DqTest::Redis::pack_member('cccccccc', 'year 33658'));
{
	my ($rc, $out, $err) = $t->try("SELECT payload, due_at FROM odd ORDER BY payload");
	ok($rc == 0 ? $out =~ /huge\|infinity/ && $out =~ /plus inf\|infinity/ : $err =~ /ERROR:\s+22/, 'C7 odd scores: infinity or a clean error') or diag("$out $err");
	is($t->sql("SELECT count(*) FROM odd"), 3, 'C7 count(*) works anyway');
}
$r->cmd('ZADD', 'redisson_delay_queue_timeout:{odd}', '-inf', DqTest::Redis::pack_member('dddddddd', 'minus inf'));
ok(poll_until(sub { grep { $_ eq 'minus inf' } $r->ready('odd') }), 'C7 -inf is due');

# ---- C8: zones ---------------------------------------------------------------------------------
$t->queue('c8');
# the night of 2100-03-28 has 23 hours in Berlin
my $day = $t->sql("SET TimeZone = 'Europe/Berlin'; SELECT split_part(dq_offer_at('c8', 'local', timestamptz '2027-03-27 12:00' + interval '1 day'), '-', 1)");
my $hours = $t->sql("SET TimeZone = 'Europe/Berlin'; SELECT split_part(dq_offer_at('c8', 'hours', timestamptz '2027-03-27 12:00' + interval '24 hours'), '-', 1)");
is($hours - $day, 3600_000, 'C8 across the change of the clocks a day is an hour shorter than 24 hours');
my $in_zone = $t->sql("SET TimeZone = 'Pacific/Kiritimati'; SELECT split_part(dq_offer('c8', 'd', '1 day'), '-', 1)::bigint - (extract(epoch FROM clock_timestamp()) * 1000)::bigint");
cmp_ok(abs($in_zone - 86400_000), '<', 3700_000, 'C8 a delay in days counts in the session\'s zone');
$t->sync;
my @rows = map { $t->sql("SET TimeZone = '$_'; SELECT string_agg(extract(epoch FROM due_at)::text, ',' ORDER BY id) FROM c8") } 'UTC', 'Pacific/Kiritimati', 'Pacific/Midway';
is($rows[1], $rows[0], 'C8 identical instants under any TimeZone');
is($rows[2], $rows[0], 'C8 ... and the other way');

# ---- C5: the instant is fixed at the call ---------------------------------------------------------
$t->queue('c5');
my $s = $t->session;
$s->run("BEGIN");
$s->run("SELECT dq_offer('c5', 'held back', '1 second')");
sleep(2);
my $commit = now_ms();
$s->run("COMMIT");
ok($r->cmd('BLPOP', 'c5', 5), 'C5 offered, committed after it was due: fires');
cmp_ok(now_ms() - $commit, '<', 700, 'C5 at once');
$s->quit;
my ($a, $b) = map { (split /-/, $t->sql("SELECT dq_offer('c5', 'f', '$_')"))[0] - now_ms() } '1.5 seconds', '250 ms';
ok(abs($a - 1500) < 200 && abs($b - 250) < 200, 'C5 fractions honoured');
$t->fails("SELECT dq_offer('q', 'x', NULL)", '22004', 'a NULL delay');
$t->fails("SELECT dq_offer_at('q', 'x', NULL)", '22004', 'a NULL instant');

# a trigger that takes a task back does not ask when it would have been due
$t->queue('trig');
$t->sql(<<'SQL');
CREATE TABLE appointments (id int, due timestamptz);
INSERT INTO appointments VALUES (1, 'infinity'), (2, '-infinity'), (3, 'infinity');
CREATE TRIGGER o AFTER UPDATE ON appointments FOR EACH ROW EXECUTE FUNCTION dq_offer_trigger('trig', 'due', 'id');
SQL
is($t->sql("UPDATE appointments SET due = NULL WHERE id < 3; SELECT count(*) FROM trig"), 0, 'C7 an infinite instant becomes NULL: no error');
is($t->sql("UPDATE appointments SET due = '2100-01-01', id = 4 WHERE id = 3; SELECT string_agg(key, ',') FROM trig"), 4, 'C7 or another one, under another key');
$t->fails("UPDATE appointments SET due = 'infinity'", '22008', 'C7 as a new instant it is refused');

$t->finish;
