# DqTest::History: random transactions over a few keys in several sessions, with
# faults, and a model that says what may have become of each task.
#
# All choices come from a seed. Which of them took effect is read from table ops:
# each operation writes its answer there, in its own transaction, so what a crash,
# a rollback, a savepoint or ROLLBACK PREPARED has undone is not there. The times
# around a call and around its commit are the driver's; from them, and from
# nothing else, the model concludes what came before what.
package DqTest::History;

use strict;
use warnings;

use DqTest;
use Time::HiRes qw(time sleep);

our $SCHEMA = <<'SQL';
CREATE TABLE ops (history int, session int, tx int, op int, answer text);
SQL

# new(t => DqTest, seed =>, queue =>, sessions => [], faults => [...], ops => {...})
sub new
{
	my ($class, %o) = @_;

	return bless {
		keys => 20, state => ($o{seed} * 2654435761 + 12345) & 0xffffffff,
		log => [], txs => {}, prepared => [], faulty => 0, %o }, $class;
}

# xorshift: the same everywhere, whoever else calls rand()
sub rnd
{
	my ($self, $n) = @_;
	my $x = $self->{state} || 1;

	$x ^= ($x << 13) & 0xffffffff;
	$x ^= $x >> 17;
	$x ^= ($x << 5) & 0xffffffff;
	$self->{state} = $x;
	return ($x >> 4) % $n;
}

sub chance { my ($self, $percent) = @_; return $self->rnd(100) < $percent; }
sub pick { my ($self, @of) = @_; return $of[ $self->rnd(scalar @of) ]; }

# ---- sessions -------------------------------------------------------------------

sub connect_all
{
	my ($self) = @_;

	for my $s (@{ $self->{sessions} })
	{
		next if $s->{psql} && !$s->{psql}{dead};
		$s->{psql}->quit if $s->{psql};
		poll_until(sub {
			$s->{psql} = $self->{t}->session;
			$s->{pid} = $s->{psql}->run('SELECT pg_backend_pid()', 30);
			return 1 if defined $s->{pid} && $s->{pid} =~ /^\d+$/;
			$s->{psql}->quit;
			return 0;
		}) or die "no connection\n";
		$s->{tx} = $s->{busy} = undef;
		$s->{savepoints} = 0;
	}
}

# What is said to a session: a statement with what it is in the model
sub say
{
	my ($self, $s, $sql, $entry) = @_;

	$entry->{t0} = time();
	$s->{busy} = $entry;
	$s->{psql}->send($sql);
}

sub hear
{
	my ($self, $s, $seconds) = @_;
	my $entry = $s->{busy} or return 1;
	my $answer = $s->{psql}->receive($seconds);

	return 0 if !defined $answer && !$s->{psql}{dead};
	$entry->{t1} = time();
	$s->{busy} = undef;
	if ($s->{psql}{dead})
	{
		$entry->{lost} = 1;
		$s->{tx}{lost} = 1 if $s->{tx};
	}
	elsif ($answer =~ /(?:ERROR|FATAL):\s+([0-9A-Z]{5}): (.*)/)
	{
		$entry->{error} = "$1 $2";
		$s->{tx}{failed} = 1 if $s->{tx};
	}
	else
	{
		$entry->{said} = $answer;
	}
	$entry->{done}->($entry) if $entry->{done};
	$self->lost($s) if $s->{psql}{dead};
	return 1;
}

sub lost
{
	my ($self, $s) = @_;

	$s->{tx}{end1} ||= time() if $s->{tx};
	$s->{tx} = undef;
	$s->{savepoints} = 0;
}

# ---- operations --------------------------------------------------------------------

sub new_tx
{
	my ($self, $s) = @_;
	my $tx = { no => ++$self->{ntx}, session => $s->{no} };

	$self->{txs}{ $tx->{no} } = $tx;
	return $tx;
}

