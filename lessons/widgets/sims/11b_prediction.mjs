// An engine on a clock under load: the twin of `simulate` in lessons/numbers/11b_prediction.py. Blocks are counted and
// have no names, as nobody shares any. Times are whole microseconds.
import { comma, fixed, ceil_div, range, sum } from "./lib/text.mjs";
import { uniforms } from "./lib/uniforms.mjs";

const RATES = [2, 4, 6, 7, 8, 9, 10, 12];
const PROMPT = [2048, 6144];
const ANSWER = [16, 64];
const SEEDS = [11, 12, 13];
const REQUESTS = 160;
const BUDGET = 8192; // tokens a step
const BLOCK = 16;
const SLICE = 250_000;
const LIMIT = 1_000_000;
// Llama-3.1-8B on an H100: what StepCost.of makes of the data sheet.
const WEIGHTS_US = 4870;
const TOKEN_NS = 18_819;
const HEAD_NS = 1416;
const CONTEXT_PS = 65_210;
const PAIR_PS = 1325;
const SEQUENCE_US = 30;
const FIXED_US = 4660;

/** Users who do not know of each other: [arrival · rate in millionths, prompt, answer]. */
function wanted() {
  const [gaps, prompts, answers] = SEEDS.map((seed) => uniforms(seed, REQUESTS));
  const length = ([low, high], u) => low + Math.floor(u * (high - low));
  let at = 0;
  return gaps.map((gap, i) => {
    at += Math.round(-1e6 * Math.log(1 - gap));
    return [at, length(PROMPT, prompts[i]), length(ANSWER, answers[i])];
  });
}

/** Of a step: q tokens of each sequence, with S of context. */
function step_us(chunks) {
  const tokens = sum(chunks.map(([q]) => q));
  const context = sum(chunks.map(([, S]) => S));
  const pairs = sum(chunks.map(([q, S]) => (q === 1 ? 0 : q * S - (q * (q - 1)) / 2)));
  const linear = Math.max(1000 * WEIGHTS_US, TOKEN_NS * tokens + HEAD_NS * chunks.length);
  const attention = Math.floor((CONTEXT_PS * context + PAIR_PS * pairs) / 1000);
  return Math.floor((linear + attention) / 1000) + SEQUENCE_US * chunks.length + FIXED_US;
}

/** Lesson 11's scheduler with a number in the place of a block table. */
class Pool {
  constructor(seats, blocks) {
    this.seats = seats;
    this.free = blocks;
    this.running = [];
    this.waiting = [];
    this.preemptions = 0;
  }

  /** Room for the next `n` tokens of a request, or nothing has changed. */
  take(request, n) {
    const missing = Math.max(0, ceil_div(request.computed + n, BLOCK) - request.blocks);
    if (missing > this.free) return false;
    this.free -= missing;
    request.blocks += missing;
    return true;
  }

  give_back(request) {
    this.free += request.blocks;
    request.blocks = 0;
  }

  /** Who is in the next step: [request, tokens] of each. */
  schedule() {
    const step = [];
    let budget = BUDGET;
    let preempted = false;
    const grant = (request, n) => {
      step.push([request, n]);
      request.computed += n;
      budget -= n;
    };
    for (let i = 0; i < this.running.length && budget > 0; i++) {
      const request = this.running[i];
      const n = Math.min(request.tokens - request.computed, budget);
      while (i < this.running.length && !this.take(request, n)) {
        const victim = this.running.pop(); // the one admitted last; it may be the one who asks
        this.give_back(victim);
        victim.computed = 0;
        this.waiting.unshift(victim);
        this.preemptions += 1;
        preempted = true;
      }
      if (i < this.running.length) grant(request, n);
    }
    while (!preempted && this.waiting.length > 0 && budget > 0 && this.running.length < this.seats) {
      const request = this.waiting[0];
      if (ceil_div(request.tokens, BLOCK) > this.free) break; // all that is known of it must fit
      const n = Math.min(request.tokens, budget);
      this.take(request, n);
      this.running.push(this.waiting.shift());
      grant(request, n);
    }
    return step;
  }
}

/** The run of all who come within `seconds`. */
function serve(users, rate, { max_num_seqs, num_blocks, seconds }) {
  const jobs = users.filter(([at]) => at < rate * seconds * 1e6).map(([at, prompt, answer]) => ({
    arrival: Math.floor(at / rate), prompt, answer, tokens: prompt, computed: 0, blocks: 0, first: null, done: null,
  }));
  const pool = new Pool(max_num_seqs, num_blocks);
  const steps = [];
  let now = 0;
  let coming = 0;
  while (coming < jobs.length || pool.running.length + pool.waiting.length > 0) {
    if (pool.running.length + pool.waiting.length === 0) now = Math.max(now, jobs[coming].arrival);
    while (coming < jobs.length && jobs[coming].arrival <= now) pool.waiting.push(jobs[coming++]);
    const scheduled = now;
    const step = pool.schedule();
    now += step_us(step.map(([request, n]) => [n, request.computed]));
    steps.push({
      scheduled, took: now - scheduled, tokens: sum(step.map(([, n]) => n)),
      running: pool.running.length, waiting: pool.waiting.length, blocks: num_blocks - pool.free,
    });
    for (const [request] of step) {
      if (request.computed < request.tokens) continue;
      request.tokens += 1;
      request.first ??= now;
      if (request.tokens < request.prompt + request.answer) continue;
      request.done = now;
      pool.give_back(request);
    }
    pool.running = pool.running.filter((request) => request.done === null);
  }
  return { jobs, steps, preemptions: pool.preemptions };
}

