"""Lesson 04: who runs when, what the model is given, and that nobody's tokens depend on the company they keep."""

from __future__ import annotations

import common

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import registry
from engine.config import SchedulerConfig, VllmConfig
from engine.core.engine_core import EngineCore
from engine.core.queues import PriorityRequestQueue
from engine.core.scheduler import make_scheduler
from engine.model import llama
from engine.model.packed_linear import PackedLinear, pack_weights, packs
from engine.request import Request, RequestStatus, SamplingParams, check_stop
from engine.worker.input_batch import InputBatch
from lab import cli
from support.broken import break_class
from support.cases import named
from support.close import assert_close
from support.runners import runner_of

lesson, page = registry.lesson("04_continuous_batching"), cli.numbers("04_continuous_batching")
paged = registry.lesson("02_paged_attention")


def whole(max_model_len, max_num_seqs, max_num_batched_tokens, **about):
    """Limits of a scheduler that computes whole prompts."""
    return SchedulerConfig(max_model_len, max_num_seqs, max_num_batched_tokens, enable_chunked_prefill=False, **about)


lengths = st.lists(st.integers(1, 20), min_size=1, max_size=24)


# --- Static against continuous --------------------------------------------------------------------------------------


@given(lengths, st.integers(1, 6))
def test_step_counts_are_the_naive_ones(outputs, slots):
    static, continuous = (page.timeline(policy, slots, outputs) for policy in ("static", "continuous"))
    assert static.makespan == lesson.static_steps(slots, outputs)
    assert continuous.makespan == lesson.continuous_steps(slots, outputs)
    assert continuous.makespan <= static.makespan


def check_run(run, outputs, arrivals, slots):
    """Conservation, whoever scheduled: each request sits in one seat, without a gap, for as long as it is."""
    assert run.busy == sum(outputs) and all(len(lanes) == slots for lanes in run.lanes)
    for i, (seat, start, stop) in enumerate(run.spans):
        assert stop - start == outputs[i] and start >= arrivals[i]
        assert [lanes[seat] for lanes in run.lanes[start:stop]] == [i] * outputs[i]
        assert sum(i in lanes for lanes in run.lanes) == outputs[i]
    assert page.lower_bound(slots, outputs, arrivals) <= run.makespan


@given(lengths, st.integers(1, 6), st.integers(0, 9), st.sampled_from(["static", "continuous"]))
def test_nothing_is_lost(outputs, slots, gap, policy):
    arrivals = [gap * i for i in range(len(outputs))]
    check_run(page.timeline(policy, slots, outputs, arrivals=arrivals), outputs, arrivals, slots)


@given(lengths, st.integers(1, 6))
def test_equal_and_sorted_lengths_gain_nothing(outputs, slots):
    """Static batching is optimal for equal lengths. Longest first, it takes as long as each batch's first."""
    equal = [outputs[0]] * (slots * len(outputs))
    assert {page.timeline(p, slots, equal).makespan for p in page.POLICIES} == {outputs[0] * len(outputs)}
    alike = [n for n in outputs for _ in range(slots)]  # sorted so that every batch holds equal lengths
    assert {page.timeline(p, slots, alike).makespan for p in page.POLICIES} == {sum(outputs)}


def test_every_state_of_the_widget():
    for values in itertools.product(page.SEATS, page.LENGTHS, page.ARRIVALS):
        params = dict(zip(("slots", "lengths", "arrivals"), values))
        trace = page.simulate(params)
        for run in (trace[policy] for policy in page.POLICIES):
            assert run["busy"] == sum(trace["outputs"]) and run["cells"] == run["makespan"] * params["slots"]
            assert run["bound"] <= run["makespan"] == len(run["steps"])
            for i, (slot, start, stop) in enumerate(run["spans"]):
                assert stop - start == trace["outputs"][i] and start >= trace["arrivals"][i]
                assert all(step["slots"][slot] == i for step in run["steps"][start:stop])
            for at, step in enumerate(run["steps"]):
                arrived = sum(arrival <= at for arrival in trace["arrivals"])
                started = sum(start <= at for _, start, _ in run["spans"])
                assert step["waiting"] == arrived - started
        assert trace["continuous"]["makespan"] <= trace["static"]["makespan"]


