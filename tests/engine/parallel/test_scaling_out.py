"""Lesson 06c: every layout writes the tokens of one process; whoever dies is named; nothing is left of anybody."""

from __future__ import annotations

import common

import asyncio
import collections
import contextlib
import errno
import functools
import gc
import hmac
import itertools
import json
import multiprocessing
import os
import pickle
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from engine import registry
from lab import cli
from support.close import assert_close
from lab.running_server import running_server
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.scheduler import make_scheduler
from engine.parallel import executors, stages
from engine.serving.start import make_engine
from engine.parallel import worker as worker_file
from engine.quantization.kv_codes import block_bytes
from support.runners import runner_of
from engine.assemble import make_core
from engine.config import SchedulerConfig
from engine.config import VllmConfig
from engine.llm import make_llm_engine
from engine.output import ModelRunnerOutput, SchedulerOutput
from engine.request import Request
from engine.request import SamplingParams
from engine.core.engine_core import EngineCore
from engine.engine_args import EngineArgs
from engine.llm import LLM
from engine.parallel.config import ParallelConfig
from engine.parallel.config import get_pp_indices
from engine.parallel.messages import StepMessage
from engine.parallel.messages import StepWriter
from engine.parallel.pipeline import PipelineEngineCore
from engine.parallel.remote_runner import RemoteRunner
from engine.parallel.stages import PipelineGroup
from engine.parallel.stages import skeleton
from engine.parallel.worker import Worker
from engine.parallel.worker import WorkerSpec
from engine.parallel.workers import Workers
from engine.sampling.sampler import Logprob
from engine.serving.pipeline_proc import ParallelEngineCoreProc
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model import folders, llama
from engine.errors import EngineDeadError
from engine.output import EngineCoreOutput
from engine.distributed import handshake
from engine.serving import engine_group
from engine.serving.async_llm import AsyncLLM
from engine.serving.balancer import BALANCERS, LoadBalancer, PrefixAwareBalancer
from engine.serving.clients import MPClient
from engine.serving.coordinator import DPCoordinator
from engine.serving.core_proc import build_engine
from engine.serving.dp_client import DPLBClient
from engine.serving.engine_group import serve_clients, start_engine
from engine.serving.engine_mailbox import EngineMailbox, Outbox
from engine.serving.front_end import FrontEnd
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
from engine.serving.mailbox import Mailbox
from engine.serving.rendezvous import accept_engines, dial, read_line
from engine.serving.wire import frame, loads
from engine.distributed.group import GroupCoordinator
from lab import layouts, naive
from lab.dry_run import DryRun

lesson, page = registry.lesson("06c_scaling_out"), cli.numbers("06c_scaling_out")
serving = registry.lesson("06_serving")
ADD = EngineCoreRequestType.ADD
ABORT, UTILITY = EngineCoreRequestType.ABORT, EngineCoreRequestType.UTILITY

SIZES = dict(seed=5, num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4, intermediate_size=96,
             vocab_size=131)  # fmt: skip
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5], list(range(40)), [35], [7] * 20]
OUTPUTS = [9, 4, 7, 12, 6]


def scheduler_of(blocks=60, budget=16, policy="fcfs", caching=True):
    config = SchedulerConfig(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=budget, policy=policy)
    return make_scheduler(config, blocks, 4, enable_prefix_caching=caching)


def plain_core(model=None, **limits):
    scheduler = scheduler_of(**limits)
    return EngineCore(scheduler, runner_of(model or llama.random_model(**SIZES), scheduler))


def remote_runner(executor, parallel, scheduler):
    manager = scheduler.kv_cache_manager
    workers = Workers(executor, parallel, None)
    return RemoteRunner(workers, scheduler.config, manager.block_pool.num_blocks, manager.block_size)


def parallel_core(executor, parallel, depth=None, source=None, **limits):
    executor.collective_rpc("load_model", WorkerSpec(source or SIZES, parallel))
    scheduler = scheduler_of(**limits)
    runner = remote_runner(executor, parallel, scheduler)
    return PipelineEngineCore(scheduler, runner, depth or parallel.pipeline_parallel_size)


def serve(core, prompts=PROMPTS, outputs=OUTPUTS, priorities=None, **fields):
    """Tokens by request, everything handed in at once; afterwards nothing is left in the pool."""
    got = {}
    for i, (prompt, n) in enumerate(zip(prompts, outputs)):
        params = SamplingParams(**{"temperature": 0, "max_tokens": n, "ignore_eos": True, **fields})
        core.add_request(Request(str(i), list(prompt), params, arrival_time=i, priority=(priorities or [0] * 99)[i]))
    while core.scheduler.has_unfinished_requests():
        for output in core.step():
            got.setdefault(int(output.request_id), []).extend(output.new_token_ids)
    pool = core.scheduler.kv_cache_manager.block_pool
    pool.check()
    assert pool.num_free_blocks == pool.num_blocks - 1 and not core.scheduler.waiting and not core.scheduler.running
    return [got[i] for i in range(len(prompts))]


@functools.cache
def reference():
    return serve(plain_core())


# --- Who holds what ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 130), st.integers(1, 9))
def test_stages_cover_all_layers_once(layers, stages):
    ranges = [get_pp_indices(layers, i, stages) for i in range(stages)]
    assert [i for start, end in ranges for i in range(start, end)] == list(range(layers))
    sizes = [end - start for start, end in ranges]
    assert max(sizes) - min(sizes) <= 1 and (stages == 1 or sizes[-1] == min(sizes))


def test_what_does_not_divide_goes_where_vllm_puts_it():
    sizes = lambda layers, n: [b - a for a, b in (get_pp_indices(layers, i, n) for i in range(n))]  # noqa: E731
    assert sizes(61, 2) == [31, 30] and sizes(126, 4) == [31, 32, 32, 31] and sizes(5, 4) == [1, 1, 2, 1]


def test_in_stages_is_the_model(tiny_model):
    ids, positions = (torch.tensor(x, device=tiny_model.device) for x in ([5, 1, 77, 126], [0, 1, 2, 3]))
    whole = tiny_model.forward(ids, positions, naive.recompute)
    assert lesson.in_stages(tiny_model, ids, naive.recompute, 2).equal(whole)


def test_ranks_of_a_layout():
    parallel = ParallelConfig(2, 3)
    assert (parallel.world_size, parallel.output_rank, parallel.backend) == (6, 4, "mp")
    assert ParallelConfig().backend == "uni" and ParallelConfig(1, 1, "mp").backend == "mp"
    config = llama.random_model(**SIZES).config
    ParallelConfig(4, 5).check(config)  # a stage for each layer
    for wrong, words in ((ParallelConfig(3), "tensor_parallel_size 3"), (ParallelConfig(1, 6), "num_hidden_layers"),
                         (ParallelConfig(2, 1, "uni"), "uni"), (ParallelConfig(1, 2, "uni"), "2 ranks")):  # fmt: skip
        with pytest.raises(common.InputError, match=words):
            wrong.check(config)


def test_a_skeleton_costs_a_block_what_the_largest_rank_pays():
    config = llama.random_model(**SIZES).config
    size = functools.partial(block_bytes, block_size=16, kv_cache_dtype="auto")
    whole = size(skeleton(config, ParallelConfig(), torch.float32))
    assert size(skeleton(config, ParallelConfig(2, 1), torch.float32)) == whole // 2
    assert size(skeleton(config, ParallelConfig(2, 2), torch.float32)) == whole // 2 * 3 // 5
    assert skeleton(config, ParallelConfig(8, 1), torch.float32).num_kv_heads == 1


# --- Ranks as threads -------------------------------------------------------------------------------------------------


class ThreadTP(GroupCoordinator):
    def __init__(self, n, rank, meeting, table):
        super().__init__(range(n), rank)
        self.meeting, self.table = meeting, table

    def everybodys(self, x):
        self.table[self.rank_in_group] = x.clone() if isinstance(x, torch.Tensor) else x
        self.meeting.wait(60)
        found = list(self.table)
        self.meeting.wait(60)
        return found

    def all_reduce(self, x):
        self._count("all_reduce", x)
        return x if self.world_size == 1 else sum(self.everybodys(x))

    def all_gather(self, x, dim=-1):
        out = x if self.world_size == 1 else torch.cat(self.everybodys(x), dim)
        self._count("all_gather", out)
        return out


class ThreadPP(PipelineGroup):
    def __init__(self, n, rank, wires):
        super().__init__(range(n), rank)
        self.wires = wires

    def send(self, x):
        self._count("send", x)
        self.wires[self.rank_in_group].put(x)

    def recv(self, shape, dtype):
        x = self.wires[self.rank_in_group - 1].get(timeout=60)
        assert tuple(x.shape) == shape and x.dtype == dtype
        return x


class ThreadWorker(Worker):
    def __init__(self, tp, pp):
        super().__init__()
        self.mine = tp, pp

    def set_groups(self, tp, pp):
        self.tp, self.pp = self.mine


class ThreadExecutor(executors.Executor):
    """Workers as threads: the layouts without processes. All that travels is pickled, as on the way to a process."""

    def __init__(self, parallel):
        tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        self.world_size, self.inboxes, self.outboxes, self.last_stage = tp * pp, [], [], tp * (pp - 1)
        self.calls, self.answers, self.threads = 0, {}, []
        rows = [(threading.Barrier(tp), [None] * tp) for _ in range(pp)]
        wires = [[queue.SimpleQueue() for _ in range(pp)] for _ in range(tp)]
        for rank in range(tp * pp):
            stage, shard = divmod(rank, tp)
            worker = ThreadWorker(ThreadTP(tp, shard, *rows[stage]), ThreadPP(pp, stage, wires[shard]))
            inbox, outbox = queue.SimpleQueue(), queue.SimpleQueue()
            self.threads.append(threading.Thread(target=self.work, args=(worker, inbox, outbox), daemon=True))
            self.inboxes.append(inbox), self.outboxes.append(outbox)
        for thread in self.threads:
            thread.start()

    @staticmethod
    def work(worker, inbox, outbox):
        while (data := inbox.get()) is not None:
            if callable(data):
                outbox.put(data(worker))
                continue
            method, args = pickle.loads(data)
            outbox.put(pickle.loads(pickle.dumps(worker.call(method, args))))

    def ask(self, look):
        """What a test sees when it looks at each worker, in that worker's thread."""
        return self.submit(look).result()

    def submit(self, method, *args, reply_rank=None, timeout=None):
        for inbox in self.inboxes:
            inbox.put(method if callable(method) and not args else pickle.dumps((method, args)))
        number, self.calls = self.calls, self.calls + 1

        def collect():  # answers come in the order of the calls, and not everybody asks for theirs
            while number not in self.answers:
                self.answers[len(self.answers)] = [box.get(timeout=60) for box in self.outboxes]
            return self.answers[number]

        def one():
            answers = collect()
            if method == "execute_model":  # stages before the last sample nothing, shards of the last the same
                before, last = answers[: self.last_stage], answers[self.last_stage :]
                assert all(a == ModelRunnerOutput() for a in before) and all(a == last[0] for a in last)
            return answers[reply_rank]

        result = collect if reply_rank is None else one
        return type("Later", (), {"result": staticmethod(result)})

    def shutdown(self):
        for inbox in self.inboxes:
            inbox.put(None)
        for thread in self.threads:  # or Python may end while one is inside torch, which aborts
            thread.join(60)


