"""What a request says about its keys and values: `kv_transfer_params`, checked, attached, and taken back.

Owns their meaning; called by connectors, by the API and by a proxy. It never moves a key.
vLLM: `vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py`.
"""

from __future__ import annotations

import common

import asyncio
import contextlib
import socket
import time
from typing import Any

from engine.distributed import handshake
from engine.kv_transfer.frames import pack_frame
from engine.request import Request


def kv_transfer_params(request: Request) -> dict[str, Any]:
    """What a request says about its keys and values; it travels in `SamplingParams.extra_args`, as in vLLM.

    For a prefill worker: do_remote_decode, transfer_id. For a decode worker: do_remote_prefill, transfer_id,
    remote_host, remote_port and, if the producer is sharded, tp_size (its rank r listens at remote_port + r).
    """
    return (request.sampling_params.extra_args or {}).get("kv_transfer_params") or {}


def check_kv_transfer_params(params: Any) -> None:
    """Raises InputError unless `params` are what the functions below rely on."""
    kinds = {
        "do_remote_decode": bool,
        "do_remote_prefill": bool,
        "transfer_id": str,
        "remote_host": str,
        "remote_port": int,
        "tp_size": int,
    }
    if not isinstance(params, dict):
        raise common.InputError("kv_transfer_params: must be an object")
    for name, value in params.items():
        if name in kinds and type(value) is not kinds[name]:
            raise common.InputError(f"kv_transfer_params: {name} must be a {kinds[name].__name__}")
    if params.get("do_remote_decode") and params.get("do_remote_prefill"):
        raise common.InputError("kv_transfer_params: do_remote_decode and do_remote_prefill exclude each other")
    wanted = ("transfer_id", "remote_host", "remote_port") if params.get("do_remote_prefill") else ()
    wanted = ("transfer_id",) if params.get("do_remote_decode") else wanted
    if missing := [name for name in wanted if name not in params]:
        raise common.InputError(f"kv_transfer_params: {missing[0]} is missing")
    port, ranks = params.get("remote_port", 1), params.get("tp_size", 1)
    if not (port > 0 and 1 <= ranks <= 1024 and port + ranks <= 65536):  # rank r listens at remote_port + r
        raise common.InputError("kv_transfer_params: remote_port or tp_size is out of range")


def attach_params(sampling_params: Any, params: Any) -> None:
    """Send `params` with a request of the API. Raises InputError."""
    check_kv_transfer_params(params)
    if sampling_params.n != 1:
        raise common.InputError(f"n {sampling_params.n}: must be 1 with kv_transfer_params: one transfer, one answer")
    sampling_params.extra_args = {"kv_transfer_params": params}


async def give_up(params: dict[str, Any]) -> None:
    """Nobody will come for this prompt: say so to every rank that keeps it, as a decode worker would. A rank that
    cannot be reached keeps it until its lease is up."""
    address = params["remote_host"], params["remote_port"]
    ranks = [(address[0], address[1] + rank) for rank in range(params.get("tp_size", 1))]
    await asyncio.gather(*(asyncio.to_thread(cancel, rank, params["transfer_id"]) for rank in ranks))


def cancel(address: tuple[str, int], transfer: str, seconds: float = 5.0) -> None:
    """Tell the producer at `address` that nobody wants this transfer any more."""
    stop = time.monotonic() + seconds
    with (
        contextlib.suppress(OSError, OverflowError, UnicodeError),
        handshake.dial(address, handshake.secret(), seconds) as sock,
    ):
        sock.sendall(pack_frame({"kind": "CANCEL", "transfer": transfer}))
        sock.shutdown(socket.SHUT_WR)
        while True:  # its HELLO, and then its end of the connection: it has heard
            handshake.read_exactly(sock, 1, stop)
