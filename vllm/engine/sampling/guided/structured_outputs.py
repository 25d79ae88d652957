"""From what a request asks for to a guide, or to a refusal.

Owns the wording of `structured_outputs` and of every refusal; called by front ends on arrival (`validate`) and behind
an answer (`ending`), and by engines that find no guide with a request. It never masks a logit.
vLLM: `vllm/sampling_params.py` (StructuredOutputsParams, _validate_structured_outputs).
"""

from __future__ import annotations

import common

import json
from collections.abc import Iterable
from typing import Any

from engine.model.tokenizer import Tokenizer
from engine.sampling.guided import limits
from engine.sampling.guided.after_reasoning import AfterReasoning
from engine.sampling.guided.json_schemas import guidance_schema
from engine.sampling.guided.reader_process import read_apart
from engine.sampling.guided.vocabulary import Guide, Vocabulary, vocabulary_of

KINDS = ("json", "regex", "choice", "grammar", "json_object")  # what may be asked for, one at a time
REASONING_END = "reasoning_end"  # beside it: the tag behind which it holds, if the answer begins with thinking

# Where only a byte may follow that no token has, llguidance allows the token behind it, and refuses it afterwards.
BROKEN = "the answer has left its grammar, which may ask for a byte that no token of this model has"


def normalize(structured_outputs: dict[str, Any]) -> tuple[str, Any]:
    """What is asked for, as (kind, spec) that can be a key; types and sizes are checked. Raises InputError."""
    asked = structured_outputs if isinstance(structured_outputs, dict) else {}
    given = [k for k, v in asked.items() if v is not None and k != REASONING_END]
    if len(given) != 1 or given[0] not in KINDS:
        kinds = ", ".join(KINDS)
        raise common.InputError(
            f"structured_outputs {structured_outputs!r:.80}: must be an object with exactly one of {kinds}"
        )
    kind, spec = given[0], structured_outputs[given[0]]

    def wrong(what: str) -> common.InputError:
        return common.InputError(f"structured_outputs: {kind} {spec!r:.60}: {what}")

    if kind == "json_object":
        if spec is not True:
            raise wrong("must be true")
        return "json", '{"type": "object"}'
    try:
        spec = json.dumps(spec) if kind == "json" and isinstance(spec, dict) else spec
        texts = (spec,) if kind != "choice" else tuple(spec) if isinstance(spec, list | tuple) else ()
        blank = kind in ("regex", "choice")  # may match the empty text
        if not texts or not all(isinstance(text, str) and (blank or text.strip()) for text in texts):
            raise wrong("must be a list of strings" if kind == "choice" else "must be a string, not empty")
        if sum(map(len, texts)) > limits.MAX_SPEC:
            raise wrong(f"at most {limits.MAX_SPEC:,} characters are allowed")
        "".join(texts).encode()  # a lone surrogate has no UTF-8
        spec = json.dumps(guidance_schema(texts[0])) if kind == "json" else spec
    except (ValueError, TypeError, RecursionError) as error:
        raise error if isinstance(error, common.InputError) else wrong(str(error)) from None
    return kind, texts if kind == "choice" else spec


def compile_guide(structured_outputs: dict[str, Any], vocabulary: Vocabulary, checked: bool = False) -> Guide:
    """The guide for what a request asks for; `checked` if a front end has called `validate`. Raises InputError."""
    kind, spec = normalize(structured_outputs)
    if not checked and kind in ("json", "grammar"):
        read_apart(kind, spec)
    return vocabulary.guide(kind, spec)


def start(structured_outputs: dict[str, Any], guide: Guide, vocabulary: Vocabulary) -> Any:
    """A grammar at its beginning, for one answer to a request that asks so."""
    end = structured_outputs.get(REASONING_END)
    return AfterReasoning(guide.start(), end, vocabulary) if end else guide.start()


def validate(
    structured_outputs: dict[str, Any] | None,
    tokenizer: Tokenizer,
    vocab_size: int | None = None,
    eos_token_ids: Iterable[int] = (),
) -> Guide | None:
    """Refuse on arrival what cannot be guided or would cost too much. For the front end, so that no engine waits.

    Returns the guide; in the same process, the engine finds it in the cache. `vocab_size` and `eos_token_ids` are the
    model's, where they differ from the tokenizer's. Raises InputError, within MAX_SECONDS and a second for our part.
    """
    if structured_outputs is None:
        return None
    return compile_guide(structured_outputs, vocabulary_of(tokenizer, vocab_size, tuple(eos_token_ids)))


def ending(engine: Any, sequence: Any, finish_reason: str | None, stop_reason: Any) -> tuple[str | None, Any]:
    """Why an answer of an engine has ended, if it has; "error" if its grammar refuses one of its tokens."""
    wanted, config = sequence.request.sampling_params.structured_outputs, engine.model.config
    if finish_reason is not None and wanted is not None:
        vocabulary = vocabulary_of(engine.tokenizer, config.vocab_size, config.eos_token_ids)
        grammar = start(wanted, compile_guide(wanted, vocabulary, checked=True), vocabulary)
        if not all(map(grammar.accept_token, sequence.token_ids)):
            return "error", BROKEN
    return finish_reason, stop_reason
