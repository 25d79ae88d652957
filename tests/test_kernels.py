"""Every Triton kernel of every lesson compiles for real GPUs, spills nothing, and uses tensor cores where it should.

New lessons are found by themselves: a kernel is whatever `@common.kernel` decorates, and it must be launched by its
lesson's `example_launches`.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path

import common
import pytest
import scripts

KERNELS = [
    (path.stem, name)
    for path in sorted(common.HERE.glob("[01]*.py"))
    for name in re.findall(r"^@common\.kernel\ndef (\w+)", path.read_text(), flags=re.M)
]
TARGETS = {"fast": ["sm_90", "gfx942"], "all": ["sm_80", "sm_90", "sm_100", "gfx942"]}
# KiB of shared memory that one program may have: CUDA's programming guide, and CDNA 3's LDS. A launch above it fails.
SHARED = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "gfx942": 64}

needs_triton = pytest.mark.skipif(not common.HAS_TRITON, reason="no Triton wheel on this platform: nothing to compile")


def compile_job(tier: str) -> scripts.Job:
    return ("compile", tier), [sys.executable, Path(__file__).with_name("compile_kernels.py"), tier]


@functools.cache
def compiled(tier: str) -> list[dict]:
    done = scripts.get(compile_job(tier))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def complaints(row: dict) -> list[str]:
    """What is wrong with one compiled kernel."""
    found = []
    if row["spills"]:
        found.append(f"spills {row['spills']} bytes ({row['registers']} registers)")
    if row["shared"] > SHARED[row["target"]] * 1024:
        found.append(f"needs {row['shared']} bytes of shared memory, there are {SHARED[row['target']]} KiB")
    low_precision = [kind for _, kind in row["dots"] if kind != "f32"]
    if low_precision and not row["tensor_core"]:
        found.append(f"a dot of {low_precision} uses no tensor-core instruction")
    if any(kind == "f32" and precision not in ("", "ieee") for precision, kind in row["dots"]):
        found.append("an fp32 dot is rounded to tf32: say input_precision='ieee'")
    if row["narrow"] and row["lesson"] != "12_multi_lora":  # there, of a step's rows and of slots: never many
        found.append(f"an address is computed in 32 bits from what was loaded: {row['narrow'][0]}")
    if row["fp64"] and not row["asks_for_fp64"]:
        found.append("computes in fp64, which its source never asks for: a constant too small or large for fp32?")
    return [f"{row['lesson']}:{row['kernel']} {row['target']} {row['dtype']} {row['arguments']}: {c}" for c in found]


def check(tier: str, lesson: str, kernel: str) -> None:
    errors = [row["error"] for row in compiled(tier) if row["lesson"] == lesson and "error" in row]
    assert not errors, errors[0]
    rows = [row for row in compiled(tier) if row["lesson"] == lesson and row["kernel"] == kernel]
    assert rows, f"{lesson}: example_launches() does not launch {kernel}"
    assert {row["target"] for row in rows} == set(TARGETS[tier])
    assert not [complaint for row in rows if "impossible" not in row for complaint in complaints(row)]


def test_kernels_are_found():
    assert len(KERNELS) >= 5


@needs_triton
@pytest.mark.job(compile_job("fast"))
@pytest.mark.parametrize(("lesson", "kernel"), KERNELS)
def test_kernel_compiles(lesson, kernel):
    check("fast", lesson, kernel)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(("lesson", "kernel"), KERNELS)
def test_kernel_compiles_everywhere(lesson, kernel):
    check("all", lesson, kernel)


@pytest.mark.parametrize(
    "change",
    [{"spills": 8}, {"shared": 233000}, {"tensor_core": []}, {"dots": [["tf32", "f32"]]},
     {"dots": [["", "bf16"], ["tf32", "f32"]]}, {"fp64": True}, {"narrow": ["tt.addptr"]}],
)  # fmt: skip
def test_complaints_can_fail(change):
    good = {
        "lesson": "x", "kernel": "k", "target": "sm_90", "dtype": "bfloat16", "arguments": {}, "spills": 0,
        "registers": 64, "shared": 232448, "dots": [["", "bf16"]], "tensor_core": ["wgmma.mma_async"],
        "fp64": False, "asks_for_fp64": False, "narrow": [],
    }  # fmt: skip
    assert complaints(good) == []
    assert complaints(good | change)
