"""The relay: outbox rows into Redis, each once, through crashes, kills, cut connections,
refused pages, Redis going back, failover (PO 1 to 5).  No holds here (holds.py), no marks
(marks.py).

The fence in Redis: snapshot `prev` up to which everything is applied; inside an unfinished
batch also its target `cur` and the position reached; complete or not; and who wrote it.  A
page is one row: (fence it expects, fence after it, row).  WAL up to `flushed` survives a
crash; of the rest any prefix may.  Transaction ids and numbers that are not in what survives
are given out again.
"""
from collections import namedtuple

from search import main, scenario

State = namedtuple('State', 'tx wal flushed tli history worker net redis past fired nxt bad old '
                            'position budget')
# st: N new, O open, P prepared, C committed, A aborted, L commit lost; rows: ((number, op)..)
Tx = namedtuple('Tx', 'st xid rows tli step')
Snapshot = namedtuple('Snapshot', 'tli xmax running')
Fence = namedtuple('Fence', 'prev cur pos done writer')
Redis = namedtuple('Redis', 'fence pending')
Worker = namedtuple('Worker', 'fence cur flushed')
Page = namedtuple('Page', 'conn frm to row')            # conn 1 lives, others are cut, in order
Next = namedtuple('Next', 'xid seq latest')
Budget = namedtuple('Budget', 'loss flushall crash kill drop error failover back empty')

START = (0, 0)


