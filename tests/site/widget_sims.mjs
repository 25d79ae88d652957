// Compares a lesson's simulation in JavaScript with what Python computed, state by state, in one process.
//
//   node tests/site/widget_sims.mjs all|first SIM.mjs STATES.ndjson [SIM.mjs STATES.ndjson ...]
//
// Each line of STATES is {"params", "trace", "text"} as Python wrote it. Prints one JSON line per pair:
// {"sim", "states", "differences", "seconds", "first": {"params", "where", "python", "javascript"} or null}.
// With `first` it looks no further than the first difference.
import { closeSync, openSync, readSync } from "node:fs";
import { resolve } from "node:path";
import { performance } from "node:perf_hooks";
import { pathToFileURL } from "node:url";

/** Whole numbers are equal, or not. In others the last bits are the machine's: pow, and how Python adds floats. */
function same_number(a, b) {
  if (typeof a !== "number" || typeof b !== "number" || Number.isInteger(a)) return Object.is(a, b);
  return Math.abs(a - b) <= 1e-12 * Math.abs(a);
}

/** The path of the first difference between two JSON values, as a list of names, or null. */
function difference(python, javascript) {
  if (same_number(python, javascript)) return null;
  const objects = typeof python === "object" && typeof javascript === "object" && python !== null && javascript !== null;
  if (!objects || Array.isArray(python) !== Array.isArray(javascript)) return [];
  if (Array.isArray(python)) {
    if (python.length !== javascript.length) return ["length"];
    for (let i = 0; i < python.length; i++) {
      const found = difference(python[i], javascript[i]);
      if (found) return [i, ...found];
    }
    return null;
  }
  for (const name of Object.keys(python)) {
    if (!Object.hasOwn(javascript, name)) return [name];
    const found = difference(python[name], javascript[name]);
    if (found) return [name, ...found];
  }
  const more = Object.keys(javascript).find((name) => !Object.hasOwn(python, name));
  return more === undefined ? null : [more];
}

const at = (value, path) => path.split(".").reduce((inner, name) => inner?.[name], value);

/** The lines of a file, a piece at a time: traces of a whole lesson can be larger than the longest string. */
function* lines(path) {
  const file = openSync(path, "r");
  const piece = Buffer.alloc(1 << 22);
  let rest = Buffer.alloc(0);
  for (let n = readSync(file, piece); n > 0; n = readSync(file, piece)) {
    rest = Buffer.concat([rest, piece.subarray(0, n)]);
    let start = 0;
    for (let end = rest.indexOf(10, start); end >= 0; end = rest.indexOf(10, start)) {
      yield rest.toString("utf8", start, end);
      start = end + 1;
    }
    rest = rest.subarray(start);
  }
  closeSync(file);
}

/** What JavaScript makes of a state. Through JSON, as the page gets it: no undefined, no NaN, no shared objects. */
function run(sim, params) {
  try {
    const trace = JSON.parse(JSON.stringify(sim.simulate(params)));
    return { trace, text: sim.describe(trace) };
  } catch (error) {
    return { trace: `${error}`, text: "" };
  }
}

async function compare(path, states) {
  const sim = await import(pathToFileURL(resolve(path)));
  const result = { sim: path, states: 0, differences: 0, seconds: 0, first: null };
  for (const line of lines(states)) {
    const { params, ...python } = JSON.parse(line);
    const start = performance.now();
    const javascript = run(sim, structuredClone(params));
    result.seconds += (performance.now() - start) / 1000;
    result.states += 1;
    const found = difference(python, javascript);
    if (found) {
      const where = found.join(".");
      result.differences += 1;
      result.first ??= { params, where, python: at(python, where) ?? null, javascript: at(javascript, where) ?? null };
      if (how_far === "first") break;
    }
  }
  return result;
}

const [how_far, ...files] = process.argv.slice(2);
for (let i = 0; i < files.length; i += 2) {
  console.log(JSON.stringify(await compare(files[i], files[i + 1])));
}
