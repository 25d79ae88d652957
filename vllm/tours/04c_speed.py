"""04c · Speed: where a step's time goes, and how to get it back.

The question: a decode step must read the weights and multiply. What else does it do, and how little of that can it do?

The mechanism:
  1. The floor: the matrix products alone, timed on this machine. With these weights no engine is faster.
  2. Naively: no cache, then a cache, then a batch whose sequences attend one after another.
  3. One thing at a time: attention for all sequences at once, q, k and v in one product, arrays instead of lists,
     weights in the order in which the processor reads them, keys and values where they lie. The same tokens always.
  4. Each operation costs some microseconds however small it is: count them, layer by layer.
  5. A profile: products, attention, the batch's tensors, the rest of the model, sampling, the scheduler.
  6. Ten thousand waiting requests: a step must not look at requests that are not in it.
  7. The peers, side by side (`--bench`): Transformers, and the real vLLM on a CPU.

Numbers to remember: a step of SmolLM2 in fp32 reads 538 MB of weights whatever the batch, and does 0.27 GFLOP per row.
Attention in a loop over B sequences is 5·B operations in every layer; at once, as many for 32 as for 1.

How to run:
  uv run python -m vllm.tours.04c_speed                  the stages, their operations, a profile, a long queue
  uv run python -m vllm.tours.04c_speed --sequences 32   the same with more sequences; 1: where batching buys nothing
  uv run python -m vllm.tours.04c_speed --rescan         break it: a scheduler that sorts its whole queue in every step
  uv run python -m vllm.tours.04c_speed --bench          ten minutes: 32 prompts of 128 tokens, and the peers
  uv run python -m vllm.tours.04c_speed --bench --vllm ENV/bin/python    with vLLM from another environment among them

Read for this: Williams et al. 2009 (roofline), vLLM 0.32 `v1/worker/gpu_model_runner.py`, `v1/worker/block_table.py`,
`v1/core/sched/scheduler.py`, `v1/attention/backends/cpu_attn.py`; oneDNN's documentation of memory formats.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import copy
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine import arguments, assemble
from engine.attention.metadata import AttentionMetadata
from engine.attention.torch_paged import decode, decode_gathered, gather_plan, prefill_attention
from engine.config import SchedulerConfig, VllmConfig
from engine.core.engine_core import EngineCore
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.queues import FCFSRequestQueue
from engine.core.scheduler import Scheduler
from engine.model import llama, loader
from engine.model.packed_linear import pack_weights
from engine.output import SchedulerOutput
from engine.registry import fill
from engine.request import Request, SamplingParams
from engine.worker.model_runner import ModelRunner
from lab import cli, naive
from lab.matrix_products import matmul_seconds
from lab.offline_run import serve

KEY = "04c_speed"


# --- 1. The floor -----------------------------------------------------------------------------------------------------
#
# The matrix products of a step and nothing else: `matmul_seconds` and `floor_seconds` of lab/matrix_products.py.


# --- 2. What one would write first ------------------------------------------------------------------------------------


class SplitLinear:
    """One product per matrix of the checkpoint: q, k and v (or gate and up) one after another."""

    def __init__(self, layer: llama.Linear, rows: Sequence[int]) -> None:
        self.weight, self.bias = layer.weight, layer.bias
        biases = [None] * len(rows) if layer.bias is None else layer.bias.split(list(rows))
        self.parts = [llama.Linear(w, b) for w, b in zip(layer.weight.split(list(rows)), biases)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def split_projections(model: llama.Llama) -> llama.Llama:
    """The same model with as many products as the checkpoint has matrices; `model` itself is left alone."""
    split = copy.copy(model)
    D, split.linear = model.config.head_dim, dict(model.linear)
    for name, layer in model.linear.items():
        if name.endswith("qkv_proj"):
            split.linear[name] = SplitLinear(layer, [n * D for n in (model.num_heads, *[model.num_kv_heads] * 2)])
        elif name.endswith("gate_up_proj"):
            split.linear[name] = SplitLinear(layer, [len(layer.weight) // 2] * 2)
    return split


def loop_attention(cache: Any, meta: AttentionMetadata) -> llama.Attend:
    """Attention as one would write it first: for each sequence, fetch its blocks, then attend."""
    starts, lens = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
    reshape_and_cache = fill("cache.write")

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kv = cache.layers[layer]
        reshape_and_cache(k, v, kv, meta.slot_mapping)
        out = torch.empty_like(q)
        for b, S in enumerate(lens):
            blocks = meta.block_table[b, : -(-S // cache.block_size)].long()
            keys, values = kv[:, blocks].flatten(1, 2)[:, :S]  # [S, Hkv, D] each
            mine = slice(starts[b], starts[b + 1])
            out[mine] = prefill_attention(q[mine], keys, values)
        return out

    return attend


def gathered_attention(cache: Any, meta: AttentionMetadata) -> llama.Attend:
    """For a step of decodes: fetch the blocks of all sequences of about one length, then attend once."""
    plan = gather_plan(meta.block_table, meta.seq_lens, cache.layers[0].shape)
    reshape_and_cache = fill("cache.write")

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        reshape_and_cache(k, v, cache.layers[layer], meta.slot_mapping)
        return decode(q, cache.layers[layer], decode_gathered, plan)

    return attend


class ListBatch:
    """The batch as Python lists: every step walks over every token and every block of every sequence."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def add(self, request_id: str) -> None:
        """Nothing is kept from step to step."""

    remove = add

    def update(self, request: Request, blocks: Sequence[int]) -> tuple[Request, list[int]]:
        return request, list(blocks)

    def prepare(
        self,
        rows: Sequence[tuple[Request, list[int]]],
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        device: torch.device,
    ) -> tuple[torch.Tensor, AttentionMetadata]:
        """As the engine's `InputBatch.prepare`, from scratch."""
        tokens = [request.all_token_ids[S - n : S] for (request, _), n, S in zip(rows, query_lens, seq_lens)]
        meta = AttentionMetadata.build([b for _, b in rows], seq_lens, query_lens, self.block_size, device)
        return torch.tensor([t for each in tokens for t in each], device=device), meta


