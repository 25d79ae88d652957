"""Parallel layouts: experts dealt out to ranks, and what each layout costs. For lesson 06c.

A mixture-of-experts layer keeps E small MLPs and sends each token through k of them. Cut every expert into n slices,
and the layer is lesson 05c's again. Deal whole experts out instead, and tokens must travel: to the ranks that have
their experts, and back. Here are both, beside the obvious loop, and sequence parallelism, which keeps ranks that hold
the same tokens from sending them n times.

The second half is arithmetic: weights, cache, collectives and bubbles of Llama-3.1-8B, 70B, 405B and DeepSeek-R1 on
nodes of eight H100s, for choosing `--tensor-parallel-size` and its sisters before renting anything.

Read for this: Shazeer et al. 2017 (mixtures of experts), Lepikhin et al. 2020 (GShard: all-to-all), Korthikanti et al.
2022 (sequence parallelism), DeepSeek-AI 2024 (V3), vLLM 0.32 `model_executor/layers/fused_moe/`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine.distributed.group import GroupCoordinator
from engine.experts.config import MoEConfig
from engine.experts.layer import MoELayer
from engine.experts.routing import route
from engine.experts.stacked import StackedExperts
from engine.model.config import LlamaConfig
from engine.parallel.eplb import Placement
from engine.parallel.experts import ReducedExperts, dispatch
from engine.parallel.sharding import divides, experts_of
from lab import figures, roofline
from lab.hardware import HARDWARE
from lab.links import LINKS, Link, wire_bytes

# --- 1. A mixture of experts, and the obvious way to compute it -------------------------------------------------------


def random_moe(
    num_experts: int = 12,
    hidden: int = 64,
    intermediate: int = 48,
    top_k: int = 2,
    seed: int = 0,
    device: torch.device | None = None,
) -> MoELayer:
    """A seeded layer, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(device)

    gate_up, down = noise(num_experts, 2 * intermediate, hidden), noise(num_experts, hidden, intermediate)
    experts = StackedExperts(range(num_experts), gate_up, down)
    return MoELayer(MoEConfig(num_experts, top_k, intermediate), noise(num_experts, hidden), experts)


