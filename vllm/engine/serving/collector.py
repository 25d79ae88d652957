"""Where one caller's news wait for it.

Owns at most one output, which grows; filled by `async_llm`, read by the caller's task. The producer never waits, and
the memory of a stalled reader is bounded by its text. vLLM: `vllm/v1/engine/output_processor.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.llm_engine import RequestOutput


class RequestOutputCollector:
    """Where one caller's news wait for it: at most one item, which grows (`vllm/v1/engine/output_processor.py`).

    The producer never waits and the memory of a stalled reader is bounded by its text.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.output: RequestOutput | Exception | None = None
        self.ready = asyncio.Event()

    def put(self, output: RequestOutput | Exception) -> None:
        """Keep one output: a second one is merged into it, an error takes its place. Never waits."""
        if self.output is None or isinstance(output, Exception):
            self.output = output
        elif not isinstance(self.output, Exception):
            merge_outputs(self.output, output)
        self.ready.set()

    def get_nowait(self) -> RequestOutput | None:
        """All that is new, if anything is; raises what was put as an exception."""
        output, self.output = self.output, None
        self.ready.clear()
        if isinstance(output, Exception):
            raise output
        return output

    async def get(self) -> RequestOutput:
        while (output := self.get_nowait()) is None:
            await self.ready.wait()
        return output


def merge_outputs(old: RequestOutput, new: RequestOutput) -> None:
    """Two pieces of a stream into one. With n > 1, each answer goes on where it was."""
    old.finished, old.num_cached_tokens = new.finished, new.num_cached_tokens
    old.prompt_logprobs = old.prompt_logprobs or new.prompt_logprobs
    old.kv_transfer_params = new.kv_transfer_params
    for piece in new.outputs:
        for have in old.outputs:
            if have.index == piece.index:
                have.text += piece.text
                have.token_ids += piece.token_ids
                if piece.logprobs is not None:
                    have.logprobs = (have.logprobs or []) + piece.logprobs
                have.cumulative_logprob = piece.cumulative_logprob
                have.finish_reason, have.stop_reason = piece.finish_reason, piece.stop_reason
                break
        else:
            old.outputs.append(piece)
