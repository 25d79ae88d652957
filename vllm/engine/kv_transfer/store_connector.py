"""No partner, only a place: full blocks under their hashes, for this engine tomorrow or another one today.

Owns what is read ahead and what is being written; the scheduler and a runner call it. A block that cannot be read is
never an error: it is computed. vLLM: `vllm/distributed/kv_transfer/kv_connector/v1/example_connector.py`, LMCache's.
"""

from __future__ import annotations

import functools
import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from engine.kv_transfer.base import KVConnectorBase
from engine.kv_transfer.config import KVTransferConfig
from engine.kv_transfer.kernels import scatter_kv
from engine.kv_transfer.store import KVStore
from engine.output import KVConnectorOutput
from engine.request import Request


class StoreConnector(KVConnectorBase):
    """No partner, only a place: full blocks under their hashes (lesson 05), for this engine tomorrow or another today.

    A hit is loaded inside the step that needs it, layer by layer, in front of the model: a thread reads and verifies
    layer i + 1 while layer i is computed. A block that turns out to be unreadable makes the step's result void for
    whoever has it in its table; the scheduler lets them compute it after all, or ends them, by policy.
    """

    needs_hashes = True

    def __init__(self, config: KVTransferConfig) -> None:
        super().__init__(config)
        self.reader = ThreadPoolExecutor(1)
        self.layers_read: list[Future] = []
        self.num_saved_blocks: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self.void: set[int] = set()
        self.staged: dict[str, list[torch.Tensor]] = {}

    def register_kv_caches(self, layers: list[torch.Tensor], model: Any) -> None:
        """Opens the store; its keys begin with layout, block size and rank: others' bytes are no hit."""
        super().register_kv_caches(layers, model)
        self.store = KVStore(
            self.config.extra("folder", None),
            self.config.extra("cpu_bytes", 1 << 30),
            self.config.extra("disk_bytes", 0),
            len(layers),
        )
        part = f"{self.layout()}/{self.block_size}/{self.tp_size}/{self.tp_rank}"
        self.prefix = hashlib.sha256(part.encode()).hexdigest()[:12]

    def key(self, block_hash: bytes) -> str:
        return f"{self.prefix}-{block_hash.hex()[:40]}"

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Blocks in the store behind the local hit, without a gap. One token is left to compute, for its logits."""
        if not self.config.is_kv_consumer:
            return 0, False
        first, last = num_computed_tokens // self.block_size, (request.num_tokens - 1) // self.block_size
        found = 0
        for block_hash in request.block_hashes[first:last]:
            if self.store.find(self.key(block_hash)) is None:
                break
            found += self.block_size
        return found, False

    def update_state_after_alloc(self, request: Request, blocks: list[int], num_external_tokens: int) -> None:
        end = request.num_computed_tokens
        self.loads.append((request, blocks, end - num_external_tokens, end))

    def saves(self, request: Request) -> bool:
        return self.config.is_kv_producer

    def start_load_kv(self) -> None:
        """Start reading all layers of all hits; layer 0 first."""
        wanted = []  # (path, block)
        for request, blocks, first, end in self.meta.to_load:
            for i in range(first // self.block_size, end // self.block_size):
                wanted.append((self.store.find(self.key(request.block_hashes[i])), blocks[i]))
        read = functools.partial(self._read_layer, wanted)
        self.layers_read = [self.reader.submit(read, layer) for layer in range(len(self.layers) if wanted else 0)]

    def _read_layer(self, wanted: list[tuple[Path | None, int]], layer: int) -> list[tuple[int, torch.Tensor | None]]:
        found: list[tuple[int, torch.Tensor | None]] = []
        for path, block in wanted:
            payload = None
            if path is not None:  # else evicted since it was found
                try:
                    payload = self.store.read_layer(path, layer)
                    if payload.nbytes != self.layers[layer][:, 0].nbytes:
                        raise ValueError(f"{path.name}: layer {layer} has {payload.nbytes} bytes")
                except (OSError, ValueError):  # evicted meanwhile, cut short, changed
                    self.store.discard(path)
                    payload = None
            found.append((block, payload))
        return found

    def wait_for_layer_load(self, layer: int) -> None:
        """Scatter a layer that was read ahead; a block that cannot be read is `void` and is computed again."""
        if not self.layers_read:
            return
        kv_cache = self.layers[layer]
        shape = (len(kv_cache), self.block_size, *kv_cache.shape[3:])
        for block, payload in self.layers_read[layer].result():
            if payload is None:
                self.void.add(block)
                continue
            buffer = payload.to(kv_cache.device).view(kv_cache.dtype).view(shape)
            scatter_kv(buffer, kv_cache, self.table([block]), 0, 0)
            self.stats["bytes_in"] += buffer.nbytes

    def save_kv_layer(self, layer: int) -> None:
        """Copy the blocks that this step has filled."""
        for request, blocks, num_tokens in self.meta.to_save:
            for i in range(self.num_saved_blocks.get(request, 0), self._full_blocks(request, num_tokens)):
                key = self.key(request.block_hashes[i])
                if layer == 0 and self.store.find(key) is None:
                    self.staged[key] = []
                if key in self.staged and len(self.staged[key]) == layer:
                    self.staged[key].append(self.payload([blocks[i]], layer, 0, self.block_size, self.head, self.heads))

    def _full_blocks(self, request: Request, num_tokens: int) -> int:
        return min(num_tokens // self.block_size, len(request.block_hashes))

    def wait_for_save(self) -> None:
        """When the step is over, whoever asks finds its blocks; a step with void blocks has nothing to offer."""
        if not self.void:
            for key, layers in self.staged.items():
                self.store.put(key, layers)
            for request, _, num_tokens in self.meta.to_save:
                self.num_saved_blocks[request] = self._full_blocks(request, num_tokens)
        self.staged, self.layers_read = {}, []

    def get_finished(self) -> KVConnectorOutput:
        void, self.void = self.void, set()
        self.stats["void_blocks"] += len(void)
        return KVConnectorOutput(invalid_block_ids=void)

    def close(self) -> None:
        self.reader.shutdown(wait=False)
