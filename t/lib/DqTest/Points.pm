# DqTest::Points: a library that waits at named points (src/shared/points.c), in
# an installation of its own, and the words to arm them.
package DqTest::Points;

use strict;
use warnings;

use File::Temp ();
use Time::HiRes qw(time sleep);

use DqTest::Install;

# new(tree): builds. ->install for DqTest->new, ->conf for its configuration
sub new
{
	my ($class, $tree) = @_;
	my $points = File::Temp::tempdir('dqpoints_XXXXXX', TMPDIR => 1, CLEANUP => 1);

	chmod 0755, $points;
	return bless { points => $points, made => DqTest::Install->new($tree, make => 'POINTS=1') }, $class;
}

sub install { return $_[0]->{made}->path; }
sub conf { return "dq_bridge.points_dir = '$_[0]->{points}'\n"; }

# All names in the sources: a test that knows fewer is to be told
sub names
{
	my ($self) = @_;
	my %names;

	for my $file (glob($self->{made}->tree . '/src/*/*.c'))
	{
		open my $fh, '<', $file or die;
		while (<$fh>)
		{
			$names{$1} = 1 while /DQ_POINT\("([^"]+)"\)/g;
		}
	}
	return sort keys %names;
}

sub arm
{
	my ($self, $name) = @_;

	open my $fh, '>', "$self->{points}/$name.wait" or die "$name: $!";
	close $fh;
}

# Process id of who waits there, 0 if nobody came by the deadline
sub reached
{
	my ($self, $name, $seconds) = @_;
	my $end = time() + (defined $seconds ? $seconds : 20);

	while (1)
	{
		if (open my $fh, '<', "$self->{points}/$name.reached")
		{
			my $pid = <$fh>;
			chomp $pid;
			return $pid;
		}
		return 0 if time() > $end;
		sleep(0.003);
	}
}

# Let go who waits, and nobody is to come any more
sub release
{
	my ($self, $name) = @_;

	unlink glob("$self->{points}/$name.*");
}

1;
