"""Holds: dq_remove takes a task out of circulation until its transaction has ended (PO 7 to
11), together with the relay's snapshots, sessions, floors, the freeze, the wait before the
thaw, restore and takeover, and Redis going back.

One task X (key k), offered by T0, and further transactions by role:
    o  offers Y under the same key          s  removes X inside a savepoint, may roll back to it
    r  removes X                            p  removes X, ends by PREPARE and COMMIT PREPARED
    n  only takes a transaction id
The remover's call step by step: send the hold with (token, session, floor) from shared
memory; read the reply; register in shared memory as writing, look at the session there again:
changed since the reply was given -> ask anew with the same token; else write the remove row
with the token into the outbox (from then on a dirty read sees it), deregister, answer true.
The worker, coming to the shard: enter (new session, freezes), publish it in shared memory,
relay; when nobody is writing, read the outbox dirtily and wait for the transactions in
progress that have a remove row whose token is not in the hold hash, reading again each time;
relay to a snapshot taken after that; thaw.

Held by somebody else: wait for his transaction id; take a fresh snapshot; is his row with
that token visible?  Then the relay ends the hold, ask again.  If not, he has rolled back: ask
again with the right to take over from that token.

Loss of data breaks the connections (requests in flight are gone, replies that the kernel has
are still read, the worker comes back through enter); with silent=True it does not, and only
the version tells.
"""
from collections import namedtuple

from holds_worker import Fence, Hold, Redis, Worker, WorkerMoves
from search import main, scenario

State = namedtuple('State', 'tx wal flushed nxt inc born red hist shm epoch w net fired nses budget bad')
# st: N new, O open, C committed, A aborted, L commit lost, P prepared
# ph: ask sent wait got row reg ins done; token: counts calls of the same transaction
Tx = namedtuple('Tx', 'st xid seq ret ph token ses need saw take sub fires epoch')
Budget = namedtuple('Budget', 'loss crash kill drop cancel')

NEW_TX = Tx('N', 0, 0, None, 'ask', 0, 0, None, None, None, False, 0, 0)


