"""Codes of GGUF files: blocks of 32 or 256 weights, each with its own scales, as llama.cpp stores them.

Owns the order of bits in a block; called by `packed_weight`, whose 4-bit codes lie in the same order, and by
`methods`. It never rounds: what a file stands for comes out exactly, and rows of q and k in Transformers' order.
vLLM: `vllm/model_executor/layers/quantization/gguf.py`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from engine.model import folders, gguf_files
from engine.model.config import LlamaConfig
from engine.quantization.formats import FORMATS, Quantized

# A byte's planes are not neighbours: byte j of a Q4_1 block holds weight j in its low half and weight j + 16 in its
# high half: one mask and one shift yield two runs of 16.


GGUF_BLOCKS = {"Q4_1": (32, 20), "Q8_0": (32, 34), "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144),
               "Q5_K": (256, 176), "Q6_K": (256, 210)}  # weights and bytes of a block  # fmt: skip


def planes(data: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """uint8 [blocks, n] -> int32 [blocks, n · 8 / bits]: of every `run` bytes first the lowest bits, then the next."""
    shift = torch.arange(0, 8, bits, dtype=torch.int32, device=data.device)[:, None]
    return (data.int().unflatten(1, (-1, 1, run)) >> shift & ((1 << bits) - 1)).flatten(1)


def half(x: torch.Tensor) -> torch.Tensor:
    """Bytes as fp16 numbers, in fp32: uint8 [..., 2 n] -> [..., n]."""
    return x.contiguous().view(torch.float16).float()


def decode_gguf(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """Weights of GGUF blocks, uint8 [blocks, bytes] -> fp32 [blocks, 32 or 256]. Source: ggml's block definitions.

    The K types scale twice: a block of 256 has an fp16 scale, and 16 (or 8) small integers multiply it.
    """
    if kind == "Q4_1":
        d, m, qs = blocks.split((2, 2, 16), 1)
        return half(d) * planes(qs, 4, 16) + half(m)
    if kind == "Q8_0":
        d, qs = blocks.split((2, 32), 1)
        return half(d) * qs.contiguous().view(torch.int8)
    if kind == "Q6_K":
        low, high, scales, d = blocks.split((128, 64, 16, 2), 1)
        q = planes(low, 4, 64) + (planes(high, 2, 32) << 4) - 32
        return (half(d) * scales.contiguous().view(torch.int8)).repeat_interleave(16, 1) * q
    if kind == "Q3_K":
        mask, qs, scales, d = blocks.split((32, 64, 12, 2), 1)
        scales = planes(scales[:, :8], 4, 8) + (planes(scales[:, 8:], 2, 4) << 4) - 32
        q = planes(qs, 2, 32) + (planes(mask, 1, 32) << 2) - 4
        return (half(d) * scales).repeat_interleave(16, 1) * q
    if kind == "Q2_K":
        scales, qs, d, dmin = blocks.split((16, 64, 2, 2), 1)
        s, m, q = scales.int() & 15, scales.int() >> 4, planes(qs, 2, 32)
    else:  # Q4_K and Q5_K: eight scales and eight minima of 6 bits in 12 bytes
        d, dmin, scales, high, qs = blocks.split((2, 2, 12, *((0, 128) if kind == "Q4_K" else (32, 128))), 1)
        a, b, c = scales.int().split(4, 1)
        s, m = torch.cat((a & 63, c & 15 | a >> 2 & 48), 1), torch.cat((b & 63, c >> 4 | b >> 2 & 48), 1)
        q = planes(qs, 4, 32) + (planes(high, 1, 32) << 4 if kind == "Q5_K" else 0)
    run = 256 // s.shape[1]
    return (half(d) * s).repeat_interleave(run, 1) * q - (half(dmin) * m).repeat_interleave(run, 1)


def gguf_to_quantized(kind: str, data: torch.Tensor) -> Quantized:
    """Codes and scales of a Q4_1 or Q8_0 matrix as they stand in the file, uint8 [N, bytes of a row]. No rounding."""
    N, blocks = len(data), data.reshape(-1, GGUF_BLOCKS[kind][1])
    d, m, qs = blocks.split((2, 2, 16) if kind == "Q4_1" else (2, 0, 32), 1)
    codes = planes(qs, 4, 16) if kind == "Q4_1" else qs.int() ^ 128
    scale, minimum = (x.contiguous().view(torch.float16).view(N, -1) for x in (d, m))
    codes = codes.to(torch.uint8).view(N, -1)
    return Quantized(FORMATS[kind.lower()], codes, scale, minimum if m.numel() else None)


def read_gguf(path: Path, config: LlamaConfig, prefix: str = "") -> dict[str, Quantized]:
    """Q4_1 and Q8_0 matrices of a GGUF file, those whose name there starts with `prefix`, under Transformers' names.

    Rows of q and k are put into Transformers' order (see `model/gguf_files.py`). Nothing becomes a float on the way.
    """
    found = {}
    for tensor in gguf_files.gguf_reader(path).tensors:
        if (kind := tensor.tensor_type.name) in ("Q4_1", "Q8_0") and tensor.name.startswith(prefix):
            data = torch.from_numpy(tensor.data.copy())
            if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
                data = data.view(-1, config.head_dim // 2, 2, data.shape[1]).transpose(1, 2).reshape(data.shape)
            found[gguf_files._hugging_face_name(tensor.name)] = gguf_to_quantized(kind, data)
    return found


def gguf_codes(config: LlamaConfig) -> dict[str, Quantized]:
    """The codes of the GGUF file that the default model was converted from."""
    parts = read_gguf(folders._packaged_gguf(), config)
    return {name.removesuffix(".weight"): part for name, part in parts.items() if part.format.name == "q4_1"}
