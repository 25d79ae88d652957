"""README's picture of the house, drawn from the imports.

    uv run python lessons/graph.py    # writes it between README's markers

Layers are those that `lint-imports` holds (`pyproject.toml`); an arrow is an import, left out where others imply it; a
broken line is a part that the engine loads from a lesson by name (`vllm/engine/registry.py`).
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VLLM = ROOT / "vllm"
BELOW = "common"
ABOVE = ("llm", "llm_engine", "engine_args", "front_end", "assemble")  # files that put an engine together
LABELS = {
    "lessons": "the lessons",
    "tours": "tours: stories over the engine's files",
    "learn": "learn: parts to write oneself, graded",
    "lab": "lab: what is measured and simulated",
    "llm": "LLM, EngineArgs, front end",
    "seams": "seams, registry, requests, limits",
    "common": "common: device, Triton, checks",
}


def layers() -> list[list[str]]:
    """The engine's rooms, top to bottom. Files outside a folder are one room where they stand."""
    (contract,) = [
        contract
        for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
        if contract["containers"] == ["engine"]
    ]
    found: list[list[str]] = []
    for layer in contract["layers"]:
        rooms = list(dict.fromkeys(gathered(name) for name in re.split(r" [|:] ", layer)))
        if rooms != found[-1:] and rooms not in found:
            found.append(rooms)
    return found


def gathered(name: str) -> str:
    """A folder's name, or of a file of the engine's the room that it is drawn in."""
    if (VLLM / "engine" / name).is_dir():
        return name
    return "llm" if name in ABOVE else "seams"


def room_of(module: str) -> str | None:
    """The room of a module by its dotted name; None: not ours."""
    first, *rest = module.split(".")
    if first == "engine":
        return gathered(rest[0]) if rest else None
    if first == "common":
        return BELOW
    return first if first in ("lab", "learn", "tours") else None


def imports() -> set[tuple[str, str]]:
    """(a, b): a file of room a imports one of room b."""
    found = set()
    for path in sorted(VLLM.rglob("*.py")):
        parts = path.relative_to(VLLM).with_suffix("").parts
        room = "lessons" if parts[0][0].isdigit() else room_of(".".join(parts))
        if room is None or room == BELOW:
            continue
        for node in at_run_time(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                whole = node.module == "engine"  # `from engine import seams`
                names = [f"engine.{alias.name}" for alias in node.names] if whole else [node.module]
            found |= {(room, other) for name in names if (other := room_of(name)) not in (None, room)}
    return found


def at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from at_run_time(node)


def implied(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Arrows that a longer way says anyway."""
    after: dict[str, set[str]] = {}
    for a, b in arrows:
        after.setdefault(a, set()).add(b)

    def reachable(a: str, without: tuple[str, str]) -> set[str]:
        seen, todo = set(), [a]
        while todo:
            x = todo.pop()
            for y in after.get(x, ()):
                if (x, y) != without and y not in seen:
                    seen.add(y)
                    todo.append(y)
        return seen

    return {(a, b) for a, b in arrows if b in reachable(a, (a, b))}


def filled() -> list[tuple[str, str]]:
    """(seam, number of the lesson that fills it), as the registry says."""
    text = (VLLM / "engine" / "registry.py").read_text()
    return re.findall(r'^    "([\w.]+)": "(\d\d)_\w+:\w+",$', text, flags=re.M)


def titles() -> dict[str, str]:
    """The twelve lessons' titles by number, as README's table has them."""
    return dict(re.findall(r"^\| (\d\d) \| \[([^\]]+)\]", (ROOT / "README.md").read_text(), flags=re.M))


def draw() -> str:
    """The graph in mermaid's language."""
    lines = ["graph TD", f"  subgraph lessons [{LABELS['lessons']}]"]
    lines += [f'    L{number}["{number} {title}"]' for number, title in titles().items()]
    lines += [
        "  end",
        *(f'  {room}["{LABELS[room]}"]' for room in ("learn", "tours", "lab")),
        "  subgraph engine [the engine]",
    ]
    for i, rooms in enumerate(layers()):
        lines += [
            f"    subgraph layer{i} [ ]",
            *(f'      {room}["{LABELS.get(room, room)}"]' for room in rooms),
            "    end",
        ]
    lines += ["  end", f'  {BELOW}["{LABELS[BELOW]}"]']
    arrows = imports()
    lines += [f"  {a} --> {b}" for a, b in sorted(arrows - implied(arrows))]
    lines += [f"  seams -. {seam} .-> L{number}" for seam, number in filled()]
    return "\n".join(lines)


def main() -> None:
    """Write the graph into README."""
    readme = ROOT / "README.md"
    text, times = re.subn(r"(?<=```mermaid\n).*?(?=\n```)", lambda _: draw(), readme.read_text(), flags=re.S)
    if times != 1:
        sys.exit("README.md: expected one mermaid block")
    readme.write_text(text)


if __name__ == "__main__":
    main()
