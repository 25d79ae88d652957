"""06c · Scaling out: one model on many processes, many engines behind one address.

The question: a model, or a crowd, has outgrown one device. Who decides, who computes, what travels between them, and
what happens to everybody's requests when one of these processes dies?

The mechanism:
  1. One scheduler, in the engine core, decides. Workers only execute: a decision is written once into shared memory,
     and every worker reads it there. An `Executor` brings it to them: in-process, processes, or Ray's actors.
  2. A worker keeps copies of the requests and hears what is new: a token here, a block there. Around these copies it
     runs the ordinary model runner of the earlier lessons, which cannot tell the difference.
  3. Tensor parallel: lesson 05c's shards, one all-reduce per half layer.
  4. Pipeline parallel: a stage is a shallower Llama; hidden states are sent on. As many micro-batches are in flight as
     there are stages, or all but one stage waits. Chunked prefill is what makes several micro-batches out of one.
  5. Data parallel: N engines. A coordinator tells every API server how long their queues are; the score is vLLM's.
     With prefix-aware routing a request goes where its prefix is cached, unless that engine is too far behind.
  6. Engines may run on other machines (`--headless`), API servers in several processes (`--api-server-count`).
  7. A dead worker is an end of file on its pipe: everybody hears of it at once, and nothing is left running.

Numbers to remember: p stages and one batch: (p − 1)/p of the GPUs wait. p stages and m micro-batches, once:
(p − 1)/(m + p − 1) of the time. A pipeline carries p micro-batches at once, and never takes a shorter step.

How to run:
  uv run python -m vllm.tours.06c_scaling_out                              the whole story: TP 3, then DP 2
  uv run python -m vllm.tours.06c_scaling_out --pipeline-parallel-size 2   two stages instead of three shards
  uv run python -m vllm.tours.06c_scaling_out --batches-in-flight 1        break it: a pipeline that waits for itself
  uv run python -m vllm.tours.06c_scaling_out --bench                      minutes: what a step costs in every form
  uv run python vllm/06_serving.py serve --tensor-parallel-size 3    serve with it; so with the other flags

Read for this: Huang et al. 2019 (GPipe), Agrawal et al. 2024 (Sarathi-Serve: pipeline bubbles), Zheng et al. 2024
(SGLang: cache-aware routing), vLLM 0.32 `v1/executor/`, `v1/engine/core_client.py`, `v1/engine/coordinator.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import asyncio
import functools
import random
import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from engine import arguments
from engine.config import SchedulerConfig, VllmConfig
from engine.core.scheduler import make_scheduler
from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model import folders, llama, loader
from engine.model.config import LlamaConfig
from engine.model.tokenizer import Tokenizer
from engine.output import ModelRunnerOutput, SchedulerOutput
from engine.parallel.config import ParallelConfig, get_pp_indices
from engine.parallel.executors import ExecutorFailed, MultiprocExecutor
from engine.parallel.pipeline import PipelineEngineCore
from engine.parallel.ranks import start_context
from engine.parallel.stages import skeleton
from engine.parallel.worker import WorkerSpec
from engine.parallel.workers import Workers, make_executor
from engine.request import Request, SamplingParams
from engine.serving.async_llm import AsyncLLM
from engine.serving.balancer import LoadBalancer, PrefixAwareBalancer
from engine.serving.engine_group import start_client
from engine.serving.start import make_engine
from lab import cli, layouts
from lab.dry_run import DryRun

KEY = "06c_scaling_out"


# --- What we want, without cleverness ---------------------------------------------------------------------------------


def bubble(stages: int, micro_batches: int) -> float:
    """Share of a pipeline's time in which a stage waits, if equal micro-batches run through it once (GPipe).

    m + p − 1 slots until the last has left, of which each stage works in m: (p − 1)/(m + p − 1).
    """
    return (stages - 1) / (micro_batches + stages - 1)


def in_stages(model: llama.Llama, token_ids: torch.Tensor, attend: llama.Attend, stages: int) -> torch.Tensor:
    """A pipeline on one machine: the same layers, a range after the other. [T] -> hidden [T, hidden]."""
    hidden, positions = None, torch.arange(len(token_ids), device=model.device)
    for stage in range(stages):
        layers = range(*get_pp_indices(model.config.num_hidden_layers, stage, stages))
        hidden = model.forward(token_ids, positions, attend, hidden, layers)
    assert hidden is not None
    return hidden


# --- A pipeline on a clock: the real scheduler and engine core, and stages that only take time ------------------------

PASS, TOKEN, SEND = 240, 1, 4  # ticks: the whole model once, each token in it, and a message to the next stage
WORKLOADS = {  # prompt tokens of each request, and tokens it wants
    "8 short prompts at once": ([32] * 8, [12] * 8),
    "one long prompt": ([1024], [8]),
    "4 long prompts": ([512] * 4, [8] * 4),
    "a long prompt among short ones": ([32, 32, 32, 768, 32, 32], [16] * 6),
}


class TimedStages:
    """Stands where `RemoteRunner` stands: stages that compute nothing, and take the time that they would.

    A micro-batch of T tokens takes (PASS + TOKEN · T)/stages in each stage, and enters one when it has arrived there
    and its predecessor has left.
    """

    def __init__(self, stages: int) -> None:
        self.stages, self.now, self.free = stages, 0, [0] * stages
        self.batches: list[dict[str, Any]] = []

    def submit(self, output: Any) -> Any:
        """Place a micro-batch: each stage begins when it is free and the one before has sent; ticks."""
        if not (tokens := output.total_num_scheduled_tokens):
            return None
        length, at, spans = -(-(PASS + TOKEN * tokens) // self.stages), self.now, []
        taken = {batch["place"] for batch in self.batches if batch["spans"][-1][1] > self.now}  # by those in flight
        for stage in range(self.stages):
            start = max(at, self.free[stage])
            self.free[stage] = start + length
            spans.append([start, start + length])
            at = start + length + SEND
        members = (*output.scheduled_running_reqs, *output.scheduled_new_reqs, *output.scheduled_resumed_reqs)
        sampled = {r.request_id: [0] for r in members if r.num_computed_tokens == r.num_tokens}
        self.batches.append(
            {
                "tokens": tokens,
                "requests": len(members),
                "samples": len(sampled),
                "spans": spans,
                "scheduled": dict(output.num_scheduled_tokens),
                "at": self.now,
                "place": min(set(range(len(taken) + 1)) - taken),
            }
        )
        return SimpleNamespace(result=functools.partial(self._finish, spans[-1][1], sampled))

    def _finish(self, at: int, sampled: dict[str, list[int]]) -> ModelRunnerOutput:
        self.now = max(self.now, at)
        return ModelRunnerOutput(sampled)


def pipeline(stages: int, in_flight: int, budget: int, prompts: Sequence[int], outputs: Sequence[int]) -> dict:
    """Every micro-batch's way through the stages, in ticks: `at` it was scheduled, and took the first free place."""
    config = SchedulerConfig(max_model_len=2048, max_num_seqs=32, max_num_batched_tokens=budget)
    scheduler = make_scheduler(config, 4096, 16, enable_prefix_caching=False)
    runner: Any = TimedStages(stages)  # it has what a core with steps in flight asks for
    core = PipelineEngineCore(scheduler, runner, in_flight)
    for i, (prompt, n) in enumerate(zip(prompts, outputs)):
        params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
        core.add_request(Request(str(i), [0] * prompt, params, arrival_time=i))
    first, finish = [-1] * len(prompts), [0] * len(prompts)
    while scheduler.has_unfinished_requests():
        for output in core.step():
            i = int(output.request_id)
            first[i] = runner.now if first[i] < 0 else first[i]
            finish[i] = runner.now
    busy = [sum(b["spans"][s][1] - b["spans"][s][0] for b in runner.batches) for s in range(stages)]
    return {
        "stages": stages,
        "batches": runner.batches,
        "makespan": runner.now,
        "busy": busy,
        "first": first,
        "finish": finish,
        "tokens": sum(outputs),
        "idle": stages * runner.now - sum(busy),
    }