class Holds(WorkerMoves):
    def __init__(self, roles, loss=0, crash=0, kill=0, drop=0, cancel=0, asynchronous=False,
                 silent=False, **variant):
        self.roles = 'o' + roles
        self.first = Budget(loss, crash, kill, drop, cancel)
        self.asynchronous = asynchronous
        self.silent = silent
        self.v = dict(
            wait='rows',            # before the thaw: 'rows' narrowed, 'true' everyone told true, None
            cut='enter',            # after its connection was cut the worker 'enter's anew, or goes on
                                    # in its session if no version is behind, which backends see by
                                    # an 'epoch', or do not see: 'resume'
            recheck=True,           # the session again after the row was written
            publish='before',       # the session is published before rows are read
            prepared=True,          # rows of prepared transactions are waited for
            reread=True,            # rows are read again while waiting (savepoints)
            relay_again=True,       # a second snapshot after the wait
            open_only=True,         # a hold demands a thawed shard
            floor=True, freeze=True,
            protect='token',        # what needs no wait: a 'token' that stands, or 'any' hold on the task
            count=True,             # registered while the row is written; else the row is written
                                    # first and the session read again after it
            timeout=False,          # a call that waits may end with NULL (remove_timeout)
            takeover='row',         # the holder's 'row' is not visible in a fresh snapshot; or the
                                    # token stands in a reply whose fence is 'covered'; or he has
                                    # 'ended'; or one of the first two with a snapshot from before
                                    # the wait: 'stale row', 'stale'
            take_named=True,        # takeover names the token it saw
            own_life=True,          # no wait for an id that this life of the server may give out anew
            restore='relay',        # 'relay': all of cur applied; 'ended': at once
            restore_named=True,
            incarnation=True,       # a hold of an earlier incarnation has ended
            early='aborted',        # restore in a running transaction: 'aborted' subtransaction, or
                                    # 'not running'
            dead=True,              # replaced while held: marked dead
            dead_is_gone=True,      # asked again for a hold that is dead: no true
            anywhere=True,          # a remove row removes the task wherever it is
            strict=False)           # two told true is an error after a loss, too
        unknown = set(variant) - set(self.v)
        assert not unknown, unknown
        self.v.update(variant)

    # ---- PostgreSQL ----

    def initial(self):
        """T0 has offered X, it is pending, the worker has thawed; Redis may go back to before."""
        empty = Redis(None, 'none', 'none', 1, 1, 1)
        fence = Fence(None, (2, frozenset()), 0, True)
        red = Redis(fence, 'pending', 'none', 2, 1, 1)
        tx = [NEW_TX] * len(self.roles)
        tx[0] = NEW_TX._replace(st='C', xid=1, seq=1, ph='done')
        return State(tuple(tx), (('i', 0, 1, 1), ('c', 0, 1, 0)), 2, (2, 2, 1), 1, 1, red,
                     (empty,) if self.first.loss else (), (1, 2), 0,
                     Worker('T', 1, fence, None, True, frozenset()), (), (0, 0), 1, self.first, None)

    def snapshot(self, st):
        xmax = st.nxt[2] + 1
        return (xmax, frozenset(t.xid for t in st.tx if t.st in 'OP' and t.xid < xmax))

    @staticmethod
    def sees(snapshot, xid):
        return snapshot is not None and xid < snapshot[0] and xid not in snapshot[1]

    def has_row(self, t):
        return t.seq > 0 and not t.sub

    def rows(self, st, prev, cur):
        return sorted((t.seq, i) for i, t in enumerate(st.tx)
                      if t.st == 'C' and self.has_row(t)
                      and self.sees(cur, t.xid) and not self.sees(prev, t.xid))

    def covers(self, st, fence, need):
        """Are the rows of these transactions applied, by the fence of a reply?"""
        for i in need:
            t = st.tx[i]
            if fence is None:
                return False
            if self.sees(fence.prev if not fence.done else fence.cur, t.xid):
                continue
            if not fence.done and self.sees(fence.cur, t.xid) and t.seq <= fence.pos:
                continue
            return False
        return True

    def over(self, st, fence, need):
        return self.v['takeover'] == 'ended' or self.covers(st, fence, need)

    def running(self, st, xid):
        return any(t.st in 'OP' and t.xid == xid for t in st.tx)

    def waits_for(self, st, hold):
        """Would XactLockTableWait for the holder's id wait?  After a crash ids from the first
        one of this life on are given out anew: one of an earlier life is nobody to wait for."""
        if self.v['own_life'] and hold.inc != st.inc and hold.xid >= st.born:
            return False
        return self.running(st, hold.xid) and not self.sub_aborted(st, hold)

    def sub_aborted(self, st, hold):
        """The subtransaction of the hold was rolled back (known within the incarnation)."""
        t = st.tx[hold.tx]
        return hold.inc == st.inc and (t.sub or hold.token != t.token)

    # ---- Redis: the scripts ----

    def refused(self, red, ses, floor):
        return ses != red.ses or (self.v['floor'] and red.ver < floor)

    def script_hold(self, red, me, take):
        x = red.x
        if x == 'pending':
            return 'true', red._replace(x=me, ver=red.ver + 1)
        if isinstance(x, Hold):
            if (x.tx, x.token) == (me.tx, me.token):
                return ('gone' if x.dead and self.v['dead_is_gone'] else 'true'), red
            if take is not None and ((x.tx, x.token) == take or not self.v['take_named']):
                if x.dead:
                    return 'gone', red
                return 'true', red._replace(x=me, ver=red.ver + 1)
            return 'held', red
        return 'gone', red

    def apply(self, red, tx, i, to):
        x, y = red.x, red.y
        if self.roles[i] == 'o' and i == 0:
            x = 'pending'
        elif self.roles[i] == 'o':
            if not isinstance(x, Hold):
                x = 'gone'
            elif self.v['dead']:
                x = x._replace(dead=True)
            y = 'pending'
        elif isinstance(x, Hold):
            mine = (x.tx, x.token) == (i, tx[i].token)
            if mine or self.v['anywhere']:
                x = 'gone' if mine else x._replace(dead=True)
        elif self.v['anywhere']:
            x = 'gone'
        return red._replace(fence=to, x=x, y=y, ver=red.ver + 1)

    # ---- moves ----

    def moves(self, st):
        if st.bad:
            return []
        out = []

        def move(label, fault=False, **change):
            if st.budget.loss and change.get('red', st.red) != st.red and 'hist' not in change:
                if st.red not in st.hist:
                    change['hist'] = st.hist + (st.red,)
            out.append((label, st._replace(**change), fault))

        self.transactions(st, move)
        self.network(st, move)
        self.worker(st, move)
        self.faults(st, move)
        return out

    def put(self, state, i, **change):
        return state.tx[:i] + (state.tx[i]._replace(**change),) + state.tx[i + 1:]

    def spend(self, st, what):
        return st.budget._replace(**{what: getattr(st.budget, what) - 1})

    def transactions(self, st, move):
        xid, seq, latest = st.nxt
        for i, t in enumerate(st.tx):
            role, name = self.roles[i], 'T%d' % i
            if t.st == 'N':
                if role == 'o':
                    move('%s offers Y, xid %d' % (name, xid), nxt=(xid + 1, seq + 1, latest),
                         tx=self.put(st, i, st='O', xid=xid, seq=seq, ph='done'),
                         wal=st.wal + (('i', i, xid, seq),))
                else:
                    move('%s begins, xid %d' % (name, xid), nxt=(xid + 1, seq, latest),
                         tx=self.put(st, i, st='O', xid=xid, ph='done' if role == 'n' else 'ask'))
            elif t.st == 'O':
                self.call(st, i, move)
                if t.ph == 'done':
                    self.end(st, i, 'c', move)
                    self.end(st, i, 'a', move)
                    if role == 'p':
                        wal = st.wal + (('p', i, t.xid, 0),)
                        move(name + ' PREPARE TRANSACTION', tx=self.put(st, i, st='P'), wal=wal,
                             flushed=len(wal))
                    if role == 's' and t.ret and not t.sub:
                        move(name + ' rolls back to the savepoint', tx=self.put(st, i, sub=True))
                    if role == 's' and t.sub and t.token == 0:
                        move(name + ' removes again, new token',
                             tx=self.put(st, i, sub=False, token=1, seq=0, ph='ask', ret=None,
                                         ses=0, need=None, saw=None, take=None))
                elif st.budget.cancel:
                    self.end(st, i, 'a', move, ' (cancelled in its call)', True,
                             budget=self.spend(st, 'cancel'))
            elif t.st == 'P':
                self.end(st, i, 'c', move, ' (COMMIT PREPARED)')
                self.end(st, i, 'a', move, ' (ROLLBACK PREPARED)')

    def end(self, st, i, how, move, note='', fault=False, **change):
        t = st.tx[i]
        wal = st.wal + ((how, i, t.xid, 0),)
        flushed = len(wal) if how == 'c' and (not self.asynchronous or t.st == 'P') else st.flushed
        move('T%d %s%s' % (i, 'commits' if how == 'c' else 'rolls back', note), fault,
             tx=self.put(st, i, st='C' if how == 'c' else 'A'), wal=wal, flushed=flushed,
             nxt=st.nxt[:2] + (max(st.nxt[2], t.xid),), **change)

    def call(self, st, i, move):
        """The next step of a dq_remove that is under way."""
        t, name, v = st.tx[i], 'T%d' % i, self.v
        if v['timeout'] and t.ph in ('ask', 'wait') and self.first.loss:
            move('%s: remove_timeout, answers NULL' % name, tx=self.put(st, i, ph='done', ret='U'))
        if t.ph == 'ask':
            # not sent while the shard is known to be frozen
            if st.shm[0] and st.shm[0] == st.red.ses and (st.red.open == st.red.ses or
                                                          not v['open_only']):
                need = t.need
                if not (v['takeover'] == 'stale' and need is not None):
                    need = frozenset(j for j, o in enumerate(st.tx) if o.st == 'C' and self.has_row(o))
                move('%s sends a hold%s' % (name, '' if t.take is None else ', taking over T%d.%d' % t.take),
                     tx=self.put(st, i, ph='sent', need=need, epoch=st.epoch),
                     net=st.net + (('hold', i, t.token, t.xid, st.inc, t.take) + st.shm + (True,),))
        elif t.ph == 'wait':
            hold = t.saw
            if not self.waits_for(st, hold):
                who = (hold.tx, hold.token)
                take, note = None, ''
                if v['takeover'].endswith('row'):
                    o = st.tx[hold.tx]
                    seen = o.st == 'C' and self.has_row(o) and o.token == hold.token
                    if v['takeover'] == 'stale row':
                        seen = seen and hold.tx in t.need
                    take = None if seen else who
                    note = ', its row is visible' if seen else ', no row of it'
                move('%s: the holder T%d.%d has ended%s, asks again' % (name, hold.tx, hold.token, note),
                     tx=self.put(st, i, ph='ask', saw=who, take=take))
        elif t.ph == 'got':
            if v['count']:
                move('%s registers' % name, tx=self.put(st, i, ph='reg'))
            else:
                self.write_row(st, i, move, 'row')
        elif t.ph == 'reg':
            if st.shm[0] == t.ses and t.epoch == st.epoch or not v['recheck']:
                move('%s: session is the same' % name, tx=self.put(st, i, ph='ins'))
            else:
                move('%s: session has changed, deregisters, asks anew' % name,
                     tx=self.put(st, i, ph='ask', saw=None, take=None))
        elif t.ph == 'ins':
            self.write_row(st, i, move, 'done', **self.true(st, i))
        elif t.ph == 'row':
            if st.shm[0] == t.ses or not v['recheck']:
                answer = self.true(st, i)
                move('%s answers true' % name, bad=answer.pop('bad'),
                     tx=self.put(st, i, ph='done', **answer))
            else:
                move('%s: session has changed, asks anew' % name,
                     tx=self.put(st, i, ph='ask', saw=None, take=None))

    def true(self, st, i):
        """The answer is true: was that right?"""
        t, bad = st.tx[i], None
        for j in t.need:
            if j and self.roles[j] != 'o' and st.tx[j].ret == 'T':
                bad = 'G4: T%d is told true, T%d had been told true and committed before the call' % (i, j)
        return dict(ret='TX' if st.fired[0] > t.fires else 'T', bad=bad)

    def write_row(self, st, i, move, ph, ret=None, bad=None):
        t = st.tx[i]
        xid, seq, latest = st.nxt
        if t.seq:
            move('T%d has its row already' % i, tx=self.put(st, i, ph=ph, ret=ret), bad=bad)
        else:
            move('T%d writes the remove row' % i, nxt=(xid, seq + 1, latest), bad=bad,
                 tx=self.put(st, i, ph=ph, seq=seq, ret=ret), wal=st.wal + (('i', i, t.xid, seq),))

    def raise_floor(self, st, ses, ver):
        return (st.shm[0], max(st.shm[1], ver)) if st.shm[0] == ses else st.shm

    def network(self, st, move):
        v = self.v
        for k, msg in enumerate(st.net):
            net = st.net[:k] + st.net[k + 1:]
            if msg[0] == 'hold':
                _, i, token, xid, inc, take, ses, floor, live = msg
                who = 'hold of T%d.%d%s' % (i, token, '' if live else ' (zombie)')
                live = live and st.tx[i].st == 'O'
                closed = v['open_only'] and st.red.open != st.red.ses
                if self.refused(st.red, ses, floor) or closed:
                    move('Redis refuses the %s' % who, net=net,
                         tx=self.put(st, i, ph='ask', saw=None, take=None) if live else st.tx)
                    continue
                answer, red = self.script_hold(st.red, Hold(i, token, xid, inc, False), take)
                label = 'Redis executes the %s: %s' % (who, answer)
                if not live:
                    move(label, net=net, red=red)
                    continue
                reply = ('reply', i, answer, red.x if answer == 'held' else None, red.fence, ses,
                         red.ver, st.fired[0])
                if self.silent and self.silent != 'in the socket':
                    self.read_reply(st._replace(net=net, red=red), reply, move, label,
                                    net=net, red=red)
                else:
                    move(label, net=net + (reply,), red=red)
                if st.budget.drop:
                    move(label + ', the connection is cut: sent again', True, net=net, red=red,
                         tx=self.put(st, i, ph='ask'), budget=self.spend(st, 'drop'))
                    move("T%d's connection is cut, the request may still run; sent again" % i, True,
                         net=net + (msg[:-1] + (False,),), tx=self.put(st, i, ph='ask'),
                         budget=self.spend(st, 'drop'))
            elif msg[0] == 'reply':
                if st.tx[msg[1]].st == 'O':
                    self.read_reply(st, msg, move, 'T%d reads its reply' % msg[1], net=net)
                else:
                    move('reply to nobody', net=net)
            elif msg[0] == 'page':
                _, frm, to, i, ses, floor, live = msg
                word = '' if live else ' (zombie)'
                if self.refused(st.red, ses, floor):
                    move('Redis refuses a page%s' % word, net=net)
                elif st.red.fence != frm:
                    change = dict(w=st.w._replace(fence=st.red.fence, cur=None)) if live else {}
                    move('Redis finds another predecessor%s' % word, net=net, **change)
                else:
                    red = self.apply(st.red, st.tx, i, to)
                    change = {}
                    if live:
                        change = dict(w=st.w._replace(fence=to), shm=self.raise_floor(st, ses, red.ver))
                    bad = None
                    if not any(r[0] == 'c' and r[1] == i for r in st.wal[:st.flushed]):
                        bad = 'G11: a row is applied whose commit is not flushed'
                    move('Redis applies the row of T%d%s' % (i, word), net=net, red=red, bad=bad, **change)
            elif msg[0] == 'restore':
                _, who, ses, floor, live = msg
                x = st.red.x
                if self.refused(st.red, ses, floor):
                    move('Redis refuses a restore', net=net)
                elif isinstance(x, Hold) and ((x.tx, x.token) == who or not v['restore_named']):
                    red = st.red._replace(x='gone' if x.dead else 'pending', ver=st.red.ver + 1)
                    move('Redis puts back X held by T%d.%d%s' % (x.tx, x.token, ' (dead: dropped)' if x.dead else ''),
                         net=net, red=red, shm=self.raise_floor(st, ses, red.ver) if live else st.shm)
                else:
                    move('Redis executes a restore: nothing there', net=net)

    def read_reply(self, st, reply, move, label, **change):
        _, i, answer, hold, fence, ses, ver, fires = reply
        t = st.tx[i]
        shm = self.raise_floor(st, ses, ver)
        if answer == 'true':
            tx = self.put(st, i, ph='got', ses=ses, fires=fires)
            label += ': true'
        elif answer == 'held':
            who = (hold.tx, hold.token)
            if who == (i, t.token - 1):     # its own, from a savepoint rolled back
                tx = self.put(st, i, ph='ask', take=who)
                label += ': held by an aborted part of itself'
            elif t.saw == who and not self.v['takeover'].endswith('row') and self.over(st, fence, t.need):
                tx = self.put(st, i, ph='ask', take=who)
                label += ': still held by T%d.%d' % who + ', takes over'
            elif t.saw == who:
                tx = self.put(st, i, ph='ask')
                label += ': still held, fence is behind'
            else:
                tx = self.put(st, i, ph='wait', saw=hold, take=None)
                label += ': held by T%d.%d, waits for it' % who
        elif self.covers(st, fence, t.need):
            tx = self.put(st, i, ph='done', ret='F0' if st.fired[0] == 0 else 'F1')
            label += ': gone, answers false'
        else:
            tx = self.put(st, i, ph='ask')
            label += ': gone, but the fence is behind'
        move(label, tx=tx, shm=shm, **change)

    # ---- faults ----

    def faults(self, st, move):
        def zombies(net, kinds):
            return tuple(m[:-1] + (False,) if m[0] in kinds else m for m in net)

        if st.budget.kill and st.w is not None:
            move('kill -9 of the worker', True, w=None, net=zombies(st.net, ('page', 'restore')),
                 budget=self.spend(st, 'kill'))
        if st.budget.crash:
            for kept in range(st.flushed, len(st.wal) + 1):
                wal = st.wal[:kept]
                tx = []
                for i, t in enumerate(st.tx):
                    if t.st == 'O':
                        t = t._replace(st='A')
                    elif t.st == 'C' and not any(r[0] == 'c' and r[1] == i for r in wal):
                        t = t._replace(st='L')
                    elif t.st == 'A' and any(r[0] == 'p' and r[1] == i for r in wal) and \
                            not any(r[0] == 'a' and r[1] == i for r in wal):
                        t = t._replace(st='P')
                    tx.append(t)
                xid = max([r[2] for r in wal], default=0) + 1
                seq = max([r[3] for r in wal], default=0) + 1
                net = tuple(m for m in zombies(st.net, ('hold', 'page', 'restore')) if m[0] != 'reply')
                move('PostgreSQL crashes, WAL kept %d of %d' % (kept, len(st.wal)), True, tx=tuple(tx),
                     wal=wal, flushed=kept, nxt=(xid, seq, xid - 1), inc=st.inc + 1, born=xid, w=None, net=net,
                     shm=(0, 0), budget=self.spend(st, 'crash'))
        if st.budget.loss:
            for back in st.hist:
                if back == st.red:
                    continue
                label = 'Redis goes back: X %s, version %d, session %d' % (
                    back.x if not isinstance(back.x, Hold) else 'held by T%d.%d' % (back.x.tx, back.x.token),
                    back.ver, back.ses)
                change = dict(red=back, hist=(), budget=self.spend(st, 'loss'))
                if self.silent == 'in flight':
                    move(label + ', silently', True, **change)
                    continue
                tx = tuple(t._replace(ph='ask', saw=None, take=None)
                           if t.ph == 'sent' and not any(m[0] == 'reply' and m[1] == i for m in st.net)
                           else t for i, t in enumerate(st.tx))
                if not self.silent:
                    stays = st.w is not None and self.v['cut'] != 'enter' and st.w.ph in 'TX'
                    change['w'] = st.w._replace(ph='X', cur=None) if stays else None
                move(label + (', silently' if self.silent else ''), True, tx=tx,
                     net=tuple(m for m in st.net if m[0] == 'reply'), **change)
        if self.asynchronous and st.flushed < len(st.wal):
            move('the WAL writer flushes', flushed=len(st.wal))

    # ---- what must be true ----

    def check(self, st):
        if st.bad:
            return st.bad
        told = [i for i, t in enumerate(st.tx) if t.st == 'C' and t.ret in ('T', 'TX') and not t.sub
                and any(r[0] == 'c' and r[1] == i for r in st.wal[:st.flushed])]
        for i in told:
            if st.tx[i].ret == 'TX':
                return 'G4: X fired while T%d had its true; T%d has committed' % (i, i)
        if len(told) > 1 and (self.v['strict'] or st.budget.loss == self.first.loss):
            return 'G4: T%d and T%d were both told true and have committed' % tuple(told[:2])
        if st.budget.loss == self.first.loss:
            if st.fired[0] > 1:
                return 'G2: X fired twice'
            for i, t in enumerate(st.tx):
                if t.ret == 'F0' and st.fired[0] and st.tx[0].st == 'C':
                    return 'FALSE: T%d was told false, and X fired after that' % i
        return None

    def terminal(self, st):
        for i, t in enumerate(st.tx):
            if t.st == 'O' and t.ph != 'done':
                return 'STUCK: T%d waits in its call (%s), the worker is at %s waiting for %s' % (
                    i, t.ph, st.w and st.w.ph, st.w and sorted(st.w.waits))
        if any(t.st == 'L' for t in st.tx):
            return None
        over = [i for i, t in enumerate(st.tx) if i and t.st == 'C' and
                (self.roles[i] == 'o' or self.has_row(t))]
        if not over and st.fired[0] == 0:
            return 'LOST: nobody removed X, and it never fires: %s' % (st.red.x,)
        if st.fired[1] == 0 and any(t.st == 'C' and i and self.roles[i] == 'o'
                                    for i, t in enumerate(st.tx)):
            return 'LOST: Y never fires'
        return None


