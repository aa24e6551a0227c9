"""dq_poll: elements taken from the front of the ready list under a hold, one record for each
call: token -> payloads.  Commit drops the record by its relayed row; after a rollback, or when
the session is dead, the worker puts them back in front, in order.

Elements a, b, c are offered by the first rows of the log (the relay is abstract: the fence is
the number of rows applied; relay.py and holds.py have it in full) and get into the list by
transfer.  Pollers call `calls` times with `most` elements each.  A call: send poll(token,
session); the script looks for the record of the token first, so the call can be sent again;
read the reply; write the row; answer.  The worker takes the length of the log and who has
ended in one snapshot, relays to it, and only then puts back records of those.

After a loss of data elements may be taken again (G3 says so: what was taken since the last
mark); none may be lost, and none that a mark has settled may come again.  So nobody needs to
be waited for here before the thaw.
"""
from collections import namedtuple

from search import main, scenario

State = namedtuple('State', 'tx log red hist mark settled pushed seen w net mixed budget bad')
# seen, a look at the list that may become a mark: row, pushed then, first element
Tx = namedtuple('Tx', 'st ph call got')         # got: payloads of the calls that were answered
Redis = namedtuple('Redis', 'pos pend ready recs taken ses open')
Record = namedtuple('Record', 'number token items')     # token: (transaction, call)
Worker = namedtuple('Worker', 'ph pos ended swept')
Budget = namedtuple('Budget', 'loss flush kill drop')


