"""The command `serve`: its flags, and a server's life from them to a signal.

Owns flags, under the names of vLLM's; called by `python -m vllm serve` and by lesson 06. It never decides what an
engine is made of, which is `EngineArgs`'s.
vLLM: `vllm/entrypoints/cli/serve.py`, `vllm/entrypoints/openai/cli_args.py`.
"""

from __future__ import annotations

import common

import argparse
import asyncio
import dataclasses
import functools
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from engine import arguments, plugs
from engine.config import POLICIES
from engine.engine_args import DEFAULTS, PLACES, ROUTING, EngineArgs
from engine.experts.config import ALL2ALL_BACKENDS
from engine.parallel.config import BACKENDS
from engine.registry import ATTENTION_BACKENDS
from engine.serving import sockets
from engine.serving.api_servers import run_api_servers
from engine.serving.engine_group import run_headless
from engine.serving.server import may_load_adapters, run_server
from engine.serving.start import make_engine


def stop_at_eof(descriptor: int) -> None:
    """SIGTERM for this process when nobody holds the other end of a pipe: its parent has ended, whatever way."""
    while os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def serve_command(args: argparse.Namespace) -> None:
    """Serve a model over OpenAI's API until SIGINT or SIGTERM."""
    if os.environ.get("SERVE_UNTIL_EOF") == "1":
        threading.Thread(target=stop_at_eof, args=[0], daemon=True).start()
    sockets.set_ulimit()
    if args.device == "cuda" and not common.HAS_GPU:
        raise common.InputError("--device cuda: torch sees no GPU here; allowed on this machine: auto, cpu")
    engine_args = EngineArgs(**{f.name: getattr(args, f.name) for f in dataclasses.fields(EngineArgs)})
    keys = args.api_key or list(filter(None, [os.environ.get("VLLM_API_KEY")]))
    if not all(keys):  # of an unset variable, perhaps: no key at all would be a surprise, and an empty one is none
        raise common.InputError("--api-key '': a key must not be empty")
    if engine_args.headless:
        raise SystemExit(run_headless(make_engine, engine_args))
    server = {"host": args.host, "port": args.port, "api_keys": keys, "shutdown_timeout": args.shutdown_timeout}
    if engine_args.api_server_count > 1:
        if may_load_adapters(engine_args):
            raise common.InputError(
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING: not together with --api-server-count: the other "
                "servers would not hear of an adapter that one has loaded"
            )
        raise SystemExit(run_api_servers(make_engine, engine_args, server))
    raise SystemExit(asyncio.run(run_server(engine_args, **server)))


WHOLE, SWITCH = functools.partial(arguments.number, int), argparse.BooleanOptionalAction


def add_serve_command(subparsers: Any) -> None:
    """The flags of `serve`, under the names of vLLM's. Defaults and limits are those of `EngineArgs`."""
    p = subparsers.add_parser("serve", help="keep a server running", description=serve_command.__doc__)
    for title, add_flags in GROUPS.items():
        add_flags(p.add_argument_group(title).add_argument)
    p.set_defaults(run=serve_command, **{f.name: f.default for f in dataclasses.fields(EngineArgs)})


def add_server_flags(add: Callable[..., Any]) -> None:
    """Who may ask, where, and how it ends."""
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add("--port", type=WHOLE(0, 65535), default=8000, help="default 8000; 0 takes a free one")
    add("--api-key", action="append", metavar="KEY", help="clients must send it; may be given several times")
    add(
        "--shutdown-timeout",
        type=arguments.number(float, 0),
        default=10.0,
        metavar="S",
        help="seconds for running requests after a signal (default 10; vLLM's is 0)",
    )
    add("--api-server-count", "-asc", type=WHOLE(), metavar="N", help="API server processes (06c)")
    add("--headless", action="store_true", help="engines without an API server (06c)")
    add(
        "--engine-place",
        choices=PLACES,
        help="where the engine core runs (VLLM_ENABLE_V1_MULTIPROCESSING=0: event-loop)",
    )
    add("--chat-template", metavar="FILE", help="a Jinja template in place of the model's own; or its text")
    add("--enable-auto-tool-choice", action="store_true", help="the model may decide to call a tool")
    add("--tool-call-parser", metavar="NAME", help="how it writes that down: hermes")


def add_model_flags(add: Callable[..., Any]) -> None:
    """Which weights, in what, and how they are sampled from by default."""
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--model", metavar="PATH_OR_ID", help="a local Llama-architecture folder, or a hub id")
    add("--served-model-name", nargs="+", metavar="NAME", help="what clients call it (default: as --model)")
    add("--trust-remote-code", action="store_true", help="refused, with the reason")
    add("--dtype", help="auto, float32, bfloat16, float16")
    add("--seed", type=WHOLE())
    add("--quantization", "-q", metavar="METHOD", help="of the weights: companion 05b's methods")
    add("--max-model-len", type=WHOLE(), metavar="N", help="tokens in a sequence (default: the model's)")
    add(
        "--generation-config",
        metavar="auto|vllm|FOLDER",
        help="whose generation_config.json has sampling defaults: the model's, nobody's, a folder's",
    )
    add("--override-generation-config", metavar="JSON", help='comes before: {"temperature": 0.5}')


