"""What comes through a socket is a letter or nothing."""

from __future__ import annotations

import os
import pickle
import subprocess

import pytest

from engine.output import EngineCoreOutput
from engine.request import Request, SamplingParams
from engine.sampling.sampler import Logprob
from engine.serving.clients import MPClient
from engine.serving.core_proc import build_engine
from engine.serving.letters import EngineCoreOutputs, SchedulerStats
from engine.serving.letters import EngineCoreRequestType as Kind
from engine.serving.wire import frame, loads


def test_letters_and_nothing_else_are_unpickled():
    request = Request("0", [1, 2], SamplingParams(stop=["x"], logit_bias={3: 1.5}), cache_salt="s")
    scores = {"new_logprobs": {5: Logprob(-0.1, 1, "a")}, "new_prompt_logprobs": [None, {2: Logprob(-3.0, 9)}]}
    outputs = EngineCoreOutputs([EngineCoreOutput("0", [5], "stop", 5, **scores)], SchedulerStats(1, 2, 0.5))
    kind, twin = loads(pickle.dumps((Kind.ADD, request)))
    assert (
        kind is Kind.ADD
        and vars(twin).keys() == vars(request).keys()
        and twin.sampling_params == request.sampling_params
    )
    assert loads(pickle.dumps(outputs)) == outputs
    for evil in (os.system, MPClient, build_engine, subprocess.Popen, getattr):
        with pytest.raises(pickle.UnpicklingError, match="no letter"):
            loads(pickle.dumps(evil))


def test_requests_and_outputs_survive_the_journey():
    params = SamplingParams(temperature=0.5, stop=["x"], logit_bias={3: 1.0}, structured_outputs={"regex": "a"})
    request = Request("r", [1, 2, 3], params, priority=2, cache_salt="s", eos_token_id=7)
    copy = pickle.loads(frame((Kind.ADD, request))[4:])[1]
    assert vars(copy) == vars(request) and copy is not request
