"""Lesson 03: one pass is the softmax, and the kernel is it at every awkward size."""

from __future__ import annotations

import common

import itertools
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from engine import registry
from lab import cli, timing
from support import needs, scripts
from support.close import assert_close

lesson, page = registry.lesson("03_flash_attention"), cli.numbers("03_flash_attention")
Batch, random_qkv, reference = page.Batch, page.random_qkv, page.reference
SMALL = (16, 16, 4, 1, 0)  # several tiles at lengths that the interpreter can afford
MASKS = ({"causal": True}, {"causal": False}, {"window": 1}, {"window": 20})
mask_ids = ["causal", "full", "window1", "window20"]


# --- The recurrence -------------------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(-1e4, 1e4) | st.just(-math.inf), min_size=1, max_size=12),
    st.integers(1, 13),
    st.floats(0.01, 4),
)
def test_one_pass_is_the_softmax(keys, tile, q):
    values = [float(i + 1) for i in range(len(keys))]
    result, trace = page.online_softmax(q, keys, values, tile)
    scores = [torch.tensor(q, dtype=torch.float32).item() * key for key in keys]
    scores = torch.tensor(scores, dtype=torch.float32).double()
    if (scores == -math.inf).all():
        assert math.isnan(result)  # softmax of nothing
        return
    expected = (scores.softmax(0) * torch.tensor(values).double()).sum().item()
    assert result == pytest.approx(expected, rel=1e-5)
    starts = range(0, len(keys), tile)
    assert [(t["start"], t["stop"]) for t in trace] == [(s, min(s + tile, len(keys))) for s in starts]
    assert trace[-1]["hbm_floats"] == 1 + 2 * len(keys)


STATES = [dict(zip(page.WIDGET_CHOICES, v)) for v in itertools.product(*page.WIDGET_CHOICES.values())]


def test_every_widget_state_tells_the_truth():
    limit = page.facts()["exp_limit"]
    for params in STATES:
        trace = page.simulate(params)
        json.dumps(trace, allow_nan=False)
        assert len(page.describe(trace).splitlines()) <= 15
        assert trace["hbm_floats"] == {"online": 18, "naive": 50}
        if params["subtract_max"]:
            # Forgetting to rescale is invisible exactly if the maximum never grows after the first tile.
            assert (trace["verdict"] == "right") == (params["rescale"] or trace["growths"] == 0), params
        else:
            assert (trace["verdict"] == "right") == (trace["largest"] < limit[params["precision"]]), params


def test_a_scale_that_is_a_float_reads_like_the_default():
    trace = page.simulate(page.WIDGET_DEFAULT | {"scale": 16.0})
    assert page.describe(trace).startswith("scores 16 × increasing")


def test_widget_default_and_the_two_bugs():
    default = page.WIDGET_DEFAULT
    assert page.simulate(default)["result"] == pytest.approx(7.421, abs=5e-4)
    assert page.simulate(default | {"rescale": False})["result"] == pytest.approx(4.731, abs=5e-4)
    for rescale in (True, False):
        trace = page.simulate(default | {"order": "decreasing", "rescale": rescale})
        assert trace["result"] == pytest.approx(1.579, abs=5e-4) and trace["verdict"] == "right"
    assert page.simulate(default | {"scale": 16, "subtract_max": False})["result"] == "nan"


def test_simulation_runs_the_recurrence(monkeypatch):
    real = page.online_softmax
    monkeypatch.setattr(page, "online_softmax", lambda *a: real(*a[:4], False, *a[5:]))
    assert page.simulate(page.WIDGET_DEFAULT)["verdict"] == "wrong"


def test_the_flag_breaks_the_first_step(capsys):
    lesson.show_row("increasing", True)
    assert "luck" not in capsys.readouterr().out
    for order in lesson.ORDERS:
        if order == "decreasing":  # the bug that sorted data hides
            lesson.show_row(order, False)
            assert "By luck" in capsys.readouterr().out.splitlines()[-1]
        else:
            with pytest.raises(common.CheckFailed):
                lesson.show_row(order, False)
    args = lesson.build_parser().parse_args(["--no-rescale", "--order", "decreasing"])
    assert args.no_rescale and args.order == "decreasing"


