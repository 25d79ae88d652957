"""Other engines on the same weights, or on weights of the same shape: Transformers here, vLLM in its own environment.

Owns their processes; called by benchmarks, which let them take turns with ours. It never measures ours.
vLLM: `vllm/benchmarks/throughput.py`, whose `--backend hf` is Transformers.
"""

from __future__ import annotations

import common

import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.model import folders, llama
from lab import roofline


@contextlib.contextmanager
def vllm_peer(python: str, model_folder: Path, dtype: str) -> Iterator[Callable[..., dict[str, Any]]]:
    """The real vLLM in processes of its own: ask(command=…) -> answer. Raises InputError if it does not start.

    They are stopped between two questions: vLLM's worker spins while it waits for work, on a core that ours needs.
    """
    script = common.ROOT / "tests" / "vllm_peer.py"
    command = [python, str(script), str(model_folder), dtype]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
    except OSError as error:
        raise common.InputError(f"--vllm {python}: {error.strerror}") from None

    def ask(**request: Any) -> dict[str, Any]:
        assert process.stdin and process.stdout
        with contextlib.suppress(OSError):  # it has died: the answer will be missing
            os.killpg(process.pid, signal.SIGCONT)
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            if line.startswith("{"):  # whatever else a library prints
                os.killpg(process.pid, signal.SIGSTOP)
                return json.loads(line)
        raise common.InputError(f"--vllm {python}: it ended; has that environment vLLM in it?")

    try:
        yield ask
    finally:
        assert process.stdin
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGCONT)
            process.stdin.close()
        process.wait()


def load_transformers(model_name: str | None, like: llama.Llama) -> Any:
    """The same weights in Transformers."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folders.model_folder(model_name), dtype=like.dtype)
    return model.eval().to(like.device)


def generate_with(transformers: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> Any:
    """Transformers' greedy answers of `max_tokens` each, to prompts of one length."""
    ids = torch.tensor(prompts, device=transformers.device)
    return transformers.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        pad_token_id=0,
    )


def random_twins(name: str) -> tuple[llama.Llama, Any]:
    """A model of `roofline.MODELS` in bf16, and its like in Transformers, with random weights: the time is the same."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config, device = roofline.llama_config(roofline.MODELS[name]), common.device()
    make, shapes = functools.partial(torch.empty, dtype=torch.bfloat16, device=device), llama.tensor_shapes(config)

    def weights(key: str) -> torch.Tensor | None:
        return make(shapes[key]).normal_(std=0.02) if key in shapes else None

    known = {key: value for key, value in dataclasses.asdict(config).items() if key != "rope_scaling"}
    with device:
        twin = AutoModelForCausalLM.from_config(LlamaConfig(**known), dtype=torch.bfloat16).eval()
    return llama.Llama(config, weights, torch.bfloat16), twin


def transformers_ms(model: Any, n: int) -> float:
    """Milliseconds of a decode step of `n` sequences: 50 tokens more, minus the prompt and what comes before."""
    ids = torch.full((n, 64), 5, device=model.device)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}

    def seconds(tokens: int) -> float:
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **options)[0, -1].item()
        return time.perf_counter() - start

    seconds(8)
    return 1e3 * (seconds(58) - seconds(8)) / 50
