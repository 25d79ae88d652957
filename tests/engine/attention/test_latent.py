"""Attention on paged latents: whole, in chunks, decoded, guessed ahead; on torch's path and on lesson 09's kernel."""

from __future__ import annotations

import common

import contextlib
import functools
import math

import pytest
import torch

from engine import registry
from engine.attention.latent import LatentAttention
from engine.attention.metadata import AttentionMetadata
from engine.attention.torch_paged import FEW_TOKENS, plan_latents
from engine.config import SchedulerConfig
from engine.kv_transfer.kernels import gather_kv, scatter_kv
from engine.llm import LLM
from engine.quantization.kv_codes import block_bytes
from engine.request import SamplingParams
from engine.worker.cuda_graphs import CapturedModel, Tape
from engine.worker.sleep import Sleeper
from lab import naive
from support import needs
from support.close import assert_close
from support.latents import COMPRESSED, EXPERTS, PLAIN, latent_model
from support.transfers import handed_over, pair

DEVICE = common.device()
GRAPH = torch.cuda.CUDAGraph if common.HAS_GPU else Tape
TABLES = [[3, 9, 4, 7], [1, 6, 2], [8, 5, 11], [10, 12, 13]]
STEPS = [  # of four sequences, how many tokens each has after every step
    (20, 3, 0, 0),  # a prompt of many tokens, one of few
    (21, 4, 17, 1),  # two decode, two begin
    (25, 5, 36, 2),  # guesses to verify, a decode, a chunk behind what is cached, and once more a decode
    (26, 8, 37, 3),
]


def run(model, steps, block_size, poison):
    """Hidden states of every token, by sequence, from one cache; tokens are drawn once."""
    backend = LatentAttention()
    cache = backend.make_cache(model, 14, block_size)
    for layer in cache.layers:
        layer[:, 1:] = poison  # whatever a block held: only the null block is zeros
    ids = torch.randint(128, (4, 64), generator=torch.Generator().manual_seed(1)).to(model.device)
    found, before = [[] for _ in TABLES], (0,) * 4
    for step in steps:
        mine = [b for b in range(4) if step[b] > before[b]]
        lens = [step[b] - before[b] for b in mine]
        meta = AttentionMetadata.build(
            [TABLES[b] for b in mine], [step[b] for b in mine], lens, block_size, model.device
        )
        tokens = torch.cat([ids[b, before[b] : step[b]] for b in mine])
        hidden = model.forward(tokens, meta.positions, backend.plan(meta, cache))
        for b, part in zip(mine, hidden.split(lens)):
            found[b].append(part)
        before = step
    return ids, [torch.cat(parts) for parts in found if parts]


@pytest.mark.parametrize(
    "kernel", [False, pytest.param(True, marks=(pytest.mark.slow, needs.triton))], ids=["torch", "kernel"]
)
@pytest.mark.parametrize("mla", [PLAIN, COMPRESSED], ids=["plain", "compressed"])
def test_any_steps_are_the_whole(mla, kernel):
    """Chunks behind cached latents, decodes, guesses; blocks lie anywhere, and hold NaN where nothing is written."""
    model = latent_model(mla, DEVICE, moe=EXPERTS)
    with common.use_kernels() if kernel else contextlib.nullcontext():
        ids, found = run(model, STEPS if not kernel else STEPS[:3], 16, math.nan)
    for b, hidden in enumerate(found):
        n = len(hidden)
        positions = torch.arange(n, device=model.device)
        assert_close(hidden, model.forward(ids[b, :n], positions, naive.recompute))


@needs.triton
def test_a_step_launches_the_kernel_once_a_layer():
    """Prompts as well: their tokens are as many decodes."""
    lesson, model = registry.lesson("09_gqa"), latent_model(device=DEVICE)
    kernel, writes = lesson.mla_decode_kernel, registry.lesson("02_paged_attention").reshape_and_cache_kernel
    before = kernel.launches, writes.launches
    with common.use_kernels():
        ids, found = run(model, [(3, 0, 0, 0), (4, 2, 0, 0)], 4, math.nan)
    assert (kernel.launches, writes.launches) == (before[0] + 4, before[1] + 4), "two steps of two layers"
    for b, n in enumerate((4, 2)):
        assert_close(found[b], model.forward(ids[b, :n], torch.arange(n, device=DEVICE), naive.recompute))