@pytest.mark.parametrize(
    ("tp", "pp"), [(2, 1), (1, 5), (2, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(4, 1), (1, 2)])]
)
def test_every_layout_writes_the_same_tokens(tp, pp):
    """Chunks of 16, five requests of all lengths; what travelled is what the formulas say."""
    parallel = ParallelConfig(tp, pp)
    executor = ThreadExecutor(parallel)
    core = parallel_core(executor, parallel)
    executor.collective_rpc("take_counts")
    tokens = []
    submit = core.runner.submit
    core.runner.submit = lambda output: (tokens.append(output.total_num_scheduled_tokens), submit(output))[1]
    assert serve(core) == reference()
    total, steps, hidden = sum(tokens), sum(n > 0 for n in tokens), 80 * 4
    for rank, counts in enumerate(executor.collective_rpc("take_counts")):
        start, end = get_pp_indices(5, rank // tp, pp)
        first, last = rank // tp == 0, rank // tp == pp - 1
        reduces = 2 * (end - start) + first
        assert counts.get("all_reduce", {"calls": 0})["calls"] == steps * (reduces if first or tp > 1 else 0) or tp == 1
        if tp > 1:
            assert counts["all_reduce"] == {"calls": steps * reduces, "bytes": total * hidden * reduces}
        assert counts.get("send", {"bytes": 0})["bytes"] == (0 if last else total * hidden)
    held = executor.collective_rpc("held")
    assert all(len({*h.values()}) == 1 for h in held), "the last step's finished are told with the next one"
    assert all(h["requests"] < 5 for h in held), "and all others are forgotten"
    assert serve(core) == reference(), "names that are used again"
    executor.shutdown()


@pytest.mark.parametrize("qk_norm", [False, True])
def test_weights_are_divided(qk_norm):
    sizes = {**SIZES, "qk_norm": qk_norm}
    whole = llama.random_model(**sizes).num_parameters
    executor = ThreadExecutor(ParallelConfig(1, 5))
    held = executor.collective_rpc("load_model", WorkerSpec(sizes, ParallelConfig(1, 5)))
    executor.shutdown()
    embedding, norm = 131 * 80, 80
    assert sum(held) == whole + embedding + 4 * norm, "tied: the last stage has the embedding, too; norms have all"
    assert max(held[1:4]) < whole / 5


def test_an_embedding_that_is_not_tied_is_on_the_first_stage_only():
    sizes, parallel = {**SIZES, "tie_word_embeddings": False}, ParallelConfig(1, 2)
    executor = ThreadExecutor(parallel)
    held = executor.collective_rpc("load_model", WorkerSpec(sizes, parallel))
    executor.shutdown()
    assert sum(held) == llama.random_model(**sizes).num_parameters + 80, "only the last norm is on both"


def test_no_more_is_on_the_way_than_there_are_stages(monkeypatch):
    group, waited, buffers = PipelineGroup(range(2), 0), [], []

    def work(x, rank, group):
        buffers.append(weakref.ref(x))
        return SimpleNamespace(wait=functools.partial(waited.append, x.item()))

    monkeypatch.setattr(torch.distributed, "isend", work)
    for i in range(5):
        group.send(torch.tensor(i))
    assert waited == [0, 1, 2] and len(group.on_the_way) == 2
    assert [buffer() is not None for buffer in buffers] == [False] * 3 + [True] * 2, "it lives until it has left"


def test_waiting_for_the_stage_before_is_not_computing(monkeypatch):
    worker = Worker()
    worker.load_model(WorkerSpec(SIZES, ParallelConfig()))
    worker.initialize_from_config(scheduler_of().config, 9, 4, 0)
    times = iter([10, 13, 20, 27])  # of the step: start and end; within it, of the wait
    clock = SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr(stages, "time", clock)
    monkeypatch.setattr(worker_file, "time", clock)
    monkeypatch.setattr(torch.distributed, "recv", lambda *args, **options: None)
    group = PipelineGroup(range(2), 1)
    group.recv((3,), torch.float32)
    assert group.waited == 3
    worker.pp, worker.runner = group, SimpleNamespace(execute_model=lambda output: group.__dict__.update(waited=8))
    worker.execute_model(StepMessage({}, [], [], [], [], []))
    assert worker.take_spans() == [(25, 27)] and worker.take_spans() == []


# --- Micro-batches in flight ------------------------------------------------------------------------------------------


class LateExecutor(executors.UniProcExecutor):
    """Everything is computed at once, and told when somebody asks: what a core with steps in flight sees."""


@pytest.fixture(scope="module")
def late():
    executor = LateExecutor()
    executor.collective_rpc("load_model", WorkerSpec(SIZES, ParallelConfig()))
    return executor


def core_on(executor, depth, **limits):
    scheduler = scheduler_of(**limits)
    return PipelineEngineCore(scheduler, remote_runner(executor, ParallelConfig(), scheduler), depth)


CROWDED = [("fcfs", 17, 5), ("priority", 17, 2), ("fcfs", 60, 5)]


@pytest.mark.parametrize(("policy", "blocks", "depth"), [
    *CROWDED, *(pytest.param(*each, marks=pytest.mark.slow)
                for each in itertools.product(["fcfs", "priority"], [60, 17], [2, 5]) if each not in CROWDED)
])  # fmt: skip
def test_in_flight_preempted_and_cached_the_tokens_stay(late, depth, blocks, policy):
    core = core_on(late, depth, blocks=blocks, policy=policy)
    outputs, seen, in_flight = [9, 14, 7, 20, 16], [], []
    preempt, put = core.scheduler._preempt_request, core.put_in_flight

    def count(victim, output):
        seen.append(victim.request_id)
        preempt(victim, output)

    def watch():
        found = put()
        in_flight.append(len(core.batch_queue))
        return found

    core.scheduler._preempt_request, core.put_in_flight = count, watch
    got = serve(core, outputs=outputs, priorities=[4, 3, 2, 1, 0])
    want = serve(plain_core(_model(), blocks=60), outputs=outputs)
    assert got == want
    assert bool(seen) == (blocks == 17) and min(2, depth) <= max(in_flight) <= depth


@functools.cache
def _model():
    return llama.random_model(**SIZES)


def test_a_token_of_a_former_life_is_dropped(late):
    """Preempted while its token was on the way, back and computed again before that token arrived: it counts once."""
    core = core_on(late, 3, blocks=60)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    core.add_request(Request("0", [3, 1, 4], params))
    assert core.put_in_flight()
    (request,) = core.scheduler.running
    output = SchedulerOutput()
    core.scheduler._preempt_request(request, output)
    core.runner.writer.write(output)
    assert core.put_in_flight(), "it runs again, and the first token has not arrived"
    got = []
    while core.scheduler.has_unfinished_requests():
        got += [token for found in core.step() for token in found.new_token_ids]
    assert got == serve(plain_core(_model()), [[3, 1, 4]], [6])[0]


def test_an_abort_in_flight_leaves_nothing(late):
    core = core_on(late, 3)
    for i in range(3):
        core.add_request(Request(str(i), PROMPTS[2], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)))
    while core.put_in_flight():
        pass
    assert len(core.batch_queue) == 3
    core.abort_requests(["0", "1", "2"])
    assert [core.step() for _ in range(4)] == [[], [], [], []]
    assert serve(core) == reference()
    core.runner.submit(core.scheduler.schedule())


def test_a_token_of_an_aborted_namesake_is_dropped(late):
    core = core_on(late, 3)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    core.add_request(Request("0", PROMPTS[1], params))
    assert core.put_in_flight()
    core.abort_requests(["0"])
    assert serve(core, [[3, 1, 4]], [6]) == serve(plain_core(_model()), [[3, 1, 4]], [6])


def proc_on(core):
    """The serving loop around a core, with all of PROMPTS handed in; and the letters that it sends."""
    letters = []
    proc = ParallelEngineCoreProc(SimpleNamespace(core=core, lora=None), letters.append)
    for i, (prompt, n) in enumerate(zip(PROMPTS, OUTPUTS)):
        params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
        proc.handle([(ADD, Request(str(i), list(prompt), params, arrival_time=i))])
    return proc, letters


def test_the_serving_loop_keeps_every_stage_busy(late):
    core, got, in_flight = core_on(late, 3), {}, []
    proc, letters = proc_on(core)
    while core.scheduler.has_unfinished_requests():
        proc.step()
        in_flight.append(1 + len(core.batch_queue))
    for letter in letters:
        for output in letter.outputs:
            got.setdefault(int(output.request_id), []).extend(output.new_token_ids)
    assert [got[i] for i in range(5)] == reference() and max(in_flight) == 3
    admitted = [list(letter.admitted) for letter in letters]
    assert admitted[0] == ["0", "1", "2"] and [name for names in admitted for name in names] == list("01234")
    assert letters[0].scheduler_stats.num_scheduled_tokens == 16 and proc.check_idle() == IDLE


def test_who_leaves_while_the_pipeline_runs_hears_no_more(late):
    proc, letters = proc_on(core_on(late, 2))
    proc.read_mail = lambda: proc.handle([(ABORT, ["0"])])
    proc.step()
    assert [output.request_id for output in letters[0].outputs] == ["1"]
    proc.handle([(ABORT, list("1234"))])
    proc.step()
    assert proc.check_idle() == IDLE and not letters[-1].outputs


def test_a_parallel_engine_has_a_batch_for_every_stage(late):
    model = llama.random_model(**SIZES)
    workers = Workers(late, ParallelConfig(1, 3), model)
    limits = SchedulerConfig(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64)
    core = make_core(model, limits, 60, 4, VllmConfig(workers=workers))
    assert isinstance(core, PipelineEngineCore) and core.max_concurrent_batches == 3


def test_sampling_and_logprobs_survive_the_way(late):
    fields = {"temperature": 0.9, "seed": 7, "top_p": 0.9, "presence_penalty": 0.5, "logprobs": 2}
    core, told = core_on(late, 2), []
    core.step = lambda: told.extend(found := PipelineEngineCore.step(core)) or found
    assert serve(core, **fields) == serve(plain_core(_model()), **fields)
    assert told and all(output.new_token_ids[0] in output.new_logprobs for output in told)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 3), (2, 2)])
def test_prompts_are_scored_where_the_logits_are(tp, pp):
    executor, parallel, prompts = ThreadExecutor(ParallelConfig(tp, pp)), ParallelConfig(tp, pp), PROMPTS[:4]
    cores = [plain_core(), parallel_core(executor, parallel)]
    told = []
    for core in cores:
        for i, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=2 if i % 2 else None)
            core.add_request(Request(str(i), prompt, params))
        told.append({})
        while core.scheduler.has_unfinished_requests():
            scored = {o.request_id: o.new_prompt_logprobs for o in core.step() if o.new_prompt_logprobs}
            assert not told[-1].keys() & scored.keys(), "told once"
            told[-1] |= scored
    executor.shutdown()
    assert [*told[0]] == ["1", "3"] and told[0].keys() == told[1].keys()
    for name, scores in told[0].items():
        for one, other in zip(scores[1:], told[1][name][1:], strict=True):
            assert one.keys() == other.keys()
            for t in one:
                assert other[t].rank == one[t].rank and other[t].logprob == pytest.approx(one[t].logprob, abs=1e-4)


def test_workers_hear_differences_not_requests():
    scheduler = scheduler_of()
    writer, sizes = StepWriter(scheduler.kv_cache_manager), []
    core = DryRun(scheduler)
    core.add_request(Request("0", list(range(40)), SamplingParams(max_tokens=20, ignore_eos=True)))
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        message = writer.write(output)
        sizes.append(len(pickle.dumps(message)))
        ready = [r for r in scheduler.running if r.num_computed_tokens == r.num_tokens]
        scheduler.update_from_output(output, {r.request_id: [0] for r in ready})
        assert (message.new == []) == (len(sizes) > 1)
        assert not any(twin.block_hashes for twin, _ in message.new), "whose prefix is cached was decided already"
    assert max(sizes[1:]) < sizes[0] / 2
    assert writer.write(scheduler.schedule()) is None and writer.finished == ["0"] and not writer.known


# --- The queue --------------------------------------------------------------------------------------------------------


class Context:
    Pipe = staticmethod(__import__("multiprocessing").Pipe)


