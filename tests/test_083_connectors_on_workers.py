"""Connectors on workers: whoever computed the prompt, and on however many ranks, the tokens are those of one engine."""

from __future__ import annotations

import time

import common
import pytest
import test_06c_scaling_out as scaling
import torch
from test_08_disagg import free_ports, until
from test_12_multi_lora import NoBytes, Words

import llama

lesson = common.lesson("083_connectors_on_workers")
executors, serving, SamplingParams = lesson.executors, scaling.serving, scaling.SamplingParams
LIMITS = dict(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=16, num_gpu_blocks_override=60, block_size=4)


@pytest.fixture
def build(monkeypatch):
    monkeypatch.setattr(scaling.lesson.offline, "TokenBytes", NoBytes)
    monkeypatch.setattr(llama, "Tokenizer", lambda folder: Words())
    monkeypatch.setattr(llama, "model_folder", lambda name: name)
    started = []

    def make(tp, role, wire="TCPConnector", policy="recompute", limits=LIMITS, **extra):
        config = {"kv_connector": wire, "kv_role": role, "kv_port": free_ports(tp), "kv_load_failure_policy": policy,
                  "kv_connector_extra_config": extra}  # fmt: skip
        args = serving.EngineArgs(tensor_parallel_size=tp, distributed_executor_backend="mp", kv_transfer_config=config)
        parallel = executors.ParallelConfig(tp)
        executor = scaling.ThreadExecutor(parallel)
        started.append(executor)
        runner = (executors.KEY, "served_runner")
        executor.collective_rpc(
            "load_model", executors.WorkerSpec(scaling.SIZES, parallel, torch.float32, runner, args)
        )
        kind = serving.engine_class("auto", True, None, kv_transfer=args.kv_transfer, on_workers=True)
        kind = executors.parallel_engine(kind, executor, parallel)
        skeleton = executors.skeleton(llama.random_model(**scaling.SIZES).config, parallel, torch.float32)
        return kind(skeleton, Words(), **limits)

    yield make
    for executor in started:
        executor.shutdown()


def add(engine, name, prompt, tokens, **params):
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    sampling.extra_args = {"kv_transfer_params": params}
    engine.add_request(name, {"prompt_token_ids": prompt}, sampling)


JOBS = list(zip(scaling.PROMPTS, scaling.OUTPUTS))


def hand_over(prefill, decode, jobs=JOBS):
    """Give both engines their requests; what one engine without either would answer."""
    whole, truth = llama.random_model(**scaling.SIZES), {}
    address = prefill.core.scheduler.connector.address
    for i, (prompt, tokens) in enumerate(jobs):
        truth[f"d{i}"] = scaling.scheduling.generate_alone(whole, prompt, tokens)
        add(prefill, f"p{i}", prompt, 1, do_remote_decode=True, transfer_id=f"t{i}")
        add(decode, f"d{i}", prompt, tokens, do_remote_prefill=True, transfer_id=f"t{i}", **address)
    return truth


def run(*engines, seconds=60):
    """Step all until nobody wants anything of anybody; the finished answers of the last one."""
    found, deadline = {}, time.monotonic() + seconds
    while any(engine.core.scheduler.has_unfinished_requests() for engine in engines):
        assert time.monotonic() < deadline, "somebody waits for ever"
        for engine in engines:
            found[engine] = found.get(engine, {}) | {o.request_id: o.outputs[0] for o in engine.step() if o.finished}
    return {name: list(answer.token_ids) for name, answer in found[engines[-1]].items()}


def on_ranks(engine, monkeypatch, function):
    """What `function(connector, rank)` says on every rank."""
    monkeypatch.setattr(lesson, "probe", lambda worker: function(worker.runner.connector, worker.tp.rank_in_group),
                        raising=False)  # fmt: skip
    return engine.core.runner.executor.collective_rpc((lesson.KEY, "probe"))


def check_nothing_is_kept(monkeypatch, *engines):
    """On either half: not a block, not a name, not an order."""
    for engine in engines:
        scheduler = engine.core.scheduler
        pool, connector = scheduler.kv_cache_manager.block_pool, scheduler.connector
        pool.check()
        assert pool.num_free_blocks == pool.num_blocks - 1 and not (scheduler.held or scheduler.waiting_for_remote_kvs)
        assert not (connector.names or connector.producer.exports or connector.consumer.imports or connector.orders)
        assert not (connector.sent or connector.why or connector.in_use or connector.asked)
        kept = on_ranks(engine, monkeypatch, lambda c, rank: [*c.producer.exports, *c.consumer.imports, *c.names])
        assert not any(kept)


WIRES = ["TCPConnector", "SharedMemoryConnector"]
FAST = [(2, 1, WIRES[0]), (2, 2, WIRES[1]), (1, 8, WIRES[0])]
DEGREES = [(1, 1), (2, 2), (1, 2), (2, 1), (4, 1), (8, 1), (1, 8)]
SLOW = [pytest.param(*degrees, wire, marks=pytest.mark.slow)
        for degrees in DEGREES for wire in WIRES if (*degrees, wire) not in FAST]  # fmt: skip


