from engine.core.kv_cache_manager import KVCacheManager
from engine.request import Request, SamplingParams


def guard():
    manager = KVCacheManager(num_blocks=16, block_size=4, max_model_len=64)
    for length in (7, 8, 9):
        request = Request("r", list(range(length)), SamplingParams())
        manager.allocate_slots(request, length)
        manager.free(request)
        blocks, found = manager.get_computed_blocks(Request("again", list(range(length)), SamplingParams()))
        assert found < length and found == 4 * len(blocks) == (length - 1) // 4 * 4
