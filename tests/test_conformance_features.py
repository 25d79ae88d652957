"""Drafts, adapters, keys and values from elsewhere, planning ahead: as vLLM 0.32 decides (`record_vllm.py`)."""

from __future__ import annotations

import contextlib
import functools
import json
from collections import Counter, defaultdict, deque
from types import SimpleNamespace

import common
import pytest
from test_conformance import GOLDEN, trace_of

preemption, optimizations = common.lesson("11_preemption"), common.lesson("05_optimizations")
speculation, multi_lora = common.lesson("07_spec_decode"), common.lesson("12_multi_lora")
disagg, drafts_ahead = common.lesson("08_disagg"), common.lesson("07a_drafts_ahead")
scheduling = preemption.continuous_batching
FEATURES = ("speculative", "adapters", "remote", "loads", "together", "ahead", "ahead_speculative")
FIELDS = preemption.CONFIG_FIELDS
WORKLOADS = {feature: sorted((GOLDEN / feature / "workloads").iterdir()) for feature in FEATURES}


class Elsewhere(disagg.KVConnectorBase):
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
        return disagg.connectors.KVConnectorOutput(
            finished_recving=over - failed.keys(), failed_recving=failed, invalid_block_ids=invalid
        )


class Core(preemption.ReplayCore):
    """Lesson 11's, and what drafts, adapters and a connector add to it."""

    def __init__(self, workload):
        super().__init__({name: workload["config"].get(name, field.default) for name, field in FIELDS.items()})
        self.specs, self.drafting = {spec["id"]: spec for spec in workload["requests"]}, False
        self.sampled = deque()  # of the steps not heard of
        self.written = Counter()  # tokens that the model has sampled, per request: a step ahead, more than are heard of
        if workload["config"]["num_speculative_tokens"]:
            self.drafting = True
            ahead = workload["config"]["async_scheduling"]
            mixin = drafts_ahead.DraftsAheadScheduler if ahead else speculation.SpeculativeScheduler
            about = {name: workload["config"].get(name) for name in (
                "num_speculative_tokens", "num_speculative_tokens_per_batch_size")}  # fmt: skip
            config = speculation.SpeculativeConfig(**about)
            places = {"num_speculative_tokens": config.num_speculative_tokens,
                      "drafts_in_batch": config.drafts_in_batch}  # fmt: skip
            kind = type("Scheduler", (mixin, type(self.scheduler)), places)
            self.scheduler = kind(self.scheduler.config, self.scheduler.kv_cache_manager)
        if any({"remote_steps", "stored_blocks"} & spec.keys() for spec in self.specs.values()):
            kind = disagg.connector_scheduler(type(self.scheduler))
            self.scheduler = kind(self.scheduler.config, self.scheduler.kv_cache_manager, Elsewhere(workload))
        if max_loras := workload["config"]["max_loras"]:
            # Adapters that have been read, and find a place whenever the scheduler lets them.
            limits, yes = SimpleNamespace(max_loras=max_loras, fair=False), lambda *about: True
            manager = SimpleNamespace(config=limits, blocks={}, retired={}, loading={}, collect=yes, is_loaded=yes,
                                      make_resident=yes, wait=yes, fingerprints=defaultdict(str))  # fmt: skip
            multi_lora.make_lora_scheduler(self.scheduler, manager)

    def execute_model(self, output):
        sampled, drafts = super().execute_model(output), getattr(output, "scheduled_spec_decode_tokens", {})
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
        return sampled

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
                request = preemption.workload_files.make_request(spec, rank, self.config)
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
        core.add_request(preemption.workload_files.make_request(request, rank, core.config))
        core.recorded_step()
    connector, there = core.scheduler.connector, core.scheduler.requests["there"]
    table = core.scheduler.kv_cache_manager.get_block_ids("there")
    assert table[1:] == connector.loaded["there"] and len(table) == 4
    heard = disagg.connectors.KVConnectorOutput
    for blocks in ({table[i] for i in each} for each in lost):
        connector.get_finished = functools.partial(heard, invalid_block_ids=blocks)
        core.recorded_step()
    connector.get_finished = functools.partial(heard, finished_recving={"there"})
    core.recorded_step()
    assert core.recorded_step()["prefix_hit"] == {"there": kept}
    assert (there.num_cached_tokens, there.num_external_computed_tokens) == (kept, kept - 4)
    assert core.scheduler.kv_cache_manager.get_block_ids("there")[:4] == table


