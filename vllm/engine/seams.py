"""The seams: what the engine asks of its parts, one interface a screen.

Owns no behaviour. The engine's own parts and the lessons' fill these; `registry.py` says which. A class fills a seam by
having its methods; nothing is ever inherited. vLLM: the base classes named at each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from engine.output import EngineCoreOutput, KVConnectorMetadata, KVConnectorOutput, ModelRunnerOutput, SchedulerOutput
from engine.request import Request, RequestStatus

if TYPE_CHECKING:
    import torch

    from engine.attention.metadata import AttentionMetadata
    from engine.lora.layers import LoRAKernelMeta
    from engine.model.llama import Llama

# --- The model, and who runs it --------------------------------------------------------------------------------------

# (layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq, D]: stores keys and values, and looks back at all.
Attend = Callable[[int, "torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]


class Runner(Protocol):
    """What runs a step (`vllm/v1/worker/gpu_model_runner.py`): here, or far away."""

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Runs the step, and says all that came of it: nothing of that is kept."""
        ...


# --- Decisions -------------------------------------------------------------------------------------------------------


class Scheduler(Protocol):
    """Who is in the next step, and what becomes of what it brings (`vllm/v1/core/sched/interface.py`).

    It is made with the limits and the block tables; and, by name, with `connector`, `drafts`, `adapters` and
    `async_scheduling`, each only if the engine has it.
    """

    config: Any  # SchedulerConfig
    kv_cache_manager: Any  # core/kv_cache_manager.py's
    requests: dict[str, Request]  # all that are not finished
    running: list[Request]
    waiting: Any  # has a length
    drafts: Any  # what it was made with; None
    patience: float | None  # seconds after which an idle loop asks again; None: it need not
    waiting_for_adapter: Sequence[str]  # of those that wait: passed over in the last step
    waiting_for_remote_kvs: Mapping[str, Request]  # neither waiting nor running: their keys and values are on their way

    def add_request(self, request: Request) -> None:
        """It waits. Raises InputError."""
        ...

    def has_unfinished_requests(self) -> bool:
        """Must the loop go on?"""
        ...

    def num_slots(self, request: Request) -> int:
        """KV slots that it fills in its life: what can never fit is refused on arrival."""
        ...

    def schedule(self) -> SchedulerOutput:
        """Requests and token counts of the next step, and blocks for what it will write. `num_computed_tokens` of each
        counts this step's tokens from now on."""
        ...

    def update_from_output(
        self, output: SchedulerOutput, sampled_token_ids: dict[str, list[int]]
    ) -> list[EngineCoreOutput]:
        """Append what was sampled, finish requests and free their blocks."""
        ...

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        """End them from outside. Returns those that there were."""
        ...


