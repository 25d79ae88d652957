"""One rank's part of a linear layer, of the embedding and of the output matrix.

Owns which part of a whole weight a rank has (`shard`, used when loading) and what happens at run time; a model's layers
are these. What multiplies is `local`, a `llama.Linear` or what was put in its place: a layer here never multiplies.
vLLM: `vllm/model_executor/layers/linear.py`, `vllm/model_executor/layers/vocab_parallel_embedding.py`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F

from engine.distributed.group import GroupCoordinator
from engine.model import llama
from engine.parallel.sharding import pad_vocab_size


class LocalLinear(Protocol):
    """What multiplies on this rank."""

    @property
    def weight(self) -> Any: ...

    @property
    def bias(self) -> Any: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class ParallelLinear:
    """One rank's part of a linear layer, as an entry of `model.linear`."""

    def __init__(self, local: LocalLinear, group: GroupCoordinator) -> None:
        self.local, self.group = local, group

    @property
    def weight(self) -> torch.Tensor:
        return self.local.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.local.bias


class ColumnParallelLinear(ParallelLinear):
    """y_r = x W_rᵀ (+ b_r): the whole input, an n-th of the outputs. Shapes: x [T, in] -> [T, out/n].

    (Columns of Wᵀ, that is: the literature writes y = xA, a checkpoint stores W = Aᵀ, and cuts its rows.)
    """

    @staticmethod
    def shard(tensor: torch.Tensor, rank: int, n: int) -> torch.Tensor:
        """Output rows [rank·out/n, (rank+1)·out/n) of a weight [out, in] or a bias [out]."""
        size = tensor.shape[0] // n
        return tensor[rank * size : (rank + 1) * size]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.local(x)  # without a collective


# Several matrices with one input, stacked (gate above up). Each is cut before they are stacked: a cut through the stack
# would give rank 0 all gates and rank 1 all ups. `Llama` stacks after `shard`, so there is nothing left to do.
MergedColumnParallelLinear = ColumnParallelLinear


class QKVParallelLinear(ColumnParallelLinear):
    """Column-parallel by whole heads. Shapes: x [T, hidden] -> [T, (Hq/n + 2·max(1, Hkv/n)) · D]."""

    @staticmethod
    def shard(  # pyright: ignore[reportIncompatibleMethodOverride]: whole heads, however many
        tensor: torch.Tensor, rank: int, n: int, heads: int
    ) -> torch.Tensor:
        """The rows of this rank's heads. With more ranks than KV heads, n/heads neighbours get the same one."""
        D, first, count = tensor.shape[0] // heads, rank * heads // n, max(1, heads // n)
        return tensor[first * D : (first + count) * D]


class RowParallelLinear(ParallelLinear):
    """y = Σ_r x_r W_rᵀ (+ b): an n-th of the input, a partial sum of all outputs, one all-reduce.
    Shapes: x_r [T, in/n] -> [T, out], the same on all ranks."""

    reduce_results = True

    def __init__(self, local: LocalLinear, group: GroupCoordinator) -> None:
        if group.rank_in_group > 0 and local.bias is not None:  # or the sum would contain it n times
            local = llama.Linear(local.weight)
        super().__init__(local, group)

    @staticmethod
    def shard(tensor: torch.Tensor, rank: int, n: int) -> torch.Tensor:
        """Input columns [rank·in/n, (rank+1)·in/n) of a weight [out, in]."""
        size = tensor.shape[1] // n
        return tensor[:, rank * size : (rank + 1) * size]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.local(x)
        return self.group.all_reduce(y) if self.reduce_results else y


class VocabParallelEmbedding:
    """E[token], where rank r owns the rows [r·V/n, (r+1)·V/n). Shapes: token_ids [T] -> [T, hidden].

    A rank that does not own a token contributes zeros, so the all-reduce completes the lookup.
    """

    def __init__(self, weight: torch.Tensor, group: GroupCoordinator) -> None:
        self.weight, self.group = weight, group

    @staticmethod
    def shard(weight: torch.Tensor, rank: int, n: int) -> torch.Tensor:
        """Rows of one rank, V padded to a multiple of n; the padding is zeros at the end of the last ranks."""
        size = pad_vocab_size(weight.shape[0], n) // n
        rows = weight[rank * size : (rank + 1) * size]
        return F.pad(rows, (0, 0, 0, size - rows.shape[0])) if rows.shape[0] < size else rows

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        local = token_ids - self.group.rank_in_group * self.weight.shape[0]
        owned = (local >= 0) & (local < self.weight.shape[0])  # [T]
        rows = F.embedding(torch.where(owned, local, 0), self.weight)
        return self.group.all_reduce(rows * owned[:, None])


class ParallelLMHead(ParallelLinear):
    """logits = concat_r(x E_rᵀ) without the padding. Shapes: x [R, hidden] -> [R, vocab]."""

    def __init__(self, local: LocalLinear, group: GroupCoordinator, vocab_size: int) -> None:
        super().__init__(local, group)
        self.vocab_size = vocab_size

    shard = staticmethod(VocabParallelEmbedding.shard)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.all_gather(self.local(x))[:, : self.vocab_size]