def brief(stages: int, in_flight: int, budget: int, workload: str) -> dict[str, float]:
    """What a run comes to: its end, the share of time in which stages wait, and the mean first token."""
    trace = pipeline(stages, in_flight, budget, *WORKLOADS[workload])
    return {"makespan": trace["makespan"], "idle": trace["idle"] / (stages * trace["makespan"]),
            "batches": len(trace["batches"]), "ttft": sum(trace["first"]) / len(trace["first"])}  # fmt: skip


# --- Routing, measured on real schedulers -----------------------------------------------------------------------------

ROUTING = {"engines": 4, "groups": 24, "prefix": 512, "suffix": 32, "output": 32, "requests": 240, "per_step": 1.6,
           "blocks": 640, "seats": 16, "budget": 256, "skew": 1.2}  # fmt: skip


class CountedHits(DryRun):
    """An engine without a model that counts what its newcomers find in the prefix cache, and what they ask for."""

    hits = asked = 0

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.hits += sum(request.num_cached_tokens for request in output.scheduled_new_reqs)
        self.asked += sum(request.num_prompt_tokens for request in output.scheduled_new_reqs)
        return super().execute_model(output)


class RoundRobin(LoadBalancer):
    """The next engine in turn. The naive balancer."""

    def pick(self, request: Request) -> int:
        self.start = (self.start + 1) % len(self.counts)
        return self.start


