"""One rank's part of a model: some layers, and of these some heads and neurons.

Owns the groups that a rank belongs to and the loading of its part; called by a worker. It never runs a step. vLLM:
`vllm/distributed/parallel_state.py`, `vllm/model_executor/models/utils.py:PPMissingLayer`.
"""

from __future__ import annotations

import common

import contextlib
import dataclasses
import functools
import re
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from engine.distributed.group import GroupCoordinator, new_group
from engine.model import folders, llama, weights
from engine.model.config import LlamaConfig
from engine.model.dummy_weights import dummy_weights
from engine.model.packed_linear import pack_weights
from engine.parallel.config import ParallelConfig, get_pp_indices
from engine.parallel.model import TensorParallelLlama, map_local
from engine.parallel.shards import Tensors, model_tensors, shard_tensor
from engine.quantization.checkpoints import checkpoint_tensors, on_codes
from engine.quantization.gguf_codes import gguf_codes
from engine.quantization.loader import check_load_format, stored_quantization
from engine.quantization.methods import CALIBRATED, quantize_model
from engine.seams import Attend


class PipelineGroup(GroupCoordinator):
    """The same shard of every stage: hidden states go from each to the next."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.on_the_way: deque[tuple[Any, torch.Tensor]] = deque()
        self.waited = 0.0  # seconds in `recv`

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    def send(self, x: torch.Tensor) -> None:
        """Send to the next stage, and go on: a stage that waited until its neighbour listens would be no stage."""
        x = x.to(self.wire).contiguous()
        while len(self.on_the_way) >= self.world_size:  # never more than there can be micro-batches
            self.on_the_way.popleft()[0].wait()
        work = dist.isend(x, self.ranks[self.rank_in_group + 1], group=self.process_group)
        self.on_the_way.append((work, x))  # the buffer must live until it has left
        self._count("send", x)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What the stage before sent. Its shape needs no message: the step says how many tokens there are."""
        x, start = torch.empty(shape, dtype=dtype, device=self.wire), time.monotonic()
        dist.recv(x, self.ranks[self.rank_in_group - 1], group=self.process_group)
        self.waited += time.monotonic() - start
        return x.to(self.device)


def make_groups(world: GroupCoordinator | None, config: ParallelConfig) -> tuple[GroupCoordinator, PipelineGroup]:
    """This rank's tensor-parallel and pipeline-parallel groups. All ranks call this, and make all groups in order;
    where engines share experts, those of all engines are one world."""
    if world is None:
        return GroupCoordinator([0], 0), PipelineGroup([0], 0)
    n, size, mine = config.tensor_parallel_size, config.world_size, []
    rows = [range(first, first + n) for first in range(0, world.world_size, n)]
    engines = range(0, world.world_size, size)
    columns = [range(first + shard, first + size, n) for first in engines for shard in range(n)]
    for groups in (rows, columns):
        mine += filter(None, [new_group(ranks, world) for ranks in groups])
    row, column = mine
    return row, PipelineGroup(column.ranks, column.rank_in_group, column.device, column.process_group)


class PipelineStage(llama.Llama):
    """One stage of a model, or in front of a kind of model: it gets hidden states or embeds, and sends them on or ends.

    `whole_config` is that of all stages together.
    """

    pp: PipelineGroup
    whole_config: LlamaConfig

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor | None,
        positions: torch.Tensor,
        attend: Attend,
        hidden: torch.Tensor | None = None,
        layers: Any = None,
    ) -> torch.Tensor:
        """As a model's, in its place between its neighbours."""
        if not self.pp.is_first_rank:
            hidden = self.pp.recv((len(positions), self.config.hidden_size), self.dtype)
        hidden = super().forward(token_ids, positions, attend, hidden, layers)
        if not self.pp.is_last_rank:
            self.pp.send(hidden)
        return hidden


class LlamaStage(PipelineStage):
    """Some layers, whole."""


