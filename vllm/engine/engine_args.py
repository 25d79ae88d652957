"""What an engine is started with, as flags and arguments say it, checked once and passed on.

Owns the names, the defaults and what cannot go together; called by `serve`, by `LLM`, and by an engine's process. It
never loads anything. vLLM: `vllm/engine/arg_utils.py`.
"""

from __future__ import annotations

import common

import bisect
import copy
import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine import plugs
from engine.choices import (
    ALL2ALL_BACKENDS,
    ATTENTION,
    BACKENDS,
    LOAD_FORMATS,
    PLACES,
    POLICIES,
    REASONING_PARSERS,
    ROUTING,
    TOOL_CALL_PARSERS,
)
from engine.config import LOWEST, SchedulerConfig, VllmConfig, check_model_len, check_numbers
from engine.kv_cache_interface import KVCacheGroup, max_blocks
from engine.kv_transfer.config import KVTransferConfig
from engine.lora.config import LoRAConfig
from engine.model import folders
from engine.model.chat_template import read_chat_template
from engine.model.config import LlamaConfig
from engine.model.loader import find_dtype
from engine.parallel.config import ParallelConfig
from engine.quantization.kv_codes import KV_CACHE_DTYPES
from engine.quantization.methods import METHODS
from engine.registry import ATTENTION_BACKENDS
from engine.sampling.defaults import override_generation_config
from engine.sampling.pooler import PoolerConfig
from engine.spec_decode.drafters import SpeculativeConfig

# What depends on the usage, as in vLLM (`_set_default_max_num_seqs_and_batched_tokens_args`): a script has all its
# prompts at once and nobody reads along, while behind a server somebody waits for each token.
DEFAULTS = {"LLM": (256, 4096, 4096), "serve": (64, 512, 8192)}  # max_num_seqs; tokens in a step, and on a GPU

AUTO = -1  # of max_model_len: as many as fit
AT_LEAST = LOWEST | {
    "max_model_len": 2,  # a scheduler is content with 1; an answer follows a prompt
    "max_logprobs": -1,  # all there are
    "num_gpu_blocks_override": 2,  # the first one is nobody's
    "kv_cache_memory_bytes": 1,
    "block_size": 1,
    "max_num_queued_reqs": 1,
    "seed": 0,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "num_redundant_experts": 0,
    "eplb_step_interval": 1,
    "data_parallel_size": 1,
    "data_parallel_size_local": 0,
    "data_parallel_start_rank": 0,
    "data_parallel_rpc_port": 0,
    "api_server_count": 1,
}
AT_MOST = {
    "gpu_memory_utilization": 1,
    "kv_cache_gib": 1 << 20,
    "kv_offloading_size": 1 << 20,
    "max_num_seqs": 1 << 16,  # there are tables with a row for each
    "tensor_parallel_size": 64,
    "pipeline_parallel_size": 64,
    "data_parallel_size": 64,
    "api_server_count": 64,
    "data_parallel_rpc_port": 65535,
}
OF_A_SERVER = {  # what an `LLM` does not have
    *("served_model_name", "override_generation_config", "max_num_queued_reqs", "lora_modules", "tokenizer"),
    *("gpu_memory_utilization", "chat_template", "enable_auto_tool_choice", "tool_call_parser", "kv_transfer_config"),
    *("reasoning_parser", "response_role", "strict_fields"),
    *("engine_place", "data_parallel_size", "data_parallel_size_local", "data_parallel_start_rank", "headless"),
    *("data_parallel_address", "data_parallel_rpc_port", "data_parallel_routing", "api_server_count"),
    *("runner", "convert", "pooler_config", "enable_sleep_mode"),
}


