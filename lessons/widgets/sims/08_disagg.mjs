// Sixteen requests on four GPUs, together or split into prefill and decode: the twin of `simulate` in
// vllm/lab/goodput.py. Times are µs, all of them integers.
import { ChunkedScheduler } from "./lib/chunked_prefill.mjs";
import { EngineCore, KVCacheManager, Request, Scheduler } from "./lib/continuous_batching.mjs";
import { ceil_div, comma, range, sum } from "./lib/text.mjs";

const LINKS = { "NVLink": 450e9, "InfiniBand 400G": 50e9, "PCIe 4": 25e9, "10 GbE": 1.25e9 }; // bytes/s, one direction
const KV_BYTES = 131_072; // of a token: Llama-3.1-8B in bf16
const LAYERS = 32;
const KV_TOKENS = 477_742; // that fit on an H100 beside the weights
const BLOCK_SIZE = 128;
const BUDGET = 8192;
const SEATS = 256;

const GAPS = [31, 118, 9, 64, 203, 77, 15, 140, 52, 96, 260, 4, 83, 171, 38, 239]; // % of the mean gap
const MIXES = { // [prompt, output] in turn
  "chat": [[512, 24]],
  "documents": [[8192, 8]],
  "code": [[2048, 8]],
  "mixed": [[512, 24], [512, 24], [8192, 8], [512, 24]],
};
const LAYOUTS = { // the roles of each GPU, and the budget of a step; null: whole prompts
  "4 colocated": [["PD", "PD", "PD", "PD"], null],
  "4 chunked, 512": [["PD", "PD", "PD", "PD"], 512],
  "1P 3D": [["P", "D", "D", "D"], null],
  "2P 2D": [["P", "P", "D", "D"], null],
  "3P 1D": [["P", "P", "P", "D"], null],
};
const LIMITS = { "tight": [300, 8], "usual": [600, 15], "loose": [2000, 50] }; // TTFT and TPOT, ms

// An 8B model on an H100, in picoseconds: what a step does besides computing, reading the weights, the products of one
// token and of one row of logits, attention of one prompt token to one key, reading one cached token.
const COST = {
  overhead: 1_460_000_000, weights: 4_978_391_159, token: 23_524_058, row: 1_770_599, pair: 884, context: 43_473,
};

/** T tokens of R sequences, query-key pairs of prompts, cached tokens that decodes read -> µs. */
function step_us(T, R, pairs, keys) {
  const products = Math.max(COST.weights, COST.token * T + COST.row * R);
  return Math.floor((COST.overhead + products + COST.pair * pairs + COST.context * keys) / 10 ** 6);
}

/** n tokens at the end of S see S − n + 1 to S keys. */
const pairs_of = (n, S) => n * S - (n * (n - 1)) / 2;

/** A prompt that is done leaves the books, but not the memory: its blocks wait for the link. */
class PrefillScheduler extends ChunkedScheduler {
  free_request(request) {
    this.requests.delete(request.request_id);
  }
}

/** Requests come with their prompt's keys and values, except those of its last token. */
class DecodeScheduler extends ChunkedScheduler {
  num_slots(request) {
    return super.num_slots(request) - request.num_computed_tokens;
  }
}

function make_scheduler(roles, budget, max_model_len) {
  const manager = new KVCacheManager(1 + Math.floor(KV_TOKENS / BLOCK_SIZE), BLOCK_SIZE, max_model_len);
  if (roles === "PD" && budget === null) {
    const most = Math.max(max_model_len, BUDGET);
    return new Scheduler({ max_model_len, max_num_seqs: SEATS, max_num_batched_tokens: most }, manager);
  }
  const config = { max_model_len, max_num_seqs: SEATS, max_num_batched_tokens: budget ?? BUDGET };
  const kind = { PD: ChunkedScheduler, P: PrefillScheduler, D: DecodeScheduler }[roles];
  return new kind(config, manager);
}

/** One GPU with an engine: `begin` decides about a step and its duration, `finish` hands out its tokens. */
class Instance extends EngineCore {
  constructor(number, roles, scheduler) {
    super(scheduler);
    this.number = number;
    this.prefills = roles.includes("P");
    this.decodes = roles.includes("D");
    this.roles = roles;
    this.output = null; // the step under way
    this.end = 0; // of that step
    this.link_free = 0; // when its link is done with all that was promised
    this.backlog = 0; // prompt tokens that are not computed yet
    this.promised = 0; // requests whose KV cache is on its way
    this.jobs = new Map();
    this.steps = []; // start, end, prompt tokens, decodes
  }

  /** What a router compares, one after the other. */
  get load() {
    return [this.backlog, this.scheduler.requests.size + this.promised, this.number];
  }

