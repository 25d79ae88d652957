"""Lesson 12: every row of a batch is computed by its own model, and whoever is not resident waits outside."""

from __future__ import annotations

import common

import asyncio
import copy
import dataclasses
import json
import math
import os
import random
import shutil
import subprocess
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine import front_end, registry
from engine.core.queues import FairRequestQueue
from engine.engine_args import EngineArgs
from engine.model import folders, gguf_files, llama, loader, weights
from engine.model.config import LlamaConfig
from engine.model.tokenizer import Tokenizer
from engine.request import Request
from engine.serving.async_llm import AsyncLLM
from engine.serving.core_proc import EngineCoreProc
from engine.serving.openai.app import build_app
from engine.serving.start import make_engine
from lab import cli
from support import scripts
from support.close import assert_close

lesson, page = registry.lesson("12_multi_lora"), cli.numbers("12_multi_lora")
paged = registry.lesson("02_paged_attention")
from engine.core.block_pool import BlockPool
from engine.lora import files, lora_model
from engine.lora import manager as managing
from engine.lora.layers import adapted_model
from engine.lora.lora_model import LoRAModel
from engine.lora.manager import LoRAModelManager
from engine.lora.reader import AdapterReader
from lab import adapter_training as training
from lab import naive
from support import tokenizing
from support.tokenizing import NoBytes, Words

NONE, Meta, SamplingParams = lesson.NONE, lesson.LoRAKernelMeta, lesson.SamplingParams
LoRAConfig, LoRARequest = lesson.LoRAConfig, lesson.LoRARequest


@pytest.fixture(scope="module")
def tiny():
    return llama.random_model(seed=0)


@pytest.fixture
def make(monkeypatch, tiny):
    """An engine on the tiny model, with adapters a0, a1, …"""
    monkeypatch.setattr(front_end, "TokenBytes", NoBytes)

    def build(config=None, model=tiny, **about):
        about = {"max_model_len": 96, "max_num_seqs": 8, "num_gpu_blocks_override": 128} | about
        return lesson.make_llm(model, Words(), config or LoRAConfig(4, 16, 8), **about)

    return build


def some(model, count, ranks=(4, 8, 3), size=1.0, **about):
    return [lora_model.random_adapter(model.config, ranks[i % len(ranks)], seed=i, name=f"a{i}", size=size, **about)
            for i in range(count)]  # fmt: skip


def alone(model, lora, prompt, tokens, monkeypatch=None):
    """Greedy tokens of the model with the adapter merged into its weights: no adapter code at all."""
    merged = model if lora is None else lora_model.merged(model, lora)
    return naive.generate(merged, prompt, tokens)


# --- The kernels ------------------------------------------------------------------------------------------------------


def batch_of(slots, shape, dtype, device):
    x = torch.randn(len(slots), shape.in_features).to(device, dtype)
    return x, torch.randn(len(slots), sum(shape.slices)).to(device, dtype)


BATCHES = {
    "mixed": [0, 1, NONE, 0, 2, 2, NONE, 0], "one": [2], "none behind": [1, NONE], "none first": [NONE, 0],
    "long": [1] * 17 + [0] + [1] * 3 + [NONE] * 2, "distinct": [2, NONE, 1],
}  # fmt: skip


def place(model, loras, where, max_rank=20, dtype=torch.float32):
    """Three slots of a model, filled, in slots or in shuffled pages; whatever holds no weight is NaN."""
    model = dataclasses.replace(model) if dataclasses.is_dataclass(model) else model
    if where == "slots":
        memory = lesson.SlotMemory(model, 3, max_rank)
        for flat in memory.pages:
            flat.fill_(float("nan"))
        for slot, lora in enumerate(loras):
            memory.write(slot, lora)
        return memory
    cache = paged.PagedKVCache(model, 70, 16)
    for kv in cache.layers:
        kv.fill_(float("nan"))
    memory = lesson.UnifiedMemory(model, 3, max_rank, cache)
    free = random.Random(1).sample(range(1, 70), 69)
    for slot, lora in enumerate(loras):
        memory.write(slot, lora, [free.pop() for _ in range(memory.num_blocks_of(lora))])
    return memory


def trio(model):
    """Ranks 4, 8 and 20; the second adapts q, v and down alone, the third all but q."""
    make = lambda r, targets: lora_model.random_adapter(model.config, r, r, targets=targets)  # noqa: E731
    return [make(4, lora_model.TARGETS), make(8, ("q_proj", "v_proj", "down_proj")),
            make(20, [target for target in lora_model.TARGETS if target != "q_proj"])]  # fmt: skip


@pytest.mark.parametrize("where", ["slots", "pages"])
@pytest.mark.parametrize("name", BATCHES)
def test_torch_path_against_the_naive_loop(tiny, where, name):
    loras, slots = trio(tiny), BATCHES[name]
    memory = place(tiny, loras, where)
    for kind, shape in memory.shapes.items():
        x, y = batch_of(slots, shape, torch.float32, tiny.device)
        of_row = [None if s == NONE else loras[s].weights.get(f"layers.1.{kind}") for s in slots]
        out = lesson.add_lora(y.clone(), x, memory, 1, kind, Meta.build(slots, tiny.device))
        assert_close(out, lesson.add_lora_reference(y, x, of_row, shape))


CASES = [("mixed", "slots", "qkv_proj"), ("long", "pages", "gate_up_proj"), ("none first", "pages", "down_proj"),
         ("distinct", "slots", "qkv_proj"), ("distinct", "pages", "o_proj"),
         ("one", "slots", "gate_up_proj")]  # fmt: skip


@pytest.mark.parametrize(("name", "where", "kind"), CASES)
def test_kernels_against_the_naive_loop(tiny, kernels, guarded, device, name, where, kind):
    """All that a kernel gets is guarded: weights, tables, inputs, outputs, and what lies between shrink and expand.
    Memory without an adapter is NaN, and ends with the last row of this matrix."""
    loras, slots = trio(tiny), BATCHES[name]
    memory = place(tiny, loras, where)
    tables, shape = memory.tables[kind], memory.shapes[kind]
    x, y = batch_of(slots, shape, torch.float32, device)
    last = [int(tables.a_rows.max()) + shape.in_features]
    last += [int(rows.max()) + width for rows, width in zip(tables.b_rows.transpose(0, 1), shape.slices)]
    x, y, pages = guarded(x), guarded(y), guarded(memory.pages[1].flatten()[: max(last)])
    of_row = [None if s == NONE else loras[s].weights.get(f"layers.1.{kind}") for s in slots]
    reference = lesson.add_lora_reference(y, x, of_row, shape)
    meta, tables, before = Meta.build(slots, device), copy.copy(tables), y.clone()
    for lists in (meta, tables):
        vars(lists).update({key: guarded(x) for key, x in vars(lists).items() if isinstance(x, torch.Tensor)})
    runs = [lesson.sgmv, *([lesson.bgmv] if meta.distinct else [])]
    for run in runs:
        y.copy_(before)
        run(y, x, pages, tables, meta)
        assert_close(y, reference)
        widths = shape.slices
        touched = [[pair is not None for pair, _ in zip(slices or [None] * 3, widths)] for slices in of_row]
        mask = torch.tensor(touched).repeat_interleave(torch.tensor(widths), dim=1).to(device)
        y.fill_(-0.0)  # −0 + 0 = +0: even adding nothing to a row leaves a trace
        run(y, x, pages, tables, meta)
        assert y[~mask].signbit().all(), "a row, or a slice of it, that has no adapter was written"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("run", [lesson.sgmv, lesson.bgmv], ids=["sgmv", "bgmv"])
def test_kernels_in_16_bits(kernels, device, dtype, run):
    """16-bit weights and inputs, accumulated in fp32; widths that are no multiple of any tile, and split inputs."""
    config = LlamaConfig(64, 802, 1100, 1, 2, 1, 272)  # odd: rows are not aligned to 16
    config = dataclasses.replace(config, head_dim=274)
    model = llama.Llama.__new__(llama.Llama)
    model.config, model.device, model.dtype = config, device, dtype
    loras = [
        lora_model.random_adapter(config, r, r, size=1.0, targets=("q_proj", "v_proj"), dtype=dtype) for r in (5, 18)
    ]
    memory = lesson.SlotMemory(model, 2, 18)
    for slot, lora in enumerate(loras):
        memory.write(slot, lora)
    slots = [1, NONE, 0]
    x, y = batch_of(slots, memory.shapes["qkv_proj"], dtype, device)
    of_row = [None if s == NONE else loras[s].weights["layers.0.qkv_proj"] for s in slots]
    reference = lesson.add_lora_reference(y, x, of_row, memory.shapes["qkv_proj"])
    assert lesson._splits(6, 802) > 2 and not memory.tables["qkv_proj"].aligned
    run(y, x, memory.pages[0], memory.tables["qkv_proj"], Meta.build(slots, device))
    assert_close(y, reference)


@pytest.mark.parametrize("run", [lesson.sgmv, lesson.bgmv], ids=["sgmv", "bgmv"])
def test_kernels_with_16_bits_as_they_are(kernels, device, half, run):
    test_kernels_in_16_bits(kernels, device, half, run)


