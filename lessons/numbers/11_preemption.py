"""What the page of lesson 11 simulates, quotes, draws and measures: `lessons/11_preemption.md`.

The widget's twin, recompute against swap by roofline, latency against load on a clock, the second tier under LRU; and,
timed, the scheduler, copies of blocks, and computing beside copying on the real model.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import functools
import random
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from engine import registry
from engine.attention.metadata import AttentionMetadata
from engine.config import SchedulerConfig
from engine.core.scheduler import make_scheduler
from engine.model import llama, loader
from engine.output import ModelRunnerOutput, SchedulerOutput
from engine.request import Request, SamplingParams
from lab import figures, roofline, timing
from lab.hardware import GPU, HARDWARE
from lab.parameters import checked
from lab.workload_files import draw_owners

KEY = "11_preemption"

lesson = registry.lesson(KEY)


# --- simulate: thrash -------------------------------------------------------------------------------------------------

WIDGET_DEFAULT: dict[str, Any] = {
    "pool_blocks": 64, "block_size": 16, "requests": 16, "prompt": 64, "output": 192, "arrival_gap": 16,
    "watermark_blocks": 0, "policy": "recompute", "prefix_caching": False, "link_gb_s": 50, "prefill_tok_s": 40_000,
}  # fmt: skip
WIDGET_CHOICES: dict[str, Any] = {
    "pool_blocks": range(1, 4097), "block_size": range(1, 257), "requests": range(1, 65), "prompt": range(1, 4097),
    "output": range(1, 4097), "arrival_gap": range(4097), "watermark_blocks": range(4097),
    "policy": ("recompute", "swap"), "prefix_caching": (True, False), "link_gb_s": range(1, 1001),
    "prefill_tok_s": range(1, 10**6 + 1),
}  # fmt: skip
BYTES_PER_TOKEN = 131_072  # Llama-3.1-8B in bf16, as lesson 01 computes it


def _numbers(requests: Iterable[Request]) -> list[int]:
    return [int(request.request_id) for request in requests]


class ObservedCore(lesson.MeteredCore):
    """Writes down every step: who holds how many blocks, who was preempted, what was redone and copied."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self.now = 0
        self.steps: list[dict[str, Any]] = []

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """As the parent, and appends the step as it is after scheduling."""
        scheduler, redone = self.scheduler, self.redone
        copied = sum(len(pairs) for _, pairs in self.copies.take())
        result = super().execute_model(output)
        tables = scheduler.kv_cache_manager.req_to_blocks
        self.steps.append(
            {
                "step": self.now,
                "scheduled": {int(i): n for i, n in output.num_scheduled_tokens.items()},
                "computed": {int(i): scheduler.requests[i].num_computed_tokens for i in output.num_scheduled_tokens},
                "held": {i: len(tables[str(i)]) for i in sorted(map(int, tables))},
                "free": scheduler.kv_cache_manager.block_pool.num_free_blocks,
                "waiting": _numbers(scheduler.waiting),
                "preempted": _numbers(output.preempted_reqs),
                "resumed": _numbers(output.scheduled_resumed_reqs),
                "redone": self.redone - redone,
                "copied": copied,
            }
        )
        self.now += 1
        return result


