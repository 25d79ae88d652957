"""05d · A quantized KV cache: more tokens in the same memory, and where few bits break.

The question: keys and values are the memory that limits a server. How few bits may each of them have?

The mechanism:
  1. A cached vector is one token's key, or value, of one KV head: D numbers. Store D codes and what scales them.
  2. FP8 (E4M3) needs no scale of its own: four exponent bits span 448 down to 1/512. INT8 needs one per vector.
  3. Below 8 bits a vector has 16, 8 or 4 levels between its smallest and largest element. Keys have channels that
     are ten times the others: they set the range, and all others round to the same two levels.
  4. So rotate first. A Hadamard matrix spreads each channel over all; q·k = (Hq)·(Hk), so scores stay the same.
  5. Or let each channel have its own scale, shared by the tokens of a block (KIVI): then the outlier is alone.
  6. A page holds its codes and, behind them, their scales: block tables, slot mapping, pool and copies stay as they
     were in lesson 02. One kernel quantizes on write, one attends and decodes codes in registers as it loads them.

Codes, kernels and cache are the engine's, `engine/quantization/kv_*.py`; here they are looked at and measured.

Numbers to remember: FP8 is 2x the tokens of bf16 for a loss one can hardly measure; 4 bits with a scale per vector
are 3.8x at D = 128 (3.6x at D = 64). FP8 attention on an H200 is 1.3 to 1.4x faster (FlashAttention-3; ours 1.1x).

How to run:
  uv run python -m vllm.tours.05d_kv_cache_quantization                                the whole story
  uv run python -m vllm.tours.05d_kv_cache_quantization --kv-cache-dtype int2_plain    break it: 2 bits, no rotation
  uv run python -m vllm.tours.05d_kv_cache_quantization --bench                        minutes: the whole table anew

Read for this: Liu et al. 2024 (KIVI), Hooper et al. 2024 (KVQuant), Ashkboos et al. 2024 (QuaRot), Zandieh et al. 2025
(TurboQuant), vLLM 0.32 `config/cache.py:CacheDType`, `v1/attention/ops/triton_reshape_and_cache_flash.py`,
`v1/attention/ops/int4_per_token_head.py`, `model_executor/layers/quantization/turboquant/`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import copy
import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from engine import arguments
from lab import cli
from lab import figures
from lab import recorded
from lab import timing
from lab.parameters import checked
from engine.model import llama, loader
from engine.model.tokenizer import Tokenizer
from engine import assemble
from engine.attention.metadata import AttentionMetadata
from engine.attention.torch_paged import prefill_attention
from engine.config import SchedulerConfig, VllmConfig
from engine.core.engine_core import EngineCore
from engine.quantization import formats
from engine.quantization.algorithms import rtn
from engine.quantization.kv_cache import make_cache
from engine.quantization.kv_codes import (
    FORMATS,
    KV_CACHE_DTYPES,
    PLANES,
    KVFormat,
    PageLayout,
    bits_per_element,
    block_bytes,
    dequantize,
    lloyd_max,
    pack,
    quantize,
    rotation,
    unpack,
)
from engine.quantization.kv_decode import quantized_decode
from engine.quantization.kv_write import quantize_and_cache
from engine.quantization.linear import QuantizedLinear
from engine.registry import fill
from engine.worker.cuda_graphs import CapturedModel, decode_at
from lab import roofline
from lab.offline_run import serve
from lab.peers import random_twins

KEY = "05d_kv_cache_quantization"


# --- What a byte means, by definition ---------------------------------------------------------------------------------


def e4m3_value(byte: int) -> float:
    """E4M3 by definition: 1 sign, 4 exponent, 3 mantissa bits; no infinities, and one NaN of each sign.

    (−1)^s · 2^(e − 7) · (1 + m/8), or (−1)^s · 2^−6 · m/8 where e = 0.
    """
    sign, e, m = (-1) ** (byte >> 7), byte >> 3 & 15, byte & 7
    if e == 15 and m == 7:
        return math.nan
    return sign * (2.0 ** (e - 7) * (1 + m / 8) if e else 2.0**-6 * m / 8)


def e4m3_nearest(x: float) -> int:
    """The byte of the nearest value, found by looking at all of them; ties go to the even byte, 448 is the end."""
    if math.isnan(x):
        return 0x7F
    a = min(abs(x), 448.0)
    magnitude = min(range(0x7F), key=lambda byte: (abs(e4m3_value(byte) - a), byte & 1))
    return magnitude | (0x80 if math.copysign(1, x) < 0 else 0)


# --- What we want to compute: dequantize everything, then attend -----------------------------------------------------


def dequantize_reference(layer: torch.Tensor, layout: PageLayout, head_scales: torch.Tensor) -> torch.Tensor:
    """Every vector of one layer's cache, element by element from the definitions, rotated back; in fp64.

    Shapes: layer uint8 [2, num_blocks, page], head_scales [2, Hkv] -> [2, num_blocks, block_size, Hkv, D].
    """
    fmt, D, bits = layout.fmt, layout.D, layout.fmt.bits
    shape, values = (2, layer.shape[1], layout.block_size, layout.Hkv, D), []
    level = {"e4m3": e4m3_value, "int8": lambda code: code - 256 * (code > 127), "uniform": lambda code: code - top / 2,
             "lloyd": lambda code: lloyd_max(bits)[code]}[fmt.grid]  # fmt: skip
    pages, top = layer.cpu().numpy(), 2**bits - 1
    for half, block, offset, head, d in itertools.product(*map(range, shape)):
        page, vector, code = pages[half, block], offset * layout.Hkv + head, 0
        first = vector * D * bits // 8  # byte of the vector's plane
        for width, below in PLANES[bits]:
            n = D * width // 8
            code |= (int(page[first + d % n]) >> d // n * width & 2**width - 1) << below
            first += n
        number = head * D + d if fmt.key_channels and half == 0 else vector
        behind = page[layout.codes + 4 * number :][:4]
        scale, mid = float(head_scales[half, head]), 0.0
        if fmt.grid == "uniform":
            scale, mid = behind.view(np.float16).tolist()
        elif fmt.per_token:
            scale = behind.view(np.float32).item()
        values.append(scale * level(code) + mid)
    out = torch.tensor(values, dtype=torch.float64).view(shape)
    return out @ rotation(D).double().T if fmt.rotate else out


def attend_reference(q: torch.Tensor, dense: torch.Tensor, block_table: torch.Tensor,
                     seq_lens: torch.Tensor) -> torch.Tensor:  # fmt: skip
    """One query of each sequence against all its dequantized keys, in fp64. Shapes: q [B, Hq, D] -> [B, Hq, D]."""
    rows = []
    for query, blocks, S in zip(q.double().cpu(), block_table.long().cpu(), seq_lens.tolist()):
        keys, values = dense[:, blocks].flatten(1, 2)[:, :S]  # [S, Hkv, D] each
        rows.append(prefill_attention(query[None], keys, values))
    return torch.cat(rows)


# --- How good is it? Three probes on a real model ---------------------------------------------------------------------

BLOCK = 32  # of the probes and of step 2: KIVI's group of tokens


def evaluation_tokens(tokenizer: Tokenizer, count: int) -> list[int]:
    """The first tokens of the text that ships with every Python: its own reference manual's topics."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics)[:40])
    return tokenizer.encode(text)[:count]


