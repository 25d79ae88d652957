"""Compile every kernel of every lesson for real GPUs, without one.

    python tests/compile_kernels.py fast|slow|long [LESSON …]

`support/launches.py` calls each wrapper on meta tensors; what it would launch is recorded and handed
to Triton's compiler exactly as a launch there would (specialised on strides, alignment and constants).
Fast is one launch of each kernel. Slow is the largest launch of each of its ways (its flags) in bf16 on Hopper and on
AMD's, in fp32 on AMD's, where shared memory is least; and of each kernel the largest for the rest. Long is every launch
for every GPU.
Prints one JSON list: lesson, kernel, target, dtype, registers, spills, shared memory, tensor-core instructions.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # kernels here are compiled, never interpreted
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "vllm"))

import common

import torch
import triton
from triton.backends.compiler import GPUTarget

from support import modules, sass
from support.launches import EXAMPLES

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TIERS: dict[str, list[tuple[torch.dtype, list[str], str]]] = {
    "fast": [(torch.bfloat16, ["sm_90", "gfx942"], "first")],
    "slow": [
        (torch.bfloat16, ["sm_90", "gfx942"], "ways"),
        (torch.float32, ["gfx942"], "ways"),
        (torch.float32, ["sm_80"], "last"),
        (torch.bfloat16, ["sm_80", "sm_100"], "last"),
    ],
    "long": [
        (torch.float32, list(TARGETS), "all"),
        (torch.bfloat16, list(TARGETS), "all"),
        (torch.float16, ["sm_90"], "all"),  # as wide as bfloat16, and no harder
    ],
}
TENSOR_CORE = re.compile(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync|v_s?mfmac?_\w+)")
# One dot of Triton's IR: its input precision (empty: ieee) and the element type of its first operand.
DOT = re.compile(r"tt\.dot(?:_scaled)? [^:\n]*?(?:inputPrecision = (\w+))?[^:\n]*? : tensor<[\dx]+x(\w+)>")


# One line of Triton's IR: the value that it makes, the operation, what follows.
VALUE = re.compile(r"^\s*%(\S+) = (\S+) (.*?)(?: loc\(.*)?$", re.M)


def narrow_offsets(ttir: str) -> list[str]:
    """Additions to a pointer of a product that is computed in 32 bits from a number that was loaded: a block's id times
    the elements of a block. A cache may hold more than 2^31 of them, and what a table holds, no argument's type tells.
    """
    loaded, products, found = set(), set(), []
    for value, operation, rest in VALUE.findall(ttir):
        operands, kind = set(re.findall(r"%([\w#]+)", rest)), rest.rpartition(" : ")[2].rpartition("->")[2]
        if operation == "tt.load" and "ptr<i32>" in kind:
            loaded.add(value)
        elif operation == "tt.addptr" and operands & products:
            found.append(f"{operation} {rest}")
        elif operation == "arith.muli" and "i32" in kind and operands & (loaded | products):
            products.add(value)
        elif operation not in ("tt.load", "tt.addptr", "arith.divsi", "arith.remsi", "arith.cmpi"):
            if operands & products:
                products.add(value)
            if operands & loaded and "i32" in kind:
                loaded.add(value)
    return found


class Driver:
    """Answers Triton's questions about the GPU with a target that is not here."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def lessons() -> list[str]:
    return [name for name, path in modules.paths().items() if "@common.kernel" in path.read_text()]


def kernels(name: str) -> dict[str, common.Kernel]:
    """The launchable kernels that a module defines itself (not those it borrows from an earlier one)."""
    found = vars(modules.load(name)).values()
    return {k.name: k for k in found if isinstance(k, common.Kernel) and k.__module__ in (name, "__main__")}


def compile_launch(launch: common.Launch, target: GPUTarget) -> Any:
    triton.runtime.driver.set_active(Driver(target))
    launch.kernel.fn.device_caches.clear()  # Triton keys its cache by device number, and here every GPU is number 0
    return launch.kernel.fn.warmup(*launch.args, grid=launch.grid, **launch.kwargs)


