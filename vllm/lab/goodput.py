"""When is it worth it? Goodput of colocated, chunked and disaggregated pools. For lesson 08.

Moving prefill and decode to different GPUs makes nothing faster: it is the same work, plus a transfer. What it buys is
that a decode step no longer waits for somebody's prompt. So it cannot be judged by throughput, only by *goodput*: the
highest request rate at which 90 % of the requests still meet a limit on the time to first token (TTFT) and one on the
time per output token (TPOT). That depends on the lengths, the limits, the link and the split; so it is simulated here.

  1. A step's duration comes from a roofline with measured efficiencies; `fit` finds them in measured steps.
  2. Each GPU is the engine on a clock: its real Scheduler and KVCacheManager, as careful as in lesson 04 (nobody is
     admitted whose blocks may not last), and steps that only take time.
  3. Between them run links: a prompt's KV cache leaves after its prefill, or layer by layer during it.
  4. Lengths follow published traces (Azure 2023, Mooncake 2025), arrivals are Poisson, goodput is found by bisection.

Nothing here runs a model, except `measure_steps`. Times are integers: microseconds, and picoseconds for what a token
costs, so that a browser repeats the arithmetic to the last digit. Run by itself, this file simulates RECORDED anew
and prints it: half an hour.

Read for this: Zhong et al. 2024 (DistServe: goodput), Patel et al. 2024 (Splitwise), Qin et al. 2025 (Mooncake),
Singh et al. 2025 (EPD: encode as a third stage), vLLM 0.32 `v1/core/sched/scheduler.py`, `benchmarks/serve.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import argparse
import functools
import heapq
import itertools
import math
import random
import re
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from engine.config import SchedulerConfig, VllmConfig
from engine.core.engine_core import EngineCore
from engine.core.kv_cache_manager import KVCacheManager
from engine.model import llama
from engine.output import SchedulerOutput
from engine.request import Request, SamplingParams
from engine.worker.assemble import make_runner
from lab import figures, roofline
from lab.hardware import GPU, HARDWARE
from lab.parameters import checked
from lab.reserving import ReservingScheduler
from lab.workload import AZURE, arrival_times, quantile

MODEL, CARD = roofline.MODELS["Llama-3.1-8B"], HARDWARE["H100 80GB"]
KV_BYTES = roofline.KVCacheSpec.from_config(MODEL).bytes_per_token()

# Bytes/s in one direction. NVLink 4 and the network cards: data sheets; PCIe 4 x16: what large copies reach.
LINKS = {"NVLink": 450 * 10**9, "InfiniBand 400G": 50 * 10**9, "PCIe 4": 25 * 10**9, "10 GbE": 1_250_000_000}


# --- 1. What a step costs -------------------------------------------------------------------------------------------
#
#     t = overhead + max(weights, token·T + row·R) + pair · (query-key pairs of prompts) + context · (keys of decodes)
#
# The matrix products of a step's T tokens either read the weights, once for all, or compute: the slower of the two is
# what they take. Few tokens: memory. Many: compute. R sequences need logits. Attention is added, since it runs in turn:
# that of prompts computes, that of decodes reads its sequence's cache.

Work = Sequence[tuple[int, int]]  # of each sequence in a step: new tokens, context length with them


def features(work: Work) -> tuple[int, int, int, int]:
    """(T tokens, R sequences, pairs, keys) of a step. A chunk's queries see S − n + 1 to S keys."""
    pairs = sum(n * S - n * (n - 1) // 2 for n, S in work if n > 1)
    return sum(n for n, _ in work), len(work), pairs, sum(S for n, S in work if n == 1)


@dataclass(frozen=True)
class CostModel:
    """Integer picoseconds for each thing that a step does; calling it gives the step's duration in microseconds."""

    overhead: int  # launches, sampling, whatever the CPU cannot hide
    weights: int  # reading all the weights once
    token: int  # the matrix products of one token
    row: int  # the logits of one sequence
    pair: int  # attention of one query to one key, in a prompt
    context: int  # reading one cached token, in a decode

    def __call__(self, T: int, R: int, pairs: int, keys: int) -> int:
        products = max(self.weights, self.token * T + self.row * R)
        return (self.overhead + products + self.pair * pairs + self.context * keys) // 10**6

    def of(self, work: Work) -> int:
        """Microseconds of a step."""
        return self(*features(work))

    @classmethod
    def roofline(
        cls, config: Mapping[str, Any], gpu: GPU, flops: float, bandwidth: float, overhead: float = 0.0
    ) -> CostModel:
        """From a model's shapes and a GPU's data sheet; `flops` and `bandwidth` are the shares of it reached."""
        spec, (W, W_head) = roofline.KVCacheSpec.from_config(config), roofline.weights_read(config)
        rate, speed = flops * gpu.flops, bandwidth * gpu.bandwidth
        pair_flops = 4 * spec.num_layers * config["num_attention_heads"] * spec.head_size
        seconds = (
            overhead,
            2 * (W + W_head) / speed,
            2 * W / rate,
            2 * W_head / rate,
            pair_flops / rate,
            spec.bytes_per_token() / speed,
        )
        return cls(*(round(x * 1e12) for x in seconds))


@dataclass(frozen=True)
class SerialCost(CostModel):
    """A GPU that reads weights and computes less at a time than the roofline believes: of the shorter of the two,
    `exposed` per cent come on top. 0 is the roofline, 100 one after the other."""

    exposed: int = 100

    def __call__(self, T: int, R: int, pairs: int, keys: int) -> int:
        shorter = min(self.weights, self.token * T + self.row * R)
        return super().__call__(T, R, pairs, keys) + shorter * self.exposed // 10**8


# A decode step of an 8B model on an H100 takes 6.44 ms + 43.7 ns per token of context (vLLM's blog, 22 April 2026).
# The slope is 90 % of the bandwidth. At 90 %, the weights take 4.98 ms; the rest is overhead. 60 % of the data sheet's
# FLOP/s is what published prefill throughputs come to: an assumption.
H100_8B = CostModel.roofline(MODEL, CARD, flops=0.6, bandwidth=0.9, overhead=1.46e-3)


def fit(table: Sequence[Sequence[float]]) -> CostModel:
    """The cost model behind measured steps: rows of (T, R, pairs, keys, seconds), as `measure_steps` returns them.

    Least squares on *relative* errors, nothing below zero. Which side of the max a step is on depends on the answer:
    so guess, solve, look again, until the sides stay. Raises ValueError for fewer rows than coefficients.
    """
    if len(table) < 6:
        raise ValueError(f"{len(table)} measured steps; at least 6 are needed for 6 coefficients")
    rows = np.array(table, dtype=float)
    T, R, pairs, keys, seconds = rows.T
    best: tuple[float, np.ndarray] | None = None
    for border in sorted(set(T)):  # where the first guess lets computing begin
        computes, solution = border <= T, np.zeros(6)
        for _ in range(20):
            side = computes.astype(float)
            columns = np.stack([np.ones_like(T), 1 - side, side * T, side * R, pairs, keys], 1) / seconds[:, None]
            solution = nonnegative_least_squares(columns, np.ones_like(T))
            now = solution[2] * T + solution[3] * R > solution[1]
            if (now == computes).all():
                break
            computes = now
        error = float(np.median(relative_errors(solution, rows)))
        if best is None or error < best[0]:
            best = error, solution
    assert best is not None
    return CostModel(*(round(x * 1e12) for x in best[1]))


def nonnegative_least_squares(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    """min ‖Ax − b‖ with x ≥ 0, [M, N] and [M] -> [N]: leave out whatever would be negative, the worst first."""
    scale = np.maximum(np.abs(A).max(0), 1e-300)
    keep = [j for j in range(A.shape[1]) if np.abs(A[:, j]).max() > 0]
    while True:
        x = np.zeros(A.shape[1])
        if not keep:
            return x
        x[keep] = np.linalg.lstsq(A[:, keep] / scale[keep], b, rcond=None)[0] / scale[keep]
        worst = min(keep, key=lambda j: x[j] * scale[j])
        if x[worst] >= 0:
            return x
        keep.remove(worst)


def relative_errors(coefficients: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """|model / measured − 1| of each row."""
    T, R, pairs, keys, seconds = rows.T
    overhead, weights, token, row, pair, context = coefficients
    model = overhead + np.maximum(weights, token * T + row * R) + pair * pairs + context * keys
    return np.abs(model / seconds - 1)


def fit_error(cost: CostModel, table: Sequence[Sequence[float]]) -> float:
    """The median relative error of a cost model on measured steps."""
    coefficients = np.array([*asdict(cost).values()]) / 1e12
    return float(np.median(relative_errors(coefficients, np.array(table, dtype=float))))


# --- 2. Three schedulers: one that does it all, and two halves of it -----------------------------------------------


class PrefillScheduler(ReservingScheduler):
    """A prompt that is done leaves the books, but not the memory: its blocks wait for the link.

    vLLM: `Scheduler._free_request(request, delay_free_blocks=True)`, until the connector says that they were sent.
    """

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager) -> None:
        super().__init__(config, kv_cache_manager)
        self.unsent: dict[str, Request] = {}

    def _free_request(self, request: Request) -> None:
        self.unsent[request.request_id] = self.requests.pop(request.request_id)
        self.finished_req_ids.append(request.request_id)

    def release(self, request_id: str) -> None:
        """The blocks have arrived elsewhere."""
        self.kv_cache_manager.free(self.unsent.pop(request_id))


class DecodeScheduler(ReservingScheduler):
    """Requests come with their prompt's keys and values: each is behind by one token, like anybody who decodes.

    That token is the prompt's last. It is computed here once more, because its logits are the first output token.
    """

    def num_slots(self, request: Request) -> int:
        return super().num_slots(request) - request.num_computed_tokens


# --- 3. A GPU: the engine on a clock --------------------------------------------------------------------------------


Outcome = tuple[int, float, int]  # of a request, in µs: time to first token, mean time per further one, longest gap


@dataclass
class Job:
    """A request's way through the cluster. Times in microseconds; −1: not yet."""

    name: str
    arrival: int
    prompt: int  # tokens, those of images included
    output: int
    image_tokens: int = 0
    encode_us: int = 0  # what the vision encoder needs for them
    prefill: list[int] = field(default_factory=lambda: [-1, -1])  # first prompt token scheduled, last one computed
    transfer: list[int] = field(default_factory=lambda: [-1, -1])  # of the KV cache: begins, has arrived
    first: int = -1  # first token heard
    last: int = -1
    gap: int = 0  # the longest silence between two tokens
    path: list[int] = field(default_factory=list)  # the GPUs it saw

    @property
    def outcome(self) -> Outcome:
        return self.first - self.arrival, (self.last - self.first) / max(1, self.output - 1), self.gap


class Instance(EngineCore):
    """One GPU with an engine: `begin` decides about a step and its duration, `finish` hands out its tokens.

    Roles: "E" encodes images, "P" computes prompts, "D" decodes; a colocated engine has them all. While everybody
    decodes, nobody ends and nobody arrives, the scheduler would say the same again and again: so `begin` takes up to
    `leap` steps at once, and `interrupt` cuts that short.
    """

    def __init__(
        self,
        number: int,
        roles: str,
        scheduler: ReservingScheduler,
        cost: CostModel,
        jobs: Mapping[str, Job],
        leap: int,
    ) -> None:
        super().__init__(scheduler)
        self.number, self.roles, self.cost, self.jobs, self.leap = number, roles, cost, jobs, leap
        self.output: SchedulerOutput | None = None  # the step under way
        self.ends: list[int] = []  # when it ends: several times, if it is a leap
        self.plan = 0  # number of the plan: the announced end of an older one no longer counts
        self.link_free = 0  # when its link is done with all that was promised
        self.backlog = 0  # prompt tokens that are not computed yet
        self.promised = 0  # requests whose KV cache is on its way
        self.steps: list[list[int]] = []  # start, end, prompt tokens, decodes (of a leap: in each of its steps)

    @property
    def load(self) -> tuple[int, int, int]:
        """What a router compares: prompt tokens in the queue, then requests."""
        return self.backlog, len(self.scheduler.requests) + self.promised, self.number

    def submit(self, job: Job) -> None:
        """Hand in what this GPU does of a request. A decoder finds all but the prompt's last token computed."""
        tokens = 1 if self.roles == "E" else job.prompt
        sampling = SamplingParams(max_tokens=job.output if "D" in self.roles else 1, ignore_eos=True)
        request = Request(job.name, [0] * tokens, sampling, arrival_time=job.arrival)
        self.add_request(request)
        if self.roles == "D":
            request.num_computed_tokens = tokens - 1
        self.backlog += tokens - request.num_computed_tokens
        job.path.append(self.number)

    def begin(self, now: int) -> bool:
        """Start the step that the scheduler chooses. False: there is nothing to do."""
        output = self.scheduler.schedule()
        self.output = output if output.num_scheduled_tokens else None
        if self.output is None:
            return False
        requests, steps, prompt_tokens, pairs, keys, encode = self.scheduler.requests, self.leap, 0, 0, 0, 0
        for request_id, n in output.num_scheduled_tokens.items():
            request = requests[request_id]
            S = request.num_computed_tokens
            if S - n < request.num_prompt_tokens:
                prompt_tokens += n
            if n == 1:
                keys += S
            else:
                pairs += n * S - n * (n - 1) // 2
            decodes_on = n == 1 and request.num_tokens == S
            steps = min(steps, request.max_tokens - request.num_output_tokens) if decodes_on else 1
        for request in output.scheduled_new_reqs:
            job = self.jobs[request.request_id]
            encode += job.encode_us if "E" in self.roles else 0
            if "P" in self.roles:
                job.prefill[0] = now
        T, B = output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)
        durations = (encode + self.cost(T, B, pairs, keys + i * B) for i in range(int(steps)))
        self.ends = [now + passed for passed in itertools.accumulate(durations)]
        self.backlog -= prompt_tokens
        self.steps.append([now, self.ends[-1], prompt_tokens, T - prompt_tokens])
        return True

    def interrupt(self, now: int) -> bool:
        """Somebody has arrived: stop after the step that runs now. True if that is sooner than was announced."""
        running = bisect_left(self.ends, now)
        sooner = running + 1 < len(self.ends)
        if sooner:
            del self.ends[running + 1 :]
            self.steps[-1][1] = self.ends[-1]
        return sooner

    def finish(self) -> list[str]:
        """The step is over: whoever has caught up gets its tokens. Returns who has all of them."""
        output, requests, count = self.output, self.scheduler.requests, len(self.ends)
        assert output is not None
        first, last = self.ends[0], self.ends[-1]
        longest = last - self.ends[-2] if count > 1 else 0  # contexts grow: a leap's last step is its longest
        tokens, sampled, hears = [0] * count, {}, "D" in self.roles
        for request_id in output.num_scheduled_tokens:
            request = requests[request_id]
            if request.num_computed_tokens < request.num_tokens:
                continue  # the prompt goes on
            request.num_computed_tokens += count - 1
            sampled[request_id] = tokens
            job = self.jobs[request_id]
            if "P" in self.roles and not request.output_token_ids:
                job.prefill[1] = first
            if hears:
                silence = first - job.last if job.first >= 0 else 0
                if job.first < 0:
                    job.first = first
                job.gap, job.last = max(job.gap, silence, longest), last
        return [o.request_id for o in self.scheduler.update_from_output(output, sampled) if o.finish_reason]


# --- 4. The cluster: pools of GPUs, and links between them ----------------------------------------------------------

BLOCK_SIZE = 128  # coarse, to keep the books short
DEFAULT_BUDGET = 8192  # vLLM 0.32's server on an H100
SEATS = 256  # max_num_seqs
LEAP = 32
ARRIVAL = -1  # events of this rank come before the ends of steps
HIDDEN_BYTES = 2 * MODEL["hidden_size"]  # what one image token is on the wire from an encoder


@dataclass(frozen=True)
class Deployment:
    """Which GPUs do what: "4PD" four colocated engines, "2P2D" two and two, "1E2P1D" with an encoder in front.

    `budget` is what a step of an engine that computes prompts may hold; None: whole prompts, as in lesson 04.
    Raises InputError for a layout in which some stage has no GPU.
    """

    layout: str
    budget: int | None = None
    link: int = LINKS["InfiniBand 400G"]  # bytes/s
    layerwise: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"([1-9]\d*(EPD|EP?|PD?|D))+", self.layout) or not {"P", "D"} <= set(self.layout):
            raise common.InputError(
                f"layout {self.layout!r}: allowed: numbers of GPUs and what they do, P and D among "
                "it, e.g. 4PD, 2P2D, 1E2P1D"
            )

    @property
    def pools(self) -> list[tuple[int, str]]:
        return [(int(count), roles) for count, roles in re.findall(r"(\d+)([EPD]+)", self.layout)]

    @property
    def gpus(self) -> int:
        return sum(count for count, _ in self.pools)

    def scheduler(self, roles: str, max_model_len: int, num_blocks: int) -> ReservingScheduler:
        """The scheduler of an engine with these roles."""
        manager = KVCacheManager(num_blocks, BLOCK_SIZE, max_model_len, enable_caching=False)
        if "P" in roles and "D" in roles and self.budget is None:
            budget = max(max_model_len, DEFAULT_BUDGET)
            config = SchedulerConfig(max_model_len, SEATS, budget, enable_chunked_prefill=False)
            return ReservingScheduler(config, manager)
        kind = DecodeScheduler if roles == "D" else ReservingScheduler if "D" in roles else PrefillScheduler
        budget = self.budget or DEFAULT_BUDGET
        return kind(SchedulerConfig(max_model_len, 1 if roles == "E" else min(budget, SEATS), budget), manager)


