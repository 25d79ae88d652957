"""The router: which experts a token visits, and how much each one's word counts.

Owns the rule of every family; called by `layer` for each step's tokens. It never touches an expert. vLLM:
`vllm/model_executor/layers/fused_moe/router/`. Read: Shazeer et al. 2017; DeepSeek-AI 2024 (V3, groups and biases).
"""

from __future__ import annotations

import torch

from engine.experts.config import MoEConfig


def route(
    logits: torch.Tensor, config: MoEConfig, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` experts of each token, and their weights.

    softmax:  p = softmax(logits), w = p of the k largest; renormalized, w / Σ w. That is the softmax of the k chosen
              logits alone: whether it is taken before the choice or after it, as gpt-oss does, is the same numbers.
    sigmoid:  s = sigmoid(logits), each by itself; the choice is made by s + correction, the weights are s alone.
    groups:   a group's score is the sum of its two best, and without a correction its best (DeepSeek-V2); experts
              outside the `topk_group` best groups are no choice.

    Shapes: logits [T, E], correction [E] or None -> weights fp32 [T, k], ids int64 [T, k].
    """
    scores = logits.float().sigmoid() if config.scoring == "sigmoid" else logits.float().softmax(-1)
    choice = scores if correction is None else scores + correction
    if config.num_expert_group > 1:
        choice = choice.masked_fill(~_in_best_groups(choice, config, 1 if correction is None else 2), float("-inf"))
    ids = choice.topk(config.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if config.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * config.routed_scaling_factor, ids


def _in_best_groups(choice: torch.Tensor, config: MoEConfig, count: int) -> torch.Tensor:
    """Whether each expert's group is one of a token's best, by its `count` best. choice [T, E] -> bool [T, E]."""
    groups = choice.unflatten(1, (config.num_expert_group, -1))  # [T, groups, experts of a group]
    best = groups.topk(count, dim=-1).values.sum(-1).topk(config.topk_group, dim=-1).indices  # [T, topk_group]
    mask = torch.zeros(groups.shape[:2], dtype=torch.bool, device=choice.device).scatter_(1, best, True)
    return mask[..., None].expand_as(groups).flatten(1)
