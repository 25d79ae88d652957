"""`predict calibrate`: exact batches, timed as the engine runs them, and the rates of a step that follow.

Owns the batches and the stopwatch; called by `python -m vllm predict calibrate` and by `served_check`. It never
schedules: each batch is put together by hand. vLLM: `_dummy_run` in `vllm/v1/worker/gpu_model_runner.py`.
"""

from __future__ import annotations

import common

import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from engine import arguments
from engine.config import SchedulerConfig, VllmConfig
from engine.model import llama
from engine.model.folders import model_folder
from engine.model.loader import check_context, find_dtype, load
from engine.output import SchedulerOutput
from engine.request import Request, SamplingParams
from engine.worker.assemble import make_runner
from lab import cli, recorded
from lab.fit import least_squares, step_seconds
from lab.measured_step import RATES, MeasuredStep, solve
from lab.model_costs import ModelCosts, find_model, model_costs
from lab.step_time import Guess, StepFeatures, StepModel, StepWork, step_work
from lab.workload import random_ids

KEY = "predict calibrate"  # in a file of `--json`

Batch = tuple[tuple[int, int], ...]  # of each sequence: tokens computed, context with them

LIMITS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
BLOCK_SIZE = 16
CURVE = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512)  # T of the points
MOST_TOKENS = 16_384  # of context in one batch: 0.7 GiB of SmolLM2's keys and values


class Grid(NamedTuple):
    """Batches to fit, and others to judge the fit by."""

    fitted: list[Batch]
    left_out: list[Batch]


