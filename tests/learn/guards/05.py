from engine.core.block_pool import BlockPool


def guard():
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    for i, block in enumerate(blocks):
        pool.cache_block(block, bytes([i]))
    pool.free(blocks)
    pool.allocate(1)
    assert [pool.get_cached_block(bytes([i])) for i in range(4)] == [*blocks[:3], None]
