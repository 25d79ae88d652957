"""Serves lessons/01_kv_cache.md: its widget's simulation, its facts and figures, and what `--bench` measures."""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import functools
import itertools
from bisect import bisect_right
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine import registry
from engine.model import llama, loader
from lab import figures, recorded, timing
from lab.hardware import HARDWARE
from lab.lengths import WORKLOADS
from lab.parameters import checked
from lab.roofline import (
    GPU_MEMORY_UTILIZATION,
    KV_CACHE_DTYPES,
    MODELS,
    PUBLISHED_ITL,
    KVCacheSpec,
    attention_intensity,
    latency_line,
    sequences_that_fit,
    slug,
    step_cost,
    vector_bytes,
    weight_bytes,
    weights_read,
)

KEY = "01_kv_cache"
lesson = registry.lesson(KEY)

# --- The simulation -------------------------------------------------------------------------------------------------

# What SmolLM2 answers to the script's QUESTION, greedily in fp32, with right positions and with positions that restart
# at 0. A test compares both with the model.
CARDS = {"24": "RTX 4090 24GB", "40": "A100 40GB", "80": "H100 80GB", "141": "H200 141GB"}  # GB on the box: card
RECORDED = {
    "right": ["The", " planets", " of", " the", " solar", " system", " are", ":", " Mercury", ",", " Venus", ",",
              " Earth", ",", " Mars", ",", " Jupiter", ",", " Saturn", ",", " Uranus", ",", " Neptune", ","],
    "restarted": ["The", " Solar", " System", " of", " the", " Solar", " System", " of", " the", " Solar", " System",
                  ".", "com", ".", "com", ".", "com", ".", "com", ".", "com", ".", "com", "."],
}  # fmt: skip

GPUS = {"A10": "A10 24GB", "H100": "H100 80GB", "MI300X": "MI300X 192GB"}  # name -> card in `HARDWARE`
TICKS = 60  # of the clock on which the two runs race
WIDGET_DEFAULT: dict[str, Any] = {
    "prompt": 512, "new_tokens": 512, "model": "Llama-3.1-8B", "batch": 1, "gpu": "A10", "restart_positions": False,
}  # fmt: skip
WIDGET_CHOICES = {
    "prompt": range(1, 4097), "new_tokens": range(1, 4097), "batch": range(1, 1025), "gpu": tuple(GPUS),
    "restart_positions": (True, False), "model": ("SmolLM2-135M", "Llama-2-7B", "Llama-3.1-8B"),
}  # fmt: skip


@functools.lru_cache(1 << 15)
def step_us(model: str, gpu: str, batch: int, new: int, context: int) -> int:
    """Microseconds of a step that computes the last `new` positions of `context`."""
    return int(1e6 * HARDWARE[GPUS[gpu]].seconds(*step_cost(MODELS[model], batch, new, context)))


