"""What the real vLLM's scheduler decides with drafts, adapters, keys and values from elsewhere, and one step ahead:

    ENV/bin/python tests/record_vllm.py MODEL_FOLDER WORKLOAD.json … --out FOLDER

ENV has vLLM 0.32's CPU build, and needs nothing of ours; of MODEL_FOLDER only the configuration is read. Scheduler,
KV-cache manager, block hashes and requests are vLLM's own; in the model's place, a request whose tokens are all
computed gets the next of its `forced_output_token_ids`, and with them those of its drafts that are the same. The
formats are in `golden/README.md`; with `--check FOLDER` nothing is written, but compared with what is there.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections import Counter, deque
from pathlib import Path

logging.disable(logging.WARNING)
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the old runner's step says who was resumed; nothing else differs

import torch
import vllm
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager


class Elsewhere(KVConnectorBase_V1):
    """The keys and values of some prompts are elsewhere: all of them, which takes steps, or those of their first
    blocks, which are loaded within the step. Only the scheduler's half does anything."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        about = self._vllm_config.kv_transfer_config.kv_connector_extra_config
        self.size = self._vllm_config.cache_config.block_size
        self.remote, self.stored_blocks = about["remote"], about["stored_blocks"]
        self.asked: list[str] = []
        self.within_step: list[str] = []
        self.first: dict[str, int] = {}  # of the blocks that are to be loaded
        self.loaded: dict[str, list[int]] = {}  # into which blocks

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.first[request.request_id] = num_computed_tokens // self.size
        if blocks := self.stored_blocks.get(request.request_id):
            return max(0, min(blocks, (request.num_tokens - 1) // self.size) * self.size - num_computed_tokens), False
        if request.request_id not in self.remote or request.request_id in self.asked:  # once
            return 0, False
        return request.num_prompt_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            within = request.request_id in self.stored_blocks
            (self.within_step if within else self.asked).append(request.request_id)
            table, first = blocks.get_block_ids()[0], self.first[request.request_id]
            self.loaded[request.request_id] = table[first : first - (-num_external_tokens // self.size)]

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def start_load_kv(self, *args, **kwargs) -> None: ...
    def wait_for_layer_load(self, layer_name) -> None: ...
    def save_kv_layer(self, *args, **kwargs) -> None: ...
    def wait_for_save(self) -> None: ...


def make_scheduler(folder: str, config: dict, elsewhere: dict, gpu: bool) -> tuple[Scheduler, list[str]]:
    """The real scheduler, and the list in which it notes whom it preempts, in order."""
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "policy", "enable_chunked_prefill",
             "long_prefill_token_threshold", "watermark")  # fmt: skip
    limits = {name: config[name] for name in names}
    model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=config["max_model_len"])
    extra, K = {}, config["num_speculative_tokens"]
    if K:
        # K by batch size, the same K for all. With one K for ever, vLLM fills up a new request that computes a single
        # token with K rows that are no drafts: a CUDA graph's shape stays as it is. We have no such graph.
        extra["speculative_config"] = SpeculativeConfig(
            # A step ahead, only drafters will do that run where the model does.
            method="ngram_gpu" if config["async_scheduling"] else "ngram",
            num_speculative_tokens=K, prompt_lookup_min=1, prompt_lookup_max=3,
            num_speculative_tokens_per_batch_size=config.get(
                "num_speculative_tokens_per_batch_size", [(1, config["max_num_seqs"], K)]),
            target_model_config=model, target_parallel_config=ParallelConfig(),
        )  # fmt: skip
    if config["max_loras"]:
        extra["lora_config"] = LoRAConfig(max_loras=config["max_loras"], max_lora_rank=8)
    if any(elsewhere.values()):
        extra["kv_transfer_config"] = KVTransferConfig(
            kv_connector="Elsewhere", kv_connector_module_path="record_vllm", kv_role="kv_consumer",
            kv_connector_extra_config=elsewhere,
            kv_load_failure_policy=config.get("kv_load_failure_policy", "fail"),
        )  # fmt: skip
    whole = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(is_encoder_decoder=False, async_scheduling=config["async_scheduling"],
                                         max_num_scheduled_tokens=config["max_num_batched_tokens"], **limits),
        cache_config=CacheConfig(block_size=config["block_size"],
                                 enable_prefix_caching=config["enable_prefix_caching"]), **extra,
    )  # fmt: skip
    assert all(getattr(whole.scheduler_config, key) == value for key, value in limits.items() if key != "max_model_len")
    if gpu:  # a CPU's platform turns it off, and a connector's scheduler then frees at once what a step may still write
        whole.scheduler_config.async_scheduling = config["async_scheduling"]
    whole.cache_config.num_gpu_blocks = config["num_blocks"]
    spec = FullAttentionSpec(block_size=config["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32)
    base, preempted = AsyncScheduler if config["async_scheduling"] else Scheduler, []

    class Noting(base):
        def _preempt_request(self, request, *args, **kwargs):
            preempted.append(request.request_id)
            super()._preempt_request(request, *args, **kwargs)

        def finish_requests(self, request_ids, status):
            if status is not RequestStatus.FINISHED_ERROR:
                return super().finish_requests(request_ids, status)
            # Those whose loads failed come as a set, which has another order each time.
            return [r for request_id in sorted(request_ids) for r in base.finish_requests(self, request_id, status)]

    scheduler = Noting(
        vllm_config=whole, structured_output_manager=StructuredOutputManager(whole), block_size=config["block_size"],
        kv_cache_config=KVCacheConfig(num_blocks=config["num_blocks"], kv_cache_tensors=[],
                                      kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]),
    )  # fmt: skip
    return scheduler, preempted


class Recording:
    """One workload: requests in, steps out."""

    def __init__(self, folder: str, workload: dict, gpu: bool = False) -> None:
        self.config = config = workload["config"]
        self.specs = {spec["id"]: spec for spec in workload["requests"]}
        self.remote = {name: spec["remote_steps"] for name, spec in self.specs.items() if "remote_steps" in spec}
        self.failed_block = {name: spec["failed_block"] for name, spec in self.specs.items() if "failed_block" in spec}
        stored = {name: spec["stored_blocks"] for name, spec in self.specs.items() if "stored_blocks" in spec}
        elsewhere = {"remote": list(self.remote), "stored_blocks": stored}
        self.scheduler, self.preempted = make_scheduler(folder, config, elsewhere, gpu)
        self.pending = deque(enumerate(sorted(workload["requests"], key=lambda spec: spec["arrival_step"])))
        self.aborts = deque(sorted((s["abort_step"], s["id"]) for s in self.specs.values() if "abort_step" in s))
        self.last_tables: dict[str, list[int]] = {}
        self.hasher = None
        if config["enable_prefix_caching"]:
            init_none_hash(sha256)
            self.hasher = get_request_block_hasher(config["block_size"], sha256)
        self.adapters: dict[str, int] = {}
        self.written: Counter[str] = Counter()  # tokens that the model has sampled, per request
        self.depth, self.queue = 1 + config["async_scheduling"], deque()  # steps not heard of (`step_with_batch_queue`)

    def request(self, rank: int, spec: dict) -> Request:
        params = SamplingParams(max_tokens=spec["max_tokens"], stop_token_ids=spec.get("stop_token_ids"),
                                ignore_eos=True,
                                skip_reading_prefix_cache=spec.get("skip_reading_prefix_cache"))  # fmt: skip
        lora = None
        if name := spec.get("lora"):
            number = self.adapters.setdefault(name, len(self.adapters) + 1)
            lora = LoRARequest(lora_name=name, lora_int_id=number, lora_path="unused")
        return Request(request_id=spec["id"], prompt_token_ids=list(spec["prompt_token_ids"]), sampling_params=params,
                       pooling_params=None, arrival_time=float(rank), priority=spec.get("priority", 0),
                       lora_request=lora, cache_salt=spec.get("cache_salt"), block_hasher=self.hasher)  # fmt: skip

    def arrivals(self, step: int) -> tuple[list[str], list[str]]:
        """Hand over who arrives, then abort who leaves, at this step."""
        added, aborted = [], []
        while self.pending and self.pending[0][1]["arrival_step"] <= step:
            rank, spec = self.pending.popleft()
            self.scheduler.add_request(self.request(rank, spec))
            added.append(spec["id"])
        while self.aborts and self.aborts[0][0] <= step:
            request_id = self.aborts.popleft()[1]
            if self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED):
                self.last_tables.pop(request_id, None)
                aborted.append(request_id)
        return added, aborted

    def update(self, output, sampled: dict[str, list[int]]) -> tuple[dict[str, list[int]], dict[str, str]]:
        """What the front end hears: {request: tokens}, and {request: why it finished}."""
        ids = list(output.num_scheduled_tokens)
        tokens = [list(sampled.get(request_id, ())) for request_id in ids]
        result = ModelRunnerOutput(ids, {request_id: i for i, request_id in enumerate(ids)}, tokens)
        connector = self.scheduler.connector
        on_the_way = [name for name in connector.asked if name in self.remote] if connector else []
        arrived = sorted(name for name in on_the_way if self.remote[name] == 1)  # a set has another order each time
        for name in on_the_way:
            self.remote[name] -= 1
        if over := [*arrived, *connector.within_step] if connector else []:
            connector.within_step.clear()
            first = {name: self.failed_block.pop(name) for name in over if name in self.failed_block}  # once
            result.kv_connector_output = KVConnectorOutput(
                finished_recving=arrived, failed_recving={name for name, block in first.items() if block is None},
                invalid_block_ids={block for name, i in first.items() if i is not None
                                   for block in connector.loaded[name][i:]},
            )  # fmt: skip
        heard, finished = {}, {}
        for outputs in self.scheduler.update_from_output(output, result).values():
            for each in outputs.outputs:
                if str(each.finish_reason) != "error":  # whose load has failed, has no tokens
                    heard[each.request_id] = list(each.new_token_ids)
                if each.finish_reason is not None:
                    finished[each.request_id] = str(each.finish_reason)
        return heard, finished

    def one_step(self) -> dict:
        scheduler, pool = self.scheduler, self.scheduler.kv_cache_manager.block_pool
        self.preempted.clear()
        output = scheduler.schedule()
        cached = output.scheduled_cached_reqs
        hits = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        hits |= {i: n for i, n in zip(cached.req_ids, cached.num_computed_tokens) if i in cached.resumed_req_ids}
        for request_id in (*self.preempted, *hits):
            self.last_tables.pop(request_id, None)
        tables = {r.request_id: list(scheduler.kv_cache_manager.get_block_ids(r.request_id)[0])
                  for r in scheduler.running}  # fmt: skip
        entry = {
            "scheduled": dict(output.num_scheduled_tokens),
            "drafts": {request_id: list(ids) for request_id, ids in output.scheduled_spec_decode_tokens.items()},
            "new": [r.req_id for r in output.scheduled_new_reqs],
            "resumed": [request_id for request_id in cached.req_ids if request_id in cached.resumed_req_ids],
            "running": [request_id for request_id in cached.req_ids if request_id not in cached.resumed_req_ids],
            "preempted": list(self.preempted),
            "prefix_hit": {i: hits[i] for i in output.num_scheduled_tokens if i in hits},
            "computed": {r.request_id: r.num_computed_tokens for r in scheduler.running},
            "loading": sorted(r.request_id for r in scheduler.kv_holding_waiting),
            "blocks": {i: table for i, table in tables.items() if self.last_tables.get(i) != table},
            "free_blocks": [pool.get_num_free_blocks()],
        }  # fmt: skip
        self.last_tables |= tables
        sampled = {}
        for request_id in output.num_scheduled_tokens:
            if not scheduler.requests[request_id].is_prefill_chunk:
                written = self.written[request_id]
                rest = self.specs[request_id]["forced_output_token_ids"][written:] or [0]  # behind an end nobody knew
                places = len(entry["drafts"].get(request_id, ()))
                drafts = self.specs[request_id].get("drafts", {}).get(str(written), [])[:places]
                right = next((i for i, draft in enumerate(drafts) if rest[i : i + 1] != [draft]), len(drafts))
                sampled[request_id] = rest[: right + 1]
                self.written[request_id] += len(sampled[request_id])
        self.queue.append((output, sampled))
        due = self.queue.popleft() if len(self.queue) == self.depth else None
        heard, finished = self.update(*due) if due else ({}, {})
        entry |= {"sampled": {request_id: due[1][request_id] for request_id in heard}, "finished": finished}
        for request_id in due[1].keys() - heard.keys() & scheduler.requests.keys() if due else ():
            self.written[request_id] -= len(due[1][request_id])  # computed on nothing
        for request_id in entry["finished"]:
            self.last_tables.pop(request_id, None)
        if self.config["num_speculative_tokens"] and self.depth == 1:
            alive = [request_id for request_id in sampled if request_id in scheduler.requests]
            drafts = [self.specs[i]["drafts"].get(str(scheduler.requests[i].num_output_tokens), []) for i in alive]
            scheduler.update_draft_token_ids(DraftTokenIds(alive, [list(ids) for ids in drafts]))
        entry["free_blocks"].append(pool.get_num_free_blocks())
        entry["running_queue"] = [r.request_id for r in scheduler.running]
        entry["waiting_queue"] = [r.request_id for r in scheduler.waiting]
        if self.config["enable_prefix_caching"]:
            entry["cached_keys"] = len(pool.cached_block_hash_to_block)
        return entry

    def run(self) -> list[dict]:
        steps, step, scheduler = [], 0, self.scheduler
        while self.pending or scheduler.has_unfinished_requests():
            if not scheduler.has_unfinished_requests():
                self.queue.clear()  # planned for somebody who had ended
                step = max(step, self.pending[0][1]["arrival_step"])
            added, aborted = self.arrivals(step)
            entry = {"step": step, "added": added, "aborted": aborted, **self.one_step()}
            steps.append({key: value for key, value in entry.items() if value or key in ("step", "scheduled")})
            step += 1
        return steps


def record(folder: str, workload: dict, gpu: bool = False) -> dict:
    return {"vllm": vllm.__version__, "workload": workload["name"], "steps": Recording(folder, workload, gpu).run()}


def dumps(trace: dict) -> str:
    """One step per line."""
    steps = ",\n".join(json.dumps(step, separators=(",", ":")) for step in trace["steps"])
    head = json.dumps({key: value for key, value in trace.items() if key != "steps"}, separators=(",", ":"))
    return f'{head[:-1]},"steps":[\n{steps}\n]}}\n'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("workloads", nargs="+", type=Path)
    parser.add_argument("--gpu", action="store_true", help="a step ahead as the scheduler is configured on a GPU")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path)
    where.add_argument("--check", type=Path)
    args = parser.parse_args()
    different = 0
    for path in args.workloads:
        text = dumps(record(args.model, json.loads(path.read_text()), args.gpu))
        if args.out:
            (args.out / path.name).write_text(text)
        elif (args.check / path.name).read_text() != text:
            different += 1
            print(f"{path.name}: differs")
    if args.check:
        print(f"{len(args.workloads)} recorded again, {different} differ")
        raise SystemExit(different > 0)
