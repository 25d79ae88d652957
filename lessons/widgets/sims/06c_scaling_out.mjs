// Micro-batches on their way through stages that only take time: the twin of `simulate` in
// lessons/numbers/06c_scaling_out.py.
import { EngineCore, Request } from "./lib/continuous_batching.mjs";
import { PreemptionScheduler } from "./lib/preemption.mjs";
import { PrefixCachingKVCacheManager } from "./lib/prefix_caching.mjs";
import { ceil_div, range, sum } from "./lib/text.mjs";

const PASS = 240; // ticks for the whole model once,
const TOKEN = 1; // for each token in it,
const SEND = 4; // and for a message to the next stage
const WORKLOADS = { // prompt tokens of each request, and tokens it wants
  "8 short prompts at once": [Array(8).fill(32), Array(8).fill(12)],
  "one long prompt": [[1024], [8]],
  "4 long prompts": [Array(4).fill(512), Array(4).fill(8)],
  "a long prompt among short ones": [[32, 32, 32, 768, 32, 32], Array(6).fill(16)],
};

/** Stages in place of a model. A micro-batch enters one when it has arrived there and its predecessor has left. */
class TimedStages {
  constructor(stages) {
    this.stages = stages;
    this.now = 0;
    this.free = Array(stages).fill(0); // when each stage has nothing left to do
    this.batches = [];
  }

  /** Send a micro-batch on its way; when it will be back, or null if there is nothing in it. */
  submit(output, samples) {
    const scheduled = Object.fromEntries(output.num_scheduled_tokens);
    const tokens = sum(Object.values(scheduled));
    if (tokens === 0) return null;
    const length = ceil_div(PASS + TOKEN * tokens, this.stages);
    const in_flight = this.batches.filter((batch) => batch.spans.at(-1)[1] > this.now);
    const place = range(0, in_flight.length + 1).find((i) => in_flight.every((batch) => batch.place !== i));
    const spans = [];
    let at = this.now;
    for (const stage of range(0, this.stages)) {
      const start = Math.max(at, this.free[stage]);
      this.free[stage] = start + length;
      spans.push([start, start + length]);
      at = start + length + SEND;
    }
    const requests = output.num_scheduled_tokens.size;
    this.batches.push({ tokens, requests, samples, spans, scheduled, at: this.now, place });
    return spans.at(-1)[1];
  }
}

/** The loop with several steps in flight. A request whose token is on its way has nothing left to compute. */
class PipelineEngineCore extends EngineCore {
  constructor(scheduler, runner, max_concurrent_batches) {
    super(scheduler);
    this.runner = runner;
    this.max_concurrent_batches = max_concurrent_batches;
    this.batch_queue = []; // [who samples, when it is back], oldest first
  }

  put_in_flight() {
    if (this.batch_queue.length === this.max_concurrent_batches) return false;
    const output = this.scheduler.schedule();
    const sampled = this.execute_model(output);
    const back = this.runner.submit(output, sampled.length);
    if (back === null) return false;
    this.batch_queue.push([sampled, back]);
    return true;
  }

  /** Fill the pipeline, then take what comes out of it first. */
  step() {
    while (this.put_in_flight());
    const [sampled, back] = this.batch_queue.shift();
    this.runner.now = back; // never earlier than the one before: nobody overtakes in a pipeline
    return this.scheduler.update_from_output(sampled);
  }
}

function pipeline(stages, in_flight, budget, prompts, outputs) {
  const config = { max_model_len: 2048, max_num_seqs: 32, max_num_batched_tokens: budget };
  const manager = new PrefixCachingKVCacheManager(4096, 16, 2048, { enable_caching: false });
  const scheduler = new PreemptionScheduler(config, manager);
  const runner = new TimedStages(stages);
  const core = new PipelineEngineCore(scheduler, runner, in_flight);
  prompts.forEach((prompt, i) => scheduler.add_request(new Request(i, Array(prompt).fill(0), outputs[i])));
  const first = prompts.map(() => -1);
  const finish = prompts.map(() => 0);
  while (scheduler.has_unfinished_requests()) {
    for (const { request_id: i } of core.step()) {
      if (first[i] < 0) first[i] = runner.now;
      finish[i] = runner.now;
    }
  }
  const { batches, now: makespan } = runner;
  const busy = range(0, stages).map((stage) => sum(batches.map(({ spans }) => spans[stage][1] - spans[stage][0])));
  const idle = stages * makespan - sum(busy);
  return { stages, batches, makespan, busy, first, finish, tokens: sum(outputs), idle };
}

export function simulate({ stages, in_flight, budget, workload }) {
  const depth = in_flight === "one per stage" ? stages : 1;
  const one_stage = pipeline(1, 1, budget, ...WORKLOADS[workload]).makespan; // all layers in one place
  const trace = pipeline(stages, depth, budget, ...WORKLOADS[workload]), { idle, makespan } = trace;
  return { ...trace, one_stage, idle_percent: Math.round((100 * idle) / (stages * makespan)) };
}

export function describe({ batches, stages, makespan, idle_percent, first, tokens }) {
  const line = `${stages} stage${stages > 1 ? "s" : ""}`;
  const lines = [
    `${first.length} requests, ${tokens} output tokens, ${line}, ${batches.length} micro-batches`,
    `done after ${makespan} ticks; stages idle ${idle_percent} % of the time`,
    `first token: mean ${Math.floor(sum(first) / first.length)}, last ${Math.max(...first)}`,
  ];
  batches.slice(0, 6).forEach(({ tokens: n, requests, samples, spans }, i) => {
    const way = spans.map(([start, stop]) => `[${start}, ${stop})`).join("  ");
    lines.push(`#${i}: ${n} tokens of ${requests}, samples ${samples}: ${way}`);
  });
  if (batches.length > 6) lines.push("…");
  return lines.join("\n");
}
