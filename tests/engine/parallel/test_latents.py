"""Latent attention on several ranks: heads are dealt out, and what all of them read is on every rank."""

from __future__ import annotations

import functools

import pytest
import torch

from engine.kv_transfer.digest import weights_digest
from engine.model import llama
from engine.model.packed_linear import pack_weights
from engine.parallel.config import ParallelConfig
from engine.parallel.model import TensorParallelLlama, map_local
from engine.parallel.pipeline import PipelineEngineCore
from engine.parallel.shards import model_tensors
from engine.parallel.worker import WorkerSpec
from engine.quantization.kv_codes import block_bytes
from engine.registry import lesson
from lab import naive
from support import small_cores
from support.close import assert_close
from support.latents import COMPRESSED, EXPERTS, PLAIN, latent_model, sizes_of
from support.rank_threads import WorkerThreads, in_threads
from support.small_cores import PROMPTS, remote_runner, scheduler_of

IDS = [5, 1, 77, 126, 0, 63, 64, 31, 32, 99]
KINDS = {"plain": PLAIN, "compressed": COMPRESSED}


def logits_of(model):
    return model.logits(model.forward(torch.tensor(IDS), torch.arange(len(IDS)), naive.recompute))


@functools.cache
def whole(kind):
    return latent_model(KINDS[kind], moe=EXPERTS)


def shard(kind, group, way=None):
    about = {"enable_expert_parallel": True, "all2all_backend": way} if way else {}
    config = ParallelConfig(group.world_size, **about).shared_experts(whole(kind).config)
    return TensorParallelLlama(config, model_tensors(whole(kind)), group)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "way"), [(1, None), (2, None), (4, None), (2, "allreduce"), (4, "all2all")])
def test_shards_are_the_model(kind, n, way):
    found = in_threads(n, lambda group: numbers_of(shard(kind, group, way)))
    for out, _, digest in found:
        assert_close(out, logits_of(whole(kind)))
        assert out.equal(found[0][0]) and digest == found[0][2] == weights_digest(whole(kind))
    assert sum(held for _, held, _ in found) == whole(kind).num_parameters + (n - 1) * copied(whole(kind))


def test_other_weights_are_other_latents():
    """What a digest is for: a cache that was filled with other weights is of no use, whichever part is another."""
    seen = {weights_digest(latent_model(COMPRESSED, moe=EXPERTS))}
    for change in (
        lambda mla: mla.kv_b.mul_(2), lambda mla: mla.q_norm.add_(1), lambda mla: mla.kv_norm.add_(1),
    ):  # fmt: skip
        model = latent_model(COMPRESSED, moe=EXPERTS)
        change(model.mla[1])
        seen.add(weights_digest(model))
    model = latent_model(COMPRESSED, moe=EXPERTS)
    model.moe[1].correction.add_(1)
    assert len(seen | {weights_digest(model)}) == 5


def numbers_of(model):
    return logits_of(model), model.num_parameters, weights_digest(model)


def copied(model):
    """Weights that every rank has: norms, routers, and what makes latents."""
    c, mla = model.config, model.config.mla
    down = c.hidden_size * (mla.latent_size + (mla.q_lora_rank or 0))
    routers = [t for moe in model.moe.values() for t in (moe.gate, moe.correction)]
    norms = [t for part in model.mla.values() for t in (part.q_norm, part.kv_norm) if t is not None]
    return down * c.num_hidden_layers + sum(t.numel() for t in (*model.norms, model.norm, *routers, *norms))


def test_every_rank_keeps_every_latent():
    """Keys and values of heads are divided; one vector for all heads cannot be: four ranks, four copies."""
    model = whole("plain")
    ranks = in_threads(4, lambda group: block_bytes(shard("plain", group), 16, "auto"))
    assert ranks == [block_bytes(model, 16, "auto")] * 4
    grouped = llama.random_model(num_attention_heads=4, num_key_value_heads=4)
    ranks = in_threads(4, lambda group: block_bytes(lesson_shard(grouped, group), 16, "auto"))
    assert ranks == [block_bytes(grouped, 16, "auto") // 4] * 4


def lesson_shard(model, group):
    return TensorParallelLlama(model.config, model_tensors(model), group)


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_cannot_tell(kind):
    serve = lesson("05c_tensor_parallel").serve
    prompts, outputs = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [35]], [9, 4, 7]
    want = serve(whole(kind), prompts, outputs).token_ids
    found = in_threads(2, lambda group: serve(map_local(shard(kind, group), pack_weights), prompts, outputs).token_ids)
    assert found == [want] * 2


@pytest.mark.parametrize(("tp", "pp", "way"), [(2, 1, None), (2, 2, "all2all"), (1, 3, None)])
def test_every_layout_writes_the_same_tokens(tp, pp, way):
    """Chunks, five requests of all lengths, prefixes that are found again; a stage counts its layers from its first."""
    sizes = sizes_of(COMPRESSED, moe=EXPERTS, num_hidden_layers=4, vocab_size=131)
    parallel = ParallelConfig(tp, pp, enable_expert_parallel=way is not None, all2all_backend=way or "allreduce")
    executor = WorkerThreads(parallel)
    executor.collective_rpc("load_model", WorkerSpec(sizes, parallel))
    scheduler = scheduler_of()
    core = PipelineEngineCore(scheduler, remote_runner(executor, parallel, scheduler), pp)
    tokens = small_cores.serve(core)
    executor.shutdown()
    model = llama.random_model(**sizes)
    assert tokens == [naive.generate(model, prompt, len(written)) for prompt, written in zip(PROMPTS, tokens)]