class Relay:
    def __init__(self, tx, after=(), loss=0, flushall=0, crash=0, kill=0, drop=0, error=0, failover=0,
                 back=0, empty=0, asynchronous=True, aborts=True, pipe=2, two_phase=False, fires=True,
                 serial=False, **variant):
        self.ops, self.after = tx, dict(after)
        self.first = Budget(loss, flushall, crash, kill, drop, error, failover, back, empty)
        self.asynchronous, self.aborts, self.pipe = asynchronous, aborts, pipe
        self.two_phase, self.fires, self.serial = two_phase, fires, serial
        offers = [o for t in tx for o in t if o != 'undo' and o[0] == 'offer']
        self.tasks = sorted(o[1] for o in offers)
        self.key = {o[1]: o[2] for o in offers if len(o) > 2}
        self.v = dict(
            flush='after',          # to a position read 'after' the snapshot, 'before', only for
                                    # 'rows' (not for empty rounds), None
            g11=True,               # a row applied before its commit is flushed is an error by itself
            stamped=True,           # rows carry their timeline
            predecessor=True,       # a page is applied only behind its predecessor
            order='transaction',    # (last number of the transaction, number), or 'number'
            prepared='wait+union',  # an unfinished batch waits for prepared transactions that it
                                    # calls ended; what prev saw stays seen. 'number': taken from
                                    # the list by number; None
            guard='identity',       # whose fence: timeline 'identity', timeline 'number', None
            guard_always=True,      # asked at every adoption, not at the start only
            stamp_writer=True)      # a page that only finishes a batch stamps the writer, too
        assert not set(variant) - set(self.v)
        self.v.update(variant)

    def initial(self):
        return State((Tx('N', 0, (), 0, 0),) * len(self.ops), (), 0, 1, ((1, 0),), None, (),
                     Redis(None, frozenset()), (), (0,) * len(self.tasks), Next(1, 1, 0), None, None,
                     None, self.first)

    # ---- snapshots and rows ----

    def snapshot(self, st):
        xmax = st.nxt.latest + 1
        return Snapshot(st.tli, xmax, frozenset(t.xid for t in st.tx if t.st in 'OP' and t.xid < xmax))

    def sees(self, snapshot, t):
        if snapshot is None or (self.v['stamped'] and t.tli > snapshot.tli):
            return False
        return t.xid < snapshot.xmax and t.xid not in snapshot.running

    def rows(self, st, prev, cur):
        found = []
        for i, t in enumerate(st.tx):
            if t.st == 'C' and t.rows and self.sees(cur, t) and not self.sees(prev, t):
                last = max(number for number, _ in t.rows) if self.v['order'] == 'transaction' else 0
                found += [((last, number), i, op) for number, op in t.rows]
        return sorted(found)

    def unsure(self, st, prev, cur):
        """PO 3a: a transaction that cur calls ended is prepared on this server."""
        return self.v['prepared'] is not None and self.v['prepared'].startswith('wait') and any(
            t.st == 'P' and self.sees(cur, t) and not self.sees(prev, t) for t in st.tx)

    def joined(self, st, cur, prev):
        """What prev saw stays seen, whatever runs here under that number."""
        rule = self.v['prepared'] or ''
        if prev is None or cur is None:
            return cur
        if rule == 'number':
            running = frozenset(x for x in cur.running if not (x < prev.xmax and x not in prev.running))
        elif rule.endswith('union'):
            running = frozenset(x for x in cur.running if not any(
                t.xid == x and t.st in 'OP' and self.sees(prev, t) for t in st.tx))
        else:
            return cur
        return cur._replace(running=running)

    def foreign(self, st, fence):
        if fence is None or self.v['guard'] is None:
            return False
        if self.v['guard'] == 'number':
            return fence.writer[0] > st.tli
        return fence.writer not in st.history

    # ---- moves ----

    def moves(self, st):
        if st.bad:
            return []
        out = []

        def move(label, fault=False, **change):
            if st.budget.loss and change.get('redis', st.redis) != st.redis and 'past' not in change:
                change['past'] = st.past + (st.redis,)
            out.append((label, st._replace(**change), fault))

        for i in range(len(st.tx)):
            self.transaction(st, i, move)
        self.worker(st, move)
        self.network(st, move)
        if self.fires:
            for x in st.redis.pending:
                n = self.tasks.index(x)
                if st.fired[n] < 2:
                    move('%s fires' % x, redis=st.redis._replace(pending=st.redis.pending - {x}),
                         fired=st.fired[:n] + (st.fired[n] + 1,) + st.fired[n + 1:])
        self.faults(st, move)
        return out

    def put(self, state, i, **change):
        return state.tx[:i] + (state.tx[i]._replace(**change),) + state.tx[i + 1:]

    def spend(self, st, what):
        return st.budget._replace(**{what: getattr(st.budget, what) - 1})

    def transaction(self, st, i, move):
        t, ops, name, nxt = st.tx[i], self.ops[i], 'T%d' % i, st.nxt
        if t.st == 'N' and (i not in self.after or st.tx[self.after[i]].st == 'C'):
            if not ops:
                move('%s takes xid %d, writes no row and no WAL yet' % (name, nxt.xid),
                     tx=self.put(st, i, st='O', xid=nxt.xid, tli=st.tli), nxt=nxt._replace(xid=nxt.xid + 1))
            else:
                move('%s writes %s, xid %d, number %d' % (name, ops[0][:2], nxt.xid, nxt.seq),
                     tx=self.put(st, i, st='O', xid=nxt.xid, tli=st.tli, rows=((nxt.seq, 0),), step=1),
                     wal=st.wal + (('row', i, nxt.xid, nxt.seq),),
                     nxt=nxt._replace(xid=nxt.xid + 1, seq=nxt.seq + 1))
        elif t.st == 'O':
            if t.step < len(ops):
                if ops[t.step] == 'undo':
                    move('%s rolls back to the savepoint, its last row is gone' % name,
                         tx=self.put(st, i, rows=t.rows[:-1], step=t.step + 1))
                else:
                    move('%s writes %s, number %d' % (name, ops[t.step][:2], nxt.seq),
                         tx=self.put(st, i, rows=t.rows + ((nxt.seq, t.step),), step=t.step + 1),
                         wal=st.wal + (('row', i, t.xid, nxt.seq),), nxt=nxt._replace(seq=nxt.seq + 1))
            elif self.two_phase and i == 0:
                wal = st.wal + (('prepare', i, t.xid, 0),)
                move('%s PREPARE TRANSACTION, flushed' % name, tx=self.put(st, i, st='P'), wal=wal,
                     flushed=len(wal))
            else:
                wal = st.wal + (('commit', i, t.xid, 0),)
                move('%s commits' % name, tx=self.put(st, i, st='C'), wal=wal,
                     flushed=st.flushed if self.asynchronous else len(wal),
                     nxt=nxt._replace(latest=max(nxt.latest, t.xid)))
            if self.aborts:
                move('%s aborts' % name, tx=self.put(st, i, st='A'),
                     wal=st.wal + (('abort', i, t.xid, 0),), nxt=nxt._replace(latest=max(nxt.latest, t.xid)))
        elif t.st == 'P':
            wal = st.wal + (('commit', i, t.xid, 0),)
            move('%s COMMIT PREPARED, flushed' % name, tx=self.put(st, i, st='C'), wal=wal, flushed=len(wal),
                 nxt=nxt._replace(latest=max(nxt.latest, t.xid)))

    # ---- the worker ----

    def worker(self, st, move):
        w = st.worker
        if w is None:
            if not self.foreign(st, st.redis.fence):
                move('the worker starts, reads the fence', worker=Worker(st.redis.fence, None, True))
            return
        live = [p for p in st.net if p.conn == 1]
        fence = live[-1].to if live else w.fence        # as it will be when all pages are through
        if w.cur is None and (fence is None or fence.done):
            prev = fence.cur if fence else None
            cur = self.joined(st, self.snapshot(st), prev)
            rows = self.rows(st, prev, cur)
            if rows or (st.budget.empty and cur != prev):
                label = 'the worker takes a snapshot (xmax %d, running %s)' % (cur.xmax, sorted(cur.running))
                if self.v['flush'] == 'before':
                    if st.position is None:
                        move('the worker reads the insert position', position=len(st.wal))
                    else:
                        move(label + ', flushes to the position read before', worker=w._replace(cur=cur),
                             flushed=max(st.flushed, st.position), position=None)
                elif self.v['flush'] is None or (self.v['flush'] == 'rows' and not rows):
                    move(label + ', no flush', worker=w._replace(cur=cur))
                else:
                    move(label, worker=w._replace(cur=cur, flushed=False))
        if not w.flushed:
            move('the worker reads the insert position and flushes to it', flushed=len(st.wal),
                 worker=w._replace(flushed=True))
        elif len(live) < self.pipe:
            self.send(st, fence, move)
        if not live and st.redis.fence != w.fence:
            self.adopt(st, 'a reply shows the fence elsewhere', move)

    def send(self, st, fence, move):
        w = st.worker
        writer = st.history[-1]
        if fence is not None and not fence.done:
            prev, cur, pos, fresh = fence.prev, fence.cur, fence.pos, False
        else:
            prev, cur, pos, fresh = fence.cur if fence else None, w.cur, START, True
            if cur is None or cur == prev:
                return
        rows = [r for r in self.rows(st, prev, cur) if r[0] > pos]
        unsure = self.unsure(st, prev, cur)
        if not rows:
            if fresh and st.budget.empty:
                to = Fence(prev, cur, START, True, writer)
                self.page(st, move, 'an empty round', fence, to, None, True, budget=self.spend(st, 'empty'))
            elif not fresh and not unsure:
                to = Fence(prev, cur, START, True, writer if self.v['stamp_writer'] else fence.writer)
                self.page(st, move, 'the end of the batch', fence, to, None, False)
            return
        place, i, op = rows[0]
        last = len(rows) == 1 and not unsure
        to = Fence(prev, cur, START if last else place, last, writer)
        self.page(st, move, 'row %s of T%d' % (self.ops[i][op][:2], i), fence, to, (i, op), last)

    def page(self, st, move, what, frm, to, row, last, **change):
        w = st.worker
        move('the worker sends ' + what, net=st.net + (Page(1, frm, to, row),),
             worker=w._replace(cur=None if last else w.cur), **change)

    def adopt(self, st, why, move, **change):
        fence = change.get('redis', st.redis).fence
        if self.v['guard_always'] and self.foreign(st, fence):
            move(why + ': written by another branch, the worker stops', worker=None, **change)
        else:
            move(why + ': the worker goes on from it', worker=Worker(fence, None, True), **change)

    def apply(self, redis, row, to):
        pending = redis.pending
        if row is not None:
            op = self.ops[row[0]][row[1]]
            if op[0] == 'offer':
                key = self.key.get(op[1])
                pending = frozenset(y for y in pending if key is None or self.key.get(y) != key) | {op[1]}
            else:
                pending = pending - {op[1]}
        return Redis(to, pending)

    def network(self, st, move):
        turns, seen = [], set()
        for k, page in enumerate(st.net):
            if page.conn not in seen:           # each connection in its order
                seen.add(page.conn)
                turns.append(k)
        for k in turns:
            page, net = st.net[k], st.net[:k] + st.net[k + 1:]
            live = page.conn == 1
            name = 'a page' if page.row is None else 'row %s of T%d' % (
                self.ops[page.row[0]][page.row[1]][:2], page.row[0])
            if st.budget.error and live:
                move('Redis refuses %s (OOM, BUSY), the next one may run' % name, True, net=net,
                     budget=self.spend(st, 'error'))
            if st.redis.fence == page.frm or not self.v['predecessor']:
                bad = None
                if page.row is not None and live:
                    i = page.row[0]
                    if st.tx[i].st != 'C':
                        bad = 'G1: a row of T%d is applied, which is not committed' % i
                    elif self.v['g11'] and not any(r[0] == 'commit' and r[1] == i
                                                   for r in st.wal[:st.flushed]):
                        bad = 'G11: a row of T%d is applied, its commit is not flushed' % i
                worker = st.worker._replace(fence=page.to) if live else st.worker
                move('Redis applies %s%s' % (name, '' if live else ' (zombie)'), net=net, worker=worker,
                     redis=self.apply(st.redis, page.row, page.to), bad=bad)
            elif live:
                self.adopt(st, 'Redis refuses %s: another predecessor' % name, move, net=net)
            else:
                move('Redis refuses %s (zombie)' % name, net=net)

    # ---- faults ----

    @staticmethod
    def cut(net):
        """The live connection is cut; what is in it may still run."""
        dead = min([p.conn for p in net] + [1]) - 1
        return tuple(p._replace(conn=dead) if p.conn == 1 else p for p in net)

    def faults(self, st, move):
        b = st.budget
        gone = dict(worker=None, position=None)
        if b.kill and st.worker is not None:
            move('kill -9 of the worker', True, net=self.cut(st.net), budget=self.spend(st, 'kill'), **gone)
        if b.drop and st.worker is not None and any(p.conn == 1 for p in st.net):
            move('the connection is cut, requests may still run', True, net=self.cut(st.net),
                 budget=self.spend(st, 'drop'), **gone)
            move('the connection is cut, requests are gone', True,
                 net=tuple(p for p in st.net if p.conn != 1), budget=self.spend(st, 'drop'), **gone)
        if b.crash:
            for kept in range(st.flushed, len(st.wal) + 1):
                self.restart(st, move, kept, 'PostgreSQL crashes', budget=self.spend(st, 'crash'))
        if b.failover:
            for kept in range(st.flushed + 1):
                tli = st.tli + 1
                branch = st.history[-1][1] * 10 + (1 if st.old is None else 2)
                old = st.old
                if b.back:
                    old = (st.tx, st.wal, st.flushed, st.tli, st.history)
                self.restart(st, move, kept, 'failover', budget=self.spend(st, 'failover'), tli=tli,
                             history=st.history + ((tli, branch),), old=old)
        if b.back and st.old is not None and b.failover < self.first.failover:
            self.go_back(st, move)
        if b.loss:
            for back in set(st.past):
                move('Redis goes back: pending %s, fence %s' % (sorted(back.pending), back.fence and (
                    back.fence.cur.xmax, back.fence.done)), True, redis=back, past=(),
                    budget=self.spend(st, 'loss'))
        if b.flushall and st.redis.fence is not None:
            move('FLUSHALL', True, redis=Redis(None, frozenset()), past=(), budget=self.spend(st, 'flushall'))
        if self.asynchronous and st.flushed < len(st.wal):
            move('the WAL writer flushes', flushed=len(st.wal))

    @staticmethod
    def numbers(wal):
        xid = max([r[2] for r in wal], default=0) + 1
        return Next(xid, max([r[3] for r in wal], default=0) + 1, xid - 1)

    def restart(self, st, move, kept, what, **change):
        wal = st.wal[:kept]
        tx = []
        for i, t in enumerate(st.tx):
            commit = any(r[:2] == ('commit', i) for r in wal)
            prepared = any(r[:2] == ('prepare', i) for r in wal)
            if t.st == 'P' and not commit:
                t = t._replace(st='P' if prepared else 'A')
            elif t.st == 'C' and not commit:
                t = t._replace(st='P' if prepared else 'L')
            elif t.st == 'O':
                t = t._replace(st='A')
            tx.append(t)
        move('%s, WAL kept %d of %d (flushed %d)' % (what, kept, len(st.wal), st.flushed), True, tx=tuple(tx),
             wal=wal, flushed=kept, worker=None, position=None, net=self.cut(st.net), nxt=self.numbers(wal),
             **change)

    def go_back(self, st, move):
        """Operators start the old primary again as it was, without rewinding it."""
        tx0, wal, flushed, tli, history = st.old
        wal = wal[:flushed]
        tx = []
        for i, t in enumerate(tx0):
            commit = any(r[:2] == ('commit', i) for r in wal)
            if t.st == 'C' and not commit or t.st == 'N' and st.tx[i].st != 'N':
                t = (t if t.st == 'C' else st.tx[i])._replace(st='L')
            elif t.st == 'O':
                t = t._replace(st='A')
            tx.append(t)
        move('back to the old primary, not rewound (timeline %d)' % tli, True, tx=tuple(tx), wal=wal,
             flushed=flushed, tli=tli, history=history, worker=None, position=None, net=self.cut(st.net),
             budget=self.spend(st, 'back'), nxt=self.numbers(wal))

    # ---- what must be true ----

    def check(self, st):
        if st.bad:
            return st.bad
        if st.budget.loss == self.first.loss and st.budget.flushall == self.first.flushall:
            for n, x in enumerate(self.tasks):
                if st.fired[n] > 1:
                    return 'TWICE: %s fired twice, Redis lost nothing' % x
        return None

    def terminal(self, st):
        if st.worker is None:
            return None                     # it stands still on purpose: another branch's fence
        lost = any(t.st == 'L' for t in st.tx)
        done = [i for i, t in enumerate(st.tx) if t.st == 'C']
        for i in done:
            for number, op in st.tx[i].rows:
                if self.ops[i][op][0] != 'offer':
                    continue
                x = self.ops[i][op][1]
                over = [k for k, t in enumerate(st.tx) if t.st in 'CL' for _, o in t.rows
                        if (k, o) != (i, op) and self.ends(self.ops[k][o], x)]
                if not over and not st.fired[self.tasks.index(x)] and x not in st.redis.pending:
                    return 'LOST: %s is committed, neither pending nor fired' % x
                if x in st.redis.pending and not lost and any(
                        st.tx[k].st == 'C' and self.after.get(k) == i for k in over):
                    return 'ORDER: %s is pending although a later transaction removed it' % x
        if self.serial and not lost and len(done) == 2 and all(len(st.tx[i].rows) == 2 for i in done):
            ends = {self.key[x]: x[0] for x in st.redis.pending}
            if len(set(ends.values())) != 1 or len(ends) != 2:
                return 'ORDER: the keys end with different transactions: %s' % ends
        return None

    def ends(self, op, x):
        if op[0] == 'remove':
            return op[1] == x
        return op[1] != x and self.key.get(x) is not None and self.key.get(op[1]) == self.key[x]


