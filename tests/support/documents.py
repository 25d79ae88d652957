"""What the lessons' markdown claims, as data; `test_docs.py` compares it with the code.

Markers are HTML comments, invisible to readers:

    131,072<!-- fact: bytes_per_token.llama_31_8b -->     the number before it, as the lesson's facts() computes it
    12.4 ms<!-- cpu: bench.decode_ms -->                  … as lessons/results/cpu.json (or h200.json) has it
    96 %<!-- fact: waste.alpaca *100 -->                  … after scaling
    <!-- fact@02_paged_attention: a.b -->                 … of another lesson
    <!-- code: symbol -->                                 the next block is a literal excerpt of that function or class
    <!-- output: --flag 3 -->                             the next block's lines appear in the script's output, in order
    <!-- widget -->                                       the next block is the widget's default state as text
    <!-- sketch -->                                       the next block is not our code
    <!-- steps --> … <!-- /steps -->                      what `learn` has for the lesson: its steps and incidents
"""

from __future__ import annotations

import common

import ast
import dataclasses
import functools
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from learn import steps, tickets

# A script is a lesson, or a companion such as 05b, once it has a main(); what others need of it may stand before.
SCRIPTS = sorted([*common.HERE.glob("[01]*.py"), *common.HERE.glob("tours/[01]*.py")], key=lambda path: path.stem)
LESSONS = [path for path in SCRIPTS if "\ndef main(" in path.read_text()]
# Whose story the fast tier tells: the shortest about a kernel. The slow tier tells the others.
TOLD = [path for path in LESSONS if path.stem == "03_flash_attention"]
PAGES = [common.ROOT / "README.md", *sorted((common.ROOT / "lessons").glob("*.md"))]

NUMBER = re.compile(
    r"(?P<number>[-−+]?\d[\d,]*(?:\.\d+)?)(?P<unit>[^\d\n<>]{0,24})"
    r"<!-- (?P<source>fact|cpu|h200)(?:@(?P<lesson>[\w.]+))?: (?P<path>[\w.\-]+)(?: (?P<op>[*/])(?P<by>[\d.e]+))? -->"
)
BLOCK = re.compile(r"(?:^<!-- (?P<kind>code|output|widget|sketch)(?:: ?(?P<argument>.*?))? ?-->\n+)?"
                   r"^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^ *```$", re.M | re.S)  # fmt: skip
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)|!\[[^\]]*\]\((?P<image>[^)\s]+)\)")
SYMBOL = re.compile(r"`(?P<file>(?:vllm|tests|lessons)/[\w./-]+\.\w+)(?::(?P<symbol>[\w.]+))?`")


@dataclasses.dataclass
class Quote:
    """A number in the text and where it comes from."""

    page: Path
    line: int
    shown: str
    source: str
    lesson: str
    path: str
    op: str | None
    by: float

    @property
    def decimals(self) -> int:
        return len(self.shown.partition(".")[2])

    def scaled(self, value: float) -> float:
        return value if self.op is None else value * self.by if self.op == "*" else value / self.by

    def agrees_with(self, value: float) -> bool:
        """`value`, scaled and rounded to the decimals shown, is what the text says."""
        shown = float(self.shown.replace(",", "").replace("−", "-"))
        return abs(shown - self.scaled(value)) <= 0.5 * 10**-self.decimals * (1 + 1e-9)

    def rewritten(self, value: float) -> str:
        """`value` in the text's own style: as many decimals, its minus, a plus or separators where it has them."""
        if self.agrees_with(value):
            return self.shown
        value = self.scaled(value)
        sign = ("+" if self.shown[0] == "+" else "") if value >= 0 else "-" if self.shown[0] == "-" else "−"
        return sign + f"{abs(value):{',' if ',' in self.shown or abs(value) >= 1000 else ''}.{self.decimals}f}"

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line} {self.shown} ({self.source} {self.path})"


@dataclasses.dataclass
class Block:
    """A fenced block with the marker above it, if any."""

    page: Path
    line: int
    kind: str | None
    argument: str
    language: str
    body: str


def script_of(page: Path) -> Path | None:
    """The script that a lesson's page belongs to."""
    return next((path for path in LESSONS if path.stem == page.stem), None)


def quotes(page: Path) -> list[Quote]:
    text = page.read_text()
    return [
        Quote(page, text.count("\n", 0, m.start()) + 1, m["number"], m["source"], m["lesson"] or page.stem, m["path"],
              m["op"], float(m["by"] or 1))
        for m in NUMBER.finditer(text)
    ]  # fmt: skip


def measured_again(page: Path, results: Callable[[str, str], object]) -> str:
    """The page's text with every quoted measurement as `results(lesson, "cpu" or "h200")` has it now."""

    def rewrite(m: re.Match) -> str:
        if m["source"] == "fact":
            return m[0]
        quote = next(found)
        assert quote.shown == m["number"]
        value = lookup(results(quote.lesson, quote.source), quote.path)
        return quote.rewritten(value) + m[0].removeprefix(quote.shown)

    found = (quote for quote in quotes(page) if quote.source != "fact")
    return NUMBER.sub(rewrite, page.read_text())


