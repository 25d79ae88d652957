"""Frames: what two engines say to each other, and what of it is not believed.

Owns the format of a message, and refuses what has none; called by links. It never opens a connection.
vLLM: `vllm/distributed/kv_transfer/kv_connector/v1/nixl/metadata.py` (msgpack over ZMQ).
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

import torch

#   consumer → producer   GET     these heads of this transfer; layer i from position have[i] on, to `end`
#                         DONE    I have all of it: free it           CANCEL  I do not want it any more
#   producer → consumer   HELLO   first of all: who I am; refuse me if my cache is not like yours
#                         KV      a rectangle                         GONE    there is no such transfer (any more)
#
# A frame is `kvx1`, two lengths, a JSON header, a payload. Pickle would let whoever reaches the port run code here.


PREFIX = struct.Struct(">4sIQ")  # magic, bytes of header, bytes of payload


MAGIC, MAX_HEADER, MAX_PAYLOAD = b"kvx1", 1 << 20, 1 << 32


FIELDS: dict[str, dict[str, type]] = {
    "HELLO": {"layout": str, "engine_id": str, "port": int},
    "GET": {"transfer": str, "head": int, "heads": int, "end": int, "have": list, "consumers": int},
    "KV": {"transfer": str, "layer": int, "first": int, "count": int, "head": int, "heads": int, "crc": int},
    "DONE": {"transfer": str},
    "CANCEL": {"transfer": str},
    "GONE": {"transfer": str, "why": str},
}


class ProtocolError(ValueError):
    """The other side sent something that is no frame. The connection cannot be trusted any further."""


def pack_frame(header: dict[str, Any], payload_bytes: int = 0) -> bytes:
    """Everything of a frame but its payload."""
    body = json.dumps(header).encode()
    return PREFIX.pack(MAGIC, len(body), payload_bytes) + body


def read_frame(read: Callable[[int], bytearray], max_payload: int = MAX_PAYLOAD) -> tuple[dict[str, Any], bytearray]:
    """The next frame. `read(n)` returns exactly n bytes, or raises EOFError. Raises ProtocolError, before any memory is
    taken for what it announces, if that is more than fits."""
    magic, header_bytes, payload_bytes = PREFIX.unpack(read(PREFIX.size))
    if magic != MAGIC or header_bytes > MAX_HEADER or payload_bytes > max_payload:
        raise ProtocolError(f"not a frame: {bytes(magic)!r}, {header_bytes} and {payload_bytes} bytes")
    try:
        header = json.loads(bytes(read(header_bytes)))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"header is not JSON: {error}") from None
    check_header(header)
    return header, read(payload_bytes)


def check_header(header: Any) -> None:
    """Raises ProtocolError unless the fields of this kind of message are there, of their types, and not negative."""
    kind = header.get("kind") if isinstance(header, dict) else None
    fields = FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise ProtocolError(f"no such message: {header!r:.80}")
    for name, wanted in fields.items():
        value = header.get(name)
        numbers = value if wanted is list and type(value) is list else [value] if wanted is int else []
        if type(value) is not wanted or not all(type(n) is int and 0 <= n < 1 << 40 for n in numbers):
            raise ProtocolError(f"{kind}: {name} {value!r:.40}: must be a {wanted.__name__} in range")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8 [nbytes]."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def host_bytes(payload: torch.Tensor) -> memoryview:
    """The bytes of a payload, in host memory."""
    return payload.cpu().numpy().data


def checksum(payload: torch.Tensor) -> int:
    """CRC32 of the bytes."""
    return zlib.crc32(host_bytes(payload))