X, Z, V = [('offer', 'X')], [('offer', 'Z')], [('offer', 'V')]
OFF = [('remove', 'X')]
A = [('offer', 'a1', 1), ('offer', 'a2', 2)]
B = [('offer', 'b1', 1), ('offer', 'b2', 2)]
UNDO = [('offer', 'a1', 1), ('offer', 'a2', 2), ('offer', 'ax', 3), 'undo']
SCENARIOS = []


def add(name, verdict, text, tx, deep=False, **options):
    SCENARIOS.append(scenario(name, verdict, text, lambda: Relay(tx, **options), deep))


SYNC = dict(asynchronous=False, aborts=False)
ONE = dict(pipe=1, aborts=False)

# right
add('crash', 'holds', 'crash, two pages on their way', [X, Z], crash=1, aborts=False)
add('loss', 'holds', 'Redis goes back, crash', [X, Z], crash=1, loss=1, **ONE)
add('flushall', 'holds', 'FLUSHALL, crash', [X, Z], flushall=1, crash=1, **ONE)
add('remove', 'holds', 'offer, remove; Redis goes back, kill', [X, OFF], after={1: 0}, loss=1, kill=1, **SYNC)
add('error', 'holds', 'a page is refused, the next one is on its way', [X, Z], error=1, drop=1, **SYNC)
add('empty', 'holds', 'an empty round moves the fence, flushed; crash', [[], Z], crash=1, empty=1, kill=1,
    aborts=False)
