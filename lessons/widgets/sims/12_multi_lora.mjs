// Requests for adapters, and few slots: the twin of `simulate` in lessons/numbers/12_multi_lora.py.
import { Request } from "./lib/continuous_batching.mjs";
import { MeteredCore, PreemptionScheduler } from "./lib/preemption.mjs";
import { PrefixCachingKVCacheManager } from "./lib/prefix_caching.mjs";
import { comma, range, sum } from "./lib/text.mjs";

const REQUESTS = 48;
const TOKENS = 2; // of each answer
const PER_RANK = 305_280; // numbers that one rank costs on all linear layers of SmolLM2: Σ (in + out)

/** The adapter of each request. Zipf: adapter k with weight 1/(k + 1), drawn by a generator of 31 bits. */
function sequence(traffic, adapters, count) {
  if (traffic !== "Zipf") {
    return range(0, count).map((i) => (traffic === "round robin" ? i : Math.floor(i / 4)) % adapters);
  }
  const edges = [];
  for (const k of range(0, adapters)) edges.push((edges.at(-1) ?? 0) + Math.floor(1_000_000 / (k + 1)));
  let state = 12345;
  return range(0, count).map(() => {
    state = (Math.imul(1103515245, state) + 12345) & 0x7fffffff; // modulo 2^31
    const drawn = Math.floor((Math.floor(state / 64) * edges.at(-1)) / 2 ** 25);
    return edges.findIndex((edge) => edge > drawn);
  });
}

/** The `max_loras` adapters that the model can use now; the one that was used longest ago makes room. */
class LoRAModelManager {
  constructor(max_loras) {
    this.max_loras = max_loras;
    this.slots = new Map(); // adapter -> slot, least recently used first
    this.free_slots = range(0, max_loras).reverse();
    this.loads = 0;
  }

  /** Give an adapter a slot. The scheduler asks only while fewer than `max_loras` are in use (`active`). */
  make_resident(adapter, active) {
    if (this.slots.has(adapter)) {
      const slot = this.slots.get(adapter);
      this.slots.delete(adapter); // and to the end: used last
      this.slots.set(adapter, slot);
      return;
    }
    if (this.free_slots.length === 0) {
      const victim = [...this.slots.keys()].find((other) => !active.has(other));
      this.free_slots.push(this.slots.get(victim));
      this.slots.delete(victim);
    }
    this.slots.set(adapter, this.free_slots.pop());
    this.loads += 1;
  }
}

/** Lesson 11's scheduler with one more condition for admission: the request's adapter must have a place. */
class LoRAScheduler extends PreemptionScheduler {
  constructor(config, kv_cache_manager, lora, adapter_of) {
    super(config, kv_cache_manager);
    this.lora = lora;
    this.adapter_of = adapter_of;
    this.waiting_for_adapter = [];
  }

  /** Whoever waits for an adapter's place is passed over, and keeps its place in the queue. */
  schedule_waiting(output) {
    this.waiting_for_adapter = [];
    do {
      this.passed_over = false;
      super.schedule_waiting(output);
      if (this.passed_over) this.waiting_for_adapter.push(this.waiting.shift());
    } while (this.passed_over);
    this.waiting.unshift(...this.waiting_for_adapter);
  }

  admit(request) {
    const adapter = this.adapter_of[request.request_id];
    const active = new Set(this.running.map((running) => this.adapter_of[running.request_id]));
    if (!active.has(adapter) && active.size === this.lora.max_loras) {
      this.passed_over = true;
      return 0;
    }
    this.lora.make_resident(adapter, active);
    return super.admit(request);
  }
}

