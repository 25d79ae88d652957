"""The command line's server with the real model, asked by its official client; and what one process answers."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine import registry
from engine.llm import LLM
from engine.request import SamplingParams
from lab.running_server import running_server

TEXTS = registry.lesson("06c_scaling_out").TEXTS


FLAGS = ["--max-model-len", "256", "--max-num-seqs", "8", "--kv-cache-gib", "0.05", "--served-model-name", "smol",
         "--max-num-batched-tokens", "64"]  # fmt: skip


@contextlib.contextmanager
def server(*flags, **env):
    lines = []
    with running_server(*FLAGS, *flags, echo=lines.append, VLLM_SERVER_DEV_MODE="1", **env) as (url, process):
        import openai

        yield openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=120), process, lines, url


@pytest.fixture(scope="module")
def texts(real_model):
    """What one process answers, as text."""
    model, tokenizer = real_model
    llm = LLM(model, tokenizer=tokenizer, max_model_len=256, max_num_seqs=8, num_gpu_blocks_override=65)
    found = llm.generate(TEXTS, SamplingParams(temperature=0, max_tokens=6))
    return [output.outputs[0].text for output in found]


def ask_all(client, rounds=2):
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda text: client.completions.create(model="smol", prompt=text, temperature=0, max_tokens=6),
                         TEXTS * rounds)  # fmt: skip
        return [x.choices[0].text for x in found]
