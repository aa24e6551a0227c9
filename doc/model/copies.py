"""Who may go on from a fence: restarts, crashes, a promoted standby that lags, and a data
directory that was copied and has the same identity (PO 5, 5a, G12).

A server is its WAL (a number), the rows it has committed (named after the branch that wrote
them), the ids of its marks, the lives it has had, its timelines.  Ids are given out by
position, so two branches give out the same ones.  The fence: everything below `seen` is
applied; who wrote it last: timeline and where it began, position, newest mark, life.  Only one
worker at a time is owner (the lease of another place that is alive keeps a server idle);
when it is down its lease runs out.

Rules that are compared:
    lsn   PO 5a: the writer's timeline is one of ours, on the current one it is not ahead
    mark  that, and on the same timeline the fence's newest mark is known here
    life  that, and on the same timeline the fence's life is known here, and its position is
          not beyond where that life ended here (each life of a server has a random id, written
          and flushed before its first page, with the position where it began)
"""
from collections import namedtuple

from search import main, scenario

State = namedtuple('State', 'servers fence applied tasks budget bad')
# up: down, up (looking), in (owner), idle
Server = namedtuple('Server', 'name up wal flushed rows seq marks lives tlis branch')
Fence = namedtuple('Fence', 'seen tli begin wal mark life by')
Budget = namedtuple('Budget', 'writes marks stops crash copy promote')


