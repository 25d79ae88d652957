"""Lesson 10: the mixed-batch kernel, the budget's schedule, chunked equal to whole, the simulation."""

from __future__ import annotations

import common

import json
import math
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from engine import registry
from engine.core.engine_core import EngineCore
from engine.core.kv_cache_manager import KVCacheManager
from engine.model import llama, loader
from engine.worker.assemble import make_runner
from lab import cli, naive, roofline
from support import first_layers
from support.broken import break_class
from support.close import assert_close

lesson = registry.lesson("10_chunked_prefill")
page = cli.numbers("10_chunked_prefill")
paged = registry.lesson("02_paged_attention")

# (new tokens, context including them) of each sequence: decodes, first chunks, later chunks, and nobody's turn.
MIXED = [(1, 1), (1, 16), (5, 5), (1, 33), (17, 40), (0, 12), (1, 17), (16, 64)]


def make_batch(work, Hq, Hkv, D, block_size, dtype, guarded, null=float("nan")):
    """A mixed batch on shuffled physical blocks. Every slot that no sequence owns holds NaN, in the null block too."""
    table_lens = [-(-S // block_size) for _, S in work]
    num_blocks = sum(table_lens) + 3
    ids = (torch.randperm(num_blocks - 1) + 1).tolist()
    width = max(table_lens) + 1
    table = torch.zeros(len(work), width, dtype=torch.int32)
    cache = torch.full((2, num_blocks, block_size, Hkv, D), float("nan"), dtype=dtype)
    cache[:, 0] = null
    for b, (_, S) in enumerate(work):
        for i in range(table_lens[b]):
            table[b, i] = block = ids.pop()
            used = min(block_size, S - i * block_size)
            cache[:, block, :used] = torch.randn(2, used, Hkv, D).to(dtype)
    lens = torch.tensor([n for n, _ in work])
    start_loc = torch.cat((torch.zeros(1, dtype=torch.int64), lens.cumsum(0)))
    q = torch.randn(int(lens.sum()), Hq, D).to(dtype)
    seq_lens = torch.tensor([S for _, S in work], dtype=torch.int32)
    tensors = [guarded(x) for x in (q, cache, table, start_loc, seq_lens)]
    return tensors, int(lens.max())


def check_batch(work, Hq, Hkv, D, block_size, dtype, guarded, null=float("nan")):
    tensors, longest = make_batch(work, Hq, Hkv, D, block_size, dtype, guarded, null)
    out = lesson.unified_attention(*tensors, longest)
    assert_close(out.cpu(), lesson.mixed_attention_reference(*tensors), dtype)


# --- Attention ------------------------------------------------------------------------------------------------------


def test_reference_is_causal_attention_of_lesson_01(device):
    """A whole prompt in one chunk is what lesson 01 computes without any cache."""
    S, block_size = 37, 8
    k, v = torch.randn(2, S, 2, 16)
    q = torch.randn(S, 6, 16)
    cache = torch.zeros(2, 6, block_size, 2, 16)
    table = torch.tensor([[5, 2, 4, 1, 3]], dtype=torch.int32)
    for p in range(S):
        cache[0, table[0, p // block_size], p % block_size] = k[p]
        cache[1, table[0, p // block_size], p % block_size] = v[p]
    out = lesson.mixed_attention_reference(q, cache, table, torch.tensor([0, S]), torch.tensor([S]))
    assert_close(out, naive.recompute(0, q.double(), k.double(), v.double()), torch.float32)


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_torch_path(dtype, block_size, guarded):
    if common.HAS_GPU:
        pytest.skip("on a GPU the wrapper launches the kernel")
    # Lesson 02's gather, which serves the decodes here, relies on a null block that holds zeros.
    check_batch(MIXED, 6, 2, 16, block_size, dtype, guarded, null=0)
    guesses = [(3, 40), (3, 44), (2, 19), (3, 3), (1, 9), (16, 64), (3, 12), (0, 7), (16, 50), (17, 33), (2, 2)]
    check_batch(guesses, 6, 2, 16, block_size, dtype, guarded, null=0)


@pytest.mark.parametrize(
    ("Hq", "Hkv", "D", "block_size"),
    [(6, 2, 16, 8), (9, 3, 64, 16), (4, 4, 24, 16), (32, 1, 16, 32), (8, 1, 128, 64), (32, 1, 128, 16)],
    ids=["gqa3", "smollm2", "mha-odd-head", "mqa32", "d128", "mqa32-d128"],
)
def test_kernel(dtype, Hq, Hkv, D, block_size, guarded, kernels):
    if dtype == torch.bfloat16 and Hq > 9:
        pytest.skip("covered by the other shapes")
    check_batch(MIXED if Hkv > 1 else MIXED[2:6], Hq, Hkv, D, block_size, dtype, guarded)


def windowed_batch(work, Hq, Hkv, D, block_size, dtype, guarded, window, null):
    """As `make_batch`, and tables whose blocks in front of every window are somebody else's now: they hold NaN."""
    (q, cache, table, loc, lens), longest = make_batch(work, Hq, Hkv, D, block_size, dtype, guarded, null)
    for b, (n, S) in enumerate(work):
        gone = max(0, S - n - window + 1) // block_size if window else 0
        cache[:, table[b, :gone].long()] = float("nan")
    return (q, cache, table, loc, lens), longest


def check_windows(work, Hq, Hkv, D, block_size, dtype, guarded, window, has_sinks, null, size=4):
    """With sinks of this `size`: as they are, about as heavy as all keys together."""
    tensors, longest = windowed_batch(work, Hq, Hkv, D, block_size, dtype, guarded, window, null)
    sinks = guarded((size + torch.randn(Hq)).to(dtype)) if has_sinks else None
    out = lesson.unified_attention(*tensors, longest, window, sinks)
    q, cache, *rest = tensors
    reference = lesson.mixed_attention_reference(q, cache.nan_to_num(), *rest, window, sinks)
    assert_close(out.cpu(), reference, dtype)


@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [1, 16, 17, None])
def test_torch_path_with_a_window(window, has_sinks, dtype, guarded):
    if common.HAS_GPU:
        pytest.skip("on a GPU the wrapper launches the kernel")
    work = [*MIXED, (3, 40), (16, 64), (40, 40), (33, 90), (1, 90), (20, 20)]
    check_windows(work, 6, 2, 16, 8, dtype, guarded, window, has_sinks, null=0)


@pytest.mark.parametrize(("window", "has_sinks"), [(1, False), (7, True), (16, False), (33, True), (None, True)])
def test_kernel_with_a_window(window, has_sinks, guarded, kernels):
    """Among them a chunk of 40 whose later queries begin to see behind the tile's first keys."""
    work = [*MIXED[3:], (40, 43), (3, 40), (1, 90)]
    check_windows(work, 6, 2, 16, 8, torch.float32, guarded, window, has_sinks, null=float("nan"))


@pytest.mark.parametrize(("Hkv", "has_sinks"), [(2, True), (6, False)])
def test_kernel_with_a_window_in_16_bits(Hkv, has_sinks, half, guarded, kernels):
    """A tile of 128 queries, the last of which see none of the first 64 keys. Sinks in 16 bits are rounded no more."""
    check_windows([(1, 33), (100, 140)], 6, Hkv, 16, 8, half, guarded, 9, has_sinks, null=float("nan"), size=10)


def test_kernel_reads_no_keys_in_front_of_a_tiles_windows(guarded, device, kernels):
    """Values there are NaN, as above."""
    n, S, window = 40, 64, 9
    (q, cache, table, *rest), longest = make_batch([(n, S)], 2, 1, 16, 16, torch.float32, guarded)
    ref = lesson.mixed_attention_reference(q, cache, table, *rest, window)
    block_q = lesson.choose_tiles(torch.float32, 16, 2, n)[0] // 2
    for first in range(0, n, block_q):
        earlier = torch.arange(0, max(0, S - n + first - window + 1), device=device)
        values = cache.clone()
        values[1, table[0, earlier // 16].long(), earlier % 16] = float("nan")
        out = lesson.unified_attention(q, values, table, *rest, longest, window)
        assert_close(out[first : first + block_q].cpu(), ref[first : first + block_q])


def test_kernel_with_16_bits_as_they_are(half, guarded, kernels):
    check_batch(MIXED, 6, 2, 16, 8, half, guarded)


@pytest.mark.parametrize("n", [1, 2, 20, 21, 22, 43])
@pytest.mark.parametrize("context", [0, 1, 31, 32, 33, 64])
def test_kernel_at_every_edge(n, context, guarded, kernels):
    """Queries around a tile's 21 (64 rows of 3 heads), contexts around the block and tile; a decode on each side."""
    check_batch([(1, 5), (n, context + n), (1, 34)], 3, 1, 16, 16, torch.float16, guarded)


def test_kernel_reads_no_keys_that_nobody_in_a_tile_sees(guarded, device, kernels):
    """Values there are NaN, and a weight of 0 would not hide them: this part of a prompt's work is not done."""
    n, S = 40, 64
    (q, cache, table, *rest), longest = make_batch([(n, S)], 2, 1, 16, 16, torch.float32, guarded)
    ref = lesson.mixed_attention_reference(q, cache, table, *rest)
    block_q = lesson.choose_tiles(torch.float32, 16, 2, n)[0] // 2
    for first in range(0, n, block_q):
        later = torch.arange(min(S, S - n + first + block_q), S, device=device)
        values = cache.clone()
        values[1, table[0, later // 16].long(), later % 16] = float("nan")
        out = lesson.unified_attention(q, values, table, *rest, longest)
        assert_close(out[first : first + block_q].cpu(), ref[first : first + block_q])


def test_the_longest_rows_start_first(guarded, kernels):
    """Of a prompt's tiles the last reads the most keys; started last, it would run alone."""
    from support import races  # it needs Triton

    (q, *rest), longest = make_batch([(112, 112)], 2, 1, 16, 16, torch.float32, guarded)
    read = races.elements_read(lambda: lesson.unified_attention(q, *rest, longest))
    read = [n for n in read if n > min(read)]  # numbers too many return at once
    assert len(read) > 3 and read == sorted(read, reverse=True) and read[0] > 2 * read[-1]


def test_kernel_alone_and_empty(guarded, device, kernels):
    for work in ([(1, 1)], [(3, 3)], [(0, 4), (2, 9)], [(2, 9), (0, 4)]):
        check_batch(work, 6, 2, 16, 16, torch.float32, guarded)
    q, launches = torch.empty(0, 6, 16, device=device), lesson.unified_attention_kernel.launches
    nobody = torch.zeros(1, dtype=torch.int64, device=device)
    out = lesson.unified_attention(q, torch.zeros(2, 2, 16, 2, 16), torch.zeros(0, 1, dtype=torch.int32), nobody,
                                   nobody[1:].int(), 0)  # fmt: skip
    assert out.shape == (0, 6, 16) and lesson.unified_attention_kernel.launches == launches


def test_kernel_reads_queries_with_a_stride(guarded, device, kernels):
    """As they come out of the packed projection: q is a slice of [T, Hq + 2 Hkv, D]."""
    (q, *rest), longest = make_batch(MIXED, 6, 2, 16, 16, torch.float32, guarded)
    packed = torch.cat((q, torch.full((len(q), 4, 16), float("nan"), device=device)), dim=1)
    out = lesson.unified_attention(packed[:, :6], *rest, longest)
    assert_close(out.cpu(), lesson.mixed_attention_reference(q, *rest))


def test_no_read_past_the_end(guarded, kernels):
    """Reads that a later mask discards are invisible in values. Here every buffer ends with its last live element."""
    (q, cache, table, *rest), longest = make_batch([(1, 8), (3, 16)], 2, 1, 24, 8, torch.float32, guarded)
    cache, table = guarded(cache[:, : int(table.max()) + 1]), guarded(table[:, :2])
    out = lesson.unified_attention(q, cache, table, *rest, longest)
    assert_close(out, lesson.mixed_attention_reference(q, cache, table, *rest))


def test_addresses_beyond_31_bits(guarded, kernels, far, apart):
    (q, cache, table, *rest), longest = make_batch([(1, 3), (2, 5)], 2, 1, 16, 8, torch.float16, guarded)
    ref = lesson.mixed_attention_reference(q, cache, table, *rest)
    cache, first = far(cache, 1)
    assert_close(lesson.unified_attention(apart(q), cache, table + first, *rest, longest).cpu(), ref)


def test_tile_numbers_suffice_and_never_collide():
    """Sequence b gets the tiles from start // BLOCK_Q + b on: enough for its queries, below the next one's first."""
    generator = torch.Generator().manual_seed(0)
    for block_q in (1, 5, 16, 42):
        for _ in range(200):
            lens = torch.randint(0, 60, (int(torch.randint(1, 9, (1,), generator=generator)),), generator=generator)
            start = torch.cat((torch.zeros(1, dtype=torch.int64), lens.cumsum(0)))
            first = [int(s) // block_q + b for b, s in enumerate(start)]
            assert all(-(-int(n) // block_q) <= first[b + 1] - first[b] for b, n in enumerate(lens))
            assert first[-1] == int(start[-1]) // block_q + len(lens)  # the size of the grid


def test_tiles_are_chosen_by_dtype_and_length():
    """Decodes alone get 16 rows, chunks get tall tiles; every dot is at least 16 on each side."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for D, G in ((16, 1), (64, 3), (128, 4), (128, 17), (128, 32), (64, 64), (128, 200)):
            for longest in (1, 2, 17, 480):
                for capability in (None, (8, 0), (9, 0)):
                    rows, tile, warps, _ = lesson.choose_tiles(dtype, D, G, longest, capability)
                    assert rows >= max(16, G) and tile >= 16 and warps in (4, 8)
    assert lesson.choose_tiles(torch.bfloat16, 128, 4, 1)[0] == 16
    for D, nvidia in ((64, True), (64, False), (128, True), (128, False), (256, True), (256, False)):
        tiles = lesson.choose_tiles(torch.float16, D, 4, 1, (9, 0) if nvidia else None)
        assert tiles == (16, *paged.decode_tiles(torch.float16, D, nvidia)), "as lesson 02 decodes"
    assert lesson.choose_tiles(torch.bfloat16, 64, 3, 480)[0] == 128
    assert lesson.choose_tiles(torch.bfloat16, 128, 4, 480) == (64, 32, 4, 2), "more would spill, but on a Hopper"
    assert lesson.choose_tiles(torch.bfloat16, 128, 4, 480, (9, 0)) == (64, 64, 4, 5)
    assert lesson.choose_tiles(torch.bfloat16, 128, 4, 1024, (9, 0)) == (128, 64, 8, 5)


# --- The scheduler --------------------------------------------------------------------------------------------------


def scheduler_of(*prompts, **limits):
    """A scheduler with a budget of 16 tokens before which prompts of these lengths stand."""
    limits = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16} | limits
    config = lesson.SchedulerConfig(**limits)
    made = lesson.Scheduler(config, KVCacheManager(65, 4, 64, enable_caching=False))
    for i, n in enumerate(prompts):
        made.add_request(lesson.Request(str(i), [0] * n, lesson.SamplingParams(max_tokens=2), arrival_time=i))
    return made


@pytest.mark.parametrize("knob", [{"max_num_scheduled_tokens": 0}, {"long_prefill_token_threshold": -1},
                                  {"long_prefill_token_threshold": 65}])  # fmt: skip
def test_knobs_are_checked(knob):
    with pytest.raises(common.InputError, match=next(iter(knob))):
        scheduler_of(**knob)


def test_knobs_at_their_limits():
    assert scheduler_of(3, 3, max_num_scheduled_tokens=1).schedule().num_scheduled_tokens == {"0": 1}
    assert scheduler_of(20, 3, long_prefill_token_threshold=64).schedule().num_scheduled_tokens == {"0": 16}


@pytest.mark.parametrize(("fewer", "budget"), [(None, 16), (8, 8), (99, 16)])
def test_the_budget_is_the_smaller_of_two(fewer, budget):
    output = scheduler_of(20, 20, max_num_scheduled_tokens=fewer).schedule()
    assert output.num_scheduled_tokens == {"0": budget}


@pytest.mark.parametrize(
    ("prompts", "limits", "tokens"),
    [([10], {}, [10]), ([10, 10], {}, [4, 4]), ([10, 3, 10], {}, [4, 3, 4]), ([10, 10], {"max_num_seqs": 1}, [4]),
     ([20, 20], {"adaptive": True}, [8, 8]), ([20, 20, 20, 20, 20], {"adaptive": True}, [4, 4, 4, 4]),
     ([20, 20], {"adaptive": True, "max_num_scheduled_tokens": 8}, [8])],
)  # fmt: skip
def test_the_cap_is_for_those_who_are_not_alone(prompts, limits, tokens):
    """Four tokens each, or a fair share of the whole budget if that is more; those who wait count as well."""
    limits = {"long_prefill_token_threshold_adaptive": limits.get("adaptive", False),
              **{name: value for name, value in limits.items() if name != "adaptive"}}  # fmt: skip
    output = scheduler_of(*prompts, long_prefill_token_threshold=4, **limits).schedule()
    assert list(output.num_scheduled_tokens.values()) == tokens


def test_without_chunks_a_prompt_starts_whole_or_not_at_all():
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "max_num_scheduled_tokens": 16}
    made = scheduler_of(10, 10, **whole)
    output = made.schedule()
    assert output.num_scheduled_tokens == {"0": 10}
    made.update_from_output(output, {"0": [1]})
    assert made.schedule().num_scheduled_tokens == {"0": 1, "1": 10}
    assert scheduler_of(16, **whole).schedule().num_scheduled_tokens == {"0": 16}
    assert scheduler_of(17, **whole).schedule().num_scheduled_tokens == {}
    made.running[1].num_computed_tokens, made.max_num_scheduled_tokens = 0, 5
    assert made.schedule().num_scheduled_tokens["1"] == 5, "who has started is cut rather than stopped"


# --- Through the engine ---------------------------------------------------------------------------------------------


def serve(model, budget, threshold=0, prompts=((3, 1, 4), (1, 5), range(9, 49), (2, 7, 1, 8)), max_tokens=6):
    """Everybody's greedy tokens, all requests there at once."""
    config = lesson.SchedulerConfig(
        max_model_len=64, max_num_seqs=len(prompts), max_num_batched_tokens=max(budget, len(prompts)),
        long_prefill_token_threshold=threshold,
    )  # fmt: skip
    manager = KVCacheManager(24, 16, config.max_model_len, enable_caching=False)
    core = EngineCore(lesson.Scheduler(config, manager), make_runner(model, config, 24, 16))
    params = lesson.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        core.add_request(lesson.Request(str(i), list(prompt), params))
    tokens = [[] for _ in prompts]
    while core.scheduler.has_unfinished_requests():
        for output in core.step():
            tokens[int(output.request_id)] += output.new_token_ids
    assert core.scheduler.kv_cache_manager.block_pool.num_free_blocks == 23
    return tokens


def alone(model, prompt, max_tokens):
    """The oracle: no cache, no batch, the whole text again for each token."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        ids = torch.tensor(tokens, device=model.device)
        hidden = model.forward(ids, torch.arange(len(tokens), device=model.device), naive.recompute)
        tokens.append(int(model.logits(hidden[-1:])[0].argmax()))
    return tokens[len(prompt) :]


def test_chunked_is_whole(tiny_model):
    """Whatever the budget, and with the cap: the tokens that each prompt gets alone, without any cache."""
    expected = [alone(tiny_model, p, 6) for p in ((3, 1, 4), (1, 5), range(9, 49), (2, 7, 1, 8))]
    for budget in (64, 17, 16, 15, 7, 5, 4):
        assert serve(tiny_model, budget) == expected, budget
    assert serve(tiny_model, 12, threshold=3) == expected


def test_engine_runs_the_kernel(tiny_model, kernels):
    """Mixed steps launch it once per layer, and it says what the torch path says."""
    before, decodes = lesson.unified_attention_kernel.launches, paged.paged_decode_kernel.launches
    prompts = ((3, 1, 4), range(9, 29))
    with_kernel = serve(tiny_model, 8, prompts=prompts, max_tokens=4)
    launches = lesson.unified_attention_kernel.launches - before
    # Steps of 3 + 5, 1 + 7, 1 + 7 tokens, in 2 layers. The prompt's last token comes alone, as a decode would.
    assert launches == 2 * 3 and paged.paged_decode_kernel.launches > decodes
    assert with_kernel == [alone(tiny_model, p, 4) for p in prompts]
    assert serve(tiny_model, 8, prompts=((3, 1),), max_tokens=2) == [alone(tiny_model, (3, 1), 2)], "two are no decode"


@pytest.mark.skipif(common.HAS_GPU, reason="forces the torch path")
def test_a_mixed_step_on_a_cpu_does_not_loop_over_decodes():
    """Many decodes are one operation per group of lengths, so are those who ask for the same few tokens; only prompts
    are taken one by one."""
    query_lens, lens = [1] * 38 + [17, 3, 20, 3], [100] * 38 + [17, 90, 90, 80]
    plan = lesson.plan_torch(torch.zeros(42, 9, dtype=torch.int32), query_lens, torch.tensor(lens),
                             torch.zeros(2, 10, 16, 2, 16), 4)  # fmt: skip
    (ones, decode), (threes, verify), *prompts = plan
    assert len(decode.keywords["plan"]) == len(verify.keywords["plan"]) == 1 and len(prompts) == 2
    assert [(tokens.stop - tokens.start, call.keywords["S"]) for tokens, call in prompts] == [(17, 17), (20, 90)]
    assert prompts[0][1].keywords["bias"] is None and prompts[1][1].keywords["bias"].shape == (20, 90)
    assert ones.tolist() == list(range(38)) and threes.tolist() == [55, 56, 57, 78, 79, 80]
    few = lesson.FEW_TOKENS
    plan = lesson.plan_torch(torch.zeros(2, 9, dtype=torch.int32), [few, few + 1], torch.tensor([90, 90]),
                             torch.zeros(2, 10, 16, 2, 16), 4)  # fmt: skip
    assert [rows for rows, _ in plan[1:]] == [slice(few, 2 * few + 1)], "nobody is computed twice"


@pytest.mark.parametrize("layers", first_layers.CUT_OR_WHOLE)
def test_real_model_in_chunks(real_model, layers, tmp_path):
    """One prompt of text among two answers on SmolLM2: whole, in chunks, and with a cap, the same tokens."""
    model, tokenizer = loader.load(str(first_layers.folder_of(layers, tmp_path))) if layers else real_model
    others = [tokenizer.encode(text) for text in page.DECODERS[:2]]
    prompt = page.long_prompt(tokenizer, 70)
    runs = [page.arrival_among_decodes(model, others, prompt, budget, 5, threshold)
            for budget, threshold in ((72, 0), (19, 0), (40, 20))]  # fmt: skip
    assert runs[0]["tokens"] == runs[1]["tokens"] == runs[2]["tokens"]
    assert [run["chunks"] for run in runs[:2]] == [1, 4] and runs[2]["chunks"] == 3
    assert all(len(tokens) == 5 for tokens in runs[0]["tokens"])
    assert sum(n for n, _ in runs[1]["steps"]) == sum(map(len, others)) + len(prompt) + 3 * 4
    assert lesson.serve(model, [*others, prompt], 19, 5) == runs[0]["tokens"]


def test_a_cap_ends_where_the_prompt_is_alone():
    """Answers of 16 tokens, or 24; 1,500 tokens three tokens later, 64 of them a step as long as anybody writes."""
    model = llama.random_model(max_position_embeddings=2048)
    answers = [[i] for i in range(1, 5)]
    runs = [page.arrival_among_decodes(model, answers, [7] * 1500, budget, max_tokens, 64)
            for budget, max_tokens in ((1504, 16), (256, 16), (1504, 24))]  # fmt: skip
    assert [run["chunks"] for run in runs] == [14, 16, 22] and runs[0]["tokens"] == runs[1]["tokens"]
    assert 1500 - 21 * 64 == 156, "what is left for the last step"


def test_a_chunk_predicts_what_is_known(tiny_model):
    """What stands behind a position depends on the text up to there alone; the last one says the first token."""
    prompt = list(range(30, 52))
    guesses = lesson.next_tokens(tiny_model, prompt)
    assert len(guesses) == 22 and guesses[-1] == alone(tiny_model, prompt, 1)[0]
    assert lesson.next_tokens(tiny_model, [*prompt[:16], 1, 2, 3])[:16] == guesses[:16]


def test_the_loop_of_the_story(tiny_model):
    """A prompt among others, or alone; whatever the budget, everybody's tokens are the same."""
    prompts = [[3, 1, 4], [1, 5], range(9, 49)]
    expected = [alone(tiny_model, prompt, 6) for prompt in prompts]
    assert all(lesson.serve(tiny_model, prompts, budget, 6) == expected for budget in (512, 7, 3, 1))
    assert lesson.serve(tiny_model, prompts[2:], 16, 6) == expected[2:]


def test_starving_on_the_model(tiny_model):
    """Budget = decodes: nothing of the prompt is computed until a decode has ended. One more: a token per step."""
    starved = page.arrival_among_decodes(tiny_model, [[1, 2], [3, 4]], range(20), 2, 8)
    assert [n for n, _ in starved["steps"]][3:9] == [2] * 6
    trickle = page.arrival_among_decodes(tiny_model, [[1], [3]], range(20), 3, 8)
    assert trickle["tokens"][2] == starved["tokens"][2] and trickle["chunks"] > 6


# --- Cost model -----------------------------------------------------------------------------------------------------


def test_cost_model_counts_as_lesson_01_does():
    """FLOPs of a prompt and of a batch of decodes: the same as `step_cost`, which knows no mixture."""
    for work, arguments in (([(512, 2048)], (1, 512, 2048)), ([(1, 900)] * 7, (7, 1, 900))):
        flops, moved = roofline.step_cost(page.LLAMA_8B, *arguments)
        parts = page.H100_8B.operators(work)
        assert sum(f for f, _ in parts.values()) == flops
        written = sum(n for n, _ in work) * page.H100_8B.token_bytes  # lesson 01 counts the new rows as well
        assert sum(b for _, b in parts.values()) + written == moved


def test_matrix_products_have_the_intensity_of_their_tokens():
    """In bf16: FLOP per byte = tokens in the step, the head aside, whoever they belong to."""
    for work in ([(1, 100)] * 32, [(1, 100)] * 32 + [(263, 500)], [(512, 512)]):
        flops, moved = page.H100_8B.operators(work)["matrix products"]
        head = 2 * page.H100_8B.head
        assert (flops - head * len(work)) / (moved - head) == sum(n for n, _ in work)


def test_below_the_ridge_a_smaller_budget_buys_nothing():
    rows = {budget: page.freeze(page.H100_8B, budget) for budget in (16384, 2048, 512, 256, 64)}
    assert rows[16384]["steps"] == 1 and rows[16384]["gap_ms"] == rows[16384]["ttft_ms"]
    assert all(rows[b]["steps"] == -(-10_000 // (b - 32)) for b in (2048, 512, 256, 64))
    assert rows[512]["gap_ms"] < rows[16384]["gap_ms"] / 10 and rows[512]["ttft_ms"] < 2 * rows[16384]["ttft_ms"]
    assert rows[64]["gap_ms"] > 0.9 * rows[256]["gap_ms"] and rows[64]["ttft_ms"] > 6 * rows[256]["ttft_ms"]


def test_a_silence_counts_from_the_arrival_on():
    core = page.simulated_core(lambda work: 1, 2, 64)
    core.token_times = {"a": [0, 100, 103], "b": [90, 101]}
    assert core.worst_gap("a", 100) == 3 and core.worst_gap("ab", 100) == 11 and core.worst_gap("c", 0) == 0


@pytest.mark.parametrize("gpu", [False, True])
def test_what_a_gpu_compiles_is_not_timed(monkeypatch, gpu):
    """There, every budget has run once with the whole prompt before any is measured."""
    ran = []

    def arrive(model, decoders, prompt, budget, max_tokens, threshold=0):
        ran.append((len(prompt), budget))
        return {"tokens": [], "steps": [(1, 1.0), (len(ran), 2.0)], "chunks": 1, "budget": budget,
                "ttft_s": float(len(ran)), "gap_s": 1.0}  # fmt: skip

    monkeypatch.setattr(common, "HAS_GPU", gpu)
    monkeypatch.setattr(page, "arrival_among_decodes", arrive)
    monkeypatch.setattr(page, "long_prompt", lambda tokenizer, length: [0] * length)
    found = page.measure_arrival(None, SimpleNamespace(encode=lambda text: [0]), 0)
    all_of_them = [(1500, budget) for budget in (1504, 1024, 512, 256, 128, 64, 32, 16)]
    assert ran == [(64, 256), *all_of_them, *(all_of_them if gpu else [])]
    assert [run["ttft_s"] for run in found["budgets"]] == [n + 8 * gpu for n in range(2, 10)]


def test_a_short_prompt_arrives_among_longer_ones(tiny_model):
    """Those that decode have room for all that they write: with less, the arrival would be waited for for ever."""
    run = page.arrival_among_decodes(tiny_model, [list(range(20, 50))], list(range(16)), 8, 4)
    assert [len(tokens) for tokens in run["tokens"]] == [4, 4] and run["chunks"] >= 2


def measured(monkeypatch, capsys, steps):
    """What the bench says when every run took these steps."""
    monkeypatch.setattr(page, "arrival_among_decodes", lambda model, decoders, prompt, budget, *rest, **more: {
        "tokens": [], "steps": steps, "chunks": 1, "budget": budget, "ttft_s": 1.0, "gap_s": 1.0 + (budget > 256),
    })  # fmt: skip
    monkeypatch.setattr(page, "long_prompt", lambda tokenizer, length: [0] * length)
    found = page.measure_arrival(None, SimpleNamespace(encode=lambda text: [0]), 0)
    return found, capsys.readouterr().out


def test_the_whole_prompt_is_compared_with_256(monkeypatch, capsys):
    found, told = measured(monkeypatch, capsys, [(1, 1.0), (2, 2.5)])
    assert found["whole_over_256"] == {"ttft_s": 1.0, "gap_s": 2.0} and "1,000 ms" in told and "2,000 ms" in told


def test_nobody_has_no_longest_silence(tiny_model):
    assert page.arrival_among_decodes(tiny_model, [], range(20), 8, 2)["gap_s"] == 0


@pytest.mark.parametrize(("steps", "said"), [
    ([(1, 1.0), (2, 0.9)], "SKIPPED the line for a step"), ([(1, 0.1), (2, 1.0)], "SKIPPED the line for a step"),
    ([(1, 0.2), (2, 0.3)], "A step here takes about 100 ms + 100.00 ms per token."),
])  # fmt: skip
def test_a_line_that_goes_down_is_noise(monkeypatch, capsys, steps, said):
    assert said in measured(monkeypatch, capsys, steps)[1]


def order(runs, key):
    return sorted(runs, key=lambda policy: runs[policy][key])


def check_ablation(rate, seed, count):
    runs = {p: page.ablation(p, count, rate, seed) for p in page.PUBLISHED_ABLATION}
    assert order(runs, "ttft_p50") == ["hybrid only", "both", "chunks only"]
    assert order(runs, "tbt_p99") == ["both", "chunks only", "hybrid only"]


def test_the_published_order_holds():
    check_ablation(rate=1.0, seed=0, count=96)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.6, 0.8, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_published_order_holds_elsewhere(rate, seed):
    check_ablation(rate, seed, count=128)


def test_separate_batches_are_separate():
    """In the ablation's other half, no step holds a prompt and a decode; with chunks they alternate."""
    core = page.simulated_core(lambda work: 1, 4, 4096, page.SeparateBatches, max_num_batched_tokens=64)
    core.submit("a", 10, 200)
    core.step()
    core.submit("b", 400, 5)
    kinds = []
    while "b" not in core.token_times:
        core.step()
        kinds.append("".join(sorted(core.scheduled)))
    assert kinds == ["a", "b"] * 7


def test_separate_batches_of_whole_prompts_let_prompts_go_first():
    core = page.simulated_core(lambda work: 1, 4, 512, page.SeparateBatches, max_num_batched_tokens=512,
                                 enable_chunked_prefill=False)  # fmt: skip
    core.submit("a", 10, 200)
    core.step()
    core.submit("b", 400, 5), core.submit("c", 400, 5)
    kinds = []
    for _ in range(3):
        core.step()
        kinds.append("".join(sorted(core.scheduled)))
    assert kinds == ["b", "c", "abc"]


# --- The simulation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [8192, 4113, 4112, 2048, 512, 100, 24, 18, 17])
@pytest.mark.parametrize(("decoders", "prompt"), [(16, 4096), (16, 17), (3, 1000), (0, 333)])
def test_simulation_by_formula(budget, decoders, prompt):
    """Chunks sum to the prompt; ⌈P / (budget − D)⌉ steps; no step, and no silence, longer than a full one."""
    t = page.simulate(page.WIDGET_DEFAULT | {"budget": budget, "decoders": decoders, "prompt": prompt})
    arrival = t["start_us"].index(t["arrival_us"]) if t["arrival_us"] in t["start_us"] else 0
    steps = -(-prompt // (budget - decoders))
    chunks = t["chunk"][arrival : arrival + steps]
    assert sum(chunks) == prompt and all(chunks) and not t["starved"]
    assert t["arrival_us"] == (3 * (10_000 + 50 * decoders) if decoders else 0)
    assert len(t["chunk"]) == arrival + steps + 2 and t["chunk"][-2:] == [1, 1]
    assert t["ttft_us"] == steps * 10_000 + 50 * (prompt + steps * decoders)
    assert t["worst_gap_us"] == (10_000 + 50 * (chunks[0] + decoders) if decoders else 0)
    assert all(d + c + s <= budget for d, c, s in zip(t["decodes"], t["chunk"], t["short_chunk"]))
    assert set(t["decodes"]) == {decoders}


@pytest.mark.parametrize(("budget", "decoders"), [(16, 16), (1, 1), (8, 16), (1, 256)])
def test_starvation_iff_the_budget_is_used_up(budget, decoders):
    t = page.simulate(page.WIDGET_DEFAULT | {"budget": budget, "decoders": decoders})
    assert t["starved"] and t["ttft_us"] is None and sum(t["chunk"]) == 0
    assert t["silent_streams"] == decoders - budget
    assert "STARVED" in page.describe(t)
    assert not page.simulate(page.WIDGET_DEFAULT | {"budget": decoders + 1, "decoders": decoders, "prompt": 9})[
        "starved"
    ]


def test_the_cap_lets_a_short_prompt_pass():
    crowd = page.WIDGET_DEFAULT | {"budget": 2048, "decoders": 2, "short_prompt": 64}
    off, cap, fair = (page.simulate(crowd | change) for change in (
        {}, {"threshold": 256}, {"threshold": 256, "adaptive": True}))  # fmt: skip
    assert cap["short_ttft_us"] < fair["short_ttft_us"] < off["short_ttft_us"] / 5
    assert off["ttft_us"] < fair["ttft_us"] < cap["ttft_us"]
    assert max(cap["chunk"]) == 256 and max(fair["chunk"]) == 2048 // 4 and max(off["chunk"]) == 2046
    lonely = page.simulate(page.WIDGET_DEFAULT | {"decoders": 0, "threshold": 64, "budget": 4096})
    assert lonely["chunk"][0] == 4096, "a request that is alone is not capped"


BREAKS = [
    ("num_new_tokens = token_budget  # 10", "num_new_tokens = -(-token_budget // 2)  # 10"),
    ("num_new_tokens = min(request.num_tokens - request.num_computed_tokens, cap, token_budget)",
     "num_new_tokens = min(request.num_tokens - request.num_computed_tokens, token_budget)"),
    ("or num_requests <= 1:", "or num_requests <= 20:"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), BREAKS)
def test_breaking_the_scheduler_breaks_the_simulation(old, new, monkeypatch):
    params = page.WIDGET_DEFAULT | {"threshold": 256, "short_prompt": 300}
    before = page.simulate(params)
    break_class(monkeypatch, lesson.Scheduler, old, new)
    assert page.simulate(params) != before


def test_the_freeze_of_the_story_is_the_widget_s():
    """The script's own clock, and the simulation with the engine's loop, at every budget that the table shows."""
    for budget in (4112, 2048, 512, 256, 64, 24, 17, 16, 8):
        for threshold in (0, 100):
            trace = page.simulate(page.WIDGET_DEFAULT | {"budget": budget, "threshold": threshold})
            chunks, ttft, silence = lesson.freeze(budget, threshold)
            assert chunks == trace["chunk"][3 : 3 + len(chunks)] and (chunks[-1] == 0) is trace["starved"]
            assert math.isinf(ttft) if trace["starved"] else ttft == pytest.approx(trace["ttft_us"] / 1e3)
            assert silence == pytest.approx(trace["worst_gap_us"] / 1e3)


def test_the_story_says_who_starves(capsys):
    lesson.show_freeze(16, 0)
    told = capsys.readouterr().out
    assert "STARVED: the streams use all 16 tokens" in told and "inf" not in told and "never" in told
    lesson.show_freeze(256, 0)
    told = capsys.readouterr().out
    assert "STARVED" not in told and "1,134 ms" in told


def test_facts_are_what_the_simulation_says():
    facts = page.facts()
    assert facts["free_seats"] == facts["ridge_tokens"] - 32
    assert facts["widget"]["512"]["ttft_ms"] == 302.0 and facts["widget"]["512"]["steps"] == 9
    assert facts["step"]["extra"] < 0.05 < facts["step"]["with_2048_ms"] / facts["step"]["decode_ms"] - 1
    a, b = page.fit_line([(1, 3.0), (1, 3.0), (1, 99.0), (11, 23.0)])
    assert (a, b) == (pytest.approx(1.0), pytest.approx(2.0))


@pytest.mark.parametrize("argv", [["--budget", "0"], ["--budget", "8193"], ["--threshold", "4097"]])
def test_what_is_too_much_for_the_prompt_is_refused_at_once(capsys, argv):
    with pytest.raises(SystemExit) as stop:
        lesson.build_parser().parse_args(argv)
    assert stop.value.code == 2 and argv[0] in capsys.readouterr().err


def test_the_readme_names_the_prompt_that_is_measured():
    assert f"while a prompt of {page.PROMPT_TOKENS:,} tokens comes in" in (common.ROOT / "README.md").read_text()


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed: it runs the widget's code")
def test_pictures_round_as_the_text_does():
    """A step of 10.85 ms is one of 10.8 in both: steps of the widget take multiples of 50 µs."""
    kit = common.ROOT / "lessons" / "widgets" / "kit" / "draw.mjs"
    code = f"""const {{ number }} = await import({json.dumps(kit.as_uri())});
    console.log(JSON.stringify(Array.from({{ length: 1000 }}, (_, i) => number((i * 50) / 1000, 1))));
    console.log([number(1234567.5), number(-1234.125, 2), number(0)].join());"""
    done = subprocess.run(["node", "--input-type=module", "-e", code], capture_output=True, text=True, check=True)
    numbers, others = done.stdout.splitlines()
    assert json.loads(numbers) == [f"{i * 50 / 1000:,.1f}" for i in range(1000)]
    assert others == f"{1234567.5:,.0f},{-1234.125:,.2f},0"