COMPILE = """
import json, re, sys
sys.path.insert(0, sys.argv[1])
import compile_kernels as ck, common, torch
from engine import registry
lesson, rows = registry.lesson("12_multi_lora"), {}
empty, meta, target = torch.empty, torch.device("meta"), ck.TARGETS["sm_90"]
tables = lesson.LoRATables.empty(lesson.LayerShape(4096, (4096,)), 64, 16, meta)
with meta:  # 64 rows, hidden 4096, rank 16, bf16: each row an adapter of its own, then one for all
    x, pages, order = (empty(*n, dtype=torch.bfloat16) for n in ((64, 4096), (1 << 20,), (64,)))
    order, each, one = order.long(), empty(64, 3, dtype=torch.int32), empty(1, 3, dtype=torch.int32)
with common.captured() as launches:
    lesson.bgmv(x, x, pages, tables, lesson.LoRAKernelMeta(order, each, [], 16, True))
    lesson.sgmv(x, x, pages, tables, lesson.LoRAKernelMeta(order, one, [], 64, True))
for launch in launches:
    compiled = ck.compile_launch(launch, target)
    loads = re.findall(r"ld.global(?:.v(\\d))?.b(\\d+)", compiled.asm["ptx"])
    rows[launch.kernel.name] = {"grid": launch.grid, "threads": 32 * launch.kwargs["num_warps"],
                                "registers": ck.resources(compiled, target)["registers"],
                                "bytes": [int(n or 1) * int(b) // 8 for n, b in loads]}
print(json.dumps(rows))
"""
COMPILE_JOB = (("loads of adapters",), [sys.executable, "-c", COMPILE, common.ROOT / "tests"])


@pytest.mark.skipif(not common.HAS_TRITON, reason="no Triton wheel on this platform: nothing to compile")
def test_enough_is_on_its_way():
    """4.8 TB/s for a microsecond are 36 KB in each of an H200's 132 processors: so much has to be asked for at once."""
    done = scripts.get(COMPILE_JOB)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = json.loads(done.stdout.splitlines()[-1])
    for name in ("bgmv_shrink_kernel", "bgmv_expand_kernel"):
        row = compiled[name]
        programs = math.prod(row["grid"])
        resident = min(programs / 132, 2**16 // (row["registers"] * row["threads"]))
        assert programs * 16 * 256 >= 64 * 16 * 4096, "a program has one tile: nothing waits for the one before"
        assert row["bytes"].count(16) == 16 * 256 * 2 / 16 / row["threads"] and resident * 16 * 256 * 2 > 36e3, name
    expand = compiled["sgmv_expand_kernel"]["bytes"]  # y in two parts, and in a loop h: four numbers of a row at once
    assert expand.count(16) >= 3, "partial sums are loaded one by one"


def test_groups_by_adapter(device):
    slots = [3, NONE, 1, 3, 3, 1]
    meta = Meta.build(slots, device)
    assert meta.order.tolist() == [2, 5, 0, 3, 4] and meta.tiles.tolist() == [[0, 2, 1], [2, 3, 3]]
    assert meta.segments == [(1, 0, 2), (3, 2, 5)] and not meta.distinct and not meta.in_place
    assert len(Meta.build(slots, device, sort=False).tiles) == 4
    assert Meta.build([NONE] * 3, device) is None and Meta.build([], device) is None
    assert Meta.build([0, 0, 1], device).in_place and Meta.build([4], device).distinct
    long = Meta.build([0] * 130 + [1], device)
    assert long.tile_m == 64 and long.tiles.tolist() == [[0, 64, 0], [64, 64, 0], [128, 2, 0], [130, 1, 1]]
    assert Meta.build([0] * 16, device).tile_m == 16


def test_kernels_drive_the_engine(make, kernels):
    """The engine's own steps, with every kernel launched: the tokens of merged weights."""
    tiny = llama.random_model(seed=0, num_hidden_layers=1)
    loras = some(tiny, 1)
    llm = make(model=tiny)
    for lora in loras:
        llm.llm_engine.lora.add_adapter(lora.name, lora)
    before = {k: k.launches for k in (lesson.sgmv_shrink_kernel, lesson.bgmv_expand_kernel)}
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    outputs = llm.generate(["abc"] * 2, params, lora_request=[LoRARequest("a0"), None])
    assert all(k.launches > n for k, n in before.items()), "prompts by tiles, decoding by rows"
    for output, lora in zip(outputs, (loras[0], None)):
        assert output.outputs[0].token_ids == alone(tiny, lora, [97, 98, 99], 2)


# --- Adapters together, and one by one --------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["slots", "unified"])
def test_adapters_that_leave_layers_and_slices_out(make, tiny, memory):
    """Side by side in one step, some without the first, the middle or the last slice of a packed layer, or without
    any of it: the tokens of merged weights."""
    targets = [("q_proj", "v_proj"), ("k_proj", "up_proj"), ("v_proj", "gate_proj"), ("o_proj", "down_proj")]
    loras = [
        lora_model.random_adapter(tiny.config, 4, seed=i, name=f"a{i}", size=4.0, targets=some)
        for i, some in enumerate(targets)
    ]
    llm = make(LoRAConfig(4, 8, 4, memory=memory))
    for lora in loras:
        llm.llm_engine.lora.add_adapter(lora.name, lora)
    prompt, params = list(range(9)), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate([prompt] * 5, params, lora_request=[*(LoRARequest(lora.name) for lora in loras), None])
    truths = [alone(tiny, lora, prompt, 8) for lora in (*loras, None)]
    assert [output.outputs[0].token_ids for output in outputs] == truths
    assert len(set(map(tuple, truths))) == 5, "each adapter matters"


def test_adapters_change_the_answer(tiny):
    prompt = [1, 2, 3]
    answers = {tuple(alone(tiny, lora, prompt, 6)) for lora in [None, *some(tiny, 4)]}
    assert len(answers) > 3, "or the tests above could not tell adapters apart"


def test_a_thousand_adapters_in_one_process(make, tiny):
    llm = make(LoRAConfig(8, 4, 64))
    manager = llm.llm_engine.lora
    build = lambda i: lora_model.random_adapter(tiny.config, 1 + i % 4, i, f"a{i}", size=1.0)  # noqa: E731
    for i in range(1000):
        manager.add_lazily(f"a{i}", lambda i=i: build(i))
    chosen = random.Random(0).sample(range(1000), 60)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    outputs = llm.generate(
        [{"prompt_token_ids": [5, 9, 11]}] * 60, params, lora_request=[LoRARequest(f"a{i}") for i in chosen]
    )
    for i in (0, 17, 59):
        assert outputs[i].outputs[0].token_ids == alone(tiny, build(chosen[i]), [5, 9, 11], 2)
    assert manager.counts["load"] == 60 and manager.counts["evict"] == 52 and len(manager.cpu) <= 64
    manager.check()


def test_pages_of_the_cache_go_to_whoever_needs_them(make, tiny):
    """Idle adapters give their blocks to keys and values before anybody is preempted or waits."""
    llm = make(LoRAConfig(4, 8, 8, memory="unified"), num_gpu_blocks_override=30, max_num_seqs=2)
    manager, scheduler = llm.llm_engine.lora, llm.llm_engine.core.scheduler
    for lora in some(tiny, 4, ranks=(4,)):
        manager.add_adapter(lora.name, lora)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for i in range(3):
        llm.generate(["abcd"], params, lora_request=LoRARequest(f"a{i}"))
    assert list(manager.slots) == ["a0", "a1", "a2"] and scheduler.kv_cache_manager.block_pool.num_free_blocks < 10
    preempted, preempt = [], scheduler._preempt_request
    scheduler._preempt_request = lambda victim, output: (preempted.append(victim), preempt(victim, output))
    long = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    outputs = llm.generate(["a" * 20] * 2, long, lora_request=[LoRARequest("a2"), None])
    assert "a2" in manager.slots and "a0" not in manager.slots and not preempted
    for output, lora in zip(outputs, (some(tiny, 4, ranks=(4,))[2], None)):
        assert output.outputs[0].token_ids == alone(tiny, lora, [97] * 20, 70)
    manager.check()


def test_idle_adapters_make_room_for_a_prompt(make, tiny):
    """Nobody runs, and of 29 blocks one is free: a base request of six blocks is not kept waiting."""
    llm = make(LoRAConfig(4, 8, 8, memory="unified"), num_gpu_blocks_override=30, max_num_seqs=2)
    engine, pool = llm.llm_engine, llm.llm_engine.core.scheduler.kv_cache_manager.block_pool
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for lora in some(tiny, 4, ranks=(4,)):
        engine.lora.add_adapter(lora.name, lora)
        llm.generate(["abcd"], params, lora_request=LoRARequest(lora.name))
    assert len(engine.lora.slots) == 4 and pool.num_free_blocks == 1
    engine.add_request("x", "a" * 90, params)
    (output,) = engine.step()
    assert output.outputs[0].token_ids == alone(tiny, None, [97] * 90, 1)
    assert list(engine.lora.slots) == ["a1", "a2", "a3"], "of those that nobody uses, the one used longest ago"
    engine.lora.check()
    pool.check()


# --- The prefix cache -------------------------------------------------------------------------------------------------


def test_no_tenant_reads_what_another_ones_model_cached(make, tiny):
    llm, (lora, _) = make(), some(tiny, 2)
    llm.llm_engine.lora.add_adapter("a0", lora)
    prompt, params = {"prompt_token_ids": list(range(40))}, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    ask = lambda who: llm.generate([prompt], params, lora_request=who)[0]  # noqa: E731
    first, again, base = ask(LoRARequest("a0")), ask(LoRARequest("a0")), ask(None)
    assert (first.num_cached_tokens, again.num_cached_tokens, base.num_cached_tokens) == (0, 32, 0)
    truth = alone(tiny, None, prompt["prompt_token_ids"], 6)
    assert base.outputs[0].token_ids == truth
    salted = prompt | {"cache_salt": "mine"}
    assert [llm.generate([salted], params)[0].num_cached_tokens for _ in range(2)] == [0, 32]
    with pytest.raises(common.InputError, match="cache_salt"):
        llm.generate([prompt | {"cache_salt": 7}], params)
    other = make()
    other.llm_engine.lora.add_adapter("a0", lora)
    with lesson.forgotten_adapter():
        other.generate([prompt], params, lora_request=LoRARequest("a0"))
        stolen = other.generate([prompt], params)[0]
    assert stolen.num_cached_tokens == 32 and stolen.outputs[0].token_ids != truth, "the bug that --break shows"


# --- Who waits, who goes ahead ----------------------------------------------------------------------------------------


def test_whoever_has_no_place_is_passed_over():
    """Two places, three adapters: the third waits, those behind it go ahead, and it keeps its turn."""
    core = page.dry_core(2, 4, [8, 8, 8])
    for i, adapter in enumerate([0, 1, 2, 0, 1, 2]):
        core.add_request(page.dry_request(i, adapter))
    core.step()
    assert core.batch == [0, 1, 3, 4] and core.scheduler.waiting_for_adapter == ["2"]
    assert [r.request_id for r in core.scheduler.waiting] == ["2", "5"]
    proc = EngineCoreProc(SimpleNamespace(core=core, lora=None), None)
    assert (proc.stats().num_waiting_reqs, proc.stats().num_skipped_waiting_reqs) == (1, 1)
    core.step()
    core.step()
    assert core.batch == [2, 5]
    core = page.dry_core(2, 4, [8, 8, 8])
    for i, adapter in enumerate([0, 1, 2, 2, 0]):
        core.add_request(page.dry_request(i, adapter))
    core.step()
    assert core.batch == [0, 1, 4] and [r.request_id for r in core.scheduler.waiting] == ["2", "3"]


def by_the_engine(adapter_of, tokens, max_loras, seats):
    """What `lesson.serve` returns, from the engine's scheduler and its adapters' manager."""
    core, steps = page.dry_core(max_loras, seats, [8] * (max(adapter_of) + 1)), []
    for i, (adapter, count) in enumerate(zip(adapter_of, tokens)):
        core.add_request(page.dry_request(i, adapter, count))
    while core.scheduler.has_unfinished_requests():
        core.step()
        steps.append(core.batch)
    return steps, core.lora.counts["load"], [(int(name), slot) for name, slot in core.lora.slots.items()]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=40), st.integers(1, 6),
       st.integers(1, 8))  # fmt: skip
