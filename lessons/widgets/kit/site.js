// What every page has: light or dark, search, and where one is on the page. No network: the index is a script beside it.
(() => {
  "use strict";
  const root = document.documentElement;
  const $ = (selector) => document.querySelector(selector);

  // Light or dark: the system's choice until the reader makes one.
  $(".theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.theme = root.dataset.theme; } catch { /* a browser that forgets */ }
  });

  // The list of lessons: open where it stands beside the text, folded where it stands above it.
  const lessons = $("nav.lessons details");
  if (lessons) {
    const wide = matchMedia("(min-width: 62rem)");
    const fold = () => { lessons.open = wide.matches; };
    wide.addEventListener("change", fold);
    fold();
    const here = lessons.querySelector("[aria-current]");
    if (here && wide.matches) here.parentElement.parentElement.closest("nav").scrollTop = here.offsetTop - 200;
  }

  // The section that is being read.
  const links = new Map([...document.querySelectorAll("nav.contents a")].map((a) => [decodeURIComponent(a.hash.slice(1)), a]));
  const headings = [...document.querySelectorAll("article h2[id]")];
  let last = null;
  const mark = () => {
    const above = headings.filter((h) => h.getBoundingClientRect().top < 140).pop();
    const link = above && links.get(above.id);
    if (link === last) return;
    last?.classList.remove("here");
    link?.classList.add("here");
    last = link;
  };
  if (headings.length) addEventListener("scroll", mark, { passive: true });

  // Commands are copied without their comments, which not every shell takes.
  for (const figure of navigator.clipboard ? document.querySelectorAll("figure.bash") : []) {
    const commands = [...figure.querySelectorAll(".line")].map((line) => {
      const copy = line.cloneNode(true);
      copy.querySelector(".c")?.remove();
      return copy.textContent.trimEnd();
    }).filter(Boolean).join("\n");
    const button = Object.assign(document.createElement("button"), { type: "button", className: "copy", textContent: "Copy" });
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(commands);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    if (commands) figure.append(button);
  }

  // Steps and incidents: a mark for each, kept in this browser; `build.py --serve` adds what `learn` has passed.
  const rows = [...document.querySelectorAll("article td:first-child")].filter((td) => /^(\d\d\.\d+|incident \d+)$/.test(td.textContent));
  const kept = () => { try { return new Set(JSON.parse(localStorage.steps ?? "[]")); } catch { return new Set(); } };
  const boxes = new Map(rows.map((td) => {
    const name = td.textContent;
    const box = Object.assign(document.createElement("input"), { type: "checkbox", checked: kept().has(name), ariaLabel: `${name} is done` });
    box.addEventListener("change", () => {
      const all = kept();
      if (box.checked) all.add(name); else all.delete(name);
      try { localStorage.steps = JSON.stringify([...all]); } catch { /* a browser that forgets */ }
    });
    td.prepend(box, " ");
    return [name, box];
  }));
  for (const name of window.passed ?? []) {
    if (boxes.has(name)) Object.assign(boxes.get(name), { checked: true, disabled: true });
  }

  // Lessons that are done: a button at the end of each, a mark in the list, kept in this browser.
  const done = () => { try { return new Set(JSON.parse(localStorage.lessons ?? "[]")); } catch { return new Set(); } };
  const mark_done = () => {
    for (const a of document.querySelectorAll("nav.lessons a, .map a")) a.classList.toggle("done", done().has(a.getAttribute("href")));
  };
  const page = $("nav.lessons [aria-current]")?.getAttribute("href");
  if (page && $(".title .number")) {
    const button = Object.assign(document.createElement("button"), { type: "button", className: "finish" });
    const say = () => { button.textContent = done().has(page) ? "✓ Done" : "Mark this lesson as done"; button.setAttribute("aria-pressed", done().has(page)); };
    button.addEventListener("click", () => {
      const all = done();
      if (!all.delete(page)) all.add(page);
      try { localStorage.lessons = JSON.stringify([...all]); } catch { /* a browser that forgets */ }
      say();
      mark_done();
    });
    say();
    $("article").append(button);
  }
  mark_done();

  // On paper all answers are open.
  let folded = [];
  addEventListener("beforeprint", () => { folded = [...document.querySelectorAll("article details:not([open])")]; for (const node of folded) node.open = true; });
  addEventListener("afterprint", () => { for (const node of folded) node.open = false; });

  // Search: all words must occur. Lessons and the glossary stand before sections, these before names in the code.
  const input = $(".bar input"), list = $(".results");
  const load = () => {
    if ($("#index")) return;
    const script = Object.assign(document.createElement("script"), { id: "index", src: `${root.dataset.base}assets/search.js` });
    script.onload = show;
    document.head.append(script);
  };
  const rank = (page, url) => (/\.py$/.test(page) ? 0 : /#term-/.test(url) ? 30 : url.includes("#") ? 15 : 45);
  const find = (words) => (window.searchIndex ?? [])
    .map(([page, url, heading, text]) => {
      const name = heading.toLowerCase(), all = `${page} ${heading} ${text}`.toLowerCase();
      if (!words.every((word) => all.includes(word))) return null;
      const named = words.filter((word) => name.includes(word)).length / words.length;
      const close = words.reduce((sum, word) => sum + 6 * name.startsWith(word) + Math.min(4, (all.split(word).length - 1) / 4), 0);
      return { page, url, heading, text, score: named * (20 + rank(page, url)) + 10 * Math.min(1, words.join(" ").length / name.length) * named + (name === words.join(" ")) * 20 + close };
    })
    .filter(Boolean).sort((a, b) => b.score - a.score).slice(0, 12);
  /** Is one letter of `a` wrong, missing, too much, or changed places with the next? */
  const near = (a, b) => {
    if (Math.abs(a.length - b.length) > 1 || a === b) return false;
    let i = 0;
    while (i < a.length && a[i] === b[i]) i++;
    return [[1, 1], [0, 1], [1, 0]].some(([x, y]) => a.slice(i + x) === b.slice(i + y)) || (a[i] === b[i + 1] && a[i + 1] === b[i] && a.slice(i + 2) === b.slice(i + 2));
  };
  let known = null; // every word of the index, with how often it stands there
  /** A word that stands nowhere becomes the most frequent one that is a letter away from it. */
  const forgive = (word) => {
    if (word.length < 4 || !window.searchIndex) return word;
    if (!known) {
      known = new Map();
      for (const row of window.searchIndex) for (const w of `${row[0]} ${row[2]} ${row[3]}`.toLowerCase().match(/[a-zà-ÿ]{4,}/g) ?? []) known.set(w, (known.get(w) ?? 0) + 1);
    }
    const words = [...known.keys()];
    if (words.some((w) => w.includes(word))) return word;
    return words.filter((w) => near(word, w) || near(word, w.slice(0, word.length))).sort((a, b) => known.get(b) - known.get(a))[0] ?? word;
  };
  const marked = (text, words) => { // the place where the first word occurs, with that word marked
    const at = Math.max(0, text.toLowerCase().indexOf(words[0]));
    const part = (from, to) => document.createTextNode(text.slice(Math.max(0, from), to));
    const word = Object.assign(document.createElement("mark"), { textContent: text.slice(at, at + words[0].length) });
    return [part(at - 50, at), word, part(at + words[0].length, at + 90)];
  };
  function show() {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean).map(forgive);
    list.hidden = words.length === 0;
    if (list.hidden) return;
    const found = find(words).map(({ page, url, heading, text }) => {
      const link = Object.assign(document.createElement("a"), { href: root.dataset.base + url });
      const title = Object.assign(document.createElement("b"), { textContent: heading });
      const where = Object.assign(document.createElement("small"), { textContent: page === heading ? "" : page });
      link.append(title, where);
      if (text.toLowerCase().includes(words[0])) where.append(" … ", ...marked(text, words));
      const item = document.createElement("li");
      item.append(link);
      return item;
    });
    const nothing = document.createElement("li");
    nothing.append(Object.assign(document.createElement("p"), { textContent: window.searchIndex ? "Nothing has all of these words." : "…" }));
    list.replaceChildren(...(found.length ? found : [nothing]));
  }
  input.addEventListener("focus", load);
  input.addEventListener("input", () => { load(); show(); });
  addEventListener("keydown", (event) => {
    const typing = /input|select|textarea/i.test(event.target.tagName) && event.target !== input;
    if (event.key === "/" && !typing && event.target !== input) {
      event.preventDefault();
      input.focus();
    } else if (event.key === "Escape" && !list.hidden) {
      list.hidden = true;
      input.focus();
    } else if (/^Arrow(Up|Down)$/.test(event.key) && !list.hidden && $("search").contains(document.activeElement)) {
      const stops = [input, ...list.querySelectorAll("a")];
      const to = stops.indexOf(document.activeElement) + (event.key === "ArrowDown" ? 1 : -1);
      stops[Math.min(stops.length - 1, Math.max(0, to))].focus();
      event.preventDefault();
    } else if (event.key === "Enter" && event.target === input) {
      list.querySelector("a")?.click();
    }
  });
  addEventListener("click", (event) => { if (!$("search").contains(event.target)) list.hidden = true; });
})();
