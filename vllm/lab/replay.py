"""`replay`: what would vLLM do with this workload? Every decision of the scheduler, step by step, without a model.

Owns the clock of a replay and the form of its steps; called by `python -m vllm replay`. It never decides: that is the
engine's scheduler, and `workload_files.py` reads and writes the files. vLLM: `step_with_batch_queue` in
`vllm/v1/engine/core.py`, and `tests/record_vllm.py`, which asks vLLM itself.
"""

from __future__ import annotations

import common  # it settles the device before torch is used

import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine import arguments
from engine.config import SchedulerConfig
from engine.core.engine_core import EngineCore
from engine.core.scheduler import make_scheduler
from engine.output import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from engine.request import Request, prompt_length_error
from lab import cli
from lab.workload_files import (
    REFERENCE,
    SCHEDULER_KEYS,
    check_workload,
    draw_owners,
    dumps,
    load_workload,
    make_request,
    owners_of,
    step_rows,
)


class ReplayCore(EngineCore):
    """The engine's loop without a model: a request that has caught up gets the next of its given tokens.

    `execute_model` runs between `schedule()` and `update_from_output()`: just when a step can be looked at. With async
    scheduling the tokens of a step are heard of when the next one has been scheduled.
    The one difference to serving is `evict_uncomputed_blocks=False`, without which it would not decide as vLLM does.
    """

    def __init__(self, config: dict, plug: Mapping[str, Any] | None = None) -> None:
        limits = SchedulerConfig(**{key: config[key] for key in SCHEDULER_KEYS}, evict_uncomputed_blocks=False)
        sizes = config["num_blocks"], config["block_size"], config["enable_prefix_caching"]
        super().__init__(make_scheduler(limits, *sizes, plug, async_scheduling=config["async_scheduling"]))
        self.config, self.depth = config, 1 + config["async_scheduling"]
        self.queue: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()  # steps not heard of
        self.forced: dict[str, list[int]] = {}
        self.last_tables: dict[str, list[int]] = {}
        self.entry: dict[str, Any] = {}

    def check_request(self, request: Request) -> None:
        """vLLM's front end looks at the prompt's length only, and that is done before the replay starts."""

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """The recorded tokens; `entry` is the step as the trace has it."""
        scheduler, tables = self.scheduler, self.scheduler.kv_cache_manager.req_to_blocks
        for request in output.preempted_reqs:  # its next table is news, even if it should be the same
            self.last_tables.pop(request.request_id, None)
        changed = {
            r.request_id: list(tables[r.request_id])
            for r in scheduler.running
            if self.last_tables.get(r.request_id) != tables[r.request_id]
        }
        self.last_tables.update(changed)
        admitted = {r.request_id: r for r in (*output.scheduled_new_reqs, *output.scheduled_resumed_reqs)}
        sampled = {}
        for request_id in output.num_scheduled_tokens:
            request = scheduler.requests[request_id]
            ahead = max(0, request.num_output_placeholders - 1)
            if request.num_computed_tokens >= request.num_tokens + ahead:
                sampled[request_id] = self.forced[request_id][request.num_output_tokens + ahead :][:1]
        self.entry = {
            "scheduled": dict(output.num_scheduled_tokens),
            "new": _ids(output.scheduled_new_reqs),
            "resumed": _ids(output.scheduled_resumed_reqs),
            "running": _ids(output.scheduled_running_reqs),
            "preempted": _ids(output.preempted_reqs),
            "prefix_hit": {
                i: admitted[i].num_computed_tokens - n for i, n in output.num_scheduled_tokens.items() if i in admitted
            },
            "computed": {r.request_id: r.num_computed_tokens for r in scheduler.running},
            "blocks": changed,
            "free_blocks": [scheduler.kv_cache_manager.block_pool.num_free_blocks],
        }
        return ModelRunnerOutput(sampled)

    def step(self) -> list[EngineCoreOutput]:
        """Schedule a step; hear of the oldest once `depth` are in the queue (vLLM: `step_with_batch_queue`)."""
        output = self.scheduler.schedule()
        self.queue.append((output, self.execute_model(output)))
        if len(self.queue) < self.depth:
            return []
        output, result = self.queue.popleft()
        for request_id, token_ids in result.sampled_token_ids.items():
            if not token_ids and request_id in self.scheduler.requests:  # it has not ended while this was on its way
                raise common.InputError(
                    f"forced_output_token_ids of request {request_id!r}: has "
                    f"{len(self.forced[request_id])} tokens, but the request goes on"
                )
        return self.update_from_output(output, result)

    def recorded_step(self) -> dict[str, Any]:
        """One `step()`, described in the format of the recordings."""
        heard = self.step()
        self.entry["sampled"] = {o.request_id: o.new_token_ids[0] for o in heard if o.new_token_ids}
        entry = self.entry
        pool: Any = self.scheduler.kv_cache_manager.block_pool  # its index and queue are in no seam
        entry["free_blocks"].append(pool.num_free_blocks)
        entry["finished"] = {o.request_id: o.finish_reason for o in heard if o.finish_reason}
        entry["running_queue"] = _ids(self.scheduler.running)
        entry["waiting_queue"] = _ids(self.scheduler.waiting)
        if self.config["enable_prefix_caching"]:
            entry["cached_keys"] = len(pool.cached_block_hash_to_block)
        if self.config["record_free_queue"]:
            entry["free_queue"] = list(pool.free_queue)
        return entry