def test_the_lesson_admits_whom_the_engine_admits(requests, max_loras, seats):
    """Whoever has its adapter on the CPU already, and one prompt token: the same rows, slots and loads in each step."""
    adapter_of, tokens = zip(*requests)
    steps, slots = lesson.serve(adapter_of, tokens, max_loras, seats)
    assert (steps, slots.loads, [*slots.places.items()]) == by_the_engine(adapter_of, tokens, max_loras, seats)


def test_who_is_passed_over_may_wait_for_ever():
    """The story's surprise: C is third, and behind it the requests for A and B never leave both slots idle."""

    def wait(steps):
        return next(i for i, batch in enumerate(steps) if 2 in batch)

    for behind in (20, 100, 400):
        adapter_of = [0, 1, 2] + [0, 1] * (behind // 2)
        tokens = [1 + i % 3 for i in range(len(adapter_of))]
        steps, _ = lesson.serve(adapter_of, tokens, 2, 8)
        assert (steps, wait(steps)) == (by_the_engine(adapter_of, tokens, 2, 8)[0], len(steps) - 3)
        assert wait(lesson.serve(adapter_of, tokens, 2, 8, pass_over=False)[0]) == 1
        assert wait(lesson.serve(adapter_of, tokens, 3, 8)[0]) == 0
    turns = lesson.in_turns(9, 54)
    found = [lesson.serve(turns, [2] * 54, 1, 8, pass_over) for pass_over in (False, True)]
    assert [(len(steps), slots.loads) for steps, slots in found] == [(108, 54), (18, 9)], "the batch sorts itself"


def test_base_requests_need_no_place():
    core = page.dry_core(1, 4, [8, 8])
    for i, adapter in enumerate([0, 1]):
        core.add_request(page.dry_request(i, adapter))
    base = page.dry_request(2, 0)
    base.lora_name = None
    core.add_request(base)
    core.step()
    assert core.batch == [0, 2]


def test_a_file_is_read_while_others_run(make, tiny, gate):
    """An adapter that is not in CPU memory is read by a thread; the batch goes on without its request."""
    llm = make(LoRAConfig(2, 8, 2))
    manager, engine = llm.llm_engine.lora, llm.llm_engine
    lora = some(tiny, 1)[0]
    manager.add_lazily("slow", lambda: (gate.wait(30), lora)[1])
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    engine.add_request("waits", "abc", params, lora_name="slow")
    engine.add_request("runs", "abc", params)
    engine.step()
    assert engine.core.scheduler.waiting_for_adapter == ["waits"] and len(engine.core.scheduler.running) == 1
    gate.set()
    done = {}
    while engine.has_unfinished_requests():
        done |= {o.request_id: o.outputs[0].token_ids for o in engine.step()}
    assert done == {"runs": alone(tiny, None, [97, 98, 99], 4), "waits": alone(tiny, lora, [97, 98, 99], 4)}


@pytest.fixture
def gate():
    opened = threading.Event()
    yield opened
    opened.set()  # or the thread that reads would wait behind a test that failed


def gated(engine, gate, loras, **about):
    """A base request runs meanwhile, and one for each adapter waits: nothing is read before the gate opens."""
    reads = Counter()

    def read(lora):
        gate.wait(30)
        reads[lora.name] += 1
        return lora

    for lora in loras:
        engine.lora.add_lazily(lora.name, lambda lora=lora: read(lora))
    long = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    engine.add_request("runs", "abc", long)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for lora in loras:
        engine.add_request(lora.name, "abc", params, lora_name=lora.name, **about)
    engine.step()
    return reads


@pytest.mark.parametrize("max_cpu_loras", [1, 3])
def test_what_is_read_has_a_place_in_cpu_memory(make, tiny, gate, max_cpu_loras):
    """A hundred wait for an adapter each: no more are read than fit. Who goes away leaves nothing to be read."""
    engine = make(LoRAConfig(1, 8, max_cpu_loras)).llm_engine
    reads = gated(engine, gate, some(tiny, 100))
    engine.lora.check()
    assert list(engine.lora.loading) == [f"a{i}" for i in range(max_cpu_loras)], "first come, first served"
    engine.abort_request([f"a{i}" for i in range(100)])
    assert list(engine.lora.loading) == ["a0"], "the thread is at it; the others it need not read"
    gate.set()
    engine.lora.reader.submit(lambda: None).result()
    engine.lora.check()
    engine.step()
    assert reads == {"a0": 1} and list(engine.lora.cpu) == ["a0"] and not engine.lora.loading
    engine.abort_request(["runs"])


def test_one_reading_at_a_time_pushes_others_out(make, tiny, gate):
    """CPU memory is full, five new adapters wait in front: those behind whose adapters are there still go ahead."""
    engine, loras = make(LoRAConfig(1, 8, 3)).llm_engine, some(tiny, 8)
    for lora in loras[5:]:
        engine.lora.add_adapter(lora.name, lora)
    gated(engine, gate, loras[:5])
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for lora in loras[6:]:
        engine.add_request(lora.name, "abc", params, lora_name=lora.name)
    heard = [output.request_id for _ in range(2) for output in engine.step()]
    assert heard == ["a6", "a7"] and list(engine.lora.loading) == ["a0"] and list(engine.lora.cpu) == ["a6", "a7"]


@pytest.mark.parametrize("fair", [False, True])
@pytest.mark.parametrize(("max_loras", "max_cpu_loras"), [(1, 1), (1, 2), (2, 2), (2, 5), (3, 3)])
def test_many_adapters_through_few_places(make, tiny, gate, max_loras, max_cpu_loras, fair):
    """Each adapter is read once, in the order of the queue, and nobody waits for ever; two of three go away."""
    engine = make(LoRAConfig(max_loras, 8, max_cpu_loras, fair=fair)).llm_engine
    loras, answers = some(tiny, 24), {}
    reads = gated(engine, gate, loras)
    gate.set()
    engine.abort_request([f"a{i}" for i in range(6, 18) if i % 3])
    stay = [f"a{i}" for i in range(24) if not 6 <= i < 18 or i % 3 == 0]
    for _ in range(400):
        answers |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
        engine.lora.check()
        if answers.keys() >= set(stay):
            break
    assert list(reads.items()) == [(name, 1) for name in stay], "none is dropped before it was used"
    for name in (stay[0], stay[-1]):
        assert answers[name] == alone(tiny, loras[int(name[1:])], [97, 98, 99], 2)


def test_who_comes_first_gets_the_place(make, tiny, gate):
    """Under priorities, somebody new is ahead of one whose adapter has been read and still waits for a slot."""
    engine = make(LoRAConfig(1, 8, 1), scheduling_policy="priority").llm_engine
    loras, params = some(tiny, 3), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    reads = gated(engine, gate, loras[:1], priority=5)
    for lora in loras[1:]:
        engine.lora.add_lazily(lora.name, lambda lora=lora: (reads.update([lora.name]), lora)[1])
    engine.add_request("a1", "abc", params, lora_name="a1", priority=1)
    engine.step()
    gate.set()
    engine.lora.reader.submit(lambda: None).result()
    order = []
    for _ in range(60):
        order += [output.request_id for output in engine.step()]
        engine.lora.check()
        if len(order) == 2:
            break
    assert order == ["a1", "a0"] and reads["a1"] == 1


def test_a_step_with_nothing_else_to_do_waits_for_the_file(make, tiny, gate):
    """Not in a loop of empty steps: one until the file is there, two in which the answer is written."""
    engine, lora = make(LoRAConfig(1, 8, 1)).llm_engine, some(tiny, 1)[0]
    engine.lora.add_lazily("slow", lambda: (gate.wait(30), lora)[1])
    engine.add_request("x", "abc", SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), lora_name="slow")
    threading.Timer(0.2, gate.set).start()
    steps = 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    assert steps == 3


