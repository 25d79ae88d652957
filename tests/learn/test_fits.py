"""What stands between a lesson's part and its seam: with it, the engine writes what it writes without."""

from __future__ import annotations

import common  # noqa: F401  it settles the device before torch is used

import random

import pytest

from engine import registry
from engine.core.block_pool import BlockPool, OutOfBlocks
from engine.llm import LLM
from engine.request import SamplingParams
from learn.fits import FITS

LESSONS = {
    "BlockPool": ("block_pool", "02_paged_attention"),
    "PrefixCache": ("block_pool", "05_optimizations"),
    "Scheduler": ("scheduler", "11_preemption"),
    "sample_rows": ("sampler", "07_spec_decode"),
}


def fitted(name):
    return FITS[name](getattr(registry.lesson(LESSONS[name][1]), name))


def answers(tiny_model, tokenizer, **arguments):
    llm = LLM(
        tiny_model, tokenizer=tokenizer, max_model_len=128, max_num_seqs=3, num_gpu_blocks_override=20, **arguments
    )
    shared = list(range(40))
    prompts = [[*shared, i] for i in range(3)] + [[9, 8, 7], shared, [*shared, 0, 5]]
    params = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=12, ignore_eos=True, logprobs=1 if i < 3 else None)
        for i in range(len(prompts))
    ]
    found = llm.generate(prompts, params)
    return [(output.num_cached_tokens, output.outputs[0].token_ids, output.outputs[0].logprobs) for output in found]


@pytest.mark.parametrize("name", FITS)
def test_the_engine_writes_the_same(name, tiny_model, real_model):
    plain = answers(tiny_model, real_model[1])
    found = answers(tiny_model, real_model[1], plug={LESSONS[name][0]: fitted(name)})
    if name == "BlockPool":  # which finds nothing
        assert not any(cached for cached, *_ in found) and any(cached for cached, *_ in plain)
        plain, found = [x[1] for x in plain], [x[1] for x in found]
    assert found == plain


def test_the_index_decides_as_the_engines_pool_does():
    """But for the order of several blocks without a hash: where there is a prefix cache, a request has one of them."""
    rng = random.Random(0)
    index, pool = fitted("PrefixCache")(12), BlockPool(12)
    tables: list[list[int]] = []
    for step in range(600):
        verb = rng.choice(["allocate", "hit", "free", "evict"])
        if verb == "allocate" and pool.num_free_blocks >= 3:
            blocks = pool.allocate(n := rng.randint(1, 3))
            assert index.allocate(n) == blocks
            for block in blocks[:-1]:  # the last one is not full
                for each in (index, pool):
                    each.cache_block(block, f"{step}.{block}".encode())
            tables.append(blocks)
        elif verb == "hit":
            key = rng.choice([key for key in pool.block_hash if key] or [b""])
            block = pool.get_cached_block(key)
            assert index.get_cached_block(key) == block
            if block is not None:
                index.touch([block])
                pool.touch([block])
                tables.append([block])
        elif verb == "free" and tables:
            blocks = tables.pop(rng.randrange(len(tables)))
            index.free(blocks)
            pool.free(blocks)
        elif verb == "evict" and (known := [block for block, key in enumerate(pool.block_hash) if key]):
            block = rng.choice([block for block in known if pool.ref_count[block]] or known[:1])
            index.evict(block)
            pool.evict(block)
            for table in [table for table in tables if len([b for b in table if not pool.block_hash[b]]) > 1]:
                tables.remove(table)
                for one in table:
                    index.free([one])
                    pool.free([one])
        assert [*index.free_queue] == [*pool.free_queue] and index.ref_count == pool.ref_count
        assert index.block_hash == pool.block_hash and index.num_free_blocks == pool.num_free_blocks
        assert {k: list(b) for k, b in pool.cached_block_hash_to_block.items()} == index.cached_block_hash_to_block
    with pytest.raises(OutOfBlocks):
        index.allocate(12)
