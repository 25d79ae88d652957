"""Several guesses for each place: a tree of tokens, checked in one pass of the target.

Owns the tree and its masks, attention to a paged cache under these masks, and which path stands; called by the tour
07b alone, as the engine's verifier checks chains. It never makes a guess.
vLLM: `vllm/v1/spec_decode/llm_base_proposer.py`, which drafts chains; 0.32 has no attention for trees any more.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used
from common import tl, triton

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine.sampling.sampler import draw_tokens

# --- A tree of guesses ------------------------------------------------------------------------------------------------


def ancestor_masks(parents: Sequence[int]) -> list[int]:
    """Bit j of mask i: node i attends to node j, which is itself, its parent, or an ancestor of that. [N]."""
    masks = [1]
    for i, parent in enumerate(parents[1:], 1):
        masks.append(masks[parent] | 1 << i)
    return masks


@dataclass
class Tree:
    """Guesses that share beginnings. Node 0 is the token sampled last, which is no guess; a parent precedes its
    children. Node i is row i of the target's pass: it stands at position context + depth, in KV slot context + i."""

    token_ids: list[int]
    parents: list[int]  # −1 for node 0

    def __post_init__(self) -> None:
        if len(self.parents) > 64:
            raise common.InputError(f"a tree of {len(self.parents)} nodes; allowed: at most 64, one bit each")
        self.depths = [0] * len(self.parents)
        self.masks = ancestor_masks(self.parents)
        self.children: list[list[int]] = [[] for _ in self.parents]
        for i, parent in enumerate(self.parents[1:], 1):
            self.depths[i] = self.depths[parent] + 1
            self.children[parent].append(i)

    def mask_tensor(self, device: torch.device) -> torch.Tensor:
        """The masks as int64 [N]; bit 63, the 64th node's, is the sign."""
        return torch.tensor([mask - (mask >> 63 << 64) for mask in self.masks], device=device)

    def path(self, node: int) -> list[int]:
        """From the root's child to `node`."""
        return [] if node == 0 else [*self.path(self.parents[node]), node]


def chain(depth: int) -> list[tuple[int, ...]]:
    """A tree that is a line: always the first choice."""
    return [(0,) * k for k in range(1, depth + 1)]


def plan_tree(ranks: Sequence[Sequence[float]], size: int) -> list[tuple[int, ...]]:
    """The `size` nodes that are most probably right (Cai et al. 2024, section 2.3.3), parents first.

    `ranks[k][r]` is how often head k's choice r is right. Node (r₁, …, r_k) takes choice r₁ of head 1, … and is right
    with probability Π ranks[k][r_k], if heads are right independently. A child is never likelier than its parent, so
    taking the likeliest next node again and again keeps the tree connected.
    """
    chosen: list[tuple[int, ...]] = []
    open_: dict[tuple[int, ...], float] = {(r,): p for r, p in enumerate(ranks[0])}
    while open_ and len(chosen) < size:
        node = max(open_, key=lambda n: (open_[n], [-r for r in n]))
        chance = open_.pop(node)
        chosen.append(node)
        if len(node) < len(ranks):
            open_ |= {(*node, r): chance * p for r, p in enumerate(ranks[len(node)])}
    return sorted(chosen, key=lambda n: (len(n), n))


def fill_tree(shape: Sequence[tuple[int, ...]], root: int, choices: Sequence[Sequence[int]]) -> Tree:
    """Put tokens on a planned tree: `choices[k][r]` is choice r of head k."""
    index = {(): 0} | {node: i for i, node in enumerate(shape, 1)}
    return Tree([root, *(choices[len(node) - 1][node[-1]] for node in shape)], [-1, *(index[n[:-1]] for n in shape)])


# --- One pass for the whole tree --------------------------------------------------------------------------------------


