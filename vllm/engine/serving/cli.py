"""The command `serve`: its flags, and a server's life from them to a signal.

Owns flags, under the names of vLLM's; called by `python -m vllm serve` and by lesson 06. It never decides what an
engine is made of, which is `EngineArgs`'s, and it never imports torch to find that a flag is wrong.
vLLM: `vllm/entrypoints/cli/serve.py`, `vllm/entrypoints/common/cli_args.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from engine import arguments
from engine.choices import (
    ALL2ALL_BACKENDS,
    ATTENTION,
    BACKENDS,
    LOAD_FORMATS,
    LOG_LEVELS,
    PLACES,
    POLICIES,
    REASONING_PARSERS,
    ROUTING,
    TOOL_CALL_PARSERS,
)
from engine.registry import ATTENTION_BACKENDS
from engine.serving import vllm_flags
from engine.serving.command_line import prepare


def stop_at_eof(descriptor: int) -> None:
    """SIGTERM for this process when nobody holds the other end of a pipe: its parent has ended, whatever way."""
    import signal

    while os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def serve_command(args: argparse.Namespace) -> None:
    """Serve a model over OpenAI's API until SIGINT or SIGTERM."""
    if args.device == "cpu":
        # Perhaps a file said so: `common` looks here, and so does every process of ours.
        sys.argv += ["--device", "cpu"]

    import common  # the line that takes seconds: torch comes with it

    import asyncio
    import threading

    from engine.engine_args import EngineArgs
    from engine.serving import sockets
    from engine.serving.api_servers import run_api_servers
    from engine.serving.engine_group import run_headless
    from engine.serving.frontend_args import FrontendArgs
    from engine.serving.server import may_load_adapters, run_server
    from engine.serving.start import make_engine

    if os.environ.get("SERVE_UNTIL_EOF") == "1":
        threading.Thread(target=stop_at_eof, args=[0], daemon=True).start()
    sockets.set_ulimit()
    if args.device == "cuda" and not common.HAS_GPU:
        raise common.InputError("--device cuda: torch sees no GPU here; allowed on this machine: auto, cpu")
    if getattr(args, "model_tag", None) is not None:
        args.model = args.model_tag
    engine_args, frontend = EngineArgs(**given(args, EngineArgs)), FrontendArgs(**given(args, FrontendArgs))
    keys = getattr(args, "api_key", None) or list(filter(None, [os.environ.get("VLLM_API_KEY")]))
    if not all(keys):  # of an unset variable, perhaps: no key at all would be a surprise, and an empty one is none
        raise common.InputError("--api-key '': a key must not be empty")
    for text in getattr(args, "without_effect", ()):
        print(text, flush=True)
    if engine_args.headless:
        raise SystemExit(run_headless(make_engine, engine_args))
    server = {"host": args.host, "port": args.port, "api_keys": keys, "shutdown_timeout": args.shutdown_timeout}
    server["frontend"] = frontend
    if engine_args.api_server_count > 1:
        if may_load_adapters(engine_args):
            raise common.InputError(
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING: not together with --api-server-count: the other "
                "servers would not hear of an adapter that one has loaded"
            )
        raise SystemExit(run_api_servers(make_engine, engine_args, server))
    raise SystemExit(asyncio.run(run_server(engine_args, **server)))


def given(args: argparse.Namespace, kind: type) -> dict[str, Any]:
    """What the command line says of the fields of `kind`; the others have their defaults."""
    return {f.name: getattr(args, f.name) for f in dataclasses.fields(kind) if hasattr(args, f.name)}


WHOLE, SWITCH = functools.partial(arguments.number, int), arguments.Switch
LARGE = arguments.human_readable_int


def add_serve_command(subparsers: Any) -> None:
    """The flags of `serve`, under the names of vLLM's. Defaults and limits are those of `EngineArgs`; the help repeats
    them, so that nobody waits for torch to read it."""
    p = subparsers.add_parser(
        "serve",
        help="keep a server running",
        description=serve_command.__doc__,
        epilog="Flags that take JSON take its keys, too: --speculative-config.method ngram. Numbers may be 4k (4,000) "
        "or 4K (4,096). A flag of vLLM's that is not here says what it does there.",
        usage="%(prog)s [MODEL] [FLAG …]",
        argument_default=argparse.SUPPRESS,
        prepare=prepare,
        elsewhere=vllm_flags.why_not,
    )
    p.add_argument("model_tag", nargs="?", metavar="MODEL", help="as --model")
    for title, add_flags in GROUPS.items():
        add_flags(p.add_argument_group(title).add_argument)
    p.set_defaults(run=serve_command)


