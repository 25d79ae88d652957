"""Engines that share experts stop when nobody has a request, and no news is on its way to anybody."""

from __future__ import annotations

import random

import pytest

from engine.parallel.lockstep import Lockstep


def agree(engines):
    states = [engine.state for engine in engines]
    for engine in engines:
        engine.agree(states)
    return [engine.running for engine in engines]


def test_who_is_told_of_a_request_runs():
    engine = Lockstep()
    engine.told(0)
    assert not engine.running
    engine.told(2)
    assert engine.running and engine.state == (0, 2)
    engine.told(0)
    assert engine.running, "no news do not stop it"


def test_nobody_stops_while_somebody_has_a_request():
    engines = [Lockstep() for _ in range(3)]
    engines[1].inside = lambda: True
    for engine in engines:
        engine.told(1)
    assert agree(engines) == [True] * 3
    engines[1].inside = lambda: False
    assert agree(engines) == [False] * 3


def test_nobody_stops_before_news_that_others_have():
    """Or it would begin again later, alone, and wait for them for ever."""
    engines = [Lockstep() for _ in range(2)]
    engines[0].told(1)
    assert agree(engines) == [True, True], "the other's letter is on its way"
    engines[1].told(1)
    assert agree(engines) == [False, False]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_order_of_letters_all_take_the_same_steps(seed):
    """Requests come to any engine, and letters arrive late. An engine steps while it runs, and all steps together."""
    rng, n = random.Random(seed), 3
    engines, left, mail = [Lockstep() for _ in range(n)], [0] * n, [[] for _ in range(n)]
    for engine, i in zip(engines, range(n)):
        engine.inside = lambda i=i: left[i] > 0
    pending, steps = 12, [0] * n
    waiting = set()
    for _ in range(5000):
        if pending and rng.random() < 0.2:
            pending, whose = pending - 1, rng.randrange(n)
            for i in range(n):
                mail[i].append(i == whose)
        i = rng.randrange(n)
        if i not in waiting:  # it reads some of its letters, then steps if it must
            for _ in range(rng.randrange(3)):
                if mail[i]:
                    left[i] += rng.randint(1, 4) if mail[i].pop(0) else 0
                    engines[i].told(1)
            if engines[i].running or left[i]:
                waiting.add(i)
        if len(waiting) == n:  # the step is taken when all are there
            agree(engines)
            left, steps = [max(0, k - 1) for k in left], [k + 1 for k in steps]
            waiting.clear()
    assert not pending and not any(left) and not any(mail)
    assert not waiting and not any(engine.running for engine in engines), "nobody waits for the others for ever"
    assert steps[0] > 12
