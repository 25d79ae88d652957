// Three prompts, cut into blocks. A full block has a hash over its parent's hash and its own text; a known hash is a hit.

export function steps(trace) {
  return trace.sends.reduce((sum, sent) => sum + Math.max(1, sent.blocks.length), 0);
}

const STATES = { hit: ["green", "found"], computed: ["blue", "computed"], partial: ["grey", "not full"] };

/** Spaces that one can see. */
const visible = (text) => text.replaceAll(" ", "␣");

/** What to say of the block that has just been looked up. */
function story(trace, i, block, whole) {
  const sent = trace.sends[i], { name } = sent;
  if (block.wrong) return `Two texts have the same hash. ${name} is answered from “${block.holds}”, and there is no error.`;
  if (block.state === "hit") return `${name}: the hash ${block.hash.slice(0, 8)} is known, so block ${block.block} is taken as it is, with all that came before it.`;
  if (block.state === "partial") return `${name}: the last block is not full. It gets no hash and is computed every time.`;
  const known = trace.sends.slice(0, i).some((one) => one.blocks.some((other) => other.hash === block.hash && other.text === block.text));
  const why = !known ? "nobody has computed this text after this parent" : whole && sent.text.length % trace.block_size === 0 ? "the last token must run, so its block is computed even where its hash is known" : "what was computed for this text has been overwritten, or lies behind a block that was";
  return `${name}: ${why}. Block ${block.block} is computed.`;
}

export function draw(trace, index, kit) {
  const { html, svg, rect, text, box, key, legend, numbers, number, params } = kit;
  const per = kit.width >= 560 ? 64 : 32, cell = kit.width / per, size = trace.block_size, pitch = per === 64 ? 34 : 21, rows = [];
  let left = index + 1, says = "", current = 0;
  for (const [i, sent] of trace.sends.entries()) {
    const all = Math.max(1, sent.blocks.length), shown = Math.max(0, Math.min(left, all)), whole = shown === all, shapes = [];
    left -= shown;
    if (shown > 0) current = i;
    sent.blocks.forEach((block, j) => {
      const x = ((j * size) % per) * cell, y = Math.floor((j * size) / per) * pitch, wide = size * cell - 2;
      if (j >= shown) return shapes.push(rect(x, y, wide, 18, "free"));
      const [css, word] = STATES[block.state], here = i === current && left <= 0 && j === shown - 1 && index + 1 < steps(trace);
      const piece = kit.shape("g", {}, rect(x, y, wide, 18, `box ${block.wrong ? "red" : css}`, `${word}: block ${block.block}${block.wrong ? `, which holds “${visible(block.holds)}”` : ""}`), text(x + wide / 2, y + 13, visible(block.text), "middle mono"));
      shapes.push(key(`${sent.name} ${j}`, piece));
      if (here) shapes.push(rect(x - 1, y - 1, wide + 2, 20, "outline accent"));
      if (per === 64) shapes.push(text(x + wide / 2, y + 29, block.wrong && size > 8 ? `holds “${visible(block.holds).slice(0, size > 16 ? 32 : 14)}”` : block.hash ? (size < 8 ? block.hash.slice(0, 4) : size < 16 ? block.hash.slice(0, 8) : `#${block.hash.slice(0, 8)}, block ${block.block}`) : size < 16 ? "–" : `no hash, block ${block.block}`, `small middle ${block.wrong ? "red" : "soft"}`));
    });
    const lines = Math.max(1, Math.ceil((sent.blocks.length * size) / per));
    const field = { A: "suffix_a", B: "suffix_b" }[sent.name];
    const result = sent.refused ? "refused: the pool is too small" : whole ? `${sent.cached} of ${sent.cached + sent.computed} found` : shown ? "…" : "";
    rows.push(
      html("div", { class: "prompt" }, html("b", {}, sent.name), field && kit.field ? kit.field(field) : null, sent.salt ? html("span", {}, `salt “${sent.salt}”`) : null, html("span", {}, result)),
      svg(kit.width, lines * pitch - (per === 64 ? 0 : 3), `${sent.name}: ${shown} of ${sent.blocks.length} blocks looked up.`, ...shapes),
    );
    if (shown > 0) says = sent.refused ? `${sent.name} needs more blocks than the pool has. It is refused, and nothing changed.` : story(trace, i, sent.blocks[shown - 1], whole) + (whole ? ` In all, ${sent.cached} of ${sent.cached + sent.computed} tokens were found.` : "");
  }

  // The free queue, as the last prompt that is through has left it.
  const done = trace.sends.filter((_, i) => index + 1 >= trace.sends.slice(0, i + 1).reduce((sum, one) => sum + Math.max(1, one.blocks.length), 0)).at(-1);
  const queue = done ? done.free_queue : [], chip = 25, fits = Math.floor((kit.width - 38) / chip), long = queue.length > fits, tail = Math.floor((fits - 1) / 2);
  const named = long ? [...queue.slice(0, fits - 1 - tail), null, ...queue.slice(queue.length - tail)] : queue;
  const chips = named.map((one, i) => one === null ? text(38 + i * chip + 11, 14, "…", "small middle") : key(`free ${one[0]}`, box(38 + i * chip, 0, chip - 2, 19, one[0], one[1] ? "green" : "grey")));
  rows.push(svg(kit.width, 28, `The free queue: ${queue.length} blocks.`, kit.group(0, 5, text(0, 14, "free:", "small soft"), ...chips)));

  const so_far = trace.sends.slice(0, current + 1), sum = (of) => number(so_far.reduce((total, one) => total + of(one), 0));
  const wrong = so_far.reduce((total, one) => total + one.blocks.filter((block) => block.wrong).length, 0), last = index === steps(trace) - 1;
  const swapped = last && trace.sends.flatMap((one) => one.blocks.map((block) => ({ ...block, name: one.name }))).find((block) => block.wrong);
  if (swapped) says = `“${swapped.text}” of ${swapped.name} was served from “${swapped.holds}”: two texts, one hash of ${trace.hash_bits} bits, and no error anywhere.`;
  return {
    picture: [
      ...rows,
      legend(["green", "found by its hash, or free and still found"], ["blue", "computed, and indexed"], ["grey", "no hash"], ...(wrong ? [["red", "another prompt’s"]] : [])),
      numbers([sum((one) => one.cached), "tokens found so far"], [sum((one) => one.computed), "tokens computed"], [sum((one) => one.evicted.length), "blocks evicted"], ...(wrong ? [[wrong, wrong === 1 ? "block served wrong" : "blocks served wrong", "red"]] : [])),
    ],
    text: says,
  };
}
