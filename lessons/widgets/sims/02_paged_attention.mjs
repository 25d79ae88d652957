// One table that grows, among others: the twin of `simulate` in lessons/numbers/02_paged_attention.py.
import { BlockPool, OutOfBlocks } from "./lib/block_pool.mjs";
import { ceil_div, range, sum } from "./lib/text.mjs";

const ROOM = 512; // slots in all
const LONGEST = 64; // the tokens that any request may reach

/** One sequence's map from logical to physical blocks. */
class BlockTable {
  constructor(pool, block_size) {
    this.pool = pool;
    this.block_size = block_size;
    this.blocks = [];
    this.num_tokens = 0;
  }

  /** Room for `n` more tokens. Returns [source, target] if a block is copied, because others read it as well. */
  append(n) {
    const missing = ceil_div(this.num_tokens + n, this.block_size) - this.blocks.length;
    const last = this.blocks.at(-1);
    const shared = this.num_tokens % this.block_size > 0 && this.pool.ref_count[last] > 1;
    const fresh = this.pool.allocate(missing + Number(shared));
    if (shared) {
      this.pool.free([last]); // one owner less; it has others, so its content stays
      this.blocks[this.blocks.length - 1] = fresh.shift();
    }
    const copied = shared ? [last, this.blocks.at(-1)] : null;
    this.blocks.push(...fresh);
    this.num_tokens += n;
    return copied;
  }

  /** A second sequence with the same past: every block has one more owner. */
  fork() {
    this.pool.touch(this.blocks);
    const child = new BlockTable(this.pool, this.block_size);
    child.blocks = [...this.blocks];
    child.num_tokens = this.num_tokens;
    return child;
  }

