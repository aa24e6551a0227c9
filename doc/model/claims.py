"""Claims: batches of due tasks lent to PostgreSQL for a sink or a handler (PO 13 to 15).  The
executor sends claim(n + 1, nonce of n), which confirms batch n and lends the next; PostgreSQL
commits the number by compare-and-set together with the effects and the done log.
"""
from collections import namedtuple

from search import main, scenario

State = namedtuple('State', 'wal flushed redis past executors net arrived nonces suspect budget')
# wal: commits (number, nonce, tasks effected); what PostgreSQL knows is their sum
Redis = namedtuple('Redis', 'number nonce lent pending arrived')
Call = namedtuple('Call', 'executor live number nonce')
Got = namedtuple('Got', 'number nonce tasks check')     # check: against the done log
Budget = namedtuple('Budget', 'loss crash kill drop')


class Claims:
    def __init__(self, tasks=2, executors=1, page=2, top=4, loss=0, crash=0, kill=0, drop=0,
                 asynchronous=False, **variant):
        self.tasks, self.count, self.page, self.top = tasks, executors, page, top
        self.asynchronous = asynchronous
        self.first = Budget(loss, crash, kill, drop)
        self.v = dict(flush=True,       # commit n is flushed before claim(n + 1) is sent
                      compare=True,     # the number is committed by compare-and-set
                      nonce=True,       # a batch has a nonce beside its number
                      log='since',      # the done log is asked 'always', for tasks up to the detected
                                        # loss ('since'), for the renumbered batch only ('batch'),
                                        # never (None)
                      unknown='renumber')   # a number that Redis does not know: lent tasks go back and
                                        # the batch is renumbered; 'confirm': taken as confirmed
        assert not set(variant) - set(self.v)
        self.v.update(variant)

    def initial(self):
        return State((), 0, Redis(0, 0, frozenset(), frozenset(), 0), (), (None,) * self.count, (), 0, 1, 0,
                     self.first)

    def committed(self, st):
        return st.wal[-1][:2] if st.wal else (0, 0)

    def moves(self, st):
        out = []

        def move(label, fault=False, **change):
            if st.budget.loss and change.get('redis', st.redis) != st.redis and 'past' not in change:
                change['past'] = st.past + (st.redis,)
            out.append((label, st._replace(**change), fault))

        redis = st.redis
        if redis.arrived < self.tasks:
            n = redis.arrived
            move('task %d is due' % n, redis=redis._replace(pending=redis.pending | {n}, arrived=n + 1),
                 arrived=max(st.arrived, n + 1))
        for e, doing in enumerate(st.executors):
            self.executor(st, e, doing, move)
        for k in range(len(st.net)):
            self.network(st, k, move)
        self.faults(st, move)
        return out

    def put(self, st, e, doing):
        return st.executors[:e] + (doing,) + st.executors[e + 1:]

    def spend(self, st, what):
        return st.budget._replace(**{what: getattr(st.budget, what) - 1})

    def executor(self, st, e, doing, move):
        number, nonce = self.committed(st)
        if doing is None:
            move('executor %d starts, reads number %d' % (e, number), executors=self.put(st, e, 'idle'))
        elif doing == 'idle':
            if number < self.top and (st.redis.lent or st.redis.pending):
                move('executor %d sends claim(%d)' % (e, number + 1), executors=self.put(st, e, 'asks'),
                     net=st.net + (Call(e, True, number + 1, nonce),),
                     flushed=len(st.wal) if self.v['flush'] else st.flushed)
        elif doing != 'asks':
            done = {t for w in st.wal for t in w[2]}
            tasks = frozenset(t for t in doing.tasks if not (
                (doing.check or (self.v['log'] == 'since' and t < st.suspect)) and t in done))
            if number == doing.number - 1 or not self.v['compare']:
                wal = st.wal + ((doing.number, doing.nonce, tasks),)
                move('executor %d commits number %d with %s' % (e, doing.number, sorted(tasks)), wal=wal,
                     flushed=st.flushed if self.asynchronous else len(wal), executors=self.put(st, e, 'idle'))
            else:
                move('executor %d: the number has moved, rolls back' % e, executors=self.put(st, e, 'idle'))

    def network(self, st, k, move):
        call, net, redis = st.net[k], st.net[:k] + st.net[k + 1:], st.redis
        n, change, got = call.number, {}, None
        what = 'old'
        if n == redis.number and n > 0:
            what, got = 'again', (n, redis.nonce, redis.lent)
        elif n == redis.number + 1 and (not self.v['nonce'] or call.nonce == (redis.nonce if redis.number else 0)):
            lent = frozenset(sorted(redis.pending)[:self.page])
            what, got = 'new', (n, st.nonces, lent)
            change = dict(redis=redis._replace(number=n, nonce=st.nonces, lent=lent,
                                               pending=redis.pending - lent), nonces=st.nonces + 1)
        elif n > redis.number:
            what = 'unknown'
        label = 'Redis executes %sclaim(%d): %s' % ('' if call.live else 'a zombie of ', n, what)
        if got:
            label += ' %s' % sorted(got[2])
        if not call.live:
            move(label, net=net, **change)
            return
        if got:
            doing = Got(*got, self.v['log'] == 'always')
        elif what == 'old':
            doing = 'idle'
        else:                               # Redis went back, or another branch of it
            pool = redis.pending if self.v['unknown'] == 'confirm' else redis.pending | redis.lent
            lent = frozenset(sorted(pool)[:self.page])
            change = dict(redis=redis._replace(number=n, nonce=st.nonces, lent=lent, pending=pool - lent),
                          nonces=st.nonces + 1)
            if self.v['log'] == 'since':
                change['suspect'] = st.arrived
            doing = Got(n, st.nonces, lent, self.v['log'] in ('always', 'batch'))
            label += ', renumbered, lends %s' % sorted(lent)
        move(label, net=net, executors=self.put(st, call.executor, doing), **change)
        if st.budget.drop and what in ('again', 'new', 'old'):
            move(label + ', the reply is lost', True, net=net, executors=self.put(st, call.executor, 'idle'),
                 budget=self.spend(st, 'drop'), **change)

    def faults(self, st, move):
        def zombie(e):
            return tuple(c._replace(live=False) if c.executor == e else c for c in st.net)
        for e, doing in enumerate(st.executors):
            if doing == 'asks' and st.budget.drop:
                move("executor %d's connection is cut, the request may still run" % e, True, net=zombie(e),
                     executors=self.put(st, e, 'idle'), budget=self.spend(st, 'drop'))
            if doing is not None and st.budget.kill:
                move('kill -9 of executor %d' % e, True, net=zombie(e), executors=self.put(st, e, None),
                     budget=self.spend(st, 'kill'))
        if st.budget.crash:
            for kept in range(st.flushed, len(st.wal) + 1):
                move('PostgreSQL crashes, WAL kept %d of %d' % (kept, len(st.wal)), True, wal=st.wal[:kept],
                     flushed=kept, executors=(None,) * self.count, budget=self.spend(st, 'crash'),
                     net=tuple(c._replace(live=False) for c in st.net))
        if st.budget.loss:
            for back in set(st.past):
                move('Redis goes back: number %d, lent %s, pending %s' % (
                    back.number, sorted(back.lent), sorted(back.pending)), True, redis=back, past=(),
                    budget=self.spend(st, 'loss'))
        if self.asynchronous and st.flushed < len(st.wal):
            move('the WAL writer flushes', flushed=len(st.wal))

    def effects(self, st, task):
        return sum(task in w[2] for w in st.wal)

    def check(self, st):
        for task in range(self.tasks):
            if self.effects(st, task) > 1:
                return 'TWICE: the effect of task %d is committed twice' % task
        if not st.net and all(e is None or e == 'idle' for e in st.executors):
            for task in range(st.redis.arrived):
                if not self.effects(st, task) and task not in st.redis.lent | st.redis.pending:
                    return 'LOST: task %d has left Redis without an effect' % task
        return None

    def terminal(self, st):
        return None


