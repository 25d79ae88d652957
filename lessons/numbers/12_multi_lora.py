"""What the page of lesson 12, `lessons/12_multi_lora.md`, simulates, quotes, draws and measures.

The widget's twin on the engine's scheduler and its adapters' manager, without a model; what adapters take in slots and
in pages; who shares with whom; a fair queue. And, timed: one layer by popularity, throughput by number of adapters, a
thousand adapters in one process.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import functools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine import registry
from engine.config import SchedulerConfig
from engine.core.block_pool import BlockPool
from engine.core.scheduler import make_scheduler
from engine.lora import lora_model
from engine.lora.config import LoRAConfig, LoRARequest
from engine.lora.layers import NONE, LoRAKernelMeta
from engine.lora.lora_model import LayerShape, LoRAModel
from engine.lora.manager import LoRAModelManager
from engine.lora.memory import SlotMemory, UnifiedMemory
from engine.model import llama, loader
from engine.model.config import LlamaConfig
from engine.model.tokenizer import Tokenizer
from engine.output import ModelRunnerOutput, SchedulerOutput
from engine.request import Request, SamplingParams
from lab import figures, naive, timing
from lab.dry_run import DryRun
from lab.parameters import checked

KEY = "12_multi_lora"
lesson = registry.lesson(KEY)

SMOLLM = dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
              num_key_value_heads=3, head_dim=64, vocab_size=49152)  # fmt: skip
LLAMA_8B = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                num_key_value_heads=8, head_dim=128, vocab_size=128256)  # fmt: skip


def parameters_per_rank(config: LlamaConfig) -> int:
    """What one rank costs on all linear layers: Σ over modules of (in + out), times layers."""
    shapes = lora_model.layer_shapes(config).values()
    return config.num_hidden_layers * sum(s.in_features * len(s.slices) + sum(s.slices) for s in shapes)


PER_RANK = parameters_per_rank(LlamaConfig(**SMOLLM))  # times the bytes of a number


# --- The engine's scheduler with adapters, and no model -------------------------------------------------------------


class NoMemory:
    """Slots without weights: what a simulation needs."""

    def write(self, slot: int, lora: LoRAModel) -> None: ...

    def clear(self, slot: int) -> None: ...


class Rows(DryRun):
    """The loop without a model, and who was in its last step."""

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.batch = [*map(int, output.num_scheduled_tokens)]
        return super().execute_model(output)


def dry_core(max_loras: int, seats: int, ranks: Sequence[int], fair: bool = False) -> Rows:
    """The engine's scheduler with adapters, without a model. Adapter k has rank ranks[k]."""
    manager = LoRAModelManager(LoRAConfig(max_loras, max(ranks), max(max_loras, len(ranks)), fair=fair))
    manager.memory, manager.block_pool = NoMemory(), BlockPool(2)
    for k, rank in enumerate(ranks):
        manager.add_adapter(str(k), LoRAModel(str(k), rank, {}))
    config = SchedulerConfig(max_model_len=64, max_num_seqs=seats, max_num_batched_tokens=4096)
    core = Rows(make_scheduler(config, 1 + 4 * seats, 16, False, adapters=manager))
    core.lora = manager
    return core