  free() {
    this.pool.free(this.blocks);
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

  append() {
    return null; // more tokens move into slots that were set aside for them
  }

  free() {
    this.memory.free(this.start, this.capacity);
  }
}

/** 40 requests of 4 to 32 tokens, by Lehmer's random numbers: below 2^53 throughout. */
function arrivals() {
  let x = 1;
  return range(0, 40).map((i) => {
    x = (x * 16807) % 2147483647;
    return [String(i + 1), 4 + (x % 29)];
  });
}

/** ["arrive", requests], ["first", request], ["grow", [name, tokens]], ["fork", name], or ["finish", names]. */
function widget_events(fork, finish) {
  const others = arrivals().map(([name, n]) => [name, n, n]);
  const events = [["arrive", [["A", 10, LONGEST]]]];
  for (let i = 0; i < 8; i++) {
    events.push(["arrive", others.slice(i, i + 1)], ["grow", ["A", 6]]);
    if (i === 3) events.push(["finish", ["2"]]);
  }
  if (fork) events.push(["fork", "A"], ["grow", ["B", 1]], ["grow", ["A", 1]]);
  events.push(["arrive", others.slice(8)]);
  const odd = others.filter((_, i) => i % 2 === 0).map(([name]) => name);
  if (finish) events.push(["finish", odd], ["first", ["L", 40, 40]]);
  return events;
}

export function simulate(params) {
  const { allocator, block_size: size, fork, finish } = params;
  const paged = allocator === "paged";
  const memory = paged ? new BlockPool(Math.floor(ROOM / size)) : new FirstFit(ROOM);
  const places = new Map(); // name -> BlockTable or Reservation
  const length = new Map();
  const waiting = [];
  const steps = [];
  let moved = 0; // slots that were copied

  /** Admit a request: paging takes blocks for what it holds, the others what it may ever need. */
  function place(tokens, final) {
    if (!paged) return new Reservation(memory, allocator === "contiguous" ? LONGEST : final);
    const table = new BlockTable(memory, size);
    table.append(tokens);
    return table;
  }

  function record(event, request, tokens, copied = null, why = "") {
    const holes = paged ? [memory.num_free_blocks * size] : memory.holes.map(([, hole]) => hole);
    const held = new Set();
    const rows = [...places].map(([name, where]) => {
      const starts = paged ? where.blocks.map((block) => block * size) : [where.start];
      const unit = paged ? size : where.capacity;
      range(0, length.get(name)).forEach((i) => held.add(starts[Math.floor(i / unit)] + (i % unit)));
      return [name, length.get(name), unit, starts];
    });
    const state = {
      running: places.size, waiting: waiting.length, tokens: held.size,
      taken: ROOM - (paged ? size : 0) - sum(holes), free: sum(holes),
      largest_fit: Math.max(0, ...holes), copied: moved,
    };
    const queue = paged ? [...memory.free_queue].slice(0, 16) : [];
    steps.push({ event, request, tokens, copied, why, queue, places: rows, state });
  }

  /** Run `attempt`; if memory is short, write down what was wanted. Returns whether it worked. */
  function or(event, request, tokens, attempt) {
    try {
      attempt();
      return true;
    } catch (error) {
      if (!(error instanceof OutOfBlocks)) throw error;
      record(event, request, tokens, null, error.message);
      return false;
    }
  }

  let blocked = false; // there was no room for the queue's head when it was last looked at
  for (const [event, what] of widget_events(fork, finish)) {
    if (event === "arrive") {
      waiting.push(...what);
      blocked = false;
    } else if (event === "first") {
      waiting.unshift(what);
      blocked = false;
    } else if (event === "grow" && places.has(what[0])) {
      const [name, more] = what;
      or("grow", name, more, () => {
        const copied = places.get(name).append(more);
        length.set(name, length.get(name) + more);
        if (copied) moved += size;
        record("grow", name, more, copied);
      });
    } else if (event === "fork") {
      or("fork", "B", length.get("A"), () => {
        places.set("B", paged ? places.get("A").fork() : new Reservation(memory, LONGEST));
        length.set("B", length.get("A"));
        moved += paged ? 0 : length.get("A");
        record("fork", "B", length.get("B"));
      });
    } else if (event === "finish") {
      const left = what.filter((name) => places.has(name));
      left.forEach((name) => places.get(name).free());
      const tokens = sum(left.map((name) => length.get(name)));
      left.forEach((name) => places.delete(name));
      record("finish", left.join(" "), tokens);
    }
    while (waiting.length > 0 && !blocked) {
      const [name, tokens, final] = waiting[0];
      blocked = !or("admit", name, tokens, () => {
        places.set(name, place(tokens, final));
        length.set(name, tokens);
        waiting.shift();
        record("admit", name, tokens);
      });
    }
  }
  return { params, null_slots: paged ? size : 0, steps, final: steps.at(-1).state };
}

/** A's table, a strip of memory, 64 characters long, and what is in it. */
export function describe(trace) {
  const { params, final: end } = trace;
  const last = trace.steps.at(-1);
  const paged = params.allocator === "paged";
  const slots = new Map(); // slot -> does it hold a token?
  for (const [, tokens, unit, starts] of last.places) {
    starts.forEach((start, i) => {
      for (let j = 0; j < unit; j++) slots.set(start + j, slots.get(start + j) || i * unit + j < tokens);
    });
  }
  const taken = Array(64).fill(0); // per 64th of the memory
  const held = Array(64).fill(0);
  for (const [slot, full] of slots) {
    taken[Math.floor(slot / 8)] += 1;
    if (full) held[Math.floor(slot / 8)] += 1;
  }
  const strip = taken.map((t, i) => (t === 0 ? "." : 2 * held[i] < t ? "-" : held[i] < 8 ? "+" : "#"));
  const where = (unit, starts) =>
    paged ? `blocks ${starts.map((start) => start / unit).join(" ")}` : `${unit} slots from ${starts[0]}`;
  const could = { admit: "has to wait", grow: "cannot grow", fork: "cannot be forked from A" };
  const blocks = paged ? `, blocks of ${params.block_size}` : "";
  return [
    `${params.allocator}${blocks}, ${ROOM} slots: A grows among 40 requests of 4 to 32 tokens`,
    ...last.places.filter(([name]) => "AB".includes(name)).map(
      ([name, tokens, unit, starts]) => `${name}, ${tokens} tokens: ${where(unit, starts)}`),
    `[${strip.join("")}]`,
    "# all tokens   + at least half of what is taken   - less   . free",
    `running ${end.running}, waiting ${end.waiting}; tokens ${end.tokens}, taken ${end.taken} ` +
      `(wasted ${end.taken - end.tokens}), copied ${end.copied}`,
    `free ${end.free}, and the largest request that fits is ${end.largest_fit}`,
    ...trace.steps.filter((step) => step.why).slice(-1).map(
      (step) => `${step.request} ${could[step.event]}: ${step.why}`),
  ].join("\n");
}
