"""README and lessons say what the code does: numbers, excerpts, outputs, commands, links. New pages are found alone."""

from __future__ import annotations

import common

import ast
import importlib
import itertools
import re
import subprocess
import sys

import pytest

import learn.cli
from engine import arguments, registry
from engine.serving.cli import add_serve_command
from engine.serving.proxy import add_proxy_command
from lab import cli, figures, make_model, predict_command, replay
from lab.bench import add_bench_commands
from support import documents
from support.documents import LESSONS, PAGES, TOLD
from support.scripts import output_of

sys.path.insert(0, str(common.ROOT / "lessons"))
import graph

LESSON_PAGES = [page for page in PAGES if documents.script_of(page)]
by_name = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
by_lesson = pytest.mark.parametrize("page", LESSON_PAGES, ids=lambda page: page.name)


def test_every_lesson_has_its_page_and_its_tests():
    for script in LESSONS:
        assert (common.ROOT / "lessons" / f"{script.stem}.md").is_file()
        if script.parent == common.HERE:
            assert (common.ROOT / "tests" / "lessons" / f"test_{script.stem}.py").is_file()


@by_name
def test_every_marker_is_understood(page):
    """A marker with a typo would check nothing."""
    text = page.read_text()
    understood = len(documents.quotes(page)) + sum(block.kind is not None for block in documents.blocks(page))
    understood += len(re.findall(r"<!-- fmt: ", text)) + 2 * len(documents.STEPS.findall(text))
    assert len(re.findall(r"<!--", text)) == understood


@by_lesson
def test_a_lesson_quotes_its_numbers(page):
    assert len(documents.quotes(page)) >= 12


@by_name
def test_excerpts_are_literal(page):
    script = documents.script_of(page)
    for block in documents.blocks(page):
        if block.language in ("python", "py"):
            assert block.kind in ("code", "sketch"), f"{page.name}:{block.line}: a python block without a marker"
        if block.kind == "code":
            path, _, symbol = block.argument.rpartition(":")
            known = documents.symbols(common.ROOT / path if path else script)
            assert symbol in known, f"{page.name}:{block.line}: there is no {symbol}"
            assert documents.is_excerpt(block.body, known[symbol]), (
                f"{page.name}:{block.line}: not in {symbol} (any more)"
            )


def marks_of(page):
    """As in test_scripts.py, whose run of the story this reads."""
    script = documents.script_of(page)
    return [] if script in TOLD else pytest.mark.slow


@pytest.mark.parametrize("page", [
    pytest.param(page, marks=marks_of(page), id=page.name)
    for page in LESSON_PAGES
])  # fmt: skip
def test_quoted_output(page):
    check_output(page, with_flags=False)


@pytest.mark.slow
@by_lesson
def test_quoted_output_with_flags(page):
    check_output(page, with_flags=True)


def check_output(page, with_flags):
    script = documents.script_of(page)
    for block in documents.blocks(page):
        if block.kind == "output" and bool(block.argument) == with_flags:
            missing = documents.appear_in_order(block.body, output_of(script.stem, *block.argument.split()))
            assert missing is None, f"{page.name}:{block.line}: the script does not print (in this order) {missing!r}"


@by_lesson
def test_widget_slot_shows_the_default(page):
    lesson = cli.numbers(page.stem)
    expected = lesson.describe(lesson.simulate(lesson.WIDGET_DEFAULT))
    (slot,) = [block for block in documents.blocks(page) if block.kind == "widget"]
    assert slot.body.rstrip() == expected.rstrip()


