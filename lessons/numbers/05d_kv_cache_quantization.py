"""What the page of 05d simulates, quotes, draws and measures: `lessons/05d_kv_cache_quantization.md`.

The widget's twin, eight keys and a query; bytes by format; others' measurements, read; and, with a real model, three
probes of what few bits forget: perplexity, attention's error, needles in a document.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import copy
import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine import registry
from engine.attention.metadata import AttentionMetadata
from engine.attention.torch_paged import prefill_attention
from engine.model import llama, loader
from engine.model.tokenizer import Tokenizer
from engine.quantization import formats
from engine.quantization.algorithms import rtn
from engine.quantization.kv_cache import make_cache
from engine.quantization.kv_codes import (
    FORMATS,
    KV_CACHE_DTYPES,
    KVFormat,
    PageLayout,
    bits_per_element,
    dequantize,
    lloyd_max,
)
from engine.quantization.kv_decode import quantized_decode
from engine.quantization.linear import QuantizedLinear
from engine.registry import fill
from engine.worker.cuda_graphs import CapturedModel, decode_at
from lab import figures, timing
from lab.offline_run import serve
from lab.parameters import checked
from lab.peers import random_twins
from lab.roofline import PUBLISHED_ITL

KEY = "05d_kv_cache_quantization"
lesson = registry.lesson(KEY)


# --- The simulation behind the widget: sixteen channels, eight keys, one query ----------------------------------------

CHANNELS, TOKENS = 16, 8
PRESETS = ("outlier channel", "two outlier channels", "no outlier", "outlier token")
WIDGET_CHOICES = {"keys": PRESETS, "bits": (2, 3, 4, 8), "rotation": (False, True), "group": ("token", "channel"),
                  "needle": range(TOKENS)}  # fmt: skip
WIDGET_DEFAULT = {"keys": "outlier channel", "bits": 3, "rotation": False, "group": "token", "needle": 3}


def widget_keys(preset: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [8, 16] with what the preset adds, and the query for each."""
    keys, queries = lesson.small_keys()
    if preset in ("outlier channel", "two outlier channels"):
        keys[:, lesson.OUTLIER] += lesson.SIZE
    if preset == "two outlier channels":
        keys[:, 12] -= 45
        queries[:, 12] = 0
    if preset == "outlier token":
        keys[0] *= 10
    return keys, queries


def milli(tensor: torch.Tensor) -> Any:
    """In thousandths, as integers."""
    return (tensor.double() * 1000).round().int().tolist()


def simulate(params: dict[str, Any]) -> dict[str, Any]:
    """Quantize eight keys and look for one of them.

    params: keys (a preset), bits (2, 3, 4, 8), rotation, group ("token": a scale per key; "channel": one per channel
    over the eight keys), needle (0 … 7: which key the query is made for). Uses the lesson's `store`, which is the
    engine's rotation, codes and packing. Keys and scores are integers; whatever is not is given in thousandths.
    The trace has: stored (the keys as they are quantized: rotated, perhaps), codes, scales, mids and levels (of each
    group), restored keys, the largest error, exact and restored scores, which key is found, what each of the eight
    queries should find and finds, how many are right, and bytes before and after. Raises InputError.
    """
    p = checked(params, WIDGET_CHOICES)
    keys, queries = widget_keys(p["keys"])
    fmt = KVFormat(p["bits"], "uniform", p["rotation"], key_channels=p["group"] == "channel")
    stored, codes, scale, mid, restored = lesson.store(keys, fmt)
    levels = dequantize(torch.arange(2**fmt.bits, dtype=torch.uint8).expand(len(scale), -1), scale, mid, fmt)
    should, found = (lesson.found_by(queries, x).tolist() for x in (keys, restored))
    exact, now = (queries @ x.T for x in (keys, restored))  # [queries, keys]
    needle = p["needle"]
    return {
        "params": p,
        "keys": keys.int().tolist(),
        "query": queries[needle].int().tolist(),
        "stored_milli": milli(stored),
        "codes": (codes.T if fmt.key_channels else codes).int().tolist(),
        "scale_milli": milli(scale.flatten()),
        "mid_milli": milli(mid.flatten()),
        "levels_milli": milli(levels),
        "restored_milli": milli(restored),
        "largest_error_milli": milli((restored - keys).abs().max()),
        "scores": exact[needle].int().tolist(),
        "restored_scores_milli": milli(now[needle]),
        "should_find": should[needle],
        "finds": found[needle],
        "should_each": should,
        "finds_each": found,
        "found": sum(a == b for a, b in zip(should, found)),
        "bytes_bf16": 2 * keys.numel(),
        "bytes": keys.numel() * fmt.bits // 8 + 4 * len(scale),
    }


