"""One step ahead, served: `--async-scheduling` changes when a step is planned, and no token."""

from __future__ import annotations

import common

import functools
import signal
import threading
from types import SimpleNamespace

import pytest

from engine.config import SchedulerConfig
from engine.engine_args import EngineArgs
from engine.llm import make_llm_engine
from engine.model import folders, llama, loader
from engine.output import ModelRunnerOutput
from engine.parallel.config import ParallelConfig
from engine.parallel.stages import make_groups
from engine.parallel.worker import Worker, WorkerSpec
from engine.parallel.workers import make_executor
from engine.request import Request, SamplingParams
from engine.serving.letters import EngineCoreRequestType
from engine.serving.pipeline_proc import ParallelEngineCoreProc
from engine.worker import assemble
from engine.worker.cuda_graphs import CapturedModel, Tape
from lab import naive, replay
from support import adapters, drafting, first_layers, servers, small_cores
from support.close import Close
from support.drafting import (
    GREEDY,
    JOBS,
    METHODS,
    ROOMY,
    check_nothing_is_kept,
    engine_on,
    plain,
    requests_of,
    serve,
    steps,
)
from support.process_tree import descendants, wait_until_gone
from support.servers import ASKED, ask_all, server
from support.serving_loops import IDLE, proc_on
from support.small_cores import PROMPTS, SIZES, plain_core
from support.tiers import and_slowly

whole, loras = adapters.whole, adapters.loras
answers, folder, shipped = servers.answers, servers.folder, servers.shipped
guess, on_threads, small_models = drafting.guess, drafting.on_threads, drafting.small_models
AHEAD = ParallelConfig(async_scheduling=True)


@pytest.fixture
def here():
    """An engine as `serve --async-scheduling` makes it: its worker is a thread of this process."""
    started = []

    def build(method=None, **about):
        executor = make_executor(AHEAD)
        started.append(executor)
        return engine_on(executor, AHEAD, method, **about)

    yield build
    for executor in started:
        executor.shutdown()


def check_nothing_is_left(engine, monkeypatch):
    scheduler = engine.core.scheduler
    assert not scheduler.requests
    check_nothing_is_kept(engine)


# --- No token changes -------------------------------------------------------------------------------------------------

LIMITS = {"roomy": {}, "chunks": {"max_num_batched_tokens": 7}, "cramped": {"num_gpu_blocks_override": 18},
          "uncached": {"num_gpu_blocks_override": 18, "enable_prefix_caching": False},
          "priority": {"num_gpu_blocks_override": 18, "scheduling_policy": "priority"}}  # fmt: skip


def limits_of(*slow):
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in LIMITS]


@pytest.mark.parametrize("limits", limits_of("roomy", "cramped"))
def test_a_step_ahead_writes_what_is_written_in_step(here, monkeypatch, limits):
    """Greedy, sampled, with penalties and log probabilities; cut, preempted, ended by a stop token nobody foresaw."""
    engine, victims = here(**LIMITS[limits]), []
    preempt = engine.core.scheduler._preempt_request

    def watch(victim, output):
        victims.append(victim.num_output_placeholders)
        preempt(victim, output)

    engine.core.scheduler._preempt_request = watch
    tokens, logprobs, _ = serve(engine, priorities=list(range(len(JOBS)))[::-1])
    assert (tokens, logprobs) == plain()
    assert bool(victims) == (limits not in ("roomy", "chunks"))
    if limits == "uncached":
        assert max(victims) > 0, "somebody whose token was on its way"
    assert serve(engine, priorities=list(range(len(JOBS)))[::-1])[0] == plain()[0], "names that are used again"
    check_nothing_is_left(engine, monkeypatch)


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_on_shards_too(on_threads, monkeypatch, tp):
    engine = on_threads(tp, 1, None, ahead=True, num_gpu_blocks_override=18)
    assert serve(engine)[:2] == plain()
    check_nothing_is_left(engine, monkeypatch)


@pytest.mark.parametrize("limits", limits_of("roomy", "uncached", "priority"))
def test_with_drafts_that_nobody_has_made_yet(here, guess, monkeypatch, limits):
    guess(0.7)
    engine = here("ngram", **LIMITS[limits])
    tokens, logprobs, _ = serve(engine, priorities=list(range(len(JOBS)))[::-1])
    assert (tokens, logprobs) == plain()
    stats = engine.core.scheduler.spec_decoding_stats
    assert 20 < stats.num_accepted_tokens < stats.num_draft_tokens - 10
    check_nothing_is_left(engine, monkeypatch)