@common.kernel
def tree_attention_kernel(q, kv_cache, block_table, query_start_loc, context_lens, masks, out, scale, stride_q,
                          stride_kv, table_width, G: tl.constexpr, D: tl.constexpr, Hkv: tl.constexpr,
                          BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr,
                          UPCAST: tl.constexpr):  # fmt: skip
    b, kv_head, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_start_loc + b)
    n = (tl.load(query_start_loc + b + 1) - start).to(tl.int32)
    context = tl.load(context_lens + b)
    r = group * ROWS + tl.arange(0, ROWS)  # a row of the tile is one query head of one node
    node, head = r // G, kv_head * G + r % G
    if group * ROWS < n * G:
        d, j = tl.arange(0, D_PAD), tl.arange(0, TILE)
        row, column = (node < n)[:, None], (d < D)[None, :]
        place_q = (start + node)[:, None] * stride_q + head[:, None] * D + d[None, :]
        q_tile = tl.load(q + place_q, mask=row & column, other=0.0)  # [ROWS, D]
        if UPCAST:  # Triton's interpreter multiplies 16-bit floats wrongly; a GPU wants them as they are
            q_tile = q_tile.to(tl.float32)
        ancestors = tl.load(masks + start + node, mask=node < n, other=1)  # int64 [ROWS]
        m = tl.full([ROWS], float("-inf"), tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        o = tl.zeros([ROWS, D_PAD], tl.float32)
        for first in range(0, context + n, TILE):
            p = first + j
            live = p < context + n
            block = tl.load(block_table + b * table_width + p // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
            place = kv_cache + ((block * BLOCK_SIZE + p % BLOCK_SIZE) * Hkv + kv_head) * D  # [TILE]
            k = tl.load(place[None, :] + d[:, None], mask=(d < D)[:, None], other=0.0)  # [D, TILE]
            if UPCAST:
                k = k.to(tl.float32)
            s = tl.dot(q_tile, k, input_precision="ieee") * scale  # [ROWS, TILE]
            # The context is everybody's past. Of the tree, a node sees itself and its ancestors.
            bit = tl.minimum(tl.maximum(p - context, 0), 63).to(tl.int64)
            related = ((ancestors[:, None] >> bit[None, :]) & 1) == 1
            s = tl.where(((p < context)[None, :] | related) & live[None, :], s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1))  # finite: in the first tile, everybody sees position 0
            alpha = tl.exp(m - m_new)
            w = tl.exp(s - m_new[:, None])
            l = l * alpha + tl.sum(w, 1)
            v = tl.load(place[:, None] + stride_kv + d[None, :], mask=live[:, None] & column, other=0.0)  # [TILE, D]
            if UPCAST:
                v = v.to(tl.float32)
            o = o * alpha[:, None] + tl.dot(w.to(v.dtype), v, input_precision="ieee")
            m = m_new
        place_o = ((start + node)[:, None] * Hkv * G + head[:, None]) * D + d[None, :]
        tl.store(out + place_o, (o / l[:, None]).to(out.dtype.element_ty), mask=row & column)


def tree_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    context_lens: torch.Tensor,
    masks: torch.Tensor,
    max_nodes: int,
    max_seq_len: int,
) -> torch.Tensor:
    """Attention of a batch of trees, whose keys lie behind their contexts in the paged cache, in node order.

    Semantics: out[t, h] = Σ_j softmax_j(q[t, h]·k_j / √D) v_j over positions j < context_lens[b] and those
    context_lens[b] + i for which bit i of masks[t] is set, where b owns row t.
    Shapes: q [T, Hq, D] (row stride free), kv_cache [2, num_blocks, block_size, Hkv, D], block_table int32 [B, W],
    query_start_loc int64 [B + 1], context_lens int32 [B], masks int64 [T] (bit of the row itself set) -> [T, Hq, D].
    `max_nodes` ≤ 64 bounds a tree, `max_seq_len` a context with its tree. The bit mask is ours.
    """
    T, Hq, D = q.shape
    block_size, Hkv = kv_cache.shape[2:4]
    if not common.runs_kernel(q):
        return tree_attention_torch(q, kv_cache, block_table, query_start_loc, context_lens, masks, max_seq_len)
    out = torch.empty(T, Hq, D, dtype=q.dtype, device=q.device)
    if T == 0:
        return out
    G, D_pad = Hq // Hkv, max(16, triton.next_power_of_2(D))
    most = 16 if q.element_size() == 4 else 32  # more rows, or 32 keys beside 32 rows, spill on some GPU
    rows = min(most, max(16, triton.next_power_of_2(max_nodes * G)))
    wide = q.element_size() * D_pad >= 256
    tree_attention_kernel[(len(block_table), Hkv, triton.cdiv(max_nodes * G, rows))](
        q,
        kv_cache,
        block_table,
        query_start_loc,
        context_lens,
        masks,
        out,
        1 / math.sqrt(D),
        q.stride(0),
        kv_cache.stride(0),
        block_table.stride(0),
        G=G,
        D=D,
        Hkv=Hkv,
        BLOCK_SIZE=block_size,
        ROWS=rows,
        D_PAD=D_pad,
        TILE=16 if rows > 16 else 32,
        UPCAST=common.INTERPRET,
        num_warps=8 if wide else 4,
        num_stages=2,
    )
    return out


