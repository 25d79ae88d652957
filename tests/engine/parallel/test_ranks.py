"""Ranks as processes: the real model on three of them, and how all end when one does."""

from __future__ import annotations

import common

import multiprocessing
import os
import subprocess
import sys
import time

import pytest

from engine import registry
from engine.parallel.ranks import RankFailed, launch
from lab import cli
from support.close import assert_close
from support.process_tree import alive, wait_until_gone
from support.rank_jobs import fail, work
from support.sharded_models import IDS

lesson, page = registry.lesson("05c_tensor_parallel"), cli.numbers("05c_tensor_parallel")


@pytest.fixture(scope="module")
def worked(real_model) -> tuple[list[dict], list[list[int]]]:
    prompts = [real_model[1].encode(text) for text in ("The three laws of motion say that", "To make bread")]
    return launch(4, work, prompts), prompts


def test_real_model_on_three_processes(worked, real_model):
    found, prompts = worked
    model, _ = real_model
    want = lesson.all_logits(model, prompts[0])
    tokens = lesson.serve(model, prompts, [6, 3]).token_ids
    for rank in found[:3]:
        assert_close(rank["logits"], want)
        assert rank["logits"].equal(found[0]["logits"]), "equal bits, or ranks would draw different tokens"
        assert rank["tokens"] == tokens
        assert rank["threads"] == max(1, os.cpu_count() // 4)
    assert "logits" not in found[3]


@pytest.mark.skipif(sys.platform != "linux" or common.HAS_GPU, reason="reads /proc; a GPU's weights are elsewhere")
def test_loading_a_shard_never_holds_the_whole(worked, real_model):
    share = real_model[0].num_parameters * 4 / 3
    for rank in worked[0][:3]:
        assert 0.5 * share < rank["memory"] < 1.2 * share


@pytest.mark.parametrize("size", [2, 4])
def test_seeded_model_on_processes(worked, size, device):
    want = lesson.all_logits(lesson.seeded_model(device), IDS)
    for rank in worked[0][:size]:
        assert_close(rank[size], want)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("dies", r"rank 1 of 3 died \(signal SIGKILL\)"),
        ("raises", r"rank 1 of 3 raised ValueError: no such thing; the others"),
        pytest.param("is silent", r"(no answer from rank .*1, 2 of 3|rank 0 of 3 raised)", marks=pytest.mark.slow),
    ],
)
def test_one_rank_fails_and_all_end(how, message):
    start = time.perf_counter()
    with pytest.raises(RankFailed, match=message) as error:
        launch(3, fail, how, timeout=60 if how != "is silent" else 4)
    assert not multiprocessing.active_children() and "\n" not in str(error.value)
    assert time.perf_counter() - start < 30
    if how == "raises":
        assert ", in fail\n" in error.value.__notes__[0], "where it was raised"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_ranks_do_not_outlive_their_parent():
    code = f"""
import sys, time; sys.path[:0] = [{str(common.HERE)!r}, {str(common.ROOT)!r}, {str(common.ROOT / "tests")!r}]
import common
from support import rank_jobs
from engine.parallel.ranks import Ranks
if __name__ == "__main__":
    ranks = Ranks(2, rank_jobs.fail, "is silent")
    print(*[p.pid for p in ranks.processes], flush=True)
    time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(map(alive, pids))
    time.sleep(1)
    parent.kill()
    parent.wait()
    wait_until_gone(pids)
