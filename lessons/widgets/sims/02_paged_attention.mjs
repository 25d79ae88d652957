// Three allocators, one workload: the twin of `simulate` in lessons/numbers/02_paged_attention.py.
import { BlockPool, OutOfBlocks } from "./lib/block_pool.mjs";
import { ceil_div, comma, range, sum } from "./lib/text.mjs";

const MAX_MODEL_LEN = 2048;
const WORKLOADS = {
  "short chats": "400 requests of 20 to 199 tokens arrive",
  "one size": "400 requests of 64 tokens arrive",
  "holes": "requests of 64 tokens fill the memory, every second one finishes, one of 100 arrives",
  "growing": "40 requests arrive with 32 tokens and grow to 256, 32 at a time",
};

/** One sequence's map from logical to physical blocks. */
class BlockTable {
  constructor(pool, block_size) {
    this.pool = pool;
    this.block_size = block_size;
    this.blocks = [];
    this.num_tokens = 0;
  }

  get capacity() {
    return this.blocks.length * this.block_size;
  }

  append(n) {
    const missing = ceil_div(this.num_tokens + n, this.block_size) - this.blocks.length;
    this.blocks.push(...this.pool.allocate(missing));
    this.num_tokens += n;
  }

  free() {
    this.pool.free(this.blocks);
  }

  /** Its memory from block number `first` on, as [first slot, slots]; neighbours joined. */
  spans(first = 0) {
    const joined = [];
    for (const block of this.blocks.slice(first)) {
      const start = block * this.block_size;
      const last = joined.at(-1);
      if (last && last[0] + last[1] === start) last[1] += this.block_size;
      else joined.push([start, this.block_size]);
    }
    return joined;
  }
}

/** Contiguous runs of slots: a request gets the lowest hole that is large enough. */
class FirstFit {
  constructor(num_slots) {
    this.holes = [[0, num_slots]]; // [start, size], in order of address, never adjacent
  }

  allocate(size) {
    const i = this.holes.findIndex(([, hole]) => hole >= size);
    if (i < 0) {
      const largest = Math.max(0, ...this.holes.map(([, hole]) => hole));
      throw new OutOfBlocks(`${size} slots in a row asked for, the largest hole has ${largest}`);
    }
    const [start, hole] = this.holes[i];
    this.holes.splice(i, 1, ...(hole > size ? [[start + size, hole - size]] : []));
    return start;
  }

  free(start, size) {
    const merged = [];
    for (const [first, n] of [...this.holes, [start, size]].sort((a, b) => a[0] - b[0])) {
      const last = merged.at(-1);
      if (last && last[0] + last[1] === first) last[1] += n;
      else merged.push([first, n]);
    }
    this.holes = merged;
  }
}

/** What a contiguous allocator gives a request: all the slots it may ever need. */
class Reservation {
  constructor(memory, size) {
    this.memory = memory;
    this.start = memory.allocate(size);
    this.capacity = size;
  }

  append() {} // more tokens move into slots that were set aside for them

  free() {
    this.memory.free(this.start, this.capacity);
  }

  spans() {
    return [[this.start, this.capacity]];
  }
}

/** ["arrive", [[request, tokens now, in the end], …]], ["grow", request] by 32 tokens, or ["finish", request]. */
function workload_events(workload, num_slots) {
  if (workload === "short chats") {
    let x = 1;
    const arrivals = range(0, 400).map((i) => {
      x = (x * 16807) % 2147483647; // Lehmer's generator: below 2^53 throughout
      return [i, 20 + (x % 180), 20 + (x % 180)];
    });
    return [["arrive", arrivals]];
  }
  if (workload === "one size") {
    return [["arrive", range(0, 400).map((i) => [i, 64, 64])]];
  }
  if (workload === "holes") {
    const n = Math.floor(num_slots / 64) - 1;
    const fill = ["arrive", range(0, n).map((i) => [i, 64, 64])];
    const every_second = range(1, n, 2).map((i) => ["finish", i]);
    return [fill, ...every_second, ["arrive", [[n, 100, 100]]]];
  }
  const rounds = range(0, 7).flatMap(() => range(0, 40).map((i) => ["grow", i]));
  return [["arrive", range(0, 40).map((i) => [i, 32, 256])], ...rounds];
}

