// A layer of 16 experts on 4 GPUs, step by step: the twin of `simulate` in lessons/numbers/05e_experts.py, of the
// placement in vllm/engine/parallel/eplb.py, and of its greedy.
import { comma, range, sum } from "./lib/text.mjs";
import { uniforms } from "./lib/uniforms.mjs";

const EXPERTS = 16, GPUS = 4, STEPS = 12, INTERVAL = 4; // experts move after every INTERVAL steps
const READ = { "16 bits": 64, "4 bits": 16 }; // ticks in which a GPU reads an expert
const ROW = 2, HELLO = 16; // ticks to multiply a token with an expert, and of an all-to-all with nothing in it
const POPULAR = [5, 12, 6, 1, 10, 7, 0, 15, 3, 8, 13, 2, 9, 14, 4, 11]; // experts, the most popular first
const SHIFT = 6; // from this step on, "shifting" traffic prefers others

/** Weights of the experts: all alike, or of the r-th most popular one r-th of the first's. */
function popularity(routing, step) {
  if (routing === "even") return range(0, EXPERTS).map(() => 1);
  const order = routing === "shifting" && step >= SHIFT ? POPULAR.toReversed() : POPULAR, found = [];
  order.forEach((expert, r) => { found[expert] = Math.floor(720720 / (r + 1)); });
  return found;
}

/** Experts of one token, drawn one after the other and none twice. */
function chosen(weights, u) {
  const left = [...weights];
  return u.map((x) => {
    const at = x * sum(left);
    let expert = -1;
    for (let upto = 0; upto <= at; upto += left[expert]) expert += 1;
    left[expert] = 0;
    return expert;
  });
}

/** The slots of one GPU, [first, end), of a placement, which is the expert in each slot. */
const slots_of = (placement, gpu) => range((gpu * placement.length) / GPUS, ((gpu + 1) * placement.length) / GPUS);

/** A spare slot goes to whoever has most to do per replica; the busiest replica to the GPU with the least to do. */
function rebalance_experts(load, num_slots) {
  const copies = load.map(() => 1), each = (expert) => load[expert] / copies[expert];
  for (const _ of range(load.length, num_slots)) {
    const busiest = range(0, load.length).reduce((a, b) => (each(b) > each(a) ? b : a));
    copies[busiest] += 1;
  }
  const replicas = copies.flatMap((n, expert) => range(0, n).map(() => [each(expert), expert]));
  replicas.sort(([a, i], [b, j]) => b - a || i - j);
  const held = range(0, GPUS).map(() => []), busy = range(0, GPUS).map(() => 0);
  for (const [asked, expert] of replicas) {
    const room = range(0, GPUS).filter((gpu) => held[gpu].length < num_slots / GPUS);
    const worse = (a, b) => held[a].includes(expert) - held[b].includes(expert) || busy[a] - busy[b] || a - b;
    const gpu = room.sort(worse)[0];
    held[gpu].push(expert);
    busy[gpu] += asked;
  }
  return held.flat();
}

/** How many pairs each GPU's tokens send to each slot. Token i is GPU i mod 4's; replicas take turns. */
function place(routed, placement) {
  const places = range(0, EXPERTS).map((expert) => range(0, placement.length).filter((s) => placement[s] === expert));
  const flow = range(0, GPUS).map(() => placement.map(() => 0));
  routed.forEach((ids, i) => ids.forEach((expert) => {
    flow[i % GPUS][places[expert][Math.floor(i / GPUS) % places[expert].length]] += 1;
  }));
  return flow;
}

/** One step: what it reads and sends, and when each GPU is done. All wait for all, at both all-to-alls. */
function cost(flow, placement, read) {
  const gpus = range(0, GPUS), rows = placement.map((_, slot) => sum(flow.map((of) => of[slot])));
  const mine = gpus.map((gpu) => slots_of(placement, gpu));
  const leaving = gpus.map((gpu) => sum(flow[gpu]) - sum(mine[gpu].map((slot) => flow[gpu][slot])));
  const from = (gpu, other) => sum(mine[gpu].map((slot) => flow[other][slot]));
  const arriving = gpus.map((gpu) => sum(gpus.filter((other) => other !== gpu).map((other) => from(gpu, other))));
  const work = rows.map((n) => (n > 0 ? Math.max(read, ROW * n) : 0));
  const busy = mine.map((slots) => sum(slots.map((slot) => work[slot]))), longest = Math.max(...busy);
  const send = HELLO + Math.max(...leaving, ...arriving), all = GPUS * longest;
  return {
    rows, useful: rows.map((n) => ROW * n), work, busy, send, sent: sum(leaving), ticks: send + longest + send,
    asked: new Set(placement.filter((_, slot) => rows[slot] > 0)).size, read: rows.filter((n) => n > 0).length,
    waiting: Math.floor((200 * (all - sum(busy)) + all) / (2 * all)),
  };
}

export function simulate(params) {
  const { tokens, top_k, routing, weights } = params, read = READ[weights], draws = uniforms(7, STEPS * tokens * top_k);
  const plain = range(0, EXPERTS), moves = params.placement !== "in order";
  const slots = params.placement.endsWith("replicas") ? EXPERTS + 4 : EXPERTS;
  let placement = slots > EXPERTS ? rebalance_experts(plain.map(() => 1), slots) : plain;
  let load = plain.map(() => 0), in_order = 0;
  const steps = [];
  for (let step = 0; step < STEPS; step++) {
    const popular = popularity(routing, step);
    const first = (i) => (step * tokens + i) * top_k;
    const routed = range(0, tokens).map((i) => chosen(popular, draws.slice(first(i), first(i + 1))));
    let moved = 0;
    if (step > 0 && step % INTERVAL === 0 && moves) {
      const better = rebalance_experts(load, slots);
      moved = better.filter((expert, slot) => expert !== placement[slot]).length;
      [load, placement] = [plain.map(() => 0), better];
    }
    const flow = place(routed, placement);
    steps.push({ slots: placement, moved, flow, ...cost(flow, placement, read) });
    in_order += cost(place(routed, plain), plain, read).ticks;
    for (const expert of routed.flat()) load[expert] += 1;
  }
  return { params, steps, final: { ticks: sum(steps.map((step) => step.ticks)), in_order } };
}

export function describe({ params, steps, final }) {
  const last = steps.at(-1), size = last.slots.length / GPUS;
  const gpus = last.busy.map((busy, gpu) => {
    const shown = range(gpu * size, (gpu + 1) * size).map((slot) => `e${last.slots[slot]} ${last.rows[slot]}`);
    return `GPU ${gpu}: ${shown.join("  ")}: ${busy} ticks`;
  });
  const { tokens, top_k, routing, placement } = params;
  return [
    `${tokens} tokens, ${top_k} of ${EXPERTS} experts each, ${routing} routing, ${placement}`,
    `the last step reads ${last.asked} experts in ${last.read} places, and sends ${last.sent} rows`,
    ...gpus,
    `it takes ${last.ticks} ticks; GPUs wait ${last.waiting} % of the time between the all-to-alls`,
    `ticks of all steps: ${steps.map((step) => step.ticks).join(" ")}`,
    `together ${comma(final.ticks)}, with experts in order ${comma(final.in_order)}`,
  ].join("\n");
}
