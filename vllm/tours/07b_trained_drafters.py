"""07b · Trained drafters: who guesses best, and how to check a whole tree of guesses in one pass.

The question: lesson 07 accepts guesses exactly, whoever makes them. What does it take to make good ones: a small model,
the first layers of the big one, or heads that read what the big one is thinking?

The mechanism:
  1. A draft model is a small Llama with a KV cache of its own. It knows the tokens, and nothing else.
  2. Early exit takes the target's first layers and its output matrix. Nothing is trained, and it shows.
  3. Medusa: the target's last hidden state goes through three small heads; head k guesses the token k + 1 ahead. No
     cache, no second pass, but each head guesses without knowing what the other heads said.
  4. EAGLE: one decoder layer that continues the target's features, one token ahead: (feature i, token i + 1) gives
     feature i + 1. It knows the target's thoughts and its own last guess, so its guesses form a sentence.
  5. Rejected guesses leave keys and values in the drafter's cache as well: its block table is cut back.
  6. Several guesses per place form a tree. Every node is one row of the target's pass and attends to the context and to
     its ancestors: one 64-bit mask per row. The longest accepted path wins; its keys and values move together.
  7. Sampled exactly, too: try a node's children one after another, each against what the ones before it left of p.

Numbers to remember: the output matrix has 28M of this model's 135M weights, so drafters draft from 4,096 of its 49,152
rows (EAGLE-3, FR-Spec); a tree of 15 guesses costs one pass of 16 rows, a chain of 3 one of 4.

How to run:
  uv run python -m vllm.tours.07b_trained_drafters                      the whole story
  uv run python -m vllm.tours.07b_trained_drafters --break no-mask      break it: guesses see their rivals
  uv run python -m vllm.tours.07b_trained_drafters --break no-move      break it: the accepted path stays where it was
  uv run python -m vllm.tours.07b_trained_drafters --bench              minutes: drafters by task, exits by layer
  uv run python -m vllm.tours.07b_trained_drafters train --write 2 --minutes 3  train your own; goes on where it stopped

Read for this: Cai et al. 2024 (Medusa), Li et al. 2024, 2025 (EAGLE, EAGLE-3), Miao et al. 2024 (SpecInfer), Zhao et
al. 2025 (FR-Spec), Elhoushi et al. 2024 (LayerSkip); vLLM 0.32 `v1/spec_decode/eagle.py`, `draft_model.py`, and
`medusa.py`, which is gone in 0.33.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine import arguments
from engine.attention.metadata import AttentionMetadata
from engine.config import VllmConfig
from engine.core.block_pool import BlockPool
from engine.llm_engine import LLMEngine
from engine.model import folders, llama, loader
from engine.model.tokenizer import Tokenizer
from engine.registry import fill
from engine.request import SamplingParams
from engine.spec_decode import trained
from engine.spec_decode.drafters import Drafter, SpeculativeConfig
from engine.spec_decode.trained import WEIGHTS, DraftTable, Network, make_drafter
from lab import cli, drafts_ahead
from lab import drafter_training as training
from lab import tree as trees
from lab.tree import Tree, fill_tree, plan_tree, stands, tree_attention, verify_greedy

KEY = "07b_trained_drafters"

# The drafters, their networks and caches are in engine/spec_decode/trained.py; the tree, its attention and the rules
# for which path stands in lab/tree.py; the training in lab/drafter_training.py.


# --- What they are held against ---------------------------------------------------------------------------------------


def tree_attention_reference(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context: int, tree: Tree
) -> torch.Tensor:
    """Node by node over what its own path makes visible, in fp64. q [N, Hq, D]; keys, values [context + N, Hkv, D]."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i in range(len(q)):
        seen = [*range(context + 1), *(context + j for j in tree.path(i))]
        for h in range(q.shape[1]):
            kv_head = h * keys.shape[1] // q.shape[1]
            s = keys[seen, kv_head].double().cpu() @ q[i, h].double().cpu() / math.sqrt(q.shape[2])
            out[i, h] = s.softmax(0) @ values[seen, kv_head].double().cpu()
    return out


def without(q: torch.Tensor, token: int) -> torch.Tensor:
    """q for the next guess, if guesses are drawn without replacement; all 0 when nothing is left. [V]."""
    rest = q.clone()
    rest[token] = 0.0
    return rest / rest.sum() if rest.sum() > 0 else rest


