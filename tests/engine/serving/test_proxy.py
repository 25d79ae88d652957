"""In front of prefill and decode servers: who is asked, who is believed, and what is left when one has gone."""

from __future__ import annotations

import common

import asyncio
import contextlib
import itertools
import json
import socket
import subprocess
import sys
import time

import httpx
import pytest

from engine import arguments
from engine.kv_transfer import links
from engine.kv_transfer.frames import read_frame
from engine.kv_transfer.params import give_up
from engine.model import llama
from engine.serving import proxy as proxy_module
from engine.serving.proxy import Proxy, add_proxy_command, build_proxy
from lab.running_server import running_server
from support import first_layers
from support.cases import named
from support.ports import free_ports
from support.tiers import and_slowly
from support.transfers import PROMPT, SEED, WIRES, counts, drain, make_request, pair


@pytest.fixture(scope="module")
def tiny_model():
    return llama.random_model(seed=SEED)


# --- The proxy -------------------------------------------------------------------------------------------------------


KEPT = {"do_remote_prefill": True, "transfer_id": "x", "remote_host": "127.0.0.1", "remote_port": 9}  # nobody is there


class Servers:
    """Stand where real servers would: what each was asked, and what it answers."""

    def __init__(self, stream=None):
        self.asked, self.requests, self.answers, self.down, self.status = [], [], [], set(), {}
        self.stream = stream or httpx.ByteStream(b"data: 1\n\n")
        self.kept = KEPT

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        if host in self.down:
            raise httpx.ConnectError("refused")
        body = json.loads(request.content) if request.content else {}
        self.asked.append((host, body)), self.requests.append(request)
        self.answers.append(self.answer(host))
        return self.answers[-1]

    def answer(self, host):
        if host in self.status:
            no = httpx.ByteStream(json.dumps({"error": {"message": f"{host} says no"}}).encode())
            return httpx.Response(self.status[host], stream=no, headers={"content-type": "application/json"})
        if host.startswith("p"):
            return httpx.Response(200, json={"kv_transfer_params": self.kept | {"from": host}})
        return httpx.Response(200, stream=self.stream, headers={"content-type": "text/event-stream"})


def proxy_before(servers, prefill=("p0",), decode=("d0", "d1")):
    client = httpx.AsyncClient(transport=httpx.MockTransport(servers))
    return build_proxy(*([f"http://{name}" for name in names] for names in (prefill, decode)), client)


def through_proxy(servers, body, *names, path="/v1/completions", **options):
    async def go():
        transport = httpx.ASGITransport(proxy_before(servers, *names))
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as user:
            if body is None:
                return await user.get(path, **options)
            content = body if isinstance(body, bytes) else json.dumps(body)
            return await user.post(path, content=content, **options)

    return asyncio.run(go())


