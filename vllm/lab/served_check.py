"""`predict check`: does the prediction hold for a server on this machine? Calibrate, serve, load, compare.

Owns the run and its errors; called by `python -m vllm predict check`. It never judges by what it was calibrated with:
batches are timed in this process, bursts are sent before the load, and the load has other lengths and times.
vLLM: `vllm/benchmarks/serve.py` measures the same; nothing there predicts it.

    seen by a client = around (HTTP, sockets, tokens to text) + queue and steps of the simulated engine
    step = as calibrated + step + sequence · B + token · T: scheduling, letters, and what the front end and the client
           take from the cores that the engine computes on. A client on this machine is a part of what it measures
"""

from __future__ import annotations

import common

import asyncio
import dataclasses
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from engine import arguments
from engine.config import SchedulerConfig
from engine.model.loader import check_context
from lab import calibration, cli, recorded
from lab.bench import first_model
from lab.load_generator import Target, drive
from lab.measured_step import MeasuredStep
from lab.prediction import Job, Prediction, Setup, Step, predict
from lab.prediction_report import errors, of_outcomes, print_errors
from lab.records import Record
from lab.running_server import running_server
from lab.step_time import StepWork
from lab.workload import Prompt, arrival_times, random_ids

KEY = "11b_prediction_check"
LIMITS = SchedulerConfig(max_model_len=1024, max_num_seqs=64, max_num_batched_tokens=512)  # tokens: as `serve` has them
NUM_BLOCKS = 129  # seven of the load's sequences, or little more: the overload preempts
LOADS = {"light": 0.3, "busy": 0.6, "overload": 2.0}  # of what the engine can do, as predicted
INPUTS, OUTPUTS = (128, 384), (24, 72)  # tokens, uniform
# Before the load, requests at once: how many, tokens of a prompt, more or less by a half, and of an answer. Those that
# are alone show what is around a request; with equal contexts the others would be cheaper than life.
BURSTS = ((1, 40, 16), (1, 150, 16), (1, 300, 16), (1, 450, 16), (2, 200, 40), (4, 200, 40), (6, 220, 40),
          (8, 150, 40), (12, 90, 40), (16, 60, 40))  # fmt: skip


@dataclass(frozen=True)
class Host:
    """Seconds that a server adds to the steps of its runner."""

    around: float = 0.0  # before a request is queued, and after its tokens are there
    step: float = 0.0
    sequence: float = 0.0  # in each step
    token: float = 0.0  # in each step

    def added(self, work: StepWork) -> float:
        return self.step + self.sequence * work.sequences + self.token * work.tokens


def serve_flags(model: str | None, num_blocks: int) -> list[str]:
    """The server under test: everything as by default but for its limits, and every prompt is computed."""
    flags = {
        "--max-model-len": LIMITS.max_model_len,
        "--max-num-seqs": LIMITS.max_num_seqs,
        "--max-num-batched-tokens": LIMITS.max_num_batched_tokens,
        "--num-gpu-blocks-override": num_blocks,
    }
    named = [text for flag, value in flags.items() for text in (flag, str(value))]
    return [*named, "--no-enable-prefix-caching", *(["--model", model] if model else [])]


def make_setup(num_blocks: int) -> Setup:
    """The same server for `predict`."""
    return Setup(LIMITS, num_blocks, enable_prefix_caching=False, async_scheduling=False)


# --- Sending ----------------------------------------------------------------------------------------------------------


class Client:
    """Greedy requests of exactly the length asked for, with `load_generator`, in this process."""

    def __init__(self, url: str, vocab_size: int, seed: int) -> None:
        self.url, self.vocab_size, self.rng = url, vocab_size, random.Random(seed)

    def prompts(self, lengths: Sequence[tuple[int, int]]) -> list[Prompt]:
        return [Prompt(random_ids(self.rng, n_in, self.vocab_size), n_in, n_out) for n_in, n_out in lengths]

    def send(self, prompts: Sequence[Prompt], arrivals: Sequence[float]) -> list[Record]:
        """Raises CheckFailed if one is not answered in full."""

        async def run() -> list[Record]:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client:
                extra = {"ignore_eos": True, "temperature": 0}
                target = Target(self.url, await first_model(client, self.url), extra=extra)
                return await drive(client, target, prompts, arrivals)

        records = asyncio.run(run())
        for record, prompt in zip(records, prompts):
            if record.error or record.output_tokens != prompt.output_len:
                raise common.CheckFailed(f"a request was not answered in full: {record.error or record.output_tokens}")
        return records

    def preemptions(self) -> int:
        """So far, as the server counts them."""
        text = httpx.get(f"{self.url}/metrics", timeout=60, trust_env=False).text
        return round(sum(float(x) for x in re.findall(r"(?m)^vllm:num_preemptions_total(?:{.*})? ([\d.e+]+)$", text)))


