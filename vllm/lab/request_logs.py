"""A run that somebody has: `requests.jsonl`, a request a line, and `meta.json` beside it, which says what served it.

Owns these files' fields and what is allowed in them; called by `predict`. It never simulates, and knows no flag.
vLLM: `vllm/v1/metrics/stats.py`, whose clocks the times are of (`RequestStateStats`).

    {"input_toks": 358, "output_toks": 531, "arrival_time": 0.27}           all that a prediction needs
    … "prefix_id": 3, "prefix_toks": 128                                    the first 128 tokens are prefix 3's
    … "queued_ts": 7.4, "scheduled_ts": 7.6, "first_token_ts": 8.1, "last_token_ts": 24.9       what a fit needs, too
"""

from __future__ import annotations

import common

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lab.fit import Observed

MOST_TOKENS = 10**7
MOST_SECONDS = 10**11  # a clock of milliseconds or nanoseconds has more, whenever it began
TIMES = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")


class Row(NamedTuple):
    """One line of a workload. `output_len` and `arrival` None: it does not say."""

    input_len: int
    output_len: int | None
    arrival: float | None
    prefix_len: int
    prefix_id: int
    times: tuple[float, ...] | None  # of TIMES


@dataclass(frozen=True)
class Log:
    """A workload, in the order of arrival."""

    path: Path
    rows: list[Row]
    meta: dict[str, Any]

    def observed(self, count: int) -> Observed:
        """The times of the first `count`, on the clock on which the first arrives at 0.

        `arrival_time` is of the wall clock and the others are of a monotonic one. Nobody is heard of before it has
        arrived, and somebody was heard of at once: the least `queued_ts - arrival_time` of these requests is how far
        the clocks are apart. Raises InputError for a request without times.
        """
        rows = self.rows[:count]
        times: list[tuple[float, ...]] = []
        for number, row in enumerate(rows, 1):
            if row.times is None or row.arrival is None:
                wanted = ", ".join(("arrival_time", *TIMES))
                raise common.InputError(f"{self.path}: request {number} (by arrival) has not all of {wanted}")
            times.append(row.times)
        apart = min(queued - (row.arrival or 0.0) for (queued, *_), row in zip(times, rows))
        origin = (rows[0].arrival or 0.0) + apart
        return Observed(*([each[k] - origin for each in times] for k in range(len(TIMES))))


def read_log(path: str | Path, meta: str | Path | None = None) -> Log:
    """The requests of a file, and its `meta.json` (another one if `meta` names it; none is no error). Raises InputError
    that names line and field."""
    path = Path(path)
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                rows.append(_row(json.loads(line)))
            except common.InputError as error:
                raise common.InputError(f"{path}: line {number}: {error}") from None
            except (ValueError, RecursionError) as error:
                raise common.InputError(f"{path}: line {number}: not readable as JSON ({error})") from None
    if not rows:
        raise common.InputError(f"{path}: holds no request")
    with_arrival = [row for row in rows if row.arrival is not None]
    if with_arrival and len(with_arrival) < len(rows):
        raise common.InputError(f"{path}: arrival_time: must be in all lines, or in none")
    rows.sort(key=lambda row: row.arrival or 0.0)
    beside = path.with_name("meta.json") if meta is None else Path(meta)
    return Log(path, rows, read_meta(beside) if meta is not None or beside.is_file() else {})


def read_text(path: Path) -> str:
    """Raises InputError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise common.InputError(f"{path}: not readable ({error.strerror})") from None
    except ValueError as error:
        raise common.InputError(f"{path}: not UTF-8 ({error})") from None


def _row(row: Any) -> Row:
    if not isinstance(row, dict):
        raise common.InputError("must be a JSON object with input_toks, output_toks and arrival_time")
    prefix = _whole(row, "prefix_toks", 0) or 0
    input_len = _whole(row, "input_toks", 1)
    if input_len is None:
        raise common.InputError("input_toks: is missing")
    if prefix > input_len:
        raise common.InputError(f"prefix_toks {prefix}: must be at most input_toks ({input_len})")
    times = tuple(_time(row, name) for name in TIMES)
    known = tuple(at for at in times if at is not None)
    if known and known[-1] == 0:  # what vLLM's clocks show before anything has happened
        known = ()
    if len(known) == len(TIMES) and list(known) != sorted(known):
        raise common.InputError(f"{', '.join(TIMES)}: must not go back in time")
    return Row(
        input_len,
        _whole(row, "output_toks", 1),
        _time(row, "arrival_time"),
        prefix,
        _whole(row, "prefix_id", 0) or 0,
        known if len(known) == len(TIMES) else None,
    )


def _whole(row: Mapping[str, Any], name: str, low: int) -> int | None:
    value = row.get(name)
    if value is not None and (type(value) is not int or not low <= value <= MOST_TOKENS):
        raise common.InputError(f"{name} {value!r:.40}: must be a whole number from {low} to {MOST_TOKENS}")
    return value


def _time(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    if value is not None and (type(value) not in (int, float) or not 0 <= value <= MOST_SECONDS):
        raise common.InputError(f"{name} {value!r:.40}: must be seconds, 0 or above, at most {MOST_SECONDS}")
    return value


def read_meta(path: Path) -> dict[str, Any]:
    """`meta.json`: `model`, `engine_kwargs`, and perhaps `kv_cache` and `hardware`. Raises InputError."""
    try:
        meta = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise common.InputError(f"{path}: not readable as JSON ({error})") from None
    parts = ("engine_kwargs", "kv_cache", "hardware")
    if not isinstance(meta, dict) or not all(isinstance(meta.get(part) or {}, dict) for part in parts):
        raise common.InputError(f"{path}: must be a JSON object, and so must be {', '.join(parts)} in it")
    return meta


def meta_settings(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What a `meta.json` says, by the names of our flags; what it leaves open is not there."""
    cache, hardware = meta.get("kv_cache") or {}, meta.get("hardware") or {}
    found = dict(meta.get("engine_kwargs") or {})
    found.setdefault("model", meta.get("model"))
    blocks, engines = cache.get("num_gpu_blocks"), found.get("data_parallel_size")
    if type(blocks) is int and type(engines) is int and engines > 1:
        blocks //= engines  # vLLM's front end counts those of all engines: `v1/engine/core_client.py`
    found["num_gpu_blocks_override"] = found.get("num_gpu_blocks_override") or blocks
    for name in ("block_size", "gpu_memory_utilization", "enable_prefix_caching"):
        found[name] = found[name] if found.get(name) is not None else cache.get(name)
    if found["gpu_memory_utilization"] is None and str(meta.get("vllm_version", "")).startswith("0.1"):
        found["gpu_memory_utilization"] = 0.9  # the default until then
    found["gpu"], found["gpu_memory"] = hardware.get("device_name"), hardware.get("device_total_memory_bytes")
    return {name: value for name, value in found.items() if value is not None}