@pytest.mark.parametrize(("prefill_tp", "decode_tp", "wire"), [*FAST, *SLOW])
def test_a_prompt_goes_from_ranks_to_ranks(build, monkeypatch, prefill_tp, decode_tp, wire):
    """Eight ranks share four KV heads: then each of four is read by two, or four of eight by nobody."""
    prefill, decode = build(prefill_tp, "kv_producer", wire), build(decode_tp, "kv_consumer", wire)
    truth = hand_over(prefill, decode)
    assert prefill.core.scheduler.connector.address["tp_size"] == prefill_tp
    heard, hear = [], decode.core.scheduler.connector.hear
    decode.core.scheduler.connector.hear = lambda outputs: (heard.extend(outputs), hear(outputs))
    assert run(prefill, decode) == truth
    assert sum(len(output.finished_recving) for output in heard) == decode_tp * len(truth), "all came, on all ranks"
    assert not any(output.failed_recving for output in heard)
    early = on_ranks(prefill, monkeypatch, lambda c, rank: c.producer.stats["early"])
    read = [count > 0 for count in early]
    assert sum(read) == min(prefill_tp, 4), "layers leave every rank that is read before the prompt is computed"
    check_nothing_is_kept(monkeypatch, prefill, decode)


def test_a_preempted_prefill_offers_nothing_old(build, monkeypatch):
    """It begins again in other blocks, with nothing in them, while somebody asks already."""
    prefill, decode = build(2, "kv_producer"), build(2, "kv_consumer")
    truth = hand_over(prefill, decode, [(list(range(1, 41)), 5)])
    prefill.step()
    scheduler = prefill.core.scheduler
    (request,) = scheduler.running
    assert request.num_computed_tokens == 16
    scheduler.void.append(request)  # as if a load had left its blocks empty
    prefill.step(), decode.step()
    assert request.num_preemptions == 1
    ready = on_ranks(prefill, monkeypatch, lambda c, rank: [set(e.ready) for e in c.producer.exports.values()])
    assert ready == [[{0}]] * 2
    others = scheduler.kv_cache_manager.block_pool.allocate(1)
    on_ranks(prefill, monkeypatch, lambda connector, rank: until(lambda: not connector.inbox.empty()))
    assert run(prefill, decode) == truth
    scheduler.kv_cache_manager.block_pool.free(others)
    check_nothing_is_kept(monkeypatch, prefill, decode)


@pytest.mark.parametrize("policy", ["recompute", pytest.param("fail", marks=pytest.mark.slow)])
def test_one_rank_whose_wire_stalls(build, monkeypatch, policy):
    """Its partner gives up, the other rank is told, and nothing is decided before both have said so."""
    prefill = build(2, "kv_producer", kv_lease_duration=2.0)
    decode = build(2, "kv_consumer", policy=policy, timeout=0.5, retries=0)
    truth = hand_over(prefill, decode)

    def stall(connector, rank):
        if rank == 1:
            connector.wire = lambda link, header, payload: []

    on_ranks(prefill, monkeypatch, stall)
    reasons, fail = [], decode.core.scheduler._handle_failed_recving
    decode.core.scheduler._handle_failed_recving = lambda request, why: (reasons.append(why), fail(request, why))[1]
    found = run(prefill, decode)
    assert reasons == ["no progress for 0.5 s"] * len(truth), "once for each request, and not for each rank"
    assert found == (truth if policy == "recompute" else {name: [] for name in truth})
    check_nothing_is_kept(monkeypatch, prefill, decode)


def test_whose_partner_vanishes_computes_the_prompt_itself(build, monkeypatch):
    """One rank of the prefill engine closes its connections in the middle. The other falls silent, and its partner
    would be patient; but it is told that the prompt will not come, and tells."""
    prefill, decode = build(2, "kv_producer"), build(2, "kv_consumer", timeout=60.0)
    truth = hand_over(prefill, decode)
    prefill.step(), decode.step(), prefill.step(), decode.step()

    def vanish(connector, rank):
        connector.wire = lambda link, header, payload: []
        if rank == 1:
            connector.producer.lease = 0.5  # for what nobody has asked for yet
            connector.close()

    on_ranks(prefill, monkeypatch, vanish)
    assert run(prefill, decode, seconds=30) == truth
    check_nothing_is_kept(monkeypatch, prefill, decode)


def test_nobody_comes_for_it(build, monkeypatch):
    """The blocks are free when the lease is up on every rank, and not before."""
    prefill = build(2, "kv_producer", kv_lease_duration=1.0)
    add(prefill, "p", scaling.PROMPTS[2], 1, do_remote_decode=True, transfer_id="t")
    start, scheduler = time.monotonic(), prefill.core.scheduler
    while not scheduler.held:
        prefill.step()
    run(prefill)
    assert time.monotonic() - start > 1.0
    check_nothing_is_kept(monkeypatch, prefill)


