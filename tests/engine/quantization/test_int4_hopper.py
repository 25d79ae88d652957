"""Int4 on Hopper: it reads what was packed; its index arithmetic in torch, its machine code; on Hopper, its sums.

No interpreter runs Gluon. Without a Hopper GPU the kernel's own text runs on torch tensors, one program after another,
where layouts and barriers mean nothing; the compiler, which refuses a layout that does not fit, runs as well.
"""

from __future__ import annotations

import common

import itertools
import json
import subprocess
import sys
import types

import pytest
import torch

from lab import cli
from support import needs
from support.close import assert_close

page = cli.numbers("05b_quantization")
from engine.quantization import formats, packed_weight
from engine.quantization import int4_hopper as hopper
from engine.quantization.algorithms import rtn
from engine.quantization.dequant_matmul import dequant_matmul
from engine.quantization.linear import QuantizedLinear
from engine.quantization.packed_weight import PackedWeight, scale_words
from support.ptx import emulated_ptx

Format = formats.Format


def quantized(N, K, group=128, zero="int"):
    """Random codes, scales and zero points."""
    f = Format(f"int4-g{group}", "int", 4, group, "fp16", zero)
    scale = (torch.rand(N, K // group) + 0.5).half() / 64
    points = torch.randint(0, 16, scale.shape, dtype=torch.uint8) if zero else None
    return formats.Quantized(f, torch.randint(0, 16, (N, K), dtype=torch.uint8), scale, points)


def packed(q, device):
    weight = PackedWeight.pack(q.to(device))
    weight.words = scale_words(q.to(device))
    return weight


# --- Words ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", ["int", None])
@pytest.mark.parametrize(("N", "group"), [(1, 128), (40, 128), (130, 256), (16, 512)])
def test_words_hold_scales_and_zero_points_exactly(N, group, zero):
    q = quantized(N, 1024, group, zero)
    words = scale_words(q)
    assert words.dtype == torch.int32 and words.shape == (4 * -(-N // 16), 32)
    for n, g in itertools.product({0, 1, 5, 11, N - 1} & set(range(N)), range(8)):
        r = n % 16
        column = (r % 4) * 8 + (r // 4 % 2) * 4 + (r // 8) * 2 + g % 2
        word = words[g // 2 * -(-N // 16) + n // 16, column].item() & 0xFFFFFFFF
        low, high = (torch.tensor([half]).short() for half in (word & 0xFFFF, word >> 16))
        assert low.view(torch.float16).item() == q.scale[n, g * 128 // group].item()
        assert high.view(torch.bfloat16).item() == 128 + (8 if zero is None else q.zero[n, g * 128 // group].item())


def test_other_formats_have_no_words():
    for name in ("int4-g64", "q4_1", "int8", "fp8", "mxfp4", "q8_0"):
        assert scale_words(rtn(torch.randn(4, 768), formats.FORMATS[name])) is None
    assert scale_words(quantized(4, 384)) is None, "half a tile"
    assert scale_words(quantized(4, 768, 768)) is not None, "one scale a row"


def test_only_hopper_gets_words_and_only_what_it_can_read_is_taken(monkeypatch):
    q, x = quantized(128, 512), torch.zeros(20, 520, dtype=torch.bfloat16)
    assert PackedWeight.pack(q).words is None
    assert not hopper.takes(x[:1, :512], packed(q, "cpu"))
    for module in (packed_weight, hopper):
        monkeypatch.setattr(module, "on_hopper", lambda x: True)
    monkeypatch.setattr(common, "INTERPRET", False)
    weight = PackedWeight.pack(q)
    assert weight.words is not None
    assert hopper.takes(x[:1, :512], weight) and hopper.takes(x[4:20, 8:], weight)
    for wrong in (x[:0, :512], x[:17, :512], x[:1, 1:513], x[:1, :512].half(), x[:1, :512].float(),
                  torch.zeros(2, 513, dtype=torch.bfloat16)[:, :512], torch.zeros(512, 4, dtype=torch.bfloat16).T,
                  torch.zeros(1, 512, dtype=torch.bfloat16).expand(3, 512)):  # fmt: skip
        assert not hopper.takes(wrong, weight)
    assert not hopper.takes(x[:1, :512], PackedWeight.pack(quantized(127, 512)))
    assert not hopper.takes(x[:1, :512], PackedWeight.pack(rtn(torch.randn(4, 512), formats.FP8_BLOCKS)))
    monkeypatch.setattr(common, "INTERPRET", True)
    assert not hopper.takes(x[:1, :512], weight)


def test_splits():
    table = {(28672, 4096): (2, 3), (4096, 14336): (14, 14), (4096, 4096): (8, 8), (6144, 4096): (8, 8),
             (128256, 4096): (1, 1), (3072, 512): (1, 1), (576, 1536): (3, 3), (8, 256): (1, 1)}  # fmt: skip
    assert {size: tuple(hopper.choose_split(*size, M) for M in (8, 9)) for size in table} == table
    for N, tiles, M in itertools.product((1, 128, 500, 4096, 30000), range(1, 80), (1, 16)):
        split = hopper.choose_split(N, 256 * tiles, M)
        share = -(-tiles // split)
        assert 1 <= split <= 16 and share * (split - 1) < tiles and (share >= 2 or tiles == 1)


# --- The kernel's own text on torch -----------------------------------------------------------------------------------


class Tile(torch.Tensor):
    """A tensor that knows the methods of Gluon's, as far as the kernel calls them."""

    def to(self, kind, bitcast=False):
        found = self.as_subclass(torch.Tensor)
        return (found.contiguous().view(kind) if bitcast else found.to(kind)).as_subclass(Tile)


class Stage:
    """A stage of a tensor's ring in shared memory, or of its counters."""

    def __init__(self):
        self.content, self.awaited, self.arrived, self.turns = torch.empty(0), 0, 0, 0

    def load(self, layout):
        return self.content.clone().as_subclass(Tile)


class Memory(list):
    """Shared memory."""

    def index(self, i):
        return self[i]


def copy_tile(source, at, counter, target, wanted):
    """What TMA does: what lies beyond the tensor is zero."""
    if wanted:
        target.content = torch.zeros(source.block, dtype=source.tensor.dtype)
        inside = source.tensor[at[0] : at[0] + source.block[0], at[1] : at[1] + source.block[1]]
        target.content[: inside.shape[0], : inside.shape[1]] = inside
        counter.arrived += target.content.numel() * target.content.element_size()


def expect(counter, nbytes, wanted):
    counter.awaited += nbytes if wanted else 0


def wait(counter, phase):
    assert counter.arrived == counter.awaited > 0 and phase == counter.turns % 2, "waits for ever, or not at all"
    counter.arrived, counter.awaited, counter.turns = 0, 0, counter.turns + 1


def assembly(asm, constraints, args, dtype, is_pure, pack):
    halves = emulated_ptx(asm, constraints, [args[0].as_subclass(torch.Tensor).flatten()], dtype, is_pure, pack)
    return halves.view(args[0].shape).as_subclass(Tile)


def store(pointer, values, mask):
    out, (place, values, mask) = pointer.out, torch.broadcast_tensors(pointer.place, values, mask)
    assert out[place[mask]].isnan().all(), "written twice"
    out[place[mask]] = values[mask].as_subclass(torch.Tensor)


class Out:
    """A pointer to the output."""

    def __init__(self, out):
        self.out, self.dtype = out, types.SimpleNamespace(element_ty=out.dtype)

    def __add__(self, place):
        return types.SimpleNamespace(out=self.out, place=place.as_subclass(torch.Tensor))


class Number(int):
    """A scalar of the kernel's."""

    def to(self, kind):
        return self


def product(w, x, acc):
    assert w.dtype == x.dtype == torch.bfloat16
    return (acc + w.float() @ x.float()).as_subclass(Tile)


def plain(fn):
    """The Python function under a compiled one."""
    return getattr(fn, "fn", fn)


@pytest.fixture
def gluon_on_torch(monkeypatch):
    """`run(x, weight)` -> the parts that all programs write, by the kernel's text and the wrapper's grid."""
    ids, stages = [0, 0], []

    def tile(make):
        return lambda shape, *a: make(tuple(shape), *a[:-1]).as_subclass(Tile)

    language = types.SimpleNamespace(
        constexpr=None, uint8=torch.uint8, int16=torch.int16, int32=torch.int32, int64=torch.int64,
        float16=torch.float16, float32=torch.float32, bfloat16=torch.bfloat16, minimum=min,
        static_range=range, program_id=lambda i: Number(ids[i]), inline_asm_elementwise=assembly,
        reshape=lambda t, shape: t.reshape(shape), permute=lambda t, order: t.permute(order),
        split=lambda t: t.unbind(-1), convert_layout=lambda t, layout, assert_trivial: t, store=store,
        zeros=tile(lambda shape, kind: torch.zeros(shape, dtype=kind)),
        full=tile(lambda shape, value, kind: torch.full(shape, value, dtype=kind)),
        arange=lambda a, b, layout: torch.arange(a, b).as_subclass(Tile),
        allocate_shared_memory=lambda kind, shape, layout: stages.append(Memory(Stage() for _ in range(shape[0])))
        or stages[-1],
        **dict.fromkeys(("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "DistributedLinearLayout"),
                        lambda *a: None),
    )  # fmt: skip
    barriers = types.SimpleNamespace(expect=expect, wait=wait, init=lambda *a: None, MBarrierLayout=lambda: None)
    for name, value in {"gl": language, "mbarrier": barriers, "mma_v2": product, "copy_tile": copy_tile,
                        "fence_async_shared": lambda: None, "meet": lambda: None}.items():  # fmt: skip
        monkeypatch.setattr(hopper, name, value, raising=False)
    kernel = plain(hopper.int4_kernel)
    for name in ("announce", "fetch", "decode_half", "add_group"):
        monkeypatch.setattr(hopper, name, plain(getattr(hopper, name)))

    def run(x, weight):
        (M, K), N = x.shape, len(weight.codes)
        block_m, split_k = 8 if M <= 8 else 16, hopper.choose_split(N, K, M)
        out = torch.full((split_k * M * N,), float("nan"))
        source = lambda tensor, *block: types.SimpleNamespace(tensor=tensor, block=block, layout=None)  # noqa: E731
        for ids[0], ids[1] in itertools.product(range(-(-N // 128)), range(split_k)):
            kernel(source(weight.codes, 128, 128), source(weight.words, 8, 32), source(x, block_m, 256), Out(out),
                   M, N, K, split_k, 128, block_m, 2)  # fmt: skip
            assert not any(stage.awaited or stage.arrived for ring in stages for stage in ring), "fetched for nobody"
        return out.view(split_k, M, N)

    return run


@pytest.mark.parametrize(("M", "N", "K", "group", "zero"), [
    (1, 128, 256, 128, "int"), (3, 72, 768, 256, None), (9, 130, 1536, 128, "int"), (16, 40, 512, 512, "int"),
])  # fmt: skip
def test_codes_meet_their_inputs(M, N, K, group, zero, gluon_on_torch):
    """Permutations of k, rows, words and stages; tiles that end beyond N and M; shares of k."""
    q = quantized(N, K, group, zero)
    x = torch.randn(M, K).bfloat16()
    parts = gluon_on_torch(x, packed(q, "cpu"))
    assert parts.isfinite().all()
    assert_close(parts.sum(0), (x.double() @ q.dequantize().double().T).float())


# --- Compiled for Hopper --------------------------------------------------------------------------------------------

COMPILE = """
import json, re, sys
sys.path.insert(0, sys.argv[1])
import compile_kernels as ck, common, torch, triton
from support import sass
from engine.quantization import int4_hopper as hopper
from engine.quantization.formats import FORMATS
rows, kernel = [], hopper.int4_kernel
empty = lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype, device="meta")


class Recorder:
    def __getitem__(self, grid):
        return lambda *args, **options: rows.append(kernel.warmup(*args, grid=grid, **options))


def loop(text):
    code = [(int(m[1], 16), m[3], m[4]) for m in sass.INSTRUCTION.finditer(text)]
    turns = [(int(m[1], 16), at) for at, op, rest in code if op == "BRA" and (m := re.search(r"0x([0-9a-f]+)", rest))]
    bodies = [[op for at, op, _ in code if a <= at <= b] for a, b in turns if a < b]
    return max((body for body in bodies if "EXIT" not in body), key=len)


hopper.int4_kernel = Recorder()
triton.runtime.driver.set_active(ck.Driver(ck.TARGETS["sm_90"]))
f = FORMATS["int4-g128"]
for M, N, K in ((1, 4096, 14336), (16, 4096, 14336), (5, 1, 256), (9, 1000, 512)):
    words = empty(K // 256 * -(-N // 16), 32, dtype=torch.int32)
    hopper.int4_matmul(empty(M, K), hopper.PackedWeight(f, K, empty(N, K // 2, dtype=torch.uint8), None, None,
                                                        words=words))
found = []
for compiled in rows:
    body = loop(ck.dump(compiled, "-sass"))
    found.append({**ck.resources(compiled, ck.TARGETS["sm_90"]), "shared": compiled.metadata.shared, "loop": len(body),
                  "HMMA": sum(op.startswith("HMMA") for op in body), "STS": sum(op.startswith("STS") for op in body),
                  "LDG": sum(op.startswith("LDG") for op in body), "SHFL": sum(op.startswith("SHFL") for op in body),
                  "LDS": [op for op in body if op.startswith("LDS")], "BAR": sum(op.startswith("BAR") for op in body),
                  "TMA": sum(op.startswith("UTMALDG") for op in body)})
print(json.dumps(found))
"""


@needs.triton
@pytest.mark.slow
def test_the_loop_decodes_and_multiplies_and_does_little_else():
    """sm_90: no spill, four or five programs to an SM, nothing but 16-byte loads from shared memory, none from global
    memory, no exchange between threads; and as many instructions as the lesson says."""
    command = [sys.executable, "-c", COMPILE, common.ROOT / "tests"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    few, many, *others = json.loads(done.stdout.splitlines()[-1])
    assert len(others) == 2 and not any(row["spills"] for row in others), "odd sizes, and bf16 written at once"
    for row, programs, tokens in ((few, 5, 8), (many, 4, 16)):
        assert row["spills"] == 0, row
        assert programs * 128 * row["registers"] <= 65536 and programs * (row["shared"] + 1024) <= 228 * 1024, row
        assert row["STS"] == row["LDG"] == row["SHFL"] == 0 and set(row["LDS"]) == {"LDS.128"}, row
        assert len(row["LDS"]) == 8 + 2 + tokens, "codes, words, x"
        assert row["HMMA"] == 6 * tokens and row["TMA"] == 3 and row["BAR"] <= 4, row
    instructions, codes = page.LOOPS["hopper"]
    assert codes == 128 * 256 and abs(few["loop"] - instructions) <= 10, few["loop"]


# --- On Hopper ------------------------------------------------------------------------------------------------------


@needs.hopper
@pytest.mark.parametrize("N", [128, 200, 1000])
def test_sums_on_hopper(N, guarded, device):
    """Parts and whole, on both sides of a tile of tokens; x, codes and words lie between NaN and sentinels."""
    wrong = []
    for K, group, zero in itertools.product((256, 1536, 4096), (128, 256), ("int", None)):
        q = quantized(N, K, group, zero)
        weight = PackedWeight.pack(q.to(device))
        weight.codes, weight.words = guarded(weight.codes), guarded(weight.words)
        W = q.dequantize().to(device)
        for M in (1, 5, 8, 9, 16):
            memory = torch.full((M + 20, K + 16), float("nan"), dtype=torch.bfloat16, device=device)
            x = memory[3 : M + 3, 8 : K + 8].copy_(torch.randn(M, K))
            assert hopper.takes(x, weight)
            reference = x.double() @ W.double().T
            parts = hopper.int4_matmul(x, weight).float().sum(0)
            allowed = common.TOLERANCE[torch.float32 if hopper.choose_split(N, K, M) > 1 else torch.bfloat16]
            for name, out, bound in (("parts", parts, allowed), ("layer", dequant_matmul(x, weight), 2e-2)):
                if not (error := common.relative_error(out, reference)) <= bound:
                    worst = (out.double() - reference).abs().amax(0).nan_to_num(9e9).topk(min(4, N)).indices.tolist()
                    wrong.append((name, M, K, group, zero, error, "worst outputs", worst))
    assert not wrong


@needs.hopper
@pytest.mark.parametrize("M", [1, 16])
def test_large_layers_on_hopper_equal_the_plain_kernel(M, device, monkeypatch):
    """An 8B model's layers, twice and in a CUDA graph: the same bits each time, and the plain kernel's sums."""
    for N, K in ((28672, 4096), (4096, 14336), (4096, 4096)):
        weight = PackedWeight.pack(quantized(N, K).to(device))
        x = torch.randn(M, K, device=device).bfloat16()
        out = dequant_matmul(x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = dequant_matmul(x, weight)
        for _ in range(20):
            graph.replay()
            assert torch.equal(again, out)
        with monkeypatch.context() as patch:
            patch.setattr(hopper, "takes", lambda *_: False)
            assert_close(out, dequant_matmul(x, weight))


@needs.hopper
def test_a_layer_runs_it(device, monkeypatch):
    calls, run = [], hopper.int4_matmul
    monkeypatch.setattr(hopper, "int4_matmul", lambda *a: calls.append(a) or run(*a))
    layer = QuantizedLinear(quantized(256, 512).to(device))
    for M, kind, taken in ((1, torch.bfloat16, True), (17, torch.bfloat16, False), (1, torch.float16, False)):
        calls.clear()
        layer(torch.randn(M, 512, device=device).to(kind))
        assert bool(calls) == taken
