"""Several sources on one shard (PO 7, 9, PROTOCOL "Sources"): the owner, whose worker transfers
and removes, and a producer, who offers Z (due 1).  The owner removes Z under a hold.  Each has
its own log, floor and version; the owner writes the session, the producer reports that it has
healed for it, the owner thaws only then.  A remove row that finds its task nowhere leaves a
tombstone, which the producer's replay meets.
"""
from collections import namedtuple

from search import main, scenario

State = namedtuple('State', 'removes offers redis past owner producer mark remover fired clock budget bad')
Redis = namedtuple('Redis', 'own others pending held own_ver other_ver ses healed tomb')
# own/others: rows applied of the owner's and of the producer's log; healed: session
Owner = namedtuple('Owner', 'ph ses floor')             # ph: none, heals, thawed
Producer = namedtuple('Producer', 'ph ses floor swept')
Mark = namedtuple('Mark', 'a w settled')
Budget = namedtuple('Budget', 'loss kill_owner kill_producer')


class Sources:
    def __init__(self, loss=1, kill_owner=0, kill_producer=0, **variant):
        self.first = Budget(loss, kill_owner, kill_producer)
        self.v = dict(healed=True,      # the owner thaws only when the producer has healed
                      tombstone=True,
                      thaw_bumps=True)  # the thaw is a script that raises the version
        assert not set(variant) - set(self.v)
        self.v.update(variant)

    def initial(self):
        return State(0, 0, Redis(0, 0, False, False, 1, 1, 0, 0, False), (), Owner('none', 0, 0),
                     Producer('thawed', 0, 1, True), None, '', 0, 0, self.first, None)

    def moves(self, st):
        if st.bad:
            return []
        out = []

        def move(label, fault=False, **change):
            if st.budget.loss and change.get('redis', st.redis) != st.redis and 'past' not in change and \
               st.redis not in st.past:
                change['past'] = st.past + (st.redis,)
            out.append((label, st._replace(**change), fault))

        if not st.offers:
            move('the producer commits an offer of Z, due 1', offers=1)
        if st.clock < 1:
            move('time passes', clock=1)
        self.owner(st, move)
        if st.remover == 'open':
            move('the remover commits', remover='committed', removes=1)
            move('the remover rolls back', remover='back')
        self.producer(st, move)
        self.faults(st, move)
        return out

    def by_owner(self, st, **change):
        """A script of the owner: it raises his version, he knows it."""
        ver = st.redis.own_ver + 1
        return dict(redis=st.redis._replace(own_ver=ver, **change),
                    owner=st.owner._replace(floor=max(st.owner.floor, ver)))

    def by_producer(self, st, **change):
        ver = st.redis.other_ver + 1
        return dict(redis=st.redis._replace(other_ver=ver, **change),
                    producer=st.producer._replace(floor=max(st.producer.floor, ver)))

    def owner(self, st, move):
        o, redis, v = st.owner, st.redis, self.v
        if o.ph == 'none' or o.ses != redis.ses or redis.own_ver < o.floor:
            ses = max(redis.ses, o.ses) + 1
            move('the owner enters, session %d, frozen' % ses, owner=Owner('heals', ses, redis.own_ver),
                 redis=redis._replace(ses=ses, healed=0 if v['healed'] else 1))
            return
        if redis.own < st.removes:
            nothing = not redis.held and not redis.pending
            move('the owner relays its remove row of Z' + (', which finds nothing' if nothing else ''),
                 **self.by_owner(st, own=1, pending=False, held=False,
                                 tomb=redis.tomb or (v['tombstone'] and nothing)))
        if o.ph == 'heals':
            if redis.own == st.removes and st.remover != 'open' and (redis.healed == redis.ses or not v['healed']):
                change = self.by_owner(st) if v['thaw_bumps'] else dict(owner=o)
                change['owner'] = change['owner']._replace(ph='thawed')
                move('the owner thaws', **change)
            return
        if not st.remover and redis.pending:
            move('the owner removes Z: held, true', remover='open',
                 **self.by_owner(st, pending=False, held=True))
        if redis.held and st.remover == 'back':
            move('the owner puts Z back', **self.by_owner(st, pending=True, held=False))
        if redis.pending and st.clock and st.fired < 3:
            bad = None
            if st.remover == 'committed':
                bad = 'G4: the removal of Z was told true and has committed, Z is transferred'
            elif st.mark and st.mark.settled:
                bad = 'REPEAT: Z was settled by the mark of the producer, it is transferred again'
            move('the owner transfers Z', fired=st.fired + 1, bad=bad, **self.by_owner(st, pending=False))

    def producer(self, st, move):
        p, redis, mark = st.producer, st.redis, st.mark
        if p.ses != redis.ses or redis.other_ver < p.floor:
            move('the producer sees another session, or a version below its floor: heals',
                 producer=Producer('heals', redis.ses, redis.other_ver, False))
            return
        sweeps = mark is not None and redis.others <= mark.a and not p.swept
        if redis.others < st.offers and not (p.ph == 'heals' and sweeps and redis.others == mark.a):
            move('the producer relays Z' + (', a tombstone is there' if redis.tomb else ''),
                 **self.by_producer(st, others=1, pending=redis.pending or not redis.tomb))
        if p.ph == 'heals':
            if sweeps and redis.others == mark.a:
                gone = dict(pending=False, held=False) if mark.w >= 1 else {}
                change = self.by_producer(st, **gone)
                change['producer'] = change['producer']._replace(swept=True)
                move('the producer sweeps at its mark', **change)
            elif redis.others == st.offers and not sweeps:
                change = self.by_producer(st, healed=redis.ses)
                change['producer'] = change['producer']._replace(ph='thawed', swept=True)
                move('the producer has healed', **change)
            return
        w = 0 if redis.pending or redis.held else st.clock
        new = Mark(redis.others, w, bool(st.fired and redis.others and w >= 1))
        if new != mark and (mark is None or w >= mark.w):
            move('the producer stores a mark (row %d, W %d)' % (new.a, w), mark=new)

    def faults(self, st, move):
        def spend(what):
            return st.budget._replace(**{what: getattr(st.budget, what) - 1})
        if st.budget.kill_owner:
            move("the owner's worker is killed", True, owner=st.owner._replace(ph='none'),
                 budget=spend('kill_owner'))
        if st.budget.kill_producer:
            move("the producer's worker is killed", True, producer=Producer('thawed', -1, 0, True),
                 budget=spend('kill_producer'))
        if st.budget.loss:
            for back in st.past:
                if back != st.redis:
                    move('Redis goes back: rows %d and %d, Z %s, session %d' % (
                        back.own, back.others, 'pending' if back.pending else 'held' if back.held else 'gone',
                        back.ses), True, redis=back, past=(), budget=spend('loss'))

    def check(self, st):
        return st.bad

    def terminal(self, st):
        if st.offers and not st.fired and st.remover != 'committed':
            return 'LOST: Z is never transferred'
        return None


SCENARIOS = []


def add(name, verdict, text, deep=False, **options):
    SCENARIOS.append(scenario(name, verdict, text, lambda: Sources(**options), deep))


add('loss', 'holds', 'Redis goes back')
add('loss2', 'holds', 'Redis goes back twice', loss=2, deep=True)
add('kill-owner', 'holds', "Redis goes back, the owner's worker is killed", kill_owner=1)
add('kills', 'holds', 'Redis goes back, both workers are killed', deep=True, kill_owner=1, kill_producer=1)
add('all', 'holds', "twice, and the owner's worker is killed", deep=True, loss=2, kill_owner=1)
add('not-waited', 'REPEAT', 'the owner thaws before the producer has healed', healed=False, tombstone=False)
add('not-waited2', 'REPEAT', 'the same with tombstones', healed=False)
add('no-tombstone', 'G4', 'no tombstone: the replay brings back what was removed', tombstone=False)
add('silent-thaw', 'REPEAT', 'a thaw that Redis does not know of, Redis goes back twice', loss=2,
    thaw_bumps=False)

if __name__ == '__main__':
    main(SCENARIOS)
