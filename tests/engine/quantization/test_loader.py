"""A folder's own wishes reach the model's configuration, quantized or not."""

from __future__ import annotations

import pytest
import torch

from engine.quantization.loader import load_model


@pytest.mark.parametrize("quantization", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_a_folder_says_when_an_answer_of_an_engine_ends(tmp_path, quantization):
    """--generation-config FOLDER, from the flag to the engine's sampler."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    model, _ = load_model(None, torch.float32, quantization, str(tmp_path))
    assert model.config.eos_token_ids == (2, 5, 6)
