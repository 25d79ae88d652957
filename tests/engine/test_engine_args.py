"""What the flags of a served engine refuse before anything starts."""

from __future__ import annotations

import common

import pytest

from engine.engine_args import EngineArgs


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"tensor_parallel_size": 2, "engine_place": "thread"}, "engine_place"),
     ({"data_parallel_size": 0, "headless": True}, "data_parallel_size"),
     ({"data_parallel_size": 2, "data_parallel_size_local": 3}, "data_parallel_size_local"),
     ({"data_parallel_size": 2, "headless": True}, "data_parallel_start_rank"),
     ({"data_parallel_size": 4, "headless": True, "data_parallel_size_local": 2, "data_parallel_start_rank": 3},
      "data_parallel_start_rank"),
     ({"headless": True, "api_server_count": 2}, "api_server_count"),
     ({"tensor_parallel_size": 2, "distributed_executor_backend": "mpi"}, "uni, mp, ray"),
     ({"data_parallel_size": 2, "data_parallel_routing": "random"}, "load, prefix")],
)  # fmt: skip
def test_flags_that_are_refused(wrong, words):
    with pytest.raises(common.InputError, match=words):
        EngineArgs(**wrong)


def test_the_last_engines_may_be_elsewhere():
    EngineArgs(data_parallel_size=4, headless=True, data_parallel_size_local=2, data_parallel_start_rank=2)
