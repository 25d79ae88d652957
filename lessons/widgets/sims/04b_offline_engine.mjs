// Eight words through the sampler, stage by stage, and what a seed draws: the twin of `simulate` in
// lessons/numbers/04b_offline_engine.py.
import { fixed, range, sum } from "./lib/text.mjs";
import { uniforms } from "./lib/uniforms.mjs";

const WORDS = ["the", "a", "sea", "moon", "cat", "why", "xylophone", "zzz"];
const LOGITS = [3, 2.5, 2, 1.5, 0.5, -0.5, -2, -3];
const PROMPT = [0, 2]; // "the sea"
const OUTPUT = [0, 0, 3]; // "the the moon"
const PENALTIES = {
  "none": { repetition: 1, presence: 0, frequency: 0 },
  "repetition 1.5": { repetition: 1.5, presence: 0, frequency: 0 },
  "presence 1": { repetition: 1, presence: 1, frequency: 0 },
  "frequency 1": { repetition: 1, presence: 0, frequency: 1 },
};
const NUM_DRAWS = 12;

/** What was said changes its logits: repetition counts the prompt, the other two only what was generated. */
function adjust_logits(logits, { repetition, presence, frequency }) {
  return logits.map((x, token) => {
    const count = OUTPUT.filter((said) => said === token).length;
    const seen = count > 0 || PROMPT.includes(token);
    const repeated = !seen ? x : x > 0 ? x / repetition : x * repetition;
    return repeated - frequency * count - presence * (count > 0 ? 1 : 0);
  });
}

/** Probabilities of what is left. The largest is subtracted first, as exp has a limit. */
function softmax(z) {
  const largest = Math.max(...z);
  const weights = z.map((x) => Math.exp(x - largest));
  const total = sum(weights);
  return weights.map((weight) => weight / total);
}

const cut_below = (z, least) => z.map((x) => (x < least ? -Infinity : x));
const descending = (z) => [...z].sort((a, b) => b - a);

/** The logit of the last word that top_p keeps: words in front of it hold less than top_p, it and they do not. */
function nucleus(z, top_p) {
  const best = descending(z);
  let before = 0;
  let kept = 0;
  for (const p of softmax(best)) {
    if (before >= top_p) break;
    before += p;
    kept += 1;
  }
  return best[kept - 1];
}

/** Three cuts, each a line below which all words fall; they differ in where they draw it. Ties stay together. */
function distribution(logits, temperature, { min_p = 0, top_k = 0, top_p = 1 }) {
  let z = logits.map((x) => x / temperature);
  if (min_p > 0) z = cut_below(z, Math.max(...z) + Math.log(min_p));
  if (top_k > 0) z = cut_below(z, descending(z)[top_k - 1]);
  if (top_p < 1) z = cut_below(z, nucleus(z, top_p));
  return softmax(z);
}

/** Who u falls on when the words lie side by side on [0, 1), each as wide as its probability. */
function draw_token(probs, u) {
  const cumulative = [];
  for (const p of probs) cumulative.push((cumulative.at(-1) ?? 0) + p);
  const target = u * cumulative.at(-1);
  return cumulative.findIndex((c) => c > target);
}

export function simulate({ temperature, top_k, top_p, min_p, penalty, seed }) {
  const logits = adjust_logits(LOGITS, PENALTIES[penalty]);
  const best = logits.indexOf(Math.max(...logits));
  const shaped = (limits) => {
    if (temperature > 0) return distribution(logits, temperature, limits);
    return logits.map((_, token) => (token === best ? 1 : 0)); // greedy: the best has the whole line
  };
  const probs_after = {
    penalties: distribution(logits, 1, {}), temperature: shaped({}),
    min_p: shaped({ min_p }), top_k: shaped({ min_p, top_k }), top_p: shaped({ min_p, top_k, top_p }),
  };
  const stages = Object.entries(probs_after).map(([stage, probs]) => ({
    stage, probs, kept: range(0, WORDS.length).filter((token) => probs[token] > 0),
  }));
  const u = uniforms(seed, NUM_DRAWS);
  return {
    temperature, words: WORDS, prompt: PROMPT, output: OUTPUT, model: distribution(LOGITS, 1, {}), logits, stages,
    left: stages.at(-1).kept.length, u, draws: u.map((x) => draw_token(stages.at(-1).probs, x)),
  };
}

export function describe({ words, stages, draws }) {
  const lines = [`word       ${stages.map(({ stage }) => stage.padStart(12)).join("")}`];
  for (const [token, word] of words.entries()) {
    const cells = stages.map(({ kept, probs }) => (kept.includes(token) ? fixed(probs[token], 4) : "—"));
    lines.push(word.padEnd(11) + cells.map((cell) => cell.padStart(12)).join(""));
  }
  lines.push(`draws: ${draws.map((token) => words[token]).join(" ")}`);
  return lines.join("\n");
}
