"""Marks together with the relay's snapshots, and the emptying of outbox tables (PO 1, 10, 15a,
16, 17).  heal.py has more operations over an abstract relay; here the fence holds snapshots,
ids are given out anew after a crash, commits and marks may be lost with WAL that was not
flushed, and rows go away with their table.

Every transaction writes one row, into the outbox table that is current when it does:
    ('o', task, due)  ('k', task, due): offers; those with 'k' share one key
    ('r', task)       removes it: holds it first (told true), its row drops the hold
A mark (A, W): A is the snapshot of a complete fence; every own task visible in A and due by W
has left pending and hold.  An emptied table leaves E, a snapshot it was complete under, and D,
the largest due that its rows can concern.

Coming to a shard: flush (the mark in use must not be lost later); nothing is missing, or
data_loss; finish the batch that the fence is in; relay exactly to A and sweep there, if the
fence is not past it; relay; wait for the removers told true whose hold is missing; relay;
thaw.
"""
from collections import namedtuple

from search import main, scenario

State = namedtuple('State', 'tx wal flushed nxt table emptied looked red hist w clock fired '
                            'settled view budget bad')
Tx = namedtuple('Tx', 'st xid table told')
Redis = namedtuple('Redis', 'fence pend held')          # held: {(task, transaction, dead)}
Fence = namedtuple('Fence', 'prev cur pos done')
Mark = namedtuple('Mark', 'a w settled')
Emptied = namedtuple('Emptied', 'table e d offers rows')      # offers: largest due of its own
Worker = namedtuple('Worker', 'ph cur waits')
Budget = namedtuple('Budget', 'loss flush crash kill marks rotate')


