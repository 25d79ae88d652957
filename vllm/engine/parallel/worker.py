"""A worker: one rank, with its part of the model, a runner, and copies of the requests.

Owns what its rank has in memory; called by an executor, method by method. It never decides. vLLM:
`vllm/v1/worker/gpu_worker.py`.
"""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.config import SchedulerConfig, VllmConfig
from engine.distributed.group import GroupCoordinator
from engine.lora.lora_model import LoRAModel
from engine.model.tokenizer import read_tokenizer
from engine.output import KVConnectorMetadata, KVConnectorOutput, ModelRunnerOutput, SchedulerOutput
from engine.parallel.adapters import WorkerAdapters, shard_adapter
from engine.parallel.config import ParallelConfig
from engine.parallel.memory import kv_cache_memory
from engine.parallel.messages import StepMessage
from engine.parallel.stages import PipelineGroup, load_stage, make_groups, parameters_held
from engine.parallel.transfers import Order, carry_out, own_connector
from engine.request import Request
from engine.sampling.guided.guided_decoding import GuidedDecoding
from engine.worker.assemble import make_runner
from engine.worker.sleep import Sleeper


@dataclass
class WorkerSpec:
    """All that a worker must be told to become one rank of an engine. It can be pickled."""

    model: str | dict | None
    parallel: ParallelConfig
    dtype: torch.dtype = torch.float32
    config: VllmConfig = field(default_factory=VllmConfig)  # what its runner has
    guided: bool = False  # answers may have a grammar: who samples has a tokenizer
    quantization: str | None = None
    embeds_last: bool = False  # a drafter on the last stage looks tokens up
    generation_config: str = "auto"  # whose tokens end an answer
    tokenizer: str | None = None  # whose, if not the model's
    load_format: str = "auto"


