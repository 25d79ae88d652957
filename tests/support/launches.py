"""What lessons and engine launch on GPUs, at the shapes of their models, on meta tensors: for the compiler."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import torch

from engine.experts.grouped_matmul import Tiles
from engine.experts.stacked import StackedExperts
from engine.quantization import formats, kv_codes

CACHES = {  # formats: query heads, KV heads, head size, of SmolLM2 and of an 8B Llama
    ("fp8", "int4_plain", "kivi_2bit"): (9, 3, 64),
    ("int8_per_token_head", "int3_plain", "turboquant_2bit"): (32, 8, 128),
}


def kv_cache(m: Any, dtype: torch.dtype) -> None:
    """Call the kernel's wrapper at the shapes this lesson runs, on meta tensors: for the compile check."""
    for B, S, Hq, Hkv, D in ((1, 2048, 9, 3, 64), (32, 8192, 32, 8, 128)):  # SmolLM2; an 8B Llama
        q = torch.empty(B, Hq, D, dtype=dtype, device="meta")
        k = torch.empty(B, S, Hkv, D, dtype=dtype, device="meta")
        m.decode_attention(q, k, k, torch.empty(B, dtype=torch.int32, device="meta"), S)


def paged_attention(m: Any, dtype: torch.dtype) -> None:
    """Every kernel's wrapper at the shapes of SmolLM2 and of an 8B Llama, on meta tensors: for the compile check."""
    empty = functools.partial(torch.empty, device="meta")
    for Hq, Hkv, D in ((9, 3, 64), (32, 8, 128)):
        kv_cache, k = empty(2, 1024, 16, Hkv, D, dtype=dtype), empty(32, Hkv, D, dtype=dtype)
        q, table, lens = empty(32, Hq, D, dtype=dtype), empty(32, 1024, dtype=torch.int32), empty(32, dtype=torch.int32)
        m.reshape_and_cache(k, k, kv_cache, empty(32, dtype=torch.int64))
        m.copy_blocks(kv_cache, empty(4, 2, dtype=torch.int64))
        m.paged_decode(q, kv_cache, table, lens, max_seq_len=16384)
        m.paged_decode(q, kv_cache, table, lens, max_seq_len=200)  # short: not split


def flash_attention(m: Any, dtype: torch.dtype) -> None:
    """A prefill of SmolLM2's and of an 8B Llama's shape, on meta tensors: for the compile check."""
    for Hq, Hkv, D in ((9, 3, 64), (32, 8, 128)):
        q = torch.empty(1024, Hq, D, dtype=dtype, device="meta")
        k = torch.empty(4096, Hkv, D, dtype=dtype, device="meta")
        loc = torch.empty(3, dtype=torch.int32, device="meta")
        m.flash_attention(q, k, k, loc, loc, 512, 2048)
        m.flash_attention(q, k, k, loc, loc, 512, 2048, causal=False)


def spec_decode(m: Any, dtype: torch.dtype) -> None:
    """The kernels at the vocabularies of SmolLM2 and Llama 3: 32 requests, 4 drafts each, with and without a q."""
    empty = functools.partial(torch.empty, device="meta")
    for V in (49152, 128256):
        ids, u, greedy = empty(160, dtype=torch.int64), empty(160, dtype=torch.float64), empty(160, dtype=torch.bool)
        scores, starts = empty(160, V, dtype=dtype), empty(33, dtype=torch.int64)
        m.rejection_sample(scores, ids, starts, greedy, u, u)
        m.rejection_sample(scores, ids, starts, greedy, u, u, empty(128, V), ids)


def gqa(m: Any, dtype: torch.dtype) -> None:
    """Every kernel at the shapes of SmolLM2, an 8B Llama and DeepSeek-V3 (128 heads, and 16), on meta tensors."""
    empty = functools.partial(torch.empty, device="meta")
    table, lens = empty(32, 1024, dtype=torch.int32), empty(32, dtype=torch.int32)
    for Hq, Hkv, D in ((32, 8, 128), (9, 3, 64)):
        q, kv_cache = empty(32, Hq, D, dtype=dtype), empty(2, 1024, 16, Hkv, D, dtype=dtype)
        for longest, heads in ((16384, None), (16384, 1), (200, None)):  # 200: not split
            m.gqa_decode(q, kv_cache, table, lens, longest, heads)
    for H, longest in ((128, 16384), (16, 16384), (16, 200)):
        q, cache = empty(32, H, 576, dtype=dtype), empty(1024, 64, 576, dtype=dtype)
        m.mla_decode(q, cache, table, lens, longest, 512, 192**-0.5)


