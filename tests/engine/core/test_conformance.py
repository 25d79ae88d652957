"""The scheduler decides as vLLM 0.32 does: every recorded step, byte for byte; and the `replay` tool that shows it."""

from __future__ import annotations

import common

import copy
import json
import sys
import time
from pathlib import Path

import pytest

from engine.config import SchedulerConfig
from engine.core.block_pool import BlockPool
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.scheduler import Scheduler, make_scheduler
from engine.request import Request, SamplingParams
from lab import cli, replay, workload_files
from support import scripts
from support.broken import break_class
from support.cases import named
from support.recordings import GOLDEN, trace_of

page = cli.numbers("11_preemption")
WORKLOADS = sorted((*GOLDEN.glob("recorded/workloads/*.json"), *GOLDEN.glob("random/workloads/*.json")))

# Compared in this order, the first difference is a cause rather than a consequence.
FIELDS = ("step", "added", "aborted", "preempted", "scheduled", "new", "resumed", "running", "prefix_hit", "computed",
          "blocks", "free_blocks", "sampled", "finished", "waiting_queue", "running_queue", "cached_keys",
          "free_queue")  # fmt: skip


def first_difference(ours: dict, recorded: dict) -> str | None:
    """Where two traces part, in words; the order of keys counts."""

    def text(value):
        return json.dumps(value)

    for i, (a, b) in enumerate(zip(ours["steps"], recorded["steps"])):
        for field in (*FIELDS, *(a.keys() | b.keys())):
            if text(a.get(field)) != text(b.get(field)):
                return f"entry {i} (step {b['step']}), {field}: {text(a.get(field))} instead of {text(b.get(field))}"
    if len(ours["steps"]) != len(recorded["steps"]):
        return f"{len(ours['steps'])} steps instead of {len(recorded['steps'])}"
    for key in recorded.keys() | ours.keys():
        if text(ours.get(key)) != text(recorded.get(key)):
            return f"{key}: {text(ours.get(key))[:200]} instead of {text(recorded.get(key))[:200]}"
    return None


def compare(path: Path) -> str | None:
    ours = replay.replay(json.loads(path.read_text()))
    return first_difference(ours, json.loads(trace_of(path).read_text()))


@pytest.mark.parametrize("path", WORKLOADS, ids=[f"{p.parent.parent.name}-{p.stem}" for p in WORKLOADS])
def test_every_recorded_decision_is_ours(path):
    ours = replay.replay(json.loads(path.read_text()))
    assert first_difference(ours, json.loads(trace_of(path).read_text())) is None
    assert workload_files.dumps(ours) == trace_of(path).read_text()


def test_the_recordings_meet_every_rule():
    """They are worth something only if they get into the corners."""
    assert len(list((GOLDEN / "recorded" / "workloads").iterdir())) >= 26 and len(WORKLOADS) >= 40
    traces = [json.loads(trace_of(path).read_text()) for path in WORKLOADS]
    assert {trace["end"] for trace in traces} == {"finished", "stalled", "max_steps"}
    assert {trace["vllm"] for trace in traces} == {workload_files.REFERENCE}
    steps = [step for trace in traces for step in trace["steps"]]
    for field in (*FIELDS, "aborted"):
        assert any(field in step for step in steps), field
    configs = [trace["config"] for trace in traces]
    for name in workload_files.CONFIG_FIELDS.keys() - {"async_scheduling", "prefix_caching_hash_algo"}:
        default = workload_files.CONFIG_FIELDS[name].default
        assert any(config[name] != default for config in configs), f"no workload sets {name}"


# --- It can fail: each rule, broken in the real class, shows ---------------------------------------------------------

