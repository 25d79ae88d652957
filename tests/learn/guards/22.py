from engine.request import Request, SamplingParams
from engine.serving.balancer import PrefixAwareBalancer


def guard():
    balancer = PrefixAwareBalancer(2, block_size=2, num_blocks=2)
    for first in (0, 10, 20, 30, 40):
        prompt = Request("r", [first, first + 1, first + 2, first + 3], SamplingParams())
        engine = balancer.pick(prompt)
        assert [balancer.pick(prompt) for _ in range(3)] == [engine] * 3