class TensorParallelStage(PipelineStage, TensorParallelLlama):
    """A shard of some layers."""


class Skeleton(llama.Llama):
    """A model's shape without its weights."""

    whole_config: LlamaConfig


def check_quantization(method: str) -> None:
    """Raises InputError for what no rank can do with a part of the weights."""
    if method in CALIBRATED:
        raise common.InputError(
            f"quantization {method!r}: not on workers, none of which sees what a whole model "
            "computes; a folder that was quantized with it is loaded"
        )


def shard_codes(codes: dict[str, Any], config: LlamaConfig, tp: GroupCoordinator, layers: range) -> dict[str, Any]:
    """This rank's part of the matrices of codes that its layers have; names count from the stage's first layer.

    Codes are cut as the weights are, and scales and zero points with them: the numbers of an output stay together, and
    so do those of a group of inputs. Raises InputError if a group would be cut.
    """
    parts, n = {}, tp.world_size
    for name, whole in codes.items():
        found = re.fullmatch(r"(.*layers\.)(\d+)(\..*)", name)
        assert found
        prefix, layer, rest = found.groups()
        if int(layer) not in layers:
            continue
        groups, by_rows = whole.scale.shape[1], name.endswith(("o_proj", "down_proj"))
        if by_rows and groups > 1 and groups % n:
            raise common.InputError(f"tensor_parallel_size {n}: {rest[1:]} is quantized in {groups} groups of inputs")
        shared = by_rows and groups == 1  # a scale for all inputs of an output is everybody's
        cut = functools.partial(shard_tensor, f"{name}.weight", config=config, group=tp)
        scale, zero = (x if x is None or shared else cut(x) for x in (whole.scale, whole.zero))
        part = dataclasses.replace(whole, codes=cut(whole.codes), scale=scale, zero=zero)
        parts[f"{prefix}{int(layer) - layers.start}{rest}"] = part
    return parts


@contextlib.contextmanager
def whole_weights(  # noqa: PLR0913  what a worker is told about its model
    source: str | dict | None,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None,
    generation: str,
    load_format: str,
) -> Iterator[tuple[LlamaConfig, Tensors, dict[str, Any]]]:
    """The config of the whole model, its weights by name, mapped while this lasts, and matrices that are codes."""
    if isinstance(source, dict):
        whole = llama.random_model(dtype=dtype, device=device, **source)
        yield whole.config, model_tensors(whole), {}
        return
    folder = folders.model_folder(source)
    config, codes = LlamaConfig.from_folder(folder, True, generation), {}
    with contextlib.ExitStack() as stack:
        tensors = dummy_weights(config) if load_format == "dummy" else weights.open_weights(folder, stack)
        if stored := stored_quantization(folder, quantization):
            check_load_format(load_format, stored)
            tensors, codes = checkpoint_tensors(folder, tensors)
        elif quantization == "gguf":
            codes = gguf_codes(config)
        yield config, tensors, codes


