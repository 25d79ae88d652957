"""Workers as Ray's actors write the tokens of one process."""

from __future__ import annotations

import common

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support import servers
from support.process_tree import descendants, wait_until_gone
from support.servers import ASKED, ask_all, server
from support.tiers import and_slowly

answers, folder, shipped = servers.answers, servers.folder, servers.shipped
pytest.importorskip("ray", reason="not installed: it is an extra")


@pytest.mark.parametrize("flags", and_slowly([], [(["-pp", "2"],)], [(["-tp", "3"],)]), ids=" ".join)
def test_serve_with_ray(folder, answers, flags):
    """Workers as actors of a local Ray, in a placement group: the same tokens; a killed actor is a clear error."""
    import openai

    with server(folder, *flags, "--distributed-executor-backend", "ray") as (client, process, _, _):
        assert ask_all(client, ASKED * 2) == [answers[asked] for asked in ASKED] * 2
        everybody = descendants(process.pid)
        actors = [pid for pid in everybody if "ray::RayWorker" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(actors) == int(flags[1])
        os.kill(actors[-1], signal.SIGKILL)
        with pytest.raises(openai.InternalServerError, match="a worker died"):
            ask_all(client)
        assert process.wait(60) == 1
    wait_until_gone(everybody)


@pytest.mark.long
def test_ray(folder, answers):
    """The same in one process of ours, without a server."""
    code = f"""
import sys; sys.path.insert(0, {str(common.HERE)!r})
import common, json
from engine import registry
from engine.model import folders
from engine.model.tokenizer import Tokenizer
from engine.parallel.config import ParallelConfig
from engine.parallel.executors import ExecutorFailed
from engine.parallel.worker import WorkerSpec
from engine.parallel.workers import make_executor
lesson = registry.lesson("06c_scaling_out")
parallel = ParallelConfig(1, 2, "ray")
executor = make_executor(parallel)
executor.collective_rpc("load_model", WorkerSpec({str(folder)!r}, parallel))
tokenizer = Tokenizer(folders.model_folder({str(folder)!r}))
engine = lesson.build_engine({str(folder)!r}, parallel, tokenizer, executor)
tokens = lesson.answer(engine, lesson.TEXTS, 12)
executor.ray.kill(executor.actors[1])
try:
    executor.collective_rpc("held")
except ExecutorFailed as error:
    print(json.dumps([[tokenizer.decode(t) for t in tokens], str(error)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    got, error = json.loads(done.stdout.splitlines()[-1])
    assert got == [answers[asked][0] for asked in ASKED] and "died" in error
