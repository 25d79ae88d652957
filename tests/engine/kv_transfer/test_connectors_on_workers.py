"""Connectors on workers: whoever computed the prompt, and on however many ranks, the tokens are those of one engine."""

from __future__ import annotations

import common

import dataclasses
import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.engine_args import EngineArgs
from engine.kv_transfer.config import KVTransferConfig
from engine.kv_transfer.connectors import CONNECTORS
from engine.kv_transfer.digest import weights_digest
from engine.lora import lora_model
from engine.model import llama
from engine.parallel import transfers as lesson
from engine.parallel.config import ParallelConfig
from engine.parallel.model import map_local, shard_model
from engine.quantization import methods
from engine.request import SamplingParams
from lab import naive
from support.ports import free_ports
from support.rank_threads import ThreadGroup, WorkerThreads
from support.small_cores import OUTPUTS, PROMPTS, SIZES, small_model
from support.tiers import and_slowly
from support.tokenizing import of_characters
from support.transfers import until
from support.worker_engines import engine_on


@pytest.fixture
def build(monkeypatch):
    of_characters(monkeypatch)
    started = []

    def make(tp, role, wire="TCPConnector", policy="recompute", limits=None, drafts=None, loras=(), ahead=False,
             **extra):  # fmt: skip
        config = {"kv_connector": wire, "kv_role": role, "kv_port": free_ports(tp), "kv_load_failure_policy": policy,
                  "kv_connector_extra_config": extra}  # fmt: skip
        args = EngineArgs(tensor_parallel_size=tp, distributed_executor_backend="mp", kv_transfer_config=config,
                                  speculative_config=drafts, enable_lora=bool(loras), max_loras=2, max_cpu_loras=4,
                                  async_scheduling=ahead)  # fmt: skip
        parallel = ParallelConfig(tp, async_scheduling=ahead)
        executor = WorkerThreads(parallel)
        started.append(executor)
        engine = engine_on(executor, parallel, args, **(limits or {}))
        for lora in loras:
            engine.lora.add_adapter(lora.name, lora)
        return engine

    yield make
    for executor in started:
        executor.shutdown()


def add(engine, name, prompt, tokens, lora=None, stop=None, **params):
    ends = [stop] if stop else []
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, stop_token_ids=ends)
    sampling.extra_args = {"kv_transfer_params": params}
    engine.add_request(name, {"prompt_token_ids": prompt}, sampling, **({"lora_name": lora.name} if lora else {}))


JOBS = list(zip(PROMPTS, OUTPUTS))


def hand_over(prefill, decode, jobs=JOBS, loras=(None,), rng=None):
    """Give both engines their requests, to these adapters in turn; what one engine without either would answer. Given
    `rng`, some end with a token that only whoever computes it can know."""
    whole, truth = small_model(), {}
    address = prefill.core.scheduler.connector.address
    for i, (prompt, tokens) in enumerate(jobs):
        lora = loras[i % len(loras)]
        merged = lora_model.merged(whole, lora) if lora else whole
        tokens_alone = naive.generate(merged, prompt, tokens)
        stop = rng.choice([None, *tokens_alone]) if rng else None
        truth[f"d{i}"] = tokens_alone[: tokens_alone.index(stop) + 1] if stop else tokens_alone
        first = (5, lora, stop) if rng else (1, lora)  # who computes the prompt may write more than a token, too
        add(prefill, f"p{i}", prompt, *first, do_remote_decode=True, transfer_id=f"t{i}")
        add(decode, f"d{i}", prompt, tokens, lora, stop, do_remote_prefill=True, transfer_id=f"t{i}", **address)
    return truth


def run(*engines, seconds=60):
    """Step all until nobody wants anything of anybody; the finished answers of the last one."""
    found, deadline = {}, time.monotonic() + seconds
    while any(engine.core.scheduler.has_unfinished_requests() for engine in engines):
        assert time.monotonic() < deadline, "somebody waits for ever"
        for engine in engines:
            found[engine] = found.get(engine, {}) | {o.request_id: o.outputs[0] for o in engine.step() if o.finished}
    return {name: list(answer.token_ids) for name, answer in found[engines[-1]].items()}


