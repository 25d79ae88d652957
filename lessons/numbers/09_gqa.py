"""What the page of lesson 09, `lessons/09_gqa.md`, simulates, quotes, draws and measures."""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine import registry
from engine.model import llama, loader, rope
from engine.model.tokenizer import Tokenizer
from lab import figures, healing, recorded, roofline, timing
from lab.hardware import HARDWARE
from lab.parameters import checked
from lab.roofline import KVCacheSpec, slug

KEY = "09_gqa"
lesson = registry.lesson(KEY)
cache_lesson, paged = registry.lesson("01_kv_cache"), registry.lesson("02_paged_attention")


# Ainslie et al. 2023, Table 1: T5, uptrained with 5 % of the original compute; seconds per sample, mean score of
# seven summarization, translation and question-answering sets.
GQA_PAPER = {"MHA-Large": (0.37, 46.0), "MHA-XXL": (1.51, 47.2), "MQA-XXL": (0.24, 46.6), "GQA-8-XXL": (0.28, 47.1)}


# --- Serving arithmetic -------------------------------------------------------------------------------------------

# Beyond lesson 01's fields: `full_attention_every` n means that every n-th layer sees everything and the others
# `sliding_window` keys (0: no layer sees everything); the last `num_kv_shared_layers` layers read an earlier layer's
# cache and keep none. Attention fields as in Transformers 5's configurations; parameters from the model cards.
MODELS: dict[str, dict[str, Any]] = {
    "Llama-2-7B": roofline.MODELS["Llama-2-7B"],
    "Llama-3.1-8B": roofline.MODELS["Llama-3.1-8B"],
    "Falcon-7B": dict(num_hidden_layers=32, num_attention_heads=71, num_key_value_heads=1, hidden_size=4544,
                      num_parameters=7_217_189_760),
    "Mistral-7B-v0.1": dict(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096,
                            intermediate_size=14336, vocab_size=32000, tie_word_embeddings=False,
                            sliding_window=4096, full_attention_every=0),
    "Gemma-3-4B": dict(num_hidden_layers=34, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
                       hidden_size=2560, num_parameters=4_300_000_000, sliding_window=1024, full_attention_every=6),
    "Gemma-3n-E4B": dict(num_hidden_layers=35, num_attention_heads=8, num_key_value_heads=2, head_dim=256,
                         hidden_size=2048, num_parameters=7_850_000_000, sliding_window=512, full_attention_every=5,
                         num_kv_shared_layers=15),
    "gpt-oss-120b": dict(num_hidden_layers=36, num_attention_heads=64, num_key_value_heads=8, head_dim=64,
                         hidden_size=2880, num_parameters=116_830_000_000, weight_bits=4.47, sliding_window=128,
                         full_attention_every=2),
    "DeepSeek-V3": roofline.MODELS["DeepSeek-V3"],
}  # fmt: skip


def cache_bytes(config: Mapping[str, Any], context: int, tp: int = 1, dtype: str = "bfloat16") -> int:
    """Bytes that one sequence of `context` tokens holds on each of `tp` GPUs.

    Σ over layers with a cache of their own: min(context, window) · KV heads per GPU · (bytes of a key + of a value)
    """
    spec = KVCacheSpec.from_config(config)  # for MLA: one head, which tensor parallelism can only copy
    per_head = spec.bytes_per_token(dtype) // (spec.num_layers * spec.num_kv_heads)
    every, window = config.get("full_attention_every", 1), config.get("sliding_window", context)
    own = range(1, spec.num_layers - config.get("num_kv_shared_layers", 0) + 1)
    rows = sum(context if every and i % every == 0 else min(context, window) for i in own)
    return rows * lesson.kv_heads_per_gpu(spec.num_kv_heads, tp) * per_head


