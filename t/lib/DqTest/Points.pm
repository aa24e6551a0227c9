# DqTest::Points: a library that waits at named points (src/shared/points.c), in
# an installation of its own, and the words to arm them.
#
# PostgreSQL finds its directories from where its program lies, so a copy of three
# programs with links to everything else is an installation; nothing is written
# into the real one.
package DqTest::Points;

use strict;
use warnings;

use File::Temp ();
use Time::HiRes qw(time sleep);

sub config
{
	my ($what) = @_;
	my $program = $ENV{PG_CONFIG} || 'pg_config';
	my $value = `$program --$what`;

	chomp $value;
	return $value;
}

# new(tree): builds. ->install for DqTest->new, ->conf for its configuration
sub new
{
	my ($class, $tree) = @_;
	my $dir = File::Temp::tempdir('dqpoints_XXXXXX', TMPDIR => 1, CLEANUP => 1);
	my $self = bless { dir => $dir, points => "$dir/points" }, $class;
	my %at = map { $_ => config($_) } qw(bindir pkglibdir sharedir);
	my $log = "$dir/build.log";

	chmod 0755, $dir;
	mkdir "$dir/points" or die;
	mkdir "$dir/tree" or die;
	system("tar -cf - -C '$tree' --exclude=./.git --exclude='*.o' --exclude='*.so' --exclude=./tmp_check "
		  . "--exclude=src/redis/scripts_text.h Makefile dq_bridge.control lua sql src specs | tar -xf - -C '$dir/tree'") == 0
	  or die "copying the tree failed\n";
	system("make -s -j2 -C '$dir/tree' POINTS=1 with_llvm=no PG_CONFIG='"
		  . ($ENV{PG_CONFIG} || 'pg_config') . "' >'$log' 2>&1") == 0
	  or die "building the library failed:\n" . `tail -n 20 '$log'`;

	# the same paths below, so that they lie to each other as compiled in
	my $root = "$dir/inst";
	for my $path ("$root$at{bindir}", "$root$at{pkglibdir}", "$root$at{sharedir}")
	{
		system('mkdir', '-p', $path) == 0 or die;
	}
	rmdir "$root$at{sharedir}";
	symlink $at{sharedir}, "$root$at{sharedir}" or die "symlink: $!";
	link_all($at{pkglibdir}, "$root$at{pkglibdir}", qr/^dq_bridge\./);
	link_all($at{bindir}, "$root$at{bindir}", qr/^(postgres|initdb|pg_ctl)$/);
	for my $program (qw(postgres initdb pg_ctl))
	{
		system('cp', "$at{bindir}/$program", "$root$at{bindir}/$program") == 0 or die;
	}
	system('cp', "$dir/tree/dq_bridge.so", "$root$at{pkglibdir}/dq_bridge.so") == 0 or die;
	my ($prefix) = $at{bindir} =~ m{^(.*)/bin$};
	die "programs are not in a directory bin\n" unless defined $prefix;
	$self->{install} = "$root$prefix";
	return $self;
}

sub link_all
{
	my ($from, $to, $except) = @_;

	opendir my $d, $from or die "$from: $!";
	for my $name (readdir $d)
	{
		next if $name =~ /^\.\.?$/ || $name =~ $except;
		symlink "$from/$name", "$to/$name" or die "symlink: $!";
	}
}

sub install { return $_[0]->{install}; }
sub conf { return "dq_bridge.points_dir = '$_[0]->{points}'\n"; }

# All names in the sources: a test that knows fewer is to be told
sub names
{
	my ($self) = @_;
	my %names;

	for my $file (glob("$self->{dir}/tree/src/*/*.c"))
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
