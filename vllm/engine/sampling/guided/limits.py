"""What a pattern, schema or grammar of a stranger may cost, and the error of one that costs more.

Owns the numbers, nothing else; called by name wherever a guide is compiled, and by the queue, which first allows a part
of them. Our own part is counted, never timed: what passes here passes everywhere.
vLLM: `vllm/envs.py` (VLLM_REGEX_COMPILATION_TIMEOUT_S), `vllm/v1/structured_output/utils.py`.
"""

from __future__ import annotations

import common

MAX_PATTERN = 4_096  # characters of a regular expression
MAX_DEPTH = 100  # of its parentheses and alternatives
MAX_DFA_STATES = 5_000
MAX_WORK = 1_000_000  # NFA states looked at while the DFA is built (a new one counts 20): half a second
MAX_SPEC = 65_536  # characters of a schema, of a grammar, of all choices together
MAX_SECONDS = 5.0  # for the library's first reading of a schema or grammar, as in vLLM for a pattern
MAX_MEMORY = 256 << 20  # bytes of addresses that this reading may have; the largest schema needs a fifth of them


class TooSlow(common.InputError):
    """More work than was allowed. Who allowed little may try again with more (`guide_queue`)."""