def test_sequences_with_equally_many_tokens_go_together():
    """Unless they have many: of those each is copied by itself, and the budget keeps them few."""
    table, lens, many = torch.arange(1, 16).view(5, 3), torch.tensor([40, 39, 38, 6, 33]), FEW_TOKENS + 1
    counts = [1, many, 1, 2, many]
    plan = plan_latents(table, counts, lens, (16, 16, 48))
    first, second, third = [*range(1, 1 + many)], [2 + many, 3 + many], [*range(4 + many, 4 + 2 * many)]
    assert sorted(rows.tolist() for rows, *_ in plan) == [[0, 1 + many], first, second, third]
    for rows, blocks, dead, bias in plan:
        b, _, n, S = bias.shape
        assert b * n == len(rows) and len(blocks) * 16 == b * S
        ours = {0: [0, 2], 1: [1], 2 + many: [3], 4 + many: [4]}[int(rows[0])]
        assert len(dead) == sum(-length % 16 for length in lens[ours].tolist())


def test_padding_is_written_nowhere():
    """Slot −1, on either path; the last slot of the cache stays as it was."""
    model, backend = latent_model(device=DEVICE), LatentAttention()
    meta = AttentionMetadata.build([[1], [2]], [3, 1], [3, 1], 4, DEVICE)
    meta.slot_mapping[1:] = -1
    for kernel in (contextlib.nullcontext(), common.use_kernels()):
        cache = backend.make_cache(model, 3, 4)
        with kernel if common.HAS_TRITON else contextlib.nullcontext():
            attend = backend.plan(meta, cache)
            attend(1, torch.randn(4, 4, 48, device=DEVICE), torch.ones(4, 1, 48, device=DEVICE), torch.empty(0))
        assert cache.layers[1].flatten(1, 3).sum(-1).nonzero().tolist() == [[0, 4]] and not cache.layers[0].any()


def test_a_block_takes_its_latents_bytes():
    """One vector of R + P numbers: half of what keys and values of one head that wide would take."""
    model = latent_model()
    assert block_bytes(model, 16, "auto") == 2 * 16 * 48 * 4
    cache = LatentAttention().make_cache(model, 7, 16)
    assert sum(layer.nbytes for layer in cache.layers) == 7 * block_bytes(model, 16, "auto")


def test_the_caches_size_is_counted_in_latents(real_model):
    llm = LLM(
        latent_model(device=DEVICE),
        tokenizer=real_model[1],
        kv_cache_memory_bytes=64 * 2 * 16 * 48 * 4,
        max_model_len=64,
    )
    assert llm.llm_engine.core.scheduler.kv_cache_manager.block_pool.num_blocks == 65, "and nobody's"


