# DqTest::Install: the extension built anew for some PostgreSQL, in an installation
# of its own.
#
# PostgreSQL finds its directories from where its program lies, so a copy of a few
# programs with links to everything else is an installation; nothing is written
# into the real one.
package DqTest::Install;

use strict;
use warnings;

use File::Temp ();

sub config
{
	my ($program, $what) = @_;
	my $value = `$program --$what`;

	chomp $value;
	return $value;
}

# new(tree, pg_config => the one of the environment, make => further words)
# ->path for DqTest->new(install => ...), ->bindir, ->tree (the copy that was built)
sub new
{
	my ($class, $tree, %o) = @_;
	my $program = $o{pg_config} || $ENV{PG_CONFIG} || 'pg_config';
	my $dir = File::Temp::tempdir('dqinstall_XXXXXX', TMPDIR => 1, CLEANUP => 1);
	my $self = bless { dir => $dir }, $class;
	my %at = map { $_ => config($program, $_) } qw(bindir pkglibdir sharedir);
	my $log = "$dir/build.log";

	chmod 0755, $dir;
	mkdir "$dir/tree" or die;
	system("tar -cf - -C '$tree' --exclude=./.git --exclude='*.o' --exclude='*.so' --exclude=./tmp_check "
		  . "--exclude=src/redis/scripts_text.h Makefile dq_bridge.control lua sql src specs | tar -xf - -C '$dir/tree'") == 0
	  or die "copying the tree failed\n";
	system("make -s -j2 -C '$dir/tree' " . ($o{make} || '') . " with_llvm=no PG_CONFIG='$program' >'$log' 2>&1") == 0
	  or die "building the library failed:\n" . `tail -n 20 '$log'`;

	# the same paths below, so that they lie to each other as compiled in
	my $root = "$dir/inst";
	system('mkdir', '-p', map { "$root$_" } $at{bindir}, $at{pkglibdir}, "$at{sharedir}/extension") == 0 or die;
	link_all($at{pkglibdir}, "$root$at{pkglibdir}", qr/^dq_bridge\./);
	link_all($at{sharedir}, "$root$at{sharedir}", qr/^extension$/);
	link_all("$at{sharedir}/extension", "$root$at{sharedir}/extension", qr/^dq_bridge/);
	# these look where they lie
	my @programs = qw(postgres initdb pg_ctl pg_controldata pg_resetwal);
	link_all($at{bindir}, "$root$at{bindir}", qr/^(@{[ join '|', @programs ]})$/);
	system('cp', (map { "$at{bindir}/$_" } @programs), "$root$at{bindir}") == 0 or die;
	system("cp '$dir/tree/dq_bridge.so' '$root$at{pkglibdir}' && "
		  . "cp '$dir/tree/dq_bridge.control' '$dir'/tree/sql/dq_bridge--*.sql '$root$at{sharedir}/extension'") == 0 or die;
	my ($prefix) = $at{bindir} =~ m{^(.*)/bin$};
	die "programs are not in a directory bin\n" unless defined $prefix;
	$self->{path} = "$root$prefix";
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

sub path { return $_[0]->{path}; }
sub bindir { return "$_[0]->{path}/bin"; }
sub tree { return "$_[0]->{dir}/tree"; }

1;
