"""What guiding must know of a tokenizer, and the guides that were compiled for it last.

Owns the bytes of every token, the form of a mask, and 32 guides; called by whoever compiles, on any thread. It never
checks what a request asks for. vLLM: `vllm/v1/structured_output/__init__.py`, and the compiler of each of its backends.
"""

from __future__ import annotations

import common

import functools
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from engine.model.tokenizer import Tokenizer
from engine.sampling.detokenizer import TokenBytes
from engine.sampling.guided import limits
from engine.sampling.guided.characters import literal
from engine.sampling.guided.expressions import alt
from engine.sampling.guided.guidance import GuidanceGrammar, read_grammar
from engine.sampling.guided.regex import parse_regex
from engine.sampling.guided.regex_guide import RegexGuide
from engine.sampling.guided.token_trie import TokenTrie

Guide = RegexGuide | GuidanceGrammar  # what is kept for the next request that asks for the same


class Vocabulary:
    """What guiding must know of a tokenizer: the bytes of each token, and which tokens end an answer."""

    def __init__(
        self, tokens: Sequence[bytes], eos_token_ids: Iterable[int], tokenizer: Tokenizer | None = None
    ) -> None:
        self.tokens = list(tokens)
        self.eos_token_ids = sorted(eos_token_ids)
        self.tokenizer = tokenizer
        if not self.eos_token_ids:
            raise common.InputError("structured_outputs: this model has no end-of-sequence token to end an answer with")
        self.trie = TokenTrie(self.tokens)
        self.num_words = -(-len(self.tokens) // 32)  # of a mask
        # Bytes that no token brings alone are struck from patterns: what is left can always be finished, byte by byte.
        self.alphabet = sum(1 << token[0] for token in set(self.tokens) if len(token) == 1)
        self.only_eos = self.pack(np.isin(np.arange(len(self.tokens)), self.eos_token_ids))  # of a finished answer
        self.guides: OrderedDict[tuple[str, Any], Guide] = OrderedDict()  # the next request may ask for the same
        self.lock = threading.Lock()

    KEPT = 32  # guides, those used last

    def pack(self, allowed: np.ndarray) -> np.ndarray:
        """bool [vocab] -> int32 [⌈vocab/32⌉]: token t is bit t mod 32 of word t div 32."""
        padded = np.zeros(32 * self.num_words, dtype=bool)
        padded[: len(allowed)] = allowed
        return np.packbits(padded, bitorder="little").view("<i4")

    def unpack(self, bitmask: np.ndarray) -> np.ndarray:
        """The opposite: int32 [words] -> bool [vocab]."""
        return np.unpackbits(bitmask.view(np.uint8), count=len(self.tokens), bitorder="little").astype(bool)

    def kept(self, kind: str, spec: Any) -> Guide | None:
        """The guide for a normalized request, if it was compiled not long ago. Never waits."""
        with self.lock:
            if (guide := self.guides.get((kind, spec))) is not None:
                self.guides.move_to_end((kind, spec))
            return guide

    def guide(self, kind: str, spec: Any, max_work: int = limits.MAX_WORK) -> Guide:
        """The guide that is kept, or a new one. Raises InputError, TooSlow."""
        if (guide := self.kept(kind, spec)) is None:
            guide = self.compile(kind, spec, max_work)
            with self.lock:
                guide = self.guides.setdefault((kind, spec), guide)
                while len(self.guides) > self.KEPT:
                    self.guides.popitem(last=False)
        return guide

    def compile(self, kind: str, spec: Any, max_work: int = limits.MAX_WORK) -> Guide:
        """The guide for a normalized request. Raises InputError, TooSlow."""
        try:
            if kind in ("regex", "choice"):
                return RegexGuide(parse_regex(spec) if kind == "regex" else alt(map(literal, spec)), self, max_work)
            return GuidanceGrammar(read_grammar(self.ll_tokenizer, kind, spec), self)
        except ValueError as error:
            slow = limits.TooSlow if isinstance(error, limits.TooSlow) else common.InputError
            raise slow(f"structured_outputs: {kind} {spec!r:.60}: {error}") from None

    @functools.cached_property
    def ll_tokenizer(self) -> Any:
        """The library's view of the same tokens: no space goes in front of what a grammar forces. In half a second."""
        import llguidance

        assert self.tokenizer is not None, "schemas and grammars need the tokenizer"
        about = self.tokenizer.backend.to_str().replace('"add_prefix_space":true', '"add_prefix_space":false')
        return llguidance.LLTokenizer(about, n_vocab=len(self.tokens), eos_token=self.eos_token_ids)


@functools.lru_cache(4)
def vocabulary_of(
    tokenizer: Tokenizer, vocab_size: int | None = None, eos_token_ids: tuple[int, ...] = ()
) -> Vocabulary:
    """The tokenizer's `Vocabulary`, made once (in half a second). A model may have more ids than its tokenizer."""
    size = vocab_size or tokenizer.backend.get_vocab_size(with_added_tokens=True)
    if not eos_token_ids and (name := tokenizer.special_tokens.get("eos_token")):
        found = tokenizer.backend.token_to_id(name)
        eos_token_ids = () if found is None else (found,)
    token_bytes = TokenBytes(tokenizer)
    tokens = [b"" if token in token_bytes.special else token_bytes[token] for token in range(size)]
    return Vocabulary(tokens, eos_token_ids, tokenizer)
