// A line for each token, over time: made, held up, waiting, read. How many wait is a vertical cut; how old news is, a length.
// Above it the mailbox between engine and reader, as it is when the reader comes: it fills and is emptied with the steps.

export function steps(trace) {
  return trace.reads.length;
}

export function draw(trace, index, kit) {
  const { svg, rect, text, line, box, key, before, numbers, legend, number, count, params: p } = kit;
  const { put_at, reads, reader_done } = trace, read = reads[index], now = read.at, last = index === reads.length - 1, shapes = [];
  // One scale for every hand-off: as long as a reader takes who reads token by token, or an engine that waits for nobody.
  const span = p.step_ms + p.tokens * Math.max(p.step_ms, p.read_ms) + p.read_ms, ms = (time) => `${number(time)} ms`, left = 52, px = (kit.width - left) / span, x = (time) => left + time * px;
  const row = p.tokens === 32 ? 6.2 : p.tokens === 16 ? 10 : 16, top = 80, y = (token) => top + token * row, base = y(p.tokens) + 4;
  const first = (k) => reads.slice(0, k).reduce((total, r) => total + r.tokens, 0);

  // From the left: the engine makes the token, has no room for it, it waits for the reader. Nothing right of now.
  shapes.push(text(0, top - 8, "the life of each token", "small soft"), rect(left, top - 2, kit.width - left, base - top, "free"));
  const ready = (token) => (put_at[token - 1] ?? 0) + p.step_ms, reader = put_at.map(() => Infinity);
  reads.slice(0, index + 1).forEach((r, k) => { for (let token = first(k); token < first(k) + r.tokens; token++) reader[token] = r.at; });
  put_at.forEach((put, token) => {
    const part = (from, to, css, title) => {
      if (from < now && to > from) shapes.push(key(`${css} ${token}`, rect(x(from), y(token), Math.max(0.8, (Math.min(to, now) - from) * px), row - 1, css, title)));
    };
    part(ready(token) - p.step_ms, ready(token), "blue", `token ${token} is made`);
    part(ready(token), put, "red", `token ${token}: the engine is held up for ${ms(put - ready(token))}`);
    if (put <= now) part(put, reader[token], "grey", `token ${token} waits`);
  });
  reads.slice(0, index + 1).forEach((r, k) => {
    const wide = p.read_ms * px, high = r.tokens * row - 1;
    shapes.push(rect(x(r.at), y(first(k)), Math.max(1.5, Math.min(wide, kit.width - x(r.at))), high, k === index ? "green" : "box green", `read ${k}: ${count(r.tokens, "token")} at ${ms(r.at)}`));
    if (wide > 17 && r.tokens > 1 && high > 11 && k < index) shapes.push(text(x(r.at) + wide / 2, y(first(k)) + high / 2 + 4, r.tokens, "small middle"));
  });
  for (let token = 0; token < p.tokens; token += p.tokens / 4) shapes.push(text(0, y(token) + Math.max(row / 2 + 4, 8), `token ${token}`, "small soft"));

  // The axis, with a mark where this read begins.
  const unit = [5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].find((t) => t * px > 62);
  for (let time = 0; x(time) < kit.width - 24; time += unit) shapes.push(line(x(time), base, x(time), base + 4, "ink"), text(x(time), base + 17, time ? ms(time) : "0", "small soft middle"));
  shapes.push(line(left, base, kit.width, base, "ink"), key("now", line(x(now), top - 4, x(now), base, "accent thick")));
  const past = before?.trace.reader_done;
  if (past && x(past) <= kit.width) shapes.push(line(x(past), top - 4, x(past), base, "soft dashed"), text(kit.width, top - 8, `the run before: read at ${ms(past)}`, "small soft end"));

  // The mailbox as this read begins: the collector's one item, or pieces; and who finds no room.
  const waits = read.tokens + read.left, from = first(index), beyond = from + waits, stuck = p.handoff === "bounded queue" && beyond < p.tokens && ready(beyond) < put_at[beyond];
  const merges = p.handoff === "collector", cell = Math.min(30, kit.width / 32), shelf = 22, item = merges ? `one item with ${count(waits, "token")}` : count(waits, "piece");
  const slots = p.handoff === "bounded queue" ? 4 : merges ? 0 : 32, late = waits > 4 ? " red bold" : "";
  shapes.push(text(0, 12, `the mailbox as read ${index} begins: ${item}`, `small${late || " soft"}`));
  for (let i = 0; i < slots; i++) shapes.push(rect(i * cell, shelf, cell - 2, 24, "free"));
  if (merges) shapes.push(rect(-2, shelf - 3, waits * cell + 2, 30, "outline green"));
  for (let token = from; token < beyond; token++) {
    const i = token - from, taken = i < read.tokens, piece = cell > 16 ? token : "";
    shapes.push(key(`token ${token}`, box(i * cell, shelf, cell - 2, 24, piece, taken ? "green" : "grey", `token ${token}, ${ms(now - put_at[token])} old`)));
  }
  if (stuck) shapes.push(line(4 * cell, shelf - 3, 4 * cell, shelf + 27, "red thick"), key(`token ${beyond}`, box(4 * cell + 4, shelf, cell - 2, 24, cell > 16 ? beyond : "", "red")), text(5 * cell + 8, shelf + 16, `no room for ${ms(now - ready(beyond))}: the engine stands still`, "small red"));
  const age = now - put_at[from];
  let told = `Read ${index} at ${ms(now)} takes ${count(read.tokens, "token")}${read.tokens > 1 ? " at once" : ""}, ${age ? `${read.tokens > 1 ? "the oldest " : ""}${ms(age)} old` : "just made"}; ${read.left ? `${count(read.left, "token")} left behind` : "nothing is left behind"}.`;
  if (stuck) told += ` The engine has stood still for ${ms(now - ready(beyond))}: there was no room for token ${beyond}.`;
  if (last) told += ` The engine was done at ${ms(trace.engine_done)}, the reader at ${ms(reader_done)}.`;
  return {
    picture: [
      svg(kit.width, base + 22, `${index + 1} of ${reads.length} reads up to ${ms(now)}: ${from + read.tokens} of ${p.tokens} tokens read.`, ...shapes),
      legend(["blue", "the engine makes it"], ...(p.handoff === "bounded queue" ? [["red", "no room: the engine is held up"]] : []), ["grey", "it waits"], ["green", "it is read"]),
      numbers([ms(last ? trace.engine_done : now), last ? "engine done" : "so far", last && trace.engine_waited ? "red" : ""], ...(last ? [[ms(trace.engine_waited), "held up", trace.engine_waited ? "red" : ""], [ms(reader_done), "reader done"]] : []),
        [index + 1, index ? "reads" : "read"], [ms(Math.max(...reads.slice(0, index + 1).map((r, k) => r.at - put_at[first(k)]))), "oldest news", trace.oldest > p.read_ms && last ? "red" : ""]),
    ],
    text: told,
  };
}
