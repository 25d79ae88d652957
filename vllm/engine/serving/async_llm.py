"""`generate()` for many callers at once, from one event loop.

Owns the front end, the callers' collectors and the task that reads the engine's letters; called by the API server and
by whoever serves in a program of their own. It never computes a step: the core is elsewhere, behind a client.
vLLM: `vllm/v1/engine/async_llm.py`.
"""

from __future__ import annotations

import common

import asyncio
import contextlib
import time
import traceback
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

from engine.errors import EngineDeadError, QueueOverflowError
from engine.front_end import Prompt, RequestOutput
from engine.model.config import LlamaConfig
from engine.model.tokenizer import Tokenizer, read_tokenizer
from engine.request import PoolingParams, SamplingParams
from engine.sampling.defaults import SamplingDefaults
from engine.serving.admission import AdmissionControl
from engine.serving.clients import CLIENTS
from engine.serving.collector import RequestOutputCollector
from engine.serving.core_proc import Factory
from engine.serving.front_end import FrontEnd
from engine.serving.letters import Dead, EngineCoreOutputs, EngineCoreReady, EngineCoreRequestType, Reply
from engine.serving.logger import logger


class AsyncLLM:
    """`generate()` for many callers at once, from one event loop (`vllm/v1/engine/async_llm.py`)."""

    CHUNK = 128  # sequences detokenized before other tasks get a turn (VLLM_V1_OUTPUT_PROC_CHUNK_SIZE)
    sampling_defaults = SamplingDefaults()
    log_requests = False  # a line for each, without its prompt

    def __init__(
        self,
        client: Any,
        ready: EngineCoreReady,
        front: FrontEnd,
        max_num_queued_reqs: int | None = None,
        stat_logger: Any = None,
    ) -> None:
        self.client, self.ready, self.front, self.stat_logger = client, ready, front, stat_logger
        self.admission = AdmissionControl(max_num_queued_reqs)
        self.collectors: dict[str, RequestOutputCollector] = {}
        self.replies: dict[int, asyncio.Future] = {}
        self.dead: EngineDeadError | None = None
        self.died = asyncio.Event()
        self.output_handler = asyncio.create_task(self._output_handler(client, weakref.ref(self)))
        for end in (client.close, self.output_handler.cancel):  # when it is dropped without `shutdown`
            weakref.finalize(self, end).atexit = False

    @classmethod
    async def start(
        cls,
        factory: Factory,
        args: Any,
        folder: Path,
        place: str | Callable = "process",
        on_progress: Callable[[str], None] = lambda text: None,
        **options: Any,
    ) -> AsyncLLM:
        """Start an engine core in its place and wait until it is up. `folder` has the tokenizer and the configuration.
        A `place` that is no name makes the client itself (companion 06c: many engines).

        Raises InputError if the engine refuses its arguments, EngineDeadError if it fails otherwise.
        """
        client = (CLIENTS[place] if isinstance(place, str) else place)(factory, args)
        try:
            source = getattr(args, "generation_config", "auto")
            config = LlamaConfig.from_folder(folder, True, source)
            override = getattr(args, "override_generation_config", None)
            defaults = SamplingDefaults.of(folder, source, override)
            own = getattr(args, "tokenizer", None)
            tokenizer = Tokenizer(folder) if own is None else read_tokenizer(own, None)
            while not isinstance(letter := await client.receive(), EngineCoreReady):
                if isinstance(letter, Dead):
                    raise (common.InputError if letter.bad_input else EngineDeadError)(letter.error)
                on_progress(letter.text)
            front = FrontEnd(config, tokenizer, client.send, letter.max_model_len)
            front.max_logprobs = getattr(args, "max_logprobs", front.max_logprobs)
            llm = cls(client, letter, front, **options)
            llm.sampling_defaults = defaults
            return llm
        except BaseException:
            client.close()
            await asyncio.to_thread(client.join)
            raise

    # -- requests --

    @property
    def num_unfinished(self) -> int:
        """Sequences inside, waiting or running; n answers to one prompt are n."""
        return len(self.front.sequences)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        *,
        stream: bool = False,
        **about: Any,
    ) -> RequestOutputCollector:
        """Hand a request to the engine; its news come to the collector. Never waits.

        Raises InputError, QueueOverflowError or EngineDeadError; then nothing was added. Whoever gets a collector
        calls `abort` in the end, whatever happened.
        """
        if self.dead:
            raise self.dead
        n = params.n if isinstance(params, SamplingParams) else 1
        try:
            self.admission.check(self.num_unfinished, n)
        except QueueOverflowError:
            if self.stat_logger:
                self.stat_logger.record_rejection(n)
            raise
        self.front.add_request(request_id, prompt, params, stream=stream, **about)
        if self.log_requests:
            adapter = about.get("lora_name")
            logger.info("Received request %s: params: %.2000s, lora_request: %s.", request_id, params, adapter)
        collector = self.collectors[request_id] = RequestOutputCollector(request_id)
        return collector

    async def outputs(self, collector: RequestOutputCollector) -> AsyncGenerator[RequestOutput, None]:
        """Everything that comes for a request, to its end."""
        try:
            finished = False
            while not finished:
                output = await collector.get()
                finished = output.finished
                yield output
        finally:
            if self.collectors.get(collector.request_id) is collector:  # else over, or another's name
                self.abort([collector.request_id])

    async def generate(
        self, request_id: str, prompt: Prompt, params: SamplingParams, *, stream: bool = False, **about: Any
    ) -> AsyncIterator[RequestOutput]:
        """`add_request` and `outputs` in one. Leaving the loop early aborts the request."""
        collector = self.add_request(request_id, prompt, params, stream=stream, **about)
        async with contextlib.aclosing(self.outputs(collector)) as outputs:
            async for output in outputs:
                yield output

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests as they stand, and have the engine free their blocks. Finished and unknown ones are passed over.
        Callers that still read get what there is, with finish_reason "abort"."""
        for request_id in list(request_ids):
            collector = self.collectors.pop(request_id, None)
            if caller := self.front.callers.get(request_id):
                sequences = [self.front.sequences[name] for name in caller.unfinished]
                outputs = [*caller.outputs.values(), *(sequence.completion("abort", None) for sequence in sequences)]
                output = RequestOutput(
                    request_id, caller.prompt, caller.prompt_token_ids, outputs, True, caller.num_cached_tokens
                )
                if collector:
                    collector.put(output)
                if self.stat_logger:
                    self.stat_logger.record_abort(sequences)
                    self.stat_logger.record_finished(output)  # of n answers, some may have been complete
                self.front.abort_request([request_id])

    def finish_all(self) -> None:
        """End every request as it stands."""
        self.abort(self.front.callers)

    # -- what the engine says --

    @staticmethod
    async def _output_handler(client: Any, engine: weakref.ref[AsyncLLM]) -> None:
        """While this waits for a letter it does not keep the engine: whoever drops that ends it."""
        try:
            while True:
                letter = await client.receive()
                if llm := engine():
                    await llm._read(letter)
                llm = None
        except Exception as error:
            if not isinstance(error, EngineDeadError):  # a defect of the front end: better dead than silent
                traceback.print_exc()
                error = EngineDeadError(f"the output handler failed: {error!r}")
            if llm := engine():
                llm._fail(error)

    async def _read(self, letter: Any) -> None:
        if isinstance(letter, EngineCoreOutputs):
            await self._deliver(letter)
        elif isinstance(letter, Reply) and (future := self.replies.pop(letter.call_id, None)) and not future.done():
            future.set_result(letter)
        elif isinstance(letter, Dead):
            raise EngineDeadError(letter.error)

    async def _deliver(self, letter: EngineCoreOutputs) -> None:
        if self.stat_logger:
            self.stat_logger.record(letter, self.front.sequences)
        for start in range(0, len(letter.outputs) or 1, self.CHUNK):
            if start:
                await asyncio.sleep(0)
            for output in self.front.process_outputs(letter, letter.outputs[start : start + self.CHUNK]):
                if collector := self.collectors.get(output.request_id):
                    collector.put(output)
                if self.stat_logger:
                    self.stat_logger.record_finished(output)
        for name, why in letter.refused.items():
            if sequence := self.front.sequences.get(name):
                request_id = sequence.caller.request_id
                self.front.abort_request([request_id])
                if collector := self.collectors.get(request_id):
                    collector.put(common.InputError(why))

    def _fail(self, error: EngineDeadError) -> None:
        """The engine is dead: everybody who waits hears of it now."""
        self.dead = error
        self.front.sequences.clear()
        self.front.callers.clear()
        for collector in self.collectors.values():
            collector.put(EngineDeadError(str(error)))
        self._no_more_replies(error)
        self.died.set()

    def _no_more_replies(self, error: EngineDeadError) -> None:
        for future in self.replies.values():
            if not future.done():
                future.set_exception(EngineDeadError(str(error)))

    # -- its state --

    async def call_utility(self, name: str, *arguments: Any) -> Any:
        """Have the engine call one of its utilities, between two steps. Raises InputError if it refuses."""
        if self.dead or self.output_handler.done():
            raise self.dead or EngineDeadError("the engine was shut down")
        call_id = id(future := asyncio.get_running_loop().create_future())
        self.replies[call_id] = future
        self.client.send((EngineCoreRequestType.UTILITY, (call_id, name, *arguments)))
        reply = await future
        if reply.error:
            raise (common.InputError if reply.bad_input else RuntimeError)(reply.error)
        return reply.result

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Weights and KV cache away (`EngineCoreProc.sleep`). Raises InputError."""
        await self.call_utility("sleep", level, mode)
        if self.stat_logger:
            self.stat_logger.record_sleep_state(level)

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """And back; returns whether it is fully awake. Raises InputError."""
        awake = await self.call_utility("wake_up", tags)
        if awake and self.stat_logger:
            self.stat_logger.record_sleep_state(None)
        return awake

    async def shutdown(self, timeout: float = 0.0) -> None:
        """Let requests finish for up to `timeout` seconds, then end them, then the engine. New ones are refused."""
        stop, self.admission.closed = time.monotonic() + timeout, True
        while self.front.callers and time.monotonic() < stop and not self.dead:
            await asyncio.sleep(0.02)
        self.finish_all()
        self.output_handler.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.output_handler
        self._no_more_replies(EngineDeadError("the engine was shut down"))
        self.client.close()
        await asyncio.to_thread(self.client.join)