SCENARIOS = []


def add(name, verdict, text, deep=False, **options):
    SCENARIOS.append(scenario(name, verdict, text, lambda: Holds(**options), deep))


# right
add('two', 'holds', 'two removers, a connection is cut, a call cancelled', roles='rr', drop=1, cancel=1)
add('covered', 'holds', 'takeover by the fence of the reply instead of the row', roles='rr', drop=1,
    takeover='covered')
add('crash', 'holds', 'two removers, crash, asynchronous commit', roles='rr', crash=1, asynchronous=True)
add('replaced', 'holds', 'replaced while held, Redis goes back', roles='ro', loss=1)
add('loss', 'holds', 'Redis goes back twice', roles='r', loss=2)
add('loss-kill', 'holds', 'Redis goes back, kill, cancel', roles='r', loss=1, kill=1, cancel=1)
add('loss-silent', 'holds', 'connections stay, only versions tell; twice', roles='r', loss=2, silent=True)
add('loss-row', 'holds', 'the row is written first, then the session read again; NULL after a while', roles='r',
    loss=1, kill=1, count=False, timeout=True)
add('loss-epoch', 'holds', 'the worker goes on in its session after a cut, backends see it by an epoch; twice',
    roles='r', loss=2, kill=1, cut='epoch')
add('prepared', 'holds', 'prepared; Redis goes back, crash', roles='p', loss=1, crash=1)
add('savepoint', 'holds', 'savepoint rolled back, another remover', roles='sr')
add('savepoint-loss', 'holds', 'savepoint rolled back, Redis goes back', roles='s', loss=1)
# right, larger
add('loss2', 'holds', 'Redis goes back twice, kill, cut, cancel, NULL', deep=True, roles='r', loss=2, kill=1, drop=1,
    cancel=1, timeout=True)
