// Eight keys of sixteen channels, rotated or not, stored in few bits, and looked for: the twin of `simulate` in
// lessons/numbers/05d_kv_cache_quantization.py and of the codes in vllm/engine/quantization/kv_codes.py.
// `f` rounds wherever torch does.
import { half_even, round_to_fp16 } from "./lib/floats.mjs";
import { fixed, range } from "./lib/text.mjs";

const f = Math.fround;
const CHANNELS = 16;
const TOKENS = 8;

// Keys of −2 … 2 (as digits 0 … 4), and the query that finds each: the key before noise, and blind to channel 5.
const KEY_DIGITS = [
  "2133004420342210", "3021240243342120", "1240433222403221", "3204320332313213",
  "3410122212412200", "4342234302432022", "2423420340221242", "4430203234303022",
];
const QUERY_SIGNS = [
  "--++-0++--+++---", "+----0-++++++-+-", "--+-+0+++++-+-+-", "+--++0-++-+-+--+",
  "++---0++--+-----", "+++--0++-++++-++", "-++++0-++-+--+++", "+++--0+++++-+-++",
];
const ROTATION_SIGNS = [1, -1, 1, 1, -1, -1, -1, 1, -1, -1, 1, -1, 1, -1, -1, -1]; // drawn once by torch, seed 5

const transposed = (rows) => rows[0].map((_, j) => rows.map((row) => row[j]));
const milli = (x) => half_even(x * 1000) + 0; // + 0: there is no −0 in JSON

/** Σ a·b, added up from the left. */
function dot(a, b) {
  return a.reduce((total, x, i) => f(total + f(x * b[i])), 0);
}

/** Each row of x times the matrix whose columns are given. */
function times(x, columns) {
  return x.map((row) => columns.map((column) => dot(row, column)));
}

/** Sylvester's Hadamard matrix over √16, with a sign in front of each row: orthogonal, every entry ±1/4. */
function rotation() {
  const ones = (n) => range(0, 5).filter((bit) => (n >> bit) & 1).length;
  const entry = (i, j) => (ROTATION_SIGNS[i] * (-1) ** ones(i & j)) / 4;
  return range(0, CHANNELS).map((i) => range(0, CHANNELS).map((j) => entry(i, j)));
}

/** Keys with what the preset adds, and the query for each. */
function keys_and_queries(preset) {
  const keys = KEY_DIGITS.map((row) => [...row].map((digit) => Number(digit) - 2));
  const queries = QUERY_SIGNS.map((row) => [...row].map((sign) => "-0+".indexOf(sign) - 1));
  const two = preset === "two outlier channels";
  range(0, TOKENS).forEach((t) => {
    if (two || preset === "outlier channel") keys[t][5] += 60;
    if (two) keys[t][12] -= 45;
    if (two) queries[t][12] = 0;
  });
  if (preset === "outlier token") keys[0] = keys[0].map((x) => 10 * x);
  return [keys, queries];
}

/** A group's codes, its scale and its middle. Both are rounded to fp16 first, so that the codes fit what is stored. */
function quantize(group, bits) {
  const top = 2 ** bits - 1;
  const [low, high] = [Math.min(...group), Math.max(...group)];
  const scale = round_to_fp16(f(f(Math.max(f(high - low), 1e-5)) / top));
  const mid = round_to_fp16(f(f(low + high) * 0.5));
  const place = (x) => f(f(f(x - mid) / scale) + top / 2);
  return { codes: group.map((x) => half_even(Math.min(Math.max(place(x), 0), top))), scale, mid };
}

/** scale · (code − top / 2) + mid */
function dequantize(code, { scale, mid }, bits) {
  return f(f((code - (2 ** bits - 1) / 2) * scale) + mid);
}

const best = (scores) => scores.indexOf(Math.max(...scores)); // of equals the first

export function simulate(params) {
  const { bits, needle } = params;
  const per_channel = params.group === "channel";
  const turned = (rows) => (per_channel ? transposed(rows) : rows);
  const [keys, queries] = keys_and_queries(params.keys);
  const R = rotation();
  const stored = params.rotation ? times(keys, transposed(R)) : keys;
  const groups = turned(stored).map((group) => quantize(group, bits));
  const read = turned(groups.map((group) => group.codes.map((code) => dequantize(code, group, bits))));
  const restored = params.rotation ? times(read, R) : read; // a row of R is a column of its inverse
  const scores = [keys, restored].map((found) => times(queries, found));
  const [should_each, finds_each] = scores.map((rows) => rows.map(best));
  const errors = restored.flatMap((row, t) => row.map((x, c) => Math.abs(f(x - keys[t][c]))));
  return {
    params,
    keys,
    query: queries[needle],
    stored_milli: stored.map((row) => row.map(milli)),
    codes: turned(groups.map((group) => group.codes)),
    scale_milli: groups.map((group) => milli(group.scale)),
    mid_milli: groups.map((group) => milli(group.mid)),
    levels_milli: groups.map((group) => range(0, 2 ** bits).map((code) => milli(dequantize(code, group, bits)))),
    restored_milli: restored.map((row) => row.map(milli)),
    largest_error_milli: milli(Math.max(...errors)),
    scores: scores[0][needle],
    restored_scores_milli: scores[1][needle].map(milli),
    should_find: should_each[needle],
    finds: finds_each[needle],
    should_each,
    finds_each,
    found: should_each.filter((key, i) => key === finds_each[i]).length,
    bytes_bf16: 2 * TOKENS * CHANNELS,
    bytes: (TOKENS * CHANNELS * bits) / 8 + 4 * groups.length, // codes; a scale and a middle of two bytes each
  };
}

export function describe(trace) {
  const { keys, bits, rotation: rotated, group, needle } = trace.params;
  const row = (values) => values.map((x) => String(x).padStart(6)).join("");
  const tenth = (x) => fixed(x / 1000, 1);
  const wrong = trace.finds === trace.should_find ? "" : `, WRONG: should be ${trace.should_find}`;
  return [
    `${keys}; ${bits} bits, ${rotated ? "rotated, " : ""}one scale per ${group}: ` +
      `${trace.bytes} bytes instead of ${trace.bytes_bf16}`,
    `key ${needle}    ${row(trace.keys[needle])}`,
    `stored   ${row(trace.stored_milli[needle].map(tenth))}`,
    `codes    ${row(trace.codes[needle])}`,
    `restored ${row(trace.restored_milli[needle].map(tenth))}`,
    `largest error of any key: ${tenth(trace.largest_error_milli)}`,
    `scores   ${row(trace.scores)}`,
    `now      ${row(trace.restored_scores_milli.map(tenth))}   finds key ${trace.finds}${wrong}`,
  ].join("\n");
}
