"""Lesson 05c: shards that add up to the whole, in threads and in processes; the bytes they send; how they end."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
import on_gpu
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.scripts import run

from engine import registry
from support.close import assert_close
from lab import cli
from engine.model import llama
from lab import roofline
from engine import assemble
from engine.config import SchedulerConfig, VllmConfig
from engine.quantization.kv_codes import block_bytes
from engine.request import Request
from engine.request import SamplingParams
from engine.model.packed_linear import pack_weights
from engine.distributed.group import GroupCoordinator, meeting_point, new_group
from engine.parallel import sharding
from engine.parallel.layers import (
    ColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from engine.parallel.model import TensorParallelLlama, load_shard, map_local, shard_model
from engine.parallel.ranks import RankFailed, launch
from engine.parallel.shards import model_tensors
from lab.layouts import default_size
from lab.links import LINKS, Link, wire_bytes

lesson, page = registry.lesson("05c_tensor_parallel"), cli.numbers("05c_tensor_parallel")
CPU = torch.device("cpu")


def listeners(port):
    """The addresses at which this machine listens on a TCP port, in hexadecimal as the kernel writes them."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the kernel's list of sockets is Linux's")
def test_ranks_meet_where_no_other_machine_can_reach():
    """torch's own store listens at every address, whatever host it is given."""
    store = meeting_point()
    assert listeners(store.port) == ["0100007F"], "127.0.0.1 alone"
    other = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    other.set("rank", "here")
    assert store.get("rank") == b"here"


# --- Ranks as threads: the same layers, a barrier instead of a wire -------------------------------------------------


