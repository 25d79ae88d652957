"""What the real vLLM's KV-cache manager decides for models whose layers keep different things:

    ENV/bin/python tests/record_hybrid.py SEED … --out FOLDER        # a random workload each, e.g. 3 17 or 0-500
    ENV/bin/python tests/record_hybrid.py FILE.json … --check        # records its workload again and compares

ENV has vLLM 0.32's CPU build, and needs nothing of ours. Grouping, manager, coordinator, pool, hashes and requests are
vLLM's own; no model runs. The format is in `golden/README.md`.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
from pathlib import Path

logging.disable(logging.WARNING)

import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    _get_kv_cache_groups_uniform_page_size,
    get_request_block_hasher,
    init_none_hash,
    unify_kv_cache_spec_page_size,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec
from vllm.v1.request import Request


def random_workload(seed: int) -> dict:
    """Layers of one to four kinds; requests that share prefixes come, grow by chunks and tokens, and leave."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 8])
    windows = [rng.randint(2, 5 * block_size + 2) for _ in range(rng.choice([0, 1, 1, 1, 2]))]
    windows += [0] * rng.choice([0, 1, 1, 1, 2]) or [0 if not windows else rng.randint(1, 12)]
    heads = rng.choice([[1], [1], [1, 2], [2, 3, 6]])
    kinds = [{"window": window, "num_kv_heads": rng.choice(heads)} for window in windows]
    layers = [dict(kind) for kind in kinds for _ in range(rng.randint(1, 5))]
    if heads[-1] == 6:
        layers.append({"window": rng.choice(windows), "num_kv_heads": 6})  # whose page the others divide
    rng.shuffle(layers)
    stream, most = [rng.randint(0, 1) for _ in range(200)], rng.choice([30, 60, 150])
    fresh, whole = rng.choice([0, 0.2, 1]), rng.choice([0, 0.3, 1])
    known, alive, ops = [stream[:most]], [], []
    for i in range(rng.randint(20, 80)):
        kind = rng.random()
        if kind < 0.3 or not alive:
            earlier = rng.choice(known)
            prompt = earlier[: rng.randint(1, len(earlier))]
            if rng.random() < fresh:
                prompt += [rng.randint(0, 1) for _ in range(rng.randint(1, most))]
            ops.append({"op": "admit", "id": f"r{i}", "prompt": prompt, "tokens": rng.choice([1, 5, 16, 200]),
                        "whole": rng.random() < whole})  # fmt: skip
            known.append(prompt)
            alive.append(f"r{i}")
        elif kind < 0.85:
            ops.append({"op": "go", "id": rng.choice(alive), "tokens": rng.choice([1, 1, 1, 4, 16])})
        else:
            ops.append({"op": "free", "id": alive.pop(rng.randrange(len(alive)))})
    return {
        "name": f"hybrid_{seed}", "block_size": block_size, "layers": layers, "num_blocks": rng.randint(8, 160),
        "max_model_len": 512, "max_in_flight_tokens": rng.choice([4, 16, 200]),
        "enable_caching": rng.random() < 0.9, "ops": ops,
    }  # fmt: skip


def spec(layer: dict, block_size: int) -> FullAttentionSpec | SlidingWindowSpec:
    shape = {"block_size": block_size, "num_kv_heads": layer["num_kv_heads"], "head_size": 1, "dtype": torch.bfloat16}
    return SlidingWindowSpec(**shape, sliding_window=layer["window"]) if layer["window"] else FullAttentionSpec(**shape)


def record(workload: dict) -> dict:
    specs = {str(i): spec(layer, workload["block_size"]) for i, layer in enumerate(workload["layers"])}
    groups = _get_kv_cache_groups_uniform_page_size(unify_kv_cache_spec_page_size(specs))
    sizes = [group.kv_cache_spec.block_size for group in groups]
    manager = KVCacheManager(
        KVCacheConfig(num_blocks=workload["num_blocks"], kv_cache_tensors=[], kv_cache_groups=groups),
        workload["max_model_len"], scheduler_block_size=math.lcm(*sizes), hash_block_size=math.gcd(*sizes),
        max_in_flight_tokens=workload["max_in_flight_tokens"], enable_caching=workload["enable_caching"],
    )  # fmt: skip
    init_none_hash(sha256)
    hasher = get_request_block_hasher(math.gcd(*sizes), sha256) if workload["enable_caching"] else None
    alive: dict[str, Request] = {}
    steps = []
    for op in workload["ops"]:
        name, step = op["id"], {}
        if op["op"] == "admit":
            request = Request(request_id=name, prompt_token_ids=list(op["prompt"]), pooling_params=None,
                              sampling_params=SamplingParams(max_tokens=1000), block_hasher=hasher)  # fmt: skip
            hits, step["hit"], _ = manager.get_computed_blocks(request)
            step["hit_blocks"] = [list(ids) for ids in hits.get_block_ids()]
            n = min(op["tokens"], request.num_tokens - step["hit"])
            new = manager.allocate_slots(request, n, step["hit"], hits, full_sequence_must_fit=op["whole"])
            if new is not None:
                alive[name], request.num_computed_tokens = request, step["hit"] + n
        elif name in alive and op["op"] == "go":
            request = alive[name]
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids(request.num_tokens % 2)
            n = min(op["tokens"], request.num_tokens - request.num_computed_tokens)
            new = manager.allocate_slots(request, n)
            request.num_computed_tokens += n if new is not None else 0
        elif name in alive:
            manager.free(alive.pop(name))
            new = None
        else:
            new = None
        step["new"] = None if new is None else [list(ids) for ids in new.get_block_ids()]
        step["tables"] = [list(ids) for ids in manager.get_block_ids(name)] if name in alive else None
        step["free"] = [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()]
        steps.append(step)
    return {
        "vllm": vllm.__version__, "workload": workload,
        "groups": [{"layers": list(map(int, g.layer_names)), "block_size": g.kv_cache_spec.block_size} for g in groups],
        "steps": steps,
    }  # fmt: skip


def dumps(trace: dict) -> str:
    """One step per line."""
    steps = ",\n".join(json.dumps(step, separators=(",", ":")) for step in trace["steps"])
    head = json.dumps({key: value for key, value in trace.items() if key != "steps"}, separators=(",", ":"))
    return f'{head[:-1]},"steps":[\n{steps}\n]}}\n'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+", help="seeds, ranges of seeds, or with --check files")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path)
    where.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.check:
        texts = {name: Path(name).read_text() for name in args.what}
        different = [name for name, text in texts.items() if dumps(record(json.loads(text)["workload"])) != text]
        print(f"{len(texts)} recorded again, different: {', '.join(different) or 'none'}")
        raise SystemExit(bool(different))
    for seeds in args.what:
        low, _, high = seeds.partition("-")
        for seed in range(int(low), int(high or low) + 1):
            (args.out / f"hybrid_{seed}.json").write_text(dumps(record(random_workload(seed))))
