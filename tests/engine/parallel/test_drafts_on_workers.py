"""Drafts on workers: every layout of ranks writes what one process without drafts writes, whoever guesses, and guesses
what one process guesses."""

from __future__ import annotations

import common

import itertools
import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from engine.config import VllmConfig
from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model.config import LlamaConfig
from engine.output import ModelRunnerOutput, SchedulerOutput
from engine.parallel import workers
from engine.parallel.config import ParallelConfig
from engine.parallel.executors import UniProcExecutor
from engine.parallel.worker import WorkerSpec
from engine.parallel.workers import start_workers
from engine.request import Request, SamplingParams
from engine.serving.wire import frame, loads
from engine.spec_decode import drafters
from lab import cli
from support import adapters, drafting, servers
from support.close import Close
from support.drafting import (
    GREEDY,
    JOBS,
    METHODS,
    ROOMY,
    check_nothing_is_kept,
    config_of,
    engine_here,
    engine_on,
    plain,
    requests_of,
    serve,
    steps,
)
from support.jobs import ruled
from support.mailboxes import mailbox
from support.process_tree import descendants, wait_until_gone
from support.servers import ASKED, ask_all, server
from support.serving_loops import IDLE, proc_on
from support.small_cores import SIZES, scheduler_of, small_model
from support.tiers import and_slowly

whole, loras = adapters.whole, adapters.loras
answers, folder, shipped = servers.answers, servers.folder, servers.shipped
guess, on_threads, small_models = drafting.guess, drafting.on_threads, drafting.small_models
page = cli.numbers("07_spec_decode")


@pytest.mark.parametrize(
    ("tp", "pp"), and_slowly([(1, 5), (2, 2)], [(8, 1), (2, 3)], [(1, 1), (2, 1), (4, 1), (1, 2), (1, 3), (4, 2)])
)
def test_every_layout_writes_what_plain_decoding_writes(on_threads, guess, tp, pp):
    """Greedy, sampled with seeds, penalties, log probabilities in one batch. Some drafts stand, some fall."""
    guess(0.7)
    engine, in_flight = on_threads(tp, pp, "ngram"), []
    put = engine.core.put_in_flight
    engine.core.put_in_flight = lambda: (put(), in_flight.append(len(engine.core.batch_queue)))[0]
    tokens, logprobs, _ = serve(engine)
    assert tokens == plain()[0] and logprobs == plain()[1]
    stats = engine.core.scheduler.spec_decoding_stats
    assert 20 < stats.num_accepted_tokens < stats.num_draft_tokens - 10
    assert max(in_flight) == min(pp, 4), "a step for every stage; there are four seats"
    check_nothing_is_kept(engine)


@pytest.mark.parametrize("setting", ["chunks", "cramped", "priority"])
@pytest.mark.parametrize(("tp", "pp"), and_slowly([(1, 3)], [(2, 2)], [(2, 1)]))
def test_cut_preempted_and_evicted_it_is_the_same(on_threads, guess, tp, pp, setting):
    guess(0.8)
    limits = {"chunks": {"max_num_batched_tokens": 7}, "cramped": {"num_gpu_blocks_override": 18},
              "priority": {"num_gpu_blocks_override": 18, "scheduling_policy": "priority"}}[setting]  # fmt: skip
    engine, victims = on_threads(tp, pp, "ngram", **limits), []
    preempt = engine.core.scheduler._preempt_request

    def watch(victim, output):
        victims.append(victim.num_computed_tokens - victim.num_tokens)
        preempt(victim, output)

    engine.core.scheduler._preempt_request = watch
    tokens, logprobs, _ = serve(engine, priorities=list(range(len(JOBS)))[::-1])
    assert tokens == plain()[0] and logprobs == plain()[1]
    assert bool(victims) == (setting != "chunks")
    if setting == "cramped" and pp > 2:
        assert max(victims) > 0, "somebody whose drafts were on their way"
    check_nothing_is_kept(engine)


FAST = [("suffix", 2, 1), ("lookahead", 2, 1), ("draft_model", 2, 1), ("eagle", 1, 2),
        ("medusa", 2, 2), ("early_exit", 2, 1)]  # fmt: skip
SLOW = [("ngram", 1, 2), ("lookahead", 1, 2), ("draft_model", 8, 1), ("eagle", 2, 2)]
LONG = [(method, tp, pp) for method in METHODS for tp, pp in [(2, 1), (8, 1), (1, 2), (2, 2)]
        if (method, tp, pp) not in FAST + SLOW and not (method == "early_exit" and pp > 1)]  # fmt: skip