def test_a_message_is_written_once_and_read_by_all():
    box = executors.MessageQueue(Context, readers=3, chunks=4, chunk_bytes=256)
    items = [bytes([i]) * (50 * (i % 9)) for i in range(40)]  # up to 400 bytes: some exceed a chunk
    got = [[] for _ in range(3)]

    def read(i):
        reader = box.reader(i)
        while len(got[i]) < len(items):
            got[i].append(reader.dequeue())

    threads = [threading.Thread(target=read, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    sizes = [box.enqueue(item) for item in items]
    for thread in threads:
        thread.join(60)
    assert got == [items] * 3
    assert sizes == [len(pickle.dumps(item, protocol=5)) for item in items], "once, however many read it"
    box.close()


def test_a_message_of_exactly_a_chunk_and_nothing_left_in_memory():
    item = bytes(100)
    box = executors.MessageQueue(Context, readers=1, chunks=2, chunk_bytes=len(pickle.dumps(item, protocol=5)))
    reader, name = box.reader(0), box.memory.name
    box.enqueue(item)
    assert reader.dequeue() == item
    box.close()
    with pytest.raises(FileNotFoundError):
        multiprocessing.shared_memory.SharedMemory(name)


def test_the_writer_waits_for_the_slowest_reader_and_asks_whether_it_lives():
    box = executors.MessageQueue(Context, readers=2, chunks=2, chunk_bytes=64)
    fast, slow = box.reader(0), box.reader(1)

    class Full(Exception):
        pass

    def full():
        raise Full

    for i in range(2):
        box.enqueue(i, full)
    assert [fast.dequeue(), fast.dequeue()] == [0, 1]
    with pytest.raises(Full):
        box.enqueue(2, full)
    assert slow.dequeue() == 0
    box.enqueue(2, full)
    assert (fast.dequeue(), slow.dequeue(), slow.dequeue()) == (2, 1, 2)
    box.close()


def test_memory_that_is_full_is_said_before_anything_starts(monkeypatch):
    """A page that is not there when it is first written is a bus error, with no words."""
    made = []

    class Memory(executors.SharedMemory):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self.name)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(executors, "SharedMemory", Memory)
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(common.InputError, match=r"131,080 bytes of shared memory.*No space left"):
        executors.MessageQueue(Context, readers=1, chunk_bytes=1 << 14)
    with pytest.raises(FileNotFoundError):
        multiprocessing.shared_memory.SharedMemory(made[0])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it has no file")
def test_all_of_the_ring_is_there_from_the_start():
    box = executors.MessageQueue(Context, readers=1)
    try:
        assert Path("/dev/shm", box.memory.name).stat().st_blocks * 512 >= box.memory.size
    finally:
        box.close()


@pytest.mark.parametrize("size", [0, 1 << 18], ids=["a full ring", "more than a ring or a pipe holds"])
def test_a_call_that_nobody_reads_has_an_end(monkeypatch, size):
    """A worker that is stopped, say: it neither dies nor reads. Who waited for its answer would have heard of it."""
    executor, heard = object.__new__(executors.MultiprocExecutor), []
    stopped = SimpleNamespace(sentinel=Context.Pipe()[0], is_alive=lambda: True)  # its other end is closed: no wait
    executor.world_size, executor.timeout, executor.processes = 1, 60, [stopped]
    executor.queue, executor.bytes_broadcast = executors.MessageQueue(Context, readers=1, chunks=1, chunk_bytes=128), 0
    executor.pending = [collections.deque()]
    monkeypatch.setattr(executors.MultiprocExecutor, "shutdown", lambda self: heard.append(self))
    watchdog = threading.Timer(10, executor.queue.pipes[0][0].close)  # then whoever waits for a reader reads an error
    watchdog.start()
    try:
        with pytest.raises(executors.ExecutorFailed, match=r"no room for held within 0\.01 s: a worker of 1 does not"):
            for _ in range(2):
                executor.submit("held", bytes(size), reply_rank=0, timeout=0.01)
        assert heard == [executor] and "no room" in executor.failed
    finally:
        watchdog.cancel()
        executor.queue.close()


# --- Processes --------------------------------------------------------------------------------------------------------


def gone(executor):
    return not any(process.is_alive() for process in executor.processes)


def test_answers_are_in_order_of_ranks():
    future = executors.Future(None, "held", range(3), False, 1)
    future.waiting, future.answers = set(), {2: "c", 0: "a", 1: "b"}
    assert future.result() == ["a", "b", "c"]


def test_who_waits_for_an_answer_of_the_dead_hears_why():
    executor = object.__new__(executors.MultiprocExecutor)
    executor.failed = "worker 1 of 3 died"
    with pytest.raises(executors.ExecutorFailed, match="worker 1 of 3 died"):
        executors.Future(executor, "held", range(3), False, 1).result()


def test_processes_write_the_same_tokens_and_a_silent_one_is_named():
    """TP 2 × PP 2 over gloo and shared memory. Then one falls silent."""
    executor, parallel = executors.MultiprocExecutor(4), ParallelConfig(2, 2)
    try:
        core = parallel_core(executor, parallel, source=SIZES)
        assert serve(core) == reference()
        found = executor.collective_rpc(layouts.moe_on_rank)
        assert max(max(rank["errors"].values()) for rank in found) < 1e-5
        with pytest.raises(executors.ExecutorFailed, match="no answer to sleep from worker 3 of 4 within 1 s"):
            executor.collective_rpc("sleep", 600.0, 3, timeout=1)
        assert gone(executor)
        with pytest.raises(executors.ExecutorFailed, match="worker 3"):
            executor.collective_rpc("held")
    finally:
        executor.shutdown()


def test_a_killed_worker_is_named_and_another_start_works():
    executor = executors.MultiprocExecutor(1)
    try:
        core = parallel_core(executor, ParallelConfig(1, 1, "mp"))
        core.add_request(Request("0", [1, 2, 3], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)))
        core.step()
        executor.processes[0].kill()
        with pytest.raises(executors.ExecutorFailed, match=r"worker 0 of 1 died \(signal SIGKILL\)"):
            while core.scheduler.has_unfinished_requests():
                core.step()
        assert gone(executor)
    finally:
        executor.shutdown()
    again = executors.MultiprocExecutor(1)
    again.shutdown()
    with pytest.raises(executors.ExecutorFailed, match="was shut down"):
        again.submit("held")
    again = executors.MultiprocExecutor(1)
    try:
        with pytest.raises(common.InputError, match="not a folder"):
            again.collective_rpc("load_model", WorkerSpec("/no/such/folder", ParallelConfig()))
        assert gone(again), "a refusal ends them, too"
    finally:
        again.shutdown()


def test_workers_end_with_the_last_who_has_their_executor():
    """`del llm` is how a notebook makes room for the next."""
    executor = executors.MultiprocExecutor(1)
    (process,), memory = executor.processes, Path("/dev/shm", executor.queue.memory.name)
    core = parallel_core(executor, ParallelConfig(1, 1, "mp"))
    assert process.is_alive() and memory.exists()
    del executor, core
    gc.collect()
    assert not process.is_alive() and not memory.exists()


def echo(worker, what, _):
    return what


def test_a_worker_reads_although_nobody_has_read_its_answer():
    """Both are larger than a pipe holds: the answer to a prompt with scores, say, and then an adapter."""
    executor = executors.MultiprocExecutor(1)
    watchdog = threading.Timer(30, executor.processes[0].kill)
    watchdog.start()
    try:
        first = executor.submit(echo, [bytes(300_000)], [1])
        second = executor.submit(echo, [bytes(3 * executor.queue.chunk_bytes)], [1])
        many = [executor.submit(echo, [bytes(100_000)], [i]) for i in range(3 * executor.queue.chunks)]
        assert [len(future.result()[0][0]) for future in (first, second)] == [300_000, 3 * executor.queue.chunk_bytes]
        assert all(len(future.result()[0][0]) == 100_000 for future in many)
    finally:
        watchdog.cancel()
        executor.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp", "victim"), [(2, 1, 1), (1, 2, 0), (2, 1, 0)])
def test_whoever_is_killed_is_named_not_its_peers(tp, pp, victim):
    executor, parallel = executors.MultiprocExecutor(tp * pp), ParallelConfig(tp, pp)
    try:
        core = parallel_core(executor, parallel)
        core.add_request(Request("0", [1, 2, 3], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)))
        core.step()
        executor.processes[victim].kill()
        with pytest.raises(executors.ExecutorFailed, match=rf"worker {victim} of 2 died \(signal SIGKILL\)"):
            while core.scheduler.has_unfinished_requests():
                core.step()
        assert gone(executor)
    finally:
        executor.shutdown()


# --- Which engine -----------------------------------------------------------------------------------------------------


def request_of(tokens, name="r", **about):
    return Request(name, list(tokens), SamplingParams(max_tokens=1), **about)


def test_vllms_score():
    balancer = LoadBalancer(3, client_count=2)
    balancer.counts, balancer.inflight = [[4, 16, 1.0], [0, 30, 0.9], [4, 16, 0.5]], [0, 0, 12]
    assert [balancer.score(i) for i in range(3)] == [32.0, 30.0, 24]
    assert balancer.choose(request_of([1])) == 2
    assert balancer.counts[2][0] == 6 and balancer.inflight[2] == 13, "it counts before the coordinator says so"


def test_a_burst_goes_round_and_ties_rotate():
    balancer = LoadBalancer(4)
    assert sorted(balancer.choose(request_of([1])) for _ in range(4)) == [0, 1, 2, 3]
    balancer.counts = [[0, 0, 0.0] for _ in range(4)]  # a snapshot that is older than the burst
    assert sorted(balancer.choose(request_of([1])) for _ in range(4)) == [0, 1, 2, 3], "its own count is exact"
    starts = []
    for index in range(4):
        starts.append(LoadBalancer(4, client_index=index, client_count=4).choose(request_of([1])))
    assert starts == [0, 1, 2, 3], "clients that know nothing of each other start at different engines"


@pytest.mark.parametrize(("engines", "clients", "starts"), [(8, 2, [0, 4]), (2, 4, [0, 0, 1, 1]), (3, 1, [0])])
def test_clients_begin_far_from_each_other(engines, clients, starts):
    """Each with its own share of the engines, or several with one, before anybody knows of anybody's load."""
    assert [LoadBalancer(engines, i, clients).choose(None) for i in range(clients)] == starts


@pytest.mark.parametrize("kind", BALANCERS.values())
def test_idle_engines_take_turns(kind):
    balancer = kind(3)
    assert [balancer.pick(request_of([i] * 20)) for i in range(6)] == [0, 1, 2, 0, 1, 2]


def test_a_prefix_goes_where_it_was_unless_that_is_too_far_behind():
    balancer = PrefixAwareBalancer(3, block_size=4, num_blocks=8, max_imbalance=2)
    first = balancer.choose(request_of(range(8)))
    others = [balancer.choose(request_of(range(100 * i, 100 * i + 8))) for i in (1, 2)]
    assert sorted([first, *others]) == [0, 1, 2]
    again = [balancer.choose(request_of([*range(8), i])) for i in range(6)]
    assert again[:3] == [first] * 3, "two behind is allowed"
    assert again[3] != first, "three are not"
    assert balancer.choose(request_of(range(8), cache_salt="x")) in range(3)
    assert balancer.hashes(request_of(range(8), cache_salt="x")) != balancer.hashes(request_of(range(8)))
    assert balancer.hashes(request_of(range(8), lora_name="x"))[1] != balancer.hashes(request_of(range(8)))[1]
    assert balancer.hashes(request_of(range(7))) == balancer.hashes(request_of(range(8)))[:1]
    assert len(balancer.hashes(request_of(range(8)))) == 2
    manager = KVCacheManager(9, 4, 64)
    manager.update_block_hashes(both := request_of(range(8), cache_salt="x", lora_name="y"))
    assert balancer.hashes(both) == both.block_hashes, "the keys that the engine's cache will have"
    assert all(len(sent) <= 8 for sent in balancer.sent)


def test_of_two_engines_with_the_prefix_the_shorter_queue():
    balancer = PrefixAwareBalancer(3, block_size=4)
    for engine in (1, 2):
        balancer.sent[engine].update(dict.fromkeys(balancer.hashes(request_of(range(8)))))
    balancer.inflight = [0, 3, 2]
    assert balancer.choose(request_of(range(8))) == 2


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=40), st.sampled_from(["load", "prefix"]))
def test_balancers_count_right(events, kind):
    balancer, running = BALANCERS[kind](3), []
    for group, finish in events:
        if finish and running:
            balancer.finished(running.pop(0))
        else:
            running.append(balancer.choose(request_of(range(group * 50, group * 50 + 33))))
        assert balancer.inflight == [running.count(i) for i in range(3)]
    if kind == "load":
        assert not running or max(balancer.inflight) - min(balancer.inflight) <= len(running)


def test_the_index_forgets_the_oldest():
    balancer = PrefixAwareBalancer(1, block_size=1, num_blocks=3)
    balancer.choose(request_of([1, 2, 3]))
    balancer.choose(request_of([9]))
    kept = list(balancer.sent[0])
    assert len(kept) == 3 and balancer.hashes(request_of([9]))[0] == kept[-1]
    assert balancer.hashes(request_of([1]))[0] not in kept
    balancer = PrefixAwareBalancer(1, block_size=1, num_blocks=2)
    for token in (1, 2, 1, 3):
        balancer.choose(request_of([token]))
    assert list(balancer.sent[0]) == [balancer.hashes(request_of([token]))[0] for token in (1, 3)], "1 was used again"


def test_routing_gains_hits_and_costs_balance():
    found = page.facts()["routing"]
    assert found["prefix_4"]["hit_rate"] > found["load"]["hit_rate"] + 0.1
    assert found["prefix_4"]["mean_ttft"] < found["load"]["mean_ttft"] < found["prefix_1000"]["mean_ttft"]
    assert found["load"]["spread"] < found["prefix_4"]["spread"] < found["prefix_1000"]["spread"]


# --- Sockets ----------------------------------------------------------------------------------------------------------


