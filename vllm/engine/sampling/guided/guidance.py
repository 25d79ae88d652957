"""How far one request has come in a JSON schema or a grammar, whose values may nest without end.

Owns a parser of the library llguidance for each request; called as `RegexGrammar` is, with masks of the same form. It
never keeps a mask: a state includes a stack. vLLM: `vllm/v1/structured_output/backend_guidance.py`.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # it keeps guides, and each of them knows it
    from engine.sampling.guided.vocabulary import Vocabulary


def read_grammar(tokenizer: Any, kind: str, spec: str) -> Any:
    """llguidance's matcher for a JSON schema or a grammar. Raises ValueError."""
    import re  # in the other process, this function is all that there is

    import llguidance

    if kind == "grammar":  # GBNF says "::="; in Lark's, the first rule may have marks: "?start:", "!start:"
        lark = "::=" not in spec or re.search(r"(?m)^\s*(%llguidance\b|[?!]*start\s*:(?!:))", spec)
        grammar = llguidance.grammar_from("lark" if lark else "gbnf", spec)
    else:  # as json.dumps writes it: where whitespace is free, a small model may write newlines until it is cut off
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            spec,
            overrides={
                "whitespace_flexible": False,
                "item_separator": ", ",
                "key_separator": ": ",
                "coerce_one_of": True,
            },
        )
    limits = llguidance.LLParserLimits(verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    first = matcher.deep_copy()
    first.compute_bitmask()
    if first.is_error():  # a matcher is silent about what cannot match until it is asked for a mask
        error = matcher.get_error() or "no answer can match it"
        advice = 'Say "anyOf", or in the same schema "x-guidance": {"coerce_one_of": true}: both mean the same'
        error = re.sub("Enable 'coerce_one_of' option .* anyOf", advice, error)
        raise ValueError(re.sub("(?s)regex parse error:.*error: look-around.*", "no look-ahead or look-behind", error))
    return matcher


class GuidanceGrammar:
    """One request in a JSON schema or grammar: an Earley parser over lexemes, in llguidance."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        self.matcher = matcher
        self.vocabulary = vocabulary
        self.terminated = False

    def start(self) -> GuidanceGrammar:
        return GuidanceGrammar(self.matcher.deep_copy(), self.vocabulary)

    def accept_token(self, token_id: int) -> bool:
        if token_id in self.vocabulary.eos_token_ids:
            self.terminated = self.terminated or self.matcher.is_accepting()
            return self.terminated
        return not self.terminated and self.matcher.consume_token(token_id)

    def fill_bitmask(self, row: np.ndarray) -> None:
        """The library's mask, bit t of `row` [V / 32] int32 for token t; at the end, only EOS."""
        if not self.terminated:
            self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if self.matcher.is_error():  # a limit of the library, in the middle of an answer: it ends here
                warnings.warn(f"llguidance gave up: {self.matcher.get_error():.200}", stacklevel=2)
                self.terminated = True
        if self.terminated:
            row[:] = self.vocabulary.only_eos
