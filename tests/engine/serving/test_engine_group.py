"""What a front end is made of that has several engines."""

from __future__ import annotations

import common  # noqa: F401  it must come before torch

from types import SimpleNamespace

import pytest

from engine.serving.balancer import BALANCERS
from engine.serving.engine_group import make_client


@pytest.mark.parametrize("routing", BALANCERS)
def test_a_front_end_without_others_beside_it_is_the_only_one(routing):
    args = SimpleNamespace(data_parallel_routing=routing)
    client = make_client(args, [None, None], None, 0)
    assert client.balancer.client_count == 1 and client.balancer.start == 0
    assert make_client(args, [None, None], None, 1, 2).balancer.start == 1, "each of two begins at another engine"
