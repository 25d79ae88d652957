"""The pool of blocks, by itself."""

from __future__ import annotations

import common

import pytest

from engine.core.block_pool import BlockPool


def test_a_pool_has_room_for_the_null_block_and_one_more():
    assert BlockPool(2).num_blocks == 2
    with pytest.raises(common.InputError, match="num_blocks is 1; allowed: at least 2"):
        BlockPool(1)