# --- Predicting -------------------------------------------------------------------------------------------------------


def simulate(records: Sequence[Record], setup: Setup, step: MeasuredStep, host: Host) -> tuple[list[int], Prediction]:
    """The run that the same requests, sent at the same times, are predicted to make: their order, and it."""
    order = sorted(range(len(records)), key=lambda i: records[i].start)
    jobs = [Job(records[i].start + host.around, records[i].prompt_tokens, records[i].output_tokens) for i in order]
    return order, predict(jobs, setup, lambda work: step.seconds(work) + host.added(work), 0.0)[0]


def predicted_latencies(
    records: Sequence[Record], setup: Setup, step: MeasuredStep, host: Host
) -> tuple[dict[str, np.ndarray], Prediction]:
    """TTFT, TPOT and E2E of each of the records, from when it was sent."""
    order, prediction = simulate(records, setup, step, host)
    outcomes = [prediction.outcomes[place] for place in np.argsort(order)]
    return of_outcomes(outcomes, [record.start for record in records]), prediction


def seen_latencies(records: Sequence[Record]) -> dict[str, np.ndarray]:
    """The same as a client saw them."""
    return {
        "ttft": np.array([record.ttft for record in records]),
        "tpot": np.array([record.tpot for record in records if record.output_tokens > 1]),
        "e2el": np.array([record.e2el for record in records]),
    }


def find_host(bursts: Sequence[Sequence[Record]], setup: Setup, step: MeasuredStep) -> Host:
    """What the server adds, by least squares on relative errors: how much longer answers took than their steps, and
    the first tokens of requests that were alone. A server may also be quicker than the calibration."""
    rows, excess = [], []

    def observe(seconds: float, predicted: float, around: int, steps: Sequence[Step]) -> None:
        counts = [around, len(steps), sum(s.work.sequences for s in steps), sum(s.work.tokens for s in steps)]
        rows.append(np.array(counts, float) / seconds)
        excess.append((seconds - predicted) / seconds)

    for records in bursts:
        order, prediction = simulate(records, setup, step, Host())
        for i, outcome in zip(order, prediction.outcomes):
            record, (_, first, last), times = records[i], outcome.steps, outcome.times
            if len(records) == 1:
                observe(record.ttft, times[0] - record.start, 1, prediction.steps[: first + 1])
            if record.output_tokens > 1:
                observe(record.e2el - record.ttft, times[-1] - times[0], 0, prediction.steps[first + 1 : last + 1])
    return Host(*map(float, np.linalg.lstsq(np.array(rows), np.array(excess), rcond=None)[0]))


def capacity(lengths: Sequence[tuple[int, int]], setup: Setup, step: MeasuredStep, host: Host) -> float:
    """Requests a second when all of them are there at once."""
    records = [Record(0.0, prompt_tokens=n_in, output_tokens=n_out) for n_in, n_out in lengths]
    return len(lengths) / simulate(records, setup, step, host)[1].steps[-1].end


# --- The run ----------------------------------------------------------------------------------------------------------


def draw_lengths(count: int, rng: random.Random) -> list[tuple[int, int]]:
    return [(rng.randint(*INPUTS), rng.randint(*OUTPUTS)) for _ in range(count)]


def send_bursts(client: Client) -> list[list[Record]]:
    """What the host's part is found with. The first one of all warms up, and is left out."""
    client.send(client.prompts([(64, 16)] * 4), [0.0] * 4)
    sent = []
    for B, n_in, n_out in BURSTS * 2:
        lengths = [(round(n_in * (0.5 + (i + 0.5) / B)), n_out) for i in range(B)]
        sent.append(client.send(client.prompts(lengths), [0.0] * B))
    return sent


