"""Healing of queues that deliver to a list: what PostgreSQL has to remember of deliveries
(PO 15a), with all kinds of operations over an abstract relay: the fence is the number of rows
applied.  marks.py has the same rule over the real fence, with outbox tables that are emptied.

Operations, each a transaction:
    ('offer', task, key, due)        ('remove', task)            ('foreign', task, due)
    ('move', task, new, due)         reschedule under a hold; its row carries the whole new task
    ('late move', task, new, due)    recorded without a hold, finds what it finds
The mark (A, W): every own task whose row is before A and due by W has left pending and hold.
Healing: relay exactly to A; sweep own tasks due by W from pending and hold; relay; wait for
who was told true; thaw.  If the fence found is past A: no sweep.
"""
from collections import namedtuple

from search import main, scenario

State = namedtuple('State', 'log ops redis past healing swept mark durable clock fired read swept_foreign '
                            'unread budget bad')
Redis = namedtuple('Redis', 'pos pending held ready')       # held: (task, due, transaction, dead)
Mark = namedtuple('Mark', 'a w held settled')
Budget = namedtuple('Budget', 'loss flushall kill crash marks')
OPEN, DONE, BACK = 1, 2, 3
MOVES = ('move', 'late move')


class Heal:
    def __init__(self, ops, loss=0, flushall=0, kill=0, crash=0, marks=9, clock=3, **variant):
        self.ops, self.clock = ops, clock
        self.first = Budget(loss, flushall, kill, crash, marks)
        self.due, self.key, self.foreign = {}, {}, set()
        for o in ops:
            if o[0] == 'offer':
                self.due[o[1]], self.key[o[1]] = o[3], o[2]
            elif o[0] == 'foreign':
                self.due[o[1]] = o[2]
                self.foreign.add(o[1])
            elif o[0] in MOVES:
                self.due[o[2]] = o[3]
        self.tasks = sorted(self.due)
        self.v = dict(
            rule='sweep',           # or 'apply': rows are taken as settled while they are replayed
            held='below',           # W ends 'below' the earliest held due; 'list': they are listed
                                    # in the mark; 'ignored'
            at_a=True,              # the sweep is at A, else after everything
            own_only=True,          # foreign tasks are not swept
            sweep_held=True,        # old holds are swept
            whole=True,             # a settled keyed offer still replaces ('apply' only)
            carries=True,           # a reschedule's row carries the new task
            flushed=True,           # the mark is flushed before it is healed with
            monotone=True,          # W never goes back
            list=None)              # None: transferred is delivered.  'empty': marks only while the
                                    # list is empty.  'unread': whatever lies in it
        assert not set(variant) - set(self.v)
        self.v.update(variant)

    def initial(self):
        none = (0,) * len(self.tasks)
        return State((), (0,) * len(self.ops), Redis(0, frozenset(), frozenset(), ()), (), False, False, None,
                     None, 0, none, none, frozenset(), frozenset(), self.first, None)

    # ---- Redis ----

    def apply(self, redis, op, settled):
        pending, held = redis.pending, redis.held
        if op[0] == 'offer':
            key = op[2]
            if key is not None:
                pending = frozenset(x for x in pending if self.key.get(x[0]) != key)
                held = frozenset(h[:3] + (h[3] or self.key.get(h[0]) == key,) for h in held)
            if not settled:
                pending |= {(op[1], op[3])}
        elif op[0] == 'late move':
            if any(x[0] == op[1] for x in pending):
                pending = frozenset(x for x in pending if x[0] != op[1])
                if not settled:
                    pending |= {(op[2], op[3])}
        else:
            there = any(x[0] == op[1] for x in pending | held)
            pending = frozenset(x for x in pending if x[0] != op[1])
            held = frozenset(h for h in held if h[0] != op[1])
            if op[0] == 'move' and (there or self.v['carries']) and not settled:
                pending |= {(op[2], op[3])}
        return redis._replace(pos=redis.pos + 1, pending=pending, held=held)

    # ---- moves ----

    def moves(self, st):
        if st.bad:
            return []
        out = []

        def move(label, fault=False, **change):
            if st.budget.loss and change.get('redis', st.redis) != st.redis and 'past' not in change and \
               st.redis not in st.past:
                change['past'] = st.past + (st.redis,)
            out.append((label, st._replace(**change), fault))

        for i, op in enumerate(self.ops):
            self.transaction(st, i, op, move)
        redis = st.redis
        for h in redis.held:
            if st.ops[h[2]] == BACK and not st.healing:
                pending = redis.pending if h[3] else redis.pending | {h[:2]}
                move('%s goes back, T%d rolled back%s' % (h[0], h[2], ' (dead: dropped)' if h[3] else ''),
                     redis=redis._replace(pending=pending, held=redis.held - {h}))
        self.relay(st, move)
        if st.healing:
            self.heal(st, move)
        else:
            self.transfer(st, move)
            self.store_mark(st, move)
        if redis.ready:
            self.consumer(st, move)
        if st.clock < self.clock:
            move('time passes', clock=st.clock + 1)
        self.faults(st, move)
        return out

    def spend(self, st, what):
        return st.budget._replace(**{what: getattr(st.budget, what) - 1})

    def transaction(self, st, i, op, move):
        def put(value):
            return st.ops[:i] + (value,) + st.ops[i + 1:]
        redis = st.redis
        if st.ops[i] == 0:
            if op[0] == 'foreign':
                move('a foreign producer adds %s due %d' % op[1:], ops=put(DONE),
                     redis=redis._replace(pending=redis.pending | {op[1:]}))
            elif op[0] == 'offer' or op[0] == 'late move' and any(self.ops[j][1] == op[1] for j in st.log):
                move('T%d %s: commits' % (i, op), ops=put(DONE), log=st.log + (i,))
            elif op[0] in ('remove', 'move') and not st.healing:
                for x in redis.pending:
                    if x[0] == op[1]:
                        move('T%d %s: held, true' % (i, op), ops=put(OPEN),
                             redis=redis._replace(pending=redis.pending - {x},
                                                  held=redis.held | {x + (i, False)}))
        elif st.ops[i] == OPEN:
            move('T%d commits' % i, ops=put(DONE), log=st.log + (i,))
            move('T%d rolls back' % i, ops=put(BACK))

    def relay(self, st, move):
        pos, mark = st.redis.pos, st.mark
        if pos >= len(st.log):
            return
        if st.healing and mark and self.v['rule'] == 'sweep' and self.v['at_a'] and pos == mark.a and \
           not st.swept:
            return                          # the sweep comes first
        op = self.ops[st.log[pos]]
        settled = False
        if st.healing and mark and self.v['rule'] == 'apply' and pos < mark.a and op[0] != 'remove':
            task = op[1] if op[0] == 'offer' else op[2]
            settled = op[3] <= mark.w and task not in mark.held
        if settled and not self.v['whole']:
            redis = st.redis._replace(pos=pos + 1)
        else:
            redis = self.apply(st.redis, op, settled)
        change = dict(durable=mark) if self.v['flushed'] else {}
        move('row %s is applied%s' % (op, ' as settled' if settled else ''), redis=redis, **change)

    def heal(self, st, move):
        redis, mark = st.redis, st.mark
        pos = redis.pos
        sweeps = mark is not None and self.v['rule'] == 'sweep' and not st.swept
        if sweeps and pos == (mark.a if self.v['at_a'] else len(st.log)):
            drop = frozenset(x for x in redis.pending if x[1] <= mark.w and x[0] not in mark.held and
                             not (self.v['own_only'] and x[0] in self.foreign))
            held = frozenset(h for h in redis.held if not (
                self.v['sweep_held'] and h[1] <= mark.w and h[0] not in mark.held))
            gone = frozenset(x[0] for x in drop if x[0] in self.foreign and not st.fired[self.tasks.index(x[0])])
            move('sweep at row %d, W %d: %s' % (mark.a, mark.w, sorted(drop)), swept=True,
                 redis=redis._replace(pending=redis.pending - drop, held=held),
                 swept_foreign=st.swept_foreign | gone)
        if sweeps and (pos <= mark.a or not self.v['at_a']):
            return
        if pos == len(st.log) and not any(z == OPEN for z in st.ops):
            move('healed: thaw', healing=False, swept=False, past=())

    def transfer(self, st, move):
        redis = st.redis
        for x in redis.pending:
            n = self.tasks.index(x[0])
            if x[1] > st.clock or x[1] != min(d for _, d in redis.pending) or st.fired[n] > 2:
                continue
            bad = None
            if st.mark and x[0] in st.mark.settled and not self.v['list']:
                bad = 'REPEAT: %s was settled by the mark, it is transferred again' % x[0]
            for i, op in enumerate(self.ops):
                if st.ops[i] != DONE:
                    continue
                if op[0] in ('remove', 'move') and op[1] == x[0]:
                    bad = 'G4: T%d %s was told true and has committed, %s is transferred' % (i, op, x[0])
                if op[0] == 'offer' and op[2] is not None and i in st.log[:redis.pos] and op[1] != x[0] and \
                   self.key.get(x[0]) == op[2]:
                    mine = [k for k, o in enumerate(self.ops) if o[0] == 'offer' and o[1] == x[0]][0]
                    if mine in st.log and st.log.index(mine) < st.log.index(i):
                        bad = 'KEY: %s is transferred after %s, which replaced it, was applied' % (x[0], op[1])
            ready = redis.ready + (x[0],) if self.v['list'] else redis.ready
            move('%s is transferred' % x[0], bad=bad,
                 redis=redis._replace(pending=redis.pending - {x}, ready=ready),
                 fired=st.fired[:n] + (st.fired[n] + 1,) + st.fired[n + 1:])

    def store_mark(self, st, move):
        redis = st.redis
        if not st.budget.marks or (self.v['list'] == 'empty' and redis.ready):
            return
        w = min([st.clock] + [d - 1 for _, d in redis.pending])
        held = frozenset()
        if self.v['held'] == 'below':
            w = min([w] + [h[1] - 1 for h in redis.held])
        elif self.v['held'] == 'list':
            held = frozenset(h[0] for h in redis.held if h[1] <= w)
        there = {x[0] for x in redis.pending} | {h[0] for h in redis.held} | held | self.foreign
        past = {self.ops[j][1] for j in st.log[:redis.pos]} | \
               {self.ops[j][2] for j in st.log[:redis.pos] if self.ops[j][0] in MOVES}
        got = st.read if self.v['list'] else st.fired
        settled = frozenset(t for n, t in enumerate(self.tasks)
                            if self.due[t] <= w and got[n] and t not in there and t in past)
        mark = Mark(redis.pos, w, held, settled)
        if mark == st.mark or (st.mark is not None and w < st.mark.w and self.v['monotone']):
            return
        label = 'mark stored (row %d, W %d%s)' % (mark.a, w, ', held ' + ''.join(sorted(held)) if held else '')
        move(label, mark=mark, budget=self.spend(st, 'marks'))
        if self.first.crash:
            move(label + ', flushed', mark=mark, durable=mark, budget=self.spend(st, 'marks'))

    def consumer(self, st, move):
        task = st.redis.ready[0]
        n, bad = self.tasks.index(task), None
        if st.mark and task in st.mark.settled and task not in st.unread:
            bad = 'REPEAT: %s had been read before the mark, it is read again' % task
        move('a consumer takes %s' % task, bad=bad, redis=st.redis._replace(ready=st.redis.ready[1:]),
             read=st.read[:n] + (min(2, st.read[n] + 1),) + st.read[n + 1:])

    def faults(self, st, move):
        frozen = dict(healing=True, swept=False)
        if st.budget.loss:
            for back in st.past:
                if back != st.redis:
                    # what Redis itself puts back into the list is not ours to prevent
                    move('Redis goes back: row %d, pending %s, held %s, list %s' % (
                        back.pos, sorted(back.pending), sorted(h[0] for h in back.held), list(back.ready)),
                        True, redis=back, past=(), unread=frozenset(back.ready),
                        budget=self.spend(st, 'loss'), **frozen)
        if st.budget.flushall:
            move('FLUSHALL', True, redis=Redis(0, frozenset(), frozenset(), ()), past=(), unread=frozenset(),
                 budget=self.spend(st, 'flushall'), **frozen)
        if st.budget.kill:
            move('the worker is killed, comes back', True, budget=self.spend(st, 'kill'), **frozen)
        if st.budget.crash:
            move('PostgreSQL crashes, a mark that is not flushed is gone', True, mark=st.durable,
                 ops=tuple(BACK if z == OPEN else z for z in st.ops), budget=self.spend(st, 'crash'), **frozen)

    # ---- what must be true ----

    def check(self, st):
        if st.bad:
            return st.bad
        if st.swept_foreign:
            return 'FOREIGN: %s was swept and never delivered' % sorted(st.swept_foreign)
        return None

    def terminal(self, st):
        def got(task):
            return (st.read if self.v['list'] else st.fired)[self.tasks.index(task)] > 0
        for i, op in enumerate(self.ops):
            if st.ops[i] != DONE or op[0] in ('remove', 'foreign'):
                continue
            if op[0] == 'late move':
                if not got(op[1]) and not got(op[2]):
                    return 'LOST: %s: neither the old nor the new task is delivered' % (op,)
                continue
            task = op[1] if op[0] == 'offer' else op[2]
            over = False
            for j, other in enumerate(self.ops):
                if j == i or st.ops[j] != DONE:
                    continue
                if other[0] in ('remove', 'move', 'late move') and other[1] == task:
                    over = True
                if other[0] == op[0] == 'offer' and op[2] is not None and other[2] == op[2] and \
                   st.log.index(j) > st.log.index(i):
                    over = True
            if not over and not got(task):
                return 'LOST: %s is committed and never delivered' % (op,)
        return None


