"""Lesson 08: what travels arrives bit for bit, whatever happens on the way, and nobody keeps a block."""

from __future__ import annotations

import common

import contextlib
import inspect
import multiprocessing
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import on_gpu
from engine import registry
from engine.kv_transfer.config import KVTransferConfig
from engine.kv_transfer.connectors import CONNECTORS
from engine.kv_transfer.heads import num_consumers, owned_heads, tp_sources
from engine.kv_transfer.kernels import gather_kv, move_kv_kernel, scatter_kv
from engine.kv_transfer.p2p import TCPConnector
from engine.model import llama
from lab import cli, naive, workers
from lab.transfers import Faults
from lab.workers import Worker, make_core, make_request, settled
from support.latents import latent_model
from support.transfers import PROMPT, SEED, TOKENS, counts, drain, generated, handed_over, pair, submit, until

lesson = registry.lesson("08_disagg")
page = cli.numbers("08_disagg")
HandOver = lesson.HandOver


@pytest.fixture(scope="module")
def tiny_model():
    return llama.random_model(seed=SEED)


@pytest.fixture(scope="module")
def expected(tiny_model):
    return naive.generate(tiny_model, PROMPT, TOKENS)


# --- The kernel, and who owns which heads ----------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", ["torch", "kernel"])
@pytest.mark.parametrize(
    ("size", "Hkv", "D", "head", "heads", "first", "count"),
    [(16, 3, 64, 0, 3, 0, 1), (16, 3, 64, 1, 1, 15, 33), (16, 3, 64, 0, 3, 3, 45), (8, 2, 16, 1, 1, 7, 17),
     (32, 5, 24, 1, 3, 31, 34), (1, 2, 16, 0, 2, 2, 5), (4, 2, 24, 1, 1, 1, 7)],
)  # fmt: skip
def test_blocks_to_wire_and_back(wrapper, size, Hkv, D, head, heads, first, count, dtype, device, guarded):
    if wrapper == "kernel" and not common.HAS_TRITON:
        pytest.skip("no Triton wheel on this platform; the torch path is tested without it")
    used = -(-(first + count) // size)
    blocks = (torch.randperm(used + 3)[:used] + 1).to(device)
    blocks[-1] = used + 4  # the last of all
    cache = guarded(torch.randn(2, used + 5, size, Hkv, D, device=device).to(dtype))
    wanted = lesson.gather_reference(cache, blocks.tolist(), first, count, head, heads)
    table, before = guarded(blocks), move_kv_kernel.launches
    if wrapper == "kernel":
        with common.use_kernels():
            wire = gather_kv(cache, table, first, count, head, heads)
    else:
        wire = gather_kv(cache, table, first, count, head, heads)
    assert torch.equal(wire, wanted)

    other_size, other_head = size + 3, 1
    other = -(-(first + count) // other_size)
    theirs = (torch.randperm(other + 2)[:other] + 1).to(device)
    ours = torch.randn(2, other + 4, other_size, heads + 2, D, device=device).to(dtype)
    reference, target = ours.clone(), guarded(ours)
    lesson.scatter_reference(wanted, reference, theirs.tolist(), first, other_head)
    buffer = guarded(wanted)
    if wrapper == "kernel":
        with common.use_kernels():
            scatter_kv(buffer, target, guarded(theirs), first, other_head)
        assert move_kv_kernel.launches == before + 2
    else:
        scatter_kv(buffer, target, guarded(theirs), first, other_head)
    assert torch.equal(target, reference), "every element in its place, and no other one touched"


def test_blocks_beyond_31_bits(kernels, device, far):
    pages, blocks = torch.randn(2, 3, 8, 2, 16, device=device).half(), torch.tensor([2, 0], device=device)
    cache, first = far(pages, 1)
    wire = gather_kv(cache, blocks + first, 3, 9, 1, 1)
    assert torch.equal(wire, lesson.gather_reference(pages, blocks.tolist(), 3, 9, 1, 1))
    scatter_kv(-wire, cache, blocks + first, 3, 0)
    assert torch.equal(cache[:, first + 2, 3:, 0], -pages[:, 2, 3:, 1])


def test_moving_nothing():
    cache, before = torch.zeros(2, 3, 4, 2, 16), move_kv_kernel.launches
    for context in (contextlib.nullcontext, common.use_kernels) if common.HAS_TRITON else (contextlib.nullcontext,):
        with context():
            assert gather_kv(cache, torch.tensor([1]), 0, 0, 0, 2).shape == (2, 0, 2, 16)
            scatter_kv(torch.zeros(2, 0, 2, 16), cache, torch.tensor([1]), 0, 0)
    assert move_kv_kernel.launches == before


def test_the_engine_moves_blocks_with_the_kernel(kernels, tiny_model):
    before = move_kv_kernel.launches
    with pair(tiny_model, "TCPConnector") as (prefill, decode):
        assert handed_over(prefill, decode, [PROMPT[:5]], 2) == [generated(tiny_model, PROMPT[:5], 2)]
    assert move_kv_kernel.launches > before


@given(
    st.sampled_from([1, 2, 3, 4, 8, 12]), st.sampled_from([1, 2, 3, 4, 6, 8, 16]), st.sampled_from([1, 2, 3, 4, 6, 8])
)
@settings(max_examples=80)
def test_every_head_is_read_from_one_rank_that_has_it(Hkv, producer, consumer):
    if any(max(Hkv, n) % min(Hkv, n) for n in (producer, consumer)):
        return  # lesson 05c refuses such a degree
    readers = [0] * producer
    for rank in range(consumer):
        first, count = owned_heads(Hkv, consumer, rank)
        sources = tp_sources(Hkv, producer, consumer, rank)
        assert [h for s in sources for h in range(s.head, s.head + s.heads)] == list(range(first, first + count))
        for s in sources:
            theirs, n = owned_heads(Hkv, producer, s.rank)
            assert theirs <= s.head and s.head + s.heads <= theirs + n
            readers[s.rank] += 1
    assert readers == [num_consumers(Hkv, producer, consumer, rank) for rank in range(producer)]
    if consumer >= producer:
        assert max(readers) - min(readers) <= 1, "readers spread over the ranks"


# --- The hand-over ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", lesson.WAYS)
def test_the_naive_hand_over(how, tiny_model, expected):
    assert lesson.hand_over(tiny_model, PROMPT, TOKENS, how) == expected


def test_what_is_not_moved_is_missed(tiny_model, expected):
    """Nothing arrives: another answer. So the three ways are a check."""
    assert lesson.hand_over(tiny_model, PROMPT, TOKENS, "not at all") != expected


PAIRS = [(HandOver, HandOver), (HandOver, TCPConnector), (TCPConnector, HandOver)]
names = [f"{prefill.__name__}-{decode.__name__}" for prefill, decode in PAIRS]
by_pair = pytest.mark.parametrize("kinds", PAIRS, ids=names)


@by_pair
def test_the_lessons_connector_and_the_engines_speak_one_language(kinds, tiny_model, expected):
    """Either at either end: the tokens of one engine, each position once, and no block is kept."""
    prompts = [PROMPT, PROMPT[:16], PROMPT[:17], PROMPT[:2], PROMPT[:1]]
    with pair(tiny_model, "TCPConnector", kinds=kinds) as (prefill, decode):
        found = handed_over(prefill, decode, prompts, TOKENS)
        assert found == [expected, *(generated(tiny_model, prompt, TOKENS) for prompt in prompts[1:])]
        moved = sum(len(prompt) for prompt in prompts) * 2 * 2 * 2 * 16 * 4  # halves, layers, heads, D, fp32
        ends = prefill.scheduler.connector, decode.scheduler.connector
        assert ends[1].stats["bytes_in"] == ends[0].stats["bytes_out"] == moved
        assert len(ends[0].accepted) == 1, "one connection for all of them"


@by_pair
def test_chunked_and_preempted_prefill(kinds, tiny_model, expected):
    """Layers of every chunk travel as they come; a prefill that loses its blocks in between sends nothing wrong."""
    sizes = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    with pair(tiny_model, "TCPConnector", kinds=kinds, prefill=sizes) as (prefill, decode):
        submit(prefill, decode, "r0", PROMPT, TOKENS)
        prefill.step()
        request = prefill.scheduler.running[0]
        assert request.num_computed_tokens == 16
        prefill.scheduler.void.append(request)
        prefill.step()
        assert request.num_preemptions == 1
        pool = prefill.scheduler.kv_cache_manager.block_pool
        others = pool.allocate(1)  # it will get another block, with nothing in it
        decode.step()
        until(lambda: not prefill.scheduler.connector.inbox.empty())  # it asks before there is anything
        assert drain(prefill, decode)["r0"][0] == expected
        pool.free(others)


def test_a_layer_leaves_while_the_next_one_is_computed(tiny_model):
    with pair(tiny_model, "TCPConnector", kinds=PAIRS[0]) as (prefill, decode):
        submit(prefill, decode, "a", PROMPT, TOKENS)
        connector, left = prefill.scheduler.connector, []
        connector.wire = lambda link, header, payload: left.append(header["layer"]) or [(header, payload)]
        save = connector.save_kv_layer
        seen = []
        connector.save_kv_layer = lambda layer: save(layer) or seen.append(list(left))
        decode.step()
        until(lambda: not connector.inbox.empty())
        prefill.step()
        assert seen == [[0], [0, 1]] and connector.stats == {
            "messages": 2,
            "early": 2,
            "bytes_out": 2 * 2 * 2 * 45 * 64,
        }
        drain(prefill, decode)


@pytest.fixture
def clock(monkeypatch):
    """The lesson's time, which passes only when a test says so."""
    found = SimpleNamespace(now=100.0)
    found.tick = lambda: setattr(found, "now", found.now + 1)
    monkeypatch.setattr(lesson, "time", SimpleNamespace(monotonic=lambda: found.now, perf_counter=time.perf_counter))
    return found


@pytest.mark.parametrize("fault", ["duplicate", "truncate", "drop", "reorder", "stall"])
@by_pair
def test_faults_on_the_wire(fault, kinds, clock, tiny_model, expected):
    """Whatever the wire does: the tokens of one engine. The lesson's connector does not ask again; it computes."""
    extra = {"timeout": 50.0, "retries": 0, "kv_lease_duration": 1e6}
    with pair(tiny_model, "TCPConnector", "recompute", kinds=kinds, extra=extra) as (prefill, decode):
        sent, got = prefill.scheduler.connector, decode.scheduler.connector
        if kinds[1] is TCPConnector:
            got.consumer.clock = lambda: clock.now
        sent.wire = Faults(fault, after=2)
        assert handed_over(prefill, decode, [PROMPT, PROMPT[:20]], TOKENS, each=clock.tick)[0] == expected
        if kinds[1] is HandOver:
            assert bool(got.stats["failed"]) == (fault in ("truncate", "drop", "stall"))
            assert bool(got.stats["corrupt"]) == (fault == "truncate")
            assert bool(got.stats["out of order"] + got.stats["strange"]) == (fault == "duplicate")


def test_a_prompt_fails_where_its_request_asks_for_that(tiny_model):
    with pair(tiny_model, "TCPConnector", "fail", kinds=PAIRS[0], extra={"timeout": 0.1}) as (prefill, decode):
        prefill.scheduler.connector.wire = Faults("stall", after=0)
        submit(prefill, decode, "a", PROMPT, TOKENS)
        tokens, reason, why = drain(prefill, decode)["a"]
        assert (tokens, reason) == ([], "error") and "no progress for 0.1 s" in why


def test_a_lease_begins_when_the_prompt_is_computed(tiny_model, clock):
    """Nobody comes: the blocks stay for as long as the lease, and not longer."""
    connector = HandOver(KVTransferConfig("TCPConnector", "kv_producer", kv_port=0))
    core = make_core(tiny_model, connector)
    core.add_request(make_request("a", PROMPT, 1, do_remote_decode=True, transfer_id="x"))
    core.step()
    pool = core.scheduler.kv_cache_manager.block_pool
    for clock.now, kept in ((129.9, 3), (130.0, 0)):
        core.step()
        assert pool.num_blocks - 1 - pool.num_free_blocks == kept and bool(connector.promises) == bool(kept)
    assert not core.scheduler.has_unfinished_requests()
    connector.close()


@by_pair
@pytest.mark.parametrize("who", ["decode", "prefill"])
def test_a_client_that_leaves(who, kinds, tiny_model, expected):
    """On one side, while its prompt is on its way: no block is kept on either side, and the next one is served."""
    with pair(tiny_model, "TCPConnector", "recompute", kinds=kinds, extra={"timeout": 0.3}) as (prefill, decode):
        sent = prefill.scheduler.connector
        sent.wire = Faults("stall", after=1)
        submit(prefill, decode, "a", PROMPT, TOKENS)
        decode.step()
        until(lambda: not sent.inbox.empty())
        if who == "decode":
            prefill.step()
            decode.abort_requests(["a"])
            drain(prefill, decode)
        else:
            prefill.abort_requests(["a"])
            assert drain(prefill, decode)["a"][0] == expected
        sent.wire = None
        assert handed_over(prefill, decode, [PROMPT], TOKENS) == [expected]


def test_who_does_not_want_it_any_more_says_so_before_it_is_computed(tiny_model):
    with pair(tiny_model, "TCPConnector", kinds=PAIRS[0]) as (prefill, decode):
        submit(prefill, decode, "a", PROMPT, TOKENS)
        decode.step()
        decode.abort_requests(["a"])
        drain(decode)
        until(lambda: prefill.scheduler.connector.inbox.qsize() == 2)  # GET, CANCEL
        drain(prefill)
        assert not prefill.scheduler.connector.stats["messages"]


def test_an_engine_that_vanishes_leaves_nothing_behind(tiny_model, expected):
    for gone in range(2):
        sides = pair(tiny_model, "TCPConnector", "recompute", kinds=PAIRS[0])
        with sides as (prefill, decode):
            prefill.scheduler.connector.wire = Faults("stall", after=1)
            submit(prefill, decode, "a", PROMPT, TOKENS)
            decode.step()
            until(lambda: not prefill.scheduler.connector.inbox.empty())
            prefill.step()
            sides.cores.pop(gone).scheduler.connector.close()
            (left,) = sides.cores
            found = drain(left)
            assert gone == 1 or found["a"][0] == expected
            assert not left.scheduler.connector.promises and not left.scheduler.connector.pulls


def test_another_model_is_refused(tiny_model, expected):
    other = llama.random_model(seed=SEED + 1)
    with pair(other, "TCPConnector", "recompute", decode_model=tiny_model, kinds=PAIRS[0]) as (prefill, decode):
        assert handed_over(prefill, decode, [PROMPT], TOKENS) == [expected]
        assert decode.scheduler.connector.stats["bytes_in"] == 0


@pytest.mark.parametrize("wrong", [{"layer": 2}, {"count": 46}, {"head": 1}, {"heads": 1}, {"first": 1}])
def test_a_rectangle_that_nobody_asked_for_is_not_written(wrong, tiny_model):
    connector = HandOver(KVTransferConfig("TCPConnector", "kv_consumer"))
    make_core(tiny_model, connector)
    link, request = SimpleNamespace(send=lambda *_: None), make_request("r", PROMPT, 1)
    connector.pulls["x"] = lesson.Pull(request, [1, 2, 3], [0, 0], 45, link, 1e9)
    header = {"kind": "KV", "transfer": "x", "layer": 0, "first": 0, "count": 45, "head": 0, "heads": 2, "crc": 0}
    connector.hear(link, header | wrong, torch.zeros(2 * 45 * 2 * 16 * 4, dtype=torch.uint8))
    connector.hear(SimpleNamespace(), header, None)  # not from where it was asked
    assert connector.pulls["x"].have == [0, 0] and not connector.stats["bytes_in"] and len(connector.stats) >= 1


def test_a_request_has_this_life(tiny_model, expected):
    """The connector's verbs in order; which blocks, and which positions."""
    tokens, diary = lesson.one_life(tiny_model, PROMPT, TOKENS)
    assert tokens == expected
    assert diary == [
        ("decode", "update_state_after_alloc", "45 tokens are to come into blocks [1, 2]"),
        ("decode", "start_load_kv", "GET positions 0 to 44 of 2 layers"),
        ("prefill", "save_kv_layer", "layer 0: KV of positions 0 to 44 leaves"),
        ("prefill", "save_kv_layer", "layer 1: KV of positions 0 to 44 leaves"),
        ("prefill", "request_finished", "the prompt is computed, blocks [1, 2, 3] are kept"),
        ("decode", "get_finished", "2 layers have arrived: DONE"),
        ("prefill", "get_finished", "blocks [1, 2, 3] are freed"),
    ]


# --- The router ------------------------------------------------------------------------------------------------------


class FakeWorker:
    """A worker's pipe, and what came through it."""

    def __init__(self, name):
        self.name, self.alive, self.address, self.letters = name, True, {"remote_host": name, "remote_port": 1}, []
        self.pipe, self.theirs = multiprocessing.Pipe()
        self.process = SimpleNamespace(join=lambda timeout: None, exitcode=-9)
        self.script: dict[str, list] = {}  # what it does when it hears of a request

    def send(self, *letter):
        self.letters.append(letter)
        for reply in self.script.pop(letter[1], ()):
            reply()

    def say(self, name, tokens, reason=None, why=None):
        self.theirs.send(("output", name, tokens, reason, why))

    def die(self):
        self.theirs.close()


def test_the_router_hands_a_request_to_both():
    prefill, decode = FakeWorker("p"), FakeWorker("d")
    router = lesson.Router(prefill, decode)
    router.submit("a", [1, 2, 3], 2)
    assert prefill.letters == [("add", "a.1", [1, 2, 3], 1, {"do_remote_decode": True, "transfer_id": "a.1"})]
    kind, name, prompt, n, params = decode.letters[0]
    assert (kind, name, prompt, n) == ("add", "a.1", [1, 2, 3], 2)
    assert params == {"do_remote_prefill": True, "transfer_id": "a.1", "remote_host": "p", "remote_port": 1}
    prefill.say("a.1", [7], "length")
    decode.say("a.1", [7])
    decode.say("a.1", [8], "length")
    heard = []
    (job,) = router.run(10, on_token=lambda job: heard.append(len(job.token_ids)))
    assert job.request_id == "a" and job.token_ids == [7, 8] and heard == [1, 2] and router.events == []
    assert 0 < job.prefilled < 10 and 0 < job.first < 10, "seconds since it was submitted"


def test_letters_for_an_earlier_router_are_passed_over():
    """The decode worker was quicker: the first router has its answer, and the prefill worker has yet to be heard."""
    prefill, decode = FakeWorker("p"), FakeWorker("d")
    for name in "ab":
        router = lesson.Router(prefill, decode)
        router.submit(name, [1, 2], 1)
        decode.say(f"{name}.1", [7], "length")
        assert router.run(10)[0].token_ids == [7]
        prefill.say(f"{name}.1", [7], "length")
    prefill.say("c", [9], "length")
    assert page.hear(prefill, "c") == ([9], "length", None)


def test_an_answer_goes_on_elsewhere_when_its_worker_dies():
    prefill, decode = FakeWorker("p"), FakeWorker("d")
    router = lesson.Router(prefill, decode)
    job, other = router.submit("a", [1, 2], 3), router.submit("b", [5], 1)
    decode.say("b.1", [9], "length")
    decode.say("a.1", [7])
    decode.die()
    prefill.script["a.2"] = [lambda: prefill.say("a.2", [8]), lambda: prefill.say("a.2", [6], "length")]
    router.run(10)
    assert job.token_ids == [7, 8, 6] and other.token_ids == [9]
    assert ("abort", "a.1") in prefill.letters, "its blocks over there are not kept for the dead"
    assert prefill.letters[-1] == ("add", "a.2", [1, 2, 7], 2, {}), "what was said is part of the prompt"
    assert router.events == ["d died (signal SIGKILL)"]


def test_an_answer_that_is_complete_stays_as_it_is():
    """Whatever its worker says afterwards, and even if it dies: others are still at work."""
    prefill, decode = FakeWorker("p"), FakeWorker("d")
    router = lesson.Router(prefill, decode)
    done, other = router.submit("a", [1], 1), router.submit("b", [5], 4)
    decode.say("a.1", [7], "length"), decode.say("a.1", [8], "length")
    decode.die()
    prefill.script["b.2"] = [lambda: [prefill.say("b.2", [token]) for token in range(4)]]
    router.run(10)
    assert not decode.alive and done.token_ids == [7] and done.attempts == 1
    assert other.token_ids == [0, 1, 2, 3]


def test_nothing_of_an_attempt_that_was_given_up_is_heard():
    prefill, decode = FakeWorker("p"), FakeWorker("d")
    router = lesson.Router(prefill, decode)
    job = router.submit("a", [1], 1)
    decode.say("a.1", [], "error", "KV load failed: x"), decode.say("a.1", [3]), decode.say("a.2", [9], "length")
    router.run(10)
    assert job.token_ids == [9] and decode.letters[-1] == ("add", "a.2", [1], 1, {}), "it computes the prompt itself"


def test_a_dead_prefill_worker_gets_no_more_work():
    prefill, decode = FakeWorker("p"), FakeWorker("d")
    router = lesson.Router(prefill, decode)
    prefill.die()
    router.submit("a", [1], 1)
    with pytest.raises(common.CheckFailed, match=r"anything for 0\.05 s"):
        router.run(0.05)
    assert router.events == ["p died (signal SIGKILL)"]
    router.submit("b", [1], 1)
    assert len(prefill.letters) == 1 and decode.letters[-1] == ("add", "b.1", [1], 1, {})


def test_errors_are_retried_and_then_told():
    prefill, decode = FakeWorker("p"), FakeWorker("d")
    router = lesson.Router(prefill, decode)
    job = router.submit("a", [1], 1)
    for attempt in (1, 2):
        decode.say(f"a.{attempt}", [], "error", f"no. {attempt}")
    decode.say("a.1", [3], "length")  # of an attempt that was given up
    router.run(10)
    assert job.token_ids == [] and job.error == "no. 2" and router.events == ["a.1: no. 1"]


def test_without_a_decode_worker_the_prefill_worker_goes_on_and_without_any_there_is_an_error():
    prefill, decode = FakeWorker("p"), FakeWorker("d")
    router = lesson.Router(prefill, decode)
    job = router.submit("a", [1], 2)
    prefill.script["a.2"] = [lambda: prefill.say("a.2", [4]), prefill.die]
    decode.die()
    router.run(10)
    assert prefill.letters[-1] == ("add", "a.2", [1], 2, {})
    assert job.token_ids == [4] and job.error == "no worker is left"


# --- Workers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [HandOver, TCPConnector])
def test_a_worker_ends_with_whoever_started_it(make, tiny_model, monkeypatch):
    """A fork holds copies of its parent's ends, of its own pipe and of its partners': with them open, nobody's death
    would ever be seen."""
    monkeypatch.setattr(workers.signal, "signal", lambda *_: None)
    (ours, theirs), (inherited, _) = multiprocessing.Pipe(), multiprocessing.Pipe()
    ours.close()
    made = []
    config = {"kv_connector": "TCPConnector", "kv_role": "kv_producer", "kv_port": 0}
    workers.run_worker(theirs, [inherited], tiny_model, lambda c: made.append(make(c)) or made[-1], config, {})
    (connector,) = made
    assert inherited.closed and connector.server.fileno() == -1


def test_a_worker_with_any_connector_answers(tiny_model, monkeypatch, tmp_path):
    """A store has no mail to look for, so its worker waits for its next letter only."""
    monkeypatch.setattr(workers.signal, "signal", lambda *_: None)
    store = {"kv_connector": "StoreConnector", "kv_role": "kv_both",
             "kv_connector_extra_config": {"folder": str(tmp_path / "store")}}  # fmt: skip
    for config in (store, {"kv_connector": "TCPConnector", "kv_role": "kv_consumer"}):
        ours, theirs = multiprocessing.Pipe()
        make = CONNECTORS[config["kv_connector"]]
        worker = threading.Thread(
            target=workers.run_worker, args=(theirs, [], tiny_model, make, config, {}), daemon=True
        )
        worker.start()
        ours.send(("add", "a", PROMPT, 3, {}))
        assert ours.recv()[0] == "ready"
        tokens, finish_reason = [], None
        while finish_reason is None:
            assert ours.poll(20), "it waits for another letter"
            _, name, new, finish_reason, _ = ours.recv()
            tokens += new
        assert (name, tokens, finish_reason) == ("a", generated(tiny_model, PROMPT, 3), "length")
        ours.close()
        worker.join(20)
        assert not worker.is_alive()


@pytest.mark.parametrize("make", [HandOver, TCPConnector])
def test_a_worker_says_what_it_holds_and_whether_its_books_are_right(make, tiny_model):
    core = make_core(tiny_model, make(KVTransferConfig("TCPConnector", "kv_consumer")))
    pool = core.scheduler.kv_cache_manager.block_pool
    blocks = pool.allocate(3)
    assert workers.worker_stats(core)["owned_blocks"] == 3
    worker = SimpleNamespace(name="w", ask=lambda _: workers.worker_stats(core))
    with pytest.raises(common.CheckFailed, match="w: 3 blocks are still owned"):
        settled(worker, 0.02)
    pool.free_queue[blocks[0]] = None
    with pytest.raises(AssertionError):
        workers.worker_stats(core)


@contextlib.contextmanager
def two_workers(model, make, block_size, **extra):
    """In processes of their own, until the end of the block."""
    waits = {"kv_connector_extra_config": extra}
    prefill = Worker("prefill", model, lesson.PREFILL, make=make, block_size=16)
    decode = Worker("decode", model, lesson.DECODE | waits, make=make, block_size=block_size)
    try:
        prefill.address, decode.address = prefill.ask(), decode.ask()
        yield prefill, decode
    finally:
        prefill.stop(), decode.stop()
    assert not decode.process.is_alive()


@pytest.mark.parametrize("make", [HandOver, TCPConnector])
def test_real_processes_and_a_real_death(make, tiny_model):
    """Two workers; the prefill worker kills itself in the middle of a transfer. Every answer is one engine's."""
    prompts = [PROMPT[i:] for i in range(8)]
    with two_workers(SEED, make, 8) as (prefill, decode):
        prefill.send("fault", "prefill-dies")
        decode.send("add", "too long", range(600), 1, {})
        kind, name, tokens, reason, why = decode.pipe.recv()
        assert (kind, name, tokens, reason) == ("output", "too long", [], "error") and "The decoder prompt" in why
        decode.send("add", "leaves", PROMPT, 400, {})
        decode.pipe.recv()
        decode.send("abort", "leaves")
        assert decode.ask("stats")["owned_blocks"] == 0
        jobs, events = lesson.disaggregated(prefill, decode, prompts, 6)
        assert [job.token_ids for job in jobs] == lesson.colocated(tiny_model, prompts, 6)
        assert events == ["prefill died (signal SIGKILL)"] and not prefill.process.is_alive()
        prefill.send("abort", "whatever")  # in vain
        assert settled(decode, 60)["failed" if make is HandOver else "consumer_failed"] >= 1


@pytest.mark.parametrize(("layers", "fault"), [(1, "prefill-dies"), (2, "truncate"), (3, "drop")])
@pytest.mark.parametrize("make", [HandOver, TCPConnector])
def test_a_bad_day_comes_to_a_model_of_few_layers_too(make, layers, fault):
    """Three prompts are as many messages as three times the layers: what happens must happen before the last."""
    model, prompts = llama.random_model(SEED, num_hidden_layers=layers), [PROMPT[i:] for i in range(3)]
    with two_workers(model, make, 16, timeout=0.2, retries=1) as (prefill, decode):
        prefill.send("fault", fault)
        jobs, events = lesson.disaggregated(prefill, decode, prompts, 4)
        assert [job.token_ids for job in jobs] == lesson.colocated(model, prompts, 4)
        stats = settled(decode, 20)
        assert events == ["prefill died (signal SIGKILL)"] * (fault == "prefill-dies")
        if make is HandOver:
            assert stats["failed"] >= 1 and (stats.get("corrupt", 0) > 0) == (fault == "truncate")
            return
        assert fault == "prefill-dies" or stats["consumer_retries"] >= 1
        assert (stats.get("consumer_corrupt", 0) > 0) == (fault == "truncate")


# --- The story -------------------------------------------------------------------------------------------------------


def test_what_the_last_table_says_is_goodputs():
    """Chunks that fit and the right split are in time, the wrong split and a slow link never are; a little of what a
    step was believed to hide, and chunks are no better than whole prompts."""
    share = {what: [float(lesson.in_time(*what, exposed=e)[0].rstrip("%")) for e in (0, 25)] for what in (
        ("4PD",), ("4PD", 224), ("1P3D",), ("3P1D",), ("3P1D", None, "10 GbE"))}  # fmt: skip
    assert share["4PD", 224][0] >= 90 and share["3P1D",][0] >= 90 > share["4PD",][0]
    assert share["1P3D",][0] < share["4PD",][0] and share["3P1D", None, "10 GbE"] == [0, 0]
    assert share["4PD", 224][1] < 60 and share["3P1D",][1] >= 90


def test_a_model_with_a_short_context_is_named(tmp_path):
    """Nobody has set a max_model_len; and a context of 512 is what the engines take."""
    shape = dict(hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                 num_key_value_heads=1, head_dim=24)  # fmt: skip
    folder = on_gpu.random_folder(tmp_path / "model", **shape, max_position_embeddings=256)
    with pytest.raises(common.InputError) as refused:
        lesson.main(["--model", str(folder)])
    assert str(refused.value) == "--model: a context of 256 tokens is too short; this story takes 512"
    assert inspect.signature(make_core).parameters["max_model_len"].default == 512


# --- Facts -----------------------------------------------------------------------------------------------------------


def test_facts_are_consistent():
    found = page.facts()
    assert found["prompt_bytes"] == 1 << 30 and found["kv_bytes"]["smollm2_fp32"] == 2 * 30 * 3 * 64 * 4
    assert found["faults"]["none"]["seconds"] == 0 and found["sharing"]["16_to_2"]["unread"] == 8


def test_the_parts_of_the_widgets_times_to_first_token_add_up(capsys):
    page.show_simulation()
    assert "✓ queue + prefill + transfer + first step = TTFT, for every request" in capsys.readouterr().out


def test_of_latents_half_the_bytes_move(monkeypatch, capsys):
    """They are key and value in one; the story counts what has moved."""
    model = latent_model()
    with pair(model, "TCPConnector") as (prefill, decode):
        found = handed_over(prefill, decode, [PROMPT], 4)
        there, here = ({"messages": 0, "early": 0, **counts(core)} for core in (prefill, decode))
    assert found == [generated(model, PROMPT, 4)]
    monkeypatch.setattr(lesson, "LENGTHS", [len(PROMPT)])
    monkeypatch.setattr(lesson, "settled", lambda worker: worker)
    jobs = [SimpleNamespace(token_ids=found[0], prefilled=0.1, first=0.2)]
    monkeypatch.setattr(lesson, "disaggregated", lambda *_: (jobs, []))
    lesson.show_good_day(there, here, model, [PROMPT], found)
    assert f"{len(PROMPT)} positions × 384 bytes have moved, no more" in capsys.readouterr().out
