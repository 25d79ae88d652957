"""Verifying drafts in the pass that computes them anyway, and asking for the next ones.

Owns the drafts of a step, and what the drafter must be told of each request; called by the model runner. It never
decides how many drafts are granted. vLLM: `vllm/v1/worker/gpu_model_runner.py`, `vllm/v1/sample/rejection_sampler.py`.
"""

from __future__ import annotations

import common  # noqa: F401  it settles the device before torch is used

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from engine.model import llama
from engine.output import SchedulerOutput
from engine.request import NO_TOKEN_ID, Request
from engine.sampling.sampler import Logprob, Sampler, SamplingState, adjust_logits, uniforms
from engine.seams import RejectionRule
from engine.spec_decode.drafters import DraftContext, Drafter, SpeculativeConfig

if TYPE_CHECKING:
    from engine.worker.input_batch import InputBatch

ACCEPT = 0x5DEECE66D  # makes of a request's seed that of a second, independent stream: one decides, one draws

# By request id: log probabilities of each sampled token, for those that ask; and tokens with theirs.
Logprobs = dict[str, list[dict[int, Logprob]]]
Sampled = tuple[dict[str, list[int]], Logprobs]


@dataclass
class DraftedAnswer:
    """How far an answer would have come, and its tokens if the request has bad words."""

    num_output_tokens: int
    output_token_ids: list[int]


