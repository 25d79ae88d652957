// Requests arrive by themselves at a server of 8 seats: the twin of `simulate` in lessons/numbers/06_serving.py.
// Times in µs.
import { Request } from "./lib/continuous_batching.mjs";
import { MeteredCore, PreemptionScheduler } from "./lib/preemption.mjs";
import { PrefixCachingKVCacheManager } from "./lib/prefix_caching.mjs";
import { ceil_div, fixed, sum } from "./lib/text.mjs";

const SEATS = 8;
const TOKENS = 16; // of each answer
const USUAL_STEP = 28_000; // the default's
const PATIENCE = 1_000_000; // what a user does not mind to wait
// Exponential times between 200 arrivals, mean 1,000: what independent users look like. Drawn once by the script.
const GAPS = [
  1576, 1725, 663, 303, 0, 1087, 635, 1425, 467, 1470, 318, 1619, 1308, 534, 772, 1145, 214, 806, 1635, 308, 1626,
  1157, 1859, 408, 97, 1610, 1633, 589, 98, 219, 1007, 344, 3023, 888, 224, 1065, 446, 2699, 2402, 722, 1034, 1197,
  1637, 3745, 28, 448, 920, 362, 889, 93, 2120, 744, 124, 1086, 374, 218, 661, 148, 235, 2006, 1198, 12, 1505, 17,
  404, 2347, 968, 365, 473, 492, 135, 9016, 55, 549, 1371, 507, 3961, 281, 3875, 2228, 1109, 2202, 592, 1779, 1590,
  727, 636, 1223, 526, 89, 1372, 309, 668, 1532, 188, 22, 131, 890, 447, 296, 600, 2625, 294, 528, 2114, 947, 311,
  643, 651, 153, 473, 364, 1633, 390, 1076, 3532, 2564, 471, 923, 385, 507, 669, 1577, 2758, 343, 6, 596, 58, 30,
  1485, 118, 1267, 449, 2787, 1920, 64, 213, 2944, 950, 548, 1524, 1679, 676, 632, 105, 449, 156, 982, 932, 155, 988,
  102, 111, 1037, 621, 2298, 992, 1208, 135, 1787, 87, 962, 2423, 2383, 2237, 601, 1183, 1567, 147, 2871, 2394, 581,
  1507, 592, 323, 1246, 65, 1610, 3820, 336, 2807, 87, 1952, 328, 3387, 563, 2553, 32, 89, 1694, 1017, 766, 33, 190,
  462, 53, 4967, 1449, 2991, 1206,
];

/** How many may be inside: whoever would be one too many is turned away. */
class AdmissionControl {
  constructor(max_num_queued_reqs) {
    this.max_num_queued_reqs = max_num_queued_reqs;
    this.num_rejected = 0;
  }

  admits(num_inside) {
    const full = num_inside + 1 > this.max_num_queued_reqs;
    this.num_rejected += full ? 1 : 0;
    return !full;
  }
}

export function simulate({ load, gpu_ms, cpu_ms, place, queue_bound }) {
  const cpu = 1000 * cpu_ms;
  const gpu = 1000 * gpu_ms;
  const turns = place === "one loop"; // else CPU and GPU overlap, and tokens come out by the shorter one later
  const step_us = turns ? cpu + gpu : Math.max(cpu, gpu);
  const lag = turns ? 0 : Math.min(cpu, gpu);

  const count = GAPS.length;
  const arrivals = [];
  for (const gap of GAPS) {
    arrivals.push((arrivals.at(-1) ?? 0) + Math.floor((gap * USUAL_STEP * TOKENS * 100) / (SEATS * load * 1000)));
  }
  const config = { max_model_len: 64, max_num_seqs: SEATS, max_num_batched_tokens: 1024 };
  const manager = new PrefixCachingKVCacheManager(1 + 4 * SEATS, 16, 64, { enable_caching: false });
  const scheduler = new PreemptionScheduler(config, manager);
  const core = new MeteredCore(scheduler);
  const admission = new AdmissionControl(queue_bound > 0 ? SEATS + queue_bound : Infinity);
  const first = Array(count).fill(-1);
  const finish = Array(count).fill(-1);
  const steps = [];
  let now = 0;
  let arrived = 0;
  while (arrived < count || scheduler.has_unfinished_requests()) {
    if (!scheduler.has_unfinished_requests()) now = Math.max(now, arrivals[arrived]);
    while (arrived < count && arrivals[arrived] <= now) {
      if (admission.admits(scheduler.requests.size)) scheduler.add_request(new Request(arrived, [0], TOKENS));
      arrived += 1;
    }
    if (!scheduler.has_unfinished_requests()) continue;
    const outputs = core.step();
    const late = scheduler.waiting.filter(({ request_id }) => now - arrivals[request_id] > PATIENCE);
    steps.push([now, outputs.length, scheduler.waiting.length, late.length]);
    now += step_us;
    for (const { request_id: i, finished } of outputs) {
      if (first[i] < 0) first[i] = now + lag;
      if (finished) finish[i] = now + lag;
    }
  }
  const served = GAPS.flatMap((_, i) => (finish[i] >= 0 ? [i] : []));
  const by_request = GAPS.map((_, i) => (finish[i] >= 0 ? first[i] - step_us - lag - arrivals[i] : -1));
  const waits = served.map((i) => by_request[i]).sort((a, b) => a - b);
  return {
    load, step_us, arrivals, waits: by_request, first, finish, steps, makespan: now + lag,
    served: served.length, rejected: admission.num_rejected, gpu_busy: gpu * steps.length,
    gpu_percent: Math.floor((100 * gpu * steps.length) / (now + lag)),
    wait_sum: sum(waits), wait_p99: waits[ceil_div(99 * waits.length, 100) - 1],
    most_waiting: Math.max(...steps.map(([, , waiting]) => waiting)),
    mean_wait_ms: Math.floor((Math.floor(sum(waits) / served.length) + 500) / 1000),
    late: waits.filter((wait) => wait > PATIENCE).length,
    inside_integral: sum(served.map((i) => finish[i] - arrivals[i])),
  };
}

export function describe(trace) {
  const { served, makespan } = trace;
  const seconds = makespan / 1e6;
  const plain = (x, digits) => fixed(x, digits).replaceAll(",", "");
  return [
    `${trace.arrivals.length} requests of ${TOKENS} tokens, ${SEATS} seats, steps of ${trace.step_us / 1000} ms`,
    `served ${served}, rejected ${trace.rejected}; ${plain((served * TOKENS) / seconds, 0)} tokens/s`,
    `arrivals at ${trace.load} % of what steps of 28 ms serve; the GPU computes ${trace.gpu_percent} % of the time`,
    `wait before the first step: mean ${trace.mean_wait_ms} ms, ` +
      `p99 ${Math.round(trace.wait_p99 / 1000)} ms; most waiting: ${trace.most_waiting}; ` +
      `more than a second: ${trace.late}`,
    `Little: ${plain(trace.inside_integral / makespan, 1)} inside on average = ` +
      `${plain(served / seconds, 1)} per second x ${plain(trace.inside_integral / served / 1e6, 2)} s`,
  ].join("\n");
}