add('loss2-row', 'holds', 'the same, the row first', deep=True, roles='r', loss=2, kill=1, drop=1, cancel=1,
    count=False, timeout=True)
add('prepared2', 'holds', 'prepared; Redis goes back twice, crash, kill', deep=True, roles='p', loss=2, crash=1,
    kill=1)
add('two-loss', 'holds', 'two removers, Redis goes back', deep=True, roles='rr', loss=1)
add('two-prepared', 'holds', 'a prepared remover and another, Redis goes back', deep=True, roles='pr', loss=1)
add('two-crash', 'holds', 'two removers, crash, kill, cut', deep=True, roles='rr', crash=1, kill=1, drop=1)
add('savepoint-crash', 'holds', 'savepoint rolled back, another remover, crash', deep=True, roles='sr', crash=1)
add('three', 'holds', 'two removers and a replacer', deep=True, roles='rro')
# wrong: the wait before the thaw
add('no-floor', 'G4', 'versions are not compared', roles='r', loss=1, silent=True, floor=False)
add('no-freeze', 'G4', 'transfer goes on while healing', roles='r', loss=1, freeze=False)
add('no-wait', 'G4', 'nobody is waited for', roles='r', loss=1, wait=None)
add('no-second', 'G4', 'no snapshot after the wait', roles='r', loss=1, relay_again=False)
add('no-recheck', 'G4', 'the session is not read again before the row', roles='r', loss=1, recheck=False)
add('no-recheck-row', 'G4', 'the same, the row first', roles='r', loss=1, recheck=False, count=False)
add('late-publish', 'G4', 'the session is published after the rows were read', roles='r', loss=1, publish='after')
add('not-prepared', 'G4', 'rows of prepared transactions are not waited for', roles='p', loss=1, crash=1,
    prepared=False)