def dry_request(i: int, adapter: int, tokens: int = 2) -> Request:
    """Request `i` of one prompt token, for the adapter of that number."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return Request(str(i), [0], params, arrival_time=i, lora_name=str(adapter))


# --- The simulation: the widget's twin ------------------------------------------------------------------------------

TRAFFIC = ("round robin", "bursts of 4", "Zipf")
WIDGET_DEFAULT: dict[str, Any] = {
    "adapters": 8, "max_loras": 8, "traffic": "round robin", "batch": 1, "ranks": "all 8", "sort": True,
}  # fmt: skip
WIDGET_CHOICES = {
    "adapters": (1, 2, 4, 7, 8, 9, 12, 16), "max_loras": (1, 2, 4, 8), "traffic": TRAFFIC, "batch": (1, 4, 8),
    "ranks": ("all 8", "one 64"), "sort": (True, False),
}  # fmt: skip
REQUESTS = 48


def sequence(traffic: str, adapters: int, count: int) -> list[int]:
    """The adapter of each request."""
    if traffic == "Zipf":
        return lesson.zipf(adapters, count)
    return [(i if traffic == "round robin" else i // 4) % adapters for i in range(count)]


def simulate(params: dict[str, Any]) -> dict[str, Any]:
    """Who is resident, who waits for a slot, and what a step's rows look like to the kernels, from the real scheduler
    and the real caches. Raises InputError."""
    p = checked(params, WIDGET_CHOICES)
    ranks = [64 if k == 0 and p["ranks"] == "one 64" else 8 for k in range(p["adapters"])]
    core = dry_core(p["max_loras"], p["batch"], ranks)
    manager, scheduler, steps = core.lora, core.scheduler, []
    of = sequence(p["traffic"], p["adapters"], REQUESTS)
    for i, adapter in enumerate(of):
        core.add_request(dry_request(i, adapter))
    while scheduler.has_unfinished_requests():
        before = dict(manager.slots)
        core.step()
        rows = [[i, of[i]] for i in core.batch]
        meta = LoRAKernelMeta.build([manager.slots[str(k)] for _, k in rows], torch.device("cpu"), p["sort"])
        name_of = {slot: int(name) for name, slot in manager.slots.items()}
        steps.append(
            {
                "rows": rows,
                "tiles": [[name_of[slot], count] for _, count, slot in meta.tiles.tolist()],
                "slots": [name_of.get(slot, NONE) for slot in range(p["max_loras"])],
                "lru": [*map(int, manager.slots)],
                "loaded": [int(name) for name, slot in manager.slots.items() if before.get(name) != slot],
                "passed_over": [*map(int, scheduler.waiting_for_adapter)],
                "queue": [int(request.request_id) for request in scheduler.waiting],
            }
        )
    kib = 2 * max(ranks) * PER_RANK // 1024
    used = 2 * sum(ranks[k] for k in steps[-1]["lru"]) * PER_RANK // 1024
    return {"params": p, "ranks": ranks, "adapter_of": of, "steps": steps, "requests": REQUESTS,
            "loads": manager.counts["load"], "slot_kib": kib, "reserved_kib": kib * p["max_loras"], "used_kib": used,
            "weight_reads": sum(len(step["tiles"]) for step in steps)}  # fmt: skip


def letter(adapter: int) -> str:
    """A, B, …; a dot for an empty slot."""
    return "·" if adapter == NONE else chr(65 + adapter)


def describe(trace: dict[str, Any]) -> str:
    """The state under the widget, as text."""
    p, steps = trace["params"], trace["steps"]
    lines = [
        f"{p['adapters']} adapters, {p['max_loras']} slots, {p['traffic']}, {p['batch']} per batch: {len(steps)} steps",
        f"{trace['requests']} requests, {trace['loads']} adapter loads",
        f"one slot {trace['slot_kib']:,} KiB, all {trace['reserved_kib']:,} KiB, in use {trace['used_kib']:,} KiB",
        f"adapters read by the kernels, summed over steps: {trace['weight_reads']}",
    ]
    for i, step in enumerate(steps[:8]):
        rows, tiles = "".join(letter(k) for _, k in step["rows"]), " ".join(f"{letter(k)}{n}" for k, n in step["tiles"])
        loaded = f", loads {''.join(map(letter, step['loaded']))}" if step["loaded"] else ""
        passed = f", {len(step['passed_over'])} passed over" if step["passed_over"] else ""
        lines.append(f"step {i}: rows {rows} as {tiles}, slots {''.join(map(letter, step['slots']))}{loaded}{passed}")
    return "\n".join(lines)


# --- Numbers that the text quotes -----------------------------------------------------------------------------------

POPULARITY = ("identical", "Zipf 1.5", "uniform", "distinct")
# Chen et al. 2023, Figure 8 and text: one operator, rank 16, A100 80GB, µs at batch 1 and 64. Their "Zipf-1.5" is
# geometric: each adapter has 1.5 times the rows of the next, so 64 rows have 9 adapters, and as uniform ones take 46.
PUNICA = {"identical": (37, 40), "Zipf 1.5": ("", ""), "uniform": (37, 46), "distinct": (37, 116)}


def popularity(kind: str, rows: int, seed: int = 0) -> list[int]:
    """The adapter of each row of a batch. As in Punica's benchmarks, uniform is over ⌈√rows⌉ adapters."""
    rng = random.Random(seed)
    if kind == "identical":
        return [0] * rows
    if kind == "distinct":
        return list(range(rows))
    if kind == "uniform":
        count = int(np.ceil(rows**0.5))
        return rng.sample([i % count for i in range(rows)], rows)
    return rng.choices(range(rows), [1 / (k + 1) ** 1.5 for k in range(rows)], k=rows)


