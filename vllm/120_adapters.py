"""120 · Adapters: what is in the file, where it lies in memory, and who is resident. The lower half of lesson 12.

An adapter leaves every weight matrix W of a model as it is and adds a product of two thin ones,
y = x Wᵀ + s · (x Aᵀ) Bᵀ with A [r, in] and B [out, r]. On disk it is a folder in PEFT's format: adapter_config.json
says r and s, adapter_model.safetensors holds A and B under the names of Transformers' modules. In memory it lies either
in a slot, as in vLLM, or in blocks of the KV cache, as in S-LoRA; the kernels find it through tables with an address
per row. Two LRU caches decide which adapters are in CPU memory, and which few the model can use now.

Read for this: Hu et al. 2021 (LoRA), Kalajdzievski 2023 (rsLoRA), Sheng et al. 2023 (S-LoRA: unified paging), PEFT's
`LoraConfig`, vLLM 0.32 `lora/peft_helper.py`, `lora/lora_model.py`, `lora/model_manager.py`, `lora/worker_manager.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import concurrent.futures
import copy
import dataclasses
import hashlib
import itertools
import json
import math
import os
import stat
import sys
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import llama

# --- What can be adapted ----------------------------------------------------------------------------------------------

# Packed layer -> the modules of Transformers that lie in it as slices of its output, in this order.
PACKED_MODULES = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"), "down_proj": ("mlp.down_proj",),
}  # fmt: skip
TARGETS = tuple(name.split(".")[1] for names in PACKED_MODULES.values() for name in names)
SHIPPED = common.HERE / "adapters"


@dataclass(frozen=True)
class LayerShape:
    """A packed linear layer: its input, and the widths of the slices of its output."""

    in_features: int
    slices: tuple[int, ...]


def layer_shapes(config: llama.LlamaConfig) -> dict[str, LayerShape]:
    """Shape of each kind of packed layer; all decoder layers have the same."""
    c = config
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    return {
        "qkv_proj": LayerShape(c.hidden_size, (q, kv, kv)), "o_proj": LayerShape(q, (c.hidden_size,)),
        "gate_up_proj": LayerShape(c.hidden_size, (c.intermediate_size,) * 2),
        "down_proj": LayerShape(c.intermediate_size, (c.hidden_size,)),
    }  # fmt: skip


Slices = tuple[tuple[torch.Tensor, torch.Tensor] | None, ...]  # of each slice: A [r, in] and s·B [out, r], or nothing


@dataclass
class LoRAModel:
    """An adapter in CPU memory (`vllm/lora/lora_model.py`). The scale s is multiplied into B, once and for all."""

    name: str
    rank: int
    weights: dict[str, Slices]  # "layers.0.qkv_proj" -> A and B of its slices; a layer that is not adapted is not there
    fingerprint: str = ""  # of the bytes that it was read from; nothing if it never was in a file

    @property
    def num_parameters(self) -> int:
        return sum(a.numel() + b.numel() for pairs in self.weights.values() for a, b in filter(None, pairs))


def random_adapter(config: llama.LlamaConfig, rank: int, seed: int, name: str | None = None, size: float = 0.3,
                   targets: Sequence[str] = TARGETS, dtype: torch.dtype = torch.float32) -> LoRAModel:  # fmt: skip
    """A seeded adapter that changes each layer's output by roughly the share `size` of its input."""
    generator = torch.Generator().manual_seed(seed)
    noise = lambda rows, columns, scale: (  # noqa: E731
        torch.randn(rows, columns, generator=generator) * scale
    ).to(dtype)
    weights = {}
    for i in range(config.num_hidden_layers):
        for packed, shape in layer_shapes(config).items():
            pairs = tuple(
                (noise(rank, shape.in_features, shape.in_features**-0.5), noise(out, rank, size * rank**-0.5))
                if module.split(".")[1] in targets else None
                for module, out in zip(PACKED_MODULES[packed], shape.slices)
            )  # fmt: skip
            if any(pairs):
                weights[f"layers.{i}.{packed}"] = pairs
    return LoRAModel(name or f"random-{seed}", rank, weights)


