"""05e · Experts: layers that a token uses a few parts of.

The question: a mixture of experts has ten times the weights that a token uses. What does a step read, what must travel
when the experts live on several GPUs, and who waits for whom?

The mechanism:
  1. A router scores E experts for each token, and the token visits the best k: softmax, top k, weights of sum 1.
  2. Pairs of a token and an expert are sorted by expert. A tile has rows of one expert, so it reads one matrix: the
     grouped kernel. Whoever is not asked is not read.
  3. A step of T tokens reads E · (1 − (1 − k/E)^T) experts: k for one token, nearly all for a few dozen.
  4. Each expert gets T · k / E rows. Until these are some 300, the step waits for memory.
  5. Expert parallelism: whole experts on each rank. Rows travel to their experts and back, in two all-to-alls.
  6. All ranks wait for the busiest. EPLB counts, copies what everybody wants, and packs busy experts with idle ones.

Numbers to remember: Qwen3-30B-A3B has 128 experts and a token visits 8: one token reads 8, 32 tokens read 112. With
16-bit weights an H100 computes as long as it reads at 4,700 tokens a step, not at 295 as in a dense model.

How to run:
  uv run python -m vllm.tours.05e_experts                         the whole story
  uv run python -m vllm.tours.05e_experts --skew 2                traffic that prefers fewer experts
  uv run python -m vllm.tours.05e_experts --capacity-factor 1.25  break it: full experts drop tokens, as in training
  uv run python -m vllm.tours.05e_experts --bench                 a minute: a layer by batch, also in 4 bits

Read for this: Shazeer et al. 2017 (mixtures of experts), Lepikhin et al. 2020 (GShard: all-to-all, capacity), Gale et
al. 2022 (MegaBlocks: no token dropped), DeepSeek-AI 2024 (V3: groups, biases, redundant experts), vLLM 0.32
`model_executor/layers/fused_moe/`, `distributed/eplb/`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from engine import arguments
from engine.distributed.group import GroupCoordinator
from engine.experts.grouped_matmul import align_block_size, fused_experts
from engine.experts.layer import MoELayer
from engine.experts.stacked import StackedExperts
from engine.model import llama, loader
from engine.model.tokenizer import Tokenizer
from engine.parallel.eplb import Placement, rebalance_experts, slot_tables
from engine.parallel.experts import dispatch, moved
from engine.parallel.ranks import Ranks, start_context
from lab import cli, experts, layouts, naive
from lab.hardware import HARDWARE

KEY = "05e_experts"

# The router is in engine/experts/routing.py, the layer in layer.py, the kernels in grouped_matmul.py and what a CPU
# does instead in stacked.py. What travels between ranks is in engine/parallel/experts.py, where experts stand in
# eplb.py. Here stands the loop that says what a layer means, and what a step costs.


# --- What a layer of experts means ------------------------------------------------------------------------------------


def token_by_token(layer: MoELayer, x: torch.Tensor) -> torch.Tensor:
    """y_t = Σ_j w_tj · W₂[e] (silu(W₁ᵍ[e] x_t) ⊙ W₁ᵘ[e] x_t), e = id_tj: no batch, no sorting. x [T, H] -> [T, H]."""
    these = layouts.stacked(layer)
    weights, ids = layouts.choose(layer, x)
    y = torch.zeros_like(x)
    for t in range(len(x)):
        for w, e in zip(weights[t], ids[t].tolist()):
            gate, up = (these.gate_up[e] @ x[t]).chunk(2)
            y[t] += w * (these.down[e] @ (F.silu(gate) * up))
    return y


def with_capacity(layer: MoELayer, x: torch.Tensor, factor: float) -> torch.Tensor:
    """The break: an expert takes its share of the batch times `factor`, first come, first served; the other pairs are
    dropped, as in GShard's training. [T, H] -> [T, H]."""
    weights, ids = layouts.choose(layer, x)
    room = max(1, int(factor * ids.numel() / layer.config.num_experts))
    asked = F.one_hot(ids.flatten(), layer.config.num_experts).cumsum(0)  # of each pair: how many came before
    kept = asked.gather(1, ids.flatten()[:, None]).view_as(ids) <= room
    return layer.experts(x, weights * kept, ids)