BREAK = {
    "admits in a step that preempted": (Scheduler, "if not output.preempted_reqs and", "if"),
    "keeps a victim's tokens": (Scheduler, "self.token_budget += withdrawn", "pass"),
    "preempts the last of running under priority": (
        Scheduler,
        """if self.config.policy == "priority":
            return max""",
        """if False:
            return max""",
    ),
    "ignores the watermark": (Scheduler, "int(config.watermark * kv_cache_manager.block_pool.num_blocks)", "0"),
    "reserves to the last token": (
        Scheduler,
        "needed = manager.get_num_blocks_to_allocate(request, num_tokens,",
        "needed = manager.get_num_blocks_to_allocate(request, self.num_slots(request),",
    ),
    "never cuts a prompt": (Scheduler, "may_be_cut = self.config.enable_chunked_prefill or", "may_be_cut ="),
    "caps a request that is alone": (Scheduler, " or num_requests <= 1:", ":"),
    "queues a victim at the back": (
        Scheduler,
        "self.waiting.prepend_request(victim)",
        "self.waiting.add_request(victim)",
    ),
    "frees uncached blocks to the back": (BlockPool, "self.free_queue.move_to_end(block, last=False)", "pass"),
    "frees a table head first": (BlockPool, "for block in reversed(blocks):", "for block in blocks:"),
    "finds the newest duplicate": (BlockPool, "next(iter(blocks))", "next(reversed(blocks))"),
    "forgets to evict": (BlockPool, "if self.block_hash[block] is not None:", "if False:"),
    "hits the whole prompt": (
        KVCacheManager,
        "(request.num_tokens - 1) // self.block_size",
        "request.num_tokens // self.block_size",
    ),
    "ignores the salt": (
        KVCacheManager,
        "block_extra_keys(request, not hashes)\n",
        "block_extra_keys(request, False)\n",
    ),
}


@pytest.mark.parametrize("what", BREAK)
def test_a_broken_rule_shows(what, monkeypatch):
    """The recordings notice each rule that is broken, in the classes that serve."""
    break_class(monkeypatch, *BREAK[what])

    def differs(path):
        try:
            return compare(path) is not None
        except (AssertionError, KeyError, ValueError, IndexError):  # too broken to finish
            return True

    assert any(map(differs, WORKLOADS))


# --- The tool -------------------------------------------------------------------------------------------------------


def run(capsys, *argv) -> tuple[int, str, str]:
    """Exit code, standard output and error of the script with these arguments."""
    code = 0
    try:
        cli.run(lambda: replay.main([str(a) for a in argv]))
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_replay_as_a_user_runs_it(capsys):
    done = scripts.execute([sys.executable, "-m", "vllm", "replay", WORKLOADS[0]])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == trace_of(WORKLOADS[0]).read_text()
    code, out, error = run(capsys, "no-such.json")
    assert (code, out) == (2, "") and len(error.splitlines()) == 1 and "no-such.json" in error


def test_out_writes_one_trace_per_file(capsys, tmp_path):
    files = WORKLOADS[:4]
    assert run(capsys, *files, "--out", tmp_path / "new") == (0, "", "")
    for path in files:
        assert (tmp_path / "new" / path.name).read_text() == trace_of(path).read_text()
    code, _, error = run(capsys, files[0], trace_of(files[0]).parent / ".." / "workloads" / files[0].name,
                         "--out", tmp_path)  # fmt: skip
    assert code == 2 and "--out" in error


def test_several_files_without_out_are_printed_one_after_the_other(capsys):
    code, out, _ = run(capsys, *WORKLOADS[:3])
    assert code == 0 and out == "".join(trace_of(path).read_text() for path in WORKLOADS[:3])


def test_table_is_for_people(capsys):
    path = next(p for p in WORKLOADS if "preempt_basic" in p.stem)
    code, out, error = run(capsys, path, "--table")
    assert (code, error) == (0, "") and "25_preempt_basic" in out and "preempted" in out
    trace = json.loads(trace_of(path).read_text())
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert len(rows) >= len(trace["steps"])
    assert any("↻" in word for row in rows for word in row)


def test_400_workloads_replay_in_seconds():
    workloads = [json.loads(path.read_text()) for path in WORKLOADS]
    start = time.perf_counter()
    for i in range(400):
        replay.replay(workloads[i % len(workloads)])
    assert time.perf_counter() - start < 30


GOOD = json.loads((GOLDEN / "recorded" / "workloads" / "45_prefix_salt_and_skip.json").read_text())


def edited(*keys, value=None, drop=False):
    """The good workload with one place changed or removed."""
    workload = copy.deepcopy(GOOD)
    target = workload
    for key in keys[:-1]:
        target = target[key]
    if drop:
        del target[keys[-1]]
    else:
        target[keys[-1]] = value
    return workload


