"""The seam to the machine: checks that can fail, files that merge, lessons that load, wrong input in one line."""

from __future__ import annotations

import common

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine import arguments, registry
from engine.serving import sockets
from lab import cli, figures, recorded, timing
from lab.hardware import HARDWARE
from lab.parameters import checked
from support import scripts
from support.close import assert_close


def python_job(code: str, *argv: str) -> scripts.Job:
    """`code` in a fresh interpreter with the lessons' folder on its path."""
    whole = f"import sys; sys.path.insert(0, {str(common.HERE)!r})\n{code}"
    return ("python", code, *argv), [sys.executable, "-c", whole, *argv]


def run_python(code: str, *argv: str) -> subprocess.CompletedProcess:
    return subprocess.run(python_job(code, *argv)[1], capture_output=True, text=True)


# --- Comparing ------------------------------------------------------------------------------------------------------


def test_relative_error():
    ref = torch.tensor([3.0, 4.0])
    assert common.relative_error(ref.clone(), ref) == 0
    assert common.relative_error(ref + torch.tensor([0.0, 0.05]), ref) == pytest.approx(0.01, rel=1e-5)
    assert common.relative_error(torch.ones(2), torch.zeros(2)) == math.inf
    assert common.relative_error(torch.zeros(2), torch.zeros(2)) == 0
    infinite = torch.tensor([-math.inf, 1.0])
    assert common.relative_error(infinite.clone(), infinite) == 0
    for wrong in (math.nan, math.inf, 0.0):
        assert not common.relative_error(torch.tensor([wrong, 1.0]), infinite) <= 1
    with pytest.raises(AssertionError, match="shapes"):
        common.relative_error(torch.zeros(2), torch.zeros(1, 2))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 1e-3), (torch.bfloat16, 2e-2)])
def test_assert_close_is_as_strict_as_the_contract(dtype, tolerance):
    ref = torch.ones(1000, dtype=torch.float64)
    assert_close(ref * (1 + 0.9 * tolerance), ref, dtype)
    with pytest.raises(AssertionError, match="exceeds"):
        assert_close(ref * (1 + 1.1 * tolerance), ref, dtype)
    with pytest.raises(AssertionError):
        assert_close(torch.full((1000,), math.nan), ref, dtype)


def test_a_long_line_goes_on_below(capsys):
    common.say("short\n" + "word " * 30 + "\n" + "x" * 130 + "\n  table   kept" + " " * 90 + "end")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "  short" and max(map(len, lines)) <= common.PAGE
    assert [line.split() for line in lines[1:3]] == [["word"] * 21, ["word"] * 9]
    assert "".join("".join(lines[3:5]).split()) == "x" * 130 and lines[-1] == "    table   kept" + " " * 90 + "end"


def test_what_a_model_wrote_moves_no_cursor(capsys):
    """Random weights write any byte: a bell, a carriage return, ESC [ 2 J, which clears a terminal."""
    common.say("a\x07b\rc\x1b[2Jd\x9b\ne")
    common.table(["task", "free"], [["date", "a\x07b\rc\x1b[2Jd\x7f"]])
    told = capsys.readouterr().out
    assert told.startswith("  a␇b␍c␛[2Jd�\n  e\n") and "a␇b␍c␛[2Jd␡" in told
    assert not [c for c in told if c != "\n" and not c.isprintable()]


