"""The reader's parts in the engine: serve, bench and conform with everything that has passed.

Owns which part goes into which seam, and what is printed of it; called by the command line. It never grades a part, and
changes nothing of the engine. vLLM: `--scheduler-cls`, and the plugins of `vllm/plugins/__init__.py`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab import replay
from lab.workload_files import load_workload
from learn import steps
from learn.workbook import Workbook

COMMANDS = ("serve", "bench", "conform")
RECORDED = common.ROOT / "tests" / "golden" / "recorded"

FILE = '''"""Written by `learn {command}`: your parts, as the engine's seams ask for them."""

import sys

sys.path.insert(0, {here!r})

from engine import plugs
from learn.fits import FITS, as_it_is

PARTS = {parts!r}


def __getattr__(seam):
    if seam not in PARTS:
        raise AttributeError(seam)
    return FITS.get(seam, as_it_is)(plugs.load(seam, PARTS[seam]))
'''


def passed_parts(book: Workbook) -> dict[str, str]:
    """FILE.py:OBJECT by seam, of every step that has passed; a later lesson's takes the place of an earlier one's.

    Raises InputError if there is none.
    """
    found = {}
    for number in steps.FILES:
        for step in steps.of(number):
            if step.plug and book.has_passed(step):
                found[step.plug[0]] = f"{book.file(step.lesson).absolute()}:{step.plug[1]}"
    if not found:
        first = next(step for number in steps.FILES for step in steps.of(number) if step.plug)
        raise common.InputError(f"none of your parts fills a seam of the engine yet: {first.id} is the first that does")
    return found


def main(book: Workbook, command: str, flags: Sequence[str]) -> None:
    """Raises InputError."""
    found = passed_parts(book)
    for seam, target in found.items():
        file, _, name = target.rpartition(":")
        common.say(f"{seam:11} my/{Path(file).name}:{name}")
    path = book.folder / "plugged.py"
    path.write_text(FILE.format(command=command, here=str(common.HERE), parts=found), encoding="utf-8")
    plug = {seam: f"{path.absolute()}:{seam}" for seam in found}
    if command == "serve":
        serve(plug, flags)
    elif flags:
        raise common.InputError(f"learn {command}: takes no flags")
    elif command == "bench":
        bench(plug)
    else:
        conform(plug)


def limits(plug: dict[str, str]) -> dict[str, Any]:
    """What the parts of the first lessons do not know of: a prefix cache, the next step's scheduling ahead of time."""
    simple = {"scheduler", "block_pool"} & plug.keys()
    more: dict[str, Any] = {"enable_prefix_caching": False} if simple else {}
    if "rejection" in plug:
        more["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3}
    return more


def serve(plug: dict[str, str], flags: Sequence[str]) -> None:
    """`python -m vllm serve FLAGS`, with the reader's parts."""
    from engine import arguments
    from engine.serving.cli import add_serve_command

    given = [word for seam, target in plug.items() for word in ("--plug", f"{seam}={target}")]
    if not limits(plug).get("enable_prefix_caching", True):
        given.append("--no-enable-prefix-caching")
    if "rejection" in plug:
        given += ["--speculative-config", json.dumps(limits(plug)["speculative_config"])]
    parser = arguments.Parser(prog="python -m vllm learn")
    add_serve_command(parser.add_subparsers(dest="command"))
    args = parser.parse_args(["serve", *given, *flags])
    args.run(args)


# --- Beside the given engine ------------------------------------------------------------------------------------------

PROMPTS = ("The capital of France is", "Once upon a time", "To make bread, you", "Three primary colors are")


def bench(plug: dict[str, str]) -> None:
    """The same prompts through both engines: are the tokens the same, and how fast is each? Raises CheckFailed."""
    from engine.llm import LLM

    more = limits(plug)
    rates, tokens = [], []
    for parts in ({}, plug):
        llm = LLM(max_model_len=256, max_num_seqs=8, plug=parts or None, **more)
        llm.generate(PROMPTS[:1], params(4))
        start = time.perf_counter()
        outputs = llm.generate([*PROMPTS, *PROMPTS], params(48))
        seconds = time.perf_counter() - start
        tokens.append([output.outputs[0].token_ids for output in outputs])
        rates.append(sum(map(len, tokens[-1])) / seconds)
    common.check_equal("the same tokens from both engines", *tokens[::-1])
    common.say(f"the given engine {rates[0]:.0f} tokens/s, with your parts {rates[1]:.0f}: {rates[1] / rates[0]:.2f} ×")


def params(max_tokens: int) -> Any:
    from engine.request import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def conform(plug: dict[str, str]) -> None:
    """How many of vLLM's recorded workloads are decided as vLLM did, step by step, and where the first differs."""
    parts = {seam: target for seam, target in plug.items() if seam in ("scheduler", "block_pool")}
    if not parts:
        raise common.InputError("learn conform: compares schedulers and block pools; none of yours has passed yet")
    same, first = 0, None
    paths = sorted((RECORDED / "workloads").glob("*.json"))
    for path in paths:
        recorded = json.loads((RECORDED / "traces" / path.name).read_text(encoding="utf-8"))
        try:
            problem = difference(replay.replay(load_workload(path), parts), recorded)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        same += problem is None
        first = first or (problem and f"{path.stem}: {problem}")
    common.say(f"{same} of {len(paths)} recorded workloads are decided as vLLM decided them.")
    if first:
        common.say(f"The first that is not: {first}")


def difference(ours: dict, recorded: dict) -> str | None:
    """The first step that differs, side by side."""
    for i, (a, b) in enumerate(zip(ours["steps"], recorded["steps"])):
        if a != b:
            keys = [key for key in {**b, **a} if a.get(key) != b.get(key)]
            lines = [f"    {key}: yours {a.get(key)}; vLLM {b.get(key)}"[:300] for key in keys]
            return "\n".join([f"step {i}", *lines])
    if len(ours["steps"]) != len(recorded["steps"]):
        return f"yours takes {len(ours['steps'])} steps, vLLM {len(recorded['steps'])}"
    return None if ours["end"] == recorded["end"] else f"yours ends {ours['end']!r}, vLLM {recorded['end']!r}"
