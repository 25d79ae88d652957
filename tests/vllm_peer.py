"""The real vLLM as a competitor. Runs in an environment of its own, not in ours:

    ENV/bin/python tests/vllm_peer.py MODEL_FOLDER DTYPE

Reads one JSON object per line, answers each with one: {"command": "generate", "prompts": [[ids]], "max_tokens": n} ->
{"seconds", "token_ids"}; {"command": "schedule", "running": n, "waiting": n, "steps": n} -> {"seconds"} of a step.
Greedy, EOS ignored, no prefix cache, compiled, on all cores (by itself it keeps one back). Written against vLLM
0.32's CPU build.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

iomp = os.path.join(sys.prefix, "lib", "libiomp5.so")  # comes with vLLM's build; its installation guide preloads it
if os.path.exists(iomp) and iomp not in os.environ.get("LD_PRELOAD", ""):
    os.environ["LD_PRELOAD"] = iomp
    os.execv(sys.executable, [sys.executable, *sys.argv])
cores = sorted(os.sched_getaffinity(0))
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}-{cores[-1]}")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["HF_HUB_OFFLINE"] = os.environ["VLLM_NO_USAGE_STATS"] = "1"


def generate(llm, prompts: list[list[int]], max_tokens: int) -> dict:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False)
    return {"seconds": time.perf_counter() - start, "token_ids": [list(o.outputs[0].token_ids) for o in outputs]}


def schedule(folder: str, running: int, waiting: int, steps: int) -> dict:
    """Median seconds of schedule() and update_from_output() while `running` decode and `waiting` wait."""
    import torch
    from vllm import SamplingParams
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    num_blocks = 1 + running * -(-(16 + steps + 8) // 16)
    config = VllmConfig(
        model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=2048),
        scheduler_config=SchedulerConfig(max_model_len=2048, is_encoder_decoder=False, max_num_seqs=running,
                                         max_num_batched_tokens=max(2048, 16 * running), async_scheduling=False),
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=False),
    )  # fmt: skip
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
    scheduler = Scheduler(
        vllm_config=config, structured_output_manager=StructuredOutputManager(config), block_size=16,
        hash_block_size=16, log_stats=False, kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]),
    )  # fmt: skip
    for i in range(running + waiting):
        params = SamplingParams(max_tokens=steps + 8, ignore_eos=True)
        params.update_from_generation_config({}, None)
        scheduler.add_request(Request(request_id=str(i), prompt_token_ids=[0] * 16, sampling_params=params,
                                      pooling_params=None, arrival_time=float(i)))  # fmt: skip
    seconds = []
    for _ in range(1 + steps):
        start = time.perf_counter()
        output = scheduler.schedule()
        took = time.perf_counter() - start
        ids = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)},
                                   sampled_token_ids=[[0]] * len(ids))  # fmt: skip
        start = time.perf_counter()
        scheduler.update_from_output(output, result)
        seconds.append(took + time.perf_counter() - start)
    if len(scheduler.running) != running or len(scheduler.waiting) != waiting:
        raise SystemExit(f"{len(scheduler.running)} run and {len(scheduler.waiting)} wait")
    return {"seconds": statistics.median(seconds[1:])}


def main() -> None:
    folder, dtype = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    llm = None
    for line in sys.stdin:
        request = json.loads(line)
        if request.pop("command") == "schedule":
            answer = schedule(folder, **request)
        else:
            from vllm import LLM

            llm = llm or LLM(model=folder, dtype=dtype, max_model_len=2048, enable_prefix_caching=False)
            answer = generate(llm, **request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