export function simulate(params) {
  const { allocator, block_size: size, num_slots, workload, finish } = params;
  const paged = allocator === "paged";
  const memory = paged ? new BlockPool(Math.floor(num_slots / size)) : new FirstFit(num_slots);
  const places = new Map(); // request -> BlockTable or Reservation
  const length = new Map();
  const queue = [];
  const steps = [];

  /** Admit a request: paging takes blocks for what it holds, the others what it may ever need. */
  function place(tokens, final) {
    if (!paged) return new Reservation(memory, allocator === "contiguous" ? MAX_MODEL_LEN : final);
    const table = new BlockTable(memory, size);
    table.append(tokens);
    return table;
  }

  function record(event, request, tokens, spans, why = "") {
    const holes = paged ? [memory.num_free_blocks * size] : memory.holes.map(([, hole]) => hole);
    const state = {
      running: places.size, waiting: queue.length, tokens: 0, taken: 0, free: sum(holes),
      largest_fit: Math.max(0, ...holes),
    };
    for (const [running, where] of places) {
      state.tokens += length.get(running);
      state.taken += where.capacity;
    }
    steps.push({ event, request, tokens, spans, why, state });
  }

  /** Run `attempt`; if memory is short, write down what `event` says. Returns whether it worked. */
  function or(event, request, tokens, attempt) {
    try {
      attempt();
      return true;
    } catch (error) {
      if (!(error instanceof OutOfBlocks)) throw error;
      record(event, request, tokens, [], error.message);
      return false;
    }
  }

  let stuck = false; // there was no room for a request that must grow
  let blocked = false; // none for the queue's head, and nothing was freed since
  for (const [event, what] of [...workload_events(workload, num_slots), ["finish", finish]]) {
    if (event === "arrive") {
      queue.push(...what);
    } else if (event === "grow" && places.has(what) && !stuck) {
      const where = places.get(what);
      const before = paged ? where.blocks.length : 0;
      stuck = !or("stuck", what, 32, () => {
        where.append(32);
        length.set(what, length.get(what) + 32);
        record("grow", what, 32, paged ? where.spans(before) : []);
      });
    } else if (event === "finish" && places.has(what)) {
      const where = places.get(what);
      const tokens = length.get(what);
      places.delete(what);
      length.delete(what);
      where.free();
      record("finish", what, tokens, where.spans());
      blocked = false;
    }
    while (queue.length > 0 && !blocked) {
      const [request, tokens, final] = queue[0];
      blocked = !or("refuse", request, tokens, () => {
        places.set(request, place(tokens, final));
        length.set(request, tokens);
        queue.shift();
        record("admit", request, tokens, places.get(request).spans());
      });
    }
  }
  return {
    params, null_slots: paged ? size : 0, steps, final: steps.at(-1).state,
    places: [...places].map(([request, where]) => [request, length.get(request), where.spans()]),
  };
}

/** A strip of memory, 64 characters long, and what is in it. */
export function describe(trace) {
  const { params, final: end } = trace;
  const cell = params.num_slots / 64;
  const taken = Array(64).fill(0);
  const held = Array(64).fill(0); // of these, slots with a token
  for (const [, tokens, spans] of trace.places) {
    let i = 0;
    for (const [start, size] of spans) {
      for (let slot = start; slot < start + size; slot++, i++) {
        taken[Math.floor(slot / cell)] += 1;
        if (i < tokens) held[Math.floor(slot / cell)] += 1;
      }
    }
  }
  const strip = taken.map((t, i) => (t === 0 ? "." : 2 * held[i] < t ? "-" : 10 * held[i] < 9 * cell ? "+" : "#"));
  const blocks = params.allocator === "paged" ? `, blocks of ${params.block_size}` : "";
  const happened = { refuse: "refused", stuck: "cannot grow" };
  const without = trace.steps.filter((step) => step.why);
  return [
    `${params.allocator}${blocks}, ${comma(params.num_slots)} slots: ${WORKLOADS[params.workload]}`,
    `[${strip.join("")}]`,
    "# at least 90 % tokens   + at least half of what is taken   - less   . free",
    `running ${end.running}, waiting ${end.waiting}; tokens ${comma(end.tokens)}, taken ${comma(end.taken)} ` +
      `(wasted ${comma(end.taken - end.tokens)})`,
    `free ${comma(end.free)}, and the largest request that fits is ${comma(end.largest_fit)}`,
    ...without.slice(-1).map((step) => `request ${step.request} ${happened[step.event]}: ${step.why}`),
  ].join("\n");
}