def sequences_that_fit(config: Mapping[str, Any], context: int, gpu_bytes: float, tp: int = 1) -> int:
    """⌊(0.92 · GPU − weights / TP) / bytes per sequence and GPU⌋; 0 if the weights do not fit."""
    room = roofline.GPU_MEMORY_UTILIZATION * gpu_bytes - roofline.weight_bytes(config) / tp
    return max(0, int(room // cache_bytes(config, context, tp)))


def decode_traffic(B: int, S: int, Hq: int, Hkv: int, D: int, heads_per_load: int | None = None) -> dict[str, int]:
    """FLOPs of one layer's decode attention, and bytes of keys and values that its programs ask for (bf16)."""
    loads = Hq // lesson.check_heads(Hq, Hkv, heads_per_load)  # programs per sequence: each loads one KV head
    return {"flops": B * S * Hq * 4 * D, "bytes": B * S * loads * 2 * D * 2}


# --- The simulation: heads, GPUs, and a map -----------------------------------------------------------------------

WIDGET_DEFAULT: dict[str, Any] = {
    "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "tp": 1, "context": 8192, "gpu_gib": 80,
    "head_map": "interleaved",
}  # fmt: skip
WIDGET_CHOICES = {
    "num_heads": (8, 16, 32), "num_kv_heads": (1, 2, 4, 8, 16, 32), "head_dim": (64, 128), "tp": (1, 2, 4, 8, 16),
    "context": (8192, 32768, 131072), "gpu_gib": (24, 80), "head_map": tuple(lesson.HEAD_MAPS),
}  # fmt: skip
WIDGET_LAYERS, WIDGET_WEIGHTS = 32, 16 * 10**9  # an 8B model, bf16


def simulate(params: dict[str, Any]) -> dict[str, Any]:
    """Which query head reads which KV head on which GPU, what that costs per token, and what a wrong map computes.

    params: num_heads, num_kv_heads, head_dim, tp, context, gpu_gib (integers), head_map. Raises InputError.
    The outputs are real: one key, and the value of KV head i is i, so a query head's output *is* the head it read.
    """
    p = checked(params, WIDGET_CHOICES)
    Hq, Hkv, D, tp = p["num_heads"], p["num_kv_heads"], p["head_dim"], p["tp"]
    trace: dict[str, Any] = {"params": p, "problem": None}
    if Hq % Hkv or Hq % tp:
        what = f"{Hkv} KV heads cannot serve" if Hq % Hkv else f"{tp} GPUs cannot share"
        return trace | {"problem": f"{what} {Hq} query heads"}
    held, used = lesson.deal_heads(Hq, Hkv, tp, p["head_map"])
    outputs, right = lesson.heads_that_answer(used, Hkv), lesson.interleaved(Hq, Hkv)
    config = {"num_hidden_layers": WIDGET_LAYERS, "num_attention_heads": Hq, "num_key_value_heads": Hkv, "head_dim": D}
    per_sequence, usable = cache_bytes(config, p["context"], tp), p["gpu_gib"] * 2**30 * 92 // 100
    return trace | {
        "head_map": used, "gpu_of_head": [h // (Hq // tp) for h in range(Hq)], "kv_heads_of_gpu": held,
        "copies": sum(map(len, held)) // Hkv,
        "outputs": outputs, "wrong_heads": [h for h in range(Hq) if outputs[h] != right[h]],
        "num_wrong": sum(a != b for a, b in zip(outputs, right)),
        "bytes_per_token": cache_bytes(config, 1), "bytes_per_token_per_gpu": cache_bytes(config, 1, tp),
        "max_sequences": max(0, usable - WIDGET_WEIGHTS // tp) // per_sequence,
    }  # fmt: skip


def describe(trace: dict[str, Any]) -> str:
    """The state of the simulation as text, as the widget's slot shows it."""
    p = trace["params"]
    lines = [f"{p['num_heads']} query heads, {p['num_kv_heads']} KV heads of {p['head_dim']}, "
             f"{p['tp']} GPU{'s' * (p['tp'] > 1)} of {p['gpu_gib']} GiB, map {p['head_map']}"]  # fmt: skip
    if trace["problem"]:
        return "\n".join([*lines, f"IMPOSSIBLE: {trace['problem']}"])
    for gpu in sorted({0, 1, p["tp"] - 1} & set(range(p["tp"]))):
        heads = [h for h, owner in enumerate(trace["gpu_of_head"]) if owner == gpu]
        reads = ", ".join(str(trace["head_map"][h]) for h in heads[:8]) + (", …" if len(heads) > 8 else "")
        lines.append(
            f"  GPU {gpu}: query heads {heads[0]}–{heads[-1]} read KV heads {reads}; "
            f"it holds {', '.join(map(str, trace['kv_heads_of_gpu'][gpu]))}"
        )
    copies = f", {trace['copies']} copies of each KV head" if trace["copies"] > 1 else ""
    lines.append(
        f"cache per token: {trace['bytes_per_token'] / 1024:g} KiB; on each GPU "
        f"{trace['bytes_per_token_per_gpu'] / 1024:g} KiB{copies}"
    )
    lines.append(f"sequences of {p['context']:,} tokens that fit beside 16 GB of weights: {trace['max_sequences']:,}")
    wrong = trace["wrong_heads"]
    lines.append(
        f"WRONG: {len(wrong)} of {p['num_heads']} query heads read another group's KV head, the first is "
        f"head {wrong[0]}"
        if wrong
        else "every query head reads its own group's KV head"
    )
    return "\n".join(lines)


# --- The numbers that the text quotes, and the figures ------------------------------------------------------------


def rotated_absorption_error() -> float:
    """What folding W_UK into the query would do if keys were rotated: the relative error of the scores, in fp64."""
    generator = torch.Generator().manual_seed(0)
    q, W, c = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((64,), (64, 32), (16, 32)))
    angles = torch.arange(16.0).double()[:, None] * 10000.0 ** -(torch.arange(0, 64, 2).double() / 64)  # [16, 32]
    keys = rope.apply_rope((c @ W.T)[:, None], *rope.rope_factors(angles, torch.float64))[:, 0]
    return common.relative_error(c @ (W.T @ q), keys @ q)


@functools.cache
def facts() -> dict[str, Any]:
    """Every deterministic number of the lesson's text and figures. No model, under a second."""
    shapes = {"mha": 32, "gqa_16": 16, "gqa_8": 8, "gqa_2": 2, "mqa": 1}
    of_heads = {
        name: {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": n, "head_dim": 128}
        for name, n in shapes.items()
    }
    mla_32 = {"num_hidden_layers": 32, "num_attention_heads": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    wrong = {
        str(n): sum(a != b for a, b in zip(lesson.interleaved(32, n), lesson.tiled(32, n))) for n in shapes.values()
    }
    packed, naive = (decode_traffic(32, 4096, 32, 8, 128, heads) for heads in (4, 1))
    h200, mla = HARDWARE["H200 141GB"], lesson.MLAConfig()
    cost = {f"t{T}_s{S}": lesson.mla_cost(128, T, S) for T, S in ((1, 8192), (128, 8192), (512, 8192), (512, 512))}
    V3, row = MODELS["DeepSeek-V3"], mla.kv_lora_rank + mla.qk_rope_head_dim
    fold = lesson.mla_cost(1, 1, 0)["absorbed"]  # of a head: what a query costs absorbed, and a cached token naive
    per_head = {how: flops - fold for how, flops in lesson.mla_cost(1, 1, 1).items()}
    endless = fold / (per_head["absorbed"] - per_head["naive"])  # queries, where cached tokens are all that counts
    return {
        "wrong_heads": wrong,
        "right_heads": {n: 32 - count for n, count in wrong.items()},
        "smollm_wrong": sum(x != y for x, y in zip(lesson.interleaved(9, 3), lesson.tiled(9, 3))),
        "kib_per_token": {
            name: {f"tp{tp}": cache_bytes(c, 1, tp) / 1024 for tp in (1, 2, 4, 8, 16)}
            for name, c in (of_heads | {"mla": mla_32}).items()
        },
        "traffic": {
            "packed_mib": packed["bytes"] / 2**20, "naive_mib": naive["bytes"] / 2**20,
            "ratio": naive["bytes"] / packed["bytes"], "packed_us_h200": packed["bytes"] / h200.bandwidth * 1e6,
            "naive_us_h200": naive["bytes"] / h200.bandwidth * 1e6,
            "intensity_packed": packed["flops"] / packed["bytes"], "intensity_naive": naive["flops"] / naive["bytes"],
        },
        "models": {
            slug(name): {
                "bytes_per_token": cache_bytes(c, 1), "mib_8k": cache_bytes(c, 8192) / 2**20,
                "mib_128k": cache_bytes(c, 131072) / 2**20,
                "fit_32k": sequences_that_fit(c, 32768, h200.memory, 8 if name == "DeepSeek-V3" else 1),
                "saved_by_window": 1 - cache_bytes(c, 131072)
                / cache_bytes({k: v for k, v in c.items() if k != "full_attention_every"}, 131072),
            }
            for name, c in MODELS.items()
        },
        "gemma_3n_unshared_mib": cache_bytes(MODELS["Gemma-3n-E4B"] | {"num_kv_shared_layers": 0}, 131072) / 2**20,
        "mla": {
            "elements": row, "groups": row / (2 * 128), "mha_elements": 2 * 128 * 128,
            "times_smaller": 2 * 128 * 128 / row, "per_head": per_head,
            "flops_ratio": per_head["absorbed"] / per_head["naive"], "fold_mflop": 128 * fold / 1e6, "cost": cost,
            "t1_ratio": cost["t1_s8192"]["naive"] / cost["t1_s8192"]["absorbed"],
            "break_even_queries": {"s8192": 1 / (1 / endless + 1 / 8192), "endless": endless},
            "intensity": {f"h{H}": H * per_head["absorbed"] / (2 * row) for H in (16, 128)}, "ridge_h200": h200.ridge,
            "tp8_total_kib": 8 * cache_bytes(V3, 1, 8) / 1024, "rotated_error": rotated_absorption_error(),
        },
        "paper": {
            slug(name): {"seconds": seconds, "score": score, "speedup": GQA_PAPER["MHA-XXL"][0] / seconds}
            for name, (seconds, score) in GQA_PAPER.items()
        },
        "widget": {
            f"hkv{n}_{m}": {k: t[k] for k in ("max_sequences", "copies", "bytes_per_token_per_gpu")}
            | {"wrong": len(simulate(t["params"] | {"tp": 1})["wrong_heads"])}
            for n in (32, 8, 1) for m in lesson.HEAD_MAPS
            for t in [simulate(WIDGET_DEFAULT | {"tp": 8, "num_kv_heads": n, "head_map": m})]
        },
    }  # fmt: skip


def draw(folder: str | Path) -> list[Path]:
    """The figures, from `facts()` and the stored healing run alone."""
    paths = [_draw_maps(folder), _draw_tp(folder, facts()["kib_per_token"]), _draw_context(folder)]
    curve = recorded.results(healing.KEY).get("curve")
    return [*paths, _draw_healing(folder, curve)] if curve else paths


def _draw_maps(folder: str | Path) -> Path:
    """Query heads above, KV heads below, a line for each read: MHA, GQA, MQA, and GQA with the wrong map."""
    figure, axes = figures.new_figure(8.0, 2.5, ncols=4)
    right, wrong = lesson.interleaved, lesson.tiled
    panels = [("MHA, 8 : 8", 8, right), ("GQA, 8 : 2", 2, right), ("MQA, 8 : 1", 1, right)]
    panels.append(("GQA, tiled: wrong", 2, wrong))
    for axis, (title, Hkv, heads_of) in zip(axes, panels):
        place = [3.5 + (i - (Hkv - 1) / 2) * 8 / Hkv for i in range(Hkv)]
        for h, (i, wanted) in enumerate(zip(heads_of(8, Hkv), right(8, Hkv))):
            color = figures.COLORS["grey" if i == wanted else "red"]
            axis.plot([h, place[i]], [1, 0], "-" if i == wanted else "--", color=color, linewidth=1.3, zorder=1)
        for y, xs, name, color in ((1, range(8), "q", "blue"), (0, place, "kv", "orange")):
            axis.scatter(xs, [y] * len(xs), s=130, color=figures.COLORS[color], zorder=2)
            for n, x in enumerate(xs):
                axis.text(x, y, str(n), color="white", ha="center", va="center", fontsize=8)
            axis.text(-1.0, y, name, ha="right", va="center", fontsize=9)
        axis.set(title=title, xlim=(-1.4, 7.6), ylim=(-0.35, 1.3))
        axis.title.set_size(10)
        axis.axis("off")
    return figures.save_figure(figure, folder, "09_head_maps")


def _draw_tp(folder: str | Path, kib: dict[str, dict[str, float]]) -> Path:
    """KiB per token and GPU against the number of GPUs: halved until there is one head each, then flat."""
    figure, axis = figures.new_figure(8.0, 3.3)
    for name, label, color, marker in (
        ("mha", "MHA, 32 heads", "grey", "s"),
        ("gqa_8", "GQA, 8", "blue", "o"),
        ("gqa_2", "GQA, 2", "green", "^"),
        ("mla", "MLA, 576 elements", "purple", "P"),
        ("mqa", "MQA, 1", "orange", "D"),
    ):
        axis.plot(range(5), list(kib[name].values()), marker=marker, color=figures.COLORS[color], label=label, lw=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(range(5), ["1", "2", "4", "8", "16"])
    axis.set_yticks([16, 32, 64, 128, 256, 512], ["16", "32", "64", "128", "256", "512"])
    axis.set(xlabel="GPUs (tensor parallel)", ylabel="KiB per token on each GPU")
    axis.grid(axis="y", color=figures.COLORS["light"])
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figures.save_figure(figure, folder, "09_tensor_parallel")


def _draw_context(folder: str | Path) -> Path:
    """The cache of one sequence against its length, for real configurations."""
    figure, axis = figures.new_figure(8.0, 4.4)
    lengths = [1 << n for n in range(9, 18)]
    styles = zip(MODELS.items(), ("grey", "blue", "orange", "green", "red", "red", "purple", "ink"),
                 ("-", "-", "-", "--", "--", ":", "--", "-"), strict=True)  # fmt: skip
    lines = []
    for (name, config), color, line in styles:
        values = [cache_bytes(config, n) / 2**20 for n in lengths]
        axis.plot(lengths, values, line, color=figures.COLORS[color], linewidth=1.8)
        lines.append((values[-1], name, figures.COLORS[color]))
    below = 0.0
    for value, name, color in sorted(lines):  # each name at the end of its line, no two on one height
        below = max(value, below * 1.6)
        axis.annotate(name, (lengths[-1], value), (lengths[-1] * 1.12, below), color=color, va="center_baseline")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
    axis.set_xticks(lengths[1::2], [f"{n // 1024}k" for n in lengths[1::2]])
    axis.set(xlabel="context, tokens", ylabel="MiB of cache per sequence", xlim=(lengths[0], lengths[-1]))
    axis.minorticks_off()
    axis.grid(color=figures.COLORS["light"])
    return figures.save_figure(figure, folder, "09_context")


def _draw_healing(folder: str | Path, curve: Sequence[Mapping[str, float]]) -> Path:
    """Perplexity against training time, as `--heal` stored it."""
    figure, axis = figures.new_figure(8.0, 3.0)
    axis.plot([p["seconds"] / 60 for p in curve], [p["perplexity"] for p in curve], "o-", color=figures.COLORS["blue"])
    axis.axhline(base := recorded.results(healing.KEY)["teacher"], color=figures.COLORS["grey"], linestyle="--")
    axis.text(0, base, f" 9 : 3, as trained: {base:.1f}", va="bottom", color=figures.COLORS["grey"])
    axis.set_yscale("log")
    axis.set(xlabel="minutes of training on a CPU", ylabel="perplexity")
    return figures.save_figure(figure, folder, "09_healing")


# --- Measurements -------------------------------------------------------------------------------------------------


def measure_heads(S: int, seconds: float) -> list[dict[str, Any]]:
    """On a CPU: decode attention of one sequence, 32 query heads of 128, fp32, for several numbers of KV heads; with a
    group as the rows of one product, and with keys and values repeated for every query head first. Seconds."""
    rows, q, lens = [], torch.randn(1, 32, 128), torch.tensor([S], dtype=torch.int32)
    for Hkv in (32, 8, 4, 1):
        k, v = torch.randn(2, 1, S, Hkv, 128)

        def repeated(k: torch.Tensor = k, v: torch.Tensor = v, G: int = 32 // Hkv) -> torch.Tensor:
            k, v = (x.transpose(1, 2).repeat_interleave(G, 1) for x in (k, v))  # [1, 32, S, 128]
            return F.scaled_dot_product_attention(q[:, :, None], k, v)

        grouped = timing.measure(functools.partial(cache_lesson.decode_attention, q, k, v, lens, S), seconds).median
        rows.append({"Hkv": Hkv, "mib": 2 * k.nbytes / 2**20, "grouped_ms": grouped * 1e3,
                     "repeated_ms": timing.measure(repeated, seconds).median * 1e3,
                     "gb_s": 2 * k.nbytes / grouped / 1e9})  # fmt: skip
    return rows


def measure_mla(S: int, seconds: float) -> dict[str, float]:
    """One decode step of a DeepSeek-V2-Lite attention layer at context S, fp32: naive and absorbed. Milliseconds."""
    layer = lesson.MLA.random(lesson.MLAConfig())
    with torch.device(common.device()):
        q, cached = layer.project(torch.randn(S, 2048) / 8, torch.arange(S))
        table, lens = torch.arange(S // 64, dtype=torch.int32)[None], torch.tensor([S], dtype=torch.int32)
    q, cache, R = q[-1:], cached.view(S // 64, 64, -1), layer.config.kv_lora_rank

    def absorbed() -> torch.Tensor:
        return layer.unfold(lesson.mla_decode(layer.absorb(q), cache, table, lens, S, R, layer.scale))

    a, n = (timing.measure(f, seconds).median * 1e3 for f in (absorbed, lambda: layer.naive(q, cached)))
    return {"S": S, "naive": n, "absorbed": a, "ratio": n / a}


def measure_kernels() -> dict[str, Any]:
    """On a GPU, bf16: GB/s of cache (each byte once), % of a copy's, TFLOP/s; packed, and one query head per load."""
    copy, decode, latent, dtype, device = timing.copy_bandwidth(), [], [], torch.bfloat16, common.device()

    def rate(moved: float, us: float) -> dict[str, float]:
        return {"gb_s": moved / us / 1e3, "% of copy": moved / us / copy * 1e8}

    def microseconds(fn: Callable, *arguments: Any) -> float:
        return timing.measure_graph(functools.partial(fn, *arguments), 0.3).median * 1e6

    for B, S, Hkv in ((32, 4096, 8), (32, 16384, 8), (1, 65536, 8), (32, 4096, 1), (32, 4096, 32)):
        case = paged.random_case([S] * B, 16, 32, Hkv, 128, dtype)
        row = {"B": B, "S": S, "Hkv": Hkv}
        for name, heads in (("packed", None), ("one_by_one", 1)):
            row[f"{name}_us"] = microseconds(lesson.gqa_decode, *case, S, heads)
        once = decode_traffic(B, S, 32, Hkv, 128)["bytes"]
        decode.append(row | rate(once, row["packed_us"]) | {"ratio": row["one_by_one_us"] / row["packed_us"]})
    for B, S, H in ((128, 16384, 16), (32, 4096, 16), (32, 4096, 128), (1, 65536, 16)):
        blocks = S // 64
        cache = torch.randn(B * blocks + 1, 64, 576, device=device, dtype=dtype)
        table = (torch.randperm(B * blocks, device=device) + 1).int().view(B, blocks)
        lens = torch.full((B,), S, dtype=torch.int32, device=device)
        q = torch.randn(B, H, 576, device=device, dtype=dtype)
        us = microseconds(lesson.mla_decode, q, cache, table, lens, S, 512, 192**-0.5)
        flops = B * (lesson.mla_cost(H, 1, S)["absorbed"] - lesson.mla_cost(H, 1, 0)["absorbed"])  # q comes folded
        latent.append({"B": B, "S": S, "H": H, "us": us, **rate(B * S * 1152, us), "tflop_s": flops / us / 1e6})
    return {"copy_gb_s": copy / 1e9, "decode": decode, "mla": latent}


def measure_perplexity(model: llama.Llama, tokenizer: Tokenizer, num_tokens: int = 5120) -> dict[str, float]:
    """What it does to the real model to have its KV heads merged, without training, or mapped wrongly; printed."""
    if model.num_kv_heads == 1:
        common.skipped("the merging of KV heads", "this model has one")
        return {}
    windows, heads = healing.corpus(tokenizer, num_tokens), (model.num_heads, model.num_kv_heads)
    students = {"trained": model} | {how: healing.pool_kv_heads(model, 1, how) for how in ("mean", "first")}
    found = {name: healing.perplexity(student, windows) for name, student in students.items()}
    found["tiled_map"] = healing.perplexity(model, windows, lesson.tiled(*heads))
    shown = {k: f"{x:,.{1 if k == 'trained' else 0}f}" if x < 1e9 else "over a billion" for k, x in found.items()}
    n = windows.numel()
    common.say(
        f"perplexity on {n:,} tokens of Python's reference: {shown['trained']} as trained ({heads[0]}:{heads[1]});"
    )
    common.say(f"one KV head, the mean of {heads[1]}: {shown['mean']}; the first of them: {shown['first']};")
    common.say(f"all of them, under the tiled map: {shown['tiled_map']}")
    return found | {"tokens": n}


def measure_speed() -> dict[str, Any]:
    """Time follows the bytes that are loaded: on a CPU with torch's attention, on a GPU with the lesson's kernels."""
    if common.HAS_GPU:
        bench = measure_kernels()
        for kind in ("decode", "mla"):
            cells = [[f"{x:,.1f}" if isinstance(x, float) else x for x in row.values()] for row in bench[kind]]
            common.table(list(bench[kind][0]), cells, title=kind)
        return bench | {"mla_layer": measure_mla(4096, 0.3)}
    S = 4096
    bench = {"S": S, "heads": measure_heads(S, 1.5), "mla_layer": measure_mla(S // 4, 1.5)}
    rows = [
        [f"32 : {r['Hkv']}", f"{r['mib']:.0f}", f"{r['grouped_ms']:.2f}", f"{r['repeated_ms']:.2f}"]
        for r in bench["heads"]
    ]
    common.table([f"one decode at {S:,}, D = 128, fp32", "MiB", "grouped, ms", "repeated first, ms"], rows)
    m = bench["mla_layer"]
    common.say(f"MLA layer, one decode at {m['S']:,}: naive {m['naive']:.1f} ms, absorbed {m['absorbed']:.2f} ms")
    common.skipped("the kernels' GB/s", "needs a GPU")
    return bench


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What `--bench` measures: merged heads on the real model, and heads against time."""
    loader.check_context(args.model, healing.WINDOW)
    model, tokenizer = loader.load(args.model)
    common.heading("Fewer KV heads in a model that was trained with more")
    perplexity = measure_perplexity(model, tokenizer)
    common.heading("Measured on this machine")
    return {"perplexity": perplexity} | measure_speed()