def merged(model: llama.Llama, lora: LoRAModel) -> llama.Llama:
    """The model with W + s·B·A in place of W: no cost per token, and no other adapter beside it."""
    new = copy.copy(model)
    new.linear = dict(model.linear)
    for name, pairs in lora.weights.items():
        old = model.linear[name]
        weight, start = old.weight.clone(), 0
        for pair, out in zip(pairs, layer_shapes(model.config)[name.split(".")[2]].slices):
            if pair is not None:
                a, b = (t.to(weight.device, torch.float32) for t in pair)
                weight[start : start + out] += (b @ a).to(weight.dtype)
            start += out
        new.linear[name] = llama.Linear(weight, old.bias)
    return new


# --- The format: PEFT's folder ----------------------------------------------------------------------------------------

PREFIX = "base_model.model.model."
# What vLLM refuses, too: features that change what A and B mean. Field -> the only values that change nothing.
PLAIN = {
    "use_dora": (False, None), "bias": ("none", None), "lora_bias": (False, None), "modules_to_save": (None, []),
    "rank_pattern": (None, {}), "alpha_pattern": (None, {}), "layer_replication": (None,), "use_qalora": (False, None),
    "alora_invocation_tokens": (None, []), "fan_in_fan_out": (False, None), "trainable_token_indices": (None, [], {}),
}  # fmt: skip


MAX_CONFIG_BYTES = 1 << 20


