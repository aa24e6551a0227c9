# DqTest: what every TAP test of dq_bridge needs.
#
# A private PostgreSQL with the library preloaded, a private Redis, and the
# words the tests are written in. Waiting is always polling on a condition with
# a deadline (poll_until); nothing here sleeps and hopes. What a test started
# is stopped by its pid when the test ends.
package DqTest;

use strict;
use warnings;

use Exporter 'import';
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils ();
use Test::More;
use Time::HiRes qw(time sleep);

use DqTest::Redis;
use DqTest::Session;
use DqTest::Proxy;

our @EXPORT = qw(poll_until now_ms long_run rounds multiset_diff is_books);

# Seconds any condition may take to come true. Generous: it is only ever
# waited out by a test that fails.
our $DEADLINE = 60 * ($ENV{DQ_SLOW} || 1);

# A test that dies says why where prove and ./dev check show it.
$SIG{__DIE__} = sub { diag($_[0]) if defined $^S && !$^S; };

sub now_ms { return int(time() * 1000); }

# ./dev check --long: the full numbers of the acceptance list
sub long_run { return $ENV{DQ_LONG} ? 1 : 0; }
sub rounds { my ($short, $long) = @_; return long_run() ? $long : $short; }

# Call code until it returns true or the deadline is over; returns its value.
sub poll_until
{
	my ($code, $deadline, $pause) = @_;
	my $end = time() + (defined $deadline ? $deadline : $DEADLINE);
	my $value;

	while (1)
	{
		$value = $code->();
		return $value if $value;
		return $value if time() > $end;
		sleep(defined $pause ? $pause : 0.02);
	}
}

# Difference of two lists as multisets: ('-x' missing from got, '+y' too many)
sub multiset_diff
{
	my ($got, $expected) = @_;
	my %n;

	$n{$_}++ for @$expected;
	$n{$_}-- for @$got;
	return map { my $x = $_; (($n{$x} > 0 ? "-$x" : "+$x")) x abs($n{$x}) }
	  grep { $n{$_} != 0 } sort keys %n;
}

# The books: what was offered = delivered + still pending (+ removed), each once.
sub is_books
{
	my ($name, $offered, @parts) = @_;
	my @have = map { @$_ } @parts;
	my @diff = multiset_diff(\@have, $offered);

	ok(@diff == 0, $name)
	  or diag(scalar(@$offered) . ' offered, ' . scalar(@have) . ' accounted for; '
		  . "missing (-) or too many (+): @diff[0 .. ($#diff > 19 ? 19 : $#diff)]");
	return @diff == 0;
}

my $conf = <<'CONF';
shared_preload_libraries = 'dq_bridge'
restart_after_crash = on
log_statement = none
log_error_verbosity = verbose
max_prepared_transactions = 10
max_worker_processes = 24
max_connections = 60
shared_buffers = 64MB
max_wal_size = 2GB
wal_level = logical
max_wal_senders = 8
max_replication_slots = 8
jit = off
CONF

# new(name => 'main', conf => '', redis => {...} | DqTest::Redis, start => 1,
#     extension => 1, install => a copy of the installation, see DqTest::Install,
#     initdb => further arguments)
sub new
{
	my ($class, %o) = @_;
	my $self = bless { name => $o{name} || 'main' }, $class;

	$self->{redis} =
	  (ref($o{redis}) && ref($o{redis}) ne 'HASH')
	  ? $o{redis}
	  : DqTest::Redis->new(name => "redis_$self->{name}", %{ $o{redis} || {} });
	$self->{node} = PostgreSQL::Test::Cluster->new($self->{name},
		$o{install} ? (install_path => $o{install}) : ());
	$self->{node}->init(allows_streaming => 'logical', extra => [ '-E', $o{encoding} || 'UTF8', '--locale=C', @{ $o{initdb} || [] } ]);
	# 18's module sets it for older servers, too, which do not know it
	$self->{node}->adjust_conf('postgresql.conf', 'autovacuum_worker_slots', undef) if $self->{node}->pg_version < 18;
	$self->{node}->append_conf('postgresql.conf', $conf . ($o{conf} || ''));
	if (!defined $o{start} || $o{start})
	{
		$self->{node}->start;
		$self->extend('postgres') if !defined $o{extension} || $o{extension};
	}
	return $self;
}

sub node { return $_[0]->{node}; }
sub redis { return $_[0]->{redis}; }

# CREATE EXTENSION and a server 'redis' over the unix socket, in a database
sub extend
{
	my ($self, $db, %o) = @_;
	my $options = $o{options} || "socket '" . $self->redis->socket . "'";

	$self->sql("CREATE EXTENSION dq_bridge", db => $db);
	$self->sql("CREATE SERVER redis FOREIGN DATA WRAPPER dq_bridge OPTIONS ($options)",
		db => $db);
}