def test_a_home_that_cannot_be_written_is_not_reported():
    code = f"import sys; sys.path.insert(0, {str(common.HERE)!r}); from lab import figures; figures.new_figure()"
    environment = {k: v for k, v in os.environ.items() if k not in ("MPLCONFIGDIR", "XDG_CONFIG_HOME")}
    environment |= {"HOME": "/dev/null/nobody", "XDG_CACHE_HOME": "/dev/null/nothing"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert (done.stdout, done.stderr) == ("", "")


def test_checks_stop_a_script(capsys):
    common.check("same", torch.ones(3), torch.ones(3))
    common.check_equal("tokens", [1, 2], [1, 2])
    with pytest.raises(common.CheckFailed, match="kernel"):
        common.check("kernel", torch.ones(3), 1.001 * torch.ones(3))
    with pytest.raises(common.CheckFailed, match="tokens"):
        common.check_equal("tokens", [1, 2], [1, 3])


# --- Kernels --------------------------------------------------------------------------------------------------------


def test_wrappers_take_the_torch_path_on_a_cpu_unless_told():
    x = torch.ones(1)
    assert not common.runs_kernel(x)
    with common.use_kernels():
        assert common.runs_kernel(x) == common.HAS_TRITON
    assert not common.runs_kernel(x)
    assert common.runs_kernel(torch.ones(1, device="meta"))


def test_a_kernel_counts_and_records_its_launches():
    calls = []

    class Compiled:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: calls.append((grid, args, kwargs))

    def double(x, BLOCK): ...

    kernel = common.Kernel(double)
    kernel.fn = Compiled()
    if common.HAS_TRITON:
        kernel[(2,)](1, BLOCK=16)
        assert kernel.launches == 1 and calls == [((2,), (1,), {"BLOCK": 16})]
    with common.captured() as launches:
        kernel[(3,)](4, BLOCK=32)
    assert [(x.kernel.name, x.grid, x.args, x.kwargs) for x in launches] == [("double", (3,), (4,), {"BLOCK": 32})]
    assert kernel.launches == len(calls)


CPU = (["--device", "cpu"], ["--device=cpu"])


def test_the_cpu_is_asked_for():
    assert all(common._asked_for_cpu(["x.py", *argv, "--seed", "1"]) for argv in CPU)
    assert not any(common._asked_for_cpu(argv) for argv in (["--device", "cuda"], ["--device"], ["--model", "cpu"]))


@pytest.mark.slow
@pytest.mark.parametrize("argv", CPU, ids=" ".join)
def test_gpu_stays_unseen_when_the_cpu_is_asked_for(argv):
    done = scripts.get(python_job("import common; print(common.HAS_GPU, common.INTERPRET)", *argv))
    assert done.stdout.split() == ["False", "True"], done.stderr


# --- Lessons by path ------------------------------------------------------------------------------------------------


def test_a_lesson_is_loaded_once_and_never_twice_when_it_is_main(tmp_path, monkeypatch):
    assert registry.lesson("01_kv_cache") is registry.lesson("01_kv_cache")
    with pytest.raises(ImportError, match="99_nothing"):
        registry.lesson("99_nothing")
    code = """
import common, sys
from engine import registry
me = registry.lesson('90_a')
print(me.__name__, me is sys.modules['__main__'])
"""
    (tmp_path / "90_a.py").write_text(code)
    (tmp_path / "91_bad.py").write_text("import common\nraise RuntimeError('broken lesson')")
    (tmp_path / "engine").mkdir()
    for name in ("common.py", "engine/__init__.py", "engine/registry.py"):
        (tmp_path / name).write_text((common.HERE / name).read_text())
    done = subprocess.run([sys.executable, tmp_path / "90_a.py", "--help"], capture_output=True, text=True)  # no torch
    assert done.stdout.split() == ["__main__", "True"], done.stderr
    monkeypatch.setattr(registry, "VLLM", tmp_path)
    for _ in range(2):  # a lesson that failed to load is not left half-loaded
        with pytest.raises(RuntimeError, match="broken lesson"):
            registry.lesson("91_bad")


# --- Files ----------------------------------------------------------------------------------------------------------


def test_merge_json_keeps_other_keys(tmp_path):
    path = tmp_path / "new" / "out.json"
    recorded.merge_json(path, "a", {"x": 1})
    recorded.merge_json(path, "b", {"y": 2})
    recorded.merge_json(path, "a", {"x": 3})
    assert json.loads(path.read_text()) == {"a": {"x": 3}, "b": {"y": 2}}
    assert [p.name for p in path.parent.iterdir()] == ["out.json"]


@pytest.mark.parametrize("content", ["{", "[1]", "\xff", "[" * 200_000], ids=["open", "list", "bytes", "deep"])
def test_merge_json_refuses_what_it_cannot_merge(tmp_path, content):
    path = tmp_path / "out.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(common.InputError, match="--json"):
        recorded.merge_json(path, "a", {})
    assert path.read_bytes() == content.encode("latin-1")


def test_results_have_a_place_before_anything_is_computed(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").touch()

    def refused(flag, path):
        with pytest.raises(SystemExit) as end:
            cli.parser("what it does").parse_args([flag, str(path), *(["--figure", "."] if flag == "--json" else [])])
        assert end.value.code == 2
        return capsys.readouterr().err

    for flag, wrong in (("--figure", "file"), ("--figure", "file/below"), ("--json", "file/a.json")):
        assert f"{flag}: {tmp_path / 'file'} is not a folder" in refused(flag, tmp_path / wrong)
    assert f"--json: {tmp_path} is a folder" in refused("--json", tmp_path)
    words = ["--figure", str(tmp_path / "new"), "--json", str(tmp_path / "new" / "x" / "a.json")]
    assert cli.parser("what it does").parse_args(words).figure
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, how: Path(path) != tmp_path and may(path, how))
    for flag in ("--figure", "--json"):
        assert f"{flag}: {tmp_path} cannot be written to" in refused(flag, tmp_path / "new" / "below")
    monkeypatch.undo()
    (tmp_path / "plot.svg").mkdir()
    with pytest.raises(common.InputError, match=r"--figure .*: plot.svg cannot be written"):
        figures.save_figure(figures.new_figure()[0], tmp_path, "plot")


def test_figures_are_reproducible(tmp_path):
    def draw(folder):
        figure, axes = figures.new_figure()
        axes.plot([1, 2, 3], [1, 4, 9], label="T²")
        axes.fill_between([1, 2], [1, 2])
        axes.legend()
        return figures.save_figure(figure, folder, "plot").read_bytes()

    assert draw(tmp_path / "a") == draw(tmp_path / "b")


# --- Command line ---------------------------------------------------------------------------------------------------


def test_an_address_is_one_that_a_client_can_call():
    for text in ("http://localhost", "https://example.org:443/v1", "http://[::1]:8000", "http://10.0.0.1:1/"):
        assert arguments.url(text) == text.rstrip("/")
    for text in ("localhost:8000", "ftp://a", "http://", "http://[::1", "http://a:x", "http://a:0", "http://a:65536"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not http://HOST:PORT"):
            arguments.url(text)


SCRIPT = """
import common
from engine.arguments import number
from lab import cli
def main():
    p = cli.parser("doc")
    p.add_argument("--blocks", type=number(int, 1, 64), default=4)
    p.add_argument("--rate", type=number(float, 0), default=1.0)
    p.add_argument("--tile", type=int, choices=(1, 2, 4))
    args = p.parse_args()
    cli.start(args)
    if args.blocks == 13:
        raise common.InputError("--blocks 13: unlucky; allowed: others")
    common.check_equal("blocks", args.blocks, 4)
cli.run(main)
"""


@pytest.mark.parametrize(
    ("argv", "code", "word"),
    [
        ([], 0, ""),
        (["--blocks", "5"], 1, "CHECK FAILED: blocks"),
        (["--blocks", "13"], 2, "allowed: others"),
        (["--blocks", "0"], 2, "from 1 to 64"),
        (["--blocks", "x"], 2, "'x' is not a whole number"),
        (["--blocks", "1" + 400 * "0"], 2, "from 1 to 64"),
        (["--rate", "nan"], 2, "--rate"),
        (["--rate", "-1"], 2, "at least 0"),
        (["--seed", "-1"], 2, "--seed"),
        (["--tile", "nan"], 2, "argument --tile: invalid choice: 'nan' (choose from 1, 2, 4)"),
        (["--tile", "3"], 2, "argument --tile: invalid choice: 3 (choose from 1, 2, 4)"),
        (["--device", "tpu"], 2, "tpu"),
        pytest.param(
            ["--device", "cuda"], 2, "no GPU", marks=pytest.mark.skipif(common.HAS_GPU, reason="there is one")
        ),
        (["--figure", "x" * 5000], 2, "--figure"),
        (["--json", "."], 2, "is a folder"),  # before anything is measured, not after
        (["--nonsense"], 2, "--nonsense"),
    ],
)
def test_wrong_input_is_one_line_and_an_exit_code(argv, code, word, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script.py", *argv])
    try:
        exec(SCRIPT, {})
        left = 0
    except SystemExit as stop:
        left = stop.code
    lines = capsys.readouterr().err.splitlines()
    assert left == code and len(lines) == (code != 0)
    assert not lines or (word in lines[0] and lines[0].startswith("script.py: "))


def test_a_signal_ends_what_was_started():
    """A process that is ended by SIGTERM itself leaves behind the server that it runs, and its folders."""
    ended, before = [], signal.getsignal(signal.SIGTERM)

    def main():
        try:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(5)
        finally:
            ended.append("server")

    try:
        with pytest.raises(SystemExit) as stop:
            cli.run(main)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stop.value.code == 143 and ended == ["server"]


def test_help_does_not_wait_for_torch():
    """The best of three: torch alone takes longer to import than `--help` may take."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = run_python(SCRIPT, "--help")
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0 and "--blocks" in done.stdout and "--seed" in done.stdout
    done = run_python("import common; from engine.model import llama; print('torch._C' in sys.modules)", "--help")
    assert done.stdout.strip() == "False"
    assert scripts.within(min(seconds), 3)


# --- Arithmetic -----------------------------------------------------------------------------------------------------


def test_roofline():
    h100 = HARDWARE["H100 80GB"]
    assert h100.ridge == pytest.approx(295, abs=1)
    assert h100.seconds(flops=989e12, bytes_moved=0) == 1 and h100.seconds(flops=0, bytes_moved=3350e9) == 1
    assert h100.seconds(989e12, 2 * 3350e9) == 2


def test_measure_reports_what_a_call_takes():
    if common.HAS_GPU:
        pytest.skip("wall-clock sleeps are not GPU work")
    for measure in (timing.measure, timing.measure_graph):
        took = measure(lambda: time.sleep(0.01), seconds=0.1)
        assert 0.01 <= took.low <= took.median <= took.high < 0.1


# --- Parameters of a simulation ------------------------------------------------------------------------------------

ALLOWED = {"size": range(1, 9), "scale": (0.5, 1, 2), "on": (True, False), "kind": ["a", "b"], "count": [1, 2]}
GOOD = {"size": 8, "scale": 1, "on": False, "kind": "b", "count": 2}


def test_parameters_that_are_allowed():
    assert checked(GOOD, ALLOWED) == GOOD
    assert checked(GOOD | {"scale": 0.5}, ALLOWED)["scale"] == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 9}, "size: 9; allowed: 1 to 8"),
        ({"size": 8.0}, "size"),
        ({"size": True}, "size"),
        ({"scale": True}, "scale: True; allowed: 0.5, 1, 2"),
        ({"on": 0}, "on: 0; allowed: True, False"),
        ({"kind": ["a"]}, "kind"),
        ({"count": 1.0}, "count"),
        ({"more": 1}, "more: no such parameter; allowed: size, scale, on, kind, count"),
    ],
)
def test_parameters_that_are_not_allowed(change, message):
    with pytest.raises(common.InputError, match=message.replace("(", r"\(")):
        checked(GOOD | change, ALLOWED)


def test_a_missing_parameter_is_named():
    with pytest.raises(common.InputError, match="kind: missing"):
        checked({k: v for k, v in GOOD.items() if k != "kind"}, ALLOWED)
    with pytest.raises(common.InputError, match="an object with size"):
        checked([], ALLOWED)


@pytest.mark.parametrize(("limits", "then"), [((1024, 4096), (4096, 4096)), ((256, -1), (65535, -1)),
                                              ((1024, 1 << 20), (65535, 1 << 20)), ((70000, 80000), None),
                                              ((-1, -1), None)])  # fmt: skip
def test_a_server_may_have_as_many_connections_as_the_machine_allows(monkeypatch, limits, then):
    resource, now = pytest.importorskip("resource"), []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: now.append(pair))
    sockets.set_ulimit()
    assert now == ([then] if then else [])


def test_a_reader_that_has_seen_enough_is_no_error():
    """`| head -1`."""
    code = f"""
import sys
sys.path.insert(0, {str(common.HERE)!r})
import common
from lab import cli
cli.run(lambda: common.say('x'))
"""
    command = [sys.executable, "-c", code, "--help"]  # which does without torch
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(60) == 0


def test_no_thread_sees_half_a_lesson(tmp_path, monkeypatch):
    (tmp_path / "99_slow.py").write_text("import time\ntime.sleep(0.2)\nwhole = True\n")
    monkeypatch.setattr(registry, "VLLM", tmp_path)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: registry.lesson("99_slow").whole, range(4)))
    del sys.modules["99_slow"]
    assert found == [True] * 4


def test_a_row_of_layers_is_timed_by_the_layer(device):
    """Four copies and the layer itself, 2 ms each (a GPU waits for nothing here)."""

    class Layer:
        def __init__(self):
            self.weight = torch.ones(3)

        def __call__(self, x):
            seen.add(self.weight.data_ptr())
            time.sleep(0.002)

    seen = set()
    took = timing.measure_in_a_row(Layer(), torch.ones(1, device=device), 60e6, 0.01)
    assert len(seen) == 5 and (0.002 <= took < 0.008 or common.HAS_GPU)
