"""Vendor figures of GPUs: what the lessons' arithmetic is done with."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class GPU:
    """Vendor figures: memory in bytes, HBM bandwidth in bytes/s, dense bf16 tensor-core rate in FLOP/s.

    A data sheet's GB of memory are taken as 10^9 bytes. Most cards have some 6 % more (an "80 GB" H100 79.6 GiB), about
    what a server keeps for activations and graphs.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float

    @property
    def ridge(self) -> float:
        """FLOP per byte above which compute, not memory, is the limit."""
        return self.flops / self.bandwidth

    def seconds(self, flops: float, bytes_moved: float) -> float:
        """The roofline: the slower of the two ceilings, perfectly overlapped."""
        return max(flops / self.flops, bytes_moved / self.bandwidth)


# Data sheets: NVIDIA A10, A100 (SXM), H100 (SXM), H200, RTX 4090; AMD MI300X.
HARDWARE = {
    gpu.name: gpu
    for gpu in (
        GPU("A10 24GB", 24e9, 600e9, 125e12),
        GPU("RTX 4090 24GB", 24e9, 1008e9, 165e12),
        GPU("A100 40GB", 40e9, 1555e9, 312e12),
        GPU("A100 80GB", 80e9, 2039e9, 312e12),
        GPU("H100 80GB", 80e9, 3350e9, 989e12),
        GPU("H200 141GB", 141e9, 4800e9, 989e12),
        GPU("MI300X 192GB", 192e9, 5300e9, 1307e12),
    )
}
