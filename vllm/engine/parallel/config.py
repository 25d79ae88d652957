"""How one engine is spread over ranks: who has which layers, and which shard of them.

Owns the numbers; read by workers, executors and the engine core. It never opens a connection. vLLM:
`vllm/config/parallel.py`, `vllm/distributed/utils.py:get_pp_indices`.
"""

from __future__ import annotations

import common

from dataclasses import dataclass

from engine.model.config import LlamaConfig
from engine.parallel.sharding import check_tensor_parallel_size


@dataclass(frozen=True)
class ParallelConfig:
    """How one engine is spread. Rank r is shard r % TP of stage r // TP, as in vLLM: neighbours talk most."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    distributed_executor_backend: str | None = None  # None: uni for one rank, mp for more
    async_scheduling: bool = False

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def backend(self) -> str:
        return self.distributed_executor_backend or ("mp" if self.world_size > 1 else "uni")

    @property
    def max_concurrent_batches(self) -> int:
        """Steps in flight: one per stage, or one that runs and the next."""
        return 2 if self.async_scheduling else self.pipeline_parallel_size

    @property
    def output_rank(self) -> int:
        """The rank that answers for all: the first shard of the last stage. Its peers have drawn the same tokens."""
        return self.world_size - self.tensor_parallel_size

    def check(self, config: LlamaConfig) -> None:
        """Raises InputError if this model cannot be spread like that."""
        if self.backend == "uni" and self.world_size > 1:
            raise common.InputError(
                f"distributed_executor_backend uni: one process cannot be {self.world_size} ranks; allowed: mp, ray"
            )
        if self.pipeline_parallel_size > config.num_hidden_layers:
            raise common.InputError(
                f"pipeline_parallel_size {self.pipeline_parallel_size}: must be at most "
                f"num_hidden_layers ({config.num_hidden_layers})"
            )
        check_tensor_parallel_size(config, self.tensor_parallel_size)


def get_pp_indices(num_hidden_layers: int, pp_rank: int, pp_size: int) -> tuple[int, int]:
    """The layers [start, end) of a stage. What does not divide goes to the stages before the last, which has the
    output matrix to compute, too (`vllm/distributed/utils.py`)."""
    sizes = [num_hidden_layers // pp_size] * pp_size
    for i in range(2, num_hidden_layers % pp_size + 2):
        sizes[-i] += 1
    start = sum(sizes[:pp_rank])
    return start, start + sizes[pp_rank]