def prefix_balancer(max_imbalance: int) -> PrefixAwareBalancer:
    """The engine that has the prefix, unless it is so much farther behind than the best one."""
    return PrefixAwareBalancer(ROUTING["engines"], num_blocks=ROUTING["blocks"], max_imbalance=max_imbalance)


def measure_routing(balancer: LoadBalancer, seed: int = 6) -> dict[str, float]:
    """Requests that share prefixes arrive at real schedulers with real prefix caches; no model. Steps are the clock.

    The popularity of the g-th prefix is 1/g^1.2. All pools together hold the prefixes, one alone does not.
    Engines report after every step, which is what the coordinator's 100 ms come to.
    """
    p, rng = ROUTING, random.Random(seed)
    config = SchedulerConfig(max_model_len=1024, max_num_seqs=p["seats"], max_num_batched_tokens=p["budget"])
    cores = [CountedHits(make_scheduler(config, p["blocks"], 16)) for _ in range(p["engines"])]
    weights = [1 / (g + 1) ** p["skew"] for g in range(p["groups"])]
    first: dict[str, int] = {}
    at: dict[str, int] = {}
    spread: list[int] = []
    arrived = step = hits = asked = 0
    due = 0.0
    while arrived < p["requests"] or any(core.scheduler.has_unfinished_requests() for core in cores):
        due += p["per_step"]
        while due >= 1 and arrived < p["requests"]:
            due -= 1
            group = rng.choices(range(p["groups"]), weights)[0]
            prompt = [group * 1000 + i for i in range(p["prefix"])] + [
                10**6 + arrived * 100 + i for i in range(p["suffix"])
            ]
            request = Request(
                str(arrived),
                prompt,
                SamplingParams(temperature=0, max_tokens=p["output"], ignore_eos=True),
                arrival_time=arrived,
            )
            at[request.request_id] = step
            cores[balancer.choose(request)].add_request(request)
            arrived += 1
        for engine, core in enumerate(cores):
            if core.scheduler.has_unfinished_requests():
                for output in core.step():
                    first.setdefault(output.request_id, step + 1)
                    if output.finish_reason:
                        balancer.finished(engine)
            pool = core.scheduler.kv_cache_manager.block_pool
            usage = 1 - pool.num_free_blocks / (pool.num_blocks - 1)
            balancer.counts[engine] = [len(core.scheduler.waiting), len(core.scheduler.running), usage]
        loads = [len(core.scheduler.requests) for core in cores]
        spread.append(max(loads) - min(loads))
        step += 1
    for core in cores:
        hits, asked = hits + core.hits, asked + core.asked
    waits = sorted(first[i] - at[i] for i in first)
    return {
        "hit_rate": hits / asked,
        "mean_ttft": sum(waits) / len(waits),
        "p99_ttft": waits[-(-99 * len(waits) // 100) - 1],
        "steps": step,
        "spread": sum(spread) / len(spread),
    }


# --- The story --------------------------------------------------------------------------------------------------------

TEXTS = ["The capital of France is", "Once upon a time, in a small village by the sea,", "Water boils at",
         "To make bread you need flour,"]  # fmt: skip
NEW_TOKENS = 6


def build_engine(
    model: str | None,
    parallel: ParallelConfig | None,
    tokenizer: Tokenizer,
    executor: Any = None,
    in_flight: int | None = None,
    budget: int = 64,
) -> Any:
    """Lesson 06's engine, in this process or on the workers of an executor."""
    options: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_seqs": 16,
        "max_num_batched_tokens": budget,
        "num_gpu_blocks_override": 257,
    }
    if parallel is None:
        return LLMEngine(loader.load(model)[0], tokenizer, config=VllmConfig(enforce_eager=True), **options)
    config = LlamaConfig.from_folder(folders.model_folder(model))
    workers = Workers(executor, parallel, skeleton(config, parallel, torch.float32))
    engine = LLMEngine(workers.model, tokenizer, config=VllmConfig(workers=workers), **options)
    engine.core.max_concurrent_batches = in_flight or parallel.pipeline_parallel_size
    return engine


def answer(engine: Any, prompts: Sequence[str], max_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """Greedy tokens of every prompt, all at once."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    found: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
    return [found[str(i)] for i in range(len(prompts))]


def idle_share(spans: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Share of the time between the first start and the last end in which ranks did not compute."""
    wall = max(end for rank in spans for _, end in rank) - min(start for rank in spans for start, _ in rank)
    return 1 - sum(end - start for rank in spans for start, end in rank) / (wall * len(spans))


async def serve_engines(args: argparse.Namespace, prompts: Sequence[str]) -> dict[str, Any]:
    """`data_parallel_size` engines behind one front end, as `serve` starts them: what each answered, and where."""
    engine_args = EngineArgs(
        model=args.model,
        data_parallel_size=args.data_parallel_size,
        max_model_len=256,
        max_num_seqs=8,
        kv_cache_gib=0.05,
        max_num_batched_tokens=64,
        seed=args.seed,
        enforce_eager=True,
    )
    start = time.perf_counter()
    llm = await AsyncLLM.start(make_engine, engine_args, folders.model_folder(args.model), start_client)
    try:
        started, params = (
            time.perf_counter() - start,
            SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True),
        )
        engines: dict[str, int] = {}

        async def client(i: int) -> list[int]:
            name = f"client-{i}"
            collector = llm.add_request(name, prompts[i], params)
            (own_name,) = llm.front.callers[name].unfinished
            engines[name] = llm.client.engine_of[own_name]
            *_, final = [output async for output in llm.outputs(collector)]
            return final.outputs[0].token_ids

        tokens = await asyncio.gather(*map(client, range(len(prompts))))
        left = await llm.call_utility("check_idle")
        return {
            "tokens": tokens,
            "engines": [engines[f"client-{i}"] for i in range(len(prompts))],
            "left": left,
            "start_s": started,
            "ready": llm.ready.about["engines"],
        }
    finally:
        await llm.shutdown()


def build_parser() -> arguments.Parser:
    p, whole = cli.parser(__doc__), functools.partial(arguments.number, int)
    p.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=whole(1, 16),
        metavar="N",
        help="shards of each layer (default 3 or, where that is forbidden, fewest above 1; 1 with a pipeline)",
    )
    p.add_argument(
        "--pipeline-parallel-size",
        "-pp",
        type=whole(1, 16),
        default=1,
        metavar="N",
        help="ranges of layers (default %(default)s)",
    )
    p.add_argument(
        "--data-parallel-size",
        "-dp",
        type=whole(1, 8),
        default=2,
        metavar="N",
        help="engines in step 2 (default %(default)s)",
    )
    p.add_argument("--distributed-executor-backend", choices=("mp", "ray"), default="mp", help="where workers run")
    p.add_argument(
        "--batches-in-flight",
        type=whole(1, 16),
        metavar="N",
        help="steps at once in a pipeline (default: one per stage; 1 breaks it)",
    )
    return p


