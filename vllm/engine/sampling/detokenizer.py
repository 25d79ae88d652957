"""From token ids to text, a token at a time: whole characters only, and stop strings found.

Owns the bytes of every token and how far each answer's text has come; called by the front end, once a token. It never
sees logits. vLLM: `vllm/v1/engine/detokenizer.py`.
"""

from __future__ import annotations

import common

import codecs
import io
from collections.abc import Sequence

from engine.model.tokenizer import Tokenizer
from engine.request import SamplingParams

MAX_BYTES = 4  # of a character in UTF-8


class TokenBytes:
    """Token id to the bytes it stands for: what a tokenizer's decoder does, one token at a time.

    A token may hold half a character, so text cannot be put together from decoded tokens; bytes can.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.backend = tokenizer.backend
        # Not from `to_str()`, which spells out the vocabulary: 0.4 s for 49,152 tokens.
        added, decoder = self.backend.get_added_tokens_decoder(), str(self.backend.decoder)
        self.special = {token_id for token_id in added if not self.backend.decode([token_id])}
        self.added = {token_id: token.content.encode() for token_id, token in added.items()}
        self.byte_level, self.byte_fallback = "ByteLevel(" in decoder, "ByteFallback(" in decoder
        if not (self.byte_level or self.byte_fallback):
            raise common.InputError("this tokenizer's decoder is not supported; allowed: ByteLevel, ByteFallback")
        # GPT-2's byte alphabet: printable bytes stand for themselves, the other 68 for U+0100 and on.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        other = [byte for byte in range(256) if byte not in printable]
        self.alphabet = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(other)}
        self.cache: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        found = self.cache.get(token_id)
        if found is None:
            found = self.cache[token_id] = self._decode(token_id)
        return found

    def _decode(self, token_id: int) -> bytes:
        if token_id in self.added:
            return self.added[token_id]
        token = self.backend.id_to_token(token_id) or ""  # ids beyond the tokenizer's own stand for nothing
        if self.byte_level:
            if all(char in self.alphabet for char in token):
                return bytes(self.alphabet[char] for char in token)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()


def decoded_token(token_bytes: TokenBytes, token_id: int, before: Sequence[int]) -> str:
    """The text of one token among its log probabilities (`vllm/v1/engine/logprobs.py:_correct_decoded_token`).

    One that ends within a character is "", and one that completes it is all of it, begun by the last tokens `before`
    it. An alternative continues the same text as the token that was chosen.
    """

    def decode(*ids: int) -> str:
        return b"".join(map(token_bytes.__getitem__, ids)).decode("utf-8", "replace")

    alone = decode(token_id)
    if not alone.endswith("\ufffd"):
        return alone
    for start in range(len(before) - 1, max(-1, len(before) - 1 - MAX_BYTES), -1):
        whole = decode(*before[start:], token_id)
        if not whole.endswith("\ufffd"):  # the fewest that do: none of them had a text of its own
            return whole
    return ""


class IncrementalDetokenizer:
    """Text of one request, a token at a time, O(1) each; stop strings are found here, because only text has them.

    Bytes that do not complete a character yet are held back by an incremental UTF-8 decoder. What might be the
    beginning of a stop string is held back by `get_next_output_text`.
    """

    def __init__(self, token_bytes: TokenBytes, params: SamplingParams) -> None:
        self.token_bytes, self.params = token_bytes, params
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.buffer = io.StringIO()  # grows in place, which a string does not
        self.length = self.num_tokens = 0
        self.sent = 0  # characters already handed out
        self.stop = list(params.stop or ())
        self.reach = max(map(len, self.stop), default=1) - 1  # how far back an unfinished stop string may begin
        self.tail = ""  # the last `reach` characters
        self.held_back = 0 if params.include_stop_str_in_output else self.reach

    @property
    def text(self) -> str:
        """Everything so far: O(length), for the end of a request."""
        return self.buffer.getvalue()

    def append(self, token_id: int, is_stop_token: bool = False) -> str | None:
        """Add one token; returns the stop string it completed, if any, with the text already cut."""
        self.num_tokens += 1
        hidden = is_stop_token and not self.params.include_stop_str_in_output
        if hidden or (self.params.skip_special_tokens and token_id in self.token_bytes.special):
            return None
        new = self.utf8.decode(self.token_bytes[token_id])
        self.buffer.seek(self.length)
        self.buffer.write(new)
        self.length += len(new)
        old, window = len(self.tail), self.tail + new
        self.tail = window[max(0, len(window) - self.reach) :]
        if not new or self.num_tokens <= self.params.min_tokens:
            return None
        # A match must end in the new text, so it begins at most len(stop) − 1 characters before that.
        matches = [
            (at + len(stop), at, stop)
            for stop in self.stop
            if (at := window.find(stop, max(0, old - len(stop) + 1))) >= 0
        ]
        if not matches:
            return None
        end, start, stop = min(matches, key=lambda match: match[0])
        self.length += (end if self.params.include_stop_str_in_output else start) - len(window)
        self.buffer.truncate(self.length)
        return stop

    def get_next_output_text(self, finished: bool) -> str:
        """The text since the last call, except what may still turn out to begin a stop string."""
        start = self.sent
        self.sent = max(start, self.length - (0 if finished else self.held_back))
        self.buffer.seek(start)
        return self.buffer.read(self.sent - start)
