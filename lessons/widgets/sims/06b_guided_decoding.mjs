// A pattern becomes an automaton over bytes, a state becomes a mask over 23 tokens, and a toy model writes the best of
// what is allowed: the twin of `simulate` in lessons/numbers/06b_guided_decoding.py.
import { range, repr } from "./lib/text.mjs";

const EOS = ""; // no bytes, so never text
const TOKENS = [ // as bytes in hexadecimal
  "30", "31", "32", "35", "3132", "3235", "2e", "2d", "61", "63", "74", "73", "6361", "636174", "6174",
  "e2", "82", "ac", "e282", "c3", "a9", "c3a9", EOS,
].map((hex) => range(0, hex.length, 2).map((i) => parseInt(hex.slice(i, i + 2), 16)));
const PATTERNS = {
  "a price": "\\d{1,2}€", "a decimal": "\\d+\\.\\d\\d", "cats": "cats?|at|2 ?cats", "é or €": "(é|€){1,2}",
  "any two characters": ".{2}", "no end": "\\d+(-\\d+)*-",
};
const MAX_STEPS = 8;
const decode = (bytes) => new TextDecoder().decode(new Uint8Array(bytes)); // half a character becomes U+FFFD
const encode = (text) => [...new TextEncoder().encode(text)];
const hex = (byte) => byte.toString(16).toUpperCase().padStart(2, "0");

function token_name(token) {
  const text = decode(token);
  return text.includes("\ufffd") ? `<${token.map(hex).join(" ")}>` : text || "EOS";
}

// A regular expression as a tree over bytes. Bit b of a mask says whether byte b is in it. Trees are equal if their
// keys are, and a tree that no string matches is NOTHING itself.

const node = (kind, about, key) => ({ kind, ...about, key: `${kind}(${key})` });
const one_of = (mask) => node("bytes", { mask }, mask);
const sequence = (parts) => node("concat", { parts }, parts.map((part) => part.key));
const choice = (parts) => node("alt", { parts }, parts.map((part) => part.key));
const EMPTY = sequence([]);
const NOTHING = choice([]);
const bit = (byte) => 1n << BigInt(byte);

function concat(nodes) {
  const flat = nodes.flatMap((part) => (part.kind === "concat" ? part.parts : [part]));
  if (flat.some((part) => part.key === NOTHING.key)) return NOTHING;
  return flat.length === 1 ? flat[0] : sequence(flat);
}

function alt(nodes) {
  const parts = nodes.flatMap((part) => (part.kind === "alt" ? part.parts : [part]));
  const single = parts.filter((part) => part.kind === "bytes");
  const merged = single.length > 0 ? [one_of(single.reduce((mask, part) => mask | part.mask, 0n))] : [];
  const others = new Map(parts.filter((part) => part.kind !== "bytes").map((part) => [part.key, part]));
  const flat = [...merged, ...others.values()];
  return flat.length === 1 ? flat[0] : choice(flat);
}

function repeat(inner, low, high) {
  if (high === 0 || inner.key === EMPTY.key || inner.key === NOTHING.key) {
    return inner.key === NOTHING.key && low > 0 ? NOTHING : EMPTY;
  }
  return node("repeat", { inner, low, high }, [inner.key, low, high]);
}

/** The same expression without the strings that have a byte outside of `alphabet`, a mask. */
function restrict(tree, alphabet) {
  const each = () => tree.parts.map((part) => restrict(part, alphabet));
  if (tree.kind === "bytes") return tree.mask & alphabet ? one_of(tree.mask & alphabet) : NOTHING;
  if (tree.kind === "concat") return concat(each());
  if (tree.kind === "alt") return alt(each());
  return repeat(restrict(tree.inner, alphabet), tree.low, tree.high);
}

/** The byte strings of one length from `low` to `high`, whose bytes but the first run from 80 to BF. */
function utf8(low, high) {
  if (low.length === 0) return EMPTY;
  const [least, most] = [0x80, 0xbf].map((byte) => low.slice(1).map(() => byte));
  const masks = new Map(); // what may follow -> [it, after which first bytes]
  let whole = null; // what follows a byte that is neither the first nor the last: the same for all of these
  for (const first of range(low[0], high[0] + 1)) {
    const edge = first === low[0] || first === high[0];
    if (!edge) whole ??= utf8(least, most);
    const from = first === low[0] ? low.slice(1) : least;
    const tail = edge ? utf8(from, first === high[0] ? high.slice(1) : most) : whole;
    masks.set(tail.key, [tail, (masks.get(tail.key)?.[1] ?? 0n) | bit(first)]);
  }
  return alt([...masks.values()].map(([tail, mask]) => concat([one_of(mask), tail])));
}

