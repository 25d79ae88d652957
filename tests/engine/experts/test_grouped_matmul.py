"""The kernels of experts: equal to the loop at every edge, and tables that say whose tile is whose."""

from __future__ import annotations

import common

import dataclasses

import pytest
import torch

from engine.experts import grouped_matmul
from engine.experts.grouped_matmul import align_block_size, choose_tiles, run_tiles
from engine.model import llama
from lab import naive as naive_lab
from support import mixtures
from support.close import assert_close


@pytest.mark.parametrize("block_m", [16, 32])
@pytest.mark.parametrize("held", [range(5), range(2, 4), range(4, 5)], ids=str)
@pytest.mark.parametrize(("T", "k"), [(1, 1), (3, 2), (50, 3)])
def test_every_pair_is_in_one_tile_of_its_expert(T, k, held, block_m):
    _, ids = mixtures.choice(T, 5, k)
    if T == 50:
        ids[:, 0] = 2  # and one expert has many
        ids[:, 1:] = ids[:, 1:].clamp(min=3)
    tiles, seen = align_block_size(ids, held, block_m), []
    assert tiles.table.dtype == torch.int32 and sorted(tiles.order.tolist()) == list(range(T * k))
    for expert, first, end in tiles.table.tolist():
        rows = tiles.order[first : min(first + block_m, end)].tolist() if expert >= 0 else []
        assert expert == -1 or rows, "no tile is empty but those that are none"
        assert all(ids.flatten()[pair] == held.start + expert for pair in rows)
        seen += rows
    assert sorted(seen) == [p for p, e in enumerate(ids.flatten().tolist()) if e in held]


CASES = {  # T, k, experts, H, I
    "one token": (1, 2, 4, 40, 24),
    "tails everywhere": (19, 3, 5, 40, 33),
    "more tiles than one": (40, 2, 3, 72, 48),
    "one expert": (3, 1, 1, 32, 64),
}


@pytest.mark.parametrize("about", [{}, {"bias": True, "activation": "swiglu_oai"}], ids=["silu", "gpt-oss"])
@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_loop(case, about, device, dtype, kernels):
    T, k, E, H, I = CASES[case]
    these = mixtures.experts(E, H, I, dtype=dtype, device=device, **about)
    x, (weights, ids) = torch.randn(T, H).to(device, dtype), mixtures.choice(T, E, k, device=device)
    before = [kernel.launches for kernel in (grouped_matmul.gate_up_kernel, grouped_matmul.down_kernel)]
    out = these(x, weights, ids)
    after = [kernel.launches for kernel in (grouped_matmul.gate_up_kernel, grouped_matmul.down_kernel)]
    assert [b - a for a, b in zip(before, after)] == [1, 1]
    assert_close(out, mixtures.naive(x, weights, ids, these))


@pytest.mark.parametrize("blocks", [(16, 16, 16), (32, 64, 32)], ids=str)
def test_tiles_of_any_size(blocks, device, kernels):
    """Far from zero, where a gate is cut; a part of the experts; rows of x that do not lie one behind the other."""
    held = range(1, 4)
    these = mixtures.experts(5, 56, 40, bias=True, activation="swiglu_oai", device=device, held=held)
    x, (weights, ids) = 9 * torch.randn(37, 112, device=device)[:, ::2], mixtures.choice(37, 5, 3, device=device)
    x = torch.cat((x, x), 1)[:, :56]
    block_m, *others = blocks
    out = run_tiles(x, weights, align_block_size(ids, held, block_m), these, tuple(others))
    assert_close(out, mixtures.naive(x, weights, ids, these))


def test_rows_of_a_wider_tensor(device, kernels):
    these, wide = mixtures.experts(4, 40, 24, device=device), torch.randn(6, 90, device=device)
    weights, ids = mixtures.choice(6, 4, 2, device=device)
    for x in (wide[:, 3:43], wide[:, :80:2]):
        assert_close(these(x, weights, ids), mixtures.naive(x, weights, ids, these))


@pytest.mark.parametrize("I", [24, 8])  # 8: a tile ends behind the ups, too
def test_nothing_is_read_behind_an_operand(I, device, kernels, guarded):
    these = mixtures.experts(3, 40, I, bias=True, device=device)
    parts = ("gate_up", "down", "gate_up_bias", "down_bias")
    these = dataclasses.replace(these, **{name: guarded(getattr(these, name)) for name in parts})
    x, (weights, ids) = guarded(torch.randn(5, 40, device=device)), mixtures.choice(5, 3, 2, device=device)
    tiles = align_block_size(ids, these.held, 16)
    tiles = tiles._replace(order=guarded(tiles.order), table=guarded(tiles.table))
    assert_close(run_tiles(x, guarded(weights), tiles, these, (32, 32)), mixtures.naive(x, weights, ids, these))


def test_a_model_runs_on_them(kernels):
    """The engine's own forward pass, both layers of it, and the same tokens."""
    model = llama.random_model(device=mixtures.CPU, **mixtures.MIXTURES["mixtral"])
    before = grouped_matmul.down_kernel.launches
    found = naive_lab.generate(model, [5, 9, 2], 2)
    assert grouped_matmul.down_kernel.launches - before == 2 * 2
    common._kernels_forced = False
    assert naive_lab.generate(model, [5, 9, 2], 2) == found


def test_tiles_are_as_high_as_an_expert_has_rows():
    assert choose_tiles(torch.bfloat16, 8, 128)[0] == 16 and choose_tiles(torch.bfloat16, 8 * 4096, 128)[0] == 64
    assert choose_tiles(torch.bfloat16, 8 * 500, 128)[0] == 32
