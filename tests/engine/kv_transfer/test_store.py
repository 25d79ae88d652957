"""A store of one process's own: in memory, behind its cache, and gone with it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest
import torch

from engine.kv_transfer import store
from engine.kv_transfer.store import KVStore, remove_private_stores
from engine.llm import LLM
from engine.request import SamplingParams


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SHM", tmp_path)
    return tmp_path


def test_a_private_store_goes_with_its_process(memory):
    mine = KVStore(None, 1 << 20)
    mine.put("a", [torch.zeros(8)])
    (folder,) = memory.iterdir()
    assert folder.name.startswith(f"kvstore-of-{os.getpid()}-") and mine.disk is None and mine.find("a")
    other = KVStore(None, 1 << 20)
    assert other.find("a") is None and len(list(memory.iterdir())) == 2, "nobody else's, not even here"
    del mine, other
    gc.collect()
    assert not list(memory.iterdir())


def test_what_killed_processes_left_is_removed(memory):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    names = (f"kvstore-of-{gone.pid}-00000000", f"kvstore-of-{os.getpid()}-11111111", "kvstore-0123456789abcdef")
    left, ours, others = (memory / name for name in names)
    for folder in (left, ours, others, memory / "kvstore-of-x-00000000"):
        folder.mkdir()
        (folder / "block").write_bytes(b"x")
    remove_private_stores()
    assert not left.exists() and ours.exists() and others.exists() and (memory / "kvstore-of-x-00000000").exists()
    remove_private_stores(os.getpid())
    assert not ours.exists() and others.exists()


def test_blocks_that_were_evicted_come_back(memory, tiny_model, real_model):
    """Five prompts of which the cache holds one; the first comes again. Tokens are what they are without the store."""
    prompts = [[i] * 48 for i in range(5, 10)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    about = {"tokenizer": real_model[1], "max_model_len": 64, "num_gpu_blocks_override": 5}
    want = [LLM(tiny_model, **about).generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts[:1]]
    llm = LLM(tiny_model, kv_offloading_size=0.01, **about)
    for prompt in prompts:
        llm.generate([prompt], params)
    stats = llm.llm_engine.core.scheduler.connector.stats
    assert stats["bytes_in"] == 0
    (again,) = llm.generate(prompts[:1], params)
    assert stats["bytes_in"] > 0 and [again.outputs[0].token_ids] == want
    (folder,) = memory.iterdir()
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 0.01 * 2**30


def test_what_came_in_an_earlier_step_is_kept_when_its_request_leaves(memory, tiny_model, real_model):
    """Who leaves in the step in which its blocks are asked for takes them out of the index; later they are there."""
    about = {"tokenizer": real_model[1], "max_model_len": 64, "num_gpu_blocks_override": 5}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm = LLM(tiny_model, kv_offloading_size=0.01, **about)
    for i in range(5, 8):
        llm.generate([[i] * 48], params)
    engine = llm.llm_engine
    stats = engine.core.scheduler.connector.stats
    engine.add_request("leaves", [5] * 48, params)
    for _ in range(2):
        engine.step()
    assert (loaded := stats["bytes_in"]) > 0
    engine.abort_request(["leaves"])
    (again,) = llm.generate([[5] * 48], params)
    assert again.num_cached_tokens == 32 and stats["bytes_in"] == loaded