BODY = {"prompt": "Hi", "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}


def test_the_proxy_prefills_first():
    servers = Servers()
    answer = through_proxy(servers, BODY)
    assert answer.status_code == 200 and answer.text == "data: 1\n\n"
    assert answer.headers["content-type"].startswith("text/event-stream")
    (prefill, asked), (decode, wanted) = servers.asked
    params = asked.pop("kv_transfer_params")
    assert prefill == "p0" and asked == {"prompt": "Hi", "max_tokens": 1, "min_tokens": 0, "stream": False}
    assert params["do_remote_decode"] and params["transfer_id"]
    assert decode in ("d0", "d1") and wanted == BODY | {"kv_transfer_params": KEPT | {"from": "p0"}}


def test_the_proxy_survives_a_prefill_server():
    servers = Servers()
    servers.down = {"p0"}
    assert through_proxy(servers, BODY, ("p0", "p1")).status_code == 200
    assert servers.asked[-1][1]["kv_transfer_params"]["from"] == "p1"
    servers.down = {"p0", "p1"}
    assert through_proxy(servers, BODY, ("p0", "p1")).status_code == 200
    assert servers.asked[-1][1] == BODY, "the decode server computes the prompt itself"
    servers.down, servers.status = set(), {"p0": 500}
    assert through_proxy(servers, BODY).status_code == 200 and servers.asked[-1][1] == BODY


def test_the_proxy_survives_a_decode_server():
    servers = Servers()
    servers.down = {"d1"}
    for _ in range(2):
        assert through_proxy(servers, BODY).status_code == 200
    servers.down = {"d0", "d1"}
    answer = through_proxy(servers, BODY)
    assert answer.status_code == 503 and "no decode server" in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "ServiceUnavailableError"


def test_the_proxy_tries_another_decode_server_that_fails_and_takes_turns():
    servers = Servers()
    servers.status = {"d1": 500}
    assert through_proxy(servers, BODY).status_code == 200
    assert [host for host, _ in servers.asked] == ["p0", "d1", "p0", "d0"], "another attempt has another transfer"
    first, _, second, _ = [body.get("kv_transfer_params", {}).get("transfer_id") for _, body in servers.asked]
    assert first != second
    assert all(answer.is_closed for answer in servers.answers), "nobody reads what the first one says"
    servers.status = {"d0": 503, "d1": 500}
    answer = through_proxy(servers, BODY)
    assert answer.status_code == 503 and "d0 says no" in answer.text, "if all fail, the last one's words"
    servers.status = {"d1": 404}
    assert through_proxy(servers, BODY).status_code == 404 and servers.asked[-1][0] == "d1"


def test_the_proxy_limits_the_prefill_in_both_spellings_and_passes_the_key_on():
    servers = Servers()

    async def go():
        transport = httpx.MockTransport(servers)
        names = [[f"http://{kind}{i}" for i in range(2)] for kind in "pd"]
        proxy = Proxy(*names, httpx.AsyncClient(transport=transport))
        for _ in range(2):
            answer = await proxy.handle("/v1/completions", {"max_completion_tokens": 9}, {"authorization": "k"})
            await answer.aclose()

    asyncio.run(go())
    (_, asked), (_, wanted), *_ = servers.asked
    assert (asked["max_completion_tokens"], wanted["max_completion_tokens"]) == (1, 9)
    assert [host for host, _ in servers.asked] == ["p1", "d1", "p0", "d0"]
    assert [request.headers.get("authorization") for request in servers.requests] == ["k"] * 4


def test_the_proxy_passes_refusals_on():
    servers = Servers()
    servers.status = {"p0": 400}
    answer = through_proxy(servers, BODY)
    assert answer.status_code == 400 and "p0 says no" in answer.text and len(servers.asked) == 1
    for wrong in (b"{", b"[]"):
        answer = through_proxy(servers, wrong)
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "BadRequestError"
    servers = Servers()
    assert through_proxy(servers, BODY | {"n": 2}).status_code == 200
    assert through_proxy(servers, BODY | {"prompt": ["a", "b"]}).status_code == 200
    assert through_proxy(servers, BODY | {"prompt": [[1, 2], [3]]}).status_code == 200
    assert [host[0] for host, _ in servers.asked] == ["d"] * 3, "several answers or prompts: not split"
    servers.asked.clear()
    for scored in ({"prompt_logprobs": 0}, {"echo": True, "logprobs": 0}):
        assert through_proxy(servers, BODY | scored).status_code == 200
    assert [host[0] for host, _ in servers.asked] == ["d"] * 2, "a prompt is scored where it is computed"
    assert through_proxy(servers, BODY | {"echo": True}).status_code == 200
    assert servers.asked[2][0][0] == "p"
    for one in ({"n": 1}, {"prompt": [1, 2, 3]}):
        servers.asked.clear()
        assert through_proxy(servers, BODY | one).status_code == 200
        assert [host[0] for host, _ in servers.asked] == ["p", "d"], "one prompt, given as token ids"


STRANGE = {"do_remote_prefill": True, "transfer_id": "x", "remote_host": "10.0.0.5", "remote_port": 22}


@pytest.mark.parametrize(("change", "down", "asked"), [
    ({}, (), ["p0", "d1"]), ({}, ("p0",), ["d1"]), ({"prompt": ["Hi"]}, (), ["d1"]),
    ({"echo": True, "logprobs": 1}, (), ["d1"]),
])  # fmt: skip
def test_no_client_says_where_keys_and_values_are(change, down, asked):
    """Neither beside the proxy's own word, nor where the proxy has nothing to say."""
    servers = Servers()
    servers.down = {*down}
    assert through_proxy(servers, BODY | change | {"kv_transfer_params": STRANGE}).status_code == 200
    assert [host for host, _ in servers.asked] == asked
    assert not any("10.0.0.5" in json.dumps(body) for _, body in servers.asked)
    assert ("kv_transfer_params" in servers.asked[-1][1]) == (len(asked) == 2)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("status", "down"), [({"d0": 400}, ()), ({"d0": 500}, ()), ({}, ("d0",))], ids=str)
