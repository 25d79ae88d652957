"""Several API servers at one port end together, and keep nobody waiting."""

from __future__ import annotations

import common

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

from support.process_tree import alive, descendants, wait_until_gone


def test_api_servers_end_with_the_process_that_started_them():
    """However that ends: they would keep the port, and go on without a coordinator."""
    code = f"""
import sys; sys.path.insert(0, {str(common.HERE)!r})
import asyncio, common, multiprocessing, types
from engine.serving import api_servers as group
servers = multiprocessing.get_context("fork")
group.make_client = lambda *_, **about: None
group.run_server = lambda *_, **about: asyncio.sleep(600)
args = types.SimpleNamespace(api_server_count=1)
process = servers.Process(target=group.run_api_server, args=(args, {{}}, None, (), 0, None))
process.start()
print(process.pid, flush=True)
process.join()
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    server = int(parent.stdout.readline())
    try:
        assert alive(server)
        parent.kill()
        wait_until_gone([server])
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


def test_nobody_holds_the_door_open_after_the_signal():
    """A kernel takes connections as long as any process has the listening socket, and here nobody would answer them:
    two API servers have stopped listening, and are busy with their last answers."""
    code = f"""
import sys; sys.path.insert(0, {str(common.HERE)!r})
import asyncio, common, multiprocessing, signal, types
from engine.serving import api_servers as group
from engine.serving.frontend_args import FrontendArgs
fork = multiprocessing.get_context("fork")
group.multiprocessing = types.SimpleNamespace(get_context=lambda kind: fork, connection=multiprocessing.connection,
                                              parent_process=multiprocessing.parent_process)
nothing = lambda *_: None
group.EngineGroup = lambda *_: types.SimpleNamespace(processes=[], sockets_of=lambda index: (), join=nothing,
                                                     forget_sockets=nothing)
group.accept_engines = nothing
group.make_client = lambda *_, **about: None

async def run_server(args, sock, say, **about):
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    sock.listen()
    say("Listening on http://127.0.0.1:" + str(sock.getsockname()[1]))
    await stopped.wait()
    sock.close()
    await asyncio.sleep(60)

group.run_server = run_server
args = types.SimpleNamespace(api_server_count=2, data_parallel_size=1)
group.run_api_servers(None, args, dict(host="127.0.0.1", port=0, shutdown_timeout=60,
                                       frontend=FrontendArgs()))
"""
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        port = int(launcher.stdout.readline().rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port), 5).close()
        launcher.send_signal(signal.SIGTERM)
        stop, refused = time.monotonic() + 10, False
        while not refused and time.monotonic() < stop:
            try:
                socket.create_connection(("127.0.0.1", port), 5).close()
                time.sleep(0.02)
            except ConnectionRefusedError:
                refused = True
        assert refused and len(descendants(launcher.pid)) == 2, "the servers are still there"
    finally:
        left = descendants(launcher.pid)
        launcher.kill()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        launcher.wait()
        launcher.stdout.close()
