"""What a server counts, under vLLM's names: a dashboard made for vLLM shows our server.

Owns the metrics of one API server and the times of requests inside; `async_llm` calls `record` for every step and
`record_finished` for every answer. A counter only grows, a gauge is how things are, a histogram says how many
observations were at most so large; rates and percentiles are never computed here.
vLLM: `vllm/v1/metrics/loggers.py`, `vllm/v1/metrics/buckets.py`.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.output import EngineCoreOutput
from engine.request import FINISH_REASONS
from engine.serving.letters import Admission, EngineCoreOutputs, EngineCoreReady, SchedulerStats

if TYPE_CHECKING:
    from engine.llm_engine import RequestOutput

# Where vLLM's histograms have their boundaries: seconds, then tokens.
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
               640, 2560)  # fmt: skip
BETWEEN_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
STEP_TOKENS = tuple(2**i for i in (0, *range(3, 15)))
ANSWERS = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)

SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
TIERS = ("device", "external_unspecified")  # that cached tokens come from: this engine's blocks, or a connector
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by the level of sleep

ADAPTERS = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
CACHE_CONFIG = ("block_size", "num_gpu_blocks", "enable_prefix_caching")
DRAFTS = (
    ("drafts", "Drafts verified."),
    ("draft_tokens", "Tokens in them."),
    ("accepted_tokens", "Those accepted."),
    ("accepted_tokens_per_pos", "Those accepted, by their place in a draft.", "position"),
)


@dataclass(slots=True)
class RequestTimes:
    """Of one sequence, seconds since the epoch; `queued` is a duration that the engine measured."""

    arrival: float
    queued: float
    max_tokens: int | None
    cached_tokens: int  # of its prompt
    preemptions: int = 0
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class Answers:
    """Of a request: how many of its answers were admitted, and the tokens of the longest that is complete."""

    admitted: int = 0
    longest: int = 0


def request_tokens_buckets(max_model_len: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, …: up to the longest request that there can be."""
    series = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    return list(itertools.takewhile(lambda bound: bound <= max_model_len, series))


def draft_counters(make: Callable[..., Any], num_speculative_tokens: int) -> list[Any]:
    """In the order of `SchedulerStats.spec_decoding`; none if nobody drafts."""
    if not num_speculative_tokens:
        return []
    *counters, by_place = [make(f"spec_decode_num_{name}", *about) for name, *about in DRAFTS]
    return [*counters, *(by_place(position=str(i)) for i in range(num_speculative_tokens))]


