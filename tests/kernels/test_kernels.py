"""Every Triton kernel of every lesson compiles for real GPUs, spills nothing, and uses tensor cores where it should.

New lessons are found by themselves: a kernel is whatever `@common.kernel` decorates, and it must be launched by its
examples in `support/launches.py`.
"""

from __future__ import annotations

import common

import functools
import json
import re
import sys

import pytest

from support import modules, needs, sass, scripts
from support.tiers import and_slowly

KERNELS = [
    (module, name)
    for module, path in modules.paths().items()
    for name in re.findall(r"^@common\.kernel\ndef (\w+)", path.read_text(), flags=re.M)
]
EVERYWHERE = ["sm_80", "sm_90", "sm_100", "gfx942"]
TARGETS = {"fast": ["sm_90", "gfx942"], "slow": EVERYWHERE, "long": EVERYWHERE}
# KiB of shared memory that one program may have: CUDA's programming guide, and CDNA 3's LDS. A launch above it fails.
SHARED = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "gfx942": 64}


def compile_job(tier: str) -> scripts.Job:
    return ("compile", tier), [sys.executable, common.ROOT / "tests" / "compile_kernels.py", tier]


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
    if row["overwritten"]:
        found.append(f"writes what the tensor cores may still read: {row['overwritten'][0]}")
    if row["fp64"] and not row["asks_for_fp64"]:
        found.append("computes in fp64, which its source never asks for: a constant too small or large for fp32?")
    return [f"{row['lesson']}:{row['kernel']} {row['target']} {row['dtype']} {row['arguments']}: {c}" for c in found]


def check(tier: str, lesson: str, kernel: str) -> None:
    errors = [row["error"] for row in compiled(tier) if row["lesson"] == lesson and "error" in row]
    assert not errors, errors[0]
    rows = [row for row in compiled(tier) if row["lesson"] == lesson and row["kernel"] == kernel]
    assert rows, f"{lesson}: its examples do not launch {kernel}"
    assert {row["target"] for row in rows} == set(TARGETS[tier])
    assert not [complaint for row in rows if "impossible" not in row for complaint in complaints(row)]


def test_kernels_are_found():
    assert len(KERNELS) >= 5


@needs.triton
@pytest.mark.parametrize(("lesson", "kernel"), KERNELS)
def test_kernel_compiles(lesson, kernel):
    check("fast", lesson, kernel)


@needs.triton
@pytest.mark.parametrize("tier", and_slowly([], [("slow",)], [("long",)]))
@pytest.mark.parametrize(("lesson", "kernel"), KERNELS)
def test_kernel_compiles_everywhere(lesson, kernel, tier):
    check(tier, lesson, kernel)


# --- Tiles that only an NVIDIA GPU gets: a wrapper on meta tensors does not know one ----------------------------------

ON_NVIDIA = r"""
import json, re, sys
sys.path.insert(0, sys.argv[1])
import compile_kernels as ck, common, torch
from engine import registry
flash, paged, gqa, chunked = map(registry.lesson, ("03_flash_attention", "02_paged_attention", "09_gqa",
                                                 "10_chunked_prefill"))
decode, unified, tiles = paged.decode_tiles, chunked.choose_tiles, flash.choose_tiles
tiles_of_gqa = gqa.decode_tiles
rows = []
for target, wrapper, kind, Hq, Hkv, D, longest in json.loads(sys.argv[2]):
    capability = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0), "gfx942": None}[target]
    paged.decode_tiles = lambda dtype, D, nvidia, rows=16: decode(dtype, D, capability is not None, rows)
    gqa.decode_tiles = lambda dtype, D, rows, _: tiles_of_gqa(dtype, D, rows, capability is not None)
    chunked.choose_tiles = lambda dtype, D, G, longest, _: unified(dtype, D, G, longest, capability)
    flash.choose_tiles = lambda dtype, D, window, _: tiles(dtype, D, window, capability)
    empty = lambda *shape, dtype=getattr(torch, kind): torch.empty(*shape, dtype=dtype, device="meta")
    q, k, cache = empty(32 * longest, Hq, D), empty(32 * longest, Hkv, D), empty(2, 4000, 16, Hkv, D)
    table, lens, loc = (empty(*shape, dtype=torch.int32) for shape in ((32, 1024), (32,), (33,)))
    with common.captured() as launches:
        match wrapper:
            case "paged_decode":
                paged.paged_decode(q, cache, table, lens, 16384)
            case "gqa_decode":
                gqa.gqa_decode(q, cache, table, lens, 16384)
            case "flash_attention" | "flash_attention_window":
                window = 1000 if wrapper == "flash_attention_window" else None
                flash.flash_attention(q, k, k, loc, loc, longest, longest, window=window)
            case "unified_attention":
                chunked.unified_attention(q, cache, table, loc.long(), lens, longest)
    compiled = ck.compile_launch(launches[0], ck.TARGETS[target])
    text = compiled.asm["ttgir"]
    loop = text[text.rindex("scf.for") :].partition("scf.yield")[0]
    buffers = re.findall(r"local_alloc : \(\) -> !ttg.memdesc<(\d+)x\d+x\d+xb?f", text)
    waits = re.findall(r"async_wait .*num = (\d+)", loop)
    rows.append({"buffers": [int(n) for n in buffers], "waits": [int(n) for n in waits],
                 "overwritten": ck.wgmma_races(compiled),
                 "spills": ck.resources(compiled, ck.TARGETS[target])["spills"], "shared": compiled.metadata.shared})
print(json.dumps(rows))
"""
DECODE, CHUNK = ("bfloat16", 32, 8, 128, 1), ("bfloat16", 32, 8, 128, 480)
HOPPER = [("sm_90", "gqa_decode", *DECODE), ("sm_90", "unified_attention", *CHUNK),
          ("sm_90", "flash_attention_window", "bfloat16", 9, 3, 64, 480)]  # fmt: skip
