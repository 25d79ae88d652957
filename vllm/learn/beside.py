"""The engine with the reader's parts, beside the given one: served, measured, and held against vLLM's recordings.

Owns what `learn serve`, `learn bench` and `learn conform` run and print; called by the command line. It never decides
which parts there are: that is `parts.py`. vLLM has nothing like it.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lab import replay
from lab.workload_files import load_workload
from learn import grader, parts
from learn.parts import Part
from learn.workbook import Workbook

COMMANDS = ("serve", "bench", "conform")
RECORDED = common.ROOT / "tests" / "golden" / "recorded"


def main(book: Workbook, command: str, words: Sequence[str]) -> None:
    """`words`: seams, or none for all, and then the server's flags. Raises InputError, and CheckFailed."""
    flags = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    seams, flags = words[:flags], words[flags:]
    if flags and command != "serve":
        raise common.InputError(f"learn {command} {flags[0]}: takes seams only, no flags")
    found = parts.passed(book)
    found = parts.chosen(found, seams) if seams else found
    plug = parts.write(book, found)
    for part in found:
        common.say(f"{part.seam:11} {part.name} of my/{part.step.lesson}.py")
    if command == "serve":
        serve(found, plug, flags)
    elif command == "bench":
        bench(found, plug)
    else:
        conform(found, plug)


def sets_of(found: Sequence[Part]) -> dict[str, list[Part]]:
    """Each part alone, and then all that go together, by a name."""
    sets = {part.seam: [part] for part in found}
    if len(all_of_them := parts.together(found)) > 1:
        sets[f"{len(all_of_them)} together"] = all_of_them
    return sets


def of(plug: Mapping[str, str], some: Sequence[Part]) -> dict[str, str]:
    return {part.seam: plug[part.seam] for part in some}


# --- A server ---------------------------------------------------------------------------------------------------------


def serve(found: Sequence[Part], plug: Mapping[str, str], flags: Sequence[str]) -> None:
    """`python -m vllm serve FLAGS`, with the reader's parts."""
    from engine import arguments
    from engine.serving.cli import add_serve_command

    all_of_them = parts.together(found)
    for part in found:
        if part not in all_of_them:
            what = parts.NOT_WITH_A_SCHEDULER[part.seam]
            common.say(f"Without {part.seam}: your scheduler knows nothing of {what}. Alone: learn serve {part.seam}")
    more = parts.needs(all_of_them)
    given = [word for seam, target in of(plug, all_of_them).items() for word in ("--plug", f"{seam}={target}")]
    if "enable_prefix_caching" in more:
        common.say("Without a prefix cache, of which one of your parts knows nothing.")
        given.append("--no-enable-prefix-caching")
    if "speculative_config" in more:
        given += ["--speculative-config", json.dumps(more["speculative_config"])]
    if "lora_modules" in more:
        given += ["--enable-lora", "--max-loras", str(more["max_loras"]), "--lora-modules", *more["lora_modules"]]
    parser = arguments.Parser(prog="python -m vllm learn")
    add_serve_command(parser.add_subparsers(dest="command"))
    args = parser.parse_args(["serve", *given, *flags])
    args.run(args)


# --- Beside the given engine ------------------------------------------------------------------------------------------

ABOUT = "You are a helpful guide for travellers. Answer in one short and friendly sentence. "
PROMPTS = [ABOUT + text for text in ("The capital of France is", "To make bread, you", "Once upon a time", "Snow is")]
ROUNDS = 2  # the better one counts
SMALL = {"num_gpu_blocks_override": 8 * 16 + 1}  # blocks of 16 tokens for all: an engine takes no more memory


def bench(found: Sequence[Part], plug: Mapping[str, str]) -> None:
    """The same prompts through both engines: are the tokens the same, and how fast is each? Raises CheckFailed."""
    from engine.model import loader

    model, tokenizer = loader.load()
    problems = []
    engines: dict[str, Run] = {}  # given ones, by their arguments
    common.say(f"{'':12} the given engine's tokens/s, and yours")
    for name, some in sets_of(found).items():
        more = parts.needs(some)
        given = engines.setdefault(repr(more), Run(model, tokenizer, more))
        try:
            mine = Run(model, tokenizer, more | {"plug": of(plug, some)})
            for _ in range(ROUNDS):
                given.round()
                mine.round()
        except Exception as error:
            problem = grader.where(error, *(part.step.lesson for part in some))
        else:
            common.say(f"{name:12} {given.rate:5.0f} {mine.rate:5.0f}: {mine.rate / given.rate:.2f} times as fast")
            problem = first_that_differs(tokenizer, mine.tokens, given.tokens)
        common.say(f"{'':12} {'✗ ' + problem if problem else '✓ the same tokens'}")
        if problem:
            problems.append(name)
    if problems:
        raise common.CheckFailed(f"not as the given engine: {', '.join(problems)}")


