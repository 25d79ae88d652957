"""What `lessons/06f_openai_api.md` simulates, quotes, draws and measures."""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import argparse
import asyncio
import functools
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine import registry
from engine.serving.openai.limits import MAX_BODY_BYTES, MAX_N, MAX_STOP_STRINGS
from engine.serving.openai.protocol import ChatCompletionRequest, CompletionRequest
from engine.serving.openai.serving import OpenAIServing
from lab import figures
from lab.parameters import checked

KEY = "06f_openai_api"
lesson = registry.lesson(KEY)

# --- The simulation behind the widget ---------------------------------------------------------------------------------

FIELDS: dict[str, dict[str, Any]] = {
    "nothing unusual": {}, "temperature 9": {"temperature": 9}, "n 0": {"n": 0}, 'max_tokens "5"': {"max_tokens": "5"},
    "max_tokens 65": {"max_tokens": 65}, "an unknown field": {"temprature": 1}, "model gpt-9": {"model": "gpt-9"},
    "a suffix": {"suffix": "x"}, "json_object and a regex": {"response_format": {"type": "json_object"},
                                                             "structured_outputs": {"regex": "a"}},
    "half a body": {},
}  # fmt: skip
PROMPTS = {"5 characters": "Hello", "empty": "", "64 characters": "x" * 64, "5 MB": "x" * 5_000_000}
WIDGET_CHOICES = {"key": ["right", "wrong"], "field": list(FIELDS), "prompt": list(PROMPTS), "inside": [0, 3, 4]}
CORRECT = {"key": "right", "field": "nothing unusual", "prompt": "5 characters"}
WIDGET_DEFAULT = {"key": "wrong", "field": "temperature 9", "prompt": "64 characters", "inside": 0}


def simulate(params: dict) -> dict:
    """One request to the real app (context 64, at most 4 inside), then again, mistake by mistake. Raises InputError."""
    return asyncio.run(_correct(checked(params, WIDGET_CHOICES)))


async def _correct(case: dict) -> dict:
    server = _server()
    first = last = await server.ask(case)
    first["then"] = []
    for _ in CORRECT:
        if last["status"] not in (200, 503):  # that others leave is nothing that a client can correct
            blamed = "prompt" if last["param"] == "prompt" else "field"
            blamed = {401: "key", 413: "prompt"}.get(last["status"], blamed)
            case = case | {blamed: CORRECT[blamed]}
            last = {"corrected": blamed, **await server.ask(case)}
            first["then"].append(last)
    return first


async def _ask(cases: Sequence[dict]) -> list[dict]:
    server = _server()
    return [await server.ask(case) for case in cases]


