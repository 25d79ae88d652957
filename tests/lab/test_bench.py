"""`bench` against servers on real sockets: the load is what the flags say, and a failure is no number."""

from __future__ import annotations

import common

import argparse
import asyncio
import contextlib
import json
import math
import random
import threading

import pytest

from lab.bench import add_bench_commands, bench_command, main, print_result, serve_load
from lab.records import Record, summarize
from lab.tuning import latency_command
from lab.workload import arrival_times, make_prompts
from support.bench import bench_args, hand_made
from support.scripted_load import Script, start_server


@pytest.mark.parametrize(
    ("key", "value", "words", "said"),
    [
        ("max_lateness_ms", 151, "WARNING", True), ("max_lateness_ms", 149, "WARNING", False),  # a fifth of the TTFT
        ("max_lateness_ms", None, "WARNING", False), ("request_goodput", 0.0, "goodput: 0.00", True),
        ("request_goodput", None, "goodput", False), ("output_tokens_per_chunk", 1.06, "A chunk brought", True),
        ("output_tokens_per_chunk", 1.04, "A chunk brought", False), ("output_tokens_per_chunk", None, "A chu", False),
    ],
)  # fmt: skip
def test_what_the_report_says(capsys, key, value, words, said):
    print_result(summarize(hand_made()) | {"output_tokens_per_chunk": 1.0, key: value}, ["ttft:1"])
    assert (words in capsys.readouterr().out) == said


@contextlib.contextmanager
def serving(handle):
    """A raw asyncio server in a thread: `handle(reader, writer)`. Yields its URL."""
    loop, started, url = asyncio.new_event_loop(), threading.Event(), []

    async def start():
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        url.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        started.set()

    def run():
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(10)
    yield url[0]
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


