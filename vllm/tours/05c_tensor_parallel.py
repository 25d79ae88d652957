"""05c · Tensor parallelism: one layer on several GPUs.

The question: a decode step reads every weight once. If eight GPUs read an eighth each, is it eight times as fast? And
what must they tell each other so that the answer stays the same?

The mechanism:
  1. Cut the first matrix of a block by its outputs: every rank computes some neurons, or some heads, alone.
  2. What stands between the two matrices (SiLU and product, RoPE and attention) is per neuron, or per head: no
     communication.
  3. Cut the second matrix by its inputs, so that it takes exactly what the rank has. It yields a partial sum.
  4. One all-reduce adds the partial sums. Every rank has the whole result, which is what the next block starts from.
  5. So: one all-reduce per attention, one per MLP; one for the embedding, and the logits are gathered.
  6. Query heads are divided. KV heads too or, where there are fewer of them than ranks, copied.
  7. A rank is a narrower Llama with three extra calls. Scheduler, block tables and sampling never notice.
  8. Ranks are processes. They find each other through a small store, and talk through gloo (CPU) or NCCL (GPUs).

Numbers to remember: 2 all-reduces per layer. Each sends 2(n−1)/n of its tensor, so hardly more for 8 ranks than for 2,
and costs 4.5 µs in a CUDA graph on NVLink, 20.8 µs outside (H200, NVIDIA aiconfigurator), however small it is.

How to run:
  uv run python -m vllm.tours.05c_tensor_parallel                           the whole story: 3 ranks; 4 for some checks
  uv run python -m vllm.tours.05c_tensor_parallel --tensor-parallel-size 9  refused: 9 heads, but 1536 neurons
  uv run python -m vllm.tours.05c_tensor_parallel --skip-all-reduce         break it: every rank keeps its partial sum
  uv run python -m vllm.tours.05c_tensor_parallel --bench                   a minute: all-reduce by size, steps by ranks

Read for this: Shoeybi et al. 2019 (Megatron-LM), Patarasuk & Yuan 2009 (ring all-reduce), Pope et al. 2022 (scaling
inference), vLLM 0.32 `model_executor/layers/linear.py`, `vocab_parallel_embedding.py`, `distributed/parallel_state.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from engine import arguments
from engine.distributed.group import GroupCoordinator, new_group
from engine.model import folders, llama, loader
from engine.model.config import LlamaConfig
from engine.model.tokenizer import Tokenizer
from engine.parallel import sharding
from engine.parallel.layers import RowParallelLinear
from engine.parallel.model import TensorParallelLlama, load_shard, shard_model
from engine.parallel.ranks import Ranks, start_context
from lab import cli, naive, offline_run, roofline
from lab.hardware import HARDWARE
from lab.layouts import default_size
from lab.links import LINKS, Link, wire_bytes

KEY = "05c_tensor_parallel"

# Who may divide what is in engine/parallel/sharding.py; the group that talks, in engine/distributed/group.py; the
# layers, the model and the processes are in layers.py, model.py and ranks.py of engine/parallel/.


# --- What we want: one block, whole and in slices ---------------------------------------------------------------------


def mlp(x: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """y = f(x Aᵀ) Bᵀ, on one machine. x [T, H], A [I, H], B [H, I]."""
    return F.silu(x @ A.T) @ B.T


def mlp_in_slices(x: torch.Tensor, A: torch.Tensor, B: torch.Tensor, n: int) -> torch.Tensor:
    """The same as a sum over n ranks: y = Σ_r f(x A_rᵀ) B_rᵀ, where A_r are rows of A, and B_r columns of B.

    Neuron i needs all of x, row i of A, and nothing of its neighbours; y is a sum over neurons. So any partition of the
    neurons will do, and the one thing that needs all ranks is the sum.
    """
    partial_sums = [F.silu(x @ A_r.T) @ B_r.T for A_r, B_r in zip(A.chunk(n), B.chunk(n, dim=1))]
    return torch.stack(partial_sums).sum(0)


# --- The group: ranks that talk ---------------------------------------------------------------------------------------


def ring_all_reduce(x: torch.Tensor, group: GroupCoordinator) -> tuple[torch.Tensor, int]:
    """An all-reduce from sends to the right and receives from the left alone. Returns the sum and the bytes sent.

    Semantics: out = Σ_r x_r. Shapes: any. The result has the same bits on every rank: each chunk's sum is computed
    once, by one rank, and then handed around. (Patarasuk & Yuan 2009: no ranks that add for themselves send less.)
    """
    n, r, size = group.world_size, group.rank_in_group, x.numel()
    right, left = group.ranks[(r + 1) % n], group.ranks[(r - 1) % n]
    flat = F.pad(x.to(group.wire).flatten(), (0, -size % n))
    chunks, sent = list(flat.chunk(n)), 0

    def exchange(chunk: torch.Tensor) -> torch.Tensor:
        nonlocal sent
        received, sent = torch.empty_like(chunk), sent + chunk.nbytes
        send = dist.P2POp(dist.isend, chunk, right, group.process_group)
        receive = dist.P2POp(dist.irecv, received, left, group.process_group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        return received

    for step in range(n - 1):  # reduce-scatter: a chunk collects one rank's share at every stop
        arriving = (r - step - 1) % n
        chunks[arriving] = chunks[arriving] + exchange(chunks[(r - step) % n])
    for step in range(n - 1):  # all-gather: rank r has finished chunk r + 1, and passes on what it gets
        chunks[(r - step) % n] = exchange(chunks[(r + 1 - step) % n])
    return torch.cat(chunks)[:size].view(x.shape).to(x.device), sent


# --- The break --------------------------------------------------------------------------------------------------------


def skip_all_reduce(model: TensorParallelLlama) -> None:
    """The break: every rank keeps its partial sums and calls them the result. All shapes are right."""
    for layer in model.linear.values():
        if isinstance(layer, RowParallelLinear):
            layer.reduce_results = False


# --- The bill: what a rank holds, what it sends, how long a step takes ------------------------------------------------


def ownership(model: str, n: int) -> dict[str, Any]:
    """What one of n ranks holds of a model of `roofline.MODELS`: heads, bytes of weights and of KV per token (bf16).

    `kv_copies` is how often all ranks together hold the whole cache: more than once where KV heads are copied.
    """
    config = roofline.llama_config(roofline.MODELS[model])
    shard = sharding.shard_config(config, n)
    weights = sum(torch.Size(shape).numel() for shape in llama.tensor_shapes(shard).values())
    mine, whole = (roofline.KVCacheSpec.from_config(dataclasses.asdict(of)).bytes_per_token() for of in (shard, config))
    return {
        "q_heads": shard.num_attention_heads,
        "kv_heads": shard.num_key_value_heads,
        "weight_bytes": 2 * weights,
        "kv_bytes": mine,
        "kv_copies": n * mine / whole,
    }


def step_traffic(config: LlamaConfig, n: int, tokens: int, rows: int, itemsize: int) -> dict[str, dict[str, int]]:
    """Collectives of one forward pass over `tokens` tokens with logits for `rows` of them, as `take_counts` counts.

    all-reduces = 2 · L + 1, each of T · hidden elements; one all-gather of R · padded vocabulary. A layer whose experts
    have a shared one beside them adds that up by itself: one all-reduce more.
    """
    if n == 1:
        return {}
    shared = config.moe is not None and config.moe.shared_intermediate_size > 0
    calls = 2 * config.num_hidden_layers + 1
    calls += sum(shared and config.has_experts(layer) for layer in range(config.num_hidden_layers))
    return {
        "all_reduce": {"calls": calls, "bytes": calls * tokens * config.hidden_size * itemsize},
        "all_gather": {"calls": 1, "bytes": rows * sharding.pad_vocab_size(config.vocab_size, n) * itemsize},
    }


H200 = HARDWARE["H200 141GB"]


def step_seconds(
    model: str, n: int, link: Link, num_seqs: int = 1, num_new_tokens: int = 1, context: int = 1024
) -> dict[str, float]:
    """One forward pass of a bf16 model on n H200s: seconds to compute or read, and seconds in collectives.

    compute = roofline(FLOPs / n, bytes / n)        weights and KV divided; right as long as n ≤ Hkv
    talk    = (2L + 1) all-reduces of T · hidden + one all-gather of the logits
    """
    config = roofline.MODELS[model]
    flops, moved = roofline.step_cost(config, num_seqs, num_new_tokens, context)
    traffic = step_traffic(roofline.llama_config(config), n, num_seqs * num_new_tokens, num_seqs, itemsize=2)
    talk = sum(link.seconds(name, t["bytes"] // t["calls"], n, t["calls"]) for name, t in traffic.items())
    compute = H200.seconds(flops / n, moved / n)
    return {"compute": compute, "talk": talk, "total": compute + talk}


# --- The story --------------------------------------------------------------------------------------------------------

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "To make bread you need flour,",
    "The three laws of motion say that",
]
OUTPUTS = [8, 5, 6, 10]  # tokens wanted of each


def seeded_model(device: torch.device) -> llama.Llama:
    """8 query and 2 KV heads, a vocabulary that neither 2 nor 4 divide; the same on every rank."""
    return llama.random_model(seed=5, device=device, num_attention_heads=8, num_key_value_heads=2, vocab_size=131)


def all_logits(model: llama.Llama, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits of every position of one sequence, without a cache. [T] -> [T, vocab], on the CPU."""
    ids = torch.tensor(token_ids, device=model.device)
    hidden = model.forward(ids, torch.arange(len(token_ids), device=model.device), naive.recompute)
    return model.logits(hidden).cpu()


