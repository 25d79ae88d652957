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
  uv run python vllm/03_flash_attention.py --bench                          minutes: the measured curves

Read for this: Milakov and Gimelshein 2018 (online softmax), Dao et al. 2022 and Dao 2023 (FlashAttention 1 and 2),
Shah et al. 2024 (FlashAttention-3), Triton's tutorial 06.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used
from common import tl, triton

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine import arguments
from engine.model import llama, loader
from lab import cli, timing

KEY = "03_flash_attention"


# --- What we want to compute: attention in three kernels, with a matrix between each two ----------------------------


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, window: int | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence in three kernels (Dao et al. 2022, Algorithm 0), in at least fp32.

    The T queries are the last T of the S positions. A `window` w lets each see itself and w − 1 keys before it.
    Semantics: o_t = Σ_s softmax_s(scale · q_t·k_s) v_s over the visible s; lse_t = log Σ_s exp(scale · q_t·k_s).
    Shapes: q [T, Hq, D]; k, v [S, Hkv, D]; returns o [T, Hq, D], lse [Hq, T]; 0 and −∞ for a row that sees nothing.
    """
    (T, Hq, D), (S, Hkv, _) = q.shape, k.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(dtype), *(x.to(dtype).repeat_interleave(Hq // Hkv, dim=1) for x in (k, v))
    scale = 1 / math.sqrt(D) if scale is None else scale
    position, key = torch.arange(S - T, S, device=q.device)[:, None], torch.arange(S, device=q.device)
    seen = (key <= position) | (not causal)  # [T, S]
    if window:
        seen = seen & (key > position - window)
    # The first kernel reads q and k, and writes a matrix.
    scores = torch.einsum("thd,shd->hts", q, k) * scale  # [Hq, T, S]
    scores = scores.masked_fill(~seen, -math.inf)
    # The second reads it, and writes another.
    lse = scores.logsumexp(dim=-1)  # [Hq, T]
    weights = scores.softmax(dim=-1).masked_fill((lse == -math.inf)[..., None], 0)  # [Hq, T, S]
    # The third reads that, and v.
    return torch.einsum("hts,shd->thd", weights, v), lse


def packed_reference(
    q: Tensor, k: Tensor, v: Tensor, query_lens: Sequence[int], seq_lens: Sequence[int], **options: Any
) -> tuple[Tensor, Tensor]:
    """`naive_attention` of sequences that lie one behind the other in q [T, Hq, D] and k, v [S_total, Hkv, D]."""
    sequences = zip(q.split(query_lens), k.split(seq_lens), v.split(seq_lens))
    parts = [naive_attention(*sequence, **options) for sequence in sequences]
    return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts], dim=1)


# --- The same softmax in one pass -----------------------------------------------------------------------------------


def fold(m: Tensor, l: Tensor, o: Tensor, s: Tensor, v: Tensor, rescale: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Take a tile of N keys into what M queries have gathered: the online softmax (Milakov and Gimelshein 2018).

        m' = max(m, max s)    α = exp(m − m')    p = exp(s − m')    ℓ' = α ℓ + Σ p    O' = α O + p v

    Shapes: m, l [..., M]; o [..., M, D]; scores s [..., M, N]; v [..., N, D]. It begins with m = −∞, ℓ = 0, O = 0;
    after the last tile softmax(s) v is O / ℓ. `rescale=False` forgets α, to see what that breaks.
    """
    m_new = torch.maximum(m, s.amax(dim=-1))
    origin = torch.where(m_new == -math.inf, 0, m_new)  # nothing seen yet: exp(−∞ − −∞) would not be a number
    alpha = (m - origin).exp() if rescale else torch.ones_like(m)
    p = (s - origin[..., None]).exp()
    return m_new, alpha * l + p.sum(dim=-1), alpha[..., None] * o + p @ v


