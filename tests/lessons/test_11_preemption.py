"""Lesson 11: whoever was preempted answers as if nothing had happened, whatever became of its blocks."""

from __future__ import annotations

import common

import functools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import registry
from engine.model import loader
from engine.output import ModelRunnerOutput
from lab import cli, roofline
from lab.hardware import GPU, HARDWARE
from lab.reserving import ReservingScheduler
from support import first_layers
from support.latents import latent_model

lesson, page = registry.lesson("11_preemption"), cli.numbers("11_preemption")
Request, SamplingParams = lesson.Request, lesson.SamplingParams
GREEDY = {"temperature": 0, "ignore_eos": True}


# --- The copy kernel ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block_size", "heads", "size", "pairs"),
    [
        (1, 1, 2, [(0, 0)]),  # one word in fp16
        (16, 3, 64, [(4, 0), (1, 3), (3, 2)]),  # SmolLM2: three tiles
        (3, 1, 10, [(6, 1), (0, 3)]),  # hardly a power of two: 15 tiles of one or two words
        (16, 2, 32, [(2, 2)]),  # one tile
        (16, 3, 64, []),
    ],
)
def test_swap_blocks(kernels, dtype, guarded, device, block_size, heads, size, pairs):
    """Every pair's block arrives bit for bit, in both directions, and nothing else is touched."""
    big = guarded(torch.randn(2, 7, block_size, heads, size, device=device).to(dtype))
    small = guarded(torch.randn(2, 4, block_size, heads, size, device=device).to(dtype))
    for source, target, table in ((big, small, pairs), (small, big, [(t, s) for s, t in pairs])):
        expected = target.clone()
        lesson.swap_blocks_one_by_one(source, expected, table)
        launches = lesson.swap_blocks_kernel.launches
        lesson.swap_blocks(source, target, torch.tensor(table, dtype=torch.int64, device=device).view(-1, 2))
        assert torch.equal(target, expected)
        assert lesson.swap_blocks_kernel.launches == launches + bool(table)
        source.normal_()  # the way back must not find what it brings already there


def test_swap_blocks_of_latents(kernels, guarded, device):
    source, target = (guarded(torch.randn(1, 5, 4, 1, 48, device=device)) for _ in range(2))
    expected, pairs = target.clone(), [(4, 0), (1, 3)]
    lesson.swap_blocks_one_by_one(source, expected, pairs)
    lesson.swap_blocks(source, target, torch.tensor(pairs, device=device))
    assert torch.equal(target, expected)


def test_latents_come_back():
    """A model with latent attention, whose blocks go to host memory and return."""
    model, requests = latent_model(), some_requests(6, 128, 20)[:3]
    expected = {r.request_id: lesson.undisturbed(model, r.prompt_token_ids, r.max_tokens) for r in requests}
    core = lesson.ModelCore(lesson.build_scheduler("swap", 13, 4, 56, num_cpu_blocks=40, max_num_seqs=8), model, 40)
    assert lesson.run_to_end(core, requests) == expected and core.copies.total["in"] > 0


@pytest.mark.parametrize("halves", [2, 1])
def test_swap_blocks_without_a_kernel(dtype, halves):
    """Of latents, which are key and value in one, there is one half."""
    source, target = torch.randn(halves, 7, 4, 2, 8).to(dtype), torch.zeros(halves, 5, 4, 2, 8, dtype=dtype)
    expected, pairs = target.clone(), [(6, 0), (2, 4), (3, 1)]
    lesson.swap_blocks_one_by_one(source, expected, pairs)
    lesson.swap_blocks(source, target, torch.tensor(pairs))
    assert torch.equal(target, expected)


