"""Order (G8): two overlapping transactions offer key 1 and key 2 each.  Every interleaving of
their calls and commits; both are in one batch.  In which serial order do the keys end?"""
from itertools import permutations

from search import main, scenario


class Order:
    """One state for each interleaving: (which transaction each key ends with, commit order)."""

    def __init__(self, rule):
        self.rule = rule                # order of the rows by 'number' or by 'transaction'

    def initial(self):
        return None

    def moves(self, st):
        if st is not None:
            return []
        steps = [(t, s) for t in 'AB' for s in (1, 2, 'commit')]
        out = []
        for way in permutations(steps):
            place = {step: n for n, step in enumerate(way)}
            if any(max(place[t, s] for s in (1, 2, 'commit')) != place[t, 'commit'] for t in 'AB'):
                continue
            last = {t: max(place[t, 1], place[t, 2]) for t in 'AB'}
            rows = [(t, s) for t, s in way if s != 'commit']
            if self.rule == 'transaction':
                rows.sort(key=lambda r: (last[r[0]], place[r]))
            ends = {}
            for t, key in rows:
                ends[key] = t
            one_after_other = [t for t, s in way][:3] in (['A'] * 3, ['B'] * 3)
            label = ' '.join('%s:%s' % step for step in way)
            out.append((label, (label, ends[1], ends[2], way[-1][0] if one_after_other else None), False))
        return out

    def check(self, st):
        if st is None:
            return None
        _, first, second, later = st
        if first != second:
            return 'ORDER: key 1 ends with %s, key 2 with %s' % (first, second)
        if later is not None and first != later:
            return 'ORDER: %s began after the other had committed, and does not come last' % later
        return None

    def terminal(self, st):
        return None


SCENARIOS = [
    scenario('transaction', 'holds', 'by (last number of the transaction, number)',
             lambda: Order('transaction'), False),
    scenario('number', 'ORDER', 'by number only', lambda: Order('number'), False),
]

if __name__ == '__main__':
    main(SCENARIOS)