  /** Hand in the part of a request that this GPU does. */
  submit(job) {
    const request = new Request(job.name, Array(job.prompt).fill(0), this.decodes ? job.output : 1);
    this.scheduler.add_request(request);
    if (!this.prefills) request.num_computed_tokens = job.prompt - 1;
    this.backlog += job.prompt - request.num_computed_tokens;
    this.jobs.set(job.name, job);
    job.gpus.push(this.number);
  }

  /** Start the step that the scheduler chooses. False: there is nothing to do. */
  begin(now) {
    const { num_scheduled_tokens } = this.scheduler.schedule();
    this.output = num_scheduled_tokens.size > 0 ? { num_scheduled_tokens } : null;
    if (this.output === null) return false;
    let prompt_tokens = 0;
    let pairs = 0;
    let keys = 0;
    for (const [name, n] of num_scheduled_tokens) {
      const request = this.scheduler.requests.get(name);
      const S = request.num_computed_tokens;
      if (S - n < request.num_prompt_tokens) prompt_tokens += n;
      if (n === 1) keys += S;
      else pairs += pairs_of(n, S);
      const job = this.jobs.get(name);
      if (this.prefills && job.prefill[0] < 0) job.prefill[0] = now;
    }
    const T = sum([...num_scheduled_tokens.values()]);
    this.end = now + step_us(T, num_scheduled_tokens.size, pairs, keys);
    this.backlog -= prompt_tokens;
    this.steps.push([now, this.end, prompt_tokens, T - prompt_tokens]);
    return true;
  }

  /** The step is over: whoever has caught up gets a token. Returns who has all of them. */
  finish() {
    const sampled = this.execute_model(this.output);
    for (const name of sampled) {
      const job = this.jobs.get(name);
      if (this.prefills && this.scheduler.requests.get(name).num_output_tokens === 0) job.prefill[1] = this.end;
      if (!this.decodes) continue;
      if (job.first < 0) job.first = this.end;
      else job.gap = Math.max(job.gap, this.end - job.last);
      job.last = this.end;
    }
    const outputs = this.scheduler.update_from_output(sampled);
    return outputs.filter((output) => output.finished).map((output) => output.request_id);
  }
}

/**
 * [begin, end] of a transfer of `wire` µs, layer by layer, while the prompt is computed in [a, b): the first layer is
 * ready after a share of that, and the last one leaves when it is computed and the others are gone.
 */
function streamed([a, b], wire, free) {
  const begin = Math.max(free, a + Math.floor((b - a) / LAYERS));
  return [begin, Math.max(begin + wire, b + ceil_div(wire, LAYERS))];
}

/** Events in the order of time: requests arrive, steps end, caches arrive. Nothing else ever happens. */
class Cluster {
  constructor([roles_of_gpus, budget], link, layerwise, jobs) {
    const longest = Math.max(...jobs.map((job) => job.prompt + job.output));
    this.instances = roles_of_gpus.map((roles, i) => new Instance(i, roles, make_scheduler(roles, budget, longest)));
    this.link = link;
    this.layerwise = layerwise;
    this.jobs = jobs;
    this.events = []; // [when, action], in order; whoever was announced first goes first
    this.now = 0;
    this.bytes_moved = 0;
  }

  run() {
    for (const job of this.jobs) this.at(job.arrival, () => this.enter(this.choose("prefills"), job));
    while (this.events.length > 0) {
      const [when, action] = this.events.shift();
      this.now = when;
      action();
    }
  }

  at(when, action) {
    const later = this.events.findIndex(([other]) => other > when);
    this.events.splice(later < 0 ? this.events.length : later, 0, [when, action]);
  }

  /** The router: of the GPUs that do this, the one with the least to do. */
  choose(stage) {
    const less = (a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2];
    return this.instances.filter((instance) => instance[stage]).sort((a, b) => less(a.load, b.load))[0];
  }

  enter(instance, job) {
    instance.submit(job);
    this.wake(instance);
  }

  /** Something has changed for this GPU: begin, if it idles. */
  wake(instance) {
    if (instance.output === null && instance.begin(this.now)) this.at(instance.end, () => this.step_ended(instance));
  }

  step_ended(instance) {
    for (const name of instance.finish()) {
      if (!instance.decodes) this.send(instance, instance.jobs.get(name));
    }
    instance.output = null;
    this.wake(instance);
  }

  /** A prompt's keys and values to a decoder. A link carries one thing at a time, and both ends must be free for it. */
  send(source, job) {
    const target = this.choose("decodes");
    const size = KV_BYTES * job.prompt;
    const wire = ceil_div(size * 10 ** 6, this.link);
    const free = Math.max(source.link_free, target.link_free);
    const at_once = Math.max(this.now, free);
    job.transfer = this.layerwise ? streamed(job.prefill, wire, free) : [at_once, at_once + wire];
    source.link_free = target.link_free = job.transfer[1];
    target.promised += 1;
    this.bytes_moved += size;
    this.at(job.transfer[1], () => this.deliver(source, target, job));
  }

