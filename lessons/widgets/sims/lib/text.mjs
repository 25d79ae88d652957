// Python's ways to write numbers and strings, for the texts under the pictures: byte for byte what `describe` writes.

/** f"{n:,}" of an integer. */
export function comma(n) {
  return String(n).replace(/\B(?=(\d{3})+$)/g, ",");
}

// JavaScript prints a number that lies halfway between two decimals as the larger one, Python as the even one.
const MORE = 50; // digits that show whether it does
const tie_to_even = (exact) => /[02468]\.?$/.test(exact.slice(0, -MORE)) && /^50*$/.test(exact.slice(-MORE));

/** f"{x:,.{digits}f}" */
export function fixed(x, digits) {
  const exact = x.toFixed(digits + MORE);
  const [whole, rest] = (tie_to_even(exact) ? exact.slice(0, -MORE) : x.toFixed(digits)).split(".");
  return rest ? `${comma(whole)}.${rest}` : comma(whole);
}

/** f"{x:.{digits}e}", as [mantissa, exponent]. */
function exponential(x, digits) {
  const [exact, exponent] = x.toExponential(digits + MORE).split("e");
  return tie_to_even(exact) ? [exact.slice(0, -MORE), exponent] : x.toExponential(digits).split("e");
}

/** f"{x:.{digits}e}": an exponent has at least two digits. */
export function scientific(x, digits) {
  const [mantissa, exponent] = exponential(x, digits);
  return `${mantissa}e${signed(exponent)}`;
}

/** f"{x:.{digits}g}": that many significant digits, without zeros at the end. */
export function general(x, digits) {
  const [mantissa, exponent] = exponential(x, digits - 1);
  const plain = exponent >= -4 && exponent < digits;
  return plain ? String(Number(`${mantissa}e${exponent}`)) : `${Number(mantissa)}e${signed(exponent)}`;
}

function signed(exponent) {
  return (exponent < 0 ? "-" : "+") + String(Math.abs(exponent)).padStart(2, "0");
}

/** repr() of a string of printable ASCII. */
export function repr(text) {
  const quote = text.includes("'") && !text.includes('"') ? '"' : "'";
  return quote + text.replaceAll("\\", "\\\\").replaceAll(quote, `\\${quote}`) + quote;
}

export function sum(numbers) {
  return numbers.reduce((total, n) => total + n, 0);
}

/** [start, stop), as Python's range. */
export function range(start, stop, step = 1) {
  const numbers = [];
  for (let i = start; i < stop; i += step) numbers.push(i);
  return numbers;
}

/** ⌈a / b⌉ of integers. */
export function ceil_div(a, b) {
  return Math.floor((a + b - 1) / b);
}
