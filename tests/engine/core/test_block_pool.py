"""The pool of blocks, by itself."""

from __future__ import annotations

import common

import pytest

from engine.core.block_pool import BlockPool


def test_a_pool_has_room_for_the_null_block_and_one_more():
    assert BlockPool(2).num_blocks == 2
    with pytest.raises(common.InputError, match="num_blocks is 1; allowed: at least 2"):
        BlockPool(1)


@pytest.mark.parametrize("block", [0, -1, 5])
def test_what_is_no_block_of_a_sequence_is_neither_owned_nor_freed(block):
    """The null block, one counted from the end, one behind it; the blocks beside it stay as they are."""
    pool = BlockPool(5)
    (mine,) = pool.allocate(1)
    before = (list(pool.ref_count), list(pool.free_queue))
    for change in (pool.touch, pool.free):
        with pytest.raises(ValueError, match=f"block {block} is not one of 1..4"):
            change([mine, block])
        assert (list(pool.ref_count), list(pool.free_queue)) == before


def test_a_block_is_freed_as_often_as_it_is_owned():
    pool = BlockPool(5)
    (mine,) = pool.allocate(1)
    with pytest.raises(ValueError, match=f"block {mine} is freed 2 times but has 1 owners"):
        pool.free([mine, mine])
    pool.free([mine])
    with pytest.raises(ValueError, match=f"block {mine} is freed 1 times but has 0 owners"):
        pool.free([mine])