def serve(model: llama.Llama, prompts: Sequence[Sequence[int]], outputs: Sequence[int]) -> offline_run.Served:
    """The engine around a whole model or a shard, which have one interface."""
    return offline_run.serve(offline_run.make_core(model, num_blocks=128, max_model_len=256), prompts, outputs)


def rank_story(world: GroupCoordinator, n: int, model: str, prompts: list[list[int]], broken: bool) -> dict[str, Any]:
    """What every rank does in this story. Ranks that a group does not need wait for the next one.

    No rank leads: each runs the whole engine, and from equal logits all of them take equal decisions.
    """
    groups = {size: new_group(range(size), world) for size in sorted({n, 2, 4})}
    found: dict[str, Any] = {}
    if group := groups[n]:
        shard = load_shard(model, group)
        found["parameters"] = shard.num_parameters
        if broken:
            skip_all_reduce(shard)
        found["logits"] = all_logits(shard, prompts[0])
        found["traffic"] = group.take_counts()
        found["tokens"] = serve(shard, prompts, OUTPUTS).token_ids
    for size in (2, 4):
        if group := groups[size]:
            seeded = shard_model(seeded_model(world.device), group)
            found[f"seeded {size}"] = all_logits(seeded, range(40))
    x = torch.full((world.world_size * 250,), 2.0**world.rank_in_group, device=world.device)
    total, sent = ring_all_reduce(x, world)
    found["ring"] = (bool((total == 2.0**world.world_size - 1).all()), sent, x.nbytes)
    return found


