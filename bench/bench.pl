# bench.pl NAME: one bench, one or more lines of the table. Run by bench/run.
#
#   latency    commit -> in Redis, single offers on an idle system
#   lateness   due instant -> in the list: idle, and at N random pending, 5k/s due
#   offer      N dq_offer in one statement / INSERT into a plain indexed table
#   trigger    TPS of a single-row INSERT with dq_offer_trigger / with a trigger
#              that inserts into a plain outbox table
#   relay      tasks/s outbox -> Redis / a bare client that pipelines the very
#              commands the worker sent, recorded byte by byte
#   held       relay with a snapshot held open: last tenth / first tenth
#   transfer   tasks/s pending -> list with N random pending / the same script
#              called back to back by a bare client
#   remove     one dq_remove with N pending: how long it takes /
#              a PING of a bare client
#   memory     bytes of Redis per task, 20-byte payloads, index on and off
#   slowlog    scripts above 5 ms since bench/run started
use strict;
use warnings;

use IO::Select;
use IO::Socket::UNIX;
use Time::HiRes qw(time sleep);

my $N = $ENV{N} || 1_000_000;
my $name = shift || die "which bench?\n";

# ---- Redis, spoken plainly ---------------------------------------------------

sub redis_connect
{
	my $fh = IO::Socket::UNIX->new(Peer => $ENV{REDIS_SOCKET}) or die "Redis: $!";

	binmode $fh;
	return { fh => $fh, buf => '' };
}

sub encode { return '*' . @_ . "\r\n" . join('', map { '$' . length($_) . "\r\n$_\r\n" } @_); }

sub line
{
	my ($c) = @_;
	my $i;

	while (($i = index($c->{buf}, "\r\n")) < 0)
	{
		sysread($c->{fh}, $c->{buf}, 1 << 20, length $c->{buf}) or die 'Redis went away';
	}
	my $l = substr($c->{buf}, 0, $i);
	substr($c->{buf}, 0, $i + 2) = '';
	return $l;
}

sub reply
{
	my ($c) = @_;
	my $l = line($c);
	my ($type, $rest) = (substr($l, 0, 1), substr($l, 1));

	if ($type eq '$')
	{
		return undef if $rest < 0;
		while (length $c->{buf} < $rest + 2)
		{
			sysread($c->{fh}, $c->{buf}, 1 << 20, length $c->{buf}) or die 'Redis went away';
		}
		my $d = substr($c->{buf}, 0, $rest);
		substr($c->{buf}, 0, $rest + 2) = '';
		return $d;
	}
	return $rest < 0 ? undef : [ map { reply($c) } 1 .. $rest ] if $type eq '*';
	die "Redis: $rest\n" if $type eq '-';
	return $rest;
}

my $conn = redis_connect();

sub redis
{
	my (@args) = @_;

	print { $conn->{fh} } encode(@args);
	$conn->{fh}->flush;
	return reply($conn);
}

# ---- PostgreSQL ------------------------------------------------------------------

sub sql
{
	my ($sql) = @_;
	my $file = "$ENV{WORK}/bench.sql";

	open my $fh, '>', $file or die;
	print $fh "SET client_min_messages = warning;\n$sql\n";
	close $fh;
	my $out = `$ENV{PSQL} -X -q -At -v ON_ERROR_STOP=1 -f $file`;
	die "SQL failed: $sql\n" if $? != 0;
	chomp $out;
	return $out;
}

sub timed { my ($code) = @_; my $s = time(); $code->(); return time() - $s; }

sub wait_for
{
	my ($code) = @_;
	my $end = time() + 900;

	while (!$code->())
	{
		die "bench $name: waited 15 minutes in vain\n" if time() > $end;
		sleep(0.005);
	}
}

sub zset { return "redisson_delay_queue_timeout:{$_[0]}"; }
sub clean_redis { my ($q) = @_; redis('DEL', $q, zset($q), "dq:{$q}:index", "dq:{$q}:twins"); }