def read_file(path: Path, limit: int) -> bytes:
    """A file's content, at most `limit` bytes. Raises InputError.

    Whoever loads an adapter names a path. A pipe or a device there may never answer, or never end: only regular files
    are read, and nothing that waits is opened. The content is read and not mapped: a mapped file that somebody cuts
    short ends the process that looks at it.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # before it is opened, which some devices answer to
            raise common.InputError(f"{path}: is not a regular file")
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # it was another one a moment ago
                raise common.InputError(f"{path}: is not a regular file")
            content = file.read(limit + 1)
    except FileNotFoundError:
        raise common.InputError(f"{path}: no such file") from None
    except common.InputError:
        raise
    except (OSError, ValueError) as error:  # the path may have a null byte
        raise common.InputError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > limit:
        raise common.InputError(f"{path}: has more than {limit:,} bytes")
    return content


def read_config(folder: Path, max_lora_rank: int | None = None, content: bytes | None = None) -> tuple[int, float]:
    """(rank, scale) of an adapter; `content` if the file has been read. Raises InputError that names file and field."""
    path = folder / "adapter_config.json"
    try:
        raw = json.loads(read_file(path, MAX_CONFIG_BYTES) if content is None else content)
    except (ValueError, RecursionError) as error:
        raise common.InputError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(raw, dict):
        raise common.InputError(f"{path}: holds a JSON {type(raw).__name__}, expected an object")
    if raw.get("peft_type", "LORA") != "LORA":
        raise common.InputError(f"{path}: peft_type {raw['peft_type']!r}; allowed: 'LORA'")
    rank, alpha = raw.get("r"), raw.get("lora_alpha", 8)
    if type(rank) is not int or not 0 < rank < 2**31:
        raise common.InputError(f"{path}: r is {rank!r}, expected a positive whole number")
    if max_lora_rank is not None and rank > max_lora_rank:
        raise common.InputError(f"{path}: LoRA rank {rank} is greater than max_lora_rank {max_lora_rank}")
    if type(alpha) not in (int, float) or not abs(alpha) <= sys.float_info.max:
        raise common.InputError(f"{path}: lora_alpha is {alpha!r}, expected a number")
    for field, allowed in PLAIN.items():
        if field in raw and raw[field] not in allowed:
            raise common.InputError(f"{path}: {field} {raw[field]!r:.60} is not supported; allowed: {allowed[0]!r}")
    init = raw.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in ("gaussian", "eva", "orthogonal"):
        raise common.InputError(f"{path}: init_lora_weights {init!r} changes the base model; allowed: true, 'gaussian'")
    return rank, alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank)


def read_adapter(folder: str | Path, config: llama.LlamaConfig, name: str | None = None,
                 max_lora_rank: int | None = None, dtype: torch.dtype = torch.float32) -> LoRAModel:  # fmt: skip
    """Load and check a PEFT folder for a model with this `config`.

    Every tensor must be one that the model has a place for, in the right shape, finite in `dtype` (B times the scale),
    and with its partner: an adapter of another model is refused here, not in the middle of a forward pass. Each file is
    read once, and the fingerprint is that of what was read. Raises InputError.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    folder = Path(os.path.expanduser(folder))  # a user who is not known stays as written
    if not os.path.isdir(folder):  # or it may not be looked at
        raise common.InputError(f"{folder}: no such adapter folder")
    about = read_file(folder / "adapter_config.json", MAX_CONFIG_BYTES)
    rank, scale = read_config(folder, max_lora_rank, about)
    path = folder / "adapter_model.safetensors"
    content = read_file(path, largest_file(config, rank))
    fingerprint = hashlib.sha256(hashlib.sha256(about).digest() + content).hexdigest()
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise common.InputError(f"{path}: {error}") from None
    del content

    found: dict[str, Slices] = {}
    for i in range(config.num_hidden_layers):
        for packed, shape in layer_shapes(config).items():
            pairs = []
            for module, out in zip(PACKED_MODULES[packed], shape.slices):
                pair = []
                for letter, wanted in (("A", (rank, shape.in_features)), ("B", (out, rank))):
                    key = f"{PREFIX}layers.{i}.{module}.lora_{letter}.weight"
                    tensor = tensors.pop(key, None)
                    if tensor is not None and tuple(tensor.shape) != wanted:
                        raise common.InputError(f"{path}: {key} has shape {list(tensor.shape)}, this model and rank "
                                                f"{rank} need {list(wanted)}")  # fmt: skip
                    if tensor is not None and not tensor.is_floating_point():
                        raise common.InputError(f"{path}: {key} is of {tensor.dtype}, expected floating-point numbers")
                    pair.append(tensor)
                if (pair[0] is None) != (pair[1] is None):
                    letter = "A" if pair[0] is None else "B"
                    raise common.InputError(f"{path}: lora_{letter} of layers.{i}.{module} is missing")
                if pair[0] is None:
                    pairs.append(None)
                    continue
                a, b = pair[0].to(dtype), (pair[1].float() * scale).to(dtype)
                for letter, weight, times in (("A", a, ""), ("B", b, f" times its scale {scale:g}")):
                    if not weight.isfinite().all():
                        raise common.InputError(f"{path}: lora_{letter} of layers.{i}.{module}{times} is not finite "
                                                f"in {dtype}")  # fmt: skip
                pairs.append((a, b))
            if any(pair is not None for pair in pairs):
                found[f"layers.{i}.{packed}"] = tuple(pairs)
    if tensors:
        raise common.InputError(f"{path}: {min(tensors)} has no place in this model")
    if not found:
        raise common.InputError(f"{path}: holds no LoRA weights")
    return LoRAModel(name or folder.name, rank, found, fingerprint)


def largest_file(config: llama.LlamaConfig, rank: int) -> int:
    """Bytes that an adapter's weights may have: every layer adapted, in fp64, and 16 MiB for their names."""
    columns = sum(shape.in_features * len(shape.slices) + sum(shape.slices) for shape in layer_shapes(config).values())
    return 8 * rank * columns * config.num_hidden_layers + (16 << 20)