def on_ranks(engine, function):
    """What `function(connector, rank)` says on every rank."""
    return engine.core.runner.executor.ask(lambda worker: function(worker.runner.connector, worker.tp.rank_in_group))


def check_nothing_is_kept(*engines):
    """On either half: not a block, not a name, not an order."""
    for engine in engines:
        scheduler = engine.core.scheduler
        pool, connector = scheduler.kv_cache_manager.block_pool, scheduler.connector
        pool.check()
        assert pool.num_free_blocks == pool.num_blocks - 1 and not (scheduler.held or scheduler.waiting_for_remote_kvs)
        assert not (connector.names or connector.producer.exports or connector.consumer.imports or connector.orders)
        assert not (connector.sent or connector.why or connector.in_use or connector.asked)
        assert not scheduler.requests
        if engine.lora:
            engine.lora.check()
        kept = on_ranks(engine, lambda c, rank: [*c.producer.exports, *c.consumer.imports, *c.names])
        assert not any(kept)


WIRES = ["TCPConnector", "SharedMemoryConnector"]
FAST = [(2, 1, WIRES[0]), (2, 2, WIRES[1]), (1, 8, WIRES[0])]
DEGREES = [(1, 1), (2, 2), (1, 2), (2, 1), (4, 1), (8, 1), (1, 8)]
SLOW = [(1, 1, WIRES[0]), (4, 1, WIRES[0]), (8, 1, WIRES[1])]
LONG = [(*degrees, wire) for degrees in DEGREES for wire in WIRES if (*degrees, wire) not in FAST + SLOW]


@pytest.mark.parametrize(("prefill_tp", "decode_tp", "wire"), and_slowly(FAST, SLOW, LONG))
def test_a_prompt_goes_from_ranks_to_ranks(build, prefill_tp, decode_tp, wire):
    """Eight ranks share four KV heads: then each of four is read by two, or four of eight by nobody."""
    prefill, decode = build(prefill_tp, "kv_producer", wire), build(decode_tp, "kv_consumer", wire)
    truth = hand_over(prefill, decode)
    assert prefill.core.scheduler.connector.address["tp_size"] == prefill_tp
    heard, hear = [], decode.core.scheduler.connector.hear
    decode.core.scheduler.connector.hear = lambda outputs: (heard.extend(outputs), hear(outputs))
    assert run(prefill, decode) == truth
    assert sum(len(output.finished_recving) for output in heard) == decode_tp * len(truth), "all came, on all ranks"
    assert not any(output.failed_recving for output in heard)
    early = on_ranks(prefill, lambda c, rank: c.producer.stats["early"])
    read = [count > 0 for count in early]
    assert sum(read) == min(prefill_tp, 4), "layers leave every rank that is read before the prompt is computed"
    check_nothing_is_kept(prefill, decode)


def digests_of_ranks(model, n, change=lambda part: part):
    """What each of n ranks, as threads, calls its part of `model` after a change to its layers."""
    meeting, table = threading.Barrier(n), [None] * n

    def digest(rank):
        part = shard_model(model, ThreadGroup(n, rank, meeting, table))
        return weights_digest(map_local(part, change))

    with ThreadPoolExecutor(n) as ranks:
        return list(ranks.map(digest, range(n)))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_model_has_one_digest_however_it_is_cut(ranks):
    """With biases and norms of heads; four of eight ranks have copies of the others' keys and values."""
    model = llama.random_model(**SIZES | {"qk_norm": True, "vocab_size": 131})  # 131: some ranks are padded
    model.config = dataclasses.replace(model.config, attention_bias=True, mlp_bias=True)
    for layer in model.linear.values():
        layer.bias = torch.randn(layer.weight.shape[0])
    whole = weights_digest(model)
    assert digests_of_ranks(model, ranks) == [whole] * ranks
    values, down = model.linear["layers.0.qkv_proj"], model.linear["layers.1.down_proj"]
    for last in (values.weight[-1], values.bias[-1:], down.weight[:, -1], down.bias[-1:]):  # an output, an input
        last += 1
        (other,) = {*digests_of_ranks(model, ranks)}
        assert other == weights_digest(model) != whole
        whole = other


