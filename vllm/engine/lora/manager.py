"""Which adapters are known, which few are in CPU memory, and which the model can use now.

Owns names, fingerprints, both caches and the slots; the scheduler asks it as `seams.Adapters`, the engine adds and
removes. It never computes with an adapter, and never reads a file within a step.
vLLM: `vllm/lora/model_manager.py`, `vllm/lora/worker_manager.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import concurrent.futures
import dataclasses
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Container
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from engine.lora.config import LoRAConfig
from engine.lora.files import read_adapter
from engine.lora.layers import LoRAKernelMeta
from engine.lora.lora_model import LoRAModel
from engine.lora.memory import AdapterMemory, SlotMemory, UnifiedMemory
from engine.lora.reader import AdapterReader
from engine.model import llama
from engine.model.config import LlamaConfig
from engine.seams import BlockPool

Source = str | Path | LoRAModel | Callable[[], LoRAModel]


class LoRAModelManager:
    """Every adapter that may be asked for, the few in CPU memory, and the `max_loras` that the model can use now.

    Both caches drop what was used longest ago. Reading a file takes long, so a thread does it, and whoever needs the
    adapter waits outside the batch. (`vllm/lora/model_manager.py:LRUCacheLoRAModelManager`; vLLM reads in the worker,
    between two steps.)

    A name means the weights that were read first, until it is removed: their fingerprint is kept, and files that have
    changed meanwhile are refused. It is also what the adapter is called in the keys of the prefix cache.
    """

    def __init__(self, config: LoRAConfig) -> None:
        self.config = config
        self.max_cpu_loras = config.max_cpu_loras or config.max_loras
        self.sources: dict[str, Source] = {}
        self.fingerprints: dict[str, str] = {}  # of those that were read, for as long as the name is known
        self.generation = itertools.count(1)
        self.cpu: OrderedDict[str, LoRAModel] = OrderedDict()  # least recently used first
        self.loading: dict[str, Future] = {}  # the reader's, in its order; each has a place in CPU memory
        self.failed: dict[str, common.InputError] = {}  # what could not be read, until the next step
        self.slots: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self.free_slots = list(range(config.max_loras))[::-1]
        self.blocks: dict[str, list[int]] = {}  # of each resident adapter, in unified memory
        self.retired: set[str] = set()  # unloaded, but still used by requests that came before
        self.reader = AdapterReader()
        self.patience: float | None = None  # seconds that `wait` waits; None: until a reading ends
        self.counts = Counter()  # "hit", "load", "evict"
        self.memory: AdapterMemory | UnifiedMemory  # from `attach` on, as are the next two
        self.model_config: LlamaConfig
        self.block_pool: BlockPool
        self.meta: LoRAKernelMeta | None = None  # of the step that runs

    def attach(self, model: llama.Llama, cache: Any) -> None:
        """Take the memory for the slots; from here on adapters can become resident."""
        self.model_config = model.config
        slots, rank = self.config.max_loras, self.config.max_lora_rank
        unified = self.config.memory == "unified"
        self.memory = UnifiedMemory(model, slots, rank, cache) if unified else SlotMemory(model, slots, rank)

    # -- names --

    def add_adapter(self, name: str, source: Source) -> None:
        """Make a name known. An adapter that is given as a path is read and checked now. Raises InputError."""
        self.add_read(name, source, self.begin_reading(name, source).result())

    def begin_reading(self, name: str, source: Source) -> Future:
        """Have an adapter read that is to get this name: what `add_read` needs, later. Raises InputError."""
        if name in self.sources:
            why = "is still used by requests from before its removal" if name in self.retired else "is loaded already"
            raise common.InputError(f"lora_name {name!r}: {why}")
        return self.reader.submit(self._read, name, source)

    def add_read(self, name: str, source: Source, lora: LoRAModel) -> str:
        """Make a name known, with the weights that were read for it. Returns their fingerprint. Raises InputError."""
        if name in self.sources:
            raise common.InputError(f"lora_name {name!r}: is loaded already")
        self.add_lazily(name, source)
        self._keep(name, lora)
        self._make_room()
        return self.fingerprints[name]

    def add_lazily(self, name: str, source: Source) -> None:
        """Make a name known without looking at it: for thousands, and for what somebody has checked already."""
        self.sources[name] = source

    def knows(self, name: str) -> bool:
        return name in self.sources and name not in self.retired

    def remove_adapter(self, name: str, in_use: bool = False) -> None:
        """Forget a name. While requests still use it, its weights stay. Raises InputError if it is not known."""
        if name not in self.sources or (in_use and name in self.retired):
            raise common.InputError(f"lora_name {name!r}: is not loaded")
        if in_use:
            self.retired.add(name)
            return
        self.retired.discard(name)
        if name in self.slots:
            self._evict(name)
        self.cpu.pop(name, None)
        if future := self.loading.pop(name, None):
            future.cancel()
        self.fingerprints.pop(name, None)
        del self.sources[name]

    # -- CPU memory --

    def _read(self, name: str, source: Source) -> LoRAModel:
        if callable(source):
            source = source()
        if not isinstance(source, LoRAModel):
            limit, dtype = self.config.max_lora_rank, self.memory.dtype
            return read_adapter(source, self.model_config, name, limit, dtype)
        if source.rank > self.config.max_lora_rank:
            limit = self.config.max_lora_rank
            raise common.InputError(f"{name}: LoRA rank {source.rank} is greater than max_lora_rank {limit}")
        return dataclasses.replace(source, name=name)

    def _keep(self, name: str, lora: LoRAModel) -> None:
        """Into CPU memory, if it is what the name has meant so far. Raises InputError."""
        known = self.fingerprints.setdefault(name, lora.fingerprint or f"generation {next(self.generation)}")
        if lora.fingerprint and lora.fingerprint != known:
            raise common.InputError(
                f"lora_name {name!r}: its files have changed since it was loaded; unload it and load it again"
            )
        self.cpu[name] = lora

    def _make_room(self) -> None:
        while len(self.cpu) + len(self.loading) > self.max_cpu_loras:
            self.cpu.popitem(last=False)

    @property
    def max_loras(self) -> int:
        return self.config.max_loras

    @property
    def fair(self) -> bool:
        return self.config.fair

    @property
    def num_blocks(self) -> int:
        """KV blocks that hold adapters, in unified memory."""
        return sum(map(len, self.blocks.values()))

    def collect(self) -> None:
        """Take what the thread has read since the last step: within a step, nothing comes or fails."""
        self.failed = {}
        for name in [name for name, future in self.loading.items() if future.done()]:
            try:
                self._keep(name, self.loading.pop(name).result())
            except Exception as error:
                text = str(error) if isinstance(error, common.InputError) else repr(error)
                self.failed[name] = common.InputError(
                    f"lora_name {name!r}: {text.removeprefix(f'lora_name {name!r}: ')}"
                )

    def is_loaded(self, name: str) -> bool:
        """Is it in CPU memory, or resident? If not, the thread is to read it. Raises InputError if that failed.

        A reading takes a free place, or that of the adapter used longest ago: of those, no more at a time than can
        become resident. Who finds no place waits until a reading ends, and nobody who asks later gets there first.
        """
        if name in self.cpu or name in self.slots:
            return True
        if name not in self.sources:
            raise common.InputError(f"lora_name {name!r}: is not loaded")
        if name in self.failed:
            raise self.failed[name]
        places = max(self.max_cpu_loras - len(self.cpu), self.config.max_loras)
        if name not in self.loading and len(self.loading) < places:
            self.loading[name] = self.reader.submit(self._read, name, self.sources[name])
            self._make_room()
        return False

    def is_leaving(self, name: str) -> bool:
        """Does it wait for its last request to end, removed or not even read?"""
        return name in self.retired or name in self.loading

    def fingerprint(self, name: str) -> str:
        """Of the weights that the name stands for; they have been read."""
        return self.fingerprints[name]

    def release(self, name: str) -> None:
        """No request has this name any more. If it was removed, it goes now; a reading that did not begin is off."""
        if name in self.retired:
            self.remove_adapter(name)
        elif name in self.loading and self.loading[name].cancel():
            del self.loading[name]

    def wait(self) -> None:
        """Until a reading is over, however it ends: for a step that has nothing else to do."""
        if self.loading:
            concurrent.futures.wait(self.loading.values(), self.patience, concurrent.futures.FIRST_COMPLETED)

    # -- slots --

    def make_resident(self, name: str, pinned: set[str]) -> bool:
        """Give an adapter a slot, taking the least recently used one that is not `pinned`; False: there is no place."""
        if name in self.cpu:
            self.cpu.move_to_end(name)
        if name in self.slots:
            self.slots.move_to_end(name)
            self.counts["hit"] += 1
            return True
        lora = self.cpu[name]
        blocks: list[int] = []
        if isinstance(self.memory, UnifiedMemory):
            needed = self.memory.num_blocks_of(lora)
            while self.block_pool.num_free_blocks < needed:
                if not self.evict_idle(pinned):
                    return False
            blocks = self.block_pool.allocate(needed)
        if not self.free_slots and not self.evict_idle(pinned):
            self.block_pool.free(blocks)
            return False
        slot = self.slots[name] = self.free_slots.pop()
        self.counts["load"] += 1
        if isinstance(self.memory, UnifiedMemory):
            self.blocks[name] = blocks
            self.memory.write(slot, lora, blocks)
        else:
            self.memory.write(slot, lora)
        return True

    def evict_idle(self, pinned: Container[str | None]) -> bool:
        """Take the place of the least recently used adapter that is not `pinned`; False if all are."""
        victim = next((name for name in self.slots if name not in pinned), None)
        if victim is None:
            return False
        self._evict(victim)
        self.counts["evict"] += 1
        return True

    def give_blocks(self, pinned: set[str | None]) -> bool:
        """Evict an adapter that is not `pinned` for its KV blocks; False: none has any."""
        return bool(self.blocks) and self.evict_idle(pinned)

    def _evict(self, name: str) -> None:
        slot = self.slots.pop(name)
        self.memory.clear(slot)
        self.free_slots.append(slot)
        self.block_pool.free(self.blocks.pop(name, []))

    def check(self) -> None:
        """Raise AssertionError unless every slot is free or somebody's, and every owned block belongs to a resident."""
        assert sorted([*self.free_slots, *self.slots.values()]) == list(range(self.config.max_loras)), "a slot is lost"
        assert set(self.blocks) <= set(self.slots), "blocks without an adapter"
        assert set(self.slots) <= set(self.sources), "a slot for a name that is gone"
        assert len(self.cpu) + len(self.loading) <= self.max_cpu_loras, "more in CPU memory than allowed"
