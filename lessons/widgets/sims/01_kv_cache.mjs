// The bill of a batch of equal requests: the twin of `simulate` in lessons/numbers/01_kv_cache.py.
import { comma, fixed, repr, sum } from "./lib/text.mjs";

// What decides about memory: layers, and the elements that one token leaves in each of them (Hkv · D keys and as many
// values; DeepSeek-V3's MLA leaves one latent of 512 + 64). Caches are in bf16; weights as vllm/lab/roofline.py counts.
const MODELS = {
  "SmolLM2-135M": { layers: 30, elements: 2 * 3 * 64, weight_bytes: 269_030_016 },
  "OPT-13B": { layers: 40, elements: 2 * 40 * 128, weight_bytes: 26_000_000_000 },
  "Llama-2-7B": { layers: 32, elements: 2 * 32 * 128, weight_bytes: 13_476_831_232 },
  "Llama-3.1-8B": { layers: 32, elements: 2 * 8 * 128, weight_bytes: 16_060_522_496 },
  "Llama-3.1-70B": { layers: 80, elements: 2 * 8 * 128, weight_bytes: 141_107_412_992 },
  "DeepSeek-V3": { layers: 61, elements: 512 + 64, weight_bytes: 671_000_000_000 },
};

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
  const { prompt, new_tokens, cache, model, batch, gpu_gib, restart_positions } = params;
  const { layers, elements, weight_bytes } = MODELS[model];
  const bytes_per_token = layers * elements * 2;
  const usable_bytes = Math.floor((gpu_gib * 2 ** 30 * 92) / 100);
  const per_position = batch * bytes_per_token; // all requests are equal: one row number, `batch` rows
  const room = Math.max(0, Math.floor((usable_bytes - weight_bytes) / per_position));
  const trace = {
    params, bytes_per_token, weight_bytes, usable_bytes, room, oom_step: weight_bytes <= usable_bytes ? null : 0,
    forwards: [], reused: [], positions: [], cache_bytes: [],
  };
  for (const [step, [start, stop]] of steps(prompt, new_tokens, cache).entries()) {
    if (cache && stop > room) trace.oom_step ??= step;
    if (trace.oom_step !== null) break;
    trace.forwards.push(batch * (stop - start));
    trace.reused.push(batch * start);
    trace.positions.push(restart_positions ? 0 : start);
    trace.cache_bytes.push(cache ? stop * per_position : 0);
  }
  trace.total_forwards = sum(trace.forwards);
  trace.text = RECORDED[cache && restart_positions ? "restarted" : "right"];
  return trace;
}

export function describe(trace) {
  const p = trace.params;
  const done = trace.forwards.length;
  const gib = (bytes) => fixed(bytes / 2 ** 30, 2).replaceAll(",", "");
  const lines = [
    `${p.model}, bf16: ${comma(trace.bytes_per_token)} bytes of KV cache per token, ` +
      `weights ${gib(trace.weight_bytes)} GiB`,
    `${p.batch} × (${p.prompt} prompt + ${p.new_tokens} new tokens), cache ${p.cache ? "on" : "off"}, ` +
      `GPU ${p.gpu_gib} GiB, of which ${gib(trace.usable_bytes)} usable`,
  ];
  let before = -1;
  for (const step of [...new Set([0, 1, 2, done - 1])].filter((i) => i >= 0 && i < done)) {
    if (step - before > 1) lines.push("  …");
    before = step;
    const work = `forwards ${comma(trace.forwards[step])}, reuses ${comma(trace.reused[step])}`;
    const held = `first position ${trace.positions[step]}, cache ${fixed(trace.cache_bytes[step] / 2 ** 20, 1)} MiB`;
    lines.push(`  step ${String(step).padStart(4)}: ${work}, ${held}`);
  }
  lines.push(`token-forwards: ${comma(trace.total_forwards)} in ${done} steps`);
  if (trace.weight_bytes > trace.usable_bytes) {
    lines.push("OUT OF MEMORY at step 0: the weights alone do not fit");
  } else if (trace.oom_step !== null) {
    const room = `room for ${comma(trace.room)} positions of ${p.batch} sequences`;
    lines.push(`OUT OF MEMORY at step ${trace.oom_step}: ${room}`);
  }
  lines.push(`SmolLM2 says:\n${repr(trace.text.join(""))}`);
  return lines.join("\n");
}
