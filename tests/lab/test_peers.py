"""Other engines: how they are asked, how they are ended, and that a twin has our shapes."""

from __future__ import annotations

import common

import sys

import pytest
import torch

from lab import peers, roofline

PEER = """import json, sys
print("a library says hello", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["command"] == "end":
        break
    print("noise\\n" + json.dumps({"seconds": 1e-3, "heard": request["command"], "dtype": sys.argv[2]}), flush=True)
"""


def test_talking_to_a_peer(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "vllm_peer.py").write_text(PEER)
    monkeypatch.setattr(common, "ROOT", tmp_path)
    with peers.vllm_peer(sys.executable, tmp_path, "float32") as ask:
        assert ask(command="schedule") == {"seconds": 1e-3, "heard": "schedule", "dtype": "float32"}
        with pytest.raises(common.InputError, match="it ended"):
            ask(command="end")
    nobody = peers.vllm_peer("no/such/python", tmp_path, "float32")
    with pytest.raises(common.InputError, match="No such file"), nobody:
        pass


def test_an_environment_without_vllm_is_one_line(tmp_path):
    peer = peers.vllm_peer(sys.executable, tmp_path, "float32")
    with peer as ask, pytest.raises(common.InputError, match="it ended"):
        ask(command="schedule", running=1, waiting=0, steps=1)


@pytest.mark.slow
def test_random_twins(monkeypatch):
    """What a GPU is measured with: the same shapes on both sides, and a time for each."""
    shape = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=64,
                 intermediate_size=96, vocab_size=300, tie_word_embeddings=False)  # fmt: skip
    monkeypatch.setitem(roofline.MODELS, "tiny", shape)
    ours, theirs = peers.random_twins("tiny")
    assert ours.num_parameters == sum(p.numel() for p in theirs.parameters())
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert peers.transformers_ms(theirs, 2) > 0
