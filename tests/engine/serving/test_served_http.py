"""The server as it is started, over TLS and over a socket in the file system, from a file of flags."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess

import httpx
import pytest

from engine.model import folders
from lab.running_server import running_server

FLAGS = ["--max-model-len", "64", "--kv-cache-gib", "0.01", "--load-format", "dummy", "--device", "cpu"]


def started(*flags):
    """(what it said, its process) while it runs."""
    lines = []
    return lines, running_server(*FLAGS, *flags, echo=lines.append)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no Unix domain sockets here")
def test_a_socket_in_the_file_system_and_a_file_of_flags(tmp_path):
    """Fast twins: test_sockets.py, test_command_line.py."""
    path = tmp_path / "s"
    (tmp_path / "c.yaml").write_text(f"uds: {path}\nserved_model_name: [fast]\napi-key: [k1, k2]\n"
                                     "use-tqdm-on-load: true\n"
                                     "kv-offloading-size: 0.01\nspec-method: ngram\nspec-tokens: 2\n")  # fmt: skip
    lines, server = started(str(folders.model_folder(None)), "--config", str(tmp_path / "c.yaml"))
    with server as (url, process):
        assert url == f"unix:{path}" and any(line.startswith("--use-tqdm-on-load: without effect") for line in lines)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x", timeout=60) as client:
            assert client.get("/v1/models").status_code == 401 and client.head("/health").status_code == 200
            body = {"model": "fast", "prompt": "Hi", "max_tokens": 3, "ignore_eos": True}
            for key in ("k1", "k2"):
                answer = client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
                assert answer.json()["usage"]["completion_tokens"] == 3
        process.terminate()
        assert process.wait(30) == 0
    assert not path.exists(), "nothing is left behind"
    shm = "/dev/shm"
    if os.path.isdir(shm):
        pids = [line.rpartition("pid ")[2] for line in lines if " pid " in line]
        assert len(pids) == 1 and not [name for name in os.listdir(shm) if f"kvstore-of-{pids[0]}-" in name]


@pytest.mark.slow
def test_https_with_a_clients_certificate(tmp_path):
    """Fast twin: test_frontend_args.py. Whoever has no certificate is not heard."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1",
               "-addext", "subjectAltName=IP:127.0.0.1", "-out", cert, "-keyout", key]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl here to make a certificate")
    tls = ["--ssl-certfile", str(cert), "--ssl-keyfile", str(key), "--ssl-ca-certs", str(cert), "--ssl-cert-reqs", "2"]
    _, server = started(*tls, "--root-path", "/api", "--max-model-len", "auto")
    with server as (url, _):
        assert url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=str(cert))
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health", verify=trusting)
        trusting.load_cert_chain(cert, key)
        models = httpx.get(f"{url}/api/v1/models", verify=trusting).json()["data"]
        fits = int(0.01 * 2**30) // (2 * 30 * 16 * 3 * 64 * 4) * 16
        assert models[0]["max_model_len"] == fits < 8192, "as many tokens as the cache holds"