SCENARIOS = []


def add(name, verdict, text, deep=False, **options):
    SCENARIOS.append(scenario(name, verdict, text, lambda: Claims(**options), deep))


add('crash', 'holds', 'asynchronous commit, flushed before the claim; crash, kill, cut', asynchronous=True, crash=1,
    kill=1, drop=1)
add('loss', 'holds', 'Redis goes back, kill', loss=1, kill=1, top=3)
add('two', 'holds', 'two executors of one slot, kill', executors=2, kill=1, top=3)
add('two-loss', 'holds', 'two executors, Redis goes back', deep=True, executors=2, loss=1)
add('two-loss2', 'holds', 'two executors, Redis goes back twice', deep=True, executors=2, loss=2, top=3)
add('no-flush', 'LOST', 'the claim is sent before the commit is flushed', asynchronous=True, flush=False, crash=1)
add('number-only', 'TWICE', 'Redis goes back, batches have a number only, no done log', nonce=False, loss=1,
    log=None)
add('confirm', 'TWICE', 'an unknown number is taken as confirmed', nonce=False, loss=1, log=None,
    unknown='confirm')
add('batch-only', 'TWICE', 'the done log is asked for the renumbered batch only', loss=1, log='batch')
add('no-compare', 'TWICE', 'two executors, the number is not compared at commit', executors=2, compare=False,
    nonce=False, log=None)
add('no-nonce', 'LOST', 'two executors, Redis goes back, number only', executors=2, nonce=False, loss=1,
    log='always')

if __name__ == '__main__':
    main(SCENARIOS)