class Marks:
    def __init__(self, ops, late=(), loss=0, flush=0, crash=0, kill=0, marks=2, rotate=0, clock=2,
                 rollback=True, **variant):
        self.ops, self.late, self.clock, self.rollback = ops, dict(late), clock, rollback
        self.first = Budget(loss, flush, crash, kill, marks, rotate)
        self.due = {o[1]: o[2] for o in ops if o[0] in 'ok'}
        self.tasks = tuple(sorted(self.due))
        self.keyed = {o[1] for o in ops if o[0] == 'k'}
        self.v = dict(flush_mark=True,      # the mark is flushed before it is healed with
                      one_reply=True,       # A and W come from one reply
                      complete=True,        # of a complete fence
                      sweep_held=True,      # the sweep drops old holds as well
                      sweep_at='A',         # 'A', or 'end': after everything was relayed
                      below_held=True,      # W ends before the earliest hold's due
                      fresh=True,           # emptying: rows are looked at under the lock
                      stored=True,          # emptying: by the stored mark, not by the fence
                      decide=True,          # data_loss is decided at all
                      e='mark',             # E: the 'mark' that allowed it, or the 'fresh' snapshot
                      missing='D',          # without a fence: the same 'D', or only its own 'offers'
                      d='ever')             # D: largest due of 'offers' in the table, of its
                                            # 'rows' (tasks removed, too), of all 'ever' offered
        assert not set(variant) - set(self.v)
        self.v.update(variant)

    # ---- PostgreSQL ----

    def initial(self):
        return State((Tx('N', 0, 0, False),) * len(self.ops), (), 0, (1, 0), 0, (), None,
                     Redis(None, frozenset(), frozenset()), (), Worker('T', None, frozenset()), 0,
                     (0,) * len(self.tasks), None, None, self.first, None)

    def snapshot(self, st):
        xmax = st.nxt[1] + 1
        return (xmax, frozenset(t.xid for t in st.tx if t.st == 'O' and t.xid < xmax))

    @staticmethod
    def sees(snapshot, xid):
        return snapshot is not None and xid < snapshot[0] and xid not in snapshot[1]

    def within(self, st, a, b):
        """Is everything that a sees seen by b?"""
        return all(self.sees(b, x) for x in range(1, st.nxt[0]) if self.sees(a, x))

    def rows(self, st, prev, cur):
        gone = {i for e in st.emptied for i in e.rows}
        return sorted((t.xid, i) for i, t in enumerate(st.tx) if t.st == 'C' and i not in gone
                      and self.sees(cur, t.xid) and not self.sees(prev, t.xid))

    def mark(self, st):
        """The last one that is committed."""
        for r in reversed(st.wal):
            if r[0] == 'm':
                return r[1]
        return None

    # ---- moves ----

    def moves(self, st):
        if st.bad:
            return []
        out = []

        def move(label, fault=False, **change):
            if st.budget.loss and change.get('red', st.red) != st.red and 'hist' not in change and \
               st.red not in st.hist:
                change['hist'] = st.hist + (st.red,)
            out.append((label, st._replace(**change), fault))

        for i in range(len(self.ops)):
            self.transaction(st, i, move)
        if st.clock < self.clock:
            move('time passes', clock=st.clock + 1)
        self.worker(st, move)
        self.rotation(st, move)
        self.faults(st, move)
        return out

    def put(self, state, i, **change):
        return state.tx[:i] + (state.tx[i]._replace(**change),) + state.tx[i + 1:]

    def spend(self, st, what):
        return st.budget._replace(**{what: getattr(st.budget, what) - 1})

    def transaction(self, st, i, move):
        t, op = st.tx[i], self.ops[i]
        xid, latest = st.nxt
        name = 'T%d' % i
        if t.st == 'N':
            if i in self.late and st.tx[self.late[i]].st != 'C':
                return
            change = dict(nxt=(xid + 1, latest), wal=st.wal + (('i', i, xid),),
                          tx=self.put(st, i, st='O', xid=xid, table=st.table))
            if op[0] != 'r':
                move('%s offers %s due %d, xid %d, table %d' % (name, op[1], op[2], xid, st.table), **change)
            elif op[1] in st.red.pend and st.w is not None and st.w.ph == 'T':
                red = st.red._replace(pend=st.red.pend - {op[1]},
                                      held=st.red.held | {(op[1], i, False)})
                change['tx'] = self.put(st, i, st='O', xid=xid, table=st.table, told=True)
                move('%s removes %s: held, true, xid %d, table %d' % (name, op[1], xid, st.table),
                     red=red, **change)
        elif t.st == 'O':
            wal = st.wal + (('c', i, xid),)
            move(name + ' commits', tx=self.put(st, i, st='C'), wal=wal,
                 nxt=(xid, max(latest, t.xid)), flushed=st.flushed if self.first.crash else len(wal))
            if self.rollback and op[0] == 'r':
                move(name + ' rolls back', tx=self.put(st, i, st='A'), nxt=(xid, max(latest, t.xid)))

    def apply(self, red, i, to):
        op, pend, held = self.ops[i], red.pend, red.held
        if op[0] == 'r':
            pend = pend - {op[1]}
            held = frozenset(h for h in held if h[0] != op[1])
        else:
            if op[0] == 'k':
                pend = pend - self.keyed
                held = frozenset((h[0], h[1], h[2] or h[0] in self.keyed) for h in held)
            pend = pend | {op[1]}
        return Redis(to, pend, held)

    # ---- the worker ----

    def worker(self, st, move):
        w, red = st.w, st.red
        if w is None:
            self.come(st, move)
            return
        if w.ph == 'data_loss':
            return
        if w.ph == 'T':
            self.transfer(st, move)
            self.store_mark(st, move)
        fence = red.fence
        if fence is not None and not fence.done:
            rows = [r for r in self.rows(st, fence.prev, fence.cur) if r[0] > fence.pos]
            self.page(st, move, rows, fence.prev, fence.cur)
            return
        base = fence.cur if fence else None
        if w.cur is not None:
            rows = self.rows(st, base, w.cur)
            if rows:
                self.page(st, move, rows, base, w.cur)
            else:
                self.applied(st, move)
            return
        mark = self.mark(st)
        if w.ph == 'A':
            if mark is not None and base is not None and self.within(st, mark.a, base) and \
               not self.within(st, base, mark.a) or mark is None or self.v['sweep_at'] == 'end':
                move('the fence is past the mark, or there is none', w=w._replace(ph='R'))
            else:
                move('the worker relays to the mark', w=w._replace(cur=mark.a))
            return
        if w.ph == 'B' and any(st.tx[i].st == 'O' for i in w.waits):
            return
        cur = self.snapshot(st)
        restore = any(self.sees(cur, st.tx[h[1]].xid) or st.tx[h[1]].st != 'O' for h in red.held)
        if w.ph == 'T' and not restore and not self.rows(st, base, cur):
            return
        move('the worker takes a snapshot (xmax %d, running %s), flushes' % (cur[0], sorted(cur[1])),
             w=w._replace(ph={'B': 'Z'}.get(w.ph, w.ph), cur=cur), flushed=len(st.wal))

    def come(self, st, move):
        """Start, or back after a loss: is everything there that is missing in Redis?"""
        mark, fence = self.mark(st), st.red.fence
        found = None if fence is None else fence.cur if fence.done else fence.prev
        change = {}
        if self.v['flush_mark']:
            change['flushed'] = len(st.wal)
        if self.v['decide']:
            for e in st.emptied:
                d = e.offers if found is None and self.v['missing'] == 'offers' else e.d
                if not self.within(st, e.e, found) and d > (mark.w if mark else -1):
                    move('table %d was emptied, tasks due up to %d are missing: data_loss' % (e.table, d),
                         w=Worker('data_loss', None, frozenset()))
                    return
        move('the worker enters, fence %s' % (found,), w=Worker('A', None, frozenset()), **change)

    def page(self, st, move, rows, prev, cur):
        if not rows:
            move('the batch is closed', red=st.red._replace(fence=Fence(prev, cur, 0, True)))
            return
        xid, i = rows[0]
        last = len(rows) == 1
        bad = None
        if not any(r[0] == 'c' and r[1] == i for r in st.wal[:st.flushed]):
            bad = 'G11: a row is applied whose commit is not flushed'
        move('row of T%d %s is applied' % (i, self.ops[i]), bad=bad,
             red=self.apply(st.red, i, Fence(prev, cur, 0 if last else xid, last)))

    def applied(self, st, move):
        w, red = st.w, st.red
        mark = self.mark(st)
        if red.fence is None or red.fence.cur != w.cur:
            red = red._replace(fence=Fence(None, w.cur, 0, True))
        if w.ph == 'A':
            self.sweep(st, red, mark, move, 'R')
            return
        # all of w.cur is applied: holds whose transaction has ended go back
        pend, held = set(red.pend), set()
        for h in red.held:
            t = st.tx[h[1]]
            if self.sees(w.cur, t.xid) or t.st in 'AL':
                if not h[2]:
                    pend.add(h[0])
            else:
                held.add(h)
        red = red._replace(pend=frozenset(pend), held=frozenset(held))
        if w.ph == 'R':
            stands = {h[1] for h in red.held}
            waits = frozenset(i for i, t in enumerate(st.tx) if t.st == 'O' and t.told and i not in stands)
            move('all is applied; the worker waits for %s' % sorted(waits), red=red,
                 w=Worker('B', None, waits))
        elif w.ph == 'Z':
            if self.v['sweep_at'] == 'end' and mark is not None:
                self.sweep(st, red, mark, move, 'T')
            else:
                move('all is applied, the worker thaws', red=red, w=Worker('T', None, frozenset()), hist=())
        else:
            move('all of the snapshot is applied', red=red, w=w._replace(cur=None))

    def sweep(self, st, red, mark, move, ph):
        pend = frozenset(x for x in red.pend if self.due[x] > mark.w)
        held = frozenset(h for h in red.held if self.due[h[0]] > mark.w or not self.v['sweep_held'])
        move('sweep at the mark (xmax %d, W %d): %s' % (mark.a[0], mark.w, sorted(red.pend - pend)),
             red=red._replace(pend=pend, held=held), w=Worker(ph, None, frozenset()))

    def transfer(self, st, move):
        red, mark = st.red, self.mark(st)
        for x in sorted(red.pend):
            n = self.tasks.index(x)
            if self.due[x] > st.clock or st.fired[n] > 1:
                continue
            bad = None
            if mark is not None and x in mark.settled:
                bad = 'REPEAT: %s was settled by the mark, it is transferred again' % x
            for i, t in enumerate(st.tx):
                op = self.ops[i]
                if t.st == 'C' and op[0] == 'r' and op[1] == x and t.told:
                    bad = 'G4: T%d removed %s, was told true and has committed; it is transferred' % (i, x)
                first = [j for j, o in enumerate(self.ops) if o[1] == x and o[0] == 'k']
                if op[0] == 'k' and first and self.late.get(i) == first[0] and t.st == 'C' and \
                   red.fence.done and self.sees(red.fence.cur, t.xid):
                    bad = 'KEY: %s is transferred after what replaced it was applied' % x
            move('%s is transferred' % x, red=red._replace(pend=red.pend - {x}), bad=bad,
                 fired=st.fired[:n] + (st.fired[n] + 1,) + st.fired[n + 1:],
                 tx=tuple(t._replace(told='fired') if t.st == 'O' and t.told and self.ops[i][1] == x else t
                          for i, t in enumerate(st.tx)))

    def store_mark(self, st, move):
        red = st.red
        if not st.budget.marks or red.fence is None:
            return
        if self.v['complete'] and not red.fence.done:
            return
        w = min([st.clock] + [self.due[x] - 1 for x in red.pend] +
                [self.due[h[0]] - 1 for h in red.held if self.v['below_held']])
        if not self.v['one_reply']:
            if st.view is None:
                move('a reply tells W %d' % w, view=w)
                return
            w = st.view
        a = red.fence.cur
        settled = frozenset(x for n, x in enumerate(self.tasks) if st.fired[n] and self.due[x] <= w and
                            any(self.ops[i][1] == x and self.sees(a, t.xid) and t.st == 'C'
                                for i, t in enumerate(st.tx)))
        mark = Mark(a, w, settled)
        if mark != self.mark(st):
            move('mark stored (xmax %d, W %d)' % (a[0], w), wal=st.wal + (('m', mark, 0),), view=None,
                 budget=self.spend(st, 'marks'))

    # ---- emptying ----

    def rotation(self, st, move):
        if not st.budget.rotate:
            return
        if st.w is None or st.w.ph != 'T':
            return
        if st.table < 1:
            move('new rows go to table %d' % (st.table + 1), table=st.table + 1)
        mark = self.mark(st)
        for table in range(2):
            mine = [i for i, t in enumerate(st.tx) if t.st in 'OC' and t.table == table
                    and not any(i in e.rows for e in st.emptied)]
            if table == st.table and not self.free(st) or not mine:
                continue
            known = self.snapshot(st)
            if not self.v['fresh']:
                if st.looked is None:
                    move('the worker looks at its tables, without a lock', looked=known)
                    continue
                known = st.looked
            if any(st.tx[i].st == 'O' for i in mine):
                continue                    # the lock is not to be had
            a = mark.a if mark else None
            if not self.v['stored'] and st.red.fence is not None and st.red.fence.done:
                a = st.red.fence.cur
            if all(self.sees(a, st.tx[i].xid) for i in mine if self.sees(known, st.tx[i].xid)):
                d, offers = 0, max([self.due[self.ops[i][1]] for i in mine if self.ops[i][0] != 'r'], default=0)
                for i, t in enumerate(st.tx):
                    op = self.ops[i]
                    if op[0] == 'r':
                        due = self.due[op[1]] if self.v['d'] != 'offers' else 0
                    else:
                        due = self.due[op[1]]
                    if i in mine or (self.v['d'] == 'ever' and t.st == 'C' and self.sees(a, t.xid)):
                        d = max(d, due)
                wal = st.wal + (('e', table, 0),)
                e = a if self.v['e'] == 'mark' and a else known
                move('table %d is emptied, E xmax %d, D %d' % (table, e[0], d), wal=wal,
                     flushed=len(wal), emptied=st.emptied + (Emptied(table, e, d, offers, frozenset(mine)),),
                     looked=None, budget=self.spend(st, 'rotate'))

    def free(self, st):
        """The current table is left for a third one when everything is in it."""
        return all(t.st in 'CAL' for t in st.tx)

    # ---- faults ----

    def faults(self, st, move):
        if st.budget.loss:
            for back in st.hist:
                if back != st.red:
                    move('Redis goes back: pending %s, held %s, fence %s' % (
                        sorted(back.pend), sorted(h[0] for h in back.held),
                        back.fence and (back.fence.cur[0], back.fence.done)), True, red=back, w=None,
                        hist=(), budget=self.spend(st, 'loss'))
        if st.budget.flush:
            move('FLUSHALL', True, red=Redis(None, frozenset(), frozenset()), w=None, hist=(),
                 budget=self.spend(st, 'flush'))
        if st.budget.kill and st.w is not None:
            move('kill -9 of the worker', True, w=None, budget=self.spend(st, 'kill'))
        if st.budget.crash:
            for kept in range(st.flushed, len(st.wal) + 1):
                wal = st.wal[:kept]
                tx = []
                for i, t in enumerate(st.tx):
                    if t.st == 'O':
                        t = t._replace(st='A')
                    elif t.st == 'C' and not any(r[0] == 'c' and r[1] == i for r in wal):
                        t = t._replace(st='L')
                    tx.append(t)
                xid = max([st.tx[r[1]].xid for r in wal if r[0] in 'ic'], default=0) + 1
                move('PostgreSQL crashes, WAL kept %d of %d' % (kept, len(st.wal)), True, tx=tuple(tx),
                     wal=wal, flushed=kept, nxt=(xid, xid - 1), w=None, looked=None, view=None,
                     budget=self.spend(st, 'crash'))
            if st.flushed < len(st.wal):
                move('the WAL writer flushes', flushed=len(st.wal))

    # ---- what must be true ----

    def check(self, st):
        if st.bad:
            return st.bad
        for i, t in enumerate(st.tx):
            if t.told == 'fired' and t.st == 'C' and any(r[0] == 'c' and r[1] == i for r in st.wal[:st.flushed]):
                return 'G4: %s was transferred while T%d had its true' % (self.ops[i][1], i)
        calm = st.budget.loss == self.first.loss and st.budget.flush == self.first.flush
        if calm:
            if max(st.fired) > 1:
                return 'TWICE: a task is transferred twice, nothing was lost'
            if st.w is not None and st.w.ph == 'data_loss':
                return 'ALARM: data_loss, but nothing was lost'
        return None

    def terminal(self, st):
        if st.w is not None and st.w.ph == 'data_loss' or any(t.st == 'L' for t in st.tx):
            return None
        for i, t in enumerate(st.tx):
            op = self.ops[i]
            if t.st != 'C' or op[0] == 'r' or st.fired[self.tasks.index(op[1])]:
                continue
            over = any(u.st == 'C' and (p[0] == 'r' and p[1] == op[1] or
                                        op[0] == 'k' and p[0] == 'k' and u.xid > t.xid)
                       for p, u in zip(self.ops, st.tx))
            if not over:
                return 'LOST: %s is committed and never transferred' % op[1]
        return None


