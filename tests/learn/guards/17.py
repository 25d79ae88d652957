import torch

from engine.request import Request, SamplingParams
from engine.sampling.sampler import SamplingState


def guard():
    request = Request("r", [1], SamplingParams(frequency_penalty=0.5))
    state = SamplingState(request, 0)
    for times in range(1, 7):
        request.append_output_token_id(3)
        counts, _ = state.count(8, torch.device("cpu"))
        assert counts.tolist() == [0, 0, 0, times, 0, 0, 0, 0]
