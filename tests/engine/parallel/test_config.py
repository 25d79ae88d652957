"""How layers and ranks are divided, and which layouts a model allows."""

from __future__ import annotations

import common

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.model import llama
from engine.parallel.config import ParallelConfig, get_pp_indices
from support.small_cores import SIZES


@given(st.integers(1, 130), st.integers(1, 9))
def test_stages_cover_all_layers_once(layers, stages):
    ranges = [get_pp_indices(layers, i, stages) for i in range(stages)]
    assert [i for start, end in ranges for i in range(start, end)] == list(range(layers))
    sizes = [end - start for start, end in ranges]
    assert max(sizes) - min(sizes) <= 1 and (stages == 1 or sizes[-1] == min(sizes))


def test_what_does_not_divide_goes_where_vllm_puts_it():
    def sizes(layers, n):
        return [b - a for a, b in (get_pp_indices(layers, i, n) for i in range(n))]

    assert sizes(61, 2) == [31, 30] and sizes(126, 4) == [31, 32, 32, 31] and sizes(5, 4) == [1, 1, 2, 1]


def test_ranks_of_a_layout():
    parallel = ParallelConfig(2, 3)
    assert (parallel.world_size, parallel.output_rank, parallel.backend) == (6, 4, "mp")
    assert ParallelConfig().backend == "uni" and ParallelConfig(1, 1, "mp").backend == "mp"
    config = llama.random_model(**SIZES).config
    ParallelConfig(4, 5).check(config)  # a stage for each layer
    for wrong, words in ((ParallelConfig(3), "tensor_parallel_size 3"), (ParallelConfig(1, 6), "num_hidden_layers"),
                         (ParallelConfig(2, 1, "uni"), "uni"), (ParallelConfig(1, 2, "uni"), "2 ranks")):  # fmt: skip
        with pytest.raises(common.InputError, match=words):
            wrong.check(config)
