"""051 · CUDA graphs: the second part of lesson 05, and the runner under every engine that serves on a GPU.

A decode step is the same few hundred kernels every time, and launching one costs the CPU microseconds, however little
it computes. A CUDA graph is a recording of launches: kernel, grid, arguments. Replaying it costs one launch. Nothing
else of the step is recorded, no Python and no `if`; and arguments are addresses. So
  * what goes in must lie where it lay: static buffers, filled before each replay;
  * shapes must be what they were: a few batch sizes are captured, and a batch is padded to the next one;
  * whatever Python decided at capture stays decided: a length read on the host is frozen into the graph.
`graph_runner` does that to any model runner; `Tape` stands in for a graph where there is no GPU. Lesson 05 counts what
it saves and measures it; lesson 06 serves with it, everything captured before the first request.

Read for this: vLLM 0.32 `compilation/cuda_graph.py`, `compilation/breakable_cudagraph.py`,
`v1/worker/gpu_model_runner.py` (`capture_model`), `config/vllm.py` (capture sizes).
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import bisect
import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import llama

continuous_batching = common.lesson("04_continuous_batching")
AttentionMetadata = common.lesson("02_paged_attention").AttentionMetadata
ModelRunner, Request, Scheduler = (
    continuous_batching.ModelRunner, continuous_batching.Request, continuous_batching.Scheduler,
)  # fmt: skip


def capture_sizes(largest: int) -> list[int]:
    """vLLM's buckets, 1, 2, 4, then steps of 8, beyond 256 of 16, up to the first that holds `largest` tokens."""
    grid = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    return grid[: bisect.bisect_left(grid, largest) + 1]