class ThreadGroup(GroupCoordinator):
    def __init__(self, n: int, rank: int, meeting: threading.Barrier, table: list, device: torch.device) -> None:
        super().__init__(range(n), rank, device)
        self.meeting, self.table = meeting, table

    def everybodys(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.table[self.rank_in_group] = x
        self.meeting.wait(30)
        found = list(self.table)
        self.meeting.wait(30)
        return found

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.world_size == 1:
            return super().all_reduce(x)
        self._count("all_reduce", x)
        return sum(self.everybodys(x))

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if self.world_size == 1:
            return super().all_gather(x, dim)
        out = torch.cat(self.everybodys(x), dim)
        self._count("all_gather", out)
        return out


def in_threads(n: int, fn: Callable, device: torch.device = CPU) -> list[Any]:
    """`fn(group)` on n ranks at once."""
    meeting, table = threading.Barrier(n), [None] * n

    def rank(r: int) -> Any:
        try:
            with torch.inference_mode():
                return fn(ThreadGroup(n, r, meeting, table, device))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(n) as pool:
        futures = [pool.submit(rank, r) for r in range(n)]
    causes = [f.exception() for f in futures if f.exception()]
    for cause in sorted(causes, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise cause  # whoever waited for the one that failed has less to say
    return [f.result() for f in futures]


def model_with(device: torch.device = CPU, biases: bool = False, dtype: torch.dtype = torch.float32,
               **sizes: Any) -> llama.Llama:  # fmt: skip
    """A seeded model; with `biases`, every layer that a checkpoint may give one has one."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96, **sizes}
    model = llama.random_model(seed=3, device=device, dtype=dtype, **sizes)
    if biases:
        model.config = dataclasses.replace(model.config, attention_bias=True, mlp_bias=True)
        for name, layer in model.linear.items():
            if name != "lm_head":
                layer.bias = torch.randn(layer.weight.shape[0], dtype=dtype, device=device)
    return model


# --- The layers -----------------------------------------------------------------------------------------------------


@given(st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))
def test_column_then_row_is_the_whole_layer(n, tokens, columns, rows):
    x, a = torch.randn(tokens, 7), torch.randn(n * columns, 7)
    b, bias_a, bias_b = torch.randn(rows, n * columns), torch.randn(n * columns), torch.randn(rows)
    want = torch.relu(x @ a.T + bias_a) @ b.T + bias_b

    def rank(group):
        shard = ColumnParallelLinear.shard
        r = group.rank_in_group
        first = ColumnParallelLinear(llama.Linear(shard(a, r, n), shard(bias_a, r, n)), group)
        second = RowParallelLinear(llama.Linear(RowParallelLinear.shard(b, r, n), bias_b), group)
        return second(torch.relu(first(x)))

    for out in in_threads(n, rank):
        assert_close(out, want)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (9, 3), (6, 6), (4, 1), (12, 4)])
def test_heads_stay_whole_and_meet_their_own_kv_head(heads, kv_heads):
    """Weights that name their head: rank r gets query heads and exactly the KV heads that these attend to."""
    config = dataclasses.replace(llama.random_model().config, num_attention_heads=heads,
                                 num_key_value_heads=kv_heads, intermediate_size=144)  # fmt: skip
    D, group_size = 3, heads // kv_heads
    named = lambda count: torch.arange(count).repeat_interleave(D)[:, None]  # noqa: E731
    for n in [n for n in range(1, heads + 1) if sharding.divides(config, n)]:
        seen = []
        for rank in range(n):
            q = QKVParallelLinear.shard(named(heads), rank, n, heads)
            kv = QKVParallelLinear.shard(named(kv_heads), rank, n, kv_heads)
            q_heads, kv_owned = q[::D, 0].tolist(), kv[::D, 0].tolist()
            assert len(q) == D * heads // n and len(kv) == D * sharding.shard_config(config, n).num_key_value_heads
            assert kv_owned == sorted({h // group_size for h in q_heads})
            local_group = len(q_heads) // len(kv_owned)  # how attention will map them, from the counts alone
            assert [kv_owned[i // local_group] for i in range(len(q_heads))] == [h // group_size for h in q_heads]
            seen += q_heads
        assert seen == list(range(heads))


@given(st.integers(1, 40), st.sampled_from([1, 2, 3, 4, 7]))
def test_embedding_and_logits_for_any_vocabulary(vocab, n):
    """Sizes that n does not divide, ranks that own nothing but padding, the first and last row of each shard."""
    weight, ids = torch.randn(vocab, 5), torch.arange(vocab)
    x = torch.randn(3, 5)

    def rank(group):
        part = VocabParallelEmbedding.shard(weight, group.rank_in_group, n)
        head = ParallelLMHead(llama.Linear(part), group, vocab)
        return len(part), VocabParallelEmbedding(part, group)(ids), head(x)

    for size, rows, logits in in_threads(n, rank):
        assert size == -(-vocab // n)
        assert rows.equal(weight), "a sum with zeros is exact"
        assert_close(logits, x @ weight.T)


def test_a_bias_is_added_once_and_a_partial_sum_is_partial():
    x, w, b = torch.randn(2, 6), torch.randn(4, 6), torch.randn(4)

    def rank(group, reduce_results=True):
        r = group.rank_in_group
        layer = RowParallelLinear(llama.Linear(RowParallelLinear.shard(w, r, 3), b), group)
        layer.reduce_results = reduce_results
        return layer(x[:, 2 * r : 2 * r + 2])

    for out in in_threads(3, rank):
        assert_close(out, x @ w.T + b)
    partial = in_threads(3, lambda group: rank(group, reduce_results=False))
    assert_close(sum(partial), x @ w.T + b)
    assert common.relative_error(partial[0], x @ w.T + b) > 0.1


# --- The model ------------------------------------------------------------------------------------------------------

IDS = [5, 1, 77, 126, 0, 63, 64, 31, 32, 99]


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "sizes", [{}, {"biases": True}, {"qk_norm": True}, {"vocab_size": 131, "tie_word_embeddings": False}]
)
def test_shards_are_the_model(n, sizes, device):
    model = model_with(device, **sizes)
    want = lesson.all_logits(model, IDS)

    def rank(group):
        shard = shard_model(model, group)
        assert (shard.num_heads, shard.num_kv_heads) == (8 // n, max(1, 2 // n)) and shard.config is model.config
        expected = lesson.step_traffic(model.config, n, len(IDS), len(IDS), 4)
        for _ in range(2):
            out = lesson.all_logits(shard, IDS)
            assert group.take_counts() == expected and bool(expected) == (n > 1)
        return out

    outs = in_threads(n, rank, device)
    for out in outs:
        assert_close(out, want)
        assert out.equal(outs[0])


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_head_for_some_tokens_has_a_logit_for_each(n, device):
    """A drafter's shortlist (companion 07b) of five, which no number of ranks divides."""
    model, shortlist = model_with(device), torch.tensor([7, 0, 126, 64, 63], device=device)
    x = torch.randn(3, model.config.hidden_size, device=device)
    want = model.output_head(torch.arange(127, device=device))(x)[:, shortlist]
    for out in in_threads(n, lambda group: shard_model(model, group).output_head(shortlist)(x), device):
        assert_close(out, want)


@pytest.mark.parametrize("n", [2, 4])
def test_low_precision(n, dtype, device):
    """A block in 16 bits, its partial sums rounded before they are added, against fp32 on the same rounded inputs."""
    x, a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((5, 64), (96, 64), (64, 96)))
    a, b = a / 8, b / 8

    def rank(group):
        r = group.rank_in_group
        first = ColumnParallelLinear(llama.Linear(ColumnParallelLinear.shard(a, r, n)), group)
        second = RowParallelLinear(llama.Linear(RowParallelLinear.shard(b, r, n)), group)
        return second(torch.nn.functional.silu(first(x)))

    for out in in_threads(n, rank, device):
        assert_close(out, lesson.mlp(x.float(), a.float(), b.float()))


def test_model_tensors_are_the_weights(tiny_model):
    names = llama.tensor_shapes(tiny_model.config)
    lookup = model_tensors(tiny_model)
    assert all(tuple(lookup(name).shape) == shape for name, shape in names.items()) and lookup("nonsense") is None
    again = llama.Llama(tiny_model.config, lookup, tiny_model.dtype, tiny_model.device)
    assert lesson.all_logits(again, IDS).equal(lesson.all_logits(tiny_model, IDS))


def test_weights_are_divided_not_copied(tiny_model):
    """Everything but norms is somewhere exactly once (2 ranks, 2 KV heads); the cache is divided, too."""
    c = tiny_model.config
    shards = in_threads(2, lambda group: shard_model(tiny_model, group))
    norms = (2 * c.num_hidden_layers + 1) * c.hidden_size
    assert sum(s.num_parameters for s in shards) == tiny_model.num_parameters + norms
    size = lambda m: block_bytes(m, 16, "auto")  # noqa: E731
    assert 2 * size(shards[0]) == size(tiny_model)


def test_the_engine_cannot_tell(device):
    """The engine on 1, 2 and 4 ranks (KV heads copied), packed weights included: the same tokens, all ranks."""
    model = model_with(device)
    prompts, outputs = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [35]], [9, 4, 7]
    want = lesson.serve(model, prompts, outputs).token_ids

    def rank(group):
        shard = map_local(shard_model(model, group), pack_weights)
        return lesson.serve(shard, prompts, outputs).token_ids

    for n in (2, 4):
        assert in_threads(n, rank, device) == [want] * n


