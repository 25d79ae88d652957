"""The engine core with a mailbox: a loop that takes letters between steps and sends what each step brought.

Owns what is on its way into the core (guides being compiled, adapters being read); called with an engine's factory by
the process, thread or event loop that it runs in. It never touches text, which is the front end's.
vLLM: `vllm/v1/engine/core.py`.
"""

from __future__ import annotations

import common

import functools
import gc
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from engine.output import EngineCoreOutput, SchedulerOutput
from engine.request import Request
from engine.serving.letters import (
    Admission,
    Dead,
    EngineCoreOutputs,
    EngineCoreReady,
    EngineCoreRequestType,
    Progress,
    Reply,
    SchedulerStats,
)
from engine.serving.mailbox import ClientGone, Mailbox, Receive, hang_up
from engine.worker.sleep import TAGS

if TYPE_CHECKING:
    from engine.llm_engine import LLMEngine

# Builds an engine from its arguments, and reports on the way. Another process finds it by its module and name.
Factory = Callable[[Any, Callable[[str], None]], "LLMEngine"]


@dataclass(slots=True)
class Later:
    """What another thread is busy with: the loop goes on, and when it is over, calls `then` with its result."""

    future: Any  # has `done` and `result`
    then: Callable[[Any], Any]


@dataclass(slots=True)
class Drained:
    """Done when nobody is left inside, as a future is."""

    scheduler: Any

    def done(self) -> bool:
        return not self.scheduler.has_unfinished_requests()

    def result(self) -> None: ...