@dataclass
class EngineArgs:
    """What `serve` and `LLM` are started with, under vLLM's names (`vllm/engine/arg_utils.py`).

    None is what the model has, or the usage: see `filled_in`. Defaults of a part are those of its own configuration.
    """

    model: str | None = None
    tokenizer: str | None = None  # whose, if not the model's
    served_model_name: list[str] | None = None
    load_format: str = "auto"
    dtype: Any = "auto"  # a name, or torch's
    seed: int = 0
    quantization: str | None = None
    max_model_len: int | str | None = None  # "auto" or -1: as many as fit; from __post_init__ on -1
    max_logprobs: int = 20  # that a request may ask for
    generation_config: str = "auto"
    override_generation_config: str | dict[str, Any] | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool = SchedulerConfig.enable_chunked_prefill
    max_num_scheduled_tokens: int | None = SchedulerConfig.max_num_scheduled_tokens
    max_num_active_seqs: int | None = SchedulerConfig.max_num_active_seqs
    long_prefill_token_threshold: int = SchedulerConfig.long_prefill_token_threshold
    long_prefill_token_threshold_adaptive: bool = SchedulerConfig.long_prefill_token_threshold_adaptive
    scheduler_reserve_full_isl: bool = SchedulerConfig.scheduler_reserve_full_isl
    watermark: float = SchedulerConfig.watermark
    scheduling_policy: str = SchedulerConfig.policy
    max_num_queued_reqs: int | None = 1024
    block_size: int = 16
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = VllmConfig.kv_cache_dtype
    attention_backend: str = VllmConfig.attention_backend
    plug: Any = None  # {seam: part}, or seam=FILE.py:OBJECT of each; from __post_init__ on the former
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_gib: float = 1.0
    kv_cache_memory_bytes: int | None = None  # comes before kv_cache_gib and gpu_memory_utilization
    kv_offloading_size: float | None = None  # GiB: a StoreConnector in memory, if kv_transfer_config names none
    enforce_eager: bool = VllmConfig.enforce_eager
    async_scheduling: bool = VllmConfig.async_scheduling
    speculative_config: str | dict[str, Any] | None = None
    enable_lora: bool = False
    max_loras: int = LoRAConfig.max_loras
    max_lora_rank: int = LoRAConfig.max_lora_rank
    max_cpu_loras: int | None = LoRAConfig.max_cpu_loras
    lora_modules: list[str] | None = None  # name=path of each, or JSON
    chat_template: str | None = None  # a file or the text; from __post_init__ on the text
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    response_role: str = "assistant"
    strict_fields: bool = False
    kv_transfer_config: str | dict[str, Any] | None = None
    runner: str = "auto"
    convert: str = "auto"
    pooler_config: str | dict[str, Any] | None = None
    enable_sleep_mode: bool = False
    engine_place: str = "process"
    tensor_parallel_size: int = ParallelConfig.tensor_parallel_size
    pipeline_parallel_size: int = ParallelConfig.pipeline_parallel_size
    distributed_executor_backend: str | None = ParallelConfig.distributed_executor_backend
    enable_expert_parallel: bool = ParallelConfig.enable_expert_parallel
    all2all_backend: str = ParallelConfig.all2all_backend
    enable_eplb: bool = ParallelConfig.enable_eplb
    num_redundant_experts: int = ParallelConfig.num_redundant_experts
    eplb_step_interval: int = ParallelConfig.eplb_step_interval
    data_parallel_size: int = 1
    data_parallel_size_local: int | None = None
    data_parallel_start_rank: int = 0
    data_parallel_address: str = "127.0.0.1"
    data_parallel_rpc_port: int = 29550
    data_parallel_routing: str = "load"
    api_server_count: int = 1
    headless: bool = False
    # Of the copy that one engine gets: which it is, and where workers meet that share experts.
    engine_rank = meeting_port = 0

    def __post_init__(self) -> None:
        """Refuse early what would fail late. Raises InputError."""
        self.max_model_len = AUTO if self.max_model_len == "auto" else self.max_model_len
        self.attention_backend = ATTENTION.get(str(self.attention_backend).lower(), self.attention_backend)
        self._check_numbers()
        if not all(self.served_model_name or ["default"]):
            raise common.InputError(f"served_model_name {self.served_model_name}: a name must not be empty")
        self.plug = plugs.read(self.plug)
        find_dtype(self.dtype)
        override_generation_config(self.override_generation_config)
        PoolerConfig.of(None, self.pooler_config)
        self._check_choices()
        if self.chat_template is not None:
            self.chat_template = read_chat_template(self.chat_template)
        if self.enable_auto_tool_choice and not self.tool_call_parser:
            raise common.InputError("--enable-auto-tool-choice: needs --tool-call-parser")

        if self.scales_out:
            check_parallel(self)
        _, _ = self.lora_config, self.speculation  # wrong ones are refused now
        self._check_transfers()
        self._check_plugs()
        for flag, used in (("--enable-lora", self.enable_lora), ("--kv-transfer-config", self.kv_transfer is not None)):
            if self.enable_sleep_mode and used:
                raise common.InputError(f"--enable-sleep-mode: not together with {flag}")
        if self.lora_modules and not self.enable_lora:
            raise common.InputError("--lora-modules: needs --enable-lora")
        if self.enable_lora and (twice := [name for name in self.adapters if name in self.names]):
            raise common.InputError(f"--lora-modules {twice[0]}: is the name of the model itself")

    def _check_numbers(self) -> None:
        check_numbers(self, AT_LEAST | ({"max_model_len": AUTO} if self.max_model_len == AUTO else {}))
        for name in ("gpu_memory_utilization", "kv_cache_gib", "kv_offloading_size"):
            value = getattr(self, name)
            if value is not None and (type(value) not in (int, float) or not 0 < value < math.inf):
                raise common.InputError(f"{name} {value!r}: must be a number above 0")
        for name, high in AT_MOST.items():
            if (value := getattr(self, name)) is not None and value > high:
                raise common.InputError(f"{name} {value!r}: must be at most {high}")

    def _check_choices(self) -> None:
        allowed = {
            "scheduling_policy": POLICIES,
            "engine_place": PLACES,
            "runner": ("auto", "generate", "pooling"),  # it does both, whichever is named
            "convert": ("auto", "none", "embed"),
            "attention_backend": ATTENTION_BACKENDS,
            "load_format": LOAD_FORMATS,
            "all2all_backend": ALL2ALL_BACKENDS,
        }
        if self.tool_call_parser is not None:
            allowed["tool_call_parser"] = TOOL_CALL_PARSERS
        if self.reasoning_parser is not None:
            allowed["reasoning_parser"] = REASONING_PARSERS
        if self.quantization is not None:
            allowed["quantization"] = (*METHODS, "compressed-tensors")
        if self.kv_cache_dtype != "auto":
            allowed["kv_cache_dtype"] = KV_CACHE_DTYPES
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise common.InputError(f"{name} {getattr(self, name)!r}: must be one of {', '.join(values)}")

    def _check_plugs(self) -> None:
        if "attention" in self.plug and self.kv_cache_dtype != "auto":
            raise common.InputError(
                "plug attention: not together with --kv-cache-dtype, which has a backend of its own"
            )
        for name in ("drafter", "rejection"):
            if name in self.plug and self.speculation is None:
                raise common.InputError(f"plug {name}: needs --speculative-config, or nobody would ask it")
        if "lora" in self.plug and not self.enable_lora:
            raise common.InputError("plug lora: needs --enable-lora, or nobody would ask it")

    def _check_transfers(self) -> None:
        kv_transfer = self.kv_transfer
        if kv_transfer is None:
            return
        stored = kv_transfer.kv_connector == "StoreConnector"  # an adapter's name may mean another one tomorrow
        name = "--kv-transfer-config" if self.kv_offloading_size is None else "--kv-offloading-size"
        for flag, used in (
            ("--kv-transfer-config", self.kv_offloading_size is not None and self.kv_transfer_config is not None),
            ("--kv-cache-dtype", self.kv_cache_dtype != "auto"),
            ("--enable-lora if blocks go to a store", stored and self.enable_lora),
        ):
            if used:
                raise common.InputError(f"{name}: not together with {flag}")
        if self.has_workers or self.has_engines:
            check_transfers(self)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """None without --speculative-config. Raises InputError."""
        return None if self.speculative_config is None else SpeculativeConfig.from_json(self.speculative_config)

    @property
    def kv_transfer(self) -> KVTransferConfig | None:
        """None without --kv-transfer-config and --kv-offloading-size. Raises InputError."""
        if self.kv_offloading_size is not None:
            room = {"cpu_bytes": int(self.kv_offloading_size * 2**30)}
            return KVTransferConfig("StoreConnector", "kv_both", kv_connector_extra_config=room)
        return None if self.kv_transfer_config is None else KVTransferConfig.from_json(self.kv_transfer_config)

    @property
    def lora_config(self) -> LoRAConfig | None:
        """None without --enable-lora. Raises InputError."""
        return LoRAConfig(self.max_loras, self.max_lora_rank, self.max_cpu_loras) if self.enable_lora else None

    @property
    def kv_cache_bytes(self) -> int:
        """For the KV cache, as it was said. An `LLM` takes as much on a GPU: several of them fit side by side there."""
        return self.kv_cache_memory_bytes or int(self.kv_cache_gib * 2**30)

    @classmethod
    def of_llm(cls, **named: Any) -> EngineArgs:
        """From the arguments of an `LLM`. Raises InputError for a name that it does not have."""
        allowed = {f.name for f in dataclasses.fields(cls)} - OF_A_SERVER
        if unknown := [name for name in named if name not in allowed]:
            raise common.InputError(f"{unknown[0]}: is no argument of an LLM; allowed: {', '.join(sorted(allowed))}")
        return cls(**named)

    def filled_in(self, usage: str, model: LlamaConfig) -> EngineArgs:
        """A copy with the limits that nobody named: the model's, and what the usage, "LLM" or "serve", starts with.
        Raises InputError for a context that the model does not have."""
        args, (max_num_seqs, *tokens) = copy.copy(self), DEFAULTS[usage]
        if args.max_model_len in (None, AUTO):  # and then `shorten`
            args.max_model_len = model.max_position_embeddings
        check_model_len(args.context, model.max_position_embeddings)
        if args.max_num_seqs is None:
            args.max_num_seqs = min(max_num_seqs, args.max_num_batched_tokens or max_num_seqs)
        if args.max_num_batched_tokens is None:
            args.max_num_batched_tokens = max(tokens[common.HAS_GPU], args.max_num_seqs)
        if not args.enable_chunked_prefill:  # a prompt is computed whole, whatever was named
            args.max_num_batched_tokens = max(args.max_num_batched_tokens, args.context)
        return args

    @property
    def context(self) -> int:
        """max_model_len of arguments that are filled in."""
        assert isinstance(self.max_model_len, int) and self.max_model_len != AUTO
        return self.max_model_len

    @property
    def max_in_flight_tokens(self) -> int:
        """Of one request, of arguments that are filled in: planned, and not known to be computed."""
        return (self.max_num_batched_tokens or 0) * (1 + self.async_scheduling)

    def shorten(self, num_blocks: int, groups: Sequence[KVCacheGroup] = ()) -> None:
        """A context that was AUTO, and is filled in, to what so many blocks hold. Raises InputError for less than 2."""

        def takes(num_tokens: int) -> int:
            return max_blocks(groups, self.block_size, num_tokens, self.max_in_flight_tokens)

        if (fitting := bisect.bisect(range(self.context + 1), num_blocks, key=takes) - 1) < 2:
            raise common.InputError("max_model_len auto: the KV cache holds no block; give it more memory")
        self.max_model_len = fitting

    def scheduler_config(self) -> SchedulerConfig:
        """The scheduler's limits, of arguments that are filled in. Raises InputError for those that contradict each
        other."""
        assert self.max_num_seqs and self.max_num_batched_tokens
        return SchedulerConfig(
            self.context,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.scheduling_policy,
            enable_chunked_prefill=self.enable_chunked_prefill,
            max_num_scheduled_tokens=self.max_num_scheduled_tokens,
            max_num_active_seqs=self.max_num_active_seqs,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            long_prefill_token_threshold_adaptive=self.long_prefill_token_threshold_adaptive,
            scheduler_reserve_full_isl=self.scheduler_reserve_full_isl,
            watermark=self.watermark,
        )

    def vllm_config(self, workers: Any = None) -> VllmConfig:
        """What an engine with these arguments has. Raises InputError.

        One table for all layers, as in vLLM, where somebody else counts on it: who sends blocks away or lives in them,
        or has only some of the layers.
        """
        one_table = self.enable_lora or self.kv_transfer or self.pipeline_parallel_size > 1 or "scheduler" in self.plug
        return VllmConfig(
            attention_backend=self.attention_backend,
            kv_cache_dtype=self.kv_cache_dtype,
            hybrid_kv_cache=not one_table,
            enforce_eager=self.enforce_eager,
            async_scheduling=self.async_scheduling,
            speculative_config=self.speculation,
            lora_config=self.lora_config,
            kv_transfer_config=self.kv_transfer,
            plug=self.plug,
            workers=workers,
        )

    @property
    def adapters(self) -> dict[str, str]:
        """Paths of the adapters to start with, by name. Raises InputError."""
        return {module["name"]: module["path"] for module in read_lora_modules(self.lora_modules)}

    @property
    def adapter_parents(self) -> dict[str, str]:
        """By name, of which model an adapter is one, where that was said. Raises InputError."""
        modules = read_lora_modules(self.lora_modules)
        return {module["name"]: module["base_model_name"] for module in modules if "base_model_name" in module}

    @property
    def world_size(self) -> int:
        """Workers of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def scales_out(self) -> bool:
        """More than one engine, one API server, or one process or thread per engine: companion 06c's business."""
        return self.has_workers or self.has_engines

    def for_engine(self, engine: int) -> EngineArgs:
        """The flags of one of several engines: each listens at ports of its own."""
        config = self.kv_transfer
        if config is None and not self.shares_experts:
            return self
        mine = copy.copy(self)  # without looking at everything once more
        mine.engine_rank = engine
        if config is not None:
            port = config.port_of(engine * self.world_size)
            own = dataclasses.replace(config, engine_id=f"{config.engine_id}_dp{engine}", kv_port=port)
            mine.kv_transfer_config = dataclasses.asdict(own)
        return mine

    def meeting_at(self, port: int) -> EngineArgs:
        """The flags of engines whose workers meet at a port of this machine."""
        mine = copy.copy(self)
        mine.meeting_port = port
        return mine

    @property
    def shares_experts(self) -> bool:
        """Do several engines have the experts of one model among them?"""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def shares_experts_with(self) -> tuple[int, int, int]:
        """How many engines share experts, which of them this is, and the port where they meet."""
        return (self.data_parallel_size, self.engine_rank, self.meeting_port) if self.shares_experts else (1, 0, 0)

    @property
    def has_engines(self) -> bool:
        """More than one engine or API server, or engines on other machines?"""
        return self.data_parallel_size > 1 or self.api_server_count > 1 or self.headless

    @property
    def has_workers(self) -> bool:
        """Does the engine core send its decisions to an executor, in place of running the model itself?"""
        asked = self.distributed_executor_backend is not None or self.enable_expert_parallel or self.enable_eplb
        return self.world_size > 1 or asked or self.async_scheduling

    @property
    def names(self) -> list[str]:
        """What clients may call the model; the first one is what answers say."""
        return self.served_model_name or [self.model or folders.DEFAULT_MODEL]


