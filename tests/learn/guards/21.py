import torch

from engine.attention.metadata import AttentionMetadata


def guard():
    meta = AttentionMetadata.build([[1, 2], [3, 4]], [2, 6], [2, 3], block_size=4, device=torch.device("cpu"))
    assert meta.positions.tolist() == [0, 1, 3, 4, 5]
    assert meta.slot_mapping.tolist() == [4, 5, 15, 16, 17]
