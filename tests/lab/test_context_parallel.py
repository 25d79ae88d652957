"""Ranks that share a sequence's tokens attend as one that has them all, and keep nothing twice."""

from __future__ import annotations

import pytest
import torch

from engine.attention.torch_paged import attend_latents, plan_latents
from lab import context_parallel
from lab.experts import MODELS
from support.close import assert_close
from support.rank_threads import in_threads

V3 = MODELS["DeepSeek-V3"]
B, H, W, R = 3, 8, 24, 16


@pytest.mark.parametrize("S", [3, 37])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_shares_add_up_to_the_whole(n, S):
    """Of three tokens, one of four ranks has none. Each sends and gets what the arithmetic says."""
    q, latents = torch.randn(B, H, W), torch.randn(B, S, W)
    pages = torch.cat((torch.zeros(1, S, W), latents))  # a block for each sequence, behind the null block
    plan = plan_latents(torch.tensor([[1], [2], [3]]), [1] * B, torch.tensor([S] * B), pages.shape)
    want = attend_latents(q, pages, plan, 0.3)[..., :R]

    def rank(group):
        r = group.rank_in_group
        mine = q[:, r * H // n : (r + 1) * H // n], latents[:, r::n]
        return context_parallel.attend_to_shares(*mine, R, 0.3, group), group.take_counts()

    found = in_threads(n, rank)
    assert_close(torch.cat([out for out, _ in found], dim=1), want)
    for _, counts in found:
        gathered = {"calls": 2, "bytes": 4 * B * H * (W + n)}
        assert counts == (
            {"all_gather": gathered, "reduce_scatter": {"calls": 1, "bytes": 4 * B * H * R}} if n > 1 else {}
        )


def test_what_eight_gpus_hold():
    """Eight copies of 70,272 bytes become one. What travels is the same for any context, what is read is not."""
    found = context_parallel.facts()["deepseek_v3"]
    assert [found[f"dcp{n}"]["copies"] for n in (1, 2, 4, 8)] == [8, 4, 2, 1]
    assert found["dcp1"]["bytes_per_token"] == 70272 and found["dcp8"]["bytes_per_token"] == 8784
    assert found["dcp8"]["tokens_that_fit"] == pytest.approx(8 * found["dcp1"]["tokens_that_fit"], abs=8)
    assert found["dcp1"]["sent_mb_of_32"] == found["dcp1"]["sent_ms_of_32"] == 0
    assert found["dcp8"]["sent_mb_of_32"] == pytest.approx(
        61 * 32 * (128 * 576 * 2 + 8 * 128 * 4 + 128 * 512 * 2) * 7 / 8e6
    )
    saved = found["dcp1"]["read_ms_of_32_at_32k"] - found["dcp8"]["read_ms_of_32_at_32k"]
    assert saved > 5 * found["dcp8"]["sent_ms_of_32"], "at 32k tokens it is worth it, at 2k it is not"
    assert saved / 16 < found["dcp8"]["sent_ms_of_32"]
