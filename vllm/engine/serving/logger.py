"""Where an API server's log lines go, and how they begin.

Owns the logger named "vllm"; `server` starts it, and whoever has something to say writes to it. It never decides what
is worth a line. vLLM: `vllm/logger.py`.
"""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("vllm")


def start_logging() -> None:
    """Lines to stdout, as people know them: `INFO 11-29 18:41:08 [log_stats.py:52] …`. Who no longer reads them is no
    error."""
    logging.raiseExceptions = False
    handler = logging.StreamHandler(sys.stdout)
    form = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
    handler.setFormatter(logging.Formatter(form, "%m-%d %H:%M:%S"))
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