class Worker:
    """One rank: its part of the model, a runner, and copies of the requests (`vllm/v1/worker/gpu_worker.py`)."""

    def __init__(self, world: GroupCoordinator | None = None) -> None:
        self.world = world
        self.ep: GroupCoordinator | None = None  # the ranks of all engines that share experts, if any do

    def load_model(self, spec: WorkerSpec) -> int:
        """Returns the parameters that this rank holds."""
        self.spec = spec
        self.set_groups(*make_groups(self.world, spec.parallel))
        self.ep = self.world if spec.parallel.data_parallel_size > 1 else None
        self.model = self._load()
        return parameters_held(self.model)

    def _load(self) -> Any:
        spec = self.spec
        return load_stage(
            spec.model,
            spec.dtype,
            self.tp,
            self.pp,
            spec.quantization,
            spec.embeds_last,
            spec.generation_config,
            spec.load_format,
            spec.parallel,
            self.ep,
        )

    def set_groups(self, tp: GroupCoordinator, pp: PipelineGroup) -> None:
        self.tp, self.pp = tp, pp

    def determine_available_memory(self, args: Any, budget: int) -> int:
        """Bytes for this rank's KV cache, after a profile run in which all ranks take part."""
        return kv_cache_memory(args, self.model, budget)

    def initialize_from_config(self, limits: SchedulerConfig, num_blocks: int, block_size: int, seed: int) -> None:
        """A runner, and memory for its blocks. Its scheduler is elsewhere; what it would ask it, the copies answer."""
        config, last = self.spec.config, self.pp.is_last_rank
        if self.spec.parallel.world_size > 1 or self.ep:  # a collective over gloo could not be captured
            config = dataclasses.replace(config, enforce_eager=True)
        self.spans: list[tuple[float, float]] = []
        self.requests: dict[str, Request] = {}
        self.block_ids: dict[str, list[int]] = {}
        self.adapters = WorkerAdapters(config.lora_config) if config.lora_config else None
        self.connector = own_connector(config.kv_transfer_config, self.tp.rank_in_group)
        self.runner = make_runner(
            self.model,
            limits,
            num_blocks,
            block_size,
            config,
            grammar=self._grammar() if last and self.spec.guided else None,
            lora=self.adapters,
            connector=self.connector,
            has_logits=last,
            seed=seed,
        )
        if self.runner.graphs:
            self.runner.graphs.capture_all()
        self.sleeper = Sleeper(self.runner, self.model, self._load)

    def fall_asleep(self, level: int) -> None:
        """Weights and cache away."""
        self.sleeper.sleep(level)

    def wake_up(self, tags: list[str]) -> None:
        """Back again."""
        self.sleeper.wake_up(tags)

    def _grammar(self) -> GuidedDecoding:
        model = self.spec.model if isinstance(self.spec.model, str) else None
        return GuidedDecoding(read_tokenizer(self.spec.tokenizer, model), self.model.config)

    def execute_model(self, message: StepMessage, meta: KVConnectorMetadata | None = None) -> ModelRunnerOutput:
        """Bring the copies up to date and run the step, with a connector's orders if there are any. What comes of it is
        empty before the last stage."""
        output = SchedulerOutput(
            message.num_scheduled_tokens,
            finished_req_ids=message.finished,
            scheduled_spec_decode_tokens=message.scheduled_spec_decode_tokens,
            block_tables=self.block_ids,
            kv_connector_metadata=meta,
        )
        self._hear(message, output)
        start, waited = time.monotonic(), self.pp.waited
        result = self.runner.execute_model(output)
        if self.spec.parallel.async_scheduling:  # the next step may be here already, and needs them
            for request_id, token_ids in result.sampled_token_ids.items():
                for token_id in token_ids:
                    # Who has got no token (NO_TOKEN_ID) is ended a step later; until then any token's id will do.
                    self.requests[request_id].append_output_token_id(max(token_id, 0))
        self.spans.append((start + self.pp.waited - waited, time.monotonic()))
        return result

    def step_together(
        self, message: StepMessage | None, state: tuple[int, int]
    ) -> tuple[ModelRunnerOutput, list[list[int]]]:
        """A step in which all engines take part that share experts: `execute_model` or, without a message, a pass of no
        token, in which the others' tokens find this rank's experts. Returns also every rank's `state`."""
        assert self.ep
        states = self.ep.all_gather(torch.tensor([state], device=self.ep.device), dim=0)
        result = self.execute_model(message) if message else self._dummy_run()
        return result, states.tolist()

    @torch.inference_mode()
    def _dummy_run(self) -> ModelRunnerOutput:
        """Layer by layer, the experts and nothing else (vLLM: `execute_dummy_batch`)."""
        nobody = torch.zeros(0, self.model.config.hidden_size, dtype=self.model.dtype, device=self.tp.device)
        for layer in self.model.moe.values():
            layer(nobody)
        return ModelRunnerOutput()

    def _hear(self, message: StepMessage, output: SchedulerOutput) -> None:
        """What is new of each request, into the copies and into the step."""
        for request_id in message.preempted:
            if request := self.requests.get(request_id):
                output.preempted_reqs.append(request)
                self.block_ids[request_id].clear()
        for request_id in message.finished:
            self.requests.pop(request_id, None)
            self.block_ids.pop(request_id, None)
        for request, blocks in message.new:
            self.requests[request.request_id], self.block_ids[request.request_id] = request, blocks
            output.scheduled_new_reqs.append(request)
        changes = ((message.running, output.scheduled_running_reqs), (message.resumed, output.scheduled_resumed_reqs))
        for known, target in changes:
            for data in known:
                request = self.requests[data.request_id]
                for token_id in data.new_token_ids:
                    request.append_output_token_id(token_id)
                self.block_ids[data.request_id] += data.new_block_ids
                request.num_computed_tokens = data.num_computed_tokens
                target.append(request)

    # --- with a connector, and with adapters ----------------------------------------------------------------------

    def about_connector(self) -> dict[str, Any]:
        """What the scheduler's half must know of this rank."""
        assert self.connector
        return {"address": self.connector.address, "num_kv_heads": self.connector.num_kv_heads}

    def execute_with_transfers(
        self, message: StepMessage | None, meta: KVConnectorMetadata, orders: list[Order]
    ) -> tuple[ModelRunnerOutput | None, KVConnectorOutput]:
        """Carry out the orders, and run the step if there is one. Returns what `execute_model` does, and what the
        connector has to say."""
        connector, answer = self.connector, None
        assert connector
        carry_out(orders, connector)
        if message is None:
            connector.bind_connector_metadata(meta)
            connector.start_load_kv()
            connector.idle(0.005)  # all requests wait for the network
        else:
            answer = self.execute_model(message, meta)
        return answer, connector.get_finished()

    def write_adapter(self, slot: int, lora: LoRAModel) -> None:
        """Keep this rank's part of what is in a slot now."""
        assert self.adapters
        groups = ((group.rank_in_group, group.world_size) for group in (self.tp, self.pp))
        self.adapters.write(slot, shard_adapter(lora, self.model.whole_config, *groups))

    def clear_adapter(self, slot: int) -> None:
        """Nobody has this slot any more."""
        assert self.adapters
        self.adapters.clear(slot)

    def take_spans(self) -> list[tuple[float, float]]:
        """When this rank computed, by the machine's clock: of each step since the last call, [start, end)."""
        spans, self.spans = self.spans, []
        return spans

    def take_counts(self) -> dict[str, dict[str, int]]:
        """What this rank told others since the last call."""
        experts = {f"{name}, experts": found for name, found in self.ep.take_counts().items()} if self.ep else {}
        return self.tp.take_counts() | self.pp.take_counts() | experts

    def held(self) -> dict[str, int]:
        """For tests: what is left of requests."""
        return {"requests": len(self.requests), "tables": len(self.block_ids), "rows": len(self.runner.batch.rows)}

    def sleep(self, seconds: float, rank: int) -> None:
        """For tests: one rank falls silent."""
        if self.world is not None and self.world.rank_in_group == rank:
            time.sleep(seconds)

    def call(self, method: str | Callable, args: tuple) -> Any:
        """A method of this class, or a function, which gets the worker first."""
        if isinstance(method, str):
            return getattr(self, method)(*args)
        return method(self, *args)

    def call_pickled(self, data: bytes, answers: bool) -> bytes:
        """`call`, as bytes: Ray would look at what it carries."""
        method, args = pickle.loads(data)
        value = self.call(method, args)
        return pickle.dumps(value if answers else None, protocol=5)