class Tape(TorchDispatchMode):
    """Stands in for `torch.cuda.CUDAGraph` where there is no GPU, and counts: the operations and Triton launches
    between `capture_begin` and `capture_end`, with the tensors they were given; `replay` runs them on the same memory.

    Like a graph it knows addresses and no Python, so what would break a graph breaks a tape. Views are not recorded:
    they launch nothing.

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
        if not func.is_view and func.name() not in ALLOCATIONS:
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


ALLOCATIONS = {"aten::empty.memory_format", "aten::empty_like", "aten::new_empty", "aten::detach"}  # no kernel
OPAQUE = torch._mkldnn  # the layout of what MKL and oneDNN have packed: only they can read it
PACKING = {"aten::_convert_weight_to_int4pack_for_cpu"}  # its result has the layout of any tensor


@dataclass
class CapturedStep:
    """One bucket: its graphs and, between two of them, the layer whose attention runs there."""

    graphs: list[Any] = field(default_factory=list)
    attention: list[int] = field(default_factory=list)


def graph_runner(base: type[ModelRunner], graph_class: Callable[[], Any] | None = None, full: bool = True,
                 largest: int | None = None) -> type[ModelRunner]:  # fmt: skip
    """`base` with its forward pass captured: vLLM's default (FULL_AND_PIECEWISE); `--enforce-eager` switches it off.

    Full: a step in which every request decodes is one graph, attention included, if that runs as a kernel (the CPU's
    reads lengths in Python). Piecewise, for all other steps of up to `largest` tokens: a graph ends in front of every
    attention and another goes on behind it; attention runs as always, prompts included. `largest` is by default twice
    the tokens of a step in which every seat decodes, drafts included, and at most 512.
    Without a GPU nothing is captured, unless a `graph_class` says how (`Tape`). A `base.forward` that decides by
    request what to compute (adapters) cannot be captured: the decision would stay.
    """
    graph_class = graph_class or (torch.cuda.CUDAGraph if common.HAS_GPU else None)

    class GraphRunner(base):
        __doc__ = base.__doc__

        def __init__(self, model: llama.Llama, scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
            super().__init__(model, scheduler, *args, **kwargs)
            config, size = scheduler.config, scheduler.kv_cache_manager.block_size
            drafts = getattr(self, "speculative_config", None)  # lesson 07's: K guesses behind each token
            decoding = config.max_num_seqs * (1 + (drafts.num_speculative_tokens if drafts else 0))
            most = min(largest or min(2 * decoding, 512), config.max_num_batched_tokens)
            self.sizes = capture_sizes(most) if graph_class else []
            self.captured: dict[tuple[int, bool], CapturedStep] = {}
            self.largest_decode = capture_sizes(config.max_num_seqs)[-1]  # every request decodes, one token each
            self.addresses: list[int] = []
            self.num_replays = 0
            self.breaking: Callable | None = None  # while a piecewise capture runs: its attention
            if not self.sizes:
                return
            # One set of buffers for all buckets; a bucket uses their first rows, which lie where they always lie.
            N, W, c = self.sizes[-1], -(-config.max_model_len // size), model.config
            zeros = functools.partial(torch.zeros, device=model.device)
            self.token_ids = zeros(N, dtype=torch.int64)
            self.meta = AttentionMetadata(
                positions=zeros(N, dtype=torch.int64), slot_mapping=zeros(N, dtype=torch.int64) - 1,
                query_start_loc=torch.arange(N + 1, device=model.device), seq_lens=zeros(N, dtype=torch.int32),
                block_table=zeros((N, W), dtype=torch.int32), query_lens=[1] * N, max_seq_len=config.max_model_len,
            )  # fmt: skip
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
                if full and size <= self.largest_decode and common.runs_kernel(self.cache.layers[0]):
                    self.captured_step(size, whole=True)
            if common.HAS_GPU:
                torch.cuda.empty_cache()  # what the runs before the captures needed

        def captured_step(self, size: int, whole: bool) -> CapturedStep:
            if (size, whole) not in self.captured:
                self.captured[size, whole] = self.capture(size, whole)
                self.addresses = self.addresses or self.fixed_addresses()
            return self.captured[size, whole]

        @torch.inference_mode()
        def forward(
            self, token_ids: torch.Tensor, meta: AttentionMetadata, requests: Sequence[Request]
        ) -> torch.Tensor:
            T = len(token_ids)
            size = next((size for size in self.sizes if size >= T), None)
            if size is None:
                return super().forward(token_ids, meta, requests)
            # One token each: every request decodes.
            whole = full and len(meta.query_lens) == T and common.runs_kernel(self.cache.layers[0])
            step = self.captured_step(size, whole)
            if self.fixed_addresses() != self.addresses:
                raise RuntimeError("weights or KV cache have moved since the capture: a graph knows addresses, not "
                                   "names, and would go on using the old memory; build a new runner")  # fmt: skip
            self.num_replays += 1
            self.fill(token_ids, meta, size, whole)
            attend = None if whole else super().attend(meta)  # of this step, for T tokens, without padding
            Hkv = self.model.num_kv_heads
            q, k, v = self.qkv[:T].split((self.model.num_heads, Hkv, Hkv), dim=1)
            for graph, layer in zip(step.graphs, step.attention):
                graph.replay()
                self.attended[:T].copy_(attend(layer, q, k, v))
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
            step, m = CapturedStep(), self.meta
            self.token_ids[:size].zero_(), m.positions[:size].zero_(), m.seq_lens[:size].zero_()
            m.slot_mapping[:size].fill_(-1)
            static = AttentionMetadata(m.positions[:size], m.slot_mapping[:size], m.query_start_loc[: size + 1],
                                       m.seq_lens[:size], m.block_table[:size], [1] * size, m.max_seq_len)  # fmt: skip

            def begin() -> None:
                step.graphs.append(graph_class())
                step.graphs[-1].capture_begin(**({} if self.pool is None else {"pool": self.pool}))

            def breaking(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                torch.cat((q, k, v), dim=1, out=self.qkv[:size])
                step.graphs[-1].capture_end()
                step.attention.append(layer)
                begin()
                return self.attended[:size]

            run = functools.partial(super().forward, self.token_ids[:size], static, ())
            if common.HAS_GPU:
                torch.cuda.synchronize()
            # Not on the default stream: that cannot be captured.
            with torch.cuda.stream(self.stream) if common.HAS_GPU else contextlib.nullcontext():
                self.breaking = None if whole else lambda layer, q, k, v: torch.zeros_like(q)
                try:
                    run()
                    self.breaking = None if whole else breaking
                    begin()
                    self.output[:size].copy_(run())
                finally:  # whatever went wrong, what comes next is not recorded
                    self.breaking = None
                    if step.graphs:
                        step.graphs[-1].capture_end()
            if common.HAS_GPU:
                torch.cuda.synchronize()
            return step

        def attend(self, meta: AttentionMetadata) -> llama.Attend:
            return self.breaking or super().attend(meta)

        def fixed_addresses(self) -> list[int]:
            """Where everything is that a graph reads and no step fills in: 20 µs (vLLM looks when debugging)."""
            tensors = (self.model.embed_tokens, *self.model.input_norm, *self.cache.layers)
            return [x.data_ptr() for x in tensors] + [id(layer) for layer in self.model.linear.values()]

    GraphRunner.__name__ = GraphRunner.__qualname__ = f"Graph{base.__name__}"
    return GraphRunner


def decode_at(runner: ModelRunner, n: int, context: int) -> Callable[[], torch.Tensor]:
    """The next token's logits of `n` sequences of `context` tokens, to be called again and again: what their cache
    holds is zeros, and takes as long to read."""
    size, device = runner.cache.block_size, runner.model.device
    width = -(-context // size)
    blocks = [range(1 + b * width, 1 + (b + 1) * width) for b in range(n)]
    meta = AttentionMetadata.build(blocks, [context] * n, [1] * n, size, device)
    ids = torch.zeros(n, dtype=torch.int64, device=device)
    return lambda: runner.model.logits(runner.forward(ids, meta, ()))