def add_server_flags(add: Callable[..., Any]) -> None:
    """Who may ask, where, and how it ends."""
    add("--config", metavar="FILE.yaml", help="flags from a file, as in `port: 8000`; the command line comes before it")
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add("--port", type=WHOLE(0, 65535), default=8000, help="default 8000; 0 takes a free one")
    add("--uds", metavar="PATH", help="listen on a Unix domain socket instead")
    add("--api-key", nargs="+", action="extend", metavar="KEY", help="clients must send one of these")
    add(
        "--shutdown-timeout",
        type=arguments.number(float, 0),
        default=10.0,
        metavar="S",
        help="seconds for running requests after a signal (default 10; vLLM's is 0)",
    )
    add("--max-body-bytes", type=LARGE, metavar="N", help="a larger request gets a 413 (default 4M)")
    add("--api-server-count", "-asc", type=WHOLE(), metavar="N", help="API server processes (06c)")
    add("--headless", action=SWITCH, help="engines without an API server (06c)")
    add(
        "--engine-place",
        choices=PLACES,
        help="where the engine core runs (VLLM_ENABLE_V1_MULTIPROCESSING=0: event-loop)",
    )
    add("--chat-template", metavar="FILE", help="a Jinja template in place of the model's own; or its text")
    add("--enable-auto-tool-choice", action=SWITCH, help="the model may decide to call a tool")
    add("--tool-call-parser", metavar="NAME", help=f"how it writes that down: {', '.join(TOOL_CALL_PARSERS)}")
    add("--reasoning-parser", metavar="NAME", help=f"<think> is no answer: {', '.join(REASONING_PARSERS)}")
    add("--response-role", metavar="ROLE", help="whose message an answer is (default assistant)")
    add("--strict-fields", action=SWITCH, help="refuse a field of a request that is not known here")


def add_log_flags(add: Callable[..., Any]) -> None:
    """What it says, to its log and about its answers."""
    add("--uvicorn-log-level", choices=LOG_LEVELS, help="of the HTTP server (default info)")
    add("--disable-uvicorn-access-log", action=SWITCH, help="no line for each request")
    add("--disable-log-stats", action=SWITCH, help="no line every ten seconds, and no vllm: metrics")
    add("--enable-log-requests", action=SWITCH, help="a line with the parameters of each")
    add("--enable-request-id-headers", action=SWITCH, help="X-Request-Id in every answer, the client's or a new one")
    add(
        "--enable-prompt-tokens-details",
        action=SWITCH,
        help="usage says what was cached (default: yes, as OpenAI does)",
    )
    add("--enable-force-include-usage", action=SWITCH, help="streams end with usage, asked for or not")
    add("--enable-server-load-tracking", action=SWITCH, help="count the requests inside for GET /load")
    add("--stream-interval", type=WHOLE(1), metavar="N", help="tokens in a piece of a stream (default 1)")


def add_http_flags(add: Callable[..., Any]) -> None:
    """A proxy in front, a browser's page, and TLS."""
    add("--root-path", metavar="PATH", help="where a proxy in front of this server has it")
    add("--disable-fastapi-docs", action=SWITCH, help="no /openapi.json")
    for name in ("origins", "methods", "headers"):
        add(f"--allowed-{name}", type=json_list, metavar="JSON", help='of other sites\' pages (default ["*"])')
    add("--allow-credentials", action=SWITCH, help="with their cookies")
    add("--ssl-certfile", metavar="FILE", help="speak HTTPS")
    add("--ssl-keyfile", metavar="FILE", help="the certificate's key, if it is not in its file")
    add("--ssl-ca-certs", metavar="FILE", help="who may have signed a client's certificate")
    add("--ssl-cert-reqs", type=int, choices=(0, 1, 2), help="clients need none, may have one, need one (default 0)")
    add("--ssl-ciphers", metavar="LIST", help="cipher suites of TLS 1.2")