def test_every_rank_draws_the_same_tokens(device):
    """Sampling, too, is done by each rank alone: from equal logits and the request's seed."""
    model = model_with(device)

    def sampled(model):
        eager = VllmConfig(enforce_eager=True)  # as all ranks are: a collective over gloo could not be captured
        core = assemble.make_core(model, SchedulerConfig(max_model_len=64), 64, 16, eager, seed=1)
        tokens = {}
        for i in range(3):
            params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
            core.add_request(Request(str(i), [7, i], params))
        while core.scheduler.has_unfinished_requests():
            for output in core.step():
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        return tokens

    want = sampled(model)
    assert len(set(map(tuple, want.values()))) == 3
    assert in_threads(4, lambda group: sampled(shard_model(model, group)), device) == [want] * 4


def test_map_local_changes_the_copy_alone(tiny_model):
    def doubled(model):
        model.linear = {name: llama.Linear(2 * layer.weight) for name, layer in model.linear.items()}
        return model

    def rank(group):
        shard = shard_model(tiny_model, group)
        before = lesson.all_logits(shard, IDS)
        changed = map_local(shard, doubled)
        assert lesson.all_logits(shard, IDS).equal(before)
        assert [type(x) for x in changed.linear.values()] == [type(x) for x in shard.linear.values()]
        return lesson.all_logits(changed, IDS)

    twice = llama.Llama(tiny_model.config, model_tensors(tiny_model), tiny_model.dtype, tiny_model.device)
    want = lesson.all_logits(doubled(twice), IDS)
    for out in in_threads(2, rank, tiny_model.device):
        assert_close(out, want)


