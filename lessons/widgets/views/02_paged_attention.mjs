// Memory as sixteen rows of slots. Colour: whose; hatched: taken, and no token in it. The table above is the last request's.

export function steps(trace) {
  return trace.steps.length;
}

/** Who holds which spans, in the order of their tables, once steps 0 … index have happened. */
function holders(trace, index) {
  const held = new Map();
  for (const { event, request, tokens, spans } of trace.steps.slice(0, index + 1)) {
    if (event === "admit") held.set(request, { tokens, spans: [...spans] });
    if (event === "grow") Object.assign(held.get(request), { tokens: held.get(request).tokens + tokens, spans: [...held.get(request).spans, ...spans] });
    if (event === "finish") held.delete(request);
  }
  return held;
}

const HAPPENED = {
  admit: (r, n) => `Request ${r} arrives with ${n} tokens and is admitted.`,
  grow: (r, n) => `Request ${r} grows by ${n} tokens.`,
  finish: (r, n) => `Request ${r} finishes; the ${n} tokens of memory it filled are free again.`,
};

export function draw(trace, index, kit) {
  const { svg, rect, text, line, box, number, numbers, legend, color } = kit;
  const { params, null_slots } = trace, { event, request, tokens, spans, why, state } = trace.steps[index];
  const paged = params.allocator === "paged", size = params.block_size;
  const rows = kit.width < 480 ? 32 : 16, per_row = params.num_slots / rows, px = kit.width / per_row;
  const top = 62, pitch = kit.width < 480 ? 11 : 17, high = pitch - 3;
  const shapes = [];

  /** A span of slots, cut where the rows end. */
  const place = (start, slots, css, title) => {
    for (let at = start; at < start + slots; ) {
      const row = Math.floor(at / per_row), n = Math.min(start + slots, (row + 1) * per_row) - at;
      shapes.push(rect((at - row * per_row) * px, top + row * pitch, n * px - (n * px > 3 ? 0.6 : 0), high, css, title));
      at += n;
    }
  };
  for (let row = 0; row < rows; row++) shapes.push(rect(0, top + row * pitch, kit.width, high, "free"));
  if (null_slots) place(0, null_slots, "grey", "block 0, the null block: nobody's");
  for (const [owner, { tokens: full, spans: where }] of holders(trace, index)) {
    let left = full;
    const title = `request ${owner}: ${full} tokens`;
    for (const [start, slots] of where) {
      const used = Math.min(left, slots);
      place(start, used, `${color(owner)}${owner === request ? "" : " dim"}`, title);
      place(start + used, slots - used, `hatch ${color(owner)}`, `${title}; these slots hold none`);
      left -= used;
    }
  }
  if (event === "admit" || event === "grow") for (const [start, slots] of spans) place(start, slots, "outline ink");

  // What happened: the new blocks of a block table, and where they lie.
  const fails = { refuse: "is refused", stuck: "cannot grow" }[event];
  const head = fails ? `request ${request} ${fails}: ${why}` : HAPPENED[event](request, tokens);
  shapes.push(text(0, 14, paged && !fails && event !== "finish" ? `block table of request ${request}${event === "grow" ? ", new" : ""}` : "", "small soft"));
  if (fails) shapes.push(rect(0, 22, kit.width, 26, "box red"), text(10, 40, kit.width < 560 ? `request ${request} ${fails}` : head, "red bold"));
  else if (paged && event !== "finish") {
    const blocks = spans.flatMap(([start, slots]) => Array.from({ length: slots / size }, (_, i) => start / size + i));
    const fits = Math.floor(kit.width / 40), shown = blocks.slice(0, blocks.length > fits ? fits - 1 : fits);
    shown.forEach((block, i) => {
      const slot = block * size, row = Math.floor(slot / per_row), x = ((slot - row * per_row) + Math.min(size, per_row) / 2) * px;
      shapes.push(box(i * 40, 21, 38, 22, block, color(request)), line(i * 40 + 19, 43, x, top + row * pitch + 2, color(request)));
    });
    if (shown.length < blocks.length) shapes.push(text(shown.length * 40 + 4, 37, `+ ${blocks.length - shown.length}`, "small soft"));
  }
  const alt = `Memory of ${params.num_slots} slots: ${state.taken} taken, ${state.tokens} of them hold a token, ${state.free} free.`;
  const wasted = state.taken - state.tokens;
  return {
    picture: [
      svg(kit.width, top + rows * pitch, alt, ...shapes),
      legend(["blue", "a request's tokens"], ["blue hatched", "its slots without one"], ["free", "free"], ...(null_slots ? [["grey", "null block"]] : [])),
      numbers([number(state.running), "running"], [number(state.waiting), "waiting"], [number(state.tokens), "slots with a token"],
        [number(wasted), "taken for nothing", wasted > state.tokens ? "red" : ""], [number(state.free), "free"], [number(state.largest_fit), "largest that fits", state.largest_fit < state.free ? "red" : ""]),
    ],
    text: `${fails ? `Request ${request} ${fails}: ${why}.` : head} ${state.running} running, ${state.waiting} waiting.`
      + (fails && state.free >= tokens ? ` ${number(state.free)} slots are free, and ${tokens} do not fit.` : ""),
  };
}