def test_copies_keep_their_order_and_their_last_source():
    copies = lesson.BlockCopies()
    copies.add("out", [(1, 10), (2, 11)])
    copies.add("out", [(3, 10)])  # CPU block 10 was given away again before anybody read it
    copies.add("in", [(10, 5)])
    copies.add("out", [(6, 10)])
    assert copies.take() == [("out", [(3, 10), (2, 11)]), ("in", [(10, 5)]), ("out", [(6, 10)])]
    assert copies.take() == [] and copies.total == {"out": 4, "in": 1}


# --- Same tokens under every policy and pool ------------------------------------------------------------------------


def some_requests(n: int, vocabulary: int, max_tokens: int, seed: int = 1) -> list:
    rng = random.Random(seed)
    prompts = [[rng.randrange(vocabulary) for _ in range(rng.randint(5, 30))] for _ in range(n)]
    params = SamplingParams(max_tokens=max_tokens, **GREEDY)
    return [Request(str(i), p, params, arrival_time=i, priority=(n - i) // 2) for i, p in enumerate(prompts)]


SLOW_POOLS = [pytest.param(pool, marks=pytest.mark.slow) for pool in (17, 25)]


@pytest.fixture(scope="module")
def answers(tiny_model):
    return {r.request_id: lesson.undisturbed(tiny_model, r.prompt_token_ids, 20) for r in some_requests(6, 128, 20)}


@pytest.mark.parametrize("pool", [13, *SLOW_POOLS, 100])  # the longest needs 12 or 13
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("policy", lesson.POLICIES)
def test_outputs_do_not_depend_on_policy_or_pool(policy, caching, pool, tiny_model, answers):
    scheduler = lesson.build_scheduler(policy, pool, 4, 56, num_cpu_blocks=20, prefix_caching=caching,
                                       max_num_seqs=8, max_num_batched_tokens=16)  # fmt: skip
    core = lesson.ModelCore(scheduler, tiny_model, 20)
    assert lesson.run_to_end(core, some_requests(6, 128, 20)) == answers
    assert (core.preemptions > 0) == (pool < 100)
    scheduler.kv_cache_manager.block_pool.check()
    assert scheduler.kv_cache_manager.block_pool.num_free_blocks == pool


def test_the_engine_runs_the_kernel(kernels, tiny_model, answers):
    """A swapped and an offloaded run whose blocks are moved by the kernel."""
    for policy in ("swap", "offload"):
        launches = lesson.swap_blocks_kernel.launches
        scheduler = lesson.build_scheduler(policy, 13, 4, 56, num_cpu_blocks=40, max_num_seqs=8)
        core = lesson.ModelCore(scheduler, tiny_model, 40)
        with pytest.MonkeyPatch.context() as patch:  # attention by its torch path: the copies are what is tried here
            patch.setattr(lesson, "swap_blocks", functools.partial(_with_kernels, lesson.swap_blocks))
            patch.setattr(common, "_kernels_forced", False)
            outputs = lesson.run_to_end(core, some_requests(6, 128, 20)[:3])
        assert outputs == {i: answers[i] for i in outputs} and core.copies.total["in"] > 0
        assert lesson.swap_blocks_kernel.launches > launches


def _with_kernels(function, *args):
    with common.use_kernels():
        function(*args)


@pytest.mark.parametrize("layers", first_layers.CUT_OR_WHOLE)
def test_real_model(real_model, layers, tmp_path):
    """SmolLM2, a pool for little more than one of three requests: swapped, recomputed, undisturbed, all the same."""
    model, tokenizer = loader.load(str(first_layers.folder_of(layers, tmp_path))) if layers else real_model
    prompts, new = [tokenizer.encode(text) for text in lesson.TEXTS], 8
    expected = {str(i): lesson.undisturbed(model, prompt, new) for i, prompt in enumerate(prompts)}
    longest = max(map(len, prompts)) + new
    for policy in ("recompute", "swap"):
        core = lesson.ModelCore(lesson.build_scheduler(policy, -(-longest // 4), 4, longest, 16), model, 16)
        requests = [Request(str(i), p, SamplingParams(max_tokens=new, **GREEDY)) for i, p in enumerate(prompts)]
        assert lesson.run_to_end(core, requests) == expected
        assert core.preemptions > 0 and (core.redone == 0) == (policy == "swap")


# --- What lies in the blocks ----------------------------------------------------------------------------------------


class MemoryCore(lesson.MeteredCore):
    """Memory without a model: each slot holds the whole prefix it was computed for. What a request is about to read
    must be its own, whoever wrote it and wherever it has been since."""

    def __init__(self, scheduler: lesson.Scheduler) -> None:
        super().__init__(scheduler)
        self.memory = {"gpu": {}, "cpu": {}}

    def execute_model(self, output):
        directions = set()
        for direction, pairs in self.copies.take():
            directions.add(direction)
            source, target = ("gpu", "cpu") if direction == "out" else ("cpu", "gpu")
            moved = [(t, dict(self.memory[source].get(s, {}))) for s, t in pairs]
            assert len({t for t, _ in moved}) == len(moved), "two copies of a batch race for one block"
            self.memory[target].update(moved)
        if isinstance(self.scheduler, lesson.SwapScheduler):
            assert len(directions) < 2, "copies out and in meet in one step"
        manager, gpu = self.scheduler.kv_cache_manager, self.memory["gpu"]
        # A forward pass writes each layer before it reads, so a block may be shared in the step that computes it.
        for write in (True, False):
            for request_id, n in output.num_scheduled_tokens.items():
                request, table = self.scheduler.requests[request_id], manager.get_block_ids(request_id)
                end = request.num_computed_tokens
                for p in range(end - n, end) if write else range(end):
                    block, offset = table[p // manager.block_size], p % manager.block_size
                    prefix = tuple(request.all_token_ids[: p + 1])
                    if write:
                        gpu.setdefault(block, {})[offset] = prefix
                    else:
                        assert gpu[block].get(offset) == prefix, f"{request} reads what is not its own"
        ready = super().execute_model(output).sampled_token_ids
        return ModelRunnerOutput({i: [len(self.scheduler.requests[i].all_token_ids) % 3] for i in ready})


workloads = st.fixed_dictionaries({
    "policy": st.sampled_from(lesson.POLICIES), "block_size": st.sampled_from([1, 2, 4]),
    "requests": st.lists(
        st.tuples(st.integers(1, 24), st.integers(1, 16), st.integers(0, 2), st.integers(0, 12), st.integers(0, 3)),
        min_size=1, max_size=8,
    ),
    "spare": st.integers(0, 8), "cpu": st.integers(1, 24), "budget": st.sampled_from([8, 16, 64]),
    "caching": st.booleans(), "threshold": st.sampled_from([0, 4, 8]), "watermark": st.integers(0, 3),
    "abort": st.integers(0, 30),
})  # fmt: skip


@given(workloads)
def test_everybody_reads_its_own_memory(workload):
    """Any workload under any policy: right content, conserved blocks, everything finishes, nothing leaks."""
    size = workload["block_size"]
    need = max(-(-(p + n) // size) for p, n, *_ in workload["requests"])
    scheduler = lesson.build_scheduler(
        workload["policy"], need + workload["spare"], size, 40, workload["cpu"], workload["caching"],
        workload["watermark"], max_num_seqs=8, max_num_batched_tokens=workload["budget"],
        long_prefill_token_threshold=workload["threshold"],
    )  # fmt: skip
    core, manager, done, step = MemoryCore(scheduler), scheduler.kv_cache_manager, {}, 0
    pending = [
        # Shared prefixes: prompt k is k, 0, 1, 0, 1, … for k in 0..2.
        (at, Request(str(i), [k, *(j % 2 for j in range(p - 1))], SamplingParams(max_tokens=n, ignore_eos=True),
                     arrival_time=i, priority=priority))
        for i, (p, n, priority, at, k) in enumerate(workload["requests"])
    ]  # fmt: skip
    while pending or scheduler.has_unfinished_requests():
        for item in [item for item in pending if item[0] <= step]:
            pending.remove(item)
            core.add_request(item[1])
        if step == workload["abort"] and scheduler.requests:
            core.abort_requests([max(scheduler.requests)])
        done.update({o.request_id: o.finish_reason for o in core.step() if o.finish_reason})
        manager.block_pool.check()
        assert all(request.num_computed_tokens == 0 for request in scheduler.waiting)
        if isinstance(scheduler, lesson.SwapScheduler):
            scheduler.cpu_pool.check()
            held = sum(len(blocks) for blocks, _ in scheduler.swapped.values())
            assert held + scheduler.cpu_pool.num_free_blocks == workload["cpu"]
            assert scheduler.swapped.keys() <= {r.request_id for r in scheduler.waiting}
        if workload["policy"] == "offload":
            manager.tier.check()
            assert manager.tier.num_free_blocks == workload["cpu"], "whoever takes blocks gives them back"
        step += 1
        assert step < 5000, "somebody waits for ever"
    assert manager.block_pool.num_free_blocks == need + workload["spare"]
    if workload["policy"] == "swap":
        assert scheduler.cpu_pool.num_free_blocks == workload["cpu"] and not scheduler.swapped


# --- Swap -----------------------------------------------------------------------------------------------------------


def two_growing(policy: str, num_cpu_blocks: int, **limits) -> tuple:
    """Two requests of 4 + 12 tokens in 6 blocks of 4: the later one is preempted when both want a fourth."""
    scheduler = lesson.build_scheduler(policy, 6, 4, 16, num_cpu_blocks, max_num_seqs=2, **limits)
    core = lesson.MeteredCore(scheduler)
    for i in range(2):
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        core.add_request(Request(str(i), [i] * 4, params, arrival_time=i))
    while not core.preemptions:
        core.step()
    return core, scheduler


def test_swap_brings_everything_back():
    core, scheduler = two_growing("swap", 3)
    (blocks, computed) = scheduler.swapped["1"]
    assert (len(blocks), computed) == (3, 12) and core.copies.total == {"out": 3, "in": 0}
    assert [scheduler.requests[i].num_preemptions for i in "01"] == [0, 1]
    lesson.run_to_end(core, [])
    assert core.redone == 0 and core.copies.total == {"out": 3, "in": 3} and scheduler.cpu_pool.num_free_blocks == 3


def test_a_full_cpu_pool_means_recomputation():
    core, scheduler = two_growing("swap", 2)
    assert not scheduler.swapped and core.copies.total["out"] == 0
    lesson.run_to_end(core, [])
    assert core.redone == 12


@pytest.mark.parametrize(("budget", "lost"), [(16, 12), (5, 11)])  # the smaller one kept the victim a step behind
def test_what_is_computed_again_is_counted_once_however_it_is_cut(budget, lost):
    core, _ = two_growing("recompute", 0, max_num_batched_tokens=budget)
    lesson.run_to_end(core, [])
    assert (core.useful, core.redone, core.preemptions) == (2 * 15, lost, 1)


@pytest.mark.parametrize(
    ("free", "runs", "watermark", "budget", "tokens"),
    [(4, False, 0, 16, 1), (3, False, 0, 16, 0), (4, False, 9, 16, 1), (4, True, 1, 16, 0), (5, True, 1, 16, 1),
     (6, False, 0, 0, 0)],
)  # fmt: skip
def test_whoever_was_swapped_out_comes_back_as_others_are_admitted(free, runs, watermark, budget, tokens):
    """13 tokens, 12 of them on the CPU, are four blocks; the watermark stays free if anybody runs."""
    core, scheduler = two_growing("swap", 3)
    request, pool = scheduler.requests["1"], scheduler.kv_cache_manager.block_pool
    core.abort_requests(["0"])
    pool.allocate(pool.num_free_blocks - free)
    scheduler.running += [Request("other", [0], SamplingParams())] * runs
    scheduler.watermark_blocks, scheduler.token_budget = watermark, budget
    assert scheduler._admit(request) == tokens
    assert request.num_computed_tokens == 12 * tokens and ("1" in scheduler.swapped) == (tokens == 0)


def test_an_abort_while_swapped_out_frees_the_cpu_blocks():
    core, scheduler = two_growing("swap", 8)
    core.abort_requests(["1"])
    assert scheduler.cpu_pool.num_free_blocks == 8 and not scheduler.swapped
    lesson.run_to_end(core, [])


def test_what_the_step_was_to_compute_is_not_copied():
    """Priority: request 0, first in the list, is granted a token before the more important one takes its block."""
    scheduler = lesson.build_scheduler("priority", 6, 4, 24, max_num_seqs=2)
    swap = lesson.SwapScheduler(scheduler.config, scheduler.kv_cache_manager, 8)
    core = lesson.MeteredCore(swap)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    core.add_request(Request("0", [0] * 7, params, arrival_time=0, priority=1))
    core.step()
    core.add_request(Request("1", [1] * 4, params, arrival_time=1, priority=0))
    while not core.preemptions:
        before = {i: r.num_computed_tokens for i, r in swap.requests.items()}
        core.step()
    assert swap.swapped["0"][1] == before["0"]


# --- The second tier ------------------------------------------------------------------------------------------------


def kept(tier) -> list[bytes]:
    """The hashes that a tier has, least recently stored first."""
    return [tier.block_hash[block] for block in tier.free_queue if tier.block_hash[block] is not None]


def test_the_tier_is_lru():
    tier = lesson.CPUTier(2)
    tier.store(b"a", 1)
    tier.store(b"b", 2)
    tier.store(b"a", 1)  # known: only its age changes, nothing is copied
    tier.store(b"c", 3)
    assert kept(tier) == [b"a", b"c"] and tier.copies.total["out"] == 3
    assert len(tier.take([b"a"])) == 1 and kept(tier) == [b"c"]
    tier.take([b"c"])
    tier.store(b"d", 4)
    assert not kept(tier), "both are on their way back to the GPU: there is no room yet"


def test_a_block_that_the_gpu_has_twice_is_copied_when_the_last_one_goes():
    manager = lesson.OffloadingKVCacheManager(3, 2, 16, num_cpu_blocks=4)
    pool, tier = manager.block_pool, manager.tier
    blocks = pool.allocate(2)
    for block in blocks:
        pool.cache_block(block, b"same")
    pool.free(blocks)
    (first,) = manager.allocate_slots(Request("0", [0], SamplingParams()), 1)
    assert not kept(tier) and tier.copies.total["out"] == 0
    (second,) = manager.allocate_slots(Request("1", [0], SamplingParams()), 1)
    assert kept(tier) == [b"same"] and tier.copies.take()[0][1][0][0] == second != first


def test_a_preempted_prefix_comes_back():
    known = page.facts()["tier"]
    assert known["0"]["hits"] == known["32"]["hits"] == 0  # LRU over a cycle that does not fit finds nothing
    assert known["96"]["hits"] == 3 * 6 * 256  # all but the first round
    assert known["96"]["copied"]["in"] == 3 * 6 * 16


def test_a_tier_that_keeps_what_it_lends_copies_each_block_out_once(monkeypatch):
    """Exercise 3: an inclusive tier. The hits are the same, and only the first eviction of a block is a copy."""

    def take(tier, block_hashes):
        lent = [tier.get_cached_block(block_hash) for block_hash in block_hashes]
        tier.touch(lent)  # the caller gives them back
        return lent

    exclusive = page.facts()["tier"]["96"]
    monkeypatch.setattr(lesson.CPUTier, "take", take)
    inclusive = page.round_robin(48, 96)
    assert inclusive == exclusive | {"copied": {"out": 96, "in": exclusive["copied"]["in"]}}
    assert exclusive["copied"]["out"] > 3 * 96


def test_a_hit_spans_both_tiers():
    """The head of a prefix on the GPU, its tail on the CPU: found as one, and only the tail is copied."""
    manager = lesson.OffloadingKVCacheManager(7, 2, 16, num_cpu_blocks=8)
    params = SamplingParams(max_tokens=1)
    first = Request("0", list(range(9)), params)
    manager.get_computed_blocks(first)
    manager.allocate_slots(first, 9)
    manager.free(first)
    other = Request("1", list(range(50, 57)), params)  # four blocks: takes the unused ones, then the tail of the first
    manager.get_computed_blocks(other)
    manager.allocate_slots(other, 7)
    manager.free(other)
    manager.tier.copies.take()
    blocks, num_tokens = manager.get_computed_blocks(again := Request("2", list(range(9)), params))
    assert 0 < len(blocks) < 4 and num_tokens == 8
    whole = Request("3", list(range(8)), params)  # four full blocks, all known: one token must be left to compute
    assert manager.get_computed_blocks(whole)[1] == 6
    again.num_computed_tokens = num_tokens
    assert manager.allocate_slots(again, 5, blocks) is None and len(kept(manager.tier)) == 4 - len(blocks)
    manager.allocate_slots(again, 1, blocks)
    batches = dict(manager.tier.copies.take())
    assert len(batches["in"]) == 4 - len(blocks)
    assert [target for _, target in batches["in"]] == manager.get_block_ids("2")[len(blocks) : 4]
    unread = Request("4", list(range(9)), SamplingParams(max_tokens=1, skip_reading_prefix_cache=True))
    manager.update_block_hashes(unread)
    manager.tier.store(unread.block_hashes[0], 1)
    assert manager.get_computed_blocks(unread) == ([], 0), "who may not read the cache does not read either tier"


# --- The arithmetic -------------------------------------------------------------------------------------------------


def test_figure_19():
    """Recomputation does not know block sizes; copies one by one suffer from small ones; at 16 to 64 both are close."""
    known = page.facts()["figure_19"]
    swap = [known["one_by_one_ms"][str(b)] for b in page.BLOCK_SIZES]
    assert swap == sorted(swap, reverse=True) and swap[0] > 4 * known["recompute_ms"]
    assert all(0.8 < known["one_by_one_ms"][b] / known["recompute_ms"] < 1.2 for b in ("16", "32", "64"))


@pytest.mark.parametrize("one_by_one", [False, True])
def test_crossover_is_where_the_order_changes(one_by_one):
    config, gpu, link = roofline.MODELS["Llama-2-7B"], HARDWARE["A100 80GB"], page.LINKS["PCIe 4"]
    at = page.crossover(config, gpu, link, one_by_one=one_by_one)

    def gain(n):
        return page.recompute_seconds(config, gpu, n) - page.swap_seconds(config, link, n, one_by_one=one_by_one)

    assert gain(at - 16) <= 0 < gain(at)


def test_costs_by_hand():
    config = {"num_parameters": 10, "num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 2}
    gpu = GPU("x", 1, 1, flops=100)
    assert page.recompute_seconds(config, gpu, 3) == pytest.approx((2 * 10 * 3 + 4 * 2 * 6) / 100)
    # 3 tokens are 2 blocks of 2; a token is 2 vectors of 2 bf16 values, 8 bytes; out and in.
    copied = 2 * (2 * 2 * 8 / 16)
    assert page.swap_seconds(config, 16, 3, 2) == pytest.approx(copied + 2 * page.COPY_OVERHEAD)
    assert page.swap_seconds(config, 16, 3, 2, one_by_one=True) == pytest.approx(copied + 8 * page.COPY_OVERHEAD)


def test_the_cliff_is_the_pools():
    """Same GPU, same arrivals: latency leaves the ample pool's where the tight one is full, and swap cannot help."""
    cliff = page.facts()["cliff"]
    low, high = cliff["tight"]["4"], cliff["tight"]["10"]
    assert low["p99"] == pytest.approx(cliff["ample"]["4"]["p99"]) and low["preemptions"] == 0
    assert high["p99"] > 1.8 * cliff["ample"]["10"]["p99"] and high["pool_used"] > 0.85 and high["redone"] > 0.1
    assert cliff["swap"]["10"]["redone"] == 0 and cliff["swap"]["10"]["p99"] > 0.9 * high["p99"]
    gpu, config = HARDWARE[page.CLIFF_GPU], roofline.MODELS[page.CLIFF_MODEL]
    block = 16 * roofline.KVCacheSpec.from_config(config).bytes_per_token()
    weights = 2 * sum(roofline.weights_read(config))
    assert weights + max(page.POOLS.values()) * block <= 0.9 * gpu.memory, "a pool that the card cannot hold"


# --- simulate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", page.THRASH.values(), ids=page.THRASH)
def test_simulation_conserves_blocks_and_tokens(change):
    params = page.WIDGET_DEFAULT | change
    trace = page.simulate(params)
    assert all(step["free"] + sum(step["held"].values()) == params["pool_blocks"] for step in trace["steps"])
    assert trace["outputs"] == 16 * 192 and trace["useful"] == 16 * 255
    assert sum(sum(step["scheduled"].values()) for step in trace["steps"]) == trace["useful"] + trace["redone"]
    assert trace["preemptions"] == sum(len(step["preempted"]) for step in trace["steps"])
    assert (trace["redone"] == 0) == (trace["preemptions"] == 0 or params["policy"] == "swap")


@pytest.mark.parametrize("name", lesson.VARIANTS)
def test_the_story_counts_what_the_page_quotes(name):
    """One has a loop of a few lines, the other the widget's."""
    steps, core = lesson.serve_crowd(**lesson.VARIANTS[name])
    known = page.facts()["thrash"][name.replace(" ", "_")]
    assert (steps, core.preemptions, core.useful, core.redone) == tuple(
        known[key] for key in ("steps", "preemptions", "useful", "redone")
    )
    assert sum(core.copies.total.values()) == known["copied_blocks"]


def test_enough_of_a_watermark_is_as_careful_as_lesson_04():
    """Exercise 2."""
    steps, core = lesson.serve_crowd(watermark_blocks=48)
    assert (steps, core.preemptions) == (992, 0)


@pytest.mark.parametrize(("pool", "written"), [(4, 1), (12, 129), (15, 177)])
def test_a_request_past_the_check_writes_until_the_pool_is_its_own(pool, written, capsys):
    lesson.show_stall(pool)
    out = capsys.readouterr().out
    assert f"needs 16 KV blocks, there are {pool}" in out and f"it writes {written} tokens" in out and "STALLED" in out


def test_what_a_reader_asks_for_stands_below_the_table(capsys):
    lesson.show_crowd({"pool_blocks": 12})
    assert "as asked" in (out := capsys.readouterr().out) and "refused" in out
    lesson.show_crowd({})
    assert "as asked" not in capsys.readouterr().out


def test_a_request_that_can_never_fit_is_refused():
    for blocks, refused in ((12, True), (15, True), (16, False)):
        trace = page.simulate(page.WIDGET_DEFAULT | {"pool_blocks": blocks})
        assert (trace["refused"] is not None) == refused and (trace["steps"] == []) == refused
    assert "REFUSED" in page.describe(page.simulate(page.WIDGET_DEFAULT | {"pool_blocks": 12}))


def test_preempting_the_oldest_redoes_as_much_as_the_page_says(monkeypatch):
    monkeypatch.setattr(lesson.Scheduler, "_choose_victim", lambda self: self.running[0])
    trace = page.simulate(page.WIDGET_DEFAULT)
    assert trace["redone"] / (trace["redone"] + trace["useful"]) == pytest.approx(0.43, abs=0.005)


@pytest.mark.parametrize(
    ("cls", "method", "broken", "change"),
    [
        ("Scheduler", "_choose_victim", lambda self: self.running[0], {}),
        ("Scheduler", "_admit", ReservingScheduler._admit, {}),
        ("SwapScheduler", "_admit", lambda self, r: lesson.Scheduler._admit(self, r), {"policy": "swap"}),
        ("KVCacheManager", "get_computed_blocks", lambda self, r: ([], 0), {"prefix_caching": True}),
    ],
)
def test_simulation_runs_the_real_classes(monkeypatch, cls, method, broken, change):
    params = page.WIDGET_DEFAULT | change
    before = page.simulate(params)
    monkeypatch.setattr(getattr(lesson, cls), method, broken)
    assert page.simulate(params) != before


def test_of_victims_that_came_together_the_first_admitted_goes():
    """vLLM takes `max(running, key=(priority, arrival time))`: of equals the first in the list, whatever its name."""
    scheduler = lesson.build_scheduler("priority", 9, 4, 16, max_num_seqs=4)
    for names in ("abc", "cab"):
        scheduler.running = [Request(name, [0], SamplingParams(), arrival_time=1.0) for name in names]
        assert scheduler._choose_victim() is scheduler.running[0]


@pytest.mark.parametrize(("free", "tokens"), [(3, 0), (4, 1)])
def test_unless_told_otherwise_a_prompt_comes_in_when_all_of_it_fits(free, tokens):
    """Four blocks, though this step computes one token of it."""
    scheduler = lesson.build_scheduler("recompute", 6, 4, 24, max_num_seqs=2)
    pool = scheduler.kv_cache_manager.block_pool
    pool.allocate(pool.num_free_blocks - free)
    scheduler.token_budget = 1
    assert scheduler._admit(Request("r", [0] * 16, SamplingParams())) == tokens


@pytest.mark.parametrize(("free", "tokens"), [(3, 0), (4, 1)])
def test_a_prompt_that_was_swapped_out_half_way_comes_back_when_all_of_it_fits(free, tokens):
    """16 known tokens are four blocks, however little of them this step may compute."""
    scheduler = lesson.build_scheduler("swap", 6, 4, 24, 3, max_num_seqs=2)
    request, pool = Request("r", [0] * 16, SamplingParams()), scheduler.kv_cache_manager.block_pool
    scheduler.swapped["r"] = scheduler.cpu_pool.allocate(1), 4
    pool.allocate(pool.num_free_blocks - free)
    scheduler.token_budget = 1
    assert scheduler._admit(request) == tokens and ("r" in scheduler.swapped) == (tokens == 0)


def test_what_comes_back_is_not_pushed_out_by_what_makes_room():
    """A tier of one block, with the tail of a prefix. The block that this takes on the GPU held something, too."""
    manager, params = lesson.OffloadingKVCacheManager(4, 2, 16, num_cpu_blocks=1), SamplingParams(max_tokens=1)
    for name, tokens in (("0", range(5)), ("1", range(50, 53))):
        request = Request(name, list(tokens), params)
        manager.allocate_slots(request, len(tokens))
        manager.free(request)
    manager.tier.copies.take()
    again = Request("2", list(range(5)), params)
    blocks, again.num_computed_tokens = manager.get_computed_blocks(again)
    assert (len(blocks), again.num_computed_tokens, len(kept(manager.tier))) == (1, 4, 1)
    manager.allocate_slots(again, 1, blocks)
    assert manager.tier.copies.take() == [("in", [(1, manager.get_block_ids("2")[1])])], "no room for what left"
    assert not kept(manager.tier) and manager.tier.num_free_blocks == 1