add('resume', 'G4', 'after a cut the worker goes on in its session when the version is not behind', roles='r',
    loss=1, cut='resume')
add('any-hold', 'G4', "somebody else's hold of the task counts as protection", roles='rr', loss=1, protect='any')
add('open-only', 'G4', 'a hold is granted in a frozen shard', roles='rr', loss=1, open_only=False)
add('row-first', 'STUCK', 'the row first: asks anew and waits for the thaw, the thaw waits for its row', roles='r',
    loss=1, count=False)
add('read-once', 'STUCK', 'who is waited for is found out once', roles='s', loss=1, reread=False)
add('dead-true', 'G4', 'asked again for a hold that is dead: true', deep=True, roles='rr', loss=1,
    dead_is_gone=False, count=False, timeout=True)
# wrong: holds
add('anywhere', 'G4', 'a remove row drops only its hold', roles='r', loss=1, anywhere=False)
add('restore-early', 'G4', 'put back before all of the snapshot is applied', roles='r', restore='ended')
add('restore-any', 'G4', 'a restore does not name the token', roles='rr', restore_named=False)
add('no-life', 'LOST', 'a hold of an earlier life counts as running', roles='r', crash=1, incarnation=False)
add('not-dead', 'KEY', 'replaced while held, not marked', roles='ro', dead=False)
add('sub-running', 'G4', 'a subtransaction that is not running is taken for aborted', roles='s',
    early='not running')
# wrong: takeover
add('take-ended', 'G4', 'the holder has ended, nothing else is asked', roles='rr', takeover='ended')
add('take-stale', 'G4', 'the fence is compared with a snapshot from before the wait', roles='rr', takeover='stale')
add('take-stale-row', 'G4', 'the row is looked for in a snapshot from before the wait', roles='rr',
    takeover='stale row')
add('take-any', 'G4', 'a takeover does not name the token it saw', deep=True, roles='rrr', take_named=False)
add('own-life', 'STUCK', 'waits for an id of an earlier life that is now its own', roles='rr', crash=1,
    own_life=False)
# the edges: what the protocol does not promise
add('edge-flight', 'G4', 'versions only, and a request sent before Redis went back runs after it', roles='rr',
    loss=1, silent='in flight')
add('edge-both', 'G4', 'after a loss two can be told true for one task (it never fires)', roles='rr', loss=1,
    strict=True)

if __name__ == '__main__':
    main(SCENARIOS)