def _ids(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]


def replay(workload: dict, plug: Mapping[str, Any] | None = None) -> dict:
    """What the scheduler decides on `workload`, step by step: the same JSON as recorded from vLLM. `plug` may name
    somebody else's scheduler or block pool.

    The trace ends "finished", or "stalled" when nothing was scheduled, nothing can arrive and somebody still waits
    (the state will never change), or after `max_steps` steps.

    Raises:
        common.InputError: the workload is malformed.
    """
    workload = check_workload(workload)
    config = workload["config"]
    core = ReplayCore(config, plug)
    scheduler = core.scheduler
    trace = {
        "vllm": REFERENCE,
        "workload": workload["name"],
        "config": config,
        "end": "max_steps",
        "rejected": {},
        "steps": [],
    }
    pending = []
    # The rank in (arrival step, position in the file) is the arrival time.
    for rank, spec in enumerate(sorted(workload["requests"], key=lambda spec: spec["arrival_step"])):
        error = prompt_length_error(len(spec["prompt_token_ids"]), config["max_model_len"])
        if error and not config["bypass_frontend"]:
            trace["rejected"][spec["id"]] = error
        else:
            pending.append((spec, rank))
    aborts = sorted((spec["abort_step"], spec["id"]) for spec, _ in pending if "abort_step" in spec)
    pending.reverse()  # to pop from the end
    aborts.reverse()

    step = 0
    while len(trace["steps"]) < config["max_steps"]:
        if not scheduler.has_unfinished_requests():
            if not pending:
                trace["end"] = "finished"
                break
            step = pending[-1][0]["arrival_step"]  # an idle engine sleeps until somebody comes
        added, aborted = [], []
        while pending and pending[-1][0]["arrival_step"] <= step:
            spec, rank = pending.pop()
            core.forced[spec["id"]] = spec["forced_output_token_ids"]
            core.add_request(make_request(spec, rank, config))
            added.append(spec["id"])
        while aborts and aborts[-1][0] <= step:
            request_id = aborts.pop()[1]
            if request_id in scheduler.requests:
                core.abort_requests([request_id])
                aborted.append(request_id)
        entry = {"step": step, "added": added, "aborted": aborted, **core.recorded_step()}
        trace["steps"].append({key: value for key, value in entry.items() if value or key in ("step", "scheduled")})
        moving = (entry["scheduled"], entry["preempted"], entry["sampled"], pending, aborts)
        if not any(moving) and scheduler.has_unfinished_requests():
            trace["end"] = "stalled"
            break
        step += 1
    return trace


def build_parser() -> arguments.Parser:
    p = arguments.Parser(
        prog="python -m vllm replay", description="What the scheduler decides on recorded or own workloads."
    )
    p.add_argument("workloads", nargs="+", metavar="WORKLOAD.json")
    p.add_argument("--out", metavar="DIR", help="write one trace per workload here, under the workload's name")
    p.add_argument("--table", action="store_true", help="print the steps for people")
    p.add_argument("--figure", dest="owners", type=cli.folder, metavar="DIR", help="draw the pool's owners")
    return p


def main(argv: Sequence[str]) -> None:
    """`replay WORKLOAD.json …`: traces to standard output or, under the workloads' names, into `--out`."""
    args = build_parser().parse_args(argv)
    workloads = {Path(path): load_workload(path) for path in args.workloads}  # all are checked before the first runs
    if args.out and len({path.name for path in workloads}) < len(workloads):
        raise common.InputError("--out: two workload files have the same name")
    for path, workload in workloads.items():
        try:
            trace = replay(workload)
            if args.out:
                Path(args.out).mkdir(parents=True, exist_ok=True)
                (Path(args.out) / path.name).write_text(dumps(trace), encoding="utf-8")
        except common.InputError as error:
            raise common.InputError(f"{path}: {error}") from None
        except OSError as error:
            raise common.InputError(f"--out {args.out}: {error.strerror}") from None
        if args.owners and trace["steps"]:
            preemptions = [step["step"] for step in trace["steps"] for _ in step.get("preempted", ())]
            pool, title = workload["config"]["num_blocks"] - 1, f"Who owns the pool over time: {workload['name']}"
            try:
                draw_owners(args.owners, f"replay_{path.stem}", owners_of(trace), preemptions, pool, title)
            except OSError as error:
                raise common.InputError(f"--figure {args.owners}: {error.strerror}") from None
        if args.table:
            columns = ("step", "scheduled (+ new, ↻ resumed)", "preempted", "finished", "waiting", "free")
            common.table(columns, list(step_rows(trace)), title=f"{workload['name']}: {trace['end']}")
            for request_id, error in trace["rejected"].items():
                common.say(f"{request_id} refused: {error}")
        elif not args.out:
            sys.stdout.write(dumps(trace))
