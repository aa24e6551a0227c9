# DqTest::Session: a psql that stays, for tests that need an open transaction or
# several sessions at once. run() waits for the answer, send() does not.
package DqTest::Session;

use strict;
use warnings;

use IO::Select;
use IPC::Open3;
use Time::HiRes qw(time);

my $marks = 0;
my @open;

sub new
{
	my ($class, $connstr) = @_;
	my ($in, $out);
	my $pid = open3($in, $out, undef, 'psql', '-XAtq', '-v', 'VERBOSITY=verbose',
		'-v', 'ON_ERROR_STOP=0', '-d', $connstr, '-f', '-');
	my $self = bless { in => $in, out => $out, pid => $pid, buf => '', owner => $$ }, $class;

	$in->autoflush(1);
	push @open, $self;
	return $self;
}

sub send
{
	my ($self, $sql) = @_;
	my $mark = '~mark' . ++$marks . '~';

	$sql =~ s/;?\s*\z/;/ unless $sql =~ /^\s*\\/;
	print { $self->{in} } "$sql\n\\echo $mark\n";
	push @{ $self->{waiting} }, $mark;
	return $mark;
}

# Answer of the oldest send() not yet received: undef if it is not there by then
sub receive
{
	my ($self, $seconds) = @_;
	my $mark = $self->{waiting}[0];
	my $end = time() + (defined $seconds ? $seconds : 120);

	while (1)
	{
		my $i = index($self->{buf}, "$mark\n");

		if ($i >= 0)
		{
			my $answer = substr($self->{buf}, 0, $i);
			substr($self->{buf}, 0, $i + length($mark) + 1) = '';
			shift @{ $self->{waiting} };
			chomp $answer;
			return $answer;
		}
		my $left = $end - time();
		return undef if $left <= 0;
		if (IO::Select->new($self->{out})->can_read($left))
		{
			my $n = sysread($self->{out}, $self->{buf}, 65536, length $self->{buf});
			if (!$n)
			{
				my $rest = $self->{buf};
				$self->{buf} = '';
				$self->{dead} = 1;
				shift @{ $self->{waiting} };
				return $rest;
			}
		}
	}
}

sub run
{
	my ($self, $sql, $seconds) = @_;

	$self->send($sql);
	return $self->receive($seconds);
}

sub quit
{
	my ($self) = @_;

	return unless $self->{pid};
	local $SIG{PIPE} = 'IGNORE';
	close $self->{in};
	my $end = time() + 5;
	while (waitpid($self->{pid}, 1) == 0 && time() < $end)
	{
		select(undef, undef, undef, 0.02);
		kill 'TERM', $self->{pid} if time() > $end - 4;
	}
	close $self->{out};
	delete $self->{pid};
}

END
{
	my $rc = $?;

	for my $s (@open)
	{
		next unless $s->{pid} && $s->{owner} == $$;
		kill 'KILL', $s->{pid};
		waitpid($s->{pid}, 0);
	}
	$? = $rc;
}

1;