def streamed(prefill: Sequence[int], wire: int, free: int, pieces: int) -> tuple[int, int]:
    """(begin, end) of a transfer of `wire` µs in `pieces`, layer by layer, while the prompt is computed in [a, b).

    The first piece is ready at a + (b − a)/pieces, and the last one leaves when it is computed and the others are gone:
    end = max(begin + wire, b + wire/pieces).
    """
    a, b = prefill
    begin = max(free, a + (b - a) // pieces)
    return begin, max(begin + wire, b + -(-wire // pieces))


class Cluster:
    """Events in the order of time: requests arrive, steps end, caches arrive. Nothing else ever happens."""

    def __init__(
        self,
        deployment: Deployment,
        jobs: Sequence[Job],
        cost: CostModel = H100_8B,
        leap: int = LEAP,
        kv_tokens: int | None = None,
    ) -> None:
        self.deployment, self.jobs, self.now = deployment, {job.name: job for job in jobs}, 0
        self.events: list[tuple[int, int, int, Callable, tuple]] = []
        self.order = itertools.count()
        longest = max(job.prompt + job.output for job in jobs)
        num_blocks = 1 + (kv_tokens or KV_TOKENS) // BLOCK_SIZE
        self.instances = []
        for count, roles in deployment.pools:
            for _ in range(count):
                scheduler = deployment.scheduler(roles, longest, num_blocks)
                price = CostModel(0, 0, 0, 0, 0, 0) if roles == "E" else cost
                self.instances.append(Instance(len(self.instances), roles, scheduler, price, self.jobs, leap))
        self.bytes_moved = 0

    def run(self) -> list[Job]:
        """Everything that follows from the arrivals."""
        for job in self.jobs.values():
            self.at(job.arrival, ARRIVAL, self.arrive, job)
        while self.events:
            self.now, _, _, action, args = heapq.heappop(self.events)
            action(*args)
        return list(self.jobs.values())

    def at(self, when: int, rank: int, action: Callable, *args: Any) -> None:
        """In one and the same microsecond, whoever arrives comes first, then steps end, GPU by GPU."""
        heapq.heappush(self.events, (when, rank, next(self.order), action, args))

    def choose(self, stage: str) -> Instance:
        """The router: of the GPUs that do this, the one with the least to do."""
        return min((i for i in self.instances if stage in i.roles), key=lambda i: i.load)

    def arrive(self, job: Job) -> None:
        self.enter(self.choose("E" if job.encode_us else "P"), job)

    def enter(self, instance: Instance, job: Job) -> None:
        instance.submit(job)
        self.wake(instance)

    def wake(self, instance: Instance) -> None:
        """Something has changed for this GPU: begin if it idles, or do not leap past now."""
        if instance.interrupt(self.now) if instance.output else instance.begin(self.now):
            self.announce(instance)

    def announce(self, instance: Instance) -> None:
        instance.plan += 1
        self.at(instance.ends[-1], instance.number, self.step_ended, instance, instance.plan)

    def step_ended(self, instance: Instance, plan: int) -> None:
        """Hand over whom this step finished with, and begin the next one; an outdated plan does nothing."""
        if plan != instance.plan:
            return  # it was cut short
        for name in instance.finish():
            if "D" not in instance.roles:
                self.send(instance, self.jobs[name])
        if instance.begin(self.now):
            self.announce(instance)

    def send(self, source: Instance, job: Job) -> None:
        """A prompt's keys and values to a decoder, or an encoder's output to whoever computes the prompt.

        A link carries one thing at a time, and both ends must be free for it.
        """
        target, is_kv = self.choose("D" if "P" in source.roles else "P"), "P" in source.roles
        size = KV_BYTES * job.prompt if is_kv else HIDDEN_BYTES * job.image_tokens
        wire, free = -(-size * 10**6 // self.deployment.link), max(source.link_free, target.link_free)
        if is_kv and self.deployment.layerwise:
            begin, end = streamed(job.prefill, wire, free, MODEL["num_hidden_layers"])
        else:
            begin = max(self.now, free)
            end = begin + wire
        source.link_free = target.link_free = end
        target.promised += 1
        self.bytes_moved += size
        if is_kv:
            job.transfer[:] = begin, end
        self.at(end, ARRIVAL, self.deliver, source, target, job)

    def deliver(self, source: Instance, target: Instance, job: Job) -> None:
        cast(PrefillScheduler, source.scheduler).release(job.name)
        self.wake(source)  # its blocks may be what a prompt waits for
        target.promised -= 1
        self.enter(target, job)


KV_TOKENS = int((roofline.GPU_MEMORY_UTILIZATION * CARD.memory - roofline.weight_bytes(MODEL)) / KV_BYTES)


# --- 5. Workloads by their published statistics ---------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """Percentiles of prompt and output lengths, as (percent, tokens); between them, straight lines in log(length).

    Prompt and output are drawn independently, nothing is shared between prompts.
    """

    input: tuple[tuple[float, float], ...]
    output: tuple[tuple[float, float], ...]
    mean: tuple[float, float]  # published; `facts` compares the drawn ones


WORKLOADS = {
    **{name: Workload(t["input"], t["output"], (t["mean"]["input"], t["mean"]["output"]))
       for name, t in AZURE.items()},
    # Mooncake's trace of conversations (FAST '25 artifact): 12,031 requests.
    "mooncake-conversation": Workload(((50, 6909), (90, 27367), (99, 85400)), ((50, 350), (90, 597), (99, 1119)),
                                      (12035, 343)),
    # ShareGPT, conversations that a person begins: short questions, long answers.
    "sharegpt": Workload(((50, 29), (90, 333)), ((50, 269), (90, 650), (99, 1146)), (107.1, 315.3)),
}  # fmt: skip


@functools.cache
def lengths(workload: str, count: int, seed: int = 0) -> tuple[tuple[int, int], ...]:
    """(prompt, output) of `count` requests. At least 2 tokens of output, or there is no time between them."""
    rng, tables = random.Random(seed), WORKLOADS[workload]

    def draw(table: Any, least: int) -> int:
        return max(least, round(quantile(table, rng.random())))

    return tuple((draw(tables.input, 1), draw(tables.output, 2)) for _ in range(count))


def make_jobs(workload: str, rate: float, count: int, seed: int = 0) -> list[Job]:
    """A stream of requests; the same lengths and the same rhythm at every rate."""
    due = arrival_times(count, 1.0, random.Random(seed + 1))
    return [
        Job(str(i), round(at / rate * 1e6), prompt, output)
        for i, (at, (prompt, output)) in enumerate(zip(due, lengths(workload, count, seed)))
    ]


# --- 6. Goodput -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """What a user expects, in milliseconds: time to first token, mean time per further token, longest silence."""

    ttft: float
    tpot: float
    gap: float = math.inf

    def met(self, ttft: int, tpot: float, gap: int) -> bool:
        return ttft <= 1e3 * self.ttft and tpot <= 1e3 * self.tpot and gap <= 1e3 * self.gap


def attainment(outcomes: Sequence[Outcome], limits: Limits) -> float:
    """The share of requests that got what was expected."""
    return sum(limits.met(*outcome) for outcome in outcomes) / len(outcomes)


RATES = tuple(round(0.5 * 1.05**i, 3) for i in range(141))  # requests per second: rungs 5 % apart


def search(outcomes_at: Callable[[float], Sequence[Outcome]], limits: Limits, share: float = 0.9) -> float:
    """The highest of RATES at which `share` of the requests meet the limits, by bisection; 0.0 if none does."""
    low, high = -1, len(RATES)
    while high - low > 1:
        middle = (low + high) // 2
        good = attainment(outcomes_at(RATES[middle]), limits) >= share
        low, high = (middle, high) if good else (low, middle)
    return RATES[low] if low >= 0 else 0.0


@functools.lru_cache(maxsize=4096)
def outcomes(deployment: Deployment, workload: str, count: int, rate: float, seed: int = 0) -> tuple[Outcome, ...]:
    """What became of each request at this rate. Remembered: many limits ask for the same runs."""
    return tuple(job.outcome for job in Cluster(deployment, make_jobs(workload, rate, count, seed)).run())


def goodput(deployment: Deployment, workload: str, limits: Limits, count: int, seed: int = 0) -> float:
    """Requests per second that the whole deployment serves within the limits, nine out of ten of them."""
    return search(functools.partial(outcomes, deployment, workload, count, seed=seed), limits)


@dataclass(frozen=True)
class Contest:
    """One workload, its limit on the TTFT, and the limits on the TPOT under which deployments are compared."""

    workload: str
    count: int  # requests per run: what a short one says depends on its draw of lengths and arrivals
    ttft: float  # ms
    tpots: tuple[float, ...]  # ms
    budgets: Sequence[int]
    splits: Sequence[int]
    gpus: int = 8


# The steps of 192 and 224 tokens are the last ones that the weights alone pay for, and not much more.
BUDGETS = (128, 192, 224, 256, 512, 1024, 2048)
CONTESTS = (
    Contest("azure-code", 6400, 300, (7, 7.5, 8, 9, 10, 12, 15, 20, 30, 50), BUDGETS, range(1, 8)),
    Contest("azure-conversation", 6400, 300, (7.5, 8, 9, 10, 12, 15, 20, 50), (128, 256, 512, 1024), range(3, 7)),
    Contest("mooncake-conversation", 2000, 3000, (10, 12, 15, 20, 30, 100), (128, 256, 512, 1024, 2048), range(3, 7)),
    Contest("sharegpt", 8000, 300, (8, 10, 15), (256, 512), range(1, 2), gpus=2),
)  # fmt: skip
TIGHT = Limits(300, 8)
EXPOSED = (0, 25, 100)  # per cent, of SerialCost, for azure-code on eight GPUs
EXPOSED_TPOTS = (8, 20)  # ms
POOLS = {2: (1,), 4: (2, 3), 8: (5, 6), 16: (10, 11, 12)}  # GPUs, and how many of them compute prompts
LINKED = {  # splits without their fast network: layout, limits, requests, and about half their goodput
    "azure-code": ("6P2D", TIGHT, 800, 45.0), "mooncake-conversation": ("5P3D", Limits(3000, 15), 200, 3.0),
}  # fmt: skip


def deployments(gpus: int, budgets: Iterable[int], splits: Iterable[int]) -> dict[str, Deployment]:
    """What is compared on this many GPUs: whole prompts, chunks of these budgets, this many GPUs for prompts."""
    chunked = {f"{gpus}PD/{budget}": Deployment(f"{gpus}PD", budget) for budget in budgets}
    return (
        {f"{gpus}PD": Deployment(f"{gpus}PD")}
        | chunked
        | {layout: Deployment(layout) for layout in (f"{p}P{gpus - p}D" for p in splits)}
    )


def throughput(deployment: Deployment, workload: str, count: int) -> float:
    """Requests per second without any limit: all of them are there at once; the time until 90 % are done."""
    jobs = Cluster(deployment, make_jobs(workload, 1e6, count)).run()
    done = sorted(job.last for job in jobs)[: round(0.9 * count)]
    return len(done) / done[-1] * 1e6


# What the searches below find, written down because they take minutes. Requests per second. To print it anew:
# `uv run python -m vllm.lab.goodput`; a test repeats samples of it.
RECORDED: dict[str, Any] = {
    "azure-code": {
        "8PD": [27.321, 30.121, 31.627, 36.612, 40.365, 46.728, 54.093, 69.038, 83.916, 102.001],
        "8PD/128": [44.503, 46.728, 46.728, 46.728, 46.728, 46.728, 46.728, 46.728, 46.728, 46.728],
        "8PD/192": [76.115, 92.518, 92.518, 92.518, 92.518, 92.518, 92.518, 92.518, 92.518, 92.518],
        "8PD/224": [51.517, 97.144, 107.101, 107.101, 107.101, 107.101, 107.101, 107.101, 107.101, 107.101],
        "8PD/256": [36.612, 51.517, 79.92, 107.101, 107.101, 107.101, 107.101, 107.101, 107.101, 107.101],
        "8PD/512": [28.687, 33.209, 36.612, 46.728, 54.093, 69.038, 112.456, 118.079, 118.079, 118.079],
        "8PD/1024": [27.321, 30.121, 34.869, 40.365, 46.728, 56.798, 65.751, 83.916, 130.182, 130.182],
        "8PD/2048": [27.321, 30.121, 33.209, 38.443, 42.383, 51.517, 59.638, 72.49, 92.518, 107.101],
        "1P7D": [8.895, 8.895, 8.895, 8.895, 8.895, 8.895, 8.895, 8.895, 8.895, 8.895],
        "2P6D": [24.781, 24.781, 24.781, 24.781, 24.781, 24.781, 24.781, 24.781, 24.781, 24.781],
        "3P5D": [40.365, 42.383, 42.383, 42.383, 42.383, 42.383, 42.383, 42.383, 42.383, 42.383],
        "4P4D": [54.093, 59.638, 59.638, 59.638, 59.638, 59.638, 59.638, 59.638, 59.638, 59.638],
        "5P3D": [46.728, 76.115, 76.115, 76.115, 76.115, 76.115, 76.115, 76.115, 76.115, 76.115],
        "6P2D": [28.687, 65.751, 92.518, 92.518, 92.518, 92.518, 92.518, 92.518, 92.518, 92.518],
        "7P1D": [11.352, 30.121, 46.728, 79.92, 107.101, 112.456, 112.456, 112.456, 112.456, 112.456],
    },
    "azure-conversation": {
        "8PD": [22.477, 31.627, 49.064, 59.638, 83.916, 107.101, 136.691, 183.179],
        "8PD/128": [76.115, 92.518, 92.518, 92.518, 92.518, 92.518, 92.518, 92.518],
        "8PD/256": [54.093, 76.115, 118.079, 150.702, 150.702, 150.702, 150.702, 150.702],
        "8PD/512": [30.121, 42.383, 65.751, 83.916, 112.456, 136.691, 166.149, 166.149],
        "8PD/1024": [24.781, 34.869, 54.093, 69.038, 92.518, 118.079, 143.525, 183.179],
        "3P5D": [51.517, 76.115, 92.518, 92.518, 92.518, 92.518, 92.518, 92.518],
        "4P4D": [40.365, 59.638, 92.518, 118.079, 130.182, 130.182, 130.182, 130.182],
        "5P3D": [30.121, 44.503, 69.038, 88.112, 118.079, 150.702, 166.149, 166.149],
        "6P2D": [19.416, 28.687, 44.503, 59.638, 79.92, 102.001, 118.079, 123.983],
    },
    "mooncake-conversation": {
        "8PD": [2.627, 3.352, 3.881, 4.953, 6.321, 8.471],
        "8PD/128": [4.075, 5.461, 5.461, 5.461, 5.461, 5.461],
        "8PD/256": [3.881, 5.734, 8.068, 9.34, 9.34, 9.34],
        "8PD/512": [3.352, 4.075, 5.461, 7.318, 9.807, 10.297],
        "8PD/1024": [3.041, 3.881, 4.717, 6.02, 7.684, 10.812],
        "8PD/2048": [3.041, 3.696, 4.493, 5.461, 7.318, 11.352],
        "3P5D": [3.193, 3.696, 3.696, 3.696, 3.696, 3.696],
        "4P4D": [3.352, 4.953, 5.461, 5.461, 5.461, 5.461],
        "5P3D": [2.502, 4.279, 6.321, 7.318, 7.318, 7.318],
        "6P2D": [1.393, 2.627, 4.075, 6.02, 7.684, 7.684],
    },
    "sharegpt": {
        "2PD": [62.62, 107.101, 130.182],
        "2PD/256": [69.038, 112.456, 123.983],
        "2PD/512": [65.751, 107.101, 130.182],
        "1P1D": [36.612, 69.038, 72.49],
    },
    "throughput": {
        "8PD": 131.9, "8PD/256": 119.6, "8PD/1024": 136.7, "8PD/2048": 138.0, "6P2D": 114.5, "7P1D": 133.4,
    },
    "pools": {
        "2": {"2PD": 4.717, "2PD/128": 4.075, "2PD/256": 13.799, "1P1D": 8.068},
        "4": {"4PD": 12.516, "4PD/128": 14.489, "4PD/256": 33.209, "2P2D": 22.477, "3P1D": 36.612},
        "8": {"8PD": 31.627, "8PD/128": 46.728, "8PD/256": 79.92, "5P3D": 76.115, "6P2D": 92.518},
        "16": {"16PD": 72.49, "16PD/128": 112.456, "16PD/256": 166.149, "10P6D": 166.149, "11P5D": 183.179,
            "12P4D": 192.338},
    },
    "exposed": {
        "0": {"8PD": [31.627, 65.751], "8PD/192": [88.112, 88.112], "8PD/224": [102.001, 102.001],
            "8PD/256": [79.92, 107.101], "8PD/512": [36.612, 118.079], "5P3D": [72.49, 72.49],
            "6P2D": [88.112, 92.518], "7P1D": [46.728, 107.101]},
        "25": {"8PD": [31.627, 65.751], "8PD/192": [54.093, 69.038], "8PD/224": [44.503, 79.92],
            "8PD/256": [40.365, 88.112], "8PD/512": [33.209, 107.101], "5P3D": [72.49, 72.49],
            "6P2D": [83.916, 88.112], "7P1D": [42.383, 107.101]},
        "100": {"8PD": [30.121, 62.62], "8PD/192": [0.0, 0.0], "8PD/224": [11.352, 33.209],
            "8PD/256": [15.213, 44.503], "8PD/512": [27.321, 72.49], "5P3D": [69.038, 69.038],
            "6P2D": [76.115, 83.916], "7P1D": [34.869, 102.001]},
    },
    "links": {
        "azure-code": {"NVLink": [51.0, 1.0, 49.5, 1.0], "InfiniBand 400G": [54.6, 1.0, 50.9, 1.0],
            "PCIe 4": [62.6, 0.9975, 50.7, 1.0], "10 GbE": [48929.8, 0.00375, 46710.8, 0.00375]},
        "mooncake-conversation": {"NVLink": [238.3, 0.97, 234.6, 0.97], "InfiniBand 400G": [261.1, 0.965, 232.2, 0.97],
            "PCIe 4": [284.9, 0.965, 233.2, 0.97], "10 GbE": [35128.7, 0.015, 39462.2, 0.025]},
    },
    "photos": {
        "8EPD": 10.297, "8EPD/256": 9.807, "8EPD/512": 9.807, "3E5PD/256": 88.112, "3E5PD/512": 69.038,
        "6EP2D": 92.518, "7EP1D": 88.112, "2E4P2D": 79.92, "3E4P1D": 92.518,
    },
    "patient photos": {"8EPD/256": 97.144, "3E5PD/256": 88.112, "6EP2D": 92.518},
    "draws": {
        "800": [92.518, 92.518, 79.92, 102.001], "3200": [88.112, 92.518, 88.112, 97.144],
        "6400": [92.518, 92.518, 92.518, 92.518],
        "InfiniBand 400G": [50.9, 49.3, 49.7, 48.9], "PCIe 4": [50.7, 50.3, 51.5, 49.6],
    },
}  # fmt: skip


def exposed_outcomes(deployment: Deployment, exposed: int) -> Callable[[float], Sequence[Outcome]]:
    """azure-code, if so much of a step's shorter half is not hidden behind the longer one."""
    cost = SerialCost(**asdict(H100_8B), exposed=exposed)

    @functools.cache
    def outcomes(rate: float) -> tuple[Outcome, ...]:
        jobs = Cluster(deployment, make_jobs("azure-code", rate, 3200), cost).run()
        return tuple(job.outcome for job in jobs)

    return outcomes


def linked(workload: str, link: int, seed: int = 0) -> list[float]:
    """[median TTFT in ms, share within the limits] if caches are sent after the prompt; then both, layer by layer."""
    layout, limits, count, rate = LINKED[workload]
    found = []
    for layerwise in (False, True):
        done = outcomes(Deployment(layout, None, link, layerwise), workload, count, rate, seed)
        found += [round(statistics.median(ttft for ttft, _, _ in done) / 1e3, 1), attainment(done, limits)]
    return found


def record(part: str) -> Any:
    """One part of RECORDED, searched anew; the parts are its keys."""
    if part == "throughput":
        contest = CONTESTS[0]
        return {
            name: round(throughput(d, contest.workload, contest.count), 1)
            for name, d in deployments(8, (256, 1024, 2048), (6, 7)).items()
        }
    if part == "pools":
        return {
            str(gpus): {
                name: goodput(d, "azure-code", TIGHT, 800 * gpus)
                for name, d in deployments(gpus, (128, 256), splits).items()
            }
            for gpus, splits in POOLS.items()
        }
    if part == "exposed":
        return {
            str(exposed): {
                name: [search(exposed_outcomes(d, exposed), Limits(300, tpot)) for tpot in EXPOSED_TPOTS]
                for name, d in deployments(8, (192, 224, 256, 512), (5, 6, 7)).items()
            }
            for exposed in EXPOSED
        }
    if part == "links":
        return {workload: {name: linked(workload, link) for name, link in LINKS.items()} for workload in LINKED}
    if part in ("photos", "patient photos"):
        limits, names = (PHOTO_LIMITS, [*PHOTO_LAYOUTS]) if part == "photos" else (PATIENT_LIMITS, PATIENT_LAYOUTS)
        return {name: search(functools.partial(photo_outcomes, PHOTO_LAYOUTS[name], 4000), limits) for name in names}
    if part == "draws":  # of azure-code for 6P2D, four each: goodput of runs of some lengths; median TTFT, layerwise
        runs = {
            str(n): [goodput(Deployment("6P2D"), "azure-code", TIGHT, n, seed) for seed in range(4)]
            for n in (800, 3200, 6400)
        }
        return runs | {
            name: [linked("azure-code", LINKS[name], seed)[2] for seed in range(4)]
            for name in ("InfiniBand 400G", "PCIe 4")
        }
    (contest,) = (c for c in CONTESTS if c.workload == part)
    return {
        name: [goodput(d, part, Limits(contest.ttft, tpot), contest.count) for tpot in contest.tpots]
        for name, d in deployments(contest.gpus, contest.budgets, contest.splits).items()
    }


# --- 7. Pictures and people: encode as a third stage ----------------------------------------------------------------

VISION = {"layers": 32, "width": 1280, "parameters": 675e6, "patches": 4}  # Qwen2-VL's encoder: 4 patches, 1 token
PHOTO = (100, 1521, 64)  # tokens of text, tokens of one picture of 1,092 x 1,092, tokens of output
PHOTO_LIMITS = Limits(ttft=600, tpot=12, gap=20)  # nobody's text may stop for more than 20 ms
PATIENT_LIMITS = Limits(ttft=600, tpot=12, gap=40)  # long enough for an encoder's 24 ms


def encode_seconds(image_tokens: int, flops: float = 0.6) -> float:
    """FLOPs = 2 · parameters · patches + 4 · layers · width · patches²: every patch sees every other one, no mask."""
    patches = image_tokens * VISION["patches"]
    work = 2 * VISION["parameters"] * patches + 4 * VISION["layers"] * VISION["width"] * patches**2
    return work / (flops * CARD.flops)


def photo_jobs(rate: float, count: int) -> list[Job]:
    """Requests with a picture each; Poisson."""
    text, image, output = PHOTO
    due = arrival_times(count, 1.0, random.Random(1))
    return [
        Job(str(i), round(at / rate * 1e6), text + image, output, image, round(encode_seconds(image) * 1e6))
        for i, at in enumerate(due)
    ]


def photo_outcomes(deployment: Deployment, count: int, rate: float) -> list[Outcome]:
    """Every job's times on the deployment, `rate` jobs per second."""
    return [job.outcome for job in Cluster(deployment, photo_jobs(rate, count)).run()]


PHOTO_LAYOUTS = {
    "8EPD": Deployment("8EPD"), "8EPD/256": Deployment("8EPD", 256), "8EPD/512": Deployment("8EPD", 512),
    "3E5PD/256": Deployment("3E5PD", 256), "3E5PD/512": Deployment("3E5PD", 512), "6EP2D": Deployment("6EP2D"),
    "7EP1D": Deployment("7EP1D"), "2E4P2D": Deployment("2E4P2D"), "3E4P1D": Deployment("3E4P1D"),
}  # fmt: skip
PATIENT_LAYOUTS = ["8EPD/256", "3E5PD/256", "6EP2D"]


# --- 8. Moving a cache against computing it again -------------------------------------------------------------------


def wire_seconds(tokens: int, link: float) -> float:
    """Tokens · bytes per token / bandwidth: 128 KiB per token for Llama-3.1-8B in bf16."""
    return tokens * KV_BYTES / link


def prefill_seconds(tokens: int) -> float:
    """A prompt alone in its step, by the cost model."""
    return H100_8B.of([(tokens, tokens)]) / 1e6


def break_even(tokens: int) -> float:
    """Bytes/s at which a cache of this length arrives as soon as it could be computed."""
    return tokens * KV_BYTES / prefill_seconds(tokens)


def mooncake_bandwidth(
    flops: float, prefix: int = 8192, d: int = 8192, gqa: int = 8, bytes_per_element: int = 2, a: int = 4, b: int = 22
) -> float:
    """From which bandwidth on fetching a cached prefix beats computing it: Mooncake's formula (FAST '25), per layer.

    B = G · 2·p·d·s/gqa ÷ (a·p²·d + b·p·d²): bytes of the prefix, over the seconds of its attention and its matrices.
    The defaults are the paper's for Llama-3-70B: a = 4, b = 22, d = 8,192, 8 query heads per KV head, 2 bytes. G is the
    data sheet's FLOP/s.
    """
    moved = 2 * prefix * d * bytes_per_element / gqa
    return flops * moved / (a * prefix**2 * d + b * prefix * d**2)


def shapes_bandwidth(config: Mapping[str, Any], flops: float, prefix: int = 8192) -> float:
    """The same from the model's shapes: its exact matrices, and of attention the causal half."""
    spec, (W, _) = roofline.KVCacheSpec.from_config(config), roofline.weights_read(config)
    pairs = prefix * (prefix + 1) // 2
    work = 2 * W * prefix + 4 * spec.num_layers * config["num_attention_heads"] * spec.head_size * pairs
    return prefix * spec.bytes_per_token() * flops / work


def exposed_seconds(tokens: int, link: float, layerwise: bool) -> float:
    """What of the transfer is left when the prompt is done: all of it, or what the last layers could not hide."""
    b, wire = round(prefill_seconds(tokens) * 1e9), round(wire_seconds(tokens, link) * 1e9)
    return (streamed((0, b), wire, 0, MODEL["num_hidden_layers"])[1] - b) / 1e9 if layerwise else wire / 1e9


# --- 9. The simulation behind the widget ----------------------------------------------------------------------------

REQUESTS = 16
GAPS = (31, 118, 9, 64, 203, 77, 15, 140, 52, 96, 260, 4, 83, 171, 38, 239)  # % of the mean gap, drawn once
MIXES = {  # (prompt, output) in turn
    "chat": [(512, 24)],
    "documents": [(8192, 8)],
    "code": [(2048, 8)],
    "mixed": [(512, 24), (512, 24), (8192, 8), (512, 24)],
}
WIDGET_LAYOUTS = {"4 colocated": ("4PD", None), "4 chunked, 512": ("4PD", 512), "1P 3D": ("1P3D", None),
                  "2P 2D": ("2P2D", None), "3P 1D": ("3P1D", None)}  # fmt: skip
WIDGET_LIMITS = {"tight": (300, 8), "usual": (600, 15), "loose": (2000, 50)}  # TTFT and TPOT, ms
WIDGET_DEFAULT: dict[str, Any] = {"layout": "2P 2D", "mix": "mixed", "rate": 40, "link": "InfiniBand 400G",
                                  "layerwise": False, "limits": "tight"}  # fmt: skip
WIDGET_CHOICES: dict[str, Sequence[Any]] = {
    "layout": list(WIDGET_LAYOUTS), "mix": list(MIXES), "rate": [5, 10, 20, 40, 80], "link": list(LINKS),
    "layerwise": [False, True], "limits": list(WIDGET_LIMITS),
}  # fmt: skip
BREAK_IT = WIDGET_DEFAULT | {"layout": "1P 3D"}  # the wrong way round


def widget_jobs(mix: str, rate: int) -> list[Job]:
    """Request i comes when the first i + 1 gaps have passed."""
    due, turns = itertools.accumulate(GAPS), itertools.cycle(MIXES[mix])
    return [Job(str(i), at * 10_000 // rate, *turn) for i, (at, turn) in enumerate(zip(due, turns))]


@functools.lru_cache(maxsize=1024)
def widget_cluster(layout: str, mix: str, rate: int, link: str, layerwise: bool) -> Cluster:
    """One run, step by step: no leaps."""
    name, budget = WIDGET_LAYOUTS[layout]
    cluster = Cluster(Deployment(name, budget, LINKS[link], layerwise), widget_jobs(mix, rate), leap=1)
    cluster.run()
    return cluster


def simulate(params: dict[str, Any]) -> dict[str, Any]:
    """Sixteen requests on four GPUs: where did the second go? Every step of every GPU, every transfer. All integers.

    params: see WIDGET_CHOICES. Times are µs; a request's parts (queue, prefill, transfer, decode queue and first step)
    add up to its TTFT. Drives the real Scheduler and KVCacheManager. Raises InputError naming the field.
    """
    p = checked(params, WIDGET_CHOICES)
    split = "P " in p["layout"]
    link, layerwise = (p["link"], p["layerwise"]) if split else ("NVLink", False)  # colocated: nothing is sent
    cluster = widget_cluster(p["layout"], p["mix"], p["rate"], link, layerwise)
    ttft_ms, tpot_ms = WIDGET_LIMITS[p["limits"]]
    requests = []
    for job in cluster.jobs.values():
        a, b = job.prefill
        arrived, ttft, writing = job.transfer[1] if split else b, job.first - job.arrival, job.last - job.first
        requests.append({
            "arrival": job.arrival, "prompt": job.prompt, "output": job.output, "gpus": [*job.path], "prefill": [a, b],
            "transfer": list(job.transfer), "first": job.first, "last": job.last, "gap": job.gap,
            "parts": [a - job.arrival, b - a, arrived - b, job.first - arrived],
            "tpot": -(-writing // (job.output - 1)),
            "met": ttft <= 1000 * ttft_ms and writing <= 1000 * tpot_ms * (job.output - 1),
        })  # fmt: skip
    longest = max(prompt for prompt, _ in MIXES[p["mix"]])
    return {
        "params": p, "limits_us": [1000 * ttft_ms, 1000 * tpot_ms], "requests": requests,
        "gpus": [{"roles": gpu.roles, "steps": [*map(list, gpu.steps)]} for gpu in cluster.instances],
        "met": sum(r["met"] for r in requests), "end": max(r["last"] for r in requests),
        "bytes_moved": cluster.bytes_moved, "longest": longest, "longest_bytes": longest * KV_BYTES,
        "wire_us": -(-longest * KV_BYTES * 10**6 // LINKS[p["link"]]), "prefill_us": H100_8B.of([(longest, longest)]),
    }  # fmt: skip


def describe(trace: dict[str, Any]) -> str:
    """The state of the simulation as text, as the widget's slot shows it."""
    p, requests = trace["params"], trace["requests"]

    def ms(us: int) -> str:
        return f"{us // 1000:,}.{us // 100 % 10} ms"

    ttft, tpot = (us // 1000 for us in trace["limits_us"])
    lines = [
        f"{len(requests)} requests at {p['rate']}/s, {p['mix']}, on {p['layout']}; limits TTFT {ttft} ms, "
        f"TPOT {tpot} ms"
    ]
    for number, gpu in enumerate(trace["gpus"]):
        busy = sum(end - start for start, end, _, _ in gpu["steps"])
        prompts, decodes = (sum(step[i] for step in gpu["steps"]) for i in (2, 3))
        share = 100 * busy // trace["end"]
        lines.append(f"GPU {number} {gpu['roles']:<2} {len(gpu['steps']):>4} steps, busy {share:>3} %: "
                     f"{prompts:>6,} prompt tokens, {decodes:>3} decodes")  # fmt: skip
    slowest = max(range(len(requests)), key=lambda i: (requests[i]["first"] - requests[i]["arrival"], -i))
    for name, i in (("first", 0), ("slowest", slowest)):
        r = requests[i]
        queue, prefill, wire, rest = map(ms, r["parts"])
        lines.append(f"{name} request, #{i}, {r['prompt']:,} tokens: TTFT {ms(r['first'] - r['arrival'])} =")
        lines.append(f"  queue {queue} + prefill {prefill} + transfer {wire} + first step {rest}")
    tpots = sorted((r["last"] - r["first"]) // (r["output"] - 1) for r in requests)
    lines += [
        f"TPOT: median {ms(tpots[len(tpots) // 2])}, worst {ms(tpots[-1])}; longest silence "
        f"{ms(max(r['gap'] for r in requests))}",
        f"the cache of {trace['longest']:,} tokens, {trace['longest_bytes'] // 2**20:,} MiB: {ms(trace['wire_us'])} on "
        f"{p['link']}, {ms(trace['prefill_us'])} to compute",
        f"moved {trace['bytes_moved'] // 2**20:,} MiB; within both limits: {trace['met']} of {len(requests)}",
    ]
    return "\n".join(lines)


# --- 10. Calibration: the same model of a step, against this machine ------------------------------------------------

# Sequences and context of decodes; lengths of prompts; decodes as before and, last, a prompt beside them.
DECODES = ((1, 64), (1, 512), (1, 1536), (2, 512), (4, 256), (4, 1024), (8, 64), (8, 512), (8, 1536), (16, 256),
           (16, 768), (32, 64), (32, 384))  # fmt: skip
PROMPTS = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768)
MIXTURES = ((4, 256, 64), (4, 768, 256), (8, 512, 128), (16, 256, 32), (16, 512, 256), (8, 1024, 64))


def measure_steps(model: llama.Llama, rounds: int = 5) -> list[list[float]]:
    """Real steps of the engine on this machine: rows (T, R, pairs, keys, seconds), seconds the median.

    Decodes, prompts, and both in one step. Contexts come from nowhere, as they do to a decoder: DecodeScheduler takes
    their keys and values for computed, and zeros cost as much as any other number.
    """
    works = [[(1, S)] * B for B, S in DECODES] + [[(n, n)] for n in PROMPTS]
    works += [[(1, S)] * B + [(n, n)] for B, S, n in MIXTURES]
    seconds: list[list[float]] = [[] for _ in works]
    longest = max(S for work in works for _, S in work) + 4
    num_blocks = 2 + max(sum(-(-(S + 4) // 16) for _, S in work) for work in works)
    config = SchedulerConfig(longest, max(map(len, works)), 2 * longest)
    scheduler = DecodeScheduler(config, KVCacheManager(num_blocks, 16, longest, enable_caching=False))
    core = EngineCore(
        scheduler, make_runner(model, config, num_blocks, 16, VllmConfig(attention_backend="paged", enforce_eager=True))
    )
    for _ in range(rounds + 1):  # round and round, so that a slow moment of the machine does not hit one row alone
        for work, found in zip(works, seconds):
            found.append(time_step(core, work))
    return [[*features(work), statistics.median(found[1:])] for work, found in zip(works, seconds)]


def time_step(core: EngineCore, work: Work) -> float:
    """Seconds of one step with this work. Those who decode have done one step before, so that only the new is new."""
    for i, (n, S) in enumerate(work):
        if n == 1:
            sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
            request = Request(f"decode {i}", [0] * (S - 1), sampling)
            core.add_request(request)
            request.num_computed_tokens = S - 2
    if core.scheduler.has_unfinished_requests():
        core.step()
    for i, (n, _) in enumerate(work):
        if n > 1:
            core.add_request(Request(f"prompt {i}", [0] * n, SamplingParams(temperature=0, max_tokens=1)))
    start = time.perf_counter()
    core.step()
    return time.perf_counter() - start


def calibrate(model: llama.Llama, rounds: int = 5) -> dict[str, Any]:
    """What goes into `results/*.json`: the measured steps, the model fitted to them, and how far they are apart."""
    table = measure_steps(model, rounds)
    cost = fit(table)
    return {
        "table": table,
        "cost": asdict(cost),
        "median_error": fit_error(cost, table),
        "worst_error": max(fit_error(cost, [row]) for row in table),
    }


# --- 11. The numbers that the text quotes, and the figures ----------------------------------------------------------

TPOT_8, TPOT_20 = 2, 7  # azure-code's third limit is 8 ms


def key(name: str | float) -> str:
    """A name as the text quotes it: "8PD/256" -> "8PD_256", 7.5 -> "7_5"."""
    return re.sub(r"\W+", "_", f"{name:g}" if isinstance(name, float) else str(name))


def best(found: Mapping[str, float]) -> dict[str, Any]:
    """Of one column of RECORDED: whole prompts, the best budget, the best split, and how they compare."""
    (whole,) = (rate for name, rate in found.items() if re.fullmatch(r"\d+E?PD", name))
    chunked = max((name for name in found if "/" in name), key=found.__getitem__)
    split = max((name for name in found if re.fullmatch(r"\d+P\d+D", name)), key=found.__getitem__)
    return {
        "whole": whole, "chunked": found[chunked], "budget": int(chunked.split("/")[1]), "split": found[split],
        "prefill_gpus": int(split.split("P")[0]), "layout": split, "split_over_whole": found[split] / whole,
        "split_over_chunked": found[split] / found[chunked], "chunked_over_whole": found[chunked] / whole,
    }  # fmt: skip


def column(workload: str, i: int) -> dict[str, float]:
    """RECORDED for one of the workload's limits."""
    return {name: rates[i] for name, rates in RECORDED[workload].items()}


@functools.cache
def facts() -> dict[str, Any]:
    """Every deterministic number of the text and the figures; the searches come from RECORDED. Under a second."""
    cost, h100 = H100_8B, HARDWARE["H100 80GB"].flops
    wire = {roofline.slug(name): {
        "gb_s": link / 1e9, "ms": wire_seconds(8192, link) * 1e3,
        "over_recompute": wire_seconds(8192, link) / prefill_seconds(8192),
        "exposed_ms": exposed_seconds(8192, link, True) * 1e3,
    } for name, link in LINKS.items()}  # fmt: skip
    a100, llama_70b = HARDWARE["A100 80GB"].flops, roofline.MODELS["Llama-3.1-70B"]
    workloads = {}
    for name, w in WORKLOADS.items():
        drawn = [statistics.fmean(tokens) for tokens in zip(*lengths(name, 800))]
        workloads[key(name)] = {"in": w.mean[0], "out": w.mean[1], "drawn_in": drawn[0], "drawn_out": drawn[1]}
    prompts = [prompt for prompt, _ in lengths("azure-code", 6400)]
    widget = {key(name): simulate(WIDGET_DEFAULT | change) for name, change in WIDGET_FACTS.items()}
    return {
        "cost": {"overhead_ms": cost.overhead / 1e9, "weights_ms": cost.weights / 1e9, "token_us": cost.token / 1e6,
                 "context_ns": cost.context / 1e3, "pair_ns": cost.pair / 1e3, "kv_tokens": KV_TOKENS,
                 "ridge_tokens": -(-cost.weights // cost.token)},
        "kv_mib_8k": 8192 * KV_BYTES / 2**20, "recompute_ms_8k": prefill_seconds(8192) * 1e3, "wire": wire,
        "break_even_gb_s": {str(n): break_even(n) / 1e9 for n in (1024, 8192, 32768)},
        "mooncake": {"a800_gb_s": mooncake_bandwidth(8 * a100) / 1e9, "h800_gb_s": mooncake_bandwidth(8 * h100) / 1e9,
                     "shapes_a800_gb_s": shapes_bandwidth(llama_70b, 8 * a100) / 1e9,
                     "shapes_h800_gb_s": shapes_bandwidth(llama_70b, 8 * h100) / 1e9},
        "workloads": workloads,
        "goodput": {key(c.workload): {f"tpot_{key(float(t))}": best(column(c.workload, i))
                                      for i, t in enumerate(c.tpots)} for c in CONTESTS},
        "splits": {key(name): rate for name, rate in column("azure-code", TPOT_8).items()},
        "six_and_two_20": column("azure-code", TPOT_20)["6P2D"],
        "exposed": {exposed: {f"tpot_{tpot}": best({name: rates[i] for name, rates in found.items()})
                              for i, tpot in enumerate(EXPOSED_TPOTS)}
                    for exposed, found in RECORDED["exposed"].items()},
        "throughput": {key(name): rate for name, rate in RECORDED["throughput"].items()},
        "pools": {gpus: {name: value / int(gpus) if name in ("whole", "chunked", "split") else value
                         for name, value in best(found).items()} for gpus, found in RECORDED["pools"].items()},
        "links": {key(workload): {roofline.slug(link): dict(zip(LINK_COLUMNS, row))
                                  for link, row in found.items()} for workload, found in RECORDED["links"].items()},
        "draws": {roofline.slug(name): {"least": min(found), "most": max(found)}
                  for name, found in RECORDED["draws"].items()},
        "first_half_longer": statistics.fmean(prompts[:3200]) / statistics.fmean(prompts) - 1,
        "encode": {"encode_ms": encode_seconds(PHOTO[1]) * 1e3, "prefill_ms": prefill_seconds(sum(PHOTO[:2])) * 1e3,
                   "embedding_mb": HIDDEN_BYTES * PHOTO[1] / 1e6, "kv_mb": KV_BYTES * sum(PHOTO[:2]) / 1e6,
                   "goodput": {key(name): rate for name, rate in RECORDED["photos"].items()},
                   "patient": {key(name): rate for name, rate in RECORDED["patient photos"].items()}},
        "widget": {name: {"met": t["met"], "moved_mib": t["bytes_moved"] / 2**20,
                          "worst_gap_ms": max(r["gap"] for r in t["requests"]) / 1e3,
                          "worst_ttft_ms": max(sum(r["parts"]) for r in t["requests"]) / 1e3}
                   for name, t in widget.items()},
    }  # fmt: skip


LINK_COLUMNS = ("after_ms", "after_attained", "layerwise_ms", "layerwise_attained")
WIDGET_FACTS = {
    "colocated": {"layout": "4 colocated"}, "chunked": {"layout": "4 chunked, 512"}, "1P3D": {"layout": "1P 3D"},
    "2P2D": {}, "3P1D": {"layout": "3P 1D"}, "slow link": {"link": "10 GbE"},
    "slow link layerwise": {"link": "10 GbE", "layerwise": True},
    "loose colocated": {"layout": "4 colocated", "limits": "loose"}, "loose": {"limits": "loose"},
}  # fmt: skip


def draw(folder: str | Path) -> list[Path]:
    """The figures of the simulation, from `facts()` and `simulate` alone."""
    return [_draw_timeline(folder), _draw_goodput(folder), _draw_splits(folder), _draw_wire(folder)]


def _draw_timeline(folder: str | Path) -> Path:
    """The widget's default, colocated and split: who computes what when, and what one stream of tokens notices."""
    layouts = ("4 colocated", "2P 2D")
    figure, axes = figures.new_figure(8.0, 4.4, nrows=2, sharex=True)
    for axis, layout in zip(axes, layouts):
        trace = simulate(WIDGET_DEFAULT | {"layout": layout})
        for number, gpu in enumerate(trace["gpus"]):
            bars: dict[str, list] = {"orange": [], "blue": []}
            for start, end, prompt, decodes in gpu["steps"]:
                color = "orange" if prompt > decodes and "P" in gpu["roles"] else "blue"
                bars[color].append((start / 1e3, (end - start) / 1e3))
            for color, ranges in bars.items():
                axis.broken_barh(
                    ranges, (number - 0.36, 0.72), linewidth=0.3, facecolor=figures.COLORS[color], edgecolor="white"
                )
        for r in trace["requests"]:
            if r["transfer"][0] >= 0 and r["prompt"] > 1000:
                begin, end = r["transfer"]
                axis.plot([begin / 1e3, end / 1e3], r["gpus"], color=figures.COLORS["purple"], linewidth=1.6)
        gap = max(r["gap"] for r in trace["requests"]) / 1e3
        axis.set(yticks=range(4), ylim=(3.6, -0.6), yticklabels=[f"{g['roles']}" for g in trace["gpus"]])
        axis.set_title(f"{layout}: {trace['met']} of {REQUESTS} within the limits, longest silence {gap:,.0f} ms")
    axes[1].set_xlabel("ms (orange: steps with prompts; blue: decodes only; purple: a long prompt's cache on its way)")
    return figures.save_figure(figure, folder, "08_goodput_timeline")


def _draw_goodput(folder: str | Path) -> Path:
    """Goodput per GPU against the limit on the TPOT, for three ways to use eight GPUs."""
    known = facts()["goodput"]
    figure, axes = figures.new_figure(8.0, 3.5, ncols=2)
    for axis, contest in zip(axes, CONTESTS):
        rows = known[key(contest.workload)]
        tpots = [t for t in contest.tpots if t <= 50]
        for name, label, color in (
            ("whole", "colocated, whole prompts", "grey"),
            ("split", "best split", "blue"),
            ("chunked", "colocated, best chunks", "orange"),
        ):
            axis.plot(
                tpots,
                [rows[f"tpot_{key(float(t))}"][name] / 8 for t in tpots],
                "o-",
                label=label,
                markersize=4,
                color=figures.COLORS[color],
            )
        axis.set(xscale="log", xticks=[7, 8, 10, 15, 20, 30, 50], xticklabels=[7, 8, 10, 15, 20, 30, 50],
                 xlabel="limit on the time per output token, ms",
                 title=f"{contest.workload}, TTFT ≤ {contest.ttft} ms")  # fmt: skip
        axis.set_ylim(bottom=0)
        axis.minorticks_off()
    axes[0].set_ylabel("goodput per GPU, requests/s")
    axes[0].legend(fontsize=8.5, loc="lower right")
    return figures.save_figure(figure, folder, "08_goodput")


def _draw_splits(folder: str | Path) -> Path:
    """Every split of eight GPUs under tight limits, beside the two colocated ways."""
    found = column("azure-code", TPOT_8)
    split = {name: rate for name, rate in found.items() if re.fullmatch(r"\dP\dD", name)}
    figure, axis = figures.new_figure(8.0, 3.4)
    bars = axis.bar(range(len(split)), list(split.values()), color=figures.COLORS["blue"], width=0.62)
    axis.set_xticks(range(len(split)), list(split))
    axis.bar_label(bars, [f"{rate:.0f}" for rate in split.values()], padding=-15, color="white", weight="bold")
    known = best(found)
    for name, label, color in (
        ("whole", "8 colocated,\nwhole prompts", "grey"),
        ("chunked", f"8 colocated,\nchunks of {known['budget']}", "orange"),
    ):
        axis.axhline(known[name], color=figures.COLORS[color], linewidth=1.8, zorder=0)
        axis.text(1.01, known[name], f"{label}: {known[name]:.0f}", color=figures.COLORS[color], va="center",
                  transform=axis.get_yaxis_transform())  # fmt: skip
    axis.set(ylabel="goodput, requests/s", xlabel="GPUs for prompts (P) and for decoding (D)", ylim=(0, 116),
             title="azure-code on 8 GPUs, TTFT ≤ 300 ms, TPOT ≤ 8 ms")  # fmt: skip
    return figures.save_figure(figure, folder, "08_goodput_splits")


def _draw_wire(folder: str | Path) -> Path:
    """What a cache costs to move and to compute, and what slow links leave of the goodput."""
    figure, (left, right) = figures.new_figure(8.0, 3.5, ncols=2)
    sizes = [2**i for i in range(7, 17)]
    for (name, link), color in zip(LINKS.items(), ("green", "blue", "purple", "red")):
        left.plot(sizes, [wire_seconds(n, link) * 1e3 for n in sizes], color=figures.COLORS[color], label=name)
    left.plot(sizes, [prefill_seconds(n) * 1e3 for n in sizes], "k--", label="compute it again")
    left.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="ms", title="8B on an H100: move or compute")
    left.set(xticks=[128, 1024, 8192, 65536], xticklabels=["128", "1,024", "8,192", "65,536"])
    left.minorticks_off()
    left.legend(fontsize=8, loc="lower right")
    names, found = list(LINKS), RECORDED["links"]
    for i, (workload, color) in enumerate(zip(found, ("blue", "orange"))):
        for j in (0, 1):
            x = [n + (2 * i + j - 1.5) * 0.2 for n in range(len(names))]
            label = f"{workload.split('-conv')[0]} on {LINKED[workload][0]}" + (", layerwise" if j else "")
            right.bar(
                x,
                [found[workload][name][2 * j] for name in names],
                0.19,
                label=label,
                alpha=0.6 if j else 1,
                color=figures.COLORS[color],
            )
    right.set(
        yscale="log",
        ylim=(20, 3e5),
        ylabel="median time to first token, ms",
        title="What a slow link does to a cluster",
    )
    right.set_xticks(range(len(names)), [name.replace(" ", "\n", 1) for name in names], fontsize=8.5)
    right.legend(fontsize=8, loc="upper left")
    return figures.save_figure(figure, folder, "08_goodput_wire")


if __name__ == "__main__":
    argparse.ArgumentParser(description="Simulates everything anew, in minutes, and prints RECORDED.").parse_args()
    parts = [contest.workload for contest in CONTESTS]
    parts += ["throughput", "pools", "exposed", "links", "photos", "patient photos", "draws"]
    print("RECORDED: dict[str, Any] = {")
    for part in parts:
        print(f"    {part!r}: {record(part)!r},")
    print("}")
