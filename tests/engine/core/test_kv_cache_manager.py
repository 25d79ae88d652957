"""The tables' own sums, by hand; what is found and evicted is compared with vLLM in `test_conformance.py`."""

from __future__ import annotations

import common  # noqa: F401  it must come before torch

import pytest

from engine.core.kv_cache_manager import KVCacheManager
from engine.request import Request, SamplingParams


@pytest.mark.parametrize("bits", [256, 64, 16])
def test_a_hash_has_the_bits_that_were_asked_for(bits):
    manager = KVCacheManager(num_blocks=8, block_size=2, max_model_len=16)
    manager.hash_bits = bits
    request = Request("r", [1, 2, 3, 4, 5], SamplingParams())
    manager.update_block_hashes(request)
    assert [len(block_hash) for block_hash in request.block_hashes] == [bits // 8] * 2
