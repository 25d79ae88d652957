"""The tests of lessons once more, as if there were a GPU: see `pretend_gpu.py`."""

from __future__ import annotations

import common

import re
import sys

import pytest

from support import scripts

TESTS = common.ROOT / "tests"
PATH = f"import sys; sys.path[0] = {str(TESTS)!r}\n"
PYTEST = f"{PATH}import pytest; sys.exit(pytest.main(sys.argv[1:]))"
# All lessons whose engines or kernels run on a GPU; of 05 what is about CUDA graphs, of 05d its kernels, of 12 one of
# each kind of long run, and of 01 and 10 not the longest with the real model: all would take too long.
ONE_OF_A_KIND = ("not small_pool and not thousand and not (drafts_for_adapters and not ngram) "
                 "and not (equals_merged and not 6-)")  # fmt: skip
WHAT = [
    ("engine/model/test_llama", ""),
    ("lessons/test_01_kv_cache", "not recorded_bug"),
    ("lessons/test_02_paged_attention", ""),
    ("lessons/test_03_flash_attention", ""),
    ("lessons/test_04_continuous_batching", ""),
    ("lessons/test_05_optimizations", "graph or capture or bucket or moved or padded"),
    ("engine/quantization/test_quantization", ""),
    ("engine/parallel/test_layers", ""),
    ("engine/parallel/test_model", ""),
    ("engine/parallel/test_ranks", ""),
    ("engine/quantization/test_kv_cache", "kernel"),
    ("lessons/test_07_spec_decode", ""),
    ("engine/spec_decode/test_trained", ""),
    ("lessons/test_09_gqa", ""),
    ("lab/test_hybrid_kv_cache", ""),
    ("lessons/test_10_chunked_prefill", "not in_chunks and not as_many_chunks"),
    ("lessons/test_12_multi_lora", ONE_OF_A_KIND),
]

pytestmark = [
    pytest.mark.skipif(common.HAS_GPU, reason="there is one: the tests themselves run on it"),
    pytest.mark.skipif(not common.HAS_TRITON, reason="no Triton wheel on this platform"),
]


def job_of(name: str, expression: str) -> scripts.Job:
    flags = ["-p", "pretend_gpu", "-p", "no:cacheprovider", "-q", "--tb=short", "-k", expression]
    return ("as if there were a GPU", name), [sys.executable, "-c", PYTEST, *flags, TESTS / f"{name}.py"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expression"), [pytest.param(*what, id=what[0].partition("test_")[2]) for what in WHAT]
)
def test_as_if_there_were_a_gpu(name, expression):
    done = scripts.get(job_of(name, expression))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


REFUSALS = """
import pretend_gpu  # before the rest: it decides what there is
import pytest, torch, common
from engine import registry

on, off = torch.ones(4, device="cuda"), torch.ones(4)
kernel = registry.lesson("02_paged_attention").reshape_and_cache_kernel

def refused(why, what):
    with pytest.raises((RuntimeError, TypeError, ValueError), match=why):
        what()

assert on.is_cuda and common.device().type == "cuda" and (on + 1).sum().item() == 8 and (on * off.sum()).is_cuda
assert on.cpu().tolist() == on.tolist() == off.tolist() and not on.cpu().is_cuda and off.to(on).is_cuda
refused("same device", lambda: on + off)
refused("same device", lambda: on.view(2, 2) @ off.view(2, 2))
refused("same device", lambda: torch.cat([on, off]))
refused("same device", lambda: torch.nn.functional.rms_norm(on, (4,), off))
refused("indices should be", lambda: off[torch.tensor([1], device="cuda")])
refused("numpy", on.numpy)
refused("generator", lambda: torch.rand(3, device="cuda", generator=torch.Generator()))
refused("cpu tensor", lambda: kernel[(1,)](off, on))

graph, x = torch.cuda.CUDAGraph(), torch.zeros(2, device="cuda")
refused("non-default stream", graph.capture_begin)
with torch.cuda.stream(torch.cuda.Stream()):
    graph.capture_begin()
    for wait in (lambda: x.sum().item(), x.tolist, x.cpu, lambda: x[[0]], torch.cuda.synchronize):
        refused("capturing", wait)
    y = x + 1
    x.add_(5)
    graph.capture_end()
assert x.tolist() == [0, 0] and y.isnan().all(), "recorded, not computed"
x.fill_(3)
graph.replay()
assert y.tolist() == [4, 4] and x.tolist() == [8, 8]
print("all refused")
"""
REFUSALS_JOB = (("what a GPU refuses",), [sys.executable, "-c", PATH + REFUSALS])


def test_what_a_gpu_would_refuse_is_refused():
    done = scripts.get(REFUSALS_JOB)
    assert done.returncode == 0 and done.stdout.strip() == "all refused", done.stderr[-3000:]


def test_what_is_skipped_is_there():
    """A test that got another name would run under the pretence, or a new one be skipped for an old reason."""
    names = re.findall(r'^    "(test_\w+)[^"]*": ', (TESTS / "pretend_gpu.py").read_text(), flags=re.M)
    defined = {
        name for path in TESTS.rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert len(names) == 11 and set(names) <= defined