def test_letters_and_nothing_else_are_unpickled():
    request = Request("0", [1, 2], SamplingParams(stop=["x"], logit_bias={3: 1.5}), cache_salt="s")
    scores = {"new_logprobs": {5: Logprob(-0.1, 1, "a")}, "new_prompt_logprobs": [None, {2: Logprob(-3.0, 9)}]}
    outputs = EngineCoreOutputs([EngineCoreOutput("0", [5], "stop", 5, **scores)], SchedulerStats(1, 2, 0.5))
    kind, twin = loads(pickle.dumps((ADD, request)))
    assert kind is ADD and vars(twin).keys() == vars(request).keys() and twin.sampling_params == request.sampling_params
    assert loads(pickle.dumps(outputs)) == outputs
    for evil in (os.system, MPClient, build_engine, subprocess.Popen, getattr):
        with pytest.raises(pickle.UnpicklingError, match="no letter"):
            loads(pickle.dumps(evil))


def test_the_coordinator_publishes_news_at_most_every_100_ms():
    ours, theirs = socket.socketpair()
    coordinator = DPCoordinator([ours], [])
    assert coordinator.due_in(5.0) is None
    coordinator.note(0, [1, 2, 0.5])
    assert coordinator.due_in(5.0) == 0.0
    coordinator.publish(5.0)
    assert coordinator.due_in(5.01) is None
    coordinator.note(0, [2, 2, 0.5])
    assert coordinator.due_in(5.04) == pytest.approx(0.06) and coordinator.due_in(5.2) == 0.0
    ours.close(), theirs.close()


def test_the_coordinator_tells_whoever_is_left_about_each_engine():
    pairs = [socket.socketpair() for _ in range(4)]
    coordinator = DPCoordinator([a for a, _ in pairs[:2]], [a for a, _ in pairs[2:]])
    pairs[2][1].close()
    coordinator.note(1, [3, 2, 0.5])
    coordinator.publish(5.0)
    client = DPLBClient([None, None], None, LoadBalancer(2))
    assert client.take(2, loads(pairs[3][1].recv(4096)[4:])) is None
    assert client.balancer.counts == [[0, 0, 0.0], [3, 2, 0.5]] and [box.sock for box in coordinator.clients] == [
        pairs[3][0]
    ]
    for sock in sum(pairs, ()):
        sock.close()


def test_the_coordinator_unpickles_letters_and_nothing_else():
    """Engines may be elsewhere, and then what dials in may be anybody."""
    (engine, ours), (_, a) = sockets = [socket.socketpair() for _ in range(2)]
    coordinator = DPCoordinator([ours], [a])
    engine.sendall(frame(os.getcwd))
    coordinator.run()
    assert not coordinator.mail
    for sock in sum(sockets, ()):
        sock.close()


@contextlib.contextmanager
def mailbox(clients=2):
    """An engine's mailbox, and the other ends of its sockets: the clients', then the coordinator's."""
    pairs = [socket.socketpair() for _ in range(clients + 1)]
    theirs = [a for a, _ in pairs]
    try:
        yield EngineMailbox(theirs[:-1], theirs[-1], 1), [b for _, b in pairs]
    finally:
        for sock in sum(pairs, ()):
            sock.close()


def test_a_name_that_another_client_has_is_refused_until_it_ends():
    """Or one would be sent the answer of the other."""
    with mailbox() as (box, (one, two, _)):
        one.sendall(frame((ADD, request_of([1, 2]))))
        assert [kind for kind, _ in box.receive(1)] == [ADD]
        two.sendall(frame((ADD, request_of([3, 4]))))
        assert box.receive(1) == [] and box.owner == {"r": 0}
        letter = loads(two.recv(1 << 16)[4:])
        assert letter.refused == {"r": "request_id 'r': is in use"}
        one.sendall(frame((ABORT, ["r"])))
        box.receive(1)
        two.sendall(frame((ADD, request_of([3, 4]))))
        assert [kind for kind, _ in box.receive(1)] == [ADD] and box.owner == {"r": 1}


def test_a_letter_may_come_in_pieces():
    with mailbox() as (box, (client, *_)):
        data = frame((ADD, request_of([1, 2])))
        for piece in (data[:3], data[3:9]):
            client.sendall(piece)
            assert box.receive(0) == []
        client.sendall(data[9:] + frame((ABORT, ["r"])) + b"\0")
        (_, request), abort = box.receive(0)
        assert request.prompt_token_ids == [1, 2] and abort == (ABORT, ["r"])


def test_requests_end_with_a_client_that_is_found_gone_by_writing_to_it():
    """Not by reading: its end comes between the last look into the mail and the step's answer."""
    with mailbox() as (box, (first, second, _)):
        for name, client in (("r", first), ("s", second)):
            client.sendall(frame((ADD, request_of([1, 2], name))))
        assert len(box.receive(20)) == 2
        first.close()
        box.send(EngineCoreOutputs([EngineCoreOutput("r", [5])]))
        assert box.receive(0) == [(ABORT, ["r"])] and list(box.owner) == ["s"] and box.receive(0) == []


def read_letters(sock):
    """All that comes until the other side hangs up; then we do."""
    data, letters = b"", []
    with sock:
        while chunk := sock.recv(1 << 18):
            data += chunk
    while data:
        end = 4 + int.from_bytes(data[:4], "big")
        letters.append(loads(data[4:end]))
        data = data[end:]
    return letters


@contextlib.contextmanager
def nobody_waits(*sockets):
    """Whoever waits for one of these to be read fails after ten seconds, instead of never."""
    watchdog = threading.Timer(10, lambda: [sock.shutdown(socket.SHUT_RDWR) for sock in sockets])
    watchdog.start()
    try:
        yield
        assert watchdog.is_alive(), "somebody waited"
    finally:
        watchdog.cancel()


def test_a_client_that_has_stopped_holds_up_nobody_and_reads_everything_in_the_end():
    Outputs, Stats = EngineCoreOutputs, SchedulerStats
    output = EngineCoreOutput
    with mailbox() as (box, (stopped, other, coordinator)), nobody_waits(stopped, coordinator):
        for name, client in (("s", stopped), ("o", other)):
            client.sendall(frame((ADD, request_of([1, 2], name))))
        assert len(box.receive(20)) == 2
        for i in range(300):
            box.send(Outputs([output("s", [i] * 2000)]))
        waiting = len(box.clients[0].unsent)
        for i in range(2000):  # what only says how things are does not pile up, however long nobody reads it
            box.send(Outputs(scheduler_stats=Stats(i, 0, 0.0)))
        assert waiting > 100_000 and len(box.clients[0].unsent) == waiting and box.clients[0].state
        assert len(box.coordinator.unsent) < 1000 and box.coordinator.state and box.receive(0) == []
        with ThreadPoolExecutor(3) as reading:
            heard = [reading.submit(read_letters, sock) for sock in (stopped, other, coordinator)]
            while box.pending():
                assert box.receive(0.05) == []
            box.send(Outputs([output("o", [7] * (1 << 20))]))  # more than a socket holds: it waits for `close`
            box.send(Dead("the end"))
            box.close(), box.coordinator.sock.shutdown(socket.SHUT_WR)
            (*pieces, state, end), (*_, last, _), (*_, counts) = [future.result(20) for future in heard]
    assert [x.outputs[0].new_token_ids[0] for x in pieces] == list(range(300))
    assert state.scheduler_stats == Stats(1999, 0, 0.0) and end == Dead("the end")
    assert len(last.outputs[0].new_token_ids) == 1 << 20 and counts == (1, [0, 1999, 0.0])


def test_a_client_that_has_stopped_does_not_hold_up_the_coordinator():
    """It reads the latest when it goes on."""
    (engine, ours), (stopped, a), (other, b) = sockets = [socket.socketpair() for _ in range(3)]
    coordinator = DPCoordinator([ours], [a, b])
    with nobody_waits(stopped, other), ThreadPoolExecutor(3) as pool:
        for i in range(2000):
            coordinator.note(0, [i, 0, 0.0])
            coordinator.publish(0.0)
        assert all(box.state and len(box.unsent) < 1000 for box in coordinator.clients)
        running, *heard = [pool.submit(coordinator.run), *(pool.submit(read_letters, x) for x in (stopped, other))]
        while any(box.pending for box in coordinator.clients):
            engine.sendall(frame((0, [2000, 0, 0.0])))  # news wake it up
            time.sleep(0.01)
        engine.close(), running.result(20), a.shutdown(socket.SHUT_WR), b.shutdown(socket.SHUT_WR)
        for future in heard:
            assert future.result(20)[-1][0][0] in (1999, 2000)
    for sock in sum(sockets, ()):
        sock.close()


def test_it_waits_for_a_letter_no_longer_than_it_is_asked_to():
    with mailbox() as (box, (client, *_)):
        start = time.monotonic()
        assert box.receive(0.05) == [] and time.monotonic() - start > 0.04
        client.sendall(frame((ABORT, ["r"])))
        start = time.monotonic()
        assert box.receive(20) == [(ABORT, ["r"])] and time.monotonic() - start < 10
        threading.Timer(0.05, lambda: client.sendall(frame((ABORT, ["s"])))).start()
        assert box.receive(None) == [(ABORT, ["s"])]


@pytest.mark.parametrize("end", ["aborted", "finished", "refused"])
def test_a_name_is_free_when_its_request_has_ended(end):
    with mailbox() as (box, (a, b, _)):
        a.sendall(frame((ADD, request_of([1], "x"))))
        assert len(box.receive(0)) == 1
        if end == "aborted":
            a.sendall(frame((ABORT, ["x"])))
            box.receive(0)
        elif end == "finished":
            box.send(EngineCoreOutputs([EngineCoreOutput("x", [5], "length")]))
        else:
            box.send(EngineCoreOutputs(refused={"x": "too long"}))
        b.sendall(frame((ADD, request_of([2], "x"))))
        assert [kind for kind, _ in box.receive(0)] == [ADD]


def test_the_coordinator_hears_of_queues_not_of_steps():
    with mailbox() as (box, (*_, coordinator)):
        for stats in ((1, 2, 0.5), (1, 1, 0.6, 1), (1, 0, 0.6, 3)):  # those that are passed over wait, too
            box.send(EngineCoreOutputs(scheduler_stats=SchedulerStats(*stats)))
        found = Mailbox(coordinator).receive(0)
        assert found == [(1, [2, 1, 0.5]), (1, [3, 1, 0.6])], "waiting before running"


def test_a_step_for_nobody_is_told_to_all_and_one_for_the_dead_to_none():
    with mailbox() as (box, _):
        empty = EngineCoreOutputs(scheduler_stats=SchedulerStats(0, 0, 0.0))
        assert box.split(empty) == {0: empty, 1: empty}
        assert box.split(EngineCoreOutputs([EngineCoreOutput("unknown", [5])])) == {}
        box.owner |= {"mine": 0, "yours": 1}
        parts = box.split(EngineCoreOutputs(preempted=["mine", "gone"]))
        assert {index: part.preempted for index, part in parts.items()} == {0: ["mine"]}


def test_totals_are_of_all_engines_and_refusals_make_room():
    client, stats = DPLBClient([None, None], None, LoadBalancer(2)), SchedulerStats
    letter = EngineCoreOutputs
    client.send((ADD, request_of([1], "x")))
    assert client.balancer.inflight == [1, 0]
    first = client.take(0, letter(refused={"x": "in use"}, scheduler_stats=stats(1, 2, 0.5, 4, 7)))
    assert first.scheduler_stats.kv_cache_usage == 0.25, "who has not spoken yet has an empty cache"
    assert client.balancer.inflight == [0, 0] and not client.engine_of
    found = client.take(1, letter(scheduler_stats=stats(10, 20, 0.25, 1, 9))).scheduler_stats
    assert found == stats(11, 22, 0.375, 5, 9)
    found = client.take(0, letter(scheduler_stats=stats(0, 0, 0.0, 0, 5))).scheduler_stats
    assert found == stats(10, 20, 0.125, 1, 5)
    for engine, counts in ((0, (3, 9, 4)), (1, (1, 2, 1, 5))):  # as many positions as each has drafted for
        found = client.take(engine, letter(scheduler_stats=stats(0, 0, 0.0, 0, 0, spec_decoding=counts)))
    assert found.scheduler_stats.spec_decoding == (4, 11, 5, 5)


def test_replies_are_added_up_and_an_error_of_one_is_the_answer():
    client = DPLBClient([None, None], None, LoadBalancer(2))
    assert client.take(0, Reply(1, {"a": 2, "b": 0})) is None
    assert client.take(1, Reply(1, {"a": 3, "b": 0})).result == {"a": 5, "b": 0}
    client.take(1, Reply(2, {"a": 3}))
    assert client.take(0, Reply(2, {}, error="no")).error == "no" and not client.replies


INSIDE, GO, ABORTED = threading.Event(), threading.Event(), []  # of a gated engine: in a step; may go on; was told


