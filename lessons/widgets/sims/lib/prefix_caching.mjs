// Lesson 05's prefix cache (engine/core/kv_cache_manager.py): keys for full blocks, an index, a queue that remembers.
import { BlockPool } from "./block_pool.mjs";
import { KVCacheManager } from "./continuous_batching.mjs";
import { ascii, hex, sha256 } from "./sha256.mjs";

export const ROOT_HASH = sha256(ascii("the parent of every first block"));

/** sha256(parent's key, its token ids as 8 bytes each, extra keys as JSON): it names a whole prefix. */
export function hash_block_tokens(parent_hash, token_ids, extra_keys = []) {
  const tokens = token_ids.flatMap((id) => [id & 255, (id >>> 8) & 255, (id >>> 16) & 255, id >>> 24, 0, 0, 0, 0]);
  const as_in_python = JSON.stringify(extra_keys).replaceAll(",", ", "); // json.dumps writes a space
  return sha256([...parent_hash, ...tokens, ...(extra_keys.length > 0 ? ascii(as_in_python) : [])]);
}

/** "Free" and "cached" do not exclude each other: a block keeps its key until it is handed out again. */
export class CachingBlockPool extends BlockPool {
  constructor(num_blocks) {
    super(num_blocks);
    this.cached_block_hash_to_block = new Map(); // one key may have several blocks, oldest first
    this.block_hash = Array(num_blocks).fill(null); // as hexadecimal text
  }

  /** The block that has had this key longest, or null. */
  get_cached_block(block_hash) {
    return this.cached_block_hash_to_block.get(block_hash)?.[0] ?? null;
  }

  cache_block(block, block_hash) {
    this.block_hash[block] = block_hash;
    const blocks = this.cached_block_hash_to_block.get(block_hash) ?? [];
    this.cached_block_hash_to_block.set(block_hash, [...blocks, block]);
  }

  /** Take blocks from the front of the queue; what they held is forgotten. */
  allocate(n) {
    const blocks = super.allocate(n);
    for (const block of blocks) if (this.block_hash[block] !== null) this.evict(block);
    return blocks;
  }

  evict(block) {
    const block_hash = this.block_hash[block];
    const others = this.cached_block_hash_to_block.get(block_hash).filter((other) => other !== block);
    this.block_hash[block] = null;
    if (others.length > 0) this.cached_block_hash_to_block.set(block_hash, others);
    else this.cached_block_hash_to_block.delete(block_hash);
  }

  /** Blocks without a key go to the front as before; cached ones to the back, where they live longest. */
  release(blocks) {
    super.release(blocks.filter((block) => this.block_hash[block] === null));
    for (const block of blocks) if (this.block_hash[block] !== null) this.free_queue.push_back(block);
  }
}

/** Block tables that may begin with blocks which an earlier request computed. */
export class PrefixCachingKVCacheManager extends KVCacheManager {
  constructor(num_blocks, block_size, max_model_len, { enable_caching = true, hash_bits = 256 } = {}) {
    super(num_blocks, block_size, max_model_len);
    this.enable_caching = enable_caching;
    this.hash_bits = hash_bits; // fewer than 256 is a bug
    this.num_cached_block = new Map(); // leading blocks of each table that are in the index
  }

  make_pool(num_blocks) {
    return new CachingBlockPool(num_blocks);
  }

  /** Extend `request.block_hashes` to all full blocks. A salt stands in the first block only: the chain carries it. */
  update_block_hashes(request) {
    const { block_hashes: hashes } = request;
    const size = this.block_size;
    for (let end = (hashes.length + 1) * size; end <= request.num_tokens; end += size) {
      const extra_keys = request.cache_salt && hashes.length === 0 ? [["cache_salt", request.cache_salt]] : [];
      const parent = hashes.at(-1) ?? ROOT_HASH;
      const block_hash = hash_block_tokens(parent, request.all_token_ids.slice(end - size, end), extra_keys);
      hashes.push(block_hash.slice(0, this.hash_bits / 8));
    }
  }

  /** The longest cached prefix: its blocks. One token must be left to compute, for its logits. */
  get_computed_blocks(request) {
    const blocks = [];
    if (!this.enable_caching) return blocks;
    this.update_block_hashes(request);
    const most = Math.floor((request.num_tokens - 1) / this.block_size);
    for (const block_hash of request.block_hashes.slice(0, most)) {
      const block = this.block_pool.get_cached_block(hex(block_hash));
      if (block === null) break;
      blocks.push(block);
    }
    return blocks;
  }

  /** Blocks that will leave the free queue: those missing, and those found in the cache that nobody owns. */
  get_num_blocks_to_allocate(request, num_tokens, new_computed_blocks = []) {
    const missing = super.get_num_blocks_to_allocate(request, num_tokens);
    const revived = new_computed_blocks.filter((block) => this.block_pool.ref_count[block] === 0).length;
    return Math.max(0, missing - new_computed_blocks.length) + revived;
  }

  /** As lesson 04's, for a table that starts with `new_computed_blocks`. What the step fills is indexed now. */
  allocate_slots(request, num_new_tokens, new_computed_blocks = []) {
    const num_tokens = request.num_computed_tokens + num_new_tokens;
    if (new_computed_blocks.length > 0) {
      const needed = this.get_num_blocks_to_allocate(request, num_tokens, new_computed_blocks);
      if (needed > this.block_pool.num_free_blocks) return false;
      this.block_pool.touch(new_computed_blocks);
      this.req_to_blocks.set(request.request_id, [...new_computed_blocks]);
      this.num_cached_block.set(request.request_id, new_computed_blocks.length);
    }
    if (!super.allocate_slots(request, num_new_tokens)) return false;
    if (this.enable_caching) this.cache_blocks(request, Math.min(num_tokens, request.num_tokens));
    return true;
  }

  /** Index the blocks that are full once the first `num_tokens` are computed, and are not indexed yet. */
  cache_blocks(request, num_tokens) {
    const num_full = Math.floor(num_tokens / this.block_size);
    const num_cached = this.num_cached_block.get(request.request_id) ?? 0;
    if (num_full <= num_cached) return;
    this.update_block_hashes(request);
    const table = this.req_to_blocks.get(request.request_id);
    for (let i = num_cached; i < num_full; i++) this.block_pool.cache_block(table[i], hex(request.block_hashes[i]));
    this.num_cached_block.set(request.request_id, num_full);
  }

  free(request) {
    super.free(request);
    this.num_cached_block.delete(request.request_id);
  }
}
