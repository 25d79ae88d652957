from engine.core.block_pool import BlockPool
from engine.lora.config import LoRAConfig
from engine.lora.lora_model import random_adapter
from engine.lora.manager import LoRAModelManager
from engine.model import llama


def guard():
    model = llama.random_model()
    manager = LoRAModelManager(LoRAConfig(2, 8, max_cpu_loras=3))
    manager.attach(model, None)
    manager.block_pool = BlockPool(2)
    for name in ("hot", "a", "b"):
        manager.add_adapter(name, random_adapter(model.config, 2, 1))
    for name in ("hot", "a", "hot", "b"):
        assert manager.make_resident(name, set())
    assert set(manager.slots) == {"hot", "b"}
