// Users who ask by themselves, a client that may hold them back, and an engine on a clock: the twin of `simulate` in
// lessons/numbers/06d_load_generator.py. Times are whole microseconds.
import { EngineCore, KVCacheManager, Request, Scheduler } from "./lib/continuous_batching.mjs";
import { comma, fixed, range, sum } from "./lib/text.mjs";

const REQUESTS = 80;
const INPUT = 512; // tokens of each prompt
const OUTPUT = 16; // and of each answer
// Microseconds of a step: fixed, per token computed, per token of context read.
const FIXED_US = 6_440;
const TOKEN_NS = 27_000;
const CONTEXT_NS = 44;
// Gaps between arrivals of three Poisson processes of rate 1, in millionths: a list a seed, drawn once by the script.
const GAPS = [
  [
    1660474, 1266037, 487015, 267412, 638944, 463249, 1366807, 322544, 577766, 781405, 2130421, 626995, 295450,
    1258144, 859685, 257341, 2146427, 3625080, 1483119, 2074454, 331341, 1167942, 2044604, 1028053, 570205, 94723,
    508211, 842358, 2179308, 3033741, 578471, 1789139, 269311, 1459044, 710041, 12621, 1135100, 454132, 1554700,
    984431, 1020, 607200, 1804462, 249522, 351036, 1824009, 189231, 748039, 243294, 3059054, 1450623, 530244, 74845,
    344251, 632877, 2410102, 103055, 715134, 1094206, 707556, 1503330, 693553, 2962678, 824867, 790523, 525438,
    809486, 433699, 764996, 306066, 187384, 184460, 846694, 954044, 577654, 83994, 1264746, 1868500, 2292591, 1649292,
  ],
  [
    150720, 1963933, 1507266, 307584, 714540, 623509, 1101366, 1623857, 102952, 30039, 1886950, 592249, 1500678, 2202,
    615752, 1335448, 271333, 3034814, 2420202, 32452, 26924, 814342, 2924063, 501367, 254989, 572818, 30784, 261800,
    601722, 715320, 277204, 274186, 257902, 642875, 357430, 22692, 1898545, 849178, 1073853, 214845, 5116934, 2053320,
    134587, 422532, 1335240, 1297333, 2878574, 572800, 1851132, 1159031, 377606, 925181, 2236544, 1955502, 735130,
    928788, 36701, 290438, 1667682, 558809, 198424, 831303, 1268262, 1172359, 490450, 603719, 741787, 1574226, 768718,
    521911, 702720, 31359, 46442, 1269463, 4267695, 939469, 522504, 195072, 728719, 4200849,
  ],
  [
    2520972, 2382878, 46971, 71564, 1456288, 1074516, 893899, 297228, 751417, 753175, 702286, 139130, 454511, 403524,
    1035857, 4246503, 2407500, 633926, 474868, 251992, 29520, 22454, 504535, 309364, 385737, 1794241, 601954, 663369,
    217332, 19484, 317310, 118603, 575956, 5351900, 905586, 161942, 1807640, 1285656, 1069738, 1912948, 1161272,
    1258287, 352305, 3196927, 2636534, 141821, 1131601, 1013277, 499293, 609824, 543330, 2088231, 560645, 1437025,
    352477, 1730199, 1855498, 498703, 676687, 2041301, 1038077, 537960, 202354, 316741, 970311, 146533, 1924668,
    251878, 1955372, 298893, 2545709, 988328, 566173, 588448, 850348, 715378, 301564, 187974, 578709, 2195071,
  ],
];

/** When each request is wanted, at `rate` per second. */
function arrival_times(rate, seed) {
  let at = 0;
  return GAPS[seed].map((gap) => Math.floor((at += gap) / rate));
}

/** Lesson 04's loop with a clock in place of the model. */
class SimulatedCore extends EngineCore {
  constructor(scheduler) {
    super(scheduler);
    this.now = 0;
  }

  execute_model(output) {
    const scheduled = [...output.num_scheduled_tokens];
    const tokens = sum(scheduled.map(([, n]) => n));
    const context = sum(scheduled.map(([id]) => this.scheduler.requests.get(id).num_computed_tokens));
    this.now += FIXED_US + Math.floor((TOKEN_NS * tokens + CONTEXT_NS * context) / 1000);
    return super.execute_model(output);
  }
}

/** Serve requests due at `arrivals`. `max_concurrency` 0: open loop. A step sees whoever was sent when it starts. */
function run_simulated(arrivals, max_num_seqs, max_concurrency = 0) {
  const longest = INPUT + OUTPUT;
  const config = { max_model_len: longest, max_num_seqs, max_num_batched_tokens: 8192 };
  const scheduler = new Scheduler(config, new KVCacheManager(1 + max_num_seqs, longest, longest));
  const core = new SimulatedCore(scheduler);
  const run = { sent: [], first: [], done: [], steps: [] };
  const seats = Array(max_concurrency || arrivals.length).fill(0); // since when each of the client's seats is free
  let wanted = 0; // how many users have asked,
  let next = 0; // and for how many of them the client has
  while (next < arrivals.length || scheduler.has_unfinished_requests()) {
    if (!scheduler.has_unfinished_requests()) core.now = Math.max(core.now, arrivals[next]);
    while (next < arrivals.length && seats.length > 0 && arrivals[next] <= core.now) {
      run.sent[next] = Math.max(arrivals[next], seats.shift());
      scheduler.add_request(new Request(next, Array(INPUT).fill(0), OUTPUT));
      next += 1;
    }
    const start = core.now;
    while (arrivals[wanted] <= start) wanted += 1;
    const heard = core.step();
    run.steps.push([start, heard.length, scheduler.waiting.length, wanted - next]);
    for (const { request_id: i, finished } of heard) {
      run.first[i] ??= core.now;
      if (finished) {
        run.done[i] = core.now;
        seats.push(core.now);
      }
    }
  }
  return run;
}

