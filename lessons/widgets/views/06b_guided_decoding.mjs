// From top to bottom, what one token takes: the state of the automaton, the model's wishes with the bit that the mask has for each, the bytes written.

export function steps(trace) {
  return trace.steps.length;
}

const PLACES = { // how many columns an automaton takes, and where its states stand: column, row
  "a price": [5, [[0, 0], [1, 0], [2, -1], [3, 0], [4, 0], [5, 0]]],
  "a decimal": [4, [[0, 0], [1, 0], [2, 0], [3, 0], [4, 0]]],
  "cats": [5, [[0, 0], [1, -1], [1, 1], [1, 0], [2, -1], [5, 0], [2, 0], [3, -1], [3, 0], [4, -1]]],
  "é or €": [6, [[0, 0], [1.5, -0.7], [1, 0.7], [3, 0], [2, 0.7], [4.5, -0.7], [4, 0.7], [6, 0], [5, 0.7]]],
  "any two characters": [5, [[0, 0], [2.2, 0], [1.6, -1], [0.3, -1], [4.4, 0], [3.8, 1], [2.5, 1]]],
  "no end": [3, [[0, 0], [1, 0], [2, 0], [3, 0]]],
};

const nth = (n) => `${n}${(n > 3 && n < 21 ? null : ["st", "nd", "rd"][(n % 10) - 1]) ?? "th"}`;
const hex = (byte) => byte.toString(16).toUpperCase().padStart(2, "0");
const bytes_of = (name) => (name[0] === "<" ? name.slice(1, -1).split(" ").map((pair) => parseInt(pair, 16)) : [...new TextEncoder().encode(name)]);

/** [48, 49, 50, 53, 54] → "0–2 5 6", [0xE2] → "E2". */
function label_of(bytes) {
  const name = (byte) => (byte > 32 && byte < 127 ? String.fromCharCode(byte) : hex(byte));
  const runs = [];
  for (const byte of bytes) {
    if (runs.at(-1)?.[1] === byte - 1) runs.at(-1)[1] = byte;
    else runs.push([byte, byte]);
  }
  return runs.map(([low, high]) => (low === high ? name(low) : `${name(low)}${high === low + 1 ? " " : "–"}${name(high)}`)).join(" ");
}

/** The automaton; `at` is the state before the token, `path` the states that its bytes lead through; `stuck`: nothing is allowed. */
function automaton(trace, [columns, places], at, path, stuck, kit) {
  const { text, line, path: curve, circle, key } = kit, r = 12, shapes = [];
  const rows = places.map(([, y]) => y), loops = trace.moves.some(([a, b]) => a === b);
  const leaves = (a, side) => trace.moves.some(([c, d]) => c === a && Math.sign(rows[d] - rows[a]) === side);
  const px = Math.min(130, (kit.width - 2 * r - 12) / columns), py = 48, top = (Math.min(...rows) < 0 ? -Math.min(...rows) * py : loops ? 36 : 12) + r + 8;
  const where = places.map(([x, y]) => [r + 6 + x * px, top + y * py]), via = [at, ...path];
  for (const [a, b, bytes] of trace.moves) {
    const [[x0, y0], [x1, y1]] = [where[a], where[b]], label = label_of(bytes);
    const taken = path.some((state, i) => via[i] === a && state === b), css = taken ? "green thick arrow" : "arrow", word = `small middle halo${taken ? " green bold" : ""}`;
    if (a === b) {
      shapes.push(curve(`M${x0 - 7} ${y0 - r}C${x0 - 24} ${y0 - 42} ${x0 + 24} ${y0 - 42} ${x0 + 7} ${y0 - r - 1}`, css), text(x0, y0 - 38, label, word));
      continue;
    }
    const long = Math.hypot(x1 - x0, y1 - y0), [ux, uy] = [(x1 - x0) / long, (y1 - y0) / long], gap = r + 2;
    const under = uy === 0 && leaves(a, -1) && !leaves(a, 1), beside = uy !== 0 && label.length > 3; // where the label has room
    const back = trace.moves.some(([c, d]) => c === b && d === a), bend = back ? 16 : 0; // there and back: two arcs
    const [mx, my] = [(x0 + x1) / 2 + uy * bend, (y0 + y1) / 2 - ux * bend];
    if (back) shapes.push(curve(`M${x0 + ux * gap} ${y0 - ux * 5}Q${mx} ${my} ${x1 - ux * gap} ${y1 - ux * 5}`, css));
    else shapes.push(line(x0 + ux * gap, y0 + uy * gap, x1 - ux * gap, y1 - uy * gap, css));
    if (back) shapes.push(text(mx, my - ux * (ux < 0 ? 2 : -2), label, word));
    else if (beside) shapes.push(text(mx + 7, my + (uy < 0 ? 9 : 0), label, word.replace("middle ", "")));
    else shapes.push(text(mx, my + (under ? 14 : -5), label, word));
  }
  where.forEach(([x, y], state) => {
    const css = state === at ? (stuck ? "red" : "blue") : path.includes(state) ? "green" : "grey", ring = circle(x, y, r, `box ${css}`);
    shapes.push(state === at ? key("the state", ring) : ring);
    if (trace.accepting.includes(state)) shapes.push(circle(x, y, r - 3, `box ${css}`));
    shapes.push(text(x, y + 4, state, state === at ? "small middle bold" : "small middle"));
  });
  return { shapes, bottom: top + Math.max(...rows) * py + r + 6 };
}

