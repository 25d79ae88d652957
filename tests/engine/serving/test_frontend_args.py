"""What a server is started with besides its engine, and what the application makes of it."""

from __future__ import annotations

import common

import gzip
import json
import subprocess

import pytest

from engine.serving.frontend_args import FrontendArgs
from engine.serving.openai.serving import OpenAIServing
from support.scripted_api import P, ask, check_error, serve


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(certificate, key) of 127.0.0.1, for an hour or so."""
    folder = tmp_path_factory.mktemp("tls")
    made = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1",
               "-addext", "subjectAltName=IP:127.0.0.1", "-out", made[0], "-keyout", made[1]]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl here to make a certificate")
    return tuple(map(str, made))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"allowed_origins": "*"}, "--allowed-origins '\\*': must be a JSON list"),
     ({"max_body_bytes": 5}, "max_body_bytes"),
     ({"allowed_methods": [1]}, "--allowed-methods"), ({"ssl_keyfile": "k"}, "--ssl-keyfile: needs --ssl-certfile"),
     ({"ssl_ca_certs": "k"}, "--ssl-ca-certs: needs"), ({"ssl_ciphers": "k"}, "--ssl-ciphers: needs"),
     ({"ssl_certfile": "/no/such"}, "--ssl-certfile /no/such: No such file"),
     ({"ssl_certfile": "/no/such", "ssl_keyfile": "/k"}, "/no/such with --ssl-keyfile /k: No such file")],
)  # fmt: skip
def test_what_is_refused(wrong, words):
    with pytest.raises(common.InputError, match=words):
        FrontendArgs(**wrong)


def test_a_certificate_is_read_before_anything_slow(certificate, tmp_path):
    cert, key = certificate
    args = FrontendArgs(ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=cert, ssl_cert_reqs=2)
    assert args.scheme == "https" and args.tls()["ssl_cert_reqs"] == 2 and FrontendArgs().tls() == {}
    (tmp_path / "text").write_text("none")
    for wrong, words in (({"ssl_keyfile": cert}, "--ssl-certfile .* with --ssl-keyfile"), ({}, "--ssl-certfile"),
                         ({"ssl_keyfile": key, "ssl_ca_certs": str(tmp_path / "text")}, "--ssl-ca-certs"),
                         ({"ssl_keyfile": key, "ssl_ciphers": "none"}, "--ssl-ciphers none")):  # fmt: skip
        with pytest.raises(common.InputError, match=words):
            FrontendArgs(ssl_certfile=cert, **wrong)


def started(monkeypatch, keys=(), **frontend):
    monkeypatch.setattr(OpenAIServing, "frontend", FrontendArgs(**frontend))
    return serve(keys=keys)


@pytest.mark.parametrize("given", ["/api/", "api", "/api"])
def test_a_path_in_front_needs_the_key_as_well(monkeypatch, given):
    """A proxy cuts it off, or leaves it on: FastAPI finds the route either way."""
    _, app = started(monkeypatch, ["key"], root_path=given)
    for path in ("/v1/models", "/api/v1/models"):
        check_error(ask(app, path, method="GET"), 401)
        assert ask(app, path, method="GET", headers={"authorization": "Bearer key"}).status == 200
    assert ask(app, "/openapi.json", method="GET").json["servers"] == [{"url": "/api"}]
    assert ask(app, "/api/health", method="GET").status == 200


def test_no_path_in_front():
    assert FrontendArgs(root_path="/").root_path == FrontendArgs().root_path == ""


def test_other_sites_pages(monkeypatch):
    asked = {"origin": "https://a", "access-control-request-method": "POST"}
    _, app = started(monkeypatch, allowed_origins=["https://a"], allowed_methods=["POST"], allow_credentials=True)
    heard = ask(app, "/v1/completions", method="OPTIONS", headers=asked)
    assert heard.headers["access-control-allow-origin"] == "https://a"
    assert heard.headers["access-control-allow-credentials"] == "true"
    assert ask(app, "/v1/completions", method="OPTIONS", headers=asked | {"origin": "https://b"}).status == 400
    refused = asked | {"access-control-request-method": "DELETE"}
    assert ask(app, "/v1/completions", method="OPTIONS", headers=refused).status == 400
    _, app = started(monkeypatch, allowed_origins=[])
    heard = ask(app, "/v1/completions", P, headers={"origin": "https://a"})
    assert heard.status == 200 and "access-control-allow-origin" not in heard.headers, "as vLLM's default"


def test_no_page_about_the_api(monkeypatch):
    _, app = started(monkeypatch, disable_fastapi_docs=True)
    check_error(ask(app, "/openapi.json", method="GET"), 404)


def test_a_hundred_prompts_of_eight_thousand_tokens(monkeypatch):
    body = json.dumps({"prompt": [[120] * 8000] * 100, "max_tokens": 1}).encode()
    prefix = json.dumps({"prompt": [[99999] * 8000] * 100}).encode()
    check_error(
        ask(serve()[1], "/v1/completions", prefix), 413, None, "4,194,304 bytes (the server's --max-body-bytes)"
    )
    _, app = started(monkeypatch, max_body_bytes=64 << 20)
    heard = ask(app, "/v1/completions", prefix)
    check_error(heard, 400, "n", "100 prompts times 1 is more")  # it was read: this engine holds four
    assert len(body) < 4 << 20 < len(prefix)


def test_a_compressed_body_is_named():
    _, app = serve()
    for coding in ("gzip", "br", "GZIP"):
        headers = {"content-encoding": coding}
        heard = ask(app, "/v1/completions", gzip.compress(json.dumps(P).encode()), headers=headers)
        check_error(heard, 415, None, f"Content-Encoding {coding}: send the body as it is")
        assert heard.headers["accept-encoding"] == "identity"
    assert ask(app, "/v1/completions", P, headers={"content-encoding": "identity"}).status == 200


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_a_load_balancer_asks_for_the_head(path):
    _, app = serve(keys=["key"])
    assert ask(app, path, method="HEAD").status == 200 == ask(app, path, method="GET").status
