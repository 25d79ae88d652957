"""Where experts had better be: everyone is somewhere, nobody is crowded out, and the busiest rank has less to do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.parallel.eplb import Placement, rebalance_experts, slot_tables


@given(st.lists(st.integers(0, 1000), min_size=4, max_size=24), st.sampled_from([1, 2, 4]), st.integers(0, 3))
def test_every_expert_has_a_slot_and_every_rank_as_many_as_any_other(load, ranks, spare):
    slots = -(-len(load) // ranks) * ranks + spare * ranks
    placement = rebalance_experts(load, slots, ranks)
    assert len(placement.experts) == slots and set(placement.experts) == set(range(len(load)))
    assert {len(placement.slots(rank)) for rank in range(ranks)} == {slots // ranks}
    assert sum(placement.rank_loads(load)) == pytest.approx(sum(load))
    assert [placement.owner(slot) for slot in range(slots)] == [slot * ranks // slots for slot in range(slots)]


def test_by_hand():
    """With two spare slots the busiest expert is in three, of 4 each: 4 + 4 + 1 and 4 + 3 + 2."""
    placement = rebalance_experts([12, 3, 2, 1], 6, 2)
    assert sorted(placement.experts) == [0, 0, 0, 1, 2, 3]
    assert max(placement.rank_loads([12, 3, 2, 1])) == 9 < max(Placement.plain(4, 2).rank_loads([12, 3, 2, 1])) == 15


def test_replicas_are_on_ranks_of_their_own_where_there_is_room():
    placement = rebalance_experts([9, 1, 1, 1, 1, 1], 8, 4)
    assert all(len({placement.experts[slot] for slot in placement.slots(rank)}) == 2 for rank in range(4))


def test_replicas_help_where_packing_cannot():
    """One expert that half of all tokens want is a rank's whole work, wherever it is."""
    load = [50] + [5] * 10
    packed = max(rebalance_experts([*load, 0], 12, 4).rank_loads([*load, 0]))
    shared = max(rebalance_experts([*load, 0], 16, 4).rank_loads([*load, 0]))
    assert packed >= 50 and shared <= 30


def test_tables_name_every_slot():
    slots, copies = slot_tables(Placement((2, 0, 1, 0), 2), torch.device("cpu"))
    assert copies.tolist() == [2, 1, 1] and slots.tolist() == [[1, 3], [2, 2], [0, 0]]