/** The bytes of each token side by side, and below them the characters that are complete. */
function written_row(tokens, over, y, kit) {
  const { text, line, box, key } = kit, cell = 23, shapes = [], places = [], bytes = [];
  let x = 0;
  tokens.forEach((name, i) => {
    for (const byte of bytes_of(name)) {
      shapes.push(key(`byte ${bytes.length}`, box(x, y, cell - 1, 22, byte < 128 ? String.fromCharCode(byte) : hex(byte), i === tokens.length - 1 && !over ? "green" : "grey")));
      places.push(x);
      bytes.push(byte);
      x += cell;
    }
    x += 5;
  });
  for (let i = 0; i < bytes.length;) {
    const length = bytes[i] < 0x80 ? 1 : bytes[i] < 0xe0 ? 2 : 3, whole = i + length <= bytes.length, end = Math.min(bytes.length, i + length);
    const [left, right] = [places[i], places[end - 1] + cell - 1], css = whole ? "ink" : over ? "red" : "soft";
    if (length > 1) shapes.push(line(left, y + 26, right, y + 26, whole ? css : `${css} dashed`));
    shapes.push(text((left + right) / 2, y + 40, new TextDecoder().decode(new Uint8Array(bytes.slice(i, end))), `middle ${css}`));
    i = end;
  }
  if (!tokens.length) shapes.push(text(0, y + 15, "nothing yet", "small soft"));
  return shapes;
}

export function draw(trace, index, kit) {
  const { svg, rect, text, line, group: part, key, legend, numbers, count } = kit, { tokens: names } = trace;
  const { state, logits, allowed, chosen, path } = trace.steps[index], last = index === trace.steps.length - 1;
  const ranked = names.map((_, token) => token).sort((a, b) => logits[b] - logits[a]), wish = ranked[0], place = ranked.indexOf(chosen);
  const ends = chosen !== null && path.length === 0, wrong = ends && !trace.matches;
  const css_of = (token) => (token === chosen ? (wrong ? "red" : "green") : allowed.includes(token) ? "blue" : "");
  const { shapes, bottom } = automaton(trace, PLACES[kit.params.pattern], state, path, chosen === null, kit);

  // The model's ranking, and under each token its bit of the mask. The first that has a 1 is taken, whatever stands in front of it.
  let [x, y] = [0, bottom + 22];
  shapes.push(text(0, y - 6, kit.width < 480 ? `tokens, best first, and the mask of state ${state}` : `the model’s tokens, best first, and the mask of state ${state}: the first 1 is taken`, "small soft"));
  ranked.forEach((token, rank) => {
    const wide = Math.max(24, 6.8 * names[token].length + 10), css = css_of(token), before = !css && (place < 0 || rank < place);
    if (x + wide > kit.width) [x, y] = [0, y + 43];
    const tile = part(x, y, rect(0, 0, wide, 38, css ? `box ${css}` : "free", `${names[token]}: ${css ? "allowed" : "forbidden"}`), text(wide / 2, 15, names[token], `small middle${css ? "" : " soft"}${token === chosen ? " bold" : ""}`),
      text(wide / 2, 32, Number(css !== ""), `small middle${css ? " bold" : " soft"}`), before ? line(3, 11, wide - 3, 11, chosen === null ? "red" : "soft") : null);
    shapes.push(key(`token ${token}`, tile));
    x += wide + 4;
  });

  const row = y + 64, taken = trace.steps.slice(0, index + 1).filter((step) => step.path.length).map((step) => names[step.chosen]);
  shapes.push(text(0, row - 6, "written, byte by byte", "small soft"), ...written_row(taken, path.length === 0, row, kit));

  const visited = trace.steps.slice(0, index + 1).map((step) => step.state), masks = new Set(visited).size;
  const fate = { ended: trace.matches ? ["a match", "then EOS", "green"] : ["no match", "then EOS", "red"], stuck: ["stuck", "nothing is allowed", "red"], cut: ["cut off", `after ${trace.steps.length} tokens`, ""] };
  const likes = chosen === wish ? `The model takes “${names[wish]}”, which it likes best.` : chosen === null ? "" : `The model likes “${names[wish]}” best, and takes “${names[chosen]}”, its ${nth(place + 1)} choice.`;
  const finish = {
    ended: trace.matches ? " The answer is complete, and ends." : " It ends in the middle: the mask forgot to ask the automaton.",
    stuck: trace.matches ? " The answer is complete, but may not end: a row of nothing but −∞." : " No token may follow, and no match is written: a row of nothing but −∞.",
    cut: " That was the last of eight: what stands there is the beginning of a match.",
  };
  return {
    picture: [
      svg(kit.width, row + 46, `State ${state} allows ${allowed.length} of ${names.length} tokens; taken: ${chosen === null ? "nothing" : names[chosen]}.`, ...shapes),
      legend([chosen === null ? "red" : "blue", chosen === null ? "nothing is allowed" : "the state, and what it allows"], ["green", "taken"], ["free", "forbidden"], ...(wrong ? [["red", "an end that is none"]] : [])),
      numbers([`${allowed.length} of ${names.length}`, "tokens allowed", allowed.length ? "" : "red"], [masks, "masks computed"], [visited.length - masks, "found again"], ...(last ? [fate[trace.outcome]] : [])),
    ],
    text: `State ${state} allows ${count(allowed.length, "token")}. ${likes}${last ? finish[trace.outcome] : ""}`,
  };
}
