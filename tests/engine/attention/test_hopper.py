"""Hopper's attention: its source on a CPU, with threads for groups of warps; its machine code; its numbers on a GPU."""

from __future__ import annotations

import common

import collections
import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import registry
from engine.attention import hopper
from lab import cli, recorded
from support import gluon_emulator, needs, scripts
from support.close import assert_close
from support.tiers import and_slowly

flash, page = registry.lesson("03_flash_attention"), cli.numbers("03_flash_attention")
PATH = Path(hopper.__file__)
# Queries of each sequence, keys of each.
BATCHES = {
    "whole": ((256, 128), (256, 128)),
    "odd": ((130, 1, 300, 70), (130, 1, 300, 70)),
    "behind a context": ((5, 200, 1), (500, 300, 64)),
    "long": ((129,), (1100,)),
    "more queries than keys": ((200, 20), (64, 150)),
}


def case(query_lens, seq_lens, D, dtype, Hq=4, Hkv=2):
    torch.manual_seed(0)
    batch = page.Batch.of(query_lens, seq_lens)
    return (*page.random_qkv(batch, Hq, Hkv, D, dtype), batch)


def emulate(module, q, k, v, batch, causal):
    """What the threads compute, on a CPU in any case."""
    (T, Hq, D), Hkv, device = q.shape, k.shape[1], q.device
    out, lse = torch.full((T, Hq, D), math.nan, dtype=q.dtype), torch.full((Hq, T), math.nan)
    q, k, v, *starts = (x.cpu() for x in (q, k, v, batch.query_start_loc, batch.seq_start_loc))
    module.warp_specialized_attention(q, k, v, *starts, batch.max_query_len, Hq // Hkv, causal, D**-0.5, out, lse)
    return out.to(device), lse.to(device)


@pytest.mark.parametrize("slow", and_slowly(["groups"], [("odd",), ("even",)]))
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("batch", BATCHES)
def test_groups_of_warps_compute_attention(batch, causal, slow):
    q, k, v, batch = case(*BATCHES[batch], 64, torch.bfloat16)
    out, lse = emulate(gluon_emulator.load(PATH, slow), q, k, v, batch, causal)
    ref, ref_lse = page.reference(q, k, v, batch, causal)
    assert_close(out, ref)
    assert_close(lse, ref_lse, torch.float32)


def with_a_bad_neighbour(S, D=64):
    """Two sequences; the second's keys and values are NaN."""
    q, k, v, batch = case((S, 70), (S, 70), D, torch.bfloat16)
    k[S:], v[S:] = math.nan, math.nan
    return q, k, v, batch


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("S", [40, 300])
def test_a_neighbour_cannot_leak_in(S, causal):
    q, k, v, batch = with_a_bad_neighbour(S)
    out, lse = emulate(gluon_emulator.load(PATH), q, k, v, batch, causal)
    ref, ref_lse = page.reference(q, k, v, batch, causal)
    assert_close(out[:S], ref[:S])
    assert_close(lse[:, :S], ref_lse[:, :S], torch.float32)


def test_scores_of_minus_infinity_weigh_nothing():
    q, k, v, batch = case((300,), (300,), 64, torch.bfloat16)
    out, lse = emulate(gluon_emulator.load(PATH), q * 0 + 1e20, k * 0 - 1e20, v, batch, False)
    assert not out.any() and (lse == -math.inf).all()


# One line changed, and who must be slow for it to show (odd loads are keys, even ones values): wrong numbers, a product
# too early, or nobody who comes.
CHANGES = {
    "values are not waited for": ("even", "mbarrier.wait(v_ready.index(before), (j - 1) // PLACES & 1)\n", "pass\n"),
    "keys are not waited for": ("odd", "mbarrier.wait(k_ready.index(place), j // PLACES & 1)\n", "pass\n"),
    "a place of keys is taken before it is free": ("groups", "mbarrier.wait(k_free.index(place), phase)\n", "pass\n"),
    "a place of values is taken before it is free": ("groups", "mbarrier.wait(v_free.index(place), phase)\n", "pass\n"),
    "a place is free when one group says so": ("groups", "init(v_free.index(i), 2)", "init(v_free.index(i), 1)"),
    "scores are not waited for": ("even", "mma_wait(1, deps=[s_token])", "mma_wait(2, deps=[s_token])"),
    "the product is not waited for": ("even", "wait(0, deps=[o_token, p,", "wait(1, deps=[o_token, p,"),
    "O is not rescaled": ("even", "acc * gl.convert_layout(alpha, gl.SliceLayout(1, OUT))[:, None]", "acc"),
    "keys count twice": ("even", "last = end - j * BLOCK_N - 1", "last = end - 1"),
    "a neighbour's values stay": ("even", "    if S < BLOCK_N:", "    if S < 0:"),
    "a neighbour's keys are read": ("even", "end = gl.minimum(S, first + BLOCK_M)", "end = first + BLOCK_M"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_wrong_is_seen(change, monkeypatch):
    monkeypatch.setattr(gluon_emulator, "PATIENCE", 1)
    slow, *texts = CHANGES[change]
    module = gluon_emulator.load(PATH, slow, tuple(texts))
    S = 0 if "neighbour" not in change else 40 if "values" in change else 300
    q, k, v, batch = with_a_bad_neighbour(S) if S else case((256, 70), (700, 400), 64, torch.bfloat16)
    ref = page.reference(q, k, v, batch)[0]
    rows = slice(0, S or None)
    with pytest.raises((AssertionError, TimeoutError)):
        assert_close(emulate(module, q, k, v, batch, True)[0][rows], ref[rows])


def test_what_fits():
    module = gluon_emulator.load(PATH)

    def fits(D=128, dtype=torch.bfloat16, longest=1024, window=None, q=None):
        k = torch.empty(8, 2, D, dtype=dtype)
        return module.fits(torch.empty(8, 4, D, dtype=dtype) if q is None else q, k, k, longest, window)

    assert fits() and fits(dtype=torch.float16) and fits(D=64, longest=4096)
    assert not fits(longest=1023) and not fits(D=64, longest=4095) and not fits(D=256, longest=1 << 20)
    assert not fits(window=5000) and not fits(dtype=torch.float32)
    packed = torch.empty(8, 8, 128, dtype=torch.bfloat16)
    assert fits(q=packed[:, :4]) and not fits(q=packed.transpose(0, 1)[:, :4])  # there a head's tokens are neighbours


def test_rows_of_a_packed_projection():
    """A head's rows lie where its stride says, and what is behind the last token is zero."""
    module = gluon_emulator.load(PATH)
    qkv = torch.randn(70, 8, 64).bfloat16()
    for x in (qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]):
        rows = module.describe_rows(x, 64)
        for head in range(x.shape[1]):
            for start in (0, 64):
                expected = torch.zeros(64, 64).bfloat16()
                expected[: len(x[start : start + 64])] = x[start : start + 64, head]
                assert torch.equal(rows.read(start, head * x.stride(1)), expected)


# --- Compiled for Hopper --------------------------------------------------------------------------------------------

COMPILE = """
import json, re, sys
sys.path.insert(0, sys.argv[1])
import compile_kernels as ck, common, torch, triton
from engine.attention import hopper
part, rows, target = hopper, [], ck.TARGETS["sm_90"]
triton.runtime.driver.set_active(ck.Driver(target))
kernel = part.warp_specialized_attention_kernel
class Compile:
    def __getitem__(self, grid):
        return lambda *args, **kwargs: setattr(self, "compiled", kernel.warmup(*args, grid=grid, **kwargs))
part.warp_specialized_attention_kernel = launch = Compile()
for D, causal, dtype in json.loads(sys.argv[2]):
    q, k = (torch.empty(2048, H, D, dtype=getattr(torch, dtype), device="meta") for H in (32, 8))
    loc = torch.empty(3, dtype=torch.int32, device="meta")
    part.warp_specialized_attention(q, k, k, loc, loc, 2048, 8, causal, 0.1, q, loc)
    compiled = launch.compiled
    line = r"^\\s+/\\*[0-9a-f]{4,}\\*/\\s+(?:@!?U?P\\w+ +)?([\\w.]+)([^;]*)"
    code = re.findall(line, ck.dump(compiled, "-sass"), re.M)
    rows.append({"shared": compiled.metadata.shared, "overwritten": ck.wgmma_races(compiled), "code": [
        f"{name} {rest.split(',')[-1].strip()}" if "DEPBAR" in name else name for name, rest in code],
        **ck.resources(compiled, target)})
print(json.dumps(rows))
"""


@needs.triton
@pytest.mark.slow
@pytest.mark.parametrize("cases", [[(128, True, "bfloat16"), (64, False, "float16")], pytest.param(
    [(128, False, "float16"), (64, True, "bfloat16")], marks=pytest.mark.long)])  # fmt: skip
def test_machine_code(cases):
    """Fits a multiprocessor, spills nothing that a loop needs, and takes exponentials while products run."""
    done = scripts.get(
        (("warps", str(cases)), [sys.executable, "-c", COMPILE, common.ROOT / "tests", json.dumps(cases)])
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for case_, row in zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True):
        code = row["code"]
        count = collections.Counter(x.partition(".")[0] for x in code)
        assert row["registers"] <= 168 and row["spills"] <= 8 and row["shared"] <= 227 * 1024 and not row["overwritten"]
        assert count["HGMMA"] and count["UTMALDG"] and count["USETMAXREG"] and count["STL"] <= 1, case_
        # Two waits follow each other: for the scores (one product may run on), then, after their exponentials, for it.
        waits = [(i, x) for i, x in enumerate(code) if "DEPBAR" in x]
        pairs = [(i, j) for (i, x), (j, y) in itertools.pairwise(waits) if x.endswith("0x1") and y.endswith("0x0")]
        assert len(pairs) == 4, (case_, waits)  # masked tiles and others, in two groups
        for i, j in pairs:
            assert sum(x.startswith("MUFU") for x in code[i:j]) >= 64, "the exponentials come after the wait"


# --- On a GPU -------------------------------------------------------------------------------------------------------


@needs.hopper
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_hopper(D, dtype):
    from engine.attention import hopper as part

    for lens, causal in itertools.product(BATCHES.values(), (True, False)):
        q, k, v, batch = case(*lens, D, dtype)
        out, lse = torch.full_like(q, math.nan), torch.full((q.shape[1], len(q)), math.nan, device=q.device)
        part.warp_specialized_attention(
            q, k, v, batch.query_start_loc, batch.seq_start_loc, batch.max_query_len, 2, causal, D**-0.5, out, lse
        )
        ref, ref_lse = page.reference(q, k, v, batch, causal)
        assert_close(out, ref)
        assert_close(lse, ref_lse, torch.float32)


@needs.hopper
@pytest.mark.parametrize("S", [40, 300])
def test_a_neighbour_on_hopper(S):
    from engine.attention import hopper as part

    q, k, v, batch = with_a_bad_neighbour(S, 128)
    out, lse = torch.full_like(q, math.nan), torch.full((q.shape[1], len(q)), math.nan, device=q.device)
    part.warp_specialized_attention(
        q, k, v, batch.query_start_loc, batch.seq_start_loc, batch.max_query_len, 2, True, 0.1, out, lse
    )
    assert_close(out[:S], page.reference(q, k, v, batch, scale=0.1)[0][:S])


@needs.hopper
@pytest.mark.parametrize("longest", [1023, 1100])
def test_long_prompts_take_it(longest, monkeypatch):
    part, taken = hopper, []
    attention = part.warp_specialized_attention
    monkeypatch.setattr(part, "warp_specialized_attention", lambda *args: taken.append(1) or attention(*args))
    q, k, v, batch = case((longest, 50), (longest, 400), 128, torch.bfloat16)
    assert_close(flash.flash_attention(q, k, v, *batch)[0], page.reference(q, k, v, batch)[0])
    assert bool(taken) == (longest >= 1024)


def test_what_a_programs_beginning_and_end_cost():
    """The page's figures: rows of one kernel on a line, microseconds a program on one of 132 multiprocessors against
    tiles of 128 keys. By least squares of relative errors, which stay below 3 %."""
    rows = [r for r in recorded.results("03_flash_attention", "h200")["bench"]["gpu"] if r["D"] == 128 and r["causal"]]
    rows = [r for r in rows if r["T"] >= 1024]  # below, the plain kernel runs
    tiles = np.array([(r["T"] / 128 + 1) / 2 for r in rows])
    found = {}
    for name in ("ours", "cudnn"):
        flops = [4 * r["T"] / 2 * 16384 * 2048 for r in rows]  # causal: half; Hq · D = 2,048
        programs = 16384 / 128 * 16
        us = np.array([f / r[name] / 1e6 / programs * 132 for f, r in zip(flops, rows, strict=True)])
        line, *_ = np.linalg.lstsq(np.stack((1 / us, tiles / us), 1), np.ones(len(rows)))
        assert abs((line[0] + line[1] * tiles) / us - 1).max() < 0.03
        found[name] = *line, us[-1]
    (ours, tile, whole), (cudnn, cudnn_tile, _) = found["ours"], found["cudnn"]
    assert (round(ours, 1), round(tile, 1), round(cudnn, 1), round(cudnn_tile, 1)) == (5.6, 1.8, 2.0, 2.0)
    assert round(whole) == 119 and round(rows[-1]["ours"] * whole / (whole - ours + cudnn)) == 613
