"""Three random adapters of the small model, and what each answers if it is merged into the weights."""

from __future__ import annotations

import functools

import pytest

from engine.lora import lora_model
from engine.request import SamplingParams
from lab import naive
from support.small_cores import OUTPUTS, PROMPTS, small_model


@functools.cache
def base_and_adapters():
    """On all layers; on some; on other ones, and not on the first of each slice."""
    model = small_model()
    kinds = (4, lora_model.TARGETS), (8, ("q_proj", "down_proj")), (3, ("k_proj", "o_proj", "up_proj"))
    return model, {f"a{r}": lora_model.random_adapter(model.config, r, seed=r, targets=targets) for r, targets in kinds}


@pytest.fixture
def whole():
    return base_and_adapters()[0]


@pytest.fixture
def loras():
    return base_and_adapters()[1]


@functools.cache
def as_merged():
    """What each adapter, and the base, answers to every prompt if it is merged into the weights."""
    whole, loras = base_and_adapters()
    models = {"None": whole} | {name: lora_model.merged(whole, each) for name, each in loras.items()}
    return {(name, i): naive.generate(model, prompt, tokens) for name, model in models.items()
            for i, (prompt, tokens) in enumerate(zip(PROMPTS, OUTPUTS))}  # fmt: skip


def ask(engine, names):
    """Every prompt to every adapter. Token ids by (adapter, prompt)."""
    found = {}
    for i, (prompt, tokens) in enumerate(zip(PROMPTS, OUTPUTS)):
        for name in names:
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            engine.add_request(f"{name} {i}", {"prompt_token_ids": prompt}, params, lora_name=name)
    while engine.has_unfinished_requests():
        for output in engine.step():
            name, i = output.request_id.split()
            found[name, int(i)] = list(output.outputs[0].token_ids)
    engine.lora.check()
    return found