@by_name
def test_commands_are_accepted(page):
    for script, words in documents.commands(page):
        assert script.is_file(), f"{page.name}: {script.name} does not exist"
        if script == common.HERE / "__main__.py" and words[0] == "replay":
            replay.build_parser().parse_args(words[1:])
        elif script == common.HERE / "__main__.py" and words[0] == "learn":
            learn.cli.build_parser().parse_args(words[1:])
        elif script == common.HERE / "__main__.py" and words[0] == "make-model":
            make_model.build_parser().parse_args(words[1:])
        elif script == common.HERE / "__main__.py" and words[0] == "predict":
            fits = words[1] == "fit"
            (predict_command.fit_parser() if fits else predict_command.predict_parser()).parse_args(words[1 + fits :])
        elif script == common.HERE / "__main__.py":
            package_parser().parse_args(words)
        elif script.parent.name == "lab":
            importlib.import_module(f"lab.{script.stem}").build_parser().parse_args(words)
        elif script not in documents.LESSONS:  # lessons/build.py, tests/refresh.py: they have flags only
            assert set(words) <= set(re.findall(r"--\w+", script.read_text())), f"{page.name}: {words}"
        elif "-h" not in words and "--help" not in words:
            registry.lesson(script.stem).build_parser().parse_args(words)  # a refusal exits, and names the flag


def package_parser():
    """What `python -m vllm` understands of what pages show."""
    parser = arguments.Parser()
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (add_serve_command, add_proxy_command, add_bench_commands):
        add(commands)
    return parser


@by_name
def test_links_resolve(page):
    for match in documents.LINK.finditer(page.read_text()):
        target = match["target"] or match["image"]
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in documents.anchors(file), f"{page.name}: {target}"


@by_name
def test_symbols_of_our_own_resolve(page):
    for match in documents.SYMBOL.finditer(page.read_text()):
        path = common.ROOT / match["file"]
        assert path.exists(), f"{page.name}: {match[0]}"
        if match["symbol"]:
            assert match["symbol"] in documents.symbols(path), f"{page.name}: {match[0]}"


@by_lesson
def test_head(page):
    """Under the title: which script, and the command that runs it with no argument; then the question."""
    head = page.read_text().partition("\n## ")[0]
    script = documents.script_of(page)
    path = script.relative_to(common.ROOT).as_posix()
    start = f"-m vllm.tours.{script.stem}" if script.parent.name == "tours" else path
    assert f"\nScript: [`{path}`](../{path})" in head
    assert f"```bash\nuv run python {start}\n" in head


SECTIONS = (
    "The question, and one number", "A bet", "The widget", "The mechanism", "The code, from top to bottom",
    "The arithmetic", "What we measured", "How to break it", "Misconceptions", "Where it lives in vLLM today",
    "Exercises", "What to read",
)  # fmt: skip


