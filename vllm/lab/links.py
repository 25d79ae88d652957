"""What connects GPUs: bytes that a collective sends, and the seconds that it takes.

Owns the published figures of links; called by the arithmetic of tours 05c and 06c. It never sends anything.
vLLM: `vllm/distributed/device_communicators/custom_all_reduce.py` is one such link, measured.
"""

from __future__ import annotations

import dataclasses


def wire_bytes(collective: str, payload: float, n: int) -> float:
    """Bytes that each of n ranks sends so that all have a result of `payload` bytes, on a ring.

    all-gather:  (n−1)/n · payload      each rank's part is passed on n − 1 times
    all-reduce: 2(n−1)/n · payload      first the sums travel around the ring, then the results
    """
    return {"all_gather": 1, "all_reduce": 2}[collective] * (n - 1) / n * payload


@dataclasses.dataclass(frozen=True)
class Link:
    """What connects GPUs: bytes/s that one GPU sends, and seconds of a collective on next to nothing."""

    bandwidth: float
    latency: float

    def seconds(self, collective: str, payload: float, n: int, calls: int = 1) -> float:
        """`calls` collectives of `payload` bytes each, one after the other."""
        return calls * (self.latency + wire_bytes(collective, payload, n) / self.bandwidth) if n > 1 else 0.0


# vLLM's all-reduce on an H200, NVIDIA aiconfigurator (whose sizes are bf16 elements, not bytes): up to 16 KB 4.4–5.2 µs
# in a CUDA graph, about 20.8 µs outside. 320 GB/s is what its larger messages come to (450 are nominal). For PCIe we
# know no such table: the nominal rate.
LINKS = {
    "nvlink": Link(320e9, 4.5e-6),
    "nvlink_eager": Link(320e9, 20.8e-6),
    "pcie5": Link(63e9, 4.5e-6),
}
