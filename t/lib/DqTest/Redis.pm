# DqTest::Redis: a private redis-server (or valkey-server) and a small client
# that speaks RESP itself, so that bytes are bytes.
package DqTest::Redis;

use strict;
use warnings;

use File::Copy ();
use File::Temp ();
use IO::Socket::INET;
use IO::Socket::UNIX;
use POSIX ();
use Time::HiRes qw(time sleep);

my @started;

sub binary
{
	my ($env, @names) = @_;

	return $ENV{$env} if $ENV{$env};
	for my $name (@names)
	{
		for my $dir (split /:/, $ENV{PATH})
		{
			return "$dir/$name" if -x "$dir/$name";
		}
	}
	die "none of @names found\n";
}

sub free_port
{
	my $s = IO::Socket::INET->new(Listen => 1, LocalAddr => '127.0.0.1', LocalPort => 0)
	  or die "no free port: $!";
	return $s->sockport;
}

# new(name, config => { appendonly => 'yes', ... }, start => 1)
sub new
{
	my ($class, %o) = @_;
	my $dir = File::Temp::tempdir('dqredis_XXXXXX', TMPDIR => 1, CLEANUP => 0);
	my $self = bless {
		name => $o{name} || 'redis',
		dir => $dir,
		socket => "$dir/s",
		port => free_port(),
		config => { %{ $o{config} || {} } },
		owner => $$,
	}, $class;

	push @started, $self;
	$self->start unless defined $o{start} && !$o{start};
	return $self;
}

sub socket { return $_[0]->{socket}; }
sub port { return $_[0]->{port}; }
sub dir { return $_[0]->{dir}; }
sub pid { return $_[0]->{pid}; }

sub start
{
	my ($self) = @_;
	my %config = (
		port => $self->{port},
		bind => '127.0.0.1',
		unixsocket => $self->{socket},
		dir => $self->{dir},
		save => '',
		appendonly => 'yes',
		'logfile' => "$self->{dir}/log",
		daemonize => 'no',
		%{ $self->{config} });
	my $server = binary('REDIS_SERVER', 'redis-server', 'valkey-server');

	open my $fh, '>', "$self->{dir}/conf" or die;
	for my $k (sort keys %config)
	{
		print $fh "$k ", ($config{$k} eq '' ? '""' : $config{$k}), "\n";
	}
	close $fh;

	my $pid = fork();
	die "fork: $!" unless defined $pid;
	if ($pid == 0)
	{
		open STDIN, '<', '/dev/null';
		open STDOUT, '>>', "$self->{dir}/out";
		open STDERR, '>>', "$self->{dir}/out";
		exec($server, "$self->{dir}/conf") or POSIX::_exit(127);
	}
	$self->{pid} = $pid;
	$self->{stopped} = 0;

	my $end = time() + 60;
	while (1)
	{
		my $pong = eval { local $self->{quiet} = 1; $self->cmd('PING') };
		last if defined $pong && $pong eq 'PONG';
		if (time() > $end || waitpid($pid, POSIX::WNOHANG()) == $pid)
		{
			die "redis-server did not start, see $self->{dir}/log\n";
		}
		sleep(0.02);
	}
	return $self;
}

# SHUTDOWN NOSAVE unless a save is wanted
sub stop
{
	my ($self) = @_;

	return unless $self->{pid};
	kill 'CONT', $self->{pid};
	kill 'TERM', $self->{pid};
	$self->reap(10) or $self->kill9;
	$self->disconnect;
}

sub kill9
{
	my ($self) = @_;

	return unless $self->{pid};
	kill 'KILL', $self->{pid};
	$self->reap(10);
	$self->disconnect;
}

sub reap
{
	my ($self, $seconds) = @_;
	my $end = time() + $seconds;

	while (time() < $end)
	{
		my $r = waitpid($self->{pid}, POSIX::WNOHANG());
		if ($r == $self->{pid} || $r == -1)
		{
			delete $self->{pid};
			return 1;
		}
		sleep(0.01);
	}
	return 0;
}

sub freeze { my ($self) = @_; kill 'STOP', $self->{pid}; }
sub thaw { my ($self) = @_; kill 'CONT', $self->{pid}; }

sub restart { my ($self) = @_; $self->stop; $self->start; }

# The data as they are now, for later: killed, swapped and started again, as when
# somebody puts back a backup.
my $saves = 0;

sub save_state
{
	my ($self) = @_;
	my $file = "$self->{dir}/saved." . ++$saves;

	$self->cmd('SAVE');
	File::Copy::copy("$self->{dir}/dump.rdb", $file) or die "copy: $!";
	return { file => $file };
}

