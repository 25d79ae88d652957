// 32 weights rounded to the grid of a number format, group by group, in single precision: the twin of `simulate` in
// lessons/numbers/05b_quantization.py and of the formats in engine/quantization/formats.py. `f` rounds as torch does.
import { half_even, round_to_fp16 } from "./lib/floats.mjs";
import { fixed, general, range, sum } from "./lib/text.mjs";

const f = Math.fround;
const BELL = [4, 12, 20, 28, 36, 45, 53, 63, 72, 83, 95, 108, 123, 142, 168, 215]; // upper half, in thousandths
const OUTLIER = 30; // its rank: the second largest

const FORMATS = {
  "int4-g32": { grid: "int", bits: 4, scale: "fp16", zero: "int" },
  "int3-g64": { grid: "int", bits: 3, scale: "fp16", zero: "int" },
  int8: { grid: "int", bits: 8, scale: "fp32", zero: null },
  q4_1: { grid: "int", bits: 4, scale: "fp16", zero: "min" },
  fp8: { grid: "e4m3", bits: 8, scale: "fp32", zero: null },
  mxfp4: { grid: "e2m1", bits: 4, scale: "e8m0", zero: null },
  nvfp4: { grid: "e2m1", bits: 4, scale: "e4m3", zero: null },
};
const MINIFLOATS = {
  e4m3: { exponent_bits: 4, mantissa_bits: 3, bias: 7, largest: 448 },
  e2m1: { exponent_bits: 2, mantissa_bits: 1, bias: 1, largest: 6 },
};
const SCALE_BITS = { fp32: 32, fp16: 16, e8m0: 8, e4m3: 8 };

const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const millionths = (x) => half_even(x * 1e6) + 0; // + 0: there is no −0 in JSON

/** Values of the codes 0, 1, 2, … without a sign, ascending. */
function minifloat_values(kind) {
  const { exponent_bits, mantissa_bits, bias, largest } = MINIFLOATS[kind];
  const values = range(0, 2 ** (exponent_bits + mantissa_bits)).map((code) => {
    const exponent = code >> mantissa_bits;
    const mantissa = code % 2 ** mantissa_bits;
    const hidden = exponent > 0 ? 2 ** mantissa_bits : 0; // exponent 0: subnormal
    return (hidden + mantissa) * 2 ** (Math.max(exponent, 1) - bias - mantissa_bits);
  });
  return values.filter((value) => value <= largest);
}

const VALUES = { e4m3: minifloat_values("e4m3"), e2m1: minifloat_values("e2m1") };

/** The code of the nearest value: a tie to the even code, what is too large to the largest value. */
function encode_minifloat(x, kind) {
  const values = VALUES[kind];
  const size = Math.abs(x);
  let code = 0;
  while (code + 1 < values.length) {
    const middle = (values[code] + values[code + 1]) / 2;
    if (size < middle || (size === middle && code % 2 === 0)) break;
    code += 1;
  }
  const { exponent_bits, mantissa_bits } = MINIFLOATS[kind];
  return code + (x < 0 ? 2 ** (exponent_bits + mantissa_bits) : 0);
}

function decode_minifloat(code, kind) {
  const { exponent_bits, mantissa_bits } = MINIFLOATS[kind];
  const sign = 2 ** (exponent_bits + mantissa_bits);
  return (code >= sign ? -1 : 1) * VALUES[kind][code % sign];
}

/** The e with 2^(e − 1) <= x < 2^e. */
function binary_exponent(x) {
  let exponent = Math.floor(Math.log2(x)) + 1;
  while (2 ** exponent <= x) exponent += 1;
  while (2 ** (exponent - 1) > x) exponent -= 1;
  return exponent;
}

/** What one code of 1 would have to stand for, so that the group's extremes just fit on the grid. */
function span_of(group, format) {
  const size = Math.max(...group.map(Math.abs));
  if (format.grid !== "int") return f(size / MINIFLOATS[format.grid].largest);
  if (format.zero === null) return f(size / (2 ** (format.bits - 1) - 1));
  const [low, high] = extremes(group, format);
  return f(f(high - low) / (2 ** format.bits - 1));
}

function extremes(group, { zero }) {
  const [low, high] = [Math.min(...group), Math.max(...group)];
  return zero === "int" ? [Math.min(low, 0), Math.max(high, 0)] : [low, high]; // zero itself stays representable
}

