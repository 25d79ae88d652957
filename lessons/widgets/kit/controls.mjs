// The bar of controls that a JSON file describes. Native elements: a keyboard and a screen reader know them already.
import { html, number } from "./draw.mjs";

const shown = (control, value) => {
  const at = control.values.indexOf(value);
  if (control.labels && at >= 0) return control.labels[at];
  return `${typeof value === "number" && Number.isInteger(value) ? number(value) : value}${control.unit ? ` ${control.unit}` : ""}`;
};

/** Builds one control; `changed(name, value)` hears of it. Returns the element and how to show a value in it. */
function build(control, id, changed) {
  const { name, label, values } = control;
  const label_of = html("label", { for: id }, label);
  if (control.kind === "range") {
    const output = html("output", { for: id });
    const input = html("input", { id, type: "range", min: 0, max: values.length - 1, step: 1, oninput: () => changed(name, values[input.value]) });
    const show = (value) => {
      input.value = values.indexOf(value);
      output.textContent = shown(control, value);
      input.setAttribute("aria-valuetext", output.textContent);
    };
    return { node: html("div", { class: "control" }, html("div", {}, label_of, output), input), show };
  }
  if (control.kind === "switch") {
    const input = html("input", { id, type: "checkbox", onchange: () => changed(name, values[Number(input.checked)]) });
    const show = (value) => { input.checked = values.indexOf(value) === 1; };
    return { node: html("div", { class: "control switch" }, input, label_of), show };
  }
  if (control.kind === "text") {
    const clean = (typed) => typed.replace(/[^ -~]/g, "").slice(0, control.max_length);
    const take = (event) => { // the box shows what the simulation gets; an input method keeps it until its word is complete
      const kept = clean(input.value);
      if (!event.isComposing && input.value !== kept) {
        const caret = clean(input.value.slice(0, input.selectionStart)).length;
        input.value = kept;
        input.setSelectionRange(caret, caret);
      }
      changed(name, kept);
    };
    const input = html("input", { id, type: "text", maxlength: control.max_length, list: `${id}-list`, spellcheck: "false", autocomplete: "off", oninput: take, oncompositionend: take });
    const list = html("datalist", { id: `${id}-list` }, ...values.map((value) => html("option", { value })));
    const show = (value) => { if (document.activeElement !== input) input.value = value; };
    return { node: html("div", { class: "control long" }, html("div", {}, label_of), input, list), show };
  }
  const words = values.map((value) => shown(control, value));
  if (values.length <= 4 && 7 * words.join("").length + 19 * words.length < 225) { // few and short: all of them in view
    const radios = values.map((value, i) => html("input", { type: "radio", id: `${id}-${i}`, name: id, onchange: () => changed(name, value) }));
    const show = (value) => radios.forEach((radio, i) => { radio.checked = values[i] === value; });
    const buttons = radios.map((radio, i) => html("span", {}, radio, html("label", { for: radio.id }, words[i])));
    const named = html("div", {}, html("span", { class: "name", id: `${id}-name` }, label));
    const wide = words.join("").length > 17 ? " wide" : "";
    return { node: html("div", { class: `control${wide}` }, named, html("div", { class: "radios", role: "radiogroup", "aria-labelledby": `${id}-name` }, ...buttons)), show };
  }
  const input = html("select", { id, onchange: () => changed(name, values[input.selectedIndex]) }, ...words.map((word) => html("option", {}, word)));
  const show = (value) => { input.selectedIndex = values.indexOf(value); };
  const long = Math.max(...words.map((word) => word.length)) > 14 ? " wide" : ""; // on a phone a box of half the width would cut it
  return { node: html("div", { class: `control${long}` }, html("div", {}, label_of), input), show };
}

/** On a phone two narrow controls share a row. One without a partner, because a wide one or none follows, takes all of it. */
function mark_alone(nodes) {
  const wide = (node) => !node || /\b(wide|long)\b/.test(node.className);
  for (let i = 0; i < nodes.length; i++) {
    if (wide(nodes[i])) continue;
    if (wide(nodes[i + 1])) nodes[i].classList.add("alone");
    else i += 1;
  }
}

/** All controls of a widget: {node, show(params), field(name)}: those with `"in": "picture"` are the picture's to place. */
export function control_bar(spec, changed) {
  const last = (control) => Number(control.kind === "switch"); // boxes to tick stand together, at the end
  const built = [...spec.controls].sort((a, b) => last(a) - last(b)).map((control) => ({ control, ...build(control, `${spec.name}-${control.name}`, changed) }));
  const beside = built.filter(({ control }) => control.in !== "picture").map(({ node }) => node);
  mark_alone(beside);
  const show = (params) => {
    for (const { control, node, show: show_one } of built) {
      show_one(params[control.name]);
      const off = Object.entries(control.if ?? {}).some(([name, values]) => !values.includes(params[name]));
      node.classList.toggle("off", off);
      for (const input of node.querySelectorAll("input, select")) input.disabled = off;
    }
  };
  const field = (name) => built.find(({ control }) => control.name === name).node;
  return { node: html("div", { class: "controls" }, ...beside), show, field };
}
