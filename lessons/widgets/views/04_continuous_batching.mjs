// A Gantt chart: one lane per slot, one column per step. Hatched: a slot that computes nothing.

export function steps(trace) {
  return trace.steps.length;
}

/** A distance between ticks that leaves about 60 pixels to each. */
function tick_of(total, width) {
  const rough = (total * 60) / width;
  return [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((n) => n >= rough) ?? 2000;
}

export function draw(trace, index, kit) {
  const { svg, rect, text, line, number, numbers, legend, color, count } = kit;
  const { steps: all, spans, outputs, makespan, lower_bound } = trace, { slots, waiting } = all[index];
  const done = index + 1, left = 46, px = (kit.width - left) / makespan, top = 22, high = slots.length > 4 ? 26 : 34, pitch = high + 6;
  const bottom = top + slots.length * pitch, shapes = [];

  slots.forEach((_, slot) => {
    const y = top + slot * pitch;
    shapes.push(text(0, y + high / 2 + 4, `slot ${slot}`, "small soft"));
    shapes.push(rect(left, y, makespan * px, high, "free"), rect(left, y, done * px, high, "hatch grey"));
  });
  let finished = 0, busy = 0;
  spans.forEach(([slot, start, stop], i) => {
    if (start >= done) return;
    const y = top + slot * pitch, n = Math.min(stop, done) - start, w = n * px;
    finished += stop <= done;
    busy += n;
    shapes.push(rect(left + start * px, y, w - (w > 3 ? 1 : 0), high, `box ${color(i)}`, `request ${i}: ${count(outputs[i], "token")}, steps ${start} to ${stop}`));
    if (w > 5 + 6 * String(i).length) shapes.push(text(left + start * px + w / 2, y + high / 2 + 4, i, "middle small"));
  });
  const tick = tick_of(makespan, kit.width - left);
  for (let step = 0; step <= makespan; step += tick) {
    shapes.push(line(left + step * px, bottom, left + step * px, bottom + 4), text(Math.min(left + step * px, kit.width - 3.5 * String(step).length), bottom + 18, step, "small soft middle"));
  }
  const bound = left + lower_bound * px, far = bound > kit.width - 190;
  shapes.push(line(bound, top - 8, bound, bottom, "ink dashed"), text(bound + (far ? -5 : 5), 11, `no schedule ends before ${lower_bound}`, far ? "small end" : "small"));
  if (done < makespan) shapes.push(line(left + done * px, top - 2, left + done * px, bottom, "accent thick"));

  const cells = slots.length * done, last = done === makespan;
  const idle = slots.filter((who) => who === null).length;
  return {
    picture: [
      svg(kit.width, bottom + 24, `Gantt chart of ${slots.length} slots over ${done} of ${makespan} steps; ${busy} of ${cells} cells are used.`, ...shapes),
      legend(["blue", "a request, one token per step"], ["grey hatched", "a slot that computes nothing"]),
      numbers([number(done), last ? "steps, all done" : "steps so far"], [`${Math.floor((100 * busy) / cells)} %`, "of the cells used"], [finished, "requests done"], [waiting, "waiting"],
        ...(last ? [[number(Math.floor(trace.latency_sum / outputs.length)), "steps: mean latency"], [number(trace.latency_max), "longest"]] : [])),
    ],
    text: last
      ? `All ${outputs.length} requests are done after ${makespan} steps, ${makespan === lower_bound ? "which no schedule can beat" : `where ${lower_bound} is the least that any schedule needs`}.`
      : `Step ${index}: ${idle === 0 ? "every slot computes" : `${count(idle, "slot")} of ${slots.length} ${idle === 1 ? "computes" : "compute"} nothing`}, and ${count(waiting, "request")} ${waiting === 1 ? "waits" : "wait"}${idle && waiting ? " all the same" : ""}.`,
  };
}