X, LATE, FAR = ('o', 'X', 1), ('o', 'L', 1), ('o', 'F', 2)
REMOVE = ('r', 'X')
KEYS = [('k', 'F', 2), ('k', 'X', 1)]
SCENARIOS = []


def add(name, verdict, text, ops, deep=False, **options):
    SCENARIOS.append(scenario(name, verdict, text, lambda: Marks(ops, **options), deep))


# right
add('late', 'holds', 'X, a late offer; Redis goes back', [X, LATE], loss=1, clock=1)
add('remove', 'holds', 'X removed; Redis goes back, crash', [X, REMOVE], loss=1, crash=1, clock=1)
add('empty', 'holds', 'a table is emptied; Redis goes back', [X, FAR], late={1: 0}, loss=1, rotate=1, marks=1)
add('empty-remove', 'holds', 'a removed task and its removal in two tables', [FAR, ('r', 'F')], loss=1, rotate=2)
add('empty-key', 'holds', 'a replaced task and what replaced it in two tables', KEYS, late={1: 0}, loss=1, rotate=2,
    marks=1)
add('empty-flushall', 'holds', 'a table is emptied; FLUSHALL', [X, FAR], late={1: 0}, flush=1, rotate=1, marks=1)
# right, larger
add('late-crash', 'holds', 'X, a late offer; Redis goes back, crash', [X, LATE], deep=True, loss=1, crash=1, clock=1)
add('empty-crash', 'holds', 'a table is emptied; Redis goes back, crash', [X, FAR], deep=True, late={1: 0}, loss=1,
    crash=1, rotate=1, marks=1)
