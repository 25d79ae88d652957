"""Layers in shards add up to the layer, whatever divides whatever."""

from __future__ import annotations

import common

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import registry
from engine.model import llama
from engine.parallel.layers import ColumnParallelLinear, ParallelLMHead, RowParallelLinear, VocabParallelEmbedding
from support.close import assert_close
from support.rank_threads import in_threads

lesson = registry.lesson("05c_tensor_parallel")


@given(st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))
def test_column_then_row_is_the_whole_layer(n, tokens, columns, rows):
    x, a = torch.randn(tokens, 7), torch.randn(n * columns, 7)
    b, bias_a, bias_b = torch.randn(rows, n * columns), torch.randn(n * columns), torch.randn(rows)
    want = torch.relu(x @ a.T + bias_a) @ b.T + bias_b

    def rank(group):
        shard = ColumnParallelLinear.shard
        r = group.rank_in_group
        first = ColumnParallelLinear(llama.Linear(shard(a, r, n), shard(bias_a, r, n)), group)
        second = RowParallelLinear(llama.Linear(RowParallelLinear.shard(b, r, n), bias_b), group)
        return second(torch.relu(first(x)))

    for out in in_threads(n, rank):
        assert_close(out, want)


@given(st.integers(1, 40), st.sampled_from([1, 2, 3, 4, 7]))
def test_embedding_and_logits_for_any_vocabulary(vocab, n):
    """Sizes that n does not divide, ranks that own nothing but padding, the first and last row of each shard."""
    weight, ids = torch.randn(vocab, 5), torch.arange(vocab)
    x = torch.randn(3, 5)

    def rank(group):
        part = VocabParallelEmbedding.shard(weight, group.rank_in_group, n)
        head = ParallelLMHead(llama.Linear(part), group, vocab)
        return len(part), VocabParallelEmbedding(part, group)(ids), head(x)

    for size, rows, logits in in_threads(n, rank):
        assert size == -(-vocab // n)
        assert rows.equal(weight), "a sum with zeros is exact"
        assert_close(logits, x @ weight.T)


def test_a_bias_is_added_once_and_a_partial_sum_is_partial():
    x, w, b = torch.randn(2, 6), torch.randn(4, 6), torch.randn(4)

    def rank(group, reduce_results=True):
        r = group.rank_in_group
        layer = RowParallelLinear(llama.Linear(RowParallelLinear.shard(w, r, 3), b), group)
        layer.reduce_results = reduce_results
        return layer(x[:, 2 * r : 2 * r + 2])

    for out in in_threads(3, rank):
        assert_close(out, x @ w.T + b)
    partial = in_threads(3, lambda group: rank(group, reduce_results=False))
    assert_close(sum(partial), x @ w.T + b)
    assert common.relative_error(partial[0], x @ w.T + b) > 0.1


@pytest.mark.parametrize("n", [2, 4])
def test_low_precision(n, dtype, device):
    """A block in 16 bits, its partial sums rounded before they are added, against fp32 on the same rounded inputs."""
    x, a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((5, 64), (96, 64), (64, 96)))
    a, b = a / 8, b / 8

    def rank(group):
        r = group.rank_in_group
        first = ColumnParallelLinear(llama.Linear(ColumnParallelLinear.shard(a, r, n)), group)
        second = RowParallelLinear(llama.Linear(RowParallelLinear.shard(b, r, n)), group)
        return second(torch.nn.functional.silu(first(x)))

    for out in in_threads(n, rank, device):
        assert_close(out, lesson.mlp(x.float(), a.float(), b.float()))
