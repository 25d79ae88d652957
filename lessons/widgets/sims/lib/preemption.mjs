// Lesson 11's schedulers (vllm/11_preemption.py): blocks are taken when they are needed, and victims give theirs back.
import { ChunkedScheduler } from "./chunked_prefill.mjs";
import { EngineCore } from "./continuous_batching.mjs";
import { ceil_div } from "./text.mjs";

/** The victim keeps its tokens and forgets their keys and values; back in front of the queue, it starts over. */
export class PreemptionScheduler extends ChunkedScheduler {
  /** Whoever runs goes on, in order of admission, and preempts others until its blocks are there. */
  schedule_running(output) {
    for (const request of [...this.running]) {
      if (request.status !== "running") continue; // preempted a moment ago, for somebody in front of it
      const room = this.config.max_model_len - 1 - request.num_computed_tokens; // the last position is never computed
      const num_new_tokens = Math.min(this.num_new_tokens(request), room);
      if (num_new_tokens <= 0) continue;
      while (!this.kv_cache_manager.allocate_slots(request, num_new_tokens)) {
        const victim = this.running.at(-1); // first come, first served: the one admitted last
        this.preempt_request(victim, output);
        if (victim === request) return;
      }
      this.grant(request, num_new_tokens, output);
    }
  }

  /** Back to the queue without its blocks. (The last one who runs never stands in the step already.) */
  preempt_request(victim, output) {
    this.running.pop();
    this.kv_cache_manager.free(victim);
    victim.status = "preempted";
    victim.num_computed_tokens = 0;
    this.waiting.unshift(victim);
    output.preempted.push(victim);
  }

  /** Nobody is admitted in a step that preempted, however many blocks are free now. */
  schedule_waiting(output) {
    if (output.preempted.length === 0) super.schedule_waiting(output);
  }

  /** All known tokens must fit, and the watermark stay free if anybody runs; taken is only what this step needs. */
  admit(request) {
    const manager = this.kv_cache_manager;
    const computed_blocks = manager.get_computed_blocks(request);
    request.num_computed_tokens = computed_blocks.length * manager.block_size;
    const num_new_tokens = this.num_new_tokens(request);
    const needed = manager.get_num_blocks_to_allocate(request, request.num_tokens, computed_blocks);
    if (num_new_tokens > 0 && this.leaves_watermark(needed)) {
      manager.allocate_slots(request, num_new_tokens, computed_blocks);
      return num_new_tokens;
    }
    request.num_computed_tokens = 0; // a lookup that admits nobody changes nothing
    return 0;
  }

  leaves_watermark(needed) {
    const watermark = this.running.length > 0 ? (this.config.watermark_blocks ?? 0) : 0;
    return needed + watermark <= this.kv_cache_manager.block_pool.num_free_blocks;
  }
}

/** The victim's blocks are copied to the CPU, and back when it is admitted again. The CPU's pool is never full here. */
export class SwapScheduler extends PreemptionScheduler {
  constructor(config, kv_cache_manager) {
    super(config, kv_cache_manager);
    this.swapped = new Map(); // request id: [its blocks on the CPU, its computed tokens]
    this.copied = 0; // blocks, out and in, that the step has to copy before the model runs
  }

  schedule() {
    this.copied = 0;
    return super.schedule();
  }

  preempt_request(victim, output) {
    const computed = victim.num_computed_tokens;
    const num_blocks = ceil_div(computed, this.kv_cache_manager.block_size);
    this.swapped.set(victim.request_id, [num_blocks, computed]);
    this.copied += num_blocks;
    super.preempt_request(victim, output);
  }

  /** Whoever has blocks on the CPU gets as many here, and their content; it goes on where it was. */
  admit(request) {
    if (!this.swapped.has(request.request_id)) return super.admit(request);
    const [cpu_blocks, computed] = this.swapped.get(request.request_id);
    request.num_computed_tokens = computed;
    const num_new_tokens = this.num_new_tokens(request);
    const needed = this.kv_cache_manager.get_num_blocks_to_allocate(request, request.num_tokens);
    if (num_new_tokens === 0 || !this.leaves_watermark(needed)) {
      request.num_computed_tokens = 0; // it still waits
      return 0;
    }
    this.kv_cache_manager.allocate_slots(request, num_new_tokens);
    this.copied += cpu_blocks;
    this.swapped.delete(request.request_id);
    return num_new_tokens;
  }
}

/** The loop with a meter: which tokens of a step are new, and which were computed before? */
export class MeteredCore extends EngineCore {
  constructor(scheduler) {
    super(scheduler);
    this.furthest = new Map(); // request id: how many of its tokens have ever been computed
    this.useful = 0;
    this.redone = 0;
    this.preemptions = 0;
  }

  execute_model(output) {
    this.preemptions += output.preempted.length;
    for (const [request_id, n] of output.num_scheduled_tokens) {
      const end = this.scheduler.requests.get(request_id).num_computed_tokens;
      const known = this.furthest.get(request_id) ?? 0;
      const redone = Math.max(0, Math.min(end, known) - (end - n));
      this.redone += redone;
      this.useful += n - redone;
      this.furthest.set(request_id, Math.max(end, known));
    }
    return super.execute_model(output);
  }
}