def test_without_the_all_reduce_shapes_are_right_and_values_wrong(tiny_model):
    def rank(group):
        shard = shard_model(tiny_model, group)
        lesson.skip_all_reduce(shard)
        return lesson.all_logits(shard, IDS)

    want = lesson.all_logits(tiny_model, IDS)
    for out in in_threads(2, rank, tiny_model.device):
        assert out.shape == want.shape and common.relative_error(out, want) > 0.3


# --- Refusals -------------------------------------------------------------------------------------------------------


def test_sizes_that_do_not_divide_are_refused(tiny_model):
    smol = roofline.llama_config(roofline.MODELS["SmolLM2-135M"])
    for n in (2, 4, 6, 8, 9, 18):
        with pytest.raises(common.InputError) as error:
            sharding.check_tensor_parallel_size(smol, n)
        message = str(error.value)
        assert f"tensor_parallel_size {n}" in message and "num_attention_heads (9)" in message
        assert message.endswith(": 1, 3") and "\n" not in message
    with pytest.raises(common.InputError, match="intermediate_size"):  # 6 heads, but 112 neurons
        shard_model(tiny_model, ThreadGroup(6, 0, None, [], CPU))
    uneven = dataclasses.replace(smol, num_attention_heads=12, num_key_value_heads=4)
    works = [n for n in range(1, 13) if sharding.divides(uneven, n)]
    assert works == [1, 2, 4, 12]  # 3 and 6 would cut a KV head's group in two


def test_a_shape_that_contradicts_the_config_is_one_line(tiny_model):
    lookup = model_tensors(tiny_model)
    wrong = lambda name: lookup(name)[1:] if "o_proj" in name else lookup(name)  # noqa: E731
    with pytest.raises(common.InputError, match=r"o_proj.weight has shape \[79, 96\], config.json says \[80, 96\]"):
        TensorParallelLlama(tiny_model.config, wrong, ThreadGroup(2, 0, None, [], CPU))


def test_a_weight_that_is_not_there_is_named(tiny_model):
    lookup, name = model_tensors(tiny_model), "model.layers.1.mlp.down_proj.weight"

    def tensors(wanted):
        return None if wanted == name else lookup(wanted)

    with pytest.raises(common.InputError, match=name):
        TensorParallelLlama(tiny_model.config, tensors, ThreadGroup(2, 0, None, [], CPU))


# --- The bill -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 50))
def test_wire_bytes_by_counting_a_ring(n, chunk):
    """Whoever is interested counts: 2(n − 1) rounds, one chunk each."""
    assert wire_bytes("all_reduce", n * chunk, n) == pytest.approx(sum(chunk for _ in range(2 * (n - 1))))
    assert wire_bytes("all_gather", n * chunk, n) == pytest.approx(chunk * (n - 1))