def test_a_prompt_that_no_decode_server_comes_for_is_given_up(wire, status, down, tiny_model):
    """Its prefill server need not wait for the end of the lease."""
    with pair(tiny_model, wire) as (prefill, _):
        prefill.add_request(make_request("a", PROMPT, 1, do_remote_decode=True, transfer_id="x"))
        (output,) = prefill.step()
        assert prefill.scheduler.held
        servers = Servers()
        servers.kept, servers.status, servers.down = output.kv_transfer_params, status, {*down}
        assert through_proxy(servers, BODY, ["p0"], ["d0"]).status_code == (status or {"d0": 503})["d0"]
        drain(prefill, seconds=10)
        assert not prefill.scheduler.held and not counts(prefill, "producer")["expired"]


def test_a_prompt_is_given_up_on_every_rank():
    """And who cannot be reached has its lease."""

    async def go():
        heard, first = [], free_ports(3)

        def rank(sock, _):
            with sock, sock.makefile("rb") as stream:
                sock.sendall(b"HELLO")
                heard.append(read_frame(stream.read)[0])

        key = links.handshake.secret()
        for port in (first, first + 2):
            links.handshake.Reception(socket.create_server(("127.0.0.1", port)), key, rank)
        params = {"transfer_id": "x", "remote_host": "127.0.0.1", "remote_port": first, "tp_size": 3}
        await asyncio.wait_for(give_up(params), 20)
        assert heard == [{"kind": "CANCEL", "transfer": "x"}] * 2

    asyncio.run(go())


@pytest.mark.parametrize("key", [None, "Bearer k"])
def test_the_proxy_asks_on_the_same_path_with_the_same_key(key):
    servers, headers = Servers(), {"authorization": key} if key else {}
    assert through_proxy(servers, {"messages": []}, path="/v1/chat/completions", headers=headers).status_code == 200
    assert through_proxy(servers, None, path="/v1/models", headers=headers).status_code == 200
    assert [(request.url.host, request.url.path) for request in servers.requests] == [
        ("p0", "/v1/chat/completions"), ("d1", "/v1/chat/completions"), ("d0", "/v1/models")]  # fmt: skip
    assert all(request.headers.get("authorization") == key for request in servers.requests)


def test_the_proxy_is_well_while_a_decode_server_is_and_names_who_is_gone():
    """Without a prefill server, the others compute prompts themselves; without a decode server nobody answers."""
    servers, url = Servers(), {name: f"http://{name}" for name in ("d0", "d1", "p0")}

    def health(down, status):
        servers.down, servers.status = {*down}, status
        answer = through_proxy(servers, None, path="/health")
        return answer.status_code, answer.text

    assert health((), {}) == (200, '{"gone":[]}')
    assert health(["d1"], {"p0": 500}) == (200, f'{{"gone":["{url["d1"]}","{url["p0"]}"]}}')
    for down, status in ((["d0", "d1"], {}), (["d0"], {"d1": 503}), ((), {"d0": 500, "d1": 503})):
        code, text = health(down, status)
        assert code == 503 and url["d0"] in text and url["d1"] in text and url["p0"] not in text
    code, text = health(["d0", "d1", "p0"], {})
    assert code == 503 and all(name in text for name in url.values())
    assert through_proxy(servers, None, path="/v1/models").status_code == 503
    servers.down = {"d0", "d1"}
    assert through_proxy(servers, None, path="/v1/models").status_code == 503, "none that could be asked for an answer"