def write_adapter(lora: LoRAModel, folder: str | Path, alpha: float, dtype: torch.dtype = torch.float16,
                  base: str = llama.DEFAULT_MODEL) -> None:  # fmt: skip
    """Write a PEFT folder: the scale alpha / rank is taken out of B again."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors, targets = {}, set()
    for name, pairs in lora.weights.items():
        _, i, packed = name.split(".")
        for module, pair in zip(PACKED_MODULES[packed], pairs):
            if pair is not None:
                targets.add(module.split(".")[1])
                key = f"{PREFIX}layers.{i}.{module}"
                tensors[f"{key}.lora_A.weight"] = pair[0].to(dtype).contiguous()
                tensors[f"{key}.lora_B.weight"] = (pair[1] * (lora.rank / alpha)).to(dtype).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_model.safetensors").chmod(0o644)
    llama._write_json(folder / "adapter_config.json", {
        "base_model_name_or_path": base, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
        "init_lora_weights": True, "lora_alpha": alpha, "lora_dropout": 0.0, "peft_type": "LORA", "r": lora.rank,
        "target_modules": sorted(targets), "task_type": "CAUSAL_LM", "use_dora": False, "use_rslora": False,
    })  # fmt: skip


# --- Where the weights lie: tables, then slots or pages ---------------------------------------------------------------


@dataclass
class LoRATables:
    """Where the weights of one kind of layer lie, for all slots and all decoder layers: element offsets into `pages`.

    Row r of slot s's A (of slice i) is the `in_features` numbers from a_rows[s, i, r] on; row r of its Bᵀ is the
    slice's width from b_rows[s, i, r] on. Rows at and above ranks[s, i] do not exist.
    """

    shape: LayerShape
    a_rows: torch.Tensor  # int64 [slots, slices, max_rank]
    b_rows: torch.Tensor  # int64 [slots, slices, max_rank]
    ranks: torch.Tensor  # int32 [slots, slices], 0: this slice is not adapted
    starts: torch.Tensor  # int32 [slices + 1], where each slice of the output begins

    @classmethod
    def empty(cls, shape: LayerShape, slots: int, max_rank: int, device: torch.device) -> LoRATables:
        table = torch.zeros(slots, len(shape.slices), max_rank, dtype=torch.int64, device=device)
        starts = torch.tensor([0, *np.cumsum(shape.slices)], dtype=torch.int32).to(device)
        ranks = torch.zeros(slots, len(shape.slices), dtype=torch.int32, device=device)
        return cls(shape, table, table.clone(), ranks, starts)

    @property
    def aligned(self) -> bool:
        """All rows begin at multiples of 16 elements, if their lengths are such: loads can be wide."""
        return all(n % 16 == 0 for n in (self.shape.in_features, *self.shape.slices))


class LoRAMemory:
    """Resident adapters: `num_slots` of them, each found through the tables. Subclasses decide where weights lie."""

    def __init__(self, model: llama.Llama, num_slots: int, max_rank: int) -> None:
        self.model, self.num_slots, self.max_rank = model, num_slots, max_rank
        self.shapes = layer_shapes(model.config)
        self.tables = {kind: LoRATables.empty(shape, num_slots, max_rank, model.device)
                       for kind, shape in self.shapes.items()}  # fmt: skip
        # For the CPU: matrices[slot][layer][kind] = (A of all adapted slices [n·rank, in], [(start, stop, Bᵀ) …])
        self.matrices: dict[int, Any] = {}
        self.pages: list[torch.Tensor] = []  # of each decoder layer, flat

    def parts(self, lora: LoRAModel) -> Iterator[tuple[str, list[int], list[tuple[str, int, int]]]]:
        """Per kind of layer: the slices that this adapter adapts, and its matrices as (letter, rows, width)."""
        for kind, shape in self.shapes.items():
            adapted = [i for i in range(len(shape.slices)) if any(
                (pairs := lora.weights.get(f"layers.{layer}.{kind}")) and pairs[i] is not None
                for layer in range(self.model.config.num_hidden_layers))]  # fmt: skip
            if adapted:
                yield kind, adapted, [("A", len(adapted) * lora.rank, shape.in_features),
                                      *(("B", lora.rank, shape.slices[i]) for i in adapted)]  # fmt: skip

    def rows_of(self, lora: LoRAModel, layer: int, kind: str, adapted: list[int]) -> list[torch.Tensor]:
        """The matrices of `parts`, with zeros where this layer has no adapter. B is transposed: a rank is a row."""
        pairs, shape = lora.weights.get(f"layers.{layer}.{kind}"), self.shapes[kind]
        zero = lambda i: (torch.zeros(lora.rank, shape.in_features), torch.zeros(shape.slices[i], lora.rank))  # noqa: E731
        chosen = [(pairs and pairs[i]) or zero(i) for i in adapted]
        return [torch.cat([a.to(self.model.dtype) for a, _ in chosen]), *(b.T.to(self.model.dtype) for _, b in chosen)]

    def write_tables(self, slot: int, rank: int, kind: str, adapted: list[int], offsets: list[list[int]]) -> None:
        """Enter element offsets of each matrix's rows into the tables of one slot."""
        table = self.tables[kind]
        ranks = [rank if i in adapted else 0 for i in range(len(table.shape.slices))]
        table.ranks[slot] = torch.tensor(ranks, dtype=torch.int32)
        for n, i in enumerate(adapted):
            table.a_rows[slot, i, :rank] = torch.tensor(offsets[0][n * rank : (n + 1) * rank])
            table.b_rows[slot, i, :rank] = torch.tensor(offsets[1 + n])

    def clear(self, slot: int) -> None:
        """The slot has no adapter any more; its memory can be somebody else's."""
        self.matrices.pop(slot, None)
        for table in self.tables.values():
            table.ranks[slot] = 0


