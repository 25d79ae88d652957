"""Keys and values between an engine's blocks and the wire, which knows positions and heads alone.

Owns the kernel that gathers a rectangle of a layer and scatters it again, and its path on a CPU; called by connectors.
It never knows whose blocks they are, or where the bytes go.
vLLM: `vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_worker.py` (there, one engine reads the other's memory).
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used
from common import tl, triton

import torch

# A block is an affair of one engine: its size, its number, and which heads of it are here. So none of that is on the
# wire. What is, is a rectangle of one layer: positions [first, first + count) × KV heads [head, head + heads), keys and
# then values, [2, count, heads, D]. Either side translates with its own block table. Latents, key and value in one,
# have one half: [1, count, 1, D].


@common.kernel
def move_kv_kernel(kv_cache, blocks, buffer, first: tl.int32, count: tl.int32, head, stride_half,  # noqa: PLR0913
                   ROW: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr,
                   COLUMNS: tl.constexpr, TOKENS: tl.constexpr, TO_CACHE: tl.constexpr):  # fmt: skip
    tile, half = tl.program_id(0), tl.program_id(1).to(tl.int64)  # half 0: keys, 1: values
    t, i = tile * TOKENS + tl.arange(0, TOKENS), tl.arange(0, COLUMNS)
    p = first + t  # positions [TOKENS]
    block = tl.load(blocks + p // BLOCK_SIZE, mask=t < count, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + p % BLOCK_SIZE
    inside = (t < count)[:, None] & (i < WIDTH)[None, :]  # WIDTH = heads · D of a row's Hkv · D elements
    page = kv_cache + half * stride_half + slot[:, None] * ROW + head * D + i[None, :]
    wire = buffer + (half * count + t)[:, None] * WIDTH + i[None, :]
    if TO_CACHE:
        tl.store(page, tl.load(wire, mask=inside), mask=inside)
    else:
        tl.store(wire, tl.load(page, mask=inside), mask=inside)


def _move(  # noqa: PLR0913, what the kernel needs
    kv_cache: torch.Tensor, blocks: torch.Tensor, buffer: torch.Tensor, first: int, head: int, to_cache: bool
) -> None:
    """One launch of the kernel, in either direction. Semantics: see `gather_kv`, `scatter_kv`. Shapes: as there."""
    (halves, _, size, Hkv, D), (_, count, heads, _) = kv_cache.shape, buffer.shape
    columns = triton.next_power_of_2(heads * D)
    tokens = max(1, 4096 // columns)
    move_kv_kernel[(triton.cdiv(count, tokens), halves)](
        kv_cache,
        blocks,
        buffer,
        first,
        count,
        head,
        kv_cache.stride(0),
        ROW=Hkv * D,
        D=D,
        BLOCK_SIZE=size,
        WIDTH=heads * D,
        COLUMNS=columns,
        TOKENS=tokens,
        TO_CACHE=to_cache,
        num_warps=4,
    )


def gather_kv(  # noqa: PLR0913, a rectangle is five numbers
    kv_cache: torch.Tensor, blocks: torch.Tensor, first: int, count: int, head: int, heads: int
) -> torch.Tensor:
    """From blocks to the wire: one contiguous rectangle of a layer.

    Semantics: out[i, t, h] = kv_cache[i, blocks[p // block_size], p % block_size, head + h], p = first + t.
    Shapes: kv_cache [2, num_blocks, block_size, Hkv, D], blocks int64 [W] -> [2, count, heads, D].
    """
    if not common.runs_kernel(kv_cache):  # whole blocks, which are long rows, and then the part that was meant
        (halves, num_blocks, size, Hkv, D), last = kv_cache.shape, first + count
        used = blocks[first // size : -(-last // size)]
        pages = kv_cache.flatten(0, 1).index_select(0, torch.cat([used + half * num_blocks for half in range(halves)]))
        skip = first - first // size * size
        return pages.view(halves, -1, Hkv, D)[:, skip : skip + count, head : head + heads]
    out = torch.empty(len(kv_cache), count, heads, kv_cache.shape[4], dtype=kv_cache.dtype, device=kv_cache.device)
    if count:
        _move(kv_cache, blocks, out, first, head, to_cache=False)
    return out


def scatter_kv(buffer: torch.Tensor, kv_cache: torch.Tensor, blocks: torch.Tensor, first: int, head: int) -> None:
    """From the wire to blocks, those of another engine.

    Semantics: kv_cache[i, blocks[p // block_size], p % block_size, head + h] = buffer[i, t, h], p = first + t.
    Shapes: buffer [2, count, heads, D] contiguous, kv_cache [2, num_blocks, block_size, Hkv, D], blocks int64 [W].
    """
    if buffer.shape[1] == 0:
        return
    if common.runs_kernel(kv_cache):
        return _move(kv_cache, blocks, buffer, first, head, to_cache=True)
    heads = kv_cache.flatten(1, 2).narrow(2, head, buffer.shape[2])  # a view: [2, slots, heads, D]
    heads.index_copy_(1, _slots(kv_cache, blocks, first, buffer.shape[1]), buffer)


def _slots(kv_cache: torch.Tensor, blocks: torch.Tensor, first: int, count: int) -> torch.Tensor:
    p = torch.arange(first, first + count, device=blocks.device)
    return blocks[p // kv_cache.shape[2]] * kv_cache.shape[2] + p % kv_cache.shape[2]
