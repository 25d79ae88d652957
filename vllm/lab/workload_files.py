"""Workload files: what `replay` reads, what it writes, and the knobs that a file may turn.

A workload is a JSON object, {"name": "two", "config": {"num_blocks": 9}, "requests": [...]}. `config` turns knobs of
the scheduler and its pool, each with a default. A request says when it arrives, what it reads, how much it may write
and, since no model runs, what it will write:

    {"id": "a", "arrival_step": 0, "prompt_token_ids": [1, 2], "max_tokens": 1, "forced_output_token_ids": [7]}

Files come from outside, so every field is checked before anything runs: a wrong one gets one line that names it and
what is allowed there. A trace has an entry for each step, in the format of the recordings from vLLM, which
tests/golden/README.md describes. What happens between the two is in `replay.py` and in the engine's scheduler.

Read for this: vLLM 0.32 `config/scheduler.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import SchedulerConfig
from engine.request import Request, SamplingParams
from lab import figures

# --- The fields ----------------------------------------------------------------------------------------------------

ID, TEXT = "a string of printable characters", "a string without half a surrogate pair"
INT, FLOAT, BOOL, IDS = "a whole number", "a number", "true or false", "a list of token ids"


@dataclass(frozen=True)
class Field:
    """One field of a workload file: its type, its range, and what stands for it when it is absent."""

    kind: str
    default: Any = None
    low: int | None = None
    high: int | None = None
    required: bool = False
    nullable: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raises InputError naming the field and what is allowed."""
        if value is None and self.nullable:
            return
        if self.kind == ID:
            good = isinstance(value, str) and value.isprintable()
        elif self.kind == TEXT:
            good = isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)
        elif self.kind == BOOL:
            good = isinstance(value, bool)
        elif self.kind == IDS:
            good = isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)
        else:
            good = type(value) in ((int, float) if self.kind == FLOAT else (int,)) and self.is_inside(value)
        if not good:
            shown = json.dumps(value, default=str)
            span = "" if self.low is None else f" from {self.low}" + ("" if self.high is None else f" to {self.high}")
            raise common.InputError(
                f"{name}: must be {self.kind}{span}{' or null' if self.nullable else ''}, "
                f"not {shown if len(shown) <= 40 else shown[:37] + '...'}"
            )

    def is_inside(self, value: Any) -> bool:
        return not ((self.low is not None and value < self.low) or (self.high is not None and value > self.high))


MOST = 10**9
CONFIG_FIELDS = {
    "block_size": Field(INT, 16, 1, MOST),
    "num_blocks": Field(INT, 65, 2, 10**6),  # null block included; each is an object
    "max_model_len": Field(INT, 512, 1, MOST),
    "max_num_seqs": Field(INT, 8, 1, MOST),
    "max_num_batched_tokens": Field(INT, 64, 1, MOST),
    "max_num_scheduled_tokens": Field(INT, None, 1, MOST, nullable=True),
    "max_num_active_seqs": Field(INT, None, 1, MOST, nullable=True),
    "enable_chunked_prefill": Field(BOOL, True),
    "enable_prefix_caching": Field(BOOL, False),
    "prefix_caching_hash_algo": Field(ID, "sha256"),
    "long_prefill_token_threshold": Field(INT, 0, 0, MOST),
    "long_prefill_token_threshold_adaptive": Field(BOOL, False),
    "scheduler_reserve_full_isl": Field(BOOL, True),
    "watermark": Field(FLOAT, 0.0),
    "policy": Field(ID, "fcfs"),
    "async_scheduling": Field(BOOL, False),
    "eos_token_id": Field(INT, None, 0, nullable=True),
    "bypass_frontend": Field(BOOL, False),  # hand over-long prompts to the scheduler all the same
    "record_free_queue": Field(BOOL, False),
    "max_steps": Field(INT, 5000, 0, 10**6),
}
REQUEST_FIELDS = {
    "id": Field(ID, required=True),
    "arrival_step": Field(INT, None, 0, MOST, required=True),
    "prompt_token_ids": Field(IDS, required=True),
    "max_tokens": Field(INT, None, 1, MOST, required=True),
    "forced_output_token_ids": Field(IDS, required=True),
    "priority": Field(INT, 0),
    "abort_step": Field(INT, None, 0, MOST),
    "stop_token_ids": Field(IDS, nullable=True),
    "cache_salt": Field(TEXT, nullable=True),
    "skip_reading_prefix_cache": Field(BOOL, nullable=True),
}
SCHEDULER_KEYS = SchedulerConfig.__dataclass_fields__.keys() & CONFIG_FIELDS.keys()
HASH_ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")  # keys only matter as equal or not: all are sha256