# A queue by plain DDL, all columns; options as SQL text
sub queue
{
	my ($self, $name, $options, %o) = @_;
	my $type = $o{type} || 'text';

	$self->sql("CREATE FOREIGN TABLE $name (id text, key text, payload $type, "
		  . "due_at timestamptz, shard int) SERVER "
		  . ($o{server} || 'redis')
		  . ($options ? " OPTIONS ($options)" : ''), %o);
}

# Run SQL, return its output; dies with the error text when it fails.
sub sql
{
	my ($self, $sql, %o) = @_;
	my ($out, $err) = ('', '');
	my $rc = $self->{node}->psql(
		$o{db} || 'postgres', $sql,
		stdout => \$out, stderr => \$err,
		on_error_stop => 1,
		timeout => $o{timeout} || 300 * ($ENV{DQ_SLOW} || 1),
		extra_params => [ '-v', 'VERBOSITY=verbose', $o{user} ? ('-U', $o{user}) : () ]);

	die "SQL failed: $err\nwhile running: $sql\n" if $rc != 0;
	$self->{stderr} = $err;
	return $out;
}

# Notices and warnings of the last sql()
sub notices { return $_[0]->{stderr}; }

# Run SQL that may fail: (rc, output, error text with SQLSTATEs)
sub try
{
	my ($self, $sql, %o) = @_;
	my ($out, $err) = ('', '');
	my $rc = eval {
		$self->{node}->psql(
			$o{db} || 'postgres', $sql,
			stdout => \$out, stderr => \$err,
			on_error_stop => 1,
			timeout => $o{timeout} || 120 * ($ENV{DQ_SLOW} || 1),
			extra_params => [ '-v', 'VERBOSITY=verbose', $o{user} ? ('-U', $o{user}) : () ]);
	};

	if (!defined $rc)
	{
		# no server: psql may have left before it was given its input
		die $@ unless $@ =~ /Broken pipe/;
		return (2, $out, $err);
	}
	return ($rc, $out, $err);
}

# SQL must fail with that SQLSTATE (and the text match, if given)
sub fails
{
	my ($self, $sql, $state, $name, %o) = @_;
	my ($rc, $out, $err) = $self->try($sql, %o);
	my $got = $err =~ /(?:ERROR|FATAL):\s+([0-9A-Z]{5}):/ ? $1 : ($rc == 0 ? 'success' : '?');

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $ok = $got eq $state && (!$o{like} || $err =~ $o{like});

	ok($ok, $name) or diag("expected $state, got $got: $err$out");
	return $err;
}

sub session
{
	my ($self, %o) = @_;

	return DqTest::Session->new($self->{node}->connstr($o{db} || 'postgres')
		  . ($o{user} ? " user=$o{user}" : ''));
}

# All that was committed is in Redis
sub sync
{
	my ($self, %o) = @_;

	return poll_until(
		sub { $self->sql("SELECT dq_sync(NULL, '5s')", %o) eq 't' });
}

# pid of the bridge of a database (the first, or of a server), waiting for it
sub bridge_pid
{
	my ($self, %o) = @_;
	my $db = $o{db} || 'postgres';
	my $server = $o{server} ? "AND server = '$o{server}'" : 'AND server IS NOT NULL';

	return poll_until(
		sub {
			my ($rc, $out) = $self->try(
				"SELECT pid FROM dq_workers WHERE role = 'bridge' AND database = '$db' $server AND pid > 0 LIMIT 1",
				db => $db);
			return $rc == 0 && $out ne '' ? $out : 0;
		}, $o{deadline});
}

# Current value of a column of dq_stats
sub stat
{
	my ($self, $queue, $column, %o) = @_;

	return $self->sql("SELECT $column FROM dq_stats WHERE queue = '$queue'::regclass ORDER BY shard LIMIT 1", %o);
}

sub wait_state
{
	my ($self, $queue, $state, %o) = @_;

	return poll_until(
		sub {
			my ($rc, $out) = $self->try(
				"SELECT state FROM dq_stats WHERE queue = '$queue'::regclass ORDER BY shard LIMIT 1", %o);
			return $rc == 0 && $out eq $state;
		}, $o{deadline});
}

# Payloads pending in Redis, read as raw members (shard 0 of an unsharded queue)
sub pending
{
	my ($self, $name) = @_;

	return map { DqTest::Redis::unpack_member($_)->{payload} }
	  @{ $self->redis->cmd('ZRANGE', DqTest::Redis::pending_key($name), 0, -1) };
}

sub log_text { return PostgreSQL::Test::Utils::slurp_file($_[0]->{node}->logfile); }

# Ends a test file: nothing crashed, then the count.
sub finish
{
	my ($self, %o) = @_;
	my $log = $self->log_text;

	ok($log !~ /terminated by signal (?:6|11):|TRAP: |PANIC: /, 'no process crashed')
	  unless $o{crashes};
	$self->{node}->stop('fast') if $self->{node}{_pid} && !$o{keep};
	$self->redis->stop;
	done_testing();
}

1;
