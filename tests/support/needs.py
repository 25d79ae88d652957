"""What a test may need that a machine lacks: marks, each with its reason."""

from __future__ import annotations

import common

import pytest
import torch

from engine.quantization.packed_weight import on_hopper

triton = pytest.mark.skipif(not common.HAS_TRITON, reason="no Triton wheel on this platform: nothing to compile")
hopper = pytest.mark.skipif(
    common.INTERPRET or not on_hopper(torch.empty(0, device=common.device())), reason="needs an H100 or H200"
)
