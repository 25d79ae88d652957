"""Several API server processes that accept from one listening socket, before the same engines.

Owns their processes; called by `serve` when it is asked for more than one. If one of them or an engine dies, all end:
half a service is harder to notice than none. They never share a request. vLLM: `vllm/entrypoints/cli/serve.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import threading
from typing import Any

from engine.serving.core_proc import Factory
from engine.serving.engine_group import EngineGroup, make_client
from engine.serving.rendezvous import accept_engines
from engine.serving.server import bind_as, run_server
from engine.serving.sockets import unbind_path


def run_api_servers(factory: Factory, args: Any, server: dict[str, Any]) -> int:
    """`api_server_count` processes that accept from one listening socket, before the same engines.

    One event loop tokenizes, detokenizes and writes JSON for everybody; several divide that. If one of them or an
    engine dies, all end: half a service is harder to notice than none. Returns the exit code.
    """
    frontend = server["frontend"]
    sock = bind_as(frontend, server["host"], server["port"])
    count, context = args.api_server_count, multiprocessing.get_context("spawn")
    group = EngineGroup(factory, args, args.data_parallel_size, count, accept_engines(args, count))
    servers, pipes, stopping = [], [], threading.Event()

    def stop(*_: Any) -> None:
        if stopping.is_set():
            return  # a second signal would interrupt those who are leaving
        stopping.set()
        for process in servers:
            process.terminate()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    died = False
    try:
        for index in range(count):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=run_api_server,
                name=f"ApiServer_{index}",
                daemon=True,
                args=(args, server, sock, group.sockets_of(index), index, theirs),
            )
            process.start()
            theirs.close()
            servers.append(process)
            pipes.append(ours)
        group.forget_sockets()  # those of the servers are the only ones left,
        sock.close()  # and so is the one they listen on: the kernel takes connections as long as anybody holds it
        with contextlib.suppress(EOFError):  # each says where it listens, or closes its end by dying
            lines = [pipe.recv() for pipe in pipes]
            print(lines[0], flush=True)
        multiprocessing.connection.wait([process.sentinel for process in (*servers, *group.processes)])
        died = not stopping.is_set()
    finally:
        stop()
        for process in servers:
            process.join(server["shutdown_timeout"] + 10)
            if process.is_alive():
                process.kill()
                process.join()
        group.join()
        if frontend.uds:
            unbind_path(frontend.uds)
    return 1 if died else max(abs(process.exitcode) for process in servers)


def run_api_server(  # noqa: PLR0913  what a process is started with
    args: Any, server: dict[str, Any], sock: socket.socket, sockets: tuple, index: int, pipe: Any
) -> None:
    """One API server process: lesson 06's, with a client that others have connected. It ends with its parent."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "run_api_servers has started us"
    threading.Thread(target=lambda: (parent.join(), os.kill(os.getpid(), signal.SIGTERM)), daemon=True).start()
    client = make_client(args, *sockets, index=index, count=args.api_server_count)

    def say(text: str) -> None:
        if text.startswith("Listening on "):
            pipe.send(text)
        elif index == 0:
            print(text, flush=True)

    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):  # nobody reads what we say
        raise SystemExit(asyncio.run(run_server(args, **server, sock=sock, client=client, say=say)))
