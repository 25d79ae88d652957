"""One process, one engine: a front end with the core behind it.

Owns what the parts of an engine have in common; called by `LLM`, by an engine's process, or by a test. It never decides
what runs when. vLLM: `vllm/v1/engine/llm_engine.py`.
"""

from __future__ import annotations

import common

from pathlib import Path
from typing import Any

from engine.assemble import make_core
from engine.config import VllmConfig
from engine.engine_args import AUTO, EngineArgs
from engine.front_end import FrontEnd, Prompt, RequestOutput
from engine.kv_cache_interface import groups_of, max_blocks
from engine.lora.config import LoRARequest
from engine.lora.manager import LoRAModelManager
from engine.model import llama
from engine.model.tokenizer import Tokenizer
from engine.quantization.kv_codes import block_bytes
from engine.request import PoolingParams, SamplingParams
from engine.sampling.guided.guided_decoding import GuidedDecoding
from engine.sampling.guided.structured_outputs import ending, validate


class LLMEngine(FrontEnd):
    """Requests in, outputs out: validates, tokenizes, steps, detokenizes."""

    def __init__(
        self,
        model: llama.Llama,
        tokenizer: Tokenizer,
        args: EngineArgs | None = None,
        *,
        config: VllmConfig | None = None,
        **named: Any,
    ) -> None:
        """`args`, or by name the arguments that an `LLM` has; the model is loaded, so nobody looks at what they say of
        that. `config` says what the engine has besides, if not they; with workers, `model` is without weights.

        The KV cache has `num_gpu_blocks_override` blocks (block 0 included, on a CPU as well: the name is vLLM's) or,
        by default, as many as fit `kv_cache_bytes`, and at least enough for one sequence of `max_model_len`.
        Raises InputError.
        """
        args = args or EngineArgs.of_llm(**named)
        auto, args = args.max_model_len == AUTO, args.filled_in("LLM", model.config)
        config, num_blocks = config or args.vllm_config(), args.num_gpu_blocks_override
        groups = groups_of(getattr(model, "whole_config", model.config), config, args.block_size)
        fitting = args.kv_cache_bytes // block_bytes(model, args.block_size, config.kv_cache_dtype, groups)
        if auto:
            args.shorten(num_blocks - 1 if num_blocks else fitting, groups)
        limits = args.scheduler_config()
        if num_blocks is None:
            in_flight = args.max_in_flight_tokens
            num_blocks = 1 + max(fitting, max_blocks(groups, args.block_size, limits.max_model_len, in_flight))
        self.model, self.config = model, config
        self.about: dict[str, Any] = {}  # what a start has found out
        self.sleeper: Any = None  # with --enable-sleep-mode: what puts weights and cache away, here or on workers
        self.lora = LoRAModelManager(config.lora_config) if config.lora_config else None
        grammar = GuidedDecoding(tokenizer, model.config)
        core = make_core(
            model,
            limits,
            num_blocks,
            args.block_size,
            config,
            enable_prefix_caching=args.enable_prefix_caching,
            grammar=grammar,
            lora=self.lora,
            seed=args.seed,
        )
        super().__init__(model.config, tokenizer, core)
        self.max_logprobs = args.max_logprobs

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        **about: Any,
    ) -> None:
        """As any front end, and here the adapter of a `lora_request` is loaded if need be. Raises InputError."""
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            c = self.model.config  # with its own vocabulary: the runner then finds what is compiled here
            validate(params.structured_outputs, self.tokenizer, c.vocab_size, c.eos_token_ids)
        if lora_request is not None:
            self.add_lora(lora_request)
            about["lora_name"] = lora_request.lora_name
        if (name := about.get("lora_name")) is not None and not (self.lora and self.lora.knows(name)):
            raise common.InputError(f"lora_name {name!r}: is not loaded")
        super().add_request(request_id, prompt, params, **about)

    def _answer(self, sequence: Any, finish_reason: str | None, stop_reason: int | str | None) -> RequestOutput | None:
        if sequence.request.sampling_params.structured_outputs is not None:
            finish_reason, stop_reason = ending(self, sequence, finish_reason, stop_reason)
        return super()._answer(sequence, finish_reason, stop_reason)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter if it is not there yet. Raises InputError, and nothing has changed."""
        name, path = lora_request.lora_name, lora_request.lora_path
        manager = self._adapters()
        if not manager.knows(name):
            manager.add_adapter(name, path)
            return True
        if path and isinstance(known := manager.sources[name], str | Path) and str(known) != str(path):
            raise common.InputError(f"lora_path {path!r}: {name!r} is loaded already, from {known}")
        return False

    def remove_lora(self, name: str) -> None:
        """Forget an adapter; requests that use it finish with it. Raises InputError."""
        self._adapters().remove_adapter(name, in_use=self.core.scheduler.uses(name))

    def list_loras(self) -> list[str]:
        """Names of the adapters that a request may have."""
        manager = self._adapters()
        return sorted(filter(manager.knows, manager.sources))

    def _adapters(self) -> LoRAModelManager:
        if self.lora is None:
            raise common.InputError("lora_request: this engine was started without enable_lora")
        return self.lora