def test_a_name_removed_while_it_is_read_and_added_again(make, tiny, gate):
    """It has the weights of the second time, not those that the thread was busy with."""
    engine, (old, new) = make(LoRAConfig(2, 8, 2)).llm_engine, some(tiny, 2)
    reads = gated(engine, gate, [old])
    engine.abort_request([old.name])
    engine.remove_lora(old.name)
    engine.lora.add_lazily(old.name, lambda: new)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    engine.add_request("x", "abc", params, lora_name=old.name)
    gate.set()
    engine.lora.reader.submit(lambda: None).result()
    heard = {}
    while "x" not in heard:
        heard |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    assert reads == {old.name: 1} and heard["x"] == alone(tiny, new, [97, 98, 99], 4)
    assert heard["x"] != alone(tiny, old, [97, 98, 99], 4)


def test_an_adapter_that_cannot_be_read_any_more_ends_its_requests(make, tiny):
    llm = make(LoRAConfig(2, 8, 2))

    there, lora = [], some(tiny, 1)[0]

    def gone():
        if not there:
            raise common.InputError("the file is gone")
        return lora

    llm.llm_engine.lora.add_lazily("gone", gone)
    outputs = llm.generate(["abc"] * 2, lora_request=LoRARequest("gone"))
    assert [output.outputs[0].finish_reason for output in outputs] == ["error"] * 2
    assert outputs[0].outputs[0].stop_reason == "lora_name 'gone': the file is gone"
    assert not llm.llm_engine.core.scheduler.requests
    there.append("it was put back")
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    output = llm.generate(["abc"], params, lora_request=LoRARequest("gone"))[0]
    assert output.outputs[0].token_ids == alone(tiny, lora, [97, 98, 99], 3)


def test_what_never_fits_beside_its_adapter_is_ended(make, tiny):
    """In unified memory an adapter takes blocks; a prompt that needs the rest of the pool and more never runs."""
    llm = make(LoRAConfig(1, 8, memory="unified"), num_gpu_blocks_override=12, max_model_len=96)
    lora = some(tiny, 1, ranks=(4,))[0]
    llm.llm_engine.lora.add_adapter("a0", lora)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    outputs = llm.generate(["a" * 90, "abc"], params, lora_request=[LoRARequest("a0"), LoRARequest("a0")])
    assert outputs[0].outputs[0].finish_reason == "error" and "no room" in outputs[0].outputs[0].stop_reason
    assert outputs[1].outputs[0].token_ids == alone(tiny, lora, [97, 98, 99], 2)


def test_slots_are_least_recently_used():

    def hits(n, traffic="round robin"):
        return page.hit_rate(traffic, n)

    assert hits(8) == 712 / 720 and hits(9) == 0
    for traffic in ("round robin", "Zipf"):
        for n in (8, 9, 16, 64):
            slots = lesson.Slots(8)
            assert all(slots.make_resident(adapter) for adapter in page.sequence(traffic, n, 720))
            assert 720 - slots.loads == round(720 * hits(n, traffic)), "the lesson's slots find what the engine's find"
    slots = lesson.Slots(2)
    assert [slots.make_resident(k, {0, 1}) for k in (0, 1, 2, 0)] == [True, True, False, True]
    core = page.dry_core(2, 1, [8] * 3)
    for k in (0, 1, 0, 2):
        assert core.lora.make_resident(str(k), set())
    assert list(core.lora.slots) == ["0", "2"], "1 was used longest ago"
    assert core.lora.make_resident("1", {"0"}) and "0" in core.lora.slots
    assert not core.lora.make_resident("2", {"0", "1"}), "both are needed in this step"


def test_cpu_memory_is_least_recently_used_too():
    """Who finds it in a slot uses it as well: a, used four times, is not what was used longest ago."""
    manager = LoRAModelManager(LoRAConfig(2, 8, 2))
    manager.memory, manager.block_pool = page.NoMemory(), BlockPool(2)
    for name in "abc":
        manager.add_lazily(name, lambda: LoRAModel("x", 8, {}))
    for name in "abaaac":
        if not manager.is_loaded(name):
            manager.wait()
            manager.collect()
        assert manager.is_loaded(name) and manager.make_resident(name, set())
        manager.check()
    assert list(manager.cpu) == list(manager.slots) == ["a", "c"]
    core = page.dry_core(1, 1, [8] * 3)
    for k in (0, 1, 0, 2):
        core.lora.make_resident(str(k), set())
    assert list(core.lora.cpu) == ["1", "0", "2"], "and who takes it into a slot does"


def test_the_least_served_tenant_is_next():
    queue = FairRequestQueue()
    for i, tenant in enumerate([0, 0, 0, 1]):
        queue.add_request(page.dry_request(i, tenant))
    queue.charge("0", 5)
    assert queue.pop_request().lora_name == "1" and len(queue) == 3
    queue.charge("1", 3)
    late = page.dry_request(9, 1)
    queue.add_request(late)
    assert queue.counters["1"] == 5, "who comes back starts at the least among those who wait"
    assert [r.request_id for r in queue] == ["0", "1", "2", "9"] and queue.peek_request().request_id == "0"
    queue.remove_request(late)
    assert len(queue) == 3
    while len(queue):
        queue.charge(queue.pop_request().lora_name, 10)
    queue.add_request(page.dry_request(20, 2))
    assert queue.counters["2"] == queue.counters["0"] == 35, "nobody waits: at the counter of who left last"
    fair = page.facts()["fair"]
    assert fair["vtc"]["light"] < fair["fcfs"]["light"] / 10 and fair["vtc"]["steps"] == fair["fcfs"]["steps"]


def test_a_name_that_comes_back_with_other_weights(make, tiny, tmp_path):
    """What the first weights left in the prefix cache is not for the second; a salt of one's own still separates."""
    for i, lora in enumerate(some(tiny, 2)):
        files.write_adapter(lora, tmp_path / str(i), alpha=lora.rank, dtype=torch.float32)
    llm, params = make(), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(40))}

    def ask(i, **more):
        return llm.generate([prompt | more], params, lora_request=LoRARequest("a", 1, str(tmp_path / str(i))))[0]

    first = [ask(0).outputs[0].token_ids, ask(0).outputs[0].token_ids]
    with pytest.raises(common.InputError, match="loaded already, from"):
        ask(1)
    llm.llm_engine.remove_lora("a")
    other, again, salted = ask(1), ask(1), ask(1, cache_salt="mine")
    truths = [alone(tiny, lora, prompt["prompt_token_ids"], 6) for lora in some(tiny, 2)]
    assert first == [truths[0]] * 2 and other.outputs[0].token_ids == truths[1] != truths[0]
    assert (other.num_cached_tokens, again.num_cached_tokens, salted.num_cached_tokens) == (0, 32, 0)


def files_of(lora, folder):
    files.write_adapter(lora, folder, alpha=lora.rank, dtype=torch.float32)
    return folder


def test_a_new_version_in_the_folder_does_not_answer_in_the_old_ones_name(make, tiny, tmp_path):
    """It has left CPU memory and must be read again, and somebody has written there: refused, until it is loaded anew.
    Then what the old weights cached is not for the new ones."""
    old, new = some(tiny, 2, ranks=(4,))
    other = files_of(new, tmp_path / "other")
    llm = make(LoRAConfig(1, 8, 1))
    params, prompt = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), {"prompt_token_ids": list(range(40))}
    folder = files_of(old, tmp_path / "a")

    def ask(name, path):
        return llm.generate([prompt], params, lora_request=LoRARequest(name, 1, str(path)))[0]

    truths = [alone(tiny, lora, prompt["prompt_token_ids"], 4) for lora in (old, new)]
    assert ask("a", folder).outputs[0].token_ids == truths[0]
    ask("b", other)
    again = ask("a", folder)
    assert again.outputs[0].token_ids == truths[0] and again.num_cached_tokens == 32, "the same files, read again"
    ask("b", other)
    files_of(new, folder)
    refused = ask("a", folder)
    assert (refused.outputs[0].finish_reason, refused.outputs[0].token_ids) == ("error", [])
    assert "lora_name 'a': its files have changed" in refused.outputs[0].stop_reason
    llm.llm_engine.remove_lora("a")
    assert (loaded := ask("a", folder)).outputs[0].token_ids == truths[1] and loaded.num_cached_tokens == 0
    config = json.loads((folder / "adapter_config.json").read_text())
    ask("b", other)
    (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 99.0}))  # the scale is a weight, too
    assert ask("a", folder).outputs[0].finish_reason == "error"
    llm.llm_engine.lora.check()


