"""The names of all flags of vLLM's `serve`, from its source, for the table of those that we have not.

    pip download vllm==0.33.0 --no-deps --dest D && unzip D/*.whl 'vllm/*.py' -d D
    python tests/record_vllm_flags.py D/vllm > tests/golden/vllm_serve_flags.txt

Its parser would have to import all of vLLM; the calls of `add_argument` and the fields of `FrontendArgs` are read here.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path


def added(path: Path) -> list[list[str]]:
    """The names in each call of `add_argument` that has any."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    calls = [node for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"]
    named = [[x.value for x in node.args if isinstance(x, ast.Constant) and x.value[:1] == "-"] for node in calls]
    return [names for names in named if names]


def of_fields(path: Path) -> list[list[str]]:
    """A flag for each field of the classes whose fields become flags."""
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    fields = [x for node in classes if node.name.endswith("FrontendArgs") for x in node.body]
    return [[f"--{x.target.id.replace('_', '-')}"] for x in fields if isinstance(x, ast.AnnAssign)]


def main() -> None:
    source = Path(sys.argv[1])
    frontend = source / "entrypoints" / "common" / "cli_args.py"
    found = added(source / "engine" / "arg_utils.py") + added(frontend) + of_fields(frontend)
    version = re.search(r"version = '([^']+)'", (source / "_version.py").read_text())
    print(
        f"# Flags of `vllm serve` {version[1] if version else ''}, a line for each; made by tests/record_vllm_flags.py."
    )
    for names in sorted(found, key=lambda names: sorted(names)[0]):
        print(*sorted(names, key=lambda name: (not name.startswith("--"), name)))


if __name__ == "__main__":
    main()