const LENGTHS = [[0, 0x7f], [0x80, 0x7ff], [0x800, 0xd7ff], [0xe000, 0xffff], [0x10000, 0x10ffff]];

/** One character out of ranges of code points, as the bytes of its UTF-8. */
function characters(ranges) {
  const pairs = ranges.flatMap(([low, high]) => LENGTHS.map(([a, b]) => [Math.max(low, a), Math.min(high, b)]));
  const bytes = (point) => encode(String.fromCodePoint(point));
  return alt(pairs.filter(([low, high]) => low <= high).map(([low, high]) => utf8(bytes(low), bytes(high))));
}

/** Literals, `.`, `\d` and escapes, groups, `|` and quantifiers: as much of a regular expression as PATTERNS need. */
function parse_regex(pattern) {
  let rest = [...pattern];
  const take = (char) => rest[0] === char && Boolean(rest.shift());

  function branches() {
    const found = [pieces()];
    while (take("|")) found.push(pieces());
    return alt(found);
  }

  function pieces() {
    const found = [];
    while (rest.length > 0 && rest[0] !== "|" && rest[0] !== ")") found.push(quantified(atom()));
    return concat(found);
  }

  function atom() {
    const char = rest.shift();
    if (char === "(") {
      const inner = branches();
      rest.shift();
      return inner;
    }
    if (char === ".") return characters([[0, 9], [11, 0x10ffff]]); // all but the newline
    const escaped = char === "\\" ? rest.shift() : null;
    const point = (escaped ?? char).codePointAt(0);
    return characters([escaped === "d" ? [48, 57] : [point, point]]);
  }

  function quantified(inner) {
    if (take("?")) return repeat(inner, 0, 1);
    if (take("*")) return repeat(inner, 0, null);
    if (take("+")) return repeat(inner, 1, null);
    if (!take("{")) return inner;
    const [low, high] = rest.splice(0, rest.indexOf("}")).join("").split(",").map(Number);
    rest.shift();
    return repeat(inner, low, high ?? low);
  }

  return branches();
}

/** Thompson's construction, from the end to the beginning. State 0 accepts; a state reads a byte, or (mask 0) forks. */
class NFA {
  constructor(tree) {
    this.masks = [0n];
    this.targets = [[]];
    this.known = new Map();
    this.start = this.add(tree, 0);
  }

  /** Equal states, with the same mask and the same successors, are one. */
  state(mask, targets) {
    const key = `${mask}:${targets}`;
    if (!this.known.has(key)) {
      this.known.set(key, this.masks.length);
      this.masks.push(mask);
      this.targets.push(targets);
    }
    return this.known.get(key);
  }

  /** The state that reads `tree` and goes on as state `then` does. */
  add(tree, then) {
    if (tree.kind === "bytes") return this.state(tree.mask, [then]);
    if (tree.kind === "concat") return tree.parts.reduceRight((after, part) => this.add(part, after), then);
    if (tree.kind === "alt") return this.state(0n, tree.parts.map((part) => this.add(part, then)));
    let start = then;
    if (tree.high === null) { // a loop: the fork is there before what leads back to it
      start = this.masks.push(0n) - 1;
      this.targets.push([]);
      this.targets[start] = [this.add(tree.inner, start), then];
    }
    for (let i = tree.low; i < (tree.high ?? 0); i++) start = this.state(0n, [this.add(tree.inner, start), then]);
    for (let i = 0; i < tree.low; i++) start = this.add(tree.inner, start);
    return start;
  }

  /** Where forks lead from a state: states that read a byte, or accept. */
  closure(state) {
    const seen = new Set([state]);
    for (const at of seen) if (this.masks[at] === 0n) for (const target of this.targets[at]) seen.add(target);
    return [...seen].filter((at) => at === 0 || this.masks[at] !== 0n);
  }
}