/** One step's rows as the kernels take them: runs of one slot, at most 16 rows each, or 64 where runs are longer. */
function tiles_of(slots, sort) {
  const order = sort ? [...slots].sort((a, b) => a - b) : slots;
  const segments = []; // [slot, rows]
  for (const slot of order) {
    if (segments.at(-1)?.[0] === slot) segments.at(-1)[1] += 1;
    else segments.push([slot, 1]);
  }
  const tile_m = Math.max(...segments.map(([, rows]) => rows)) <= 16 ? 16 : 64;
  return segments.flatMap(([slot, rows]) => range(0, rows, tile_m).map((i) => [slot, Math.min(tile_m, rows - i)]));
}

export function simulate(params) {
  const { adapters, max_loras, traffic, batch, sort } = params;
  const ranks = range(0, adapters).map((k) => (k === 0 && params.ranks === "one 64" ? 64 : 8));
  const adapter_of = sequence(traffic, adapters, REQUESTS);
  const lora = new LoRAModelManager(max_loras);
  const config = { max_model_len: 64, max_num_seqs: batch, max_num_batched_tokens: 4096 };
  const manager = new PrefixCachingKVCacheManager(1 + 4 * batch, 16, 64, { enable_caching: false });
  const scheduler = new LoRAScheduler(config, manager, lora, adapter_of);
  const core = new MeteredCore(scheduler);
  for (const i of range(0, REQUESTS)) scheduler.add_request(new Request(i, [0], TOKENS));

  const steps = [];
  while (scheduler.has_unfinished_requests()) {
    const before = new Map(lora.slots);
    const batch_ids = core.step().map((output) => output.request_id); // everybody writes a token in every step
    const lru = [...lora.slots.keys()];
    const name_of = new Map([...lora.slots].map(([adapter, slot]) => [slot, adapter]));
    const slots = batch_ids.map((i) => lora.slots.get(adapter_of[i]));
    steps.push({
      rows: batch_ids.map((i) => [i, adapter_of[i]]),
      tiles: tiles_of(slots, sort).map(([slot, rows]) => [name_of.get(slot), rows]),
      slots: range(0, max_loras).map((slot) => name_of.get(slot) ?? -1), lru,
      loaded: lru.filter((adapter) => before.get(adapter) !== lora.slots.get(adapter)),
      passed_over: scheduler.waiting_for_adapter.map((request) => request.request_id),
      queue: scheduler.waiting.map((request) => request.request_id),
    });
  }
  const slot_kib = Math.floor((2 * Math.max(...ranks) * PER_RANK) / 1024);
  const used_kib = Math.floor((2 * sum(steps.at(-1).lru.map((k) => ranks[k])) * PER_RANK) / 1024);
  return {
    params, ranks, adapter_of, steps, requests: REQUESTS, loads: lora.loads,
    slot_kib, reserved_kib: slot_kib * max_loras, used_kib, weight_reads: sum(steps.map((step) => step.tiles.length)),
  };
}

export function describe(trace) {
  const { params: p, steps, requests, loads } = trace;
  const letter = (k) => (k < 0 ? "·" : String.fromCharCode(65 + k));
  const lines = [
    `${p.adapters} adapters, ${p.max_loras} slots, ${p.traffic}, ${p.batch} per batch: ${steps.length} steps`,
    `${requests} requests, ${loads} adapter loads`,
    `one slot ${comma(trace.slot_kib)} KiB, all ${comma(trace.reserved_kib)} KiB, in use ${comma(trace.used_kib)} KiB`,
    `adapters read by the kernels, summed over steps: ${trace.weight_reads}`,
  ];
  for (const [i, step] of steps.slice(0, 8).entries()) {
    const rows = step.rows.map(([, k]) => letter(k)).join("");
    const tiles = step.tiles.map(([k, n]) => `${letter(k)}${n}`).join(" ");
    const loaded = step.loaded.length > 0 ? `, loads ${step.loaded.map(letter).join("")}` : "";
    const passed = step.passed_over.length > 0 ? `, ${step.passed_over.length} passed over` : "";
    const slots = step.slots.map(letter).join("");
    lines.push(`step ${i}: rows ${rows} as ${tiles}, slots ${slots}${loaded}${passed}`);
  }
  return lines.join("\n");
}