sub restore_state
{
	my ($self, $save) = @_;

	$self->kill9;
	system('rm', '-rf', "$self->{dir}/appendonlydir", "$self->{dir}/appendonly.aof");
	File::Copy::copy($save->{file}, "$self->{dir}/dump.rdb") or die "copy: $!";
	my $aof = $self->{config}{appendonly} || 'yes';
	{
		# with an append-only file asked for, Redis would not look at the dump
		local $self->{config}{appendonly} = 'no';
		$self->start;
	}
	$self->cmd('CONFIG', 'SET', 'appendonly', $aof);
	for (1 .. 500)
	{
		last unless $self->cmd('INFO', 'persistence') =~ /aof_rewrite_(?:in_progress|scheduled):1/;
		sleep(0.02);
	}
}

# ---- the client ------------------------------------------------------------

sub connect_new
{
	my ($self) = @_;
	my $fh = IO::Socket::UNIX->new(Peer => $self->{socket})
	  or die "cannot connect to $self->{socket}: $!\n";

	binmode $fh;
	return { fh => $fh, buf => '' };
}

sub disconnect { my ($self) = @_; delete $self->{conn}; }

sub encode
{
	my (@args) = @_;
	my $out = '*' . scalar(@args) . "\r\n";

	for my $a (@args)
	{
		my $b = defined $a ? "$a" : '';
		utf8::encode($b) if utf8::is_utf8($b);
		$out .= '$' . length($b) . "\r\n$b\r\n";
	}
	return $out;
}

sub fill
{
	my ($c) = @_;
	my $n = sysread($c->{fh}, $c->{buf}, 65536, length $c->{buf});

	die "connection to Redis lost\n" unless $n;
}

sub read_line
{
	my ($c) = @_;

	while (1)
	{
		my $i = index($c->{buf}, "\r\n");
		if ($i >= 0)
		{
			my $line = substr($c->{buf}, 0, $i);
			substr($c->{buf}, 0, $i + 2) = '';
			return $line;
		}
		fill($c);
	}
}

sub read_reply
{
	my ($c) = @_;
	my $line = read_line($c);
	my $type = substr($line, 0, 1);
	my $rest = substr($line, 1);

	return $rest if $type eq '+' || $type eq ':';
	return bless \$rest, 'DqTest::Redis::Error' if $type eq '-';
	if ($type eq '$')
	{
		return undef if $rest < 0;
		fill($c) while length($c->{buf}) < $rest + 2;
		my $data = substr($c->{buf}, 0, $rest);
		substr($c->{buf}, 0, $rest + 2) = '';
		return $data;
	}
	if ($type eq '*')
	{
		return undef if $rest < 0;
		return [ map { read_reply($c) } 1 .. $rest ];
	}
	die "unexpected reply: $line\n";
}

# One command; an error reply dies with its text. Reconnects once when the
# server went away between two commands.
sub cmd
{
	my ($self, @args) = @_;
	my $reply;

	for my $try (1, 2)
	{
		$self->{conn} ||= $self->connect_new;
		$reply = eval {
			local $SIG{PIPE} = 'IGNORE';
			print { $self->{conn}{fh} } encode(@args);
			$self->{conn}{fh}->flush;
			[ read_reply($self->{conn}) ];
		};
		last if $reply;
		delete $self->{conn};
		die $@ if $try == 2 || $self->{quiet};
	}
	$reply = $reply->[0];
	die "$$reply\n" if ref $reply eq 'DqTest::Redis::Error';
	return $reply;
}

# Many commands in one go; returns the replies
sub pipeline
{
	my ($self, @commands) = @_;
	my @replies;

	$self->{conn} ||= $self->connect_new;
	while (my @part = splice(@commands, 0, 500))
	{
		print { $self->{conn}{fh} } join('', map { encode(@$_) } @part);
		$self->{conn}{fh}->flush;
		push @replies, map { read_reply($self->{conn}) } @part;
	}
	return @replies;
}

# redis-cli itself, as a stranger would use it; returns its raw output
sub cli
{
	my ($self, @args) = @_;
	my $cli = binary('REDIS_CLI', 'redis-cli', 'valkey-cli');

	open my $fh, '-|', $cli, '-s', $self->{socket}, '--raw', @args or die "redis-cli: $!";
	binmode $fh;
	my $out = join('', <$fh>);
	close $fh;
	chomp $out;
	return $out;
}

sub ready { my ($self, $list) = @_; return @{ $self->cmd('LRANGE', $list, 0, -1) }; }

# A process that takes from lists with BLPOP, as any consumer would, and notes
# when. ->items: [arrival ms, list, payload] so far.
sub consumer
{
	my ($self, @lists) = @_;

	return DqTest::Redis::Consumer->new($self, @lists);
}

# The same, but what it takes goes to another list with BLMOVE: nothing is missing
# there even if Redis is killed before it answers. One list only.
sub archiver
{
	my ($self, $list, $to) = @_;

	return DqTest::Redis::Consumer->new($self, { list => $list, to => $to });
}