MALFORMED = [
    (edited("config", drop=True), "config"),
    (edited("requests", drop=True), "requests"),
    (edited("name", drop=True), "name"),
    (edited("name", value=7), "name"),
    (edited("config", value=[]), "config"),
    (edited("requests", value={}), "requests"),
    (edited("requests", 0, value=3), "requests[0]"),
    (edited("requests", 1, "id", value=GOOD["requests"][0]["id"]), "requests[1].id"),
    (edited("requests", 2, "id", value=GOOD["requests"][0]["id"]), "requests[2].id"),
    (edited("config", "num_block", value=3), "config.num_block"),
    (edited("config", "policy", value="random"), "config.policy"),
    (edited("config", "policy", value=["fcfs"]), "config.policy"),
    (edited("config", "async_scheduling", value="yes"), "config.async_scheduling"),
    (edited("config", "prefix_caching_hash_algo", value="md5"), "config.prefix_caching_hash_algo"),
    (edited("config", "watermark", value=1.0), "config.watermark"),
    (edited("config", "watermark", value=-0.1), "config.watermark"),
    (edited("config", "watermark", value="0.1"), "config.watermark"),
    (edited("config", "num_blocks", value=1), "config.num_blocks"),
    (edited("config", "block_size", value=0), "config.block_size"),
    (edited("config", "block_size", value=16.0), "config.block_size"),
    (edited("config", "max_model_len", value=0), "config.max_model_len"),
    (edited("config", "max_num_seqs", value=True), "config.max_num_seqs"),
    (edited("config", "max_num_seqs", value=10**6), "config.max_num_batched_tokens"),  # the budget is below it
    (edited("config", "max_num_batched_tokens", value=1), "config.max_num_batched_tokens"),
    (edited("config", "max_num_active_seqs", value=10**6), "config.max_num_active_seqs"),
    (edited("config", "max_num_scheduled_tokens", value=0), "config.max_num_scheduled_tokens"),
    (edited("config", "long_prefill_token_threshold", value=10**6), "config.long_prefill_token_threshold"),
    (edited("config", "long_prefill_token_threshold", value=-1), "config.long_prefill_token_threshold"),
    (edited("config", "enable_prefix_caching", value="yes"), "config.enable_prefix_caching"),
    (edited("config", "enable_chunked_prefill", value=None), "config.enable_chunked_prefill"),
    (edited("config", "eos_token_id", value=-1), "config.eos_token_id: must be a whole number from 0 or null"),
    (edited("config", "max_steps", value=10**12), "config.max_steps"),
    *((edited("requests", 1, field, drop=True), f"requests[1].{field}") for field in
      ("id", "arrival_step", "prompt_token_ids", "max_tokens", "forced_output_token_ids")),
    (edited("requests", 0, "id", value=5), "requests[0].id"),
    (edited("requests", 0, "arrival_step", value=-1), "requests[0].arrival_step"),
    (edited("requests", 0, "abort_step", value=-2), "requests[0].abort_step"),
    (edited("requests", 0, "abort_step", value=None), "requests[0].abort_step"),
    (edited("requests", 0, "arrival_step", value=10**9 + 1), "from 0 to 1000000000"),
    (edited("requests", 0, "max_tokens", value=0), "requests[0].max_tokens"),
    (edited("requests", 0, "priority", value="high"), "requests[0].priority"),
    (edited("requests", 0, "cache_salt", value=1), "requests[0].cache_salt"),
    *((edited("requests", 0, "cache_salt", value=half), "requests[0].cache_salt") for half in ("\ud800", "a\udfff")),
    (edited("requests", 0, "prompt_token_ids", value="abc"), "requests[0].prompt_token_ids"),
    (edited("requests", 0, "prompt_token_ids", value=[1, -1]), "requests[0].prompt_token_ids"),
    (edited("requests", 0, "prompt_token_ids", value=[1, 2.5]), "requests[0].prompt_token_ids"),
    (edited("requests", 0, "prompt_token_ids", value=[1, True]), "requests[0].prompt_token_ids"),
    (edited("requests", 0, "prompt_token_ids", value=[1, 2**63]), "requests[0].prompt_token_ids"),
    (edited("requests", 0, "forced_output_token_ids", value=[]), "forced_output_token_ids"),
    (edited("requests", 0, "stop_token_ids", value=3), "requests[0].stop_token_ids"),
    (edited("requests", 0, "max_token", value=3), "requests[0].max_token"),
    (edited("requests", 0, "skip_reading_prefix_cache", value=1), "requests[0].skip_reading_prefix_cache"),
    ([], "object"),
    (None, "object"),
]  # fmt: skip