def groups() -> dict[str, dict[str, float]]:
    """Of 64 rows of one layer 4096 → 4096 at rank 16 in bf16, by popularity: adapters, tiles, and what is read."""
    found, cpu = {}, torch.device("cpu")
    for kind in POPULARITY:
        slots = popularity(kind, 64)
        tiles, unsorted = (len(LoRAKernelMeta.build(slots, cpu, sort).tiles) for sort in (True, False))
        found[kind.split()[0]] = {"adapters": len(set(slots)), "tiles": tiles, "unsorted": unsorted,
                                  "mib": len(set(slots)) * 16 * 2 * 4096 * 2 / 2**20}  # fmt: skip
    return found


def hit_rate(traffic: str, num_adapters: int, slots: int = 8, count: int = 720) -> float:
    """Share of requests, one at a time, whose adapter is resident."""
    core = dry_core(slots, 1, [8] * num_adapters)
    for adapter in sequence(traffic, num_adapters, count):
        core.lora.make_resident(str(adapter), set())
    return core.lora.counts["hit"] / count


def fairness(fair: bool) -> dict[str, float]:
    """A tenant with 64 requests, and one with 4 that come later; 4 seats, 8 tokens each. Mean wait in steps."""
    core = dry_core(2, 4, [8, 8], fair)
    arrivals = {**dict.fromkeys(range(64), 0), **{64 + i: 4 for i in range(4)}}
    first, step = {}, 0
    while core.scheduler.has_unfinished_requests() or step <= 4:
        for i in [i for i, at in arrivals.items() if at == step]:
            core.add_request(dry_request(i, 0 if i < 64 else 1, 8))
        core.step()
        for i in core.batch:
            first.setdefault(i, step)
        step += 1

    def mean(ids: Sequence[int]) -> float:
        return sum(first[i] - arrivals[i] for i in ids) / len(ids)

    return {"heavy": mean(range(64)), "light": mean(range(64, 68)), "steps": step}


def matrix_sizes(shape: LayerShape, rank: int) -> list[tuple[int, int]]:
    """(rows, width) of A of all slices, and of each slice's Bᵀ."""
    return [(rank * len(shape.slices), shape.in_features), *((rank, width) for width in shape.slices)]