/** Requests per second · 1000 when all are there from the start. */
function capacity_milli(max_num_seqs) {
  const { done } = run_simulated(Array(160).fill(0), max_num_seqs);
  return Math.round((1000 * 160) / (Math.max(...done) / 1e6));
}

/** Sweep over starts and ends: the peak of N(t), requests in flight, and its integral. At one time, ends come first. */
function concurrency(starts, ends) {
  const events = [...starts.map((at) => [at, 1]), ...ends.map((at) => [at, -1])];
  events.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  let n = 0;
  let peak = 0;
  let area = 0;
  events.forEach(([at, change], i) => {
    n += change;
    peak = Math.max(peak, n);
    area += n * ((events[i + 1]?.[0] ?? at) - at);
  });
  return [peak, area];
}

/** Interpolate between neighbours at rank r = p/100 · (n − 1), counted from 0: NumPy's default, and vLLM's. */
function percentile(values, p) {
  const ordered = [...values].sort((a, b) => a - b);
  const r = (p / 100) * (values.length - 1);
  const low = ordered[Math.floor(r)];
  return low + (ordered[Math.ceil(r)] - low) * (r - Math.floor(r));
}

const between = (starts, ends) => starts.map((at, i) => ends[i] - at);

export function simulate(params) {
  const { rate, max_concurrency, max_num_seqs, seed } = params;
  const arrivals = arrival_times(rate, seed);
  const { sent, first, done, steps } = run_simulated(arrivals, max_num_seqs, max_concurrency);
  const [peak_concurrency, area] = concurrency(sent, done);
  const spans = [between(sent, done), between(arrivals, done)]; // since it was sent; since its user asked
  return {
    params, requests: REQUESTS, input_len: INPUT, output_len: OUTPUT, capacity_milli: capacity_milli(max_num_seqs),
    loop_milli: capacity_milli(Math.min(max_num_seqs, max_concurrency || max_num_seqs)),
    arrivals, sent, first, done, steps,
    admitted: first.map((at) => steps.findLast(([start]) => start < at)[0]), // to the step that computed it
    peak_concurrency, area, in_flight_sum: sum(spans[0]),
    mean_us: spans.map((span) => Math.floor(sum(span) / REQUESTS)),
    p99_us: spans.map((span) => Math.floor(percentile(span, 99))),
  };
}

/** Steps as 48 columns: the most that any step in a column had of them. */
function bars(trace, column, span) {
  const { steps, arrivals, done } = trace;
  const columns = Array(48).fill(0);
  const top = Math.max(...steps.map((step) => step[column]));
  const place = (at) => Math.floor(((at - arrivals[0]) * 48) / span);
  steps.forEach((step, i) => {
    const stop = steps[i + 1]?.[0] ?? Math.max(...done);
    for (const x of range(place(step[0]), Math.min(47, place(stop - 1)) + 1)) {
      columns[x] = Math.max(columns[x], step[column]);
    }
  });
  const drawn = columns.map((n) => " ▁▂▃▄▅▆▇█"[Math.ceil((8 * n) / Math.max(top, 1))]).join("");
  return `${String(top).padStart(2)} |${drawn.trimEnd()}`;
}

function verdict({ params: { rate }, loop_milli: limit }, measured, felt) {
  if (felt > 1.5 * measured) {
    return "HIDDEN: the latency looks fine because requests queue in the client, where nobody counts.";
  }
  if (1000 * rate > limit) {
    return "OVERLOADED: the queue grows for as long as the run lasts. A longer run shows a worse latency.";
  }
  return 1000 * rate <= 0.9 * limit ? "The server keeps up." : "At the edge: bursts leave queues.";
}

export function describe(trace) {
  const { params: p, requests: n, arrivals, sent, done } = trace;
  const span = Math.max(...done) - arrivals[0];
  const measured = between(sent, done); // by whoever starts the clock when the request goes out
  const felt = between(arrivals, done);
  const loop = p.max_concurrency ? `at most ${p.max_concurrency} at a time` : "open loop";
  const mean = (values) => comma(Math.floor(Math.floor(sum(values) / n) / 1000));
  const ms = (values) => `mean ${mean(values)} ms, P99 ${fixed(percentile(values, 99) / 1e3, 0)} ms`;
  return [
    `${n} requests of ${trace.input_len} + ${trace.output_len} tokens, ${p.rate} a second, ${loop}; ` +
      `${p.max_num_seqs} seats`,
    `served ${fixed((1e6 * n) / span, 1)} a second; the engine's limit is ${fixed(trace.capacity_milli / 1000, 1)}`,
    `latency since it was sent:    ${ms(measured)}`,
    `latency since the user asked: ${ms(felt)}`,
    `in flight: ${fixed(trace.area / span, 2)} on average, ${trace.peak_concurrency} at most; ` +
      `${fixed((1e6 * n) / span, 2)}/s x ${fixed(sum(measured) / n / 1e6, 4)} s = ${fixed(sum(measured) / span, 2)}`,
    `in the batch    ${bars(trace, 1, span)}`,
    `waiting, engine ${bars(trace, 2, span)}`,
    `waiting, client ${bars(trace, 3, span)}`,
    verdict(trace, sum(measured), sum(felt)),
  ].join("\n");
}
