"""Adapters on workers: every layout of ranks answers as one process does, whoever is resident."""

from __future__ import annotations

import common

import dataclasses
import signal
from types import SimpleNamespace

import pytest
import torch

from engine.config import VllmConfig
from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.lora import lora_model
from engine.lora.config import LoRAConfig
from engine.lora.lora_model import LoRAModel
from engine.parallel import adapters as lesson
from engine.parallel.config import ParallelConfig
from engine.parallel.worker import Worker
from engine.parallel.workers import Workers
from engine.request import SamplingParams
from engine.serving.pipeline_proc import ParallelEngineCoreProc
from support import adapters, servers
from support.adapters import as_merged, ask
from support.process_tree import descendants, wait_until_gone
from support.rank_threads import WorkerThreads
from support.servers import ask_all, server
from support.small_cores import OUTPUTS
from support.small_requests import request_of
from support.tiers import and_slowly
from support.tokenizing import Words, of_characters
from support.worker_engines import LIMITS, engine_on

whole, loras = adapters.whole, adapters.loras
answers, folder, shipped = servers.answers, servers.folder, servers.shipped


@pytest.fixture
def on_threads(monkeypatch):
    """An engine as `serve --enable-lora` makes it, on workers that are threads."""
    of_characters(monkeypatch)
    started = []

    def build(tp, pp, max_loras):
        parallel = ParallelConfig(tp, pp)
        executor = WorkerThreads(parallel)
        started.append(executor)
        args = EngineArgs(enable_lora=True, max_loras=max_loras, max_lora_rank=8, max_cpu_loras=4)
        return engine_on(executor, parallel, args)

    yield build
    for executor in started:
        executor.shutdown()


@pytest.mark.parametrize(("tp", "pp", "max_loras"), and_slowly(
    [(2, 2, 2)], [(1, 5, 1), (8, 1, 3)], [(1, 1, 1), (2, 1, 1), (4, 1, 2), (1, 2, 2)]))  # fmt: skip
def test_every_layout_answers_as_merged_weights_do(on_threads, whole, loras, tp, pp, max_loras):
    """Eight ranks share four KV heads; with fewer places than adapters, places change hands between two steps."""
    engine = on_threads(tp, pp, max_loras)
    for name, lora in loras.items():
        engine.lora.add_adapter(name, lora)
    truths = as_merged()
    assert ask(engine, (None, *loras)) == truths
    assert len({tuple(truths[str(name), 2]) for name in (None, *loras)}) == 4, "they do differ"
    assert engine.lora.counts["evict"] >= 3 - max_loras
    kept = engine.core.runner.executor.ask(lambda worker: worker.adapters.slots)
    assert kept == [engine.lora.slots] * (tp * pp), "no worker has a name whose place somebody else took"


def test_parts_make_the_whole(whole, loras):
    """Every number of A and B is with the ranks that need it, no other, and nothing is counted twice."""
    config, lora = whole.config, loras["a4"]
    for n in (1, 2, 4, 8):
        parts = [lesson.shard_adapter(lora, config, (rank, n)) for rank in range(n)]
        for name, pairs in lora.weights.items():
            kind = name.split(".")[2]
            for i, (a, b) in enumerate(pairs):
                found = [part.weights[name][i] for part in parts]
                if kind in ("o_proj", "down_proj"):
                    assert torch.equal(torch.cat([x for x, _ in found], 1), a) and all(y is b for _, y in found)
                    continue
                assert all(x is a for x, _ in found)
                copies = n // 4 if kind == "qkv_proj" and i and n > 4 else 1  # ranks with one KV head between them
                assert torch.equal(torch.cat([y for _, y in found[::copies]]), b)
    stages = [lesson.shard_adapter(lora, config, pp=(stage, 3)).weights for stage in range(3)]
    assert [len(stage) for stage in stages] == [8, 8, 4]
    joined = [pairs for stage in stages for pairs in stage.values()]
    assert all(torch.equal(x[0][0], y[0][0]) for x, y in zip(joined, lora.weights.values(), strict=True))
    assert next(iter(stages[2])) == "layers.0.qkv_proj", "counted from the stage's first"


