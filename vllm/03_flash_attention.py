"""03 · FlashAttention: exact attention that never stores the score matrix.

The question: attention compares T queries with S keys, and the textbook writes all T x S scores to memory, reads them
back for the softmax, writes the weights, and reads them back again. Who needs that matrix?

The mechanism:
  1. Softmax needs the maximum and the sum of a whole row. Both can be had in one pass, a tile of scores at a time.
  2. Keep three things per row: m, the largest score so far; l, the sum of exp(score - m); O, the values so weighted.
  3. When a tile raises the maximum, everything gathered so far is too large by exp(m_new - m_old): multiply l and O
     by exp(m_old - m_new), then add the tile. At the end the row of the output is O / l.
  4. So one program holds a tile of queries on chip, walks over the keys and values, and writes only its output.
  5. Memory beside the inputs falls from T x S to nothing. The traffic falls by a constant: 2 x tile / D without an L2
     cache, up to 1 + T / D with a perfect one.
  6. A causal program stops at its diagonal; only the tiles on the diagonal (and on a window's edge) are masked.
  7. log(sum(exp)) = m + log(l) is returned too: with it, two partial results over different keys can be merged exactly.
Orthogonal to paging: FlashAttention decides how scores are computed, PagedAttention where keys and values lie.

Numbers to remember: 8,192 tokens make a score matrix of 268 MB in fp32, and that is per head. The "75 x less traffic"
that is often quoted holds at T = 4,755 for D = 64, if each key and value is read from HBM once.

How to run:
  uv run python vllm/03_flash_attention.py                                  the whole story
  uv run python vllm/03_flash_attention.py --no-rescale                     break it: a wrong answer, caught
  uv run python vllm/03_flash_attention.py --no-rescale --order decreasing  the same bug, and the check passes
  uv run python vllm/03_flash_attention.py --no-max --scale 16              overflow
  uv run python vllm/03_flash_attention.py --bench                          minutes: the measured curves

Read for this: Milakov and Gimelshein 2018 (online softmax), Dao et al. 2022 and Dao 2023 (FlashAttention 1 and 2),
Shah et al. 2024 (FlashAttention-3), Triton's tutorial 06, vLLM 0.32 `v1/attention/selector.py`, `platforms/cuda.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import heapq
import importlib.util
import itertools
import math
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common import tl, triton
from torch import Tensor

import llama

KEY = "03_flash_attention"
from engine.attention import block_sparse
from engine.attention.block_sparse import BSR, cascade, from_rows, kv_bytes, makespan, rows_of, split
from engine.attention.metadata import AttentionMetadata

LOG2E = math.log2(math.e)
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16}


# --- 1. The reference: three kernels and a matrix between each two --------------------------------------------------


class HBM:
    """Counts the floats that an algorithm reads from device memory and writes to it. What stays on chip is free."""

    def __init__(self) -> None:
        self.read = self.written = 0

    @property
    def floats(self) -> int:
        return self.read + self.written

    def load(self, x: Any) -> Any:
        self.read += x.numel() if isinstance(x, Tensor) else len(x)
        return x

    def store(self, x: Any) -> Any:
        self.written += x.numel() if isinstance(x, Tensor) else len(x)
        return x


def visible(T: int, S: int, causal: bool = True, window: int | None = None,
            device: torch.device | None = None) -> Tensor:  # fmt: skip
    """Which key each query may look at, bool [T, S]. The T queries are the last T of the S positions."""
    position = torch.arange(S - T, S, device=device)[:, None]  # of each query
    key = torch.arange(S, device=device)
    seen = key <= position if causal else torch.ones(T, S, dtype=torch.bool, device=device)
    return seen & (key > position - window) if window else seen


def naive_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True,
                    window: int | None = None, scale: float | None = None,
                    hbm: HBM | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention in three kernels (Dao et al. 2022, Algorithm 0), in at least fp32; `hbm` counts what they move.

    Semantics: o_t = Σ_s softmax_s(scale · q_t·k_s) v_s over the visible s; lse_t = log Σ_s exp(scale · q_t·k_s).
    Shapes: q [T, Hq, D]; k, v [S, Hkv, D]; returns o [T, Hq, D], lse [Hq, T]; 0 and −inf for a row that sees nothing.
    """
    hbm = hbm or HBM()
    (T, Hq, D), (S, Hkv, _) = q.shape, k.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(dtype), *(x.to(dtype).repeat_interleave(Hq // Hkv, dim=1) for x in (k, v))
    scale = D**-0.5 if scale is None else scale

    scores = torch.einsum("thd,shd->hts", hbm.load(q), hbm.load(k)) * scale  # [Hq, T, S]
    scores = hbm.store(scores.masked_fill(~visible(T, S, causal, window, q.device), -math.inf))

    lse = hbm.load(scores).logsumexp(dim=-1)  # [Hq, T]
    weights = hbm.store((scores - torch.where(lse == -math.inf, 0, lse)[..., None]).exp())

    return hbm.store(torch.einsum("hts,shd->thd", hbm.load(weights), hbm.load(v))), lse


# --- 2. The same softmax in one pass, one row, one float at a time --------------------------------------------------


def exp(x: float) -> float:
    """math.exp that overflows to infinity instead of raising."""
    return math.exp(x) if x < 709 else math.inf if x == x else x


def online_softmax(q: float, keys: Sequence[float], values: Sequence[float], tile: int, rescale: bool = True,
                   subtract_max: bool = True, precision: str = "fp32",
                   hbm: HBM | None = None) -> tuple[float, list[dict[str, Any]]]:  # fmt: skip
    """One query row with D = 1: Σ_j softmax(q·k)_j v_j in one pass over tiles of `tile` keys, every result rounded.

    Per tile, with s = q·k:  m' = max(m, max s)   α = exp(m − m')   p = exp(s − m')
                             ℓ' = α·ℓ + Σ p       O' = α·O + Σ p·v
    Returns O / ℓ and, per tile, (m, ℓ, O) before and after. `rescale=False` forgets α; `subtract_max=False` forgets m.
    """
    dtype, hbm = PRECISIONS[precision], hbm or HBM()
    r = lambda x: torch.tensor(x, dtype=dtype).item()  # noqa: E731  (too large becomes infinity, as on a GPU)
    (q,) = hbm.load([r(q)])
    m, l, o = -math.inf, 0.0, 0.0
    trace = []
    for start in range(0, len(keys), tile):
        k, v = hbm.load(keys[start : start + tile]), hbm.load(values[start : start + tile])
        s = [r(q * x) for x in k]
        m_new = max(m, *s) if subtract_max else 0.0
        origin = 0.0 if m_new == -math.inf else m_new  # nothing seen yet: exp(−inf − −inf) would be NaN
        alpha = r(exp(m - origin)) if rescale and subtract_max else 1.0
        p = [r(exp(r(x - origin))) for x in s]
        before = {"m": m, "l": l, "o": o}
        l, o, m = r(alpha * l), r(alpha * o), m_new
        for weight, value in zip(p, v):
            l, o = r(l + weight), r(o + r(weight * value))
        trace.append({"start": start, "stop": start + len(s), "scores": s, "before": before, "alpha": alpha,
                      "weights": p, "after": {"m": m, "l": l, "o": o}, "hbm_floats": hbm.floats})  # fmt: skip
    (result,) = hbm.store([r(o / l) if l else math.nan])
    return result, trace


# --- 3. The same recurrence on tiles of tensors ---------------------------------------------------------------------


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, window: int | None = None,
                    scale: float | None = None, block_m: int = 128, block_n: int = 64,
                    hbm: HBM | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """FlashAttention-2 in torch: for every tile of queries one walk over the keys. Same contract as `naive_attention`.

    All heads advance together, and each reads its own copy of the keys, as the programs of the kernel below do.
    """
    hbm = hbm or HBM()
    (T, Hq, D), (S, Hkv, _) = q.shape, k.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.to(dtype).transpose(0, 1) for x in (q, k, v))  # [H, T, D]
    k, v = (x[:, None].expand(-1, Hq // Hkv, -1, -1).reshape(Hq, S, D) for x in (k, v))
    scale = D**-0.5 if scale is None else scale
    out, lse = q.new_empty(T, Hq, D), q.new_empty(Hq, T)
    for m0 in range(0, T, block_m):
        q_tile = hbm.load(q[:, m0 : m0 + block_m])  # [Hq, M, D]
        first = m0 + S - T  # position of the tile's first query
        last = first + q_tile.shape[1] - 1
        m = q.new_full(q_tile.shape[:2], -math.inf)  # [Hq, M]
        l, o = torch.zeros_like(m), torch.zeros_like(q_tile)
        start = max(0, first - window + 1) // block_n * block_n if window else 0
        for n in range(start, last + 1 if causal else S, block_n):
            k_tile, v_tile = hbm.load(k[:, n : n + block_n]), hbm.load(v[:, n : n + block_n])  # [Hq, N, D]
            s = q_tile @ k_tile.transpose(1, 2) * scale  # [Hq, M, N]
            if (causal and n + block_n > first + 1) or (window and n <= last - window):  # the mask's edge crosses it
                position, key = torch.arange(first, last + 1)[:, None], torch.arange(n, n + k_tile.shape[1])
                hidden = key <= position - (window or S + T)
                if causal:
                    hidden |= key > position
                s = s.masked_fill(hidden.to(s.device), -math.inf)
            m_new = torch.maximum(m, s.amax(dim=-1))
            origin = torch.where(m_new == -math.inf, 0, m_new)
            p, alpha = (s - origin[..., None]).exp(), (m - origin).exp()
            l = alpha * l + p.sum(dim=-1)
            o = alpha[..., None] * o + p @ v_tile
            m = m_new
        o = o / torch.where(l == 0, 1, l)[..., None]
        out[m0 : m0 + block_m] = hbm.store(o).transpose(0, 1)
        lse[:, m0 : m0 + block_m] = hbm.store(m + l.log())
    return out, lse


def hbm_floats(T: int, D: int, block_m: int = 128, causal: bool = False) -> dict[str, int]:
    """Floats moved per head for T queries over T keys, by formula; the counters above must agree (a test holds them).

    naive: q, k, v, o, and the T×T matrix four times. tiled: every tile of queries reads its keys and values again.
    once: the same kernel if an L2 cache keeps a head's keys and values between its tiles, so that HBM gives them once.
    """
    tiles = range(0, T, block_m)
    keys = sum(min(T, m0 + block_m) if causal else T for m0 in tiles)
    return {"naive": 4 * T * D + 4 * T * T, "tiled": 2 * T * D + T + 2 * D * keys, "once": 4 * T * D + T}


# --- 4. The Triton kernel -------------------------------------------------------------------------------------------


@triton.jit
def attend_to_keys(
    acc, l, m, q, k_rows, v_rows, start, stop, first, S, scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fold the keys [start, stop) into (m, ℓ, O).

    On Hopper, tl.dot starts the tensor cores and goes on. Scores are waited for at once; O += P V, which comes last, is
    waited for with the next scores. Until then it reads P from registers, and nobody keeps others from writing there.
    """
    for n in range(start, stop, BLOCK_N):
        k = k_rows.load([n, 0]).to(q.dtype)  # [N, D]; rows past the end of the sequence are zero
        s = tl.dot(q, k.T, input_precision="ieee")  # [M, N]
        if MASKED:
            position = first + tl.arange(0, BLOCK_M)[:, None]
            key = n + tl.arange(0, BLOCK_N)[None, :]
            seen = key <= position if CAUSAL else key < S
            if WINDOW:
                seen = seen & (key > position - WINDOW)
            s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale)  # [M]
        origin = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.math.exp2(s * scale - origin[:, None])  # [M, N]
        alpha = tl.math.exp2(m - origin)
        l = l * alpha + tl.sum(p, 1)
        v = v_rows.load([n, 0]).to(q.dtype)
        acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None], input_precision="ieee")  # [M, D]
        m = m_new
    return acc, l, m


@common.kernel
def flash_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, query_start_loc, seq_start_loc,
    scale, T: tl.int32, num_keys: tl.int32, num_tiles: tl.int32, heads_per_group,
    q_stride: tl.constexpr, q_head_stride: tl.constexpr, k_stride: tl.constexpr, k_head_stride: tl.constexpr,
    v_stride: tl.constexpr, v_head_stride: tl.constexpr,
    Hq: tl.constexpr, Hkv: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head of one sequence, over all keys that they may see."""
    # Heaviest first: a causal program at the end of a sequence does the most work, so it must not start last. And
    # heads in groups whose keys and values fit the L2 cache together, so that the tiles of one head find them there.
    pid = tl.program_id(0)
    head_in_group = pid % heads_per_group
    pid = pid // heads_per_group
    tile = num_tiles - 1 - pid % num_tiles
    pid = pid // num_tiles
    head = pid % (Hq // heads_per_group) * heads_per_group + head_in_group
    seq = pid // (Hq // heads_per_group)

    query_start = tl.load(query_start_loc + seq).to(tl.int64)
    key_start = tl.load(seq_start_loc + seq).to(tl.int64)
    query_len = (tl.load(query_start_loc + seq + 1) - query_start).to(tl.int32)
    S = (tl.load(seq_start_loc + seq + 1) - key_start).to(tl.int32)
    m0 = tile * BLOCK_M
    if m0 >= query_len:
        return
    kv_head = head // (Hq // Hkv)
    key_start = tl.minimum(key_start, num_keys - 1)  # an empty sequence may begin where the tensor ends

    # A descriptor is a tensor's shape, strides and tile in one word for the hardware (TMA on Hopper and Blackwell;
    # elsewhere Triton turns it into masked loads). What lies outside the sequence or the head size reads as zero.
    q_ptr += query_start * q_stride + head * q_head_stride
    k_ptr += key_start * k_stride + kv_head * k_head_stride
    v_ptr += key_start * v_stride + kv_head * v_head_stride
    q_rows = tl.make_tensor_descriptor(q_ptr, [query_len, D], [q_stride, 1], [BLOCK_M, BLOCK_D])
    k_rows = tl.make_tensor_descriptor(k_ptr, [tl.maximum(S, 1), D], [k_stride, 1], [BLOCK_N, BLOCK_D])
    v_rows = tl.make_tensor_descriptor(v_ptr, [tl.maximum(S, 1), D], [v_stride, 1], [BLOCK_N, BLOCK_D])

    # Keys [begin, end) are of interest. Of those, [full, edge) are visible to every query of the tile: no mask there.
    first = m0 + S - query_len  # position of the tile's first query
    full = 0
    end = S
    edge = S // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.minimum(S, first + BLOCK_M)
        edge = (first + 1) // BLOCK_N * BLOCK_N  # below 0: none
    if WINDOW:
        begin = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        full = tl.cdiv(tl.maximum(first + BLOCK_M - WINDOW, 0), BLOCK_N) * BLOCK_N

    q = q_rows.load([m0, 0])  # [M, D]
    if UPCAST:
        q = q.to(tl.float32)  # the interpreter has no bfloat16 arithmetic
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if WINDOW:
        acc, l, m = attend_to_keys(acc, l, m, q, k_rows, v_rows, begin, tl.minimum(full, end), first, S, scale,
                                   True, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)  # fmt: skip
    acc, l, m = attend_to_keys(acc, l, m, q, k_rows, v_rows, full, edge, first, S, scale,
                               False, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)  # fmt: skip
    acc, l, m = attend_to_keys(acc, l, m, q, k_rows, v_rows, tl.maximum(full, edge), end, first, S, scale,
                               True, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)  # fmt: skip

    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    out = acc / tl.where(l == 0, 1.0, l)[:, None]
    out_ptr += (query_start + m0) * (Hq * D) + head * D
    inside = (m0 + row < query_len)[:, None] & (column < D)[None, :]
    tl.store(out_ptr + row[:, None] * (Hq * D) + column[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
    # Everything was in powers of 2: lse = ln 2 · (m + log2 ℓ). Where nothing was seen, m is −inf and so is lse.
    lse = (m + tl.math.log2(tl.where(l == 0, 1.0, l))) * 0.6931471805599453
    tl.store(lse_ptr + head.to(tl.int64) * T + query_start + m0 + row, lse, mask=m0 + row < query_len)


class Tiles(NamedTuple):
    """How one program is cut: queries and keys per tile, warps, tiles of keys in flight, most registers per thread."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None


def choose_tiles(dtype: torch.dtype, head_size: int, window: int | None = None,
                 capability: tuple[int, int] | None = None) -> Tiles:  # fmt: skip
    """Tile sizes by what has to stay in registers, in fp32: O [M, D], and a tile's scores [M, N].

    On Hopper (capability (9, 0)) two programs share an SM, and one takes its exponentials while the other has the
    tensor cores: 2 × 256 threads × 128 registers are all there are. Elsewhere (None: not NVIDIA's) the largest that
    spill nowhere; a test compiles them. fp32 has no exact product on tensor cores: a thread holds whole rows.
    """
    hopper = capability == (9, 0)
    if dtype == torch.float32:
        return Tiles(32, 16, 8, 1) if head_size <= 64 else Tiles(16, 16, 8, 1)
    if hopper and head_size <= 64:
        return Tiles(64, 128, 4, 2)
    if head_size <= 128:
        return Tiles(128, 64 if capability else 32, 8, 2, 128 if hopper and not window else None)
    return Tiles(128 if hopper else 64, 32, 8, 2)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, query_start_loc: Tensor,
                    seq_start_loc: Tensor, max_query_len: int, max_seq_len: int, *, causal: bool = True,
                    window: int | None = None, scale: float | None = None,
                    tiles: Tiles | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over B sequences packed end to end; queries of a sequence are the last of its keys' positions.

    Semantics: o_t = Σ_s softmax_s(scale · q_t·k_s) v_s over the visible s of t's own sequence; lse_t = log Σ_s exp(…).
    Shapes: q [T, Hq, D]; k, v [S_total, Hkv, D]; query_start_loc, seq_start_loc int32 [B + 1]: sequence b owns the
        half-open rows start_loc[b] to start_loc[b + 1]; returns out [T, Hq, D] in q's dtype, lse fp32 [Hq, T].
    `window` w lets a query see itself and w − 1 keys before it. D is a multiple of 16 up to 256. A row that sees
    nothing gets 0 and −inf; rows behind the last sequence are not written. Raises ValueError for what does not fit.
    vLLM's counterpart is `flash_attn_varlen_func` (v1/attention/backends/fa_utils.py).
    """
    (T, Hq, D), (num_keys, Hkv, _) = q.shape, k.shape
    scale = D**-0.5 if scale is None else scale
    if not (k.shape == v.shape and k.shape[2] == D and q.dtype == k.dtype == v.dtype and Hkv and Hq % Hkv == 0):
        raise ValueError(f"q {list(q.shape)} {q.dtype}, k {list(k.shape)} {k.dtype}, v {list(v.shape)} {v.dtype} "
                         "do not go together: same dtype and head size, and Hkv divides Hq")  # fmt: skip
    if D % 16 or D > 256:
        raise ValueError(f"head size {D}: allowed are multiples of 16 up to 256")
    if window is not None and not (causal and window >= 1):
        raise ValueError(f"window {window} with causal={causal}: a window is at least 1 and needs causal attention")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale {scale}: it must be positive, for the largest score times scale is the maximum")
    out = torch.empty(T, Hq, D, dtype=q.dtype, device=q.device)
    lse = torch.empty(Hq, T, dtype=torch.float32, device=q.device)
    if T == 0 or num_keys == 0:
        return out.zero_(), lse.fill_(-math.inf)
    if not common.runs_kernel(q):
        return _torch_attention(q, k, v, query_start_loc, seq_start_loc, causal, window, scale, out, lse)

    if capability := nvidia_capability(q.device) if q.is_cuda else None:
        triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    q, k, v = (_aligned(x) for x in (q, k, v))
    group = heads_per_group(Hq, Hkv, max_seq_len * 2 * D * q.element_size())
    if capability == (9, 0) and not (tiles or common.INTERPRET):
        from engine.attention import hopper

        if hopper.fits(q, k, v, max_query_len, window):
            return hopper.warp_specialized_attention(q, k, v, query_start_loc, seq_start_loc, max_query_len, group,
                                                     causal, scale, out, lse)  # fmt: skip
    tiles = tiles or choose_tiles(q.dtype, D, window, capability)
    num_tiles = triton.cdiv(max_query_len, tiles.block_m)
    flash_attention_kernel[(len(query_start_loc) - 1) * Hq * num_tiles,](
        q, k, v, out, lse, query_start_loc, seq_start_loc, scale * LOG2E, T, num_keys, num_tiles, group,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        Hq=Hq, Hkv=Hkv, D=D, BLOCK_D=triton.next_power_of_2(D), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        CAUSAL=causal, WINDOW=window or 0, UPCAST=common.INTERPRET and q.dtype == torch.bfloat16,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **({"maxnreg": tiles.maxnreg} if tiles.maxnreg else {}),
    )  # fmt: skip
    return out, lse


def nvidia_capability(device: torch.device | None = None) -> tuple[int, int] | None:
    """Of a GPU (None: the current one), if it is NVIDIA's."""
    return torch.cuda.get_device_capability(device) if common.HAS_GPU and not torch.version.hip else None


def heads_per_group(Hq: int, Hkv: int, kv_bytes: int, l2_bytes: int = 32 << 20) -> int:
    """Query heads that run side by side: as many as have their keys and values (`kv_bytes` per KV head) in L2."""
    kv_heads = max(1, min(Hkv, l2_bytes // max(1, kv_bytes)))
    while Hkv % kv_heads:
        kv_heads -= 1
    return kv_heads * (Hq // Hkv)


def _aligned(x: Tensor) -> Tensor:
    """TMA wants a contiguous last dimension, and rows and heads that begin at multiples of 16 bytes."""
    unit = 16 // x.element_size()
    fits = x.stride(2) == 1 and x.stride(0) % unit == 0 and x.stride(1) % unit == 0 and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)  # `contiguous` may return x as it is


def _torch_attention(q: Tensor, k: Tensor, v: Tensor, query_start_loc: Tensor,
                     seq_start_loc: Tensor, causal: bool, window: int | None, scale: float,
                     out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The CPU's path: PyTorch's own fused kernel (tiled and online too), once per sequence."""
    bounds = zip(*(pair for loc in (query_start_loc.tolist(), seq_start_loc.tolist()) for pair in (loc, loc[1:])))
    for q0, q1, k0, k1 in bounds:
        # Queries before position 0 see nothing. They exist only if a sequence has more queries than keys.
        blind = max(0, (q1 - q0) - (k1 - k0)) if causal else (q1 - q0) * (k0 == k1)
        out[q0 : q0 + blind], lse[:, q0 : q0 + blind] = 0, -math.inf
        q0 += blind
        if q0 < q1:
            out[q0:q1], lse[:, q0:q1] = _fused(q[q0:q1], k[k0:k1], v[k0:k1], causal, window, scale)
    return out, lse


def _fused(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None,
           scale: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One sequence, T ≤ S if causal. The fused CPU kernel says lse = 0 where all scores are −inf: that goes naive."""
    (T, Hq, D), (S, Hkv, _) = q.shape, k.shape
    if q.device.type != "cpu" or not (q.isfinite().all() and k.isfinite().all()):
        return naive_attention(q, k, v, causal, window, scale)
    # A KV head is a batch entry of Hq / Hkv heads with the same (stride 0) keys: [Hkv, Hq / Hkv, T or S, D]
    q = q.view(T, Hkv, Hq // Hkv, D).permute(1, 2, 0, 3)
    k, v = (x.transpose(0, 1)[:, None].expand(-1, Hq // Hkv, -1, -1) for x in (k, v))
    is_causal, bias = causal and T == S and not window, None
    if causal and not is_causal:
        bias = torch.zeros(T, S, dtype=q.dtype).masked_fill_(~visible(T, S, causal, window), -math.inf)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    o, lse = fused(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale)
    return o.permute(2, 0, 1, 3).reshape(T, Hq, D), lse.reshape(Hq, T)


def example_launches(dtype: torch.dtype) -> None:
    """A prefill of SmolLM2's and of an 8B Llama's shape, on meta tensors."""
    for Hq, Hkv, D in ((9, 3, 64), (32, 8, 128)):
        q = torch.empty(1024, Hq, D, dtype=dtype, device="meta")
        k = torch.empty(4096, Hkv, D, dtype=dtype, device="meta")
        loc = torch.empty(3, dtype=torch.int32, device="meta")
        flash_attention(q, k, k, loc, loc, 512, 2048)
        flash_attention(q, k, k, loc, loc, 512, 2048, causal=False)


# --- 5. Which kernel runs: a registry and a selector, as in vLLM ----------------------------------------------------


class AttentionSelectorConfig(NamedTuple):
    """What a backend has to cope with (vLLM: the class of this name in `v1/attention/selector.py`)."""

    device: str  # "cuda", "rocm" or "cpu"
    capability: tuple[int, int] | None  # of an NVIDIA GPU
    dtype: torch.dtype
    head_size: int
    use_non_causal: bool = False
    use_mla: bool = False
    installed: frozenset[str] = frozenset({"triton", "flash_attn", "flashinfer"})


class Backend(NamedTuple):
    """A way to compute attention: what it is, what it cannot do, and how to call it (None: not from here)."""

    what: str
    invalid_reasons: Callable[[AttentionSelectorConfig], list[str]]
    run: Run | None = None


class Batch(NamedTuple):
    """Where the packed sequences begin (vLLM: `CommonAttentionMetadata`)."""

    query_start_loc: Tensor  # int32 [B + 1]
    seq_start_loc: Tensor  # int32 [B + 1]
    max_query_len: int
    max_seq_len: int

    @classmethod
    def of(cls, query_lens: Sequence[int], seq_lens: Sequence[int] | None = None) -> Batch:
        """From the lengths; without `seq_lens`, every sequence is a prefill."""
        starts = lambda lens: torch.tensor([0, *lens], device=common.device()).cumsum(0).to(torch.int32)  # noqa: E731
        seq_lens = seq_lens or query_lens
        return cls(starts(query_lens), starts(seq_lens), max(query_lens), max(seq_lens))


Run = Callable[..., Tensor]  # run(q [T, Hq, D], k, v [S_total, Hkv, D], batch, causal, window) -> [T, Hq, D]


def run_triton(q: Tensor, k: Tensor, v: Tensor, batch: Batch, causal: bool = True, window: int | None = None) -> Tensor:
    """The kernel of this lesson; on a CPU in the interpreter."""
    with common.use_kernels():
        return flash_attention(q, k, v, *batch, causal=causal, window=window)[0]


def run_sdpa(q: Tensor, k: Tensor, v: Tensor, batch: Batch, causal: bool = True, window: int | None = None) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, once per sequence: it knows no packed batches, and no LSE."""
    out = []
    query_lens, seq_lens = batch.query_start_loc.diff().tolist(), batch.seq_start_loc.diff().tolist()
    for sequence in zip(q.split(query_lens), k.split(seq_lens), v.split(seq_lens)):
        x, y, z = (tensor.transpose(0, 1)[None] for tensor in sequence)  # [1, H, T or S, D]
        T, S = x.shape[2], y.shape[2]
        # Then is_causal says it all: SDPA's diagonal begins at the top left.
        plain = not window and (T == S or not causal)
        mask = None if plain else visible(T, S, causal, window, q.device)
        o = F.scaled_dot_product_attention(x, y, z, mask, is_causal=causal and plain, enable_gqa=True)
        out.append(o[0].transpose(0, 1))
    return torch.cat(out)


def run_flex(q: Tensor, k: Tensor, v: Tensor, batch: Batch, causal: bool = True, window: int | None = None) -> Tensor:
    """FlexAttention: the mask is a Python function of two positions. Compiled on a GPU, unfused on a CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    row, column = torch.arange(len(q), device=q.device), torch.arange(len(k), device=q.device)
    row_seq = torch.searchsorted(batch.query_start_loc[1:], row, right=True)  # which sequence a packed row belongs to
    column_seq = torch.searchsorted(batch.seq_start_loc[1:], column, right=True)
    own = row - batch.query_start_loc[row_seq + 1] + batch.seq_start_loc[row_seq + 1]  # the column of a row's own key

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = row_seq[i] == column_seq[j]
        if causal:
            seen = seen & (j <= own[i])
        return seen & (j > own[i] - window) if window else seen

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "called without torch.compile": on a CPU that is what we want
        mask = create_block_mask(mask_mod, None, None, len(q), len(k), device=q.device)
        attention = torch.compile(flex_attention) if q.is_cuda else flex_attention
        x, y, z = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        return attention(x, y, z, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def run_flash_attn(q: Tensor, k: Tensor, v: Tensor, b: Batch, causal: bool = True, window: int | None = None) -> Tensor:
    """The package flash-attn. vLLM carries its own build, with FA3 and FA4 in it."""
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(q, k, v, *b, causal=causal, window_size=(window - 1 if window else -1, -1))


def run_flashinfer(q: Tensor, k: Tensor, v: Tensor, b: Batch, causal: bool = True, window: int | None = None) -> Tensor:
    """The package flashinfer: its wrapper for packed keys, planned anew in each call. Section 6: pages and plan."""
    import flashinfer

    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(b.query_start_loc, b.seq_start_loc, q.shape[1], k.shape[1], q.shape[2], causal=causal,
                 window_left=window - 1 if window else -1, q_data_type=q.dtype)  # fmt: skip
    return wrapper.run(q, k, v)


def _reasons(*checks: tuple[bool, str]) -> list[str]:
    return [reason for applies, reason in checks if applies]


def _nvidia(c: AttentionSelectorConfig, low: tuple[int, int], high: tuple[int, int] = (99, 9)) -> tuple[bool, str]:
    if c.device != "cuda" or c.capability is None:
        return True, "NVIDIA only"
    newest = f"–{high[0]}.{high[1]}" if high < (99, 9) else " or newer"
    return not low <= c.capability <= high, f"needs SM {low[0]}.{low[1]}{newest}"


def _heads(c: AttentionSelectorConfig, step: int, largest: int) -> tuple[bool, str]:
    return c.head_size % step != 0 or c.head_size > largest, f"head sizes: multiples of {step} up to {largest}"


HALF = (torch.float16, torch.bfloat16)
MLA = "multi-head latent attention is not supported"
BACKENDS: dict[str, Backend] = {
    "FLASH_ATTN": Backend(
        "Dao's CUDA kernels: FA2, FA3 on Hopper, FA4 on Blackwell",
        lambda c: _reasons(_nvidia(c, (8, 0)), (c.dtype not in HALF, "fp16 and bf16 only"), (c.use_mla, MLA),
                           _heads(c, 8, 512 if c.capability and c.capability[0] in (9, 10, 11) else 256),  # 512: FA4
                           ("flash_attn" not in c.installed, "package flash-attn is not installed")),
        run_flash_attn),
    "FLASHINFER": Backend(
        "made for serving: paged KV, batches planned ahead",
        lambda c: _reasons(_nvidia(c, (8, 0), (12, 1)), (c.dtype not in HALF, "fp16 and bf16 only"), (c.use_mla, MLA),
                           (c.head_size not in (64, 128, 256, 512), "head sizes: 64, 128, 256, 512"),
                           ("flashinfer" not in c.installed, "package flashinfer is not installed")),
        run_flashinfer),
    "TRITON_ATTN": Backend(
        "this lesson's kernel; portable",
        lambda c: _reasons((c.device == "cpu", "interpreted on a CPU: exact, slow, never chosen"), _heads(c, 16, 256),
                           (c.use_mla, MLA), ("triton" not in c.installed, "Triton has no wheel for this platform")),
        run_triton),
    "FLEX_ATTENTION": Backend("PyTorch compiles a kernel for any mask", lambda c: _reasons((c.use_mla, MLA)), run_flex),
    "TORCH_SDPA": Backend(
        "PyTorch's built-in; in vLLM for vision encoders", lambda c: _reasons((c.use_mla, MLA)), run_sdpa),
    "CPU_ATTN": Backend("vLLM's C++ kernels for CPUs", lambda c: _reasons(
        (c.device != "cpu", "for CPUs"), (True, "part of vLLM's CPU build; TORCH_SDPA stands in"))),
    "ROCM_ATTN": Backend("vLLM's kernels for AMD GPUs", lambda c: _reasons(
        (c.device != "rocm", "for AMD"), (True, "in vLLM's ROCm build; TRITON_ATTN stands in"))),
    "FLASHMLA": Backend("DeepSeek's kernels for its 576-wide latents", lambda c: _reasons(
        (not c.use_mla, "for MLA models only"), _nvidia(c, (9, 0), (10, 3)), (True, "lesson 09"))),
    "TRTLLM_GEN": Backend(
        "NVIDIA's precompiled kernels, inside FLASHINFER",
        lambda c: _reasons(_nvidia(c, (10, 0), (10, 3)), (True, "no backend of its own: choose FLASHINFER"))),
    "XFORMERS": Backend("Meta's memory-efficient attention", lambda c: ["removed from vLLM (PR #29262)"]),
}  # fmt: skip


def priorities(c: AttentionSelectorConfig) -> list[str]:
    """Who is asked first (vLLM: `_get_backend_priorities` in `platforms/cuda.py`, `rocm.py`), and last TORCH_SDPA."""
    if c.device == "cpu":
        return ["CPU_ATTN", "TORCH_SDPA", "FLEX_ATTENTION"]
    if c.use_mla:
        return ["FLASHMLA"]
    blackwell = c.capability is not None and c.capability[0] == 10 and not c.use_non_causal
    nvidia = ["FLASHINFER", "FLASH_ATTN"] if blackwell else ["FLASH_ATTN", "FLASHINFER"]
    first = ["ROCM_ATTN"] if c.device == "rocm" else nvidia
    return [*first, "TRITON_ATTN", "FLEX_ATTENTION", "TORCH_SDPA"]


def select_backend(c: AttentionSelectorConfig, requested: str | None = None) -> tuple[str, dict[str, list[str]]]:
    """The backend for `c`, and why each other one is not it. Raises InputError if none fits or `requested` does not."""
    reasons = {name: backend.invalid_reasons(c) for name, backend in BACKENDS.items()}
    if requested is not None:
        if requested not in BACKENDS:
            raise common.InputError(f"attention backend {requested}: unknown; allowed: {', '.join(BACKENDS)}")
        if reasons[requested]:
            raise common.InputError(f"attention backend {requested} cannot run here: {'; '.join(reasons[requested])}")
    chosen = requested or next((name for name in priorities(c) if not reasons[name]), None)
    if chosen is None:
        raise common.InputError(f"no attention backend for {c}: {reasons}")
    others = {name: why or [f"{chosen} was asked first" if not requested else f"{chosen} was requested"]
              for name, why in reasons.items() if name != chosen}  # fmt: skip
    return chosen, others


def here(dtype: torch.dtype, head_size: int) -> AttentionSelectorConfig:
    """This machine as a selector's input."""
    installed = {name for name in ("flash_attn", "flashinfer") if importlib.util.find_spec(name)}
    installed |= {"triton"} if common.HAS_TRITON else set()
    device = "cpu" if not common.HAS_GPU else "rocm" if torch.version.hip else "cuda"
    return AttentionSelectorConfig(device, nvidia_capability(), dtype, head_size, installed=frozenset(installed))


def requested_backend(flag: str | None) -> str | None:
    """`--attention-backend`, else the environment variable that older vLLM read and 0.32 ignores."""
    name = os.environ.get("VLLM_ATTENTION_BACKEND")
    if flag is None and name:
        common.say(f"VLLM_ATTENTION_BACKEND={name}: honoured, but vLLM 0.32 no longer reads it: --attention-backend.")
    return flag or name or None


CASES = {
    "H200, bf16, D=128": AttentionSelectorConfig("cuda", (9, 0), torch.bfloat16, 128),
    "H200, fp32, D=64": AttentionSelectorConfig("cuda", (9, 0), torch.float32, 64),
    "B200, bf16, D=128": AttentionSelectorConfig("cuda", (10, 0), torch.bfloat16, 128),
    "T4, fp16, D=128": AttentionSelectorConfig("cuda", (7, 5), torch.float16, 128),
    "MI300X, bf16, D=128": AttentionSelectorConfig("rocm", None, torch.bfloat16, 128),
    "CPU, fp32, D=64": AttentionSelectorConfig("cpu", None, torch.float32, 64),
}


# --- 6. What FlashInfer is: the batch as a block-sparse matrix, and a plan -------------------------------------------
#
# `engine/attention/block_sparse.py` builds both; here is what they mean and what they save.


def block_sparse_mask(bsr: BSR, num_slots: int) -> Tensor:
    """What the matrix means, obviously right: bool [T, num_slots], does query t see the key in that slot?"""
    mask = torch.zeros(bsr.qo_indptr[-1], num_slots, dtype=torch.bool)
    for start, (n, pages, S) in zip(bsr.qo_indptr, rows_of(bsr)):
        for i in range(n):
            for j in range(S - n + i + 1 if bsr.causal else S):
                mask[start + i, pages[j // bsr.page_size] * bsr.page_size + j % bsr.page_size] = True
    return mask


def naive_block_sparse(q: Tensor, kv_cache: Tensor, bsr: BSR) -> tuple[Tensor, Tensor]:
    """Every query against every slot of the cache, masked, in fp64: (o [T, Hq, D], lse [T, Hq]).

    Shapes: q [T, Hq, D], kv_cache [2, num_blocks, page_size, Hkv, D]. A query that sees nothing: o 0, lse −∞.
    """
    kv = kv_cache.double().flatten(1, 2).repeat_interleave(q.shape[1] // kv_cache.shape[3], 2)  # [2, slots, Hq, D]
    mask = block_sparse_mask(bsr, kv.shape[1]).to(q.device)
    k, v = torch.where(mask.any(0)[:, None, None], kv, 0)  # an empty slot may hold anything, NaN included
    s = torch.einsum("thd,shd->ths", q.double(), k) / math.sqrt(q.shape[2])
    s = s.masked_fill(~mask[:, None], -math.inf)
    return torch.einsum("ths,shd->thd", s.softmax(-1).nan_to_num(0), v), s.logsumexp(-1)


# A decode step of an 8B Llama in bf16 on an H200 of 132 multiprocessors: 32 sequences, blocks of 16.
WORKERS, PAGE, HEADS = 132, 16, {"Hq": 32, "Hkv": 8, "D": 128}
SKEWED = [32_768] + [1_024] * 31
PREFIX, OWN, SEQUENCES = 2_048, 128, 32


def decode_rows(seq_lens: Sequence[int], shared: int = 0) -> BSR:
    """One query per sequence; all begin with the same `shared` tokens."""
    new = itertools.count(1 + shared // PAGE)
    prefix = list(range(1, 1 + shared // PAGE))
    return from_rows([(1, prefix + [next(new) for _ in range(-(-(S - shared) // PAGE))], S) for S in seq_lens], PAGE)


def block_sparse_facts() -> dict[str, dict[str, float]]:
    """What its plan and its cascade save: costs in keys, bytes of one layer."""
    skewed = decode_rows(SKEWED)
    whole, chunks = split(skewed, 1), split(skewed, WORKERS)  # one worker's even share is everything: a chunk per row
    shared = decode_rows([PREFIX + OWN] * SEQUENCES, PREFIX)
    # A tile of 128 rows holds the 32 · 4 query heads that share a KV head: saved = (sequences − tiles) · prefix.
    flat, cascaded = kv_bytes([shared], 128, **HEADS), kv_bytes(cascade(shared), 128, **HEADS)
    return {
        "plan": {"per_request": makespan(whole, WORKERS), "balanced": makespan(chunks, WORKERS),
                 "even": sum(chunk.cost for chunk in chunks) / WORKERS, "chunks": len(chunks)},
        "cascade": {"flat": flat, "cascaded": cascaded, "ratio": flat / cascaded},
    }  # fmt: skip


def check_block_sparse() -> None:
    """Skewed lengths on shuffled pages, planned for five workers and run, against every query and slot."""
    page_size, Hq, Hkv, D, seq_lens = 4, 4, 2, 8, (70, 1, 16, 3)
    need = [-(-S // page_size) for S in seq_lens]
    ids = (torch.randperm(sum(need) + 2) + 1).tolist()  # two pages stay free
    blocks = [[ids.pop() for _ in range(n)] for n in need]
    meta = AttentionMetadata.build(blocks, seq_lens, seq_lens, page_size)
    kv_cache = torch.full((2, sum(need) + 3, page_size, Hkv, D), math.nan, device=common.device())
    kv_cache.view(2, -1, Hkv, D)[:, meta.slot_mapping] = torch.randn(2, sum(seq_lens), Hkv, D, device=kv_cache.device)
    q = torch.randn(len(seq_lens), Hq, D).to(kv_cache)
    bsr = block_sparse.from_block_table(meta.block_table, meta.seq_lens, [1] * len(seq_lens), page_size)
    attention = block_sparse.BlockSparseAttention(num_workers=5, max_rows=8, max_pages=64, tile=16, Hq=Hq, D=D)
    attention.plan(bsr)
    ref = naive_block_sparse(q, kv_cache, bsr)[0]
    common.check("block-sparse, planned for 5 workers", attention.run(q, kv_cache)[0], ref)


# --- 7. The simulation: delete one line -----------------------------------------------------------------------------

ORDERS = {
    "increasing": (0, 1, 2, 3, 4, 5, 6, 7),
    "decreasing": (7, 6, 5, 4, 3, 2, 1, 0),
    "shuffled": (3, 6, 0, 5, 1, 7, 2, 4),
    "spike": (0, 0, 0, 0, 0, 0, 7, 0),
}
WIDGET_CHOICES: dict[str, tuple] = {
    "tile": (1, 2, 3, 4, 8), "order": tuple(ORDERS), "scale": (0.25, 1, 4, 16), "rescale": (True, False),
    "subtract_max": (True, False), "precision": tuple(PRECISIONS),
}  # fmt: skip
WIDGET_DEFAULT: dict[str, Any] = {
    "tile": 2, "order": "increasing", "scale": 1, "rescale": True, "subtract_max": True, "precision": "fp32",
}  # fmt: skip


def simulate(params: dict[str, Any]) -> dict[str, Any]:
    """One row of eight scores (scale × 0…7 in some order) with values 1…8 through `online_softmax`, tile by tile.

    params: tile, order, scale, rescale, subtract_max, precision; allowed values in WIDGET_CHOICES. Raises InputError.
    """
    p = common.checked(params, WIDGET_CHOICES)
    keys, values, hbm, naive_hbm = ORDERS[p["order"]], list(range(1, 9)), HBM(), HBM()
    lines = (p["rescale"], p["subtract_max"], p["precision"])
    result, tiles = online_softmax(p["scale"], keys, values, p["tile"], *lines, hbm)
    row = lambda numbers: torch.tensor(numbers, dtype=torch.float64).view(-1, 1, 1)  # noqa: E731
    expected = naive_attention(row([p["scale"]]), row(keys), row(values), False, scale=1.0, hbm=naive_hbm)[0].item()
    allowed = 4 * len(keys) * torch.finfo(PRECISIONS[p["precision"]]).eps / 2 * expected  # four roundings a key
    growths = sum(tile["after"]["m"] > tile["before"]["m"] for tile in tiles[1:])
    largest = max(abs(s) for tile in tiles for s in tile["scores"])
    verdict = "not a number" if result != result else "right" if abs(result - expected) <= allowed else "wrong"
    return {
        "params": p, "keys": list(keys), "values": values, "tiles": _finite(tiles), "result": _finite(result),
        "expected": round(expected, 9), "verdict": verdict, "growths": growths, "largest": largest,
        "hbm_floats": {"online": hbm.floats, "naive": naive_hbm.floats},
    }  # fmt: skip


def _finite(value: Any) -> Any:
    """JSON has no infinities: they become the words inf, -inf and nan."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(x: float | str) -> str:
    return x if isinstance(x, str) else f"{x:.4g}" if x == 0 or 0.001 <= abs(x) < 1e5 else f"{x:.2e}"


def describe(trace: dict[str, Any]) -> str:
    """The state of the simulation as text, as the widget's slot shows it."""
    p = trace["params"]
    deleted = [what for what, kept in (("rescale", p["rescale"]), ("max", p["subtract_max"])) if not kept]
    lines = [f"scores {p['scale']:g} × {p['order']}, tiles of {p['tile']}, {p['precision']}"
             + (f", without {' and '.join(deleted)}" if deleted else "")]  # fmt: skip
    for tile in trace["tiles"]:
        a, b = tile["before"], tile["after"]
        lines.append(f"  keys {tile['start']}–{tile['stop'] - 1}: m {_number(a['m']):>5} → {_number(b['m']):<5}"
                     f" α {_number(tile['alpha']):<8} ℓ {_number(b['l']):<8} O {_number(b['o'])}")  # fmt: skip
    shown = trace["result"] if isinstance(trace["result"], str) else f"{trace['result']:.3f}"
    excuse = ""  # why a deleted line did no harm
    if deleted and trace["verdict"] == "right":
        excuse = " (the maximum never grew after the first tile)" if p["subtract_max"] else (
            f" (the largest score, {trace['largest']:g}, is within exp's range)")  # fmt: skip
    lines.append(f"O / ℓ = {shown}, softmax says {trace['expected']:.3f}: {trace['verdict']}{excuse}")
    lines.append(f"floats through HBM: {trace['hbm_floats']['online']}, unfused {trace['hbm_floats']['naive']}")
    return "\n".join(lines)


# --- 8. Counting, and the numbers that the text quotes --------------------------------------------------------------


def attention_flops(T: int, S: int, Hq: int, D: int, causal: bool) -> int:
    """Two products of 2 · D FLOPs per visible (query, key) pair and head. The queries are the last T of S."""
    pairs = T * S - (T * (T - 1) // 2 if causal else 0)
    return 4 * pairs * D * Hq


def makespans(tiles: int, heads: int, processors: int) -> dict[str, float]:
    """Time until the last causal program ends, against a perfect split; a free processor takes the next program."""

    def makespan(costs: Sequence[int]) -> float:
        busy = [0] * processors
        for cost in costs:
            heapq.heapreplace(busy, busy[0] + cost)
        return max(busy) * processors / sum(costs)

    return {"in_order": makespan([i + 1 for _ in range(heads) for i in range(tiles)]),
            "heaviest_first": makespan([tiles - i for i in range(tiles) for _ in range(heads)])}  # fmt: skip


def facts() -> dict[str, Any]:
    """Every deterministic number of the lesson's text and figures. No model, under a second."""
    widget = lambda **change: simulate(WIDGET_DEFAULT | change)  # noqa: E731
    states = list(itertools.product(WIDGET_CHOICES["tile"], ORDERS, WIDGET_CHOICES["scale"]))

    def survivors(**change: Any) -> dict[str, int]:
        """In how many of the widget's states a deleted line goes unnoticed, per order."""
        found = [o for t, o, s in states if widget(tile=t, order=o, scale=s, **change)["verdict"] == "right"]
        return {"total": len(found), **{order: found.count(order) for order in ORDERS}}

    def moved(T: int, D: int, causal: bool = False) -> dict[str, float]:
        n = hbm_floats(T, D, causal=causal)
        return n | {"tiled_ratio": n["naive"] / n["tiled"], "once_ratio": n["naive"] / n["once"]}

    hopper = choose_tiles(torch.bfloat16, 128, capability=(9, 0))
    M, N, D = hopper.block_m, hopper.block_n, 128
    return {
        "matrix": {"bytes_fp32": 8192**2 * 4, "all_heads": 32 * 8192**2 * 4, "output_bytes_bf16": 8192 * 128 * 2},
        "widget": {
            "right": widget()["result"], "no_rescale": widget(rescale=False)["result"],
            "decreasing": widget(order="decreasing", rescale=False)["result"], "states": len(states),
            "online_floats": widget()["hbm_floats"]["online"], "naive_floats": widget()["hbm_floats"]["naive"],
        },
        "survive": {"no_rescale": survivors(rescale=False), "no_max": survivors(subtract_max=False),
                    "no_max_fp16": survivors(subtract_max=False, precision="fp16")},
        "exp_limit": {name: math.log(torch.finfo(dtype).max) for name, dtype in PRECISIONS.items()},
        "hbm": {f"d{D}": {str(T): moved(T, D) for T in (1024, 2048, 4096, 8192, 16384)} for D in (64, 128)},
        "hbm_causal_8k": moved(8192, 128, causal=True),
        "t_for_75": {f"d{D}": next(T for T in range(74 * D, 75 * D) if moved(T, D)["once_ratio"] >= 75)
                     for D in (64, 128)},
        "hopper": {
            "block_m": M, "block_n": N, "threads": (threads := 32 * hopper.num_warps),
            "o_registers": M * D // threads, "score_registers": M * N // threads,
            # Cycles of one SM for a tile of keys: it does 2,048 multiply-adds, or 16 exponentials, a cycle.
            "mma_cycles": 2 * M * N * D // 2048, "exp_cycles": M * N // 16,
        },
        "causal_tiles": {"total": 16384**2 // M // N, "walked": (n := 16384 // N) * (16384 // M + 1) // 2, "masked": n},
        "makespan": {f"{T // 1024}k": makespans(T // M, 16, 2 * 132) for T in (4096, 16384)},
        "chosen": {case: select_backend(config)[0] for case, config in CASES.items()},
        "block_sparse": block_sparse_facts(),
    }  # fmt: skip


# --- 9. Figures -----------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """The lesson's figures, from `facts()` and the committed measurements alone."""
    drawn = [_draw_tiles(folder), _draw_traffic(folder, facts())]
    if rows := common.results(KEY).get("bench", {}).get("cpu"):
        drawn.append(_draw_cpu(folder, rows))
    if rows := common.results(KEY, "h200").get("bench", {}).get("gpu"):
        drawn.append(_draw_gpu(folder, rows))
    return drawn


def _draw_tiles(folder: str | Path) -> Path:
    """Left: the score matrix as the causal kernel walks it. Right: m and ℓ of one row as the tiles arrive."""
    from matplotlib.patches import Rectangle

    figure, (left, right) = common.new_figure(8.0, 3.7, ncols=2, width_ratios=(1, 1.15))
    n, colors = 6, common.COLORS
    for i, j in itertools.product(range(n), range(n)):
        color = colors["light"] if j > i else colors["orange"] if j == i else colors["blue"]
        left.add_patch(Rectangle((j + 0.04, i + 0.04), 0.92, 0.92, facecolor=color, edgecolor="none"))
    for i in range(n):
        arrow = {"arrowstyle": "->", "color": "white", "linewidth": 1.5}
        left.annotate("", (i + 0.85, i + 0.5), (0.15, i + 0.5), arrowprops=arrow)
    left.text(3.5, 1.5, "never\ncomputed", ha="center", va="center", fontsize=8, color=colors["grey"])
    for i, word in ((0, "starts last"), (n - 1, "starts first")):
        left.text(n + 0.15, i + 0.5, word, va="center", fontsize=9)
    left.set(xlim=(-0.1, n + 1.6), ylim=(n + 0.1, -0.1), aspect="equal", xticks=[], yticks=[],
             xlabel="tiles of keys", ylabel="tiles of queries")  # fmt: skip
    left.set_title("One program per row of tiles")
    for x, color, word in ((0, "blue", "no mask in the loop"), (3.5, "orange", "masked")):
        left.text(x, n + 1.35, "■", color=colors[color], fontsize=11)
        left.text(x + 0.45, n + 1.33, word, fontsize=9)
    for side in ("left", "bottom"):
        left.spines[side].set_visible(False)

    trace = simulate(WIDGET_DEFAULT | {"order": "shuffled"})
    scores = [s for tile in trace["tiles"] for s in tile["scores"]]
    right.bar([i + 0.5 for i in range(8)], scores, width=0.8, color=colors["light"])
    for tile in trace["tiles"]:
        x = [tile["start"], tile["stop"]]
        after = tile["after"]
        right.plot(x, [after["m"]] * 2, color=colors["red"], linewidth=2.5)
        grew = tile["before"]["m"] not in ("-inf", after["m"])
        right.text(sum(x) / 2, 8.75, f"ℓ = {after['l']:.2f}", ha="center", fontsize=9, color=colors["ink"])
        right.text(sum(x) / 2, 8.05, f"past × {tile['alpha']:.2f}" if tile["start"] else "", ha="center", fontsize=9,
                   color=colors["red"] if grew else colors["grey"])  # fmt: skip
        if tile["start"]:
            right.axvline(tile["start"], color=colors["grey"], linewidth=0.8, linestyle=":")
    right.text(0.1, trace["tiles"][0]["after"]["m"] + 0.2, "m", color=colors["red"], fontsize=11)
    right.set(xlim=(0, 8), ylim=(0, 9.6), xlabel="keys, in tiles of two", ylabel="score", yticks=(0, 2, 4, 6),
              xticks=[i + 0.5 for i in range(8)], xticklabels=range(8))  # fmt: skip
    right.set_title("When m grows, the past shrinks")
    right.tick_params(length=0)
    return common.save_figure(figure, folder, "03_tiles")


def _draw_traffic(folder: str | Path, known: dict[str, Any]) -> Path:
    """Floats moved per head against T: unfused, and fused between its two bounds."""
    figure, axes = common.new_figure(8.0, 3.4, ncols=2, sharey=True)
    for axis, D in zip(axes, (64, 128)):
        rows = known["hbm"][f"d{D}"]
        T = [int(t) for t in rows]
        curve = {kind: [rows[str(t)][kind] for t in T] for kind in ("naive", "tiled", "once")}
        axis.fill_between(T, curve["once"], curve["tiled"], color=common.COLORS["blue"], alpha=0.12, linewidth=0)
        for kind, color, label, at, offset in (("naive", "red", "unfused", 2, (-22, 6)),
                                               ("tiled", "blue", "fused, no L2", 0, (6, -9)),
                                               ("once", "green", "fused, K and V in L2", 1, (0, -14))):  # fmt: skip
            axis.plot(T, curve[kind], color=common.COLORS[color], linewidth=2, marker="o", markersize=3)
            axis.annotate(label, (T[at], curve[kind][at]), xytext=offset, textcoords="offset points", fontsize=9,
                          color=common.COLORS[color], ha="right" if kind == "naive" else "left")  # fmt: skip
        t75 = known["t_for_75"][f"d{D}"]
        n = hbm_floats(t75, D)
        axis.annotate("", (t75, n["once"]), (t75, n["naive"]), arrowprops={"arrowstyle": "<->", "linewidth": 1.2})
        axis.text(t75 * 1.06, n["once"] * 2.2, f"75 × at\nT = {t75:,}", fontsize=9)
        axis.set(xscale="log", yscale="log", xlabel="T (prompt tokens)", title=f"D = {D}, full attention, M = 128")
        axis.set_xticks(T, [f"{t // 1024}k" for t in T])
        axis.minorticks_off()
    axes[0].set_ylabel("floats moved, per head")
    axes[0].set_yticks([1e6, 1e7, 1e8, 1e9], ["1 M", "10 M", "100 M", "1 G"])
    return common.save_figure(figure, folder, "03_traffic")


def _draw_cpu(folder: str | Path, rows: list[dict[str, Any]]) -> Path:
    """Time and memory of three ways on the CPU that was measured."""
    figure, axes = common.new_figure(8.0, 3.2, ncols=2)
    ways = (("naive", "red", "unfused"), ("tiled", "blue", "tiled, in torch"), ("fused", "green", "PyTorch's fused"))
    for axis, unit, label, title in ((axes[0], "ms", "milliseconds", "Time"), (axes[1], "mib", "MiB", "Peak memory")):
        for kind, color, word in ways:
            points = [(row["T"], max(row[f"{kind}_{unit}"], 0.5)) for row in rows if row[f"{kind}_{unit}"] is not None]
            axis.plot(*zip(*points), color=common.COLORS[color], linewidth=2, marker="o", markersize=4, label=word)
        axis.set(xscale="log", yscale="log", ylabel=label, title=title)
        _length_ticks(axis, rows)
        axis.minorticks_off()
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
    axes[1].set_yticks([0.5, 1, 10, 100, 1000], ["0", "1", "10", "100", "1,000"])  # a logarithmic axis has no zero
    axes[0].legend(fontsize=9)
    return common.save_figure(figure, folder, "03_cpu")


def _draw_gpu(folder: str | Path, rows: list[dict[str, Any]]) -> Path:
    """TFLOP/s over T on the GPU that was measured, beside PyTorch's two fused backends."""
    figure, axes = common.new_figure(8.0, 3.4, ncols=2, sharey=True)
    ways = (("ours", "blue", "warps take turns"), ("plain", "orange", "all warps alike"),
            ("flash", "grey", "FlashAttention-2"), ("cudnn", "green", "cuDNN"))  # fmt: skip
    for axis, causal in zip(axes, (True, False)):
        for (D, style), (kind, color, word) in itertools.product(((128, "-"), (64, "--")), ways):
            points = [(r["T"], r[kind]) for r in rows if (r["D"], r["causal"]) == (D, causal) and r.get(kind)]
            if points:
                axis.plot(*zip(*points), style, color=common.COLORS[color], linewidth=2, marker="o", markersize=3,
                          label=word if D == 128 else None)  # fmt: skip
        axis.set(xscale="log", title=f"{'causal' if causal else 'full'}, D = 128 (dashed: 64)", ylim=(0, None))
        _length_ticks(axis, rows)
    axes[0].set_ylabel("TFLOP/s")
    axes[1].legend(fontsize=8, ncols=2, loc="lower right")
    return common.save_figure(figure, folder, "03_gpu")


def _length_ticks(axis: Any, rows: list[dict[str, Any]]) -> None:
    lengths = sorted({row["T"] for row in rows})
    axis.set_xticks(lengths, [f"{T:,}" if T < 1024 else f"{T // 1024}k" for T in lengths])
    axis.set_xlabel("T")
    axis.minorticks_off()


# --- 10. The story, as this machine tells it -------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """The shared flags, and the knobs of the widget."""
    p = common.parser(__doc__)
    p.add_argument("--tile", type=int, choices=WIDGET_CHOICES["tile"], default=2, help="keys per tile in step 5")
    p.add_argument("--order", choices=list(ORDERS), default="increasing", help="order of the scores in step 5")
    p.add_argument("--scale", type=float, choices=WIDGET_CHOICES["scale"], default=1, help="factor of those scores")
    p.add_argument("--precision", choices=list(PRECISIONS), default="fp32", help="of every operation in step 5")
    p.add_argument("--no-rescale", action="store_true", help="break it: forget to multiply the past by α")
    p.add_argument("--no-max", action="store_true", help="break it: subtract no maximum (seen at --scale 16, fp16: 4)")
    p.add_argument("--attention-backend", metavar="NAME", help=f"run the model on this one: {', '.join(BACKENDS)}")
    return p


def reference(q: Tensor, k: Tensor, v: Tensor, batch: Batch, causal: bool = True,
              window: int | None = None, scale: float | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`naive_attention` in fp64, sequence by sequence of a packed batch."""
    query_lens, seq_lens = batch.query_start_loc.diff().tolist(), batch.seq_start_loc.diff().tolist()
    sequences = zip(q.double().split(query_lens), k.double().split(seq_lens), v.double().split(seq_lens))
    parts = [naive_attention(*sequence, causal, window, scale) for sequence in sequences]
    return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts], dim=1)


def random_qkv(batch: Batch, Hq: int, Hkv: int, D: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q [T, Hq, D], k and v [S_total, Hkv, D] for a batch, from the current seed."""
    T, S = int(batch.query_start_loc[-1]), int(batch.seq_start_loc[-1])
    return tuple(torch.randn(*shape, D, device=common.device()).to(dtype) for shape in ((T, Hq), (S, Hkv), (S, Hkv)))


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    machine = common.start(args)
    if (D := llama.check_context(args.model, 8).head_dim) % 16 or D > 256:
        raise common.InputError(f"--model {args.model}: head_dim {D}; the kernel takes multiples of 16 to 256")
    args.attention_backend = requested_backend(args.attention_backend)
    select_backend(here(torch.float32, D), args.attention_backend)  # or the reasons why not, before the story begins
    show_traffic()
    show_kernel()
    show_model(args)
    show_backends()
    show_recurrence(args)
    show_deleted_lines()
    bench = measure_gpu(args.bench) if common.HAS_GPU else measure_cpu(args.bench)
    if args.figure:
        draw(args.figure)
    if args.json:
        common.merge_json(args.json, KEY, {"machine": machine, "facts": facts(), "bench": bench})


def show_traffic() -> None:
    """Step 1: floats that the algorithms moved against the formulas, then a table by the formulas."""
    common.heading("1. Every float that crosses HBM")
    batch = Batch.of([384])
    q, k, v = random_qkv(batch, 2, 2, 64, torch.float32)
    counted: dict[str, int] = {}
    for name, attention in (("naive", naive_attention), ("tiled", tiled_attention)):
        out, _ = attention(q, k, v, hbm=(hbm := HBM()))
        counted[name] = hbm.floats
    common.check("tiled attention in torch", out, reference(q, k, v, batch)[0])
    formula = hbm_floats(384, 64, causal=True)
    common.check_equal("what it and the naive one moved is what the formulas say", counted,
                       {kind: 2 * formula[kind] for kind in counted})  # fmt: skip
    common.say("By those formulas, per head, D = 128, full attention, tiles of 128 queries:")
    common.table(("T", "unfused", "fused, no L2", "less by", "fused, K and V in L2", "less by", "matrix, fp32"), [
        (f"{int(T):,}", f"{n['naive'] / 1e6:,.1f} M", f"{n['tiled'] / 1e6:.1f} M", f"{n['tiled_ratio']:.2f} ×",
         f"{n['once'] / 1e6:.1f} M", f"{n['once_ratio']:.1f} ×", f"{int(T) ** 2 * 4 / 1e6:,.0f} MB")
        for T, n in facts()["hbm"]["d128"].items() if T != "2048"])  # fmt: skip


def show_kernel() -> None:
    """Step 2: every mask of the kernel against fp64, and the two rows that break a careless softmax."""
    common.heading("2. The Triton kernel against fp64: two prefills, a chunk behind a context, a decode, packed")
    if not common.HAS_TRITON:
        return common.skipped("the kernel", common.kernel_mode())
    batch = Batch.of((65, 17, 30, 1), (65, 17, 100, 50))
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if common.HAS_GPU else (torch.float32,)
    worst = 0.0
    for dtype in dtypes:
        q, k, v = random_qkv(batch, 4, 2, 64, dtype)
        for what, options in (("causal", {}), ("full", {"causal": False}), ("window of 24", {"window": 24})):
            with common.use_kernels():
                out, lse = flash_attention(q, k, v, *batch, **options)
            ref, ref_lse = reference(q, k, v, batch, **options)
            common.check(f"{str(dtype)[6:]}, {what}", out, ref)
            worst = max(worst, common.assert_close(lse, ref_lse))
    common.say(f"✓ log-sum-exp of all of these: relative error at most {worst:.1e} (allowed 1e-05)")
    batch = Batch.of([3], [2])  # query 0 stands before the first key
    q, k, v = random_qkv(batch, 1, 1, 64, torch.float32)
    k *= 1000
    with common.use_kernels():
        out, lse = flash_attention(q, k, v, *batch)
    common.check("scores in the thousands, far past exp's range", out, reference(q, k, v, batch)[0])
    common.check_equal("a row that sees nothing is 0, its log-sum-exp −inf",
                       (out[0].abs().max().item(), lse[0, 0].item()), (0.0, -math.inf))  # fmt: skip


def prefill(model: llama.Llama, prompts: Sequence[Sequence[int]], run: Run, others: Run | None = None,
            every: int = 1) -> Tensor:  # fmt: skip
    """Logits [B, vocab] of prompts packed in one pass; `run` attends in each `every`-th layer, `others` elsewhere."""
    lens = [len(prompt) for prompt in prompts]
    batch = Batch.of(lens)
    token_ids = torch.tensor([token for prompt in prompts for token in prompt], device=model.device)
    positions = torch.cat([torch.arange(n, device=model.device) for n in lens])
    attend = lambda layer, q, k, v: (others if layer % every else run)(q, k, v, batch)  # noqa: E731
    hidden = model.forward(token_ids, positions, attend)
    return model.logits(hidden[batch.query_start_loc[1:].long() - 1])


def show_model(args: argparse.Namespace) -> None:
    """Step 3: the model's logits through a backend and through the kernel."""
    common.heading("3. The real model: two prompts, packed, in one forward pass")
    model, tokenizer = llama.load(args.model)
    prompts = [tokenizer.encode(text) for text in ("The capital of France is", "The opposite of hot is")]
    naive = lambda q, k, v, batch: reference(q, k, v, batch)[0].to(q.dtype)  # noqa: E731
    ref = prefill(model, prompts, naive)
    name, _ = select_backend(here(model.dtype, model.config.head_dim), args.attention_backend)
    common.check(f"logits through {name}", prefill(model, prompts, BACKENDS[name].run), ref)
    if common.HAS_TRITON:
        every, before = 1 if common.HAS_GPU else 5, flash_attention_kernel.launches
        logits = prefill(model, prompts, run_triton, BACKENDS[name].run, every)
        launches = flash_attention_kernel.launches - before
        common.check(f"logits with the kernel in {launches} of {model.config.num_hidden_layers} layers", logits, ref)
    else:
        common.skipped("the prefill through the kernel", common.kernel_mode())
    for prompt, row in zip(prompts, ref):
        common.say(f"{tokenizer.decode(prompt)} →{tokenizer.decode([int(row.argmax())], False)}")


def show_backends() -> None:
    """Step 4: what each backend would need, those that run here against fp64, and the choices elsewhere."""
    common.heading("4. Which backend runs, and why not the others")
    config = here(torch.float32, 64)
    chosen, others = select_backend(config)
    common.say(f"fp32, D = 64, on this machine: {chosen}. The others:")
    common.say("\n".join(f"  {name:<15} {BACKENDS[name].what}. Not here: {why[0]}" for name, why in others.items()))
    batch = Batch.of((20, 1, 9), (20, 30, 14))
    q, k, v = random_qkv(batch, 4, 2, 64, torch.float32)
    ref, _ = reference(q, k, v, batch)
    for name, backend in BACKENDS.items():
        if backend.run and ((name == "TRITON_ATTN" and common.HAS_TRITON) or not backend.invalid_reasons(config)):
            common.check(name, backend.run(q, k, v, batch), ref)
    check_block_sparse()  # FLASHINFER's format and plan, in torch
    for case, c in CASES.items():
        name, others = select_backend(c)
        before = [f"{other} ({others[other][0]})" for other in priorities(c)[: priorities(c).index(name)]]
        common.say(f"{case:<19} → {name}" + (f", not {', '.join(before)}" if before else ""))


def show_recurrence(args: argparse.Namespace) -> None:
    """Step 5: one row, tile by tile, as the flags say; CheckFailed if a deleted line made it wrong."""
    common.heading("5. One row of scores, a tile at a time")
    trace = simulate({"tile": args.tile, "order": args.order, "scale": args.scale, "precision": args.precision,
                      "rescale": not args.no_rescale, "subtract_max": not args.no_max})  # fmt: skip
    common.say(describe(trace))
    if trace["verdict"] != "right":
        raise common.CheckFailed(f"one pass gives {_number(trace['result'])}, softmax {trace['expected']:.3f}")
    luck = ", by luck" if args.no_rescale or args.no_max else ""
    common.say(f"✓ one pass over the tiles gives the softmax of the whole row{luck}")


def show_deleted_lines() -> None:
    """Step 6: of the widget's states, those that stay right without a line."""
    common.heading("6. Delete one line: in how many of the widget's states is the result still right?")
    known = facts()
    of = known["widget"]["states"] // len(ORDERS)
    rows = {"the rescale": "no_rescale", "the max, fp32": "no_max", "the max, fp16": "no_max_fp16"}
    common.table(("deleted", *ORDERS), [
        (what, *(f"{known['survive'][key][order]} of {of}" for order in ORDERS)) for what, key in rows.items()
    ])  # fmt: skip


def peak_memory(fn: Callable[[], Any]) -> float | None:
    """MiB that `fn` needs beyond what is allocated already; None where the system does not tell."""
    try:  # Linux: reset the high-water mark of resident memory, and look at it afterwards
        status = lambda: dict(x.split(":", 1) for x in Path("/proc/self/status").read_text().splitlines())  # noqa: E731
        Path("/proc/self/clear_refs").write_text("5")
        before = int(status()["VmRSS"].split()[0])
        fn()
        return max(0, int(status()["VmHWM"].split()[0]) - before) / 1024
    except OSError:
        return None


def measure_cpu(long: bool) -> dict[str, Any]:
    """Naive, tiled and fused attention of SmolLM2's shape, causal, fp32: milliseconds and peak MiB over T."""
    common.heading("7. Measured on this CPU: SmolLM2's 9 heads, causal, fp32, one layer")
    rows = []
    for T in (512, 1024, 2048, 4096) if long else (256, 512, 1024):
        batch = Batch.of([T])
        q, k, v = random_qkv(batch, 9, 3, 64, torch.float32)
        ways = {
            "naive": lambda q=q, k=k, v=v: naive_attention(q, k, v),
            "tiled": lambda q=q, k=k, v=v: tiled_attention(q, k, v, block_m=256, block_n=256),
            "fused": lambda q=q, k=k, v=v, batch=batch: flash_attention(q, k, v, *batch),
        }
        rows.append({"T": T} | {f"{name}_mib": peak_memory(fn) for name, fn in ways.items()} | {
            f"{name}_ms": common.measure(fn, 2.0 if long else 0.1).median * 1e3 for name, fn in ways.items()
        })  # fmt: skip
    common.table(
        ("T", "unfused", "memory", "tiled, in torch", "memory", "torch's fused", "memory"),
        [(f"{r['T']:,}", *(cell for name in ("naive", "tiled", "fused")
                           for cell in (f"{r[name + '_ms']:.1f} ms", "–" if r[name + "_mib"] is None else
                                        f"{r[name + '_mib']:,.0f} MiB"))) for r in rows],
    )  # fmt: skip
    common.skipped("TFLOP/s of the kernel", "no GPU here, and the interpreter's time means nothing")
    return {"cpu": rows}


# What `--bench` tries on a GPU beside the default, so that a new GPU shows what it likes.
SWEEP = (Tiles(128, 128, 8, 2), Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 3), Tiles(128, 64, 4, 2), Tiles(128, 32, 8, 3),
         Tiles(64, 128, 4, 2), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3))  # fmt: skip


def measure_gpu(long: bool) -> dict[str, Any]:
    """bf16 TFLOP/s at 16k tokens in sequences of T, Hq · D = 2048, as the FlashAttention papers measure."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    common.heading("7. Measured on this GPU: bf16, 16k tokens in sequences of T, Hq · D = 2048")
    ceiling = common.matmul_rate(torch.bfloat16) / 1e12
    common.say(f"ceilings of this run: matmul {ceiling:.0f} TFLOP/s, copy {common.copy_bandwidth() / 1e12:.2f} TB/s")
    peers = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    rows, sweep = [], []
    lengths = (512, 1024, 2048, 4096, 8192, 16384) if long else (1024, 4096, 16384)
    for D, T, causal in ((D, T, causal) for D in (128, 64) for T in lengths for causal in (True, False)):
        B, H = 16384 // T, 2048 // D
        batch = Batch.of([T] * B)
        q, k, v = random_qkv(batch, H, H, D, torch.bfloat16)
        dense = [x.view(B, T, H, D).transpose(1, 2) for x in (q, k, v)]
        flops = B * attention_flops(T, T, H, D, False) // (2 if causal else 1)  # causal is half of full, as published

        def rate(fn: Callable[[], Any], flops: int = flops) -> float | None:
            try:
                return flops / common.measure(fn, 0.5 if long else 0.1).median / 1e12
            except Exception:  # a peer or a tile that this GPU cannot run is a gap in the table, not the end
                return None

        def ours(tiles: Tiles | None, q=q, k=k, v=v, batch=batch, causal=causal) -> Any:
            return flash_attention(q, k, v, *batch, causal=causal, tiles=tiles)

        shape, plain = {"T": T, "D": D, "causal": causal}, choose_tiles(torch.bfloat16, D, None, nvidia_capability())
        before, out = flash_attention_kernel.launches, ours(None)[0]
        alike = flash_attention_kernel.launches > before  # Hopper's kernel did not take it
        common.assert_close(out, ours(plain)[0])
        row = shape | {"plain": rate(lambda f=ours, t=plain: f(t))}
        row["ours"] = row["plain"] if alike else rate(lambda f=ours: f(None))
        for name, backend in peers.items():
            with sdpa_kernel(backend):
                row[name] = rate(lambda d=dense, c=causal: F.scaled_dot_product_attention(*d, is_causal=c))
        if importlib.util.find_spec("flash_attn"):
            row["flash_attn"] = rate(lambda q=q, k=k, v=v, b=batch, c=causal: run_flash_attn(q, k, v, b, c))
        rows.append(row)
        if long and T in (2048, 16384):
            sweep += [shape | {"tiles": list(tiles), "ours": rate(lambda f=ours, t=tiles: f(t))} for tiles in SWEEP]
    names = [name for name in ("ours", "plain", "flash", "cudnn", "flash_attn") if any(row.get(name) for row in rows)]
    show = lambda x: f"{x:.0f}" if x else "–"  # noqa: E731
    where = lambda r: (f"{r['T']:,}", r["D"], "causal" if r["causal"] else "full")  # noqa: E731
    common.table(("T", "D", "mask", *(f"{name} TFLOP/s" for name in names), "of matmul"),
                 [(*where(r), *(show(r.get(name)) for name in names), f"{(r['ours'] or 0) / ceiling:.0%}")
                  for r in rows])  # fmt: skip
    if sweep:
        common.table(("T", "D", "mask", "M, N, warps, stages", "TFLOP/s"),
                     [(*where(r), ", ".join(map(str, r["tiles"])), show(r["ours"])) for r in sweep])  # fmt: skip
    return {"gpu": rows, "sweep": sweep, "matmul_tflops": ceiling}


if __name__ == "__main__":
    common.run(main)
