"""Log probabilities in the shapes of the APIs.

Owns no state: called by `serving` with what the sampler has reported. It never ranks anew, and JSON never gets an
infinity. vLLM: `_create_completion_logprobs` in `vllm/entrypoints/openai/completion/serving.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.llm_engine import RequestOutput
    from engine.sampling.sampler import Logprob


def finite(x: Logprob) -> float:
    """JSON has no infinity."""
    return max(x.logprob, -9999.0)


def most_probable(k: int, entry: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
    """The k best of what was reported for one position, best first; what was sampled may be none of them."""
    return sorted(((t, x) for t, x in entry.items() if x.rank <= k), key=lambda item: item[1].rank)


def by_text(entries: Sequence[tuple[int, Logprob]], chosen: int, its_text: str) -> dict[str, float]:
    """Log probabilities as completions have them, by text: of several tokens with one text, the most probable counts.

    (In vLLM 0.32 it is the one that comes last.) `entries` are given best first; `its_text` is what `chosen` has added
    to the answer.
    """
    found: dict[str, float] = {}
    for token, x in entries:
        found.setdefault(its_text if token == chosen else x.decoded_token or "", finite(x))
    return found


def scores(output: RequestOutput) -> list[dict[str, dict[str, Any]] | None]:
    """Log probabilities of a prompt's tokens in vLLM's form: by token id, and null for the first one."""
    return [
        None
        if entry is None
        else {
            str(t): {"logprob": finite(x), "rank": x.rank, "decoded_token": x.decoded_token} for t, x in entry.items()
        }
        for entry in output.prompt_logprobs or ()
    ]