class DraftedState:
    """What sampling knows about a request whose drafts up to here were accepted: its own state, some tokens on."""

    def __init__(self, state: SamplingState, accepted: list[int]) -> None:
        self.state, self.accepted = state, accepted
        self.params, self.seed, self.greedy, self.penalized = state.params, state.seed, state.greedy, state.penalized
        self.stop_token_ids, self.allowed, self.bad_words = state.stop_token_ids, state.allowed, state.bad_words
        self.restricted = state.restricted
        written = state.request.output_token_ids if state.bad_words else []  # nobody else looks at them
        self.request = DraftedAnswer(state.request.num_output_tokens + len(accepted), [*written, *accepted])

    def count(self, vocab_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Counts [V] of what is written, the accepted drafts included, and what is in the prompt or written."""
        counts, seen = self.state.count(vocab_size, device)
        if self.accepted:
            ids = torch.tensor(self.accepted, device=device)
            counts = counts.index_add(0, ids, torch.ones(len(ids), device=device))
            seen = seen.index_fill(0, ids, True)
        return counts, seen


class DraftVerifier:
    """Drafts join their requests for one pass; how many stand is decided by the rows that it computed for them.

    For that pass, drafts are part of a request's tokens: the input batch, positions, slots and attention need to know
    nothing. Who asks for structured output or has no drafts is sampled as always.

    One step ahead (`async_scheduling`) the plan counts on every draft, and reserves places for drafts that nobody has
    made. They are filled here, and every row is computed where it belongs: here it is known at once how many stood. A
    place without a draft is not computed. The requests are then copies, which have all tokens that were sampled.
    """

    def __init__(  # noqa: PLR0913  one for each thing that others made
        self,
        config: SpeculativeConfig,
        drafter: Drafter,
        rejection_sample: RejectionRule,
        model: llama.Llama,
        max_model_len: int,
        async_scheduling: bool = False,
    ) -> None:
        self.config, self.drafter, self.model = config, drafter, model
        self.max_model_len, self.async_scheduling = max_model_len, async_scheduling
        self.rejection_sample = rejection_sample
        self.drafts: dict[str, list[int]] = {}  # of this step
        self.draft_probs: dict[str, torch.Tensor] = {}  # of proposed drafts that were drawn from something
        self.proposed: dict[str, list[int]] = {}  # one step ahead: for the places of the next step
        self.leftover: dict[str, list[int]] = {}
        self.hidden: dict[str, list[torch.Tensor]] = {}  # computed, accepted and not yet handed to the drafter
        self.k: dict[str, int] = {}  # of each request, with the heuristic schedule
        self.computed: dict[str, int] = {}  # positions of each request, fallen drafts taken back
        self.num_places = self.num_drafts = 0  # one step ahead: planned, and filled
        self.ran: tuple[Sequence[Request], list[int], torch.Tensor] | None = None  # who was in the pass, and its rows

    @contextlib.contextmanager
    def joined(self, output: SchedulerOutput, batch: InputBatch) -> Iterator[SchedulerOutput]:
        """For one pass, whatever happens in it, drafts are tokens of their requests. Yields the step as it is run."""
        for request_id in (*output.finished_req_ids, *(request.request_id for request in output.preempted_reqs)):
            self._forget(request_id)
        if self.async_scheduling:
            output = self._fill_places(output)
        for request in output.scheduled_running_reqs:
            first = request.num_computed_tokens - output.num_scheduled_tokens[request.request_id]
            if first < self.computed.get(request.request_id, 0):  # a load failed, so that it goes on from there again
                self._forget(request.request_id)
        self.drafts, self.leftover, self.ran = output.scheduled_spec_decode_tokens, {}, None
        drafted = [request for request in output.scheduled_running_reqs if request.request_id in self.drafts]
        for request in drafted:
            request.all_token_ids += self.drafts[request.request_id]
        try:
            yield output
        finally:
            for request in drafted:
                del request.all_token_ids[-len(self.drafts[request.request_id]) :]
                self._roll_back(request, batch)

    def _forget(self, request_id: str) -> None:
        """It has ended, or is computed again."""
        for kept in (self.draft_probs, self.hidden, self.k, self.computed):
            kept.pop(request_id, None)
        self.drafter.forget(request_id)

    def _roll_back(self, request: Request, batch: InputBatch) -> None:
        """The input batch must not go on with rejected tokens; accepted ones come back as tokens of the request."""
        batch.num_tokens[batch.rows[request.request_id]] = request.num_tokens

    def _fill_places(self, output: SchedulerOutput) -> SchedulerOutput:
        """The same step with what was proposed meanwhile in the places that were planned."""
        places, output = output.scheduled_spec_decode_tokens, copy.copy(output)
        output.num_scheduled_tokens = dict(output.num_scheduled_tokens)
        output.scheduled_spec_decode_tokens = drafts = {}
        for request_id, empty in places.items():
            if found := self.proposed.get(request_id, [])[: len(empty)]:
                drafts[request_id] = found
            # vLLM computes a row for an empty place as well: a CUDA graph's shape stays as it is.
            output.num_scheduled_tokens[request_id] -= len(empty) - len(found)
            self.num_places += len(empty)
            self.num_drafts += len(found)
        for request in output.scheduled_running_reqs:  # no further than what is known here, and its drafts
            known = request.num_tokens + len(drafts.get(request.request_id, ()))
            request.num_computed_tokens = min(request.num_computed_tokens, known)
        return output

    # --- after the layers --------------------------------------------------------------------------------------------

    def keep(self, requests: Sequence[Request], query_lens: Sequence[int], hidden: torch.Tensor) -> None:
        """What the pass has computed: rows [T, hidden] of these requests, in this order."""
        self.ran = requests, list(itertools.accumulate(query_lens)), hidden

    def rows_to_verify(self, ready: Sequence[int]) -> torch.Tensor:
        """The rows of those requests that predict a draft, or what follows the last one. [R]"""
        assert self.ran
        requests, ends, hidden = self.ran
        rows: list[int] = []
        for b in ready:
            rows += range(ends[b] - 1 - len(self.drafts.get(requests[b].request_id, ())), ends[b])
        return torch.tensor(rows, device=hidden.device)

    def sample(
        self,
        logits: torch.Tensor,
        requests: Sequence[Request],
        states: dict[str, SamplingState],
        sample_plain: Callable[[torch.Tensor, Sequence[Request]], Sampled],
    ) -> Sampled:
        """[R, vocab] -> tokens: one for a request without drafts, 1 to k + 1 for one with k; and their logprobs."""
        plain, drafted, row = ([], []), ([], []), 0  # (rows, requests)
        for request in requests:
            k = len(self.drafts.get(request.request_id, ()))
            rows, group = drafted if k else plain
            rows += range(row, row + k + 1)
            group.append(request)
            row += k + 1
        sampled, logprobs = {}, {}
        if plain[0]:
            sampled, logprobs = sample_plain(logits[plain[0]] if drafted[0] else logits, plain[1])
        if drafted[0]:
            rows = logits[drafted[0]] if plain[0] else logits
            sampled |= self.verify(rows, drafted[1], [states[r.request_id] for r in drafted[1]], logprobs)
        return sampled, logprobs

    @torch.inference_mode()
    def verify(
        self, logits: torch.Tensor, requests: Sequence[Request], states: Sequence[SamplingState], logprobs: Logprobs
    ) -> dict[str, list[int]]:
        """Rejection-sample the rows of requests that have drafts; fills `logprobs` where they are asked for."""
        logits, device = logits.float(), logits.device
        drafts = [self.drafts[request.request_id] for request in requests]
        starts = [0, *itertools.accumulate(len(draft) + 1 for draft in drafts)]
        R, on_device = starts[-1], functools.partial(torch.tensor, device=device)
        greedy, draw_u, accept_u = [True] * R, np.zeros(R), np.zeros(R)
        scores, draft_probs, draft_rows = logits, None, None
        if not all(state.plain for state in states):
            rows = [DraftedState(s, draft[:j]) for s, draft in zip(states, drafts) for j in range(len(draft) + 1)]
            scores = adjust_logits(logits.clone(), rows)
            greedy = [row.greedy for row in rows]
            if drawn := [r for r, row in enumerate(rows) if not row.greedy]:
                scores[drawn] = Sampler.probabilities(scores[drawn], [rows[r] for r in drawn])
                seeds, steps = [row.seed for row in rows], [row.request.num_output_tokens for row in rows]
                draw_u = uniforms(seeds, steps)
                accept_u = uniforms([seed ^ ACCEPT for seed in seeds], steps)
                draft_probs, draft_rows = self.stack_probs(requests, drafts)
        token_ids, num_sampled = self.rejection_sample(
            scores,
            on_device([token for draft in drafts for token in (*draft, -1)]),
            on_device(starts),
            on_device(greedy),
            on_device(draw_u),
            on_device(accept_u),
            draft_probs,
            draft_rows,
        )
        token_ids, sampled = token_ids.tolist(), {}
        for request, state, start, end, n in zip(requests, states, starts, starts[1:], num_sampled.tolist()):
            sampled[request.request_id] = token_ids[start : start + n]
            rest = token_ids[start + n : end]
            self.leftover[request.request_id] = list(itertools.takewhile(lambda token: token >= 0, rest))
            n -= token_ids[start + n - 1] < 0  # no token, no log probability
            if state.params.logprobs is not None and n:
                raw, ids = logits[start : start + n].log_softmax(1), on_device(token_ids[start : start + n])
                logprobs[request.request_id] = Sampler.gather_logprobs(raw, ids, [state.params.logprobs] * n)
        return sampled

    def stack_probs(
        self, requests: Sequence[Request], drafts: Sequence[list[int]]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Every q of the step in one matrix [N, vocab], and for each row to verify its row there, or −1. [R]."""
        probs, where, N = [], [], 0
        for request, draft in zip(requests, drafts):
            q, k = self.draft_probs.get(request.request_id), len(draft)
            where += [-1] * (k + 1) if q is None else [*range(N, N + k), -1]
            if q is not None:
                probs.append(q[:k])
                N += k
        if not probs:
            return None, None
        return torch.cat(probs).float().to(self.model.device), torch.tensor(where, device=self.model.device)

    # --- the next drafts ---------------------------------------------------------------------------------------------

    def propose(self, sampled: dict[str, list[int]]) -> dict[str, list[int]]:
        """Ask the drafter about all requests that got a token in this step, unless the token ends the request. Returns
        drafts for the scheduler. One step ahead they stay here: it has planned for them already."""
        contexts, begin = [], 0
        requests, ends, hidden = self.ran or ((), (), None)
        for request, end in zip(requests, ends):
            new, drafts = sampled.get(request.request_id, []), self.drafts.get(request.request_id, ())
            fallen = len(drafts) + 1 - len(new) if drafts else 0
            self.computed[request.request_id] = request.num_computed_tokens - fallen
            self.draft_probs.pop(request.request_id, None)
            if hidden is not None and self.drafter.needs_hidden:
                self._keep_hidden(request, hidden[begin : end - fallen])
            begin = end
            stops = {request.eos_token_id, *request.stop_token_ids, NO_TOKEN_ID}
            if not new or not stops.isdisjoint(new):
                continue
            k = self._wanted(request, new, len(requests))
            if k > 0 or self.drafter.needs_hidden:
                contexts.append(self._context(request, new, k))
        proposed: dict[str, list[int]] = {}
        for context, draft in zip(contexts, self.drafter.propose(contexts) if contexts else ()):
            if draft.parents is not None:
                raise ValueError("this engine verifies chains; companion 07b verifies trees")
            if token_ids := draft.token_ids[: context.max_tokens]:
                proposed[context.request_id] = token_ids
                if draft.probs is not None:
                    self.draft_probs[context.request_id] = draft.probs
        if not self.async_scheduling:
            return proposed
        self.proposed = proposed
        return {}

    def _keep_hidden(self, request: Request, hidden: torch.Tensor) -> None:
        """Of the rows of accepted tokens, what the last norm makes of them. [n, hidden]"""
        norm = F.rms_norm(hidden, hidden.shape[-1:], self.model.norm, self.model.config.rms_norm_eps)
        self.hidden.setdefault(request.request_id, []).append(norm)

    def _wanted(self, request: Request, new: list[int], num_seqs: int) -> int:
        """How many drafts may follow. A pass writes up to k + 1 tokens: none may lie behind max_tokens or the end of
        the context."""
        k = self.config.drafts_in_batch(num_seqs)
        if self.config.num_speculative_tokens_schedule == "heuristic":
            num_drafts = len(self.drafts.get(request.request_id, ()))
            k = min(k, self.adapt(request.request_id, num_drafts, len(new) - 1))
        if request.sampling_params.structured_outputs is not None:
            return 0
        left = min(
            request.max_tokens - request.num_output_tokens - len(new),
            self.max_model_len - len(request.all_token_ids) - len(new),
        )
        return int(max(0, min(k, left - 1)))

    def _context(self, request: Request, new: list[int], k: int) -> DraftContext:
        request_id = request.request_id
        return DraftContext(
            request_id=request_id,
            token_ids=request.all_token_ids + new,
            max_tokens=k,
            params=request.sampling_params,
            hidden=torch.cat(self.hidden.pop(request_id)) if self.drafter.needs_hidden else None,
            leftover=self.leftover.get(request_id, []),
        )

    def adapt(self, request_id: str, num_drafts: int, num_accepted: int) -> int:
        """K of the next draft: two more if all stood, else one less, and never 0, or nothing would be learned again."""
        k = self.k.get(request_id, self.config.num_speculative_tokens)
        if num_drafts:
            k = k + 2 if num_accepted == num_drafts else k - 1
        self.k[request_id] = max(1, min(k, self.config.num_speculative_tokens))
        return self.k[request_id]
