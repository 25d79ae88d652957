"""CUDA graphs: a recording of a step's launches, replayed with one launch.

Owns static buffers and one recording for each batch size; called by the model runner in place of the model. It never
runs attention that reads lengths on the host. vLLM: `vllm/compilation/cuda_graph.py`, `capture_model` in
`vllm/v1/worker/gpu_model_runner.py`; sizes as in `vllm/config/vllm.py`.
"""

from __future__ import annotations

import common  # it settles the device before torch and Triton are used

import bisect
import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.attention.metadata import AttentionMetadata
from engine.config import SchedulerConfig
from engine.model import llama
from engine.seams import Attend, KVCache


def capture_sizes(largest: int) -> list[int]:
    """vLLM's buckets, 1, 2, 4, then steps of 8, beyond 256 of 16, up to the first that holds `largest` tokens."""
    grid = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    return grid[: bisect.bisect_left(grid, largest) + 1]


class Tape(TorchDispatchMode):
    """Stands in for `torch.cuda.CUDAGraph` where there is no GPU, and counts: the operations and Triton launches
    between `capture_begin` and `capture_end`, with the tensors they were given; `replay` runs them on the same memory.

    Like a graph it knows addresses and no Python, so what would break a graph breaks a tape. Views are not recorded:
    they launch nothing. (`flatten` and `reshape` copy what is no view, and then they are recorded.)

    Raises RuntimeError where a library packs a matrix while it records. `replay` would pack it anew and copy its bytes
    to the first one's address; but MKL aligns what it packs within its memory, so at another address the same bytes are
    another matrix, or end the process. A layer that packs when it is first called is called once before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tape: list[tuple[Any, tuple, dict, Any]] = []  # (operation, arguments, result), or a launch
        self.exits = contextlib.ExitStack()
        self.launches: list[common.Launch] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports its compiler at the first operation, which takes 3 s

    def capture_begin(self, pool: Any = None) -> None:
        self.launches = self.exits.enter_context(common.captured())  # recorded, not run: as while a stream is captured
        self.exits.enter_context(self)

    def capture_end(self) -> None:
        self.exits.close()
        self._take_launches()

    def _take_launches(self) -> None:
        self.tape += [(launch, (), {}, None) for launch in self.launches]
        self.launches.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self._take_launches()  # those that came before
        out = func(*args, **(kwargs or {}))
        if func.name() in PACKING or any(getattr(x, "layout", None) == OPAQUE for x in tree_leaves(out)):
            raise RuntimeError(
                f"{func.name()} packs a matrix while a tape records, and a replay cannot write packed bytes anew: "
                "call the layer once before it is recorded"
            )
        if not (func.is_view and share_memory(args[0], out)) and func.name() not in ALLOCATIONS:
            self.tape.append((func, args, kwargs or {}, out))
        return out

    @torch.inference_mode()
    def replay(self) -> None:
        """Every operation once more, its results written where the first ones lie: what a CUDA graph does at once."""
        for func, args, kwargs, recorded in self.tape:
            if isinstance(func, common.Launch):
                func.kernel[func.grid](*func.args, **func.kwargs)
                continue
            result = func(*args, **kwargs)
            for old, new in zip(tree_leaves(recorded), tree_leaves(result)):
                if old is not new:
                    old.copy_(new)  # to the address that later operations were recorded with


def share_memory(x: torch.Tensor, views: Any) -> bool:
    """Whether what was made of `x`, a tensor or several, lies where `x` lies."""
    return tree_leaves(views)[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


ALLOCATIONS = {"aten::empty.memory_format", "aten::empty_like", "aten::new_empty", "aten::detach"}  # no kernel
OPAQUE = torch._mkldnn  # pyright: ignore[reportAttributeAccessIssue]  not in torch's stubs. The layout of what MKL and oneDNN have packed: only they can read it
PACKING = {"aten::_convert_weight_to_int4pack_for_cpu"}  # its result has the layout of any tensor


@dataclass
class CapturedStep:
    """One bucket: its graphs and, between two of them, the layer whose attention runs there."""

    graphs: list[Any] = field(default_factory=list)
    attention: list[int] = field(default_factory=list)


class CapturedModel:
    """A model's forward pass as graphs: vLLM's default (FULL_AND_PIECEWISE); `--enforce-eager` switches it off.

    What goes in must lie where it lay, so there are static buffers, filled before each replay. Shapes must be what they
    were, so a few batch sizes are captured, and a batch is padded to the next one. Whatever Python decided at capture
    stays decided.

    Full: a step in which every request decodes is one graph, attention included, if that runs as a kernel (the CPU's
    reads lengths in Python). Piecewise, for all other steps of up to `largest` tokens: a graph ends in front of every
    attention and another goes on behind it; attention runs as always, prompts included. `largest` is by default twice
    the tokens of a step in which every seat decodes, drafts included, and at most 512.
    Without a GPU nothing is captured, unless a `graph_class` says how (`Tape`).
    """

    def __init__(  # noqa: PLR0913  four parts of a runner, and what tests vary
        self,
        model: llama.Llama,
        cache: KVCache,
        plan: Callable[[AttentionMetadata], Attend],
        config: SchedulerConfig,
        *,
        num_speculative_tokens: int = 0,
        graph_class: Callable[[], Any] | None = None,
        full: bool = True,
        largest: int | None = None,
    ) -> None:
        self.model, self.cache, self.plan, self.full = model, cache, plan, full
        self.graph_class = graph_class or (torch.cuda.CUDAGraph if common.HAS_GPU else None)
        decoding = config.max_num_seqs * (1 + num_speculative_tokens)
        most = min(largest or min(2 * decoding, 512), config.max_num_batched_tokens)
        self.sizes = capture_sizes(most) if self.graph_class else []
        self.captured: dict[tuple[int, bool], CapturedStep] = {}
        self.largest_decode = capture_sizes(config.max_num_seqs)[-1]  # every request decodes, one token each
        self.addresses: list[int] = []
        self.num_replays = 0
        if self.sizes:
            self._make_buffers(config.max_model_len)

    def _make_buffers(self, max_model_len: int) -> None:
        """One set for all buckets; a bucket uses their first rows, which lie where they always lie."""
        model, c = self.model, self.model.config
        N, W = self.sizes[-1], -(-max_model_len // self.cache.block_size)
        zeros = functools.partial(torch.zeros, device=model.device)
        self.token_ids = zeros(N, dtype=torch.int64)
        self.meta = AttentionMetadata(
            positions=zeros(N, dtype=torch.int64),
            slot_mapping=zeros(N, dtype=torch.int64) - 1,
            query_start_loc=torch.arange(N + 1, device=model.device),
            seq_lens=zeros(N, dtype=torch.int32),
            block_table=zeros((N, W), dtype=torch.int32),
            query_lens=[1] * N,
            max_seq_len=max_model_len,
        )
        # What a piece leaves for attention, attention for the next piece, and the last one for the runner.
        Hq, Hkv = model.num_heads, model.num_kv_heads
        self.qkv = zeros((N, Hq + 2 * Hkv, c.head_dim), dtype=model.dtype)
        self.attended = zeros((N, Hq, c.head_dim), dtype=model.dtype)
        self.output = zeros((N, c.hidden_size), dtype=model.dtype)
        # One stream and one pool for all: a graph finds its memory where one before it has left some.
        self.stream = torch.cuda.Stream() if common.HAS_GPU else None
        self.pool = torch.cuda.graph_pool_handle() if common.HAS_GPU else None

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Every bucket, before the first request; the largest first, so that the others need no memory more."""
        for size in reversed(self.sizes):
            self.captured_step(size, whole=False)
            if self.full and size <= self.largest_decode and common.runs_kernel(self.cache.layers[0]):
                self.captured_step(size, whole=True)
        if common.HAS_GPU:
            torch.cuda.empty_cache()  # what the runs before the captures needed

    def forget(self) -> None:
        """All recordings: weights or cache are about to lie elsewhere."""
        self.captured.clear()
        self.addresses = []

    def captured_step(self, size: int, whole: bool) -> CapturedStep:
        """The recording of a bucket, made when it is first asked for."""
        if (size, whole) not in self.captured:
            self.captured[size, whole] = self.capture(size, whole)
            self.addresses = self.addresses or self.fixed_addresses()
        return self.captured[size, whole]

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """The batch through the model, [T] -> [T, hidden]; the result lives until the next call. Raises RuntimeError
        if weights or cache are no longer where they were captured."""
        T = len(token_ids)
        size = next((size for size in self.sizes if size >= T), None)
        if size is None:
            return self.model.forward(token_ids, meta.positions, self.plan(meta))
        # One token each: every request decodes.
        whole = self.full and len(meta.query_lens) == T and common.runs_kernel(self.cache.layers[0])
        step = self.captured_step(size, whole)
        if self.fixed_addresses() != self.addresses:
            raise RuntimeError(
                "weights or KV cache have moved since the capture: a graph knows addresses, not "
                "names, and would go on using the old memory; build a new runner"
            )
        self.num_replays += 1
        self.fill(token_ids, meta, size, whole)
        Hkv = self.model.num_kv_heads
        q, k, v = self.qkv[:T].split((self.model.num_heads, Hkv, Hkv), dim=1)
        if step.attention:
            attend = self.plan(meta)  # of this step, for T tokens, without padding
            for graph, layer in zip(step.graphs, step.attention):
                graph.replay()
                out = attend(layer, q, k, v)  # of latents, no more than what counts
                self.attended[:T, :, : out.shape[2]].copy_(out)
        step.graphs[-1].replay()
        return self.output[:T]

    def fill(self, token_ids: torch.Tensor, meta: AttentionMetadata, size: int, whole: bool) -> None:
        """This step's values into the static buffers, and padding behind them.

        A padded row computes token 0 at position 0. It must leave no trace: slot −1 is written nowhere, length 0
        attends to nothing.
        """
        T, static = len(token_ids), self.meta
        copies = [(self.token_ids, token_ids, 0), (static.positions, meta.positions, 0)]
        if whole:
            copies += [(static.slot_mapping, meta.slot_mapping, -1), (static.seq_lens, meta.seq_lens, 0)]
            static.block_table[:T, : meta.block_table.shape[1]].copy_(meta.block_table)
        for buffer, values, padding in copies:
            buffer[:T].copy_(values)
            if size > T:
                buffer[T:size].fill_(padding)

    def capture(self, size: int, whole: bool) -> CapturedStep:
        """Run the step twice on the static buffers: once to warm up (Triton compiles, libraries choose, weights are
        packed when first used), once to record. All rows are padding meanwhile, so nothing is written. A piece ends
        wherever attention is called.

        What attention reads is copied out of the graphs' pool, by one kernel: a reference would keep memory there
        for every layer of every bucket, gigabytes for a large model (vLLM's references are weak, in C++).
        """
        step, static = CapturedStep(), self._static(size)

        def breaking(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            torch.cat((q, k, v), dim=1, out=self.qkv[:size])
            step.graphs[-1].capture_end()
            step.attention.append(layer)
            self._begin(step)
            return self.attended[:size]

        def run(attend: Attend) -> torch.Tensor:
            return self.model.forward(self.token_ids[:size], static.positions, attend)

        if common.HAS_GPU:
            torch.cuda.synchronize()
        # Not on the default stream: that cannot be captured.
        with torch.cuda.stream(self.stream) if common.HAS_GPU else contextlib.nullcontext():
            run(self.plan(static) if whole else lambda layer, q, k, v: torch.zeros_like(q))
            try:
                self._begin(step)
                self.output[:size].copy_(run(self.plan(static) if whole else breaking))
            finally:  # whatever went wrong, what comes next is not recorded
                if step.graphs:
                    step.graphs[-1].capture_end()
        if common.HAS_GPU:
            torch.cuda.synchronize()
        return step

    def _static(self, size: int) -> AttentionMetadata:
        """The first rows of the buffers, all of them padding."""
        m = self.meta
        for buffer in (self.token_ids, m.positions, m.seq_lens):
            buffer[:size].zero_()
        m.slot_mapping[:size].fill_(-1)
        return AttentionMetadata(
            m.positions[:size],
            m.slot_mapping[:size],
            m.query_start_loc[: size + 1],
            m.seq_lens[:size],
            m.block_table[:size],
            [1] * size,
            m.max_seq_len,
        )

    def _begin(self, step: CapturedStep) -> None:
        assert self.graph_class
        step.graphs.append(self.graph_class())
        step.graphs[-1].capture_begin(**({} if self.pool is None else {"pool": self.pool}))

    def fixed_addresses(self) -> list[int]:
        """Where everything is that a graph reads and no step fills in: 20 µs (vLLM looks when debugging)."""
        tensors = (self.model.embed_tokens, *self.model.input_norm, *self.cache.layers)
        layers = (*self.model.linear.values(), *self.model.moe.values())
        return [x.data_ptr() for x in tensors] + [id(layer) for layer in layers]


def decode_at(runner: Any, n: int, context: int) -> Callable[[], torch.Tensor]:
    """The next token's logits of `n` sequences of `context` tokens, to be called again and again: what their cache
    holds is zeros, and takes as long to read."""
    size, device = runner.cache.block_size, runner.model.device
    width = -(-context // size)
    blocks = [range(1 + b * width, 1 + (b + 1) * width) for b in range(n)]
    meta = AttentionMetadata.build(blocks, [context] * n, [1] * n, size, device)
    ids = torch.zeros(n, dtype=torch.int64, device=device)
    return lambda: runner.model.logits(runner.forward(ids, meta, ()))