def show_workers(
    args: argparse.Namespace, parallel: ParallelConfig, tokenizer: Tokenizer, want: list[list[int]]
) -> float | None:
    """Step 1: the same tokens; who holds what; what travelled; the experts; and a worker that dies. Milliseconds until
    that was noticed; None: none was killed."""
    executor = make_executor(parallel)
    try:
        return _tell_of_workers(args, parallel, executor, tokenizer, want)
    finally:
        executor.shutdown()


def _tell_of_workers(
    args: argparse.Namespace, parallel: ParallelConfig, executor: Any, tokenizer: Tokenizer, want: list[list[int]]
) -> float | None:
    held = executor.collective_rpc("load_model", WorkerSpec(args.model, parallel))
    common.say(f"parameters held by each worker: {', '.join(f'{n / 1e6:.1f} M' for n in held)}")
    engine = build_engine(args.model, parallel, tokenizer, executor, args.batches_in_flight)
    got = answer(engine, TEXTS)
    common.say(f"{TEXTS[0]}…{tokenizer.decode(got[0])!r}")
    common.check_equal(f"{len(TEXTS)} requests at once: the tokens of one process", got, want)
    spans = executor.collective_rpc("take_spans")
    counts = executor.collective_rpc("take_counts")[0]
    if counts:
        common.table(
            ["rank 0 told its peers", "calls", "bytes"],
            [[name, f"{c['calls']:,}", f"{c['bytes']:,}"] for name, c in counts.items()],
        )
    if parallel.pipeline_parallel_size > 1:
        common.say(f"{len(spans[0])} steps; stages were idle {idle_share(spans):.0%} of the time")
    if hasattr(executor, "bytes_broadcast"):
        before = executor.bytes_broadcast
        answer(engine, TEXTS)
        calls = len(executor.collective_rpc("take_spans")[0])
        common.say(
            f"the scheduler's decisions: {(executor.bytes_broadcast - before) / calls:,.0f} bytes a step, "
            "written once for all workers"
        )
    if parallel.pipeline_parallel_size == 1:
        found = executor.collective_rpc(layouts.moe_on_rank)
        for name, text in (
            ("tensor", "12 experts in slices, all-reduce"),
            ("expert", "12 experts dealt out, all-to-all"),
            ("sequence", "the same, between reduce-scatter and all-gather"),
        ):
            worst = torch.tensor([rank["errors"][name] for rank in found]).max()
            if not worst <= common.TOLERANCE[torch.float32]:
                raise common.CheckFailed(f"{text}: relative error {worst:.3g}")
            common.say(f"✓ {text}: relative error {worst:.1e}")
    if not isinstance(executor, MultiprocExecutor):
        return None
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    engine.add_request("doomed", TEXTS[0], params)
    engine.step()
    killed = time.perf_counter()
    executor.processes[-1].kill()
    try:
        while engine.has_unfinished_requests():
            engine.step()
    except ExecutorFailed as error:
        common.say(f"✓ one was killed in the middle of a request: {error}")
        noticed = 1e3 * (time.perf_counter() - killed)
    else:
        raise common.CheckFailed("a worker was killed, and nobody noticed")
    common.check_equal(
        "none is left", [process.is_alive() for process in executor.processes], [False] * parallel.world_size
    )
    return noticed