def test_published_sizes_are_bytes():
    """aiconfigurator lists bf16 elements. As bytes they would make NVLink's best ring half as fast as any known one."""
    payload, n, seconds = page.PUBLISHED["32mb_tp8"]
    assert 300e9 < wire_bytes("all_reduce", payload, n) / seconds < 450e9
    assert 300e9 < LINKS["nvlink"].bandwidth == LINKS["nvlink_eager"].bandwidth < 450e9


def test_arithmetic_of_the_facts():
    found = page.facts()
    wire = found["wire"]
    assert wire["calls"] == 61 and wire["payload"] == 2304
    assert wire["all_reduce"] == 61 * 2304 * 4 // 3 and wire["all_gather"] == 49152 * 4 * 2 // 3
    assert found["worst_fit"] < 0.15 and Link(1.0, 1.0).seconds("all_reduce", 8, 1) == 0, "nobody to talk to"
    assert found["too_low"] == pytest.approx({"256kb_tp8": 0.413, "8mb_tp2": 0.286}, abs=1e-3)
    for name, of in found["decode"].items():
        for link in ("nvlink", "nvlink_eager"):
            for n in ("1", "2", "4", "8"):
                total = of["read_ms"][n] + of["talk_ms"][link][n]
                assert of["ms"][link][n] == pytest.approx(total)
                assert of["talk_ms"][link][n] >= (of["floor_ms"][link] if n != "1" else 0), name
    assert found["decode"]["llama_31_8b"]["floor_ms"]["nvlink"] == pytest.approx(65 * 4.5e-3)
    gain = lambda model, link: found["prefill"][model][link]["8"]["speedup"]  # noqa: E731
    assert gain("llama_31_8b", "pcie5") < 1.2 < 2.5 < gain("llama_31_70b", "nvlink")
    for of in found["shared"].values():  # a group reads weights once, replicas send nothing
        ahead = {b: of["one"]["tokens_per_second"][b] > of["replicas"]["tokens_per_second"][b] for b in ("512", "2048")}
        assert ahead == {"512": True, "2048": False} and 512 < of["even_at"] < 2048
        assert of["one"]["prefill"] < of["replicas"]["prefill"]
    even = found["prefill"]["llama_31_8b"]["pcie5"]["even_at"]
    one, eight = (lesson.step_seconds("Llama-3.1-8B", n, LINKS["pcie5"], 1, 1024, 1024) for n in (1, 8))
    assert one["compute"] / even == pytest.approx(eight["compute"] / even + eight["talk"])
    eight = found["owns"]["llama_31_8b"]
    assert eight["16"]["kv_bytes"] == eight["8"]["kv_bytes"] and eight["16"]["kv_copies"] == 2


# --- The simulation -------------------------------------------------------------------------------------------------

SPACE = {"ranks": [1, 2, 4], "order": page.ORDERS, "all_reduce": ["kept", "skipped"], "input": list(page.INPUTS)}


def states():
    return [dict(zip(SPACE, values)) for values in itertools.product(*SPACE.values())]


