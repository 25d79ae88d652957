"""Embeddings, scores and rankings over HTTP: the engine's own vectors, in OpenAI's and vLLM's forms."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json

import httpx
import numpy as np
import pytest

from engine.llm_engine import LLMEngine
from engine.sampling.pooler import PoolerConfig
from engine.serving import metrics
from engine.serving.openai import pooling
from engine.serving.openai.app import build_app
from engine.serving.openai.pooling import trained_dimensions
from engine.serving.openai.serving import OpenAIServing
from support.async_engines import idle, running
from support.scripted_api import call as call_app
from support.scripted_api import check_error

PATH = "/v1/embeddings"
IDS = [[1, 2, 3], [4] * 40, [9, 8]]


@contextlib.asynccontextmanager
async def serving(factory, folder, config=None, dimensions=False, keys=(), **options):
    options.setdefault("stat_logger", metrics.PrometheusStatLogger("tiny"))
    async with running(factory, folder, "event-loop", **options) as llm:
        api = OpenAIServing(llm, ["tiny"])
        api.pooler_config, api.trained_dimensions = config or PoolerConfig(), dimensions
        app = build_app(api, keys)

        async def call(path, body, **about):
            return await call_app(app, path, body, **about)

        call.llm, call.app = llm, app
        yield call
        await idle(llm)


def vectors_of(heard):
    assert heard.status == 200, heard.text
    assert [entry["index"] for entry in heard.json["data"]] == list(range(len(heard.json["data"])))
    return np.array([entry["embedding"] for entry in heard.json["data"]], "<f4")


def test_a_batch_of_token_ids_in_both_forms(tiny, folder):
    async def story():
        async with serving(tiny, folder) as call:
            heard = await call(PATH, {"input": IDS, "model": "tiny"})
            found = vectors_of(heard)
            assert heard.json["usage"] == {"prompt_tokens": 45, "total_tokens": 45, "completion_tokens": 0,
                                           "prompt_tokens_details": None}  # fmt: skip
            assert heard.json["object"] == "list" and heard.json["id"].startswith("embd-")
            assert heard.json["data"][0]["object"] == "embedding" and heard.json["model"] == "tiny"
            assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5) and found.shape == (3, 80)
            coded = (await call(PATH, {"input": IDS, "encoding_format": "base64"})).json["data"]
            again = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in coded]
            assert np.abs(np.stack(again) - found).max() < 1e-5
            one = vectors_of(await call(PATH, {"input": IDS[1]}))  # a flat list is one prompt
            assert np.abs(one[0] - found[1]).max() < 1e-5
            plain = vectors_of(await call(PATH, {"input": IDS, "use_activation": False}))
            assert np.abs(np.linalg.norm(plain, axis=1) - 1).min() > 0.01
            value = call.llm.stat_logger.value
            assert value("request_success_total", finished_reason="stop") == 10
            assert value("generation_tokens_total") == 0 and value("e2e_request_latency_seconds_count") == 10

    asyncio.run(story())


def test_a_large_batch_goes_in_by_parts_while_others_write(tiny, folder, monkeypatch):
    monkeypatch.setattr(pooling, "AT_ONCE", 4)

    async def story():
        async with serving(tiny, folder, max_num_queued_reqs=6) as call:
            prompts = [[n % 128, 1 + n % 127] for n in range(50)]
            chat = asyncio.create_task(call("/v1/completions", {"prompt": [5, 6], "max_tokens": 20}))
            heard = await call(PATH, {"input": prompts})
            assert vectors_of(heard).shape == (50, 80) and (await chat).status == 200
            alone = vectors_of(await call(PATH, {"input": prompts[37]}))
            assert np.abs(vectors_of(heard)[37] - alone[0]).max() < 1e-5

    asyncio.run(story())


def test_the_mean_of_a_prompt_that_is_shortened(tiny, folder):
    async def story():
        async with serving(tiny, folder, PoolerConfig("MEAN")) as call:
            whole = vectors_of(await call(PATH, {"input": [1, 2, 3, 4], "truncate_prompt_tokens": 2}))
            end = vectors_of(await call(PATH, {"input": [3, 4]}))
            start = vectors_of(await call(PATH, {"input": [1, 2, 3, 4], "truncate_prompt_tokens": 2,
                                                 "truncation_side": "right"}))  # fmt: skip
            assert np.abs(whole - end).max() < 1e-5 < np.abs(start - end).max()

    asyncio.run(story())


def test_shorter_vectors_if_the_model_was_trained_for_them(tiny, folder):
    async def story():
        body = {"input": IDS, "dimensions": 8}
        async with serving(tiny, folder) as call:
            check_error(await call(PATH, body), 400, "dimensions", "cannot be cut")
        async with serving(tiny, folder, dimensions=(8, 16)) as call:
            found = vectors_of(await call(PATH, body))
            assert found.shape == (3, 8) and np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
            check_error(await call(PATH, {"input": IDS, "dimensions": 9}), 400, "dimensions", "one of 8, 16")
        async with serving(tiny, folder, dimensions=True) as call:
            check_error(await call(PATH, {"input": IDS, "dimensions": 577}), 400, "dimensions", "from 1 to 576")

    assert trained_dimensions({"matryoshka_dimensions": [8]}) == [8] and trained_dimensions({"is_matryoshka": True})
    assert trained_dimensions({}) is False
    asyncio.run(story())


@pytest.mark.parametrize(("body", "param", "text"), [
    ({}, "input", "give either"), ({"input": []}, "input", "must not be empty"), ({"input": ""}, "input", "empty"),
    ({"input": [[]]}, "input", "cannot be empty"), ({"input": [300_000]}, None, "300000"),
    ({"input": [1] * 128}, "input", "maximum context length is 128 tokens"),
    ({"input": [1], "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
    ({"input": [1], "dimensions": 0}, "dimensions", "greater than or equal to 1"),
    ({"input": {"a": 1}}, "input", "text, token ids"), ({"input": [1], "model": "none"}, "model", "does not exist"),
    ({"input": [1], "priority": 1}, "priority", "fcfs"), ({"input": [1], "truncate_prompt_tokens": 999}, None, "128"),
    ({"input": [1], "messages": [{"role": "user", "content": "Hi"}]}, "input", "give either"),
])  # fmt: skip
def test_a_wrong_request_is_named(tiny, folder, body, param, text):
    async def story():
        async with serving(tiny, folder) as call:
            check_error(await call(PATH, body), 404 if param == "model" else 400, param, text)

    asyncio.run(story())


@pytest.mark.parametrize(("path", "body", "param", "text"), [
    ("/score", {}, "queries", "give queries and documents, or"),
    ("/score", {"text_1": "a"}, "queries", "text_1 and text_2"),
    ("/score", {"text_1": "a", "documents": "b"}, "queries", "give"),
    ("/rerank", {"documents": ["a"]}, "query", "required"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "queries", "1:1, 1:N or N:N"),
    ("/rerank", {"query": "a", "documents": []}, "documents", "at least one"),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "greater than"),
])  # fmt: skip
def test_a_wrong_pair_is_named(tiny, folder, path, body, param, text):
    async def story():
        async with serving(tiny, folder) as call:
            check_error(await call(path, body), 400, param, text)

    asyncio.run(story())


def test_who_hangs_up_leaves_nothing(tiny, folder):
    async def story():
        async with serving(tiny, folder) as call:
            await call(PATH, {"input": [[n] * 100 for n in range(60)]}, hang_up_after=0)

    asyncio.run(story())


def test_a_key_is_needed(tiny, folder):
    async def story():
        async with serving(tiny, folder, keys=["key"]) as call:
            for path in (PATH, "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"):
                check_error(await call(path, {"input": [1]}), 401)

    asyncio.run(story())


TEXTS = ["The cat sleeps on the sofa.", "A cat is sleeping on a couch.", "Quarterly revenue rose by 4 percent."]


def test_openais_client_and_scores_of_texts(real_model, folder):
    """Texts that say the same are nearer; every path says the same of them."""
    import openai

    def make(args=None, report=lambda text: None):
        return LLMEngine(*real_model, max_model_len=128, max_num_seqs=8, num_gpu_blocks_override=73)

    async def story():
        async with serving(make, folder, PoolerConfig("MEAN")) as call:
            http = httpx.AsyncClient(transport=httpx.ASGITransport(call.app))
            client = openai.AsyncOpenAI(base_url="http://x/v1", api_key="x", http_client=http, max_retries=0)
            found = await client.embeddings.create(model="tiny", input=TEXTS)
            unit = np.array([entry.embedding for entry in found.data])
            assert unit.shape == (3, 576) and found.usage.prompt_tokens == found.usage.total_tokens > 10
            floats = await client.embeddings.create(model="tiny", input=TEXTS[0], encoding_format="float")
            assert np.abs(np.array(floats.data[0].embedding) - unit[0]).max() < 1e-5
            want = unit[1:] @ unit[0]
            assert want[0] > want[1]
            for path, sides in (("/score", ("text_1", "text_2")), ("/v1/score", ("queries", "documents")),
                                ("/score", ("data_1", "data_2")), ("/score", ("queries", "items"))):  # fmt: skip
                heard = (await call(path, dict(zip(sides, (TEXTS[0], TEXTS[1:]))))).json
                assert np.allclose([entry["score"] for entry in heard["data"]], want, atol=1e-5), path
                assert heard["id"].startswith("score-") and heard["usage"]["completion_tokens"] == 0
            pairs = (await call("/score", {"text_1": TEXTS[1:], "text_2": TEXTS[1:]})).json["data"]
            assert np.allclose([entry["score"] for entry in pairs], 1, atol=1e-5)
            body = {"query": TEXTS[0], "documents": [TEXTS[2], TEXTS[1]]}
            for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
                heard = (await call(path, body)).json
                assert [entry["index"] for entry in heard["results"]] == [1, 0]
                assert [entry["document"]["text"] for entry in heard["results"]] == TEXTS[1:]
                assert np.allclose([entry["relevance_score"] for entry in heard["results"]], want, atol=1e-5)
                assert set(heard["usage"]) == {"prompt_tokens", "total_tokens"}
            assert len((await call("/rerank", body | {"top_n": 1})).json["results"]) == 1
            chat = {"messages": [{"role": "user", "content": "Hi"}]}
            rendered = call.llm.front.tokenizer.render_chat(chat["messages"], add_generation_prompt=False)
            said = vectors_of(await call(PATH, chat))
            same = vectors_of(await call(PATH, {"input": rendered, "add_special_tokens": False}))
            assert np.abs(said - same).max() < 1e-5
            assert json.loads(json.dumps(heard)) == heard

    asyncio.run(story())