def run_check(url: str, vocab_size: int, setup: Setup, step: MeasuredStep, seconds: float, seed: int) -> dict[str, Any]:
    """Find the host's part, then load the server three times, predict each and compare. For each load: what was seen,
    what was predicted, and how far off that is."""
    client, rng = Client(url, vocab_size, seed), random.Random(seed)
    bursts = send_bursts(client)
    host = find_host(bursts, setup, step)
    common.say(
        f"The server adds {1e3 * host.around:.1f} ms around a request, {1e3 * host.step:.2f} ms to a step, "
        f"{1e3 * host.sequence:.3f} ms for each sequence in it and {1e3 * host.token:.3f} ms for each token"
    )
    most = capacity(draw_lengths(100, random.Random(seed + 1)), setup, step, host)
    found: dict[str, Any] = {"host": dataclasses.asdict(host), "capacity": most, "loads": {}}
    found["bursts"] = [as_rows(records) for records in bursts]
    for name, share in LOADS.items():
        rate = share * most
        count = max(8, round(rate * seconds / max(1.0, share)))  # an overload takes longer to answer than to send
        lengths = draw_lengths(count, rng)
        before, cpu, start = client.preemptions(), time.process_time(), time.perf_counter()
        records = client.send(client.prompts(lengths), arrival_times(count, rate, rng))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - start
        preempted = client.preemptions() - before
        predicted, prediction = predicted_latencies(records, setup, step, host)
        found["loads"][name] = compare(rate, records, predicted) | {
            "preemptions": preempted,
            "predicted_preemptions": sum(outcome.preemptions for outcome in prediction.outcomes),
            "client_cpu": cpu / wall,
        }
        print_load(name, found["loads"][name], seen_latencies(records), predicted)
    return found


def compare(rate: float, records: Sequence[Record], predicted: dict[str, np.ndarray]) -> dict[str, Any]:
    """One load: the errors of each percentile, those of each request, and the times themselves."""
    seen = seen_latencies(records)
    result: dict[str, Any] = {"rate": rate, "requests": len(records), "errors": errors(predicted, seen)}
    result["per_request"] = {
        which: {rule: float(np.percentile(off, p)) for rule, p in (("median", 50), ("p90", 90), ("p99", 99))}
        for which in ("ttft", "e2el")
        for off in [np.abs(predicted[which] / seen[which] - 1)]
    }
    result["seen"] = as_rows(records)
    for which in ("ttft", "e2el"):
        result[f"predicted_{which}_ms"] = [round(1e3 * x, 1) for x in predicted[which].tolist()]
    return result


def as_rows(records: Sequence[Record]) -> list[list[float]]:
    """Of each: tokens of its prompt and of its answer, when it was sent, its TTFT and its E2E: milliseconds."""
    return [
        [r.prompt_tokens, r.output_tokens, *(round(1e3 * x, 1) for x in (r.start, r.ttft, r.e2el))] for r in records
    ]


def print_load(name: str, found: dict[str, Any], seen: dict[str, np.ndarray], predicted: dict[str, np.ndarray]) -> None:
    """Each percentile, as it was and as predicted; then how far off single requests are."""
    common.heading(f"{name}: {found['requests']} requests at {found['rate']:.2f} a second")
    print_errors(predicted, seen, {})
    for which, what in (("ttft", "TTFT"), ("e2el", "E2E")):
        off = found["per_request"][which]
        common.say(
            f"each request's {what} is off by {off['median']:.1%} in the median, {off['p90']:.1%} at P90, "
            f"{off['p99']:.1%} at P99"
        )
    common.say(
        f"{found['preemptions']} preemptions, {found['predicted_preemptions']} predicted; the load generator took "
        f"{found['client_cpu']:.0%} of a core"
    )


def build_parser() -> arguments.Parser:
    p = arguments.Parser(
        prog="python -m vllm predict check",
        description="Calibrate, serve, load at three rates, and say how far the prediction of each latency is off.",
    )
    p.add_argument("--model", metavar="PATH_OR_ID", help="a local folder or hub id (default: SmolLM2-135M-Instruct)")
    p.add_argument("--seconds", type=arguments.number(float, 1, 3600), default=45.0, metavar="S",
                   help="that each load is sent for, and batches are timed (default 45)")  # fmt: skip
    p.add_argument("--seed", type=arguments.number(int, 0, 2**31 - 1), default=0)
    p.add_argument("--json", type=cli.file, metavar="FILE", help="merge the result into FILE")
    return p


def main(argv: Sequence[str]) -> dict[str, Any]:
    """`predict check`."""
    args = build_parser().parse_args(argv)
    if args.json:  # not after minutes
        recorded.stored_object(args.json)
    vocab_size = check_context(args.model, LIMITS.max_model_len).vocab_size
    calibrated = calibration.calibrate_here(args.model, LIMITS, args.seconds)
    calibration.print_calibration(calibrated)
    with running_server(*serve_flags(args.model, NUM_BLOCKS)) as (url, _):
        found = run_check(url, vocab_size, make_setup(NUM_BLOCKS), calibrated.step, args.seconds, args.seed)
    found |= {"machine": common.machine(), "calibration": calibrated.to_json()}
    if args.json:
        recorded.merge_json(args.json, KEY, found)
    return found