# --- The bill: what a step reads --------------------------------------------------------------------------------------

H100 = HARDWARE["H100 80GB"]


def read_ms(model: str, tokens: int) -> float:
    """Milliseconds in which an H100's memory, at its data sheet's rate, delivers a decode step's weights."""
    return 1e3 * experts.step_bytes(experts.MODELS[model], tokens) / H100.bandwidth


def dense_bytes(model: str, which: str) -> int:
    """What a dense model of as many parameters reads in any step: of all that the mixture has, or of a token's."""
    found = experts.parameters(experts.MODELS[model])
    return 2 * (found["active"] if which == "active" else found["shared"] + found["experts"])


# --- Experts on ranks -------------------------------------------------------------------------------------------------

RANKS = 4


def rank_story(group: GroupCoordinator, sizes: dict[str, int], x: torch.Tensor, spare: int) -> dict[str, Any]:
    """What each of n ranks does: its own tokens through everybody's experts, before EPLB and after it.

    `sizes` are those of a seeded layer, which is the same on all ranks. `x` [T, H] are all ranks' tokens; a rank takes
    its n-th of them, as attention with data parallelism leaves them.
    """
    n, r, layer = group.world_size, group.rank_in_group, layouts.random_moe(**sizes, device=group.device)
    whole, mine = layouts.stacked(layer), x.to(group.device).chunk(n)[r]
    weights, ids = layouts.choose(layer, mine)
    placement = Placement.plain(layer.config.num_experts, n)
    held = placement.slots(r)
    local = StackedExperts(held, whole.gate_up[held.start : held.stop], whole.down[held.start : held.stop])
    found: dict[str, Any] = {}
    # Every rank counts its own tokens, and all need the sum: whoever moved on other counts would be alone with them.
    load = group.all_reduce(ids.flatten().bincount(minlength=layer.config.num_experts))
    group.take_counts()
    for name in ("in order", "EPLB"):
        if name == "EPLB":
            better = rebalance_experts(load.tolist(), layer.config.num_experts + spare, n)
            local, placement = moved(local, group, placement, better), better
            found["moved"] = group.take_counts()["all_to_all"]["bytes"]
        y = dispatch(mine, weights, ids, local, group, placement)
        found[name] = {"y": y.cpu(), "sent": group.take_counts()["all_to_all"]["bytes"], "placement": placement}
    return found


def rows_of_ranks(ids: torch.Tensor, placement: Placement) -> list[int]:
    """How many rows each rank multiplies if each has an n-th of the tokens and replicas take turns. ids [T, k]."""
    slots, copies = slot_tables(placement, ids.device)
    found = [0] * placement.ranks
    for mine in ids.chunk(placement.ranks):
        turn = torch.arange(len(mine), device=ids.device)[:, None] % copies[mine]
        for slot in slots[mine, turn].flatten().tolist():
            found[placement.owner(slot)] += 1
    return found


# --- The story --------------------------------------------------------------------------------------------------------

BATCHES = (1, 8, 32, 256)
SEEDED = {"num_experts": 32, "intermediate": 64, "top_k": 4}