FAST = [("suffix", 1), ("draft_model", 2), ("eagle", 1)]
SLOW = [("ngram", 1), ("lookahead", 2), ("medusa", 2), ("early_exit", 1)]
LONG = [(method, tp) for method in METHODS for tp in (1, 2) if (method, tp) not in FAST + SLOW]


@pytest.mark.parametrize(("method", "tp"), and_slowly(FAST, SLOW, LONG))
def test_every_drafter(on_threads, monkeypatch, method, tp):
    """Greedy answers are those without drafts; what is drawn follows the drafts, and these may come later here."""
    engine = on_threads(tp, 1, method, ahead=True, **ROOMY)
    tokens = serve(engine)[0]
    assert [tokens[i] for i in GREEDY] == [plain()[0][i] for i in GREEDY]
    assert engine.core.scheduler.spec_decoding_stats.num_draft_tokens > 20
    check_nothing_is_left(engine, monkeypatch)


@pytest.mark.parametrize("method", and_slowly(["lookahead"], [(None,)]))
def test_with_adapters(here, whole, loras, method):
    """Two places for three adapters, or their base."""
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 4}
    engine = here(method, lora=lora)
    for name, each in loras.items():
        engine.lora.add_adapter(name, each)
    assert adapters.ask(engine, (None, *loras)) == adapters.as_merged()


# --- The plan comes first ---------------------------------------------------------------------------------------------


def test_a_step_is_planned_while_the_last_one_runs(here):
    """The worker does not end a step before it has been sent the next, as long as somebody goes on after this one."""
    engine = here()
    core, sent, ends = engine.core, threading.Semaphore(0), []
    worker, submit = core.runner.executor.worker, core.runner.submit
    execute_model = worker.execute_model

    def slow(message):
        result = execute_model(message)
        ends.append(sent.acquire(timeout=5))  # the plan of the next step
        return result

    def noting(output):
        future = submit(output)
        if future is not None and len(core.batch_queue):
            sent.release()
        return future

    worker.execute_model, core.runner.submit = slow, noting
    core.add_request(Request("8", list(JOBS[8][0]), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)))
    threading.Timer(0.5, lambda: [sent.release() for _ in range(3)]).start()  # for the last one, behind which is none
    got = [token for outputs in steps(core) for output in outputs for token in output.new_token_ids]
    assert got == plain()[0][8][:6] and ends == [True] * 6


LONGER = [*PROMPTS, [2] * 9], [20, 24, 7, 30, 28, 30]


@functools.cache
def written_at_leisure():
    return small_cores.serve(plain_core(), *LONGER)


@pytest.mark.parametrize(("ahead", "pool"), [pytest.param(True, 60, marks=pytest.mark.slow), (True, 18), (False, 18)])
def test_it_decides_as_the_replay_does_and_the_replay_as_vllm_does(here, ahead, pool):
    """Which tokens of whom in which step, and who is preempted: the replay is compared with recordings."""
    prompts, outputs = LONGER
    written = written_at_leisure()
    config = {"num_blocks": pool, "block_size": 4, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16,
              "enable_prefix_caching": False, "async_scheduling": ahead}  # fmt: skip
    requests = [
        {
            "id": str(i),
            "prompt_token_ids": prompt,
            "forced_output_token_ids": tokens,
            "max_tokens": n,
            "arrival_step": 0,
        }
        for i, (prompt, tokens, n) in enumerate(zip(prompts, written, outputs))
    ]
    trace = replay.replay({"name": "served", "config": config, "requests": requests})
    want = [(step["scheduled"], step.get("preempted", [])) for step in trace["steps"] if step["scheduled"]]

    engine, found = here(num_gpu_blocks_override=pool, max_num_batched_tokens=16, enable_prefix_caching=False), []
    submit = engine.core.runner.submit

    def noting(output):
        if output.num_scheduled_tokens:
            found.append((dict(output.num_scheduled_tokens), [r.request_id for r in output.preempted_reqs]))
        return submit(output)

    engine.core.runner.submit = noting
    assert small_cores.serve(engine.core, prompts, outputs) == written
    assert (found == want) == ahead and (pool == 60 or any(victims for _, victims in found))


