"""The API server's own life: from start-up to the last answer.

Owns the listening socket, and what a signal means; called by `serve`, or as one of several API servers. It never reads
a request. vLLM: `vllm/entrypoints/openai/api_server.py:run_server`.
"""

from __future__ import annotations

import common

import asyncio
import contextlib
import functools
import gc
import hashlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.engine_args import EngineArgs
from engine.kv_transfer.store import remove_private_stores
from engine.model import folders
from engine.sampling.pooler import PoolerConfig
from engine.serving import metrics
from engine.serving.async_llm import AsyncLLM
from engine.serving.engine_group import start_client
from engine.serving.frontend_args import FrontendArgs
from engine.serving.log_stats import LoggingStatLogger
from engine.serving.logger import start_logging
from engine.serving.openai.pooling import trained_dimensions
from engine.serving.openai.serving import VERSION, OpenAIServing
from engine.serving.sockets import bind, bind_path, unbind_path
from engine.serving.start import make_engine

LOG_STATS_INTERVAL = 10.0  # seconds


async def run_server(  # noqa: PLR0913  how it is reached, and what another process has ready
    args: EngineArgs,
    host: str,
    port: int,
    api_keys: Sequence[str],
    shutdown_timeout: float,
    sock: socket.socket | None = None,
    client: Any = None,
    say: Callable[[str], None] | None = None,
    frontend: FrontendArgs | None = None,
) -> int:
    """From start-up to the last answer. Returns the exit code: 0 after a signal, 1 after the engine died.

    One of several API servers (companion 06c) is given its listening socket and the client of its engines.
    """
    from engine.serving.http_server import make_http_server
    from engine.serving.openai.app import build_app

    frontend, say, own = frontend or FrontendArgs(), say or functools.partial(print, flush=True), sock is None
    sock = sock or bind_as(frontend, host, port)
    start_logging()
    started = time.perf_counter()
    place = where_to_start(args, client)
    llm = await AsyncLLM.start(
        make_engine, args, folders.model_folder(args.model), place, say, max_num_queued_reqs=args.max_num_queued_reqs
    )
    reports = start_reporting(llm, args, frontend)
    if defaults := llm.sampling_defaults.params:  # where a request says nothing, it is not OpenAI's defaults that count
        say(f"sampling defaults of the model: {json.dumps(defaults)} (--generation-config vllm: none)")
    serving = make_serving(llm, args)
    serving.frontend = frontend
    debug = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
    app = build_app(serving, api_keys, debug, args.strict_fields)
    log = frontend.uvicorn_log_level, not frontend.disable_uvicorn_access_log
    server = make_http_server(app, int(shutdown_timeout) + 3, *log, tls=frontend.tls())
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, stop.set)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop.set))
    running = asyncio.create_task(server.serve(sockets=[sock]))
    say(
        f"ready after {time.perf_counter() - started:.1f} s: {', '.join([*args.names, *args.adapters])}, engine core: "
        f"{place if isinstance(place, str) else f'{args.data_parallel_size} x process'}, "
        f"pid {llm.ready.pid}"
    )
    gc.freeze()  # else a large request has the collector look through a million objects of imported libraries
    sock.listen(2048)  # the server is about to do it: whoever reads the next line may connect
    say(f"Listening on {address_of(sock, host, frontend)}")

    died, stopped = asyncio.create_task(llm.died.wait()), asyncio.create_task(stop.wait())
    await asyncio.wait((died, stopped, running), return_when=asyncio.FIRST_COMPLETED)
    if died.done() and not stop.is_set():
        say(f"EngineCore is dead: {llm.dead}")
        if os.environ.get("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH") == "1":
            await stopped  # stay, and answer /health with 503
    try:
        say(f"stopping: {llm.num_unfinished} sequences inside, {shutdown_timeout:g} s for them")
    except BrokenPipeError:  # whoever read this has left; those inside still get their answers
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    server.should_exit = True  # no new connections from here on
    await llm.shutdown(shutdown_timeout)
    await running
    gc.unfreeze()  # some of those libraries complain at exit of what was not collected
    for task in filter(None, (died, stopped, reports)):
        task.cancel()
    leave_nothing(args, frontend.uds if own else None, llm.ready.pid)
    return 1 if llm.dead else 0


