"""Drafts, adapters, keys and values from elsewhere, planning ahead: as vLLM 0.32 decides (`record_vllm.py`)."""

from __future__ import annotations

import contextlib
import functools
import json
from collections import Counter, deque
from types import SimpleNamespace

import pytest

from engine import registry
from engine.core.scheduler import Scheduler
from engine.kv_transfer.base import KVConnectorBase
from engine.output import KVConnectorOutput
from engine.spec_decode.drafters import SpeculativeConfig
from lab import replay, workload_files
from support.broken import break_class
from support.recordings import GOLDEN, trace_of

preemption = registry.lesson("11_preemption")
FEATURES = ("speculative", "adapters", "remote", "loads", "together", "ahead", "ahead_speculative")
FIELDS = workload_files.CONFIG_FIELDS
WORKLOADS = {feature: sorted((GOLDEN / feature / "workloads").iterdir()) for feature in FEATURES}


class Elsewhere(KVConnectorBase):
    """The keys and values of some prompts are elsewhere: all arrive some steps after they were sent for, or those of
    the first blocks within the step."""

    fetches_later = True

    def __init__(self, workload):
        specs, config = {spec["id"]: spec for spec in workload["requests"]}, workload["config"]
        super().__init__(SimpleNamespace(kv_load_failure_policy=config.get("kv_load_failure_policy", "fail")))
        self.remote_steps = {name: spec["remote_steps"] for name, spec in specs.items() if "remote_steps" in spec}
        self.stored_blocks = {name: spec["stored_blocks"] for name, spec in specs.items() if "stored_blocks" in spec}
        self.failed_block = {name: spec["failed_block"] for name, spec in specs.items() if "failed_block" in spec}
        self.on_the_way, self.within_step, self.first, self.loaded = {}, set(), {}, {}
        self.size = config["block_size"]

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.first[request.request_id] = num_computed_tokens // self.size
        if blocks := self.stored_blocks.get(request.request_id):
            return max(0, min(blocks, (request.num_tokens - 1) // self.size) * self.size - num_computed_tokens), False
        if request.request_id not in self.remote_steps:
            return 0, False
        return request.num_prompt_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if request.request_id in self.stored_blocks:
            self.within_step.add(request.request_id)
        else:
            self.on_the_way[request.request_id] = self.remote_steps.pop(request.request_id)
        first = self.first[request.request_id]
        self.loaded[request.request_id] = blocks[first : first - (-num_external_tokens // self.size)]

    def get_finished(self):
        self.on_the_way = {name: steps - 1 for name, steps in self.on_the_way.items() if steps}
        over = {name for name, steps in self.on_the_way.items() if steps == 0}
        first = {name: self.failed_block.pop(name) for name in (over | self.within_step) & self.failed_block.keys()}
        self.within_step.clear()
        failed = {name: "lost" for name, block in first.items() if block is None}
        invalid = {block for name, i in first.items() if i is not None for block in self.loaded[name][i:]}
        return KVConnectorOutput(
            finished_recving=over - failed.keys(), failed_recving=failed, invalid_block_ids=invalid
        )


class Resident:
    """Adapters that have been read, and find a place whenever the scheduler lets them."""

    fair, num_blocks = False, 0

    def __init__(self, max_loras):
        self.max_loras = max_loras

    def collect(self):
        pass

    wait = collect

    def is_loaded(self, name):
        return True

    def fingerprint(self, name):
        return name

    def make_resident(self, name, pinned):
        return True

    def give_blocks(self, pinned):
        return False

    def is_leaving(self, name):
        return False


class Core(replay.ReplayCore):
    """The replay's, and what drafts, adapters and a connector add to it."""

    scheduler_class = Scheduler

    def __init__(self, workload):
        super().__init__({name: workload["config"].get(name, field.default) for name, field in FIELDS.items()})
        self.specs, self.drafting = {spec["id"]: spec for spec in workload["requests"]}, False
        self.sampled = deque()  # of the steps not heard of
        self.written = Counter()  # tokens that the model has sampled, per request: a step ahead, more than are heard of
        config, collaborators = workload["config"], {}
        if config["num_speculative_tokens"]:
            self.drafting = True
            collaborators["drafts"] = SpeculativeConfig(
                num_speculative_tokens=config["num_speculative_tokens"],
                num_speculative_tokens_per_batch_size=config.get("num_speculative_tokens_per_batch_size"),
            )
        if any({"remote_steps", "stored_blocks"} & spec.keys() for spec in self.specs.values()):
            collaborators["connector"] = Elsewhere(workload)
        if config["max_loras"]:
            collaborators["adapters"] = Resident(config["max_loras"])
        plain = self.scheduler
        self.scheduler = self.scheduler_class(
            plain.config, plain.kv_cache_manager, async_scheduling=plain.async_scheduling, **collaborators
        )

    def execute_model(self, output):
        result, drafts = super().execute_model(output), getattr(output, "scheduled_spec_decode_tokens", {})
        sampled = result.sampled_token_ids
        for request_id in sampled if self.drafting else ():
            places, written = len(drafts.get(request_id, ())), self.written[request_id]
            rest = self.forced[request_id][written:] or [0]  # behind an end nobody knew
            guesses = self.specs[request_id]["drafts"].get(str(written), ())[:places]
            right = next((i for i, draft in enumerate(guesses) if rest[i : i + 1] != [draft]), len(guesses))
            sampled[request_id] = rest[: right + 1]
            self.written[request_id] += len(sampled[request_id])
        self.entry["drafts"] = {request_id: list(token_ids) for request_id, token_ids in drafts.items()}
        self.sampled.append({request_id: list(token_ids) for request_id, token_ids in sampled.items()})
        self.entry["loading"] = sorted(getattr(self.scheduler, "waiting_for_remote_kvs", ()))
        return result

    def recorded_step(self):
        entry, requests = super().recorded_step(), self.scheduler.requests
        sampled = self.sampled.popleft() if len(self.sampled) > len(self.queue) else {}
        if not self.queue:
            self.sampled.clear()
        for request_id in (sampled.keys() - entry["sampled"].keys()) & requests.keys():
            self.written[request_id] -= len(sampled[request_id])  # computed on nothing, and not heard of
        # Their traces hold all that was sampled, also what came after a stop.
        entry["sampled"] = {i: sampled[i] if self.drafting else [token] for i, token in entry["sampled"].items()}
        if self.drafting and self.depth == 1:
            self.scheduler.update_draft_token_ids({
                i: list(self.specs[i]["drafts"].get(str(requests[i].num_output_tokens), ()))
                for i in sampled if i in requests
            })  # fmt: skip
        return entry

    def run(self):
        """Every step of the workload, in the form of the recordings."""
        pending = deque(enumerate(sorted(self.specs.values(), key=lambda spec: spec["arrival_step"])))
        aborts = deque(sorted((s["abort_step"], s["id"]) for s in self.specs.values() if "abort_step" in s))
        step, steps = 0, []
        while len(steps) < 200 and (pending or self.scheduler.has_unfinished_requests()):  # none is that long
            if not self.scheduler.has_unfinished_requests():
                step = max(step, pending[0][1]["arrival_step"])
            added, aborted = [], []
            while pending and pending[0][1]["arrival_step"] <= step:
                rank, spec = pending.popleft()
                self.forced[spec["id"]] = spec["forced_output_token_ids"]
                request = workload_files.make_request(spec, rank, self.config)
                request.lora_name = spec.get("lora")
                self.add_request(request)
                added.append(spec["id"])
            while aborts and aborts[0][0] <= step:
                request_id = aborts.popleft()[1]
                if request_id in self.scheduler.requests:
                    self.abort_requests([request_id])
                    self.last_tables.pop(request_id, None)
                    aborted.append(request_id)
            entry = {"step": step, "added": added, "aborted": aborted, **self.recorded_step()}
            steps.append({key: value for key, value in entry.items() if value or key in ("step", "scheduled")})
            step += 1
        return steps


def difference(feature, path) -> str | None:
    """Where our steps part from the recorded ones, in words; the order of keys within a field counts."""
    workload, recorded = json.loads(path.read_text()), json.loads(trace_of(path).read_text())["steps"]
    ours = Core(workload).run()
    for i, (a, b) in enumerate(zip(ours, recorded)):
        for field in a.keys() | b.keys():
            if json.dumps(a.get(field)) != json.dumps(b.get(field)):
                return f"entry {i}, {field}: {a.get(field)} instead of {b.get(field)}"
    return None if len(ours) == len(recorded) else f"{len(ours)} steps instead of {len(recorded)}"


@pytest.mark.parametrize(
    ("feature", "path"), [pytest.param(f, path, id=path.stem) for f in FEATURES for path in WORKLOADS[f]]
)
def test_every_recorded_decision_is_ours(feature, path):
    assert difference(feature, path) is None


def test_loads_that_end_together_free_their_blocks_in_one_order():
    """vLLM walks over a set here, whose order is another in each process; with ours, equal runs stay equal."""
    spec = {"arrival_step": 0, "prompt_token_ids": [1, 2], "max_tokens": 5, "forced_output_token_ids": [3] * 5}
    config = {"block_size": 8, "num_speculative_tokens": 0, "max_loras": 0, "num_blocks": 10, "record_free_queue": True}
    unwanted = [{"id": f"r{i}", "abort_step": 1, "remote_steps": 3, **spec} for i in range(6)]
    steps = Core({"config": config, "requests": [*unwanted, {"id": "other", **spec}]}).run()
    assert steps[0]["loading"] == [request["id"] for request in unwanted] and len(steps[1]["aborted"]) == 6
    assert [step["free_queue"] for step in steps[1:3]] == [[8, 9], [6, 5, 4, 3, 2, 1, 8, 9]]


@pytest.mark.parametrize(("lost", "kept"), [([], 13), ([{2}, {3}], 8), ([{3}, {2}], 8), ([{2, 3}], 8)])
def test_what_came_from_elsewhere_before_a_block_that_did_not_is_kept_and_counted(lost, kept):
    """One block is found here, three are sent for. A connector may tell of what is missing bit by bit."""
    spec = {"arrival_step": 0, "max_tokens": 5, "forced_output_token_ids": [3] * 5}
    config = {"block_size": 4, "num_speculative_tokens": 0, "max_loras": 0, "num_blocks": 20,
              "enable_prefix_caching": True, "kv_load_failure_policy": "recompute"}  # fmt: skip
    requests = [{"id": "here", "prompt_token_ids": [*range(5)], **spec},
                {"id": "there", "prompt_token_ids": [*range(14)], "remote_steps": 9, **spec}]  # fmt: skip
    core = Core({"config": config, "requests": requests})
    for rank, request in enumerate(requests):
        core.forced[request["id"]] = [3] * 5
        core.add_request(workload_files.make_request(request, rank, core.config))
        core.recorded_step()
    connector, there = core.scheduler.connector, core.scheduler.requests["there"]
    table = core.scheduler.kv_cache_manager.get_block_ids("there")
    assert table[1:] == connector.loaded["there"] and len(table) == 4
    heard = KVConnectorOutput
    for blocks in ({table[i] for i in each} for each in lost):
        connector.get_finished = functools.partial(heard, invalid_block_ids=blocks)
        core.recorded_step()
    connector.get_finished = functools.partial(heard, finished_recving={"there"})
    core.recorded_step()
    assert core.recorded_step()["prefix_hit"] == {"there": kept}
    assert (there.num_cached_tokens, there.num_external_computed_tokens) == (kept, kept - 4)
    assert core.scheduler.kv_cache_manager.get_block_ids("there")[:4] == table


def test_the_recordings_meet_the_rules():
    def steps(feature):
        for path in WORKLOADS[feature]:
            workload, trace = (json.loads(p.read_text()) for p in (path, trace_of(path)))
            assert trace["vllm"] == workload_files.REFERENCE and trace["steps"]
            for step in trace["steps"]:
                yield workload, step

    seen = set()
    for workload, step in steps("speculative"):
        config, specs = workload["config"], {spec["id"]: spec for spec in workload["requests"]}
        for request_id, drafts in step.get("drafts", {}).items():
            accepted = len(step["sampled"][request_id]) - 1
            seen.add("all stand" if accepted == len(drafts) else "some stand" if accepted else "none stands")
            if request_id in step.get("finished", {}):
                seen.add(f"{step['finished'][request_id]} at a draft")
            if len(drafts) < config["num_speculative_tokens"]:
                seen.add("fewer drafts")
            if step["computed"][request_id] == config["max_model_len"] - 1:
                seen.add("up to the last position")
            if sum(step["scheduled"].values()) == config["max_num_batched_tokens"]:
                seen.add("up to the budget")
        for field in ("preempted", "resumed", "aborted", "cached_keys"):
            if step.get(field):
                seen.add(f"{field}, {config['policy']}")
        assert all("drafts" in spec for spec in specs.values())
    assert seen >= {"all stand", "some stand", "none stands", "length at a draft", "stop at a draft", "fewer drafts",
                    "up to the last position", "up to the budget", "preempted, fcfs", "preempted, priority",
                    "resumed, fcfs", "aborted, fcfs", "cached_keys, fcfs"}  # fmt: skip

    seen = set()
    for workload, step in steps("adapters"):
        adapter = {spec["id"]: spec.get("lora") for spec in workload["requests"]}
        running = {adapter[request_id] for request_id in step.get("running_queue", ())}
        seen.add(f"{len(running - {None})} of {workload['config']['max_loras']}")
        seen |= {"mixed"} if len(running) > 1 and None in running else set()
        seen |= {key for key in ("preempted", "prefix_hit", "waiting_queue") if step.get(key)}
    assert seen >= {"1 of 1", "2 of 2", "mixed", "preempted", "prefix_hit", "waiting_queue"}

    seen, on_their_way = set(), ()
    for workload, step in steps("remote"):
        seen |= {"left on its way"} if {*on_their_way} & {*step.get("aborted", ())} else set()
        on_their_way = step.get("loading", ())
        remote = {spec["id"] for spec in workload["requests"] if "remote_steps" in spec}
        seen |= {f"{min(2, len(step['loading']))} on their way"} if "loading" in step else set()
        if remote & {*step.get("waiting_queue", ())}:
            full = len(step.get("running_queue", ())) == workload["config"]["max_num_seqs"]
            seen.add("no seat" if full else "no blocks")
        seen |= {key for key in ("preempted", "prefix_hit", "cached_keys") if step.get(key)}
    assert seen == {
        "1 on their way",
        "2 on their way",
        "left on its way",
        "no seat",
        "no blocks",
        "preempted",
        "prefix_hit",
        "cached_keys",
    }

    seen = set()
    for workload, step in steps("loads"):
        specs, config = {spec["id"]: spec for spec in workload["requests"]}, workload["config"]
        failed = {name for name, spec in specs.items() if "failed_block" in spec}
        seen |= {why for why in step.get("finished", {}).values() if config["kv_load_failure_policy"] == "fail"}
        for name in failed & step.get("prefix_hit", {}).keys():
            when = "within the step" if "stored_blocks" in specs[name] else "before it"
            rest = len(specs[name]["prompt_token_ids"]) - step["prefix_hit"][name]
            seen |= {f"{when}, {'whole' if specs[name]['failed_block'] is None else 'from a block on'}"}
            seen |= {"in chunks"} if step["scheduled"][name] < rest else set()
        seen |= {key for key in ("preempted", "waiting_queue") if step.get(key)}
        seen |= {"ahead"} if config["async_scheduling"] else set()
    assert seen >= {"error", "within the step, from a block on", "before it, whole", "before it, from a block on",
                    "in chunks", "preempted", "waiting_queue", "ahead"}  # fmt: skip

    seen = set()
    for workload, step in steps("together"):
        has = [word for word in ("drafts", "loading") if step.get(word)]
        seen.add(" and ".join([*has, "adapters"] if workload["config"]["max_loras"] else has))
        seen |= {f"{key}, {workload['config']['policy']}" for key in ("preempted", "aborted") if step.get(key)}
        seen |= {"a hit"} if any(step.get("prefix_hit", {}).values()) else set()
    assert seen >= {"drafts and loading", "drafts and adapters", "loading and adapters",
                    "drafts and loading and adapters", "preempted, fcfs", "aborted, fcfs", "a hit"}  # fmt: skip

    seen = set()
    for workload, step in steps("ahead"):
        config, heard = workload["config"], step.get("sampled", {})
        seen |= {"only planned"} if step["scheduled"] and not heard else set()
        seen |= {"only heard of"} if heard and not step["scheduled"] else set()
        seen |= {f"{key}, {config['policy']}" for key in ("preempted", "resumed", "aborted") if step.get(key)}
        for request_id in {*step.get("preempted", ())} & heard.keys():
            seen.add("a token for one without a seat")
            if request_id in step.get("finished", {}):
                seen.add("its last token")
        seen |= {"not scheduled again"} if {*step.get("running_queue", ())} - step["scheduled"].keys() else set()
        seen |= {"a hit"} if any(step.get("prefix_hit", {}).values()) else set()
        seen |= set(step.get("finished", {}).values())
    assert seen >= {"only planned", "only heard of", "preempted, fcfs", "preempted, priority", "resumed, fcfs",
                    "resumed, priority", "aborted, fcfs", "a token for one without a seat", "its last token",
                    "not scheduled again", "a hit", "length", "stop"}  # fmt: skip

    seen, before = set(), {}
    for workload, step in steps("ahead_speculative"):
        config, before, places = workload["config"], step, before.get("drafts", {})  # of those who are heard of now
        seen |= {f"{key}, {config['policy']}" for key in ("preempted", "resumed", "aborted") if step.get(key)}
        seen |= {"a hit"} if any(step.get("prefix_hit", {}).values()) else set()
        if any(len(drafts) < config["num_speculative_tokens"] for drafts in step.get("drafts", {}).values()):
            seen.add("fewer places")
        for request_id, token_ids in step.get("sampled", {}).items():
            fell = len(places.get(request_id, ())) - len(token_ids) + 1
            seen |= {"some fell" if fell else "all stood"} if request_id in places else set()
            seen |= {"fell for one without a seat"} if fell > 0 and request_id in step.get("preempted", ()) else set()
            if request_id in step.get("finished", {}):
                seen.add(f"{step['finished'][request_id]}{' at a draft' if len(token_ids) > 1 else ''}")
                seen |= {"in vain"} if request_id in step["scheduled"] else set()
    assert seen >= {"preempted, fcfs", "preempted, priority", "resumed, fcfs", "resumed, priority", "aborted, fcfs",
                    "aborted, priority", "a hit", "fewer places", "some fell", "all stood", "length", "stop",
                    "fell for one without a seat", "length at a draft", "stop at a draft", "in vain"}  # fmt: skip


# --- It can fail ------------------------------------------------------------------------------------------------------

BREAK = {  # the feature whose recordings notice, the text of a rule, and what stands in its place
    "rejected drafts stay computed": (
        "speculative", "request.num_computed_tokens -= len(drafts) - num_accepted", "pass"),
    "drafts exceed the budget": (
        "speculative", "num_new_tokens += min(len(request.spec_token_ids), room)",
        "num_new_tokens += len(request.spec_token_ids)"),
    "drafts cost nothing": ("speculative", "self.token_budget -= num_new_tokens", "self.token_budget -= 1"),
    "a victim's drafts stay in the step": (
        "speculative", "victim.spec_token_ids = []", "pass"),
    "a step is planned behind the last": ("ahead", "if coming and (", "if False and ("),
    "what comes for a victim is lost": (
        "ahead", "if request is None or not token_ids:",
        "if request is None or not token_ids or request.status is RequestStatus.PREEMPTED:"),
    "answers are not found": (
        "ahead", "if self.async_scheduling and self.kv_cache_manager", "if False and self.kv_cache_manager"),
    "who ended without a seat queues on": (
        "ahead", "if request.num_computed_tokens == 0 and request in self.waiting:", "if False:"),
    "drafts on their way do not count": (
        "ahead_speculative", "request.num_output_placeholders + request.num_draft_placeholders\n",
        "request.num_output_placeholders\n"),
    "a victim counts on drafts": (
        "ahead_speculative", "victim.num_computed_tokens = victim.num_draft_placeholders = 0",
        "victim.num_computed_tokens = 0"),
    "a victim is rolled back": (
        "ahead_speculative", "(self.async_scheduling and request.status is RequestStatus.PREEMPTED)", "False"),
    "drafts behind a sure end": (
        "ahead_speculative", "return 0\n        num_new_tokens = min(self._behind",
        "return min(len(request.spec_token_ids), self.token_budget)\n        num_new_tokens = min(self._behind"),
    "accepted drafts are not found": (
        "ahead_speculative", "num_computed = min(request.num_computed_tokens, request.num_tokens - 1)",
        "num_computed = min(request.num_computed_tokens, request.num_tokens - len(token_ids))"),
    "who waits for a place blocks the queue": (
        "adapters", """                passed_over.append(self.waiting.pop_request())
                continue
""", """                break
"""),
    "one place more": ("adapters", "len(scheduled) == adapters.max_loras", "len(scheduled) == adapters.max_loras + 1"),
    "idle ones keep theirs": (
        "adapters", "members = (output.scheduled_running_reqs,", "members = (self.running,"),
    "sent for before prompts have theirs": (
        "remote", "if missing + promised + watermark >", "if missing + watermark >"),
    "seated last": (
        "remote", """        if not output.preempted_reqs and self._schedule_received(output):
            self._schedule_waiting(output)
""", """        if not output.preempted_reqs:
            self._schedule_waiting(output)
            self._schedule_received(output)
"""),
    "no room for drafts": (
        "together", "self.tokens_with_drafts = 1 + drafts.num_speculative_tokens if drafts else 0",
        "self.tokens_with_drafts = 0"),
    "prefills are over when they end": (
        "together", "self.prefilling = {r for r in running if r.num_computed_tokens < r.num_tokens}",
        "self.prefilling = set()"),
    "who was left out is a prefill": (
        "together", "prefills = (*self.prefilling, *output.scheduled_new_reqs, *output.scheduled_resumed_reqs)",
        "prefills = self.running"),
    "seated without an adapter": (
        "together", "if self.adapters and not self._adapter_may_run(request, output, self.adapters):", "if False:"),
    "blocks are free at once": (
        "loads", """        if request.status is RequestStatus.RUNNING:
            self.kv_cache_manager.evict_uncomputed(request, num_tokens)
""", """        if request.status is RequestStatus.RUNNING:
            self.kv_cache_manager.evict_uncomputed(request, num_tokens)
        else:
            self.kv_cache_manager.free(request)
            num_tokens = 0
"""),
    "all of it is lost": ("loads", "found[request] = table.index(bad[0]) * manager.block_size,", "found[request] = 0,"),
    "an error waits for its turn": ("loads", 'if connector.load_failure_policy == "recompute" or', "if True or"),
    "others overtake it": (
        "loads", "        for request in arrived:\n",
        "        for request in sorted(arrived, key=lambda request: request.num_computed_tokens == 0):\n"),
    "who computed on nothing keeps the token": (
        "loads", "sampled_token_ids.pop(request.request_id, None)  # computed on nothing", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("what", BREAK)
def test_a_broken_rule_shows(what, monkeypatch):
    feature, old, new = BREAK[what]
    break_class(monkeypatch, Scheduler, old, new)
    assert noticed(feature)


def noticed(feature) -> bool:
    def differs(path):
        try:
            return difference(feature, path) is not None
        except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, StopIteration, ValueError):
            return True  # too broken to finish

    return any(map(differs, WORKLOADS[feature]))


# --- What it decides otherwise when a load within the step fails: it trusts -------------------------------------------
#
# vLLM leaves blocks in the index that a load within the step has left empty, and lets whoever shares them go on: the
# first one will compute them again. In this recording it does not, or not yet, and others read what nobody has written.


def texts(steps):
    """Steps whose order of keys counts."""
    return [{field: json.dumps(value) for field, value in step.items()} for step in steps]


class Trusting(Scheduler):
    def __init__(self, *about, **collaborators):
        super().__init__(*about, **collaborators)
        self.kv_cache_manager.evict_uncomputed = lambda *about: None

    def update_from_output(self, output, sampled_token_ids):
        self.in_step = output.num_scheduled_tokens
        return super().update_from_output(output, sampled_token_ids)

    def _lost(self, news):
        found, shared, self.void = super()._lost(news), self.void, []
        return found | {r: (r.num_computed_tokens - self.in_step[r.request_id], "shared") for r in shared}


def test_blocks_that_nobody_has_written_are_not_read(monkeypatch):
    (path,) = (GOLDEN / "unwritten" / "workloads").iterdir()
    workload, recorded = json.loads(path.read_text()), json.loads(trace_of(path).read_text())["steps"]
    ours = Core(workload).run()
    # `leaves` and `first` were the only ones who could have computed their first eight tokens.
    assert recorded[1]["aborted"] == ["leaves"] and recorded[1]["prefix_hit"] == {"later": 8}
    assert recorded[1]["computed"]["first"] == 5 and recorded[1]["sampled"]["shares"] == [2]
    hits = {name: hit for step in ours[1:] for name, hit in step.get("prefix_hit", {}).items()}
    assert hits == {"shares": 8, "later": 0} and ours[1]["preempted"] == ["shares"]
    assert [step["computed"]["first"] for step in ours[:3]] == [10, 5, 10] and "shares" in ours[2]["resumed"]
    monkeypatch.setattr(Core, "scheduler_class", Trusting)
    assert texts(Core(workload).run()) == texts(recorded)


# --- What vLLM 0.33 decides otherwise: three rules --------------------------------------------------------------------
#
# All workloads were recorded once more from vLLM 0.33. Where it decides otherwise, `golden/vllm_0.33/` has its trace;
# three rules changed here, one by one, give that trace.

CHANGED = sorted((GOLDEN / "vllm_0.33").iterdir())

# By priority, a request that preempts itself does not end the walk: others, more important, stand behind it.
GOES_ON_BEHIND_ITSELF = (
    """  # the walk ends here, even if others behind it could go on (in 0.33 they do)
                    return
            output""",
    """
                    break
            if request.status is not RequestStatus.RUNNING:
                if self.config.policy == "priority":
                    continue
                return
            output""",
)
# Adapters of all who have a seat count, also of those of whom nothing more is to be computed.
EVERY_ADAPTER_COUNTS = ("for part in members for r in part if", "for r in self.running if")
# Full blocks can be found once their tokens are verified, not only when the next step is scheduled.
FINDS_WHAT_WAS_VERIFIED = (
    "if self.async_scheduling and self.kv_cache_manager",
    "if (self.async_scheduling or self.drafts) and self.kv_cache_manager",
)
RULES_OF_033 = {
    "fuzz": GOES_ON_BEHIND_ITSELF,
    "ahead": GOES_ON_BEHIND_ITSELF,
    "adapters": EVERY_ADAPTER_COUNTS,
    "speculative": FINDS_WHAT_WAS_VERIFIED,
}


@pytest.mark.parametrize("path", CHANGED, ids=lambda path: path.stem)
def test_three_rules_make_it_vllm_033(path, monkeypatch):
    def ours():
        workload = json.loads(next(GOLDEN.glob(f"*/workloads/{path.name}")).read_text())
        steps = replay.replay(workload)["steps"] if feature == "fuzz" else Core(workload).run()
        return texts(steps)

    feature, recorded = path.stem.split("_")[0], json.loads(path.read_text())
    assert recorded["vllm"] == "0.33.0" and len(CHANGED) == 15
    assert ours() != texts(recorded["steps"])
    break_class(monkeypatch, Scheduler, *RULES_OF_033[feature])
    assert ours() == texts(recorded["steps"])


# --- What it decides otherwise on a GPU: one rule ---------------------------------------------------------------------
#
# A step ahead, with a connector, vLLM holds back freed blocks as long as a step in flight may write to them: its loads
# do not wait for that step. Ours do, so we free at once, as vLLM's scheduler does where its platform is a CPU. The
# rule, put in front of our scheduler, gives the traces of a GPU.

ON_A_GPU = sorted((GOLDEN / "on_a_gpu").iterdir())


class InFlight(Exception):
    """The victim's blocks may still be written to: to preempt it would not help now, so the walk ends."""


class HoldsBack(Scheduler):
    def __init__(self, *about, **collaborators):
        super().__init__(*about, **collaborators)
        self.num_planned = self.num_heard = 0  # steps, of those with tokens
        self.last_step, self.held_back = Counter(), deque()

    def is_in_flight(self, request):
        return self.last_step[request.request_id] > self.num_heard

    def schedule(self):
        output = super().schedule()
        if output.num_scheduled_tokens:
            self.num_planned += 1
            self.last_step |= dict.fromkeys(output.num_scheduled_tokens, self.num_planned)
        return output

    def _schedule_running(self, output):
        with contextlib.suppress(InFlight):
            super()._schedule_running(output)

    def _choose_victim(self):
        victim = super()._choose_victim()
        if self.is_in_flight(victim):
            raise InFlight
        return victim

    def _free_request(self, request):
        tables, name = self.kv_cache_manager.req_to_blocks, request.request_id
        if self.is_in_flight(request) and name in tables:
            self.held_back.append((self.num_planned, tables[name]))
            tables[name] = []
        super()._free_request(request)

    def update_from_output(self, output, sampled_token_ids):
        self.num_heard += bool(output.num_scheduled_tokens)
        while self.held_back and self.held_back[0][0] <= self.num_heard:
            self.kv_cache_manager.block_pool.free(self.held_back.popleft()[1])
        return super().update_from_output(output, sampled_token_ids)


@pytest.mark.parametrize("path", ON_A_GPU, ids=lambda path: path.stem)
def test_one_rule_makes_it_a_gpus(path, monkeypatch):
    workload = json.loads((GOLDEN / "remote" / "workloads" / path.name).read_text())
    recorded = texts(json.loads(path.read_text())["steps"])
    assert texts(Core(workload).run()) != recorded
    monkeypatch.setattr(Core, "scheduler_class", HoldsBack)
    assert texts(Core(workload).run()) == recorded
