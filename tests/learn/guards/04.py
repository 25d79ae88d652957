from engine.core.block_pool import BlockPool


def guard():
    pool = BlockPool(8)
    blocks = pool.allocate(3)
    pool.free(blocks)
    pool.touch(blocks)
    assert pool.num_free_blocks == 4
    assert not set(pool.allocate(4)) & set(blocks)
