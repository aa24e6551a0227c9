"""The searcher: all states that a model can reach, breadth first, so that the trace of a
violation is a shortest one.  Every model of this directory is a class with

    initial()        the first state, hashable
    moves(state)     [(label, next state, is a fault)]
    check(state)     None, or what is wrong with it
    terminal(state)  the same, asked of states in which only faults can still happen

A model lists its scenarios.  A scenario has a verdict that must come out: 'holds' (every
reachable state looked at, nothing wrong) or the first word of the violation that must be
found, which shows that the checker can see what it looks for.

    python3 doc/model/relay.py               all scenarios of this model, with traces
    python3 doc/model/relay.py -l            what they are
    python3 doc/model/relay.py crash fence   those whose name contains one of the words
    python3 doc/model/search.py              every model, one line for each scenario
    python3 doc/model/search.py --deep       the larger bounds as well (half an hour, 2 GB)
"""
import importlib
import multiprocessing
import os
import sys
import time
from collections import deque, namedtuple

MODELS = ('relay', 'order', 'holds', 'poll', 'heal', 'marks', 'sources', 'copies', 'claims')

Result = namedtuple('Result', 'verdict error trace states depth seconds')
Scenario = namedtuple('Scenario', 'name verdict text make deep')


def scenario(name, verdict, text, make, deep=False):
    """make: a function without arguments that returns the model. deep: too large for the
    test, run with --deep only."""
    return Scenario(name, verdict, text, make, deep)


def explore(model, limit):
    start = time.time()
    first = model.initial()
    parent = {first: None}
    todo = deque([(first, 0)])
    depth = 0

    def result(verdict, error=None, at=None):
        trace = []
        while at is not None and parent[at] is not None:
            at, label = parent[at]
            trace.append(label)
        return Result(verdict, error, trace[::-1], len(parent), depth, time.time() - start)

    error = model.check(first)
    if error:
        return result('breaks', error, first)
    while todo:
        state, depth = todo.popleft()
        moves = model.moves(state)
        if not any(not fault for _, _, fault in moves):
            error = model.terminal(state)
            if error:
                return result('breaks', error, state)
        for label, after, _ in moves:
            if after in parent:
                continue
            parent[after] = (state, label)
            error = model.check(after)
            if error:
                return result('breaks', error, after)
            todo.append((after, depth + 1))
        if len(parent) > limit:
            return result('limit')
    return result('holds')


def verdict_of(result):
    """'holds', 'limit', or the first word of the violation."""
    if result.verdict == 'breaks':
        return result.error.split(':')[0].split(' ')[0]
    return result.verdict


def run(one, limit=8_000_000):
    result = explore(one.make(), limit)
    return verdict_of(result), result


def line(model, one, got, result):
    return '%-4s %-8s %-16s %-8s %8d states %5.1f s  %s%s' % (
        'ok' if got == one.verdict else 'FAIL', model, one.name, got, result.states, result.seconds,
        one.text, '' if got == one.verdict else ' (expected: %s)' % one.verdict)


def show(model, one):
    got, result = run(one)
    print(line(model, one, got, result))
    if result.error:
        print('      ' + result.error)
        for number, label in enumerate(result.trace):
            print('      %2d. %s' % (number + 1, label))
    sys.stdout.flush()
    return got == one.verdict


def main(scenarios, args=None):
    """Entry of a model's file."""
    args = sys.argv[1:] if args is None else args
    model = os.path.basename(sys.argv[0])[:-3]
    words = [a for a in args if not a.startswith('-')]
    if '-l' in args:
        for one in scenarios:
            print('%-22s %-8s %s%s' % (one.name, one.verdict, one.text,
                                       ' (deep)' if one.deep else ''))
        return
    good = True
    for one in scenarios:
        if words and not any(w in one.name for w in words):
            continue
        if one.deep and not words and '--deep' not in args:
            continue
        good &= show(model, one)
    sys.exit(0 if good else 1)


def one_line(place):
    model, number = place
    one = importlib.import_module(model).SCENARIOS[number]
    got, result = run(one)
    return got == one.verdict, line(model, one, got, result)


def all_models(args):
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    places = [(name, number) for name in MODELS
              for number, one in enumerate(importlib.import_module(name).SCENARIOS)
              if not one.deep or '--deep' in args]
    good = True
    with multiprocessing.Pool(min(2, os.cpu_count() or 1), maxtasksperchild=20) as pool:
        for right, text in pool.imap(one_line, places):
            print(text, flush=True)
            good &= right
    sys.exit(0 if good else 1)


if __name__ == '__main__':
    all_models(sys.argv[1:])