class SlotMemory(LoRAMemory):
    """As vLLM: every slot has room for `max_rank` on every layer, whatever its adapter needs."""

    def __init__(self, model: llama.Llama, num_slots: int, max_rank: int) -> None:
        super().__init__(model, num_slots, max_rank)
        self.slot_elements = sum(
            max_rank * (shape.in_features * len(shape.slices) + sum(shape.slices)) for shape in self.shapes.values()
        )
        self.pages = [torch.zeros(num_slots * self.slot_elements, dtype=model.dtype, device=model.device)
                      for _ in range(model.config.num_hidden_layers)]  # fmt: skip

    def write(self, slot: int, lora: LoRAModel) -> None:
        """Copy an adapter into its slot, row behind row."""
        self.clear(slot)
        views: list[dict] = [{} for _ in self.pages]
        start = slot * self.slot_elements
        for kind, adapted, matrices in self.parts(lora):
            starts, offsets = [], []
            for _, rows, width in matrices:
                starts.append(start)
                offsets.append([start + r * width for r in range(rows)])
                start += rows * width
            self.write_tables(slot, lora.rank, kind, adapted, offsets)
            edges = [0, *np.cumsum(self.shapes[kind].slices).tolist()]
            for layer, flat in enumerate(self.pages):
                placed = []
                for first, values in zip(starts, self.rows_of(lora, layer, kind, adapted)):
                    placed.append(flat[first : first + values.numel()].view(values.shape))
                    placed[-1].copy_(values, non_blocking=True)
                views[layer][kind] = placed[0], [(edges[i], edges[i + 1], b) for i, b in zip(adapted, placed[1:])]
        self.matrices[slot] = views

    def layer(self, slot: int, layer: int, kind: str) -> Any:
        """(A, [(start, stop, Bᵀ) …]) of one layer, or None."""
        return self.matrices[slot][layer].get(kind)