# --- 3. From naive to final, one thing at a time ----------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """What has been done so far. With everything done this is the engine's runner."""

    name: str
    attention: str = "in place"
    fused: bool = True
    arrays: bool = True
    packed: bool = True


STAGES = [
    Stage("a batch, attention in a loop", "in a loop", False, False, False),
    Stage("attention for all at once", "gathered", False, False, False),
    Stage("q, k, v in one product", "gathered", True, False, False),
    Stage("arrays, not lists", "gathered", True, True, False),
    Stage("weights packed", "gathered"),
    Stage("keys and values in place"),
]


class StagedAttention:
    """The attention of a stage, in an engine's seam."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def make_cache(self, model: llama.Llama, num_blocks: int, block_size: int) -> Any:
        """Lesson 02's."""
        return fill("cache.paged")(model, num_blocks, block_size)

    def plan(self, meta: AttentionMetadata, cache: Any) -> llama.Attend:
        """The stage's attention; its gathered one takes decodes only, so prompts go through lesson 02's."""
        if self.stage.attention == "in a loop":
            return loop_attention(cache, meta)
        if self.stage.attention == "gathered" and max(meta.query_lens) == 1:
            return gathered_attention(cache, meta)
        return cache.attend(meta)


def make_core(model: llama.Llama, stage: Stage, num_seqs: int, max_model_len: int) -> EngineCore:
    """An engine for `num_seqs` sequences of `max_model_len` tokens, without what a stage does not have yet."""
    limits = SchedulerConfig(max_model_len, num_seqs, num_seqs * max_model_len)
    blocks = 1 + num_seqs * -(-max_model_len // 16)
    config = VllmConfig(enforce_eager=True, plug={"attention": StagedAttention(stage)})
    core = assemble.make_core(model, limits, blocks, 16, config, enable_prefix_caching=False)
    runner: Any = core.runner  # whose model and batch may be what an early stage had
    if not stage.packed:
        runner.model = model if stage.fused else split_projections(model)
    if not stage.arrays:
        runner.batch = ListBatch(16)
    return core


def generate_cached(model: llama.Llama, prompt: Sequence[int], n_out: int) -> list[int]:
    """Greedy decoding of one sequence, whose keys and values lie in one piece: lesson 01's loop."""
    shape = (2, len(prompt) + n_out, model.num_kv_heads, model.config.head_dim)
    cache = torch.zeros(model.config.num_hidden_layers, *shape, dtype=model.dtype, device=model.device)
    tokens, computed = list(prompt), 0

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        known = computed + len(q)
        cache[layer, 0, computed:known], cache[layer, 1, computed:known] = k, v
        return prefill_attention(q, *cache[layer, :, :known])

    for _ in range(n_out):
        new = torch.tensor(tokens[computed:], device=model.device)  # the prompt, then one token at a time
        hidden = model.forward(new, torch.arange(computed, len(tokens), device=model.device), attend)
        computed = len(tokens)
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


def alone(model: llama.Llama, prompts: Sequence[list[int]], n_out: int, cached: bool) -> tuple[list[list[int]], float]:
    """One request after another: their tokens, and seconds."""
    generate, start = generate_cached if cached else naive.generate, time.perf_counter()
    return [generate(model, prompt, n_out) for prompt in prompts], time.perf_counter() - start


# --- 4. Operations, counted -------------------------------------------------------------------------------------------


class CountOperations(TorchDispatchMode):
    """How many operations torch runs; views (a reshape, a slice) move no data and are not counted."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@functools.cache
def operations(stage: Stage, num_seqs: int) -> tuple[int, int]:
    """(per layer, outside the layers) of one decode step of `num_seqs` sequences, counted on two tiny models."""
    counts = []
    for layers in (2, 3):
        core = make_core(
            llama.random_model(0, num_hidden_layers=layers, device=torch.device("cpu")), stage, num_seqs, 32
        )
        for i in range(num_seqs):
            core.add_request(
                Request(str(i), [1 + i % 8] * 10, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
            )
        core.step()
        with CountOperations() as counter:
            core.step()
        counts.append(counter.count)
    return counts[1] - counts[0], 3 * counts[0] - 2 * counts[1]


# --- 5. Where the time goes -------------------------------------------------------------------------------------------

PARTS = {
    "products": "matrix products", "attention": "attention", "rest": "the rest of the model",
    "tensors": "the batch's tensors", "sampling": "sampling", "scheduler": "scheduler",
}  # fmt: skip


def profile(core: EngineCore, prompts: Sequence[list[int]], n_out: int) -> dict[str, float]:
    """Milliseconds of a decode step by part. A stopwatch around each call: a part excludes the parts inside it."""
    spent: dict[str, float] = defaultdict(float)
    running = [0.0]  # seconds that inner parts took, per part that is open

    def timed(part: str, fn: Callable) -> Callable:
        def call(*args: Any) -> Any:
            running.append(0.0)
            start = time.perf_counter()
            result = fn(*args)
            if common.HAS_GPU:
                torch.cuda.synchronize()
            took = time.perf_counter() - start
            spent[part] += took - running.pop()
            running[-1] += took
            return result

        return call

    runner, scheduler = core.runner, core.scheduler
    assert isinstance(runner, ModelRunner)
    model = runner.model = copy.copy(runner.model)
    model.linear = {name: timed("products", layer) for name, layer in model.linear.items()}
    attend = runner.attend
    runner.attend = timed("attention", lambda meta: timed("attention", attend(meta)))
    runner.forward = timed("rest", runner.forward)
    runner.batch.prepare = timed("tensors", runner.batch.prepare)
    runner.batch.update = timed("tensors", runner.batch.update)
    runner.sample = timed("sampling", runner.sample)
    scheduler.schedule = timed("scheduler", scheduler.schedule)
    scheduler.update_from_output = timed("scheduler", scheduler.update_from_output)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=n_out, ignore_eos=True)
        core.add_request(Request(str(i), list(prompt), params))
    core.step()  # the prompts
    spent.clear()
    steps = 0
    while scheduler.has_unfinished_requests():
        core.step()
        steps += 1
    return {part: spent[part] / steps * 1e3 for part in PARTS}


PROFILED = {"attention in a loop": STAGES[0], "batched, not packed": STAGES[3], "final": STAGES[-1]}


# --- 6. Ten thousand waiting requests ---------------------------------------------------------------------------------


class RescanningScheduler(Scheduler):
    """A scheduler that sorts its queue before every step: right, and slower with every request that joins it."""

    def _schedule_waiting(self, output: SchedulerOutput) -> None:
        assert isinstance(self.waiting, FCFSRequestQueue)
        waiting = sorted(self.waiting)
        self.waiting.clear()
        self.waiting.extend(waiting)
        super()._schedule_waiting(output)


def scheduler_seconds(running: int, waiting: int, steps: int = 40, kind: type[Scheduler] = Scheduler) -> float:
    """Median seconds of `schedule()` and `update_from_output()`: `running` decode, `waiting` more wait for a seat."""
    limits = SchedulerConfig(2048, running, max(2048, 16 * running))
    num_blocks = 1 + running * -(-(16 + steps + 8) // 16)
    scheduler = kind(limits, KVCacheManager(num_blocks, 16, 2048, enable_caching=False))
    for i in range(running + waiting):
        params = SamplingParams(max_tokens=steps + 8, ignore_eos=True)
        scheduler.add_request(Request(str(i), [0] * 16, params, arrival_time=float(i)))
    seconds = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        output = scheduler.schedule()
        planned = time.perf_counter()
        sampled = {request_id: [0] for request_id in output.num_scheduled_tokens}  # in place of a model
        ran = time.perf_counter()
        scheduler.update_from_output(output, sampled)
        seconds.append(planned - start + time.perf_counter() - ran)
    if len(scheduler.running) != running or len(scheduler.waiting) != waiting:
        raise common.CheckFailed(f"{len(scheduler.running)} run and {len(scheduler.waiting)} wait")
    return statistics.median(seconds[1:])  # in the first one, everybody was admitted


# --- The story --------------------------------------------------------------------------------------------------------


def print_profiles(profiles: dict[str, dict[str, float]]) -> None:
    """Per part of a decode step: ms, and its share; one column for each profiled stage."""
    total = {name: sum(parts.values()) for name, parts in profiles.items()}
    rows = []
    for part, text in PARTS.items():
        rows.append([text, *(f"{p[part]:.1f}  {p[part] / total[name]:4.0%}" for name, p in profiles.items())])
    rows.append(["a step", *(f"{ms:.1f}  100%" for ms in total.values())])
    common.table(["ms per decode step", *profiles], rows)


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    p.add_argument(
        "--sequences",
        type=arguments.number(int, 1, 64),
        default=8,
        metavar="N",
        help="in a batch (default %(default)s)",
    )
    p.add_argument("--rescan", action="store_true", help="step 4 with a scheduler that sorts its queue every step")
    p.add_argument(
        "--vllm", metavar="PYTHON", help="with --bench: the interpreter of an environment with vLLM's CPU build"
    )
    return p


TEXT = """The harbour was quiet that morning. Two ships lay at the quay, one of them loaded with grain, the other empty
but for a cat that slept on a coil of rope. The harbour master counted the crates, wrote a number into his book, crossed
it out, and counted again. He had done this for thirty years, and he had never once come to the same result twice."""
N_OUT = 6


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    if args.vllm and not args.bench:
        raise common.InputError("--vllm: only --bench compares with it")
    cli.start(args)
    B = args.sequences

    loader.check_context(args.model, 192 if args.bench else 64)
    model, tokenizer = loader.load(args.model)
    text = tokenizer.encode(TEXT)
    prompts = [text[i % 32 : i % 32 + 32] for i in range(B)]

    common.heading(f"1. From naive to final: prompts of 32 tokens, {N_OUT} greedy tokens each")
    rows, before, expected = [], 0.0, None
    for name, cached, n in (("no cache", False, 1), ("a cache, one by one", True, min(B, 2))):
        tokens, seconds = alone(model, prompts[:n], N_OUT, cached)
        rate = n * N_OUT / seconds
        rows.append([name, f"{rate:.0f}", f"{rate / before:.2f}x" if before else "", ""])
        if expected and tokens[0] != expected[0]:
            raise common.CheckFailed(f"{name}: other tokens")
        before, expected = rate, tokens
    finals: list[list[int]] = []
    for stage in STAGES:
        core = make_core(model, stage, B, 64)
        serve(core, prompts[:1], [2])  # warm up
        run = serve(core, prompts, [N_OUT] * B)
        finals = finals or run.token_ids
        if run.token_ids != finals or run.token_ids[: len(expected)] != expected:
            raise common.CheckFailed(f"{stage.name}: other tokens")
        per_layer, outside = operations(stage, B)
        count = per_layer * model.config.num_hidden_layers + outside
        rows.append(
            [stage.name, f"{run.tokens_per_second:.0f}", f"{run.tokens_per_second / before:.2f}x", f"{count:,}"]
        )
        before = run.tokens_per_second
    common.table([f"{B} sequences", "tokens/s", "gain", "operations a step"], rows)
    common.say(f"…{tokenizer.decode(prompts[0])[-40:]!r} → {tokenizer.decode(finals[0])!r}"[:108])
    common.say(f"✓ all {2 + len(STAGES)} ways write the same tokens")

    common.heading("2. The floor: matrix products and nothing else")
    floor = {n: matmul_seconds(pack_weights(model), n, n) for n in sorted({1, B})}
    weights = sum(layer.weight.numel() for layer in model.linear.values())
    for n, seconds in floor.items():
        common.say(f"{n:>2} rows: {seconds * 1e3:5.1f} ms, {n / seconds:4.0f} tokens/s at most; "
                   f"{4 * weights / seconds / 1e9:.0f} GB/s of weights, "
                   f"{2 * n * weights / seconds / 1e9:.0f} GFLOP/s")  # fmt: skip

    common.heading("3. Where a decode step's time goes")
    print_profiles(
        {
            name: profile(make_core(model, stage, B, 64), prompts, N_OUT)
            for name, stage in PROFILED.items()
            if stage is not STAGES[3]
        }
    )

    common.heading("4. Waiting requests cost nothing: a step of the scheduler, without a model")
    kind, rows = RescanningScheduler if args.rescan else Scheduler, []
    for running, waiting in ((100, 0), (1000, 0), (1000, 10_000)):
        seconds = scheduler_seconds(running, waiting, kind=kind)
        rows.append([f"{running:,}", f"{waiting:,}", f"{seconds * 1e6:,.0f}", f"{seconds / running * 1e6:.2f}"])
    common.table(["running", "waiting", "µs a step", "µs per running request"], rows)

    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)
