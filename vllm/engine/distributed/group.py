"""The ranks that share a model: how they meet, and what they tell each other.

Owns collectives and their count, and the store where processes find each other; called by layers and by workers. It
knows tensors, never what they mean. vLLM: `vllm/distributed/parallel_state.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import datetime
import os
import socket
import sys
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


class GroupCoordinator:
    """The ranks that share a model, and a count of what they tell each other (`vllm/distributed/parallel_state.py`).

    `calls` and `bytes` are per collective; bytes are those of its result, counted once, but of an all-to-all.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank_in_group: int,
        device: torch.device | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.ranks, self.rank_in_group, self.world_size = list(ranks), rank_in_group, len(ranks)
        self.device, self.process_group = device or common.device(), process_group
        host = process_group is None or dist.get_backend(process_group) == "gloo"
        self.wire = torch.device("cpu") if host else self.device  # gloo moves host memory
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Semantics: out = Σ_r x_r on every rank. Shapes: any, contiguous; x may be overwritten."""
        if self.world_size == 1:
            return x
        out = x.to(self.wire)
        dist.all_reduce(out, group=self.process_group)
        self._count("all_reduce", out)
        return out.to(x.device)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Semantics: out = concat(x_0 … x_{n−1}) along `dim`, on every rank. Shapes: the same on all ranks."""
        if self.world_size == 1:
            return x
        mine = x.to(self.wire).contiguous()
        parts = [torch.empty_like(mine) for _ in self.ranks]
        dist.all_gather(parts, mine, group=self.process_group)
        out = torch.cat(parts, dim)
        self._count("all_gather", out)
        return out.to(x.device)

    def all_to_all(self, rows: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """Rank r gets the r-th `counts[r]` rows of everybody. Returns what came, by sender, and how much from each.

        How many rows come travels first. What is counted in `bytes` is what this rank sends to others. Shapes: [N, …].
        """
        if self.world_size == 1:
            return rows, list(counts)
        arriving = torch.empty(self.world_size, dtype=torch.int64, device=self.wire)
        dist.all_to_all_single(arriving, torch.tensor(counts, device=self.wire), group=self.process_group)
        received = torch.empty(int(arriving.sum()), *rows.shape[1:], dtype=rows.dtype, device=self.wire)
        dist.all_to_all_single(
            received, rows.to(self.wire).contiguous(), arriving.tolist(), list(counts), group=self.process_group
        )
        self._count_sent("all_to_all", rows, counts)
        return received.to(rows.device), arriving.tolist()

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Rank r's n-th of Σ_r x_r, by rows. Shapes: [T, H] -> [T/n, H]; n divides T."""
        if self.world_size == 1:
            return x
        out = torch.empty(len(x) // self.world_size, *x.shape[1:], dtype=x.dtype, device=self.wire)
        dist.reduce_scatter_tensor(out, x.to(self.wire).contiguous(), group=self.process_group)
        self._count("reduce_scatter", x)
        return out.to(x.device)

    def _count_sent(self, collective: str, rows: torch.Tensor, counts: Sequence[int]) -> None:
        leaving = sum(counts) - counts[self.rank_in_group]
        self.calls[collective] += 1
        self.bytes[collective] += leaving * rows[:1].numel() * rows.element_size()

    def _count(self, collective: str, result: torch.Tensor) -> None:
        self.calls[collective] += 1
        self.bytes[collective] += result.nbytes

    def take_counts(self) -> dict[str, dict[str, int]]:
        """What was counted since the last call."""
        counts = {name: {"calls": self.calls[name], "bytes": self.bytes[name]} for name in self.calls}
        self.calls.clear()
        self.bytes.clear()
        return counts


def meeting_point(host: str = "127.0.0.1") -> TCPStore:
    """A store where ranks find each other, on a port of its own (`.port`).

    It listens at `host` and nowhere else. Left alone, torch's store listens at all addresses of the machine, whatever
    host it is given, and does what anybody asks it to. Port 0: the kernel picks one that is free, and binds it at once.
    """
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def init_distributed(
    rank: int, world_size: int, port: int, host: str = "127.0.0.1", timeout: float = 120.0
) -> GroupCoordinator:
    """Join the process group whose store listens at `host:port`; blocks until all ranks are there.

    NCCL where every rank has a GPU of its own; otherwise gloo, which moves host memory.
    """
    gpus = torch.cuda.device_count() if common.HAS_GPU else 0
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    if host == "127.0.0.1" and (loopback := {"linux": "lo", "darwin": "lo0"}.get(sys.platform)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # a host name may resolve to a network that is not there
    span = datetime.timedelta(seconds=timeout)
    store = TCPStore(host, port, is_master=False, timeout=span)
    backend = "nccl" if gpus >= world_size else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=span)
    return GroupCoordinator(range(world_size), rank, device, dist.group.WORLD)


def new_group(ranks: Sequence[int], world: GroupCoordinator) -> GroupCoordinator | None:
    """A group of some ranks, ascending (tensor parallel inside a pipeline stage, say). Every rank must call this, and
    all must make their groups in the same order; a rank that does not belong to it gets None."""
    ranks, rank = sorted(ranks), world.ranks[world.rank_in_group]  # torch sorts them, too
    process_group = dist.new_group(ranks)
    if rank not in ranks:
        return None
    assert isinstance(process_group, dist.ProcessGroup), "only who does not belong to a group gets none"
    return GroupCoordinator(ranks, ranks.index(rank), world.device, process_group)