def make_tiny(args, report=lambda text: None):
    """An engine on the tiny model, as a factory makes one; `args` may break it."""
    report("here")
    scheduler = scheduler_of(blocks=80)
    core = EngineCore(scheduler, runner_of(_model(), scheduler))
    if args == "broken":
        core.execute_model = lambda output: 1 / 0
    if args == "gated":
        core.execute_model = lambda output: (INSIDE.set(), GO.wait(60), type(core).execute_model(core, output))[-1]
        core.abort_requests = lambda ids: (ABORTED.extend(ids), type(core).abort_requests(core, ids))[-1]
    return type("Engine", (), {"core": core, "about": {}, "lora": None})()


class Engines:
    """Engines as threads, with real sockets to clients and to a coordinator."""

    def __init__(self, monkeypatch, count, clients, args=("",)):
        self.ours = {}
        self.threads = []
        for engine in range(count):
            theirs = []
            for slot in range(clients + 1):
                self.ours[engine, slot], other = socket.socketpair()
                theirs.append(other)
            box = EngineMailbox(theirs[:clients], theirs[clients], engine)
            thread = threading.Thread(target=self.run, args=(box, theirs, args[engine % len(args)]), daemon=True)
            thread.start()
            self.threads.append(thread)
        pairs = [socket.socketpair() for _ in range(clients)]
        coordinator = DPCoordinator([self.ours[i, clients] for i in range(count)], [b for _, b in pairs])
        threading.Thread(target=coordinator.run, daemon=True).start()
        self.coordinator, self.count, self.clients = [a for a, _ in pairs], count, clients

    @staticmethod
    def run(box, sockets, args):
        serve_clients(box, make_tiny, args)
        for sock in sockets:
            sock.close()

    def client(self, index, balancer=None):
        balancer = balancer or LoadBalancer(self.count, index, self.clients)
        return DPLBClient([self.ours[i, index] for i in range(self.count)], self.coordinator[index], balancer)


async def start(client, real_model):
    while not isinstance(letter := await client.receive(), EngineCoreReady):
        assert isinstance(letter, Progress)
    config, tokenizer = _model().config, real_model[1]
    front = FrontEnd(config, tokenizer, client.send, letter.max_model_len)
    return AsyncLLM(client, letter, front)


async def ask(llm, name, prompt, n, **fields):
    params = SamplingParams(**{"temperature": 0, "max_tokens": n, "ignore_eos": True, **fields})
    async for output in llm.generate(name, {"prompt_token_ids": list(prompt)}, params):
        final = output
    return final.outputs[0].token_ids


IDLE = {"unfinished": 0, "tables": 0, "owned_blocks": 0}


def test_two_engines_one_client(monkeypatch, real_model):
    """The tokens of one engine, spread over two; aborts reach the right one; totals are totals."""
    engines = Engines(monkeypatch, 2, 1)

    async def story():
        llm = await start(engines.client(0), real_model)
        assert llm.ready.about == {"engines": 2} and llm.ready.num_gpu_blocks == 160
        where = []
        choose = llm.client.balancer.choose
        llm.client.balancer.choose = lambda request: where.append(choose(request)) or where[-1]
        got = await asyncio.gather(*(ask(llm, str(i), p, n) for i, (p, n) in enumerate(zip(PROMPTS, OUTPUTS))))
        assert got == reference() and {where.count(0), where.count(1)} == {2, 3}
        tasks = [asyncio.create_task(ask(llm, f"x{i}", PROMPTS[0], 50)) for i in range(4)]
        while len(llm.client.engine_of) < 4:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await llm.call_utility("check_idle") == IDLE
        assert llm.client.balancer.inflight == [0, 0] and not llm.client.engine_of
        await llm.shutdown()

    asyncio.run(story())
    for thread in engines.threads:
        thread.join(30)
        assert not thread.is_alive(), "an engine that nobody talks to ends"


def test_two_clients_before_one_engine(monkeypatch, real_model):
    """Each reads its own answers, under a name that the other uses as well; who hangs up leaves nothing behind."""
    engines = Engines(monkeypatch, 1, 2, ("gated",))

    async def hold(llm, name):
        """A request in the middle of a step that does not end until it is told to."""
        GO.clear(), INSIDE.clear()
        task = asyncio.create_task(ask(llm, name, PROMPTS[0], 55))
        assert await asyncio.to_thread(INSIDE.wait, 60)
        return task

    async def story():
        GO.set(), ABORTED.clear()
        a, b = await asyncio.gather(start(engines.client(0), real_model), start(engines.client(1), real_model))
        got = await asyncio.gather(*(ask((a, b)[i % 2], str(i), p, n, logprobs=1 if i == 3 else None)
                                     for i, (p, n) in enumerate(zip(PROMPTS, OUTPUTS))))  # fmt: skip
        assert got == reference()
        first = await hold(a, "same")
        second = asyncio.create_task(ask(b, "same", PROMPTS[1], 3))
        while not b.client.engine_of:
            await asyncio.sleep(0)
        GO.set()
        assert len(await first) == 55 and await second == reference()[1][:3]
        last = await hold(a, "again")
        a.client.close()  # the API server is gone, in the middle of its request
        GO.set()
        while await b.call_utility("check_idle") != IDLE:
            pass
        assert len(ABORTED) == 1 and ABORTED[0].startswith("again-")
        last.cancel(), a.output_handler.cancel()
        await asyncio.gather(last, a.output_handler, return_exceptions=True)
        assert await ask(b, "later", PROMPTS[0], 9) == reference()[0]
        await b.shutdown()

    asyncio.run(story())


def test_one_engine_of_two_dies_and_everybody_hears(monkeypatch, real_model):
    engines = Engines(monkeypatch, 2, 1, ("", "broken"))

    async def story():
        llm = await start(engines.client(0), real_model)
        found = await asyncio.gather(*(ask(llm, str(i), PROMPTS[0], 50) for i in range(4)), return_exceptions=True)
        assert [type(x) for x in found] == [EngineDeadError] * 4
        assert "ZeroDivisionError" in str(llm.dead)
        with pytest.raises(EngineDeadError):
            llm.add_request("late", "x", SamplingParams())
        await llm.shutdown()

    asyncio.run(story())


def test_engines_end_with_who_had_them_although_the_loop_is_closed(monkeypatch, real_model):
    """A notebook whose cell has ended, and then `del llm`."""
    engines = Engines(monkeypatch, 2, 1)

    async def story():
        llm = await start(engines.client(0), real_model)
        assert await ask(llm, "0", PROMPTS[0], 3) == reference()[0][:3]
        return llm

    asyncio.run(story()).client.close()
    for thread in engines.threads:
        thread.join(30)
        assert not thread.is_alive()


def test_an_engine_is_told_which_of_several_it_is(monkeypatch):
    started = []

    def process(target, name, args):
        started.append(args)
        return SimpleNamespace(start=lambda: None)

    monkeypatch.setattr(engine_group, "start_context", lambda: SimpleNamespace(Process=process))
    about = {"kv_connector": "TCPConnector", "kv_role": "kv_both", "kv_port": 7000}
    for args in (EngineArgs(kv_transfer_config=about, data_parallel_size=2), {"any": "other"}):
        start_engine([], 0, 1, make_engine, args, 1)
    (*_, args, _), (*_, others, _) = started
    assert args.kv_transfer.kv_port == 7001 and others == {"any": "other"}


def test_the_prefix_balancer_hashes_blocks_as_long_as_the_engines():
    client = DPLBClient([None], None, PrefixAwareBalancer(1))
    client.take(0, EngineCoreReady(64, 8, 64, 99, 4, "fcfs", True, 1))
    assert (client.balancer.block_size, client.balancer.num_blocks) == (4, 99)


def test_engines_that_differ_are_refused():
    client = DPLBClient([None, None], None, LoadBalancer(2))
    ready = lambda blocks, length: EngineCoreReady(length, 8, 64, blocks, 16, "fcfs", True, 1)  # noqa: E731
    assert client.take(0, ready(10, 64)) is None
    letter = client.take(1, ready(12, 32))
    assert isinstance(letter, Dead) and letter.bad_input and "max_model_len" in letter.error
    assert client.take(1, ready(12, 64)).num_gpu_blocks == 22, "of those who are alike, all blocks"


# --- Engines elsewhere ------------------------------------------------------------------------------------------------


def free_port(host="127.0.0.1"):
    with socket.create_server((host, 0)) as sock:
        return sock.getsockname()[1]


@pytest.fixture
def secret(monkeypatch):
    monkeypatch.setenv("VLLM_ENGINE_SECRET", "for these tests alone")
    return handshake.secret()


def greeted(address, key):
    """A caller who knows the secret."""
    return handshake.dial(address, key, 20)


def test_engines_dial_in_and_strangers_are_turned_away(secret):
    args = EngineArgs(data_parallel_size=3, data_parallel_size_local=1, data_parallel_rpc_port=free_port())
    found, said = {}, []
    head = threading.Thread(target=lambda: found.update(accept_engines(args, 2, said.append)), daemon=True)
    head.start()
    address = (args.data_parallel_address, args.data_parallel_rpc_port)
    remote, clients = dial(*address, 1)
    assert clients == 2 and len(remote) == 3
    for line in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"x" * 5000, b'{"engine": 1, "slot": 0}\n', b'{"engine": 0}\n',
                 b'{"engine": 2, "slot": 3}\n', b'{"engine": [], "slot": 0}\n', b'{"engine": 2, "slot": []}\n',
                 b'{"engine": 2.0, "slot": 0.0}\n', b'{"engine": true, "slot": true}\n', b"[" * 4000 + b"\n",
                 b"\xff\xfe\n", b'{"engine": NaN}\n', b'"\\ud800"\n', b"9" * 4090 + b"\n"):  # fmt: skip
        with socket.create_connection(address) as sock:
            sock.settimeout(20)
            sock.sendall(line)
            told = sock.recv(4096)
            assert told == told[: len(handshake.MAGIC) + handshake.NONCE], "a stranger hears a random number"
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(4096) == b""
        with greeted(address, secret) as sock:  # nonsense of one of ours is no better
            sock.settimeout(20)
            sock.sendall(line)
            assert b'{"error": ' in sock.recv(4096)
    with pytest.raises(common.InputError, match="refused"):
        dial(*address, 7)
    last, _ = dial(*address, 2)
    head.join(30)
    assert sorted(found) == [(e, s) for e in (1, 2) for s in range(3)] and len(said) == 3
    assert {sock.gettimeout() for sock in (*found.values(), *remote, *last)} == {None}, "a quiet hour is no failure"
    for (engine, slot), sock in found.items():
        sock.sendall(b"%d%d" % (engine, slot))
    assert [s.recv(2) for s in (*remote, *last)] == [b"10", b"11", b"12", b"20", b"21", b"22"]
    for sock in (*found.values(), *remote, *last):
        sock.close()
    with pytest.raises(common.InputError, match="--data-parallel-address"):
        dial(address[0], free_port(), 1, patience=0.0)
    with socket.create_server((address[0], 0)) as taken:
        args = EngineArgs(
            data_parallel_size=2, data_parallel_size_local=1, data_parallel_rpc_port=taken.getsockname()[1]
        )
        with pytest.raises(common.InputError, match=r"--data-parallel-address .* --data-parallel-rpc-port"):
            accept_engines(args, 1)


def test_an_engine_that_died_before_all_were_there_may_come_again(secret):
    args = EngineArgs(data_parallel_size=3, data_parallel_size_local=1, data_parallel_rpc_port=free_port())
    found, said = {}, []
    head = threading.Thread(target=lambda: found.update(accept_engines(args, 1, said.append)), daemon=True)
    head.start()
    address = (args.data_parallel_address, args.data_parallel_rpc_port)
    for sock in dial(*address, 1)[0]:
        sock.close()
    sockets = [*dial(*address, 1)[0], *dial(*address, 2)[0]]
    head.join(30)
    assert sorted(found) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    for (engine, slot), sock in found.items():
        sock.sendall(b"%d%d" % (engine, slot))
    assert [sock.recv(2) for sock in sockets] == [b"10", b"11", b"20", b"21"]
    for sock in (*found.values(), *sockets):
        sock.close()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n", b"[]\n" * 40, b""])
def test_who_dials_somebody_else_reads_one_line(answer, secret):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept():
            sock, _ = server.accept()
            with sock:
                sock.recv(4096)
                sock.sendall(answer)

        threading.Thread(target=accept).start()
        with pytest.raises(common.InputError, match="--data-parallel-address"):
            dial(*server.getsockname(), 1, patience=0.0)