def exact_node(p: torch.Tensor, q: torch.Tensor, guesses: int, distinct: bool) -> tuple[torch.Tensor, float]:
    """The distribution of what is written at one node, fp64 [V], and the probability that it is one of the guesses, by
    enumerating every draw of these. `distinct`: they are drawn without replacement, so each has a q of its own."""
    written, fell = torch.zeros_like(p), 0.0

    def walk(rest: torch.Tensor, q: torch.Tensor, left: int, weight: float) -> None:
        nonlocal fell
        if left == 0 or float(q.sum()) == 0:
            written.add_(weight * rest)
            fell += weight
            return
        for token in q.nonzero().flatten().tolist():
            chance, keep = weight * float(q[token]), stands(rest, token, q)
            written[token] += chance * keep
            if keep < 1:
                walk(
                    trees.left_over(rest, token, q), without(q, token) if distinct else q, left - 1, chance * (1 - keep)
                )

    walk(p, q, guesses, 1.0)
    return written, 1 - fell


# --- Decoding with a tree: Medusa -------------------------------------------------------------------------------------


@dataclass
class TreeRun:
    """What was written, and the passes it took (the prompt's included)."""

    token_ids: list[int]
    passes: int
    rows: int  # of the target, over all passes behind the prompt

    @property
    def tokens_per_pass(self) -> float:
        return (len(self.token_ids) - 1) / (self.passes - 1)


