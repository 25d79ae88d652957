"""The command `serve`: its flags are the engine's arguments, and wrong ones are one line."""

from __future__ import annotations

import common

import asyncio
import dataclasses
import json
import re
import sys

import pytest

from engine import arguments, plugs
from engine.engine_args import DEFAULTS, EngineArgs
from engine.llm import LLM
from engine.serving import server, sockets
from engine.serving.cli import add_serve_command, given, serve_command
from engine.serving.frontend_args import FrontendArgs
from engine.serving.server import may_load_adapters


def serve_parser():
    parser = arguments.Parser(prog="p")
    add_serve_command(parser.add_subparsers())
    return parser


def parsed(*words):
    """What `serve` reads from these words."""
    return serve_parser().parse_args(["serve", *words])


def test_one_model_in_place_or_by_flag(monkeypatch):
    made = []
    monkeypatch.setattr(server, "run_server", lambda args, **about: made.append(args.model))
    monkeypatch.setattr(asyncio, "run", lambda result: 0)
    for words in (["a"], ["--model", "a"], ["--port", "1", "a"], ["a", "--model", "b"]):
        with pytest.raises(SystemExit):
            serve_command(parsed(*words))
    assert made == ["a"] * 4, "in place comes first, as in vLLM"


def test_what_has_no_effect_is_said(monkeypatch, capsys):
    monkeypatch.setattr(server, "run_server", lambda args, **about: None)
    monkeypatch.setattr(asyncio, "run", lambda result: 0)
    with pytest.raises(SystemExit):
        serve_command(parsed("--use-tqdm-on-load", "-O", "3"))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("--use-tqdm-on-load: without effect here: in vLLM it shows a bar")
    assert second.startswith("--optimization-level: without effect here: in vLLM it trades")


@pytest.mark.parametrize(
    ("words", "keys"),
    [(["--api-key", "a", "b"], ["a", "b"]), (["--api-key", "a", "--api-key", "b"], ["a", "b"]), ([], ["e"])],
)
def test_several_keys(monkeypatch, words, keys):
    heard = []
    monkeypatch.setenv("VLLM_API_KEY", "e")
    monkeypatch.setattr(server, "run_server", lambda args, **about: heard.append(about["api_keys"]))
    monkeypatch.setattr(asyncio, "run", lambda result: 0)
    with pytest.raises(SystemExit):
        serve_command(parsed(*words))
    assert heard == [keys]


def test_a_device_from_a_file_is_everybodys(monkeypatch, tmp_path):
    """`common` and the processes that are spawned look at the command line."""
    monkeypatch.setattr(server, "run_server", lambda args, **about: None)
    monkeypatch.setattr(asyncio, "run", lambda result: 0)
    monkeypatch.setattr(sys, "argv", ["serve"])
    (tmp_path / "c.yaml").write_text("device: cpu")
    with pytest.raises(SystemExit):
        serve_command(parsed("--config", str(tmp_path / "c.yaml")))
    assert sys.argv == ["serve", "--device", "cpu"]


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [("--max-model-len 4k", "max_model_len", 4000), ("--max-model-len auto", "max_model_len", -1),
     ("--max_model_len -1", "max_model_len", -1), ("--max-num-batched-tokens 2K", "max_num_batched_tokens", 2048),
     ("--kv-cache-memory-bytes 1G", "kv_cache_memory_bytes", 1 << 30), ("--dtype half", "dtype", "half"),
     ("--quantization fp8", "quantization", "fp8"), ("--kv-cache-dtype fp8_e5m2", "kv_cache_dtype", "fp8_e5m2"),
     ("--attention-backend TRITON_ATTN", "attention_backend", "unified"),
     ("--load-format DUMMY", "load_format", "dummy"),
     ("--attention-backend Paged", "attention_backend", "paged"),
     ("--attention-backend auto", "attention_backend", "unified"),
     ("--max-num-scheduled-tokens 1k", "max_num_scheduled_tokens", 1000), ("--watermark 0.1", "watermark", 0.1),
     ("--max-num-active-seqs 3", "max_num_active_seqs", 3), ("--tokenizer t", "tokenizer", "t"),
     ("--no-scheduler-reserve-full-isl", "scheduler_reserve_full_isl", False),
     ("--max-logprobs -1", "max_logprobs", -1),
     ("--device-memory-utilization 0.5", "gpu_memory_utilization", 0.5),
     ("--generation-config vllm", "generation_config", "vllm"),
     ("--kv-offloading-size 0.5", "kv_offloading_size", 0.5)],
)  # fmt: skip
def test_a_flags_value_reaches_the_engine(words, name, value):
    assert getattr(EngineArgs(**given(parsed(*words.split()), EngineArgs)), name) == value


