// A batch of equal requests with a cache and without one: the twin of `simulate` in lessons/numbers/01_kv_cache.py.
import { comma, fixed, repr, sum } from "./lib/text.mjs";

// What decides about time and memory: layers, query heads, elements of keys and values per token and layer, bytes of
// all weights, and those that a pass multiplies by: for each token, and for each row of logits. As vllm/lab/roofline.py
// counts them.
const MODELS = {
  "SmolLM2-135M": {
    layers: 30, width: 9 * 64, elements: 2 * 3 * 64, weights: 269_030_016, W: 106_203_456, head: 28_311_552,
  },
  "Llama-2-7B": {
    layers: 32, width: 4096, elements: 2 * 4096, weights: 13_476_831_232, W: 6_476_271_616, head: 131_072_000,
  },
  "Llama-3.1-8B": {
    layers: 32, width: 4096, elements: 2 * 1024, weights: 16_060_522_496, W: 6_979_588_096, head: 525_336_576,
  },
};

// GiB, and a data sheet's bytes and operations per second.
const GPUS = {
  A10: { mib: 23028, bandwidth: 600e9, flops: 125e12 },
  H100: { mib: 81559, bandwidth: 3350e9, flops: 989e12 },
  MI300X: { mib: 196592, bandwidth: 5300e9, flops: 1307e12 },
};
const TICKS = 60; // of the clock on which the two runs race

// What SmolLM2 answers, greedily, with right positions and with positions that restart at 0. Recorded: numbers/01.
const RECORDED = {
  right: ["The", " planets", " of", " the", " solar", " system", " are", ":", " Mercury", ",", " Venus", ",",
    " Earth", ",", " Mars", ",", " Jupiter", ",", " Saturn", ",", " Uranus", ",", " Neptune", ","],
  restarted: ["The", " Solar", " System", " of", " the", " Solar", " System", " of", " the", " Solar", " System",
    ".", "com", ".", "com", ".", "com", ".", "com", ".", "com", ".", "com", "."],
};

/** The positions [start, stop) that each forward pass computes. The first one is the prefill: the whole prompt. */
function steps(prompt_len, max_tokens, cached) {
  return Array.from({ length: max_tokens }, (_, i) => [cached && i > 0 ? prompt_len + i - 1 : 0, prompt_len + i]);
}

export function simulate(params) {
  const { prompt, new_tokens, model, batch, gpu, restart_positions } = params;
  const { layers, width, elements, weights, W, head } = MODELS[model];
  const { mib, bandwidth, flops: rate } = GPUS[gpu];
  const bytes_per_token = layers * elements * 2;
  const usable_bytes = Math.floor((mib * 2 ** 20 * 92) / 100);
  const per_position = batch * bytes_per_token; // all requests are equal: one row number, `batch` rows
  const room = Math.max(0, Math.floor((usable_bytes - weights) / per_position));
  const fits = weights <= usable_bytes;
  let oom_step = fits ? null : 0;

  /** µs of a pass over the last T of S positions: the slower of arithmetic and reading. */
  function pass(T, S) {
    const pairs = batch * (T * S - (T * (T - 1)) / 2); // the last token sees S keys, the one before it S − 1, …
    const flops = 2 * W * batch * T + 2 * head * batch + 4 * layers * width * pairs;
    const moved = 2 * (W + head) + batch * (S + T) * bytes_per_token;
    return Math.floor(1e6 * Math.max(flops / rate, moved / bandwidth));
  }

  function run(cached) {
    const done = { forwards: [], us: [] };
    for (const [step, [start, stop]] of (fits ? steps(prompt, new_tokens, cached) : []).entries()) {
      if (cached && stop > room) {
        oom_step = step;
        break;
      }
      done.forwards.push(batch * (stop - start));
      done.us.push(pass(stop - start, stop));
    }
    return done;
  }

  const runs = [run(true), run(false)];
  const took = runs.map(({ us }) => sum(us));
  const clock = [];
  for (let tick = 1; tick <= TICKS; tick++) {
    const now = Math.floor(((oom_step === null ? Math.max(...took) : took[0]) * tick) / TICKS);
    const row = [now];
    for (const { forwards, us } of runs) {
      let [done, end] = [0, 0];
      while (done < us.length && end + us[done] <= now) end += us[done++];
      row.push(done, sum(forwards.slice(0, done)));
    }
    clock.push(row);
  }
  const whole = runs[0].us.length === new_tokens;
  return {
    params, bytes_per_token, weight_bytes: weights, usable_bytes, gpu_bytes: mib * 2 ** 20, room, oom_step,
    with: runs[0], without: runs[1], took,
    times: whole ? Math.floor((2 * took[1] + took[0]) / (2 * took[0])) : 0,
    clock, cache_bytes: clock.map(([, done]) => (done > 0 ? (prompt + done - 1) * per_position : 0)),
    text: RECORDED[restart_positions ? "restarted" : "right"],
  };
}

export function describe(trace) {
  const p = trace.params;
  const [few, many] = [sum(trace.with.forwards), sum(trace.without.forwards)];
  const gib = (bytes) => fixed(bytes / 2 ** 30, 2).replaceAll(",", "");
  const [took, without] = trace.took.map((us) => fixed(us / 1e6, 2).padStart(9));
  const lines = [
    `${p.model} in bf16 on one ${p.gpu}: weights ${gib(trace.weight_bytes)} GiB, ` +
      `of ${gib(trace.usable_bytes)} usable; ${comma(trace.bytes_per_token)} bytes of cache per token`,
    `${p.batch} × (${p.prompt} prompt + ${p.new_tokens} new tokens)`,
    `with a cache:    ${comma(few).padStart(12)} token-forwards, ${took} s, ` +
      `${gib(trace.cache_bytes.at(-1))} GiB of keys and values`,
    `without a cache: ${comma(many).padStart(12)} token-forwards, ${without} s`,
  ];
  if (trace.weight_bytes > trace.usable_bytes) {
    lines.push("OUT OF MEMORY at step 0: the weights alone do not fit");
  } else if (trace.oom_step !== null) {
    const room = `room for ${comma(trace.room)} positions of ${p.batch} sequences`;
    lines.push(`OUT OF MEMORY at step ${trace.oom_step}: ${room}`);
  } else {
    lines.push(`the cache makes it ${trace.times} times as fast`);
  }
  lines.push(`SmolLM2 says:\n${repr(trace.text.join(""))}`);
  return lines.join("\n");
}
