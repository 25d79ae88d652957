"""Tests of lessons and engine once more, as if there were a GPU: see `pretend_gpu.py` and `as_if_on_gpu.py`."""

from __future__ import annotations

import common

import re
import sys

import pytest

import as_if_on_gpu
from support import scripts

TESTS = common.ROOT / "tests"
PATH = f"import sys; sys.path[0] = {str(TESTS)!r}\n"
# Kernels that are launched nowhere under the pretence, and why.
ELSEWHERE = {
    "engine/attention/hopper.py warp_specialized_attention_kernel": "in Gluon, which has no interpreter",
    "engine/quantization/int4_hopper.py int4_kernel": "in Gluon, which has no interpreter",
}

pytestmark = [
    pytest.mark.skipif(common.HAS_GPU, reason="there is one: the tests themselves run on it"),
    pytest.mark.skipif(not common.HAS_TRITON, reason="no Triton wheel on this platform"),
]

ENOUGH: scripts.Job = ("as if there were a GPU",), as_if_on_gpu.command(*as_if_on_gpu.chosen())


@pytest.mark.slow
def test_as_if_there_were_a_gpu():
    done = scripts.get(ENOUGH)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_every_launch_is_among_them():
    """A new kernel has a new test: `python tests/as_if_on_gpu.py --choose`."""
    (launched,) = re.findall("^launched: (.*)$", scripts.get(ENOUGH).stdout, flags=re.M)
    assert as_if_on_gpu.launches() - set(launched.split(", ")) == ELSEWHERE.keys()


def test_the_tests_that_are_enough_are_there():
    names = as_if_on_gpu.chosen()
    assert len(set(names)) == len(names) > 50
    for name in names:
        path, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (common.ROOT / path).read_text(), name
        assert path.removeprefix("tests/").removesuffix(".py") in as_if_on_gpu.FILES


def test_enough_is_the_cheapest_that_reach_every_place():
    places = {"whole": "abcd", "twin of x": "ab", "x": "ab", "y": "bc", "d alone": "d", "none": ""}
    seconds = {"whole": 9.0, "twin of x": 2.0}
    tests = [as_if_on_gpu.Test(name, seconds.get(name, 1.0), frozenset(found)) for name, found in places.items()]
    assert [test.name for test in as_if_on_gpu.enough(tests)] == ["d alone", "x", "y"]


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