# ---- the wire format (DESIGN 5), written down a second time ------------------

sub pending_key { my ($n) = @_; return 'redisson_delay_queue_timeout:' . brace($n); }
sub brace { my ($n) = @_; return index($n, '{') >= 0 ? $n : "{$n}"; }

# struct.pack('Bc0Lc0', 8, id8, #payload, payload): Redis's struct is native
# little endian unless told otherwise, L is eight bytes
sub pack_member
{
	my ($id8, $payload) = @_;
	return chr(length $id8) . $id8 . pack('Q<', length $payload) . $payload;
}

# the packing of older Redisson versions, 'dLc0': a random double, then as above
sub pack_old_member
{
	my ($number, $payload) = @_;
	return pack('d<', $number) . pack('Q<', length $payload) . $payload;
}

sub unpack_member
{
	my ($m) = @_;
	my $idlen = ord(substr($m, 0, 1));
	my $len = unpack('Q<', substr($m, 1 + $idlen, 8));

	return {
		id => substr($m, 1, $idlen),
		len => $len,
		payload => substr($m, 9 + $idlen),
	};
}

# Redisson's own script of RDelayedQueue.offer (3.2x): the text a JVM sends
our $REDISSON_OFFER = <<'LUA';
local value = struct.pack('Bc0Lc0', string.len(ARGV[2]), ARGV[2], string.len(ARGV[3]), ARGV[3]);
redis.call('zadd', KEYS[2], ARGV[1], value);
redis.call('rpush', KEYS[3], value);
local v = redis.call('zrange', KEYS[2], 0, 0);
if v[1] == value then
  redis.call('publish', KEYS[4], ARGV[1]);
end;
LUA

sub redisson_offer
{
	my ($self, $name, $due_ms, $payload, %o) = @_;
	my $id = defined $o{id} ? $o{id} : join('', map { chr(int(rand(256))) } 1 .. ($o{idlen} || 16));
	my $script = $REDISSON_OFFER;

	# a producer that does not tell anybody
	$script =~ s/local v = .*//s if $o{silent};
	return $self->cmd('EVAL', $script, 4, $name, pending_key($name),
		'redisson_delay_queue:' . brace($name),
		'redisson_delay_queue_channel:' . brace($name), $due_ms, $id, $payload);
}

END
{
	my $rc = $?;

	for my $r (@started)
	{
		$r->stop if $r->{owner} == $$;
		system('rm', '-rf', $r->{dir}) if $r->{owner} == $$ && $rc == 0;
	}
	$? = $rc;
}

package DqTest::Redis::Consumer;

use strict;
use warnings;
use POSIX ();
use Time::HiRes qw(time);

my @consumers;

sub new
{
	my ($class, $redis, @lists) = @_;
	my $self = bless { file => "$redis->{dir}/taken." . scalar(@consumers) . ".$$", owner => $$ }, $class;

	open my $fh, '>', $self->{file} or die;
	$fh->autoflush(1);
	my $pid = fork();
	die "fork: $!" unless defined $pid;
	if ($pid == 0)
	{
		my $parent = getppid();

		$SIG{TERM} = sub { POSIX::_exit(0) };
		while (getppid() == $parent)
		{
			my $got = eval {
				$redis->disconnect if !$redis->{mine}++;
				if (ref $lists[0])
				{
					my $item = $redis->cmd('BLMOVE', @{ $lists[0] }{qw(list to)}, 'LEFT', 'RIGHT', 1);
					defined $item ? [ $lists[0]{list}, $item ] : undef;
				}
				else { $redis->cmd('BLPOP', @lists, 1) }
			};
			if ($@)
			{
				$redis->disconnect;
				select(undef, undef, undef, 0.05);
				next;
			}
			next unless $got;
			my $ms = int(time() * 1000);
			print $fh join("\t", $ms, $got->[0], unpack('H*', $got->[1])), "\n";
		}
		POSIX::_exit(0);
	}
	$self->{pid} = $pid;
	push @consumers, $self;
	return $self;
}

sub items
{
	my ($self) = @_;
	open my $fh, '<', $self->{file} or die;
	my @items;

	while (<$fh>)
	{
		last unless /\n\z/;
		chomp;
		my ($ms, $list, $hex) = split /\t/;
		push @items, [ $ms, $list, pack('H*', $hex) ];
	}
	return @items;
}

sub payloads { my ($self) = @_; return map { $_->[2] } $self->items; }

sub stop
{
	my ($self) = @_;

	return unless $self->{pid};
	kill 'TERM', $self->{pid};
	waitpid($self->{pid}, 0);
	delete $self->{pid};
}

END
{
	my $rc = $?;

	for my $c (@consumers) { $c->stop if $c->{owner} == $$; }
	$? = $rc;
}

1;
