// Three prompts, cut into blocks. A full block has a hash over its parent's hash and its own text; a known hash is a hit.

export function steps(trace) {
  return trace.sends.reduce((sum, sent) => sum + Math.max(1, sent.blocks.length), 0);
}

const STATES = { hit: ["green", "found"], computed: ["blue", "computed"], partial: ["grey", "not full"] };

/** Spaces that one can see. */
const visible = (text) => text.replaceAll(" ", "␣");

export function draw(trace, index, kit) {
  const { html, legend, numbers, number } = kit;
  const rows = [], sizes = trace.sends.map((sent) => Math.max(1, sent.blocks.length));
  let left = index + 1, text = "", current = 0;
  for (const [i, sent] of trace.sends.entries()) {
    const shown = Math.min(left, sizes[i]);
    left -= shown;
    if (shown === 0) break;
    current = i;
    const blocks = sent.blocks.slice(0, shown);
    const cards = blocks.map((block, j) => {
      const [css, word] = STATES[block.state], here = left === 0 && j === shown - 1;
      const hash = block.hash ? `${block.parent.slice(0, 4)} + text → ${block.hash.slice(0, 8)}` : "no hash yet";
      return html("li", { class: `card ${block.wrong ? "red wrong" : css}${here ? " here" : ""}`, title: `${word}; ${hash}` },
        html("code", {}, visible(block.text)),
        html("small", {}, block.hash ? `# ${block.hash.slice(0, trace.block_size < 8 ? 4 : 8)}` : "no hash"),
        html("small", {}, block.wrong ? `holds “${visible(block.holds)}”` : `${word}, block ${block.block}`));
    });
    const all = shown === sizes[i] && !sent.refused;
    const title = html("p", {}, html("b", {}, `${sent.name}${sent.salt ? `, salt “${sent.salt}”` : ""}: `),
      sent.refused ? "refused, the pool is too small" : all ? `${sent.cached} of ${sent.cached + sent.computed} tokens found, ${sent.computed} computed` : "…");
    rows.push(html("div", { class: "sent" }, title, html("ol", { class: `chain${trace.block_size < 8 ? " tight" : ""}` }, ...cards)));
    const block = blocks.at(-1);
    if (sent.refused) text = `${sent.name} needs more blocks than the pool has. It is refused, and nothing changed.`;
    else if (block.wrong) text = `Two different texts have the same hash. ${sent.name} is answered from “${block.holds}”: another prompt's keys and values, and no error.`;
    else if (block.state === "hit") text = `${sent.name}: the hash ${block.hash.slice(0, 8)} is known, so block ${block.block} is taken as it is. It contains everything before it as well, through its parent.`;
    else if (block.state === "computed") {
      const earlier = trace.sends.slice(0, i).some((one) => one.blocks.some((other) => other.hash === block.hash && other.text === block.text)), last = shown === sent.blocks.length && sent.text.length % trace.block_size === 0;
      text = `${sent.name}: ${!earlier ? "nobody has computed this text after this parent" : last ? "the last token must run, so its block is computed even where the hash is known" : "what was computed for this text has been overwritten, or lies behind a block that was"}. Block ${block.block} is computed${earlier && last ? "." : `, and found under ${block.hash.slice(0, 8)} from now on.`}`;
    }
    else text = `${sent.name}: the last block is not full. It gets no hash and is computed every time.`;
    if (all && left === 0) text += ` In all, ${sent.cached} of ${sent.cached + sent.computed} tokens were found.`;
  }
  const sent = trace.sends[current], complete = rows.length && index + 1 === sizes.slice(0, current + 1).reduce((a, b) => a + b, 0);
  const queue = complete ? [
    html("p", { class: "queue-title" }, "Free queue, next to be taken first (filled: still found by its hash)"),
    html("ol", { class: "queue" }, ...sent.free_queue.map(([block, cached]) => html("li", { class: cached ? "green" : "free" }, String(block)))),
  ] : [];
  const wrong = trace.sends.slice(0, current + 1).reduce((sum, one) => sum + one.blocks.filter((block) => block.wrong).length, 0);
  const swapped = index === steps(trace) - 1 && trace.sends.flatMap((one) => one.blocks.map((block) => ({ ...block, name: one.name }))).find((block) => block.wrong);
  if (swapped) text = `“${swapped.text}” of ${swapped.name} was served from “${swapped.holds}”: two texts, one hash of ${trace.hash_bits} bits, and no error anywhere.`;
  return {
    picture: [
      html("div", { class: "hash-chain" }, ...rows, ...queue),
      legend(["green", "found by its hash"], ["blue", "computed, and indexed"], ["grey", "not full, never shared"]),
      numbers([number(trace.sends.slice(0, current + 1).reduce((sum, one) => sum + one.cached, 0)), "tokens found so far"], [number(trace.sends.slice(0, current + 1).reduce((sum, one) => sum + one.computed, 0)), "tokens computed"],
        [number(trace.sends.slice(0, current + 1).reduce((sum, one) => sum + one.evicted.length, 0)), "blocks evicted"], ...(wrong ? [[wrong, wrong === 1 ? "block served wrong" : "blocks served wrong", "red"]] : [])),
    ],
    text,
  };
}
