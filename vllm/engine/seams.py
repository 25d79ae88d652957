"""The seams: what the engine asks of its parts, one interface a screen.

Owns no behaviour. The engine's own parts and the lessons' fill these; `registry.py` says which. A class fills a seam by
having its methods; nothing is ever inherited. vLLM: the base classes named at each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from engine.output import KVConnectorMetadata, KVConnectorOutput, SchedulerOutput
from engine.request import Request

# --- Drafts ----------------------------------------------------------------------------------------------------------


class DraftPlan(Protocol):
    """How many tokens are guessed and verified in a step (`vllm/config/speculative.py:SpeculativeConfig`)."""

    num_speculative_tokens: int  # K

    def drafts_in_batch(self, num_seqs: int) -> int:
        """K in a step of so many sequences."""
        ...


# --- Adapters --------------------------------------------------------------------------------------------------------


class Adapters(Protocol):
    """Which LoRA adapters are in memory, as the scheduler sees it (`vllm/lora/model_manager.py`).

    An adapter is known by name, read into CPU memory by a thread, and resident in one of `max_loras` places.
    """

    @property
    def max_loras(self) -> int:
        """Adapters in one step."""
        ...

    @property
    def fair(self) -> bool:
        """Is the next request one of the adapter that has been served least?"""
        ...

    @property
    def num_blocks(self) -> int:
        """KV blocks that hold adapters."""
        ...

    def collect(self) -> None:
        """Take what has been read since the last step: within a step, nothing comes or fails."""
        ...

    def is_loaded(self, name: str) -> bool:
        """Is it in CPU memory, or resident? If not, it will be read. Raises InputError if that failed."""
        ...

    def fingerprint(self, name: str) -> str:
        """Tells the weights of a loaded adapter from others of this name."""
        ...

    def make_resident(self, name: str, pinned: set[str]) -> bool:
        """Give it a place, taking one that is not `pinned`; False: there is none."""
        ...

    def give_blocks(self, pinned: set[str | None]) -> bool:
        """Free the KV blocks of one adapter that is not `pinned`; False: none has any."""
        ...

    def is_leaving(self, name: str) -> bool:
        """Does it wait for its last request to end, removed or not even read?"""
        ...

    def release(self, name: str) -> None:
        """No request has this name any more."""
        ...

    def wait(self) -> None:
        """Until a reading is over, however it ends: for a step that has nothing else to do."""
        ...


# --- Keys and values from elsewhere ----------------------------------------------------------------------------------


class SchedulerConnector(Protocol):
    """The scheduler's half of a connector (`kv_connector/v1/base.py:KVConnectorBase_V1`)."""

    @property
    def load_failure_policy(self) -> str:
        """`recompute`, or `fail`: what happens to a request whose keys and values do not come."""
        ...

    @property
    def needs_hashes(self) -> bool:
        """Of all full blocks, as the prefix cache has them?"""
        ...

    @property
    def patience(self) -> float | None:
        """Seconds after which an idle engine asks again for `has_pending_work`; None: it need not."""
        ...

    def on_new_request(self, request: Request) -> None:
        """Raises InputError if what it says about its keys and values makes no sense."""
        ...

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """(tokens beyond `num_computed_tokens` that can be loaded, whether that takes longer than a step)."""
        ...

    def update_state_after_alloc(self, request: Request, blocks: list[int], num_external_tokens: int) -> None:
        """The request has blocks; `num_external_tokens` of it are to be loaded into them."""
        ...

    def build_connector_meta(self, output: SchedulerOutput, tables: Mapping[str, list[int]]) -> KVConnectorMetadata:
        """The worker's orders for a step; `tables` are the block tables."""
        ...

    def get_finished(self) -> KVConnectorOutput:
        """What came and went since the last call."""
        ...

    def request_finished(self, request: Request, blocks: Sequence[int]) -> bool:
        """True: leave its blocks alone until `get_finished` names it among `finished_sending`."""
        ...

    def answer_params(self, request: Request) -> dict[str, Any] | None:
        """For the answer of a request whose blocks are kept: the kv_transfer_params of whoever goes on with it."""
        ...

    def has_pending_work(self) -> bool:
        """Must the engine go on stepping although nobody is scheduled?"""
        ...