REFUSED = {
    "kv_cache_dtype 'fp8'": {"kv_cache_dtype": "fp8"},
    "enable_lora": {"enable_lora": True},
    "speculative_config: method 'eagle'": {"speculative_config": {"method": "eagle"}},
    "speculative_config: method 'draft_model'": {"speculative_config": {"method": "draft_model"}},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_go_with_latents_is_refused_by_name(real_model, what):
    with pytest.raises(common.InputError) as error:
        LLM(latent_model(device=DEVICE), tokenizer=real_model[1], max_model_len=64, **REFUSED[what])
    assert str(error.value) == f"{what}: not with a model whose attention keeps latents (MLA)"


def answers(model, tokenizer, **about):
    prompts = [[7, 8, 9, 7, 8, 9, 7, 8], [5] * 40, [3, 1, 4]]
    llm = LLM(model, tokenizer=tokenizer, max_model_len=64, kv_cache_gib=0.05, **about)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.slow
@pytest.mark.parametrize("about", [
    {"plug": {"attention": registry.fill("attention.unified")}},
    {"speculative_config": {"method": "early_exit", "num_speculative_tokens": 2}},
], ids=["plugged", "early exit"])  # fmt: skip
def test_backends_that_know_no_latents_serve_them_too(real_model, about):
    """For `attend` it is MQA: lesson 10's backend, and a drafter's cache, keep keys and values that are the same."""
    model, tokenizer = latent_model(COMPRESSED, DEVICE, num_hidden_layers=3), real_model[1]
    assert answers(model, tokenizer, **about) == answers(model, tokenizer)


def test_latents_that_were_evicted_come_back_from_a_store(real_model, tmp_path, monkeypatch):
    from engine.kv_transfer import store

    monkeypatch.setattr(store, "SHM", tmp_path)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    about = {"tokenizer": real_model[1], "max_model_len": 64, "num_gpu_blocks_override": 5}
    prompts = [[i] * 48 for i in range(5, 10)]
    want = LLM(latent_model(device=DEVICE), **about).generate(prompts[:1], params)[0].outputs[0].token_ids
    llm = LLM(latent_model(device=DEVICE), kv_offloading_size=0.01, **about)
    for prompt in prompts:
        llm.generate([prompt], params)
    (again,) = llm.generate(prompts[:1], params)
    stats = llm.llm_engine.core.scheduler.connector.stats
    assert stats["bytes_in"] == 2 * block_bytes(latent_model(), 16, "auto") and again.outputs[0].token_ids == want


def test_latents_and_their_weights_go_away_and_come_back(real_model):
    def load():
        return latent_model(COMPRESSED, DEVICE, moe=EXPERTS)

    model, params = load(), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    llm = LLM(model, tokenizer=real_model[1], max_model_len=64, kv_cache_gib=0.05)
    want = llm.generate([[3, 1, 4]], params)[0].outputs[0].token_ids
    sleeper = Sleeper(llm.llm_engine.core.runner, model, load)
    llm.llm_engine.core.scheduler.kv_cache_manager.reset_prefix_cache()
    sleeper.sleep(2)
    assert not any(tensor.numel() for tensor in (model.mla[1].kv_b, *llm.llm_engine.core.runner.cache.layers))
    sleeper.wake_up()
    assert llm.generate([[3, 1, 4]], params)[0].outputs[0].token_ids == want


@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=needs.triton)], ids=["torch", "kernel"])
def test_latents_go_to_the_wire_and_back(kernel, guarded):
    """One half, where others have keys and values."""
    cache = guarded(torch.randn(1, 6, 8, 1, 48, device=DEVICE))
    blocks, theirs = torch.tensor([4, 1, 5], device=DEVICE), torch.tensor([3, 1], device=DEVICE)
    want = cache[0].flatten(0, 1)[[8 * int(blocks[p // 8]) + p % 8 for p in range(3, 20)]][None]
    other = torch.zeros(1, 4, 16, 1, 48, device=DEVICE)
    target = guarded(other)
    with common.use_kernels() if kernel else contextlib.nullcontext():
        wire = gather_kv(cache, guarded(blocks), 3, 17, 0, 1)
        assert wire.equal(want)
        scatter_kv(guarded(want), target, guarded(theirs), 3, 0)
    for i, p in enumerate(range(3, 20)):
        other[0, int(theirs[p // 16]), p % 16] = want[0, i]
    assert target.equal(other), "every element in its place, and no other one touched"


def test_a_prompt_is_computed_elsewhere():
    """Blocks of 16 tokens there and of 8 here; with the tokens of one engine."""
    model, prompt = latent_model(COMPRESSED, DEVICE, moe=EXPERTS), [(7 * i) % 128 for i in range(43)]
    with pair(model, "SharedMemoryConnector") as (prefill, decode):
        assert handed_over(prefill, decode, [prompt], 6) == [naive.generate(model, prompt, 6)]
        assert decode.scheduler.connector.stats["bytes_in"] == 43 * model.config.num_hidden_layers * 48 * 4


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=(pytest.mark.slow, needs.triton))])
def test_recorded_steps_are_eager_ones(full):
    """Pieces between attentions, and decodes whole, with the kernel in them."""
    model, backend = latent_model(COMPRESSED, DEVICE), LatentAttention()
    steps = (([5, 2], [5, 2]), ([6, 3], [1, 1]))

    def outputs(recorded):
        cache = backend.make_cache(model, 8, 4)
        plan = functools.partial(plan_with, backend, cache)
        graphs = CapturedModel(
            model, cache, plan, SchedulerConfig(16, 4, 16), graph_class=GRAPH, largest=8, full=full
        )  # fmt: skip
        for seq_lens, lens in steps:
            meta = AttentionMetadata.build([[1, 2], [3]], seq_lens, lens, 4, DEVICE)
            ids = torch.arange(sum(lens), device=DEVICE)
            yield (graphs.forward(ids, meta) if recorded else model.forward(ids, meta.positions, plan(meta))).clone()
        assert not recorded or {whole for _, whole in graphs.captured} == ({False, True} if full else {False})

    with common.use_kernels() if full else contextlib.nullcontext():
        for recorded, eager in zip(outputs(True), outputs(False), strict=True):
            assert_close(recorded, eager)


def plan_with(backend, cache, meta):
    return backend.plan(meta, cache)
