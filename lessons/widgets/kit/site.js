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

  // Search: all words must occur; headings and names count for more than text.
  const input = $(".bar input"), list = $(".results");
  const load = () => {
    if ($("#index")) return;
    const script = Object.assign(document.createElement("script"), { id: "index", src: `${root.dataset.base}assets/search.js` });
    script.onload = show;
    document.head.append(script);
  };
  const find = (words) => (window.searchIndex ?? [])
    .map(([page, url, heading, text]) => {
      const name = heading.toLowerCase(), all = `${page} ${heading} ${text}`.toLowerCase();
      if (!words.every((word) => all.includes(word))) return null;
      const score = words.reduce((sum, word) => sum + 8 * name.includes(word) + 6 * name.startsWith(word) + (all.split(word).length - 1) / 8, 0);
      return { page, url, heading, text, score };
    })
    .filter(Boolean).sort((a, b) => b.score - a.score).slice(0, 12);
  const marked = (text, words) => { // the place where the first word occurs, with that word marked
    const at = Math.max(0, text.toLowerCase().indexOf(words[0]));
    const part = (from, to) => document.createTextNode(text.slice(Math.max(0, from), to));
    const word = Object.assign(document.createElement("mark"), { textContent: text.slice(at, at + words[0].length) });
    return [part(at - 50, at), word, part(at + words[0].length, at + 90)];
  };
  function show() {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
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