def simulate(params: dict[str, Any]) -> dict[str, Any]:
    """Equal requests, one every `arrival_gap` steps, at a pool of `pool_blocks` usable blocks: every step.

    params: integers within WIDGET_CHOICES; policy "recompute" or "swap"; prefix_caching true or false. `victim` is the
    request that was preempted most often, the last one if none was; `computed` are positions, with the step's own.
    Times are integers: µs of recomputing at `prefill_tok_s`, µs of copying Llama-3.1-8B's blocks at `link_gb_s` one
    way. Raises InputError naming the field.
    """
    p = checked(params, WIDGET_CHOICES)
    length = p["prompt"] + p["output"]
    scheduler = lesson.build_scheduler(
        p["policy"],
        p["pool_blocks"],
        p["block_size"],
        length,
        num_cpu_blocks=p["requests"] * length,
        prefix_caching=p["prefix_caching"],
        watermark_blocks=p["watermark_blocks"],
        max_num_seqs=p["requests"],
    )
    core = ObservedCore(scheduler)
    trace: dict[str, Any] = {"params": p, "refused": None, "outputs": 0, "token_ns": {
        "recompute": 10**9 // p["prefill_tok_s"], "swap": 2 * BYTES_PER_TOKEN // p["link_gb_s"],
    }}  # fmt: skip
    sampling = SamplingParams(max_tokens=p["output"], ignore_eos=True)
    arrived = 0
    while arrived < p["requests"] or scheduler.has_unfinished_requests():
        if not scheduler.has_unfinished_requests():
            core.now = max(core.now, arrived * p["arrival_gap"])  # an idle engine sleeps
        while arrived < p["requests"] and arrived * p["arrival_gap"] <= core.now and not trace["refused"]:
            prompt = list(range(arrived * p["prompt"], (arrived + 1) * p["prompt"]))
            try:
                core.add_request(Request(str(arrived), prompt, sampling, arrival_time=arrived))
            except common.InputError as error:  # the engine's check at the door
                trace["refused"] = str(error)
            arrived += 1
        if trace["refused"]:
            break  # all requests are equal
        trace["outputs"] += len(core.step())
    copied = sum(step["copied"] for step in core.steps)
    times = [sum(step["preempted"].count(i) for step in core.steps) for i in range(p["requests"])]
    return trace | {
        "victim": times.index(max(times)) if any(times) else p["requests"] - 1, "num_steps": len(core.steps),
        "steps": core.steps, "preemptions": core.preemptions, "useful": core.useful, "redone": core.redone,
        "copied_blocks": copied, "recompute_us": core.redone * 10**6 // p["prefill_tok_s"],
        "swap_us": copied * p["block_size"] * BYTES_PER_TOKEN // (p["link_gb_s"] * 1000),
    }  # fmt: skip


