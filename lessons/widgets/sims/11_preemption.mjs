// Equal requests, one every few steps, at a pool that may be too small: the twin of `simulate` in
// lessons/numbers/11_preemption.py.
import { Request } from "./lib/continuous_batching.mjs";
import { MeteredCore, PreemptionScheduler, SwapScheduler } from "./lib/preemption.mjs";
import { PrefixCachingKVCacheManager } from "./lib/prefix_caching.mjs";
import { ceil_div, comma, fixed, range, sum } from "./lib/text.mjs";

const BYTES_PER_TOKEN = 131_072; // Llama-3.1-8B in bf16

/** Writes down every step: who holds how many blocks, who was preempted, what was redone and copied. */
class ObservedCore extends MeteredCore {
  constructor(scheduler) {
    super(scheduler);
    this.now = 0;
    this.steps = [];
  }

  execute_model(output) {
    const before = this.redone;
    const sampled = super.execute_model(output);
    const { kv_cache_manager: manager, waiting, copied = 0 } = this.scheduler;
    const at = (id) => this.scheduler.requests.get(id).num_computed_tokens;
    const computed = Object.fromEntries([...output.num_scheduled_tokens.keys()].map((id) => [id, at(id)]));
    const number = (requests) => requests.map((request) => request.request_id);
    this.steps.push({
      step: this.now, scheduled: Object.fromEntries(output.num_scheduled_tokens), computed,
      held: Object.fromEntries([...manager.req_to_blocks].map(([id, table]) => [id, table.length])),
      free: manager.block_pool.num_free_blocks, waiting: number(waiting), preempted: number(output.preempted),
      resumed: number(output.resumed), redone: this.redone - before, copied,
    });
    this.now += 1;
    return sampled;
  }
}

export function simulate(params) {
  const { pool_blocks, block_size, requests, prompt, output, arrival_gap, watermark_blocks } = params;
  const length = prompt + output;
  const config = {
    max_model_len: length, max_num_seqs: requests, max_num_batched_tokens: Math.max(2048, length), watermark_blocks,
  };
  const caching = { enable_caching: params.prefix_caching };
  const manager = new PrefixCachingKVCacheManager(pool_blocks + 1, block_size, length, caching);
  const scheduler = new (params.policy === "swap" ? SwapScheduler : PreemptionScheduler)(config, manager);
  const core = new ObservedCore(scheduler);
  const token_ns = {
    recompute: Math.floor(10 ** 9 / params.prefill_tok_s), swap: Math.floor((2 * BYTES_PER_TOKEN) / params.link_gb_s),
  };
  const needed = ceil_div(length - 1, block_size); // the last token is never computed
  const refused = needed > pool_blocks ? `request '0' needs ${needed} KV blocks, there are ${pool_blocks}` : null;

  let outputs = 0;
  let arrived = 0;
  while (!refused && (arrived < requests || scheduler.has_unfinished_requests())) {
    const idle = !scheduler.has_unfinished_requests();
    if (idle) core.now = Math.max(core.now, arrived * arrival_gap); // an idle engine sleeps
    while (arrived < requests && arrived * arrival_gap <= core.now) {
      scheduler.add_request(new Request(arrived, range(arrived * prompt, (arrived + 1) * prompt), output));
      arrived += 1;
    }
    outputs += core.step().length;
  }
  const { steps, preemptions, useful, redone } = core;
  const times = range(0, requests).map((i) => sum(steps.map((step) => step.preempted.filter((r) => r === i).length)));
  const victim = preemptions > 0 ? times.indexOf(Math.max(...times)) : requests - 1;
  const copied_blocks = sum(steps.map((step) => step.copied));
  return {
    params, refused, outputs, token_ns, victim, num_steps: steps.length, steps, preemptions, useful, redone,
    copied_blocks,
    recompute_us: Math.floor((redone * 10 ** 6) / params.prefill_tok_s),
    swap_us: Math.floor((copied_blocks * block_size * BYTES_PER_TOKEN) / (params.link_gb_s * 1000)),
  };
}

export function describe(trace) {
  const p = trace.params;
  const lines = [
    `${p.requests} requests of ${p.prompt} + ${p.output} tokens, one every ${p.arrival_gap} steps, ` +
      `${ceil_div(p.prompt + p.output - 1, p.block_size)} blocks of ${p.block_size} each`,
    `pool ${p.pool_blocks} blocks, watermark ${p.watermark_blocks}, ${p.policy}` +
      (p.prefix_caching ? ", prefix caching" : ""),
  ];
  if (trace.refused) return [...lines, `REFUSED on arrival: ${trace.refused}`].join("\n");
  const preempting = trace.steps.filter((step) => step.preempted.length > 0);
  for (const { step, preempted, held, free, waiting } of preempting.slice(0, 4)) {
    const left = Object.entries(held).map(([r, n]) => `r${r}:${n}`).join(" ");
    const victims = preempted.map((r) => `r${r}`).join(", ");
    const after = `left ${left}, ${free} free, ${waiting.length} waiting`;
    lines.push(`  step ${String(step).padStart(3)}: preempted ${victims}; ${after}`);
  }
  if (preempting.length > 4) lines.push(`  … and ${preempting.length - 4} more with preemptions`);
  let cost = `redone in ${fixed(trace.recompute_us / 1e3, 1).replaceAll(",", "")} ms`;
  if (p.policy === "swap") {
    cost += `; ${comma(trace.copied_blocks)} blocks copied in ${fixed(trace.swap_us / 1e3, 1).replaceAll(",", "")} ms`;
  }
  const { swap, recompute } = trace.token_ns;
  return [
    ...lines,
    `${trace.steps.length} steps, ${comma(trace.outputs)} tokens written, ${trace.preemptions} preemptions`,
    `tokens computed: ${comma(trace.useful)} useful, ${comma(trace.redone)} ${cost}`,
    `a token out and in: ${comma(swap)} ns; computed again: ${comma(recompute)} ns`,
  ].join("\n");
}
