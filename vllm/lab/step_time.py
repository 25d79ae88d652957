"""How long a step takes: what its batch reads, multiplies and launches, and the seconds that each of these costs.

Owns the features of a batch and their rates; called by `prediction` for every step, by `fit` and whoever else looks for
rates. It never schedules, and never times anything. vLLM has no counterpart: there a step takes what it takes.

    seconds = max(weights · bytes, products · FLOPs)        linear layers: memory or arithmetic, whichever is slower
            + cache · bytes + attention · FLOPs             keys and values of decodes; query-key pairs of prompts
            + exchange · bytes + sequence · sequences + fixed
"""

from __future__ import annotations

import common  # noqa: F401  it settles the device before torch is used

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lab.hardware import GPU
from lab.model_costs import ModelCosts


class StepWork(NamedTuple):
    """What the scheduler put into a step."""

    tokens: int  # T, of all sequences
    sequences: int  # B
    decode_context: int  # Σ S of sequences with one token
    prompt_context: int  # Σ S of the others: keys that their chunks read
    prompt_pairs: int  # Σ of their query-key pairs: the last of q tokens sees S keys, the one before it S − 1, …
    expert_tokens: int  # T of all engines that share experts


def step_work(chunks: Iterable[tuple[int, int]]) -> StepWork:
    """`chunks`: (tokens computed, context with them) of each sequence in the step."""
    tokens = sequences = decode_context = prompt_context = pairs = 0
    for q, S in chunks:
        tokens += q
        sequences += 1
        if q == 1:
            decode_context += S
        else:
            prompt_context += S
            pairs += q * S - q * (q - 1) // 2
    return StepWork(tokens, sequences, decode_context, prompt_context, pairs, tokens)


def slowest(works: Sequence[StepWork]) -> StepWork:
    """What the others wait for, of engines that share experts and so compute a step together."""
    return StepWork(*map(max, zip(*works)))._replace(expert_tokens=sum(work.tokens for work in works))


class StepFeatures(NamedTuple):
    """What one rank does in a step; each is multiplied by the rate of the same name. Numbers, or columns of them."""

    weights: Any  # bytes of weights read
    products: Any  # FLOPs of products with them
    cache: Any  # bytes of keys and values read
    attention: Any  # FLOPs of query-key pairs of prompts
    exchange: Any  # bytes that ranks send each other
    sequence: Any  # sequences in the batch
    fixed: Any  # 1


@dataclass(frozen=True)
class StepRates:
    """Seconds per unit of each feature."""

    weights: float
    products: float
    cache: float
    attention: float
    exchange: float
    sequence: float
    fixed: float
    host: float  # from the scheduler's decision to the first kernel: seen only where the GPU would else have idled

    def seconds(self, f: StepFeatures) -> Any:
        """Of a step on the GPU. Columns give a column."""
        linear = self.weights * f.weights, self.products * f.products
        slower = max(linear) if isinstance(f.weights, float) else linear[0].clip(min=linear[1])
        return slower + sum(getattr(self, name) * getattr(f, name) for name in StepFeatures._fields[2:])

    def parts(self, f: StepFeatures) -> dict[str, float]:
        """Where the seconds go. Of weights and products the slower one counts, and the other is hidden behind it."""
        found = {name: getattr(self, name) * getattr(f, name) for name in StepFeatures._fields}
        found["products" if found["weights"] >= found["products"] else "weights"] = 0.0
        return found


@dataclass(frozen=True)
class StepModel:
    """A model, divided over ranks: batches to features."""

    costs: ModelCosts
    tensor_parallel_size: int = 1
    expert_engines: int = 1  # data-parallel engines that share experts; 1: each has all of the model

    @property
    def kv_ranks(self) -> int:
        """Ranks that share the cache. With more ranks than heads of keys, several keep the same one; all of them keep
        a latent."""
        return min(self.tensor_parallel_size, self.costs.num_kv_heads)

    def features(self, work: StepWork) -> StepFeatures:
        """Of one rank. Those of an engine add up two sums a layer; engines that share experts send them every token."""
        costs, tp, engines = self.costs, self.tensor_parallel_size, self.expert_engines
        seen = costs.context_seen(work.decode_context + work.prompt_context, work.sequences)
        # In bf16: two sums a layer, each byte of which a ring sends twice; and the logits, whose parts meet.
        exchanged = 8 * costs.num_layers * costs.hidden_size * work.tokens + 2 * costs.vocab_size * work.sequences
        to_experts = 4 * costs.num_layers * costs.hidden_size * work.expert_tokens  # there and back
        return StepFeatures(
            weights=(costs.dense_bytes + costs.expert_bytes_read(work.expert_tokens) / engines) / tp,
            products=(costs.dense_flops(work.tokens, work.sequences)
                      + costs.expert_flops(work.expert_tokens) / engines) / tp,
            cache=costs.kv_bytes_per_token * seen / self.kv_ranks,
            attention=float(costs.pair_flops * work.prompt_pairs) / tp,
            exchange=exchanged * (tp - 1) / tp + to_experts * (engines - 1) / engines,
            sequence=float(work.sequences),
            fixed=1.0,
        )  # fmt: skip


class Guess(NamedTuple):
    """A rate before anything is measured, and how far off it may be: σ of its logarithm."""

    rate: float
    spread: float


def data_sheet(gpu: GPU, costs: ModelCosts, tensor_parallel_size: int = 1, expert_engines: int = 1) -> dict[str, Guess]:
    """What a data sheet says of each rate, at the share of it that kernels usually reach, and how much that varies.

    Weights stream at 92 % of the bandwidth and hardly ever at much less; the cache lies in pieces and gets 60 %, more
    or less; products reach 75 % of the dense rate, attention 40 %. Links depend on how the cards are plugged. Launches
    are a few microseconds a kernel, of which a layer has about ten, replayed from a graph.
    Experts get a few rows each, and no two tokens ask the same ones: three quarters of the bandwidth, less than half of
    the rate, more launches, and more doubt.
    """
    sums = 2 * costs.num_layers * ((tensor_parallel_size > 1) + (expert_engines > 1))
    guesses = {
        "weights": Guess(1 / (0.92 * gpu.bandwidth), 0.04),
        "products": Guess(1 / (0.75 * gpu.flops), 0.25),
        "cache": Guess(1 / (0.6 * gpu.bandwidth), 0.6),
        "attention": Guess(1 / (0.4 * gpu.flops), 0.5),
        "exchange": Guess(1 / (0.5 * gpu.link), 1.0),
        "sequence": Guess(30e-6, 1.0),
        "fixed": Guess(0.5e-3 + 5e-6 * costs.num_layers + 25e-6 * sums, 0.4),
        "host": Guess(4e-3, 0.7),
    }
    if costs.expert_params:
        guesses["weights"] = Guess(1 / (0.75 * gpu.bandwidth), 0.25)
        guesses["products"] = Guess(1 / (0.4 * gpu.flops), 0.5)
        guesses["fixed"] = Guess(guesses["fixed"].rate + 20e-6 * costs.num_layers, 0.5)
    return guesses


def rates_of(guesses: dict[str, Guess]) -> StepRates:
    """The guesses, taken for the truth."""
    return StepRates(**{field.name: guesses[field.name].rate for field in dataclasses.fields(StepRates)})