class EngineCoreProc:
    """Takes letters between steps, and sends what each step brought (`vllm/v1/engine/core.py`)."""

    UTILITIES = ("check_idle", "add_lora", "remove_lora", "reset_prefix_cache", "sleep", "wake_up", "is_sleeping")

    def __init__(self, engine: LLMEngine, send: Callable[[Any], None]) -> None:
        self.core, self.scheduler, self.send = engine.core, engine.core.scheduler, send
        self.engine: Any = engine  # one with adapters has more than others
        self.receive: Receive | None = None  # while `run_busy_loop` runs
        self.arrived: dict[str, float] = {}  # request id: when its letter came
        self.about = getattr(engine, "about", {})
        self.later: list[tuple[Any, Callable[[], None]]] = []  # other threads' work, and what to do when it is done
        self.guided: dict[str, Request] = {}  # by id: those whose guide is being compiled, on their way to the core
        self.held: list[Request] | None = None  # asleep, or about to be: those that came meanwhile
        self.stopped = False  # takes no step
        self.compilers = ThreadPoolExecutor(2, thread_name_prefix="guides")
        if engine.lora:
            engine.lora.patience = self.GLANCE  # a step that waits for an adapter's file looks for letters meanwhile

    GLANCE = 0.005  # seconds between two looks at what other threads do

    @property
    def patience(self) -> float | None:
        """Seconds that an idle loop waits for letters; None is for ever. Others than our client may want something."""
        return self.GLANCE if self.later else self.scheduler.patience

    def ready(self) -> EngineCoreReady:
        """The first letter to the client: limits, cache and process of this core."""
        config, manager = self.scheduler.config, self.scheduler.kv_cache_manager
        return EngineCoreReady(
            config.max_model_len,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            manager.block_pool.num_blocks,
            manager.block_size,
            config.policy,
            manager.enable_caching,
            os.getpid(),
            self.about,
        )

    def run_busy_loop(self, receive: Receive) -> None:
        """Never returns. `receive(seconds)` has the letters that are here; it waits so long for one, None is for ever,
        and raises ClientGone when there is nobody left to work for."""
        self.receive = receive
        while True:
            letters = receive(0 if self.has_work() else self.patience)
            self.handle(letters)
            self.settle()
            if self.has_work():
                self.step()
            elif letters:
                self.send(EngineCoreOutputs(scheduler_stats=self.stats()))  # an abort emptied it: say so

    def has_work(self) -> bool:
        """Is there a step to be taken now?"""
        return not self.stopped and self.scheduler.has_unfinished_requests()

    def read_mail(self) -> None:
        """Handle what has come in; on an event loop nothing can have."""
        if self.receive is not None:
            self.handle(self.receive(0))

    def handle(self, letters: Iterable[tuple]) -> None:
        """Add, abort, or call by name; what a request's sender did wrong goes back to it as text."""
        for kind, content in letters:
            if kind is EngineCoreRequestType.ADD:
                self.arrived[content.request_id] = time.monotonic()
                self.add(content)
            elif kind is EngineCoreRequestType.ABORT:
                self.core.abort_requests(content)
                for request_id in content:
                    self.arrived.pop(request_id, None)
                    self.guided.pop(request_id, None)
                self.held = self.held and [request for request in self.held if request.request_id not in content]
            elif kind is EngineCoreRequestType.UTILITY:
                call_id, name, *arguments = content
                function = (
                    getattr(self, name) if name in self.UTILITIES else lambda *_, name=name: f"no utility {name!r}"
                )
                self.call(call_id, function, *arguments)

    def add(self, request: Request) -> None:
        """To the core. One with a guide goes there when a thread has compiled that: no step waits for it (vLLM's
        `preprocess_add_request`). Most are there at once: the front end has compiled the same, or it is a small one."""
        grammar = self.core.runner and self.core.runner.grammar  # a simulation has no runner
        if request.sampling_params.structured_outputs is None or grammar is None:
            return self.admit(request)
        self.guided[request.request_id] = request
        future = self.compilers.submit(grammar.grammar_init, request)
        wait([future], 0 if self.later else self.GLANCE)
        if future.done():
            return self.admit(request, future)
        self.later.append((future, functools.partial(self.admit, request, future)))

    def admit(self, request: Request, compiled: Future | None = None) -> None:
        """Let the core have it, unless it is wrong, or was aborted meanwhile."""
        if compiled is not None and self.guided.pop(request.request_id, None) is not request:
            return
        if self.held is not None:
            return self.held.append(request)
        try:
            if compiled is not None:
                compiled.result()
            self.core.add_request(request)
        except common.InputError as error:
            self.arrived.pop(request.request_id, None)
            self.send(EngineCoreOutputs(refused={request.request_id: str(error)}))
        except Exception as error:  # nobody foresaw this request: it ends, and not the engine
            traceback.print_exc()
            self.arrived.pop(request.request_id, None)
            self.core.abort_requests([request.request_id])
            why = f"the engine could not take this request: {error!r:.200}"
            self.send(EngineCoreOutputs([EngineCoreOutput(request.request_id, [], "error", why)]))

    def call(self, call_id: int, function: Callable[..., Any], *arguments: Any) -> None:
        """Call it and reply with the result; or later, if another thread has to come first."""
        try:
            result = function(*arguments)
            if isinstance(result, Later):
                then = functools.partial(self.call, call_id, lambda: result.then(result.future.result()))
                self.later.append((result.future, then))
            else:
                self.send(Reply(call_id, result))
        except ClientGone:
            raise
        except common.InputError as error:
            self.send(Reply(call_id, error=str(error), bad_input=True))
        except Exception as error:
            self.send(Reply(call_id, error=repr(error)))

    def settle(self) -> None:
        """Go on with what other threads have done since the last look."""
        waiting, self.later = self.later, []
        for future, then in waiting:
            if future.done():
                then()
            else:
                self.later.append((future, then))

    def step(self) -> None:
        """One forward pass for everyone who is scheduled, and one letter about it."""
        start = time.monotonic()
        output = self.scheduler.schedule()
        admitted = self._admissions(output, start)
        result = self.core.execute_model(output)
        self.read_mail()  # a request aborted while the model ran is out before its token is looked at
        outputs = self.core.update_from_output(output, result)
        stats = self.stats()
        stats.num_scheduled_tokens = output.total_num_scheduled_tokens
        stats.step_seconds = time.monotonic() - start
        preempted = [request.request_id for request in output.preempted_reqs]
        self.send(EngineCoreOutputs(outputs, stats, admitted, preempted))

    def _admissions(self, output: SchedulerOutput, now: float) -> dict[str, Admission]:
        return {
            r.request_id: Admission(
                now - self.arrived.pop(r.request_id, now), r.num_cached_tokens, r.num_external_computed_tokens
            )
            for r in output.scheduled_new_reqs
        }

    def stats(self) -> SchedulerStats:
        """How things are: the queues, the pool, and what drafts have brought so far."""
        scheduler, pool = self.scheduler, self.scheduler.kv_cache_manager.block_pool
        usage = 1 - pool.num_free_blocks / (pool.num_blocks - 1)
        *counts, by_place = astuple(scheduler.spec_decoding_stats) if scheduler.drafts else ((),)
        skipped = len(scheduler.requests.keys() & set(scheduler.waiting_for_adapter))
        waiting, fetched = len(scheduler.waiting) - skipped, len(scheduler.waiting_for_remote_kvs)
        return SchedulerStats(
            len(scheduler.running), waiting, usage, skipped + fetched, spec_decoding=(*counts, *by_place)
        )

    def check_idle(self) -> dict[str, int]:
        """For tests: the pool's invariants, and what is still inside."""
        pool = self.scheduler.kv_cache_manager.block_pool
        pool.check()
        tables = self.scheduler.kv_cache_manager.req_to_blocks
        return {
            "unfinished": len(self.scheduler.requests) + len(self.guided) + len(self.held or ()),
            "tables": len(tables),
            "owned_blocks": pool.num_blocks - 1 - pool.num_free_blocks,
        }

    # -- away and back --

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_external: bool = False) -> bool:
        """Forget what is cached. False, and nothing has changed: somebody has blocks, whose later ones would be found
        behind new ones. Running requests may be made to begin anew. Raises InputError."""
        if reset_external and self.scheduler.connector:
            raise common.InputError("reset_external: a connector's store cannot be emptied from here; allowed: false")
        manager = self.scheduler.kv_cache_manager
        if reset_running_requests:
            self.scheduler.preempt_all()
        elif manager.req_to_blocks:
            return False
        manager.reset_prefix_cache()
        return True

    def sleep(self, level: int = 1, mode: str = "abort") -> Any:
        """Take no more steps; from level 1 on, give weights and cache back. New requests wait for `wake_up`; those that
        are inside are ended ("abort"), finish first ("wait"), or go on afterwards ("keep"). Raises InputError."""
        if level and self.engine.sleeper is None:
            raise common.InputError("sleep: this server was started without --enable-sleep-mode; allowed: level 0")
        self.held = [] if self.held is None else self.held
        if mode == "abort":
            self.end_all()
        elif mode == "wait" and self.scheduler.has_unfinished_requests():
            return Later(Drained(self.scheduler), lambda _: self.fall_asleep(level))
        return self.fall_asleep(level)

    def end_all(self) -> None:
        """Whoever is inside has what there is."""
        ended = self.core.abort_requests([*self.scheduler.requests])
        names = [*(request.request_id for request in ended), *self.guided]
        self.guided.clear()
        self.arrived.clear()
        self.send(EngineCoreOutputs([EngineCoreOutput(name, [], "abort") for name in names], self.stats()))

    def fall_asleep(self, level: int) -> None:
        """Between two steps; those on their way are over first."""
        self.drain()
        self.stopped = True
        if level:
            self.scheduler.preempt_all()
            self.scheduler.kv_cache_manager.reset_prefix_cache()
            self.engine.sleeper.sleep(level)

    def drain(self) -> None:
        """Until no step is on its way; here, none is."""

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Bring back weights, cache, or both; with both there, go on. Returns whether that is so. Raises InputError."""
        known = ("scheduling", *TAGS)
        if wrong := [tag for tag in tags or () if tag not in known]:
            raise common.InputError(f"tags {wrong[0]!r}: must be one of {', '.join(known)}")
        if sleeper := self.engine.sleeper:
            sleeper.wake_up(TAGS if tags is None else set(tags) & set(TAGS))
            if sleeper.asleep:
                return False
        self.stopped, held, self.held = False, self.held or [], None
        for request in held:
            self.admit(request)
        return True

    def is_sleeping(self) -> bool:
        return self.held is not None

    def add_lora(self, name: str, path: str) -> Later:
        """Load an adapter (lesson 12): a thread reads it, and the reply is its fingerprint. Raises InputError."""
        manager = self.engine.lora
        return Later(manager.begin_reading(name, path), functools.partial(manager.add_read, name, path))

    def remove_lora(self, name: str) -> None:
        """Forget an adapter; requests that use it finish with it."""
        self.engine.remove_lora(name)


def build_engine(factory: Factory, args: Any, send: Callable[[Any], None]) -> LLMEngine:
    """Call the factory; what it reports on the way goes to the console of the other side."""
    return factory(args, lambda text: send(Progress(text)))


def serve_mailbox(
    factory: Factory,
    args: Any,
    send: Callable[[Any], None],
    receive: Receive,
    make_proc: Callable[..., EngineCoreProc] = EngineCoreProc,
) -> bool:
    """Build an engine and work until nobody is left to work for. Returns whether it failed; then it has said so."""
    try:
        try:
            proc = make_proc(build_engine(factory, args, send), send)
            send(proc.ready())
            proc.run_busy_loop(receive)
        except common.InputError as error:
            send(Dead(str(error), bad_input=True))
        except ClientGone:
            raise
        except Exception as error:
            traceback.print_exc()
            send(Dead(f"{type(error).__name__}: {error}"))
        return True
    except ClientGone:
        return False


def run_engine_core(sock: socket.socket, factory: Factory, args: Any) -> None:
    """The engine process from start to end. It ends when its socket closes, so it cannot outlive its front end."""
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C and service managers signal the whole group; what that
        signal.signal(number, signal.SIG_IGN)  # means for those inside is the front end's to decide
    gc.freeze()  # a million objects of imported libraries are there to stay: no need to look through them ever again
    mailbox = Mailbox(sock)
    failed = serve_mailbox(factory, args, mailbox.send, mailbox.receive)
    if failed:
        hang_up([sock])
    os._exit(failed)  # at once: nothing is left to clean up, and a broken state would not survive a clean-up
