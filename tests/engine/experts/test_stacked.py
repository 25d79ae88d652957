"""Experts on a CPU: what the loop says, and whoever is not asked is not read."""

from __future__ import annotations

import pytest
import torch

from support import mixtures
from support.close import assert_close


@pytest.mark.parametrize("about", [{}, {"bias": True}, {"bias": True, "activation": "swiglu_oai"}], ids=str)
@pytest.mark.parametrize(("T", "k"), [(1, 1), (1, 4), (7, 2), (40, 3), (0, 2)])
def test_what_the_loop_says(T, k, about):
    these, x = mixtures.experts(5, 24, 16, **about), torch.randn(T, 24)
    weights, ids = mixtures.choice(T, 5, k)
    out = these(x, weights, ids)
    assert out.shape == x.shape
    if T:
        assert_close(out, mixtures.naive(x, weights, ids, these))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_in_16_bits(low):
    these, x = mixtures.experts(5, 24, 16, dtype=low), torch.randn(20, 24).to(low)
    weights, ids = mixtures.choice(20, 5, 3)
    out = these(x, weights, ids)
    assert out.dtype == low
    assert_close(out, mixtures.naive(x, weights, ids, these))


def test_an_expert_that_nobody_asks_is_not_read():
    these, x = mixtures.experts(6, 24, 16), torch.randn(4, 24)
    ids = torch.tensor([[0, 3], [3, 5], [0, 5], [3, 0]])
    for part in (these.gate_up, these.down):
        part[[1, 2, 4]] = float("nan")
    asked = []
    one, these.one = these.one, lambda i, x: (asked.append((i, len(x))), one(i, x))[1]
    assert these(x, torch.rand(4, 2), ids).isfinite().all()
    assert asked == [(0, 3), (3, 3), (5, 2)], "each once, with all of its tokens"


def test_an_answer_does_not_depend_on_who_else_asks():
    """A token's answers are added in its own order, so only the products' shapes may round differently."""
    these, x = mixtures.experts(6, 24, 16), torch.randn(40, 24)
    weights, ids = mixtures.choice(40, 6, 3)
    alone = torch.cat([these(x[t : t + 1], weights[t : t + 1], ids[t : t + 1]) for t in range(40)])
    assert_close(these(x, weights, ids), alone)


def test_parts_add_up():
    """Experts elsewhere count as nothing here: what two ranks say adds up to what one does."""
    x, (weights, ids) = torch.randn(9, 24), mixtures.choice(9, 6, 2)
    parts = [mixtures.experts(6, 24, 16, held=held)(x, weights, ids) for held in (range(0, 2), range(2, 6))]
    assert_close(sum(parts), mixtures.experts(6, 24, 16)(x, weights, ids))
