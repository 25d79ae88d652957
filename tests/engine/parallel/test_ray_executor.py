"""Workers as Ray's actors write the tokens of one process."""

from __future__ import annotations

import common

import json
import subprocess
import sys

import pytest

from support import servers
from support.servers import ask_all, server

texts = servers.texts


@pytest.mark.slow
def test_ray(texts):
    """Workers as actors of a local Ray, in a placement group: the same tokens; a killed actor is a clear error."""
    if __import__("importlib.util").util.find_spec("ray") is None:
        pytest.skip("ray is not installed: it is an extra")
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
executor.collective_rpc("load_model", WorkerSpec(None, parallel))
tokenizer = Tokenizer(folders.model_folder(None))
engine = lesson.build_engine(None, parallel, tokenizer, executor)
tokens = lesson.answer(engine, lesson.TEXTS)
executor.ray.kill(executor.actors[1])
try:
    executor.collective_rpc("held")
except ExecutorFailed as error:
    print(json.dumps([[tokenizer.decode(t) for t in tokens], str(error)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    got, error = json.loads(done.stdout.splitlines()[-1])
    assert got == texts and "died" in error


@pytest.mark.slow
def test_serve_with_ray(texts):
    if __import__("importlib.util").util.find_spec("ray") is None:
        pytest.skip("ray is not installed: it is an extra")
    with server("-tp", "3", "--distributed-executor-backend", "ray") as (client, _, _, _):
        assert ask_all(client) == texts * 2
