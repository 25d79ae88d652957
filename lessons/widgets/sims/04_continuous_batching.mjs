// The Gantt charts of both policies: the twin of `simulate` in lessons/numbers/04_continuous_batching.py.
import { EngineCore, KVCacheManager, Request, Scheduler } from "./lib/continuous_batching.mjs";
import { ceil_div, range, sum } from "./lib/text.mjs";

const LENGTHS = { // output tokens of each request, in order of arrival
  "stragglers": [8, 8, 8, 64, 8, 8, 8, 64, 8, 8, 8, 64, 8, 8, 8, 64],
  "stragglers, sorted": [8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 64, 64, 64, 64],
  "all equal": Array(16).fill(32),
  "the article's": [10, 500, 200, 100],
  "giant last": [...Array(15).fill(8), 96],
  "geometric": [5, 24, 2, 41, 13, 7, 33, 1, 18, 9, 62, 3, 16, 28, 4, 11],
};
const ARRIVALS = { "together": 0, "one every 2 steps": 2, "one every 8 steps": 8 };

/** Request-level batching: fill the seats, run until the last one is done, only then look at the queue again. */
class StaticScheduler extends Scheduler {
  schedule_waiting(output) {
    if (this.running.length === 0) super.schedule_waiting(output);
  }
}

/** The loop without a model, which remembers who was in the last batch. */
class DryRun extends EngineCore {
  execute_model(output) {
    this.batch = [...output.num_scheduled_tokens.keys()];
    return this.batch;
  }
}

/** Drive a scheduler over requests of these lengths: per step who sat where, and when each of them finished. */
function timeline(policy, seats, outputs, arrivals) {
  const block_size = 16;
  const longest = 1 + Math.max(...outputs); // prompts of one token
  const config = { max_model_len: longest, max_num_seqs: seats, max_num_batched_tokens: 2 ** 20 };
  const manager = new KVCacheManager(2 + seats * ceil_div(longest, block_size), block_size, longest);
  const core = new DryRun(new (policy === "static" ? StaticScheduler : Scheduler)(config, manager));
  const run = { lanes: [], waiting: [], spans: [], finish: [] };
  const lane_of = new Map();
  let free = range(0, seats);
  let arrived = 0;
  for (let step = 0; arrived < outputs.length || core.scheduler.has_unfinished_requests(); step++) {
    while (arrived < outputs.length && arrivals[arrived] <= step) {
      core.scheduler.add_request(new Request(arrived, [0], outputs[arrived]));
      arrived += 1;
    }
    const finished = core.step().filter((output) => output.finished);
    const lanes = Array(seats).fill(null);
    for (const i of core.batch) {
      if (!lane_of.has(i)) {
        lane_of.set(i, free.shift());
        run.spans[i] = [lane_of.get(i), step];
      }
      lanes[lane_of.get(i)] = i;
    }
    for (const { request_id: i } of finished) {
      free.push(lane_of.get(i));
      run.finish[i] = step + 1;
      run.spans[i].push(step + 1);
    }
    free.sort((a, b) => a - b);
    run.lanes.push(lanes);
    run.waiting.push(core.scheduler.waiting.length);
  }
  return run;
}

/** No schedule ends earlier: somebody's last token needs its steps, and all work that arrives from t on its seats. */
function lower_bound(seats, outputs, arrivals) {
  const alone = outputs.map((n, i) => arrivals[i] + n);
  const together = arrivals.map((t) => t + ceil_div(sum(outputs.filter((_, i) => arrivals[i] >= t)), seats));
  return Math.max(...alone, ...together);
}

const POLICIES = ["static", "continuous"];

export function simulate({ slots: seats, lengths, arrivals: rhythm }) {
  const outputs = LENGTHS[lengths];
  const arrivals = outputs.map((_, i) => i * ARRIVALS[rhythm]);
  const trace = { outputs, arrivals, slots: seats };
  for (const policy of POLICIES) {
    const run = timeline(policy, seats, outputs, arrivals);
    const latencies = run.finish.map((finish, i) => finish - arrivals[i]);
    trace[policy] = {
      steps: run.lanes.map((lanes, i) => ({ slots: lanes, waiting: run.waiting[i] })),
      spans: run.spans, makespan: run.lanes.length,
      busy: run.lanes.flat().filter((request) => request !== null).length, cells: seats * run.lanes.length,
      bound: lower_bound(seats, outputs, arrivals),
      latency_sum: sum(latencies), latency_max: Math.max(...latencies),
    };
  }
  return trace;
}

export function describe(trace) {
  const { outputs, slots } = trace;
  const lines = [
    `${outputs.length} requests, ${sum(outputs)} output tokens, ${slots} slots; ` +
      `no schedule needs fewer than ${trace.static.bound} steps`,
  ];
  for (const policy of POLICIES) {
    const run = trace[policy];
    lines.push(
      `${policy}: ${run.makespan} steps, ${Math.floor((100 * run.busy) / run.cells)} % of the slots in use; ` +
        `latency: mean ${Math.floor(run.latency_sum / outputs.length)}, longest ${run.latency_max}`,
    );
    for (let slot = 0; slot < slots; slot++) {
      const here = run.spans.flatMap(([s, start, stop], i) => (s === slot ? [`#${i} [${start}, ${stop})`] : []));
      lines.push(`  slot ${slot}: ${here.slice(0, 5).join("  ")}${here.length > 5 ? "  …" : ""}`);
    }
  }
  return lines.join("\n");
}