def tell_of_a_block(config: LlamaConfig, n: int) -> None:
    """An MLP of the model's size, cut the right way and the other way."""
    H, I = config.hidden_size, config.intermediate_size
    x, A, B = (torch.randn(shape, device=common.device()) for shape in ((5, H), (I, H), (H, I)))
    A, B = A / H**0.5, B / I**0.5
    common.check(f"a sum over {n} slice{'s' * (n > 1)} of the {I} neurons", mlp_in_slices(x, A, B, n), mlp(x, A, B))
    slices = zip(x.chunk(max(2, n), dim=1), A.chunk(max(2, n), dim=1))
    activated = torch.stack([F.silu(x_r @ A_r.T) for x_r, A_r in slices])
    error = common.relative_error(activated.sum(0), F.silu(x @ A.T))
    common.say(f"Cut the first by inputs, and SiLU gets partial sums: error {error:.2f}, unless they are added first")


def tell_of_shares() -> None:
    """Heads, weights and cache of one rank: the cache stops shrinking where ranks outnumber KV heads."""
    rows = []
    for model, sizes in (("SmolLM2-135M", (1, 3)), ("Llama-3.1-8B", (1, 8, 16)), ("Llama-3.1-70B", (1, 8, 16))):
        for n in sizes:
            owns = ownership(model, n)
            weights, kv = f"{owns['weight_bytes'] / 1e9:.2f}", f"{owns['kv_bytes']:,}"
            rows.append([model, n, owns["q_heads"], owns["kv_heads"], f"{owns['kv_copies']:.0f}", weights, kv])
    common.table(["", "ranks", "Hq", "Hkv", "copies of KV", "weights, GB", "KV bytes/token"], rows)


