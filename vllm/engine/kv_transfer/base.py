"""vLLM's verbs: who asks, who loads, who saves, who frees, and when; what all connectors have in common.

Owns an engine's blocks as the wire sees them; the scheduler calls it as `seams.SchedulerConnector`, a runner calls the
worker's half. It never decides what is transferred. vLLM: `vllm/distributed/kv_transfer/kv_connector/v1/base.py`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from engine.kv_transfer.config import KVTransferConfig
from engine.kv_transfer.digest import weights_digest
from engine.kv_transfer.frames import as_bytes, checksum
from engine.kv_transfer.heads import owned_heads
from engine.kv_transfer.kernels import gather_kv, scatter_kv
from engine.kv_transfer.params import check_kv_transfer_params, kv_transfer_params
from engine.output import KVConnectorMetadata, KVConnectorOutput, SchedulerOutput
from engine.request import Request


class KVConnectorBase:
    """Who asks, who loads, who saves, who frees, and when (`kv_connector/v1/base.py:KVConnectorBase_V1`).

        a request comes            on_new_request
        a request is admitted      get_num_new_matched_tokens   is more of it elsewhere? Now, or later?
        its blocks are there       update_state_after_alloc     then bring it here
        the step is planned        build_connector_meta         from the scheduler's half to the worker's
        before the model runs      start_load_kv
        before a layer's attention wait_for_layer_load
        after it                   save_kv_layer
        after the model            wait_for_save, get_finished
        a request has ended        request_finished             may its blocks be freed, or does somebody need them?

    vLLM makes two objects of it, one in the scheduler's process and one in each worker's; ours lives in one process.
    """

    fetches_later: ClassVar[bool] = False  # between steps, while its request waits
    needs_hashes: ClassVar[bool] = False  # of all full blocks, as lesson 05's prefix cache does
    patience: ClassVar[float | None] = None  # seconds after which an idle engine asks again for `has_pending_work`

    def __init__(self, config: KVTransferConfig) -> None:
        self.config, self.meta, self.stats = config, KVConnectorMetadata(), Counter()
        self.loads: list[tuple[Request, list[int], int, int]] = []
        self.wake = threading.Event()

    # -- the scheduler's half --

    @property
    def load_failure_policy(self) -> str:
        return self.config.kv_load_failure_policy or "fail"

    def on_new_request(self, request: Request) -> None:
        """Raises InputError if what it says about its keys and values makes no sense."""
        check_kv_transfer_params(kv_transfer_params(request))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """(tokens beyond `num_computed_tokens` that can be loaded, whether that takes longer than a step).

        The scheduler does not use the answer for a request that may not read the cache (`skip_reading_prefix_cache`).
        """
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: list[int], num_external_tokens: int) -> None:
        """The request has blocks; `num_external_tokens` of it are to be loaded into them."""

    def saves(self, request: Request) -> bool:
        """Does anybody else want what this request computes?"""
        return False

    def build_connector_meta(self, output: SchedulerOutput, tables: Mapping[str, list[int]]) -> KVConnectorMetadata:
        """The worker's orders for a step; `tables` are the block tables."""
        requests = (*output.scheduled_running_reqs, *output.scheduled_new_reqs, *output.scheduled_resumed_reqs)
        saves = [(r, tables[r.request_id], r.num_computed_tokens) for r in requests if self.saves(r)]
        loads, self.loads = self.loads, []
        return KVConnectorMetadata(loads, saves, list(output.preempted_reqs))

    def request_finished(self, request: Request, blocks: Sequence[int]) -> bool:
        """True: leave its blocks alone until `get_finished` names it among `finished_sending`. They are left alone in
        any case while they are being loaded: until it is named among `finished_recving`, or `failed_recving`."""
        return False

    def answer_params(self, request: Request) -> dict[str, Any] | None:
        """For the answer of a request whose blocks are kept: the kv_transfer_params of whoever goes on with it."""

    def has_pending_work(self) -> bool:
        """Must the engine go on stepping although nobody is scheduled?"""
        return False

    # -- the worker's half --

    def register_kv_caches(self, layers: list[torch.Tensor], model: Any) -> None:
        """The memory: [2, num_blocks, block_size, Hkv, D] for each layer, and [1, …] of latents; `model` is what they
        belong to."""
        self.layers, self.model = layers, model
        self.block_size = layers[0].shape[2]
        # A tensor-parallel rank holds some of the heads; all numbers on the wire are those of the whole model.
        group, self.num_kv_heads = getattr(model, "group", None), model.config.num_key_value_heads
        self.tp_rank, self.tp_size = (group.rank_in_group, group.world_size) if group else (0, 1)
        self.head, self.heads = owned_heads(self.num_kv_heads, self.tp_size, self.tp_rank)
        self.digest = weights_digest(model)

    def bind_connector_metadata(self, meta: KVConnectorMetadata | None) -> None:
        self.meta = meta or KVConnectorMetadata()

    def start_load_kv(self) -> None: ...

    def wait_for_layer_load(self, layer: int) -> None: ...

    def save_kv_layer(self, layer: int) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_finished(self) -> KVConnectorOutput:
        return KVConnectorOutput()

    def idle(self, seconds: float) -> None:
        """Nothing to compute: wait for news from the network, but not for longer."""
        self.wake.wait(seconds)
        self.wake.clear()

    def close(self) -> None: ...

    # -- for both kinds of connectors --

    def layout(self) -> str:
        """What two caches must have in common. Neither block size nor tensor-parallel degree is part of it."""
        c = self.model.config
        found = (c.num_hidden_layers, self.num_kv_heads, c.head_dim, self.layers[0].dtype, c.hidden_size, c.vocab_size)
        return "/".join(map(str, (*found, self.digest)))

    def table(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self.layers[0].device)

    def payload(  # noqa: PLR0913, a rectangle is five numbers
        self, blocks: Sequence[int], layer: int, first: int, count: int, head: int, heads: int
    ) -> torch.Tensor:
        """A rectangle of our cache as bytes; `head` is numbered as in the whole model."""
        found = gather_kv(self.layers[layer], self.table(blocks), first, count, head - self.head, heads)
        self.stats["bytes_out"] += found.nbytes
        return as_bytes(found)

    def write(self, blocks: Sequence[int], header: dict[str, Any], payload: torch.Tensor | None) -> bool:
        """A rectangle into our cache; False, and nothing is written, if its bytes are not those that were meant."""
        kv_cache = self.layers[header["layer"]]
        shape = (len(kv_cache), header["count"], header["heads"], kv_cache.shape[4])
        nbytes = kv_cache.element_size() * shape[0] * shape[1] * shape[2] * shape[3]
        if payload is None or payload.nbytes != nbytes or checksum(payload) != header["crc"]:
            return False
        buffer = payload.to(kv_cache.device).view(kv_cache.dtype).view(shape)
        scatter_kv(buffer, kv_cache, self.table(blocks), header["first"], header["head"] - self.head)
        self.stats["bytes_in"] += nbytes
        return True
