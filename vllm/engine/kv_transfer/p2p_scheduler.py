"""The scheduler's half of a transfer from engine to engine, wherever the connections are.

Owns which transfers are in use and which requests are being fetched; the scheduler calls it as
`seams.SchedulerConnector`. It never waits for the other engine, and has no memory.
vLLM: `vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py`.
"""

from __future__ import annotations

import common

from collections.abc import Sequence
from typing import Any

from engine.kv_transfer.base import KVConnectorBase
from engine.kv_transfer.config import KVTransferConfig
from engine.kv_transfer.params import kv_transfer_params
from engine.request import Request, RequestStatus


class P2PScheduler(KVConnectorBase):
    """All of a prompt comes from another engine, or goes to one; its request waits outside the batch meanwhile."""

    fetches_later = True
    patience = 0.1  # whoever asks for a prompt that is gone must hear of it, also if nobody else wants anything
    producer: Any  # with `exports`, `finish` and `forget`: a Producer, or what orders workers to be one
    consumer: Any  # with `cancel`: a Consumer, or what orders workers to be one

    def __init__(self, config: KVTransferConfig) -> None:
        super().__init__(config)
        self.names: dict[str, str] = {}  # transfer: request id, of what we export
        self.in_use: set[str] = set()  # transfers, from the request's arrival to its end on this side
        self.asked: set[str] = set()  # requests that have been, or are being, fetched

    @property
    def address(self) -> dict[str, Any]:
        """Where a decode worker finds us: goes into its kv_transfer_params."""
        raise NotImplementedError

    def on_new_request(self, request: Request) -> None:
        """InputError for a transfer_id that is in use, or heads that cannot be shared out."""
        super().on_new_request(request)
        name, ranks = (kv_transfer_params(request).get(key) for key in ("transfer_id", "tp_size"))
        if ranks and ranks % self.num_kv_heads and self.num_kv_heads % ranks:  # some head would be nobody's
            raise common.InputError(f"kv_transfer_params: tp_size {ranks}: cannot share {self.num_kv_heads} KV heads")
        if name in self.in_use or name in self.producer.exports:
            raise common.InputError(f"kv_transfer_params: transfer_id {name!r:.80} is in use")
        if name is not None:
            self.in_use.add(name)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """All of the prompt: its last token is computed here again, for what it predicts, but its block is whole."""
        wanted = self.config.is_kv_consumer and kv_transfer_params(request).get("do_remote_prefill")
        if wanted and request.request_id not in self.asked:  # once: whoever was preempted computes it again
            return request.num_prompt_tokens - num_computed_tokens, True
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: list[int], num_external_tokens: int) -> None:
        end = request.num_prompt_tokens
        self.asked.add(request.request_id)
        self.loads.append((request, blocks, end - num_external_tokens, end))

    def saves(self, request: Request) -> bool:
        return self.config.is_kv_producer and bool(kv_transfer_params(request).get("do_remote_decode"))

    def request_finished(self, request: Request, blocks: Sequence[int]) -> bool:
        """A prompt that was computed for somebody keeps its blocks; one that was aborted does not."""
        params = kv_transfer_params(request)
        self.in_use.discard(params.get("transfer_id"))
        if self.saves(request):
            transfer = params["transfer_id"]
            if request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
                if self.producer.finish(transfer):
                    return True  # `get_finished` will name it
            else:
                self.producer.forget(transfer, "the prefill was aborted")
            self.names.pop(transfer, None)
        elif params.get("do_remote_prefill") and self.config.is_kv_consumer:
            self.consumer.cancel(request.request_id)
            if request.request_id not in self.asked:  # ended before it was admitted: somebody keeps its prompt for us
                self.loads.append((request, [], 0, 0))
            self.asked.discard(request.request_id)
        return False

    def answer_params(self, request: Request) -> dict[str, Any]:
        transfer = kv_transfer_params(request)["transfer_id"]
        return {"do_remote_prefill": True, "transfer_id": transfer, **self.address}
