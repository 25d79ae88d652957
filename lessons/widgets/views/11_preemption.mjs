// The pool, block by block, and one request in it: the victim. Below, how many of its tokens have keys and values, over all steps.

const AXIS = 1280, ROW = 40; // steps to the right, blocks in a row: the same for every run

export function steps(trace) {
  return trace.refused ? 1 : trace.steps.length;
}

/** Refused at the door: one request beside a pool that is smaller than it. */
function draw_refused(trace, kit) {
  const { svg, rect, text, numbers, legend, key } = kit, p = trace.params, needed = Math.ceil((p.prompt + p.output - 1) / p.block_size), shapes = [];
  const pitch = Math.min(34, kit.width / needed), side = pitch - 4, cell = kit.width / p.requests;
  shapes.push(text(0, 12, `the pool: ${p.pool_blocks} blocks, all free`, "small soft"), text(0, 68, `what one request needs before it is done: ${needed} blocks`, "small soft"), text(0, 130, `${p.requests} requests arrive`, "small soft"));
  for (let b = 0; b < needed; b++) {
    if (b < p.pool_blocks) shapes.push(key(`block ${b}`, rect(b * pitch, 20, side, 24, "free")));
    shapes.push(rect(b * pitch, 76, side, 24, b < p.pool_blocks ? "box purple" : "hatch red", b < p.pool_blocks ? null : "there is no such block"));
  }
  for (let r = 0; r < p.requests; r++) shapes.push(rect(r * cell, 138, cell - 4, 24, "box red", `request ${r} is refused`), text(r * cell + cell / 2 - 2, 155, "✗", "small middle red bold"));
  return {
    picture: [
      svg(kit.width, 170, `One request needs ${needed} blocks, and the pool has ${p.pool_blocks}: all ${p.requests} are refused.`, ...shapes),
      legend(["free", "free"], ["purple", "a request’s blocks"], ["red", "missing, and refused"]),
      numbers([p.pool_blocks, "blocks in the pool"], [needed, "needed by one request", "red"], [`0 of ${p.requests}`, "requests answered", "red"]),
    ],
    text: `Nobody runs: ${trace.refused}. Admitted, a request would take the whole pool and still not finish.`,
  };
}