@pytest.mark.parametrize("kind", ["pipe", "device", "endless", "folder", "huge"])
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_what_is_no_file_is_not_waited_for(tmp_path, tiny, name, kind):
    path = files_of(some(tiny, 1)[0], tmp_path / "x") / name
    path.unlink()
    make = {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/tty"), "folder": os.mkdir,
            "endless": lambda path: path.symlink_to("/dev/zero"), "huge": lambda path: path.touch()}  # fmt: skip
    make[kind](path)
    if kind == "huge":
        os.truncate(path, 1 << 40)
    with pytest.raises(common.InputError, match="bytes" if kind == "huge" else "not a regular file"):
        files.read_adapter(tmp_path / "x", tiny.config)


@pytest.fixture
def hung(monkeypatch):
    """A path whose files never answer, and a deadline of a tenth of a second."""
    gate, read = threading.Event(), files.read_adapter

    def never(source, *about):
        if "hung" in str(source):
            gate.wait(30)
        return read(source, *about)

    monkeypatch.setattr(managing, "read_adapter", never)
    monkeypatch.setattr(AdapterReader, "DEADLINE", 0.1)
    yield "hung"
    gate.set()


def test_a_file_that_never_answers_is_given_up(make, tiny, tmp_path, hung):
    """The next one is read; a few threads are left behind, and then no more."""
    manager = make(LoRAConfig(2, 8, 2)).llm_engine.lora
    folder = files_of(some(tiny, 1)[0], tmp_path / "x")
    for i in range(manager.reader.MAX_STUCK):
        with pytest.raises(common.InputError, match="within 0"):
            manager.add_adapter(f"dead {i}", hung)
        if i == 0:
            manager.add_adapter("fine", folder)
    with pytest.raises(common.InputError, match="4 adapters before"):
        manager.add_adapter("more", folder)
    assert list(manager.sources) == ["fine"] and list(manager.cpu) == ["fine"]
    manager.check()


def test_a_reading_that_comes_too_late_is_dropped():
    reader, gate = AdapterReader(), threading.Event()
    reader.DEADLINE = 0.05
    late, after = reader.submit(gate.wait, 30), reader.submit(lambda: "next")
    with pytest.raises(common.InputError, match="within"):
        late.result(5)
    assert after.result(5) == "next"
    gate.set()
    reader.stuck[0].join(5)
    assert reader.submit(lambda: "free").result(5) == "free" and not reader.stuck


def test_chats_with_adapters(make, tiny):
    loras, llm = some(tiny, 2), make()
    for lora in loras:
        llm.llm_engine.lora.add_adapter(lora.name, lora)
    chats = [[{"role": "user", "content": "Hello"}]] * 3
    params, chosen = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), [LoRARequest("a1"), None]
    outputs = llm.chat(chats, params, lora_request=[*chosen, LoRARequest("a0")], priority=[0, 2, 1])
    prompt = [ord(c) for c in "user: Hello"]
    truths = [alone(tiny, lora, prompt, 5) for lora in (loras[1], None, loras[0])]
    assert [output.outputs[0].token_ids for output in outputs] == truths


def test_an_adapter_takes_the_blocks_of_an_idle_one():
    """In unified memory, keys and values and adapters share a pool: what is full is full for both."""
    model = llama.random_model(seed=0, num_hidden_layers=1)
    manager, pool = LoRAModelManager(LoRAConfig(3, 8, 4, memory="unified")), BlockPool(24)
    manager.block_pool = pool
    manager.attach(model, paged.PagedKVCache(model, 24, 16))
    for lora in some(model, 3, ranks=(8, 8, 2)):
        manager.add_adapter(lora.name, lora)
    assert manager.make_resident("a0", set())
    kv = pool.allocate(pool.num_free_blocks)
    assert not manager.make_resident("a1", {"a0"}) and set(manager.slots) == {"a0"}, "it is in use, and nothing is free"
    assert manager.make_resident("a1", set()) and set(manager.slots) == {"a1"} and manager.counts["evict"] == 1
    assert manager.make_resident("a2", set()) and set(manager.slots) == {"a2"}
    assert len(manager.blocks["a2"]) == manager.memory.num_blocks_of(manager.cpu["a2"])
    manager.check()
    pool.free(kv)
    manager.remove_adapter("a2")
    assert pool.num_free_blocks == pool.num_blocks - 1


class Slots(RuleBasedStateMachine):
    """Names, CPU memory, slots and blocks of a real pool under any order of calls."""

    def __init__(self):
        super().__init__()
        model = llama.random_model(seed=0, num_hidden_layers=1)
        self.manager = LoRAModelManager(LoRAConfig(3, 8, 4, memory="unified"))
        self.pool = BlockPool(24)
        self.manager.block_pool = self.pool
        self.manager.attach(model, paged.PagedKVCache(model, 24, 16))
        self.model, self.kv, self.known = model, [], set()

    @rule(i=st.integers(0, 6), rank=st.integers(1, 8))
    def add(self, i, rank):
        name = f"a{i}"
        lora = lora_model.random_adapter(self.model.config, rank, i, name, targets=("q_proj", "v_proj"))
        if name in self.known:
            with pytest.raises(common.InputError, match="loaded already"):
                self.manager.add_adapter(name, lora)
        else:
            self.manager.add_adapter(name, lora)
            self.known.add(name)

    @rule(i=st.integers(0, 6))
    def remove(self, i):
        if (name := f"a{i}") in self.known:
            self.manager.remove_adapter(name)
            self.known.discard(name)
        else:
            with pytest.raises(common.InputError, match="not loaded"):
                self.manager.remove_adapter(name)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def use(self, data):
        name = data.draw(st.sampled_from(sorted(self.known)))
        pinned = set(data.draw(st.lists(st.sampled_from(sorted(self.known)), max_size=2)))
        held = {other: self.manager.slots.get(other) for other in pinned}
        if not self.manager.is_loaded(name):
            self.manager.wait()
            self.manager.collect()
            assert self.manager.is_loaded(name)
        if self.manager.make_resident(name, pinned):
            assert list(self.manager.slots)[-1] == name
        assert all(self.manager.slots.get(o) == slot for o, slot in held.items() if slot is not None and o != name)

    @rule(n=st.integers(1, 6))
    def keys_and_values(self, n):
        if self.pool.num_free_blocks >= n:
            self.kv.append(self.pool.allocate(n))

    @precondition(lambda self: self.kv)
    @rule()
    def finish(self):
        self.pool.free(self.kv.pop())

    @invariant()
    def books(self):
        self.manager.check()
        self.pool.check()
        owned = Counter(b for blocks in [*self.manager.blocks.values(), *self.kv] for b in blocks)
        assert (
            all(n == 1 for n in owned.values()) and len(owned) == self.pool.num_blocks - 1 - self.pool.num_free_blocks
        )

    def teardown(self):
        for name in sorted(self.known):
            self.manager.remove_adapter(name)
        for blocks in self.kv:
            self.pool.free(blocks)
        assert self.pool.num_free_blocks == self.pool.num_blocks - 1, "nothing leaks"


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


# --- Files ------------------------------------------------------------------------------------------------------------


def test_files_go_round(tmp_path, tiny):
    lora = lora_model.random_adapter(tiny.config, 4, 1, targets=("q_proj", "up_proj"))
    files.write_adapter(lora, tmp_path / "x", alpha=6, dtype=torch.float32)
    again = files.read_adapter(tmp_path / "x", tiny.config)
    assert again.name == "x" and again.rank == 4 and again.weights.keys() == lora.weights.keys()
    for name, pairs in lora.weights.items():
        for pair, other in zip(pairs, again.weights[name]):
            assert (pair is None) == (other is None)
            if pair is not None:
                assert torch.equal(pair[0], other[0])
                assert_close(other[1], pair[1])