@pytest.mark.parametrize("params", states(), ids=lambda p: "-".join(map(str, p.values())))
def test_every_state_of_the_widget(params):
    trace = page.simulate(params)
    n, x = params["ranks"], page.INPUTS[params["input"]]
    h = [max(0, sum(a * b for a, b in zip(row, x))) for row in page.A]
    want = [sum(a * b for a, b in zip(row, h)) for row in page.B]
    assert trace["reference"] == want
    after = "replicated" if params["all_reduce"] == "kept" or n == 1 else "broken"
    layouts = ["replicated", "sharded", "partial", after]
    layouts += [after, "sharded", "replicated"] if params["order"] == "row, column" else []
    assert [step["layout"] for step in trace["steps"]] == layouts
    for step in trace["steps"]:
        assert len(step["values"]) == n
        if step["layout"] == "replicated":
            assert all(value == step["values"][0] for value in step["values"])
        if step["layout"] == "partial" and params["order"] == "column, row":
            assert [sum(column) for column in zip(*step["values"])] == want, "the sum of partials is the result"
    if params["order"] == "column, row":
        assert [*itertools.chain(*trace["steps"][1]["values"])] == h, "shards, laid side by side, are the hidden layer"
    if params["all_reduce"] == "kept" or n == 1:
        assert all(trace["right"]) and trace["agree"]
        assert trace["collectives"] == (0 if n == 1 else page.ORDERS.index(params["order"]) + 1)
    elif params["order"] == "column, row":
        assert not all(trace["right"]) and trace["sent"] == 0
        assert trace["right"][0] == (params["input"] == "lucky"), "a test that looks at rank 0 alone may pass"
    else:
        assert not any(trace["right"]) and trace["agree"], "after the gather all agree, on a wrong answer"
    assert len(page.describe(trace).splitlines()) <= 15