def load_stage(  # noqa: PLR0913  what a worker is told about its model
    source: str | dict | None,
    dtype: torch.dtype,
    tp: GroupCoordinator,
    pp: PipelineGroup,
    quantization: str | None = None,
    embeds_last: bool = False,
    generation_config: str = "auto",
    load_format: str = "auto",
    parallel: ParallelConfig | None = None,
    ep: GroupCoordinator | None = None,
) -> PipelineStage:
    """One rank's part of a model: some layers, and of these some heads and neurons. The file is mapped, so what other
    ranks own is never read. A dict stands for a seeded random model with these sizes, which tests use.

    A stage is a shallower Llama: its layers are counted from 0, so its KV cache has as many as it needs. What the model
    is as a whole, `whole_config` says. With `embeds_last`, the last stage has the embedding in any case. Codes that a
    file has are cut; otherwise a rank quantizes what it owns, so where inputs are divided an output has a scale on each
    rank. How ranks share experts, `parallel` says, and `ep` who they are, if not `tp`.
    """
    about = (source, dtype, tp.device, quantization, generation_config, load_format)
    with whole_weights(*about) as (config, tensors, codes):
        config = parallel.shared_experts(config) if parallel else config
        start, end = get_pp_indices(config.num_hidden_layers, pp.rank_in_group, pp.world_size)
        shapes, embeds_last = llama.tensor_shapes(config), embeds_last or config.tie_word_embeddings
        embeds = {
            "model.embed_tokens.weight": pp.is_first_rank or (pp.is_last_rank and embeds_last),
            "lm_head.weight": pp.is_last_rank,
        }
        # vLLM's PPMissingLayer: a shape without memory
        elsewhere = [name for name, here in embeds.items() if not here and name in shapes]
        absent = {name: torch.zeros((), dtype=dtype).expand(shapes[name]) for name in elsewhere}
        part_of = functools.partial(stage_tensor, tensors, absent, start)
        moe = config.moe and config.moe.of_stage(start, end)
        windows = config.sliding_windows[start:end]
        stage_config = dataclasses.replace(
            config, num_hidden_layers=end - start, moe=moe, sliding_windows=windows if any(windows) else ()
        )
        if max(tp.world_size, ep.world_size if ep else 1) > 1:
            model = TensorParallelStage(stage_config, part_of, tp, dtype, ep)
        else:
            model = LlamaStage(stage_config, part_of, dtype, tp.device)
    model.pp, model.whole_config = pp, config
    if not pp.is_last_rank:
        del model.linear["lm_head"]
    if "model.embed_tokens.weight" in absent:
        model.embed_tokens = model.norm.new_empty(0)
        if isinstance(model, TensorParallelStage):
            del model.embedding

    def change(part: llama.Llama) -> llama.Llama:
        if codes:
            part = on_codes(part, shard_codes(codes, config, tp, range(start, end)))
        elif quantization:
            part = quantize_model(part, quantization)
        return pack_weights(part)

    stage = map_local(model, change) if isinstance(model, TensorParallelStage) else change(model)
    assert isinstance(stage, PipelineStage)  # a copy of what it was
    return stage


def stage_tensor(tensors: Tensors, absent: dict[str, torch.Tensor], first_layer: int, name: str) -> torch.Tensor | None:
    """A weight by the name that it has in a stage; in place of one that the stage has not, what is in `absent`."""
    if name in absent:
        return absent[name]
    prefix, _, rest = name.partition("layers.")
    layer, _, tail = rest.partition(".")
    return tensors(f"{prefix}layers.{int(layer) + first_layer}.{tail}" if rest else name)


def skeleton(config: LlamaConfig, parallel: ParallelConfig, dtype: torch.dtype) -> Skeleton:
    """The largest rank's shape without its weights: from it, the engine core knows what a block costs. `whole_config`
    is that of all ranks together."""
    stages = [
        get_pp_indices(config.num_hidden_layers, i, parallel.pipeline_parallel_size)
        for i in range(parallel.pipeline_parallel_size)
    ]
    deepest = dataclasses.replace(config, num_hidden_layers=max(end - start for start, end in stages))
    n, model = parallel.tensor_parallel_size, object.__new__(Skeleton)
    model.config, model.dtype, model.device, model.linear = deepest, dtype, torch.device("cpu"), {}
    model.moe, model.mla = {}, {}
    model.whole_config = config
    model.num_heads, model.num_kv_heads = config.num_attention_heads // n, max(1, config.num_key_value_heads // n)
    return model


def parameters_held(model: llama.Llama) -> int:
    """Elements in this rank's memory, each counted once; what only has a shape has none."""
    tensors = [model.embed_tokens, model.norm, *model.norms]
    layers: dict[str, Any] = model.linear
    for layer in layers.values():
        tensors += [layer.weight, layer.bias]
    for part in (*model.moe.values(), *model.mla.values()):
        tensors += part.tensors
    return sum({t.data_ptr(): t.numel() for t in tensors if t is not None}.values())
