// A tree of guesses per pass, in a language of five words, on a paged cache that holds words in place of keys: the twin
// of `simulate` in lessons/numbers/07b_trained_drafters.py.
import { fixed, range, repr, sum } from "./lib/text.mjs";

const WORDS = ["sun", "rain", "wind", "snow", "fog"];
const RANKS = [[0.5, 0.2, 0.15, 0.1, 0.05], [0.4, 0.25, 0.15, 0.1, 0.1], [0.3, 0.25, 0.2, 0.15, 0.1]];
const SKILLS = { good: [0, 0, 1, 0, 0, 2], fair: [1, 0, 2, 0, 3, 1], poor: [3, 4, 2, 4, 1, 3] }; // the truth's rank
const TOKENS = 12;
const BLOCKS = [3, 1, 6, 2, 5, 4, 8, 7, 9, 10];
const BLOCK_SIZE = 4;

// A node of a planned tree is the list of choices that lead to it: [r₁, …, r_k] takes choice r₁ of head 1, and so on.
const SHAPES = {
  nothing: () => [],
  "chain of 3": () => [[0], [0, 0], [0, 0, 0]],
  "3 first words": () => [[0], [1], [2]],
  "2 x 2 x 2": () => products(2, 3),
  "planned, 7": () => plan_tree(RANKS, 7),
  "planned, 15": () => plan_tree(RANKS, 15),
};

/** All lists of 1 … depth choices below n, the short ones first. */
function products(n, depth) {
  const levels = [[[]]];
  for (let k = 1; k <= depth; k++) levels.push(levels[k - 1].flatMap((node) => range(0, n).map((r) => [...node, r])));
  return levels.slice(1).flat();
}

/** The `size` nodes that are most probably right, parents first. None left out is as probable as one taken. */
function plan_tree(ranks, size) {
  const chosen = [];
  const open = ranks[0].map((chance, r) => ({ node: [r], chance }));
  while (open.length > 0 && chosen.length < size) {
    open.sort((a, b) => b.chance - a.chance);
    const { node, chance } = open.shift();
    chosen.push(node);
    const next = ranks[node.length] ?? [];
    open.push(...next.map((p, r) => ({ node: [...node, r], chance: chance * p })));
  }
  return chosen.sort((a, b) => a.length - b.length || (a.join() < b.join() ? -1 : 1));
}

/** Put words on a planned tree: choices[k][r] is choice r of head k. Node 0 is the word written last. */
function fill_tree(shape, root, choices, bug) {
  const index = new Map([["", 0], ...shape.map((node, i) => [node.join(), i + 1])]);
  const tokens = [root, ...shape.map((node) => choices[node.length - 1][node.at(-1)])];
  const parents = [-1, ...shape.map((node) => index.get(node.slice(0, -1).join()))];
  return { tokens, parents, depths: [0, ...shape.map((node) => node.length)], masks: ancestor_masks(parents, bug) };
}

/** Bit j of mask i: node i attends to node j, which is itself, its parent, or an ancestor of that. */
function ancestor_masks(parents, bug) {
  if (bug === "no-mask") return parents.map((_, i) => (2 << i) - 1);
  const masks = [1];
  for (const [i, parent] of parents.entries()) if (i > 0) masks.push(masks[parent] | (1 << i));
  return masks;
}

/** From the root to the child that the target's favourite names, until there is none. */
function verify_greedy({ tokens, parents }, favourite) {
  const path = [];
  for (let node = 0; node >= 0; ) {
    const here = node;
    node = parents.findIndex((parent, child) => parent === here && tokens[child] === favourite[here]);
    if (node > 0) path.push(node);
  }
  return { path, written: [...path.map((i) => tokens[i]), favourite[path.at(-1) ?? 0]] };
}

/** The model: what follows depends on every [position, word] that is visible. */
function toy_next(seen, seed) {
  return (sum(seen.map(([position, word]) => (3 * word + 1) * (position ** 2 + 7 + seed))) % 101) % WORDS.length;
}

/** `words`, and the n words that follow in the toy language. */
function continued(words, n, seed) {
  const text = [...words];
  for (let k = 0; k < n; k++) text.push(toy_next([...text.entries()], seed));
  return text;
}

/** What three heads guess behind `written`: each ranks the truth where its skill puts it, the other words in order. */
function guesses(written, skill, pass, seed) {
  return range(0, 3).map((k) => {
    const truth = continued(written, k + 1, seed).at(-1);
    const choices = range(0, WORDS.length).filter((word) => word !== truth);
    choices.splice(skill[(pass + 2 * k + seed) % skill.length], 0, truth);
    return choices;
  });
}