def tree_attention_torch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    context_lens: torch.Tensor,
    masks: torch.Tensor,
    max_seq_len: int,
) -> torch.Tensor:
    """The same by gathering every sequence's slots, padded to the longest. Shapes as there."""
    size = kv_cache.shape[2]
    n = query_start_loc.diff()  # [B]
    p = torch.arange(max_seq_len, device=q.device)
    live = p < (context_lens + n)[:, None]  # [B, S]
    slots = torch.where(live, block_table[:, p // size].long() * size + p % size, 0)
    keys, values = kv_cache.flatten(1, 2)[:, slots].masked_fill(~live[None, :, :, None, None], 0)  # [B, S, Hkv, D]
    owner = torch.arange(len(n), device=q.device).repeat_interleave(n)  # [T]
    inside = torch.arange(len(q), device=q.device) - query_start_loc[owner]
    bit = (p - context_lens[:, None]).clamp(0, 63)  # [B, S]
    sees = (p < context_lens[:, None])[owner] | (masks[:, None] >> bit[owner] & 1).bool()  # [T, S]
    padded = q.new_zeros(len(n), int(n.max()), *q.shape[1:])
    padded[owner, inside] = q
    bias = torch.zeros(*padded.shape[:2], max_seq_len, dtype=q.dtype, device=q.device)
    bias[owner, inside] = torch.where(sees & live[owner], 0.0, -math.inf).to(q.dtype)

    def turn(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)

    out = F.scaled_dot_product_attention(turn(padded), turn(keys), turn(values), bias[:, None], enable_gqa=True)
    return turn(out)[owner, inside]


# The accepted path is spread over the tree's slots. Node i_1 < i_2 < … of the path goes to slot context + 1, + 2, …:
# never behind where it was, so going up from the first, nothing is overwritten before it was read.


@common.kernel
def compact_kernel(kv_cache, block_table, context_lens, accepted, stride_kv, table_width, depth,
                   WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    b, half = tl.program_id(0), tl.program_id(1)  # half 0: keys, 1: values
    context = tl.load(context_lens + b)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)  # one thread keeps its columns: loads and stores in order
    inside = i < WIDTH
    base = kv_cache + half * stride_kv + i
    for step in range(depth):
        node = tl.load(accepted + b * depth + step)
        if node > step + 1:
            source, target = context + node, context + step + 1
            from_block = tl.load(block_table + b * table_width + source // BLOCK_SIZE).to(tl.int64)
            to_block = tl.load(block_table + b * table_width + target // BLOCK_SIZE).to(tl.int64)
            x = tl.load(base + (from_block * BLOCK_SIZE + source % BLOCK_SIZE) * WIDTH, mask=inside)
            tl.store(base + (to_block * BLOCK_SIZE + target % BLOCK_SIZE) * WIDTH, x, mask=inside)


def compact_slots(
    kv_cache: torch.Tensor, block_table: torch.Tensor, context_lens: torch.Tensor, accepted: torch.Tensor
) -> None:
    """Move each sequence's accepted nodes together, behind its context and its root.

    Semantics: slot(context_lens[b] + 1 + s) = slot(context_lens[b] + accepted[b, s]) for every accepted[b, s] > 0, as
    all were before.
    Shapes: kv_cache [2, num_blocks, block_size, Hkv, D], block_table int32 [B, W], context_lens int32 [B], accepted
    int32 [B, depth], ascending, padded with −1.
    """
    (B, depth), size, width = accepted.shape, kv_cache.shape[2], kv_cache.stride(2)
    if not common.runs_kernel(kv_cache):
        b, step = (accepted > 0).nonzero(as_tuple=True)
        source, target = (context_lens[b] + accepted[b, step]).long(), (context_lens[b] + step + 1).long()

        def slot(p: torch.Tensor) -> torch.Tensor:
            return block_table[b, p // size].long() * size + p % size

        flat = kv_cache.flatten(1, 2)
        flat[:, slot(target)] = flat[:, slot(source)]
    elif B * depth > 0:
        block = min(1024, triton.next_power_of_2(width))
        compact_kernel[(B, 2, triton.cdiv(width, block))](
            kv_cache,
            block_table,
            context_lens,
            accepted,
            kv_cache.stride(0),
            block_table.stride(0),
            depth,
            WIDTH=width,
            BLOCK_SIZE=size,
            BLOCK=block,
            num_warps=4,
        )


# --- Which path stands ------------------------------------------------------------------------------------------------


def verify_greedy(tree: Tree, favourite: Sequence[int]) -> tuple[list[int], list[int]]:
    """Follow the target's favourite from node to node. Returns the accepted nodes, and the tokens written: theirs, and
    one that nobody guessed (or guessed where the tree ends)."""
    node, path = 0, []
    while (child := next((c for c in tree.children[node] if tree.token_ids[c] == favourite[node]), None)) is not None:
        node = child
        path.append(node)
    return path, [*(tree.token_ids[i] for i in path), favourite[node]]


# Sampling, with several guesses for one place (Miao et al. 2024, algorithm 2). Guess x, drawn from q, stands with
# probability min(1, p(x)/q(x)), as in lesson 07. If it falls, what is still to be written follows
#
#     p' = norm(max(p − q, 0))        (lesson 07 draws from it; here the next guess is tried against it)
#
# and the next guess is one more round of the same rule with p' in p's place: by induction, whatever is written in the
# end has distribution p. A guess without q is one-hot: it stands with probability p(x), and p' is p without x.


def left_over(p: torch.Tensor, token: int, q: torch.Tensor | None) -> torch.Tensor:
    """norm(max(p − q, 0)); with q one-hot if None. [V]. If nothing is left, p = q, and a guess cannot have fallen."""
    rest = p.clone()
    if q is None:
        rest[token] = 0.0
    else:
        rest = (p - q).clamp(min=0)
    total = rest.sum()
    return rest / total if total > 0 else p


def stands(p: torch.Tensor, token: int, q: torch.Tensor | None) -> float:
    """The probability that a guess is kept: min(1, p(x)/q(x))."""
    return min(1.0, float(p[token]) / (1.0 if q is None else float(q[token])))


def draw_token(p: torch.Tensor, uniform: Callable[[], float]) -> int:
    """Lesson 04b's draw: by inverse distribution. p [V]."""
    return int(draw_tokens(p[None], np.array([uniform()])))


def verify_sampled(
    tree: Tree, p: torch.Tensor, q: Sequence[torch.Tensor | None], uniform: Callable[[], float]
) -> tuple[list[int], list[int]]:
    """The multi-branch rule down the tree. p [N, V]: the target's distribution at each node; q[i]: what node i's token
    was drawn from, given its earlier siblings (None: one-hot). Returns accepted nodes and written tokens."""
    node, path = 0, []
    while True:
        rest = p[node].double()
        for child in tree.children[node]:
            token = tree.token_ids[child]
            if uniform() < stands(rest, token, q[child]):
                break
            rest = left_over(rest, token, q[child])
        else:
            return path, [*(tree.token_ids[i] for i in path), draw_token(rest, uniform)]
        node = child
        path.append(node)
