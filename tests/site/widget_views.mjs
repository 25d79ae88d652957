// Draws the steps of every widget's states without a browser, on a document that only remembers. Reads nothing, prints what failed.
//   node tests/site/widget_views.mjs [--few] 02_paged_attention 04_continuous_batching …
import { readFileSync } from "node:fs";

class Element {
  constructor(tag) { Object.assign(this, { tag, children: [], attributes: {} }); }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  append(...children) { this.children.push(...children); }
  addEventListener() {}
}
globalThis.document = { createElement: (tag) => new Element(tag), createElementNS: (_, tag) => new Element(tag) };

const root = new URL("../../lessons/widgets/", import.meta.url);
const pictures = await import(new URL("kit/draw.mjs", root));
const all = (node) => (node instanceof Element ? [node, ...node.children.flatMap(all)] : []);
const words = (node) => (node instanceof Element ? node.children.map(words).join("") : String(node));

const few = process.argv[2] === "--few"; // the default and Break it, three steps of each, one width
let drawn = 0;
for (const name of process.argv.slice(few ? 3 : 2)) {
  const spec = JSON.parse(readFileSync(new URL(`controls/${name}.json`, root)));
  const { simulate } = await import(new URL(`sims/${name}.mjs`, root));
  const view = await import(new URL(`views/${name}.mjs`, root));
  const start = { ...spec.fixed, ...spec.default }, states = [{}, ...spec.presets.slice(few ? -1 : 0).map((preset) => preset.params)];
  for (const { name: control, values } of few ? [] : spec.controls) states.push(...[values[0], values.at(-1)].map((value) => ({ [control]: value })));
  for (const state of states) {
    const params = { ...start, ...state }, trace = simulate(params), before = JSON.stringify(trace), steps = view.steps(trace);
    const some = new Set(few ? [0, steps >> 1, steps - 1] : [0, 1, steps - 2, steps - 1, ...Array.from({ length: 5 }, (_, i) => Math.floor((i * steps) / 5))]);
    for (const width of few ? [320] : [320, 720]) for (const index of some) {
      if (index < 0 || index >= steps) continue;
      const where = `${name} ${JSON.stringify(state)} at ${index}, width ${width}`;
      try {
        const { picture, text } = view.draw(trace, index, { ...pictures, width, params });
        const nodes = [picture].flat().flatMap(all), shown = text + [picture].flat().map(words).join(" ");
        const numbers = nodes.flatMap((node) => Object.values(node.attributes));
        const broken = [...numbers, shown].find((value) => /NaN|undefined|Infinity|\[object/.test(value));
        if (broken) console.log(`${where}: ${broken.slice(0, 200)}`);
        const inked = nodes.some((node) => /^line: /.test(words(node))); // its legend says what the line in ink is
        const red = nodes.find((node) => node.tag === "line" && /\bred\b/.test(node.attributes.class));
        if (inked && red) console.log(`${where}: a red line, which the legend does not know`);
        if (!text || !nodes.length) console.log(`${where}: nothing to see or nothing to hear`);
        drawn += 1;
      } catch (error) {
        console.log(`${where}: ${error.stack.split("\n").slice(0, 3).join(" ")}`);
      }
    }
    if (JSON.stringify(trace) !== before) console.log(`${name} ${JSON.stringify(state)}: the view changed the trace`);
  }
}
console.log(`drawn ${drawn}`);
