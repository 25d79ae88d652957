"""Drafts one step ahead: how a step is planned when not even the number of this one's tokens is known.

Async scheduling (lesson 05) plans step i + 1 while step i runs: it needs to know *that* a token will come, not which.
With drafts it does not even know how many will come, 1 to K + 1, and nobody has guessed the next ones yet. Two bets
and two corrections (vLLM: `AsyncScheduler`, its default with trained drafters):

  1. The plan counts on every draft: all K of the step that runs will stand. So blocks suffice, however it turns out.
  2. It reserves K places for drafts that nobody has made. The worker fills them; a place left empty counts as fallen.
  3. The worker knows at once how many stood, and computes each row where it belongs, not where the plan put it.
  4. The scheduler hears a step later, and takes what fell back from its own count.

What it costs: blocks and budget for drafts that will not be there, and a step in vain whenever accepted drafts reach
the end of an answer sooner than the plan could be sure of.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

from collections.abc import Callable, Sequence
from typing import Any

import llama
from engine.config import VllmConfig
from engine.spec_decode.drafters import SpeculativeConfig
from engine.spec_decode.drafters import make_drafter
from engine.worker.assemble import make_runner
from engine.worker.model_runner import ModelRunner
from engine.config import SchedulerConfig
from engine.core.scheduler import make_scheduler
from engine.request import Request, SamplingParams

optimizations = common.lesson("05_optimizations")


def make_loop(kind: str, model: llama.Llama, num_speculative_tokens: int, max_model_len: int,
              drafter: Callable[..., Any] = make_drafter,
              overhead: float = 0.0) -> tuple[optimizations.QueuedEngineCore, ModelRunner]:  # fmt: skip
    """One of lesson 05's loops, eight seats, and what it runs; `overhead` is 05's, `drafter(config, model)` is 07's."""
    blocks = 8 * -(-max_model_len // optimizations.BLOCK) + 1
    config = SpeculativeConfig(num_speculative_tokens=num_speculative_tokens)
    limits = SchedulerConfig(max_model_len=max_model_len, max_num_seqs=8)
    scheduler = make_scheduler(
        limits, blocks, optimizations.BLOCK, enable_prefix_caching=False, drafts=config, async_scheduling=True
    )

    about = VllmConfig(speculative_config=config, async_scheduling=True, plug={"drafter": drafter})
    runner = make_runner(model, limits, blocks, optimizations.BLOCK, about)
    return optimizations.QueuedEngineCore(kind, scheduler, optimizations.Worker(runner.execute_model), overhead), runner


def compare_loops(model: llama.Llama, prompts: Sequence[Sequence[int]], max_tokens: int, num_speculative_tokens: int,
                  drafter: Callable[..., Any] = make_drafter,
                  overhead: float = 0.0) -> dict[str, dict[str, Any]]:  # fmt: skip
    """The same greedy requests in step and one step ahead: {loop: their tokens, and what they took}."""
    # Beyond the longest answer there is room for drafts: the end of the context cuts none.
    longest, found = max(map(len, prompts)) + max_tokens + num_speculative_tokens + 1, {}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=model.config.eos_token_ids)
    for kind in ("synchronous", "async"):
        core, runner = make_loop(kind, model, num_speculative_tokens, longest, drafter, overhead)
        token_ids = core.run([Request(str(i), prompt, params) for i, prompt in enumerate(prompts)])
        found[kind] = {"token_ids": token_ids, "steps": len(core.worker.busy), "places": runner.drafts.num_places,
                       "drafts": runner.drafts.num_drafts, "in_vain": core.num_wasted, "idle": core.idle}  # fmt: skip
    return found


def demonstrate(model: llama.Llama, prompts: Sequence[Sequence[int]], expected: list[list[int]],
                num_speculative_tokens: int, drafter: Callable[..., Any]) -> None:  # fmt: skip
    """Print both loops side by side. Raises CheckFailed unless both write `expected`, as plain decoding does."""
    loops = compare_loops(model, prompts, max(map(len, expected)), num_speculative_tokens, drafter, overhead=0.005)
    common.table(["loop, 5 ms of other work per plan", "steps", "places", "drafts", "samples in vain", "model idle"], [
        [kind, *(loop[key] for key in ("steps", "places", "drafts", "in_vain")), f"{loop['idle']:.0%}"]
        for kind, loop in loops.items()
    ])  # fmt: skip
    common.check_equal("both wrote the tokens of plain greedy decoding", [x["token_ids"] for x in loops.values()],
                       [expected] * 2)  # fmt: skip
