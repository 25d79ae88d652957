import torch

from engine.quantization.kv_codes import pack, unpack


def guard():
    for bits in (2, 3, 4, 8):
        codes = (torch.arange(64) % 2**bits).to(torch.uint8)
        assert torch.equal(unpack(pack(codes, bits), bits), codes)
