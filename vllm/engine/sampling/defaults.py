"""What a request gets that does not say: the model folder's wishes, a file's, or the operator's.

Owns the reading of `generation_config.json` for sampling; called when an engine or a server starts. It never changes
what a request says itself. vLLM: `vllm/config/model.py:ModelConfig.get_diff_sampling_param`.
"""

from __future__ import annotations

import common

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.model.config import read_generation_config
from engine.request import SamplingParams


@dataclass(frozen=True)
class SamplingDefaults:
    """What a request gets that does not say (vLLM's `ModelConfig.get_diff_sampling_param`)."""

    params: dict[str, Any] = field(default_factory=dict)  # of SamplingParams
    max_tokens_limit: int | None = None  # a server lets no request write more

    @classmethod
    def of(cls, folder: Path | None, generation_config: str, override: str | dict[str, Any] | None) -> SamplingDefaults:
        """From the `generation_config.json` of a model's `folder` ("auto"), from no file ("vllm"), or from that of the
        folder `generation_config`; in each case, what `override` (JSON or a dict) has, counts.

        Other fields of the file mean nothing here. Its max_new_tokens is a limit, too, unless it is the model's own
        wish. Raises InputError.
        """
        override = override_generation_config(override)
        found = {}
        if generation_config != "vllm" and (folder or generation_config != "auto"):
            found = read_generation_config(folder or Path(generation_config), generation_config) or {}
        found = {name: value for name in FROM_GENERATION_CONFIG if (value := (found | override).get(name)) is not None}
        if "max_new_tokens" in found:
            found["max_tokens"] = found.pop("max_new_tokens")
        try:
            SamplingParams(**found)
        except common.InputError as error:
            raise common.InputError(f"generation_config: {error}") from None
        limit = found.get("max_tokens") if "max_new_tokens" in override else None
        return cls(found, found.get("max_tokens") if generation_config not in ("auto", "vllm") else limit)

    def within(self, max_model_len: int) -> SamplingDefaults:
        """The same with no more tokens than a context has: a client did not ask for them."""
        params = self.params
        if "max_tokens" in params:
            params = params | {"max_tokens": min(params["max_tokens"], max_model_len)}
        return SamplingDefaults(params, self.max_tokens_limit)


FROM_GENERATION_CONFIG = ("repetition_penalty", "presence_penalty", "frequency_penalty", "temperature", "top_k",
                          "top_p", "min_p", "max_new_tokens")  # fmt: skip


def override_generation_config(given: str | dict[str, Any] | None) -> dict[str, Any]:
    """An object, or its JSON. Raises InputError."""
    try:
        found = json.loads(given) if isinstance(given, str) else given or {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise common.InputError(f"override_generation_config {given!r:.60}: must be a JSON object")
    return found
