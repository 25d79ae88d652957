"""How much a client may say.

Owns the bounds of a body and of its parts, and of what an answer repeats; read by whatever looks at a request, and
never changed. A request that is beyond one is refused before anything grows with it. vLLM: `vllm/envs.py` and
`vllm/sampling_params.py`, where it has such bounds.
"""

from __future__ import annotations

MAX_BODY_BYTES = 4 << 20  # a request of the longest context is a few hundred kilobytes
LARGE_BYTES = 16 << 10  # of a body: a larger one is read and prepared away from the event loop
MAX_PARTS = 1 << 17  # arrays, objects and names in a body
MAX_NESTING = 128  # of a body's arrays and objects; schemas in it may nest half as deep
MAX_ELEMENTS = 4096  # of a list or an object, unless it is one of these
MAX_STOP_STRINGS = 64  # each is searched for in every step
MAX_STOP_CHARS = 4096  # in all of them
MAX_IDS = 1 << 20  # token ids: more than a body holds
LENGTHS: dict[str | None, int] = {  # by field
    "stop": MAX_STOP_STRINGS, "bad_words": 128, "logit_bias": 1 << 14,
    **dict.fromkeys(("prompt", "input", "tokens", "stop_token_ids", "allowed_token_ids"), MAX_IDS),
}  # fmt: skip
MAX_N = 128  # answers to one prompt
MAX_NAME = 256  # characters of a name that every piece of an answer repeats
MAX_MESSAGE = 2000  # characters of an error