/** Subset construction: a state is the set of NFA states in which the text so far may have ended. -1: no match. */
function determinize(tree) {
  const nfa = new NFA(tree);
  const subset = (states) => [...new Set(states)].sort((a, b) => a - b);
  const subsets = [subset(nfa.closure(nfa.start))];
  const number = new Map([[`${subsets[0]}`, 0]]);
  const table = []; // [states][256]
  for (const states of subsets) { // grows while we walk it
    table.push(range(0, 256).map((byte) => { // states are numbered in the order in which bytes find them
      const reads = states.filter((state) => nfa.masks[state] & bit(byte));
      if (reads.length === 0) return -1;
      const reached = subset(reads.flatMap((state) => nfa.closure(nfa.targets[state][0])));
      if (!number.has(`${reached}`)) number.set(`${reached}`, subsets.push(reached) - 1);
      return number.get(`${reached}`);
    }));
  }
  return { table, accepting: subsets.map((states) => states.includes(0)) };
}

const step = (dfa, state, bytes) => bytes.reduce((at, byte) => (at < 0 ? at : dfa.table[at][byte]), state);

/** What a state's mask allows: tokens that lead to a state, and the end where the automaton accepts. */
function allowed_tokens(dfa, state, masks, eos) {
  return range(0, TOKENS.length).filter((id) => {
    const token = TOKENS[id];
    if (token.length === 0) return eos === "accepting" ? dfa.accepting[state] : eos === "always";
    const seen = masks === "text" ? encode(decode(token)) : token; // the bug: what a decoder shows of it
    return step(dfa, state, seen) >= 0;
  });
}

export function simulate({ pattern, masks, eos, model }) {
  const alphabet = TOKENS.reduce((mask, token) => (token.length === 1 ? mask | bit(token[0]) : mask), 0n);
  const dfa = determinize(restrict(parse_regex(PATTERNS[pattern]), alphabet));
  const n = TOKENS.length;
  const states = range(0, dfa.table.length);
  const allowed = states.map((state) => allowed_tokens(dfa, state, masks, eos));
  const steps = [];
  const written = [];
  let [state, outcome] = [0, "cut"];
  for (const i of range(0, MAX_STEPS)) {
    const logits = range(0, n).map((token) => (5 * token + 7 * i + 4 * model) % n); // in every step another ranking
    const best = (a, b) => (a === null || logits[b] > logits[a] ? b : a);
    const chosen = allowed[state].reduce(best, null);
    const token = chosen === null ? EOS : TOKENS[chosen];
    const path = range(0, token.length).map((length) => step(dfa, state, token.slice(0, length + 1)));
    steps.push({ state, logits, allowed: allowed[state], chosen, path });
    if (token.length === 0) {
      outcome = chosen === null ? "stuck" : "ended";
      break;
    }
    state = path.at(-1);
    written.push(...token);
  }
  const moves = states.flatMap((a) => states.map((b) => [a, b, range(0, 256).filter((c) => dfa.table[a][c] === b)]));
  return {
    pattern: PATTERNS[pattern], tokens: TOKENS.map(token_name), moves: moves.filter(([, , bytes]) => bytes.length > 0),
    accepting: states.filter((at) => dfa.accepting[at]), allowed, steps,
    written: decode(written), num_bytes: written.length, outcome, matches: dfa.accepting[state],
  };
}

export function describe(trace) {
  const names = trace.tokens;
  const fates = { ended: "EOS", stuck: "stuck", cut: "cut off" };
  const accepting = `accepting: [${trace.accepting.join(", ")}]`;
  const lines = [`pattern ${trace.pattern}: ${trace.allowed.length} states, ${accepting}`];
  trace.steps.forEach(({ state, logits, allowed, chosen }, i) => {
    const wish = names[logits.indexOf(Math.max(...logits))];
    const taken = chosen === null ? "nothing" : names[chosen];
    const listed = allowed.slice(0, 9).map((token) => names[token]).join(" ") + (allowed.length > 9 ? " …" : "");
    lines.push(`step ${i}, state ${state}: allowed ${listed || "nothing"}; likes ${wish}, takes ${taken}`);
  });
  const verdict = trace.matches ? "a match" : "no match";
  lines.push(`written ${repr(trace.written)} (${trace.num_bytes} bytes), then ${fates[trace.outcome]}: ${verdict}`);
  return lines.join("\n");
}
