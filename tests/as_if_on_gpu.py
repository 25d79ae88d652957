"""Run the tests of lessons and engine as if there were a GPU, and know which of them are enough.

    python tests/as_if_on_gpu.py            # all that have to do with one: a quarter of an hour
    python tests/as_if_on_gpu.py --choose   # the same, and `enough_on_gpu.txt` is written anew

A test under the pretence of `pretend_gpu.py` shows that each of our lines asks nothing of a GPU which a GPU refuses:
whether its numbers are right, the same test says without the pretence. So two tests that reach the same places of our
code say the same. A place is a line, what it asks for (an operation, a copy, a launch, a replay), and whether a graph
was recording; and of two functions that both work on tensors of the GPU, that the one called the other.

The suite runs `enough_on_gpu.txt`: of all tests the cheapest few that reach every place which any of them reaches. It
is to be chosen anew when a lesson learns to do something on a GPU. A kernel that it launches nowhere is noticed.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[0:0] = [str(HERE.parent / "vllm"), str(HERE)]

import common

import pytest

LIST = HERE / "enough_on_gpu.txt"
# Files whose engines or kernels run on a GPU, and what of them takes minutes and shows what shorter tests show.
FILES = {
    "engine/attention/test_latent": "",
    "engine/experts/test_grouped_matmul": "rows_of or tiles_of",
    "engine/quantization/test_experts": "kernel",
    "engine/model/test_llama": "",
    "lessons/test_01_kv_cache": "not recorded_bug",
    "lessons/test_02_paged_attention": "",
    "lessons/test_03_flash_attention": "",
    "lessons/test_04_continuous_batching": "",
    "lessons/test_05_optimizations": "graph or capture or bucket or moved or padded",
    "engine/quantization/test_quantization": "",
    "engine/parallel/test_layers": "",
    "engine/parallel/test_model": "",
    "engine/parallel/test_ranks": "",
    "engine/quantization/test_kv_cache": "kernel",
    "lessons/test_07_spec_decode": "",
    "engine/spec_decode/test_trained": "",
    "lessons/test_09_gqa": "",
    "engine/core/test_hybrid_kv_cache": "",
    "lessons/test_10_chunked_prefill": "not in_chunks and not as_many_chunks",
    "lessons/test_11_preemption": "kernel or swap_blocks",
    "lessons/test_08_disagg": "kernel or hand_over or blocks_to_wire",
    "engine/sampling/guided/test_guided": "kernel",
    "lessons/test_12_multi_lora": "not small_pool and not thousand",
}


class Test(NamedTuple):
    name: str
    seconds: float  # of a processor
    places: frozenset[str]


def command(*arguments: Any) -> list[Any]:
    """pytest under the pretence."""
    path = f"import sys; sys.path[0] = {str(HERE)!r}\nimport pytest; sys.exit(pytest.main(sys.argv[1:]))"
    plugins = ["-p", "pretend_gpu", "-p", "as_if_on_gpu", "-p", "no:cacheprovider"]
    return [sys.executable, "-c", path, *plugins, "-q", "--tb=short", *arguments]


# --- Places, noted while tests run: this file as pytest's plugin ------------------------------------------------------


def processor_seconds() -> float:
    return sum(
        x.ru_utime + x.ru_stime for x in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    import pretend_gpu

    terminalreporter.line("launched: " + ", ".join(sorted(pretend_gpu.launched)))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    import pretend_gpu

    pretend_gpu.places = set() if "PLACES" in os.environ else None
    before = processor_seconds()
    try:
        return (yield)
    finally:
        if "PLACES" in os.environ:
            row = Test(item.nodeid, round(processor_seconds() - before, 2), frozenset(pretend_gpu.places))
            with open(os.environ["PLACES"], "a") as file:
                file.write(json.dumps(row._replace(places=sorted(row.places))) + "\n")


def launches() -> set[str]:
    """Which file has a line that launches which kernel."""
    found = set()
    for path in [
        *common.HERE.glob("[01]*.py"),
        *(common.HERE / "engine").rglob("*.py"),
        *(common.HERE / "lab").rglob("*.py"),
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Subscript(value=ast.Name(name))) if name.endswith("_kernel"):
                    found.add(f"{path.relative_to(common.HERE)} {name}")
    return found


# --- Enough of them ---------------------------------------------------------------------------------------------------


def enough(tests: Iterable[Test]) -> list[Test]:
    """Cheap tests that together reach every place that any reaches, by the order of their names."""
    left = set().union(*(test.places for test in tests))
    pool, chosen = list(tests), []
    while left:
        best = max(pool, key=lambda test: len(test.places & left) / (test.seconds + 0.05))
        chosen.append(best)
        left -= best.places
    for test in sorted(chosen, key=lambda test: -test.seconds):  # what others, chosen later, reach as well
        if test.places <= set().union(*(other.places for other in chosen if other is not test)):
            chosen.remove(test)
    return sorted(chosen, key=lambda test: test.name)


def chosen() -> list[str]:
    """The tests that are enough, as pytest names them."""
    return [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choose", action="store_true", help="write enough_on_gpu.txt")
    args = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        places = Path(folder) / "places"
        for name, expression in FILES.items():
            words = command("-k", expression, HERE / f"{name}.py")
            if subprocess.run(words, env={**os.environ, "PLACES": str(places)}, cwd=HERE.parent).returncode:
                failed.append(name)
        rows = [json.loads(line) for line in places.read_text().splitlines()]
    if failed:
        print("failed:", *failed)
        return 1
    if args.choose:
        tests = [Test(name, seconds, frozenset(places)) for name, seconds, places in rows]
        LIST.write_text("\n".join([HEAD, *(test.name for test in enough(tests))]) + "\n")
    return 0


HEAD = "# Tests that are run as if there were a GPU: enough to reach every place. Chosen by tests/as_if_on_gpu.py."

if __name__ == "__main__":
    sys.exit(main())
