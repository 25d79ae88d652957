"""In front of the application: the key, the size of a body, and requests as sockets bring them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import socket

import pytest
import uvicorn

from engine.serving.frontend_args import FrontendArgs
from engine.serving.openai.serving import OpenAIServing
from support.cases import named
from support.scripted_api import P, ask, check_error, serve


def test_a_body_beyond_the_limit_is_413_however_it_comes(monkeypatch):
    """In one piece, in many, with or without its length; the client may send it to the end before it hears."""
    monkeypatch.setattr(OpenAIServing, "frontend", FrontendArgs(max_body_bytes=1024))
    llm, app = serve()
    for body in (b"x" * 1025, [b"x" * 100] * 11, [b"x" * 1023, b"", b"xx"], b"x" * 50_000):
        check_error(ask(app, "/v1/completions", body), 413, None, "1,024 bytes (the server's --max-body-bytes)")
    exact = json.dumps(P).encode().ljust(1024)
    assert ask(app, "/v1/completions", exact).status == 200 and len(llm.added) == 1
    assert ask(app, "/v1/completions", [exact[:1], exact[1:500], exact[500:]]).status == 200


async def over_a_socket(app, *parts):
    """What a real server answers to bytes that arrive in these parts, and whether it closes the connection then."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", http="h11"))
        server.capture_signals = contextlib.nullcontext
        running = asyncio.create_task(server.serve(sockets=[listening]))
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        head = await reader.readuntil(b"\r\n\r\n")
        heard = head + await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))
        more = b""
        with contextlib.suppress(ConnectionError):  # whoever closes does not answer this one
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            more = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        server.should_exit = True
        await running
    assert more.count(b"HTTP/1.1 ") <= 1, "one answer for each request"
    return heard.decode(), not more


ASKED = json.dumps(P).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = b"".join(b"%x\r\n%c\r\n" % (1, byte) for byte in ASKED) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "closes"),
    [([HEAD + b"Content-Length: %d\r\n\r\n" % len(ASKED), *(bytes([byte]) for byte in ASKED)], 200, False),
     ([HEAD + b"Transfer-Encoding: chunked\r\n\r\n", CHUNKED[:33], CHUNKED[33:]], 200, False),
     ([HEAD.replace(b"1.1", b"1.0") + b"Content-Length: %d\r\n\r\n" % len(ASKED) + ASKED], 200, True),
     ([HEAD.replace(b"/v1", b"http://x/v1") + b"Content-Length: %d\r\n\r\n" % len(ASKED) + ASKED], 200, False),
     ([HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n" + CHUNKED], 400, True)],
    ids=["in pieces", "chunked", "HTTP/1.0", "a whole URL", "two lengths"],
)  # fmt: skip
def test_a_request_on_a_socket(sent, status, closes):
    """A body of two lengths is a request of two readings (RFC 9112, 6.3): whoever sends it hears so, and is cut off."""
    llm, app = serve()
    heard, closed = asyncio.run(over_a_socket(app, *sent))
    assert heard.startswith(f"HTTP/1.1 {status} ") and heard.count("HTTP/1.1 ") == 1 and closed == closes, heard
    assert len(llm.added) == (status == 200)


@pytest.mark.parametrize("where", ["http://host:8000", "https://host", "HTTP://key@host"])
def test_a_target_may_be_a_whole_url(where):
    """So do clients ask that take the server for a proxy (`curl -x`); RFC 9112: every server must understand it."""
    _, app = serve(keys=["key"])
    key = {"authorization": "Bearer key"}
    assert ask(app, f"{where}/v1/completions", P, headers=key).status == 200
    assert ask(app, f"{where}/health", method="GET").status == 200
    check_error(ask(app, f"{where}/v1/completions", P), 401, text="Unauthorized")
    check_error(ask(app, where, method="GET"), 404, text="GET /")
    check_error(ask(app, f"/{where}/v1/completions", P, headers=key), 404)  # a path that looks like one


def test_a_client_that_hangs_up_in_the_middle_of_its_body(monkeypatch):
    llm, app = serve()

    async def run():
        messages = [{"type": "http.request", "body": b'{"pro', "more_body": True}, {"type": "http.disconnect"}]

        async def receive():
            return messages.pop(0)

        async def send(message):
            raise AssertionError("nobody is there")

        await app({"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}, receive, send)

    asyncio.run(run())
    assert not llm.added


NO_KEYS = [None, "Bearer wrong", "Bearer ", "key-1", "Bearer key-", "Bearer key-11", "Bearer ké"]


def test_without_the_key_nothing_is_said():
    llm, app = serve(keys=["key-1", "key-2"])
    for sent, path in itertools.product(NO_KEYS, ["/v1/models", "/v1/completions", "/tokenize", "/v1/nowhere"]):
        with named(sent, path):
            headers = {"authorization": sent} if sent else {}
            heard = ask(app, path, P, headers=headers)
            check_error(heard, 401)
            assert not llm.added and heard.headers["www-authenticate"] == "Bearer", "RFC 9110: a 401 says what it wants"


def test_with_a_key_and_without_need_for_one():
    _, app = serve(keys=["key-1", "key-2"])
    for key in ("key-1", "key-2"):
        assert ask(app, "/v1/completions", P, headers={"authorization": f"Bearer {key}"}).status == 200
        assert ask(app, "/v1/completions", P, headers={"authorization": f"bearer {key}"}).status == 200, "RFC 9110"
    assert ask(app, "/health", method="GET").status == 200, "a load balancer has no key"