def test_the_widgets_recurrence_is_the_lessons():
    """One in floats that are rounded one by one, one in tensors: the same state after each tile."""
    for params in STATES:
        if not (params["subtract_max"] and params["precision"] == "fp32"):
            continue
        trace = page.simulate(params)
        states, out, ref = lesson.one_row(params["order"], params["scale"], params["tile"], params["rescale"])
        assert len(states) == len(trace["tiles"]) + 1
        for state, tile in zip(states[1:], trace["tiles"], strict=True):
            assert state == pytest.approx(tuple(tile["after"].values()), rel=1e-6), params
        assert out.item() == pytest.approx(trace["result"], rel=1e-6)
        assert ref.item() == pytest.approx(trace["expected"], rel=1e-6)


def test_the_story_counts_what_the_page_quotes(capsys):
    lesson.show_deleted_line()
    told, survive = capsys.readouterr().out, page.facts()["survive"]["no_rescale"]
    assert f"{survive['total']} of {page.facts()['widget']['states']} tests pass" in told
    assert all(f"{survive[order]} of 20 {order}" in told for order in lesson.ORDERS)


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 3), st.integers(0, 2**31 - 1))
def test_folding_tiles_is_the_softmax(S, tile, M, seed):
    """Of scores that may be −∞, a whole tile of them too."""
    torch.manual_seed(seed)
    s, v = 50 * torch.randn(M, S), torch.randn(S, 4)
    s[torch.rand(M, S) < 0.3] = -math.inf
    m, l, o = torch.full((M,), -math.inf), torch.zeros(M), torch.zeros(M, 4)
    for tile_s, tile_v in zip(s.split(tile, dim=1), v.split(tile)):
        m, l, o = lesson.fold(m, l, o, tile_s, tile_v)
    assert_close(m + l.log(), s.double().logsumexp(dim=1), torch.float32)
    seen = l > 0
    assert torch.equal(seen, (s > -math.inf).any(dim=1)) and not o[~seen].any()
    assert_close(o[seen] / l[seen, None], s[seen].double().softmax(dim=1) @ v.double())


# --- Reference, tiled form, counters --------------------------------------------------------------------------------


def test_reference_is_the_textbook():
    q, k, v = random_qkv(Batch.of([5], [9]), 4, 2, 16, torch.float64)
    textbook = registry.lesson("01_kv_cache").causal_attention(q, k, v)
    assert torch.equal(lesson.naive_attention(q, k, v)[0], textbook) or assert_close(
        lesson.naive_attention(q, k, v)[0].float(), textbook
    )
    x, y, z = (t.transpose(0, 1)[None] for t in (q, k, v))
    sdpa = F.scaled_dot_product_attention(x, y, z, enable_gqa=True)[0].transpose(0, 1)
    assert_close(lesson.naive_attention(q, k, v, causal=False)[0].float(), sdpa)


def test_what_is_visible_against_the_definition():
    """All scores are equal and each value is a key's own unit vector: a row of the output says which keys it saw."""
    for T, S, causal, window in itertools.product((1, 3, 6), (2, 6), (True, False), (None, 1, 2, 9)):
        q, k, v = torch.zeros(T, 1, S), torch.zeros(S, 1, S), torch.eye(S)[:, None]
        out, lse = lesson.naive_attention(q, k, v, causal, window)
        for i in range(T):
            position = i + S - T
            seen = [(j <= position or not causal) and (window is None or j > position - window) for j in range(S)]
            assert ((out[i, 0] > 0).tolist(), round(lse[0, i].exp().item(), 4)) == (seen, sum(seen))


@pytest.mark.parametrize("mask", MASKS, ids=mask_ids)
@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 40), (15, 33), (33, 33), (50, 20)])
def test_tiled_attention(mask, T, S):
    q, k, v = random_qkv(Batch.of([T], [S]), 4, 2, 16, torch.float32)
    out, lse = page.tiled_attention(q, k, v, block_m=16, block_n=8, **mask)
    ref, ref_lse = lesson.naive_attention(q.double(), k.double(), v.double(), **mask)
    assert_close(out, ref)
    assert_close(lse, ref_lse)


