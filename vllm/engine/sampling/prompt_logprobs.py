"""Log probabilities of prompts: what the model expected at each position, scored chunk by chunk.

Owns the scores of prompts that are not whole yet; called by the model runner after each pass. It never samples.
vLLM: `vllm/v1/worker/gpu_model_runner.py:_get_prompt_logprobs_dict`.
"""

from __future__ import annotations

import common  # noqa: F401  it settles the device before torch is used

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch

from engine.request import Request
from engine.sampling.sampler import Logprob, Sampler

SCORED_ROWS = 256  # prompt tokens whose logits exist at a time: 48 MiB in fp32 with SmolLM2's vocabulary

Scores = list[dict[int, Logprob] | None]


class PromptScorer:
    """The row of token i holds what the model expects as token i + 1: log p(xᵢ₊₁ | x₀…xᵢ)."""

    def __init__(self) -> None:
        self.scored: dict[str, Scores] = {}  # of prompts, as far as they have come
        self.broken: set[str] = set()  # requests with a row of their prompt that is NaN, or infinite

    def add(self, request: Request) -> None:
        """A new request; most ask for nothing."""
        if request.sampling_params.prompt_logprobs is not None:
            self.scored[request.request_id] = [None]  # nothing predicts the first token

    def forget(self, request_ids: Iterable[str]) -> None:
        """They have ended."""
        for request_id in request_ids:
            self.scored.pop(request_id, None)
            self.broken.discard(request_id)

    @torch.inference_mode()
    def score(
        self,
        hidden: torch.Tensor,
        query_lens: Sequence[int],
        requests: Sequence[Request],
        logits_of: Callable[[torch.Tensor], torch.Tensor],
    ) -> dict[str, Scores]:
        """The scores of prompts that this step has completed, by request id; `hidden` [T, hidden] is the step's.

        A request that was preempted and computes its prompt again goes on where its list ends.
        """
        found: dict[str, Scores] = {}
        if not self.scored:
            return found
        for request, end in zip(requests, itertools.accumulate(query_lens)):
            scores = self.scored.get(request.request_id)
            wanted = request.sampling_params.prompt_logprobs
            if scores is None or wanted is None:
                continue
            computed, prompt = request.num_computed_tokens, request.prompt_token_ids
            first_row = end - computed  # where token 0 would be, were it in this step
            for i in range(len(scores) - 1, min(computed, len(prompt) - 1), SCORED_ROWS):
                targets = prompt[i + 1 : min(i + SCORED_ROWS, computed) + 1]
                rows = hidden[first_row + i : first_row + i + len(targets)]
                raw = logits_of(rows).float().log_softmax(1)
                if not raw.amax(1).isfinite().all():  # no score, and JSON has no number for it
                    self.broken.add(request.request_id)
                ids = torch.tensor(targets, device=raw.device)
                scores += Sampler.gather_logprobs(raw, ids, [wanted] * len(ids))
            if computed >= len(prompt):
                del self.scored[request.request_id]
                if request.request_id not in self.broken:
                    found[request.request_id] = scores
        return found
