"""What a request draws its next token from, in plain Python: obviously right, and slow.

Owns the reference that the sampler of batches is compared with; called by tour 04b, `enumeration.py` and tests. It
never draws. vLLM: `vllm/v1/sample/sampler.py`, whose documentation names the steps.
"""

from __future__ import annotations

import common  # noqa: F401  it settles the device before torch is used

import math
from collections.abc import Sequence

from engine.request import SamplingParams
from engine.sampling import token_rules
from engine.sampling.sampler import GREEDY


def reference_distribution(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    stop_token_ids: Sequence[int] = (),
) -> list[float]:
    """The probabilities that one request draws its next token from, step by step as vLLM's Sampler documents them."""
    z = token_rules.reference_allowed(logits, params, output, stop_token_ids)
    for token, bias in (params.logit_bias or {}).items():
        z[token] += bias
    for token in set(prompt) | set(output):
        z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
    for token in set(output):
        z[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    if params.temperature < GREEDY:
        best = z.index(max(z))
        return [float(token == best) for token in range(len(z))]
    z = [x / params.temperature for x in z]
    p = softmax(z)
    z = [x if q >= params.min_p * max(p) else -math.inf for x, q in zip(z, p)]
    if params.top_k > 0:
        kth = sorted(z, reverse=True)[min(params.top_k, len(z)) - 1]
        z = [x if x >= kth else -math.inf for x in z]
    p = softmax(z)

    def more_probable(x: float) -> float:
        return sum(q for y, q in zip(z, p) if y > x)

    return softmax([x if params.top_p == 1 or more_probable(x) < params.top_p else -math.inf for x in z])


def softmax(z: Sequence[float]) -> list[float]:
    """e^(x − max) over their sum."""
    weights = [math.exp(x - max(z)) for x in z]
    return [w / sum(weights) for w in weights]
