"""Four-bit weights on an H100 or H200: `dequant_matmul`'s kernel once more, where instructions are scarce.

Owns the kernel in Gluon and when it is taken; called by `dequant_matmul`, which serves every other machine and format.
It never packs: `packed_weight.scale_words` has put scales and zeros in its order.
vLLM: `csrc/quantization/machete/`, `vllm/model_executor/kernels/linear/mixed_precision/machete.py`.
"""

# A kernel takes pointers, strides and constants: many arguments.
# ruff: noqa: PLR0913

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used
from common import triton

import types

import torch

from engine.quantization.packed_weight import PackedWeight, on_hopper

if common.HAS_TRITON:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2, tma

    copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # newer Triton's name, Triton 3.6's
    meet = getattr(gl, "barrier", None) or gl.thread_barrier  # of a program's threads
else:
    gluon = types.SimpleNamespace(jit=lambda fn=None, **_: fn or (lambda fn: fn))

MOST_ROWS = 16  # tokens: with the sums of more in registers, four programs do not fit on an SM
BLOCK_N, TILE_K, STAGES = 128, 256, 2  # two stages a program, but four or five programs on an SM: ten tiles under way
SMS = 132

# --- The kernel -----------------------------------------------------------------------------------------------------
#
# An int4 layer reads about a quarter of bf16's bytes. Before it can be three times as fast, each code must become a
# number, and time for that is short. 4.8 TB/s are 36 GB/s for each of an H200's 132 SMs: at three times bf16's speed
# there are 4.6 instruction slots per weight (4 schedulers, 32 lanes, 1.98 GHz). An A10's 72 SMs get 8 GB/s each, which
# leaves 17. The plain kernel takes 3.3 and then waits at barriers; this one takes 1.7. Four ideas:
#
#   1. Addresses cost nothing. The copy engine (TMA) fetches whole tiles into a ring of stages in shared memory. A
#      counter there (mbarrier) knows how many bytes are still under way; threads wait for it, for no load of theirs.
#   2. Nothing moves between threads. Each thread reads 16 bytes of a row and keeps them: these 32 codes are its operand
#      of the tensor cores, if k is permuted. A sum over k is the same in any order, as long as x is permuted alike.
#   3. A code put into the last bits of bf16's 128 is 128 + code, exactly: seven instructions for eight weights.
#   4. Nothing is subtracted. s·Σ x·(q − z) = s·(Σ x·(128 + q) − (128 + z)·Σ x), and Σ x is one more product, with ones.
#
# It is written in Gluon: Triton's compiler with the layouts chosen by hand. No interpreter runs it. Marlin (Frantar et
# al. 2024) has ideas 2 and 3; NVIDIA's PTX manual describes `mma.m16n8k16`, `cp.async.bulk.tensor` and `mbarrier`.
#
# A tile is 128 outputs × 256 inputs, so a row has 128 bytes of codes and two groups, a and b. As in the plain
# kernel, 16 bytes hold inputs 0–15 in their low halves and 16–31 in their high halves.
#
# Whose codes? In the accumulator's layout lane l of a warp has rows l/4 and l/4 + 8 of 16, and of each product's 16
# inputs those in four places that depend on l mod 4. Let lane l hold chunk l mod 4 (16 bytes, 32 inputs) of each group:
# all it needs is in its registers, and the four places are neighbours in a chunk. In bits of the input's number,
#
#     group · chunk (2 bits) · half of a byte · byte (4 bits: 3 2 1 0)     becomes
#     group and half (a call of the tensor cores each) · byte 3 2 (its four products) · byte 1 · chunk · byte 0
#
# and each side's `permute` says so. `assert_trivial` makes the compiler refuse whatever would move between threads.
#
# Banks. TMA writes chunk c of row r to place c XOR (r mod 8): eight lanes that read chunks 0–3 of rows 0 and 1 would
# collide, of rows 0 and 4 they do not. So the accumulator's row a of 8 is the tile's row (a >> 1) + 4·(a & 1), and
# the output's address undoes it.


@gluon.jit
def announce(counters, stage, wanted, N: gl.constexpr, M: gl.constexpr):
    """How many bytes a stage waits for. One counter for each tensor: else Triton puts a barrier between the copies."""
    mbarrier.expect(counters[0].index(stage), N * 128, wanted)
    mbarrier.expect(counters[1].index(stage), N * 8, wanted)
    mbarrier.expect(counters[2].index(stage), M * 512, wanted)


