# DqTest::Proxy: a TCP proxy in front of a Redis, in a process of its own.
#
# Modes, changed while it runs:
#   pass         forwards
#   cut N        every N-th reply to a command is thrown away and the connection
#                closed: Redis has executed it, the client never hears
#   chance P     the same for a random share P of replies
#   before N     every N-th command never reaches Redis, the connection is closed
#   hole         takes bytes, forwards nothing (both ways)
#   delay S      replies S seconds late
#   refuse       closes new connections at once, and those there are
# Only EVAL and EVALSHA count, unless ' all' follows; with ' once' behind that it
# passes again after the first cut. mode() returns at once, mode_now() when the
# proxy has it.
package DqTest::Proxy;

use strict;
use warnings;

use IO::Select;
use IO::Socket::INET;
use IO::Socket::UNIX;
use POSIX ();
use Time::HiRes qw(time);

my @proxies;

sub new
{
	my ($class, $redis, %o) = @_;
	my $listen = IO::Socket::INET->new(Listen => 50, LocalAddr => '127.0.0.1', LocalPort => 0, ReuseAddr => 1)
	  or die "proxy: $!";
	my $self = bless {
		port => $listen->sockport,
		file => "$redis->{dir}/proxy." . $listen->sockport,
		upstream => $redis->{socket},
		owner => $$,
	}, $class;

	$self->mode($o{mode} || 'pass');
	my $pid = fork();
	die "fork: $!" unless defined $pid;
	if ($pid == 0)
	{
		$SIG{PIPE} = 'IGNORE';
		$SIG{TERM} = sub { POSIX::_exit(0) };
		eval { $self->serve($listen) };
		print STDERR "proxy: $@" if $@;
		POSIX::_exit(1);
	}
	$self->{pid} = $pid;
	push @proxies, $self;
	return $self;
}

sub port { return $_[0]->{port}; }

sub mode
{
	my ($self, $mode) = @_;

	open my $fh, '>', "$self->{file}.tmp" or die "$self->{file}: $!";
	print $fh $mode;
	close $fh;
	rename "$self->{file}.tmp", $self->{file};
}

sub mode_now
{
	my ($self, $mode) = @_;
	my $end = time() + 10;

	$self->mode($mode);
	while (time() < $end)
	{
		if (open my $fh, '<', "$self->{file}.now")
		{
			my $now = <$fh>;
			return if defined $now && $now eq $mode;
		}
		select(undef, undef, undef, 0.005);
	}
	die "the proxy does not take mode $mode\n";
}

# For the proxy's own process: what it does now, for others to see
sub say_mode
{
	my ($self, $mode) = @_;

	open my $fh, '>', "$self->{file}.now.tmp" or return;
	print $fh $mode;
	close $fh;
	rename "$self->{file}.now.tmp", "$self->{file}.now";
}

# How often a reply was thrown away
sub cuts
{
	my ($self) = @_;
	open my $fh, '<', "$self->{file}.cuts" or return 0;
	my $n = <$fh>;

	return $n || 0;
}

sub stop
{
	my ($self) = @_;

	return unless $self->{pid};
	kill 'TERM', $self->{pid};
	waitpid($self->{pid}, 0);
	delete $self->{pid};
}

# Length of one complete RESP value at offset, or undef; top-level only needed
sub value_end
{
	my ($buf, $pos) = @_;
	my $i = index($$buf, "\r\n", $pos);

	return undef if $i < 0;
	my $type = substr($$buf, $pos, 1);
	my $n = substr($$buf, $pos + 1, $i - $pos - 1);

	if ($type eq '$')
	{
		return $i + 2 if $n < 0;
		my $end = $i + 2 + $n + 2;
		return $end <= length($$buf) ? $end : undef;
	}
	if ($type eq '*')
	{
		my $p = $i + 2;
		for (1 .. ($n < 0 ? 0 : $n))
		{
			$p = value_end($buf, $p);
			return undef unless defined $p;
		}
		return $p;
	}
	return $i + 2;
}

