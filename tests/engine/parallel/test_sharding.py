"""Which numbers of ranks a model allows, and which heads each has."""

from __future__ import annotations

import common

import dataclasses

import pytest
import torch

from engine.model import llama
from engine.parallel import sharding
from engine.parallel.layers import QKVParallelLinear
from engine.parallel.model import shard_model
from lab import roofline
from support.rank_threads import CPU, ThreadGroup


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (9, 3), (6, 6), (4, 1), (12, 4)])
def test_heads_stay_whole_and_meet_their_own_kv_head(heads, kv_heads):
    """Weights that name their head: rank r gets query heads and exactly the KV heads that these attend to."""
    config = dataclasses.replace(llama.random_model().config, num_attention_heads=heads,
                                 num_key_value_heads=kv_heads, intermediate_size=144)  # fmt: skip
    D, group_size = 3, heads // kv_heads
    named = lambda count: torch.arange(count).repeat_interleave(D)[:, None]  # noqa: E731
    for n in [n for n in range(1, heads + 1) if sharding.divides(config, n)]:
        seen = []
        for rank in range(n):
            q = QKVParallelLinear.shard(named(heads), rank, n, heads)
            kv = QKVParallelLinear.shard(named(kv_heads), rank, n, kv_heads)
            q_heads, kv_owned = q[::D, 0].tolist(), kv[::D, 0].tolist()
            assert len(q) == D * heads // n and len(kv) == D * sharding.shard_config(config, n).num_key_value_heads
            assert kv_owned == sorted({h // group_size for h in q_heads})
            local_group = len(q_heads) // len(kv_owned)  # how attention will map them, from the counts alone
            assert [kv_owned[i // local_group] for i in range(len(q_heads))] == [h // group_size for h in q_heads]
            seen += q_heads
        assert seen == list(range(heads))


def test_sizes_that_do_not_divide_are_refused(tiny_model):
    smol = roofline.llama_config(roofline.MODELS["SmolLM2-135M"])
    for n in (2, 4, 6, 8, 9, 18):
        with pytest.raises(common.InputError) as error:
            sharding.check_tensor_parallel_size(smol, n)
        message = str(error.value)
        assert f"tensor_parallel_size {n}" in message and "num_attention_heads (9)" in message
        assert message.endswith(": 1, 3") and "\n" not in message
    with pytest.raises(common.InputError, match="intermediate_size"):  # 6 heads, but 112 neurons
        shard_model(tiny_model, ThreadGroup(6, 0, None, [], CPU))
    uneven = dataclasses.replace(smol, num_attention_heads=12, num_key_value_heads=4)
    works = [n for n in range(1, 13) if sharding.divides(uneven, n)]
    assert works == [1, 2, 4, 12]  # 3 and 6 would cut a KV head's group in two
