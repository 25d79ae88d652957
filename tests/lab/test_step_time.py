"""The time of a step: each term by hand, and the same for numbers and for columns."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lab.hardware import find_gpu
from lab.model_costs import find_model, model_costs
from lab.step_time import (
    StepFeatures,
    StepModel,
    StepRates,
    StepWork,
    data_sheet,
    rates_of,
    slowest,
    step_work,
)

LLAMA, MIXTURE = (model_costs(find_model(name)) for name in ("Llama-3.1-8B", "Qwen3-30B-A3B"))
RATES = StepRates(2.0, 3.0, 5.0, 7.0, 11.0, 13.0, 17.0, 19.0)


def test_what_is_in_a_batch():
    # Two decodes, a whole prompt of 3 and the last 2 of 5 tokens: 1 + 2 + 3 pairs, and 4 + 5.
    assert step_work([(1, 10), (1, 20), (3, 3), (2, 5)]) == StepWork(7, 4, 30, 8, 15, 7)
    assert step_work([]) == StepWork(0, 0, 0, 0, 0, 0)


def test_each_term_counts_once_and_the_slower_of_two():
    read = StepFeatures(100.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert RATES.seconds(read) == 200 + 5 + 7 + 11 + 13 + 17  # weights hide products; the host is no part of a step
    assert RATES.seconds(read._replace(products=100.0)) == 300 + 53
    for features in (read, read._replace(products=100.0)):
        assert sum(RATES.parts(features).values()) == RATES.seconds(features)


def test_columns_are_as_numbers():
    rows = [StepFeatures(*map(float, np.random.default_rng(seed).integers(0, 100, 7))) for seed in range(20)]
    column = RATES.seconds(StepFeatures(*np.array(rows).T))
    assert column.tolist() == [RATES.seconds(row) for row in rows]


def test_a_card_of_two_does_half_and_sends_the_rest():
    work = step_work([(1, 100)] * 8 + [(512, 1024)])
    one, two = (StepModel(LLAMA, tp).features(work) for tp in (1, 2))
    for name in ("weights", "products", "cache", "attention"):
        assert getattr(two, name) == getattr(one, name) / 2
    # Two sums in each of 32 layers of [520, 4096] in bf16, of which each of two sends half twice; and half the logits.
    assert one.exchange == 0 and two.exchange == 2 * 32 * 520 * 4096 * 2 + 9 * 128256
    assert (two.sequence, two.fixed) == (9.0, 1.0)


@pytest.mark.parametrize("name, ranks", [("Llama-3.1-8B", 8), ("Qwen3-30B-A3B", 4), ("DeepSeek-V3", 1)])
def test_ranks_beyond_the_heads_of_keys_keep_the_same_cache(name, ranks):
    costs, work = model_costs(find_model(name)), step_work([(1, 100)] * 8)
    one, many = (StepModel(costs, tp).features(work).cache for tp in (1, 16))
    assert many == one / ranks


def test_the_cache_is_read_once_and_products_follow_tokens():
    model = StepModel(LLAMA)
    few, many = (model.features(step_work([(1, 1000)] * n)) for n in (1, 64))
    assert few.weights == many.weights and many.cache == 64 * few.cache == 64 * 1000 * 131_072
    assert many.products == 64 * few.products and few.attention == 0


def test_experts_are_read_as_they_are_asked_and_shared_between_engines():
    alone, shared = StepModel(MIXTURE), StepModel(MIXTURE, expert_engines=2)
    few, many = (alone.features(step_work([(1, 9)] * n)).weights for n in (1, 512))
    assert few < 0.25 * many < 0.25 * MIXTURE.bytes_kept
    one = step_work([(1, 9)] * 8)
    both = slowest([one, step_work([(1, 7)] * 6)])
    assert both == one._replace(expert_tokens=14)
    assert shared.features(both).weights < alone.features(one).weights
    assert shared.features(both).exchange > 0 == alone.features(one).exchange


def test_a_data_sheet_gives_a_plausible_step():
    gpu = find_gpu("RTX 4090")
    guesses = data_sheet(gpu, LLAMA)
    assert set(guesses) == {field.name for field in dataclasses.fields(StepRates)}
    rates, model = rates_of(guesses), StepModel(LLAMA)
    decode = rates.seconds(model.features(step_work([(1, 1000)])))
    assert 15e9 / 1008e9 < decode < 25e-3  # no faster than weights stream
    prompt = rates.seconds(model.features(step_work([(2048, 2048)])))
    assert 2048 * 15e9 / 165e12 < prompt < 0.4