def tell_of_ranks(
    args: argparse.Namespace, ranks: Ranks, n: int, model: llama.Llama, tokenizer: Tokenizer, prompts: list[list[int]]
) -> list[dict[str, Any]]:
    """Compute the reference while the ranks work, then compare. Returns what they found. Raises CheckFailed."""
    reference = all_logits(model, prompts[0])
    whole = serve(model, prompts, OUTPUTS).token_ids
    found = ranks.results()
    members, first = found[:n], found[0]
    for prompt, tokens in list(zip(prompts, first["tokens"]))[:2]:
        common.say(f"{tokenizer.decode(prompt)}…{tokenizer.decode(tokens)!r}"[:108])
    loaded = (first["parameters"], model.num_parameters, sum(rank["parameters"] for rank in members))
    mine, whole_model, everybodys = (f"{count / 1e6:.1f} M" for count in loaded)
    common.say(f"rank 0 loaded {mine} of {whole_model} parameters, all ranks together {everybodys}")
    if args.skip_all_reduce:
        error = common.relative_error(first["logits"], reference)
        common.say(f"without the all-reduce: relative error of the logits {error:.2f}, every shape as it should be")
    ours = f"{n} rank{'s' * (n > 1)}"
    common.check(f"logits of {len(prompts[0])} positions, {ours} against one", first["logits"], reference)
    same = [rank["logits"].equal(first["logits"]) for rank in members]
    common.check_equal("every rank has the same logits, bit for bit", same, [True] * n)
    common.check_equal(f"{len(prompts)} requests: the same tokens as the whole model", first["tokens"], whole)
    chosen = [rank["tokens"] for rank in members]
    common.check_equal("every rank's scheduler and sampler chose the same tokens", chosen, [whole] * n)
    seeded = all_logits(seeded_model(model.device), range(40))
    for size, what in ((2, "one KV head each"), (4, "each KV head on two ranks")):
        common.check(f"8 query and 2 KV heads on {size} ranks, {what}", first[f"seeded {size}"], seeded)
    return found


def tell_of_the_wire(config: LlamaConfig, n: int, T: int, found: list[dict[str, Any]]) -> None:
    """What the layers sent for T positions beside the formula, and what the ring did. Raises CheckFailed."""
    expected = step_traffic(config, n, tokens=T, rows=T, itemsize=4)
    common.check_equal("collectives and their bytes are those of the formula", found[0]["traffic"], expected)
    if expected:  # one rank has nobody to tell anything
        rows = [
            [name, t["calls"], f"{t['bytes']:,}", f"{wire_bytes(name, t['bytes'], n):,.0f}"]
            for name, t in expected.items()
        ]
        common.table(["", "calls", "result, bytes", "sent by each rank, bytes"], rows)
    m, (right, sent, payload) = len(found), found[0]["ring"]
    what = f"our ring on {m} ranks: right, and 2·{m - 1}/{m} of {payload:,} bytes sent"
    common.check_equal(what, (right, sent), (True, wire_bytes("all_reduce", payload, m)))


def tell_of_limits() -> None:
    """The surprise: what more H200s do to a decode step with and without CUDA graphs, and to a prompt of 1,024."""
    rows = []
    for model in ("Llama-3.1-8B", "Llama-3.1-70B"):
        for n in (1, 2, 4, 8):
            row = [model, n]
            for link in ("nvlink", "nvlink_eager"):
                one, seconds = (step_seconds(model, size, LINKS[link])["total"] for size in (1, n))
                row.append(f"{1e3 * seconds:.2f} ms, {one / seconds:.1f}x")
            for link in ("nvlink", "pcie5"):
                one, seconds = (step_seconds(model, size, LINKS[link], 1, 1024, 1024)["total"] for size in (1, n))
                row.append(f"{one / seconds:.1f}x")
            rows.append(row)
    common.table(["", "GPUs", "decode, in a graph", "decode, eager", "prefill, NVLink", "prefill, PCIe 5"], rows)


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    help = "ranks that share the model (default 3; where that is forbidden, fewest above 1)"
    p.add_argument("--tensor-parallel-size", "-tp", type=arguments.number(int, 1, 64), metavar="N", help=help)
    p.add_argument("--skip-all-reduce", action="store_true", help="break it: every rank keeps its partial sums")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    cli.start(args)
    config, folder = loader.check_context(args.model, 256), folders.model_folder(args.model)
    n = args.tensor_parallel_size or default_size(config)
    sharding.check_tensor_parallel_size(config, n)
    start_context()  # its imports run beside what follows

    common.heading("1. One MLP block: the first matrix cut by its outputs, the second by its inputs")
    tell_of_a_block(config, n)
    common.heading("2. What a rank owns (bf16)")
    tell_of_shares()
    tokenizer = Tokenizer(folder)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    with Ranks(max(4, n), rank_story, n, str(folder), prompts, args.skip_all_reduce) as ranks:
        common.heading(f"3. The real model on {n} process{'es' * (n > 1)}, through the engine of lesson 04")
        model, _ = loader.load(args.model)
        found = tell_of_ranks(args, ranks, n, model, tokenizer, prompts)
    common.heading("4. On the wire: one pass over these positions")
    tell_of_the_wire(model.config, n, len(prompts[0]), found)
    common.heading("5. Where it stops paying: H200s, arithmetic")
    tell_of_limits()
    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)