def resources(compiled: Any, target: GPUTarget) -> dict[str, int]:
    """Registers per thread and bytes per thread that they spill to memory, from the assembler. (AMD's scalar registers
    spill into lanes of vector registers, which are no memory.)
    """
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        count = {k: int(v) for k, v in re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", text)}
        return {"registers": count["vgpr_count"], "spills": count["private_segment_fixed_size"]}
    field = {k: int(v) for k, v in re.findall(r"(\w+):(\d+)", dump(compiled, "-res-usage"))}
    return {"registers": field["REG"], "spills": field["LOCAL"] + field.get("STACK", 0)}


def dump(compiled: Any, what: str) -> str:
    """What NVIDIA's `cuobjdump` says of the machine code."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([tools / "cuobjdump", what, file.name], capture_output=True, text=True, check=True).stdout


def wgmma_races(compiled: Any) -> list[str]:
    return sass.overwritten(dump(compiled, "-sass")) if "wgmma" in compiled.asm.get("ptx", "") else []


def impossible(launch: common.Launch, target: str) -> str | None:
    """Why a target cannot run this launch at all, if so."""
    tensors = [x for x in (*launch.args, *launch.kwargs.values()) if isinstance(x, torch.Tensor)]
    if target == "sm_80" and any(x.dtype == torch.float8_e4m3fn for x in tensors):
        return "Triton has no e4m3 before sm_89"
    return None


def flags(launch: common.Launch) -> tuple[Any, ...]:
    """What chooses a kernel's code and is no size."""
    return tuple(sorted((name, x) for name, x in launch.kwargs.items() if isinstance(x, bool | str)))


def report(name: str, dtype: torch.dtype, targets: list[str], which: str = "all") -> list[dict[str, Any]]:
    """Compile what EXAMPLES[name] launches: all of it, the first or last launch of each kernel, or the last of each of
    its ways. The last has an 8B Llama's shapes."""
    with common.captured() as launches:
        EXAMPLES[name](modules.load(name), dtype)
    if which != "all":
        ordered = reversed(launches) if which == "first" else launches
        key = flags if which == "ways" else lambda launch: ()
        launches = list({(launch.kernel.name, key(launch)): launch for launch in ordered}.values())
    rows = []
    for launch in launches:
        for target in targets:
            if why := impossible(launch, target):
                rows.append({"lesson": name, "kernel": launch.kernel.name, "target": target, "impossible": why})
                continue
            compiled = compile_launch(launch, TARGETS[target])
            text = compiled.asm.get("ptx") or compiled.asm.get("amdgcn")
            rows.append({
                "lesson": name, "kernel": launch.kernel.name, "target": target, "dtype": str(dtype).split(".")[-1],
                "arguments": {k: v for k, v in launch.kwargs.items() if isinstance(v, (int, bool, str))},
                "dots": sorted(set(DOT.findall(compiled.asm["ttir"]))),
                "narrow": narrow_offsets(compiled.asm["ttir"]),
                "fp64": "f64" in compiled.asm["ttir"], "asks_for_fp64": "tl.float64" in launch.kernel.fn.src,
                "tensor_core": sorted(set(TENSOR_CORE.findall(text))), "shared": compiled.metadata.shared,
                "overwritten": wgmma_races(compiled), **resources(compiled, TARGETS[target]),
            })  # fmt: skip
    return rows


def main() -> None:
    tier, names = sys.argv[1], sys.argv[2:] or lessons()
    rows: list[dict[str, Any]] = []
    for name in names:
        if not kernels(name):
            continue
        try:
            for dtype, targets, which in TIERS[tier]:
                rows += report(name, dtype, targets, which)
        except Exception:  # one lesson's failure must not hide the others' results
            rows.append({"lesson": name, "error": traceback.format_exc(limit=-4)})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
