// A line for each token, over time: made, held up, waiting, read. How many wait is a vertical cut; how old news is, a length.

export function steps(trace) {
  return trace.reads.length;
}

export function draw(trace, index, kit) {
  const { svg, rect, text, line, box, numbers, legend, number, count, params: p } = kit;
  const { put_at, reads, reader_done } = trace, read = reads[index], now = read.at, last = index === reads.length - 1, shapes = [];
  const ms = (time) => `${number(time)} ms`, left = 52, px = (kit.width - left) / reader_done, x = (time) => left + time * px;
  const row = p.tokens === 32 ? 6.5 : p.tokens === 16 ? 10 : 16, top = 22, y = (token) => top + token * row, base = y(p.tokens) + 4;
  const first = (k) => reads.slice(0, k).reduce((total, r) => total + r.tokens, 0);

  // From the left: the engine makes the token, has no room for it, it waits for the reader. Nothing right of now.
  shapes.push(text(0, 12, "the life of each token", "small soft"), rect(left, top - 2, kit.width - left, base - top, "free"));
  const ready = (token) => (put_at[token - 1] ?? 0) + p.step_ms, reader = put_at.map(() => Infinity);
  reads.slice(0, index + 1).forEach((r, k) => { for (let token = first(k); token < first(k) + r.tokens; token++) reader[token] = r.at; });
  put_at.forEach((put, token) => {
    const part = (from, to, css, title) => {
      if (from < now && to > from) shapes.push(rect(x(from), y(token), Math.max(0.8, (Math.min(to, now) - from) * px), row - 1, css, title));
    };
    part(ready(token) - p.step_ms, ready(token), "green", `token ${token} is made`);
    part(ready(token), put, "red", `token ${token}: the engine is held up for ${ms(put - ready(token))}`);
    if (put <= now) part(put, reader[token], "orange", `token ${token} waits`);
  });
  reads.slice(0, index + 1).forEach((r, k) => {
    const wide = p.read_ms * px, high = r.tokens * row - 1;
    shapes.push(rect(x(r.at), y(first(k)), Math.max(1.5, wide), high, k === index ? "blue" : "box blue", `read ${k}: ${count(r.tokens, "token")} at ${ms(r.at)}`));
    if (wide > 17 && r.tokens > 1 && high > 11 && k < index) shapes.push(text(x(r.at) + wide / 2, y(first(k)) + high / 2 + 4, r.tokens, "small middle"));
  });
  for (let token = 0; token < p.tokens; token += p.tokens / 4) shapes.push(text(0, y(token) + Math.max(row / 2 + 4, 8), `token ${token}`, "small soft"));

  // The axis, with a mark where this read begins.
  const unit = [5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].find((t) => t * px > 62);
  for (let time = 0; x(time) < kit.width - 24; time += unit) shapes.push(line(x(time), base, x(time), base + 4, "ink"), text(x(time), base + 17, time ? ms(time) : "0", "small soft middle"));
  shapes.push(line(left, base, kit.width, base, "ink"), line(x(now), top - 6, x(now), base, "accent thick"));

  // What lies between the two as this read begins: the collector's one item, or pieces; and who has no room.
  const waits = read.tokens + read.left, from = first(index), beyond = from + waits, stuck = p.handoff === "bounded queue" && beyond < p.tokens && ready(beyond) < put_at[beyond];
  const shelf = base + 52, cell = 34, fits = Math.floor(kit.width / cell), pieces = [];
  for (let token = from; token < beyond; token++) pieces.push(token);
  const item = p.handoff === "collector" ? `one item with ${count(waits, "token")}` : count(waits, "piece");
  shapes.push(text(0, shelf - 9, `${kit.width < 480 ? "waits" : "between the two"} as read ${index} begins: ${item}`, "small soft"));
  if (p.handoff === "collector") {
    shapes.push(box(0, shelf, Math.min(kit.width, 20 + waits * 26), 24, waits > 1 ? `${from} – ${beyond - 1}` : from, "blue", `the item holds ${count(waits, "token")}`));
  } else {
    const shown = pieces.length > fits ? pieces.slice(0, fits - 1) : pieces;
    shown.forEach((token, i) => shapes.push(box(i * cell, shelf, cell - 4, 24, token, i ? "orange" : "blue", `token ${token}, ${ms(now - put_at[token])} old`)));
    if (shown.length < pieces.length) shapes.push(text(shown.length * cell, shelf + 16, `+ ${pieces.length - shown.length}`, "small soft"));
    if (p.handoff === "bounded queue") {
      for (let i = waits; i < 4; i++) shapes.push(rect(i * cell, shelf, cell - 4, 24, "free"));
      if (stuck) shapes.push(line(4 * cell - 2, shelf - 3, 4 * cell - 2, shelf + 27, "red thick"), box(4 * cell + 4, shelf, cell - 4, 24, beyond, "red"), text(5 * cell + 6, shelf + 16, `ready for ${ms(now - ready(beyond))}`, "small red"));
    }
  }
  const age = now - put_at[from];
  let told = `Read ${index} at ${ms(now)} takes ${count(read.tokens, "token")}${read.tokens > 1 ? " at once" : ""}, ${age ? `${read.tokens > 1 ? "the oldest " : ""}${ms(age)} old` : "just made"}; ${read.left ? `${count(read.left, "token")} left behind` : "nothing is left behind"}.`;
  if (stuck) told += ` The engine has stood still for ${ms(now - ready(beyond))}: there was no room for token ${beyond}.`;
  if (last) told += ` The engine was done at ${ms(trace.engine_done)}, the reader at ${ms(reader_done)}.`;
  return {
    picture: [
      svg(kit.width, shelf + 30, `${index + 1} of ${reads.length} reads up to ${ms(now)}: ${from + read.tokens} of ${p.tokens} tokens read.`, ...shapes),
      legend(["green", "the engine makes it"], ...(p.handoff === "bounded queue" ? [["red", "no room: the engine is held up"]] : []), ["orange", "it waits"], ["blue", "it is read"]),
      numbers([ms(trace.engine_done), "engine done", trace.engine_waited ? "red" : ""], [ms(trace.engine_waited), "held up", trace.engine_waited ? "red" : ""], [ms(reader_done), "reader done"],
        [reads.length, reads.length === 1 ? "read" : "reads"], [trace.most_items, trace.most_items === 1 ? "item at most" : "items at most"], [ms(trace.oldest), "oldest news", trace.oldest > p.read_ms ? "red" : ""]),
    ],
    text: told,
  };
}
