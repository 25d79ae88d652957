// A decode step of SmolLM2 by arithmetic, from the naive batch to the final one: the twin of `simulate` in
// lessons/numbers/04c_speed.py. Python counts the operations as torch runs them; here stands what it has counted.
import { fixed, sum } from "./lib/text.mjs";

const MACHINES = { // FLOP/s with packed weights, FLOP/s without, bytes/s, seconds until an operation has begun
  "two CPU cores": [3e11, 1.1e11, 4e10, 6e-6],
  "a GPU": [6e13, 6e13, 3.35e12, 5e-6],
};
const WEIGHTS = 134_515_008;
const LAYERS = 30;
const KV_BYTES_PER_TOKEN = 46_080; // fp32: 2 × 30 layers × 3 heads × 64 × 4

// Operations of a layer, those for each sequence on top of them, and those outside the layers.
const STAGES = [
  { name: "a batch, attention in a loop", layer: 25, per_sequence: 5, outside: 25, copies: 3, packed: false },
  { name: "attention for all at once", layer: 27, per_sequence: 0, outside: 54, copies: 3, packed: false },
  { name: "q, k, v in one product", layer: 22, per_sequence: 0, outside: 54, copies: 3, packed: false },
  { name: "arrays, not lists", layer: 22, per_sequence: 0, outside: 37, copies: 3, packed: false },
  { name: "weights packed", layer: 22, per_sequence: 0, outside: 37, copies: 3, packed: true },
  { name: "keys and values in place", layer: 23, per_sequence: 0, outside: 37, copies: 1, packed: true },
];

const microseconds = (seconds) => Math.round(seconds * 1e6);

export function simulate(params) {
  const { machine, batch, context, weight_bytes } = params;
  const [packed_rate, unpacked_rate, bandwidth, overhead] = MACHINES[machine];
  const kv_bytes = batch * context * KV_BYTES_PER_TOKEN;
  const multiply = (rate) => microseconds((2 * WEIGHTS * batch) / rate);
  const read_bytes = weight_bytes * WEIGHTS;
  const read = microseconds(read_bytes / bandwidth);
  const floor = Math.max(multiply(packed_rate), read);
  const stages = STAGES.map(({ name, layer, per_sequence, outside, copies, packed }) => {
    const per_layer = layer + per_sequence * batch;
    const operations = per_layer * LAYERS + outside;
    const multiply_us = multiply(packed ? packed_rate : unpacked_rate);
    const parts_us = { // weights are read while rows are multiplied: the longer of the two counts
      products: Math.max(multiply_us, read),
      attention: microseconds((copies * kv_bytes) / bandwidth),
      operations: microseconds(operations * overhead),
    };
    const total_us = sum(Object.values(parts_us));
    return {
      name, per_layer, outside, operations, per_sequence, copies, multiply_us,
      bound: multiply_us > read ? "arithmetic" : "memory", parts_us, total_us,
      tokens_per_second: (batch * 1e6) / total_us, share_of_floor: floor / total_us,
    };
  });
  const gains = stages.map(({ total_us }, i) => (i > 0 ? stages[i - 1].total_us / total_us : 0));
  const gain = stages[0].total_us / stages.at(-1).total_us;
  return {
    params, gain, best: stages[gains.indexOf(Math.max(...gains))].name,
    layers: LAYERS, overhead_us: microseconds(overhead), kv_bytes, read_bytes, read_us: read, floor_us: floor,
    stages,
  };
}

const ms = (us) => fixed(us / 1e3, 2);

export function describe({ params: p, stages, floor_us }) {
  const columns = ["products", "attention", "operations", "total", "tokens/s", "of the floor"];
  const widths = [8, 11, 12, 9, 10, 14];
  const row = (name, cells) => name.padEnd(29) + cells.map((cell, i) => cell.padStart(widths[i])).join("");
  return [
    `batch ${p.batch}, context ${p.context}, ${p.machine}, ${p.weight_bytes}-byte weights`,
    row("ms a step", columns),
    ...stages.map(({ name, parts_us, total_us, tokens_per_second, share_of_floor }) => row(name, [
      ...Object.values(parts_us).map(ms), ms(total_us), fixed(tokens_per_second, 0),
      `${fixed(100 * share_of_floor, 1)}%`,
    ])),
    `floor: ${ms(floor_us)} ms, the products with packed weights, bound by ${stages.at(-1).bound}`,
  ].join("\n");
}
