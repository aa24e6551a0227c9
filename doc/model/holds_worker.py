"""The worker's side of holds.py: entering, relaying, the wait before the thaw, putting back,
transfer."""
from collections import namedtuple

Redis = namedtuple('Redis', 'fence x y ver ses open')
Hold = namedtuple('Hold', 'tx token xid inc dead')
Fence = namedtuple('Fence', 'prev cur pos done')
# ph: E entered, S published, A relays, R reads rows, (Q publishes late,) B waits, C relays again,
# T thawed, X cut off, Y knows the version
Worker = namedtuple('Worker', 'ph ses fence cur flushed waits')


class WorkerMoves:
    def worker(self, st, move):
        w, red, v = st.w, st.red, self.v
        if w is None:
            self.enter(st, move, 'the worker starts')
            return
        published = st.shm[0] == w.ses
        floor = st.shm[1] if published else 0
        pages = [m for m in st.net if m[0] == 'page' and m[-1]]
        if w.ph not in 'XY' and self.refused(red, w.ses, floor) or (w.ph == 'T' and red.open != red.ses):
            if not pages:
                self.enter(st, move, 'a script is refused')
            return
        if w.ph == 'X':
            if red.ses != w.ses:
                self.enter(st, move, 'the worker is connected again')
            else:
                move('the worker is connected again, version %d' % red.ver, w=w._replace(ph='Y', cur=red.ver))
            return
        if w.ph == 'Y':
            # what it was told is compared after the epoch has moved
            if w.cur < st.shm[1]:
                self.enter(st, move, 'the version is behind')
            else:
                move('the worker goes on in its session', w=w._replace(ph='T', cur=None, fence=red.fence),
                     epoch=st.epoch + (v['cut'] == 'epoch'))
            return
        if w.ph in 'EQ':
            move('the worker publishes session %d' % w.ses, shm=(w.ses, red.ver),
                 w=w._replace(ph='S' if w.ph == 'E' else 'B'))
            return
        if w.ph == 'T' or not v['freeze']:
            self.transfer(st, move)
        if w.ph == 'T' and self.early(st):
            move('the worker puts back early the hold of a savepoint rolled back',
                 net=st.net + (('restore', (red.x.tx, red.x.token), w.ses, floor, True),))
        if w.ph == 'T' and v['restore'] == 'ended' and isinstance(red.x, Hold) and \
           not self.running(st, red.x.xid):
            move('the worker puts back a hold whose transaction is not running',
                 net=st.net + (('restore', (red.x.tx, red.x.token), w.ses, floor, True),))
        if pages:
            return
        base = None
        if w.fence is not None:
            base = w.fence.cur if w.fence.done else w.fence.prev
        if w.fence != red.fence:
            move('a reply shows the fence elsewhere', w=w._replace(fence=red.fence, cur=None))
        elif w.fence is not None and not w.fence.done:
            rows = [r for r in self.rows(st, w.fence.prev, w.fence.cur) if r[0] > w.fence.pos]
            self.send(st, move, rows, w.fence.prev, w.fence.cur, floor)
        elif w.cur is None:
            self.take_cur(st, move, base)
        elif not w.flushed:
            move('the worker flushes', flushed=len(st.wal), w=w._replace(flushed=True))
        else:
            rows = self.rows(st, base, w.cur)
            if rows:
                self.send(st, move, rows, base, w.cur, floor)
            else:
                self.applied(st, move, floor)

    def enter(self, st, move, why):
        ses = st.nses + 1
        red = st.red._replace(ses=ses, open=0, ver=st.red.ver + 1)
        late = self.v['publish'] != 'before'
        move('%s: enters, session %d, frozen' % (why, ses), red=red, nses=ses,
             w=Worker('S' if late else 'E', ses, red.fence, None, True, frozenset()))

    def send(self, st, move, rows, prev, cur, floor):
        i = rows[0][1]
        last = len(rows) == 1
        to = Fence(prev, cur, 0 if last else rows[0][0], last)
        move('the worker sends the row of T%d' % i,
             net=st.net + (('page', st.w.fence, to, i, st.w.ses, floor, True),))

    def take_cur(self, st, move, base):
        w, red = st.w, st.red
        cur = self.snapshot(st)
        if w.ph == 'R':
            self.read_rows(st, move)
            return
        if w.ph == 'B' and any(st.tx[i].st in 'OP' and (self.has_row(st.tx[i]) or not self.v['reread'])
                               for i in w.waits):
            return
        ended = isinstance(red.x, Hold) and self.has_ended(st, red.x, cur) and \
            not any(m[0] == 'restore' and m[-1] for m in st.net)
        if w.ph == 'T' and not ended and not self.rows(st, base, cur):
            return
        ph = {'S': 'A', 'B': 'C'}.get(w.ph, w.ph)
        move('the worker takes a snapshot (xmax %d, running %s)' % (cur[0], sorted(cur[1])),
             w=w._replace(ph=ph, cur=cur, flushed=False))

    def has_ended(self, st, hold, cur):
        return self.sees(cur, hold.xid) or (self.v['incarnation'] and hold.inc != st.inc
                                            and hold.xid not in cur[1])

    def read_rows(self, st, move):
        """The dirty read of the outbox, and the wait it leads to."""
        v, w = self.v, st.w
        if any(t.ph in ('reg', 'ins') and t.st == 'O' for t in st.tx):
            return                      # with count: somebody is writing a row
        stands = (st.red.x.tx, st.red.x.token) if isinstance(st.red.x, Hold) else None
        waits = set()
        for i, t in enumerate(st.tx):
            if t.st not in 'OP' or self.roles[i] in 'on':
                continue
            if t.st == 'P' and not v['prepared']:
                continue
            if v['wait'] == 'rows' and self.has_row(t) and stands != (i, t.token) and \
               not (v['protect'] == 'any' and stands):
                waits.add(i)
            if v['wait'] == 'true' and t.ret and t.ret.startswith('T') and not t.sub:
                waits.add(i)
        ph = 'Q' if v['publish'] != 'before' else 'B' if v['relay_again'] else 'C'
        move('the worker reads the rows of running transactions, will wait for %s'
             % ['T%d' % i for i in sorted(waits)],
             w=w._replace(ph=ph, waits=frozenset(waits), cur=None))

    def early(self, st):
        x = st.red.x
        if not isinstance(x, Hold) or any(m[0] == 'restore' and m[-1] for m in st.net):
            return False
        if self.v['early'] == 'not running':        # the subtransaction is not in progress
            return self.roles[x.tx] == 's' and (self.sub_aborted(st, x) or not self.running(st, x.xid))
        return self.running(st, x.xid) and self.sub_aborted(st, x)

    def applied(self, st, move, floor):
        """All of cur is in Redis."""
        w, x, change, note = st.w, st.red.x, {}, ''
        if isinstance(x, Hold) and self.has_ended(st, x, w.cur) and \
           not any(m[0] == 'restore' and m[-1] for m in st.net):
            change['net'] = st.net + (('restore', (x.tx, x.token), w.ses, floor, True),)
            note = ', sends a restore of T%d.%d' % (x.tx, x.token)
        ph = w.ph
        if ph == 'A':
            ph = 'R' if self.v['wait'] or self.v['relay_again'] else 'C'
        if w.ph == 'C':
            red = st.red._replace(open=w.ses, ver=st.red.ver + 1)
            change.update(red=red, shm=self.raise_floor(st, w.ses, red.ver))
            ph, note = 'T', note + ', thaws'
        move('all of cur is applied' + note, w=w._replace(ph=ph, cur=None), **change)

    def transfer(self, st, move):
        red = st.red
        if red.open != red.ses and self.v['freeze']:
            return
        if red.x == 'pending' and st.fired[0] < 2:
            bad = None
            for i, t in enumerate(st.tx):
                if t.st == 'C' and t.ret == 'T' and not t.sub:
                    bad = 'G4: T%d was told true and has committed, X fires' % i
                if i and self.roles[i] == 'o' and t.st == 'C' and red.fence and red.fence.done and \
                   self.sees(red.fence.cur, t.xid):
                    bad = 'KEY: X fires after what replaced it was applied'
            after = red._replace(x='gone', ver=red.ver + 1)
            tx = tuple(t._replace(ret='TX') if t.ret == 'T' and t.st in 'OP' and not t.sub else t
                       for t in st.tx)
            move('X fires', red=after, tx=tx, fired=(st.fired[0] + 1, st.fired[1]), bad=bad,
                 shm=self.raise_floor(st, st.w.ses, after.ver))
        if red.y == 'pending' and st.fired[1] < 2:
            after = red._replace(y='gone', ver=red.ver + 1)
            move('Y fires', red=after, fired=(st.fired[0], st.fired[1] + 1),
                 shm=self.raise_floor(st, st.w.ses, after.ver))