@pytest.mark.parametrize("window", [1, 5, 20])
def test_a_window_without_causality_looks_ahead(window, device):
    """`visible` says so: a window alone hides what lies behind, and nothing ahead."""
    batch = Batch.of([50], [60])
    q, k, v = random_qkv(batch, 4, 2, 64, torch.float32)
    ref = reference(q, k, v, batch, False, window)[0]
    assert_close(page.tiled_attention(q, k, v, False, window, block_m=16, block_n=8)[0], ref)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("T", "D", "block_m"), [(128, 64, 128), (256, 16, 64), (192, 32, 64), (100, 16, 128)])
def test_counters_agree_with_the_formulas(T, D, block_m, causal):
    q, k, v = random_qkv(Batch.of([T]), 2, 2, D, torch.float32)
    formula = lesson.hbm_floats(T, D, block_m, causal)
    ref = lesson.naive_attention(q, k, v, causal)[0]
    for name, attention in (
        ("naive", page.counted_naive),
        ("tiled", lambda *a, hbm: page.tiled_attention(*a, block_m=block_m, block_n=4, hbm=hbm)[0]),
    ):
        hbm = page.HBM()
        assert_close(attention(q, k, v, causal, hbm=hbm), ref)
        assert hbm.floats == 2 * formula[name], name
    # One tile of queries has every key and value read once: the two fused counts meet.
    alone = lesson.hbm_floats(T, D, T, causal)
    assert alone["tiled"] == alone["once"]


def test_flops_count_the_visible_pairs():
    for T, S, causal in ((7, 7, True), (3, 9, True), (3, 9, False)):
        pairs = sum(j <= i + S - T or not causal for i in range(T) for j in range(S))
        assert page.attention_flops(T, S, 5, 16, causal) == pairs * 2 * 2 * 16 * 5


# --- The kernel -----------------------------------------------------------------------------------------------------

# query lengths, key lengths: 1, a tile − 1, a tile, a tile + 1, odd totals, contexts, an empty prompt, nothing to see
BATCHES = [
    ([1], [1]),
    ([15, 16, 17], [15, 16, 17]),
    ([33], [33]),
    ([1, 1, 1], [1, 31, 40]),
    ([5, 18], [40, 49]),
    ([2, 0, 3], [7, 3, 3]),
    ([20, 1], [3, 0]),
]


@pytest.mark.parametrize("mask", MASKS, ids=mask_ids)
@pytest.mark.parametrize("lens", BATCHES, ids=str)
def test_kernel_at_awkward_sizes(kernels, guarded, device, monkeypatch, lens, mask):
    Hkv = 2 if mask == MASKS[0] else 1  # an order of heads has nothing to do with a mask
    check_kernel(guarded, monkeypatch, Batch.of(*lens), torch.float32, 2 * Hkv, Hkv, 16, SMALL, mask)


@pytest.mark.parametrize(("Hq", "Hkv", "D"), [(3, 1, 64), (2, 2, 80), (1, 1, 128), (1, 1, 256)])
def test_kernel_dtypes_and_head_sizes(kernels, guarded, device, monkeypatch, dtype, Hq, Hkv, D):
    batch = Batch.of([18, 3], [18, 35])
    check_kernel(guarded, monkeypatch, batch, dtype, Hq, Hkv, D, SMALL, {"causal": True})


def test_kernel_with_16_bits_as_they_are(kernels, guarded, device, monkeypatch, half):
    check_kernel(guarded, monkeypatch, Batch.of([18, 3], [18, 35]), half, 3, 1, 64, SMALL, {"causal": True})


def test_kernel_at_its_default_tiles(kernels, guarded, device, monkeypatch, dtype):
    batch = Batch.of([140, 1], [140, 70])
    check_kernel(guarded, monkeypatch, batch, dtype, 2, 1, 64, None, {"causal": True})


