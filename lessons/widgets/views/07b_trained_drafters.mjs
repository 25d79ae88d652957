// A pass in three stages: the tree of guesses, the path that the target agrees with, and the cache after the path has been moved together.
// A node that is pointed at, or has the focus, shows what its row sees.

const STAGES = 3;

export function steps(trace) {
  return STAGES * trace.steps.length;
}

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
  const { svg, shape, rect, text, line, path, box, key, numbers, legend, number, count, params } = kit;
  const { words, steps: all, plain, blocks, same } = trace, i = Math.floor(index / STAGES), stage = index % STAGES, step = all[i], { tokens, parents, masks, context } = step;
  const N = tokens.length, last = step.path.at(-1) ?? 0, onPath = [0, ...step.path], broken = params.bug === "no-move", narrow = kit.width < 560, shapes = [];

  // The text so far, by position; position 0 was given. What plain decoding has there, as far as it went.
  const text_of = [all[0].tokens[0], ...all.slice(0, stage ? i + 1 : i).flatMap((s) => s.written)], own_words = new Set([0, ...all.map((s) => s.context + s.path.length + 1)]);
  const wanted = (p) => (p === 0 ? all[0].tokens[0] : plain[p - 1]), wrong = (p) => wanted(p) !== undefined && text_of[p] !== undefined && text_of[p] !== wanted(p);
  const related = (node, other) => { for (let at = node; at >= 0; at = parents[at]) if (at === other) return true; return false; };
  const sees = (node) => tokens.map((_, j) => j).filter((j) => Math.floor(masks[node] / 2 ** j) % 2 === 1);

  // The tree. Each node is a row of the pass.
  const { at, rows: leaves } = place(parents, last), row = Math.min(narrow ? 19 : 22, Math.max(14.5, (narrow ? 150 : 200) / leaves)), depth = Math.max(...parents.map((_, node) => at.get(node)[0])), pitch = Math.min(150, kit.width / (depth + 1.9)), w = Math.min(80, pitch - 18);
  const x = (node) => at.get(node)[0] * pitch, mid = (node) => 32 + at.get(node)[1] * row, high = row - (row < 17 ? 1.5 : 4);
  shapes.push(text(0, 12, `pass ${i}: ${N > 1 ? `${N - 1} guesses behind “${words[tokens[0]]}”${narrow ? "" : ", a row each"}` : "one row, nothing guessed"}`, "small soft"));
  for (const [node, parent] of [...parents.entries(), [-1, last]]) {
    if (node === 0 || (node < 0 && stage === 0)) continue;
    const kept = stage > 0 && onPath.includes(node), css = node < 0 ? "purple thick" : kept ? "green thick" : "grey faint";
    shapes.push(path(`M${x(parent) + w} ${mid(parent)}C${x(node) - 8} ${mid(parent)} ${x(parent) + w + 8} ${mid(node)} ${x(node)} ${mid(node)}`, css));
  }
  const tree_end = 32 + (leaves + (parents.includes(last) ? 0 : 1)) * row, hint = tree_end + 6;
  shapes.push(text(0, hint, N > 1 ? "point at a guess: what does its row see?" : "", "small soft hint"));
  const nodes = tokens.map((word, node) => {
    const s = onPath.indexOf(node), kept = stage > 0 && s >= 0, css = kept && wrong(context + s) ? "red" : node === 0 ? "blue" : kept ? "green" : "grey", seen = sees(node), rivals = seen.filter((j) => !related(node, j));
    const said = `${node} ${words[word]} sees ${context ? "the past, " : ""}${seen.map((j) => (j === node ? "itself" : `${j} ${words[tokens[j]]}`)).join(", ")}`;
    return shape("g", { class: "node", tabindex: 0, role: "img", "aria-label": said },
      key(`node ${i}.${node}`, box(x(node), mid(node) - high / 2, w, high, `${node} ${words[word]}`, `${css}${stage > 0 && !kept ? " faint" : ""}`)),
      ...(rivals.length ? [rect(x(node) - 1.5, mid(node) - high / 2 - 1.5, w + 3, high + 3, "outline red dashed")] : []),
      shape("g", { class: "sees" }, rect(0, hint - 10, kit.width, 14, "paper"), text(0, hint, said.length > kit.width / 6.4 ? `${said.slice(0, Math.floor(kit.width / 6.4))} …` : said, `small bold${rivals.length ? " red" : ""}`),
        ...seen.map((j) => rect(x(j) - 1, mid(j) - high / 2 - 1, w + 2, high + 2, `outline ${related(node, j) ? "ink" : "red"}`))));
  });
  if (stage > 0) shapes.push(box(x(-1), mid(-1) - high / 2, w, high, words[step.written.at(-1)], wrong(context + step.path.length + 1) ? "red" : "purple", "the target’s own word"));

  // The text, with plain decoding's above it; and the cache by position: in the pass every row has a slot, afterwards only the path.
  const columns = narrow ? 8 : 16, cw = kit.width / columns, top = hint + 22, text_pitch = 36, bands = 16 / columns;
  shapes.push(text(0, top, "the text; above it, plain decoding", "small soft"));
  for (let p = 0; p < 16; p++) {
    const left = (p % columns) * cw, y = top + 8 + Math.floor(p / columns) * text_pitch, here = p < text_of.length;
    if (wanted(p) !== undefined) shapes.push(text(left + cw / 2 - 1, y + 10, words[wanted(p)], `small middle ${here && wrong(p) ? "red" : "soft"}`));
    shapes.push(here ? key(`word ${p}`, box(left, y + 14, cw - 3, 17, words[text_of[p]], wrong(p) ? "red" : p > context && stage > 0 ? (own_words.has(p) ? "purple" : "green") : "blue")) : rect(left, y + 14, cw - 3, 17, "free"));
  }
  const owner = []; // of each position of the cache: the pass and the node that wrote it
  all.slice(0, stage === 2 ? i + 1 : i).forEach((s, pass) => [0, ...s.path].forEach((node, k) => { owner[s.context + k] = `kv ${pass}.${broken ? k : node}`; }));
  const cache = stage === 2 ? step.kept.map((word, p) => [word, owner[p]]) : [...(all[i - 1]?.kept ?? []).map((word, p) => [word, owner[p]]), ...tokens.map((word, node) => [word, `kv ${i}.${node}`])];
  const base = top + 8 + bands * text_pitch + 16, lines = Math.max(2, Math.ceil((context + N) / columns)), final = [...all[0].tokens.slice(0, 1), ...all.slice(0, i + 1).flatMap((s) => s.written)];
  shapes.push(text(0, base, `the cache, ${stage < 2 ? "a slot for each row of the pass" : broken ? "left as it was" : "the path moved together"}`, `small ${stage === 2 && broken && step.moves.length ? "red" : "soft"}`));
  for (let p = 0; p < lines * columns; p++) {
    const left = (p % columns) * cw, y = base + 7 + Math.floor(p / columns) * 21, [word, name] = cache[p] ?? [];
    if (word === undefined) shapes.push(rect(left, y, cw - 3, 17, "free"));
    else {
      const guess = stage < 2 && p >= context, node = p - context, bad = !guess && word !== final[p];
      shapes.push(key(name, box(left, y, cw - 3, 17, words[word], bad ? "red" : guess ? (node === 0 ? "blue" : stage === 1 && onPath.includes(node) ? "green" : "grey") : "blue", `position ${p}, in block ${blocks[Math.floor(p / 4)]}`)));
    }
    if (p % 4 === 0) shapes.push(line(left - 1.5, y - 1, left - 1.5, y + 18, "soft"));
  }

  const ended = index === steps(trace) - 1, done = i + (stage > 0), made = text_of.length - 1, names = (list) => list.map((word) => words[word]).join(" ");
  const rowsDone = all.slice(0, done).reduce((total, s) => total + s.tokens.length, 0), rivals = masks.some((_, node) => sees(node).some((j) => !related(node, j)));
  const guesses = N === 2 ? "1 guess" : `${N - 1} guesses`, stand = step.path.length ? `${step.path.length} of ${guesses} ${step.path.length > 1 ? "stand" : "stands"}` : N > 1 ? `none of ${guesses} stands` : "nothing was guessed";
  const moved = step.moves.map(([from, to]) => (broken ? `position ${to} keeps “${words[step.kept[to]]}”, which fell` : `position ${from} to ${to}`)).join(", ");
  const told = [
    N > 1 ? `${guesses}, all in one pass.${rivals ? " Dashed in red: rows that see their rivals." : ""}` : "One row and nothing guessed: plain decoding.",
    `${stand}. Written: ${names(step.written)}, the last by the target itself.${rivals ? " Dashed in red: rows that see their rivals." : ""}`,
    moved ? `${broken ? "Nothing is moved: " : "Moved in the cache: "}${moved}.` : "Nothing has to be moved.",
  ][stage];
  const end = !ended ? "" : same === plain.length ? ` ${all.length === 1 ? "1 pass" : `${all.length} passes`} for ${plain.length} words, all as plain decoding writes them.` : ` Only the first ${same} of ${plain.length} words are those of plain decoding.`;
  const tall = base + 7 + lines * 21;
  return {
    picture: [
      shape("svg", { viewBox: `0 0 ${kit.width} ${tall}`, width: kit.width, height: tall, role: "group", "aria-label": `Pass ${i}: ${N - 1} guesses, ${step.path.length} accepted, ${step.written.length} words written.` }, ...shapes, ...nodes),
      legend(["grey", "a guess"], ["green", "stands"], ["purple", "the target’s own word"], ["blue", "text before"], ["red", "wrong"]),
      numbers([number(made), made === 1 ? "word" : "words"], [number(done), done === 1 ? "pass" : "passes"], ...(ended ? [] : [[number(rowsDone), "rows computed"]]), ...(done ? [[number(Math.floor((100 * made) / done) / 100, 2), "words per pass"]] : []), ...(ended ? [[`${same} of ${plain.length}`, "as plain decoding", same < plain.length ? "red" : "green"]] : [])),
    ],
    text: `Pass ${i}: ${told}${end}`,
  };
}
