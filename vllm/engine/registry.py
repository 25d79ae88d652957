"""Which lesson fills which seam: the engine's table of contents, and its only edge to a lesson.

Owns the names; called when an engine is put together, and by an engine's file for the kernel that a lesson teaches.
It never decides what a seam asks for, which is in `seams.py`. vLLM: `vllm/v1/attention/backends/registry.py`.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

VLLM = Path(__file__).resolve().parents[1]

FILLED_BY = {
    "combine_splits": "02_paged_attention:combine_splits_kernel",
    "cache.copy_blocks": "02_paged_attention:copy_blocks",
    "cache.paged": "02_paged_attention:PagedKVCache",
    "cache.write": "02_paged_attention:reshape_and_cache",
    "decode.paged": "02_paged_attention:paged_decode",
    "decode.latent": "09_gqa:mla_decode",
    "attention.unified": "10_chunked_prefill:UnifiedAttention",
    "attention.paged": "02_paged_attention:PagedAttention",
    "mixed.attend": "10_chunked_prefill:unified_attention",
    "mixed.plan": "10_chunked_prefill:plan_torch",
    "mixed.run": "10_chunked_prefill:run_torch",
    "lora": "12_multi_lora:add_lora",
    "rejection": "07_spec_decode:rejection_sample",
}


ATTENTION_BACKENDS = tuple(name.removeprefix("attention.") for name in FILLED_BY if name.startswith("attention."))


def fill(seam: str) -> Any:
    """The object of a lesson that fills a seam. Raises KeyError for a name that is in no row."""
    script, _, name = FILLED_BY[seam].partition(":")
    return getattr(lesson(script), name)


def lesson(name: str) -> ModuleType:
    """Load a lesson by file name without suffix, e.g. `lesson("02_paged_attention")`.

    By path, because its name starts with a digit and because the folder `vllm/` must not be imported as a package.
    The script that is being run is returned as it is, never loaded a second time.
    """
    path = VLLM / f"{name}.py"
    if not path.is_file() and (VLLM / "tours" / path.name).is_file():
        path = VLLM / "tours" / path.name
    main = sys.modules["__main__"]
    if (file := getattr(main, "__file__", None)) and Path(file).resolve() == path:
        return main
    return load(name, path)


def load(name: str, path: Path) -> ModuleType:
    """The module in a file whose name is no identifier, once in a process under `name`."""
    with _loading:  # a server has threads: none of them may get a lesson that is half loaded
        if name not in sys.modules:
            if not path.is_file():
                raise ImportError(f"there is no {path.stem!r} in {path.parent.name}/")
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[name]
                raise
        return sys.modules[name]


_loading = threading.RLock()
