// A widget on its page: controls → simulate → draw. It knows no lesson: sims compute, views draw, this file connects them.
import { box, circle, color, count, group, html, key, legend, line, number, numbers, path, rect, shape, svg, text } from "./draw.mjs";
import { control_bar } from "./controls.mjs";
import { places, glide } from "./motion.mjs";

const pictures = { box, circle, color, count, group, html, key, legend, line, number, numbers, path, rect, shape, svg, text };

/** What a path such as "steps.-1.free" leads to in a trace. */
export function lookup(trace, where) {
  return where.split(".").reduce((value, key) => (/^-\d+$/.test(key) ? value.at(Number(key)) : value[key]), trace);
}

const same = (a, b) => Object.keys(a).every((name) => a[name] === b[name]);

const COMPARE = { "<": (a, b) => a < b, "≤": (a, b) => a <= b, "=": (a, b) => a === b, "≠": (a, b) => a !== b, "≥": (a, b) => a >= b, ">": (a, b) => a > b };

/** Has the reader reached what the task asks for? `solved`: [[path into the trace, sign, number, word, or another path], …], all of them. */
export function is_solved(trace, solved) {
  const value = (what) => (typeof what === "string" && what.includes(".") ? lookup(trace, what) : what);
  return solved.every(([where, sign, what]) => COMPARE[sign](lookup(trace, where), value(what)));
}

/** "#widget?block_size=2048&at=3" → the parameters that it names, as far as a control can reach them, and the step. */
function read_hash(spec, hash) {
  if (!hash.startsWith("#widget?")) return null;
  const given = new URLSearchParams(hash.slice("#widget?".length)), params = {};
  for (const { name, kind, values, max_length } of spec.controls) {
    if (!given.has(name)) continue;
    const word = given.get(name), value = kind === "text" ? word : values.find((v) => String(v) === word);
    if (value !== undefined && !(kind === "text" && (/[^ -~]/.test(value) || value.length > max_length))) params[name] = value;
  }
  const at = parseFloat(given.get("at"));
  return { params, at: Number.isInteger(at) ? at : Infinity };
}

function write_hash(spec, params, index, last) {
  const given = new URLSearchParams();
  for (const { name } of spec.controls) if (params[name] !== spec.default[name]) given.set(name, params[name]);
  const home = given.size ? last : Math.min(spec.at ?? last, last); // where one arrives without `at`
  if (index !== home) given.set("at", index);
  return given.size ? `#widget?${given}` : "";
}

/** A number is not parted from its unit at the end of a line. */
const unbroken = (words) => words.replace(/(\d) (?=(?:%|[mµn]?s|[KMGT]i?B|×)(?!\w))/g, "$1\u00a0");

/** The bet: asked before the picture is studied, settled by the simulation. `run(params)` shows and returns a trace. */
function bet_box(bet, run) {
  const verdict = html("p", { role: "status" }, html("b", {}, "Bet first. "), unbroken(bet.question));
  const name = (choice) => {
    if (bet.unit === "µs") return `${number(choice / 1000, choice < 1e5 ? 1 : 0)} ms`;
    return (typeof choice === "number" ? number(choice, Number.isInteger(choice) ? 0 : 2) : choice) + (bet.unit ? ` ${bet.unit}` : "");
  };
  const buttons = bet.choices.map((choice) => html("button", { type: "button", onclick: () => settle(choice) }, name(choice)));
  function settle(choice) {
    const right = lookup(run(bet.params), bet.answer);
    buttons.forEach((button, i) => {
      button.className = bet.choices[i] === right ? "right" : bet.choices[i] === choice ? "wrong" : "";
      button.setAttribute("aria-pressed", bet.choices[i] === choice);
    });
    verdict.replaceChildren(html("b", {}, choice === right ? "Right. " : `You said ${name(choice)}; it is ${name(right)}. `), unbroken(bet.why));
  }
  return html("div", { class: "bet", role: "group", "aria-label": "A bet" }, verdict, html("div", { class: "buttons" }, ...buttons));
}

const SIGNS = {
  first: "M3 2h2v12H3zM14 2v12L6 8z", back: "M11 2v12L4 8z", play: "M4 2v12l9-6z", pause: "M3 2h4v12H3zM9 2h4v12H9z", on: "M5 2v12l7-6z", end: "M2 2v12l8-6zM11 2h2v12h-2z",
};

