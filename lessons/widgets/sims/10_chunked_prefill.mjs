// A long prompt arrives among streams that decode: the twin of `simulate` in lessons/numbers/10_chunked_prefill.py.
import { ChunkedScheduler } from "./lib/chunked_prefill.mjs";
import { EngineCore, KVCacheManager, Request } from "./lib/continuous_batching.mjs";
import { comma, fixed, range, sum } from "./lib/text.mjs";

/** The loop with a clock in place of the model: a step of n tokens takes `step_us + token_us * n`. */
class SimulatedCore extends EngineCore {
  constructor(scheduler, step_us, token_us) {
    super(scheduler);
    this.step_us = step_us;
    this.token_us = token_us;
    this.now = 0;
    this.scheduled = new Map(); // of the last step
    this.token_times = new Map(); // when each request's tokens came
  }

  execute_model(output) {
    this.scheduled = output.num_scheduled_tokens;
    this.now += this.step_us + this.token_us * sum([...this.scheduled.values()]);
    const ready = super.execute_model(output);
    for (const id of ready) this.token_times.set(id, [...(this.token_times.get(id) ?? []), this.now]);
    return ready;
  }

  /** A request of `prompt` tokens that never ends. */
  submit(name, prompt) {
    this.scheduler.add_request(new Request(name, Array(prompt).fill(0), Infinity));
  }

  /** The longest silence between two tokens of one of these requests, from `since` on. */
  worst_gap(names, since) {
    const gaps = names.flatMap((name) => {
      const times = this.token_times.get(name) ?? [];
      return times.slice(1).map((time, i) => (time > since ? time - times[i] : 0));
    });
    return Math.max(0, ...gaps);
  }
}

export function simulate(params) {
  const { decoders, prompt, short_prompt } = params;
  const { params: _, ...whole } = run({ ...params, budget: decoders + prompt + short_prompt, threshold: 0 });
  return { ...run(params), whole };
}

/** One run; `whole`, in the trace, is another one with room for everything in one step. */
function run(params) {
  const { budget, decoders, prompt, short_prompt, threshold, adaptive, step_us, token_us } = params;
  const seats = decoders + 2;
  const max_model_len = 20000 + prompt + short_prompt;
  const config = {
    max_model_len, max_num_seqs: seats,
    max_num_batched_tokens: Math.max(budget, seats), max_num_scheduled_tokens: budget,
    long_prefill_token_threshold: threshold, long_prefill_token_threshold_adaptive: adaptive,
  };
  const manager = new KVCacheManager(seats + 1, max_model_len, max_model_len); // never the limit: a block per request
  const core = new SimulatedCore(new ChunkedScheduler(config, manager), step_us, token_us);
  const streams = range(0, decoders).map((i) => `stream ${i}`);
  for (const name of streams) core.submit(name, 1);
  const trace = { params, start_us: [], decodes: [], chunk: [], short_chunk: [] };

  /** One step; returns the newcomers' tokens in it. */
  function step() {
    trace.start_us.push(core.now);
    core.step();
    const chunk = core.scheduled.get("long") ?? 0;
    const short = core.scheduled.get("short") ?? 0;
    trace.decodes.push(sum([...core.scheduled.values()]) - chunk - short);
    trace.chunk.push(chunk);
    trace.short_chunk.push(short);
    return chunk + short;
  }

  if (decoders > 0) for (let i = 0; i < 3; i++) step();
  trace.arrival_us = core.now;
  const newcomers = short_prompt > 0 ? { long: prompt, short: short_prompt } : { long: prompt };
  for (const [name, length] of Object.entries(newcomers)) core.submit(name, length);
  trace.starved = false;
  while (!trace.starved && Object.keys(newcomers).some((name) => !core.token_times.has(name))) {
    trace.starved = step() === 0; // the streams never end: who gets nothing now never will
  }
  if (!trace.starved) for (let i = 0; i < 2; i++) step();
  const ttft = (name) => (core.token_times.has(name) ? core.token_times.get(name)[0] - trace.arrival_us : null);
  return {
    ...trace,
    end_us: core.now,
    ttft_us: ttft("long"),
    short_ttft_us: ttft("short"),
    worst_gap_us: core.worst_gap(streams, trace.arrival_us),
    silent_streams: streams.filter((name) => !core.token_times.has(name)).length, // got no token at all
  };
}

export function describe(trace) {
  const p = trace.params;
  const done = trace.start_us.length;
  const ms = (us) => `${fixed(us / 1000, 1)} ms`;
  const lines = [
    `budget ${comma(p.budget)}, ${p.decoders} streams, a prompt of ${comma(p.prompt)} tokens; ` +
      `a step takes ${ms(p.step_us)} + ${p.token_us} µs per token`,
  ];
  const ends = [...trace.start_us.slice(1), trace.end_us];
  let before = -1;
  for (const i of range(0, done).filter((step) => step < 5 || step >= done - 4)) {
    if (i - before > 1) lines.push(`  … and ${i - before - 1} more`);
    before = i;
    const short = p.short_prompt > 0 ? ` + short prompt ${trace.short_chunk[i]}` : "";
    const took = ms(ends[i] - trace.start_us[i]).padStart(8);
    const decodes = `decodes ${String(trace.decodes[i]).padStart(3)}`;
    const chunk = `chunk ${String(trace.chunk[i]).padStart(4)}`;
    lines.push(`  step ${String(i).padStart(3)}, ${took}: ${decodes} + ${chunk}${short}`);
  }
  if (trace.ttft_us === null) {
    lines.push(`STARVED: the streams use all ${comma(p.budget)} tokens of every step; the prompt will never start`);
  } else {
    const short = trace.short_ttft_us ? `, short prompt's ${ms(trace.short_ttft_us)}` : "";
    lines.push(`TTFT ${ms(trace.ttft_us)}${short}; the others' longest silence ${ms(trace.worst_gap_us)}`);
  }
  if (trace.silent_streams > 0) lines.push(`and ${trace.silent_streams} of the streams get no token either`);
  return lines.join("\n");
}
