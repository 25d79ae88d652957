"""In which type of numbers a model computes."""

from __future__ import annotations

import common

import pytest
import torch

from engine.model.loader import find_dtype


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_gpu_without_bf16_computes_in_fp16(has_bf16, monkeypatch):
    assert find_dtype("auto") == (torch.bfloat16 if common.HAS_GPU else torch.float32)
    monkeypatch.setattr(common, "HAS_GPU", True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated=True: emulated or has_bf16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "T4")
    assert find_dtype("auto") == (torch.bfloat16 if has_bf16 else torch.float16)
    assert find_dtype("float16") == torch.float16 and find_dtype(torch.float32) == torch.float32
    if has_bf16:
        assert find_dtype("bfloat16") == torch.bfloat16
        return
    for dtype in ("bfloat16", torch.bfloat16):
        with pytest.raises(common.InputError, match="T4 has no bf16; take float16"):
            find_dtype(dtype)
