"""The floor: which products are timed, at how many rows."""

from __future__ import annotations

import types

import torch

from engine.model import llama
from engine.quantization.methods import quantize_model
from lab import matrix_products, timing


class Noted:
    """A layer that says how many rows it got."""

    def __init__(self, layer, name, seen):
        self.layer, self.weight, self.name, self.seen = layer, layer.weight, name, seen

    def __call__(self, x):
        self.seen[self.name] = len(x)
        return self.layer(x)


def four_bits():
    """A model of int4 weights; groups of 64 divide all its layers."""
    shape = dict(hidden_size=128, head_dim=32, num_attention_heads=4, intermediate_size=64)
    return quantize_model(llama.random_model(seed=3, dtype=torch.bfloat16, **shape), "int4")


def test_all_linear_layers_of_the_blocks_are_timed_and_the_output_matrix_is_not(monkeypatch, capsys):
    model, seen = llama.random_model(seed=3), []

    def measure(step, seconds):
        seen.append((seconds, len(step())))
        return types.SimpleNamespace(median=len(seen) * 1e-3)

    monkeypatch.setattr(timing, "measure", measure)
    rows = matrix_products.measure_linears({"a": model, "b": four_bits()}, 0.7)
    assert seen == [(0.7, 8)] * 8 and [r["method"] for r in rows] == ["a", "b"]
    assert [rows[0][f"ms_{M}"] for M in (1, 4, 8, 32)] == [1, 2, 3, 4] and rows[1]["ms_32"] == 8
    assert "M = 32" in capsys.readouterr().out


def test_the_floor_of_a_run_is_a_prefill_and_a_step_for_every_further_token(tiny_model, monkeypatch):
    """4 prompts of 5 tokens, 3 outputs each: 20 rows once, 4 rows twice; logits for 4 rows each time."""
    asked = []

    def seconds(model, *rows):
        asked.append(rows)
        return 10.0 ** len(asked)

    monkeypatch.setattr(matrix_products, "matmul_seconds", seconds)
    assert matrix_products.floor_seconds(tiny_model, 4, 5, 3) == 10 + 2 * 100 and asked == [(20, 4), (4, 4)]


def test_products_get_as_many_rows_as_asked_for(monkeypatch):
    model, seen = llama.random_model(seed=3), {}
    model.linear = {name: Noted(layer, name, seen) for name, layer in model.linear.items()}

    def measure(products):
        products()
        return types.SimpleNamespace(median=1.0)

    monkeypatch.setattr(timing, "measure", measure)
    assert matrix_products.matmul_seconds(model, 6, 2) == 1
    assert seen == {name: (2 if name == "lm_head" else 6) for name in model.linear}