class PrometheusStatLogger:
    """vLLM's metrics, under its names, where the meaning is the same (`vllm/v1/metrics/loggers.py`)."""

    def __init__(
        self,
        model_name: str,
        num_speculative_tokens: int = 0,
        max_loras: int = 0,
        connector: bool = False,
        max_model_len: int = 10_000,
    ) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = CollectorRegistry()
        self.times: dict[tuple[str, int], RequestTimes] = {}  # a request's id, and which of its answers
        self.answers: defaultdict[str, Answers] = defaultdict(Answers)
        self.labels = labels = {"model_name": model_name, "engine": "0"}
        request_tokens = request_tokens_buckets(max_model_len)

        def make(kind: type, name: str, text: str, *more: str, **options: Any) -> Any:
            metric = kind(f"vllm:{name}", text, [*labels, *more], registry=self.registry, **options)
            return functools.partial(metric.labels, **labels) if more else metric.labels(**labels)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Any:
            return make(Histogram, name, text, buckets=buckets)

        self.running = make(Gauge, "num_requests_running", "Sequences in the engine's batch.")
        self.waiting = make(Gauge, "num_requests_waiting", "Sequences waiting to be scheduled.")
        self.waiting_by = make(
            Gauge,
            "num_requests_waiting_by_reason",
            "For their turn (capacity), or passed over until a transfer or an adapter is there (deferred).",
            "reason",
        )
        self.kv_usage = make(Gauge, "kv_cache_usage_perc", "Share of KV blocks in use; 1 is all of them.")
        self.queries = make(Counter, "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.hits = make(Counter, "prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.external_queries = make(Counter, "external_prefix_cache_queries", "Prompt tokens asked of a connector.")
        self.external_hits = make(Counter, "external_prefix_cache_hits", "Prompt tokens that a connector brings.")
        self.preemptions = make(Counter, "num_preemptions", "Sequences that lost their blocks to others.")
        self.cached_tokens = make(Counter, "prompt_tokens_cached", "Prompt tokens that were not computed again.")
        self.prompt_tokens = make(Counter, "prompt_tokens", "Prompt tokens of admitted sequences.")
        self.sources = make(Counter, "prompt_tokens_by_source", "Prompt tokens: computed, found, fetched.", "source")
        self.generation_tokens = make(Counter, "generation_tokens", "Tokens generated.")
        self.success = make(Counter, "request_success", "Finished sequences.", "finished_reason")
        self.rejections = make(Counter, "admission_rejections", "Sequences refused by a queue limit.", "reason")
        self.tiers = make(Counter, "prompt_tokens_cached_by_source", "Prompt tokens found, by where.", "source")
        self.sleep_state = make(Gauge, "engine_sleep_state", "1: awake, or without weights and cache.", "sleep_state")
        self.connector = connector
        # A counter, and how far it has come: the engine says how many there were so far.
        self.drafts = [[x, 0] for x in draft_counters(functools.partial(make, Counter), num_speculative_tokens)]
        self.step_tokens = histogram("iteration_tokens_total", "Tokens in one step.", STEP_TOKENS)
        self.ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN)
        self.itl = histogram("inter_token_latency_seconds", "Between two outputs.", BETWEEN_TOKENS)
        self.tpot = histogram(
            "request_time_per_output_token_seconds", "A request's mean between tokens.", BETWEEN_TOKENS
        )
        self.e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token.", LATENCY)
        self.queue_time = histogram("request_queue_time_seconds", "Waiting to be admitted.", LATENCY)
        self.prefill_time = histogram("request_prefill_time_seconds", "From admission to the first token.", LATENCY)
        self.decode_time = histogram("request_decode_time_seconds", "From the first token to the last.", LATENCY)
        self.inference_time = histogram("request_inference_time_seconds", "From admission to the last token.", LATENCY)
        self.request_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", request_tokens)
        self.request_output = histogram("request_generation_tokens", "Generated tokens of a request.", request_tokens)
        self.computed = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were not in the cache.", request_tokens
        )
        self.times_preempted = histogram("request_num_preemptions", "How often a request was preempted.", PREEMPTIONS)
        self.max_tokens = histogram("request_params_max_tokens", "What a request allows.", request_tokens)
        self.n = histogram("request_params_n", "Answers to one prompt.", ANSWERS)
        self.longest = histogram("request_max_num_generation_tokens", "Of these, the longest.", request_tokens)
        self.max_loras = max_loras
        if max_loras:
            self.adapters = Gauge(
                "vllm:lora_requests_info",
                "When it was last so; adapters are in the labels.",
                ADAPTERS,
                registry=self.registry,
            )
        config = Gauge(
            "vllm:cache_config_info",
            "The KV cache: 1, and what there is in its labels.",
            ["engine", *CACHE_CONFIG],
            registry=self.registry,
        )
        self.cache_config = functools.partial(config.labels, engine="0")
        self._start_at_zero()

    def _start_at_zero(self) -> None:
        """What may happen says 0 before it has: only then does `increase()` see the first time."""
        for source in SOURCES:
            self.sources(source=source)
        for tier in TIERS:
            self.tiers(source=tier)
        for reason in FINISH_REASONS.values():
            self.success(finished_reason=reason)
        for reason in ("capacity", "deferred"):
            self.waiting_by(reason=reason)
        self.rejections(reason="max_num_queued_reqs")
        self.record_sleep_state(None)

    def describe(self, ready: EngineCoreReady) -> None:
        """What the engine said when it was up; routers read from it how many tokens fit (vLLM: `CacheConfig`)."""
        self.cache_config(**{name: str(getattr(ready, name)) for name in CACHE_CONFIG}).set(1)

    def record(self, letter: EngineCoreOutputs, sequences: Mapping[str, Any]) -> None:
        """What one step of the engine brought; called before its tokens become text."""
        now = time.time()
        if letter.scheduler_stats:
            self._record_state(letter.scheduler_stats)
        for name, admission in letter.admitted.items():
            if sequence := sequences.get(name):
                self._record_admission(sequence, admission)
        for sequence in filter(None, map(sequences.get, letter.preempted)):
            self.preemptions.inc()
            if times := self.times.get((sequence.caller.request_id, sequence.index)):
                times.preemptions += 1
        for output in letter.outputs:
            if sequence := sequences.get(output.request_id):
                self._record_output(output, self.times.get((sequence.caller.request_id, sequence.index)), now)
        if self.max_loras:
            ended = {output.request_id for output in letter.outputs if output.finish_reason}
            self._record_adapters([sequence for name, sequence in sequences.items() if name not in ended])

    def _record_output(self, output: EngineCoreOutput, times: RequestTimes | None, now: float) -> None:
        n = len(output.new_token_ids)
        if times and output.pooling_output is not None:  # a prompt's vector is all of its answer
            times.first = times.last = now
        if times is None or n == 0:
            return
        self.generation_tokens.inc(n)
        if times.tokens == 0:
            times.first = now
            self.ttft.observe(now - times.arrival)
        else:
            self.itl.observe(now - times.last)  # one gap, however many tokens came at its end
        times.last, times.tokens = now, times.tokens + n

    def _record_state(self, stats: SchedulerStats) -> None:
        self.running.set(stats.num_running_reqs)
        self.waiting.set(stats.num_waiting_reqs + stats.num_skipped_waiting_reqs)
        self.waiting_by(reason="capacity").set(stats.num_waiting_reqs)
        self.waiting_by(reason="deferred").set(stats.num_skipped_waiting_reqs)
        self.kv_usage.set(stats.kv_cache_usage)
        for count, n in zip(self.drafts, stats.spec_decoding):
            count[0].inc(n - count[1])
            count[1] = n
        if stats.num_scheduled_tokens:
            self.step_tokens.observe(stats.num_scheduled_tokens)

    def _record_admission(self, sequence: Any, admission: Admission) -> None:
        """Where a prompt's keys and values come from: here, now; here, from earlier; from elsewhere."""
        request, request_id, (queued, cached, external) = sequence.request, sequence.caller.request_id, admission
        num_prompt_tokens, local = request.num_prompt_tokens, cached - external
        max_tokens = request.sampling_params.max_tokens
        self.times[request_id, sequence.index] = RequestTimes(request.arrival_time, queued, max_tokens, cached)
        self.answers[request_id].admitted += 1
        self.queue_time.observe(queued)
        self.prompt_tokens.inc(num_prompt_tokens)
        self.cached_tokens.inc(cached)
        for source, n in zip(SOURCES, (num_prompt_tokens - cached, local, external)):
            self.sources(source=source).inc(n)
        for tier, n in zip(TIERS, (local, external)):
            self.tiers(source=tier).inc(n)
        self.queries.inc(num_prompt_tokens)
        self.hits.inc(local)
        if self.connector:
            self.external_queries.inc(num_prompt_tokens - local)
            self.external_hits.inc(external)

    def _record_adapters(self, sequences: Iterable[Any]) -> None:
        """Routers send a request where its adapter is. (vLLM 0.32 names each adapter under both labels.)"""
        waiting, running = set(), set()
        for sequence in sequences:
            if name := sequence.request.lora_name:
                admitted = (sequence.caller.request_id, sequence.index) in self.times
                (running if admitted else waiting).add(name)
        self.adapters.clear()  # or every combination that there ever was would stay
        names = (",".join(sorted(adapters)) for adapters in (waiting, running))
        self.adapters.labels(str(self.max_loras), *names).set_to_current_time()

    def record_finished(self, output: RequestOutput) -> None:
        """Histograms of those answers in `output` that are complete, and of the request when all are."""
        for answer in output.outputs:
            if answer.finish_reason is None:
                continue
            times = self.times.pop((output.request_id, answer.index), None)
            if times is None:
                continue
            self.success(finished_reason=answer.finish_reason).inc()
            self.times_preempted.observe(times.preemptions)
            if times.last == 0:  # an error before the first token: no time can be told
                continue
            self.e2e.observe(times.last - times.arrival)
            self.decode_time.observe(times.last - times.first)
            admitted = min(times.first, times.arrival + times.queued)
            self.prefill_time.observe(times.first - admitted)
            self.inference_time.observe(times.last - admitted)
            self.request_prompt.observe(len(output.prompt_token_ids))
            self.request_output.observe(times.tokens)
            self.computed.observe(len(output.prompt_token_ids) - times.cached_tokens)
            if times.max_tokens:
                self.max_tokens.observe(times.max_tokens)
            if times.tokens > 1:
                self.tpot.observe((times.last - times.first) / (times.tokens - 1))
            answers = self.answers[output.request_id]
            answers.longest = max(answers.longest, times.tokens)
        answers = self.answers.pop(output.request_id, None) if output.finished else None
        if answers and answers.longest:  # of those that were all aborted, vLLM observes nothing
            self.n.observe(answers.admitted)
            self.longest.observe(answers.longest)

    def record_abort(self, sequences: Iterable[Any]) -> None:
        for sequence in sequences:
            self.times.pop((sequence.caller.request_id, sequence.index), None)
            self.success(finished_reason="abort").inc()

    def record_sleep_state(self, level: int | None) -> None:
        """Of the engine: asleep, and how deep; None: awake."""
        states = (level is None, level == 1, level == 2)
        for name, is_so in zip(SLEEP_STATES, states):
            self.sleep_state(sleep_state=name).set(is_so)

    def record_rejection(self, n: int) -> None:
        self.rejections(reason="max_num_queued_reqs").inc(n)

    def value(self, name: str, **more: str) -> float:
        """Of one of these metrics, now."""
        found = self.registry.get_sample_value(f"vllm:{name}", self.labels | more)
        assert found is not None, name
        return found

    def expose(self) -> bytes:
        from prometheus_client import generate_latest

        return generate_latest(self.registry)
