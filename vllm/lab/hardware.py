"""Vendor figures of GPUs: what the lessons' arithmetic is done with."""

from __future__ import annotations

import dataclasses

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class GPU:
    """Memory in bytes, as the card's driver reports it (`nvidia-smi`, `rocm-smi`); HBM bandwidth in bytes/s and dense
    bf16 tensor-core rate in FLOP/s, as the data sheet has them.

    A name's GB are the vendor's: an "80 GB" H100 has 85.5 · 10^9 bytes, a "141 GB" H200 150.8 · 10^9.
    """

    name: str
    memory: int
    bandwidth: float
    flops: float

    @property
    def ridge(self) -> float:
        """FLOP per byte above which compute, not memory, is the limit."""
        return self.flops / self.bandwidth

    def seconds(self, flops: float, bytes_moved: float) -> float:
        """The roofline: the slower of the two ceilings, perfectly overlapped."""
        return max(flops / self.flops, bytes_moved / self.bandwidth)


# Drivers' memory and data sheets' rates: NVIDIA A10, A100 (SXM), H100 (SXM), H200, RTX 4090; AMD MI300X.
HARDWARE = {
    gpu.name: gpu
    for gpu in (
        GPU("A10 24GB", 23_028 * MIB, 600e9, 125e12),
        GPU("RTX 4090 24GB", 24_564 * MIB, 1008e9, 165e12),
        GPU("A100 40GB", 40_960 * MIB, 1555e9, 312e12),
        GPU("A100 80GB", 81_920 * MIB, 2039e9, 312e12),
        GPU("H100 80GB", 81_559 * MIB, 3350e9, 989e12),
        GPU("H200 141GB", 143_771 * MIB, 4800e9, 989e12),
        GPU("MI300X 192GB", 196_592 * MIB, 5300e9, 1307e12),
    )
}