add('order', 'holds', 'two transactions on two keys, crash', [A, B], fires=False, serial=True, crash=1, **ONE)
add('prepared', 'holds', 'prepared, failover loses COMMIT PREPARED', [X, Z], failover=1, two_phase=True,
    asynchronous=False, **ONE)
add('failback', 'holds', 'failover, back to the old primary, failover', [X, Z], deep=True,
    asynchronous=False, failover=2, back=1, fires=False, **ONE)
add('failback1', 'holds', 'failover, back to the old primary', [X, Z], asynchronous=False, failover=1, back=1,
    fires=False, **ONE)
# right, larger
add('crash2', 'holds', 'two crashes, kill, cut, refused', [X, Z], deep=True, crash=2, kill=1, drop=1, error=1)
add('loss2', 'holds', 'Redis goes back twice, crash, kill', [X, Z], deep=True, crash=1, kill=1, loss=2)
add('remove2', 'holds', 'three rows, Redis goes back twice, kill', [X, OFF, Z], deep=True, after={1: 0}, loss=2,
    kill=1, **SYNC)
add('flushall3', 'holds', 'three rows, FLUSHALL, crash', [X, OFF, Z], deep=True, after={1: 0}, flushall=1,
    crash=1, **ONE)
add('undo', 'holds', 'a savepoint rolled back, crash, kill', [UNDO, B], deep=True, fires=False, serial=True,
    crash=1, kill=1, **ONE)
