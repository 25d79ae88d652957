"""The watch for races finds each kind, and accuses nobody else."""

from __future__ import annotations

import common

import pytest
import torch

if not (common.HAS_TRITON and common.INTERPRET):
    pytest.skip("races are looked for in Triton's interpreter", allow_module_level=True)

import triton
import triton.language as tl

from support import races


@triton.jit
def copy_kernel(x, out, step, n, BLOCK: tl.constexpr):
    """out[step·p + i] = x[i + 4·p], for i < n."""
    i = tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0) * step + i, tl.load(x + 4 * tl.program_id(0) + i), mask=i < n)


@triton.jit
def two_values_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i // 2, tl.load(x + i))


@triton.jit
def read_back_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i) + 1)  # overwrites what it read: nobody else does
    tl.store(out + i, tl.load(x + BLOCK - 1 - i))  # reads what other threads wrote


def test_programs_with_places_of_their_own():
    x, out = torch.arange(16.0), torch.zeros(16)
    with races.watched():
        copy_kernel[(4,)](x, out, 4, 4, BLOCK=4)
    assert torch.equal(x, out)


@pytest.mark.parametrize(("step", "n"), [(0, 4), (3, 4), (2, 3)])
def test_two_programs_that_write_to_one_place(step, n):
    who = r"copy_kernel: programs \(0, 0, 0\) and \(1, 0, 0\) write to one place"
    with races.watched(), pytest.raises(races.Race, match=who):
        copy_kernel[(2,)](torch.ones(8), torch.zeros(16), step, n, BLOCK=4)  # the same value makes it no better


def test_masked_lanes_write_nothing():
    with races.watched():
        copy_kernel[(2,)](torch.ones(8), torch.zeros(16), 3, 3, BLOCK=4)


@pytest.mark.parametrize("ahead", [4, -4])
def test_a_program_that_reads_what_another_writes(ahead):
    x = torch.arange(24.0)
    with races.watched(), pytest.raises(races.Race, match="reads what program"):
        copy_kernel[(2,)](x[4:], x[4 + ahead :], 4, 4, BLOCK=4)


def test_a_program_that_overwrites_what_it_read():
    x = torch.arange(16.0)
    with races.watched():
        copy_kernel[(4,)](x, x, 4, 4, BLOCK=4)


def test_two_values_for_one_place():
    with races.watched():
        two_values_kernel[(1,)](torch.ones(4), torch.zeros(4), BLOCK=4)  # one value, twice
        with pytest.raises(races.Race, match="two values"):
            two_values_kernel[(1,)](torch.arange(4.0), torch.zeros(4), BLOCK=4)
        two_values_kernel[(1,)](torch.ones(4), torch.zeros(4), BLOCK=4)  # the next launch is not to blame


def test_a_program_that_reads_what_it_wrote():
    with races.watched(), pytest.raises(races.Race, match="reads what it wrote"):
        read_back_kernel[(1,)](torch.arange(4.0), torch.zeros(4), BLOCK=4)


def test_the_fixture_watches(kernels):
    with pytest.raises(races.Race):
        copy_kernel[(2,)](torch.ones(8), torch.zeros(8), 0, 4, BLOCK=4)