MORE_OF_HOPPER = [("sm_90", "paged_decode", *DECODE), ("sm_90", "unified_attention", *DECODE),
                  ("sm_90", "unified_attention", "float32", 32, 1, 128, 20),
                  ("sm_90", "flash_attention", *CHUNK)]  # fmt: skip
EVERYWHERE_BUT_AMD = ("sm_80", "sm_90", "sm_100")
LARGEST = [
    *((target, wrapper, "bfloat16", 16, 8, 256, 1) for target in EVERYWHERE_BUT_AMD
      for wrapper in ("paged_decode", "gqa_decode", "unified_attention")),
    *((target, "unified_attention", *CHUNK) for target in EVERYWHERE_BUT_AMD),
    ("sm_90", "unified_attention", "bfloat16", 16, 8, 256, 480),
    *(("sm_90", wrapper, "bfloat16", 32, 8, 256, 480) for wrapper in ("flash_attention", "flash_attention_window")),
    *((target, "unified_attention", "float32", 64, 1, 128, 20) for target in SHARED),
]  # fmt: skip
ELSEWHERE = [
    *((target, wrapper, *shape) for target in EVERYWHERE_BUT_AMD
      for wrapper in ("paged_decode", "gqa_decode", "unified_attention")
      for shape in (("bfloat16", 9, 3, 64, 1), ("float16", 32, 32, 128, 1))),
    *((target, "unified_attention", *shape) for target in EVERYWHERE_BUT_AMD
      for shape in (("bfloat16", 9, 3, 64, 480), ("bfloat16", 32, 8, 64, 480), ("float32", 9, 3, 64, 480))),
    *(("sm_90", wrapper, "bfloat16", 32, 8, D, 480) for wrapper in ("flash_attention", "flash_attention_window")
      for D in (64, 80, 128)),
    *((target, "unified_attention", "float32", *shape, 20) for target in SHARED
      for shape in ((32, 1, 128), (64, 1, 64), (128, 1, 64))),
]  # fmt: skip


def nvidia_job(cases: list) -> scripts.Job:
    return ("nvidia", json.dumps(cases)), [sys.executable, "-c", ON_NVIDIA, common.ROOT / "tests", json.dumps(cases)]


def compiled_on_nvidia(cases: list) -> list[dict]:
    done = scripts.get(nvidia_job(cases))
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    for case, row in zip(cases, rows, strict=True):
        assert row["spills"] == 0 and not row["overwritten"] and row["shared"] <= SHARED[case[0]] * 1024, (case, row)
    return rows


@needs.triton
@pytest.mark.parametrize("cases", and_slowly([HOPPER], [(MORE_OF_HOPPER,)]))
def test_keys_are_fetched_ahead_on_hopper(cases):
    """Two buffers or more for K and for V, and no wait in the loop for what was asked for last. A decode's tiles are so
    large that one buffer each does more: of three programs on an SM, two wait for theirs."""
    for case, row in zip(cases, compiled_on_nvidia(cases)):
        if case[-1] == 1:
            assert row["buffers"] == [1, 1] and 3 * (row["shared"] + 1024) <= 228 * 1024, (case, row)
        elif case[2] == "bfloat16" and not case[1].startswith("flash"):
            assert len(row["buffers"]) == 2 and min(row["buffers"]) >= 2 and min(row["waits"]) > 0, (case, row)


@needs.triton
@pytest.mark.parametrize("cases", and_slowly([], [(LARGEST,)], [(ELSEWHERE,)]))
def test_tiles_of_nvidia_everywhere(cases):
    for case, row in zip(cases, compiled_on_nvidia(cases)):
        if case[5] == 256 and case[-1] == 1:
            assert min(row["buffers"]) >= 2 and min(row["waits"]) > 0, (case, row)


