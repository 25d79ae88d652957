// All rounds as a tape; one of them, each guess against its coin; and what the rule makes of q, and K of the time.

export function steps(trace) {
  return trace.rounds.length;
}

const hundred = (x) => (x * 100).toFixed(0);

export function draw(trace, index, kit) {
  const { svg, rect, text, line, path, circle, box, numbers, legend, number, count } = kit;
  const { words, p, q, rounds, tried, distance, speedups, best } = trace, round = rounds[index], K = round.draft.length;
  const shapes = [], fixed = (x, n = 2) => x.toFixed(n), wrong = distance > 1e-9, narrow = kit.width < 560;

  // The tape: a column per round, a cell per word that it writes.
  const pitch = kit.width / rounds.length, brick = 7, tape = 20 + (K + 1) * brick;
  shapes.push(text(0, 12, "words that each round writes", "small soft"), line(0, tape + 0.5, kit.width, tape + 0.5));
  rounds.forEach(({ written, accepted }, i) => written.forEach((_, j) => {
    shapes.push(rect(i * pitch + 1, tape - (j + 1) * brick, pitch - 2, brick - 1, `${j < accepted ? "green" : "purple"}${i > index ? " faint" : ""}`));
  }));
  shapes.push(rect(index * pitch - 0.5, 17, pitch + 1, tape - 15, "outline ink"));

  // The guesses of this round: a bar up to min(1, p/q), and where the coin fell.
  const cell = Math.min(136, kit.width / (K + 1)), w = cell - 6, high = 60, first = tape + 34, top = first + 28;
  shapes.push(text(0, first - 8, K ? `round ${index}: the guesses, and a coin for each` : `round ${index}: nothing is guessed, so it is an ordinary step`, "small soft"));
  round.draft.forEach((token, j) => {
    const x = j * cell, tested = j < round.ratio.length, kept = j < round.accepted, css = !tested ? "grey" : kept ? "green" : "red";
    shapes.push(box(x, first, w, 22, words[token], `${css}${tested ? "" : " faint"}`), rect(x, top, w, high, "free"));
    if (!tested) return shapes.push(text(x + w / 2, top + high / 2 + 4, w > 62 ? "not tested" : "–", "small soft middle"));
    const bar = round.ratio[j] * high, coin = top + high - round.u[j] * high, sign = kept ? "<" : "≥";
    shapes.push(rect(x, top + high - bar, w, bar, `box ${css}`, `min(1, p/q) = ${fixed(round.ratio[j])}, coin ${fixed(round.u[j])}`), line(x, coin, x + w, coin, "ink thick"));
    if (w > 66) shapes.push(text(x + w / 2, top + high + 15, `${w > 92 ? "coin " : ""}${fixed(round.u[j])} ${sign} ${fixed(round.ratio[j])}`, `small middle ${css}`));
    else shapes.push(text(x + w / 2, top + high + 14, fixed(round.u[j]), `small middle ${css}`), text(x + w / 2, top + high + 27, `${sign}${w > 44 ? " " : ""}${fixed(round.ratio[j])}`, `small middle ${css}`));
  });
  const written = K ? top + high + (w > 66 ? 40 : 52) : first + 18, own = round.written.length > round.accepted ? round.written.length - 1 : -1;
  shapes.push(text(0, written - 7, "written", "small soft"));
  round.written.forEach((token, j) => {
    shapes.push(box(j * cell, written, w, 24, words[token], j === own ? "purple" : "green"));
    if (j === own) shapes.push(text(j * cell + w / 2, written + 37, round.accepted === K ? (K ? "bonus" : "drawn") : w < 62 ? "new" : "drawn anew", "small purple middle"));
  });

  // The rule: of q remains what p has as well; what is refused is drawn anew, and should fill the rest of p.
  const counts = words.map(() => 0);
  for (const { written: tokens } of rounds.slice(0, index + 1)) for (const token of tokens) counts[token] += 1;
  const total = counts.reduce((a, b) => a + b, 0), y = written + 74, tall = 118, low = y + tall, half = narrow ? kit.width : (kit.width - 34) / 2, third = half / words.length, col = third / 3.6;
  shapes.push(text(0, y - 16, "share of each word, %", "small soft"), line(0, low, half, low, "ink"));
  words.forEach((word, i) => {
    const scale = tall - 14, kept = K ? Math.min(p[i], q[i]) : 0, x = i * third + col * 0.3, mid = x + col, right = x + 2 * col, level = low - p[i] * scale;
    const up = (left, from, to, css, title) => rect(left + 1, low - to * scale, col - 3, (to - from) * scale, css, title);
    if (K) shapes.push(up(x, 0, kept, "green", `${word}: q ${fixed(q[i])}`), up(x, kept, q[i], "hatch red", `${word}: ${fixed(q[i] - kept)} of q are refused`), text(x + col / 2 - 0.5, low - q[i] * scale - 4, hundred(q[i]), "small middle soft"));
    shapes.push(up(mid, 0, kept, "green"), up(mid, kept, tried[i], "purple", `${word}: ${fixed(tried[i], 3)} come out`));
    const off = Math.abs(tried[i] - p[i]) > 1e-9, end = low - tried[i] * scale, above = end - level > 16 ? end : Math.min(level, end); // the line in between
    shapes.push(line(mid - 1, level, mid + col - 1, level, "ink thick"), text(mid + col / 2 - 0.5, above - 4, hundred(tried[i]), `small middle bold${off ? " red" : ""}`));
    shapes.push(up(right, 0, counts[i] / total, "grey", `${word}: ${counts[i]} of ${total} written so far`), text(right + col / 2 - 0.5, low - (counts[i] / total) * scale - 4, hundred(counts[i] / total), "small middle soft"));
    [K ? "q" : "", "out", "so far"].forEach((name, j) => shapes.push(text(x + (j + 0.5) * col, low + 14, name, "small middle soft")));
    shapes.push(text(x + 1.5 * col, low + 30, word, "middle bold"));
  });

  // What K would be worth.
  const cx = narrow ? 0 : half + 34, cy = narrow ? low + 66 : y, floor = cy + tall, reach = Math.max(1.2, ...speedups), wide = kit.width - cx - 26;
  const at = (k) => [cx + 36 + (k * (wide - 24)) / 8, floor - (speedups[k] / reach) * (tall - 14)], one = floor - (tall - 14) / reach, [here, peak] = at(K);
  shapes.push(text(cx, cy - 16, "speed-up with K guesses a round", "small soft"), line(cx + 26, floor, cx + 26 + wide, floor, "ink"), line(cx + 26, one, cx + 26 + wide, one, "ink dashed"));
  shapes.push(text(cx + 20, one + 4, "1 ×", "small end soft"), text(cx + 20, floor + 4, "0", "small end soft"), path(`M${speedups.map((_, k) => at(k).map((v) => v.toFixed(1)).join(" ")).join("L")}`, "accent thick"));
  speedups.forEach((value, k) => {
    const [x, dot] = at(k);
    shapes.push(circle(x, dot, k === K ? 5 : 2.5, value < 1 ? "red" : "accent"), text(x, floor + 14, k, `middle small ${k === K ? "bold" : "soft"}`));
  });
  shapes.push(text(K === 8 ? kit.width : here, peak + (peak > floor - 30 || (peak < one && peak + 20 > one) ? -10 : 20), `${fixed(speedups[K])} ×`, `small bold halo ${K === 8 ? "end" : "middle"}${speedups[K] < 1 ? " red" : ""}`), text(cx + 26 + wide / 2, floor + 30, "K", "small middle soft"));
  const last = index === rounds.length - 1;
  return {
    picture: [
      svg(kit.width, Math.max(low, floor) + 38, `Round ${index}: ${round.accepted} of ${K} guesses accepted, ${round.written.length} words written.`, ...shapes),
      legend(["green", "a guess that stands"], ["red hatched", "refused: q has more than p"], ["purple", "the target’s own word"], ["ink", "line: p, the target alone"], ["grey", "written so far"]),
      numbers([fixed(trace.alpha), "accepted on average"], [fixed(trace.tokens_per_round), "words per round"], [`${fixed(speedups[K])} ×`, "speed-up", speedups[K] < 1 ? "red" : ""], [`K = ${best}`, `would be best: ${fixed(speedups[best])} ×`],
        [fixed(distance, 3), "distance from p", wrong ? "red" : "green"]),
    ],
    text: `Round ${index}: ${K ? `${round.accepted} of ${count(K, "guess").replace("guesss", "guesses")} accepted` : "nothing was drafted"}, ${count(round.written.length, "word")} written.`
      + (last ? ` After ${rounds.length} rounds ${number(total)} words are written${wrong ? ", and their distribution is not the model's: nothing looks broken, and it is" : ", and they are distributed as the model alone would"}.` : ""),
  };
}