def in_columns(values: Sequence[Any]) -> str:
    """Side by side, six characters each."""
    return "".join(f"{x:>6}" for x in values)


def tenths(values: Sequence[int]) -> str:
    """Thousandths, shown with one decimal, side by side."""
    return in_columns([f"{x / 1000:.1f}" for x in values])


def describe(trace: dict[str, Any]) -> str:
    """The state of the simulation as text, as the widget's slot shows it."""
    p, needle = trace["params"], trace["params"]["needle"]
    right = trace["finds"] == trace["should_find"]
    verdict = f"finds key {trace['finds']}" + ("" if right else f", WRONG: should be {trace['should_find']}")
    return "\n".join(
        [
            f"{p['keys']}; {p['bits']} bits, {'rotated, ' * p['rotation']}one scale per {p['group']}: "
            f"{trace['bytes']} bytes instead of {trace['bytes_bf16']}",
            f"key {needle}    {in_columns(trace['keys'][needle])}",
            f"stored   {tenths(trace['stored_milli'][needle])}",
            f"codes    {in_columns(trace['codes'][needle])}",
            f"restored {tenths(trace['restored_milli'][needle])}",
            f"largest error of any key: {trace['largest_error_milli'] / 1000:.1f}",
            f"scores   {in_columns(trace['scores'])}",
            f"now      {tenths(trace['restored_scores_milli'])}   {verdict}",
        ]
    )


# --- What others measured ---------------------------------------------------------------------------------------------

# FlashAttention-3 decode in vLLM 0.22 on an H200, Hkv 8, D 128, microseconds with a bf16 and an fp8 cache, by
# (sequences, context): NVIDIA aiconfigurator's kernel database.
HOPPER_DECODE = {(8, 4096): (41.4, 31.8), (32, 4096): (132.5, 98.5), (8, 16384): (132.9, 95.0)}
# vLLM blog, 2026-04-22, Llama-3.1-8B on an H100. A line fitted to one request at a time, contexts to 125k: ms + ms per
# token. And the median step, ms, of eight at once, some 20,000 tokens in and 2,000 out: halfway, 8 · 21,000 are cached.
PUBLISHED_BATCH, BATCH_TOKENS = {"bfloat16": 15.18, "fp8": 12.93}, 8 * 21_000


