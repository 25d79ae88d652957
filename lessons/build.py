"""The lessons as a site: static pages that open from disk and ask the network for nothing.

    uv run python lessons/build.py            # into lessons/site/, in a second
    uv run python lessons/build.py --open     # and look at it: a double click on site/index.html does the same
    uv run python lessons/build.py --serve    # on this machine only, until Ctrl-C

Markdown in GitHub's dialect becomes HTML; math becomes MathML; every script becomes a page that the text links into;
a widget's modules become plain scripts, because browsers refuse modules from `file://`. Libraries do the markdown and
the math, the rest is here.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import html
import http.server
import itertools
import json
import keyword
import math
import re
import shutil
import sys
import textwrap
import webbrowser
from collections.abc import Iterable
from pathlib import Path

from latex2mathml.converter import convert as mathml
from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.gfm import gfm_plugin

VLLM = "https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/"  # the version that the pages' maps lead into
HERE = Path(__file__).resolve().parent
ROOT, WIDGETS = HERE.parent, HERE / "widgets"
TITLE = "vLLM, from first principles"


class BuildError(Exception):
    """Something in the lessons that the site cannot show, said in one line."""


# --- 1. What there is: pages, in the order of the README's table ----------------------------------------------------


@dataclasses.dataclass
class Page:
    """A markdown file, and what became of it."""

    source: Path
    number: str  # "04b"; "" for a page that is no lesson
    title: str
    question: str = ""
    body: str = ""
    headings: list[tuple[int, str, str]] = dataclasses.field(default_factory=list)  # level, anchor, text
    sections: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)  # anchor, heading, plain text
    terms: set[str] = dataclasses.field(default_factory=set)  # anchors of the glossary's terms that have a link by now

    @property
    def url(self) -> str:
        return {"README.md": "index.html", "lessons/README.md": "reading.html"}.get(
            self.source.relative_to(ROOT).as_posix(), f"{self.source.stem}.html"
        )

    @functools.cached_property
    def script(self) -> Path | None:
        paths = [ROOT / "vllm" / folder / f"{self.source.stem}.py" for folder in ("", "tours")]
        return next((path for path in paths if self.number and path.is_file()), None)


def find_pages() -> list[Page]:
    """Front page, how to read, the lessons in order, glossary; titles and questions are those of the README's table."""
    readme = (ROOT / "README.md").read_text()
    row = re.compile(r"^\| (\d\d\w?) \| \[([^\]]+)\]\(lessons/(\w+)\.md\) \| ([^|]+?) \|", re.M)
    listed = {stem: (title, question) for _, title, stem, question in row.findall(readme)}
    lessons = []
    for source in sorted(HERE.glob("[01]*.md")):
        first = source.read_text().partition("\n")[0].lstrip("# ")
        number, _, title = first.partition(" · ")
        lessons.append(Page(source, number, *listed.get(source.stem, (title, ""))))
    lessons.sort(key=lambda page: page.number)
    how_to, missing = (
        Page(HERE / "README.md", "", "How to read the lessons"),
        Page(HERE / "not_here.md", "", "What is not here"),
    )
    return [Page(ROOT / "README.md", "", TITLE), how_to, *lessons, missing, Page(HERE / "glossary.md", "", "Glossary")]


# --- 2. Code with colours -------------------------------------------------------------------------------------------

TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*)
      | (?P<string>(?:\b[rbfuRBFU]{1,2})?
          (?:\"{3}(?:\\.|[^\\])*?\"{3} | '{3}(?:\\.|[^\\])*?'{3} | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'))
      | (?P<decorator>(?<=\n)\ *@[\w.]+)
      | (?P<define>(?:def|class)\ +\w+)
      | (?P<word>[A-Za-z_]\w*)
      | (?P<number>\d[\w.]*)""",
    re.X | re.S,
)
KINDS = {"comment": "c", "string": "s", "decorator": "d", "number": "n"}
KEYWORDS = {*keyword.kwlist, "match", "case", "self"}


def _paint(match: re.Match[str]) -> str:
    kind, text = match.lastgroup, match[0]
    if kind == "word":
        return f"<b>{text}</b>" if text in KEYWORDS else text
    if kind == "define":
        word, _, name = text.partition(" ")
        return f"<b>{word}</b> <dfn>{name.strip()}</dfn>"
    css = KINDS[kind]
    return f"<i class={css}>" + text.replace("\n", f"</i>\n<i class={css}>") + "</i>"


def python_html(source: str) -> str:
    """Python with its strings, comments, keywords, numbers and definitions marked; no tag spans a line's end."""
    return TOKEN.sub(_paint, html.escape(source, quote=False))


def shell_html(source: str) -> str:
    """Commands, each a line that may be folded, with their comments marked."""
    marked = re.sub(r"((?:^|(?<=\s))#.*)$", r"<i class=c>\1</i>", html.escape(source, quote=False), flags=re.M)
    marked = re.sub(r"(?<=\s)--[\w-]+", r"<span class=flag>\g<0></span>", marked)  # not folded at its hyphens
    return "".join(f"<span class=line>{line}</span>" for line in marked.split("\n"))


def dedent(source: str) -> str:
    """Without the indentation that all lines share; `...` stands for lines left out, wherever it begins."""
    marked = re.sub(r"^\.\.\.$", "", source, flags=re.M)
    rows = zip(source.split("\n"), textwrap.dedent(marked).split("\n"))
    return "\n".join("..." if row == "..." else cut for row, cut in rows).rstrip()


@functools.cache
def definitions(path: Path) -> dict[str, int]:
    """Line of each top-level function, class and constant, and of each method (`Class.method`)."""
    found, owner = {}, ""
    pattern = re.compile(r"^(class|(?:async )?def) (\w+)|^    (?:async )?def (\w+)|^([A-Za-z_]\w*)(?:: [^=\n]+)? = ")
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if match := pattern.match(line):
            kind, name, method, constant = match.groups()
            if method:
                found.setdefault(f"{owner}.{method}", number)
            else:
                found.setdefault(name or constant, number)
                owner = name if kind == "class" else ""
    return {name: line for name, line in found.items() if not name.startswith(".")}


# --- 3. Markdown to HTML --------------------------------------------------------------------------------------------

FENCE = re.compile(r"^<!-- (code|output|widget|sketch)(?:: ?(.*?))? ?-->\n+(?=^ *```)", re.M)
COMMENT = re.compile(r"<!--.*?-->", re.S)  # the markers behind numbers


@functools.cache
def code_url(path: Path) -> str:
    """The page of a script, or of a file in a folder, whose name then begins with the folder's."""
    above = next((folder for folder in (ROOT / "vllm", HERE) if path.is_relative_to(folder)), path.parent)
    name = path.relative_to(above).as_posix()
    return f"code/{name.removesuffix('.py').replace('/', '.')}.html"


UNIT = re.compile(r"(?<=\d) (?=(?:%|[mµn]?s|[KMGT]i?B|[KMGT]B/s|TFLOP/s|×)(?!\w))")
TERM = re.compile(r"\*\*(.+?)\*\*")


def glossary_terms() -> dict[str, tuple[str, str]]:
    """Each term of the glossary in small letters -> (anchor of its entry, the entry's text)."""
    found = {}
    for entry in re.split(r"^\* ", (HERE / "glossary.md").read_text(), flags=re.M)[1:]:
        names = [name.strip("`") for name in TERM.findall(entry.partition("\n\n")[0])]
        for name in names:
            found.setdefault(name.lower(), (f"term-{anchor_of(names[0])}", " ".join(entry.split())))
    return found


def anchor_of(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")


def inside_link(tokens: list[Token], i: int) -> bool:
    """Whether token `i` is the text of a link, in which there must be no other."""
    return [t.type for t in tokens[:i] if t.type.startswith("link_")][-1:] == ["link_open"]


class Site:
    """Pages, the links between them, and the files that they need."""

    def __init__(self, out: Path) -> None:
        self.out, self.pages = out, find_pages()
        self.url_of = {page.source: page.url for page in self.pages}
        self.sources = dict.fromkeys(
            sorted([*(ROOT / "vllm").glob("*.py"), *(ROOT / "vllm").glob("tours/*.py"), *HERE.glob("numbers/*.py")])
        )  # scripts, and whatever the text links to
        self.page_of_number = {page.number: page for page in self.pages if page.number}
        self.page = self.pages[0]  # the one that is being rendered
        self.glossary = glossary_terms()
        self.anchors = {name: anchor for name, (anchor, _) in self.glossary.items()}
        longest_first = sorted(map(re.escape, self.anchors), key=len, reverse=True)
        self.terms = re.compile(rf"(?<![\w-])({'|'.join(longest_first)})(?:e?s)?(?![\w-])", re.I)
        self.md = MarkdownIt("commonmark", {"html": True}).use(gfm_plugin, dollarmath=True)
        rules = (self._text, self._fence, self._code_inline, self._heading_open, self._image)
        for rule in (*rules, self._table_open, self._table_close, self._td_open):
            self.md.add_render_rule(rule.__name__[1:], lambda _, *args, rule=rule: rule(*args))
        for name in ("math_inline", "math_inline_double", "math_block"):
            block = name != "math_inline"
            self.md.add_render_rule(
                name,
                lambda _, tokens, i, *rest, display=("block" if block else "inline"): mathml(
                    tokens[i].content, display=display
                ),
            )

    def render(self, page: Page, text: str) -> str:
        """The text of a page, or a part of it, as HTML. Markers vanish; those of a block are handed to the fence."""
        self.page = page
        text = FENCE.sub(lambda m: f"@@{m[1]}@@{m[2] or ''}@@\n", text)
        text = COMMENT.sub("", text)
        text = re.sub(r"^@@(\w+)@@(.*)@@\n( *```)(\w*)", r"\3\4 \1 \2", text, flags=re.M)
        tokens = self.md.parse(text)
        self._resolve(tokens)
        for before, token in itertools.pairwise(tokens):  # what stands in a heading or a cell knows it
            kind = {"heading_open": "heading", "th_open": "cell", "td_open": "cell"}.get(before.type)
            for child in token.children or [] if kind else []:
                child.meta["in"] = kind
        return self.md.renderer.render(tokens, self.md.options, {}).replace("<th></th>", "<td></td>")

    # Rules of the renderer: each gets the tokens and the position of its own.

    def _text(self, tokens: list[Token], i: int, *_: object) -> str:
        """Plain text. "Lesson 04" is a link wherever the lesson exists, a term of the glossary at its first use."""
        text = UNIT.sub("\u00a0", html.escape(tokens[i].content, quote=False))  # a number is not parted from its unit
        if inside_link(tokens, i):
            return text
        numbers = self._link_numbers(r"(?:[Ll]esson |(?<=\())(0\d[a-z]?|(?<=esson )\d\d[a-z]?)\b", text)
        return numbers if tokens[i].meta.get("in") or not self.page.number else self._link_terms(numbers)

    def _link_terms(self, text: str) -> str:
        """The first use on this page of each term, outside of links."""
        parts = re.split(r"(<a .*?</a>)", text)
        for i, part in enumerate(parts[::2]):
            parts[2 * i] = self.terms.sub(self._link_term, part)
        return "".join(parts)

    def _link_term(self, match: re.Match[str]) -> str:
        anchor = self.anchors[match[1].lower()]
        if anchor in self.page.terms:
            return match[0]
        self.page.terms.add(anchor)
        return f'<a class=term href="glossary.html#{anchor}">{match[0]}</a>'

    def _link_numbers(self, pattern: str, text: str) -> str:
        def link(m: re.Match[str]) -> str:
            page = self.page_of_number.get(m[1])
            return f'<a href="{page.url}">{m[0]}</a>' if page and page is not self.page else m[0]

        return re.sub(pattern, link, text)

    def _fence(self, tokens: list[Token], i: int, *_: object) -> str:
        language, kind, argument = [*tokens[i].info.split(maxsplit=2), "", "", ""][:3]
        source, page = dedent(tokens[i].content), self.page
        if kind == "widget":
            return self._widget(source)
        if language == "mermaid":
            return ""  # the README's graph: the front page has a map of its own
        paint = {"python": python_html, "py": python_html, "bash": shell_html}.get(language, html.escape)
        above = ""
        if kind == "code":
            path, _, symbol = argument.rpartition(":")
            path = ROOT / path if path else page.script
            line = definitions(path).get(symbol)
            above = self._caption(f"{self.source_url(path)}#L{line}", f"{symbol}", f"{path.name}, line {line}")
        elif kind == "output":
            flags = f" {argument}" if argument else ""
            above = f"<figcaption><code>{html.escape(page.script.name + flags)}</code> prints</figcaption>"
        if language == "bash":
            kind = f"{kind} bash".strip()  # folded, and copied with a button
        longest = max(map(len, source.split("\n")))
        kind = f"{kind} long".strip() if longest > 84 and language != "bash" else kind
        return f'<figure class="code {kind}">{above}<pre tabindex=0><code>{paint(source)}</code></pre></figure>\n'

    def _caption(self, url: str, name: str, where: str) -> str:
        return f'<figcaption><a href="{url}"><code>{name}</code> {where}</a></figcaption>'

    def _code_inline(self, tokens: list[Token], i: int, *_: object) -> str:
        """`vllm/file.py:symbol`, and names that this lesson's script defines, lead to the line."""
        text = tokens[i].content
        escaped = html.escape(text, quote=False)
        shown = f"<code>{foldable(escaped) if tokens[i].meta.get('in') == 'cell' else escaped}</code>"
        if inside_link(tokens, i):
            return shown
        url = None
        if match := re.fullmatch(r"((?:vllm|tests|lessons)/[\w./-]+\.py)(?::([\w.]+))?", text):
            path = ROOT / match[1]
            if path.is_file():
                line = definitions(path).get(match[2] or "")
                url = self.source_url(path) + (f"#L{line}" if line else "")
        elif script := self.page.script:
            name = text.removesuffix("()")
            for path in (script, HERE / "numbers" / script.name):
                known = definitions(path) if path.is_file() else {}
                if url is None and name in known and (text != name or re.search(r"[A-Z_.]", name)):
                    url = f"{self.source_url(path)}#L{known[name]}"
        if (
            url is None
            and self.page.headings
            and self.page.headings[-1][1] in ("where-it-lives-in-vllm-today", "what-to-read")
        ):
            match = re.match(r"([a-z][\w/]+\.py)(?![\w/])", text)
            if match and not (ROOT / match[1]).exists() and "/" in match[1]:
                url = VLLM + match[1]
        return f'<a class=symbol href="{url}">{shown}</a>' if url else shown

    def _heading_open(self, tokens: list[Token], i: int, *_: object) -> str:
        level, text = int(tokens[i].tag[1]), tokens[i + 1].content
        anchor, known = anchor_of(text), {a for _, a, _ in self.page.headings}
        while anchor in known:
            anchor += "-1"
        self.page.headings.append((level, anchor, re.sub(r"[`*]", "", text)))
        return f'<h{level} id="{anchor}">'

    def _image(self, tokens: list[Token], i: int, *_: object) -> str:
        """A figure scrolls sideways where it would become too small to read."""
        source, alt = html.escape(str(tokens[i].attrs["src"])), html.escape(tokens[i].content)
        size = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', (self.out / source).read_text()[:600])
        room = (
            f" width={float(size[1]):.0f} height={float(size[2]):.0f}" if size else ""
        )  # nothing moves once it is there
        image = f'<img src="{source}" alt="{alt}"{room} loading=lazy>'
        return f"<span class=figure tabindex=0 role=group aria-label=figure>{image}</span>"

    def _table_open(self, *_: object) -> str:
        return "<div class=table tabindex=0 role=group aria-label=table><table>"

    def _table_close(self, *_: object) -> str:
        return "</table></div>"

    def _td_open(self, tokens: list[Token], i: int, *_: object) -> str:
        """A cell; one with a sentence in it says so, and is not squeezed to the width of a word."""
        token = tokens[i]
        text = "".join(child.content for child in tokens[i + 1].children or [])  # without the links' targets
        if len(text) > 24 and "style" not in token.attrs:
            token.attrs["class"] = "wordy"
        return self.md.renderer.renderToken(tokens, i, self.md.options, {})

    def _widget(self, text: str) -> str:
        """The slot: a widget if there is one, and always the text, which the widget replaces."""
        name = self.page.source.stem
        live = f' id=widget data-widget="{name}"' if widget_files(name) else ""
        return f"<section class=widget{live}><pre tabindex=0>{html.escape(text, quote=False)}</pre></section>\n"

    # Links.

    def _resolve(self, tokens: Iterable[Token]) -> None:
        for token in tokens:
            for name in ("href", "src"):
                if name in token.attrs:
                    token.attrs[name] = self.link(str(token.attrs[name]))
            self._resolve(token.children or [])

    def link(self, target: str) -> str:
        """Where a link of the page being rendered leads to in the site."""
        if re.match(r"https?://|mailto:|#", target):
            return target
        path, _, anchor = target.partition("#")
        file, anchor = (self.page.source.parent / path).resolve(), f"#{anchor}" if anchor else ""
        if file in self.url_of:
            return self.url_of[file] + anchor
        if file.suffix == ".py" and file.is_file():
            return self.source_url(file) + anchor
        if file.is_dir():
            file = next(iter(sorted(file.glob("*.*"))), file)
        if not (file.is_file() and file.is_relative_to(HERE)):
            raise BuildError(f"{self.page.source.name}: {target} is not part of the site")
        copy = self.out / file.relative_to(HERE)
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        return file.relative_to(HERE).as_posix()

    def source_url(self, path: Path) -> str:
        self.sources[path] = None
        return code_url(path)

    # Writing.

    def build(self) -> None:
        for page in self.pages:
            text = page.source.read_text()
            if page.number:
                text = text.partition("\n")[2]  # the template has the title
            page.body = self.render(page, front_text(text) if page.url == "index.html" else text)
            if page.url == "glossary.html":
                entry = re.compile(r"<li>(?=\s*(?:<p>)?<strong>(.*?)</strong>)")
                page.body = entry.sub(lambda m: f'<li id="term-{anchor_of(re.sub("<.*?>", "", m[1]))}">', page.body)
            page.sections = sections(page)
        for before, page, after in zip([None, *self.pages], self.pages, [*self.pages[1:], None]):
            self.write(page.url, lesson_html(self, page, before, after) if page.number or page.url != "index.html"
                       else front_html(self, page))  # fmt: skip
        for path in self.sources:
            self.write(code_url(path), source_html(self, path))
        self.write("assets/search.js", "window.searchIndex = " + json.dumps(self.search_index(), ensure_ascii=False))
        for file in (WIDGETS / "kit").glob("*.css"):
            self.write(f"assets/{file.name}", file.read_text())
        self.write("assets/site.js", (WIDGETS / "kit" / "site.js").read_text())
        self.write("assets/kit.js", bundle([WIDGETS / "kit" / "kit.mjs"]))
        for controls in sorted((WIDGETS / "controls").glob("*.json")):
            if files := widget_files(controls.stem):
                self.write(f"assets/{controls.stem}.js", widget_js(controls.stem, files))

    def write(self, name: str, text: str) -> None:
        path = self.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def search_index(self) -> list[list[str]]:
        """[page, anchor, heading, text] of every section, then [script, line, symbol, ""] of every definition."""
        rows = [
            [label(page), f"{page.url}#{anchor}" if anchor else page.url, heading, text]
            for page in self.pages
            for anchor, heading, text in page.sections
        ]
        for name, (anchor, text) in self.glossary.items():
            plain = re.sub(r"\[\[.*|[*`]", "", text)
            rows.append(
                [
                    "Glossary",
                    f"glossary.html#{anchor}",
                    name if name.isupper() else plain[: len(name)] if plain.lower().startswith(name) else name,
                    plain,
                ]
            )
        for path in self.sources:
            rows += [[path.name, f"{code_url(path)}#L{line}", name, ""] for name, line in definitions(path).items()]
        return rows


def sections(page: Page) -> list[tuple[str, str, str]]:
    """The page's text, cut at its headings: anchor, heading, plain text."""
    parts = re.split(r'<h([1-4]) id="([^"]*)">(.*?)</h\1>', re.sub(r"<math.*?</math>", "", page.body, flags=re.S))

    def plain(markup: str) -> str:
        return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", markup)).split())

    found = [("", page.title, f"{page.question} {plain(parts[0])}")]
    return found + [(a, plain(h), plain(t)) for a, h, t in zip(parts[2::4], parts[3::4], parts[4::4])]


# --- 4. Widgets -----------------------------------------------------------------------------------------------------

IMPORT = re.compile(r'^import (\{[^}]*\}) from "([\w./-]+)";$', re.M)
EXPORT = re.compile(r"^export ((?:async )?function\*?|const|class) (\w+)", re.M)


def widget_files(name: str) -> list[Path] | None:
    """Controls, sim and view of a lesson's widget, if it has all three."""
    files = [WIDGETS / "controls" / f"{name}.json", *(WIDGETS / kind / f"{name}.mjs" for kind in ("sims", "views"))]
    return files if all(file.is_file() for file in files) else None


def bundle(entries: list[Path]) -> str:
    """Modules as one plain script, what is needed first: each becomes a function that returns what it exports."""
    written: list[str] = ["globalThis.modules ??= {};"]
    seen: set[Path] = set()

    def add(path: Path) -> str:
        key = path.relative_to(WIDGETS).as_posix()
        if path not in seen:
            seen.add(path)
            source = path.read_text()
            needed = {name: add((path.parent / name).resolve()) for _, name in IMPORT.findall(source)}
            names = ", ".join(name for _, name in EXPORT.findall(source))
            source = IMPORT.sub(lambda m: f'const {m[1].replace(" as ", ": ")} = modules["{needed[m[2]]}"];', source)
            source = EXPORT.sub(r"\1 \2", source)
            written.append(f'modules["{key}"] ??= (() => {{\n"use strict";\n{source}\nreturn {{{names}}};\n}})();')
        return key

    for entry in entries:
        add(entry)
    return "\n\n".join(written) + "\n"


def widget_js(name: str, files: list[Path]) -> str:
    """A widget's script: its modules, and how to start it."""
    places = (HERE / "numbers", ROOT / "vllm", ROOT / "vllm" / "tours")
    script = next(path for place in places if (path := place / f"{name}.py").exists())
    controls = json.loads(files[0].read_text())
    controls |= {"name": name, "states": states(controls), "script": script.name, "code": code_url(script)}
    return bundle(files[1:]) + f'modules["controls/{name}.json"] = {json.dumps(controls, ensure_ascii=False)};\n'


def states(controls: dict) -> int:
    """How many combinations of the listed values there are; the tests compare each with the lesson's Python."""
    return math.prod(len(control["values"]) for control in controls["controls"])


# --- 5. Templates ---------------------------------------------------------------------------------------------------


def summary(page: Page) -> str:
    """The first sentence of a page."""
    return re.split(r"(?<=[.?!]) ", page.sections[1][2], maxsplit=1)[0]


def label(page: Page) -> str:
    return f"{page.number} {page.title}".strip()


THEME = "try { const t = localStorage.theme; if (t) document.documentElement.dataset.theme = t; } catch {}"  # no flash
SEARCH = (
    '<search><input type=search placeholder="Search  /" aria-label="Search the lessons and the code" autocomplete=off>'
    "<ul class=results hidden></ul></search>"
)


def shell(
    title: str, body: str, *, about: str = "", base: str = "", kind: str = "", scripts: Iterable[str] = ()
) -> str:
    """A whole page around `body`, described by `about`. `base` leads from it to the site's root."""
    tags = "".join(f'<script src="{base}assets/{name}" defer></script>' for name in ["site.js", *scripts])
    return f"""<!doctype html>
<html lang="en" data-base="{base}" class="{kind}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<meta name="description" content="{html.escape(about or title)}">
<link rel="icon" href="data:,">
<link rel="stylesheet" href="{base}assets/site.css"><link rel="stylesheet" href="{base}assets/kit.css">
<script>{THEME}</script>
{tags}
</head>
<body>
<a class=skip href="#main">Skip to the text</a>
<header class=bar>
<a class=home href="{base}index.html">{TITLE}</a>
{SEARCH}
<button class=theme aria-label="Dark or light" title="Dark or light"></button>
</header>
{body}
</body>
</html>
"""


def navigation(site: Site, current: Page | None, base: str = "") -> str:
    """All pages in order; a companion (04b) is indented under its lesson."""
    items = []
    for page in site.pages:
        here = " aria-current=page" if page is current else ""
        css = " class=companion" if page.number[2:] else "" if page.number else " class=other"
        number = f"<span>{page.number}</span> " if page.number else ""
        title = "Start" if page.url == "index.html" else page.title
        items.append(f'<li{css}><a href="{base}{page.url}"{here}>{number}{html.escape(title)}</a></li>')
    rows = "".join(items)
    return f"<nav class=lessons aria-label=Lessons><details><summary>Lessons</summary><ol>{rows}</ol></details></nav>"


def lesson_html(site: Site, page: Page, before: Page | None, after: Page | None) -> str:
    """A page with the lessons on its left, its own sections on its right, and its neighbours below."""
    head = ""
    if page.number:
        asks = f"<p class=question>{html.escape(page.question)}</p>" if page.question else ""
        name = f"<p class=number>Lesson {page.number}</p><h1>{html.escape(page.title)}</h1>"
        head = f"<header class=title>{name}{asks}</header>"
    contents = "".join(f'<li><a href="#{a}">{html.escape(t)}</a></li>' for level, a, t in page.headings if level == 2)
    neighbours = "".join(
        f'<a class={which} href="{p.url}"><span>{word}</span>{html.escape(label(p))}</a>'
        for which, word, p in (("before", "Before", before), ("after", "Next", after))
        if p
    )
    scripts = [f"{page.source.stem}.js", "kit.js"] if page.number and widget_files(page.source.stem) else []
    body = f"""<div class=columns>
{navigation(site, page)}
<main id=main>
<article>
{head}
{page.body}
</article>
<nav class=neighbours aria-label="Before and next">{neighbours}</nav>
</main>
<nav class=contents aria-label="On this page"><p>On this page</p><ol>{contents}</ol></nav>
</div>"""
    return shell(f"{label(page)} · {TITLE}", body, about=page.question or summary(page), scripts=scripts)


def foldable(name: str) -> str:
    """A name that a narrow column folds between its words, a path behind its slashes."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[a-z]_)(?=[a-z])|(?<=\w[/.:])(?=[A-Za-z_]{3})", "<wbr>", name)


def source_html(site: Site, path: Path) -> str:
    """A script as a page: numbered lines that can be linked to, and its definitions beside them."""
    lines = python_html(path.read_text()).rstrip("\n").split("\n")
    code = "\n".join(f"<span id=L{i}>{line}</span>" for i, line in enumerate(lines, 1))
    lesson = next((page for page in site.pages if page.script == path), None)
    about = f'<a href="../{lesson.url}">Lesson {html.escape(label(lesson))}</a>' if lesson else ""
    outline = "".join(
        f"<li{' class=method' if '.' in name else ''}><a href=#L{line}>{foldable(name.rpartition('.')[2])}</a></li>"
        for name, line in definitions(path).items()
        if not name.rpartition(".")[2].startswith("__")
    )
    folder = path.relative_to(ROOT).parent.as_posix()
    body = f"""<div class=columns>
<main id=main>
<header class=title><p class=number>{about or folder}</p><h1><code>{folder}/{path.name}</code></h1></header>
<pre class=source tabindex=0><code>{code}</code></pre>
</main>
<nav class=contents aria-label="In this file"><p>In this file</p><ol>{outline}</ol></nav>
</div>"""
    about = f"{folder}/{path.name}: " + (lesson.question if lesson else "a part of the lessons, line by line")
    return shell(f"{path.name} · {TITLE}", body, about=about, base="../", kind="wide")


def front_text(readme: str) -> str:
    """The README as the front page shows it: where to start, the map for its table, a bet, the ranking, the rest."""
    text = re.sub(r"(?:^\|.*\n)+", "@@map@@\n", readme, count=1, flags=re.M)
    text = re.sub(r"^This is the house[^\n]*\n\n```mermaid\n.*?^```\n", "\n", text, flags=re.M | re.S)
    before, lessons, rest = re.split(r"^(?=## )", text, maxsplit=2, flags=re.M)
    first, commands, then = re.split(r"^(?=```bash)|(?<=^```\n)", before, maxsplit=2, flags=re.M)
    how_to, rows, after = lessons.partition("@@map@@\n")
    run = f"## Run it\n\n{commands}{then}"
    bet = "## A bet, to begin with\n\n@@widget@@\n\n"
    return f"{first}@@start@@\n\n{rows}{how_to.removeprefix('## Lessons')}{after}\n{bet}@@ranking@@\n\n{run}{rest}"


def ranking(site: Site) -> str:
    """Lesson 05's table of techniques; a number in parentheses leads to its lesson."""
    source = HERE / "05_optimizations.md"
    title = "### The ranking, with conditions"
    _, found, after = source.read_text().partition(title)
    if not found:
        raise BuildError(f"{source.name} has no heading {title!r}, which the front page shows")
    section = re.split(r"^##", after, maxsplit=1, flags=re.M)[0]
    page = dataclasses.replace(site.page_of_number["05"], headings=[], body="")
    table = site.render(page, section)
    site.page = site.pages[0]
    linked = site._link_numbers(r"(?<=[( ])(\d\d[a-z]?)(?=[),])", table)
    return f"<h2 id=ranking>What each technique is worth, and when</h2>{linked}"


def map_html(site: Site) -> str:
    """All lessons, one a row, and an arc from each that README's table says to read before; hovering shows its own."""
    lessons = [page for page in site.pages if page.number]
    high, wide = 44, 150
    row = {page.number: i for i, page in enumerate(lessons)}
    arcs, rules = [], []
    after = re.findall(r"^\| (\d\d\w?) \| .* \| ([\w, ]+) \|$", (ROOT / "README.md").read_text(), flags=re.M)
    for a, b in ((a, b) for b, earlier in after for a in earlier.split(", ")):
        turn = 4 if row[a] < row[b] else -4
        y0, y1 = (row[a] + 0.5) * high + turn, (row[b] + 0.5) * high - turn
        deep = min(wide - 14, 12 + 9 * abs(row[b] - row[a]))
        x0, x1 = wide - 4, round(wide - deep * 1.3)
        arcs.append(f'<path class="from-{a} to-{b}" d="M{x0} {y0:g}C{x1} {y0:g} {x1} {y1:g} {x0} {y1:g}"/>')
    for page in lessons:
        rules.append(f".map:has(.n{page.number}:is(:hover, :focus)) :is(.from-{page.number}, .to-{page.number})")
    items = "".join(
        f"<li{' class=companion' if page.number[2:] else ''}><a class=n{page.number} href={page.url}>"
        f"<span>{page.number}</span><b>{html.escape(page.title)}</b><i>{html.escape(page.question)}</i></a></li>"
        for page in lessons
    )
    return (
        f"<style>{', '.join(rules)} {{ stroke: var(--accent); stroke-width: 2; opacity: 1; }}</style>"
        f'<div class=map style="--row: {high}px"><svg width={wide} height={high * len(lessons)} role=img '
        f'aria-label="Which lesson makes which one easier">{"".join(arcs)}</svg><ol>{items}</ol></div>'
        "<p class=note>An arc leads from a lesson to one that is easier after it.</p>"
    )


FRONT_WIDGET = "04_continuous_batching"


def front_html(site: Site, page: Page) -> str:
    """The front page: the README, with a widget to begin with, the map of the lessons, and the ranking."""
    widget = (
        f'<section class=widget id=widget data-widget="{FRONT_WIDGET}"></section>' if widget_files(FRONT_WIDGET) else ""
    )
    body = page.body
    first = site.page_of_number["01"]
    start = f'<p><a class=start href="{first.url}">Start here: {html.escape(label(first))}</a></p>'
    for name, block in (("start", start), ("map", map_html(site)), ("widget", widget), ("ranking", ranking(site))):
        body = body.replace(f"<p>@@{name}@@</p>", block)
    scripts = [f"{FRONT_WIDGET}.js", "kit.js"] if widget else []
    main = f"<main id=main class=front><article>{body}</article></main>"
    return shell(TITLE, main, about=summary(page), scripts=scripts)


# --- 6. The command -------------------------------------------------------------------------------------------------


def build(out: Path) -> Site:
    """Build the site in `out`; what an earlier build left there goes away."""
    if (out / "index.html").exists():
        shutil.rmtree(out)
    site = Site(out)
    site.build()
    return site


PROGRESS = HERE.parent / "my" / "progress.json"


class Handler(http.server.SimpleHTTPRequestHandler):
    """The site's files; its script also hears which steps and incidents have passed, as `learn` keeps them in `my/`."""

    def do_GET(self) -> None:
        if self.path != "/assets/site.js":
            super().do_GET()
            return
        known = json.loads(PROGRESS.read_text(encoding="utf-8")) if PROGRESS.is_file() else {}
        passed = [name for name, entry in known.get("steps", {}).items() if entry.get("passed")]
        passed += [f"incident {number}" for number, entry in known.get("incidents", {}).items() if entry.get("solved")]
        script = (Path(self.directory) / "assets" / "site.js").read_text(encoding="utf-8")
        body = f"window.passed = {json.dumps(passed)};\n{script}".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/javascript; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "site", help="folder to build in (default lessons/site)")
    parser.add_argument("--open", action="store_true", help="show it in a browser")
    parser.add_argument("--serve", action="store_true", help="serve it on 127.0.0.1 until Ctrl-C")
    parser.add_argument("--port", type=int, default=8080, help="for --serve (default %(default)s)")
    args = parser.parse_args(argv)
    try:
        site = build(args.out.resolve())
    except BuildError as error:
        sys.exit(f"error: {error}")
    print(f"{len(site.pages)} pages and {len(site.sources)} scripts in {args.out}/index.html")
    url = (args.out.resolve() / "index.html").as_uri()
    if args.serve:
        handler = functools.partial(Handler, directory=args.out)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", args.port), handler)
        url = f"http://127.0.0.1:{args.port}/"
        print(f"serving {url} (Ctrl-C ends it)", flush=True)
    if args.open:
        webbrowser.open(url)
    if args.serve:
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    main()
