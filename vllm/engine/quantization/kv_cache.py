"""The KV cache of a whole model in few bits: lesson 02's block ids, slots, copies and `attend`; other bytes.

Owns the pages of codes, and the keys that still wait for their block to be full; called by a runner in every step. It
never decides which blocks are whose. vLLM: `vllm/v1/attention/backends/triton_attn.py` with `kv_cache_dtype`.
"""

from __future__ import annotations

import common
from common import InputError

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from engine.attention.metadata import AttentionMetadata
from engine.attention.torch_paged import gather_plan, prefill_attention
from engine.model import llama
from engine.quantization.kv_codes import PageLayout, Stored, dequantize, find_format, rotation
from engine.quantization.kv_decode import quantized_decode
from engine.quantization.kv_write import quantize_and_cache, quantize_channels
from engine.registry import fill
from engine.seams import Attend, KVCache

OpenKeys = tuple[torch.Tensor, torch.Tensor]  # [rows, block_size, Hkv, D], and each block's row or −1


class QuantizedKVCache:
    """Lesson 02's cache with pages of codes: the same block ids, slots, copies and `attend`; other bytes.

    `layers[i]` is uint8 [2, num_blocks, page]. `head_scales[i]` fp32 [2, Hkv] is used by formats without a scale per
    vector, and is 1 unless it is calibrated.
    """

    def __init__(self, model: llama.Llama, num_blocks: int, block_size: int, kv_cache_dtype: str) -> None:
        """Raises InputError for an unknown format, or a head size that is not a multiple of 8."""
        Hkv, D, L = model.num_kv_heads, model.config.head_dim, model.config.num_hidden_layers
        fmt = find_format(kv_cache_dtype)
        if D % 8:
            raise InputError(f"kv_cache_dtype {kv_cache_dtype}: head size {D} is not a multiple of 8")
        self.layout = PageLayout(fmt, block_size, Hkv, D)
        shape = (2, num_blocks, self.layout.page)
        self.layers = [torch.zeros(shape, dtype=torch.uint8, device=model.device) for _ in range(L)]
        self.head_scales = torch.ones(L, 2, Hkv, device=model.device)
        self.rotation = rotation(D).to(model.device, model.dtype) if fmt.rotate else None
        self.block_size = block_size
        self.dtype = model.dtype
        self.copied_blocks = 0
        self._copy_blocks = fill("cache.copy_blocks")  # lesson 02's: a page is as good as a block

    can_roll_back = True

    def release(self, blocks: Sequence[int]) -> None:
        """A request has left these blocks: here, nothing else belongs to them."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) blocks in every layer."""
        if pairs:
            self.copied_blocks += len(pairs)
            table = torch.tensor(pairs, device=self.layers[0].device)
            for pages in self.layers:
                self._copy_blocks(pages, table)

    def open_keys_of(self, layer: int) -> OpenKeys | None:
        """Keys that are still exact: see `ChannelKVCache`. Other formats have none."""
        return None

    def begin_step(self, slot_mapping: torch.Tensor) -> None:
        """Called once before the layers write to these slots."""

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Quantize and store keys and values, rotated if the format rotates. k, v [T, Hkv, D]."""
        quantize_and_cache(k, v, self.layers[layer], slot_mapping, self.layout, self.head_scales[layer])

    def load(self, layer: int, source: torch.Tensor) -> torch.Tensor:
        """Dequantized pages: blocks of keys, then as many of values + num_blocks. [n · block_size · 2, Hkv, D]"""
        codes, scale, mid = self.layout.split(self.layers[layer].flatten(0, 1).index_select(0, source))
        if scale is None:
            scale = self.head_scales[layer, :, None, :, None].repeat_interleave(len(source) // 2, 0)
        return dequantize(codes, scale, mid, self.layout.fmt).flatten(0, 1).to(self.dtype)

    def attend(self, meta: AttentionMetadata) -> llama.Attend:
        """As in lesson 02: decodes through the kernel, prompts through torch; here both see quantized pasts only."""
        prompts, decode_lens = self.split_step(meta)
        kernel, R = common.runs_kernel(self.layers[0]), self.rotation
        shape = (2, self.layers[0].shape[1], self.block_size)
        plan = [] if kernel else gather_plan(meta.block_table, decode_lens, shape)
        self.begin_step(meta.slot_mapping)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if R is not None:  # (q R)·(k R) = q·k, and Σ_j w_j v_j R = (Σ_j w_j v_j) R
                q, k, v = q @ R, k @ R, v @ R
            self.write(layer, k, v, meta.slot_mapping)
            newest = q[meta.query_start_loc[:-1]] if prompts else q  # [B, Hq, D]
            if kernel:
                raw = self.open_keys_of(layer) or (None, None)
                pages, scales = self.layers[layer], self.head_scales[layer]
                out = quantized_decode(
                    newest, pages, meta.block_table, decode_lens, meta.max_seq_len, self.layout, scales, *raw
                )
            else:
                out = self.decode_torch(layer, newest, plan)
            if prompts:
                decoded, out = out, torch.empty_like(q)
                out[meta.query_start_loc[:-1]] = decoded
                for tokens, source, S in prompts:
                    past = self.load(layer, source).unflatten(0, (2, -1))[:, :S]
                    out[tokens] = prefill_attention(q[tokens], *past)
            return out if R is None else out @ R.T

        return attend

    def split_step(self, meta: AttentionMetadata) -> tuple[list[tuple[slice, torch.Tensor, int]], torch.Tensor]:
        """Prompts: (their tokens, blocks of keys and of values, context length); and the lengths of all decodes [B].

        To the decode kernel, which is to skip it, a prompt's sequence is empty.
        """
        num_blocks, decode_lens = self.layers[0].shape[1], meta.seq_lens.clone()
        prompts, first = [], 0
        for b, n in enumerate(meta.query_lens):
            if n > 1:
                S = int(meta.seq_lens[b])
                blocks = meta.block_table[b, : -(-S // self.block_size)].long()
                prompts.append((slice(first, first + n), torch.cat((blocks, blocks + num_blocks)), S))
                decode_lens[b] = 0
            first += n
        return prompts, decode_lens

    def decode_torch(self, layer: int, q: torch.Tensor, plan: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
        """What `quantized_decode` computes, by dequantizing what lesson 02's plan gathers."""
        (Hq, D), Hkv = q.shape[1:], self.layout.Hkv
        out = torch.zeros_like(q)
        for rows, source, dead, bias in plan:
            kv = self.load(layer, source).index_fill_(0, dead, 0)
            k, v = kv.view(2, len(rows), -1, Hkv, D).transpose(2, 3)  # [b, Hkv, S, D] each
            o = F.scaled_dot_product_attention(q[rows].view(-1, Hkv, Hq // Hkv, D), k, v, bias.to(q.dtype))
            out[rows] = o.view(-1, Hq, D)
        return out


class ChannelKVCache(QuantizedKVCache):
    """Keys with a scale per channel over the tokens of a block (KIVI).

    Such a scale exists once the block is full. Until then its keys stay as they are, in a row of `open_keys`: one
    block per running sequence in full precision, which is what KIVI calls the residual.
    """

    can_roll_back = False  # a block that became full with rejected drafts in it has lost its exact keys

    def __init__(self, model: llama.Llama, num_blocks: int, block_size: int, kv_cache_dtype: str) -> None:
        super().__init__(model, num_blocks, block_size, kv_cache_dtype)
        self.rows: dict[int, int] = {}  # block -> its row of open_keys
        self.free_rows: list[int] = []
        self.closed_rows: list[int] = []  # of blocks that became full in the last step
        self.open_rows = torch.full((num_blocks,), -1, dtype=torch.int64, device=model.device)
        shape = (0, block_size, self.layout.Hkv, self.layout.D)
        self.open_keys = [torch.empty(shape, dtype=model.dtype, device=model.device) for _ in self.layers]

    def open_keys_of(self, layer: int) -> OpenKeys:
        """This layer's."""
        return self.open_keys[layer], self.open_rows

    def take_row(self) -> int:
        """A free row, or a new one."""
        if not self.free_rows:
            have = len(self.open_keys[0])
            self.free_rows = list(range(have, 2 * have + 8))
            for i, rows in enumerate(self.open_keys):
                self.open_keys[i] = torch.cat((rows, rows.new_zeros(have + 8, *rows.shape[1:])))
        return self.free_rows.pop()

    def release(self, blocks: Sequence[int]) -> None:
        """A request has left these blocks; one that was given back half full needs no row any more."""
        for block in blocks:
            if (row := self.rows.pop(block, None)) is not None:
                self.free_rows.append(row)
                self.open_rows[block] = -1

    def begin_step(self, slot_mapping: torch.Tensor) -> None:
        """Find each token's row, and the blocks that this step fills. Raises ValueError for a block without a start."""
        self.free_rows += self.closed_rows
        self.closed_rows, places, full = [], [], []
        for slot in slot_mapping.tolist():
            block, offset = divmod(slot, self.block_size)
            if block not in self.rows:
                if offset:
                    raise ValueError(f"slot {slot}: block {block} is closed, it cannot be continued")
                self.rows[block] = self.open_rows[block] = self.take_row()
            places.append(self.rows[block] * self.block_size + offset)
            if offset == self.block_size - 1:
                full.append(block)
        self.closed_rows = [self.rows.pop(block) for block in full]
        self.open_rows[full] = -1
        as_ids = functools.partial(torch.tensor, dtype=torch.int64, device=slot_mapping.device)
        self.places, self.full, self.full_rows = as_ids(places), as_ids(full), as_ids(self.closed_rows)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        super().write(layer, k, v, slot_mapping)  # the values
        self.open_keys[layer].flatten(0, 1).index_copy_(0, self.places, k)
        quantize_channels(self.open_keys[layer], self.full_rows, self.full, self.layers[layer], self.layout)

    def load(self, layer: int, source: torch.Tensor) -> torch.Tensor:
        """As above, for n blocks: `source` [2n] -> [2n · block_size, Hkv, D]. Keys of an open block are still exact."""
        n = len(source) // 2
        pages = self.layers[layer].flatten(0, 1).index_select(0, source)
        keys = self._restored(self.layout.split(pages[:n], channels=True))
        values = self._restored(self.layout.split(pages[n:]))
        rows = self.open_rows[source[:n]]
        keys[rows >= 0] = self.open_keys[layer][rows[rows >= 0]]
        return torch.cat((keys, values)).flatten(0, 1)

    def _restored(self, stored: Stored) -> torch.Tensor:
        codes, scale, mid = stored
        assert scale is not None, "such formats store their scales"
        return dequantize(codes, scale, mid, self.layout.fmt).to(self.dtype)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy-on-write: the codes, and the exact keys of a block that is not full, to a row of its own."""
        super().copy_blocks(pairs)
        for source, target in pairs:
            if target in self.rows:  # its last owner gave it back half full
                self.free_rows.append(self.rows.pop(target))
                self.open_rows[target] = -1
            if source in self.rows:
                row = self.rows[target] = self.open_rows[target] = self.take_row()
                for keys in self.open_keys:
                    keys[row] = keys[self.rows[source]]


def make_cache(model: llama.Llama, num_blocks: int, block_size: int, kv_cache_dtype: str) -> Any:
    """The cache for any of KV_CACHE_DTYPES; "auto" is lesson 02's, in the model's dtype. Raises InputError."""
    if kv_cache_dtype == "auto":
        return fill("cache.paged")(model, num_blocks, block_size)
    kind = ChannelKVCache if find_format(kv_cache_dtype).key_channels else QuantizedKVCache
    return kind(model, num_blocks, block_size, kv_cache_dtype)


class QuantizedAttention:
    """In a model runner's slot: pages of codes, and kernels that read them."""

    def __init__(self, kv_cache_dtype: str) -> None:
        """Raises InputError for an unknown one."""
        find_format(kv_cache_dtype)
        self.kv_cache_dtype = kv_cache_dtype

    def make_cache(self, model: llama.Llama, num_blocks: int, block_size: int) -> QuantizedKVCache:
        """Raises InputError for a head size that is not a multiple of 8."""
        kind = ChannelKVCache if find_format(self.kv_cache_dtype).key_channels else QuantizedKVCache
        return kind(model, num_blocks, block_size, self.kv_cache_dtype)

    def plan(self, meta: AttentionMetadata, cache: KVCache) -> Attend:
        """Attention of one step, on a cache that this has made."""
        assert isinstance(cache, QuantizedKVCache)
        return cache.attend(meta)