STEPS = re.compile(r"<!-- steps -->\n(.*?)<!-- /steps -->\n", re.S)


def steps_of(page: Path) -> str:
    """What `learn` has for a lesson, as its page lists it. Empty for a page without steps."""
    number = page.stem[:2]
    if number not in steps.FILES or not page.stem[2:].startswith("_"):
        return ""
    lines = [
        f"Write it yourself: `uv run python -m vllm learn {number}` puts the script into `my/` with these parts left",
        "out, and `uv run python -m vllm learn check` grades them.\n",
        "| step | what it is about | part |\n|---|---|---|",
        *(f"| {step.id} | {step.title} | `{step.cut}` |" for step in steps.of(number)),
    ]
    about = [incident for incident in tickets.ALL if incident.lesson == number]
    if about:
        lines.append(
            "\nTickets from an engine with one fault in it, or none: `uv run python -m vllm learn incident N`.\n"
        )
        lines.append("| ticket | what was reported |\n|---|---|")
        lines += [f"| incident {incident.number} | {incident.title} |" for incident in about]
    return "\n".join(lines) + "\n"


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, m.start()) + 1, m["kind"], m["argument"] or "", m["language"],
              textwrap.dedent(m["body"]))
        for m in BLOCK.finditer(text)
    ]  # fmt: skip


def commands(page: Path) -> Iterator[tuple[Path, list[str]]]:
    """Every `uv run python vllm/….py`, `-m vllm …` or `-m vllm.tours.…` of a page's bash blocks: script, arguments."""
    for block in blocks(page):
        if block.language in ("bash", "sh", "console"):
            for line in re.sub(r"\\\n\s*", " ", block.body).splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if words[:4] == ["uv", "run", "python", "-m"] and words[4].startswith(("vllm.tours.", "vllm.lab.")):
                    yield common.ROOT / f"{words[4].replace('.', '/')}.py", words[5:]
                elif words[:5] == ["uv", "run", "python", "-m", "vllm"]:
                    yield common.HERE / "__main__.py", words[5:]
                elif words[:3] == ["uv", "run", "python"]:
                    yield common.ROOT / words[3], words[4:]


def lookup(value: object, path: str) -> float:
    """`value["a"]["b c"]` for the path "a.b_c"; list items by index."""
    for key in path.split("."):
        spaced = key.replace("_", " ")
        value = value[int(key)] if isinstance(value, list) else value[spaced if spaced in value else key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{path} is {value!r}, not a number")
    return value


@functools.cache
def symbols(path: Path) -> dict[str, str]:
    """Source text of each top-level function, class and assignment of a file, and of each method (`Class.method`)."""
    source = path.read_text()
    lines = source.splitlines()
    found: dict[str, str] = {}

    def add(nodes: list[ast.stmt], prefix: str) -> None:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                found[prefix + node.name] = "\n".join(lines[first - 1 : node.end_lineno])
                if isinstance(node, ast.ClassDef):
                    add(node.body, f"{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        found[prefix + target.id] = "\n".join(lines[node.lineno - 1 : node.end_lineno])

    add(ast.parse(source).body, "")
    return found


def is_excerpt(excerpt: str, source: str) -> bool:
    """`excerpt` is a run of whole lines of `source`, at any common indentation; a line `...` or `…` skips lines."""
    rest = [line.rstrip() for line in source.splitlines()]
    pieces = re.split(r"^\s*(?:\.\.\.|…|# \.\.\.)\s*$", excerpt, flags=re.M)
    for piece in pieces:
        wanted = [line.rstrip() for line in piece.strip("\n").splitlines()]
        if not wanted:
            continue
        indents = {
            len(have) - len(have.lstrip()) - (len(want) - len(want.lstrip()))
            for want in wanted[:1]
            for have in rest
            if have.strip() == want.strip()
        }
        for start in range(len(rest) - len(wanted) + 1):
            if any(
                all(have == (" " * n + want if want else "") for have, want in zip(rest[start:], wanted))
                for n in indents
                if n >= 0
            ):
                rest = rest[start + len(wanted) :]
                break
        else:
            return False
    return True


def appear_in_order(wanted: str, output: str) -> str | None:
    """The first line of `wanted` that `output` lacks (in this order, trailing blanks aside), or None."""
    lines = iter(line.rstrip() for line in output.splitlines())
    for line in wanted.splitlines():
        line = line.rstrip()
        if line and line.strip() not in ("…", "...") and not any(line == have for have in lines):
            return line
    return None


def anchors(page: Path) -> set[str]:
    """GitHub's heading anchors."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", h.replace("`", "").lower()).strip().replace(" ", "-") for h in headings}