@torch.inference_mode()
def generate_with_tree(
    model: llama.Llama,
    network: Network,
    shape: Sequence[tuple[int, ...]],
    prompt: Sequence[int],
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> TreeRun:
    """One sequence, one tree of Medusa's guesses per pass, on lesson 02's paged cache. Greedy at temperature 0."""
    device, size, width = model.device, 16, 1 + max((r for node in shape for r in node), default=0)
    depth = max(map(len, shape), default=0)
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> float:
        return float(torch.rand((), generator=generator, dtype=torch.float64))

    num_blocks = 2 + (len(prompt) + max_tokens + len(shape) + depth) // size
    pages, table = fill("cache.paged")(model, num_blocks, size), DraftTable(BlockPool(num_blocks), size)
    write = fill("cache.write")

    def judge(tree: Tree, hidden: torch.Tensor) -> tuple[list[int], list[int]]:
        logits = model.logits(hidden)  # [N, vocab]
        if temperature == 0:
            return verify_greedy(tree, logits.argmax(1).tolist())
        return trees.verify_sampled(
            tree, (logits.double() / temperature).softmax(1).cpu(), [None] * len(logits), uniform
        )

    table.append(len(prompt))
    meta = AttentionMetadata.build([table.blocks], [len(prompt)], [len(prompt)], size, device)
    hidden = model.forward(torch.tensor(prompt, device=device), meta.positions, pages.attend(meta))[-1:]
    _, written = judge(Tree([prompt[-1]], [-1]), hidden)
    run = TreeRun(list(written), 1, 0)
    while len(run.token_ids) < max_tokens and not set(written) & set(model.config.eos_token_ids):
        feature = training.final_norm(model, hidden)  # [1, hidden], of the position before the token sampled last
        heads = [network.logits(network.medusa(feature, k))[0].topk(width).indices for k in range(depth)]
        tree = fill_tree(shape, run.token_ids[-1], [network.d2t[top].tolist() for top in heads])
        context, N = table.num_tokens, len(tree.parents)
        table.append(N)
        on_device = functools.partial(torch.tensor, device=device)
        blocks, context_lens = on_device([table.blocks]).int(), on_device([context]).int()
        slots = on_device([table.blocks[p // size] * size + p % size for p in range(context, context + N)])
        bounds, masks = on_device([0, N]), tree.mask_tensor(device)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            cache = pages.layers[layer]
            write(k, v, cache, slots)  # noqa: B023
            return tree_attention(q, cache, blocks, bounds, context_lens, masks, N, context + N)  # noqa: B023

        positions = on_device([context + d for d in tree.depths])
        hidden = model.forward(on_device(tree.token_ids), positions, attend)  # [N, hidden]
        path, written = judge(tree, hidden)
        for cache in pages.layers:
            trees.compact_slots(cache, blocks, context_lens, on_device([path]).int().view(1, -1))
        table.cut(context + 1 + len(path))
        hidden = hidden[[path[-1] if path else 0]]
        run.token_ids += written
        run.passes, run.rows = run.passes + 1, run.rows + N
    stop = [i + 1 for i, token in enumerate(run.token_ids) if token in model.config.eos_token_ids]
    del run.token_ids[min([max_tokens, *stop]) :]
    return run


# --- How to do it wrong -----------------------------------------------------------------------------------------------

BREAKS: dict[str, tuple[str, Callable]] = {  # name: (function of tree.py, what stands in its place)
    "no-mask": ("ancestor_masks", lambda parents: [(2 << i) - 1 for i in range(len(parents))]),
    "no-move": ("compact_slots", lambda kv_cache, block_table, context_lens, accepted: None),
    "same-p": ("left_over", lambda p, token, q: p),
}


@contextlib.contextmanager
def broken(name: str | None) -> Iterator[None]:
    """Inside this block, one function is wrong in the way that `name` says; None: all are right."""
    if name is None:
        yield
        return
    function, wrong = BREAKS[name]
    right = getattr(trees, function)
    setattr(trees, function, wrong)
    try:
        yield
    finally:
        setattr(trees, function, right)


# --- The rule for several guesses, enumerated -------------------------------------------------------------------------


def largest_tree_error(p: Sequence[float], q: Sequence[float]) -> float:
    """Of `exact_node` against p, for up to four guesses with and without replacement."""
    target, draft = (torch.tensor(x, dtype=torch.float64) for x in (p, q))
    found = [exact_node(target, draft, n, distinct) for n in range(5) for distinct in (False, True)]
    return max(float((x - target).abs().max()) for x, _ in found)


PAIRS = {  # target p, draft q
    "half right": ([0.6, 0.3, 0.1], [0.2, 0.3, 0.5]), "equal": ([0.6, 0.3, 0.1], [0.6, 0.3, 0.1]),
    "disjoint": ([0.5, 0.5, 0.0], [0.0, 0.0, 1.0]), "one-hot": ([0.6, 0.3, 0.1], [0.0, 1.0, 0.0]),
    "five words": ([0.4, 0.3, 0.2, 0.1, 0.0], [0.05, 0.05, 0.2, 0.3, 0.4]),
}  # fmt: skip


# --- The story --------------------------------------------------------------------------------------------------------

NAMES = ("draft_model", "early_exit", "medusa", "eagle")


@dataclass
class Measured:
    """A few requests served with one drafter."""

    token_ids: list[list[int]]
    tokens_per_step: float  # of a request in steps that verified a draft
    acceptance: float  # of drafted tokens
    seconds: float
    places: tuple[int, ...] = ()  # chains verified; of these, whose first guess stood, first two, first three


def serve(
    model: llama.Llama,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    max_tokens: int,
    drafter: Callable[[], Drafter] | None,
    K: int = 3,
    temperature: float = 0.0,
) -> Measured:
    """All prompts at once through the engine, with or without speculation."""
    about = VllmConfig()
    if drafter is not None:
        config = SpeculativeConfig(num_speculative_tokens=K)
        about = VllmConfig(speculative_config=config, plug={"drafter": lambda config, model: drafter()})
    ids = [tokenizer.ask(text) for text in prompts]
    longest = max(map(len, ids)) + max_tokens
    engine = LLMEngine(
        model,
        tokenizer,
        config=about,
        max_model_len=longest,
        max_num_seqs=max(8, len(ids)),
        num_gpu_blocks_override=2 + len(ids) * -(-longest // 16),
    )
    for i, prompt in enumerate(ids):
        engine.add_request(
            str(i), {"prompt_token_ids": prompt}, SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=i)
        )
    done: dict[int, list[int]] = {}
    start = time.perf_counter()
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[int(output.request_id)] = list(output.outputs[0].token_ids)
    seconds = time.perf_counter() - start
    if drafter is None:
        return Measured([done[i] for i in range(len(ids))], 1.0, 0.0, seconds)
    stats = engine.core.scheduler.spec_decoding_stats
    return Measured(
        [done[i] for i in range(len(ids))],
        1 + stats.num_accepted_tokens / max(1, stats.num_drafts),
        stats.num_accepted_tokens / max(1, stats.num_draft_tokens),
        seconds,
        (stats.num_drafts, *stats.num_accepted_tokens_per_pos),
    )


def held_out(number: int) -> list[str]:
    """The first prompts of each task, none of them trained on."""
    return [text for texts in training.HELD_OUT.values() for text in texts[:number]]


def random_trees(
    contexts: Sequence[int],
    seed: int,
    Hq: int = 9,
    Hkv: int = 3,
    D: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[tuple, torch.Tensor]:
    """Arguments of `tree_attention` for random trees in shuffled blocks, and what the reference says."""
    generator = torch.Generator().manual_seed(seed)

    def randint(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    trees = []
    for _ in contexts:
        parents = [-1, *(randint(i) for i in range(1, 1 + randint(20)))]
        trees.append(Tree([0] * len(parents), parents))
    lens = [c + len(t.parents) for c, t in zip(contexts, trees)]
    blocks = (1 + torch.randperm(sum(-(-n // block_size) for n in lens), generator=generator)).tolist()
    tables = [[blocks.pop() for _ in range(-(-n // block_size))] for n in lens]
    meta = AttentionMetadata.build(tables, lens, [len(t.parents) for t in trees], block_size)
    kv = torch.randn(2, max(map(max, tables)) + 1, block_size, Hkv, D, generator=generator).to(common.device(), dtype)
    q = torch.randn(int(meta.query_start_loc[-1]), Hq, D, generator=generator).to(common.device(), dtype)
    reference = []
    for b, tree in enumerate(trees):
        slots = [tables[b][p // block_size] * block_size + p % block_size for p in range(lens[b])]
        rows = q[meta.query_start_loc[b] : meta.query_start_loc[b + 1]]
        keys, values = kv.flatten(1, 2)[:, slots]
        reference.append(tree_attention_reference(rows, keys, values, contexts[b], tree))
    masks = torch.cat([tree.mask_tensor(q.device) for tree in trees])
    context_lens = torch.tensor(contexts, device=q.device).int()
    most = max(len(tree.parents) for tree in trees)
    args = (q, kv, meta.block_table, meta.query_start_loc, context_lens, masks, most, max(lens))
    return args, torch.cat(reference).to(dtype)


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    p.add_argument(
        "command",
        nargs="?",
        choices=("show", "train"),
        default="show",
        help="show: the story (default); train: write text and train drafters",
    )
    p.add_argument("--break", dest="broken", choices=tuple(BREAKS), help="do one thing wrong and see what happens")
    p.add_argument(
        "-k",
        "--num-speculative-tokens",
        type=arguments.number(int, 1, 3),
        default=3,
        metavar="K",
        help="guesses in a chain (default %(default)s)",
    )
    p.add_argument(
        "--tree-size",
        type=arguments.number(int, 1, 63),
        default=15,
        metavar="N",
        help="guesses in a tree (default %(default)s)",
    )
    group = p.add_argument_group("train")
    group.add_argument("--minutes", type=arguments.number(float, 0), default=3.0, help="time to train for (default 3)")
    group.add_argument(
        "--write",
        type=arguments.number(float, 0),
        default=0.0,
        metavar="MINUTES",
        help="time to write more text first (needed once; default 0)",
    )
    group.add_argument("--drafter", choices=training.METHODS, action="append", help="only this one (may be repeated)")
    group.add_argument("--work", type=cli.folder, metavar="DIR", help="text, checkpoints (default: a cache folder)")
    group.add_argument("--ship", type=cli.folder, metavar="DIR", help="where to write the weights (default: --work)")
    return p


def train(args: argparse.Namespace) -> None:
    """The command that made the shipped weights. Everything goes on where the last run stopped."""
    model, tokenizer = loader.load(args.model)
    work = Path(args.work) if args.work else folders.cache_folder() / "drafters"
    if args.write:
        training.write_text(model, tokenizer, work / "text", args.write, args.seed)
    methods = tuple(args.drafter or training.METHODS)
    training.train(model, work / "text", work / "work", args.minutes, methods, seed=args.seed)
    for path in training.export(model, work / "text", work / "work", Path(args.ship) if args.ship else work):
        about = trained.about(path)
        common.say(f"{path}: {about['tokens']:,} tokens, agreement {' '.join(f'{a:.3f}' for a in about['agreement'])}")


def show_drafters() -> None:
    """What the shipped files say of themselves."""
    rows = []
    for file in sorted(WEIGHTS.glob("*.safetensors")):
        d = trained.about(file)
        rows.append([file.stem, f"{d['parameters'] / 1e6:.1f}M", f"{file.stat().st_size / 1e6:.1f} MB",
                     f"{d['tokens']:,}", *(f"{a:.2f}" for a in d["agreement"]),
                     f"{training.expected_tokens(d['agreement']):.2f}"])  # fmt: skip
    columns = ["drafter", "weights", "file", "tokens seen", "1st right", "2nd then", "3rd then", "tokens/step"]
    common.table(columns, rows)


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    cli.start(args)
    if args.command == "train":
        return train(args)
    config = loader.check_context(args.model, 192 if args.bench else 64)
    model, tokenizer = loader.load(args.model)
    medusa = WEIGHTS / "medusa.safetensors"
    with folders.made_for_default():
        network = trained.load_network(medusa, model)
    common.heading(f"1. What was trained, on text that {folders.DEFAULT_MODEL} wrote")
    show_drafters()
    about = trained.about(medusa)
    all_weights, weights = (n * config.hidden_size / 1e6 for n in (config.vocab_size, about["draft_vocab"]))
    common.say(f"{about['draft_vocab']:,} tokens to draft from: {weights:.1f}M weights of the output matrix, "
               f"not {all_weights:.1f}M;\n"
               f"{about['coverage']:.1%} of what it says is among them")  # fmt: skip

    K, tokens = args.num_speculative_tokens, 20
    common.heading(f"2. In the engine: chains of {K}, two prompts that were held out")
    plain, rows = serve(model, tokenizer, prompts := held_out(1)[:2], tokens, None).token_ids, []
    for name in NAMES:
        run = serve(model, tokenizer, prompts, tokens, functools.partial(make_drafter, name, model, K), K)
        if run.token_ids != plain:
            raise common.CheckFailed(f"{name}: the engine wrote other tokens than without it")
        rows.append([name, f"{run.acceptance:.0%}", f"{run.tokens_per_step:.2f}"])
    common.table(["drafter", "guesses accepted", "tokens per step"], rows)
    common.say(f"✓ all {len(rows)} wrote the {sum(map(len, plain))} tokens that plain greedy decoding writes")

    common.heading("3. EAGLE one step ahead: the next step is planned before anybody knows what this one wrote")
    ids, first = [tokenizer.ask(text) for text in prompts], [x[:8] for x in plain]
    drafts_ahead.demonstrate(model, ids, first, K, lambda config, model: make_drafter("eagle", model, K))

    common.heading(f"4. A tree of guesses in one pass: {args.tree_size} of Medusa's")
    arguments, reference = random_trees([5, 40], args.seed)
    common.check("tree attention against one path at a time", tree_attention(*arguments), reference)
    if common.HAS_TRITON:
        with common.use_kernels():
            common.check("the same, Triton kernel", tree_attention(*arguments), reference)
    else:
        common.skipped("the Triton kernels", common.kernel_mode())
    with broken(args.broken):
        error = max(largest_tree_error(*pair) for pair in PAIRS.values())
        found = (
            f"several guesses per place, {10 * len(PAIRS)} cases enumerated: what is written misses p by "
            f"{error:.1g} at most"
        )
        if error > 1e-12 and args.broken is None:
            raise common.CheckFailed(found)
        common.say(f"{'✗' if error > 1e-12 else '✓'} {found}")
        run = generate_with_tree(model, network, plan_tree(about["ranks"], args.tree_size), ids[1], tokens)
        common.say(f"{run.passes} passes, {run.rows} rows behind the prompt, {run.tokens_per_pass:.2f} tokens per pass")
        if args.broken is None:
            common.check_equal("the tokens of plain greedy decoding", run.token_ids, plain[1])
        else:
            same = next((i for i, (a, b) in enumerate(zip(run.token_ids, plain[1])) if a != b), tokens)
            common.say(f"broken: {args.broken}. The first {same} of {tokens} tokens are those of plain decoding")
    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)
