"""A letter as bytes: four of its length, then a pickle; and which bytes are a letter.

Owns the list of classes that a letter from elsewhere may name; called by both ends of every socket between API servers
and engines. It never knows what a letter says, nor waits for one. vLLM: `vllm/v1/serial_utils.py`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any

from engine.output import EngineCoreOutput
from engine.request import PoolingParams, Request, RequestStatus, SamplingParams
from engine.sampling.sampler import Logprob
from engine.serving.letters import (
    Admission,
    Dead,
    EngineCoreOutputs,
    EngineCoreReady,
    EngineCoreRequestType,
    Progress,
    Reply,
    SchedulerStats,
)


def frame(letter: Any) -> bytes:
    """Four bytes of length, then the letter."""
    body = pickle.dumps(letter, protocol=5)
    return len(body).to_bytes(4, "big") + body


# Of lists, texts and numbers a pickle needs no name. What else letters hold:
LETTERS = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        *(Request, RequestStatus, SamplingParams, PoolingParams, EngineCoreOutput, Logprob),
        *(EngineCoreRequestType, EngineCoreReady, EngineCoreOutputs, SchedulerStats, Admission, Progress, Reply, Dead),
    )
}


class LetterUnpickler(pickle.Unpickler):
    """Unpickles letters and nothing else. `pickle.loads` would call whatever function the other side names, and the
    other side may be a network; here it can name our dataclasses, our enums and `Request`."""

    def find_class(self, module: str, name: str) -> Any:
        """A class of our own letters; UnpicklingError for anything else: pickles can call."""
        if (module, name) not in LETTERS:
            raise pickle.UnpicklingError(f"{module}.{name} is no letter")
        return LETTERS[module, name]


def loads(data: bytes | bytearray) -> Any:
    """A letter out of bytes; UnpicklingError if it is anything else."""
    try:
        return LetterUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # a pickle that is none may fail in any way
        raise pickle.UnpicklingError(str(error) or type(error).__name__) from None


MAX_LETTER = 1 << 30  # bytes; a million tokens with the logprobs of their prompts take less


def take_letters(buffer: bytearray) -> Iterator[Any]:
    """The letters that are whole in `buffer`, which keeps the rest. Raises UnpicklingError for what is none, also for
    one that is announced to be longer than MAX_LETTER: nobody collects the bytes of that."""
    while len(buffer) >= 4:
        end = 4 + letter_bytes(buffer[:4])
        if len(buffer) < end:
            return
        letter = loads(bytes(buffer[4:end]))
        del buffer[:end]
        yield letter


def letter_bytes(head: bytes | bytearray) -> int:
    """The length that the four bytes before a letter announce; UnpicklingError beyond MAX_LETTER."""
    if (size := int.from_bytes(head, "big")) > MAX_LETTER:
        raise pickle.UnpicklingError(f"{size:,} bytes are no letter")
    return size
