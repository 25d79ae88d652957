// Companion 04b's random numbers (vllm/engine/sampling/sampler.py): SplitMix64 as a hash of a seed and a count.

const MASK = (1n << 64n) - 1n;
const STEP = 0x9e3779b97f4a7c15n;

function mix(x) {
  x = (x + STEP) & MASK;
  x = ((x ^ (x >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
  x = ((x ^ (x >> 27n)) * 0x94d049bb133111ebn) & MASK;
  return x ^ (x >> 31n);
}

/** The first `count` numbers in [0, 1) of a seed. There is no state to carry: each is a hash of its place. */
export function uniforms(seed, count) {
  const start = mix(BigInt(seed));
  return Array.from({ length: count }, (_, i) => Number(mix((start + BigInt(i) * STEP) & MASK) >> 12n) * 2 ** -52);
}