def tell_of_a_layer(seed: int, factor: float | None) -> None:
    """The loop, the experts one after the other, and the kernel, on a layer small enough for the interpreter."""
    layer = layouts.random_moe(num_experts=8, hidden=64, intermediate=48, seed=seed, device=common.device())
    x = torch.randn(24, 64, generator=torch.Generator().manual_seed(seed)).to(common.device())
    want, (weights, ids) = token_by_token(layer, x), layouts.choose(layer, x)
    tiles = align_block_size(ids, range(8), 16)
    rows = ids.flatten().bincount(minlength=8).tolist()
    common.say(f"24 tokens, 2 of 8 experts each; rows of each expert: {' '.join(map(str, rows))}")
    used = int((tiles.table[:, 0] >= 0).sum())
    common.say(f"sorted by expert and cut into tiles of 16 rows: {used} tiles, where 48 products read 48 matrices")
    common.check(
        "expert by expert against token by token", layer(x) if factor is None else with_capacity(layer, x, factor), want
    )
    if common.HAS_TRITON:
        with common.use_kernels():
            common.check(
                "two grouped kernels against token by token",
                fused_experts(x, weights, ids, layouts.stacked(layer)),
                want,
            )
    else:
        common.skipped("the grouped kernels", common.kernel_mode())