class Copies:
    def __init__(self, rule='life', writes=3, marks=1, stops=1, crash=0, copy=1, promote=0,
                 cold=False, flushed_mark=True, at_start=True):
        self.rule, self.cold, self.flushed_mark, self.at_start = rule, cold, flushed_mark, at_start
        self.first = Budget(writes, marks, stops, crash, copy, promote)

    def initial(self):
        one = Server('O', 'up', 1, 1, (), 1, (), ((1, 1),), ((1, 0),), 'O')
        return State((one,), Fence(1, 0, 0, 0, 0, 0, 'O'), frozenset(), 0, self.first, None)

    def spend(self, st, what):
        return st.budget._replace(**{what: getattr(st.budget, what) - 1})

    def mine(self, s, fence):
        """May this server go on from the fence?"""
        if fence.tli == 0:
            return True                         # nobody has written yet
        if (fence.tli, fence.begin) not in s.tlis:
            return False
        current = s.tlis[-1] == (fence.tli, fence.begin)
        if not current:
            return True                         # a promoted standby may lag
        if fence.wal > s.wal:
            return False
        if self.rule == 'mark':
            return fence.mark == 0 or fence.mark in s.marks
        if self.rule == 'life':
            for k, (life, begin) in enumerate(s.lives):
                if life == fence.life:
                    return k + 1 == len(s.lives) or fence.wal <= s.lives[k + 1][1]
            return False
        return True

    def moves(self, st):
        if st.bad:
            return []
        out = []

        def move(label, k, server, fault=False, **change):
            servers = st.servers[:k] + (server,) + st.servers[k + 1:]
            out.append((label, st._replace(servers=servers + change.pop('more', ()), **change), fault))

        new = max(st.fence.life, max(l[0] for s in st.servers for l in s.lives)) + 1
        mark = max([st.fence.mark] + [m for s in st.servers for m in s.marks]) + 1
        alive = [s.name for s in st.servers if s.up == 'in']
        for k, s in enumerate(st.servers):
            if s.up == 'down':
                begun = s.lives + ((new, s.wal if self.at_start else 0),)
                move('%s starts' % s.name, k, s._replace(up='up', lives=begun, wal=s.wal + 1,
                                                         flushed=s.wal + 1))
                continue
            if s.up == 'up' and s.lives[-1][1] == 0:
                # too late: the position when its worker comes
                lives = s.lives[:-1] + ((s.lives[-1][0], s.wal),)
                move("%s's worker notes where this life began: %d" % (s.name, s.wal), k,
                     s._replace(lives=lives))
            if st.budget.writes:
                row = (s.branch, s.seq, s.tlis[-1][0])
                move('%s commits row %s%d' % (s.name, s.branch, s.seq), k,
                     s._replace(rows=s.rows + (row,), seq=s.seq + 1, wal=s.wal + 1, flushed=s.wal + 1),
                     budget=self.spend(st, 'writes'))
            if s.up == 'up' and not alive and s.lives[-1][1]:
                if self.mine(s, st.fence):
                    move('%s looks at the fence of %s (%d, WAL %d): its own, enters' % (
                        s.name, st.fence.by, st.fence.seen, st.fence.wal), k, s._replace(up='in'))
                else:
                    move('%s looks at the fence of %s: not its own, idle' % (s.name, st.fence.by), k,
                         s._replace(up='idle'))
            if s.up == 'in':
                if s.seq > st.fence.seen or any(r[2] > st.fence.tli for r in s.rows):
                    self.relay(st, k, s, move)
                if st.budget.marks:
                    move('%s stores a mark, %d' % (s.name, mark), k,
                         s._replace(marks=s.marks + (mark,), wal=s.wal + 1),
                         budget=self.spend(st, 'marks'))
            if st.budget.stops and not (self.cold and s.name == 'C'):
                move('%s is stopped' % s.name, k, s._replace(up='down', flushed=s.wal), True,
                     budget=self.spend(st, 'stops'))
            if st.budget.crash:
                kept = s._replace(up='down')
                if s.wal != s.flushed:
                    kept = kept._replace(wal=s.flushed, marks=s.marks[:-1])
                move('%s crashes' % s.name, k, kept, True, budget=self.spend(st, 'crash'))
        for k, s in enumerate(st.servers):
            if st.budget.copy and s.name == 'O' and (s.up == 'down' or not self.cold):
                copy = s._replace(name='C', up='down', branch='C', wal=s.flushed,
                                  marks=s.marks[:len(s.marks) - (s.wal != s.flushed)])
                move("O's data directory is copied", k, s, True, more=(copy,),
                     budget=self.spend(st, 'copy'))
            if st.budget.promote and s.name == 'O' and len(s.rows) > 0:
                # a standby that lacks the last row; the primary is gone for good
                cut = s.rows[:-1]
                p = s._replace(name='P', up='down', branch='P', rows=cut, seq=s.seq - 1,
                               wal=s.wal - 1, flushed=s.wal - 1, tlis=s.tlis + ((2, s.wal - 1),))
                move('O is gone, a standby without its last row is promoted', k, p, True,
                     budget=self.spend(st, 'promote'))
        return out

    def relay(self, st, k, s, move):
        todo = [r for r in s.rows if r[1] >= st.fence.seen or r[2] > st.fence.tli]
        applied = st.applied | frozenset(todo)
        tli, begin = s.tlis[-1]
        flushed = s.wal
        marks = s.marks
        if not self.flushed_mark:
            flushed = s.flushed             # the id of a mark that is not flushed leaves
        fence = Fence(s.seq, tli, begin, flushed, marks[-1] if marks else 0, s.lives[-1][0], s.name)
        bad = None
        missing = [r for r in s.rows if r not in applied]
        if missing:
            bad = 'LOST: %s%d of %s is passed over' % (missing[0][:2] + (s.name,))
        move('%s relays %s' % (s.name, ['%s%d' % r[:2] for r in todo]), k, s._replace(flushed=flushed),
             fence=fence, applied=applied, bad=bad)

    def check(self, st):
        return st.bad

    def terminal(self, st):
        """A server that never had a copy beside it must not be kept out."""
        if len(st.servers) == 1 and st.servers[0].up == 'idle':
            return 'OUT: %s does not go on from its own fence' % st.servers[0].name
        if len(st.servers) > 1 and all(s.up == 'idle' for s in st.servers):
            return 'OUT: neither the original nor the copy goes on'
        return None


SCENARIOS = []


def add(name, verdict, text, deep=False, **options):
    SCENARIOS.append(scenario(name, verdict, text, lambda: Copies(**options), deep))


add('life', 'holds', 'a running server is copied, both are stopped and started', writes=3, marks=0, stops=2)
add('cold', 'holds', 'a stopped server is copied, one of them crashes', stops=2, marks=0, cold=True, crash=1)
add('promote', 'holds', 'a standby that lacks a row is promoted', writes=4, copy=0, promote=1, crash=1)
add('all', 'holds', 'copy, stops, crash, marks', deep=True, writes=4, stops=2, crash=1)
add('lsn', 'LOST', 'by timeline and position only', rule='lsn')
add('mark', 'LOST', 'and by the newest mark: the copy knows it, too', rule='mark')
add('life-late', 'LOST', 'a life is said to begin when its worker comes, after rows were committed',
    at_start=False)
add('unflushed', 'OUT', 'the id of a mark leaves before it is flushed', rule='mark', copy=0, crash=1,
    flushed_mark=False)

if __name__ == '__main__':
    main(SCENARIOS)
