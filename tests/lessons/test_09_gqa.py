"""Lesson 09: head maps, the GQA kernel packed and unpacked, MLA in three forms, pooled heads, serving arithmetic."""

from __future__ import annotations

import common

import argparse
import functools
import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from engine import registry
from engine.attention.splits import combine_splits
from engine.model import llama, loader
from lab import cli, healing, recorded, timing
from support import first_layers
from support.close import assert_close

lesson, page = registry.lesson("09_gqa"), cli.numbers("09_gqa")
paged = registry.lesson("02_paged_attention")


# --- Head maps ------------------------------------------------------------------------------------------------------


def test_maps():
    assert lesson.interleaved(8, 2) == [0, 0, 0, 0, 1, 1, 1, 1] and lesson.tiled(8, 2) == [0, 1] * 4
    assert lesson.interleaved(9, 3) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_the_wrong_map_is_right_exactly_at_both_ends():
    for Hq in (2, 6, 8, 9, 32):
        for Hkv in (n for n in range(1, Hq + 1) if Hq % n == 0):
            assert (lesson.tiled(Hq, Hkv) == lesson.interleaved(Hq, Hkv)) == (Hkv in (1, Hq)), (Hq, Hkv)


@pytest.mark.parametrize(("Hq", "Hkv"), [(4, 4), (6, 3), (6, 2), (5, 1)])
def test_attention_follows_its_map(Hq, Hkv):
    """Against SDPA's own grouped attention; another map gives another result."""
    q, k, v = torch.randn(7, Hq, 8), torch.randn(7, Hkv, 8), torch.randn(7, Hkv, 8)
    out = lesson.attention(q, k, v, lesson.interleaved(Hq, Hkv))
    sdpa = F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    assert_close(out, sdpa[0].transpose(0, 1))
    if 1 < Hkv < Hq:
        assert common.relative_error(lesson.attention(q, k, v, lesson.tiled(Hq, Hkv)), out) > 0.5


# --- GQA: decode ----------------------------------------------------------------------------------------------------


def decode_case(seq_lens, block_size, Hq, Hkv, D, dtype=torch.float32):
    case = paged.random_case(seq_lens, block_size, Hq, Hkv, D, dtype)
    return case, paged.paged_decode_reference(*case)