def chunked_prefill(m: Any, dtype: torch.dtype) -> None:
    """The kernel at the shapes this lesson runs (SmolLM2, an 8B Llama), on meta tensors: for the compile check."""
    for Hq, Hkv, D in ((9, 3, 64), (32, 8, 128)):
        kv_cache = torch.empty(2, 1024, 16, Hkv, D, dtype=dtype, device="meta")
        table = torch.empty(33, 64, dtype=torch.int32, device="meta")
        start_loc = torch.empty(34, dtype=torch.int64, device="meta")
        seq_lens = torch.empty(33, dtype=torch.int32, device="meta")
        sinks = torch.empty(Hq, dtype=dtype, device="meta")
        for longest in (480, 1):
            q = torch.empty(32 + longest, Hq, D, dtype=dtype, device="meta")
            for masks in ((), (128, sinks), (None, sinks), (4096,)):
                m.unified_attention(q, kv_cache, table, start_loc, seq_lens, longest, *masks)
        m.unified_attention(q, kv_cache, table[:1], start_loc[:2], seq_lens[:1], 33)  # one sequence alone


def preemption(m: Any, dtype: torch.dtype) -> None:
    """The launches of this lesson's models on meta tensors, for the compile check: SmolLM2 and an 8B model."""
    for Hkv, D in ((3, 64), (8, 128)):
        gpu, cpu = (torch.empty(2, n, 16, Hkv, D, dtype=dtype, device="meta") for n in (2048, 512))
        m.swap_blocks(gpu, cpu, torch.empty(64, 2, dtype=torch.int64, device="meta"))


def multi_lora(m: Any, dtype: torch.dtype) -> None:
    """Every kernel at the shapes of SmolLM2 and of an 8B Llama, on meta tensors: decoding in slots of 16, prompts in
    slots of 64."""
    empty, device = functools.partial(torch.empty, device="meta"), torch.device("meta")
    small, qkv = m.LayerShape(576, (576, 192, 192)), m.LayerShape(4096, (4096, 1024, 1024))
    down = m.LayerShape(14336, (4096,))
    decode, prompt = (16, 32, 16), (64, 2048, 64)  # largest rank, tokens, rows in a tile
    cases = [(m.sgmv, small, decode), *((m.sgmv, shape, size) for shape in (qkv, down) for size in (decode, prompt))]
    cases += [(m.bgmv, small, decode), (m.bgmv, down, decode)]
    for kernel, shape, (max_rank, tokens, tile_m) in cases:
        tables = m.LoRATables.empty(shape, 8, max_rank, device)
        x, y = empty(tokens, shape.in_features, dtype=dtype), empty(tokens, sum(shape.slices), dtype=dtype)
        order, tiles = empty(tokens, dtype=torch.int64), empty(tokens if kernel is m.bgmv else 8, 3, dtype=torch.int32)
        kernel(y, x, empty(1 << 20, dtype=dtype), tables, m.LoRAKernelMeta(order, tiles, [], tile_m, False))


def kernels(m: Any, dtype: torch.dtype) -> None:
    """The kernel at the shapes of SmolLM2 and of an 8B Llama, for all heads and for some: for the compile check."""
    empty = functools.partial(torch.empty, device="meta")
    for Hkv, heads, D, size in ((3, 3, 64, 16), (3, 1, 64, 32), (8, 8, 128, 16), (8, 2, 128, 16)):
        kv_cache, blocks = empty(2, 1024, size, Hkv, D, dtype=dtype), empty(64, dtype=torch.int64)
        buffer = m.gather_kv(kv_cache, blocks, 16, 500, 0, heads)
        m.scatter_kv(buffer, kv_cache, blocks, 16, Hkv - heads)


def activations(m: Any, dtype: torch.dtype) -> None:
    """Inputs of SmolLM2's layers, smoothed, and of an 8B Llama's; and rows of 300."""
    empty = functools.partial(torch.empty, device="meta")
    for grid in m.EIGHT_BIT:
        for M, K, smooth in ((16, 576, True), (64, 14336, False), (512, 14336, False), (90, 300, False)):
            m.quantize_rows(empty(M, K, dtype=dtype), grid, empty(K) if smooth else None)