def choose(layer: MoELayer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What each chosen expert's word counts, and which experts these are. Shapes: x [T, H] -> weights, ids [T, k]."""
    return route(x @ layer.gate.T, layer.config)


def moe_reference(layer: MoELayer, x: torch.Tensor) -> torch.Tensor:
    """y_t = Σ_j w_tj · expert_{i_tj}(x_t), token by token, expert by expert. [T, H] -> [T, H]."""
    weights, ids = choose(layer, x)
    y = torch.zeros_like(x)
    for t in range(len(x)):
        for e, w in zip(ids[t], weights[t]):
            y[t] += w * stacked(layer).one(int(e), x[t : t + 1])[0]
    return y


# --- 2. The same on n ranks -------------------------------------------------------------------------------------------


def stacked(layer: MoELayer) -> StackedExperts:
    """The experts of a layer of `random_moe`, which are floats."""
    assert isinstance(layer.experts, StackedExperts)
    return layer.experts


def tensor_parallel_moe(layer: MoELayer, x: torch.Tensor, group: GroupCoordinator) -> torch.Tensor:
    """Every rank has a slice of every expert, all ranks have all tokens, and partial sums are added. [T, H]."""
    n, r, whole = group.world_size, group.rank_in_group, stacked(layer)
    gate, up = whole.gate_up.chunk(2, dim=1)
    mine = StackedExperts(
        whole.held, torch.cat([gate.chunk(n, 1)[r], up.chunk(n, 1)[r]], 1), whole.down.chunk(n, 2)[r].contiguous()
    )
    return ReducedExperts(mine, group)(x, *choose(layer, x))


def expert_parallel_moe(layer: MoELayer, x: torch.Tensor, group: GroupCoordinator) -> torch.Tensor:
    """Rank r owns experts [r·E/n, (r+1)·E/n). `x` are this rank's own tokens, [T/n, H]; returns their results."""
    whole, held = stacked(layer), experts_of(layer.config, group.rank_in_group, group.world_size)
    mine = StackedExperts(held, whole.gate_up[held.start : held.stop], whole.down[held.start : held.stop])
    return dispatch(x, *choose(layer, x), mine, group, Placement.plain(layer.config.num_experts, group.world_size))


def sequence_parallel_block(
    layer: MoELayer, partial: torch.Tensor, norm: torch.Tensor, group: GroupCoordinator
) -> torch.Tensor:
    """What follows attention: add up its partial sums, norm, experts. partial [T, H] -> [T, H] on every rank.

    An all-reduce is a reduce-scatter and an all-gather. Between the two, each rank has T/n tokens of its own: the place
    for all that is done token by token, and where experts must be asked, or each token would be sent n times.
    """
    T = len(partial)
    mine = group.reduce_scatter(F.pad(partial, (0, 0, 0, -T % group.world_size)))  # [T/n, H]
    x = F.rms_norm(mine, mine.shape[-1:], norm)
    return group.all_gather(mine + expert_parallel_moe(layer, x, group), dim=0)[:T]


def moe_on_rank(worker: Any, seed: int = 0) -> dict[str, Any]:
    """What one worker of an executor does to show it: all three, their errors and their bytes."""
    return moe_errors(worker.tp, seed)


def moe_errors(group: GroupCoordinator, seed: int = 0, tokens: int = 48) -> dict[str, Any]:
    """One rank: relative error and collectives of a layer of experts, sharded in three ways, to the whole one."""
    n, r, layer = group.world_size, group.rank_in_group, random_moe(seed=seed, device=group.device)
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(seed + 1)).to(group.device)
    want = moe_reference(layer, x)
    found = {"tensor": common.relative_error(tensor_parallel_moe(layer, x, group), want)}
    counts = {"tensor": group.take_counts()}
    mine = x.chunk(n)[r]
    found["expert"] = common.relative_error(expert_parallel_moe(layer, mine, group), want.chunk(n)[r])
    counts["expert"] = group.take_counts()
    norm = torch.ones(64, device=group.device)
    block = x + moe_reference(layer, F.rms_norm(x, (64,), norm))
    found["sequence"] = common.relative_error(sequence_parallel_block(layer, x / n, norm, group), block)
    counts["sequence"] = group.take_counts()
    return {"errors": found, "counts": counts}