class CarefulCore(Core):
    """Lesson 05's scheduler in front of lesson 04's, which reserves a request's blocks for its whole life."""

    def __init__(self, workload):
        super().__init__(workload)
        config = workload["config"]
        limits = [config[name] for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")]
        manager = scheduling.KVCacheManager(config["num_blocks"], config["block_size"], config["max_model_len"])
        self.scheduler = optimizations.AsyncScheduler(scheduling.SchedulerConfig(*limits), manager)


def is_careful(path) -> bool:
    config = json.loads(path.read_text())["config"]
    return not config["enable_chunked_prefill"] and "preempted" not in trace_of(path).read_text()


@pytest.mark.parametrize("path", [*filter(is_careful, WORKLOADS["ahead"])], ids=lambda path: path.stem)
def test_lesson_04_a_step_ahead_decides_as_vllm(path):
    """Where prompts are whole and nobody is preempted; only which blocks it takes, and when, is another matter."""
    ours, recorded = CarefulCore(json.loads(path.read_text())).run(), json.loads(trace_of(path).read_text())["steps"]
    for field in ("scheduled", "sampled", "finished", "running_queue", "waiting_queue"):
        assert [step.get(field) for step in ours] == [step.get(field) for step in recorded]


def test_the_recordings_meet_the_rules():
    def steps(feature):
        for path in WORKLOADS[feature]:
            workload, trace = (json.loads(p.read_text()) for p in (path, trace_of(path)))
            assert trace["vllm"] == preemption.REFERENCE and trace["steps"]
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

Speculative, Ahead = speculation.SpeculativeScheduler, optimizations.AsyncScheduler
DraftsAhead = drafts_ahead.DraftsAheadScheduler


def _never_rolls_back(self, output, sampled):
    return super(Speculative, self).update_from_output(output, sampled)


def _drafts_uncut(self, request):
    known = super(Speculative, self)._num_new_tokens(request)
    behind = request.num_tokens - request.num_computed_tokens
    return known + (len(getattr(request, "spec_token_ids", ())) if known == behind else 0)


def _drafts_free(self, request, num_new_tokens, output, original=Speculative._grant):
    original(self, request, num_new_tokens, output)
    self.token_budget += len(self.scheduled_spec_decode_tokens.get(request.request_id, ()))


def _victim_keeps_drafts(self, victim, output):
    super(Speculative, self)._preempt_request(victim, output)


def _nobody_overtakes(self, output):
    preemption.Scheduler._schedule_waiting(self, output)


def _ahead_of_the_end(self, request, original=Ahead._num_new_tokens):
    request.max_tokens, most = 10**9, request.max_tokens
    num_new_tokens = original(self, request)
    request.max_tokens = most
    return num_new_tokens


def _loses_what_comes(self, output, sampled, original=Ahead.update_from_output):
    preempted = {i for i in sampled if i in self.requests and self.requests[i] not in self.running}
    return original(self, output, {i: token_ids for i, token_ids in sampled.items() if i not in preempted})


def _finds_no_answers(self, output, sampled, original=Ahead.update_from_output):
    manager = self.kv_cache_manager
    manager.enable_caching, enabled = False, manager.enable_caching
    heard = original(self, output, sampled)
    manager.enable_caching = enabled
    return heard


def _victim_counts_on_drafts(self, victim, output):
    super(DraftsAhead, self)._preempt_request(victim, output)


def _rolls_a_victim_back(self, output, sampled):
    for request_id, drafts in output.scheduled_spec_decode_tokens.items():
        self.num_draft_placeholders[request_id] -= len(drafts)
    return super(DraftsAhead, self).update_from_output(output, sampled)


def _behind_the_end(self, request):
    known = super(Speculative, self)._num_new_tokens(request)
    if known < request.num_tokens - request.num_computed_tokens:
        return known
    return known + max(0, min(len(getattr(request, "spec_token_ids", ())), self.token_budget - known))


def _finds_what_was_known(self, request, token_ids):
    known, caching = request.num_tokens, self.kv_cache_manager.enable_caching
    self.kv_cache_manager.enable_caching = False
    new_token_ids = super(Ahead, self)._update_request_with_output(request, token_ids)
    self.kv_cache_manager.enable_caching = caching
    if caching and request.status is scheduling.RequestStatus.RUNNING:
        self.kv_cache_manager.cache_blocks(request, min(request.num_computed_tokens, known))
    return new_token_ids


def _queues_for_ever(self, output, sampled, original=Ahead.update_from_output):
    self.waiting.remove_request = lambda request: None
    try:
        return original(self, output, sampled)
    finally:
        del self.waiting.remove_request


BREAK = {
    "rejected drafts stay computed": ("speculative", Speculative, "update_from_output", _never_rolls_back),
    "drafts exceed the budget": ("speculative", Speculative, "_num_new_tokens", _drafts_uncut),
    "drafts cost nothing": ("speculative", Speculative, "_grant", _drafts_free),
    "a victim's drafts stay in the step": ("speculative", Speculative, "_preempt_request", _victim_keeps_drafts),
    "a step is planned behind the last": ("ahead", Ahead, "_num_new_tokens", _ahead_of_the_end),
    "what comes for a victim is lost": ("ahead", Ahead, "update_from_output", _loses_what_comes),
    "answers are not found": ("ahead", Ahead, "update_from_output", _finds_no_answers),
    "who ended without a seat queues on": ("ahead", Ahead, "update_from_output", _queues_for_ever),
    "drafts on their way do not count": ("ahead_speculative", DraftsAhead, "_num_ahead", Ahead._num_ahead),
    "all that is not known is drafts": ("ahead_speculative", DraftsAhead, "_grant", Speculative._grant),
    "a victim counts on drafts": ("ahead_speculative", DraftsAhead, "_preempt_request", _victim_counts_on_drafts),
    "a victim is rolled back": ("ahead_speculative", DraftsAhead, "update_from_output", _rolls_a_victim_back),
    "drafts behind a sure end": ("ahead_speculative", Speculative, "_num_new_tokens", _behind_the_end),
    "accepted drafts are not found": ("ahead_speculative", Ahead, "_update_request_with_output", _finds_what_was_known),
}


@pytest.mark.parametrize("what", BREAK)
def test_a_broken_rule_shows(what, monkeypatch):
    feature, owner, name, broken = BREAK[what]
    monkeypatch.setattr(owner, name, broken)
    assert noticed(feature)


@pytest.mark.parametrize("what", ["who waits for a place blocks the queue", "one place more", "idle ones keep theirs"])
def test_a_broken_rule_of_adapters_shows(what, monkeypatch):
    def broken(base, manager, original=multi_lora.lora_scheduler):
        if what == "one place more":
            manager.config.max_loras += 1
        kind = original(base, manager)
        if what == "who waits for a place blocks the queue":
            kind._schedule_waiting = _nobody_overtakes
        if what == "idle ones keep theirs":
            admit, seen = kind._admit, set()

            def too_strict(self, request):
                seen.update(r.lora_name for r in self.running)
                places = manager.config.max_loras
                self.passed_over = bool(request.lora_name) and request.lora_name not in seen and len(seen) >= places
                return 0 if self.passed_over else admit(self, request)

            kind._admit = too_strict
        return kind

    monkeypatch.setattr(multi_lora, "lora_scheduler", broken)
    assert noticed("adapters")


@pytest.mark.parametrize("what", ["sent for without a seat", "sent for before prompts have theirs", "seated last"])
def test_a_broken_rule_of_fetching_shows(what, monkeypatch):
    def broken(base, original=disagg.connector_scheduler):
        class Broken(original(base)):
            def _schedule_waiting(self, output):
                if what == "seated last":
                    super(original(base), self)._schedule_waiting(output)
                if what == "sent for without a seat":
                    for request in list(self.waiting):
                        if request.request_id in self.connector.remote_steps:
                            self._admit(request)
                super()._schedule_waiting(output)

            def _send_for(self, *about):
                if what == "sent for before prompts have theirs":
                    self.running, running = [], self.running
                    sent_for, self.running = super()._send_for(*about), running
                    return sent_for
                return super()._send_for(*about)

        return Broken

    monkeypatch.setattr(disagg, "connector_scheduler", broken)
    assert noticed("remote")


@pytest.mark.parametrize("what", ["no room for drafts", "prefills are over when they end", "seated without an adapter",
                                  "who was left out is a prefill"])  # fmt: skip
def test_a_broken_rule_of_all_together_shows(what, monkeypatch):
    def without_room(base, original=disagg.connector_scheduler):
        return type("Broken", (original(base),), {"num_speculative_tokens": 0})

    def forgetful(base, original=disagg.connector_scheduler):
        class Broken(original(base)):
            def schedule(self):
                output, self.prefilling = super().schedule(), set()
                if what == "who was left out is a prefill":
                    self.prefilling = {r for r in self.running if r.num_computed_tokens < r.num_tokens}
                    self.prefilling |= set(self.waiting_for_remote_kvs.values())
                return output

        return Broken

    def careless(base, manager, original=multi_lora.lora_scheduler):
        return type("Broken", (original(base, manager),), {"_may_run": lambda self, request: True})

    if what == "seated without an adapter":
        monkeypatch.setattr(multi_lora, "lora_scheduler", careless)
    else:
        monkeypatch.setattr(disagg, "connector_scheduler", without_room if what == "no room for drafts" else forgetful)
    assert noticed("together")


@pytest.mark.parametrize("what", ["blocks are free at once", "all of it is lost", "an error waits for its turn",
                                  "its turn is the last", "others overtake it",
                                  "who computed on nothing keeps the token"])  # fmt: skip
def test_a_broken_rule_of_failed_loads_shows(what, monkeypatch):
    def broken(base, original=disagg.connector_scheduler):
        class Broken(original(base)):
            def _handle_failed_load(self, request, num_tokens, why):
                if what == "all of it is lost":
                    num_tokens = 0
                if what == "an error waits for its turn":
                    self.connector.config.kv_load_failure_policy = "recompute"
                if what == "blocks are free at once" and request not in self.running:
                    self.kv_cache_manager.free(request)
                    num_tokens = 0
                return super()._handle_failed_load(request, num_tokens, why)

            def _schedule_waiting(self, output):
                if what == "its turn is the last":
                    for name in [i for i in self.received if not self.waiting_for_remote_kvs[i].num_computed_tokens]:
                        self.kv_cache_manager.free(self.waiting_for_remote_kvs[name])
                        self.received.remove(name)
                        self.waiting.add_request(self.waiting_for_remote_kvs.pop(name))
                if what == "others overtake it":
                    loads = self.waiting_for_remote_kvs
                    by_luck = sorted(self.received, key=lambda name: loads[name].num_computed_tokens == 0)
                    self.waiting_for_remote_kvs = {name: loads.pop(name) for name in by_luck} | loads
                super()._schedule_waiting(output)

            def update_from_output(self, output, sampled):
                if what == "who computed on nothing keeps the token":
                    sampled = type("Kept", (dict,), {"pop": lambda *about: None})(sampled)
                return super().update_from_output(output, sampled)

        return Broken

    monkeypatch.setattr(disagg, "connector_scheduler", broken)
    assert noticed("loads")


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


def _trusts(base, original=disagg.connector_scheduler):
    class Scheduler(original(base)):
        def __init__(self, *about):
            super().__init__(*about)
            self.kv_cache_manager.evict_uncomputed = lambda *about: None

        def update_from_output(self, output, sampled):
            self.in_step = output.num_scheduled_tokens
            return super().update_from_output(output, sampled)

        def _lost(self, news):
            found, shared, self.void = super()._lost(news), self.void, []
            return found | {r: (r.num_computed_tokens - self.in_step[r.request_id], "shared") for r in shared}

    return Scheduler


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
    monkeypatch.setattr(disagg, "connector_scheduler", _trusts)
    ours = [{field: json.dumps(value) for field, value in step.items()} for step in Core(workload).run()]
    assert ours == [{field: json.dumps(value) for field, value in step.items()} for step in recorded]


# --- What vLLM 0.33 decides otherwise: three rules --------------------------------------------------------------------
#
# All workloads were recorded once more from vLLM 0.33. Where it decides otherwise, `golden/vllm_0.33/` has its trace;
# three rules changed here, one by one, give that trace.

Next = preemption.Scheduler
CHANGED = sorted((GOLDEN / "vllm_0.33").iterdir())


def _goes_on_behind_itself(self, output):
    """By priority, a request that preempts itself does not end the walk: others, more important, stand behind it."""
    for request in tuple(self.running):
        if request.status is not scheduling.RequestStatus.RUNNING:
            continue
        room = self.config.max_model_len - 1 - request.num_computed_tokens
        num_new_tokens = min(self._num_new_tokens(request), room)
        while num_new_tokens > 0 and self.kv_cache_manager.allocate_slots(request, num_new_tokens) is None:
            victim = self._choose_victim()
            self._preempt_request(victim, output)
            if victim is request:
                if self.config.policy != "priority":
                    return
                num_new_tokens = 0
        if num_new_tokens > 0:
            output.scheduled_running_reqs.append(request)
            self._grant(request, num_new_tokens, output)


def _every_adapter_counts(base, manager, original=multi_lora.lora_scheduler):
    """Adapters of all who have a seat count, also of those of whom nothing more is to be computed."""
    return type("Scheduler", (original(base, manager),), {
        "of_this_step": property(lambda self: (self.running,), lambda self, parts: None),
    })  # fmt: skip


class _FindsWhatWasVerified(Speculative):
    """Full blocks can be found once their tokens are verified, not only when the next step is scheduled."""

    def update_from_output(self, output, sampled):
        known = [self.requests[i] for i in sampled if i in self.requests]
        self.heard = known if self.kv_cache_manager.enable_caching else []
        heard = super().update_from_output(output, sampled)
        for request in self.heard:
            if request.request_id in self.requests:
                self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
        return heard

    def _free_request(self, request):
        if request in self.heard:
            self.kv_cache_manager.cache_blocks(request, min(request.num_computed_tokens, request.num_tokens - 1))
        super()._free_request(request)


RULES_OF_033 = {
    "fuzz": lambda patch: patch.setattr(Next, "_schedule_running", _goes_on_behind_itself),
    "ahead": lambda patch: patch.setattr(Next, "_schedule_running", _goes_on_behind_itself),
    "adapters": lambda patch: patch.setattr(multi_lora, "lora_scheduler", _every_adapter_counts),
    "speculative": lambda patch: patch.setattr(speculation, "SpeculativeScheduler", _FindsWhatWasVerified),
}


@pytest.mark.parametrize("path", CHANGED, ids=lambda path: path.stem)
def test_three_rules_make_it_vllm_033(path, monkeypatch):
    def ours():
        workload = json.loads(next(GOLDEN.glob(f"*/workloads/{path.name}")).read_text())
        steps = preemption.replay(workload)["steps"] if feature == "fuzz" else Core(workload).run()
        return text(steps)

    def text(steps):
        return [{field: json.dumps(value) for field, value in step.items()} for step in steps]  # the order counts in it

    feature, recorded = path.stem.split("_")[0], json.loads(path.read_text())
    assert recorded["vllm"] == "0.33.0" and len(CHANGED) == 15
    assert ours() != text(recorded["steps"])
    RULES_OF_033[feature](monkeypatch)
    assert ours() == text(recorded["steps"])


# --- What it decides otherwise on a GPU: one rule ---------------------------------------------------------------------
#
# A step ahead, with a connector, vLLM holds back freed blocks as long as a step in flight may write to them: its loads
# do not wait for that step. Ours do, so we free at once, as vLLM's scheduler does where its platform is a CPU. The
# rule, put in front of our scheduler, gives the traces of a GPU.

ON_A_GPU = sorted((GOLDEN / "on_a_gpu").iterdir())


class InFlight(Exception):
    """The victim's blocks may still be written to: to preempt it would not help now, so the walk ends."""


def _holds_back(base, original=disagg.connector_scheduler):
    class Scheduler(original(base)):
        def __init__(self, *about):
            super().__init__(*about)
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

        def update_from_output(self, output, sampled):
            self.num_heard += bool(output.num_scheduled_tokens)
            while self.held_back and self.held_back[0][0] <= self.num_heard:
                self.kv_cache_manager.block_pool.free(self.held_back.popleft()[1])
            return super().update_from_output(output, sampled)

    return Scheduler


@pytest.mark.parametrize("path", ON_A_GPU, ids=lambda path: path.stem)
def test_one_rule_makes_it_a_gpus(path, monkeypatch):
    def ours():
        workload = json.loads((GOLDEN / "remote" / "workloads" / path.name).read_text())
        return [{field: json.dumps(value) for field, value in step.items()} for step in Core(workload).run()]

    recorded = [{field: json.dumps(value) for field, value in step.items()}
                for step in json.loads(path.read_text())["steps"]]  # fmt: skip
    assert ours() != recorded
    monkeypatch.setattr(disagg, "connector_scheduler", _holds_back)
    assert ours() == recorded