def add_scheduler_flags(add: Callable[..., Any]) -> None:
    """What a step may hold, and how much memory its blocks have."""
    seats, small, large = DEFAULTS["serve"]
    add("--max-num-seqs", type=WHOLE(), metavar="N", help=f"sequences in a step (default {seats})")
    add(
        "--max-num-batched-tokens",
        type=WHOLE(),
        metavar="N",
        help=f"tokens in a step (default {small}, on a GPU {large})",
    )
    add("--enable-chunked-prefill", action=SWITCH)
    add("--long-prefill-token-threshold", type=WHOLE(), metavar="N", help="a prompt's cap per step")
    add("--scheduling-policy", choices=POLICIES)
    add("--max-num-queued-reqs", type=WHOLE(), metavar="N", help="one more gets a 503 (default %(default)s)")
    add("--block-size", type=WHOLE(), metavar="N", help="tokens in a KV block (default %(default)s)")
    add("--enable-prefix-caching", action=SWITCH)
    add("--kv-cache-dtype", metavar="DTYPE", help="auto, or one of lesson 05d's")
    add("--num-gpu-blocks-override", type=WHOLE(), metavar="N", help="KV blocks, whatever the memory")
    add(
        "--gpu-memory-utilization",
        type=arguments.number(float),
        metavar="F",
        help="default %(default)s",
    )
    add("--kv-cache-gib", type=arguments.number(float), metavar="G", help="on a CPU (default %(default)s)")
    add("--kv-cache-memory-bytes", type=WHOLE(), metavar="N", help="in place of these two, on any device")


def add_runner_flags(add: Callable[..., Any]) -> None:
    """Attention, graphs, drafts, adapters, and parts of one's own."""
    add(
        "--attention-backend",
        choices=ATTENTION_BACKENDS,
        help="unified: lesson 10's, for everything in a step at once; paged: lesson 02's",
    )
    add(
        "--plug",
        action="append",
        metavar="SEAM=FILE.py:OBJECT",
        help=f"a part of your own in a seam: {', '.join(plugs.SEAMS)}",
    )
    add("--enforce-eager", action="store_true", help="capture no CUDA graphs (lesson 05)")
    add("--async-scheduling", action=SWITCH, help="plan a step while the last one runs (lesson 05)")
    add("--speculative-config", metavar="JSON", help='lesson 07: \'{"method": "suffix", …}\'')
    add("--enable-lora", action="store_true", help="serve adapters, too (lesson 12)")
    add("--max-loras", type=WHOLE(), metavar="N", help="adapters in a step (default %(default)s)")
    add("--max-lora-rank", type=WHOLE(), metavar="R", help="largest rank (default %(default)s)")
    add("--max-cpu-loras", type=WHOLE(), metavar="N", help="adapters kept in CPU memory (default: as --max-loras)")
    add("--lora-modules", nargs="+", metavar="NAME=PATH", help="adapters to start with")


def add_parallel_flags(add: Callable[..., Any]) -> None:
    """Workers, engines and machines."""
    add("--tensor-parallel-size", "-tp", type=WHOLE(), metavar="N", help="shards of a layer (06c)")
    add("--pipeline-parallel-size", "-pp", type=WHOLE(), metavar="N", help="ranges of layers (06c)")
    add("--enable-expert-parallel", "-ep", action=SWITCH, help="shards have whole experts, not slices of each")
    add("--all2all-backend", choices=ALL2ALL_BACKENDS, help="what travels then: sums, or tokens to their experts")
    add("--enable-eplb", action=SWITCH, help="experts move to where they had better be")
    add("--num-redundant-experts", type=WHOLE(), metavar="N", help="slots of a layer beyond one for each")
    add("--eplb-step-interval", type=WHOLE(), metavar="N", help="steps between two moves (default %(default)s)")
    add("--distributed-executor-backend", choices=BACKENDS, help="where workers run (06c)")
    add("--data-parallel-size", "-dp", type=WHOLE(), metavar="N", help="engines (06c)")
    add("--data-parallel-size-local", "-dpl", type=WHOLE(), metavar="N", help="of these, on this machine")
    add("--data-parallel-start-rank", "-dpr", type=WHOLE(), metavar="N", help="of headless engines")
    add("--data-parallel-address", "-dpa", metavar="HOST", help="where the API servers are")
    add("--data-parallel-rpc-port", "-dpp", type=WHOLE(), metavar="PORT")
    add("--data-parallel-routing", choices=ROUTING, help="prefix: where it is cached")
    add("--kv-transfer-config", metavar="JSON", help="lesson 08: kv_connector, kv_role, kv_port, ...")


GROUPS = {
    "the server": add_server_flags,
    "the model": add_model_flags,
    "scheduler and cache": add_scheduler_flags,
    "what runs a step": add_runner_flags,
    "several of them": add_parallel_flags,
}
