// One MLP block y = B·relu(A·x) on several ranks, on integers: the twin of `simulate` in
// lessons/numbers/05c_tensor_parallel.py.
import { range, sum } from "./lib/text.mjs";

const A = [ // [8 neurons, 4 inputs]
  [1, 0, 2, -1], [0, 1, 1, 1], [2, -1, 0, 1], [1, 1, -1, 0], [-1, 2, 1, 0], [0, -2, 1, 1], [1, 1, 0, 2], [-1, 0, 1, 1],
];
const B = [ // [4 outputs, 8 neurons]
  [1, 0, -1, 2, 1, 0, 1, -1], [0, 1, 1, 0, -2, 1, 0, 2], [2, 0, 1, -1, 0, 1, -1, 0], [1, -1, 0, 1, 1, 0, 2, 1],
];
const INPUTS = {
  "mixed": [1, -2, 3, 1], // neurons of every rank fire
  "lucky": [1, 0, 1, -3], // only neurons of rank 0 fire: its partial sum is the whole
  "positive": [1, 2, 1, 1],
};

const times = (W, x) => W.map((row) => sum(row.map((w, i) => w * x[i])));
const relu = (x) => x.map((v) => Math.max(0, v));
const add = (x, y) => x.map((v, i) => v + y[i]);

/** The r-th of n equal slices of a list. */
const slice = (list, r, n) => list.slice((r * list.length) / n, ((r + 1) * list.length) / n);

/** What rank r of n owns. Column-parallel: an n-th of the outputs. Row-parallel: an n-th of the inputs. */
const column_shard = (W, r, n) => slice(W, r, n);
const row_shard = (W, r, n) => W.map((row) => slice(row, r, n));

/** Numbers that each of n ranks sends on a ring, so that all have a result of `size` numbers. */
const all_gather_sends = (size, n) => ((n - 1) * size) / n;
const all_reduce_sends = (size, n) => (2 * (n - 1) * size) / n;

export function simulate({ ranks: n, order, all_reduce, input }) {
  const ranks = range(0, n);
  const x = INPUTS[input];
  const steps = [];

  function show(name, values, layout, sent = 0) {
    steps.push({ name, layout, sent, values });
    return values;
  }

  function reduce(values) {
    if (all_reduce === "skipped" && n > 1) return show("all-reduce skipped", values, "broken");
    const total = values.reduce(add);
    return show("all-reduce", ranks.map(() => total), "replicated", all_reduce_sends(total.length, n));
  }

  let state = show("x", ranks.map(() => x), "replicated");
  if (order === "column, row") {
    state = ranks.map((r) => relu(times(column_shard(A, r, n), state[r])));
    state = show("column-parallel A, then relu", state, "sharded");
    state = ranks.map((r) => times(row_shard(B, r, n), state[r]));
    state = reduce(show("row-parallel B", state, "partial"));
  } else {
    state = show("each takes its slice of x", ranks.map((r) => slice(state[r], r, n)), "sharded");
    state = ranks.map((r) => times(row_shard(A, r, n), state[r]));
    state = reduce(show("row-parallel A", state, "partial"));
    state = show("relu", state.map(relu), steps.at(-1).layout);
    state = show("column-parallel B", ranks.map((r) => times(column_shard(B, r, n), state[r])), "sharded");
    const gathered = state.flat();
    state = show("all-gather", ranks.map(() => gathered), "replicated", all_gather_sends(gathered.length, n));
  }
  const reference = times(B, relu(times(A, x)));
  const same = (y, z) => y.every((v, i) => v === z[i]);
  return {
    steps, reference, right: state.map((y) => same(y, reference)), agree: state.every((y) => same(y, state[0])),
    collectives: steps.filter((step) => step.sent > 0).length, sent: sum(steps.map((step) => step.sent)),
  };
}

export function describe(trace) {
  const lines = [`y must be ${trace.reference.join(" ")}`];
  for (const { name, layout, values } of trace.steps) {
    const shown = values.map((value) => value.join(" "));
    lines.push(`${name} (${layout}): ${layout === "replicated" ? `${shown[0]} on every rank` : shown.join(" | ")}`);
  }
  const wrong = trace.right.flatMap((right, r) => (right ? [] : [r]));
  const verdict = wrong.length > 0 ? `wrong on rank ${wrong.join(", ")}` : "right on every rank";
  lines.push(`${verdict}; collectives: ${trace.collectives}, numbers sent by each rank: ${trace.sent}`);
  return lines.join("\n");
}
