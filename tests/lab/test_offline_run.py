"""Prompts served to their end: the right tokens, and who takes turns with whom."""

from __future__ import annotations

import common

import types

import pytest
import torch

from engine.config import SchedulerConfig
from engine.core.scheduler import make_scheduler
from engine.model import llama
from engine.request import Request, SamplingParams
from lab import naive, offline_run
from lab.dry_run import DryRun

PROMPTS, OUTPUTS = [[5, 9, 3], [7] * 17, [1, 2] * 20, [4]], [9, 3, 6, 1]


def test_every_prompt_gets_what_it_gets_alone():
    model = llama.random_model(3)
    core = offline_run.make_core(model, num_blocks=40, max_model_len=64)
    served = offline_run.serve(core, PROMPTS, OUTPUTS)
    assert served.token_ids == [naive.generate(model, p, n) for p, n in zip(PROMPTS, OUTPUTS)]
    assert len(served.seconds) == max(OUTPUTS), "all are in the first step"
    assert served.tokens_per_second == pytest.approx(sum(OUTPUTS) / sum(served.seconds))
    assert core.scheduler.kv_cache_manager.block_pool.num_free_blocks == 39
    with pytest.raises(common.InputError, match="num_blocks"):
        offline_run.make_core(model, num_blocks=4, max_model_len=64)


def test_nothing_is_found_in_a_cache():
    """A second run of the same prompts costs as many tokens as the first."""
    core = offline_run.make_core(llama.random_model(3), num_blocks=40, max_model_len=64)
    for _ in range(2):
        core.add_request(Request("r", [1] * 40, SamplingParams(temperature=0, max_tokens=1)))
        assert core.scheduler.schedule().num_scheduled_tokens == {"r": 40}
        core.abort_requests(["r"])


def test_a_dry_run_decides_and_computes_nothing():
    core = DryRun(make_scheduler(SchedulerConfig(64, 2, 64), 30, 16, enable_prefix_caching=False))
    served = offline_run.serve(core, PROMPTS, OUTPUTS)
    assert served.token_ids == [[0] * n for n in OUTPUTS] and core.runner is None


def test_all_take_turns(monkeypatch, capsys):
    """Ours with each model, and a peer: the same prompts, three rounds, the median."""
    shape = dict(hidden_size=128, head_dim=32, num_attention_heads=4, intermediate_size=64)
    models = {"a": llama.random_model(seed=3), "b": llama.random_model(seed=3, dtype=torch.bfloat16, **shape)}
    served, asked = [], []

    def serve(core, prompts, outputs):
        assert all(len(p) == 128 and max(p) < 128 for p in prompts) and outputs == [64] * len(prompts)
        assert len({tuple(p) for p in prompts}) == len(prompts)
        served.append((len(prompts), core.runner.model.config.hidden_size))
        return types.SimpleNamespace(tokens_per_second=10.0 * len(served))

    monkeypatch.setattr(offline_run, "serve", serve)

    def ask(command, prompts, max_tokens):
        assert command == "generate" and max_tokens == 64
        asked.append(len(prompts))
        return {"seconds": len(asked)}

    monkeypatch.setattr(offline_run.time, "sleep", lambda seconds: None)
    rows = offline_run.measure_serving(models, {"theirs": ask})
    assert asked == [1] * 3 + [8] * 3 + [32] * 3 and rows[2] == {
        "method": "theirs", "tokens_s_1": 64 / 2, "tokens_s_8": 8 * 64 / 5, "tokens_s_32": 32 * 64 / 8}  # fmt: skip
    assert served == [(n, hidden) for n in (1, 8, 32) for _ in range(3) for hidden in (80, 128)]
    assert [rows[0][f"tokens_s_{n}"] for n in (1, 8, 32)] == [30, 90, 150] and rows[1]["tokens_s_32"] == 160
    assert "32 prompts" in capsys.readouterr().out