# --- What a server's steps compile ----------------------------------------------------------------------------------

STEPS = r"""
import json, sys
sys.path.insert(0, sys.argv[1])
import compile_kernels as ck, common, torch
from engine import registry
paged, flash, chunked = map(registry.lesson, ("02_paged_attention", "03_flash_attention", "10_chunked_prefill"))
ck.triton.runtime.driver.set_active(ck.Driver(ck.TARGETS["sm_90"]))
empty = lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype, device="meta")
compiled = {}
for sequences, width, tokens in ((1, 1, 6), (3, 5, 7), (16, 16, 8)):
    q, k, cache = empty(sequences * tokens, 9, 64), empty(sequences * tokens, 3, 64), empty(2, 100, 16, 3, 64)
    table, lens = empty(sequences, width, dtype=torch.int32), empty(sequences, dtype=torch.int32)
    loc = empty(sequences + 1, dtype=torch.int32)
    with common.captured() as launches:
        paged.reshape_and_cache(k, k, cache, empty(len(k), dtype=torch.int64))
        paged.paged_decode(q[:sequences], cache, table, lens, 200)
        chunked.unified_attention(q, cache, table, loc, lens, 5)
        flash.flash_attention(q, k, k, loc, loc, tokens, tokens)
    for launch in launches:
        kernel = launch.kernel.fn.warmup(*launch.args, grid=launch.grid, **launch.kwargs)
        compiled.setdefault(launch.kernel.name, set()).add(kernel.hash)
print(json.dumps({name: len(hashes) for name, hashes in compiled.items()}))
"""
STEPS_JOB: scripts.Job = ("steps", 0), [sys.executable, "-c", STEPS, common.ROOT / "tests"]


@needs.triton
def test_steps_of_other_sizes_compile_nothing_new():
    """Neither one sequence nor sixteen, for which Triton would compile anew, hold up the requests of a step."""
    done = scripts.get(STEPS_JOB)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = json.loads(done.stdout.splitlines()[-1])
    assert len(compiled) == 4 and set(compiled.values()) == {1}, compiled


@pytest.mark.parametrize(
    "change",
    [{"spills": 8}, {"shared": 233000}, {"tensor_core": []}, {"dots": [["tf32", "f32"]]},
     {"dots": [["", "bf16"], ["tf32", "f32"]]}, {"fp64": True}, {"narrow": ["tt.addptr"]},
     {"overwritten": ["FFMA R88, R56, UR38, -R20"]}],
)  # fmt: skip
def test_complaints_can_fail(change):
    good = {
        "lesson": "x", "kernel": "k", "target": "sm_90", "dtype": "bfloat16", "arguments": {}, "spills": 0,
        "registers": 64, "shared": 232448, "dots": [["", "bf16"]], "tensor_core": ["wgmma.mma_async"],
        "fp64": False, "asks_for_fp64": False, "narrow": [],
        "overwritten": [],
    }  # fmt: skip
    assert complaints(good) == []
    assert complaints(good | change)


# A loop as Hopper runs it: the product reads R8 to R11 while the next turn begins.
TURN = """
        /*0000*/                   {first} ;
        /*0010*/                   WARPGROUP.ARRIVE ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR8].tnspB, R24, gsb0 ;
        /*0030*/                   {then} ;
        /*0040*/              @!P0 BRA 0x0 ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0060*/                   FADD R8, R24, R24 ;
        /*0070*/                   EXIT ;
"""
ANOTHER = "HGMMA.64x64x16.F32.BF16 R56, gdesc[UR4], RZ, !UPT, gsb0"


@pytest.mark.parametrize(
    ("first", "then", "found"),
    [("FADD R12, R9, R9", "NOP", []), ("FADD R11, R9, R9", "NOP", ["FADD R11, R9, R9"]),
     ("NOP", "LDS.128 R8, [R40]", ["LDS.128 R8, [R40]"]), ("NOP", "LDS.64 R6, [R40]", []),
     ("WARPGROUP.DEPBAR.LE gsb0, 0x0", "NOP", []), ("STS [R8], R9", "NOP", []),
     ("FADD R8, R9, R9", "WARPGROUP.DEPBAR.LE gsb0, 0x0", []),
     ("FADD R8, R9, R9", "WARPGROUP.DEPBAR.LE gsb0, 0x1", ["FADD R8, R9, R9"]),
     ("FADD R8, R9, R9", f"{ANOTHER} ;\n        /*0038*/  WARPGROUP.DEPBAR.LE gsb0, 0x1", [])],
)  # fmt: skip
def test_registers_that_a_product_still_reads(first, then, found):
    """A write before the wait is found, across the loop's end too; a later product's wait covers the earlier one."""
    assert sass.overwritten(TURN.format(first=first, then=then)) == found
