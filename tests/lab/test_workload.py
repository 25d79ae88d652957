"""How long requests are, and when each is due."""

from __future__ import annotations

import common

import math
import random
import statistics
from collections import Counter

import numpy as np
import pytest
import torch

from lab.workload import AZURE, arrival_times, load_prompts, make_prompts, quantile, random_length, table_mean
from support.bench import bench_args


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed(burstiness):
    """Kolmogorov–Smirnov at 99.9 %: sup |F_n − F| ≤ 1.95/√n, fixed seed; and vLLM's scaling to count / rate."""
    n, rate = 4000, 7.0
    due = arrival_times(n, rate, random.Random(1), burstiness)
    assert due == sorted(due) and due[-1] == pytest.approx(n / rate)
    gaps = torch.tensor(np.diff([0.0, *due]) * rate).sort().values
    cdf = torch.special.gammainc(torch.tensor(burstiness, dtype=torch.float64), burstiness * gaps)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    assert max((steps[1:] - cdf).max(), (cdf - steps[:-1]).max()) <= 1.95 / math.sqrt(n)
    # Counts in windows of 10 expected arrivals: variance ÷ mean → 1 for Poisson, more for bursts, less for a clock.
    counts = Counter(int(at * rate / 10) for at in due[:-1])
    spread = np.var([counts[i] for i in range(n // 10)]) / 10
    bound = 4 * math.sqrt(2 / (n // 10))  # four standard deviations of a Poisson process's
    assert abs(spread - 1) <= bound if burstiness == 1 else (spread > 1 + bound) == (burstiness < 1)


def test_arrivals_at_the_ends():
    rng = random.Random(0)
    assert arrival_times(3, math.inf, rng) == [0.0] * 3
    assert arrival_times(4, 2.0, rng, math.inf) == [0.5, 1.0, 1.5, 2.0]
    again = [arrival_times(9, 2.0, random.Random(5)) for _ in range(2)]
    assert again[0] == again[1] != arrival_times(9, 2.0, random.Random(6))
    assert arrival_times(1, 4.0, rng) == [0.25]
    tight = [arrival_times(2, 4.0, random.Random(seed), 0.001) for seed in range(40)]  # gaps may all be 0
    assert [0.0, 0.0] in tight and {due[-1] for due in tight} == {0.0, 0.5}


def test_lengths():
    rng = random.Random(0)
    draw = lambda **how: [random_length(rng, 100, **how) for _ in range(4000)]  # noqa: E731
    assert set(draw()) == {100}
    uniform = draw(range_ratio=0.3)
    assert (min(uniform), max(uniform)) == (70, 130) and abs(statistics.fmean(uniform) - 100) < 4 * 17.6 / 63.2
    lognormal = draw(cv=0.5)
    assert abs(statistics.fmean(lognormal) - 100) < 4 * 50 / 63.2  # four standard errors
    assert statistics.pstdev(lognormal) == pytest.approx(50, rel=0.1) and min(lognormal) >= 1
    assert statistics.median(lognormal) == pytest.approx(100 / math.sqrt(1.25), rel=0.04)
    assert statistics.median(draw(cv=1.5)) == pytest.approx(100 / math.sqrt(1 + 1.5**2), rel=0.06)
    assert {random_length(rng, 10, 0.25) for _ in range(200)} == {*range(7, 14)}, "7.5 and 12.5, as vLLM rounds"
    for how in ({"range_ratio": 1.0}, {"cv": 2.0}):
        assert min(random_length(rng, 1, **how) for _ in range(50)) == 1, "never empty"


@pytest.mark.parametrize("name", AZURE)
def test_azure_lengths_have_the_published_percentiles(name):
    for side in ("input", "output"):
        table = AZURE[name][side]
        for p, tokens in table:
            assert quantile(table, p / 100) == pytest.approx(tokens)
        u = (np.arange(20_000) + 0.5) / 20_000
        values = [quantile(table, x) for x in u]
        assert values == sorted(values) and values[0] >= 1
        assert table_mean(table) == pytest.approx(np.mean(values), rel=1e-3)
        assert quantile(table, 0.999) == table[-1][1], "nothing beyond the last"
        published = AZURE[name]["mean"][side]
        assert table_mean(table) == pytest.approx(published, rel=0.02 if name == "azure-code" else 0.13)


def test_prompts_of_a_run(tmp_path):
    args = bench_args("--num-prompts", "5", "--random-input-len", "7", "--random-output-len", "3")
    prompts = make_prompts(args, 5, 0)
    assert [(len(p.content), p.input_len, p.output_len) for p in prompts] == [(7, 7, 3)] * 5
    assert prompts == make_prompts(args, 5, 0) and prompts != make_prompts(args, 5, 1)
    assert len({tuple(p.content) for p in prompts}) == 5, "nobody's prompt is another's prefix"
    texts = make_prompts(args, 5, 0, as_text=True)
    assert all(len(p.content.split()) == 7 for p in texts)
    azure = make_prompts(bench_args("--dataset-name", "azure-code"), 400, 0)
    assert statistics.median(p.input_len for p in azure) == pytest.approx(1469, rel=0.15)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one\u2028line", "output_tokens": 9}\n\n{"prompt": "two"}\n', encoding="utf-8")
    custom = make_prompts(bench_args("--dataset-path", str(file), "--random-output-len", "4"), 3, 0)
    assert [(p.content, p.output_len) for p in custom] == [("one\u2028line", 9), ("two", 4), ("one\u2028line", 9)]


@pytest.mark.parametrize(("length", "tokens"), [(2.7, 3), (2.3, 2), (0.2, 1)])
def test_lengths_between_published_ones_are_rounded(monkeypatch, length, tokens):
    monkeypatch.setattr("lab.workload.quantile", lambda table, u: length)
    (prompt,) = make_prompts(bench_args("--dataset-name", "azure-code"), 1, 0)
    assert (len(prompt.content), prompt.input_len, prompt.output_len) == (tokens,) * 3


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ('{"prompt": 3}', "line 1"), ('{"prompt": "a"}\n{"text": "b"}', "line 2"), ("[]", "line 1"), ("{", "line 1"),
        ('{"prompt": "a", "output_tokens": 0}', "line 1"), ('{"prompt": "a"}\n\n{"prompt": ""}', "line 3"),
        ('{"prompt": "a", "output_tokens": true}', "line 1"), ("", "no prompt"), (b"\xff\xfe", "line 1"),
        (None, "not readable"),
    ],
)  # fmt: skip
def test_wrong_prompt_files_are_named(tmp_path, content, word):
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(common.InputError, match=word):
        load_prompts(str(file))


def test_contradictions_in_the_workload_are_refused():
    with pytest.raises(common.InputError, match="--dataset-path"):
        make_prompts(bench_args("--dataset-name", "custom"), 1, 0)
    with pytest.raises(common.InputError, match="--random-cv"):
        make_prompts(bench_args("--random-cv", "1", "--random-range-ratio", "0.5"), 1, 0)