def poison(table, lens, block_size):
    """The padding of a block table points far outside."""
    table = table.clone()
    for b, S in enumerate(lens.tolist()):
        table[b, -(-S // block_size) :] = torch.iinfo(torch.int32).max
    return table


def guard(case, guarded):
    q, kv_cache, table, lens = case
    kv_cache = kv_cache.clone()
    kv_cache[:, 0] = torch.nan
    return guarded(q), guarded(kv_cache), guarded(poison(table, lens, kv_cache.shape[2])), guarded(lens)


@pytest.fixture
def guarded_outputs(monkeypatch, guarded):
    """What the decode kernels write lies between guard values, too."""
    real = lesson.split_buffers

    def buffers(q, width, splits):
        tensors = real(q, width, splits)
        made = {id(x): guarded(tuple(x.shape), x.dtype) for x in tensors}
        return tuple(made[id(x)] for x in tensors)

    monkeypatch.setattr(lesson, "split_buffers", buffers)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_decode_kernel(kernels, guarded, guarded_outputs, dtype, heads, num_splits):
    if dtype is not torch.float32 and heads == 1:
        pytest.skip("fp32 covers it; interpreter time")
    case, reference = decode_case([1, 15, 0, 17, 131], 16, 6, 2, 64, dtype)
    before = lesson.gqa_decode_kernel.launches
    out = lesson.gqa_decode(*guard(case, guarded), 131, heads, num_splits)
    assert out.dtype == dtype and lesson.gqa_decode_kernel.launches == before + 1
    assert_close(out.cpu(), reference, dtype)


def test_decode_kernel_with_16_bits_as_they_are(kernels, guarded, guarded_outputs, half):
    test_decode_kernel(kernels, guarded, guarded_outputs, half, heads=3, num_splits=4)


@pytest.mark.parametrize(("Hq", "Hkv", "D", "heads"), [
    (1, 1, 16, None), (4, 4, 32, None), (9, 3, 64, 1), (40, 2, 16, None), (40, 2, 16, 10), (5, 1, 24, None),
    (71, 1, 16, None), (4, 2, 128, 2),
])  # fmt: skip
def test_decode_kernel_shapes(kernels, guarded, guarded_outputs, Hq, Hkv, D, heads):
    """MHA, GQA, MQA; more than 16 heads in a group; part of a group per load; a head size that is no power of two."""
    case, reference = decode_case([5, 33, 70], 8, Hq, Hkv, D)
    assert_close(lesson.gqa_decode(*guard(case, guarded), 70, heads, 1).cpu(), reference)


def far_apart(kv_cache, table, S, column):
    """Keys whose score is a level per tile of 64, far past what exp can hold. `column(slot) = score`."""
    for p in range(S):
        level = (0, 150, -150, 100, 149)[p // 64] + torch.randint(-96, 96, ()) / 64
        column(kv_cache, int(table[0, p // 16]), p % 16, level)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_decode_scores_far_apart(kernels, num_splits):
    (q, kv_cache, table, lens), _ = decode_case([311], 16, 2, 1, 64)
    q.zero_()[..., 0] = 8.0  # q·k / √64 is k's first element
    far_apart(kv_cache, table, 311, lambda c, b, i, s: c[0, b, i, 0, :1].fill_(s))
    reference = paged.paged_decode_reference(q, kv_cache, table, lens)
    assert_close(lesson.gqa_decode(q, kv_cache, table, lens, 311, num_splits=num_splits).cpu(), reference)


def test_decode_strided_queries_and_empty_batch(kernels):
    (q, kv_cache, table, lens), reference = decode_case([5, 20], 8, 4, 2, 32)
    packed = torch.randn(2, 4 + 2 + 2, 32, device=q.device)
    packed[:, :4] = q
    assert_close(lesson.gqa_decode(packed[:, :4], kv_cache, table, lens, 20).cpu(), reference)
    assert lesson.gqa_decode(q[:0], kv_cache, table[:0], lens[:0], 0).shape == (0, 4, 32)


def test_decode_torch_path(device, dtype):
    if device.type == "cuda":
        pytest.skip("a GPU always runs the kernel")
    (q, kv_cache, table, lens), reference = decode_case([1, 15, 0, 16, 17, 131], 16, 6, 2, 64, dtype)
    out = lesson.gqa_decode(q, kv_cache, poison(table, lens, 16), lens, 131)
    assert_close(out, reference, dtype)


@pytest.mark.parametrize("heads", [2, 5, 8])
def test_groups_are_not_cut_across(device, heads):
    case, _ = decode_case([4], 8, 6, 2, 16)
    with pytest.raises(ValueError, match="heads per load"):
        lesson.gqa_decode(*case, 4, heads)


def test_bytes_are_those_of_the_launch():
    """`decode_traffic` multiplies by the programs that the wrapper launches: counted in the recorded launch."""
    meta = lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype, device="meta")  # noqa: E731
    for heads, times in ((None, 1), (4, 1), (2, 2), (1, 4)):
        with common.captured() as launches:
            lesson.gqa_decode(meta(32, 32, 128), meta(2, 9, 16, 8, 128), meta(32, 256, dtype=torch.int32),
                              meta(32, dtype=torch.int32), 4096, heads, 1)  # fmt: skip
        (launch,) = launches
        B, programs, _ = launch.grid
        assert programs == 8 * times
        assert page.decode_traffic(32, 4096, 32, 8, 128, heads)["bytes"] == B * programs * 4096 * 2 * 128 * 2


def test_addresses_are_64_bit(kernels, far):
    (q, kv_cache, table, lens), reference = decode_case([3, 5], 8, 2, 1, 16, torch.float16)
    kv_cache, first = far(kv_cache, 1)
    assert_close(lesson.gqa_decode(q, kv_cache, table + first, lens, 5).cpu(), reference, torch.float16)
    (q, cache, table, lens), reference = latent_case([3, 5], 8, 2, 12, 4, torch.float16)
    cache, first = far(cache)
    out = lesson.mla_decode(q, cache, table + first, lens, 5, 12, 0.1)
    assert_close(out.cpu(), reference, torch.float16)


def test_tiles_of_a_decode_are_those_of_lesson_02():
    for dtype, D, rows, nvidia in itertools.product(
        (torch.float32, torch.float16, torch.bfloat16), (16, 64, 128, 256), (16, 32, 64), (False, True)
    ):
        assert lesson.decode_tiles(dtype, D, rows, nvidia) == paged.decode_tiles(dtype, D, nvidia, rows)


def test_many_wide_parts_are_combined_by_more_warps():
    """A row of 64 ranges of MLA's 512 numbers is in registers as a whole."""
    meta = functools.partial(torch.empty, device="meta")
    for H, R, splits, warps in ((16, 512, 64, 16), (16, 512, 16, 4), (9, 128, 64, 4)):
        with common.captured() as launches:
            combine_splits(meta(2, H, splits, R), meta(2, H, splits), meta(2, H, R))
        assert launches[0].kwargs["num_warps"] == warps


def test_kernels_are_measured_beside_a_copy(monkeypatch):
    """The copy comes first. It reaches 100 GB/s here, so a share in percent is the number of GB/s."""
    order = []
    monkeypatch.setattr(common, "device", lambda: torch.device("meta"))
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: order.append("copy") or 100e9)
    monkeypatch.setattr(timing, "measure_graph", lambda *_: order.append("kernel") or timing.Timing(1e-3, 1e-3, 1e-3))
    monkeypatch.setattr(paged, "random_case", lambda *_: ())
    found = page.measure_kernels()
    assert order[0] == "copy" and order.count("copy") == 1 and found["copy_gb_s"] == 100
    for row in (*found["decode"], *found["mla"]):
        assert row["% of copy"] == pytest.approx(row["gb_s"]) and row["gb_s"] > 0


# --- The kernel under a model ---------------------------------------------------------------------------------------


def dense(model, prompt, steps):
    tokens = list(prompt)
    for _ in range(steps):
        hidden = model.forward(torch.tensor(tokens, device=model.device),
                               torch.arange(len(tokens), device=model.device), healing.whole_prompt())  # fmt: skip
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


def test_the_model_runs_on_the_kernel(kernels, tiny_model):
    prompt_ids = [list(range(3, 20)), [7, 8, 9]]
    before = lesson.gqa_decode_kernel.launches
    out = lesson.generate(tiny_model, prompt_ids, 3)
    assert lesson.gqa_decode_kernel.launches == before + 2 * tiny_model.config.num_hidden_layers
    assert out == [dense(tiny_model, prompt, 3) for prompt in prompt_ids]


def test_the_model_runs_on_the_torch_path(tiny_model):
    prompt_ids = [list(range(3, 20)), [7, 8, 9]]
    assert lesson.generate(tiny_model, prompt_ids, 5) == [dense(tiny_model, prompt, 5) for prompt in prompt_ids]


@pytest.mark.parametrize("layers", first_layers.CUT_OR_WHOLE)
def test_the_wrong_map_breaks_the_real_model(real_model, capsys, layers, tmp_path):
    model, tokenizer = loader.load(str(first_layers.folder_of(layers, tmp_path))) if layers else real_model
    with pytest.raises(common.CheckFailed, match="grouped cache"):
        lesson.show_map("tiled", model, tokenizer)
    assert "Paris" not in capsys.readouterr().out


# --- MLA ------------------------------------------------------------------------------------------------------------

SMALL = lesson.MLAConfig(96, 5, 40, 24, 8, 20)  # no size a power of two


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
@pytest.mark.parametrize("T", [1, 3, 17])
def test_naive_is_absorbed(device, dtype, allowed, T):
    layer = lesson.MLA.random(SMALL, dtype)
    q, cached = layer.project(torch.randn(17, 96, dtype=dtype, device=device), torch.arange(17, device=device))
    assert cached.shape == (17, 48) and q.shape == (17, 5, 32)
    assert common.relative_error(layer.absorbed(q[-T:], cached), layer.naive(q[-T:], cached)) < allowed


def test_mla_is_transformers_mla():
    """DeepseekV3Attention of Transformers on the same weights."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    c = SMALL
    config = DeepseekV3Config(
        hidden_size=c.hidden_size, num_attention_heads=c.num_attention_heads, num_key_value_heads=5, q_lora_rank=None,
        kv_lora_rank=c.kv_lora_rank, qk_nope_head_dim=c.qk_nope_head_dim, qk_rope_head_dim=c.qk_rope_head_dim,
        v_head_dim=c.v_head_dim, rope_interleave=False, max_position_embeddings=64, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    theirs = DeepseekV3Attention(config, layer_idx=0).eval()
    state = theirs.state_dict()
    ours = lesson.MLA(c, lambda name, *shape: state[f"{name}.weight"].detach().view(shape))
    hidden = torch.randn(13, c.hidden_size)
    position_ids = torch.arange(13)[None]
    cos_sin = DeepseekV3RotaryEmbedding(config)(hidden[None], position_ids)
    mask = torch.full((13, 13), -math.inf).triu(1)[None, None]
    with torch.no_grad():
        expected = theirs(hidden[None], position_embeddings=cos_sin, attention_mask=mask)[0][0]
    q, cached = ours.project(hidden, torch.arange(13))
    for o in (ours.naive(q, cached), ours.absorbed(q, cached)):
        assert_close(F.linear(o.flatten(1), state["o_proj.weight"]), expected)


def test_position_is_in_the_rotated_part_alone(device):
    """The same token elsewhere: its latent stays, its 8 rotated elements do not; scores see the distance alone."""
    layer = lesson.MLA.random(SMALL, torch.float64)
    hidden = torch.randn(6, 96, dtype=torch.float64, device=device)
    q1, x1 = layer.project(hidden, torch.arange(6, device=device))
    q2, x2 = layer.project(hidden, torch.arange(6, device=device) + 11)
    assert torch.equal(x1[:, :40], x2[:, :40]) and not torch.allclose(x1[:, 40:], x2[:, 40:])
    assert common.relative_error(layer.naive(q1, x1), layer.naive(q2, x2)) < 1e-12
    assert page.rotated_absorption_error() > 0.5


def latent_case(seq_lens, block_size, H, R, P, dtype=torch.float32):
    """(q, cache, table, lens) with NaN wherever no token lies, and the reference in fp64."""
    need = [-(-S // block_size) for S in seq_lens]
    ids = (torch.randperm(sum(need) + 2) + 1).tolist()
    table = torch.zeros(len(need), max(need, default=0) or 1, dtype=torch.int32)
    cache = torch.full((sum(need) + 3, block_size, R + P), math.nan)
    cache[0] = 0
    q, out = torch.randn(len(need), H, R + P).to(dtype), torch.zeros(len(need), H, R, dtype=torch.float64)
    for b, S in enumerate(seq_lens):
        table[b, : need[b]] = torch.tensor([ids.pop() for _ in range(need[b])])
        x = torch.randn(S, R + P).to(dtype)
        for p in range(S):
            cache[table[b, p // block_size], p % block_size] = x[p].float()
        if S:
            w = torch.softmax(0.1 * q[b].double() @ x.double().T, -1)  # [H, S]
            out[b] = w @ x[:, :R].double()
    tensors = (q, cache.to(dtype), table, torch.tensor(seq_lens, dtype=torch.int32))
    return tuple(x.to(common.device()) for x in tensors), out


def guard_latent(case, guarded):
    q, cache, table, lens = case
    cache = cache.clone()
    cache[0] = torch.nan
    return guarded(q), guarded(cache), guarded(poison(table, lens, cache.shape[1])), guarded(lens)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_mla_decode_kernel(kernels, guarded, guarded_outputs, dtype, num_splits):
    case, reference = latent_case([1, 15, 0, 16, 17, 75], 16, 5, 40, 8, dtype)
    before = lesson.mla_decode_kernel.launches
    out = lesson.mla_decode(*guard_latent(case, guarded), 75, 40, 0.1, num_splits)
    assert out.dtype == dtype and lesson.mla_decode_kernel.launches == before + 1
    assert_close(out.cpu(), reference, dtype)


def test_mla_decode_kernel_with_16_bits_as_they_are(kernels, guarded, guarded_outputs, half):
    test_mla_decode_kernel(kernels, guarded, guarded_outputs, half, num_splits=4)


@pytest.mark.parametrize(("H", "R", "P", "block_size"), [
    (1, 16, 16, 8), (16, 512, 64, 64), (21, 16, 24, 8),
])  # fmt: skip
def test_mla_decode_kernel_shapes(kernels, guarded, guarded_outputs, H, R, P, block_size):
    """One head; DeepSeek's sizes; heads that do not fill their last tile."""
    case, reference = latent_case([3, 40], block_size, H, R, P)
    assert_close(lesson.mla_decode(*guard_latent(case, guarded), 40, R, 0.1, 2).cpu(), reference)


def test_mla_many_heads_in_half_precision(kernels, guarded):
    """More heads than the smallest tile takes, in the tile that tensor cores want."""
    case, reference = latent_case([33, 2], 16, 70, 32, 16, torch.float16)
    assert_close(lesson.mla_decode(*guard_latent(case, guarded), 33, 32, 0.1).cpu(), reference, torch.float16)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_mla_scores_far_apart(kernels, num_splits):
    (q, cache, table, lens), _ = latent_case([311], 16, 2, 16, 16)
    q.zero_()[..., 16] = 10.0  # 0.1 · q·x is x's first rotated element
    far_apart(cache, table, 311, lambda c, b, i, s: c[b, i, 16:17].fill_(s))
    x = cache[table[0].long()].flatten(0, 1)[:311].double()
    reference = torch.softmax(0.1 * q[0].double() @ x.T, -1) @ x[:, :16]
    out = lesson.mla_decode(q, cache, table, lens, 311, 16, 0.1, num_splits)
    assert_close(out[0], reference, torch.float32)


def test_mla_strided_queries_and_empty_batch(kernels):
    (q, cache, table, lens), reference = latent_case([5, 20], 8, 3, 16, 16)
    wide = torch.randn(2, 5, 32, device=q.device)
    wide[:, :3] = q
    assert_close(lesson.mla_decode(wide[:, :3], cache, table, lens, 20, 16, 0.1).cpu(), reference)
    assert lesson.mla_decode(q[:0], cache, table[:0], lens[:0], 0, 16, 0.1).shape == (0, 3, 16)


def test_mla_torch_path(device, dtype):
    if device.type == "cuda":
        pytest.skip("a GPU always runs the kernel")
    (q, cache, table, lens), reference = latent_case([1, 15, 0, 16, 17, 75], 16, 5, 40, 8, dtype)
    out = lesson.mla_decode(q, cache, poison(table, lens, 16), lens, 75, 40, 0.1)
    assert_close(out, reference, dtype)


@pytest.mark.parametrize("forced", [False, True])
def test_an_mla_layer_decodes_from_its_pages(device, forced):
    """The lesson's path: project, absorb, attend through a block table, unfold; the naive form is the reference."""
    if forced and not common.HAS_TRITON:
        pytest.skip("no Triton wheel")
    layer = lesson.MLA.random(SMALL)
    hidden = torch.randn(11, 96, device=device)
    q, cached = layer.project(hidden, torch.arange(11, device=device))
    cache = torch.full((4, 4, 48), math.nan, device=device)
    cache[0] = 0
    table = torch.tensor([[2, 3, 1]], dtype=torch.int32, device=device)
    before, outs = lesson.mla_decode_kernel.launches, []
    for t in range(11):
        cache[table[0, t // 4], t % 4] = cached[t]
        lens = torch.tensor([t + 1], dtype=torch.int32, device=device)
        arguments = (layer.absorb(q[t : t + 1]), cache, table, lens, t + 1, 40, layer.scale)
        if forced:
            with common.use_kernels():
                outs.append(layer.unfold(lesson.mla_decode(*arguments)))
        else:
            outs.append(layer.unfold(lesson.mla_decode(*arguments)))
    if forced:
        assert lesson.mla_decode_kernel.launches == before + 11
    assert_close(torch.cat(outs), layer.naive(q, cached))


def test_mla_costs():
    """What torch counts while the lesson's own layer runs is what the formula says. 576 = 2.25 groups."""
    layer = lesson.MLA.random(config := lesson.MLAConfig(8, 3, 5, 2, 4, 6))
    for T, S in ((1, 7), (4, 7), (7, 7)):
        q, cached, counted = torch.randn(T, 3, 2 + 4), torch.randn(S, 5 + 4), {}
        for how in ("naive", "absorbed"):
            with FlopCounterMode(display=False) as counter:
                getattr(layer, how)(q.to(common.device()), cached.to(common.device()))
            counted[how] = counter.get_total_flops()
        assert lesson.mla_cost(3, T, S, config) == counted
    m = page.facts()["mla"]
    assert (m["elements"], m["groups"]) == (576, 2.25)
    n = math.ceil(m["break_even_queries"]["s8192"])
    for T, S, cheaper in ((n, 8192, "naive"), (n - 1, 8192, "absorbed"), (1, 2, "absorbed"), (9, 9, "naive")):
        cost = lesson.mla_cost(128, T, S)
        assert min(cost, key=cost.get) == cheaper, (T, S)


def test_no_read_past_the_end(kernels, guarded):
    """Reads that a later mask discards are invisible in values. Here every buffer ends with its last live element."""
    q, kv_cache, table, lens = paged.random_case([8, 16, 24], 8, 6, 2, 24, torch.float32)  # full blocks
    kv_cache, table = kv_cache[:, : int(table.max()) + 1].contiguous(), table[:, :3].contiguous()
    for splits in (1, 2):
        lesson.gqa_decode(*map(guarded, (q, kv_cache, table, lens)), 24, None, splits)
        latent = torch.randn(len(kv_cache[0]), 8, 48)
        lesson.mla_decode(*map(guarded, (torch.randn(3, 5, 48), latent, table, lens)), 24, 40, 0.1, splits)


# --- Pooling and healing --------------------------------------------------------------------------------------------


def doubled(model):
    """A model whose KV heads are equal in pairs."""
    D, Hq = model.config.head_dim, model.num_heads
    for i in range(model.config.num_hidden_layers):
        weight = model.linear[f"layers.{i}.qkv_proj"].weight
        for first in (Hq * D, (Hq + 2) * D):
            weight[first + D : first + 2 * D] = weight[first : first + D]
    return model


def test_pooling_equal_heads_changes_nothing():
    model = doubled(llama.random_model(seed=3))
    tokens = torch.tensor([[5, 9, 1, 40, 77, 3, 2, 8]])
    for how in ("mean", "first"):
        pooled = healing.pool_kv_heads(model, 1, how)
        assert pooled.num_kv_heads == 1 and pooled.config.num_key_value_heads == 1
        assert math.isclose(healing.perplexity(pooled, tokens), healing.perplexity(model, tokens), rel_tol=1e-5)


def test_pooling_is_a_mean_of_rows(tiny_model):
    model, D = tiny_model, tiny_model.config.head_dim
    before = {name: layer.weight.clone() for name, layer in model.linear.items()}
    mean, first = (healing.pool_kv_heads(model, 1, how).linear["layers.1.qkv_proj"].weight for how in ("mean", "first"))
    w = before["layers.1.qkv_proj"]
    k, v = w[6 * D : 8 * D].view(2, D, -1), w[8 * D :].view(2, D, -1)
    assert torch.equal(mean, torch.cat((w[: 6 * D], k.mean(0), v.mean(0))))
    assert torch.equal(first, torch.cat((w[: 6 * D], k[0], v[0])))
    assert all(torch.equal(model.linear[name].weight, weight) for name, weight in before.items())
    assert torch.equal(healing.pool_kv_heads(model, 2).linear["layers.1.qkv_proj"].weight, w)


@pytest.mark.parametrize("n", [0, 3, 4, -1])
def test_pooling_refuses(tiny_model, n):
    with pytest.raises(common.InputError, match=r"allowed for 2 KV heads: \[1, 2\]"):
        healing.pool_kv_heads(tiny_model, n)


def test_pooling_moves_biases():
    model = llama.random_model(seed=1)
    for i in range(2):
        layer = model.linear[f"layers.{i}.qkv_proj"]
        model.linear[f"layers.{i}.qkv_proj"] = llama.Linear(layer.weight, torch.arange(10.0 * 16))
    bias = healing.pool_kv_heads(model, 1).linear["layers.0.qkv_proj"].bias
    assert bias.tolist() == [*range(96), *(x + 8.0 for x in range(96, 112)), *(x + 8.0 for x in range(128, 144))]


def test_perplexity_is_the_mean_over_predictions(tiny_model):
    windows = torch.randint(128, (2, 9), generator=torch.Generator().manual_seed(0))
    losses = []
    for tokens in windows:
        logits = tiny_model.logits(tiny_model.forward(tokens.to(tiny_model.device),
                                   torch.arange(9, device=tiny_model.device), healing.whole_prompt()))  # fmt: skip
        losses += [-logits[t].log_softmax(-1)[tokens[t + 1]].item() for t in range(8)]
    assert math.isclose(healing.perplexity(tiny_model, windows), math.exp(sum(losses) / 16), rel_tol=1e-5)


def test_healing_heals_and_leaves_the_teacher_alone(tiny_model):
    """A student with disturbed attention weights goes back to the teacher's outputs; nothing else is trained."""
    train = torch.randint(128, (16, 32), generator=torch.Generator().manual_seed(0))
    weights = {name: layer.weight.clone() for name, layer in tiny_model.linear.items()}
    student = healing.pool_kv_heads(tiny_model, 2)
    for i in range(2):
        student.linear[f"layers.{i}.qkv_proj"].weight += 0.03 * torch.randn(160, 80, device=tiny_model.device)
    tokens, positions = train[0].to(tiny_model.device), torch.arange(32, device=tiny_model.device)

    def distance():
        a, b = (m.logits(m.forward(tokens, positions, healing.whole_prompt())) for m in (student, tiny_model))
        return common.relative_error(a, b)

    curve = healing.heal(tiny_model, student, train, 1.0, distance, evaluations=2)
    assert curve[0]["seconds"] == 0 and curve[-1]["seconds"] >= 1.0 and len(curve) == 3
    assert curve[-1]["tokens"] > curve[1]["tokens"] > 0
    assert curve[-1]["perplexity"] < 0.8 * curve[0]["perplexity"], curve
    assert all(torch.equal(tiny_model.linear[name].weight, weight) for name, weight in weights.items())
    assert student.linear["layers.0.down_proj"] is tiny_model.linear["layers.0.down_proj"]


@pytest.mark.parametrize("qk_norm", [False, True])
def test_what_is_healed_is_what_is_served(qk_norm, monkeypatch):
    """A student that has lost nothing: training computes its layers as the forward pass does, and finds no error."""
    model, errors, mse_loss = llama.random_model(qk_norm=qk_norm), [], healing.F.mse_loss
    monkeypatch.setattr(healing.F, "mse_loss", lambda y, want: errors.append(common.relative_error(y, want)) or
                        mse_loss(y, want))  # fmt: skip
    train = torch.randint(128, (1, 32), generator=torch.Generator().manual_seed(0))
    healing.heal(model, healing.pool_kv_heads(model, 2), train, 1e-9, float)
    assert len(errors) == 2 and max(errors) < 1e-5


def test_training_text_has_nothing_of_the_held_out():
    held_out = torch.arange(40).view(2, 20)
    train = torch.stack([torch.arange(100, 120), torch.cat((torch.arange(200, 210), torch.arange(15, 25))),
                         torch.cat((torch.arange(300, 311), torch.arange(15, 24)))])  # fmt: skip
    assert healing.without_overlap(train, held_out, run=10).tolist() == train[[0, 2]].tolist()


@pytest.mark.long
def test_healing_the_real_model(real_model, tmp_path, monkeypatch, capsys):
    """The command itself, 8 windows long on any machine: the curve falls by more than half and is stored beside what
    was there."""
    seconds = itertools.count()
    monkeypatch.setattr(healing, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    monkeypatch.setattr(healing, "HELD_OUT", 1)
    monkeypatch.setattr(loader, "load", lambda path: real_model)
    file = tmp_path / "results.json"
    recorded.merge_json(file, lesson.KEY, {"bench": {"a": 1}})
    lesson.main(["--heal", f"{8 / 60}", "--json", str(file)])
    stored = json.loads(file.read_text())
    healed = stored[healing.KEY]
    assert stored[lesson.KEY]["bench"] == {"a": 1}
    assert healed["curve"][-1]["perplexity"] < healed["curve"][0]["perplexity"] / 2
    assert healed["teacher"] < 30 and healed["train_tokens"] > 0 and healed["machine"]["torch"]
    assert page.draw(tmp_path)


def test_a_model_with_one_kv_head_has_none_to_merge(monkeypatch, capsys):
    model = llama.random_model(num_attention_heads=4, num_key_value_heads=1)
    monkeypatch.setattr(loader, "check_context", lambda *args: model.config)
    monkeypatch.setattr(healing, "heal", lambda *args: pytest.fail("it trains"))
    monkeypatch.setattr(loader, "load", lambda *args: pytest.fail("it loads a model first"))
    with pytest.raises(common.InputError, match=r"--heal: .* one KV head; it takes a model with more"):
        lesson.main(["--heal", "0.05", "--model", "mqa"])
    capsys.readouterr()
    assert page.measure_perplexity(model, None) == {}
    assert capsys.readouterr().out == "  SKIPPED the merging of KV heads: this model has one\n"


def test_healing_says_how_many_heads_the_model_has(tiny_model, monkeypatch, capsys):
    config = llama.random_model(num_attention_heads=4, num_key_value_heads=2).config
    windows = torch.randint(128, (12, 32), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(loader, "check_context", lambda *args: config)
    monkeypatch.setattr(loader, "load", lambda *args: (tiny_model, None))
    monkeypatch.setattr(healing, "corpus", lambda tokenizer: windows)
    monkeypatch.setattr(healing, "heal", lambda *args: [{"seconds": 0.0, "tokens": 0, "perplexity": 7.0}])
    lesson.main(["--heal", "0.05"])
    assert "4 query heads, one KV head: 0.05 minutes" in (told := capsys.readouterr().out)
    assert "320 tokens to measure on, 64 others to train on" in told and "as trained, with 2 KV heads" in told


def test_pooling_breaks_the_real_model(real_model):
    """The lesson's claim, on 127 predictions: merged heads are no switch."""
    model, tokenizer = real_model
    windows = healing.corpus(tokenizer, 512)[:, :128]
    trained, merged = healing.perplexity(model, windows), healing.perplexity(healing.pool_kv_heads(model, 1), windows)
    assert trained < 40 and merged > 50 * trained


def test_results_are_merged(tmp_path):
    """What the training found and what the lesson found do not erase each other."""
    file = tmp_path / "r.json"
    file.write_text('{"other": 1}')
    recorded.merge_json(file, healing.KEY, {"curve": [1]})
    cli.hand_over(lesson.KEY, argparse.Namespace(bench=False, figure=None, json=str(file)))
    stored = json.loads(file.read_text())
    assert set(stored[lesson.KEY].pop("machine")) == set(common.machine())
    assert stored == {"other": 1, healing.KEY: {"curve": [1]}, lesson.KEY: {"facts": page.facts()}}
    file.write_text("no json")
    with pytest.raises(common.InputError, match="not readable"):
        recorded.merge_json(file, healing.KEY, {})


# --- Serving arithmetic ---------------------------------------------------------------------------------------------


def test_cache_bytes():
    full = {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 10}
    row = 4 * 2 * 10 * 2  # KV heads, key and value, elements, bytes
    assert page.cache_bytes(full, 100) == 6 * 100 * row
    assert [page.cache_bytes(full, 1, tp) for tp in (2, 4, 8)] == [6 * row // 2, 6 * row // 4, 6 * row // 4]
    every_third = full | {"sliding_window": 30, "full_attention_every": 3}
    assert page.cache_bytes(every_third, 100) == (2 * 100 + 4 * 30) * row
    assert page.cache_bytes(every_third, 20) == 6 * 20 * row
    assert page.cache_bytes(full | {"sliding_window": 30, "full_attention_every": 0}, 100) == 6 * 30 * row
    assert page.cache_bytes(every_third | {"num_kv_shared_layers": 3}, 100) == (100 + 2 * 30) * row
    mla = {"num_hidden_layers": 2, "num_attention_heads": 8, "kv_lora_rank": 12, "qk_rope_head_dim": 4}
    assert [page.cache_bytes(mla, 5, tp) for tp in (1, 8)] == [2 * 5 * 16 * 2] * 2


@pytest.mark.parametrize(("name", "config_class"), [
    ("Gemma-3n-E4B", "Gemma3nTextConfig"), ("gpt-oss-120b", "GptOssConfig"), ("Mistral-7B-v0.1", "MistralConfig"),
    ("Falcon-7B", "FalconConfig"), ("DeepSeek-V3", "DeepseekV3Config"),
])  # fmt: skip
def test_configurations_are_transformers(name, config_class):
    """The attention fields of our table are the defaults of Transformers' configuration of that model."""
    import transformers

    theirs, ours = getattr(transformers, config_class)(), page.MODELS[name]
    for field in ("num_hidden_layers", "num_attention_heads", "hidden_size", "sliding_window", "num_kv_shared_layers",
                  "kv_lora_rank", "qk_rope_head_dim"):  # fmt: skip
        if field in ours:
            assert ours[field] == getattr(theirs, field), field
    if "num_key_value_heads" in ours and name != "Falcon-7B":
        assert ours["num_key_value_heads"] == theirs.num_key_value_heads
    if layer_types := getattr(theirs, "layer_types", None):
        every = ours["full_attention_every"]
        assert [t == "full_attention" for t in layer_types] == [i % every == 0 for i in range(1, len(layer_types) + 1)]


def test_the_story_counts_bytes_as_the_page_does():
    for tp, Hkv in itertools.product((1, 2, 4, 8, 16), (32, 16, 8, 2, 1)):
        config = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": Hkv, "head_dim": 128}
        assert lesson.bytes_per_token(Hkv, tp) == page.cache_bytes(config, 1, tp)


def test_the_story_fits_as_many_sequences_as_the_widget(capsys):
    lesson.show_gpus()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line[1:2].isdigit()]
    assert [int(tp) for tp, *_ in rows] == [1, 2, 4, 8, 16]
    for tp, mha, gqa, mqa, mla, *fit, wrong in rows:
        kib = page.facts()["kib_per_token"]
        assert [int(mha), int(gqa), int(mqa), int(mla)] == [kib[n][f"tp{tp}"] for n in ("mha", "gqa_8", "mqa", "mla")]
        ours = [page.simulate(page.WIDGET_DEFAULT | {"num_kv_heads": n, "tp": int(tp), "head_map": "tiled"})
                for n in (8, 1)]  # fmt: skip
        assert [int(n) for n in fit] == [t["max_sequences"] for t in ours]
        assert int(wrong) == len(ours[0]["wrong_heads"])


def test_replication_makes_mqa_no_cheaper():
    kib = page.facts()["kib_per_token"]
    assert kib["mqa"]["tp1"] < kib["gqa_8"]["tp1"] and kib["mqa"]["tp8"] == kib["gqa_8"]["tp8"] == 16
    assert set(kib["mla"].values()) == {36}


# --- The simulation -------------------------------------------------------------------------------------------------


def states():
    small = {name: page.WIDGET_CHOICES[name] for name in ("num_heads", "num_kv_heads", "head_dim", "tp", "head_map")}
    for values in itertools.product(*small.values()):
        yield page.WIDGET_DEFAULT | dict(zip(small, values))


def test_simulation_invariants():
    seen = {"impossible": 0, "wrong": 0, "copied": 0}
    for p in states():
        t, Hq, Hkv, tp = page.simulate(p), p["num_heads"], p["num_kv_heads"], p["tp"]
        if Hq % Hkv or Hq % tp:
            seen["impossible"] += t["problem"] is not None
            assert "IMPOSSIBLE" in page.describe(t)
            continue
        assert t["bytes_per_token"] == 2 * 32 * Hkv * p["head_dim"] * 2
        assert t["bytes_per_token_per_gpu"] == 2 * 32 * max(1, Hkv // tp) * p["head_dim"] * 2
        assert t["outputs"] == t["head_map"]
        assert t["wrong_heads"] == [h for h in range(Hq) if t["head_map"][h] != h // (Hq // Hkv)]
        assert bool(t["wrong_heads"]) == (p["head_map"] == "tiled" and 1 < max(1, Hkv // tp) < Hq // tp)
        for gpu, heads in enumerate(t["kv_heads_of_gpu"]):  # a GPU reads what it holds, whatever the map
            assert {t["head_map"][h] for h in range(Hq) if t["gpu_of_head"][h] == gpu} == set(heads)
        assert sum(map(len, t["kv_heads_of_gpu"])) == t["copies"] * Hkv
        per_sequence = t["bytes_per_token_per_gpu"] * p["context"]
        room = p["gpu_gib"] * 2**30 * 92 // 100 - 16 * 10**9 // tp
        assert t["max_sequences"] == max(0, room // per_sequence)
        seen["wrong"] += bool(t["wrong_heads"])
        seen["copied"] += t["copies"] > 1
        assert len(page.describe(t).splitlines()) <= 15
    assert min(seen.values()) > 10, seen


def test_simulation_runs_the_real_code(monkeypatch):
    before = page.simulate(page.WIDGET_DEFAULT)
    monkeypatch.setitem(lesson.HEAD_MAPS, "interleaved", lesson.tiled)
    assert page.simulate(page.WIDGET_DEFAULT | {"tp": 2})["wrong_heads"] != before["wrong_heads"]
    monkeypatch.undo()
    monkeypatch.setattr(lesson, "attention", lambda q, k, v, heads: torch.zeros(q.shape))
    assert page.simulate(page.WIDGET_DEFAULT)["outputs"] != before["outputs"]
    monkeypatch.undo()
    monkeypatch.setattr(lesson, "kv_heads_per_gpu", lambda Hkv, tp: 1)
    alone = page.simulate(page.WIDGET_DEFAULT | {"tp": 4})
    assert alone["bytes_per_token_per_gpu"] == before["bytes_per_token"] // 8
