// Lesson 04's requests, block tables per request, and scheduler (vllm/04_continuous_batching.py), without the model.
import { BlockPool } from "./block_pool.mjs";
import { ceil_div } from "./text.mjs";

/** One sequence on its way through the engine. It is behind by `num_tokens - num_computed_tokens` tokens. */
export class Request {
  constructor(request_id, prompt_token_ids, max_tokens, cache_salt = "") {
    this.request_id = request_id;
    this.max_tokens = max_tokens; // Infinity: until the context is full
    this.cache_salt = cache_salt;
    this.status = "waiting"; // then "running", "preempted" or "finished"
    this.num_prompt_tokens = prompt_token_ids.length;
    this.all_token_ids = [...prompt_token_ids]; // the prompt, then everything generated
    this.num_computed_tokens = 0;
    this.block_hashes = []; // one per full block, written by lesson 05's manager
  }

  get num_tokens() {
    return this.all_token_ids.length;
  }

  get num_output_tokens() {
    return this.num_tokens - this.num_prompt_tokens;
  }
}

/** Keeps each block table long enough for the tokens that are about to be computed. Tables only grow. */
export class KVCacheManager {
  constructor(num_blocks, block_size, max_model_len) {
    this.block_pool = this.make_pool(num_blocks);
    this.block_size = block_size;
    this.max_model_len = max_model_len;
    this.req_to_blocks = new Map();
  }

  make_pool(num_blocks) {
    return new BlockPool(num_blocks);
  }

  /** Blocks missing until the table holds `num_tokens`. */
  get_num_blocks_to_allocate(request, num_tokens) {
    const needed = ceil_div(Math.min(num_tokens, this.max_model_len), this.block_size);
    const table = this.req_to_blocks.get(request.request_id) ?? [];
    return Math.max(0, needed - table.length);
  }

  /** Make room for `num_new_tokens` behind those computed. Whether there was room; if not, nothing has changed. */
  allocate_slots(request, num_new_tokens) {
    const missing = this.get_num_blocks_to_allocate(request, request.num_computed_tokens + num_new_tokens);
    if (missing === 0) return true;
    if (missing > this.block_pool.num_free_blocks) return false;
    const table = this.req_to_blocks.get(request.request_id) ?? [];
    this.req_to_blocks.set(request.request_id, [...table, ...this.block_pool.allocate(missing)]);
    return true;
  }

  free(request) {
    this.block_pool.free(this.req_to_blocks.get(request.request_id) ?? []);
    this.req_to_blocks.delete(request.request_id);
  }
}

/** The batch is chosen anew for every step; a request is admitted only if all of it, to its last token, fits. */
export class Scheduler {
  constructor(config, kv_cache_manager) {
    this.config = config; // { max_model_len, max_num_seqs, max_num_batched_tokens, … }
    this.kv_cache_manager = kv_cache_manager;
    this.max_num_scheduled_tokens = config.max_num_batched_tokens;
    this.requests = new Map(); // all that are not finished
    this.running = []; // in order of admission
    this.waiting = [];
    this.token_budget = 0; // what is left of the step being scheduled
  }

  add_request(request) {
    this.requests.set(request.request_id, request);
    this.waiting.push(request);
  }

  has_unfinished_requests() {
    return this.requests.size > 0;
  }

  /** Choose requests and token counts for the next step, and allocate the blocks that it will write. */
  schedule() {
    const output = { num_scheduled_tokens: new Map(), resumed: [], preempted: [] };
    this.token_budget = this.max_num_scheduled_tokens;
    this.schedule_running(output);
    this.schedule_waiting(output);
    return output;
  }

  /** Whoever runs goes on. Its blocks were taken when it was admitted. */
  schedule_running(output) {
    for (const request of this.running) {
      const num_new_tokens = this.num_new_tokens(request);
      if (num_new_tokens > 0) this.grant(request, num_new_tokens, output);
    }
  }

  /** Admit from the head of the queue while budget, seats and blocks last. Nobody overtakes the head. */
  schedule_waiting(output) {
    while (this.waiting.length > 0 && this.token_budget > 0 && this.running.length < this.config.max_num_seqs) {
      const request = this.waiting[0];
      const num_new_tokens = this.admit(request);
      if (num_new_tokens === 0) break;
      this.running.push(this.waiting.shift());
      if (request.status === "preempted") output.resumed.push(request);
      request.status = "running";
      this.grant(request, num_new_tokens, output);
    }
  }

  /** How far a request may catch up in this step: all the way or, if that exceeds the budget, not at all. */
  num_new_tokens(request) {
    const behind = request.num_tokens - request.num_computed_tokens;
    return behind <= this.token_budget ? behind : 0;
  }

  /** Take blocks for the whole life of a waiting request. Its tokens in this step; 0: it must wait. */
  admit(request) {
    const num_new_tokens = this.num_new_tokens(request);
    const fits = num_new_tokens > 0 && this.kv_cache_manager.allocate_slots(request, this.num_slots(request));
    return fits ? num_new_tokens : 0;
  }

  /** KV slots that a request fills in its life. Its last token is sampled and never computed. */
  num_slots(request) {
    return Math.min(request.num_prompt_tokens + request.max_tokens, this.config.max_model_len) - 1;
  }

  /** Enter a request into the step. Its tokens count as computed from now on. */
  grant(request, num_new_tokens, output) {
    output.num_scheduled_tokens.set(request.request_id, num_new_tokens);
    this.token_budget -= num_new_tokens;
    request.num_computed_tokens += num_new_tokens;
  }

  /** Append a token to whoever has caught up; finish requests and free their blocks, in scheduling order. */
  update_from_output(sampled_request_ids) {
    const outputs = [];
    for (const request_id of sampled_request_ids) {
      const request = this.requests.get(request_id);
      request.all_token_ids.push(0); // everybody's next token is 0
      const finished =
        request.num_tokens >= this.config.max_model_len || request.num_output_tokens >= request.max_tokens;
      if (finished) {
        request.status = "finished";
        this.free_request(request);
      }
      outputs.push({ request_id, finished });
    }
    this.running = this.running.filter((request) => request.status !== "finished");
    return outputs;
  }

  free_request(request) {
    this.kv_cache_manager.free(request);
    this.requests.delete(request.request_id);
  }
}

/** The loop without a model: whoever has no tokens left to compute samples one. */
export class EngineCore {
  constructor(scheduler) {
    this.scheduler = scheduler;
  }

  step() {
    const output = this.scheduler.schedule();
    return this.scheduler.update_from_output(this.execute_model(output));
  }

  execute_model(output) {
    const { requests } = this.scheduler;
    const caught_up = (id) => requests.get(id).num_computed_tokens === requests.get(id).num_tokens;
    return [...output.num_scheduled_tokens.keys()].filter(caught_up);
  }
}