add('empty2', 'holds', 'two tables are emptied; Redis goes back twice', [X, FAR], deep=True, late={1: 0}, loss=2,
    rotate=2)
add('empty-key2', 'holds', 'replaced; Redis goes back and FLUSHALL', KEYS, deep=True, late={1: 0}, loss=1, flush=1,
    rotate=2)
# wrong: the mark
add('mark-lost', 'REPEAT', 'the mark is not flushed before it is healed with', [X, LATE], late={1: 0}, loss=1,
    crash=1, clock=1, flush_mark=False)
add('two-replies', 'REPEAT', 'A and W from two replies', [X, LATE], loss=1, one_reply=False)
add('incomplete', 'LOST', 'A from a fence inside a batch', [X, LATE], loss=1, complete=False)
add('at-end', 'LOST', 'the sweep comes after everything was relayed', [X, LATE], loss=1, sweep_at='end')
add('held-ignored', 'LOST', 'W does not stop at a held task', [X, REMOVE], loss=1, below_held=False)
add('old-holds', 'REPEAT', 'the sweep leaves holds', [X, REMOVE], loss=1, sweep_held=False)
# wrong: emptying
add('no-decision', 'LOST', 'nobody asks whether something is missing', [X, FAR], late={1: 0}, loss=1, rotate=1,
    decide=False)
add('stale-look', 'LOST', 'rows looked at before the lock', [X, FAR], loss=1, rotate=1, fresh=False)
add('by-fence', 'LOST', 'emptied by the fence instead of the stored mark', [X, FAR], late={1: 0}, loss=1, rotate=1,
    marks=1, stored=False)
add('fresh-e', 'ALARM', 'E is the snapshot under the lock: data_loss after any restart', [X, FAR], kill=1, rotate=1,
    e='fresh')
add('d-missing', 'G4', 'that rule only where a fence is found: after FLUSHALL an older table may still hold the offer',
    [FAR, ('r', 'F')], flush=1, rotate=1, missing='offers')
add('d-offers', 'G4', 'D only of offers in the table: its removals concern others', [FAR, ('r', 'F')], loss=1,
    rotate=2, d='offers')
add('d-rows', 'KEY', 'D only of rows in the table: what they replaced was due later', KEYS, late={1: 0}, loss=1,
    rotate=2, marks=1, d='rows')

if __name__ == '__main__':
    main(SCENARIOS)
