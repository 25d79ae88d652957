// One request on its way: prefill worker, wire, decode worker. Below, all requests against the two limits, on the same scale.

const STAGES = 4; // of a request: it waits, its prompt is computed, its cache travels, its answer is written

export function steps(trace) {
  return STAGES * trace.requests.length;
}

const PARTS = [["grey", "queue"], ["orange", "prefill"], ["purple", "transfer"], ["blue", "first decode step"]];

export function draw(trace, index, kit) {
  const { svg, rect, text, line, box, key, numbers, legend, number } = kit;
  const i = Math.floor(index / STAGES), stage = index % STAGES, { requests, limits_us: [ttft, tpot] } = trace, r = requests[i];
  const ms = (us) => `${number(us / 1000, us < 10_000 ? 1 : 0)} ms`, narrow = kit.width < 560, shapes = [];
  const left = narrow ? 48 : 96, pace_w = narrow ? 64 : 118, main_w = kit.width - left - pace_w - (narrow ? 38 : 46), right = left + main_w, pace_x = right + (narrow ? 24 : 30);
  const x = (us) => left + (Math.min(us, 2 * ttft) / (2 * ttft)) * main_w; // both limits stand in the middle of their scale, whatever happens
  const px = (us) => pace_x + (Math.min(us, 2 * tpot) / (2 * tpot)) * pace_w;

  // The life: three places, and the cache that moves from the first over the second to the third.
  const split = r.transfer[0] >= 0, [from, to] = [r.gpus[0], r.gpus.at(-1)], [queue, prefill, wire, rest] = r.parts, mib = `${number((r.prompt * trace.longest_bytes) / trace.longest / 2 ** 20)} MiB`;
  const top = 18, pitch = 25, high = 21, lanes = [narrow ? `GPU ${from}` : `prefill, GPU ${from}`, "the wire", narrow ? `GPU ${to}` : `decode, GPU ${to}`];
  shapes.push(text(0, 11, `request ${i}, ${number(r.prompt)} tokens, from its arrival on`, "small soft"));
  lanes.forEach((name, lane) => shapes.push(text(0, top + lane * pitch + 15, name, "small soft"), rect(left, top + lane * pitch, main_w, high, "free")));
  const span = (lane, name, a, b, css, title) => b > a && shapes.push(key(`${name} of ${i}`, rect(x(a), top + lane * pitch, Math.max(1.5, x(b) - x(a)), high, css, title)));
  const sent = split ? r.transfer[0] - r.arrival : 0, arrived = queue + prefill + wire, first = r.first - r.arrival;
  if (stage < 1) span(0, "queue", 0, queue, "grey", `queue: ${ms(queue)}`);
  if (stage > 0) span(0, "queue", 0, queue, "grey", `queue: ${ms(queue)}`), span(0, "prefill", queue, queue + prefill, "orange", `prefill: ${ms(prefill)}`);
  if (stage > 1 && split) span(1, "transfer", sent, r.transfer[1] - r.arrival, "purple", `transfer: ${ms(wire)}`);
  if (stage > 2) span(2, "decode", first - rest, r.last - r.arrival, "blue", `${r.output} tokens`);
  const where = stage < 1 ? null : stage === 1 ? [queue + prefill, 0] : stage === 2 ? [split ? r.transfer[1] - r.arrival : arrived, split ? 1 : 0] : [r.last - r.arrival, 2];

  // All of them, on the same scale: time to the first token, and time per further token.
  const base = top + 3 * pitch + 25, row = narrow ? 11 : 12.5, before = kit.before?.trace.requests, until = stage > 2 ? i : i - 1;
  shapes.push(text(left, base - 7, narrow ? "first token (TTFT)" : "time to the first token (TTFT)", "small soft"), text(pace_x, base - 7, narrow ? "TPOT" : "further tokens (TPOT)", "small soft"));
  requests.forEach((other, n) => {
    const y = base + n * row, thick = row - 3, took = other.first - other.arrival, shown = n <= until;
    shapes.push(text(left - 8, y + thick, n, `small end ${n === i ? "bold" : "soft"}`), rect(left, y, main_w, thick, "free faint"), rect(pace_x, y, pace_w, thick, "free faint"));
    if (before?.[n] && shown) shapes.push(line(x(before[n].first - before[n].arrival), y - 1, x(before[n].first - before[n].arrival), y + thick + 1, "ink"), line(px(before[n].tpot), y - 1, px(before[n].tpot), y + thick + 1, "ink"));
    if (!shown) return;
    let at = 0;
    other.parts.forEach((part, j) => {
      const ok = [Math.min(at, ttft), Math.min(at + part, ttft)];
      if (ok[1] > ok[0]) shapes.push(key(`${n} ${PARTS[j][1]}`, rect(x(ok[0]), y, x(ok[1]) - x(ok[0]), thick, PARTS[j][0], `${PARTS[j][1]}: ${ms(part)}`)));
      at += part;
    });
    if (took > ttft) shapes.push(key(`${n} late`, rect(x(ttft), y, x(took) - x(ttft), thick, "red", `${ms(took)}: too late`)));
    shapes.push(key(`${n} pace`, rect(pace_x, y, px(Math.min(other.tpot, tpot)) - pace_x, thick, "blue", ms(other.tpot))));
    if (other.tpot > tpot) shapes.push(key(`${n} slow`, rect(px(tpot), y, px(other.tpot) - px(tpot), thick, "red", `${ms(other.tpot)}: too slow`)));
    if (took > 2 * ttft) shapes.push(text(right - 3, y + thick, ms(took), "small end bold halo"));
    if (other.tpot > 2 * tpot) shapes.push(text(pace_x + pace_w - 3, y + thick, ms(other.tpot), "small end bold halo"));
    shapes.push(text(kit.width, y + thick, other.met ? "✓" : "✗", `small end bold ${other.met ? "green" : "red"}`));
  });
  const bottom = base + requests.length * row;
  for (const [at, limit, start] of [[x(ttft), ttft, top - 3], [px(tpot), tpot, base - 2]]) shapes.push(line(at, start, at, bottom, "ink dashed"), text(at, bottom + 12, `${narrow && limit === tpot ? "" : "limit "}${number(limit / 1000)} ms`, "small middle"));

  if (where) shapes.push(key(`cache of ${i}`, box(Math.min(x(where[0]) + 3, right - 66), top + where[1] * pitch + 2, 62, high - 4, mib, where[1] === 1 ? "purple" : stage > 2 ? "blue" : "orange"))); // above the line of the limit

  const told = requests.slice(0, until + 1), count = (yes) => told.filter(yes).length, good = count((q) => q.met), late = count((q) => q.first - q.arrival > ttft), slow = count((q) => q.tpot > tpot);
  const said = [
    queue > 0 ? `It waits ${ms(queue)} for GPU ${from}.` : `GPU ${from} is free and begins at once.`,
    `GPU ${from} computes its ${number(r.prompt)} tokens in ${ms(prefill)}.`,
    split ? `${mib} of keys and values cross the wire: ${wire > 0 ? `${ms(wire)} more to wait` : "they had left before the prompt was done"}.` : "Nothing is sent: the same GPU goes on, and prompts get in the way.",
    `First token after ${ms(first)}, then one every ${ms(r.tpot)}: ${r.met ? "within both limits." : first > ttft ? "the first is too late." : "they come too slowly."}`,
  ][stage];
  return {
    picture: [
      svg(kit.width, bottom + 16, `Request ${i}: first token after ${ms(first)}, further tokens every ${ms(r.tpot)}. ${good} of ${told.length} requests within both limits.`, ...shapes),
      legend(["grey", "queue"], ["orange", "prefill"], ["purple", "transfer"], ["blue", "decode"], ["red", "over the limit"], ...(before ? [["ink", "line: the run before"]] : [])),
      numbers([`${good} of ${told.length}`, "within both limits", good < told.length / 2 ? "red" : ""], [late, "start too late", late ? "red" : ""], [slow, "write too slowly", slow ? "red" : ""],
        [ms(trace.wire_us), `to send ${number(trace.longest)}`, trace.wire_us > trace.prefill_us ? "red" : ""], [ms(trace.prefill_us), "to compute them"]),
    ],
    text: `Request ${i}. ${said}${index === steps(trace) - 1 ? ` In all, ${good} of ${requests.length} keep both limits.` : ""}`,
  };
}
