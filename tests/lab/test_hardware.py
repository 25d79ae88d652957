"""Cards, by the names that people and drivers give them."""

from __future__ import annotations

import common

import pytest

from lab.hardware import HARDWARE, find_gpu

NAMES = {
    "NVIDIA GeForce RTX 4090": "RTX 4090 24GB", "rtx4090": "RTX 4090 24GB", "4090": "RTX 4090 24GB",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000 96GB", "rtxpro6000": "RTX PRO 6000 96GB",
    "NVIDIA A100-SXM4-40GB": "A100 40GB", "A100": "A100 80GB", "NVIDIA A10": "A10 24GB",
    "NVIDIA H100 80GB HBM3": "H100 80GB", "H200": "H200 141GB", "NVIDIA H20": "H20 96GB", "l4": "L4 24GB",
    "NVIDIA L40S": "L40S 48GB", "NVIDIA RTX A6000": "RTX A6000 48GB", "NVIDIA B200": "B200 180GB",
    "AMD Instinct MI300X": "MI300X 192GB",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_card_is_found(name):
    assert find_gpu(name).name == NAMES[name]


def test_every_card_is_found_by_its_own_name():
    assert all(find_gpu(name) is gpu for name, gpu in HARDWARE.items())


@pytest.mark.parametrize("name", ["", "TPU v5", "L40", "RTX 40900", "H2000"])
def test_an_unknown_card_is_told_which_are_known(name):
    with pytest.raises(common.InputError, match=r"--gpu.*RTX 4090 24GB"):
        find_gpu(name)
