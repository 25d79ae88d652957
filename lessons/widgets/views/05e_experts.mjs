// One step of a layer on four GPUs: tokens choose, rows travel to the experts, GPUs compute and wait for the last. Below: all steps.

const STAGES = 3, AXIS = 1120; // a step is shown in three stages; ticks that the axis of time has, for every run

export function steps(trace) {
  return STAGES * trace.steps.length;
}

export function draw(trace, index, kit) {
  const { svg, rect, text, line, circle, group, key, numbers, legend, number } = kit;
  const at = Math.floor(index / STAGES), stage = index % STAGES, { params } = trace, step = trace.steps[at], gpus = step.busy.length, size = step.slots.length / gpus;
  const shapes = [], narrow = kit.width < 560, home = 46, left = narrow ? 54 : 104, room = kit.width - left, wide = room / size, pitch = narrow ? 45 : 54, high = 29, top = 16;
  const x = (ticks) => left + (ticks / AXIS) * room, longest = Math.max(...step.busy), lost = step.waiting >= 20, last = step.busy.indexOf(longest);
  const of = (gpu) => step.slots.map((_, slot) => slot).slice(gpu * size, (gpu + 1) * size), lane = (gpu) => top + gpu * pitch;
  shapes.push(text(0, 10, "tokens at home", "small soft"), text(kit.width, 10, narrow ? "experts, and rows for them" : "experts, and how many rows have come for them", "small soft end"));

  // Experts in their slots. An expert that moves keeps its name, and so glides.
  const seen = {};
  step.slots.forEach((expert, slot) => {
    const gpu = Math.floor(slot / size), nth = seen[expert] = (seen[expert] ?? -1) + 1, rows = step.rows[slot], hot = lost && gpu === last && step.useful[slot] >= step.work[slot] && step.work[slot] === Math.max(...of(last).map((s) => step.work[s]));
    const css = stage > 0 && rows > 0 ? `box ${stage > 1 && hot ? "red" : "blue"}` : "free";
    shapes.push(key(`expert ${expert}, ${nth}`, group(left + (slot % size) * wide, lane(gpu),
      rect(0, 0, wide - 4, high, css, `expert ${expert}: ${number(rows)} rows`), text(4, 12, `e${expert}`, `small${nth > 0 ? " bold" : ""}`), stage > 0 ? text(wide - 8, 12, number(rows), "small end") : null)));
  });

  // Rows: a dot for those that one GPU's tokens send to one slot, at home or in the slot.
  for (let gpu = 0; gpu < gpus; gpu++) {
    shapes.push(rect(0, lane(gpu), home, high, "free faint"));
    if (!narrow) shapes.push(text(home + 6, lane(gpu) + 18, `GPU ${gpu}`, "small soft"));
    step.flow[gpu].forEach((n, slot) => {
      if (n === 0) return;
      const owner = Math.floor(slot / size), r = Math.min(6, 1.5 + 0.8 * Math.sqrt(n));
      const [cx, cy] = stage === 0 ? [5 + (slot % size) * 9, lane(gpu) + 4 + owner * 7] : [left + (slot % size) * wide + 8 + gpu * Math.min(13, (wide - 16) / gpus), lane(owner) + 21];
      shapes.push(key(`from ${gpu} to slot ${slot}`, circle(cx, cy, stage === 0 ? Math.min(r, 3.2) : r, owner === gpu ? "blue" : "purple")));
    });
  }

  // Time: rows go, experts are read and multiplied, all wait for the last, and rows come back.
  for (let gpu = 0; gpu < gpus; gpu++) {
    const y = lane(gpu) + high + 3, thick = narrow ? 9 : 11;
    if (narrow) shapes.push(text(0, y + 9, `GPU ${gpu}`, "small soft"));
    shapes.push(rect(left, y, room - 4, thick, "free faint"));
    if (stage === 0) continue;
    shapes.push(key(`there ${gpu}`, rect(left, y, x(step.send) - left, thick, "purple", `all-to-all: ${step.send} ticks`)));
    if (stage === 1) continue;
    let ticks = step.send;
    for (const slot of of(gpu)) {
      const work = step.work[slot], useful = Math.min(work, step.useful[slot]);
      if (work === 0) continue;
      shapes.push(key(`slot ${slot} multiplies`, rect(x(ticks), y, Math.max(0.5, x(ticks + useful) - x(ticks) - 0.5), thick, "blue", `expert ${step.slots[slot]}: ${work} ticks`)));
      if (work > useful) shapes.push(key(`slot ${slot} reads`, rect(x(ticks + useful), y, x(ticks + work) - x(ticks + useful) - 0.5, thick, "hatch blue", `expert ${step.slots[slot]}: read for ${work} ticks, ${step.rows[slot]} rows`)));
      ticks += work;
    }
    const end = step.send + longest;
    if (ticks < end) shapes.push(key(`waits ${gpu}`, rect(x(ticks), y, x(end) - x(ticks), thick, lost ? "red" : "grey", `waits ${end - ticks} ticks`)));
    shapes.push(key(`back ${gpu}`, rect(x(end), y, x(end + step.send) - x(end), thick, "purple", `all-to-all back: ${step.send} ticks`)));
  }

  // Every step so far: its ticks, and how many of them a GPU waits on average.
  const base = top + gpus * pitch + (narrow ? 44 : 66), tall = narrow ? 38 : 50, column = room / trace.steps.length, before = kit.before?.trace.steps;
  shapes.push(text(0, base - tall + 10, "ticks", "small soft"), text(0, base - tall + 23, "a step", "small soft"), line(left, base, kit.width, base, "ink"));
  trace.steps.forEach((other, i) => {
    const h = (ticks) => (ticks / AXIS) * tall, cx = left + i * column, bar = column - (narrow ? 4 : 8), wait = Math.max(...other.busy) - other.busy.reduce((a, b) => a + b, 0) / gpus, shown = i < at || (i === at && stage > 1);
    if (shown) {
      shapes.push(key(`step ${i}`, rect(cx, base - h(other.ticks - wait), bar, h(other.ticks - wait), i === at ? "blue" : "blue faint", `step ${i}: ${number(other.ticks)} ticks`)));
      if (wait > 0) shapes.push(key(`lost in ${i}`, rect(cx, base - h(other.ticks), bar, h(wait), other.waiting >= 20 ? "red" : "grey", `waiting: ${other.waiting} %`)));
      if (before?.[i]) shapes.push(line(cx - 1, base - h(before[i].ticks), cx + bar + 1, base - h(before[i].ticks), "ink thick"));
    }
    shapes.push(text(cx + bar / 2, base + 12, other.moved > 0 && i <= at ? "move" : i, `small middle ${i === at ? "bold" : "soft"}`));
  });

  const rows = params.tokens * params.top_k, done = trace.steps.slice(0, stage > 1 ? at + 1 : at), total = done.reduce((sum, s) => sum + s.ticks, 0), end = index === steps(trace) - 1;
  const said = [
    `${step.moved > 0 ? `EPLB has counted four steps, and ${step.moved} slots have another expert now. ` : ""}${params.tokens === 1 ? "One token chooses" : `${number(params.tokens)} tokens choose`} ${params.top_k === 1 ? "an expert" : "two experts"}${params.tokens === 1 ? "" : " each"}.`,
    `${number(step.sent)} of ${number(rows)} rows travel to another GPU. ${step.read} of ${step.slots.length} slots must be read.`,
    `GPU ${last} is done last, after ${number(longest)} ticks. ${step.waiting > 0 ? `On average a GPU waits ${step.waiting} % of that time.` : "Nobody waits."}${end ? ` All steps: ${number(total)} ticks; with experts in order ${number(trace.final.in_order)}.` : ""}`,
  ][stage];
  return {
    picture: [
      svg(kit.width, base + 17, `Step ${at}. ${said}`, ...shapes),
      legend(["purple", "rows that travel"], ["blue", "multiplying"], ["blue hatched", "reading weights"], [lost ? "red" : "grey", "waiting"], ...(before ? [["ink", "line: the run before"]] : [])),
      numbers([stage > 0 ? `${step.asked}${narrow ? "" : " of 16"}` : "–", narrow ? "experts" : "experts are read"], [stage > 0 ? number(step.sent) : "–", narrow ? "travel" : "rows travel"], [stage > 1 ? `${step.waiting} %` : "–", narrow ? "waiting" : "of the time waiting", stage > 1 && lost ? "red" : ""], [number(total), narrow ? "ticks" : "ticks so far"]),
    ],
    text: `Step ${at}: ${said}`,
  };
}