class UnifiedMemory(LoRAMemory):
    """As S-LoRA: adapters live in blocks of the KV cache, as many as their rank needs, and none when they are gone.

    In each layer, block b is two pages of block_size · Hkv · D elements, one among the keys and one among the values.
    A matrix gets whole pages, a page as many of its rows as fit.
    """

    def __init__(self, model: llama.Llama, num_slots: int, max_rank: int, cache: Any) -> None:
        super().__init__(model, num_slots, max_rank)
        self.num_blocks = cache.layers[0].shape[1]
        self.page = cache.layers[0][0, 0].numel()
        self.pages = [kv_cache.view(-1) for kv_cache in cache.layers]
        widest = max(max(shape.in_features, *shape.slices) for shape in self.shapes.values())
        if widest > self.page:
            raise common.InputError(f"block_size: a page of {self.page} elements cannot hold a row of {widest}")

    def num_pages(self, matrices: Sequence[tuple[str, int, int]]) -> list[int]:
        return [-(-rows // (self.page // width)) for _, rows, width in matrices]

    def num_blocks_of(self, lora: LoRAModel) -> int:
        """⌈Σ over matrices of ⌈rows / rows per page⌉ / 2⌉."""
        return -(-sum(sum(self.num_pages(matrices)) for _, _, matrices in self.parts(lora)) // 2)

    def write(self, slot: int, lora: LoRAModel, blocks: Sequence[int]) -> None:
        """Copy an adapter into `blocks` (as many as `num_blocks_of`), wherever in the cache they are."""
        self.clear(slot)
        pages = [page for block in blocks for page in (block, block + self.num_blocks)]
        found: dict[str, Any] = {}
        for kind, adapted, matrices in self.parts(lora):
            taken, offsets = [], []
            for (_, rows, width), count in zip(matrices, self.num_pages(matrices)):
                mine, pages, per = pages[:count], pages[count:], self.page // width
                taken.append((torch.tensor(mine, device=self.model.device), per, rows, width))
                offsets.append([mine[r // per] * self.page + r % per * width for r in range(rows)])
            self.write_tables(slot, lora.rank, kind, adapted, offsets)
            for layer, flat in enumerate(self.pages):
                for (mine, per, rows, width), values in zip(taken, self.rows_of(lora, layer, kind, adapted)):
                    full = torch.zeros(len(mine) * per, width, dtype=values.dtype)
                    full[:rows] = values
                    flat.view(-1, self.page)[mine, : per * width] = full.view(len(mine), -1).to(flat.device)
            found[kind] = adapted, taken
        self.matrices[slot] = found

    def layer(self, slot: int, layer: int, kind: str) -> Any:
        """As SlotMemory.layer; here the rows are gathered from their pages."""
        if kind not in self.matrices[slot]:
            return None
        adapted, taken = self.matrices[slot][kind]
        pages, edges = self.pages[layer].view(-1, self.page), [0, *np.cumsum(self.shapes[kind].slices).tolist()]
        gathered = [
            pages.index_select(0, mine)[:, : per * width].reshape(-1, width)[:rows] for mine, per, rows, width in taken
        ]
        return gathered[0], [(edges[i], edges[i + 1], b) for i, b in zip(adapted, gathered[1:])]


# --- Who is resident: names, CPU memory, slots ------------------------------------------------------------------------


@dataclass
class LoRAConfig:
    """vLLM's limits (`vllm/config/lora.py`), and two choices of ours. Raises InputError."""

    max_loras: int = 1  # adapters in one step, and slots for them
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None  # adapters kept in CPU memory; None: max_loras
    memory: str = "slots"  # or "unified": pages of the KV cache (S-LoRA)
    fair: bool = False  # choose the next request by tokens served per adapter (VTC), not by arrival

    def __post_init__(self) -> None:
        for name, high in (("max_loras", 4096), ("max_lora_rank", 512)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= high:
                raise common.InputError(f"{name} {value!r}: must be a whole number from 1 to {high}")
        if self.max_cpu_loras is None:
            self.max_cpu_loras = self.max_loras
        if type(self.max_cpu_loras) is not int or self.max_cpu_loras < self.max_loras:
            raise common.InputError(
                f"max_cpu_loras {self.max_cpu_loras!r}: must be at least max_loras {self.max_loras}"
            )
        if self.memory not in ("slots", "unified"):
            raise common.InputError(f"memory {self.memory!r}: must be one of slots, unified")


@dataclass(frozen=True)
class LoRARequest:
    """What a caller names an adapter by (`vllm/lora/request.py`). A name has the same weights until it is removed."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""


Source = str | Path | LoRAModel | Callable[[], LoRAModel]


class AdapterReader:
    """Reads one adapter at a time, each on a thread of its own, and gives up on one that does not answer.

    A dead mount keeps whoever asks it in the kernel, where no signal reaches. Nobody waits for such a thread, not even
    the end of Python; but no more than `MAX_STUCK` are left behind.
    """

    DEADLINE = 30.0  # seconds for one adapter
    MAX_STUCK = 4

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.queue: deque[tuple[Future, Callable[..., Any], tuple]] = deque()
        self.current: Future | None = None
        self.stuck: list[threading.Thread] = []

    def submit(self, function: Callable[..., Any], *args: Any) -> Future:
        """Call it when its turn comes. The future ends within `DEADLINE` of that; until then it can be cancelled."""
        future: Future = Future()
        self.queue.append((future, function, args))
        self._next()
        return future

    def _next(self) -> None:
        with self.lock:
            while self.queue and self.current is None:
                future, function, args = self.queue.popleft()
                if future.set_running_or_notify_cancel():
                    self._start(future, function, args)

    def _start(self, future: Future, function: Callable[..., Any], args: tuple) -> None:
        self.stuck = [thread for thread in self.stuck if thread.is_alive()]
        if len(self.stuck) >= self.MAX_STUCK:
            future.set_exception(common.InputError(f"{len(self.stuck)} adapters before this one are still being read"))
            return
        self.current = future
        thread = threading.Thread(target=self._run, args=(future, function, args), daemon=True, name="lora")
        timer = threading.Timer(self.DEADLINE, self._give_up, args=(future, thread))
        timer.daemon = True
        future.add_done_callback(lambda future: timer.cancel())
        thread.start()
        timer.start()

    def _run(self, future: Future, function: Callable[..., Any], args: tuple) -> None:
        try:
            self._finish(future, function(*args), None)
        except BaseException as error:
            self._finish(future, None, error)

    def _give_up(self, future: Future, thread: threading.Thread) -> None:
        with self.lock:
            if self.current is future:
                self.stuck.append(thread)
        error = common.InputError(f"the adapter could not be read within {self.DEADLINE:g} seconds")
        self._finish(future, None, error)

    def _finish(self, future: Future, result: Any, error: BaseException | None) -> None:
        with self.lock:
            if self.current is not future:  # somebody has given up on it
                return
            self.current = None
        future.set_result(result) if error is None else future.set_exception(error)
        self._next()


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
        self.counts = Counter()  # "hit", "load", "evict", "read"
        self.memory: SlotMemory | UnifiedMemory | None = None
        self.meta: Any = None  # of the step that runs

    def attach(self, model: llama.Llama, cache: Any, block_pool: Any) -> None:
        """Take the memory for the slots; from here on adapters can become resident."""
        self.model_config, self.block_pool = model.config, block_pool
        make = UnifiedMemory if self.config.memory == "unified" else SlotMemory
        self.memory = make(model, self.config.max_loras, self.config.max_lora_rank,
                           *([cache] if self.config.memory == "unified" else []))  # fmt: skip

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
            self.counts["read"] += 1
            limit, dtype = self.config.max_lora_rank, self.memory.model.dtype
            return read_adapter(source, self.model_config, name, limit, dtype)
        if source.rank > self.config.max_lora_rank:
            raise common.InputError(f"{name}: LoRA rank {source.rank} is greater than max_lora_rank "
                                    f"{self.config.max_lora_rank}")  # fmt: skip
        return dataclasses.replace(source, name=name)

    def _keep(self, name: str, lora: LoRAModel) -> None:
        """Into CPU memory, if it is what the name has meant so far. Raises InputError."""
        known = self.fingerprints.setdefault(name, lora.fingerprint or f"generation {next(self.generation)}")
        if lora.fingerprint and lora.fingerprint != known:
            raise common.InputError(f"lora_name {name!r}: its files have changed since it was loaded; unload it and "
                                    "load it again")  # fmt: skip
        self.cpu[name] = lora

    def _make_room(self) -> None:
        while len(self.cpu) + len(self.loading) > self.config.max_cpu_loras:
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
        places = max(self.config.max_cpu_loras - len(self.cpu), self.config.max_loras)
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
        if blocks:
            self.blocks[name] = blocks
            self.memory.write(slot, lora, blocks)
        else:
            self.memory.write(slot, lora)
        return True

    def evict_idle(self, pinned: set[str]) -> bool:
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
        assert len(self.cpu) + len(self.loading) <= self.config.max_cpu_loras, "more in CPU memory than allowed"
