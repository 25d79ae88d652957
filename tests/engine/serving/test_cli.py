"""The command `serve`: its flags are the engine's arguments, and wrong ones are one line."""

from __future__ import annotations

import common

import dataclasses

import pytest

from engine import arguments
from engine.engine_args import EngineArgs
from engine.llm import LLM
from engine.serving import sockets
from engine.serving.cli import add_serve_command, serve_command
from engine.serving.server import may_load_adapters


def parsed(*words):
    """What `serve` reads from these words."""
    parser = arguments.Parser()
    add_serve_command(parser.add_subparsers())
    return parser.parse_args(["serve", *words])


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


def test_flags_and_fields_are_the_same():
    args = parsed()
    defaults = {f.name: f.default for f in dataclasses.fields(EngineArgs)}
    assert {name: getattr(args, name) for name in defaults} == defaults
    assert args.host == "127.0.0.1" and args.port == 8000, "nobody but this machine, unless it is said"
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