def shapes_alone(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> llama.Llama:
    """A model without weights: what memory for adapters asks of one."""
    model = llama.Llama.__new__(llama.Llama)
    model.config, model.device, model.dtype = config, device, dtype
    return model


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers."""
    small, large = LlamaConfig(**SMOLLM), LlamaConfig(**LLAMA_8B)
    per_rank = {name: parameters_per_rank(config) for name, config in (("small", small), ("large", large))}
    weights = sum(int(np.prod(shape)) for shape in llama.tensor_shapes(small).values())
    kv = torch.empty(2, 1024, 16, 3, 64, device="meta")
    model = shapes_alone(small, torch.device("meta"), torch.float32)
    unified = UnifiedMemory(model, 1, 64, argparse.Namespace(layers=[kv]))
    pages = {
        r: -(
            -sum(
                -(-rows // (unified.page // width))
                for kind in unified.shapes
                for rows, width in matrix_sizes(unified.shapes[kind], r)
            )
            // 2
        )
        for r in (8, 16, 64)
    }
    block = kv[:, 0].numel() * small.num_hidden_layers
    default = simulate(WIDGET_DEFAULT)
    return {
        "parameters_r8": 8 * per_rank["small"], "share_r8": 8 * per_rank["small"] / weights,
        "mb_fp16_r8": 16 * per_rank["small"] / 1e6, "llama_8b_mb_r16": 32 * per_rank["large"] / 1e6,
        "slot_mb": {str(r): 4 * r * per_rank["small"] / 1e6 for r in (8, 16, 64)},
        "eight_slots_mb": {str(r): 32 * r * per_rank["small"] / 1e6 for r in (8, 64)},
        "blocks": {str(r): n for r, n in pages.items()}, "blocks_ideal_r8": 8 * per_rank["small"] / block,
        "blocks_tokens_r8": 16 * pages[8], "block_kib": 4 * block / 1024,
        "hits": {f"{traffic.split()[0]}_{n}": hit_rate(traffic, n) for traffic in ("round robin", "Zipf")
                 for n in (8, 9, 16, 64)},
        "groups": groups(), "fair": {"fcfs": fairness(False), "vtc": fairness(True)},
        "widget": {"loads": default["loads"], "requests": default["requests"]},
        "default": {name: getattr(LoRAConfig(), name) for name in ("max_loras", "max_lora_rank")},
    }  # fmt: skip


# --- Figures --------------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """One batch on its way through a layer, and what one adapter too many does to a cache."""
    return [draw_batch(folder), draw_hits(folder)]


def draw_batch(folder: str | Path) -> Path:
    figure, ax = figures.new_figure(8.0, 3.7)
    rows, c = [0, 1, NONE, 0, 2, 1, NONE, 0], figures.COLORS
    colors, names = [c["orange"], c["blue"], c["green"], c["grey"]], ["A", "B", "C", "–"]
    meta = LoRAKernelMeta.build(rows, torch.device("cpu"))
    for t, slot in enumerate(rows):
        ax.add_patch(_box(0.0, -t, 1.6, 0.8, colors[slot], 0.85))
        ax.text(0.8, -t + 0.4, f"row {t}: {names[slot]}", ha="center", va="center", color="white", weight="bold")
    ax.add_patch(_box(2.7, -7, 1.5, 7.8, c["light"], 1.0))
    ax.text(3.45, -3.1, "x Wᵀ\n\nonce,\nfor all rows", ha="center", va="center")
    y, where = 0.0, {}
    for slot, start, stop in meta.segments:
        height = stop - start
        ax.add_patch(_box(5.3, y - height + 0.8, 1.3, height - 0.2, colors[slot], 0.85))
        listed = f"row{'s' * (height > 1)} " + ", ".join(map(str, meta.order[start:stop].tolist()))
        ax.text(5.95, y - height / 2 + 0.7, listed, ha="center", va="center", color="white", fontsize=9)
        rank = {0: 0.5, 1: 0.9, 2: 0.5}[slot]
        for x, width, label in ((7.0, rank, "Aᵀ"), (8.35, 1.1, "Bᵀ")):
            ax.add_patch(_box(x, y - height / 2 + 0.35, width, 0.7, colors[slot], 0.35))
            ax.text(x + width / 2, y - height / 2 + 0.7, label, ha="center", va="center")
        where[slot] = y - height / 2 + 0.7
        y -= height + 0.4
    for t, slot in enumerate(rows):
        if slot != NONE:
            ax.plot([1.65, 2.65], [-t + 0.4] * 2, color=colors[slot], linewidth=1)
            ax.plot([4.25, 5.25], [-t + 0.4, where[slot]], color=colors[slot], linewidth=1)
        else:
            ax.plot([1.65, 2.65], [-t + 0.4] * 2, color=c["grey"], linewidth=1)
    for x, text in ((0.8, "the batch"), (3.45, "the base model"), (5.95, "tiles"), (8.1, "shrink, expand")):
        ax.text(x, 1.15, text, ha="center", weight="bold")
    ax.set(xlim=(-0.2, 9.7), ylim=(-7.3, 1.7), xticks=[], yticks=[])
    for spine in ax.spines.values():
        spine.set_visible(False)
    return figures.save_figure(figure, folder, "12_batch")


def _box(x: float, y: float, width: float, height: float, color: str, alpha: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=color, alpha=alpha, linewidth=0)


def draw_hits(folder: str | Path) -> Path:
    figure, ax = figures.new_figure(8.0, 3.0)
    counts = (4, 7, 8, 9, 10, 12, 16, 32, 64)
    for traffic, color in (("round robin", "red"), ("Zipf", "blue")):
        ax.plot(counts, [100 * hit_rate(traffic, n) for n in counts], "o-", color=figures.COLORS[color], label=traffic)
    ax.axvline(8, color=figures.COLORS["grey"], linewidth=0.8, linestyle=":")
    ax.set(xscale="log", xlabel="adapters asked for", ylabel="found in a slot, %", ylim=(-3, 103), title="8 slots, LRU")
    ax.set_xticks(counts, counts)
    ax.minorticks_off()
    ax.legend()
    return figures.save_figure(figure, folder, "12_slots")


# --- Measurements ---------------------------------------------------------------------------------------------------


def measure_popularity(batches: Sequence[int], hidden: int, rank: int, seconds: float) -> dict[str, Any]:
    """One layer hidden → hidden: what adapters add to it, by who shares; a loop over requests; the layer itself. µs."""
    config = LlamaConfig(
        **{
            **SMOLLM,
            "hidden_size": hidden,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": hidden // 64,
            "num_key_value_heads": 1,
        }
    )
    dtype, found = torch.bfloat16 if common.HAS_GPU else torch.float32, {}
    model = shapes_alone(config, common.device(), dtype)  # one layer is enough
    memory = SlotMemory(model, max(batches), rank)
    for slot in range(max(batches)):
        memory.write(slot, lora_model.random_adapter(config, rank, slot, targets=("o_proj",), dtype=dtype))
    weight = torch.randn(hidden, hidden, dtype=dtype, device=model.device)

    def us(run: Callable[..., Any], *args: Any) -> float:
        return timing.measure_graph(functools.partial(run, *args), seconds).median * 1e6

    for rows in batches:
        x = torch.randn(rows, hidden, dtype=dtype, device=model.device)
        y, times = torch.zeros_like(x), {}
        for kind in POPULARITY:
            meta = LoRAKernelMeta.build(popularity(kind, rows), model.device)
            times[kind.split()[0]] = us(lesson.add_lora, y, x, memory, 0, "o_proj", meta)
        pairs = [memory.layer(slot, 0, "o_proj") for slot in popularity("distinct", rows)]
        times["loop"] = us(loop_over_requests, y, x, pairs)
        times["base"] = us(torch.matmul, x, weight.T)
        found[str(rows)] = times
    return found


def loop_over_requests(y: torch.Tensor, x: torch.Tensor, pairs: Sequence[Any]) -> None:
    """What a server without batched kernels does: two products per row, each with the row's own adapter."""
    for t, (a, [(_, _, b)]) in enumerate(pairs):
        y[t : t + 1] += x[t : t + 1] @ a.T @ b


def add_random(manager: LoRAModelManager, model: llama.Llama, ranks: Iterable[int], **about: Any) -> None:
    """Make adapters a0, a1, … known. Each is made when it is asked for: that is part of the price of many."""
    for i, rank in enumerate(ranks):
        make = functools.partial(lora_model.random_adapter, model.config, rank, i, dtype=model.dtype, **about)
        manager.add_lazily(f"a{i}", make)


def measure_throughput(model: llama.Llama, tokenizer: Tokenizer) -> dict[str, float]:
    """Requests per second by the number of adapters, as in S-LoRA; 8 adapters in both kinds of memory."""
    rng, rows, found = random.Random(0), [], {}
    prompts = [{"prompt_token_ids": [rng.randrange(1000, 40000) for _ in range(16)]} for _ in range(32)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    kinds = [(str(n) if n else "no adapters", n, "slots") for n in (0, 1, 5, 8, 100, 1000)]
    for name, count, memory in (*kinds, ("8, pages", 8, "unified")):
        config = LoRAConfig(8, 8, 128, memory=memory)
        llm = lesson.make_llm(model, tokenizer, config, max_model_len=128, max_num_seqs=32, num_gpu_blocks_override=700)
        add_random(llm.llm_engine.lora, model, [8] * count)
        chosen = [LoRARequest(f"a{rng.randrange(count)}") if count else None for _ in prompts]
        rates = []
        for _ in range(2 if count < 100 else 1):
            start = time.perf_counter()
            llm.generate(prompts, params, lora_request=chosen)
            rates.append(len(prompts) / (time.perf_counter() - start))
        found[name.replace(", ", "_").replace(" ", "_")] = max(rates)
        rows.append([name, f"{max(rates):.2f}", llm.llm_engine.lora.counts["load"]])
    common.table(["adapters", "requests/s", "loads"], rows)
    return found


def serve_thousand(
    model: llama.Llama, tokenizer: Tokenizer, seed: int = 0, count: int = 1000, requests: int = 16, tokens: int = 3
) -> dict[str, float]:
    """`count` adapters known, 8 slots, each request its own adapter, from pages of the KV cache."""
    config = LoRAConfig(8, 8, 64, memory="unified")
    llm = lesson.make_llm(model, tokenizer, config, max_model_len=128, max_num_seqs=8, num_gpu_blocks_override=160)
    manager, chosen = llm.llm_engine.lora, random.Random(seed).sample(range(count), requests)
    add_random(manager, model, [2 + i % 3 for i in range(count)], size=1.0, targets=("q_proj", "v_proj"))
    prompt = {"prompt_token_ids": tokenizer.encode("Once upon a time, in a small village by the sea,")}
    params, start = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), time.perf_counter()
    outputs = llm.generate([prompt] * requests, params, lora_request=[LoRARequest(f"a{i}") for i in chosen])
    seconds = time.perf_counter() - start
    answers = [tuple(output.outputs[0].token_ids) for output in outputs]
    common.say(
        f"{count} adapters known, {requests} asked for, {manager.counts['load']} loads into 8 slots, "
        f"{manager.counts['evict']} evictions; {len(set(answers))} different answers"
    )
    for i in (0, requests - 1):
        alone = lora_model.merged(model, manager.sources[f"a{chosen[i]}"]())
        same = naive.generate(alone, prompt["prompt_token_ids"], tokens)
        common.check_equal(f"adapter {chosen[i]} writes what it writes merged", list(answers[i]), same)
    held = sum(map(len, manager.blocks.values()))
    manager.check()
    common.say(f"8 adapters are resident in {held} KV blocks; the others have none")
    while manager.evict_idle(set()):
        pass
    pool = manager.block_pool
    common.check_equal("evicted, they leave the pool whole", pool.num_free_blocks, pool.num_blocks - 1)
    return {"seconds": seconds, "loads": manager.counts["load"]}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What `--bench` measures: popularity as in Punica, throughput as in S-LoRA, a thousand adapters."""
    model, tokenizer = loader.load(args.model)
    common.heading("A thousand adapters in one process, their weights in pages of the KV cache")
    bench: dict[str, Any] = {"thousand": serve_thousand(model, tokenizer, args.seed)}
    common.heading("Popularity: one layer 4096 → 4096, rank 16; µs by rows in the batch")
    found = bench["popularity"] = measure_popularity((1, 2, 4, 8, 16, 32, 64), 4096, 16, 0.3)
    kinds = [*(kind.split()[0] for kind in POPULARITY), "loop", "base"]
    common.table(["rows", *found], [[kind, *(f"{found[b][kind]:,.0f}" for b in found)] for kind in kinds])
    common.say(
        "Punica on an A100, at 1 row and at 64: "
        + ", ".join(f"{kind} {few} and {many}" for kind, (few, many) in PUNICA.items() if few)
    )
    common.heading("Throughput by number of adapters: 32 requests, 16 tokens in, 8 out, 8 slots, rank 8")
    bench["throughput"] = measure_throughput(model, tokenizer)
    return bench
