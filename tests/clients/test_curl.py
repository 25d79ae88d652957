"""curl on our server, as every guide has it: an answer, a stream, a large file, an old protocol, a stranger."""

from __future__ import annotations

import json

import pytest

from support import clients
from support.scripted_server import scripted_server

ASKED = {"model": "smol", "messages": [{"role": "user", "content": "Hello"}], "favourite_colour": "blue"}


@pytest.mark.slow
def test_an_answer_a_stream_a_file_an_old_protocol_and_a_stranger(tmp_path):
    curl = clients.program_of("curl")
    with scripted_server(["Piece by piece."], keys=["secret"]) as (url, _):

        def ask(path, *arguments, key="secret"):
            about = ["-H", f"Authorization: Bearer {key}", "-H", "Content-Type: application/json"]
            return clients.run([curl, "-sS", "--noproxy", "*", *about, *arguments, f"{url}{path}"], tmp_path).stdout

        chat, file = "/v1/chat/completions", tmp_path / "body.json"
        whole = json.loads(ask(chat, "--compressed", "-d", json.dumps(ASKED)))
        stream = ask(chat, "-N", "-d", json.dumps({**ASKED, "stream": True}))
        file.write_text(json.dumps({**ASKED, "messages": [{"role": "user", "content": "word " * 200_000}]}))
        large = json.loads(ask(chat, "-H", "Expect: 100-continue", "-d", f"@{file}"))
        old = json.loads(ask(chat, "--http1.0", "-d", json.dumps(ASKED)))
        stranger = ask("/v1/models", "-o", "/dev/null", "-w", "%{http_code}", key="other")
    texts = [each["choices"][0]["message"]["content"] for each in (whole, large, old)]
    assert texts == ["Piece by piece."] * 3
    *events, done, _ = stream.split("\n\n")
    pieces = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"].get("content") or "" for event in events]
    assert done == "data: [DONE]" and "".join(pieces) == "Piece by piece." and len(pieces) > 2
    assert stranger == "401"