sub quantile { my ($p, @x) = @_; @x = sort { $a <=> $b } @x; return $x[ int($p * $#x + 0.5) ]; }

sub row
{
	my ($what, $measured, $compared, $ratio, $reach) = @_;

	printf "%-48s %14s %14s %8s %8s\n", $what, $measured, $compared, defined $ratio ? sprintf('%.2f', $ratio) : '', $reach;
}

sub queue { my ($q, $options) = @_; sql("SELECT FROM dq_create_queue('$q', 'redis', 'text', '" . ($options || '{}') . "')"); }

# ---- the benches ---------------------------------------------------------------------

my %bench = (
	latency => sub {
		queue('b_latency');
		my @ms;
		open my $psql, '|-', "$ENV{PSQL} -X -q -At -o /dev/null -f -" or die;
		$psql->autoflush(1);
		for my $i (1 .. 500)
		{
			my $n = redis('ZCARD', zset('b_latency'));
			# the call itself is measured by the server and taken off
			my $s = time();
			print $psql "SELECT dq_offer('b_latency', 'x', '1 hour');\n";
			1 while redis('ZCARD', zset('b_latency')) == $n;
			push @ms, 1000 * (time() - $s);
			sleep(0.003);
		}
		close $psql;
		row('statement sent -> in Redis, idle, p50', sprintf('%.2f ms', quantile(0.5, @ms)), '', undef, '<= 2');
		row('statement sent -> in Redis, idle, p99', sprintf('%.2f ms', quantile(0.99, @ms)), '', undef, '<= 10');
	},

	lateness => sub {
		for my $case ([ 'idle', 500, 10, 0 ], [ "$N pending, 5k/s", 50000, 10, $N ])
		{
			my ($what, $n, $seconds, $pending) = @$case;
			my $q = $pending ? 'b_late_full' : 'b_late_idle';
			queue($q);
			if ($pending)
			{
				sql("SELECT count(dq_offer('$q', i::text, '1 hour'::interval + random() * '1 day'::interval)) FROM generate_series(1, $pending) i; SELECT dq_sync('$q', '10 min')");
			}
			# the payload is the due instant; the hand-over is over before the first
			sql("SELECT count(dq_offer_at('$q', to_char(floor(extract(epoch FROM d) * 1000), 'FM9999999999999'), d)) FROM (SELECT date_trunc('milliseconds', clock_timestamp()) + '6 s'::interval + i * interval '$seconds s' / $n AS d FROM generate_series(1, $n) i) x; SELECT dq_sync('$q', '10 min')");
			my @late;
			while (@late < $n)
			{
				my $got = redis('LPOP', $q, 1000);
				my $now = time() * 1000;
				if (!$got) { sleep(0.0005); next; }
				push @late, map { $now - $_ } @$got;
			}
			row("due -> in the list, $what, p50", sprintf('%.1f ms', quantile(0.5, @late)), '', undef, '');
			row("due -> in the list, $what, p99", sprintf('%.1f ms', quantile(0.99, @late)), '', undef, $pending ? '<= 50' : '<= 5');
			clean_redis($q);
		}
	},

	offer => sub {
		queue('b_offer');
		sql("SELECT dq_worker_stop()");
		sql("CREATE TABLE b_plain (id bigserial PRIMARY KEY, due timestamptz, key text, payload text, created timestamptz DEFAULT clock_timestamp())");
		my (@plain, @offer);
		for (1 .. 3)
		{
			push @plain, timed(sub { sql("INSERT INTO b_plain (due, payload) SELECT clock_timestamp() + '1 hour'::interval, 'payload of 20 bytes ' FROM generate_series(1, $N) i") });
			push @offer, timed(sub { sql("SELECT count(dq_offer('b_offer', 'payload of 20 bytes ', '1 hour')) FROM generate_series(1, $N) i") });
			sql("TRUNCATE b_plain");
		}
		my ($p, $o) = (quantile(0.5, @plain), quantile(0.5, @offer));
		row("$N dq_offer / INSERT, indexed table", sprintf('%.2f us', 1e6 * $o / $N), sprintf('%.2f us', 1e6 * $p / $N), $o / $p, '<= 1.5');
		sql("DROP TABLE b_plain; SELECT dq_worker_start()");
		sql("SELECT dq_sync('b_offer', '10 min')");
		clean_redis('b_offer');
	},

	trigger => sub {
		queue('b_trigger');
		sql(<<'SQL');
CREATE TABLE b_plain_t (id bigserial PRIMARY KEY, item text);
CREATE TABLE b_offer_t (id bigserial PRIMARY KEY, item text);
CREATE TABLE b_outbox (id bigserial PRIMARY KEY, due timestamptz, key text, payload text);
CREATE FUNCTION b_outbox() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO b_outbox (due, key, payload)
  VALUES (clock_timestamp() + '1 hour', NEW.id::text, to_json(NEW)::text);
  RETURN NULL;
END $$;
CREATE TRIGGER o AFTER INSERT ON b_plain_t FOR EACH ROW EXECUTE FUNCTION b_outbox();
CREATE TRIGGER o AFTER INSERT ON b_offer_t FOR EACH ROW
  EXECUTE FUNCTION dq_offer_trigger('b_trigger', '1 hour', 'id');
SQL
		my %tps;
		for my $round (1 .. 3)
		{
			for my $table ('b_plain_t', 'b_offer_t')
			{
				open my $fh, '>', "$ENV{WORK}/pgbench.sql" or die;
				print $fh "INSERT INTO $table (item) VALUES ('lamp');\n";
				close $fh;
				my $out = `$ENV{BIN}/pgbench -n -M prepared -c 2 -j 1 -T 8 -f $ENV{WORK}/pgbench.sql 2>&1`;
				push @{ $tps{$table} }, $out =~ /tps = ([\d.]+)/ ? $1 : die $out;
			}
		}
		my ($p, $o) = (quantile(0.5, @{ $tps{b_plain_t} }), quantile(0.5, @{ $tps{b_offer_t} }));
		row('single-row INSERT with trigger, TPS', sprintf('%.0f', $o), sprintf('%.0f', $p), $o / $p, '>= 0.9');
		sql("DROP TABLE b_plain_t, b_offer_t, b_outbox CASCADE; DROP FUNCTION IF EXISTS b_outbox(); SELECT dq_sync('b_trigger', '10 min')");
		clean_redis('b_trigger');
	},

	relay => sub {
		my $n = $N > 300000 ? 300000 : $N;
		my $offers = "SELECT dq_worker_stop(); SELECT pg_sleep(0.5); SELECT count(dq_offer('b_relay', 'payload of 20 bytes ', '1 hour')) FROM generate_series(1, $n) i";
		queue('b_relay');
		sql("SELECT dq_offer('b_relay', 'warm', '1 hour'); SELECT dq_sync('b_relay')");
		my @ours;
		for (1 .. 3)
		{
			clean_redis('b_relay');
			sql($offers);
			push @ours, relay_time('b_relay', $n);
		}

		# Once more, recorded; then the same commands sent by a bare client to a
		# Redis put back to where it was: the scripts check their session, version
		# and position as they did for the worker.
		clean_redis('b_relay');
		sql($offers);
		my %before = map { $_ => redis('DUMP', $_) } 'dq:{b_relay}:fence', 'dq:{b_relay}:owner';
		my $recorder = recorder();
		relay_time('b_relay', $n);
		sql("SELECT dq_worker_stop(); SELECT pg_sleep(0.5)");
		my @commands = recorded($recorder, qr/\r\nEVAL(?:SHA)?\r\n.*\{b_relay\}/si);
		my @bare;
		my $applied;
		for (1 .. 3)
		{
			clean_redis('b_relay');
			for my $key (keys %before)
			{
				redis('DEL', $key);
				redis('RESTORE', $key, 0, $before{$key}, 'REPLACE') if defined $before{$key};
			}
			push @bare, timed(sub {
				my $inflight = 0;
				for my $c (@commands)
				{
					print { $conn->{fh} } $c;
					$conn->{fh}->flush;
					if (++$inflight >= 8) { reply($conn); $inflight--; }
				}
				reply($conn) while $inflight-- > 0;
			});
			$applied = redis('ZCARD', zset('b_relay'));
		}
		my ($o, $b) = (quantile(0.5, @ours), quantile(0.5, @bare));
		row("relay, $n tasks, tasks/s", sprintf('%.0f', $n / $o), $applied >= $n ? sprintf('%.0f', $n / $b) : "refused ($applied)",
			$applied >= $n ? $b / $o : undef, '>= 0.8');
		sql("SELECT dq_worker_start()");
		clean_redis('b_relay');
	},

	held => sub {
		queue('b_held');
		my $parts = 10;
		my $n = int($N / $parts);
		open my $psql, '|-', "$ENV{PSQL} -X -q -At -o /dev/null -f -" or die;
		$psql->autoflush(1);
		print $psql "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pg_class;\n";
		sleep(0.5);
		my @rate;
		for (1 .. $parts)
		{
			my $s = time();
			sql("SELECT count(dq_offer('b_held', 'payload of 20 bytes ', '1 hour')) FROM generate_series(1, $n) i; SELECT dq_sync('b_held', '10 min')");
			push @rate, $n / (time() - $s);
		}
		print $psql "COMMIT;\n";
		close $psql;
		row("offer + relay, snapshot held, $N, tasks/s", sprintf('%.0f', $rate[-1]), sprintf('%.0f', $rate[0]), $rate[-1] / $rate[0], '>= 0.8');
		clean_redis('b_held');
	},

	transfer => sub {
		my $due = int($N / 5);
		my @rate;
		for my $mode ('ours', 'bare')
		{
			my $q = "b_move_$mode";
			queue($q);
			sql("SELECT dq_pause('$q'); SELECT count(dq_offer('$q', 'payload of 20 bytes ', '1 hour'::interval + random() * '1 day'::interval)) FROM generate_series(1, $N) i; SELECT dq_sync('$q', '10 min')");
			sql("SELECT count(dq_offer('$q', 'payload of 20 bytes ')) FROM generate_series(1, $due) i; SELECT dq_sync('$q', '10 min')");
			if ($mode eq 'ours')
			{
				my $s = time();
				sql("SELECT dq_resume('$q')");
				wait_for(sub { redis('LLEN', $q) >= $due });
				push @rate, $due / (time() - $s);
			}
			else
			{
				# One transfer of the worker, recorded; then sent again and again, with
				# the present instant in it: session and version are still those.
				sql("SELECT dq_worker_stop(); SELECT pg_sleep(0.5)");
				my $recorder = recorder();
				sql("SELECT dq_worker_start(); SELECT dq_resume('$q')");
				wait_for(sub { redis('LLEN', $q) > 0 });
				sql("SELECT dq_pause('$q'); SELECT pg_sleep(0.5)");
				my $left = redis('LLEN', $q);
				sql("SELECT count(dq_offer('$q', 'payload of 20 bytes ')) FROM generate_series(1, $left) i; SELECT dq_sync('$q', '10 min')");
				redis('DEL', $q);
				my @call = arguments((recorded($recorder, transfer_of($q)))[-1]);
				# floor as it was, the instant in front of limit and bytes
				$call[-3] = sprintf('%.0f', time() * 1000);
				my $call = encode(@call);
				my $s = time();
				my ($before, $now) = (-1, 0);
				while (($now = redis('LLEN', $q)) < $due && $now != $before)
				{
					$before = $now;
					print { $conn->{fh} } $call for 1 .. 20;
					$conn->{fh}->flush;
					reply($conn) for 1 .. 20;
				}
				push @rate, $now / (time() - $s);
			}
			clean_redis($q);
		}
		row("transfer, $N random pending, tasks/s", sprintf('%.0f', $rate[0]), $rate[1] ? sprintf('%.0f', $rate[1]) : 'refused',
			$rate[1] ? $rate[0] / $rate[1] : undef, '>= 0.8');
	},

	remove => sub {
		queue('b_remove');
		sql("SELECT count(dq_offer('b_remove', i::text, '1 hour'::interval + random() * '1 day'::interval, 'k' || i)) FROM generate_series(1, $N) i; SELECT dq_sync('b_remove', '10 min')");
		sql('CREATE TABLE b_us (us float8); CREATE SEQUENCE b_i');
		# each in a transaction of its own, measured by the server: no commit in it
		sql(<<'SQL');
CREATE FUNCTION b_remove() RETURNS void LANGUAGE plpgsql AS $$
DECLARE t timestamptz; k text := 'k' || nextval('b_i');
BEGIN
  PERFORM pg_current_xact_id();
  t := clock_timestamp();
  IF dq_remove('b_remove', k) IS NOT TRUE THEN RAISE '% was not removed', k; END IF;
  INSERT INTO b_us VALUES (1e6 * extract(epoch FROM clock_timestamp() - t));
END $$;
SQL
		my $n = 3000;
		my @ping;
		open my $psql, '|-', "$ENV{PSQL} -X -q -At -o /dev/null -f -" or die;
		for my $i (1 .. $n) { print $psql "SELECT b_remove();\n"; }
		close $psql or die 'removals failed';
		for (1 .. $n) { my $s = time(); redis('PING'); push @ping, 1e6 * (time() - $s); }
		my @us = split /\n/, sql('SELECT us FROM b_us');
		row("dq_remove, $N pending, p50", sprintf('%.0f us', quantile(0.5, @us)), sprintf('%.0f us', quantile(0.5, @ping)), undef, '');
		row("dq_remove, $N pending, p99", sprintf('%.0f us', quantile(0.99, @us)), sprintf('%.0f us', quantile(0.99, @ping)), undef, '+1000 us');
		sql('DROP FUNCTION b_remove; DROP TABLE b_us; DROP SEQUENCE b_i');
		clean_redis('b_remove');
	},

	memory => sub {
		my $n = $N > 200000 ? 200000 : $N;
		for my $index ('on', 'off')
		{
			my $q = "b_memory_$index";
			queue($q, "{\"index\": \"$index\"}");
			my $before = memory();
			sql("SELECT count(dq_offer('$q', lpad(i::text, 20, 'x'), '1 hour'::interval + random() * '1 day'::interval)) FROM generate_series(1, $n) i; SELECT dq_sync('$q', '10 min')");
			row("Redis memory per task, index $index", sprintf('%.0f B', (memory() - $before) / $n), '', undef, $index eq 'on' ? '<= 250' : '<= 145');
			clean_redis($q);
			sleep(1);
		}
	},

	slowlog => sub {
		my $log = redis('SLOWLOG', 'GET', 100000);
		my @eval = grep { $_->[3][0] =~ /^EVAL/i } @$log;
		if ($ENV{VERBOSE})
		{
			my %by;
			push @{ $by{ length $_->[3][1] > 40 ? 'loaded' : $_->[3][1] } }, $_->[2] for @eval;
			printf "  %s: %d, median %d us, worst %d us\n", $_, scalar @{ $by{$_} }, quantile(0.5, @{ $by{$_} }), quantile(1, @{ $by{$_} }) for sort keys %by;
		}
		my ($worst) = sort { $b <=> $a } map { $_->[2] } @eval;
		row('scripts above 5 ms', scalar @eval, $worst ? sprintf('worst %.1f ms', $worst / 1000) : '', undef, '0');
	});

sub memory { return redis('INFO', 'memory') =~ /used_memory:(\d+)/ ? $1 : 0; }

# Seconds for n tasks at the rate seen from the first page on; the start of the
# worker process is not counted.
sub relay_time
{
	my ($q, $n) = @_;
	my ($first, $start) = (0, 0);

	sql("SELECT dq_worker_start()");
	wait_for(sub { $first = redis('ZCARD', zset($q)); $start = time(); $first > 0 });
	wait_for(sub { redis('ZCARD', zset($q)) >= $n });
	return $first >= $n ? 0.001 : (time() - $start) * $n / ($n - $first);
}

# A proxy between the workers and Redis, in a process of its own, that writes down
# what each connection sends. What is recorded does not count as measured. To be
# started while no worker runs; recorded() ends it and brings the workers back.
sub recorder
{
	my $path = "$ENV{WORK}/recorder.$$";
	my $file = "$ENV{WORK}/recorded.$$";
	my $listen = IO::Socket::UNIX->new(Local => $path, Listen => 10) or die "recorder: $!";
	chmod 0777, $path;			# PostgreSQL may run as another user
	my $pid = fork();

	die "recorder: $!" unless defined $pid;
	if ($pid == 0)
	{
		record($listen, $file);
		exit 0;
	}
	close $listen;
	sql("ALTER SERVER redis OPTIONS (SET socket '$path')");
	return { pid => $pid, path => $path, file => $file };
}

sub record
{
	my ($listen, $file) = @_;
	my $select = IO::Select->new($listen);
	my (%peer, %out);
	my $no = 0;

	while (1)
	{
		for my $fh ($select->can_read)
		{
			if ($fh == $listen)
			{
				my $client = $listen->accept or next;
				my $server = IO::Socket::UNIX->new(Peer => $ENV{REDIS_SOCKET}) or die "Redis: $!";
				open $out{$client}, '>', sprintf('%s.%d', $file, $no++) or die;
				binmode $out{$client};
				$out{$client}->autoflush(1);
				($peer{$client}, $peer{$server}) = ($server, $client);
				$select->add($client, $server);
				next;
			}
			my $peer = $peer{$fh} or next;
			my $data;
			if (sysread($fh, $data, 1 << 20))
			{
				print { $out{$fh} } $data if $out{$fh};
				my $at = 0;
				while ($at < length $data)
				{
					my $n = syswrite($peer, $data, length($data) - $at, $at);
					last unless defined $n;
					$at += $n;
				}
				next;
			}
			$select->remove($fh, $peer);
			delete @peer{ $fh, $peer };
			close $_ for $fh, $peer;
		}
	}
}

# The recorded commands that match, connection after connection; the proxy ends.
sub recorded
{
	my ($recorder, $wanted) = @_;
	my @commands;

	sql("ALTER SERVER redis OPTIONS (SET socket '$ENV{REDIS_SOCKET}')");
	kill 'TERM', $recorder->{pid};
	waitpid($recorder->{pid}, 0);
	unlink $recorder->{path};
	for my $no (0 .. 1000)
	{
		open my $fh, '<:raw', "$recorder->{file}.$no" or last;
		my $all = do { local $/; <$fh> } // '';
		my $at = 0;
		while ((my $end = command_end(\$all, $at)) > $at)
		{
			my $command = substr($all, $at, $end - $at);
			push @commands, $command if $command =~ $wanted;
			$at = $end;
		}
		close $fh;
		unlink "$recorder->{file}.$no";
	}
	return @commands;
}

# Where the command that begins at $at ends; $at if it is not there as a whole.
sub command_end
{
	my ($all, $at) = @_;

	pos($$all) = $at;
	$$all =~ /\G\*(\d+)\r\n/gc or return $at;
	for (1 .. $1)
	{
		$$all =~ /\G\$(\d+)\r\n/gc or return $at;
		pos($$all) + $1 + 2 <= length $$all or return $at;
		pos($$all) += $1 + 2;
	}
	return pos($$all);
}

sub arguments
{
	my ($command) = @_;
	my @args;

	pos($command) = 0;
	$command =~ /\G\*\d+\r\n/gc;
	while ($command =~ /\G\$(\d+)\r\n/gc)
	{
		push @args, substr($command, pos($command), $1);
		pos($command) += $1 + 2;
	}
	return @args;
}

# The call of transfer.lua, told from the others by its last argument
sub transfer_of
{
	my ($q) = @_;
	return qr/\A\*23\r\n\$\d+\r\nEVAL.*\{\Q$q\E\}.*\r\n524288\r\n\z/s;
}

die "no bench $name\n" unless $bench{$name};
redis('CONFIG', 'SET', 'slowlog-log-slower-than', 5000);
eval { $bench{$name}->(); 1 } or row($name, 'failed', '', undef, '') && warn $@;