def hidden_states(model: llama.Llama, tokenizer: Tokenizer, count: int) -> torch.Tensor:
    """What an MLP in the middle of the model gets for the first tokens of this file's docstring: fp32 [T, H]."""
    ids = torch.tensor((tokenizer.encode(__doc__ or "") * count)[:count], device=model.device)
    half = range(model.config.num_hidden_layers // 2 or 1)
    h = model.forward(ids, torch.arange(count, device=model.device), naive.recompute, layers=half)
    return F.rms_norm(h.float(), h.shape[-1:])


def tell_of_the_model(layer: MoELayer, x: torch.Tensor) -> None:
    """Who is asked: by a router that prefers nobody, by the formula, and by a random router for a real text."""
    E, k = layer.config.num_experts, layer.config.top_k
    ids, rows = layouts.choose(layer, x)[1], []
    common.check(f"{len(x)} tokens, expert by expert against token by token", layer(x), token_by_token(layer, x))
    for tokens in BATCHES:
        even = [experts.routed(layer.config, tokens, seed=s).unique().numel() for s in range(200)]
        formula, mean = experts.expected_experts(E, k, tokens), sum(even) / len(even)
        if abs(mean / formula - 1) > 0.03:
            raise common.CheckFailed(f"{tokens} tokens ask {mean:.1f} experts, by the formula {formula:.1f}")
        rows.append(
            [tokens, f"{formula:.1f}", f"{mean:.1f}", ids[:tokens].unique().numel(), f"{tokens * k / formula:.1f}"]
        )
    common.table(
        ["tokens", "experts read: formula", "even router, 200 times", "real text, random router", "rows each"], rows
    )
    load = ids.flatten().bincount(minlength=E)
    favourite = load.max() / load.float().mean()
    common.say(f"a random router's favourite gets {favourite:.1f} times its share of this text; training forbids that")


def tell_of_ranks(layer: MoELayer, sizes: dict[str, int], x: torch.Tensor, spare: int) -> None:
    """Four processes: the same answers, bytes by the formula, and the busiest rank before EPLB and after."""
    want, ids = layer(x), layouts.choose(layer, x)[1]
    with Ranks(RANKS, rank_story, sizes, x.cpu(), spare) as ranks:
        found = ranks.results()
    rows = []
    for name, title in (("in order", "experts in order"), ("EPLB", f"moved by EPLB, {spare} replicas")):
        y = torch.cat([rank[name]["y"] for rank in found]).to(want.device)
        common.check(f"{title}: {RANKS} ranks against one", y, want)
        each, sent = rows_of_ranks(ids, found[0][name]["placement"]), sum(rank[name]["sent"] for rank in found)
        waits = 1 - sum(each) / (RANKS * max(each))
        rows.append([title, *each, f"{waits:.0%}", f"{sent:,}"])
    elsewhere = sum(layouts.rows_sent(layer, x, RANKS))
    sent, row = sum(rank["in order"]["sent"] for rank in found), x[0].nbytes
    what = f"{elsewhere:,} of {ids.numel():,} rows leave home with the number of a slot, and their answers come back"
    common.check_equal(what, sent, elsewhere * (row + 8 + row))
    common.table(["rows multiplied by", *(f"rank {r}" for r in range(RANKS)), "ranks wait", "bytes sent"], rows)
    common.say(f"EPLB had counted these tokens; it moved {sum(rank['moved'] for rank in found):,} bytes of weights")


def tell_of_load(skew: float) -> None:
    """The surprise: what the busiest of 16 ranks has to do, times the mean, as traffic prefers some experts."""
    moe, rows = experts.MODELS["Qwen3-30B-A3B"].moe, []
    assert moe
    for s in sorted({0.0, 0.5, 1.0, skew}):
        ways = [experts.busiest(moe, 16, replicas, s) for replicas in (None, 0, 16, 32)]
        rows.append([f"{s:g}", *(f"{way:.2f} ({1 - 1 / way:.0%})" for way in ways)])
    common.table(["skew", "in order", "EPLB, no replicas", "16 replicas", "32 replicas"], rows)


def tell_of_bytes() -> None:
    """What a decode step reads of a mixture, beside dense models, and how much each expert gets to do."""
    model, rows = "Qwen3-30B-A3B", []
    config = experts.MODELS[model]
    for tokens in (*BATCHES, 1024):
        step, dense = experts.step_bytes(config, tokens), dense_bytes(model, "total")
        each = [f"{read / tokens / 1e9:.3f}" for read in (step, dense)]
        ms, share = f"{read_ms(model, tokens):.1f}", f"{experts.rows_per_expert(config, tokens):.1f}"
        rows.append([tokens, f"{step / 1e9:.1f}", ms, *each, share])
    common.table(["tokens", "GB a step", "ms on an H100", "GB a token", "dense 30B", "rows of an expert"], rows)
    needed = experts.tokens_to_be_compute_bound(config)
    common.say(f"An expert computes as long as it is read from {H100.ridge:.0f} rows on: {needed:,.0f} tokens a step")


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    p.add_argument(
        "--num-redundant-experts",
        type=arguments.number(int, 0, 32),
        default=4,
        metavar="N",
        help="replicas of step 3's experts: 4 ranks divide them (default 4)",
    )
    p.add_argument(
        "--skew",
        type=arguments.number(float, 0, 4),
        default=1.0,
        help="one more row of step 4: the r-th favourite's odds are r^-skew (default 1)",
    )
    p.add_argument(
        "--capacity-factor",
        type=arguments.number(float, 0, 100),
        metavar="F",
        help="break it: an expert takes F times its share, and drops the rest",
    )
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    cli.start(args)
    loader.check_context(args.model, max(BATCHES))
    if args.num_redundant_experts % RANKS:
        raise common.InputError(
            f"--num-redundant-experts {args.num_redundant_experts}: must be a multiple of {RANKS}, the ranks of step 3"
        )
    start_context()  # its imports run beside what follows

    common.heading("1. One layer: token by token, expert by expert, and in tiles of one expert")
    tell_of_a_layer(args.seed, args.capacity_factor)
    model, tokenizer = loader.load(args.model)
    x = hidden_states(model, tokenizer, max(BATCHES))
    sizes = SEEDED | {"hidden": x.shape[1], "seed": args.seed}
    layer, E = layouts.random_moe(**sizes, device=x.device), sizes["num_experts"]
    common.heading(f"2. The real model's hidden states, and a seeded layer of {E} experts: who is read")
    tell_of_the_model(layer, x)
    common.heading(f"3. The experts on {RANKS} ranks, each with {len(x) // RANKS} tokens of its own")
    tell_of_ranks(layer, sizes, x, args.num_redundant_experts)
    common.heading("4. One expert overloads: the busiest of 16 ranks over the mean (and how long ranks wait)")
    tell_of_load(args.skew)
    common.heading("5. What a step reads: Qwen3-30B-A3B, 16-bit weights, arithmetic")
    tell_of_bytes()
    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)