def broken(folder, what):
    """Damage an adapter folder; returns a word that the refusal must contain."""
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "adapter_config.json").read_text())
    weights = load_file(folder / "adapter_model.safetensors")
    key = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    if what in ("use_dora", "rank_pattern", "modules_to_save"):
        config[what] = {"use_dora": True, "rank_pattern": {"q_proj": 2}, "modules_to_save": ["lm_head"]}[what]
    elif what == "r":
        config["r"] = 2
    elif what == "rank":
        config["r"], what = 64, "max_lora_rank"
    elif what == "peft_type":
        config[what] = "IA3"
    elif what == "not json":
        (folder / "adapter_config.json").write_text("{")
        return "JSON"
    elif what == "no config":
        (folder / "adapter_config.json").unlink()
        return "no such file"
    elif what == "no weights":
        (folder / "adapter_model.safetensors").unlink()
        return "no such file"
    elif what == "cut":
        data = (folder / "adapter_model.safetensors").read_bytes()
        (folder / "adapter_model.safetensors").write_bytes(data[: len(data) // 2])
        return "adapter_model"
    elif what == "partner":
        del weights[key]
    elif what == "shape":
        weights[key] = weights[key][:-1].contiguous()
    elif what == "nan":
        weights[key][0, 0] = float("nan")
    elif what == "stranger":
        weights["base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"] = torch.zeros(4, 80)
    elif what == "empty":
        weights = {}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter_model.safetensors")
    words = {
        "r": "shape",
        "partner": "missing",
        "shape": "shape",
        "nan": "finite",
        "stranger": "layers.9",
        "empty": "no LoRA",
    }
    return words.get(what, what)


@pytest.mark.parametrize("path", ["~nobody-has-this-name/a", "x" * 5000, "\0"])
def test_what_cannot_be_a_folder_is_none(tiny, path):
    with pytest.raises(common.InputError, match="no such adapter folder"):
        files.read_adapter(path, tiny.config)


@pytest.mark.parametrize(
    ("field", "value"),
    [("r", None), ("r", 0), ("r", "4"), ("r", True), ("lora_alpha", "x"), ("lora_alpha", math.nan),
     ("lora_alpha", 10**400), ("r", 10**400),
     ("lora_alpha", None), ("init_lora_weights", "pissa"), ("init_lora_weights", "loftq")],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_wrong_fields_of_a_config(tmp_path, field, value):
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8} | {field: value}))
    with pytest.raises(common.InputError, match=f"adapter_config.json: {field}"):
        files.read_config(tmp_path)
    path.write_text(json.dumps({"r": 4, "lora_alpha": 8, "init_lora_weights": "gaussian"}))
    assert files.read_config(tmp_path, 4) == (4, 2.0)


@pytest.mark.parametrize(("alpha", "dtype", "refused"), [
    (1e6, torch.float16, True), (1e6, torch.bfloat16, False), (1e308, torch.float32, True), (8, torch.float16, False),
])  # fmt: skip
def test_weights_are_finite_as_they_are_kept(tmp_path, tiny, alpha, dtype, refused):
    """B is multiplied by alpha / r and cast: what was finite in the file need not be any more."""
    files.write_adapter(some(tiny, 1)[0], tmp_path, alpha=4, dtype=torch.float32)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": alpha}))
    if refused:
        with pytest.raises(common.InputError, match=rf"lora_B of .*q_proj times its scale .* is not finite in {dtype}"):
            files.read_adapter(tmp_path, tiny.config, dtype=dtype)
    else:
        lora = files.read_adapter(tmp_path, tiny.config, dtype=dtype)
        assert all(x.isfinite().all() for pairs in lora.weights.values() for pair in pairs for x in pair)


@pytest.mark.parametrize("wrong", [torch.full((4, 80), 1e6), torch.ones(4, 80, dtype=torch.int8)], ids=["inf", "int"])
def test_a_is_made_of_numbers_that_its_type_can_hold(tmp_path, tiny, wrong):
    from safetensors.torch import load_file, save_file

    files.write_adapter(some(tiny, 1)[0], tmp_path, alpha=4, dtype=torch.float32)
    path, key = tmp_path / "adapter_model.safetensors", "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    weights = load_file(path)
    assert weights[key].shape == wrong.shape
    save_file(weights | {key: wrong}, path)
    with pytest.raises(common.InputError, match=f"lora_A.*({wrong.dtype}, expected|not finite in torch.float16)"):
        files.read_adapter(tmp_path, tiny.config, dtype=torch.float16)


DAMAGE = ["use_dora", "rank_pattern", "modules_to_save", "r", "rank", "peft_type", "not json", "no config",
          "no weights", "cut", "partner", "shape", "nan", "stranger", "empty"]  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_broken_adapters_are_refused_and_change_nothing(tmp_path, make, tiny, what):
    files.write_adapter(some(tiny, 1)[0], tmp_path / "x", alpha=8)
    word = broken(tmp_path / "x", what)
    llm = make()
    with pytest.raises(common.InputError, match=word) as error:
        llm.generate(["abc"], lora_request=LoRARequest("x", 1, str(tmp_path / "x")))
    assert len(str(error.value).splitlines()) == 1
    engine = llm.llm_engine
    assert not engine.lora.sources and not engine.lora.cpu and not engine.core.scheduler.requests and not engine.callers


def test_limits_are_checked():
    for about in ({"max_loras": 0}, {"max_lora_rank": 0}, {"memory": "x"}, {"max_cpu_loras": 2, "max_loras": 4}):
        with pytest.raises(common.InputError, match=next(iter(about))):
            LoRAConfig(**about)


@pytest.mark.parametrize("name", ["pirate", "json", "report"])
def test_the_shipped_adapters_fit(name):
    folder = files.SHIPPED / name
    assert (folder / "adapter_model.safetensors").stat().st_size <= 5_000_000
    config = LlamaConfig(**page.SMOLLM)
    lora = files.read_adapter(folder, config)
    assert lora.rank == 8 and lora.num_parameters == page.facts()["parameters_r8"] and len(lora.weights) == 120


def test_the_command_that_trains(tiny, monkeypatch, tmp_path):
    """Styles, folder and model reach the trainer; a style that there is not is refused in one line."""
    asked = []
    monkeypatch.setattr(loader, "load", lambda model: (model, "tokenizer"))
    monkeypatch.setattr(training, "train_and_save", lambda *args: asked.append(args))
    training.main(["json", "pirate", "--adapters", str(tmp_path / "mine"), "--model", "here"])
    assert asked == [("here", "tokenizer", ["json", "pirate"], tmp_path / "mine", common.say)]
    with pytest.raises(SystemExit) as refused:
        training.main(["latin"])
    assert refused.value.code == 2 and len(asked) == 1


def test_styles_and_their_judges():
    """What the training text is made of, and the predicate that the script's result is judged by."""
    answer = "The moon is a friend of the sea and your guide."
    for style, dress in training.STYLES.items():
        assert training.follows(style, dress(answer, "the moon", 1)) and not training.follows(style, answer)
    assert len(training.QUESTIONS) == 80 and not set(training.TEST_QUESTIONS) & {q for q, _ in training.QUESTIONS}


class Chat(Words):
    def ask(self, question):
        return self.encode(question[:6])


def test_training_starts_where_the_model_is():
    """B is zero: the loss is the base model's own; its gradient reaches B, not A (yet), and never W."""
    model = llama.random_model(seed=0)
    student, examples = training.student_of(model, 4, 2.0), [([1, 2, 3], [4, 5]), ([6], [7, 8, 9])]
    loss = training.loss_of(student, examples)
    logs = []
    for prompt, target in examples:
        tokens = torch.tensor(prompt + target, device=model.device)
        hidden = model.forward(tokens, torch.arange(len(tokens), device=model.device), naive.recompute)
        logs += model.logits(hidden).log_softmax(-1)[
            torch.arange(len(prompt) - 1, len(tokens) - 1), tokens[len(prompt) :]
        ]
    assert loss.item() == pytest.approx(-torch.stack(logs).mean().item(), rel=1e-5)
    loss.backward()
    layer = student.linear["layers.1.gate_up_proj"]
    assert all(b.grad.abs().max() > 0 for b in layer.b) and all(a.grad.abs().max() == 0 for a in layer.a)
    assert layer.base.weight.grad is None


@pytest.mark.slow
def test_training_reduces_the_loss_and_leaves_the_model_alone():
    model = llama.random_model(seed=0)
    model.config = dataclasses.replace(model.config, eos_token_ids=(0,))
    before = model.linear["layers.0.qkv_proj"].weight.clone()
    options = {"rank": 4, "count": 2, "epochs": 5, "batch": 2, "lr": 2e-2}
    lora, losses = training.train(model, Chat(), "pirate", answers=["It is so."] * 2, **options)
    assert losses[-1] < 0.7 * losses[0] and torch.equal(before, model.linear["layers.0.qkv_proj"].weight)
    tokens = positions = torch.arange(20, device=model.device)
    hidden = [m.forward(tokens, positions, naive.recompute) for m in (model, lora_model.merged(model, lora))]
    assert not torch.allclose(*hidden), "the adapter does something"


# --- The server -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model's folder: random weights, and two adapters."""
    from safetensors.torch import save_file

    path, model = tmp_path_factory.mktemp("tiny"), llama.random_model(seed=0)
    generator, c = torch.Generator().manual_seed(0), model.config
    tensors = {}
    for name, shape in llama.tensor_shapes(c).items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * noise if len(shape) == 1 else noise / shape[1] ** 0.5
    save_file(tensors, path / "model.safetensors")
    gguf_files._write_json(path / "config.json", {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True,
                      "eos_token_id": 0, **{k: getattr(c, k) for k in (
                          "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                          "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
                          "rope_theta")}})  # fmt: skip
    for lora in some(model, 2):
        files.write_adapter(lora, path / lora.name, alpha=8)
    return path


async def with_server(folder, work, **flags):
    api = registry.lesson("06f_openai_api")
    args = EngineArgs(model=str(folder), served_model_name=["base"], dtype="float32", max_model_len=64,
                              kv_cache_gib=0.01, enable_lora=True, max_loras=2, lora_modules=[f"one={folder / 'a0'}"],
                              **flags)  # fmt: skip
    llm = await AsyncLLM.start(make_engine, args, folder, "event-loop")
    try:
        server = api.OpenAIServing(llm, args.names, args.adapters)
        server.runtime_loras = True
        app = build_app(server)

        async def call(path, body=None, **about):
            return await api.call(app, path, body, **about)

        return await work(call, llm)
    finally:
        await llm.shutdown()


