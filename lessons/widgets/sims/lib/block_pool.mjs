// Lesson 02's block pool (vllm/02_paged_attention.py), on which the other simulations build.

export class OutOfBlocks extends Error {}

/**
 * The free blocks, in the order in which they will be handed out: a ring of links, so that any block can leave it in
 * O(1) (vLLM's FreeKVCacheBlockQueue). Block 0 is nobody's, so it can stand for both ends of the queue.
 */
export class FreeQueue {
  constructor(num_blocks) {
    this.next = Array.from({ length: num_blocks }, (_, block) => (block + 1) % num_blocks);
    this.previous = Array.from({ length: num_blocks }, (_, block) => (block + num_blocks - 1) % num_blocks);
    this.length = num_blocks - 1;
  }

  remove(block) {
    this.next[this.previous[block]] = this.next[block];
    this.previous[this.next[block]] = this.previous[block];
    this.length -= 1;
  }

  pop_front() {
    const block = this.next[0];
    this.remove(block);
    return block;
  }

  push_front(block) {
    this.insert(0, block, this.next[0]);
  }

  push_back(block) {
    this.insert(this.previous[0], block, 0);
  }

  insert(before, block, after) {
    this.next[before] = this.previous[after] = block;
    this.previous[block] = before;
    this.next[block] = after;
    this.length += 1;
  }

  *[Symbol.iterator]() {
    for (let block = this.next[0]; block !== 0; block = this.next[block]) yield block;
  }
}

/** `num_blocks - 1` physical blocks: each is free and in the queue, or owned by as many tables as it counts. */
export class BlockPool {
  constructor(num_blocks) {
    this.num_blocks = num_blocks;
    this.free_queue = new FreeQueue(num_blocks);
    this.ref_count = Array(num_blocks).fill(0);
  }

  get num_free_blocks() {
    return this.free_queue.length;
  }

  /** Take `n` blocks from the front of the queue, each with one owner. Throws OutOfBlocks, changing nothing. */
  allocate(n) {
    if (n > this.num_free_blocks) {
      throw new OutOfBlocks(`${n} block${n > 1 ? "s" : ""} asked for, ${this.num_free_blocks} free`);
    }
    const blocks = [];
    for (let i = 0; i < n; i++) {
      const block = this.free_queue.pop_front();
      this.ref_count[block] = 1;
      blocks.push(block);
    }
    return blocks;
  }

  /** One owner more for each block; a free one leaves the queue. */
  touch(blocks) {
    for (const block of blocks) {
      if (this.ref_count[block] === 0) this.free_queue.remove(block);
      this.ref_count[block] += 1;
    }
  }

  /** One owner less for each block of a table, walked from its end. */
  free(blocks) {
    const released = [];
    for (const block of [...blocks].reverse()) {
      this.ref_count[block] -= 1;
      if (this.ref_count[block] === 0) released.push(block);
    }
    this.release(released);
  }

  /** Queue blocks that lost their last owner: as a group, in this order, at the front. The pool is a stack. */
  release(blocks) {
    for (const block of [...blocks].reverse()) this.free_queue.push_front(block);
  }
}