def read_lora_modules(texts: list[str] | None) -> list[dict[str, str]]:
    """Name, path and perhaps base_model_name of each, from `name=path` or JSON. Raises InputError."""
    modules: list[Any] = []
    for text in texts or ():
        if text.lstrip()[:1] in ("{", "["):
            try:
                found = json.loads(text)
            except ValueError as error:
                raise common.InputError(f"--lora-modules {text:.60}: not JSON ({error})") from None
            modules += found if isinstance(found, list) else [found]
        else:
            name, _, path = text.partition("=")
            modules.append({"name": name, "path": path})
    for i, module in enumerate(modules):
        keys = {"name", "path", "base_model_name"}
        right = isinstance(module, dict) and {"name", "path"} <= module.keys() <= keys
        if not right or not all(isinstance(x, str) and x for x in module.values()):
            raise common.InputError(
                f"--lora-modules {module!r:.60}: must be name=path, or JSON with name, path and perhaps base_model_name"
            )
        if module["name"] in [other["name"] for other in modules[:i]]:
            raise common.InputError(f"--lora-modules {module['name']}: each name once")
    return modules


def check_parallel(args: Any) -> None:
    """Refuse combinations of flags that cannot work. Raises InputError."""
    allowed = {"distributed_executor_backend": (None, *BACKENDS), "data_parallel_routing": ROUTING}
    for name, values in allowed.items():
        if getattr(args, name) not in values:
            raise common.InputError(f"{name} {getattr(args, name)!r}: must be one of {', '.join(filter(None, values))}")
    if args.engine_place != "process":
        raise common.InputError(f"engine_place {args.engine_place}: must be process when an engine has several")
    if args.async_scheduling and args.pipeline_parallel_size > 1:
        raise common.InputError(
            "async_scheduling: not together with pipeline_parallel_size, whose first stage would "
            "have to know the tokens before the scheduler does"
        )
    if args.pipeline_parallel_size > 1 and args.speculation and args.speculation.method == "early_exit":
        raise common.InputError(
            "speculative_config: method early_exit: not together with pipeline_parallel_size: the "
            "last stage drafts, and has not the target's first layers"
        )
    check_shared_experts(args)
    check_eplb(args)
    check_engines(args)


