import torch

from engine.attention.torch_paged import decode_gathered, gather_plan, plan_decode


def guard():
    q, cache = torch.randn(1, 4, 8), torch.randn(2, 3, 16, 2, 8)
    table, lens = torch.tensor([[2, 1]]), torch.tensor([20])
    cache[:, 0] = 0
    found = plan_decode(table, lens, cache, 4)(q, cache)
    ((_, *reads),) = gather_plan(table, lens, cache.shape)
    assert torch.allclose(found, decode_gathered(q, cache, *reads), atol=1e-5)
