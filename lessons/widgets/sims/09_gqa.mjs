// Which query head reads which KV head on which GPU, and what that costs: the twin of `simulate` in
// lessons/numbers/09_gqa.py.
import { comma, general, range } from "./lib/text.mjs";

const LAYERS = 32; // an 8B model, bf16
const WEIGHTS = 16 * 10 ** 9;

const HEAD_MAPS = {
  /** Neighbours share: h -> ⌊h / G⌋ with G = Hq / Hkv. */
  interleaved: (Hq, Hkv) => range(0, Hq).map((h) => Math.floor(h / (Hq / Hkv))),
  /** The bug: h -> h mod Hkv, what `repeat` does where `repeat_interleave` was meant. */
  tiled: (Hq, Hkv) => range(0, Hq).map((h) => h % Hkv),
};

/** Heads are dealt out; with fewer heads than GPUs, each GPU still holds one: a copy. */
const kv_heads_per_gpu = (Hkv, tp) => Math.max(1, Math.floor(Hkv / tp));

/** Bytes that one sequence of `context` tokens holds on each of `tp` GPUs: keys and values, two bytes each. */
const cache_bytes = (Hkv, D, context, tp) => LAYERS * context * kv_heads_per_gpu(Hkv, tp) * (2 * D * 2);

export function simulate(params) {
  const { num_heads: Hq, num_kv_heads: Hkv, head_dim: D, tp, context, gpu_gib, head_map } = params;
  if (Hq % Hkv !== 0) return { params, problem: `${Hkv} KV heads cannot serve ${Hq} query heads` };
  if (Hq % tp !== 0) return { params, problem: `${tp} GPUs cannot share ${Hq} query heads` };
  const per_gpu = kv_heads_per_gpu(Hkv, tp);
  const right = HEAD_MAPS.interleaved(Hq, Hkv);
  const each = Hq / tp;
  const owned = range(0, tp).map((gpu) => {
    const first = Math.floor((gpu * Hkv) / tp);
    return range(first, first + per_gpu);
  });
  const local = HEAD_MAPS[head_map](each, per_gpu); // a kernel counts the heads of its own GPU, from 0
  const used = range(0, Hq).map((h) => owned[Math.floor(h / each)][local[h % each]]);
  const outputs = used; // one key, and the value of KV head i is i: a query head's output is the head that it read
  const usable = Math.floor((gpu_gib * 2 ** 30 * 92) / 100);
  const room = Math.max(0, usable - Math.floor(WEIGHTS / tp));
  return {
    params, problem: null, head_map: used,
    gpu_of_head: range(0, Hq).map((h) => Math.floor(h / each)),
    kv_heads_of_gpu: owned,
    copies: (tp * per_gpu) / Hkv,
    outputs,
    wrong_heads: range(0, Hq).filter((h) => outputs[h] !== right[h]),
    num_wrong: outputs.filter((head, h) => head !== right[h]).length,
    bytes_per_token: cache_bytes(Hkv, D, 1, 1),
    bytes_per_token_per_gpu: cache_bytes(Hkv, D, 1, tp),
    max_sequences: Math.floor(room / cache_bytes(Hkv, D, context, tp)),
  };
}

export function describe(trace) {
  const p = trace.params;
  const lines = [
    `${p.num_heads} query heads, ${p.num_kv_heads} KV heads of ${p.head_dim}, ` +
      `${p.tp} GPU${p.tp > 1 ? "s" : ""} of ${p.gpu_gib} GiB, map ${p.head_map}`,
  ];
  if (trace.problem) return [...lines, `IMPOSSIBLE: ${trace.problem}`].join("\n");
  for (const gpu of range(0, p.tp).filter((i) => i < 2 || i === p.tp - 1)) {
    const heads = range(0, p.num_heads).filter((h) => trace.gpu_of_head[h] === gpu);
    const reads = heads.slice(0, 8).map((h) => trace.head_map[h]).join(", ") + (heads.length > 8 ? ", …" : "");
    const held = trace.kv_heads_of_gpu[gpu].join(", ");
    lines.push(`  GPU ${gpu}: query heads ${heads[0]}–${heads.at(-1)} read KV heads ${reads}; it holds ${held}`);
  }
  const kib = (bytes) => `${general(bytes / 1024, 6)} KiB`;
  const copies = trace.copies > 1 ? `, ${trace.copies} copies of each KV head` : "";
  const on_each = `on each GPU ${kib(trace.bytes_per_token_per_gpu)}${copies}`;
  lines.push(`cache per token: ${kib(trace.bytes_per_token)}; ${on_each}`);
  const fit = `sequences of ${comma(p.context)} tokens that fit beside 16 GB of weights`;
  lines.push(`${fit}: ${comma(trace.max_sequences)}`);
  const wrong = trace.wrong_heads;
  if (wrong.length === 0) lines.push("every query head reads its own group's KV head");
  else {
    const first = `the first is head ${wrong[0]}`;
    lines.push(`WRONG: ${wrong.length} of ${p.num_heads} query heads read another group's KV head, ${first}`);
  }
  return lines.join("\n");
}
