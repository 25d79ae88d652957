"""A vector in place of an answer: what the model makes of a whole prompt.

Owns the sums of prompts that are not whole yet, and what a server pools by; the model runner calls it after each pass.
It never samples, and a prompt that is pooled is a request like any other until it is whole.
vLLM: `vllm/model_executor/layers/pooler/`, `vllm/config/pooler.py`.
"""

from __future__ import annotations

import common

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine.request import POOLING_TYPES, PoolingParams, Request


class Pooler:
    """Last: the hidden state behind the last token. Mean: that of all tokens. Both behind the model's last norm, in
    fp32, and of length 1 unless a request wants it as it is."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}  # request id: of the rows so far [hidden]

    def pool(
        self,
        hidden: torch.Tensor,
        query_lens: Sequence[int],
        requests: Sequence[Request],
        norm: Callable[[torch.Tensor], torch.Tensor],
    ) -> dict[str, bytes]:
        """Rows [T, hidden] of these requests, in this order -> of each whose prompt is now computed, fp32 as bytes."""
        found, end = {}, 0
        for request, n in zip(requests, query_lens):
            end += n
            if (params := request.pooling_params) is None:
                continue
            whole = request.num_computed_tokens == request.num_tokens
            if params.pooling_type == "MEAN":
                first = request.num_computed_tokens == n  # of its chunks; again, if it was preempted
                so_far = 0 if first else self.sums.pop(request.request_id)
                vector = self.sums[request.request_id] = so_far + norm(hidden[end - n : end]).float().sum(0)
                vector = vector / request.num_tokens
            elif whole:
                vector = norm(hidden[end - 1 : end])[0].float()
            else:
                continue
            if whole:
                found[request.request_id] = as_bytes(vector, params)
        return found

    def forget(self, request_ids: Iterable[str]) -> None:
        """They have ended."""
        for request_id in request_ids:
            self.sums.pop(request_id, None)


def as_bytes(vector: torch.Tensor, params: PoolingParams) -> bytes:
    """The vector [hidden] as a request wants it, or its first `dimensions`: little-endian fp32."""
    vector = vector[: params.dimensions]
    vector = F.normalize(vector, dim=0) if params.use_activation else vector
    return vector.cpu().numpy().astype("<f4").tobytes()


@dataclass(frozen=True)
class PoolerConfig:
    """What a server pools by, under vLLM's names (`vllm/config/pooler.py:PoolerConfig`). Raises InputError."""

    pooling_type: str = "LAST"  # what a causal model's last token has seen is everything
    use_activation: bool = True  # of length 1

    def __post_init__(self) -> None:
        if self.pooling_type not in POOLING_TYPES:
            allowed = ", ".join(POOLING_TYPES)
            raise common.InputError(f"pooler_config: pooling_type {self.pooling_type!r}: must be one of {allowed}")
        if type(self.use_activation) is not bool:
            raise common.InputError(f"pooler_config: use_activation {self.use_activation!r}: must be true or false")

    @classmethod
    def of(cls, folder: Path | None, given: str | dict[str, Any] | None) -> PoolerConfig:
        """As `given` says, JSON or an object; else as the model's `folder`, if sentence-transformers made it."""
        try:
            said = json.loads(given) if isinstance(given, str) else dict(given or {})
        except (TypeError, ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            raise common.InputError(f"pooler_config {given!r:.60}: must be a JSON object")
        if "seq_pooling_type" in said:
            said["pooling_type"] = said.pop("seq_pooling_type")
        if unknown := [name for name in said if name not in ("pooling_type", "use_activation")]:
            allowed = "pooling_type (or seq_pooling_type), use_activation"
            raise common.InputError(f"pooler_config: {unknown[0]} is not served; allowed: {allowed}")
        return cls(**{**stored_pooling(folder), **said})


def stored_pooling(folder: Path | None) -> dict[str, Any]:
    """What sentence-transformers' files in a model's folder say; nothing, if there are none."""
    try:
        modules = json.loads((folder / "modules.json").read_text()) if folder else []
        kinds = {module["type"].rpartition(".")[2]: module["path"] for module in modules}
        if folder is None or "Pooling" not in kinds:
            return {}
        modes = json.loads((folder / kinds["Pooling"] / "config.json").read_text())
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    names = {"pooling_mode_mean_tokens": "MEAN", "pooling_mode_lasttoken": "LAST"}
    found = [kind for name, kind in names.items() if modes.get(name) is True]
    return {"pooling_type": found[0], "use_activation": "Normalize" in kinds} if found else {}