@pytest.mark.parametrize("answer", [b"[]\n", b'{"engine": 1\n', b"[" * 4000 + b"\n", b"x" * 5000])
def test_who_dials_a_head_that_talks_nonsense_reads_one_line(answer, secret):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def welcome(sock, _):
            with sock:
                sock.sendall(answer)
                sock.recv(4096)

        with (
            contextlib.closing(handshake.Reception(server, secret, welcome)),
            pytest.raises(common.InputError) as error,
        ):
            dial(*server.getsockname(), 1)
        assert re.match(
            r"--data-parallel-address .*: (no line|no object|nested too deeply|Expecting)", str(error.value)
        )


def test_who_dials_another_secret_is_told(secret):
    server = socket.create_server(("127.0.0.1", 0))
    address = server.getsockname()
    reception = handshake.Reception(server, b"another one of theirs", pytest.fail)
    with contextlib.closing(reception), pytest.raises(common.InputError, match="another secret than we; VLLM_ENGINE_"):
        dial(*address, 1)


def test_nobody_waits_behind_strangers_who_say_nothing_or_a_byte_at_a_time(secret, monkeypatch):
    """And a greeting has a deadline, however it trickles."""
    monkeypatch.setattr(handshake, "SECONDS", 1.0)
    args = EngineArgs(data_parallel_size=2, data_parallel_size_local=1, data_parallel_rpc_port=free_port())
    found, said = {}, []
    head = threading.Thread(target=lambda: found.update(accept_engines(args, 1, said.append)), daemon=True)
    head.start()
    address = (args.data_parallel_address, args.data_parallel_rpc_port)
    while not said:
        time.sleep(0.01)
    with contextlib.ExitStack() as strangers:
        silent = [strangers.enter_context(socket.create_connection(address)) for _ in range(40)]
        slow = strangers.enter_context(socket.create_connection(address))
        start, ended = time.monotonic(), []

        def trickle():
            with contextlib.suppress(OSError):
                for byte in handshake.MAGIC + bytes(1000):
                    slow.sendall(bytes([byte]))
                    time.sleep(0.05)
            ended.append(time.monotonic() - start)

        trickling = threading.Thread(target=trickle, daemon=True)
        trickling.start()
        sockets, clients = dial(*address, 1)
        assert time.monotonic() - start < 0.9, "an engine waits for nobody"
        head.join(20)
        trickling.join(20)
        assert clients == 1 and sorted(found) == [(1, 0), (1, 1)] and ended[0] < 5
        for sock in silent:
            sock.settimeout(20)
            with contextlib.suppress(ConnectionResetError):
                assert len(sock.recv(99)) == 40 and sock.recv(99) == b""
    for sock in (*found.values(), *sockets):
        sock.close()


def test_of_strangers_there_are_only_so_many_at_a_time(secret, monkeypatch):
    """The oldest has to go: who knows the secret needs milliseconds to prove it."""
    monkeypatch.setattr(handshake, "STRANGERS", 3)
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        arrived = queue.SimpleQueue()
        reception = stack.enter_context(contextlib.closing(
            handshake.Reception(server, secret, lambda sock, _: arrived.put(sock))))  # fmt: skip
        strangers = []
        for _ in range(5):
            strangers.append(stack.enter_context(socket.create_connection(server.getsockname(), 20)))
            strangers[-1].recv(99)
        with greeted(server.getsockname(), secret), arrived.get(timeout=20):
            assert [sock.recv(99) for sock in strangers[:2]] == [b""] * 2 and len(reception.strangers) <= 3
        strangers[-1].settimeout(0.05)
        with pytest.raises(TimeoutError):  # the youngest still has its time
            strangers[-1].recv(99)


def test_a_proof_is_of_use_once_and_in_one_role(secret):
    """Neither what an engine once said, nor what the head itself says, opens the door."""
    server = socket.create_server(("127.0.0.1", 0))
    address = server.getsockname()
    with contextlib.closing(handshake.Reception(server, secret, pytest.fail)):
        for echo in (True, False):
            with socket.create_connection(address, 20) as sock:
                said = sock.recv(40, socket.MSG_WAITALL)
                sock.sendall(said)
                proof = sock.recv(32, socket.MSG_WAITALL)
                sock.sendall(proof if echo else hmac.digest(secret, b"dialled" + bytes(64), "sha256"))
                assert sock.recv(1) == b""


@pytest.mark.parametrize("accepted", [True, False])
def test_a_greeting_ends_in_time_however_slowly_it_trickles(accepted):
    ours, theirs = socket.socketpair()

    def trickle():
        with contextlib.suppress(OSError):
            for byte in handshake.MAGIC + bytes(100):
                theirs.sendall(bytes([byte]))
                time.sleep(0.02)

    thread, start = threading.Thread(target=trickle, daemon=True), time.monotonic()
    thread.start()
    with ours, theirs, pytest.raises(TimeoutError):
        handshake.greet(ours, b"a secret that nobody hears", accepted, start + 0.3)
    assert time.monotonic() - start < 1


def test_the_secret_is_this_users_and_the_same_for_everybody(monkeypatch, tmp_path):
    monkeypatch.delenv("VLLM_ENGINE_SECRET", raising=False)
    monkeypatch.setattr(folders, "cache_folder", lambda: tmp_path / "made")
    with ThreadPoolExecutor(8) as pool:
        found = {*pool.map(lambda _: handshake.secret(), range(8))}
    (path,) = (tmp_path / "made").iterdir()
    assert found == {path.read_bytes()} and len(path.read_bytes()) == 64 and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(common.InputError, match="others can read it"):
        handshake.secret()
    path.chmod(0o600)
    path.write_bytes(b"")
    with pytest.raises(common.InputError, match="too short"):
        handshake.secret()
    monkeypatch.setattr(folders, "cache_folder", lambda: path)
    with pytest.raises(common.InputError, match="give VLLM_ENGINE_SECRET"):
        handshake.secret()
    monkeypatch.setenv("VLLM_ENGINE_SECRET", "0123456789abcdef")
    assert handshake.secret() == b"0123456789abcdef"
    monkeypatch.setenv("VLLM_ENGINE_SECRET", "short")
    with pytest.raises(common.InputError, match="16 characters"):
        handshake.secret()


def test_api_servers_end_with_the_process_that_started_them():
    """However that ends: they would keep the port, and go on without a coordinator."""
    code = f"""
import sys; sys.path.insert(0, {str(common.HERE)!r})
import asyncio, common, multiprocessing, types
from engine.serving import api_servers as group
servers = multiprocessing.get_context("fork")
group.make_client = lambda *_, **about: None
group.run_server = lambda *_, **about: asyncio.sleep(600)
args = types.SimpleNamespace(api_server_count=1)
process = servers.Process(target=group.run_api_server, args=(args, {{}}, None, (), 0, None))
process.start()
print(process.pid, flush=True)
process.join()
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    server = int(parent.stdout.readline())
    try:
        assert alive(server)
        parent.kill()
        wait_until_gone([server])
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


def test_nobody_holds_the_door_open_after_the_signal():
    """A kernel takes connections as long as any process has the listening socket, and here nobody would answer them:
    two API servers have stopped listening, and are busy with their last answers."""
    code = f"""
import sys; sys.path.insert(0, {str(common.HERE)!r})
import asyncio, common, multiprocessing, signal, types
from engine.serving import api_servers as group
fork = multiprocessing.get_context("fork")
group.multiprocessing = types.SimpleNamespace(get_context=lambda kind: fork, connection=multiprocessing.connection,
                                              parent_process=multiprocessing.parent_process)
nothing = lambda *_: None
group.EngineGroup = lambda *_: types.SimpleNamespace(processes=[], sockets_of=lambda index: (), join=nothing,
                                                     forget_sockets=nothing)
group.accept_engines = nothing
group.make_client = lambda *_, **about: None

async def run_server(args, sock, say, **about):
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    sock.listen()
    say("Listening on http://127.0.0.1:" + str(sock.getsockname()[1]))
    await stopped.wait()
    sock.close()
    await asyncio.sleep(60)

group.run_server = run_server
args = types.SimpleNamespace(api_server_count=2, data_parallel_size=1)
group.run_api_servers(None, args, dict(host="127.0.0.1", port=0, shutdown_timeout=60))
"""
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        port = int(launcher.stdout.readline().rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port), 5).close()
        launcher.send_signal(signal.SIGTERM)
        stop, refused = time.monotonic() + 10, False
        while not refused and time.monotonic() < stop:
            try:
                socket.create_connection(("127.0.0.1", port), 5).close()
                time.sleep(0.02)
            except ConnectionRefusedError:
                refused = True
        assert refused and len(descendants(launcher.pid)) == 2, "the servers are still there"
    finally:
        left = descendants(launcher.pid)
        launcher.kill()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        launcher.wait()
        launcher.stdout.close()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_engines_without_an_api_server_end_with_the_process_that_was_told_to(number):
    code = f"""
import sys; sys.path.insert(0, {str(common.HERE)!r})
import common, multiprocessing, signal, time, types
from engine.serving import engine_group as group
engines = multiprocessing.get_context("fork")
signal.signal(signal.SIGINT, signal.default_int_handler)
def start_engine(*_):
    process = engines.Process(target=time.sleep, args=(600,))
    process.start()
    print(process.pid, flush=True)
    return process
group.dial, group.start_engine = lambda *_: ([], 1), start_engine
args = types.SimpleNamespace(data_parallel_size_local=2, data_parallel_start_rank=1, data_parallel_address="",
                             data_parallel_rpc_port=0)
sys.exit(group.run_headless(None, args, lambda text: None))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    engines = []
    try:
        engines += [int(process.stdout.readline()) for _ in range(2)]
        time.sleep(0.2)
        process.send_signal(number)
        assert process.wait(20) == 0 and not any(map(alive, engines))
    finally:
        for pid in engines:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_line_without_an_end_is_not_read_for_ever():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"x" * 5000)
        with pytest.raises(ValueError, match="no line"):
            read_line(ours, time.monotonic() + 20)
        with pytest.raises(TimeoutError):
            theirs.sendall(b"x")
            read_line(ours, time.monotonic() + 0.1, limit=10_000)


def letter(kind, content):
    return frame((kind, content))


@pytest.mark.parametrize(
    "said",
    [(1 << 31).to_bytes(4, "big"), b"\0\0\0\1.", b"\0\0\0\4junk", frame(7), frame((1, 2, 3)),
     letter(EngineCoreRequestType.ADD, 5), letter(EngineCoreRequestType.ABORT, 5),
     letter(EngineCoreRequestType.UTILITY, ()), frame(functools.partial(print))],
)  # fmt: skip
def test_a_client_that_sends_no_letter_is_gone_and_the_others_are_served(said):
    """Its length is bounded, its pickle names nothing but letters, and what it says it says to its own connection."""
    (good, ours), (bad, theirs) = socket.socketpair(), socket.socketpair()
    with good, ours, bad, theirs:
        mailbox = EngineMailbox([ours, theirs], None, 0)
        mailbox.owner["theirs"] = 1
        bad.sendall(said)
        abort = EngineCoreRequestType.ABORT
        assert mailbox.receive(5) == [(abort, ["theirs"])] and [*mailbox.clients] == [0]
        good.sendall(letter(abort, ["x"]))
        assert mailbox.receive(5) == [(abort, ["x"])]


@pytest.mark.parametrize("said", [(1 << 31).to_bytes(4, "big"), b"\0\0\0\4junk"])
def test_an_engine_that_sends_no_letter_is_dead(said):
    async def go():
        ours, theirs = socket.socketpair()
        client = DPLBClient([ours], None, LoadBalancer(1))
        theirs.sendall(said)
        with theirs, pytest.raises(EngineDeadError):
            await asyncio.wait_for(client.receive(), 20)
        client.close()

    asyncio.run(go())


@pytest.mark.parametrize("said", [7, (9, [0, 0, 0.0]), (0,), ([], [0, 0, 0.0])])
def test_a_coordinator_that_hears_nonsense_goes_on(said):
    (first, bad), (second, good), (client, heard) = (socket.socketpair() for _ in range(3))
    with first, bad, second, good, client, heard:
        coordinator = DPCoordinator([first, second], [client])
        thread = threading.Thread(target=coordinator.run, daemon=True)
        bad.sendall(frame(said))
        thread.start()
        good.sendall(frame((1, [2, 1, 0.5])))
        size = int.from_bytes(heard.recv(4, socket.MSG_WAITALL), "big")
        assert loads(heard.recv(size, socket.MSG_WAITALL))[1] == [2, 1, 0.5]
        good.close()
        thread.join(20)
        assert not thread.is_alive(), "all engines are gone"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"tensor_parallel_size": 2, "engine_place": "thread"}, "engine_place"),
     ({"data_parallel_size": 0, "headless": True}, "data_parallel_size"),
     ({"data_parallel_size": 2, "data_parallel_size_local": 3}, "data_parallel_size_local"),
     ({"data_parallel_size": 2, "headless": True}, "data_parallel_start_rank"),
     ({"data_parallel_size": 4, "headless": True, "data_parallel_size_local": 2, "data_parallel_start_rank": 3},
      "data_parallel_start_rank"),
     ({"headless": True, "api_server_count": 2}, "api_server_count"),
     ({"tensor_parallel_size": 2, "distributed_executor_backend": "mpi"}, "uni, mp, ray"),
     ({"data_parallel_size": 2, "data_parallel_routing": "random"}, "load, prefix")],
)  # fmt: skip
def test_flags_that_are_refused(wrong, words):
    with pytest.raises(common.InputError, match=words):
        EngineArgs(**wrong)


