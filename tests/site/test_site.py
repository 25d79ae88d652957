"""The site: built quickly, complete in itself, and usable by keyboard, on a phone, and in the dark."""

from __future__ import annotations

import common

import ast
import functools
import html
import http.server
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from lab import cli
from support import scripts

spec = importlib.util.spec_from_file_location("build", common.ROOT / "lessons" / "build.py")
build = importlib.util.module_from_spec(spec)
sys.modules["build"] = build
spec.loader.exec_module(build)

WIDGETS = [page.source.stem for page in build.find_pages() if page.number and build.widget_files(page.source.stem)]
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(not NODE, reason="Node is not installed")


build_seconds = {}


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    start = time.process_time()  # of this process: others may be busy
    build.build(out)
    build_seconds["once"] = time.process_time() - start
    return out


@functools.cache
def read(path: Path) -> str:
    return path.read_text()


def pages(site: Path) -> list[Path]:
    return sorted(site.rglob("*.html"))


# --- What is built ----------------------------------------------------------------------------------------------------


def test_building_takes_less_than_two_seconds(site):
    assert scripts.within(build_seconds["once"], 2)


def test_every_lesson_and_every_script_has_a_page(site):
    for page in (common.ROOT / "lessons").glob("[01]*.md"):
        assert (site / f"{page.stem}.html").is_file()
    for script in common.HERE.glob("*.py"):
        assert (site / "code" / script.name).with_suffix(".html").is_file()
    assert {"index.html", "reading.html", "glossary.html"} <= {path.name for path in site.iterdir()}


def test_every_internal_link_resolves(site):
    ids = {page: set(re.findall(r'\bid="?([^"\s>]+)', read(page))) for page in pages(site)}
    wrong = []
    for page in pages(site):
        for target in set(re.findall(r'\b(?:href|src)="?([^"\s>]+)', read(page))):
            if re.match(r"https?:|mailto:|data:", target):
                continue
            path, _, anchor = html.unescape(target).partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.is_file() or (anchor and anchor not in ids.get(file, ())):
                wrong.append(f"{page.name}: {target}")
    assert not wrong


def test_no_link_is_inside_another(site):
    for page in pages(site):
        nested = re.search(r"<a\b[^>]*>(?:(?!</a>).)*<a\b[^>]*>", read(page), re.DOTALL)
        assert not nested, f"{page.name}: {nested[0][-200:]}"


def test_nothing_is_fetched_from_elsewhere(site):
    for page in pages(site):
        for tag in re.findall(r"<(?!a\b)[a-z]+ [^>]*\b(?:src|href|srcset)=[^>]*>", read(page)):
            assert not re.search(r"""=["']?(?:https?:)?//""", tag), f"{page.name}: {tag}"
    for file in site.glob("assets/*.[cj]s*"):
        if file.name != "search.js":  # text
            assert not re.search(r"https?://(?!www\.w3\.org/)|@import|url\((?!#)|\bfetch\(|XMLHttp", read(file)), (
                file.name
            )


def test_markers_vanish_and_text_stays(site):
    for page in pages(site):
        body = read(page)
        if page.parent == site:
            assert "&lt;!--" not in body and "<!-- " not in body and "@@" not in body, page.name
    lesson = read(site / "02_paged_attention.html")
    assert "<strong>96.3\u00a0%</strong>" in lesson and "97.4\u00a0% for paging" in lesson
    assert re.search(r'<figcaption><a href="code/02_paged_attention.html#L\d+"><code>\w+', lesson)
    assert "<math" in read(site / "09_gqa.html") and "$$" not in read(site / "09_gqa.html")


def test_a_widget_is_complete_without_scripts(site):
    """Its text stands in the page; the widget replaces it."""
    for page in (common.ROOT / "lessons").glob("[01]*.md"):
        slot = re.search(r"<!-- widget -->\n```text\n(.*?)\n```", page.read_text(), re.S)
        built = read(site / f"{page.stem}.html")
        if slot:
            assert html.escape(slot[1], quote=False) in built
        assert (f'data-widget="{page.stem}"' in built) == (page.stem in WIDGETS)
        if page.stem in WIDGETS:
            assert f'src="assets/{page.stem}.js"' in built and 'src="assets/kit.js"' in built


