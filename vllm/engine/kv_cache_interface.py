"""What each layer keeps of a token, and which layers share a block table.

Owns specs and groups; read by whoever decides about blocks, and by whoever makes memory for them: both come to the same
groups from the same model. It never sees a block. vLLM: `vllm/v1/kv_cache_interface.py`,
`vllm/v1/core/kv_cache_utils.py`.
"""

from __future__ import annotations

from common import InputError

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config import VllmConfig
    from engine.model.config import LlamaConfig


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What one layer keeps of a token, and in blocks of how many tokens."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype_bytes: int = 2

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one layer's block: keys and values of `block_size` tokens."""
        return self.block_size * 2 * self.num_kv_heads * self.head_size * self.dtype_bytes

    def max_blocks(self, num_tokens: int, max_in_flight_tokens: int) -> int:
        """The most blocks that a sequence holds on its way to `num_tokens`, in steps of `max_in_flight_tokens`."""
        return math.ceil(num_tokens / self.block_size)


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every position sees all before it."""


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """Every position sees `sliding_window` positions, itself among them."""

    sliding_window: int

    def max_blocks(self, num_tokens: int, max_in_flight_tokens: int) -> int:
        """W − 1 tokens and what one step adds; one more block, since a window may begin in the middle of its first."""
        most = math.ceil((self.sliding_window - 1 + max_in_flight_tokens) / self.block_size) + 1
        return min(math.ceil(num_tokens / self.block_size), most)


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share a block table. A group with a layer less than others leaves some of each block unused."""

    layers: tuple[int, ...]
    spec: AttentionSpec


def unify_page_size(specs: Sequence[AttentionSpec]) -> list[AttentionSpec]:
    """Layers whose tokens are smaller get more tokens into a block, until all blocks have the same bytes.

    Raises InputError if they cannot: one page is no multiple of another.
    """
    largest = max(spec.page_size_bytes for spec in specs)
    for spec in specs:
        if largest % spec.page_size_bytes:
            raise InputError(
                f"a page of {spec.page_size_bytes} bytes does not divide one of {largest}: "
                "choose block sizes for which it does"
            )
    return [dataclasses.replace(s, block_size=s.block_size * (largest // s.page_size_bytes)) for s in specs]


def get_kv_cache_groups(specs: Sequence[AttentionSpec]) -> list[KVCacheGroup]:
    """Groups of equally many layers, `specs[i]` being layer i's.

    The rarest kind of layer sets the size of a group: 5 full and 29 windowed layers become one group of 5, and six of 5
    with one place unused. If kinds are almost equally frequent, the most frequent sets it, and each kind is one group.
    """
    kinds: dict[AttentionSpec, list[int]] = {}
    for layer, spec in enumerate(unify_page_size(specs)):
        kinds.setdefault(spec, []).append(layer)
    fewest, most = min(map(len, kinds.values())), max(map(len, kinds.values()))
    size = most if most < 1.5 * fewest else fewest
    return [
        KVCacheGroup(tuple(layers[i::count]), spec)  # dealt out, so that a pipeline stage has some of each
        for spec, layers in kinds.items()
        for count in [math.ceil(len(layers) / size)]
        for i in range(count)
    ]


def groups_of(model: LlamaConfig, config: VllmConfig, block_size: int) -> list[KVCacheGroup]:
    """The groups of a model's layers; none: one table serves all, and whatever a layer does not need is kept."""
    if not (model.sliding_windows and config.hybrid_kv_cache):
        return []
    shape = {"block_size": block_size, "num_kv_heads": model.num_key_value_heads, "head_size": model.head_dim}
    return get_kv_cache_groups(
        [
            SlidingWindowSpec(**shape, sliding_window=window) if window else FullAttentionSpec(**shape)
            for window in model.sliding_windows
        ]
    )


def max_blocks(groups: Sequence[KVCacheGroup], block_size: int, num_tokens: int, max_in_flight_tokens: int) -> int:
    """The most blocks that a sequence holds on its way to `num_tokens`, in all groups."""
    if not groups:
        return math.ceil(num_tokens / block_size)
    return sum(group.spec.max_blocks(num_tokens, max_in_flight_tokens) for group in groups)
