// Elements, and the few shapes that the pictures are made of. A class sets the colour; what it colours depends on the shape.

import { fixed } from "../sims/lib/text.mjs";

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

/** An HTML element: html("p", {class: "soft"}, "text", …). */
export function html(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function shape(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** A picture of width × height pixels; `label` says what it shows to those who do not see it. */
export function svg(width, height, label, ...children) {
  const box = { viewBox: `0 0 ${width} ${Math.ceil(height)}`, width, height: Math.ceil(height) };
  return shape("svg", { ...box, role: "img", "aria-label": label }, ...children);
}

export function group(x, y, ...children) {
  return shape("g", { transform: `translate(${x} ${y})` }, ...children);
}

/** A shape with a name, unique in the picture: when the picture changes, it glides to its new place. */
export function key(name, node) {
  node.setAttribute("data-key", name);
  return node;
}

/** A rectangle; `title` appears when a mouse rests on it. */
export function rect(x, y, width, height, css = "", title = null) {
  const box = { x, y, width: Math.max(0, width), height: Math.max(0, height), class: css };
  return shape("rect", box, title && shape("title", {}, title));
}

/** Text at a baseline. css may contain "middle" or "end" (where x is), "small", "bold", "mono", "soft" and colours. */
export function text(x, y, string, css = "") {
  return shape("text", { x, y, class: css }, String(string));
}

export function line(x1, y1, x2, y2, css = "") {
  return shape("line", { x1, y1, x2, y2, class: css });
}

export function path(d, css = "") {
  return shape("path", { d, class: css });
}

export function circle(cx, cy, r, css = "") {
  return shape("circle", { cx, cy, r, class: css });
}

/** A labelled box: text in the middle of a tinted rectangle. */
export function box(x, y, width, height, string, css = "", title = null) {
  const middle = text(x + width / 2, y + height / 2 + 4, string, "middle small");
  return shape("g", {}, rect(x, y, width, height, `box ${css}`, title), string === "" ? null : middle);
}

/** 12345 → "12,345", and 10.85 with one digit → "10.8": as Python rounds it in the text beside the picture. */
export function number(value, digits = 0) {
  return fixed(value, digits);
}

/** "1 step", "2 steps". */
export function count(n, noun) {
  return `${number(n)} ${noun}${n === 1 ? "" : "s"}`;
}

const COLORS = ["blue", "orange", "green", "purple", "teal"];

/** A colour for the i-th of many. Red is none of them: it means that something is wrong. */
export function color(i) {
  return COLORS[((i % COLORS.length) + COLORS.length) % COLORS.length];
}

/** A row of large numbers with a word below each: [[value, word, css], …]. */
export function numbers(...rows) {
  return html("div", { class: "numbers" }, ...rows.map(([value, word, css]) => html("div", { class: css ?? null }, html("b", {}, String(value)), html("span", {}, word))));
}

/** What the colours mean: [[css, word], …]; css may contain "hatched". */
export function legend(...rows) {
  return html("div", { class: "legend" }, ...rows.map(([css, word]) => html("span", { class: css }, word)));
}