def test_the_front_page_has_map_and_ranking(site):
    front = read(site / "index.html")
    for page in build.find_pages():
        if page.number:
            assert re.search(f'href="?{page.url}', front) and html.escape(page.title) in front
            assert page.question or page.source.stem not in (common.ROOT / "README.md").read_text()
    assert "CUDA graphs" in front and front.count("<path class=") >= 15


def test_every_page_says_what_it_is_about(site):
    meta = re.compile(r'<meta name="description" content="([^"]{15,200})">')
    about = {page: meta.findall(read(page)) for page in pages(site)}
    assert all(len(found) == 1 for found in about.values()), [page.name for page, found in about.items() if not found]
    assert about[site / "04_continuous_batching.html"] == ["Which requests take part in the next step?"]
    assert len({found[0] for found in about.values()}) == len(about)


def test_terms_units_and_maps_have_links(site):
    """A term of the glossary at its first use on a page, vLLM's files in the map; a number stays with its unit."""
    lesson = read(site / "02_paged_attention.html")
    terms = re.findall(r'<a class=term href="glossary.html#(term-[\w-]+)"', lesson)
    assert len(terms) == len(set(terms)) > 10 and "term-block-table" in terms
    assert all(f'id="{term}"' in read(site / "glossary.html") for term in terms)
    assert "class=term" not in read(site / "glossary.html")
    assert f'href="{build.VLLM}v1/core/block_pool.py"' in lesson
    assert "v1/<wbr>core/<wbr>block_<wbr>pool.py" in lesson


def test_search_finds_sections_and_symbols(site):
    index = json.loads(read(site / "assets" / "search.js").partition("= ")[2])
    names = {(row[1], row[2]) for row in index}
    assert any(url.startswith("04_continuous_batching.html#") for url, _ in names)
    assert ("02_paged_attention.html#the-mechanism", "The mechanism") in names
    assert any(name == "BlockPool" and url.startswith("code/02_paged_attention.html#L") for url, name in names)
    assert not any("<code" in row[3] or "<a " in row[3] for row in index)