@by_lesson
def test_sections_and_their_order(page):
    """DESIGN's sections, all of them, in its order, and no others."""
    titles = re.findall(r"^## (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), flags=re.M)
    assert [title.removesuffix(", and what others report") for title in titles] == list(SECTIONS)


@by_lesson
def test_length(page):
    """One sitting; a figure, and an answer that is folded until the reader has decided.

    Code, comments, the generated list of steps and the strokes of tables are no words.
    """
    text = re.sub(r"<!--.*?-->|```.*?```", "", documents.STEPS.sub("", page.read_text()), flags=re.S)
    words = sum(re.search(r"\w", word) is not None for word in text.split())
    assert 1500 <= words <= 2600
    bet = text.partition("\n## A bet\n")[2].partition("\n## ")[0]
    assert "<details>" in bet and "figures/" in text


CHECK = re.compile(
    r"Check:\s+`(?P<call>[^`]*\b(?:lesson|page)\.[^`]+)`\s+is\s+(?:`(?P<literal>[^`]+)`|(?P<number>[\d,]+(?:\.\d+)?))"
)


def python_shell(page) -> dict[str, object]:
    """The shell that lessons/README tells the reader to open, with this page's script."""
    readme = (common.ROOT / "lessons" / "README.md").read_text()
    (setup,) = re.findall(r"^cd vllm && uv run python -i -c '(.+)'$", readme, flags=re.M)
    names: dict[str, object] = {}
    setup = setup.replace("04_continuous_batching", page.stem)
    exec(setup, names)
    return names


def agrees(found: object, check: re.Match[str]) -> bool:
    """The call's result is the literal, or rounded to the decimals shown the number, that the page puts beside it."""
    if check["literal"]:
        return found == eval(check["literal"])
    shown = check["number"].replace(",", "")
    return abs(float(shown) - found) <= 0.5 * 10 ** -len(shown.partition(".")[2]) * (1 + 1e-9)


@by_lesson
def test_checks_of_the_exercises(page):
    """A `Check:` names a call of the lesson and its result, or a test that is there."""
    exercises = page.read_text().partition("\n## Exercises\n")[2]
    checks, tests = list(CHECK.finditer(exercises)), re.findall(r"Check:\s+`(\w+)` in `(tests/[\w/]+\.py)`", exercises)
    assert len(checks) + len(tests) == page.read_text().count("Check:")
    for test, file in tests:
        assert test in documents.symbols(common.ROOT / file)
    for check in checks:
        found = eval(check["call"], python_shell(page))
        assert agrees(found, check), f"{page.name}: {check['call']} is {found!r}"


@by_lesson
def test_a_page_lists_its_steps(page):
    """`python tests/refresh.py` writes the list."""
    found = documents.STEPS.findall(page.read_text())
    assert found == ([documents.steps_of(page)] if documents.steps_of(page) else [])


def test_figures_belong_to_a_lesson():
    """What is in them is compared where the scripts run (`test_scripts.py`)."""
    prefixes = {script.stem.split("_")[0] for script in LESSONS}
    assert {path.stem.split("_")[0] for path in figures.FIGURES.iterdir()} == prefixes


def test_readme_lists_every_lesson_and_two_commands():
    text = (common.ROOT / "README.md").read_text()
    for script in LESSONS:
        assert script.relative_to(common.ROOT).as_posix() in text and f"lessons/{script.stem}.md" in text
    commands = [
        line
        for b in documents.blocks(common.ROOT / "README.md")
        if b.language == "bash"
        for line in b.body.splitlines()
    ]
    assert [c.split("#")[0].strip() for c in commands[:2]] == ["uv run python vllm/01_kv_cache.py", "uv run pytest"]


def test_readers_learn_where_the_widgets_live():
    """Both READMEs name the command that shows them, under the heading where a reader looks for it."""
    for page, heading in (("README.md", "Lessons"), ("lessons/README.md", "The shape of a lesson")):
        text = (common.ROOT / page).read_text()
        assert "uv run python lessons/build.py --open" in text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    layout = (common.ROOT / "README.md").read_text().partition("\n## Layout\n")[2]
    assert "widgets/" in layout and "build.py" in layout


def test_the_house_is_drawn_from_the_imports():
    """README's graph is what `lessons/graph.py` draws, its arrows go down, and all lessons and rooms are in it."""
    (drawn,) = [b.body for b in documents.blocks(common.ROOT / "README.md") if b.language == "mermaid"]
    assert drawn.rstrip() == graph.draw(), "uv run python lessons/graph.py"
    order = ["learn", "lessons", "tours", "lab", *itertools.chain(*graph.layers()), "common"]
    beside = [{"lessons", "tours"}, *map(set, graph.layers())]
    for a, b in graph.imports():
        assert order.index(a) < order.index(b) or any({a, b} <= rooms for rooms in beside), f"{a} --> {b}"
    assert [f"L{path.stem[:2]}" for path in LESSONS if path.parent == common.HERE] == re.findall(r"(L\d\d)\[", drawn)


def test_the_graph_leaves_out_what_follows():
    arrows = {("A", "B"), ("B", "C"), ("A", "C"), ("C", "D")}
    assert graph.implied(arrows) == {("A", "C")}
    tree = ast.parse("import a\nif TYPE_CHECKING:\n    import b\ndef f():\n    import c")
    found = [node.names[0].name for node in graph.at_run_time(tree) if isinstance(node, ast.Import)]
    assert found == ["a", "c"]


def test_whom_to_read_before_is_a_lesson():
    rows = re.findall(r"^\| (\d\d\w?) \| .* \| ([\w, ]+|–) \|$", (common.ROOT / "README.md").read_text(), flags=re.M)
    numbers = [number for number, _ in rows]
    assert numbers == [script.stem.split("_")[0] for script in LESSONS]
    for number, earlier in rows:
        assert earlier == "–" or all(one in numbers and one < number for one in earlier.split(", ")), number


def test_no_lesson_loads_another():
    """A script is loaded by name in the registry, and by tests and numbers; nowhere else."""
    found = {path.stem for path in common.HERE.rglob("*.py") if re.search(r"common\.lesson\(\"\w", path.read_text())}
    assert not found


# --- The checks can fail --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value", "agrees"),
    [
        ("131,072<!-- fact: a -->", 131072, True),
        ("131,073<!-- fact: a -->", 131072, False),
        ("**0.38** of it<!-- fact: a -->", 0.3849, True),
        ("0.38<!-- fact: a -->", 0.3861, False),
        ("96 %<!-- fact: a *100 -->", 0.962, True),
        ("−4.5<!-- fact: a -->", -4.52, True),
        ("2.7 GB<!-- fact: a /1e9 -->", 2.68e9, True),
        ("268 MB<!-- cpu: a.0.b -->", 268, True),
    ],
)
def test_numbers_are_compared_to_the_decimals_shown(tmp_path, text, value, agrees):
    page = tmp_path / "01_x.md"
    page.write_text(f"before {text} after")
    (quote,) = documents.quotes(page)
    assert quote.agrees_with(value) == agrees