class Poll:
    def __init__(self, pollers=2, elements='abc', late='', most=2, calls=1, loss=0, flush=0, kill=0, drop=0,
                 marks=False, foreign=False, **variant):
        self.elements, self.late, self.foreign = elements + late, late, foreign
        self.start = elements
        self.pollers, self.most, self.calls, self.marks = pollers, most, calls, marks
        self.first = Budget(loss, flush, kill, drop)
        self.v = dict(relay_first=True,     # all of the snapshot is applied before a record goes back
                      lookup=True,          # the script looks for the record of the token first
                      order='descending',   # records that go back together: last taken first
                      together=True,        # in one script
                      in_order=True,        # payloads of one record: the last one is pushed first
                      mark='records',       # a mark waits for an empty list and no 'records'; 'list':
                                            # for an empty list; 'past': until the list is no
                                            # longer than what was pushed since a look at it, has
                                            # another first element, and no records stand
                      forget=True,          # that look is forgotten when something is put back
                      put_once=True,        # record dropped in the script that pushes
                      empty_row=False)      # a call that got nothing writes a row as well
        assert not set(variant) - set(self.v)
        self.v.update(variant)

    def initial(self):
        """The first elements are in the list; with foreign=True a last transaction stands for
        a consumer that takes and keeps."""
        offers = tuple(('o', e) for e in self.start)
        ready = tuple(self.start)
        hist = ()
        if self.first.loss:
            hist = (Redis(len(offers), ready, (), (), 0, 1, True),)
        more = (Tx('C', 'done', 0, ()),) if self.foreign else ()
        return State((Tx('O', 'ask', 0, ()),) * self.pollers + more, offers,
                     Redis(len(offers), (), ready, (), 0, 1, True), hist, None, '', len(ready), None,
                     Worker('T', None, (), True), (), False, self.first, None)

    def moves(self, st):
        if st.bad:
            return []
        out = []

        def move(label, fault=False, **change):
            if st.budget.loss and change.get('red', st.red) != st.red and 'hist' not in change and \
               st.red not in st.hist:
                change['hist'] = st.hist + (st.red,)
            out.append((label, st._replace(**change), fault))

        for i, t in enumerate(st.tx):
            if t.st == 'O':
                self.poller(st, i, t, move)
        for e in self.late:
            if ('o', e) not in st.log:
                move('%s is offered' % e, log=st.log + (('o', e),))
                break
        if self.foreign and st.red.ready and st.red.open:
            move('a consumer takes %s' % st.red.ready[0], red=st.red._replace(ready=st.red.ready[1:]),
                 tx=st.tx[:-1] + (st.tx[-1]._replace(got=st.tx[-1].got + (st.red.ready[:1],)),))
        self.network(st, move)
        self.worker(st, move)
        self.faults(st, move)
        return out

    def put(self, state, i, **change):
        return state.tx[:i] + (state.tx[i]._replace(**change),) + state.tx[i + 1:]

    def spend(self, st, what):
        return st.budget._replace(**{what: getattr(st.budget, what) - 1})

    def poller(self, st, i, t, move):
        name = 'T%d' % i
        if t.ph == 'ask' and st.red.open:
            move('%s sends poll %d' % (name, t.call), tx=self.put(st, i, ph='sent'),
                 net=st.net + (('poll', i, t.call, st.red.ses, True),))
        if t.ph == 'done':
            rows = tuple(('p', i, k) for k in range(t.call + 1) if t.got[k] or self.v['empty_row'])
            move(name + ' commits', tx=self.put(st, i, st='C'), log=st.log + rows)
            if t.call + 1 < self.calls:
                move(name + ' polls again', tx=self.put(st, i, ph='ask', call=t.call + 1))
        if t.ph in ('done', 'ask'):
            move(name + ' rolls back, or its session dies', tx=self.put(st, i, st='A'))

    def script(self, red, i, call):
        """-> payloads, Redis after"""
        token = (i, call)
        if self.v['lookup']:
            for r in red.recs:
                if r.token == token:
                    return r.items, red
        items = red.ready[:self.most]
        if not items:
            return (), red
        recs = tuple(r for r in red.recs if r.token != token)
        recs += (Record(red.taken + 1, token, items),)
        return items, red._replace(ready=red.ready[len(items):], recs=recs, taken=red.taken + 1)

    def network(self, st, move):
        for k, msg in enumerate(st.net):
            net = st.net[:k] + st.net[k + 1:]
            _, i, call, ses, live = msg
            live = live and st.tx[i].st == 'O'
            word = '' if live else ' (zombie)'
            if ses != st.red.ses or not st.red.open:
                move('Redis refuses a poll of T%d%s' % (i, word), net=net,
                     tx=self.put(st, i, ph='ask') if live else st.tx)
                continue
            items, red = self.script(st.red, i, call)
            label = 'Redis executes poll %d of T%d%s: %s' % (call, i, word, ''.join(items))
            if not live:
                move(label, net=net, red=red)
                continue
            t = st.tx[i]
            move(label, net=net, red=red, tx=self.put(st, i, ph='done', got=t.got + (items,)))
            if st.budget.drop:
                move(label + ', the reply is lost, sent again', True, net=net, red=red,
                     tx=self.put(st, i, ph='ask'), budget=self.spend(st, 'drop'))
                move("T%d's connection is cut, the request may still run; sent again" % i, True,
                     net=net + (msg[:-1] + (False,),), tx=self.put(st, i, ph='ask'),
                     budget=self.spend(st, 'drop'))

    # ---- the worker ----

    def apply(self, red, row):
        if row[0] == 'o':
            return red._replace(pos=red.pos + 1, pend=red.pend + (row[1],))
        return red._replace(pos=red.pos + 1, recs=tuple(r for r in red.recs if r.token != row[1:]))

    def put_back(self, red, numbers):
        for r in sorted(red.recs, reverse=self.v['order'] == 'descending'):
            if r.number in numbers:
                items = r.items if self.v['in_order'] else r.items[::-1]
                recs = red.recs
                if self.v['put_once']:
                    recs = tuple(x for x in recs if x != r)
                red = red._replace(ready=items + red.ready, recs=recs)
        return red

    def worker(self, st, move):
        w, red = st.w, st.red
        if w is None or w.ph == 'L':
            ses = red.ses + 1 if w is None else w.swept
            move('the worker enters, session %d, frozen' % ses,
                 red=red._replace(ses=ses, open=False), w=Worker('H', None, (), False))
            return
        if w.ph == 'T' and red.pend:
            move('transfer of %s' % red.pend[0], bad=self.settled(st, red.pend[0]),
                 red=red._replace(pend=red.pend[1:], ready=red.ready + red.pend[:1]),
                 pushed=st.pushed + 1)
        if self.v['mark'] == 'past':
            self.past(st, move)
        elif w.ph == 'T' and self.marks and not red.pend and not red.ready and w.pos is None and \
           red.pos == len(st.log) and not (red.recs and self.v['mark'] == 'records'):
            gone = ''.join(sorted(e for e in self.elements
                                  if any(t.st == 'C' and e in ''.join(map(''.join, t.got)) for t in st.tx)))
            if st.mark != red.pos:
                move('mark stored at row %d: all offered up to there has left the list' % red.pos,
                     mark=red.pos, settled=gone)
        if w.pos is None:
            ended = tuple(i for i, t in enumerate(st.tx) if t.st != 'O')
            if w.ph == 'H' or red.pos < len(st.log) or any(r.token[0] in ended for r in red.recs):
                move('the worker takes a snapshot: %d rows, ended %s' % (len(st.log), list(ended)),
                     w=w._replace(pos=len(st.log), ended=ended))
            return
        todo = [r.number for r in red.recs if r.token[0] in w.ended]
        behind = red.pos < w.pos
        sweep = w.ph == 'H' and st.mark is not None and not w.swept and red.pos <= st.mark
        if sweep and red.pos == st.mark:
            move('the worker sweeps at the mark: all of ours is dropped, from pending, list and records',
                 red=red._replace(pend=(), ready=(), recs=()), w=w._replace(swept=True))
            return
        if behind:
            row = st.log[red.pos]
            move('the worker relays row %s' % (row,), red=self.apply(red, row))
        if todo and (not behind or not self.v['relay_first']):
            if not self.v['together']:
                todo = [max(todo) if self.v['order'] == 'descending' else min(todo)]
            others = any(r.number not in todo for r in red.recs)
            move('the worker puts back %s' % [''.join(r.items) for r in red.recs if r.number in todo],
                 red=self.put_back(red, todo), mixed=st.mixed or others,
                 seen=None if self.v['forget'] else st.seen)
        elif not behind:
            ph = w.ph
            if ph == 'H':
                move('the worker thaws', red=red._replace(open=True), w=Worker('T', None, (), True))
            else:
                move('all of the snapshot is done', w=Worker('T', None, (), True))

    def past(self, st, move):
        red = st.red
        if st.w.ph != 'T' or red.pos != len(st.log):
            return
        if st.seen is None and red.ready and not red.recs and not red.pend:
            move('a look at the list: %s' % ''.join(red.ready), seen=(red.pos, st.pushed, red.ready[0]))
        if st.seen is not None and not red.recs and red.ready and red.ready[0] != st.seen[2] and \
           st.seen[1] <= st.pushed - len(red.ready):
            move('the list is past that look: mark stored at row %d' % st.seen[0], mark=st.seen[0], seen=None)

    def settled(self, st, element):
        if element in st.settled:
            return 'REPEAT: %s was settled by the mark, it is transferred again' % element
        return None

    def faults(self, st, move):
        def after(red):
            live = {m[1] for m in st.net if m[-1]}
            ses = max([st.red.ses] + [h.ses for h in st.hist]) + 1      # never one that was
            tx = tuple(t._replace(ph='ask') if i in live and t.st == 'O' else t
                       for i, t in enumerate(st.tx))
            return dict(red=red, net=(), tx=tx, hist=(), mixed=True, w=Worker('L', None, (), ses), seen=None)
        if st.budget.loss:
            for back in st.hist:
                if back != st.red:
                    move('Redis goes back: list %s, records %s, row %d' % (
                        ''.join(back.ready), [''.join(r.items) for r in back.recs], back.pos), True,
                        budget=self.spend(st, 'loss'), **after(back))
        if st.budget.flush:
            move('FLUSHALL', True, budget=self.spend(st, 'flush'),
                 **after(Redis(0, (), (), (), 0, 0, False)))
        if st.budget.kill and st.w is not None:
            move('kill -9 of the worker', True, w=None, budget=self.spend(st, 'kill'))

    # ---- what must be true ----

    def lost_something(self, st):
        return st.budget.loss != self.first.loss or st.budget.flush != self.first.flush

    def check(self, st):
        if st.bad:
            return st.bad
        if self.lost_something(st):
            return None
        taken = ''.join(e for t in st.tx if t.st == 'C' for items in t.got for e in items)
        for e in self.elements:
            where = taken.count(e) + st.red.ready.count(e) + st.red.pend.count(e)
            if where > 1:
                return 'TWICE: %s is consumed and in the list, or consumed twice' % e
        if not st.mixed and not st.red.recs and list(st.red.ready) != sorted(st.red.ready):
            return 'ORDER: %s is no longer in order' % ''.join(st.red.ready)
        return None

    def terminal(self, st):
        taken = ''.join(e for t in st.tx if t.st == 'C' for items in t.got for e in items)
        for e in self.elements:
            if e not in taken and e not in st.red.ready and e not in st.red.pend:
                return 'LOST: %s is neither consumed nor in the list' % e
        return None