def check_shared_experts(args: Any) -> None:
    """Raises InputError for what engines cannot do that share experts, and so step together."""
    if not args.shares_experts:
        return
    local = args.data_parallel_size if args.data_parallel_size_local is None else args.data_parallel_size_local
    for name, used in (
        ("pipeline_parallel_size", args.pipeline_parallel_size > 1),
        ("async_scheduling", args.async_scheduling),
        ("speculative_config", args.speculative_config is not None),
        ("kv_transfer_config", args.kv_transfer_config is not None),
        ("enable_sleep_mode", args.enable_sleep_mode),
        ("distributed_executor_backend", args.distributed_executor_backend not in (None, "mp")),
        ("data_parallel_size_local: all engines are on one machine", local != args.data_parallel_size or args.headless),
    ):
        if used:
            raise common.InputError(f"enable_expert_parallel and data_parallel_size: not together with {name}")


def check_eplb(args: Any) -> None:
    """Raises InputError for experts that cannot move, or that nobody moves."""
    if args.num_redundant_experts and not args.enable_eplb:
        raise common.InputError("num_redundant_experts: needs enable_eplb, or nobody would have one")
    if not args.enable_eplb:
        return
    if not args.enable_expert_parallel or args.all2all_backend != "all2all":
        raise common.InputError("enable_eplb: needs enable_expert_parallel and all2all_backend all2all")
    if args.quantization:
        raise common.InputError("enable_eplb: not together with quantization: experts that are codes do not move")