def dequant_matmul(m: Any, dtype: torch.dtype) -> None:
    """Both kernels at layers of SmolLM2 and of an 8B Llama, for decode batches and prompts; and rows of 300 codes."""
    empty = functools.partial(torch.empty, device="meta")
    small, large = (3072, 576), (4096, 14336)  # N, K
    cases = [(name, 16, large) for name in ("q4_1", "int8", "fp8", "mxfp4", "int4-g128")]
    cases += [
        ("int4-g64", 512, large),
        ("int4-g128", 64, large),
        ("int4-g64", 32, small),
        ("int8", 64, (40, 300)),
        ("blocks", 16, large),
    ]
    for name, M, (N, K) in cases:
        f = formats.FORMATS.get(name, formats.FP8_BLOCKS)
        stored = {"fp32": torch.float32, "fp16": torch.float16, "e8m0": torch.uint8}[f.scale]
        scale = empty(K // (f.group or K), N, dtype=stored)
        zero = {None: None, "int": scale.to(torch.uint8), "min": scale}[f.zero]
        weight = m.PackedWeight(f, K, empty(N, K * f.bits // 8, dtype=torch.uint8), scale, zero)
        m.dequant_matmul(empty(M, K, dtype=dtype), weight)


def grouped_matmul(m: Any, dtype: torch.dtype) -> None:
    """Both kernels at the experts of Qwen3-30B-A3B, for decode batches and prompts, and at gpt-oss-20b's."""
    empty = functools.partial(torch.empty, device="meta")
    for tokens, k, E, H, I, bias in ((32, 8, 128, 2048, 768, False), (4096, 8, 128, 2048, 768, False),
                                     (64, 4, 32, 2880, 2880, True)):  # fmt: skip
        block_m, *blocks = m.choose_tiles(dtype, tokens * k, E)
        tiles = m.Tiles(empty(tokens * k, dtype=torch.int64), empty(tokens * k, 3, dtype=torch.int32), block_m)
        biases = (empty(E, 2 * I, dtype=dtype), empty(E, H, dtype=dtype)) if bias else (None, None)
        stacks = empty(E, 2 * I, H, dtype=dtype), empty(E, H, I, dtype=dtype)
        experts = StackedExperts(range(E), *stacks, *biases, activation="swiglu_oai" if bias else "silu")
        m.run_tiles(empty(tokens, H, dtype=dtype), empty(tokens, k), tiles, experts, tuple(blocks))


def grouped_dequant(m: Any, dtype: torch.dtype) -> None:
    """The kernel at the experts of Qwen3-30B-A3B: both products, in decode batches and prompts, in five formats."""
    empty = functools.partial(torch.empty, device="meta")
    E, k = 128, 8
    for name, tokens in (
        ("int4-g64", 32),
        ("int4-g128", 4096),
        ("int8", 32),
        ("fp8", 4096),
        ("mxfp4", 32),
        ("q4_1", 32),
    ):
        f = formats.FORMATS[name]
        stored = {"fp32": torch.float32, "fp16": torch.float16, "e8m0": torch.uint8}[f.scale]
        tiles = Tiles(empty(tokens * k, dtype=torch.int64), empty(tokens * k, 3, dtype=torch.int32),
                      m.block_rows(dtype, tokens * k, E))  # fmt: skip
        for N, K, top_k in ((1536, 2048, k), (2048, 768, 0)):
            scale = empty(E, K // (f.group or K), N, dtype=stored)
            weight = SimpleNamespace(format=f, K=K, codes=empty(E, N, K * f.bits // 8, dtype=torch.uint8), scale=scale,
                                     zero={None: None, "int": scale.to(torch.uint8), "min": scale}[f.zero])  # fmt: skip
            x = empty(tokens if top_k else tokens * k, K, dtype=dtype)
            m.grouped_dequant_matmul(x, weight, tiles, top_k, None if top_k else empty(tokens, k))


def kv_decode(m: Any, dtype: torch.dtype) -> None:
    """The kernel, on every grid, at the shapes of SmolLM2 and of an 8B Llama, on meta tensors."""
    empty = functools.partial(torch.empty, device="meta")
    for names, (Hq, Hkv, D) in CACHES.items():
        q = empty(32, Hq, D, dtype=dtype)
        table, lens = empty(32, 1024, dtype=torch.int32), empty(32, dtype=torch.int32)
        for name, longest in zip(names, (16384, 200, 16384)):  # split along the keys, and whole
            fmt, raw = kv_codes.FORMATS[name], ()
            layout = m.PageLayout(fmt, 32 if fmt.key_channels else 16, Hkv, D)
            layer = empty(2, 1024, layout.page, dtype=torch.uint8)
            if fmt.key_channels:
                raw = (empty(64, 32, Hkv, D, dtype=dtype), empty(1024, dtype=torch.int64))
            m.quantized_decode(q, layer, table, lens, longest, layout, empty(2, Hkv), *raw)


def kv_write(m: Any, dtype: torch.dtype) -> None:
    """Both kernels, on every grid, at the shapes of SmolLM2 and of an 8B Llama, on meta tensors."""
    empty = functools.partial(torch.empty, device="meta")
    for names, (_, Hkv, D) in CACHES.items():
        k, ids = empty(32, Hkv, D, dtype=dtype), empty(32, dtype=torch.int64)
        for name in names:
            fmt = kv_codes.FORMATS[name]
            layout = m.PageLayout(fmt, 32 if fmt.key_channels else 16, Hkv, D)
            layer = empty(2, 1024, layout.page, dtype=torch.uint8)
            m.quantize_and_cache(k, k, layer, ids, layout, empty(2, Hkv))
            if fmt.key_channels:
                m.quantize_channels(empty(64, 32, Hkv, D, dtype=dtype), ids, ids, layer, layout)


def scaled_matmul(m: Any, dtype: torch.dtype) -> None:
    """Both grids at layers of SmolLM2 and of an 8B Llama, for decode batches and prompts; and rows of 300 codes."""
    empty = functools.partial(torch.empty, device="meta")
    for code in (torch.int8, torch.uint8):
        for M, N, K in ((16, 3072, 576), (64, 4096, 14336), (512, 4096, 14336), (90, 40, 300)):
            m.scaled_matmul(empty(M, K, dtype=code), empty(N, K, dtype=code), empty(M), empty(N), dtype)


def split_k(m: Any, dtype: torch.dtype) -> None:
    """Sums of two products of an 8B Llama's layer: of floats, and of integers with their scales."""
    empty = functools.partial(torch.empty, device="meta")
    out = empty(16, 4096, dtype=dtype)
    m.add_splits(empty(8, 16, 4096), out)
    m.add_splits(empty(4, 16, 4096, dtype=torch.int32), out, (empty(16), empty(4096)))


def bitmask(m: Any, dtype: torch.dtype) -> None:
    """The kernel at the vocabularies of SmolLM2 and Llama 3: a few guided rows of a batch, and all of them."""
    for V, G in itertools.product((49152, 128256), (3, 32)):
        logits = torch.empty(32, V, dtype=dtype, device="meta")
        bitmask = torch.empty(G, -(-V // 32), dtype=torch.int32, device="meta")
        m.apply_token_bitmask_inplace(logits, bitmask, torch.empty(G, dtype=torch.int64, device="meta"))


def tree(m: Any, dtype: torch.dtype) -> None:
    """Every kernel's wrapper at the shapes of SmolLM2 and of an 8B Llama, on meta tensors: for the compile check."""
    empty = functools.partial(torch.empty, device="meta")
    for Hq, Hkv, D in ((9, 3, 64), (32, 8, 128)):
        kv_cache, table = empty(2, 1024, 16, Hkv, D, dtype=dtype), empty(8, 512, dtype=torch.int32)
        lens = empty(8, dtype=torch.int32)
        for nodes in (4, 16, 64):
            m.tree_attention(
                empty(8 * nodes, Hq, D, dtype=dtype),
                kv_cache,
                table,
                empty(9, dtype=torch.int64),
                lens,
                empty(8 * nodes, dtype=torch.int64),
                nodes,
                4096,
            )
        m.compact_slots(kv_cache, table, lens, empty(8, 3, dtype=torch.int32))


EXAMPLES = {
    "01_kv_cache": kv_cache,
    "02_paged_attention": paged_attention,
    "03_flash_attention": flash_attention,
    "07_spec_decode": spec_decode,
    "09_gqa": gqa,
    "10_chunked_prefill": chunked_prefill,
    "11_preemption": preemption,
    "12_multi_lora": multi_lora,
    "engine.experts.grouped_matmul": grouped_matmul,
    "engine.kv_transfer.kernels": kernels,
    "engine.quantization.activations": activations,
    "engine.quantization.dequant_matmul": dequant_matmul,
    "engine.quantization.grouped_dequant": grouped_dequant,
    "engine.quantization.kv_decode": kv_decode,
    "engine.quantization.kv_write": kv_write,
    "engine.quantization.scaled_matmul": scaled_matmul,
    "engine.quantization.split_k": split_k,
    "engine.sampling.guided.bitmask": bitmask,
    "lab.tree": tree,
}