@pytest.mark.parametrize("name", ["FLASH_ATTN", "FLASHINFER", "TORCH_SDPA"])
def test_an_attention_of_vllms_that_is_not_here(capsys, name):
    with pytest.raises(SystemExit):
        parsed("--attention-backend", name)
    line = capsys.readouterr().err
    assert f"--attention-backend: invalid choice: {name.lower()!r} (choose from " in line and "triton_attn" in line
    with pytest.raises(common.InputError, match=f"attention_backend '{name}': must be one of unified, paged"):
        EngineArgs(attention_backend=name)


def test_an_empty_key_is_none(monkeypatch):
    asked = []
    monkeypatch.setattr(sockets, "set_ulimit", lambda: asked.append("open files"))
    with pytest.raises(common.InputError, match="--api-key '': a key must not be empty"):
        serve_command(parsed("--api-key", "secret", "--api-key", ""))
    assert asked == ["open files"]


def test_clients_load_adapters_where_one_api_server_answers(monkeypatch):
    serve = parsed("--enable-lora", "--api-server-count", "2")
    assert not may_load_adapters(EngineArgs(enable_lora=True)), "a client would name a file that we read"
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    assert may_load_adapters(EngineArgs(enable_lora=True)) and not may_load_adapters(EngineArgs())
    with pytest.raises(common.InputError, match="not together with --api-server-count"):
        serve_command(serve)


def options():
    (commands,) = (action for action in serve_parser()._actions if action.choices)
    return {action.dest: action for action in commands.choices["serve"]._actions}


def test_flags_and_fields_are_the_same():
    """Each field has its flag, and what the help says is what happens without it."""
    args, found = parsed(), options()
    assert args.host == "127.0.0.1" and args.port == 8000, "nobody but this machine, unless it is said"
    for kind in (EngineArgs, FrontendArgs):
        assert {f.name for f in dataclasses.fields(kind)} <= found.keys() and given(args, kind) == {}
        made = kind()
        for name in (f.name for f in dataclasses.fields(kind)):
            told = re.search(r"\(default ([^;:)]*?)(?:: [^)]*|; [^)]*)?\)|^default (.*)$", found[name].help or "")
            if told and not (told[1] or told[2]).startswith(("as ", "the ")):
                default = getattr(made, name)
                default = json.dumps(default) if isinstance(default, list) else default
                default = {"max_body_bytes": "4M", "attention_backend": "unified"}.get(name, default)
                if name in ("max_num_seqs", "max_num_batched_tokens"):
                    seats, small, large = DEFAULTS["serve"]
                    default = {"max_num_seqs": seats, "max_num_batched_tokens": f"{small}, on a GPU {large}"}[name]
                assert (told[1] or told[2]) == str(default), found[name].help
            if found[name].help and found[name].help.endswith("(the default)"):
                assert getattr(made, name) is True
    assert FrontendArgs().max_body_bytes == arguments.human_readable_int("4M")
    assert all(seam in found["plug"].help for seam in plugs.SEAMS)


def test_switches_and_short_names():
    args = parsed("--no-enable-prefix-caching", "--no-enable-chunked-prefill", "-q", "x")
    assert (args.enable_prefix_caching, args.enable_chunked_prefill, args.quantization) == (False, False, "x")


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_num_seqs", 0), ("max_num_seqs", 1 << 17), ("max_num_batched_tokens", 0), ("max_model_len", 1),
     ("block_size", 0), ("num_gpu_blocks_override", 1), ("kv_cache_gib", 0.0), ("kv_cache_memory_bytes", 0),
     ("long_prefill_token_threshold", -1), ("seed", -1), ("tensor_parallel_size", 65)],
)  # fmt: skip
def test_a_script_and_a_server_hear_the_same(monkeypatch, name, value):
    """The same words, from the same line."""
    monkeypatch.setattr(sockets, "set_ulimit", lambda: None)
    with pytest.raises(common.InputError, match=f"{name} {value}: must be") as served:
        serve_command(parsed(f"--{name.replace('_', '-')}={value}"))
    with pytest.raises(common.InputError) as scripted:
        LLM(**{name: value})
    assert str(scripted.value) == str(served.value)
    last, other = served.traceback[-1], scripted.traceback[-1]
    assert (last.path, last.lineno) == (other.path, other.lineno)
