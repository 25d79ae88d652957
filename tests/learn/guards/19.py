import torch

from engine.request import Request, SamplingParams
from engine.worker.input_batch import InputBatch


def guard():
    batch = InputBatch(max_num_seqs=1, max_model_len=16, block_size=4)
    for name, blocks in (("a", [1, 2]), ("b", [3, 4])):
        batch.add(name)
        row = batch.update(Request(name, list(range(8)), SamplingParams()), blocks)
        _, meta = batch.prepare([row], [8], [8], torch.device("cpu"))
        assert meta.block_table.tolist() == [blocks]
        batch.remove(name)