def json_list(text: str) -> list[str]:
    """An argparse type: a JSON list of texts."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise argparse.ArgumentTypeError(f"""{text!r} is not a JSON list of texts, as in '["*"]'""")
    return found


def add_model_flags(add: Callable[..., Any]) -> None:
    """Which weights, in what, and how they are sampled from by default."""
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where it runs (default auto)")
    add("--model", metavar="PATH_OR_ID", help="a local Llama-architecture folder or .gguf file, or a hub id")
    add("--tokenizer", metavar="PATH_OR_ID", help="whose tokenizer and chat template (default: the model's)")
    add("--load-format", choices=LOAD_FORMATS, type=str.lower, help="dummy: weights at random, no file (default auto)")
    add("--served-model-name", nargs="+", metavar="NAME", help="what clients call it (default: as --model)")
    add("--dtype", help="auto, float32, float, bfloat16, float16, half (default auto)")
    add("--seed", type=WHOLE(), help="of all that is random (default 0)")
    add("--quantization", "-q", metavar="METHOD", help="of the weights: companion 05b's methods")
    add(
        "--max-model-len",
        type=arguments.human_readable_int_or_auto,
        metavar="N",
        help="tokens in a sequence (default: the model's; auto or -1: as many as fit into the cache)",
    )
    add("--max-logprobs", type=WHOLE(-1), metavar="N", help="a request may ask for (default 20; -1: for all)")
    add(
        "--generation-config",
        metavar="auto|vllm|FOLDER",
        help="whose generation_config.json has sampling defaults: the model's, nobody's, a folder's (default auto)",
    )
    add("--runner", metavar="auto|generate|pooling", help="it writes and pools, whichever is named")
    add("--convert", metavar="auto|none|embed", help="likewise: every model here has vectors for /v1/embeddings")
    add("--pooler-config", metavar="JSON", help='how they are pooled: {"pooling_type": "LAST" or "MEAN"}')
    add("--override-generation-config", metavar="JSON", help='comes before: {"temperature": 0.5}')


def add_scheduler_flags(add: Callable[..., Any]) -> None:
    """What a step may hold, and how much memory its blocks have."""
    add("--max-num-seqs", type=WHOLE(), metavar="N", help="sequences in a step (default 64)")
    add(
        "--max-num-batched-tokens",
        type=LARGE,
        metavar="N",
        help="tokens in a step (default 512, on a GPU 8192)",
    )
    add("--max-num-scheduled-tokens", type=LARGE, metavar="N", help="fewer, in buffers of that size")
    add("--max-num-active-seqs", type=WHOLE(), metavar="N", help="admit fewer than --max-num-seqs")
    add("--enable-chunked-prefill", action=SWITCH, help="a prompt may take several steps (the default)")
    add("--long-prefill-token-threshold", type=WHOLE(), metavar="N", help="a prompt's cap per step (default 0: none)")
    add("--long-prefill-token-threshold-adaptive", action=SWITCH, help="at least a fair share of the step")
    add("--scheduler-reserve-full-isl", action=SWITCH, help="admit what fits whole (the default)")
    add("--watermark", type=arguments.number(float), metavar="F", help="blocks that admission leaves (default 0.0)")
    add("--scheduling-policy", choices=POLICIES, help="who is first (default fcfs)")
    add("--max-num-queued-reqs", type=WHOLE(), metavar="N", help="one more gets a 503 (default 1024)")
    add("--block-size", type=WHOLE(), metavar="N", help="tokens in a KV block (default 16)")
    add("--enable-prefix-caching", action=SWITCH, help="find what was computed before (the default)")
    add("--kv-cache-dtype", metavar="DTYPE", help="auto, or one of lesson 05d's (default auto)")
    add("--num-gpu-blocks-override", type=WHOLE(), metavar="N", help="KV blocks, whatever the memory")
    add(
        "--gpu-memory-utilization",
        "--device-memory-utilization",
        type=arguments.number(float),
        metavar="F",
        help="default 0.92",
    )
    add("--kv-cache-gib", type=arguments.number(float), metavar="G", help="on a CPU (default 1.0)")
    add("--kv-cache-memory-bytes", type=LARGE, metavar="N", help="in place of these two, on any device")
    add("--kv-offloading-size", type=arguments.number(float), metavar="G", help="GiB of host memory behind it")


def add_runner_flags(add: Callable[..., Any]) -> None:
    """Attention, graphs, drafts, adapters, and parts of one's own."""
    add(
        "--attention-backend",
        type=str.lower,
        choices=(*ATTENTION_BACKENDS, *ATTENTION),
        metavar="NAME",
        help="unified: lesson 10's, for everything in a step at once, which vLLM calls TRITON_ATTN; paged: lesson 02's "
        "(default unified)",
    )
    add(
        "--plug",
        action="append",
        metavar="SEAM=FILE.py:OBJECT",
        help="a part of your own in a seam: attention, scheduler, block_pool, sampler, rejection, drafter, lora",
    )
    add("--enable-sleep-mode", action=SWITCH, help="weights and cache may go away and come back (dev mode)")
    add("--enforce-eager", action=SWITCH, help="capture no CUDA graphs (lesson 05)")
    add("--async-scheduling", action=SWITCH, help="plan a step while the last one runs (lesson 05)")
    add("--speculative-config", "-sc", metavar="JSON", help='lesson 07: \'{"method": "suffix", …}\'')
    add("--spec-method", metavar="NAME", help="its method")
    add("--spec-model", metavar="PATH_OR_ID", help="its model")
    add("--spec-tokens", metavar="N", help="its num_speculative_tokens")
    add("--enable-lora", action=SWITCH, help="serve adapters, too (lesson 12)")
    add("--max-loras", type=WHOLE(), metavar="N", help="adapters in a step (default 1)")
    add("--max-lora-rank", type=WHOLE(), metavar="R", help="largest rank (default 16)")
    add("--max-cpu-loras", type=WHOLE(), metavar="N", help="adapters kept in CPU memory (default: as --max-loras)")
    add(
        "--lora-modules",
        nargs="+",
        metavar="NAME=PATH",
        help='adapters to start with; or as JSON: {"name": …, "path": …}',
    )