add('prepared-crash', 'holds', 'prepared, failover and crash', [X, Z], deep=True, failover=1, two_phase=True,
    crash=1, **ONE)
add('failback3', 'holds', 'three rows, failover and back', [X, Z, V], deep=True, asynchronous=False, failover=1,
    back=1, fires=False, **ONE)
# wrong
add('no-flush', 'G11', 'no flush', [X, Z], flush=None, crash=1)
add('no-flush-lost', 'LOST', 'no flush: ids given out again', [X, Z], flush=None, crash=1, g11=False)
add('flush-before', 'G11', 'flush to a position read before the snapshot', [X, Z], flush='before', crash=1)
add('empty-no-flush', 'LOST', 'an empty round moves the fence without flush', [[], Z], flush='rows', crash=1,
    empty=1)
add('no-predecessor', 'LOST', 'pages do not name their predecessor, one is refused', [X, Z], predecessor=False,
    error=1, **SYNC)
add('by-number', 'ORDER', 'ordered by number only', [A, B], order='number', fires=False, serial=True, **SYNC)
add('not-stamped', 'LOST', 'rows do not carry their timeline', [X, Z], stamped=False, failover=1, **SYNC)
add('prepared-lost', 'LOST', 'an unfinished batch is closed over a prepared transaction', [X, Z], prepared=None,
    failover=1, two_phase=True, **SYNC)
add('prepared-twice', 'TWICE', 'that is waited for, but what prev saw is forgotten', [X, Z], prepared='wait',
    failover=1, two_phase=True, asynchronous=False, **ONE)
add('union-number', 'LOST', 'what prev saw, by number without timeline', [X, Z, V], deep=True, prepared='number',
    failover=1, fires=False, asynchronous=False, **ONE)
add('no-guard', 'LOST', 'failover and back, nobody asks whose fence it is', [X, Z], guard=None, failover=1,
    back=1, fires=False, asynchronous=False, **ONE)
add('guard-number', 'LOST', 'asked by timeline number only', [X, Z], guard='number', asynchronous=False,
    failover=2, back=1, fires=False, **ONE)
add('guard-start', 'LOST', 'asked at the start only', [X, Z], guard='number', guard_always=False,
    asynchronous=False, failover=1, back=1, fires=False, **ONE)
add('guard-stamp', 'LOST', 'a batch that is finished keeps the first one as its writer', [X, Z],
    guard='number', stamp_writer=False, asynchronous=False, failover=1, back=1, fires=False, **ONE)

if __name__ == '__main__':
    main(SCENARIOS)