X, L = ('offer', 'X', None, 1), ('offer', 'L', None, 1)
OFF = ('remove', 'X')
KEYS = [('offer', 'X', 'k', 2), ('offer', 'Y', 'k', 1)]
MOVED, LATE = ('move', 'X', 'X2', 2), ('late move', 'X', 'X2', 2)
FOREIGN = ('foreign', 'F', 1)
SCENARIOS = []


def add(name, verdict, text, ops, deep=False, **options):
    SCENARIOS.append(scenario(name, verdict, text, lambda: Heal(ops, **options), deep))


add('remove', 'holds', 'X, a late offer, X removed; Redis goes back', [X, L, OFF], loss=1, clock=2, marks=3)
add('keys', 'holds', 'a key replaced, Redis goes back twice', KEYS, loss=2, clock=2, marks=4)
add('move', 'holds', 'reschedule under a hold; FLUSHALL and a loss', [X, MOVED], loss=1, flushall=1, clock=2)
add('late-move', 'holds', 'reschedule without a hold', [X, LATE], loss=1, flushall=1, clock=2)
add('foreign', 'holds', "a foreign producer's task", [X, FOREIGN], loss=1, kill=1, clock=2)
add('list', 'holds', 'marks only while the list is empty', [X], loss=1, flushall=1, kill=1, list='empty',
    clock=1, marks=3)
