"""An engine's arguments: what is refused, and what each of several engines is started with."""

from __future__ import annotations

import common

import dataclasses

import pytest

from engine.engine_args import EngineArgs
from support.cases import named

TRANSFER = '{"kv_connector": "TCPConnector", "kv_role": "kv_producer", "kv_port": 0}'
STORE = '{"kv_connector": "StoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"folder": "x"}}'


REFUSED = [
    ({"speculative_config": '{"method": "magic"}'}, "method"),
    ({"lora_modules": ["a=b"]}, "--enable-lora"), ({"load_format": "pt"}, "auto, safetensors, dummy"),
    *(({"enable_lora": True, "lora_modules": modules}, "--lora-modules .*" + words) for modules, words in (
        (["a"], "must be name=path"), (["=b"], "must be name=path"), (["a=b", "a=c"], "a: each name once"),
        (['{"name": "a"}'], "must be name=path, or JSON"), (["{"], "not JSON"), (["[1]"], "must be name=path"),
        (['{"name": "a", "path": "b", "x": "c"}'], "base_model_name"), (['{"name": "a", "path": 1}'], "name=path"))),
    ({"max_logprobs": -2}, "max_logprobs -2: must be a whole number of at least -1"),
    ({"max_model_len": -2}, "at least"),
    ({"kv_offloading_size": 0}, "kv_offloading_size 0: must be a number above 0"),
    ({"kv_offloading_size": 1, "kv_transfer_config": STORE}, "--kv-offloading-size: not together with --kv-transfer"),
    ({"kv_offloading_size": 1, "enable_lora": True}, "--kv-offloading-size: not together with --enable-lora"),
    ({"kv_offloading_size": 1, "tensor_parallel_size": 2}, "not together with workers"),
    ({"max_num_seqs": 0}, "max_num_seqs"), ({"block_size": 0}, "block_size"), ({"scheduling_policy": "lifo"}, "fcfs"),
    ({"gpu_memory_utilization": 1.5}, "gpu_memory"), ({"kv_cache_gib": 0}, "kv_cache_gib"), ({"seed": -1}, "seed"),
    ({"kv_cache_gib": 1e9}, "at most 1048576"), ({"max_model_len": 1}, "at least 2"),
    ({"max_num_seqs": 10**20}, "at most 65536"), ({"served_model_name": [""]}, "must not be empty"),
    ({"served_model_name": ["a", ""]}, "must not be empty"),
    ({"quantization": "magic"}, "quantization"), ({"kv_cache_dtype": "int1"}, "kv_cache_dtype"),
    ({"num_gpu_blocks_override": 1}, "at least 2"), ({"engine_place": "cloud"}, "process"),
    ({"kv_transfer_config": '{"kv_role": "kv_both"}'}, "kv_connector"), ({"kv_transfer_config": "{"}, "not JSON"),
    ({"kv_transfer_config": TRANSFER, "kv_cache_dtype": "fp8"}, "not together with --kv-cache-dtype"),
    ({"kv_transfer_config": STORE, "enable_lora": True}, "--enable-lora if blocks go to a store"),
    ({"kv_transfer_config": STORE, "data_parallel_size": 2}, "not together with workers or several engines"),
    *(({name: value}, f"{name} {value!r}: must be a whole number of at least {low}")
      for name, low in (("long_prefill_token_threshold", 0), ("tensor_parallel_size", 1),
                        ("pipeline_parallel_size", 1), ("data_parallel_size", 1), ("data_parallel_size_local", 0),
                        ("data_parallel_start_rank", 0), ("api_server_count", 1), ("block_size", 1))
      for value in (low - 1, "x", 1.0, True)),
    *(({name: value}, f"{name} {value!r}: must be a number above 0")
      for name in ("gpu_memory_utilization", "kv_cache_gib") for value in (0, -1, "x", float("nan"), True)),
    ({"dtype": "x"}, "dtype 'x': must be one of auto, float32"),
    ({"override_generation_config": "[1]"}, "must be a JSON object"),
    *(({"enable_lora": True} | limits, name) for name, limits in (
        ("max_loras 0", {"max_loras": 0}), ("max_lora_rank 0", {"max_lora_rank": 0}),
        ("max_cpu_loras 1", {"max_loras": 2, "max_cpu_loras": 1}))),
    ({"tool_call_parser": "magic"}, "must be one of hermes, llama3_json, pythonic"),
    ({"reasoning_parser": "magic"}, "must be one of deepseek_r1, qwen3"),
    ({"enable_auto_tool_choice": True}, "--tool-call-parser"),
    ({"chat_template": "no/such.jinja"}, "no/such.jinja"), ({"chat_template": "{% if %}"}, "chat template: line 1"),
    ({"tensor_parallel_size": 2, "engine_place": "thread"}, "engine_place"),
    ({"data_parallel_size": 0, "headless": True}, "data_parallel_size"),
    ({"data_parallel_size": 2, "data_parallel_size_local": 3}, "data_parallel_size_local"),
    ({"data_parallel_size": 2, "headless": True}, "data_parallel_start_rank"),
    ({"data_parallel_size": 4, "headless": True, "data_parallel_size_local": 2, "data_parallel_start_rank": 3},
     "data_parallel_start_rank"),
    ({"headless": True, "api_server_count": 2}, "api_server_count"),
    ({"tensor_parallel_size": 2, "distributed_executor_backend": "mpi"}, "uni, mp, ray"),
    ({"data_parallel_size": 2, "data_parallel_routing": "random"}, "load, prefix"),
]  # fmt: skip


