"""The command `serve`: its flags are the engine's arguments, and wrong ones are one line."""

from __future__ import annotations

import common

import dataclasses

import pytest

from engine import arguments
from engine.engine_args import EngineArgs
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