def where_to_start(args: EngineArgs, client: Any) -> Any:
    """The name of a place for the engine, or what makes its client."""
    if client is not None:
        return functools.partial(_already_there, client)
    if args.scales_out:
        return start_client
    return "event-loop" if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0" else args.engine_place


def start_reporting(llm: AsyncLLM, args: EngineArgs, frontend: FrontendArgs) -> asyncio.Task | None:
    """From now on an engine that is up is counted, and spoken of every ten seconds. Of several API servers each would
    see its own part: as in vLLM, none of them speaks."""
    llm.log_requests = frontend.enable_log_requests
    if frontend.disable_log_stats:
        return None
    logger = llm.stat_logger = metrics.PrometheusStatLogger(
        args.names[0],
        getattr(args.speculation, "num_speculative_tokens", 0),
        args.max_loras if args.enable_lora else 0,
        args.kv_transfer is not None,
        llm.ready.max_model_len,
    )
    logger.describe(llm.ready)
    engines = llm.ready.about.get("engines", 1)
    prefix = "Engine 000" if engines == 1 else f"{engines} Engines Aggregated"
    reporter = LoggingStatLogger(logger.value, prefix, "GPU" if common.HAS_GPU else "CPU")
    return asyncio.create_task(reporter.run(LOG_STATS_INTERVAL)) if args.api_server_count == 1 else None


def leave_nothing(args: EngineArgs, uds: str | None, pid: int) -> None:
    """What is outside this process and would stay: the socket's name, and blocks of an engine whose process `pid` has
    ended where it stood."""
    if uds:
        unbind_path(uds)
    if args.kv_transfer and args.kv_transfer.is_private:
        remove_private_stores(pid)


def bind_as(frontend: FrontendArgs, host: str, port: int) -> socket.socket:
    """Where clients will come. Raises InputError."""
    return bind_path(frontend.uds) if frontend.uds else bind(host, port)


def address_of(sock: socket.socket, host: str, frontend: FrontendArgs) -> str:
    """What a client is told."""
    if frontend.uds:
        return f"unix:{frontend.uds}"
    return f"{frontend.scheme}://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"


def make_serving(llm: AsyncLLM, args: EngineArgs) -> OpenAIServing:
    """What answers, as the flags say, warm."""
    serving = OpenAIServing(llm, args.names, args.adapters)
    serving.tokenizer.chat_template = args.chat_template or serving.tokenizer.chat_template
    with contextlib.suppress(common.InputError):  # no template, or one that wants more than a greeting
        serving.tokenizer.render_chat([{"role": "user", "content": "warm-up"}])  # else the first client waits for it
    serving.has_kv_connector = args.kv_transfer is not None
    serving.enable_auto_tool_choice, serving.tool_call_parser = args.enable_auto_tool_choice, args.tool_call_parser
    serving.reasoning_parser, serving.response_role = args.reasoning_parser, args.response_role
    serving.root, serving.runtime_loras = args.model or str(folders.model_folder()), may_load_adapters(args)
    folder = folders.model_folder(args.model)
    serving.engine_args = args
    serving.pooler_config = PoolerConfig.of(folder, args.pooler_config)
    serving.trained_dimensions = trained_dimensions(folders.read_json(folder / "config.json"))
    serving.system_fingerprint = system_fingerprint(args)
    serving.parents, serving.max_logprobs = args.adapter_parents, args.max_logprobs
    return serving


def system_fingerprint(args: EngineArgs) -> str:
    """Changes with whatever may change an answer: this version, torch's, the flags, what it runs on."""
    place = torch.cuda.get_device_name() if common.HAS_GPU else "cpu"
    about = hashlib.sha256(repr((torch.__version__, place, args)).encode())
    return f"fp-{VERSION}-{about.hexdigest()[:8]}"


def may_load_adapters(args: EngineArgs) -> bool:
    """May clients load and unload adapters? It lets them name folders that the server then reads."""
    return args.enable_lora and os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1"


def _already_there(client: Any, factory: Any, args: Any) -> Any:
    """As `start_client`, for engines that others have started."""
    return client