@pytest.mark.parametrize(
    ("text", "found", "agree"),
    [
        ("Check: `lesson.f(1)` is 3.85.", 3.8496, True),
        ("Check: `lesson.f(1)` is 3.84.", 3.8496, False),
        ("Check:\n`[lesson.f(n) for n in (1, 2)]` is `[1, 2]`.", [1, 2], True),
        ("Check: `lesson.f(1)` is `[1]`", [1, 2], False),
        ("Check: `lesson.f(1)` is 16,128.", 16128, True),
    ],
)
def test_a_check_with_another_result_is_found(text, found, agree):
    assert agrees(found, CHECK.search(text)) == agree


def test_measurements_are_written_in_the_style_of_the_text(tmp_path):
    page = tmp_path / "01_x.md"
    text = "{} ms<!-- cpu: a -->, {}<!-- cpu: a /1000 -->, {} %<!-- cpu@02_y: b *100 -->, "
    text += "5<!-- fact: a -->, {}<!-- h200: c -->"
    page.write_text(text.format("999", "0.99", "+7.5", "−3.0"))
    results = {("01_x", "cpu"): {"a": 12345.6}, ("02_y", "cpu"): {"b": 0.0751}, ("01_x", "h200"): {"c": -2.04}}
    again = documents.measured_again(page, lambda lesson, machine: results[lesson, machine])
    assert again == text.format("12,346", "12.35", "+7.5", "−2.0")
    page.write_text(again)
    assert documents.measured_again(page, lambda lesson, machine: results[lesson, machine]) == again
    assert all(
        quote.agrees_with(documents.lookup(results[quote.lesson, quote.source], quote.path))
        for quote in documents.quotes(page)
        if quote.source != "fact"
    )


def test_excerpts_are_compared_line_by_line():
    source = "def f(x):\n    # why\n    y = x\n\n    if y:\n        return 1\n    return 2"
    assert documents.is_excerpt("# why\ny = x\n\nif y:\n    return 1", source)
    assert documents.is_excerpt("def f(x):\n    ...\n    return 2", source)
    assert not documents.is_excerpt("y = x\nreturn 2", source)
    assert not documents.is_excerpt("if y:\nreturn 1", source)
    assert not documents.is_excerpt("return 2\n...\ny = x", source)
    assert documents.appear_in_order("a\n…\nc", "a\nb\nc") is None
    assert documents.appear_in_order("c\na", "a\nb\nc") == "a"


def test_no_machine_specific_text_is_committed():
    """No lock file, no path of somebody's machine, no weights."""
    done = subprocess.run(["git", "ls-files"], cwd=common.ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    files = [common.ROOT / name for name in done.stdout.splitlines() if (common.ROOT / name).is_file()]
    assert not [f for f in files if f.name in ("uv.lock", "package-lock.json")]
    assert not [f for f in files if f.stat().st_size > 20e6]
    home = re.compile(r"(?<![\w.])/(?:home|Users|root)/\w+")
    assert not [f for f in files if f.suffix in (".py", ".md", ".json", ".toml") and home.search(f.read_text())]