def published_facts() -> dict[str, Any]:
    """Others' measurements, read.

    If time were bytes / bandwidth + a constant, bandwidth would be (bytes16 − bytes8) / (t16 − t8). That is more than
    the memory can do, so the sum is the wrong model: loads and arithmetic overlap.
    """
    hopper = {}
    for (B, S), (t16, t8) in HOPPER_DECODE.items():
        moved = 2 * B * S * 8 * 128 * 2 / 1e6  # bf16: MB, so that MB / µs are TB/s
        hopper[f"b{B}_s{S}"] = {
            "bf16_us": t16,
            "fp8_us": t8,
            "speedup": t16 / t8,
            "bf16_tb_s": moved / t16,
            "fp8_tb_s": moved / 2 / t8,
            "sum_model_tb_s": moved / 2 / (t16 - t8),
        }
    (a16, b16), (a8, b8) = PUBLISHED_ITL["bfloat16"], PUBLISHED_ITL["fp8"]
    itl = {
        "bf16_ms": a16,
        "fp8_ms": a8,
        "extra_ms": a8 - a16,
        "slope_ratio": b8 / b16,
        "break_even_tokens": (a8 - a16) / (b16 - b8),
        "speedup_limit": b16 / b8,
        "speedup_100k": (a16 + b16 * 1e5) / (a8 + b8 * 1e5),
        "batch": {
            "bf16_ms": PUBLISHED_BATCH["bfloat16"],
            "fp8_ms": PUBLISHED_BATCH["fp8"],
            "speedup": PUBLISHED_BATCH["bfloat16"] / PUBLISHED_BATCH["fp8"],
            "line": (a16 + b16 * BATCH_TOKENS) / (a8 + b8 * BATCH_TOKENS),
        },
    }
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
        "fp8_e5m2": {"perplexity": 15.808, "needles": 8, "error": 0.1229},
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
        found[name] = {
            "bytes": block / block_size,
            "tokens_per_gib": 2**30 // block * block_size,
            "ratio": 16 / bits_per_element(name, D, block_size),
        }
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
                    "found": run["found"],
                    "largest_error": run["largest_error_milli"] / 1000,
                }
    values = sorted({lesson.e4m3_value(byte) for byte in range(256) if byte & 0x7F != 0x7F})
    return {
        "e4m3": {"values": len(values), "largest": values[-1], "smallest": min(x for x in values if x > 0)},
        "lloyd": {str(bits): lloyd_max(bits)[-1] for bits in (2, 3, 4)},
        "smollm2": capacity(30, 3, 64, lesson.BLOCK),
        "llama_8b": capacity(32, 8, 128, lesson.BLOCK),
        "bits": {name: bits_per_element(name, 64, lesson.BLOCK) for name in KV_CACHE_DTYPES},
        **published_facts(),
        "widget": widget,
        "recorded": RECORDED,
    }


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
    ways = {
        "one scale per key": ("plain", {}),
        "rotated, one scale per key": ("rotated", {"rotation": True}),
        "one scale per channel": ("channel", {"group": "channel"}),
    }
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
    figure, axes = figures.new_figure(8.0, 3.9, ncols=2)
    for (family, (shade, names)), marker in zip(FAMILIES.items(), "o^Dsv", strict=True):
        style = marker if family == "8 bits" else f"{marker}-"  # other formats, not other widths: no line
        for ax, key in zip(axes, ("perplexity", "needles")):
            ax.plot(
                [bits[name] for name in names],
                [table[name][key] for name in names],
                style,
                label=family,
                color=color[shade],
                markersize=8,
                markeredgecolor="white",
                clip_on=False,
            )
    for ax, title in zip(axes, ("perplexity", f"needles found, of {len(NEEDLES)}")):
        ax.set(title=title, xlabel="bits per element, scales included", xscale="log", xlim=(2.2, 9.5))
        ax.set_xticks(ticks := [2.5, 3, 3.5, 4.5, 6, 8], [f"{tick:g}" for tick in ticks])
        ax.minorticks_off()
    axes[0].axhline(table["auto"]["perplexity"], color=color["grey"], linestyle=":")
    axes[0].text(9.5, table["auto"]["perplexity"] * 1.2, "not quantized", ha="right", fontsize=9, color=color["grey"])
    axes[0].set(yscale="log")
    axes[0].set_yticks(ticks := [15, 20, 30, 50, 100, 200, 500, 1000], [f"{tick:,}" for tick in ticks])
    axes[0].minorticks_off()
    axes[1].set(ylim=(0, 8.3))
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=9, ncols=5, loc="outside lower center")
    return [*paths, figures.save_figure(figure, folder, "05d_quality")]


# --- How good is it? Three probes on a real model ---------------------------------------------------------------------