def simulate(params: dict[str, Any]) -> dict[str, Any]:
    """Two runs of `batch` equal requests on one clock: with a cache, until memory is full, and without one.

    params: prompt, new_tokens, batch (integers), restart_positions (boolean), gpu and model. A step lasts its
    roofline, and full memory ends the race. The rows come from `KVCache.allocate_slots` on the meta device, the passes
    from `steps`. Each run lists for every step the tokens computed and the µs. `clock` lists µs, and for either
    run the steps done and the token-forwards; `cache_bytes` lists what is held then. Raises InputError.
    """
    p = checked(params, WIDGET_CHOICES)
    config, gpu, batch = MODELS[p["model"]], HARDWARE[GPUS[p["gpu"]]], p["batch"]
    spec, weights = lesson.KVCacheSpec.from_config(config), weight_bytes(config)
    usable = gpu.memory * 92 // 100
    per_position = batch * spec.bytes_per_token()  # all requests are equal: one row number, `batch` rows
    room = max(0, (usable - weights) // per_position)
    cache = lesson.KVCache(spec, 1, room, torch.bfloat16, torch.device("meta"))
    fits, oom_step = weights <= usable, None
    runs: dict[bool, dict[str, list[int]]] = {kind: {"forwards": [], "us": []} for kind in (True, False)}
    held = [0]  # bytes of the cache after so many steps
    for cached, run in runs.items():
        for step, (start, stop) in enumerate(lesson.steps(p["prompt"], p["new_tokens"], cached) if fits else ()):
            if cached:
                try:
                    cache.allocate_slots([stop - start])
                except lesson.CacheFull:
                    oom_step = step
                    break
                held.append(cache.seq_lens[0] * per_position)
            run["forwards"].append(batch * (stop - start))
            run["us"].append(step_us(p["model"], p["gpu"], batch, stop - start, stop))
    took, without = sum(runs[True]["us"]), sum(runs[False]["us"])
    ends = [list(itertools.accumulate(run["us"])) for run in runs.values()]
    clock, cache_bytes = [], []
    for tick in range(1, TICKS + 1):
        now = (max(took, without) if oom_step is None else took) * tick // TICKS
        row = [now]
        for run, at in zip(runs.values(), ends):
            done = bisect_right(at, now)
            row += [done, sum(run["forwards"][:done])]
        clock.append(row)
        cache_bytes.append(held[row[1]])
    whole = len(runs[True]["us"]) == p["new_tokens"]
    return {
        "params": p, "bytes_per_token": spec.bytes_per_token(), "weight_bytes": weights, "usable_bytes": usable,
        "gpu_bytes": gpu.memory, "room": room, "oom_step": oom_step if fits else 0,
        "with": runs[True], "without": runs[False], "took": [took, without],
        "times": (2 * without + took) // (2 * took) if whole else 0, "clock": clock, "cache_bytes": cache_bytes,
        "text": RECORDED["restarted" if p["restart_positions"] else "right"],
    }  # fmt: skip


def describe(trace: dict[str, Any]) -> str:
    """The end of a simulation as text, as the widget's slot shows it."""
    p, (took, without) = trace["params"], trace["took"]
    few, many = (sum(trace[run]["forwards"]) for run in ("with", "without"))
    lines = [
        f"{p['model']} in bf16 on one {p['gpu']}: weights {trace['weight_bytes'] / 2**30:.2f} GiB, "
        f"of {trace['usable_bytes'] / 2**30:.2f} usable; {trace['bytes_per_token']:,} bytes of cache per token",
        f"{p['batch']} × ({p['prompt']} prompt + {p['new_tokens']} new tokens)",
        f"with a cache:    {few:>12,} token-forwards, {took / 1e6:>9,.2f} s, "
        f"{trace['cache_bytes'][-1] / 2**30:.2f} GiB of keys and values",
        f"without a cache: {many:>12,} token-forwards, {without / 1e6:>9,.2f} s",
    ]
    if trace["weight_bytes"] > trace["usable_bytes"]:
        lines.append("OUT OF MEMORY at step 0: the weights alone do not fit")
    elif trace["oom_step"] is not None:
        lines.append(
            f"OUT OF MEMORY at step {trace['oom_step']}: room for {trace['room']:,} positions of {p['batch']} sequences"
        )
    else:
        lines.append(f"the cache makes it {trace['times']} times as fast")
    lines.append(f"SmolLM2 says:\n{''.join(trace['text'])!r}")
    return "\n".join(lines)


# --- The numbers that the text quotes -------------------------------------------------------------------------------


def reservation_waste(
    prompt_mean: float, output_mean: float, slots: int = 2048, requests: int = 20_000, seed: int = 0
) -> dict[str, Any]:
    """What the lesson's `serve_from_reservations` comes to, in shares, and how far the reservations were filled."""
    used, refused, cut = lesson.serve_from_reservations(prompt_mean, output_mean, slots, requests, seed)
    used.sort()
    return {
        "mean_says": 1 - (prompt_mean + output_mean) / slots,
        "simulated": 1 - sum(used) / (slots * len(used)) if used else None,
        "refused": refused / requests,
        "cut": cut / requests,
        "used_percentiles": [used[len(used) * i // 100] for i in range(100)] if used else [],
    }


def facts() -> dict[str, Any]:
    """Every deterministic number of the lesson's text and figures. No model, under a second."""
    specs = {name: KVCacheSpec.from_config(config) for name, config in MODELS.items()}
    opt, eight_spec, deepseek = (specs[name] for name in ("OPT-13B", "Llama-3.1-8B", "DeepSeek-V3"))
    passes = {kind: list(lesson.steps(512, 512, kind == "cached")) for kind in ("cached", "uncached")}
    forwards = {kind: [stop - start for start, stop in ranges] for kind, ranges in passes.items()}
    race, broken = simulate(WIDGET_DEFAULT), simulate(WIDGET_DEFAULT | {"batch": 64})
    latent_fp8 = vector_bytes(512, 8, 32, 128) + vector_bytes(64, 16)  # a scale per 128; the rotated key stays bf16
    return {
        "bytes_per_token": {slug(name): spec.bytes_per_token() for name, spec in specs.items()},
        "bytes_by_dtype": {kind: eight_spec.bytes_per_token(kind) for kind in KV_CACHE_DTYPES},
        "mla": {
            "elements": deepseek.head_size,
            "as_gqa_groups": deepseek.head_size / (2 * 128),
            "times_smaller_than_mha": 128 * (2 * 128) / deepseek.head_size,
            "fp8_bytes_per_layer": latent_fp8,
            "fp8_bytes_per_token": deepseek.num_layers * latent_fp8,
        },
        "weight_bytes": {slug(name): weight_bytes(config) for name, config in MODELS.items()},
        "fit": {
            slug(name): {gb: sequences_that_fit(HARDWARE[card].memory, config, 2048) for gb, card in CARDS.items()}
            for name, config in MODELS.items()
        },
        # A latent vector has no heads to deal out: eight GPUs share the weights, and each keeps the whole cache.
        "fit_tp8_h200": {
            "deepseek_v3": int(
                (GPU_MEMORY_UTILIZATION * HARDWARE[CARDS["141"]].memory - weight_bytes(MODELS["DeepSeek-V3"]) / 8)
                // (2048 * deepseek.bytes_per_token())
            )
        },
        "opt_slots": (slots := 12 * 2**30 // opt.bytes_per_token()),
        "opt_requests": slots // 2048,
        "forwards": {kind: sum(counts) for kind, counts in forwards.items()},
        "forwards_ratio": sum(forwards["uncached"]) / sum(forwards["cached"]),
        "curve": forwards,
        "tokens_in_16_gib": 2**34 // eight_spec.bytes_per_token(),
        "waste": {slug(name): reservation_waste(*means) for name, means in WORKLOADS.items()},
        "claim_70b": _claim_facts(),
        "intensity": _intensity_facts(),
        "itl": _latency_facts(),
        "programs": {f"b{B}": B * eight_spec.num_kv_heads for B in (1, 32)},
        "break_it": {"oom_step": broken["oom_step"], "room": broken["room"]},
        "race": {
            "times": race["times"],
            "fewer": sum(forwards["uncached"]) // sum(forwards["cached"]),
            **dict(zip(("with_s", "without_s"), (us / 1e6 for us in race["took"]))),
        },
        "crowd": simulate(WIDGET_DEFAULT | {"batch": 64, "gpu": "MI300X", "prompt": 2048})["times"],
    }


def _claim_facts() -> dict[str, float]:
    """“A 70B model serving 128K context allocates ~40GB per request”, of which 2K tokens use 2 %."""
    config = MODELS["Llama-3.1-70B"]
    gib = 128 * 1024 * KVCacheSpec.from_config(config).bytes_per_token() / 2**30
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    weights_4bit = weight_bytes(config | {"weight_bits": 4}) / 1e9
    return {"gib": gib, "waste": 1 - 2048 / (128 * 1024), "mha_gib": gib * group, "weights_4bit_gb": weights_4bit}


def _intensity_facts() -> dict[str, Any]:
    """FLOPs per byte of Llama-3.1-8B, and where the cache keeps any batch from ever reaching an H100's ridge."""
    config, ridge = MODELS["Llama-3.1-8B"], HARDWARE["H100 80GB"].ridge
    costs = {"decode": {B: step_cost(config, B, 1, 2048) for B in (1, 8, 32, 64)},
             "prefill": {T: step_cost(config, 1, T, T) for T in (128, 512, 2048, 8192)}}  # fmt: skip
    # An endless batch spreads the weights over so many tokens that only the cache is left to read:
    # intensity -> (2·W + attention FLOPs per key · S) / (bytes per token · S), below the ridge unless S is small.
    weight_flops = 2 * sum(weights_read(config))
    per_key = attention_intensity(config) * (per_token := KVCacheSpec.from_config(config).bytes_per_token())
    return {
        "ridge_h100": ridge,
        "attention": {slug(m): attention_intensity(c) for m, c in MODELS.items() if "kv_lora_rank" not in c},
        **{kind: {str(n): flops / moved for n, (flops, moved) in rows.items()} for kind, rows in costs.items()},
        "decode_limit": (weight_flops + per_key * 2048) / (per_token * 2048),
        "compute_bound_below": weight_flops / (ridge * per_token - per_key),
    }


def _latency_facts() -> dict[str, float]:
    """The published latency line of Llama-3.1-8B, read as bandwidths."""
    config, sheet = MODELS["Llama-3.1-8B"], HARDWARE["H100 80GB"].bandwidth
    spec, weights = KVCacheSpec.from_config(config), 2 * sum(weights_read(config))
    intercept, slope = latency_line(config, sheet)
    (a16, s16), (a8, s8) = PUBLISHED_ITL["bfloat16"], PUBLISHED_ITL["fp8"]
    cache_rate, cache_rate_fp8 = spec.bytes_per_token() / (s16 * 1e-3), spec.bytes_per_token("fp8") / (s8 * 1e-3)
    return {
        "weights_gb": weights / 1e9,
        "intercept_ms": intercept * 1e3,
        "slope_ms": slope * 1e3,
        "slope_tb_s": cache_rate / 1e12,
        "slope_share": cache_rate / sheet,
        "slope_tb_s_fp8": cache_rate_fp8 / 1e12,
        "slope_ratio_fp8": s8 / s16,
        "intercept_tb_s": weights / (a16 * 1e-3) / 1e12,
        "intercept_share": weights / (a16 * 1e-3) / sheet,
        "weights_at_cache_rate_ms": weights / cache_rate * 1e3,
        "unexplained_ms": a16 - weights / cache_rate * 1e3,
        "fp8_break_even": (a8 - a16) / (s16 - s8),
        "tokens_as_heavy_as_weights": weights // spec.bytes_per_token(),
        "tokens_doubling_itl": a16 / s16,
        "eight_requests_ms": a16 + s16 * 8 * 21_000,  # of 20,000 + 2,000 tokens, on average half-way
    }


# --- The figures ----------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """The lesson's figures, from `facts()` and the committed measurements alone."""
    known, measured = facts(), recorded.results(KEY).get("bench", {})
    return [
        _draw_steps(folder),
        _draw_cost(folder, known, measured),
        _draw_waste(folder, known),
        _draw_roofline(folder, known),
        _draw_latency(folder, known),
    ]


def _draw_steps(folder: str | Path) -> Path:
    """Which positions each pass computes, as `steps` says: everything without a cache, the newest with one."""
    from matplotlib.patches import Rectangle

    P, N = 5, 6  # small enough to draw
    figure, axes = figures.new_figure(8.0, 3.0, ncols=2)
    for axis, cached in zip(axes, (False, True)):
        ranges = list(lesson.steps(P, N, cached))
        for row, (start, stop) in enumerate(ranges):
            for i in range(stop):
                color = figures.COLORS["blue" if i >= start else "light"]
                axis.add_patch(Rectangle((i + 0.04, row + 0.04), 0.92, 0.92, facecolor=color))
                if i < start:
                    axis.text(
                        i + 0.5, row + 0.5, "kv", ha="center", va="center", fontsize=7, color=figures.COLORS["grey"]
                    )
        axis.set(xlim=(-0.1, P + N), ylim=(N + 0.1, -0.1), aspect="equal", xlabel="position", ylabel="step")
        axis.set_xticks([i + 0.5 for i in range(P + N - 1)], range(P + N - 1))
        axis.set_yticks([i + 0.5 for i in range(N)], range(N))
        total = sum(stop - start for start, stop in ranges)
        axis.set_title(f"{'With' if cached else 'Without'} a cache: {total} token-forwards")
        axis.tick_params(length=0)
        axis.spines[["left", "bottom"]].set_visible(False)
    return figures.save_figure(figure, folder, "01_steps")


def _draw_cost(folder: str | Path, known: dict[str, Any], measured: dict[str, Any]) -> Path:
    """Quadratic against linear: counted at 512 + 512, and in seconds on the machine that was measured."""
    panels = [(known["curve"], "token-forwards so far", "Counted, after a prompt of 512")]
    if run := measured.get("generate"):
        panels.append((run["seconds"], "seconds so far, CPU", f"Measured, after a prompt of {run['prompt']}"))
    figure, axes = figures.new_figure(8.0, 3.2, ncols=len(panels), squeeze=False)
    for axis, (curves, label, title) in zip(axes[0], panels):
        for kind, color, where, dy in (("uncached", "red", 0.72, 10), ("cached", "blue", 1.0, 8)):
            line = list(itertools.accumulate(curves[kind]))
            axis.plot(range(1, len(line) + 1), line, color=figures.COLORS[color], linewidth=2)
            end = f"{line[-1]:,}" if isinstance(line[-1], int) else f"{line[-1]:.1f} s"
            at, word = int(where * len(line)) - 1, "without" if kind == "uncached" else "with"
            axis.annotate(f"{word} a cache: {end}", (at + 1, line[at]), xytext=(-6, dy), textcoords="offset points",
                          ha="right", color=figures.COLORS[color],
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
        axis.set(xlabel="new tokens", ylabel=label, title=title, ylim=(0, None), xlim=(0, None))
    axes[0, 0].yaxis.set_major_formatter(lambda y, _: f"{y / 1000:.0f}k" if y else "0")
    return figures.save_figure(figure, folder, "01_cost")


def _draw_waste(folder: str | Path, known: dict[str, Any]) -> Path:
    """One column per reservation, sorted by how far it was filled; what is above the fill was never used."""
    figure, axes = figures.new_figure(8.0, 2.9, ncols=3, sharey=True)
    for axis, name in zip(axes, WORKLOADS):
        waste = known["waste"][slug(name)]
        axis.set_facecolor(figures.COLORS["light"])
        axis.fill_between(range(100), waste["used_percentiles"], color=figures.COLORS["blue"], linewidth=0)
        axis.set(xlim=(0, 99), ylim=(0, 2048), xlabel="% of the sequences served", title=name)
        axis.set_yticks(range(0, 2049, 512), [f"{n:,}" for n in range(0, 2049, 512)])
        axis.set_xticks((0, 50, 99), ("0", "50", "100"))
        refused = f"\n{waste['refused']:.0%} refused\n{waste['cut']:.0%} cut short" if waste["refused"] else ""
        axis.text(4, 1980, f"{waste['simulated']:.0%} empty{refused}", va="top")
    axes[0].set_ylabel("slots used of 2,048")
    return figures.save_figure(figure, folder, "01_waste")


def _draw_roofline(folder: str | Path, known: dict[str, Any]) -> Path:
    """Prefill and decode of Llama-3.1-8B under one roof."""
    gpu, intensity, colors = HARDWARE["H100 80GB"], known["intensity"], figures.COLORS

    def roof(x: float) -> float:
        return min(gpu.flops, x * gpu.bandwidth) / 1e12

    figure, axis = figures.new_figure(8.0, 3.8)
    axis.plot([0.5, gpu.ridge, 2e4], [roof(x) for x in (0.5, gpu.ridge, 2e4)], color=colors["ink"], linewidth=2)
    axis.axvline(gpu.ridge, color=colors["grey"], linewidth=1, linestyle=":")

    def point(x: float, text: str, color: str, marker: str, dx: int, dy: int, **style: Any) -> None:
        axis.plot(x, roof(x), marker, color=colors[color], markersize=7, **style)
        axis.annotate(
            text,
            (x, roof(x)),
            xytext=(dx, dy),
            textcoords="offset points",
            color=colors[color],
            fontsize=9,
            ha="left" if dx > 0 else "right" if dx < 0 else "center",
        )

    for B, x in intensity["decode"].items():
        point(x, f"B={B}", "red", "o", 8, -5)
    point(intensity["decode_limit"], "B → ∞", "red", "o", 8, -5, markerfacecolor="white")
    point(intensity["attention"]["llama_31_8b"], "attention alone,\nany batch", "orange", "D", -8, 3)
    for T, x in intensity["prefill"].items():
        point(x, f"T={int(T):,}", "blue", "s", *((8, -5) if x < gpu.ridge else (0, -16)))
    axis.text(gpu.ridge * 1.07, 1.6, f"ridge: {gpu.ridge:.0f} FLOP/byte", color=colors["grey"], fontsize=9)
    axis.text(0.55, 900, "prefill of T tokens", color=colors["blue"])
    axis.text(0.55, 500, "decode at context 2,048, batch B", color=colors["red"])
    axis.set(
        xscale="log",
        yscale="log",
        xlim=(0.5, 2e4),
        ylim=(1, 2000),
        xlabel="FLOP per byte moved",
        ylabel="TFLOP/s attainable",
        title="Llama-3.1-8B in bf16 on an H100 (data sheet)",
    )
    axis.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    axis.set_xticks([1, 10, 100, 1000, 10000], ["1", "10", "100", "1,000", "10,000"])
    axis.minorticks_off()
    return figures.save_figure(figure, folder, "01_roofline")


def _draw_latency(folder: str | Path, known: dict[str, Any]) -> Path:
    """Latency per token against cached tokens: what was published, and what the data sheet would allow."""
    figure, axis = figures.new_figure(8.0, 3.1)
    sheet = (known["itl"]["intercept_ms"], known["itl"]["slope_ms"])
    lines = [("published, cache in bf16", PUBLISHED_ITL["bfloat16"], "blue", "-", 0),
             ("bytes ÷ 3.35 TB/s, bf16", sheet, "grey", "--", -7),
             ("published, cache in fp8", PUBLISHED_ITL["fp8"], "green", "-", 5)]  # fmt: skip
    for label, (intercept, slope), color, style, dy in lines:
        end = intercept + slope * 125_000
        axis.plot((0, 125_000), (intercept, end), style, color=figures.COLORS[color], linewidth=2)
        axis.annotate(
            label,
            (125_000, end),
            xytext=(5, dy),
            textcoords="offset points",
            va="center",
            color=figures.COLORS[color],
            annotation_clip=False,
            fontsize=9,
        )
    axis.set(
        xlim=(0, 125_000),
        ylim=(0, 14),
        xlabel="cached tokens",
        ylabel="ms per token",
        title="Llama-3.1-8B, one H100, one request",
    )
    axis.set_xticks(range(0, 125_001, 25_000), ["0", "25k", "50k", "75k", "100k", "125k"])
    return figures.save_figure(figure, folder, "01_latency")


# --- Measured with --bench ------------------------------------------------------------------------------------------

P, N = 64, 192  # the run of the page's bet: tokens of the prompt, and new ones


def filled_cache(model: llama.Llama, num_seqs: int, max_len: int) -> Any:
    """An empty cache over memory that was written once (the kernel serves untouched pages from a single zero page)."""
    spec = lesson.KVCacheSpec.from_config(vars(model.config))
    cache = lesson.KVCache(spec, num_seqs, max_len, model.dtype, model.device)
    cache.k.normal_()
    cache.v.normal_()
    return cache


def pass_seconds(model: llama.Llama, cache: Any, num_new_tokens: int, context: int, seconds: float) -> float:
    """Median seconds of one forward pass in which each sequence of `cache` computes its last T of S tokens."""
    B, T = len(cache.seq_lens), num_new_tokens
    token_ids = torch.zeros(B * T, dtype=torch.int64, device=model.device)

    def forward() -> None:
        cache.seq_lens = [context - T] * B
        cache.allocate_slots([T] * B)
        hidden = model.forward(token_ids, cache.positions, cache.attend)
        model.logits(hidden[T - 1 :: T]).argmax(-1)

    return timing.measure(forward, seconds).median


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that `--bench` measures, printed, and as it is stored in `lessons/results`."""
    loader.check_context(args.model, P + N)
    model, _ = loader.load(args.model)
    common.heading("Measured on this machine")
    bench = measure_model(model)
    if common.HAS_GPU:
        bench["kernel"] = measure_kernel()
    bench["generate"] = measure_generation(model)
    print_measurements(bench)
    return bench


def measure_model(model: llama.Llama, seconds: float = 4.0) -> dict[str, Any]:
    """Decode against context and against batch, prefill against prompt length, and the machine's own ceiling."""
    longest = min(8192, model.config.max_position_embeddings)
    contexts = [max(1, longest * part // 64) for part in (1, 8, 16, 32, 48, 64)]
    prompts = [min(n, longest) for n in (32, 128, 512, 1024)]
    batches = (1, 4, 16, 32)
    cache = filled_cache(model, 1, max(contexts + prompts))
    decode = [pass_seconds(model, cache, 1, n, seconds) for n in contexts]
    prefill = [pass_seconds(model, cache, n, n, seconds) for n in prompts]
    batched = [pass_seconds(model, filled_cache(model, B, contexts[0]), 1, contexts[0], seconds) for B in batches]
    # ITL = intercept + slope · context by least squares. Both are bandwidths in disguise.
    mean_x, mean_y = sum(contexts) / len(contexts), sum(decode) / len(decode)
    variance = sum((x - mean_x) ** 2 for x in contexts)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(contexts, decode)) / variance if variance else 0.0
    intercept = mean_y - slope * mean_x
    dtype = str(model.dtype).removeprefix("torch.")
    weights, per_token = latency_line(vars(model.config), 1.0, dtype, model.embed_tokens.element_size())

    def gb_s(moved: float, seconds: float) -> float | None:
        return moved / seconds / 1e9 if seconds > 0 else None  # noise makes it negative

    return {
        "decode": {"context": contexts, "ms": [1e3 * s for s in decode]},
        "prefill": {"tokens": prompts, "tok_s": [n / s for n, s in zip(prompts, prefill)]},
        "batch": {"size": list(batches), "tok_s": [B / s for B, s in zip(batches, batched)]},
        "fit": {"intercept_ms": intercept * 1e3, "slope_us": slope * 1e6, "weights_gb_s": gb_s(weights, intercept),
                "cache_gb_s": gb_s(per_token, slope)},
        "copy_gb_s": timing.copy_bandwidth() / 1e9,
    }  # fmt: skip


def measure_generation(model: llama.Llama) -> dict[str, Any]:
    """The seconds of every step of N tokens after a prompt of P, without a cache and with one."""
    prompt = torch.randint(model.config.vocab_size, (P,)).tolist()
    caches = {"uncached": None, "cached": filled_cache(model, 1, P + N)}
    runs = {kind: lesson.generate(model, prompt, N, cache) for kind, cache in caches.items()}
    total = {kind: sum(run.seconds) for kind, run in runs.items()}
    return {
        "prompt": P,
        "new_tokens": N,
        "total_s": total,
        "speedup": total["uncached"] / total["cached"],
        "token_forwards": {kind: sum(run.token_forwards) for kind, run in runs.items()},
        "seconds": {kind: [round(s, 5) for s in run.seconds] for kind, run in runs.items()},
    }


def measure_kernel() -> list[dict[str, float]]:
    """On a GPU: decode attention of an 8B Llama in bf16, in GB/s of cache read, beside torch's SDPA on the same."""
    rows = []
    for B, S in ((1, 4096), (32, 4096), (1, 16384), (32, 16384), (128, 4096)):
        q = torch.randn(B, 32, 128, dtype=torch.bfloat16, device=common.device())
        k, v = torch.randn(2, B, S, 8, 128, dtype=torch.bfloat16, device=common.device())
        lens = torch.full((B,), S, dtype=torch.int32, device=common.device())
        keys, values = k.transpose(1, 2), v.transpose(1, 2)
        sdpa = functools.partial(F.scaled_dot_product_attention, q[:, :, None], keys, values, enable_gqa=True)
        ours = timing.measure_graph(functools.partial(lesson.decode_attention, q, k, v, lens, S)).median
        rows.append(
            {
                "batch": B,
                "context": S,
                "us": ours * 1e6,
                "gb_s": 2 * k.nbytes / ours / 1e9,
                "sdpa_us": timing.measure_graph(sdpa).median * 1e6,
            }
        )
    return rows


def print_measurements(bench: dict[str, Any]) -> None:
    """The measurements as lines; those that only a GPU has are SKIPPED without one."""
    decode, prefill, batch, fit = (bench[key] for key in ("decode", "prefill", "batch", "fit"))

    def line(text: str, values: dict[str, list]) -> str:
        return ", ".join(text.format(n=n, x=x) for n, x in zip(*values.values()))

    common.say("decode, one sequence:  " + line("{x:.1f} ms at S={n:,}", decode))
    common.say(f"decode, context {decode['context'][0]}:".ljust(23) + line("{x:,.0f} tok/s at B={n}", batch))
    common.say("prefill, one prompt:   " + line("{x:,.0f} tok/s at T={n:,}", prefill))
    itl = f"{fit['intercept_ms']:.1f} ms + {fit['slope_us']:.2f} µs/token"
    if fit["weights_gb_s"] and fit["cache_gb_s"]:
        common.say(f"ITL = {itl}. As bandwidth: weights {fit['weights_gb_s']:.1f} GB/s, cache "
                   f"{fit['cache_gb_s']:.1f} GB/s; a copy: {bench['copy_gb_s']:.1f} GB/s")  # fmt: skip
    else:  # something else was running
        common.skipped("the line for ITL", f"{itl} is noise: neither can be below 0")
    for r in bench.get("kernel", ()):
        common.say(f"decode kernel, 8B heads in bf16, B={r['batch']}, S={r['context']:,}: {r['us']:.0f} µs, "
                   f"{r['gb_s']:,.0f} GB/s, {r['gb_s'] / bench['copy_gb_s']:.0%} of the copy; SDPA "
                   f"{r['sdpa_us']:.0f} µs")  # fmt: skip
    if "kernel" not in bench:
        common.skipped("the kernel's GB/s", "needs a GPU")
    if run := bench.get("generate"):
        slow, fast = (run["total_s"][kind] for kind in ("uncached", "cached"))
        common.say(f"{run['new_tokens']} tokens after {run['prompt']}: {slow:.1f} s without a cache, {fast:.1f} s with "
                   f"one: {run['speedup']:.1f} ×")  # fmt: skip