def test_flags_that_are_refused():
    for wrong, words in REFUSED:
        with named(wrong, words), pytest.raises(common.InputError, match=words):
            EngineArgs(**wrong)


def test_adapters_to_start_with_in_three_ways():
    texts = ["a=/p=q", '{"name": "b", "path": "/b", "base_model_name": "m"}', '[{"name": "c", "path": "/c"}]']
    args = EngineArgs(enable_lora=True, lora_modules=texts)
    assert args.adapters == {"a": "/p=q", "b": "/b", "c": "/c"} and args.adapter_parents == {"b": "m"}


def test_an_offloading_size_is_a_store_of_this_engine():
    config = EngineArgs(kv_offloading_size=0.5).kv_transfer
    assert (config.kv_connector, config.kv_role, config.is_private) == ("StoreConnector", "kv_both", True)
    assert config.kv_connector_extra_config == {"cpu_bytes": 1 << 29} and config.kv_load_failure_policy == "recompute"
    assert EngineArgs().kv_transfer is None and not EngineArgs(kv_transfer_config=STORE).kv_transfer.is_private


@pytest.mark.parametrize("auto", [-1, "auto"])
def test_a_context_that_is_cut_to_what_fits(tiny_model, auto):
    args = EngineArgs(max_model_len=auto, block_size=8).filled_in("serve", tiny_model.config)
    assert args.context == tiny_model.config.max_position_embeddings == 512
    args.shorten(1000)
    assert args.context == 512
    args.shorten(5)
    assert args.context == 40 == args.scheduler_config().max_model_len
    with pytest.raises(common.InputError, match="max_model_len auto: the KV cache holds no block"):
        args.shorten(0)


def test_the_last_engines_may_be_elsewhere():
    EngineArgs(data_parallel_size=4, headless=True, data_parallel_size_local=2, data_parallel_start_rank=2)


def test_each_of_several_engines_listens_at_ports_of_its_own():
    config = {"kv_connector": "TCPConnector", "kv_role": "kv_producer", "kv_port": 5000, "engine_id": "e"}
    args = EngineArgs(kv_transfer_config=config, tensor_parallel_size=2, data_parallel_size=3)
    third = args.for_engine(2)
    assert (third.kv_transfer.kv_port, third.kv_transfer.engine_id) == (5004, "e_dp2"), (
        "behind four ranks of two others"
    )
    assert third.kv_transfer_config == dataclasses.asdict(third.kv_transfer) and third.data_parallel_size == 3
    assert args.kv_transfer.kv_port == 5000 and args.for_engine(0).kv_transfer.kv_port == 5000
    assert EngineArgs(kv_transfer_config=TRANSFER, data_parallel_size=2).for_engine(1).kv_transfer.kv_port == 0
    assert (plain := EngineArgs(data_parallel_size=2)).for_engine(1) is plain


def test_engines_that_share_experts_know_who_they_are_and_where_they_meet():
    args = EngineArgs(enable_expert_parallel=True, data_parallel_size=3)
    third = args.meeting_at(4000).for_engine(2)
    assert args.shares_experts and third.shares_experts_with == (3, 2, 4000) and args.shares_experts_with == (3, 0, 0)
    for alone in (EngineArgs(data_parallel_size=2), EngineArgs(enable_expert_parallel=True)):
        assert not alone.shares_experts and alone.shares_experts_with == (1, 0, 0)


@pytest.mark.parametrize(
    ("about", "word"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"async_scheduling": True}, "async_scheduling"),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config"),
        ({"enable_sleep_mode": True}, "enable_sleep_mode"),
        ({"distributed_executor_backend": "uni"}, "distributed_executor_backend"),
        ({"data_parallel_size_local": 1}, "data_parallel_size_local"),
        ({"kv_transfer_config": TRANSFER}, "kv_transfer_config"),
    ],
)
def test_what_engines_cannot_do_that_share_experts(about, word):
    with pytest.raises(common.InputError, match=f"^enable_expert_parallel and data_parallel_size: .*{word}"):
        EngineArgs(enable_expert_parallel=True, data_parallel_size=2, **about)
    EngineArgs(data_parallel_size=2, **about)


@pytest.mark.parametrize(
    ("usage", "named", "limits"),
    [("LLM", {}, (512, 256, 4096)), ("serve", {}, (512, 64, 8192 if common.HAS_GPU else 512)),
     ("LLM", {"max_num_batched_tokens": 10}, (512, 10, 10)), ("serve", {"max_num_batched_tokens": 8}, (512, 8, 8)),
     ("LLM", {"max_num_seqs": 5000, "max_model_len": 64}, (64, 5000, 5000)),
     ("LLM", {"max_num_batched_tokens": 8, "enable_chunked_prefill": False}, (512, 8, 512))],
)  # fmt: skip
def test_what_nobody_named_comes_from_the_model_and_the_usage(tiny_model, usage, named, limits):
    args = EngineArgs(**named).filled_in(usage, tiny_model.config)
    assert (args.max_model_len, args.max_num_seqs, args.max_num_batched_tokens) == limits
    assert args.filled_in("LLM", tiny_model.config) == args, "once is enough"
    config = args.scheduler_config()
    assert (config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens) == limits