def test_the_last_engines_may_be_elsewhere():
    EngineArgs(data_parallel_size=4, headless=True, data_parallel_size_local=2, data_parallel_start_rank=2)


def test_the_fullest_worker_says_how_much_cache_there_is():
    executor = SimpleNamespace(collective_rpc=lambda name, args, budget: [5, 3, 4])
    assert Workers(executor, ParallelConfig(3), None, 0).available_memory(None, 64) == 3


# --- Experts ----------------------------------------------------------------------------------------------------------


class ThreadExperts(layouts.ExpertGroup, ThreadTP):
    def __init__(self, *args):
        ThreadTP.__init__(self, *args)

    def all_to_all(self, rows, counts):
        everybody = self.everybodys((rows, list(counts)))
        parts = [r.split(c)[self.rank_in_group] for r, c in everybody]
        self._count_sent("all_to_all", rows, counts)
        return torch.cat(parts), [len(part) for part in parts]

    def reduce_scatter(self, x):
        self._count("reduce_scatter", x)
        return sum(self.everybodys(x)).chunk(self.world_size)[self.rank_in_group]


def in_threads(n, fn):
    meeting, table, found = threading.Barrier(n), [None] * n, [None] * n

    def run(rank):
        try:
            found[rank] = fn(ThreadExperts(n, rank, meeting, table))
        except BaseException as error:
            found[rank] = error
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for x in found:
        if isinstance(x, BaseException) and not isinstance(x, threading.BrokenBarrierError):
            raise x
    return found


