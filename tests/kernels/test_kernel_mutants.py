"""The harness that breaks kernels: it finds every kernel, breaks it in many ways, and sees what the tests let live.

`python tests/kernel_mutants.py --all` runs all of it; here is one mutant of each class of each file (slow).
"""

from __future__ import annotations

import common

import ast
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from support import scripts

if not (common.HAS_TRITON and common.INTERPRET):
    pytest.skip("kernels are broken in Triton's interpreter", allow_module_level=True)

import kernel_mutants
from support import modules

SCRIPT = Path(kernel_mutants.__file__)


SOME = (("mutants of every kernel",), [sys.executable, SCRIPT])
SWAPS = (("mutants",), [sys.executable, SCRIPT, "11_preemption"])


def test_every_kernel_is_found():
    text = "".join(path.read_text() for path in modules.paths().values())
    decorators = re.findall(r"^@(?:common\.kernel|triton\.jit)\b", text, flags=re.M)
    assert len(kernel_mutants.kernels()) == len(decorators) > 40
    for key in kernel_mutants.kernels():
        assert kernel_mutants.launched_for(*key), f"nothing launches {key}"
        assert kernel_mutants.tests_of(*key), f"nothing tests {key}"


def test_mutants_are_other_programs():
    for key in [("02_paged_attention", "paged_decode_kernel"), ("03_flash_attention", "attend_to_keys")]:
        original = ast.dump(ast.parse(kernel_mutants.text_of(*key)))
        found = kernel_mutants.mutants(*key)
        assert len({mutant.source for mutant in found}) == len(found) > 50
        assert all(ast.dump(ast.parse(mutant.source)) != original for mutant in found)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = tl.load(p + i, mask=i < n, other=0.0)", "x = tl.load(p + i)"),
        ("x = tl.load(p + i, mask=a & b)", "x = tl.load(p + i, mask=a)"),
        ("x = tl.load(p + i, mask=a & b)", "x = tl.load(p + i, mask=b)"),
        ("x = tl.load(p + i, mask=i < n)", "x = tl.load(p + i, mask=(i <= n))"),
        ("x = tl.load(p + i, mask=a, other=0.0)", "x = tl.load(p + i, mask=a, other=float('inf'))"),
        ("x = tl.load(block_table + i).to(tl.int64)", "x = i.to(tl.int64)"),
        ("x = acc * alpha[:, None]", "x = acc"),
        ("x = tl.where(a, b, c)", "x = b"),
        ("x = tl.cdiv(a, b)", "x = (a // b)"),
        ("x = tl.maximum(a, b)", "x = tl.minimum(a, b)"),
        ("x = i * stride_a", "x = i * stride_b"),
        ("for i in range(a, b, c): f(i)", "for i in range(a, b - c, c): f(i)"),
        ("x += 1", "pass"),
        ("tl.store(p, x)", "pass"),
        ("x = a.to(tl.float32)", "x = a"),
    ],
)
def test_kinds_of_changes(before, after, monkeypatch):
    text = f"def kernel(p, n, stride_a, stride_b):\n    {before}\n"
    monkeypatch.setattr(kernel_mutants, "text_of", lambda *key: text)
    found = kernel_mutants.mutants("lesson", "kernel")
    assert text.replace(before, after) in {mutant.source.replace('"', "'") for mutant in found}


def test_the_list_of_equivalent_mutants_is_of_today():
    listed = kernel_mutants.equivalent()
    assert all(re.fullmatch(r"# \S.{10,}", reason) for reason in listed.values())
    kernels = {tuple(kernel.split(":")) for kernel, _, _ in listed}
    there = {mutant.key for key in kernels for mutant in kernel_mutants.mutants(*key)}
    assert not listed.keys() - there, "no such change: " + "\n".join(map(str, listed.keys() - there))


def test_a_few_mutants_are_killed():
    done = scripts.get(SWAPS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    known = kernel_mutants.equivalent()
    kinds = {m.kind for m in kernel_mutants.mutants("11_preemption", "swap_blocks_kernel") if m.key not in known}
    assert re.findall(r"(\d+) mutants .* (\d+) live", done.stdout) == [(str(len(kinds)), "0")] and len(kinds) > 5


def test_some_are_of_each_class_and_of_each_kernel():
    chosen = [key for key in kernel_mutants.kernels() if key[0] in ("02_paged_attention", "09_gqa")]
    some = kernel_mutants.Campaign(chosen, every=False, seed=0).some_of(known := kernel_mutants.equivalent())
    assert set(some) == set(chosen) and min(map(len, some.values())) >= 2
    for file in {key[0] for key in chosen}:
        drawn = [m.kind for key in chosen if key[0] == file for m in some[key]]
        found = [m for key in chosen if key[0] == file for m in kernel_mutants.mutants(*key) if m.key not in known]
        assert set(drawn) == {m.kind for m in found} and len(drawn) < len(found) / 5


def test_without_tests_mutants_live():
    mutant = kernel_mutants.mutants("02_paged_attention", "copy_blocks_kernel")[0]
    assert kernel_mutants.run(mutant, {}, Counter()) == "lives"


@pytest.mark.slow
def test_some_mutants_of_every_kernel_are_killed():
    done = scripts.get(SOME)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert done.stdout.count(" mutants ") == len(kernel_mutants.kernels()) - len(kernel_mutants.NATIVE)
