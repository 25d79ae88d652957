// A pass as a tree of guesses; beside it its rows, what each may see and what the target says there; below, the text.

export function steps(trace) {
  return trace.steps.length;
}

const TREE_ROW = 26, ROW = 19;

/** Where the nodes of a tree stand: a row for each leaf, a column for each depth. Node −1 is the target's own word. */
function place(parents, last) {
  const children = (i) => [...parents.keys()].filter((j) => parents[j] === i), at = new Map();
  let rows = 0;
  const visit = (i, depth) => {
    const below = i < 0 ? [] : [...children(i), ...(i === last ? [-1] : [])];
    const first = rows;
    for (const child of below) visit(child, depth + 1);
    if (!below.length) rows += 1;
    at.set(i, [depth, below.length ? (first + rows - 1) / 2 : first]);
  };
  visit(0, 0);
  return { at, rows };
}

export function draw(trace, index, kit) {
  const { svg, rect, text, line, path, box, group, numbers, legend, number, count, params } = kit;
  const { words, steps: all, plain, blocks, same } = trace, step = all[index], { tokens, parents, masks, favourite, context } = step;
  const N = tokens.length, last = step.path.at(-1) ?? 0, onPath = [0, ...step.path], broken = params.bug === "no-move";
  const wide = kit.width >= 640, shapes = [];

  // The text so far, by position; position 0 was given. What plain decoding has there, as far as it went.
  const text_of = [all[0].tokens[0], ...all.slice(0, index + 1).flatMap((s) => s.written)], own_words = new Set([0, ...all.map((s) => s.context + s.path.length + 1)]);
  const wanted = (p) => (p === 0 ? text_of[0] : plain[p - 1]);
  const wrong = (p) => wanted(p) !== undefined && text_of[p] !== wanted(p);
  const strayed = (kept) => kept.some((word, p) => word !== text_of[p]), past = index > 0 ? all[index - 1].kept : [];
  const related = (i, j) => { for (let at = i; at >= 0; at = parents[at]) if (at === j) return true; return false; };

  // The rows of the pass. Left of them, what is to be moved; right of them, what the target says in that row.
  const arcs = wide ? 34 : 26, id = 20, card = 52, fixed = arcs + id + card + 56, table = wide ? Math.min(376, fixed + (Math.max(N, 2) + 1) * 15) : kit.width;
  const cell = Math.min(15, (table - fixed) / (N + 1)), grid = arcs + id + card + 8, mask = grid + cell + 5, after = mask + Math.max(N * cell, 30) + 7, stride = N > 10 ? 2 : 1;
  const y = (i) => 38 + i * ROW, rows = [];
  rows.push(text(arcs, 14, "slot, node", "small soft"), text(mask, 14, "sees", "small soft"), text(after, 14, "says", "small soft"));
  rows.push(text(grid + cell, 30, "past", "small soft end"), ...tokens.map((_, j) => (j % stride ? null : text(mask + (j + 0.5) * cell - 1, 30, j, "small soft middle"))));
  tokens.forEach((word, i) => {
    const s = onPath.indexOf(i), kept = s >= 0, bad = kept && wrong(context + s), css = bad ? "red" : i === 0 ? "blue" : kept ? "green" : "grey";
    rows.push(text(arcs + id - 4, y(i) + 12, step.slots[i], "small soft end"), box(arcs + id, y(i) - 1, card, ROW - 3, `${i} ${words[word]}`, css, `row ${i}, in slot ${step.slots[i]}`));
    rows.push(rect(grid, y(i), cell - 1.5, ROW - 4, !context ? "free" : strayed(past) ? "red" : css === "red" ? "grey" : css, context ? `the context: positions 0 to ${context - 1}` : "no context yet"));
    for (let j = 0; j < N; j++) {
      const seen = Math.floor(masks[i] / 2 ** j) % 2 === 1;
      rows.push(rect(mask + j * cell, y(i), cell - 1.5, ROW - 4, !seen ? "free" : !related(i, j) ? "red" : css === "red" ? "grey" : css, `row ${i} ${seen ? "sees" : "does not see"} node ${j}`));
    }
    const next = context + s + 1;
    rows.push(text(after, y(i) + 12, words[favourite[i]], !kept ? "small soft" : `small bold ${wrong(next) ? "red" : i === last ? "blue" : "green"}`));
  });
  for (const [from, to] of step.moves) {
    const [a, b] = [y(from - context) + 6, y(to - context) + 6], reach = Math.min(arcs - 6, 10 + (a - b) / 6);
    rows.push(path(`M${arcs} ${a}C${arcs - 1.3 * reach} ${a} ${arcs - 1.3 * reach} ${b} ${arcs} ${b}`, `${broken ? "red dashed" : "green thick"} arrow`));
  }

  // The tree: each node with the number of its row; behind the last accepted node, what the target says itself.
  const room = wide ? kit.width - table - 22 : kit.width, { at, rows: leaves } = place(parents, last), own = context + step.path.length + 1;
  const treeH = 36 + (leaves + (parents.includes(last) ? 0 : 1)) * TREE_ROW, tableH = y(N) + 2, lift = wide ? Math.max(0, (tableH - treeH) / 2) : 0;
  const depth = Math.max(...parents.map((_, i) => at.get(i)[0])), pitch = Math.min(112, room / (depth + 1.9)), w = Math.min(66, pitch - 14);
  const x = (i) => at.get(i)[0] * pitch, mid = (i) => lift + 42 + at.get(i)[1] * TREE_ROW;
  shapes.push(text(0, 14, `pass ${index}: ${N > 1 ? `${count(N - 1, "guess").replace("guesss", "guesses")} in ${N} rows` : "a row, nothing guessed"}`, "small soft"));
  for (const [i, parent] of [...parents.entries(), [-1, last]]) {
    if (i === 0) continue;
    const s = onPath.indexOf(i), css = i < 0 ? "blue thick" : s >= 0 ? "green thick" : "grey faint";
    shapes.push(path(`M${x(parent) + w} ${mid(parent)}C${x(i) - 5} ${mid(parent)} ${x(parent) + w + 5} ${mid(i)} ${x(i)} ${mid(i)}`, css));
  }
  tokens.forEach((word, i) => {
    const s = onPath.indexOf(i), css = s >= 0 && wrong(context + s) ? "red" : i === 0 ? "blue" : s >= 0 ? "green" : "grey";
    shapes.push(box(x(i), mid(i) - 10, w, 20, `${i} ${words[word]}`, css, s > 0 ? `node ${i}: accepted` : i ? `node ${i}: refused` : "written by the pass before"));
  });
  shapes.push(box(x(-1), mid(-1) - 10, w, 20, words[step.written.at(-1)], wrong(own) ? "red" : "blue", "the target's own word"));

  // The text by position: what plain decoding writes, what was written, and what the cache holds for the next pass.
  const top = (wide ? Math.max(treeH, tableH) : treeH + tableH + 8) + 26, name = 50, columns = wide ? 16 : 8, cw = (kit.width - name) / columns;
  for (let band = 0; band < 16 / columns; band++) {
    const base = top + band * 100;
    ["plain", "written", "in cache"].forEach((word, r) => shapes.push(text(0, base + 23 + r * 23, word, "small soft")));
    for (let column = 0; column < columns; column++) {
      const p = band * columns + column, left = name + column * cw;
      if (p % 4 === 0) shapes.push(text(left, base, `block ${blocks[p / 4]}`, "small soft"), line(left, base + 5, left + 4 * cw - 5, base + 5, "line"));
      if (wanted(p) !== undefined) shapes.push(text(left + cw / 2 - 1, base + 23, words[wanted(p)], "small middle"));
      const css = p >= text_of.length ? "free" : `box ${wrong(p) ? "red" : own_words.has(p) ? "blue" : "green"}`;
      shapes.push(rect(left, base + 31, cw - 3, 18, css));
      if (p < text_of.length) shapes.push(text(left + cw / 2 - 1, base + 44, words[text_of[p]], `small middle${p > context ? " bold" : ""}`));
      const held = step.kept[p], stray = held !== undefined && held !== text_of[p];
      shapes.push(rect(left, base + 54, cw - 3, 18, held === undefined ? "free" : stray ? "box red" : "box grey"));
      if (held !== undefined) shapes.push(text(left + cw / 2 - 1, base + 67, words[held], `small middle${stray ? " red" : ""}`));
    }
  }
  const ended = index === all.length - 1, done = index + 1, made = text_of.length - 1, names = (list) => list.map((word) => words[word]).join(" ");
  const rowsDone = all.slice(0, done).reduce((total, s) => total + s.tokens.length, 0), rivals = masks.some((m, i) => parents.some((_, j) => Math.floor(m / 2 ** j) % 2 && !related(i, j)));
  const physical = (p) => step.slots[p - context], moved = step.moves.map(([from, to]) => (broken ? `slot ${physical(to)} keeps ${words[step.kept[to]]}, which fell` : `slot ${physical(from)} to slot ${physical(to)}`)).join(", ");
  const stand = step.path.length > 1 ? `nodes ${step.path.slice(0, -1).join(", ")} and ${last} stand` : step.path.length ? `node ${last} stands` : N > 1 ? "no guess stands" : "nothing was guessed";
  let told = `Pass ${index}: ${stand}; written: ${names(step.written)}, ${step.path.length ? "the last by" : "by"} the target itself.`;
  if (moved) told += broken ? ` Nothing is moved: ${moved}.` : ` Moved: ${moved}.`;
  if (rivals) told += " Red cells: rivals, seen as if they were past.";
  if (ended) told += same === plain.length ? ` ${count(done, "pass").replace("passs", "passes")} for ${plain.length} words, all as plain decoding writes them.` : ` Only the first ${same} of ${plain.length} words are those of plain decoding.`;
  return {
    picture: [
      svg(kit.width, top + (16 / columns - 1) * 100 + 78, `Pass ${index}: ${N - 1} guesses, ${step.path.length} accepted, ${step.written.length} words written.`, ...shapes, group(wide ? kit.width - table : 0, wide ? 0 : treeH + 8, ...rows)),
      legend(["green", "accepted"], ["grey", "refused"], ["blue", "the target's own word, next pass's root"], ["red", "wrong"]),
      numbers([number(made), made === 1 ? "word" : "words"], [number(done), done === 1 ? "pass" : "passes"], [number(rowsDone), "rows"], [number(Math.floor((100 * made) / done) / 100, 2), "words per pass"], ...(ended ? [[`${same} of ${plain.length}`, "words before the first wrong one", same < plain.length ? "red" : "green"]] : [])),
    ],
    text: told,
  };
}