class Run:
    """One engine, and how it does: its tokens, and its best rate in tokens/s."""

    def __init__(self, model: Any, tokenizer: Any, arguments: Mapping[str, Any]) -> None:
        from engine.llm import LLM
        from engine.lora.config import LoRARequest

        paths = dict(module.split("=", 1) for module in arguments.get("lora_modules", ()))
        arguments = {name: value for name, value in arguments.items() if name != "lora_modules"}
        self.llm = LLM(model, tokenizer=tokenizer, max_model_len=256, max_num_seqs=8, **SMALL, **arguments)
        adapters = [LoRARequest(name, i + 1, path) for i, (name, path) in enumerate(paths.items())]
        self.adapters = [*adapters, None] if adapters else [None] * len(PROMPTS)
        self.rate, self.tokens = 0.0, []

    def round(self) -> None:
        """All prompts twice in one batch: greedily, and drawn."""
        from engine.request import SamplingParams

        params = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=24, ignore_eos=True)
            for temperature in (0, 0.8)
            for i in range(len(PROMPTS))
        ]
        start = time.perf_counter()
        outputs = self.llm.generate(PROMPTS * 2, params, lora_request=self.adapters * 2)
        seconds = time.perf_counter() - start
        self.tokens = [output.outputs[0].token_ids for output in outputs]
        self.rate = max(self.rate, sum(map(len, self.tokens)) / seconds)


def first_that_differs(tokenizer: Any, mine: Sequence[list[int]], given: Sequence[list[int]]) -> str | None:
    """Of the first answer that differs, both texts. None: all are the same."""
    for i, (a, b) in enumerate(zip(mine, given)):
        if a != b:
            n = next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
            said = f"yours {tokenizer.decode(a)!r:.70}; given {tokenizer.decode(b)!r:.70}"
            return f"answer {i} differs from token {n} on: {said}"
    return None


# --- Beside vLLM's decisions ------------------------------------------------------------------------------------------


def conform(found: Sequence[Part], plug: Mapping[str, str]) -> None:
    """How many of vLLM's recorded workloads are decided as vLLM did, step by step, and where the first differs."""
    deciding = [part for part in found if part.seam in ("scheduler", "block_pool")]
    if not deciding:
        raise common.InputError("learn conform: compares schedulers and block pools; none of yours has passed yet")
    workloads = {path.name: load_workload(path) for path in sorted((RECORDED / "workloads").glob("*.json"))}
    cached = {file for file, workload in workloads.items() if workload["config"]["enable_prefix_caching"]}
    for name, some in sets_of(deciding).items():
        lessons = [part.step.lesson for part in some]
        problems = {file: against(file, workload, of(plug, some), lessons) for file, workload in workloads.items()}
        own = {part.seam: parts.of_the_lesson(part) for part in some}
        by_lesson = sum(against(file, workload, own, lessons) is None for file, workload in workloads.items())
        wrong = {file: problem for file, problem in problems.items() if problem}
        common.say(
            f"{name}: {len(workloads) - len(wrong)} of {len(workloads)} recorded workloads are decided as vLLM decided "
            f"them, {len(cached - wrong.keys())} of the {len(cached)} with a prefix cache. The lesson's: {by_lesson}."
        )
        for file, problem in list(wrong.items())[:1]:
            common.say(f"The first that is not: {file.removesuffix('.json')}: {problem}")


def against(file: str, workload: dict, plug: Mapping[str, Any], lessons: Sequence[str]) -> str | None:
    """In what the decisions on a workload are not vLLM's, or what they end with."""
    recorded = json.loads((RECORDED / "traces" / file).read_text(encoding="utf-8"))
    try:
        return difference(replay.replay(workload, plug), recorded)
    except Exception as error:
        return grader.where(error, *lessons)


def difference(ours: dict, recorded: dict) -> str | None:
    """The first step that differs, side by side."""
    for i, (a, b) in enumerate(zip(ours["steps"], recorded["steps"])):
        if a != b:
            keys = [key for key in {**b, **a} if a.get(key) != b.get(key)]
            lines = [f"    {key}: yours {a.get(key)}; vLLM {b.get(key)}"[:200] for key in keys]
            return "\n".join([f"step {i}", *lines[:3]])
    if len(ours["steps"]) != len(recorded["steps"]):
        return f"yours takes {len(ours['steps'])} steps, vLLM {len(recorded['steps'])}"
    return None if ours["end"] == recorded["end"] else f"yours ends {ours['end']!r}, vLLM {recorded['end']!r}"