def test_a_link_out_of_the_site_is_an_error(tmp_path, monkeypatch):
    site = build.Site(tmp_path)
    with pytest.raises(build.BuildError, match=r"nowhere\.md"):
        site.render(site.pages[2], "[x](nowhere.md)")
    monkeypatch.setattr(build, "find_pages", lambda: [])
    done = subprocess.run(
        [sys.executable, "lessons/build.py", "--port", "x"], cwd=common.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_githubs_dialect(tmp_path):
    site = build.Site(tmp_path)
    text = (
        "> [!NOTE]\n> careful\n\n- [x] done\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n"
        "~~old~~ $x_1$ lesson 04, lessons 99 (04b) (11)\n\n"
        "# A `b` c\n\n# A `b` c\n\n131,072<!-- fact: a.b *100 --> bytes, `simulate()` and `no_such_name`\n"
    )
    page = site.page_of_number["02"]
    page.headings.clear()
    shown = site.render(page, text)
    assert "markdown-alert" in shown and 'type="checkbox"' in shown and "<table>" in shown and "<s>old</s>" in shown
    assert "<math" in shown and '<a href="04_continuous_batching.html">lesson 04</a>, lessons 99 (<a' in shown
    assert '(<a href="04b_offline_engine.html">04b</a>) (11)' in shown
    assert [anchor for _, anchor, _ in page.headings] == ["a-b-c", "a-b-c-1"]
    rows = "| a sentence of several words | a number of several words |\n| 1 | 2 |\n"
    wide = site.render(page, "| a | b |\n|---|--:|\n" + rows)
    assert '<td class="wordy">a sentence' in wide and wide.count("wordy") == 1
    assert "131,072 bytes" in shown and re.search(
        r'href="code/numbers.02_paged_attention.html#L\d+"><code>simulate', shown
    )
    assert "<code>no_such_name</code>" in shown and shown.count("class=symbol") == 1


# --- Code -------------------------------------------------------------------------------------------------------------


def test_colours_do_not_change_the_code():
    for script in common.HERE.glob("*.py"):
        source = script.read_text()
        painted = build.python_html(source)
        assert html.unescape(re.sub(r"</?(?:i|b|dfn)(?: class=\w)?>", "", painted)) == source, script.name
        for line in painted.split("\n"):
            assert line.count("<i ") == line.count("</i>") and line.count("<b>") == line.count("</b>")


def test_strings_comments_and_names_are_told_apart():
    painted = build.python_html("def f(x):  # why\n    return \"a # b\" + '''c\nd'''\n")
    assert painted.startswith("<b>def</b> <dfn>f</dfn>(x):  <i class=c># why</i>\n")
    assert '<i class=s>"a # b"</i>' in painted and "<i class=s>'''c</i>\n<i class=s>d'''</i>" in painted


def test_definitions_are_where_python_says():
    for script in sorted(common.HERE.glob("*.py"))[::3]:
        wanted = {}
        for node in ast.parse(script.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                wanted.setdefault(node.name, node.lineno)
                for method in node.body if isinstance(node, ast.ClassDef) else []:
                    if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                        wanted.setdefault(f"{node.name}.{method.name}", method.lineno)
        known = build.definitions(script)
        assert {name: known.get(name) for name in wanted} == wanted, script.name


def test_long_names_fold_between_words():
    names = ("PrefixCachingKVCacheManager", "get_computed_blocks", "KEY", "ask")
    folded = ("Prefix|Caching|KVCache|Manager", "get_|computed_|blocks", "KEY", "ask")
    assert tuple(build.foldable(name).replace("<wbr>", "|") for name in names) == folded


# --- Widgets ----------------------------------------------------------------------------------------------------------


def modules() -> list[Path]:
    return sorted(build.WIDGETS.rglob("*.mjs"))


def test_modules_have_the_form_that_the_bundler_reads():
    for path in modules():
        source = path.read_text()
        assert len(re.findall(r"^\s*import\b", source, flags=re.M)) == len(build.IMPORT.findall(source)), path.name
        assert len(re.findall(r"^\s*export\b", source, flags=re.M)) == len(build.EXPORT.findall(source)), path.name
        for _, other in build.IMPORT.findall(source):
            assert (path.parent / other).is_file(), f"{path.name}: {other}"


def test_views_draw_and_do_nothing_else():
    for path in build.WIDGETS.glob("views/*.mjs"):
        code = re.sub(r"//.*", "", path.read_text())
        assert "import " not in code, f"{path.name}: a view gets what it needs"
        assert not re.search(r"\b(Math\.random|Date|document|window|performance|setTimeout|setInterval)\b", code), (
            path.name
        )


@needs_node
def test_the_bundle_runs_as_a_plain_script(site):
    """Modules in order, none of their names leaked, the trace as the module itself computes it."""
    name = WIDGETS[0]
    code = f"""
      const vm = require("node:vm"), fs = require("node:fs"), context = vm.createContext({{}});
      const run = (code) => vm.runInContext(code, context);
      for (const file of ["{name}.js", "kit.js"]) run(fs.readFileSync("{site}/assets/" + file, "utf8"));
      run(`var spec = modules["controls/{name}.json"], sim = modules["sims/{name}.mjs"];`);
      console.log(run(`JSON.stringify([
        Object.keys(globalThis), sim.describe(sim.simulate({{...spec.fixed, ...spec.default}}))])`));"""
    done = subprocess.run([NODE, "-e", code], capture_output=True, text=True, check=True)
    names, text = json.loads(done.stdout)
    page = cli.numbers(name)
    assert names == ["modules", "spec", "sim"] and text == page.describe(page.simulate(page.WIDGET_DEFAULT))


def draw_views(*flags: str) -> None:
    done = subprocess.run(
        [NODE, "tests/site/widget_views.mjs", *flags, *WIDGETS], cwd=common.ROOT, capture_output=True, text=True
    )
    *problems, count = done.stdout.splitlines() or [done.stderr]
    assert done.returncode == 0 and not problems, "\n".join([*problems[:20], done.stderr])
    assert int(count.removeprefix("drawn ")) >= 4 * len(WIDGETS)


@needs_node
def test_views_draw_the_default_and_what_breaks_it():
    draw_views("--few")


@needs_node
@pytest.mark.slow
def test_views_draw_every_preset_and_the_ends_of_every_control():
    draw_views()


# --- Colours ----------------------------------------------------------------------------------------------------------


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read(theme):
    """WCAG AA: 4.5 for text, 3 for what is drawn or has a border."""
    css = read(build.WIDGETS / "kit" / "site.css") + read(build.WIDGETS / "kit" / "kit.css")
    named = {m[1]: m.group(2 + theme) for m in re.finditer(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", css)}
    texts = ["ink", "soft", "accent", *(name for name in named if name.startswith("code-"))]
    for text in texts:
        for ground in ("paper", "raised"):
            assert contrast(named[text], named[ground]) >= 4.5, (text, ground)
    for text in ("ink", "soft", "accent"):
        assert contrast(named[text], named["accent-wash"]) >= 4.5, text
    assert contrast(named["accent-ink"], named["accent"]) >= 4.5
    for m in re.finditer(r"(?:fill|color): light-dark\((#\w{6}), (#\w{6})\)", css):
        assert contrast(m.group(1 + theme), named["paper"]) >= 4.5, m[0]
    for drawn in ("strong-line", "blue", "green", "purple", "teal", "red", "grey"):
        assert contrast(named[drawn], named["paper"]) >= 3, drawn


# --- In a browser -----------------------------------------------------------------------------------------------------

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1300, "height": 900}


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium, started once."""
    if not CHROMIUM:
        pytest.skip("Chromium is not installed")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def window(browser):
    """One for all tests: another one is another process, which takes longer to start than all else that a test does."""
    page, troubles = browser.new_page(), []
    page.on("console", lambda m: troubles.append(f"{page.url}: {m.text}") if m.type == "error" else None)
    page.on("pageerror", lambda error: troubles.append(f"{page.url}: {error}"))
    page.on(
        "request",
        lambda r: (
            troubles.append(f"{page.url}: {r.url}") if not r.url.startswith(("file:", "data:", "about:")) else None
        ),
    )
    return page, troubles


@pytest.fixture
def open_page(window, site):
    """open_page("02_x.html#…", viewport, scheme) -> a page from disk; complains, in the end, of errors and requests."""
    page, troubles = window
    troubles.clear()

    def go(url: str, viewport: dict = DESK, scheme: str = "light"):
        page.goto("about:blank")  # or another section of the page that is open would load nothing
        page.set_viewport_size(viewport)
        page.emulate_media(color_scheme=scheme)
        page.goto(f"file://{site}/{url}")
        return page

    yield go
    page.evaluate("localStorage.clear()")
    assert not troubles


def state(page) -> dict:
    return json.loads(page.locator("#widget").get_attribute("data-state"))


def tab_to(page, name: str, most: int = 60) -> None:
    """Press Tab until the button called `name` has the focus."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == name:
            return
    raise AssertionError(f"{name} cannot be reached by keyboard")


def drive(page, name: str) -> None:
    """Break it by keyboard; a step back and forth; the URL brings the state back."""
    controls = json.loads((build.WIDGETS / "controls" / f"{name}.json").read_text())
    start = controls["fixed"] | controls["default"]
    assert state(page)["params"] == start
    page.locator("#widget h3").evaluate("node => { node.tabIndex = -1; node.focus(); }")
    tab_to(page, "Break it")
    page.keyboard.press("Enter")
    broken = state(page)
    assert broken["params"] == start | controls["presets"][-1]["params"]
    if broken["steps"] > 1:
        page.locator("#widget").get_by_label("To the last step").press("Enter")
        broken = state(page)
        page.locator("#widget").get_by_label("Step back").press("Enter")
        before = state(page)
        assert before["index"] == broken["steps"] - 2
        page.wait_for_function(f"location.hash.endsWith('at={before['index']}')")
        url = page.url
        page.locator("#widget").get_by_label("Step", exact=True).first.press("Enter")
        assert state(page) == broken
        page.goto("about:blank")
        page.goto(url)
        assert state(page) == before
    if "bet" in controls:
        page.locator("#widget .bet button").first.press("Enter")
        assert page.locator("#widget .bet button.right").count() == 1
        assert page.locator("#widget .bet [role=status]").inner_text()


LAYOUT = common.ROOT / "tests" / "site" / "site_layout.js"


def layout(page) -> list[str]:
    """What is wrong with how the widget is laid out: too wide, too small, text on text."""
    return page.evaluate(read(LAYOUT))


def test_a_widget_in_the_browser(open_page):
    page = open_page("02_paged_attention.html")
    drive(page, "02_paged_attention")
    page.set_viewport_size(PHONE)
    page.wait_for_timeout(200)
    assert not layout(page)
    page.locator("#widget").get_by_label("Step back").press("Enter")
    assert page.locator("#widget svg text.small").count() and not layout(page)


ROOM = """() => {
  const place = (name) => document.querySelector(`#widget ${name}`.trim()).getBoundingClientRect();
  const bar = document.querySelector(".bar").getBoundingClientRect().height;
  return { above: (place("").top + scrollY) / innerHeight, whole: place("").height / (innerHeight - bar),
           both: (place(".controls").bottom - place(".picture").top) / (innerHeight - bar) };
}"""
SMALL_DESK = {"width": 1280, "height": 720}
LOOK_AROUND = """async ([layout, room]) => {
  [layout, room] = [layout, room].map((code) => (0, eval)(code));
  const widget = document.querySelector("#widget"), slider = widget.querySelector(".stepper input"), seen = [];
  for (const button of widget.querySelectorAll(".presets button")) {
    button.focus();
    button.click();
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done))); // after observers of sizes
    seen.push([button.textContent, layout(), room()]);
    const last = Number(slider.max);
    for (const step of new Set(last ? [0, last, last >> 1] : [])) {
      slider.value = step;
      slider.dispatchEvent(new Event("input"));
      seen.push([`${button.textContent}, step ${step}`, layout(), room()]);
    }
  }
  return seen;
}"""


def cramped(room: dict, viewport: dict) -> list[str]:
    """DESIGN §8: the widget within two screens; all of it on one, and on a phone its picture with its controls."""
    if viewport["width"] < 480:
        return [f"picture and controls: {room['both']:.2f} screens"] * (room["both"] > 1)
    found = [f"begins {room['above']:.1f} screens down"] * (room["above"] > 2)
    return found + [f"{room['whole']:.2f} screens high"] * (room["whole"] > 1)


def test_the_outlier_can_be_dragged(open_page):
    """A drag in 05b's picture does what the slider does; a mouse that only passes by changes nothing."""
    page = open_page("05b_quantization.html")
    page.locator("#widget").scroll_into_view_if_needed()
    box = page.locator("#widget svg rect.drag").bounding_box()
    y, size = box["y"] + box["height"] / 2, lambda: state(page)["params"]["outlier"]
    page.mouse.move(box["x"] + box["width"] - 4, y)
    assert size() == 16
    page.mouse.down()
    assert size() == 64
    page.mouse.move(box["x"] + box["width"] / 2, y)
    assert size() == 32
    page.mouse.up()
    page.mouse.move(box["x"] + 2, y)
    assert size() == 32 and page.locator("#widget").get_by_label("Outlier times").input_value() == "5"


def test_a_change_keeps_the_step_and_what_changes_moves(open_page):
    """Two runs can be compared at one moment; a shape with a key glides, unless the reader wants no motion."""
    page = open_page("04_continuous_batching.html")
    for _ in range(3):
        page.locator("#widget").get_by_label("Step back").press("Enter")
    at = state(page)["index"]
    assert page.locator("#widget .presets button").nth(1).press("Enter") is None
    assert state(page)["index"] == min(at, state(page)["steps"] - 1)
    page.locator("#widget").get_by_label("To the last step").press("Enter")
    page.locator("#widget .presets button").first.press("Enter")
    assert state(page)["index"] == state(page)["steps"] - 1, "one that was shown to its end is shown to its end"
    back = page.locator("#widget").get_by_label("To the first step")
    back.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "To the first step", "keeps the focus"


def test_a_text_box_shows_what_the_simulation_gets(open_page):
    """ASCII; and an input method is left alone until its word is complete."""
    page = open_page("05_optimizations.html")
    box = page.get_by_label("First question")
    box.fill("ab")
    box.press("ArrowLeft")
    page.keyboard.insert_text("é寿司x")
    page.keyboard.insert_text("y")
    assert box.input_value() == state(page)["params"]["suffix_a"] == "axyb", "and the caret stays where one types"
    composing = "node => { node.value = 'a寿'; node.dispatchEvent(new InputEvent('input', { isComposing: true })); }"
    box.evaluate(composing)
    assert box.input_value() == "a寿" and state(page)["params"]["suffix_a"] == "a"
    box.evaluate("node => node.dispatchEvent(new CompositionEvent('compositionend'))")
    assert box.input_value() == state(page)["params"]["suffix_a"] == "a"


@pytest.mark.parametrize("name", [pytest.param("05_optimizations", marks=pytest.mark.slow), "06f_openai_api"])
def test_what_stands_under_the_picture_stays_there(open_page, name):
    """Lesson 05's picture grows by hundreds of pixels to the last step, and 06f's is tallest half way."""
    place = "node => node.getBoundingClientRect().top + scrollY"
    for viewport in (PHONE, DESK):
        page = open_page(f"{name}.html", viewport)
        text = page.locator("#widget .says")
        places = [text.evaluate(place)]
        page.locator("#widget").get_by_label("To the first step").press("Enter")
        while state(page)["index"] < state(page)["steps"] - 1:
            places.append(text.evaluate(place))
            page.locator("#widget").get_by_label("Step", exact=True).first.press("Enter")
        assert len(places) == state(page)["steps"] > 3 and max(places) - min(places) < 1, places


def test_the_bar_of_steps_stays_in_sight(open_page):
    """A step changes the top of a picture that is taller than the window, and one sees it."""
    low = {"width": 390, "height": 400}
    page = open_page("05_optimizations.html", low)
    page.locator("#widget .picture").evaluate("node => scrollTo(0, node.getBoundingClientRect().top + scrollY - 70)")
    bar, picture = (page.locator(f"#widget {name}").bounding_box() for name in (".stepper", ".picture"))
    assert 0 < picture["y"] < 100 and picture["y"] + picture["height"] > low["height"]
    assert bar["y"] + bar["height"] <= low["height"] + 1
    page.locator("#widget").get_by_label("Step back").click()
    assert page.locator("#widget .picture").bounding_box()["y"] == picture["y"]


def test_commands_are_folded_and_copied_without_comments(open_page):
    cut = "() => [...document.querySelectorAll('.bash pre')].filter((pre) => pre.scrollWidth > pre.clientWidth).length"
    for viewport in (PHONE, DESK):
        page = open_page("06c_scaling_out.html", viewport)
        assert page.locator(".bash pre").count() >= 3 and not page.evaluate(cut)
    page = open_page("01_kv_cache.html")
    commands = page.locator("figure.bash", has_text="# reserve")
    assert "uv run python vllm/01_kv_cache.py --slots 8192" in commands.inner_text()
    page.evaluate("navigator.clipboard.writeText = async (text) => { globalThis.copied = text; }")
    commands.get_by_role("button").click()
    copied = page.evaluate("globalThis.copied").split("\n")
    assert "uv run python vllm/01_kv_cache.py --slots 8192" in copied and not any("#" in line for line in copied)


def test_addresses_of_sections_and_nonsense_in_the_url(open_page):
    page = open_page("02_paged_attention.html#the-mechanism")
    page.wait_for_timeout(400)
    assert page.url.endswith("#the-mechanism")
    for nonsense in ("at=abc", "at=-3", "at=99999", "block_size=17&finish=x&at="):
        shown = state(open_page(f"02_paged_attention.html#widget?{nonsense}"))
        assert shown["index"] == (0 if nonsense == "at=-3" else shown["steps"] - 1), nonsense


def test_break_it_says_who_gets_nothing(open_page):
    page = open_page("10_chunked_prefill.html")
    page.get_by_role("button", name="Break it").click()
    assert "8 of the streams get no token" in state(page)["text"]
    assert "8 of 16" in page.locator("#widget .numbers").inner_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDGETS)
def test_every_widget_in_the_browser(open_page, name):
    """Driven by keyboard; then every preset, and of its run some steps: nothing lies on anything, and all has room."""
    drive(open_page(f"{name}.html"), name)
    found = []
    for viewport in (PHONE, SMALL_DESK):
        page = open_page(f"{name}.html", viewport, "dark")
        seen = page.evaluate(LOOK_AROUND, [read(LAYOUT), ROOM])
        assert len(seen) >= page.locator("#widget .presets button").count() > 2
        for where, wrong, room in seen:
            found += [f"{where}, {viewport['width']} px: {what}" for what in wrong + cramped(room, viewport)]
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_every_page_fits_its_window(open_page, site):
    for path in sorted(site.glob("*.html")):
        page = open_page(path.name, PHONE)
        small = "() => [...document.querySelectorAll('.figure img')].filter((i) => i.width && i.width < 700).length"
        assert not page.evaluate(small), f"{path.name}: a figure with letters too small to read"
        for width in (390, 1000, 1300, 1420):  # at the last one code is wider than text
            page.set_viewport_size(PHONE | {"width": width})
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, (path.name, width)
        broken = "() => [...document.images].filter((i) => i.complete && !i.naturalWidth).map((i) => i.src)"
        assert not page.evaluate(broken), path.name


@pytest.mark.slow
def test_search_theme_and_front_page(open_page):
    page = open_page("index.html", DESK, "light")
    page.keyboard.press("/")
    page.keyboard.type("BlockPool")
    page.wait_for_selector(".results a")
    assert any("code/02_paged_attention.html" in a.get_attribute("href") for a in page.locator(".results a").all())
    page.keyboard.press("Escape")
    assert page.locator(".results").is_hidden()
    wanted = {
        "swap": "11_preemption.html",
        "kv cache": "01_kv_cache.html",
        "paged atention": "02_paged_attention.html",
        "slot_mapping": "glossary.html#term-slot",
    }
    for typed, first in wanted.items():
        page.locator(".bar input").fill(typed)
        found = [a.get_attribute("href") for a in page.locator(".results a").all()]
        assert first in found[:2] and not found[0].startswith("code/"), typed
    page.keyboard.press("Escape")
    dark = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(dark)
    page.get_by_label("Dark or light").click()
    assert page.evaluate(dark) != light
    assert page.locator("#widget svg").count() >= 1


@pytest.mark.slow
def test_served_pages_work_as_well(browser, site):
    """Over HTTP, on the loopback address, as `--serve` does it."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "lessons/build.py", "--out", site / "served", "--serve", "--port", str(port)]
    server = subprocess.Popen(command, cwd=common.ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout.readline() and f"http://127.0.0.1:{port}/" in server.stdout.readline()
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}/04_continuous_batching.html")
        controls = json.loads((build.WIDGETS / "controls" / "04_continuous_batching.json").read_text())
        assert state(page)["index"] == controls.get("at", state(page)["steps"] - 1)
        page.close()
    finally:
        server.terminate()
        server.wait(10)


AXE = os.environ.get("AXE_CORE", "")


@pytest.mark.slow
@pytest.mark.skipif(
    not Path(AXE).is_file(), reason="AXE_CORE does not name axe-core's axe.min.js; contrast is checked above without it"
)
def test_axe_finds_nothing(open_page, site):
    whole = ["index.html", "code/__init__.html", "glossary.html", "02_paged_attention.html"]
    found = []
    for name, part in [*((name, "document") for name in whole), *((f"{name}.html", "'#widget'") for name in WIDGETS)]:
        page = open_page(name)
        page.evaluate(read(Path(AXE)))
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            # without `preload`, which would fetch the style sheets: from disk, a browser refuses that
            rules = "{runOnly: ['wcag2a', 'wcag2aa', 'best-practice'], preload: false}"
            result = page.evaluate(f"axe.run({part}, {rules})")
            for violation in result["violations"]:
                nodes = [node["html"][:120] for node in violation["nodes"][:2]]
                found.append(f"{name} ({scheme}): {violation['id']} {nodes}")
    assert not found, "\n".join(found)


def test_a_site_that_is_served_knows_what_has_passed(site, tmp_path, monkeypatch):
    """And one that is opened from disk asks nobody: `window.passed` is not there."""
    monkeypatch.setattr(build, "PROGRESS", tmp_path / "progress.json")
    (tmp_path / "progress.json").write_text('{"steps": {"01.1": {"passed": true}, "01.2": {"failures": 3}}}')
    handler = functools.partial(build.Handler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        answer = urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/assets/site.js").read().decode()
        server.shutdown()
    assert answer == 'window.passed = ["01.1"];\n' + read(site / "assets" / "site.js")