@pytest.mark.parametrize(("method", "tp", "pp"), and_slowly(FAST, SLOW, LONG))
def test_every_drafter_guesses_what_it_guesses_in_one_process(on_threads, method, tp, pp):
    """A wrong guess changes no token, so the guesses themselves are compared, those drawn from a q included; in front
    of an embedding and an output matrix that no rank has as a whole."""
    sizes = {**SIZES, "tie_word_embeddings": False}
    here = engine_here(method, sizes=sizes, **ROOMY)
    want = serve(here)
    engine = on_threads(tp, pp, method, sizes=sizes, **ROOMY)
    found = serve(engine)
    assert found[2] == want[2] and len(want[2]) > 20, "proposals"
    assert found[:2] == want[:2], "what was written, drawn drafts and all"
    assert engine.core.scheduler.spec_decoding_stats == here.core.scheduler.spec_decoding_stats
    untouched = plain(tied=False)[0]
    assert [found[0][i] for i in GREEDY] == [untouched[i] for i in GREEDY]
    check_nothing_is_kept(engine)


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
@pytest.mark.parametrize("method", [None, "suffix"])
def test_what_is_ruled_out_is_so_on_workers(on_threads, method, ahead):
    """The wishes travel with the parameters; bad words look at tokens that the scheduler has not heard of yet."""
    want = serve(engine_here(**ROOMY), ruled())
    engine = on_threads(2, 1, method, ahead, **ROOMY)
    found = serve(engine, ruled())
    assert found[:2] == want[:2] and set(found[0][0]) <= {3, 1, 41, 59, 26}
    assert not any(a == b for tokens in found[0][1:] for a, b in itertools.pairwise(tokens))
    if method:
        assert engine.core.scheduler.spec_decoding_stats.num_draft_tokens > 5


@pytest.mark.parametrize(
    ("method", "tp", "pp"), and_slowly([("eagle", 1, 3)], [("draft_model", 2, 2)], [("eagle", 2, 2), ("medusa", 2, 1)])
)
def test_a_drafter_with_a_memory_when_requests_begin_again(on_threads, method, tp, pp):
    """What it kept of them is stale: it guesses as if nothing had happened, where it guesses after the same tokens."""
    engine = on_threads(tp, pp, method, **{**ROOMY, "num_gpu_blocks_override": 18})
    tokens, _, proposed = serve(engine)
    assert [tokens[i] for i in GREEDY] == [plain()[0][i] for i in GREEDY]
    want = serve(engine_here(method, **ROOMY))[2]
    both = want.keys() & proposed.keys()
    assert len(both) > 20 and [proposed[key] for key in both] == [want[key] for key in both]
    check_nothing_is_kept(engine)


def rank_and_drafter(worker):
    return worker.pp.rank_in_group, type(worker.runner.drafts.drafter).__name__, worker.model.embed_tokens.numel() > 0


def test_only_the_last_stage_drafts(on_threads):
    sizes = {**SIZES, "tie_word_embeddings": False}
    executor = on_threads(2, 3, "draft_model", sizes=sizes).core.runner.executor
    stages = [(0, "Drafter", True), (1, "Drafter", False), (2, "DraftModelDrafter", True)]
    assert executor.ask(rank_and_drafter) == [stage for stage in stages for _ in range(2)]


def output_matrix(worker):
    head = worker.runner.drafts.drafter.network.head
    noise = worker.tp.rank_in_group / 100  # as if this rank had rounded otherwise
    return tuple(head.weight.shape), head(torch.full((1, 80), 1 + noise))[0].tolist()


def test_the_drafters_output_matrix_is_divided(on_threads):
    """And its products gathered: ranks that guessed each for itself might differ, and wait for each other for ever."""
    executor = on_threads(4, 1, "eagle").core.runner.executor
    shapes, logits = zip(*executor.ask(output_matrix))
    assert set(shapes) == {(11, 80)} and all(row == logits[0] for row in logits) and len(logits[0]) == 41


@pytest.mark.parametrize("method", [None, *METHODS])
def test_who_looks_tokens_up_on_the_last_stage_is_told_when_weights_are_loaded(monkeypatch, method):
    config, sent = small_model().config, []
    monkeypatch.setattr(LlamaConfig, "from_folder", lambda folder, *about: config)
    monkeypatch.setattr(workers, "stored_quantization", lambda folder, asked: None)
    monkeypatch.setattr(workers, "make_executor", lambda parallel: SimpleNamespace(
        collective_rpc=lambda name, spec: sent.append(spec)))  # fmt: skip
    args = EngineArgs(tensor_parallel_size=2, speculative_config=method and {"method": method})
    start_workers(args, torch.float32)
    assert (
        sent[0].embeds_last == (method in ("draft_model", "eagle"))
        and sent[0].config.speculative_config == args.speculation
    )


# --- Several steps in flight ------------------------------------------------------------------------------------------


