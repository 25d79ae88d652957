"""The command line's server with the real model's first layers, asked by its official client; and what one process
answers."""

from __future__ import annotations

import contextlib
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine import registry
from engine.llm import make_llm_engine
from engine.request import SamplingParams
from lab.running_server import running_server
from support import first_layers

TEXTS = registry.lesson("06c_scaling_out").TEXTS
ASKED = [(None, text) for text in TEXTS]  # and of which adapter
FLAGS = ["--max-model-len", "256", "--max-num-seqs", "8", "--kv-cache-gib", "0.05", "--served-model-name", "smol",
         "--max-num-batched-tokens", "64"]  # fmt: skip
PARAMS = {"temperature": 0, "max_tokens": 12, "logprobs": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return first_layers.folder_of(first_layers.LAYERS, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """Where two of the adapters are, by name."""
    return {name: first_layers.adapter_of(name, tmp_path_factory.mktemp("adapters")) for name in ("pirate", "json")}


@pytest.fixture(scope="module")
def answers(folder, shipped):
    """What one process answers: texts, and how probable they were, since few layers write much the same to all."""
    options = {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_gib": 0.1, "enable_lora": True, "max_loras": 2}
    engine, heard = make_llm_engine(str(folder), **options), {}
    for name, path in shipped.items():
        engine.lora.add_adapter(name, path)
    asked = list(itertools.product((*shipped, None), TEXTS))
    for i, (name, text) in enumerate(asked):
        engine.add_request(str(i), text, SamplingParams(**PARAMS), lora_name=name)
    while engine.has_unfinished_requests():
        heard |= {output.request_id: output.outputs[0] for output in engine.step()}
    found = [heard[str(i)] for i in range(len(asked))]
    assert len({one.cumulative_logprob for one in found}) == len(found)
    return {question: (one.text, pytest.approx(one.cumulative_logprob, abs=1e-3))
            for question, one in zip(asked, found)}  # fmt: skip


@contextlib.contextmanager
def server(folder, *flags, **env):
    lines = []
    about = ["--model", str(folder), *FLAGS, *flags]
    with running_server(*about, echo=lines.append, VLLM_SERVER_DEV_MODE="1", **env) as (url, process):
        import openai

        yield openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=120), process, lines, url


def ask_all(client, asked=ASKED):
    """What the server answers eight clients."""

    def ask(question):
        name, prompt = question
        choice = client.completions.create(model=name or "smol", prompt=prompt, **PARAMS).choices[0]
        return choice.text, sum(choice.logprobs.token_logprobs)

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, asked))