def test_a_broken_scheduler_breaks_the_simulation(monkeypatch):

    def simulate():
        return page.simulate(page.WIDGET_DEFAULT)["continuous"]

    right = simulate()
    with monkeypatch.context() as patch:  # one seat stays empty
        break_class(patch, lesson.Scheduler, "while self.waiting and seats > 0", "while self.waiting and seats > 1")
        assert simulate()["makespan"] > right["makespan"]
    with monkeypatch.context() as patch:  # one token too many
        patch.setattr(lesson, "check_stop", lambda r, n: r.num_output_tokens > r.max_tokens and check_stop(r, n))
        assert simulate()["busy"] > right["busy"]
    with monkeypatch.context() as patch:  # the last in the queue is the first
        patch.setattr(lesson.FCFSRequestQueue, "add_request", lesson.FCFSRequestQueue.prepend_request)
        assert simulate()["spans"] != right["spans"]


def test_static_batching_uses_one_over_the_harmonic_number():
    """For geometric lengths: mean ÷ expected maximum of `slots` lengths → 1/H. Twenty times the lesson's sample."""
    outputs = page.geometric(10_240, 64, seed=5)
    for slots in (2, 4, 8, 32):
        used = sum(outputs) / (slots * lesson.static_steps(slots, outputs))
        assert used == pytest.approx(1 / sum(1 / k for k in range(1, slots + 1)), rel=0.04)


def test_a_slot_cache_is_a_paged_cache_with_huge_blocks():
    found = page.facts()["reserved"]
    assert found["reserved"]["most"] == found["pool_tokens"] // found["max_model_len"]
    assert found["paged"]["most"] > 3 * found["reserved"]["most"] and found["gain"] > 2


def test_a_request_takes_no_slot_for_its_last_token():
    """100 + 29 − 1 tokens are 8 blocks of 16; one more asks for a ninth. Two of the first kind fit into 16."""
    for max_tokens, blocks, together in ((29, 8, 2), (30, 9, 1)):
        manager = lesson.KVCacheManager(17, 16, 256)
        scheduler = lesson.Scheduler(whole(256, 2, 256), manager)
        requests = lesson.make_requests([[0] * 100] * 2, [max_tokens] * 2)
        most = 0

        def watched(output):
            nonlocal most
            most = max(most, *map(len, output.block_tables.values()))
            return lesson.no_model(output)

        run = lesson.engine_loop(scheduler, watched, requests)
        assert most == blocks and max(map(len, run.batches)) == together


def test_blocks_are_taken_when_they_are_needed_and_promised_before():
    """Whoever is admitted can go on to its last token, though it has no more blocks than it needs now."""
    manager = lesson.KVCacheManager(9, 4, 32)
    scheduler = lesson.Scheduler(whole(32, 4, 32), manager)
    for request in lesson.make_requests([[0]] * 3, [17, 16, 3]):  # 5, 4 and 1 blocks in their lives
        scheduler.add_request(request)
    assert [*scheduler.schedule().num_scheduled_tokens] == ["0"], "the second must wait, and nobody overtakes it"
    assert manager.req_to_blocks == {"0": [1]} and manager.block_pool.num_free_blocks == 7


@given(lengths, st.integers(2, 9))
def test_whoever_runs_never_finds_the_pool_empty(outputs, blocks):
    """By construction; were it not so, `allocate_slots` would return None, and nobody would look."""
    manager = lesson.KVCacheManager(max(blocks, 7), 4, 21)
    took = manager.allocate_slots

    def allocate_slots(*about):
        new = took(*about)
        assert new is not None
        return new

    manager.allocate_slots = allocate_slots
    requests = lesson.make_requests([[0]] * len(outputs), outputs)
    run = lesson.engine_loop(lesson.Scheduler(whole(21, 5, 21), manager), lesson.no_model, requests)
    assert sum(map(len, run.batches)) == sum(outputs) and not manager.req_to_blocks
    manager.block_pool.check()