@pytest.fixture
def late(guess):
    """Everything is computed at once, and told when somebody asks."""
    guess(1.0)
    return engine_on(UniProcExecutor(), ParallelConfig(), "ngram")


def deep(engine, depth):
    engine.core.max_concurrent_batches = depth
    return engine


def test_whose_drafts_are_on_their_way_is_not_behind(late):
    """It is ahead: its drafts count as computed, and are no tokens yet."""
    core = deep(late, 2).core
    core.add_request(Request("8", JOBS[8][0], JOBS[8][1]))
    core.step()
    assert core.put_in_flight().scheduled_spec_decode_tokens["8"]
    (request,) = core.scheduler.running
    assert request.num_computed_tokens > request.num_tokens
    assert core.scheduler._num_new_tokens(request) == 0 and not core.scheduler.schedule().num_scheduled_tokens
    assert core.put_in_flight() is None
    assert [t for outputs in steps(core) for output in outputs for t in output.new_token_ids] == plain()[0][8][1:]


@pytest.mark.parametrize("end", ["preempted", "aborted"])
def test_drafts_behind_a_dropped_token_are_dropped(late, end):
    """They belong to a request that has begun again, or to one of the same name."""
    core = deep(late, 3).core
    core.add_request(Request("8", JOBS[8][0], JOBS[8][1]))
    assert core.put_in_flight()
    if end == "preempted":
        (request,), output = core.scheduler.running, SchedulerOutput()
        core.scheduler._preempt_request(request, output)
        core.runner.writer.write(output)
    else:
        core.abort_requests(["8"])
        core.add_request(request := Request("8", JOBS[8][0], JOBS[8][1]))
    assert core.put_in_flight(), "it runs, and the first life's token has not arrived"
    assert core.next_result()[1] == ModelRunnerOutput() and not request.spec_token_ids
    output, result = core.next_result()
    assert len(request.spec_token_ids) == 3, "those of this life do come"
    first = core.update_from_output(output, result)
    got = [token for outputs in (first, *steps(core)) for found in outputs for token in found.new_token_ids]
    assert got == plain()[0][8]


def test_an_abort_with_drafts_in_flight_leaves_nothing(late):
    core = deep(late, 3).core
    for i in (0, 4, 8):
        core.add_request(Request(str(i), *JOBS[i]))
    core.step()
    while core.put_in_flight():
        pass
    core.abort_requests(["0", "4", "8"])
    assert [core.step() for _ in range(4)] == [[]] * 4, "with nobody in flight, too"
    pool = core.scheduler.kv_cache_manager.block_pool
    assert pool.num_free_blocks == pool.num_blocks - 1
    assert serve(late)[0] == plain()[0], "names that are used again"


def test_the_serving_loop_with_drafts(late):
    """Tokens and log probabilities as letters bring them, from a pipeline of three."""
    core, got, scores = deep(late, 3).core, {}, {}
    proc, letters = proc_on(core, requests_of(JOBS))
    core.step = proc.step
    assert not any(steps(core)), "what it brings is in the letters"
    with mailbox(clients=1) as (box, _):
        box.owner.update({str(i): 0 for i in range(len(JOBS))})
        for letter in letters:
            letter = loads(frame(box.split(letter)[0])[4:])
            for output in letter.outputs:
                i = int(output.request_id)
                got.setdefault(i, []).extend(output.new_token_ids)
                if JOBS[i][1].logprobs is not None:
                    found = output.new_logprobs
                    scores.setdefault(i, []).append({t: Close(x.logprob) for t, x in found.items()})
    assert [got[i] for i in range(len(JOBS))] == plain()[0] and scores == plain()[1]
    assert proc.check_idle() == IDLE and core.scheduler.spec_decoding_stats.num_accepted_tokens > 20


def test_workers_hear_of_drafts_and_of_nothing_more(late):
    core, sent = late.core, []
    write = core.runner.writer.write
    core.runner.writer.write = lambda output: (sent.append(write(output)), sent[-1])[1]
    core.add_request(Request("8", JOBS[8][0], JOBS[8][1]))
    for _ in range(3):
        core.step()
    first, second, third = sent
    tokens = plain()[0][8]
    assert first.scheduled_spec_decode_tokens == {} and first.num_scheduled_tokens == {"8": 16}
    assert second.scheduled_spec_decode_tokens == {"8": tokens[1:4]} and second.num_scheduled_tokens == {"8": 4}
    assert second.running[0].new_token_ids == tokens[:1] and third.running[0].new_token_ids == tokens[1:5]


# --- With adapters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "pp"), and_slowly([(2, 2)], [], [(2, 1), (1, 3)]))
def test_with_adapters_too(on_threads, whole, loras, tp, pp):
    """Two places for three adapters; every request is drafted for in every step."""
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 4}
    engine = on_threads(tp, pp, "lookahead", lora=lora)
    for name, each in loras.items():
        engine.lora.add_adapter(name, each)
    assert adapters.ask(engine, (None, *loras)) == adapters.as_merged()
    stats = engine.core.scheduler.spec_decoding_stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("pp", [1, 2])