def make_grid(max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, seed: int = 0) -> Grid:
    """Decodes B x S, chunks of prompts T x S, and mixtures: at the curve's points, and between them."""
    rng = random.Random(seed)

    def decodes(B: int, S: int) -> Batch:
        """Equal contexts are rare in life, and groups of like lengths cost: they are spread around S by a half."""
        return tuple((1, max(2, round(S * rng.uniform(0.5, 1.5)))) for _ in range(B))

    fitted: list[Batch] = []
    for B, S in itertools.product((1, 2, 4, 8, 12, 16, 24, 32, 48, 64), (32, 256, 640)):
        fitted.append(decodes(B, S))
    for T in (16, 32, 64, 128, 192, 256, 384, 512):
        fitted.append(((T, T),))
        fitted.append(((T - 4, T - 4), *decodes(4, 200)))
    fitted += [((T, T + S),) for T, S in ((64, 128), (128, 512), (256, 256), (384, 128))]
    fitted += [((T // 2, T // 2),) * 2 for T in (128, 256, 512)]
    fitted += [((T, T + 64), (T, T), *decodes(B, 300)) for T, B in ((96, 8), (160, 16), (32, 24))]
    left_out = [decodes(B, S) for B, S in ((1, 100), (3, 300), (6, 150), (10, 400), (20, 200), (28, 350), (40, 100))]
    left_out += [((T, T),) for T in (24, 80, 160, 320, 448)]
    left_out += [((T, T + S), *decodes(B, 250)) for T, S, B in ((100, 0, 3), (200, 60, 6), (300, 0, 10), (50, 200, 14))]
    left_out += [((150, 150), (90, 90), (200, 200)), ((60, 60), (60, 300), *decodes(5, 150))]

    def fits(batch: Batch) -> bool:
        longest, tokens = max(S for _, S in batch), sum(S for _, S in batch)
        return (
            len(batch) <= max_num_seqs
            and longest <= max_model_len
            and tokens <= MOST_TOKENS
            and sum(q for q, _ in batch) <= max_num_batched_tokens
        )

    return Grid(list(filter(fits, fitted)), list(filter(fits, left_out)))


class BatchTimer:
    """A runner, and who was in the last batch that it ran."""

    def __init__(self, model: llama.Llama, limits: SchedulerConfig) -> None:
        self.model = model
        # A block more for each sequence than its tokens fill.
        self.num_blocks = 1 + MOST_TOKENS // BLOCK_SIZE + limits.max_num_seqs
        self.runner = make_runner(model, limits, self.num_blocks, BLOCK_SIZE, VllmConfig())
        if graphs := self.runner.graphs:
            graphs.capture_all()
        self.rng, self.names, self.last = random.Random(0), itertools.count(), SchedulerOutput()

    def output(self, batch: Batch) -> SchedulerOutput:
        """A step that holds `batch`, all of it admitted now; whoever was in the last one has finished."""
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        output, free = SchedulerOutput(finished_req_ids=[*self.last.num_scheduled_tokens]), itertools.count(1)
        tables = {}
        for q, S in batch:
            ids = random_ids(self.rng, S, self.model.config.vocab_size)
            request = Request(f"calibrate-{next(self.names)}", ids, params)
            request.num_computed_tokens = S  # what a scheduler counts, this step's tokens included
            output.num_scheduled_tokens[request.request_id] = q
            output.scheduled_new_reqs.append(request)
            tables[request.request_id] = list(itertools.islice(free, -(-S // BLOCK_SIZE)))
        output.block_tables = tables
        return output

    def seconds(self, batch: Batch, repeats: int) -> list[float]:
        """Of the same step, computed again and again. The first time also admits its sequences."""
        output, times = self.output(batch), []
        self.last = output
        for _ in range(repeats):
            start = time.perf_counter()
            self.runner.execute_model(output)
            times.append(time.perf_counter() - start)
            output = dataclasses.replace(
                output,
                scheduled_running_reqs=[*self.last.scheduled_new_reqs],
                scheduled_new_reqs=[],
                finished_req_ids=[],
            )
        return times


@dataclass(frozen=True)
class Calibration:
    """What was found, and how far off it is: relative errors of the batches that were left out of the fit."""

    step: MeasuredStep
    errors: tuple[float, ...]
    maximum: tuple[float, ...]  # the same of `step_time`'s rates, fitted to the same batches
    timed: tuple[tuple[StepWork, float], ...]  # all batches, those left out at the end, and the seconds that they took

    def to_json(self) -> dict[str, Any]:
        """Rates, errors, and what they come from: [tokens, sequences, Σ S of decodes, of prompts, pairs, ms]."""
        rows = [[*work[:5], round(1e3 * took, 3)] for work, took in self.timed]
        return {**self.step.to_json(), "timed": rows, "left_out": len(self.errors),
                "errors": sizes(self.errors), "errors_of_a_maximum": sizes(self.maximum)}  # fmt: skip


def sizes(errors: Sequence[float]) -> dict[str, float]:
    """Median and worst, whatever their sign."""
    size = np.abs(errors)
    return {"median": float(np.median(size)), "worst": float(size.max())}


def calibrate(
    time_batch: Callable[[Batch, int], Sequence[float]],
    grid: Grid,
    costs: ModelCosts,
    seconds: float = 45.0,
    most_rounds: int = 5,
) -> Calibration:
    """Time every batch of the grid in rounds, so that a slow minute is everybody's, and solve.

    `time_batch(batch, repeats)` gives as many times. Rounds end when another one would not fit into `seconds`.
    """
    batches = [*grid.fitted, *grid.left_out]
    times: list[list[float]] = [[] for _ in batches]
    start = time.perf_counter()
    for done in range(1, most_rounds + 1):
        for batch, found in zip(batches, times):
            found += time_batch(batch, 2 if sum(q for q, _ in batch) > 100 else 4)  # short ones are noisy, and cheap
        spent = time.perf_counter() - start
        if spent * (done + 1) / done > seconds:
            break
    works, medians = [step_work(batch) for batch in batches], list(map(statistics.median, times))
    n = len(grid.fitted)
    tokens = {work.tokens for work in works[:n]}
    step = solve(works[:n], medians[:n], [T for T in CURVE if T in tokens])
    errors = tuple(step.seconds(work) / took - 1 for work, took in zip(works[n:], medians[n:]))
    maximum = tuple(maximum_errors(costs, works, medians, n).tolist())
    return Calibration(step, errors, maximum, tuple(zip(works, medians)))


def calibrate_here(name: str | None, limits: SchedulerConfig, seconds: float) -> Calibration:
    """The model of that name on this machine, through the engine's own runner. Raises InputError."""
    check_context(name, limits.max_model_len)
    costs = model_costs(find_model(str(model_folder(name) / "config.json")))
    model, _ = load(name, find_dtype("auto"))
    grid = make_grid(limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len)
    return calibrate(BatchTimer(model, limits).seconds, grid, costs, seconds)


# --- The maximum that a data sheet goes by, on the same steps --------------------------------------------------------


def maximum_errors(costs: ModelCosts, works: Sequence[StepWork], times: Sequence[float], fitted: int) -> np.ndarray:
    """Relative errors of `step_time`'s own rates on the steps left out, fitted to the first `fitted` of them."""
    model = StepModel(costs)
    rows = StepFeatures(*np.array([model.features(work) for work in works], float).T)
    took = np.array(times)
    # Nothing is known before: a rate may be a hundred times another, and what one rank sends itself is nothing.
    guesses = [Guess(took[:fitted].mean() / max(column.mean(), 1.0) / 4, 5.0) for column in rows]

    def residuals(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        host = np.append(theta, 0.0)  # of `theta` as `step_seconds` has it, the last is what no step shows
        seconds, slopes = step_seconds(host, StepFeatures(*(column[:fitted] for column in rows)))
        scale = 0.05 * took[:fitted]
        return (seconds - took[:fitted]) / scale, slopes[:, :-1] / scale[:, None]

    theta = least_squares(residuals, guesses, np.log([guess.rate for guess in guesses]), 60)[0]
    return step_seconds(np.append(theta, 0.0), rows)[0][fitted:] / took[fitted:] - 1


# --- The command -----------------------------------------------------------------------------------------------------


def build_parser() -> arguments.Parser:
    p = arguments.Parser(
        prog="python -m vllm predict calibrate",
        description="The rates of a step on this machine: exact batches, timed through the engine's own model runner.",
    )
    p.add_argument("--model", metavar="PATH_OR_ID", help="a local folder or hub id (default: SmolLM2-135M-Instruct)")
    p.add_argument("--max-num-seqs", type=arguments.number(int, 1, 1024), default=64, metavar="N",
                   help="no batch has more sequences (default 64)")  # fmt: skip
    p.add_argument("--max-num-batched-tokens", type=arguments.number(int, 16, 16384), default=512, metavar="N",
                   help="nor more tokens (default 512)")  # fmt: skip
    p.add_argument("--max-model-len", type=arguments.number(int, 64, 8192), default=1024, metavar="N",
                   help="nor a longer context (default 1024)")  # fmt: skip
    p.add_argument("--seconds", type=arguments.number(float, 0.1, 3600), default=40.0, metavar="S",
                   help="for timing; one round is made in any case (default 40)")  # fmt: skip
    p.add_argument("--json", type=cli.file, metavar="FILE", help="merge the rates into FILE: predict's --rates")
    return p


def main(argv: Sequence[str]) -> Calibration:
    """`predict calibrate`: print the rates, how certain they are, and how far off."""
    args = build_parser().parse_args(argv)
    if args.json:  # not after a minute
        recorded.stored_object(args.json)
    limits = SchedulerConfig(args.max_model_len, args.max_num_seqs, args.max_num_batched_tokens)
    found = calibrate_here(args.model, limits, args.seconds)
    print_calibration(found)
    if args.json:
        known = {
            "machine": common.machine(),
            "model": args.model,
            "limits": {name: getattr(args, name) for name in LIMITS},
        }
        recorded.merge_json(args.json, KEY, known | found.to_json())
    return found


def print_calibration(found: Calibration) -> None:
    """The curve and the rates with their standard errors, and the errors on the batches left out."""
    step = found.step
    rows = [
        [f"{T} tokens", f"{1e3 * seconds:.2f} ms", f"± {1e3 * sigma:.2f}"]
        for (T, seconds), sigma in zip(step.curve, step.sigma)
    ]
    for name, sigma in zip(RATES, step.sigma[len(step.curve) :]):
        rows.append([UNITS[name], f"{1e6 * getattr(step, name):.4f} µs", f"± {1e6 * sigma:.4f}"])
    common.table(["a step", "time", "standard error"], rows)
    ours, theirs, left_out = sizes(found.errors), sizes(found.maximum), len(found.errors)
    common.say(
        f"{len(found.timed) - left_out} batches fitted; of {left_out} others the median error is {ours['median']:.1%}, "
        f"the worst {ours['worst']:.1%}. With the slower one of reading and multiplying in the curve's place: "
        f"{theirs['median']:.1%}, {theirs['worst']:.1%}"
    )


UNITS = {"sequence": "a sequence", "decode": "a token that a decode reads", "prompt": "a token that a chunk reads",
         "pair": "a query and a key of a prompt"}  # fmt: skip
