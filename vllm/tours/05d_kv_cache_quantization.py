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

Numbers to remember: FP8 is 2x the tokens of bf16 for a loss one can hardly measure; 4 bits with a scale per vector
are 3.8x at D = 128 (3.6x at D = 64). FP8 attention on an H200 is 1.3 to 1.4x faster (FlashAttention-3; ours 1.1x).

How to run:
  uv run python -m vllm.tours.05d_kv_cache_quantization                                the whole story
  uv run python -m vllm.tours.05d_kv_cache_quantization --kv-cache-dtype int2_plain    break it: 2 bits, no rotation
  uv run python -m vllm.tours.05d_kv_cache_quantization --bench                        minutes: the page's table anew

Read for this: Liu et al. 2024 (KIVI), Hooper et al. 2024 (KVQuant), Ashkboos et al. 2024 (QuaRot), Zandieh et al. 2025
(TurboQuant), vLLM 0.32 `config/cache.py:CacheDType`, `v1/attention/ops/triton_reshape_and_cache_flash.py`,
`v1/attention/ops/int4_per_token_head.py`, `model_executor/layers/quantization/turboquant/`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from engine import arguments, assemble
from engine.attention.metadata import AttentionMetadata
from engine.attention.torch_paged import prefill_attention
from engine.config import SchedulerConfig, VllmConfig
from engine.core.engine_core import EngineCore
from engine.model import llama, loader
from engine.model.tokenizer import Tokenizer
from engine.quantization.kv_cache import make_cache
from engine.quantization.kv_codes import (
    FORMATS,
    KV_CACHE_DTYPES,
    PLANES,
    KVFormat,
    PageLayout,
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
from lab import cli
from lab.offline_run import serve

KEY = "05d_kv_cache_quantization"

# The codes are in engine/quantization/kv_codes.py, the kernels in kv_write.py and kv_decode.py, a model's cache in
# kv_cache.py. Here stands what they are held against, and what they do to a model.


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


def level_of(code: int, fmt: KVFormat) -> float:
    """What a code of any format stands for before it is scaled."""
    if fmt.grid == "e4m3":
        return e4m3_value(code)
    if fmt.grid == "e5m2":  # the upper half of an fp16 number
        return float(np.array(code << 8, np.uint16).view(np.float16))
    if fmt.grid == "int8":
        return code - 256 * (code > 127)
    return lloyd_max(fmt.bits)[code] if fmt.grid == "lloyd" else code - (2**fmt.bits - 1) / 2


# --- What we want to compute: dequantize everything, then attend ------------------------------------------------------


def dequantize_reference(layer: torch.Tensor, layout: PageLayout, head_scales: torch.Tensor) -> torch.Tensor:
    """Every vector of one layer's cache, element by element from the definitions, rotated back; in fp64.

    Shapes: layer uint8 [2, num_blocks, page], head_scales [2, Hkv] -> [2, num_blocks, block_size, Hkv, D].
    """
    fmt, D, bits, pages = layout.fmt, layout.D, layout.fmt.bits, layer.cpu().numpy()
    shape, values = (2, layer.shape[1], layout.block_size, layout.Hkv, D), []
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
        values.append(scale * level_of(code, fmt) + mid)
    out = torch.tensor(values, dtype=torch.float64).view(shape)
    return out @ rotation(D).double().T if fmt.rotate else out


def attend_reference(
    q: torch.Tensor, dense: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    """One query of each sequence against all its dequantized keys, in fp64. Shapes: q [B, Hq, D] -> [B, Hq, D]."""
    rows = []
    for query, blocks, S in zip(q.double().cpu(), block_table.long().cpu(), seq_lens.tolist()):
        keys, values = dense[:, blocks].flatten(1, 2)[:, :S]  # [S, Hkv, D] each
        rows.append(prefill_attention(query[None], keys, values))
    return torch.cat(rows)


# --- Both kernels against that ----------------------------------------------------------------------------------------


def shuffled_blocks(seq_lens: Sequence[int], block_size: int) -> list[list[int]]:
    """Blocks of each sequence, in any order, of a pool that has no more."""
    need = [-(-S // block_size) for S in seq_lens]
    ids = (torch.randperm(sum(need)) + 1).tolist()
    return [[ids.pop() for _ in range(n)] for n in need]


def random_layer(
    layout: PageLayout, seq_lens: Sequence[int], Hq: int, dtype: torch.dtype = torch.float32
) -> tuple[Any, ...]:
    """The arguments of `quantized_decode`, on shuffled blocks; not for scales per channel."""
    device, Hkv, D = common.device(), layout.Hkv, layout.D
    blocks = shuffled_blocks(seq_lens, layout.block_size)
    meta = AttentionMetadata.build(blocks, seq_lens, seq_lens, layout.block_size)
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
    codes, nearest = quantize(x, FORMATS["fp8"], torch.ones(1))[0].tolist(), [e4m3_nearest(float(a)) for a in x]
    common.check_equal(f"{len(x)} values and ties of E4M3 encoded as the definition says", codes, nearest)
    if not common.HAS_TRITON:
        common.skipped("the Triton kernels", common.kernel_mode())
        return
    for name in ("fp8", "int8_per_token_head", "int3_plain"):
        with common.use_kernels():
            made = random_layer(PageLayout(FORMATS[name], 16, 2, 16), [1, 16, 21], 6)
            q, layer, table, lens, _, layout, head_scales = made
            out = quantized_decode(*made)
        dense = dequantize_reference(layer, layout, head_scales)
        reference = attend_reference(q, dense, table, lens).float()
        common.check(f"{name}: written by one kernel, read by the other", out.cpu(), reference)


# --- The real model in the engine -------------------------------------------------------------------------------------

QUESTIONS = ["What is the capital of France?", "What are the three primary colors?", "Why is the sky blue?"]
BLOCK = 32  # tokens, from here on: KIVI's group


def make_core(
    model: llama.Llama, kv_cache_dtype: str, num_blocks: int = 256, block_size: int = 16, max_model_len: int = 1024
) -> EngineCore:
    """The engine on a quantized cache. Raises InputError for an unknown dtype."""
    limits = SchedulerConfig(max_model_len, max_num_seqs=32, max_num_batched_tokens=4096)
    config = VllmConfig(attention_backend="paged", kv_cache_dtype=kv_cache_dtype)
    return assemble.make_core(model, limits, num_blocks, block_size, config, enable_prefix_caching=False)


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


# --- How wrong attention gets -----------------------------------------------------------------------------------------


def evaluation_tokens(tokenizer: Tokenizer, count: int) -> list[int]:
    """The first tokens of the text that ships with every Python: its own reference manual's topics."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics)[:40])
    return tokenizer.encode(text)[:count]


def one_sequence(num_tokens: int, device: torch.device) -> AttentionMetadata:
    """A prompt of this length in blocks 1, 2, 3, …"""
    blocks = range(1, 1 + -(-num_tokens // BLOCK))
    return AttentionMetadata.build([blocks], [num_tokens], [num_tokens], BLOCK, device)


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


def show_errors(model: llama.Llama, tokens: Sequence[int], kv_cache_dtype: str) -> None:
    """Of both kinds of 8 bits and of what was asked for: the mean over the layers, and the worst of them."""
    names = [name for name in dict.fromkeys(("fp8", "int8_per_token_head", kv_cache_dtype)) if name != "auto"]
    errors = attention_errors(model, tokens, names)
    rows = [[key, f"{sum(e) / len(e):.1%}", f"{max(e):.1%}", e.index(max(e))] for key, e in errors.items()]
    common.table(["", "mean error", "largest", "in layer"], rows)


# --- The surprise: eight keys, and one channel that is an outlier -----------------------------------------------------

# Keys of −2 … 2 (as digits 0 … 4), and the query that finds each: the key before noise, and blind to channel 5.
KEY_DIGITS = ("2133004420342210", "3021240243342120", "1240433222403221", "3204320332313213",
              "3410122212412200", "4342234302432022", "2423420340221242", "4430203234303022")  # fmt: skip
QUERY_SIGNS = ("--++-0++--+++---", "+----0-++++++-+-", "--+-+0+++++-+-+-", "+--++0-++-+-+--+",
               "++---0++--+-----", "+++--0++-++++-++", "-++++0-++-+--+++", "+++--0+++++-+-++")  # fmt: skip
OUTLIER, SIZE = 5, 60  # the channel, and what it has more than the others
WAYS: dict[str, dict[str, bool]] = {
    "one scale per key": {}, "rotated first": {"rotate": True}, "one scale per channel": {"key_channels": True},
}  # fmt: skip


def small_keys() -> tuple[torch.Tensor, torch.Tensor]:
    """Eight keys, without an outlier, and the query that finds each: fp32 [8, 16], all of them integers."""
    keys = [[int(digit) - 2 for digit in row] for row in KEY_DIGITS]
    queries = [["-0+".index(sign) - 1 for sign in row] for row in QUERY_SIGNS]
    return torch.tensor(keys).float(), torch.tensor(queries).float()


class StoredKeys(NamedTuple):
    """Keys [n, D] in a format, and back. In codes, scale and mid a row is what shares a scale: a key, or a channel."""

    stored: torch.Tensor  # [n, D], rotated if the format rotates
    codes: torch.Tensor  # uint8 [n, D] or [D, n]
    scale: torch.Tensor  # [n, 1] or [D, 1]
    mid: torch.Tensor | None  # None: the grid is symmetric
    restored: torch.Tensor  # [n, D]


def store(keys: torch.Tensor, fmt: KVFormat) -> StoredKeys:
    """Through the engine's own rotation, codes and packing, and back. keys [n, D]; n and D are multiples of 8."""
    R = rotation(keys.shape[1]) if fmt.rotate else torch.eye(keys.shape[1])
    stored = keys @ R  # exact: integers times ±1/4
    codes, scale, mid = quantize(stored.T if fmt.key_channels else stored, fmt)
    restored = dequantize(unpack(pack(codes, fmt.bits), fmt.bits), scale, mid, fmt)
    return StoredKeys(stored, codes, scale, mid, (restored.T if fmt.key_channels else restored) @ R.T)


def found_by(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """For each query [n, D], which of the keys has the largest score: [n]."""
    return (queries @ keys.T).argmax(-1)


def show_keys() -> None:
    """What three ways of storing the keys give back of one, and how many of them their queries still find."""
    keys, queries = small_keys()
    keys[:, OUTLIER] += SIZE
    shown, rows, right = {"key 3, as it is": keys}, [], found_by(queries, keys)
    for bits in (4, 3, 2):
        back = {way: store(keys, KVFormat(bits, "uniform", **fields)).restored for way, fields in WAYS.items()}
        rows.append([f"{bits} bits", *(int((found_by(queries, x) == right).sum()) for x in back.values())])
        shown |= {f"3 bits, {way}": x for way, x in back.items() if bits == 3}
    for label, x in shown.items():
        common.say(f"{label:<30}" + "".join(f"{round(value):4}" for value in x[3].tolist()))
    common.table(["keys found, of 8", *WAYS], rows)


# --- The story --------------------------------------------------------------------------------------------------------


def build_parser() -> arguments.Parser:
    p, default = cli.parser(__doc__), "int4_per_token_head"
    about = f"the format of steps 2 and 3: {', '.join(KV_CACHE_DTYPES)} (default {default})"
    p.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default=default, metavar="NAME", help=about)
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    cli.start(args)
    if (D := loader.check_context(args.model, 2048 if args.bench else 1024).head_dim) % 8:
        raise common.InputError(f"--model {args.model}: head_dim {D}; every format takes multiples of 8")

    common.heading("1. Codes and kernels against the definitions")
    check_formats()

    model, tokenizer = loader.load(args.model)
    common.heading(f"2. The real model in the engine, --kv-cache-dtype {args.kv_cache_dtype} (auto: {model.dtype})")
    run_engine(model, tokenizer, args.kv_cache_dtype)

    common.heading("3. How wrong attention gets, live: 96 tokens, every layer, everything before it exact")
    show_errors(model, evaluation_tokens(tokenizer, 96), args.kv_cache_dtype)

    common.heading("4. One query among eight keys of sixteen channels, one of them an outlier")
    show_keys()
    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)
