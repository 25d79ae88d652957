// Rounds of drafting and verifying in a language of three words, beside what enumeration says: the twin of `simulate`
// in lessons/numbers/07_spec_decode.py. The model always answers p and the drafter q, whatever came before.
import { fixed, range, sum } from "./lib/text.mjs";
import { uniforms } from "./lib/uniforms.mjs";

const WORDS = ["sea", "moon", "cat"];
const PAIRS = { // target p, draft q
  "half right": [[0.6, 0.3, 0.1], [0.2, 0.3, 0.5]],
  "close": [[0.6, 0.3, 0.1], [0.5, 0.4, 0.1]],
  "equal": [[0.6, 0.3, 0.1], [0.6, 0.3, 0.1]],
  "disjoint": [[0.5, 0.5, 0], [0, 0, 1]],
  "draft is sure": [[0.6, 0.3, 0.1], [1, 0, 0]],
  "target is sure": [[1, 0, 0], [0.25, 0.25, 0.5]],
  "both even": [[0.3, 0.3, 0.4], [0.35, 0.35, 0.3]],
};
const ROUNDS = 40;

/** Invert the cumulative distribution: the first token whose cumulative weight exceeds u of the total. */
function draw(weights, u) {
  const cumulative = [];
  for (const w of weights) cumulative.push((cumulative.at(-1) ?? 0) + w);
  const target = u * cumulative.at(-1);
  return cumulative.findIndex((c) => c > target);
}

/** What to draw from when a draft has fallen: max(p − q, 0), or p where nothing is left of it. */
function residual(p, q, bug) {
  const rest = p.map((x, i) => Math.max(x - q[i], 0));
  return bug === "resample-from-p" || sum(rest) === 0 ? p : rest;
}

/** What the target writes in one round: drafts as long as they stand, then one token of its own. */
function verify(p, q, drafts, accept_u, draw_u, bug) {
  const written = [];
  for (const [j, d] of drafts.entries()) {
    const stands = accept_u[j] * q[d] < p[d];
    written.push(stands ? d : draw(residual(p, q, bug), draw_u[j]));
    if (written[j] !== d) return written;
  }
  const bonus = draw(p, draw_u[drafts.length]);
  return bug === "no-bonus" && drafts.length > 0 ? written : [...written, bonus];
}

/** Tokens that a round of K drafts writes on average: 1 + α + … + α^K. */
function expected_tokens(alpha, K) {
  return range(0, K).reduce((tau) => 1 + alpha * tau, 1);
}

export function simulate({ pair, drafts: K, draft_cost, verify_cost, bug, seed }) {
  const [p, q] = PAIRS[pair];
  const [draft_u, accept_u, draw_u] = range(0, 3).map((i) => uniforms(3 * seed + i, ROUNDS * (K + 1)));
  const counts = p.map(() => 0);
  const cost = 1 + K * (draft_cost + verify_cost); // of a round, in plain steps
  const rounds = range(0, ROUNDS).map((i) => {
    const first = i * (K + 1);
    const row = (u) => u.slice(first, first + K + 1);
    const draft = row(draft_u).slice(0, K).map((u) => draw(q, u));
    const written = verify(p, q, draft, row(accept_u), row(draw_u), bug);
    const fallen = draft.findIndex((d, j) => d !== written[j]);
    const accepted = fallen < 0 ? K : fallen;
    const tested = range(0, Math.min(accepted + 1, K));
    for (const token of written) counts[token] += 1;
    return {
      draft, ratio: tested.map((j) => Math.min(1, p[draft[j]] / q[draft[j]])),
      u: tested.map((j) => accept_u[first + j]), accepted, written, speedup: sum(counts) / ((i + 1) * cost),
    };
  });
  // Where a draft was tried, and over everything that is written: exactly.
  const alpha = sum(p.map((x, i) => Math.min(x, q[i])));
  const left = p.map((x, i) => (alpha < 1 ? Math.max(x - q[i], 0) / (1 - alpha) : 0));
  const redrawn = sum(p.map((x, i) => Math.max(q[i] - x, 0) * x)); // the bug may even draw the draft that fell
  const [rest, agrees] = bug === "resample-from-p" ? [p, alpha + redrawn] : [left, alpha];
  const tried = K > 0 ? p.map((x, i) => Math.min(x, q[i]) + (1 - alpha) * rest[i]) : p;
  const lost = bug === "no-bonus"; // the last term of the sum
  const tau = range(0, 9).map((k) => expected_tokens(agrees, Math.max(0, k - lost)));
  const [mean, bonus] = [tau[K], lost && K > 0 ? 0 : agrees ** K];
  const speedups = tau.map((tokens, k) => tokens / (1 + k * (draft_cost + verify_cost)));
  return {
    words: WORDS, p, q, alpha, rounds, counts, tried, percent: tried.map((x) => Math.round(100 * x)),
    written: tried.map((t, i) => ((mean - bonus) * t + bonus * p[i]) / mean),
    distance: sum(tried.map((t, i) => Math.abs(t - p[i]))) / 2,
    tokens_per_round: mean, speedup: speedups[K], speedups, best: speedups.indexOf(Math.max(...speedups)),
  };
}

export function describe(trace) {
  const { words, rounds, speedups, best } = trace;
  const row = (name, values) => name.padEnd(28) + values.map((x) => fixed(x, 3)).join("  ");
  const total = sum(trace.counts);
  const K = rounds[0].draft.length;
  const lines = [
    (" ".repeat(28) + words.map((word) => word.padEnd(5)).join("  ")).trimEnd(),
    row("target p", trace.p), row("draft q", trace.q), row("written where drafted", trace.tried),
    row(`written in ${rounds.length} rounds`, trace.counts.map((n) => n / total)),
    `distance from p ${fixed(trace.distance, 3)}, acceptance ${fixed(trace.alpha, 3)}`,
  ];
  for (const [i, { draft, accepted, written }] of rounds.slice(0, 3).entries()) {
    const mark = (j) => (j < accepted ? "✓" : j === accepted ? "✗" : "·");
    const marks = draft.map((d, j) => `${words[d]} ${mark(j)}`).join(", ");
    lines.push(`round ${i}: ${marks || "nothing drafted"} -> ${written.map((token) => words[token]).join(" ")}`);
  }
  const mean = fixed(trace.tokens_per_round, 3);
  lines.push(`${total} tokens in ${rounds.length} rounds; ${mean} per round expected`);
  const [with_k, with_best] = [speedups[K], speedups[best]].map((x) => fixed(x, 3));
  lines.push(`speed-up ${with_k} with K = ${K}; best ${with_best} with K = ${best}`);
  return lines.join("\n");
}