TILES = (SMALL, (32, 16, 4, 1, 0), (16, 32, 4, 2, 0), (64, 32, 4, 2, 0))
# Of all 288 combinations a third, in which any three of the four things meet in every way; and of these a third, in
# which any two do.
SIZES = (16, 48, 64, 80, 128, 256)
TOGETHER = [
    pytest.param((torch.float32, torch.float16, torch.bfloat16)[i % 3], D, TILES[t], MASKS[m],
                 id=f"{('fp32', 'fp16', 'bf16')[i % 3]}-{D}-{TILES[t][0]}x{TILES[t][1]}-{mask_ids[m]}",
                 marks=pytest.mark.slow if 29 * i % 36 < 12 else pytest.mark.long)
    for i, (D, t, m) in enumerate(itertools.product(SIZES, range(4), range(4)))
]  # fmt: skip


def test_any_two_things_meet_in_the_slow_tier():
    slow = [param.values for param in TOGETHER if pytest.mark.slow.mark in [mark.mark for mark in param.marks]]
    for i, j in itertools.combinations(range(4), 2):
        pairs = {(str(values[i]), str(values[j])) for values in slow}
        assert pairs == {(str(param.values[i]), str(param.values[j])) for param in TOGETHER}
    assert len(slow) <= len(TOGETHER) / 2


@pytest.mark.parametrize(("dtype", "D", "tiles", "mask"), TOGETHER)
def test_kernel_thoroughly(kernels, guarded, device, monkeypatch, dtype, D, tiles, mask):
    batch = Batch.of([70, 1, 16, 31], [70, 90, 65, 31])
    check_kernel(guarded, monkeypatch, batch, dtype, 4, 2, D, tiles, mask)


def check_kernel(guarded, monkeypatch, batch, dtype, Hq, Hkv, D, tiles, mask):
    """Inputs and outputs lie between NaNs: what is read or written out of bounds shows."""
    q, k, v = (guarded(x) for x in random_qkv(batch, Hq, Hkv, D, dtype))
    ref, ref_lse = reference(q, k, v, batch, **mask)
    monkeypatch.setattr(lesson, "torch", GuardedTorch(guarded))
    out, lse = lesson.flash_attention(q, k, v, *batch, tiles=tiles, **mask)
    assert out.shape == q.shape and out.dtype == dtype and lse.shape == (Hq, len(q))
    assert_close(out, ref)
    assert_close(lse, ref_lse)


class GuardedTorch:
    """torch, except that `empty` allocates between guard values."""

    def __init__(self, guarded):
        self.empty = lambda *shape, dtype, device: guarded(shape, dtype)

    def __getattr__(self, name):
        return getattr(torch, name)


def test_kernel_takes_views_of_a_packed_projection(kernels, device):
    """The model hands over slices of one qkv matrix: rows are far apart, and heads are not where D says."""
    batch = Batch.of([20, 7])
    qkv = torch.randn(27, 2 + 1 + 1, 32, device=device)
    q, k, v = qkv[:, :2], qkv[:, 2:3], qkv[:, 3:]
    out, lse = lesson.flash_attention(q, k, v, *batch, tiles=SMALL)
    ref, ref_lse = reference(q, k, v, batch)
    assert_close(out, ref)
    assert_close(lse, ref_lse)
    # Rows that begin at odd addresses cannot be described to TMA: they are copied first.
    odd = torch.randn(27 * 33 + 1, device=device)[1:].view(27, 1, 33)[..., :32]
    assert lesson.aligned(odd).data_ptr() != odd.data_ptr() and lesson.aligned(k).data_ptr() == k.data_ptr()
    out, _ = lesson.flash_attention(q, odd, v, *batch, tiles=SMALL)
    assert_close(out, reference(q, odd, v, batch)[0])
    # Contiguous, and yet not where TMA wants them: `contiguous` returns such a tensor as it is.
    for wrong in (torch.randn(27 * 32 + 1)[1:].view(27, 1, 32), torch.randn(192).as_strided((1, 3, 64), (1, 64, 1))):
        assert wrong.is_contiguous()
        right = lesson.aligned(wrong)
        assert right.data_ptr() % 16 == 0 and right.stride(0) % 4 == 0 == right.stride(1) % 4 and right.equal(wrong)