# An operation: its row in ops, and what the model knows of it
sub operation
{
	my ($self, $s, $expression, %what) = @_;
	my $implicit = !$s->{tx};
	my $tx = $s->{tx} || $self->new_tx($s);
	my $op = { %what, tx => $tx, no => ++$self->{nop}, seed => $self->{seed} };

	push @{ $self->{log} }, $op;
	if ($implicit)
	{
		$op->{done} = sub { $tx->{end0} = $op->{t0}; $tx->{end1} = $op->{t1}; };
	}
	$self->say($s, "INSERT INTO ops VALUES ($self->{seed}, $s->{no}, $tx->{no}, $op->{no}, "
		  . "($expression)) RETURNING coalesce(answer, 'null')", $op);
	return $op;
}

sub key_name { my ($self, $k) = @_; return "h$self->{seed}k$k"; }

# The first keys are chosen more often
sub some_key
{
	my ($self) = @_;
	my $a = $self->rnd($self->{keys});
	my $b = $self->rnd($self->{keys});

	return $self->key_name($a < $b ? $a : $b);
}

# Something that was offered, keyless or not, by payload or id where it is known
sub some_element
{
	my ($self) = @_;
	my @offers = grep { $_->{kind} eq 'offer' && !$_->{error} } @{ $self->{log} };

	return ($self->some_key, 'key') if !@offers || $self->chance(15);
	my $o = $offers[ $#offers - $self->rnd(@offers > 12 ? 12 : scalar @offers) ];
	my $id = $o->{said};
	return ($id, 'id', $o) if $id && $id =~ /^\d+-/ && $self->chance($o->{key} ? 25 : 50);
	return ($o->{payload}, 'payload', $o) unless $o->{key};
	return ($o->{key}, 'key');
}

sub do_offer
{
	my ($self, $s) = @_;
	my $payload = "h$self->{seed}p" . ++$self->{npayload};
	my $key = $self->chance(70) ? $self->some_key : undef;
	my $delay = $self->chance(50) ? 20 + $self->rnd(280) : 200 + $self->rnd(700);

	$self->operation($s, "SELECT dq_offer('$self->{queue}', '$payload', '$delay ms'"
		  . ($key ? ", '$key'" : '') . ')', kind => 'offer', payload => $payload, key => $key);
}

sub do_remove
{
	my ($self, $s) = @_;
	my ($element, $by, $offer) = $self->some_element;

	$self->operation($s, "SELECT dq_remove('$self->{queue}', '$element')::text",
		kind => 'remove', element => $element, by => $by, of => $offer);
}

sub do_move
{
	my ($self, $s) = @_;
	my ($element, $by, $offer) = $self->some_element;
	my $due = now_ms() + 20 + $self->rnd(700);

	$self->operation($s, "SELECT dq_reschedule_at('$self->{queue}', '$element', "
		  . "to_timestamp($due / 1000.0))", kind => 'move', element => $element, by => $by, of => $offer, due => $due);
}

sub do_poll
{
	my ($self, $s) = @_;
	my $n = 1 + $self->rnd(3);
	my $wait = $self->chance(30) ? ", '50 ms'" : '';

	$self->operation($s, "SELECT string_agg(p, ',') FROM dq_poll('$self->{queue}', $n$wait) p", kind => 'poll');
}

sub do_end
{
	my ($self, $s, $how) = @_;
	my $tx = $s->{tx};
	my $gid = "h$self->{seed}t$tx->{no}";

	$how = 'ROLLBACK' if $tx->{failed};
	$how ||= $self->pick(qw(COMMIT COMMIT COMMIT ROLLBACK), $self->{prepare} ? 'PREPARE' : 'COMMIT');
	$tx->{how} = $how;
	$self->say($s, $how eq 'PREPARE' ? "PREPARE TRANSACTION '$gid'" : $how, {
		kind => $how,
		done => sub {
			my ($entry) = @_;

			if ($how eq 'PREPARE')
			{
				# lost: nobody knows whether it is prepared; looked up at the end
				$tx->{gid} = $gid;
				push @{ $self->{prepared} }, $tx if defined $entry->{said};
			}
			else
			{
				$tx->{end0} = $entry->{t0};
				$tx->{end1} = $entry->{t1};
			}
			$s->{tx} = undef;
			$s->{savepoints} = 0;
		} });
}

sub do_finish_prepared
{
	my ($self, $s, $tx, $how) = @_;

	@{ $self->{prepared} } = grep { $_ != $tx } @{ $self->{prepared} };
	$how ||= $self->pick('COMMIT', 'ROLLBACK');
	$self->say($s, "$how PREPARED '$tx->{gid}'", {
		kind => "$how PREPARED",
		done => sub {
			my ($entry) = @_;
			$tx->{end0} = $entry->{t0};
			$tx->{end1} = $entry->{t1};
			push @{ $self->{prepared} }, $tx if $entry->{lost} || $entry->{error};
		} });
}

sub do_something
{
	my ($self, $s) = @_;
	my $tx = $s->{tx};

	return $self->do_end($s) if $tx && ($tx->{failed} && !$s->{savepoints} || $tx->{count}++ > 2 && $self->chance(30));
	if ($tx && $tx->{failed} || $s->{savepoints} && $self->chance(15))
	{
		$tx->{failed} = 0;
		my $to = 1 + $self->rnd($s->{savepoints});
		$s->{savepoints} = $to;
		return $self->say($s, "ROLLBACK TO s$to", { kind => 'rollback to' });
	}
	if ($tx && $self->chance(12))
	{
		if ($s->{savepoints} && $self->chance(30))
		{
			my $n = $s->{savepoints}--;
			return $self->say($s, "RELEASE s$n", { kind => 'release' });
		}
		my $n = ++$s->{savepoints};
		return $self->say($s, "SAVEPOINT s$n", { kind => 'savepoint' });
	}
	if (!$tx)
	{
		if (@{ $self->{prepared} } && $self->chance(40))
		{
			return $self->do_finish_prepared($s, $self->{prepared}[0]);
		}
		if ($self->chance(70))
		{
			$s->{tx} = $self->new_tx($s);
			return $self->say($s, 'BEGIN' . ($self->chance(25) ? '; SET LOCAL synchronous_commit = off' : ''),
				{ kind => 'begin' });
		}
	}
	my $kind = $self->pick(@{ $self->{kinds} });
	return $self->do_offer($s) if $kind eq 'offer';
	return $self->do_remove($s) if $kind eq 'remove';
	return $self->do_move($s) if $kind eq 'move';
	return $self->do_poll($s);
}

# ---- the history ----------------------------------------------------------------------

sub run
{
	my ($self, $steps) = @_;
	my %fault_at;

	$self->connect_all;
	$fault_at{ $self->rnd($steps) } = $_ for @{ $self->{faults} };
	for my $step (0 .. $steps - 1)
	{
		if (my $fault = $fault_at{$step})
		{
			$self->{faulty} = 1;
			$self->{fault}->($self, $fault);
		}
		for my $s (@{ $self->{sessions} })
		{
			$self->hear($s, 0.0002) if $s->{busy};
		}
		$self->connect_all if grep { $_->{psql}{dead} } @{ $self->{sessions} };
		my @idle = grep { !$_->{busy} } @{ $self->{sessions} };
		if (!@idle)
		{
			sleep(0.003);
			next;
		}
		my $s = $self->pick(@idle);
		$self->do_something($s);
		$self->hear($s, $self->pick(0.0002, 0.01, 0.05, 0.05));
		sleep($self->rnd(12) / 1000) if $self->chance(30);
	}
	$self->{calm}->($self) if $self->{calm};
	$self->finish;
}

# Everything that is open ends, in some order
sub finish
{
	my ($self) = @_;
	my $end = time() + 60;

	while (1)
	{
		for my $s (@{ $self->{sessions} })
		{
			$self->hear($s, 0.001) if $s->{busy};
		}
		$self->connect_all if grep { $_->{psql}{dead} } @{ $self->{sessions} };
		my @idle = grep { !$_->{busy} } @{ $self->{sessions} };
		my ($open) = grep { $_->{tx} } @idle;
		if ($open)
		{
			$self->do_end($open, $self->pick('COMMIT', 'ROLLBACK'));
		}
		elsif (@{ $self->{prepared} })
		{
			# all sessions may be waiting for it
			my $tx = shift @{ $self->{prepared} };
			$tx->{end0} = time();
			$self->{t}->try($self->pick('COMMIT', 'ROLLBACK') . " PREPARED '$tx->{gid}'");
			$tx->{end1} = time();
		}
		elsif (@idle == @{ $self->{sessions} })
		{
			last;
		}
		elsif (time() > $end - 55)
		{
			# a session may be waiting for one of these
			$self->finish_unheard;
		}
		$self->hangs if time() > $end;
	}
	$self->finish_unheard;
}

# Prepared, but the answer was lost
sub finish_unheard
{
	my ($self) = @_;
	my $t = $self->{t};

	for my $gid (split /\n/, $t->sql("SELECT gid FROM pg_prepared_xacts WHERE gid ~ '^h$self->{seed}t'"))
	{
		my ($no) = $gid =~ /t(\d+)$/;
		my $tx = $self->{txs}{$no};
		$tx->{end0} = time();
		$t->sql($self->pick('COMMIT', 'ROLLBACK') . " PREPARED '$gid'");
		$tx->{end1} = time();
	}
}

sub hangs
{
	my ($self) = @_;
	my $t = $self->{t};
	my $text = "history $self->{seed}: a session does not come back\n";

	for my $s (@{ $self->{sessions} })
	{
		my $b = $s->{busy} or next;
		$text .= "session $s->{no}, pid $s->{pid}, tx " . ($b->{tx} ? $b->{tx}{no} : '-') . ": $b->{kind} "
		  . ($b->{element} || $b->{payload} || '') . "\n";
	}
	$text .= $t->sql("SELECT pid, backend_xid, wait_event_type, wait_event, state, pg_blocking_pids(pid), left(query, 120) "
		  . "FROM pg_stat_activity WHERE backend_type = 'client backend' OR backend_type ~ 'dq_bridge'") . "\n";
	$text .= $t->sql("SELECT shard, state, held, last_error FROM dq_stats WHERE queue = '$self->{queue}'::regclass") . "\n";
	$text .= join '|', map { defined $_ ? $_ : '-' } split /\n/, $t->{redis}->cli('KEYS', '*hold');
	$text .= "\n" . $self->story;
	die $text;
}

# ---- the model ------------------------------------------------------------------------

# What took effect
sub load
{
	my ($self) = @_;
	my %row;

	for (split /\n/, $self->{t}->sql("SELECT op, coalesce(answer, 'null') FROM ops WHERE history = $self->{seed}"))
	{
		my ($op, $answer) = split /\|/, $_, 2;
		$row{$op} = $answer;
	}
	for my $o (@{ $self->{log} })
	{
		$o->{t1} = 9e15 unless defined $o->{t1};
		$o->{real} = exists $row{ $o->{no} };
		$o->{said} = $row{ $o->{no} } if $o->{real};
		my $tx = $o->{tx};
		$tx->{end0} = $o->{t0} unless defined $tx->{end0};
		$tx->{end1} = 9e15 unless defined $tx->{end1};
		$tx->{real} = 1 if $o->{real};
	}
	for my $o (grep { $_->{kind} eq 'offer' && $_->{real} } @{ $self->{log} })
	{
		($o->{due}) = $o->{said} =~ /^(\d+)-/;
	}
}

# a can have come into effect before b was called, seen from b
sub may_precede
{
	my ($a, $b) = @_;

	return $a->{no} < $b->{no} if $a->{tx} == $b->{tx};
	return $a->{tx}{end0} <= $b->{t1};
}

# a can have been called before b
sub may_be_called_before
{
	my ($a, $b) = @_;

	return $a->{no} < $b->{no} if $a->{tx} == $b->{tx};
	return $a->{t0} <= $b->{t1};
}

# a was committed before b was called
sub surely_precedes
{
	my ($a, $b) = @_;

	return $a->{no} < $b->{no} if $a->{tx} == $b->{tx};
	return $a->{tx}{end1} < $b->{t0};
}

# Largest matching of left to right: edges are lists of indexes
sub matching
{
	my (@edges) = @_;
	my %taken;
	my $found = 0;

	for my $i (0 .. $#edges)
	{
		my %seen;
		my $try;
		$try = sub {
			my ($left) = @_;
			for my $r (@{ $edges[$left] })
			{
				next if $seen{$r}++;
				if (!exists $taken{$r} || $try->($taken{$r}))
				{
					$taken{$r} = $left;
					return 1;
				}
			}
			return 0;
		};
		$found++ if $try->($i);
	}
	return $found;
}

# Which tasks an operation may have meant, of those that took effect. One without
# an answer was recorded, and means what its key names when its transaction's turn
# has come (G8), of what was offered before its call: the offer may be committed after
# the call, as long as that is before the recording transaction's own turn.
sub candidates
{
	my ($self, $r) = @_;

	return grep { $_ == $r->{of} } @{ $self->{effective} } if $r->{by} ne 'key';
	return grep {
		defined $_->{key} && $_->{key} eq $r->{element} &&
		  (may_precede($_, $r) || $r->{said} eq 'null' && may_be_called_before($_, $r));
	} @{ $self->{effective} };
}

# Of these, not those that another offer of the key has surely replaced
sub narrowed
{
	my ($self, $r) = @_;
	my @c = $self->candidates($r);

	return @c if $r->{by} ne 'key';
	return grep {
		my $x = $_;
		!grep { $_ != $x && surely_precedes($x, $_) && surely_precedes($_, $r) } @c;
	} @c;
}

# fired: payload -> [arrival in ms (undef: not known), ...]. Returns complaints.
sub judge
{
	my ($self, $fired) = @_;
	my @bad;
	my $complain = sub { push @bad, "history $self->{seed}: " . join('', @_); };

	$self->load;
	my @offers = grep { $_->{kind} eq 'offer' } @{ $self->{log} };
	my @real = grep { $_->{real} } @{ $self->{log} };
	my @effective = @{ $self->{effective} = [ grep { $_->{real} } @offers ] };
	my @removes = grep { $_->{kind} eq 'remove' } @real;
	my @moves = grep { $_->{kind} eq 'move' } @real;

	for my $o (@offers)
	{
		my $n = @{ $fired->{ $o->{payload} } || [] };
		$o->{fired} = $n;
		$complain->("$o->{payload} fired $n times") if $n > 1;
		$complain->("$o->{payload} fired, and was never committed") if $n > 0 && !$o->{real};
	}

	# never early: no instant that still counted lies after its arrival
	for my $o (grep { $_->{fired} } @effective)
	{
		my @dues = ({ due => $o->{due}, from => $o });
		for my $m (@moves)
		{
			next unless grep { $_ == $o } $self->candidates($m);
			push @dues, { due => $m->{due}, from => $m };
		}
		my @firm = grep {
			my @c = $self->narrowed($_);
			$_->{said} ne 'null' && @c == 1 && $c[0] == $o;
		} @moves;
		my @left = grep {
			my $d = $_;
			!grep { $_ != $d->{from} && surely_precedes($d->{from}, $_) } @firm;
		} @dues;
		my ($least) = sort { $a <=> $b } map { $_->{due} } @left;
		my ($arrival) = @{ $fired->{ $o->{payload} } };
		$complain->("$o->{payload} fired " . ($least - $arrival) . ' ms early')
		  if defined $arrival && $arrival < $least;
	}

	# true and committed: it never fires. Each true has taken a task of its own
	my @true = grep { $_->{said} eq 'true' } @removes;
	my %at = map { $effective[$_] => $_ } 0 .. $#effective;
	my @edges = map { [ map { $at{$_} } grep { !$_->{fired} } $self->candidates($_) ] } @true;
	if (matching(@edges) < @true)
	{
		my ($r) = grep { !@{ $edges[$_] } } 0 .. $#true;
		$complain->(defined $r
			? "dq_remove('$true[$r]{element}') by $true[$r]{by} said true and committed, and every task it may have meant fired: "
			  . join(' ', map { $_->{payload} } $self->candidates($true[$r]))
			: 'more tasks fired than can be with all that was removed: '
			  . join(' ', map { $_->{element} } @true));
	}
	for my $r (@true)
	{
		my @c = $self->narrowed($r);
		$complain->("$c[0]{payload} fired, and dq_remove('$r->{element}') by $r->{by} said true and committed")
		  if @c == 1 && $c[0]{fired};
	}

	# what did not fire was removed or replaced, each by an operation of its own
	my @why = grep { $_->{kind} eq 'remove' && $_->{said} ne 'false' || $_->{kind} eq 'offer' && defined $_->{key} } @real;
	my @unfired = grep { !$_->{fired} } @effective;
	my @explained = map {
		my $o = $_;
		[ grep {
			my $w = $why[$_];
			$w != $o && ($w->{kind} eq 'remove'
				? (grep { $_ == $o } $self->candidates($w))
				: defined $o->{key} && $o->{key} eq $w->{key} && !surely_precedes($w, $o));
		} 0 .. $#why ];
	} @unfired;
	if (matching(@explained) < @unfired)
	{
		my @none = map { $unfired[$_]{payload} } grep { !@{ $explained[$_] } } 0 .. $#unfired;
		$complain->(@none ? "never fired, and nothing has removed or replaced it: @none"
			: 'more are missing than were removed or replaced: ' . join(' ', map { $_->{payload} } @unfired));
	}

	# false, though it was there: committed before, due later, fired in the end, and
	# nobody else had a hand in it
	for my $r (grep { $_->{kind} eq 'remove' && defined $_->{said} && $_->{said} eq 'false' } @{ $self->{log} })
	{
		for my $o ($self->candidates($r))
		{
			next unless $o->{fired} == 1 && surely_precedes($o, $r) && $o->{due} > $r->{t1} * 1000;
			next if grep {
				my $x = $_;
				$x != $r && $x != $o && $x->{t0} <= $r->{t1}
				&& !(($x->{tx}{how} || '') eq 'ROLLBACK' && !$x->{tx}{lost} && $x->{tx}{end1} < $r->{t0}) && (
					$x->{kind} eq 'offer' ? defined $o->{key} && defined $x->{key} && $x->{key} eq $o->{key}
					: $x->{kind} =~ /^(remove|move)$/ && ($x->{by} eq 'key' ? defined $o->{key} && $x->{element} eq $o->{key} : $x->{of} == $o))
			} @{ $self->{log} };
			$complain->("dq_remove('$r->{element}') by $r->{by} said false, and $o->{payload} was pending");
		}
	}

	# without faults nothing is late
	if (!$self->{faulty} && $self->{on_time})
	{
		for my $o (grep { $_->{fired} } @effective)
		{
			my ($arrival) = @{ $fired->{ $o->{payload} } };
			next unless defined $arrival;
			my @touch = grep {
				my $x = $_;
				$x == $o || $x->{kind} =~ /^(remove|move)$/ && ($x->{by} eq 'key' ? defined $o->{key} && $x->{element} eq $o->{key} : $x->{of} == $o);
			} @{ $self->{log} };
			my ($last) = sort { $b <=> $a } ($o->{due}, map { ($_->{due} || 0, $_->{tx}{end1} * 1000) } @touch);
			$complain->("$o->{payload} fired " . int($arrival - $last) . ' ms late') if $arrival > $last + $self->{on_time};
		}
	}
	return @bad;
}

# What was done, for a complaint: one line an operation
sub story
{
	my ($self, $match) = @_;
	my $start = @{ $self->{log} } ? $self->{log}[0]{t0} : 0;

	return join "\n", map {
		my $o = $_;
		sprintf '%8.1f-%-8.1f tx %d (%s, %.1f-%.1f) %s %s %s -> %s%s', ($o->{t0} - $start) * 1000,
		  ($o->{t1} - $start) * 1000, $o->{tx}{no}, $o->{tx}{real} ? 'committed' : 'undone',
		  ($o->{tx}{end0} - $start) * 1000, ($o->{tx}{end1} - $start) * 1000, $o->{kind},
		  $o->{payload} || $o->{element} || '', $o->{key} || $o->{by} || '',
		  defined $o->{said} ? $o->{said} : $o->{error} || 'lost', $o->{real} ? '' : ' (undone)';
	} grep { my $o = $_; !defined $match || grep { defined && $_ =~ $match } @$o{qw(payload element key)} } @{ $self->{log} };
}

1;
