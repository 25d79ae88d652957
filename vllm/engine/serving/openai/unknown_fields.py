"""Fields that no request of ours has: passed over and named in the log, or refused.

Owns which of them were named already; made by `app` from `--strict-fields`, and handed to every model of a body as its
context. It never looks at a value.
vLLM: `OpenAIBaseModel.__log_extra_fields__` in `vllm/entrypoints/serve/engine/protocol.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from engine.serving.openai.limits import MAX_NAME

logger = logging.getLogger(__name__)

MAX_NAMED = 256  # names that the log hears of: whoever makes up a new one for each request shall not fill it


class UnknownFields:
    """What one server does with them; `strict` refuses the first of a request by its name."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.named: set[str] = set()

    def pass_over(self, kind: str, names: Iterable[str]) -> None:
        """Say once of each that it changes nothing. `kind` is where it stood."""
        for name in names:
            about = f"{kind}.{name[:MAX_NAME]}"
            if about not in self.named and len(self.named) < MAX_NAMED:
                self.named.add(about)
                logger.warning("%s is not known here and was passed over; --strict-fields refuses such", ascii(about))