def test_a_client_that_leaves_before_its_prompt_is_fetched(build, monkeypatch):
    """The prefill engine keeps it for nobody, and is told."""
    prefill, decode = build(2, "kv_producer"), build(2, "kv_consumer", limits=LIMITS | {"max_num_seqs": 1})
    connector = decode.core.scheduler.connector
    add(decode, "other", [1, 2, 3], 50)
    decode.step()
    connector.fetches_later = False  # so that it waits in the queue, for the only seat
    hand_over(prefill, decode, [(list(range(1, 41)), 5)])
    prefill.step(), decode.step()
    connector.fetches_later = True
    decode.abort_request(["d0", "other"])
    start = time.monotonic()
    assert run(prefill, decode) == {} and time.monotonic() - start < 10
    check_nothing_is_kept(monkeypatch, prefill, decode)


@pytest.mark.parametrize("leaves", ["decode", "prefill"])
def test_a_client_that_leaves(build, monkeypatch, leaves):
    """While its prompt is fetched, or computed: nothing is kept on any rank, long before a lease is up."""
    prefill, decode = build(2, "kv_producer"), build(1, "kv_consumer", policy="fail")
    prompt = list(range(1, 41))
    hand_over(prefill, decode, [(prompt, 5)])
    prefill.step(), decode.step()  # a chunk of 16 of 40
    assert "d0" in decode.core.scheduler.waiting_for_remote_kvs
    (prefill if leaves == "prefill" else decode).abort_request(["p0" if leaves == "prefill" else "d0"])
    start = time.monotonic()
    assert run(prefill, decode).get("d0", []) == []
    assert time.monotonic() - start < 10
    check_nothing_is_kept(monkeypatch, prefill, decode)


def test_workers_without_work_read_their_mail(build, monkeypatch):
    """Whoever asks for a prompt that is gone hears of it at once, though nobody else wants anything there."""
    prefill = build(2, "kv_producer")
    decode = build(1, "kv_consumer", policy="fail", timeout=60.0)
    scheduler, address = prefill.core.scheduler, prefill.core.scheduler.connector.address
    add(prefill, "p", [1, 2, 3], 1, do_remote_decode=True, transfer_id="t")
    prefill.abort_request(["p"])
    run(prefill)
    start = time.monotonic()
    add(decode, "d", [1, 2, 3], 5, do_remote_prefill=True, transfer_id="t", **address)
    assert not scheduler.has_unfinished_requests() and scheduler.patience == 0.1
    answers = []
    while not answers and time.monotonic() - start < 10:
        if scheduler.has_unfinished_requests():  # as the loop does that would wait for a client otherwise
            prefill.step()
        answers = [answer for answer in decode.step() if answer.finished]
    assert [list(answer.outputs[0].token_ids) for answer in answers] == [[]]
    check_nothing_is_kept(monkeypatch, prefill, decode)


WORKERS = {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("flags", "config", "words"),
    [
        (WORKERS | {"pipeline_parallel_size": 2}, {}, "not together with pipeline_parallel_size"),
        ({"async_scheduling": True}, {}, "not together with async_scheduling"),
        (WORKERS | {"distributed_executor_backend": "ray"}, {}, "not together with distributed_executor_backend ray"),
        (WORKERS | {"speculative_config": {"method": "ngram"}}, {}, "not together with speculative_config on workers"),
        (WORKERS | {"enable_lora": True}, {}, "not together with enable_lora on workers"),
        (WORKERS, {"kv_connector": "TorchDistributedConnector"}, "workers: TorchDistributedConnector; allowed: Shared"),
        (WORKERS, {"kv_connector": "StoreConnector"}, "workers: StoreConnector"),
        (WORKERS, {"kv_port": 0}, r"kv_port 0: rank r listens at kv_port \+ r"),
        (WORKERS, {"kv_port": 65535}, "kv_port 65535"),
        (WORKERS | {"data_parallel_size": 2}, {}, "not together with several engines"),
        (WORKERS | {"kv_cache_dtype": "fp8"}, {}, "not together with --kv-cache-dtype"),
    ],
)
def test_what_does_not_go_together_is_refused(flags, config, words, tmp_path):
    about = {"kv_connector": "TCPConnector", "kv_role": "kv_producer", "kv_port": 5000,
             "kv_connector_extra_config": {"folder": str(tmp_path)}}  # fmt: skip
    with pytest.raises(common.InputError, match=words):
        serving.EngineArgs(**flags, kv_transfer_config=about | config)


def test_one_worker_takes_any_port():
    about = {"kv_connector": "TCPConnector", "kv_role": "kv_producer", "kv_port": 0}
    assert serving.EngineArgs(distributed_executor_backend="mp", kv_transfer_config=about).has_workers
