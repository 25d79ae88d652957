// One round: the drafter guesses, the model checks, what stands goes to the text, what falls is thrown away. Below: what the rule does to q.

const SLOW = 4, STAGES = 4; // the first rounds are shown in four stages: guess, check, keep, write; then a step is a round

export function steps(trace) {
  return SLOW * STAGES + trace.rounds.length - SLOW;
}

const hundred = (x) => (x * 100).toFixed(0);

export function draw(trace, index, kit) {
  const { svg, rect, text, line, box, key, numbers, legend, number, count } = kit;
  const i = index < SLOW * STAGES ? Math.floor(index / STAGES) : index - SLOW * (STAGES - 1), stage = index < SLOW * STAGES ? index % STAGES : 3;
  const { words, p, q, rounds, tried, distance } = trace, round = rounds[i], K = round.draft.length, fixed = (x, n = 2) => x.toFixed(n);
  const shapes = [], narrow = kit.width < 560, brief = (x) => (narrow ? fixed(x).replace(/\.?0+$/, "").replace(/^0\./, ".") : fixed(x)), wrong = distance > 1e-9, own = round.written.length > round.accepted ? round.accepted : -1;

  // The guesses in their columns, and under each how far the coin may go. What falls, falls out of the column.
  const pitch = Math.min(narrow ? 64 : 104, kit.width / (K + 1)), w = pitch - 5, guess_y = 18, check_y = 44, high = narrow ? 42 : 50, thrown_y = check_y + high + 19, text_y = thrown_y + 43;
  shapes.push(text(0, 12, K ? `round ${i}: the drafter’s guesses` : `round ${i}: no guesses, an ordinary step`, "small soft"));
  round.draft.forEach((token, j) => {
    const x = j * pitch, tested = stage > 0 && j < round.ratio.length, kept = j < round.accepted, css = kept ? "green" : "red";
    shapes.push(rect(x, check_y, w, high, "free"));
    if (tested) {
      const bar = round.ratio[j] * high, coin = check_y + high - round.u[j] * high;
      shapes.push(rect(x, check_y + high - bar, w, bar, `box ${css}`, `min(1, p/q) = ${fixed(round.ratio[j])}, u = ${fixed(round.u[j])}`), key(`coin ${i}.${j}`, line(x, coin, x + w, coin, "ink thick")));
      if (w > 54) shapes.push(text(x + w / 2, check_y + high + 13, `${brief(round.u[j])} ${kept ? "<" : "≥"} ${brief(round.ratio[j])}`, `small middle ${css}`));
    } else if (stage > 0) shapes.push(text(x + w / 2, check_y + high / 2 + 4, w > 62 ? "not asked" : "–", "small soft middle"));
    if (stage > 1) shapes.push(rect(x, guess_y, w, 21, "free faint"));
    const asked = j < round.ratio.length;
    if (stage < 2) shapes.push(key(`guess ${i}.${j}`, box(x, guess_y, w, 21, words[token], stage > 0 ? (asked ? css : "grey") : "grey")));
    else if (!kept) shapes.push(key(`guess ${i}.${j}`, box(x, thrown_y, w, 21, words[token], asked ? "hatch red" : "red faint", "thrown away")));
  });
  if (K && stage > 1 && round.accepted < K) shapes.push(text(K * pitch + 2, thrown_y + 15, w > 54 ? "thrown away" : "✗", "small red"));

  // The text: what stood, and one word of the model's own. As much of its end as there is room for.
  const cell = narrow ? 40 : 44, room = Math.floor((kit.width + 4) / cell), shown = [];
  rounds.slice(0, i + 1).forEach(({ written, accepted }, r) => written.forEach((token, j) => {
    if (r < i || (stage > 1 && j < accepted) || stage > 2) shown.push([`guess ${r}.${j}`, words[token], j < accepted ? "green" : "purple", r === i]);
  }));
  const total = shown.length, tail = shown.slice(-room);
  const lost = stage > 2 && K && own < 0; // a bonus that is not written
  shapes.push(text(0, text_y - 6, "the text", "small soft"), line(0, text_y + 26, kit.width, text_y + 26));
  tail.forEach(([name, word, css, now], j) => shapes.push(key(name, box(j * cell, text_y, cell - 4, 22, word, `${css}${now ? "" : " faint"}`))));
  if (stage > 2) {
    const x = (tail.length - 1) * cell, label = own < 0 ? "the bonus is lost" : round.accepted === K ? (K ? "the bonus" : "the model’s word") : wrong ? "drawn from p" : "drawn from what q lacks";
    const right = x > kit.width / 2;
    shapes.push(text(right ? x + cell - 4 : x, text_y + 40, label, `small ${own < 0 || (wrong && round.accepted < K) ? "red" : "purple"}${right ? " end" : ""}`));
    if (lost) shapes.push(rect(x + 1, text_y - 1, cell - 6, 24, "outline red dashed"));
  }

  // The rule: the green part of q stands; what is refused is written anew, and should fill each word up to the line.
  const counts = words.map(() => 0);
  for (const [, word] of shown) counts[words.indexOf(word)] += 1;
  const y = text_y + 72, tall = narrow ? 88 : 104, low = y + tall, third = kit.width / words.length, col = Math.min(58, third / 3.5), scale = tall - 12;
  shapes.push(text(0, y - 10, "share of each word, %", "small soft"), line(0, low, kit.width, low, "ink"));
  words.forEach((word, n) => {
    const kept = K ? Math.min(p[n], q[n]) : 0, x = n * third + (third - 3 * col) / 2, mid = x + col, level = low - p[n] * scale, right = Math.min(tried[n], p[n]);
    const up = (name, left, from, to, css, title) => key(`${word} ${name}`, rect(left + 1, low - to * scale, col - 3, (to - from) * scale, css, title));
    if (K) shapes.push(up("kept", x, 0, kept, "green", `${word}: q ${fixed(q[n])}`), up("refused", x, kept, q[n], "hatch red", `${word}: ${fixed(q[n] - kept)} of q are refused`), text(x + col / 2 - 0.5, low - q[n] * scale - 4, hundred(q[n]), "small middle soft"));
    shapes.push(up("stays", mid, 0, kept, "green"), up("drawn", mid, kept, right, "purple", `${word}: ${fixed(tried[n], 3)} come out`), up("over", mid, right, tried[n], "red", `${word}: ${fixed(tried[n], 3)} instead of ${fixed(p[n])}`));
    const off = Math.abs(tried[n] - p[n]) > 1e-9;
    if (off && tried[n] < p[n]) shapes.push(rect(mid + 1, level, col - 3, (p[n] - tried[n]) * scale, "outline red dashed", "missing"));
    shapes.push(line(mid - 1, level, mid + col - 1, level, "ink thick"), text(mid + col / 2 - 0.5, Math.min(level, low - tried[n] * scale) - 5, hundred(tried[n]), `small middle bold${off ? " red" : ""}`));
    if (total) shapes.push(up("so far", mid + col, 0, counts[n] / total, "blue", `${word}: ${counts[n]} of ${total} written so far`), text(mid + 1.5 * col - 0.5, low - (counts[n] / total) * scale - 4, hundred(counts[n] / total), "small middle soft"));
    if (K) shapes.push(text(x + col / 2, low + 13, narrow ? "q" : "guessed", "small middle soft"));
    shapes.push(text(mid + col / 2, low + 13, narrow ? "out" : "written", "small middle soft"), text(mid + 1.5 * col, low + 13, narrow ? "yet" : "so far", "small middle soft"), text(mid + col / 2, low + 28, word, "middle bold"));
  });

  const thrown = rounds.slice(0, i).reduce((n, { draft, accepted }) => n + draft.length - accepted, 0) + (stage > 1 ? K - round.accepted : 0), done = stage === 3 ? round : rounds[i - 1];
  const said = !K ? "The model writes one word; nothing is guessed." : [
    `The drafter guesses ${count(K, "word")}; nothing is written yet.`,
    `The model reads ${K === 1 ? "the guess" : `all ${K} guesses`} in one pass. A guess stands if its random number is below p/q, and those in front of it stand.`,
    `${number(round.accepted)} of ${K} stand and join the text. ${round.accepted < K ? "The first that falls takes those behind it with it." : "None is thrown away."}`,
    own < 0 ? "All stood, and the bonus word is thrown away: the pass had computed it." : `${round.accepted < K ? `${number(round.accepted)} of ${K} stood, and the model replaces the one that fell${wrong ? " with a draw from p" : ""}.` : "All stood, and the row behind the last guess gives a bonus word."}`,
  ][stage];
  const last = index === steps(trace) - 1;
  return {
    picture: [
      svg(kit.width, low + 34, `Round ${i}: ${round.accepted} of ${K} guesses accepted, ${round.written.length} words written.`, ...shapes),
      legend(["green", "a guess that stands"], ["red hatched", "thrown away"], ["purple", "the model’s own word"], ["ink", "line: p, the model alone"], ["blue", "written so far"]),
      numbers([number(total), "words written"], [number(i + (stage === 3)), "passes of the model"], [number(thrown), "guesses thrown away"],
        [done ? `${fixed(done.speedup)} ×` : "–", "speed-up so far", done && done.speedup < 1 ? "red" : ""], [fixed(distance, 2), "distance from p", wrong ? "red" : "green"]),
    ],
    text: `Round ${i}: ${said}`
      + (last ? ` ${wrong ? "No sentence shows that the distribution is wrong." : `The ${number(total)} words are distributed as the model’s own.`}` : ""),
  };
}
