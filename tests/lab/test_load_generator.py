"""The client: its clock is exact on a virtual one, and whatever a server does wrong has a name."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.load_generator import BadAnswer, SSEDecoder, Target, drive, read_stream
from lab.records import Record, concurrency, summarize
from lab.workload import Prompt
from support.scripted_load import Script, VirtualTimeLoop, drive_scripted, ms, ones

# --- Closed and open loops ------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 4))
def test_a_limit_is_kept_and_nobody_overtakes(due, limit, tokens):
    due = [at / 100 for at in sorted(due)]
    records = drive_scripted(Script(0.05, 0.03).reply, ones(len(due), tokens), due, max_concurrency=limit)
    assert concurrency([(r.start, r.end) for r in records])[0] <= limit
    assert [r.start for r in records] == sorted(r.start for r in records)
    assert all(r.client_queue_time > -1e-9 and not r.error for r in records)
    free = drive_scripted(Script(0.05, 0.03).reply, ones(len(due), tokens), due)
    assert ms(r.start for r in free) == ms(due), "an open loop does not look at the server"


# --- The stream -----------------------------------------------------------------------------------------------------


def chunk(text="", finish=None, **more):
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], **more}


def delta(finish=None, **fields):
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 7}}


def stream(*messages, done=True, newline="\n"):
    """Messages as an SSE body, text left as it is (no \\u escapes): the harder case."""
    events = [*(json.dumps(m, ensure_ascii=False) for m in messages), *(["[DONE]"] if done else [])]
    return "".join(f"data: {event}{newline}{newline}" for event in events).encode()


def replying(*parts, every=0.1):
    """A server that sends these bytes, one piece every 0.1 s (virtual)."""

    async def reply(body):
        for part in parts:
            await asyncio.sleep(every)
            yield part

    return reply


def ask(reply, **target):
    (record,) = drive_scripted(reply, [Prompt([1, 2], 2, 4)], [0.0], **target)
    return record


AWKWARD = "Zoë 👩‍🚀 \u2028 \x85 寿司\r\n"


@settings(max_examples=60)
@given(st.data(), st.sampled_from(["\n", "\r\n", "\r"]))
def test_events_survive_any_cut(data, newline):
    body = b": ping" + newline.encode() * 2 + stream(chunk(AWKWARD), chunk("b"), USAGE, newline=newline)
    body += f"event: x{newline}data:1{newline}data: 2{newline}{newline}".encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=12)))
    decoder, events = SSEDecoder(), []
    for a, b in itertools.pairwise([0, *cuts, len(body)]):
        events += decoder.feed(body[a:b])
    if newline == "\r":  # a lone \r at the very end may still become \r\n
        events += decoder.feed(b"x")
    assert [json.loads(e)["choices"][0]["text"] for e in events[:2]] == [AWKWARD, "b"]
    assert events[3:] == ["[DONE]", "1\n2"]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_a_cut_inside_a_line_ending_is_no_event(newline):
    body = f": hello{newline}data: 1{newline}data: 2{newline}{newline}data:3{newline}{newline}".encode()
    for cut in range(len(body) + 1):
        decoder = SSEDecoder()
        assert [*decoder.feed(body[:cut]), *decoder.feed(body[cut:] + b"x")] == ["1\n2", "3"]


def test_of_an_events_data_one_space_is_the_formats():
    assert SSEDecoder().feed(b"data:  a \n\ndata:b\n\n") == [" a ", "b"]


def test_fields_of_other_names_are_not_data():
    assert SSEDecoder().feed(b"database: 1\ndata: 2\n\n") == ["2"]


def test_what_came_together_has_one_time_and_a_long_error_is_cut():
    async def pieces(*messages):
        yield stream(*messages)

    record, ticks = Record(0.0), itertools.count()
    asyncio.run(read_stream(pieces(chunk("a"), chunk("b", "stop"), USAGE), record, lambda: next(ticks)))
    assert record.times == [0, 0]
    with pytest.raises(BadAnswer) as bad:
        asyncio.run(read_stream(pieces({"error": "x" * 999}), record, lambda: next(ticks)))
    assert bad.value.args == ("error event", "x" * 200)


def test_httpx_lines_would_cut_the_text():
    """Why the client brings a decoder of its own."""
    lines = list(httpx.Response(200, content=stream(chunk(AWKWARD))).iter_lines())
    with pytest.raises(ValueError):
        json.loads(lines[0].removeprefix("data: "))
    body = stream(chunk(AWKWARD), chunk("!", "length"), USAGE)
    record = ask(replying(*(body[i : i + 1] for i in range(len(body))), every=0.001))
    assert not record.error and record.text == AWKWARD + "!" and record.output_tokens == 7


def test_one_stream_to_the_digit():
    record = ask(replying(stream(chunk("a"), done=False), stream(chunk("b"), chunk("c", "length"), done=False),
                          stream(USAGE)))  # fmt: skip
    assert not record.error and (record.text, record.prompt_tokens, record.output_tokens) == ("abc", 11, 7)
    assert ms([record.ttft, *record.itl, record.e2el, record.tpot]) == [100, 100, 0, 200, round(100 / 6, 6)]
    assert ms([record.end]) == [300], "the connection closed later than the last text"


@pytest.mark.parametrize("tokens_per_chunk", [1, 2, 3, 5, 40])
def test_tokens_in_chunks(tokens_per_chunk):
    """TPOT stays what the engine does; ITL grows with what the server puts into a chunk."""
    n, itl = 31, 0.01
    script = Script(0.2, itl * tokens_per_chunk, tokens_per_chunk)
    (record,) = drive_scripted(script.reply, ones(1, n), [0.0])
    chunks = -(-(n - 1) // tokens_per_chunk)
    assert record.output_tokens == n and len(record.itl) == chunks
    assert ms(record.itl) == ms([itl * tokens_per_chunk] * chunks) and ms([record.ttft]) == [200]
    if (n - 1) % tokens_per_chunk == 0:
        assert ms([record.tpot]) == ms([itl])


def test_what_counts_as_a_token():
    """A role is none, an empty goodbye is none, a token without text (special, or half a character) is one."""
    chat = functools.partial(ask, chat=True)
    role, hi = stream(delta(role="assistant", content=""), done=False), stream(delta(content="Hi"), done=False)
    record = chat(replying(role, hi, stream(delta("stop", content=""), USAGE)))
    assert not record.error and ms([record.ttft, record.e2el]) == [200, 200] and record.text == "Hi"
    for name in ("reasoning", "reasoning_content"):  # vLLM's name, and what others and its older versions say
        record = chat(replying(stream(delta(**{name: "hm"}), done=False), stream(delta("stop", content="!"), USAGE)))
        assert record.text == "hm!" and ms([record.ttft, record.e2el]) == [100, 200]
    record = ask(replying(stream(chunk("", None), done=False), stream(chunk("x", None), chunk("", "stop"), USAGE)))
    assert ms([record.ttft, record.e2el]) == [100, 200] and len(record.times) == 2
    record = ask(replying(stream(chunk("", "stop"), USAGE)))  # nothing but an end: its time is the first token's
    assert not record.error and ms([record.ttft]) == [100]


def test_a_chunk_of_usage_may_have_null_for_choices():
    record = ask(replying(stream(chunk("a", "stop"), USAGE | {"choices": None})))
    assert not record.error and record.output_tokens == 7


def test_an_address_that_is_none_is_a_failure_like_others_and_progress_counts_it():
    progress = []

    async def run():
        async with httpx.AsyncClient() as client:
            return await drive(client, Target("http://x:y", "m"), ones(2), [0.0, 0.0], None,
                                      lambda: progress.append(1))  # fmt: skip

    assert [record.error for record in asyncio.run(run())] == ["connection"] * 2 == ["connection"] * len(progress)


def test_without_usage_chunks_are_counted():
    record = ask(replying(stream(chunk("a"), chunk("b"), chunk("c", "stop"))))
    assert not record.error and (record.output_tokens, record.prompt_tokens) == (3, 2)


MISBEHAVIOUR = {
    "truncated": [stream(chunk("a"), chunk("b"), done=False)],
    "truncated, before any text": [b": ping\n\n"],
    "truncated, in an event": [stream(chunk("a"), done=False), b"data: {"],
    "error event": [stream(chunk("a"), {"error": {"message": "CUDA out of memory", "code": 500}})],
    "malformed": [stream(chunk("a"), done=False), b"data: {]\n\n", stream(USAGE)],
    "malformed, a list": [stream([1]), stream(USAGE)],
    "malformed, a string": [stream("boo"), stream(USAGE)],
    "malformed, choices of numbers": [stream({"choices": [3]}), stream(USAGE)],
    "malformed, no text": [stream({"choices": [{"index": 0}]}), stream(USAGE)],
    "malformed, usage": [stream(chunk("a"), {"usage": {"completion_tokens": 1}})],
    "malformed, no UTF-8": [b"data: \xff\xfe\n\n"],
    "no tokens": [stream(USAGE)],
    "no tokens, at all": [stream()],
    "timeout": [stream(chunk("a"), done=False), *[b": ping\n\n"] * 200],
    "timeout, silent": [b""] * 200,
}


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_a_bad_answer_fails_by_name_and_is_never_fast(name):
    def reply(body):
        return (replying(*MISBEHAVIOUR[name]) if body["prompt"] == [1] else Script(0.5, 0.1).reply)(body)

    records = drive_scripted(reply, ones(3, 4), [0.0] * 3, timeout=10.0)
    assert [r.error for r in records] == ["", name.split(",")[0], ""] and records[1].detail
    found = summarize(records, goodput={"e2el": 1e9})
    assert (found["completed"], found["failed"]) == (2, 1) and found["failures"] == {name.split(",")[0]: 1}
    assert found["request_goodput"] == found["request_throughput"] == pytest.approx(2 / found["duration"])
    assert found["p99_ttft_ms"] == pytest.approx(500) and found["total_output_tokens"] == 8


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
def test_refusals_are_failures(status):
    async def run():
        transport = httpx.MockTransport(lambda request: httpx.Response(status, json={"error": {"message": "no room"}}))
        async with httpx.AsyncClient(transport=transport) as client:
            return await drive(client, Target("http://x", "m"), ones(2), [0.0, 0.0])

    for record in asyncio.run(run()):
        assert record.error == f"http {status}" and "no room" in record.detail and not record.times


def test_the_clock_starts_before_the_server_accepts():
    """A server that is too busy to accept is slow, not fast: what passes before the status line belongs to TTFT."""

    async def accept(request):
        await asyncio.sleep(3.0)
        return httpx.Response(200, content=Script(0.5, 0.1).reply(json.loads(request.content)))

    async def run():
        async with httpx.AsyncClient(transport=httpx.MockTransport(accept)) as client:
            return await drive(client, Target("http://x", "m"), ones(2, 2), [0.0, 1.0])

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        records = runner.run(run())
    assert ms(r.ttft for r in records) == [3500, 3500] and ms(r.end for r in records) == [3600, 4600]


def test_the_clock_starts_when_the_body_is_encoded(monkeypatch):
    """Ten thousand token ids take a while; that is our time, and the server's only begins then."""
    request = Target.request

    def slow(*args):
        asyncio.get_running_loop().now += 1.0
        return request(*args)

    monkeypatch.setattr(Target, "request", slow)
    (record,) = drive_scripted(Script(0.2, 0.1).reply, ones(1), [0.0])
    assert ms([record.client_queue_time, record.ttft]) == [1000, 200]


def test_a_generator_that_is_late_says_so():
    """Something blocks the event loop for a second: what was due meanwhile waited, and its clock knows."""

    async def blocking(body):
        if body["prompt"] == [0]:
            asyncio.get_running_loop().now += 1.0  # as a long computation in this process would
        async for data in Script(0.2, 0.1).reply(body):
            yield data

    records = drive_scripted(blocking, ones(3), [0.0, 0.4, 2.0])
    assert ms(r.client_queue_time for r in records) == [0, 600, 0] and ms([records[1].ttft]) == [200]
    assert ms([records[1].e2el_including_client_queue]) == [800]


def test_request_bodies():
    url, body = Target("http://x", "m", extra={"ignore_eos": True}).request(Prompt([5, 6], 2, 9))
    assert url == "http://x/v1/completions" and json.loads(body) == {
        "model": "m", "prompt": [5, 6], "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }  # fmt: skip
    url, body = Target("http://x", "m", chat=True).request(Prompt("hello", 1, 9))
    assert url.endswith("/v1/chat/completions")
    assert json.loads(body)["messages"] == [{"role": "user", "content": "hello"}]
    assert json.loads(body)["max_completion_tokens"] == 9