class BlockPool(Protocol):
    """Who owns which block of the KV cache (`vllm/v1/core/block_pool.py`); made with their number, block 0 included."""

    num_blocks: int
    ref_count: list[int]  # owners of each block
    block_hash: list[bytes | None]  # of each block that is in the index

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` could hand out."""
        ...

    def allocate(self, n: int) -> list[int]:
        """Blocks for one owner; what they held is forgotten."""
        ...

    def touch(self, blocks: Sequence[int]) -> None:
        """One more owner for each."""
        ...

    def free(self, blocks: Sequence[int]) -> None:
        """One owner less for each; they are in the order of a table."""
        ...

    def get_cached_block(self, block_hash: bytes) -> int | None:
        """A block with this content."""
        ...

    def cache_block(self, block: int, block_hash: bytes) -> None:
        """It is full, and this is what it holds."""
        ...

    def evict(self, block: int) -> None:
        """What it holds is not to be found any more."""
        ...


# --- Attention -------------------------------------------------------------------------------------------------------


class KVCache(Protocol):
    """The memory of all blocks, on every layer."""

    layers: list[torch.Tensor]  # one for each layer of the model
    block_size: int  # tokens

    @property
    def can_roll_back(self) -> bool:
        """May tokens at the end of a sequence be taken back, and others written there?"""
        ...

    def release(self, blocks: Sequence[int]) -> None:
        """A request has left these blocks."""
        ...


class AttentionBackend(Protocol):
    """How a step's queries meet the keys and values of their sequences (`vllm/v1/attention/backend.py`)."""

    def make_cache(self, model: Llama, num_blocks: int, block_size: int) -> KVCache:
        """Memory for so many blocks of so many tokens. Raises InputError for sizes that its kernels cannot do."""
        ...

    def plan(self, meta: AttentionMetadata, cache: KVCache) -> Attend:
        """Attention of one step: what is the same for all layers is decided here, once."""
        ...


# --- Tokens ----------------------------------------------------------------------------------------------------------


class Sampler(Protocol):
    """Logits of a batch to a token for each row (`vllm/v1/sample/sampler.py`)."""

    def __call__(self, logits: torch.Tensor, states: Sequence[Any]) -> tuple[list[int], list[dict[int, Any] | None]]:
        """[R, vocab], R `SamplingState`s -> R token ids, and of each row its log probabilities by token, or None."""
        ...


class RejectionRule(Protocol):
    """Which drafts stand (`vllm/v1/sample/rejection_sampler.py`)."""

    def __call__(  # noqa: PLR0913  one tensor for each thing that rows have
        self,
        scores: torch.Tensor,
        draft_token_ids: torch.Tensor,
        cu_num_sampled_tokens: torch.Tensor,
        is_greedy: torch.Tensor,
        draw_u: torch.Tensor,
        accept_u: torch.Tensor,
        draft_probs: torch.Tensor | None,
        draft_rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(token_ids [R], num_sampled [B]): request b is given the first num_sampled[b] of its tokens."""
        ...


class Drafter(Protocol):
    """Guesses what the target will say (`vllm/v1/spec_decode/`); made with the SpeculativeConfig and the target."""

    needs_hidden: bool  # is it to be told the target's hidden states?

    def propose(self, contexts: list[Any]) -> list[Any]:
        """A `Draft` for each `DraftContext`, in order."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has finished, or will be computed again."""
        ...


# --- Grammars --------------------------------------------------------------------------------------------------------


class Grammar(Protocol):
    """Answers that a grammar allows, and nothing else (`vllm/v1/structured_output/__init__.py`)."""

    def grammar_init(self, request: Request) -> None:
        """Compile what a request asks for, on any thread. Raises InputError."""
        ...

    def mask(self, logits: torch.Tensor, requests: Sequence[Request]) -> Sequence[str]:
        """Forbid in place, in the rows [R, vocab] of those that ask, what may not follow. Returns their ids."""
        ...

    def finish(self, request_ids: Iterable[str]) -> None:
        """They have ended."""
        ...


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


class AddLoRA(Protocol):
    """What adapters add to a linear layer (`vllm/lora/punica_wrapper/punica_gpu.py:add_lora_linear`)."""

    def __call__(  # noqa: PLR0913  the layer's output and input, and where the weights of which rows are
        self, y: torch.Tensor, x: torch.Tensor, memory: Any, layer: int, kind: str, meta: LoRAKernelMeta
    ) -> torch.Tensor:
        """y [T, out] + (x Aᵀ) Bᵀ, row by row with its own adapter's A and B; y may be changed. x [T, in]."""
        ...


class RunnerAdapters(Protocol):
    """The same adapters, as the model runner sees them."""

    def applied(self, requests: Sequence[Request], meta: AttentionMetadata) -> AbstractContextManager[None]:
        """While it lasts, each row of the step goes through the adapter of its request as well."""
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


class WorkerConnector(Protocol):
    """The model runner's half of a connector (`kv_connector/v1/base.py:KVConnectorBase_V1`)."""

    def register_kv_caches(self, layers: list[torch.Tensor], model: Llama) -> None:
        """The memory that keys and values come into and go out of."""
        ...

    def bind_connector_metadata(self, meta: KVConnectorMetadata | None) -> None:
        """The orders of the step that begins."""
        ...

    def start_load_kv(self) -> None:
        """Begin to load what this step needs."""
        ...

    def wait_for_layer_load(self, layer: int) -> None:
        """Until what this layer needs is there."""
        ...

    def save_kv_layer(self, layer: int) -> None:
        """This layer's keys and values are computed."""
        ...

    def wait_for_save(self) -> None:
        """Until the blocks of this step may be written again."""
        ...

    def idle(self, seconds: float) -> None:
        """Nobody computes: wait so long for the network."""
        ...
