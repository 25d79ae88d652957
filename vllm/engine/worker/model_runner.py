"""The model runner: from a scheduler's decision to tensors, through the model, and back to tokens.

Owns the order of a step, and what sampling must know of each request meanwhile; called by the engine core, or by a
worker far from it. It never decides who is in a step. vLLM: `vllm/v1/worker/gpu_model_runner.py`.
"""

from __future__ import annotations

import common  # noqa: F401  it settles the device before torch is used

import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.attention.metadata import AttentionMetadata
from engine.model import llama
from engine.output import ModelRunnerOutput, SchedulerOutput
from engine.request import NO_TOKEN_ID, Request
from engine.sampling.pooler import Pooler
from engine.sampling.prompt_logprobs import PromptScorer, Scores
from engine.sampling.sampler import Sampler, SamplingState
from engine.seams import Attend, AttentionBackend, Grammar, KVCache, RunnerAdapters, WorkerConnector
from engine.spec_decode.verifier import DraftVerifier, Logprobs, Sampled
from engine.worker.cuda_graphs import CapturedModel
from engine.worker.input_batch import InputBatch


@dataclass
class ModelRunner:
    """Runs the model on what the scheduler chose. Each field is a slot; a runner has what is not None."""

    model: llama.Llama
    cache: KVCache
    attention: AttentionBackend
    batch: InputBatch
    sampler: Sampler = field(default_factory=Sampler)
    grammar: Grammar | None = None
    drafts: DraftVerifier | None = None
    adapters: RunnerAdapters | None = None
    connector: WorkerConnector | None = None
    graphs: CapturedModel | None = None
    has_logits: bool = True  # of the stages of a pipeline, the last one
    seed: int = 0  # for requests that bring none

    def __post_init__(self) -> None:
        self.states: dict[str, SamplingState] = {}
        self.prompts, self.pooler = PromptScorer(), Pooler()
        self.seeds = random.Random(self.seed)

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One forward pass for all scheduled sequences."""
        if self.connector:
            self.connector.bind_connector_metadata(output.kv_connector_metadata)
            self.connector.start_load_kv()
        with self.drafts.joined(output, self.batch) if self.drafts else contextlib.nullcontext(output) as output:
            sampled, logprobs, scores, vectors = self._run(output)
        drafts = self.drafts.propose(sampled) if self.drafts else {}
        if self.connector:
            self.connector.wait_for_save()
            if not output.num_scheduled_tokens:
                self.connector.idle(0.005)  # everybody here waits for the network
        return ModelRunnerOutput(sampled, logprobs, scores, drafts, vectors)

    def _run(
        self, output: SchedulerOutput
    ) -> tuple[dict[str, list[int]], Logprobs, dict[str, Scores], dict[str, bytes]]:
        """Sampled tokens, their log probabilities, and those of prompts; and prompts' vectors."""
        self._update_states(output)
        requests = [*output.scheduled_running_reqs, *output.scheduled_new_reqs, *output.scheduled_resumed_reqs]
        if not requests:
            return {}, {}, {}, {}
        rows = [self.batch.update(request, output.block_tables[request.request_id]) for request in requests]
        query_lens = [output.num_scheduled_tokens[request.request_id] for request in requests]
        seq_lens = [request.num_computed_tokens for request in requests]  # this step's tokens are counted already
        token_ids, meta = self.batch.prepare(rows, query_lens, seq_lens, self.model.device)
        hidden = self.forward(token_ids, meta, requests)  # [T, hidden]
        if not self.has_logits:
            return {}, {}, {}, {}
        scores = self.prompts.score(hidden, query_lens, requests, self.model.logits)
        if self.drafts:
            self.drafts.keep(requests, query_lens, hidden)
        vectors = self.pooler.pool(hidden, query_lens, requests, self.model.final_norm)
        # Only a sequence's last token predicts something new, and only if all that is known is computed.
        ready = [
            b
            for b, request in enumerate(requests)
            if request.num_computed_tokens == request.num_tokens and request.pooling_params is None
        ]
        if not ready:
            return {}, {}, scores, vectors
        if self.drafts and self.drafts.drafts:
            chosen = self.drafts.rows_to_verify(ready)
        else:
            last = meta.query_start_loc[1:] - 1  # [B]
            chosen = last if len(ready) == len(requests) else last[ready]
        logits = self.model.logits(hidden[chosen])  # [R, vocab]
        return *self.sample(logits, [requests[b] for b in ready]), scores, vectors

    def _update_states(self, output: SchedulerOutput) -> None:
        """Who has ended or was preempted leaves; who is admitted gets a row, and a new one its sampling state."""
        for request_id in (*(request.request_id for request in output.preempted_reqs), *output.finished_req_ids):
            self.cache.release(self.batch.remove(request_id))
        for request in (*output.scheduled_new_reqs, *output.scheduled_resumed_reqs):
            self.batch.add(request.request_id)
        for request_id in output.finished_req_ids:
            self.states.pop(request_id, None)
        self.prompts.forget(output.finished_req_ids)
        if self.pooler.sums:
            self.pooler.forget(output.finished_req_ids)
        if self.grammar:
            self.grammar.finish(output.finished_req_ids)
        for request in output.scheduled_new_reqs:
            seed = request.sampling_params.seed
            seed = self.seeds.getrandbits(63) if seed is None else seed
            self.states[request.request_id] = SamplingState(request, seed, self.model.config.eos_token_ids)
            self.prompts.add(request)

    def forward(self, token_ids: torch.Tensor, meta: AttentionMetadata, requests: Sequence[Request]) -> torch.Tensor:
        """The whole batch through the model, [T] -> [T, hidden]."""
        with self.adapters.applied(requests, meta) if self.adapters else contextlib.nullcontext():
            if self.graphs:
                return self.graphs.forward(token_ids, meta)
            return self.model.forward(token_ids, meta.positions, self.attend(meta))

    def attend(self, meta: AttentionMetadata) -> Attend:
        """Attention of one step, between a layer's keys and values that come and those that go."""
        attend, connector = self.attention.plan(meta, self.cache), self.connector
        if connector is None:
            return attend

        def with_transfers(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            connector.wait_for_layer_load(layer)
            out = attend(layer, q, k, v)
            connector.save_kv_layer(layer)
            return out

        return with_transfers

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> Sampled:
        """Tokens of each request, [R, vocab] -> as many as R, or with drafts as stand; NO_TOKEN_ID where none can be
        chosen."""
        if self.drafts and self.drafts.drafts:
            sampled, logprobs = self.drafts.sample(logits, requests, self.states, self._sample)
        else:
            sampled, logprobs = self._sample(logits, requests)
        return sampled | {request_id: [NO_TOKEN_ID] for request_id in self.prompts.broken & sampled.keys()}, logprobs

    def _sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> Sampled:
        """A token of each row, within its grammar if it has one, and the log probabilities of those that ask."""
        guided = self.grammar.mask(logits, requests) if self.grammar else ()
        token_ids, found = self.sampler(logits, [self.states[request.request_id] for request in requests])
        ids = [request.request_id for request in requests]
        logprobs = {request_id: [entry] for request_id, entry in zip(ids, found) if entry}
        for request_id in logprobs.keys() & set(guided):  # what is forbidden is no alternative
            (entry,) = logprobs[request_id]
            logprobs[request_id] = [{token: x for token, x in entry.items() if x.logprob > float("-inf")}]
        return {request_id: [token] for request_id, token in zip(ids, token_ids)}, logprobs
