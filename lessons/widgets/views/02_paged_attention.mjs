// Above: A's block table, in the order of its tokens. Below it: the memory, eight rows of 64 slots. At the bottom: the free list.

export function steps(trace) {
  return trace.steps.length;
}

const ROW = 64; // slots in a row of the picture, and all that a request may ever need

export function draw(trace, index, kit) {
  const { svg, rect, text, line, box, key, numbers, legend, number, count, params } = kit;
  const { event, request, tokens, copied, why, queue, places, state } = trace.steps[index];
  const paged = params.allocator === "paged", px = kit.width / ROW, shapes = [], lines = [];
  const wasted = state.taken - state.tokens, lost = wasted > state.tokens ? "red" : null;
  const of = (name) => places.find(([who]) => who === name), A = of("A"), B = of("B");
  const shared = new Set(A && B ? A[3].filter((start) => B[3].includes(start)) : []);
  const whose = (name, start) => (shared.has(start) ? "green" : name === "A" ? "blue" : name === "B" ? "purple" : "teal");
  const high = 21, pitch = 24, table_y = (name) => (name === "A" ? 20 : 66), top = params.fork ? 116 : 70;

  /** Slots from `first`, the first `full` of them with a token, as far as they lie in one row; then the rest. */
  const span = (x, y, slots, full, css) => [
    rect(x, y, full * px - (full === slots ? 1 : 0), high, css), rect(x + full * px, y, (slots - full) * px - 1, high, `hatch ${lost ?? css}`),
  ];
  for (let row = 0; row < 8; row++) shapes.push(rect(0, top + row * pitch, kit.width - 1, high, "free"));
  if (paged) shapes.push(rect(0, top, params.block_size * px - 1, high, "grey", "block 0, the null block, belongs to nobody"));

  for (const [name, held, unit, starts] of places) {
    starts.forEach((start, i) => {
      const full = Math.min(unit, Math.max(0, held - i * unit)), css = whose(name, start), id = start / unit;
      if (name === "B" && shared.has(start)) return; // A has drawn it
      const pieces = [];
      for (let at = start; at < start + unit; at = (Math.floor(at / ROW) + 1) * ROW) {
        const until = Math.min(start + unit, (Math.floor(at / ROW) + 1) * ROW), filled = Math.min(until - at, Math.max(0, full - (at - start)));
        pieces.push(...span((at % ROW) * px, top + Math.floor(at / ROW) * pitch, until - at, filled, css));
      }
      const mine = "AB".includes(name);
      shapes.push(key(paged ? (mine ? `memory ${id}` : `block ${id}`) : `memory ${name}`, kit.shape("g", {}, ...pieces)));
    });
  }

  // The tables: one box per block, with the block's number; a line leads to where it lies.
  for (const row of [A, B].filter((row) => row)) {
    const [name, held, unit, starts] = row, y = table_y(name), named = unit * px > 18;
    shapes.push(text(0, y - 6, `${name}: ${count(held, "token")} in ${paged ? count(starts.length, "block") : "one run of slots"}`, "small bold"));
    starts.forEach((start, i) => {
      const x = i * unit * px, css = whose(name, start), id = start / unit, wide = unit * px - 2;
      const [tx, ty] = [((start % ROW) + Math.min(unit, ROW) / 2) * px, top + Math.floor(start / ROW) * pitch];
      const fresh = copied?.[1] === id && name === request;
      shapes.push(key(!paged ? `table ${name}` : name === "A" || !shared.has(start) ? `block ${id}` : `B ${id}`, box(x, y, wide, 24, paged && named ? id : "", css)));
      if (name === "A" || !shared.has(start)) lines.push(line(x + wide / 2, y + 24, tx, ty, `${css}${fresh ? " thick" : ""}`));
    });
  }

  const y = top + 8 * pitch + 14, chips = Math.min(queue.length, Math.floor((kit.width - 118) / 30));
  if (paged) {
    shapes.push(text(0, y + 15, "free:", "small soft"));
    queue.slice(0, chips).forEach((id, i) => shapes.push(key(`block ${id}`, box(34 + i * 30, y, 28, 21, id, "grey"))));
    const more = state.free / params.block_size - chips;
    if (more > 0 || !chips) shapes.push(text(38 + chips * 30, y + 15, chips ? `and ${number(more)} more` : "none", "small soft"));
  } else shapes.push(text(0, y + 15, `free: ${state.free} slots; the largest hole has ${state.largest_fit}`, `small ${why && state.free > tokens ? "red bold" : "soft"}`));

  const HAPPENED = {
    admit: `Request ${request} comes with ${tokens} tokens.`,
    grow: copied ? `B writes its own next token: block ${copied[0]} is copied to block ${copied[1]}, and the others stay shared.` : `${request} grows by ${count(tokens, "token")}.`,
    fork: paged ? `B begins as a copy of A’s table: ${count(of("B")?.[3].length ?? 0, "block")} with two owners, and nothing is copied.` : `B begins as a copy of A: all ${tokens} tokens are copied.`,
    finish: `${request.includes(" ") ? "Every second request" : `Request ${request}`} finishes, and its memory is free again.`,
  };
  const who = "AB".includes(request) ? request : `Request ${request}`;
  const refused = { admit: `${who} has to wait`, grow: `${who} cannot grow`, fork: "B cannot begin" }[event];
  return {
    picture: [
      svg(kit.width, y + 24, `A memory of 512 slots: ${state.taken} taken, ${state.tokens} of them hold a token, ${state.free} free.`, ...lines, ...shapes),
      legend(["blue", "A"], ...(params.fork ? [["green", "A and B share it"], ["purple", "B"]] : []), ["teal", "other requests"], [`${lost ?? "teal"} hatched`, "taken and empty"], ["free", "free"], ...(paged ? [["grey", "null block"]] : [])),
      numbers([state.running, "running"], [state.waiting, "waiting", why ? "red" : ""], [state.tokens, "slots with a token"], [wasted, "taken and empty", lost ?? ""],
        [state.free, "free", why && state.free > tokens ? "red" : ""], ...(params.fork ? [[state.copied, "slots copied"]] : [])),
    ],
    text: why ? `${refused}: ${why}.${state.free >= tokens && event === "admit" ? ` ${number(state.free)} slots are free, and ${tokens} do not fit.` : ""}` : HAPPENED[event],
  };
}