# --- The Triton kernel: the same recurrence, and O never leaves the chip until it is done ---------------------------


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

    # Every query of the tile sees the keys [full, edge): no mask there. Before them are those on a window's edge, after
    # them those on the diagonal. No key from `end` on is visited.
    first = m0 + S - query_len  # position of the tile's first query
    full = 0
    end = S
    edge = S // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.minimum(S, first + BLOCK_M)
        edge = (first + 1) // BLOCK_N * BLOCK_N
    if WINDOW:
        full = tl.minimum(tl.cdiv(tl.maximum(first + BLOCK_M - WINDOW, 0), BLOCK_N) * BLOCK_N, end)
    edge = tl.maximum(edge, full)

    q = q_rows.load([m0, 0])  # [M, D]
    if UPCAST:
        q = q.to(tl.float32)  # the interpreter has no bfloat16 arithmetic
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if WINDOW:
        begin = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        acc, l, m = attend_to_keys(
            acc, l, m, q, k_rows, v_rows, begin, full, first, S, scale, True, CAUSAL, WINDOW, BLOCK_M, BLOCK_N
        )
    acc, l, m = attend_to_keys(
        acc, l, m, q, k_rows, v_rows, full, edge, first, S, scale, False, CAUSAL, WINDOW, BLOCK_M, BLOCK_N
    )
    acc, l, m = attend_to_keys(
        acc, l, m, q, k_rows, v_rows, edge, end, first, S, scale, True, CAUSAL, WINDOW, BLOCK_M, BLOCK_N
    )

    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    out = acc / tl.where(l == 0, 1.0, l)[:, None]
    out_ptr += (query_start + m0) * (Hq * D) + head * D
    inside = (m0 + row < query_len)[:, None] & (column < D)[None, :]
    tl.store(out_ptr + row[:, None] * (Hq * D) + column[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
    # Everything was in powers of 2: lse = ln 2 · (m + log2 ℓ). Where nothing was seen, m is −inf and so is lse.
    lse = (m + tl.math.log2(tl.where(l == 0, 1.0, l))) * 0.6931471805599453
    tl.store(lse_ptr + head.to(tl.int64) * T + query_start + m0 + row, lse, mask=m0 + row < query_len)


# --- Its wrapper ----------------------------------------------------------------------------------------------------


def choose_tiles(
    dtype: torch.dtype, head_size: int, window: int | None = None, capability: tuple[int, int] | None = None
) -> tuple[int, ...]:
    """(M queries, N keys, warps, tiles of keys in flight, most registers of a thread; 0: as the compiler likes).

    What has to stay in registers, in fp32, is O [M, D] and a tile's scores [M, N]. On Hopper (capability (9, 0)) two
    programs share an SM, and one takes its exponentials while the other has the tensor cores: 2 × 256 threads × 128
    registers are all there are. Elsewhere (None: not NVIDIA's) these are the largest that spill nowhere; a test
    compiles them. fp32 has no exact product on tensor cores: a thread holds whole rows.
    """
    hopper = capability == (9, 0)
    if dtype == torch.float32:
        return (32 if head_size <= 64 else 16), 16, 8, 1, 0
    if hopper and head_size <= 64:
        return 64, 128, 4, 2, 0
    if head_size <= 128:
        return 128, 64 if capability else 32, 8, 2, 128 if hopper and not window else 0
    return 128 if hopper else 64, 32, 8, 2, 0


def nvidia_capability(device: torch.device | None = None) -> tuple[int, int] | None:
    """Of a GPU (None: the current one), if it is NVIDIA's."""
    return torch.cuda.get_device_capability(device) if common.HAS_GPU and not torch.version.hip else None


def heads_per_group(Hq: int, Hkv: int, kv_bytes: int, l2_bytes: int = 32 << 20) -> int:
    """Query heads that run side by side: as many as have their keys and values (`kv_bytes` per KV head) in L2."""
    fit = max(1, l2_bytes // max(1, kv_bytes))
    return max(n for n in range(1, Hkv + 1) if Hkv % n == 0 and n <= fit) * (Hq // Hkv)


def aligned(x: Tensor) -> Tensor:
    """TMA wants a contiguous last dimension, and rows and heads that begin at multiples of 16 bytes."""
    unit = 16 // x.element_size()
    fits = x.stride(2) == 1 and x.stride(0) % unit == 0 and x.stride(1) % unit == 0 and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)  # `contiguous` may return x as it is


def check_arguments(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float) -> None:
    """Raises ValueError for what `flash_attention` does not take."""
    (_, Hq, D), Hkv = q.shape, k.shape[1]
    if not (k.shape == v.shape and k.shape[2] == D and q.dtype == k.dtype == v.dtype and Hkv and Hq % Hkv == 0):
        what = ", ".join(f"{name} {list(x.shape)} {x.dtype}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"{what} do not go together: same dtype and head size, and Hkv divides Hq")
    if D % 16 or D > 256:
        raise ValueError(f"head size {D}: allowed are multiples of 16 up to 256")
    if window is not None and not (causal and window >= 1):
        raise ValueError(f"window {window} with causal={causal}: a window is at least 1 and needs causal attention")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale {scale}: it must be positive, for the largest score times scale is the maximum")


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    seq_start_loc: Tensor,
    max_query_len: int,
    max_seq_len: int,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    tiles: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over B sequences packed end to end; queries of a sequence are the last of its keys' positions.

    Semantics: o_t = Σ_s softmax_s(scale · q_t·k_s) v_s over the visible s of t's own sequence; lse_t = log Σ_s exp(…).
    Shapes: q [T, Hq, D]; k, v [S_total, Hkv, D]; query_start_loc, seq_start_loc int32 [B + 1]: sequence b owns the
        half-open rows start_loc[b] to start_loc[b + 1]; returns out [T, Hq, D] in q's dtype, lse fp32 [Hq, T].
    D is a multiple of 16 up to 256. Rows behind the last sequence are not written. On a CPU `naive_attention` answers.
    Raises ValueError for what does not fit. vLLM: `flash_attn_varlen_func` (v1/attention/backends/fa_utils.py).
    """
    (T, Hq, D), (num_keys, Hkv, _) = q.shape, k.shape
    scale = 1 / math.sqrt(D) if scale is None else scale
    check_arguments(q, k, v, causal, window, scale)
    out = torch.empty(T, Hq, D, dtype=q.dtype, device=q.device)
    lse = torch.empty(Hq, T, dtype=torch.float32, device=q.device)
    if T == 0 or num_keys == 0:
        return out.zero_(), lse.fill_(-math.inf)
    if not common.runs_kernel(q):
        lens = query_start_loc.diff().tolist(), seq_start_loc.diff().tolist()
        q, k, v = (x[: sum(n)] for x, n in zip((q, k, v), (lens[0], lens[1], lens[1])))
        o, o_lse = packed_reference(q, k, v, *lens, causal=causal, window=window, scale=scale)
        out[: len(q)], lse[:, : len(q)] = o, o_lse
        return out, lse

    if capability := nvidia_capability(q.device) if q.is_cuda else None:  # where descriptors are put
        triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    q, k, v = (aligned(x) for x in (q, k, v))
    group = heads_per_group(Hq, Hkv, max_seq_len * 2 * D * q.element_size())
    if capability == (9, 0) and not (tiles or common.INTERPRET):
        from engine.attention import hopper  # see the end of the story

        if hopper.fits(q, k, v, max_query_len, window):
            batch = query_start_loc, seq_start_loc, max_query_len
            return hopper.warp_specialized_attention(q, k, v, *batch, group, causal, scale, out, lse)
    block_m, block_n, num_warps, num_stages, maxnreg = tiles or choose_tiles(q.dtype, D, window, capability)
    num_tiles = triton.cdiv(max_query_len, block_m)
    tensors = q, k, v, out, lse, query_start_loc, seq_start_loc
    numbers = scale * math.log2(math.e), T, num_keys, num_tiles, group
    strides = *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]
    heads = {"Hq": Hq, "Hkv": Hkv, "D": D, "BLOCK_D": triton.next_power_of_2(D)}
    mask = {"CAUSAL": causal, "WINDOW": window or 0, "UPCAST": common.INTERPRET and q.dtype == torch.bfloat16}
    cut = {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps, "num_stages": num_stages}
    cut |= {"maxnreg": maxnreg} if maxnreg else {}
    programs = (len(query_start_loc) - 1) * Hq * num_tiles
    flash_attention_kernel[(programs,)](*tensors, *numbers, *strides, **heads, **mask, **cut)
    return out, lse


def packed(query_lens: Sequence[int], seq_lens: Sequence[int]) -> tuple[Tensor, Tensor, int, int]:
    """Where sequences of these lengths begin, int32 [B + 1] each, and the longest: what the wrapper wants to know."""
    query_start_loc, seq_start_loc = (
        torch.tensor([0, *lens], device=common.device()).cumsum(0).int() for lens in (query_lens, seq_lens)
    )
    return query_start_loc, seq_start_loc, max(query_lens), max(seq_lens)


# --- The story ------------------------------------------------------------------------------------------------------

ORDERS = {  # rows of scores; the values are 1 to 8
    "increasing": (0, 1, 2, 3, 4, 5, 6, 7),
    "decreasing": (7, 6, 5, 4, 3, 2, 1, 0),
    "shuffled": (3, 6, 0, 5, 1, 7, 2, 4),
    "spike": (0, 0, 0, 0, 0, 0, 7, 0),
}


def one_row(order: str, scale: float, tile: int, rescale: bool) -> tuple[list[tuple[float, ...]], Tensor, Tensor]:
    """Scores through `fold`: (m, ℓ, O) at the start and after each tile, the result [1, 1], and what softmax says."""
    scores = scale * torch.tensor([ORDERS[order]], dtype=torch.float32)  # [1, 8]
    values = torch.arange(1.0, 9)[:, None]  # [8, 1]
    states = [(torch.tensor([-math.inf]), torch.zeros(1), torch.zeros(1, 1))]
    for s, v in zip(scores.split(tile, dim=1), values.split(tile)):
        states.append(fold(*states[-1], s, v, rescale))
    _, l, o = states[-1]
    return [tuple(x.item() for x in state) for state in states], o / l, scores.softmax(dim=-1) @ values


def show_row(order: str, rescale: bool) -> None:
    """Eight scores, two at a time. Raises CheckFailed if a forgotten rescale made the result wrong."""
    states, out, ref = one_row(order, 1, 2, rescale)
    for i, ((m, _, _), (m_new, l, o)) in enumerate(itertools.pairwise(states)):
        a, b = ORDERS[order][2 * i : 2 * i + 2]
        alpha = math.exp(m - m_new) if rescale else 1
        common.say(f"scores {a} {b}: m {m:>4g} → {m_new:g}   α {alpha:<7.4g} ℓ {l:<6.4g} O {o:.4g}")
    common.say(f"O / ℓ = {out.item():.3f}, softmax says {ref.item():.3f}")
    common.check("one pass over the tiles is the softmax of the row", out, ref)
    if not rescale:
        common.say("By luck: the maximum never grew after the first tile.")


def show_kernel() -> None:
    """Every mask of the kernel against fp64, on lengths that fill no tile."""
    if not common.HAS_TRITON:
        return common.skipped("the kernel", common.kernel_mode())
    lens = (65, 17, 30, 1), (65, 17, 100, 50)
    shapes, dtype = ((113, 4, 64), (232, 2, 64), (232, 2, 64)), torch.bfloat16 if common.HAS_GPU else torch.float32
    q, k, v = (torch.randn(shape, device=common.device()).to(dtype) for shape in shapes)
    masks: dict[str, dict[str, Any]] = {"causal": {}, "full": {"causal": False}, "window of 24": {"window": 24}}
    for what, mask in masks.items():
        ref, ref_lse = packed_reference(q.double(), k.double(), v.double(), *lens, **mask)
        with common.use_kernels():
            out, lse = flash_attention(q, k, v, *packed(*lens), **mask)
        common.check(f"{what}: output", out, ref)
        common.check(f"{what}: log-sum-exp", lse, ref_lse)


def prefill(model: llama.Llama, prompts: Sequence[Sequence[int]], attention: Callable[..., Tensor]) -> Tensor:
    """Logits [B, vocab] behind prompts that are packed in one pass. attention(q, k, v, lens) -> [T, Hq, D]."""
    lens = [len(prompt) for prompt in prompts]
    token_ids = torch.tensor([token for prompt in prompts for token in prompt], device=model.device)  # [T]
    positions = torch.cat([torch.arange(n, device=model.device) for n in lens])
    hidden = model.forward(token_ids, positions, lambda layer, q, k, v: attention(q, k, v, lens))
    return model.logits(hidden[torch.tensor(lens).cumsum(0) - 1])


def show_model(path: str | None) -> None:
    """Two prompts, with naive attention and through the kernel."""
    model, tokenizer = loader.load(path)
    prompts = [tokenizer.encode(text) for text in ("The capital of France is", "The opposite of hot is")]
    if not common.HAS_TRITON:
        return common.skipped("the prefill through the kernel", common.kernel_mode())
    before = flash_attention_kernel.launches
    with common.use_kernels():
        logits = prefill(model, prompts, lambda q, k, v, lens: flash_attention(q, k, v, *packed(lens, lens))[0])
    launches = flash_attention_kernel.launches - before
    ref = prefill(model, prompts, lambda q, k, v, lens: packed_reference(q, k, v, lens, lens)[0])
    common.check(f"logits, the kernel in {launches} of {model.config.num_hidden_layers} layers", logits, ref)
    for prompt, row in zip(prompts, logits):
        common.say(f"{tokenizer.decode(prompt)} →{tokenizer.decode([int(row.argmax())], False)}")


def hbm_floats(T: int, D: int, block_m: int = 128, causal: bool = False) -> dict[str, int]:
    """Floats that a head's T queries over T keys move between HBM and the chip.

    naive: q, k, v, o, and the T×T matrix four times. tiled: every tile of queries reads its keys and values again.
    once: the same kernel if an L2 cache keeps a head's keys and values between its tiles, so that HBM gives them once.
    """
    keys = sum(min(T, m0 + block_m) if causal else T for m0 in range(0, T, block_m))
    return {"naive": 4 * T * D + 4 * T * T, "tiled": 2 * T * D + T + 2 * D * keys, "once": 4 * T * D + T}


def show_traffic() -> None:
    """How much less is moved: a constant, or a factor that grows with T."""
    rows = []
    for T, D in ((1024, 128), (4096, 128), (8192, 128), (16384, 128), (8192, 64), (4755, 64)):
        naive, tiled, once = hbm_floats(T, D).values()
        fused = f"{tiled / 1e6:.1f} M", f"{naive / tiled:.2f} ×", f"{once / 1e6:.1f} M", f"{naive / once:.1f} ×"
        rows.append((f"{T:,}", D, f"{naive / 1e6:,.1f} M", *fused, f"{4 * T * T / 1e6:,.0f} MB"))
    fused = "fused, no L2", "less by", "fused, K and V in L2", "less by"
    common.table(("T", "D", "unfused", *fused, "matrix, fp32"), rows)
    common.say("The memory falls from O(T²) to O(T). The traffic does so only where an L2 cache keeps K and V.")


def show_deleted_line() -> None:
    """The bug that a test may not see: 4 orders, 5 sizes of tiles and 4 scales are 80 tests."""
    passed = dict.fromkeys(ORDERS, 0)
    for order, tile, scale in itertools.product(ORDERS, (1, 2, 3, 4, 8), (0.25, 1, 4, 16)):
        _, out, ref = one_row(order, scale, tile, rescale=False)
        passed[order] += common.relative_error(out, ref) < common.TOLERANCE[torch.float32]
    by_order = ", ".join(f"{n} of 20 {order}" for order, n in passed.items())
    common.say(f"{sum(passed.values())} of 80 tests pass without it: {by_order}")
    common.say("Where the first tile holds the largest score, m never grows, and α would have been 1 anyway.")


# In the kernel above all warps do the same: load, multiply, exponentiate, multiply. Exponentials of one program and
# products of another on the same multiprocessor overlap by chance. For long prompts on Hopper the engine has a kernel
# that writes the overlap down, as FlashAttention-3 does, in Gluon, Triton one floor below: one warp loads, two groups
# of four take turns at the tensor cores. It is `engine/attention/hopper.py`; `flash_attention` calls it where it fits.


def show_hopper(T: int = 16384) -> None:
    """A causal prompt of T tokens through both kernels, 16 heads in bf16: TFLOP/s, and how much faster."""
    if nvidia_capability() != (9, 0):
        return common.skipped("engine/attention/hopper.py beside this kernel", "it takes a Hopper GPU (H100, H200)")
    q, k, v = (torch.randn(T, 16, 128, device=common.device(), dtype=torch.bfloat16) for _ in range(3))
    outs, rates = [], []
    for what, tiles in (("all warps alike", choose_tiles(q.dtype, 128, None, (9, 0))), ("warps that take turns", None)):
        run = functools.partial(flash_attention, q, k, v, *packed([T], [T]), tiles=tiles)
        outs.append(run()[0])
        rates.append(4 * T * T / 2 * 16 * 128 / timing.measure(run).median / 1e12)  # causal: half of full
        common.say(f"{what}: {rates[-1]:.0f} TFLOP/s")
    common.check(f"the same, {rates[1] / rates[0]:.2f} times as fast", outs[1], outs[0])


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    p.add_argument("--no-rescale", action="store_true", help="break it: forget to multiply the past by α")
    p.add_argument("--order", choices=list(ORDERS), default="increasing", help="of the scores in the first step")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    cli.start(args)
    if (D := loader.check_context(args.model, 8).head_dim) % 16 or D > 256:
        raise common.InputError(f"--model {args.model}: head_dim {D}; the kernel takes multiples of 16 to 256")
    common.heading("1. One row of scores, a tile at a time")
    show_row(args.order, not args.no_rescale)
    common.heading("2. The Triton kernel against fp64: two prefills, a chunk behind a context, a decode, packed")
    show_kernel()
    common.heading("3. The real model: two prompts, packed, in one forward pass")
    show_model(args.model)
    common.heading("4. Every float that crosses HBM, per head, full attention, tiles of 128 queries")
    show_traffic()
    common.heading("5. Delete the rescale: who notices?")
    show_deleted_line()
    common.heading("6. Side by side: the engine's kernel for Hopper")
    show_hopper()
    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)
