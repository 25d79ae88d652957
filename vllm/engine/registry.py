"""Which lesson fills which seam: the engine's table of contents, and its only edge to a lesson.

Owns the names; called when an engine is put together, and by an engine's file for the kernel that a lesson teaches.
It never decides what a seam asks for, which is in `seams.py`. vLLM: `vllm/v1/attention/backends/registry.py`.
"""

from __future__ import annotations

import common

from typing import Any

FILLED_BY = {
    "combine_splits": "02_paged_attention:combine_splits_kernel",
    "cache.copy_blocks": "02_paged_attention:copy_blocks",
    "cache.paged": "02_paged_attention:PagedKVCache",
    "cache.write": "02_paged_attention:reshape_and_cache",
    "decode.paged": "02_paged_attention:paged_decode",
    "attention.unified": "10_chunked_prefill:UnifiedAttention",
    "attention.paged": "02_paged_attention:PagedAttention",
    "lora": "12_multi_lora:add_lora",
    "rejection": "07_spec_decode:rejection_sample",
}


ATTENTION_BACKENDS = tuple(name.removeprefix("attention.") for name in FILLED_BY if name.startswith("attention."))


def fill(seam: str) -> Any:
    """The object of a lesson that fills a seam. Raises KeyError for a name that is in no row."""
    lesson, _, name = FILLED_BY[seam].partition(":")
    return getattr(common.lesson(lesson), name)
