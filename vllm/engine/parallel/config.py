"""How one engine is spread over ranks: who has which layers, and which shard of them.

Owns the numbers; read by workers, executors and the engine core. It never opens a connection. vLLM:
`vllm/config/parallel.py`, `vllm/distributed/utils.py:get_pp_indices`.
"""

from __future__ import annotations

import common

import dataclasses
from dataclasses import dataclass

from engine.choices import ALL2ALL_BACKENDS
from engine.model.config import LlamaConfig
from engine.parallel.sharding import check_tensor_parallel_size


@dataclass(frozen=True)
class ParallelConfig:
    """How one engine is spread. Rank r is shard r % TP of stage r // TP, as in vLLM: neighbours talk most."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    distributed_executor_backend: str | None = None  # None: uni for one rank, mp for more
    async_scheduling: bool = False
    enable_expert_parallel: bool = False  # ranks have whole experts, not a slice of each
    all2all_backend: str = ALL2ALL_BACKENDS[0]  # and talk in one of these ways
    enable_eplb: bool = False  # experts move to where they had better be
    num_redundant_experts: int = 0  # slots of a layer beyond one for each expert
    eplb_step_interval: int = 3000  # steps between two moves
    data_parallel_size: int = 1  # engines that share their experts; of others, none knows another
    data_parallel_rank: int = 0  # which of them this is
    data_parallel_master_port: int = 0  # where their workers meet

    @property
    def world_size(self) -> int:
        """Workers of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def expert_ranks(self) -> int:
        """Ranks that deal the experts out among them."""
        return self.tensor_parallel_size * self.data_parallel_size

    def shared_experts(self, config: LlamaConfig) -> LlamaConfig:
        """The same model; how its ranks share experts, if it has any and if they do."""
        moe = config.moe
        if moe and self.enable_expert_parallel:
            moe = dataclasses.replace(moe, expert_parallel=self.all2all_backend)
        if moe and self.enable_eplb:
            spare = self.num_redundant_experts
            moe = dataclasses.replace(moe, eplb_step_interval=self.eplb_step_interval, num_redundant_experts=spare)
        return dataclasses.replace(config, moe=moe)

    @property
    def backend(self) -> str:
        several = self.world_size * self.data_parallel_size > 1
        return self.distributed_executor_backend or ("mp" if several else "uni")

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
        moe, n = config.moe, self.tensor_parallel_size
        ranks = "tensor_parallel_size" + (" x data_parallel_size" if self.data_parallel_size > 1 else "")
        if self.enable_expert_parallel:
            if moe is None:
                raise common.InputError("enable_expert_parallel: this model has no experts")
            if self.expert_ranks > moe.num_experts:
                raise common.InputError(f"{ranks} {self.expert_ranks}: must be at most num_experts ({moe.num_experts})")
        slots = moe.num_experts + self.num_redundant_experts if moe else 0
        if self.enable_eplb and slots % self.expert_ranks:
            raise common.InputError(
                f"num_redundant_experts {self.num_redundant_experts}: {ranks} ({self.expert_ranks}) must divide "
                f"num_experts and these ({slots})"
            )
        check_tensor_parallel_size(self.shared_experts(config), n)


def get_pp_indices(num_hidden_layers: int, pp_rank: int, pp_size: int) -> tuple[int, int]:
    """The layers [start, end) of a stage. What does not divide goes to the stages before the last, which has the
    output matrix to compute, too (`vllm/distributed/utils.py`)."""
    sizes = [num_hidden_layers // pp_size] * pp_size
    for i in range(2, num_hidden_layers % pp_size + 2):
        sizes[-i] += 1
    start = sum(sizes[:pp_rank])
    return start, start + sizes[pp_rank]