# --- In the serving loop ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "limits"), [(None, "roomy"), ("suffix", "roomy"), (None, "chunks")])
def test_letters_of_the_serving_loop(here, method, limits):
    """Each brings one step's tokens and log probabilities, and says who was admitted; then an abort in full flight."""
    core, got, scores, admitted = here(method, **LIMITS[limits]).core, {}, {}, []
    proc, letters = proc_on(core, requests_of(JOBS))
    core.step = proc.step
    assert not any(steps(core)), "what it brings is in the letters"
    for letter in letters:
        admitted += letter.admitted
        for output in letter.outputs:
            i = int(output.request_id)
            got.setdefault(i, []).extend(output.new_token_ids)
            if JOBS[i][1].logprobs is not None:
                found = output.new_logprobs
                scores.setdefault(i, []).append({t: Close(x.logprob) for t, x in found.items()})
    assert [got[i] for i in range(len(JOBS))] == plain()[0] and scores == plain()[1]
    assert sorted(admitted) == sorted(got and map(str, got))
    proc.handle([(EngineCoreRequestType.ADD, Request("late", [1, 2, 3], SamplingParams(temperature=0, max_tokens=40)))])
    for _ in range(3):
        proc.step()
    proc.handle([(EngineCoreRequestType.ABORT, ["late"])])
    assert proc.check_idle() == IDLE
    sent = len(letters)
    proc.handle([(EngineCoreRequestType.ADD, Request("late", [1, 2, 3], SamplingParams(temperature=0, max_tokens=2)))])
    assert not any(steps(core)), "a namesake of whom a token was on its way"
    alone = naive.generate(llama.random_model(**SIZES), [1, 2, 3], 2)
    assert [t for letter in letters[sent:] for output in letter.outputs for t in output.new_token_ids] == alone


@pytest.mark.parametrize("layout", and_slowly(["ahead"], [("two stages",)]))
def test_letters_tell_of_every_preemption(here, on_threads, layout):
    """Also of those in a step that has room for nobody after them, while another one is on its way."""
    limits = {"block_size": 2, "max_model_len": 32, "num_gpu_blocks_override": 17, "max_num_batched_tokens": 8,
              "max_num_seqs": 4, "scheduling_policy": "priority", "enable_prefix_caching": False}  # fmt: skip
    core = (here(**limits) if layout == "ahead" else on_threads(1, 2, None, **limits)).core
    letters, victims, empty, schedule = [], [], [], core.scheduler.schedule

    def watched():
        output = schedule()
        victims.extend(output.preempted_reqs)
        empty.extend(output.preempted_reqs if not output.num_scheduled_tokens else [])
        return output

    core.scheduler.schedule = watched
    proc = ParallelEngineCoreProc(SimpleNamespace(core=core, lora=None), letters.append)
    for i in range(32):
        params = SamplingParams(temperature=0, max_tokens=6 + i % 17, ignore_eos=True)
        request = Request(str(i), [1 + i] * (1 + i % 13), params, arrival_time=i, priority=i * 7 % 5)
        proc.handle([(EngineCoreRequestType.ADD, request)])
        proc.step()
    core.step = proc.step
    assert not any(steps(core))
    told = [name for letter in letters for name in letter.preempted]
    assert told == [request.request_id for request in victims] and len(victims) > len(empty) > 0


@pytest.mark.parametrize("layout", ["ahead", "two stages"])
def test_a_namesake_does_not_get_the_scores_of_another_prompt(here, on_threads, layout):
    engine = here() if layout == "ahead" else on_threads(1, 2, None)
    engine.add_request("x", [5, 6, 7, 8], SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=1))
    engine.core.put_in_flight()
    engine.abort_request(["x"])
    engine.add_request("x", [5, 6, 7], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].finished and outputs[-1].prompt_logprobs is None


def test_a_step_without_members_brings_no_scores_of_the_one_before(here):
    core = here().core
    core.add_request(Request("x", [5, 6], SamplingParams(max_tokens=1, logprobs=0, prompt_logprobs=0)))
    (output,) = core.step()
    assert output.new_logprobs and output.new_prompt_logprobs
    assert core.put_in_flight() is None and core.next_result()[1] == ModelRunnerOutput()