def test_a_server_that_has_stopped_does_not_hold_the_proxys_health(monkeypatch):
    monkeypatch.setattr(proxy_module, "PATIENCE", 0.05)

    class Stopped(Servers):
        async def __call__(self, request):
            return await super().__call__(request) if request.url.host == "d1" else await asyncio.sleep(60)

    start = time.monotonic()
    answer = through_proxy(Stopped(), None, path="/health")
    assert answer.status_code == 200 and answer.json() == {"gone": ["http://d0", "http://p0"]}
    assert through_proxy(Stopped(), None, path="/v1/models").status_code == 200
    assert through_proxy(Stopped(), None, ["p0"], ["d0"], path="/health").status_code == 503
    assert time.monotonic() - start < 5


UNSENDABLE = [
    (b"{", "not JSON: Expecting"), (b"", "not JSON: Expecting"), (b"[]", "must be a JSON object"),
    (b"7", "must be a JSON object"), (b"null", "must be a JSON object"), (b'{"prompt": "\\ud83d"}', "surrogate pair"),
    (b'{"\\ud83d": 1}', "surrogate pair"), (b'{"prompt": "\xed\xa0\xbd"}', "surrogate pair"),
    (b'{"prompt": "\xff"}', "UTF-8"), (b'{"temperature": NaN}', "Out of range"),
    (b'{"x": [-Infinity]}', "Out of range"), (b'{"temperature": 1e999}', "Out of range"),
    (b'{"x": ' + b"9" * 5000 + b"}", "not JSON: Exceeds"), (b"[" * 100_000, "nested too deeply"),
    (b'{"x":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
]  # fmt: skip


def test_what_no_server_could_be_sent_is_refused_in_one_line():
    for path, (body, told) in itertools.product(["/v1/completions", "/v1/chat/completions"], UNSENDABLE):
        with named(path, body, told):
            servers = Servers()
            answer = through_proxy(servers, body, path=path)
            error = answer.json()["error"]
            assert answer.status_code == 400 and told in error["message"] and "\n" not in error["message"]
            assert error["type"] == "BadRequestError" and not servers.asked


def test_at_no_depth_of_a_body_the_proxy_breaks():
    """Whether it is passed on or refused: where it may be read, it may be written as well."""
    bodies = [b'{"x": ' + b"[" * depth + b"]" * depth + b"}" for depth in (1, 300, *range(700, 1000, 4))]
    found = [through_proxy(Servers(), body).status_code for body in bodies]
    assert found == sorted(found) and {200} <= {*found} <= {200, 400}


def test_a_body_is_no_longer_than_behind_the_proxy_and_a_key_may_be_of_any_bytes():
    servers = Servers()
    answer = through_proxy(servers, b'{"prompt": "' + b"x" * (5 << 20) + b'"}')
    assert answer.status_code == 413 and not servers.asked
    assert through_proxy(servers, BODY, headers={"authorization": "Bearer \xe9".encode("latin-1")}).status_code == 200
    assert {dict(request.headers.raw)[b"authorization"] for request in servers.requests} == {b"Bearer \xe9"}


@pytest.mark.parametrize("kept", ["x", [1], 7, {"transfer_id": 5}, {"do_remote_prefill": True}])
def test_a_prefill_server_that_answers_nonsense_is_none(kept):

    class Strange(Servers):
        def answer(self, host):
            return httpx.Response(200, json={"kv_transfer_params": kept}) if host == "p1" else super().answer(host)

    servers = Strange()
    assert through_proxy(servers, BODY, ["p0", "p1"]).status_code == 200
    assert [host for host, _ in servers.asked] == ["p1", "p0", "d1"]


@pytest.mark.parametrize("said", [b"<html>", b"[]", b"7", b""])
def test_a_prefill_server_that_is_something_else_is_none(said):

    class Strange(Servers):
        def answer(self, host):
            return httpx.Response(200, content=said) if host == "p0" else super().answer(host)

    servers = Strange()
    assert through_proxy(servers, BODY).status_code == 200
    assert [host for host, _ in servers.asked] == ["p0", "d1"] and "kv_transfer_params" not in servers.asked[1][1]


class Talking(httpx.AsyncByteStream):
    """What a decode server says: one token, and then nothing, or nothing any more."""

    def __init__(self, end):
        self.end, self.said = end, asyncio.Event()

    async def __aiter__(self):
        yield b"data: 1\n\n"
        self.said.set()
        await self.end()


def test_a_stream_that_breaks_says_so():
    """Its status line has gone out long ago."""

    async def end():
        raise httpx.ReadError("reset")

    answer = through_proxy(Servers(Talking(end)), BODY)
    first, last = answer.text.strip().split("\n\n")
    told = json.loads(last.removeprefix("data: "))
    assert answer.status_code == 200 and first == "data: 1"
    assert told == {"error": {"message": "the decode server is gone: reset", "code": 502}}


def hang_up(servers, body, gone, send=None):
    """One request to the proxy; the client leaves when `gone` is set."""
    letters = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive():
        if letters:
            return letters.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def ignore(message):
        pass

    async def go():
        scope = {"type": "http", "asgi": {"spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
                 "path": "/v1/completions", "query_string": b"", "headers": [], "scheme": "http"}  # fmt: skip
        await asyncio.wait_for(proxy_before(servers)(scope, receive, send or ignore), 20)

    asyncio.run(go())


def test_a_client_that_hangs_up_ends_the_request_behind_the_proxy():
    silent = Talking(lambda: asyncio.sleep(60))
    servers = Servers(silent)
    hang_up(servers, BODY, silent.said)
    assert [answer.is_closed for answer in servers.answers] == [True, True]


def test_an_answer_that_never_began_is_closed():
    servers, started = Servers(Talking(lambda: asyncio.sleep(60))), asyncio.Event()

    async def send(message):
        started.set()  # the client leaves before it has heard the status
        await asyncio.sleep(60)

    hang_up(servers, BODY, started, send)
    assert [answer.is_closed for answer in servers.answers] == [True, True]


@pytest.mark.parametrize("where", ["p0", "d1"])
def test_nobody_computes_for_a_client_that_has_left(where, monkeypatch):
    """Neither its prompt nor an answer that is not streamed: nothing is heard of that before its last token. And the
    prompt that was computed is given up."""
    computing, given_up = asyncio.Event(), []

    class Computing(Servers):
        async def __call__(self, request):
            if request.url.host != where:
                return await super().__call__(request)
            computing.set()
            try:
                return await asyncio.sleep(60)
            except asyncio.CancelledError:
                given_up.append("request")
                raise

    async def give_up(params):
        await asyncio.sleep(0)
        given_up.append(params["transfer_id"])

    monkeypatch.setattr(proxy_module, "give_up", give_up)
    servers = Computing()
    hang_up(servers, {"prompt": "Hi", "max_tokens": 9}, computing)
    assert given_up == (["request"] if where == "p0" else ["request", "x"])
    assert [host for host, _ in servers.asked] == ([] if where == "p0" else ["p0"])


def test_the_proxy_waits_for_long_answers_and_not_for_connections(monkeypatch):
    """And it lets as many streams through as there are: a pool of 100 connections would be a queue."""
    made = []
    monkeypatch.setattr(httpx, "AsyncClient", lambda **options: made.append(options))
    build_proxy(["http://p0"], ["http://d0"])
    (options,) = made
    assert options["timeout"].read >= 600 and options["timeout"].connect <= 10
    assert options["limits"].max_connections is None


def test_the_proxy_wants_addresses(monkeypatch, capsys):
    parser = arguments.Parser()
    add_proxy_command(parser.add_subparsers(dest="command"))
    for words, said in (
        ("proxy --prefill http://d0 p0 --decode http://d0", "argument --prefill: 'p0' is not http://HOST:PORT"),
        ("proxy --prefill http://p0 --decode http://d0:99999", "argument --decode: 'http://d0:99999' is not"),
        ("worker", "argument command: invalid choice: 'worker'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args(words.split())
        assert said in capsys.readouterr().err
    made = []
    monkeypatch.setattr(proxy_module, "build_proxy", lambda *urls: made.append(urls))
    monkeypatch.setattr(proxy_module, "bind", lambda *address: (_ for _ in ()).throw(common.InputError("--port")))
    with pytest.raises(common.InputError, match="--port"):
        args = parser.parse_args(["proxy", "--prefill", "http://p0/", "--decode", "http://d0", "https://d1/"])
        args.run(args)
    assert made == [(["http://p0"], ["http://d0", "https://d1"])]


@pytest.mark.parametrize(("prefill_tp", "decode_tp", "engines", "wire"), and_slowly(
    [], [(1, 1, 1, "TCPConnector")],
    [(3, 1, 1, "SharedMemoryConnector"), (1, 1, 2, "TCPConnector"), (1, 3, 1, "TCPConnector")],
))  # fmt: skip
def test_two_servers_a_proxy_and_the_openai_client(prefill_tp, decode_tp, engines, wire, tmp_path):
    """The same answers as one server's, streamed and whole; also after the prefill server was killed."""
    import openai

    config = {"kv_connector": wire, "kv_port": free_ports(prefill_tp * engines), "kv_load_failure_policy": "recompute"}
    folder = str(first_layers.folder_of(first_layers.LAYERS, tmp_path))
    small = ("--model", folder, "--served-model-name", "smol", "--data-parallel-size", str(engines),
             "--kv-cache-gib", "0.05", "--max-model-len", "512", "--kv-transfer-config")  # fmt: skip
    flags = [(*small, json.dumps(config | {"kv_role": role}), "--block-size", size, "--tensor-parallel-size", str(tp))
             for role, size, tp in (("kv_producer", "16", prefill_tp), ("kv_consumer", "32", decode_tp))]  # fmt: skip
    messages = [{"role": "user", "content": "Name three animals that live in the sea, and say why you chose them."}]
    want = {"model": "smol", "messages": messages, "temperature": 0, "max_tokens": 24, "logprobs": True}

    def scored(answer):
        """Few layers write much the same, whatever they read; how probable it is tells what they have read."""
        return [(token.token, token.logprob) for token in answer.choices[0].logprobs.content]

    with contextlib.ExitStack() as stack:
        (first, process), (second, _) = [stack.enter_context(running_server(*each)) for each in flags]
        told = ["--port", "0", "--prefill", first, "--decode", second]
        command = [sys.executable, common.HERE / "__main__.py", "proxy", *told]
        proxy = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        stack.callback(lambda: (proxy.terminate(), proxy.wait(20), proxy.stdout.close()))
        front = openai.OpenAI(base_url=proxy.stdout.readline().split()[-1] + "/v1", api_key="-", max_retries=0)
        alone = openai.OpenAI(base_url=second + "/v1", api_key="-", max_retries=0)

        answer = front.chat.completions.create(**want)
        n = answer.usage.prompt_tokens
        assert answer.usage.prompt_tokens_details.cached_tokens == n - 1, "all but the last position came over the wire"
        expected = alone.chat.completions.create(**want, extra_body={"cache_salt": "nothing shared"})
        assert expected.usage.prompt_tokens_details.cached_tokens == 0
        said = expected.choices[0].message.content
        scores = [(token, pytest.approx(score, abs=1e-3)) for token, score in scored(expected)]
        assert answer.choices[0].message.content == said and scored(answer) == scores
        pieces = [chunk.choices[0].delta.content or "" for chunk in front.chat.completions.create(**want, stream=True)]
        assert "".join(pieces) == said and len(pieces) > 10
        with pytest.raises(openai.BadRequestError, match="temperature"):
            front.chat.completions.create(**want | {"temperature": 9})

        process.kill()
        process.wait()
        again = front.chat.completions.create(**want, extra_body={"cache_salt": "once more"})
        assert again.choices[0].message.content == said and scored(again) == scores