def perplexity(
    model: llama.Llama,
    tokens: Sequence[int],
    kv_cache_dtype: str,
    window: int = 512,
    head_scales: torch.Tensor | None = None,
) -> float:
    """exp of the mean negative log likelihood, in windows that know nothing of each other, every past quantized."""
    cache = make_cache(model, 1 + -(-window // lesson.BLOCK), lesson.BLOCK, kv_cache_dtype)
    if head_scales is not None:
        cache.head_scales = head_scales
    total, count = 0.0, 0
    for first in range(0, len(tokens), window):
        ids = torch.tensor(tokens[first : first + window], device=model.device)
        meta = lesson.one_sequence(len(ids), model.device)
        hidden = model.forward(ids, meta.positions, cache.attend(meta))
        loss = F.cross_entropy(model.logits(hidden[:-1]).float(), ids[1:], reduction="sum")
        total, count = total + loss.item(), count + len(ids) - 1
    return math.exp(min(700.0, total / count))


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

    meta = lesson.one_sequence(len(tokens), model.device)
    model.forward(torch.tensor(list(tokens), device=model.device), meta.positions, attend)
    means, top = torch.stack(channels), torch.stack(largest)  # [L, 2, Hkv, D], [L, 2, Hkv]
    keys, values = (means.amax(-1) / means.median(-1).values).unbind(1)
    return top / 448, {
        "largest_key": top[:, 0].max().item(),
        "median_head_keys": keys.median().item(),
        "worst_head_keys": keys.max().item(),
        "median_head_values": values.median().item(),
    }


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
        filler = lesson.evaluation_tokens(tokenizer, filler_tokens)
        step = filler_tokens // len(NEEDLES)
        document = tokenizer.encode("<|im_start|>user\nRead this text.\n\n")
        for i, (name, number) in enumerate(NEEDLES.items()):
            document += filler[i * step : (i + 1) * step]
            document += tokenizer.encode(f"\nThe secret number of {name} is {number}. Remember: {name}, {number}.\n")
        ask = "\n\nWhat is the secret number of {0}?<|im_end|>\n<|im_start|>assistant\nThe secret number of {0} is"
        cache = fill("cache.paged")(model, 2 * -(-len(document) // lesson.BLOCK) + 4 * len(NEEDLES), lesson.BLOCK)
        meta = lesson.one_sequence(len(document), model.device)
        model.forward(torch.tensor(document, device=model.device), meta.positions, cache.attend(meta))
        return cls(document, [tokenizer.encode(ask.format(city)) for city in NEEDLES], list(NEEDLES.values()), cache)

    def find(self, model: llama.Llama, tokenizer: Tokenizer, kv_cache_dtype: str) -> list[bool]:
        """Ask all questions at once, each a fork of the document, and compare what is written with the number."""
        cache = make_cache(model, self.cache.layers[0].shape[1], lesson.BLOCK, kv_cache_dtype)
        slots = lesson.one_sequence(len(self.document), model.device).slot_mapping
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
            meta = AttentionMetadata.build(tables, lens, [len(tokens) for tokens in new], lesson.BLOCK, model.device)
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
        full, rest = divmod(len(self.document), lesson.BLOCK)
        free = itertools.count(full + 1 + bool(rest))
        need = [-(-(rest + len(question) + WRITTEN) // lesson.BLOCK) for question in self.questions]
        tables = [[*range(1, full + 1), *itertools.islice(free, n)] for n in need]
        cache.copy_blocks([(full + 1, table[full]) for table in tables if rest])
        return tables


def probe(
    model: llama.Llama, tokenizer: Tokenizer, names: Sequence[str], tokens: Sequence[int], haystack: Haystack
) -> dict[str, dict[str, Any]]:
    """Needles, perplexity and attention error of each format."""
    errors = lesson.attention_errors(model, tokens[:512], names)
    found = {}
    for name in names:
        hits = haystack.find(model, tokenizer, name)
        found[name] = {
            "needles": sum(hits),
            "perplexity": perplexity(model, tokens, name),
            "error": sum(errors[name]) / len(errors[name]),
            "layers": errors[name],
        }
    return found


def show_table(table: dict[str, dict[str, Any]]) -> None:
    """Formats by quality: bits, capacity, attention error, perplexity, needles."""
    capacities = facts()["smollm2"]
    rows = [
        [
            name,
            f"{facts()['bits'][name]:.2f}",
            f"{capacities[name]['tokens_per_gib']:,.0f}",
            f"{capacities[name]['ratio']:.1f}x",
            f"{row['error']:.1%}",
            f"{row['perplexity']:.2f}",
            row["needles"],
        ]
        for name, row in table.items()
    ]
    common.table(
        ["", "bits/element", "tokens/GiB", "of bf16's", "error", "perplexity", f"needles of {len(NEEDLES)}"], rows
    )


# --- What `--bench` measures ------------------------------------------------------------------------------------------


def measure_kernels(seconds: float = 0.3) -> list[dict[str, Any]]:
    """On a GPU: decode attention over a bf16 cache (lesson 02's kernel) and over quantized ones."""
    rows, names = [], ("fp8", "int8_per_token_head", "int4_plain", "int2_plain")
    some = functools.partial(torch.randn, dtype=torch.bfloat16, device=common.device())
    for B, S in HOPPER_DECODE:
        blocks = lesson.shuffled_blocks([S] * B, 16)
        meta = AttentionMetadata.build(blocks, [S] * B, [S] * B, 16)
        exact = some(B, 32, 128), some(2, 1 + B * S // 16, 16, 8, 128), meta.block_table, meta.seq_lens, S
        base = timing.measure_graph(functools.partial(fill("decode.paged"), *exact), seconds).median
        row = {"B": B, "S": S, "auto": base}
        for name in names:
            made = lesson.random_layer(PageLayout(FORMATS[name], 16, 8, 128), [S] * B, 32, torch.bfloat16)
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
    small.linear = {
        n: layer if n == "lm_head" else QuantizedLinear(rtn(layer.weight, int4)) for n, layer in model.linear.items()
    }
    rest, head = sum(x.weight.numel() for x in model.linear.values()), model.linear["lm_head"].weight.numel()
    gb = {"bf16": 2e-9 * rest, "int4": 2e-9 * head + 1e-9 * (rest - head) * int4.bits_per_weight(4096) / 8}
    for n, dtype, (weights, m) in itertools.product((1, 32), ("auto", "fp8"), (("bf16", model), ("int4", small))):
        core = lesson.make_core(m, dtype, 1 + n * -(-context // 16), 16, context)
        runner = core.runner
        runner.graphs = CapturedModel(runner.model, runner.cache, runner.attend, core.scheduler.config)
        took = timing.measure(decode_at(runner, n, context)).median
        read = gb[weights] + sum(layer.nbytes for layer in runner.cache.layers) / 1e9
        rows.append({"B": n, "weights": weights, "cache": dtype, "ms": 1e3 * took, "gb": read})
        common.say(
            f"{name}, {n:>2} × {context:,} tokens, weights {weights}, cache {dtype:<4}: {1e3 * took:5.2f} ms, "
            f"{read:.1f} GB"
        )
    return rows


def measure_engine(model: llama.Llama, tokenizer: Tokenizer, max_tokens: int = 32) -> dict[str, Any]:
    """Tokens per second of 16 chats with each cache: what quantizing costs where attention is not the limit."""
    prompts = [tokenizer.ask(f"{lesson.QUESTIONS[i % 3]} ({i})") for i in range(16)]
    found, rows = {}, []
    for name in ("auto", "fp8", "int8_per_token_head", "int4_per_token_head"):
        core = lesson.make_core(model, name)
        rates = [serve(core, prompts, [max_tokens] * 16).tokens_per_second for _ in range(3)]
        found[name] = {"tokens_per_second": sorted(rates)[1]}
        found[name]["of_auto"] = found[name]["tokens_per_second"] / found["auto"]["tokens_per_second"]
        rows.append([name, f"{found[name]['tokens_per_second']:.0f}", f"{found[name]['of_auto']:.0%}"])
    common.table(["16 chats", "tokens/s", "of auto"], rows)
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The recorded table anew, in minutes, and times."""
    model, tokenizer = loader.load(args.model)
    tokens, haystack = lesson.evaluation_tokens(tokenizer, 2048), Haystack.build(model, tokenizer)
    common.heading("Measured: every format, by three probes on 2,048 tokens")
    table = probe(model, tokenizer, [name for name in KV_CACHE_DTYPES if name != "fp8_e4m3"], tokens, haystack)
    show_table(table)
    scales, outliers = calibrate(model, tokens[:512])
    calibrated = perplexity(model, tokens, "fp8", head_scales=scales)
    common.say(f"fp8 with calibrated scales: perplexity {calibrated:.3f}, with 1: {table['fp8']['perplexity']:.3f}")
    common.say(f"text {text_digest(tokens)} (recorded: {RECORDED['text']}), haystack {len(haystack.document)} tokens")
    bench = {"table": table, "fp8_calibrated": calibrated, "outliers": outliers, "text": text_digest(tokens)}
    common.heading("Measured: the engine with each cache")
    bench["engine"] = measure_engine(model, tokenizer)
    if common.HAS_GPU:
        common.heading("Measured: the decode kernel alone, and an 8B model's step with few bits in weights and cache")
        bench |= {"decode": measure_kernels(), "together": measure_together()}
        bench["copy_bandwidth"] = timing.copy_bandwidth()
    return bench