@pytest.mark.parametrize("layout", and_slowly(["ahead"], [("two stages",)]))
def test_blocks_with_open_keys_on_workers(here, on_threads, layout):
    """A worker has no pool to ask whose a block is that was given back half full: its own tables say so."""
    cache = {"kv_cache_dtype": "kivi_2bit", "num_gpu_blocks_override": 90, "enable_prefix_caching": False}
    engine = here(**cache) if layout == "ahead" else on_threads(1, 2, None, **cache)
    for i in range(30):
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        engine.add_request(str(i), [3 + i, 5, 6, 7, 8, 9], params)
    answered = 0
    while engine.has_unfinished_requests():
        answered += sum(output.finished for output in engine.step())
    assert answered == 30


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"pipeline_parallel_size": 2}, "async_scheduling: not together with pipeline_parallel_size"),
        ({"engine_place": "thread"}, "engine_place thread: must be process"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(about, words):
    with pytest.raises(common.InputError, match=words):
        EngineArgs(async_scheduling=True, **about)


def test_a_worker_of_one_captures_graphs_and_several_do_not(monkeypatch):
    """A collective over gloo could not be captured; the adapters of one step would stay for ever."""
    monkeypatch.setattr(assemble, "CapturedModel", functools.partial(CapturedModel, graph_class=Tape))
    captured, limits = [], SchedulerConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)
    for about in ({}, {"tensor_parallel_size": 2}, {"enable_lora": True}, {"enforce_eager": True}):
        args = EngineArgs(async_scheduling=True, **about)
        worker, parallel = Worker(), ParallelConfig(args.tensor_parallel_size, async_scheduling=True)
        worker.spec = WorkerSpec(None, parallel, config=args.vllm_config())
        worker.model, (worker.tp, worker.pp) = llama.random_model(), make_groups(None, ParallelConfig())
        worker.initialize_from_config(limits, 9, 16, 0)
        captured.append(worker.runner.graphs is not None)
    assert captured == [True, False, False, False]


@pytest.mark.parametrize("layers", first_layers.CUT_OR_WHOLE)
def test_guided_answers_on_the_real_model(real_model, layers, tmp_path, monkeypatch):
    """The mask of a step follows from tokens that the scheduler has not heard of when it plans it."""
    folder = first_layers.folder_of(layers, tmp_path)
    monkeypatch.setattr(folders, "model_folder", lambda name=None: folder)  # the worker's, too
    model, tokenizer = loader.load() if layers else real_model
    jobs = [("A number:", {"structured_outputs": {"regex": "[0-9]{3}"}}),
            ("Yes or no?", {"structured_outputs": {"choice": ["yes", "no"]}}),
            ("The capital of France is", {"ignore_eos": True}), ("1 2 3", {"stop": ["6"]})]  # fmt: skip
    options = dict(max_model_len=64, max_num_seqs=4, num_gpu_blocks_override=40)
    texts = []
    executor = make_executor(AHEAD)
    ahead = engine_on(executor, AHEAD, None, sizes=model.config, tokenizer=tokenizer, **options)
    for engine in (make_llm_engine(model, tokenizer, **options), ahead):
        for i, (text, fields) in enumerate(jobs):
            engine.add_request(str(i), text, SamplingParams(temperature=0, max_tokens=8, **fields))
        texts.append({})
        while engine.has_unfinished_requests():
            texts[-1] |= {output.request_id: output.outputs[0].text for output in engine.step()}
    executor.shutdown()
    assert texts[0] == texts[1] and texts[0]["0"].isdigit() and texts[0]["1"] in ("yes", "no")


@pytest.mark.parametrize("flags", and_slowly(
    [], [(["--distributed-executor-backend", "mp"],),
         (["--speculative-config", '{"method": "eagle", "num_speculative_tokens": 3}'],)],
    [([],), (["-tp", "3", "-dp", "2"],)],
), ids=str)  # fmt: skip
def test_served(folder, answers, flags):
    """Eight clients read the texts of one process that plans in step, and a signal ends all processes."""
    with server(folder, "--async-scheduling", *flags) as (client, process, _, _):
        assert ask_all(client, ASKED * 2) == [answers[asked] for asked in ASKED] * 2
        children = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    wait_until_gone(children)