sub serve
{
	my ($self, $listen) = @_;
	my $select = IO::Select->new($listen);
	my (%peer, %side, %buf, %names, %later, %held);
	my ($mode, $arg, $all, $checked, $count, $cuts) = ('pass', 0, 0, 0, 0, 0);
	my ($once, $said) = (0, '');
	my $drop = sub {
		my ($c) = @_;
		for my $s ($c, $peer{$c})
		{
			next unless $s;
			$select->remove($s);
			delete $held{$s};
			close $s;
		}
	};
	my $hit = sub {
		$count++;
		return 0 unless $mode eq 'chance' ? rand() < $arg : $count % $arg == 0;
		$cuts++;
		if (open my $c, '>', "$self->{file}.cuts") { print $c $cuts; close $c; }
		if ($once) { $mode = 'pass'; $self->mode('pass'); }
		return 1;
	};
	my $parent = getppid();

	while (getppid() == $parent)
	{
		if (time() - $checked > 0.02)
		{
			$checked = time();
			if (open my $fh, '<', $self->{file})
			{
				my $text = <$fh> || 'pass';
				if ($text ne $said)
				{
					$said = $text;
					$count = 0 if $text =~ / once$/;
					$self->say_mode($text);
				}
				$once = $text =~ s/ once$//;
				$all = $text =~ s/ all$//;
				($mode, $arg) = split / /, $text;
			}
			if ($mode eq 'refuse')
			{
				$drop->($_) for grep { ($side{$_} || '') eq 'client' } $select->handles;
			}
		}
		# late replies
		for my $s (keys %later)
		{
			while (@{ $later{$s} } && $later{$s}[0][0] <= time())
			{
				my $x = shift @{ $later{$s} };
				syswrite_all($x->[1], $x->[2]);
			}
			delete $later{$s} unless @{ $later{$s} };
		}
		for my $fh ($select->can_read(0.02))
		{
			next unless defined fileno($fh);
			if ($fh == $listen)
			{
				my $client = $listen->accept or next;
				if ($mode eq 'refuse') { close $client; next; }
				my $up = IO::Socket::UNIX->new(Peer => $self->{upstream});
				if (!$up) { close $client; next; }
				$peer{$client} = $up;
				$peer{$up} = $client;
				$side{$client} = 'client';
				$side{$up} = 'redis';
				$buf{$client} = $buf{$up} = '';
				$names{$up} = [];
				$select->add($client, $up);
				next;
			}
			next if $mode eq 'hole';
			my $n = sysread($fh, my $data, 65536);
			if (!$n) { $drop->($fh); next; }
			if ($side{$fh} eq 'client')
			{
				# note the name of each command, then forward
				my $sent = length $buf{$fh};
				$buf{$fh} .= $data;
				my ($p, $cut) = (0, 0);
				while ($p < length $buf{$fh})
				{
					my $end = value_end(\$buf{$fh}, $p);
					last unless defined $end;
					my ($name) = substr($buf{$fh}, $p, 60) =~ /^\*\d+\r\n\$\d+\r\n([A-Za-z]+)\r\n/;
					if ($mode eq 'before' && ($all || uc($name || '?') =~ /^EVAL/) && $hit->())
					{
						$cut = 1;
						last;
					}
					push @{ $names{ $peer{$fh} } }, uc($name || '?');
					$p = $end;
				}
				if ($cut)
				{
					# what has gone of it already is no whole command
					syswrite_all($peer{$fh}, substr($buf{$fh}, $sent, $p - $sent)) if $p > $sent;
					$drop->($fh);
					next;
				}
				substr($buf{$fh}, 0, $p) = '';
				syswrite_all($peer{$fh}, $data);
				next;
			}
			# from Redis: reply by reply
			$buf{$fh} .= $data;
			my ($p, $out, $cut) = (0, '', 0);
			while ($p < length $buf{$fh})
			{
				my $end = value_end(\$buf{$fh}, $p);
				last unless defined $end;
				my $name = shift @{ $names{$fh} };
				if ($mode =~ /^(cut|chance)$/ && defined $name && ($all || $name =~ /^EVAL/))
				{
					if ($hit->())
					{
						$cut = 1;
						last;
					}
				}
				$out .= substr($buf{$fh}, $p, $end - $p);
				$p = $end;
			}
			substr($buf{$fh}, 0, $p) = '';
			if ($mode eq 'delay')
			{
				push @{ $later{$fh} }, [ time() + $arg, $peer{$fh}, $out ];
			}
			else
			{
				syswrite_all($peer{$fh}, $out);
			}
			$drop->($fh) if $cut;
		}
	}
	POSIX::_exit(0);
}

sub syswrite_all
{
	my ($fh, $data) = @_;
	my $off = 0;

	return unless defined $fh && defined fileno($fh);
	while ($off < length $data)
	{
		my $n = syswrite($fh, $data, length($data) - $off, $off);
		return unless $n;
		$off += $n;
	}
}

END
{
	my $rc = $?;

	for my $p (@proxies) { $p->stop if $p->{owner} == $$; }
	$? = $rc;
}

1;
