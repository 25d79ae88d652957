"""What `lessons/11b_prediction.md` simulates, quotes, draws and measures."""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import functools
from bisect import bisect_right
from typing import Any

from engine import registry
from lab.parameters import checked
from lab.records import concurrency, percentile

KEY = "11b_prediction"
lesson = registry.lesson(KEY)

# --- The simulation behind the widget ---------------------------------------------------------------------------------

RATES = (2, 4, 6, 7, 8, 9, 10, 12)  # requests per second
WIDGET_CHOICES = {"rate": list(RATES), "max_num_seqs": [8, 16, 1024], "num_blocks": [1024, 4096, lesson.BLOCKS],
                  "seconds": [6, 12]}  # fmt: skip
WIDGET_DEFAULT = {"rate": 4, "max_num_seqs": 1024, "num_blocks": lesson.BLOCKS, "seconds": 12}
SLICE = 250_000  # µs between two looks at the queue
LIMIT = 1_000_000  # µs of TTFT


def p99(run: Any) -> int:
    """Microseconds to the first token, of the slowest percent."""
    return int(percentile(run.ttft, 99))


@functools.cache
def curve(max_num_seqs: int, num_blocks: int, seconds: int) -> tuple[tuple[int, int], ...]:
    """(median, P99) of the time to the first token at each rate, in microseconds."""
    runs = [lesson.serve(rate, max_num_seqs, num_blocks, seconds) for rate in RATES]
    return tuple((int(percentile(run.ttft, 50)), p99(run)) for run in runs)


def simulate(params: dict[str, Any]) -> dict[str, Any]:
    """One run of the engine on a clock, and the latencies at all rates beside it. Times are microseconds.

    `strip`: every quarter of a second, until no more requests come, [seats taken, waiting, blocks owned] since the last
    plan. Raises InputError.
    """
    p = checked(params, WIDGET_CHOICES)
    seats, rest = p["max_num_seqs"], {name: value for name, value in p.items() if name != "rate"}
    run, found = lesson.serve(**p), curve(**rest)
    planned = [step.scheduled for step in run.steps]
    strip = []
    for at in range(SLICE, p["seconds"] * 10**6 + 1, SLICE):
        step = run.steps[max(0, bisect_right(planned, at) - 1)]
        busy = planned[0] <= at
        strip.append([step.running, step.waiting, step.blocks] if busy else [0, 0, 0])
    waited = lesson.limits_of(run, seats)
    beyond = [rate for rate, (_, slow) in zip(RATES, found) if slow > LIMIT]
    spans = [(int(job.arrival), int(seen.times[-1])) for job, seen in zip(run.jobs, run.outcomes)]
    peak, area = concurrency(spans)
    return {
        "params": p, "rates": list(RATES), "curve": [list(pair) for pair in found],
        "leaves": beyond[0] if beyond else None,  # the first rate at which P99 is above a second
        "requests": len(run.jobs), "steps": len(run.steps), "end_us": int(run.steps[-1].end), "strip": strip,
        "p50_us": int(percentile(run.ttft, 50)), "p99_us": p99(run), "mean_us": sum(run.latency) // len(run.jobs),
        "area": area, "peak": peak, "limits_us": list(waited.values()), "preemptions": run.preemptions,
        "limit": max(waited, key=lambda name: waited[name]) if any(waited.values()) else None,
    }  # fmt: skip


def describe(trace: dict[str, Any]) -> str:
    """The state under the widget, as text."""
    p, n, strip = trace["params"], trace["requests"], trace["strip"]
    lines = [
        f"{n} requests in {p['seconds']} s, {p['rate']} a second; {p['max_num_seqs']:,} seats, "
        f"{p['num_blocks']:,} blocks; {trace['steps']} steps",
        f"to the first token: median {trace['p50_us'] / 1e6:.2f} s, P99 {trace['p99_us'] / 1e6:.2f} s",
        f"in flight: {1e6 * n / trace['end_us']:.2f}/s x {trace['mean_us'] / 1e6:.2f} s = "
        f"{trace['area'] / trace['end_us']:.1f} on average, {trace['peak']} at most",
    ]
    for name, column in (("seats taken", 0), ("waiting", 1), ("blocks owned", 2)):
        top = max(row[column] for row in strip)
        bars = "".join(" ▁▂▃▄▅▆▇█"[-(-8 * row[column] // max(top, 1))] for row in strip)
        lines.append(f"{name:<13}{top:>6,} |{bars.rstrip()}")
    half, last = strip[len(strip) // 2 - 1][1], strip[-1][1]
    if trace["limit"] is None:
        lines.append("Nobody waits for anything but a step.")
    elif last > 2 * half and last > 4:
        lines.append(f"OVERLOADED, by {trace['limit']}: {half} wait after half of the time, {last} at the end.")
    else:
        lines.append(f"Whoever waits, waits for {trace['limit']}. The queue is {last} long at the end.")
    return "\n".join(lines)
