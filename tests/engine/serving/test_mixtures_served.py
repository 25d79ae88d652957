"""A folder with experts, windows or sinks behind the server: the official client gets what Transformers writes, from
every layout."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine.model.tokenizer import Tokenizer
from lab.make_model import make_model
from lab.running_server import running_server
from support.process_tree import descendants, wait_until_gone
from support.tiers import and_slowly

TEXTS = ["The capital of France is", "1 2 3 4 5", "def f(x):", "Once upon a time"] * 8
SIZES = {"qwen3_moe": {}, "deepseek_v3": {}, "gpt_oss": {"window": 7}, "mistral": {"window": 9}}
EXPERT_PARALLEL = ["-tp", "2", "-ep", "--all2all-backend", "all2all"]
SHARED = ["-dp", "2", "-ep"]
SHARED_IN_PARTS = ["-dp", "2", "-tp", "2", "-ep", "--all2all-backend", "all2all"]


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    """(folder, what Transformers writes after each text)"""
    folder = tmp_path_factory.mktemp("models") / request.param
    theirs, tokenizer = make_model(request.param, folder, **SIZES[request.param]), Tokenizer(folder)
    theirs.generation_config.eos_token_id = None
    answers = {}
    for text in dict.fromkeys(TEXTS):
        ids = tokenizer.encode(text)
        with torch.inference_mode():
            out = theirs.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12, pad_token_id=0)[0]
        # A server keeps a character to itself until its last byte is there.
        answers[text] = tokenizer.decode(out[len(ids) :].tolist()).rstrip("\N{REPLACEMENT CHARACTER}")
    return folder, answers


@pytest.mark.parametrize(("model", "flags"), and_slowly(
    [], [("qwen3_moe", SHARED), ("deepseek_v3", EXPERT_PARALLEL), ("mistral", [])],
    [("qwen3_moe", []), ("qwen3_moe", EXPERT_PARALLEL), ("qwen3_moe", SHARED_IN_PARTS), ("gpt_oss", []),
     ("gpt_oss", EXPERT_PARALLEL), ("deepseek_v3", []), ("deepseek_v3", SHARED)],
), indirect=["model"], ids=lambda value: value if isinstance(value, str) else " ".join(value))  # fmt: skip
def test_32_clients_at_once(model, flags):
    """With few blocks, so that some are preempted."""
    folder, answers = model
    limits = ["--max-model-len", "64", "--num-gpu-blocks-override", "33", "--max-num-seqs", "32"]
    with running_server(
        "--model", str(folder), "--served-model-name", "m", *limits, *flags, echo=lambda line: None
    ) as (url, process):
        import openai

        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=120)

        def ask(text):
            extra = {"ignore_eos": True}
            return client.completions.create(model="m", prompt=text, temperature=0, max_tokens=12, extra_body=extra)

        with ThreadPoolExecutor(32) as pool:
            found = [answer.choices[0].text.rstrip("\N{REPLACEMENT CHARACTER}") for answer in pool.map(ask, TEXTS)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert found == [answers[text] for text in TEXTS]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)
def test_a_worker_that_is_killed_ends_the_engines_that_share_its_experts(model):
    """Whoever waits for an answer hears which engine it was, and why."""
    flags = ["--max-model-len", "1024", "-dp", "2", "-ep", "--all2all-backend", "all2all"]
    with running_server("--model", str(model[0]), "--served-model-name", "m", *flags, echo=lambda line: None) as (
        url,
        process,
    ):
        import openai

        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=120)
        client.completions.create(model="m", prompt="a", max_tokens=4)
        everybody = descendants(process.pid)
        with ThreadPoolExecutor(1) as pool:
            extra = {"ignore_eos": True}
            answer = pool.submit(client.completions.create, model="m", prompt="a", max_tokens=1000, extra_body=extra)
            worker = max(everybody, key=lambda one: depth(one, process.pid))
            time.sleep(0.3)
            os.kill(worker, signal.SIGKILL)
            with pytest.raises(openai.InternalServerError, match=r"engine [01] of 2: .*worker 0 of 1 died .*SIGKILL"):
                answer.result(60)
        assert process.wait(60) == 1
    wait_until_gone(everybody)


def depth(pid, top):
    """How many processes are between it and the server."""
    found = 0
    while pid != top:
        pid, found = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]), found + 1
    return found