def add_parallel_flags(add: Callable[..., Any]) -> None:
    """Workers, engines and machines."""
    add("--tensor-parallel-size", "-tp", type=WHOLE(), metavar="N", help="shards of a layer (06c)")
    add("--pipeline-parallel-size", "-pp", type=WHOLE(), metavar="N", help="ranges of layers (06c)")
    add(
        "--enable-expert-parallel",
        "-ep",
        action=SWITCH,
        help="ranks have whole experts; with -dp, those of all engines",
    )
    add("--all2all-backend", choices=ALL2ALL_BACKENDS, help="what travels then: sums, or tokens to their experts")
    add("--enable-eplb", action=SWITCH, help="experts move to where they had better be")
    add("--num-redundant-experts", type=WHOLE(), metavar="N", help="slots of a layer beyond one for each")
    add("--eplb-step-interval", type=WHOLE(), metavar="N", help="steps between two moves (default 3000)")
    add("--distributed-executor-backend", choices=BACKENDS, help="where workers run (06c)")
    add("--data-parallel-size", "-dp", type=WHOLE(), metavar="N", help="engines (06c)")
    add("--data-parallel-size-local", "-dpl", type=WHOLE(), metavar="N", help="of these, on this machine")
    add("--data-parallel-start-rank", "-dpr", type=WHOLE(), metavar="N", help="of headless engines")
    add("--data-parallel-address", "-dpa", metavar="HOST", help="where the API servers are")
    add("--data-parallel-rpc-port", "-dpp", type=WHOLE(), metavar="PORT")
    add("--data-parallel-routing", choices=ROUTING, help="prefix: where it is cached")
    add("--kv-transfer-config", metavar="JSON", help="lesson 08: kv_connector, kv_role, kv_port, ...")


class WithoutEffect(argparse.Action):
    """A flag that is taken, and spoken of when the server starts."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        text = f"{self.option_strings[0]}: without effect here: {self.metavar}"
        namespace.without_effect = [*getattr(namespace, "without_effect", []), text]


def add_accepted_flags(add: Callable[..., Any]) -> None:
    """What vLLM's command line may have, and what changes nothing here."""
    for flags, value, text in vllm_flags.rows(vllm_flags.ACCEPTED):
        off = [] if value else [*arguments.opposites(flags), f"--no-{flags[0][2:]}"]
        allowed = None if not value or value[0].isupper() else value.split("|")
        nargs = 0 if not value else "+" if value.endswith("…") else None
        kind = functools.partial(one_of, allowed, text) if allowed else str
        add(*flags, *off, dest="without_effect", action=WithoutEffect, nargs=nargs, type=kind, metavar=text,
            help=argparse.SUPPRESS)  # fmt: skip


def one_of(allowed: Sequence[str], text: str, value: str) -> str:
    """An argparse type: one of the values that change nothing."""
    if value.lower() not in allowed:
        raise argparse.ArgumentTypeError(f"{value!r}: only {' or '.join(allowed)} here: {text.partition(';')[0]}")
    return value


GROUPS = {
    "the server": add_server_flags,
    "what it says": add_log_flags,
    "the model": add_model_flags,
    "scheduler and cache": add_scheduler_flags,
    "what runs a step": add_runner_flags,
    "several of them": add_parallel_flags,
    "HTTP": add_http_flags,
    "without effect": add_accepted_flags,
}
