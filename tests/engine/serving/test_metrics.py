"""What Prometheus is told, under vLLM's names: each time and each token counts once."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace

import pytest

from engine.output import EngineCoreOutput
from engine.request import Request, SamplingParams
from engine.serving import metrics
from engine.serving.balancer import LoadBalancer
from engine.serving.dp_client import DPLBClient
from engine.serving.letters import Admission, EngineCoreOutputs, SchedulerStats


def test_of_a_requests_answers_the_longest_counts():
    """`n` and the longest are observed once, when all have ended."""
    logger = metrics.PrometheusStatLogger("m")
    request = SimpleNamespace(arrival_time=0.0, num_prompt_tokens=9, sampling_params=SamplingParams(max_tokens=50))
    sequences = {f"{i}_r": SimpleNamespace(request=request, caller=SimpleNamespace(request_id="r"), index=i)
                 for i in range(3)}  # fmt: skip
    outputs = [EngineCoreOutput(name, [1] * n) for name, n in zip(sequences, (4, 7, 2))]
    letter = EngineCoreOutputs(outputs, admitted={name: (0.0, 8, 0) for name in sequences})
    logger.record(letter, sequences)
    observed = {}
    for last in range(3):
        answers = [SimpleNamespace(index=i, finish_reason="stop" if i <= last else None) for i in range(3)]
        about = {"request_id": "r", "prompt_token_ids": [0] * 9, "finished": last == 2}
        logger.record_finished(SimpleNamespace(outputs=answers, **about))
        for name in ("params_n", "max_num_generation_tokens", "params_max_tokens", "prefill_kv_computed_tokens"):
            labels = {"model_name": "m", "engine": "0"}
            found = (
                logger.registry.get_sample_value(f"vllm:request_{name}_{part}", labels) for part in ("count", "sum")
            )
            observed.setdefault(name, []).append(tuple(found))
    once = [(0, 0), (0, 0)]
    assert observed == {"params_n": [*once, (1, 3)], "max_num_generation_tokens": [*once, (1, 7)],
                        "params_max_tokens": [(1, 50), (2, 100), (3, 150)],
                        "prefill_kv_computed_tokens": [(1, 1), (2, 2), (3, 3)]}  # fmt: skip
    logger.record(EngineCoreOutputs(admitted={name: (0.0, 8, 0) for name in sequences}), sequences)
    logger.record_abort(sequences.values())  # the same again, and its client hangs up
    aborted = [SimpleNamespace(index=i, finish_reason="abort") for i in range(3)]
    logger.record_finished(SimpleNamespace(outputs=aborted, **about))
    assert logger.registry.get_sample_value("vllm:request_params_n_count", labels) == 1
    assert not logger.answers and not logger.times


def test_an_answer_that_failed_before_its_first_token_took_no_time():
    logger = metrics.PrometheusStatLogger("m")
    request = SimpleNamespace(arrival_time=time.time(), num_prompt_tokens=9, sampling_params=SamplingParams())
    sequences = {"r": SimpleNamespace(request=request, caller=SimpleNamespace(request_id="r"), index=0)}
    failed = [EngineCoreOutput("r", [], "error", "no token can be chosen")]
    logger.record(EngineCoreOutputs(failed, admitted={"r": (0.0, 0, 0)}), sequences)
    answers = [SimpleNamespace(index=0, finish_reason="error")]
    logger.record_finished(SimpleNamespace(outputs=answers, request_id="r", prompt_token_ids=[0] * 9, finished=True))
    said = logger.expose().decode()
    assert 'vllm:request_success_total{engine="0",finished_reason="error",model_name="m"} 1.0' in said
    assert not re.search(r"_seconds_sum\{.*\} -", said) and not logger.times and not logger.answers


def test_where_prompts_came_from_who_waits_and_who_was_preempted():
    def said(logger):
        """{name: value}, {name and label: value}; zeros, too."""
        return {" ".join([s.name.removeprefix("vllm:"), *(v for k, v in s.labels.items() if k not in ours)]): s.value
                for family in logger.registry.collect() for s in family.samples
                if s.name.endswith(("_total", "_count", "_sum", "waiting", "_reason"))}  # fmt: skip

    ours = {"model_name", "engine"}
    sequences = {}
    for name, length in (("a", 20), ("b", 9)):
        request = Request(name, [1] * length, SamplingParams())
        sequences[name] = SimpleNamespace(request=request, caller=SimpleNamespace(request_id=name), index=0)
    plain, logger = metrics.PrometheusStatLogger("m"), metrics.PrometheusStatLogger("m", connector=True)
    names = ["prompt_tokens_by_source_total local_compute", "prompt_tokens_by_source_total local_cache_hit",
             "prompt_tokens_by_source_total external_kv_transfer", "prefix_cache_queries_total",
             "prefix_cache_hits_total", "external_prefix_cache_queries_total", "external_prefix_cache_hits_total",
             "prompt_tokens_cached_total", "prompt_tokens_total", "num_preemptions_total",
             "request_num_preemptions_count", "request_num_preemptions_sum"]  # fmt: skip
    assert [said(logger)[name] for name in names] == [0] * len(names)
    assert said(logger)["num_requests_waiting_by_reason deferred"] == 0
    admitted = {"a": Admission(0.5, 12, 8), "b": Admission(0.0, 0, 0)}
    for each in (plain, logger):
        each.record(EngineCoreOutputs(admitted=admitted, preempted=["b", "gone"]), sequences)
        each.record(EngineCoreOutputs(scheduler_stats=SchedulerStats(1, 2, 0.5, 3),
                                                   preempted=["b", "a"]), sequences)  # fmt: skip
        answer = SimpleNamespace(index=0, finish_reason="stop")
        about = {"request_id": "b", "prompt_token_ids": [0] * 9, "finished": True, "outputs": [answer]}
        each.record_finished(SimpleNamespace(**about))
    assert [said(logger)[name] for name in names] == [17, 4, 8, 29, 4, 25, 8, 12, 29, 3, 1, 2]
    assert said(plain) == said(logger) | {f"external_prefix_cache_{x}_total": 0 for x in ("queries", "hits")}
    waiting = [said(logger)[f"num_requests_waiting{x}"] for x in ("", "_by_reason capacity", "_by_reason deferred")]
    assert waiting == [5, 2, 3]


def test_what_has_not_happened_yet_is_0():
    """`increase()` over a series that begins with its first event would say 0 for that."""
    logger = metrics.PrometheusStatLogger("m")
    for reason in ("stop", "length", "abort", "error"):
        assert logger.value("request_success_total", finished_reason=reason) == 0
    assert logger.value("admission_rejections_total", reason="max_num_queued_reqs") == 0
    logger.record_rejection(2)
    assert logger.value("admission_rejections_total", reason="max_num_queued_reqs") == 2


def test_cached_tokens_by_where_they_were():
    logger = metrics.PrometheusStatLogger("m", connector=True)
    request = Request("a", [1] * 20, SamplingParams())
    sequences = {"a": SimpleNamespace(request=request, caller=SimpleNamespace(request_id="a"), index=0)}
    logger.record(EngineCoreOutputs(admitted={"a": Admission(0.0, 12, 8)}), sequences)
    found = [logger.value("prompt_tokens_cached_by_source_total", source=tier) for tier in metrics.TIERS]
    assert found == [4, 8] and sum(found) == logger.value("prompt_tokens_cached_total")


def test_how_deep_it_sleeps():
    logger = metrics.PrometheusStatLogger("m")
    said = []
    for level in (None, 0, 1, 2, None):
        logger.record_sleep_state(level)
        said.append([logger.value("engine_sleep_state", sleep_state=state) for state in metrics.SLEEP_STATES])
    assert said == [[1, 0, 0], [0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]]


def test_a_router_reads_which_adapters_run_and_which_wait():
    logger = metrics.PrometheusStatLogger("m", max_loras=2)
    sequences = {}
    for name, lora in (("a", "pirate"), ("b", None), ("c", "json"), ("d", "pirate"), ("e", "report")):
        request = Request(name, [1] * 9, SamplingParams(), lora_name=lora)
        sequences[name] = SimpleNamespace(request=request, caller=SimpleNamespace(request_id=name), index=0)

    def labels(admitted, outputs=()):
        admitted = {name: (0.0, 0, 0) for name in admitted}
        logger.record(EngineCoreOutputs(list(outputs), admitted=admitted), sequences)
        (family,) = (f for f in logger.registry.collect() if f.name == "vllm:lora_requests_info")
        (sample,) = family.samples
        assert abs(sample.value - time.time()) < 60 and sample.labels["max_lora"] == "2"
        return sample.labels["waiting_lora_adapters"], sample.labels["running_lora_adapters"]

    assert labels("abc") == ("pirate,report", "json,pirate")
    heard = [EngineCoreOutput("c", [1], "stop"), EngineCoreOutput("a", [1])]
    assert labels("d", heard) == ("report", "pirate")
    sequences.pop("d")  # `a` wrote a token, and goes on
    assert labels("", [EngineCoreOutput("a", [1])]) == ("report", "json,pirate")


def test_where_the_time_of_a_request_went(monkeypatch):
    """Two come at 100 s. `a` waits 2 s and writes at 105 and, two tokens, at 107; `b`'s queue time, by the engine's
    clock, ends after its only token came. Who has left, and an output without tokens, change nothing."""
    logger, now = metrics.PrometheusStatLogger("m"), [103.0]
    monkeypatch.setattr(metrics.time, "time", lambda: now[0])
    sequences = {}
    for name, max_tokens in (("a", 8), ("b", None)):
        params = SimpleNamespace(max_tokens=max_tokens)
        request = SimpleNamespace(arrival_time=100.0, num_prompt_tokens=3, sampling_params=params)
        sequences[name] = SimpleNamespace(request=request, caller=SimpleNamespace(request_id=name), index=0)
    admitted = {"a": (2.0, 0, 0), "b": (9.0, 0, 0), "gone": (4.0, 0, 0)}
    for at, tokens in ((103, {"a": [], "gone": [1]}), (105, {"a": [1], "b": [1]}), (107, {"a": [2, 3]})):
        now[0] = float(at)
        outputs = [EngineCoreOutput(name, ids) for name, ids in tokens.items()]
        stats = SchedulerStats(0, 0, 0.0, num_scheduled_tokens=0 if at == 103 else 5)
        logger.record(EngineCoreOutputs(outputs, stats, admitted=admitted if at == 103 else {}), sequences)
    for name in sequences:
        answer = SimpleNamespace(index=0, finish_reason="stop")
        about = {"request_id": name, "prompt_token_ids": [0] * 3, "finished": True, "outputs": [answer]}
        logger.record_finished(SimpleNamespace(**about))
    logger.record_rejection(2)
    logger.describe(SimpleNamespace(block_size=16, num_gpu_blocks=99, enable_prefix_caching=True))
    known = {}
    for family in logger.registry.collect():
        for sample in family.samples:
            if sample.name.endswith(("_total", "_count", "_sum")):
                known.setdefault(sample.name.removeprefix("vllm:"), []).append(sample.value)
    found = {name: (*known[f"{name}_count"], *known[f"{name}_sum"]) for name in (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "request_inference_time_seconds", "request_params_max_tokens",
        "iteration_tokens_total")}  # fmt: skip
    assert found == {
        "time_to_first_token_seconds": (2, 5 + 5), "inter_token_latency_seconds": (1, 2),
        "request_time_per_output_token_seconds": (1, (107 - 105) / 2), "e2e_request_latency_seconds": (2, 7 + 5),
        "request_queue_time_seconds": (2, 2 + 9), "request_prefill_time_seconds": (2, 3 + 0),
        "request_decode_time_seconds": (2, 2 + 0), "request_inference_time_seconds": (2, 5 + 0),
        "request_params_max_tokens": (1, 8), "iteration_tokens_total": (2, 10),
    }  # fmt: skip
    assert known["generation_tokens_total"] == [4] and known["admission_rejections_total"] == [2]
    about = {"engine": "0", "block_size": "16", "num_gpu_blocks": "99", "enable_prefix_caching": "True"}
    assert logger.registry.get_sample_value("vllm:cache_config_info", about) == 1


def test_a_gap_that_ends_in_several_tokens_is_one_gap(monkeypatch):
    """With drafts a step brings several: the client waits once for all of them, and so does vLLM's histogram say."""
    logger, now = metrics.PrometheusStatLogger("m"), [100.0]
    monkeypatch.setattr(metrics.time, "time", lambda: now[0])
    request = SimpleNamespace(arrival_time=99.5, num_prompt_tokens=3, sampling_params=SamplingParams())
    sequences = {"r": SimpleNamespace(request=request, caller=SimpleNamespace(request_id="r"), index=0)}
    for tokens in ([1], [2, 3, 4, 5], [6, 7], [8]):
        admitted = {"r": (0.0, 0, 0)} if tokens == [1] else {}
        outputs = [EngineCoreOutput("r", tokens)]
        logger.record(EngineCoreOutputs(outputs, admitted=admitted), sequences)
        now[0] += 0.04
    found = {line.split("{")[0]: float(line.split()[-1]) for line in logger.expose().decode().splitlines()
             if line.startswith("vllm:inter_token_latency_seconds_")}  # fmt: skip
    assert found["vllm:inter_token_latency_seconds_count"] == 3
    assert found["vllm:inter_token_latency_seconds_sum"] == pytest.approx(0.12)