def check_engines(args: Any) -> None:
    """Raises InputError for engines that nobody would have, or twice."""
    local = args.data_parallel_size if args.data_parallel_size_local is None else args.data_parallel_size_local
    if not 0 <= local <= args.data_parallel_size:
        raise common.InputError(
            f"data_parallel_size_local {local}: must be from 0 to data_parallel_size ({args.data_parallel_size})"
        )
    if args.headless and args.api_server_count > 1:
        raise common.InputError("api_server_count: a headless process has no API server")
    if args.headless and not 0 < args.data_parallel_start_rank <= args.data_parallel_size - max(1, local):
        raise common.InputError(
            f"data_parallel_start_rank {args.data_parallel_start_rank}: headless engines come "
            "after those of the head, and all before data_parallel_size "
            f"({args.data_parallel_size})"
        )


def check_transfers(args: Any) -> None:
    """Raises InputError for what a connector cannot do on workers, or with several engines."""
    config, name = args.kv_transfer, "kv_transfer_config: not together with"
    if args.pipeline_parallel_size > 1:
        raise common.InputError(f"{name} pipeline_parallel_size")
    if args.distributed_executor_backend == "ray":
        raise common.InputError(f"{name} distributed_executor_backend ray")
    if config.kv_connector not in ("SharedMemoryConnector", "TCPConnector"):
        raise common.InputError(
            f"{name} workers or several engines: {config.kv_connector}; allowed: SharedMemoryConnector, TCPConnector"
        )
    ranks = args.world_size * args.data_parallel_size
    fits = config.kv_port <= 65536 - ranks and (config.kv_port or args.world_size == 1)
    if config.is_kv_producer and not fits:
        raise common.InputError(
            f"kv_port {config.kv_port}: the r-th rank of all engines listens at kv_port + r, so it "
            f"must be from 1 to {65536 - ranks}"
        )