/** The scale of each group, as the number that its stored form stands for. */
function scales_of(groups, format) {
  const spans = groups.map((group) => span_of(group, format));
  if (format.scale === "fp32") return spans;
  if (format.scale === "fp16") return spans.map((span) => round_to_fp16(Math.max(span, 2 ** -24)));
  if (format.scale === "e8m0") { // the exponent of the largest weight less the grid's: what then exceeds it saturates
    const largest = binary_exponent(MINIFLOATS[format.grid].largest);
    return groups.map((group) => 2 ** (binary_exponent(Math.max(...group.map(Math.abs))) - largest));
  }
  const tensor_scale = f(Math.max(...spans) / MINIFLOATS.e4m3.largest); // the largest scale of all becomes 448
  const codes = spans.map((span) => Math.max(1, encode_minifloat(f(span / tensor_scale), "e4m3")));
  return codes.map((code) => f(decode_minifloat(code, "e4m3") * tensor_scale));
}

/** The zero point of a group: a code, the least weight ("min"), or nothing. */
function zero_of(group, scale, format) {
  const [low] = extremes(group, format);
  if (format.zero === "int") return clamp(half_even(f(-low / scale)), 0, 2 ** format.bits - 1);
  return format.zero === "min" ? round_to_fp16(low) : 2 ** (format.bits - 1);
}

function encode(w, scale, zero, format) {
  if (format.grid !== "int") return encode_minifloat(f(w / scale), format.grid);
  const q = format.zero === "min" ? half_even(f(f(w - zero) / scale)) : half_even(f(w / scale)) + zero;
  return clamp(q, 0, 2 ** format.bits - 1);
}

function decode(code, scale, zero, format) {
  if (format.grid !== "int") return f(decode_minifloat(code, format.grid) * scale);
  return format.zero === "min" ? f(f(code * scale) + zero) : f((code - zero) * scale);
}

/** Every number that a weight of this group can become, ascending. */
function levels_of(scale, zero, format) {
  const finite = format.grid === "int" ? Infinity : VALUES[format.grid].length; // e4m3's last codes mean NaN
  const codes = range(0, 2 ** format.bits).filter((code) => code % 2 ** (format.bits - 1) < finite);
  const levels = new Set(codes.map((code) => decode(code, scale, zero, format)));
  return [...levels].sort((a, b) => a - b);
}

/** The weights as they lie in the matrix, shuffled, in thousandths. */
function weights_of(outlier) {
  const bell = [...BELL.map((x) => -x).reverse(), ...BELL];
  return range(0, 32).map((i) => bell[(13 * i) % 32] * ((13 * i) % 32 === OUTLIER ? outlier : 1));
}

export function simulate(params) {
  const format = FORMATS[params.format];
  const weights = weights_of(params.outlier);
  const w = weights.map((weight) => f(weight / 1000));
  const groups = range(0, 32, params.group).map((start) => w.slice(start, start + params.group));
  const scales = scales_of(groups, format);
  const zeros = groups.map((group, g) => zero_of(group, scales[g], format));
  const codes = groups.flatMap((group, g) => group.map((x) => encode(x, scales[g], zeros[g], format)));
  const of = (i) => Math.floor(i / params.group);
  const decoded = codes.map((code, i) => decode(code, scales[of(i)], zeros[of(i)], format));
  const errors = decoded.map((x, i) => Math.abs(x - w[i]));
  const beside = SCALE_BITS[format.scale] + { none: 0, int: format.bits, min: 16 }[format.zero ?? "none"];
  return {
    params,
    bits_per_weight_thousandths: half_even(1000 * (format.bits + beside / params.group)),
    weights,
    codes,
    scale_millionths: scales.map(millionths),
    levels_millionths: scales.map((scale, g) => levels_of(scale, zeros[g], format).map(millionths)),
    decoded_millionths: decoded.map(millionths),
    worst_error_millionths: millionths(Math.max(...errors)),
    mean_error_millionths: millionths(sum(errors) / 32),
    zeroed: decoded.filter((x, i) => x === 0 && w[i] !== 0).length,
    distinct: new Set(decoded).size,
  };
}

export function describe(trace) {
  const { format, group, outlier } = trace.params;
  const bits = general(trace.bits_per_weight_thousandths / 1000, 6);
  const lines = [`${format}, groups of ${group}, outlier × ${outlier}: ${bits} bits per weight`];
  for (const start of [0, 8]) {
    const row = (values, form) => values.slice(start, start + 8).map((x) => form(x).padStart(6)).join(" ");
    lines.push(`weight ${row(trace.weights, (x) => fixed(x / 1000, 3))}`);
    lines.push(`code   ${row(trace.codes, String)}`);
    lines.push(`means  ${row(trace.decoded_millionths, (x) => fixed(x / 1e6, 3))}`);
  }
  lines.push(`scale  ${trace.scale_millionths.map((x) => fixed(x / 1e6, 4).padStart(6)).join(" ")}`);
  lines.push(`${trace.distinct} distinct values; ${trace.zeroed} of 32 weights lost to zero`);
  const [mean, worst] = [trace.mean_error_millionths, trace.worst_error_millionths].map((x) => fixed(x / 1e6, 4));
  lines.push(`error: mean ${mean}, worst ${worst}`);
  return lines.join("\n");
}
