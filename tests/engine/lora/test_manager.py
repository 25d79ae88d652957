"""Names of adapters, and what they stand for."""

from __future__ import annotations

from engine.lora.config import LoRAConfig
from engine.lora.lora_model import random_adapter
from engine.lora.manager import LoRAModelManager


def test_a_name_for_other_weights_has_another_fingerprint_though_neither_was_in_a_file(tiny_model):
    """It is in the keys of the prefix cache: the second adapter must not find what the first one computed."""
    manager = LoRAModelManager(LoRAConfig(2, 8))
    manager.attach(tiny_model, None)
    found = []
    for seed in range(3):
        manager.add_adapter("a", random_adapter(tiny_model.config, 4, seed))
        found.append(manager.fingerprint("a"))
        manager.remove_adapter("a")
    assert all(found) and len(set(found)) == 3