def test_broken_layers_break_the_simulation(monkeypatch):
    right = page.simulate(page.WIDGET_DEFAULT)
    first = staticmethod(lambda tensor, rank, n: tensor[: tensor.shape[0] // n])
    with monkeypatch.context() as patch:
        patch.setattr(ColumnParallelLinear, "shard", first)
        assert page.simulate(page.WIDGET_DEFAULT) != right
    with monkeypatch.context() as patch:
        patch.setattr(RowParallelLinear, "__call__", lambda self, x: 2 * self.local(x))
        assert not any(page.simulate(page.WIDGET_DEFAULT)["right"])
    with monkeypatch.context() as patch:
        patch.setattr(page, "wire_bytes", lambda collective, payload, n: 3 * payload)
        assert page.simulate(page.WIDGET_DEFAULT)["sent"] != right["sent"]


# --- Processes ------------------------------------------------------------------------------------------------------


def peak_memory_of(fn: Callable) -> tuple[Any, int]:
    """What `fn` returns, and the most memory it held that no file backs (Linux; else 0): looked at all the time."""
    status, done = Path("/proc/self/status"), threading.Event()
    anonymous = lambda: 1024 * int(re.search(r"RssAnon:\s+(\d+)", status.read_text())[1])  # noqa: E731
    if not status.exists():
        return fn(), 0
    seen = [anonymous()]
    watch = threading.Thread(target=lambda: [seen.append(anonymous()) for _ in iter(lambda: done.wait(0.002), True)])
    watch.start()
    result = fn()
    done.set()
    watch.join()
    return result, max(*seen, anonymous()) - seen[0]


def work(world, prompts):
    """One job, many checks: starting processes is what costs."""
    found = {"threads": torch.get_num_threads(), "backend": dist.get_backend()}
    for size, dtype in ((1, torch.float32), (7, torch.float32), (4096, torch.bfloat16)):
        x = (torch.arange(size, device=world.device) % 5 + world.rank_in_group).to(dtype)
        want = sum(torch.arange(size, device=world.device) % 5 + r for r in range(world.world_size)).to(dtype)
        total, sent = lesson.ring_all_reduce(x, world)
        padded = -(-size // world.world_size) * world.world_size * x.element_size()
        assert total.equal(want) and sent == wire_bytes("all_reduce", padded, world.world_size)
        assert world.all_reduce(x.clone()).equal(want)
    mine = torch.full((2, 1), float(world.rank_in_group), device=world.device)
    assert world.all_gather(mine).tolist() == [[*map(float, range(world.world_size))]] * 2
    assert world.all_gather(mine, dim=0).flatten().tolist() == [r for r in range(world.world_size) for _ in (0, 1)]
    counts = world.take_counts()
    assert counts["all_reduce"] == {"calls": 3, "bytes": 4 + 28 + 8192} and counts["all_gather"]["calls"] == 2
    assert world.take_counts() == {}

    three, last = new_group([0, 1, 2], world), new_group([3, 1], world)
    assert (three is None) == (world.rank_in_group == 3) and (last is None) == (world.rank_in_group in (0, 2))
    if last:  # ascending, however they were named
        x = torch.tensor([[float(world.rank_in_group)]], device=world.device)
        assert last.ranks == [1, 3] and last.ranks[last.rank_in_group] == world.rank_in_group
        assert last.all_gather(x).tolist() == [[1.0, 3.0]]
    if three:
        shard, found["memory"] = peak_memory_of(lambda: load_shard(None, three))
        found["logits"] = lesson.all_logits(shard, prompts[0])
        found["tokens"] = lesson.serve(shard, prompts, [6, 3]).token_ids
    for size in (2, 4):
        if group := new_group(range(size), world):
            found[size] = lesson.all_logits(shard_model(lesson.seeded_model(world.device), group), IDS)
    return found


@pytest.fixture(scope="module")
def worked(real_model) -> tuple[list[dict], list[list[int]]]:
    prompts = [real_model[1].encode(text) for text in ("The three laws of motion say that", "To make bread")]
    return launch(4, work, prompts), prompts


def test_real_model_on_three_processes(worked, real_model):
    found, prompts = worked
    model, _ = real_model
    want = lesson.all_logits(model, prompts[0])
    tokens = lesson.serve(model, prompts, [6, 3]).token_ids
    for rank in found[:3]:
        assert_close(rank["logits"], want)
        assert rank["logits"].equal(found[0]["logits"]), "equal bits, or ranks would draw different tokens"
        assert rank["tokens"] == tokens
        assert rank["threads"] == max(1, os.cpu_count() // 4)
    assert "logits" not in found[3]


@pytest.mark.skipif(sys.platform != "linux" or common.HAS_GPU, reason="reads /proc; a GPU's weights are elsewhere")
def test_loading_a_shard_never_holds_the_whole(worked, real_model):
    share = real_model[0].num_parameters * 4 / 3
    for rank in worked[0][:3]:
        assert 0.5 * share < rank["memory"] < 1.2 * share


@pytest.mark.parametrize("size", [2, 4])
def test_seeded_model_on_processes(worked, size, device):
    want = lesson.all_logits(lesson.seeded_model(device), IDS)
    for rank in worked[0][:size]:
        assert_close(rank[size], want)


def fail(world, how):
    if world.rank_in_group == 2:
        time.sleep(600)  # hears nothing of what happens to the others
    if world.rank_in_group == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise ValueError("no such thing\nand more about it")
        if how == "is silent":
            time.sleep(600)
    world.all_reduce(torch.ones(3, device=world.device))
    time.sleep(600)


def children() -> list[int]:
    return [child.pid for child in multiprocessing.active_children()]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("dies", r"rank 1 of 3 died \(signal SIGKILL\)"),
        ("raises", r"rank 1 of 3 raised ValueError: no such thing; the others"),
        pytest.param("is silent", r"(no answer from rank .*1, 2 of 3|rank 0 of 3 raised)", marks=pytest.mark.slow),
    ],
)
def test_one_rank_fails_and_all_end(how, message):
    start = time.perf_counter()
    with pytest.raises(RankFailed, match=message) as error:
        launch(3, fail, how, timeout=60 if how != "is silent" else 4)
    assert children() == [] and "\n" not in str(error.value)
    assert time.perf_counter() - start < 30
    if how == "raises":
        assert ", in fail\n" in error.value.__notes__[0], "where it was raised"


def runs(pid: int) -> bool:
    """A zombie, dead and not yet collected by whoever adopted it, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_ranks_do_not_outlive_their_parent():
    code = f"""
import sys, time; sys.path[:0] = [{str(common.HERE)!r}, {str(common.ROOT)!r}, {str(common.ROOT / "tests")!r}]
import common
from tests.engine.parallel import test_tensor_parallel as t
from engine.parallel.ranks import Ranks
if __name__ == "__main__":
    ranks = Ranks(2, t.fail, "is silent")
    print(*[p.pid for p in ranks.processes], flush=True)
    time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(map(runs, pids))
    time.sleep(1)
    parent.kill()
    parent.wait()
    for _ in range(100):
        if not any(map(runs, pids)):
            return
        time.sleep(0.1)
    raise AssertionError(f"some of {pids} are still running")


# --- The script -----------------------------------------------------------------------------------------------------


def test_the_wrong_number_of_ranks_is_refused_before_anything_starts(real_model):
    with pytest.raises(common.InputError, match=r"tensor_parallel_size 4: .*num_attention_heads \(9\).*: 1, 3$"):
        lesson.main(["--tensor-parallel-size", "4"])
    assert children() == []


@pytest.mark.parametrize(
    ("heads", "kv_heads", "neurons", "ranks"),
    [(9, 3, 1536, 3), (32, 8, 14336, 2), (12, 6, 96, 3), (5, 5, 10, 5), (35, 5, 35, 5), (5, 5, 7, 1), (1, 1, 64, 1)],
)
def test_by_default_as_many_ranks_as_the_model_allows_to_share_it(heads, kv_heads, neurons, ranks):
    """3 of SmolLM2, else the fewest above one, if any."""
    smol = roofline.llama_config(roofline.MODELS["SmolLM2-135M"])
    config = dataclasses.replace(smol, num_attention_heads=heads, num_key_value_heads=kv_heads,
                                 intermediate_size=neurons)  # fmt: skip
    assert default_size(config) == ranks
    sharding.check_tensor_parallel_size(config, ranks)


def test_the_story_starts_with_the_default_size_of_its_model(monkeypatch, tmp_path):
    """A wrong size that somebody asked for stays an error."""
    folder = on_gpu.random_folder(tmp_path / "model", hidden_size=64, intermediate_size=96, num_hidden_layers=1,
                                  num_attention_heads=8, num_key_value_heads=2, head_dim=8)  # fmt: skip
    asked = []

    def ranks(world_size, story, n, *rest):
        asked.append((world_size, n))
        raise common.CheckFailed("enough")

    monkeypatch.setattr(lesson, "Ranks", ranks)
    monkeypatch.setattr(lesson, "start_context", lambda: None)
    for flags, n in (([], 2), (["-tp", "8"], 8)):
        with pytest.raises(common.CheckFailed, match="enough"):
            lesson.main(["--model", str(folder), *flags])
        assert asked.pop() == (max(4, n), n)
    with pytest.raises(common.InputError, match=r"tensor_parallel_size 3: .*: 1, 2, 4, 8$"):
        lesson.main(["--model", str(folder), "-tp", "3"])


@pytest.mark.slow
def test_the_break_is_caught():
    done = run("05c_tensor_parallel", "--skip-all-reduce")
    assert done.returncode == 1 and "without the all-reduce: relative error of the logits" in done.stdout
    assert done.stderr.startswith("05c_tensor_parallel.py: CHECK FAILED: logits") and len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_benchmark_measures_what_it_says():
    done = run("05c_tensor_parallel", "--bench")
    assert done.returncode == 0, done.stderr[-2000:]
    bench = done.results["05c_tensor_parallel"]["bench"]
    assert {size: len(times) for size, times in bench["all_reduce_us"].items()} == {"2": 4, "3": 4}
    assert {name: [*of] for name, of in bench["step_ms"].items()} == {"smollm2": ["1", "3"], "wide": ["1", "2", "4"]}
    flat = [t for of in bench["step_ms"].values() for times in of.values() for t in times.values()]
    assert len(flat) == 10 and min(flat) > 0
