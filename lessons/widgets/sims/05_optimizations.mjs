// Two prompts one after the other, and the first one again, through the prefix cache: the twin of `simulate` in
// lessons/numbers/05_optimizations.py. Characters stand for tokens.
import { Request } from "./lib/continuous_batching.mjs";
import { PrefixCachingKVCacheManager, ROOT_HASH } from "./lib/prefix_caching.mjs";
import { ascii, hex } from "./lib/sha256.mjs";
import { repr } from "./lib/text.mjs";

const PREFIX = "You are a helpful assistant. Use the tools; never guess a price."; // 64 characters
const EDITS = {
  "none": PREFIX,
  "change character 60": `${PREFIX.slice(0, 60)}#${PREFIX.slice(61)}`,
  "change character 0": `#${PREFIX.slice(1)}`,
  "insert one in front": `#${PREFIX}`,
};

export function simulate({ suffix_a, suffix_b, edit, block_size, hash_bits, salt, pool_blocks }) {
  const manager = new PrefixCachingKVCacheManager(pool_blocks + 1, block_size, 1024, { hash_bits });
  const contents = new Map(); // what really lies in each physical block: [salt, text up to its end]
  const sends = [
    send(manager, contents, "A", PREFIX + suffix_a, ""),
    send(manager, contents, "B", EDITS[edit] + suffix_b, salt),
    send(manager, contents, "A again", PREFIX + suffix_a, ""),
  ];
  const wrong = sends.flatMap(({ blocks }) => blocks).filter((block) => block.wrong).length;
  return { block_size, hash_bits, pool_blocks, sends, wrong };
}

/** One prompt through the manager: lookup, allocation, end. */
function send(manager, contents, name, text, salt) {
  const { block_size: size, block_pool: pool } = manager;
  const request = new Request(name, ascii(text), 1, salt);
  const trace = { name, text, salt, cached: 0, computed: 0, refused: false, blocks: [] };
  const before = [...pool.block_hash];
  const hits = manager.get_computed_blocks(request);
  request.num_computed_tokens = hits.length * size;
  const num_new_tokens = text.length - request.num_computed_tokens;
  if (manager.allocate_slots(request, num_new_tokens, hits)) {
    trace.cached = request.num_computed_tokens;
    trace.computed = num_new_tokens;
    const key = (i) => hex(i < 0 ? ROOT_HASH : request.block_hashes[i]).slice(0, 16);
    manager.req_to_blocks.get(name).forEach((block, i) => {
      const part = text.slice(i * size, (i + 1) * size);
      const past = text.slice(0, i * size + part.length);
      const full = part.length === size;
      if (i >= hits.length) contents.set(block, [salt, past]);
      const [whose, held] = contents.get(block);
      trace.blocks.push({
        text: part, block, owners: pool.ref_count[block],
        state: i < hits.length ? "hit" : full ? "computed" : "partial",
        parent: full ? key(i - 1) : "", hash: full ? key(i) : "",
        holds: held.slice(-part.length), // what attention will read there
        wrong: whose !== salt || held !== past,
      });
    });
  } else {
    trace.refused = true;
  }
  manager.free(request);
  const now = pool.block_hash;
  trace.evicted = before.flatMap((hash, block) => (hash !== null && now[block] !== hash ? [block] : []));
  trace.free_queue = [...pool.free_queue].map((block) => [block, now[block] === null ? 0 : 1]);
  return trace;
}

export function describe(trace) {
  const signs = { hit: "=", computed: "+", partial: "·" };
  const lines = [
    `blocks of ${trace.block_size} tokens, hashes of ${trace.hash_bits} bits, ${trace.pool_blocks} ` +
      "blocks; = found, + computed and indexed, · not full",
  ];
  for (const { name, salt, refused, cached, computed, blocks } of trace.sends) {
    const what = refused ? "refused: the pool is too small" : `${cached} of ${cached + computed} tokens cached`;
    lines.push(`${name}${salt ? " (salted)" : ""}: ${what}`);
    if (blocks.length > 0) {
      lines.push("  " + blocks.map((b) => `${signs[b.state]}${b.block}${b.wrong ? "!" : ""}`).join(" "));
    }
    const wrong = blocks.find((b) => b.wrong);
    if (wrong) lines.push(`  WRONG: ${repr(wrong.text)} is served from ${repr(wrong.holds)}`);
  }
  for (const block of trace.sends[1].blocks.filter((b) => b.hash).slice(0, 3)) {
    lines.push(`  ${block.parent.slice(0, 8)} + ${repr(block.text)} -> ${block.hash.slice(0, 8)}`);
  }
  const queue = trace.sends.at(-1).free_queue.map(([block, cached]) => `${block}${cached ? "*" : ""}`);
  const shown = queue.length <= 18 ? queue : [...queue.slice(0, 8), "…", ...queue.slice(-9)];
  return [...lines, `free queue (* still cached): ${shown.join(" ")}`].join("\n");
}