def test_only_an_adapters_own_numbers_travel(loras):
    """A view into a large file would bring the file along."""
    sent = []
    memory = lesson.RemoteSlotMemory(type("Executor", (), {"submit": lambda self, *call: sent.append(call)})(), None)
    large = torch.zeros(1000, 8)
    memory.write(1, LoRAModel("x", 8, {"layers.0.qkv_proj": (None, (large[:2], large[2:4]), None)}))
    (method, slot, lora), = sent  # fmt: skip
    assert method == "write_adapter" and slot == 1
    (none, pair, _), = lora.weights.values()  # fmt: skip
    assert none is None and [x.untyped_storage().nbytes() for x in pair] == [64, 64]


def test_a_cleared_slot_has_no_name_and_no_weights(whole, loras):
    """So a worker whose write failed, which nobody waits for, fails at the next step instead of answering wrongly."""
    mine = lesson.WorkerAdapters(LoRAConfig(max_loras=2, max_lora_rank=8))
    mine.attach(whole, None)
    alone, worker = SimpleNamespace(rank_in_group=0, world_size=1), Worker()
    worker.tp, worker.pp, worker.adapters = alone, alone, mine
    worker.model = SimpleNamespace(whole_config=whole.config)
    worker.write_adapter(0, loras["a8"])
    worker.write_adapter(1, loras["a3"])
    assert mine.slots == {"random-8": 0, "random-3": 1} and mine.memory.tables["down_proj"].ranks[0].tolist() == [8]
    worker.clear_adapter(0)
    assert mine.slots == {"random-3": 1} and not mine.memory.tables["down_proj"].ranks[0].any()
    assert list(mine.memory.matrices) == [1]
    with pytest.raises(RuntimeError, match="size"):
        worker.write_adapter(0, lora_model.random_adapter(whole.config, 9, seed=9))
    assert mine.slots == {"random-3": 1}


def test_a_runner_of_pages_is_refused(whole):
    about = VllmConfig(lora_config=LoRAConfig(memory="unified"), workers=Workers(None, ParallelConfig(), whole))
    with pytest.raises(common.InputError, match="workers have slots"):
        LLMEngine(whole, Words(), config=about, **LIMITS)


@pytest.mark.parametrize("pp", [1, 2])
def test_who_cannot_run_hears_of_it_though_nothing_is_in_flight(on_threads, loras, pp):
    engine = on_threads(1, pp, 1)

    def gone():
        raise common.InputError("the file is gone")

    engine.lora.add_adapter("a4", loras["a4"])
    engine.lora.add_lazily("gone", gone)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for _ in range(2):
        engine.add_request("x", {"prompt_token_ids": [1, 2]}, params, lora_name="gone")
        outputs = [output for _ in range(50) for output in engine.step()]
        assert [output.outputs[0].finish_reason for output in outputs] == ["error"]
        assert not engine.has_unfinished_requests()
        assert len(ask(engine, ("a4",))["a4", 0]) == OUTPUTS[0], "and others go on"


def test_the_serving_loop_tells_them_too(on_threads, loras):
    engine = on_threads(1, 2, 1)

    def gone():
        raise common.InputError("the file is gone")

    engine.lora.add_lazily("gone", gone)
    letters = []
    proc = ParallelEngineCoreProc(engine, letters.append)
    request = request_of([1, 2, 3], "x", lora_name="gone")
    engine.core.add_request(request)
    for _ in range(50):
        proc.step()
    assert [output.finish_reason for letter in letters for output in letter.outputs] == ["error"]
    assert len(letters) == 1, "a step in which nobody ran is no news"


def test_the_flags_go_together():
    args = EngineArgs(enable_lora=True, tensor_parallel_size=3, pipeline_parallel_size=2)
    assert args.lora_config.max_loras == 1
    assert dataclasses.replace(args, quantization="int8").world_size == 6


@pytest.mark.parametrize("layout", and_slowly([], [(["-pp", "2", "-dp", "2"],)], [(["-tp", "3"],)]), ids=" ".join)
def test_served_adapters_on_workers(folder, shipped, answers, layout):
    """The shipped adapters, one place in turn, one of them loaded by a client: texts of one process."""
    import httpx

    asked = sorted(answers, key=lambda question: question[1])  # all of them about each text
    flags = [*layout, "--enable-lora", "--lora-modules", f"pirate={shipped['pirate']}"]
    with server(folder, *flags, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1") as (client, process, _, url):
        about = {"lora_name": "json", "lora_path": str(shipped["json"])}
        assert httpx.post(f"{url}/v1/load_lora_adapter", json=about).status_code == 200
        assert ask_all(client, asked) == [answers[each] for each in asked]
        children = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    wait_until_gone(children)