def describe(trace: dict[str, Any]) -> str:
    """The state of the simulation as text, as the widget's slot shows it."""
    p = trace["params"]
    needed = -(-(p["prompt"] + p["output"] - 1) // p["block_size"])
    lines = [
        f"{p['requests']} requests of {p['prompt']} + {p['output']} tokens, one every {p['arrival_gap']} steps, "
        f"{needed} blocks of {p['block_size']} each",
        f"pool {p['pool_blocks']} blocks, watermark {p['watermark_blocks']}, {p['policy']}"
        + (", prefix caching" if p["prefix_caching"] else ""),
    ]
    if trace["refused"]:
        return "\n".join([*lines, f"REFUSED on arrival: {trace['refused']}"])
    preempting = [step for step in trace["steps"] if step["preempted"]]
    for step in preempting[:4]:
        held = " ".join(f"r{r}:{n}" for r, n in step["held"].items())
        victims = ", ".join(f"r{r}" for r in step["preempted"])
        lines.append(f"  step {step['step']:>3}: preempted {victims}; left {held}, {step['free']} free, "
                     f"{len(step['waiting'])} waiting")  # fmt: skip
    if len(preempting) > 4:
        lines.append(f"  … and {len(preempting) - 4} more with preemptions")
    cost = f"redone in {trace['recompute_us'] / 1e3:.1f} ms"
    if p["policy"] == "swap":
        cost += f"; {trace['copied_blocks']:,} blocks copied in {trace['swap_us'] / 1e3:.1f} ms"
    lines += [
        f"{len(trace['steps'])} steps, {trace['outputs']:,} tokens written, {trace['preemptions']} preemptions",
        f"tokens computed: {trace['useful']:,} useful, {trace['redone']:,} {cost}",
        f"a token out and in: {trace['token_ns']['swap']:,} ns; computed again: {trace['token_ns']['recompute']:,} ns",
    ]
    return "\n".join(lines)


# --- What a preemption costs: recompute against swap ------------------------------------------------------------------

# Bytes/s in one direction. PCIe: what large copies reach of 31.5 and 63 GB/s; NVLink-C2C (GH200): the data sheet.
LINKS = {"PCIe 4": 25e9, "PCIe 5": 50e9, "NVLink-C2C": 450e9}
COPY_OVERHEAD = 2e-6  # seconds of one cudaMemcpyAsync, whatever its size: assumed. From Python, an H200's took 17 µs


def recompute_seconds(config: dict, gpu: GPU, num_tokens: int) -> float:
    """FLOPs = 2 · W · S + 4 · L · Hq · D · S(S + 1)/2, at the GPU's peak.

    A chunk rides along with a step that reads the weights for others anyway, so they are not charged here.
    """
    S, spec = num_tokens, roofline.KVCacheSpec.from_config(config)
    W = config["num_parameters"] if "num_parameters" in config else roofline.weights_read(config)[0]
    pairs = S * (S + 1) // 2
    return (2 * W * S + 4 * spec.num_layers * config["num_attention_heads"] * spec.head_size * pairs) / gpu.flops


def swap_seconds(config: dict, link: float, num_tokens: int, block_size: int = 16, one_by_one: bool = False) -> float:
    """Out and in: 2 · (S · bytes per token / link + copies · overhead). One kernel per direction, or V0's
    2 · L copies (keys and values of every layer) for each block."""
    spec, num_blocks = roofline.KVCacheSpec.from_config(config), -(-num_tokens // block_size)
    copies = 2 * spec.num_layers * num_blocks if one_by_one else 1
    return 2 * (num_blocks * block_size * spec.bytes_per_token() / link + copies * COPY_OVERHEAD)


def crossover(config: dict, gpu: GPU, link: float, **how: Any) -> int:
    """The least number of whole blocks, as tokens, from which swap is faster than recompute (0: never below 2^24)."""
    lengths = range(16, 1 << 24, 16)
    low, high = 0, len(lengths)  # recompute − swap grows with the length, once it is positive it stays so
    while low < high:
        middle = (low + high) // 2
        if recompute_seconds(config, gpu, lengths[middle]) > swap_seconds(config, link, lengths[middle], **how):
            high = middle
        else:
            low = middle + 1
    return lengths[low] if low < len(lengths) else 0


# --- The cliff: latency against load ----------------------------------------------------------------------------------

CLIFF_MODEL, CLIFF_GPU = "Llama-2-7B", "RTX 4090 24GB"  # a roofline: 512 KiB of cache per token on a small card
STEP_OVERHEAD = 1e-3  # seconds of CPU per step: an assumption


class TimedCore(lesson.MeteredCore):
    """A clock instead of a model: a step lasts as long as the roofline says, plus its copies and STEP_OVERHEAD."""

    def __init__(
        self, scheduler: Any, model: str = CLIFF_MODEL, gpu: str = CLIFF_GPU, link: float = LINKS["PCIe 4"]
    ) -> None:
        super().__init__(scheduler)
        config, self.gpu, self.link = roofline.MODELS[model], HARDWARE[gpu], link
        spec = roofline.KVCacheSpec.from_config(config)
        self.weights, self.head = roofline.weights_read(config)
        self.pair_flops = 4 * spec.num_layers * config["num_attention_heads"] * spec.head_size
        self.token_bytes = spec.bytes_per_token()
        self.clock = 0.0

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """As the parent; `clock` goes on by the roofline of the step and what was copied, in seconds."""
        result, tokens, pairs, context = super().execute_model(output), 0, 0, 0
        for request_id, n in output.num_scheduled_tokens.items():
            S = self.scheduler.requests[request_id].num_computed_tokens
            tokens, pairs, context = tokens + n, pairs + n * S - n * (n - 1) // 2, context + S + n
        flops = 2 * self.weights * tokens + 2 * self.head * len(result.sampled_token_ids) + self.pair_flops * pairs
        moved = 2 * (self.weights + self.head) + context * self.token_bytes
        copied = sum(len(pairs) for _, pairs in self.copies.take())
        size = copied * self.scheduler.kv_cache_manager.block_size * self.token_bytes
        self.clock += self.gpu.seconds(flops, moved) + STEP_OVERHEAD + size / self.link
        return result


def load_test(rate: float, num_blocks: int, policy: str = "recompute", requests: int = 200, seed: int = 0) -> dict:
    """Poisson arrivals at `rate` per second, prompts of 64–448 and outputs of 64–192 tokens; seconds by TimedCore."""
    rng = random.Random(seed)
    scheduler = lesson.build_scheduler(policy, num_blocks, 16, 640, num_cpu_blocks=4096, max_num_seqs=256)
    core, arrivals, finished, used, running = TimedCore(scheduler), {}, {}, [], []
    time_of_arrival = 0.0
    for i in range(requests):
        time_of_arrival += rng.expovariate(rate)
        prompt = [i] * rng.randint(64, 448)
        params = SamplingParams(max_tokens=rng.randint(64, 192), ignore_eos=True)
        arrivals[str(i)] = Request(str(i), prompt, params, arrival_time=time_of_arrival)
    pending = list(arrivals.values())[::-1]
    while pending or scheduler.has_unfinished_requests():
        if not scheduler.has_unfinished_requests():
            core.clock = max(core.clock, pending[-1].arrival_time)
        while pending and pending[-1].arrival_time <= core.clock:
            core.add_request(pending.pop())
        for output in core.step():
            if output.finish_reason:
                finished[output.request_id] = core.clock - arrivals[output.request_id].arrival_time
        used.append(1 - scheduler.kv_cache_manager.block_pool.num_free_blocks / num_blocks)
        running.append(len(scheduler.running))
    latency = sorted(finished.values())
    return {
        "p50": latency[len(latency) // 2], "p99": latency[len(latency) * 99 // 100], "preemptions": core.preemptions,
        "redone": core.redone / (core.useful + core.redone), "pool_used": statistics.fmean(used),
        "running": statistics.fmean(running), "useful_tok_s": core.useful / core.clock,
    }  # fmt: skip


LOADS = (4, 6, 7, 8, 10)  # requests per second
POOLS = {"tight": 400, "ample": 960}  # blocks of 16 tokens; beside the weights, 90 % of the card have room for 968


@functools.cache
def cliff() -> dict[str, dict[str, dict]]:
    """The load sweep for both pools, and the overloaded end of it once more with swap."""
    sweep = {name: {str(rate): load_test(rate, size) for rate in LOADS} for name, size in POOLS.items()}
    return sweep | {"swap": {str(rate): load_test(rate, POOLS["tight"], "swap") for rate in LOADS[-2:]}}


# --- The second tier at work ------------------------------------------------------------------------------------------


def round_robin(num_blocks: int, num_cpu_blocks: int, documents: int = 6, length: int = 256, rounds: int = 4) -> dict:
    """Questions about `documents` long texts, one after the other, round and round: what is found, and where?

    With a GPU pool that holds fewer texts than there are, LRU throws each one out just before it is asked for again.
    """
    policy = "offload" if num_cpu_blocks else "recompute"
    scheduler = lesson.build_scheduler(policy, num_blocks, 16, length + 32, num_cpu_blocks, prefix_caching=True)
    core, prompt_tokens, hits = lesson.MeteredCore(scheduler), 0, 0
    for turn in range(rounds * documents):
        document = turn % documents
        prompt = [document * length + i for i in range(length)] + [10**6 + turn]  # the text, and a new question
        request = Request(str(turn), prompt, SamplingParams(max_tokens=8, ignore_eos=True))
        lesson.run_to_end(core, [request])
        prompt_tokens, hits = prompt_tokens + len(prompt), hits + request.num_cached_tokens
    copied = dict(core.copies.total)
    return {"prompt_tokens": prompt_tokens, "hits": hits, "hit_rate": hits / prompt_tokens, "copied": copied}


# --- The numbers that the text quotes, and the figures ----------------------------------------------------------------

THRASH = {
    "pool_128": {"pool_blocks": 128}, "pool_64": {}, "pool_32": {"pool_blocks": 32}, "pool_16": {"pool_blocks": 16},
    "watermark_8": {"watermark_blocks": 8}, "watermark_16": {"watermark_blocks": 16},
    "caching": {"prefix_caching": True}, "swap": {"policy": "swap"},
}  # fmt: skip
PAIRS = {"opt_13b": ("OPT-13B", "A100 40GB"), "llama_2_7b": ("Llama-2-7B", "A100 80GB"),
         "llama_31_8b": ("Llama-3.1-8B", "H100 80GB"), "llama_31_70b": ("Llama-3.1-70B", "H100 80GB")}  # fmt: skip
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (16, 64, 256, 1024, 4096, 16384, 65536)


@functools.cache
def facts() -> dict[str, Any]:
    """Every deterministic number of the lesson's text and figures. No model, about a second."""
    thrash, cost, slug = {}, {}, roofline.slug
    for name, change in THRASH.items():
        trace = simulate(WIDGET_DEFAULT | change)
        thrash[name] = {key: trace[key] for key in ("preemptions", "useful", "redone", "copied_blocks", "recompute_us")}
        thrash[name] |= {"steps": len(trace["steps"]), "share": trace["redone"] / (trace["redone"] + trace["useful"])}
    for name, (model, gpu) in PAIRS.items():
        config, gpu = roofline.MODELS[model], HARDWARE[gpu]
        again = recompute_seconds(config, gpu, 1024) / 1024
        cost[name] = {
            "recompute_us": again * 1e6, "token_kib": roofline.KVCacheSpec.from_config(config).bytes_per_token() / 1024,
            "break_even_gb_s": 2 * roofline.KVCacheSpec.from_config(config).bytes_per_token() / again / 1e9,
            "swap_us": {slug(link): swap_seconds(config, rate, 1024) / 1024 * 1e6 for link, rate in LINKS.items()},
            "one_by_one_from": {slug(k): crossover(config, gpu, rate, one_by_one=True) for k, rate in LINKS.items()},
        }  # fmt: skip
    opt, a100, pcie = roofline.MODELS["OPT-13B"], HARDWARE["A100 40GB"], LINKS["PCIe 4"]
    eight, h100 = roofline.MODELS["Llama-3.1-8B"], HARDWARE["H100 80GB"]
    return {
        "needed_blocks": -(-(64 + 192 - 1) // 16), "thrash": thrash, "cost": cost, "cliff": cliff(),
        "figure_19": {
            "recompute_ms": recompute_seconds(opt, a100, 256) * 1e3,
            "one_by_one_ms": {str(b): swap_seconds(opt, pcie, 256, b, one_by_one=True) * 1e3 for b in BLOCK_SIZES},
            "kernel_ms": {str(b): swap_seconds(opt, pcie, 256, b) * 1e3 for b in BLOCK_SIZES},
        },
        "lengths_ms": {
            "recompute": [recompute_seconds(eight, h100, n) * 1e3 for n in LENGTHS],
            "one_by_one": [swap_seconds(eight, LINKS["PCIe 5"], n, one_by_one=True) * 1e3 for n in LENGTHS],
            **{link: [swap_seconds(eight, rate, n) * 1e3 for n in LENGTHS] for link, rate in LINKS.items()},
        },
        "tier": {str(blocks): round_robin(48, blocks) for blocks in (0, 32, 96)},
        "widget": {"token_ns": simulate(WIDGET_DEFAULT)["token_ns"]},
    }  # fmt: skip


def draw(folder: str | Path) -> list[Path]:
    """The lesson's figures, from `facts()` and `simulate` alone."""
    known, trace = facts(), simulate(WIDGET_DEFAULT)
    owners = [(step["step"], {f"r{i}": n for i, n in step["held"].items()}) for step in trace["steps"]]
    preemptions = [step["step"] for step in trace["steps"] for _ in step["preempted"]]
    title = "Who owns the 64 blocks: 16 requests of 16 blocks each, and every preemption (▾)"
    return [
        draw_owners(folder, "11_owners", owners, preemptions, WIDGET_DEFAULT["pool_blocks"], title),
        _draw_cost(folder, known),
        _draw_cliff(folder, known["cliff"]),
    ]


def _draw_cost(folder: str | Path, known: dict[str, Any]) -> Path:
    """Left: against block size, the paper's figure 19 recomputed. Right: against length, for three links."""
    figure, (left, right) = figures.new_figure(8.0, 3.5, ncols=2)
    old = known["figure_19"]
    left.axhline(old["recompute_ms"], color=figures.COLORS["blue"], linewidth=2, label="recompute")
    left.plot(BLOCK_SIZES, old["one_by_one_ms"].values(), "o-", color=figures.COLORS["red"], label="swap, one by one")
    left.plot(BLOCK_SIZES, old["kernel_ms"].values(), "s-", color=figures.COLORS["green"], label="swap, one kernel")
    left.set_xscale("log", base=2)
    left.set(xlabel="block size", ylabel="ms", ylim=(0, None), title="256 tokens of OPT-13B\nA100, PCIe 4")
    left.set_xticks(BLOCK_SIZES, map(str, BLOCK_SIZES))
    left.legend(fontsize=9)
    styles = {"recompute": ("blue", "-"), "one_by_one": ("red", "-"), "PCIe 4": ("green", ":"),
              "PCIe 5": ("green", "--"), "NVLink-C2C": ("green", "-")}  # fmt: skip
    for name, (color, style) in styles.items():
        label = {"recompute": "recompute", "one_by_one": "PCIe 5, one by one"}.get(name, f"{name}, one kernel")
        right.plot(LENGTHS, known["lengths_ms"][name], style, color=figures.COLORS[color], linewidth=2, label=label)
    right.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms", title="Llama-3.1-8B, H100\nblocks of 16")
    right.set_xticks(LENGTHS[::2], [f"{n:,}" for n in LENGTHS[::2]])
    right.set_yticks([0.1, 1, 10, 100, 1000], ["0.1", "1", "10", "100", "1,000"])
    right.minorticks_off()
    right.legend(fontsize=8)
    return figures.save_figure(figure, folder, "11_cost")


def _draw_cliff(folder: str | Path, known: dict[str, dict]) -> Path:
    """p99 and share of redone work against load, for a pool that saturates and one that does not."""
    figure, (left, right) = figures.new_figure(8.0, 3.2, ncols=2)
    looks = {"tight": ("red", "o-"), "swap": ("orange", "s--"), "ample": ("blue", "o-")}
    for name, (color, style) in looks.items():
        rates = [int(rate) for rate in known[name]]
        label = {"tight": f"{POOLS['tight']} blocks, recompute", "swap": f"{POOLS['tight']} blocks, swap"}.get(
            name, f"{POOLS['ample']:,} blocks"
        )
        left.plot(rates, [x["p99"] for x in known[name].values()], style, color=figures.COLORS[color], label=label)
        if name != "swap":
            right.plot(
                rates,
                [100 * x["pool_used"] for x in known[name].values()],
                style,
                color=figures.COLORS[color],
                label=f"pool in use, {POOLS[name]:,} blocks",
            )
    right.bar([int(r) for r in known["tight"]], [100 * x["redone"] for x in known["tight"].values()], width=0.5,
              color=figures.COLORS["light"], edgecolor=figures.COLORS["grey"],
              label=f"tokens redone, {POOLS['tight']} blocks")  # fmt: skip
    left.set(xlabel="requests per second", ylabel="p99 latency, s", ylim=(0, None), title="The cliff ...")
    right.set(xlabel="requests per second", ylabel="%", ylim=(0, 100), title="... stands where the pool is full")
    left.legend(fontsize=9)
    right.legend(fontsize=8)
    return figures.save_figure(figure, folder, "11_cliff")


# --- Measuring here ---------------------------------------------------------------------------------------------------

# schedule() + update_from_output(), decodes, caching off: recorded from vLLM 0.32 on two cores of a 2.3 GHz Xeon.
VLLM_SCHEDULER_US = {8: 137, 64: 812, 256: 3170, 1000: 13260}


def measure_swap(block_size: int, megabytes: int, seconds: float) -> dict[str, float]:
    """GB/s of copying one layer's blocks out to (on a GPU: pinned) host memory, each way of doing it."""
    shape = (2, megabytes * 2**20 // (2 * block_size * 8 * 128 * 2), block_size, 8, 128)  # an 8B model's layer, bf16
    layer = torch.zeros(shape, dtype=torch.bfloat16, device=common.device())
    host = torch.zeros(shape, dtype=torch.bfloat16, pin_memory=common.HAS_GPU)
    table = torch.stack((torch.randperm(shape[1]), torch.randperm(shape[1])), dim=1)
    pairs, on_device = table.tolist(), table.to(layer.device)
    one_by_one = timing.measure(lambda: lesson.swap_blocks_one_by_one(layer, host, pairs), seconds).median
    together = timing.measure(lambda: lesson.swap_blocks(layer, host, on_device), seconds).median
    return {
        "one_by_one_gb_s": layer.nbytes / one_by_one / 1e9,
        "together_gb_s": layer.nbytes / together / 1e9,
        "copy_us": one_by_one / (2 * shape[1]) * 1e6,
    }


def measure_model(model: llama.Llama, num_tokens: int) -> dict[str, float]:
    """Seconds to compute a prompt's keys and values, and to copy them out and in again."""
    num_blocks = -(-num_tokens // 16)
    core = lesson.ModelCore(lesson.build_scheduler("recompute", num_blocks, 16, num_tokens), model, num_blocks)
    meta = AttentionMetadata.build([range(1, num_blocks + 1)], [num_tokens], [num_tokens], 16, model.device)
    token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=model.device)
    attend = core.runner.cache.attend(meta)
    table = torch.arange(1, num_blocks + 1, device=model.device)[:, None].expand(-1, 2).contiguous()

    def out_and_in() -> None:
        for layer, host in zip(core.layers, core.host):
            lesson.swap_blocks(layer, host, table)
            lesson.swap_blocks(host, layer, table)

    compute = timing.measure(lambda: core.runner.model.forward(token_ids, meta.positions, attend), 0.1).median
    return {"recompute_ms": compute * 1e3, "swap_ms": timing.measure(out_and_in, 0.1).median * 1e3}


def scheduler_cost(num_requests: int, steps: int = 60, enable_prefix_caching: bool = False) -> float:
    """Seconds per `schedule()` + `update_from_output()` while `num_requests` decode: the median over `steps`."""
    length = 100 + steps + 2
    config = SchedulerConfig(max_model_len=length, max_num_seqs=num_requests, max_num_batched_tokens=100 * num_requests)
    scheduler = make_scheduler(config, num_requests * -(-length // 16) + 1, 16, enable_prefix_caching)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    for i in range(num_requests):
        scheduler.add_request(Request(f"r{i}", [i, *range(99)], params, arrival_time=i))
    seconds = []
    for _ in range(steps + 1):  # the first step is the prefill
        start = time.perf_counter()
        output = scheduler.schedule()
        middle = time.perf_counter()
        sampled = {request_id: [1] for request_id in output.num_scheduled_tokens}
        resumed = time.perf_counter()
        scheduler.update_from_output(output, sampled)
        seconds.append(middle - start + time.perf_counter() - resumed)
    return statistics.median(seconds[1:])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What `--bench` measures: the scheduler's cost, copies, and copy against compute."""
    lengths = (128, 512, 1024)
    loader.check_context(args.model, lengths[-1])
    model, _ = loader.load(args.model)
    common.heading("Measured on this machine")
    bench: dict[str, Any] = {"scheduler_us": {str(n): scheduler_cost(n, 240) * 1e6 for n in VLLM_SCHEDULER_US}}
    for n, us in bench["scheduler_us"].items():
        common.say(
            f"scheduling {n:>4} decodes: {us:7.0f} µs a step; vLLM 0.32 on another machine: "
            f"{VLLM_SCHEDULER_US[int(n)]:,} µs"
        )
    where = "GPU to pinned host memory" if common.HAS_GPU else "host to host memory (no link here)"
    sizes = (16, 64, 256) if common.HAS_GPU else (1, 4, 16, 64)
    bench["swap"] = {str(b): measure_swap(b, 256 if common.HAS_GPU else 32, 1.0) for b in sizes}
    for b, x in bench["swap"].items():
        common.say(f"blocks of {b:>3}, {where}: {x['one_by_one_gb_s']:.1f} GB/s one by one "
                   f"({x['copy_us']:.1f} µs each), {x['together_gb_s']:.1f} GB/s together")  # fmt: skip
    bench["model"] = {str(n): measure_model(model, n) for n in lengths}
    for n, x in bench["model"].items():
        common.say(f"{n:>4} tokens: {x['recompute_ms']:.0f} ms to compute, {x['swap_ms']:.1f} ms to copy out and in")
    return bench