# --- 3. A workload, checked -------------------------------------------------------------------------------------------


def _check_object(name: str, value: Any, fields: dict[str, Field]) -> None:
    """Raises InputError unless `value` is an object with exactly the fields that are known and required."""
    if not isinstance(value, dict):
        raise common.InputError(f"{name}: must be an object")
    for key in value:
        if key not in fields:
            shown = key if key.isprintable() else json.dumps(key)
            raise common.InputError(f"{name}.{shown}: unknown field (known: {', '.join(fields)})")
    for key, spec in fields.items():
        if key in value:
            spec.check(f"{name}.{key}", value[key])
        elif spec.required:
            raise common.InputError(f"{name}.{key}: is missing")


def check_workload(workload: Any) -> dict:
    """A workload as read from JSON, checked, its config completed by defaults.

    Raises:
        common.InputError: one line naming the field and the allowed values.
    """
    if not isinstance(workload, dict):
        raise common.InputError("must be a JSON object with name, config and requests")
    for key in ("name", "config", "requests"):
        if key not in workload:
            raise common.InputError(f"{key}: is missing")
    Field(ID).check("name", workload["name"])
    _check_object("config", workload["config"], CONFIG_FIELDS)
    config = {key: workload["config"].get(key, spec.default) for key, spec in CONFIG_FIELDS.items()}
    try:
        SchedulerConfig(**{key: config[key] for key in SCHEDULER_KEYS})
    except common.InputError as error:
        raise common.InputError(f"config.{error}") from None
    if config["prefix_caching_hash_algo"] not in HASH_ALGORITHMS:
        raise common.InputError(f"config.prefix_caching_hash_algo: must be one of {', '.join(HASH_ALGORITHMS)}")
    if not isinstance(workload["requests"], list):
        raise common.InputError("requests: must be a list")
    ids = set()
    for i, request in enumerate(workload["requests"]):
        _check_object(f"requests[{i}]", request, REQUEST_FIELDS)
        if request["id"] in ids:
            raise common.InputError(f"requests[{i}].id: {request['id']!r} is used twice")
        if config["bypass_frontend"] and not request["prompt_token_ids"]:
            raise common.InputError(f"requests[{i}].prompt_token_ids: must not be empty")
        ids.add(request["id"])
    return {**workload, "config": config}


def load_workload(path: str | Path) -> dict:
    """Read and check one workload file. Raises InputError, in one line that names the file and the field."""

    def refuse_constant(text: str) -> None:
        raise ValueError(f"{text} is not JSON")

    try:
        return check_workload(json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=refuse_constant))
    except OSError as error:
        raise common.InputError(f"workload {str(path)!r}: {error.strerror}") from None
    except common.InputError as error:
        raise common.InputError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:  # broken JSON or UTF-8
        raise common.InputError(f"{path}: not readable as JSON ({error})") from None


def make_request(spec: dict, rank: int, config: dict) -> Request:
    """Entry `spec` of a checked workload as a request; `rank`, its place among all arrivals, is its arrival time."""
    params = SamplingParams(
        max_tokens=spec["max_tokens"],
        stop_token_ids=spec.get("stop_token_ids"),
        skip_reading_prefix_cache=bool(spec.get("skip_reading_prefix_cache")),
    )
    return Request(
        spec["id"],
        spec["prompt_token_ids"],
        params,
        arrival_time=float(rank),
        priority=spec.get("priority", 0),
        eos_token_id=config["eos_token_id"],
        cache_salt=spec.get("cache_salt"),
    )


