# pg_upgrade, within one major and from each older one that is installed here: the
# database stays the same source, what was on its way arrives once, a pause is kept.
# G8; G12
use strict;
use warnings;
use File::Spec::Functions qw(rel2abs);
use FindBin;
use lib "$FindBin::RealBin/lib";
use DqTest;
use DqTest::Install;
use PostgreSQL::Test::Utils ();
use Test::More;

sub major { my ($program) = @_; return DqTest::Install::config($program, 'version') =~ /^PostgreSQL (\d+)/ ? $1 : 0; }

my $here = major($ENV{PG_CONFIG} || 'pg_config');

sub upgrade
{
	my ($from, $made) = @_;
	my $what = "$from to $here";
	my $old = DqTest->new(name => "old$from" . ($made ? 'x' : ''), $made ? (install => $made->path) : ());
	my $r = $old->redis;

	# two servers, so that their OIDs cannot come out the same by chance alone
	$old->sql("CREATE SERVER another FOREIGN DATA WRAPPER dq_bridge OPTIONS (socket '" . $r->socket . "', database '1')");
	$old->queue('q');
	$old->queue('paused');
	$old->queue('q2', '', server => 'another');
	$old->sql("SELECT dq_offer('q', 'pending', '1 hour', 'k')");
	$old->sql("SELECT dq_pause('paused')");
	$old->sync;
	my $source = $old->sql("SELECT source FROM dq_source");
	isnt((split / /, $r->cmd('HGET', 'dq:{q}:fence', "who:$source") || '')[3] || '-', '-',
		"$what: the fence names the life that wrote it, though no worker may have come yet");

	# committed, not yet sent
	$r->stop;
	$old->sql("SELECT dq_offer('q', 'on its way', '0'), dq_offer('paused', 'waits', '0')");
	$old->node->stop('fast');
	$r->start;
	is($r->cmd('LLEN', 'q'), 0, 'nothing was sent');

	my $new = DqTest->new(name => "new$from" . ($made ? 'x' : ''), redis => $r, start => 0,
		initdb => $from < 18 && $here >= 18 ? ['--no-data-checksums'] : []);
	my $bin = $new->node->config_data('--bindir');
	my $dir = rel2abs($new->node->basedir);
	my @cmd = ("$bin/pg_upgrade", '-b', $made ? $made->bindir : $bin, '-B', $bin,
		'-d', rel2abs($old->node->data_dir), '-D', rel2abs($new->node->data_dir),
		'-p', $old->node->port, '-P', $new->node->port, '-s', $new->node->host);
	ok(!system("cd '$dir' && " . join(' ', map { "'$_'" } @cmd) . " > upgrade.out 2>&1"), 'pg_upgrade with the library preloaded')
	  or diag(map { PostgreSQL::Test::Utils::slurp_file($_) } "$dir/upgrade.out",
		glob($new->node->data_dir . '/pg_upgrade_output.d/*/log/pg_upgrade_dump_*.log'));
	$new->node->start;

	is($new->sql("SELECT source FROM dq_source"), $source, 'the same source');
	ok(poll_until(sub { $r->cmd('LLEN', 'q') == 1 }), 'what was on its way arrives, once the old lease is over');
	$new->sync;
	is(join(',', $r->ready('q')), 'on its way', '... once');
	is($new->sql("SELECT payload FROM q"), 'pending', 'the pending task is still there');
	is($r->cmd('LLEN', 'paused'), 0, 'a pause is kept');
	$new->sql("SELECT dq_resume('paused')");
	ok(poll_until(sub { $r->cmd('LLEN', 'paused') == 1 }), '... and ends');
	is($new->sql("SELECT dq_remove('q', 'k')"), 't', 'removing works');
	$new->sql("SELECT dq_offer('q2', 'x', '0')");
	$r->cmd('SELECT', 1);
	ok(poll_until(sub { $r->cmd('LLEN', 'q2') == 1 }), 'the other server too');
	$r->cmd('SELECT', 0);
	is($new->sql("SELECT string_agg(DISTINCT state, ',') FROM dq_stats"), 'running', 'all running');
	$new->node->stop('fast');
	$r->stop;
}

upgrade($here);

# ./dev matrix installs one
for my $program (glob('/usr/lib/postgresql/*/bin/pg_config'))
{
	my $version = major($program);

	next unless $version >= 15 && $version < $here
	  && -f DqTest::Install::config($program, 'includedir-server') . '/postgres.h';
	upgrade($version, DqTest::Install->new("$FindBin::RealBin/..", pg_config => $program));
}

done_testing();
