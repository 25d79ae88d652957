"""Dashboards that were made for vLLM show our server: what they ask for is there, with the labels that they ask by."""

from __future__ import annotations

import asyncio
import contextlib
import re

from prometheus_client.parser import text_string_to_metric_families

from engine.request import SamplingParams
from engine.serving import metrics
from engine.serving.openai.app import build_app
from engine.serving.openai.serving import OpenAIServing
from support.async_engines import running
from support.scripted_api import call

QUANTILE = 'histogram_quantile(0.99, sum by(le) (rate({}_bucket{{model_name=~"$model_name"}}[$__rate_interval])))'
AVERAGE = 'rate({0}_sum{{model_name="$model_name"}}[1m]) / rate({0}_count{{model_name="$model_name"}}[1m])'
MINE = '{job=~"$job", model_name=~"$model_name", instance=~"$instance"}'

# vLLM's own boards: examples/observability/prometheus_grafana/grafana.json, and of examples/observability/dashboards/
# grafana/ the overview and the service status.
QUERIES = [
    *(QUANTILE.format(f"vllm:{name}_seconds") for name in ("e2e_request_latency", "inter_token_latency",
                                                           "time_to_first_token")),
    *(AVERAGE.format(f"vllm:{name}_seconds") for name in ("e2e_request_latency", "inter_token_latency",
                                                          "time_to_first_token")),
    *(f'rate(vllm:{name}_tokens_total{{model_name="$model_name"}}[$__rate_interval])' for name in ("prompt",
                                                                                                  "generation")),
    *(f'vllm:num_requests_{name}{{model_name="$model_name"}}' for name in ("running", "waiting")),
    'vllm:kv_cache_usage_perc{model_name="$model_name"}',
    *(f'sum by(le) (increase(vllm:request_{name}_tokens_bucket{{model_name="$model_name"}}[1m]))'
      for name in ("prompt", "generation")),
    'sum by(finished_reason) (increase(vllm:request_success_total{model_name="$model_name"}[$__rate_interval]))',
    *(f'rate(vllm:request_{name}_sum{{model_name="$model_name"}}[1m])'
      for name in ("queue_time_seconds", "prefill_time_seconds", "decode_time_seconds", "max_num_generation_tokens")),
    f"sum(rate(vllm:request_success_total{MINE}[$__rate_interval]))",
    '(sum(rate(http_requests_total{job=~"$job", status="4xx"}[1m])) or vector(0)) / (sum(rate(http_requests_total'
    '{job=~"$job", instance=~"$instance"}[1m])) > 0)',
    f"sum(rate(vllm:generation_tokens_total{MINE}[5m])) / (sum(avg_over_time(vllm:num_requests_running{MINE}[5m])))",
    '(2 - (max(vllm:engine_sleep_state{job=~"$job", sleep_state="awake"}) == bool 0)) or vector(0)',
    '1 - sum(rate(vllm:request_success_total{job=~"$job", finished_reason="error"}[5m]))',
    f"sum(rate(vllm:prefix_cache_hits_total{MINE}[5m])) / sum(rate(vllm:prefix_cache_queries_total{MINE}[5m]))",
    'sum(rate(vllm:num_preemptions_total{model_name="$m"}[5m]))',
    'sum by(reason) (vllm:num_requests_waiting_by_reason)',
    "time() - process_start_time_seconds", "process_resident_memory_bytes", "rate(process_cpu_seconds_total[5m])",
    "histogram_quantile(0.9, sum by(le, handler) (rate(http_request_duration_seconds_bucket[5m])))",
    "sum(rate(http_request_duration_highr_seconds_sum[5m]))", "rate(http_response_size_bytes_sum[5m])",
]  # fmt: skip
ADDED = {"job", "instance"}  # by whoever collects


def test_each_query_finds_its_series(tiny, folder):
    async def ask():
        async with running(tiny, folder, "event-loop", stat_logger=metrics.PrometheusStatLogger("tiny")) as llm:
            app = build_app(OpenAIServing(llm, ["tiny"]))
            for prompt in ([5, 6, 7], [8, 9]):
                heard = await call(app, "/v1/completions", {"prompt": prompt, "max_tokens": 3})
                assert heard.status == 200
            assert (await call(app, "/v1/completions", {"prompt": []})).status == 400
            answer = llm.generate("hangs up", [1, 2], SamplingParams(max_tokens=9), stream=True)
            async with contextlib.aclosing(answer):
                await anext(answer)
            return (await call(app, "/metrics", method="GET")).text

    found = {}
    for family in text_string_to_metric_families(asyncio.run(ask())):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    for query in QUERIES:
        names = re.findall(r"\b(?:vllm:|http_|process_)\w+", query)
        assert names and not set(names) - found.keys(), query
        for name, matchers in re.findall(r"((?:vllm:|http_)\w+)\{([^}]*)\}", query):
            wanted = dict(re.findall(r'(\w+)=~?"([^"]*)"', matchers))
            fits = [labels for labels, _ in found[name]
                    if all(label in labels and value in (labels[label], "$model_name", "$m")
                           for label, value in wanted.items() if label not in ADDED)]  # fmt: skip
            assert fits, (query, found[name])
        for label in re.findall(r"by ?\(([\w, ]+)\)", query):
            assert all(each in found[names[0]][0][0] for each in label.split(", ")), query
    by_reason = {labels["finished_reason"]: value for labels, value in found["vllm:request_success_total"]}
    assert by_reason == {"stop": 0, "length": 2, "abort": 1, "error": 0}
    by_handler = {(x["handler"], x["status"]): value for x, value in found["http_requests_total"]}
    assert by_handler == {("/v1/completions", "2xx"): 2, ("/v1/completions", "4xx"): 1}
