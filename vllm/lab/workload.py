"""The load before anybody sees it: how long requests are, and when each is due.

Owns prompts, published length distributions and arrival times, all fixed by a seed; called by the load generator, by
`tuning` and by `goodput`. It never looks at a server. vLLM: `vllm/benchmarks/datasets/`, and `get_request` in
`vllm/benchmarks/serve.py`.
"""

from __future__ import annotations

import common

import argparse
import itertools
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Prompt(NamedTuple):
    """One request to be: its text or token ids, and how many tokens are wanted in return."""

    content: str | list[int]
    input_len: int
    output_len: int


# Azure's published traces of 2023 (code: 8,819 requests, conversation: 19,366): percentiles of tokens per request as
# (percent, tokens), and the means. No lognormal fits the conversations: their outputs have two humps.
AZURE = {
    "azure-code": {"mean": {"input": 2048, "output": 27.9}, "output": ((50, 13), (90, 55), (99, 251)),
                   "input": ((5, 75), (25, 578), (50, 1469), (75, 2744), (90, 5188), (95, 7303), (99, 7436))},
    "azure-conversation": {"mean": {"input": 1154.7, "output": 211}, "input": ((50, 1020), (90, 2734), (99, 4142)),
                           "output": ((50, 129), (75, 395), (90, 424), (99, 601))},
}  # fmt: skip


def quantile(table: Sequence[tuple[float, float]], u: float) -> float:
    """The length below which a share u of the requests lies: from 1 token, straight lines in log(length) between the
    published percentiles, and nothing beyond the last."""
    points = [(0, 1), *table]
    for (p, a), (q, b) in itertools.pairwise(points):
        if 100 * u <= q:
            return a * (b / a) ** ((100 * u - p) / (q - p))
    return points[-1][1]


def table_mean(table: Sequence[tuple[float, float]]) -> float:
    """The exact mean of `quantile` over u in [0, 1): Σ share · (b − a) / ln(b / a)."""
    pairs = itertools.pairwise([(0, 1), *table])
    body = sum((q - p) / 100 * (b - a) / math.log(b / a) for (p, a), (q, b) in pairs)
    return body + (1 - table[-1][0] / 100) * table[-1][1]


def random_length(rng: random.Random, mean: int, range_ratio: float = 0.0, cv: float = 0.0) -> int:
    """A length of at least 1 with this mean: fixed; uniform on mean · [1 − r, 1 + r]; or lognormal with this
    coefficient of variation (standard deviation ÷ mean)."""
    if cv:
        variance = math.log(1 + cv * cv)
        return max(1, round(rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))))
    return max(1, rng.randint(math.floor(mean * (1 - range_ratio)), math.ceil(mean * (1 + range_ratio))))


def arrival_times(count: int, rate: float, rng: random.Random, burstiness: float = 1.0) -> list[float]:
    """When each request is due, in seconds: gaps from a gamma distribution with mean 1/rate and variance
    1/(burstiness · rate²). 1 is a Poisson process, below 1 comes in bursts, ∞ ticks like a clock; rate ∞: all at once.

    As in vLLM the gaps are then scaled so that the last request is due at count/rate exactly: the sum of a hundred is
    typically a tenth off, and every throughput with it."""
    if math.isinf(burstiness):
        return [(i + 1) / rate for i in range(count)]
    due = list(itertools.accumulate(rng.gammavariate(burstiness, 1.0) for _ in range(count)))
    return [at * count / rate / (due[-1] or 1.0) for at in due]  # bursts so tight that all gaps are 0: all at once


WORDS = ("time", "year", "people", "way", "day", "life", "child", "world", "school", "state", "family", "group")


TOKEN_IDS = (1_000, 10_000)  # of random prompts: ordinary tokens in any vocabulary that is served


def random_ids(rng: random.Random, length: int, vocab_size: int = TOKEN_IDS[1]) -> list[int]:
    """`length` token ids that any tokenizer of `vocab_size` has, its first, special ones left out."""
    return rng.choices(range(min(TOKEN_IDS[0], vocab_size // 2), min(TOKEN_IDS[1], vocab_size)), k=length)


def make_prompts(args: argparse.Namespace, count: int, seed: int, as_text: bool = False) -> list[Prompt]:
    """The requests of one run. Random prompts are token ids, so their length is exact; where the API takes text alone
    (chat), they are as many common words. Raises InputError."""
    if args.dataset_path or args.dataset_name == "custom":
        rows = load_prompts(args.dataset_path)
        rows = [rows[i % len(rows)] for i in range(count)]
        return [Prompt(text, 0, n or args.random_output_len) for text, n in rows]
    if args.random_range_ratio and args.random_cv:
        raise common.InputError("--random-cv: allowed without --random-range-ratio only (lognormal or uniform)")
    rng, prompts = random.Random(seed), []
    for _ in range(count):
        if args.dataset_name in AZURE:
            table = AZURE[args.dataset_name]
            n_in, n_out = (max(1, round(quantile(table[side], rng.random()))) for side in ("input", "output"))
        else:
            n_in, n_out = (
                random_length(rng, mean, args.random_range_ratio, args.random_cv)
                for mean in (args.random_input_len, args.random_output_len)
            )
        prompts.append(Prompt(" ".join(rng.choices(WORDS, k=n_in)) if as_text else random_ids(rng, n_in), n_in, n_out))
    return prompts


def load_prompts(path: str | None) -> list[tuple[str, int | None]]:
    """A file with one JSON object a line: "prompt", and perhaps "output_tokens". Raises InputError, naming the line."""
    if not path:
        raise common.InputError("--dataset-path: --dataset-name custom needs a .jsonl file")
    rows, number = [], 1
    try:
        for line in Path(path).read_text(encoding="utf-8").split("\n"):
            if line.strip():
                row = json.loads(line)
                text, n = row["prompt"], row.get("output_tokens")
                if not (isinstance(text, str) and text and (n is None or (type(n) is int and n > 0))):
                    raise ValueError
                rows.append((text, n))
            number += 1
    except OSError as error:
        raise common.InputError(f"--dataset-path {path}: not readable ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise common.InputError(
            f"--dataset-path {path}: line {number}: must be a JSON object with prompt (text) and "
            "optionally output_tokens (a whole number above 0)"
        ) from None
    if not rows:
        raise common.InputError(f"--dataset-path {path}: holds no prompt")
    return rows
