// One row of eight scores through the online softmax, tile by tile, every result rounded: the twin of `simulate` in
// lessons/numbers/03_flash_attention.py.
import { round_to_fp16 } from "./lib/floats.mjs";
import { general, fixed, range, scientific } from "./lib/text.mjs";

const ORDERS = {
  increasing: [0, 1, 2, 3, 4, 5, 6, 7],
  decreasing: [7, 6, 5, 4, 3, 2, 1, 0],
  shuffled: [3, 6, 0, 5, 1, 7, 2, 4],
  spike: [0, 0, 0, 0, 0, 0, 7, 0],
};
const EPS = { fp32: 2 ** -23, fp16: 2 ** -10 }; // between 1 and the next number

const ROUND = { fp32: Math.fround, fp16: (x) => round_to_fp16(Math.fround(x)) };

/** Counts the floats that are read from device memory and written to it. What stays on chip is free. */
class HBM {
  constructor() {
    this.floats = 0;
  }

  load(x) {
    this.floats += x.length;
    return x;
  }

  store(x) {
    return this.load(x);
  }
}

/** The whole softmax in doubles, in three passes over memory; `hbm` counts what they move. */
function naive_attention(q, keys, values, hbm) {
  const [query] = hbm.load([q]);
  const scores = hbm.store(hbm.load(keys).map((k) => query * k));
  const largest = Math.max(...hbm.load(scores));
  const weights = hbm.store(scores.map((s) => Math.exp(s - largest)));
  const total = weights.reduce((a, b) => a + b);
  hbm.load(values);
  const [out] = hbm.store([hbm.load(weights).reduce((o, w, i) => o + w * values[i], 0) / total]);
  return out;
}

/**
 * Per tile, with s = q·k:  m' = max(m, max s)   α = exp(m − m')   p = exp(s − m')   ℓ' = α·ℓ + Σ p   O' = α·O + Σ p·v
 * Returns O / ℓ and, per tile, (m, ℓ, O) before and after.
 */
function online_softmax(q, keys, values, { tile, rescale, subtract_max, precision }, hbm) {
  const r = ROUND[precision];
  [q] = hbm.load([r(q)]);
  let m = -Infinity;
  let l = 0;
  let o = 0;
  const trace = [];
  for (let start = 0; start < keys.length; start += tile) {
    const k = hbm.load(keys.slice(start, start + tile));
    const v = hbm.load(values.slice(start, start + tile));
    const s = k.map((x) => r(q * x));
    const m_new = subtract_max ? Math.max(m, ...s) : 0;
    const alpha = rescale && subtract_max ? r(Math.exp(m - m_new)) : 1;
    const p = s.map((x) => r(Math.exp(r(x - m_new))));
    const before = { m, l, o };
    l = r(alpha * l);
    o = r(alpha * o);
    m = m_new;
    p.forEach((weight, i) => {
      l = r(l + weight);
      o = r(o + r(weight * v[i]));
    });
    trace.push({
      start, stop: start + s.length, scores: s, before, alpha, weights: p, after: { m, l, o }, hbm_floats: hbm.floats,
    });
  }
  const [result] = hbm.store([r(o / l)]);
  return [result, trace];
}

/** What each key that has been read weighs by now: its weight, times every α since. */
function shares(tiles, stop) {
  let now = [];
  for (const { start, alpha, weights } of tiles) {
    if (start < stop) now = [...now.map((share) => share * alpha), ...weights];
  }
  return now;
}

const dot = (a, b) => a.reduce((total, x, i) => total + x * b[i], 0);

function verdict_of(params, keys, values) {
  const [result] = online_softmax(params.scale, keys, values, params, new HBM());
  const expected = naive_attention(params.scale, keys, values, new HBM());
  const allowed = ((4 * keys.length * EPS[params.precision]) / 2) * expected; // four roundings a key
  return Number.isNaN(result) ? "not a number" : Math.abs(result - expected) <= allowed ? "right" : "wrong";
}

export function simulate(params) {
  const keys = ORDERS[params.order];
  const values = range(1, 9);
  const hbm = new HBM();
  const naive_hbm = new HBM();
  const [result, tiles] = online_softmax(params.scale, keys, values, params, hbm);
  const expected = naive_attention(params.scale, keys, values, naive_hbm);
  for (const tile of tiles) {
    const seen = tiles.flatMap(({ scores }) => scores).slice(0, tile.stop);
    const due = seen.map((s) => Math.exp(s - Math.max(...seen)));
    tile.due = due;
    tile.now = shares(tiles, tile.stop);
    const exact = dot(due, values) / dot(due, due.map(() => 1));
    tile.mean = [tile.after.o / tile.after.l, Number(exact.toFixed(9))];
  }
  const verdicts = {};
  for (const [order, row] of Object.entries(ORDERS)) verdicts[order] = verdict_of(params, row, values);
  return finite({
    params, keys, values, tiles, result, expected: Number(expected.toFixed(9)),
    verdict: verdicts[params.order], verdicts,
    passing: Object.values(verdicts).filter((verdict) => verdict === "right").length,
    growths: tiles.slice(1).filter((tile) => tile.after.m > tile.before.m).length,
    largest: Math.max(...tiles.flatMap((tile) => tile.scores.map(Math.abs))),
    hbm_floats: { online: hbm.floats, naive: naive_hbm.floats },
  });
}

/** JSON has no infinities: they become the words inf, -inf and nan. */
function finite(value) {
  if (Array.isArray(value)) return value.map(finite);
  if (typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, finite(v)]));
  if (typeof value !== "number" || Number.isFinite(value)) return value;
  return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

function number(x) {
  if (typeof x === "string") return x;
  return x === 0 || (Math.abs(x) >= 0.001 && Math.abs(x) < 1e5) ? general(x, 4) : scientific(x, 2);
}

export function describe(trace) {
  const p = trace.params;
  const deleted = [...(p.rescale ? [] : ["rescale"]), ...(p.subtract_max ? [] : ["max"])];
  const without = deleted.length > 0 ? `, without ${deleted.join(" and ")}` : "";
  const lines = [`scores ${p.scale} × ${p.order}, tiles of ${p.tile}, ${p.precision}${without}`];
  for (const { start, stop, before, after, alpha } of trace.tiles) {
    lines.push(
      `  keys ${start}–${stop - 1}: m ${number(before.m).padStart(5)} → ${number(after.m).padEnd(5)}` +
        ` α ${number(alpha).padEnd(8)} ℓ ${number(after.l).padEnd(8)} O ${number(after.o)}`,
    );
  }
  const shown = typeof trace.result === "string" ? trace.result : fixed(trace.result, 3);
  let excuse = ""; // why a deleted line did no harm
  if (deleted.length > 0 && trace.verdict === "right") {
    excuse = p.subtract_max
      ? " (the maximum never grew after the first tile)"
      : ` (the largest score, ${general(trace.largest, 6)}, is within exp's range)`;
  }
  lines.push(`O / ℓ = ${shown}, softmax says ${fixed(trace.expected, 3)}: ${trace.verdict}${excuse}`);
  lines.push(`the four orders: ${Object.entries(trace.verdicts).map((pair) => pair.join(" ")).join(", ")}`);
  lines.push(`floats through HBM: ${trace.hbm_floats.online}, unfused ${trace.hbm_floats.naive}`);
  return lines.join("\n");
}