def test_drafts_are_counted_where_they_were_verified():
    """The engines say how many there were so far; a letter that was never sent is in the next one."""
    logger, client = metrics.PrometheusStatLogger("m", 3), DPLBClient([None, None], None, LoadBalancer(2))

    def drafted():
        return {(sample.name.removeprefix("vllm:spec_decode_num_"), sample.labels.get("position")): sample.value
                for family in logger.registry.collect() if "spec_decode" in family.name
                for sample in family.samples if sample.name.endswith("_total")}  # fmt: skip

    assert len(drafted()) == 6 and not any(drafted().values())
    for engine, counts in ((0, [2, 5, 3, 2, 1]), (1, [1, 1, 1, 1]), (0, [4, 11, 6, 3, 2, 1])):
        stats = SchedulerStats(0, 0, 0.0, spec_decoding=counts)
        letter = EngineCoreOutputs(scheduler_stats=stats)
        logger.record(client.take(engine, letter), {})
    by_place = {("accepted_tokens_per_pos_total", str(i)): n for i, n in enumerate((4, 2, 1))}
    assert drafted() == by_place | {("drafts_total", None): 5, ("draft_tokens_total", None): 12,
                                    ("accepted_tokens_total", None): 7}  # fmt: skip
    assert b"spec_decode" not in metrics.PrometheusStatLogger("m").expose()


@pytest.mark.parametrize(
    ("boundaries", "last"),
    [(metrics.ANSWERS, 20), *((metrics.request_tokens_buckets(n), n) for n in (1, 100, 128, 10_000, 131_072))],
)
def test_counts_have_the_boundaries_one_two_five(boundaries, last):
    """vLLM's `build_1_2_5_buckets`."""
    series = (digit * 10**power for power in range(6) for digit in (1, 2, 5))
    assert list(boundaries) == [bound for bound in series if bound <= last]


@pytest.mark.parametrize("name", ["LATENCY", "FIRST_TOKEN", "BETWEEN_TOKENS", "STEP_TOKENS", "PREEMPTIONS"])
def test_boundaries_rise(name):
    boundaries = getattr(metrics, name)
    assert list(boundaries) == sorted(set(boundaries)) and boundaries[0] > 0
