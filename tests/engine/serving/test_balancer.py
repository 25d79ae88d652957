"""Which of several engines a request goes to."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.kv_cache_manager import KVCacheManager
from engine.serving.balancer import BALANCERS, LoadBalancer, PrefixAwareBalancer
from support.small_requests import request_of


def test_vllms_score():
    balancer = LoadBalancer(3, client_count=2)
    balancer.counts, balancer.inflight = [[4, 16, 1.0], [0, 30, 0.9], [4, 16, 0.5]], [0, 0, 12]
    assert [balancer.score(i) for i in range(3)] == [32.0, 30.0, 24]
    assert balancer.choose(request_of([1])) == 2
    assert balancer.counts[2][0] == 6 and balancer.inflight[2] == 13, "it counts before the coordinator says so"


def test_a_burst_goes_round_and_ties_rotate():
    balancer = LoadBalancer(4)
    assert sorted(balancer.choose(request_of([1])) for _ in range(4)) == [0, 1, 2, 3]
    balancer.counts = [[0, 0, 0.0] for _ in range(4)]  # a snapshot that is older than the burst
    assert sorted(balancer.choose(request_of([1])) for _ in range(4)) == [0, 1, 2, 3], "its own count is exact"
    starts = []
    for index in range(4):
        starts.append(LoadBalancer(4, client_index=index, client_count=4).choose(request_of([1])))
    assert starts == [0, 1, 2, 3], "clients that know nothing of each other start at different engines"


@pytest.mark.parametrize(("engines", "clients", "starts"), [(8, 2, [0, 4]), (2, 4, [0, 0, 1, 1]), (3, 1, [0])])
def test_clients_begin_far_from_each_other(engines, clients, starts):
    """Each with its own share of the engines, or several with one, before anybody knows of anybody's load."""
    assert [LoadBalancer(engines, i, clients).choose(None) for i in range(clients)] == starts


@pytest.mark.parametrize("kind", BALANCERS.values())
def test_idle_engines_take_turns(kind):
    balancer = kind(3)
    assert [balancer.pick(request_of([i] * 20)) for i in range(6)] == [0, 1, 2, 0, 1, 2]


def test_a_prefix_goes_where_it_was_unless_that_is_too_far_behind():
    balancer = PrefixAwareBalancer(3, block_size=4, num_blocks=8, max_imbalance=2)
    first = balancer.choose(request_of(range(8)))
    others = [balancer.choose(request_of(range(100 * i, 100 * i + 8))) for i in (1, 2)]
    assert sorted([first, *others]) == [0, 1, 2]
    again = [balancer.choose(request_of([*range(8), i])) for i in range(6)]
    assert again[:3] == [first] * 3, "two behind is allowed"
    assert again[3] != first, "three are not"
    assert balancer.choose(request_of(range(8), cache_salt="x")) in range(3)
    assert balancer.hashes(request_of(range(8), cache_salt="x")) != balancer.hashes(request_of(range(8)))
    assert balancer.hashes(request_of(range(8), lora_name="x"))[1] != balancer.hashes(request_of(range(8)))[1]
    assert balancer.hashes(request_of(range(7))) == balancer.hashes(request_of(range(8)))[:1]
    assert len(balancer.hashes(request_of(range(8)))) == 2
    manager = KVCacheManager(9, 4, 64)
    manager.update_block_hashes(both := request_of(range(8), cache_salt="x", lora_name="y"))
    assert balancer.hashes(both) == both.block_hashes, "the keys that the engine's cache will have"
    assert all(len(sent) <= 8 for sent in balancer.sent)


def test_of_two_engines_with_the_prefix_the_shorter_queue():
    balancer = PrefixAwareBalancer(3, block_size=4)
    for engine in (1, 2):
        balancer.sent[engine].update(dict.fromkeys(balancer.hashes(request_of(range(8)))))
    balancer.inflight = [0, 3, 2]
    assert balancer.choose(request_of(range(8))) == 2


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=40), st.sampled_from(["load", "prefix"]))
def test_balancers_count_right(events, kind):
    balancer, running = BALANCERS[kind](3), []
    for group, finish in events:
        if finish and running:
            balancer.finished(running.pop(0))
        else:
            running.append(balancer.choose(request_of(range(group * 50, group * 50 + 33))))
        assert balancer.inflight == [running.count(i) for i in range(3)]
    if kind == "load":
        assert not running or max(balancer.inflight) - min(balancer.inflight) <= len(running)


def test_the_index_forgets_the_oldest():
    balancer = PrefixAwareBalancer(1, block_size=1, num_blocks=3)
    balancer.choose(request_of([1, 2, 3]))
    balancer.choose(request_of([9]))
    kept = list(balancer.sent[0])
    assert len(kept) == 3 and balancer.hashes(request_of([9]))[0] == kept[-1]
    assert balancer.hashes(request_of([1]))[0] not in kept
    balancer = PrefixAwareBalancer(1, block_size=1, num_blocks=2)
    for token in (1, 2, 1, 3):
        balancer.choose(request_of([token]))
    assert list(balancer.sent[0]) == [balancer.hashes(request_of([token]))[0] for token in (1, 3)], "1 was used again"