@pytest.mark.parametrize("method", ["int4", "mxfp8", "int8"])
def test_codes_have_one_digest_however_they_are_cut(method):
    """If they are the same: with a scale for all inputs of an output, a rank has its own for its inputs."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
    model, quantize = llama.random_model(**shape), methods.quantize_model
    (found,) = {*digests_of_ranks(model, 2, lambda part: quantize(part, method))}
    whole = weights_digest(quantize(model, method))
    assert (found == whole) == (method != "int8")
    assert weights_digest(model) not in (found, whole)


def test_ranks_tell_their_connectors_one_digest(build):
    whole = weights_digest(llama.random_model(**SIZES))
    for tp in (1, 2):
        assert on_ranks(build(tp, "kv_producer"), lambda c, rank: c.digest) == [whole] * tp


SUFFIX = {"method": "suffix", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def random_loras(count):
    config = small_model().config
    return [lora_model.random_adapter(config, 4, i, f"a{i}", size=1.0) for i in range(count)]


ALL = (1, 2, True, True, True)
SOME = [(2, 1, True, True, False), (2, 1, False, False, True), (1, 8, True, True, True)]
OTHERS = [(*degrees, *used) for degrees in [(2, 1), (1, 2), (1, 8)]
          for used in itertools.product([False, True], repeat=3)
          if any(used) and (*degrees, *used) not in [ALL, *SOME]]  # fmt: skip


@pytest.mark.parametrize(("prefill_tp", "decode_tp", "drafts", "adapted", "ahead"), and_slowly([ALL], SOME, OTHERS))
def test_a_prompt_goes_on_with_drafts_with_its_adapter_and_a_step_ahead(
    build, prefill_tp, decode_tp, drafts, adapted, ahead
):
    loras = random_loras(3 * adapted)
    about = {"drafts": SUFFIX if drafts else None, "loras": loras, "ahead": ahead}
    prefill, decode = build(prefill_tp, "kv_producer", **about), build(decode_tp, "kv_consumer", **about)
    assert decode.core.max_concurrent_batches == 1 + ahead
    truth = hand_over(prefill, decode, [(p, 20) for p in (*PROMPTS, [7, 8] * 8)], [*loras, None])
    assert run(prefill, decode) == truth
    assert all(on_ranks(decode, lambda c, rank: c.stats["bytes_in"]))
    if drafts:
        stats = decode.core.scheduler.spec_decoding_stats
        assert 5 < stats.num_accepted_tokens < stats.num_draft_tokens
    check_nothing_is_kept(prefill, decode)


FAST_SEEDS = [2, 3, 4]  # both wires, adapters with drafts and without, one rank to two and the other way round
OTHER_SEEDS = [i for i in range(60) if i not in FAST_SEEDS]
SEEDS = and_slowly(FAST_SEEDS, [(i,) for i in OTHER_SEEDS[:6]], [(i,) for i in OTHER_SEEDS[6:]])


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_comes_together(build, seed):
    """Small pools, few seats, prompts that nobody can predict the end of, and clients that leave on either side."""
    rng = random.Random(seed)
    loras = random_loras(3 * (rng.random() < 0.4))
    about = {"drafts": SUFFIX if rng.random() < 0.5 else None, "loras": loras, "ahead": rng.random() < 0.8,
             "wire": rng.choice(WIRES)}  # fmt: skip

    def limits():
        return {
            "num_gpu_blocks_override": rng.choice([18, 20, 24, 30]), "max_num_seqs": rng.choice([2, 4, 8]),
            "max_num_batched_tokens": rng.choice([8, 16, 40]), "enable_prefix_caching": rng.random() < 0.6,
        }  # fmt: skip

    engines = [build(rng.choice([1, 2]), role, limits=limits(), policy=rng.choice(["fail", "recompute"]), **about)
               for role in ("kv_producer", "kv_consumer")]  # fmt: skip
    prompts = [[rng.randrange(3, 60) for _ in range(rng.randrange(1, 40))] for _ in range(6)] + [[7, 8] * 8]
    jobs = [(prompt, rng.randrange(1, 24)) for prompt in prompts]
    truth = hand_over(*engines, jobs, [*loras, None], rng)
    found, left, deadline = {}, set(), time.monotonic() + 60
    while any(engine.core.scheduler.has_unfinished_requests() for engine in engines):
        assert time.monotonic() < deadline, "somebody waits for ever"
        for engine, side in zip(engines, "pd"):
            if rng.random() < 0.8:
                found |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished}
            if rng.random() < 0.04:
                name = rng.randrange(len(jobs))
                engine.abort_request([f"{side}{name}"])
                left.add(f"d{name}")
    assert {name: found.get(name) for name in truth.keys() - left} == {
        name: truth[name] for name in truth.keys() - left
    }
    check_nothing_is_kept(*engines)


def test_a_preempted_prefill_offers_nothing_old(build):
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
    ready = on_ranks(prefill, lambda c, rank: [set(e.ready) for e in c.producer.exports.values()])
    assert ready == [[{0}]] * 2
    others = scheduler.kv_cache_manager.block_pool.allocate(1)
    on_ranks(prefill, lambda connector, rank: until(lambda: not connector.inbox.empty()))
    assert run(prefill, decode) == truth
    scheduler.kv_cache_manager.block_pool.free(others)
    check_nothing_is_kept(prefill, decode)


@pytest.mark.parametrize("policy", ["recompute", pytest.param("fail", marks=pytest.mark.slow)])
def test_one_rank_whose_wire_stalls(build, policy):
    """Its partner gives up, the other rank is told, and nothing is decided before both have said so."""
    prefill = build(2, "kv_producer", kv_lease_duration=2.0)
    decode = build(2, "kv_consumer", policy=policy, timeout=0.5, retries=0)
    truth = hand_over(prefill, decode)

    def stall(connector, rank):
        if rank == 1:
            connector.wire = lambda link, header, payload: []

    on_ranks(prefill, stall)
    reasons, fail = [], decode.core.scheduler._handle_failed_load
    decode.core.scheduler._handle_failed_load = lambda *about: (reasons.append(about[-2]), fail(*about))[1]
    found = run(prefill, decode)
    assert reasons == ["no progress for 0.5 s"] * len(truth), "once for each request, and not for each rank"
    assert found == (truth if policy == "recompute" else {name: [] for name in truth})
    check_nothing_is_kept(prefill, decode)


def test_whose_partner_vanishes_computes_the_prompt_itself(build):
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

    on_ranks(prefill, vanish)
    assert run(prefill, decode, seconds=30) == truth
    check_nothing_is_kept(prefill, decode)


def test_nobody_comes_for_it(build):
    """The blocks are free when the lease is up on every rank, and not before."""
    prefill = build(2, "kv_producer", kv_lease_duration=0.3)
    add(prefill, "p", PROMPTS[2], 1, do_remote_decode=True, transfer_id="t")
    start, scheduler = time.monotonic(), prefill.core.scheduler
    while not scheduler.held:
        prefill.step()
    run(prefill)
    assert time.monotonic() - start > 0.3
    check_nothing_is_kept(prefill)


def test_the_answer_says_where_the_ranks_are(build):
    """To a client of the engine, with the last of its tokens."""
    prefill = build(2, "kv_producer", kv_lease_duration=0.2)
    address = prefill.core.scheduler.connector.address
    add(prefill, "p", PROMPTS[0], 2, do_remote_decode=True, transfer_id="t")
    add(prefill, "q", PROMPTS[1], 2)
    answers = {}
    while len(answers) < 2:
        answers |= {output.request_id: output.kv_transfer_params for output in prefill.step()}
    assert answers == {"p": {"do_remote_prefill": True, "transfer_id": "t", **address}, "q": None}
    assert address["tp_size"] == 2
    run(prefill)
    check_nothing_is_kept(prefill)


def test_a_client_that_leaves_before_its_prompt_is_fetched(build):
    """The prefill engine keeps it for nobody, and is told."""
    prefill, decode = build(2, "kv_producer"), build(2, "kv_consumer", limits={"max_num_seqs": 1})
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
    check_nothing_is_kept(prefill, decode)


@pytest.mark.parametrize("leaves", ["decode", "prefill"])
def test_a_client_that_leaves(build, leaves):
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
    check_nothing_is_kept(prefill, decode)


def test_workers_without_work_read_their_mail(build):
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
    check_nothing_is_kept(prefill, decode)


def test_while_anything_is_on_its_way_a_step_is_wanted():
    config = KVTransferConfig("TCPConnector", "kv_both", kv_port=5000)
    connector = lesson.RemoteConnector(config)
    connector.looked = time.monotonic() + 1000  # not because of the mail
    assert not connector.has_pending_work()
    for kept, keep in ((connector.orders, list.append), (connector.producer.exports, set.add),
                       (connector.consumer.imports, dict.setdefault), (connector.loads, list.append)):  # fmt: skip
        keep(kept, "r")
        assert connector.has_pending_work()
        kept.clear()
    assert not connector.has_pending_work()


def test_what_the_workers_do_not_have_is_not_waited_for():
    """A prompt that ended before a step took it along: its blocks are free at once, and no rank is told."""
    producer = lesson.RemoteProducer(orders := [])
    assert not producer.finish("t") and orders == []
    producer.exports.add("t")
    assert producer.finish("t") and orders == [("finish", "t")]


WORKERS = {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("flags", "config", "words"),
    [
        (WORKERS | {"pipeline_parallel_size": 2}, {}, "not together with pipeline_parallel_size"),
        (WORKERS | {"distributed_executor_backend": "ray"}, {}, "not together with distributed_executor_backend ray"),
        (WORKERS, {"kv_connector": "TorchDistributedConnector"}, "engines: TorchDistributedConnector; allowed: Shared"),
        (WORKERS, {"kv_connector": "StoreConnector"}, "engines: StoreConnector"),
        (WORKERS, {"kv_port": 0}, r"kv_port 0: the r-th rank of all engines listens at kv_port \+ r"),
        (WORKERS, {"kv_port": 65535}, "kv_port 65535"),
        (WORKERS | {"data_parallel_size": 2}, {"kv_port": 65533}, "from 1 to 65532"),
        ({"data_parallel_size": 2}, {"kv_port": 65535}, "kv_port 65535"),
        ({"data_parallel_size": 2}, {"kv_connector": "StoreConnector"}, "several engines: StoreConnector"),
        (WORKERS | {"kv_cache_dtype": "fp8"}, {}, "not together with --kv-cache-dtype"),
    ],
)
def test_what_does_not_go_together_is_refused(flags, config, words, tmp_path):
    about = {"kv_connector": "TCPConnector", "kv_role": "kv_producer", "kv_port": 5000,
             "kv_connector_extra_config": {"folder": str(tmp_path)}}  # fmt: skip
    with pytest.raises(common.InputError, match=words):
        EngineArgs(**flags, kv_transfer_config=about | config)


@pytest.mark.parametrize(
    ("ranks", "role", "port"),
    [(1, "kv_producer", 0), (2, "kv_producer", 65534), (2, "kv_both", 65534), (2, "kv_consumer", 0),
     (2, "kv_consumer", 65535)],
)  # fmt: skip
def test_a_port_for_every_rank_that_listens_is_enough(monkeypatch, ranks, role, port):
    """One worker takes any; who only fetches has no use for one."""
    about = {"kv_connector": "TCPConnector", "kv_role": role, "kv_port": port}
    args = EngineArgs(tensor_parallel_size=ranks, distributed_executor_backend="mp", kv_transfer_config=about)
    assert args.has_workers
    monkeypatch.setitem(CONNECTORS, "TCPConnector", lambda config: config)

    ports = [lesson.own_connector(args.for_engine(0).kv_transfer, rank).kv_port for rank in range(ranks)]
    assert ports == [port + rank * (port > 0 and role != "kv_consumer") for rank in range(ranks)]


def test_several_engines_that_only_fetch_need_no_ports():
    about = {"kv_connector": "TCPConnector", "kv_role": "kv_consumer", "kv_port": 65535}
    args = EngineArgs(data_parallel_size=3, kv_transfer_config=about)
    assert [args.for_engine(engine).kv_transfer.kv_port for engine in range(3)] == [65535] * 3
