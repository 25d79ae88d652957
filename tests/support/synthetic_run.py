"""A run that never was: our own prediction with other rates than the data sheet's, and noise on every step.

python tests/support/synthetic_run.py    writes tests/golden/predict/, the small example that `predict fit` is shown on
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "vllm"))

import common

import json
import random
from typing import Any

from engine.config import SchedulerConfig
from lab.hardware import find_gpu
from lab.model_costs import find_model, model_costs
from lab.prediction import Job, Setup, predict
from lab.step_time import StepModel, StepRates

FOLDER = common.ROOT / "tests" / "golden" / "predict"
MODEL, GPU = "meta-llama/Llama-3.2-1B", "NVIDIA A10"
RATES = StepRates(weights=1.75e-12, products=9.5e-15, cache=3.6e-12, attention=3e-14, exchange=1e-10, sequence=6e-5,
                  fixed=1.5e-3, host=3e-3)  # fmt: skip
COLD, NOISE = 0.2, 0.03
META = {
    "model": MODEL, "vllm_version": "0.19.0",
    "engine_kwargs": {"tensor_parallel_size": 1, "data_parallel_size": 1, "max_num_seqs": 64,
                      "max_num_batched_tokens": 512, "max_model_len": 4096},
    "kv_cache": {"num_gpu_blocks": 500, "block_size": 16, "gpu_memory_utilization": 0.9, "enable_prefix_caching": True},
    "hardware": {"device_name": GPU, "device_total_memory_bytes": find_gpu(GPU).memory},
}  # fmt: skip


def rows(count: int = 60, seed: int = 0) -> list[dict[str, Any]]:
    """The lines of its `requests.jsonl`. Clocks begin where the real ones might."""
    rng = random.Random(seed)
    jobs, at = [], 0.0
    for _ in range(count):
        jobs.append(Job(at, rng.randint(20, 900), rng.randint(10, 200)))
        at += rng.expovariate(12)
    setup = Setup(SchedulerConfig(4096, 64, 512), 500)
    model = StepModel(model_costs(find_model(MODEL)))

    def seconds(work: Any) -> float:
        return RATES.seconds(model.features(work)) * rng.lognormvariate(0, NOISE)

    (found,) = predict(jobs, setup, seconds, RATES.host, COLD)
    wall, monotonic = 1.7e9, 5000.0
    return [
        {
            "request_id": f"made-{i}", "input_toks": job.input_len, "output_toks": job.output_len,
            "arrival_time": round(wall + job.arrival, 6), "queued_ts": round(monotonic + outcome.queued, 6),
            "scheduled_ts": round(monotonic + outcome.scheduled, 6),
            "first_token_ts": round(monotonic + outcome.times[0], 6),
            "last_token_ts": round(monotonic + outcome.times[-1], 6),
        }
        for i, (job, outcome) in enumerate(zip(jobs, found.outcomes))
    ]  # fmt: skip


def write(folder: Path = FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows())
    (folder / "requests.jsonl").write_text(lines, encoding="utf-8")
    (folder / "meta.json").write_text(json.dumps(META, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