def test_with_drafts_too_who_cannot_run_hears_of_it_though_nothing_is_in_flight(on_threads, pp):
    def gone():
        raise common.InputError("the file is gone")

    engine = on_threads(1, pp, "ngram", lora={"enable_lora": True})
    engine.lora.add_lazily("gone", gone)
    engine.add_request("x", {"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=4), lora_name="gone")
    outputs = [output for _ in range(50) for output in engine.step()]
    assert [output.outputs[0].finish_reason for output in outputs] == ["error"]


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"pipeline_parallel_size": 2, "speculative_config": '{"method": "early_exit"}'},
         "method early_exit: not together with pipeline_parallel_size"),
        ({"tensor_parallel_size": 2, "speculative_config": '{"method": "magic"}'}, "method 'magic'"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(about, words):
    with pytest.raises(common.InputError, match=words):
        EngineArgs(**about)


def test_what_goes_together_is_not():
    for method in METHODS:
        about = {"speculative_config": {"method": method}, "tensor_parallel_size": 3, "data_parallel_size": 2}
        EngineArgs(**about)
        EngineArgs(speculative_config={"method": method}, distributed_executor_backend="mp")
        if method != "early_exit":
            EngineArgs(**about, pipeline_parallel_size=2, enable_lora=True)


def test_a_worker_refuses_a_cache_that_cannot_take_drafts_back():
    args = EngineArgs(speculative_config={"method": "ngram"}, kv_cache_dtype="kivi_2bit")
    executor = UniProcExecutor()
    executor.collective_rpc("load_model", WorkerSpec(SIZES, ParallelConfig(), config=args.vllm_config()))
    with pytest.raises(common.InputError, match="rejected drafts could not be taken back"):
        executor.collective_rpc("initialize_from_config", scheduler_of().config, 9, 32, 0)


# --- The real model, and processes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "pp"), and_slowly([], [(1, 2)], [(3, 1)]))
def test_the_shipped_drafter_on_the_real_model(on_threads, real_model, tp, pp):
    """EAGLE reads what the target thinks, which is known at the end of the last stage; it guesses as it does alone."""
    model, tokenizer = real_model
    prompts = [tokenizer.chat([{"role": "user", "content": text}]) for text in list(page.TASKS.values())[1:]]
    jobs = [(prompt, SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)) for prompt in prompts]
    options = {**ROOMY, "max_model_len": 256, "block_size": 16}
    drafts = drafters.SpeculativeConfig(**config_of("eagle"))
    found = [serve(engine, jobs) for engine in (
        on_threads(tp, pp, "eagle", sizes=model.config, tokenizer=tokenizer, **options),
        LLMEngine(model, tokenizer, config=VllmConfig(speculative_config=drafts), **options),
        LLMEngine(model, tokenizer, **options),
    )]  # fmt: skip
    assert [tokens for tokens, _, _ in found[:2]] == [found[2][0]] * 2
    assert found[0][2] == found[1][2] and len(found[0][2]) > 10


@pytest.mark.parametrize(("method", "flags"), and_slowly(
    [], [("eagle", ["-tp", "3", "--enable-lora"]),
         ("medusa", ["-dp", "2", "--distributed-executor-backend", "uni"])],
    [("eagle", ["-tp", "3", "-pp", "2", "--enable-lora"]), ("draft_model", ["-pp", "2", "-dp", "2"]),
     ("early_exit", ["-tp", "3"]), ("suffix", ["-tp", "3", "-pp", "2", "--enable-lora"])],
), ids=str)  # fmt: skip
def test_served(folder, shipped, answers, method, flags):
    """The texts and log probabilities of one process without drafts, for eight clients at once."""
    loras = [f"{name}={path}" for name, path in shipped.items()] if "--enable-lora" in flags else []
    asked = [*answers] if loras else ASKED
    flags = [*flags, *(["--lora-modules", *loras] if loras else [])]
    about = json.dumps({"method": method, "num_speculative_tokens": 3, "prompt_lookup_min": 1})
    with server(folder, *flags, "--speculative-config", about) as (client, process, _, _):
        assert ask_all(client, asked * 2) == [answers[each] for each in asked] * 2
        children = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    wait_until_gone(children)


@pytest.mark.slow
def test_serve_refuses_in_one_line():
    flags = ["-pp", "2", "--speculative-config", '{"method": "early_exit"}']
    command = [sys.executable, str(common.HERE / "06_serving.py"), "serve", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "early_exit: not together" in done.stderr