def one_sequence(num_tokens: int, device: torch.device) -> AttentionMetadata:
    """A prompt of this length in blocks 1, 2, 3, …"""
    blocks = range(1, 1 + -(-num_tokens // BLOCK))
    return AttentionMetadata.build([blocks], [num_tokens], [num_tokens], BLOCK, device)


def perplexity(model: llama.Llama, tokens: Sequence[int], kv_cache_dtype: str, window: int = 512,
               head_scales: torch.Tensor | None = None) -> float:  # fmt: skip
    """exp of the mean negative log likelihood, in windows that know nothing of each other, every past quantized."""
    cache = make_cache(model, 1 + -(-window // BLOCK), BLOCK, kv_cache_dtype)
    if head_scales is not None:
        cache.head_scales = head_scales
    total, count = 0.0, 0
    for first in range(0, len(tokens), window):
        ids = torch.tensor(tokens[first : first + window], device=model.device)
        meta = one_sequence(len(ids), model.device)
        hidden = model.forward(ids, meta.positions, cache.attend(meta))
        loss = F.cross_entropy(model.logits(hidden[:-1]).float(), ids[1:], reduction="sum")
        total, count = total + loss.item(), count + len(ids) - 1
    return math.exp(min(700.0, total / count))


def attention_errors(model: llama.Llama, tokens: Sequence[int], names: Sequence[str]) -> dict[str, list[float]]:
    """Of each layer, ‖o − ô‖ / ‖o‖ of its attention output, everything before it exact."""
    meta = one_sequence(len(tokens), model.device)
    attends = {name: make_cache(model, 1 + meta.block_table.shape[1], BLOCK, name).attend(meta) for name in names}
    errors: dict[str, list[float]] = {name: [] for name in names}

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        exact = prefill_attention(q, k, v)
        for name in names:
            errors[name].append(common.relative_error(attends[name](layer, q, k, v), exact))
        return exact

    model.forward(torch.tensor(list(tokens), device=model.device), meta.positions, attend)
    return errors


def calibrate(model: llama.Llama, tokens: Sequence[int]) -> tuple[torch.Tensor, dict[str, float]]:
    """What one pass over a text shows of keys and values, in full precision.

    Scales per layer, half and head with which the largest element becomes 448: fp32 [L, 2, Hkv]. And how far channels
    stick out: mean |x| of a head's largest channel over that of its median channel.
    """
    largest, channels = [], []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kv = torch.stack((k, v)).abs().float()  # [2, T, Hkv, D]
        largest.append(kv.amax((1, 3)))
        channels.append(kv.mean(1))
        return prefill_attention(q, k, v)

    meta = one_sequence(len(tokens), model.device)
    model.forward(torch.tensor(list(tokens), device=model.device), meta.positions, attend)
    means, top = torch.stack(channels), torch.stack(largest)  # [L, 2, Hkv, D], [L, 2, Hkv]
    keys, values = (means.amax(-1) / means.median(-1).values).unbind(1)
    return top / 448, {"largest_key": top[:, 0].max().item(), "median_head_keys": keys.median().item(),
                       "worst_head_keys": keys.max().item(), "median_head_values": values.median().item()}  # fmt: skip


NEEDLES = {"Lisbon": "4817", "the library": "2903", "Anna": "7164", "the red car": "5392", "the moon": "8046",
           "the piano": "1675", "the garden": "3528", "Doctor Smith": "9430"}  # fmt: skip
WRITTEN = 6  # tokens of an answer: a blank, four digits, and what follows


@dataclasses.dataclass
class Haystack:
    """A document with needles in it, its exact keys and values, and one question per needle.

    The document is read once, in full precision; each format then stores those same keys and values. So the probe asks
    what a format forgets, and not what an already disturbed model would have written.
    """

    document: list[int]
    questions: list[list[int]]
    answers: list[str]
    cache: Any  # lesson 02's

    @classmethod
    def build(cls, model: llama.Llama, tokenizer: Tokenizer, filler_tokens: int = 768) -> Haystack:
        """A text of so many tokens with the needles spread evenly through it."""
        filler = evaluation_tokens(tokenizer, filler_tokens)
        step = filler_tokens // len(NEEDLES)
        document = tokenizer.encode("<|im_start|>user\nRead this text.\n\n")
        for i, (name, number) in enumerate(NEEDLES.items()):
            document += filler[i * step : (i + 1) * step]
            document += tokenizer.encode(f"\nThe secret number of {name} is {number}. Remember: {name}, {number}.\n")
        ask = "\n\nWhat is the secret number of {0}?<|im_end|>\n<|im_start|>assistant\nThe secret number of {0} is"
        cache = fill("cache.paged")(model, 2 * -(-len(document) // BLOCK) + 4 * len(NEEDLES), BLOCK)
        meta = one_sequence(len(document), model.device)
        model.forward(torch.tensor(document, device=model.device), meta.positions, cache.attend(meta))
        return cls(document, [tokenizer.encode(ask.format(city)) for city in NEEDLES], list(NEEDLES.values()), cache)

    def find(self, model: llama.Llama, tokenizer: Tokenizer, kv_cache_dtype: str) -> list[bool]:
        """Ask all questions at once, each a fork of the document, and compare what is written with the number."""
        cache = make_cache(model, self.cache.layers[0].shape[1], BLOCK, kv_cache_dtype)
        slots = one_sequence(len(self.document), model.device).slot_mapping
        if kv_cache_dtype == "auto":
            cache.layers = [layer.clone() for layer in self.cache.layers]
        else:
            cache.begin_step(slots)
            for i, layer in enumerate(self.cache.layers):
                kv = layer.flatten(1, 2)[:, slots]
                cache.write(i, *(kv if cache.rotation is None else kv @ cache.rotation), slots)
        tables, new = self.fork(cache), self.questions
        written: list[list[int]] = [[] for _ in self.questions]
        lens = [len(self.document)] * len(tables)
        for _ in range(WRITTEN):
            lens = [S + len(tokens) for S, tokens in zip(lens, new)]
            meta = AttentionMetadata.build(tables, lens, [len(tokens) for tokens in new], BLOCK, model.device)
            token_ids = torch.tensor([token for tokens in new for token in tokens], device=model.device)  # [T]
            hidden = model.forward(token_ids, meta.positions, cache.attend(meta))
            picked = model.logits(hidden[meta.query_start_loc[1:] - 1]).argmax(-1).tolist()
            new = [[token] for token in picked]
            for tokens, token in zip(written, picked):
                tokens.append(token)
        return [tokenizer.decode(tokens).strip().startswith(a) for tokens, a in zip(written, self.answers)]

    def fork(self, cache: Any) -> list[list[int]]:
        """A block table for each question. All read the document's full blocks, and each writes into its own copy of
        the one that is not full, and behind it."""
        full, rest = divmod(len(self.document), BLOCK)
        free = itertools.count(full + 1 + bool(rest))
        need = [-(-(rest + len(question) + WRITTEN) // BLOCK) for question in self.questions]
        tables = [[*range(1, full + 1), *itertools.islice(free, n)] for n in need]
        cache.copy_blocks([(full + 1, table[full]) for table in tables if rest])
        return tables


# --- The simulation: sixteen channels, eight keys, one query ----------------------------------------------------------

CHANNELS, TOKENS = 16, 8
PRESETS = ("outlier channel", "two outlier channels", "no outlier", "outlier token")
WIDGET_DEFAULT = {"keys": "outlier channel", "bits": 3, "rotation": False, "group": "token", "needle": 3}


# Keys of −2 … 2 (as digits 0 … 4), and the query that finds each: the key before noise, and blind to channel 5.
KEY_DIGITS = ("2133004420342210", "3021240243342120", "1240433222403221", "3204320332313213",
              "3410122212412200", "4342234302432022", "2423420340221242", "4430203234303022")  # fmt: skip
QUERY_SIGNS = ("--++-0++--+++---", "+----0-++++++-+-", "--+-+0+++++-+-+-", "+--++0-++-+-+--+",
               "++---0++--+-----", "+++--0++-++++-++", "-++++0-++-+--+++", "+++--0+++++-+-++")  # fmt: skip


def widget_keys(preset: str) -> tuple[list[list[int]], list[list[int]]]:
    """Keys [8][16] with what the preset adds, and the query for each."""
    keys = [[int(digit) - 2 for digit in row] for row in KEY_DIGITS]
    queries = [["-0+".index(sign) - 1 for sign in row] for row in QUERY_SIGNS]
    for t in range(TOKENS):
        if preset in ("outlier channel", "two outlier channels"):
            keys[t][5] += 60
        if preset == "two outlier channels":
            keys[t][12] -= 45
            queries[t][12] = 0
    if preset == "outlier token":
        keys[0] = [10 * x for x in keys[0]]
    return keys, queries


def simulate(params: dict[str, Any]) -> dict[str, Any]:
    """Quantize eight keys and look for one of them.

    params: keys (a preset), bits (2, 3, 4, 8), rotation, group ("token": a scale per key; "channel": one per channel
    over the eight keys), needle (0 … 7: which key the query is made for). Uses the lesson's real `rotation`,
    `quantize`, `pack` and `dequantize`. Keys and scores are integers; whatever is not is given in thousandths.
    The trace has: stored (the keys as they are quantized: rotated, perhaps), codes, scales, mids and levels (of each
    group), restored keys, the largest error, exact and restored scores, which key is found, what each of the eight
    queries should find and finds, how many are right, and bytes before and after. Raises InputError.
    """
    p = checked(params, {"keys": PRESETS, "bits": (2, 3, 4, 8), "rotation": (False, True),
                                "group": ("token", "channel"), "needle": range(TOKENS)})  # fmt: skip
    keys, queries = widget_keys(p["keys"])
    fmt = KVFormat(p["bits"], "uniform", p["rotation"], key_channels=p["group"] == "channel")
    x, q, needle = torch.tensor(keys).float(), torch.tensor(queries).float(), p["needle"]
    R = rotation(CHANNELS) if fmt.rotate else torch.eye(CHANNELS)
    stored = x @ R  # exact: integers times ±1/4
    grouped = stored.T if fmt.key_channels else stored
    codes, scale, mid = quantize(grouped, fmt)
    packed = pack(codes, fmt.bits)  # eight keys make whole bytes either way
    restored = dequantize(unpack(packed, fmt.bits), scale, mid, fmt)
    restored = (restored.T if fmt.key_channels else restored) @ R.T
    levels = dequantize(torch.arange(2**fmt.bits, dtype=torch.uint8).expand(len(scale), -1), scale, mid, fmt)
    scores = [q @ y.T for y in (x, restored)]  # [queries, keys]
    should, found = (score.argmax(-1).tolist() for score in scores)
    milli = lambda tensor: (tensor.double() * 1000).round().int().tolist()  # noqa: E731
    codes = codes.T if fmt.key_channels else codes
    return {
        "params": p, "keys": keys, "query": queries[needle], "stored_milli": milli(stored),
        "codes": codes.int().tolist(), "scale_milli": milli(scale.flatten()), "mid_milli": milli(mid.flatten()),
        "levels_milli": milli(levels),
        "restored_milli": milli(restored), "largest_error_milli": milli((restored - x).abs().max()),
        "scores": scores[0][needle].int().tolist(), "restored_scores_milli": milli(scores[1][needle]),
        "should_find": should[needle], "finds": found[needle], "should_each": should, "finds_each": found,
        "found": sum(a == b for a, b in zip(should, found)),
        "bytes_bf16": 2 * x.numel(), "bytes": packed.numel() + 4 * len(scale),
    }  # fmt: skip


def describe(trace: dict[str, Any]) -> str:
    """The state of the simulation as text, as the widget's slot shows it."""
    p, needle = trace["params"], trace["params"]["needle"]
    row = lambda values, width: "".join(f"{x:>{width}}" for x in values)  # noqa: E731
    tenths = lambda values: [f"{x / 1000:.1f}" for x in values]  # noqa: E731
    right = trace["finds"] == trace["should_find"]
    verdict = f"finds key {trace['finds']}" + ("" if right else f", WRONG: should be {trace['should_find']}")
    return "\n".join([
        f"{p['keys']}; {p['bits']} bits, {'rotated, ' * p['rotation']}one scale per {p['group']}: "
        f"{trace['bytes']} bytes instead of {trace['bytes_bf16']}",
        f"key {needle}    {row(trace['keys'][needle], 6)}",
        f"stored   {row(tenths(trace['stored_milli'][needle]), 6)}",
        f"codes    {row(trace['codes'][needle], 6)}",
        f"restored {row(tenths(trace['restored_milli'][needle]), 6)}",
        f"largest error of any key: {trace['largest_error_milli'] / 1000:.1f}",
        f"scores   {row(trace['scores'], 6)}",
        f"now      {row(tenths(trace['restored_scores_milli']), 6)}   {verdict}",
    ])  # fmt: skip


# --- What others measured ---------------------------------------------------------------------------------------------

# FlashAttention-3 decode in vLLM 0.22 on an H200, Hkv 8, D 128, microseconds with a bf16 and an fp8 cache, by
# (sequences, context): NVIDIA aiconfigurator's kernel database.
HOPPER_DECODE = {(8, 4096): (41.4, 31.8), (32, 4096): (132.5, 98.5), (8, 16384): (132.9, 95.0)}
# vLLM blog, 2026-04-22, Llama-3.1-8B on an H100. A line fitted to one request at a time, contexts to 125k: ms + ms per
# token. And the median step, ms, of eight at once, some 20,000 tokens in and 2,000 out: halfway, 8 · 21,000 are cached.
PUBLISHED_ITL = roofline.PUBLISHED_ITL
PUBLISHED_BATCH, BATCH_TOKENS = {"bfloat16": 15.18, "fp8": 12.93}, 8 * 21_000


def published_facts() -> dict[str, Any]:
    """Others' measurements, read.

    If time were bytes / bandwidth + a constant, bandwidth would be (bytes16 − bytes8) / (t16 − t8). That is more than
    the memory can do, so the sum is the wrong model: loads and arithmetic overlap.
    """
    hopper = {}
    for (B, S), (t16, t8) in HOPPER_DECODE.items():
        moved = 2 * B * S * 8 * 128 * 2 / 1e6  # bf16: MB, so that MB / µs are TB/s
        hopper[f"b{B}_s{S}"] = {"bf16_us": t16, "fp8_us": t8, "speedup": t16 / t8, "bf16_tb_s": moved / t16,
                                "fp8_tb_s": moved / 2 / t8, "sum_model_tb_s": moved / 2 / (t16 - t8)}  # fmt: skip
    (a16, b16), (a8, b8) = PUBLISHED_ITL["bfloat16"], PUBLISHED_ITL["fp8"]
    itl = {"bf16_ms": a16, "fp8_ms": a8, "extra_ms": a8 - a16, "slope_ratio": b8 / b16,
           "break_even_tokens": (a8 - a16) / (b16 - b8), "speedup_limit": b16 / b8,
           "speedup_100k": (a16 + b16 * 1e5) / (a8 + b8 * 1e5),
           "batch": {"bf16_ms": PUBLISHED_BATCH["bfloat16"], "fp8_ms": PUBLISHED_BATCH["fp8"],
                     "speedup": PUBLISHED_BATCH["bfloat16"] / PUBLISHED_BATCH["fp8"],
                     "line": (a16 + b16 * BATCH_TOKENS) / (a8 + b8 * BATCH_TOKENS)}}  # fmt: skip
    return {"hopper": hopper, "itl": itl}


# --- What we measured: perplexity, needles and errors, regenerated by --bench -----------------------------------------

# Deterministic, but for the text: pydoc_data.topics differs between versions of Python; `text` is the sha256 of these
# tokens. Perplexity over 2,048 tokens in windows of 512; needles found, of 8; error of attention, mean over the layers.
RECORDED: dict[str, Any] = {
    "text": "8b3d733c6299944a",
    "fp8_calibrated": 15.389,
    "outliers": {"largest_key": 20.78, "median_head_keys": 10.27, "worst_head_keys": 17.71, "median_head_values": 2.40},
    "first_1024": {"auto": 14.243, "int4_per_token_head": 15.655, "int2_plain": 699.897},
    "formats": {
        "auto": {"perplexity": 15.259, "needles": 8, "error": 0.0000},
        "fp8": {"perplexity": 15.375, "needles": 8, "error": 0.0606},
        "fp8_per_token_head": {"perplexity": 15.432, "needles": 7, "error": 0.0489},
        "int8_per_token_head": {"perplexity": 15.278, "needles": 8, "error": 0.0199},
        "int4_per_token_head": {"perplexity": 16.666, "needles": 7, "error": 0.1601},
        "int3_per_token_head": {"perplexity": 20.433, "needles": 5, "error": 0.3509},
        "int2_per_token_head": {"perplexity": 121.024, "needles": 0, "error": 0.8820},
        "turboquant_4bit": {"perplexity": 16.301, "needles": 5, "error": 0.1699},
        "turboquant_3bit": {"perplexity": 19.882, "needles": 7, "error": 0.3270},
        "turboquant_2bit": {"perplexity": 44.019, "needles": 0, "error": 0.6125},
        "int4_plain": {"perplexity": 17.680, "needles": 4, "error": 0.2418},
        "int3_plain": {"perplexity": 31.248, "needles": 2, "error": 0.5347},
        "int2_plain": {"perplexity": 893.118, "needles": 0, "error": 1.2927},
        "kivi_2bit": {"perplexity": 31.901, "needles": 2, "error": 0.5747},
    },
}


def text_digest(tokens: Sequence[int]) -> str:
    """Which text it was: the first 16 hexadecimal digits of the sha256 of its token ids."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()[:16]


def capacity(L: int, Hkv: int, D: int, block_size: int) -> dict[str, dict[str, float]]:
    """Of every format: bytes per token, tokens in a GiB of whole blocks, times as many as bf16."""
    found = {}
    for name in KV_CACHE_DTYPES:
        block = 2 * L * block_size * Hkv * D * bits_per_element(name, D, block_size) / 8
        found[name] = {"bytes": block / block_size, "tokens_per_gib": 2**30 // block * block_size,
                       "ratio": 16 / bits_per_element(name, D, block_size)}  # fmt: skip
    return found


@functools.cache
def facts() -> dict[str, Any]:
    """What the text quotes and can be computed without a model, and the recorded table."""
    widget = {}
    for preset in PRESETS:
        for bits in (2, 3, 4, 8):
            for way, change in (("plain", {}), ("rotated", {"rotation": True}), ("channel", {"group": "channel"})):
                run = simulate(WIDGET_DEFAULT | {"keys": preset, "bits": bits} | change)
                widget.setdefault(preset.replace(" ", "_"), {})[f"{way}_{bits}"] = {
                    "found": run["found"], "largest_error": run["largest_error_milli"] / 1000,
                }  # fmt: skip
    values = sorted({e4m3_value(byte) for byte in range(256) if byte & 0x7F != 0x7F})
    return {
        "e4m3": {"values": len(values), "largest": values[-1], "smallest": min(x for x in values if x > 0)},
        "lloyd": {str(bits): lloyd_max(bits)[-1] for bits in (2, 3, 4)},
        "smollm2": capacity(30, 3, 64, BLOCK),
        "llama_8b": capacity(32, 8, 128, BLOCK),
        "bits": {name: bits_per_element(name, 64, BLOCK) for name in KV_CACHE_DTYPES},
        **published_facts(),
        "widget": widget, "recorded": RECORDED,
    }  # fmt: skip


# --- Figures ----------------------------------------------------------------------------------------------------------

FAMILIES = {  # the lines of the second figure
    "8 bits": ("blue", ["fp8", "fp8_per_token_head", "int8_per_token_head"]),
    "rotated": ("green", [f"int{b}_per_token_head" for b in (4, 3, 2)]),
    "rotated, Lloyd-Max": ("purple", [f"turboquant_{b}bit" for b in (4, 3, 2)]),
    "not rotated": ("red", [f"int{b}_plain" for b in (4, 3, 2)]),
    "keys per channel": ("orange", ["kivi_2bit"]),
}


def draw(folder: str | Path) -> list[Path]:
    """The figures, from `facts()` alone."""
    known, color = facts(), figures.COLORS
    # The simulation's keys: as they are, and as three ways of storing 3 bits give them back.
    ways = {"one scale per key": ("plain", {}), "rotated, one scale per key": ("rotated", {"rotation": True}),
            "one scale per channel": ("channel", {"group": "channel"})}  # fmt: skip
    panels = {"the keys": simulate(WIDGET_DEFAULT)["keys"]}
    for title, (way, change) in ways.items():
        found = known["widget"]["outlier_channel"][f"{way}_3"]["found"]
        restored = simulate(WIDGET_DEFAULT | change)["restored_milli"]
        panels[f"{title}: {found} of 8 found"] = [[x / 1000 for x in row] for row in restored]
    figure, axes = figures.new_figure(8.0, 3.9, nrows=2, ncols=2, sharex=True, sharey=True)
    for ax, (title, keys) in zip(axes.flat, panels.items()):
        ax.imshow(keys, cmap="RdBu_r", vmin=-4, vmax=4, aspect="auto")
        ax.set(title=title, xticks=range(0, CHANNELS, 5), yticks=range(0, TOKENS, 7))
        for t in range(TOKENS):
            ax.text(5, t, f"{keys[t][5]:.0f}", ha="center", va="center", color="white", fontsize=7)
    figure.supxlabel("channel", fontsize=10)
    figure.supylabel("key", fontsize=10)
    paths = [figures.save_figure(figure, folder, "05d_outlier")]
    # Quality against the bits that an element really takes.
    table, bits = known["recorded"]["formats"], known["bits"]
    figure, axes = figures.new_figure(8.0, 3.6, ncols=2)
    for family, (shade, names) in FAMILIES.items():
        style = "o" if family == "8 bits" else "o-"  # other formats, not other widths: no line
        for ax, key in zip(axes, ("perplexity", "needles")):
            ax.plot([bits[name] for name in names], [table[name][key] for name in names], style, label=family,
                    color=color[shade], markersize=5)  # fmt: skip
    for ax, title in zip(axes, ("perplexity (dotted: not quantized)", f"needles found, of {len(NEEDLES)}")):
        ax.set(title=title, xlabel="bits per element, scales included", xlim=(2, 9))
    axes[0].axhline(table["auto"]["perplexity"], color=color["grey"], linestyle=":")
    axes[0].set(yscale="log")
    axes[0].set_yticks(ticks := [15, 20, 30, 50, 100, 200, 500, 1000], ticks)
    axes[0].minorticks_off()
    axes[1].legend(fontsize=9, loc="lower right")
    return [*paths, figures.save_figure(figure, folder, "05d_quality")]


# --- The story --------------------------------------------------------------------------------------------------------

QUESTIONS = ["What is the capital of France?", "What are the three primary colors?", "Why is the sky blue?"]


def make_core(model: llama.Llama, kv_cache_dtype: str, num_blocks: int = 256, block_size: int = 16,
              max_model_len: int = 1024) -> EngineCore:  # fmt: skip
    """The engine on a quantized cache. Raises InputError for an unknown dtype."""
    limits = SchedulerConfig(max_model_len, max_num_seqs=32, max_num_batched_tokens=4096)
    config = VllmConfig(attention_backend="paged", kv_cache_dtype=kv_cache_dtype)
    return assemble.make_core(model, limits, num_blocks, block_size, config, enable_prefix_caching=False)


def shuffled_blocks(seq_lens: Sequence[int], block_size: int) -> list[list[int]]:
    """Blocks of each sequence, in any order, of a pool that has no more."""
    need = [-(-S // block_size) for S in seq_lens]
    ids = (torch.randperm(sum(need)) + 1).tolist()
    return [[ids.pop() for _ in range(n)] for n in need]


def random_layer(fmt: KVFormat, seq_lens: Sequence[int], block_size: int, Hq: int, Hkv: int, D: int,
                 dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of `quantized_decode`, on shuffled blocks; not for scales per channel."""
    layout, device = PageLayout(fmt, block_size, Hkv, D), common.device()
    blocks = shuffled_blocks(seq_lens, block_size)
    meta = AttentionMetadata.build(blocks, seq_lens, seq_lens, block_size)
    layer = torch.zeros(2, sum(map(len, blocks)) + 1, layout.page, dtype=torch.uint8, device=device)
    k, v = torch.randn(2, sum(seq_lens), Hkv, D, device=device).to(dtype)
    head_scales = torch.ones(2, Hkv, device=device)
    quantize_and_cache(k, v, layer, meta.slot_mapping, layout, head_scales)
    q = torch.randn(len(seq_lens), Hq, D, device=device).to(dtype)
    return q, layer, meta.block_table, meta.seq_lens, meta.max_seq_len, layout, head_scales


def check_formats() -> None:
    """Every E4M3 byte and every tie against the definition; every kernel against dequantizing everything."""
    values = torch.tensor([e4m3_value(byte) for byte in range(0x7F)])
    x = torch.cat((values, (values[1:] + values[:-1]) / 2))  # all values, all ties
    codes = quantize(x, FORMATS["fp8"], torch.ones(1))[0]
    common.check_equal(f"{len(x)} values and ties of E4M3 encoded as the definition says", codes.tolist(),
                       [e4m3_nearest(float(value)) for value in x])  # fmt: skip
    if not common.HAS_TRITON:
        common.skipped("the Triton kernels", common.kernel_mode())
        return
    for name in ("fp8", "int8_per_token_head", "int3_plain"):
        with common.use_kernels():
            made = random_layer(FORMATS[name], [1, 16, 21], 16, 6, 2, 16)
            q, layer, table, lens, _, layout, head_scales = made
            out = quantized_decode(*made)
        dense = dequantize_reference(layer, layout, head_scales)
        reference = attend_reference(q, dense, table, lens).float()
        common.check(f"{name}: written by one kernel, read by the other", out.cpu(), reference)


def run_engine(model: llama.Llama, tokenizer: Tokenizer, kv_cache_dtype: str, max_tokens: int = 16) -> None:
    """Three chats with the full cache, fp8, and what was asked for; fp8 batched against alone.

    With 2 bits that would fail: products of 1 and 3 rows differ in the last bit, which may move a code by a level.
    """
    prompts = [tokenizer.ask(question) for question in QUESTIONS]
    told, rows, memory = {}, [], 64 * 2**20
    for name in dict.fromkeys(("auto", "fp8", kv_cache_dtype)):
        core = make_core(model, name, block_size=BLOCK)
        told[name] = serve(core, prompts, [max_tokens] * len(prompts)).token_ids
        size = block_bytes(model, BLOCK, name)
        rows.append([name, f"{size:,}", f"{memory // size * BLOCK:,}", repr(tokenizer.decode(told[name][0]))])
    common.table(["--kv-cache-dtype", "bytes of a block", "tokens in 64 MiB", QUESTIONS[0]], rows)
    alone = serve(make_core(model, "fp8", block_size=BLOCK), prompts[:1], [max_tokens]).token_ids
    common.check_equal("fp8: the first chat gets the same tokens served alone", alone[0], told["fp8"][0])


def probe(model: llama.Llama, tokenizer: Tokenizer, names: Sequence[str], tokens: Sequence[int],
          haystack: Haystack) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Needles, perplexity and attention error of each format."""
    errors = attention_errors(model, tokens[:512], names)
    found = {}
    for name in names:
        hits = haystack.find(model, tokenizer, name)
        found[name] = {"needles": sum(hits), "perplexity": perplexity(model, tokens, name),
                       "error": sum(errors[name]) / len(errors[name]), "layers": errors[name]}  # fmt: skip
    return found


def show_table(table: dict[str, dict[str, Any]]) -> None:
    """Formats by quality: bits, capacity, attention error, perplexity, needles."""
    capacities = facts()["smollm2"]
    rows = [[name, f"{facts()['bits'][name]:.2f}", f"{capacities[name]['tokens_per_gib']:,.0f}",
             f"{capacities[name]['ratio']:.1f}x", f"{row['error']:.1%}", f"{row['perplexity']:.2f}", row["needles"]]
            for name, row in table.items()]  # fmt: skip
    common.table(["", "bits/element", "tokens/GiB", "of bf16's", "error", "perplexity", f"needles of {len(NEEDLES)}"],
                 rows)  # fmt: skip


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    p.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="int4_per_token_head", metavar="NAME",
                   help=f"the format of steps 2 and 3: {', '.join(KV_CACHE_DTYPES)} (default %(default)s)")  # fmt: skip
    return p


def measure_kernels(seconds: float = 0.3) -> list[dict[str, Any]]:
    """On a GPU: decode attention over a bf16 cache (lesson 02's kernel) and over quantized ones."""
    rows, names = [], ("fp8", "int8_per_token_head", "int4_plain", "int2_plain")
    some = functools.partial(torch.randn, dtype=torch.bfloat16, device=common.device())
    for B, S in HOPPER_DECODE:
        blocks = shuffled_blocks([S] * B, 16)
        meta = AttentionMetadata.build(blocks, [S] * B, [S] * B, 16)
        exact = some(B, 32, 128), some(2, 1 + B * S // 16, 16, 8, 128), meta.block_table, meta.seq_lens, S
        base = timing.measure_graph(functools.partial(fill("decode.paged"), *exact), seconds).median
        row = {"B": B, "S": S, "auto": base}
        for name in names:
            made = random_layer(FORMATS[name], [S] * B, 16, 32, 8, 128, torch.bfloat16)
            row[name] = timing.measure_graph(functools.partial(quantized_decode, *made), seconds).median
            row[f"{name}_gbps"], row[f"{name}_speedup"] = made[1].nbytes / row[name] / 1e9, base / row[name]
        rows.append(row)
    shown = [[r["B"], r["S"], *(f"{r[name] * 1e6:.1f}" for name in ("auto", *names))] for r in rows]
    common.table(["B", "S", "bf16, µs", *names], shown)
    return rows


def measure_together(name: str = "Llama-3.1-8B", context: int = 4096) -> list[dict[str, Any]]:
    """On a GPU: ms of an 8B model's decode step, one CUDA graph, and the GB it reads; weights and cache in few bits."""
    model, int4, rows = random_twins(name)[0], formats.FORMATS["int4-g128"], []
    small = copy.copy(model)
    small.linear = {n: layer if n == "lm_head" else QuantizedLinear(rtn(layer.weight, int4))
                    for n, layer in model.linear.items()}  # fmt: skip
    rest, head = sum(x.weight.numel() for x in model.linear.values()), model.linear["lm_head"].weight.numel()
    gb = {"bf16": 2e-9 * rest, "int4": 2e-9 * head + 1e-9 * (rest - head) * int4.bits_per_weight(4096) / 8}
    for n, dtype, (weights, m) in itertools.product((1, 32), ("auto", "fp8"), (("bf16", model), ("int4", small))):
        core = make_core(m, dtype, 1 + n * -(-context // 16), 16, context)
        runner = core.runner
        runner.graphs = CapturedModel(runner.model, runner.cache, runner.attend, core.scheduler.config)
        took = timing.measure(decode_at(runner, n, context)).median
        read = gb[weights] + sum(layer.nbytes for layer in runner.cache.layers) / 1e9
        rows.append({"B": n, "weights": weights, "cache": dtype, "ms": 1e3 * took, "gb": read})
        common.say(f"{name}, {n:>2} × {context:,} tokens, weights {weights}, cache {dtype:<4}: {1e3 * took:5.2f} ms, "
                   f"{read:.1f} GB")  # fmt: skip
    return rows


def measure_engine(model: llama.Llama, tokenizer: Tokenizer, max_tokens: int = 32) -> dict[str, Any]:
    """Tokens per second of 16 chats with each cache: what quantizing costs where attention is not the limit."""
    prompts = [tokenizer.ask(f"{QUESTIONS[i % 3]} ({i})") for i in range(16)]
    found, rows = {}, []
    for name in ("auto", "fp8", "int8_per_token_head", "int4_per_token_head"):
        core = make_core(model, name)
        rates = [serve(core, prompts, [max_tokens] * 16).tokens_per_second for _ in range(3)]
        found[name] = {"tokens_per_second": sorted(rates)[1]}
        found[name]["of_auto"] = found[name]["tokens_per_second"] / found["auto"]["tokens_per_second"]
        rows.append([name, f"{found[name]['tokens_per_second']:.0f}", f"{found[name]['of_auto']:.0%}"])
    common.table(["16 chats", "tokens/s", "of auto"], rows)
    return found


def benchmark(model: llama.Llama, tokenizer: Tokenizer) -> dict[str, Any]:
    """The recorded table anew, and times."""
    tokens, haystack = evaluation_tokens(tokenizer, 2048), Haystack.build(model, tokenizer)
    names = [name for name in KV_CACHE_DTYPES if name != "fp8_e4m3"]
    show_table(table := probe(model, tokenizer, names, tokens, haystack))
    scales, outliers = calibrate(model, tokens[:512])
    calibrated = perplexity(model, tokens, "fp8", head_scales=scales)
    common.say(f"fp8 with calibrated scales: perplexity {calibrated:.3f}, with 1: {table['fp8']['perplexity']:.3f}")
    common.say(f"text {text_digest(tokens)} (recorded: {RECORDED['text']}), haystack {len(haystack.document)} tokens")
    bench = {"table": table, "fp8_calibrated": calibrated, "outliers": outliers, "text": text_digest(tokens)}
    bench["engine"] = measure_engine(model, tokenizer)
    if common.HAS_GPU:
        bench |= {"decode": measure_kernels(), "together": measure_together()}
        bench["copy_bandwidth"] = timing.copy_bandwidth()
    return bench


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    machine, f, bench, name = cli.start(args), facts(), {}, args.kv_cache_dtype
    if (D := loader.check_context(args.model, 2048 if args.bench else 1024).head_dim) % 8:
        raise common.InputError(f"--model {args.model}: head_dim {D}; every format takes multiples of 8")

    common.heading("1. Codes and kernels against the definitions")
    check_formats()

    model, tokenizer = loader.load(args.model)
    common.heading(f"2. The real model in the engine, --kv-cache-dtype {name} (auto: {model.dtype})")
    run_engine(model, tokenizer, name)

    common.heading("3. How wrong attention gets, live: 96 tokens, every layer, everything before it exact")
    names = [key for key in dict.fromkeys(("fp8", "int8_per_token_head", name)) if key != "auto"]
    errors = attention_errors(model, evaluation_tokens(tokenizer, 96), names)
    rows = [[key, f"{sum(e) / len(e):.1%}", f"{max(e):.1%}", e.index(max(e))] for key, e in errors.items()]
    common.table(["", "mean error", "largest", "in layer"], rows)

    common.heading("4. One query among eight keys of sixteen channels, one of them an outlier (the widget)")
    common.say(describe(simulate(WIDGET_DEFAULT)))
    rows = [[f"{bits} bits", *(f["widget"]["outlier_channel"][f"{way}_{bits}"]["found"]
                               for way in ("plain", "rotated", "channel"))] for bits in (4, 3, 2)]  # fmt: skip
    common.table(["keys found, of 8", "one scale per key", "rotated first", "one scale per channel"], rows)

    common.heading("5. The whole table, as recorded (regenerate: --bench): SmolLM2-135M, 2,048 tokens")
    show_table(f["recorded"]["formats"])

    common.heading("6. What 8 bits buy on a GPU, by others' measurements")
    itl, hopper = f["itl"], f["hopper"]["b32_s4096"]
    common.say(f"H100, Llama-3.1-8B: {itl['extra_ms']:.2f} ms more per step, {itl['slope_ratio']:.0%} of the time per "
               f"cached token: pays from {itl['break_even_tokens']:,.0f} tokens of one request on.")  # fmt: skip
    common.say(f"H200, FA3 decode, 32 x 4,096 tokens: {hopper['bf16_us']} -> {hopper['fp8_us']} µs, "
               f"{hopper['speedup']:.2f}x; {hopper['bf16_tb_s']:.2f} -> {hopper['fp8_tb_s']:.2f} TB/s.")  # fmt: skip

    if args.bench:
        common.heading("7. Measured now")
        bench = benchmark(model, tokenizer)
    if args.figure:
        draw(args.figure)
    if args.json:
        recorded.merge_json(args.json, KEY, {"machine": machine, "facts": f, "bench": bench})


if __name__ == "__main__":
    cli.run(main)