@gluon.jit
def fetch(sources, targets, counters, stage, tile, row, word, wanted):
    copy_tile(sources[0], [row, tile * 128], counters[0].index(stage), targets[0].index(stage), wanted)
    copy_tile(sources[1], [word, 0], counters[1].index(stage), targets[1].index(stage), wanted)
    copy_tile(sources[2], [0, tile * 256], counters[2].index(stage), targets[2].index(stage), wanted)


@gluon.jit
def decode_half(q, HALF: gl.constexpr):
    """128 + code of the low (HALF 0) or high halves of bytes [N, 128]: the weights of group a and of group b."""
    w = gl.inline_asm_elementwise(
        "{ .reg .b32 t; shr.b32 t, $2, " + ("4" if HALF else "0") + "; and.b32 t, t, 0x0F0F0F0F; "
        "prmt.b32 $0, t, 0x43434343, 0x4140; prmt.b32 $1, t, 0x43434343, 0x4342; }",
        "=r,=r,r",
        [q],
        gl.bfloat16,
        True,
        4,
    )
    w = gl.reshape(w, [q.shape[0] // 8, 2, 4, 2, 4, 4, 2, 2])  # row: 3–6, 2, 0–1; group, chunk, byte: 3–2, 1, 0
    return gl.split(gl.permute(w, [0, 2, 1, 5, 6, 4, 7, 3]))


@gluon.jit
def add_group(acc, word, w_low, w_high, x_low, x_high, ACC: gl.constexpr):
    """acc + s·(Σ x·(128 + q) − (128 + z)·Σ x)."""
    W: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    X: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    part, total = gl.zeros(acc.shape, gl.float32, ACC), gl.zeros(acc.shape, gl.float32, ACC)
    ones = gl.full([acc.shape[0], 64], 1.0, gl.bfloat16, W)
    for half in gl.static_range(2):
        w = gl.convert_layout(gl.reshape(w_high if half else w_low, [acc.shape[0], 64]), W, assert_trivial=True)
        x = gl.convert_layout(gl.reshape(x_high if half else x_low, [64, acc.shape[1]]), X, assert_trivial=True)
        part, total = mma_v2(w, x, part), mma_v2(ones, x, total)
    word = gl.convert_layout(word, gl.SliceLayout(1, ACC), assert_trivial=True)
    s = word.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    z = (word & -65536).to(gl.float32, bitcast=True)  # bf16's bits are fp32's upper half
    return acc + s[:, None] * (part - z[:, None] * total)


@gluon.jit(do_not_specialize=["M", "SPLIT_K"])
def int4_kernel(codes, words, x, out, M, N, K, SPLIT_K, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr,
                STAGES: gl.constexpr):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    # Layouts: where each bit of a thread's registers, of its lane and of its warp points to, [row, column].
    CODES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 64], [8, 0], [64, 0]],
        [[0, 16], [0, 32], [4, 0], [1, 0], [2, 0]],
        [[16, 0], [32, 0]],
        [],
        [BLOCK_N, 128],
    )
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [4, 0]], [[0, 0], [0, 0], [0, 4], [0, 8], [0, 16]], [[1, 0], [2, 0]], [], [8, 32]
    )
    X: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 128]] + ([[8, 0]] if BLOCK_M == 16 else []),
        [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]],
        [[0, 0], [0, 0]],
        [],
        [BLOCK_M, 256],
    )
    row, split = gl.program_id(0) * BLOCK_N, gl.program_id(1)
    share = (K // 256 + SPLIT_K - 1) // SPLIT_K
    begin = split * share
    end = gl.minimum(begin + share, K // 256)
    word, words_of_tile = row // 16, (N + 15) // 16
    sources, targets = (
        (codes, words, x),
        (
            gl.allocate_shared_memory(gl.uint8, [STAGES, BLOCK_N, 128], codes.layout),
            gl.allocate_shared_memory(gl.int32, [STAGES, 8, 32], words.layout),
            gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, 256], x.layout),
        ),
    )
    counters = (
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for i in gl.static_range(STAGES):
        for j in gl.static_range(3):
            mbarrier.init(counters[j].index(i), 1)
    fence_async_shared()
    meet()
    for i in gl.static_range(STAGES):
        tile = begin + i
        announce(counters, i, tile < end, BLOCK_N, BLOCK_M)
        fetch(sources, targets, counters, i, tile, row, word + tile * words_of_tile, tile < end)
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
    for tile in range(begin, end):
        turn, later = tile - begin, tile + STAGES
        stage = turn % STAGES
        for j in gl.static_range(3):
            mbarrier.wait(counters[j].index(stage), turn // STAGES & 1)
        announce(counters, stage, later < end, BLOCK_N, BLOCK_M)
        q, s = targets[0].index(stage).load(CODES), targets[1].index(stage).load(WORDS)
        v = targets[2].index(stage).load(X)
        meet()  # all have read: the stage is free
        fetch(sources, targets, counters, stage, later, row, word + later * words_of_tile, later < end)
        s = gl.permute(gl.reshape(s, [2, 4, 8, 2, 2]), [0, 1, 3, 2, 4])  # row: 6, 4–5, 0–2, 3; group
        s_a, s_b = gl.split(gl.reshape(s, [BLOCK_N, 2]))
        v = gl.reshape(v, [BLOCK_M, 2, 4, 2, 4, 2, 2])  # token, group, chunk, half, byte: 3–2, 1, 0
        low, high = gl.split(gl.permute(v, [4, 5, 2, 6, 0, 1, 3]))
        low_a, low_b = gl.split(low)
        high_a, high_b = gl.split(high)
        w_low_a, w_low_b = decode_half(q, 0)
        w_high_a, w_high_b = decode_half(q, 1)
        acc = add_group(acc, s_a, w_low_a, w_high_a, low_a, high_a, ACC)
        acc = add_group(acc, s_b, w_low_b, w_high_b, low_b, high_b, ACC)
    a = gl.arange(0, BLOCK_N, gl.SliceLayout(1, ACC))
    n = row + ((a & -8) | (a >> 1 & 3) | ((a & 1) << 2))
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, ACC))
    place = (split.to(gl.int64) * M + m[None, :]) * N + n[:, None]
    gl.store(out + place, acc.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


# --- Its wrapper ----------------------------------------------------------------------------------------------------


def takes(x: torch.Tensor, weight: PackedWeight) -> bool:
    """Does the kernel multiply these? x [M, K]: bf16 (in fp16 it would be 1024 + code, and Σ x·1024 costs accuracy), at
    most MOST_ROWS tokens, rows that TMA can read; a weight that was packed for it and has a tile's outputs (fewer
    are not trusted: with one, tests failed on an H200, nobody knows why); a GPU that has what it needs."""
    if weight.words is None or len(weight.codes) < BLOCK_N or common.INTERPRET or not on_hopper(x):
        return False
    aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x.dtype == torch.bfloat16 and 0 < len(x) <= MOST_ROWS and aligned and x.stride(0) >= x.shape[1]


def choose_split(N: int, K: int, M: int) -> int:
    """SPLIT_K, at most 16: about four programs for each of an H200's SMs, five beyond 8 tokens, as was best at an 8B
    model's layers (five and four of them run at once); no share is empty, and all but the last have two tiles."""
    wanted, tiles = SMS * (4 if M <= 8 else 5), K // TILE_K
    split = max(1, min(round(wanted / triton.cdiv(N, BLOCK_N)), tiles // 2, 16))
    return triton.cdiv(tiles, triton.cdiv(tiles, split))


def int4_matmul(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """A linear layer on four-bit weights, up to the last addition, for arguments that `takes` accepts.

    Semantics: out[i] = Σ x[m, k]·(q − z)·s over the i-th share of k. Products are exact, sums are fp32.
    Shapes: x [M, K], weight [N, K] -> [SPLIT_K, M, N] fp32; or [1, M, N] in bf16.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    def tiled(t: torch.Tensor, rows: int, columns: int, kind: gl.dtype) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for([rows, columns], kind)
        return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, columns], layout)

    assert weight.words is not None
    (M, K), N, block_m = x.shape, len(weight.codes), 8 if len(x) <= 8 else 16
    split_k = choose_split(N, K, M)
    out = torch.empty(split_k, M, N, dtype=x.dtype if split_k == 1 else torch.float32, device=x.device)
    int4_kernel[(triton.cdiv(N, BLOCK_N), split_k)](
        tiled(weight.codes, BLOCK_N, 128, gl.uint8),
        tiled(weight.words, 8, 32, gl.int32),
        tiled(x, block_m, 256, gl.bfloat16),
        out,
        M,
        N,
        K,
        split_k,
        BLOCK_N=BLOCK_N,
        BLOCK_M=block_m,
        STAGES=STAGES,
        num_warps=4,
        maxnreg=None if block_m == 8 else 168,  # else the assembler aims at 128, and spills
    )
    return out