class ScriptedServer:
    """The real app before a scripted engine; each station signs when it gets to look at a request."""

    def __init__(self) -> None:
        self.llm, self.signed = lesson.ScriptedLLM(), []
        serving = OpenAIServing(self.llm, ["smol"])
        self.app = lesson.with_routes(serving, ["right"])
        doors = ((self.app.app.app, "app", "JSON"), (serving, "add", "model"), (serving, "check_params", "values"),
                 (serving, "prompts", "length"), (self.llm.admission, "check", "room"),
                 (self.llm, "add_request", "engine"))  # fmt: skip
        for owner, name, station in doors:
            setattr(owner, name, self.signing(getattr(owner, name), station))

    def signing(self, function: Callable[..., Any], station: str) -> Callable[..., Any]:
        """`function`, which notes its station when a request gets so far."""

        def signed(*args: Any, **kwargs: Any) -> Any:
            self.signed.append(station)
            return function(*args, **kwargs)

        return signed

    async def ask(self, case: dict) -> dict:
        """One request through the app itself; what was answered, and who looked at it on the way."""
        llm = self.llm
        llm.num_unfinished, llm.added, llm.aborted = case["inside"], [], []
        self.signed.clear()
        body = json.dumps({"prompt": PROMPTS[case["prompt"]]} | FIELDS[case["field"]]).encode()
        if case["field"] == "half a body":
            body = body[: len(body) // 2]
        heard = await lesson.call(self.app, "/v1/completions", body, {"authorization": f"Bearer {case['key']}"})
        error = heard.json.get("error", {})
        message = error.get("message")
        if "JSON" in self.signed and "not JSON" not in (message or ""):  # the app says which of the two it was
            self.signed.insert(1, "fields")
        return {
            "status": heard.status, "type": error.get("type"), "param": error.get("param"),
            "message": message, "retry_after": heard.headers.get("retry-after"),
            "answer": None if error else heard.json["choices"][0]["text"], "sent_bytes": len(body),
            "engine_heard": len(llm.added), "looked": ["key", *["size"] * heard.body_read, *self.signed],
            "key": case["key"], "body": re.sub("x{8,}", "xx…xx", body.decode()), "inside": case["inside"],
        }  # fmt: skip


@functools.cache
def _server() -> ScriptedServer:
    """One for all states: an app's routes take longer to make than a state to answer."""
    return ScriptedServer()


def describe(trace: dict) -> str:
    """The state under the widget, as text."""
    first = f"HTTP {trace['status']} {trace['type'] or 'OK'}" + (f", param {trace['param']}" if trace["param"] else "")
    lines = [f"{trace['sent_bytes']:,} bytes sent", first]
    lines += [f"Retry-After: {trace['retry_after']}"] if trace["retry_after"] else []
    lines += [
        trace["message"] or f"answer: {trace['answer']}",
        f"requests that the engine heard of: {trace['engine_heard']}",
    ]
    for again in trace["then"]:
        about = f", param {again['param']}" if again["param"] else ""
        lines.append(f"{again['corrected']} corrected: HTTP {again['status']} {again['type'] or 'OK'}{about}")
    return "\n".join(lines)


# --- Numbers that the text quotes -------------------------------------------------------------------------------------


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers."""
    choices = [WIDGET_CHOICES["key"], FIELDS, WIDGET_CHOICES["prompt"][:3], WIDGET_CHOICES["inside"]]
    cases = [dict(zip(WIDGET_CHOICES, case)) for case in itertools.product(*choices)]
    traces = asyncio.run(_ask(cases))
    by_status = {
        str(status): sum(trace["status"] == status for trace in traces) for status in (200, 400, 401, 404, 503)
    }
    chunk = lesson.an_event()
    return {
        "states": len(cases), "by_status": by_status, "heard": sum(trace["engine_heard"] for trace in traces),
        "refused": sum(trace["status"] != 200 for trace in traces),
        "chunk_bytes": len(chunk), "word_bytes": 5, "overhead": len(chunk) / 5, "mb_per_s": len(chunk) * 2500 / 1e6,
        "max_body_mb": MAX_BODY_BYTES / 2**20, "max_stop": MAX_STOP_STRINGS, "max_n": MAX_N,
        "fields": {"completions": len(CompletionRequest.model_fields), "chat": len(ChatCompletionRequest.model_fields)},
    }  # fmt: skip


# --- Figure -----------------------------------------------------------------------------------------------------------

GATES = [("key", 401, "Bearer …"), ("size", 413, "at most\n4 MiB"), ("JSON", 400, "one\nobject"),
         ("fields", 400, "types,\nnames"), ("model", 404, "is\nserved"), ("values", 400, "ranges,\none constraint"),
         ("length", 400, "fits the\ncontext"), ("room", 503, "else\nRetry-After")]  # fmt: skip


def draw(folder: str | Path) -> list[Path]:
    """The stations between a socket and the engine, each with its way out."""
    figure, ax = figures.new_figure(8.0, 3.1)
    colors, way_out = figures.COLORS, functools.partial(dict, arrowstyle="-|>", linewidth=1.3)
    for x, (name, status, what) in enumerate(GATES):
        ax.add_patch(_box(ax, x, colors["grey" if x < 2 else "blue"]))
        ax.text(x, 0.12, name, ha="center", va="center", color="white", weight="bold", fontsize=9.5)
        ax.annotate("", (x, -1.02), (x, -0.36), arrowprops=way_out(color=colors["red"]))
        ax.text(x, -1.12, str(status), ha="center", va="top", color=colors["red"], weight="bold")
        ax.text(x, -1.5, what, ha="center", va="top", fontsize=7.5, color=colors["grey"])
    through = {"arrowstyle": "-|>", "color": colors["ink"], "linewidth": 1.2}
    ax.annotate("", (7.95, 0.12), (-0.75, 0.12), arrowprops=through, zorder=0)
    ax.add_patch(_box(ax, 8.4, colors["green"]))
    ax.text(8.4, 0.12, "engine", ha="center", va="center", color="white", weight="bold", fontsize=9.5)
    ax.text(8.4, -1.12, "200", ha="center", va="top", color=colors["green"], weight="bold")
    ax.annotate("", (8.4, -1.02), (8.4, -0.36), arrowprops=way_out(color=colors["green"]))
    ax.text(0.5, 0.85, "before FastAPI", ha="center", fontsize=9, color=colors["grey"])
    ax.text(4.5, 0.85, "in the API process, without the engine", ha="center", fontsize=9, color=colors["blue"])
    ax.set(xlim=(-0.8, 8.9), ylim=(-2.2, 1.15), xticks=[], yticks=[])
    for spine in ax.spines.values():
        spine.set_visible(False)
    return [figures.save_figure(figure, folder, "06f_gates")]


def _box(ax: Any, x: float, color: str) -> Any:
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch((x - 0.4, -0.2), 0.8, 0.64, boxstyle="round,pad=0.02", facecolor=color, edgecolor="white")


# --- What `--bench` measures ------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What each refusal costs before a real engine, and what the event loop does for a request and for a token."""
    return {"refusal_us": asyncio.run(time_refusals(args)), **lesson.measure_costs(1.0)}


async def time_refusals(args: argparse.Namespace) -> dict[str, float]:
    """Microseconds by what is wrong."""
    llm = await lesson.started(args)
    try:
        _, us = await lesson.refusals(lesson.with_routes(OpenAIServing(llm, ["smol"])), repeat=30)
    finally:
        await llm.shutdown()
    common.table(["refused", "µs"], [[name, f"{x:,.0f}"] for name, x in us.items()])
    return us
