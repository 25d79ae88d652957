"""What a table for each group of layers saves, and how many sequences fit."""

from __future__ import annotations

import common

import pytest

from engine.kv_cache_interface import get_kv_cache_groups
from lab import hybrid_kv_cache as part


def test_a_sequence_holds_its_window_and_no_more():
    """Gemma-3: while a prompt comes in, a window and a chunk; then, the window."""
    groups = get_kv_cache_groups(part.layer_specs("Gemma-3-4B"))
    steps = part.blocks_held(groups, 32768, 2048)
    assert steps[-1] == [64] * 6 + [2048] and max(step[0] for step in steps) == 192
    most = groups[0].spec.max_blocks(1 << 20, 2048)
    assert most == 193, "1,023 and 2,048 tokens, and a block for a window that begins inside one"
    assert part.blocks_held(groups, 1000, 2048)[-1] == [63] * 7


def test_the_simulation_counts_what_fits():
    trace = part.simulate(part.DEFAULT)
    assert trace["block_bytes"] == 5 * 16 * 2 * 4 * 256 * 2
    blocks, (*windows, full) = 20 * 2**30 // trace["block_bytes"], trace["steps"][-1]
    each = sum(windows) + full
    last = 6 * 192 + 2048  # who comes in needs more for its last chunk than it keeps
    fits = (blocks - last) // each + 1
    assert trace["ways"]["hybrid"]["sequences"] == fits
    assert trace["ways"]["hybrid"]["free_permille"] == (blocks - fits * each) * 1000 // blocks
    assert trace["ways"]["as_if_full"]["sequences"] == 20 * 2**30 // (34 * 2**15 * 4096)
    with pytest.raises(common.InputError, match="model: 'GPT-2'; allowed: Gemma-3-4B"):
        part.simulate(part.DEFAULT | {"model": "GPT-2"})
