"""Lesson 01: the naive reference, the bill, the cache, the decode kernel, the reservations; its page's numbers."""

from __future__ import annotations

import common

import contextlib
import dataclasses
import math
import random
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch.utils.flop_counter import FlopCounterMode

from engine import registry
from engine.model import llama
from lab import cli, lengths, roofline, timing
from lab.hardware import HARDWARE
from support.close import assert_close

lesson, page = registry.lesson("01_kv_cache"), cli.numbers("01_kv_cache")

# --- The reference --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("T", "S"), [(1, 1), (5, 5), (1, 9), (4, 11)])
def test_reference_equals_the_definition(T, S, device):
    """One scalar sum per output element, in fp64."""
    q, k, v = torch.randn(T, 4, 3), torch.randn(S, 2, 3), torch.randn(S, 2, 3)
    expected = torch.empty(T, 4, 3, dtype=torch.float64)
    for t in range(T):
        for h in range(4):
            visible = range(S - T + t + 1)
            weight = [math.exp(0.7 * float(q[t, h].double() @ k[s, h // 2].double())) for s in visible]
            for d in range(3):
                expected[t, h, d] = sum(w * v[s, h // 2, d].item() for w, s in zip(weight, visible)) / sum(weight)
    out = lesson.causal_attention(q.to(device), k.to(device), v.to(device), scale=0.7)
    assert_close(out.cpu(), expected.float())


def test_reference_equals_sdpa(dtype, device):
    q, k, v = (torch.randn(17, heads, 16, device=device).to(dtype) for heads in (6, 2, 2))
    out = lesson.causal_attention(q, k, v)
    expected = F.scaled_dot_product_attention(
        *(x.float().transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    assert out.dtype == dtype
    assert_close(out, expected, dtype)


# --- The decode kernel ----------------------------------------------------------------------------------------------

# (sequence lengths, Hq, Hkv, D): one row, tile − 1, tile, tile + 1, several tiles; MHA, GQA, MQA; D no power of two.
# The smallest head comes first: what a missing mask writes past its end stays within the guard values.
SHAPES = [
    ([63, 64, 65], 6, 2, 16),
    ([1], 9, 3, 64),
    ([31, 32, 33], 4, 2, 128),
    ([100, 1, 129], 8, 1, 80),
    ([70], 4, 4, 128),
    ([40, 3], 20, 1, 24),
]
shapes = pytest.mark.parametrize(("lens", "Hq", "Hkv", "D"), SHAPES)


def test_reference_computes_in_fp32_whatever_it_is_given(device):
    """Rounded once, at the end: it is what bf16 kernels are compared with."""
    q, k, v = (torch.randn(9, heads, 16, device=device).bfloat16() for heads in (6, 2, 2))
    whole = lesson.causal_attention(q.float(), k.float(), v.float())
    assert torch.equal(lesson.causal_attention(q, k, v), whole.bfloat16())


def random_cache(lens, Hq, Hkv, D, dtype, device, tail):
    """Queries and a cache whose rows past each sequence's end hold `tail`. Scores grow along the sequence, so that
    every tile brings a new maximum."""
    S_max = max(lens) + 7
    q = torch.randn(len(lens), Hq, D, device=device)
    k = torch.randn(len(lens), S_max, Hkv, D, device=device) + torch.linspace(0, 1, S_max, device=device)[:, None, None]
    v = torch.randn(len(lens), S_max, Hkv, D, device=device)
    for seq, n in enumerate(lens):
        k[seq, n:], v[seq, n:] = tail, tail
    return q.abs().to(dtype), k.to(dtype), v.to(dtype)


def expected(q, k, v, lens):
    """The naive reference, sequence by sequence, in fp32 on the same rounded inputs."""
    rows = [lesson.causal_attention(q[b, None].float(), k[b, :n].float(), v[b, :n].float()) for b, n in enumerate(lens)]
    return torch.cat(rows)


@pytest.fixture
def guarded_outputs(guarded, monkeypatch):
    """What a wrapper allocates with `torch.empty_like` lies between guard values."""
    plain = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x: guarded(tuple(x.shape), x.dtype) if x.dim() else plain(x))


@shapes
def test_kernel(lens, Hq, Hkv, D, dtype, device, kernels, guarded, guarded_outputs):
    q, k, v = (guarded(x) for x in random_cache(lens, Hq, Hkv, D, dtype, device, tail=float("nan")))
    seq_lens = guarded(torch.tensor(lens, dtype=torch.int32, device=device))
    before = lesson.decode_attention_kernel.launches
    out = lesson.decode_attention(q, k, v, seq_lens, max(lens))
    assert lesson.decode_attention_kernel.launches == before + 1
    assert out.dtype == dtype
    assert_close(out, expected(q, k, v, lens), dtype)


def test_kernel_writes_its_own_heads_only(device, kernels, guarded_outputs):
    """The tile has 16 rows, the group 3: were the others stored, finite neighbours of `q` would land in the guards."""
    _, k, v = random_cache([40], 6, 2, 16, torch.float32, device, tail=0.0)
    q = torch.randn(40, 6, 16, device=device)[20:21]
    out = lesson.decode_attention(q, k, v, torch.tensor([40], dtype=torch.int32, device=device), 40)
    assert_close(out, expected(q, k, v, [40]))


@shapes
def test_torch_path(lens, Hq, Hkv, D, dtype, device, monkeypatch):
    monkeypatch.setattr(common, "runs_kernel", lambda x: False)
    q, k, v = random_cache(lens, Hq, Hkv, D, dtype, device, tail=1e3)
    out = lesson.decode_attention(q, k, v, torch.tensor(lens, dtype=torch.int32, device=device), max(lens))
    assert out.dtype == dtype
    assert_close(out, expected(q, k, v, lens), dtype)


def test_strides(device, kernels, monkeypatch):
    """Keys and values may be parts of buffers of different size; so the torch path may, too."""
    q = torch.randn(2, 6, 32, device=device)
    k = torch.randn(2, 3, 50, 2, 32, device=device)[:, 1]
    v = torch.randn(2, 90, 3, 32, device=device)[:, 10:60, :2]
    seq_lens = torch.tensor([37, 50], dtype=torch.int32, device=device)
    reference = expected(q, k, v, [37, 50])
    assert_close(lesson.decode_attention(q, k, v, seq_lens, 50), reference)
    monkeypatch.setattr(common, "runs_kernel", lambda x: False)
    assert_close(lesson.decode_attention(q, k, v, seq_lens, 50), reference)


@pytest.mark.parametrize("far", ["sequence", "row"])
def test_kernel_offsets_exceed_31_bits(far, device, kernels):
    """Sequence 2 (row 2) lies 2^31 elements from the start. Only the pages that are touched become real memory."""
    memory = torch.empty(2**31 + 64, dtype=torch.float16, device=device)
    strides = (2**30, 16, 16, 1) if far == "sequence" else (16, 2**30, 16, 1)
    cache = memory.as_strided((3, 3, 1, 16), strides)
    cache.copy_(torch.randn(3, 3, 1, 16))
    q = torch.randn(3, 2, 16, device=device).half()
    out = lesson.decode_attention(q, cache, cache, torch.full((3,), 3, dtype=torch.int32, device=device), 3)
    assert_close(out, expected(q, cache, cache, [3, 3, 3]), torch.float16)


@pytest.mark.parametrize("last", [100, -100])
def test_kernel_survives_large_scores(last, device, kernels):
    """Scores of a few hundred, rising or falling, overflow exp unless the maximum is that of all tiles so far."""
    q, k, v = random_cache([150], 2, 1, 16, torch.float32, device, tail=0.0)
    k[0, :, 0] = k[0, :, 0].abs() * torch.linspace(-last, last, k.shape[1], device=device)[:, None]
    out = lesson.decode_attention(q, k, v, torch.tensor([150], dtype=torch.int32, device=device), 150)
    assert_close(out, expected(q, k, v, [150]))


# --- The cache ------------------------------------------------------------------------------------------------------


def new_cache(model, num_seqs, max_len):
    spec = lesson.KVCacheSpec.from_config(vars(model.config))
    return lesson.KVCache(spec, num_seqs, max_len, model.dtype, model.device)


def logits_without_cache(model, tokens):
    positions = torch.arange(len(tokens), device=model.device)
    hidden = model.forward(torch.tensor(tokens, device=model.device), positions, lesson.recompute)
    return model.logits(hidden)


def run_ragged(model, schedule, texts):
    """Feed `schedule` (new tokens of every sequence, pass by pass) through one cache; each sequence's logits."""
    cache, at = new_cache(model, len(texts), max(map(len, texts))), [0] * len(texts)
    rows = [[] for _ in texts]
    for counts in schedule:
        token_ids = [t for text, start, n in zip(texts, at, counts) for t in text[start : start + n]]
        cache.allocate_slots(counts)
        assert cache.positions.tolist() == [p for start, n in zip(at, counts) for p in range(start, start + n)]
        logits = model.logits(
            model.forward(torch.tensor(token_ids, device=model.device), cache.positions, cache.attend)
        )
        for seq, part in enumerate(logits.split(list(counts))):
            rows[seq].append(part)
        at = [start + n for start, n in zip(at, counts)]
    assert at == cache.seq_lens
    return [torch.cat(parts) for parts in rows]


# Whole prompts, then decode; a prompt in chunks; a sequence that joins late; one that sits passes out.
SCHEDULES = [
    [(6, 1, 9), *[(1, 1, 1)] * 4],
    [(2, 0, 5), (3, 1, 0), (1, 1, 4), *[(1, 1, 1)] * 2],
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cached_equals_uncached(schedule, tiny_model):
    texts = [torch.randint(128, (sum(n),)).tolist() for n in zip(*schedule)]
    for out, text in zip(run_ragged(tiny_model, schedule, texts), texts):
        assert_close(out, logits_without_cache(tiny_model, text))


def test_a_decode_step_reads_what_is_used_and_not_what_is_reserved(tiny_model):
    cache = new_cache(tiny_model, 2, 40)
    cache.allocate_slots([5, 3])
    tiny_model.forward(torch.arange(8, device=tiny_model.device), cache.positions, cache.attend)
    cache.k[:, :, 6:] = cache.v[:, :, 6:] = float("nan")  # no row that the longest sequence has
    cache.allocate_slots([1, 1])
    ids = torch.tensor([8, 9], device=tiny_model.device)
    assert tiny_model.forward(ids, cache.positions, cache.attend).isfinite().all()


def test_a_pass_names_all_sequences(tiny_model):
    """One that is left out would be cut off from its rows in silence."""
    cache = new_cache(tiny_model, 2, 4)
    with pytest.raises(ValueError):
        cache.allocate_slots([1])
    assert cache.seq_lens == [0, 0]


def test_decode_steps_run_the_kernel(tiny_model, kernels):
    texts = [torch.randint(128, (n,)).tolist() for n in (10, 5, 13)]
    before = lesson.decode_attention_kernel.launches
    outs = run_ragged(tiny_model, SCHEDULES[0], texts)
    assert lesson.decode_attention_kernel.launches == before + 4 * tiny_model.config.num_hidden_layers
    for out, text in zip(outs, texts):
        assert_close(out, logits_without_cache(tiny_model, text))


def test_generate_tiny(tiny_model):
    prompt = [3, 1, 4, 1, 5]
    slow = lesson.generate(tiny_model, prompt, 20, None)
    fast = lesson.generate(tiny_model, prompt, 20, new_cache(tiny_model, 1, 24))
    assert fast.token_ids == slow.token_ids and len(fast.token_ids) == len(fast.seconds) == 20
    assert fast.token_forwards == [5] + [1] * 19
    assert slow.token_forwards == list(range(5, 25))
    # The last token written is never run through the model: 24 rows are enough for 5 + 20 tokens, 23 are not.
    with pytest.raises(lesson.CacheFull):
        lesson.generate(tiny_model, prompt, 20, new_cache(tiny_model, 1, 23))


def test_restarted_positions_without_a_cache_are_right(tiny_model):
    """Why the bug survives: numbering a pass from 0 is correct as long as a pass holds the whole sequence."""
    right = lesson.generate(tiny_model, [7, 8], 8, None)
    assert lesson.generate(tiny_model, [7, 8], 8, None, restart_positions=True).token_ids == right.token_ids


@pytest.mark.parametrize("n", [8, pytest.param(24, marks=pytest.mark.slow)])
def test_real_model_and_the_recorded_bug(real_model, n):
    model, tokenizer = real_model
    prompt = tokenizer.chat([{"role": "user", "content": lesson.QUESTION}])
    runs = {"right": False, "restarted": True}
    tokens = {}
    for name, bug in runs.items():
        run = lesson.generate(model, prompt, n, new_cache(model, 1, len(prompt) + n - 1), restart_positions=bug)
        tokens[name] = run.token_ids
        assert [tokenizer.decode([i], False) for i in run.token_ids] == page.RECORDED[name][:n]
        assert sum(run.token_forwards) == len(prompt) + n - 1
    assert tokens["right"][0] == tokens["restarted"][0]
    assert tokens["right"][1] != tokens["restarted"][1]
    assert lesson.generate(model, prompt, 3, None).token_ids == tokens["right"][:3]


@pytest.mark.slow
def test_real_model_without_a_cache(real_model):
    """24 tokens after 64, counted and compared; the fast twin above compares three."""
    model, tokenizer = real_model
    prompt = tokenizer.encode("Once upon a time, " * 16)[:64]
    slow = lesson.generate(model, prompt, 24, None)
    fast = lesson.generate(model, prompt, 24, new_cache(model, 1, 87))
    assert fast.token_ids == slow.token_ids
    assert (sum(fast.token_forwards), sum(slow.token_forwards)) == (87, 24 * 64 + 24 * 23 // 2)


def test_real_model_decodes_through_the_kernel(real_model, kernels):
    model, tokenizer = real_model
    prompt = tokenizer.encode("The capital of France is")
    before = lesson.decode_attention_kernel.launches
    run = lesson.generate(model, prompt, 2, new_cache(model, 1, 16))
    assert lesson.decode_attention_kernel.launches == before + 30
    assert tokenizer.decode(run.token_ids) == " Paris."


class CacheMachine(RuleBasedStateMachine):
    """A cache of three sequences against three plain lists of rows."""

    LAYERS, SEQS, ROWS, HEADS, D = 2, 3, 12, 2, 16

    @initialize()
    def start(self):
        spec = lesson.KVCacheSpec(self.LAYERS, self.HEADS, self.D, self.D)
        self.cache = lesson.KVCache(spec, self.SEQS, self.ROWS, torch.float32, torch.device("cpu"))
        self.k = [[torch.empty(0, self.HEADS, self.D) for _ in range(self.SEQS)] for _ in range(self.LAYERS)]
        self.v = [[torch.empty(0, self.HEADS, self.D) for _ in range(self.SEQS)] for _ in range(self.LAYERS)]

    @rule(counts=st.tuples(*[st.integers(0, 5)] * 3), seed=st.integers(0, 99))
    def forward(self, counts, seed):
        before = list(self.cache.seq_lens)
        if any(have + new > self.ROWS for have, new in zip(before, counts)):
            with pytest.raises(lesson.CacheFull):
                self.cache.allocate_slots(counts)
            assert self.cache.seq_lens == before, "a refused claim claims nothing"
            return
        if not any(counts):
            return
        self.cache.allocate_slots(counts)
        generator = torch.Generator().manual_seed(seed)
        for layer in range(self.LAYERS):
            q = torch.randn(sum(counts), 2 * self.HEADS, self.D, generator=generator)
            k, v = torch.randn(2, sum(counts), self.HEADS, self.D, generator=generator)
            out = self.cache.attend(layer, q, k, v)
            parts = zip(*(x.split(list(counts)) for x in (q, k, v, out)))
            for seq, (q_seq, k_seq, v_seq, out_seq) in enumerate(parts):
                self.k[layer][seq] = torch.cat((self.k[layer][seq], k_seq))
                self.v[layer][seq] = torch.cat((self.v[layer][seq], v_seq))
                if counts[seq]:
                    reference = lesson.causal_attention(q_seq, self.k[layer][seq], self.v[layer][seq])
                    assert_close(out_seq, reference)

    @invariant()
    def rows_hold_what_was_stored_and_nothing_else_was_touched(self):
        for layer in range(self.LAYERS):
            for seq, used in enumerate(self.cache.seq_lens):
                assert used == len(self.k[layer][seq]) <= self.ROWS
                for tensor, rows in ((self.cache.k, self.k), (self.cache.v, self.v)):
                    assert torch.equal(tensor[layer, seq, :used], rows[layer][seq])
                    assert not tensor[layer, seq, used:].any()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=15, stateful_step_count=12)


# --- The bill -------------------------------------------------------------------------------------------------------


def test_bytes_per_token_of_published_models():
    """2 · layers · kv_heads · head size · 2 bytes, and 61 · 576 · 2 for MLA, worked out by hand."""
    assert {
        name: roofline.KVCacheSpec.from_config(config).bytes_per_token() for name, config in roofline.MODELS.items()
    } == {
        "SmolLM2-135M": 23_040,
        "OPT-13B": 819_200,
        "Llama-2-7B": 524_288,
        "Llama-3.1-8B": 131_072,
        "Llama-3.1-70B": 327_680,
        "DeepSeek-V3": 70_272,
    }


@given(st.integers(1, 100), st.integers(1, 64), st.integers(1, 16), st.sampled_from([16, 64, 80, 128, 256]))
def test_mha_gqa_mqa_are_one_formula(layers, heads, group, D):
    config = {"num_hidden_layers": layers, "num_attention_heads": heads * group, "head_dim": D, "hidden_size": 8}
    for kv_heads in (heads * group, heads, 1):
        spec = roofline.KVCacheSpec.from_config(config | {"num_key_value_heads": kv_heads})
        assert spec.bytes_per_token("float32") == 2 * spec.bytes_per_token() == 4 * spec.bytes_per_token("fp8")
        assert spec.bytes_per_token() == 2 * layers * kv_heads * D * 2
        # vLLM 0.32: `customize_spec` of the Triton backend, and `nvfp4_kv_cache_full_dim`.
        assert spec.bytes_per_token("int8_per_token_head") == 2 * layers * kv_heads * (D + 4)
        assert spec.bytes_per_token("int4_per_token_head") == 2 * layers * kv_heads * (D // 2 + 4)
        assert spec.bytes_per_token("nvfp4") == 2 * layers * kv_heads * (D // 2 + D // 16)


def test_vector_bytes_rounds_up_and_counts_scales():
    assert [roofline.vector_bytes(n, 3) for n in (0, 1, 2, 3, 8)] == [0, 1, 1, 2, 3]
    assert roofline.vector_bytes(17, 4, 8, 16) == 9 + 2  # 8.5 bytes of values, two scales: 10.5, rounded up
    assert page.facts()["mla"]["fp8_bytes_per_layer"] == 656  # vLLM's fp8_ds_mla


@pytest.mark.parametrize("config", [*roofline.MODELS.values(), *lesson.MODELS.values()])
def test_the_lessons_bill_is_the_laboratorys(config):
    ours, theirs = lesson.KVCacheSpec.from_config(config), roofline.KVCacheSpec.from_config(config)
    assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)
    for size, kinds in {4: ("float32",), 2: ("bfloat16", "float16"), 1: ("fp8",)}.items():
        assert {ours.bytes_per_token(size)} == {theirs.bytes_per_token(kind) for kind in kinds}
    assert ours.bytes_per_token() == ours.bytes_per_token(2)


def test_the_lessons_models_are_the_laboratorys():
    bills = {name.partition(",")[0]: lesson.KVCacheSpec.from_config(c) for name, c in lesson.MODELS.items()}
    assert bills.pop("Gemma-2B").bytes_per_token() == 2 * 18 * 1 * 256 * 2
    for name, spec in bills.items():
        assert spec.bytes_per_token() == roofline.KVCacheSpec.from_config(roofline.MODELS[name]).bytes_per_token()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_the_tensors_have_the_bytes_of_the_formula(kind):
    for config in roofline.MODELS.values():
        spec = lesson.KVCacheSpec.from_config(config)
        cache = lesson.KVCache(spec, 3, 50, getattr(torch, kind), torch.device("meta"))
        assert cache.k.nbytes + cache.v.nbytes == 3 * 50 * spec.bytes_per_token(getattr(torch, kind).itemsize)


def test_weight_bytes(real_model):
    smol, llama2, llama8, llama70 = (
        roofline.weight_bytes(roofline.MODELS[m])
        for m in ("SmolLM2-135M", "Llama-2-7B", "Llama-3.1-8B", "Llama-3.1-70B")
    )
    assert smol == 2 * real_model[0].num_parameters
    # Parameter counts of the published checkpoints.
    assert (llama2, llama8, llama70) == (2 * 6_738_415_616, 2 * 8_030_261_248, 2 * 70_553_706_496)


@pytest.mark.parametrize("name", roofline.MODELS)
@pytest.mark.parametrize("gpu", [24e9, 141e9, 1128e9])
def test_sequences_that_fit_is_the_largest_number_that_does(name, gpu):
    config = roofline.MODELS[name]
    n = roofline.sequences_that_fit(gpu, config, 2048)
    need = lambda n: (  # noqa: E731
        roofline.weight_bytes(config) + n * 2048 * roofline.KVCacheSpec.from_config(config).bytes_per_token()
    )
    assert n >= 0 and (need(n) <= 0.92 * gpu or n == 0) and need(n + 1) > 0.92 * gpu


# --- Reservations ---------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.floats(1.01, 5000))
def test_lengths_and_workloads_are_the_laboratorys(seed, mean):
    ours, theirs = random.Random(seed), random.Random(seed)
    assert [lesson.geometric(ours, mean) for _ in range(9)] == [lengths.geometric(theirs, mean) for _ in range(9)]
    assert lesson.WORKLOADS == lengths.WORKLOADS


def test_geometric_lengths_have_the_right_distribution():
    """Kolmogorov–Smirnov: with n = 20,000 the largest deviation stays below 1.63/√n with probability 0.99."""
    for mean in (19.31, 337.99):
        rng = random.Random(1)
        draws = sorted(lesson.geometric(rng, mean) for _ in range(20_000))
        assert draws[0] >= 1
        deviation = max(
            abs(sum(d <= n for d in draws) / len(draws) - (1 - (1 - 1 / mean) ** n)) for n in range(1, int(5 * mean), 7)
        )
        assert deviation < 1.63 / math.sqrt(len(draws))


@pytest.mark.parametrize("name", lengths.WORKLOADS)
def test_waste_equals_the_exact_expectation(name):
    """E[min(P + N, slots) | P < slots] summed exactly: E[min(N, r)] of a geometric N is mean · (1 − (1 − 1/mean)^r)."""
    slots, (a, b) = 2048, lengths.WORKLOADS[name]
    prompts = [(P, (1 - 1 / a) ** (P - 1) / a) for P in range(1, slots)]
    admitted = sum(p for _, p in prompts)
    used = sum(p * (P + b * (1 - (1 - 1 / b) ** (slots - P))) for P, p in prompts) / admitted
    cut = sum(p * (1 - 1 / b) ** (slots - P) for P, p in prompts)
    waste = page.reservation_waste(a, b, slots)
    spread = 2048 / math.sqrt(12 * 20_000) / slots  # no wider than uniform
    assert abs(waste["simulated"] - (1 - used / slots)) < 4 * spread
    assert abs(waste["refused"] - (1 - admitted)) < 4 * 0.5 / math.sqrt(20_000)
    assert abs(waste["cut"] - cut) < 4 * 0.5 / math.sqrt(20_000)


def test_waste_at_the_edges():
    full = page.reservation_waste(1.0001, 1.0001, slots=2, requests=100)  # 1 + 1 tokens each: all there is
    assert (full["simulated"], full["cut"], full["refused"]) == (0, 0, 0)
    nobody = page.reservation_waste(10, 10, slots=1, requests=100)
    assert (nobody["refused"], nobody["simulated"], nobody["used_percentiles"]) == (1.0, None, [])


def test_the_sources_claims():
    """95 % of a 2048-slot reservation: right for Alpaca, wrong for the others. 70B at 128k: right."""
    waste = page.facts()["waste"]
    assert [round(100 * waste[w]["mean_says"]) for w in ("alpaca", "sharegpt", "azure_conversation")] == [96, 76, 33]
    assert [round(100 * waste[w]["simulated"]) for w in ("alpaca", "sharegpt", "azure_conversation")] == [96, 76, 54]
    claim = page.facts()["claim_70b"]
    assert claim["gib"] == 40 and claim["waste"] == 63 / 64


# --- Memory-bound ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("T", "S"), [(1, 40), (7, 7), (3, 9)])
@pytest.mark.parametrize("tied", [True, False])
def test_step_cost_equals_counted_flops(T, S, tied):
    model = llama.random_model(tie_word_embeddings=tied)
    cache = new_cache(model, 1, S)
    config = vars(model.config)
    cache.seq_lens = [S - T]
    cache.allocate_slots([T])

    def attend(layer, q, k, v):  # every query against every key: the counter cannot see a mask
        return lesson.causal_attention(q, cache.k[layer, 0, :S], cache.v[layer, 0, :S])

    with FlopCounterMode(display=False) as counted:
        hidden = model.forward(torch.zeros_like(cache.positions), cache.positions, attend)
        model.logits(hidden[-1:])
    flops, moved = roofline.step_cost(config, 1, T, S)
    per_pair = 4 * config["num_hidden_layers"] * config["num_attention_heads"] * config["head_dim"]
    masked = T * S - sum(S - i for i in range(T))
    assert flops + per_pair * masked - 2 * T * norm_elements(config) == counted.get_total_flops()
    weights = sum(layer.weight.numel() for layer in model.linear.values())
    per_token = roofline.KVCacheSpec.from_config(config).bytes_per_token()
    assert moved == 2 * (weights + norm_elements(config)) + (S + T) * per_token


def norm_elements(config):
    """RMSNorm gains: weights that are read and multiplied, though not as a matrix."""
    return (2 * config["num_hidden_layers"] + 1) * config["hidden_size"]


def test_intensity_of_decode_attention_is_the_group_size():
    assert page.facts()["intensity"]["attention"] == {
        "smollm2_135m": 3, "opt_13b": 1, "llama_2_7b": 1, "llama_31_8b": 4, "llama_31_70b": 8,
    }  # fmt: skip


def test_no_batch_makes_decode_compute_bound():
    """The limit that facts() states is approached from below, and crosses the ridge where it says."""
    config, known = roofline.MODELS["Llama-3.1-8B"], page.facts()["intensity"]
    intensity = lambda B, S: (lambda cost: cost[0] / cost[1])(roofline.step_cost(config, B, 1, S))  # noqa: E731
    assert intensity(10**4, 2048) < known["decode_limit"] == pytest.approx(intensity(10**9, 2048), rel=1e-3)
    S = known["compute_bound_below"]
    assert intensity(10**9, int(S) - 2) > known["ridge_h100"] > intensity(10**9, int(S) + 2)


@pytest.mark.parametrize("context", [1, 2048, 131_072])
@pytest.mark.parametrize("num_seqs", [1, 64, 10**6])
def test_the_lessons_decode_step_is_the_laboratorys(num_seqs, context):
    cost = roofline.step_cost(roofline.MODELS["Llama-3.1-8B"], num_seqs, 1, context)
    assert lesson.decode_cost(num_seqs, context) == cost


def test_the_published_line_as_bandwidth():
    itl = page.facts()["itl"]
    assert itl["slope_tb_s"] == pytest.approx(131_072 / 4.37e-8 / 1e12)
    assert itl["weights_gb"] == pytest.approx((8_030_261_248 - 128_256 * 4096) * 2 / 1e9)
    assert itl["fp8_break_even"] == pytest.approx(7000)
    assert itl["intercept_ms"] < itl["weights_at_cache_rate_ms"] < roofline.PUBLISHED_ITL["bfloat16"][0]
    # Eight requests at 20,000 … 22,000 tokens: less than the 15.18 ms that the blog measured for them.
    assert itl["eight_requests_ms"] == pytest.approx(6.44 + 168_000 * 4.37e-5) and itl["eight_requests_ms"] < 15.18


@pytest.fixture
def measured_briefly(monkeypatch):
    timed = page.pass_seconds
    monkeypatch.setattr(page, "pass_seconds", lambda *args: timed(*args[:-1], seconds=0.01))
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 1e9)


def test_measurements_are_sane(tiny_model, measured_briefly):
    bench = page.measure_model(tiny_model)
    decode, fit = bench["decode"], bench["fit"]
    assert decode["context"] == [8, 64, 128, 256, 384, 512] and all(ms > 0 for ms in decode["ms"])
    assert len(bench["prefill"]["tok_s"]) == len(bench["batch"]["tok_s"]) == 4
    slope, intercept = np.polyfit(decode["context"], decode["ms"], 1)
    assert (fit["intercept_ms"], fit["slope_us"]) == pytest.approx((intercept, 1e3 * slope))


@pytest.mark.parametrize(("first", "per_token", "sound"), [(1, 0.1, True), (100, -0.1, False), (1, 0, False),
                                                           (-0.1, 0.1, False)])  # fmt: skip
def test_noise_is_not_read_as_bandwidth(tiny_model, monkeypatch, capsys, first, per_token, sound):
    """A slope or an intercept that is 0 or less; the contexts that are printed are those that were measured."""
    monkeypatch.setattr(page, "pass_seconds", lambda model, cache, T, S, seconds: first + per_token * S)
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 1e9)
    bench = page.measure_model(tiny_model)
    page.print_measurements(bench)
    fit = bench["fit"]
    out = capsys.readouterr().out
    assert ("As bandwidth" in out) == sound and ("SKIPPED the line for ITL" in out) != sound
    assert bool(fit["weights_gb_s"] and fit["cache_gb_s"]) == sound
    assert "at S=8, " in out and "decode, context 8:     " in out


@pytest.mark.parametrize("limit", [3, 40])
def test_a_model_of_few_positions_is_measured(limit, measured_briefly):
    bench = page.measure_model(llama.random_model(max_position_embeddings=limit))
    assert bench["decode"]["context"] == [max(1, limit * part // 64) for part in (1, 8, 16, 32, 48, 64)]
    assert bench["batch"]["tok_s"][0] > 0


# --- The simulation -------------------------------------------------------------------------------------------------


@given(
    prompt=st.integers(1, 600), new_tokens=st.integers(1, 300), batch=st.integers(1, 1024),
    model=st.sampled_from(page.WIDGET_CHOICES["model"]), gpu=st.sampled_from(list(page.GPUS)),
    restart_positions=st.booleans(),
)  # fmt: skip
def test_simulation(prompt, new_tokens, batch, model, gpu, restart_positions):
    """Against closed formulas, independent of the code that makes the trace."""
    trace = page.simulate(dict(locals()))
    per_token, weights = trace["bytes_per_token"], trace["weight_bytes"]
    usable = HARDWARE[page.GPUS[gpu]].memory * 92 // 100
    done = 0
    while done < new_tokens and weights + batch * (prompt + done) * per_token <= usable:
        done += 1
    assert trace["oom_step"] == (done if done < new_tokens else None)
    assert trace["with"]["forwards"] == [batch * (1 if i else prompt) for i in range(done)]
    assert trace["without"]["forwards"] == [batch * (prompt + i) for i in range(new_tokens)]
    end = trace["clock"][-1]
    assert end[1:3] == [done, batch * (prompt + done - 1) if done else 0] and end[0] == (
        trace["took"][0] if done < new_tokens else max(trace["took"])
    )
    assert trace["cache_bytes"][-1] == (batch * (prompt + done - 1) * per_token if done else 0)
    assert [row[0] for row in trace["clock"]] == sorted(row[0] for row in trace["clock"])
    assert (trace["text"] == page.RECORDED["restarted"]) == restart_positions
    text = page.describe(trace)
    assert len(text.splitlines()) <= 15 and ("OUT OF MEMORY" in text) == (trace["oom_step"] is not None)


def test_the_bill_of_512_and_512():
    assert page.facts()["forwards"] == {"cached": 1_023, "uncached": 392_960}
    trace = page.simulate(page.WIDGET_DEFAULT)
    assert [sum(trace[run]["forwards"]) for run in ("with", "without")] == [1_023, 392_960]


def test_a_step_takes_its_roofline():
    """Decoding reads 15 GB of weights at 600 GB/s: 25 ms. A pass over 1,023 tokens multiplies, and takes 121 ms."""
    trace = page.simulate(page.WIDGET_DEFAULT)
    assert trace["with"]["us"][1] == pytest.approx(15.01e9 / 600e9 * 1e6, rel=0.01)
    assert trace["without"]["us"][-1] == pytest.approx(2 * 6.98e9 * 1023 / 125e12 * 1e6, rel=0.05)


@pytest.mark.parametrize(
    "breakage",
    [
        (lesson.KVCache, "allocate_slots", lambda self, counts: None),
        (lesson.KVCacheSpec, "bytes_per_token", lambda self: 1),
        (lesson, "steps", lambda P, N, cached: iter([(0, P)])),
        (page, "weight_bytes", lambda config: 0),
        (page, "step_cost", lambda config, B, T, S: (1, 1)),
    ],
    ids=lambda b: b[1],
)
def test_simulation_runs_the_real_code(breakage, monkeypatch):
    params = page.WIDGET_DEFAULT | {"batch": 64}
    before = page.simulate(params)
    monkeypatch.setattr(*breakage)
    page.step_us.cache_clear()
    assert page.simulate(params) != before
    page.step_us.cache_clear()


# --- The script -----------------------------------------------------------------------------------------------------


@pytest.fixture
def loaded(real_model, monkeypatch):
    """The script is given the model that the tests have."""
    monkeypatch.setattr(lesson.loader, "load", lambda name: real_model)


def test_restart_positions_is_caught(loaded, monkeypatch, tmp_path):
    monkeypatch.setattr(lesson, "check_kernel", lambda: None)
    with pytest.raises(common.CheckFailed, match="same with and without a cache"):
        lesson.main(["--restart-positions", "--new-tokens", "4", "--figure", str(tmp_path)])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--slots", "50"], "--slots 50: .* at least 66"),
        (["--prompt", "a " * 9000], "--prompt: .* allowed"),
    ],
)
def test_bad_values_name_the_flag(loaded, monkeypatch, flags, message, tmp_path):
    monkeypatch.setattr(lesson, "check_kernel", lambda: None)
    with pytest.raises(common.InputError, match=message):
        lesson.main([*flags, "--figure", str(tmp_path)])


def test_what_is_allowed_is_what_the_flag_takes(monkeypatch, capsys):
    """For a context of 64: as few new tokens as the flag takes, and one place left for a prompt."""
    monkeypatch.setattr(lesson.LlamaConfig, "from_folder", lambda folder: llama.random_model(
        max_position_embeddings=64).config)  # fmt: skip
    monkeypatch.setattr(lesson, "Tokenizer", lambda folder: SimpleNamespace(ask=lambda prompt: [1]))
    parse = lesson.build_parser().parse_args
    with pytest.raises(common.InputError, match=r"--new-tokens 64: .* 2 to 63$"):
        lesson.prompt_tokens(parse(["--new-tokens", "64"]), None)
    for count in ("2", "63"):
        assert lesson.prompt_tokens(parse(["--new-tokens", count]), None) == [1]
    with pytest.raises(SystemExit):
        parse(["--new-tokens", "1"])


@pytest.mark.parametrize(
    ("tokens", "slots", "message"),
    [(1, 8, None), (9, 16, None), (9, 15, "--slots 15: .* at least 16"), (0, 99, "--prompt: 0 tokens; .* 1 to 92"),
     (92, 99, None), (93, 200, "--prompt: 93 tokens; .* 1 to 92")],
)  # fmt: skip
def test_the_prompt_and_all_but_the_last_new_token_need_room(monkeypatch, tokens, slots, message):
    """8 new tokens, of a model with 100 positions."""
    monkeypatch.setattr(lesson.LlamaConfig, "from_folder", lambda _: llama.random_model(
        max_position_embeddings=100).config)  # fmt: skip
    monkeypatch.setattr(lesson, "Tokenizer", lambda _: SimpleNamespace(ask=lambda text: [7] * tokens))
    args = lesson.build_parser().parse_args(["--new-tokens", "8", "--slots", str(slots)])
    with pytest.raises(common.InputError, match=message) if message else contextlib.nullcontext():
        assert lesson.prompt_tokens(args, None) == [7] * tokens
