// Two Gantt charts on one clock: static batching above, continuous below. Hatched in red: a slot that computes nothing.

export function steps(trace) {
  return Math.max(trace.static.makespan, trace.continuous.makespan);
}

const POLICIES = ["static", "continuous"], USUAL = 256; // what the clock shows, unless a run takes longer

/** A distance between ticks that leaves about 60 pixels to each. */
function tick_of(total, width) {
  const rough = (total * 60) / width;
  return [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((n) => n >= rough) ?? 2000;
}

export function draw(trace, index, kit) {
  const { svg, rect, text, line, key, number, numbers, legend, color, count } = kit;
  const { outputs, slots } = trace, last = index === steps(trace) - 1, bound = trace.static.bound;
  const total = Math.max(USUAL, steps(trace)), left = 20, px = (kit.width - left) / total, pitch = Math.min(28, Math.floor(236 / (2 * slots))), high = pitch - 3;
  const shapes = [], rows = {};

  POLICIES.forEach((policy, which) => {
    const run = trace[policy], top = 20 + which * (slots * pitch + 24), done = Math.min(index + 1, run.makespan), over = done === run.makespan;
    const waiting = over ? 0 : run.steps[index].waiting;
    let finished = 0, busy = 0;
    for (let slot = 0; slot < slots; slot++) {
      const y = top + slot * pitch;
      if (high > 11) shapes.push(text(0, y + high / 2 + 4, slot, "small soft"));
      shapes.push(rect(left, y, total * px, high, "free"), rect(left, y, done * px, high, "hatch red"));
    }
    run.spans.forEach(([slot, start, stop], i) => {
      if (start >= done) return;
      const n = Math.min(stop, done) - start, x = left + start * px, y = top + slot * pitch, w = n * px - (n * px > 3 ? 1 : 0);
      finished += stop <= done;
      busy += n;
      shapes.push(key(`${policy} ${i}`, rect(x, y, w, high, `box ${color(i)}`, `request ${i}: ${count(outputs[i], "token")}, steps ${start} to ${stop}`)));
      if (w > 5 + 7 * String(i).length && high > 11) shapes.push(text(x + w / 2, y + high / 2 + 4, i, "middle small"));
    });
    const lost = slots * done - busy;
    rows[policy] = { finished, waiting, lost, over, done };
    shapes.push(text(0, top - 6, `${policy}: ${over ? `done after ${run.makespan} steps` : `${finished} of ${outputs.length} done, ${waiting} waiting`}`, "small bold"));
    if (!over) shapes.push(line(left + done * px, top - 2, left + done * px, top + slots * pitch - 3, "accent thick"));
  });
  const bottom = 20 + 2 * slots * pitch + 24, tick = tick_of(total, kit.width - left), edge = left + bound * px;
  for (let step = 0; step <= total; step += tick) {
    shapes.push(line(left + step * px, bottom, left + step * px, bottom + 4), text(Math.min(left + step * px, kit.width - 4 * String(step).length), bottom + 16, step, "small soft middle"));
  }
  for (const y of [20, 44 + slots * pitch]) shapes.push(line(edge, y - 3, edge, y + slots * pitch, "ink dashed"));

  const { static: a, continuous: b } = rows, idle = POLICIES.map((policy) => (rows[policy].over ? 0 : trace[policy].steps[index].slots.filter((who) => who === null).length));
  const mean = (policy) => number(Math.floor(trace[policy].latency_sum / outputs.length));
  return {
    picture: [
      svg(kit.width, bottom + 20, `Two Gantt charts of ${slots} slots: ${a.finished} requests are done with static batching, ${b.finished} with continuous batching.`, ...shapes),
      legend(["blue", "a request, one token per step (each its colour)"], ["red hatched", "a slot that computes nothing"], ["ink", `dashed: no schedule ends before ${bound}`]),
      numbers([number(index + 1), "steps so far"], [number(a.lost), "steps of a slot lost, static", a.lost ? "red" : ""], [number(b.lost), "continuous", b.lost ? "red" : ""], ...(last ? [[mean("static"), "mean latency, static"], [mean("continuous"), "continuous"]] : [])),
    ],
    text: last
      ? `Static batching is done after ${trace.static.makespan} steps, continuous batching after ${trace.continuous.makespan}; no schedule needs fewer than ${bound}.`
      : a.over ? `Step ${index}: static batching was done after step ${trace.static.makespan}.` : `Step ${index}: ${idle[0]} of ${count(slots, "slot")} compute nothing in the static batch while ${count(a.waiting, "request")} ${a.waiting === 1 ? "waits" : "wait"}. ${b.over ? `Continuous batching was done after step ${trace.continuous.makespan}` : `In the continuous batch ${idle[1]} compute nothing, and ${b.waiting} wait${b.waiting === 1 ? "s" : ""}`}.`,
  };
}
