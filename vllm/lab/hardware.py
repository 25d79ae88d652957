"""Vendor figures of GPUs: what the lessons' arithmetic is done with."""

from __future__ import annotations

from common import InputError

import dataclasses
import re

MIB = 2**20
PCIE_4, PCIE_5 = 32e9, 64e9  # 16 lanes, bytes/s in one direction


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
    link: float = PCIE_4  # to another card, bytes/s in one direction

    @property
    def product(self) -> str:
        """Its name without its memory."""
        return self.name.rsplit(" ", 1)[0]

    @property
    def ridge(self) -> float:
        """FLOP per byte above which compute, not memory, is the limit."""
        return self.flops / self.bandwidth

    def seconds(self, flops: float, bytes_moved: float) -> float:
        """The roofline: the slower of the two ceilings, perfectly overlapped."""
        return max(flops / self.flops, bytes_moved / self.bandwidth)


# Drivers' memory and data sheets' rates: NVIDIA A10, L4, L40S, RTX A6000, RTX 3090, 4090, 5090, RTX PRO 6000 Blackwell,
# A100 (SXM), H100 (SXM), H200, H20, B200 (HGX); AMD MI300X. FLOP/s are dense, with sums in fp32.
HARDWARE = {
    gpu.name: gpu
    for gpu in (
        GPU("A10 24GB", 23_028 * MIB, 600e9, 125e12),
        GPU("L4 24GB", 23_034 * MIB, 300e9, 121e12),
        GPU("L40S 48GB", 46_068 * MIB, 864e9, 362e12),
        GPU("RTX A6000 48GB", 49_140 * MIB, 768e9, 154.8e12),
        GPU("RTX 3090 24GB", 24_576 * MIB, 936e9, 71e12),
        GPU("RTX 4090 24GB", 24_564 * MIB, 1008e9, 165e12),
        GPU("RTX 5090 32GB", 32_607 * MIB, 1792e9, 209.5e12, PCIE_5),
        GPU("RTX PRO 6000 96GB", 97_887 * MIB, 1792e9, 503.8e12, PCIE_5),
        GPU("A100 40GB", 40_960 * MIB, 1555e9, 312e12, 300e9),
        GPU("A100 80GB", 81_920 * MIB, 2039e9, 312e12, 300e9),
        GPU("H100 80GB", 81_559 * MIB, 3350e9, 989e12, 450e9),
        GPU("H200 141GB", 143_771 * MIB, 4800e9, 989e12, 450e9),
        GPU("H20 96GB", 97_871 * MIB, 4000e9, 148e12, 450e9),
        GPU("B200 180GB", 183_359 * MIB, 8000e9, 2250e12, 900e9),
        GPU("MI300X 192GB", 196_592 * MIB, 5300e9, 1307e12, 448e9),
    )
}


def find_gpu(name: str) -> GPU:
    """The card of a name as people write it ("rtx4090", "H100") or as its driver does ("NVIDIA GeForce RTX 4090"). Of
    a card that was sold with more or less memory the larger one, unless it is named. Raises InputError."""
    wanted = _words(name)
    fits = [gpu for gpu in HARDWARE.values() if re.search(rf"\b{_words(gpu.product).replace(' ', ' ?')}(?!\d)", wanted)]
    if not fits:
        raise InputError(f"--gpu {name!r}: must be one of {', '.join(HARDWARE)}")
    exact = [gpu for gpu in fits if gpu.name.rsplit(" ", 1)[1].lower() in wanted]
    return max(exact or fits, key=lambda gpu: gpu.memory)


def _words(name: str) -> str:
    """What tells cards apart, in small letters."""
    return re.sub(r"nvidia|geforce|rtx|[^a-z0-9]+", " ", name.lower()).strip()