def test_scale_reaches_scores_and_lse(kernels, device):
    batch = Batch.of([20])
    q, k, v = random_qkv(batch, 2, 1, 16, torch.float32)
    out, lse = lesson.flash_attention(q, k, v, *batch, scale=0.7, tiles=SMALL)
    ref, ref_lse = reference(q, k, v, batch, scale=0.7)
    assert_close(out, ref)
    assert_close(lse, ref_lse)


def test_one_sequence_never_reads_another(kernels, device):
    """The neighbours are NaN: a key or value too many would turn everything into NaN."""
    batch = Batch.of([5, 18, 4], [9, 35, 6])
    q, k, v = random_qkv(batch, 2, 1, 16, torch.float32)
    ref, ref_lse = reference(q, k, v, batch)
    for x in (k, v):
        x[:9], x[44:] = math.nan, math.nan
    for mask in ({}, {"causal": False}):
        ref, ref_lse = reference(q, k, v, batch, **mask)
        out, lse = lesson.flash_attention(q, k, v, *batch, tiles=SMALL, **mask)
        assert_close(out[5:23], ref[5:23])
        assert_close(lse[:, 5:23], ref_lse[:, 5:23])
        assert not out[5:23].isnan().any() and out[:5].isnan().all()


@pytest.mark.parametrize("mask", [{}, {"window": 16}, {"window": 17}], ids=["causal", "window16", "window17"])
def test_tiles_of_keys_that_no_query_sees_are_skipped(kernels, device, mask):
    """Values there are NaN, and a weight of 0 would not hide them: this work, half of it or more, is not done."""
    batch = Batch.of([64])
    q, k, v = random_qkv(batch, 1, 1, 16, torch.float32)
    ref, _ = reference(q, k, v, batch, **mask)
    for first in range(0, 64, SMALL[0]):
        values, end = v.clone(), first + SMALL[0]
        values[end:] = math.nan
        if mask:
            values[: max(0, first + 1 - mask["window"]) // SMALL[1] * SMALL[1]] = math.nan
        out, _ = lesson.flash_attention(q, k, values, *batch, tiles=SMALL, **mask)
        assert_close(out[first:end], ref[first:end])


def test_a_window_wider_than_the_prompt(kernels, device):
    batch = Batch.of([33])
    q, k, v = random_qkv(batch, 1, 1, 16, torch.float32)
    out, _ = lesson.flash_attention(q, k, v, *batch, window=100, tiles=SMALL)
    assert_close(out, reference(q, k, v, batch)[0])


def test_addresses_exceed_31_bits(kernels, apart):
    batch = Batch.of([1, 1, 1])
    q, k, v = map(apart, random_qkv(batch, 1, 1, 16, torch.float16))
    out, lse = lesson.flash_attention(q, k, v, *batch, tiles=SMALL)
    ref, ref_lse = reference(q, k, v, batch)
    assert_close(out, ref)
    assert_close(lse, ref_lse, torch.float16)


def test_rows_behind_the_last_sequence_are_left_alone(kernels, device, monkeypatch, guarded):
    batch = Batch.of([5, 3])
    q, k, v = random_qkv(Batch.of([12]), 2, 1, 16, torch.float32)
    monkeypatch.setattr(lesson, "torch", GuardedTorch(guarded))
    out, lse = lesson.flash_attention(q, k, v, *batch, tiles=SMALL)
    assert out[8:].isnan().all() and lse[:, 8:].isnan().all() and not out[:8].isnan().any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of 0 · −inf and of rows that see nothing
@pytest.mark.parametrize("native", [True, False], ids=["kernel", "torch"])
def test_extreme_scores(device, native):
    """Scores of ±9,000, of −150 and of −inf, in the first tile, in a later one, everywhere."""
    if native and not common.HAS_TRITON:
        pytest.skip("no Triton wheel on this platform")
    S, D = 40, 16
    q, v = torch.zeros(1, 1, D, device=device), torch.randn(S, 1, D, device=device)
    q[..., 0] = 4  # scale 1/4: the score of a key is its first component
    batch = Batch.of([1], [S])
    scores = torch.randint(-9, 9, (S,), device=device).float()
    cases = {
        "large": scores * 1000,
        "far below": scores - 150,  # exp(−150) is 0 in fp32
        "first tiles -inf": scores.clone().index_fill_(0, torch.arange(33, device=device), -math.inf),
        "last tile -inf": scores.clone().index_fill_(0, torch.arange(30, S, device=device), -math.inf),
        "one key": torch.full((S,), -math.inf, device=device).index_fill_(0, torch.tensor([17], device=device), -5.0),
        "nothing": torch.full((S,), -math.inf, device=device),
    }
    for name, row in cases.items():
        k = torch.zeros(S, 1, D, device=device)
        k[:, 0, 0] = row
        if native:
            with common.use_kernels():
                out, lse = lesson.flash_attention(q, k, v, *batch, tiles=SMALL)
        else:
            out, lse = lesson.flash_attention(q, k, v, *batch)
        weights = row.double().softmax(0).nan_to_num(0)
        assert_close(out[0, 0], weights @ v[:, 0].double())
        assert lse.item() == pytest.approx(row.double().logsumexp(0).item(), rel=1e-6), name


def test_lse_merges_two_halves(kernels, device):
    """What split-KV, cascades and chunked contexts rely on: o = Σ_i exp(lse_i − lse) o_i."""
    q, k, v = random_qkv(Batch.of([18], [50]), 2, 1, 16, torch.float32)
    parts = [
        lesson.flash_attention(q, k[a:b], v[a:b], *Batch.of([18], [b - a]), causal=False, tiles=SMALL)
        for a, b in ((0, 21), (21, 50))
    ]
    whole, whole_lse = reference(q, k, v, Batch.of([18], [50]), causal=False)
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    assert_close(lse, whole_lse)
    merged = sum((part_lse - lse).exp().T[..., None] * out for out, part_lse in parts)
    assert_close(merged, whole)


def test_any_order_of_programs_covers_everything(kernels, device, monkeypatch):
    batch = Batch.of([5, 20])
    q, k, v = random_qkv(batch, 8, 4, 16, torch.float32)
    ref, ref_lse = reference(q, k, v, batch)
    for group in (2, 4, 8):
        monkeypatch.setattr(lesson, "heads_per_group", lambda *a, g=group: g)
        out, lse = lesson.flash_attention(q, k, v, *batch, tiles=SMALL)
        assert_close(out, ref)
        assert_close(lse, ref_lse)


def test_heavy_programs_start_first(kernels):
    """A causal program near the end of its sequence has the most keys to read, and must not start last."""
    from support import races  # it needs Triton

    batch = Batch.of([112])
    q, k, v = random_qkv(batch, 2, 1, 16, torch.float32)
    read = races.elements_read(lambda: lesson.flash_attention(q, k, v, *batch, tiles=SMALL))
    assert len(read) == 2 * 7 and read == sorted(read, reverse=True) and read[0] > 4 * read[-1]


def test_the_grid(device):
    """One program per tile, head and sequence; heads form groups whose keys and values fit L2."""
    q = torch.empty(512, 8, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(512, 4, 64, dtype=torch.bfloat16, device="meta")
    loc = torch.empty(3, dtype=torch.int32, device="meta")
    with common.captured() as launches:
        lesson.flash_attention(q, k, k, loc, loc, 256, 256)
    (launch,) = launches
    assert launch.grid == (2 * 8 * 2,)
    assert lesson.heads_per_group(32, 8, 1 << 20) == 32  # all keys and values fit
    assert lesson.heads_per_group(32, 8, 16 << 20) == 8  # two KV heads of 16 MiB, and their four query heads each
    assert lesson.heads_per_group(9, 3, 14 << 20) == 3  # two would fit, but three heads do not come in twos
    assert lesson.heads_per_group(16, 16, 1 << 40) == 1


# --- The torch path -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS, ids=mask_ids)
@pytest.mark.parametrize("lens", BATCHES, ids=str)
def test_torch_path_is_the_kernels_twin(lens, mask, dtype):
    batch = Batch(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in Batch.of(*lens)))
    q, k, v = (x.cpu() for x in random_qkv(batch, 4, 2, 16, dtype))
    before = lesson.flash_attention_kernel.launches
    out, lse = lesson.flash_attention(q, k, v, *batch, **mask)
    ref, ref_lse = reference(q, k, v, batch, **mask)
    assert lesson.flash_attention_kernel.launches == before and out.dtype == dtype
    assert_close(out, ref)
    assert_close(lse, ref_lse, dtype)


def test_no_queries_or_no_keys(device):
    for query_lens, seq_lens in (([0], [3]), ([2], [0]), ([0, 0], [0, 0])):
        batch = Batch.of(query_lens, seq_lens)
        q, k, v = random_qkv(batch, 2, 1, 16, torch.float32)
        out, lse = lesson.flash_attention(q, k, v, *batch)
        assert out.shape == q.shape and not out.any() and (lse == -math.inf).all()


def test_wrong_arguments_are_named():
    q, k, v = random_qkv(Batch.of([4]), 4, 2, 16, torch.float32)
    batch = Batch.of([4])
    for match, args, options in (
        ("head size 24", (torch.zeros(4, 4, 24), torch.zeros(4, 2, 24), torch.zeros(4, 2, 24)), {}),
        ("head size 512", (torch.zeros(4, 4, 512), torch.zeros(4, 2, 512), torch.zeros(4, 2, 512)), {}),
        ("do not go together", (q, k.half(), v.half()), {}),
        ("do not go together", (q[:, :3], k, v), {}),
        ("do not go together", (q, k, v[:2]), {}),
        ("window 0", (q, k, v), {"window": 0}),
        ("window 4", (q, k, v), {"window": 4, "causal": False}),
        ("scale", (q, k, v), {"scale": -1.0}),
    ):
        with pytest.raises(ValueError, match=match):
            lesson.flash_attention(*args, *batch, **options)


# --- The model ------------------------------------------------------------------------------------------------------


def naive(q, k, v, lens):
    return lesson.packed_reference(q, k, v, lens, lens)[0]


def through_kernel(q, k, v, lens):
    return lesson.flash_attention(q, k, v, *lesson.packed(lens, lens))[0]


def test_model_prefill_runs_the_kernel(kernels, tiny_model):
    prompts = [[3, 14, 15, 92, 65], [35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19, 71, 69, 39]]
    before = lesson.flash_attention_kernel.launches
    logits = lesson.prefill(tiny_model, prompts, through_kernel)
    assert lesson.flash_attention_kernel.launches - before == tiny_model.config.num_hidden_layers
    assert_close(logits, lesson.prefill(tiny_model, prompts, naive))
    alone = torch.cat([lesson.prefill(tiny_model, [prompt], naive) for prompt in prompts])
    assert_close(logits, alone)


def test_real_model_prefill(kernels, real_model):
    model, tokenizer = real_model
    prompts = [tokenizer.encode("The capital of France is"), tokenizer.encode("Water freezes at zero")]
    ref = lesson.prefill(model, prompts, naive)
    logits = lesson.prefill(model, prompts, through_kernel)
    assert_close(logits, ref)
    assert logits.argmax(-1).tolist() == ref.argmax(-1).tolist()
    assert tokenizer.decode([int(ref[0].argmax())]).strip() == "Paris"


# --- Beside other kernels -------------------------------------------------------------------------------------------


def test_pytorchs_fused_kernel_computes_the_same():
    q, k, v = (x.cpu() for x in random_qkv(Batch.of([40]), 9, 3, 64, torch.float32))
    assert_close(page.torch_fused(q, k, v), lesson.naive_attention(q.double(), k.double(), v.double())[0])


def test_what_a_package_that_is_not_here_would_be_called_with(monkeypatch):
    """flash-attn is seldom installed where there is no GPU."""
    batch, calls = Batch.of([4], [9]), []
    q, k, v = random_qkv(batch, 4, 2, 64, torch.float32)
    fake = SimpleNamespace(flash_attn_varlen_func=lambda *a, **kw: calls.append((a, kw)))
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    page.run_flash_attn(q, k, v, batch, True, 6)
    page.run_flash_attn(q, k, v, batch, False)
    assert calls[0][0] == (q, k, v, *batch)
    assert [kw for _, kw in calls] == [
        {"causal": True, "window_size": (5, -1)}, {"causal": False, "window_size": (-1, -1)}
    ]  # fmt: skip


def test_the_engines_kernel_is_shown_beside_this_one(monkeypatch, capsys):
    """On a Hopper GPU; here it is pretended, at 64 tokens. Elsewhere the step says why it is skipped."""
    calls, seconds = [], iter((4e-9, 1e-9))

    def attention(q, k, v, *batch, tiles):
        calls.append(tiles)
        return lesson.naive_attention(q, k, v)

    monkeypatch.setattr(lesson, "nvidia_capability", lambda: None)
    lesson.show_hopper()
    assert "SKIPPED engine/attention/hopper.py beside this kernel: it takes a Hopper GPU" in capsys.readouterr().out
    monkeypatch.setattr(lesson, "nvidia_capability", lambda: (9, 0))
    monkeypatch.setattr(lesson, "flash_attention", attention)
    monkeypatch.setattr(timing, "measure", lambda fn: timing.Timing(next(seconds), 0, 0))
    lesson.show_hopper(64)
    assert calls == [lesson.choose_tiles(torch.bfloat16, 128, None, (9, 0)), None]
    rate = page.attention_flops(64, 64, 16, 128, False) / 2 / 1e-9 / 1e12
    told = capsys.readouterr().out
    assert f"warps that take turns: {rate:.0f} TFLOP/s" in told and "✓ the same, 4.00 times as fast" in told


@needs.hopper
def test_side_by_side_on_hopper(capsys):
    lesson.show_hopper()
    assert "✓ the same" in capsys.readouterr().out


# --- Compiled for Hopper --------------------------------------------------------------------------------------------

COMPILE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import compile_kernels as ck, common, torch
from engine import registry
lesson, rows = registry.lesson("03_flash_attention"), []
for target, capability, D, options in json.loads(sys.argv[2]):
    q = torch.empty(1024, 32, D, dtype=torch.bfloat16, device="meta")
    k = torch.empty(4096, 8, D, dtype=torch.bfloat16, device="meta")
    loc = torch.empty(3, dtype=torch.int32, device="meta")
    tiles = lesson.choose_tiles(q.dtype, D, options.get("window"), capability and tuple(capability))
    with common.captured() as launches:
        lesson.flash_attention(q, k, k, loc, loc, 512, 2048, tiles=tiles, **options)
    compiled = ck.compile_launch(launches[0], ck.TARGETS[target])
    ptx = compiled.asm.get("ptx", "")
    rows.append({"spills": ck.resources(compiled, ck.TARGETS[target])["spills"], "shared": compiled.metadata.shared,
                 "wgmma": "wgmma.mma_async" in ptx, "tma": "cp.async.bulk.tensor" in ptx})
print(json.dumps(rows))
"""
KIB = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "gfx942": 64}  # shared memory that one program may have


def compile_job(*cases):
    return ("tiles", *map(str, cases)), [sys.executable, "-c", COMPILE, common.ROOT / "tests", json.dumps(cases)]


def check_compiled(*cases):
    done = scripts.get(compile_job(*cases))
    assert done.returncode == 0, done.stderr[-2000:]
    for case, row in zip(cases, json.loads(done.stdout.splitlines()[-1])):
        assert row["spills"] == 0 and row["shared"] <= KIB[case[0]] * 1024, (case, row)
        if case[0] == "sm_90":
            assert row["wgmma"] and row["tma"], case


@needs.triton
@pytest.mark.long
def test_all_tiles_fit():
    options = ({}, {"causal": False}, {"window": 1024})
    for target, capability in {"sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0), "gfx942": None}.items():
        check_compiled(*((target, capability, D, o) for D in (64, 128, 256) for o in options))
