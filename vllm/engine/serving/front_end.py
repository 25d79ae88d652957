"""The front end: validates, tokenizes and detokenizes beside the event loop, and writes letters to the core elsewhere.

Owns the callers' sequences and their text; called by `async_llm` with each request and each letter. It never sees the
model or a block. vLLM: `vllm/v1/engine/input_processor.py`, `vllm/v1/engine/output_processor.py`.
"""

from __future__ import annotations

import common

import uuid
from collections.abc import Callable, Iterable
from typing import Any

from engine import front_end
from engine.front_end import RequestOutput
from engine.model.config import LlamaConfig
from engine.model.tokenizer import Tokenizer
from engine.output import EngineCoreOutput
from engine.request import Request, RequestStatus, prompt_length_error
from engine.serving.letters import EngineCoreOutputs, EngineCoreRequestType


class CoreMailbox:
    """Stands where `LLMEngine` has its core, and writes letters instead of computing."""

    def __init__(self, send: Callable[[Any], None], max_model_len: int) -> None:
        self.send, self.max_model_len = send, max_model_len
        self.scheduler = self.config = self  # the parts of a core that the front end looks into
        self.outputs: list[EngineCoreOutput] = []

    def check_request(self, request: Request) -> None:
        """All that can be wrong with a request is known here: the pool holds at least one of `max_model_len`."""
        if error := prompt_length_error(request.num_prompt_tokens, self.max_model_len):
            raise common.InputError(error)

    def add_request(self, request: Request) -> None:
        self.send((EngineCoreRequestType.ADD, request))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self.send((EngineCoreRequestType.ABORT, list(request_ids)))

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> None:
        self.abort_requests(request_ids)  # a stop string was found in the text: to the core, that is an abort

    def step(self) -> list[EngineCoreOutput]:
        """What the last letter brought."""
        outputs, self.outputs = self.outputs, []
        return outputs


class FrontEnd(front_end.FrontEnd):
    """The front end with letters to a core behind it."""

    def __init__(
        self, config: LlamaConfig, tokenizer: Tokenizer, send: Callable[[Any], None], max_model_len: int
    ) -> None:
        super().__init__(config, tokenizer, CoreMailbox(send, max_model_len))

    def _own_name(self, request_id: str) -> str:
        """Letters about a request are on their way when it is aborted, and a caller may use its name again at once: the
        namesake must not get them. vLLM: `InputProcessor.assign_request_id`."""
        return f"{request_id}-{uuid.uuid4().hex[:8]}"

    def process_outputs(self, letter: EngineCoreOutputs, outputs: list[EngineCoreOutput]) -> list[RequestOutput]:
        """Token ids of some sequences into news for their callers."""
        for request_id, admission in letter.admitted.items():
            if sequence := self.sequences.get(request_id):
                sequence.request.num_cached_tokens = admission.num_cached_tokens
        self.core.outputs = outputs
        return self.step()
