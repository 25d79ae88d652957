from engine.core.kv_cache_manager import KVCacheManager
from engine.request import Request, SamplingParams


def guard():
    manager = KVCacheManager(num_blocks=16, block_size=4, max_model_len=64)
    found = []
    for version in ("old", "old", "new"):
        request = Request("r", list(range(9)), SamplingParams(), lora_name="legal")
        request.lora_fingerprint = version
        found.append(manager.get_computed_blocks(request)[1])
        manager.allocate_slots(request, 9)
        manager.free(request)
    assert found == [0, 8, 0]
