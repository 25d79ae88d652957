"""A letter as bytes."""

from __future__ import annotations

import pickle

from engine.request import Request, SamplingParams
from engine.serving.letters import EngineCoreRequestType as Kind
from engine.serving.wire import frame


def test_requests_and_outputs_survive_the_journey():
    params = SamplingParams(temperature=0.5, stop=["x"], logit_bias={3: 1.0}, structured_outputs={"regex": "a"})
    request = Request("r", [1, 2, 3], params, priority=2, cache_salt="s", eos_token_id=7)
    copy = pickle.loads(frame((Kind.ADD, request))[4:])[1]
    assert vars(copy) == vars(request) and copy is not request
