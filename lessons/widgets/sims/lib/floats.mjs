// How a machine rounds. Math.fround is single precision; here is what JavaScript does not have.

/** The nearest integer, a tie to the even one: Python's round(), torch's round(). */
export function half_even(x) {
  const below = Math.floor(x);
  const up = x - below > 0.5 || (x - below === 0.5 && below % 2 !== 0);
  return below + (up ? 1 : 0);
}

/** The nearest half-precision number of a single-precision one: 11 bits, none below 2^-24, ties to even. */
export function round_to_fp16(x) {
  if (x === 0 || !Number.isFinite(x)) return x;
  const exponent = Math.max(-14, Math.floor(Math.log2(Math.abs(x))));
  const unit = 2 ** (exponent - 10);
  const rounded = half_even(x / unit) * unit; // the division is exact: a power of two
  return Math.abs(rounded) > 65504 ? Math.sign(x) * Infinity : rounded;
}