def rows_sent(layer: MoELayer, x: torch.Tensor, n: int) -> list[int]:
    """Pairs (token, expert) that leave each of n ranks in a dispatch: those whose expert lives elsewhere."""
    size, sent = layer.config.num_experts // n, []
    for r, mine in enumerate(x.chunk(n)):
        _, ids = choose(layer, mine)
        sent.append(int((ids // size != r).sum()))
    return sent


# --- 3. What a layout costs -------------------------------------------------------------------------------------------

H100 = HARDWARE["H100 80GB"]
GPUS_PER_NODE = 8
# In a node: lesson 05c's NVLink (NVIDIA's measurements on an H200, whose NVLink is the same). Between nodes: one
# 400 Gb/s adapter per GPU at its nominal rate; 30 µs for a small all-reduce and 10 for a message are assumptions.
NVLINK, NETWORK, HOP = LINKS["nvlink"], Link(50e9, 30e-6), Link(50e9, 10e-6)
ETHERNET = Link(12.5e9 / 8, 60e-6)  # 100 Gb/s for the whole node


@dataclasses.dataclass(frozen=True)
class Model:
    """What sizing needs to know. Experts apart, `shared` is read in every step; bytes are those of the checkpoint."""

    name: str
    layers: int
    hidden: int
    shared_bytes: float  # weights that every token uses
    active: float  # parameters that one token uses
    kv_bytes: int  # per token, all layers
    kv_heads: int  # 1: MLA, whose latent vector cannot be cut
    expert_bytes: float = 0.0
    experts: int = 0
    top_k: int = 0

    def expert_bytes_read(self, tokens: float) -> float:
        """Expected bytes of the experts that `tokens` tokens ask: E·(1 − (1 − k/E)^T) of E."""
        return self.expert_bytes * (1 - (1 - self.top_k / self.experts) ** tokens) if self.experts else 0.0


LLAMA_405B = dict(num_hidden_layers=126, num_attention_heads=128, num_key_value_heads=8, hidden_size=16384,
                  intermediate_size=53248, vocab_size=128256, tie_word_embeddings=False)  # fmt: skip
# DeepSeek-R1: 58 of 61 layers have 256 experts of 3 · 7168 · 2048 parameters, in fp8; each token visits 8.
R1_EXPERTS = 58 * 256 * 3 * 7168 * 2048


@functools.cache
def models() -> dict[str, Model]:
    """The models of the sizing tables: dense ones by lesson 01, DeepSeek-R1 by its published weights."""
    found = {}
    for name, config, bits in (
        ("Llama-3.1-8B", roofline.MODELS["Llama-3.1-8B"], 16),
        ("Llama-3.1-70B", roofline.MODELS["Llama-3.1-70B"], 16),
        ("Llama-3.1-405B", LLAMA_405B, 16),
        ("Llama-3.1-405B-FP8", LLAMA_405B, 8),
    ):
        parameters = roofline.weight_bytes(config) // 2
        found[name] = Model(
            name,
            config["num_hidden_layers"],
            config["hidden_size"],
            parameters * bits // 8,
            parameters,
            roofline.KVCacheSpec.from_config(config).bytes_per_token(),
            8,
        )
    r1 = roofline.MODELS["DeepSeek-V3"]
    found["DeepSeek-R1"] = Model(
        "DeepSeek-R1",
        61,
        7168,
        671e9 - R1_EXPERTS,
        37e9,
        roofline.KVCacheSpec.from_config(r1).bytes_per_token(),
        1,
        R1_EXPERTS,
        256,
        8,
    )
    return found


@dataclasses.dataclass(frozen=True)
class Layout:
    """TP × PP per engine, `dp` engines. `ep`: experts are dealt out over all GPUs, attention is each engine's own."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: bool = False

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        parts = [f"{name} {n}" for name, n in (("DP", self.dp), ("TP", self.tp), ("PP", self.pp)) if n > 1]
        return " × ".join(parts) + (" + EP" if self.ep else "") if parts else "one GPU"


def all_reduce_seconds(payload: float, n: int, between: Link = NETWORK) -> float:
    """In a node a ring. Across nodes: reduce-scatter inside, all-reduce of an eighth between, all-gather inside."""
    if n <= GPUS_PER_NODE:
        return NVLINK.seconds("all_reduce", payload, n)
    nodes = n // GPUS_PER_NODE
    return NVLINK.seconds("all_reduce", payload, GPUS_PER_NODE) + between.seconds(
        "all_reduce", payload / GPUS_PER_NODE, nodes
    )


def cost(
    model: Model,
    layout: Layout,
    sequences: int = 256,
    context: int = 4096,
    tokens_each: int = 1,
    between: Link = NETWORK,
) -> dict[str, float]:
    """Memory, and one step of `sequences` sequences in all (`tokens_each` new ones each), by arithmetic.

    memory   = weights/(TP·PP) + KV; KV heads are divided by TP as far as there are any
    stage    = max(FLOPs/(TP·rate), bytes/(TP·bandwidth)) of L/PP layers + 2·L/PP all-reduces
    latency  = PP stages + PP − 1 hops;  throughput = a micro-batch per stage, if PP micro-batches are in flight
    Experts count as asked evenly. A single token asks 8 of R1's, and on 16 GPUs one of them has two or three of those
    to read, not half of one: 1.2 ms more than here.
    """
    tp, pp, dp = layout.tp, layout.pp, layout.dp
    spread = layout.gpus if layout.ep else tp * pp
    weights = model.shared_bytes / (tp * pp) + model.expert_bytes / spread
    kv = model.kv_bytes / pp / min(tp, model.kv_heads)  # per token and GPU
    room = roofline.GPU_MEMORY_UTILIZATION * H100.memory - weights
    batch = max(1, sequences / dp / pp)  # of a micro-batch: one sequence alone leaves other engines and stages idle
    new = batch * tokens_each
    asked = max(1, sequences / pp) * tokens_each if layout.ep else new  # tokens whose experts one pool looks up
    read = model.shared_bytes / (tp * pp) + model.expert_bytes_read(asked) / spread
    moved = read + batch * kv * context
    rate = H100.flops * (2 if model.name.endswith(("FP8", "R1")) else 1)
    compute = max(2 * model.active * new / (tp * pp) / rate, moved / H100.bandwidth)
    payload = new * model.hidden * 2
    talk = 2 * model.layers / pp * (all_reduce_seconds(payload, tp, between) if tp > 1 else 0)
    if layout.ep:  # dispatch in fp8 and combine in bf16, per layer: k copies of each token, all at the adapter's rate
        talk += model.layers * 2 * (HOP.latency + 1.5 * model.top_k * payload / 2 / HOP.bandwidth)
    stage = compute + talk
    hop = HOP.latency + payload / tp / HOP.bandwidth if pp > 1 else 0.0
    return {
        "gpus": layout.gpus, "weights_gb": weights / 1e9, "fits": room > 0,
        "kv_tokens": max(0.0, dp * room / kv), "kv_copies": max(1.0, tp / model.kv_heads),
        "latency_ms": 1e3 * (pp * stage + (pp - 1) * hop), "stage_ms": 1e3 * stage, "talk_ms": 1e3 * pp * talk,
        "tokens_per_second": dp * new / (stage + hop),
    }  # fmt: skip


def loaded(model: Model, layout: Layout, wanted: int = 256, context: int = 4096) -> dict[str, float]:
    """`cost` with as many of `wanted` sequences as the KV cache holds."""
    sequences = min(wanted, int(cost(model, layout)["kv_tokens"] // context))
    return {"sequences": sequences} | cost(model, layout, sequences, context)


def default_size(config: LlamaConfig) -> int:
    """Ranks where nobody asked for a number: 3, which SmolLM2 allows; for another model the fewest above one that can
    share it, or 1 if none can."""
    return next((n for n in (3, *range(2, config.num_attention_heads + 1)) if divides(config, n)), 1)


CHOICES: dict[str, list[Layout]] = {  # on two nodes of eight
    "Llama-3.1-8B": [Layout(dp=16), Layout(tp=8, dp=2), Layout(tp=8, pp=2)],
    "Llama-3.1-70B": [Layout(tp=4, dp=4), Layout(tp=8, dp=2), Layout(tp=8, pp=2)],
    "Llama-3.1-405B": [Layout(tp=8, pp=2), Layout(tp=16)],
    "Llama-3.1-405B-FP8": [Layout(tp=8, dp=2), Layout(tp=8, pp=2)],
    "DeepSeek-R1": [Layout(tp=8, pp=2), Layout(tp=16), Layout(dp=16, ep=True)],
}


@functools.cache
def facts() -> dict[str, Any]:
    """Deterministic numbers of this half."""
    sizing: dict[str, Any] = {}
    for name, choices in CHOICES.items():
        for layout in choices:
            key = str(layout).lower().replace(" ", "").replace("×", "_").replace("+", "_")
            found = loaded(models()[name], layout)
            found["alone_ms"] = cost(models()[name], layout, sequences=1)["latency_ms"]
            found["prefill_ms"] = cost(models()[name], layout, layout.dp * layout.pp, 4096, 4096)["latency_ms"]
            found["crowd"] = loaded(models()[name], layout, 1536)["tokens_per_second"]
            sizing.setdefault(roofline.slug(name), {})[key] = found
    # Two prompts: TP 16 computes both in one step; in a pipeline the second is done one stage after the first.
    tp16, tp8_pp2 = (
        cost(models()["Llama-3.1-405B"], layout, 2, 4096, 4096, ETHERNET)
        for layout in (Layout(tp=16), Layout(tp=8, pp=2))
    )
    slow = {"16": tp16["latency_ms"], "8": tp8_pp2["latency_ms"] + tp8_pp2["stage_ms"]}
    one_node = {
        roofline.slug(name): {
            "weights_gb": (m.shared_bytes + m.expert_bytes) / 1e9,
            "gpus": math.ceil((m.shared_bytes + m.expert_bytes) / (roofline.GPU_MEMORY_UTILIZATION * H100.memory)),
        }
        for name, m in models().items()
    }
    layer = random_moe()
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(1))
    sent = rows_sent(layer, x, 3)
    r1 = models()["DeepSeek-R1"]
    return {
        "sizing": sizing, "slow_prefill_ms": slow, "models": one_node,
        "node_gb": GPUS_PER_NODE * roofline.GPU_MEMORY_UTILIZATION * H100.memory / 1e9,
        "moe": {
            "experts": 12, "top_k": 2, "tokens": 48, "rows_sent": sum(sent), "pairs": 96,
            "dispatch_bytes": sum(sent) * 64 * 4, "all_reduce_bytes": 3 * wire_bytes("all_reduce", 48 * 64 * 4, 3),
            "r1_dispatch_fp8": r1.top_k * r1.hidden, "r1_combine_bf16": 2 * r1.top_k * r1.hidden,
            "r1_asked": {str(t): r1.expert_bytes_read(t) / r1.expert_bytes for t in (1, 8, 64, 256)},
        },
    }  # fmt: skip


def draw(folder: str | Path) -> list[Path]:
    """Tokens per second against time per token, for every layout: what each is good for."""
    figure, (speed, memory) = figures.new_figure(8.0, 7.4, nrows=2, height_ratios=[1, 1.1])
    marks = {"Llama-3.1-405B": "blue", "Llama-3.1-405B-FP8": "green", "DeepSeek-R1": "orange"}
    for name, color in marks.items():
        for layout, marker in zip(CHOICES[name], "osD"):
            curve = [cost(models()[name], layout, n) for n in (16, 32, 64, 128, 256, 512)]
            fitting = [c for c, n in zip(curve, (16, 32, 64, 128, 256, 512)) if c["kv_tokens"] >= n * 4096]
            speed.plot(
                [c["latency_ms"] for c in fitting],
                [c["tokens_per_second"] for c in fitting],
                f"{marker}-",
                color=figures.COLORS[color],
                markersize=5,
                linewidth=1.2,
                label=f"{name.removeprefix('Llama-3.1-')}, {layout}",
            )
    speed.set(xlabel="ms per token", ylabel="output tokens/s", xlim=(0, None), ylim=(0, None))
    speed.set_title("Two nodes with 16, 32, … 512 sequences of 4,096 tokens")
    speed.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
    speed.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    rows = [(name, layout, cost(models()[name], layout)) for name, choices in CHOICES.items() for layout in choices]
    weights = [c["weights_gb"] for *_, c in rows]
    limit = roofline.GPU_MEMORY_UTILIZATION * H100.memory / 1e9
    copies = [(limit - c["weights_gb"]) * (1 - 1 / c["kv_copies"]) for *_, c in rows]
    own = [limit - w - b for w, b in zip(weights, copies)]
    hatched = {"color": "white", "edgecolor": figures.COLORS["blue"], "hatch": "////", "linewidth": 0.6}
    memory.barh(range(len(rows)), weights, color=figures.COLORS["grey"], label="weights")
    memory.barh(range(len(rows)), own, left=weights, color=figures.COLORS["blue"], label="KV cache")
    memory.barh(range(len(rows)), copies, left=[limit - b for b in copies], label="KV that others hold, too", **hatched)
    labels = [f"{name.removeprefix('Llama-3.1-')}, {layout}" for name, layout, _ in rows]
    memory.set_yticks(range(len(rows)), labels, fontsize=9)
    memory.tick_params(axis="y", length=0)
    memory.set_ylim(len(rows) - 0.4, -0.6)
    memory.set(xlabel=f"GB of each H100 (92 % of {H100.memory / 1e9:.1f})", title="What fills each GPU's memory")
    memory.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1.2)
    return [figures.save_figure(figure, folder, "06c_sizing")]