add('deep', 'holds', 'X, a late offer, X removed; loss, kill', [X, L, OFF], deep=True, loss=1, kill=1)
add('crash', 'holds', 'loss, FLUSHALL, crash that loses marks', [X, L], deep=True, loss=1, flushall=1, crash=1,
    marks=3, clock=2)
add('held-list', 'holds', 'held tasks listed in the mark instead of W below them', [X, L, OFF], deep=True,
    held='list', loss=1, kill=1, clock=2)
add('replaced', 'holds', 'remover and replacer, loss, FLUSHALL', [('offer', 'X', 'k', 1), ('offer', 'Y', 'k', 2),
                                                               OFF], deep=True, loss=1, flushall=1, clock=2, marks=3)
add('back-w', 'holds', 'W may go back', [X, L, OFF], deep=True, loss=1, monotone=False, clock=2)
add('list2', 'holds', 'list: loss, FLUSHALL, kill', [X, L], deep=True, loss=1, flushall=1, kill=1, list='empty',
    clock=2, marks=3)
add('w-only', 'LOST', 'swept at the end, a late offer with it', [X, L], loss=1, at_a=False)
add('no-sweep', 'REPEAT', 'only what is replayed is taken as settled, not what was restored', [X], loss=1,
    rule='apply')
add('held-ignored', 'LOST', 'a held task is not seen by the mark', [X, OFF], loss=1, held='ignored')
add('skip-key', 'KEY', 'a settled keyed offer is skipped whole', KEYS, flushall=1, rule='apply', whole=False)
add('skip-move', 'LOST', 'settled rows skipped, a late move finds nothing', [X, ('late move', 'X', 'X2', 3)],
    flushall=1, rule='apply')
add('foreign-swept', 'FOREIGN', 'foreign tasks are swept as well', [X, FOREIGN], kill=1, own_only=False)
add('old-holds', 'REPEAT', 'old holds are not swept', [X, OFF], loss=1, sweep_held=False)
add('mark-lost', 'REPEAT', 'the mark is not flushed before it is healed with', [X, L], loss=1, crash=1,
    flushed=False, clock=1, marks=3)
add('unread', 'LOST', 'transferred taken as delivered, the list unread at FLUSHALL', [X], flushall=1, clock=1,
    list='unread', marks=2)

if __name__ == '__main__':
    main(SCENARIOS)