  deliver(source, target, job) {
    source.scheduler.kv_cache_manager.free({ request_id: job.name });
    this.wake(source); // its blocks may be what a prompt waits for
    target.promised -= 1;
    this.enter(target, job);
  }
}

/** Request i comes when the first i + 1 gaps have passed. A time of −1: not yet. */
function make_jobs(mix, rate) {
  return GAPS.map((_, i) => {
    const [prompt, output] = MIXES[mix][i % MIXES[mix].length];
    const arrival = Math.floor((sum(GAPS.slice(0, i + 1)) * 10_000) / rate);
    return {
      name: i, arrival, prompt, output, gpus: [], prefill: [-1, -1], transfer: [-1, -1], first: -1, last: -1, gap: 0,
    };
  });
}

export function simulate(params) {
  const { layout, mix, rate, link, layerwise, limits } = params;
  const split = layout.includes("P ");
  const jobs = make_jobs(mix, rate);
  const cluster = new Cluster(LAYOUTS[layout], LINKS[link], layerwise, jobs);
  cluster.run();
  const [ttft_us, tpot_us] = LIMITS[limits].map((ms) => 1000 * ms);
  const requests = jobs.map(({ name, ...job }) => {
    const [a, b] = job.prefill;
    const arrived = split ? job.transfer[1] : b;
    return {
      ...job,
      parts: [a - job.arrival, b - a, arrived - b, job.first - arrived],
      tpot: ceil_div(job.last - job.first, job.output - 1),
      met: job.first - job.arrival <= ttft_us && job.last - job.first <= tpot_us * (job.output - 1),
    };
  });
  const longest = Math.max(...MIXES[mix].map(([prompt]) => prompt));
  return {
    params, limits_us: [ttft_us, tpot_us], requests,
    gpus: cluster.instances.map(({ roles, steps }) => ({ roles, steps })),
    met: requests.filter((request) => request.met).length, end: Math.max(...requests.map((request) => request.last)),
    bytes_moved: cluster.bytes_moved, longest, longest_bytes: longest * KV_BYTES,
    wire_us: ceil_div(longest * KV_BYTES * 10 ** 6, LINKS[link]),
    prefill_us: step_us(longest, 1, pairs_of(longest, longest), 0),
  };
}

export function describe(trace) {
  const { params: p, requests } = trace;
  const ms = (us) => `${comma(Math.floor(us / 1000))}.${Math.floor(us / 100) % 10} ms`;
  const mib = (bytes) => `${comma(Math.floor(bytes / 2 ** 20))} MiB`;
  const [ttft, tpot] = trace.limits_us.map((us) => us / 1000);
  const lines = [
    `${requests.length} requests at ${p.rate}/s, ${p.mix}, on ${p.layout}; limits TTFT ${ttft} ms, TPOT ${tpot} ms`,
  ];
  for (const [number, { roles, steps }] of trace.gpus.entries()) {
    const busy = Math.floor((100 * sum(steps.map(([start, end]) => end - start))) / trace.end);
    const prompts = comma(sum(steps.map((step) => step[2]))).padStart(6);
    const decodes = String(sum(steps.map((step) => step[3]))).padStart(3);
    const gpu = `GPU ${number} ${roles.padEnd(2)} ${String(steps.length).padStart(4)} steps`;
    lines.push(`${gpu}, busy ${String(busy).padStart(3)} %: ${prompts} prompt tokens, ${decodes} decodes`);
  }
  const ttfts = requests.map((r) => r.first - r.arrival);
  const slowest = ttfts.indexOf(Math.max(...ttfts));
  for (const [name, i] of [["first", 0], ["slowest", slowest]]) {
    const [queue, prefill, wire, rest] = requests[i].parts.map(ms);
    lines.push(`${name} request, #${i}, ${comma(requests[i].prompt)} tokens: TTFT ${ms(ttfts[i])} =`);
    lines.push(`  queue ${queue} + prefill ${prefill} + transfer ${wire} + first step ${rest}`);
  }
  const tpots = requests.map((r) => Math.floor((r.last - r.first) / (r.output - 1))).sort((a, b) => a - b);
  const silence = Math.max(...requests.map((r) => r.gap));
  const median = tpots[Math.floor(tpots.length / 2)];
  const cache = `the cache of ${comma(trace.longest)} tokens, ${mib(trace.longest_bytes)}`;
  return [
    ...lines,
    `TPOT: median ${ms(median)}, worst ${ms(tpots.at(-1))}; longest silence ${ms(silence)}`,
    `${cache}: ${ms(trace.wire_us)} on ${p.link}, ${ms(trace.prefill_us)} to compute`,
    `moved ${mib(trace.bytes_moved)}; within both limits: ${trace.met} of ${requests.length}`,
  ].join("\n");
}