/** Start, back, play, on, end, and a slider over the steps. `go(index)` moves. */
function stepper(go) {
  let timer = null, index = 0, last = 0;
  const pace = () => Math.min(700, Math.max(60, 12000 / (last + 1))); // ms a step, while it plays
  const icon = (sign) => shape("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, shape("path", { d: SIGNS[sign] }));
  const button = (sign, label, act) => html("button", { type: "button", "aria-label": label, title: label, onclick: act }, icon(sign));
  const pause = () => {
    clearInterval(timer);
    timer = null;
    play.replaceChildren(icon("play"));
    play.setAttribute("aria-label", "Play");
  };
  const move = (to) => { pause(); if (to >= 0 && to <= last) go(to); };
  const first = button("first", "To the first step", () => move(0));
  const back = button("back", "Step back", () => move(index - 1));
  const on = button("on", "Step", () => move(index + 1));
  const end = button("end", "To the last step", () => move(last));
  const play = button("play", "Play", () => {
    if (timer !== null) return pause();
    if (index === last) go(0);
    timer = setInterval(() => (index < last ? go(index + 1) : pause()), pace());
    play.replaceChildren(icon("pause"));
    play.setAttribute("aria-label", "Pause");
  });
  const slider = html("input", { type: "range", min: 0, "aria-label": "Step", oninput: () => move(Number(slider.value)) });
  const where = html("output", {});
  const node = html("div", { class: "stepper", role: "group", "aria-label": "Steps" }, first, back, play, on, end, slider, where);
  const show = (at, steps) => {
    [index, last] = [at, steps - 1];
    node.hidden = last === 0;
    slider.max = last;
    slider.value = index;
    where.textContent = `${index + 1} / ${steps}`;
    for (const button of [first, back]) button.setAttribute("aria-disabled", index === 0); // not `disabled`: that would drop the focus
    for (const button of [on, end]) button.setAttribute("aria-disabled", index === last);
  };
  return { node, show, pause, playing: () => timer !== null, pace: () => (timer === null ? 700 : pace()) };
}

/** Puts a widget in the place of its text. */
function mount(host) {
  const name = host.dataset.widget;
  const spec = modules[`controls/${name}.json`], sim = modules[`sims/${name}.mjs`], view = modules[`views/${name}.mjs`];
  const start = { ...spec.fixed, ...spec.default };
  let params = start, trace, steps, index, writing, before = null; // the run that was shown before this one

  const picture = html("div", { class: "picture" });
  const says = html("p", { class: "says", role: "status" });
  const printed = html("pre", { tabindex: 0 });
  const preset_says = html("p", { class: "preset-says", role: "status" });
  const task = html("p", { class: "task" });
  const bar = control_bar(spec, (field, value) => update({ ...params, [field]: value }));
  const steps_bar = stepper((to) => { const was = places(picture); index = Math.min(steps - 1, Math.max(0, to)); render(was); });
  const presets = [{ name: "Reset", params: {}, says: "" }, ...spec.presets].map((preset) => ({
    ...preset,
    node: html("button", { type: "button", class: preset.name === "Break it" ? "break" : null, onclick: () => update({ ...start, ...preset.params }, preset.name === "Break it" ? Infinity : undefined) }, preset.name),
  }));

  /** What a drag in the picture does. */
  const set = (field, value) => { if (params[field] !== value) update({ ...params, [field]: value }); };

  /** Draws a step. What is under the picture stays where it is: a box keeps the height that a step of this run once needed. */
  function show(at) {
    const typing = picture.contains(document.activeElement) ? document.activeElement : null, caret = typing?.selectionStart;
    const drawn = view.draw(trace, at, { ...pictures, width: Math.max(300, Math.floor(picture.clientWidth)), params, before, field: bar.field, set });
    says.setAttribute("aria-live", steps_bar.playing() ? "off" : "polite");
    picture.replaceChildren(...[drawn.picture].flat());
    typing?.focus({ preventScroll: true }); // a field that stands in the picture is put back into it, and would lose focus and caret
    if (Number.isInteger(caret)) typing.setSelectionRange(caret, caret);
    says.textContent = unbroken(drawn.text);
    for (const box of [picture, says]) box.style.minHeight = `${Math.ceil(box.getBoundingClientRect().height)}px`;
    return drawn;
  }

  /** The room that the tallest step takes, before any is shown: of a long run the last, which mostly is the tallest. */
  function make_room() {
    for (const box of [picture, says]) box.style.minHeight = "";
    for (let at = steps > 10 ? steps - 1 : 0; at < steps; at++) if (at !== index) show(at);
  }

  function render(was) {
    const drawn = show(index);
    glide(picture, was, steps_bar.pace());
    steps_bar.show(index, steps);
    host.dataset.state = JSON.stringify({ params, index, steps, text: drawn.text });
    clearTimeout(writing); // browsers refuse a hundred changes in a row
    writing = setTimeout(() => {
      const hash = write_hash(spec, params, index, steps - 1);
      if (hash || location.hash.startsWith("#widget?")) history.replaceState(null, "", hash || location.pathname + location.search);
    }, 150);
  }

  /** Another run, at the same step: two of them can be compared. One that was shown to its end is shown to its end, and so is what breaks. */
  function update(next, at = index === steps - 1 ? Infinity : index) {
    const was = places(picture);
    if (trace && !same(next, params)) before = { trace, params };
    params = next;
    trace = sim.simulate(params);
    steps = view.steps(trace);
    index = Math.min(steps - 1, Math.max(0, at));
    steps_bar.pause();
    bar.show(params);
    printed.textContent = sim.describe(trace);
    for (const preset of presets) preset.node.setAttribute("aria-pressed", same({ ...start, ...preset.params }, params));
    preset_says.textContent = unbroken(presets.find((preset) => preset.node.getAttribute("aria-pressed") === "true")?.says ?? "");
    const solved = spec.solved && is_solved(trace, spec.solved);
    task.className = solved ? "task solved" : "task";
    task.replaceChildren(unbroken(spec.task), ...(solved ? [html("b", {}, " ✓ Solved.")] : []));
    make_room();
    render(was);
    return trace;
  }

  const typed = spec.controls.some((control) => control.kind === "text");
  const script = html("a", { href: spec.code }, spec.script);
  const compared = ["A twin of the simulation in ", script, ": a test compares the two, step by step, in ", `${typed ? "" : "all "}${count(spec.states, "state")}${typed ? " and with 500 random texts" : ""}.`];
  host.setAttribute("aria-label", `Widget: ${spec.title}`);
  host.replaceChildren(
    html("div", { class: "head" }, html("h3", {}, spec.title), task),
    ...(spec.bet ? [bet_box(spec.bet, (changes) => update({ ...start, ...changes }))] : []),
    html("div", { class: "stage" },
      html("div", { class: "show" }, picture, steps_bar.node), // the bar stays in sight as long as the picture is
      html("div", { class: "side" },
        bar.node,
        html("div", { class: "buttons presets", role: "group", "aria-label": "Presets" }, ...presets.map(({ node }) => node)),
        preset_says,
        says)),
    html("details", {}, html("summary", {}, "The whole run, as the script prints it"), printed, html("p", { class: "compared" }, ...compared)),
  );
  const arrive = () => {
    const asked = read_hash(spec, location.hash);
    if (asked) host.scrollIntoView();
    return asked;
  };
  const asked = arrive();
  update({ ...start, ...asked?.params }, asked?.at ?? spec.at ?? Infinity);
  addEventListener("hashchange", () => {
    const again = arrive();
    if (again) update({ ...start, ...again.params }, again.at);
  });
  let width = picture.clientWidth;
  new ResizeObserver(() => {
    if (picture.clientWidth !== width) {
      width = picture.clientWidth;
      make_room();
      render(places(picture));
    }
  }).observe(picture);
}

if (globalThis.document) {
  const hatch = (name) => `<pattern id="hatch-${name}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="6" height="6" fill="color-mix(in srgb, var(--${name}) 10%, var(--paper))"/><rect width="1.6" height="6" fill="color-mix(in srgb, var(--${name}) 60%, var(--paper))"/></pattern>`;
  const arrow = '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="11" markerHeight="11" markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 8 4 0 8z" fill="context-stroke"/></marker>';
  const names = ["blue", "orange", "green", "purple", "teal", "red", "grey"];
  const defs = `<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs>${names.map(hatch).join("")}${arrow}</defs></svg>`;
  document.body.insertAdjacentHTML("beforeend", defs);
  document.querySelectorAll("[data-widget]").forEach(mount);
}