/** Keys and values of one sequence, found by position through its block table. Here they are words. */
class PagedWords {
  constructor() {
    this.slots = Array((BLOCKS.length + 1) * BLOCK_SIZE).fill(0);
  }

  slot(position) {
    return BLOCKS[Math.floor(position / BLOCK_SIZE)] * BLOCK_SIZE + (position % BLOCK_SIZE);
  }

  at(position) {
    return this.slots[this.slot(position)];
  }

  put(position, word) {
    this.slots[this.slot(position)] = word;
  }

  /** Move the accepted nodes together, behind the context and the root: each to slots as all were before. */
  compact(context, path) {
    const moved = path.map((i) => this.at(context + i));
    for (const [s, word] of moved.entries()) this.put(context + 1 + s, word);
  }
}

/** Every node is one row of the target's pass: it sees the context, and what its mask lets through. */
function favourites(tree, cache, context, seed) {
  const past = range(0, context).map((p) => [p, cache.at(p)]);
  return tree.masks.map((mask) => {
    const seen = range(0, tree.tokens.length).filter((j) => (mask >> j) & 1);
    return toy_next([...past, ...seen.map((j) => [context + tree.depths[j], cache.at(context + j)])], seed);
  });
}

export function simulate({ shape: name, heads, bug, seed }) {
  const shape = SHAPES[name]();
  const plain = continued([seed % WORDS.length], TOKENS, seed);
  const cache = new PagedWords();
  const steps = [];
  let written = [plain[0]];
  let context = 0;
  while (written.length <= TOKENS) {
    const tree = fill_tree(shape, written.at(-1), guesses(written, SKILLS[heads], steps.length, seed), bug);
    for (const [i, word] of tree.tokens.entries()) cache.put(context + i, word);
    const favourite = favourites(tree, cache, context, seed);
    const { path, written: words } = verify_greedy(tree, favourite);
    if (bug !== "no-move") cache.compact(context, path);
    const { tokens, parents, masks } = tree;
    const end = context + 1 + path.length;
    steps.push({
      context, tokens, parents, masks, favourite, path, written: words,
      moves: path.flatMap((i, s) => (i === s + 1 ? [] : [[context + i, context + 1 + s]])),
      slots: tokens.map((_, i) => cache.slot(context + i)), kept: range(0, end).map((p) => cache.at(p)),
    });
    written = [...written, ...words];
    context = end;
  }
  written = written.slice(0, TOKENS + 1);
  const wrong = written.findIndex((word, i) => word !== plain[i]);
  return {
    words: WORDS, steps, written: written.slice(1), plain: plain.slice(1), blocks: BLOCKS,
    same: (wrong < 0 ? TOKENS + 1 : wrong) - 1, passes: steps.length,
    rows: sum(steps.map((step) => step.tokens.length)), tokens: sum(steps.map((step) => step.written.length)),
  };
}

export function describe(trace) {
  const { tokens, parents, masks, path, written, moves } = trace.steps[0];
  const names = (list) => list.map((word) => WORDS[word]).join(" ");
  const lines = [`pass 0: ${tokens.length} rows, root ${repr(WORDS[tokens[0]])}`];
  for (const i of range(1, Math.min(8, tokens.length))) {
    const seen = tokens.map((_, j) => ((masks[i] >> j) & 1 ? "x" : ".")).join("");
    const mark = path.includes(i) ? "✓" : "·";
    lines.push(`  node ${i} ${mark} ${WORDS[tokens[i]].padEnd(5)} under ${parents[i]}, sees ${seen}`);
  }
  const accepted = path.length > 0 ? `[${path.join(", ")}]` : "nothing";
  const moved = moves.map(([a, b]) => `${a} to ${b}`).join(", ") || "nothing";
  lines.push(`  accepted ${accepted}, wrote: ${names(written)}; moved: ${moved}`);
  const per_pass = fixed(Math.floor((100 * trace.tokens) / trace.passes) / 100, 2);
  lines.push(`${trace.passes} passes, ${trace.rows} rows, ${trace.tokens} words: ${per_pass} per pass`);
  const same = trace.same === TOKENS ? "all" : `only the first ${trace.same}`;
  lines.push(`${names(trace.written.slice(0, 6))} … (${same} as plain decoding)`);
  return lines.join("\n");
}