def test_malformed_workloads_get_one_line_that_names_the_field(capsys, tmp_path):
    for workload, field in MALFORMED:
        with named(workload, field):
            path = tmp_path / "workload.json"
            path.write_text(json.dumps(workload))
            code, out, error = run(capsys, WORKLOADS[0], path, "--out", tmp_path / "out")
            assert (code, out) == (2, "")
            assert len(error.splitlines()) == 1 and field in error and str(path) in error, error


NAN = json.dumps(GOOD | {"note": float("nan")}).encode()  # in a field that nobody reads


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", NAN, b"[" * 100_000, b"1" * 10_000])
def test_files_that_are_not_json(capsys, tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    code, out, error = run(capsys, path)
    assert (code, out) == (2, "") and len(error.splitlines()) == 1 and "broken.json" in error


def test_an_unreadable_path_and_an_unwritable_folder(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    for argv in ([tmp_path], [WORKLOADS[0], "--out", tmp_path / "file"]):
        code, out, error = run(capsys, *argv)
        assert (code, out) == (2, "") and len(error.splitlines()) == 1


def test_ranges_include_their_ends():
    for name, field in workload_files.CONFIG_FIELDS.items():
        for value in {field.low, field.high} - {None}:
            field.check(name, value)
            with pytest.raises(common.InputError, match=name):
                field.check(name, value - 1 if value == field.low else value + 1)


def test_what_a_request_may_leave_out_it_may_also_say():
    """The smallest values, and null where a client's library writes it for a field that is not set."""
    request = {"id": "", "arrival_step": 0, "prompt_token_ids": [0], "max_tokens": 1, "forced_output_token_ids": [0]}
    more = {"abort_step": 3, "priority": -1, "stop_token_ids": None, "cache_salt": None,
            "skip_reading_prefix_cache": None}  # fmt: skip
    short, long = (replay.replay({"name": "", "config": {}, "requests": [r]}) for r in (request, request | more))
    assert long == short and short["steps"][0]["finished"] == {"": "length"}
    early = replay.replay({"name": "", "config": {}, "requests": [request | {"abort_step": 0, "cache_salt": "\ud7ff"}]})
    assert early["end"] == "finished" and early["steps"] == [
        {"step": 0, "added": [""], "aborted": [""], "scheduled": {}, "free_blocks": [64, 64]}
    ]


@pytest.mark.parametrize("length", [38, 39])
def test_a_long_value_is_cut_in_the_message(length):
    field = next(field for field in workload_files.CONFIG_FIELDS.values() if field.low is not None)
    shown = f'"{"x" * length}"'  # 40 characters are shown whole, one more is not
    with pytest.raises(common.InputError) as error:
        field.check("size", "x" * length)
    assert str(error.value).endswith(f"not {shown if length == 38 else shown[:37] + '...'}")
    with pytest.raises(common.InputError, match=r"size: must be a whole number from .*, not"):
        field.check("size", {1})  # from a program: no JSON at all


def test_an_empty_prompt_may_not_go_round_the_front_end():
    workload = edited("requests", 0, "prompt_token_ids", value=[])
    workload["config"] = {**workload["config"], "bypass_frontend": True}
    with pytest.raises(common.InputError, match=r"requests\[0\]\.prompt_token_ids: must not be empty"):
        workload_files.check_workload(workload)


def test_a_trace_for_people_says_all_that_happened():
    steps = [
        {"step": 0, "scheduled": {"a": 4, "b": 2}, "new": ["a", "b"], "prefix_hit": {"a": 0, "b": 16},
         "waiting_queue": ["c", "d"], "free_blocks": [5, 9]},
        {"step": 1, "scheduled": {"c": 1}, "resumed": ["c"], "preempted": ["a"], "finished": ["b"], "aborted": ["d"]},
        {"step": 2, "scheduled": {}},
    ]  # fmt: skip
    assert [*workload_files.step_rows({"steps": steps})] == [
        [0, "+a:4  +b:2(hit 16)", "", "", "c d", 9], [1, "↻c:1", "a", "b d(abort)", "", 0],
        [2, "nothing", "", "", "", 0],
    ]  # fmt: skip


def test_who_has_left_owns_nothing():
    """A finished request has its blocks to the end of its step; one that was preempted or aborted has lost them."""
    steps = [
        {"step": 0, "blocks": {"a": [1, 2], "b": [1, 3], "c": [4], "d": [5, 6]}},
        {"step": 1, "preempted": ["a"], "aborted": ["c"], "blocks": {"b": [1, 3, 7]}, "finished": ["d"]},
        {"step": 2},
    ]  # fmt: skip
    assert workload_files.owners_of({"steps": steps}) == [
        (0, {"a": 2, "b": 1, "c": 1, "d": 2}), (1, {"b": 3, "d": 2}), (2, {"b": 3})]  # fmt: skip


@pytest.mark.parametrize("name", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_every_hash_of_vllms_makes_the_same_decisions(name):
    assert (
        replay.replay(edited("config", "prefix_caching_hash_algo", value=name))["steps"] == replay.replay(GOOD)["steps"]
    )


def test_an_empty_prompt_is_refused_and_nobody_else():
    trace = replay.replay(edited("requests", 0, "prompt_token_ids", value=[]))
    assert list(trace["rejected"]) == [GOOD["requests"][0]["id"]] and trace["end"] == "finished"


def test_defaults_apply_and_an_empty_workload_ends_at_once():
    trace = replay.replay({"name": "empty", "config": {}, "requests": []})
    assert trace["end"] == "finished" and trace["steps"] == []
    assert trace["config"] == {
        "block_size": 16, "num_blocks": 65, "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64,
        "max_num_scheduled_tokens": None, "max_num_active_seqs": None, "enable_chunked_prefill": True,
        "enable_prefix_caching": False, "prefix_caching_hash_algo": "sha256", "long_prefill_token_threshold": 0,
        "long_prefill_token_threshold_adaptive": False, "scheduler_reserve_full_isl": True, "watermark": 0.0,
        "policy": "fcfs", "async_scheduling": False, "eos_token_id": None, "bypass_frontend": False,
        "record_free_queue": False, "max_steps": 5000,
    }, "those of the recordings"  # fmt: skip


# --- One step ahead ---------------------------------------------------------------------------------------------------


def one_request(forced: list[int], **config) -> dict:
    request = {"id": "a", "arrival_step": 0, "prompt_token_ids": [1, 2, 3], "max_tokens": 3, "stop_token_ids": [9]}
    return {"name": "one", "config": config, "requests": [request | {"forced_output_token_ids": forced}]}


def test_a_step_ahead_is_heard_of_a_step_later():
    steps = replay.replay(one_request([4, 5, 6], async_scheduling=True))["steps"]
    assert [(step["scheduled"], step.get("sampled", {})) for step in steps] == [
        ({"a": 3}, {}), ({"a": 1}, {"a": 4}), ({"a": 1}, {"a": 5}), ({}, {"a": 6}),
    ]  # fmt: skip
    assert steps[-1]["finished"] == {"a": "length"} and steps[-1]["free_blocks"] == [63, 64]


def test_a_step_after_the_stop_is_planned_in_vain():
    """What a model would write there need not be in the file."""
    steps = replay.replay(one_request([4, 9], async_scheduling=True))["steps"]
    assert [(step["scheduled"], step.get("sampled", {})) for step in steps] == [
        ({"a": 3}, {}), ({"a": 1}, {"a": 4}), ({"a": 1}, {"a": 9}),
    ]  # fmt: skip
    assert steps[-1]["finished"] == {"a": "stop"} and steps[-1]["free_blocks"] == [63, 64]


def test_steps_in_vain_are_nobody_elses():
    """Two that stop while a step for them is on its way, one of them alone in the engine; and one that never ran."""
    workload = one_request([4, 9], async_scheduling=True)
    (a,) = workload["requests"]
    late = a | {"id": "c", "arrival_step": 9, "forced_output_token_ids": [4, 5, 6]}
    workload["requests"] += [a | {"id": "b", "forced_output_token_ids": [4, 5, 6]}, late,
                             late | {"id": "gone", "arrival_step": 7, "abort_step": 7}]  # fmt: skip
    trace = replay.replay(workload)
    heard = {(step["step"], name): token for step in trace["steps"] for name, token in step.get("sampled", {}).items()}
    assert heard == {(1, "a"): 4, (1, "b"): 4, (2, "a"): 9, (2, "b"): 5, (3, "b"): 6,
                     (10, "c"): 4, (11, "c"): 5, (12, "c"): 6}  # fmt: skip
    assert trace["end"] == "finished" and trace["steps"][-1]["free_blocks"][-1] == 64


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_that_goes_on_needs_tokens(ahead):
    with pytest.raises(common.InputError, match="request 'a': has 2 tokens, but the request goes on"):
        replay.replay(one_request([4, 5], async_scheduling=ahead))


@pytest.mark.parametrize("ahead", [False, True])
def test_nothing_that_can_change_is_a_stall(ahead):
    """It fits in no pool of two blocks; the front end, which would have said so, is passed by."""
    workload = one_request([4, 5, 6], async_scheduling=ahead, num_blocks=3, block_size=1, max_model_len=8)
    refused = {"id": "b", "prompt_token_ids": list(range(9)), "arrival_step": 0, "abort_step": 8}
    workload["requests"].append(workload["requests"][0] | refused)
    trace = replay.replay(workload)
    assert trace["end"] == "stalled" and len(trace["steps"]) == 1 and list(trace["rejected"]) == ["b"]
    workload["requests"][0]["abort_step"] = 3  # that can
    trace = replay.replay(workload)
    assert trace["end"] == "finished" and trace["steps"][-1]["aborted"] == ["a"] and len(trace["steps"]) == 4


def test_a_step_that_only_hears_of_the_last_one_is_no_stall():
    """All blocks are a's until its last token is heard of, and no step is planned meanwhile."""
    workload = one_request([4, 5, 6], async_scheduling=True, num_blocks=6, block_size=1, max_model_len=6)
    workload["requests"].append(workload["requests"][0] | {"id": "b"})
    trace = replay.replay(workload)
    assert {} in [step["scheduled"] for step in trace["steps"]]
    assert trace["end"] == "finished" and trace["steps"][-1]["finished"] == {"b": "length"}


# --- Speed ----------------------------------------------------------------------------------------------------------


def test_a_step_is_cheaper_than_vllms():
    """vLLM's own, on two cores of a 2.3 GHz Xeon: 13.26 ms. The fastest of many: others may use the machine, too."""
    assert min(page.scheduler_cost(1000, steps=2) for _ in range(20)) < 13.26e-3


def calls_per_step(num_running: int, num_waiting: int) -> int:
    """Function calls of one decode step, C functions included: work that no other process on the machine changes."""
    config = SchedulerConfig(max_model_len=64, max_num_seqs=num_running, max_num_batched_tokens=8 * num_running)
    scheduler = make_scheduler(config, num_blocks=8 * num_running + 1, block_size=8)
    params = SamplingParams(max_tokens=None)
    for i in range(num_running + num_waiting):
        scheduler.add_request(Request(f"r{i}", [i] * 8, params, arrival_time=i))

    def step():
        output = scheduler.schedule()
        scheduler.update_from_output(output, {i: [1] for i in output.num_scheduled_tokens})

    step()  # the prefill
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    step()
    sys.setprofile(None)
    assert len(scheduler.running) == num_running and len(scheduler.waiting) == num_waiting
    return calls


def test_a_step_is_linear_in_the_running_and_independent_of_the_waiting():
    alone = calls_per_step(100, 0)
    assert calls_per_step(1000, 0) <= 10 * alone and alone <= 50 * 100
    assert calls_per_step(100, 5000) <= alone + 20