async def read_request(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length")), 0)
    return head.decode(), json.loads(await reader.readexactly(length)) if length else None


def api(seen=None, fail=lambda body: False):
    """A small OpenAI server: /v1/models, and scripted streams on both endpoints; `fail(body)` cuts the connection."""

    async def handle(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head, body = await read_request(reader)
            if seen is not None:
                seen.append((head, body))
            if head.startswith("GET /v1/models"):
                content = b'{"data": [{"id": "served"}]}'
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(content) + content
                )
            else:
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
                async for data in Script(0.01, 0.002).reply(body):
                    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
                    if fail(body):
                        await writer.drain()
                        writer.transport.abort()
                        return
                writer.write(b"0\r\n\r\n")
            await writer.drain()
        writer.close()

    return handle


def bench(capsys, *argv):
    main(["bench", *argv])
    return capsys.readouterr().out


def test_bench_from_end_to_end(tmp_path, capsys):
    seen, out = [], tmp_path / "out.json"
    out.write_text('{"other": 1}')
    with serving(api(seen)) as url:
        flags = "--num-prompts 12 --request-rate 200 --num-warmups 3 --random-input-len 6 --random-output-len 5"
        flags += " --ignore-eos --api-key secret --goodput ttft:10000 e2el:10000 --metric-percentiles 50,99"
        text = bench(capsys, "--base-url", url + "/v1/", *flags.split(), "--json", str(out))
    assert "12 answered, 0 failed" in text and "Little" in text and "goodput" in text
    content = json.loads(out.read_text())
    found = content["bench"]
    assert content["other"] == 1 and found["model_id"] == "served" and found["request_rate"] == 200
    assert (found["completed"], found["total_output_tokens"], found["total_input_tokens"]) == (12, 60, 72)
    assert found["request_goodput"] == found["request_throughput"] and found["max_lateness_ms"] >= 0
    assert found["p99_ttft_ms"] >= found["p50_ttft_ms"] >= 9.9 and found["median_itl_ms"] >= 1.9
    posts = [(head, body) for head, body in seen if body]
    assert len(posts) == 15 and all("Authorization: Bearer secret" in head for head, _ in posts)
    assert all(body["ignore_eos"] and body["model"] == "served" for _, body in posts)
    prompts = [tuple(body["prompt"]) for _, body in posts]
    assert len(set(prompts)) == 15, "a warm-up must not put a measured prompt into the server's prefix cache"


@pytest.mark.parametrize("rate", [5.0, math.inf])
def test_the_load_is_what_the_flags_say(monkeypatch, rate):
    calls = []

    async def drive(client, target, prompts, arrivals, limit, advance=None):
        calls.append((target, prompts, arrivals, limit))
        return [Record(0.0, 0.0, 1.0, [1.0], 1, 1) for _ in prompts]

    monkeypatch.setattr("lab.bench.drive", drive)
    flags = f"--num-prompts 3 --num-warmups 2 --seed 7 --request-rate {rate} --burstiness 0.5 --max-concurrency 4"
    args = bench_args(*flags.split(), "--request-timeout", "9", "--random-input-len", "3")
    result, _ = asyncio.run(serve_load(args))
    (_, warmups, at_once, few), (target, prompts, due, limit) = calls
    assert (at_once, few, limit) == ([0.0] * 2, 4, 4) and (target.timeout, target.extra) == (9, {})
    assert due == arrival_times(3, rate, random.Random(7), 0.5)
    assert prompts == make_prompts(args, 3, 7) and warmups[0] not in prompts
    # All at once, there is no time at which a user asked.
    assert ("mean_e2el_including_client_queue_ms" in result) == (rate == 5)


def test_bench_chat_with_a_limit(tmp_path, capsys):
    seen, out, file = [], tmp_path / "out.json", tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hello", "output_tokens": 4}\n')
    with serving(api(seen)) as url:
        flags = (
            f"--base-url {url} --model m --backend openai-chat --num-prompts 6 --request-rate 1000 --max-concurrency 1"
        )
        text = bench(capsys, *flags.split(), "--dataset-path", str(file), "--json", str(out))
    found = json.loads(out.read_text())["bench"]
    assert found["max_concurrent_requests"] == 1 and found["completed"] == 6 and "queue in the client" in text
    assert found["mean_e2el_including_client_queue_ms"] > 2 * found["mean_e2el_ms"]
    assert found["max_lateness_ms"] is None
    assert all(head.startswith("POST /v1/chat/completions") for head, _ in seen)


def test_a_connection_that_breaks_is_a_cut_answer(capsys):
    with serving(api(fail=lambda body: body["prompt"][0] % 2)) as url:
        text = bench(capsys, "--base-url", url, "--model", "m", "--num-prompts", "6", "--random-input-len", "3",
                     "--random-output-len", "2", "--max-concurrency", "1")  # fmt: skip
    assert "failed; " in text and "x truncated" in text and "0 answered" not in text


def test_an_open_loop_has_a_connection_for_everybody():
    """120 users, and a server that answers when all of them are there; a client has 100 by default."""
    here = []

    async def reply(body):
        here.append(body)
        while len(here) < 120:
            await asyncio.sleep(0.01)
        async for data in Script(0.0, 0.0).reply(body):
            yield data

    async def run():
        server, url = await start_server(reply)
        async with server:
            return await serve_load(bench_args("--base-url", url, "--num-prompts", "120", "--random-input-len", "2",
                 "--random-output-len", "1", "--request-timeout", "10"))  # fmt: skip

    result, _ = asyncio.run(run())
    assert (result["completed"], result["failed"]) == (120, 0)


def test_no_server_no_number(capsys, tmp_path):
    out = tmp_path / "out.json"
    with pytest.raises(common.CheckFailed, match="connection"):
        bench(capsys, "--base-url", "http://127.0.0.1:9", "--model", "m", "--num-prompts", "2", "--random-input-len",
              "3", "--json", str(out))  # fmt: skip
    assert json.loads(out.read_text())["bench"]["request_rate"] == "inf", "JSON has no word for infinity"
    assert "0 answered, 2 failed; 2 x connection" in capsys.readouterr().out
    with pytest.raises(common.InputError, match="--base-url"):
        bench(capsys, "--base-url", "http://127.0.0.1:9", "--num-prompts", "2")
    with pytest.raises(common.CheckFailed, match="connection"):  # a key that is not ASCII
        bench(capsys, "--base-url", "http://127.0.0.1:9", "--model", "m", "--num-prompts", "2", "--api-key", "clé")


def test_the_commands_can_be_mounted_elsewhere():
    parser = argparse.ArgumentParser()
    add_bench_commands(parser.add_subparsers())
    args = parser.parse_args(["bench", "latency", "--input-len", "5", "--output-len", "6", "--batch-size", "2"])
    assert args.run is latency_command and (args.input_tokens, args.output_tokens, args.num_iters) == (5, 6, 30)
    args = parser.parse_args(["bench", "--request-rate", "inf", "--burstiness", "0.5", "--percentiles", "50,99.9"])
    assert args.run is bench_command and args.request_rate == math.inf and args.metric_percentiles == [50, 99.9]
    assert parser.parse_args(["tune", "--max-num-seqs", "1,2"]).max_num_seqs == [1, 2]