export function draw(trace, index, kit) {
  if (trace.refused) return draw_refused(trace, kit);
  const { svg, rect, text, line, path, key, numbers, legend, number, count } = kit, { params: p, victim, steps: all } = trace;
  const swap = p.policy === "swap", narrow = kit.width < 560, shapes = [], step = all[index], before = all[index - 1], last = index === all.length - 1;

  // The pool: whose blocks they are. What a victim gives up falls out of it.
  const pitch = kit.width / ROW, side = pitch - (narrow ? 1 : 2), high = narrow ? 15 : 17, top = 18, rows = 4, out_y = top + rows * (high + 2) + 18;
  const place = (n) => [(n % ROW) * pitch, top + Math.floor(n / ROW) * (high + 2)];
  let n = 0;
  shapes.push(text(0, 11, `the pool, ${p.pool_blocks} blocks`, "small soft"));
  for (const [owner, held] of Object.entries(step.held)) {
    const [x, y] = place(n), mine = Number(owner) === victim, again = mine && step.resumed.includes(victim) && !swap;
    for (let b = 0; b < held; b++, n++) shapes.push(key(`${owner}.${b}`, rect(...place(n), side, high, mine ? (again ? "orange" : "blue") : "box purple", `request ${owner}`)));
    if (!mine && !narrow) shapes.push(text(x + side / 2, y + 12.5, owner, "small middle"));
  }
  for (; n < p.pool_blocks; n++) shapes.push(rect(...place(n), side, high, "free"));
  const gone = step.preempted.map((r) => [r, before?.held[r] ?? 0]);
  shapes.push(text(0, out_y - 6, gone.length ? `request ${gone.map(([r]) => r).join(" and ")} ${gone.length > 1 ? "have" : "has"} to go: ${swap ? "copied to the CPU" : "thrown away"}` : swap ? "copied to the CPU in this step" : "thrown away in this step", `small ${gone.length ? (swap ? "purple" : "red") : "soft"}`));
  let lost = 0;
  for (const [r, held] of gone) for (let b = 0; b < held; b++, lost++) shapes.push(key(`${r}.${b}`, rect(lost * pitch, out_y, side, high, `hatch ${swap ? "purple" : "red"}`, `request ${r}`)));

  // The victim's life: how many of its tokens are in the pool; what it has lost; how it comes back.
  const px = (kit.width - 30) / AXIS, x = (i) => 30 + i * px, chart = out_y + high + 26, tall = narrow ? 100 : 124, base = chart + tall, y = (tokens) => base - (tokens / (p.prompt + p.output)) * (tall - 4);
  const stays = []; // [kind, first step, end, tokens at both ends]
  let tokens = 0, times = 0;
  all.slice(0, index + 1).forEach((s, i) => {
    const here = s.computed[victim] ?? null, hit = s.preempted.includes(victim), open = stays.at(-1);
    times += hit;
    if (here !== null) {
      if (s.resumed.includes(victim) && !swap) stays.push(["orange", i, i + 1, here, here]);
      else if (open?.[0] === "blue" && open[2] === i) [open[2], open[4]] = [i + 1, here];
      else stays.push(["blue", i, i + 1, here, here]);
      tokens = here;
    } else if (s.waiting.includes(victim)) {
      const kind = tokens ? (swap ? "hatch purple" : "hatch red") : "grey";
      if (open?.[0] === kind && open[2] === i) open[2] = i + 1;
      else stays.push([kind, i, i + 1, tokens, tokens]);
    }
  });
  shapes.push(text(0, chart - 8, `request ${victim}: tokens with keys and values`, "small soft"), text(24, y(p.prompt + p.output) + 4, p.prompt + p.output, "small soft end"), text(24, base + 4, "0", "small soft end"), line(30, base, kit.width, base, "ink"));
  for (const [kind, from, to, low, up] of stays.sort((a, b) => (a[0] === "orange") - (b[0] === "orange"))) { // one step wide: on top
    if (kind === "blue") shapes.push(path(`M${x(from)} ${base}L${x(from)} ${y(low)}L${x(to)} ${y(up)}L${x(to)} ${base}Z`, "area blue"));
    else if (kind === "grey") shapes.push(rect(x(from), base - 6, x(to) - x(from), 6, "grey", "waits to begin"));
    else shapes.push(rect(x(from), y(low), Math.max(kind === "orange" ? 3 : 1, x(to) - x(from)), base - y(low), kind, kind === "orange" ? `${count(up, "token")} computed again in one step` : null));
  }
  let preemptions = 0, redone = 0, copied = 0;
  all.slice(0, index + 1).forEach((s, i) => {
    [preemptions, redone, copied] = [preemptions + s.preempted.length, redone + s.redone, copied + s.copied];
    if (s.preempted.includes(victim)) shapes.push(path(`M${x(i)} ${chart + 2}l-4 -8h8z`, "area red"));
    else if (s.preempted.length) shapes.push(rect(x(i) - 0.75, base + 3, 1.5, 6, "red", `request ${s.preempted.join(", ")} preempted`));
  });
  const ghost = kit.before?.trace.num_steps;
  if (ghost) shapes.push(line(x(ghost), chart, x(ghost), base, "ink dashed"), text(x(ghost) + (ghost > 800 ? -4 : 4), chart + 10, `before: ${number(ghost)} steps`, `small halo soft${ghost > 800 ? " end" : ""}`));
  if (last) shapes.push(line(x(all.length), chart, x(all.length), base, "ink"), text(x(all.length) + (all.length > 800 ? -4 : 4), chart + 26, `all done: ${number(all.length)} steps`, `small bold halo${all.length > 800 ? " end" : ""}`));
  else shapes.push(line(x(index + 1), chart, x(index + 1), base, "ink"));
  for (let s = 0; s <= 1200; s += 300) shapes.push(text(x(s), base + 22, s === 0 ? "step 0" : number(s), `small soft${s ? " middle" : ""}`));

  const mine = step.preempted.includes(victim), names = step.preempted.map((r) => `request ${r}`).join(" and "), where = step.computed[victim] === undefined ? (step.waiting.includes(victim) ? "waits" : tokens ? "is done" : "has not arrived") : "runs";
  const said = last ? `All ${p.requests} are done after ${number(all.length)} steps and ${count(trace.preemptions, "preemption")}. ${trace.preemptions ? `Request ${victim} had to go ${times === 1 ? "once" : `${times} times`}.` : "Nobody had to go."}`
    : mine ? `Step ${step.step}: no block is free. Request ${victim} was admitted last and has to go, ${times === 1 ? "for the first time" : `now ${times} times`}.`
      : step.resumed.includes(victim) ? `Step ${step.step}: request ${victim} is back. ${swap ? "Its blocks are copied in." : `Its ${step.computed[victim]} tokens are computed in one step.`}`
        : `Step ${step.step}: ${names ? `${names} ${step.preempted.length > 1 ? "have" : "has"} to go; ` : ""}request ${victim} ${where}; ${count(step.free, "block")} free, ${step.waiting.length} waiting.`;
  return {
    picture: [
      svg(kit.width, base + 26, `Pool of ${p.pool_blocks} blocks at step ${step.step} of ${all.length}; ${preemptions} preemptions, ${redone} tokens computed again.`, ...shapes),
      legend(["blue", `request ${victim}`], ["purple", swap ? "other requests; on the CPU" : "other requests"], ["orange", "computed again"], ["red", swap ? "▾ preempted" : "▾ preempted, lost"], ["grey", "waits to begin"]),
      numbers([number(preemptions), preemptions === 1 ? "preemption" : "preemptions", preemptions ? "red" : ""], [times, `of request ${victim}`, times ? "red" : ""], [number(redone), "tokens computed again", redone ? "red" : ""], ...(swap ? [[number(copied), "blocks copied"]] : []), [number(index + 1), last ? "steps, all done" : "steps so far"]),
    ],
    text: said,
  };
}