# --- What the model is given ----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=6), st.integers(1, 5))
def test_prepared_inputs_are_those_of_lesson_02(shapes, block_size):
    """Rows in any order, prompts beside decodes, chunks in the middle: the arrays equal the obvious ones."""
    rng = random.Random(len(shapes))
    batch = InputBatch(len(shapes) + 2, 40, block_size)
    rng.shuffle(batch.free_rows)
    pool = iter(rng.sample(range(1, 1000), 300))
    requests, tables, rows = [], [], []
    for i, (new, before) in enumerate(shapes):
        request = Request(str(i), [rng.randrange(99) for _ in range(new + before + 2)], SamplingParams(temperature=0))
        table = [next(pool) for _ in range(-(-(new + before) // block_size))]
        batch.add(str(i))
        batch.update(request, table[: len(table) // 2])  # it grows
        rows.append(batch.update(request, table))
        requests.append(request)
        tables.append(table)
    query_lens, seq_lens = [new for new, _ in shapes], [new + before for new, before in shapes]
    token_ids, meta = batch.prepare(rows, query_lens, seq_lens, torch.device("cpu"))
    want = paged.AttentionMetadata.build(tables, seq_lens, query_lens, block_size, torch.device("cpu"))
    for name in ("positions", "slot_mapping", "query_start_loc", "seq_lens", "block_table"):
        ours, theirs = getattr(meta, name), getattr(want, name)
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name
    assert (meta.query_lens, meta.max_seq_len) == (want.query_lens, want.max_seq_len)
    known = [t for r, n, S in zip(requests, query_lens, seq_lens) for t in r.all_token_ids[S - n : S]]
    assert token_ids.tolist() == known  # flattened, no padding


def test_a_row_forgets_its_last_request():
    batch = InputBatch(1, 64, 4)
    batch.add("long")
    batch.update(Request("long", [7] * 40, SamplingParams()), list(range(1, 11)))
    batch.remove("long")
    batch.remove("long")  # unknown by now: passed over
    batch.add("short")
    row = batch.update(Request("short", [8, 9], SamplingParams()), [11])
    token_ids, meta = batch.prepare([row], [2], [2], torch.device("cpu"))
    assert token_ids.tolist() == [8, 9] and meta.block_table.tolist() == [[11]]
    assert not batch.block_table[row, 1:].any() and not batch.free_rows


def test_a_step_reads_only_what_is_new():
    """No per-sequence work that grows with the context: after 500 tokens a step copies one."""

    class Watched(list):
        read = 0

        def __getitem__(self, index):
            found = super().__getitem__(index)
            Watched.read += len(found) if isinstance(index, slice) else 1
            return found

    batch = InputBatch(1, 1024, 16)
    request = Request("a", [1] * 500, SamplingParams())
    request.all_token_ids, blocks = Watched(request.all_token_ids), Watched(range(1, 40))
    batch.add("a")
    batch.update(request, blocks)
    Watched.read = 0
    for _ in range(20):
        request.append_output_token_id(2)
        batch.update(request, blocks)
    assert Watched.read == 20


@pytest.mark.parametrize("library", ["MKL", "oneDNN"], indirect=True)
def test_a_product_with_a_packed_matrix_is_the_same_product(library):
    """Whose library it is depends on the processor; the weights are packed once, for any number of rows."""
    for N, K in ((17, 80), (64, 33), (576, 1536)):
        for bias in (None, torch.randn(N)):
            layer = llama.Linear(torch.randn(N, K), bias)
            packed = PackedLinear(layer.weight, layer.bias)
            assert packed.mkl == (library == "MKL")
            for shape in ((0, K), (1, K), (2, K), (31, K), (33, K), (3, 5, K), (128, K), (129, K), (3, 64, K)):
                x = torch.randn(shape)
                with torch.inference_mode():
                    assert_close(packed(x), layer(x))


def check_weights_of_16_bits(monkeypatch):
    """oneDNN's are packed, on Intel's processors too, and any number of rows is multiplied with what was packed."""
    cpu = torch.device("cpu")
    model = llama.random_model(seed=3, dtype=torch.bfloat16, device=cpu)
    packed = pack_weights(model)
    for name, layer in packed.linear.items():
        assert isinstance(layer, PackedLinear) and not layer.mkl
        for rows in (1, 5, 129):
            x = torch.randn(rows, layer.weight.shape[1]).bfloat16()
            with torch.inference_mode():
                assert_close(layer(x), model.linear[name](x))
    half = llama.random_model(seed=3, dtype=torch.float16, device=cpu)
    assert pack_weights(half) is half
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert pack_weights(model) is model


@pytest.mark.parametrize("library", ["MKL", "oneDNN"], indirect=True)
def test_weights_of_16_bits_are_packed_where_they_can_be(library, monkeypatch):
    if not packs(torch.device("cpu"), torch.bfloat16):
        pytest.skip("no product of packed matrices in bf16 here; the next test has a stand-in")
    check_weights_of_16_bits(monkeypatch)


@pytest.mark.parametrize("library", ["MKL", "oneDNN"], indirect=True)
def test_weights_of_16_bits_are_packed_where_the_processor_could(library, packs_16_bits, monkeypatch):
    check_weights_of_16_bits(monkeypatch)


def test_packed_weights_are_the_same_matrix_and_leave_the_model_alone(library):
    model = llama.random_model(seed=3, device=torch.device("cpu"))
    before = dict(model.linear)
    packed = pack_weights(model)
    assert model.linear == before and packed.embed_tokens is model.embed_tokens
    assert (packed is model) == (library == "neither")
    for name, layer in packed.linear.items():
        for rows in (1, 2, 33):
            x = torch.randn(rows, layer.weight.shape[1])
            with torch.inference_mode():
                assert_close(layer(x), before[name](x))
    replaced = llama.random_model(seed=3, device=torch.device("cpu"))
    replaced.linear["lm_head"] = mine = lambda x: x
    assert pack_weights(replaced).linear["lm_head"] is mine
    assert pack_weights(packed).linear == packed.linear, "packing twice packs once"


# --- Nobody's tokens depend on the company --------------------------------------------------------------------------


def tiny_engine(model, policy="continuous", seats=4, num_blocks=200, block_size=4):
    """The lesson's scheduler, and a runner that fits it."""
    manager = lesson.KVCacheManager(num_blocks, block_size, 96)
    scheduler = lesson.Scheduler(whole(96, seats, 4096), manager, static=policy == "static")
    return scheduler, runner_of(model, scheduler, VllmConfig(attention_backend="paged", enforce_eager=True))


def random_requests(rng, count):
    return [([rng.randrange(128) for _ in range(rng.randint(1, 30))], rng.randint(1, 12)) for _ in range(count)]


def run_with_arrivals(scheduler, runner, requests, arrivals):
    """Add each request before the step of its arrival; returns the tokens of each."""
    made = lesson.make_requests([prompt for prompt, _ in requests], [n for _, n in requests], arrivals)
    steps = 0

    def execute_model(output):
        nonlocal steps
        steps += 1
        assert steps < 1000, "whoever waits will wait for ever"
        return runner.execute_model(output).sampled_token_ids

    lesson.engine_loop(scheduler, execute_model, sorted(made, key=lambda request: request.arrival_time))
    pool = scheduler.kv_cache_manager.block_pool
    pool.check()
    assert pool.num_free_blocks == pool.num_blocks - 1
    return [request.output_token_ids for request in made]


@pytest.mark.parametrize(
    ("policy", "seed"),
    [*(("continuous", seed) for seed in range(4)), ("static", 0), ("static", 1),
     *(pytest.param("static", seed, marks=pytest.mark.slow) for seed in (2, 3))],
)  # fmt: skip
def test_any_batch_gives_each_request_its_tokens(tiny_model, policy, seed):
    rng = random.Random(seed)
    requests = random_requests(rng, 9)
    alone = [lesson.generate_alone(tiny_model, prompt, n) for prompt, n in requests]
    arrivals = [rng.randint(0, 6) for _ in requests]
    block_size = (4, 1, 3, 16)[seed]
    num_blocks = 1 + -(-96 // block_size) + rng.randint(0, 30)  # from just one longest sequence to plenty
    engine = tiny_engine(tiny_model, policy, rng.randint(2, 5), num_blocks, block_size)
    assert run_with_arrivals(*engine, requests, arrivals) == alone


@pytest.mark.parametrize("seed", range(3))
def test_chunks_and_preemptions_change_no_token(tiny_model, seed):
    """The same loop and runner under the engine's scheduler: too small a pool, and a budget that cuts prompts."""
    rng = random.Random(seed)
    requests = random_requests(rng, 8)
    alone = [lesson.generate_alone(tiny_model, prompt, n) for prompt, n in requests]
    config = SchedulerConfig(max_model_len=44, max_num_seqs=6, max_num_batched_tokens=11)
    scheduler = make_scheduler(config, num_blocks=13, block_size=4)
    preempted = []
    monitored = scheduler._preempt_request
    scheduler._preempt_request = lambda victim, output: (preempted.append(victim), monitored(victim, output))
    assert run_with_arrivals(scheduler, runner_of(tiny_model, scheduler), requests, [0] * 8) == alone
    assert preempted


def test_the_engine_runs_the_kernels(tiny_model, kernels):
    """Under `use_kernels` the step goes through lesson 02's Triton kernels, with the same tokens."""
    requests = [([5, 9, 2], 3), ([7] * 5, 2)]
    alone = [lesson.generate_alone(tiny_model, prompt, n) for prompt, n in requests]
    before = paged.paged_decode_kernel.launches, paged.reshape_and_cache_kernel.launches
    assert run_with_arrivals(*tiny_engine(tiny_model, num_blocks=30), requests, [0, 1]) == alone
    assert paged.paged_decode_kernel.launches > before[0] and paged.reshape_and_cache_kernel.launches > before[1]


def test_aborted_requests_leave_at_once(tiny_model):
    scheduler, runner = tiny_engine(tiny_model, seats=3)
    prompts = [prompt for prompt, _ in random_requests(random.Random(1), 5)]
    requests = lesson.make_requests(prompts, [20] * 5)

    def execute_model(output):
        sampled = runner.execute_model(output).sampled_token_ids
        if (step := len(requests[0].output_token_ids)) == 2:  # one is in the step that runs, one waits
            ended = scheduler.finish_requests(["1", "4", "4", "unknown"], RequestStatus.FINISHED_ABORTED)
            assert [(r.request_id, r.is_finished(), r.get_finished_reason()) for r in ended] == [
                ("1", True, "abort"), ("4", True, "abort")]  # fmt: skip
        assert ("1" in output.num_scheduled_tokens) == (step <= 2)
        return sampled

    lesson.engine_loop(scheduler, execute_model, requests)
    assert len(requests[1].output_token_ids) == 2 and requests[4].output_token_ids == []
    for i in (0, 2, 3):
        assert requests[i].output_token_ids == lesson.generate_alone(tiny_model, prompts[i], 20)
    runner.execute_model(scheduler.schedule())  # the runner hears of the last ones
    pool = scheduler.kv_cache_manager.block_pool
    assert runner.batch.rows == {} and pool.num_free_blocks == pool.num_blocks - 1


def test_priorities_decide_who_is_next():
    scheduler = lesson.Scheduler(whole(96, 1, 96, policy="priority"), lesson.KVCacheManager(50, 4, 96))
    requests = [
        Request(name, [1, 2], SamplingParams(max_tokens=2), priority=priority, arrival_time=0)
        for name, priority in (("late", 5), ("first", 0), ("second", 1))
    ]
    run = lesson.engine_loop(scheduler, lesson.no_model, requests)
    assert run.batches == [["first"]] * 2 + [["second"]] * 2 + [["late"]] * 2


def test_the_loop_waits_for_whoever_comes_later():
    scheduler = lesson.Scheduler(whole(16, 2, 16), lesson.KVCacheManager(9, 4, 16))
    run = lesson.engine_loop(scheduler, lesson.no_model, lesson.make_requests([[0]] * 3, [2, 1, 1], [0, 1, 5]))
    assert run.batches == [["0"], ["0", "1"], [], [], [], ["2"]] and len(run.seconds) == 6


def real_engine(model, seats=32):
    config = whole(512, seats, 4096)
    scheduler = lesson.Scheduler(config, lesson.KVCacheManager(1024, 16, 512))
    return scheduler, runner_of(model, scheduler, VllmConfig(attention_backend="paged", enforce_eager=True))


def served(engine, prompts, outputs):
    requests = lesson.make_requests(prompts, outputs)
    lesson.engine_loop(engine[0], lambda output: engine[1].execute_model(output).sampled_token_ids, requests)
    return [request.output_token_ids for request in requests]


@pytest.mark.slow
def test_the_real_model_in_a_batch(real_model):
    model, tokenizer = real_model
    prompts = [tokenizer.encode(text) for text in lesson.PROMPTS[:6]]
    engine = real_engine(model, seats=4)
    together = served(engine, prompts, [6, 3, 5, 4, 6, 2])
    assert together[0] == lesson.generate_alone(model, prompts[0], 6)
    assert together[3:5] == [served(engine, [prompts[i]], [len(together[i])])[0] for i in (3, 4)]
    assert "Paris" in tokenizer.decode(together[0])


@pytest.mark.slow
def test_32_requests_on_the_real_model(real_model):
    model, tokenizer = real_model
    prompts = [tokenizer.encode(text) for text in lesson.PROMPTS]
    found = served(real_engine(model), prompts, lesson.OUTPUTS)
    for i in range(8):
        assert found[i] == lesson.generate_alone(model, prompts[i], lesson.OUTPUTS[i])
    assert found[:8] == found[8:16]


# --- Wrong input ----------------------------------------------------------------------------------------------------


WRONG_PARAMS = [
    ("n", 0), ("n", 1.5), ("n", "2"), ("n", None), ("temperature", -0.1), ("temperature", 2.1),
    ("temperature", "hot"), ("temperature", float("nan")), ("temperature", None), ("top_k", -2), ("top_k", 1.0),
    ("top_k", True), ("top_p", 0), ("top_p", 1.1), ("top_p", float("nan")), ("min_p", -0.1), ("min_p", 1.1),
    ("presence_penalty", 2.5), ("frequency_penalty", -2.5), ("repetition_penalty", 0),
    ("repetition_penalty", 1e-300), ("logit_bias", {1: 1e300}), ("logit_bias", {1: -101}),
    ("repetition_penalty", float("inf")), ("logprobs", -2), ("logprobs", "2"), ("logprobs", 0.5), ("max_tokens", 0),
    ("max_tokens", "16"), ("min_tokens", -1), ("min_tokens", 17), ("seed", 0.5), ("seed", "x"), ("stop", [""]),
    ("stop", [3]), ("logit_bias", [1]), ("logit_bias", {1: "a"}), ("logit_bias", {1: float("nan")}),
    ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("stop_token_ids", 5), ("stop_token_ids", 0),
    ("stop_token_ids", {1: 2}), ("stop", 5), ("stop", 0), ("stop", {"a": 1}), ("stop", b"a"), ("stop", ""),
    ("n", 16_385),
]  # fmt: skip


def test_wrong_sampling_params_name_the_field():
    for field, value in WRONG_PARAMS:
        with named(field, value):
            with pytest.raises(common.InputError, match=field) as error:
                SamplingParams(**{field: value})
            assert len(str(error.value).splitlines()) == 1 and isinstance(error.value, ValueError)
            assert str(error.value).startswith(field), "and the server blames the field that comes first"


def test_lists_of_ways_to_stop_are_copies():
    given, ids = ["a"], (1, 2)
    params = SamplingParams(n=16_384, stop=given, stop_token_ids=ids)
    assert (params.stop, params.stop_token_ids) == (["a"], [1, 2]) and params.stop is not given
    assert SamplingParams(stop="a").stop == ["a"] and SamplingParams().stop == SamplingParams().stop_token_ids == []


def test_greedy_samples_would_all_be_the_same():
    with pytest.raises(common.InputError, match="n 2"):
        SamplingParams(n=2, temperature=0)


def test_what_can_never_be_served_is_refused_on_arrival():
    scheduler = lesson.Scheduler(whole(96, 4, 96), lesson.KVCacheManager(25, 4, 96))  # exactly one longest sequence
    for prompt, word in (([], "empty"), ([1] * 96, "maximum model length"), ([1] * 97, "maximum model length")):
        with pytest.raises(common.InputError, match=word):
            scheduler.add_request(Request("x", prompt, SamplingParams()))
    assert not scheduler.has_unfinished_requests()
    scheduler.add_request(Request("x", [1] * 95, SamplingParams()))
    (output,) = scheduler.update_from_output(scheduler.schedule(), {"x": [1]})
    assert output.finish_reason == "length" and output.new_token_ids == [1]
    with pytest.raises(common.InputError, match="num_blocks 24: they hold 92 tokens"):
        lesson.KVCacheManager(24, 4, 96)


def test_what_the_engine_can_never_serve_is_refused_on_arrival(tiny_model):
    def tiny_core(model, num_blocks):
        scheduler = make_scheduler(whole(96, 4, 4096), num_blocks, 4)
        return EngineCore(scheduler, runner_of(model, scheduler))

    core = tiny_core(tiny_model, num_blocks=25)  # 96 tokens: exactly one longest sequence
    for prompt, word in (([], "empty"), ([1] * 96, "maximum model length"), ([1] * 97, "maximum model length")):
        with pytest.raises(common.InputError, match=word):
            core.add_request(Request("x", prompt, SamplingParams()))
    core.add_request(Request("x", [1] * 95, SamplingParams(temperature=0)))
    with pytest.raises(common.InputError, match="'x'"):
        core.add_request(Request("x", [1], SamplingParams()))
    (output,) = core.step()
    assert output.finish_reason == "length" and len(output.new_token_ids) == 1
    with pytest.raises(common.InputError, match="num_blocks"):
        tiny_core(tiny_model, num_blocks=24)
    with pytest.raises(common.InputError, match="max_model_len 96: must be at most 95"):
        tiny_core(llama.random_model(0, max_position_embeddings=95), num_blocks=25)


def test_the_script_refuses_more_blocks_than_a_laptop_holds(capsys):
    with pytest.raises(SystemExit):
        lesson.build_parser().parse_args(["--num-blocks", "2000000"])
    assert "'2000000' is not a whole number from 2 to 16384" in capsys.readouterr().err


def test_the_runner_of_a_schedule_without_anybody(tiny_model):
    scheduler, runner = tiny_engine(tiny_model)
    output = scheduler.schedule()
    assert scheduler.update_from_output(output, runner.execute_model(output).sampled_token_ids) == []


def test_packed_weights_keep_their_biases():
    """Qwen2 has some, and every engine packs what it serves."""
    model = llama.random_model(seed=3, device=torch.device("cpu"))
    for layer in model.linear.values():
        layer.bias = torch.randn(layer.weight.shape[0])
    packed = pack_weights(model)
    if packed is model:
        pytest.skip("no oneDNN here: weights are not packed")
    for name, layer in packed.linear.items():
        x = torch.randn(2, layer.weight.shape[1])
        with torch.inference_mode():
            assert_close(layer(x), model.linear[name](x))


def test_whoever_is_preempted_gives_its_row_back(tiny_model):
    """A row for each seat: one that is lost with every preemption would be missing in the end."""
    requests = random_requests(random.Random(0), 8)
    config = SchedulerConfig(max_model_len=44, max_num_seqs=6, max_num_batched_tokens=11)
    scheduler = make_scheduler(config, num_blocks=13, block_size=4)
    runner = runner_of(tiny_model, scheduler)
    run_with_arrivals(scheduler, runner, requests, [0] * 8)
    runner.execute_model(scheduler.schedule())  # the runner hears of the last ones
    assert sorted(runner.batch.free_rows) == list(range(6)) and not runner.batch.rows


def test_an_end_of_sequence_token_gives_no_stop_reason_though_it_is_a_stop_token_too():
    params = SamplingParams(stop_token_ids=[7, 8])
    for token, reason in ((7, None), (8, 8)):
        request = Request("r", [1], params, eos_token_id=7)
        request.append_output_token_id(token)
        assert check_stop(request, 64) and request.stop_reason == reason
        assert request.get_finished_reason() == "stop"


def test_of_equals_that_came_together_the_name_decides():
    queue = PriorityRequestQueue()
    for name in "bca":
        queue.add_request(Request(name, [1], SamplingParams(), arrival_time=1.0))
    assert [queue.pop_request().request_id for _ in range(3)] == list("abc")


def test_who_leaves_a_long_priority_queue_is_found_at_once(monkeypatch):
    """Thousands of clients may hang up together, and each is taken out by itself."""
    rng, N, compared = random.Random(0), 4096, 0
    requests = [Request(f"{i}", [1], SamplingParams(), arrival_time=i, priority=rng.randint(0, 9)) for i in range(N)]
    queue, less = PriorityRequestQueue(), Request.__lt__
    for request in requests:
        queue.add_request(request)

    def count(one, other):
        nonlocal compared
        compared += 1
        return less(one, other)

    monkeypatch.setattr(Request, "__lt__", count)
    gone = rng.sample(requests, N // 2)
    for request in gone:
        queue.remove_request(request)
    assert compared <= len(gone) * 13
    assert [queue.pop_request() for _ in range(len(queue))] == sorted(set(requests) - set(gone))
