// A round: each guess against its coin, then what is written. Beside it what all rounds wrote, and what K is worth.

export function steps(trace) {
  return trace.rounds.length;
}

export function draw(trace, index, kit) {
  const { svg, rect, text, line, path, circle, box, numbers, legend, number, count } = kit;
  const { words, p, q, rounds, tried, distance, speedups, best } = trace, round = rounds[index], K = round.draft.length;
  const shapes = [], fixed = (x, n = 2) => x.toFixed(n), wrong = distance > 1e-9;

  const compare = (x, coin, bar, css) => (w > 66 ? [text(x, top + high + 19, `${coin} ${bar}`, `middle ${css}`)]
    : [text(x, top + high + 16, coin, `small middle ${css}`), text(x, top + high + 28, bar, `small middle ${css}`)]);

  // The guesses of this round: a bar up to min(1, p/q), and where the coin fell.
  const cell = Math.min(84, kit.width / Math.max(K + 1, 5)), w = cell - 6, high = 70, top = 42;
  shapes.push(text(0, 12, `round ${index}: the drafter's guesses`, "small soft"));
  round.draft.forEach((token, j) => {
    const x = j * cell, tested = j < round.ratio.length, kept = j < round.accepted, css = !tested ? "grey" : kept ? "green" : "red";
    shapes.push(box(x, 18, w, 22, words[token], `${css}${tested ? "" : " faint"}`));
    shapes.push(rect(x, top + 4, w, high, "free"));
    if (!tested) return shapes.push(text(x + w / 2, top + high / 2 + 8, w > 50 ? "not tested" : "–", "small soft middle"));
    const ratio = round.ratio[j] * high, u = top + 4 + high - round.u[j] * high;
    shapes.push(rect(x, top + 4 + high - ratio, w, ratio, `box ${css}`, `min(1, p/q) = ${fixed(round.ratio[j])}, coin ${fixed(round.u[j])}`));
    shapes.push(line(x, u, x + w, u, "ink thick"), ...compare(x + w / 2, fixed(round.u[j]), `${kept ? "<" : "≥"} ${fixed(round.ratio[j])}`, css));
  });
  if (!K) shapes.push(text(0, 34, "nothing drafted: a round is an ordinary step", "soft"));
  const written = top + high + 52, own = round.written.length > round.accepted ? round.written.length - 1 : -1;
  shapes.push(text(0, written - 8, "written", "small soft"));
  round.written.forEach((token, j) => {
    shapes.push(box(j * cell, written, w, 24, words[token], j === own ? "blue" : "green"));
    if (j === own) shapes.push(text(j * cell + w / 2, written + 38, round.accepted === K ? "bonus" : w < 60 ? "new" : "drawn anew", "small blue middle"));
  });

  // Three words: what the model wants, what the drafter offers, what comes out.
  const counts = words.map(() => 0);
  for (const { written: tokens } of rounds.slice(0, index + 1)) for (const token of tokens) counts[token] += 1;
  const total = counts.reduce((a, b) => a + b, 0), y = written + 74, low = y + 96, half = kit.width < 560 ? kit.width : (kit.width - 30) / 2, third = half / 3;
  shapes.push(text(0, y - 6, "share of each word", "small soft"), line(0, low, half, low, "ink"));
  words.forEach((word, i) => {
    const bar = (third - 16) / 4;
    [[p[i], "grey"], [q[i], "orange"], [tried[i], wrong ? "red" : "green"], [counts[i] / total, "blue"]].forEach(([share, css], j) => {
      shapes.push(rect(i * third + j * bar + 4, low - share * 90, bar - 2, share * 90, css, `${word}: ${fixed(share, 3)}`));
    });
    shapes.push(text(i * third + third / 2, low + 16, word, "middle small"));
  });

  // What K would be worth.
  const beside = half < kit.width, cx = beside ? half + 30 : 0, cy = beside ? y : low + 48, floor = cy + 96, most = Math.max(1.2, ...speedups), wide = kit.width - cx;
  const at = (k) => [cx + 14 + (k * (wide - 28)) / 8, floor - (speedups[k] / most) * 84];
  shapes.push(text(cx, cy - 6, "speed-up, by number of guesses K (dashed: 1 ×)", "small soft"), line(cx, floor, cx + wide, floor, "ink"));
  shapes.push(line(cx, floor - 84 / most, cx + wide, floor - 84 / most, "ink dashed"));
  shapes.push(path(`M${speedups.map((_, k) => at(k).map((v) => v.toFixed(1)).join(" ")).join("L")}`, "accent thick"));
  speedups.forEach((value, k) => {
    const [x, dot] = at(k);
    shapes.push(circle(x, dot, k === K ? 5 : 2.5, value < 1 ? "red" : "accent"), text(x, floor + 16, k, k === K ? "middle small bold" : "middle small soft"));
  });
  const last = index === rounds.length - 1;
  return {
    picture: [
      svg(kit.width, Math.max(low, floor) + 22, `Round ${index}: ${round.accepted} of ${K} guesses accepted, ${round.written.length} words written.`, ...shapes),
      legend(["grey", "p, the model"], ["orange", "q, the drafter"], [wrong ? "red" : "green", "what comes out, exactly"], ["blue", "written so far"]),
      numbers([fixed(trace.alpha), "accepted on average"], [fixed(trace.tokens_per_round), "tokens per round"], [`${fixed(speedups[K])} ×`, "speed-up", speedups[K] < 1 ? "red" : ""], [`K = ${best}`, `would be best: ${fixed(speedups[best])} ×`],
        [fixed(distance, 3), "distance from p", wrong ? "red" : "green"]),
    ],
    text: `Round ${index}: ${K ? `${round.accepted} of ${count(K, "guess").replace("guesss", "guesses")} accepted` : "nothing was drafted"}, ${count(round.written.length, "word")} written.`
      + (last ? ` After ${rounds.length} rounds ${number(total)} words are written${wrong ? ", and their distribution is not the model's: nothing looks broken, and it is" : ", and they are distributed as the model alone would"}.` : ""),
  };
}