SCENARIOS = []


def add(name, verdict, text, deep=False, **options):
    SCENARIOS.append(scenario(name, verdict, text, lambda: Poll(**options), deep))


add('pollers', 'holds', 'two pollers, a call is sent again, the worker is killed', drop=1, kill=1)
add('three', 'holds', 'three pollers, a call is sent again, the worker is killed', deep=True, pollers=3, drop=1,
    kill=1)
add('calls', 'holds', 'two pollers with two calls each, sent again', elements='ab', calls=2, most=1, drop=1)
add('calls2', 'holds', 'the same, three elements, sent again twice', deep=True, calls=2, most=1, drop=2)
add('loss', 'holds', 'two pollers, Redis goes back: nothing lost', elements='ab', most=1, loss=1, drop=1)
add('loss-kill', 'holds', 'the same, three elements, kill', deep=True, loss=1, kill=1, drop=1)
add('flush', 'holds', 'FLUSHALL and a loss with marks: nothing lost, nothing settled comes again',
    elements='ab', marks=True, loss=1, flush=1)
add('loss2', 'holds', 'two losses, kill, marks', deep=True, elements='ab', marks=True, loss=2, kill=1, drop=1)
add('past', 'holds', 'marks while the list is never empty, forgotten when something is put back; FLUSHALL', pollers=1,
    late='c', elements='ab', marks=True, flush=1, foreign=True, mark='past')
add('past2', 'holds', 'the same, two pollers', deep=True, late='c', elements='ab', most=1, marks=True, flush=1,
    foreign=True, mark='past')
add('past-kept', 'LOST', 'the same, the look at the list is kept when something is put back', pollers=1, late='c',
    elements='ab', marks=True, flush=1, foreign=True, mark='past', forget=False)
add('at-once', 'TWICE', 'put back before all of the snapshot is applied', relay_first=False)
add('empty', 'LOST', 'a call that got nothing writes a row: a zombie of it takes later',
    elements='a', most=1, drop=1, empty_row=True)
add('again', 'LOST', 'a call sent again takes again instead of looking for its record',
    drop=1, most=1, lookup=False)
add('ascending', 'ORDER', 'two records go back, first taken first', most=1, order='ascending')
add('backwards', 'ORDER', 'payloads pushed in the order they were taken', in_order=False)
add('not-dropped', 'TWICE', 'the record stands after its payloads were pushed', put_once=False, most=1)
add('mark', 'LOST', 'a mark that counts only the list, with a record open; FLUSHALL',
    elements='ab', marks=True, flush=1, mark='list')

if __name__ == '__main__':
    main(SCENARIOS)