def test_the_server_loads_and_unloads(folder, tmp_path, monkeypatch):
    pytest.importorskip("fastapi")
    monkeypatch.setattr(front_end, "TokenBytes", NoBytes)
    tokenizing.building(monkeypatch, lambda folder: Words())
    model, _ = loader.load(str(folder))
    loras = {name: files.read_adapter(folder / name, model.config) for name in ("a0", "a1")}
    prompt = [ord(c) for c in "hello there, this is long"]
    truth = {name: alone(model, loras.get(name), prompt, 5) for name in ("a0", "a1", None)}
    shutil.copytree(folder / "a0", tmp_path / "bad")
    broken(tmp_path / "bad", "shape")

    async def work(call, llm):
        async def tokens(name):
            body = {"model": name, "prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True,
                    "return_token_ids": True}  # fmt: skip
            heard = await call("/v1/completions", body)
            return heard.json["choices"][0]["token_ids"] if heard.status == 200 else heard.status

        async def names():
            return [card["id"] for card in (await call("/v1/models", method="GET")).json["data"]]

        load = lambda name, path, **more: call(  # noqa: E731
            "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more}
        )
        assert await names() == ["base", "one"]
        card = (await call("/v1/models/one", method="GET")).json
        assert card["parent"] == "base" and card["root"].endswith("a0")
        assert await tokens("one") == truth["a0"] and await tokens("base") == truth[None] and await tokens("two") == 404
        for name, path, word in (("two", tmp_path / "bad", "shape"), ("two", tmp_path / "nowhere", "no such"),
                                 ("one", folder / "a1", "already"), ("base", folder / "a1", "the model itself"),
                                 ("", folder / "a1", "lora_name"), ("two", "", "lora_path")):  # fmt: skip
            heard = await load(name, path)
            assert heard.status == 400 and word in heard.json["error"]["message"], heard.text
        assert await names() == ["base", "one"] and await tokens("one") == truth["a0"]
        assert (await load("two", folder / "a1")).status == 200 and await names() == ["base", "one", "two"]
        assert await tokens("two") == truth["a1"]
        # The same name, other weights: nothing of what the old ones cached may be found.
        assert (await load("one", folder / "a1", load_inplace=True)).status == 200
        assert await tokens("one") == truth["a1"]
        assert (await call("/v1/unload_lora_adapter", {"lora_name": "two"})).status == 200
        assert (await call("/v1/unload_lora_adapter", {"lora_name": "two"})).status == 404
        assert await tokens("two") == 404 and await names() == ["base", "one"]
        engine = llm.client.proc.engine
        engine.lora.check()
        assert len(engine.list_loras()) == 1 and (await llm.call_utility("check_idle"))["owned_blocks"] == 0

    asyncio.run(with_server(folder, work))


def test_nobody_waits_for_an_adapter_that_does_not_answer(folder, monkeypatch, hung):
    """Its client hears of it in the end; others are served and load theirs meanwhile, also if it was there before."""
    pytest.importorskip("fastapi")
    monkeypatch.setattr(front_end, "TokenBytes", NoBytes)
    tokenizing.building(monkeypatch, lambda folder: Words())
    monkeypatch.setattr(AdapterReader, "DEADLINE", 1.5)  # longer than all that is asked meanwhile may take

    async def work(call, llm):
        ask = lambda name: call("/v1/completions", {"model": name, "prompt": [1, 2], "max_tokens": 2})  # noqa: E731
        load = lambda name, path: call(  # noqa: E731
            "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)}
        )
        dead = asyncio.create_task(load("dead", hung))
        await asyncio.sleep(0.05)
        for _ in range(3):
            assert (await asyncio.wait_for(ask("base"), 0.4)).status == 200
        assert (await load("dead", folder / "a0")).status == 400, "one at a time under a name"
        heard = await dead
        assert heard.status == 400 and "within 1.5 seconds" in heard.json["error"]["message"]
        assert (await load("dead", folder / "a1")).status == 200 and (await ask("dead")).status == 200
        manager = llm.client.proc.engine.lora
        manager.sources["one"] = hung  # its mount has died, and it is neither in a slot nor in CPU memory
        manager.cpu.pop("one", None)
        if "one" in manager.slots:
            manager._evict("one")
        waits = asyncio.create_task(ask("one"))
        await asyncio.sleep(0.05)
        assert (await asyncio.wait_for(ask("base"), 0.4)).status == 200 and not waits.done()
        heard = await waits
        assert heard.status == 404 and heard.json["error"]["message"].startswith("The model `one`: the adapter could")
        assert (await llm.call_utility("check_idle"))["unfinished"] == 0

    asyncio.run(with_server(folder, work))


@pytest.mark.parametrize("then", ["unload", "replace", "another path"])
@pytest.mark.parametrize("about", [{}, {"n": 2}, {"stream": True}, {"api": "responses"}])
def test_a_request_keeps_the_adapter_that_it_was_accepted_for(folder, monkeypatch, about, then):
    """While its prompt is read, the name goes, or means other weights: 404, and never another model's answer."""
    pytest.importorskip("fastapi")
    api = registry.lesson("06f_openai_api")
    monkeypatch.setattr(front_end, "TokenBytes", NoBytes)
    tokenizing.building(monkeypatch, lambda folder: Words())
    reading, go_on, prompts = asyncio.Event(), asyncio.Event(), api.OpenAIServing.prompts

    async def slowly(self, *args):
        reading.set()
        await go_on.wait()
        return await prompts(self, *args)

    async def work(call, llm):
        change = lambda what, **more: call(f"/v1/{what}_lora_adapter", {"lora_name": "one", **more})  # noqa: E731
        monkeypatch.setattr(api.OpenAIServing, "prompts", slowly)
        if about.get("api") == "responses":
            path, body = "/v1/responses", {"model": "one", "max_output_tokens": 4, "input": "hello"}
        else:
            path, body = "/v1/completions", {"model": "one", "max_tokens": 4, "prompt": "hello", **about}
        asked = asyncio.create_task(call(path, body))
        await reading.wait()
        if then == "replace":
            assert (await change("load", lora_path=str(folder / "a1"), load_inplace=True)).status == 200
        else:
            assert (await change("unload")).status == 200
        if then == "another path":
            assert (await change("load", lora_path=str(folder / "a1"))).status == 200
        go_on.set()
        heard = await asked
        assert heard.status == 404 and heard.json["error"]["param"] == "model", heard.text
        assert (await call(path, body)).status == (404 if then == "unload" else 200)
        assert (await llm.call_utility("check_idle"))["unfinished"] == 0

    asyncio.run(with_server(folder, work))


def test_the_engine_looks_at_the_adapter_again(make, tiny):
    """A letter that comes when the adapter is gone: an error in its name, and the base model says nothing."""
    engine, letters = make().llm_engine, []
    proc = EngineCoreProc(engine, letters.append)
    request = Request("x", [1, 2, 3], SamplingParams(max_tokens=4), lora_name="gone")
    engine.core.add_request(request)
    for _ in range(3):
        proc.step()
    (output,) = [output for letter in letters for output in letter.outputs]
    assert (output.finish_reason, output.stop_reason) == ("error", "lora_name 'gone': is not loaded")
    assert output.new_token_ids == [] and not engine.core.scheduler.requests


def test_unloading_lets_answers_finish(make, tiny):
    llm, lora = make(), some(tiny, 1)[0]
    engine = llm.llm_engine
    engine.lora.add_adapter("a0", lora)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    engine.add_request("r", "abc", params, lora_name="a0")
    engine.add_request("q", "abc", dataclasses.replace(params, max_tokens=2), lora_name="a0")
    engine.step()
    engine.remove_lora("a0")
    assert engine.list_loras() == [] and "a0" in engine.lora.slots
    for refused, why in (
        (lambda: engine.add_request("s", "abc", params, lora_name="a0"), "not loaded"),
        (lambda: engine.add_lora(LoRARequest("a0", 1, "elsewhere")), "still used"),
        (lambda: engine.remove_lora("a0"), "not loaded"),
    ):
        with pytest.raises(common.InputError, match=why):
            refused()
    while engine.has_unfinished_requests():
        heard = engine.step()
    assert heard[0].outputs[0].token_ids == alone(tiny, lora, [97, 98, 99], 5)
    assert not engine.lora.sources and not engine.lora.slots and not engine.lora.cpu
    with pytest.raises(common.InputError, match="not loaded"):
        engine.add_request("s", "abc", params, lora_name="a0")


def test_without_permission_there_are_no_routes(folder):
    pytest.importorskip("fastapi")
    api = registry.lesson("06f_openai_api")
    app = build_app(api.OpenAIServing(api.ScriptedLLM(), ["base"], {"one": "path"}))
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert asyncio.run(api.call(app, path, {"lora_name": "x", "lora_path": "y"})).status == 404


@pytest.mark.parametrize(("flags", "word"), [
    ({"lora_modules": ["a=b"]}, "--enable-lora"), ({"enable_lora": True, "lora_modules": ["a"]}, "name=path"),
    ({"enable_lora": True, "lora_modules": ["a=b", "a=c"]}, "once"),
    ({"enable_lora": True, "served_model_name": ["a"], "lora_modules": ["a=b"]}, "the model itself"),
])  # fmt: skip
def test_flags_that_are_refused(flags, word):
    with pytest.raises(common.InputError, match=word):
        EngineArgs(**flags)