# --- 4. A trace, for programs and for people --------------------------------------------------------------------------

REFERENCE = "0.32.0"  # the vLLM release whose decisions these are


def dumps(trace: dict) -> str:
    """A trace as JSON, one step per line: small, and its differences can be read. Equal traces are equal bytes."""
    head = json.dumps({key: value for key, value in trace.items() if key != "steps"}, separators=(",", ":"))
    steps = ",\n".join(json.dumps(step, separators=(",", ":")) for step in trace["steps"])
    return f'{head[:-1]},"steps":[\n{steps}\n]}}\n'


def step_rows(trace: dict) -> Iterator[list[Any]]:
    """A trace for people: one row per step."""
    for step in trace["steps"]:
        marks = dict.fromkeys(step.get("new", ()), "+") | dict.fromkeys(step.get("resumed", ()), "↻")
        hits = step.get("prefix_hit", {})
        yield [
            step["step"],
            "  ".join(f"{marks.get(i, '')}{i}:{n}" + (f"(hit {hits[i]})" if hits.get(i) else "")
                      for i, n in step["scheduled"].items()) or "nothing",
            " ".join(step.get("preempted", ())),
            " ".join([*step.get("finished", ()), *(f"{i}(abort)" for i in step.get("aborted", ()))]),
            " ".join(step.get("waiting_queue", ())),
            step["free_blocks"][-1] if "free_blocks" in step else 0,
        ]  # fmt: skip


def owners_of(trace: dict) -> list[tuple[int, dict[str, int]]]:
    """(step, {request: blocks}) of a replayed trace; a shared block is counted once, for its first owner."""
    tables: dict[str, list[int]] = {}
    rows = []
    for step in trace["steps"]:
        for request_id in (*step.get("preempted", ()), *step.get("aborted", ())):
            tables.pop(request_id, None)
        tables.update(step.get("blocks", {}))
        seen: set[int] = set()
        held = {}
        for request_id, table in tables.items():
            held[request_id] = len(set(table) - seen)
            seen.update(table)
        rows.append((step["step"], held))
        for request_id in step.get("finished", ()):
            tables.pop(request_id, None)
    return rows


def draw_owners(folder: str | Path, name: str, owners: list, preemptions: list[int], pool: int, title: str) -> Path:
    """One band per request, the one admitted first at the bottom; height: blocks it holds."""
    figure, axis = figures.new_figure(8.0, 3.7)
    ids = list(dict.fromkeys(request_id for _, held in owners for request_id in held))
    changes = [(a, b) for a, b in itertools.pairwise([(None, None), *owners]) if a[1] != b[1]]
    owners = [*(b for _, b in changes), owners[-1]]  # a step in which no count changes needs no corner
    steps = [step for step, _ in owners]
    bands = [[held.get(request_id, 0) for _, held in owners] for request_id in ids]
    there = [[False, *(request_id in held for _, held in owners)] for request_id in ids]
    entries = [sum(b and not a for a, b in itertools.pairwise(row)) for row in there]  # more than one: it came back
    shown = entries.index(max(entries))
    colors = [figures.COLORS["blue" if i == shown else "purple"] for i in range(len(ids))]
    axis.stackplot(steps, bands, colors=colors, step="post", linewidth=0.6, edgecolor="white")
    for color, label in (
        ("blue", f"{ids[shown]}, admitted {entries[shown]} times" if entries[shown] > 1 else ids[shown]),
        ("purple", "other requests"),
    ):
        axis.fill_between([], [], color=figures.COLORS[color], label=label)
    marks = [pool * 1.045] * len(preemptions)
    axis.plot(preemptions, marks, "v", color=figures.COLORS["red"], markersize=4, clip_on=False, label="preemption")
    axis.axhline(pool, color=figures.COLORS["grey"], linewidth=1)
    axis.set(xlabel="step", ylabel="blocks held", ylim=(0, pool * 1.09), xlim=(steps[0], steps[-1] + 1), title=title)
    figure.legend(ncols=3, loc="outside lower center", fontsize=9)
    return figures.save_figure(figure, folder, name)
