// SHA-256 (FIPS 180-4), synchronous: crypto.subtle is neither that nor present on every page.

/** The first 32 bits of the fractional parts of the square or cube roots of the first primes: no magic numbers. */
function fractions(count, root) {
  const primes = [];
  for (let n = 2; primes.length < count; n++) if (primes.every((p) => n % p > 0)) primes.push(n);
  return primes.map((p) => Math.floor((p ** (1 / root) % 1) * 2 ** 32));
}

const START = fractions(8, 2);
const K = fractions(64, 3);
const rotate = (x, n) => (x >>> n) | (x << (32 - n));

/** The message, a 1 bit, zeros, and its length in bits: whole blocks of 64 bytes. */
function padded(bytes) {
  const size = 64 * Math.ceil((bytes.length + 9) / 64);
  const message = new Uint8Array(size);
  message.set(bytes);
  message[bytes.length] = 0x80;
  new DataView(message.buffer).setUint32(size - 4, 8 * bytes.length);
  return new DataView(message.buffer);
}

/** The digest of bytes (an array or Uint8Array), as an array of 32 bytes. */
export function sha256(bytes) {
  const message = padded(bytes);
  const state = [...START];
  const w = new Uint32Array(64);
  for (let block = 0; block < message.byteLength; block += 64) {
    for (let i = 0; i < 16; i++) w[i] = message.getUint32(block + 4 * i);
    for (let i = 16; i < 64; i++) {
      const s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ (w[i - 15] >>> 3);
      const s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ (w[i - 2] >>> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    let [a, b, c, d, e, f, g, h] = state;
    for (let i = 0; i < 64; i++) {
      const mix_e = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25);
      const choice = (e & f) ^ (~e & g);
      const t1 = (h + mix_e + choice + K[i] + w[i]) | 0;
      const mix_a = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22);
      const majority = (a & b) ^ (a & c) ^ (b & c);
      [h, g, f, e, d, c, b, a] = [g, f, e, (d + t1) | 0, c, b, a, (t1 + mix_a + majority) | 0];
    }
    [a, b, c, d, e, f, g, h].forEach((x, i) => {
      state[i] = (state[i] + x) | 0;
    });
  }
  return state.flatMap((x) => [x >>> 24, (x >>> 16) & 255, (x >>> 8) & 255, x & 255]);
}

export function hex(bytes) {
  return bytes.map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** The UTF-8 bytes of a text of ASCII. */
export function ascii(text) {
  return [...text].map((c) => c.charCodeAt(0));
}