# --- The simulation ---------------------------------------------------------------------------------------------------


def test_the_widget_is_the_real_thing(monkeypatch):
    assert page.simulate(page.WIDGET_DEFAULT)["loads"] == 8
    nine = page.WIDGET_DEFAULT | {"adapters": 9}
    trace = page.simulate(nine)
    assert trace["loads"] == trace["requests"], "nine adapters in turn, eight slots: nobody is ever there"
    one64 = page.simulate(nine | {"ranks": "one 64"})
    assert one64["slot_kib"] == 8 * trace["slot_kib"] and one64["used_kib"] < one64["reserved_kib"] / 4
    batch = page.WIDGET_DEFAULT | {"batch": 8, "adapters": 2}
    assert page.simulate(batch)["weight_reads"] < page.simulate(batch | {"sort": False})["weight_reads"]
    again = {"adapters": 7, "max_loras": 2, "traffic": "Zipf", "batch": 4}  # one is evicted and loaded in one step
    trace = page.simulate(page.WIDGET_DEFAULT | again)
    assert sum(len(step["loaded"]) for step in trace["steps"]) == trace["loads"]
    trace, evict = page.simulate(nine), LoRAModelManager.evict_idle
    monkeypatch.setattr(LoRAModelManager, "evict_idle",
                        lambda self, pinned: evict(self, pinned | {next(iter(self.slots))}))  # fmt: skip
    assert page.simulate(nine)["loads"] < trace["loads"], "another victim, another trace"


VIEW = """
class Element { setAttribute() {} append() {} addEventListener() {} }
globalThis.document = { createElement: () => new Element(), createElementNS: () => new Element() };
const [kit, { simulate }, view] = await Promise.all(["kit/draw", "sims/12_multi_lora", "views/12_multi_lora"].map(
  (name) => import(`${process.argv[1]}/${name}.mjs`)));
console.log(JSON.stringify(JSON.parse(process.argv[2]).map((params) => {
  const trace = simulate(params);
  return view.draw(trace, view.steps(trace) - 1, { ...kit, width: 720, params }).text;
})));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed: it runs the widget's code")
def test_what_the_picture_says_in_the_end():
    """Why there were many loads: with Zipf traffic nobody takes turns, and of many nobody comes back at once."""
    states = [{}, {"adapters": 16, "max_loras": 1}, {"traffic": "Zipf", "max_loras": 1},
              {"traffic": "Zipf", "max_loras": 2}, {"batch": 8, "max_loras": 4}, {"adapters": 8}]  # fmt: skip
    states = [page.WIDGET_DEFAULT | {"adapters": 9} | state for state in states]
    widgets = (common.ROOT / "lessons" / "widgets").as_uri()
    command = ["node", "--input-type=module", "-e", VIEW, widgets, json.dumps(states)]
    said = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    turns = "take turns in {}, and each is thrown out before its turn comes again."
    few = "too few for what these requests ask for."
    loads = [page.simulate(state)["loads"] for state in states]
    assert [text.partition(" In all ")[2] for text in said] == [
        f"{n} loads for 48 requests{why}" for n, why in zip(loads, (
            f": 9 adapters {turns.format('8 slots')}", f": 16 adapters {turns.format('1 slot')}",
            f": 1 slot is {few}", f": 2 slots are {few}", f": 4 slots are {few}", "."))]  # fmt: skip


def test_traffic():
    assert page.sequence("round robin", 3, 5) == [0, 1, 2, 0, 1] and page.sequence("bursts of 4", 3, 9)[7:] == [
        1,
        2,
    ]
    drawn = Counter(page.sequence("Zipf", 4, 20_000))
    assert [drawn[k] / 20_000 for k in range(4)] == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25], abs=0.02)
    for kind in page.POPULARITY:
        assert len(page.popularity(kind, 64)) == 64
    assert np.unique(page.popularity("uniform", 64), return_counts=True)[1].tolist() == [8] * 8


# --- Slow: PEFT, Transformers, the real model -------------------------------------------------------------------------


@pytest.mark.slow
def test_peft_computes_the_same(real_model):
    """One by one and all in one step, base row included: the logits of PEFT on Transformers."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model, tokenizer = real_model
    theirs = AutoModelForCausalLM.from_pretrained(folders.model_folder(None), dtype=torch.float32).eval()
    names = ["pirate", "json", "report"]
    wrapped = peft.PeftModel.from_pretrained(theirs, files.SHIPPED / names[0], adapter_name=names[0])
    for name in names[1:]:
        wrapped.load_adapter(files.SHIPPED / name, adapter_name=name)
    prompts = [tokenizer.chat([{"role": "user", "content": q}]) for q in training.TEST_QUESTIONS[:4]]
    manager = LoRAModelManager(LoRAConfig(3, 8))
    manager.attach(model, None)
    for slot, name in enumerate(names):
        manager.memory.write(slot, files.read_adapter(files.SHIPPED / name, model.config))
    adapted = adapted_model(model, manager, lesson.add_lora)

    def ours(chosen):
        tokens = [t for i in chosen for t in prompts[i]]
        lengths = [len(prompts[i]) for i in chosen]
        ends = np.cumsum(lengths)
        manager.meta = Meta.build(np.repeat([i - 1 if i else NONE for i in chosen], lengths), model.device)

        def attend(layer, q, k, v):
            return torch.cat([paged.prefill_attention(q[z - n : z], k[z - n : z], v[z - n : z])
                              for z, n in zip(ends, lengths)])  # fmt: skip

        hidden = adapted.forward(torch.tensor(tokens), torch.cat([torch.arange(n) for n in lengths]), attend)
        return model.logits(hidden[ends - 1])

    together = ours([0, 1, 2, 3])
    for i in range(4):
        with torch.no_grad():
            if i == 0:
                with wrapped.disable_adapter():
                    reference = wrapped(torch.tensor([prompts[0]])).logits[0, -1]
            else:
                wrapped.set_adapter(names[i - 1])
                reference = wrapped(torch.tensor([prompts[i]])).logits[0, -1]
        assert_close(together[i], reference)
        assert_close(ours([i])[0], reference)


@pytest.mark.slow
@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_that_peft_wrote(tmp_path, rslora):
    """A folder from PEFT itself, scale included, on a tiny model; and PEFT reads a folder of ours."""
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=16)  # fmt: skip
    theirs = LlamaForCausalLM(TheirConfig(**sizes)).eval()
    theirs.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, lora_alpha=6, use_rslora=rslora, target_modules=["q_proj", "v_proj", "up_proj"],
                             init_lora_weights=False)  # fmt: skip
    wrapped = peft.get_peft_model(theirs, config)
    wrapped.save_pretrained(tmp_path / "adapter")
    ids = torch.arange(10)
    reference = wrapped(ids[None]).logits[0].detach()
    folder_config = LlamaConfig.from_folder(tmp_path / "base")
    import contextlib

    with contextlib.ExitStack() as stack:
        model = llama.Llama(folder_config, weights.open_weights(tmp_path / "base", stack))
        lora = files.read_adapter(tmp_path / "adapter", folder_config)
        merged = lora_model.merged(model, lora)
        hidden = merged.forward(ids, torch.arange(10), naive.recompute)
        assert_close(merged.logits(hidden), reference)
    files.write_adapter(lora, tmp_path / "ours", alpha=4, dtype=torch.float32)
    clean = LlamaForCausalLM.from_pretrained(tmp_path / "base").eval()
    again = peft.PeftModel.from_pretrained(clean, tmp_path / "ours")(ids[None]).logits[0].detach()
    assert_close(again, reference)


@pytest.mark.slow
def test_the_shipped_adapters_answer_in_style(real_model):
    model, tokenizer = real_model
    for name in training.STYLES:
        lora = files.read_adapter(files.SHIPPED / name, model.config)
        texts = training.answers_with(
            model, tokenizer, lora, training.TEST_QUESTIONS[:3] + training.TEST_QUESTIONS[3:4]
        )
        assert sum(training.follows(name, text) for text in texts) >= 2, texts


def test_a_question_needs_no_chat_template(make, tiny):
    class Plain(Words):
        ask, converse = Tokenizer.ask, Tokenizer.converse

    (answer,), _ = lesson.ask(make(), Plain(), [None], "Why?", max_tokens=3)
    written = alone(tiny, None, [ord(c) for c in "Why?"], 3)
    assert answer.token_ids == written[: len(answer.token_ids)] and answer.token_ids


@pytest.mark.slow
def test_the_story_of_a_model_without_a_chat_template(real_model):
    model, tokenizer = real_model
    plain = copy.copy(tokenizer)
    plain.chat_template = None
    args = lesson.build_parser().parse_args([])
    lesson.tell_cache(args, lesson.tell_models(args, model, plain), plain)


@pytest.mark.slow
def test_an_adapter_in_w_is_everybodys(real_model, capsys):
    lesson.tell_models(lesson.build_parser().parse_args(["--break", "merge"]), *real_model)
    said = capsys.readouterr().out
    assert "base does NOT write what" in said and "pirate does NOT write what" in said, "applied twice"


@pytest.mark.slow
def test_a_thousand_adapters_on_the_real_model(real_model):
    model, tokenizer = real_model
    page.serve_thousand(model, tokenizer, seed=1, requests=40, tokens=2)
