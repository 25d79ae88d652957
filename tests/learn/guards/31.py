from engine import registry
from engine.model.llama import random_model
from engine.quantization.kv_codes import block_bytes


def guard():
    model = random_model()
    cache = registry.fill("cache.paged")(model, 3, 16)
    assert 3 * block_bytes(model, 16, "auto") == sum(layer.numel() * layer.element_size() for layer in cache.layers)
