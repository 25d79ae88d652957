"""What the real vLLM decided: workloads, and beside them their traces."""

from __future__ import annotations

import common

from pathlib import Path

GOLDEN = common.ROOT / "tests" / "golden"


def trace_of(workload: Path) -> Path:
    return workload.parent.parent / "traces" / workload.name
