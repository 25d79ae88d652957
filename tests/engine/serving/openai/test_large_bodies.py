"""However large and wrong a request is, it stops no stream."""

from __future__ import annotations

import common

import asyncio
import contextlib
import gc
import json
import selectors
import threading
import time

import pytest

from engine import registry
from engine.serving.openai import large_bodies, responses, tools
from engine.serving.openai.limits import MAX_BODY_BYTES
from engine.serving.openai.serving import OpenAIServing
from support.scripted_api import (
    CHAT,
    COMPLETION,
    RESPONSE,
    Calling,
    M,
    P,
    ScriptedLLM,
    ask,
    call,
    check_error,
    serve,
    user,
)
from support.tiers import and_slowly

heartbeat = registry.lesson("06e_async_engine").heartbeat
SIZE = 4_100_000  # bytes: just below what the gate lets in


def filled(make, one):
    """The bytes of a body with so many of `one` (JSON) that it is full."""
    before, after = json.dumps(make("HERE"), separators=(",", ":")).encode().split(b'"HERE"')
    return before + b"[" + b",".join([one] * (SIZE // (len(one) + 1))) + b"]" + after


def named(make, one):
    """A body with an object of many names."""
    before, after = json.dumps(make("HERE"), separators=(",", ":")).encode().split(b'"HERE"')
    pairs = b",".join(b'"%x":%s' % (i, one) for i in range(SIZE // (len(one) + 9)))
    return before + b"{" + pairs + b"}" + after


TURN = user("a" * 900)
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
FUNCTIONS = [{"type": "function", "name": f"f{i}", "description": "x" * 900} for i in range(4096)]
LARGE = {
    "wrong messages": (CHAT, lambda: filled(lambda x: {"messages": x}, b"1")),
    "wrong parts": (CHAT, lambda: filled(lambda x: {"messages": [user(x)]}, b"100")),
    "parts": (CHAT, lambda: json.dumps(
        {"messages": [user([{"type": "text", "text": "a" * 60}] * 4096)] * 10}).encode()),
    "messages": (CHAT, lambda: json.dumps({"messages": [TURN] * 4096}).encode()),
    "wrong tools": (CHAT, lambda: filled(lambda x: M | {"tools": x}, b'"tool"')),
    "tools": (CHAT, lambda: json.dumps(M | {"tool_choice": "none", "tools": [
        {"type": "function", "function": function} for function in FUNCTIONS]}).encode()),
    "a schema": (CHAT, lambda: named(lambda x: M | {"tool_choice": "required", "tools": [
        {"function": {"name": "f", "parameters": {"properties": x}}}]}, b"{}" + b" " * 40)),
    "documents": (CHAT, lambda: named(lambda x: M | {"documents": [x]}, b"1" + b" " * 24)),
    "wrong stop": (COMPLETION, lambda: filled(lambda x: P | {"stop": x}, b"100")),
    "stop": (COMPLETION, lambda: json.dumps(P | {"stop": ["x" * 64_000] * 64}).encode()),
    "bad words": (COMPLETION, lambda: json.dumps(P | {"bad_words": ["xy" * 16_000] * 128}).encode()),
    "logit_bias": (COMPLETION, lambda: named(lambda x: P | {"logit_bias": x}, b'"x"' + b" " * 24)),
    "allowed_token_ids": (COMPLETION, lambda: filled(lambda x: P | {"allowed_token_ids": x}, b"100")),
    "prompts": (COMPLETION, lambda: filled(lambda x: {"prompt": x}, b'"a"')),
    "wrong prompts": (COMPLETION, lambda: filled(lambda x: {"prompt": x}, b"1.5")),
    "names": (COMPLETION, lambda: named(lambda x: {"metadata": x} | P, b"null" + b" " * 24)),
    "arrays": (COMPLETION, lambda: filled(lambda x: P | {"metadata": {"x": x}}, b"[]")),
    "brackets": (COMPLETION, lambda: b"[" * SIZE),
    "a long name": (COMPLETION, lambda: json.dumps(P | {"x" * SIZE: 1}).encode()),
    "wrong input": (RESPONSE, lambda: filled(lambda x: {"input": x}, b"100")),
    "wrong content": (RESPONSE, lambda: filled(lambda x: {"input": [user(x)]}, b'"xx"')),
    "calls": (RESPONSE, lambda: json.dumps({"input": [CALL | {"arguments": " " * 800}] * 4096}).encode()),
    "references": (RESPONSE, lambda: filled(lambda x: {"input": x},
        b'{"type":"item_reference","id":"%s"}' % (b"x" * 900))),
    "what is repeated": (RESPONSE, lambda: json.dumps(
        {"input": "a", "tool_choice": "none", "tools": FUNCTIONS}).encode()),
    "tokens": ("/detokenize", lambda: filled(lambda x: {"tokens": x}, b'"1"')),
}  # fmt: skip


# One of each way to be large; the others are read by the same lines, and the slow tier sends them.
FAST = ("wrong messages", "tools", "a schema", "documents", "stop", "logit_bias", "prompts", "brackets", "a long name",
        "references")  # fmt: skip
SLOW = [kind for kind in LARGE if kind not in FAST]


@pytest.fixture(scope="module")
def roomy():
    """An application whose engine takes long prompts."""
    _, app = serve(ScriptedLLM(max_model_len=8192), kind=Calling)
    gc.collect()
    gc.freeze()  # as the server does
    return app


def one_call(body):
    """On the thread that parses bodies: one call into C, in which nobody else gets to run Python. -> when it began"""
    gc.disable()  # which would run in it
    start = time.perf_counter()
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(body)
    gc.enable()
    return start


async def kept_waiting(body):
    """Seconds from the beginning of one call into C until the loop has its turn again."""
    loop = asyncio.get_running_loop()
    start = await loop.run_in_executor(large_bodies.LARGE_BODIES, one_call, body)
    return time.perf_counter() - start


def loop_on_time():
    """A loop whose sleeps end when they should: epoll counts in whole milliseconds, and so would a stall begin late."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


@pytest.mark.parametrize("kind", and_slowly(FAST, [(kind,) for kind in SLOW]))
def test_a_large_request_stops_no_stream(roomy, kind):
    """However large and wrong it is, the loop is never away for longer than one call into C takes: a million numbers,
    or this body, which may be a million texts and need memory. Its own answer may be late. Somebody else's work on
    this machine may be in the way once, but hardly three times. Both times are the loop's: from when it was to have
    its turn until it has it."""
    path, body = LARGE[kind][0], LARGE[kind][1]()
    numbers = filled(lambda x: x, b"100")
    assert len(body) <= MAX_BODY_BYTES

    async def measured():
        lateness = []
        await call(roomy, path, b"{}")
        beat = asyncio.create_task(heartbeat(lateness))
        await asyncio.sleep(0.02)
        lateness.clear()
        heard = await call(roomy, path, body)
        await asyncio.sleep(0.005)
        stall = max(lateness)
        calls = [await kept_waiting(each) for each in (numbers, body)]
        beat.cancel()
        assert heard.status in (200, 400, 404), heard.text[:500]
        return stall, calls

    stalls, allowed = [], []
    while len(stalls) < 3 and (not stalls or min(stalls) > max(allowed)):
        with asyncio.Runner(loop_factory=loop_on_time) as runner:
            stall, calls = runner.run(measured())
        stalls.append(stall), allowed.extend(calls)
    assert min(stalls) <= max(allowed)


@pytest.mark.parametrize("kind", [kind for kind, (path, _) in LARGE.items() if path == CHAT or "wrong" in kind])
def test_what_a_large_request_costs_is_paid_elsewhere(roomy, kind, monkeypatch):
    """Reading, checking, preparing: none of it on the thread of the loop."""
    path, body = LARGE[kind][0], LARGE[kind][1]()
    here, threads = threading.get_ident(), []

    def noting(owner, name):
        work = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (threads.append(threading.get_ident()), work(*a, **k))[1])

    noting(large_bodies, "parse"), noting(tools, "structured_outputs")
    noting(OpenAIServing, "check_params"), noting(OpenAIServing, "render_chat")
    noting(responses, "as_chat")
    ask(roomy, path, body)
    assert threads and here not in threads
    threads.clear()
    ask(roomy, COMPLETION, P)
    assert set(threads) == {here}, "a small request needs no other thread"


def test_a_body_has_so_many_parts_and_nests_so_deep(shared):
    llm, app = shared
    for nested, status in ((126, 200), (127, 400)):  # the body and its metadata are two more
        body = b'{"prompt": "x", "metadata": {"a": ' + b"[" * nested + b"]" * nested + b"}}"
        assert ask(app, COMPLETION, body).status == status
    for many, said in ((b"[]", "arrays, objects and names"), (b"1", "elements")):
        check_error(ask(app, COMPLETION, filled(lambda x: P | {"metadata": {"x": x}}, many)), 400, None, said)
    check_error(ask(app, COMPLETION, P, headers={"x-request-id": "x" * 257}), 400, None, "X-Request-Id")
    assert ask(app, COMPLETION, P, headers={"x-request-id": "x" * 256}).json["id"] == "cmpl-" + "x" * 256
    llm.added.clear()


def test_large_bodies_wait_for_each_other_and_for_nobody_else(shared, monkeypatch):
    _, app = shared
    first, inside, most, parse = threading.Event(), [], [], large_bodies.parse

    def slow(body):
        if len(body) > 20_000:
            inside.append(body)
            most.append(len(inside))
            first.wait(10)
            inside.pop()
        return parse(body)

    monkeypatch.setattr(large_bodies, "parse", slow)

    async def run():
        large = P | {"user": "x" * 30_000}
        waiting = [asyncio.create_task(call(app, COMPLETION, large)) for _ in range(3)]
        while not inside:
            await asyncio.sleep(0.001)
        small = await asyncio.wait_for(call(app, COMPLETION, P), 5)
        first.set()
        return [small, *(await asyncio.gather(*waiting))]

    assert [heard.status for heard in asyncio.run(run())] == [200] * 4 and most == [1, 1, 1]
    shared[0].added.clear()


def test_a_long_text_is_tokenized_and_written_while_others_run(real_model):
    """`encode` of the tokenizers package holds the interpreter lock from beginning to end, `encode_batch` does not."""
    tokenizer, text = real_model[1], "The capital of France is Paris. " * 10_000
    ids = tokenizer.encode(text)
    assert ids == tokenizer.backend.encode(text).ids and tokenizer.decode(ids) == text
    short = tokenizer.encode(text, True, 10)
    assert short == ids[-10:]
    for work in (lambda: tokenizer.encode(text), lambda: tokenizer.decode(ids * 8)):

        async def run(work=work):
            lateness = []
            beat = asyncio.create_task(heartbeat(lateness))
            await asyncio.sleep(0.02)
            lateness.clear()
            start = time.perf_counter()
            await asyncio.to_thread(work)
            taken = time.perf_counter() - start
            await asyncio.sleep(0.005)
            beat.cancel()
            return max(lateness) / taken

        assert any(asyncio.run(run()) < 0.5 for _ in range(3)), "the loop was away for most of it"


def test_a_larger_body_may_have_more_elements(monkeypatch):
    """As many more as it is larger, where a server lets it be so."""
    monkeypatch.setattr(large_bodies, "MAX_BODY_BYTES", 100)
    monkeypatch.setattr(large_bodies, "MAX_IDS", 10)
    monkeypatch.setattr(large_bodies, "MAX_PARTS", 3)
    for body, problem in ((b"[1" + b",1" * 11 + b"]", "10 elements"), (b"[[[[]]]]", "3 arrays"),
                          (b"[1" + b",1" * 21 + b"]" + b" " * 100, "20 elements")):  # fmt: skip
        with pytest.raises(common.InputError, match=f"more than {problem}"):
            large_bodies.parse(body)
    assert len(large_bodies.parse(b"[1" + b",1" * 20 + b"]" + b" " * 100)) == 21
    assert large_bodies.parse(b"[[[[]]]]" + b" " * 100) == [[[[]]]]
