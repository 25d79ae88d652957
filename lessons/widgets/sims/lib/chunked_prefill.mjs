// Lesson 10's scheduler (vllm/10_chunked_prefill.py): a prompt takes what is left of the step's budget.
import { Scheduler } from "./continuous_batching.mjs";

/** Running requests still come first, so decodes are never delayed by a prompt that arrives. */
export class ChunkedScheduler extends Scheduler {
  constructor(config, kv_cache_manager) {
    super(config, kv_cache_manager);
    this.max_num_scheduled_tokens = config.max_num_scheduled_tokens ?? config.max_num_batched_tokens;
  }

  schedule() {
    this.cap = this.long_prefill_cap();
    return super.schedule();
  }

  /** The most tokens that one request may get in this step. Who is alone has nobody to starve, and is not capped. */
  long_prefill_cap() {
    const threshold = this.config.long_prefill_token_threshold ?? 0;
    const num_requests = this.running.length + this.waiting.length;
    if (threshold === 0 || num_requests <= 1) return Infinity;
    const fair_share = Math.floor(this.config.max_num_batched_tokens / num_requests);
    return this.config.long_prefill_token_threshold_adaptive ? Math.max(threshold, fair_share) : threshold;
  }

  /** How far a request may catch up in this step: n = min(tokens behind, cap, budget). */
  num_new_tokens(request) {
    return Math.min(request.num_tokens - request.num_computed_tokens, this.cap, this.token_budget);
  }
}