def test_weights_of_the_chosen_experts_add_up_to_one():
    layer, x = layouts.random_moe(top_k=3), torch.randn(5, 64)
    ids, weights = layouts.route(layer, x)
    scores = (x @ layer.router.T).exp().gather(1, ids)
    assert_close(weights, scores / scores.sum(1, keepdim=True))
    assert (weights.diff(dim=1) <= 0).all()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_experts_sharded_are_experts_whole(n, top_k):
    layer = layouts.random_moe(top_k=top_k, seed=n)
    x = torch.randn(12 * n, 64)
    want = layouts.moe_reference(layer, x)
    for out in in_threads(n, lambda group: layouts.tensor_parallel_moe(layer, x, group)):
        assert_close(out, want)

    def rank(group):
        mine = layouts.expert_parallel_moe(layer, x.chunk(n)[group.rank_in_group], group)
        return mine, group.bytes["all_to_all"]

    found = in_threads(n, rank)
    assert_close(torch.cat([mine for mine, _ in found]), want)
    arrived = layouts.rows_sent(layer, x, n)
    ids, _ = layouts.route(layer, x)
    size = 12 // n
    for r, (_, sent) in enumerate(found):  # hidden states and ids go out; results of others' tokens go back
        others = (torch.cat([c for i, c in enumerate((ids // size).chunk(n)) if i != r]) if n > 1 else ids[:0]) == r
        assert sent == arrived[r] * (64 * 4 + 8) + int(others.sum()) * 64 * 4


@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 13])
def test_sequence_parallel_for_any_number_of_tokens(tokens):
    layer, x, norm = layouts.random_moe(), torch.randn(tokens, 64), torch.rand(64) + 0.5
    want = x + layouts.moe_reference(layer, torch.nn.functional.rms_norm(x, (64,), norm))
    shares = torch.randn(3, tokens, 64)
    shares[2] = x - shares[0] - shares[1]
    for out in in_threads(
        3, lambda group: layouts.sequence_parallel_block(layer, shares[group.rank_in_group], norm, group)
    ):
        assert_close(out, want)


def test_a_rank_alone_needs_no_process_group_and_no_token_no_expert():
    found = layouts.moe_errors(layouts.ExpertGroup([0], 0))
    assert max(found["errors"].values()) < 1e-6 and not any(found["counts"].values())
    layer, nothing = layouts.random_moe(), torch.zeros(0, 64)
    assert layouts.moe_reference(layer, nothing).shape == (0, 64)
    assert layouts.by_expert(layer, layer.experts, nothing).shape == (0, 64)


def test_everybody_wants_the_same_expert():
    """All tokens go to one rank, the others get nothing: empty messages are messages."""
    layer = layouts.random_moe(top_k=1)
    layer.router = torch.zeros(12, 64)
    layer.router[7] = 1
    x = torch.rand(9, 64) + 0.1
    found = in_threads(3, lambda group: layouts.expert_parallel_moe(layer, x.chunk(3)[group.rank_in_group], group))
    assert_close(torch.cat(found), layouts.moe_reference(layer, x))
    assert layouts.rows_sent(layer, x, 3) == [3, 0, 3]


# --- Arithmetic -------------------------------------------------------------------------------------------------------


def test_sizing_says_what_the_text_says():
    sizing, known = layouts.facts()["sizing"], layouts.facts()
    assert known["models"]["llama_31_405b"]["gpus"] > 8 >= known["models"]["llama_31_405b_fp8"]["gpus"]
    assert 8 < known["models"]["deepseek_r1"]["gpus"] <= 16
    wide, deep = (sizing["llama_31_405b"][name] for name in ("tp16", "tp8_pp2"))
    assert wide["alone_ms"] < deep["alone_ms"] and 2 * wide["sequences"] <= deep["sequences"]
    assert wide["tokens_per_second"] < deep["tokens_per_second"]
    r1 = sizing["deepseek_r1"]
    assert r1["tp8_pp2"]["kv_copies"] == 8 and r1["dp16_ep"]["kv_tokens"] > 3 * r1["tp8_pp2"]["kv_tokens"]


def test_cost_by_hand():
    model = layouts.models()["Llama-3.1-405B"]
    one = layouts.cost(model, layouts.Layout(tp=8, pp=2), sequences=2, context=1)
    reading = model.shared_bytes / 16 / 3.35e12
    assert one["weights_gb"] == pytest.approx(model.shared_bytes / 16e9)
    assert one["stage_ms"] > 1e3 * reading and one["latency_ms"] > 2 * one["stage_ms"]
    assert layouts.all_reduce_seconds(1e6, 16) > layouts.all_reduce_seconds(1e6, 8)
    assert layouts.models()["DeepSeek-R1"].expert_bytes_read(1) == pytest.approx(layouts.R1_EXPERTS * 8 / 256)
    talk = 126 / 2 * 2 * layouts.NVLINK.seconds("all_reduce", 16384 * 2, 8)
    hop = layouts.HOP.latency + 16384 * 2 / 8 / layouts.HOP.bandwidth
    stage = (model.shared_bytes + model.kv_bytes) / 16 / 3.35e12 + talk
    assert one["stage_ms"] == pytest.approx(1e3 * stage) and one["latency_ms"] == pytest.approx(1e3 * (2 * stage + hop))
    assert one["tokens_per_second"] == pytest.approx(1 / (stage + hop))
    inside, between = layouts.NVLINK.seconds("all_reduce", 1e6, 8), layouts.NETWORK.seconds("all_reduce", 1e6 / 8, 2)
    assert layouts.all_reduce_seconds(1e6, 16) == inside + between


def test_two_engines_have_twice_the_throughput_and_fp8_twice_the_rate():
    Layout, models = layouts.Layout, layouts.models()
    model, half = models["Llama-3.1-405B"], models["Llama-3.1-405B-FP8"]
    one, two = layouts.cost(model, Layout(tp=8), 64), layouts.cost(model, Layout(tp=8, dp=2), 128)
    assert two["tokens_per_second"] == pytest.approx(2 * one["tokens_per_second"])
    compute = [x["latency_ms"] - x["talk_ms"] for x in (layouts.cost(m, Layout(tp=8), 1, 4096, 4096)
                                                        for m in (model, half))]  # fmt: skip
    assert compute[0] == pytest.approx(2 * compute[1]), "a prefill is bound by arithmetic"


def test_layouts_are_compared_at_equal_work():
    """Two prompts are done when both are; and at equal load a pipeline is as fast as replicas: it differs in room."""
    Layout, models = layouts.Layout, layouts.models()
    x = layouts.cost(models["Llama-3.1-405B"], Layout(tp=8, pp=2), 2, 4096, 4096, layouts.ETHERNET)
    both = layouts.facts()["slow_prefill_ms"]["8"]
    assert both == pytest.approx(x["latency_ms"] + x["stage_ms"]) and both > 1.4 * x["latency_ms"]
    replicas, pipeline = (layouts.cost(models["Llama-3.1-405B-FP8"], layout, 173)
                          for layout in (Layout(tp=8, dp=2), Layout(tp=8, pp=2)))  # fmt: skip
    assert pipeline["latency_ms"] == pytest.approx(replicas["latency_ms"], rel=1e-2)
    assert pipeline["kv_tokens"] > 2 * replicas["kv_tokens"]


@pytest.mark.parametrize(("micros", "faster"), [(60, True), (61, False)])
def test_one_user_gains_by_tp_across_nodes_until_an_all_reduce_takes_60_us(micros, faster):
    model, between = layouts.models()["Llama-3.1-405B"], layouts.Link(50e9, micros * 1e-6)
    wide = layouts.cost(model, layouts.Layout(tp=16), 1, between=between)["latency_ms"]
    deep = layouts.cost(model, layouts.Layout(tp=8, pp=2), 1)["latency_ms"]
    assert (wide < deep) is faster


def test_a_pool_of_experts_is_asked_by_all_engines():
    r1 = layouts.models()["DeepSeek-R1"]
    x = layouts.cost(r1, layouts.Layout(dp=16, ep=True), sequences=16, context=0)
    read = r1.shared_bytes + r1.expert_bytes_read(16) / 16
    assert x["stage_ms"] - x["talk_ms"] == pytest.approx(1e3 * read / 3.35e12)


def test_cost_of_experts_by_hand():
    Layout, r1, hop = layouts.Layout, layouts.models()["DeepSeek-R1"], layouts.HOP
    wide = layouts.cost(r1, Layout(dp=16, ep=True), sequences=32, context=0)  # two tokens each
    talk = 61 * (2 * hop.latency + 2 * 8 * 7168 * (1 + 2) / hop.bandwidth)  # to 8 experts: a byte there, two back
    stage = (r1.shared_bytes + r1.expert_bytes_read(32) / 16) / 3.35e12 + talk
    assert wide["talk_ms"] == pytest.approx(1e3 * talk) and wide["stage_ms"] == pytest.approx(1e3 * stage)
    assert wide["tokens_per_second"] == pytest.approx(32 / stage), "one stage has nobody to send to"
    assert wide["weights_gb"] == pytest.approx((r1.shared_bytes + r1.expert_bytes / 16) / 1e9) and wide["fits"]
    for ep in (False, True):  # a token alone: each stage reads its layers' share of the experts that it asks
        deep = layouts.cost(r1, Layout(tp=8, pp=2, ep=ep), sequences=1, context=0)
        read = (r1.shared_bytes + r1.expert_bytes_read(1)) / 16
        assert 2 * deep["stage_ms"] - deep["talk_ms"] == pytest.approx(2e3 * read / 3.35e12)
    twice = layouts.cost(r1, Layout(tp=8, dp=2))
    assert twice["weights_gb"] == pytest.approx((r1.shared_bytes + r1.expert_bytes) / 8e9)
    assert not twice["fits"] and twice["kv_tokens"] == 0 and layouts.loaded(r1, Layout(tp=8, dp=2))["sequences"] == 0
    assert layouts.cost(layouts.models()["Llama-3.1-70B"], Layout(tp=4))["kv_copies"] == 1


def test_no_more_sequences_are_loaded_than_the_cache_holds():
    model, layout = layouts.models()["Llama-3.1-405B"], layouts.Layout(tp=16)
    found = layouts.loaded(model, layout)
    assert found["sequences"] == found["kv_tokens"] // 4096 < 256
    assert found["tokens_per_second"] == layouts.cost(model, layout, found["sequences"])["tokens_per_second"]


@given(st.integers(1, 6), st.integers(1, 8))
def test_the_bubble_is_the_formulas(stages, micro_batches):
    """One prompt cut into equal chunks, no time on the way: GPipe's share, from the real scheduler and core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lesson, "SEND", 0)
        trace = lesson.pipeline(stages, stages, 60, [60 * micro_batches], [1])  # 240 + 60 ticks: 1 to 6 divide it
    assert len(trace["batches"]) == micro_batches
    assert trace["idle"] / (stages * trace["makespan"]) == pytest.approx(lesson.bubble(stages, micro_batches))


@pytest.mark.parametrize("workload", list(lesson.WORKLOADS))
@pytest.mark.parametrize("in_flight", page.WIDGET_CHOICES["in_flight"])
def test_stages_are_never_in_two_places(workload, in_flight):
    trace = page.simulate({"stages": 3, "in_flight": in_flight, "budget": 64, "workload": workload})
    prompts, outputs = lesson.WORKLOADS[workload]
    assert sum(b["tokens"] for b in trace["batches"]) == sum(prompts) + sum(outputs) - len(prompts)
    for before, after in zip(trace["batches"], trace["batches"][1:]):
        assert all(a[1] <= b[0] for a, b in zip(before["spans"], after["spans"]))
        assert in_flight != "one batch" or before["spans"][-1][1] <= after["spans"][0][0]
    for batch in trace["batches"]:
        assert all(a[1] + lesson.SEND <= b[0] for a, b in zip(batch["spans"], batch["spans"][1:]))
        assert sum(batch["scheduled"].values()) == batch["tokens"] and batch["at"] <= batch["spans"][0][0]
        on_the_way = [b for b in trace["batches"] if b["at"] <= batch["at"] < b["spans"][-1][1]]
        assert len({b["place"] for b in on_the_way}) == len(on_the_way) <= (3 if in_flight == "one per stage" else 1)


def test_the_widget_uses_the_real_core(monkeypatch):
    before = page.simulate(page.WIDGET_DEFAULT)
    monkeypatch.setattr(PipelineEngineCore, "put_in_flight", lambda self: None if self.batch_queue else
                        original(self))  # fmt: skip
    original = _original_put
    assert page.simulate(page.WIDGET_DEFAULT)["makespan"] > before["makespan"]


_original_put = PipelineEngineCore.put_in_flight


# --- The real model, through the server and the official client -------------------------------------------------------

TEXTS = lesson.TEXTS


@pytest.fixture(scope="module")
def texts(real_model):
    """What one process answers, as text."""
    model, tokenizer = real_model
    llm = LLM(model, tokenizer=tokenizer, max_model_len=256, max_num_seqs=8, num_gpu_blocks_override=65)
    found = llm.generate(TEXTS, SamplingParams(temperature=0, max_tokens=6))
    return [output.outputs[0].text for output in found]


FLAGS = ["--max-model-len", "256", "--max-num-seqs", "8", "--kv-cache-gib", "0.05", "--served-model-name", "smol",
         "--max-num-batched-tokens", "64"]  # fmt: skip


@contextlib.contextmanager
def server(*flags, **env):
    lines = []
    with running_server(*FLAGS, *flags, echo=lines.append, VLLM_SERVER_DEV_MODE="1", **env) as (url, process):
        import openai

        yield openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=120), process, lines, url


def ask_all(client, rounds=2):
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda text: client.completions.create(model="smol", prompt=text, temperature=0, max_tokens=6),
                         TEXTS * rounds)  # fmt: skip
        return [x.choices[0].text for x in found]


def test_offline_workers_are_checked_and_not_left_behind(tiny_model):
    with pytest.raises(common.InputError, match="workers load it themselves"):
        make_llm_engine(tiny_model, tensor_parallel_size=2)
    with pytest.raises(common.InputError, match="heads"):
        make_llm_engine(tensor_parallel_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"tensor_parallel_size": 3}, {"pipeline_parallel_size": 2}, {"distributed_executor_backend": "mp"},
], ids=str)  # fmt: skip
def test_the_offline_engine_on_workers(options, texts):
    with pytest.raises(common.InputError, match="max_num_seqs"):
        make_llm_engine(max_num_seqs=0, **options)
    assert not multiprocessing.active_children(), "whoever cannot start leaves nobody behind"

    llm = LLM(max_model_len=256, **options)
    found = llm.generate(TEXTS, SamplingParams(temperature=0, max_tokens=6))
    assert [output.outputs[0].text for output in found] == texts
    del llm
    gc.collect()
    assert not multiprocessing.active_children(), "its workers end with it"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    ["--tensor-parallel-size", "3"], ["--pipeline-parallel-size", "2"], ["-pp", "3"], ["-dp", "2"],
    ["-dp", "2", "--data-parallel-routing", "prefix", "--api-server-count", "2"], ["-asc", "2"],
    ["--distributed-executor-backend", "mp"], ["--distributed-executor-backend", "uni"],
], ids=" ".join)  # fmt: skip
def test_serve(flags, texts):
    with server(*flags) as (client, process, _, _):
        assert ask_all(client) == texts * 2
        children = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    wait_until_gone(children)


@pytest.mark.slow
def test_adapters_and_drafts_on_two_engines(real_model):
    """Both engines know what the server was started with, and what a client has loaded since."""
    folder = common.HERE / "adapters"
    engine = make_llm_engine(*real_model, enable_lora=True, max_loras=2, max_model_len=256, max_num_seqs=8)
    for name in ("pirate", "json"):
        engine.lora.add_adapter(name, folder / name)
    params, truths = SamplingParams(temperature=0, max_tokens=12), {}
    for name in ("pirate", "json", None):
        for i, text in enumerate(TEXTS):
            engine.add_request(f"{name} {i}", text, params, lora_name=name)
    while engine.has_unfinished_requests():
        truths |= {output.request_id: output.outputs[0].text for output in engine.step()}
    flags = ["-dp", "2", "--enable-lora", "--max-loras", "2", "--lora-modules", f"pirate={folder / 'pirate'}",
             "--speculative-config", '{"method": "suffix", "prompt_lookup_min": 1}']  # fmt: skip
    with server(*flags, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1") as (client, process, _, url):
        about = {"lora_name": "json", "lora_path": str(folder / "json")}
        loaded = httpx.post(f"{url}/v1/load_lora_adapter", json=about)
        assert loaded.status_code == 200
        asked = [(name, i) for name in ("pirate", "json", None) for i in range(len(TEXTS))] * 2
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda q: client.completions.create(
                model=q[0] or "smol", prompt=TEXTS[q[1]], temperature=0, max_tokens=12), asked))  # fmt: skip
        assert [x.choices[0].text for x in found] == [truths[f"{name} {i}"] for name, i in asked]
        assert len({truths[f"{name} 0"] for name in ("pirate", "json", None)}) > 1
        unloaded = httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "json"})
        assert unloaded.status_code == 200, "both had it"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def wait_until_gone(pids):
    stop = time.monotonic() + 60
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < stop, f"left running: {left}"
        time.sleep(0.05)


def descendants(pid):
    """All processes below one, where /proc says so."""
    found = []
    with contextlib.suppress(OSError):
        for line in subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout.splitlines():
            child, parent = map(int, line.split())
            if parent == pid:
                found += [child, *descendants(child)]
    return found


def alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_headless_engines_on_another_address(texts):
    """The head at 127.0.0.1 has no engine of its own; two dial in from a process that stands for another host."""
    port = str(free_port())
    shared = ["--data-parallel-size", "2", "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", port]
    remote = subprocess.Popen([sys.executable, common.HERE / "06_serving.py", "serve", "--headless", *FLAGS, *shared,
                               "--data-parallel-size-local", "1", "--data-parallel-start-rank", "1"],
                              stdout=subprocess.PIPE, text=True)  # fmt: skip
    try:
        with server(*shared, "--data-parallel-size-local", "1") as (client, process, lines, _):
            assert any("engine 1 is here" in line for line in lines)
            assert ask_all(client) == texts * 2
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        assert remote.wait(60) == 0, "the engines end when the API server has hung up"
    finally:
        remote.kill()
        remote.wait()
        remote.stdout.close()


@pytest.mark.slow
def test_a_killed_worker_ends_the_server_with_code_1(texts):
    import openai

    with server("-pp", "2") as (client, process, _, _):
        assert ask_all(client, 1) == texts
        workers = [pid for pid in descendants(process.pid) if alive(pid)]
        os.kill(max(workers), signal.SIGKILL)  # the youngest: the last stage
        with pytest.raises((openai.APIStatusError, openai.APIConnectionError)):
            for _ in range(100):
                ask_all(client, 1)
        assert process.wait(60) == 1
    wait_until_gone(workers)


@pytest.mark.slow
def test_ray(texts):
    """Workers as actors of a local Ray, in a placement group: the same tokens; a killed actor is a clear error."""
    if __import__("importlib.util").util.find_spec("ray") is None:
        pytest.skip("ray is not installed: it is an extra")
    code = f"""
import sys; sys.path.insert(0, {str(common.HERE)!r})
import common, json
from engine import registry
from engine.model import folders
from engine.model.tokenizer import Tokenizer
from engine.parallel.config import ParallelConfig
from engine.parallel.executors import ExecutorFailed
from engine.parallel.worker import WorkerSpec
from engine.parallel.workers import make_executor
lesson = registry.lesson("06c_scaling_out")
parallel = ParallelConfig(1, 2, "ray")
executor = make_executor(parallel)
executor.collective_rpc("load_model", WorkerSpec(None, parallel))
tokenizer = Tokenizer(folders.model_folder(None))
engine = lesson.build_engine(None, parallel, tokenizer, executor)
tokens = lesson.answer(engine, lesson.TEXTS)
executor.ray.kill(executor.actors[1])
try:
    executor.collective_rpc("held")
except ExecutorFailed as error:
    print(json.dumps([[tokenizer.decode(t) for t in tokens], str(error)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    got, error = json.loads(done.stdout.splitlines()[-1])
    assert got == texts and "died" in error


@pytest.mark.slow
def test_serve_with_ray(texts):
    if __import__("importlib.util").util.find_spec("ray") is None:
        pytest.skip("ray is not installed: it is an extra")
    with server("-tp", "3", "--distributed-executor-backend", "ray") as (client, _, _, _):
        assert ask_all(client) == texts * 2


@pytest.mark.parametrize("wish", [None, "3,1"])
def test_every_engine_gets_gpus_of_its_own(monkeypatch, wish):
    """The first engines start before the last: what one was told must not be read as the user's wish by the next."""
    seen = []

    def process(**about):
        return SimpleNamespace(start=lambda: seen.append(os.environ.get("CUDA_VISIBLE_DEVICES")))

    monkeypatch.setattr(engine_group, "start_context", lambda: SimpleNamespace(Process=process))
    monkeypatch.setattr(common, "HAS_GPU", True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wish) if wish else monkeypatch.delenv("CUDA_VISIBLE_DEVICES", False)
    for engine in range(3):
        start_engine([], 0, engine, make_tiny, SimpleNamespace(world_size=2), 1)
    assert seen == ([wish] * 3 if wish else ["0,1", "2,3", None]), "there is nothing left for a third"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == wish


def test_each_client_gets_its_part_of_everything_in_a_letter():
    with mailbox() as (box, _):
        box.owner |= {"mine": 0, "yours": 1}
        parts = box.split(EngineCoreOutputs(
            [EngineCoreOutput(name, [5]) for name in ("mine", "yours", "gone")],
            admitted={name: Admission(0.5, 16, 0) for name in ("mine", "gone")},
        ))  # fmt: skip
        assert {i: [o.request_id for o in part.outputs] for i, part in parts.items()} == {0: ["mine"], 1: ["yours"]}
        assert parts[0].admitted == {"mine": Admission(0.5, 16, 0)} and parts[1].admitted == {}


def test_letters_arrive_in_the_order_they_were_sent_in_whatever_they_say():
    """How things were must not be read after what came of it."""
    ours, theirs = socket.socketpair()
    box, big = Outbox(ours), Dead("x" * (1 << 21))  # more than a socket holds
    with nobody_waits(theirs), ThreadPoolExecutor(1) as pool:
        then = Dead("then")
        for letter, is_state in ((big, False), ([1], True), ([2], True), (then, False), ([3], True)):
            box.put(letter, is_state)
        heard = pool.submit(read_letters, theirs)
        while box.pending:
            box.flush()
        ours.close()
        assert heard.result(20) == [big, [2], then, [3]]


def test_nothing_waits_for_a_reader_that_has_gone():
    """Or `select` would call its socket ready for ever, and an idle engine would spin."""
    with mailbox() as (box, (*_, coordinator)):
        coordinator.close()
        for i in range(2):
            box.send(EngineCoreOutputs(scheduler_stats=SchedulerStats(i, 0, 0.0)))
        assert box.coordinator.gone and not box.pending()