/** Interpolate between neighbours at rank r = p/100 · (n − 1), counted from 0: NumPy's default, and vLLM's. */
function percentile(values, p) {
  const ordered = [...values].sort((a, b) => a - b);
  const r = (p / 100) * (values.length - 1);
  const low = ordered[Math.floor(r)];
  return low + (ordered[Math.ceil(r)] - low) * (r - Math.floor(r));
}

/** [median, P99] to the first token. */
function ttft({ jobs }) {
  const waits = jobs.map((job) => job.first - job.arrival);
  return [50, 99].map((p) => Math.floor(percentile(waits, p)));
}

/** The most that were in flight at once. At one time, ends come first. */
function peak_of(jobs) {
  const events = jobs.flatMap((job) => [[job.arrival, 1], [job.done, -1]]);
  events.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  let inside = 0;
  return Math.max(...events.map(([, change]) => (inside += change)));
}

const LIMITS = ["step time", "seats", "KV blocks"];

/** What whoever waits after this step waits for. */
function limit_of(step, max_num_seqs) {
  if (step.tokens === BUDGET) return 0;
  return step.running === max_num_seqs ? 1 : 2;
}

export function simulate(params) {
  const users = wanted();
  const runs = RATES.map((rate) => serve(users, rate, params));
  const curve = runs.map(ttft);
  const place = RATES.indexOf(params.rate);
  const { jobs, steps, preemptions } = runs[place];
  const { seconds } = params;
  const strip = range(SLICE, seconds * 1e6 + 1, SLICE).map((at) => {
    const step = steps.findLast(({ scheduled }) => scheduled <= at);
    return step ? [step.running, step.waiting, step.blocks] : [0, 0, 0];
  });
  const limits_us = [0, 0, 0];
  for (const step of steps) if (step.waiting > 0) limits_us[limit_of(step, params.max_num_seqs)] += step.took;
  const most = Math.max(...limits_us);
  const area = sum(jobs.map((job) => job.done - job.arrival));
  const end = steps.at(-1);
  return {
    params, rates: RATES, curve, leaves: RATES.find((_, i) => curve[i][1] > LIMIT) ?? null,
    requests: jobs.length, steps: steps.length, end_us: end.scheduled + end.took, strip,
    p50_us: curve[place][0], p99_us: curve[place][1], mean_us: Math.floor(area / jobs.length),
    area, peak: peak_of(jobs), limits_us, preemptions,
    limit: most > 0 ? LIMITS[limits_us.indexOf(most)] : null,
  };
}

export function describe(trace) {
  const { params: p, requests: n, strip, end_us } = trace;
  const seconds = (us) => `${fixed(us / 1e6, 2)} s`;
  const lines = [
    `${n} requests in ${p.seconds} s, ${p.rate} a second; ${comma(p.max_num_seqs)} seats, ` +
      `${comma(p.num_blocks)} blocks; ${trace.steps} steps`,
    `to the first token: median ${seconds(trace.p50_us)}, P99 ${seconds(trace.p99_us)}`,
    `in flight: ${fixed((1e6 * n) / end_us, 2)}/s x ${seconds(trace.mean_us)} = ` +
      `${fixed(trace.area / end_us, 1)} on average, ${trace.peak} at most`,
  ];
  ["seats taken", "waiting", "blocks owned"].forEach((name, column) => {
    const top = Math.max(...strip.map((row) => row[column]));
    const bars = strip.map((row) => " ▁▂▃▄▅▆▇█"[Math.ceil((8 * row[column]) / Math.max(top, 1))]).join("");
    lines.push(`${name.padEnd(13)}${comma(top).padStart(6)} |${bars.trimEnd()}`);
  });
  const half = strip[Math.floor(strip.length / 2) - 1][1];
  const last = strip.at(-1)[1];
  if (trace.limit === null) lines.push("Nobody waits for anything but a step.");
  else if (last > 2 * half && last > 4) {
    lines.push(`OVERLOADED, by ${trace.limit}: ${half} wait after half of the time, ${last} at the end.`);
  } else lines.push(`Whoever waits, waits for ${trace.limit}. The queue is ${last} long at the end.`);
  return lines.join("\n");
}