def show_engines(args: argparse.Namespace, want: list[list[int]]) -> float:
    """Step 2: the same tokens from several engines behind one front end. The seconds until all had started."""
    found = asyncio.run(serve_engines(args, TEXTS * 2))
    common.check_equal(f"{len(TEXTS) * 2} requests: the tokens of one engine", found["tokens"], want * 2)
    share = Counter(found["engines"])
    common.say(
        f"engine 0 answered {share[0]} of them, "
        + ", ".join(f"engine {i} {share[i]}" for i in range(1, args.data_parallel_size))
    )
    common.check_equal(
        "nothing is left in any engine", found["left"], {"unfinished": 0, "tables": 0, "owned_blocks": 0}
    )
    return found["start_s"]


def layout_of(args: argparse.Namespace, config: LlamaConfig) -> ParallelConfig:
    """The layout of step 1. Raises InputError for one that does not fit the model."""
    alone = args.pipeline_parallel_size == 1
    tp = args.tensor_parallel_size or (layouts.default_size(config) if alone else 1)
    parallel = ParallelConfig(tp, args.pipeline_parallel_size, args.distributed_executor_backend)
    parallel.check(config)
    return parallel


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    cli.start(args)
    config = loader.check_context(args.model, 256)
    parallel = layout_of(args, config)
    start_context()  # it has imports to do, while we go on
    tokenizer = Tokenizer(folders.model_folder(args.model))

    n, pp = parallel.world_size, parallel.pipeline_parallel_size
    common.heading(f"1. One scheduler, {n} worker{'s' * (n > 1)}: TP {parallel.tensor_parallel_size} x PP {pp}")
    want = answer(build_engine(args.model, None, tokenizer), TEXTS)
    show_workers(args, parallel, tokenizer, want)

    if args.data_parallel_size > 1:
        common.heading(f"2. {args.data_parallel_size} engines behind one front end")
        show_engines(args, want)

    common.heading("3. Pipelines: 4 stages, a real scheduler, simulated time (240 ticks a pass, 1 a token)")
    short, long = "8 short prompts at once", "4 long prompts"
    runs = [
        ("8 short prompts, no pipeline", brief(1, 1, 64, short)), ("one batch in flight", brief(4, 1, 64, short)),
        ("4 in flight, prompts whole", brief(4, 4, 2048, short)), ("4 in flight, chunks of 64", brief(4, 4, 64, short)),
        ("4 long prompts, no pipeline", brief(1, 1, 256, long)), ("one batch in flight", brief(4, 1, 256, long)),
        ("4 in flight, prompts whole", brief(4, 4, 2048, long)), ("4 in flight, chunks of 256", brief(4, 4, 256, long)),
    ]  # fmt: skip
    common.table(["", "micro-batches", "stages idle", "first token", "done"], [
        [text, x["batches"], f"{x['idle']:.0%}", f"{x['ttft']:.0f}", x["makespan"]] for text, x in runs
    ])  # fmt: skip

    common.heading("4. Routing: 240 requests with 24 shared prefixes, 4 engines (real schedulers and caches, no model)")
    balancers = {"round robin": RoundRobin(4), "vLLM's score": LoadBalancer(4),
                 "prefix, at most 4 above best": prefix_balancer(4),
                 "prefix, at most 16 above best": prefix_balancer(16),
                 "prefix, whatever the load": prefix_balancer(1000)}  # fmt: skip
    common.table(["", "hit rate", "TTFT, steps", "p99", "longest − shortest queue"], [
        [text, f"{x['hit_rate']:.0%}", f"{x['mean_ttft']:.2f}", x["p99_ttft"], f"{x['spread']:.1f}"]
        for text, balancer in balancers.items() for x in [measure_routing(balancer)]
    ])  # fmt: skip

    common.heading("5. Sizing: two nodes of 8 H100s, up to 256 sequences of 4,096 tokens, arithmetic")
    rows = []
    for name, choices in layouts.CHOICES.items():
        for layout in choices:
            x = layouts.loaded(layouts.models()[name], layout)
            alone = layouts.cost(layouts.models()[name], layout, sequences=1)
            rows.append([name, layout, f"{x['weights_gb']:.0f}", f"{x['kv_tokens'] / 1e6:.2f} M",
                         f"{x['kv_copies']:.0f}", x["sequences"], f"{alone['latency_ms']:.1f}",
                         f"{x['latency_ms']:.1f}", f"{x['tokens_per_second']:,.0f}"])  # fmt: skip
    common.table(["", "", "weights, GB", "KV tokens", "copies", "fit", "ms, one", "ms, all", "tokens/s"], rows)
    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)
