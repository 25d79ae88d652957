"""curl on our server, as guides have it: an answer, a stream, files as bodies, an old protocol, a probe, a stranger."""

from __future__ import annotations

import gzip
import json

import pytest

from support import clients
from support.scripted_server import scripted_server

ASKED = {"model": "smol", "messages": [{"role": "user", "content": "Hello"}], "favourite_colour": "blue"}


@pytest.mark.slow
def test_an_answer_a_stream_files_an_old_protocol_a_probe_and_a_stranger(tmp_path):
    curl = clients.program_of("curl")
    with scripted_server(["Piece by piece."], keys=["secret"]) as (url, _):

        def ask(path, *arguments, key="secret"):
            about = ["-H", f"Authorization: Bearer {key}", "-H", "Content-Type: application/json"]
            return clients.run([curl, "-sS", "--noproxy", "*", *about, *arguments, f"{url}{path}"], tmp_path).stdout

        chat, file, zipped = "/v1/chat/completions", tmp_path / "body.json", tmp_path / "body.json.gz"
        whole = json.loads(ask(chat, "--compressed", "-d", json.dumps(ASKED)))
        stream = ask(chat, "-N", "-d", json.dumps({**ASKED, "stream": True}))
        file.write_text(json.dumps({**ASKED, "messages": [{"role": "user", "content": "word " * 200_000}]}))
        large = json.loads(ask(chat, "-H", "Expect: 100-continue", "-d", f"@{file}"))
        zipped.write_bytes(gzip.compress(json.dumps(ASKED).encode()))
        told = ask(chat, "-H", "Content-Encoding: gzip", "--data-binary", f"@{zipped}", "-w", "\n%{http_code}")
        old = json.loads(ask(chat, "--http1.0", "-d", json.dumps(ASKED)))
        probe = ask("/health", "--head", "-o", "/dev/null", "-w", "%{http_code}")
        stranger = ask("/v1/models", "-o", "/dev/null", "-w", "%{http_code}", key="other")
    texts = [each["choices"][0]["message"]["content"] for each in (whole, large, old)]
    assert texts == ["Piece by piece."] * 3
    *events, done, _ = stream.split("\n\n")
    pieces = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"].get("content") or "" for event in events]
    assert done == "data: [DONE]" and "".join(pieces) == "Piece by piece." and len(pieces) > 2
    error, status = told.rsplit("\n", 1)
    assert status == "415" and "Content-Encoding gzip" in json.loads(error)["error"]["message"]
    assert (probe, stranger) == ("200", "401")
